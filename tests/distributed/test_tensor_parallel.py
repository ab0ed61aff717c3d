"""Tests of tensor parallelism: ranks that share a layer's heads get the results of one rank."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hstu_attn.distributed import clip_gradients, parallelize
from hstu_attn.distributed.context_parallel import ContextBatch
from hstu_attn.distributed.tensor_parallel import (
    TensorParallelHSTULayer,
    gather_state_dict,
    shard_heads,
    shard_state_dict,
)
from hstu_attn.layer import HSTULayer, HSTULayerConfig, HSTUStack
from hstu_attn.testing import offsets
from tests.helpers.distributed_runs import run_ranks

LENGTHS = [0, 7, 1, 19]
BASE = HSTULayerConfig(embedding_dim=12, num_heads=4, hidden_dim=16, attention_dim=8)
CONFIGS = [
    BASE,
    replace(BASE, use_group_norm=True, linear_activation="silu_u", max_attn_len=4),
    replace(BASE, concat_u=True, concat_x=True, output_bias=False, linear_bias=False),
    replace(BASE, concat_ua=True, norm_affine=False, linear_activation="none"),
    replace(BASE, input_norm="rms_norm", output_norm="rms_norm", linear_bias=False, concat_u=True),
    replace(BASE, output_norm="rms_norm", norm_affine=False),
    replace(BASE, enable_relative_attention_bias=True, relative_bias_max_seq_len=9, num_buckets=5),
    replace(
        BASE,
        enable_relative_attention_bias=True,
        relative_bias_max_seq_len=9,
        relative_bias_heads=4,
    ),
    replace(
        BASE,
        enable_relative_attention_bias=True,
        relative_bias_max_seq_len=9,
        relative_bias_heads=2,
        num_buckets=0,
    ),
]


# Layers whose gradients are well conditioned in bf16.
LARGE = [
    replace(config, embedding_dim=64, hidden_dim=32, attention_dim=32)
    for config in (BASE, CONFIGS[-3], CONFIGS[-2])
]


def _randomize(module: nn.Module) -> None:
    """Draws all parameters, since a norm weight of 1 or a bias of 0 would hide mistakes."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)


def _step(stack: nn.Module, x: Tensor, *arguments: Any, **options: Any) -> dict[str, Tensor]:
    """Returns the result and all gradients of a loss."""
    x = x.detach().requires_grad_()
    stack.zero_grad(set_to_none=True)
    out = stack(x, *arguments, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device)
    (out * weights.view_as(out)).sum().backward()
    assert x.grad is not None
    found = {"out": out.detach(), "x": x.grad}
    for name, parameter in stack.named_parameters():
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return found


def _check_config(config: HSTULayerConfig, dtype: torch.dtype) -> None:
    stack = HSTUStack(config, 2, dtype=dtype)
    _randomize(stack)
    x = torch.randn(sum(LENGTHS), config.embedding_dim, dtype=dtype)
    targets = torch.tensor([0, 2, 0, 5])
    times = torch.arange(len(x)) * 100 if stack.layers[0].time_weight is not None else None
    arguments = (offsets(LENGTHS), max(LENGTHS), targets, None, times)
    expected = _step(stack, x, *arguments)
    state = copy.deepcopy(stack.state_dict())
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {}
    of_table = {"rtol": 1e-5, "atol": 1e-5}  # the operator sums the gradients of tables in fp32

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shared = shard_heads(stack, mesh)
    assert shared is stack
    found = _step(stack, x, *arguments)
    # A gradient has the layout of its parameter.
    as_local = shard_state_dict(stack, {k: v for k, v in expected.items() if k in state})
    for name, value in found.items():
        wanted = as_local.get(name, expected[name])
        close = of_table if name.endswith(("position_weight", "time_weight")) else tolerance
        torch.testing.assert_close(value, wanted, **close, msg=lambda m, n=name: f"{n}: {m}")

    gathered = gather_state_dict(stack)
    assert gathered.keys() == state.keys()
    assert all(torch.equal(gathered[name], value) for name, value in state.items())
    other = shard_heads(HSTUStack(config, 2, dtype=dtype), mesh)
    other.load_state_dict(shard_state_dict(other, state))
    assert all(
        torch.equal(a, b) for a, b in zip(other.parameters(), stack.parameters(), strict=True)
    )


