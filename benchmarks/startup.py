"""Times the start of the example's server with stores of many users.

    python -m benchmarks.startup
    python -m benchmarks.startup --stores sqlite redis --users 0 1000000 --json startup.json

Fills a store with the given number of users, each with a few events, and starts `examples/serve.py`
with it on the CPU, with the model that `make demo` has trained. It times the start until the server
reports that it listens, and then the answer to a first event of one of the users. A first start,
which is not timed, writes the model's items into the store. The Redis server already runs when the
example's server starts.
"""

from __future__ import annotations

import http.client
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from . import cli

PARSER = cli.parser("startup", __doc__, rounds=3)
MODEL, DATA = "runs/retrieval/best.pt", "runs/synthetic-movielens/ratings.dat"
_add = PARSER.add_argument
_add("--model", type=Path, default=Path(MODEL), help=f"(default: {MODEL})")
_add("--data", type=Path, default=Path(DATA), help=f"(default: {DATA})")
_add("--stores", nargs="+", choices=("sqlite", "redis"), default=("sqlite",),
     help="(default: sqlite)")  # fmt: skip
_add("--users", type=int, nargs="+", default=(0, 10**6), help="(default: 0 1000000)")
_add("--events", type=int, default=10, help="of each user (default: 10)")

if __name__ == "__main__":
    PARSER.parse_args()  # --help or a wrong option ends here, before torch is imported

import numpy as np
from numpy.typing import NDArray

from hstu_attn.data import open_event_log
from hstu_attn.serving import open_store

from .record import Record, rounded
from .runner import Benchmark
from .serving import redis_server, running_server
from .timing import Run

__all__ = ["BENCHMARK", "fill", "main"]

FIRST_TIME, PAUSE = 1_700_000_000, 3600  # time of a user's first event, and gap to the next [s]


def fill(place: str, users: int, events: int, items: int) -> None:
    """Makes a store in which the users `0 .. users - 1` have events on random items.

    Args:
        place: the path or URL, as for `open_store`.
        users: the number of users.
        events: the number of events of each user.
        items: the number of items.
    """
    rng = np.random.default_rng(0)
    times = FIRST_TIME + PAUSE * np.arange(events)

    def histories() -> Iterator[tuple[int, NDArray[np.int64]]]:
        for user in range(users):
            yield user, np.stack([rng.integers(items, size=events), times, 0 * times], axis=1)

    with open_store(place, max(events, 2)) as store:
        store.seed(histories())


def start(model: Path, data: Path, place: str, user: int, item: int | str) -> tuple[float, float]:
    """Returns the seconds until the server is ready, and the seconds of its answer to an event.

    Raises:
        RuntimeError: if the server does not start, or does not answer.
    """
    begin = time.perf_counter()
    with running_server(model, data, "cpu", ["--store", place]) as port:
        ready = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        event = {"item": item, "time": int(time.time())}
        body = json.dumps({"user": user, "events": [event], "k": 10})
        connection.request("POST", "/recommend", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode()
        answered = time.perf_counter()
        connection.close()
    if response.status != 200:
        raise RuntimeError(f"expected an answer, got {response.status} {text}")
    return ready - begin, answered - ready


def measure(run: Run, case: str) -> Iterator[Record]:
    """Yields a record of each number of users in each kind of store."""
    options = run.options
    if min(options.users) < 0 or min(options.events, options.rounds) < 1:
        PARSER.error("--users must not be negative; --events and --rounds must be positive")
    model, data = options.model.resolve(), options.data.resolve()
    items = open_event_log(data).source_item_ids
    for kind in options.stores:
        for users in options.users:
            with ExitStack() as stack:
                if kind == "redis":
                    place = stack.enter_context(redis_server())
                else:
                    folder = stack.enter_context(tempfile.TemporaryDirectory())
                    place = f"{folder}/events.sqlite"
                begin = time.perf_counter()
                fill(place, users, options.events, len(items))
                filled = time.perf_counter() - begin
                rounds = range(options.rounds + 1)
                times = [start(model, data, place, users // 2, items[0]) for _ in rounds][1:]
            ready, first = (statistics.median(x) for x in zip(*times, strict=True))
            yield {
                "store": kind,
                "users": users,
                "events": users * options.events,
                "fill_seconds": rounded(filled),
                "ready_seconds": rounded(ready),
                "first_ms": rounded(1e3 * first),
            }


BENCHMARK = Benchmark("startup", PARSER, measure, needs_gpu=False)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
