r"""Loads an `Engine` without a server.

    python -m benchmarks.engine --json engine.json
    python -m benchmarks.engine --layers 2 --width 64 --head-dim 16 --history 128 --seconds 2

A ranking model with random weights and without a relative bias, in bf16, scores candidates for
users whose histories are cached. One thread sends all requests, as the event loop of a server does,
each with one new event of a random user, and the next one whenever one is answered. The engine runs
with its steps captured in CUDA graphs and without, by turns; what capturing took is told, and not
in the times. The thread shares a process with the engine, and so its interpreter lock.

    python -m benchmarks.engine --soak 1000000 --layers 1 --width 16 --heads 1 --head-dim 16 \
      --history 24 --candidates 4 --users 4000 --device cpu

answers that many requests instead, and tells the resident memory of the process after each
hundredth of them. The pages hold a quarter of the users, and the store half of them, so that users
are evicted and forgotten all the time, and histories are cut.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import replace

from . import cli

PARSER = cli.parser("engine", __doc__, concurrency=(1, 8, 32, 64))
SIZES = {"layers": 8, "width": 512, "heads": 4, "head_dim": 128, "history": 2048}
SIZES |= {"candidates": 128, "users": 256, "max_batch_size": 32}
_add = PARSER.add_argument
for _name, _default in SIZES.items():
    _option = f"--{_name.replace('_', '-')}"
    _add(_option, type=int, default=_default, help=f"(default: {_default})")
_add("--soak", type=int, default=0, metavar="REQUESTS", help="watch the memory (default: no)")
_add("--device", help="(default: cuda where there is a GPU, otherwise cpu)")

if __name__ == "__main__":
    PARSER.parse_args()  # --help or a wrong option ends here, before torch is imported

import numpy as np
import torch
from torch import Tensor, nn

from hstu_attn.layer import HSTULayerConfig, HSTUStack
from hstu_attn.serving import Engine, EngineStats, GraphBuckets, MemoryStore, PagedKVCache, Rows

from .load import Load, keep_futures_under_way, resident_mib
from .record import Record, rounded
from .runner import Benchmark, Run

__all__ = ["BENCHMARK", "Ranking", "main", "make_engine"]

ITEMS = 10_000
PAGE_SIZE = 64
SHORTEST = 0.5  # length of the shortest history, as a fraction of the longest
WARM_UP_SECONDS = 1.0
CANDIDATE_LISTS = 1024
FILL_BATCH = 16
KINDS = ("hit_tokens", "new_tokens", "recomputed_tokens")  # how the tokens of events were found


def describe(run: Run) -> Record:
    """Returns the sizes, and the device."""
    return {**{name: getattr(run.options, name) for name in SIZES}, "device": run.device}


def longest(options: argparse.Namespace) -> int:
    """Returns the length to which a history may grow, so that none is cut while it is measured."""
    return int(2 * options.history)


class Ranking(nn.Module):
    """A `ServedModel` with embeddings of items and positions, layers, and a score per candidate."""

    num_items, num_actions = ITEMS, 1
    reads_times, candidates_are_rows = False, True

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        config = HSTULayerConfig.stu(
            embedding_dim=options.width,
            num_heads=options.heads,
            hidden_dim=options.head_dim,
            attention_dim=options.head_dim,
        )
        self.max_history = longest(options)
        self.item = nn.Embedding(ITEMS, options.width)
        self.position = nn.Embedding(self.max_history + 1, options.width)
        self.stack = HSTUStack(replace(config, scaling_seqlen=self.max_history), options.layers)
        self.head = nn.Linear(options.width, 1)

    def embed(self, rows: Rows) -> Tensor:
        """Returns the rows `(total, width)`."""
        x: Tensor = self.item(rows.items) + self.position(rows.positions)
        return x

    def score(self, states: Tensor, candidates: Tensor) -> Tensor:
        """Returns the scores `(n,)` fp32."""
        scores: Tensor = self.head(states).squeeze(1)
        return scores.float()


def make_engine(model: Ranking, run: Run, graphs: bool) -> Engine:
    """Makes an engine with all users' histories in its cache."""
    options = run.options
    rng = np.random.default_rng(0)
    store = MemoryStore(options.users, longest(options))
    shortest = max(1, int(SHORTEST * options.history))
    for user, length in enumerate(rng.integers(shortest, options.history + 1, options.users)):
        items = rng.integers(ITEMS, size=length)
        store.add(user, np.stack([items, np.arange(length), np.zeros_like(items)], axis=1))
    pages_each = -(-longest(options) // PAGE_SIZE)
    cache = PagedKVCache(
        options.layers,
        options.users * pages_each,
        PAGE_SIZE,
        options.heads,
        options.head_dim,
        torch.bfloat16,
        run.device,
    )
    engine = Engine(
        model,
        cache,
        store=store,
        max_batch_size=options.max_batch_size,
        max_wait=0.0,
        max_queue=10**6,
        max_candidates=options.candidates,
        graphs=GraphBuckets(ahead=True) if graphs else False,
    )
    for first in range(0, options.users, FILL_BATCH):
        users = range(first, min(first + FILL_BATCH, options.users))
        for future in [engine.submit_score(user, [], []) for user in users]:
            future.result()
    return engine


def drive(engine: Engine, options: argparse.Namespace, concurrency: int) -> Load[EngineStats]:
    """Keeps `concurrency` requests in flight."""
    rng = random.Random(concurrency)
    # Drawing a list takes so long that it would be seen in the times, so it is done beforehand.
    drawn = np.random.default_rng(concurrency).integers(
        ITEMS, size=(CANDIDATE_LISTS, options.candidates)
    )

    def send() -> Future[Tensor]:
        event = (rng.randrange(ITEMS), time.monotonic_ns())
        candidates = drawn[rng.randrange(CANDIDATE_LISTS)]
        return engine.submit_score(rng.randrange(options.users), [event], candidates)

    return keep_futures_under_way(
        send,
        engine.stats,
        concurrency=concurrency,
        seconds=options.seconds,
        warm_up=WARM_UP_SECONDS,
    )


def soak(model: Ranking, run: Run) -> Record:
    """Answers `--soak` requests, of which some hundred are under way at a time."""
    options, rng = run.options, np.random.default_rng(0)
    pages = options.users // 4 * -(-longest(options) // PAGE_SIZE)
    shape = options.layers, pages, PAGE_SIZE, options.heads, options.head_dim
    cache = PagedKVCache(*shape, torch.bfloat16, run.device)
    store = MemoryStore(options.users // 2, longest(options))
    memory: list[float] = []
    under_way: deque[Future[Tensor]] = deque()
    count = options.max_batch_size * 4
    with Engine(
        model, cache, store=store, max_batch_size=options.max_batch_size, max_wait=0.0
    ) as engine:
        start = time.perf_counter()
        for number in range(options.soak):
            user = int(rng.integers(options.users))
            event = (int(rng.integers(ITEMS)), number)
            candidates = rng.integers(ITEMS, size=options.candidates)
            under_way.append(engine.submit_score(user, [event], candidates))
            if len(under_way) == count:
                under_way.popleft().result()
            if (number + 1) % max(1, options.soak // 100) == 0:
                memory.append(round(resident_mib(), 1))
                print(f"{number + 1} requests: {memory[-1]} MiB", flush=True)
        for future in under_way:
            future.result()
        seconds = time.perf_counter() - start
        stats, cached = engine.stats(), cache.stats()
    return {
        "soak": options.soak,
        "answered": stats.completed,
        "seconds": rounded(seconds),
        "qps": rounded(stats.completed / seconds),
        "evictions": cached.evictions,
        "memory_mib": memory,
    }


def check(engines: Sequence[Engine], candidates: int) -> None:
    """Checks that the answers of all engines are equal up to rounding."""
    for user in (0, 1):
        plain, captured = (engine.score(user, [], range(candidates)) for engine in engines)
        torch.testing.assert_close(captured, plain, rtol=0.05, atol=0.05)


def measure(run: Run, case: str) -> Iterator[Record]:
    """Measures each concurrency, with graphs and without."""
    options = run.options
    counts = [getattr(options, name) for name in SIZES]
    if options.seconds <= 0 or min(*counts, *options.concurrency) < 1:
        PARSER.error("--seconds and all counts must be positive")
    torch.manual_seed(0)
    model = Ranking(options).to(run.device, torch.bfloat16).eval()
    if options.soak:
        yield soak(model, run)
        return
    with ExitStack() as stack:
        engines = []
        for graphs in (False, True):
            start = time.perf_counter()
            engines.append(stack.enter_context(closing(make_engine(model, run, graphs))))
            took = time.perf_counter() - start
            print(f"{'with' if graphs else 'without'} graphs: ready after {took:.1f} s", flush=True)
        check(engines, options.candidates)
        for concurrency in options.concurrency:
            for graphs, engine in zip((False, True), engines, strict=True):
                load = drive(engine, options, concurrency)
                changes = {
                    name: getattr(load.after, name) - getattr(load.before, name)
                    for name in ("batches", "completed", "graph_batches", *KINDS)
                }
                batches = changes["batches"]
                yield {
                    "graphs": graphs,
                    "concurrency": concurrency,
                    **load.figures(),
                    # The number of requests that the engine computed together.
                    "mean_batch": rounded(changes["completed"] / batches),
                    # The fraction of the batches that a graph computed.
                    "graph_share": rounded(changes["graph_batches"] / batches),
                    # The fraction of the events' tokens that the cache had.
                    "hit_share": rounded(
                        changes["hit_tokens"] / sum(changes[kind] for kind in KINDS)
                    ),
                }


BENCHMARK = Benchmark("engine", PARSER, measure, describe=describe, needs_gpu=False)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
