r"""Loads an `Engine` without a server.

    python -m benchmarks.engine --json engine.json
    python -m benchmarks.engine --layers 2 --width 64 --head-dim 16 --history 128 --seconds 2

A ranking model with random weights and without a relative bias, in bf16, scores candidates for
users whose histories are cached. One thread sends all requests, as the event loop of a server does:
each has one new event of a random user, and a new request follows each answer. Engines with and
without CUDA graphs take turns; the time of graph capture is reported separately. The sending thread
runs in the engine's process, and so shares its interpreter lock.

    python -m benchmarks.engine --loads 0.5 0.8 0.95 --concurrency 64 --seconds 20

has requests arrive at random (Poisson), of users drawn from a Zipf distribution. The lengths of
their histories are distributed as in MovieLens 20M, cut at `--history`. First the throughput of an
engine with graphs is measured with `--concurrency` requests in flight (the last of these numbers).
Then 1.5 times as many requests arrive, and the rate of answers under this overload is the capacity.
Then requests arrive at the given fractions of the capacity. An engine never computes two requests
of a user together, so frequent users make its batches smaller. A latency counts from the request's
arrival time. A request that cannot be answered within a second is refused, and counts as failed. In
the middle of one more run at the first load, another thread loads a second model from a file and
replaces the first; the run goes on for half of `--seconds` after the replacement.

    python -m benchmarks.engine --soak 1000000 --layers 1 --width 16 --heads 1 --head-dim 16 \
      --history 24 --candidates 4 --users 4000 --device cpu

answers that many requests instead, and reports the resident memory of the process after each
hundredth of them. The KV cache holds a quarter of the users, and the store half of them, so users
are constantly evicted from the cache and deleted from the store, and histories are truncated.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

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
from numpy.typing import NDArray
from torch import Tensor, nn

from hstu_attn.layer import HSTULayerConfig, HSTUStack
from hstu_attn.serving import (
    DeadlineError,
    Engine,
    EngineStats,
    GraphBuckets,
    MemoryStore,
    OverloadedError,
    PagedKVCache,
    Rows,
)

from .load import (
    PATIENCE,
    Load,
    at_loads,
    keep_futures_under_way,
    resident_mib,
    submit_at_random,
    zipf,
)
from .record import Record, rounded
from .runner import Benchmark
from .timing import Run

__all__ = ["BENCHMARK", "Ranking", "main", "make_engine"]

ITEMS = 10_000
PAGE_SIZE = 64
SHORTEST = 0.5  # length of the shortest history, as a fraction of the longest, without --loads
# The numbers of events of the users of MovieLens 20M, as LensKit's Codex fits them by a lognormal
# distribution (https://codex.lenskit.org/movielens/ML20M/description.html): the shift, the median
# above it, and the deviation of the logarithm.
LOG, LOG_SHIFT, LOG_MEDIAN, LOG_SPREAD = "MovieLens 20M", 19.08, 43.1, 1.61
WARM_UP_SECONDS = 1.0
CHANGE = "the model changes"
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


def lengths(options: argparse.Namespace, rng: np.random.Generator) -> NDArray[np.int64]:
    """Returns the history lengths, int64 `(users,)`; with `--loads`, distributed as in `LOG`."""
    if options.loads:
        drawn = LOG_SHIFT + rng.lognormal(math.log(LOG_MEDIAN), LOG_SPREAD, options.users)
        cut: NDArray[np.int64] = np.minimum(drawn, options.history).astype(np.int64)
        return cut
    shortest = max(1, int(SHORTEST * options.history))
    uniform: NDArray[np.int64] = rng.integers(shortest, options.history + 1, options.users)
    return uniform


def make_engine(model: Ranking, run: Run, graphs: bool) -> Engine:
    """Makes an engine with all users' histories in its cache."""
    options = run.options
    rng = np.random.default_rng(0)
    store = MemoryStore(options.users, longest(options))
    for user, length in enumerate(lengths(options, rng)):
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


def sender(
    engine: Engine,
    options: argparse.Namespace,
    draw: Callable[[], int],
    rng: random.Random,
    patience: float = math.inf,
) -> Callable[[], Future[Tensor]]:
    """Returns a function that sends a request of a drawn user, to be answered in `patience` s."""
    # Candidate lists are drawn beforehand, because drawing one would noticeably add to the times.
    drawn = np.random.default_rng(rng.getrandbits(32)).integers(
        ITEMS, size=(CANDIDATE_LISTS, options.candidates)
    )

    def send() -> Future[Tensor]:
        event = (rng.randrange(ITEMS), time.monotonic_ns())
        candidates = drawn[rng.randrange(CANDIDATE_LISTS)]
        deadline = time.monotonic() + patience
        return engine.submit_score(draw(), [event], candidates, deadline=deadline)

    return send


