"""Runs a function in every process of a group, for tests of what several ranks do together."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing


def run_group(world: int, function: Callable[..., None], *args: Any, device: str = "cpu") -> None:
    """`function(*args)` in each of `world` new processes; an error in one is raised here.

    They have a default process group, by gloo for CPUs and by nccl for GPUs, and all draw the same
    random numbers.
    """
    with tempfile.TemporaryDirectory() as folder:
        seed = int(torch.randint(2**31, ()))
        store = str(Path(folder, "store"))
        torch.multiprocessing.spawn(
            _enter, (world, device, store, seed, function, args), nprocs=world
        )


def _enter(
    rank: int,
    world: int,
    device: str,
    store: str,
    seed: int,
    function: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(seed)
    try:
        function(*args)
    finally:
        dist.destroy_process_group()
