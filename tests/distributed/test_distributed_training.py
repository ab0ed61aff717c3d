"""Tests that a training step is the same on one rank and on several, with each strategy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hstu_attn import HSTULayer
from hstu_attn.distributed import clip_gradients, global_mean, parallelize, parameter_groups
from tests.helpers.distributed_runs import BACKENDS, device_type, run_ranks
from tests.helpers.distributed_training import (
    NUM_ITEMS,
    WIDTH,
    Run,
    SmallModel,
    Training,
    train,
    whole,
)

STEPS, EPOCH = 20, 4


def fresh_seed() -> int:
    return int(torch.randint(2**31, ()))


def close(actual: Any, expected: Any, run: Run, factor: float = 1) -> None:
    tolerance = factor * (5e-6 if run.dtype == torch.float32 else 1e-12)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, check_dtype=False)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize(
    ("number", "dtype"), [(2, torch.float32), (2, torch.float64), (4, torch.float64)]
)
def test_training_is_that_of_one_rank(strategy: Any, number: int, dtype: torch.dtype) -> None:
    run = Run(strategy, dtype=dtype, data_seed=fresh_seed())
    (one,) = run_ranks(1, train, run, STEPS)
    many = run_ranks(number, train, run, STEPS)
    # Each epoch has almost the same sequences. The ratio of the last one's loss to the first one's
    # is 0.876 with a standard deviation of 0.018 over 600 seeds, so 0.97 is five deviations away.
    assert sum(one["losses"][-EPOCH:]) < 0.97 * sum(one["losses"][:EPOCH])
    assert min(one["norms"]) > run.max_norm  # every step is clipped
    for rank in many:
        close(rank["losses"], one["losses"], run)
        close(rank["norms"], one["norms"], run, factor=10)
        assert rank["losses"] == many[0]["losses"]
        assert rank["norms"] == many[0]["norms"]
        close(rank["parameters"], one["parameters"], run, factor=10)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_bf16_layers_keep_fp32_parameters(strategy: Any, number: int, backend: str) -> None:
    run = Run(strategy, backend, compute_dtype=torch.bfloat16, data_seed=fresh_seed())
    (one,) = run_ranks(1, train, run, STEPS)
    for rank in run_ranks(number, train, run, STEPS, backend=backend):
        torch.testing.assert_close(rank["losses"], one["losses"], rtol=0.03, atol=0)
        assert {tensor.dtype for tensor in rank["parameters"].values()} == {torch.float32}
    if backend == "gloo":  # GPUs have no kernels for fp32
        exact = train(Run(data_seed=run.data_seed), STEPS)
        torch.testing.assert_close(one["losses"], exact["losses"], rtol=0.05, atol=0)
        assert one["losses"] != exact["losses"]


def dtypes_in_layers(strategy: Any) -> list[tuple[torch.dtype, torch.dtype]]:
    """Returns the dtypes of the weights and the rows of each layer when it computes."""
    training = Training(Run(strategy, compute_dtype=torch.bfloat16))
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    def look(layer: HSTULayer, arguments: tuple[torch.Tensor, ...]) -> None:
        weight = layer.uvqk.weight
        assert not isinstance(weight, DTensor)
        seen.append((weight.dtype, arguments[0].dtype))

    for module in training.model.modules():
        if isinstance(module, HSTULayer):
            module.register_forward_pre_hook(look)
    training.steps(1)
    return seen


@pytest.mark.slow
def test_layers_gather_weights_in_bf16() -> None:
    for rank in run_ranks(2, dtypes_in_layers, "fsdp2"):
        assert rank == [(torch.bfloat16, torch.bfloat16)] * 2
    for number in (1, 2):
        for rank in run_ranks(number, dtypes_in_layers, "ddp"):
            assert rank == [(torch.float32, torch.bfloat16)] * 2


def sharding(strategy: Any) -> tuple[dict[str, tuple[int, ...]], int, list[int]]:
    """Returns the shapes of rank 0's parts of each parameter and of each group of the optimizer."""
    training = Training(Run(strategy))
    training.steps(1)
    local = {
        name.removeprefix("module."): tuple(
            (parameter.to_local() if isinstance(parameter, DTensor) else parameter).shape
        )
        for name, parameter in training.model.named_parameters()
    }
    groups = [len(group["params"]) for group in training.optimizer.param_groups]
    return local, len(local), groups


