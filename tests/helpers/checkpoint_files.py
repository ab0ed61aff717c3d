"""Readers of the checkpoint directories of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from hstu_attn.distributed import Checkpoints


def newest_checkpoint(out: Path) -> dict[str, Any]:
    """Returns the gathered tensors of an example's newest checkpoint: "model" and "optimizers"."""
    checkpoints = Checkpoints(out / "checkpoints")
    path = checkpoints.directory / f"step-{max(checkpoints.steps()):012d}"
    together = out / "together.pt"
    dcp_to_torch_save(path, together)
    state: dict[str, Any] = torch.load(together, weights_only=True)
    return state
