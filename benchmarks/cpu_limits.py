"""How near the CPU kernels come to the machine.

    python -m benchmarks.cpu_limits
    python -m benchmarks.cpu_limits --rounds 21 --json cpu_limits.json

For 8 sequences of 1024 tokens, causal, it times every instruction set that this processor has
(HSTU_ATTN_CPU_ISA), and head dims from 32 to 256 for the best one. Beside them stands torch's own
product of two 2048 x 2048 matrices of the same dtype: what the machine does where nothing but
multiplying is asked for.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_limits", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--rounds", type=int, default=7, help="of each case (default 7)")
    return parser


if __name__ == "__main__":
    _parser().parse_args()  # --help or a wrong option ends here, before torch is imported

import torch

from .baselines import plain_torch
from .cases import Case, Inputs
from .cpu import DIRECTIONS, run_once
from .report import Result, environment, print_environment, text_table, write_results

__all__ = ["main"]

VARIABLE = "HSTU_ATTN_CPU_ISA"
LEVELS = ("baseline", "avx2", "avx512", "avx512bf16", "amx")  # ascending, as csrc/cpu/select.cpp
BF16_LEVELS = ("avx512bf16", "amx")  # without them, these levels are the one before
HEAD_DIMS = (32, 64, 128, 256)
DTYPES = (torch.float32, torch.bfloat16)
MATMUL, MATMUL_SIZE = "torch.matmul", 2048


def available_levels(dtype: torch.dtype) -> list[str]:
    """The levels that have a kernel of their own for the dtype, on this processor."""
    case = Case(1, 8, 8, heads=1, head_dim=8, dtype=dtype)
    inputs = Inputs.random(case, 0)
    found = []
    for level in LEVELS:
        if level in BF16_LEVELS and dtype != torch.bfloat16:
            continue
        os.environ[VARIABLE] = level
        try:
            run_once(plain_torch.make("hstu_attn", case), inputs)
            found.append(level)
        except ValueError:
            pass
        finally:
            del os.environ[VARIABLE]
    return found


def _time_matmul(dtype: torch.dtype) -> Callable[[], dict[str, float]]:
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE).to(dtype) for _ in range(2))

    def run() -> dict[str, float]:
        start = time.perf_counter()
        torch.mm(a, b)
        return {"forward": 1e3 * (time.perf_counter() - start)}

    return run


def _time_kernel(case: Case, level: str) -> Callable[[], dict[str, float]]:
    inputs = Inputs.random(case, 0)
    attention = plain_torch.make("hstu_attn", case)

    def run() -> dict[str, float]:
        os.environ[VARIABLE] = level
        try:
            return run_once(attention, inputs)[0]
        finally:
            del os.environ[VARIABLE]

    return run


def measure(dtype: torch.dtype, rounds: int) -> list[Result]:
    """All results of a dtype, from interleaved rounds."""
    levels = available_levels(dtype)
    cases = {head_dim: Case(8, 1024, 1024, 4, head_dim, dtype) for head_dim in HEAD_DIMS}
    runs = {(MATMUL, 0): _time_matmul(dtype)}
    for head_dim, case in cases.items():
        for level in levels if head_dim in (64, 128) else levels[-1:]:
            runs[level, head_dim] = _time_kernel(case, level)
    times: dict[tuple[str, int], list[dict[str, float]]] = {key: [] for key in runs}
    for round_ in range(rounds + 1):
        for key, run in runs.items():
            elapsed = run()
            if round_ > 0:  # the first one warms up
                times[key].append(elapsed)

    results = []
    for (name, head_dim), elapsed_ in times.items():
        if name == MATMUL:
            case = Case(1, MATMUL_SIZE, MATMUL_SIZE, 1, MATMUL_SIZE, dtype)  # the same FLOPs
            ms = [t["forward"] for t in elapsed_]
            results.append(Result.of(case, "forward", name, ms=ms))
            continue
        for direction in DIRECTIONS:
            ms = [t[direction] for t in elapsed_]
            results.append(Result.of(cases[head_dim], direction, name, ms=ms))
    return results


def _print(results: Sequence[Result]) -> None:
    rows = [["", "D", "dtype", "pass", "ms", "GFLOP/s"]]
    for r in results:
        numbers = [f"{r.ms:.1f}", f"{r.gflops:.0f}"]
        rows.append([r.impl, str(r.head_dim), r.dtype, r.direction, *numbers])
    print("\n".join(text_table(rows)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints, and writes what was asked for."""
    options = _parser().parse_args(arguments)
    described = environment("python -m benchmarks.cpu_limits")
    print_environment(described)
    results = [result for dtype in DTYPES for result in measure(dtype, options.rounds)]
    _print(results)
    if options.json:
        write_results(options.json, described, results)


if __name__ == "__main__":
    main()
