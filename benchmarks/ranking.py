"""Runs the ranking example and stores what it reached.

    python -m benchmarks.ranking --json ranking.json

The example is run as `make ranking` runs it, with its made-up data, on the CPU and into a folder of
its own. There is one record for each line of its table.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from . import cli

PARSER = cli.parser("ranking", __doc__)

if __name__ == "__main__":
    PARSER.parse_args()  # --help or a wrong option ends here, before torch is imported

from .record import Record
from .retrieval import run_example
from .runner import Benchmark, Run

__all__ = ["BENCHMARK", "main"]


def measure(run: Run, case: str) -> Iterator[Record]:
    """Measures each model."""
    metrics, _ = run_example("train_ranking")
    for model, row in metrics.items():
        yield {"model": model, "metrics": row}


BENCHMARK = Benchmark("ranking", PARSER, measure, needs_gpu=False)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
