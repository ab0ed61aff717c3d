"""The CPU kernels against plain torch.

    python -m benchmarks.cpu --quick
    python -m benchmarks.cpu --json cpu.json --threads 8
    python -m benchmarks.cpu --cases "D64 bfloat16"
    python -m benchmarks.cpu --against ../old --cases "64 x 32..512"

For jagged causal batches it times the forward (without gradients) and the backward alone, of

    hstu_attn       this library
    per sequence    two torch products for each sequence
    padded          two torch products for the whole batch, padded to its longest sequence
    compiled        the same under torch.compile, compiled for the batch; compiling is not counted

Every one is first held against the fp64 reference. Then rounds are interleaved (in each, every
implementation runs once, on the next of several input sets), and the median counts. A round during
which other processes kept the machine busy is repeated, within patience. Freed memory is kept for
the next call, for every implementation alike (see load.py). Next to the times is the peak memory
that a call needs (see memory.py); that of the backward includes the forward that it follows and
what that has saved.
"""

from __future__ import annotations

import argparse
import functools
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
_add("--patience", type=float, default=10, metavar="SECONDS",
     help="for which rounds beside other work are repeated, per case (default: 10)")  # fmt: skip

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
from .runner import Benchmark, Call, Run, Variant

__all__ = ["BENCHMARK", "DIRECTIONS", "Case", "figures", "main", "run_once"]

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
    """Raises AssertionError if a result is further from the exact one than rounding explains."""
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


def run_once(
    attention: plain_torch.Attention, inputs: Inputs
) -> tuple[dict[str, float], list[Tensor]]:
    """Returns the milliseconds of each direction, and the results."""
    leaves = inputs.leaves()
    start = time.perf_counter()
    with torch.no_grad():
        out = attention(inputs.q, inputs.k, inputs.v)
    forward = time.perf_counter() - start

    recorded = attention(*leaves)
    start = time.perf_counter()
    gradients = torch.autograd.grad(recorded, leaves, inputs.dout)
    backward = time.perf_counter() - start
    return {"forward": 1e3 * forward, "backward": 1e3 * backward}, [out, *gradients]


def time_case(
    case: Case, names: Sequence[str], options: argparse.Namespace
) -> dict[str, dict[str, list[float]]]:
    """Returns the milliseconds of every valid round, by implementation and direction."""
    input_sets = [Inputs.random(case, seed) for seed in range(INPUT_SETS)]
    exact = exact_results(case, input_sets[0])
    attentions = {}
    for name in names:
        attentions[name] = plain_torch.make(name, case)
        check(case, name, run_once(attentions[name], input_sets[0])[1], exact)
    del exact
    for attention in attentions.values():  # warm-up
        run_once(attention, input_sets[-1])

    rounds: list[dict[str, dict[str, float]]] = []
    disturbed: list[dict[str, dict[str, float]]] = []
    start = time.perf_counter()
    while len(rounds) < MOST_ROUNDS:
        elapsed = time.perf_counter() - start
        if len(rounds) >= options.rounds and elapsed > options.seconds:
            break
        if elapsed > options.patience and len(rounds) + len(disturbed) >= options.rounds:
            break
        number = len(rounds) + len(disturbed)
        first = number % len(names)
        before = CpuUse.now()
        round_ = {
            name: run_once(attentions[name], input_sets[number % INPUT_SETS])[0]
            for name in (*names[first:], *names[:first])
        }
        if before.others_since() <= OTHERS_ALLOWED:
            rounds.append(round_)
        else:
            disturbed.append(round_)
            time.sleep(0.5)
    if len(rounds) < options.rounds:
        print(f"{case.name}: {len(disturbed)} rounds beside other work, which count", flush=True)
        rounds += disturbed
    return {
        name: {direction: [r[name][direction] for r in rounds] for direction in DIRECTIONS}
        for name in names
    }


def figures(case: batches.Case, direction: str, ms: Sequence[float], skipped: str = "") -> Record:
    """Returns the fields of a CPU kernel's record that describe the rounds of a pass."""
    ordered = sorted(ms)
    median = ordered[len(ordered) // 2] if ordered else None
    return {
        "batch": case.batch,
        "shortest": case.shortest,
        "longest": case.longest,
        "heads": case.heads,
        "head_dim": case.head_dim,
        "dtype": case.dtype_name,
        "pass": direction,
        "ms": rounded(median),
        "fastest_ms": rounded(ordered[0] if ordered else None),
        "rounds": len(ordered),
        "gflops": rounded(median and case.flops(direction == "backward") / median / 1e6),
        "skipped": skipped,
    }


def measure(run: Run, case: Case) -> Iterator[Record]:
    """Measures both passes of each implementation."""
    torch.set_num_threads(run.options.threads or torch.get_num_threads())
    names = list(plain_torch.NAMES)
    needed = plain_torch.padded_bytes(case)
    skipped = {}
    if needed > PADDED_LIMIT:
        skipped = dict.fromkeys(PADDED, f"its score matrices take {needed / 1e9:.0f} GB")
        names = [name for name in names if name not in PADDED]
    times = time_case(case, names, run.options)
    memory = peak_mib(case, names)
    for direction in DIRECTIONS:
        for name in plain_torch.NAMES:
            ms = times[name][direction] if name in times else []
            peak = memory[name][direction] if memory and name in times else None
            found = figures(case, direction, ms, skipped.get(name, ""))
            lengths = super(Case, case).name
            yield {"case": lengths, "impl": name, **found, "peak_mib": rounded(peak)}


def variants(run: Run, case: Case) -> list[Variant]:
    """Returns this library's forward and backward, for `--against`."""
    torch.set_num_threads(run.options.threads or torch.get_num_threads())

    @functools.cache
    def prepared() -> tuple[plain_torch.Attention, list[Inputs]]:
        inputs = [Inputs.random(case, seed) for seed in range(INPUT_SETS)]
        attention = plain_torch.make("hstu_attn", case)
        check(case, "hstu_attn", run_once(attention, inputs[0])[1], exact_results(case, inputs[0]))
        return attention, inputs

    def make(direction: str) -> list[Call]:
        attention, inputs = prepared()
        if direction == "forward":
            return [torch.no_grad()(functools.partial(attention, x.q, x.k, x.v)) for x in inputs]
        leaves = [x.leaves() for x in inputs]
        return [
            functools.partial(torch.autograd.grad, attention(*x), x, each.dout, retain_graph=True)
            for x, each in zip(leaves, inputs, strict=True)
        ]

    def milliseconds(call: Call) -> float:
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)

    return [
        Variant("hstu_attn", direction, functools.partial(make, direction), milliseconds)
        for direction in DIRECTIONS
    ]


BENCHMARK = Benchmark("cpu", PARSER, measure, cases, variants, needs_gpu=False)
main = BENCHMARK.main

if __name__ == "__main__":
    keep_freed_memory()
    sys.exit(main())
