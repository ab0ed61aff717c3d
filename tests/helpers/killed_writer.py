"""A process that kills itself while it saves a checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from hstu_attn.distributed import Checkpoints


def model_of(step: int) -> nn.Linear:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(step)
    return model


class Killer:
    """Replaces a function by one that ends the process at its n-th call, before or after it."""

    def __init__(self, owner: Any, name: str, call: int, after: bool = False) -> None:
        self.original = getattr(owner, name)
        self.call = call
        self.after = after
        self.calls = 0
        setattr(owner, name, self)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls == self.call and not self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = self.original(*arguments, **named)
        if self.calls == self.call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return lambda *arguments, **named: self(instance, *arguments, **named)


def save_and_die(directory: Path, moment: str, call: int, steps: list[int]) -> None:
    """Saves checkpoints of these steps, and kills this process at the given moment."""
    torch.set_num_threads(1)
    if moment == "before the tensors":
        Killer(FileSystemWriter, "write_data", call)
    elif moment == "before the metadata":
        Killer(FileSystemWriter, "finish", call)
    else:
        Killer(os, "replace", call, after={"before a name": False, "after a name": True}[moment])
    checkpoints = Checkpoints(directory)
    for step in steps:
        checkpoints.save(step, model_of(step))
