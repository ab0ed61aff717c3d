"""Tests of the event stores: their contents, also after closing and reopening."""

from __future__ import annotations

import multiprocessing
import random
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
from hstu_attn.serving import EventStore, MemoryStore, SQLiteStore, StoreError, open_store
from hstu_attn.serving.events import Change, Stored, User, user_key, user_of
from hstu_attn.serving.histories import Histories, History
from hstu_attn.serving.redis_store import RedisStore
from tests.helpers.stores import Place, RedisServer

USERS: list[User] = [7, "7", -7, 0, 2**80, "", "i7", "é\0\n", "*?[a]", "x" * 5000]
NOTHING = np.empty((0, 3), np.int64)


def rows(*events: tuple[int, int, int]) -> np.ndarray:
    return np.array(events, np.int64).reshape(-1, 3)


def events_of(store: EventStore, user: User) -> list[list[int]]:
    (stored,) = store.read([user], [0])
    return [] if stored is None else stored.events.tolist()


# ---------------------------------------------------------------------------------------------
# What they keep
# ---------------------------------------------------------------------------------------------


def test_random_changes(place: Place) -> None:
    """A dictionary is the reference; the store is reopened at random."""
    rng = random.Random(1)
    store, expected = place.open(12), dict[User, np.ndarray]()
    versions: dict[User, int] = {}
    for turn in range(300):
        some = rng.sample(USERS, rng.randrange(1, 5))
        action = rng.random()
        if action < 0.75:
            changes, after = [], {}
            for user in some:
                before = Stored(versions.get(user, 0), expected.get(user, NOTHING))
                new = [
                    (rng.randrange(2**40), 10 * turn + n, n)
                    for n in range(rng.choice([1, 1, 3, 20]))
                ]
                change = store.append(user, before, rows(*new))
                assert len(change.events) + change.kept <= 12
                if rng.random() < 0.2:  # another process was first
                    change = change._replace(version=before.version + 1)
                else:
                    kept = before.events[len(before.events) - change.kept :]
                    after[user] = np.concatenate([kept, change.events])
                    assert (
                        after[user] == np.concatenate([kept, rows(*new)])[-len(after[user]) :]
                    ).all()
                changes.append(change)
            made = store.commit(changes)
            assert [bool(version) for version in made] == [user in after for user in some]
            expected |= after
            versions |= {user: version for user, version in zip(some, made, strict=True) if version}
        elif action < 0.85:
            store.forget(some[0])
            expected.pop(some[0], None)
            versions.pop(some[0], None)
        elif action < 0.9:
            before, latest = 10 * (turn - rng.randrange(60)), rng.choice([None, 2, 5])
            before = max(0, before)
            pruned = [user for users in store.prune(before=before, latest=latest) for user in users]
            assert len(set(pruned)) == len(pruned)
            for user, events in [*expected.items()]:
                stay = events[events[:, 1] >= before]
                stay = stay if latest is None else stay[-latest:]
                assert (user in pruned) == (len(stay) < len(events))
                if user in pruned:
                    versions.pop(user)
                    expected[user] = stay
                    if not len(stay):
                        del expected[user]
                    else:
                        (stored,) = store.read([user], [0])
                        assert stored is not None
                        versions[user] = stored.version
        elif place.kind != "memory":
            store.close()
            store = place.open(12)
        assert len(store) == len(expected)
        found = store.read(USERS, [0] * len(USERS))
        for user, stored in zip(USERS, found, strict=True):
            if user in expected:
                assert stored is not None
                assert (stored.version, stored.events.tolist()) == (
                    versions[user],
                    expected[user].tolist(),
                )
                assert stored.events.dtype == np.int64
            else:
                assert stored is None
        known = [*expected]
        assert store.read(known, [versions[user] for user in known]) == [None] * len(known)
    assert len(expected) > 3


