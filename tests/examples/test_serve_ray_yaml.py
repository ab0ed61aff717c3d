"""Tests of examples/serve_ray.yaml, of which `serve run` and `serve deploy` make replicas."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.paths import EXAMPLES, ROOT

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
pytest.importorskip("fastapi")
pytest.importorskip("aiohttp")
pytest.importorskip("ray.serve")
import yaml
from prometheus_client.parser import text_string_to_metric_families
from recommender.models import load_served
from recommender.saved import load_model
from recommender.serve_options import parse_arguments
from recommender.server import make_engine

from hstu_attn.serving import Engine
from hstu_attn.serving.client import Client, RequestError
from tests.helpers import http_client
from tests.helpers.ray_processes import processes_below, processes_of_ray
from tests.helpers.saved_models import ITEMS, save, save_ranking, whole
from tests.helpers.stores import redis_server

pytestmark = [pytest.mark.slow, pytest.mark.faults]

CPU = torch.device("cpu")
NOW = int(time.time()) - 10**6
LATER = [*range(90, 100), *ITEMS, *range(160, 165)]  # the items of the later model
TOKEN = "client-of-the-ranking-model"
RAY_TOKEN = secrets.token_hex(32)
CONNECTIONS, ARRIVAL_SECONDS, BODY_BYTES = 40, 3.0, 20_000
REPLICA = "ServeReplica:default:Replica"
SERVE = [sys.executable, "-m", "ray.serve.scripts"]
Events = list[tuple[int, int]]


class Site:
    """Two applications on Ray Serve, as an operator runs them by its commands.

    Attributes:
        address: where its proxy listens.
        saved: the models whose files are `first.pt`, `later.pt` and `retrained.pt`.
        process: that of `serve run`, which has started all others.
    """

    process: subprocess.Popen[bytes]

    def __init__(self, folder: Path, redis_url: str) -> None:
        self.folder = folder
        self.started: dict[int, str] = {}
        save(folder / "first.pt", 1)
        save(folder / "later.pt", 2, LATER)
        save(folder / "retrained.pt", 4)
        names = ("first.pt", "later.pt", "retrained.pt")
        self.saved = [load_model(folder / name, CPU) for name in names]
        for name in names[1:]:
            (folder / f"truncated-{name}").write_bytes((folder / name).read_bytes()[:-500])
            state = torch.load(folder / name, weights_only=True)
            next(iter(state["model"].values())).fill_(math.nan)
            torch.save(state, folder / f"nan-{name}")
        save_ranking(folder / "ranking.pt", 3)
        (folder / "tokens").write_text(TOKEN)
        (folder / "site_limits.py").write_text(
            "from recommender import ray_proxy\n"
            f"def limit(): ray_proxy.limit({CONNECTIONS}, {ARRIVAL_SECONDS})\n"
        )
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        self.config = yaml.safe_load((EXAMPLES / "serve_ray.yaml").read_text())
        self.config["http_options"]["port"] = port
        (one,) = self.config["applications"]
        one["args"] = {"store": redis_url, "device": "cpu", "max-body-bytes": BODY_BYTES}
        (options,) = one["deployments"]
        options["ray_actor_options"]["num_cpus"] = 0.25  # two processors have room for two models
        ranking = {**one, "name": "ranking", "route_prefix": "/ranking"}
        ranking["args"] = {
            "model": str(folder / "ranking.pt"),
            "store": redis_url.removesuffix("/0") + "/1",
            "token-file": str(folder / "tokens"),
        }
        ranking["deployments"] = [{**options, "max_ongoing_requests": 1, "max_queued_requests": 1}]
        self.config["applications"].append(ranking)
        self.environment = os.environ | {
            "PYTHONPATH": f"{ROOT}:{EXAMPLES}:{folder}",
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": RAY_TOKEN,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "site_limits:limit",
            "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # 5 s suits an idle machine
            "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
        }

    def write(self, model: str, retrained: str | None = None) -> Path:
        """Writes the configuration with a model of the folder, and one that takes over from it."""
        application = self.config["applications"][0]
        application["args"]["model"] = str(self.folder / model)
        (options,) = application["deployments"]
        options.pop("user_config", None)
        if retrained is not None:
            options["user_config"] = {"model": str(self.folder / retrained)}
        path = self.folder / "site.yaml"
        path.write_text(yaml.safe_dump(self.config))
        return path

    def start(self) -> None:
        """Runs `serve run`; returns when all replicas answer."""
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [*SERVE, "run", "--address", "local", str(self.write("first.pt"))],
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.dashboard, end = "", time.monotonic() + 180
        try:
            while not self.dashboard or set(self.statuses()) != {"RUNNING"}:
                assert self.process.poll() is None, self.log()
                assert time.monotonic() < end, self.log()
                time.sleep(0.5)
                if found := re.search(r"dashboard at \S*?(http://[\d.:]+)", self.log()):
                    self.dashboard = found[1]
        except BaseException:
            self.stop()
            raise
        self.started = processes_below(self.process.pid)

    def stop(self) -> None:
        """Ends `serve run`, and what it has not ended of what it had started, as an operator."""
        started = self.started | processes_below(self.process.pid)
        self.process.terminate()
        self.process.wait(60)
        for pid, command in processes_below(1).items():
            if started.get(pid) == command:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def applications(self) -> dict[str, Any]:
        """Returns what `serve status` tells of each application, which takes longer."""
        plain = http_client.Client(self.dashboard)
        headers = {"Authorization": f"Bearer {RAY_TOKEN}"}
        status, _, answer = plain.send("GET", "/api/serve/applications/", headers=headers)
        assert status == 200, answer
        found: dict[str, Any] = answer["applications"]
        return found

    def statuses(self) -> list[str]:
        return [one["status"] for one in self.applications().values()]

    def deploy(
        self,
        model: str,
        until: Callable[[dict[str, Any]], bool],
        retrained: str | None = None,
    ) -> None:
        """Deploys a model; returns when the application's status is as is asked for."""
        path = str(self.write(model, retrained))
        command = [*SERVE, "deploy", "--address", self.dashboard, path]
        subprocess.run(command, env=self.environment, check=True, timeout=60)
        end = time.monotonic() + 180
        while not until(told := self.applications()["default"]):
            assert time.monotonic() < end, told
            time.sleep(0.5)

    def ask(self, call: Callable[[Client], Any], path: str = "", **options: Any) -> Any:
        async def run() -> Any:
            async with Client(self.address + path, timeout=60.0, attempts=40, **options) as client:
                return await call(client)

        return asyncio.run(run())

    def expected(self, number: int, events: Events, candidates: list[int]) -> Any:
        """Returns the scores of one of the models, which leaves out what it does not know."""
        known = set(self.saved[number].item_ids.tolist())
        read = [event for event in events if event[0] in known]
        scores = whole(self.saved[number], read, candidates)
        return pytest.approx(scores, rel=1e-4, abs=1e-5)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with redis_server(folder) as redis:
        site = Site(folder, redis.url)
        site.start()
        try:
            yield site
        finally:
            site.stop()


