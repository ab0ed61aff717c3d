"""Tests of FP8 attention over pages of float8_e4m3fn, whose products are in e4m3."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from hstu_attn import FP8, DenseBias, Mask, PagedKV, Quantization, hstu_attention, reference
from hstu_attn.layer import HSTULayerConfig, HSTUStack
from hstu_attn.paged import quantize_rows
from hstu_attn.testing import Batch, make_paged_batch, offsets, run
from tests.helpers.fp8 import relative_error, to_device
from tests.helpers.paged_tiles import TILES, with_tiles

BF16 = torch.bfloat16
ROWS = Quantization(mode=1)
NORMAL = 6e-2  # largest error of normal inputs; it is 5.4e-2 for packed inputs
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _only_hopper(request: pytest.FixtureRequest) -> None:
    if not request.node.get_closest_marker("gpu"):
        return
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    if not is_hopper or os.environ.get("HSTU_ATTN_FORCE_ARCH") == "80":
        pytest.skip("only sm90 has FP8 attention")


def fp8_batch(
    cached: list[int],
    new: list[int],
    targets: list[int],
    *,
    of_normal: bool = True,
    dtype: torch.dtype = BF16,
    **options: Any,
) -> Batch:
    """Makes a batch on a CPU, with pages of a normal distribution or of many magnitudes."""
    batch = make_paged_batch(cached, new, targets, dtype=dtype, fp8=True, **options)
    batch.alpha, batch.quantization = batch.q.shape[2] ** -0.5, ROWS
    batch.q.copy_(torch.randn(batch.q.shape))
    for x in (batch.k, batch.v):
        x.copy_(torch.where(x.isfinite(), torch.randn(x.shape), x))
    if of_normal:
        pages = batch.paged_kv
        assert pages is not None
        assert pages.kv_scales is not None
        codes, scales = quantize_rows(torch.randn(pages.kv_cache.shape))
        scales = torch.where(pages.kv_scales.isfinite(), scales, pages.kv_scales)
        batch.paged_kv = PagedKV(
            codes, pages.page_offsets, pages.page_ids, pages.last_page_lens, scales
        )
    return batch


def exact(batch: Batch) -> Tensor:
    """Returns the output in fp64, from dequantized pages and unquantized q, k and v."""
    return run(reference.hstu_attention, replace(batch, quantization=None), dtype=torch.float64)[
        "out"
    ]


def emulated(batch: Batch) -> Tensor:
    return run(reference.hstu_attention, batch, dtype=torch.float64)["out"]


def output(batch: Batch, device: str) -> Tensor:
    on_device = replace(to_device(batch, device), paged_kv=pages_on(batch, device))
    return run(hstu_attention, on_device)["out"].cpu()


def pages_on(batch: Batch, device: str) -> PagedKV:
    assert batch.paged_kv is not None
    cache, *lists, scales = batch.paged_kv.arguments
    assert scales is not None
    return PagedKV(*(None if x is None else x.to(device) for x in (cache, *lists, scales)))


def check(batch: Batch, device: str, most: float | None = None) -> None:
    """Compares the output with the emulation, whose own error is at most `most`."""
    out, emulation, wanted = output(batch, device), emulated(batch), exact(batch)
    assert out.dtype == batch.q.dtype
    error = relative_error(emulation, wanted)
    assert relative_error(out, wanted) <= 1.15 * error + 4e-3
    # The kernel rounds weights with the scales of their keys' values.
    assert relative_error(out, emulation) <= (1.15 * error if device == "cuda" else 4e-3)
    if most is not None:
        assert error <= most
    if device == "cuda":
        assert torch.equal(output(batch, device), out)


BATCHES: dict[str, Callable[[], Batch]] = {
    "one row": lambda: fp8_batch([300] * 16, [1] * 16, [0] * 16, dim=64, heads=4),
    "targets": lambda: fp8_batch([70, 0, 200], [5, 9, 128], [30, 2, 150], dim=64, page_size=32),
    "no history": lambda: fp8_batch([0] * 9, [0] * 8 + [1], [40] * 8 + [3], dim=128),
    "target groups": lambda: fp8_batch([90, 3], [2, 1], [30, 31], dim=128, target_group_size=4),
    "window": lambda: fp8_batch([900, 20], [60, 1], [20, 7], dim=128, window=(100, 0)),
    "full": lambda: fp8_batch([150, 20], [60, 1], [0, 0], dim=64, window=(-1, -1)),
    "large pages": lambda: fp8_batch([500, 256], [30, 2], [9, 130], dim=256, page_size=256),
    "small pages": lambda: fp8_batch([500, 16], [30, 2], [9, 130], dim=256, page_size=16),
    "narrow heads": lambda: fp8_batch([130, 40], [9, 8], [5, 70], dim=16, page_size=64),
    "odd heads": lambda: fp8_batch([130, 40], [9, 8], [5, 70], dim=80, heads=3, page_size=64),
    "wide heads": lambda: fp8_batch([130, 40], [9, 8], [5, 70], dim=160, page_size=128),
    "few rows": lambda: fp8_batch([500, 90] * 4, [100] * 8, [120] * 8, dim=128, heads=4),
    "few rows, narrow heads": lambda: fp8_batch([90] * 8, [100] * 8, [120] * 8, dim=64, heads=4),
    "fp16": lambda: fp8_batch([130, 40], [9, 8], [5, 70], dim=64, dtype=torch.float16),
}


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("name", BATCHES)
def test_outputs(name: str, device: str) -> None:
    # A row that sees one key has the error of one weight, which no other errors compensate.
    check(BATCHES[name](), device, 7e-2 if name == "no history" else NORMAL)


@pytest.mark.gpu
def test_repeated_calls() -> None:
    """Blocks have several tiles of rows, and splits of them. All calls have the same result."""
    batch = fp8_batch([1280] * 40, [20] * 40, [60] * 40, dim=256, page_size=128)
    on_gpu = replace(to_device(batch, "cuda"), paged_kv=pages_on(batch, "cuda"))
    first = run(hstu_attention, on_gpu)["out"]
    for _ in range(300):
        assert torch.equal(run(hstu_attention, on_gpu)["out"], first)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("batch", "cached"), [(1, 9400), (1, 300), (8, 4700), (40, 1300)])
def test_long_histories(batch: int, cached: int, dim: int) -> None:
    """Keys are divided among the blocks of clusters of both sizes, or through global memory.

    A block has more than 1,024 of them, after which sums are promoted, but with 300.
    """
    x = fp8_batch(
        [max(cached - 17 * b, 0) for b in range(batch)],
        [20 + b for b in range(batch)],
        [60 - b for b in range(batch)],
        dim=dim,
        page_size=128,
    )
    check(x, "cuda", NORMAL)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("blocks", TILES)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_kernel(dim: int, blocks: str) -> None:
    cached = 3500 if "split" in blocks else 300
    batch = fp8_batch([cached, 40], [37, 70], [80, 9], dim=dim, page_size=32)
    check(with_tiles(batch, blocks, 128 if dim == 256 else 192), "cuda", NORMAL)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("options", [{"window": (300, 0)}, {"target_group_size": 4}, {}])
@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("splits", [False, True])
def test_prepared_tiles(splits: bool, dim: int, options: dict[str, Any]) -> None:
    """With a work list, what a tile of rows sees is found before attention begins."""
    users = range(3 if splits else 70)
    batch = fp8_batch(
        [2900 - 900 * b if splits else 950 - 13 * b for b in users],
        [(37 * b + 70) % 200 for b in users],
        [(53 * b + 80) % 190 for b in users],
        dim=dim,
        page_size=32,
        **options,
    )
    rows = 128 if dim == 256 else 192
    check(with_tiles(batch, "two splits", rows) if splits else batch, "cuda", NORMAL)


@pytest.mark.gpu
def test_prepared_tiles_of_bad_offsets() -> None:
    """An offset that falls changes no rows of earlier sequences, wherever a search for it ends."""
    users, new = 70, 950
    batch = fp8_batch([300] * users, [new] * users, [0] * users, dim=64, heads=4, page_size=64)
    wanted = output(batch, "cuda")
    cu_seqlens = batch.cu_seqlens_q.clone()
    cu_seqlens[52] = 0
    got = output(replace(batch, cu_seqlens_q=cu_seqlens), "cuda")
    assert torch.equal(got[: 51 * new], wanted[: 51 * new])


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_rows_of_many_magnitudes(device: str) -> None:
    check(fp8_batch([200, 31], [40, 8], [35, 6], dim=128, of_normal=False), device)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_large_queries(device: str) -> None:
    """The reciprocals of the norms of q's rows are subnormal numbers."""
    batch = fp8_batch([200, 31], [40, 8], [35, 6], dim=64)
    batch.q.mul_(2e37)
    batch.alpha /= 2e37
    assert batch.q.float().div(2e37).norm(dim=-1).max() * 2e37 > 2.0**126
    check(batch, device, NORMAL)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_rows_do_not_depend_on_the_norms_of_others(device: str) -> None:
    """A block of the kernel that quantizes has more rounds than one, and parts of rows."""
    dtype = torch.float16  # shows differences that bf16 does not
    batch = fp8_batch([100, 30], [1800, 150], [60, 9], heads=3, dim=64, dtype=dtype)
    before = output(batch, device)
    q = batch.q.clone()
    q[::5, :, 7] = torch.inf
    out = output(replace(batch, q=q), device)
    is_same = torch.arange(len(q)) % 5 != 0
    assert torch.equal(out[is_same], before[is_same])
    assert out[~is_same].isnan().any()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_many_users(device: str) -> None:
    """More than a block of the kernel that quantizes has threads, some without pages."""
    users = range(1100)
    batch = fp8_batch(
        [(7 * n) % 40 for n in users],
        [n % 2 for n in users],
        [n % 3 for n in users],
        dim=64,
        page_size=16,
    )
    check(batch, device, 7e-2)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_rows_of_zeros(device: str) -> None:
    """The scale of rows of zeros or of NaN is 1, where scales of other rows are small."""
    batch = fp8_batch([200, 31], [40, 8], [35, 6], dim=64)
    pages = batch.paged_kv
    assert pages is not None
    assert pages.kv_scales is not None
    for part in (0, 1):
        owned = pages.kv_scales[:, part].isfinite()
        rows = owned & (torch.rand(owned.shape) < 0.2)
        pages.kv_cache.view(torch.uint8)[:, part][rows] = 0
        pages.kv_scales[:, part][rows] = 1
    pages.kv_scales[pages.kv_scales != 1] *= 2.0**-12
    batch.k.mul_(2.0**-12)
    batch.v.mul_(2.0**-12)
    batch.alpha *= 2.0**12
    check(batch, device, NORMAL)
    spoilt = fp8_batch([200], [40], [0], dim=64, window=(20, 0))
    pages = spoilt.paged_kv
    assert pages is not None
    assert pages.kv_scales is not None
    first = int(pages.page_ids[0])
    pages.kv_cache.view(torch.uint8)[first, 0, 0] = 0x7F  # NaN, which the rows do not see
    pages.kv_scales[first, 0, 0] = 1
    check(spoilt, device, NORMAL)
    pages.kv_cache.view(torch.uint8).zero_()
    for x in (spoilt.q, spoilt.k, spoilt.v):
        x.zero_()
    assert not output(spoilt, device).any()


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("name", ["row_spans", "func", "seqused"])
def test_other_masks(name: str, device: str) -> None:
    batch = fp8_batch([150, 90], [30, 20], [0, 0], dim=64, page_size=64)
    assert batch.paged_kv is not None
    rows = batch.q.shape[0]
    if name == "row_spans":
        spans = torch.tensor([0, 50, 60, 100], dtype=torch.int32).expand(2, rows, 4).contiguous()
        batch.mask = Mask(row_spans=spans)
    elif name == "func":
        batch.mask = Mask(func=torch.full((1, 1, rows), 70, dtype=torch.int32))
    else:
        batch.seqused_q = torch.tensor([21, 20], dtype=torch.int32)
        batch.seqused_k = torch.tensor([171, 101], dtype=torch.int32)
        cache, *tables, _, scales = batch.paged_kv.arguments
        last = torch.tensor([171 % 64, 101 % 64], dtype=torch.int32)
        batch.paged_kv = PagedKV(cache, *tables, last, scales)
    check(batch, device, NORMAL)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_values_that_are_not_finite(device: str) -> None:
    """NaN and infinity in q and k stay in the rows that see them."""
    batch = fp8_batch([100, 60], [30, 20], [20, 10], dim=64)
    before = output(batch, device)
    pages = batch.paged_kv
    assert pages is not None
    ends = batch.cu_seqlens_q.tolist()
    batch.q[3, 0, 5] = float("inf")
    pages.kv_cache.view(torch.uint8)[int(pages.page_ids[int(pages.page_offsets[1])]), 0, 7] = 0x7F
    batch.k[ends[1] - 1, 1, 2] = float("nan")
    out = output(batch, device)
    spoilt = out.isnan().any(-1)
    (first, middle), (_, last) = pairwise(ends)
    assert spoilt[3, 0]
    assert spoilt[middle:last].all()
    assert spoilt[middle - 1, 1]
    spoilt[3, 0] = spoilt[middle - 1, 1] = True
    spoilt[middle:last] = True
    kept = ~spoilt
    assert kept[first:middle].sum() >= (middle - first) * 2 - 2
    assert torch.equal(out[kept], before[kept])


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_results_of_a_sequence_do_not_depend_on_the_others(device: str) -> None:
    """The batch keeps its shape, because splits are planned from the shape."""
    batch = fp8_batch([300, 60], [30, 20], [20, 10], dim=128)
    before = output(batch, device)
    end = int(batch.cu_seqlens_q[1])
    pages = batch.paged_kv
    assert pages is not None
    assert pages.kv_scales is not None
    pages.kv_scales[pages.page_ids[int(pages.page_offsets[1]) :].long()] *= 1000
    for x in (batch.q, batch.k, batch.v):
        x[end:].mul_(100)
    assert torch.equal(output(batch, device)[:end], before[:end])
    assert not torch.equal(output(batch, device)[end:], before[end:])


