"""Context parallel attention over the GPUs of a machine, beside one GPU.

    torchrun --nproc-per-node 8 -m benchmarks.context --json context.json
    python -m benchmarks.context --length 32768 --rounds 5

One long causal sequence, its forward and its backward. First the first GPU computes all of it
alone, where its memory allows, while the others wait; then all share it. The results of the first
rank's rows must agree, or the exit status is 1. A round's time is that of the slowest rank, and the
median counts. "waiting" is the share of it for which a rank's compute stream stood still until keys
or gradients had arrived, in the mean over the ranks. FLOPs are those of the visible half; the
backward counts 2.5 times the forward. Without torchrun the world is one GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock


class Options(argparse.Namespace):
    """The command line."""

    json: Path | None
    commit: str | None
    rounds: int
    length: int
    heads: int
    head_dim: int
    sm_margin: int


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.context", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write the results to FILE")
    add("--commit", help="what to record as the commit, where there is no repository")
    add("--rounds", type=int, default=21, help="rounds that are timed (default 21)")
    add("--length", type=int, default=131072, help="tokens of the sequence (default 131072)")
    add("--heads", type=int, default=4, help="heads (default 4)")
    add("--head-dim", type=int, default=128, help="width of a head (default 128)")
    add("--sm-margin", type=int, default=0, help="streaming multiprocessors that attention leaves "
        "to the transfers (default 0)")  # fmt: skip
    return parser.parse_args(arguments, namespace=Options())


if __name__ == "__main__":
    parse()  # --help or a wrong option ends here, before torch is imported

import torch
import torch.distributed as dist
from torch import Tensor

from hstu_attn import Mask, hstu_attention
from hstu_attn.distributed import context_parallel
from hstu_attn.distributed.context_parallel import ContextBatch

from .report import gpu_software, rounded, text_table, write_records
from .workloads import Workload

__all__ = ["Options", "main"]

PASSES = ("forward", "backward")
RESULTS = ("out", "dq", "dk", "dv")
WARM_UP = 3
LARGEST_ERROR = 1e-2  # of the norm; the roundings to bf16 of 8 ranks come to about 4e-3
Record = dict[str, Any]


# ---------------------------------------------------------------------------------------------
# Time
# ---------------------------------------------------------------------------------------------


class Clock:
    """Moments in the work of a device: by events on a GPU's stream, or by the time of the host."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Any:
        """When all that has been asked of the device is done."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: Any, end: Any) -> float:
        """Milliseconds between two moments, the later of which may be to come."""
        if self.device.type != "cuda":
            return 1e3 * float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end))

    @contextmanager
    def waits(self) -> Iterator[list[tuple[Any, Any]]]:
        """When waiting for each transfer of context parallel attention began, and when it ended."""
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
    """Milliseconds of each round, the slowest rank's, and of waiting, in the mean of the ranks."""

    ms: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PASSES})
    waiting: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PASSES})

    def add(self, ms: Sequence[float], waiting: Sequence[float]) -> None:
        """One round of the passes."""
        for name, whole, part in zip(PASSES, ms, waiting, strict=True):
            self.ms[name].append(whole)
            self.waiting[name].append(part)


