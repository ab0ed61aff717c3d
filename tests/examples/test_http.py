"""Tests of the example's HTTP application: deadlines and fairness of requests, health and metrics,
and hostile requests.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
pytest.importorskip("fastapi")
import serve
from recommender import http as http_app
from recommender import serve_options
from recommender.http_schemas import ranking_schemas, retrieval_schemas
from recommender.rate_limited_log import RateLimitedLog
from recommender.server import Server

from hstu_attn.paged import PAGE_SIZES
from hstu_attn.serving import StoreError
from tests.helpers.http_app import EVENT, FIRST_ID, Running, body, running
from tests.helpers.http_client import assert_retry_after, process
from tests.helpers.paths import EXAMPLES

OLD, NEW, ADMIN = "the-old-token-0123", "the-new-token-4567", "the-admin-token-89"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as server:
        yield server


def with_token(token: str, scheme: str = "Bearer") -> dict[str, str]:
    return {"Authorization": f"{scheme} {token}"}


# ---------------------------------------------------------------------------------------------
# Deadlines, turns and overload
# ---------------------------------------------------------------------------------------------


def test_what_is_too_late_is_dropped_before_it_is_computed() -> None:
    with running() as server, ThreadPoolExecutor(2) as pool:
        server.hold()
        first = pool.submit(server.client.send, "POST", "/score", body(1))
        assert server.reached.wait(10)
        started = time.monotonic()
        status, _, answer = server.client.send(
            "POST", "/score", body(2), {"X-Request-Timeout-Ms": "100"}
        )
        assert 0.1 <= time.monotonic() - started < 4  # --timeout is 5 s
        assert (status, answer["detail"]) == (
            504,
            "No answer within 0.1 s; the request had no effect",
        )
        server.release()
        assert first.result()[0] == 200
        server.wait_for(completed=1, expired=1)
        metrics = server.client.metrics()
        assert metrics["hstu_engine_expired_total"] == 1
        assert metrics["hstu_engine_cancelled_total"] == 0
        assert metrics["hstu_engine_new_tokens_total"] == 1  # from the first request
        assert metrics["hstu_http_responses_total{/score,504}"] == 1
        assert server.engine.stats().users == 1


def test_a_deadline_is_at_most_the_servers(server: Running) -> None:
    with running("--timeout", "0.1") as strict:
        strict.hold()
        for asked in ("60000", "1e300", "inf"):
            status, _, answer = strict.client.send(
                "POST", "/score", body(3), {"X-Request-Timeout-Ms": asked}
            )
            assert (status, answer["detail"][:21]) == (504, "No answer within 0.1 s"[:21])
    for wrong in ("0", "-1", "nan", "", "soon", "1,2", "0x10"):
        status, _, answer = server.client.send(
            "POST", "/score", body(3), {"X-Request-Timeout-Ms": wrong}
        )
        assert status == 422
        assert answer["detail"][0]["loc"] == ["header", "X-Request-Timeout-Ms"]


def test_time_in_a_proxy_counts(server: Running) -> None:
    """The deadline counts from when a proxy got the request, if its clock is not ahead."""
    before = server.engine.stats()
    for late, status in ((-60.0, 200), (0.0, 200), (1.0, 504), (1e9, 504)):
        start = f"t={time.time() - late:.3f}"
        found = server.client.send(
            "POST", "/score", body(5), {"X-Request-Timeout-Ms": "900", "X-Request-Start": start}
        )
        assert found[0] == status, late
    assert server.engine.stats().expired == before.expired + 2
    for wrong in ("", "1764184221.125", "t=", "t=-1", "t=1e9", "t=nan", "t=1764184221,5", "now"):
        status, _, answer = server.client.send(
            "POST", "/score", body(5), {"X-Request-Start": wrong}
        )
        assert status == 422, wrong
        assert answer["detail"][0]["loc"] == ["header", "X-Request-Start"]


def test_time_on_the_way_counts(server: Running) -> None:
    """The deadline counts from the head of the request, not from the end of its body."""
    text = json.dumps(body(4)).encode()
    head = (
        f"POST /score HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"X-Request-Timeout-Ms: 150\r\nContent-Length: {len(text)}\r\n\r\n"
    )
    before = server.engine.stats()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head.encode() + text[:5])
        time.sleep(0.2)
        connection.sendall(text[5:])
        assert connection.recv(100).startswith(b"HTTP/1.1 504 ")
    after = server.engine.stats()
    assert after.expired == before.expired + 1
    assert after.batches == before.batches


def test_a_greedy_client_gives_way_to_another(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"{OLD} {NEW}")
    with (
        running("--token-file", str(tmp_path / "tokens"), max_queue=4, max_batch_size=2) as server,
        ThreadPoolExecutor(12) as pool,
    ):

        def send(user: int, token: str) -> Any:
            return pool.submit(server.client.send, "POST", "/score", body(user), with_token(token))

        held_since = time.monotonic()
        server.hold()
        first = send(0, OLD)
        assert server.reached.wait(10)
        greedy = [send(user, OLD) for user in range(1, 5)]
        server.wait_for(queued=4)
        status, headers, answer = send(5, OLD).result()
        assert status == 503
        assert_retry_after(headers, held_since)
        assert "max_queue" in answer["detail"]
        others = [send(6, NEW), send(7, NEW)]
        server.wait_for(displaced=2)
        status, headers, answer = send(8, NEW).result()  # each client has its half of the queue
        assert status == 503
        server.release()
        assert [first.result()[0], *(one.result()[0] for one in others)] == [200] * 3
        displaced = [one.result() for one in greedy if one.result()[0] == 503]
        assert len(displaced) == 2
        for _, headers, answer in displaced:
            assert headers["Retry-After"] == "1"
            assert "gave way" in answer["detail"]
        metrics = server.client.send("GET", "/metrics", None, with_token(NEW))[2]
        assert "hstu_engine_displaced_total 2.0" in metrics
        assert "hstu_engine_rejected_total 2.0" in metrics


def test_overload_is_shed_by_the_time_to_wait() -> None:
    with (
        running(max_batch_size=1, max_queue_seconds=0.1) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        server.hold()
        held = [pool.submit(server.client.send, "POST", "/score", body(1))]
        assert server.reached.wait(10)
        time.sleep(0.15)  # the duration of this batch
        held.append(pool.submit(server.client.send, "POST", "/score", body(2)))
        server.wait_for(queued=1)
        status, headers, answer = server.client.send("POST", "/score", body(3))
        assert (status, int(headers["Retry-After"])) == (503, 1)
        assert re.search(r"a wait of at most 0\.1 s .*, got 0\.\d+ s", answer["detail"])
        status, headers, answer = server.client.send("POST", "/score", b"{")  # the body is not read
        assert (status, int(headers["Retry-After"])) == (503, 1)
        assert server.client.send("GET", "/health")[0] == 200
        server.release()
        assert [one.result()[0] for one in held] == [200, 200]
        metrics = server.client.metrics()
        assert (metrics["hstu_engine_shed_total"], metrics["hstu_engine_rejected_total"]) == (2, 0)
        assert metrics["hstu_http_responses_total{/score,503}"] == 2


def test_what_the_store_cannot_keep_is_said(server: Running, monkeypatch: Any) -> None:
    store = server.engine.store

    def broken(*_: Any) -> Any:
        raise StoreError("store: a secret place")

    monkeypatch.setattr(store, "commit", broken)
    status, headers, answer = server.client.send("POST", "/score", body(11))
    assert (status, headers["Retry-After"]) == (503, "1")
    assert "the same request may be made again" in answer["detail"]
    monkeypatch.undo()
    assert server.client.send("POST", "/score", body(11))[0] == 200


def test_a_store_that_hangs_does_not_hold_a_request_for_ever() -> None:
    """A commit in progress cannot be undone, so it is unknown whether its events are stored."""
    with running("--timeout", "0.3") as server:
        store, commit = server.engine.store, server.engine.store.commit
        go_on = threading.Event()

        def slow(changes: Any) -> Any:
            assert go_on.wait(20)
            return commit(changes)

        store.commit = slow
        started = time.monotonic()
        status, headers, answer = server.client.send("POST", "/score", body(1))
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "the same request may be made again" in answer["detail"]
        assert 0.3 <= time.monotonic() - started < 5
        go_on.set()
        server.wait_for(completed=1)
        assert server.client.send("POST", "/score", body(1))[0] == 200
        assert len(store.read([1], [0])[0].events) == 1  # both requests have the same event


def test_a_probe_of_a_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one thread waits for the store, however many probes arrive."""
    monkeypatch.setattr(http_app, "STORE_SECONDS", 0.05)
    with running() as server:
        go_on, asked = threading.Event(), []
        note = server.engine.store.note

        def slow(name: str) -> Any:
            asked.append(name)
            assert go_on.wait(20)
            return note(name)

        server.engine.store.note = slow
        for _ in range(4):
            assert server.client.send("GET", "/ready")[2]["status"] == "store"
        assert len(asked) == 1
        go_on.set()
        while server.client.send("GET", "/ready")[0] == 503:
            time.sleep(0.01)
        assert server.client.send("GET", "/live")[0] == 200


