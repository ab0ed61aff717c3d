"""Loads the model, and runs the engine and the HTTP server; serve.py has checked the options."""

from __future__ import annotations

import functools
import gc
import ipaddress
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import FrameType
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI

from hstu_attn.data import EventLog, open_event_log
from hstu_attn.serving import Engine, EventStore, GraphBuckets, PagedKVCache, open_store
from hstu_attn.serving.versions import check_successor
from recommender.connections import LimitedHTTP
from recommender.http import make_app
from recommender.http_access import Access, read_tokens
from recommender.http_probe import read_probe
from recommender.http_schemas import MAX_CANDIDATES
from recommender.models import (
    Models,
    aligned,
    load_served,
    make_cache,
    make_served,
    note_items,
)
from recommender.options import choose_device
from recommender.ranking_data import event_bits
from recommender.saved import SavedModel
from recommender.serve_options import ADMIN_TOKENS, TOKENS, ServeOptions
from recommender.served import ServedRetrieval
from recommender.served_ranking import SavedRanking

__all__ = [
    "Server",
    "add_events",
    "make_engine",
    "make_server",
    "make_store",
    "read_access",
    "serve",
]

LOG = logging.getLogger("recommender.server")
EARLIEST_TIME = 631_152_000
"""The year 1990 in seconds since 1970; current times in minutes or hours are smaller numbers."""
EARLIEST_NOTE = "earliest time"
"""Key of the store's note with the time of the first event of --data, if before 1990."""


def make_engine(
    options: ServeOptions, saved: SavedModel | SavedRanking, store: EventStore | None = None
) -> Engine:
    """Returns an engine for the model, with the users' events from the data.

    A ranking model computes the whole history for each request, so its engine has no cache.

    Args:
        options: the command line.
        saved: the model, with its items numbered as in the store (`aligned`).
        store: the store of the events; None is a store in memory.

    Raises:
        OSError: the file of the probe cannot be read.
        ValueError: the cache is too small for one history, the model's scores are not finite or
            differ from the probe's, or the data do not fit the model.
    """
    served = make_served(saved, MAX_CANDIDATES)
    cache: PagedKVCache | None = None
    graphs: GraphBuckets | bool = False
    if isinstance(served, ServedRetrieval):
        cache = make_cache(options, served)
        # On a GPU, graphs are captured ahead, so that no request waits for compilation or capture.
        graphs = GraphBuckets(ahead=True) if cache.kv_cache.is_cuda else False
    if store is None:
        store = make_store(options, saved, "memory")
    probe = read_probe(options.probe, saved)
    check_successor(served, served, cache, store, probe)
    note_items(saved, store)
    if options.data is not None and store.seeded:
        # The store was seeded with events before, so --data is not read again.
        print("The store has had the events of --data, or of other data; none is added")
    elif options.data is not None:
        log = open_event_log(
            options.data,
            options.cache_dir,
            progress=True,
            layout=options.layout,
            columns=options.columns,
            only=options.only,
        )
        add_events(store, log, saved, int(time.time()) + options.ahead_seconds)
    earliest = earliest_time(options, store)
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
        time_range=lambda: (earliest, int(time.time()) + options.ahead_seconds),
        # `aligned` has checked that all item numbers below num_items are items of this model.
        skip_unknown_items=True,
    )


def make_store(
    options: ServeOptions, saved: SavedModel | SavedRanking, place: str | None = None
) -> EventStore:
    """Opens the store at `place`; None is the store that the options name.

    Raises:
        ImportError: the store is Redis, and its package is not installed.
        OSError, ValueError: the store cannot be created, is damaged or in use, or is no store.
        StoreError: Redis does not answer.
    """
    place = place or options.store or str(options.model.with_name("events.sqlite"))
    if isinstance(saved, SavedRanking):  # has no cache, so histories need not be cut ahead
        return open_store(place, saved.model.config.max_history, 0, max_users=options.max_users)
    return open_store(place, saved.model.max_seq_len, max_users=options.max_users)


def earliest_time(options: ServeOptions, store: EventStore) -> int:
    """Returns the earliest time of an accepted event, from the option or the store's --data."""
    if options.earliest_time is not None:
        return options.earliest_time
    earliest = int(store.note(EARLIEST_NOTE) or EARLIEST_TIME)
    if earliest < EARLIEST_TIME:
        LOG.warning(
            "Events from %d on are accepted, as --data has; --earliest-time names another time",
            earliest,
        )
    return earliest


