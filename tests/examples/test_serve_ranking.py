"""Tests of serving the ranking example: probabilities equal those of the trained model on the
windows of its data, however the events are divided among requests.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hstu_attn.data import EventLog, open_event_log
from hstu_attn.data.synthetic_layouts import write_synthetic_amazon, write_synthetic_kuairand

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
pytest.importorskip("fastapi")
import train_ranking
from recommender.models import Models
from recommender.ranking import RankingModel, save_ranking_model
from recommender.ranking_data import RankingData, RankingWindows
from recommender.saved import load_model
from recommender.serve_options import parse_arguments
from recommender.served_ranking import (
    SavedRanking,
    ServedRanking,
    is_ranking_model,
    load_saved_ranking,
)

from hstu_attn.serving import Engine, EngineClosedError, MemoryStore, Requests
from tests.helpers.http_client import Client, process
from tests.helpers.serving_models import make_cache, make_model

HISTORY, TARGETS = 12, 6
TASKS = ("long_view", "is_click")
TRAINING = [
    *("--dim", "16", "--layers", "2", "--history", str(HISTORY), "--targets", str(TARGETS)),
    *("--held-out", "3", "--sequences-per-batch", "8", "--steps", "4", "--eval-every", "4"),
    *("--warmup-steps", "1", "--device", "cpu"),
]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    size = {"num_users": 40, "num_items": 100, "mean_events": 24}
    return write_synthetic_kuairand(tmp_path_factory.mktemp("data"), **size)


@pytest.fixture(scope="module")
def log(paths: list[Path]) -> EventLog:
    return open_event_log(paths)


@pytest.fixture(scope="module")
def checkpoint(paths: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model, with weights so large that every input matters."""
    out = tmp_path_factory.mktemp("run")
    data = ["--data", *map(str, paths), "--out", str(out), "--tasks", *TASKS]
    assert train_ranking.main([*TRAINING, *data]) == 0
    state = torch.load(out / "best.pt", weights_only=True)
    generator = torch.Generator().manual_seed(3)
    for tensor in state["model"].values():
        tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
    torch.save(state, out / "best.pt")
    return out / "best.pt"


@pytest.fixture(scope="module")
def saved(checkpoint: Path) -> SavedRanking:
    return load_saved_ranking(checkpoint, CPU)


@pytest.fixture(scope="module")
def data(log: EventLog) -> RankingData:
    return RankingData(log, HISTORY, TARGETS, held_out=3, user_buckets=100_000)


@pytest.fixture(scope="module")
def client(checkpoint: Path, paths: list[Path]) -> Iterator[Client]:
    data = ["--data", str(paths[0].parent)]
    with process("--model", str(checkpoint), *data) as (_, client):
        yield client


@torch.no_grad()
def whole(saved: SavedRanking, data: RankingData, user: int, start: int, request: int) -> Tensor:
    """Returns the probabilities of a user's events from `request` on, given those from `start`."""
    end = min(request + TARGETS, int(data.log.offsets[user + 1]))
    parts = (np.array([value]) for value in (user, start, request, end))
    return saved.model(data.batch(RankingWindows(*parts))).sigmoid()


def body_of(data: RankingData, user: int, first: int, last: int) -> list[dict[str, Any]]:
    """Returns the events from `first` to `last` as a client sends them."""
    log = data.log
    return [
        {
            "item": int(log.item_ids[log.items[event]]),
            "time": int(log.timestamps[event]),
            "actions": [
                name for bit, name in enumerate(data.actions) if data.bits[event] >> bit & 1
            ],
        }
        for event in range(first, last)
    ]


def candidates_of(log: EventLog, first: int, last: int) -> list[int]:
    return log.item_ids[log.items[first:last]].tolist()


@pytest.mark.slow
def test_probabilities_are_those_of_the_training_windows(
    client: Client, saved: SavedRanking, data: RankingData
) -> None:
    """A user of the model sends events gradually to a server that starts with none of them."""
    log, user = data.log, 5
    start, end = map(int, log.offsets[user : user + 2])
    assert end - start > HISTORY + 8
    sent = 0
    assert -77 not in log.user_ids
    for request in (start + 3, start + 9, end - TARGETS):
        first = max(start, request - HISTORY)
        expected = whole(_as_new(saved), data, user, first, request)
        stop = min(request + TARGETS, end)
        answer = client.post(
            "/rank",
            user=-77,
            events=body_of(data, user, start + sent, request),
            candidates=candidates_of(log, request, stop),
            time=int(log.timestamps[request]),
            events_before=request - start,
        )
        sent = request - start
        assert answer["user"] == -77
        assert list(answer["probabilities"]) == list(TASKS)
        found = torch.tensor(list(answer["probabilities"].values())).T
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert found.std() > 0.05