def test_what_was_read_stays_as_it_was(place: Place) -> None:
    """A history that was read stays unchanged when the stored one grows or is truncated."""
    store, version = place.open(40), 0
    read: list[tuple[np.ndarray, list[list[int]]]] = []
    expected: list[list[int]] = []
    for turn in range(60):
        new = [(turn, 10 * turn + n, 0) for n in range(1 + turn % 3)]
        change = store.append("a", Stored(version, rows(*expected)), rows(*new))
        (version,) = store.commit([change])
        expected = expected[len(expected) - change.kept :] + change.events.tolist()
        (stored,) = store.read(["a"], [0])
        assert stored is not None
        read.append((stored.events, expected))
        assert store.commit([Change("a", version + 1, change.kept, rows((9, 9, 9)))]) == [0]
    lengths = [len(events) for _, events in read]
    assert sum(b < a for a, b in pairwise(lengths)) > 5  # cuts
    for events, as_read in read:
        assert events.tolist() == as_read


def test_a_history_goes_on_from_what_is_stored() -> None:
    """Continuations of a history that are not stored leave no trace in those that are."""
    store, freed, rng = MemoryStore(10, 50), list[int](), random.Random(3)
    histories = Histories(store, 10**6, 100, 1, freed.extend)
    expected: list[list[int]] = []
    keys: set[int] = set()
    for turn in range(200):
        (before,) = histories.read(["a"])
        assert isinstance(before, History)
        assert before.events.tolist() == expected
        for kept in (False, True):
            new = rows(*((rng.randrange(100), turn, 0) for _ in range(rng.choice([1, 1, 2, 30]))))
            after, change = histories.extended("a", before, new)
            continued = expected[len(expected) - change.kept :] + change.events.tolist()
            assert after.events.tolist() == continued
            assert (after.key == before.key) == (change.kept == len(expected))
            assert before.events.tolist() == expected
            if kept or rng.random() < 0.3:
                break
        (version,) = store.commit([change])
        histories.put("a", after._replace(version=version))
        expected = continued
        keys.add(after.key)
    assert len(keys) > 10
    assert set(freed) == keys - {after.key}


def test_no_version_comes_twice(place: Place) -> None:
    store, seen = place.open(), set()
    for _ in range(3):
        version = 0
        for n in range(5):
            (version,) = store.commit([Change(1, version, n, rows((1, n, 0)))])
            assert version not in seen
            seen.add(version)
        store.forget(1)


def test_users_are_told_apart() -> None:
    assert len({user_key(user) for user in USERS}) == len(USERS)
    assert [user_of(user_key(user)) for user in USERS] == USERS
    assert user_key(True) == user_key(1)  # as in a dictionary
    with pytest.raises(ValueError, match=r"user: expected Unicode text, got '\\ud800'"):
        user_key("\ud800")


def test_add_and_seed(place: Place) -> None:
    store = place.open(8, 2)
    for n in range(5):
        store.add("a", [(n, 10 * n), (n, 10 * n + 1)])
    assert [event[1] for event in events_of(store, "a")] == [20, 21, 30, 31, 40, 41]
    histories: list[tuple[User, np.ndarray]] = [
        ("a", rows((9, 9, 9))),  # this user has events already
        ("none", NOTHING),
        *((user, rows(*((1, n, 0) for n in range(user)))) for user in range(20)),
    ]

    def interrupted() -> Any:
        yield from histories[:7]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.seed(interrupted(), 3)
    assert store.seed(histories, 3)
    assert not store.seed([("new", rows((1, 1, 1)))])
    assert len(store) == 20
    assert [len(events_of(store, user)) for user in range(20)] == [*range(9), *[6] * 11]
    assert events_of(store, "a")[-1][1] == 41
    assert not events_of(store, "new")


def test_compacting_loses_nothing(place: Place) -> None:
    store = place.open()
    for user in range(50):
        store.add(user, [(user, n) for n in range(30)])
    for user in range(0, 50, 2):
        store.forget(user)
    store.compact()
    assert len(store) == 25
    assert [len(events_of(store, user)) for user in range(4)] == [0, 30, 0, 30]


