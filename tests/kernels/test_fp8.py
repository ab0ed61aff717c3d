"""Tests of FP8 attention: accuracy against fp64, and against the same quantization in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hstu_attn import Mask, Quantization, hstu_attention, hstu_attn_varlen_func, reference, slots
from hstu_attn.call import make_call
from hstu_attn.quantization import round_weights, weight_scales
from hstu_attn.testing import Batch, make_batch, make_bias, run
from tests.helpers import raw_ops
from tests.helpers.composed import group_in_order
from tests.helpers.fp8 import (
    BF16,
    LENGTHS,
    MODES,
    accuracy_batch,
    assert_gradients_of_kept_codes,
    descales,
    e4m3_batch,
    exact_and_emulated,
    relative_error,
    shapes_of_descales,
    to_device,
)

with_modes = pytest.mark.parametrize("mode", MODES)
with_smooth_k = pytest.mark.parametrize("smooth_k", [False, True], ids=["plain", "smooth"])


def errors(batch: Batch, *quantizations: Quantization | None) -> list[float]:
    """Returns the error of each output against fp64 of the unquantized inputs."""
    exact = run(reference.hstu_attention, batch, dtype=torch.float64)["out"]
    return [
        relative_error(run(hstu_attention, replace(batch, quantization=each))["out"], exact)
        for each in quantizations
    ]


def error(batch: Batch, quantization: Quantization | None) -> float:
    return errors(batch, quantization)[0]


# ---------------------------------------------------------------------------------------------
# Accuracy
# ---------------------------------------------------------------------------------------------


@with_modes
@pytest.mark.parametrize(
    "dim", [64, *(pytest.param(n, marks=pytest.mark.slow) for n in (128, 256))]
)
def test_normal_inputs(mode, dim):
    batch = accuracy_batch("normal", dim, [1000, 0, 24], heads=4)
    plain, smooth = errors(batch, Quantization(mode), Quantization(mode, smooth_k=True))
    assert plain <= 5.6e-2
    assert smooth <= 5.6e-2


def test_sequences_that_are_computed_together_on_a_cpu(monkeypatch):
    """Grouping changes only the order of fp32 sums, and so the last bit of a few results."""
    lengths = [130, 3, 64, 0, 129, 17, 3, 90]
    batch = make_batch(lengths, dim=64, dtype=BF16, bias="position-time")
    batch = replace(batch, quantization=Quantization(smooth_k=True))
    together = run(hstu_attention, batch)["out"]
    for scores in (1, 2**14, None):
        if scores is None:
            group_in_order(monkeypatch)
        else:
            monkeypatch.setattr(slots, "CPU_SCORES", scores)
        out = run(hstu_attention, batch)["out"]
        torch.testing.assert_close(out, together, rtol=2**-7, atol=1e-6)
        assert (out != together).float().mean() < 1e-3


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize(
    ("dim", "bound"),
    [
        (64, 1.3e-2),
        pytest.param(128, 1.1e-2, marks=pytest.mark.slow),
        pytest.param(256, 0.9e-2, marks=pytest.mark.slow),
    ],
)
def test_silu_inputs(mode, dim, bound):
    """The errors of keys cancel in long sequences, for which FP8 is intended.

    They cancel less in modes 3 to 5, where all keys share one scale: the many values near the
    minimum of SiLU are then all rounded in the same direction.
    """
    batch = accuracy_batch("silu", dim, [4096], rows=[256], heads=2)
    smooth_bound = 6.5e-3
    if mode > 2:
        bound, smooth_bound = 1.8e-2, 1e-2
    plain, smooth = errors(batch, Quantization(mode), Quantization(mode, smooth_k=True))
    assert plain <= bound
    assert smooth <= smooth_bound


@pytest.mark.parametrize("mode", MODES[1:])
def test_outliers(mode):
    assert error(accuracy_batch("outliers", 128, [1024]), Quantization(mode)) <= 8e-2


@pytest.mark.parametrize("alpha", [1e-6, 1e-3, 3.0, -2.0])
@pytest.mark.parametrize("scaling_seqlen", [1, 100000])
def test_scales(alpha, scaling_seqlen):
    """Weights neither overflow nor vanish, for any factors.

    The error is .053 on average. For one head and sequence it exceeds the bound in 2 % of draws.
    """
    options = {"alpha": alpha, "scaling_seqlen": scaling_seqlen, "heads": 2}
    batch = accuracy_batch("normal", 64, [300, 300], **options)
    assert error(batch, Quantization()) <= 5.6e-2


@with_modes
@with_smooth_k
@pytest.mark.parametrize("bias", [None, "rab", "position-time"])
@pytest.mark.parametrize("mask", ["causal", "local-context-target", "func-5"])
def test_the_emulation(mode, smooth_k, bias, mask):
    """The composition and the reference in fp64 have the same error, with every part of a call."""
    batch = make_batch([70, 0, 200, 1], [70, 0, 60, 1], dim=40, dim_v=24, dtype=BF16, mask=mask)
    if bias is not None:
        batch = batch.with_bias(make_bias(bias, batch, BF16))
    batch.seqused_q = torch.tensor([60, 0, 60, 1])
    batch.seqused_k = torch.tensor([70, 0, 180, 1])
    exact = run(reference.hstu_attention, batch, dtype=torch.float64)["out"]
    batch.quantization = Quantization(mode, smooth_k)
    emulated = run(reference.hstu_attention, batch, dtype=torch.float64)["out"]
    found = run(hstu_attention, batch)["out"]
    assert found.dtype == BF16
    # Weights next to the middle of two codes are rounded differently in fp32.
    assert relative_error(found, emulated) <= 6e-3
    rounding = torch.finfo(BF16).eps
    assert relative_error(found, exact) <= 1.15 * relative_error(emulated, exact) + rounding


def test_rounded_weights():
    """Scales are powers of two that fit the largest weight into e4m3's range."""
    bound = torch.tensor([0.0, 1e-3, 0.5, 1.0, 4.0, 448.0, 449.0, 1e10])
    scales = weight_scales(bound, 1.0)
    assert torch.equal(scales.log2(), scales.log2().round())
    largest = bound.clamp(min=448 / 2.0**46)
    assert (largest * scales <= 448).all()
    assert (largest * scales > 224).all()
    assert torch.equal(weight_scales(bound / 2, -2.0), weight_scales(bound, 1.0))
    with_bias = weight_scales(bound, 2.0, (torch.tensor([1.0, -3.0]), None))
    assert torch.equal(with_bias, weight_scales(bound * 2 + 2, 1.0))
    with_bias = weight_scales(bound, 2.0, (torch.tensor([-0.1, -1e9]), torch.tensor([-0.1])))
    assert torch.equal(with_bias, weight_scales(bound * 2 + 0.4785, 1.0))
    weights = torch.linspace(-0.27, 4, 999, dtype=torch.float64)
    rounded = round_weights(weights, scales[4].double())
    assert ((rounded - weights).abs() <= weights.abs() / 15.9 + 2.0**-10 / 64).all()


