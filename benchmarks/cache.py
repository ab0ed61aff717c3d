"""Measures the host time of the operations of `PagedKVCache`.

    python -m benchmarks.cache
    python -m benchmarks.cache --device cuda --batch 64 256 --new 1 --json cache.json

A batch of random users with a history of the same length, each with some new tokens, opens a
step and closes it; nothing is computed. Microseconds per user, medians of the rounds:

    step      `step(users, new_tokens)`, as numpy arrays
    engine    `lookup`, then a step that writes each user's last token again, from lists: what an
              `Engine` does for a batch

With `--device cuda` a step's tables go to the GPU as well, by a copy that the host does not wait
for.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from . import cli

PARSER = cli.parser("cache", __doc__, rounds=400, cases="parts of cases' names")
_add = PARSER.add_argument
_add("--batch", type=int, nargs="+", default=[64], help="users of a step (default: 64)")
_add("--new", type=int, nargs="+", default=[1, 16], help="tokens of each user (default: 1 16)")
_add("--device", help="(default: cuda where there is a GPU, otherwise cpu)")

if __name__ == "__main__":
    PARSER.parse_args()  # --help or a wrong option ends here, before torch is imported

import numpy as np

from hstu_attn.serving import PagedKVCache

from .record import Record, rounded
from .runner import Benchmark, Run

__all__ = ["BENCHMARK", "HISTORIES", "main"]

Int64s = np.ndarray[Any, np.dtype[np.int64]]

USERS = 1024
WARM_UP = 10
HISTORIES = ((256, 16), (4096, 32), (4096, 128))  # tokens, and of a page


@dataclass(frozen=True)
class Step:
    """A batch of users with histories of one length and as many new tokens each."""

    batch: int
    history: int
    page_size: int
    new: int

    @property
    def name(self) -> str:
        """A name such as "64 x 4096, 1 new, pages of 32"."""
        return f"{self.batch} x {self.history}, {self.new} new, pages of {self.page_size}"


def cases(options: argparse.Namespace) -> list[Step]:
    """Returns all histories for each batch and number of new tokens."""
    if options.rounds < 1 or min(*options.batch, *options.new) < 1:
        PARSER.error("--rounds, --batch and --new must be positive")
    return [
        Step(batch, history, page_size, new)
        for batch in options.batch
        for history, page_size in HISTORIES
        for new in options.new
    ]


def measure(run: Run, case: Step) -> Iterator[Record]:
    """Times steps of both kinds by turns, over a cache that has room for all users."""
    batch, new, rounds = case.batch, case.new, run.options.rounds
    rng = np.random.default_rng(0)
    ids = np.unique(rng.integers(2**62, size=max(USERS, 2 * batch)))
    longest = case.history + new * (2 * (WARM_UP + rounds) * batch // len(ids) + 1) * 2
    pages = len(ids) * -(-longest // case.page_size)
    cache = PagedKVCache(1, pages, case.page_size, heads=1, head_dim=1, device=run.device)
    for user in ids:
        with cache.step([user], [case.history]):
            pass

    counts, again = np.full(batch, new), [1] * batch

    def step(users: Int64s) -> None:
        with cache.step(users, counts) as opened:
            opened.upload()

    def engine(users: list[int]) -> None:
        cached = cache.lookup(users).tolist()
        with cache.step(users, [new] * batch, cached_lens=cached, rewritten=again) as opened:
            opened.upload()

    times: dict[str, list[float]] = {"step": [], "engine": []}  # microseconds per user
    for n in range(WARM_UP + rounds):
        users = rng.choice(ids, batch, replace=False)
        calls = functools.partial(step, users), functools.partial(engine, users.tolist())
        for found, call in zip(times.values(), calls, strict=True):
            us = _microseconds(call) / batch
            if n >= WARM_UP:
                found.append(us)
    figures = {
        f"{name}{column}_us": rounded(float(value))
        for name, found in times.items()
        for column, value in (("", statistics.median(found)), ("_p95", np.percentile(found, 95)))
    }
    yield {"case": case.name, **asdict(case), "device": run.device, **figures}


def _microseconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)


BENCHMARK = Benchmark("cache", PARSER, measure, cases, needs_gpu=False)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