@pytest.fixture(scope="module")
def ranking(site: Site) -> Iterator[Engine]:
    """An engine of the ranking model in this process."""
    words = ["--model", str(site.folder / "ranking.pt"), "--device", "cpu", "--store", "memory"]
    options = parse_arguments("", words)
    with make_engine(options, load_served(options.model, False, CPU)) as engine:
        yield engine


def ranked(engine: Engine, user: int, events: list[Any], candidates: list[int]) -> dict[str, Any]:
    bits = {"click": 1, "like": 2}
    rows = [(ITEMS.index(item), at, sum(map(bits.get, acts))) for item, at, acts in events]  # type: ignore[arg-type]
    scores = engine.score(user, rows, [ITEMS.index(item) for item in candidates]).T.tolist()
    return {
        task: pytest.approx(values, rel=1e-4, abs=1e-5)
        for task, values in zip(("like", "click"), scores, strict=True)
    }


def replicas_of(site: Site, family: str, **labels: str) -> dict[str, float]:
    """Returns a metric of each replica of the first application."""
    status, _, text = http_client.Client(site.address).send("GET", "/metrics")
    assert status == 200
    (found,) = [one for one in text_string_to_metric_families(text) if one.name == family]
    return {
        one.labels["replica"]: one.value
        for one in found.samples
        if "_created" not in one.name and labels.items() <= one.labels.items()
    }


