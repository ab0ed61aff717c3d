"""Tests of quantize_qkv: codes, descales and norms, on a CPU and on a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hstu_attn.quantization import BLOCK, Quantized, dequantize
from hstu_attn.testing import Batch, make_batch
from tests.helpers import raw_ops
from tests.helpers.fp8 import relative_error

MODES = range(6)
LENGTHS = [0, 1, 127, 128, 129, 1000, 0]
E4M3 = torch.float8_e4m3fn

with_modes = pytest.mark.parametrize("mode", MODES)
with_smooth_k = pytest.mark.parametrize("smooth_k", [False, True], ids=["plain", "smooth"])
with_dtypes = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"]
)


def batch_of(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Batch:
    return make_batch(LENGTHS, dtype=dtype, **{"dim": 64, **options})


def quantized(batch: Batch, mode: int, smooth_k: bool = False, *descales: Tensor) -> Quantized:
    offsets = (batch.cu_seqlens_q, batch.cu_seqlens_k, batch.seqused_q, batch.seqused_k)
    op = torch.ops.hstu_attn.quantize_qkv
    return Quantized(*op(batch.q, batch.k, batch.v, *offsets, mode, smooth_k, *descales))


def values(batch: Batch, x: Quantized) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the dequantized values of `x`, in fp64: q, k, v and the products with k's mean."""
    offsets = (batch.cu_seqlens_q, batch.cu_seqlens_k, batch.seqused_q, batch.seqused_k)
    q, k, v, _ = dequantize(x, *offsets, batch.q.shape[2], torch.float64)
    return q[..., :-1], k[..., :-1], v, q[..., -1]


