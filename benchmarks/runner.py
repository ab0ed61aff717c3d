"""Runs a benchmark: its command line, its timing loop, its records and its exit status.

A module with a benchmark says what its cases are and how one of them is measured, and makes a
`Benchmark` of both. Everything else is here. What is timed against each other is a list of
`Variant`s, which take turns (`take_turns`): in each round every variant runs once, on the next of
several input sets, and another one goes first. The median over the rounds counts.
"""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from .gpu import Gpu
from .record import BASELINES, Record, origin, rounded, write_records
from .tables import text

__all__ = [
    "Benchmark",
    "Call",
    "Run",
    "Variant",
    "clocked",
    "environment",
    "explain",
    "name_of",
    "take_turns",
]

WARM_UP = 2
T = TypeVar("T")
Call = Callable[[], Any]


def name_of(case: Any) -> str:
    """Returns the name of a case."""
    return str(getattr(case, "name", case))


def explain(failure: BaseException) -> str:
    """Returns the type and the first line of an error."""
    lines = str(failure).strip().splitlines() or [""]
    return f"{type(failure).__name__}: {lines[0]}"[:300]


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable inside the context."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def clocked(call: Call) -> float:
    """Returns the milliseconds that a call takes on the host."""
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


# ---------------------------------------------------------------------------------------------
# The timing loop
# ---------------------------------------------------------------------------------------------


@dataclass
class Variant:
    """One implementation of one pass of a case.

    Attributes:
        impl: name of the implementation.
        direction: the pass, such as "forward".
        make: makes the calls that are timed, one for each input set; it also checks the
            implementation's result.
        clock: the time of a call, in the unit of the benchmark.
        active: makes the context in which `make` and the calls run.
        calls: what `make` made.
        times: the times of each round.
        error: why the variant dropped out; empty where nothing failed.
    """

    impl: str
    direction: str
    make: Callable[[], Sequence[Call]]
    clock: Callable[[Call], float]
    active: Callable[[], AbstractContextManager[Any]] = nullcontext
    calls: Sequence[Call] = ()
    times: list[float] = field(default_factory=list)
    error: str = ""

    def attempt(self, action: Callable[..., T], *arguments: Any) -> T | None:
        """Returns the action's result; None if it fails now, which is printed, or failed before."""
        if self.error:
            return None
        try:
            with self.active():
                return action(*arguments)
        except Exception as failure:
            self.error = explain(failure)
            traceback.print_exc()
            return None

    def prepare(self) -> None:
        """Makes the calls and runs each of them, which may also tune and compile."""
        self.calls = self.make()
        for number in range(max(WARM_UP, len(self.calls))):
            self.calls[number % len(self.calls)]()

    def time(self, number: int) -> None:
        """Adds a round."""
        self.times.append(self.clock(self.calls[number % len(self.calls)]))

    @property
    def median(self) -> float:
        """Returns the median of all rounds."""
        return statistics.median(self.times)

    def figures(self, name: str = "ms") -> Record:
        """Returns the median, the shortest time and the number of rounds, or the error."""
        if self.error:
            return {name: None, "error": self.error}
        return {
            name: rounded(self.median),
            f"fastest_{name}": rounded(min(self.times)),
            "rounds": len(self.times),
            "error": "",
        }


def take_turns(
    variants: Sequence[Variant], rounds: int, before: Call | None = None, first: int = 0
) -> None:
    """Times all variants, which have been prepared, in interleaved rounds.

    Args:
        variants: those that failed are left out.
        rounds: in each, every variant runs once.
        before: called before each round.
        first: number of the first round, which decides who begins and on which input set.
    """
    for number in range(first, first + rounds):
        if before:
            before()
        begins = number % max(1, len(variants))
        for variant in (*variants[begins:], *variants[:begins]):
            variant.attempt(variant.time, number)


# ---------------------------------------------------------------------------------------------
# A run
# ---------------------------------------------------------------------------------------------


@dataclass
class Run:
    """The options, the device and the ranks that a benchmark is given.

    Attributes:
        options: the command line.
        gpu: the GPU; None where the benchmark runs on a CPU.
        world: the ranks of a benchmark of several GPUs, `hstu_attn.distributed.World`.
        limits: TFLOP/s of an 8192^3 bf16 matrix product (`matmul_tflops`) and TB/s of a device
            copy (`copy_tbps`) in this run; empty without a GPU.
        kept: what a benchmark keeps from one case to the next.
    """

    options: argparse.Namespace
    gpu: Gpu | None = None
    world: Any = None
    limits: dict[str, float] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """The device, "cuda" or "cpu"; a rank has its own device."""
        if self.world is not None:
            return str(self.world.device)
        return self.gpu.device if self.gpu else "cpu"

    @property
    def is_first(self) -> bool:
        """Returns whether this process prints and writes."""
        return self.world is None or self.world.rank == 0

    def the_gpu(self) -> Gpu:
        """Returns the GPU of a benchmark that needs one."""
        assert self.gpu is not None
        return self.gpu


