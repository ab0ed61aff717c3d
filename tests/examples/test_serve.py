"""Tests of the example's server over a socket, with the model of a short training run: each
path, and each reason to refuse a request.
"""

from __future__ import annotations

import copy
import gc
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hstu_attn.data import EventLog, JaggedBatch, open_event_log
from hstu_attn.data.synthetic import write_synthetic_movielens
from hstu_attn.data.synthetic_layouts import write_synthetic_amazon
from tests.helpers.paths import EXAMPLES

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")


import serve  # noqa: E402
import train_retrieval  # noqa: E402
from recommender import serve_options  # noqa: E402
from recommender.http import MAX_ERRORS  # noqa: E402
from recommender.http_schemas import MAX_CANDIDATES  # noqa: E402
from recommender.saved import SavedModel, load_model  # noqa: E402
from recommender.serve_options import MAX_BODY_BYTES  # noqa: E402
from recommender.server import add_events, make_engine  # noqa: E402

from hstu_attn.serving import MemoryStore  # noqa: E402
from tests.helpers.http_client import Client, assert_retry_after, process  # noqa: E402
from tests.helpers.slow_server import slow  # noqa: E402

LONGEST = 30
CPU = torch.device("cpu")
EVENT = {"item": 1, "time": 5}
TRAINING = [
    *("--dim", "16", "--layers", "2", "--max-seq-len", str(LONGEST), "--tokens-per-batch", "256"),
    *("--negatives", "32", "--steps", "8", "--eval-every", "8", "--device", "cpu"),
]


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic_movielens(tmp_path_factory.mktemp("data"), 50, 120, 25)


@pytest.fixture(scope="module")
def checkpoint(ratings: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    assert train_retrieval.main([*TRAINING, "--data", str(ratings), "--out", str(out)]) == 0
    return out / "best.pt"


@pytest.fixture(scope="module")
def saved(checkpoint: Path) -> SavedModel:
    return load_model(checkpoint, CPU)


@pytest.fixture(scope="module")
def log(ratings: Path) -> EventLog:
    return open_event_log(ratings)


@pytest.fixture(scope="module")
def client(checkpoint: Path, ratings: Path) -> Iterator[Client]:
    with process("--model", str(checkpoint), "--data", str(ratings)) as (_, client):
        yield client


def whole(saved: SavedModel, items: np.ndarray, times: np.ndarray, at: int) -> Tensor:
    """Returns the scores of all items after events on `items` (ids), computed without a cache."""
    indices = torch.from_numpy(np.searchsorted(saved.item_ids, items))
    known = torch.tensor(times.astype(np.int64))
    later = torch.cat([known[1:], torch.tensor([at])])
    offsets = torch.tensor([0, len(indices)])
    batch = JaggedBatch(torch.zeros(1), offsets, indices, known, indices, later)
    with torch.no_grad():
        return saved.model.scores(batch)[0]


def history(log: EventLog, user: int, longest: int = LONGEST) -> tuple[np.ndarray, np.ndarray]:
    """Returns the item ids and the times of a user's latest events."""
    number = int(np.flatnonzero(log.user_ids == user)[0])
    start, end = log.offsets[number : number + 2]
    latest = slice(max(start, end - longest), end)
    return log.item_ids[log.items[latest]], log.timestamps[latest]


# ---------------------------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_scores_of_a_user_of_the_data(client: Client, saved: SavedModel, log: EventLog) -> None:
    items, times = history(log, 3, LONGEST)
    candidates = [int(item) for item in saved.item_ids[[5, 2, 9, 2]]]
    for _ in range(2):  # computed, then cached
        at = int(times[-1]) + 3600
        answer = client.post("/score", user=3, candidates=candidates, time=at)
        expected = whole(saved, items, times, at)[[5, 2, 9, 2]]
        assert answer["user"] == 3
        assert answer["scores"] == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-5)


@pytest.mark.gpu
def test_scores_of_a_gpu(checkpoint: Path, ratings: Path, saved: SavedModel, log: EventLog) -> None:
    """The scores equal those of the fp32 model, except for the rounding of layers in bf16.

    On a CPU that changes no score of any user by more than 0.003; the scores deviate by 0.26.
    """
    items, times = history(log, 3, LONGEST)
    at = int(times[-1]) + 3600
    expected = whole(saved, items, times, at)
    arguments = ["--model", str(checkpoint), "--data", str(ratings), "--device", "cuda"]
    with process(*arguments) as (_, client):
        for _ in range(3):  # computed, then cached
            answer = client.post("/score", user=3, candidates=saved.item_ids.tolist(), time=at)
            found = torch.tensor(answer["scores"])
            torch.testing.assert_close(found, expected, rtol=0, atol=0.02)