# ---------------------------------------------------------------------------------------------
# Zeros, NaN and infinity
# ---------------------------------------------------------------------------------------------


@with_modes
@with_smooth_k
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_zeros_give_zeros(mode, smooth_k, name):
    batch = make_batch([130, 7], dim=64, dtype=BF16)
    getattr(batch, name)[:130] = 0
    batch.quantization = Quantization(mode, smooth_k)
    out = run(hstu_attention, batch)["out"]
    assert not out[:130].any()
    assert out[130:].abs().max() > 0


@with_modes
@with_smooth_k
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_values_stay_in_their_sequence(mode, smooth_k, bad):
    batch = make_batch([130, 7, 40], dim=64, dtype=BF16)
    for tensor in (batch.q, batch.k, batch.v):
        tensor[130:137] *= 0.5  # so that no scale of the others depends on these
    batch.quantization = Quantization(mode, smooth_k)
    before = run(hstu_attention, batch)["out"]
    for name in ("q", "k", "v"):
        changed = {n: t.clone() for n, t in batch.differentiable().items()}
        changed[name][133, 1, 5] = bad
        out = run(hstu_attention, batch.with_tensors(changed))["out"]
        assert torch.equal(out[:130], before[:130])
        assert torch.equal(out[137:], before[137:])
        assert not out[130:137, 1].isfinite().all()


