"""Writes tensors to files atomically."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from recommender.files import write_whole

__all__ = ["write_state"]


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Writes `state` to a file, and replaces an old file once the new one is complete on the disk.

    Raises:
        OSError: the file cannot be written; an old file is unchanged.
    """
    write_whole(path, lambda file: torch.save(state, file))
