"""The kernels for GPUs against Triton and softmax attention.

    python -m benchmarks.attention --json attention.json
    python -m benchmarks.attention --cases masks "4 x 8192" --head-dims 128
    python -m benchmarks.attention --cases scan --json scan.json
    python -m benchmarks.attention --against ../old --impls hstu_attn

The cases are those of cases.py, the implementations those of implementations.py. Each
implementation of HSTU attention is first checked against the tests' tolerance, on a small batch of
the same kind. Then rounds are interleaved (in each, every implementation runs once, on the next of
several input sets, which together exceed the caches wherever a batch is large), and the median
over the rounds is reported.

Times are GPU times, by CUDA events, of the forward without gradients and of the backward alone.
FLOPs are counted from the visible pairs of a row and a key, half of all pairs for plain causal; the
backward counts 2.5 times the forward. "share" is the fraction of the FLOP/s of an 8192^3 bf16
matrix product in the same run. "host" is the host's time of a call in microseconds, without waiting
for the GPU. A failure is stored in its record, and the run goes on; if this library failed, the
exit status is 1.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterator, Sequence

from . import cli

PARSER = cli.parser(
    "attention",
    __doc__,
    rounds=21,
    cases="groups (table, rab, relative, fp8, fp8_backward, deterministic, masks, latency, host, "
    "scan) or parts of cases' names (default: all but scan)",
    against=True,
)
PARSER.add_argument("--head-dims", nargs="+", type=int, metavar="D", help="(default: 64 128 256)")
PARSER.add_argument(
    "--impls", nargs="+", metavar="NAME", help="hstu_attn, hstu_attn_smNN, hstu_attn_fp8, "
    "hstu_attn_e4m3, hstu_attn_fp8_backward, dense_bias, triton, flash2, cudnn "
    "(default: hstu_attn, hstu_attn_sm80, FP8 and baselines)",
)  # fmt: skip

if __name__ == "__main__":
    PARSER.parse_args()  # --help or a wrong option ends here, before torch is imported

from hstu_attn.testing import Batch

from . import implementations
from .cases import HEAD_DIMS, SCAN_HEAD_DIMS, Case, attention_cases, scan_cases
from .implementations import Implementation, Prepared
from .record import BASELINES, Record, rounded
from .runner import Benchmark
from .timing import Call, Run, Variant, take_turns

__all__ = ["BENCHMARK", "INPUT_SETS", "main", "make_implementations"]

INPUT_SETS = 3
OURS = ("hstu_attn", "hstu_attn_sm80")
TILE = (128, 128)  # rows and keys of a tile, for the count of a mask's tiles


def cases(options: argparse.Namespace) -> list[Case]:
    """Returns the cases of the head dims that were asked for."""
    found = attention_cases(tuple(options.head_dims or HEAD_DIMS))
    if "scan" in (options.cases or ()):
        found += scan_cases(tuple(options.head_dims or SCAN_HEAD_DIMS))
    return found


def impl_names(options: argparse.Namespace) -> Sequence[str]:
    """Returns the implementations that were asked for."""
    if options.impls:
        names: Sequence[str] = options.impls
        return names
    return OURS if options.against else (*OURS, *implementations.FP8, *BASELINES)


@functools.cache
def make_implementations(*names: str) -> list[Implementation]:
    """Returns the implementations of these names; baselines that are not installed are reported.

    Raises:
        ValueError: a name is not one of an implementation.
    """
    found = []
    for name in names:
        if name in BASELINES and not implementations.is_installed(name):
            print(f"  MISSING  {name}: it needs a package that is not installed", flush=True)
        else:
            found.append(implementations.make(name))
    return found


def is_host(direction: str) -> bool:
    """Returns whether the pass is timed on the host."""
    return direction.startswith("host")


def variants(run: Run, case: Case) -> list[Variant]:
    """Returns the passes of a case for each implementation that supports it."""
    gpu = run.the_gpu()

    @functools.cache
    def batches() -> list[Batch]:
        return [case.make(seed, gpu.device) for seed in range(INPUT_SETS)]

    @functools.cache
    def prepared(implementation: Implementation) -> list[Prepared]:
        implementation.check(case, gpu.device)
        return [implementation.prepare(case, batch) for batch in batches()]

    def make(implementation: Implementation, direction: str) -> list[Call]:
        return [call_of(direction, each) for each in prepared(implementation)]

    return [
        Variant(
            implementation.name,
            direction,
            functools.partial(make, implementation, direction),
            gpu.host_microseconds if is_host(direction) else gpu.milliseconds,
            implementation.active,
        )
        for direction in case.passes
        for implementation in make_implementations(*impl_names(run.options))
        if implementation.takes(case)
    ]


def call_of(direction: str, prepared: Prepared) -> Call:
    """Returns the function of a pass that is timed."""
    if direction == "backward":
        return functools.partial(prepared.backward_of, prepared.with_autograd())
    return prepared.with_autograd if direction == "host with autograd" else prepared.forward


def measure(run: Run, case: Case) -> Iterator[Record]:
    """Yields a record of each pass by each implementation."""
    gpu = run.the_gpu()
    tiles = case.executed_tiles(*TILE) if case.group == "masks" else None
    every = variants(run, case)
    for direction in case.passes:
        chosen = [variant for variant in every if variant.direction == direction]
        every = [variant for variant in every if variant.direction != direction]
        for variant in chosen:
            variant.attempt(variant.prepare)
        take_turns(chosen, run.options.rounds)
        backward = direction == "backward"
        flops = case.flops(backward)
        for variant in chosen:
            record = {
                "case": case.name,
                "group": case.group,
                "heads": case.heads,
                "head_dim": case.head_dim,
                "dtype": case.dtype_name,
                "pass": direction,
                "impl": variant.impl,
                "flops": flops,
                "least_bytes": case.least_bytes(backward),
                "executed_tiles": tiles,
                **variant.figures("host_us" if is_host(direction) else "ms"),
            }
            if not is_host(direction) and not variant.error:
                tflops = flops / variant.median / 1e9
                record |= {
                    "tflops": rounded(tflops),
                    "share_of_matmul": rounded(tflops / run.limits["matmul_tflops"]),
                    "peak_memory_bytes": variant.attempt(gpu.peak_bytes, variant.calls[0]),
                }
            yield record


BENCHMARK = Benchmark("attention", PARSER, measure, cases, variants)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
