"""Helpers of multi-GPU benchmarks: barriers, reductions over the ranks, and timing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hstu_attn.distributed import run

from .runner import Benchmark

__all__ = ["Clock", "over_all", "start", "wait_for_all"]


def start(benchmark: Benchmark, arguments: Sequence[str] | None = None) -> int:
    """Runs a benchmark as the rank in torchrun's environment; returns the exit status."""
    if not torch.cuda.is_available():
        sys.exit(f"benchmarks.{benchmark.name}: expected NVIDIA GPUs and a CUDA build of torch")
    return run(lambda world: benchmark.main(arguments, world=world))


def wait_for_all(mesh: DeviceMesh | None, device: torch.device) -> None:
    """Waits until every rank of the mesh has called this and its GPU is idle."""
    over_all([0.0], dist.ReduceOp.SUM, mesh, device)
    if device.type == "cuda":
        torch.cuda.synchronize()


def over_all(
    values: Sequence[float], operation: Any, mesh: DeviceMesh | None, device: torch.device
) -> list[float]:
    """Returns each value's maximum, or sum, over the ranks of a mesh; without one, the values."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    if mesh is not None:
        dist.all_reduce(tensor, operation, group=mesh.get_group())
    return [float(x) for x in tensor]


class Clock:
    """A clock of a device: CUDA events on a GPU, or the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Any:
        """Returns the moment when all work enqueued so far is done."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: Any, end: Any) -> float:
        """Returns the milliseconds between two moments, the later of which may be in the future."""
        if self.device.type != "cuda":
            return 1e3 * float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end))

    def time(self, call: Callable[[], Any]) -> float:
        """Times a call on an idle device, in milliseconds."""
        start = self.now()
        call()
        return self.ms(start, self.now())
