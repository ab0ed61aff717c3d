"""A program for torchrun that succeeds or fails: launched.py HOW DIRECTORY."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hstu_attn.distributed import World, global_mean, run, stop_together


def main(world: World) -> None:
    how, directory = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    if how == "cycle":
        gc.disable()
        assert world.mesh is not None
        model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=world.mesh.get_group())
        model.itself = [model]
        model(torch.ones(3, 2)).sum().backward()
    for step in range(4):
        value = torch.tensor(float(world.rank + step), device=world.device)
        if how == "raise" and step == 3:
            if world.rank == 1:
                (directory / "raised").touch()
                raise LookupError("the item 17 is nowhere")
            time.sleep(600)
        if how == "die" and step == 3:
            if world.rank == 1:
                (directory / "raised").touch()
                os._exit(7)
            dist.all_reduce(value)
        if how == "nan" and step == 3 and world.rank == 1:
            value = value * torch.nan
        problem = None if value.isfinite() else f"the loss is {value.item()} at step {step}"
        stop_together(problem, world.mesh)
        mean = global_mean(value, 1, world.mesh)
    (directory / f"rank-{world.rank}").write_text(f"{world.num_ranks} {world.device} {mean.item()}")


def threads() -> list[str]:
    """Returns the names of this process's threads."""
    return sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))


if __name__ == "__main__":
    run(main)
    if sys.argv[1] == "cycle":
        Path(sys.argv[2], f"threads-{os.environ['RANK']}").write_text("\n".join(threads()))
