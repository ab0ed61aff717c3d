"""Tests of the example's server, as a process, under faults: kill -9, a full disk, a Redis server
that is gone, full or silent for a while, wrong times, damaged files. What was acknowledged is
stored once; the log says what happened.
"""

from __future__ import annotations

import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.paths import ROOT

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
import serve
from recommender.models import aligned, note_items
from recommender.saved import load_model
from recommender.serve_options import parse_arguments
from recommender.server import make_engine, make_store

from hstu_attn.serving import EventTimeError, MemoryStore, SQLiteStore
from hstu_attn.serving.redis_store import RedisStore
from tests.helpers.http_client import Client, process
from tests.helpers.saved_models import ITEMS, LONGEST, save, stored_events, whole
from tests.helpers.stores import RedisServer, SmallDisk, redis_server, small_disk
from tests.helpers.writers import NOW, Log, Writer

pytestmark = pytest.mark.faults

CPU = torch.device("cpu")
TOKEN = "administrator-of-the-tests"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "best.pt"
    save(path, 1)
    return path


# ---------------------------------------------------------------------------------------------
# kill -9
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_kill_9_loses_no_acknowledged_event(model: Path, tmp_path: Path) -> None:
    """The server is killed while three clients send events to its default store."""
    writers = [Writer(user) for user in range(3)]
    arguments = ["--model", str(model), "--store", str(tmp_path / "events.sqlite")]
    rng = random.Random(5)
    cut: list[list[tuple[int, int]]] = []
    for part in range(3):
        with process(*arguments) as (server, client):
            if part:
                line = Log(server).wait_for("was not closed when it was used last")
                assert re.search("; [1-9][0-9]* pages of changes have been recovered", line)
                assert line.endswith(" from its log, and 3 users have events\n")
            for writer in writers:  # a retry of the requests in flight when the server was killed
                if cut and writer.sent[-1] not in writer.acknowledged:
                    assert writer.send(client, writer.sent[-1]) == 200
            threads = [threading.Thread(target=w.stream, args=(client,)) for w in writers]
            for thread in threads:
                thread.start()
            while min(len(writer.acknowledged) for writer in writers) < 5 * (part + 1):
                assert server.poll() is None
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 0.3))
            server.send_signal(signal.SIGKILL)
            for thread in threads:
                thread.join()
        cut += [writer.sent[-1] for writer in writers]
    with SQLiteStore(tmp_path / "events.sqlite", LONGEST) as store:
        stored = stored_events(store, range(3))
    for writer in writers:
        assert len(writer.acknowledged) > 10
        assert set(writer.statuses) == {0, 200}
        writer.check(stored[writer.user], cut)


