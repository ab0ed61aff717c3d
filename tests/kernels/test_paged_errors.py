"""Tests of invalid arguments of calls with a paged KV cache."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hstu_attn import PagedKV, RelativeBias, append_paged_kv, hstu_attention
from hstu_attn.testing import Batch, make_paged_batch, run

FP8 = torch.float8_e4m3fn
CACHE = torch.zeros(4, 2, 16, 2, 32)
SCALES = torch.ones(4, 2, 16, 2)
INTS = torch.zeros(3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("page_offsets", {"page_offsets": None}),
        ("page_offsets", {"kv_indptr": INTS}),
        ("page_ids", {"page_ids": None}),
        ("page_ids", {"kv_indices": INTS}),
        ("last_page_lens", {"last_page_lens": None}),
        ("last_page_lens", {"kv_last_page_len": INTS}),
    ],
)
def test_missing_tables_and_two_names_are_refused(name, arguments):
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


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("kv_cache", {"kv_cache": [1.0]}),
        ("kv_cache", {"kv_cache": CACHE[:, 0]}),
        ("kv_cache", {"kv_cache": CACHE[:, :1]}),
        ("kv_cache", {"kv_cache": CACHE[:, :, :15]}),
        ("page_offsets", {"page_offsets": INTS[None]}),
        ("page_offsets", {"page_offsets": [0, 1, 2]}),
        ("page_ids", {"page_ids": INTS[None]}),
        ("last_page_lens", {"last_page_lens": INTS[None]}),
        ("kv_scales", {"kv_scales": SCALES}),
        ("kv_scales", {"kv_cache": CACHE.to(FP8)}),
        ("kv_scales", {"kv_cache": CACHE.to(FP8), "kv_scales": 1.0}),
        ("kv_scales", {"kv_cache": CACHE.to(FP8), "kv_scales": SCALES[1:]}),
        ("kv_scales", {"kv_cache": CACHE.to(FP8), "kv_scales": SCALES.double()}),
    ],
)
def test_bad_caches_are_refused(name, arguments):
    """Attention and, except for `last_page_lens`, the append refuse bad caches."""
    pages = {"kv_cache": CACHE, "page_offsets": INTS, "page_ids": INTS, "last_page_lens": INTS[:2]}
    paged_kv = PagedKV(**{**pages, **arguments})
    x, cu_seqlens = torch.zeros(0, 2, 32), INTS
    with pytest.raises(ValueError, match=rf"^{name}: expected .*got "):
        hstu_attention(x, x, x, cu_seqlens_q=cu_seqlens, max_seqlen_q=1, paged_kv=paged_kv)
    if name != "last_page_lens":
        with pytest.raises(ValueError, match=rf"^{name}: expected .*got "):
            append_paged_kv(x, x, paged_kv, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)


@pytest.mark.parametrize("missing", [1, 64])
def test_every_key_has_a_time(missing):
    batch = make_paged_batch([40, 16], [3, 0], [5, 2])
    keys = int(batch.cu_seqlens_k[-1])
    times = torch.zeros(keys, dtype=torch.int64)
    run(hstu_attention, batch.with_bias(RelativeBias(None, torch.zeros(1, 4), times)))
    few = batch.with_bias(RelativeBias(None, torch.zeros(1, 4), times[missing:].clone()))
    with pytest.raises(ValueError, match=rf"timestamps: expected a time for each of {keys} keys"):
        run(hstu_attention, few)


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
    scales = batch.paged_kv.kv_cache[..., 0].clone()
    batch.paged_kv.kv_scales = scales
    refuse(batch, "kv_scales")
    batch.paged_kv.kv_cache = batch.paged_kv.kv_cache.to(FP8)
    for wrong in (None, scales[1:], scales.double(), scales.mT.contiguous().mT):
        batch.paged_kv.kv_scales = wrong
        refuse(batch, "kv_scales")
    batch.paged_kv.kv_scales = scales
    batch.paged_kv.kv_cache = batch.paged_kv.kv_cache.to(torch.float8_e5m2)
    refuse(batch, "kv_cache")
    batch = fresh()
    refuse(replace(batch, v=torch.zeros(batch.v.shape[0], 2, 16)), "v")


@pytest.mark.gpu
def test_checked_calls_name_the_wrong_argument_of_pages(monkeypatch):
    monkeypatch.setenv("HSTU_ATTN_CHECK", "1")
    batch = make_paged_batch([40, 16], [3, 0], [5, 2], dtype=torch.bfloat16, device="cuda")
    run(hstu_attention, batch)
    batch.paged_kv.page_ids[1] = 99
    refuse(batch, "page_ids")