def _as_new(saved: SavedRanking) -> SavedRanking:
    """Returns the model with the mean of the users' embeddings for every user."""
    model = copy.deepcopy(saved.model)
    table = model.get_submodule("embeddings.tables.user")
    with torch.no_grad():
        table.weight[:-1] = table.weight[:-1].mean(0)
    return saved._replace(model=model)


@pytest.mark.slow
def test_users_of_the_data_are_known_with_their_events(
    client: Client, saved: SavedRanking, data: RankingData
) -> None:
    """The request is made at the last event's time, for items of the whole catalog."""
    log = data.log
    assert client.send("GET", "/health")[2]["users"] >= log.num_users
    for user in (0, 7, 39):
        start, end = map(int, log.offsets[user : user + 2])
        at = int(log.timestamps[end - 1]) + 60
        items = list(range(log.num_items))
        requests = Requests(
            users=[int(log.user_ids[user])],
            contexts=[None],
            event_offsets=np.array([0, min(HISTORY, end - start)]),
            events=np.stack(
                [
                    x[max(start, end - HISTORY) : end]
                    for x in (log.items, log.timestamps, data.bits)
                ],
                axis=1,
                dtype=np.int64,
            ),
            times=np.array([at]),
            candidate_offsets=np.array([0, len(items)]),
            candidates=np.array(items),
        )
        served = ServedRanking(saved, 200)
        batch = served.batch(requests)
        assert batch.contexts[0, 0] == user  # the number of the user in training
        assert batch.contexts[0, 1] == int(np.log2(min(HISTORY, end - start) + 1))
        assert batch.contexts[0, 2] == at // 3600 % 24
        answer = client.post(
            "/rank",
            user=int(log.user_ids[user]),
            candidates=candidates_of_items(log, items),
            time=at,
        )
        found = torch.tensor(list(answer["probabilities"].values())).T
        torch.testing.assert_close(
            found, served.score_requests(requests).detach(), rtol=1e-4, atol=1e-5
        )


def candidates_of_items(log: EventLog, items: list[int]) -> list[int]:
    return log.item_ids[items].tolist()


@pytest.mark.parametrize("target_group_size", [1, 3])
def test_requests_in_a_batch_are_those_alone(
    saved: SavedRanking, data: RankingData, target_group_size: int
) -> None:
    """Users do not affect each other; candidates see each other only within groups of training."""
    config = saved.model.config
    model = RankingModel(replace(config, target_group_size=target_group_size)).eval()
    model.load_state_dict(saved.model.state_dict())
    served = ServedRanking(saved._replace(model=model), 50)
    users = [int(data.log.user_ids[n]) for n in (3, 4, 5, 6)] + [-1, 10**9]
    asked = {
        user: (
            [(place, 10**9 + 100 * n, n % served.num_actions) for n in range(place * 3)],
            [*range(place, 40 + place)],
        )
        for place, user in enumerate(users)
    }
    with Engine(served, None, max_batch_size=6, max_wait=30.0) as engine:
        futures = {
            user: engine.submit_score(user, events, candidates, at=10**9 + 10**4)
            for user, (events, candidates) in asked.items()
        }
        together = {user: future.result(30) for user, future in futures.items()}
        assert engine.stats().batches == 1
        assert engine.stats().hit_tokens == 0
    for user, (events, candidates) in asked.items():
        with Engine(served, None, max_wait=0.0) as engine:
            alone = engine.score(user, events, candidates, at=10**9 + 10**4)
        assert alone.shape == (40, len(TASKS))
        torch.testing.assert_close(together[user], alone, rtol=1e-4, atol=1e-5)
    order = together[users[1]].argsort(dim=0).tolist()
    assert order != sorted(order)


def test_nobody_and_nothing(saved: SavedRanking) -> None:
    """A user without events can be ranked for; no candidates have no probabilities."""
    served = ServedRanking(saved, 10)
    with Engine(served, None) as engine:
        assert engine.score(-5, [], []).shape == (0, len(TASKS))
        scores = engine.score(-5, [], [4, 4, 5], at=10**9)
        torch.testing.assert_close(scores[0], scores[1])
        assert (scores[0] - scores[2]).abs().max() > 1e-3
        with pytest.raises(ValueError, match="candidates: expected items from 0 to 99, got 100"):
            engine.score(-5, [], [100])
        with pytest.raises(ValueError, match="model: expected one that scores its whole catalog"):
            engine.recommend(-5, [], 3)