KILLED = """
import os, signal, sys
import torch
from hstu_attn.serving import Engine, SQLiteStore
from tests.helpers.serving_models import make_cache, make_model

path, where = sys.argv[1:]
changes = 0

class Killed(SQLiteStore):
    def _change(self, change):
        global changes
        made = super()._change(change)
        changes += 1
        if where == "in the transaction" and changes == 14:
            os.kill(os.getpid(), signal.SIGKILL)
        return made

    def commit(self, batch):
        made = super().commit(batch)
        if where == "before the answer" and changes >= 14:
            os.kill(os.getpid(), signal.SIGKILL)
        return made

torch.set_num_threads(1)
store = Killed(path, 40)
with Engine(make_model("retrieval"), make_cache(12), store=store, max_batch_size=4,
            max_wait=0.5) as engine:
    for turn in range(10):
        futures = [engine.submit_score(user, [(turn, turn), (turn, turn + 1)], [1])
                   for user in range(4)]
        for user, future in enumerate(futures):
            future.result()
            print(user, turn, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in the transaction", "before the answer"])
def test_kill_9_at_the_worst_moment(where: str, tmp_path: Path) -> None:
    """A batch of four requests is stored entirely or not at all; then they are sent again."""
    path = tmp_path / "events.sqlite"
    command = [sys.executable, "-c", KILLED, str(path), where]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"}
    ended = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    acknowledged = [tuple(map(int, line.split())) for line in ended.stdout.splitlines()]
    assert acknowledged == [(user, turn) for turn in range(3) for user in range(4)]
    turns = 3 if where == "in the transaction" else 4
    with SQLiteStore(path, 40) as store:
        for stored in store.read(range(4), [0] * 4):
            assert stored is not None
            expected = [[turn, turn + n, 0] for turn in range(turns) for n in range(2)]
            assert stored.events.tolist() == expected


# ---------------------------------------------------------------------------------------------
# The disk is full, Redis is gone
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_full_disk_fails_requests_until_there_is_room(model: Path, tmp_path: Path) -> None:
    """A limit on the size of the process's files simulates a full disk."""
    path, writer = tmp_path / "events.sqlite", Writer(1)
    with process("--model", str(model), "--store", str(path)) as (server, client):
        log = Log(server)
        writer.stream(client, 5)
        size = Path(f"{path}-wal").stat().st_size + 1000
        limits = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size, limits[1]))
        writer.stream(client, 10)
        assert writer.statuses == {200: 5, 503: 10}
        line = log.wait_for("The store fails, and requests with it until it works again")
        assert "could not write events" in line
        assert client.send("GET", "/live")[0] == 200
        answer = client.post("/score", user=1, candidates=[ITEMS[0]])  # brings no event
        assert len(answer["scores"]) == 1
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, limits)
        writer.stream(client, 5)
        log.wait_for("The store works again")
        assert writer.statuses == {200: 10, 503: 10}
    with SQLiteStore(path, LONGEST) as store:
        writer.check(stored_events(store, [1])[1], [])


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    with small_disk(folder) as disk:
        yield disk


def stream_until_full(
    client: Client, disk: SmallDisk, room: int, writers: Sequence[Writer]
) -> None:
    """Lets writers send events until each has had three more answers of 503, and no other error."""

    def stream(writer: Writer) -> None:
        last = writer.statuses[503] + 3
        while writer.statuses[503] < last:
            assert writer.send(client, writer.make()) in (200, 503)

    disk.fill(room)
    before = sum(writer.statuses[200] for writer in writers)
    with ThreadPoolExecutor(len(writers)) as pool:
        assert len([*pool.map(stream, writers)]) == len(writers)
    assert sum(writer.statuses[200] for writer in writers) > before + 3  # before it was full


@pytest.mark.slow
def test_kill_9_on_a_full_disk(model: Path, disk: SmallDisk) -> None:
    """A disk is full (ENOSPC) twice: first room is made, then the server is killed."""
    path, writers = disk.folder / "events.sqlite", [Writer(user) for user in range(3)]
    arguments = ["--model", str(model), "--store", str(path)]
    with process(*arguments) as (server, client):
        log = Log(server)
        for writer in writers:
            writer.stream(client, 3)
        stream_until_full(client, disk, 2**18, writers)
        line = log.wait_for("The store fails, and requests with it until it works again")
        assert "could not write events (database or disk is full)" in line
        assert client.send("GET", "/live")[0] == 200
        answer = client.post("/score", user=1, candidates=[ITEMS[0]])  # brings no event
        assert len(answer["scores"]) == 1
        disk.clear()
        assert [writer.send(client, writer.make()) for writer in writers] == [200] * 3
        log.wait_for("The store works again")
        stream_until_full(client, disk, 2**18, writers)
        server.kill()
        server.wait()
    disk.clear()
    with SQLiteStore(path, LONGEST) as store:
        stored = stored_events(store, range(3))
    for writer in writers:
        writer.check(stored[writer.user], [])