@pytest.mark.gpu
def test_captured_and_compiled() -> None:
    batch = fp8_batch([700, 60], [30, 20], [20, 10], dim=128)
    on_gpu = replace(to_device(batch, "cuda"), paged_kv=pages_on(batch, "cuda"))
    options = on_gpu.options()

    def call(q: Tensor) -> Tensor:
        return hstu_attention(q, on_gpu.k, on_gpu.v, **options)

    expected = call(on_gpu.q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(on_gpu.q)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)
    assert torch.equal(torch.compile(call, fullgraph=True)(on_gpu.q), expected)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_what_is_refused(device: str) -> None:
    batch = fp8_batch([20, 31], [4, 8], [3, 6], dim=64)

    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        with pytest.raises(error, match=match):
            output(replace(batch, **changes), device)

    for mode in (0, 2, 5):
        refused(ValueError, r"^quant_mode: .* with kv_cache", quantization=Quantization(mode))
    refused(ValueError, r"^smooth_k: expected false", quantization=Quantization(1, smooth_k=True))
    refused(NotImplementedError, "keep", quantization=Quantization(1, keep="e4m3"))
    pages = batch.paged_kv
    assert pages is not None
    lists = (pages.page_offsets, pages.page_ids, pages.last_page_lens)
    plain = PagedKV(torch.zeros(pages.kv_cache.shape, dtype=BF16), *lists)
    with pytest.raises(
        NotImplementedError, match=r"^kv_cache: FP8 attention reads pages of float8"
    ):
        run(hstu_attention, replace(batch, paged_kv=plain))
    wide = {name: getattr(batch, name).float() for name in "qkv"}
    refused(ValueError, "^q: expected bfloat16 or float16 with quant_mode", **wide)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_biases(device: str) -> None:
    """A CPU computes biases; a GPU has no kernel for them."""
    batch = fp8_batch([20, 31], [4, 8], [3, 6], dim=64)
    length = batch.max_seqlen_k
    batch.bias = DenseBias(torch.randn(2, 2, length, length, dtype=BF16))
    if device == "cpu":
        check(batch, device)
        return
    with pytest.raises(NotImplementedError, match="with both a kv_cache and a bias"):
        output(batch, device)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_an_empty_batch(device: str) -> None:
    batch = fp8_batch([0, 0], [0, 0], [0, 0], dim=64)
    assert output(batch, device).shape == (0, 2, 64)
    assert torch.equal(batch.cu_seqlens_q, offsets([0, 0]))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("linears", [False, True])
