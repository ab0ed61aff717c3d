"""Tests of the catalog of the retrieval example: the items that have events, or also those of
MovieLens's file of titles that have none.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import train_retrieval
from recommender.baselines import Popularity, co_occurrence_candidates
from recommender.evaluation import ranks_of_targets
from recommender.model import sampled_softmax_loss
from recommender.saved import load_model
from torch import Tensor

from hstu_attn.data import EventLog, held_out_windows, jagged_batch, open_event_log
from hstu_attn.data.synthetic import synthetic_events

USERS = 40
UNRATED = [1, 55, 9999]  # before, between and after the ids that have events
UNTITLED = 2  # the number of items with events and without a title
SMALL = [
    *("--dim", "16", "--layers", "1", "--max-seq-len", "20", "--tokens-per-batch", "256"),
    *("--negatives", "16", "--steps", "4", "--warmup-steps", "2", "--device", "cpu"),
]
TITLES = ("--catalog", "titles")
CPU = torch.device("cpu")

Write = Callable[[Path], Path]


def made_events() -> list[tuple[int, int, int, int]]:
    """Returns users, items with even ids from 10 on, ratings and times."""
    events = synthetic_events(USERS, 100, 24, seed=0)
    return [(user + 1, 2 * item + 10, rating, time) for user, item, rating, time in events]


def titles_of(ids: list[int]) -> dict[int, str]:
    """Returns titles of the unrated items and of most others, in no order."""
    return {item: f"Amélie {item} (2001)" for item in reversed([*ids[UNTITLED:], *UNRATED])}


def rated(events: list[tuple[int, int, int, int]]) -> list[int]:
    return sorted({item for _, item, _, _ in events})


def write_dat(directory: Path) -> Path:
    events = made_events()
    lines = [f"{item}::{title}::Drama\n" for item, title in titles_of(rated(events)).items()]
    (directory / "movies.dat").write_text("".join(lines), encoding="latin-1")
    path = directory / "ratings.dat"
    path.write_text("".join("::".join(map(str, event)) + "\n" for event in events))
    return path


def write_csv(directory: Path) -> Path:
    events = made_events()
    lines = [f'{item},"{title}",Drama\n' for item, title in titles_of(rated(events)).items()]
    text = "movieId,title,genres\n" + "".join(lines)
    (directory / "movies.csv").write_text(text, encoding="utf-8")
    path = directory / "ratings.csv"
    rows = "".join(",".join(map(str, event)) + "\n" for event in events)
    path.write_text("userId,movieId,rating,timestamp\n" + rows)
    return path


def write_100k(directory: Path) -> Path:
    events = made_events()
    rest = "|".join(["", *["0"] * 21])
    lines = [f"{item}|{title}|{rest}\n" for item, title in titles_of(rated(events)).items()]
    (directory / "u.item").write_text("".join(lines), encoding="latin-1")
    path = directory / "u.data"
    path.write_text("".join("\t".join(map(str, event)) + "\n" for event in events))
    return path


@pytest.fixture
def ratings(tmp_path: Path) -> Path:
    return write_dat(tmp_path)


def run(ratings: Path, out: Path, *more: str) -> int:
    return train_retrieval.main([*SMALL, "--data", str(ratings), "--out", str(out), *more])


def places(log: EventLog) -> list[int]:
    """Returns the indices of the unrated items in a log whose catalog is the file of titles."""
    return np.searchsorted(log.item_ids, UNRATED).tolist()


@pytest.mark.parametrize("write", [write_dat, write_csv, write_100k])
def test_the_items_of_a_log(tmp_path: Path, write: Write) -> None:
    """The events are the same as without the option, on items with the same ids and titles."""
    path = write(tmp_path)
    log, with_titles = open_event_log(path), open_event_log(path, catalog="titles")
    ids = rated(made_events())
    assert log.item_ids.tolist() == ids
    assert with_titles.item_ids.tolist() == sorted([*ids, *UNRATED])
    assert with_titles.source_item_ids == with_titles.item_ids.tolist()
    assert with_titles.num_items == len(with_titles.titles) == log.num_items + len(UNRATED)
    assert [with_titles.titles[place] for place in places(with_titles)] == [
        f"Amélie {item} (2001)" for item in UNRATED
    ]
    assert with_titles.titles[1:3] == [f"item {item}" for item in ids[:UNTITLED]]
    assert with_titles.items.dtype == log.items.dtype
    assert (with_titles.item_ids[with_titles.items] == log.item_ids[log.items]).all()
    for name in ("user_ids", "offsets", "ratings", "timestamps"):
        assert (getattr(with_titles, name) == getattr(log, name)).all()

    # Both logs are kept. To a run that is continued they are different data.
    assert open_event_log(path, catalog="titles").directory == with_titles.directory
    assert open_event_log(path, catalog="log").directory == log.directory
    assert with_titles.manifest["content"] != log.manifest["content"]
    described = log.describe()
    assert with_titles.describe() == f"{described}, and 3 items without events"


def test_a_log_from_before_there_was_the_option(ratings: Path) -> None:
    log = open_event_log(ratings)
    path = log.directory / "manifest.json"
    manifest = json.loads(path.read_text())
    assert "catalog" not in manifest["fingerprint"]
    del manifest["eventless_items"]
    path.write_text(json.dumps(manifest))
    assert open_event_log(ratings).describe() == log.describe()


def test_items_that_are_left_out_of_the_events_stay_in_the_catalog(ratings: Path) -> None:
    least = {"min_item_events": 8, "min_user_events": 5}
    log = open_event_log(ratings, **least)
    with_titles = open_event_log(ratings, catalog="titles", **least)
    ids = rated(made_events())
    assert log.num_items < len(ids)
    titled = {*ids[UNTITLED:], *UNRATED}
    assert with_titles.item_ids.tolist() == sorted(titled | {*log.item_ids.tolist()})
    assert (with_titles.item_ids[with_titles.items] == log.item_ids[log.items]).all()


def test_unrated_items_are_drawn_and_ranked(
    ratings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unrated items are as often negatives as others, and an untrained model ranks them alike."""
    arguments = [*SMALL, *TITLES, "--data", str(ratings), "--out", str(tmp_path / "run")]
    options = train_retrieval.parse_arguments(arguments)
    log = train_retrieval.open_data(options, [], lambda _: None)
    num_items = len(rated(made_events())) + len(UNRATED)
    assert log.num_items == num_items
    trainer = train_retrieval.RetrievalTrainer(options, log, CPU)
    assert trainer.model.item_embedding.num_embeddings == num_items

    drawn: list[Tensor] = []
    draw = torch.randint

    def kept(*arguments: object, **named: object) -> Tensor:
        drawn.append(draw(*arguments, **named))  # type: ignore[call-overload]
        return drawn[-1]

    monkeypatch.setattr(torch, "randint", kept)
    batch = trainer.draw()
    states = trainer.model(batch)
    sampled_softmax_loss(trainer.model, states, batch.target_items, 400, 0.1, True).sum().backward()
    (negatives,) = drawn
    counts = torch.bincount(negatives.flatten(), minlength=num_items)
    assert len(counts) == num_items
    expected = negatives.numel() / num_items
    assert all(0.8 * expected < counts[place] < 1.2 * expected for place in places(log))
    gradient = trainer.model.item_embedding.weight.grad
    assert gradient is not None
    assert gradient[places(log)].abs().sum(dim=1).min() > 0

    # Every unrated item is somewhere in the ranking of every user.
    trainer.model.eval()
    window = held_out_windows(log, "test", options.max_seq_len)
    users = jagged_batch(log, window)
    with torch.no_grad():
        scores = trainer.model.scores(users)
    assert scores.shape == (log.num_users, num_items)
    best = scores.clone()
    best[:, places(log)] += 10
    targets = users.target_items[users.seq_offsets[1:] - 1]
    moved = ranks_of_targets(best, targets) - ranks_of_targets(scores, targets)
    above = (scores[:, places(log)] > scores.gather(1, targets[:, None])).sum(dim=1)
    assert (moved == len(UNRATED) - above).all()


