"""Tests that no page of a cache holds data of deleted users."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
from hstu_attn.serving import Engine, MemoryStore, PagedKVCache, Probe, StoreError
from hstu_attn.serving.events import User
from tests.helpers.serving_models import (
    DIM,
    HEADS,
    LAYERS,
    LONGEST,
    POISON,
    Boom,
    Histories,
    assert_close,
    make_cache,
    make_model,
    some_events,
)


def tokens_of(cache: PagedKVCache) -> list[tuple[Tensor, Any]]:
    """Returns each tensor of both tiers as `(layers, pages, 2, page_size, bytes)`, and the table's
    function that tells which of its pages a user has.
    """
    table = cache._table
    found = [(tensor.flatten(2).view(torch.int64), table.pages) for tensor in cache._tensors]
    if cache._host_tier is not None:
        found += [(tensor, table.host_pages) for tensor in cache._host_tier._host_pages]
    size = cache.kv_cache.shape[3]
    return [(t.view(torch.uint8).unflatten(2, (2, size, -1)), pages) for t, pages in found]


def held(cache: PagedKVCache, users: list[int]) -> list[Tensor]:
    """Returns the bytes of the users' tokens in each tensor of both tiers."""
    lengths = cache.lookup(users).tolist()
    parts = []
    for tensor, pages in tokens_of(cache):
        for user, length in zip(users, lengths, strict=True):
            parts.append(tensor[:, pages(user)].transpose(1, 2).flatten(2, 3)[:, :, :length])
    return parts


def assert_nothing_else(cache: PagedKVCache, users: list[int]) -> None:
    """Asserts that exactly the rows of the users' tokens are nonzero."""
    rows = sum(int(part.any(3).sum()) for part in held(cache, users))
    parts = 1 if cache.kv_scales is None else 2
    assert rows == 2 * parts * cache.kv_cache.shape[0] * int(cache.lookup(users).sum())
    assert sum(int(tensor.any(4).sum()) for tensor, _ in tokens_of(cache)) == rows


def clear_host(cache: PagedKVCache) -> None:
    """Zeroes the host pages, because memory that was never written may hold anything."""
    if cache._host_tier is not None:
        for pages in cache._host_tier._host_pages:
            pages.zero_()


@pytest.mark.parametrize("host_pages", [0, 9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.bfloat16])
def test_random_users(dtype: torch.dtype, host_pages: int) -> None:
    """Users are added, grow, are evicted and freed, and steps fail."""
    cache = make_cache(8, dtype, host_pages=host_pages)
    clear_host(cache)
    rng, users = random.Random(host_pages), [*range(6)]
    row_dtype = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype
    for turn in range(120):
        user, count = rng.choice(users), rng.choice([1, 5, 16, 40])
        try:
            with cache.step([user], [count]) as step:
                for layer in range(LAYERS):
                    shape = (len(step.slots), HEADS, DIM)
                    k, v = torch.rand((2, *shape), dtype=row_dtype) + 1
                    step.append(layer, k, v)
                if int(cache.lookup([user])) > 60 or rng.random() < 0.2:
                    raise Boom
        except Boom:
            cache.free([user])
        if turn % 10 == 9:
            before = held(cache, users)
            cache.wipe(users)
            assert_nothing_else(cache, users)
            for part, was in zip(held(cache, users), before, strict=True):
                assert torch.equal(part, was)
    assert cache.stats().evictions > 10


def test_users_who_are_not_named_are_forgotten() -> None:
    cache = make_cache(8, torch.bfloat16)
    for user in range(3):
        with cache.step([user], [20]) as step:
            for layer in range(LAYERS):
                step.append(layer, *torch.ones((2, 20, HEADS, DIM), dtype=torch.bfloat16))
    with cache.step([1], [1]), pytest.raises(ValueError, match="step: expected none to be open"):
        cache.wipe([0, 1, 2])
    cache.wipe([0, 1])
    assert cache.stats().users == 0
    assert not cache.kv_cache.any()


@pytest.mark.parametrize("host_pages", [0, 12])
def test_a_deleted_user_is_in_no_page(host_pages: int) -> None:
    """Pages that the user had before are cleared as well: evicted, truncated, or written by a
    failed request. The cached rows of other users stay.
    """
    model, rng = make_model("retrieval"), random.Random(1)
    cache, store = make_cache(7, host_pages=host_pages), MemoryStore(100, LONGEST)
    clear_host(cache)
    histories = Histories(model)

    def ask(user: int, turn: int, count: int) -> None:
        request = (user, some_events(rng, turn * 10**7, count), [1, 2], None)
        assert_close(engine.score(*request[:3]), histories.expect(*request))

    with Engine(model, cache, store=store) as engine:
        for turn in range(60):
            ask(rng.randrange(5), turn, rng.choice([1, 3, 9]))
            if turn % 15 == 7:
                with pytest.raises(Boom):
                    engine.score(rng.randrange(5), [(POISON, 10**12)], [1])
        assert cache.stats().evictions > 10
        for user in (3, 0):
            engine.forget(user)
            del histories.events[user]
            keys = [history.key for history in engine._histories._known.values()]
            assert_nothing_else(cache, keys)
        assert engine.prune(latest=5) == 3
        assert_nothing_else(cache, [])
        for user, events in histories.events.items():
            histories.events[user] = events[-5:]
        for turn in (60, 61):
            for user in (1, 2):
                ask(user, turn, 2)
        before = engine.stats().recomputed_tokens
        engine.forget(2)
        ask(1, 70, 1)
        assert engine.stats().recomputed_tokens == before + 1  # the last event alone


def test_what_was_pruned_before_the_store_failed_is_in_no_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store deletes the events of some users, and fails with those of others."""
    cache, store = make_cache(6), MemoryStore(100, LONGEST)

    def prune(**_: Any) -> Iterator[list[User]]:
        store.forget(1)
        yield [1]
        raise StoreError("the disk is broken")

    monkeypatch.setattr(store, "prune", prune)
    with Engine(make_model("retrieval"), cache, store=store) as engine:
        for user in range(3):
            engine.score(user, [(1, 1), (2, 2)], [1])
        with pytest.raises(StoreError, match="the disk is broken"):
            engine.prune(before=2)
        assert cache.stats().users == 2
        keys = [history.key for history in engine._histories._known.values()]
        assert_nothing_else(cache, keys)


def test_a_deleted_user_is_in_no_page_of_the_model_before() -> None:
    model = make_model("retrieval")
    first, second = make_cache(6), make_cache(6)
    with Engine(model, first) as engine:
        for user in range(3):
            engine.score(user, [(1, 1), (2, 2)], [1])
        engine.swap(make_model("retrieval"), cache=second, probe=Probe([(1, 1)], [1, 2]))
        for user in range(3):
            engine.score(user, [(1, 3), (2, 4)], [1])
        assert first.kv_cache.any()
        engine.forget(1)
        assert not first.kv_cache.any()
        keys = [history.key for history in engine._histories._known.values()]
        assert_nothing_else(second, keys)
        assert second.stats().users == 2
        engine.roll_back()
        events = np.array([(1, 1, 0), (2, 2, 0), (1, 3, 0), (2, 4, 0)])
        assert_close(engine.score(0, [], [1, 2]), model.whole(events, [1, 2], 4))
