"""Tests of `append_paged_kv`, which writes new keys and values into the pages of a cache."""

from __future__ import annotations

import pytest
import torch

from hstu_attn import PagedKV, append_paged_kv, hstu_attention
from hstu_attn.paged import PAGE_SIZES, dequantize_rows, quantize_rows
from hstu_attn.testing import make_paged_batch, run

BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn


def append_batch(device, page_size=16, heads=2, dim=32, dtype=BF16, index=torch.int32):
    """Returns `(k, v, pages, arguments, expected cache)`: sequences with and without cached, new
    and target rows, in a cache whose pages are in random order.
    """
    cached, new, targets = [5, 0, 40, 16, 7], [20, 17, 0, 1, 3], [3, 0, 9, 2, 1]
    rows = [n + t for n, t in zip(new, targets, strict=True)]
    counts = [-(-(c + n) // page_size) for c, n in zip(cached, new, strict=True)]
    order = torch.randperm(sum(counts) + 3)[: sum(counts)].tolist()
    cache = torch.randn(sum(counts) + 3, 2, page_size, heads, dim, dtype=torch.float).to(dtype)
    k, v = torch.randn(2, sum(rows), heads, dim, dtype=torch.float).to(dtype)
    expected, row, first = cache.clone(), 0, 0
    for c, n, total, count in zip(cached, new, rows, counts, strict=True):
        for r in range(n):
            page, slot = order[first + (c + r) // page_size], (c + r) % page_size
            expected[page, 0, slot], expected[page, 1, slot] = k[row + r], v[row + r]
        row, first = row + total, first + count

    def offsets(lengths):
        return torch.tensor([0, *lengths]).cumsum(0).to(device, index)

    pages = PagedKV(
        cache.to(device),
        offsets(counts),
        torch.tensor(order, dtype=index, device=device),
        torch.tensor(
            [(c + n - 1) % page_size + 1 for c, n in zip(cached, new, strict=True)], device=device
        ),
    )
    arguments = {
        "cu_seqlens_q": offsets(rows),
        "cu_seqlens_k": offsets([c + r for c, r in zip(cached, rows, strict=True)]),
        "num_targets": torch.tensor(targets, dtype=index, device=device),
    }
    return k.to(device), v.to(device), pages, arguments, expected


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_append(device, page_size, index):
    k, v, pages, arguments, expected = append_batch(device, page_size, index=index)
    append_paged_kv(k, v, pages, **arguments)
    assert torch.equal(pages.kv_cache.cpu(), expected)


@pytest.mark.sanitize
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.float64, BF16],
    ids=["fp32", "fp16", "fp64", "bf16"],
)
@pytest.mark.parametrize("dim", [8, 20, 256])
def test_append_of_views(device, dtype, dim):
    """Rows are views of one buffer, aligned or not, and the cache is a layer of many."""
    k, v, pages, arguments, expected = append_batch(device, heads=3, dim=dim, dtype=dtype)
    buffer = torch.full((k.shape[0], 2, 3, dim + 5), float("nan"), dtype=dtype, device=device)
    buffer[:, 0, :, 1:-4], buffer[:, 1, :, 1:-4] = k, v
    layers = torch.full((pages.kv_cache.shape[0], 2, *pages.kv_cache.shape[1:]), 7.0, dtype=dtype)
    layers = layers.to(device)
    layers[:, 1] = pages.kv_cache
    pages = PagedKV(layers[:, 1], pages.page_offsets, pages.page_ids, pages.last_page_lens)
    append_paged_kv(buffer[:, 0, :, 1:-4], buffer[:, 1, :, 1:-4], pages, **arguments)
    assert torch.equal(layers[:, 1].cpu(), expected)
    assert (layers[:, 0] == 7).all()


def test_append_then_attend(device):
    """Attention reads what was appended."""
    batch = make_paged_batch([90, 3], [30, 13], [5, 0], page_size=32, dtype=BF16, device=device)
    pages = batch.paged_kv
    expected = run(hstu_attention, batch)["out"]
    whole = pages.kv_cache.clone()
    k, v = batch.k.clone(), batch.v.clone()
    offset = 0
    for b, (cached, new, targets) in enumerate([(90, 30, 5), (3, 13, 0)]):
        first = int(pages.page_offsets[b])
        for r in range(new):
            page = int(pages.page_ids[first + (cached + r) // 32])
            slot = (cached + r) % 32
            k[offset + r], v[offset + r] = whole[page, 0, slot], whole[page, 1, slot]
            pages.kv_cache[page, :, slot] = float("nan")
        offset += new + targets
    append_paged_kv(
        k,
        v,
        pages,
        cu_seqlens_q=batch.cu_seqlens_q,
        cu_seqlens_k=batch.cu_seqlens_k,
        num_targets=batch.mask.num_targets,
    )
    assert torch.equal(run(hstu_attention, batch)["out"], expected)


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("page_ids", 1, 99),
        ("page_ids", 0, -1),
        ("page_offsets", 1, 1),
        ("cu_seqlens_q", 1, 10**6),
        ("cu_seqlens_k", 1, -5),
        ("num_targets", 0, 24),
    ],
)
def test_append_of_what_does_not_fit(device, name, index, value):
    """On the host an overflow is an error; on a GPU no page of other users is written."""
    k, v, pages, arguments, expected = append_batch(device)
    tensors = {"page_ids": pages.page_ids, "page_offsets": pages.page_offsets, **arguments}
    tensors[name][index] = value
    if device == "cpu":
        with pytest.raises(ValueError, match=rf"{name}: expected .*got "):
            append_paged_kv(k, v, pages, **arguments)
        return
    listed = set(pages.page_ids.tolist())
    others = [page for page in range(len(expected)) if page not in listed]
    before = pages.kv_cache[others]
    append_paged_kv(k, v, pages, **arguments)
    assert torch.equal(pages.kv_cache[others], before)


def test_append_refuses_a_page_that_two_sequences_write():
    k, v, pages, arguments, _ = append_batch("cpu")
    pages.page_ids[2] = pages.page_ids[0]
    with pytest.raises(ValueError, match="page_ids: expected each page that is written once, got"):
        append_paged_kv(k, v, pages, **arguments)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("k", lambda k, v, pages: (k[0], v, pages)),
        ("v", lambda k, v, pages: (k, v[:-1], pages)),
        ("v", lambda k, v, pages: (k, v.float(), pages)),
        ("kv_cache", lambda k, v, pages: (k.float(), v.float(), pages)),
        ("kv_cache", lambda k, v, pages: (k[:, :1], v[:, :1], pages)),
    ],
)
def test_append_refuses_other_shapes_and_dtypes(device, name, change):
    k, v, pages, arguments, _ = append_batch(device)
    with pytest.raises(ValueError, match=rf"^{name}: expected .*got "):
        append_paged_kv(*change(k, v, pages), **arguments)


