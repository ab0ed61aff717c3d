"""Tests of a paged KV cache against the reference, and against the same keys without pages."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import pytest
import torch

from hstu_attn import (
    DenseBias,
    Mask,
    PagedKV,
    RelativeBias,
    append_paged_kv,
    hstu_attention,
    hstu_attn_varlen_func,
)
from hstu_attn.paged import PAGE_SIZES
from hstu_attn.testing import Batch, check_against_reference, make_paged_batch, run
from tests.helpers.head_dims import HEAD_DIMS
from tests.helpers.paged_tiles import TILES, with_tiles
from tests.helpers.small_batches import check_small_batch

BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn

with_and_without_fp8 = pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])


@with_and_without_fp8
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(
    ("new", "targets"),
    [([40, 3, 1], [0, 0, 0]), ([0, 0, 0], [70, 3, 1]), ([33, 0, 5], [7, 64, 0])],
    ids=["new-history", "targets-alone", "both"],
)
def test_every_page_size(device, page_size, new, targets, fp8):
    batch = make_paged_batch(
        [300, 16, 0],
        new,
        targets,
        page_size=page_size,
        dtype=BF16,
        device=device,
        fp8=fp8,
    )
    check_against_reference(hstu_attention, batch, backward=False)


@with_and_without_fp8
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.float64], ids=["fp32", "fp16", "fp64"]
)
@pytest.mark.parametrize("dim", [32, 128, 40])
def test_dtypes_and_head_dims(dtype, dim, fp8):
    batch = make_paged_batch(
        [90, 200], [30, 1], [9, 0], page_size=32, dim=dim, dtype=dtype, fp8=fp8
    )
    check_against_reference(hstu_attention, batch, backward=False)


@with_and_without_fp8
@pytest.mark.parametrize("window", [(-1, 0), (50, 0)], ids=["causal", "window"])
@pytest.mark.parametrize("group", [1, 4])
def test_masks(device, window, group, fp8):
    batch = make_paged_batch(
        [90, 3, 64],
        [30, 13, 0],
        [20, 7, 33],
        page_size=32,
        dtype=BF16,
        device=device,
        window=window,
        target_group_size=group,
        fp8=fp8,
    )
    check_against_reference(hstu_attention, batch, backward=False)
    contexts = torch.tensor([4, 16, 0], dtype=torch.int32, device=device)
    batch.mask = replace(batch.mask, num_contexts=contexts)
    check_against_reference(hstu_attention, batch, backward=False)


@with_and_without_fp8
def test_full_and_arbitrary_masks(device, fp8):
    batch = make_paged_batch(
        [90, 3], [30, 13], [0, 0], page_size=32, dtype=BF16, device=device, fp8=fp8
    )
    batch.mask = Mask.full()
    check_against_reference(hstu_attention, batch, backward=False)
    spans = torch.randint(0, 120, (43, 4), dtype=torch.int32, device=device)
    batch.mask = Mask.from_row_spans(spans)
    check_against_reference(hstu_attention, batch, backward=False)


@with_and_without_fp8
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("size", [128, 125], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("group", [1, 3])
def test_dense_bias(device, group, size, dtype, fp8):
    """Columns of a bias count cached keys, new history and targets, one after the other."""
    batch = make_paged_batch(
        [90, 3, 24],
        [30, 13, 0],
        [5, 0, 70],
        page_size=32,
        dtype=BF16,
        device=device,
        target_group_size=group,
        fp8=fp8,
    )
    batch.max_seqlen_k = size
    for shape in ((3, 1), (1, 2)):
        rab = torch.randn(*shape, size, size, dtype=dtype, device=device).expand(3, -1, -1, -1)
        check_against_reference(hstu_attention, batch.with_bias(DenseBias(rab)), backward=False)


@pytest.mark.gpu
@pytest.mark.parametrize("history", [336, 337, 340, 383, 384, 0], ids="history-{}".format)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_a_dense_bias_whose_targets_begin_anywhere(monkeypatch, capfd, dim, history):
    """Sm90 copies no tile of the bias that begins between multiples of 16 bytes."""
    monkeypatch.setenv("HSTU_ATTN_DEBUG", "1")
    batch = make_paged_batch(
        [max(0, history - 36), 129],
        [min(36, history), 3],
        [200, 150],
        page_size=32,
        dim=dim,
        dtype=BF16,
        device="cuda",
    )
    size = batch.max_seqlen_k + -batch.max_seqlen_k % 8
    batch.max_seqlen_k = size
    rab = torch.randn(2, 2, size, size, dtype=BF16, device="cuda")
    batch = batch.with_bias(DenseBias(rab))
    check_against_reference(hstu_attention, batch, backward=False)
    assert f"paged forward by sm{os.environ['HSTU_ATTN_FORCE_ARCH']}\n" in capfd.readouterr().err
    # Entries of the bias outside the sequences are never used.
    out = run(hstu_attention, batch)["out"]
    for b, length in enumerate(batch.cu_seqlens_k.diff().tolist()):
        rab[b, :, length:] = rab[b, :, :, length:] = torch.nan
    assert torch.equal(run(hstu_attention, batch)["out"], out)


@with_and_without_fp8
def test_relative_bias(device, fp8):
    batch = make_paged_batch(
        [90, 3], [30, 13], [5, 0], page_size=32, dtype=BF16, device=device, fp8=fp8
    )
    total_k = int(batch.cu_seqlens_k[-1])
    times = torch.randint(0, 10**6, (total_k,), device=device)
    relative = RelativeBias(
        torch.randn(2, 99, device=device), torch.randn(1, 40, device=device), times
    )
    check_against_reference(hstu_attention, batch.with_bias(relative), backward=False)


@with_and_without_fp8
def test_history_without_a_token_has_no_page(device, fp8):
    """The history is empty (h = 0), and candidates see only themselves."""
    batch = make_paged_batch(
        [0, 40], [0, 2], [5, 3], page_size=16, dtype=BF16, device=device, fp8=fp8
    )
    assert batch.paged_kv.page_offsets[:2].tolist() == [0, 0]
    assert batch.paged_kv.last_page_lens[0] == 0
    check_against_reference(hstu_attention, batch, backward=False)


@with_and_without_fp8
def test_history_that_ends_with_its_page(device, fp8):
    batch = make_paged_batch(
        [30, 64], [2, 0], [3, 3], page_size=32, dtype=BF16, device=device, fp8=fp8
    )
    assert batch.paged_kv.last_page_lens.tolist() == [32, 32]
    check_against_reference(hstu_attention, batch, backward=False)


@with_and_without_fp8
def test_no_rows_in_the_batch(device, fp8):
    batch = make_paged_batch(
        [30, 64], [0, 0], [0, 0], page_size=32, dtype=BF16, device=device, fp8=fp8
    )
    assert run(hstu_attention, batch)["out"].shape == (0, 2, 32)


def serving_names(batch: Batch) -> PagedKV:
    pages = batch.paged_kv
    return PagedKV(
        pages.kv_cache,
        kv_indptr=pages.page_offsets,
        kv_indices=pages.page_ids,
        kv_last_page_len=pages.last_page_lens,
    )


def test_both_families_of_names_and_the_drop_in(device):
    batch = make_paged_batch([90, 3], [30, 13], [5, 0], page_size=32, dtype=BF16, device=device)
    expected = run(hstu_attention, batch)["out"]
    renamed = replace(batch, paged_kv=serving_names(batch))
    assert torch.equal(run(hstu_attention, renamed)["out"], expected)
    pages = batch.paged_kv
    dropped_in = hstu_attn_varlen_func(
        batch.q,
        batch.k,
        batch.v,
        batch.cu_seqlens_q,
        batch.cu_seqlens_k,
        None,
        None,
        batch.max_seqlen_q,
        batch.max_seqlen_k,
        -1,
        None,
        batch.mask.num_targets,
        1,
        (-1, 0),
        batch.alpha,
        None,
        False,
        pages.kv_cache,
        pages.page_offsets,
        pages.page_ids,
        pages.last_page_lens,
    )
    assert torch.equal(dropped_in, expected)


def test_index_dtypes_mix(device):
    batch = make_paged_batch([90, 3], [30, 13], [5, 0], page_size=32, dtype=BF16, device=device)
    expected = run(hstu_attention, batch)["out"]
    pages = batch.paged_kv
    batch.paged_kv = PagedKV(
        pages.kv_cache, pages.page_offsets.long(), pages.page_ids, pages.last_page_lens.long()
    )
    assert torch.equal(run(hstu_attention, batch)["out"], expected)
    batch.paged_kv = PagedKV(
        pages.kv_cache, pages.page_offsets, pages.page_ids.long(), pages.last_page_lens
    )
    assert torch.equal(run(hstu_attention, batch)["out"], expected)


@with_and_without_fp8
def test_a_cache_that_is_a_slice(device, fp8):
    """The cache is one layer of a cache of many layers."""
    batch = make_paged_batch(
        [90, 3], [30, 13], [5, 0], page_size=32, dtype=BF16, device=device, fp8=fp8
    )
    expected = run(hstu_attention, batch)["out"]
    pages = batch.paged_kv
    layers = torch.full((pages.kv_cache.shape[0], 3, *pages.kv_cache.shape[1:]), float("nan"))
    layers = layers.to(pages.kv_cache)
    layers[:, 1] = pages.kv_cache
    scales = pages.kv_scales
    if scales is not None:
        scales = torch.stack([scales, scales * float("nan")], 1)[:, 0]
    batch.paged_kv = PagedKV(
        layers[:, 1], pages.page_offsets, pages.page_ids, pages.last_page_lens, scales
    )
    assert torch.equal(run(hstu_attention, batch)["out"], expected)


@pytest.mark.parametrize("shift", [1, 8])
@pytest.mark.parametrize("dim", [32, 40])
def test_e4m3_pages_that_are_not_aligned(device, dim, shift):
    batch = make_paged_batch(
        [90, 3], [30, 13], [5, 0], page_size=32, dim=dim, dtype=BF16, device=device, fp8=True
    )
    expected = run(hstu_attention, batch)["out"]
    pages = batch.paged_kv
    elements = pages.kv_cache.view(torch.uint8)
    wide = torch.zeros((*elements.shape[:-1], dim + 24), dtype=torch.uint8, device=device)
    wide[..., shift : shift + dim] = elements
    batch.paged_kv = PagedKV(
        wide.view(FP8)[..., shift : shift + dim],
        *(pages.page_offsets, pages.page_ids, pages.last_page_lens, pages.kv_scales),
    )
    assert torch.equal(run(hstu_attention, batch)["out"], expected)


@with_and_without_fp8
def test_gradients_are_refused(device, fp8):
    batch = make_paged_batch([9], [3], [0], dtype=BF16, device=device, fp8=fp8)
    with pytest.raises(NotImplementedError, match="paged_kv"):
        run(hstu_attention, batch, torch.ones_like(batch.q))
    with torch.no_grad():
        assert torch.isfinite(run(hstu_attention, batch)["out"]).all()


# ---------------------------------------------------------------------------------------------
# Many tiles, on a GPU
# ---------------------------------------------------------------------------------------------


@with_and_without_fp8
@pytest.mark.gpu
@pytest.mark.parametrize("blocks", TILES)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_many_tiles(dim, page_size, blocks, fp8):
    """Histories end in the middle of tiles and pages, and at their ends."""
    batch = make_paged_batch(
        [1500, 0, 512, 700, 129],
        [37, 150, 0, 1, 3],
        [160, 30, 64, 0, 190],
        page_size=page_size,
        heads=1,
        dim=dim,
        dtype=BF16,
        device="cuda",
        fp8=fp8,
    )
    check_against_reference(hstu_attention, with_tiles(batch, blocks), backward=False)


@with_and_without_fp8
@pytest.mark.gpu
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_many_short_histories(dim, fp8):
    """There are more row tiles than multiprocessors, and on Hopper no list of work tiles."""
    counts = [[int(torch.randint(n, ())) for _ in range(150)] for n in (200, 30, 60)]
    batch = make_paged_batch(*counts, page_size=32, dim=dim, dtype=BF16, device="cuda", fp8=fp8)
    check_against_reference(hstu_attention, batch, backward=False)


@with_and_without_fp8
@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("bias", [None, "rab", "relative"])
@pytest.mark.parametrize("blocks", TILES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_every_paged_kernel(dim, blocks, bias, dtype, fp8):
    batch = batch_for_kernel(dim, blocks, bias, dtype, fp8)
    check_small_batch(hstu_attention, batch, backward=False)


def batch_for_kernel(
    dim: int, blocks: str, bias: str | None, dtype: torch.dtype, fp8: bool
) -> Batch:
    is_split = "split" in blocks  # splits need enough keys
    batch = make_paged_batch(
        [3500 if is_split else 300, 40],
        [37, 70],
        [80, 9],
        page_size=32,
        dim=dim,
        dtype=dtype,
        device="cuda",
        fp8=fp8,
    )
    batch = with_tiles(batch, blocks)
    if bias == "relative":
        times = torch.randint(10**4, (int(batch.cu_seqlens_k[-1]),), device="cuda").cumsum(0)
        tables = torch.randn(1, 999, device="cuda"), torch.randn(2, 64, device="cuda")
        return batch.with_bias(RelativeBias(*tables, times))
    if bias == "rab":
        batch.max_seqlen_k += -batch.max_seqlen_k % 8  # TMA needs rows of a multiple of 16 bytes
        shape = (2, 1, batch.max_seqlen_k, batch.max_seqlen_k)
        batch = batch.with_bias(DenseBias(torch.randn(shape, device="cuda", dtype=dtype)))
    return batch


@with_and_without_fp8
@pytest.mark.gpu
@pytest.mark.parametrize("bias", [None, "rab", "relative"])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_small_shared_memory(monkeypatch, dim, bias, fp8):
    """GPUs of compute capability 8.6, 8.9 and 12.0 have 99 KB for a block."""
    monkeypatch.setenv("HSTU_ATTN_SHARED_MEMORY", "101376")
    batch = batch_for_kernel(dim, "1 block", bias, BF16, fp8)
    check_against_reference(hstu_attention, batch, backward=False)


@with_and_without_fp8
@pytest.mark.gpu
@pytest.mark.parametrize("blocks", TILES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_the_shape_of_a_call_chooses_its_kernel(dim, blocks, fp8):
    """Checks that the other tests run the kernels that they are meant for."""
    if os.environ["HSTU_ATTN_FORCE_ARCH"] != "90":
        pytest.skip("sm80 has one form")
    if torch.cuda.get_device_properties(0).multi_processor_count != 132:
        pytest.skip("the numbers of tiles are for 132 multiprocessors")
    batch = batch_for_kernel(dim, blocks, None, BF16, fp8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(hstu_attention, batch)
        torch.cuda.synchronize()
    [name] = {event.name for event in profile.events() if "run_forward" in event.name}
    # Forward<head dim, element, key source, bias, (SplitKVReduction)n, cluster size, ...>
    found = re.search(r"::(\w+), \S*::NoScoreBias, \(\S+\)(\d), \D*(\d+), ", name)
    assert found, name
    reduction, cluster_size = {"8 blocks": ("1", "8"), "4 blocks": ("1", "4")}.get(
        blocks, ("2" if "split" in blocks else "0", "1")
    )
    assert found.groups() == (
        "QuantizedPagedKeys" if fp8 else "PagedKeys",
        reduction,
        cluster_size,
    )


@with_and_without_fp8
@pytest.mark.gpu
def test_rows_that_no_sequence_has(fp8):
    """In a call with splits and a far too large buffer, the rows of no sequence are zero."""
    batch = batch_for_kernel(64, "two splits", None, BF16, fp8)
    expected = run(hstu_attention, batch)["out"]
    larger = 100_000
    q, k, v = (x.new_zeros(larger, *x.shape[1:]) for x in (batch.q, batch.k, batch.v))
    for to, source in ((q, batch.q), (k, batch.k), (v, batch.v)):
        to[: len(source)] = source
    out = run(hstu_attention, replace(batch, q=q, k=k, v=v))["out"]
    assert torch.equal(out[: len(expected)], expected)
    assert not out[len(expected) :].any()


@with_and_without_fp8
@pytest.mark.gpu
@pytest.mark.parametrize("blocks", TILES)
@pytest.mark.parametrize("dim", [64, 256])
def test_a_request_gets_the_same_bits_beside_others(dim, blocks, fp8):
    """A request has the same bits with other users in a batch of the same shape."""
    cached, new, targets = [1500, 700, 129, 3000], [37, 1, 3, 100], [150, 70, 190, 64]
    batch = make_paged_batch(
        cached,
        new,
        targets,
        page_size=64,
        heads=1,
        dim=dim,
        dtype=BF16,
        device="cuda",
        fp8=fp8,
    )
    batch = with_tiles(batch, blocks)
    out = run(hstu_attention, batch)["out"]
    first, last = batch.cu_seqlens_q[1:3].tolist()
    pages = batch.paged_kv
    page_offsets = pages.page_offsets.clone()
    page_offsets[2:] = page_offsets[2]
    page_offsets[1:] -= page_offsets[1].item()
    alone = replace(
        batch,
        q=batch.q[first:last],
        k=batch.k[first:last],
        v=batch.v[first:last],
        cu_seqlens_q=(batch.cu_seqlens_q - first).clamp(0, last - first),
        cu_seqlens_k=(batch.cu_seqlens_k - batch.cu_seqlens_k[1]).clamp(
            0, int(batch.cu_seqlens_k[2] - batch.cu_seqlens_k[1])
        ),
        paged_kv=PagedKV(
            pages.kv_cache,
            page_offsets,
            pages.page_ids[int(pages.page_offsets[1]) :],
            pages.last_page_lens,
            pages.kv_scales,
        ),
    )
    assert torch.equal(run(hstu_attention, alone)["out"], out[first:last])


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", TILES)
def test_a_captured_step_serves_other_users(blocks):
    """A captured append and attention are replayed with other lengths, pages and values."""
    shapes = [([300, 90], [30, 5], [70, 20]), ([0, 700], [60, 1], [0, 64])]
    batches = []
    for cached, new, targets in shapes:
        batch = make_paged_batch(
            cached, new, targets, page_size=32, dim=64, dtype=BF16, device="cuda"
        )
        batches.append(replace(with_tiles(batch, blocks), max_seqlen_k=50_000))
    rows, pages = 128, 64
    cache = torch.zeros(pages, 2, 32, 2, 64, dtype=BF16, device="cuda")
    q, k, v = torch.zeros(3, rows, 2, 64, dtype=BF16, device="cuda")
    ids = torch.zeros(pages, dtype=torch.int32, device="cuda")
    static = replace(
        batches[0], q=q, k=k, v=v, cu_seqlens_q=batches[0].cu_seqlens_q.clone(),
        cu_seqlens_k=batches[0].cu_seqlens_k.clone(),
        mask=replace(batches[0].mask, num_targets=batches[0].mask.num_targets.clone()),
        paged_kv=PagedKV(
            cache,
            batches[0].paged_kv.page_offsets.clone(),
            ids,
            batches[0].paged_kv.last_page_lens.clone(),
        ),
    )  # fmt: skip

    def fill(batch: Batch) -> None:
        for to, source in ((q, batch.q), (k, batch.k), (v, batch.v)):
            to[: len(source)] = source
        found = batch.paged_kv
        cache[: len(found.kv_cache)] = found.kv_cache
        ids[: len(found.page_ids)] = found.page_ids
        for name in ("page_offsets", "last_page_lens"):
            getattr(static.paged_kv, name).copy_(getattr(found, name))
        static.cu_seqlens_q.copy_(batch.cu_seqlens_q)
        static.cu_seqlens_k.copy_(batch.cu_seqlens_k)
        targets = batch.mask.num_targets
        static.mask.num_targets.copy_(torch.zeros(2) if targets is None else targets)

    def step() -> torch.Tensor:
        append_paged_kv(
            k,
            v,
            static.paged_kv,
            cu_seqlens_q=static.cu_seqlens_q,
            cu_seqlens_k=static.cu_seqlens_k,
            num_targets=static.mask.num_targets,
        )
        return run(hstu_attention, static)["out"]

    graph = torch.cuda.CUDAGraph()
    fill(batches[0])
    step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = step()
    for batch in (*batches, batches[0]):
        batch.k.uniform_(-1, 1)  # new history is appended, so it is not NaN
        batch.v.uniform_(-1, 1)
        fill(batch)
        graph.replay()
        replayed = captured.clone()
        fill(batch)
        assert torch.equal(step(), replayed)
        count = len(batch.q)
        assert replayed[:count].any()
        assert not replayed[count:].any()


@with_and_without_fp8
@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.parametrize("blocks", TILES)
@pytest.mark.parametrize(
    ("name", "index", "value"),
    [
        ("page_ids", 1, 10**6),
        ("page_ids", 0, -5),
        ("page_offsets", 1, 10**6),
        ("page_offsets", 0, -7),
        ("page_offsets", 1, 1),
        ("cu_seqlens_q", 1, 10**6),
        ("cu_seqlens_k", 1, 10**6),
        ("cu_seqlens_k", 1, 3),
        ("num_targets", 0, 10**6),
        ("num_targets", 1, -3),
    ],
)
def test_wrong_tables_stay_in_bounds(name, index, value, blocks, fp8):
    """Kernels read nothing outside the tensors and write only the output."""
    batch = make_paged_batch(
        [90, 300],
        [30, 13],
        [5, 70],
        page_size=32,
        dim=64,
        dtype=BF16,
        device="cuda",
        fp8=fp8,
    )
    batch = with_tiles(batch, blocks)
    tables = {
        "page_ids": batch.paged_kv.page_ids,
        "page_offsets": batch.paged_kv.page_offsets,
        "cu_seqlens_q": batch.cu_seqlens_q,
        "cu_seqlens_k": batch.cu_seqlens_k,
        "num_targets": batch.mask.num_targets,
    }
    tables[name][index] = value
    before = batch.paged_kv.kv_cache.clone()
    run(hstu_attention, batch)
    torch.cuda.synchronize()
    assert torch.equal(batch.paged_kv.kv_cache.view(torch.uint8), before.view(torch.uint8))
