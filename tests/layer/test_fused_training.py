"""Tests of training a ranking model with fused layers, against composed layers.

Two implementations of a formula differ by rounding, and training magnifies the difference: after
some hundred steps in bf16 the losses differ in the second digit. So loss curves are compared as
statistical samples. Both kinds of layers are trained `RUNS` times on the same batches, each time
from initial weights that are perturbed by up to one rounding to the layers' dtype, which both
implementations apply to the weights anyway. If the fused layers are correct, the two groups of
curves come from one distribution, and `separation` is an F statistic: around 1 for any noise level.

`SEPARATED` is between the values of correct and wrong code. Among 53,000 random splits of correct
curves into two groups the largest is 13.4. Training with a learning rate 1.5 times as high gives at
least 428 in the case cpu-bf16 (39 starts, two trainings each), and 5,200 at the width of cuda-bf16
(5 starts). The logarithms look normal, and then 25 is at least six standard deviations away from
either. Learning rates are low because the noise grows with them: at 2e-3 the wrong one gave 42 in
the case cpu-bf16, and 9 at the width of cuda-bf16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from recommender.ranking import RankingConfig, RankingModel, ranking_loss, task_labels
from recommender.ranking_data import RankingBatch, RankingData
from torch import Tensor

from hstu_attn.data import AttentionCost, BalancedBatchSampler, open_event_log
from hstu_attn.data.synthetic_layouts import write_synthetic_kuairand
from hstu_attn.layer import HSTULayer
from hstu_attn.testing import assert_matches

TASKS = ("is_click", "long_view")
HISTORY, TARGETS, SEQUENCES = 24, 8, 16
WINDOW = 10  # steps
RUNS, SEPARATED = 6, 25.0
DRAWS = 32  # models and batches whose gradients are compared


@dataclass(frozen=True)
class Case:
    """The model and the length of a training."""

    device: str
    dtype: torch.dtype
    width: int
    steps: int
    learning_rate: float


pytestmark = pytest.mark.slow

CASES = [
    pytest.param(Case("cpu", torch.float32, 32, 40, 1e-3), id="cpu-fp32"),
    pytest.param(Case("cpu", torch.bfloat16, 32, 40, 1e-3), id="cpu-bf16"),
    pytest.param(
        Case("cuda", torch.bfloat16, 256, 200, 2e-4), id="cuda-bf16", marks=pytest.mark.gpu
    ),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Limits torch to one thread: more do not speed up small tensors, and may wait for a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> RankingData:
    directory = tmp_path_factory.mktemp("data")
    log = open_event_log(
        write_synthetic_kuairand(directory, num_users=300, num_items=240, mean_events=60)
    )
    return RankingData(log, HISTORY, TARGETS, held_out=3, user_buckets=1000)


def make_model(data: RankingData, case: Case) -> RankingModel:
    """Makes the model on the CPU, in fp32, without dropout."""
    config = RankingConfig(
        sizes=data.sizes,
        actions=data.actions,
        tasks=TASKS,
        max_history=HISTORY,
        max_targets=TARGETS,
        dim=case.width,
        heads=2,
        layers=2,
    )
    return RankingModel(config)


def copy_of(
    start: RankingModel, dtype: torch.dtype, device: str, fused: bool, **changes: Any
) -> RankingModel:
    """Returns the same model with other layers; `changes` are fields of their configuration."""
    model = RankingModel(start.config, dtype)
    model.load_state_dict(start.state_dict())
    layers = [module for module in model.modules() if isinstance(module, HSTULayer)]
    assert len(layers) == start.config.layers
    for layer in layers:
        layer.config = replace(layer.config, fused=fused, **changes)
    return model.to(device).train()


def draw(data: RankingData, steps: int) -> list[NDArray[np.int64]]:
    """Returns the indices of the windows of each step's batch."""
    lengths = data.windows("training").lengths
    seed = int(torch.randint(2**31, ()))
    sampler = BalancedBatchSampler(
        lengths, AttentionCost(1, 1), SEQUENCES, num_ranks=1, rank=0, seed=seed
    )
    batches: list[NDArray[np.int64]] = []
    while len(batches) < steps:
        batches += [np.array(indices) for indices in sampler]
        sampler.set_epoch(sampler.epoch + 1)
    return batches[:steps]


def mean_loss(model: RankingModel, batch: RankingBatch) -> Tensor:
    batch = batch.to(model.position.device)
    labels = task_labels(model.config, batch.target_actions)
    weights = torch.tensor([1.0, 0.5], device=labels.device)
    return ranking_loss(model(batch), labels, weights).mean()


