"""Trains the recipes of a data set, and stores what they reach beside what is published.

    python -m benchmarks.published --set ml-1m --data ml-1m/ratings.dat --json ml-1m.json
    python -m benchmarks.published --set ml-1m --data ml-1m/ratings.dat --cases hstu-ml-1m --seeds 1
    python -m benchmarks.published --set ml-20m --data ml-20m/ratings.csv --device cuda --epochs 20

A recipe is one of `examples/recipes`, of which `--set` names the end. All runs are of one process,
so that kernels are compiled once. There is one record for each row of the example's table: means
and standard deviations over the seeds, the median seconds of a run (training, tests after each
epoch and the files of the run; no baselines), the published metrics, and a fingerprint of the data.
Data without real times, whose events are merely numbered in their order, are marked "order only".
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import cli

SETS = ("ml-1m", "ml-20m", "books")
KINDS = ("sasrec", "hstu", "hstu-large")

PARSER = cli.parser("published", __doc__, cases="recipes whose name contains a text")
PARSER.add_argument("--set", choices=SETS, default="ml-1m", help="(default: ml-1m)")
PARSER.add_argument("--data", type=Path, help="the file of the data set, which is required")
PARSER.add_argument("--seeds", type=int, default=3, help="(default: 3)")
PARSER.add_argument("--epochs", type=int, help="in place of those of the recipes")
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


def measure(run: Run, case: str) -> Iterator[Record]:
    """Trains a recipe with each seed, and measures each row of its table."""
    module, options = example(), run.options
    if options.data is None:
        raise ValueError("--data: expected the file of the data set; got none")
    arguments = ["--recipe", case, "--data", str(options.data), "--device", options.device]
    if options.epochs is not None:
        arguments += ["--epochs", str(options.epochs)]
    first = module.parse_arguments(arguments)
    log = module.open_data(first, [], lambda _: None)
    tables, seconds = [], []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            own = ["--seed", str(seed), "--out", f"{folder}/{seed}", "--no-baselines"]
            start = time.perf_counter()
            tables.append(module.train(module.parse_arguments([*arguments, *own])))
            seconds.append(time.perf_counter() - start)
    rows = {name: [table[name] for table in tables] for name in tables[0]}
    if options.baselines:
        found = module.baselines_of(log, first)["test"]
        rows = {**{name: [row] for name, row in found.items()}, **rows}
    about = {
        "recipe": case,
        "set": options.set,
        "fingerprint": log.manifest["content"],
        "users": log.num_users,
        "items": log.num_items,
        "events": log.num_events,
        "order_only": not has_times(log),
        "epochs": first.epochs,
        "seeds": options.seeds,
        "seconds": rounded(statistics.median(seconds)),
        "published": {
            name: first.published[label]
            for name, label in module.LABELS.items()
            if label in first.published
        },
    }
    for name, metrics in rows.items():
        columns = {key: [each[key] for each in metrics] for key in metrics[0]}
        yield {
            **about,
            "row": name,
            "mean": {key: rounded(statistics.fmean(x)) for key, x in columns.items()},
            "deviation": {
                key: rounded(statistics.stdev(x)) if len(x) > 1 else None
                for key, x in columns.items()
            },
        }


def cases(options: Any) -> Sequence[str]:
    """Returns the recipes of the data set."""
    return [f"{kind}-{options.set}" for kind in KINDS]


BENCHMARK = Benchmark("published", PARSER, measure, cases, needs_gpu=False)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