@pytest.mark.gpu
def test_checked_calls_name_the_wrong_argument_of_pages(monkeypatch):
    monkeypatch.setenv("HSTU_ATTN_CHECK", "1")
    k, v, pages, arguments, _ = append_batch("cuda")
    append_paged_kv(k, v, pages, **arguments)
    pages.page_ids[0] = -1
    with pytest.raises(ValueError, match="page_ids: expected"):
        append_paged_kv(k, v, pages, **arguments)


# ---------------------------------------------------------------------------------------------
# An e4m3 cache
# ---------------------------------------------------------------------------------------------

DTYPES = pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.float64, BF16],
    ids=["fp32", "fp16", "fp64", "bf16"],
)


def quantized(pages: PagedKV) -> PagedKV:
    """Returns the pages quantized to e4m3."""
    elements, scales = quantize_rows(pages.kv_cache)
    return PagedKV(elements, pages.page_offsets, pages.page_ids, pages.last_page_lens, scales)


def same_bits(pages: PagedKV, expected: torch.Tensor) -> bool:
    """Returns whether the pages equal the quantized rows of a plain cache, NaN included."""
    elements, scales = quantize_rows(expected.to(pages.kv_cache.device))
    held = dequantize_rows(pages.kv_cache, pages.kv_scales)
    wanted = dequantize_rows(elements, scales)
    return (
        torch.equal(pages.kv_scales, scales)
        and torch.equal(held.isnan(), wanted.isnan())
        and (torch.equal(held.nan_to_num(), wanted.nan_to_num()))
    )


def refused_on_gpu(device: str, dtype: torch.dtype) -> bool:
    return device != "cpu" and dtype.itemsize != 2


@pytest.mark.sanitize
@DTYPES
@pytest.mark.parametrize("dim", [8, 20, 32, 64, 96, 128, 256])
def test_append_quantizes(device, dtype, dim):
    k, v, pages, arguments, expected = append_batch(device, heads=3, dim=dim, dtype=dtype)
    pages = quantized(pages)
    if refused_on_gpu(device, dtype):
        with pytest.raises(NotImplementedError, match=r"^k: on a GPU"):
            append_paged_kv(k, v, pages, **arguments)
        return
    append_paged_kv(k, v, pages, **arguments)
    assert same_bits(pages, expected)


@pytest.mark.sanitize
@DTYPES
@pytest.mark.parametrize("dim", [8, 20, 256])
def test_append_quantizes_views(device, dtype, dim):
    """Rows are views of one buffer, aligned or not, and the cache is a layer of many."""
    if refused_on_gpu(device, dtype):
        dtype = BF16
    k, v, pages, arguments, expected = append_batch(device, heads=3, dim=dim, dtype=dtype)
    pages = quantized(pages)
    buffer = torch.full((k.shape[0], 2, 3, dim + 5), float("nan"), dtype=dtype, device=device)
    buffer[:, 0, :, 1:-4], buffer[:, 1, :, 1:-4] = k, v
    count, *shape = pages.kv_cache.shape
    layers = torch.full((count, 2, *shape), 7, dtype=torch.uint8, device=device)
    scales = torch.full((count, 2, *shape[:-1]), 7.0, device=device)
    layers[:, 1], scales[:, 1] = pages.kv_cache.view(torch.uint8), pages.kv_scales
    tables = (pages.page_offsets, pages.page_ids, pages.last_page_lens)
    pages = PagedKV(layers.view(FP8)[:, 1], *tables, scales[:, 1])
    append_paged_kv(buffer[:, 0, :, 1:-4], buffer[:, 1, :, 1:-4], pages, **arguments)
    assert same_bits(pages, expected)
    assert (layers[:, 0] == 7).all()
    assert (scales[:, 0] == 7).all()