@pytest.mark.slow
def test_events_are_remembered(client: Client, saved: SavedModel) -> None:
    items, times = saved.item_ids[[3, 1, 4, 1, 5]], np.array([10, 99, 10**4, 10**6, 10**6])
    for start, end in ((0, 1), (1, 3), (3, 5)):
        events = [
            {"item": int(item), "time": int(at)}
            for item, at in zip(items[start:end], times[start:end], strict=True)
        ]
        candidates = [int(item) for item in saved.item_ids]
        answer = client.post("/score", user=-9, events=events, candidates=candidates)
        expected = whole(saved, items[:end], times[:end], int(times[end - 1]))
        assert answer["scores"] == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("exclude_seen", [True, False])
def test_recommendations(
    client: Client, saved: SavedModel, log: EventLog, exclude_seen: bool
) -> None:
    items, times = history(log, 4)
    answer = client.post("/recommend", user=4, k=7, exclude_seen=exclude_seen)
    scores = whole(saved, items, times, int(times[-1]))
    if exclude_seen:
        scores[np.searchsorted(saved.item_ids, items)] = -torch.inf
    best = scores.topk(7)
    assert [row["item"] for row in answer["items"]] == saved.item_ids[best.indices].tolist()
    assert [row["title"] for row in answer["items"]] == [
        saved.titles[index] for index in best.indices
    ]
    assert [row["score"] for row in answer["items"]] == pytest.approx(
        best.values.tolist(), rel=1e-4, abs=1e-5
    )
    assert len(client.post("/recommend", user=4)["items"]) == 10


@pytest.mark.slow
def test_health_and_metrics(client: Client) -> None:
    before = client.metrics()
    for user in (1, 2, 1):
        client.post("/recommend", user=user, k=1)
    assert client.send("POST", "/score", {"user": 1})[0] == 422
    assert client.send("GET", "/nothing")[0] == 404
    assert client.send("GET", "/score")[0] == 405
    status, _, state = client.send("GET", "/health")
    assert (status, state["status"], state["queued"]) == (200, "ok", 0)
    assert state["users"] >= 50
    status, headers, text = client.send("HEAD", "/health")
    assert (status, text) == (200, None)
    assert headers["Content-Length"] == str(len(json.dumps(state, separators=(",", ":"))))
    after = client.metrics()
    change = {name: after[name] - before.get(name, 0) for name in after}
    assert change["hstu_engine_requests_total"] == change["hstu_engine_completed_total"] == 3
    assert change["hstu_engine_latency_seconds_count"] == 3
    assert change["hstu_engine_latency_seconds_bucket{+Inf}"] == 3
    assert change["hstu_engine_batch_size_sum"] == 3
    assert change["hstu_engine_hit_tokens_total"] > 0
    assert change["hstu_http_responses_total{/recommend,200}"] == 3
    assert change["hstu_http_responses_total{/score,422}"] == 1
    assert change["hstu_http_responses_total{other,404}"] == 1
    assert after["hstu_engine_users"] == state["users"]


@pytest.mark.slow
def test_many_at_once(client: Client, saved: SavedModel, log: EventLog) -> None:
    candidates = [int(item) for item in saved.item_ids]
    users = [int(user) for user in log.user_ids[10:40]] * 2
    with ThreadPoolExecutor(12) as pool:
        answers = list(
            pool.map(lambda user: client.post("/score", user=user, candidates=candidates), users)
        )
    for user, answer in zip(users, answers, strict=True):
        items, times = history(log, user)
        expected = whole(saved, items, times, int(times[-1]))
        assert answer["scores"] == pytest.approx(expected.tolist(), rel=1e-4, abs=1e-5)


@pytest.fixture(scope="module")
def amazon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Path, EventLog]]:
    """Serves a model of Amazon reviews, where ids are text; yields client, model and log."""
    ratings = write_synthetic_amazon(tmp_path_factory.mktemp("amazon"), 2023, 40, 100, 20)
    out = tmp_path_factory.mktemp("amazon-run")
    assert train_retrieval.main([*TRAINING, "--data", str(ratings), "--out", str(out)]) == 0
    with process("--model", str(out / "best.pt"), "--data", str(ratings)) as (_, client):
        yield client, out / "best.pt", open_event_log(ratings)


