"""Tests of examples/serve_ray.py: two replicas on Ray Serve that share a Redis server."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import socket
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.helpers.paths import EXAMPLES, ROOT

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
pytest.importorskip("fastapi")
pytest.importorskip("aiohttp")
pytest.importorskip("ray.serve")
import ray
import serve_ray
from ray import serve
from recommender.saved import SavedModel, load_model
from recommender.serve_options import parse_arguments
from recommender.server import make_engine

from hstu_attn.serving.client import Client, RequestError
from hstu_attn.serving.events import Change
from hstu_attn.serving.ray import Replica, Served, deployment
from hstu_attn.serving.redis_store import RedisStore
from tests.helpers import http_client
from tests.helpers.ray_processes import processes_of_ray
from tests.helpers.saved_models import ITEMS, LONGEST, save, stored_events, whole
from tests.helpers.stores import redis_server

pytestmark = [pytest.mark.slow, pytest.mark.faults]

TOKEN = "administrator-of-the-tests"
NOW = int(time.time()) - 10**6
Events = list[tuple[int, int]]


def build(replica: Replica, options: Any) -> Served:
    """Returns the result of the example's `build`, with two changes for the tests.

    A note in the store says of each user whose rows an engine frees that it did. A replica whose
    process the note "kill" names kills itself after it has stored events, before it answers.
    """
    served = serve_ray.build(replica, options)
    engine, store, pid = served.engine, served.engine.store, os.getpid()
    forget_users, commit = engine.forget, store.commit

    def noted(*users: int | str, stored: bool = True) -> None:
        forget_users(*users, stored=stored)
        for user in users:
            store.set_note(f"{pid} freed {user}", b"1")

    def killed(changes: Sequence[Change]) -> list[int]:
        versions = commit(changes)
        if store.note("kill") == str(pid).encode():
            store.set_note("kill", b"done")
            os.kill(pid, signal.SIGKILL)
        return versions

    engine.forget = noted  # type: ignore[method-assign]
    store.commit = killed  # type: ignore[method-assign]
    return served


class Cluster(NamedTuple):
    address: str
    redis: str
    saved: SavedModel
    options: Any

    def stats(self) -> dict[int, dict[str, Any]]:
        """Returns the statistics of each replica, by process id."""
        handle = serve.get_deployment_handle("Replica", "default")
        found = handle.broadcast("stats").results(timeout_s=30, return_exceptions=True)
        return {one["pid"]: one for one in found if isinstance(one, dict)}

    def ask(self, call: Callable[[Client], Any], **options: Any) -> Any:
        async def run() -> Any:
            async with Client(self.address, **{"timeout": 30.0, **options}) as client:
                return await call(client)

        return asyncio.run(run())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("ray")
    save(folder / "best.pt", 1)
    (folder / "tokens").write_text(TOKEN)
    # A proxy that has started again has no routes yet, and answers 404 without this. Clients that
    # make one attempt are not to be refused because of the load.
    (folder / "site_limits.py").write_text(
        "from recommender import ray_proxy\ndef limit(): ray_proxy.limit(max_wait=60.0)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with redis_server(folder) as redis:
        words = ["--model", str(folder / "best.pt"), "--store", redis.url, "--device", "cpu"]
        options = parse_arguments("", [*words, "--admin-token-file", str(folder / "tokens")])
        environment = {
            "PYTHONPATH": f"{ROOT}:{EXAMPLES}:{folder}",
            "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.2",
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # 5 s suits an idle machine
            "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "site_limits:limit",
        }
        ray.init(
            "local",
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": environment},
            object_store_memory=10**8,
        )
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            two = deployment(num_replicas=2, ray_actor_options={"num_cpus": 0.5})
            serve.run(two.bind(build, options))
            address = f"http://127.0.0.1:{port}"
            saved = load_model(folder / "best.pt", torch.device("cpu"))
            yield Cluster(address, redis.url, saved, options)
        finally:
            serve.shutdown()
            ray.shutdown()


@pytest.fixture
def store(cluster: Cluster) -> Iterator[RedisStore]:
    with RedisStore(cluster.redis, LONGEST) as store:
        yield store


def some_events(rng: random.Random, at: int, most: int = 3) -> Events:
    """Returns events after a time."""
    events = []
    for _ in range(rng.randrange(1, most + 1)):
        at += rng.randrange(1, 50)
        events.append((rng.choice(ITEMS), at))
    return events


def test_scores_are_those_of_one_engine(cluster: Cluster) -> None:
    """Without the affinity header, a user's requests are spread over both replicas."""
    rng = random.Random(1)
    requests: list[tuple[int, Events, list[int]]] = []
    latest = dict.fromkeys(range(1000, 1016), NOW)
    for user in [*latest] * 5:
        events = some_events(rng, latest[user])
        latest[user] = events[-1][1]
        requests.append((user, events, rng.sample(ITEMS, 5)))
    plain = http_client.Client(cluster.address)
    before = cluster.stats()

    async def ask(client: Client) -> list[list[float]]:
        return [await client.score(*request) for request in requests[:40]]

    answers = cluster.ask(ask)
    for user, events, candidates in requests[40:]:  # these name no user in a header
        sent = [{"item": item, "time": at} for item, at in events]
        answers.append(
            plain.post("/score", user=user, events=sent, candidates=candidates)["scores"]
        )
    after = cluster.stats()
    each = [after[pid]["completed"] - before[pid]["completed"] for pid in before]
    assert sum(each) == len(requests)
    assert min(each) > 10
    index = {int(item): n for n, item in enumerate(cluster.saved.item_ids)}
    local = Namespace(**{**vars(cluster.options), "store": "memory"})
    with make_engine(local, cluster.saved) as engine:
        for (user, events, candidates), answer in zip(requests, answers, strict=True):
            numbered = [(index[item], at) for item, at in events]
            expected = engine.score(user, numbered, [index[item] for item in candidates])
            assert answer == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-5)


