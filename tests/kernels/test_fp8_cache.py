"""Tests of serving with a float8_e4m3fn cache: its contents, and results computed from it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from hstu_attn.layer import HSTULayerConfig, HSTUStack
from hstu_attn.paged import append_paged_kv, dequantize_rows, quantize_rows

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
from hstu_attn.serving import CachedRows, Engine, PagedKVCache, StepTensors
from tests.helpers.serving_models import (
    RANKING,
    RETRIEVAL,
    SPOILT,
    make_model,
    on_device,
    some_events,
)

FP8 = torch.float8_e4m3fn
LAYERS, PAGE, HEADS, DIM = 2, 16, 2, 16


def make_cache(num_pages: int, device: str = "cpu", **options: Any) -> PagedKVCache:
    return PagedKVCache(LAYERS, num_pages, PAGE, HEADS, DIM, FP8, device, **options)


def kept(x: Tensor) -> Tensor:
    """Returns rows after quantization and dequantization, as a cache does."""
    return dequantize_rows(*quantize_rows(x))


def held(cache: PagedKVCache, layer: int, ids: list[int], length: int) -> Tensor:
    """Returns a user's keys and values `(2, length, heads, dim)`."""
    assert cache.kv_scales is not None
    whole = dequantize_rows(cache.kv_cache[layer], cache.kv_scales[layer])[ids]
    return whole.transpose(0, 1).flatten(1, 2)[:, :length]


@pytest.mark.slow
@pytest.mark.parametrize("host_pages", [0, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_steps(device: str, dtype: torch.dtype, host_pages: int) -> None:
    """Elements and scales equal those of the appended rows, also after a user was on the host."""
    rng = random.Random(torch.initial_seed())
    cache = make_cache(9, device, host_pages=host_pages)
    written: dict[int, Tensor] = {}  # (layers, 2, tokens, heads, dim)
    nothing = torch.empty(LAYERS, 2, 0, HEADS, DIM, dtype=dtype, device=device)
    found = 0
    for _ in range(150):
        users = rng.sample(range(8), rng.choice([1, 2]))
        counts = [rng.choice([0, 1, 20]) for _ in users]
        for user in users:
            if cache.lookup([user])[0] > 40:
                cache.free([user])
        cached = cache.lookup(users).tolist()
        new = [
            torch.randn(LAYERS, 2, count, HEADS, DIM, device=device).to(dtype) for count in counts
        ]
        with cache.step(users, counts) as step:
            for layer in range(LAYERS):
                k, v = torch.cat([part[layer] for part in new], 1)
                step.append(layer, k, v)
        for user, before, part in zip(users, cached, new, strict=True):
            known = written.get(user, nothing) if before else nothing
            assert known.shape[2] == before
            found += before > 0
            written[user] = torch.cat([known, part], 2)
            length, ids = written[user].shape[2], cache._table.pages(user)
            for layer in range(LAYERS):
                assert torch.equal(held(cache, layer, ids, length), kept(written[user][layer]))
    assert found > 20
    assert (cache.stats().host_hits > 0) == (host_pages > 0)


def test_the_host_tier_counts_scales() -> None:
    cache = make_cache(2, host_pages=2)
    for user in (1, 2, 3):
        with cache.step([user], [PAGE]) as step:
            for layer in range(LAYERS):
                step.append(layer, *torch.randn(2, PAGE, HEADS, DIM))
    assert cache.stats().bytes_to_host == LAYERS * 2 * PAGE * HEADS * (DIM + 4)


def test_other_rows_are_refused() -> None:
    cache = make_cache(2)
    assert PagedKVCache(1, 1, 16, 1, 8, torch.bfloat16, "cpu").kv_scales is None
    with pytest.raises(ValueError, match=r"^k: expected shape"), cache.step([1], [3]) as step:
        step.append(0, *torch.zeros(2, 3, HEADS, DIM).to(FP8))
    with pytest.raises(ValueError, match=r"^v: expected shape"), cache.step([1], [3]) as step:
        step.append(0, torch.zeros(3, HEADS, DIM), torch.zeros(3, HEADS, DIM, dtype=torch.int32))
    tables = (torch.zeros(count, dtype=torch.int32) for count in (2, 0, 1, 1))
    pages = StepTensors(cache.kv_cache, *tables).paged_kv(0)
    rows, offsets = torch.zeros(0, HEADS, DIM), pages.page_offsets
    with pytest.raises(ValueError, match=r"^kv_scales: expected a tensor .*got None"):
        append_paged_kv(rows, rows, pages, cu_seqlens_q=offsets, cu_seqlens_k=offsets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cached_layers(device: str, dtype: torch.dtype) -> None:
    """Targets over an e4m3 cache equal those over a plain cache of the same values."""
    if device != "cpu" and dtype != torch.bfloat16:
        pytest.skip("a GPU has no kernels of this dtype")
    config = HSTULayerConfig(
        embedding_dim=24, num_heads=HEADS, hidden_dim=DIM, attention_dim=DIM, scaling_seqlen=50
    )
    stack = HSTUStack(config, LAYERS, device=device).eval()
    x = torch.randn(60, 24, device=device).to(dtype)
    cache = make_cache(8, device)
    assert cache.kv_scales is not None
    with cache.step([1, 2], [30, 17]) as step:
        offsets = torch.tensor([0, 30, 47], device=device)
        stack.forward_cached(x[:47], CachedRows(step, offsets, 30, 30))
    with cache.step([2, 1], [0, 0]) as step:
        offsets = torch.tensor([0, 6, 13], device=device)
        targets = torch.tensor([6, 7], device=device)
        y = stack.forward_cached(x[47:], CachedRows(step, offsets, 7, 40, targets))
        plain = StepTensors(
            dequantize_rows(cache.kv_cache, cache.kv_scales).to(dtype),
            *(step.page_offsets, step.page_ids, step.last_page_lens, step.cached_lens),
        )
        expected = stack.forward_cached(x[47:], CachedRows(plain, offsets, 7, 40, targets))
    assert y.dtype == dtype
    if device == "cpu":
        assert torch.equal(y, expected)
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("host_pages", [0, 40])
@pytest.mark.parametrize("name", [*RETRIEVAL, *RANKING])
def test_engines(name: str, host_pages: int, device: str) -> None:
    """The scores, with graphs and without, are close to those with a plain cache."""
    dtype = torch.bfloat16
    model = on_device(make_model(name, dtype), device)
    rng = random.Random(torch.initial_seed())

    def engine(cache_dtype: torch.dtype, **options: Any) -> Engine:
        pages = 8 if host_pages else 24
        cache = PagedKVCache(
            LAYERS, pages, PAGE, HEADS, DIM, cache_dtype, device, host_pages=host_pages
        )
        return Engine(model, cache, max_batch_size=4, **options)

    plain, quantized, captured = engine(dtype), engine(FP8), engine(FP8, graphs=True)
    errors, sizes = [], []
    with plain, quantized, captured:
        for turn in range(40):
            events = some_events(rng, turn * 10**6, rng.choice([1, 2, 9]), model.num_actions)
            candidates = [rng.randrange(SPOILT) for _ in range(5)]
            user = rng.randrange(6)
            exact, scores, replayed = (
                e.score(user, events, candidates, at=(turn + 1) * 10**6).float().cpu()
                for e in (plain, quantized, captured)
            )
            torch.testing.assert_close(replayed, scores, rtol=3e-2, atol=3e-2 * scores.abs().max())
            errors.append((scores - exact).square().mean())
            sizes.append(exact.square().mean())
    assert 0 < torch.stack(errors).mean() < 0.05 * torch.stack(sizes).mean()
