"""Two builds of the library, timed against each other in one run: the option `--against`.

    python -m benchmarks.attention --against ../old
    python -m benchmarks.paged --against ../old --head-dims 128 --json ratios.json

DIR is another checkout with a built library. One process can hold only one build, so each has a
worker process that imports `hstu_attn` from its checkout and everything else from this tree. Both
make the same inputs of a case, check the results and warm up. Then they take turns (`VISITS`), and
alternate in going first. In a visit a worker times all its variants in interleaved rounds, after
some warm-up rounds. The ratio of a visit is the new library's median time divided by the old
library's. Reported are the median ratio of all visits and their range, which shows how reliable it
is. A ratio below 1 means that the new library (of this tree) is faster.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from .record import ROOT, Record, commit_of, origin, rounded, write_records
from .timing import WARM_UP, Run, Variant, take_turns

__all__ = ["VISITS", "Worker", "compare", "ratios", "serve", "summary", "work"]

VISITS = 7
Times = dict[tuple[str, str], float | None]  # by implementation and pass; None where it failed


# ---------------------------------------------------------------------------------------------
# The worker
# ---------------------------------------------------------------------------------------------


def serve(
    run: Run,
    cases: Sequence[Any],
    variants_of: Callable[[Run, Any], list[Variant]],
    requests: TextIO,
    answers: TextIO,
) -> None:
    """Answers each line of `requests` until the stream ends; requests and answers are JSON.

    A number selects the case with that index: its variants are prepared, and the answer lists
    their errors. "time" requests a visit: the answer is a list of implementation, pass and time,
    where the time of a failed variant is null.
    """
    variants: list[Variant] = []
    for line in requests:
        request = json.loads(line)
        if request == "time":
            take_turns(variants, WARM_UP)
            for variant in variants:
                variant.times.clear()
            take_turns(variants, run.options.rounds)
            times = [[v.impl, v.direction, None if v.error else v.median] for v in variants]
            print(json.dumps(times), file=answers, flush=True)
            continue
        variants.clear()  # before other inputs are made
        gc.collect()
        if run.gpu:
            run.gpu.release()
        variants = variants_of(run, cases[request])
        for variant in variants:
            variant.attempt(variant.prepare)
        errors = [f"{v.impl}, {v.direction}: {v.error}" for v in variants if v.error]
        print(json.dumps(errors), file=answers, flush=True)


def work() -> None:
    """Runs a worker's program: `benchmarks.NAME` with the options that follow, over a pipe."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with answers
    name, *arguments = sys.argv[1:]
    benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    run = benchmark.start(benchmark.parser.parse_args(arguments), None)
    library = importlib.import_module("hstu_attn").__file__
    described = {"library": library, "gpu": run.gpu.name if run.gpu else None, **run.limits}
    print(json.dumps(described), file=answers, flush=True)
    serve(run, benchmark.selected(run.options), benchmark.variants, sys.stdin, answers)


