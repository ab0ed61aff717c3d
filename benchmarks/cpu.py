"""The CPU kernels against plain torch.

    python -m benchmarks.cpu --quick
    python -m benchmarks.cpu --json cpu.json --threads 8
    python -m benchmarks.cpu --cases "D64 bfloat16"
    python -m benchmarks.cpu --against ../old --cases "64 x 32..512"

For jagged causal batches it times the forward (without gradients) and the backward alone, of

    hstu_attn       this library
    per sequence    two torch products for each sequence
    padded          two torch products for the whole batch, padded to its longest sequence
    compiled        `padded` under torch.compile, compiled for the batch; compiling is not timed

Each is first compared with the fp64 reference. Then rounds are interleaved (in each, every
implementation runs once, on the next of several input sets), and the median is reported. A round
during which other processes kept the machine busy is repeated, for a limited time. malloc keeps
freed memory for the next call, for all implementations (see load.py). Next to the times is the peak
memory of a call (see memory.py); the backward's peak includes the forward and its saved tensors.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from . import cli

PARSER = cli.parser(
    "cpu", __doc__, rounds=5, cases='cases whose "16 x 32..512 D64 float32" has TEXT', against=True
)
_add = PARSER.add_argument
_add("--quick", action="store_true", help="two tiny cases, to see that it runs")
_add("--threads", type=int, help="of the kernels (default: torch's)")
_add("--seconds", type=float, default=3, help="more rounds of a case until then (default: 3)")
_add("--patience", type=float, default=10, metavar="SECONDS", help="for which a case repeats "
     "rounds that other work disturbed (default: 10)")  # fmt: skip

if __name__ == "__main__":
    PARSER.parse_args()  # --help or a wrong option ends here, before torch is imported

import torch
from torch import Tensor

from hstu_attn import Mask, reference

from . import cases as batches
from .baselines import plain_torch
from .cases import Inputs
from .load import CpuUse, keep_freed_memory
from .memory import peak_mib
from .record import Record, rounded
from .runner import Benchmark
from .timing import Call, Run, Variant, clocked, take_turns

__all__ = ["BENCHMARK", "DIRECTIONS", "Case", "figures", "main", "milliseconds", "sizes"]

DIRECTIONS = ("forward", "backward")
PADDED = ("padded", "compiled")
LENGTHS = ((16, 32, 512), (64, 32, 512), (256, 32, 128), (16, 32, 2048), (64, 32, 2048))
INPUT_SETS = 3
MOST_ROUNDS = 21
OTHERS_ALLOWED = 0.1  # processors that other work may keep busy in a round that counts
PADDED_LIMIT = 6e9  # bytes of score matrices
# Largest error, relative to the exact result, both in the Frobenius norm.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True)
class Case(batches.Case):
    """A jagged causal batch, whose name says its head dim and dtype."""

    @property
    def name(self) -> str:
        """A name such as "16 x 32..512 D64 float32"."""
        return f"{super().name} D{self.head_dim} {self.dtype_name}"


def cases(options: argparse.Namespace) -> list[Case]:
    """Returns all cases, or two tiny ones."""
    dtypes = (torch.float32, torch.bfloat16)
    if options.quick:
        options.seconds = options.patience = 0
        return [Case(3, 8, 48, heads=2, head_dim=16, dtype=dtype) for dtype in dtypes]
    return [
        Case(*lengths, heads=4, head_dim=head_dim, dtype=dtype)
        for dtype in dtypes
        for head_dim in (64, 128)
        for lengths in LENGTHS
    ]


# ---------------------------------------------------------------------------------------------
# Correctness
# ---------------------------------------------------------------------------------------------


def exact_results(case: Case, inputs: Inputs) -> list[Tensor]:
    """Computes the output and the gradients of q, k and v by the fp64 reference."""
    pieces: list[tuple[Tensor, ...]] = []
    packed = (inputs.q, inputs.k, inputs.v, inputs.dout)
    for sequence in zip(*(x.split(case.lengths) for x in packed), strict=True):
        *leaves, dout = (x.double() for x in sequence)
        q, k, v = (x.requires_grad_() for x in leaves)
        out = reference.hstu_attention(
            q,
            k,
            v,
            cu_seqlens_q=torch.tensor([0, len(q)]),
            max_seqlen_q=len(q),
            scaling_seqlen=max(case.lengths),
            mask=Mask.causal(),
            alpha=case.alpha,
        )
        pieces.append((out.detach(), *torch.autograd.grad(out, (q, k, v), dout)))
    return [torch.cat(parts) for parts in zip(*pieces, strict=True)]


def check(case: Case, name: str, results: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
    """Raises AssertionError if the error of a result exceeds the tolerance of its dtype."""
    for what, result, truth in zip(("out", "dq", "dk", "dv"), results, exact, strict=True):
        error = ((result.double() - truth).norm() / truth.norm()).item()
        if not error < TOLERANCE[case.dtype]:
            raise AssertionError(
                f"{name}, {case.name}, {case.dtype_name}: {what} has a relative error of "
                f"{error:.2e}, more than {TOLERANCE[case.dtype]:.0e}"
            )


# ---------------------------------------------------------------------------------------------
# Time
# ---------------------------------------------------------------------------------------------


def milliseconds(direction: str, attention: plain_torch.Attention, inputs: Inputs) -> float:
    """Times one pass; the forward that a backward follows is not timed."""
    leaves = inputs.leaves()
    if direction == "forward":
        return clocked(functools.partial(torch.no_grad()(attention), *leaves))
    out = attention(*leaves)
    return clocked(lambda: torch.autograd.grad(out, leaves, inputs.dout))


def variants(run: Run, case: Case) -> list[Variant]:
    """Returns the passes of each implementation, or, for `--against`, of this library."""
    torch.set_num_threads(run.options.threads or torch.get_num_threads())

    @functools.cache
    def input_sets() -> list[Inputs]:
        return [Inputs.random(case, seed) for seed in range(INPUT_SETS)]

    @functools.cache
    def exact() -> list[Tensor]:
        return exact_results(case, input_sets()[0])

    @functools.cache
    def checked(name: str) -> plain_torch.Attention:
        attention = plain_torch.make(name, case)
        first = input_sets()[0]
        out = torch.no_grad()(attention)(first.q, first.k, first.v)
        check(case, name, [out, *plain_torch.gradients(attention, first)], exact())
        return attention

    def make(name: str, direction: str) -> list[Call]:
        attention = checked(name)
        return [functools.partial(milliseconds, direction, attention, x) for x in input_sets()]

    names = measured_names(case)
    return [
        Variant(name, direction, functools.partial(make, name, direction), lambda call: call())
        for direction in DIRECTIONS
        for name in (names[:1] if run.options.against else names)
    ]


def measured_names(case: Case) -> list[str]:
    """Returns the implementations, this library first, without those that need too much memory."""
    too_large = plain_torch.padded_bytes(case) > PADDED_LIMIT
    return [name for name in plain_torch.NAMES if not (too_large and name in PADDED)]


def time_quiet_rounds(every: Sequence[Variant], case: Case, options: argparse.Namespace) -> None:
    """Times rounds until there are enough quiet ones, which no other process disturbed.

    If there are too few after `patience` seconds, the disturbed rounds count as well.
    """
    quiet = 0
    disturbed: list[list[float]] = [[] for _ in every]
    start = time.perf_counter()
    for number in itertools.count():
        elapsed = time.perf_counter() - start
        if quiet == MOST_ROUNDS or (quiet >= options.rounds and elapsed > options.seconds):
            break
        if elapsed > options.patience and number >= options.rounds:
            break
        before = CpuUse.now()
        take_turns(every, 1, first=number)
        if before.others_since() <= OTHERS_ALLOWED:
            quiet += 1
            continue
        for variant, times in zip(every, disturbed, strict=True):
            times += variant.times[quiet:]
            del variant.times[quiet:]
        time.sleep(0.5)
    if quiet < options.rounds:
        print(f"{case.name}: other work disturbed {number - quiet} rounds, which count", flush=True)
        for variant, times in zip(every, disturbed, strict=True):
            variant.times += times


def sizes(case: batches.Case) -> Record:
    """Returns the fields of a CPU kernel's record that describe the batch."""
    names = ("batch", "shortest", "longest", "heads", "head_dim")
    return {**{name: getattr(case, name) for name in names}, "dtype": case.dtype_name}