def test_events_in_another_order_are_refused(server: Running) -> None:
    assert server.client.send("POST", "/score", body(12))[0] == 200
    for times in ([4], [7, 6]):
        events = [{"item": FIRST_ID, "time": time} for time in times]
        status, _, answer = server.client.send("POST", "/score", body(12, events=events))
        assert status == 422
        assert [part["type"] for part in answer["detail"]] == ["event_order"]
        assert answer["detail"][0]["loc"] == ["body", "events"]


@pytest.mark.faults
def test_a_clock_that_steps_back_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Events with correct times are refused until the clock is right; other requests are answered.

    Meanwhile, a user who has only events in the future counts as new.
    """
    monkeypatch.setattr(http_app, "RARE", RateLimitedLog(http_app.LOG))
    day, now = 86400, [10 * 86400]
    events = [{"item": FIRST_ID, "time": now[0]}]
    with running(time_range=lambda: (0, now[0] + day)) as server:
        for user, sent in ((1, events), (3, [{"item": FIRST_ID, "time": 5}]), (3, events)):
            assert server.client.send("POST", "/score", body(user, events=sent))[0] == 200
        now[0] -= 2 * day
        for _ in range(2):
            status, _, answer = server.client.send("POST", "/score", body(2, events=events))
            assert status == 422
            assert answer["detail"] == [
                {
                    "type": "event_time",
                    "loc": ["body", "events", 0, "time"],
                    "msg": f"Expected a time from 0 to {9 * day}, in seconds; got {10 * day}",
                }
            ]
        for user, expected in ((3, 200), (1, 422)):
            assert server.client.send("POST", "/score", body(user, events=[]))[0] == expected
        refused, left_out = caplog.messages
        assert left_out.startswith(f"1 stored events of user 3, the last at {10 * day}, are left")
        assert refused.startswith(
            f"Refused events for their times, such as {10 * day}, which is not from 0 to {9 * day};"
            " this machine's clock says 20"
        )
        now[0] += 2 * day
        assert server.client.send("POST", "/score", body(2, events=events))[0] == 200
        assert server.client.send("POST", "/score", body(1, events=[]))[0] == 200


# ---------------------------------------------------------------------------------------------
# Health, metrics and types
# ---------------------------------------------------------------------------------------------


def test_liveness_is_not_readiness(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert server.client.send("GET", "/live")[2]["status"] == "ok"
    with monkeypatch.context() as patch:

        def broken(*_: Any) -> Any:
            raise StoreError("unreachable")

        patch.setattr(server.engine.store, "note", broken)
        for _ in range(2):
            status, _, answer = server.client.send("GET", "/ready")
            assert (status, answer["status"]) == (503, "store")
        assert server.client.metrics()["hstu_ready"] == 0
        assert server.client.send("GET", "/live")[0] == 200
    with monkeypatch.context() as patch:
        patch.setattr(server.engine._worker, "is_alive", lambda: False)
        status, _, answer = server.client.send("GET", "/live")
        assert (status, answer["status"]) == (503, "dead")
    status, _, answer = server.client.send("GET", "/ready")
    assert (status, answer["status"]) == (200, "ok")
    assert server.client.metrics()["hstu_ready"] == 1
    assert [record.message for record in caplog.records] == [
        "Not ready: the store cannot be read: unreachable",
        "The store can be read again",
    ]


def test_the_metrics_tell_of_the_store_without_a_question_for_readiness(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store fails, works again, hangs, and answers again."""
    monkeypatch.setattr(http_app, "STORE_SECONDS", 0.1)
    answers = threading.Event()

    def broken(_: str) -> bytes | None:
        raise StoreError("unreachable")

    def hangs(_: str) -> bytes | None:
        assert answers.wait(20)
        return None

    for note in (broken, hangs):
        assert server.client.metrics()["hstu_ready"] == 1
        with monkeypatch.context() as patch:
            patch.setattr(server.engine.store, "note", note)
            assert [server.client.metrics()["hstu_ready"] for _ in range(2)] == [0, 0]
    answers.set()
    limit = time.monotonic() + 10
    while server.client.metrics()["hstu_ready"] == 0:
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_batch_that_does_not_end_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_app, "STUCK_SECONDS", 0.2)
    with running() as server, ThreadPoolExecutor(1) as pool:
        server.hold()
        first = pool.submit(server.client.send, "POST", "/score", body(1))
        assert server.reached.wait(10)
        time.sleep(0.25)
        status, _, answer = server.client.send("GET", "/live")
        assert (status, answer["status"]) == (503, "stuck")
        assert server.client.metrics()["hstu_engine_running_seconds"] > 0.2
        server.release()
        assert first.result()[0] == 200
        server.wait_for(running=0.0)
        assert server.client.send("GET", "/live")[0] == 200


