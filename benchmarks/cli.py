"""The command line that all benchmarks share.

This module does not import torch, directly or indirectly: a benchmark makes its parser, and parses
the command line if it is run, before it imports more. So `--help` and a wrong option end it at
once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

__all__ = ["add_runs", "parser"]


def parser(
    name: str,
    description: str,
    *,
    rounds: int | None = None,
    cases: str | None = None,
    against: bool = False,
    trace: str | None = None,
    concurrency: Sequence[int] = (),
) -> argparse.ArgumentParser:
    """Returns the parser of `python -m benchmarks.<name>`; the benchmark adds its own options.

    Args:
        name: the name of the module.
        description: its docstring, which `--help` prints as it is.
        rounds: default of `--rounds`; None for a benchmark without rounds.
        cases: help text of `--cases`; None for a benchmark with a single case.
        against: whether it compares two builds of the library (`against.py`).
        trace: for the help text: what `--trace` records; None for a benchmark without traces.
        concurrency: default of `--concurrency`, for a load test.
    """
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--json", type=Path, metavar="FILE", help="write the records to FILE, after every case")
    add("--commit", help="what to record as the commit, where there is no repository")
    made.set_defaults(cases=[], rounds=rounds, against=None)
    if cases is not None:
        add("--cases", nargs="+", default=[], metavar="TEXT", help=f"{cases} (default: all)")
    if rounds is not None:
        add("--rounds", type=int, default=rounds, help=f"timed rounds (default {rounds})")
    if against:
        text = "time this library and that of the built checkout DIR by turns; print the ratios"
        add("--against", type=Path, metavar="DIR", help=text)
    if trace is not None:
        text = f"store Chrome traces of {trace}, each with its name before the suffix of FILE"
        add("--trace", type=Path, metavar="FILE", help=text)
    if concurrency:
        default = " ".join(map(str, concurrency))
        add("--seconds", type=float, default=10.0, help="of each concurrency (default: 10)")
        add("--concurrency", type=int, nargs="+", default=concurrency, metavar="REQUESTS",
            help=f"requests in flight (default: {default})")  # fmt: skip
        text = "requests arrive at random, at these fractions of the capacity"
        add("--loads", type=float, nargs="+", default=(), metavar="LOAD", help=text)
        text = "exponent of the users' Zipf distribution with --loads; 0 is uniform (default: 1)"
        add("--zipf", type=float, default=1.0, metavar="EXPONENT", help=text)
    return made


def add_runs(made: argparse.ArgumentParser, *, shown: str) -> None:
    """Adds the options of a benchmark that runs an example once for each seed.

    Args:
        made: what `parser` returned.
        shown: where `--note` is shown.
    """
    add = made.add_argument
    add("--data", type=Path, help="the file of the data set, which is required")
    add("--seeds", type=int, default=3, help="(default: 3)")
    add("--jobs", type=int, default=1, help="runs at once (default: 1)")
    add("--shared", action="store_true", help="the device is shared: record no seconds")
    text = "keep the runs in this directory, and continue those that are there"
    add("--runs", type=Path, help=text)
    text = "train nothing: report the finished runs in --runs"
    add("--finished", action="store_true", help=text)
    add("--epochs", type=int, help="in place of those of the recipes")
    add("options", nargs="*", help="more options of the example, after --")
    add("--note", default="", help=f"what {shown} says of the data")
    add("--device", default="auto", help="of the training (default: auto)")