def blocks_of(batch: Batch) -> list[tuple[int, int, int]]:
    """Returns the number, the first key and the end of each block."""
    offsets = batch.cu_seqlens_k.tolist()
    result = []
    for b, (begin, end) in enumerate(itertools.pairwise(offsets)):
        if batch.seqused_k is not None:
            end = begin + int(batch.seqused_k[b])
        for j, first in enumerate(range(begin, end, BLOCK)):
            result.append((begin // BLOCK + b + j, first, min(first + BLOCK, end)))
    return result


# ---------------------------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------------------------


@with_modes
@with_dtypes
def test_rounding(mode, dtype):
    """A value is within half a step of e4m3: 1/16 of it, or half the least step of its scale."""
    batch = batch_of(dtype, dim=40, dim_v=72)
    batch.q[3] *= 1e-3
    x = quantized(batch, mode)
    assert x.q8.shape[2] == x.k8.shape[2] == 48
    assert not x.q8[..., 40:].float().any()
    steps = (x.q_descale.max(), x.k_descale.max(), x.v_descale.max())
    found = values(batch, x)
    for value, tensor, step in zip(found, (batch.q, batch.k, batch.v), steps, strict=False):
        error = (value - tensor.double()).abs()
        assert (error <= tensor.double().abs() / 15.9 + step * 2.0**-10).all()


def limited_descale(rows: Tensor) -> Tensor:
    """Returns the least descale 2^n * amax / 448, n >= 1, with which rows have norms <= 225.

    Squares are rounded up to integers where the largest element is 224.
    """
    descale = rows.float().abs().amax() / 224
    squares = (rows.float() * descale.reciprocal()).double().square().ceil().sum(-1).max()
    while squares > 225**2:
        descale, squares = descale * 2, squares / 4
    return descale


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@with_modes
@with_smooth_k
@with_dtypes
def test_silu(mode, smooth_k, dtype, device):
    """SiLU in the kernel is at least as accurate as SiLU that was rounded to 16 bits before."""
    batch = batch_of(dtype, heads=3)
    batch.q[300, 1] *= 40
    batch.k[310, 0] *= -40

    def run(silu: bool) -> Quantized:
        inputs = [x.to(device) if isinstance(x, Tensor) else x for x in arguments(batch)]
        op = torch.ops.hstu_attn.quantize_qkv
        return Quantized(*(x.cpu() for x in op(*inputs, mode, smooth_k, silu=silu)))

    fused = run(True)
    exact = [F.silu(x.double()) for x in (batch.q, batch.k, batch.v)]
    batch.q, batch.k, batch.v = (F.silu(x) for x in (batch.q, batch.k, batch.v))
    apart = run(False)
    if device == "cpu":
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(fused, apart, strict=True))
    found, usual = (values(batch, x) for x in (fused, apart))
    for name, x, y, wanted in zip("qkv", found, usual, exact, strict=False):
        assert relative_error(x, y) < 0.02
        if name != "k" or not smooth_k:
            assert relative_error(x, wanted) < 1.01 * relative_error(y, wanted)


def test_granularity():
    """Each mode has the descales of its definition: the largest magnitudes divided by 448.

    In modes 1 and 2, the descales of q and k are larger, as the norms of rows require.
    """
    batch = batch_of(heads=3)
    offsets = batch.cu_seqlens_q.tolist()
    pairs = [(b, e) for b, e in itertools.pairwise(offsets) if e > b]

    def descale(part: Tensor) -> Tensor:
        return part.float().abs().amax() / 448

    for mode in MODES:
        x = quantized(batch, mode)
        for begin, end in pairs:
            for head in range(3):
                for row in {begin, begin + 40, end - 1} & set(range(begin, end)):
                    first = row - (row - begin) % BLOCK
                    expected = {
                        0: torch.ones(()),
                        1: limited_descale(batch.q[row, head]),
                        2: limited_descale(batch.q[first : min(first + BLOCK, end), head]),
                        3: descale(batch.q[begin:end, head]),
                        4: descale(batch.q[begin:end]),
                        5: descale(batch.q),
                    }
                    assert x.q_descale[head, row] == expected[mode]
        owned = {0: lambda *_: torch.ones(()), 5: lambda t, *_: descale(t)}
        for number, first, end in blocks_of(batch):
            begin, stop = next(pair for pair in pairs if pair[0] <= first < pair[1])
            for tensor, found in ((batch.k, x.k_descale), (batch.v, x.v_descale)):
                of_block = limited_descale if tensor is batch.k else descale
                for head in range(3):
                    expected = {
                        1: of_block(tensor[first:end, head]),
                        2: of_block(tensor[first:end, head]),
                        3: descale(tensor[begin:stop, head]),
                        4: descale(tensor[begin:stop]),
                    }
                    want = expected[mode] if mode in expected else owned[mode](tensor)
                    assert found[head, number] == want


@with_modes
@with_smooth_k
def test_norms_are_bounds(mode, smooth_k):
    batch = batch_of()
    x = quantized(batch, mode, smooth_k)
    q, k, _, _ = values(batch, x)
    # Modes 1 and 2 have the norms before the elements are rounded, and a bound of the rounding.
    margin = 0.13 if mode in (1, 2) else 1e-3
    exact = q.norm(dim=-1).t()
    assert (x.q_norm >= exact).all()
    assert (x.q_norm <= exact * (1 + margin)).all()
    for number, first, end in blocks_of(batch):
        exact = k[first:end].norm(dim=-1).amax(0)
        assert (x.k_norm[:, number] >= exact).all()
        assert (x.k_norm[:, number] <= exact * (1 + margin)).all()


def batch_of_many_norms(dim: int) -> Batch:
    """Returns blocks of rows whose norms are 1 to sqrt(dim) times their largest element."""
    batch = make_batch([7 * BLOCK], dim=dim, dtype=torch.bfloat16)
    for tensor in (batch.q, batch.k):
        zeros, ones, single, normal, silu, decaying, mixed = tensor.split(BLOCK)
        zeros.zero_()
        ones.fill_(-0.3)
        single.zero_()[..., dim // 2] = 5
        normal.normal_()
        silu.copy_(torch.nn.functional.silu(torch.randn(silu.shape)))
        decaying.copy_(torch.exp2(-24 * torch.rand(decaying.shape)))
        mixed.normal_().mul_(torch.exp2(-9 * torch.rand(BLOCK, 1, 1)))
        mixed[5, 1, 3], mixed[6, 0, 0] = float("nan"), float("inf")
    return batch


@pytest.mark.parametrize("mode", [1, 2])
@with_smooth_k
@pytest.mark.parametrize("dim", [8, 64, 128, 256])
def test_norms_of_codes(mode, smooth_k, dim):
    """Rows have norms of at most 240, so that fp16 holds their products.

    Before their rounding, those are above 225 / 2, unless the largest code is 224 already.
    """
    x = quantized(batch_of_many_norms(dim), mode, smooth_k)
    for name, codes in (("q", x.q8), ("k", x.k8)):
        codes = codes.float().nan_to_num(0)
        norms, largest = codes.norm(dim=-1), codes.abs().amax(-1)
        assert norms.max() <= 240
        if name == "k" or mode == 2:
            norms, largest = (part.unflatten(0, (-1, BLOCK)).amax(1) for part in (norms, largest))
        exponents = (448 / largest[largest > 0]).log2()
        assert torch.equal(exponents, exponents.round())
        assert exponents.min() >= 1
        # Squares are rounded up to integers, codes by up to 1 / 17, and small ones by 2^-10.
        assert ((norms > 105) | (largest == 224) | (largest == 0)).all()


def test_order_of_values():
    """v8 has values in the order of the accumulator's registers, and zeros past the end."""
    batch = batch_of(dim_v=24)
    x = quantized(batch, 0)
    codes = batch.v.to(E4M3).float()
    for number, first, end in blocks_of(batch):
        keys = torch.zeros(BLOCK, 2, 24)
        keys[: end - first] = codes[first:end]
        for group in range(0, BLOCK, 32):
            for t in range(4):
                for base, key in ((4 * t, 2 * t), (4 * t + 2, 8 + 2 * t)):
                    for half in (0, 16):
                        at, of = group + half + base, group + half + key
                        found = x.v8[number, :, :, at : at + 2].float()
                        assert torch.equal(found, keys[of : of + 2].permute(1, 2, 0))


@with_modes
def test_smooth_k(mode):
    """The mean is subtracted from K, and the product of q and the mean is added to the scores."""
    batch = batch_of()
    batch.k.add_(3)
    batch.k[:, :, ::2] *= -1
    x = quantized(batch, mode, True)
    _q, k, _, product = values(batch, x)
    offsets = batch.cu_seqlens_k.tolist()
    for b, (begin, end) in enumerate(itertools.pairwise(offsets)):
        if begin == end:
            continue
        keys = batch.k[begin:end].double()
        mean = keys.mean(0)
        torch.testing.assert_close(x.k_mean[b].double(), mean, rtol=1e-5, atol=1e-5)
        error = (k[begin:end] - (keys - mean)).abs()
        assert (error <= (keys - mean).abs() / 15.9 + 2 / 448).all()
        exact = (batch.q[begin:end].double() * mean).sum(-1)
        torch.testing.assert_close(product[begin:end], exact, rtol=1e-5, atol=1e-5)
    assert quantized(batch, mode).q_mean_product.numel() == 0
    assert quantized(batch, mode).k_mean.numel() == 0


@with_modes
@with_smooth_k
def test_zeros_and_small_numbers(mode, smooth_k):
    batch = batch_of()
    for tensor in (batch.q, batch.k, batch.v):
        tensor.zero_()
    x = quantized(batch, mode, smooth_k)
    for name, tensor in x._asdict().items():
        assert tensor.float().isfinite().all(), name
    for scales in (x.q_descale, x.k_descale, x.v_descale):
        assert (scales[:, [number for number, *_ in blocks_of(batch)][:1]] > 0).all()
    assert not any(value.any() for value in values(batch, x))
    for tensor in (batch.q, batch.k, batch.v):
        tensor.fill_(2.0**-70)
    assert all(value.isfinite().all() for value in values(batch, quantized(batch, mode, smooth_k)))


@with_modes
@with_smooth_k
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_values_stay_in_their_sequence(mode, smooth_k, bad):
    batch = batch_of()
    begin, end = batch.cu_seqlens_k[4:6].tolist()
    for tensor in (batch.q, batch.k, batch.v):
        tensor[begin:end] *= 0.5  # so that no descale of others depends on them
    clean = quantized(batch, mode, smooth_k)
    for tensor in (batch.q, batch.k, batch.v):
        tensor[begin + 5, 1, 3] = bad
    x = quantized(batch, mode, smooth_k)
    for found, expected in zip(values(batch, x), values(batch, clean), strict=True):
        assert torch.equal(found[:begin], expected[:begin])
        assert torch.equal(found[end:], expected[end:])
    for value in values(batch, x)[:3]:
        assert value[begin + 5, 1, 3].isnan()
        assert value.isnan().sum() == 1
    assert x.q_norm.isfinite().all()
    assert x.k_norm.isfinite().all()


def test_large_numbers():
    """The cast of mode 0 saturates; a scale keeps the others exact to a step."""
    batch = batch_of()
    batch.q.fill_(-1000)
    q, *_ = values(batch, quantized(batch, 0))
    assert (q == -448).all()
    batch.q.fill_(3e38)
    for mode in MODES[1:]:
        q, *_ = values(batch, quantized(batch, mode))
        torch.testing.assert_close(q, batch.q.double(), rtol=1e-6, atol=0)


def test_rows_past_the_end_do_not_matter():
    batch = batch_of()
    used = torch.tensor([0, 1, 100, 128, 3, 999, 0], dtype=torch.int32)
    batch.seqused_q = batch.seqused_k = used
    before = quantized(batch, 2, True)
    for n, length in enumerate(used.tolist()):
        begin, end = batch.cu_seqlens_k[n : n + 2].tolist()
        for tensor in (batch.q, batch.k, batch.v):
            tensor[begin + length : end] = float("nan")
    for found, expected in zip(quantized(batch, 2, True), before, strict=True):
        assert torch.equal(found.float(), expected.float())


# ---------------------------------------------------------------------------------------------
# e4m3 inputs
# ---------------------------------------------------------------------------------------------


def test_given_descales():
    """Given codes are kept, and descales of every shape are applied."""
    batch = batch_of(heads=3)
    plain = quantized(batch, 0)
    total, count = batch.q.shape[0], len(LENGTHS)
    blocks = total // BLOCK + count
    batch.q, batch.k, batch.v = (t.to(E4M3) for t in (batch.q, batch.k, batch.v))
    whole = values(batch, plain)
    offsets = batch.cu_seqlens_q.tolist()
    sequence = torch.repeat_interleave(torch.arange(count), batch.cu_seqlens_q.diff())
    for shape in ((), (1,), (count,), (count, 3), (3, blocks), (3, total)):
        given = torch.rand(shape) + 0.5
        of_keys = torch.rand(3, blocks) + 0.5 if shape == (3, total) else given
        x = quantized(batch, -1, False, given, of_keys, of_keys)
        assert torch.equal(x.v8.float(), plain.v8.float())
        for found, codes, scale in zip(values(batch, x), whole, (given, of_keys), strict=False):
            if scale.numel() == 1:
                expected = scale.reshape(1, 1).expand(total, 3)
            elif scale.dim() == 1:
                expected = scale[sequence][:, None].expand(total, 3)
            elif scale.shape == (count, 3):
                expected = scale[sequence]
            elif scale.shape == (3, total):
                expected = scale.t()
            else:
                first = torch.tensor(offsets)[sequence]
                block = first // BLOCK + sequence + (torch.arange(total) - first) // BLOCK
                expected = scale.t()[block]
            assert torch.equal(found, codes * expected[..., None].double())


# ---------------------------------------------------------------------------------------------
# The operator
# ---------------------------------------------------------------------------------------------


def arguments(batch: Batch, *rest: Any) -> tuple[Any, ...]:
    offsets = (batch.cu_seqlens_q, batch.cu_seqlens_k, batch.seqused_q, batch.seqused_k)
    return (batch.q, batch.k, batch.v, *offsets, *rest)


@with_smooth_k
def test_opcheck(smooth_k):
    batch = make_batch([5, 0, 130], dim=40, dim_v=16, dtype=torch.bfloat16)
    # NOTE: torch cannot compare e4m3, as the other checks do.
    checks = ("test_autograd_registration", "test_faketensor")
    op = torch.ops.hstu_attn.quantize_qkv.default
    torch.library.opcheck(op, arguments(batch, 2, smooth_k), test_utils=checks)


@pytest.mark.slow
def test_compile_and_export():
    class Module(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
            op = torch.ops.hstu_attn.quantize_qkv
            x = op(q, k, v, offsets, offsets, None, None, 2, True)
            return tuple(part.float() for part in x)

    batch = make_batch([5, 0, 130], dim=40, dim_v=16, dtype=torch.bfloat16)
    inputs = (batch.q, batch.k, batch.v, batch.cu_seqlens_q)
    expected = Module()(*inputs)
    compiled = torch.compile(Module(), fullgraph=True)(*inputs)
    exported = torch.export.export(Module(), inputs).module()(*inputs)
    for found in (compiled, exported):
        for part, want in zip(found, expected, strict=True):
            assert torch.equal(part, want)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"mode": 6}, "mode: expected a mode from 0 to 5, got 6"),
        ({"mode": -1}, "mode: expected a mode from 0 to 5, got -1"),
        (
            {"q": torch.zeros(4, 2, 8)},
            "q: expected bfloat16, float16 or float8_e4m3fn, got float32",
        ),
        ({"q": torch.zeros(4, 2, 9).half()}, "q: expected a head_dim that is a multiple of 8"),
        ({"k": torch.zeros(4, 1, 8).bfloat16()}, "k: expected shape"),
        ({"v": torch.zeros(4, 2, 8)}, "v: expected the dtype of q"),
        ({"cu_seqlens_k": torch.tensor([0, 5])}, "cu_seqlens_k: expected offsets up to total_k"),
        ({"q_descale": torch.ones(1)}, "q_descale: expected None without float8_e4m3fn"),
        ({"q": torch.zeros(4, 2, 8).to(torch.float8_e5m2)}, "q: expected .*got .*8_e5m2"),
    ],
)
def test_errors(change, text):
    x = torch.zeros(4, 2, 8, dtype=torch.bfloat16)
    good: dict[str, Any] = {"q": x, "k": x, "v": x, "mode": 2, "smooth_k": False}
    good |= {"cu_seqlens_q": torch.tensor([0, 4]), "cu_seqlens_k": torch.tensor([0, 4])}
    good |= {"seqused_q": None, "seqused_k": None}
    with pytest.raises(raw_ops.BAD_ARGUMENT, match=text):
        torch.ops.hstu_attn.quantize_qkv(**{**good, **change})