def test_notes(place: Place) -> None:
    store = place.open()
    assert store.note("a") is None
    for value in (b"", b"\0\xff", b"x" * 10**5):
        store.set_note("a", value)
        assert store.note("a") == value
    if place.kind != "memory":
        store.close()
        assert place.open().note("a") == b"x" * 10**5


def test_a_note_is_replaced_if_it_is_as_expected(place: Place) -> None:
    store = place.open()
    found = None
    for expected, value in (
        (b"a", b"b"),  # the store has no note yet
        (None, b""),
        (None, b"c"),
        (b"", b"\0\xff"),
        (b"", b"\0\xff"),
        (b"\0", b"d"),
    ):
        assert store.replace_note("a", expected, value) is (expected == found)
        found = value if expected == found else found
        assert store.note("a") == found
    assert found == b"\0\xff"
    assert store.note("b") is None


def test_notes_of_several_threads_are_not_lost(place: Place) -> None:
    """The threads belong to two processes if processes can share the store."""
    stores = [place.open()] * 2 if place.kind != "redis" else [place.open(), place.open()]

    def count(store: EventStore) -> None:
        done = 0
        while done < 25:
            note = store.note("count")
            done += store.replace_note("count", note, b"%d" % (int(note or 0) + 1))

    with ThreadPoolExecutor(4) as threads:
        for counted in [threads.submit(count, store) for store in stores * 2]:
            counted.result(60)
    assert stores[0].note("count") == b"100"


def test_a_longer_history_than_is_wanted_is_cut(place: Place) -> None:
    """A store may be reopened with a smaller `max_events`."""
    if place.kind == "memory":
        pytest.skip("is not opened again")
    with place.open(40) as store:
        store.add(1, [(n, n) for n in range(30)])
    store = place.open(8, 2)
    store.add(1, [(30, 30)])
    assert [event[0] for event in events_of(store, 1)] == [*range(24, 31)]