def test_a_cache_is_for_models_that_can_use_one(saved: SavedRanking) -> None:
    with pytest.raises(ValueError, match="cache: expected None for a model that computes each"):
        Engine(ServedRanking(saved, 10), make_cache(12))
    with pytest.raises(ValueError, match="cache: expected a PagedKVCache for a model without"):
        Engine(make_model("retrieval"), None)
    with pytest.raises(ValueError, match="store: expected max_events of at most the model's"):
        Engine(ServedRanking(saved, 10), None, store=MemoryStore(10, HISTORY + 1))


def test_histories_are_cut_to_what_training_had(saved: SavedRanking) -> None:
    """Without a cache, a full history always has exactly the latest events."""
    served = ServedRanking(saved, 10)
    events = [(n % 90, 10**9 + n, n % 3) for n in range(3 * HISTORY)]
    with Engine(served, None) as engine, Engine(served, None) as other:
        for first in range(0, len(events), 5):
            scores = engine.score(1, events[first : first + 5], [1, 2, 3], at=10**9 + 10**3)
        expected = other.score(1, events[-HISTORY:], [1, 2, 3], at=10**9 + 10**3)
        torch.testing.assert_close(scores, expected)
        assert engine.stats().new_tokens > engine.stats().hit_tokens == 0


def test_rows_of_users(saved: SavedRanking) -> None:
    served = ServedRanking(saved, 10)
    ids = saved.user_ids
    assert [served.user_row(int(ids[n])) for n in (0, 7, 39)] == [0, 7, 39]
    for stranger in (-1, 10**18, 2**80, -(2**80), "5", str(ids[0])):
        assert served.user_row(stranger) == served.new_user == 40
    table = served.model.get_submodule("embeddings.tables.user")
    torch.testing.assert_close(table.weight[40], table.weight[:40].mean(0))
    assert len(table.weight) == 41


def test_users_who_share_a_row(saved: SavedRanking, log: EventLog) -> None:
    """Users share the embedding row that they shared in training, where users were hashed."""
    data = RankingData(log, HISTORY, TARGETS, held_out=3, user_buckets=7)
    config = replace(saved.model.config, sizes={**saved.model.config.sizes, "user": 7 + 1})
    served = ServedRanking(saved._replace(model=RankingModel(config)), 10)
    rows = [served.user_row(int(user)) for user in log.user_ids]
    assert rows == data.user_rows(np.arange(log.num_users)).tolist()
    assert 3 < len(set(rows)) <= 7
    assert served.user_row(-1) == 7


def test_another_model_takes_over_if_it_has_the_same_tasks_and_actions(
    saved: SavedRanking, checkpoint: Path, tmp_path: Path
) -> None:
    """The new model's scores are those of its weights; other tasks or actions are refused."""
    options = parse_arguments(None, ["--model", str(checkpoint)])
    state = torch.load(checkpoint, weights_only=True)
    state["model"]["head.3.bias"] += 1.0
    torch.save(state, tmp_path / "better.pt")
    state["ranking"]["tasks"] = ("long_view", "is_like")
    torch.save(state, tmp_path / "other.pt")
    state["ranking"] |= {"tasks": TASKS, "actions": state["ranking"]["actions"][::-1]}
    torch.save(state, tmp_path / "reversed.pt")
    with Engine(ServedRanking(saved, 100), None) as engine:
        models = Models(options, saved, engine, 100)
        before = engine.score(1, [(3, 10**9, 1)], [1, 2, 3])
        with pytest.raises(ValueError, match=r"tasks of the served one, long_view, is_click; got "):
            models.load_and_swap(tmp_path / "other.pt")
        with pytest.raises(ValueError, match=r"actions of the served one, is_click, is_like, "):
            models.load_and_swap(tmp_path / "reversed.pt")
        assert torch.equal(engine.score(1, [], [1, 2, 3]), before)
        models.load_and_swap(tmp_path / "better.pt")
        after = engine.score(1, [], [1, 2, 3])
        torch.testing.assert_close(after.logit(), before.logit() + 1.0, rtol=1e-4, atol=1e-4)
        models.roll_back()
        assert torch.equal(engine.score(1, [], [1, 2, 3]), before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"user": 1}, ["candidates"]),
        ({"user": 1, "candidates": [1], "k": 3}, ["k"]),
        ({"user": 1, "candidates": [10**9]}, ["candidates", 0]),
        ({"user": 1, "candidates": [], "events_before": -1}, ["events_before"]),
        ({"user": 1, "candidates": [], "events_before": 2**62}, ["events_before"]),
        ({"user": 1, "candidates": [], "events_before": 1.0}, ["events_before"]),
        (
            {"user": 1, "candidates": [], "events": [{"item": 1, "time": 1, "actions": ["x"]}]},
            ["events", 0, "actions", 0],
        ),
        (
            {"user": 1, "candidates": [], "events": [{"item": 1, "time": 1, "actions": [1]}]},
            ["events", 0, "actions", 0],
        ),
        (
            {
                "user": 1,
                "candidates": [],
                "events": [{"item": 1, "time": 1, "actions": ["is_click"] * 99}],
            },
            ["events", 0, "actions"],
        ),
        (
            {"user": 1, "candidates": [], "events": [{"item": 1, "time": 1, "action": 1}]},
            ["events", 0, "action"],
        ),
    ],
)
def test_what_is_wrong_is_named(client: Client, body: Any, place: list[Any]) -> None:
    status, _, answer = client.send("POST", "/rank", body)
    assert status == 422
    assert ["body", *place] in [detail["loc"] for detail in answer["detail"]]


