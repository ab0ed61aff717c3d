"""Tests of engines with stores: events of answered requests are stored once and in the order of
their times, and engines that share a store answer consistently.
"""

from __future__ import annotations

import logging
import random
import re
import sqlite3
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
from hstu_attn.serving import (
    Engine,
    Event,
    EventOrderError,
    EventTimeError,
    MemoryStore,
    NoHistoryError,
    SQLiteStore,
    StoreDamagedError,
    StoreError,
    commits,
    sqlite_store,
)
from hstu_attn.serving.redis_store import RedisStore
from tests.helpers.serving_models import (
    ITEMS,
    LONGEST,
    POISON,
    Boom,
    Gate,
    Histories,
    assert_close,
    make_cache,
    make_model,
    some_events,
)
from tests.helpers.stores import Place, RedisServer, events_of

pytestmark = pytest.mark.usefixtures("one_thread")


class SlowStore(MemoryStore):
    """A store whose commits wait until a test lets them proceed, or fail."""

    waits = True

    def __init__(self) -> None:
        super().__init__(1000, LONGEST)
        self.error: Exception | None = None
        self.reached, self.passed = threading.Semaphore(0), threading.Semaphore(0)

    def commit(self, changes: Any) -> list[int]:
        self.reached.release()
        assert self.passed.acquire(timeout=20)
        if self.error is not None:
            raise self.error
        return super().commit(changes)


# ---------------------------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_answers_are_those_of_what_is_stored(place: Place) -> None:
    """Answers match the stored events, also after engine and persistent store are reopened."""
    model = make_model("retrieval")
    histories, rng = Histories(model), random.Random(0)
    store = place.open(LONGEST)
    for part in range(3):
        with Engine(model, make_cache(9), store=store, max_batch_size=4) as engine:
            for turn in range(part * 10, part * 10 + 10):
                requests = [
                    (user, some_events(rng, turn * 10**7, rng.choice([1, 2, 9])), [1, 2, 3], None)
                    for user in rng.sample(range(8), 4)
                ]
                futures = [engine.submit_score(*request[:3]) for request in requests]
                for request, future in zip(requests, futures, strict=True):
                    assert_close(future.result(20), histories.expect(*request))
            for user, events in histories.events.items():
                assert events_of(store, user) == [*map(tuple, events.tolist())]
            assert engine.stats().hit_tokens > 0
        if place.kind != "memory":
            store.close()
            store = place.open(LONGEST)
    assert max(map(len, histories.events.values())) > LONGEST - LONGEST // 8


