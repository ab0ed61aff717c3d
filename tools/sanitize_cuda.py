"""Runs the tests marked `sanitize` under tools of compute-sanitizer, side by side on one GPU.

    python -m tools.sanitize_cuda memcheck racecheck -- -k causal

Each tool's tests are divided among several processes. A line reports the result of each process,
with the end of its log if it failed; the last lines are the totals of each tool. The exit status is
0 if in every process some tests passed, none failed, and the tool found no error.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

# Approximate time of a test, relative to synccheck.
COSTS = {"memcheck": 2, "racecheck": 4, "initcheck": 3, "synccheck": 1}
# Only our kernels are checked, except by initcheck, since torch's kernels write what ours read.
OUR_KERNELS = ("--kernel-name", "kernel_substring=hstu")
ERRORS_FOUND = 86  # the exit status of compute-sanitizer if it found errors; unused by pytest
SUMMARY = re.compile(r"(?:ERROR SUMMARY: |RACECHECK SUMMARY: .*\()(\d+) errors?\b(?! were not)")
SHOWN_LINES = 60  # lines shown of the log of a failed process
MARKED = ("-m", "sanitize and gpu")


class Job(NamedTuple):
    """Tests that one process runs under one tool."""

    tool: str
    tree: Path  # where the tests and the library are
    tests: list[str]


class Result(NamedTuple):
    """The result of a process."""

    job: Job
    counts: Counter[str]
    is_good: bool


def collect(pytest_arguments: list[str]) -> list[str]:
    """Returns the ids of the tests."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-n0", *MARKED]
    command += [*pytest_arguments, "--verbosity=-1"]  # one id a line
    listed = subprocess.run(command, capture_output=True, text=True)
    tests = [line for line in listed.stdout.splitlines() if "::" in line]
    if listed.returncode or not tests:
        sys.exit(f"pytest collected no tests:\n{listed.stdout}{listed.stderr}")
    return tests


def deal(tools: list[str], tests: list[str], racecheck_tree: Path, workers: int) -> list[Job]:
    """Splits the tests of each tool into about `workers` jobs of similar duration in total."""
    groups = [Job(t, racecheck_tree if t == "racecheck" else Path(), tests) for t in tools]
    parts = [1] * len(groups)
    for _ in range(workers - len(groups)):
        costs = [COSTS[g.tool] * len(g.tests) / n for g, n in zip(groups, parts, strict=True)]
        parts[costs.index(max(costs))] += 1
    return [
        group._replace(tests=group.tests[part::count])
        for group, count in zip(groups, parts, strict=True)
        for part in range(min(count, len(group.tests)))
    ]


def run(job: Job, name: str, sanitizer: str, logs: Path) -> Result:
    """Runs the tests, and prints how they ended."""
    listing, log, report = (logs / f"{name}.{kind}" for kind in ("tests", "log", "xml"))
    listing.write_text("\n".join(job.tests))
    command = [
        *(sanitizer, "--tool", job.tool, "--error-exitcode", str(ERRORS_FOUND)),
        *(OUR_KERNELS if job.tool != "initcheck" else ()),
        *(sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"),
        *(f"--junitxml={report}", f"@{listing}"),
    ]
    # Without the caching allocator each tensor has its own allocation, so that out-of-bounds
    # accesses are detected.
    variables = {"SANITIZER_TOOL": job.tool, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    start = time.monotonic()
    with log.open("w") as file:
        ended = subprocess.run(
            command, cwd=job.tree, env=os.environ | variables, stdout=file, stderr=file
        )
    seconds = time.monotonic() - start
    text = log.read_text(errors="replace")
    summaries = SUMMARY.findall(text)
    counts: Counter[str] = Counter(errors=sum(map(int, summaries)))
    if report.exists():
        suite = next(ElementTree.parse(report).iter("testsuite")).attrib
        failed, skipped = int(suite["failures"]) + int(suite["errors"]), int(suite["skipped"])
        counts.update(passed=int(suite["tests"]) - failed - skipped, failed=failed, skipped=skipped)
    is_good = not ended.returncode and bool(summaries) and counts["passed"] > 0
    is_good = is_good and not counts["errors"] and not counts["failed"]
    lines = [f"{name}: {described(counts)}, exit status {ended.returncode}, {seconds:.0f} s"]
    if not is_good:
        lines += text.splitlines()[-SHOWN_LINES:]
    print("\n".join(lines), flush=True)
    return Result(job, counts, is_good)


def described(counts: Counter[str]) -> str:
    """Returns the counts in words."""
    tests = ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped"))
    return f"{tests}, {counts['errors']} errors of the tool"


def main(arguments: list[str] | None = None) -> int:
    """Runs the tools; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tools", nargs="+", choices=list(COSTS))
    parser.add_argument("--sanitizer", default="compute-sanitizer", help="the program")
    parser.add_argument("--workers", type=int, default=8, help="processes at a time")
    parser.add_argument(
        "--racecheck-tree",
        type=Path,
        default=Path(),
        help="a tree whose library was built with HSTU_ATTN_RACECHECK, for sm90's kernels",
    )
    parser.add_argument("--logs", type=Path, default=Path("build/sanitize"))
    given = sys.argv[1:] if arguments is None else arguments
    own = given[: given.index("--")] if "--" in given else given
    options = parser.parse_args(own)
    logs = options.logs.resolve()
    logs.mkdir(parents=True, exist_ok=True)
    for old in logs.glob("*.xml"):
        old.unlink()

    tests = collect(given[len(own) + 1 :])
    workers = max(1, options.workers)
    jobs = deal(options.tools, tests, options.racecheck_tree, workers)
    print(f"{len(tests)} tests, {len(jobs)} processes; logs in {logs}", flush=True)
    with ThreadPoolExecutor(workers) as pool:
        started = [
            pool.submit(run, job, f"{job.tool}-{n}", options.sanitizer, logs)
            for n, job in enumerate(jobs)
        ]
        results = [future.result() for future in as_completed(started)]
    for tool in options.tools:
        own_results = [result for result in results if result.job.tool == tool]
        counts = sum((result.counts for result in own_results), Counter[str]())
        is_good = all(result.is_good for result in own_results)
        print(f"{tool}: {described(counts)}: {'good' if is_good else 'BAD'}")
    return 0 if all(result.is_good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