def drive(
    engine: Engine, options: argparse.Namespace, concurrency: int, exponent: float = 0.0
) -> Load[EngineStats]:
    """Keeps `concurrency` requests in flight, of users drawn by a Zipf distribution."""
    rng = random.Random(concurrency)
    return keep_futures_under_way(
        sender(engine, options, zipf(range(options.users), exponent, rng), rng),
        engine.stats,
        concurrency=concurrency,
        seconds=options.seconds,
        warm_up=WARM_UP_SECONDS,
    )


def figures(load: Load[EngineStats]) -> Record:
    """Returns the figures of a load, and of the engine's batches and cache hits during it."""
    changes = {
        name: getattr(load.after, name) - getattr(load.before, name)
        for name in ("batches", "completed", "graph_batches", *KINDS)
    }
    batches = changes["batches"]
    return {
        **load.figures(),
        "failed": load.failed,
        # The number of requests that the engine computed together.
        "mean_batch": rounded(changes["completed"] / batches),
        # The fraction of the batches that a graph computed.
        "graph_share": rounded(changes["graph_batches"] / batches),
        # The fraction of the events' tokens that the cache had.
        "hit_share": rounded(changes["hit_tokens"] / sum(changes[kind] for kind in KINDS)),
    }


def arrivals(engine: Engine, run: Run, folder: Path) -> Iterator[Record]:
    """Yields the records of `--concurrency`, of an overload (the capacity), and of the loads."""
    options, concurrency = run.options, run.options.concurrency[-1]
    path = folder / "model.pt"
    torch.save(Ranking(options).state_dict(), path)

    def change() -> None:
        model = Ranking(options)
        model.load_state_dict(torch.load(path, weights_only=True))
        engine.swap(model.to(run.device, torch.bfloat16).eval())

    def at_random(rate: float, middle: Callable[[], object] | None) -> Load[EngineStats]:
        rng = random.Random(0)
        draw = zipf(range(options.users), options.zipf, rng)
        return submit_at_random(
            sender(engine, options, draw, rng, PATIENCE),
            engine.stats,
            refusals=(OverloadedError, DeadlineError),
            rate=rate,
            seconds=options.seconds,
            warm_up=WARM_UP_SECONDS,
            rng=random.Random(0),
            middle=middle,
        )

    names = {"graphs": True, "zipf": options.zipf, "log": LOG}
    load = drive(engine, options, concurrency, options.zipf)
    yield {**names, "concurrency": concurrency, **figures(load)}
    for record, found in at_loads(load.rate, at_random, options.loads, [(CHANGE, change)]):
        yield {**names, **record, **figures(found)}


def soak(model: Ranking, run: Run) -> Record:
    """Answers `--soak` requests, with about a hundred in flight at a time."""
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
    """Measures each concurrency, with graphs and without, or each load."""
    options = run.options
    counts = [getattr(options, name) for name in SIZES]
    if min(options.seconds, *options.loads, 1) <= 0 or min(*counts, *options.concurrency) < 1:
        PARSER.error("--seconds, --loads and all counts must be positive")
    torch.manual_seed(0)
    model = Ranking(options).to(run.device, torch.bfloat16).eval()
    if options.soak:
        yield soak(model, run)
        return
    with ExitStack() as stack:
        engines = {}
        for graphs in (True,) if options.loads else (False, True):
            start = time.perf_counter()
            engines[graphs] = stack.enter_context(closing(make_engine(model, run, graphs)))
            took = time.perf_counter() - start
            print(f"{'with' if graphs else 'without'} graphs: ready after {took:.1f} s", flush=True)
        if options.loads:
            gc.collect()
            gc.freeze()  # as the server does
            stack.callback(gc.unfreeze)
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            yield from arrivals(engines[True], run, Path(folder))
            return
        check(list(engines.values()), options.candidates)
        for concurrency in options.concurrency:
            for graphs, engine in engines.items():
                load = drive(engine, options, concurrency)
                yield {"graphs": graphs, "concurrency": concurrency, **figures(load)}


BENCHMARK = Benchmark("engine", PARSER, measure, describe=describe, needs_gpu=False)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