@pytest.mark.slow
def test_ids_of_the_data_that_are_text(amazon: tuple[Client, Path, EventLog]) -> None:
    client, path, log = amazon
    saved = load_model(path, CPU)
    assert saved.item_ids.tolist() == list(log.source_item_ids)
    assert client.send("GET", "/health")[2]["users"] == 40
    number = 7
    user = log.user_name(number)
    assert re.fullmatch("AE[A-Z0-9]{26}", user)
    start, end = log.offsets[number : number + 2]
    latest = slice(max(start, end - LONGEST), end)
    items, times = saved.item_ids[log.items[latest]], log.timestamps[latest]
    candidates = saved.item_ids[[5, 2, 9]].tolist()
    answer = client.post("/score", user=user, candidates=candidates)
    expected = whole(saved, items, times, int(times[-1]))
    assert answer["user"] == user
    assert answer["scores"] == pytest.approx(expected[[5, 2, 9]].tolist(), rel=1e-4, abs=1e-5)

    at = int(times[-1]) + 60
    event = {"item": candidates[0], "time": at}
    for name, before in ((user, 0), ("a new one", len(items))):
        known = np.append(items, candidates[0])[before:], np.append(times, at)[before:]
        scores = whole(saved, *known, at)
        answer = client.post("/recommend", user=name, events=[event], k=5, exclude_seen=False)
        best = scores.topk(5)
        assert [row["item"] for row in answer["items"]] == saved.item_ids[best.indices].tolist()
        assert all(row["title"] == f"item {row['item']}" for row in answer["items"])


@pytest.mark.slow
def test_data_are_read_by_the_names_of_their_columns(
    amazon: tuple[Client, Path, EventLog], tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow")
    _, path, log = amazon
    users = np.repeat(np.arange(log.num_users), np.diff(log.offsets)).tolist()
    rows = zip(users, log.items.tolist(), log.timestamps.tolist(), strict=True)
    lines = [f"{at}000;{log.user_name(u)};{log.source_item_ids[item]}\n" for u, item, at in rows]
    for number in range(2):
        text = "at;account;sku\n" + "".join(lines[number::2])
        (tmp_path / f"{number}.csv").write_text(text)
    data = ["--data", *map(str, tmp_path.iterdir()), "--columns", "user=account", "item=sku"]
    options = serve_options.parse_arguments(None, ["--model", str(path), *data, "timestamp=at"])
    with make_engine(options, load_model(path, CPU)) as engine:
        assert len(engine.store) == log.num_users
        [stored] = engine.store.read([log.user_name(7)], [0])
    latest = slice(*log.offsets[7:9])
    kept = len(stored.events)
    assert stored.events[:, 0].tolist() == log.items[latest][-kept:].tolist()
    assert stored.events[:, 1].tolist() == log.timestamps[latest][-kept:].tolist()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "kind", "place"),
    [
        ({"user": 1}, "string_type", ["user"]),
        ({"user": ""}, "string_too_short", ["user"]),
        ({"user": "x" * 65}, "string_too_long", ["user"]),
        ({"user": "\ud800"}, "string_unicode", ["user"]),
        ({"user": "u", "events": [EVENT]}, "string_type", ["events", 0, "item"]),
        (
            {"user": "u", "events": [{"item": "1", "time": 5}]},
            "unknown_item",
            ["events", 0, "item"],
        ),
        ({"user": "u"}, "no_history", ["events"]),
    ],
)
def test_wrong_ids_where_those_of_the_data_are_text(
    amazon: tuple[Client, Path, EventLog], body: Any, kind: str, place: list[Any]
) -> None:
    status, _, answer = amazon[0].send("POST", "/recommend", body)
    assert status == 422
    assert [(detail["type"], detail["loc"]) for detail in answer["detail"]] == [
        (kind, ["body", *place])
    ]


@pytest.mark.slow
def test_data_with_other_ids_than_the_model(
    amazon: tuple[Client, Path, EventLog], ratings: Path
) -> None:
    store, saved = MemoryStore(100, LONGEST), load_model(amazon[1], CPU)
    with pytest.raises(ValueError, match=r"--data: expected ids that are text, .* got numbers"):
        add_events(store, open_event_log(ratings), saved)


