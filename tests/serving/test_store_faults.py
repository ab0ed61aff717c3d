"""Tests of engines with faulty stores: a full store, the files of a killed process, a hanging
Redis, wrong clocks. Acknowledged events are stored, and the log reports the fault.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
from hstu_attn.serving import (
    Engine,
    EventOrderError,
    EventStore,
    EventTimeError,
    NoHistoryError,
    SQLiteStore,
    StoreError,
)
from hstu_attn.serving.redis_store import RedisStore
from tests.conftest import NO_WAITAOF
from tests.helpers.serving_models import LONGEST, assert_close, make_cache, make_model
from tests.helpers.stores import Place, RedisServer, events_of, redis_server, small_disk

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("one_thread")]

YEARS = 10 * 365 * 86400


# ---------------------------------------------------------------------------------------------
# A store without room
# ---------------------------------------------------------------------------------------------


def limit(store: EventStore, server: RedisServer | None, limited: bool) -> None:
    """Limits the store to its current size, or removes the limit."""
    if isinstance(store, SQLiteStore):
        pages = 1 if limited else 2**30  # SQLite never limits a file to less than its size
        store._writer.execute(f"PRAGMA max_page_count = {pages}")
    else:
        assert server is not None
        server.client.config_set("maxmemory", "1" if limited else "0")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["sqlite", "redis"], indirect=True)
def test_a_full_store_refuses_events_until_there_is_room(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    model, store = make_model("retrieval"), place.open(LONGEST)
    acknowledged: dict[int, list[tuple[int, int, int]]] = {}
    message = "could not write events .(database or disk is full|.*not allowed when used memory)"

    def send(user: int, at: int) -> None:
        engine.score(user, [(user % 50, at)], [1, 2])
        acknowledged.setdefault(user, []).append((user % 50, at, 0))

    def send_of_new_users() -> None:
        for user in range(1, 10**4):  # SQLite has room in the last pages of its tables
            send(user, 2)

    with Engine(model, make_cache(24), store=store) as engine:
        try:
            send(0, 1)
            limit(store, place.server, True)
            with pytest.raises(StoreError, match=message):
                send_of_new_users()
            last = len(acknowledged)
            with pytest.raises(StoreError, match=message):
                send(last, 2)
            expected = model.whole(np.array(acknowledged[0]), [1, 2], acknowledged[0][-1][1])
            assert_close(engine.score(0, [], [1, 2]), expected)  # brings no event
        finally:
            limit(store, place.server, False)
        for user in (0, last):
            send(user, 100)
            expected = model.whole(np.array(acknowledged[user]), [1, 2], 100)
            assert_close(engine.score(user, [], [1, 2]), expected)
    assert {user: events_of(store, user) for user in acknowledged} == acknowledged
    told = [record for record in caplog.records if record.name == "hstu_attn.serving"]
    assert [record.levelno for record in told] == [logging.ERROR, logging.WARNING]
    assert told[0].message.startswith("The store fails, and requests with it until it works again")
    assert re.search(message, told[0].message)
    assert told[1].message == "The store works again"


@pytest.mark.parametrize("place", ["sqlite", "redis"], indirect=True)
def test_events_are_deleted_from_a_full_store(place: Place) -> None:
    """An operator can make room by deleting events."""
    model, store = make_model("retrieval"), place.open(LONGEST)
    with Engine(model, make_cache(24), store=store) as engine:
        for user in range(6):
            engine.score(user, [(n, n) for n in range(20)], [1])
        limit(store, place.server, True)
        try:
            engine.forget(0)
            assert engine.prune(latest=4) == 5
            assert engine.prune(before=18) == 5
            assert engine.prune(before=20) == 5
        finally:
            limit(store, place.server, False)
        assert engine.stats().users == 0
        for user in range(6):
            assert events_of(store, user) == []


# ---------------------------------------------------------------------------------------------
# Recovery after a kill
# ---------------------------------------------------------------------------------------------


def test_what_is_recovered_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The files are copied while a process has them open, which gives their state after kill -9."""
    path, left = tmp_path / "events.sqlite", tmp_path / "left" / "events.sqlite"
    left.parent.mkdir()
    with SQLiteStore(path, LONGEST) as store:
        for user in range(3):
            store.add(user, [(user, 1), (user, 2)])
        for end in ("", "-wal"):
            shutil.copy(f"{path}{end}", f"{left}{end}")
    SQLiteStore(path, LONGEST).close()
    assert not caplog.records
    with SQLiteStore(left, LONGEST) as store:
        assert [events_of(store, user) for user in range(3)] == [
            [(user, 1, 0), (user, 2, 0)] for user in range(3)
        ]
    [line] = caplog.messages
    assert line.startswith(f"{left}: was not closed when it was used last; ")
    assert line.endswith(
        " pages of changes have been recovered from its log, and 3 users have events"
    )
    assert int(line.split("; ")[1].split()[0]) > 0
    SQLiteStore(left, LONGEST).close()
    assert len(caplog.records) == 1


