"""Tests of the paged KV cache: threads, case by case, and attention. Random operations are in
test_paged_cache_model.py, the cases of the host tier in test_host_tier.py.
"""

from __future__ import annotations

import random
import sys
import threading
import time

import numpy as np
import pytest
import torch

from hstu_attn import Mask, hstu_attention, reference
from hstu_attn.testing import assert_matches, offsets

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
from hstu_attn.serving import OutOfPagesError, PagedKVCache
from tests.helpers.paged_caches import (
    DIM,
    HEADS,
    LAYERS,
    USERS,
    Boom,
    append,
    check_rows,
    fill,
    flat,
    make_cache,
    page_lists,
    unchanged,
)


@pytest.mark.slow
@pytest.mark.parametrize("host_pages", [0, 12])
def test_threads(host_pages):
    """Threads compete for users and pages, and each user's cached rows are those appended."""
    cache = make_cache(24, host_pages=host_pages)
    written: dict[int, list[int]] = {}  # only a step of a user writes the user's entry
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
                        check_rows(cache.kv_cache, page_lists(step)[n], before + new[n])
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
                time.sleep(1e-4)  # lets the thread with the step end it
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
    stats = cache.stats()
    assert stats.losses > 0
    assert (stats.host_hits > 0) == bool(host_pages)
    assert stats.pinned_pages == stats.returning_users == 0
    cache.clear()
    assert cache.stats().free_pages == 24
    assert cache.stats().free_host_pages == host_pages


# ---------------------------------------------------------------------------------------------
# Case by case
# ---------------------------------------------------------------------------------------------


def test_unknown_users_start_empty():
    cache = make_cache()
    with cache.step([5, 6], [0, 17]) as step:
        assert step.cached_lens.tolist() == [0, 0]
        assert step.page_offsets.tolist() == [0, 0, 2]
        assert step.last_page_lens.tolist() == [0, 1]
        append(step, list(range(17)))
    assert cache.lookup([5, 6, 7]).tolist() == [0, 17, 0]
    assert cache.stats().users == 1


def test_tables_on_the_device_are_those_of_the_host():
    cache = make_cache()
    names = ("page_offsets", "page_ids", "last_page_lens", "cached_lens", "slots")
    with cache.step([5, 6], [3, 17]) as step:
        tables = [getattr(step, name) for name in names]
        assert step.page_ids is tables[1]  # made once
        other, none = step.upload(np.array([7, 8]), np.empty(0, np.int64))
        again = [getattr(step, name) for name in names]
        for table, copy, on_host in zip(tables, again, step.host_tables, strict=True):
            assert table.dtype == copy.dtype == torch.int32
            assert table.tolist() == copy.tolist() == on_host.tolist()
        assert other.dtype == none.dtype == torch.int64
        assert (other.tolist(), none.tolist()) == ([7, 8], [])
        append(step, list(range(20)))


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
    check_rows(cache.kv_cache, pages, list(range(20)))


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


@pytest.mark.parametrize(
    ("page_size", "num_pages", "host_pages"), [(16, 10, 0), (64, 4, 0), (16, 10, 12)]
)
def test_growing_histories_against_dense_attention(device, page_size, num_pages, host_pages):
    """Pages are short, so that returning users are not cached, or are brought back."""
    heads, dim, dtype = 2, 32, torch.bfloat16
    sizes = (LAYERS, num_pages, page_size, heads, dim)
    cache = PagedKVCache(*sizes, dtype, device, host_pages=host_pages)
    rng = random.Random(torch.initial_seed())
    none = torch.empty(LAYERS, 2, 0, heads, dim, dtype=dtype)
    history = dict.fromkeys(range(8), none)

    def random_rows(count: int) -> torch.Tensor:
        return torch.empty(LAYERS, 2, count, heads, dim, dtype=dtype).uniform_(-1, 1)

    for _ in range(24):
        users = rng.sample(range(8), 2)
        targets = [rng.choice([0, 1, 7]) for _ in users]
        for user in users:
            if history[user].shape[2] > 60:  # longer histories might leave no room for two
                cache.free([user])
                history[user] = none
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
                same_dtype_reference = reference.hstu_attention(
                    q, k, v, **common, compute_dtype=dtype
                )
                assert_matches("out", out, exact, same_dtype_reference)
    stats = cache.stats()
    assert min(stats.hits, stats.evictions) > 0
    assert (stats.host_hits > 0) == bool(host_pages)