def test_requests_of_a_user_go_to_one_replica(cluster: Cluster) -> None:
    users = range(2000, 2012)
    served_by: dict[int, Counter[int]] = {}

    async def visits(client: Client, user: int) -> None:
        rng, at = random.Random(user), NOW
        for _ in range(5):
            events = some_events(rng, at)
            at = events[-1][1]
            await client.recommend(user, events, 3)

    first = last = cluster.stats()
    for user in users:
        before = last
        cluster.ask(lambda client, user=user: visits(client, user))
        last = cluster.stats()
        done = {pid: last[pid]["completed"] - before[pid]["completed"] for pid in last}
        served_by[user] = Counter({pid: count for pid, count in done.items() if count})
    assert [sorted(counts.values()) for counts in served_by.values()] == [[5]] * len(users)
    assert len({pid for counts in served_by.values() for pid in counts}) == 2
    again = sum(last[pid]["recomputed_tokens"] - first[pid]["recomputed_tokens"] for pid in last)
    assert again == 4 * len(users)  # the last event before each request; all others were cached


def test_forgetting_reaches_all_replicas(cluster: Cluster, store: RedisStore) -> None:
    plain, user = http_client.Client(cluster.address), 3000
    body = {"user": user, "events": [{"item": ITEMS[3], "time": NOW}], "candidates": ITEMS[:3]}
    plain.post("/score", **body)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert plain.send("POST", "/admin/forget", {"user": user})[0] == 401
    assert plain.send("POST", "/admin/forget", {"user": user}, headers)[0] == 200
    for pid in cluster.stats():
        assert store.note(f"{pid} freed {user}") == b"1"
    assert stored_events(store, [user]) == {user: []}
    with pytest.raises(RequestError, match="The user is new"):
        cluster.ask(lambda client: client.score(user, [], ITEMS[:3]))
    status, _, _ = plain.send("POST", "/admin/model", {}, headers)  # a rolling update does that
    assert status == 404


