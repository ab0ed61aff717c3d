"""Tests of the asynchronous client: against the example's server, and against servers that refuse,
lose connections or take too long.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("hstu_attn._host", reason="_host has not been built")
pytest.importorskip("fastapi")
from hstu_attn.serving import DeadlineError
from hstu_attn.serving import client as client_module
from hstu_attn.serving.client import Client, RecommendedItem, RequestError, UnavailableError
from tests.helpers.http_app import EVENT, FIRST_ID, Running, running

EVENTS = [(EVENT["item"], EVENT["time"])]
OK = (200, {}, {"scores": [0.5]})


def ask(address: str, call: Callable[[Client], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    """Returns the result of a call of a client."""

    async def run() -> Any:
        async with Client(address, **options) as client:
            return await call(client)

    return asyncio.run(run())


class Seen(NamedTuple):
    path: str
    headers: dict[str, str]
    body: Any


class Scripted:
    """A server of canned answers; None closes the connection, and "hang" never answers."""

    def __init__(self, *answers: Any) -> None:
        self.answers = [*answers]
        self.seen: list[Seen] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                line, *rest = head.decode().strip().split("\r\n")
                headers = {name.lower(): value for name, value in (x.split(": ", 1) for x in rest)}
                body = await reader.readexactly(int(headers["content-length"]))
                self.seen.append(Seen(line.split()[1], headers, json.loads(body)))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                if answer is None:
                    break
                if answer == "hang":
                    await asyncio.sleep(30)
                status, more, content = answer
                text = content if isinstance(content, bytes) else json.dumps(content).encode()
                lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(text)}"]
                lines += [f"{name}: {value}" for name, value in more.items()]
                writer.write("\r\n".join([*lines, "", ""]).encode() + text)
                await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self.handle, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    def score(self, **options: Any) -> Any:
        """Returns a client's result of a /score request."""

        async def run() -> Any:
            async with self.listening() as address, Client(address, **options) as client:
                return await client.score(7, [(1, 2)], [3])

        return asyncio.run(run())


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """Records the upper bounds of pauses; each pause is drawn as its bound, and takes no time."""
    drawn: list[tuple[float, float]] = []

    def uniform(low: float, high: float) -> float:
        drawn.append((low, high))
        return high

    monkeypatch.setattr(client_module, "random", SimpleNamespace(uniform=uniform))
    sleep_by(monkeypatch, lambda _: asyncio.sleep(0))
    return drawn


def sleep_by(
    monkeypatch: pytest.MonkeyPatch, sleep: Callable[[float], Coroutine[Any, Any, None]]
) -> None:
    """Replaces `sleep` in the client alone."""
    other = SimpleNamespace(sleep=sleep, TimeoutError=asyncio.TimeoutError)
    monkeypatch.setattr(client_module, "asyncio", other)


# ---------------------------------------------------------------------------------------------
# The example's server
# ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


def test_scores_and_recommendations(server: Running) -> None:
    candidates = [FIRST_ID, FIRST_ID + 2]
    scores = ask(server.address, lambda client: client.score(1, EVENTS, candidates, at=9))
    expected = server.client.post("/score", user=2, events=[EVENT], candidates=candidates, time=9)
    assert scores == expected["scores"]
    items = ask(server.address, lambda client: client.recommend(1, [], 3, exclude_seen=False))
    expected = server.client.post("/recommend", user=2, k=3, exclude_seen=False)
    assert items == [RecommendedItem(**item) for item in expected["items"]]
    assert len(ask(server.address, lambda client: client.recommend(1, []))) == 10


def test_many_at_once(server: Running) -> None:
    async def many(client: Client) -> list[list[float]]:
        asked = (client.score(100 + n, [(FIRST_ID + n, 5)], [FIRST_ID]) for n in range(40))
        return await asyncio.gather(*asked)

    found = ask(server.address, many, connections=8)
    assert len({scores[0] for scores in found}) == 40


def test_what_the_server_refuses_is_said(server: Running) -> None:
    for call, status, place in (
        (lambda client: client.score(1, [(10**9, 5)], []), 422, ["body", "events", 0, "item"]),
        (lambda client: client.recommend(10**9, []), 422, ["body", "events"]),
        (lambda client: client.rank(1, [], [1]), 404, None),
    ):
        before = server.engine.stats().requests
        with pytest.raises(RequestError, match=f"the server answered {status}: ") as refused:
            ask(server.address, call)
        assert refused.value.status == status
        assert place is None or refused.value.detail[0]["loc"] == place
        assert server.engine.stats().requests - before <= 1


def test_the_server_knows_the_deadline() -> None:
    """The server drops requests that miss their deadline, and the client waits no longer."""
    with running() as server:
        server.hold()

        async def call(client: Client) -> None:
            first = asyncio.create_task(client.score(1, EVENTS, [FIRST_ID], timeout=20))
            while not server.reached.is_set():
                await asyncio.sleep(0.002)
            with pytest.raises(DeadlineError, match="no answer in 1 attempts"):
                await client.score(2, EVENTS, [FIRST_ID], timeout=0.3)
            await asyncio.sleep(0.3)  # since the server counts from when the request has arrived
            server.release()
            assert len(await first) == 1

        ask(server.address, call)
        server.wait_for(completed=1, expired=1)
        assert server.engine.stats().users == 1


# ---------------------------------------------------------------------------------------------
# Attempts
# ---------------------------------------------------------------------------------------------


