"""Tests of the paged KV cache's host tier: the location of users, synchronization of copies, and
the saved computation. Random operations against a model are in test_paged_cache_model.py.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
from hstu_attn.serving import Engine, OutOfPagesError, PagedKVCache
from hstu_attn.serving.host_tier import HostTier, _runs
from tests.helpers import serving_models
from tests.helpers.paged_caches import (
    DIM,
    HEADS,
    LAYERS,
    PAGE,
    USERS,
    Boom,
    append,
    check_rows,
    fill,
    flat,
    host_cache,
    make_cache,
    page_lists,
    pages_of,
    unchanged,
)

PAGE_BYTES = LAYERS * 2 * PAGE * HEADS * DIM * 8


def places(cache: PagedKVCache) -> dict[int, str]:
    """Returns the location of each user's tokens."""
    table, found = cache._table, {}
    for user in USERS:
        tiers = (table.pages(user), "device"), (table.host_pages(user), "host")
        if there := " and ".join(tier for pages, tier in tiers if pages):
            found[user] = there
    return found


# ---------------------------------------------------------------------------------------------
# Who is where
# ---------------------------------------------------------------------------------------------


def test_users_go_to_the_host_and_come_back():
    cache = make_cache(4, host_pages=4)
    fill(cache, _1=20, _2=30)
    fill(cache, _3=40)
    assert places(cache) == {1: "host", 2: "host", 3: "device"}
    assert cache.lookup([1, 2, 3]).tolist() == [20, 30, 40]
    for user, count in ((1, 20), (2, 30)):
        check_rows(host_cache(cache), cache._table.host_pages(user), list(range(count)))

    with cache.step([1], [3], cached_lens=[20]) as step:
        assert places(cache) == {1: "device and host", 2: "host"}  # and no room for 3
        assert cache.stats().returning_users == 1
        check_rows(cache.kv_cache, *page_lists(step), list(range(20)))
        append(step, [100, 101, 102])
    assert places(cache) == {1: "device", 2: "host"}
    check_rows(cache.kv_cache, cache._table.pages(1), [*range(20), 100, 101, 102])
    stats = cache.stats()
    assert (stats.used_pages, stats.used_host_pages, stats.free_host_pages) == (2, 2, 2)
    assert (stats.host_users, stats.returning_users, stats.host_hits) == (1, 0, 1)
    assert (stats.hits, stats.misses, stats.evictions, stats.losses) == (1, 3, 3, 1)
    assert (stats.bytes_to_host, stats.bytes_from_host) == (4 * PAGE_BYTES, 2 * PAGE_BYTES)


def test_the_host_drops_the_least_recently_used():
    cache = make_cache(2, host_pages=3)
    fill(cache, _1=16, _2=16, _3=16, _4=16, _5=16)
    assert places(cache) == {1: "host", 2: "host", 3: "host", 4: "device", 5: "device"}
    with pytest.raises(Boom), cache.step([1], [0]):
        raise Boom
    assert places(cache) == {1: "host", 3: "host", 4: "host", 5: "device"}
    fill(cache, _6=32)
    assert places(cache) == {1: "host", 4: "host", 5: "host", 6: "device"}
    assert cache.stats().losses == 2


def test_of_the_evicted_those_used_last_are_kept():
    cache = make_cache(6, host_pages=3)
    fill(cache, _1=16, _2=48, _3=16, _4=16)
    fill(cache, _5=96)
    assert places(cache) == {1: "host", 3: "host", 4: "host", 5: "device"}
    assert cache.stats().losses == 1


def test_users_on_their_way_back_keep_their_places():
    cache = make_cache(4, host_pages=2)
    fill(cache, _1=32, _2=64)
    assert places(cache) == {1: "host", 2: "device"}
    with cache.step([1], [0]):
        assert places(cache) == {1: "device and host"}  # no room for 2
        with unchanged(cache, USERS):
            with pytest.raises(ValueError, match="no open step"):
                cache.free([1])
            with pytest.raises(ValueError, match="no open step"):
                cache.clear()
            with pytest.raises(OutOfPagesError), cache.step([3], [48]):
                pass
        fill(cache, _3=32)
        fill(cache, _4=32)
        assert places(cache) == {1: "device and host", 4: "device"}
        assert cache.stats().returning_users == 1
    assert places(cache) == {1: "device", 4: "device"}
    assert cache.stats().free_host_pages == 2