def test_pruning_reaches_all_replicas(cluster: Cluster, store: RedisStore) -> None:
    plain, users = http_client.Client(cluster.address), [3100, 3101]
    old, new = [{"item": ITEMS[3], "time": at} for at in (NOW - 2 * 10**6, NOW)]
    for user, events in ((3100, [old, new]), (3101, [old]), (3102, [new])):
        plain.post("/score", user=user, events=events, candidates=ITEMS[:3])
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = plain.send("POST", "/admin/prune", {"before": NOW - 10**6}, headers)
    assert (answer[0], answer[2]) == (200, {"done": "Old events of 2 users are deleted"})
    for pid in cluster.stats():
        freed = [store.note(f"{pid} freed {user}") for user in (*users, 3102)]
        assert freed == [b"1", b"1", None]
    assert stored_events(store, users) == {3100: [(ITEMS[3], NOW)], 3101: []}
    scores = cluster.ask(lambda client: client.score(3100, [], ITEMS[:3]))
    assert scores == pytest.approx(whole(cluster.saved, [(ITEMS[3], NOW)], ITEMS[:3]), rel=1e-4)


class CountingClient(Client):
    """Counts attempts."""

    sent = 0

    async def _send(self, *arguments: Any) -> Any:
        self.sent += 1
        return await super()._send(*arguments)


class Writers:
    """Users who send events in one request after another.

    Attributes:
        sent: each user's requests.
        answers: the scores in the answer to each request.
        earlier: events that each user had before.
    """

    def __init__(self, users: Iterable[int], earlier: dict[int, Events] | None = None) -> None:
        self.sent: dict[int, list[Events]] = {user: [] for user in users}
        self.answers: dict[int, list[list[float]]] = {user: [] for user in users}
        self.earlier = earlier or {}

    async def write(self, client: Client, user: int, enough: Callable[[], bool]) -> None:
        """Sends requests until the writers are told to stop."""
        rng, at = random.Random(user), NOW + 1
        while not enough():
            self.sent[user].append(some_events(rng, at))
            at = self.sent[user][-1][-1][1]
            self.answers[user].append(await client.score(user, self.sent[user][-1], ITEMS[:5]))

    def start(self, client: Client, enough: Callable[[], bool]) -> list[asyncio.Task[None]]:
        """Lets all users write."""
        return [asyncio.create_task(self.write(client, user, enough)) for user in self.sent]

    @property
    def fewest(self) -> int:
        """Returns the smallest number of answers of a user."""
        return min(map(len, self.answers.values()))

    def check(self, saved: SavedModel, store: RedisStore, most: int = 500) -> None:
        """Checks that answers are right, `most` of them, and that each event is stored once."""
        stored = stored_events(store, list(self.sent))
        step = 1 + sum(map(len, self.answers.values())) // most
        for user, requests in self.sent.items():
            events = [*self.earlier.get(user, [])]
            for n, (new, scores) in enumerate(zip(requests, self.answers[user], strict=True)):
                events += new
                if (n + user) % step == 0:
                    expected = whole(saved, events, ITEMS[:5])
                    assert scores == pytest.approx(expected, rel=1e-4, abs=1e-5)
            assert stored[user] == events


def test_a_replica_is_killed_under_load(cluster: Cluster, store: RedisStore) -> None:
    """All answers are correct, all events are stored once, and Ray starts a new replica."""
    users = range(4000, 4016)
    before = cluster.stats()
    first = [(ITEMS[0], NOW)]
    cluster.ask(lambda client: client.score(users[0], first, ITEMS[:5]))
    victim = next(
        pid for pid, one in cluster.stats().items() if one["completed"] > before[pid]["completed"]
    )
    writers = Writers(users, {users[0]: first})

    async def run() -> int:
        # On a busy machine, Ray's proxy once left a request to the killed replica unanswered.
        client = CountingClient(cluster.address, timeout=60.0, attempts=20, attempt_timeout=15.0)
        async with client:
            until = math.inf
            tasks = writers.start(client, lambda: writers.fewest >= until)
            while writers.fewest < 5:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(store.set_note, "kill", str(victim).encode())
            while await asyncio.to_thread(store.note, "kill") != b"done":
                await asyncio.sleep(0.01)
            until = max(map(len, writers.answers.values())) + 5
            await asyncio.gather(*tasks)
        return client.sent

    attempts = asyncio.run(run())
    # Requests that the killed replica had stored but not answered were retried.
    assert attempts > sum(map(len, writers.answers.values()))
    assert writers.fewest > 9
    writers.check(cluster.saved, store)
    end = time.monotonic() + 60
    while len(after := cluster.stats()) < 2 or set(after) == set(before):
        assert time.monotonic() < end, "no new replica came"
        time.sleep(0.2)
    assert set(before) - set(after) == {victim}
    assert len(cluster.ask(lambda client: client.score(users[0], [], ITEMS[:5]))) == 5


