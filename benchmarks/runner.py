"""Runs a benchmark: its command line, its records and its exit status.

A benchmark module defines its cases and how to measure one of them, and makes a `Benchmark` from
both. Everything else is here and in `timing`.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import against
from .gpu import Gpu
from .record import BASELINES, Record, origin, write_records
from .tables import text
from .timing import Run, Variant

__all__ = ["Benchmark", "name_of"]


def name_of(case: Any) -> str:
    """Returns the name of a case."""
    return str(getattr(case, "name", case))


@dataclass(frozen=True)
class Benchmark:
    """A benchmark, which `main` runs.

    Attributes:
        name: the name of its module in this package.
        parser: the parser of `cli.parser`.
        measure: returns the records of a case, without the fields of `describe` and
            `record.origin`.
        cases: returns the cases, by default one with the benchmark's name. A case is a name or has
            a `name`, and may have a `group`; `--cases` selects by either.
        variants: returns the variants of a case for `--against`; None if that is not supported.
        describe: returns fields that every record of the run has in addition to its origin.
        needs_gpu: whether a GPU is required; otherwise the option `--device`, if the benchmark has
            it, decides whether a GPU is used.
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
            arguments: the command line; None for that of the process.
            gpu: replaces the GPU in tests.
            world: the ranks, in a benchmark of several GPUs.

        Returns:
            The exit status: 1 if something of this library failed.
        """
        options = self.parser.parse_args(arguments)
        cases = self.selected(options)
        if options.against:
            return against.compare(self.name, cases, options, arguments or sys.argv[1:])
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
        """Returns whether the GPU is used, if there is one."""
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
    *("concurrency", "graphs", "load", "event", "store"),
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
    "ready_seconds": "s to ready",
}


def progress(record: Record) -> str:
    """Returns one line on a record: its case, implementation and main figures."""
    names = [str(record[name]) for name in _NAMES if record.get(name) not in (None, "")]
    if record.get("error"):
        return f"  FAILED  {', '.join(names)}: {record['error']}"
    figures = [
        f"{record[name]:g} {unit}"
        for name, unit in _FIGURES.items()
        if isinstance(record.get(name), (int, float))
    ]
    return f"{', '.join(names):60s} {', '.join(figures)}"
