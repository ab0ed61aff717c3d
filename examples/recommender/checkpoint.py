"""Checkpoints that a run continues from exactly, written so that a kill at any moment leaves a
whole one."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

__all__ = ["Checkpoints", "random_state", "restore_random_state", "write_state"]


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Writes ``state`` in place of what was there, once it is whole on the disk."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


class Checkpoints:
    """The newest checkpoint of a run and the one before it, `last.pt` and `previous.pt`.

    Args:
        directory: holds the files; made if absent.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.last = directory / "last.pt"
        self.previous = directory / "previous.pt"

    def save(self, state: dict[str, Any]) -> None:
        """Makes ``state`` the newest checkpoint, once it is whole on the disk."""
        whole = self.last.with_suffix(".whole")
        write_state(whole, state)
        if self.last.exists():
            os.replace(self.last, self.previous)
        os.replace(whole, self.last)

    def load(self) -> dict[str, Any] | None:
        """The newest checkpoint that can be read, on the CPU; None where there is no file.

        Raises:
            RuntimeError: there are files, but none can be read.
        """
        found = [path for path in (self.last, self.previous) if path.exists()]
        for path in found:
            state = _read(path)
            if state is not None:
                return state
        if found:
            raise RuntimeError(f"no checkpoint in {self.last.parent} can be read")
        return None

    def clear(self) -> None:
        """Removes the checkpoints."""
        for path in (self.last, self.previous):
            path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what a damaged file raises depends on where it is damaged
        print(f"{path} cannot be read ({error})", file=sys.stderr)
        return None
    return state


def random_state() -> dict[str, Any]:
    """The state of the random generators of torch, its GPUs, numpy and Python."""
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "python": random.getstate(),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Continues the random generators from what :func:`random_state` gave."""
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    random.setstate(state["python"])
