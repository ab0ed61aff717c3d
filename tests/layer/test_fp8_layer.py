"""Tests of HSTU layers in FP8: e4m3 attention and linears, on the CPU with torch functions."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hstu_attn import FP8, Quantization
from hstu_attn.fp8_linear import fp8_linear, product, quantize_rows
from hstu_attn.layer import HSTULayer, HSTULayerConfig, HSTUStack
from hstu_attn.quantization import E4M3
from hstu_attn.serving import check_cacheable
from tests.helpers.fp8 import relative_error
from tests.helpers.layers import RECOMPUTE, run, with_config

BF16 = torch.bfloat16
LENGTHS = (200, 0, 1, 37, 130)
# The wider a layer is, the less its errors depend on the draw.
BASE = HSTULayerConfig(embedding_dim=128, num_heads=2, hidden_dim=64, attention_dim=16)
STU = HSTULayerConfig.stu(
    embedding_dim=128, num_heads=2, hidden_dim=64, attention_dim=64, output_dropout_ratio=0.0
)
RESEARCH = HSTULayerConfig.research(
    embedding_dim=64, num_heads=2, linear_dim=16, attention_dim=32, max_sequence_len=200
)
# The head dim is one for which kernels have the backward in e4m3.
WIDE = replace(STU, num_heads=1, hidden_dim=128, attention_dim=128)
ATTENTION = FP8(Quantization(smooth_k=True))
LINEARS = FP8(None, linears=True)
LAYER = FP8(Quantization(smooth_k=True), linears=True)


def make_inputs(config: HSTULayerConfig, dtype: torch.dtype = BF16) -> dict[str, Any]:
    inputs = {
        "x": torch.randn(sum(LENGTHS), config.embedding_dim, dtype=dtype),
        "seq_offsets": torch.tensor([0, *LENGTHS]).cumsum(0),
        "max_seq_len": max(LENGTHS),
    }
    if config.enable_relative_attention_bias:
        inputs["timestamps"] = torch.randint(0, 10**6, (sum(LENGTHS),)).sort().values
    return inputs


# ---------------------------------------------------------------------------------------------
# Linears
# ---------------------------------------------------------------------------------------------


def test_rows_have_scales():
    x = torch.randn(5, 32) * torch.tensor([1.0, 1e-15, 1e30, 0.0, 3.0])[:, None]
    x[4, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    codes, descales = quantize_rows(x)
    assert codes.dtype == E4M3
    assert descales.dtype == torch.float32
    assert torch.equal(codes.float().isnan(), ~x.isfinite())
    assert codes.float().nan_to_num(0).abs().amax(1).tolist() == [448, 448, 448, 0, 448]
    values, wanted = (codes.double() * descales.double())[:4], x[:4].double()
    # Half a step of a normal number, or half the step 2^-9 of subnormal codes.
    allowed = (wanted.abs() * 2.0**-4).maximum(descales[:4].double() * 2.0**-10) * (1 + 1e-6)
    assert ((values - wanted).abs() <= allowed).all()


def test_product_is_that_of_what_codes_stand_for(monkeypatch):
    monkeypatch.delattr(torch, "_scaled_mm")  # on CPUs with AMX, it need not take scales of rows
    x, weight, bias = torch.randn(40, 64).to(BF16), torch.randn(48, 64), torch.randn(48)
    quantized = quantize_rows(x), quantize_rows(weight)
    of_x, of_weight = (codes.double() * descales for codes, descales in quantized)
    exact = of_x @ of_weight.t() + bias.to(BF16).double()
    found = product(*quantized, bias)
    assert found.dtype == BF16
    torch.testing.assert_close(found.double(), exact, rtol=2.0**-8, atol=1e-5)
    assert product((quantized[0][0][:0], quantized[0][1][:0]), quantized[1]).shape == (0, 48)


@pytest.mark.parametrize("weight_dtype", [torch.float32, BF16])
def test_a_linear_and_its_gradients(weight_dtype):
    """The errors are those of normal numbers rounded to e4m3: 2.7 % for each factor."""
    x = torch.randn(200, 64).to(BF16)
    weight, bias = torch.randn(96, 64, dtype=weight_dtype), torch.randn(96, dtype=weight_dtype)
    leaves = [x, weight, bias]
    dz = torch.randn(200, 96).to(BF16)

    def outputs_of(function: Any, dtype: torch.dtype | None) -> list[Tensor]:
        made = [leaf.to(dtype or leaf.dtype).requires_grad_() for leaf in leaves]
        z = function(*made)
        return [z.detach(), *torch.autograd.grad(z, made, dz.to(z.dtype))]

    exact = outputs_of(torch.nn.functional.linear, torch.float64)
    found = outputs_of(fp8_linear, None)
    assert [f.dtype for f in found] == [BF16, BF16, weight_dtype, weight_dtype]
    errors = [relative_error(f, e) for f, e in zip(found, exact, strict=True)]
    assert 0.03 < errors[0] < 0.045
    assert 0.03 < errors[1] < 0.045
    assert max(errors[2:]) < 3e-3  # bf16 products


def test_a_nan_stays_in_its_row():
    x = torch.randn(6, 32).to(BF16)
    x[2, 3] = torch.nan
    z = fp8_linear(x, torch.randn(16, 32), None)
    assert z.isnan().any(1).tolist() == [False, False, True, False, False, False]


# ---------------------------------------------------------------------------------------------
# Layers
# ---------------------------------------------------------------------------------------------


# Bounds of the relative error (Frobenius norm) of the layer's increment `output - x` and of the
# gradients, for x without the residual's part. Gradients of tables are sums that mostly cancel.
BOUNDS = {"attention": (ATTENTION, 0.06), "linears": (LINEARS, 0.12), "layer": (LAYER, 0.12)}
TABLES = {"d position_weight": 0.2, "d time_weight": 0.2}


@pytest.mark.parametrize("fused", [False, True], ids=["composed", "fused"])
@pytest.mark.parametrize(
    "config", [BASE, STU, WIDE, RESEARCH], ids=["base", "stu", "e4m3-backward", "research"]
)
@pytest.mark.parametrize("name", BOUNDS)
def test_errors_of_a_layer(name, config, fused):
    fp8, bound = BOUNDS[name]
    if config is WIDE and fp8.attention is not None:
        fp8 = replace(fp8, attention=replace(fp8.attention, backward="e4m3"))
    layer = HSTULayer(replace(config, fused=fused))
    inputs = make_inputs(config)
    cotangent = torch.randn_like(inputs["x"])
    exact_inputs = {**inputs, "x": inputs["x"].double()}
    exact = run(with_config(layer, fused=False), exact_inputs, cotangent.double())
    in_bf16 = run(layer, inputs, cotangent)
    found = run(with_config(layer, fp8=fp8), inputs, cotangent)
    assert found.keys() == exact.keys()
    for key, wanted in exact.items():
        assert found[key].dtype == in_bf16[key].dtype
        # The residual, which is exact, would hide errors of the layer.
        residual = {"output": inputs["x"], "d x": cotangent}.get(key)
        residual = 0 if residual is None else residual.double()
        error = relative_error(found[key].double() - residual, wanted - residual)
        usual = relative_error(in_bf16[key].double() - residual, wanted - residual)
        assert error < TABLES.get(key, bound) + usual, (key, error, usual)
    assert not torch.equal(found["output"], in_bf16["output"])


@pytest.mark.parametrize("fp8", [ATTENTION, LAYER], ids=["attention", "layer"])
def test_what_is_recomputed_has_the_same_bits(fp8):
    layer, inputs = HSTULayer(replace(STU, fp8=fp8, fused=True)), make_inputs(STU)
    cotangent = torch.randn_like(inputs["x"])
    kept = run(layer, inputs, cotangent)
    again = run(with_config(layer, **RECOMPUTE), inputs, cotangent)
    assert all(torch.equal(again[name], tensor) for name, tensor in kept.items())
    under_no_grad = with_config(layer)
    with torch.no_grad():
        assert torch.equal(under_no_grad(**inputs), kept["output"])

    def checkpointed(**arguments: Any) -> Tensor:
        return checkpoint(layer.forward, **arguments, use_reentrant=False)

    x = inputs["x"].detach().requires_grad_()
    (gradient,) = torch.autograd.grad(checkpointed(**{**inputs, "x": x}), x, cotangent)
    assert torch.equal(gradient, kept["d x"])


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True], ids=["composed", "fused"])
def test_compiled(fused):
    torch._dynamo.reset()
    stack = HSTUStack(replace(RESEARCH, fp8=LAYER, fused=fused), 2)
    compiled = torch.compile(stack, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        inputs = make_inputs(RESEARCH)
        cotangent = torch.randn_like(inputs["x"])
        expected, found = (run(module, inputs, cotangent) for module in (stack, compiled))
        for name, tensor in expected.items():
            key = name if name in found else name.replace("d ", "d _orig_mod.")
            torch.testing.assert_close(found[key], tensor, rtol=2e-2, atol=2e-2)


def test_autocast_gives_linears_their_dtype():
    layer = HSTULayer(replace(BASE, fp8=LAYER))
    inputs = make_inputs(BASE)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(**{**inputs, "x": inputs["x"].float()})
    assert out.dtype == torch.float32
    increment = out.detach() - inputs["x"]
    wanted = layer(**inputs).detach().double() - inputs["x"]
    assert relative_error(increment, wanted) < 0.05
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_the_state_is_that_of_16_bits():
    layer, of_16_bits = HSTULayer(replace(BASE, fp8=LAYER)), HSTULayer(BASE)
    state, expected = layer.state_dict(), of_16_bits.state_dict()
    assert list(state) == list(expected)
    assert all(state[name].dtype == tensor.dtype for name, tensor in expected.items())
    of_16_bits.load_state_dict(state)
    layer.load_state_dict(expected)


def test_configurations_in_files():
    for fp8 in (None, ATTENTION, LINEARS, LAYER):
        config = replace(STU, fp8=fp8)
        assert HSTULayerConfig(**asdict(config)) == config


def test_what_is_refused():
    for name, changes in (
        ("embedding_dim", {"embedding_dim": 40}),
        (r"num_heads \* hidden_dim", {"hidden_dim": 20}),
        (r"num_heads \* attention_dim", {"attention_dim": 12}),
    ):
        with pytest.raises(ValueError, match=f"{name}: expected a multiple of 16 with FP8"):
            replace(BASE, fp8=LINEARS, **changes)
        replace(BASE, fp8=ATTENTION, **changes)
    with pytest.raises(ValueError, match="fp8: expected an FP8 or None, got 'layer'"):
        replace(BASE, fp8="layer")
    with pytest.raises(ValueError, match="attention: expected a Quantization or None, got int"):
        FP8(attention=2)
    for fused, dtype in ((False, torch.float32), (True, torch.float16)):
        layer = HSTULayer(replace(BASE, fp8=LINEARS, fused=fused))
        with pytest.raises(ValueError, match=f"x: expected bfloat16 with FP8 linears, got {dtype}"):
            layer(**make_inputs(BASE, dtype))
    with pytest.raises(ValueError, match="q: expected bfloat16 or float16 with quant_mode"):
        HSTULayer(replace(BASE, fp8=ATTENTION))(**make_inputs(BASE, torch.float32))
    cached = replace(STU, scaling_seqlen=100)
    check_cacheable(replace(cached, fp8=LINEARS), with_targets=True)
    check_cacheable(replace(cached, fp8=FP8(Quantization(1))), with_targets=True)
    for attention in (Quantization(2), Quantization(1, smooth_k=True)):
        with pytest.raises(ValueError, match=r"fp8: expected, for a cache, None, or attention="):
            check_cacheable(replace(cached, fp8=FP8(attention)), with_targets=True)


# ---------------------------------------------------------------------------------------------
# On a GPU
# ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("config", [BASE, STU, WIDE], ids=["base", "stu", "e4m3-backward"])
@pytest.mark.parametrize("name", BOUNDS)
def test_a_fused_layer_on_a_gpu(name, config):
    """The fused layer has about the errors of the composed layer on the same GPU."""
    fp8, bound = BOUNDS[name]
    if config is WIDE and fp8.attention is not None:
        fp8 = replace(fp8, attention=replace(fp8.attention, backward="e4m3"))
    if fp8.attention is not None and os.environ["HSTU_ATTN_FORCE_ARCH"] != "90":
        pytest.skip("only sm90 has FP8 attention")
    layer, inputs = HSTULayer(replace(config, fused=False)), make_inputs(config)
    cotangent = torch.randn_like(inputs["x"])
    exact_inputs = {**inputs, "x": inputs["x"].double()}
    exact = run(layer, exact_inputs, cotangent.double())
    inputs = {key: x.cuda() if isinstance(x, Tensor) else x for key, x in inputs.items()}
    layer, cotangent = layer.cuda(), cotangent.cuda()
    composed = run(with_config(layer, fp8=fp8), inputs, cotangent)
    fused = with_config(layer, fp8=fp8, fused=True)
    found = run(fused, inputs, cotangent)
    for key, wanted in exact.items():
        residual = {"output": inputs["x"], "d x": cotangent}.get(key)
        residual = 0 if residual is None else residual.double().cpu()
        wanted = wanted - residual
        error = relative_error(found[key].double().cpu() - residual, wanted)
        usual = relative_error(composed[key].double().cpu() - residual, wanted)
        assert error < min(1.1 * usual + 2e-3, 1.2 * bound), (key, error, usual)
    with torch.no_grad():
        assert torch.equal(fused(**inputs), found["output"])