@pytest.mark.slow
def test_kill_9_of_redis_on_a_full_disk(model: Path, disk: SmallDisk) -> None:
    """With `appendfsync always` Redis exits, before it answers, if it cannot write."""
    writers = [Writer(user) for user in range(3)]
    with (
        redis_server(disk.folder) as redis,
        process("--model", str(model), "--store", redis.url) as (server, client),
    ):
        log = Log(server)
        for writer in writers:
            writer.stream(client, 3)
        stream_until_full(client, disk, 2**14, writers)
        log.wait_for("The store fails, and requests with it until it works again")
        assert client.send("GET", "/ready")[0] == 503
        assert client.send("GET", "/live")[0] == 200
        assert redis.process is not None
        assert redis.process.wait(10) == 1
        redis.start()  # starting needs no disk space
        with RedisStore(redis.url, LONGEST) as store:
            stored = stored_events(store, range(3))
        for writer in writers:
            unknown = [events for events in writer.sent if events not in writer.acknowledged]
            writer.check(stored[writer.user], unknown)
        disk.clear()
        assert [writer.send(client, writer.make()) for writer in writers] == [200] * 3
        log.wait_for("The store works again")


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as server:
        yield server


@pytest.mark.slow
def test_redis_is_killed_and_comes_back(model: Path, own_redis: RedisServer) -> None:
    writer = Writer(1)
    with process("--model", str(model), "--store", own_redis.url) as (server, client):
        log = Log(server)
        writer.stream(client, 5)
        killing = threading.Timer(0.3, own_redis.kill)
        killing.start()
        while writer.statuses[503] < 3:
            assert writer.send(client, writer.make()) in (200, 503)
        killing.join()
        log.wait_for("The store fails, and requests with it until it works again")
        assert client.send("GET", "/ready")[0] == 503
        assert client.send("GET", "/live")[0] == 200
        failed = writer.statuses[503]
        own_redis.start()
        writer.stream(client, 5)
        log.wait_for("The store works again")
        assert client.send("GET", "/ready")[0] == 200
        assert writer.statuses[503] == failed
        with RedisStore(own_redis.url, LONGEST) as store:
            stored = stored_events(store, [1])[1]
        unknown = [events for events in writer.sent if events not in writer.acknowledged]
        writer.check(stored, unknown)
        saved = load_model(model, CPU)
        answer = client.post("/score", user=1, candidates=ITEMS[:5])
        expected = whole(saved, stored, ITEMS[:5])
        assert answer["scores"] == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_redis_is_full_and_has_room_again(model: Path, own_redis: RedisServer) -> None:
    writer = Writer(1)
    with process("--model", str(model), "--store", own_redis.url) as (server, client):
        log = Log(server)
        writer.stream(client, 5)
        own_redis.client.config_set("maxmemory", "1")
        writer.stream(client, 5)
        assert writer.statuses == {200: 5, 503: 5}
        line = log.wait_for("The store fails, and requests with it until it works again")
        assert "not allowed when used memory > 'maxmemory'" in line
        answer = client.post("/score", user=1, candidates=[ITEMS[0]])  # brings no event
        assert len(answer["scores"]) == 1
        own_redis.client.config_set("maxmemory", "0")
        writer.stream(client, 5)
        log.wait_for("The store works again")
        assert writer.statuses == {200: 10, 503: 5}
        with RedisStore(own_redis.url, LONGEST) as store:
            writer.check(stored_events(store, [1])[1], [])