def test_a_ranking_model_answers_as_in_one_process(site: Site, ranking: Engine) -> None:
    rng, tasks = random.Random(1), set()
    latest = dict.fromkeys([0, 3, 9, 77], NOW)  # the model knows the first three

    async def ask(client: Client) -> None:
        for user in [*latest] * 6:
            events = []
            for _ in range(rng.randrange(1, 4)):
                latest[user] += rng.randrange(1, 5000)
                acts = rng.sample(["click", "like"], rng.randrange(3))
                events.append((rng.choice(ITEMS), latest[user], acts))
            candidates = rng.sample(ITEMS, 5)
            found = await client.rank(user, events, candidates)
            tasks.update(found)
            assert found == ranked(ranking, user, events, candidates)

    site.ask(ask, "/ranking", token=TOKEN)
    assert tasks == {"like", "click"}
    plain = http_client.Client(site.address)
    assert plain.send("POST", "/ranking/rank", {})[0] == 401
    assert plain.send("GET", "/ranking/ready")[0] == 200  # needs no token below a prefix, either


def test_overload_is_answered_503_with_retry_after(site: Site, ranking: Engine) -> None:
    """Ray's proxy refuses what neither replicas nor its queue take; who asks again is served."""
    plain, headers = http_client.Client(site.address), {"Authorization": f"Bearer {TOKEN}"}
    event = {"item": ITEMS[0], "time": NOW, "actions": []}
    expected = ranked(ranking, 1000, [(ITEMS[0], NOW, [])], ITEMS)

    def send(user: int) -> tuple[int, Any, Any]:
        body = {"user": user, "events": [event], "candidates": ITEMS}
        return plain.send("POST", "/ranking/rank", body, headers)

    refused = 0
    with ThreadPoolExecutor(24) as pool:
        for turn in range(20):
            for status, told, answer in pool.map(send, range(1000 + 24 * turn, 1024 + 24 * turn)):
                assert status in (200, 503)
                if status == 503:
                    refused += 1
                    assert told["Retry-After"] == "1"
                else:
                    assert answer["probabilities"] == expected
            if refused:
                break
    assert refused

    async def ask(client: Client) -> list[Any]:
        asked = (client.rank(user, [(ITEMS[0], NOW, [])], ITEMS) for user in range(2000, 2008))
        return await asyncio.gather(*asked)

    assert site.ask(ask, "/ranking", token=TOKEN) == [expected] * 8