class Worker:
    """A process that times the library of a checkout; a context manager.

    Args:
        name: the name of the benchmark's module.
        arguments: its command line.
        checkout: the folder that has `hstu_attn` with its built library.

    Attributes:
        described: the path of the library, the GPU's name and the limits of `Run`.

    Raises:
        ValueError: if there is no library in the checkout.
        RuntimeError: if the process ends early; it has printed why.
    """

    def __init__(self, name: str, arguments: Sequence[str], checkout: Path) -> None:
        package = checkout.resolve() / "hstu_attn"
        if not list(package.glob("_C*.so")):
            raise ValueError(f"--against: expected a built library in {package}, got none")
        self.checkout = checkout
        # The folder holds only the package, so that `benchmarks` is imported from this tree.
        self._folder = tempfile.TemporaryDirectory(prefix="against-")
        Path(self._folder.name, "hstu_attn").symlink_to(package)
        paths = [self._folder.name, str(ROOT), os.environ.get("PYTHONPATH")]
        program = "from benchmarks.against import work; work()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, name, *arguments],
            cwd=self._folder.name,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.described: Record = self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise RuntimeError(f"the worker of {self.checkout} ended with status {status}")
        return json.loads(line)

    def ask(self, request: int | str) -> Any:
        """Returns the answer to a request of `serve`."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def visit(self) -> Times:
        """Returns the time of each variant of the case that was asked for last."""
        return {(impl, direction): time for impl, direction, time in self.ask("time")}

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process may have ended
            self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


# ---------------------------------------------------------------------------------------------
# The comparison
# ---------------------------------------------------------------------------------------------


def ratios(visits: Sequence[tuple[Times, Times]]) -> list[Record]:
    """Returns a record of each implementation and pass that both libraries have timed.

    Args:
        visits: the times of the new and of the old library, of each pair of visits.
    """
    found = []
    for impl, direction in visits[0][0]:
        pairs = [(new[impl, direction], old.get((impl, direction))) for new, old in visits]
        times = [(new, old) for new, old in pairs if new is not None and old is not None]
        if len(times) < len(pairs):
            continue
        each = sorted(new / old for new, old in times)
        found.append(
            {
                "pass": direction,
                "impl": impl,
                "new": rounded(statistics.median(new for new, _ in times)),
                "old": rounded(statistics.median(old for _, old in times)),
                "ratio": rounded(statistics.median(each)),
                "lowest_ratio": rounded(each[0]),
                "highest_ratio": rounded(each[-1]),
                "visits": len(each),
            }
        )
    return found


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def summary(records: Sequence[Record]) -> list[str]:
    """Returns lines of text: the geometric mean ratio of each implementation and pass."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(f"{record['impl']}, {record['pass']}", []).append(record)
    lines = []
    for name, found in (*groups.items(), ("all", list(records))):
        values = [record["ratio"] for record in found]
        slowest = max(found, key=lambda record: record["ratio"])
        lines.append(
            f"{name:32s} {_geometric_mean(values):.4f} in the geometric mean of {len(values):3d}; "
            f"at most {slowest['ratio']:.3f} ({slowest['case']}, D {slowest['head_dim']}, "
            f"{slowest['impl']}, {slowest['pass']})"
        )
    return lines


def compare(
    name: str, cases: Sequence[Any], options: argparse.Namespace, arguments: Sequence[str]
) -> int:
    """Times this tree's library alternately with `--against`'s; prints and writes the ratios.

    Args:
        name: the name of the benchmark's module.
        cases: the cases to compare.
        options: the parsed command line.
        arguments: the command line, which is also passed to the workers.

    Returns:
        The exit status: 1 if something failed in either library.
    """
    command = " ".join([f"python -m benchmarks.{name}", *arguments])
    records: list[Record] = []
    failed = False
    with (
        Worker(name, arguments, ROOT) as new,
        Worker(name, arguments, options.against) as old,
    ):
        gpu = new.described["gpu"]
        made_on = {
            "benchmark": f"{name} against",
            **origin(command, options.commit, gpu),
            "old_commit": commit_of(options.against.resolve()),
            "rounds": options.rounds,
        }
        print(
            f"{gpu or made_on['cpu']}, torch {made_on['torch']}; new {made_on['commit']}, old "
            f"{made_on['old_commit']} in {options.against}; medians of {VISITS} visits of "
            f"{options.rounds} rounds\n",
            flush=True,
        )
        for number, case in enumerate(cases):
            for which, worker in (("new", new), ("old", old)):
                for error in worker.ask(number):
                    failed = True
                    print(f"  FAILED  {which}, {case.name}: {error}", flush=True)
            visits = []
            for visit in range(VISITS):
                workers = (new, old) if visit % 2 == 0 else (old, new)
                times = {worker: worker.visit() for worker in workers}
                visits.append((times[new], times[old]))
            for found in ratios(visits):
                record = {**made_on, "case": case.name, "head_dim": case.head_dim, **found}
                records.append(record)
                print(
                    f"{case.name:40s} D {case.head_dim:3d}  {record['pass']:18s} "
                    f"{record['impl']:16s} new {record['new']:9g}  old {record['old']:9g}  ratio "
                    f"{record['ratio']:.3f} ({record['lowest_ratio']:.3f} to "
                    f"{record['highest_ratio']:.3f})",
                    flush=True,
                )
            if options.json:
                write_records(options.json, records)
    if records:
        print("\n" + "\n".join(summary(records)))
    return int(failed or not records)