def test_the_dashboard_shows_what_is_exported(server: Running) -> None:
    board = json.loads((EXAMPLES / "grafana.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    shown = set(re.findall(r"\bhstu_\w+", " ".join(expressions)))
    server.client.post("/score", **body(1))
    text = server.client.send("GET", "/metrics")[2]
    families = list(text_string_to_metric_families(text))
    exported = {sample.name for family in families for sample in family.samples}
    assert shown <= exported
    # Each kind of metric is on the dashboard.
    for family in families:
        if not family.name.endswith("_created"):
            assert {sample.name for sample in family.samples} & shown, family.name
    assert len(board["panels"]) == len({panel["id"] for panel in board["panels"]}) == 12
    [job] = [x for x in board["templating"]["list"] if x["name"] == "job"]
    assert "hstu_ready" in job["query"]["query"]


def test_times_are_counted_by_path(server: Running) -> None:
    before = server.client.metrics()
    server.client.post("/score", **body(1))
    server.client.send("GET", "/nothing")
    after = server.client.metrics()
    for path, count in (("/score", 1), ("other", 1), ("/metrics", 1)):
        for name in (
            f"hstu_http_seconds_count{{{path}}}",
            f"hstu_http_seconds_bucket{{{path},+Inf}}",
        ):
            names = [x for x in after if x in (name, name.replace(f"{path},+Inf", f"+Inf,{path}"))]
            assert [after[x] - before.get(x, 0) for x in names] == [count]
    assert after["hstu_http_seconds_sum{/score}"] > before.get("hstu_http_seconds_sum{/score}", 0)
    queue = after["hstu_engine_queue_seconds_sum"] - before.get("hstu_engine_queue_seconds_sum", 0)
    step = after["hstu_engine_step_seconds_sum"] - before.get("hstu_engine_step_seconds_sum", 0)
    latency = after["hstu_engine_latency_seconds_sum"] - before["hstu_engine_latency_seconds_sum"]
    assert 0 < queue < queue + step <= latency


def test_answers_have_the_documented_types(server: Running) -> None:
    types = server.client.send("GET", "/openapi.json")[2]
    schemas = retrieval_schemas(text_ids=False)
    for path, more, answer_type in (
        ("/score", {"candidates": [FIRST_ID]}, "ScoreAnswer"),
        ("/recommend", {"k": 3}, "RecommendAnswer"),
    ):
        operation = types["paths"][path]["post"]
        reference = operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
        assert reference == f"#/components/schemas/{answer_type}"
        assert types["components"]["schemas"][answer_type]["additionalProperties"] is False
        assert set(operation["responses"]) == {"200", "401", "413", "422", "503", "504"}
        headers = [(header["in"], header["name"]) for header in operation["parameters"]]
        assert headers == [("header", "X-Request-Timeout-Ms"), ("header", "X-Request-Start")]
        answer = server.client.post(path, user=1, events=[EVENT], **more)
        assert schemas[answer_type].model_validate(answer).model_dump() == answer
        with pytest.raises(ValueError, match="user"):
            schemas[answer_type].model_validate({**answer, "user": "1"})
    for path in ("/health", "/live", "/ready"):
        answer = server.client.send("GET", path)[2]
        assert set(answer) == set(types["components"]["schemas"]["State"]["required"])
    assert "security" not in types["paths"]["/score"]["post"]


def test_ranking_types_reject_what_is_not_a_task() -> None:
    schemas = ranking_schemas(True, ["click", "like"], ["like"])
    answer = {"user": "u", "probabilities": {"like": [0.5]}}
    assert schemas["RankAnswer"].model_validate(answer).model_dump() == answer
    with pytest.raises(ValueError, match="click"):
        schemas["RankAnswer"].model_validate({"user": "u", "probabilities": {"click": [0.5]}})
    with pytest.raises(ValueError, match="actions"):
        schemas["RankBody"].model_validate(
            {"user": "u", "candidates": [], "events": [{"item": "i", "time": 1, "actions": [0]}]}
        )


# ---------------------------------------------------------------------------------------------
# Hostile requests
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        *(b"NaN", b"-Infinity", b"1e999", b"1" * 4000, b"-0.0", b"1.0", b"true", b"null", b'"1"'),
        *(b"[" * 5000 + b"]" * 5000, b'{"a":' * 2000 + b"1" + b"}" * 2000, b"9223372036854775808"),
    ],
    ids=lambda value: value[:20].decode(),
)
@pytest.mark.parametrize(
    "place",
    [
        b'{"user": %s, "candidates": []}',
        b'{"user": 1, "candidates": [%s]}',
        b'{"user": 1, "candidates": [], "events": [{"item": %s, "time": 1}]}',
        b'{"user": 1, "candidates": [], "events": [{"item": 100, "time": %s}]}',
        b'{"user": 1, "candidates": [], "request_id": %s, "x": 1}',
    ],
    ids=["user", "candidate", "item", "time", "request_id"],
)
def test_wrong_values_anywhere(server: Running, place: bytes, value: bytes) -> None:
    before = server.engine.stats().requests
    status, _, answer = server.client.send("POST", "/score", place % value)
    assert status in (400, 422)
    assert len(json.dumps(answer)) < 5000
    assert server.engine.stats().requests == before


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 1e3\r\n\r\n",
        b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST /score HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZ\r\n",
        b"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 100 + b"\r\n\r\n",
        b"POST /score HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 10**6 + b"\r\n\r\n",
        b"POST /score HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 50_000 + b"\r\n",
        b"POST /score HTTP/1.1\r\n\r\n",
        b"POST /sc\x00re HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=lambda text: text[:80].decode(errors="replace"),
)
def test_heads_that_are_no_http(server: Running, request_bytes: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        try:
            connection.sendall(request_bytes)
            received = connection.recv(200)
        except ConnectionError:  # closed before all was sent
            received = b"HTTP/1.1 400 "
        assert received.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 413 "))
    assert server.client.send("GET", "/health")[0] == 200


def test_the_limit_of_bodies_is_an_option() -> None:
    with running("--max-body-bytes", "300") as server:
        text = json.dumps(body(1)).encode()
        assert server.client.send("POST", "/score", text.ljust(300))[0] == 200
        status, _, answer = server.client.send("POST", "/score", text.ljust(301))
        assert (status, answer["detail"]) == (413, "The body must have at most 300 bytes")


def test_a_request_touches_its_user_alone(server: Running, monkeypatch: Any) -> None:
    """Only the field `user` of a request decides whose events are read and stored."""
    store = server.engine.store
    seen: list[Any] = []
    read, commit = store.read, store.commit
    monkeypatch.setattr(store, "read", lambda users, v: seen.extend(users) or read(users, v))
    monkeypatch.setattr(
        store, "commit", lambda changes: seen.extend(c.user for c in changes) or commit(changes)
    )
    server.client.post("/score", **body(21, request_id="22", time=23))
    server.client.post("/recommend", user=21, k=24)
    assert set(seen) == {21}


# ---------------------------------------------------------------------------------------------
# The end
# ---------------------------------------------------------------------------------------------


def test_sigterm_drains_first() -> None:
    """Checks the state that the signal handlers set for uvicorn's loop."""
    with running("--drain-seconds", "60") as server:
        uvicorn_server: Server = server.server
        uvicorn_server.handle_exit(signal.SIGTERM, None)
        assert not uvicorn_server.should_exit
        assert server.client.send("GET", "/ready")[2]["status"] == "draining"
        assert server.client.send("POST", "/score", body(1))[0] == 200
        uvicorn_server.handle_exit(signal.SIGTERM, None)  # a second SIGTERM ends it at once
        assert uvicorn_server.should_exit
    with running("--drain-seconds", "60") as server:
        server.server.handle_exit(signal.SIGINT, None)
        assert server.server.should_exit
        assert server.server.app.state.draining
    with running() as server:
        server.server.handle_exit(signal.SIGTERM, None)
        assert server.server.should_exit


@pytest.mark.slow
def test_a_process_that_drains(tmp_path: Path) -> None:
    """After SIGTERM a process is not ready, answers requests for a while, and exits with 0."""
    from tests.helpers.documented import save_some_model

    save_some_model(tmp_path / "run/best.pt", [*range(1, 50)])
    arguments = ("--model", str(tmp_path / "run/best.pt"), "--drain-seconds", "1.5")
    with process(*arguments) as (ended, client):
        asked = {"user": 1, "events": [{"item": 1, "time": 5}], "candidates": [2]}
        assert client.send("GET", "/ready")[0] == 200
        assert client.send("POST", "/score", asked)[0] == 200
        ended.send_signal(signal.SIGTERM)
        limit = time.monotonic() + 10
        while client.send("GET", "/ready")[0] == 200:
            assert time.monotonic() < limit
        assert client.send("GET", "/live")[0] == 200
        assert client.send("POST", "/score", asked)[0] == 200
        assert ended.poll() is None
        assert ended.wait(20) == 0
        assert ended.stderr is not None
        assert ended.stderr.read() == ""


def test_scores_are_finite_tensors(server: Running) -> None:
    """The in-process engine and the server give the same scores."""
    answer = server.client.post("/score", **body(31))
    scores = server.engine.score(32, [(1, 5)], [0, 2])
    assert isinstance(scores, Tensor)
    assert answer["scores"] == pytest.approx(scores.tolist(), rel=1e-6)


def test_answers_do_not_wait_for_the_client() -> None:
    """The socket's protocol must be TCP, or asyncio does not disable Nagle's algorithm."""
    with serve.listen_later("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_the_page_sizes_are_those_of_the_cache() -> None:
    assert serve_options.PAGE_SIZES == PAGE_SIZES
