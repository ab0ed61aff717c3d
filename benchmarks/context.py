"""Context parallel attention over the GPUs of a machine, against one GPU.

    torchrun --nproc-per-node 8 -m benchmarks.context --json context.json
    python -m benchmarks.context --length 32768 --rounds 5

It measures the forward and the backward of one long causal sequence. First, if memory allows, the
first GPU computes the whole sequence alone; then each GPU computes a part. Both results must agree
on the first rank's rows, or the exit status is 1. A round's time is that of the slowest rank, and
the median over the rounds is reported. "waiting" is the part of the time for which a rank's compute
stream waited for keys or gradients, averaged over the ranks. FLOPs count the visible half of the
scores; the backward counts 2.5 times the forward. Without torchrun the world is one GPU.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from . import cli

PARSER = cli.parser("context", __doc__, rounds=21)
_add = PARSER.add_argument
_add("--length", type=int, default=131072, help="tokens of the sequence (default: 131072)")
_add("--heads", type=int, default=4, help="heads (default: 4)")
_add("--head-dim", type=int, default=128, help="width of a head (default: 128)")

if __name__ == "__main__":
    PARSER.parse_args()  # --help or a wrong option ends here, before torch is imported

import torch
import torch.distributed as dist
from torch import Tensor

from hstu_attn import Mask, hstu_attention
from hstu_attn.distributed import World, context_parallel
from hstu_attn.distributed.context_parallel import ContextBatch

from . import ranks
from .cases import Case
from .record import Record, rounded
from .runner import Benchmark
from .timing import Run, explain

__all__ = ["BENCHMARK", "RESULTS", "main"]

PASSES = ("forward", "backward")
RESULTS = ("out", "dq", "dk", "dv")
WARM_UP = 3
LARGEST_ERROR = 1e-2  # relative, in the norm; rounding to bf16 on 8 ranks gives about 4e-3


def describe(run: Run) -> Record:
    """Returns the sizes of the sequence."""
    options = run.options
    return {"heads": options.heads, "head_dim": options.head_dim, "dtype": "bfloat16"}


# ---------------------------------------------------------------------------------------------
# Time
# ---------------------------------------------------------------------------------------------


class Clock(ranks.Clock):
    """A clock that also measures how long context parallel attention waited."""

    @contextmanager
    def waits(self) -> Iterator[list[tuple[Any, Any]]]:
        """Records when each wait for a transfer of context parallel attention begins and ends."""
        found: list[tuple[Any, Any]] = []
        wait = context_parallel._wait

        def timed(transfers: list[dist.Work]) -> None:
            start = self.now()
            wait(transfers)
            found.append((start, self.now()))

        with mock.patch.object(context_parallel, "_wait", timed):
            yield found


@dataclass
class Times:
    """Milliseconds of each round: the slowest rank's, and the mean waiting time of the ranks."""

    ms: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PASSES})
    waiting: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PASSES})

    def add(self, ms: Sequence[float], waiting: Sequence[float]) -> None:
        """Adds one round of the passes."""
        for name, whole, part in zip(PASSES, ms, waiting, strict=True):
            self.ms[name].append(whole)
            self.waiting[name].append(part)


# ---------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def passes_of(
    attention: Attention, inputs: Sequence[Tensor], clock: Clock
) -> tuple[tuple[Tensor, ...], list[float], list[float]]:
    """Returns the results of one round, and the total and waiting milliseconds of each pass."""
    *qkv, dout = inputs
    leaves = [x.detach().requires_grad_() for x in qkv]
    q, k, v = leaves
    with clock.waits() as waits:
        start = clock.now()
        out = attention(q, k, v)
        middle, forward_waits = clock.now(), len(waits)
        gradients = torch.autograd.grad(out, leaves, dout)
        end = clock.now()
    stood = [clock.ms(*moments) for moments in waits]
    ms = [clock.ms(start, middle), clock.ms(middle, end)]
    return (out.detach(), *gradients), ms, [sum(stood[:forward_waits]), sum(stood[forward_waits:])]


def time_rounds(
    attention: Attention, inputs: Sequence[Tensor], rounds: int, world: World
) -> tuple[Times, tuple[Tensor, ...]]:
    """Returns the combined times of all ranks, and this rank's results."""
    clock, times = Clock(world.device), Times()
    results: tuple[Tensor, ...] = ()
    for round_ in range(WARM_UP + rounds):
        ranks.wait_for_all(world.mesh, world.device)
        results, ms, waiting = passes_of(attention, inputs, clock)
        ms = ranks.over_all(ms, dist.ReduceOp.MAX, world.mesh, world.device)
        waiting = ranks.over_all(waiting, dist.ReduceOp.SUM, world.mesh, world.device)
        if round_ >= WARM_UP:
            times.add(ms, [x / world.num_ranks for x in waiting])
    return times, results


