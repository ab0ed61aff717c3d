"""Tests of the request limits of Ray's proxies that need no Ray."""

from __future__ import annotations

import asyncio
import http.client
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn")

from recommender import ray_proxy  # noqa: E402
from recommender.ray_proxy import ALWAYS, LoadShedder  # noqa: E402
from uvicorn.config import HTTP_PROTOCOLS  # noqa: E402

from tests.helpers.paths import EXAMPLES  # noqa: E402

MAX_WAIT = 1.0
EACH = 0.0201  # seconds between two answers, of which 50 begin in `MAX_WAIT`
MOST = 50


def answered(count: int = 100, each: float = EACH) -> LoadShedder:
    """Returns a shedder that has seen answers, at an even pace, to requests that came together."""
    shedder = LoadShedder(MAX_WAIT)
    for _ in range(count):
        shedder.begin("early", 0.0)
    for number in range(count):
        shedder.end("early", each * (number + 1))
    return shedder


def let_in(shedder: LoadShedder, client: str, most: int) -> int:
    """Sends requests of a client until one is refused; returns the number in flight."""
    for number in range(most):
        if shedder.excess(client):
            return number
        shedder.begin(client, 10.0)
    return most


def test_as_many_as_are_answered_in_time():
    shedder = answered()
    assert shedder.seconds_each == pytest.approx(EACH)
    assert let_in(shedder, "a", 1000) == MOST
    assert shedder.excess("a") == pytest.approx(EACH)
    shedder.end("a", 10.0 + EACH)
    assert not shedder.excess("a")


def test_nothing_is_known_at_first():
    assert let_in(LoadShedder(MAX_WAIT), "a", 1000) == 1000


def test_slow_answers_leave_room_for_some():
    shedder = answered(each=0.9)
    assert let_in(shedder, "a", 1000) == ALWAYS
    assert shedder.excess("a") == pytest.approx(0.9 * ALWAYS - MAX_WAIT)


