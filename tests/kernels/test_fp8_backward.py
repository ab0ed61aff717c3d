"""Tests of `Quantization(backward="e4m3")`: on a CPU by torch's functions, on a GPU by a kernel."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hstu_attn import DenseBias, Mask, Quantization, hstu_attention, ops, reference
from hstu_attn.call import NO_BIAS, make_call
from hstu_attn.quantization import E4M3
from hstu_attn.testing import MASK_NAMES, Batch, make_batch, poisoned_memory, run
from tests.helpers.fp8 import BF16, accuracy_batch, relative_error, to_device

E4M3_BACKWARD = Quantization(backward="e4m3")
NAMES = ("q", "k", "v")
ALPHA = 128**-0.5


def batch_of(kind: str, dim: int = 128, lengths: tuple[int, ...] = (300, 77, 0, 1)) -> Batch:
    return accuracy_batch(kind, dim, list(lengths), alpha=dim**-0.5, quantization=E4M3_BACKWARD)


def dout_of(batch: Batch, size: float = 1.0) -> Tensor:
    return torch.randn(batch.q.shape[0], batch.q.shape[1], batch.v.shape[2]).mul(size).to(BF16)


def gradients(batch: Batch, dout: Tensor, **options: Any) -> dict[str, Tensor]:
    found = run(hstu_attention, batch, dout.to(batch.q.dtype), **options)
    return {name: found[f"d{name}"] for name in NAMES}


def exact_gradients(batch: Batch, dout: Tensor) -> dict[str, Tensor]:
    plain = replace(batch, quantization=None)
    found = run(reference.hstu_attention, plain, dout, torch.float64)
    return {name: found[f"d{name}"] for name in NAMES}


def errors(batch: Batch, dout: Tensor) -> list[float]:
    exact, found = exact_gradients(batch, dout), gradients(batch, dout)
    return [relative_error(found[name].cpu(), exact[name]) for name in NAMES]


# ---------------------------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, 1e-6, 1e4])
def test_errors_of_normal_inputs(size):
    """FBGEMM's form has errors up to 6 %, and loses small gradients in its mode without scales."""
    batch = batch_of("normal")
    assert max(errors(batch, dout_of(batch, size))) <= 6e-2


@pytest.mark.parametrize("dim", [32, 128])
def test_errors_of_silu_inputs(dim):
    batch = batch_of("silu", dim)
    dq, dk, dv = errors(batch, dout_of(batch))
    assert dq <= 4.5e-2
    assert max(dk, dv) <= 6e-2


