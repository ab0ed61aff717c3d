"""Tests of retrieval training in batches of a fixed number of users, with their latest events."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import train_retrieval

from hstu_attn.data import open_event_log
from hstu_attn.data.synthetic import write_synthetic_movielens
from tests.helpers.interrupted import interrupted_at

SMALL = [
    *("--dim", "16", "--layers", "1", "--max-seq-len", "20", "--negatives", "16"),
    *("--device", "cpu", "--no-baselines"),
]


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic_movielens(tmp_path_factory.mktemp("data"), 300, 160, 40)


def test_the_last_of_both_sizes_counts() -> None:
    tokens, sequences = "--tokens-per-batch", "--sequences-per-batch"
    for arguments, expected in (
        ([], (2048, None)),
        ([tokens, "64"], (64, None)),
        ([sequences, "8"], (None, 8)),
        ([sequences, "8", tokens, "64"], (64, None)),
        ([tokens, "64", sequences, "8"], (None, 8)),
    ):
        options = train_retrieval.parse_arguments(arguments)
        assert (options.tokens_per_batch, options.sequences_per_batch) == expected


@pytest.mark.slow
def test_sequences_are_the_latest_and_padded_to_few_shapes(ratings: Path, tmp_path: Path) -> None:
    """Each shape needs a graph, so there must be few shapes."""
    log = open_event_log(ratings)
    more = ["--sequences-per-batch", "64", "--epochs", "6", "--graph", "--out", str(tmp_path)]
    options = train_retrieval.parse_arguments([*SMALL, *more])
    trainer = train_retrieval.RetrievalTrainer(options, log, torch.device("cpu"))
    assert trainer.steps == 6 * 5  # 300 users in batches of 64
    shapes = set()
    for _ in range(6):
        users: list[int] = []
        for _ in range(5):
            batch = trainer.draw()
            for user, end in zip(batch.users.tolist(), batch.seq_offsets[1:].tolist(), strict=True):
                assert int(batch.target_items[end - 1]) == log.items[log.offsets[user + 1] - 3]
            assert int(batch.seq_offsets.diff().max()) <= 20
            users += batch.users.tolist()
            padded = batch.padded()
            shapes.add((len(padded.users), len(padded.items)))
        assert sorted(users) == list(range(300))
    assert len(shapes) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["--graph", "--no-graph"])
def test_an_interrupted_run_continues_exactly(ratings: Path, tmp_path: Path, graph: str) -> None:
    more = ["--sequences-per-batch", "64", "--epochs", "3", "--checkpoint-every", "4", graph]

    def run(out: Path, *last: str) -> int:
        return train_retrieval.main(
            [*SMALL, *more, "--data", str(ratings), "--out", str(out), *last]
        )

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert run(whole) == 0
    with interrupted_at(10):
        assert run(stopped) == 130
    assert run(stopped, "--resume") == 0
    for name in ("history.json", "metrics.json"):
        assert json.loads((stopped / name).read_text()) == json.loads((whole / name).read_text())
