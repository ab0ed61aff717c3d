"""Tests of the limits of the example's HTTP connections, over raw sockets: the time in which a
request must arrive, and the number of open connections.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn")


from recommender import connections, rate_limited_log  # noqa: E402
from recommender.connections import LimitedHTTP  # noqa: E402

ARRIVAL_TIMEOUT = 0.4
LARGE = 2**24  # bytes, more than the buffers of both sockets hold
PATIENCE = 10.0  # seconds within which the server must close a connection
WHOLE = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi"
HEAD = WHOLE[:-2]
CLOSE = b"\r\nConnection: close\r\n\r\n"


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answers /echo with the body, /slow after a delay, /large with a large body, and other paths
    with 404 before reading a body.
    """
    status, body = 404, b"absent"
    if scope["path"] != "/absent":
        status, body = 200, b""
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more = message["more_body"]
        if scope["path"] == "/slow":
            await asyncio.sleep(2 * ARRIVAL_TIMEOUT)
        if scope["path"] == "/large":
            body = b"x" * LARGE
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def running(max_connections: int = 100) -> Iterator[int]:
    """Runs a server of the application; yields its port."""
    with running_server(max_connections) as (_, port):
        yield port


@contextmanager
def running_server(
    max_connections: int = 100, arrival_timeout: float = ARRIVAL_TIMEOUT
) -> Iterator[tuple[uvicorn.Server, int]]:
    """Runs a server of the application; yields it, and its port."""
    protocol = functools.partial(
        LimitedHTTP, arrival_timeout=arrival_timeout, max_connections=max_connections
    )
    config = uvicorn.Config(application, http=protocol, ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield server, listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """Captures the log, after resetting the limit on repeated lines."""
    monkeypatch.setattr(
        connections, "LOG", rate_limited_log.RateLimitedLog(logging.getLogger("here"))
    )
    return caplog


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with running() as port:
        yield port


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def rest(connection: socket.socket) -> bytes:
    """Reads until the server closes the connection."""
    return b"".join(iter(lambda: connection.recv(4096), b""))


def answer(connection: socket.socket) -> bytes:
    """Reads one answer and leaves the connection open."""
    received = b""
    while not received.endswith((b"\r\n\r\nhi", b"\r\n\r\nabsent")):
        part = connection.recv(4096)
        assert part, received
        received += part
    return received


def trickle(connection: socket.socket, data: bytes) -> bytes:
    """Sends data byte by byte, and then its last byte again and again, until the server closes the
    connection; returns what the server sent."""
    received = b""
    connection.settimeout(ARRIVAL_TIMEOUT / 8)
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        try:
            connection.sendall(data[:1])
            data = data[1:] or data
            part = connection.recv(4096)
        except TimeoutError:
            continue
        except ConnectionError:
            return received
        if not part:
            return received
        received += part
    raise AssertionError(f"still open after {PATIENCE} s; received {received!r}")


@pytest.mark.slow
def test_a_request_in_parts_is_answered(port: int) -> None:
    with connect(port) as connection:
        for part in (HEAD[:10], HEAD[10:], b"h", b"i"):
            connection.sendall(part)
            time.sleep(ARRIVAL_TIMEOUT / 20)
        assert answer(connection).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.slow
def test_an_answer_may_take_longer_than_a_request(port: int) -> None:
    with connect(port) as connection:
        connection.sendall(WHOLE.replace(b"/echo", b"/slow"))
        assert answer(connection).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.slow
def test_whole_requests_may_come_far_apart(port: int) -> None:
    with connect(port) as connection:
        for _ in range(2):
            connection.sendall(WHOLE)
            assert answer(connection).startswith(b"HTTP/1.1 200 OK")
            time.sleep(1.5 * ARRIVAL_TIMEOUT)


@pytest.mark.faults
@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="nothing", marks=pytest.mark.slow),
        pytest.param(HEAD[:-2], id="half a head"),
    ],
)
def test_without_a_whole_head_the_connection_is_closed(port: int, sent: bytes) -> None:
    with connect(port) as connection:
        started = time.monotonic()
        connection.sendall(sent)
        assert rest(connection) == b""
        assert time.monotonic() - started > 0.9 * ARRIVAL_TIMEOUT


@pytest.mark.faults
def test_half_a_body_is_answered_408(port: int, log: Any) -> None:
    with connect(port) as connection:
        connection.sendall(HEAD + b"h")
        received = rest(connection)
    assert received.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert b"\r\nConnection: close\r\n" in received
    assert "Closed a connection whose request has not arrived whole within 0.4 s" in log.text


