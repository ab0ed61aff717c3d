"""Trains an example in bf16 and in FP8 from the same seeds, and stores what each run reached.

    python -m benchmarks.fp8_training --json fp8-training.json
    python -m benchmarks.fp8_training --example ranking --steps 600
    python -m benchmarks.fp8_training --seeds 0 1 2 3 4 -- --data ml-1m/ratings.dat --epochs 20

Arguments after `--` are passed to the example. All runs share one process, so that kernels are
compiled and data are read once. There is one record for each run, with the mean training loss of
the last tenth of the steps, the losses of every tenth, the metrics of the test, and the seconds
that it took; at the end the means over the seeds are printed side by side, with their standard
deviations.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import cli

PRECISIONS = {"bf16": ["--bf16"], "attention": ["--fp8", "attention"], "layer": ["--fp8", "layer"]}

PARSER = cli.parser("fp8_training", __doc__)
PARSER.add_argument("--example", choices=("retrieval", "ranking"), default="retrieval")
PARSER.add_argument("--device", default="cuda", help="of the training (default: cuda)")
PARSER.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: 0 1 2)")
PARSER.add_argument("--steps", type=int, default=1000, help="of each run (default: 1000)")
PARSER.add_argument(
    "--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS), help="(default: all)"
)
PARSER.add_argument("options", nargs="*", help="further options of the example, after --")

if __name__ == "__main__":
    PARSER.parse_args()  # --help or a wrong option ends here, before torch is imported

from .record import ROOT, Record, rounded
from .runner import Benchmark, Run

__all__ = ["BENCHMARK", "main", "train"]

PARTS = 10


def train(example: str, options: Sequence[str]) -> Record:
    """Trains in this process, into a folder that is removed.

    Args:
        example: "retrieval" or "ranking".
        options: of its command line.

    Returns:
        The figures of the run.

    Raises:
        RuntimeError: the example has failed, and said why.
    """
    folder_of_examples = str(ROOT / "examples")
    if folder_of_examples not in sys.path:
        sys.path.insert(0, folder_of_examples)
    module = __import__(f"train_{example}")
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        if module.main(["--out", folder, "--no-baselines", *options]):
            raise RuntimeError(f"train_{example}.py {' '.join(options)} failed")
        seconds = time.perf_counter() - start
        losses = json.loads(Path(folder, "history.json").read_text())["losses"]
        metrics = json.loads(Path(folder, "metrics.json").read_text())["HSTU"]
    size = -(-len(losses) // PARTS)
    parts = [statistics.fmean(losses[n : n + size]) for n in range(0, len(losses), size)]
    return {
        "seconds": rounded(seconds),
        "loss": parts[-1],
        "losses": [rounded(part) for part in parts],
        **{f"test_{name}": value for name, value in metrics.items()},
    }


def measure(run: Run, case: str) -> Iterator[Record]:
    """Trains with every seed in every precision."""
    options = run.options
    shared = ["--device", options.device, "--steps", str(options.steps), *options.options]
    for seed in options.seeds:
        for precision in options.precisions:
            figures = train(options.example, [*PRECISIONS[precision], "--seed", str(seed), *shared])
            run_of = {"example": options.example, "precision": precision, "seed": seed}
            yield {**run_of, "steps": options.steps, **figures}


BENCHMARK = Benchmark("fp8_training", PARSER, measure, needs_gpu=False)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