def test_baselines_have_no_events_of_unrated_items(ratings: Path) -> None:
    log, with_titles = open_event_log(ratings), open_event_log(ratings, catalog="titles")
    old = np.searchsorted(with_titles.item_ids, log.item_ids)
    batches = [
        jagged_batch(each, held_out_windows(each, "test", 20)) for each in (log, with_titles)
    ]
    scorers = [
        (make(log), make(with_titles))
        for make in (Popularity, lambda each: next(iter(co_occurrence_candidates(each))))
    ]
    for without, within in scorers:
        expected, scores = without(batches[0]), within(batches[1])
        assert scores.shape == (USERS, with_titles.num_items)
        assert torch.equal(scores[:, old], expected)
        assert (scores[:, places(with_titles)] == 0).all()


@pytest.mark.slow
def test_a_run_with_the_catalog_of_the_titles(
    ratings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The saved model has the whole catalog; another catalog neither continues it nor shares its
    baselines; a recipe may say it.
    """
    out = tmp_path / "run"
    recipe = tmp_path / "mine.toml"
    recipe.write_text('catalog = "titles"\n')
    assert run(ratings, out, "--recipe", str(recipe)) == 0
    log = open_event_log(ratings, catalog="titles")
    printed = capsys.readouterr().out
    assert f" on {log.num_items - 3} items, and 3 items without events" in printed
    assert f"({log.num_items} items in all)" in printed
    saved = load_model(out / "best.pt", CPU)
    assert saved.item_ids.tolist() == log.item_ids.tolist()
    assert saved.titles == log.titles
    assert saved.model.item_embedding.num_embeddings == log.num_items

    assert run(ratings, out, *TITLES, "--resume") == 0
    assert "Continuing after step 4 of 4" in capsys.readouterr().out
    assert run(ratings, out, "--resume") == 1
    problem = "was made with catalog = 'titles', this run has 'log'"
    assert problem in capsys.readouterr().err
    assert run(ratings, tmp_path / "again", *TITLES) == 0
    assert "Baselines: tuned by an earlier run" in capsys.readouterr().out
    assert run(ratings, tmp_path / "log") == 0
    assert "Baselines: tuned by an earlier run" not in capsys.readouterr().out
    of_run, of_log = (
        json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("run", "log")
    )
    assert of_run["popularity"]["mrr"] <= of_log["popularity"]["mrr"]

    # A run that was made before the option existed has the catalog of the log.
    path = tmp_path / "log" / "run.json"
    made_with = json.loads(path.read_text())
    assert made_with.pop("catalog") == "log"
    path.write_text(json.dumps(made_with))
    assert run(ratings, tmp_path / "log", "--resume") == 0
    assert run(ratings, tmp_path / "log", *TITLES, "--resume") == 1
    problem = "was made with catalog = 'log', this run has 'titles'"
    assert problem in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_with_the_catalog_of_the_titles_is_served(ratings: Path, tmp_path: Path) -> None:
    """Histories are read without the option; unrated items are candidates and recommended."""
    pytest.importorskip("hstu_attn._host", reason="_host has not been built")
    pytest.importorskip("uvicorn")
    pytest.importorskip("fastapi")
    from recommender import serve_options
    from recommender.server import make_engine

    out = tmp_path / "run"
    assert run(ratings, out, *TITLES, "--no-baselines") == 0
    saved = load_model(out / "best.pt", CPU)
    log, with_titles = open_event_log(ratings), open_event_log(ratings, catalog="titles")
    given = ["--model", str(out / "best.pt"), "--data", str(ratings)]
    with make_engine(serve_options.parse_arguments(None, given), saved) as engine:
        [stored] = engine.store.read([5], [0])
        latest = slice(*log.offsets[4:6])
        kept = stored.events[:, 0]
        assert kept.tolist() == with_titles.items[latest][-len(kept) :].tolist()
        assert (
            saved.item_ids[kept].tolist() == log.item_ids[log.items[latest]][-len(kept) :].tolist()
        )
        whole = engine.recommend(5, [], log.num_items + 3, exclude_seen=False)
    assert {*UNRATED} <= {*saved.item_ids[whole.items].tolist()}


@pytest.mark.parametrize("content", [None, b"", b"1::lost\n2::field\n"])
def test_titles_that_are_wanted_and_absent(
    ratings: Path, tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    titles = tmp_path / "movies.dat"
    titles.unlink()
    if content is not None:
        titles.write_bytes(content)
    assert run(ratings, tmp_path / "run", *TITLES) == 1
    printed = capsys.readouterr().err
    wanted = f"a file of titles {titles}, got none" if content is None else f"titles in {titles}"
    assert f'error: --catalog titles (catalog="titles"): expected {wanted}' in printed
    assert content != b"1::lost\n2::field\n" or "got 2 malformed lines" in printed
    assert not list(tmp_path.glob("hstu_cache/ratings*"))
    assert run(ratings, tmp_path / "other", "--no-baselines") == 0


def test_refuses_other_catalogs_and_layouts(ratings: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="catalog: expected one of log, titles, got 'all'"):
        open_event_log(ratings, catalog="all")  # type: ignore[arg-type]
    reviews = tmp_path / "reviews.csv"
    reviews.write_text("A0000000000001,0000000001,5.0,1300000000\n")
    with pytest.raises(
        ValueError, match=r"--catalog titles .* got .*csv of the layout amazon-2014"
    ):
        open_event_log(reviews, catalog="titles")