def test_layers(linears: bool, device: str) -> None:
    """Layers whose attention is in FP8 read the pages that they have written."""
    pytest.importorskip("hstu_attn._host", reason="_host has not been built")
    from hstu_attn.serving import CachedRows, PagedKVCache

    heads, dim = 2, 64
    config = HSTULayerConfig(
        embedding_dim=64, num_heads=heads, hidden_dim=dim, attention_dim=dim, scaling_seqlen=50
    )
    plain = HSTUStack(config, 2, device=device, dtype=BF16).eval()
    stack = HSTUStack(
        replace(config, fp8=FP8(ROWS, linears=linears)), 2, device=device, dtype=BF16
    ).eval()
    stack.load_state_dict(plain.state_dict())
    x = torch.randn(60, 64, device=device).to(BF16)
    outputs = []
    for layers in (plain, stack):
        cache = PagedKVCache(2, 8, 16, heads, dim, torch.float8_e4m3fn, device)
        with cache.step([1, 2], [30, 17]) as step:
            ends = torch.tensor([0, 30, 47], device=device)
            layers.forward_cached(x[:47], CachedRows(step, ends, 30, 30))
        with cache.step([2, 1], [0, 0]) as step:
            ends = torch.tensor([0, 6, 13], device=device)
            targets = torch.tensor([6, 7], device=device)
            outputs.append(layers.forward_cached(x[47:], CachedRows(step, ends, 7, 40, targets)))
    of_attention = [(y - x[47:]).double() for y in outputs]
    assert not torch.equal(*outputs)
    assert relative_error(of_attention[1], of_attention[0]) < 0.12
    cache = PagedKVCache(2, 8, 16, heads, dim, BF16, device)
    ends = torch.tensor([0, 30], device=device)
    with cache.step([1], [30]) as step:
        rows = CachedRows(step, ends, 30, 30)
        with pytest.raises(NotImplementedError, match=r"^kv_cache: FP8 attention reads pages of"):
            stack.forward_cached(x[:30], rows)