# ---------------------------------------------------------------------------------------------
# Gradients and interfaces
# ---------------------------------------------------------------------------------------------


def test_gradients_are_those_of_the_inputs():
    batch = make_batch([70, 33], dim=64, dtype=BF16, mask="causal", bias="position-time")
    dout = torch.randn(103, 2, 64).to(BF16)
    expected = run(hstu_attention, batch, dout)
    batch.quantization = Quantization(2, smooth_k=True)
    found = run(hstu_attention, batch, dout)
    assert not torch.equal(found.pop("out"), expected.pop("out"))
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@with_modes
@with_smooth_k
@pytest.mark.parametrize("bias", [None, "rab", "position-time"])
def test_gradients_of_kept_codes(mode, smooth_k, bias):
    batch = make_batch([140, 0, 33], [140, 0, 20], dim=40, dim_v=24, dtype=BF16, mask="causal")
    batch.k.add_(0.3)
    if bias is not None:
        batch = batch.with_bias(make_bias(bias, batch, BF16))
    dout = torch.randn(160, 2, 24).to(BF16)
    batch.quantization = Quantization(mode, smooth_k)
    of_inputs = run(hstu_attention, batch, dout)
    batch.quantization = Quantization(mode, smooth_k, keep="e4m3")
    assert_gradients_of_kept_codes(batch, dout, of_inputs)


def test_memory_of_kept_codes():
    batch = make_batch([512, 256], dim=64, heads=4, dtype=BF16, mask="causal")
    for tensor in (batch.q, batch.k, batch.v):
        tensor.requires_grad_()
    kept = {}
    for keep in ("inputs", "e4m3"):
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        batch.quantization = Quantization(keep=keep)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = hstu_attention(batch.q, batch.k, batch.v, **batch.options())
        kept[keep] = sum(sizes.values())
        del out
    assert kept["inputs"] >= 3 * 768 * 4 * 64 * 2
    assert kept["e4m3"] <= 0.6 * kept["inputs"]


def test_kept_codes_are_differentiated_once():
    batch = make_batch([70], dim=64, dtype=BF16)
    leaves = [x.requires_grad_() for x in (batch.q, batch.k, batch.v)]
    batch.quantization = Quantization(keep="e4m3")
    out = hstu_attention(*leaves, **batch.options())
    gradient, *_ = torch.autograd.grad(out.sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        gradient.sum().backward()


@with_modes
def test_interfaces_agree(mode):
    batch = make_batch([70, 33], dim=64, dtype=torch.float16, mask="causal")
    expected = hstu_attention(
        batch.q, batch.k, batch.v, **{**batch.options(), "quantization": Quantization(mode)}
    )
    by_mode = hstu_attention(batch.q, batch.k, batch.v, **batch.options(), quant_mode=mode)
    by_name = hstu_attn_varlen_func(
        *(batch.q, batch.k, batch.v, batch.cu_seqlens_q, batch.cu_seqlens_k, None, None, 70, 70),
        -1,
        window_size=(-1, 0),
        alpha=batch.alpha,
        quant_mode=mode,
    )
    assert torch.equal(by_mode, expected)
    assert torch.equal(by_name, expected)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"keep": "e4m3"}, {"backward": "e4m3"}], ids=str)