def figures(case: batches.Case, variant: Variant) -> Record:
    """Returns the figures of a pass, with its GFLOP/s."""
    found = {"pass": variant.direction, "impl": variant.impl, **variant.figures()}
    if variant.error:
        return found
    flops = case.flops(variant.direction == "backward")
    return {**found, "gflops": rounded(flops / variant.median / 1e6)}


def measure(run: Run, case: Case) -> Iterator[Record]:
    """Measures both passes of each implementation."""
    every = variants(run, case)
    for variant in every:
        variant.attempt(variant.prepare)
    time_quiet_rounds(every, case, run.options)
    names = measured_names(case)
    memory = peak_mib(case, names)
    shared = {"case": super(Case, case).name, **sizes(case)}
    for variant in every:
        peak = memory[variant.impl][variant.direction] if memory else None
        yield {**shared, **figures(case, variant), "peak_mib": rounded(peak), "skipped": ""}
    gigabytes = plain_torch.padded_bytes(case) / 1e9
    nothing = {"ms": None, "peak_mib": None, "error": ""}
    skipped = f"its score matrices take {gigabytes:.0f} GB"
    for name in plain_torch.NAMES:
        for direction in () if name in names else DIRECTIONS:
            yield {**shared, "impl": name, "pass": direction, **nothing, "skipped": skipped}


BENCHMARK = Benchmark("cpu", PARSER, measure, cases, variants, needs_gpu=False)
main = BENCHMARK.main

if __name__ == "__main__":
    keep_freed_memory()
    sys.exit(main())
