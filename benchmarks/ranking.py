"""Runs the ranking example and stores its metrics.

    python -m benchmarks.ranking --json ranking.json
    python -m benchmarks.ranking --data ml-100k/u.data --seeds 3 --json ranking-ml-100k.json
    python -m benchmarks.ranking --data ml-1m/ratings.dat -- --held-out-share 0.1

The example runs by default as in `make ranking`: on synthetic data and the CPU, but with a
temporary output folder; `--data` and the options after `--` change this. There is one record for
each row of its table: means and standard deviations over the seeds.
"""

from __future__ import annotations

import shlex
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from . import cli

PARSER = cli.parser("ranking", __doc__)
PARSER.add_argument("--data", type=Path, help="a file of ratings or actions")
PARSER.add_argument("--seeds", type=int, default=1, help="(default: 1)")
PARSER.add_argument("--device", default="cpu", help="of the training (default: cpu)")
PARSER.add_argument("options", nargs="*", help="more options of the example, after --")

if __name__ == "__main__":
    PARSER.parse_args()  # --help or a wrong option ends here, before torch is imported

from hstu_attn.data import open_event_log

from .published import has_times
from .record import Record
from .retrieval import run_example
from .runner import Benchmark
from .timing import Run

__all__ = ["BENCHMARK", "main"]


def measure(run: Run, case: str) -> Iterator[Record]:
    """Measures each model."""
    options = run.options
    arguments = ["--device", options.device, *options.options]
    about: Record = {"options": shlex.join(options.options), "seeds": options.seeds}
    if options.data is not None:
        arguments += ["--data", str(options.data.resolve())]  # the example runs elsewhere
        log = open_event_log(options.data)
        about |= {
            "data": "/".join(options.data.parts[-2:]),
            "fingerprint": log.manifest["content"],
            "users": log.num_users,
            "items": log.num_items,
            "events": log.num_events,
            "order_only": not has_times(log),
        }
    found = [
        run_example("train_ranking", [*arguments, "--seed", str(seed)])[0]
        for seed in range(options.seeds)
    ]
    for model in found[0]:
        columns = {name: [table[model][name] for table in found] for name in found[0][model]}
        yield {
            "model": model,
            **about,
            "metrics": {name: statistics.fmean(x) for name, x in columns.items()},
            "deviation": {
                name: statistics.stdev(x) if len(set(x)) > 1 else None
                for name, x in columns.items()
            },
        }


BENCHMARK = Benchmark("ranking", PARSER, measure, needs_gpu=False)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