def _check_rounded(config: HSTULayerConfig, device: str) -> None:
    """Checks layers in bf16: the ranks round other sums, but are about as accurate as one rank.

    The error of a single gradient may be several times that on one rank; their mean is not.
    """
    lengths = [0, 70, 1, 190]
    stack = HSTUStack(config, 2, dtype=torch.bfloat16, device=device)
    _randomize(stack)
    x = torch.randn(sum(lengths), config.embedding_dim, dtype=torch.bfloat16, device=device)
    targets = torch.tensor([0, 2, 0, 5], device=device)
    times = None
    if stack.layers[0].time_weight is not None:
        times = torch.arange(len(x), device=device) * 100
    arguments = (offsets(lengths, device), max(lengths), targets, None, times)
    exact = _step(copy.deepcopy(stack).double(), x.double(), *arguments)
    whole = _step(stack, x, *arguments)
    shard_heads(stack, init_device_mesh(device, (dist.get_world_size(),)))
    found = _step(stack, x, *arguments)
    names = dict(stack.named_parameters())
    for results in (exact, whole):
        results |= shard_state_dict(stack, {k: v for k, v in results.items() if k in names})
    errors, own = (
        torch.stack([(x[name] - exact[name]).norm() / exact[name].norm() for name in found])
        for x in (found, whole)
    )
    assert errors.max() < 0.25, dict(zip(found, errors.tolist(), strict=True))
    assert errors.mean() < 2 * own.mean(), dict(zip(found, errors.tolist(), strict=True))


def _check_divided_tables() -> None:
    """Checks that ranks hold only the heads of tables that they use, if heads can be divided."""
    for heads, held in ((1, 1), (2, 1), (4, 2)):
        biased = {"enable_relative_attention_bias": True, "relative_bias_heads": heads}
        layer = HSTULayer(replace(BASE, **biased, relative_bias_max_seq_len=9))
        made = shard_heads(layer, dist.group.WORLD)
        first = dist.get_rank() * held if heads > 1 else 0
        for table, whole in (
            (made.position_weight, layer.position_weight),
            (made.time_weight, layer.time_weight),
        ):
            assert torch.equal(table, whole[first : first + held])


def _check_layer() -> None:
    group = dist.group.WORLD
    layer = HSTULayer(BASE).eval()
    made = shard_heads(layer, group)
    assert isinstance(made, TensorParallelHSTULayer)
    assert not made.training
    assert made.config.num_heads * dist.get_world_size() == BASE.num_heads
    shares = sum(p.numel() for p in made.parameters()) / sum(p.numel() for p in layer.parameters())
    assert shares < 0.6
    with pytest.raises(NotImplementedError, match="forward_cached"):
        made.forward_cached()
    with pytest.raises(ValueError, match=r"num_heads: expected a multiple of the 2 ranks, got 3"):
        shard_heads(HSTULayer(replace(BASE, num_heads=3)), group)
    with pytest.raises(ValueError, match=r"x: expected shape \(total, 12\)"):
        made(torch.zeros(3, 4), offsets([3]), 3)
    with pytest.raises(ValueError, match=r"mesh: expected one dimension, got 2"):
        shard_heads(layer, init_device_mesh("cpu", (2, 1)))


def _check_large_mean() -> None:
    """Checks that a variance that is small against the mean survives in fp32."""
    layer = HSTULayer(replace(BASE, norm_eps=1e-12))
    made = shard_heads(layer, dist.group.WORLD)
    attention = 1000 + torch.randn(5, BASE.num_heads, BASE.hidden_dim, dtype=torch.float64)
    exact = nn.functional.layer_norm(attention.flatten(1), (BASE.num_heads * BASE.hidden_dim,))
    mine = attention.float()[:, made.first_head :][:, : made.config.num_heads]
    gate = made._steps().gate(mine, torch.ones(5, mine[0].numel()))
    wanted = exact.unflatten(1, (BASE.num_heads, -1))[:, made.first_head :]
    torch.testing.assert_close(
        gate.double(), wanted[:, : made.config.num_heads].flatten(1), rtol=1e-3, atol=1e-3
    )


def _check_all() -> None:
    for config in CONFIGS:
        _check_config(config, torch.float64)
    _check_config(BASE, torch.float32)
    _check_config(replace(BASE, output_norm="rms_norm"), torch.float32)
    _check_rounded(LARGE[-1], "cpu")
    _check_divided_tables()
    _check_layer()
    _check_large_mean()


@pytest.mark.slow
def test_two_ranks_compute_what_one_does():
    run_ranks(2, _check_all)


@pytest.mark.gpu
@pytest.mark.parametrize("config", LARGE, ids=["no bias", "shared tables", "divided tables"])
def test_two_gpus_compute_what_one_does(config):
    run_ranks(2, _check_rounded, config, "cuda", backend="nccl")


