"""Tests of the load generators: the times of requests, and runs against the example's server."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
pytest.importorskip("aiohttp")
from benchmarks import serving
from benchmarks.load import (
    Load,
    arrive_at_random,
    at_loads,
    longest_pause,
    no_collections,
    submit_at_random,
    zipf,
)
from benchmarks.record import read_records
from hstu_attn.data import open_event_log
from hstu_attn.data.synthetic import write_synthetic_movielens
from hstu_attn.serving import DeadlineError, OverloadedError
from tests.helpers.arrivals import check_arrivals
from tests.helpers.saved_models import save
from tests.helpers.stores import redis_server


@pytest.mark.slow
def test_the_longest_fsync_of_redis(tmp_path: Path) -> None:
    with redis_server(tmp_path) as server:
        longest = serving.fsyncs_of_redis(server.url)
        begin = time.monotonic()
        server.client.set("key", bytes(64 * 2**20))  # long enough to be recorded
        server.client.ping()  # is answered after the fsync
        assert 0 < longest() <= 1e3 * (time.monotonic() - begin)
        assert longest() == 0


def test_a_client_collects_no_garbage_meanwhile() -> None:
    with no_collections():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
def test_arrivals_do_not_wait_for_answers() -> None:
    """Each answer takes much longer than until the next request is sent."""
    started: list[float] = []
    called: list[float] = []

    async def send() -> bool:
        started.append(time.perf_counter())
        await asyncio.sleep(0.3)
        return len(started) % 10 > 0

    async def run() -> Load[None]:
        middle = lambda: called.append(time.perf_counter())  # noqa: E731
        how: dict[str, Any] = {"rate": 200.0, "seconds": 1.0, "warm_up": 0.2, "middle": middle}
        return await arrive_at_random(send, rng=random.Random(3), **how)

    load = asyncio.run(run())
    rng, due = random.Random(3), [0.0]
    while due[-1] < 1.2:
        due.append(due[-1] + rng.expovariate(200.0))
    assert len(started) == len(due) - 2
    assert len(load.latencies) + load.failed == sum(0.2 <= at < 1.2 for at in due)
    assert 0 < load.failed < len(load.latencies)
    assert min(load.latencies) >= 0.299
    # While the first of the measured requests waits, no other one of them is answered.
    assert 0.299 <= load.pause <= max(load.latencies)
    [when] = called
    assert 0.5 < when - started[0] < 1.2


@pytest.mark.slow
def test_submitting_does_not_wait_for_answers() -> None:
    """Every tenth request is refused at once, and every tenth later."""
    sent: list[float] = []
    refused: list[weakref.ref[OverloadedError]] = []

    def send() -> Future[None]:
        sent.append(time.perf_counter())
        future: Future[None] = Future()
        if len(sent) % 10 == 5:
            error = OverloadedError("expected room")
            refused.append(weakref.ref(error))
            raise error
        late = len(sent) % 10 == 0
        end = partial(future.set_exception, DeadlineError()) if late else future.set_result
        threading.Timer(0.3, end, () if late else (None,)).start()
        return future

    how: dict[str, Any] = {"rate": 100.0, "seconds": 1.0, "warm_up": 0.2, "rng": random.Random(3)}
    refusals = OverloadedError, DeadlineError
    with no_collections():
        load = submit_at_random(send, lambda: len(sent), refusals=refusals, **how)
        assert not any(error() for error in refused)
    rng, due = random.Random(3), [0.0]
    while due[-1] < 1.2:
        due.append(due[-1] + rng.expovariate(100.0))
    assert len(sent) == len(due) - 2
    assert load.after - load.before == len(load.latencies) + load.failed
    assert load.after - load.before == sum(0.2 <= at < 1.2 for at in due)
    assert abs(load.failed - len(load.latencies) / 4) <= 2
    assert min(load.latencies) >= 0.299
    with pytest.raises(DeadlineError):
        submit_at_random(send, lambda: 0, refusals=(OverloadedError,), **how)


@pytest.mark.slow
def test_what_is_due_while_as_many_as_may_be_are_under_way_is_not_sent() -> None:
    under_way = [0, 0]  # requests in flight: now, and the maximum

    async def send() -> bool:
        under_way[0] += 1
        under_way[1] = max(under_way)
        await asyncio.sleep(0.2)
        under_way[0] -= 1
        return True

    how: dict[str, Any] = {"rate": 200.0, "seconds": 1.0, "warm_up": 0.0, "most": 5}
    load = asyncio.run(arrive_at_random(send, rng=random.Random(3), **how))
    assert under_way == [0, 5]
    assert 5 <= len(load.latencies) <= 30  # 25 if no time is lost
    assert len(load.latencies) + load.failed > 150


def test_loads_are_fractions_of_what_an_overload_leaves() -> None:
    called: list[tuple[float, Any]] = []

    def run(rate: float, middle: Any) -> Load[None]:
        called.append((rate, middle))
        latencies = [0.01] * round(min(rate, 80.0) * 2)
        return Load(2.0, latencies, 0, None, None, 0.0 if middle is None else 0.25, 1e-4 * rate)

    change = lambda: None  # noqa: E731
    found = list(at_loads(100.0, run, [0.5, 0.8], 2 * [("change", change)]))
    assert called == [(150.0, None), (40.0, None), (64.0, None), (40.0, change), (40.0, change)]
    fields = ("load", "event", "event_seconds", "pause_ms", "capacity")
    assert [tuple(r[name] for name in fields) for r, _ in found] == [
        (1.875, "", 0.0, 15.0, 80.0),
        (0.5, "", 0.0, 4.0, 80.0),
        (0.8, "", 0.0, 6.4, 80.0),
        (0.5, "change", 0.25, 4.0, 80.0),
        (0.5, "change", 0.25, 4.0, 80.0),
    ]
    assert [load.rate for _, load in found] == [80.0, 40.0, 64.0, 40.0, 40.0]


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [True, False])
def test_a_run_goes_on_after_what_happens_in_its_middle(is_async: bool) -> None:
    ended: list[float] = []
    sent: list[float] = []

    def middle() -> None:
        time.sleep(0.6)
        ended.append(time.perf_counter())

    async def answer() -> bool:
        sent.append(time.perf_counter())
        return True

    def submit() -> Future[None]:
        sent.append(time.perf_counter())
        future: Future[None] = Future()
        future.set_result(None)
        return future

    how: dict[str, Any] = {"rate": 200.0, "seconds": 0.4, "warm_up": 0.0, "middle": middle}
    how["rng"] = random.Random(3)
    load: Load[Any]
    if is_async:
        load = asyncio.run(arrive_at_random(answer, **how))
    else:
        load = submit_at_random(submit, lambda: None, refusals=(), **how)
    assert 0.6 <= load.event_seconds < 0.9
    assert load.seconds >= 0.2 + 0.6 + 0.15
    assert len(load.latencies) == len(sent)
    assert sum(at > ended[0] for at in sent) > 10


@pytest.mark.parametrize(
    ("requests", "pause"),
    [
        ([(1.0, 1.5)], 0.5),
        ([(1.0, 1.5), (3.0, 3.1)], 0.5),  # Nothing waits from 1.5 to 3.
        ([(0.0, 0.2), (0.0, 0.5), (0.0, 0.6)], 0.3),  # One is answered after the other.
        ([(0.0, 1.0), (0.1, 0.3), (0.6, 0.7)], 0.4),  # The first one is answered last.
        ([(0.0, 0.1), (0.2, 0.3), (0.2, 2.0)], 1.7),
    ],
)
def test_a_pause_is_a_time_in_which_requests_wait_and_none_is_answered(
    requests: list[tuple[float, float]], pause: float
) -> None:
    due, answered = zip(*requests, strict=True)
    assert longest_pause(due, answered) == pytest.approx(pause)


def test_users_are_drawn_by_a_zipf_distribution() -> None:
    count, rng = 20_000, random.Random(0)
    for exponent, shares in ((1.0, (12 / 25, 6 / 25, 4 / 25, 3 / 25)), (0.0, (0.25,) * 4)):
        draw = zipf("abcd", exponent, rng)
        found = sorted(Counter(draw() for _ in range(count)).values(), reverse=True)
        for times, share in zip(found, shares, strict=True):
            assert times == pytest.approx(share * count, abs=5 * (share * count) ** 0.5)


def test_each_event_is_new_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are new although a user's requests are stored in a different order than sent."""
    rng, clock = random.Random(0), [1000.0]
    monkeypatch.setattr(serving.time, "time", lambda: clock[0])
    events = serving.NewEvents(range(60), rng)
    stored: dict[str, list[tuple[int | str, int]]] = {"often": [], "seldom": []}
    most = Counter[str]()
    under_way = Counter[str]()

    async def send(user: str) -> None:
        with events.draw(user) as (item, at):
            under_way[user] += 1
            most[user] = max(most[user], under_way[user])
            for _ in range(rng.randrange(9)):
                await asyncio.sleep(0)
            clock[0] += 0.05
            assert (item, at) not in stored[user]
            assert not stored[user] or at >= stored[user][-1][1]
            stored[user].append((item, at))
            under_way[user] -= 1

    async def run() -> None:
        for _ in range(300):
            users = rng.choices(["often", "seldom"], [9, 1], k=rng.randrange(1, 6))
            await asyncio.gather(*map(send, users))

    asyncio.run(run())
    assert most["often"] == 5
    for user, least in (("often", 500), ("seldom", 50)):
        times = {at for _, at in stored[user]}
        assert len(stored[user]) > least
        assert len(times) > 20
        assert max(times) == pytest.approx(clock[0], abs=5)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Command-line options that name a model and data."""
    folder = tmp_path_factory.mktemp("load")
    ratings = write_synthetic_movielens(folder, 50, 120, 25)
    save(folder / "best.pt", 1, open_event_log(ratings).source_item_ids)
    return ["--model", str(folder / "best.pt"), "--data", str(ratings)]


def test_threads_have_users_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise events of a user would arrive in another order than that of their times."""
    users: list[set[int]] = []

    class Connection:
        status = 200

        def __init__(self, *_: Any, **__: Any) -> None:
            users.append(set())
            self.users = users[-1]

        def request(self, method: str, path: str, body: str, headers: dict[str, str]) -> None:
            self.users.add(json.loads(body)["user"])

        def getresponse(self) -> Connection:
            return self

        def read(self) -> None:
            pass

    def in_turn(connect: Any, snapshot: Any, *, concurrency: int, **_: Any) -> None:
        for send in [connect(thread) for thread in range(concurrency)]:
            assert all(send() for _ in range(100))

    monkeypatch.setattr(serving.http.client, "HTTPConnection", Connection)
    monkeypatch.setattr(serving, "keep_under_way", in_turn)
    for log_users, threads, expected in [
        (range(10), 3, [{0, 3, 6, 9}, {1, 4, 7}, {2, 5, 8}]),
        (range(2), 3, [{0}, {1}, {0}]),
    ]:
        users.clear()
        log = SimpleNamespace(source_user_ids=log_users, source_item_ids=[5, 6])
        serving.drive(0, log, threads, 1.0)  # type: ignore[arg-type]
        assert users == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kills", "0"], "--loads and --kills must be positive"),
        (["--replicas", "2"], "--replicas needs --loads"),
        (["--loads", "0.5", "--kills", "2"], "--kills needs --replicas"),
    ],
)
def test_options_without_effect_are_refused(
    files: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(serving, "other_work", lambda: 0.0)  # otherwise it watches for a second
    with pytest.raises(SystemExit, match="2"):
        serving.main([*files, *options])
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_load_test(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serving.json"
    arguments = [*files, "--seconds", "0.5", "--concurrency", "2", "4"]
    serving.main([*arguments, "--json", str(path)])
    records, printed = read_records(path), capsys.readouterr().out
    assert [record["concurrency"] for record in records] == [2, 4]
    for record in records:
        assert record["answered"] > 0
        assert record["failed"] == 0
        assert 0 < record["p50_ms"] <= record["p95_ms"] <= record["p99_ms"] < 500
        assert 1 <= record["mean_batch"] <= 4
        assert 0 < record["hit_share"] < 1
        assert f"{record['qps']:g} requests/s" in printed


@pytest.mark.slow
def test_random_arrivals(
    files: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine answers are late, and the measured rate is too low, if there is one."""
    monkeypatch.setattr(serving, "PATIENCE", 30.0)
    path = tmp_path / "serving.json"
    arguments = [*files, "--concurrency", "4", "--loads", "0.3", "--json", str(path)]
    seconds = 1
    try:
        serving.main([*arguments, "--seconds", str(seconds)])
    except RuntimeError as error:
        if "no request was answered" not in str(error):
            raise
        capsys.readouterr()  # drops the output of the first run
        seconds = 5
        serving.main([*arguments, "--seconds", str(seconds)])
    (overload, *records), printed = read_records(path), capsys.readouterr().out
    [under_way] = re.findall(r"^(\d+) requests/s, 4 under way$", printed, re.MULTILINE)
    assert overload["load"] * overload["capacity"] == pytest.approx(1.5 * int(under_way), 1e-2)
    assert overload["capacity"] == pytest.approx(overload["qps"], 1e-3)
    changes = "the model changes"
    assert [(r["load"], r["event"]) for r in records] == [(0.3, ""), (0.3, changes)]
    assert [record["event_seconds"] > 0 for record in records] == [False, True]
    for record in records:
        assert record["device"] == "cpu"
        assert record["failed"] == 0
        check_arrivals(record, seconds)
        assert 0 < record["p50_ms"] <= record["p99_ms"] <= record["worst_ms"]
        assert 0 < record["pause_ms"] <= record["worst_ms"]
    width = max(len("load"), len(f"{overload['load']:.0%}"))
    assert f"one process  {'30%':>{width}}  {changes}" in printed


def test_the_device_is_passed_to_the_server(
    files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def start(command: list[str], **_: Any) -> None:
        commands.append(command)
        raise OSError("expected a process")

    monkeypatch.setattr(serving.subprocess, "Popen", start)
    monkeypatch.setattr(serving, "other_work", lambda: 0.0)  # otherwise it watches for a second
    model, data = Path(files[1]), Path(files[3])
    with pytest.raises(OSError, match="a process"), serving.running_server(model, data, "cuda"):
        pass
    assert commands[0][commands[0].index("--device") + 1] == "cuda"
    for device, count, gpus in (("cuda", 1, 0.5), ("cuda", 4, 1), ("cpu", 0, 0)):
        monkeypatch.setattr(serving, "device_count", lambda count=count: count)
        (application,) = serving.configuration({"device": device}, 2)["applications"]
        assert application["args"] == {"device": device}
        assert application["deployments"][0]["ray_actor_options"]["num_gpus"] == gpus
