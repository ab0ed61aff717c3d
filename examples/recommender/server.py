"""Loads the model, and runs the engine and the HTTP server; serve.py has checked the options."""

from __future__ import annotations

import functools
import gc
import signal
import socket
import sys

import numpy as np
import torch
import uvicorn

from hstu_attn.data import EventLog, open_event_log
from hstu_attn.serving import Engine, EventStore, GraphBuckets, PagedKVCache
from recommender.connections import LimitedHTTP
from recommender.http import MAX_CANDIDATES, make_app
from recommender.options import choose_device
from recommender.saved import SavedModel, load_model
from recommender.serve_options import ServeOptions
from recommender.served import ServedRetrieval

__all__ = ["add_events", "make_engine", "make_server", "serve"]


def make_engine(options: ServeOptions, saved: SavedModel) -> Engine:
    """Returns an engine for the model, with the users' events of the data.

    Raises:
        ValueError: the cache is too small for one history, or the data are not those of the model.
    """
    served = ServedRetrieval(saved.model)
    config, dtype = served.stack.config, saved.model.compute_dtype
    layers = len(served.stack.layers)
    row_bytes = 2 * layers * config.num_heads * config.dqk * dtype.itemsize
    page_bytes = row_bytes * options.page_size
    pages = options.cache_mib * 2**20 // page_bytes
    needed = -(-served.max_history // options.page_size)
    if pages < needed:
        raise ValueError(
            f"--cache-mib: expected at least {-(-needed * page_bytes // 2**20)}, which holds a "
            f"history of {served.max_history} events; got {options.cache_mib}"
        )
    device = saved.model.item_embedding.weight.device
    cache = PagedKVCache(
        layers, pages, options.page_size, config.num_heads, config.dqk, dtype, device
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
        # On a GPU, no request waits for kernels to be compiled and steps to be captured.
        graphs=GraphBuckets(ahead=True) if device.type == "cuda" else False,
    )


def add_events(store: EventStore, log: EventLog, saved: SavedModel) -> None:
    """Stores each user's latest events, but for those on items that the model does not know.

    Raises:
        ValueError: ids of the data are text and those of the model numbers, or the other way round.
    """
    item_ids = np.array(log.source_item_ids)
    if item_ids.dtype.kind != saved.item_ids.dtype.kind:
        got, expected = ("numbers", "text") if saved.has_text_ids else ("text", "numbers")
        raise ValueError(f"--data: expected ids that are {expected}, as the model's; got {got}")
    for user, start, end in zip(log.source_user_ids, log.offsets, log.offsets[1:], strict=False):
        latest = slice(max(start, end - store.max_events), end)
        ids = item_ids[log.items[latest]]
        items = np.searchsorted(saved.item_ids, ids).clip(max=len(saved.item_ids) - 1)
        known = saved.item_ids[items] == ids
        store.add(user, np.stack([items[known], log.timestamps[latest][known]], axis=1))
    print(f"Users with events: {len(store):,}")


def make_server(options: ServeOptions, engine: Engine, saved: SavedModel) -> uvicorn.Server:
    """Returns the HTTP server of an engine, within the limits of the options."""
    config = uvicorn.Config(
        make_app(engine, saved, options.timeout),
        http=functools.partial(  # type: ignore[arg-type]  # is called as the class would be
            LimitedHTTP,
            arrival_timeout=options.timeout,
            max_connections=options.max_connections,
        ),
        ws="none",
        log_level="warning",
        timeout_graceful_shutdown=int(options.timeout) + 5,
    )
    return uvicorn.Server(config)


def serve(options: ServeOptions, listener: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT; requests that have arrived by then are answered.

    Args:
        options: the command line.
        listener: bound; accepts connections once they can be answered.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # raised again once uvicorn is done
        signal.signal(number, lambda *_: sys.exit(0))
    device = choose_device(options.device)
    dtype = torch.bfloat16 if options.bf16 or device.type == "cuda" else None
    saved = load_model(options.model, device, dtype, fp8=False)
    with make_engine(options, saved) as engine:
        server = make_server(options, engine, saved)
        # A full garbage collection walks over every object of torch and of the users' events, and
        # no request is answered meanwhile. Frozen objects are left out of it.
        gc.collect()
        gc.freeze()
        listener.listen()
        address = f"http://{options.host}:{listener.getsockname()[1]}"
        print(f"Serving {options.model} on {device.type} at {address}", flush=True)
        server.run(sockets=[listener])