@pytest.mark.slow
def test_redis_hangs_and_goes_on(model: Path, own_redis: RedisServer) -> None:
    """A stopped process keeps and accepts connections, but does not answer."""
    writers = [Writer(user) for user in range(3)]
    seconds = []

    def send(writer: Writer) -> None:
        started = time.monotonic()
        writer.send(client, writer.make())
        seconds.append(time.monotonic() - started)

    arguments = ["--model", str(model), "--store", own_redis.url, "--timeout", "10"]
    with process(*arguments) as (server, client):
        log = Log(server)
        for writer in writers:
            writer.stream(client, 3)
        assert own_redis.process is not None
        own_redis.process.send_signal(signal.SIGSTOP)
        try:
            for _ in range(2):
                threads = [threading.Thread(target=send, args=(writer,)) for writer in writers]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            assert max(seconds) < 10
            assert [writer.statuses for writer in writers] == [{200: 3, 503: 2}] * 3
            status, _, answer = client.send("GET", "/ready")
            assert (status, answer["status"]) == (503, "store")
            assert client.send("GET", "/live")[0] == 200
            line = log.wait_for("The store fails, and requests with it until it works again")
            assert "could not read events (Timeout" in line
            log.wait_for("Not ready: the store cannot be read: no answer within 1 s")
        finally:
            own_redis.process.send_signal(signal.SIGCONT)
        end = time.monotonic() + 20
        while client.send("GET", "/ready")[0] == 503:
            assert time.monotonic() < end
            time.sleep(0.05)
        log.wait_for("The store can be read again")
        for writer in writers:
            writer.stream(client, 3)
            assert writer.statuses == {200: 6, 503: 2}
        log.wait_for("The store works again")
        with RedisStore(own_redis.url, LONGEST) as store:
            stored = stored_events(store, range(3))
    for writer in writers:
        unknown = [events for events in writer.sent if events not in writer.acknowledged]
        writer.check(stored[writer.user], unknown)


# ---------------------------------------------------------------------------------------------
# Times of another unit
# ---------------------------------------------------------------------------------------------


def earliest_time(model: Path, *arguments: str, place: str = "memory") -> int:
    """Returns the earliest event time that a server accepts."""
    options = parse_arguments("", ["--model", str(model), *arguments])
    saved = load_model(model, CPU)
    with make_store(options, saved, place) as store, make_engine(options, saved, store) as engine:
        with pytest.raises(EventTimeError) as caught:
            engine.submit_score(1, [(0, 2**61)], [1])
        earliest, latest = caught.value.limits
        assert 299 <= latest - time.time() <= 300
    return earliest


