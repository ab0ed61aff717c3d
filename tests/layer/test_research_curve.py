"""Tests of the research layer's loss curve in bf16 on a GPU, against fp32 on the CPU.

Both trainings have the same initial weights, batches and negatives and no dropout, so that the
curves differ only by rounding, which training magnifies. The means of `WINDOW` steps in bf16 on a
CPU differ from fp32 by up to 0.3 %. With a gradient of the time tables of the wrong sign, the
difference grows to 4.7 %.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from recommender.model import RetrievalModel
from torch import Tensor

from hstu_attn import HSTULayerConfig
from hstu_attn.data import BatchSampler, EventLog, jagged_batch, open_event_log, training_windows
from hstu_attn.data.synthetic import write_synthetic_movielens

pytestmark = pytest.mark.slow

STEPS, WINDOW = 500, 25
LARGEST = 0.015  # limit of the relative differences of windows
TOKENS, LENGTH, WIDTH, HEADS, NEGATIVES, TEMPERATURE = 1024, 100, 64, 2, 64, 0.1
LEARNING_RATE = 2e-3


def small_log(directory: Path) -> EventLog:
    return open_event_log(write_synthetic_movielens(directory, 300, 400, 90))


def make_model(log: EventLog, dtype: torch.dtype) -> RetrievalModel:
    torch.manual_seed(1)
    config = HSTULayerConfig.research(
        embedding_dim=WIDTH,
        num_heads=HEADS,
        linear_dim=WIDTH // HEADS,
        attention_dim=WIDTH // HEADS,
        max_sequence_len=LENGTH,
    )
    return RetrievalModel(log.num_items, config, 2, LENGTH, 0.0, compute_dtype=dtype)


def loss_curve(
    log: EventLog,
    device: str,
    dtype: torch.dtype,
    steps: int,
    change: Callable[[str, Tensor], None] | None = None,
) -> Tensor:
    """Trains a model of research layers; returns the loss of each step, `(steps,)` fp64.

    Args:
        log: the events from which batches are drawn.
        device: where to train.
        dtype: the dtype of the layers.
        steps: the number of steps of AdamW.
        change: called with the name and the gradient of each parameter in each step.
    """
    model = make_model(log, dtype).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
    windows = training_windows(log, LENGTH)
    sampler = BatchSampler(windows.lengths, TOKENS, seed=2)
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(steps):
        batch = jagged_batch(log, windows.take(next(sampler)))
        negatives = torch.randint(log.num_items, (NEGATIVES,), generator=generator).to(device)
        batch = batch.to(torch.device(device))
        states = model(batch)
        positive = (states * model.item_vectors(batch.target_items)).sum(1, keepdim=True)
        logits = torch.cat([positive, states @ model.item_vectors(negatives).T], 1) / TEMPERATURE
        loss = F.cross_entropy(logits, torch.zeros_like(batch.target_items))
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            if change is not None:
                change(name, parameter.grad)
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).double().cpu()


def window_means(curve: Tensor) -> Tensor:
    """Returns the mean loss of each `WINDOW` steps."""
    return curve.unflatten(0, (-1, WINDOW)).mean(1)


def largest_difference(curve: Tensor, other: Tensor) -> float:
    """Returns the largest relative difference of the window means of two curves."""
    means, others = window_means(curve), window_means(other)
    return ((means - others) / others).abs().max().item()


def negate_of_times(name: str, gradient: Tensor) -> None:
    if "time_weight" in name:
        gradient.neg_()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> EventLog:
    return small_log(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def fp32_on_the_cpu(log: EventLog) -> Tensor:
    return loss_curve(log, "cpu", torch.float32, STEPS)


@pytest.mark.gpu
def test_bf16_on_a_gpu_learns_as_fp32_on_the_cpu(log: EventLog, fp32_on_the_cpu: Tensor) -> None:
    curve = loss_curve(log, "cuda", torch.bfloat16, STEPS)
    assert curve[-WINDOW:].mean() < 0.6 * curve[:WINDOW].mean()
    assert largest_difference(curve, fp32_on_the_cpu) < LARGEST, window_means(curve)
    wrong = loss_curve(log, "cuda", torch.bfloat16, STEPS, negate_of_times)
    assert largest_difference(wrong, fp32_on_the_cpu) > LARGEST, window_means(wrong)