@pytest.mark.parametrize("magnitude", [1e-30, 1e-3, 1.0, 1e3, 1e30])
def test_quantized_rows_are_near(device, magnitude):
    """The error is at most half a step of e4m3's mantissa, or of the row's subnormal numbers."""
    k, v, pages, arguments, expected = append_batch(device, dim=64)
    k, v, expected = k * magnitude, v * magnitude, expected * magnitude
    k[:, 0] *= torch.logspace(-6, 0, 64, device=device).to(BF16)
    pages = quantized(pages)
    fresh = PagedKV(
        torch.zeros_like(pages.kv_cache), pages.page_offsets, pages.page_ids,
        pages.last_page_lens, torch.zeros_like(pages.kv_scales),
    )  # fmt: skip
    plain = PagedKV(
        torch.zeros_like(expected, device=device), pages.page_offsets, pages.page_ids,
        pages.last_page_lens,
    )  # fmt: skip
    append_paged_kv(k, v, fresh, **arguments)
    append_paged_kv(k, v, plain, **arguments)
    exact = plain.kv_cache.double()
    error = (dequantize_rows(fresh.kv_cache, fresh.kv_scales) - exact).abs()
    smallest = exact.abs().amax(-1, keepdim=True) / 448 * 2**-10
    assert (error <= torch.maximum(exact.abs() * 2**-4, smallest) * (1 + 1e-6)).all()


def test_rows_of_zeros_nan_and_infinity(device):
    """NaN and infinity become NaN and change no other row or head; zeros stay zeros."""
    k, v, pages, arguments, _ = append_batch(device, dim=32)
    k, v = k.clone(), v.clone()
    plain = PagedKV(
        pages.kv_cache.clone(), pages.page_offsets, pages.page_ids, pages.last_page_lens
    )
    k[0, 1], k[1, 0, 3], k[2, 1, 5], v[3, 0, :] = 0.0, float("nan"), float("-inf"), float("inf")
    append_paged_kv(k, v, plain, **arguments)
    pages = quantized(pages)
    append_paged_kv(k, v, pages, **arguments)
    assert same_bits(pages, plain.kv_cache)
    held = dequantize_rows(pages.kv_cache, pages.kv_scales)
    assert torch.equal(held.isnan(), ~plain.kv_cache.isfinite())
    assert held.isnan().sum() == 1 + 1 + 32
    assert (pages.kv_scales > 0).all()


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bf16", "fp16"])
def test_append_quantized_then_attend(device, dtype):
    """Attention over an e4m3 cache equals that over a plain cache of the same values."""
    cached, new, targets = [90, 3], [30, 13], [5, 0]
    batch = make_paged_batch(
        cached, new, targets, page_size=32, dim=64, dtype=dtype, device=device, fp8=True
    )
    batch.k.uniform_(-1, 1)
    batch.v.uniform_(-1, 1)
    pages = batch.paged_kv
    append_paged_kv(
        batch.k,
        batch.v,
        pages,
        cu_seqlens_q=batch.cu_seqlens_q,
        cu_seqlens_k=batch.cu_seqlens_k,
        num_targets=batch.mask.num_targets,
    )
    out = run(hstu_attention, batch)["out"]
    plain = dequantize_rows(pages.kv_cache, pages.kv_scales).to(dtype)
    batch.paged_kv = PagedKV(plain, pages.page_offsets, pages.page_ids, pages.last_page_lens)
    assert torch.equal(run(hstu_attention, batch)["out"], out)


def test_append_refuses_scales_that_do_not_fit(device):
    k, v, plain, arguments, _ = append_batch(device)
    pages = quantized(plain)
    pages.kv_scales = None
    with pytest.raises(ValueError, match=r"^kv_scales: expected a tensor .*got None"):
        append_paged_kv(k, v, pages, **arguments)
    plain.kv_scales = quantized(plain).kv_scales
    with pytest.raises(ValueError, match=r"^kv_scales: expected None .*got a tensor"):
        append_paged_kv(k, v, plain, **arguments)
    for wrong in (
        plain.kv_scales[1:],
        plain.kv_scales.double(),
        plain.kv_scales.mT.contiguous().mT,
    ):
        pages.kv_scales = wrong
        with pytest.raises(ValueError, match=r"^kv_scales: expected .*got "):
            append_paged_kv(k, v, pages, **arguments)
