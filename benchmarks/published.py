"""Trains the recipes of a data set, and stores what they reach beside what is published.

    python -m benchmarks.published --set ml-1m --data ml-1m/ratings.dat --json ml-1m.json
    python -m benchmarks.published --set ml-1m --data ml-1m/ratings.dat --cases hstu-ml-1m --seeds 1
    python -m benchmarks.published --set ml-20m --data ml-20m/ratings.csv --device cuda --epochs 20
    python -m benchmarks.published --data ml-1m/ratings.dat -- --relative-bias none

A recipe is one of `examples/recipes`; `--set` names the end of its name. There is one record for
each row of the example's table: means and standard deviations over the seeds, the published
metrics, and a fingerprint of the data. The record of a model's first row has the curve, the metrics
after each epoch, and that of each row of a model the seconds of the first run (training, tests
after each epoch and the files of the run; no baselines).

All runs are of one process, so that kernels are compiled once. `--jobs` makes those after the first
in several processes, which share the device; with `--shared` the first, too, for then there are no
seconds to record. Data without real times, whose events are merely numbered in their order, are
marked "order only"; `--note` says what else is to be known of them.
"""

from __future__ import annotations

import json
import multiprocessing
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from . import cli

SETS = ("ml-100k", "ml-1m", "ml-20m", "books")
KINDS = ("sasrec", "hstu", "hstu-large")

PARSER = cli.parser("published", __doc__, cases="recipes whose name contains a text")
PARSER.add_argument("--set", choices=SETS, default="ml-1m", help="(default: ml-1m)")
PARSER.add_argument("--data", type=Path, help="the file of the data set, which is required")
PARSER.add_argument("--seeds", type=int, default=3, help="(default: 3)")
PARSER.add_argument("--jobs", type=int, default=1, help="runs at once after the first (default: 1)")
PARSER.add_argument("--shared", action="store_true", help="the device is shared: record no seconds")
PARSER.add_argument("--epochs", type=int, help="in place of those of the recipes")
PARSER.add_argument("options", nargs="*", help="more options of the example, after --")
PARSER.add_argument("--note", default="", help="what the table says of the data")
PARSER.add_argument("--device", default="auto", help="of the training (default: auto)")
PARSER.add_argument(
    "--baselines", action="store_true", help="tune popularity and co-occurrence, too"
)

if __name__ == "__main__":
    PARSER.parse_args()  # --help or a wrong option ends here, before torch is imported

import numpy as np

from hstu_attn.data import EventLog

from .record import ROOT, Record, rounded
from .runner import Benchmark, Run

__all__ = ["BENCHMARK", "has_times", "main"]

Result: TypeAlias = "tuple[dict[str, dict[str, float]], list[dict[str, float]], float]"
CURVE = ("hit_rate_10", "ndcg_10")
SPLIT_OF = {"published": "test", "validated": "validation"}  # what is evaluated after each epoch
FIRST_REAL_TIME = 631_152_000  # 1990-01-01: what is before it is no time of an event on the web


def has_times(log: EventLog) -> bool:
    """Returns whether events have real times, and not only an order.

    There are none where times are before 1990, or a user's events are all as far apart as any.
    """
    if len(log.timestamps) == 0 or log.timestamps.max() < FIRST_REAL_TIME:
        return False
    within = np.ones(log.num_events - 1, bool)
    within[log.offsets[1:-1] - 1] = False
    return len(np.unique(np.diff(log.timestamps)[within])) > 1


def example() -> Any:
    """Returns the module of the retrieval example."""
    folder = str(ROOT / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return __import__("train_retrieval")


def train(arguments: list[str]) -> Result:
    """Makes a run of the example; returns its table, the tests by epoch and its seconds."""
    module = example()
    options = module.parse_arguments(arguments)
    start = time.perf_counter()
    table = module.train(options)
    seconds = time.perf_counter() - start
    history = json.loads((options.out / "history.json").read_text())
    return table, list(history[SPLIT_OF[options.protocol]].values()), seconds


def results_of(options: Any, arguments: list[str], folder: str) -> list[Result]:
    """Makes the run of each seed, one after the other or `--jobs` at once."""
    runs = [
        [*arguments, "--seed", str(seed), "--out", f"{folder}/{seed}", "--no-baselines"]
        for seed in range(options.seeds)
    ]
    if options.jobs == 1:
        return [train(run) for run in runs]
    alone = [] if options.shared else [train(runs.pop(0))]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, spawn) as pool:
        return [*alone, *pool.map(train, runs)]


def measure(run: Run, case: str) -> Iterator[Record]:
    """Trains a recipe with each seed, and measures each row of its table."""
    module, options = example(), run.options
    if options.data is None:
        raise ValueError("--data: expected the file of the data set; got none")
    arguments = ["--recipe", case, "--data", str(options.data), "--device", options.device]
    if options.epochs is not None:
        arguments += ["--epochs", str(options.epochs)]
    arguments += options.options
    first = module.parse_arguments(arguments)
    log = module.open_data(first, [], lambda _: None)
    with tempfile.TemporaryDirectory() as folder:
        results = results_of(options, arguments, folder)
    tables = [table for table, _, _ in results]
    name = shlex.join([case, *options.options])
    for seed, (table, _, took) in enumerate(results):
        for row, reached in table.items():
            shown = "  ".join(f"{module.LABELS[key]} {reached[key]:.4f}" for key in CURVE)
            print(f"{name} seed {seed}, {row}: {shown}  {took:.0f} s", flush=True)
    of_model = {name: [table[name] for table in tables] for name in tables[0]}
    rows = dict(of_model)
    if options.baselines:
        found = module.baselines_of(log, first)["test"]
        rows = {**{name: [row] for name, row in found.items()}, **rows}
    about = {
        "recipe": case,
        "options": shlex.join(options.options),
        "note": options.note,
        "set": options.set,
        "fingerprint": log.manifest["content"],
        "users": log.num_users,
        "items": log.num_items,
        "events": log.num_events,
        "order_only": not has_times(log),
        "epochs": first.epochs,
        "seeds": options.seeds,
        "published": {
            name: first.published[label]
            for name, label in module.LABELS.items()
            if label in first.published
        },
    }
    seconds = None if options.shared else rounded(results[0][2])
    curves = [curve for _, curve, _ in results]
    by_epoch = [
        {key: rounded(statistics.fmean(each[key] for each in tests)) for key in CURVE}
        for tests in zip(*curves, strict=True)
    ]
    for row, metrics in rows.items():
        columns = {key: [each[key] for each in metrics] for key in metrics[0]}
        yield {
            **about,
            "row": row,
            "of_model": row in of_model,
            "seconds": seconds if row in of_model else None,
            "mean": {key: rounded(statistics.fmean(x)) for key, x in columns.items()},
            "deviation": {
                key: rounded(statistics.stdev(x)) if len(x) > 1 else None
                for key, x in columns.items()
            },
            "curve": by_epoch if row == next(iter(of_model)) else [],
        }


def cases(options: Any) -> Sequence[str]:
    """Returns the recipes of the data set."""
    names = [f"{kind}-{options.set}" for kind in KINDS]
    return [name for name in names if (ROOT / f"examples/recipes/{name}.toml").exists()]


BENCHMARK = Benchmark("published", PARSER, measure, cases, needs_gpu=False)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