def test_compile_and_export(options):
    quantization = Quantization(2, smooth_k=True, **options)

    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
            call: dict[str, Any] = {"cu_seqlens_q": offsets, "max_seqlen_q": 70}
            return hstu_attention(q, k, v, **call, mask=Mask.causal(), quantization=quantization)

    batch = make_batch([70, 33], dim=64, dtype=BF16)
    inputs = (batch.q, batch.k, batch.v, batch.cu_seqlens_q)
    expected = Module()(*inputs)
    assert torch.equal(torch.compile(Module(), fullgraph=True)(*inputs), expected)
    assert torch.equal(torch.export.export(Module(), inputs).module()(*inputs), expected)
    leaves = [x.requires_grad_() for x in inputs[:3]]
    gradients = torch.autograd.grad(Module()(*inputs).sum(), leaves)
    out = torch.compile(Module(), fullgraph=True)(*inputs)
    for found, gradient in zip(torch.autograd.grad(out.sum(), leaves), gradients, strict=True):
        if quantization.keep == "e4m3":  # a multiply-add may be rounded once or twice
            assert relative_error(found, gradient.double()) <= 2e-3
        else:
            assert torch.equal(found, gradient)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_compile_and_export_of_e4m3_inputs(dtype):
    batch = e4m3_batch()
    call = {**batch.options(), **descales((len(LENGTHS),)), "out_dtype": dtype}

    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return hstu_attention(q, k, v, **call)

    inputs = (batch.q, batch.k, batch.v)
    expected = Module()(*inputs)
    assert torch.equal(torch.compile(Module(), fullgraph=True)(*inputs), expected)
    assert torch.equal(torch.export.export(Module(), inputs).module()(*inputs), expected)


def test_opcheck():
    batch = make_batch([9, 0, 70], dim=16, dtype=BF16, mask="causal")
    arguments = raw_ops.arguments(batch, paged=True) | {"quant_mode": 2, "smooth_k": True}
    torch.library.opcheck(torch.ops.hstu_attn.hstu_varlen_fwd.default, (), arguments)


def test_errors():
    with pytest.raises(ValueError, match="mode: expected a number from 0 to 5, got 6"):
        Quantization(6)
    with pytest.raises(ValueError, match="keep: expected 'inputs' or 'e4m3', got 'e5m2'"):
        Quantization(keep="e5m2")
    with pytest.raises(NotImplementedError, match="quantization: only hstu_attention without page"):
        make_call(torch.tensor([0, 9]), 9, quantization=Quantization(keep="e4m3"))
    batch = make_batch([9], dim=16)
    options = {n: x for n, x in batch.options().items() if n != "quantization"}
    call = (batch.q, batch.k, batch.v)
    with pytest.raises(ValueError, match="q: expected bfloat16 or float16 with quant_mode, got"):
        hstu_attention(*call, **options, quant_mode=2)
    with pytest.raises(ValueError, match="quantization: expected a Quantization or None, got int"):
        hstu_attention(*call, **options, quantization=2)
    with pytest.raises(ValueError, match="quant_mode: expected -1 with quantization, got 3"):
        hstu_attention(*call, **options, quant_mode=3, quantization=Quantization())
    with pytest.raises(raw_ops.BAD_ARGUMENT, match="smooth_k: expected false with quant_mode -1"):
        raw_ops.forward(batch, smooth_k=True)


# ---------------------------------------------------------------------------------------------
# e4m3 q, k and v
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_e4m3_inputs():
    batch = e4m3_batch()
    for q_shape in shapes_of_descales("q_descale"):
        for shape in shapes_of_descales("k_descale"):
            given = descales(shape) | {"q_descale": descales(q_shape)["q_descale"]}
            exact, emulated = exact_and_emulated(batch, given)
            found = hstu_attention(batch.q, batch.k, batch.v, **batch.options(), **given)
            assert found.dtype == BF16
            assert relative_error(found, emulated) <= 6e-3
            assert relative_error(emulated, exact) <= 3e-2


