"""Loads an `Engine` without a server.

    python -m benchmarks.engine --json engine.json
    python -m benchmarks.engine --layers 2 --width 64 --head-dim 16 --history 128 --seconds 2

A ranking model with random weights and without a relative bias, in bf16, scores candidates for
users whose histories are cached. As many threads as requests are to be under way each send one,
with one new event of a random user, and the next one when they have its answer. The engine runs
with its steps captured in CUDA graphs and without, by turns; what capturing took is told, and not
in the times. The threads share a process with the engine, and so its interpreter lock.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    sizes = {"layers": 8, "width": 512, "heads": 4, "head_dim": 128, "history": 2048}
    sizes |= {"candidates": 128, "users": 256, "max_batch_size": 32}
    for name, default in sizes.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=default, help=f"(default {default})")
    parser.add_argument("--device", help="(default: cuda where there is a GPU, otherwise cpu)")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of each concurrency (default 10)"
    )
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 8, 32, 64], metavar="REQUESTS",
        help="under way at a time (default 1 8 32 64)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="(default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    return parser


if __name__ == "__main__":
    _parser().parse_args()  # --help or a wrong option ends here, before torch is imported

import numpy as np
import torch
from torch import Tensor, nn

from hstu_attn.layer import HSTULayerConfig, HSTUStack
from hstu_attn.serving import Engine, EngineStats, EventStore, GraphBuckets, PagedKVCache, Rows

from .report import environment, print_environment, rounded, text_table, write_records

__all__ = ["Load", "Ranking", "drive", "main", "make_engine"]

ITEMS = 10_000
PAGE_SIZE = 64
SHORTEST = 0.5  # of the histories, of the longest one
WARM_UP_SECONDS = 1.0
FILL_BATCH = 16


@dataclass(frozen=True)
class Workload:
    """A model, its users and their requests."""

    layers: int
    width: int
    heads: int
    head_dim: int
    history: int
    candidates: int
    users: int
    max_batch_size: int
    device: str

    @property
    def max_history(self) -> int:
        """Histories grow, and none is to be cut while it is measured."""
        return 2 * self.history


@dataclass(frozen=True)
class Load:
    """What one concurrency came to; times in milliseconds, as the threads saw them."""

    graphs: bool
    concurrency: int
    seconds: float
    answered: int
    qps: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    mean_batch: float  # requests that the engine computed together
    graph_share: float  # of the batches, those that a graph computed
    hit_share: float  # of the rows of events, those that the cache had


class Ranking(nn.Module):
    """A `ServedModel`: embeddings of items and positions, layers, and a score of each candidate."""

    num_items, num_actions = ITEMS, 1
    reads_times, candidates_are_rows = False, True

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        config = HSTULayerConfig.stu(
            embedding_dim=workload.width,
            num_heads=workload.heads,
            hidden_dim=workload.head_dim,
            attention_dim=workload.head_dim,
        )
        self.max_history = workload.max_history
        self.item = nn.Embedding(ITEMS, workload.width)
        self.position = nn.Embedding(self.max_history + 1, workload.width)
        self.stack = HSTUStack(replace(config, scaling_seqlen=self.max_history), workload.layers)
        self.head = nn.Linear(workload.width, 1)

    def embed(self, rows: Rows) -> Tensor:
        """`(total, width)`."""
        x: Tensor = self.item(rows.items) + self.position(rows.positions)
        return x

    def score(self, states: Tensor, candidates: Tensor) -> Tensor:
        """`(n,)` fp32."""
        scores: Tensor = self.head(states).squeeze(1)
        return scores.float()


def make_engine(model: Ranking, workload: Workload, graphs: bool, seed: int) -> Engine:
    """An engine with all users' histories in its cache."""
    rng = np.random.default_rng(seed)
    store = EventStore(workload.users, workload.max_history)
    shortest = max(1, int(SHORTEST * workload.history))
    for user, length in enumerate(rng.integers(shortest, workload.history + 1, workload.users)):
        items = rng.integers(ITEMS, size=length)
        store.add(user, np.stack([items, np.arange(length), np.zeros_like(items)], axis=1))
    pages_each = -(-workload.max_history // PAGE_SIZE)
    cache = PagedKVCache(
        workload.layers,
        workload.users * pages_each,
        PAGE_SIZE,
        workload.heads,
        workload.head_dim,
        torch.bfloat16,
        workload.device,
    )
    engine = Engine(
        model,
        cache,
        store=store,
        max_batch_size=workload.max_batch_size,
        max_wait=0.0,
        max_queue=10**6,
        max_candidates=workload.candidates,
        graphs=GraphBuckets(ahead=True) if graphs else False,
    )
    for first in range(0, workload.users, FILL_BATCH):
        users = range(first, min(first + FILL_BATCH, workload.users))
        for future in [engine.submit_score(user, [], []) for user in users]:
            future.result()
    return engine


def drive(
    engine: Engine, workload: Workload, graphs: bool, concurrency: int, seconds: float, seed: int
) -> Load:
    """Keeps that many requests under way for that long, after a warm-up."""
    start = time.perf_counter() + min(WARM_UP_SECONDS, seconds)
    end = start + seconds
    latencies: list[list[float]] = [[] for _ in range(concurrency)]

    def send(thread: int) -> None:
        rng = random.Random(f"{seed} {concurrency} {thread}")
        some = np.random.default_rng([seed, concurrency, thread])
        while (sent := time.perf_counter()) < end:
            event = (rng.randrange(ITEMS), 10**6)
            candidates = some.integers(ITEMS, size=workload.candidates)
            engine.score(rng.randrange(workload.users), [event], candidates)
            now = time.perf_counter()
            if start <= sent and now <= end:
                latencies[thread].append(now - sent)

    threads = [threading.Thread(target=send, args=(n,)) for n in range(concurrency)]
    for thread in threads:
        thread.start()
    time.sleep(max(0.0, start - time.perf_counter()))
    before = engine.stats()
    for thread in threads:
        thread.join()
    after = engine.stats()
    together = np.concatenate([np.array(times) for times in latencies])
    if not len(together):
        raise RuntimeError(f"no request was answered in {seconds} s")
    p50, p95, p99 = 1e3 * np.percentile(together, [50, 95, 99])
    batches = after.batches - before.batches
    return Load(
        graphs=graphs,
        concurrency=concurrency,
        seconds=seconds,
        answered=len(together),
        qps=_rounded(len(together) / seconds),
        p50_ms=_rounded(p50),
        p95_ms=_rounded(p95),
        p99_ms=_rounded(p99),
        mean_batch=_rounded((after.completed - before.completed) / batches),
        graph_share=_rounded((after.graph_batches - before.graph_batches) / batches),
        hit_share=_rounded((after.hit_tokens - before.hit_tokens) / _rows(before, after)),
    )


def _rows(before: EngineStats, after: EngineStats) -> int:
    """Of events, cached and computed."""
    kinds = ("hit_tokens", "new_tokens", "recomputed_tokens")
    return sum(getattr(after, kind) - getattr(before, kind) for kind in kinds)


def _rounded(value: float) -> float:
    return rounded(float(value)) or 0.0


def check(engines: Sequence[Engine], workload: Workload) -> None:
    """All answer alike, up to rounding."""
    candidates = list(range(workload.candidates))
    for user in (0, 1):
        plain, captured = (engine.score(user, [], candidates) for engine in engines)
        torch.testing.assert_close(captured, plain, rtol=0.05, atol=0.05)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table, and writes it."""
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    options["device"] = options["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    path, seconds, seed = (options.pop(name) for name in ("json", "seconds", "seed"))
    concurrencies = options.pop("concurrency")
    workload = Workload(**options)
    counts = [value for value in options.values() if isinstance(value, int)]
    if seconds <= 0 or min(*counts, *concurrencies) < 1:
        parser.error("--seconds and all counts must be positive")
    described: dict[str, Any] = environment("python -m benchmarks.engine")
    if workload.device == "cuda":
        described["gpu"] = torch.cuda.get_device_name()
    print_environment(described)
    torch.manual_seed(seed)
    model = Ranking(workload).to(workload.device, torch.bfloat16).eval()
    engines = []
    for graphs in (False, True):
        start = time.perf_counter()
        engines.append(make_engine(model, workload, graphs, seed))
        took = time.perf_counter() - start
        print(f"{'with' if graphs else 'without'} graphs: ready after {took:.1f} s", flush=True)
    check(engines, workload)
    loads = [
        drive(engine, workload, graphs, concurrency, seconds, seed)
        for concurrency in concurrencies
        for graphs, engine in zip((False, True), engines, strict=True)
    ]
    for engine in engines:
        engine.close()
    records = [asdict(load) for load in loads]
    table = [[*records[0]], *([str(value) for value in record.values()] for record in records)]
    print("\n".join(text_table(table)))
    if path:
        write_records(path, [{**described, **asdict(workload), **record} for record in records])


if __name__ == "__main__":
    main()