def test_a_client_that_sends_much_does_not_keep_out_others():
    shedder = answered()
    assert let_in(shedder, "much", 1000) == MOST
    assert let_in(shedder, "b", 1000) == MOST / 2
    assert let_in(shedder, "c", 1000) == pytest.approx(MOST / 3, abs=1)
    assert shedder.excess("much") > 0
    others = sum(let_in(shedder, f"client {number}", 1) for number in range(1000))
    assert others + MOST + MOST / 2 + MOST / 3 == pytest.approx(2 * MOST, abs=2)
    for number in range(MOST // 2):  # requests of the first client end, and it may not send more
        shedder.end("much", 10.0 + EACH * (number + 1))
        assert shedder.excess("much") > 0
    assert not shedder.excess("late")


def test_the_pace_follows_the_latest_answers():
    shedder = answered()
    for number in range(300):
        shedder.begin("a", 10 + 0.01 * number)
        shedder.end("a", 10.01 + 0.01 * number)
    assert shedder.seconds_each == pytest.approx(0.01, rel=0.01)
    assert let_in(shedder, "a", 1000) == pytest.approx(2 * MOST, abs=2)


def test_neither_idle_times_nor_outages_are_a_pace():
    shedder = answered()
    for number in range(300):  # requests are rare
        shedder.begin("a", 100.0 * number)
        shedder.end("a", 100.0 * number + EACH)
    assert shedder.seconds_each == pytest.approx(EACH)
    shedder.begin("a", 1e6)
    shedder.end("a", 2e6)
    assert shedder.seconds_each == pytest.approx(0.98 * EACH + 0.02 * MAX_WAIT)


def scope(path: str, token: str = "", address: str = "10.0.0.1") -> dict[str, Any]:
    headers = [(b"authorization", token.encode())] if token else []
    return {"type": "http", "path": path, "headers": headers, "client": (address, 1)}


async def _answers(shedder: LoadShedder, scopes: list[dict[str, Any]]) -> list[Any]:
    """Returns the status of each request, and its Retry-After; all are sent at once."""
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await go_on.wait()
        if scope["path"] == "/score" and scope["headers"]:
            raise RuntimeError("a replica died")
        kinds = {"/early/score": b"text/plain", "/rank": b"application/json", "/bare/rank": b""}
        kind = kinds.get(scope["path"])
        headers = [(b"content-type", kind or b"application/json")] if kind != b"" else []
        await send(
            {
                "type": "http.response.start",
                "status": 200 if kind is None else 404,
                "headers": headers,
            }
        )
        await send({"type": "http.response.body", "body": b"{}"})

    async def ask(scope: dict[str, Any]) -> tuple[int, str | None]:
        found: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            found.append(message)

        try:
            await wrapped(scope, None, send)
        except RuntimeError:
            return 500, None
        after = dict(found[0]["headers"]).get(b"retry-after")
        return found[0]["status"], after and after.decode()

    wrapped = shedder.wrap(app)
    asked = [asyncio.create_task(ask(scope)) for scope in scopes]
    await asyncio.sleep(0)
    go_on.set()
    return await asyncio.gather(*asked)


def test_answers(caplog):
    shedder = answered(each=0.5)
    ours = [scope("/ranking/rank", address="10.0.0.1")] * (ALWAYS + 2)
    others = [scope("/recommend", address="10.0.0.2"), scope("/score", token="Bearer of another")]
    free = [scope("/metrics"), scope("/admin/forget"), {"type": "lifespan", "path": ""}]
    found = asyncio.run(_answers(shedder, ours + others + free))
    refused = [(503, str(round(ALWAYS * 0.5 - MAX_WAIT)))] * 2
    assert (
        found == [(200, None)] * ALWAYS + refused + [(200, None), (500, None)] + [(200, None)] * 3
    )
    assert "Refused a request: 16 are under way, 8 s of work" in caplog.text
    assert not shedder.excess("10.0.0.1")  # ended requests, also failed ones, are not in flight
    assert shedder._under_way.total() == 0


def test_the_time_of_arrival_goes_with_a_request():
    """Replicas count deadlines from the time of arrival, which another proxy may have set."""

    async def starts(*scopes: dict[str, Any]) -> list[list[bytes]]:
        found = []

        async def app(scope: Any, receive: Any, send: Any) -> None:
            found.append([value for name, value in scope["headers"] if name == b"x-request-start"])

        for one in scopes:
            await LoadShedder(MAX_WAIT).wrap(app)(one, None, None)
        return found

    earlier = scope("/recommend")
    earlier["headers"] = [(b"x-request-start", b"t=12.5")]
    before = time.time()
    (own,), given, other = asyncio.run(starts(scope("/score"), earlier, scope("/metrics")))
    assert own.startswith(b"t=")
    assert before - 0.001 <= float(own[2:]) <= time.time() + 0.001
    assert (given, other) == ([b"t=12.5"], [])


def test_what_is_not_there_yet_may_be_asked_for_again():
    """A 404 of Ray's proxy becomes a 503 with Retry-After; the application's own 404 is kept."""
    shedder = answered(each=0.5)
    paths = ("/early/score", "/rank", "/bare/rank")
    found = asyncio.run(_answers(shedder, [scope(path) for path in paths]))
    assert found == [(503, "1"), (404, None), (503, "1")]
    assert (before := shedder.seconds_each) < 0.5  # only the replica's answer is measured
    assert asyncio.run(_answers(shedder, [scope("/early/score")] * 3)) == [(503, "1")] * 3
    assert shedder.seconds_each == before
    assert shedder._under_way.total() == 0


def test_what_a_proxy_imports_is_small():
    """A proxy has no model, so it must not load torch."""
    code = "import recommender.ray_proxy, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=EXAMPLES, check=False).returncode == 0


@pytest.mark.slow
def test_what_a_server_imports_has_no_distributed_tensors():
    """They would take a quarter of a server's import time; only training on ranks needs them."""
    code = "import recommender.http, sys; sys.exit('torch.distributed.tensor' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=EXAMPLES, check=False).returncode == 0


def test_uvicorn_takes_the_limits(monkeypatch):
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", None)
    monkeypatch.setattr(ray_proxy, "limited", partial(ray_proxy.ProxyHTTP))
    ray_proxy.limit(max_connections=2, arrival_timeout=7.0, max_wait=0.3)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    def statuses(*paths: str) -> list[int]:
        found = []
        for path in paths:
            connection.request("POST", path, b"{}")
            response = connection.getresponse()
            response.read()
            found.append(response.status)
        return found

    server = uvicorn.Server(uvicorn.Config(app, ws="none", lifespan="off", log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            connection = http.client.HTTPConnection(*listener.getsockname(), timeout=20)
            assert statuses("/score", "/health") == [200, 200]
            (protocol,) = server.server_state.connections
            limits = protocol.max_connections, protocol.arrival_timeout, protocol.shedder.max_wait
            assert limits == (2, 7.0, 0.3)
            let_in(protocol.shedder, "127.0.0.1", ALWAYS)
            protocol.shedder.seconds_each = 1.0
            assert statuses("/score", "/health", "/recommend") == [503, 200, 503]
            connection.close()
        finally:
            server.should_exit = True
            thread.join(20)
    assert not thread.is_alive()