@pytest.mark.faults
@pytest.mark.parametrize(
    ("before", "trickled"),
    [
        pytest.param(b"", HEAD[:-4] + b"\r\nX: " + b"x" * 5, id="head"),
        pytest.param(HEAD.replace(b": 2", b": 5000"), b"h", id="body"),
        pytest.param(
            WHOLE,
            HEAD[:-4] + b"\r\nX: " + b"x" * 5,
            id="head of a second request",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            HEAD.replace(b": 2", b": 5000").replace(b"/echo", b"/absent"),
            b"h",
            id="body that was answered already",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_trickle_does_not_keep_a_connection(port: int, before: bytes, trickled: bytes) -> None:
    with connect(port) as connection:
        connection.sendall(before)
        if b"/absent" in before or before == WHOLE:
            answer(connection)
        trickle(connection, trickled)


@pytest.mark.faults
def test_half_a_body_of_a_second_request_does_not_keep_a_connection(port: int) -> None:
    """The half body arrives together with the first request, and nothing follows."""
    with connect(port) as connection:
        connection.sendall(WHOLE + HEAD + b"h")
        assert answer(connection).startswith(b"HTTP/1.1 200 OK")
        assert rest(connection).startswith(b"HTTP/1.1 408 Request Timeout\r\n")


def open_connections(running: uvicorn.Server) -> int:
    return len(running.server_state.connections)


def wait_until_open(server: uvicorn.Server, count: int) -> None:
    limit = time.monotonic() + PATIENCE
    while open_connections(server) < count:
        assert time.monotonic() < limit
        time.sleep(0.01)


def wait_until_closed(server: uvicorn.Server) -> float:
    """Returns the seconds until the server has no open connection."""
    started = time.monotonic()
    while open_connections(server):
        assert time.monotonic() - started < PATIENCE
        time.sleep(0.01)
    return time.monotonic() - started


@pytest.mark.faults
@pytest.mark.parametrize("requests", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_who_reads_no_answer_is_let_go(requests: int, log: Any) -> None:
    """The client, or its machine, may have failed: it neither reads nor closes the connection."""
    with running_server() as (server, port), connect(port) as connection:
        connection.sendall(WHOLE.replace(b"/echo", b"/large") * requests)
        wait_until_open(server, 1)
        assert wait_until_closed(server) > 0.5 * ARRIVAL_TIMEOUT
        assert not server.server_state.tasks
        with connect(port) as other:
            other.sendall(WHOLE)
            assert answer(other).startswith(b"HTTP/1.1 200 OK")
    told = "Aborted a connection whose client has taken no answer for 0.4 s"
    assert log.messages == [f"{told} (1 since the last such line)"]


@pytest.mark.faults
def test_who_reads_slowly_gets_the_whole_answer_if_in_time() -> None:
    with running_server(arrival_timeout=10.0) as (_, port), connect(port) as connection:
        connection.sendall(WHOLE.replace(b"/echo", b"/large").replace(b"\r\n\r\n", CLOSE))
        time.sleep(ARRIVAL_TIMEOUT)
        received = rest(connection)
        assert received.startswith(b"HTTP/1.1 200 OK")
        assert received.endswith(b"x" * LARGE)


@pytest.mark.faults
def test_an_idle_connection_that_takes_nothing_is_aborted() -> None:
    """Unsent data do not keep the connection open."""
    with running_server() as (server, port), connect(port) as connection:
        connection.sendall(WHOLE.replace(b"/echo", b"/large").replace(b"\r\n\r\n", CLOSE))
        wait_until_open(server, 1)
        wait_until_closed(server)


@pytest.mark.faults
@pytest.mark.slow
def test_half_open_connections_make_room(log: Any) -> None:
    """Clients that vanished without closing their connections do not hold them for long."""
    with ExitStack() as stack:
        server, port = stack.enter_context(running_server(8, arrival_timeout=2.0))
        for _ in range(4):
            stack.enter_context(connect(port))  # sends nothing
            half = stack.enter_context(connect(port))
            half.sendall(HEAD[:10])
        wait_until_open(server, 8)
        assert wait_until_closed(server) > 0.5 * ARRIVAL_TIMEOUT
        assert first_accepted(port).startswith(b"HTTP/1.1 200 OK")
    told = "Closed a connection whose request has not arrived whole within 2 s"
    assert log.messages[0] == f"{told} (1 since the last such line)"  # and not one for each
    assert sum(message.startswith(told) for message in log.messages) == 1


@pytest.mark.faults
def test_no_more_connections_than_there_may_be(log: Any) -> None:
    with running(max_connections=2) as port, connect(port) as first, connect(port) as second:
        for connection in (first, second):
            connection.sendall(WHOLE)
            assert answer(connection).startswith(b"HTTP/1.1 200 OK")
        with connect(port) as third:
            received = rest(third)
        assert received.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"\r\nRetry-After: 1\r\n" in received
        first.sendall(WHOLE)
        assert answer(first).startswith(b"HTTP/1.1 200 OK")
        second.close()
        assert first_accepted(port).startswith(b"HTTP/1.1 200 OK")
    assert log.messages[0] == "Refused a connection: 2 are open (1 since the last such line)"


def first_accepted(port: int) -> bytes:
    """Connects until an answer is not 503; returns that answer."""
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        with connect(port) as connection:
            try:
                connection.sendall(WHOLE)
                received = connection.recv(4096)
            except ConnectionError:
                continue
        if not received.startswith(b"HTTP/1.1 503"):
            return received
    raise AssertionError("every connection was refused")


@pytest.mark.parametrize(
    "request_line", [b"GET /\xff HTTP/1.1", b"G\xc3\xa9T / HTTP/1.1", b"GET / HTTP/9"]
)
def test_a_wrong_request_line_is_answered_400(
    port: int, request_line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(port) as connection:
        connection.sendall(request_line + b"\r\nHost: x\r\n\r\n")
        assert rest(connection).startswith(b"HTTP/1.1 400 ")
    assert not [record for record in caplog.records if record.levelno > logging.WARNING]


def test_lines_that_clients_cause_are_few(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(rate_limited_log.time, "monotonic", lambda: now[0])
    log = rate_limited_log.RateLimitedLog(logging.getLogger("here"), seconds=10.0)
    for at, what in ((0, "One of %d"), (1, "One of %d"), (2, "Another of %d"), (9, "One of %d")):
        now[0] = 100.0 + at
        log.warn(what, at)
    now[0] = 110.0
    log.warn("One of %d", 10)
    assert caplog.messages == [
        "One of 0 (1 since the last such line)",
        "Another of 2 (1 since the last such line)",
        "One of 10 (3 since the last such line)",
    ]
