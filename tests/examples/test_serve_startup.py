"""Tests of the start of the example's server: it reads nothing of the users of its store."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
from recommender.models import aligned
from recommender.saved import load_model
from recommender.serve_options import parse_arguments
from recommender.server import make_engine, make_store

from benchmarks import startup
from benchmarks.record import read_records
from hstu_attn.data import open_event_log
from hstu_attn.data.synthetic import write_synthetic_movielens
from hstu_attn.serving import open_store
from tests.helpers.saved_models import ITEMS, save
from tests.helpers.stores import redis_server

COUNTS = Path("/proc/self/io")
USERS, EVENTS = 20_000, 5

Place = tuple[str, Callable[[], int]]


@pytest.fixture(params=["sqlite", "redis"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Place]]:
    """The locations of two stores, each with a function that counts the bytes read from it."""
    if request.param == "sqlite":
        if not COUNTS.exists():
            pytest.skip("needs the counts of bytes that Linux keeps of a process")

        def read() -> int:
            return int(re.findall(r"rchar: (\d+)", COUNTS.read_text())[0])

        yield [(str(tmp_path / f"{n}.sqlite"), read) for n in range(2)]
    else:
        folders = [tmp_path / str(n) for n in range(2)]
        for folder in folders:
            folder.mkdir()
        with redis_server(folders[0]) as first, redis_server(folders[1]) as second:
            yield [
                (s.url, lambda s=s: s.client.info("stats")["total_net_output_bytes"])
                for s in (first, second)
            ]


@pytest.mark.slow
def test_a_start_reads_nothing_of_the_users(places: list[Place], tmp_path: Path) -> None:
    """A start reads equally many bytes with 100,000 events of 20,000 users as with none, and does
    not read the data again.
    """
    path, data = tmp_path / "best.pt", tmp_path / "ratings.dat"
    save(path, 1)
    data.write_text("whoever reads this fails")
    read = []
    for (place, count), users in zip(places, (0, USERS), strict=True):
        startup.fill(place, users, EVENTS, len(ITEMS))
        options = parse_arguments(
            None,
            ["--model", str(path), "--device", "cpu", "--store", place, "--data", str(data)],
        )
        for _ in range(2):  # the first start notes the model's items
            saved = load_model(path, torch.device("cpu"))
            before = count()
            with (
                make_store(options, saved) as store,
                make_engine(options, aligned(saved, store), store) as engine,
            ):
                read.append(count() - before)
                assert len(engine.store) == users
                if users:
                    engine.score(users // 2, [], [1, 2])
                    assert engine.stats().recomputed_tokens == EVENTS
    assert abs(read[3] - read[1]) < 2**16
    # A control: reading all users is noticed by the measurement.
    place, count = places[1]
    before = count()
    with open_store(place, EVENTS) as store:
        users_read = store.read(range(USERS), [0] * USERS)
    assert sum(len(x.events) for x in users_read if x is not None) == USERS * EVENTS
    assert count() - before > 2**20


def test_a_store_knows_that_it_has_been_seeded() -> None:
    store = open_store("memory", 10)
    assert not store.seeded
    rows = np.array([[1, 2, 0]])
    assert store.seed([(7, rows)])
    assert store.seeded
    assert not store.seed([(8, rows)])
    assert store.read([8], [0]) == [None]


@pytest.mark.slow
def test_the_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ratings = write_synthetic_movielens(tmp_path, 50, 120, 25)
    save(tmp_path / "best.pt", 1, open_event_log(ratings).source_item_ids)
    options = ["--model", str(tmp_path / "best.pt"), "--data", str(ratings), "--rounds", "1"]
    json = tmp_path / "startup.json"
    assert startup.main([*options, "--users", "300", "--json", str(json)]) == 0
    records, printed = read_records(json), capsys.readouterr().out
    assert [(r["store"], r["users"], r["events"]) for r in records] == [
        ("sqlite", 300, 3000),
    ]
    for r in records:
        assert r["fill_seconds"] > 0
        assert r["ready_seconds"] > 0
        assert r["first_ms"] > 0
    assert "s to ready" in printed