def test_threads_do_not_lose_changes(place: Place) -> None:
    store = place.open(1000)

    def add(thread: int) -> None:
        for n in range(15):
            store.add("common", [(thread, n)])

    threads = [threading.Thread(target=add, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = events_of(store, "common")
    assert sorted(map(tuple, events)) == sorted((t, n, 0) for t in range(4) for n in range(15))
    for thread_number in range(4):
        assert [n for t, n, _ in events if t == thread_number] == [*range(15)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_events": 0}, "max_events: expected a positive count, got 0"),
        ({"max_events": 5, "drop": 5}, "drop: expected from 0 to 4, got 5"),
    ],
)
def test_bad_sizes_are_refused(place: Place, arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place.open(**arguments)


def test_bad_limits_are_refused(place: Place) -> None:
    store = place.open()
    for limits in ({"before": -1}, {"latest": -1}):
        with pytest.raises(
            ValueError, match=r"(before|latest): expected a number from 0 up, got -1"
        ):
            list(store.prune(**limits))


# ---------------------------------------------------------------------------------------------
# SQLite
# ---------------------------------------------------------------------------------------------


def test_one_process_has_the_file(tmp_path: Path) -> None:
    path = tmp_path / "events.sqlite"
    with (
        SQLiteStore(path, 40),
        pytest.raises(ValueError, match=r"events.sqlite: expected a store that no other process"),
    ):
        SQLiteStore(path, 40)
    SQLiteStore(path, 40).close()
    link = tmp_path / "link.sqlite"
    link.symlink_to(path)
    with SQLiteStore(link, 40), pytest.raises(ValueError, match="expected a store that no other"):
        SQLiteStore(path, 40)


def damage(path: Path, kind: str) -> None:
    content = bytearray(path.read_bytes())
    if kind == "empty":
        content = bytearray()
    elif kind == "text":
        content = bytearray(b"user,item,time\n1,2,3\n" * 500)
    elif kind == "header":
        content[:100] = bytes(100)
    elif kind == "schema":
        content[100:4096] = b"\xff" * 3996
    elif kind == "cut":
        content = content[:5000]
    elif kind == "other":
        path.unlink()
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE users (a)")
        connection.commit()
        connection.close()
        return
    path.write_bytes(content)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["empty", "text", "header", "schema", "cut", "other"])
def test_a_damaged_file_is_refused_and_left(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "events.sqlite"
    with SQLiteStore(path, 40) as store:
        store.seed((user, rows((1, 1, 0))) for user in range(500))
    damage(path, kind)
    content = path.read_bytes()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"events\.sqlite: expected a store of events"):
            SQLiteStore(path, 40)
        assert path.read_bytes() == content


@pytest.mark.faults
def test_damage_that_is_found_later_is_told(tmp_path: Path) -> None:
    path = tmp_path / "events.sqlite"
    with SQLiteStore(path, 40) as store:
        store.seed((user, rows(*((1, n, 0) for n in range(40)))) for user in range(500))
    content = bytearray(path.read_bytes())
    for page in range(len(content) // 8192, len(content) // 4096):
        if content[4096 * page] in (10, 13):  # leaves of trees
            content[4096 * page : 4096 * page + 200] = b"\xff" * 200
    path.write_bytes(content)
    with SQLiteStore(path, 40) as store, pytest.raises(StoreError, match="could not read events"):
        store.read([*range(500)], [0] * 500)


@pytest.mark.faults
def test_a_lost_file_is_not_made_again(tmp_path: Path) -> None:
    path = tmp_path / "events.sqlite"
    (tmp_path / "events.sqlite-wal").write_bytes(b"log")
    with pytest.raises(ValueError, match=r"expected it beside its log, events\.sqlite-wal"):
        SQLiteStore(path, 40)
    assert not path.exists()
    with pytest.raises(OSError, match="No such file"):
        SQLiteStore(tmp_path / "nowhere" / "events.sqlite", 40)


@pytest.mark.slow
def test_what_is_deleted_is_not_in_the_files(tmp_path: Path) -> None:
    """Searches the files for the bytes of names and items, after rows have moved between pages."""
    path, marks = tmp_path / "events.sqlite", {}
    rng = random.Random(3)

    def found(mark: bytes) -> bool:
        return any(mark in file.read_bytes() for file in tmp_path.iterdir())

    with SQLiteStore(path, 40) as store:
        for n in range(60):
            for user in range(20):
                store.add(f"user-{user}-{'x' * rng.randrange(50)}", [(user, n)])
            store.add(f"MARKED-{n}", [(0x7A6B5C4D3E2F + 2**40 * n, n)])
            marks[n] = (2**40 * n + 0x7A6B5C4D3E2F).to_bytes(6, "big")
            if n >= 40:
                store.add("MARKED-7", [(0x6A5B4C3D2E + n, n)])
        assert found(b"MARKED-7")
        assert found(marks[7])
        assert found((0x6A5B4C3D2E + 50).to_bytes(5, "big"))
        store.forget("MARKED-7")
        store.compact()
        assert not found(b"MARKED-7")
        assert not found(marks[7])
        for n in range(40, 60):
            assert not found((0x6A5B4C3D2E + n).to_bytes(5, "big"))
        assert found(marks[8])
        list(store.prune(before=30))
        store.compact()
        for n in range(30):
            assert not found(marks[n])
        assert found(marks[30])
        assert len(events_of(store, "MARKED-30")) == 1
    assert not found(marks[7])


def test_a_backup_may_be_made_meanwhile(tmp_path: Path) -> None:
    with SQLiteStore(tmp_path / "events.sqlite", 40) as store:
        store.add(1, [(1, 1)])
        copy = sqlite3.connect(tmp_path / "copy.sqlite")
        source = sqlite3.connect(store.path)
        source.backup(copy)
        source.close()
        copy.close()
        store.add(1, [(2, 2)])
    with SQLiteStore(tmp_path / "copy.sqlite", 40) as store:
        assert events_of(store, 1) == [[1, 1, 0]]


# ---------------------------------------------------------------------------------------------
# Redis
# ---------------------------------------------------------------------------------------------


def append_some(url: str, process: int) -> None:
    with RedisStore(url, 1000) as store:
        for n in range(30):
            store.add("common", [(process, n)])


@pytest.mark.slow
def test_processes_share_a_server(shared_redis: RedisServer) -> None:
    shared_redis.client.flushall()
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=append_some, args=(shared_redis.url, n)) for n in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    with RedisStore(shared_redis.url, 1000) as store:
        events = events_of(store, "common")
    assert sorted(map(tuple, events)) == [(p, n, 0) for p in range(2) for n in range(30)]


def test_a_commit_that_is_sent_twice_is_made_once(
    shared_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens when the connection is lost before the answer, and the client sends it again."""
    shared_redis.client.flushall()
    with RedisStore(shared_redis.url, 40) as store:
        send = store._client.eval

        def twice(*call: Any) -> Any:
            send(*call)
            return send(*call)

        monkeypatch.setattr(store._client, "eval", twice)
        store.add(1, [(1, 1)])
        store.add(1, [(2, 2)])
        assert events_of(store, 1) == [[1, 1, 0], [2, 2, 0]]
        assert len(store) == 1


def wait_for_files(server: RedisServer) -> None:
    """Waits until the server writes neither a snapshot nor its append-only file anew."""
    end = time.monotonic() + 20
    names = ("rdb_bgsave_in_progress", "aof_rewrite_in_progress", "aof_rewrite_scheduled")
    while any(server.client.info("persistence")[name] for name in names):
        assert time.monotonic() < end
        time.sleep(0.02)


@contextmanager
def settings_of(server: RedisServer, **settings: str) -> Iterator[None]:
    """Changes settings of the server inside the context."""
    before = {name: server.client.config_get(name)[name] for name in settings}
    try:
        for name, value in settings.items():
            server.client.config_set(name, value)
        wait_for_files(server)
        yield
    finally:
        for name, value in before.items():
            server.client.config_set(name, value)
        wait_for_files(server)


@pytest.mark.parametrize(
    ("append_only", "save"), [("yes", ""), ("yes", "3600 1"), ("no", "3600 1")]
)
def test_what_is_deleted_is_not_in_redis(
    shared_redis: RedisServer, append_only: str, save: str
) -> None:
    """Deleted events are not in the keys or, after these have been rewritten, in the files."""
    shared_redis.client.flushall()
    mark, snapshot = 0x6A5B4C3D2E1F0987, shared_redis.folder / "dump.rdb"

    def in_files(name: bytes) -> bool:
        found = []
        for path in shared_redis.folder.rglob("*"):
            with suppress(FileNotFoundError, IsADirectoryError):  # Redis renames files meanwhile
                found.append(name in path.read_bytes())
        assert found
        return any(found)

    with (
        settings_of(shared_redis, appendonly=append_only, save=save),
        RedisStore(shared_redis.url, 40) as store,
    ):
        for user in ("MARKED", "other"):
            store.add(user, [(mark + len(user), 1)])
        if save:
            shared_redis.client.save()
            assert b"MARKED" in snapshot.read_bytes()
        assert in_files(b"MARKED")
        assert in_files((mark + 6).to_bytes(8, "little"))
        store.forget("MARKED")
        assert sorted(shared_redis.client.keys()) == [b"hstu:user:sother", b"hstu:users"]
        assert shared_redis.client.get("hstu:users") == b"1"
        assert in_files(b"MARKED")
        store.compact()
        end = time.monotonic() + 20
        while in_files(b"MARKED") and time.monotonic() < end:
            time.sleep(0.02)
        assert not in_files(b"MARKED")
        assert not in_files((mark + 6).to_bytes(8, "little"))
        assert in_files((mark + 5).to_bytes(8, "little"))
        assert snapshot.exists() == bool(save)
    snapshot.unlink(missing_ok=True)


@pytest.mark.parametrize("prefix", ["a*:", "a?:", "a[b]:", "[ab]b:", "a\\b:"])
def test_stores_with_other_prefixes_are_apart(shared_redis: RedisServer, prefix: str) -> None:
    shared_redis.client.flushall()
    with (
        RedisStore(shared_redis.url, 40, prefix=prefix) as first,
        RedisStore(shared_redis.url, 40, prefix="ab:") as second,
    ):
        first.add(1, [(1, 1)])
        second.add(1, [(2, 2), (3, 3)])
        assert [*first.prune(latest=0)] == [[1]]
        assert not events_of(first, 1)
        assert events_of(second, 1) == [[2, 2, 0], [3, 3, 0]]
        assert (len(first), len(second)) == (0, 1)


def test_servers_that_may_lose_events_are_told(
    shared_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[str]:
        caplog.clear()
        RedisStore(shared_redis.url, 40).close()
        return [record.message.partition(": ")[2] for record in caplog.records]

    assert told() == []
    with settings_of(shared_redis, maxmemory="1gb"):
        assert told() == []
    loses = (
        "and not always: it may lose acknowledged events when its disk is full, when it is killed, "
        "or when the machine loses power"
    )
    for fsync in ("everysec", "no"):
        with settings_of(shared_redis, appendfsync=fsync):
            assert told() == [f"has appendfsync {fsync}, {loses}"]
    shared_redis.client.execute_command("ACL SETUSER", "default", "-config")
    try:
        assert told() == [f"has appendfsync unknown, {loses}"]
    finally:
        shared_redis.client.execute_command("ACL SETUSER", "default", "+config")
    evicts = {"maxmemory": "1gb", "maxmemory-policy": "allkeys-lru"}
    with settings_of(shared_redis, appendonly="no", appendfsync="everysec", **evicts):
        assert told() == [
            "has appendonly no, and loses events when it ends",
            "has maxmemory-policy allkeys-lru, and deletes events when memory is short",
        ]


def test_the_package_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ImportError, match=r"redis: expected the package \(pip install 'hstu_attn"):
        RedisStore("redis://127.0.0.1", 40)


def test_bad_servers_are_refused(shared_redis: RedisServer) -> None:
    shared_redis.client.flushall()
    with pytest.raises(ValueError, match="url: expected redis://host:port/database, got"):
        RedisStore("http://127.0.0.1", 40)
    with pytest.raises(StoreError, match=r"redis at 127\.0\.0\.1: could not find events") as caught:
        RedisStore("redis://user:secret@127.0.0.1:1/0", 40)
    assert "secret" not in str(caught.value)
    with pytest.raises(ValueError, match="timeout: expected positive seconds, got 0"):
        RedisStore(shared_redis.url, 40, timeout=0)
    if not shared_redis.has_wait_aof:
        with pytest.raises(ValueError, match=r"wait_aof: expected Redis 7\.2 or later"):
            RedisStore(shared_redis.url, 40, wait_aof=True)
    else:
        with RedisStore(shared_redis.url, 40, wait_aof=True) as store:
            store.add(1, [(1, 1)])
            assert events_of(store, 1) == [[1, 1, 0]]
    shared_redis.client.set("hstu:user:i1", b"foreign")
    with RedisStore(shared_redis.url, 40) as store, pytest.raises(StoreError, match="redis: expec"):
        store.read([1], [0])


# ---------------------------------------------------------------------------------------------
# By name
# ---------------------------------------------------------------------------------------------


def test_stores_are_opened_by_name(tmp_path: Path, shared_redis: RedisServer) -> None:
    for place, kind in (
        ("memory", MemoryStore),
        (str(tmp_path / "memory"), SQLiteStore),
        (shared_redis.url, RedisStore),
    ):
        with open_store(place, 40) as store:
            assert type(store) is kind
            assert store.max_events == 40