# ---------------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("/score", {"candidates": [1]}, ["user"]),
        ("/score", {"user": 1}, ["candidates"]),
        ("/score", {"user": "1", "candidates": [1]}, ["user"]),
        ("/score", {"user": 2**63, "candidates": [1]}, ["user"]),
        ("/score", {"user": 1, "candidates": [1.5]}, ["candidates", 0]),
        ("/score", {"user": 1, "candidates": [1, 10**6]}, ["candidates", 1]),
        ("/score", {"user": 1, "candidates": [1] * (MAX_CANDIDATES + 1)}, ["candidates"]),
        ("/score", {"user": 1, "candidates": [], "events": [{"item": 1}]}, ["events", 0, "time"]),
        (
            "/score",
            {"user": 1, "candidates": [], "events": [EVENT, {"item": 0, "time": 1}]},
            ["events", 1, "item"],
        ),
        (
            "/score",
            {"user": 1, "candidates": [], "events": [{"item": 1, "time": -1}]},
            ["events", 0, "time"],
        ),
        ("/score", {"user": 1, "candidates": [], "events": [EVENT] * 1001}, ["events"]),
        ("/score", {"user": 1, "candidates": [], "time": 2**62}, ["time"]),
        ("/score", {"user": 1, "candidates": [], "tiem": 1}, ["tiem"]),
        ("/score", {"user": 10**9, "candidates": [1]}, ["events"]),
        ("/recommend", {"user": 1, "k": 0}, ["k"]),
        ("/recommend", {"user": 1, "k": 1001}, ["k"]),
        ("/recommend", {"user": 1, "exclude_seen": 1}, ["exclude_seen"]),
        ("/recommend", {"user": 10**9}, ["events"]),
        ("/recommend", [1], []),
    ],
)
def test_what_is_wrong_is_named(client: Client, path: str, body: Any, place: list[Any]) -> None:
    status, _, answer = client.send("POST", path, body)
    assert status == 422
    assert ["body", *place] in [detail["loc"] for detail in answer["detail"]]
    assert all(detail["msg"] for detail in answer["detail"])


@pytest.mark.slow
def test_a_body_that_is_no_json(client: Client) -> None:
    status, _, answer = client.send("POST", "/score", b"{]")
    assert status == 422
    assert answer["detail"][0]["type"] == "json_invalid"


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"null", b"NaN", b"Infinity", b"1e400", b'"\\ud800"', b"[" * 10**5, b"9" * 10**4),
        *(b"\xff\xfe\xfd", b'{"user": NaN, "candidates": []}', b'{"user": 1, "k": -Infinity}'),
        *(b'{"user": 1e400}', b'{"user": 1, "events": [{"item": 1, "time": NaN}]}'),
        *(b'{"user": "\\ud800", "candidates": []}', b'{"user": 1, "\\ud800": 1}'),
        *(
            b'{"user": 1, "candidates": [NaN]}',
            b'{"user": 1, "candidates": [1' + b"0" * 400 + b"]}",
        ),
        b"{" + b",".join(b'"%d": NaN' % n for n in range(50_000)) + b"}",
    ],
    ids=lambda text: text[:40].decode(errors="replace"),
)
@pytest.mark.parametrize("path", ["/score", "/recommend"])
def test_malformed_bodies_are_not_repeated(client: Client, path: str, text: bytes) -> None:
    for headers in ({}, {"Content-Type": "text/plain"}):
        status, _, answer = client.send("POST", path, text, headers)
        assert status in (400, 422)
        details = answer["detail"]
        if status == 422:
            assert 0 < len(details) <= MAX_ERRORS
            assert all(set(detail) == {"type", "loc", "msg"} for detail in details)
    assert client.send("GET", "/health")[0] == 200