def test_an_attempt_says_who_asks_and_until_when(pauses: Any) -> None:
    server = Scripted(OK)
    assert server.score(token="a-token-0123456789", timeout=4.0) == [0.5]
    [seen] = server.seen
    assert seen.path == "/score"
    assert seen.headers["authorization"] == "Bearer a-token-0123456789"
    assert seen.headers["x-session-id"] == "7"
    assert 3000 < float(seen.headers["x-request-timeout-ms"]) <= 4000
    assert seen.body["events"] == [{"item": 1, "time": 2}]
    assert len(seen.body["request_id"]) == 32


def test_pauses_grow_and_are_drawn(pauses: list[tuple[float, float]]) -> None:
    full = (503, {}, {"detail": "full"})
    server = Scripted(full, full, full, OK)
    assert server.score(backoff=0.1) == [0.5]
    assert pauses == [(0, 0.1), (0, 0.2), (0, 0.4)]
    assert len({seen.body["request_id"] for seen in server.seen}) == 1
    assert len({seen.headers["x-request-timeout-ms"] for seen in server.seen}) == 4
    pauses.clear()
    with pytest.raises(UnavailableError, match=r"no answer in 9 attempts; .* answered 503: full"):
        Scripted(full).score(attempts=9, timeout=1e6)
    assert [most for _, most in pauses] == [0.05 * 2**n for n in range(7)] + [5.0, 5.0]


def test_no_attempt_before_the_time_that_the_server_names(
    monkeypatch: pytest.MonkeyPatch, pauses: list[tuple[float, float]]
) -> None:
    slept: list[float] = []

    async def note(seconds: float) -> None:
        slept.append(seconds)

    sleep_by(monkeypatch, note)
    full = (503, {"Retry-After": "3"}, {"detail": "full"})
    assert Scripted(full, OK).score(timeout=60.0) == [0.5]
    assert slept == [3.05]
    with pytest.raises(UnavailableError, match="no answer in 1 attempts"):
        Scripted(full, OK).score(timeout=2.0)  # a retry would be too late
    for unclear in ("soon", "-1", "Wed, 21 Oct 2099 07:28:00 GMT", "1e9"):
        assert Scripted((503, {"Retry-After": unclear}, {}), OK).score() == [0.5]
    assert slept[1:] == [0.05] * 4


def test_a_lost_connection_is_tried_again_with_the_same_events(pauses: Any) -> None:
    server = Scripted(None, None, OK)
    assert server.score() == [0.5]
    assert server.seen[0].body == server.seen[1].body == server.seen[2].body
    with pytest.raises(UnavailableError, match=r"no answer in 2 attempts; .* connection was lost"):
        Scripted(None).score(attempts=2)


@pytest.mark.parametrize("status", [500, 502])
def test_a_server_that_has_died_behind_a_proxy(pauses: Any, status: int) -> None:
    died = (status, {}, b"The actor died unexpectedly")
    assert Scripted(died, died, OK).score() == [0.5]
    with pytest.raises(UnavailableError, match=f"answered {status}: The actor died"):
        Scripted(died).score(attempts=2)


def test_an_attempt_that_takes_too_long_is_given_up(pauses: Any) -> None:
    server = Scripted("hang", OK)
    assert server.score(attempt_timeout=0.2) == [0.5]
    assert float(server.seen[0].headers["x-request-timeout-ms"]) == 200
    with pytest.raises(DeadlineError, match="there was no answer in time"):
        Scripted("hang").score(timeout=0.2)
    assert Scripted((504, {}, {"detail": "late"}), OK).score() == [0.5]


@pytest.mark.slow
def test_a_pause_that_takes_too_long_does_not_end_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sleep_by(monkeypatch, lambda seconds: asyncio.sleep(seconds + 1.0))
    server = Scripted((503, {}, {"detail": "full"}), "hang")

    async def run() -> None:
        async with server.listening() as address, Client(address, timeout=1.0) as client:
            await asyncio.wait_for(client.score(7, [(1, 2)], [3]), 10)

    with pytest.raises(DeadlineError, match="no answer in 2 attempts; the last time, there was no"):
        asyncio.run(run())
    for seen in server.seen:
        assert float(seen.headers["x-request-timeout-ms"]) > 0


def test_a_server_that_is_not_there(pauses: Any, unused_port: int) -> None:
    with pytest.raises(UnavailableError, match=r"no answer in 3 attempts; .* not reached"):
        ask(
            f"http://127.0.0.1:{unused_port}",
            lambda client: client.score(1, [], [2]),
            attempts=3,
        )
    assert len(pauses) == 3


@pytest.fixture
def unused_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.parametrize(
    ("status", "content"),
    [(400, b"no json"), (401, {"detail": "x"}), (302, b""), (501, {"detail": "x"}), (200, b"{")],
)
def test_other_answers_are_not_asked_for_again(pauses: Any, status: int, content: Any) -> None:
    server = Scripted((status, {"Location": "http://127.0.0.1:1/"}, content))
    with pytest.raises(RequestError, match=f"the server answered {status}: ") as refused:
        server.score()
    assert refused.value.status == status
    assert len(server.seen) == 1
    assert pauses == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"address": "127.0.0.1:8000"}, "address: expected http://host:port, got '127"),
        ({"timeout": 0.0}, "timeout: expected positive seconds, got 0"),
        ({"timeout": float("nan")}, "timeout: expected positive seconds, got nan"),
        ({"attempt_timeout": -1.0}, "attempt_timeout: expected positive seconds, got -1"),
        ({"backoff": float("inf")}, "backoff: expected positive seconds, got inf"),
        ({"attempts": 0}, "attempts: expected a positive count, got 0"),
        ({"connections": 0}, "connections: expected a positive count, got 0"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Client(**{"address": "http://127.0.0.1:1", **options})