def add_events(
    store: EventStore, log: EventLog, saved: SavedModel | SavedRanking, until: int = 2**62
) -> None:
    """Stores each user's latest events, except events on items that the model does not know.

    A store is seeded only once: later it has newer events, and users may have been deleted. Events
    after the time `until` are left out, too, since earlier new events would then be refused.

    Raises:
        ValueError: the data's ids are text and the model's ids are numbers, or vice versa; or a
            ranking model was trained with actions that differ from the data's.
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
    # The store may number the items in another order than that of their ids.
    order = np.argsort(saved.item_ids)
    sorted_ids = saved.item_ids[order]

    def histories() -> Iterator[tuple[int | str, np.ndarray[Any, Any]]]:
        ends = log.offsets[1:]
        for user, start, end in zip(log.source_user_ids, log.offsets, ends, strict=False):
            latest = slice(max(start, end - store.max_events), end)
            ids = item_ids[log.items[latest]]
            places = np.searchsorted(sorted_ids, ids).clip(max=len(sorted_ids) - 1)
            known = (sorted_ids[places] == ids) & (log.timestamps[latest] <= until)
            columns = order[places[known]], log.timestamps[latest][known], bits[latest][known]
            yield user, np.stack(columns, axis=1, dtype=np.int64)

    if late := np.count_nonzero(log.timestamps > until):
        LOG.warning("--data: left out %d events whose times are later than %d", late, until)
    earliest = int(log.timestamps.min(initial=EARLIEST_TIME))
    store.set_note(EARLIEST_NOTE, str(max(0, earliest)).encode())
    store.seed(histories())
    print(f"Users with events: {len(store):,}")


class Server(uvicorn.Server):
    """A server that can be drained: at SIGTERM, /ready returns 503, and it waits before it stops.

    Args:
        config: the configuration of uvicorn.
        app: the application; while its `state.draining` is true, /ready returns 503.
        drain_seconds: how long requests are accepted after SIGTERM. Requests that have arrived are
            answered in any case. A second signal, or SIGINT, stops the server without this wait.
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


def read_access(options: ServeOptions) -> Access:
    """Returns the tokens of clients and administrators.

    Raises:
        OSError: a file of tokens cannot be read.
        ValueError: a file or an environment variable has no token, or one that is not valid.
    """
    return Access(
        read_tokens(options.token_file, TOKENS),
        read_tokens(options.admin_token_file, ADMIN_TOKENS),
    )


def make_server(
    options: ServeOptions,
    engine: Engine,
    saved: SavedModel | SavedRanking,
    models: Models | None = None,
) -> Server:
    """Returns the HTTP server of an engine, within the limits of the options.

    Raises:
        OSError, ValueError: as `read_access`.
    """
    access = read_access(options)
    if access.is_open and not is_loopback(options.host):
        print(
            f"NOTE: whoever reaches {options.host} may ask; --token-file names tokens",
            file=sys.stderr,
        )
    app = make_app(engine, saved, options.timeout, access, options.max_body_bytes, models)
    config = uvicorn.Config(
        app,
        http=functools.partial(  # type: ignore[arg-type]  # is called as the class would be
            LimitedHTTP,
            arrival_timeout=options.timeout,
            max_connections=options.max_connections,
        ),
        ws="none",
        log_level="warning",
        # Otherwise any process on this machine could claim any client address.
        proxy_headers=options.trusted_proxies is not None,
        forwarded_allow_ips=options.trusted_proxies,
        timeout_graceful_shutdown=int(options.timeout) + 5,
    )
    return Server(config, app, options.drain_seconds)


def is_loopback(host: str) -> bool:
    """Returns whether an address is reached from this machine alone; False for unknown names."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def change_by_signals(models: Models) -> None:
    """Makes SIGHUP load the model's file again, and SIGUSR2 swap the previous model back in.

    NOTE: swaps run in threads of their own, since the main thread serves requests meanwhile.
    """

    def change(what: Callable[[], object], done: str) -> None:
        try:
            what()
        except Exception as error:
            LOG.error("The model has not been changed: %s", error)
        else:
            LOG.warning(done)

    for number, what, done in (
        (signal.SIGHUP, models.load_and_swap, "The new model has taken over"),
        (signal.SIGUSR2, models.roll_back, "The model of before has taken over"),
    ):
        thread = functools.partial(threading.Thread, target=change, args=(what, done), daemon=True)
        signal.signal(number, lambda *_, thread=thread: thread().start())


def serve(options: ServeOptions, listener: socket.socket) -> None:
    """Serves until SIGTERM or SIGINT; requests that have arrived by then are answered.

    Args:
        options: the command line.
        listener: a bound socket, which listens once requests can be answered.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # raised again once uvicorn is done
        signal.signal(number, lambda *_: sys.exit(0))
    device = choose_device(options.device)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    saved = load_served(options.model, options.bf16, device)
    with make_store(options, saved) as store, ExitStack() as stack:
        saved = aligned(saved, store)
        engine = stack.enter_context(make_engine(options, saved, store))
        models = Models(options, saved, engine, MAX_CANDIDATES)
        change_by_signals(models)
        server = make_server(options, engine, saved, models)
        # A full garbage collection walks over every object of torch and of the users' events, and
        # no request is answered meanwhile. Frozen objects are left out of it.
        gc.collect()
        gc.freeze()
        listener.listen()
        address = f"http://{options.host}:{listener.getsockname()[1]}"
        print(f"Serving {options.model} on {device.type} at {address}", flush=True)
        server.run(sockets=[listener])
