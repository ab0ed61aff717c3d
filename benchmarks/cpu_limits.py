"""Compares the speed of the CPU kernels with that of torch's matrix product.

    python -m benchmarks.cpu_limits
    python -m benchmarks.cpu_limits --rounds 21 --json cpu_limits.json

For 8 sequences of 1024 tokens, causal, it times every instruction set that this processor has
(HSTU_ATTN_CPU_ISA), and head dims from 32 to 256 for the best one. The upper limit is torch's
product of two 2048 x 2048 matrices of the same dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

from . import cli

PARSER = cli.parser("cpu_limits", __doc__, rounds=7, cases="float32 or bfloat16")

if __name__ == "__main__":
    PARSER.parse_args()  # --help or a wrong option ends here, before torch is imported

import torch

from .baselines import plain_torch
from .cases import Case, Inputs
from .cpu import DIRECTIONS, figures, milliseconds, sizes
from .record import Record
from .runner import Benchmark
from .tables import MATMUL
from .timing import Call, Run, Variant, clocked, environment, take_turns

__all__ = ["BENCHMARK", "main"]

VARIABLE = "HSTU_ATTN_CPU_ISA"
LEVELS = ("baseline", "avx2", "avx512", "avx512bf16", "amx")  # ascending, as csrc/cpu/select.cpp
BF16_LEVELS = ("avx512bf16", "amx")  # for fp32 they run the kernels of "avx512"
HEAD_DIMS = (32, 64, 128, 256)
MATMUL_SIZE = 2048


def available_levels(dtype: torch.dtype) -> list[str]:
    """Returns the levels of this processor that have separate kernels for the dtype."""
    case = Case(1, 8, 8, heads=1, head_dim=8, dtype=dtype)
    inputs, attention = Inputs.random(case, 0), plain_torch.make("hstu_attn", case)
    found = []
    for level in LEVELS:
        if level in BF16_LEVELS and dtype != torch.bfloat16:
            continue
        with environment(VARIABLE, level), suppress(ValueError):
            attention(inputs.q, inputs.k, inputs.v)
            found.append(level)
    return found


def product(dtype: torch.dtype) -> Variant:
    """Returns torch's matrix product."""

    def make() -> list[Call]:
        a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE).to(dtype) for _ in range(2))
        return [partial(torch.mm, a, b)]

    return Variant(MATMUL, "forward", make, clocked)


def kernel(case: Case, level: str, direction: str) -> Variant:
    """Returns one pass of this library, with the kernels of one instruction set."""

    def make() -> list[Call]:
        attention = plain_torch.make("hstu_attn", case)
        return [partial(milliseconds, direction, attention, Inputs.random(case, 0))]

    active = partial(environment, VARIABLE, level)
    return Variant(level, direction, make, lambda call: float(call()), active)


def measure(run: Run, dtype_name: str) -> Iterator[Record]:
    """Measures all records of a dtype in interleaved rounds."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    levels = available_levels(dtype)
    # This causal case has as many FLOPs as the product.
    every = [(Case(1, MATMUL_SIZE, MATMUL_SIZE, 1, MATMUL_SIZE, dtype), product(dtype))]
    for head_dim in HEAD_DIMS:
        case = Case(8, 1024, 1024, 4, head_dim, dtype)
        for level in levels if head_dim in (64, 128) else levels[-1:]:
            every += [(case, kernel(case, level, direction)) for direction in DIRECTIONS]
    for _, variant in every:
        variant.attempt(variant.prepare)
    take_turns([variant for _, variant in every], run.options.rounds)
    for case, variant in every:
        yield {"case": case.name, **sizes(case), **figures(case, variant)}


BENCHMARK = Benchmark(
    "cpu_limits", PARSER, measure, lambda options: ("float32", "bfloat16"), needs_gpu=False
)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
