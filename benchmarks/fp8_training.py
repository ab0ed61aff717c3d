"""Trains a recipe in bf16 and in FP8 from the same seeds; stores the metrics of each precision.

    python -m benchmarks.fp8_training --data ml-100k/u.data --json fp8-training.json
    python -m benchmarks.fp8_training --data ml-1m/ratings.dat --recipe hstu-ml-1m -- --heads 1
    python -m benchmarks.fp8_training --data ml-100k/u.data --cases bf16 layer --epochs 20 --seeds 5

The runs are made as in `benchmarks.published`, which explains the options that keep them and run
several at once. Runs of one seed start from the same weights and read the same batches. There is
one record for each precision and row of the example's table. It extends that of
benchmarks.published by the metrics and the training loss of the last epoch for each seed. The table
shows means, standard deviations over the seeds, and differences from the bf16 run of the same seed.

On a CPU, torch functions compute the same as the FP8 kernels, except for silu and for the order and
the precision of sums. They are slow, and their times say nothing about a GPU.
"""

from __future__ import annotations

import copy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import cli

PRECISIONS = {
    "bf16": ["--bf16"],
    "attention": ["--fp8", "attention"],
    "attention without smooth_k": ["--fp8", "attention", "--no-smooth-k"],
    "layer": ["--fp8", "layer"],
}

PARSER = cli.parser("fp8_training", __doc__, cases="precisions whose name contains a text")
PARSER.add_argument(
    "--recipe", default="hstu-ml-100k", help="of the example (default: hstu-ml-100k)"
)
cli.add_runs(PARSER, shown="the record")

if __name__ == "__main__":
    PARSER.parse_args()  # --help or a wrong option ends here, before torch is imported

from . import published
from .record import Record, rounded
from .runner import Benchmark
from .timing import Run

__all__ = ["BENCHMARK", "PRECISIONS", "main"]


def of_precision(options: Any, precision: str) -> Any:
    """Returns the benchmark's options, to which the runs' options for a precision are added."""
    made = copy.copy(options)
    made.options = [*PRECISIONS[precision], *options.options]
    return made


def measure(run: Run, case: str) -> Iterator[Record]:
    """Trains the recipe with every seed in a precision."""
    options = run.options

    def of_case(runs: Path) -> published.CommandLines:
        return {
            name: published.runs_of(of_precision(options, name), options.recipe, runs)
            for name in BENCHMARK.selected(options)
        }

    results = published.results(run, of_case)[case]
    about = {
        "data": "/".join(options.data.parts[-2:]),
        "shared": shlex.join(options.options),  # options of the runs in every precision
    }
    for record in published.records_of(of_precision(options, case), options.recipe, results):
        of_seeds = {
            str(result.seed): {
                "loss": round(result.losses[-1], 6),  # precisions differ by .001 or less
                **{name: rounded(x) for name, x in result.table[record["row"]].items()},
            }
            for result in results
        }
        yield {"precision": case, **about, **record, "of_seeds": of_seeds}


BENCHMARK = Benchmark("fp8_training", PARSER, measure, lambda _: list(PRECISIONS), needs_gpu=False)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
