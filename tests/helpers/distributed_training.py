"""A small recommender and its training loop, for one rank or several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hstu_attn import HSTULayerConfig, HSTUStack
from hstu_attn.data import AttentionCost, BalancedBatchSampler
from hstu_attn.distributed import (
    ShardedEmbedding,
    clip_gradients,
    global_mean,
    parallelize,
    parameter_groups,
)
from tests.helpers.distributed_runs import device_type

NUM_ITEMS, NUM_CLASSES, WIDTH = 31, 5, 16

CONFIG = HSTULayerConfig.research(
    embedding_dim=WIDTH,
    num_heads=2,
    linear_dim=8,
    attention_dim=8,
    max_sequence_len=12,
    enable_relative_attention_bias=False,
)


@dataclass(frozen=True)
class Run:
    """The options of a run; picklable."""

    strategy: Literal["ddp", "fsdp2"] = "ddp"
    backend: str = "gloo"
    dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype | None = None
    max_norm: float = 0.02
    data_seed: int = 0


class SmallModel(nn.Module):
    """Predicts the class of the next item, which is the item id modulo the number of classes."""

    def __init__(self, mesh: DeviceMesh | None, run: Run) -> None:
        super().__init__()
        device = device_type(run.backend)
        self.items = ShardedEmbedding(
            "item", NUM_ITEMS, WIDTH, mesh, std=1.0, device=device, dtype=run.dtype
        )
        self.stack = HSTUStack(CONFIG, 2, device=device, dtype=run.dtype)
        self.head = nn.Linear(WIDTH, NUM_CLASSES, device=device, dtype=run.dtype)

    def forward(self, ids: Tensor, offsets: Tensor, max_seq_len: int) -> Tensor:
        hidden = self.stack(self.items(ids), offsets, max_seq_len)
        logits: Tensor = self.head(hidden.to(self.head.weight.dtype))
        return logits


def sequences(seed: int) -> list[Tensor]:
    generator = np.random.default_rng(seed)
    return [
        torch.from_numpy(generator.integers(0, NUM_ITEMS, generator.integers(3, 13)))
        for _ in range(25)
    ]


class Training:
    """The model, the optimizer and the data of a run on this rank."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.mesh = None
        rank, num_ranks = 0, 1
        if dist.is_initialized():
            rank, num_ranks = dist.get_rank(), dist.get_world_size()
            self.mesh = init_device_mesh(device_type(run.backend), (num_ranks,))
        # Ranks start with different weights; those of the first rank must overwrite the others.
        torch.manual_seed(run.data_seed + rank)
        self.model = parallelize(
            SmallModel(self.mesh, run), self.mesh, run.strategy, compute_dtype=run.compute_dtype
        )
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model), lr=1e-2, eps=1e-4)
        self.sequences = sequences(run.data_seed)
        lengths = np.array([len(ids) for ids in self.sequences])
        self.sampler = BalancedBatchSampler(
            lengths,
            AttentionCost.of_layer(CONFIG),
            6,
            num_ranks=num_ranks,
            rank=rank,
            seed=run.data_seed,
        )

    def step(self, indices: list[int]) -> tuple[float, float]:
        """Runs a step on these sequences; returns the loss and the norm of the gradients."""
        device = device_type(self.run.backend)
        parts = [self.sequences[index] for index in indices]
        lengths = torch.tensor([0] + [len(part) - 1 for part in parts])
        ids = torch.cat([part[:-1] for part in parts]).to(device)
        targets = torch.cat([part[1:] for part in parts]).to(device) % NUM_CLASSES
        logits = self.model(ids, lengths.cumsum(0).to(device), int(lengths.max()))
        loss_sum = nn.functional.cross_entropy(logits, targets, reduction="sum")
        loss = global_mean(loss_sum, len(targets), self.mesh)
        self.optimizer.zero_grad()
        loss.backward()
        norm = clip_gradients(self.model.parameters(), self.run.max_norm)
        self.optimizer.step()
        return loss.item(), norm.item()

    def steps(self, number: int) -> list[tuple[float, float]]:
        """Runs the next steps; returns their losses and norms."""
        results: list[tuple[float, float]] = []
        while len(results) < number:
            for indices in self.sampler:
                results.append(self.step(indices))
                self.sampler.advance()
                if len(results) == number:
                    break
        return results

    def parameters(self) -> dict[str, Tensor]:
        """Returns all parameters, gathered on the CPU."""
        return {
            name.removeprefix("module."): whole(parameter)
            for name, parameter in self.model.named_parameters()
        }


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()


def train(run: Run, number: int) -> dict[str, Any]:
    """Returns the losses, gradient norms and parameters of a run of `number` steps."""
    training = Training(run)
    losses, norms = zip(*training.steps(number), strict=True)
    return {"losses": losses, "norms": norms, "parameters": training.parameters()}