def rounded(x: Tensor, row_scales: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns the codes of a matrix, whose rows are multiplied, and the scale of the matrix.

    As in `quantize_qkv`, the reciprocal is rounded, on which the rounding of many ties depends.
    """
    scale = x.abs().max().float() / 448
    return (x.float() * (1 / scale) * row_scales).to(E4M3).double(), scale.double()


def dout_of_many_sizes(batch: Batch) -> Tensor:
    sizes = 10.0 ** -torch.arange(batch.q.shape[0]).remainder(5)
    return (dout_of(batch) * sizes[:, None, None]).to(batch.q.dtype)


def test_the_emulation_is_the_formula():
    """Computes the gradients of one sequence and head from codes, with explicit scales."""
    batch = batch_of("normal", lengths=(200,))
    dout = dout_of_many_sizes(batch)
    (q, sq), (k, sk), (v, sv), (do, so) = (
        rounded(x[:, 0]) for x in (batch.q, batch.k, batch.v, dout)
    )
    largest = dout[:, 0].abs().amax(1).double()
    row_scale = 2.0 ** torch.ceil(torch.log2(largest / largest.max()))[:, None]
    of_rows, _ = rounded(dout[:, 0], 1 / row_scale)
    scaled_q, _ = rounded(batch.q[:, 0], row_scale)
    x = ALPHA * sq * sk * (q @ k.T)
    sigmoid, visible = torch.sigmoid(x), torch.ones(200, 200).tril().bool()
    weight = 2.0 ** torch.floor(torch.log2(448 / (ALPHA * sq * sk * 128 * 448**2)))
    p = (weight * x * sigmoid).float().to(E4M3).double() * visible
    derivative = sigmoid * (1 + x * (1 - sigmoid))
    ds = (derivative * (of_rows @ v.T) / 2**16).float().to(E4M3).double() * visible
    factor = ALPHA * so * sv * 2**16 / 200
    expected = {
        "q": factor * sk * row_scale * (ds @ k),
        "k": factor * sq * ds.T @ scaled_q,
        "v": so / weight / 200 * p.T @ do,
    }
    found = gradients(batch, dout)
    for name, gradient in expected.items():
        assert relative_error(found[name][:, 0], gradient) <= 4e-3, name  # gradients are in bf16


def test_small_gradients_beside_large_ones():
    """Rows of dout have sizes from 1 to 1e-4, and the errors of their dQ are as large."""
    batch = batch_of("normal")
    dout = dout_of_many_sizes(batch)
    assert max(errors(batch, dout)) <= 6.5e-2
    assert_no_row_is_worse(gradients(batch, dout)["q"], exact_gradients(batch, dout)["q"])


def assert_no_row_is_worse(dq: Tensor, exact: Tensor) -> None:
    for size in range(5):
        assert relative_error(dq[size::5], exact[size::5]) <= 6.5e-2


@pytest.mark.parametrize("mask", MASK_NAMES)
def test_masks(mask):
    batch = make_batch([150, 0, 77, 1], [150, 0, 60, 1], dim=32, dtype=BF16, mask=mask, heads=2)
    batch = replace(batch, alpha=0.2, quantization=E4M3_BACKWARD)
    assert max(errors(batch, dout_of(batch))) <= 8e-2  # larger, since sums are fewer and smaller


def test_a_scale_for_all_rows():
    batch = replace(batch_of("normal"), attn_scale=torch.tensor(0.3))
    assert max(errors(batch, dout_of(batch))) <= 6e-2
    found = gradients(replace(batch, attn_scale=torch.tensor(0.0)), dout_of(batch))
    assert all((gradient == 0).all() for gradient in found.values())


@pytest.mark.parametrize("size", [1.0, 1e-3, 0.0])
def test_biases_on_a_cpu(size):
    """Weights do not overflow where the bias is much larger than the scores."""
    batch = batch_of("normal", 32)
    batch.q.mul_(size)
    rab = torch.randn(4, 1, 300, 300).to(BF16)
    dq, dk, dv = errors(replace(batch, bias=DenseBias(rab)), dout_of(batch))
    assert max(dq, dv) <= 7e-2
    assert dk <= 7e-2 or size == 0


def test_zeros():
    batch = batch_of("normal", 32)
    for name in NAMES:
        zeros = replace(batch, **{name: torch.zeros_like(getattr(batch, name))})
        found = gradients(zeros, dout_of(batch))
        assert all(gradient.isfinite().all() for gradient in found.values())
    found = gradients(batch, torch.zeros_like(dout_of(batch)))
    assert all((gradient == 0).all() for gradient in found.values())


def test_huge_queries_of_rows_without_gradients():
    batch = batch_of("normal", 32)
    dout = dout_of(batch)
    dout[::3] = 0
    batch.q[::3] *= 1e30
    assert all(gradient.isfinite().all() for gradient in gradients(batch, dout).values())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [*NAMES, "dout"])
def test_nonfinite_values_stay_in_their_sequence(name, bad):
    assert_nonfinite_values_stay(batch_of("normal", 32), name, bad)


def assert_nonfinite_values_stay(batch: Batch, name: str, bad: float) -> None:
    dout = dout_of(batch).to(batch.q.device)
    clean = gradients(batch, dout, deterministic=True)
    tensor = dout if name == "dout" else getattr(batch, name)
    tensor[310, 0, 3] = bad  # of the second sequence
    found = gradients(batch, dout, deterministic=True)
    for each, gradient in found.items():
        assert torch.equal(gradient[:300], clean[each][:300])
        assert torch.equal(gradient[377:], clean[each][377:])
    assert any(not gradient[300:377].isfinite().all() for gradient in found.values())


def test_kept_codes():
    """With both options the dequantized 16-bit values are quantized once more."""
    batch = replace(batch_of("normal"), quantization=Quantization(keep="e4m3", backward="e4m3"))
    assert max(errors(batch, dout_of(batch))) <= 8e-2


# ---------------------------------------------------------------------------------------------
# Bad input
# ---------------------------------------------------------------------------------------------


def test_an_unknown_backward():
    with pytest.raises(ValueError, match="backward: expected '16-bit' or 'e4m3', got 'fp8'"):
        Quantization(backward="fp8")


def test_lengths_that_kernels_clamp_are_refused():
    offsets = torch.tensor([0, 3])
    with pytest.raises(NotImplementedError, match="quantization: lengths that kernels clamp do"):
        make_call(offsets, 3, strict=False, quantization=E4M3_BACKWARD)


def test_a_scale_for_each_row_is_refused():
    batch = batch_of("normal", 32)
    batch = replace(batch, attn_scale=torch.rand(batch.q.shape[0]))
    with pytest.raises(NotImplementedError, match="attn_scale: there is no backward_e4m3"):
        gradients(batch, dout_of(batch))


def test_wide_inputs_are_refused():
    batch = batch_of("normal", 32)
    q, k, v = (getattr(batch, name).float() for name in NAMES)
    with pytest.raises(ValueError, match="q: expected bfloat16 or float16 with"):
        hstu_attention(
            q,
            k,
            v,
            cu_seqlens_q=batch.cu_seqlens_q,
            max_seqlen_q=300,
            mask=Mask.causal(),
            quantization=E4M3_BACKWARD,
        )


# ---------------------------------------------------------------------------------------------
# On a GPU
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def hopper() -> None:
    if os.environ["HSTU_ATTN_FORCE_ARCH"] != "90":
        pytest.skip("only sm90 has a backward in e4m3")


def on_gpu(batch: Batch, dout: Tensor, **extra: Any) -> dict[str, Tensor]:
    with poisoned_memory("cuda"):
        found = run(hstu_attention, to_device(batch, "cuda"), dout.cuda(), **extra)
    return {name: found[f"d{name}"].cpu() for name in NAMES}


def assert_equal_to_the_emulation(batch: Batch, dout: Tensor | None = None) -> None:
    """The kernel rounds a few elements of P and dS to another code, and sums of dQ to bf16."""
    dout = dout_of(batch).to(batch.q.dtype) if dout is None else dout
    expected, found = gradients(batch, dout), on_gpu(batch, dout)
    for name in NAMES:
        assert found[name].isfinite().all(), name
        limit = 2.5e-2 if name == "q" else 1.5e-2
        assert relative_error(found[name], expected[name].double()) <= limit, name


with_kernels = pytest.mark.parametrize("dim", [128, 256])  # one kernel each


@pytest.mark.gpu
@with_kernels
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(m, marks=pytest.mark.sanitize if m == "context-target" else ())
        for m in MASK_NAMES
    ],
)
def test_masks_on_a_gpu(hopper, mask, dtype, dim):
    batch = make_batch(
        [270, 0, 500, 1, 128], [270, 0, 60, 1, 127], dim=dim, dtype=dtype, mask=mask, heads=3
    )
    batch = replace(batch, alpha=0.1, quantization=E4M3_BACKWARD)
    assert_equal_to_the_emulation(batch)
    batch.seqused_q = torch.tensor([250, 0, 60, 1, 3])
    batch.seqused_k = torch.tensor([260, 0, 400, 1, 100])
    assert_equal_to_the_emulation(replace(batch, mask=Mask.causal()))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dim", "dim_v"),
    [(72, 72), (96, 96), (40, 128), (104, 8), (128, 80), (136, 136), (192, 256), (256, 40)],
)
def test_head_dims_on_a_gpu(hopper, dim, dim_v):
    batch = make_batch([300, 129, 5], dim=dim, dim_v=dim_v, dtype=BF16, mask="causal", heads=2)
    assert_equal_to_the_emulation(replace(batch, alpha=0.1, quantization=E4M3_BACKWARD))


@pytest.mark.gpu
@with_kernels
@pytest.mark.parametrize("kind", ["normal", "silu", "outliers"])
def test_long_sums_on_a_gpu(hopper, kind, dim):
    """8-bit products truncate their accumulators, which terms of both signs would hide."""
    batch = batch_of(kind, dim, lengths=(4096, 1000))
    dout = dout_of(batch)
    assert_equal_to_the_emulation(batch, dout)
    if kind != "outliers":
        exact, found = exact_gradients(batch, dout), on_gpu(batch, dout)
        assert max(relative_error(found[name], exact[name]) for name in NAMES) <= 6e-2


@pytest.mark.gpu
@with_kernels
def test_sums_of_one_sign_on_a_gpu(hopper, dim):
    """Without promotion, dV of 8,192 rows would be a tenth too small."""
    batch = batch_of("silu", dim, lengths=(8192,))
    dout = dout_of(batch).abs()
    in_16_bits = on_gpu(replace(batch, quantization=None), dout)
    found = on_gpu(batch, dout)
    for name in NAMES:
        wanted = in_16_bits[name].double()
        size = (found[name].double() * wanted).sum() / wanted.square().sum()
        assert abs(size - 1) < 0.04, (name, size)


@pytest.mark.gpu
@with_kernels
@pytest.mark.parametrize("size", [1e-6, 1e3])
def test_sizes_of_gradients_on_a_gpu(hopper, size, dim):
    batch = batch_of("normal", dim)
    assert_equal_to_the_emulation(batch, dout_of(batch, size))
    assert_equal_to_the_emulation(replace(batch, attn_scale=torch.tensor(0.3)))


@pytest.mark.gpu
@pytest.mark.sanitize
@with_kernels
def test_small_gradients_beside_large_ones_on_a_gpu(hopper, dim):
    batch = batch_of("normal", dim)
    dout = dout_of_many_sizes(batch)
    assert_equal_to_the_emulation(batch, dout)
    assert_no_row_is_worse(on_gpu(batch, dout)["q"], exact_gradients(batch, dout)["q"])


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [*NAMES, "dout"])
def test_nonfinite_values_stay_in_their_sequence_on_a_gpu(hopper, name, bad):
    assert_nonfinite_values_stay(to_device(batch_of("normal"), "cuda"), name, bad)


@pytest.mark.gpu
@with_kernels
def test_zeros_on_a_gpu(hopper, dim):
    batch = batch_of("normal", dim)
    for name in NAMES:
        zeros = replace(batch, **{name: torch.zeros_like(getattr(batch, name))})
        assert all(x.isfinite().all() for x in on_gpu(zeros, dout_of(batch)).values())
    found = on_gpu(batch, torch.zeros_like(dout_of(batch)))
    assert all((gradient == 0).all() for gradient in found.values())


@pytest.mark.gpu
@pytest.mark.sanitize
@with_kernels
def test_it_is_deterministic_on_request(hopper, dim):
    batch = batch_of("normal", dim, lengths=(900, 77, 1))
    dout = dout_of(batch)
    first, second = (on_gpu(batch, dout, deterministic=True) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in NAMES)
    assert_equal_to_the_emulation(batch, dout)


@pytest.mark.gpu
def test_sequences_without_rows(hopper):
    batch = make_batch([200, 150, 50], [200, 0, 0], dim=128, dtype=BF16, mask="causal", heads=2)
    assert_equal_to_the_emulation(replace(batch, alpha=0.1, quantization=E4M3_BACKWARD))


@pytest.mark.gpu
def test_a_cuda_graph(hopper):
    batch = to_device(batch_of("normal"), "cuda")
    dout = dout_of(batch).cuda()
    inputs = [getattr(batch, name).requires_grad_() for name in NAMES]
    call = {
        "cu_seqlens_q": batch.cu_seqlens_q,
        "max_seqlen_q": batch.max_seqlen_q,
        "mask": batch.mask,
        "quantization": batch.quantization,
        "deterministic": True,
    }

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(hstu_attention(*inputs, **call), inputs, dout)

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for gradient in found:
        gradient.fill_(1)
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dim", "bias", "message"),
    [
        (64, False, "but for head dims from 65 on; got head_dim 64 and head_dim_v 64"),
        (128, True, "with a bias"),
    ],
)
def test_what_the_kernel_lacks(hopper, dim, bias, message):
    batch = batch_of("normal", dim)
    if bias:
        batch = replace(batch, bias=DenseBias(torch.zeros(4, 1, 300, 300, dtype=BF16)))
    with pytest.raises(NotImplementedError, match=f"backward_e4m3: there is no .*{message}"):
        on_gpu(batch, dout_of(batch))


@pytest.mark.gpu
def test_other_gpus_have_no_such_backward():
    if os.environ["HSTU_ATTN_FORCE_ARCH"] == "90":
        pytest.skip("sm90 has one")
    batch = batch_of("normal")
    with pytest.raises(NotImplementedError, match="on Hopper GPUs"):
        on_gpu(batch, dout_of(batch))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [96, 256, pytest.param(128, marks=pytest.mark.sanitize)])
def test_the_backward_of_silu(hopper, dim):
    """SiLU in the quantization gives the gradients of SiLU in 16 bits, and not of dout."""
    lengths, heads = (300, 0, 700), 2
    total = sum(lengths)
    z = [torch.randn(total, heads, dim, dtype=BF16, device="cuda") for _ in range(3)]
    dout = torch.randn(total, heads, dim, dtype=BF16, device="cuda")
    offsets = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    call = make_call(offsets, max(lengths), alpha=dim**-0.5, scaling_seqlen=max(lengths))
    call = call._replace(window_right=0, backward_e4m3=True)
    found, wanted = ([torch.empty_like(x) for x in z] for _ in range(2))
    with poisoned_memory("cuda"):
        ops.attention_backward_of_silu(dout, z, call, NO_BIAS, found)
    activated = [F.silu(x.float()).to(BF16) for x in z]
    ops.attention_backward(dout, activated, call, NO_BIAS, wanted, (False, False, False))
    for gradient, other in zip(found, wanted, strict=True):
        # A few elements of silu(z) are rounded to another bf16 number, and then to another code.
        assert relative_error(gradient, other.double()) < 1e-2
    plain = call._replace(backward_e4m3=False)
    with pytest.raises((ValueError, RuntimeError), match="backward_e4m3: expected true, got false"):
        ops.attention_backward_of_silu(dout, z, plain, NO_BIAS, found)
