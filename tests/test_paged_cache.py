"""The paged KV cache of serving: random operations against a simple model, threads, attention."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hstu_attn import Mask, hstu_attention, reference
from hstu_attn.testing import assert_matches, offsets

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
from hstu_attn.serving import CacheStep, OutOfPagesError, PagedKVCache

LAYERS, PAGE, HEADS, DIM = 2, 16, 2, 3


def make_cache(num_pages: int = 8, *, evict: bool = True) -> PagedKVCache:
    """A cache of integers, so that what is read back can be compared bit for bit."""
    return PagedKVCache(LAYERS, num_pages, PAGE, HEADS, DIM, torch.int64, "cpu", evict=evict)


def rows(layer: int, tokens: list[int]) -> torch.Tensor:
    """Keys and values `(2, tokens, heads, dim)` that no other token or layer has."""
    ids = torch.tensor(tokens, dtype=torch.int64) * LAYERS + layer
    values = ids[:, None] * (2 * HEADS * DIM) + torch.arange(2 * HEADS * DIM)
    return values.view(len(tokens), 2, HEADS, DIM).transpose(0, 1)


def append(step: CacheStep, tokens: list[int]) -> None:
    for layer in range(LAYERS):
        step.append(layer, *rows(layer, tokens))


def read(cache: PagedKVCache, pages: list[int], length: int) -> torch.Tensor:
    """`(layers, 2, length, heads, dim)`"""
    held = cache.kv_cache[:, torch.tensor(pages, dtype=torch.int64)].transpose(1, 2)
    return held.reshape(LAYERS, 2, -1, HEADS, DIM)[:, :, :length]


def check_rows(cache: PagedKVCache, pages: list[int], tokens: list[int]) -> None:
    expected = torch.stack([rows(layer, tokens) for layer in range(LAYERS)])
    assert torch.equal(read(cache, pages, len(tokens)), expected)


def page_lists(step: CacheStep) -> list[list[int]]:
    ends = step.page_offsets.tolist()
    return [step.page_ids[a:b].tolist() for a, b in pairwise(ends)]


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def pages_of(length: int) -> int:
    return -(-length // PAGE)


class Boom(Exception):
    pass


@contextmanager
def unchanged(cache: PagedKVCache, users: range):
    """What fails inside leaves the cache as it was."""

    def state() -> object:
        held = [cache._table.pages(user) for user in users]
        return cache.stats(), cache.lookup(users).tolist(), held, cache.kv_cache.clone()

    *before, content = state()
    yield
    *after, content_after = state()
    assert after == before
    assert torch.equal(content, content_after)


# ---------------------------------------------------------------------------------------------
# Random operations against a model
# ---------------------------------------------------------------------------------------------

USERS = range(-3, 7)


class OpenStep(NamedTuple):
    manager: AbstractContextManager[CacheStep]
    step: CacheStep
    cached: dict[int, list[int]]
    new: dict[int, list[int]]  # the rewritten ones, then the new ones
    pages_before: dict[int, list[int]]
    written: bool


class CacheMachine(RuleBasedStateMachine):
    """The model: the tokens of each user, and the unpinned users, least recently used first."""

    @initialize(num_pages=st.integers(1, 12), evict=st.booleans())
    def start(self, num_pages: int, evict: bool) -> None:
        self.cache = make_cache(num_pages, evict=evict)
        self.num_pages, self.evict = num_pages, evict
        self.tokens: dict[int, list[int]] = {}
        self.unpinned: list[int] = []
        self.open: list[OpenStep] = []
        self.hits = self.misses = self.evictions = self.next_token = 0

    def free_pages(self) -> int:
        return self.num_pages - sum(pages_of(len(tokens)) for tokens in self.tokens.values())

    def fresh(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    @rule(
        batch=st.dictionaries(st.sampled_from(USERS), st.integers(0, 40), max_size=5),
        expect=st.booleans(),
        written=st.booleans(),
        rewritten=st.sampled_from([0, 1, 17]),
    )
    def begin(self, batch: dict[int, int], expect: bool, written: bool, rewritten: int) -> None:
        cached = {user: self.tokens.get(user, []) for user in batch}
        again = [min(rewritten, len(tokens)) for tokens in cached.values()]
        manager = self.cache.step(
            list(batch),
            list(batch.values()),
            cached_lens=[len(tokens) for tokens in cached.values()] if expect else None,
            rewritten=again if rewritten else None,
        )
        pinned = {user for step in self.open for user in step.new}
        if pinned & set(batch):
            with unchanged(self.cache, USERS), pytest.raises(ValueError, match="no open step"):
                manager.__enter__()
            return
        victims = [user for user in self.unpinned if user not in batch]
        need = sum(
            pages_of(len(cached[user]) + count) - pages_of(len(cached[user]))
            for user, count in batch.items()
        )
        room = self.free_pages()
        room += sum(pages_of(len(self.tokens[user])) for user in victims) * self.evict
        if need > room:
            with unchanged(self.cache, USERS), pytest.raises(OutOfPagesError):
                manager.__enter__()
            return

        while self.free_pages() < need:
            del self.tokens[victims[0]]
            self.unpinned.remove(victims.pop(0))
            self.evictions += 1
        pages_before = {user: self.cache._table.pages(user) for user in batch}
        new = {}
        for (user, count), r in zip(batch.items(), again, strict=True):
            new[user] = self.fresh(r + count)
            self.tokens[user] = cached[user][: len(cached[user]) - r] + new[user]
        self.unpinned = [user for user in self.unpinned if user not in batch]
        step = manager.__enter__()
        self.check_tables(step, new)
        if written:
            append(step, flat(new.values()))
        self.open.append(OpenStep(manager, step, cached, new, pages_before, written))

    def check_tables(self, step: CacheStep, new: dict[int, list[int]]) -> None:
        kept = [len(self.tokens[user]) - len(tokens) for user, tokens in new.items()]
        assert step.cached_lens.tolist() == kept
        lists = page_lists(step)
        assert lists == [self.cache._table.pages(user) for user in new]
        slots, last = [], []
        for pages, user, before in zip(lists, new, kept, strict=True):
            after = len(self.tokens[user])
            slots += [pages[n // PAGE] * PAGE + n % PAGE for n in range(before, after)]
            last.append((after - 1) % PAGE + 1 if after else 0)
        assert step.slots.tolist() == slots
        assert step.last_page_lens.tolist() == last

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        step = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        if not step.written:
            append(step.step, flat(step.new.values()))
        step.manager.__exit__(None, None, None)
        for user, cached in step.cached.items():
            self.hits, self.misses = self.hits + bool(cached), self.misses + (not cached)
            self.unpin(user)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        step = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        assert not step.manager.__exit__(Boom, Boom(), None)  # the exception goes on
        for user, cached in step.cached.items():
            # What was written again stays so.
            latest = self.tokens[user] if step.written else cached
            self.tokens[user] = latest[: len(cached)]
            assert self.cache._table.pages(user) == step.pages_before[user]
            self.unpin(user)

    def unpin(self, user: int) -> None:
        if self.tokens[user]:
            self.unpinned.append(user)
        else:
            del self.tokens[user]

    @rule(users=st.lists(st.sampled_from(USERS), max_size=3))
    def free(self, users: list[int]) -> None:
        if {user for step in self.open for user in step.new} & set(users):
            with unchanged(self.cache, USERS), pytest.raises(ValueError, match="no open step"):
                self.cache.free(users)
            return
        self.cache.free(users)
        self.unpinned = [user for user in self.unpinned if user not in users]
        for user in users:
            self.tokens.pop(user, None)

    @rule()
    def clear(self) -> None:
        if self.open:
            with unchanged(self.cache, USERS), pytest.raises(ValueError, match="no open step"):
                self.cache.clear()
            return
        self.cache.clear()
        self.tokens, self.unpinned = {}, []

    @invariant()
    def accounts_agree(self) -> None:
        lengths = [len(self.tokens.get(user, [])) for user in USERS]
        assert self.cache.lookup(USERS).tolist() == lengths
        held = {user: self.cache._table.pages(user) for user in USERS}
        owned = flat(held.values())
        assert len(set(owned)) == len(owned), "a page has two owners"
        assert all(0 <= page < self.num_pages for page in owned)
        assert [len(pages) for pages in held.values()] == [pages_of(n) for n in lengths]
        pinned = {user for step in self.open for user in step.new}
        stats = self.cache.stats()
        assert stats.free_pages == self.num_pages - len(owned) == self.free_pages()
        assert stats.used_pages == len(owned)
        assert stats.pinned_pages == sum(len(held[user]) for user in pinned)
        assert stats.users == len(self.tokens)
        assert stats[-3:] == (self.hits, self.misses, self.evictions)

    @invariant()
    def every_byte_is_the_one_written(self) -> None:
        unwritten = {u: len(new) for s in self.open if not s.written for u, new in s.new.items()}
        for user, tokens in self.tokens.items():
            kept = tokens[: len(tokens) - unwritten.get(user, 0)]
            check_rows(self.cache, self.cache._table.pages(user), kept)


def test_random_operations_against_a_model():
    run_state_machine_as_test(
        CacheMachine, settings=settings(max_examples=100, stateful_step_count=200)
    )


def test_threads():
    """Threads fight for users and pages; of each user, what is cached is what was appended."""
    cache = make_cache(24)
    written: dict[int, list[int]] = {}  # a user's entry is touched in a step of that user alone
    failures: list[BaseException] = []
    steps = [0] * 4

    def work(thread: int) -> None:
        rng = random.Random(thread)
        for turn in range(20000):
            if steps[thread] == 150:
                break
            users = rng.sample(range(12), 3)
            counts = [rng.randrange(30) for _ in users]
            base = (thread * 20000 + turn) * 100
            new = [list(range(base + 30 * n, base + 30 * n + c)) for n, c in enumerate(counts)]
            try:
                with cache.step(users, counts) as step:
                    append(step, flat(new))
                    for n, (user, cached) in enumerate(
                        zip(users, step.cached_lens.tolist(), strict=True)
                    ):
                        before = written.get(user, []) if cached else []
                        assert len(before) == cached
                        check_rows(cache, page_lists(step)[n], before + new[n])
                    if rng.random() < 0.2:
                        raise Boom
                    for n, user in enumerate(users):
                        before = written.get(user, []) if step.cached_lens[n] else []
                        written[user] = before + new[n]
                steps[thread] += 1
            except (Boom, OutOfPagesError):
                pass
            except ValueError as error:
                if "no open step" not in str(error):
                    failures.append(error)
                time.sleep(1e-4)  # for the thread whose step it is to end it
            except BaseException as error:
                failures.append(error)
            if rng.random() < 0.1:
                stats = cache.stats()
                if stats.free_pages + stats.used_pages != 24:
                    failures.append(AssertionError(stats))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(len(steps))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures, failures[0]
    assert steps == [150] * 4
    assert cache.stats().evictions > 0
    assert cache.stats().pinned_pages == 0
    cache.clear()
    assert cache.stats().free_pages == 24


# ---------------------------------------------------------------------------------------------
# What is promised, case by case
# ---------------------------------------------------------------------------------------------


def fill(cache: PagedKVCache, **counts: int) -> None:
    """Steps of one user each: `_3=20` gives user 3 twenty tokens."""
    for name, count in counts.items():
        with cache.step([int(name[1:])], [count]) as step:
            append(step, list(range(count)))


def test_unknown_users_start_empty():
    cache = make_cache()
    with cache.step([5, 6], [0, 17]) as step:
        assert step.cached_lens.tolist() == [0, 0]
        assert step.page_offsets.tolist() == [0, 0, 2]
        assert step.last_page_lens.tolist() == [0, 1]
        append(step, list(range(17)))
    assert cache.lookup([5, 6, 7]).tolist() == [0, 17, 0]
    assert cache.stats().users == 1


def test_an_empty_batch():
    cache = make_cache()
    with cache.step([], []) as step:
        assert step.page_offsets.tolist() == [0]
        append(step, [])
    assert cache.lookup([]).shape == (0,)


def test_the_least_recently_used_user_goes_first():
    cache = make_cache(4)
    fill(cache, _1=16, _2=16, _3=16, _4=16)
    fill(cache, _1=0)
    fill(cache, _5=20)
    assert cache.lookup(range(1, 6)).tolist() == [16, 0, 0, 16, 20]
    assert cache.stats().evictions == 2


def test_pinned_users_are_not_evicted():
    cache = make_cache(4)
    fill(cache, _1=32, _2=32)
    with cache.step([1], [0]):
        with (
            unchanged(cache, USERS),
            pytest.raises(OutOfPagesError, match=r"num_pages: expected 3 free or .* 2 of"),
            cache.step([3], [48]),
        ):
            pass
        fill(cache, _3=32)
        assert cache.lookup([1, 2, 3]).tolist() == [32, 0, 32]


def test_users_of_a_batch_do_not_evict_each_other():
    cache = make_cache(4)
    fill(cache, _1=32, _2=32)
    with (
        unchanged(cache, USERS),
        pytest.raises(OutOfPagesError, match=r"expected 1 .* got 0 of 4"),
        cache.step([1, 2], [0, 1]),
    ):
        pass


def test_without_eviction_too_few_pages_are_an_error():
    cache = make_cache(4, evict=False)
    fill(cache, _1=32)
    with (
        unchanged(cache, USERS),
        pytest.raises(OutOfPagesError, match=r"expected 3 free pages .* got 2 of 4"),
        cache.step([2, 1], [32, 1]),
    ):
        pass
    cache.free([1, 99])
    fill(cache, _2=64)


def test_an_exception_drops_the_new_tokens():
    cache = make_cache()
    fill(cache, _1=20)
    before = cache.stats()
    pages = cache._table.pages(1)

    def fail_after_writing() -> None:
        with cache.step([1, 2], [30, 5]) as step:
            append(step, list(range(100, 135)))
            raise Boom

    with pytest.raises(Boom):
        fail_after_writing()
    assert cache.lookup([1, 2]).tolist() == [20, 0]
    assert cache.stats() == before
    assert cache._table.pages(1) == pages
    check_rows(cache, pages, list(range(20)))


def test_rewriting_more_than_there_is_is_refused():
    cache = make_cache()
    fill(cache, _1=20)
    for rewritten, message in (
        ([0, 21], "rewritten: expected counts from 0 to the 20 tokens that are cached, got 21"),
        ([1, 0], "rewritten: expected counts from 0 to the 0 tokens that are cached, got 1"),
        ([0, -1], "rewritten: expected counts .*, got -1"),
        ([0], "rewritten: expected 2 values, one for each user, got 1"),
    ):
        with (
            unchanged(cache, USERS),
            pytest.raises(ValueError, match=message),
            cache.step([3, 1], [5, 1], rewritten=rewritten),
        ):
            pass


def test_a_step_that_was_left_writes_nothing():
    cache = make_cache()
    with cache.step([1], [3]) as step:
        append(step, [1, 2, 3])
    for use in (lambda: append(step, [4, 5, 6]), lambda: step.paged_kv(0)):
        with unchanged(cache, USERS), pytest.raises(RuntimeError, match="step: expected an open"):
            use()


def test_a_table_is_closed_once():
    table = make_cache()._table
    number, *_ = table.begin(np.array([1]), np.array([2]))
    table.release(number)
    for close in (table.release, table.roll_back):
        with pytest.raises(ValueError, match=f"step: expected an open step, got {number}"):
            close(number)


@pytest.mark.parametrize("convert", [list, np.array, torch.tensor, tuple])
def test_ids_may_be_any_int64(convert):
    cache = make_cache()
    ids = [-(2**63), 2**63 - 1, 0]
    with cache.step(convert(ids), convert([1, 2, 3])) as step:
        append(step, list(range(6)))
    assert cache.lookup(convert(ids)).tolist() == [1, 2, 3]
    with cache.step(np.array([0, 0, 2**62])[1:], np.array([3, 0, 4, 0])[::2]) as step:
        assert step.cached_lens.tolist() == [3, 0]
        append(step, list(range(7)))


@pytest.mark.parametrize(
    ("users", "new_tokens", "cached_lens", "message"),
    [
        ([1, 1], [1, 1], None, "users: expected each user once, got 1"),
        ([1, 2], [1], None, "new_tokens: expected 2 values, one for each user, got 1"),
        ([1, 2], [1, -1], None, "new_tokens: expected counts from 0 to 2147483647, got -1"),
        ([1], [2**31], None, "new_tokens: expected counts .*, got 2147483648"),
        ([3, 1], [1, 1], [0, 19], "cached_lens: expected 20 tokens of user 1, got 19"),
        ([3, 1], [1, 1], [0], "cached_lens: expected 2 values, one for each user, got 1"),
        ([1.5], [1], None, "users: expected integers within int64, got float64"),
        ([True], [1], None, "users: expected integers within int64, got bool"),
        ([2**63], [1], None, "users: expected integers within int64, got uint64"),
        ([[1]], [1], None, r"users: expected one dimension, got shape \(1, 1\)"),
        (3, [1], None, r"users: expected one dimension, got shape \(\)"),
        (torch.ones(1, device="meta"), [1], None, "users: expected values on the CPU, got .* meta"),
    ],
)
def test_bad_batches_are_refused(users, new_tokens, cached_lens, message):
    cache = make_cache()
    fill(cache, _1=20)
    with (
        unchanged(cache, USERS),
        pytest.raises(ValueError, match=message),
        cache.step(users, new_tokens, cached_lens=cached_lens),
    ):
        pass


def test_a_batch_of_more_tokens_than_int32_holds_is_refused():
    cache = make_cache()
    with (
        unchanged(cache, USERS),
        pytest.raises(OutOfPagesError, match="expected 402653184 free"),
        cache.step([1, 2, 3], [2**31 - 1] * 3),
    ):
        pass


def test_bad_rows_are_refused():
    cache = make_cache()
    good = torch.zeros(3, HEADS, DIM, dtype=torch.int64)
    with cache.step([1], [3]) as step, unchanged(cache, USERS):
        for bad in (good[:2], good[:, :1], good[:, :, :1], good.int(), good.to("meta")):
            with pytest.raises(ValueError, match=r"k: expected shape \(3, 2, 3\), .* got "):
                step.append(0, bad, good)
            with pytest.raises(ValueError, match=r"v: expected shape \(3, 2, 3\), .* got "):
                step.append(0, good, bad)
        for layer in (-1, LAYERS):
            with pytest.raises(ValueError, match=f"layer: expected from 0 to 1, got {layer}"):
                step.append(layer, good, good)
            with pytest.raises(ValueError, match=f"layer: expected from 0 to 1, got {layer}"):
                step.paged_kv(layer)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 4, 16, 1, 8), "num_layers: expected a positive count, got 0"),
        ((1, 0, 16, 1, 8), "num_pages: expected from 1 to 134217727 pages, got 0"),
        ((1, 2**27, 16, 1, 8), "num_pages: expected from 1 to 134217727 pages, got 134217728"),
        ((1, 4, 15, 1, 8), r"page_size: expected one of \(16, .*\), got 15"),
        ((1, 4, 16, 0, 8), "heads: expected a positive count, got 0"),
        ((1, 4, 16, 1, -8), "head_dim: expected a positive count, got -8"),
    ],
)
def test_bad_sizes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        PagedKVCache(*sizes)


# ---------------------------------------------------------------------------------------------
# Attention
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [16, 64])
def test_growing_histories_against_dense_attention(device, page_size):
    """Steps over two layers; pages run short, so that users return to find nothing cached."""
    heads, dim, dtype = 2, 32, torch.bfloat16
    cache = PagedKVCache(LAYERS, 512 // page_size, page_size, heads, dim, dtype, device)
    rng = random.Random(torch.initial_seed())
    history = {user: torch.empty(LAYERS, 2, 0, heads, dim, dtype=dtype) for user in range(6)}

    def random_rows(count: int) -> torch.Tensor:
        return torch.empty(LAYERS, 2, count, heads, dim, dtype=dtype).uniform_(-1, 1)

    for _ in range(12):
        users = rng.sample(range(6), 3)
        targets = [rng.choice([0, 1, 7]) for _ in users]
        for user in users:
            history[user] = torch.cat([history[user], random_rows(rng.randrange(14))], 2)
        lengths = [history[user].shape[2] for user in users]
        new = [n - c for n, c in zip(lengths, cache.lookup(users).tolist(), strict=True)]
        q_lens = [n + t for n, t in zip(new, targets, strict=True)]
        k_lens = [h + t for h, t in zip(lengths, targets, strict=True)]
        common = {
            "cu_seqlens_q": offsets(q_lens, device),
            "max_seqlen_q": max(*q_lens, 1),
            "cu_seqlens_k": offsets(k_lens, device),
            "max_seqlen_k": max(*k_lens, 1),
            "mask": Mask.causal(num_targets=torch.tensor(targets, dtype=torch.int32).to(device)),
        }
        candidates = [random_rows(count) for count in targets]
        dense = torch.cat(
            [torch.cat([history[u], t], 2) for u, t in zip(users, candidates, strict=True)], 2
        ).to(device)
        appended = torch.cat(
            [history[u][:, :, h - n :] for u, h, n in zip(users, lengths, new, strict=True)], 2
        ).to(device)
        packed = [
            torch.cat([history[u][:, :, h - n :], t], 2)
            for u, h, n, t in zip(users, lengths, new, candidates, strict=True)
        ]
        packed = torch.cat(packed, 2).to(device)
        q = torch.empty_like(packed[0, 0]).uniform_(-1, 1)
        with cache.step(users, new) as step:
            for layer in range(LAYERS):
                step.append(layer, *appended[layer])
                k, v = packed[layer]
                out = hstu_attention(q, k, v, **common, paged_kv=step.paged_kv(layer))
                k, v = dense[layer]
                exact = reference.hstu_attention(q.double(), k.double(), v.double(), **common)
                yardstick = reference.hstu_attention(q, k, v, **common, compute_dtype=dtype)
                assert_matches("out", out, exact, yardstick)
    assert cache.stats().hits > 0