# ---------------------------------------------------------------------------------------------
# Redis hangs
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_that_hangs_is_waited_for_once(shared_redis: RedisServer) -> None:
    """A command waits for `timeout`, including the first one of a new connection."""
    shared_redis.client.flushall()
    assert shared_redis.process is not None
    with RedisStore(shared_redis.url, LONGEST, timeout=1.0) as store:
        store.add(1, [(1, 1)])
        os.kill(shared_redis.process.pid, signal.SIGSTOP)
        try:
            for _ in range(2):
                started = time.monotonic()
                with pytest.raises(StoreError, match="could not read events"):
                    store.read([1], [0])
                assert 1.0 <= time.monotonic() - started < 1.95
        finally:
            os.kill(shared_redis.process.pid, signal.SIGCONT)
        store.add(1, [(2, 2)])
        assert events_of(store, 1) == [(1, 1, 0), (2, 2, 0)]


# ---------------------------------------------------------------------------------------------
# Redis answers before it knows
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_wait_aof_acknowledges_what_is_on_the_disk(tmp_path: Path) -> None:
    """Under `everysec` alone, Redis may answer before its full disk refuses the event."""
    with small_disk(tmp_path) as disk, redis_server(tmp_path) as server:
        if not server.has_wait_aof:
            pytest.skip(NO_WAITAOF)
        server.client.config_set("appendfsync", "no")
        with pytest.raises(ValueError, match="with appendfsync everysec, got no"):
            RedisStore(server.url, 5000, wait_aof=True)
        server.client.config_set("appendfsync", "everysec")
        acknowledged: list[tuple[int, int, int]] = []

        def add() -> None:
            event = (1, len(acknowledged), 0)
            store.add(1, [event])
            acknowledged.append(event)

        def add_until_full() -> None:
            while len(acknowledged) < 5000:
                add()

        with RedisStore(server.url, 5000, timeout=1.0, wait_aof=True) as store:
            disk.fill(2**12)
            with pytest.raises(StoreError, match="the append-only file was not written in time"):
                add_until_full()
            server.kill()
        assert len(acknowledged) > 3
        disk.clear()
        server.start()
        with RedisStore(server.url, 5000) as store:
            stored = events_of(store, 1)
            assert stored[: len(acknowledged)] == acknowledged
            assert len(stored) <= len(acknowledged) + 1  # the one that was not acknowledged


# ---------------------------------------------------------------------------------------------
# Jobs that fail
# ---------------------------------------------------------------------------------------------


