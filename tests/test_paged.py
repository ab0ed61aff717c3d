"""A paged KV cache against the reference, and against the same keys without pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hstu_attn import DenseBias, Mask, PagedKV, RelativeBias, hstu_attention, hstu_attn_varlen_func
from hstu_attn.paged import PAGE_SIZES
from hstu_attn.testing import Batch, check_against_reference, make_paged_batch, run

BF16 = torch.bfloat16


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize(
    ("new", "targets"),
    [([40, 3, 1], [0, 0, 0]), ([0, 0, 0], [70, 3, 1]), ([33, 0, 5], [7, 64, 0])],
    ids=["new-history", "targets-alone", "both"],
)
def test_every_page_size(device, page_size, new, targets):
    batch = make_paged_batch(
        [300, 16, 0], new, targets, page_size=page_size, dtype=BF16, device=device
    )
    check_against_reference(hstu_attention, batch, backward=False)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.float64], ids=["fp32", "fp16", "fp64"]
)
@pytest.mark.parametrize("dim", [32, 128, 40])
def test_dtypes_and_head_dims(dtype, dim):
    batch = make_paged_batch([90, 200], [30, 1], [9, 0], page_size=32, dim=dim, dtype=dtype)
    check_against_reference(hstu_attention, batch, backward=False)


@pytest.mark.parametrize("window", [(-1, 0), (50, 0)], ids=["causal", "window"])
@pytest.mark.parametrize("group", [1, 4])
def test_masks(device, window, group):
    batch = make_paged_batch(
        [90, 3, 64],
        [30, 13, 0],
        [20, 7, 33],
        page_size=32,
        dtype=BF16,
        device=device,
        window=window,
        target_group_size=group,
    )
    check_against_reference(hstu_attention, batch, backward=False)
    contexts = torch.tensor([4, 16, 0], dtype=torch.int32, device=device)
    batch.mask = replace(batch.mask, num_contexts=contexts)
    check_against_reference(hstu_attention, batch, backward=False)


def test_full_and_arbitrary_masks(device):
    batch = make_paged_batch([90, 3], [30, 13], [0, 0], page_size=32, dtype=BF16, device=device)
    batch.mask = Mask.full()
    check_against_reference(hstu_attention, batch, backward=False)
    spans = torch.randint(0, 120, (43, 4), dtype=torch.int32, device=device)
    batch.mask = Mask.from_row_spans(spans)
    check_against_reference(hstu_attention, batch, backward=False)


def test_biases(device):
    batch = make_paged_batch([90, 3], [30, 13], [5, 0], page_size=32, dtype=BF16, device=device)
    size = batch.max_seqlen_k
    batch.bias = None
    rab = torch.randn(2, 1, size, size, dtype=BF16, device=device)
    check_against_reference(hstu_attention, batch.with_bias(DenseBias(rab)), backward=False)
    total_k = int(batch.cu_seqlens_k[-1])
    times = torch.randint(0, 10**6, (total_k,), device=device)
    relative = RelativeBias(
        torch.randn(2, 99, device=device), torch.randn(1, 40, device=device), times
    )
    check_against_reference(hstu_attention, batch.with_bias(relative), backward=False)


def test_history_without_a_token_has_no_page(device):
    """h = 0: nothing cached, nothing new, and candidates that see only themselves."""
    batch = make_paged_batch([0, 40], [0, 2], [5, 3], page_size=16, dtype=BF16, device=device)
    assert batch.paged_kv.page_offsets[:2].tolist() == [0, 0]
    assert batch.paged_kv.last_page_lens[0] == 0
    check_against_reference(hstu_attention, batch, backward=False)


def test_history_that_ends_with_its_page(device):
    batch = make_paged_batch([30, 64], [2, 0], [3, 3], page_size=32, dtype=BF16, device=device)
    assert batch.paged_kv.last_page_lens.tolist() == [32, 32]
    check_against_reference(hstu_attention, batch, backward=False)


def test_no_rows_in_the_batch(device):
    batch = make_paged_batch([30, 64], [0, 0], [0, 0], page_size=32, dtype=BF16, device=device)
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


def test_a_cache_that_is_a_slice(device):
    """One layer of a cache of many layers."""
    batch = make_paged_batch([90, 3], [30, 13], [5, 0], page_size=32, dtype=BF16, device=device)
    expected = run(hstu_attention, batch)["out"]
    pages = batch.paged_kv
    layers = torch.full((pages.kv_cache.shape[0], 3, *pages.kv_cache.shape[1:]), float("nan"))
    layers = layers.to(pages.kv_cache)
    layers[:, 1] = pages.kv_cache
    batch.paged_kv = PagedKV(layers[:, 1], pages.page_offsets, pages.page_ids, pages.last_page_lens)
    assert torch.equal(run(hstu_attention, batch)["out"], expected)


def test_gradients_are_refused(device):
    batch = make_paged_batch([9], [3], [0], dtype=BF16, device=device)
    with pytest.raises(NotImplementedError, match="paged_kv"):
        run(hstu_attention, batch, torch.ones_like(batch.q))
    with torch.no_grad():
        assert torch.isfinite(run(hstu_attention, batch)["out"]).all()


# ---------------------------------------------------------------------------------------------
# Bad input
# ---------------------------------------------------------------------------------------------

CACHE = torch.zeros(4, 2, 16, 2, 32)
INTS = torch.zeros(3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("kv_cache", {"kv_cache": None}),
        ("kv_cache", {"kv_cache": CACHE[:, 0]}),
        ("kv_cache", {"kv_cache": CACHE[:, :1]}),
        ("kv_cache", {"kv_cache": CACHE[:, :, :15]}),
        ("page_offsets", {"page_offsets": None}),
        ("page_offsets", {"kv_indptr": INTS}),
        ("page_offsets", {"page_offsets": INTS[:2]}),
        ("page_offsets", {"page_offsets": [0, 1, 2]}),
        ("page_ids", {"page_ids": None}),
        ("page_ids", {"page_ids": INTS[None]}),
        ("page_ids", {"kv_indices": INTS}),
        ("last_page_lens", {"last_page_lens": None}),
        ("last_page_lens", {"kv_last_page_len": INTS}),
    ],
)
def test_bad_caches_are_refused(name, arguments):
    good = {
        "kv_cache": CACHE,
        "page_offsets": INTS,
        "page_ids": INTS,
        "last_page_lens": INTS[:2],
    }
    PagedKV(**good)
    with pytest.raises(ValueError, match=rf"^{name}: expected .*got "):
        PagedKV(**{**good, **arguments})


def refuse(batch: Batch, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}: expected .*got "):
        run(hstu_attention, batch)


def test_pages_that_do_not_fit_the_lengths_are_refused():
    def fresh() -> Batch:
        return make_paged_batch([40, 16], [3, 0], [5, 2])

    batch = fresh()
    batch.paged_kv.page_ids[1] = 99
    refuse(batch, "page_ids")
    batch = fresh()
    batch.paged_kv.page_ids[0] = -1
    refuse(batch, "page_ids")
    batch = fresh()
    batch.paged_kv.page_offsets[1] -= 1
    refuse(batch, "page_offsets")
    batch = fresh()
    batch.paged_kv.page_offsets[-1] += 1
    refuse(batch, "page_offsets")
    batch = fresh()
    batch.paged_kv.last_page_lens[0] = 16
    refuse(batch, "last_page_lens")
    batch = fresh()
    batch.mask.num_targets[1] = 3
    refuse(batch, "num_targets")
    batch = fresh()
    batch.paged_kv.kv_cache = batch.paged_kv.kv_cache.half()
    refuse(batch, "kv_cache")
    batch = fresh()
    batch.paged_kv.kv_cache = batch.paged_kv.kv_cache[:, :, :, :1]
    refuse(batch, "kv_cache")
    batch = fresh()
    batch.paged_kv.kv_cache = batch.paged_kv.kv_cache.transpose(3, 4).contiguous().transpose(3, 4)
    refuse(batch, "kv_cache")
    batch = fresh()
    batch.paged_kv.page_ids = batch.paged_kv.page_ids.float()
    refuse(batch, "page_ids")
    batch = fresh()
    refuse(replace(batch, v=torch.zeros(batch.v.shape[0], 2, 16)), "v")