def test_what_ranks_hold() -> None:
    whole_shapes = {name: tuple(p.shape) for name, p in SmallModel(None, Run()).named_parameters()}
    for strategy in ("ddp", "fsdp2"):
        local, number, groups = run_ranks(2, sharding, strategy)[0]
        assert local.keys() == whole_shapes.keys()
        assert local.pop("items.weight") == (-(-NUM_ITEMS // 2), WIDTH)
        assert groups == ([number - 1, 1] if strategy == "ddp" else [number])
        for name, shape in local.items():
            first, *rest = whole_shapes[name]
            divided = first if strategy == "ddp" else -(-first // 2)
            assert shape == (divided, *rest), name


def means(sums: list[float], counts: list[int]) -> tuple[float, float]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
    local = torch.tensor(sums[rank], requires_grad=True)
    mean = global_mean(local, counts[rank], mesh)
    (3 * mean).backward()
    assert local.grad is not None
    return mean.item(), local.grad.item()


def test_global_mean() -> None:
    assert run_ranks(1, means, [6.0], [4]) == [(1.5, 0.75)]
    assert run_ranks(2, means, [6.0, 1.0], [4, 10]) == [(0.5, pytest.approx(3 * 2 / 14))] * 2
    assert run_ranks(2, means, [0.0, 1.0], [0, 10])[0] == (pytest.approx(0.1), pytest.approx(0.6))
    assert run_ranks(2, means, [0.0, 0.0], [0, 0])[1][0] == 0
    (nan, _), (other, _) = run_ranks(2, means, [math.nan, 1.0], [1, 1])
    assert math.isnan(nan)
    assert math.isnan(other)
    with pytest.raises(ValueError, match=r"local_sum: expected a scalar, got the shape \(2,\)"):
        global_mean(torch.ones(2), 2, None)


def clipped(gradients: list[torch.Tensor], max_norm: float) -> tuple[float, list[torch.Tensor]]:
    """Clips the gradients of a plain parameter, a sharded DTensor and a replicated DTensor."""
    placements: list[Any] = [None, Shard(0), Replicate()]
    parameters = []
    for gradient, placement in zip(gradients, placements, strict=True):
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient.clone()
        if placement is not None and dist.is_initialized():
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            step = -(-len(gradient) // mesh.size())
            rows = gradient[mesh.get_rank() * step :][:step].clone()
            local = rows if isinstance(placement, Shard) else gradient.clone()
            shape = {"shape": gradient.shape, "stride": gradient.stride()}
            zeros = DTensor.from_local(torch.zeros_like(local), mesh, [placement], **shape)
            parameter = nn.Parameter(zeros)
            parameter.grad = DTensor.from_local(local, mesh, [placement], **shape)
        parameters.append(parameter)
    norm = clip_gradients(parameters, max_norm)
    return norm.item(), [whole(p.grad) for p in parameters if p.grad is not None]


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("max_norm", [0.1, 1e6, math.inf])
def test_clipping(num_ranks: int, max_norm: float) -> None:
    gradients = [torch.randn(3, 2), torch.randn(5, 4), torch.randn(6)]
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
    factor = min(1.0, max_norm / norm)
    for actual, scaled in run_ranks(num_ranks, clipped, gradients, max_norm):
        assert actual == pytest.approx(norm, rel=1e-5)
        for tensor, gradient in zip(scaled, gradients, strict=True):
            torch.testing.assert_close(tensor, gradient * factor, rtol=2e-5, atol=0)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_gradients_that_are_not_finite_are_not_scaled(value: float) -> None:
    gradients = [torch.randn(3, 2), torch.randn(5, 4), torch.randn(6)]
    gradients[1][4, 3] = value
    for number in (1, 2):
        for norm, kept in run_ranks(number, clipped, gradients, 0.1):
            assert not math.isfinite(norm)
            for tensor, gradient in zip(kept, gradients, strict=True):
                torch.testing.assert_close(tensor, gradient, rtol=0, atol=0, equal_nan=True)


def refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    parameter = nn.Parameter(DTensor.from_local(torch.ones(2), mesh["a"], [Replicate()]))
    parameter.grad = DTensor.from_local(torch.ones(2), mesh["a"], [Partial()])
    messages = []
    calls: list[Callable[[], object]] = [
        lambda: parallelize(nn.Linear(2, 2), mesh),
        lambda: clip_gradients([parameter], 1.0),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=": expected ") as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_refuses() -> None:
    with pytest.raises(ValueError, match="strategy: expected 'ddp' or 'fsdp2', got 'fsdp'"):
        parallelize(nn.Linear(2, 2), None, "fsdp")  # type: ignore[arg-type]
    mesh, partial = run_ranks(2, refusals)[0]
    assert "mesh: expected one dimension, got 2" in mesh
    assert "gradients: expected no Partial placement" in partial
    assert clip_gradients([nn.Parameter(torch.ones(2))], 1.0).item() == 0
    assert [len(group["params"]) for group in parameter_groups(nn.Linear(2, 2))] == [2]
    assert device_type("gloo") == "cpu"