def time_alone(
    attention: Attention, inputs: Sequence[Tensor], rounds: int, world: World
) -> tuple[Times, tuple[Tensor, ...]] | None:
    """Times the first rank alone; returns None on the others, and if memory runs out."""
    found = None
    if world.rank == 0:
        try:
            alone = World(0, world.local_rank, 1, world.device, None)
            found = time_rounds(attention, inputs, rounds, alone)
        except torch.cuda.OutOfMemoryError as error:
            print(f"one GPU alone: {explain(error)}")
            torch.cuda.empty_cache()
    ranks.wait_for_all(world.mesh, world.device)
    return found


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Returns the norm of the difference, divided by the norm of `exact`."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def records_of(impl: str, times: Times, case: Case, gpus: int, alone: Times | None) -> list[Record]:
    """Returns a record for each pass, and for both together."""
    passes = (*((name, (name,)) for name in PASSES), ("both", PASSES))

    def medians(of: dict[str, list[float]], names: Sequence[str]) -> float:
        return statistics.median(map(sum, zip(*(of[name] for name in names), strict=True)))

    records = []
    for name, parts in passes:
        ms = medians(times.ms, parts)
        flops = sum(case.flops(part == "backward") for part in parts)
        record = {
            "impl": impl,
            "pass": name,
            "gpus": gpus,
            "ms": rounded(ms),
            "rounds": len(times.ms[parts[0]]),
            "tflops_per_gpu": rounded(flops / ms / gpus / 1e9),
            "speedup": rounded(medians(alone.ms, parts) / ms) if alone else None,
            "waiting_share": rounded(medians(times.waiting, parts) / ms),
        }
        records.append(record)
    return records


def random_inputs(case: Case, device: torch.device) -> list[Tensor]:
    """Returns q, k, v and the gradient of the output, the same on all ranks."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (sum(case.lengths), case.heads, case.head_dim)
    return [
        torch.randn(shape, generator=generator, device=device, dtype=case.dtype) for _ in range(4)
    ]


def measure(run: Run, name: str) -> Iterator[Record]:
    """Measures one GPU and all GPUs, and how far their results differ."""
    world: World = run.world
    options, rounds = run.options, run.options.rounds
    sizes = (1, options.length, options.length, options.heads, options.head_dim)
    case = Case(*sizes, torch.bfloat16)
    inputs = random_inputs(case, world.device)
    offsets = torch.tensor([0, case.longest], dtype=torch.int32, device=world.device)
    mask, alpha = Mask.causal(), case.alpha

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lengths: dict[str, Any] = {"cu_seqlens_q": offsets, "max_seqlen_q": case.longest}
        return hstu_attention(q, k, v, mask=mask, alpha=alpha, **lengths)

    found = time_alone(whole, inputs, rounds, world)
    context = ContextBatch(offsets, case.longest)

    def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context.attention(q, k, v, mask=mask, alpha=alpha)

    local = [context.shard(x) for x in inputs]
    del inputs
    times, results = time_rounds(shared, local, rounds, world)
    alone = found[0] if found else None
    records = records_of("hstu_attention", alone, case, 1, alone) if alone else []
    records += records_of("context parallel", times, case, world.num_ranks, alone)
    differences = {}
    if found:
        pairs = zip(RESULTS, results, found[1], strict=True)
        differences = {name: relative_error(x, context.shard(y)) for name, x, y in pairs}
    # NOTE: `not x <= ...` instead of `x > ...`, so that a NaN counts as wrong.
    wrong = [f"{name} {x:.2g}" for name, x in differences.items() if not x <= LARGEST_ERROR]
    error = f"expected differences of at most {LARGEST_ERROR}, got {', '.join(wrong)}"
    shown = {f"difference_{name}": rounded(x) for name, x in differences.items()}
    for record in records:
        yield {"case": case.name, **shown, **record, "error": error if wrong else ""}


BENCHMARK = Benchmark("context", PARSER, measure, describe=describe)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark as a rank; returns the exit status."""
    return ranks.start(BENCHMARK, arguments)


if __name__ == "__main__":
    sys.exit(main())
