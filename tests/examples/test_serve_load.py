"""Tests of the load tests: what is sent when, and runs against the example's server."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
pytest.importorskip("aiohttp")
from benchmarks import serving
from benchmarks.load import Load, arrive_at_random, capacity, no_collections
from benchmarks.record import read_records
from hstu_attn.data import open_event_log
from hstu_attn.data.synthetic import write_synthetic_movielens
from tests.examples.test_serve_faults import save


def test_a_client_collects_no_garbage_meanwhile() -> None:
    with no_collections():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
def test_arrivals_do_not_wait_for_answers() -> None:
    """Each answer takes much longer than until the next request is sent."""
    started: list[float] = []
    called: list[float] = []

    async def send() -> bool:
        started.append(time.perf_counter())
        await asyncio.sleep(0.3)
        return len(started) % 10 > 0

    async def run() -> Load[None]:
        middle = lambda: called.append(time.perf_counter())  # noqa: E731
        how: dict[str, Any] = {"rate": 200.0, "seconds": 1.0, "warm_up": 0.2, "middle": middle}
        return await arrive_at_random(send, rng=random.Random(3), **how)

    load = asyncio.run(run())
    rng, due = random.Random(3), [0.0]
    while due[-1] < 1.2:
        due.append(due[-1] + rng.expovariate(200.0))
    assert len(started) == len(due) - 2
    assert len(load.latencies) + load.failed == sum(0.2 <= at < 1.2 for at in due)
    assert 0 < load.failed < len(load.latencies)
    assert min(load.latencies) >= 0.299
    [when] = called
    assert 0.5 < when - started[0] < 1.2


@pytest.mark.slow
def test_the_capacity_is_what_is_answered_in_time() -> None:
    async def send() -> bool:
        await asyncio.sleep(0.05)
        return True

    found = asyncio.run(capacity(send, concurrency=10, seconds=1.0, warm_up=0.1))
    assert 60 < found <= 210


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options with a model and data."""
    folder = tmp_path_factory.mktemp("load")
    ratings = write_synthetic_movielens(folder, 50, 120, 25)
    save(folder / "best.pt", 1, open_event_log(ratings).source_item_ids)
    return ["--model", str(folder / "best.pt"), "--data", str(ratings)]


@pytest.mark.slow
def test_the_load_test(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serving.json"
    arguments = [*files, "--seconds", "0.5", "--concurrency", "2", "4"]
    serving.main([*arguments, "--json", str(path)])
    records, printed = read_records(path), capsys.readouterr().out
    assert [record["concurrency"] for record in records] == [2, 4]
    for record in records:
        assert record["answered"] > 0
        assert record["failed"] == 0
        assert 0 < record["p50_ms"] <= record["p95_ms"] <= record["p99_ms"] < 500
        assert 1 <= record["mean_batch"] <= 4
        assert 0 < record["hit_share"] < 1
        assert f"{record['qps']:g} requests/s" in printed


@pytest.mark.slow
def test_random_arrivals(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "serving.json"
    arguments = [*files, "--seconds", "1", "--concurrency", "4", "--loads", "0.3", "0.5"]
    serving.main([*arguments, "--json", str(path)])
    records, printed = read_records(path), capsys.readouterr().out
    changes = "the model changes"
    assert [(r["load"], r["event"]) for r in records] == [(0.3, ""), (0.5, ""), (0.3, changes)]
    for record in records:
        assert record["failed"] == 0
        expected = record["load"] * record["capacity"]
        assert abs(record["answered"] - expected) < 5 * expected**0.5 + 5  # Poisson
        assert 0 < record["p50_ms"] <= record["p99_ms"] <= record["worst_ms"]
    assert f"one process   30%  {changes}" in printed
