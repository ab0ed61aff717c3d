"""Runs that differ by their seed, and the means and standard deviations of their metrics."""

from __future__ import annotations

import copy
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

from recommender.directory import check_directory
from recommender.files import write_json
from recommender.options import Options

__all__ = ["Table", "train_seeds"]

Table: TypeAlias = Mapping[str, Mapping[str, float]]
"""Metrics by row name and then by metric name."""

AnyOptions = TypeVar("AnyOptions", bound=Options)
SPREAD = "standard deviation"


def train_seeds(options: AnyOptions, train: Callable[[AnyOptions], Table]) -> Table:
    """Trains with `options.seeds` seeds from `options.seed` on, and summarizes the results.

    Each run has the directory `seed-N` in `options.out`. `seeds.json`, also in `options.out`, gets
    the summary and the results of each run. `--resume` continues the runs that have begun.

    Args:
        options: the options of all runs; each run gets its own `seed` and `out`.
        train: trains one run and returns its table.

    Returns:
        The mean of each row and, where the runs differ, the standard deviation.

    Raises:
        ValueError: a run's directory may not be used; this is checked before any run begins.
    """
    parent = copy.copy(options)
    parent.resume = False
    check_directory(parent)
    runs = []
    for seed in range(options.seed, options.seed + options.seeds):
        run = copy.copy(options)
        run.seed, run.out = seed, options.out / f"seed-{seed}"
        check_directory(run)
        runs.append(run)
    tables = []
    for run in runs:
        print(f"\nSeed {run.seed}, in {run.out}")
        tables.append(train(run))
        gc.collect()  # frees the model and its graphs, which refer to each other
    summary = summarize(tables)
    by_seed = {str(run.seed): table for run, table in zip(runs, tables, strict=True)}
    write_json(options.out / "seeds.json", {"summary": summary, "seeds": by_seed})
    return summary


def summarize(tables: Sequence[Table]) -> dict[str, dict[str, float]]:
    """Returns means and, where runs differ, standard deviations of the rows in all tables."""
    summary = {}
    for name in tables[0]:
        rows = [table[name] for table in tables if name in table]
        if len(rows) < len(tables):
            continue
        columns = {metric: [row[metric] for row in rows] for metric in rows[0]}
        if all(row == rows[0] for row in rows):
            summary[name] = dict(rows[0])
            continue
        summary[f"{name}, mean"] = {key: statistics.fmean(x) for key, x in columns.items()}
        summary[f"{name}, {SPREAD}"] = {key: statistics.stdev(x) for key, x in columns.items()}
    return summary