def test_errors_of_e4m3():
    x = torch.zeros(4, 2, 8, dtype=torch.bfloat16).to(E4M3)
    offsets = torch.tensor([0, 4])
    one = torch.ones(1)
    op = torch.ops.hstu_attn.quantize_qkv
    for rest, text in (
        ((2, False, one, one, one), "mode: expected -1 with float8_e4m3fn, got 2"),
        ((-1, True, one, one, one), "smooth_k: expected false with float8_e4m3fn"),
        ((-1, False, one, one, one, True), "silu: expected false with float8_e4m3fn, got true"),
        ((-1, False, None, one, one), "q_descale: expected a tensor with float8_e4m3fn, got None"),
        ((-1, False, one, torch.ones(3), one), r"k_descale: expected shape .*got shape \(3\)"),
        ((-1, False, one, one, one.double()), "v_descale: expected float32"),
    ):
        with pytest.raises(raw_ops.BAD_ARGUMENT, match=text):
            op(x, x, x, offsets, offsets, None, None, *rest)


# ---------------------------------------------------------------------------------------------
# The CUDA kernels
# ---------------------------------------------------------------------------------------------


def assert_equal_to_cpu(batch: Batch, *rest: Any) -> None:
    """Codes and descales are bitwise those of the CPU, norms and products within rounding."""
    expected = Quantized(*torch.ops.hstu_attn.quantize_qkv(*arguments(batch, *rest)))
    on_gpu = [x.cuda() if isinstance(x, Tensor) else x for x in arguments(batch, *rest)]
    found = Quantized(*(x.cpu() for x in torch.ops.hstu_attn.quantize_qkv(*on_gpu)))
    offsets = batch.cu_seqlens_q.tolist()
    used = batch.cu_seqlens_q.diff() if batch.seqused_q is None else batch.seqused_q
    rows = [
        row
        for begin, length in zip(offsets, used.tolist(), strict=False)
        for row in range(begin, begin + length)
    ]
    blocks = [number for number, *_ in blocks_of(batch)]
    for name, (a, b) in {
        name: (getattr(found, name), getattr(expected, name)) for name in Quantized._fields
    }.items():
        assert a.shape == b.shape, name
        if a.dtype == E4M3:
            a, b = a.view(torch.uint8), b.view(torch.uint8)
            index = blocks if name == "v8" else rows
            assert torch.equal(a[index], b[index]), name
        elif name == "k_mean":
            own = [b for b, length in enumerate(used.tolist()) if length > 0]
            assert a.numel() == 0 or torch.equal(a[own], b[own]), name
        elif a.numel() > 0:
            index = blocks if name[0] in "kv" else rows
            if "descale" in name:
                assert torch.equal(a[:, index], b[:, index]), name
            else:
                # NaN of q and k is in the norms and products of its rows, on both devices.
                torch.testing.assert_close(
                    a[:, index], b[:, index], rtol=1e-5, atol=1e-4, equal_nan=True
                )


