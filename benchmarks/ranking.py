"""Runs the ranking example and stores what it reached.

    python -m benchmarks.ranking ranking.json

The example is run as `make ranking` runs it, with its made-up data, into a folder of its own. FILE
gets one object for each line of its table.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranking", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path, metavar="FILE", help="where the results go")
    return parser


if __name__ == "__main__":
    _parser().parse_args()  # --help or a wrong option ends here, before torch is imported

from .report import environment, write_records
from .retrieval import run_example


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, and writes the file."""
    options = _parser().parse_args(arguments)
    metrics, _ = run_example("train_ranking")
    described = environment("python -m benchmarks.ranking")
    rows = [{"model": model, "metrics": row} for model, row in metrics.items()]
    write_records(options.file, [{**described, **row} for row in rows])


if __name__ == "__main__":
    main()
