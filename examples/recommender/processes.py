"""What several training processes do together, in one place, as it is for one alone.

To train with several, give :class:`recommender.loop.Trainer` another object with these methods.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recommender.checkpoint import Checkpoints

__all__ = ["OneProcess"]


class OneProcess:
    """One process with the whole model.

    Attributes:
        rank: which part of each batch is this process's, from 0.
        num_ranks: into how many parts batches are divided.
    """

    rank = 0
    num_ranks = 1

    def prepare(self, model: nn.Module) -> nn.Module:
        """The model that computes the loss: where it is replicated or sharded, it is wrapped
        here."""
        return model

    def loss_weight(self, count: int) -> float:
        """What a mean over ``count`` rows of this process is multiplied by, so that gradients
        averaged over all processes are those of the mean over the rows of all."""
        return 1.0

    def clip_gradients(self, model: nn.Module, largest: float) -> Tensor:
        """Scales the gradients down to a norm over all parameters, and returns the norm before,
        a scalar. Where that is not finite, gradients stay as they are, to be looked at."""
        gradients = [parameter.grad for parameter in model.parameters()]
        norm = torch.nn.utils.get_total_norm([grad for grad in gradients if grad is not None])
        if norm.isfinite():
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), largest, norm)
        return norm

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The part of a checkpoint that may be spread over processes."""
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
    ) -> None:
        """Continues from what :meth:`state` gave."""
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def checkpoints(self, directory: Path) -> Checkpoints:
        """Writes and reads checkpoints."""
        return Checkpoints(directory)