@pytest.mark.parametrize("layers", range(LAYERS + 1))
def test_a_step_that_fails_leaves_its_users_on_the_host(layers):
    cache = make_cache(3, host_pages=6)
    fill(cache, _1=40, _2=33)
    pages = cache._table.host_pages(1)

    def fail() -> None:
        with cache.step([1], [5], rewritten=[17]) as step:
            for layer in range(layers):
                step.append(layer, *torch.full((2, 22, HEADS, DIM), -1))
            raise Boom

    for _ in range(3):
        with pytest.raises(Boom):
            fail()
        assert places(cache) == {1: "host", 2: "host"}
        assert cache.lookup([1, 2]).tolist() == [40, 33]
        assert cache._table.host_pages(1) == pages
        check_rows(host_cache(cache), pages, list(range(40)))
    with cache.step([1], [0]) as step:
        check_rows(cache.kv_cache, *page_lists(step), list(range(40)))
    assert cache.stats().host_hits == 1


@pytest.mark.parametrize("what", ["move", "_bring_back", "_take_away"])
def test_where_copies_fail_only_the_evicted_are_lost(what, monkeypatch):
    """A copy fails, for instance because there is no memory for its buffer."""
    cache = make_cache(3, host_pages=8)
    fill(cache, _1=40, _2=20, _3=16)
    fill(cache, _4=1)
    assert places(cache) == {1: "host", 2: "host", 3: "device", 4: "device"}
    before = cache.stats()
    with monkeypatch.context() as patch:
        patch.setattr(HostTier, what, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), cache.step([2], [0]):
            pass
    assert places(cache) == {1: "host", 2: "host", 4: "device"}
    check_rows(host_cache(cache), cache._table.host_pages(2), list(range(20)))
    assert cache.stats() == before._replace(
        free_pages=2,
        used_pages=1,
        users=3,
        evictions=before.evictions + 1,
        losses=before.losses + 1,
    )
    with cache.step([2], [0]) as step:
        check_rows(cache.kv_cache, *page_lists(step), list(range(20)))


def test_free_and_clear_cover_both_tiers():
    cache = make_cache(4, host_pages=8)
    fill(cache, _1=32, _2=32, _3=32, _4=32)
    cache.free([1, 3, 99])
    assert places(cache) == {2: "host", 4: "device"}
    assert cache.lookup([1, 2, 3, 4]).tolist() == [0, 32, 0, 32]
    assert (cache.stats().free_pages, cache.stats().free_host_pages) == (2, 6)
    cache.clear()
    assert places(cache) == {}
    assert (cache.stats().free_pages, cache.stats().free_host_pages) == (4, 8)
    assert cache.stats().users == cache.stats().host_users == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_pages": -1}, "host_pages: expected from 0 to 134217727 pages, got -1"),
        ({"host_pages": 2**27}, "host_pages: expected from 0 to 134217727 pages, got 134217728"),
        ({"host_pages": 1, "evict": False}, "host_pages: expected 0 where nobody is evicted, got"),
    ],
)
def test_bad_sizes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_cache(4, **options)


@pytest.mark.parametrize(
    ("pages", "runs"),
    [
        ([], []),
        ([0], [(0, 1, 0)]),
        ([3, 4, 5], [(0, 3, 3)]),
        ([5, 4, 4, 6, 7, 0], [(0, 1, 5), (1, 2, 4), (2, 3, 4), (3, 5, 6), (5, 6, 0)]),
    ],
)
def test_runs(pages, runs):
    assert _runs(np.array(pages, np.int64)) == runs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
def test_pages_of_any_dtype(dtype):
    cache = PagedKVCache(3, 1, 16, 1, 1, dtype, "cpu", host_pages=1)
    values = torch.arange(48 * dtype.itemsize, dtype=torch.uint8).view(dtype).view(3, 16, 1, 1)
    for user in (1, 2):
        with cache.step([user], [16]) as step:
            for layer in range(3):
                pages = step.paged_kv(layer).kv_cache.view(torch.uint8)
                pages[:] = values[layer].view(torch.uint8).view_as(pages[:, :1]) + user
    with cache.step([1], [0]) as step:
        expected = values.view(torch.uint8).view(3, -1) + 1
        held = cache.kv_cache.view(torch.uint8).flatten(3).flatten(0, 1)
        assert torch.equal(held.view(3, 2, -1)[:, 0], expected)
        assert torch.equal(held.view(3, 2, -1)[:, 1], expected)