@pytest.mark.slow
def test_the_earliest_time_is_1990_or_that_of_the_data(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "ratings.dat"
    lines = [f"1::{ITEMS[n]}::5::{978300760 + n}\n" for n in range(3)]  # in 2000
    data.write_text("".join(lines))
    assert earliest_time(model) == earliest_time(model, "--data", str(data)) == 631_152_000
    assert not caplog.records
    data.write_text("".join([*lines, f"1::{ITEMS[3]}::5::86400\n"]))
    assert earliest_time(model, "--data", str(data)) == 86400
    [line] = caplog.messages
    assert line.startswith("Events from 86400 on are accepted, as --data has")
    assert earliest_time(model, "--data", str(data), "--earliest-time", "978300000") == 978300000
    place = str(tmp_path / "events.sqlite")
    for arguments in (("--data", str(data)), ("--data", str(data)), ()):  # the store has the data
        assert earliest_time(model, *arguments, place=place) == 86400


@pytest.mark.slow
def test_times_of_another_unit_are_refused(model: Path) -> None:
    now = int(time.time())
    with process("--model", str(model), "--earliest-time", "631152000") as (server, client):
        log = Log(server)
        for wrong in (now // 86400, now // 3600, now // 60, 1000 * now, 10**9 * now, now + 3600):
            events = [{"item": ITEMS[0], "time": wrong}]
            status, _, answer = client.send(
                "POST", "/score", {"user": 1, "events": events, "candidates": ITEMS[:3]}
            )
            assert status == 422
            [problem] = answer["detail"]
            assert problem["loc"] == ["body", "events", 0, "time"]
            assert problem["msg"].startswith("Expected a time from 631152000 to 1")
            assert problem["msg"].endswith(f", in seconds; got {wrong}")
        line = log.wait_for("Refused events for their times")
        assert f"such as {now // 86400}, which is not from 631152000 to" in line
        assert client.send("POST", "/score", {"user": 1, "candidates": ITEMS[:3]})[0] == 422
        client.post("/score", user=1, events=[{"item": ITEMS[0], "time": now}], candidates=[])


# ---------------------------------------------------------------------------------------------
# Damaged files
# ---------------------------------------------------------------------------------------------


def test_the_default_store_is_next_to_the_model(model: Path, tmp_path: Path) -> None:
    options = parse_arguments("", ["--model", str(model)])
    for _ in range(2):
        with make_store(options, load_model(model, CPU)) as store:
            assert isinstance(store, SQLiteStore)
            assert store.path == tmp_path / "events.sqlite"
            assert store.max_events == LONGEST
            store.add(1, [(1, 1 + len(store))])
    assert len(store) == 1


def test_a_damaged_store_is_not_served(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    path = tmp_path / "events.sqlite"  # where the server looks by default
    path.write_bytes(b"\0" * 4096)
    usual = ["--port", "0", "--device", "cpu", "--model", str(model)]
    for arguments, message in (
        ([], f"error: {path}: expected a store of events"),
        (["--store", str(tmp_path / "no" / "a")], "error: [Errno 2] No such file or directory"),
        (["--store", "redis://127.0.0.1:1"], "error: redis at 127.0.0.1: could not find events"),
    ):
        assert serve.main([*usual, *arguments]) == 1
        assert capsys.readouterr().err.startswith(message)
    assert path.read_bytes() == b"\0" * 4096


@contextmanager
def changing(model: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Client, Log]]:
    token = tmp_path / "tokens"
    token.write_text(TOKEN)
    arguments = ["--model", str(model), "--admin-token-file", str(token)]
    with process(*arguments) as (server, client):
        yield server, client, Log(server)


@pytest.mark.slow
def test_changes_of_the_model_while_it_is_served(model: Path, tmp_path: Path) -> None:
    """A signal or an administrator's request changes the model; damaged files have no effect."""
    good = model.read_bytes()
    events = [(ITEMS[3], NOW), (ITEMS[7], NOW + 60), (ITEMS[1], NOW + 70)]
    expected = [whole(load_model(model, CPU), events, ITEMS)]
    save(model, 2, ITEMS[::-1])  # another model, with the items in another order
    other = model.read_bytes()
    expected.append(whole(load_model(model, CPU), events, ITEMS))
    save(model, 3, layers=3)
    deeper = model.read_bytes()
    expected.append(whole(load_model(model, CPU), events, ITEMS))
    save(model, 4, ITEMS[1:])
    fewer = model.read_bytes()
    save(model, 5)
    state = torch.load(model, weights_only=True)
    state["model"]["item_embedding.weight"][5, 3] = torch.nan
    torch.save(state, model)
    spoilt = model.read_bytes()
    model.write_bytes(good)
    body = {
        "user": 1,
        "events": [{"item": item, "time": at} for item, at in events],
        "candidates": ITEMS,
    }
    admin = {"Authorization": f"Bearer {TOKEN}"}
    ended, seen = threading.Event(), list[tuple[int, list[float]]]()

    def ask(client: Client) -> None:
        while not ended.is_set():
            status, _, answer = client.send("POST", "/score", body)  # a retry, each time
            seen.append((status, answer.get("scores")))

    with changing(model, tmp_path) as (server, client, log):

        def check(current: int) -> None:
            scores = client.post("/score", **body)["scores"]
            assert scores == pytest.approx(expected[current], rel=1e-4, abs=1e-5)

        check(0)
        thread = threading.Thread(target=ask, args=(client,))
        thread.start()
        try:
            for content, message in (
                (good[: len(good) // 2], "is damaged"),
                (b"", "is damaged"),
                (spoilt, "expected finite weights, got NaN or Inf"),
                (fewer, "expected a model of the 60 items"),
            ):
                log.lines.clear()
                model.write_bytes(content)
                server.send_signal(signal.SIGHUP)
                assert message in log.wait_for("The model has not been changed")
                check(0)
            status, _, answer = client.send("POST", "/admin/model", {}, admin)
            assert (status, answer["detail"][:20]) == (409, "Nothing has changed:")
            assert "a model of the 60" in log.wait_for("administrator's request changed nothing")
            assert client.send("POST", "/admin/model/previous", {}, admin)[0] == 409
            assert client.send("POST", "/admin/model", {})[0] == 401
            check(0)
            model.write_bytes(other)
            server.send_signal(signal.SIGHUP)
            log.wait_for("The new model has taken over")
            check(1)
            model.write_bytes(deeper)
            assert client.send("POST", "/admin/model", {}, admin)[0] == 200
            check(2)
            server.send_signal(signal.SIGUSR2)
            log.wait_for("The model of before has taken over")
            check(1)
            metrics = client.send("GET", "/metrics")[2]
            for outcome, count in (("refused", 5), ("taken over", 3)):
                line = f'hstu_model_changes_total{{outcome="{outcome}"}} {count}.0'
                assert line in metrics.splitlines()
        finally:
            ended.set()
            thread.join()
        status, _, answer = client.send("POST", "/admin/forget", {"user": 1}, admin)
        assert status == 200
        assert client.send("POST", "/score", {"user": 1, "candidates": ITEMS})[0] == 422
        assert client.send("POST", "/admin/compact", {}, admin)[0] == 200
        client.post("/score", **body)
        status, _, answer = client.send("POST", "/admin/prune", {"before": NOW + 100}, admin)
        assert (status, answer["done"]) == (200, "Old events of 1 users are deleted")
        assert client.send("POST", "/score", {"user": 1, "candidates": ITEMS})[0] == 422
    assert {status for status, _ in seen} == {200}
    used = set()
    for _, scores in seen:
        near = [np.allclose(scores, one, 1e-4, 1e-5) for one in expected]
        assert sum(near) == 1
        used.add(near.index(True))
    assert used >= {0, 1}


# ---------------------------------------------------------------------------------------------
# Items of the store and of the model
# ---------------------------------------------------------------------------------------------


def test_a_later_model_has_its_items_in_the_order_of_the_store(tmp_path: Path) -> None:
    path, store = tmp_path / "model.pt", MemoryStore(10, LONGEST)
    save(path, 1, ITEMS[10:50])
    first = aligned(load_model(path, CPU), store)
    assert first.item_ids.tolist() == ITEMS[10:50]
    note_items(first, store)
    save(path, 1, ITEMS)  # ten items more before, and ten after
    saved = load_model(path, CPU)
    later = aligned(load_model(path, CPU), store)
    assert later.item_ids.tolist() == ITEMS[10:50] + ITEMS[:10] + ITEMS[50:]
    assert [title.split()[1] for title in later.titles] == list(map(str, later.item_ids))
    events = [(ITEMS[3], 10), (ITEMS[20], 20)]
    expected = whole(saved, events, ITEMS)
    assert whole(later, events, ITEMS) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    note_items(later, store)
    save(path, 1, ITEMS[1:])
    with pytest.raises(ValueError, match="lacks 1 of them"):
        aligned(load_model(path, CPU), store)


@pytest.mark.slow
def test_items_of_a_model_that_is_not_sound_are_not_noted(tmp_path: Path) -> None:
    """If they were stored, the valid model, which lacks them, could not be served again."""
    path, store = tmp_path / "model.pt", MemoryStore(10, LONGEST)
    save(path, 1, ITEMS[10:50])
    options = parse_arguments(None, ["--model", str(path)])
    make_engine(options, aligned(load_model(path, CPU), store), store).close()
    save(path, 1, ITEMS)
    spoilt = aligned(load_model(path, CPU), store)
    with torch.no_grad():
        next(spoilt.model.stack.parameters()).fill_(torch.nan)
    with pytest.raises(ValueError, match="expected finite weights, got NaN or Inf"):
        make_engine(options, spoilt, store)
    save(path, 1, ITEMS[10:50])
    again = aligned(load_model(path, CPU), store)
    assert again.item_ids.tolist() == ITEMS[10:50]
    make_engine(options, again, store).close()