def test_outputs_of_e4m3_inputs():
    batch, given = e4m3_batch(), descales(())
    expected = hstu_attention(batch.q, batch.k, batch.v, **batch.options(), **given)
    call = {**batch.options(), **given}
    for dtype in (torch.float16, BF16):
        out = hstu_attention(batch.q, batch.k, batch.v, **call, out_dtype=dtype)
        assert out.dtype == dtype
        assert relative_error(out, expected.double()) <= 4e-3
    assert torch.equal(out, expected)
    with pytest.raises(ValueError, match=r"out_dtype: expected one of .* got torch.float32"):
        hstu_attention(batch.q, batch.k, batch.v, **call, out_dtype=torch.float32)
    plain = [x.to(BF16) for x in (batch.q, batch.k, batch.v)]
    with pytest.raises(ValueError, match=r"out_dtype: expected torch.bfloat16, .* got torch.floa"):
        hstu_attention(*plain, **batch.options(), out_dtype=torch.float16)
    with pytest.raises(raw_ops.BAD_ARGUMENT, match="out: expected bfloat16 or float16 with float8"):
        raw_ops.forward_out(batch, out.float(), **given)
    assert raw_ops.forward(to_device(batch, "meta"), **to_meta(given)).dtype == BF16


def to_meta(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("meta") for name, tensor in given.items()}


def test_e4m3_inputs_get_no_gradients():
    batch, given = e4m3_batch(), descales(())
    inputs = [x.requires_grad_() for x in (batch.q, batch.k, batch.v)]
    with pytest.raises(NotImplementedError, match="q: attention of float8_e4m3fn has no backward"):
        hstu_attention(*inputs, **batch.options(), **given)
    out = raw_ops.forward(batch, **given)
    with pytest.raises(NotImplementedError, match="q: attention of float8_e4m3fn has no backward"):
        out.backward(torch.ones_like(out))
    for x in inputs:
        x.requires_grad_(False)
    with pytest.raises((NotImplementedError, RuntimeError), match="q: float8_e4m3fn gets no grad"):
        raw_ops.backward(batch, torch.zeros_like(out), has_drab=False, has_dtables=False, **given)


def test_errors_of_e4m3_inputs():
    batch, given = e4m3_batch(), descales(())
    call, options = (batch.q, batch.k, batch.v), batch.options()
    for name in given:
        missing = {n: x for n, x in given.items() if n != name}
        with pytest.raises(ValueError, match=f"{name}: expected a tensor with float8_e4m3fn"):
            hstu_attention(*call, **options, **missing)
        with pytest.raises(ValueError, match=rf"{name}: expected shape .* got shape \(3\)"):
            hstu_attention(*call, **options, **given | {name: torch.ones(3)})
    with pytest.raises(ValueError, match="quant_mode: expected -1 with float8_e4m3fn, got 2"):
        hstu_attention(*call, **options | {"quantization": Quantization()}, **given)
    with pytest.raises(ValueError, match="k: expected the dtype of q"):
        hstu_attention(batch.q, batch.k.to(BF16), batch.v, **options, **given)
    plain = [x.to(BF16) for x in call]
    with pytest.raises(ValueError, match="q_descale: expected None without float8_e4m3fn"):
        hstu_attention(*plain, **options, **given)
    e5m2 = [x.to(torch.float8_e5m2) for x in plain]
    with pytest.raises(ValueError, match=r"q: expected float8_e4m3fn, if .*got float8_e5m2"):
        hstu_attention(*e5m2, **options, **given)


def test_opcheck_of_e4m3_inputs():
    batch = e4m3_batch(dim=16)
    arguments = raw_ops.arguments(batch, paged=True) | descales((len(LENGTHS),))
    op = torch.ops.hstu_attn.hstu_varlen_fwd.default
    # NOTE: the other checks need functions that torch does not have for e4m3.
    torch.library.opcheck(op, (), arguments, test_utils="test_faketensor")
