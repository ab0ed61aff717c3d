"""Tests of a rollback from a model to an earlier model with fewer items."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
pytest.importorskip("fastapi")
from recommender.models import CATALOG, aligned, note_items
from recommender.saved import load_model
from recommender.serve_options import parse_arguments
from recommender.server import make_engine

from hstu_attn.serving import Engine, EventStore, MemoryStore
from tests.helpers.saved_models import ITEMS, LONGEST, save, whole

CPU = torch.device("cpu")


def engine_of(path: Path, store: EventStore) -> Engine:
    options = parse_arguments(None, ["--model", str(path), "--device", "cpu"])
    return make_engine(options, aligned(load_model(path, CPU), store), store)


@pytest.mark.slow
def test_a_model_serves_again_after_one_with_more_items(tmp_path: Path) -> None:
    """Items of later models keep their numbers; the earlier model ignores events on them."""
    store = MemoryStore(10, LONGEST)
    paths = [tmp_path / name for name in ("first.pt", "later.pt", "latest.pt")]
    items = [ITEMS[10:50], ITEMS[5:50], ITEMS[:55]]
    for seed, (path, known) in enumerate(zip(paths, items, strict=True)):
        save(path, seed, known)
        engine_of(path, store).close()
    noted = ITEMS[10:50] + ITEMS[5:10] + ITEMS[:5] + ITEMS[50:55]
    number = {item: n for n, item in enumerate(noted)}
    events = [(ITEMS[20], 10), (ITEMS[2], 20), (ITEMS[7], 30), (ITEMS[30], 40)]
    store.add(1, [(number[item], at) for item, at in events])
    candidates = ITEMS[10:20]
    for path, known in zip(paths[::-1], items[::-1], strict=True):
        with engine_of(path, store) as engine:
            scores = engine.score(1, [], [number[item] for item in candidates])
        read = [event for event in events if event[0] in known]
        expected = whole(load_model(path, CPU), read, candidates)
        assert scores.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
        note = store.note(CATALOG)
        assert note is not None
        assert json.loads(note)["items"] == noted
    save(paths[0], 1, ITEMS[11:51])  # a model that has not been served
    with pytest.raises(ValueError, match="lacks 15 of them"):
        engine_of(paths[0], store)


def test_one_of_two_models_that_start_at_once_starts_again(tmp_path: Path) -> None:
    """Without the restart, two items would have the same number."""
    store = MemoryStore(10, LONGEST)
    aligned_with_nothing = []
    for name, items in (("one.pt", ITEMS[:50]), ("other.pt", ITEMS[:49] + ITEMS[50:52])):
        save(tmp_path / name, 1, items)
        aligned_with_nothing.append(aligned(load_model(tmp_path / name, CPU), store))
    note_items(aligned_with_nothing[0], store)
    with pytest.raises(ValueError, match="another model has been started meanwhile"):
        note_items(aligned_with_nothing[1], store)
    save(tmp_path / "other.pt", 1, ITEMS[:52])
    note_items(aligned(load_model(tmp_path / "other.pt", CPU), store), store)
    note_items(aligned_with_nothing[0], store)
    note = store.note(CATALOG)
    assert note is not None
    assert json.loads(note)["items"] == ITEMS[:52]


@pytest.mark.parametrize("fits", [False, True], ids=["other items", "fewer items"])
def test_a_model_that_notes_its_items_between_those_of_another(
    fits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have read that the store has no items; the second one writes its items first."""
    store = MemoryStore(10, LONGEST)
    both = []
    for name, items in (("one.pt", ITEMS[:50]), ("other.pt", ITEMS[: 40 if fits else 49])):
        save(tmp_path / name, 1, items if fits else items[::-1])
        both.append(aligned(load_model(tmp_path / name, CPU), store))
    note = store.note

    def overtaken(name: str) -> bytes | None:
        found = note(name)
        if found is None:
            monkeypatch.undo()
            note_items(both[1], store)
        return found

    monkeypatch.setattr(store, "note", overtaken)
    if fits:
        note_items(both[0], store)
    else:
        with pytest.raises(ValueError, match="another model has been started meanwhile"):
            note_items(both[0], store)
    noted = store.note(CATALOG)
    assert noted is not None
    assert json.loads(noted)["items"] == both[0 if fits else 1].item_ids.tolist()
