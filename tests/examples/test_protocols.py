"""Tests of the retrieval example's protocols: the split into training and test events, the time of
evaluation, and the report of one seed and of several."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import train_retrieval
from recommender.evaluation import Evaluation
from recommender.saved import load_model
from recommender.seeds import summarize

from hstu_attn.data import held_out_windows, open_event_log
from hstu_attn.data.synthetic import write_synthetic_movielens
from tests.helpers.interrupted import interrupted_at

SMALL = [
    *("--dim", "16", "--layers", "1", "--max-seq-len", "20", "--negatives", "16"),
    *("--sequences-per-batch", "32", "--warmup-steps", "2", "--device", "cpu", "--no-baselines"),
    *("--epochs", "4", "--eval-every", "epoch", "--checkpoint-every", "epoch"),
]
STEPS = [str(4 * epoch) for epoch in range(1, 5)]  # 100 users in batches of 32
PUBLISHED = ("--protocol", "published")


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic_movielens(tmp_path_factory.mktemp("data"), 100, 120, 25)


def run(ratings: Path, out: Path, *more: str) -> int:
    return train_retrieval.main([*SMALL, "--data", str(ratings), "--out", str(out), *more])


@pytest.mark.slow
def test_published_tests_after_each_epoch(
    ratings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model reads all but the last event; the last and the best epoch are named."""
    assert run(ratings, tmp_path, *PUBLISHED) == 0
    printed = capsys.readouterr().out
    history = json.loads((tmp_path / "history.json").read_text())
    assert list(history) == ["losses", "test"]
    assert list(history["test"]) == STEPS
    for epoch, metrics in enumerate(history["test"].values(), 1):
        assert f"epoch {epoch:3}  loss " in printed
        assert f"test HR@10 {metrics['hit_rate_10']:.4f}" in printed
    rows = json.loads((tmp_path / "metrics.json").read_text())
    assert list(rows) == ["HSTU, last epoch", "HSTU, best epoch"]
    assert rows["HSTU, last epoch"] == history["test"][STEPS[-1]]
    best = max(history["test"].values(), key=lambda metrics: metrics["ndcg_10"])
    assert rows["HSTU, best epoch"] == best
    assert "the best epoch is that of the best NDCG@10 here" in printed

    log, device = open_event_log(ratings), torch.device("cpu")
    evaluate = Evaluation(
        log,
        held_out_windows(log, "test", 20),
        tokens_per_batch=4096,
        excluded="seen",
        device=device,
    )
    model = load_model(tmp_path / "best.pt", device).model
    assert asdict(evaluate(model.scores)) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize(("protocol", "held_out"), [("published", 1), ("validated", 2)])
def test_what_is_trained_on(ratings: Path, tmp_path: Path, protocol: str, held_out: int) -> None:
    log = open_event_log(ratings)
    arguments = [*SMALL, "--protocol", protocol, "--out", str(tmp_path)]
    options = train_retrieval.parse_arguments(arguments)
    trainer = train_retrieval.RetrievalTrainer(options, log, torch.device("cpu"))
    for _ in range(4):
        batch = trainer.draw()
        for user, end in zip(batch.users.tolist(), batch.seq_offsets[1:].tolist(), strict=True):
            last = int(log.offsets[user + 1]) - held_out - 1
            assert int(batch.target_items[end - 1]) == log.items[last]


@pytest.mark.slow
def test_the_validated_protocol_tests_once(
    ratings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = []
    evaluate = train_retrieval.RetrievalTrainer.evaluate

    def counted(trainer: Any, split: Any) -> Any:
        evaluated.append(split)
        return evaluate(trainer, split)

    monkeypatch.setattr(train_retrieval.RetrievalTrainer, "evaluate", counted)
    assert run(ratings, tmp_path) == 0
    assert evaluated == ["validation"] * 4 + ["test"]
    assert list(json.loads((tmp_path / "history.json").read_text())["validation"]) == STEPS


@pytest.mark.slow
def test_an_interrupted_published_run_continues_exactly(ratings: Path, tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert run(ratings, whole, *PUBLISHED) == 0
    with interrupted_at(10):
        assert run(ratings, stopped, *PUBLISHED) == 130
    assert run(ratings, stopped, *PUBLISHED, "--resume") == 0
    assert run(ratings, stopped, *PUBLISHED, "--resume") == 0  # a finished run is only reported
    for name in ("history.json", "metrics.json"):
        assert (stopped / name).read_text() == (whole / name).read_text()


@pytest.mark.slow
def test_several_seeds(ratings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Means and spreads are over the runs, each of which equals a single run with its seed."""
    two = (*PUBLISHED, "--seeds", "2", "--seed", "5")
    assert run(ratings, tmp_path / "all", *two) == 0
    printed = capsys.readouterr().out
    tables = []
    for seed in (5, 6):
        alone = tmp_path / f"alone-{seed}"
        assert run(ratings, alone, *PUBLISHED, "--seed", str(seed)) == 0
        text = (alone / "metrics.json").read_text()
        assert (tmp_path / "all" / f"seed-{seed}" / "metrics.json").read_text() == text
        tables.append(json.loads(text))
    found = json.loads((tmp_path / "all" / "seeds.json").read_text())
    assert list(found["seeds"].values()) == tables
    values = [table["HSTU, last epoch"]["ndcg_10"] for table in tables]
    summary = found["summary"]
    mean, spread = statistics.mean(values), statistics.stdev(values)
    assert summary["HSTU, last epoch, mean"]["ndcg_10"] == pytest.approx(mean)
    assert summary["HSTU, last epoch, standard deviation"]["ndcg_10"] == pytest.approx(spread)
    assert spread > 0
    assert f"{mean:.4f}" in printed
    assert "Of 2 seeds, from 5 on." in printed

    # A run that exists is not replaced; --resume continues it.
    capsys.readouterr()
    assert run(ratings, tmp_path / "all", *two) == 1
    assert f"expected a directory without a run; got {tmp_path / 'all' / 'seed-5'}" in (
        capsys.readouterr().err
    )
    assert run(ratings, tmp_path / "alone-5", *two, "--resume") == 1
    assert f"expected a directory without a run; got {tmp_path / 'alone-5'}" in (
        capsys.readouterr().err
    )
    three = (*PUBLISHED, "--seeds", "3", "--seed", "5", "--resume")
    assert run(ratings, tmp_path / "all", *three) == 0
    again = json.loads((tmp_path / "all" / "seeds.json").read_text())
    assert list(again["seeds"].values())[:2] == tables
    assert len(again["seeds"]) == 3


def test_summary_has_the_spread_of_what_differs_alone() -> None:
    tables = [
        {"popularity": {"x": 0.25}, "model": {"x": value}, "of some": {"x": 1.0}}
        for value in (0.1, 0.2, 0.6)
    ]
    del tables[1]["of some"]
    assert summarize(tables) == {
        "popularity": {"x": 0.25},
        "model, mean": {"x": pytest.approx(0.3)},
        "model, standard deviation": {"x": pytest.approx(0.2645751)},
    }