@pytest.mark.gpu
@with_modes
@with_smooth_k
@with_dtypes
@pytest.mark.parametrize(("dim", "dim_v"), [(32, 32), (64, 64), (128, 128), (256, 256), (40, 72)])
def test_the_cuda_kernel(mode, smooth_k, dtype, dim, dim_v):
    batch = batch_of(dtype, dim=dim, dim_v=dim_v, heads=3)
    batch.k.add_(1)
    assert_equal_to_cpu(batch, mode, smooth_k)
    batch.seqused_q = batch.seqused_k = torch.tensor([0, 1, 100, 128, 3, 999, 0]).int()
    for tensor in (batch.q, batch.k, batch.v):
        tensor[300, 1, 3], tensor[310, 0, 5] = float("inf"), float("nan")
    assert_equal_to_cpu(batch, mode, smooth_k)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [1, 2])
@with_smooth_k
@pytest.mark.parametrize("dim", [8, 64, 128, 256])
def test_the_cuda_kernel_with_many_norms(mode, smooth_k, dim):
    assert_equal_to_cpu(batch_of_many_norms(dim), mode, smooth_k)


@pytest.mark.gpu
def test_the_cuda_kernel_with_strides_and_many_sequences():
    lengths = torch.randint(0, 300, (200,)).tolist()
    batch = make_batch(lengths, dim=64, dtype=torch.bfloat16)
    packed = torch.stack([batch.q, batch.k, batch.v], 1).flatten(1, 2)
    batch.q, batch.k, batch.v = packed.split(2, 1)
    for mode in MODES:
        assert_equal_to_cpu(batch, mode, True)
    odd = torch.randn(batch.q.shape[0], 2, 65).bfloat16()
    batch.q = odd[..., 1:]
    assert_equal_to_cpu(batch, 2, False)