def test_a_failure_between_batches_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request waits for the engine's work after a commit. If it fails, serving continues."""
    model = make_model("retrieval")
    with (
        SQLiteStore(tmp_path / "events.sqlite", LONGEST) as store,
        Engine(model, make_cache(9), store=store) as engine,
    ):
        with monkeypatch.context() as patched:
            patched.setattr(engine._histories, "put", lambda *_: 1 // 0)
            engine.score(1, [(1, 1)], [1])
            end = time.monotonic() + 20
            while not caplog.records:
                assert time.monotonic() < end, "the log has no line"
                time.sleep(0.01)
        [record] = caplog.records
        assert (record.levelname, record.message) == (
            "ERROR",
            "What was to be done between batches failed",
        )
        assert record.exc_info is not None
        assert record.exc_info[0] is ZeroDivisionError
        found = engine.score(1, [(2, 2)], [1, 2])
        assert_close(found, model.whole(np.array([(1, 1, 0), (2, 2, 0)]), [1, 2], 2))
        assert events_of(store, 1) == [(1, 1, 0), (2, 2, 0)]


# ---------------------------------------------------------------------------------------------
# Clocks
# ---------------------------------------------------------------------------------------------


def test_a_clock_that_was_ahead_locks_no_user_out(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """The clocks of the server and of a client are wrong by ten years, and then right again.

    Events that arrived meanwhile stay stored, and take effect in ten years.
    """
    now = [10**9]
    model, store = make_model("retrieval"), place.open(LONGEST)
    time_range = lambda: (10**8, now[0] + 300)  # noqa: E731
    ahead = [(3, 10**9 + YEARS, 0), (4, 10**9 + YEARS + 9, 0)]
    before: dict[int, list[tuple[int, int, int]]] = {1: [(1, 10**9 - 5, 0), (2, 10**9, 0)], 2: []}
    with Engine(model, make_cache(9), store=store, time_range=time_range) as engine:
        engine.score(1, before[1], [1])
        now[0] += YEARS
        for user in (1, 2):
            engine.score(user, ahead, [1])
        now[0] -= YEARS
        with pytest.raises(NoHistoryError):
            engine.score(2, [], [1])
        with pytest.raises(
            EventOrderError, match=r"expected times from 1000000000 up, .* got 9999"
        ):
            engine.score(1, [(5, 10**9 - 1)], [1])
        assert_close(engine.score(1, [], [1, 2]), model.whole(np.array(before[1]), [1, 2], 10**9))
        for user, events in before.items():
            for at in (10**9 + 7, 10**9 + 8):
                events.append((5, at, 0))
                for _ in range(2):  # the second time, the request is repeated
                    found = engine.score(user, [(5, at)], [1, 2])
                    assert_close(found, model.whole(np.array(events), [1, 2], at))
                    assert events_of(store, user) == events + ahead
        assert engine.stats().new_tokens == 2 + 2 * 2 + 2 * 2
        now[0] += YEARS
        for user, events in before.items():
            expected = model.whole(np.array(events + ahead), [1, 2], ahead[-1][1])
            assert_close(engine.score(user, [], [1, 2]), expected)
            with pytest.raises(EventOrderError):
                engine.score(user, [(5, 10**9 + 9)], [1])
            engine.score(user, [(6, ahead[-1][1])], [1])
            assert events_of(store, user) == [*events, *ahead, (6, ahead[-1][1], 0)]
    assert [record.levelname for record in caplog.records] == ["WARNING"]  # none of the other user
    assert caplog.messages[0] == (
        f"2 stored events of user 2, the last at {10**9 + YEARS + 9}, are left out while they lie "
        "ahead, and perhaps those of others: no event is later than 1000000300 by this machine's "
        "clock"
    )


def test_a_clock_that_steps_back_deletes_nothing(place: Place) -> None:
    """A refused event is sent again while the server's clock is two hours behind."""
    hour, now = 3600, [10**9]
    model, store = make_model("retrieval"), place.open(LONGEST)
    time_range = lambda: (10**8, now[0] + 300)  # noqa: E731
    first, between, last = (1, now[0] - 120 * hour), (2, now[0] - 24 * hour), (3, now[0] - 10)
    with Engine(model, make_cache(9), store=store, time_range=time_range) as engine:
        engine.score(1, [first], [1])
        engine.score(1, [last], [1])
        with pytest.raises(EventOrderError):
            engine.score(1, [between], [1])
        now[0] -= 2 * hour
        rows = np.array([(*event, 0) for event in (first, between, last)])
        found = engine.score(1, [between], [1, 2])
        assert_close(found, model.whole(rows[:2], [1, 2], between[1]))
        assert events_of(store, 1) == [*map(tuple, rows.tolist())]
        now[0] += 2 * hour
        for _ in range(2):
            assert_close(engine.score(1, [last], [1, 2]), model.whole(rows, [1, 2], last[1]))
        stats = engine.stats()
        assert (stats.new_tokens, stats.failed) == (3, 1)
        rows = np.concatenate([rows, [(4, now[0], 0)]])
        assert_close(engine.score(1, [(4, now[0])], [1, 2]), model.whole(rows, [1, 2], now[0]))
    assert events_of(store, 1) == [*map(tuple, rows.tolist())]


def test_events_that_lie_ahead_leave_room_for_others(place: Place) -> None:
    """After the clock steps back, a full history is in the future, and another one is filled."""
    now, day = [10**9], 86400
    model, store = make_model("retrieval"), place.open(LONGEST)
    time_range = lambda: (10**8, now[0] + 300)  # noqa: E731
    ahead = [(n % 50, now[0] + n, 0) for n in range(LONGEST)]
    earlier = [(n % 40, now[0] - day + n, 0) for n in range(LONGEST + 1)]
    with Engine(model, make_cache(9), store=store, time_range=time_range) as engine:
        engine.score(1, ahead, [1])
        now[0] -= day
        for event in earlier:
            engine.score(1, [event], [1])
        kept = earlier[-(LONGEST - LONGEST // 8) :]
        assert events_of(store, 1) == kept + ahead
        expected = model.whole(np.array(kept), [1, 2], earlier[-1][1])
        assert_close(engine.score(1, [], [1, 2]), expected)
        now[0] += day
        expected = model.whole(np.array(ahead[LONGEST // 8 :]), [1, 2], ahead[-1][1])
        assert_close(engine.score(1, [], [1, 2]), expected)
        assert events_of(store, 1) == kept + ahead
        engine.score(1, [(1, now[0] + 300)], [1])
        assert events_of(store, 1) == [*ahead[LONGEST // 8 :], (1, now[0] + 300, 0)]


@pytest.mark.parametrize("place", ["memory", "redis"], indirect=True)
def test_one_of_two_servers_has_a_clock_that_is_behind(place: Place) -> None:
    """The late server deletes no event of the other server, and its own events are stored in order
    of time. A user who is deleted meanwhile is new to both servers.
    """
    model, store = make_model("retrieval"), place.open(LONGEST)
    ranges = [lambda: (10**8, 10**9 + 300), lambda: (10**8, 10**9 - 3600)]
    right, behind = (
        Engine(model, make_cache(9), store=store, time_range=time_range) for time_range in ranges
    )
    with right, behind:
        right.score(1, [(1, 10**9 - 9000), (2, 10**9)], [1])
        for turn in range(1, 4):
            stored = [(1, 10**9 - 9000), *((3, 10**9 - 9000 + n) for n in range(1, turn + 1))]
            early = np.array([(*event, 0) for event in stored])
            found = behind.score(1, stored[-1:], [1, 2])
            assert_close(found, model.whole(early, [1, 2], stored[-1][1]))
            late = np.array([(2 + n, 10**9 + n, 0) for n in range(turn + 1)])
            found = right.score(1, late[-1:], [1, 2])
            expected = np.concatenate([early, late])
            assert_close(found, model.whole(expected, [1, 2], late[-1, 1]))
            assert events_of(store, 1) == [*map(tuple, expected.tolist())]
        right.forget(1)
        for engine in (behind, right):
            with pytest.raises(NoHistoryError):
                engine.score(1, [], [1])


def test_a_client_whose_clock_is_ahead_locks_its_user_out_for_minutes_at_most(
    place: Place,
) -> None:
    now = [10**9]
    model, store = make_model("retrieval"), place.open(LONGEST)
    time_range = lambda: (10**8, now[0] + 300)  # noqa: E731
    with Engine(model, make_cache(9), store=store, time_range=time_range) as engine:
        with pytest.raises(
            EventTimeError, match=r"to 1000000300, .* got 1000000301 at 0"
        ) as caught:
            engine.score(1, [(1, now[0] + 301)], [1])
        error = caught.value
        assert (error.place, error.time, error.limits) == (0, 10**9 + 301, (10**8, 10**9 + 300))
        with pytest.raises(NoHistoryError):
            engine.score(1, [], [1])  # nothing has been stored
        engine.score(1, [(1, now[0] + 300)], [1])
        now[0] += 299
        with pytest.raises(EventOrderError):
            engine.score(1, [(2, now[0])], [1])
        now[0] += 1
        engine.score(1, [(2, now[0])], [1])
    assert events_of(store, 1) == [(1, 10**9 + 300, 0), (2, 10**9 + 300, 0)]
