"""Trains the recipes of a data set, and stores their metrics beside the published ones.

    python -m benchmarks.published --set ml-1m --data ml-1m/ratings.dat --json ml-1m.json
    python -m benchmarks.published --set ml-1m --data ml-1m/ratings.dat --cases hstu-ml-1m --seeds 1
    python -m benchmarks.published --set ml-20m --data ml-20m/ratings.csv --device cuda --epochs 20
    python -m benchmarks.published --data ml-1m/ratings.dat --runs runs/published --jobs 4
    python -m benchmarks.published --data ml-1m/ratings.dat --runs runs/published --finished
    python -m benchmarks.published --data ml-1m/ratings.dat -- --relative-bias none

A recipe is one of `examples/recipes`; `--set` is the suffix of its name. There is one record for
each row of the example's table: means and standard deviations over the seeds, the published
metrics, and a fingerprint of the data. The record of a model's first row has the metrics after each
epoch (the curve), and a baseline's record has its level in that plot. Records of a model have the
seconds of the first run (training, evaluation after each epoch and writing files; no baselines).

All runs are made in one process, so that kernels are compiled once. `--jobs` makes several runs at
once, each in its own process. The first run of each recipe, whose seconds are recorded, still has
the device alone; with `--shared` it does not, and no seconds are recorded. `--runs` keeps the runs
in a directory: the same command continues stopped runs, and `--finished` reports the finished ones
without training. Data that have only the order of events instead of real times are marked "order
only"; `--note` adds further remarks on the data.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import cli

SETS = ("ml-100k", "ml-1m", "ml-20m", "books")
KINDS = ("sasrec", "hstu", "hstu-large")

PARSER = cli.parser("published", __doc__, cases="recipes whose name contains a text")
PARSER.add_argument("--set", choices=SETS, default="ml-1m", help="(default: ml-1m)")
cli.add_runs(PARSER, shown="the table")
PARSER.add_argument(
    "--baselines", action="store_true", help="tune popularity and co-occurrence, too"
)

if __name__ == "__main__":
    PARSER.parse_args()  # --help or a wrong option ends here, before torch is imported

import numpy as np

from hstu_attn.data import EventLog

from .record import ROOT, Record, rounded
from .runner import Benchmark
from .timing import Run

__all__ = [
    "BENCHMARK",
    "CommandLines",
    "Result",
    "has_times",
    "main",
    "records_of",
    "results",
    "runs_of",
]

RESULT = "result.json"  # in the directory of a finished run
CURVE = ("hit_rate_10", "ndcg_10")
SPLIT_OF = {"published": "test", "validated": "validation"}  # the split evaluated after each epoch
CommandLines = dict[str, list[list[str]]]  # of the runs of each case
FIRST_REAL_TIME = 631_152_000  # 1990-01-01; earlier timestamps cannot be times of web events


def has_times(log: EventLog) -> bool:
    """Returns whether events have real times, and not only an order.

    Times are not real if all are before 1990, or if the gaps between users' events are all equal.
    """
    if len(log.timestamps) == 0 or log.timestamps.max() < FIRST_REAL_TIME:
        return False
    within = np.ones(log.num_events - 1, bool)
    within[log.offsets[1:-1] - 1] = False
    return len(np.unique(np.diff(log.timestamps)[within])) > 1


def example(module: str = "train_retrieval") -> Any:
    """Returns a module of the examples, by default that of the retrieval example."""
    folder = str(ROOT / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(module)


@dataclass(frozen=True)
class Result:
    """The metrics of a finished run.

    Attributes:
        table: the metrics of each row of the example's table, by its name.
        curve: the metrics after each epoch.
        seconds: the time of training, tests after each epoch and the files of the run; None where
            the run did not have the device alone, or was continued.
        seed: the seed of the run.
        losses: the mean training loss of each epoch; empty in older files, which do not have it.
    """

    table: dict[str, dict[str, float]]
    curve: list[dict[str, float]]
    seconds: float | None
    seed: int
    losses: list[float] = field(default_factory=list)


def finished(arguments: list[str]) -> Result | None:
    """Returns the result of the run that these arguments describe, or None if it is unfinished.

    Raises:
        ValueError: the run there has other options or other data.
    """
    module, directory = example(), example("recommender.directory")
    options = module.parse_arguments(arguments)
    found = directory.read_json(options.out / RESULT)
    if found is None:
        return None
    log = module.open_data(options, [], lambda _: None)
    wanted = {**options.identity(), "data content": log.manifest["content"]}
    made_with = directory.read_json(options.out / directory.RUN)
    if problem := directory.difference(made_with, wanted, options.out):
        raise ValueError(problem)
    is_over = found.pop("epochs") == options.epochs
    return Result(**{**found, "seed": options.seed}) if is_over else None


def train(arguments: list[str], has_device: bool) -> Result:
    """Makes or continues a run of the example, unless it is finished; returns its result."""
    if found := finished(arguments):
        return found
    module = example()
    options = module.parse_arguments(arguments)
    is_new = not (options.out / "checkpoints").exists()
    start = time.perf_counter()
    table = module.train(options)
    seconds = time.perf_counter() - start
    history = json.loads((options.out / "history.json").read_text())
    curve = list(history[SPLIT_OF[options.protocol]].values())
    by_epoch = np.array_split(history["losses"], min(options.epochs, len(history["losses"])))
    losses = [float(part.mean()) for part in by_epoch]
    of_first = rounded(seconds) if has_device and is_new else None
    result = Result(table, curve, of_first, options.seed, losses)
    files = example("recommender.files")
    files.write_json(options.out / RESULT, {**asdict(result), "epochs": options.epochs})
    return result


def arguments_of(options: Any, case: str) -> list[str]:
    """Returns the command line of the runs of a recipe, without the seed and the directory."""
    arguments = ["--recipe", case, "--data", str(options.data), "--device", options.device]
    if options.epochs is not None:
        arguments += ["--epochs", str(options.epochs)]
    return [*arguments, *options.options]


def runs_of(options: Any, case: str, runs: Path) -> list[list[str]]:
    """Returns the command line of the run of each seed."""
    shared = [*arguments_of(options, case), "--no-baselines", "--resume"]
    name = shlex.join([case, *options.options]).replace("/", "_")
    return [
        [*shared, "--seed", str(seed), "--out", str(runs / name / f"seed-{seed}")]
        for seed in range(options.seeds)
    ]


def results_of(options: Any, of_case: CommandLines) -> dict[str, list[Result]]:
    """Makes the runs of all cases, one after the other or `--jobs` at once.

    Concurrent runs begin with the last case, which takes longest.

    Args:
        options: the options of the benchmark.
        of_case: the command lines of the runs of each case.
    """
    if options.finished:
        return {case: list(filter(None, map(finished, of_case[case]))) for case in of_case}
    if options.jobs == 1:
        alone = not options.shared
        return {case: [train(run, alone) for run in of_case[case]] for case in of_case}
    spawn = multiprocessing.get_context("spawn")
    first = {case: [] if options.shared else [train(of_case[case][0], True)] for case in of_case}
    with ProcessPoolExecutor(options.jobs, spawn) as pool:
        others = {
            case: [pool.submit(train, run, False) for run in of_case[case][len(first[case]) :]]
            for case in reversed(of_case)
        }
        return {case: [*first[case], *(run.result() for run in others[case])] for case in of_case}


def results(run: Run, of_case: Callable[[Path], CommandLines]) -> dict[str, list[Result]]:
    """Returns the results of all cases; the first call makes the runs.

    Args:
        run: the run of the benchmark.
        of_case: returns the command lines of the runs of each case, given their directory.

    Raises:
        ValueError: `--data` is missing, or `--finished` is given without `--runs`.
    """
    options = run.options
    if options.data is None:
        raise ValueError("--data: expected the file of the data set; got none")
    if options.finished and options.runs is None:
        raise ValueError("--finished: expected --runs, which names a directory; got none")
    if "results" not in run.kept:
        with ExitStack() as stack:
            runs = options.runs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
            run.kept["results"] = results_of(options, of_case(runs))
    made: dict[str, list[Result]] = run.kept["results"]
    return made


def measure(run: Run, case: str) -> Iterator[Record]:
    """Trains a recipe with each seed, and measures each row of its table."""
    options = run.options

    def of_case(runs: Path) -> CommandLines:
        return {name: runs_of(options, name, runs) for name in BENCHMARK.selected(options)}

    for record in records_of(options, case, results(run, of_case)[case], options.baselines):
        yield {"set": options.set, **record}


def records_of(
    options: Any, case: str, results: Sequence[Result], baselines: bool = False
) -> Iterator[Record]:
    """Returns a record for each row of the table of a recipe.

    Args:
        options: the benchmark's options; `options.options` are the options of the runs.
        case: the recipe.
        results: the result of each seed; without any, there is no record.
        baselines: whether to tune the baselines, too.
    """
    if not results:
        return
    module = example()
    first = module.parse_arguments(arguments_of(options, case))
    log = module.open_data(first, [], lambda _: None)
    tables = [result.table for result in results]
    name = shlex.join([case, *options.options])
    for result in results:
        took = f"  {result.seconds:.0f} s" if result.seconds else ""
        for row, reached in result.table.items():
            shown = "  ".join(f"{module.LABELS[key]} {reached[key]:.4f}" for key in CURVE)
            print(f"{name} seed {result.seed}, {row}: {shown}{took}", flush=True)
    of_model = {name: [table[name] for table in tables] for name in tables[0]}
    rows, split = dict(of_model), SPLIT_OF[first.protocol]
    levels: dict[str, dict[str, float]] = {}
    if baselines:
        found = module.baselines_of(log, first)
        rows = {**{name: [row] for name, row in found["test"].items()}, **rows}
        levels = found[split]
    about = {
        "recipe": case,
        "options": shlex.join(options.options),
        "note": options.note,
        "fingerprint": log.manifest["content"],
        "users": log.num_users,
        "items": log.num_items,
        "events": log.num_events,
        "order_only": not has_times(log),
        "epochs": first.epochs,
        "seeds": len(results),
        "published": {
            name: first.published[label]
            for name, label in module.LABELS.items()
            if label in first.published
        },
    }
    seconds = results[0].seconds
    by_epoch = [
        {key: rounded(statistics.fmean(each[key] for each in tests)) for key in CURVE}
        for tests in zip(*(result.curve for result in results), strict=True)
    ]
    of_runs = (result.losses for result in results)  # zip gives none if a run has no losses
    losses = [rounded(statistics.fmean(epoch)) for epoch in zip(*of_runs, strict=False)]
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
            "curve_split": split,
            "losses": losses if row == next(iter(of_model)) else [],
            "level": {key: rounded(levels[row][key]) for key in CURVE} if row in levels else None,
        }


def cases(options: Any) -> Sequence[str]:
    """Returns the recipes of the data set."""
    names = [f"{kind}-{options.set}" for kind in KINDS]
    return [name for name in names if (ROOT / f"examples/recipes/{name}.toml").exists()]


BENCHMARK = Benchmark("published", PARSER, measure, cases, needs_gpu=False)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