@pytest.mark.gpu
def test_the_cuda_kernel_for_e4m3():
    batch = batch_of(heads=3)
    total, count = batch.q.shape[0], len(LENGTHS)
    blocks = total // BLOCK + count
    batch.q, batch.k, batch.v = (t.to(E4M3) for t in (batch.q, batch.k, batch.v))
    for shape in ((), (1,), (count,), (count, 3), (3, blocks), (3, total)):
        given = torch.rand(shape) + 0.5
        of_keys = torch.rand(3, blocks) + 0.5 if shape == (3, total) else given
        assert_equal_to_cpu(batch, -1, False, given, of_keys, of_keys)


@pytest.mark.gpu
def test_a_cuda_graph():
    batch = batch_of()
    inputs = [x.cuda() if isinstance(x, Tensor) else x for x in arguments(batch, 4, True)]
    op = torch.ops.hstu_attn.quantize_qkv
    op(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op(*inputs)
    inputs[1].mul_(2)
    expected = op(*inputs)
    graph.replay()
    for name in ("q8", "k8", "v8"):
        n = Quantized._fields.index(name)
        rows = slice(None) if name != "v8" else [number for number, *_ in blocks_of(batch)]
        a, b = captured[n].view(torch.uint8), expected[n].view(torch.uint8)
        assert torch.equal(a[rows], b[rows])
