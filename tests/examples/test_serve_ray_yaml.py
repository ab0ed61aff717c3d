"""Tests of examples/serve_ray.yaml, which `serve run` and `serve deploy` deploy."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
pytest.importorskip("fastapi")
pytest.importorskip("aiohttp")
pytest.importorskip("ray.serve")
from recommender.models import load_served
from recommender.serve_options import parse_arguments
from recommender.server import make_engine

from hstu_attn.serving import Engine
from hstu_attn.serving.client import Client
from tests.helpers import http_client
from tests.helpers.ray_site import (
    CPU,
    NOW,
    Site,
    Users,
    replicas_of,
)
from tests.helpers.saved_models import ITEMS, save_ranking
from tests.helpers.stores import redis_server

pytestmark = [pytest.mark.slow, pytest.mark.faults]

TOKEN = "client-of-the-ranking-model"
CONNECTIONS, ARRIVAL_SECONDS, BODY_BYTES = 40, 3.0, 20_000


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two applications: one that recommends, and one that ranks."""
    folder = tmp_path_factory.mktemp("site")
    save_ranking(folder / "ranking.pt", 3)
    (folder / "tokens").write_text(TOKEN)
    (folder / "site_limits.py").write_text(
        "from recommender import ray_proxy\n"
        f"def limit(): ray_proxy.limit({CONNECTIONS}, {ARRIVAL_SECONDS})\n"
    )
    with redis_server(folder) as redis:
        variables = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "site_limits:limit"}
        site = Site(folder, redis.url, variables, **{"max-body-bytes": BODY_BYTES})
        (one,) = site.config["applications"]
        ranking = {**one, "name": "ranking", "route_prefix": "/ranking"}
        ranking["args"] = {
            "model": str(folder / "ranking.pt"),
            "store": redis.url.removesuffix("/0") + "/1",
            "token-file": str(folder / "tokens"),
        }
        (options,) = one["deployments"]
        limits = {"num_replicas": 1, "max_ongoing_requests": 1, "max_queued_requests": 1}
        ranking["deployments"] = [{**options, **limits}]
        site.config["applications"].append(ranking)
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
    """Ray's proxy refuses requests beyond the replicas' limits and its queue; retries succeed."""
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
    """The replica is busy with a request that arrives slowly, so that another one waits."""
    plain, headers = http_client.Client(site.address), {"Authorization": f"Bearer {TOKEN}"}
    event = {"item": ITEMS[0], "time": NOW, "actions": []}

    def body(user: int) -> dict[str, Any]:
        return {"user": user, "events": [event], "candidates": ITEMS}

    def send(milliseconds: int) -> tuple[int, Any, Any]:
        more = {"X-Request-Timeout-Ms": str(milliseconds)}
        return plain.send("POST", "/ranking/rank", body(4000), headers | more)

    assert send(60_000)[0] == 200
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        text = json.dumps(body(4001)).encode()
        head = (
            f"POST /ranking/rank HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        )
        slow = stack.enter_context(socket.create_connection((plain.host, plain.port), 60))
        slow.sendall(head.encode() + text[:9])
        time.sleep(0.3)  # until the replica has the request
        waiting = pool.submit(send, 500)
        time.sleep(1.0)
        slow.sendall(text[9:])
        status, _, answer = waiting.result()
        assert slow.recv(100).startswith(b"HTTP/1.1 200 ")
    late = "No answer within 0.5 s; the request had no effect"
    assert (status, answer.get("detail")) == (504, late)


def test_bodies_and_connections_are_limited(site: Site) -> None:
    """The replica limits bodies, even without a stated length; the proxy limits the others."""
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
    assert 7 <= len(refused) < CONNECTIONS  # connections of earlier tests may still be open
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


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_a_process_of_the_head_is_killed_under_load(site: Site, name: str) -> None:
    """The service ends, which is logged; the next service has all acknowledged events."""
    users = Users(site, range(5000, 5006) if name == "raylet" else range(5100, 5106))
    del site.config["applications"][1:]  # The next service has one application.

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

    used = users.meanwhile(kill_and_start_again, attempts=10_000)
    assert all(set(numbers) == {0} for numbers in used)
