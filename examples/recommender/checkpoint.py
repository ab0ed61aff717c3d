"""Tensors in files that are whole or absent, whenever their writer is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from recommender.files import write_whole

__all__ = ["write_state"]


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Writes `state` in place of what was there, once it is whole on the disk.

    Raises:
        OSError: it cannot be written; what was there before is unchanged.
    """
    write_whole(path, lambda file: torch.save(state, file))