# ---------------------------------------------------------------------------------------------
# Streams
# ---------------------------------------------------------------------------------------------


class LateStream(TorchDispatchMode):
    """A fake side stream that makes its copies only when something waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Callable[[], Any]] = []
        self.done = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name not in ("aten::copy_", "aten::index_copy_"):
            return func(*args, **(kwargs or {}))
        self.waiting.append(lambda: func(*args, **(kwargs or {})))
        return args[0]

    def record_event(self) -> int:
        return len(self.waiting)

    def wait_stream(self, stream: MainStream) -> None:
        """Does nothing, because the main stream's work is already done."""

    def run(self, event: int) -> None:
        for copy in self.waiting[self.done : event]:
            copy()
        self.done = max(self.done, event)


class MainStream:
    """A fake main stream that does its work immediately."""

    def __init__(self, side: LateStream) -> None:
        self.wait_event = side.run

    def wait_stream(self, side: LateStream) -> None:
        side.run(side.record_event())


@contextmanager
def late_copies(cache: PagedKVCache) -> Iterator[LateStream]:
    """Simulates a slow bus on the CPU."""
    side = LateStream()
    main = MainStream(side)
    assert cache._host_tier is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache._host_tier, "_side", side)
        patch.setattr(torch.cuda, "stream", lambda stream: stream)
        patch.setattr(torch.cuda, "current_stream", lambda device: main)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        yield side
    main.wait_stream(side)


def device_rows(layer: int, tokens: list[int], device: str) -> torch.Tensor:
    """Computes `paged_caches.rows` on the device."""
    on_host = torch.tensor(tokens, dtype=torch.int64)
    if device == "cuda" and tokens:
        on_host = on_host.pin_memory()
    ids = on_host.to(device, non_blocking=True)
    values = (ids * LAYERS + layer)[:, None] * (2 * HEADS * DIM)
    values = values + torch.arange(2 * HEADS * DIM, device=device)
    return values.view(len(tokens), 2, HEADS, DIM).transpose(0, 1)


def use_at_random(cache: PagedKVCache, device: str, steps: int, pause: Callable[[], None]) -> None:
    """Runs steps that check the cached rows of each layer without waiting for the device, and
    that sometimes fail. At the end it checks all rows, including those on the host.
    """
    rng = random.Random(torch.initial_seed())
    tokens: dict[int, list[int]] = {}
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    fresh = 0
    for _ in range(steps):
        users = rng.sample(USERS, rng.choice([1, 2, 3]))
        cached = {
            user: tokens[user] if count else []
            for user, count in zip(users, cache.lookup(users).tolist(), strict=True)
        }
        new = {user: [fresh + 50 * n + i for i in range(rng.choice([0, 1, 20]))]
               for n, user in enumerate(users)}  # fmt: skip
        fresh += 150
        for user in users:
            if len(cached[user]) > 40:  # there is room for three of these
                cache.free([user])
                cached[user] = []
        pause()
        last_layer = rng.choice([*range(LAYERS), LAYERS, LAYERS, LAYERS])
        try:
            with cache.step(users, [len(new[user]) for user in users]) as step:
                for layer in range(last_layer):
                    held = step.paged_kv(layer).kv_cache
                    first = 0
                    for user in users:
                        before, pages = cached[user], pages_of(len(cached[user] + new[user]))
                        ids = step.page_ids[first : first + pages]
                        first += pages
                        rows = held[ids].transpose(0, 1).reshape(2, -1, HEADS, DIM)
                        expected = device_rows(layer, before, device)
                        wrong += (rows[:, : len(before)] != expected).sum()
                    step.append(layer, *device_rows(layer, flat(new.values()), device))
                    pause()
                if last_layer < LAYERS:
                    raise Boom
        except Boom:
            pass
        else:
            tokens.update({user: cached[user] + new[user] for user in users})
        if rng.random() < 0.05:
            cache.free([rng.choice(USERS)])
    assert int(wrong) == 0
    if device == "cuda":
        torch.cuda.synchronize()
    stats = cache.stats()
    assert min(stats.host_hits, stats.losses) > 0