def losses_of(
    data: RankingData,
    model: RankingModel,
    batches: Sequence[NDArray[np.int64]],
    learning_rate: float,
) -> Tensor:
    """Returns the loss of each step of a training."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98))
    windows = data.windows("training")
    losses = []
    for indices in batches:
        loss = mean_loss(model, data.batch(windows.take(indices)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).double().cpu()


def separation(curves: Tensor, others: Tensor) -> Tensor:
    """Returns the squared distance of two groups' mean curves in each window, relative to noise.

    Args:
        curves, others: `(runs, steps)`.

    Returns:
        `(steps / WINDOW,)`, with an expectation of about 1 for groups of one distribution.
    """
    counts = len(curves), len(others)
    noise = sum((group - group.mean(0)).square().sum(0) for group in (curves, others))
    noise = noise.unflatten(0, (-1, WINDOW)).sum(1) / (sum(counts) - 2)
    distance = (curves.mean(0) - others.mean(0)).square().unflatten(0, (-1, WINDOW)).sum(1)
    return distance / (1 / counts[0] + 1 / counts[1]) / noise


@torch.no_grad()
def off_by_a_rounding(model: RankingModel, dtype: torch.dtype) -> RankingModel:
    """Returns the model with each weight changed by up to one rounding."""
    for parameter in model.parameters():
        parameter.mul_(1 + torch.finfo(dtype).eps / 2 * (2 * torch.rand_like(parameter) - 1))
    return model


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_composed_layers(case: Case, data: RankingData) -> None:
    start = make_model(data, case)
    batches = draw(data, case.steps - WINDOW)
    batches += batches[:WINDOW]  # so that the last window has the same data as the first one

    def curves(fused: bool, runs: int = RUNS, factor: float = 1) -> Tensor:
        found = []
        for _ in range(runs):
            model = copy_of(start, case.dtype, case.device, fused)
            model = off_by_a_rounding(model, case.dtype)
            found.append(losses_of(data, model, batches, factor * case.learning_rate))
        return torch.stack(found)

    composed, fused = curves(False), curves(True)
    assert separation(composed, fused).max() < SEPARATED, separation(composed, fused)
    wrong = curves(False, 1, 1.5)
    assert separation(composed, wrong).max() > SEPARATED, separation(composed, wrong)
    # This ratio is 0.85 with a standard deviation of 0.02 in the case cpu-bf16.
    assert composed[:, -WINDOW:].mean() < 0.97 * composed[:, :WINDOW].mean()
    if case.dtype == torch.float32:
        # AdamW divides gradients by their size, so that rounding counts most where they are near 0.
        torch.testing.assert_close(fused.mean(0), composed.mean(0), rtol=1e-4, atol=0)


Gradients = dict[str, list[Tensor]]


def step_gradients(case: Case, data: RankingData) -> tuple[Gradients, ...]:
    """Returns each parameter's gradients for `DRAWS` models and batches.

    Args:
        case: the configuration, which is computed with fused layers.
        data: the data from which batches are drawn.

    Returns:
        The gradients of fused layers; the exact ones, of composed layers in fp32; and those of
        composed layers in the case's dtype, with the batch in three orders.
    """
    windows = data.windows("training")
    found: tuple[Gradients, ...] = tuple({} for _ in range(5))
    single = torch.float32
    for indices in draw(data, DRAWS):
        start = make_model(data, case)
        with torch.no_grad():
            for parameter in start.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))  # so that every input matters
        rolled = np.roll(indices, SEQUENCES // 2)
        ways = (
            (case.dtype, case.device, True, indices),
            (single, "cpu", False, indices),
            *((case.dtype, case.device, False, i) for i in (indices, indices[::-1], rolled)),
        )
        for way, (dtype, device, fused, order) in zip(found, ways, strict=True):
            # A norm of almost equal numbers would magnify rounding errors without limit.
            model = copy_of(start, dtype, device, fused, norm_eps=1.0)
            mean_loss(model, data.batch(windows.take(order))).backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None, name
                assert parameter.grad.any(), name
                way.setdefault(name, []).append(parameter.grad.cpu())
    return found


def gain(name: str, gradients: Gradients, exact: Gradients) -> tuple[float, float]:
    """Returns the fraction by which gradients are too large, and its standard error over draws."""
    factors = torch.stack(
        [
            (one.double() * other.double()).sum() / other.double().square().sum()
            for one, other in zip(gradients[name], exact[name], strict=True)
        ]
    )
    return factors.mean().item() - 1, factors.std().item() / len(factors) ** 0.5


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_a_step(case: Case, data: RankingData) -> None:
    """Bounds the errors of gradients as `hstu_attn.testing` does, over all draws together.

    The exact gradients are those of composed layers in fp32, the references those of composed
    layers in bf16. A common scale error of all elements, which this rule does not detect, must be
    below 1 %.
    """
    fused, exact, *composed = step_gradients(case, data)
    for name in exact:
        actual, expected = torch.stack(fused[name]), torch.stack(exact[name])
        if case.dtype == torch.float32:  # they differ by the rounding of sums
            atol = 1e-5 * expected.abs().max().item()
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=atol, msg=name)
            continue
        references = [torch.stack(gradients[name]).to(case.dtype) for gradients in composed]
        assert_matches(name, actual.to(case.dtype), expected.double(), *references)
        excess, standard_error = gain(name, fused, exact)
        bound = 0.003 + 4 * standard_error
        assert abs(excess) < bound < 0.008, (name, excess, bound)
