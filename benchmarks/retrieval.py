"""Runs the retrieval example and stores its metrics.

    python -m benchmarks.retrieval --json retrieval.json

The example runs as in `make demo`: on synthetic data and the CPU, but with a temporary output
folder. There is one record for each row of its table; `seconds` is the time of the whole run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import cli

PARSER = cli.parser("retrieval", __doc__)

if __name__ == "__main__":
    PARSER.parse_args()  # --help or a wrong option ends here, before torch is imported

from .record import ROOT, Record
from .runner import Benchmark
from .timing import Run

__all__ = ["BENCHMARK", "main", "run_example"]


def run_example(
    name: str, more: Sequence[str] = ("--device", "cpu")
) -> tuple[dict[str, dict[str, float]], float]:
    """Runs a training example, with a temporary output folder.

    Args:
        name: the name of the example's script, such as "train_retrieval".
        more: further command-line options.

    Returns:
        The metrics of each row of the example's table, and the seconds of the run.
    """
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        script = str(ROOT / f"examples/{name}.py")
        arguments = [*more, "--out", folder]
        subprocess.run([sys.executable, script, *arguments], check=True, cwd=ROOT)
        seconds = time.perf_counter() - start
        return json.loads(Path(folder, "metrics.json").read_text()), seconds


def measure(run: Run, case: str) -> Iterator[Record]:
    """Measures each model."""
    metrics, seconds = run_example("train_retrieval")
    for model, row in metrics.items():
        yield {"model": model, "seconds": seconds, **row}


BENCHMARK = Benchmark("retrieval", PARSER, measure, needs_gpu=False)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