@pytest.mark.slow
def test_engines_that_share_a_store(shared_redis: RedisServer) -> None:
    """Two engines, each with its own connection to the store and its own cache, serve the same
    users from several threads. Each answer is that for the user's events in the order in which they
    were stored, up to those of the request.
    """
    shared_redis.client.flushall()
    model = make_model("ranking, times")
    users, answered = 5, list[tuple[int, Event, Tensor]]()
    refused = [0]
    clock = threading.Lock()
    latest = [0]

    def send(thread: int) -> None:
        rng = random.Random(thread)
        for _ in range(60):
            user = rng.randrange(users)
            with clock:
                latest[0] += 10
                event = Event(rng.randrange(ITEMS - 2), latest[0], rng.randrange(3))
            engine = rng.choice(engines)
            try:
                scores = engine.score(user, [event], [1, 2, 3], timeout=30)
            except EventOrderError:  # a later event was stored first
                refused[0] += 1
            else:
                answered.append((user, event, scores))

    with ExitStack() as stack:
        stores = [stack.enter_context(RedisStore(shared_redis.url, 1000)) for _ in range(2)]
        # Histories are not truncated, so that the events of every answer are known afterwards.
        engines = []
        model.max_history = 1000
        model.position = torch.nn.Embedding(1001, 24).double().requires_grad_(False)
        for store in stores:
            cache = make_cache(200)
            engines.append(stack.enter_context(Engine(model, cache, store=store, max_wait=0.001)))
        threads = [threading.Thread(target=send, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stored = {user: np.array(events_of(stores[0], user)) for user in range(users)}
        failed = [engine.stats().failed for engine in engines]
        hits = sum(engine.stats().hit_tokens for engine in engines)
    assert sum(failed) == refused[0]
    assert len(answered) == 240 - refused[0] == sum(map(len, stored.values()))
    for user, event, scores in answered:
        events = stored[user]
        (place,) = np.flatnonzero((events == event).all(1))
        assert_close(scores, model.whole(events[: place + 1], [1, 2, 3], event.time))
    assert hits > 100


def test_what_another_process_changed_is_not_read_from_the_cache(
    shared_redis: RedisServer,
) -> None:
    """Events that an engine has cached are appended, deleted and replaced directly in the store, as
    by another process, or by a Redis server that lost its last second.
    """
    shared_redis.client.flushall()
    model = make_model("retrieval")
    mine, other = (RedisStore(shared_redis.url, LONGEST) for _ in range(2))
    first = [(1, 1, 0), (2, 2, 0), (3, 3, 0)]
    with mine, other, Engine(model, make_cache(9), store=mine) as engine:
        engine.score(7, first, [1])
        for events, hits in (
            ([*first, (4, 4, 0)], 2),  # the cached rows stay valid
            ([*first, (5, 5, 0)], 0),  # here the last event is another
            ([(3, 3, 0), (5, 5, 0)], 0),
            ([(3, 3, 0)], 0),
        ):
            other.forget(7)
            other.add(7, events)
            before = engine.stats().hit_tokens
            found = engine.score(7, [], [1, 2], at=99)
            assert_close(found, model.whole(np.array(events), [1, 2], 99))
            assert engine.stats().hit_tokens - before == hits
        other.forget(7)
        with pytest.raises(NoHistoryError):
            engine.score(7, [], [1])


def test_conflicts_are_served_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process stores an event between the moments when a request is planned and stored."""
    model = make_model("retrieval")
    store = place.open(LONGEST)
    commit = store.commit
    others = [(5, 50, 0), (6, 60, 0)]

    def late(changes: Any) -> list[int]:
        if others and changes[0].user == 7:
            monkeypatch.setattr(store, "commit", commit)
            store.add(7, [others.pop(0)])
            monkeypatch.setattr(store, "commit", late)
        return commit(changes)

    with Engine(model, make_cache(9), store=store, max_batch_size=3, max_wait=0.05) as engine:
        engine.score(7, [(1, 1)], [1])
        engine.score(8, [(1, 1)], [1])
        monkeypatch.setattr(store, "commit", late)
        futures = [engine.submit_score(user, [(2, 70)], [3, 4]) for user in (7, 8, 7, 9)]
        expected: dict[int, list[tuple[int, ...]]] = {
            7: [(1, 1, 0), (5, 50, 0), (6, 60, 0), (2, 70, 0)],
            8: [(1, 1, 0), (2, 70, 0)],
            9: [(2, 70, 0)],
        }
        for user, future in zip((7, 8, 7, 9), futures, strict=True):
            whole = model.whole(np.array(expected[user]), [3, 4], 70)
            assert_close(future.result(20), whole)
        assert {user: events_of(store, user) for user in expected} == expected
        stats = engine.stats()
        assert (stats.completed, stats.failed, stats.cancelled) == (6, 0, 0)


# ---------------------------------------------------------------------------------------------
# Stored, then answered
# ---------------------------------------------------------------------------------------------


def test_no_answer_is_given_before_it_is_stored() -> None:
    model, store = make_model("retrieval"), SlowStore()
    with Engine(model, make_cache(9), store=store, max_wait=0.0) as engine:
        first = engine.submit_score(1, [(1, 1)], [1])
        assert store.reached.acquire(timeout=20)
        time.sleep(0.05)
        assert not first.done()
        assert not first.cancel()  # it is too late
        # Other requests are computed meanwhile, and wait for their commits.
        batches = engine.stats().batches
        second = engine.submit_score(2, [(2, 2)], [1])
        end = time.monotonic() + 20
        while engine.stats().batches == batches and time.monotonic() < end:
            time.sleep(0.001)
        assert engine.stats().batches == batches + 1
        assert not second.done()
        store.passed.release(2)
        assert len(first.result(20)) == len(second.result(20)) == 1


def test_a_store_that_is_too_slow_holds_up_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "_MOST_REQUESTS", 3)
    model, store = make_model("retrieval"), SlowStore()
    with Engine(model, make_cache(24), store=store, max_wait=0.0, max_batch_size=1) as engine:
        futures = [engine.submit_score(user, [(1, 1)], [1]) for user in range(8)]
        assert store.reached.acquire(timeout=20)
        end = time.monotonic() + 20
        while engine.stats().batches < 3 and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(0.1)
        assert engine.stats().batches == 3
        store.passed.release(8)
        for future in futures:
            assert future.result(20).shape == (1,)


def test_a_user_in_a_commit_waits_for_it() -> None:
    model, store = make_model("retrieval"), SlowStore()
    histories = Histories(model)
    with Engine(model, make_cache(9), store=store, max_wait=0.0) as engine:
        futures = [engine.submit_score(1, [(n, n)], [1, 2]) for n in range(3)]
        store.passed.release(3)
        for n, future in enumerate(futures):
            expected = histories.expect(1, [Event(n, n)], [1, 2], None)
            assert_close(future.result(20), expected)


@pytest.mark.parametrize("error", [StoreError("disk full"), ZeroDivisionError()])
def test_what_is_not_stored_fails_and_leaves_no_trace(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    model, store = make_model("retrieval"), SlowStore()
    histories, cache = Histories(model), make_cache(9)
    store.passed.release(100)
    with Engine(model, cache, store=store, max_wait=0.02) as engine:
        requests = [(user, [Event(user, 5)], [1, 2], None) for user in (1, 2)]
        for request in requests:
            assert_close(engine.score(*request[:3]), histories.expect(*request))
        store.error = error
        for _ in range(2):
            futures = [engine.submit_score(user, [(9, 9)], [1, 2]) for user in (1, 2, 3)]
            for future in futures:
                with pytest.raises(type(error)):
                    future.result(20)
        assert engine.stats().failed == 6
        assert "disk full" not in str(error) or engine.score(1, [], [1]).shape == (1,)
        store.error = None
        requests = [(user, [Event(user, 10)], [1, 2], None) for user in (1, 2, 3)]
        for request in requests:
            assert_close(engine.score(*request[:3]), histories.expect(*request))
    told = [record for record in caplog.records if record.name == "hstu_attn.serving"]
    assert [record.levelno for record in told] == [logging.ERROR, logging.WARNING]
    assert "The store fails" in told[0].message
    assert "works again" in told[1].message


def test_what_fails_or_is_cancelled_is_not_stored(place: Place) -> None:
    model = make_model("retrieval")
    store = place.open(LONGEST)
    with Engine(model, make_cache(9), store=store) as engine:
        engine.score(1, [(1, 1)], [1])
        with pytest.raises(Boom):
            engine.score(1, [(POISON, 2)], [1])
        gate = Gate(model)
        future = engine.submit_score(1, [(4, 4)], [1])
        assert gate.reached.wait(10)
        assert future.cancel()
        gate.opened.set()
        engine.score(1, [], [1])
    assert events_of(store, 1) == [(1, 1, 0)]


def test_close_waits_for_commits() -> None:
    model, store = make_model("retrieval"), SlowStore()
    engine = Engine(model, make_cache(9), store=store)
    future = engine.submit_score(1, [(1, 1)], [1])
    assert store.reached.acquire(timeout=20)
    closing = threading.Thread(target=engine.close)
    closing.start()
    store.passed.release()
    closing.join(20)
    assert not closing.is_alive()
    assert future.done()
    assert events_of(store, 1) == [(1, 1, 0)]


# ---------------------------------------------------------------------------------------------
# Retries, order and times
# ---------------------------------------------------------------------------------------------


def test_a_retry_does_not_double_an_event(place: Place) -> None:
    model = make_model("ranking")
    store = place.open(LONGEST)
    events = [(1, 10, 0), (2, 20, 0), (2, 20, 1), (3, 20, 1)]
    with Engine(model, make_cache(9), store=store) as engine:
        expected = model.whole(np.array(events), [4, 5], 20)
        for sent in (events, events, events[2:], events[:1], [*events, events[3]]):
            assert_close(engine.score("a", sent, [4, 5]), expected)
        assert events_of(store, "a") == events
        engine.score("a", [events[3], (4, 30, 0), (4, 30, 0)], [1])
        assert events_of(store, "a") == [*events, (4, 30, 0)]
        assert engine.stats().new_tokens == 5
        engine.score("b", [(1, 1, 0), (1, 1, 0)], [1])
        assert events_of(store, "b") == [(1, 1, 0)]


@pytest.mark.parametrize("drop", [0, 5])
@pytest.mark.parametrize("step", [0, 1], ids=["at one time", "one after the other"])
def test_a_long_request_that_is_sent_twice_changes_nothing(
    place: Place, drop: int, step: int
) -> None:
    """Only the request's latest events are stored, so the store cannot recognize the others."""
    model, store = make_model("retrieval"), place.open(LONGEST, drop)
    sent = [(n % 50, 10 + step * n, 0) for n in range(LONGEST + 5)]
    with Engine(model, make_cache(9), store=store) as engine:
        engine.score(1, [(51, 1), (52, 2)], [1])
        first = engine.score(1, sent, [1, 2])
        assert events_of(store, 1) == sent[-(LONGEST - drop) :]
        for again in (sent, sent[:-1] + sent[-2:]):
            assert_close(engine.score(1, again, [1, 2]), first)
        assert events_of(store, 1) == sent[-(LONGEST - drop) :]
        if step:
            with pytest.raises(EventOrderError):  # the last but one of these is new
                engine.score(1, [*sent[:-1], (53, sent[-2][1], 0), sent[-1]], [1])


def test_events_out_of_order_are_refused(place: Place) -> None:
    model = make_model("retrieval")
    store = place.open(LONGEST)
    with Engine(model, make_cache(9), store=store) as engine:
        with pytest.raises(
            EventOrderError,
            match=r"^new_events: expected events oldest first, got "
            r"time 4 at 2 after 5",
        ):
            engine.submit_score(1, [(1, 1), (1, 5), (1, 4)], [1])
        engine.score(1, [(1, 10), (2, 20)], [1])
        for sent in ([(3, 19)], [(1, 11), (2, 30)]):
            with pytest.raises(
                EventOrderError, match=r"^new_events: expected times from 20 up, .* got 1[19]"
            ):
                engine.score(1, sent, [1])
        engine.score(1, [(3, 20)], [1])  # as old as the last one
        assert events_of(store, 1) == [(1, 10, 0), (2, 20, 0), (3, 20, 0)]
        assert engine.stats().failed == 2


def test_times_that_are_not_plausible_are_refused() -> None:
    """The wall clock steps back by two days, and forward again."""
    now = [1_767_225_600]
    model, store = make_model("retrieval"), MemoryStore(10, LONGEST)
    time_range = lambda: (10**9, now[0] + 86400)  # noqa: E731
    with Engine(model, make_cache(9), store=store, time_range=time_range) as engine:
        engine.score(1, [(3, now[0] - 4 * 86400)], [1])
        engine.score(1, [(1, now[0])], [1])
        for wrong in (now[0] * 1000, now[0] + 86401, 5):
            with pytest.raises(
                EventTimeError, match=rf"^new_events: expected times from 10.* got {wrong} at 0"
            ):
                engine.submit_score(1, [(2, wrong)], [1])
        now[0] -= 2 * 86400
        with pytest.raises(EventTimeError):
            engine.score(1, [(2, now[0] + 2 * 86400 + 5)], [1])
        assert engine.score(1, [], [1, 2]).shape == (2,)
        now[0] += 3 * 86400
        engine.score(1, [(2, now[0])], [1])
        assert engine.stats().completed == 4
    assert len(events_of(store, 1)) == 3


def test_a_store_of_another_model_is_told(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("retrieval")
    store = place.open(LONGEST)
    store.add(1, [(ITEMS, 1)])
    store.add(2, [(1, 1, 1)])
    with Engine(model, make_cache(9), store=store, max_wait=0.05) as engine:
        futures = [engine.submit_score(user, [(1, 5)], [1]) for user in (1, 2, 3)]
        with pytest.raises(StoreError, match="store: expected items from 0 to 59 of user 1, got"):
            futures[0].result(20)
        with pytest.raises(StoreError, match="store: expected actions from 0 to 0 of user 2"):
            futures[1].result(20)
        assert futures[2].result(20).shape == (1,)
    assert "of another model" in caplog.text


@pytest.mark.faults
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("set", "redis: expected 8 bytes and 24 of each event in b'hstu:user:i2', got 22 bytes"),
        ("lpush", "could not read events .WRONGTYPE Operation"),
    ],
)
def test_users_whose_events_are_damaged_fail_alone(
    shared_redis: RedisServer, caplog: pytest.LogCaptureFixture, damage: str, message: str
) -> None:
    shared_redis.client.flushall()
    getattr(shared_redis.client, damage)("hstu:user:i2", b"not written by a store")
    model = make_model("retrieval")
    with (
        RedisStore(shared_redis.url, LONGEST) as store,
        Engine(model, make_cache(9), store=store, max_batch_size=3, max_wait=30.0) as engine,
    ):
        futures = [engine.submit_score(user, [(1, 5)], [1, 2]) for user in (1, 2, 3)]
        expected = model.whole(np.array([(1, 5, 0)]), [1, 2], 5)
        for number in (0, 2):
            assert_close(futures[number].result(20), expected)
        with pytest.raises(StoreDamagedError, match=message):
            futures[1].result(20)
    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert re.search(message, record.message)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("UPDATE events SET item = X'6162' WHERE user = 2", "expected events of integers of user"),
        ("UPDATE events SET time = 1.5 WHERE user = 2", "expected events of integers of user"),
        ("UPDATE users SET next = 0 WHERE id = 2", "could not write events .UNIQUE constraint"),
    ],
)
def test_users_whose_rows_are_damaged_fail_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str, message: str
) -> None:
    path, model = tmp_path / "events.sqlite", make_model("retrieval")
    with SQLiteStore(path, LONGEST) as store:
        for user in (1, 2, 3):
            store.add(user, [(user, 1)])
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute(change).rowcount == 1
    with (
        SQLiteStore(path, LONGEST) as store,
        Engine(model, make_cache(9), store=store, max_batch_size=3, max_wait=30.0) as engine,
    ):
        futures = [engine.submit_score(user, [(9, 5)], [1, 2]) for user in (1, 2, 3)]
        for user in (1, 3):
            expected = model.whole(np.array([(user, 1, 0), (9, 5, 0)]), [1, 2], 5)
            assert_close(futures[user - 1].result(20), expected)
            assert events_of(store, user) == [(user, 1, 0), (9, 5, 0)]
        with pytest.raises(StoreDamagedError, match=message):
            futures[1].result(20)
    [record] = caplog.records
    assert record.levelname == "ERROR"
    assert re.search(message, record.message)


