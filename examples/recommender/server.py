"""Loads the model, and runs the engine and the HTTP server; serve.py has checked the options."""

from __future__ import annotations

import functools
import gc
import ipaddress
import signal
import socket
import sys
import time
from types import FrameType
from typing import Any

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI

from hstu_attn.data import EventLog, open_event_log
from hstu_attn.serving import Engine, EventStore, GraphBuckets, MemoryStore, PagedKVCache
from recommender.connections import LimitedHTTP
from recommender.http import make_app
from recommender.http_access import Access, read_tokens
from recommender.http_schemas import MAX_CANDIDATES
from recommender.options import choose_device
from recommender.ranking_data import event_bits
from recommender.saved import SavedModel, load_model
from recommender.serve_options import ADMIN_TOKENS, TOKENS, ServeOptions
from recommender.served import ServedRetrieval
from recommender.served_ranking import (
    SavedRanking,
    ServedRanking,
    is_ranking_model,
    load_saved_ranking,
)

__all__ = ["Server", "add_events", "load_served", "make_engine", "make_server", "serve"]


def load_served(options: ServeOptions, device: torch.device) -> SavedModel | SavedRanking:
    """Reads the model, of whichever kind it is.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else.
    """
    dtype = torch.bfloat16 if options.bf16 or device.type == "cuda" else None
    if is_ranking_model(options.model):
        return load_saved_ranking(options.model, device, dtype)
    return load_model(options.model, device, dtype, fp8=False)


def make_engine(options: ServeOptions, saved: SavedModel | SavedRanking) -> Engine:
    """Returns an engine for the model, with the users' events of the data.

    A ranking model computes each request whole, so its engine has no cache.

    Raises:
        ValueError: the cache is too small for one history, or the data are not those of the model.
    """
    served: ServedRetrieval | ServedRanking
    cache: PagedKVCache | None = None
    graphs: GraphBuckets | bool = False
    if isinstance(saved, SavedRanking):
        served = ServedRanking(saved, MAX_CANDIDATES)
    else:
        served = ServedRetrieval(saved.model)
        cache = make_cache(options, served)
        # On a GPU, no request waits for kernels to be compiled and steps to be captured.
        graphs = GraphBuckets(ahead=True) if cache.kv_cache.is_cuda else False
    drop = 0 if cache is None else None  # without a cache, histories need not be cut ahead
    store = MemoryStore(options.max_users, served.max_history, drop)
    if options.data is not None:
        add_events(store, open_event_log(options.data, options.cache_dir, progress=True), saved)
    return Engine(
        served,
        cache,
        store=store,
        max_batch_size=options.max_batch_size,
        max_wait=options.max_wait_ms / 1000,
        max_queue=options.max_queue,
        max_queue_seconds=options.max_queue_ms / 1000,
        max_candidates=MAX_CANDIDATES,
        graphs=graphs,
    )


def make_cache(options: ServeOptions, served: ServedRetrieval) -> PagedKVCache:
    """Returns a cache of the size that the options name.

    Raises:
        ValueError: it is too small for one history.
    """
    config, dtype = served.stack.config, served.model.compute_dtype
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
    device = served.model.item_embedding.weight.device
    return PagedKVCache(
        layers, pages, options.page_size, config.num_heads, config.dqk, dtype, device
    )


def add_events(store: EventStore, log: EventLog, saved: SavedModel | SavedRanking) -> None:
    """Stores each user's latest events, but for those on items that the model does not know.

    Raises:
        ValueError: ids of the data are text and those of the model numbers, or the other way round;
            or a ranking model was trained with other actions than those of the data.
    """
    bits: np.ndarray[Any, Any] = np.broadcast_to(np.uint8(0), log.num_events)
    if isinstance(saved, SavedRanking):
        actions, bits = event_bits(log)
        if actions != saved.model.config.actions:
            raise ValueError(
                f"--data: expected events with the actions {', '.join(saved.model.config.actions)}"
                f", as the model's; got {', '.join(actions)}"
            )
    item_ids = np.array(log.source_item_ids)
    if item_ids.dtype.kind != saved.item_ids.dtype.kind:
        got, expected = ("numbers", "text") if saved.has_text_ids else ("text", "numbers")
        raise ValueError(f"--data: expected ids that are {expected}, as the model's; got {got}")
    for user, start, end in zip(log.source_user_ids, log.offsets, log.offsets[1:], strict=False):
        latest = slice(max(start, end - store.max_events), end)
        ids = item_ids[log.items[latest]]
        items = np.searchsorted(saved.item_ids, ids).clip(max=len(saved.item_ids) - 1)
        known = saved.item_ids[items] == ids
        columns = items[known], log.timestamps[latest][known], bits[latest][known]
        store.add(user, np.stack(columns, axis=1, dtype=np.int64))
    print(f"Users with events: {len(store):,}")


class Server(uvicorn.Server):
    """A server that can be drained: SIGTERM first tells it by /ready, then waits, then stops it.

    Args:
        config: uvicorn's.
        app: the application; its `state.draining` is what /ready tells.
        drain_seconds: how long requests are accepted after SIGTERM. Those that have arrived are
            answered in any case. A second signal, or SIGINT, does not wait.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI, drain_seconds: float) -> None:
        super().__init__(config)
        self.app = app
        self.drain_seconds = drain_seconds
        self.stop_at: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        again = self.stop_at is not None
        self.app.state.draining = True
        super().handle_exit(sig, frame)
        if sig == signal.SIGTERM and not again and self.drain_seconds:
            self.should_exit = False
            self.stop_at = time.monotonic() + self.drain_seconds

    async def on_tick(self, counter: int) -> bool:
        if self.stop_at is not None and time.monotonic() >= self.stop_at:
            self.should_exit = True
        return await super().on_tick(counter)


def make_server(options: ServeOptions, engine: Engine, saved: SavedModel | SavedRanking) -> Server:
    """Returns the HTTP server of an engine, within the limits of the options.

    Raises:
        OSError: a file of tokens cannot be read.
        ValueError: there is no token in it, or one that cannot be used.
    """
    access = Access(
        read_tokens(options.token_file, TOKENS),
        read_tokens(options.admin_token_file, ADMIN_TOKENS),
    )
    if access.is_open and not is_loopback(options.host):
        print(
            f"NOTE: whoever reaches {options.host} may ask; --token-file names tokens",
            file=sys.stderr,
        )
    app = make_app(engine, saved, options.timeout, access, options.max_body_bytes)
    config = uvicorn.Config(
        app,
        http=functools.partial(  # type: ignore[arg-type]  # is called as the class would be
            LimitedHTTP,
            arrival_timeout=options.timeout,
            max_connections=options.max_connections,
        ),
        ws="none",
        log_level="warning",
        # Else whoever is on this machine could name any client.
        proxy_headers=options.trusted_proxies is not None,
        forwarded_allow_ips=options.trusted_proxies,
        timeout_graceful_shutdown=int(options.timeout) + 5,
    )
    return Server(config, app, options.drain_seconds)


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone; a name is not known to be."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def serve(options: ServeOptions, listener: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT; requests that have arrived by then are answered.

    Args:
        options: the command line.
        listener: bound; accepts connections once they can be answered.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # raised again once uvicorn is done
        signal.signal(number, lambda *_: sys.exit(0))
    device = choose_device(options.device)
    saved = load_served(options, device)
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