def process_of_ray(name: str) -> int | None:
    """Returns the process of an actor, or None; there is at most one."""
    return next(iter(processes_of_ray(name)), None)


@pytest.mark.parametrize(("name", "first"), [("ProxyActor", 4100), ("ServeController", 4200)])
def test_a_process_of_ray_is_killed_under_load(
    name: str, first: int, cluster: Cluster, store: RedisStore
) -> None:
    """Ray restarts the process; all answers are correct, and all events are stored once."""
    before, writers = process_of_ray(name), Writers(range(first, first + 8))
    assert before is not None

    async def run() -> None:
        async with Client(cluster.address, timeout=120.0, attempts=80) as client:
            until, end = math.inf, time.monotonic() + 120
            tasks = writers.start(client, lambda: writers.fewest >= until)
            while writers.fewest < 5:
                await asyncio.sleep(0.01)
            os.kill(before, signal.SIGKILL)
            while process_of_ray(name) in (None, before):
                assert time.monotonic() < end, f"no new {name} came"
                await asyncio.sleep(0.2)
            until = max(map(len, writers.answers.values())) + 5
            await asyncio.gather(*tasks)

    asyncio.run(run())
    assert writers.fewest > 9
    writers.check(cluster.saved, store, most=50)
    assert len(cluster.stats()) == 2


# Ray warns that the period is shorter than its default interval of measuring, which is not used.
@pytest.mark.filterwarnings("ignore:`look_back_period_s`:FutureWarning")
def test_replicas_go_and_come_with_the_load(cluster: Cluster, store: RedisStore) -> None:
    """No request fails while a replica drains, and all later answers are correct."""
    scaling = {
        "min_replicas": 1,
        "max_replicas": 2,
        "target_ongoing_requests": 4,
        "upscale_delay_s": 0.5,
        "downscale_delay_s": 0.5,
        "look_back_period_s": 1.0,
    }
    scaled = deployment(autoscaling_config=scaling, ray_actor_options={"num_cpus": 0.5})
    before, few, after = Writers(range(5000, 5024)), Writers([5100]), Writers(range(5200, 5224))

    async def replicas(client: Client, count: int, writers: Writers) -> int:
        """Lets users write until there are `count` replicas, and a while longer."""
        until, end = math.inf, time.monotonic() + 60
        tasks = writers.start(client, lambda: writers.fewest >= until)
        while len(pids := await asyncio.to_thread(cluster.stats)) != count:
            assert time.monotonic() < end, f"{len(pids)} replicas, expected {count}"
            await asyncio.sleep(0.2)
        until = writers.fewest + 5
        await asyncio.gather(*tasks)
        return len(pids)

    async def run() -> list[int]:
        async with Client(cluster.address, timeout=60.0, attempts=1) as client:
            both = await replicas(client, 2, before)
            await asyncio.to_thread(serve.run, scaled.bind(build, cluster.options))
            return [both, await replicas(client, 1, few), await replicas(client, 2, after)]

    assert asyncio.run(run()) == [2, 1, 2]
    for writers in (before, few, after):
        writers.check(cluster.saved, store, most=50)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"store": "memory"}, "store: expected one that replicas share, redis://..., got memory"),
        ({}, "store: expected one that replicas share, redis://..., got None"),
        ({"stores": "x"}, "arguments: expected options of serve.py, got "),
    ],
)
def test_wrong_arguments(arguments: dict[str, str], message: str, tmp_path: Path) -> None:
    save(tmp_path / "best.pt", 1)
    with pytest.raises(ValueError, match=message):
        serve_ray.app({"model": str(tmp_path / "best.pt"), **arguments})
