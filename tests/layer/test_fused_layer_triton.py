"""Tests of the fused HSTU layer with its Triton kernels, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hstu_attn.fused import forward, torch_steps
from hstu_attn.layer import HSTULayer, HSTULayerConfig
from hstu_attn.testing import assert_matches
from tests.helpers.layers import (
    BASE,
    DROPPING,
    RECOMPUTE,
    RESEARCH,
    RMS_NORMS,
    RMS_STU,
    assert_all_close,
    make_inputs,
    make_layer,
    run,
    with_config,
)
from tests.helpers.triton_interpreter import interpreter

# ---------------------------------------------------------------------------------------------
# In Triton's interpreter
# ---------------------------------------------------------------------------------------------


@contextmanager
def triton_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from hstu_attn.fused import triton_steps

    with monkeypatch.context() as patch:
        patch.setattr(forward, "steps_for", lambda x, *widths: triton_steps)
        yield


@pytest.mark.slow
@interpreter
@pytest.mark.parametrize("recompute", [{}, RECOMPUTE], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    "config",
    [
        replace(DROPPING, use_group_norm=True),
        replace(RESEARCH, concat_ua=True),
        replace(BASE, linear_activation="none"),
        replace(RMS_STU, output_dropout_ratio=0.3),
    ],
)
def test_the_kernels_in_the_layer(config, recompute, monkeypatch):
    config = replace(config, norm_eps=1e-2)
    layer, inputs = make_layer(config, torch.float32), make_inputs(config, set(), torch.float32)
    cotangent = torch.randn_like(inputs["x"])
    torch.manual_seed(5)
    expected = run(with_config(layer, fused=True), inputs, cotangent)
    torch.manual_seed(5)
    with triton_on_cpu(monkeypatch):
        actual = run(with_config(layer, fused=True, **recompute), inputs, cotangent)
    assert_all_close(actual, expected, rtol=1e-3, atol=1e-3)


# ---------------------------------------------------------------------------------------------
# On a GPU
# ---------------------------------------------------------------------------------------------

ON_GPU = HSTULayerConfig(embedding_dim=256, num_heads=4, hidden_dim=64, attention_dim=32)
GPU_STU = HSTULayerConfig.stu(
    embedding_dim=256, num_heads=4, hidden_dim=64, attention_dim=32, output_dropout_ratio=0.0
)
GPU_CASES: dict[str, tuple[HSTULayerConfig, set[str]]] = {
    "base": (ON_GPU, set()),
    "stu": (GPU_STU, {"num_targets"}),
    "stu, group norm": (replace(GPU_STU, use_group_norm=True), {"num_targets"}),
    "stu, rms norms, no bias": (
        replace(GPU_STU, linear_bias=False, **RMS_NORMS), {"num_targets"}
    ),
    "no weights, concat_ua": (
        replace(ON_GPU, norm_affine=False, concat_ua=True, linear_bias=False), set()
    ),
    "no activation, window": (
        replace(ON_GPU, linear_activation="none", max_attn_len=70), {"num_contexts"}
    ),
    "wide heads": (replace(ON_GPU, num_heads=2, hidden_dim=256, attention_dim=128), set()),
    "odd widths": (
        HSTULayerConfig(embedding_dim=72, num_heads=3, hidden_dim=24, attention_dim=40), set()
    ),
}  # fmt: skip


def gpu_inputs(config: HSTULayerConfig, names: set[str], dtype: torch.dtype) -> dict[str, Any]:
    lengths = torch.tensor([300, 0, 1, 129, 64])
    optional = {
        "num_targets": torch.tensor([20, 0, 1, 0, 64]),
        "num_contexts": torch.tensor([3, 0, 0, 70, 1]),
    }
    return {
        "x": torch.randn(int(lengths.sum()), config.embedding_dim, dtype=dtype, device="cuda"),
        "seq_offsets": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).cuda(),
        "max_seq_len": 300,
        **{name: optional[name].cuda() for name in names},
    }


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [{}, RECOMPUTE], ids=["kept", "recomputed"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", GPU_CASES)
def test_on_a_gpu(name, dtype, recompute):
    config, names = GPU_CASES[name]
    # A norm of almost equal numbers would magnify rounding errors without limit.
    layer = HSTULayer(replace(config, norm_eps=1.0), device="cuda")
    double = with_config(copy.deepcopy(layer).cpu().double(), fused=False)
    found: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
    # One weight per head is too few to compare largest errors, so several batches are used.
    for _ in range(8 if config.use_group_norm else 1):
        inputs = gpu_inputs(config, names, dtype)
        assert layer._is_fused(inputs["x"])
        cotangent = torch.randn_like(inputs["x"])
        actual = run(with_config(layer, **recompute), inputs, cotangent)
        same_dtype_reference = run(with_config(layer, fused=False), inputs, cotangent)
        on_cpu = {n: t.cpu() if torch.is_tensor(t) else t for n, t in inputs.items()}
        exact = run(double, {**on_cpu, "x": on_cpu["x"].double()}, cotangent.cpu().double())
        for tensor_name, tensor in actual.items():
            wanted = same_dtype_reference[tensor_name]
            assert tensor.dtype == wanted.dtype
            triple = (tensor.cpu(), exact[tensor_name], wanted.cpu())
            found.setdefault(tensor_name, []).append(triple)
    for tensor_name, triples in found.items():
        assert_matches(tensor_name, *map(torch.stack, zip(*triples, strict=True)))


@pytest.mark.gpu
def test_dropout_on_a_gpu(deterministic):
    """Rows and gradients equal those of the steps in plain torch with the same mask."""
    layer = HSTULayer(replace(GPU_STU, output_dropout_ratio=0.3, norm_eps=1.0), device="cuda")
    inputs = gpu_inputs(GPU_STU, {"num_targets"}, torch.bfloat16)
    cotangent = torch.randn_like(inputs["x"])
    results = []
    for recompute in ({}, {}, RECOMPUTE):
        torch.manual_seed(6)
        results.append(run(with_config(layer, **recompute), inputs, cotangent))
    assert_all_close(results[1], results[0], rtol=0, atol=0)
    assert_all_close(results[2], results[0], rtol=2e-2, atol=2e-2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "steps_for", lambda x, *widths: torch_steps)
        torch.manual_seed(6)
        expected = run(layer, inputs, cotangent)
    for name, tensor in expected.items():
        tolerance = 0.02 * tensor.abs().max().item()
        torch.testing.assert_close(results[0][name], tensor, rtol=0, atol=tolerance)