@pytest.mark.slow
def test_the_other_kind_of_paths_is_absent(client: Client) -> None:
    for path in ("/score", "/recommend"):
        assert client.send("POST", path, {"user": 1, "candidates": []})[0] == 404
    paths = client.send("GET", "/openapi.json")[2]["paths"]
    assert "/rank" in paths
    assert "/score" not in paths


@pytest.mark.slow
def test_the_types_name_actions_and_tasks(client: Client, data: RankingData) -> None:
    schemas = client.send("GET", "/openapi.json")[2]["components"]["schemas"]
    actions = schemas["ActionEventBody"]["properties"]["actions"]["items"]["enum"]
    assert actions == list(data.actions)
    assert schemas["Probabilities"]["required"] == list(TASKS)
    assert set(schemas["RankBody"]["required"]) == {"user", "candidates"}


def test_a_model_without_ids_is_refused(saved: SavedRanking, tmp_path: Path) -> None:
    save_ranking_model(tmp_path / "best.pt", saved.model)  # an old file, without ids
    assert is_ranking_model(tmp_path / "best.pt")
    with pytest.raises(ValueError, match="expected a model with the ids of its items and users"):
        load_saved_ranking(tmp_path / "best.pt", CPU)
    (tmp_path / "text.pt").write_text("not a model")
    torch.save({"model": {}}, tmp_path / "other.pt")
    for name in ("text.pt", "other.pt"):
        assert not is_ranking_model(tmp_path / name)


def test_a_damaged_model_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    state = torch.load(checkpoint, weights_only=True)
    del state["model"]["time"]
    torch.save(state, tmp_path / "best.pt")
    with pytest.raises(ValueError, match=r"is damaged \(RuntimeError\)"):
        load_saved_ranking(tmp_path / "best.pt", CPU)
    with pytest.raises(ValueError, match="not a model that train_retrieval"):
        load_model(checkpoint, CPU)


@pytest.mark.slow
def test_ids_that_are_text(tmp_path: Path) -> None:
    """The model of Amazon reviews, and the engine without HTTP."""
    ratings = write_synthetic_amazon(tmp_path, 2023, 30, 80, 20)
    out = ["--data", str(ratings), "--out", str(tmp_path / "run"), "--tasks", "rating_5"]
    assert train_ranking.main([*TRAINING, *out]) == 0
    log = open_event_log(ratings)
    saved = load_saved_ranking(tmp_path / "run" / "best.pt", CPU)
    assert saved.has_text_ids
    assert saved.item_ids.tolist() == list(log.source_item_ids)
    served = ServedRanking(saved, 10)
    assert served.user_row(log.user_name(7)) == 7
    assert served.user_row("nobody") == served.user_row(7) == served.new_user
    with Engine(served, None, store=MemoryStore(10, HISTORY, 0)) as engine:
        assert engine.score(log.user_name(7), [], [1, 2]).shape == (2, 1)
    with pytest.raises(EngineClosedError):
        engine.score(log.user_name(7), [], [1, 2])
