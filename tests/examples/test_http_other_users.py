"""Tests that refused, failing and hostile requests do not affect other users."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
pytest.importorskip("fastapi")
from hstu_attn.serving import EventStore, MemoryStore, SQLiteStore, StoreError
from tests.helpers.http_app import FIRST_ID, Running, running
from tests.helpers.serving_models import LONGEST, POISON, SPOILT, assert_close

TOKEN, ADMIN, NOBODY = "the-clients-token-01", "the-admin-token-0123", "the-token-of-nobody"
OTHERS = [1, 2, 3, 5000]
HOSTILE = 50
NOW = 10**6
CANDIDATES = [*range(10, 20)]
Answer = tuple[list[list[int]], int, Tensor, Tensor, Tensor]


@pytest.fixture(params=["memory", "sqlite"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Running]:
    """A server with stored events of the hostile user and of other users."""
    (tmp_path / "tokens").write_text(f"{TOKEN}\n")
    (tmp_path / "admin").write_text(f"{ADMIN}\n")
    options = ["--token-file", str(tmp_path / "tokens"), "--admin-token-file"]
    options += [str(tmp_path / "admin"), "--max-body-bytes", "20000"]
    store: EventStore = MemoryStore(100, LONGEST)
    if request.param == "sqlite":
        store = SQLiteStore(tmp_path / "events.sqlite", LONGEST)
    with store, running(*options, store=store, time_range=lambda: (100, NOW + 300)) as server:
        for user in (*OTHERS, HOSTILE):
            server.engine.score(user, [(user % 40 + n, 1000 + n) for n in range(5)], [1])
        yield server


def state_of(server: Running, user: int) -> Answer:
    """Returns a user's events, their version, and the answer to a request of the user."""
    (stored,) = server.engine.store.read([user], [0])
    assert stored is not None
    best = server.engine.recommend(user, [], 10)
    scores = server.engine.score(user, [], CANDIDATES)
    return stored.events.tolist(), stored.version, scores, best.scores, best.items


def assert_same(server: Running, before: dict[int, Answer]) -> None:
    for user, (events, version, *answers) in before.items():
        events_now, version_now, *answers_now = state_of(server, user)
        assert (events_now, version_now) == (events, version)
        for found, expected in zip(answers_now, answers, strict=True):
            assert_close(found, expected)


def asked(user: Any = HOSTILE, item: int = 5, time: Any = NOW, **more: Any) -> dict[str, Any]:
    events = [{"item": FIRST_ID + item, "time": time}]
    candidates = [FIRST_ID + n for n in CANDIDATES]
    return {"user": user, "events": events, "candidates": candidates, **more}


def send(server: Running, body: Any, path: str = "/score", token: str = TOKEN, **more: str) -> int:
    headers = {"Authorization": f"Bearer {token}", **more}
    status: int = server.client.send("POST", path, body, headers)[0]
    return status


REFUSED: list[tuple[int, Any]] = [
    *((422, asked(user)) for user in ("1", 1.0, [1], {"id": 1}, None, True, 2**63, " 1", "\0")),
    (422, {**asked(), "user_id": 1}),
    (422, asked(events=[])),
    *((422, asked(time=time)) for time in (99, NOW + 301, 999, -1, 2**63, "1", 1e3)),
    *((422, asked(item=item)) for item in (-1, 10**6, -(2**70))),
    (422, asked(candidates=[1])),
    (422, asked(candidates=[FIRST_ID] * 1025)),
    (422, asked(request_id={"user": 1})),
    (422, b'{"user": 1, "user": 50, "events": [{"item": 105, "time": 1000000}]}'),
    (422, b'{"user": 1, "events": [{"item": 105, "time": 1000000}], "candidates": [], '),
    (413, json.dumps(asked(1)).encode().ljust(20001)),
]


def test_requests_that_are_refused(server: Running) -> None:
    """Requests that name another user in some additional way, or are otherwise invalid."""
    before = {user: state_of(server, user) for user in (*OTHERS, HOSTILE)}
    count = server.engine.stats().users
    for status, body in REFUSED:
        if isinstance(body, dict) and body["events"] == []:
            body = {**body, "user": HOSTILE + 1}  # a new user
        assert send(server, body) == status, body
    for other in OTHERS:
        for token in (NOBODY, "", ADMIN):
            assert send(server, asked(other), token=token) == 401
            assert send(server, {"user": other, "k": 3}, "/recommend", token) == 401
        for token in (NOBODY, TOKEN):
            assert send(server, {"user": other}, "/admin/forget", token) == 403
    for token in (NOBODY, TOKEN):
        for path, body in (("prune", {"latest": 0}), ("compact", {}), ("drain", {})):
            assert send(server, body, f"/admin/{path}", token) == 403
    for wrong in ("0", "-1", "nan", "1; user=1"):
        assert send(server, asked(), **{"X-Request-Timeout-Ms": wrong}) == 422
    assert server.engine.stats().users == count
    assert_same(server, before)


@pytest.mark.slow
def test_requests_that_fail(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests in one batch with other users' fail in the model, in the store or by a timeout."""
    users = (*OTHERS, HOSTILE)
    before = {user: state_of(server, user) for user in users}
    commit, store = server.engine.store.commit, server.engine.store

    def refused(changes: Any) -> list[int]:
        if any(change.user == HOSTILE for change in changes):
            raise StoreError("the disk is full")
        return commit(changes)

    def together(status: int, body: dict[str, Any], **headers: str) -> None:
        """Delays a batch until a request waits together with the other users' requests."""
        quiet = asked(events=[])
        with ThreadPoolExecutor(len(users) + 1) as pool:
            server.hold()
            first = pool.submit(send, server, {**quiet, "user": OTHERS[0]})
            assert server.reached.wait(10)
            bodies = [{**quiet, "user": other} for other in OTHERS[1:]]
            waiting = [pool.submit(send, server, one) for one in bodies]
            hostile = pool.submit(send, server, body, **headers)
            if headers:
                assert hostile.result(20) == status
            else:
                server.wait_for(queued=len(OTHERS))
            server.release()
            assert [one.result(20) for one in (first, *waiting)] == [200] * len(OTHERS)
            assert hostile.result(20) == status
        assert_same(server, before)

    together(500, asked(item=POISON))
    together(500, asked(candidates=[FIRST_ID + SPOILT]))
    together(504, asked(), **{"X-Request-Timeout-Ms": "1"})
    monkeypatch.setattr(store, "commit", refused)
    together(503, asked())
    assert server.engine.stats().failed >= 3


HEADS = [
    b"Content-Length: -1\r\n\r\n",
    b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"Transfer-Encoding: chunked\r\n\r\nZ\r\n",
    b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    b"Connection: close\r\nContent-Length: 100000\r\n\r\n",
    b"Content-Length: 0\r\n\r\n",  # the rest is a separate request, without a token
    b"X: " + b"y" * 10**6 + b"\r\n\r\n",
]


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head[:60].decode())
def test_requests_in_the_body_of_another(server: Running, head: bytes) -> None:
    """A body that contains a complete request for another user is not parsed as a request."""
    before = {user: state_of(server, user) for user in (*OTHERS, HOSTILE)}
    text = json.dumps(asked(OTHERS[0])).encode()
    start = f"POST /score HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
    hidden = b"POST /score HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    hidden += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(text) + text
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection,
        suppress(ConnectionError),  # closed before all was sent
    ):
        connection.sendall(start + head + hidden)
        while answer := connection.recv(10**5):
            assert b" 200 OK" not in answer
    assert_same(server, before)
