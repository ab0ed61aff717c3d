"""Tests of the file of --probe: a request that a model must answer before it is served."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
pytest.importorskip("fastapi")
from recommender.http_schemas import MAX_CANDIDATES
from recommender.models import Models, load_served
from recommender.serve_options import ServeOptions, parse_arguments
from recommender.server import make_engine

from tests.helpers.saved_models import ITEMS, save, save_ranking, whole

CPU = torch.device("cpu")
NOW = 1_700_000_000
EVENTS = [(ITEMS[3], NOW), (ITEMS[7], NOW + 60), (ITEMS[1], NOW + 70)]
CANDIDATES = ITEMS[5:9]
BODY: dict[str, Any] = {
    "user": 1,
    "events": [{"item": item, "time": at} for item, at in EVENTS],
    "candidates": CANDIDATES,
}


def options_of(model: Path, content: object) -> ServeOptions:
    """Returns the options of a server of a model, with this content in the file of --probe."""
    path = model.with_name("probe.json")
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return parse_arguments(None, ["--model", str(model), "--probe", str(path), "--device", "cpu"])


def test_a_retrieval_model_must_answer_as_expected(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    save(path, 2, ITEMS[::-1])
    other = whole(load_served(path, False, CPU), EVENTS, CANDIDATES)
    save(path, 1)
    saved = load_served(path, False, CPU)
    scores = whole(saved, EVENTS, CANDIDATES)
    options = options_of(path, {"body": BODY, "answer": {"user": 1, "scores": other}})
    with pytest.raises(ValueError, match=r"the probe's scores within 0.01 .* of candidate \d"):
        make_engine(options, saved)

    options = options_of(path, {"body": BODY, "answer": {"user": 1, "scores": scores}})
    with make_engine(options, saved) as engine:
        models = Models(options, saved, engine, MAX_CANDIDATES)
        save(path, 2, ITEMS[::-1])
        with pytest.raises(ValueError, match=r"the probe's scores within 0\.01 "):
            models.load_and_swap()
        numbers = [ITEMS.index(item) for item in CANDIDATES]
        events = [(ITEMS.index(item), at) for item, at in EVENTS]
        served = engine.score(1, events, numbers)
        assert served.tolist() == pytest.approx(scores, rel=1e-4, abs=1e-5)
        # The file is read again for each model.
        options_of(path, {"body": BODY, "answer": {"user": 1, "scores": other}})
        models.load_and_swap()
        assert engine.score(1, [], numbers).tolist() == pytest.approx(other, rel=1e-4, abs=1e-5)
        options_of(path, {"body": BODY})  # any finite answer
        save(path, 1)
        models.load_and_swap()
        assert engine.score(1, [], numbers).tolist() == pytest.approx(scores, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("field", ["user", "events_before", "time"])
def test_a_ranking_model_is_asked_for_the_user_and_the_time(tmp_path: Path, field: str) -> None:
    path = tmp_path / "model.pt"
    save_ranking(path, 1)
    saved = load_served(path, False, CPU)
    bits = {"click": 1, "like": 2}
    done = [["click"], ["click", "like"], []]
    events = [
        (ITEMS.index(item), at, sum(bits[action] for action in actions))
        for (item, at), actions in zip(EVENTS, done, strict=True)
    ]
    body = BODY | {"user": 3, "events_before": 500, "time": NOW + 30_000}
    body["events"] = [e | {"actions": a} for e, a in zip(BODY["events"], done, strict=True)]
    numbers = [ITEMS.index(item) for item in CANDIDATES]
    plain = parse_arguments(None, ["--model", str(path), "--device", "cpu"])
    with make_engine(plain, saved) as engine:
        future = engine.submit_score(3, events, numbers, at=NOW + 30_000, context=500)
        scores = future.result(20)
    tasks = dict(zip(saved.model.config.tasks, scores.T.tolist(), strict=True))
    content = {"body": body, "answer": {"user": 3, "probabilities": tasks}, "tolerance": 1e-5}
    make_engine(options_of(path, content), saved).close()
    body[field] = {"user": 10**6, "events_before": 3, "time": NOW + 70}[field]
    with pytest.raises(ValueError, match=r"the probe's scores within 1e-05 .* of candidate \d"):
        make_engine(options_of(path, content), saved)


ANSWER = {"user": 1, "scores": [0.5] * len(CANDIDATES)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "the file: Invalid JSON"),
        ({"answer": ANSWER}, "body: Field required"),
        ({"body": BODY | {"candidates": ["1"]}}, "body.candidates.0: Input should be a valid int"),
        ({"body": BODY, "scores": [0.5]}, "scores: Extra inputs are not permitted"),
        ({"body": BODY, "tolerance": -1}, "tolerance: Input should be greater than or equal to 0"),
        ({"body": BODY | {"candidates": [10**9]}}, "items that the model knows, got 1000000000"),
        ({"body": BODY | {"events": []}}, "probe: expected 1 to .* events"),
        (
            {"body": BODY, "answer": {"user": 1, "scores": [0.5]}},
            r"probe\.expected: expected a score for each of 4 candidates, .* got shape \(1,\)",
        ),
    ],
)
def test_wrong_files(content: object, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    save(path, 1)
    with pytest.raises(ValueError, match=message):
        make_engine(options_of(path, content), load_served(path, False, CPU))


def test_the_answer_may_be_nan_in_no_probe(tmp_path: Path) -> None:
    """Python's JSON parser accepts NaN, and comparisons with NaN would never fail."""
    path = tmp_path / "model.pt"
    save(path, 1)
    saved = load_served(path, False, CPU)
    scores = f"[{', '.join(['NaN'] * len(CANDIDATES))}]"
    content = json.dumps({"body": BODY, "answer": ANSWER}).replace("[0.5, 0.5, 0.5, 0.5]", scores)
    options = options_of(path, content)
    with pytest.raises(ValueError, match=r"Invalid JSON|got .* for nan"):
        make_engine(options, saved)


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.pt"
    save(path, 1)
    with pytest.raises(SystemExit):
        parse_arguments(None, ["--model", str(path), "--probe", str(tmp_path / "none.json")])
    assert "--probe: expected a file, got" in capsys.readouterr().err


def test_a_replica_on_ray_asks_the_probe(tmp_path: Path) -> None:
    serve_ray = pytest.importorskip("serve_ray", reason="needs ray")
    path = tmp_path / "model.pt"
    save(path, 1)
    scores = whole(load_served(path, False, CPU), EVENTS, CANDIDATES)
    answer = {"user": 1, "scores": scores}
    options = options_of(path, {"body": BODY, "answer": answer})
    options.store = "memory"
    replica = SimpleNamespace(forget=None, prune=None, metrics=None)
    serve_ray.build(replica, options).engine.close()
    answer["scores"] = [score + 1 for score in scores]
    options_of(path, {"body": BODY, "answer": answer})
    with pytest.raises(ValueError, match="the probe's scores within"):
        serve_ray.build(replica, options)