def _check_both(config: HSTULayerConfig) -> None:
    """Checks a mesh that divides heads among two ranks and rows among two."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "heads"))
    stack = HSTUStack(config, 2, dtype=torch.float64)
    _randomize(stack)
    x = torch.randn(sum(LENGTHS), config.embedding_dim, dtype=torch.float64, requires_grad=True)
    times = torch.arange(len(x)) * 100 if config.enable_relative_attention_bias else None
    arguments = (offsets(LENGTHS), max(LENGTHS), None, None, times)
    weights = torch.randn_like(x)
    out = stack(x, *arguments)
    (out * weights).sum().backward()
    expected = {name: p.grad for name, p in stack.named_parameters()}

    shard_heads(stack, mesh["heads"])
    context = ContextBatch(*arguments[:2], mesh.get_group("rows"))
    local = context.shard(x.detach()).requires_grad_()
    found = stack(local, *arguments, context=context)
    (found * context.shard(weights)).sum().backward()
    # The operator sums the gradients of tables in fp32.
    close = {"rtol": 1e-5, "atol": 1e-5} if times is not None else {}
    torch.testing.assert_close(found, context.shard(out))
    torch.testing.assert_close(local.grad, context.shard(x.grad))
    for name, wanted in shard_state_dict(stack, expected).items():
        gradient = stack.get_parameter(name).grad
        dist.all_reduce(gradient, group=mesh.get_group("rows"))
        torch.testing.assert_close(gradient, wanted, msg=name, **close)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [None, 1, 2, 4])
def test_heads_and_rows_shared_out_at_once(heads):
    config = BASE
    if heads is not None:
        config = replace(
            BASE,
            enable_relative_attention_bias=True,
            relative_bias_max_seq_len=9,
            relative_bias_heads=heads,
        )
    run_ranks(4, _check_both, config)


def _check_clipping() -> None:
    """Checks that the gradient norm is that of whole layers and is equal on all ranks, also
    where two of four ranks divide the rows of parameters.
    """
    torch.manual_seed(5)
    stack = HSTUStack(BASE, 2, dtype=torch.float64)
    x = torch.randn(sum(LENGTHS), BASE.embedding_dim, dtype=torch.float64)
    arguments = (offsets(LENGTHS), max(LENGTHS))
    _step(stack, x, *arguments)
    wanted = clip_gradients(stack.parameters(), 0.5)
    expected = {name: parameter.grad for name, parameter in stack.named_parameters()}

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "heads"))
    shard_heads(stack, mesh["heads"])
    wholes = copy.deepcopy(stack.state_dict())
    as_local = shard_state_dict(stack, expected)
    _step(stack, x, *arguments)
    torch.testing.assert_close(clip_gradients(stack.parameters(), 0.5), wanted)
    for name, parameter in stack.named_parameters():
        torch.testing.assert_close(parameter.grad, as_local[name], msg=name)

    stack.zero_grad()
    divided = parallelize(stack, mesh["data"], "fsdp2")
    _step(divided, x, *arguments)
    torch.testing.assert_close(clip_gradients(divided.parameters(), 0.5), wanted)
    for name, parameter in divided.named_parameters():
        assert parameter.full_tensor().shape == wholes[name].shape
        torch.testing.assert_close(parameter.grad.full_tensor(), as_local[name], msg=name)


@pytest.mark.slow
def test_gradients_are_clipped_by_the_norm_of_whole_layers():
    run_ranks(4, _check_clipping)


def _dropped() -> tuple[Tensor, Tensor, Tensor]:
    """Returns the output linear's dropped inputs, the scale of the others, and a later draw."""
    torch.manual_seed(7)
    config = replace(BASE, output_dropout_ratio=0.25, norm_affine=False)
    layer = shard_heads(HSTULayer(config), dist.group.WORLD)
    entered: list[Tensor] = []
    steps = layer._steps()
    steps.concat_parts = lambda attention, u: torch.ones(500, u.shape[1])
    layer._steps = lambda: steps
    linear = nn.functional.linear

    def spy(x: Tensor, *rest: Any) -> Tensor:
        entered.append(x)
        return linear(x, *rest)

    nn.functional.linear = spy
    try:
        layer(torch.randn(500, BASE.embedding_dim), offsets([500]), 500)
    finally:
        nn.functional.linear = linear
    kept = entered[-1].detach()
    return kept == 0, kept[kept != 0], torch.rand(())


@pytest.mark.slow
def test_ranks_of_one_seed_drop_other_columns():
    (first, scales, after), (second, _, after_second) = run_ranks(2, _dropped)
    assert first.float().mean() == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(scales, torch.full_like(scales, 1 / 0.75))
    # The masks are independent, so both ranks drop an element with the product of their rates.
    assert (first & second).float().mean() == pytest.approx(0.25**2, abs=0.02)
    assert after == after_second  # dropout outside of the layers is equal on both ranks
