"""Files that are whole or absent, whenever their writer is killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

__all__ = ["write_state"]


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Writes ``state`` in place of what was there, once it is whole on the disk."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
