"""Starting the ranks of a run, and failing together.

    # train.py, run by `python train.py` or `torchrun --nproc-per-node 8 train.py`
    def main(world: World) -> None:
        model = Model(world.mesh).to(world.device)
        ...

    if __name__ == "__main__":
        run(main)

A rank that fails ends the run: its error is written where torchrun finds and shows it, and torchrun
ends the other ranks, which may be waiting for it. A rank that hangs without failing is found after
`timeout`, by the first collective that waits for it.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record

from .embedding import device_of

__all__ = ["RunStopped", "World", "is_launched", "run", "stop_together"]

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The place of this process in a distributed run.

    Attributes:
        rank: the process's number among all ranks.
        local_rank: the process's number among the ranks of its machine.
        num_ranks: the number of ranks.
        device: the process's GPU, or the CPU.
        mesh: all ranks, one-dimensional, `"data"`; None in a process that torchrun did not start.
    """

    rank: int
    local_rank: int
    num_ranks: int
    device: torch.device
    mesh: DeviceMesh | None


class RunStopped(RuntimeError):
    """Raised on every rank by `stop_together`."""


def run(
    main: Callable[[World], T],
    *,
    device_type: str | None = None,
    timeout: timedelta = timedelta(minutes=10),
) -> T:
    """Runs `main` as the rank in torchrun's environment, or as the only one without torchrun.

    Args:
        main: the program.
        device_type: `"cuda"` or `"cpu"`; None is CUDA if available. Collectives use NCCL for GPU
            tensors and gloo for CPU tensors; a run on GPUs has both backends.
        timeout: a collective that waits longer than this for another rank is an error.

    Returns:
        What `main` returns.

    Raises:
        ValueError: an unknown device type, or fewer GPUs than ranks on this machine.
    """
    return cast(T, record(_run)(main, device_type, timeout))


def _run(main: Callable[[World], T], device_type: str | None, timeout: timedelta) -> T:
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type not in ("cuda", "cpu"):
        raise ValueError(f"device_type: expected 'cuda' or 'cpu', got {device_type!r}")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(device_type)
    if device_type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"LOCAL_RANK: expected less than the number of GPUs, "
                f"{torch.cuda.device_count()}, got {local_rank}"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if not is_launched():
        return main(World(0, 0, 1, device, None))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
        timeout=timeout,
        device_id=device if device_type == "cuda" else None,
    )
    mesh = init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("data",))
    result = main(World(dist.get_rank(), local_rank, dist.get_world_size(), device, mesh))
    # This runs only after success: a rank that fails must not wait here for the others.
    dist.destroy_process_group()
    # NOTE: a group ends with the last reference to it, and models hold references in cycles. If its
    # threads ran on until Python ends, a thread that frees a tensor then would abort the process.
    del mesh
    gc.collect()
    return result


def is_launched() -> bool:
    """Returns whether torchrun, or another launcher that sets `RANK`, has started this process."""
    return "RANK" in os.environ


def stop_together(problem: str | None, mesh: DeviceMesh | None) -> None:
    """Raises the messages of all ranks on every rank, so that none continues or waits.

        loss_sum = ...
        stop_together(None if loss_sum.isfinite() else f"the loss is {loss_sum} at {step}", mesh)

    All ranks must call it together. It is one small all-reduce, for which the host waits.

    Args:
        problem: the message of this rank; None if it has no problem.
        mesh: one-dimensional, the ranks; None is this process alone.

    Raises:
        RunStopped: on all ranks, with the same text, which names the ranks.
    """
    if mesh is None:
        problems = [problem]
    else:
        group = mesh.get_group()
        flag = torch.tensor(int(problem is not None), device=device_of(mesh))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
        if not flag.item():
            return
        problems = [None] * mesh.size()
        dist.all_gather_object(problems, problem, group=group)
    said = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]
    if said:
        raise RunStopped("; ".join(said))