# ---------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """The processes of this run."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """Waits for all of them, and for their GPUs."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if self.world > 1:
            dist.all_reduce(torch.zeros(1, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def over_all(self, values: Sequence[float], operation: Any) -> list[float]:
        """Each value's largest, or sum, over the ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.world > 1:
            dist.all_reduce(tensor, operation)
        return [float(x) for x in tensor]


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def passes_of(
    attention: Attention, inputs: Sequence[Tensor], clock: Clock
) -> tuple[tuple[Tensor, ...], list[float], list[float]]:
    """The results of one round, and the milliseconds of each pass: all, and waiting."""
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


def measure(
    attention: Attention, inputs: Sequence[Tensor], rounds: int, ranks: Ranks
) -> tuple[Times, tuple[Tensor, ...]]:
    """Times of all ranks together, and this one's results."""
    clock, times = Clock(ranks.device), Times()
    results: tuple[Tensor, ...] = ()
    for round_ in range(WARM_UP + rounds):
        ranks.barrier()
        results, ms, waiting = passes_of(attention, inputs, clock)
        ms = ranks.over_all(ms, dist.ReduceOp.MAX)
        waiting = [x / ranks.world for x in ranks.over_all(waiting, dist.ReduceOp.SUM)]
        if round_ >= WARM_UP:
            times.add(ms, waiting)
    return times, results


def measure_alone(
    attention: Attention, inputs: Sequence[Tensor], rounds: int, ranks: Ranks
) -> tuple[Times, tuple[Tensor, ...]] | None:
    """The same for the first rank by itself; None on the others, and where memory runs out."""
    found = None
    if ranks.is_first:
        try:
            found = measure(attention, inputs, rounds, Ranks(0, 1, ranks.device))
        except torch.cuda.OutOfMemoryError as error:
            print(f"one GPU alone: {error}".splitlines()[0])
            torch.cuda.empty_cache()
    ranks.barrier()
    return found


def relative_error(found: Tensor, exact: Tensor) -> float:
    """The norm of the difference, of that of the second."""
    return float((found.double() - exact.double()).norm() / exact.double().norm())


# ---------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """The ranks that torchrun started; one without it. A group that exists is used."""
    rank, world = (int(os.environ.get(x, y)) for x, y in (("RANK", "0"), ("WORLD_SIZE", "1")))
    local = torch.device(device, int(os.environ.get("LOCAL_RANK", "0")))
    if device == "cuda":
        torch.cuda.set_device(local)
    if dist.is_initialized():
        yield Ranks(dist.get_rank(), dist.get_world_size(), torch.device(device))
    elif world == 1:
        yield Ranks(0, 1, local)
    else:
        on_gpus = device == "cuda"
        dist.init_process_group("nccl" if on_gpus else "gloo", device_id=local if on_gpus else None)
        try:
            yield Ranks(rank, world, local)
        finally:
            dist.destroy_process_group()


def records_of(
    impl: str, times: Times, workload: Workload, gpus: int, alone: Times | None
) -> list[Record]:
    """A record for each pass, and for both together."""
    passes = (*((name, (name,)) for name in PASSES), ("both", PASSES))

    def medians(of: dict[str, list[float]], names: Sequence[str]) -> float:
        return statistics.median(map(sum, zip(*(of[name] for name in names), strict=True)))

    records = []
    for name, parts in passes:
        ms = medians(times.ms, parts)
        flops = sum(workload.flops(part == "backward") for part in parts)
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


def table_rows(records: Sequence[Record]) -> list[list[str]]:
    """A header, and a row for each record."""
    rows = [["impl, pass", "GPUs", "ms", "TFLOP/s a GPU", "speedup", "waiting"]]
    for r in records:
        speedup = "" if r["speedup"] is None else f"{r['speedup']:.2f}"
        numbers = [f"{r['ms']:.3f}", f"{r['tflops_per_gpu']:.1f}", speedup]
        waiting = f"{100 * r['waiting_share']:.1f} %"
        rows.append([f"{r['impl']}, {r['pass']}", str(r["gpus"]), *numbers, waiting])
    return rows


def random_inputs(workload: Workload, device: torch.device) -> list[Tensor]:
    """q, k, v and the gradient of the output, the same on all ranks."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (sum(workload.lengths), workload.heads, workload.head_dim)
    return [
        torch.randn(shape, generator=generator, device=device, dtype=workload.dtype)
        for _ in range(4)
    ]


def compare(
    workload: Workload, options: Options, ranks: Ranks
) -> tuple[list[Record], dict[str, float | None]]:
    """The records of one GPU and of all, and how far the results differ."""
    inputs = random_inputs(workload, ranks.device)
    offsets = torch.tensor([0, options.length], dtype=torch.int32, device=ranks.device)
    mask, alpha = Mask.causal(), workload.alpha

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lengths: dict[str, Any] = {"cu_seqlens_q": offsets, "max_seqlen_q": options.length}
        return hstu_attention(q, k, v, mask=mask, alpha=alpha, **lengths)

    found = measure_alone(whole, inputs, options.rounds, ranks)
    context = ContextBatch(offsets, options.length, sm_margin=options.sm_margin)

    def shared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return context.attention(q, k, v, mask=mask, alpha=alpha)

    local = [context.shard(x) for x in inputs]
    del inputs
    times, results = measure(shared, local, options.rounds, ranks)
    alone = found[0] if found else None
    records = records_of("hstu_attention", alone, workload, 1, alone) if alone else []
    records += records_of("context parallel", times, workload, ranks.world, alone)
    errors: dict[str, float | None] = {}
    if found:
        pairs = zip(RESULTS, results, found[1], strict=True)
        errors = {name: rounded(relative_error(x, context.shard(y))) for name, x, y in pairs}
    return records, errors


def main(arguments: Sequence[str] | None = None, device: str | None = None) -> int:
    """Measures, prints and writes what was asked for, on the first rank."""
    options = parse(arguments)
    if device is None:
        if not torch.cuda.is_available():
            sys.exit("benchmarks.context: expected NVIDIA GPUs and a CUDA build of torch")
        device = "cuda"
    length, heads, dim = options.length, options.heads, options.head_dim
    workload = Workload(1, length, length, heads, dim, torch.bfloat16, group="context")
    with joined(device) as ranks:
        records, errors = compare(workload, options, ranks)
    if not ranks.is_first:
        return 0
    name = torch.cuda.get_device_name() if device == "cuda" else device
    prefix = f"torchrun --nproc-per-node {ranks.world} -m" if ranks.world > 1 else "python -m"
    command = " ".join([prefix, "benchmarks.context", *(arguments or sys.argv[1:])])
    described = {
        **gpu_software(name, command, options.commit),
        "case": workload.name,
        "group": workload.group,
        "heads": heads,
        "head_dim": dim,
        "dtype": workload.dtype_name,
        "sm_margin": options.sm_margin,
    }
    print(
        f"{ranks.world} x {name}, hstu_attn {described['hstu_attn']} ({described['commit']}), "
        f"torch {described['torch']}, CUDA {described['cuda']}\n{workload.name}, causal, {heads} "
        f"heads of {dim}, {workload.dtype_name}; medians of {options.rounds} rounds\n"
    )
    print("\n".join(text_table(table_rows(records))))
    differences = {f"difference_{key}": error for key, error in errors.items()}
    if options.json:
        write_records(options.json, [{**described, **differences, **r} for r in records])
    print("differences from one GPU: " + ", ".join(f"{k} {e:.2g}" for k, e in errors.items() if e))
    # NOTE: not "above", so that a NaN counts as wrong.
    wrong = [key for key, error in errors.items() if error is None or not error <= LARGEST_ERROR]
    for key in wrong:
        print(f"  FAILED  {key}: expected a difference of at most {LARGEST_ERROR}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