def test_time_in_the_proxy_counts_for_the_deadline(site: Site) -> None:
    """Each replica is busy with a request that arrives slowly, so that another one waits."""
    plain, headers = http_client.Client(site.address), {"Authorization": f"Bearer {TOKEN}"}
    event = {"item": ITEMS[0], "time": NOW, "actions": []}

    def body(user: int) -> dict[str, Any]:
        return {"user": user, "events": [event], "candidates": ITEMS}

    def send(milliseconds: int) -> tuple[int, Any, Any]:
        more = {"X-Request-Timeout-Ms": str(milliseconds)}
        return plain.send("POST", "/ranking/rank", body(4000), headers | more)

    assert send(60_000)[0] == 200
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        slow, text = [], json.dumps(body(4001)).encode()
        head = (
            f"POST /ranking/rank HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        )
        for _ in range(2):
            slow.append(stack.enter_context(socket.create_connection((plain.host, plain.port), 60)))
            slow[-1].sendall(head.encode() + text[:9])
            time.sleep(0.3)  # a replica has it
        waiting = pool.submit(send, 500)
        time.sleep(1.0)
        for connection in slow:
            connection.sendall(text[9:])
        status, _, answer = waiting.result()
        assert all(connection.recv(100).startswith(b"HTTP/1.1 200 ") for connection in slow)
    late = "No answer within 0.5 s; the request had no effect"
    assert (status, answer.get("detail")) == (504, late)


def test_bodies_and_connections_are_limited(site: Site) -> None:
    """A body by the replica, even if it does not tell its length; the others by the proxy."""
    plain = http_client.Client(site.address)
    for size in ({}, {"encode_chunked": True}):
        chunks = [b" " * BODY_BYTES, b" "] if size else [b" " * (BODY_BYTES + 1)]
        status, _, answer = plain.send("POST", "/score", iter(chunks), **size)
        assert (status, answer["detail"]) == (413, "The body must have at most 20000 bytes")
    head = b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with ExitStack() as stack:

        def connect(sent: bytes = b"") -> socket.socket:
            opened = socket.create_connection((plain.host, plain.port), 60)
            opened.sendall(sent)
            return stack.enter_context(opened)

        slow = [connect(head + b"Content-Length: 9\r\n\r\n{"), connect(head)]
        silent = [connect() for _ in range(CONNECTIONS + 5)]
        refused = [answer for connection in silent if (answer := connection.recv(1000))]
        lines = [connection.recv(1000).split(b"\r\n")[0] for connection in slow]
    assert lines == [b"HTTP/1.1 408 Request Timeout", b""]
    assert 7 <= len(refused) < CONNECTIONS  # connections of the tests before may still be open
    for answer in refused:
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n")
    assert plain.send("GET", "/health")[0] == 200


def test_metrics_are_those_of_each_replica(site: Site) -> None:
    before = replicas_of(site, "hstu_engine_completed")
    assert len(before) == 2

    async def ask(client: Client) -> None:
        for user in range(3000, 3020):
            await client.score(user, [(ITEMS[0], NOW)], ITEMS[:3])

    site.ask(ask)
    for _ in range(5):  # whichever replica answers
        after = replicas_of(site, "hstu_engine_completed")
        each = [after[name] - before[name] for name in before]
        assert sum(each) == 20
        assert min(each) > 0
    assert replicas_of(site, "hstu_ready") == dict.fromkeys(before, 1.0)


def is_running(told: dict[str, Any]) -> bool:
    """Returns whether an application has all of its replicas."""
    return bool(told["status"] == "RUNNING")


class Users:
    """Users who send events in one request after another, and what they are answered.

    Attributes:
        events: each user's acknowledged events.
        used: the models that have answered, in their order.
    """

    def __init__(self, site: Site, users: range) -> None:
        self.site = site
        self.events: dict[int, Events] = {user: [] for user in users}
        self.used: dict[int, list[int]] = {user: [] for user in users}
        self.done = False

    async def write(self, client: Client, user: int) -> None:
        rng, events = random.Random(user), self.events[user]
        while not self.done:
            at = NOW + len(events)
            late = [(rng.choice(LATER), at)] if user % 2 else []
            new = [*dict.fromkeys([*late, (rng.choice(ITEMS), at)])]
            try:
                scores = await client.score(user, new, ITEMS[:5])
            except RequestError as error:  # the first model does not know the item
                if error.status == 422 and {item for item, _ in new} - set(ITEMS):
                    continue
                raise
            events += new
            numbers = range(len(self.site.saved))
            right = [n for n in numbers if scores == self.site.expected(n, events, ITEMS[:5])]
            assert len(right) == 1
            self.used[user] += right
            await asyncio.sleep(0.1)

    async def meanwhile(self, call: Callable[[], object], attempts: int = 1) -> None:
        """Lets all users write until something is done, and somewhat longer."""
        self.done = False
        async with Client(self.site.address, timeout=120.0, attempts=attempts) as client:
            tasks = [asyncio.create_task(self.write(client, user)) for user in self.events]
            try:
                await asyncio.to_thread(call)
                await asyncio.sleep(0.5)
            finally:
                self.done = True
                await asyncio.gather(*tasks)


def test_a_model_takes_over_under_load_and_the_one_before_again(site: Site) -> None:
    """Each answer is of one model, on the events that it knows; no request fails."""
    users, both = Users(site, range(4000, 4006)), {0, 1}
    replicas = set(processes_of_ray(REPLICA))
    asyncio.run(users.meanwhile(lambda: site.deploy("later.pt", is_running)))
    assert set().union(*users.used.values()) == both
    assert {used[-1] for used in users.used.values()} == {1}
    later = set(processes_of_ray(REPLICA))
    assert len(later) == 2
    assert not later & replicas
    known = set(ITEMS)
    skipped = [
        user for user, events in users.events.items() if {item for item, _ in events} - known
    ]
    assert skipped

    # A damaged file is not deployed: Ray goes on with the replicas, and replaces one that dies.
    site.deploy("truncated-later.pt", lambda told: told["status"] == "DEPLOY_FAILED")
    assert "expected what torch has saved" in str(site.applications()["default"])
    assert set(processes_of_ray(REPLICA)) == later
    os.kill(min(later), signal.SIGKILL)
    end = time.monotonic() + 60
    while len(replicas_of(site, "hstu_ready")) < 2 or min(later) in processes_of_ray(REPLICA):
        assert time.monotonic() < end, "no new replica came"
        time.sleep(0.2)
    users.used = {user: [] for user in users.events}
    asyncio.run(users.meanwhile(lambda: time.sleep(0.5)))
    assert all(set(used) == {1} for used in users.used.values())

    # A model that cannot be served is refused by its replicas, and the others go on.
    site.deploy("nan-later.pt", lambda told: "NaN or Inf" in str(told))
    users.used = {user: [] for user in users.events}
    asyncio.run(users.meanwhile(lambda: time.sleep(0.5)))
    assert all(set(used) == {1} for used in users.used.values())

    # One call brings the first model back, although users have events that it does not know.
    users.used = {user: [] for user in users.events}
    asyncio.run(users.meanwhile(lambda: site.deploy("first.pt", is_running)))
    assert {used[-1] for used in users.used.values()} == {0}

    async def ask(client: Client) -> None:
        for user in skipped:
            scores = await client.score(user, [], ITEMS[:5])
            assert scores == site.expected(0, users.events[user], ITEMS[:5])

    site.ask(ask)


def test_replicas_change_their_model_in_place(site: Site) -> None:
    """The processes stay, no request fails, and a model that cannot be served changes nothing."""

    def deploy(retrained: str | None, outcome: str) -> None:
        """Returns when both replicas have one more model of that outcome."""
        before = replicas_of(site, "hstu_model_changes", outcome=outcome)
        site.deploy("first.pt", is_running, retrained)
        end = time.monotonic() + 60
        while replicas_of(site, "hstu_model_changes", outcome=outcome) != {
            name: count + 1 for name, count in before.items()
        }:
            assert time.monotonic() < end, replicas_of(site, "hstu_model_changes")
            time.sleep(0.2)

    def used_since(call: Callable[[], object]) -> list[list[int]]:
        users.used = {user: [] for user in users.events}
        asyncio.run(users.meanwhile(call))
        return [*users.used.values()]

    users, replicas = Users(site, range(4100, 4106)), set(processes_of_ray(REPLICA))
    used = used_since(lambda: deploy("retrained.pt", "taken over"))
    assert {number for numbers in used for number in numbers} == {0, 2}
    assert {numbers[-1] for numbers in used} == {2}

    for wrong, why in (
        ("nan-retrained.pt", "expected finite weights, got NaN or Inf"),
        ("truncated-retrained.pt", "or is damaged"),
        ("later.pt", "expected a model of the"),  # has other items
    ):
        used = used_since(functools.partial(deploy, wrong, "refused"))
        assert {number for numbers in used for number in numbers} == {2}
        assert re.search(f"The model has not been changed to that of .*{why}", site.log())
    assert set(processes_of_ray(REPLICA)) == replicas

    # A replica that Ray starts serves the model that is deployed.
    site.deploy("first.pt", is_running, "retrained.pt")
    os.kill(min(replicas), signal.SIGKILL)
    end = time.monotonic() + 60
    while len(replicas_of(site, "hstu_ready")) < 2 or min(replicas) in processes_of_ray(REPLICA):
        assert time.monotonic() < end, "no new replica came"
        time.sleep(0.2)
    used = used_since(lambda: time.sleep(0.5))
    assert {number for numbers in used for number in numbers} == {2}

    # Without a user_config the model of the arguments takes over again.
    used = used_since(lambda: deploy(None, "taken over"))
    assert {numbers[-1] for numbers in used} == {0}


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_a_process_of_the_head_is_killed_under_load(site: Site, name: str) -> None:
    """The service ends, which the log says; the next one has all events that were acknowledged."""
    users = Users(site, range(5000, 5006) if name == "raylet" else range(5100, 5106))

    def kill_and_start_again() -> None:
        while not all(users.events.values()):
            time.sleep(0.05)
        (victim,) = [
            pid for pid, command in site.started.items() if command.split()[0].endswith(f"/{name}")
        ]
        os.kill(victim, signal.SIGKILL)
        end = time.monotonic() + 60
        while not re.search("Failed to connect to GCS|are UNHEALTHY", site.log()):
            assert time.monotonic() < end, "nothing in the log"
            time.sleep(0.2)
        site.stop()
        before = {user: len(events) for user, events in users.events.items()}
        site.start()
        end = time.monotonic() + 60
        while any(len(events) == before[user] for user, events in users.events.items()):
            assert time.monotonic() < end, "a user is not answered"
            time.sleep(0.2)

    asyncio.run(users.meanwhile(kill_and_start_again, attempts=10_000))
    assert all(set(used) == {0} for used in users.used.values())
