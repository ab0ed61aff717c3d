"""Serves the model that train_retrieval.py saved, over HTTP.

    python examples/serve.py                                        # users start without events
    python examples/serve.py --data ml-1m/ratings.dat               # with those of the data set
    curl localhost:8000/recommend --json '{"user": 1, "events": [{"item": 1, "time": 978300760}]}'

Users and items have the data set's ids. What a user does arrives with the requests and is kept in
memory, as are keys and values of the layers, so that each event is computed about once. See
recommender/http.py for the paths and the limits.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from pathlib import Path

import numpy as np
import torch
import uvicorn
from recommender.http import MAX_CANDIDATES, make_app
from recommender.saved import SavedModel, load_model
from recommender.served import ServedRetrieval

from hstu_attn.data import EventLog, open_event_log
from hstu_attn.serving import Engine, EventStore, PagedKVCache


class Options(argparse.Namespace):
    """The command line."""

    model: Path
    data: Path | None
    cache_dir: Path | None
    host: str
    port: int
    device: str
    bf16: bool
    cache_mib: int
    page_size: int
    max_users: int
    max_batch_size: int
    max_wait_ms: float
    max_queue: int
    timeout: float


def parse_arguments(arguments: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--model", type=Path, default=Path("runs/retrieval/best.pt"), help="the trained model"
    )
    parser.add_argument(
        "--data", type=Path, help="MovieLens ratings.dat or ratings.csv: what users did before"
    )
    parser.add_argument(
        "--cache-dir", type=Path, help="preprocessed data go here; None is beside the data"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="0 is any that is free")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda where it has the kernels")
    parser.add_argument("--bf16", action="store_true", help="compute the layers in bfloat16")
    parser.add_argument("--cache-mib", type=int, default=256, help="for keys and values")
    parser.add_argument("--page-size", type=int, default=32, help="events in a page of the cache")
    parser.add_argument("--max-users", type=int, default=10**6, help="whose events are kept")
    parser.add_argument("--max-batch-size", type=int, default=32, help="requests in a batch")
    parser.add_argument(
        "--max-wait-ms", type=float, default=2.0, help="how long a request waits for others"
    )
    parser.add_argument("--max-queue", type=int, default=1024, help="requests that may wait")
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds for a request")
    options = parser.parse_args(arguments, namespace=Options())
    if options.timeout <= 0:
        parser.error("--timeout must be positive")
    return options


def make_engine(options: Options, saved: SavedModel) -> Engine:
    """An engine for the model, with the users' events of the data."""
    served = ServedRetrieval(saved.model)
    config, dtype = served.stack.config, saved.model.compute_dtype
    row_bytes = 2 * len(served.stack.layers) * config.num_heads * config.dqk * dtype.itemsize
    cache = PagedKVCache(
        len(served.stack.layers),
        options.cache_mib * 2**20 // (row_bytes * options.page_size),
        options.page_size,
        config.num_heads,
        config.dqk,
        dtype,
        options.device,
    )
    store = EventStore(options.max_users, served.max_history)
    if options.data is not None:
        add_events(store, open_event_log(options.data, options.cache_dir, progress=True), saved)
    return Engine(
        served,
        cache,
        store=store,
        max_batch_size=options.max_batch_size,
        max_wait=options.max_wait_ms / 1000,
        max_queue=options.max_queue,
        max_candidates=MAX_CANDIDATES,
    )


def add_events(store: EventStore, log: EventLog, saved: SavedModel) -> None:
    """Stores each user's latest events, but for those on items that the model does not know."""
    for user, start, end in zip(log.user_ids, log.offsets, log.offsets[1:], strict=False):
        latest = slice(max(start, end - store.max_events), end)
        ids = log.item_ids[log.items[latest]]
        items = np.searchsorted(saved.item_ids, ids).clip(max=len(saved.item_ids) - 1)
        known = saved.item_ids[items] == ids
        store.add(int(user), np.stack([items[known], log.timestamps[latest][known]], axis=1))
    print(f"Users with events: {len(store):,}")


def listen(host: str, port: int) -> socket.socket:
    """A socket that accepts connections.

    NOTE: asyncio turns off Nagle's algorithm only where the socket names its protocol, which
    socket.create_server leaves out. With it, answers wait some 40 ms for the client.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def serve(options: Options) -> None:
    """Until SIGTERM or SIGINT; requests that have arrived by then are answered."""
    dtype = torch.bfloat16 if options.bf16 else None
    saved = load_model(options.model, torch.device(options.device), dtype)
    engine = make_engine(options, saved)
    with engine, listen(options.host, options.port) as listener:
        address = f"http://{options.host}:{listener.getsockname()[1]}"
        print(f"Serving {options.model} at {address}", flush=True)
        config = uvicorn.Config(
            make_app(engine, saved, options.timeout),
            log_level="warning",
            timeout_graceful_shutdown=int(options.timeout) + 5,
        )
        for number in (signal.SIGTERM, signal.SIGINT):  # raised again once uvicorn is done
            signal.signal(number, lambda *_: sys.exit(0))
        uvicorn.Server(config).run(sockets=[listener])


def main(arguments: list[str] | None = None) -> int:
    """Runs the server; the exit status is 1 where it cannot be started."""
    try:
        serve(parse_arguments(arguments))
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