# ---------------------------------------------------------------------------------------------
# Deleting
# ---------------------------------------------------------------------------------------------


def test_a_deleted_user_is_nowhere(place: Place) -> None:
    """The user is removed from the pages of the device and of the host, and from the store."""
    model = make_model("retrieval")
    store, cache = place.open(LONGEST), make_cache(6, host_pages=12)
    rng = random.Random(1)
    with Engine(model, cache, store=store) as engine:
        for user in range(4):
            engine.score(user, some_events(rng, 0, 33), [1])
        assert cache.stats().host_users == 2
        for left, user in ((3, 0), (2, 3)):  # on the host, and on the device
            engine.forget(user)
            stats = cache.stats()
            assert stats.used_pages + stats.used_host_pages == 3 * left
            assert stats.users == left
            assert engine.stats().users == left
            assert not events_of(store, user)
            with pytest.raises(NoHistoryError):
                engine.score(user, [], [1])
        engine.forget("never seen")
        expected = model.whole(np.array([(1, 1, 0)]), [1, 2], 1)
        assert_close(engine.score(0, [(1, 1)], [1, 2]), expected)  # an older event than before


def test_what_is_deleted_is_not_answered_from_though_the_store_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program reads the log, so the store deletes the events, but raises an error."""
    monkeypatch.setattr(sqlite_store, "_WAIT_SECONDS", 0.05)
    path, model = tmp_path / "events.sqlite", make_model("retrieval")
    with (
        SQLiteStore(path, LONGEST) as store,
        Engine(model, make_cache(9), store=store) as engine,
        closing(sqlite3.connect(path, isolation_level=None)) as reader,
    ):
        engine.score(1, [(1, 1), (2, 2)], [1])
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM events").fetchone()
        with pytest.raises(StoreError, match="what was deleted is still in the log"):
            engine.forget(1)
        assert not events_of(store, 1)
        with pytest.raises(NoHistoryError):
            engine.score(1, [], [1])
        reader.execute("COMMIT")
        engine.forget(1)


def test_what_another_process_has_deleted_is_freed(place: Place) -> None:
    model = make_model("retrieval")
    store, cache = place.open(LONGEST), make_cache(12)
    with Engine(model, cache, store=store) as engine:
        for user in range(3):
            engine.score(user, [(1, 1), (2, 2)], [1])
        engine.forget(1, stored=False)
        assert cache.stats().users == 2
        assert events_of(store, 1) == events_of(store, 0)
        expected = model.whole(np.array([(1, 1, 0), (2, 2, 0)]), [1, 2], 2)
        assert_close(engine.score(1, [], [1, 2]), expected)


def test_pruning(place: Place) -> None:
    model = make_model("retrieval")
    store, cache = place.open(LONGEST), make_cache(12)
    histories, rng = Histories(model), random.Random(2)
    with Engine(model, cache, store=store) as engine:
        for user in range(4):
            request = (user, some_events(rng, user * 10**6, 9), [1, 2], None)
            assert_close(engine.score(*request[:3]), histories.expect(*request))
        assert engine.prune(before=2 * 10**6) == 2
        assert engine.stats().users == cache.stats().users == 2
        assert engine.prune(latest=5) == 2
        assert engine.prune(latest=5) == 0
        for user in (2, 3):
            histories.events[user] = histories.events[user][-5:]
            request = (user, some_events(rng, 10**7, 1), [1, 2], None)
            assert_close(engine.score(*request[:3]), histories.expect(*request))
        with pytest.raises(NoHistoryError):
            engine.score(0, [], [1])
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.forget(1)


@pytest.mark.slow
def test_deleting_while_users_are_served(place: Place) -> None:
    """Threads append events to users who are deleted and pruned meanwhile. Each answer is that for
    a suffix of the events that its thread has sent; no request fails.
    """
    model = make_model("retrieval")
    store = place.open(LONGEST)
    failures = list[Exception]()
    ended = threading.Event()

    def send(user: int) -> None:
        sent = list[tuple[int, int, int]]()
        rng = random.Random(user)
        try:
            for n in range(60):
                sent.append((rng.randrange(ITEMS - 2), n, 0))
                scores = engine.score(user, sent[-1:], [1, 2, 3], timeout=30)
                assert any(
                    torch.allclose(
                        scores, model.whole(np.array(sent[k:]), [1, 2, 3], n), 1e-5, 1e-5
                    )
                    for k in reversed(range(max(0, len(sent) - LONGEST), len(sent)))
                )
        except Exception as error:
            failures.append(error)

    with Engine(model, make_cache(9), store=store, max_wait=0.001) as engine:
        threads = [threading.Thread(target=send, args=(n,)) for n in range(3)]

        def delete() -> None:
            rng = random.Random(9)
            while not ended.is_set():
                if rng.random() < 0.5:
                    engine.forget(rng.randrange(3))
                else:
                    engine.prune(latest=rng.randrange(1, 9))
                time.sleep(0.01)

        deleting = threading.Thread(target=delete)
        for thread in (*threads, deleting):
            thread.start()
        for thread in threads:
            thread.join()
        ended.set()
        deleting.join()
        assert not failures
        assert engine.stats().failed == 0


def test_a_small_cache_bounds_what_is_known() -> None:
    """An engine keeps no events of users whose pages have been evicted."""
    model, store = make_model("retrieval"), MemoryStore(1000, LONGEST)
    with Engine(model, make_cache(3), store=store) as engine:
        for user in range(50):
            engine.score(user, some_events(random.Random(user), 0, 10), [1])
        assert len(engine._histories._known) <= 5
        assert engine._histories._size == 10 * len(engine._histories._known)
        assert len(store) == 50
