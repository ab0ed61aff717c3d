"""Tests of FP8 attention on a GPU, mostly against fp64 emulations of the same quantization."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hstu_attn import Mask, Quantization, hstu_attention, reference
from hstu_attn.quantization import E4M3, quantize_qkv
from hstu_attn.testing import (
    BIAS_NAMES,
    MASK_NAMES,
    Batch,
    make_batch,
    make_bias,
    make_lengths,
    offsets,
    poisoned_memory,
    run,
)
from tests.helpers import raw_ops
from tests.helpers.fp8 import (
    BF16,
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

pytestmark = pytest.mark.gpu

with_modes = pytest.mark.parametrize("mode", MODES)
with_smooth_k = pytest.mark.parametrize("smooth_k", [False, True], ids=["plain", "smooth"])


@pytest.fixture
def hopper() -> None:
    if os.environ["HSTU_ATTN_FORCE_ARCH"] != "90":
        pytest.skip("only sm90 has FP8 attention")


def on_gpu(batch: Batch, **extra: Any) -> Tensor:
    with poisoned_memory("cuda"):
        return run(hstu_attention, to_device(batch, "cuda"), **extra)["out"].cpu()


def assert_as_good_as_the_emulation(batch: Batch, factor: float = 1.15) -> None:
    """Compares errors against fp64 of the unquantized inputs, both rounded to the same dtype."""
    plain = replace(batch, quantization=None)
    exact = run(reference.hstu_attention, plain, dtype=torch.float64)["out"]
    emulated = run(reference.hstu_attention, batch, dtype=torch.float64)["out"]
    found = on_gpu(batch)
    assert found.isfinite().all()
    error = relative_error(found, exact)
    assert error <= factor * relative_error(emulated.to(found.dtype), exact)
    assert torch.equal(found, on_gpu(batch))


@with_modes
@with_smooth_k
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_modes(hopper, mode, smooth_k, dim):
    for dtype in (BF16, torch.float16):
        batch = make_batch([700, 0, 129, 1], [700, 0, 100, 1], dim=dim, dtype=dtype, mask="causal")
        batch.k.add_(0.3)
        batch.quantization = Quantization(mode, smooth_k)
        assert_as_good_as_the_emulation(batch)


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(m, marks=pytest.mark.sanitize if m == "context-target" else ())
        for m in MASK_NAMES
    ],
)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_masks(hopper, mask, dim):
    batch = make_batch(
        [270, 0, 500, 1, 128], [270, 0, 60, 1, 127], dim=dim, dtype=BF16, mask=mask, heads=3
    )
    batch.quantization = Quantization(2, smooth_k=True)
    assert_as_good_as_the_emulation(batch)
    batch.seqused_q = torch.tensor([250, 0, 60, 1, 3])
    batch.seqused_k = torch.tensor([260, 0, 400, 1, 100])
    assert_as_good_as_the_emulation(replace(batch, mask=Mask.causal()))


@pytest.mark.parametrize(
    ("dim", "dim_v"),
    [(8, 8), (32, 32), (40, 40), (72, 64), (96, 96), (200, 200), (64, 128), (256, 40), (16, 256)],
)
def test_head_dims(hopper, dim, dim_v):
    for mode in (0, 1, 2, 4):
        batch = make_batch([300, 129, 5], dim=dim, dim_v=dim_v, dtype=BF16, mask="causal")
        batch.quantization = Quantization(mode)
        assert_as_good_as_the_emulation(batch)


@pytest.mark.parametrize("alpha", [1e-6, 1e-3, 3.0, -2.0])
@pytest.mark.parametrize("scaling_seqlen", [1, 100000])
def test_scales(hopper, alpha, scaling_seqlen):
    options = {"alpha": alpha, "scaling_seqlen": scaling_seqlen, "quantization": Quantization()}
    for dim in (64, 256):
        assert_as_good_as_the_emulation(accuracy_batch("normal", dim, [300], **options))
        assert_as_good_as_the_emulation(accuracy_batch("outliers", dim, [300], **options))
    batch = accuracy_batch("normal", 64, [300], **options)
    batch.attn_scale = torch.rand(300)
    assert_as_good_as_the_emulation(batch)


@pytest.mark.parametrize(("dim", "bound"), [(64, 1.3e-2), (128, 1.1e-2), (256, 0.9e-2)])
def test_errors_of_4096_keys(hopper, dim, bound):
    for kind, smooth_k, limit in (
        ("normal", False, 5.6e-2), ("silu", False, bound), ("silu", True, 6.5e-3),
    ):  # fmt: skip
        batch = accuracy_batch(kind, dim, [4096], rows=[256], heads=2)
        batch.quantization = Quantization(2, smooth_k)
        plain = replace(batch, quantization=None)
        exact = run(reference.hstu_attention, plain, dtype=torch.float64)["out"]
        assert relative_error(on_gpu(batch), exact) <= limit, (kind, smooth_k)


@pytest.mark.parametrize("kind", ["normal", "silu"])
@with_smooth_k
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_long_sums(hopper, dim, smooth_k, kind):
    """Sums of P V that are not promoted to fp32 would be off by 2.8 % with SiLU of q, k and v."""
    batch = accuracy_batch(kind, dim, [16384], rows=[256], heads=2)
    batch.quantization = Quantization(2, smooth_k)
    assert_as_good_as_the_emulation(batch, factor=1.1)
    if kind == "silu":  # the sums of normal inputs are small beside their terms
        emulated = run(reference.hstu_attention, batch, dtype=torch.float64)["out"]
        assert relative_error(on_gpu(batch), emulated) <= 5e-3


@pytest.mark.parametrize("mode", [2, 3])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_sums_of_several_work_tiles(hopper, dim, mode):
    """A block adds up O of one work tile after another, and promotes the sums of long ones."""
    batch = make_batch([2100, 1300, 1700], heads=8, dim=dim, dtype=BF16, mask="causal")
    batch.quantization = Quantization(mode)
    assert_as_good_as_the_emulation(batch)


@pytest.mark.parametrize("mode", [1, 2])
@pytest.mark.parametrize(("sign", "alpha"), [(1, 0.5), (-1, 0.05)])
@pytest.mark.parametrize(("dim", "code"), [(64, 108), (128, 76), (256, 54)])
def test_largest_products(hopper, mode, sign, alpha, dim, code):
    """Rows of codes have norms close to the limit, and products above 52000, or below -52000.

    With `alpha`, scores are at least -1: near -5, the polynomial of tanh is off by more than silu.
    """
    batch = make_batch([300], dim=dim, dtype=BF16, mask="causal", alpha=alpha)
    for tensor, factor in ((batch.q, 1), (batch.k, sign)):
        tensor.fill_(factor * code / 224)
        tensor[..., 0] = factor
    batch.q.mul_(torch.linspace(1, 0.5, 300)[:, None, None])
    batch.quantization = Quantization(mode)
    sequences = (batch.cu_seqlens_q, batch.cu_seqlens_q, None, None)
    x = quantize_qkv(batch.q, batch.k, batch.v, *sequences, mode, False)
    products = torch.einsum("ihd,jhd->hij", x.q8.double(), x.k8.double())
    assert products.abs().max() > 52000
    assert_as_good_as_the_emulation(batch)


# ---------------------------------------------------------------------------------------------
# Biases
# ---------------------------------------------------------------------------------------------

with_biases = pytest.mark.parametrize("bias", BIAS_NAMES)


@with_biases
@pytest.mark.parametrize(
    "mask",
    [
        "full",
        "causal",
        pytest.param("context-target", marks=pytest.mark.sanitize),
        "local-context-target",
    ],
)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_biases(hopper, bias, mask, dim):
    batch = make_batch([700, 0, 129, 1], [700, 0, 100, 1], dim=dim, dtype=BF16, mask=mask)
    batch.k.add_(0.3)
    for mode, smooth_k in ((2, True), (0, False)):
        batch.quantization = Quantization(mode, smooth_k)
        assert_as_good_as_the_emulation(batch.with_bias(make_bias(bias, batch, BF16)))
    batch.seqused_q = torch.tensor([600, 0, 60, 1])
    batch.seqused_k = torch.tensor([650, 0, 128, 1])
    assert_as_good_as_the_emulation(batch.with_bias(make_bias(bias, batch, BF16)))


@pytest.mark.parametrize("bias", ["rab", "rab-1-head", "position-time"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_biases_of_fp16_inputs(hopper, bias, dim):
    """The lengths of the first batch are those of tensors that TMA reads without a copy."""
    for lengths in ([512, 300], [77, 301]):
        batch = make_batch(lengths, dim=dim, dtype=torch.float16, mask="causal", heads=4)
        batch.quantization = Quantization()
        assert_as_good_as_the_emulation(batch.with_bias(make_bias(bias, batch, torch.float16)))


@pytest.mark.parametrize("bias", ["rab", "position-time"])
@pytest.mark.parametrize("factor", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize("alpha", [1e-3, 1.0, -2.0])
def test_sizes_of_a_bias(hopper, bias, factor, alpha):
    """Weights neither overflow nor vanish with the largest and the smallest biases."""
    batch = make_batch([300, 77], dim=64, dtype=BF16, mask="causal", alpha=alpha)
    batch = batch.with_bias(make_bias(bias, batch, BF16))
    for name, tensor in batch.differentiable().items():
        if name not in "qkv":
            tensor.mul_(factor)
    batch.quantization = Quantization()
    assert_as_good_as_the_emulation(batch)
    batch.q.mul_(1e-3)
    assert_as_good_as_the_emulation(batch)


@pytest.mark.parametrize("dim", [64, 256])
def test_a_bias_that_hides_keys(hopper, dim):
    batch = make_batch([256, 77], dim=dim, dtype=BF16, mask="causal", bias="rab")
    batch.quantization = Quantization()
    batch.bias.rab[..., ::3] = -1e9
    assert_as_good_as_the_emulation(batch)


@pytest.mark.parametrize("bias", ["rab", "rab-fp32", "position-time"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_biases_of_e4m3_inputs(hopper, bias, dim):
    batch = e4m3_batch(dim=dim)
    batch = batch.with_bias(make_bias(bias, batch, BF16))
    given = descales((len(batch.cu_seqlens_q) - 1,))
    exact, emulated = exact_and_emulated(batch, given)
    found = on_gpu(batch, **{name: tensor.cuda() for name, tensor in given.items()})
    bound = 1.15 * relative_error(emulated, exact) + torch.finfo(BF16).eps
    assert relative_error(found, exact) <= bound


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nonfinite_biases_stay_in_their_row(hopper, bad):
    batch = make_batch([200, 136], dim=64, dtype=BF16, mask="causal", bias="rab")
    batch.quantization = Quantization()
    before = on_gpu(batch)
    batch.bias.rab[1, 0, 100, 50] = bad
    out = on_gpu(batch)
    row = out[300, 0].clone()
    out[300, 0] = before[300, 0]
    assert torch.equal(out, before)
    assert row.isnan().all() == math.isnan(bad)


@with_modes
@with_smooth_k
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("dim", [64, 256])
def test_zeros_give_zeros(hopper, mode, smooth_k, name, dim):
    batch = make_batch([300, 7], dim=dim, dtype=BF16)
    getattr(batch, name)[:300] = 0
    batch.quantization = Quantization(mode, smooth_k)
    out = on_gpu(batch)
    assert not out[:300].any()
    assert out[300:].abs().max() > 0


@with_modes
@with_smooth_k
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dim", [64, 256])
def test_nonfinite_values_stay_in_their_sequence(hopper, mode, smooth_k, bad, dim):
    batch = make_batch([130, 200, 40], dim=dim, dtype=BF16)
    for tensor in (batch.q, batch.k, batch.v):
        tensor[130:330] *= 0.5  # so that no scale of the others depends on these
    batch.quantization = Quantization(mode, smooth_k)
    before = on_gpu(batch)
    for name in ("q", "k", "v"):
        changed = {n: t.clone() for n, t in batch.differentiable().items()}
        changed[name][133, 1, 5] = bad
        out = on_gpu(batch.with_tensors(changed))
        assert torch.equal(out[:130], before[:130])
        assert torch.equal(out[330:], before[330:])
        rows = out[133] if name == "q" else out[130:330]
        assert not rows[..., 1, :].isfinite().all(-1).any()


@pytest.mark.sanitize
@with_modes
def test_rows_of_no_sequence(hopper, mode):
    """Buffers may be larger than the batch; the contents of the rows after it have no effect."""
    batch = make_batch([300, 129], [300, 40], dim=64, dtype=BF16, mask="causal")
    batch.quantization = Quantization(mode, smooth_k=True)
    expected = on_gpu(batch)
    nan = torch.full((200, 2, 64), float("nan"), dtype=BF16)
    q, k, v = (torch.cat([x, nan]) for x in (batch.q, batch.k, batch.v))
    found = on_gpu(replace(batch, q=q, k=k, v=v))
    assert torch.equal(found[:340], expected)
    assert not found[340:].any()


@pytest.mark.parametrize("dim", [64, 72, 256, pytest.param(128, marks=pytest.mark.sanitize)])
def test_e4m3_inputs(hopper, dim):
    """q and k are read in place where their rows begin at multiples of 16 bytes."""
    batch = e4m3_batch(dim=dim)
    packed = torch.stack([x.view(torch.uint8) for x in (batch.q, batch.k, batch.v)], 1)
    strided = replace(batch, **dict(zip("qkv", packed.view(E4M3).unbind(1), strict=True)))
    for q_shape in shapes_of_descales("q_descale"):
        for shape in shapes_of_descales("k_descale"):
            given = descales(shape) | {"q_descale": descales(q_shape)["q_descale"]}
            exact, emulated = exact_and_emulated(batch, given)
            there = {name: tensor.cuda() for name, tensor in given.items()}
            found = on_gpu(batch, **there)
            assert found.dtype == BF16
            assert relative_error(found, exact) <= 1.15 * relative_error(emulated.to(BF16), exact)
            assert torch.equal(on_gpu(strided, **there), found)
    out = on_gpu(batch, out_dtype=torch.float16, **there)
    assert out.dtype == torch.float16
    assert relative_error(out, exact) <= 1.15 * relative_error(emulated.half(), exact)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_short_sequences_without_a_list(hopper, dim):
    """There are several times as many work tiles as blocks."""
    lengths = [0, *make_lengths(300, 120), 0]
    batch = make_batch(lengths, dim=dim, dtype=BF16, mask="context-target")
    batch.quantization = Quantization(2)
    assert_as_good_as_the_emulation(batch)


def test_strided_inputs(hopper):
    batch = make_batch([300, 129], dim=64, dtype=BF16, mask="causal")
    batch.quantization = Quantization(2, smooth_k=True)
    expected = on_gpu(batch)
    qkv = torch.stack([batch.q, batch.k, batch.v], 1)
    packed = replace(batch, **dict(zip("qkv", qkv.unbind(1), strict=True)))
    assert torch.equal(on_gpu(packed), expected)
    odd = replace(batch, q=F.pad(batch.q, (1, 0))[..., 1:])
    assert torch.equal(on_gpu(odd), expected)
    assert torch.equal(on_gpu(batch, sm_margin=16), expected)


def test_gradients_are_those_of_the_inputs(hopper):
    batch = make_batch([300, 133], dim=64, dtype=BF16, device="cuda", mask="causal")
    dout = torch.randn(433, 2, 64, device="cuda").to(BF16)
    expected = run(hstu_attention, batch, dout, deterministic=True)
    batch.quantization = Quantization(2, smooth_k=True)
    found = run(hstu_attention, batch, dout, deterministic=True)
    assert not torch.equal(found.pop("out"), expected.pop("out"))
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


@with_modes
@with_smooth_k
@pytest.mark.parametrize("bias", [None, "rab", "position-time"])
def test_gradients_of_kept_codes(hopper, mode, smooth_k, bias):
    for dim, dtype in ((64, BF16), (40, torch.float16), (128, BF16)):
        batch = make_batch([300, 0, 133], [300, 0, 70], dim=dim, dtype=dtype, mask="causal")
        batch.k.add_(0.3)
        batch = to_device(batch, "cuda")
        if bias is not None:
            batch = batch.with_bias(make_bias(bias, batch, dtype))
        dout = torch.randn(370, 2, dim, device="cuda").to(dtype)
        batch.quantization = Quantization(mode, smooth_k)
        of_inputs = run(hstu_attention, batch, dout)
        batch.quantization = Quantization(mode, smooth_k, keep="e4m3")
        assert_gradients_of_kept_codes(batch, dout, of_inputs)


def test_memory_of_kept_codes(hopper):
    batch = make_batch([8192], dim=128, heads=4, device="cuda", dtype=BF16, mask="causal")
    for tensor in (batch.q, batch.k, batch.v):
        tensor.requires_grad_()
    batch.quantization = Quantization(keep="e4m3")
    before = torch.cuda.memory_allocated()
    out = hstu_attention(batch.q, batch.k, batch.v, **batch.options())
    kept = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
    assert kept <= 3 * 8192 * 4 * 128 * 1.1


@contextmanager
def forbidden_syncs() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@with_modes
def test_calls_do_not_wait(hopper, mode):
    batch = make_batch([300, 0, 70], dim=64, device="cuda", dtype=BF16, mask="context-target")
    dout = torch.randn(370, 2, 64, device="cuda").to(BF16)
    for bias, keep in itertools.product((None, "rab", "position-time"), ("inputs", "e4m3")):
        batch.quantization = Quantization(mode, smooth_k=True, keep=keep)
        own = batch if bias is None else batch.with_bias(make_bias(bias, batch, BF16))
        run(hstu_attention, own, dout)  # loads the kernels
        with forbidden_syncs():
            torch.cuda._sleep(10**9)
            run(hstu_attention, own, dout)
            assert not torch.cuda.current_stream().query(), "the call waited for the GPU"


@pytest.mark.parametrize("mode", [2, 5])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_graph_serves_other_lengths(hopper, mode, dim):
    capture_lengths = [600, 200, 0, 400]
    batch = make_batch(capture_lengths, dim=dim, device="cuda", dtype=BF16, mask="target")
    batch.cu_seqlens_q = batch.cu_seqlens_k  # the same tensor
    batch.scaling_seqlen = 600
    batch.quantization = Quantization(mode, smooth_k=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(hstu_attention, batch)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(hstu_attention, batch)["out"]
    for lengths, targets in (
        (capture_lengths, [100, 7, 0, 400]),
        ([1, 599, 0, 600], [0, 300, 0, 5]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([64, 65, 63, 128], [64, 1, 0, 128]),
    ):
        batch.cu_seqlens_k.copy_(offsets(lengths))
        batch.mask.num_targets.copy_(torch.tensor(targets))
        for tensor in (batch.q, batch.k, batch.v):
            tensor.uniform_(-1, 1)
        captured.fill_(float("nan"))
        graph.replay()
        assert torch.equal(captured, run(hstu_attention, batch)["out"])


def test_opcheck(hopper):
    batch = make_batch([9, 0, 70], dim=64, device="cuda", dtype=BF16, mask="causal")
    arguments = raw_ops.arguments(batch, paged=True) | {"quant_mode": 2, "smooth_k": True}
    torch.library.opcheck(torch.ops.hstu_attn.hstu_varlen_fwd.default, (), arguments)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"keep": "e4m3"}, {"backward": "e4m3"}], ids=str)
def test_compile(hopper, options):
    batch = make_batch([300, 33], dim=128, device="cuda", dtype=BF16, mask="causal")
    batch.quantization = Quantization(2, smooth_k=True, **options)
    dout = torch.randn(333, 2, 128, device="cuda").to(BF16)
    expected = run(hstu_attention, batch, dout, deterministic=True)
    compiled = torch.compile(hstu_attention, fullgraph=True)
    found = run(compiled, batch, dout, deterministic=True)
    for name, value in expected.items():
        if options.get("keep") and name != "out":  # a multiply-add may be rounded once or twice
            assert relative_error(found[name], value.double()) <= 2e-3, name
        else:
            assert torch.equal(found[name], value), name


def test_errors(hopper, monkeypatch):
    batch = make_batch([70, 30], dim=64, device="cuda", dtype=BF16, mask="causal")
    batch.quantization = Quantization()
    wide = replace(batch, q=batch.q.float(), k=batch.k.float(), v=batch.v.float())
    with pytest.raises(ValueError, match="q: expected bfloat16 or float16 with quant_mode"):
        run(hstu_attention, wide)
    monkeypatch.setenv("HSTU_ATTN_CHECK", "1")
    batch.seqused_k = torch.tensor([71, 30], device="cuda")
    with pytest.raises(ValueError, match=r"seqused_k: expected .*, got "):
        run(hstu_attention, batch)


def test_kernels_of_sm80(monkeypatch):
    monkeypatch.setenv("HSTU_ATTN_FORCE_ARCH", "80")
    batch = make_batch([70, 30], dim=64, device="cuda", dtype=BF16)
    batch.quantization = Quantization()
    with pytest.raises(NotImplementedError, match="quant_mode, or float8_e4m3fn: there is no FP8"):
        run(hstu_attention, batch)
    e4m3 = e4m3_batch("cuda")
    with pytest.raises(NotImplementedError, match="quant_mode, or float8_e4m3fn: there is no FP8"):
        run(hstu_attention, e4m3, **descales((), "cuda"))
