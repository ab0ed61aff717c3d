"""Measures the host time of the operations of `PagedKVCache`.

    python -m benchmarks.cache
    python -m benchmarks.cache --device cuda --batch 64 256 --new 1 --json cache.json

A batch of random users with a history of the same length, each with so many new tokens, opens a
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
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cache", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[64], help="users of a step (default 64)"
    )
    parser.add_argument(
        "--new", type=int, nargs="+", default=[1, 16], help="tokens of each user (default 1 16)"
    )
    parser.add_argument("--device", help="(default: cuda where there is a GPU, otherwise cpu)")
    parser.add_argument("--rounds", type=int, default=400, help="steps of each kind (default 400)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    return parser


if __name__ == "__main__":
    _parser().parse_args()  # --help or a wrong option ends here, before torch is imported

import numpy as np
import torch

from hstu_attn.serving import PagedKVCache

from .report import environment, print_environment, rounded, text_table, write_records

__all__ = ["Cost", "main", "measure"]

Int64s = np.ndarray[Any, np.dtype[np.int64]]

USERS = 1024
WARM_UP = 10
HISTORIES = ((256, 16), (4096, 32), (4096, 128))  # tokens, and of a page


@dataclass(frozen=True)
class Cost:
    """Of one kind of step; times in microseconds per user."""

    batch: int
    history: int
    page_size: int
    new: int
    device: str
    step_us: float
    step_p95_us: float
    engine_us: float
    engine_p95_us: float


class Times(NamedTuple):
    """Microseconds per user in each round."""

    step: list[float]
    engine: list[float]


def measure(
    batch: int, history: int, page_size: int, new: int, device: str, rounds: int, seed: int = 0
) -> Cost:
    """Steps of both kinds by turns, over a cache that has room for all users."""
    rng = np.random.default_rng(seed)
    ids = np.unique(rng.integers(2**62, size=max(USERS, 2 * batch)))
    longest = history + new * (2 * (WARM_UP + rounds) * batch // len(ids) + 1) * 2
    pages = len(ids) * -(-longest // page_size)
    cache = PagedKVCache(1, pages, page_size, heads=1, head_dim=1, device=device)
    for user in ids:
        with cache.step([user], [history]):
            pass

    counts, again = np.full(batch, new), [1] * batch

    def step(users: Int64s) -> None:
        with cache.step(users, counts):
            pass

    def engine(users: list[int]) -> None:
        cached = cache.lookup(users).tolist()
        with cache.step(users, [new] * batch, cached_lens=cached, rewritten=again):
            pass

    times = Times([], [])
    for n in range(WARM_UP + rounds):
        users = rng.choice(ids, batch, replace=False)
        calls = functools.partial(step, users), functools.partial(engine, users.tolist())
        for found, call in zip(times, calls, strict=True):
            us = _microseconds(call) / batch
            if n >= WARM_UP:
                found.append(us)
    figures = {
        f"{name}{column}_us": rounded(float(value)) or 0.0
        for name, found in times._asdict().items()
        for column, value in (
            ("", statistics.median(found)),
            ("_p95", np.percentile(found, 95)),
        )
    }
    return Cost(batch, history, page_size, new, device, **figures)


def _microseconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table, and writes it."""
    parser = _parser()
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.rounds < 1 or min(*options.batch, *options.new) < 1:
        parser.error("--rounds, --batch and --new must be positive")
    described = environment("python -m benchmarks.cache")
    if options.device == "cuda":
        described["gpu"] = torch.cuda.get_device_name()
    print_environment(described)
    costs = [
        measure(batch, history, page_size, new, options.device, options.rounds)
        for batch in options.batch
        for history, page_size in HISTORIES
        for new in options.new
    ]
    records = [asdict(cost) for cost in costs]
    table = [[*records[0]], *([str(value) for value in record.values()] for record in records)]
    print("\n".join(text_table(table)))
    if options.json:
        write_records(options.json, [{**described, **record} for record in records])


if __name__ == "__main__":
    main()