@pytest.mark.slow
def test_large_bodies(client: Client) -> None:
    large = b" " * (MAX_BODY_BYTES + 1)
    for body in (large, iter([large[:1000]] * (len(large) // 1000 + 1))):
        chunked = not isinstance(body, bytes)
        headers = {"Transfer-Encoding": "chunked"} if chunked else {}
        status, _, answer = client.send("POST", "/score", body, headers, encode_chunked=chunked)
        assert status == 413
        assert answer["detail"] == f"The body must have at most {MAX_BODY_BYTES} bytes"
    at_the_limit = json.dumps({"user": 3, "candidates": []}).encode().ljust(MAX_BODY_BYTES)
    assert client.send("POST", "/score", at_the_limit)[0] == 200


def body(user: int) -> dict[str, Any]:
    return {"user": user, "events": [EVENT], "candidates": [1]}


def test_a_timeout_has_no_effect(checkpoint: Path, saved: SavedModel) -> None:
    with slow(checkpoint, "--timeout", "0.2") as server:
        status, _, answer = server.client.send("POST", "/score", body(1))
        assert (status, answer["detail"][:22]) == (504, "No answer within 0.2 s")
        server.go_on.set()
        answer = server.client.post("/score", **body(1))
        expected = whole(saved, np.array([1]), np.array([5]), 5)[np.searchsorted(saved.item_ids, 1)]
        assert answer["scores"] == pytest.approx([expected.item()], rel=1e-4)
        stats = server.engine.stats()
        assert (stats.completed, stats.cancelled) == (1, 1)


def test_overload_is_said_at_once_and_passes(checkpoint: Path) -> None:
    with (
        slow(checkpoint, "--max-queue", "3", "--timeout", "20") as server,
        ThreadPoolExecutor(12) as pool,
    ):
        held_since = time.monotonic()
        first = pool.submit(server.client.send, "POST", "/score", body(0))
        assert server.reached.wait(10)
        others = [pool.submit(server.client.send, "POST", "/score", body(n)) for n in range(1, 12)]
        refused = [future for future in others if future in done_within(others, count=8)]
        for future in refused:
            status, headers, answer = future.result()
            assert status == 503
            assert_retry_after(headers, held_since)
            assert "max_queue" in answer["detail"]
        assert len(refused) == 8
        assert server.client.send("GET", "/health")[2]["queued"] == 3
        server.go_on.set()
        answered = [first, *(future for future in others if future not in refused)]
        assert [future.result()[0] for future in answered] == [200] * 4
        assert server.client.send("POST", "/score", body(50))[0] == 200
        assert server.client.metrics()["hstu_engine_rejected_total"] == 8


def done_within(futures: list[Any], count: int) -> list[Any]:
    """Returns the first `count` futures that are done."""
    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        done = [future for future in futures if future.done()]
        if len(done) >= count:
            return done
        time.sleep(0.01)
    raise AssertionError(f"{len(done)} of {count} were done")


def test_failures_are_500_and_alone(checkpoint: Path) -> None:
    with slow(checkpoint) as server:
        server.go_on.set()
        server.go_on_with_error = True
        assert server.client.send("POST", "/score", body(1))[0] == 500
        server.go_on_with_error = False
        assert server.client.send("POST", "/score", body(1))[0] == 200
        metrics = server.client.metrics()
        assert metrics["hstu_engine_failed_total"] == 1
        assert metrics["hstu_http_responses_total{/score,500}"] == 1


@pytest.mark.slow
def test_after_closing_it_is_unavailable(checkpoint: Path) -> None:
    with slow(checkpoint) as server:
        server.engine.close()
        status, headers, answer = server.client.send("GET", "/health")
        assert (status, answer["status"]) == (503, "closed")
        status, headers, answer = server.client.send("POST", "/score", body(1))
        assert (status, headers["Retry-After"], answer["detail"]) == (
            503,
            "1",
            "the engine is closed",
        )


# ---------------------------------------------------------------------------------------------
# Start and end
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sigterm_answers_what_has_arrived(checkpoint: Path) -> None:
    """The requests wait in an incomplete batch; the server answers them before it ends."""
    arguments = ("--max-wait-ms", "1500", "--max-batch-size", "64")
    with (
        process("--model", str(checkpoint), *arguments) as (server, client),
        ThreadPoolExecutor(4) as pool,
    ):
        futures = [pool.submit(client.send, "POST", "/score", body(n)) for n in range(4)]
        limit = time.monotonic() + 10
        while client.send("GET", "/health")[2]["queued"] < 4:
            assert time.monotonic() < limit
        server.send_signal(signal.SIGTERM)
        assert [future.result()[0] for future in futures] == [200] * 4
        assert server.wait(10) == 0
        assert server.stderr is not None
        assert server.stderr.read() == ""


@pytest.mark.slow
def test_wrong_options_are_refused_before_torch_is_imported(checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, message in (
            (["--port", "99999"], "--port: expected a whole number from 0 to 65535; got '99999'"),
            (["--port", "http"], "--port: expected a whole number from 0 to 65535; got 'http'"),
            (["--page-size", "0"], "--page-size: invalid choice: 0"),
            (["--timeout", "0"], "--timeout: expected a number from 0.001 to 3600; got '0'"),
            (["--timeout", "nan"], "--timeout: expected a number from 0.001 to 3600; got 'nan'"),
            (["--cache-mib", "0"], "--cache-mib: expected a whole number from 1 to"),
            (["--max-connections", "0"], "--max-connections: expected a whole number from 1 to"),
            (["--device", "gpu"], "--device: expected auto, cpu, cuda or cuda:N; got 'gpu'"),
            (
                ["--model", "absent.pt"],
                "--model: expected a file that train_retrieval.py or",
            ),
            (["--data", "absent.dat"], "--data: expected a file or directory; got absent.dat"),
            (["--port", str(port)], f"got 127.0.0.1 and {port} (Address already in use)"),
            (["--host", "256.0.0.1"], "--host, --port: expected a free address of this machine"),
        ):
            ended = without_torch("--model", str(checkpoint), *arguments)
            assert ended.returncode != 0
            assert ended.stdout == ""
            assert ended.stderr.startswith("error: ")
            assert ended.stderr.count("\n") == 1
            assert message in ended.stderr


def test_help_shows_how_to_start_it_without_torch() -> None:
    ended = without_torch("--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "    python examples/serve.py --data ml-1m/ratings.dat" in ended.stdout


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the server's program with imports of torch and numpy disabled."""
    program = (
        "import sys; sys.modules.update(torch=None, numpy=None); "
        "import serve; sys.exit(serve.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True)


@pytest.mark.slow
def test_what_cannot_be_served_is_said_in_a_line(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    text, empty, damaged, other = (tmp_path / f"{n}.pt" for n in range(4))
    text.write_text("not a model")
    empty.touch()
    damaged.write_bytes(checkpoint.read_bytes()[:-1000])
    torch.save({"model": {}, "step": 3}, other)
    for path in (text, empty, damaged, other):
        assert serve.main(["--port", "0", "--model", str(path)]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"error: {path} is not a model that train_retrieval.py has saved")
        assert error.count("\n") == 1
    usual = ["--port", "0", "--model", str(checkpoint), "--device", "cpu"]
    assert serve.main([*usual, "--device", "cuda:99"]) == 1
    assert "--device: expected one of this machine, where torch sees " in capsys.readouterr().err
    amazon = write_synthetic_amazon(tmp_path, 2018, 10, 100, 20)
    assert serve.main([*usual, "--data", str(amazon)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == "error: --data: expected ids that are numbers, as the model's; got text"


def test_a_cache_too_small_for_a_history(saved: SavedModel, checkpoint: Path) -> None:
    longer = saved._replace(model=copy.copy(saved.model))
    longer.model.max_seq_len = 10**6
    options = serve_options.parse_arguments(None, ["--model", str(checkpoint), "--cache-mib", "3"])
    with pytest.raises(ValueError, match=r"--cache-mib: expected at least 245, .*; got 3"):
        make_engine(options, longer)


@pytest.mark.slow
def test_nothing_is_left_to_full_garbage_collections(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects that live as long as the server are frozen before its first request."""
    frozen, tracked = [], []

    def run(server: object, sockets: object) -> None:
        frozen.append(gc.get_freeze_count())
        tracked.append(len(gc.get_objects()))

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(uvicorn.Server, "run", run)
    gc.unfreeze()
    try:
        usual = ["--port", "0", "--model", str(checkpoint), "--device", "cpu"]
        assert serve.main(usual) == 0
    finally:
        gc.unfreeze()
    assert frozen[0] > 50 * tracked[0]


def test_events_on_unknown_items_are_left_out(saved: SavedModel, ratings: Path) -> None:
    log = open_event_log(ratings)
    fewer = saved._replace(item_ids=saved.item_ids[::2])
    store = MemoryStore(100, LONGEST)
    add_events(store, log, fewer)
    items, times = history(log, 7)
    known = np.isin(items, fewer.item_ids)
    (found,) = store.read([7], [0])
    assert found is not None
    events = found.events
    assert fewer.item_ids[events[:, 0]].tolist() == items[known].tolist()
    assert events[:, 1].tolist() == times[known].tolist()


@pytest.mark.slow
def test_data_of_the_future_are_left_out(
    saved: SavedModel, ratings: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log, store = open_event_log(ratings), MemoryStore(100, LONGEST)
    _, times = history(log, 7)
    until = int(times[-3]) - 1
    add_events(store, log, saved, until)
    (found,) = store.read([7], [0])
    assert found is not None
    expected = times[times <= until]
    assert 0 < len(expected) <= len(times) - 3
    assert found.events[:, 1].tolist() == expected.tolist()
    late = int((log.timestamps > until).sum())
    assert caplog.messages == [f"--data: left out {late} events whose times are later than {until}"]