def check_everything(cache: PagedKVCache) -> None:
    """Checks that each row is that of its own user's token, in every layer."""
    for user in USERS:
        length = int(cache.lookup([user])[0])
        for pages, ids in (
            (cache.kv_cache, cache._table.pages(user)),
            (host_cache(cache), cache._table.host_pages(user)),
        ):
            if ids:
                first = pages[0, ids, 0, :, 0, 0].flatten()[:length] // (LAYERS * 2 * HEADS * DIM)
                assert bool((first.diff() > 0).all())
                check_rows(pages, ids, first.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_copies_are_waited_for(seed):
    """The copies are made as late as possible; the next test makes them at once."""
    torch.manual_seed(torch.initial_seed() + seed)
    cache = make_cache(12, host_pages=9)
    with late_copies(cache):
        use_at_random(cache, "cpu", 300, lambda: None)
    check_everything(cache)


def test_copies_of_a_layer_are_not_waited_for_by_those_before_it():
    cache = make_cache(2, host_pages=4)
    with late_copies(cache) as side:
        fill(cache, _1=20, _2=20)
        with cache.step([1], [0]) as step:
            assert side.done == 0
            for layer in range(LAYERS):
                step.paged_kv(layer)
                # User 1 is evicted to the host and restored, each layer by a buffer to its pages.
                assert side.done == LAYERS + 2 * (layer + 1)
    check_everything(cache)


def test_copies_that_fail_half_way_are_waited_for(monkeypatch):
    """Copies that failed half way are waited for, so that they cannot write to released pages."""
    cache = make_cache(2, host_pages=4)
    with late_copies(cache) as side:
        fill(cache, _1=20, _2=20)
        monkeypatch.setattr(HostTier, "_take_away", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError), cache.step([1], [0]):
            pass
        assert side.done == len(side.waiting)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(kernels=False))]
)
def test_random_steps(device):
    """On a GPU, streams are delayed at random, so that missing synchronization is noticed."""
    cache = make_cache(12, device, host_pages=9)
    rng = random.Random(torch.initial_seed())

    def pause() -> None:
        if device == "cuda" and rng.random() < 0.3:
            side = cache._host_tier._side
            with torch.cuda.stream(rng.choice([side, torch.cuda.current_stream()])):
                torch.cuda._sleep(rng.choice([10**5, 3 * 10**6]))

    use_at_random(cache, device, 300, pause)
    check_everything(cache)


@pytest.mark.gpu(kernels=False)
def test_the_host_does_not_wait_for_the_gpu():
    cache = make_cache(2, "cuda", host_pages=4)
    (held,) = cache._host_tier._host_pages
    assert held.is_pinned()

    def serve() -> None:
        for user in (1, 2, 1):
            with cache.step([user], [0 if cache.lookup([user])[0] else 20]) as step:
                for layer in range(LAYERS):
                    step.append(layer, *torch.zeros((2, len(step.slots), HEADS, DIM), **like))

    like = {"dtype": torch.int64, "device": "cuda"}
    for warm in (False, True):  # the first run allocates memory, which may wait
        torch.cuda.synchronize()
        torch.cuda._sleep(10**9)  # half a second or more
        before = time.monotonic()
        serve()
        waited = time.monotonic() - before
        if warm:
            assert not torch.cuda.current_stream().query(), "it should be asleep"
            assert waited < 0.2
    torch.cuda.synchronize()
    assert cache.stats().host_hits > 1


# ---------------------------------------------------------------------------------------------
# An engine
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["retrieval", "ranking, times"])
def test_an_engine_recomputes_less(name):
    """With a host tier, events are computed once even if not all users fit on the device."""
    model = serving_models.make_model(name)
    recomputed = {}
    for host_pages in (0, 24):
        cache = serving_models.make_cache(6, host_pages=host_pages)
        histories, rng = serving_models.Histories(model), random.Random(0)
        with Engine(model, cache, max_batch_size=2) as engine:
            for turn in range(40):
                events = serving_models.some_events(rng, turn * 10**7, 3)
                request = (turn % 8, events, [1, 2, 3], None)
                scores = engine.score(*request[:3])
                serving_models.assert_close(scores, histories.expect(*request))
                if turn % 10 == 9:
                    with pytest.raises(serving_models.Boom):
                        engine.score(turn % 7, [(serving_models.POISON, 10**9)], [1])
            stats = engine.stats()
        recomputed[host_pages] = stats.recomputed_tokens
        assert cache.stats().evictions > 20
        assert cache.stats().losses == (0 if host_pages else cache.stats().evictions)
    assert recomputed[24] == 40 - 8  # the last event before each request
    assert recomputed[0] > 5 * recomputed[24]