@dataclass(frozen=True)
class Benchmark:
    """A benchmark, which `main` runs.

    Attributes:
        name: the name of its module in this package.
        parser: the parser of `cli.parser`.
        measure: the records of a case, without what `describe` and `record.origin` say.
        cases: what there is to measure, by default one case, the benchmark's name. A case is a name
            or has a `name`, and may have a `group`; `--cases` chooses by them.
        variants: what `--against` compares of a case; None where it compares nothing.
        describe: what every record of the run says in addition to its origin.
        needs_gpu: whether there must be a GPU; otherwise the option `--device`, where there is
            one, says whether it is used.
    """

    name: str
    parser: argparse.ArgumentParser
    measure: Callable[[Run, Any], Iterable[Record]]
    cases: Callable[[argparse.Namespace], Sequence[Any]] | None = None
    variants: Callable[[Run, Any], list[Variant]] | None = None
    describe: Callable[[Run], Record] = lambda run: {}
    needs_gpu: bool = True

    def main(
        self, arguments: Sequence[str] | None = None, gpu: Gpu | None = None, world: Any = None
    ) -> int:
        """Measures, prints and writes what the command line requests.

        Args:
            arguments: the command line; None is that of the process.
            gpu: stands in for the GPU, for tests.
            world: the ranks, in a benchmark of several GPUs.

        Returns:
            The exit status: 1 if something of this library failed.
        """
        options = self.parser.parse_args(arguments)
        cases = self.selected(options)
        if options.against:
            from . import against

            return against.compare(self, options, arguments or sys.argv[1:])
        run = self.start(options, gpu, world)
        several = world is not None and world.num_ranks > 1
        start = f"torchrun --nproc-per-node {world.num_ranks} -m" if several else "python -m"
        command = f"{start} benchmarks.{self.name} {shlex.join(arguments or sys.argv[1:])}".rstrip()
        made_on = {
            "benchmark": self.name,
            **origin(command, options.commit, run.gpu.name if run.gpu else None),
            **run.limits,
        }
        if run.is_first:
            print_origin(made_on)
        made_on |= self.describe(run)
        records: list[Record] = []
        for case in cases:
            for record in self.measure(run, case):
                records.append({**made_on, **record})
                if run.is_first:
                    print(progress(record), flush=True)
            if options.json and run.is_first:
                write_records(options.json, records)
            gc.collect()
            if run.gpu:
                run.gpu.release()
        if run.is_first:
            print("\n" + text(records))
        return int(any(r.get("error") and r.get("impl") not in BASELINES for r in records))

    def selected(self, options: argparse.Namespace) -> list[Any]:
        """Returns the requested cases; ends the program if there are none."""
        every = self.cases(options) if self.cases else [self.name]
        texts = options.cases
        found = [
            case
            for case in every
            if not texts
            or getattr(case, "group", None) in texts
            or any(text in name_of(case) for text in texts)
        ]
        if not found:
            names = "; ".join(dict.fromkeys(map(name_of, every)))
            self.parser.error(f"--cases: expected groups or parts of these: {names}; got {texts}")
        return found

    def start(self, options: argparse.Namespace, gpu: Gpu | None, world: Any = None) -> Run:
        """Starts the run; ends the program if it needs a GPU and there is none."""
        if gpu is None and world is None and self.needs_gpu and not torch.cuda.is_available():
            sys.exit(f"benchmarks.{self.name}: expected an NVIDIA GPU and a CUDA build of torch")
        if gpu is None and torch.cuda.is_available() and self.wants_gpu(options, world):
            gpu = Gpu()
        limits = {}
        if gpu:
            limits = {name: float(f"{x:.4g}") for name, x in gpu.limits(21).items()}
            gpu.release()
        return Run(options, gpu, world, limits)

    def wants_gpu(self, options: argparse.Namespace, world: Any) -> bool:
        """Returns whether the GPU is used, where there is one."""
        if world is not None:
            return bool(world.device.type == "cuda")
        return self.needs_gpu or getattr(options, "device", "cpu") != "cpu"


# ---------------------------------------------------------------------------------------------
# Text
# ---------------------------------------------------------------------------------------------


def print_origin(record: Record) -> None:
    """Prints a few lines on the machine and the software."""
    lines = [
        f"hstu_attn {record['hstu_attn']} ({record['commit']}), torch {record['torch']}, "
        f"Python {record['python']}, {record['date']}",
        f"{record['cpu']} ({' '.join(record['features'])}), {record['threads']} threads",
    ]
    if record["gpu"]:
        lines.append(f"{record['gpu']}, CUDA {record['cuda']}, Triton {record['triton']}")
    if "matmul_tflops" in record:
        lines.append(
            f"8192^3 bf16 product {record['matmul_tflops']} TFLOP/s, copy {record['copy_tbps']} "
            "TB/s"
        )
    print("\n".join(lines) + "\n", flush=True)


_NAMES = (
    *("case", "head_dim", "division", "gpus", "pass", "impl", "model"),
    *("concurrency", "graphs", "load", "event"),
)
_FIGURES = {
    "ms": "ms",
    "us": "us",
    "host_us": "us of the host",
    "tflops": "TFLOP/s",
    "gflops": "GFLOP/s",
    "share_of_matmul": "of the product",
    "p50_ms": "ms (median)",
    "qps": "requests/s",
}


def progress(record: Record) -> str:
    """Returns one line on a record: which it is, and its main figures."""
    names = [str(record[name]) for name in _NAMES if record.get(name) not in (None, "")]
    if record.get("error"):
        return f"  FAILED  {', '.join(names)}: {record['error']}"
    figures = [
        f"{record[name]:g} {unit}"
        for name, unit in _FIGURES.items()
        if isinstance(record.get(name), (int, float))
    ]
    return f"{', '.join(names):60s} {', '.join(figures)}"
