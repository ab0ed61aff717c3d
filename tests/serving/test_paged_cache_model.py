"""Tests of the paged KV cache by random operations, each followed by a comparison with a model
of the users' pages and with every row that was written.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

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

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
from hstu_attn.serving import CacheStats, CacheStep, OutOfPagesError
from tests.helpers.paged_caches import (
    DIM,
    HEADS,
    LAYERS,
    PAGE,
    USERS,
    Boom,
    append,
    check_rows,
    flat,
    host_cache,
    make_cache,
    page_lists,
    pages_of,
    unchanged,
)

SELDOM = st.integers(0, 9).map(lambda n: n == 9)


class OpenStep(NamedTuple):
    manager: AbstractContextManager[CacheStep]
    step: CacheStep
    cached: dict[int, list[int]]
    new: dict[int, list[int]]  # the rewritten ones, then the new ones
    returning: list[int]  # those of the users who were on the host
    pages_before: dict[int, list[int]]
    host_pages_before: dict[int, list[int]]
    written: bool


class CacheMachine(RuleBasedStateMachine):
    """The model: the tokens of each user, and the users without an open step on the device and on
    the host, least recently used first.
    """

    @initialize(num_pages=st.integers(1, 14), host_pages=st.none() | st.integers(0, 16))
    def start(self, num_pages: int, host_pages: int | None) -> None:
        self.evict = host_pages is not None
        self.num_pages, self.host_pages = num_pages, host_pages or 0
        self.cache = make_cache(num_pages, evict=self.evict, host_pages=self.host_pages)
        self.tokens: dict[int, list[int]] = {}
        self.unpinned: list[int] = []
        self.on_host: list[int] = []
        self.open: list[OpenStep] = []
        self.hits = self.misses = self.evictions = self.next_token = 0
        self.host_hits = self.losses = self.pages_to_host = self.pages_from_host = 0

    def size(self, users: Iterable[int]) -> int:
        return sum(pages_of(len(self.tokens.get(user, []))) for user in users)

    def free_pages(self) -> int:
        return self.num_pages - self.size(set(self.tokens) - set(self.on_host))

    def returning(self) -> dict[int, int]:
        """The users who are being brought back, with their pages on the host."""
        return {user: pages_of(len(s.cached[user])) for s in self.open for user in s.returning}

    def free_host_pages(self) -> int:
        return self.host_pages - self.size(self.on_host) - sum(self.returning().values())

    def fresh(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    @precondition(lambda self: len(self.open) < 3)
    @rule(
        batch=st.dictionaries(st.sampled_from(USERS), st.integers(0, 40), max_size=5),
        expect=st.booleans(),
        written=st.booleans(),
        rewritten=st.sampled_from([0, 1, 17]),
        pinned_too=SELDOM,
    )
    def begin(
        self,
        batch: dict[int, int],
        expect: bool,
        written: bool,
        rewritten: int,
        pinned_too: bool,
    ) -> None:
        pinned = {user for step in self.open for user in step.new}
        if not pinned_too:
            batch = {user: count for user, count in batch.items() if user not in pinned}
        cached = {user: self.tokens.get(user, []) for user in batch}
        again = [min(rewritten, len(tokens)) for tokens in cached.values()]
        manager = self.cache.step(
            list(batch),
            list(batch.values()),
            cached_lens=[len(tokens) for tokens in cached.values()] if expect else None,
            rewritten=again if rewritten else None,
        )
        if pinned & set(batch):
            with unchanged(self.cache, USERS), pytest.raises(ValueError, match="no open step"):
                manager.__enter__()
            return
        victims = [user for user in self.unpinned if user not in batch]
        returning = [user for user in batch if user in self.on_host]
        need = sum(
            pages_of(len(cached[user]) + count) - self.size({user} - set(returning))
            for user, count in batch.items()
        )
        if need > self.free_pages() + self.size(victims) * self.evict:
            with unchanged(self.cache, USERS), pytest.raises(OutOfPagesError):
                manager.__enter__()
            return

        table = self.cache._table
        pages_before = {user: table.pages(user) for user in batch}
        host_pages_before = {user: table.host_pages(user) for user in batch}
        missing = need - self.free_pages()
        self.on_host = [user for user in self.on_host if user not in batch]
        self.pages_from_host += self.size(returning)
        self.make_room(missing, victims, self.size(returning))
        new = {}
        for (user, count), r in zip(batch.items(), again, strict=True):
            new[user] = self.fresh(r + count)
            self.tokens[user] = cached[user][: len(cached[user]) - r] + new[user]
        self.unpinned = [user for user in self.unpinned if user not in batch]
        step = manager.__enter__()
        self.check_tables(step, new)
        if written:
            append(step, flat(new.values()))
        befores = pages_before, host_pages_before
        self.open.append(OpenStep(manager, step, cached, new, returning, *befores, written))

    def make_room(self, missing: int, candidates: list[int], returning_pages: int) -> None:
        """Evicts users; the latest go to the host, as far as it has room besides what returns."""
        evicted: list[int] = []
        while self.size(evicted) < missing:
            evicted.append(candidates[len(evicted)])
        host_room = self.host_pages - sum(self.returning().values()) - returning_pages
        kept: list[int] = []
        for user in reversed(evicted):
            if self.size([*kept, user]) <= host_room:
                kept.insert(0, user)
        lost = [user for user in evicted if user not in kept]
        while self.free_host_pages() - returning_pages < self.size(kept):
            lost.append(self.on_host.pop(0))
        for user in lost:
            del self.tokens[user]
        self.unpinned = [user for user in self.unpinned if user not in evicted]
        self.on_host += kept
        self.evictions += len(evicted)
        self.losses += len(lost)
        self.pages_to_host += self.size(kept)

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
    @rule(which=st.integers(0, 2))
    def release(self, which: int) -> None:
        step = self.open.pop(which % len(self.open))
        if not step.written:
            append(step.step, flat(step.new.values()))
        step.manager.__exit__(None, None, None)
        for user, cached in step.cached.items():
            self.hits, self.misses = self.hits + bool(cached), self.misses + (not cached)
            self.unpin(user, self.unpinned)
        self.host_hits += len(step.returning)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 2))
    def roll_back(self, which: int) -> None:
        step = self.open.pop(which % len(self.open))
        assert not step.manager.__exit__(Boom, Boom(), None)  # the exception goes on
        for user, cached in step.cached.items():
            # Rows that were written again keep the new values; the host never had them.
            latest = self.tokens[user] if step.written else cached
            self.tokens[user] = (cached if user in step.returning else latest)[: len(cached)]
            assert self.cache._table.pages(user) == step.pages_before[user]
            assert self.cache._table.host_pages(user) == step.host_pages_before[user]
            self.unpin(user, self.on_host if user in step.returning else self.unpinned)

    def unpin(self, user: int, tier: list[int]) -> None:
        if self.tokens[user]:
            tier.append(user)
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
        self.on_host = [user for user in self.on_host if user not in users]
        for user in users:
            self.tokens.pop(user, None)

    @rule(really=SELDOM)
    def clear(self, really: bool) -> None:
        if not really:
            return
        if self.open:
            with unchanged(self.cache, USERS), pytest.raises(ValueError, match="no open step"):
                self.cache.clear()
            return
        self.cache.clear()
        self.tokens, self.unpinned, self.on_host = {}, [], []

    @invariant()
    def accounts_agree(self) -> None:
        lengths = [len(self.tokens.get(user, [])) for user in USERS]
        assert self.cache.lookup(USERS).tolist() == lengths
        held = {user: self.cache._table.pages(user) for user in USERS}
        on_host = {user: self.cache._table.host_pages(user) for user in USERS}
        for pages, limit in ((held, self.num_pages), (on_host, self.host_pages)):
            owned = flat(pages.values())
            assert len(set(owned)) == len(owned), "a page has two owners"
            assert all(0 <= page < limit for page in owned)
        returning = self.returning()
        for user, length in zip(USERS, lengths, strict=True):
            away = user in self.on_host
            assert len(held[user]) == (0 if away else pages_of(length))
            assert len(on_host[user]) == (pages_of(length) if away else returning.get(user, 0))
        pinned = {user for step in self.open for user in step.new}
        page_bytes = LAYERS * 2 * PAGE * HEADS * DIM * 8
        assert self.cache.stats() == CacheStats(
            free_pages=self.free_pages(),
            used_pages=len(flat(held.values())),
            pinned_pages=sum(len(held[user]) for user in pinned),
            users=len(self.tokens),
            hits=self.hits,
            misses=self.misses,
            evictions=self.evictions,
            free_host_pages=self.free_host_pages(),
            used_host_pages=len(flat(on_host.values())),
            host_users=len(self.on_host),
            returning_users=len(returning),
            host_hits=self.host_hits,
            losses=self.losses,
            bytes_to_host=self.pages_to_host * page_bytes,
            bytes_from_host=self.pages_from_host * page_bytes,
        )
        assert self.cache.stats().used_pages + self.free_pages() == self.num_pages

    @invariant()
    def every_byte_is_the_one_written(self) -> None:
        table = self.cache._table
        unwritten = {u: len(new) for s in self.open if not s.written for u, new in s.new.items()}
        for user, tokens in self.tokens.items():
            if user not in self.on_host:
                kept = tokens[: len(tokens) - unwritten.get(user, 0)]
                check_rows(self.cache.kv_cache, table.pages(user), kept)
        there = {user: self.tokens[user] for user in self.on_host}
        there.update({user: s.cached[user] for s in self.open for user in s.returning})
        for user, tokens in there.items():
            check_rows(host_cache(self.cache), table.host_pages(user), tokens)


@pytest.mark.slow
def test_random_operations_against_a_model():
    run_state_machine_as_test(
        CacheMachine, settings=settings(max_examples=100, stateful_step_count=200)
    )


@pytest.mark.slow
@pytest.mark.parametrize(("num_pages", "host_pages"), [(7, None), (7, 0), (7, 6), (12, 30)])
def test_many_operations_against_a_model(num_pages, host_pages):
    """A longer run, with more steps whose users are in the cache."""
    rng = random.Random(torch.initial_seed())
    machine = CacheMachine()
    machine.start(num_pages, host_pages)
    for _ in range(1500):
        kind = rng.random()
        if kind < 0.45 and len(machine.open) < 3:
            batch = {rng.choice(USERS): rng.randrange(30) for _ in range(rng.randrange(4))}
            expect, written = rng.random() < 0.5, rng.random() < 0.5
            machine.begin(batch, expect, written, rng.choice([0, 1, 17]), rng.random() < 0.1)
        elif kind < 0.97 and machine.open:
            end = machine.roll_back if rng.random() < 0.3 else machine.release
            end(rng.randrange(3))
        elif 0.97 < kind < 0.998:
            machine.free([rng.choice(USERS)])
        elif kind > 0.998:
            machine.clear(True)
        machine.accounts_agree()
        machine.every_byte_is_the_one_written()
    if host_pages:
        assert min(machine.host_hits, machine.losses) > 20
