"""Runs the retrieval example and stores what it reached.

    python -m benchmarks.retrieval retrieval.json

The example is run as `make demo` runs it, with its made-up data, into a folder of its own. FILE
gets one object for each line of its table; `seconds` is the time of the whole run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.retrieval", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("file", type=Path, metavar="FILE", help="where the results go")
    return parser


if __name__ == "__main__":
    _parser().parse_args()  # --help or a wrong option ends here, before torch is imported

from .report import ROOT, environment, write_records


def run_example(name: str) -> tuple[dict[str, dict[str, float]], float]:
    """Trains with the defaults of an example, such as "train_retrieval", into a folder that is
    removed. The metrics of each line of its table, and the seconds it took."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        script = str(ROOT / f"examples/{name}.py")
        subprocess.run([sys.executable, script, "--out", folder], check=True, cwd=ROOT)
        seconds = time.perf_counter() - start
        return json.loads(Path(folder, "metrics.json").read_text()), seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains, and writes the file."""
    options = _parser().parse_args(arguments)
    metrics, seconds = run_example("train_retrieval")
    described = environment("python -m benchmarks.retrieval")
    rows = [{"model": model, "seconds": seconds, **row} for model, row in metrics.items()]
    write_records(options.file, [{**described, **row} for row in rows])


if __name__ == "__main__":
    main()
