"""How near the CPU kernels come to the machine.

    python -m benchmarks.cpu_limits
    python -m benchmarks.cpu_limits --rounds 21 --json cpu_limits.json

For 8 sequences of 1024 tokens, causal, it times every instruction set that this processor has
(HSTU_ATTN_CPU_ISA), and head dims from 32 to 256 for the best one. Beside them stands torch's own
product of two 2048 x 2048 matrices of the same dtype: what the machine does where nothing but
multiplying is asked for.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator

from . import cli

PARSER = cli.parser("cpu_limits", __doc__, rounds=7, cases="float32 or bfloat16")

if __name__ == "__main__":
    PARSER.parse_args()  # --help or a wrong option ends here, before torch is imported

import torch

from .baselines import plain_torch
from .cases import Case, Inputs
from .cpu import DIRECTIONS, figures, run_once
from .record import Record
from .runner import Benchmark, Run
from .tables import MATMUL

__all__ = ["BENCHMARK", "main"]

VARIABLE = "HSTU_ATTN_CPU_ISA"
LEVELS = ("baseline", "avx2", "avx512", "avx512bf16", "amx")  # ascending, as csrc/cpu/select.cpp
BF16_LEVELS = ("avx512bf16", "amx")  # without them, these levels are the one before
HEAD_DIMS = (32, 64, 128, 256)
MATMUL_SIZE = 2048


def available_levels(dtype: torch.dtype) -> list[str]:
    """Returns the levels that have a kernel of their own for the dtype, on this processor."""
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


def measure(run: Run, dtype_name: str) -> Iterator[Record]:
    """Measures all records of a dtype in interleaved rounds."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    levels = available_levels(dtype)
    by_dim = {head_dim: Case(8, 1024, 1024, 4, head_dim, dtype) for head_dim in HEAD_DIMS}
    runs = {(MATMUL, MATMUL_SIZE): _time_matmul(dtype)}
    for head_dim, case in by_dim.items():
        for level in levels if head_dim in (64, 128) else levels[-1:]:
            runs[level, head_dim] = _time_kernel(case, level)
    by_dim[MATMUL_SIZE] = Case(1, MATMUL_SIZE, MATMUL_SIZE, 1, MATMUL_SIZE, dtype)  # as many FLOPs
    times: dict[tuple[str, int], list[dict[str, float]]] = {key: [] for key in runs}
    for round_ in range(run.options.rounds + 1):
        for key, call in runs.items():
            elapsed = call()
            if round_ > 0:  # the first one warms up
                times[key].append(elapsed)
    for (name, head_dim), rounds in times.items():
        case = by_dim[head_dim]
        for direction in DIRECTIONS if name != MATMUL else ("forward",):
            found = figures(case, direction, [ms[direction] for ms in rounds])
            yield {"case": case.name, "impl": name, **found}


BENCHMARK = Benchmark(
    "cpu_limits", PARSER, measure, lambda options: ("float32", "bfloat16"), needs_gpu=False
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
