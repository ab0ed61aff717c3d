"""Tests of the retrieval example on several ranks, which divide the item table and each batch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import train_retrieval
from recommender.saved import load_model

from hstu_attn.data.synthetic import write_synthetic_movielens
from hstu_attn.distributed import Checkpoints
from tests.helpers.distributed_runs import run_ranks
from tests.helpers.paths import EXAMPLES
from tests.helpers.retrieval_ranks import drawn, tables, train
from tests.helpers.torchrun import torchrun

pytestmark = pytest.mark.slow

USERS = 40  # the last batch has one user, so that other ranks have none
ITEMS = 101  # not divisible by the number of ranks
SMALL = [
    *("--dim", "16", "--layers", "1", "--heads", "1", "--max-seq-len", "20", "--negatives", "40"),
    *("--sequences-per-batch", "13", "--dropout", "0", "--eval-every", "4"),
    *("--checkpoint-every", "4", "--schedule", "constant", "--device", "cpu", "--no-baselines"),
]
BEGUN, STEPS = 4, 12
TOLERANCE = {"rel": 1e-4, "abs": 1e-4}  # for other orders of summation, over steps of AdamW
SASREC = ["--model", "sasrec", "--negatives-per", "batch"]
HSTU = ["--negatives-per", "row", "--protocol", "published"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = write_synthetic_movielens(tmp_path_factory.mktemp("data"), USERS, ITEMS, 24)
    return [*SMALL, "--data", str(path)]


def steps_of(data: list[str], out: Path, steps: int, number: int, more: list[str]) -> str:
    """Trains on some ranks up to a step; returns the output of the first rank."""
    arguments = [*data, *more, "--resume", "--out", str(out), "--steps", str(steps)]
    first, *others = run_ranks(number, train, arguments)
    assert [each.error for each in (first, *others)] == [None] * number
    assert [each.printed for each in others] == [""] * (number - 1)
    printed: str = first.printed
    return printed


def read(out: Path, name: str) -> Any:
    return json.loads((out / name).read_text())


@pytest.mark.parametrize(
    ("model", "divided"),
    [(HSTU, "sharded"), (SASREC, "sharded"), (HSTU, "replicated")],
    ids=["hstu, sharded", "sasrec, sharded", "hstu, replicated"],
)
def test_ranks_continue_a_run_as_one(
    model: list[str], divided: str, data: list[str], tmp_path: Path
) -> None:
    """Two and three ranks make the same steps as one; one rank resumes from their checkpoint."""
    torch.set_num_threads(1)
    steps_of(data, tmp_path / "one", BEGUN, 1, model)
    shutil.copytree(tmp_path / "one", tmp_path / "many")
    steps_of(data, tmp_path / "one", STEPS, 1, model)
    more = [*model, "--tables", divided]
    for number, step in ((2, 8), (3, 11), (1, STEPS)):
        printed = steps_of(data, tmp_path / "many", step, number, more)
    assert "Continuing after step 11 of 12" in printed
    one, many = (read(tmp_path / name, "history.json") for name in ("one", "many"))
    assert many["losses"] == pytest.approx(one["losses"], **TOLERANCE)
    assert len(one["losses"]) == STEPS
    assert one["losses"][-1] < one["losses"][0]
    split = "test" if model is HSTU else "validation"
    for step, expected in one[split].items():
        assert many[split][step] == pytest.approx(expected, abs=0.03)  # one of 40 users may change
    assert read(tmp_path / "many", "metrics.json").keys() == (
        read(tmp_path / "one", "metrics.json").keys()
    )


def test_what_a_rank_has(data: list[str], tmp_path: Path) -> None:
    """Each rank has a part of the table and of the optimizer's state; files have the whole."""
    arguments = [*data, *HSTU, "--out", str(tmp_path), "--steps", str(BEGUN)]
    printed = steps_of(data, tmp_path, BEGUN, 2, HSTU)
    assert "watched last (newest first)" in printed
    saved = load_model(tmp_path / "best.pt", torch.device("cpu"))
    assert saved.model.item_embedding.weight.shape == (ITEMS, 16)
    assert saved.model.item_embedding.weight.std().item() == pytest.approx(0.02, rel=0.15)
    for number, owned in ((2, [51, 50]), (3, [34, 34, 33])):
        found = run_ranks(number, tables, [*arguments, "--resume"])
        assert [rows for rows, _, _ in found] == owned
        assert [numbers for _, _, numbers in found] == [16 * rows for rows in owned]
        assert {shape for _, shape, _ in found} == {(USERS, ITEMS)}


def test_each_rank_has_a_part_of_each_batch(data: list[str], tmp_path: Path) -> None:
    arguments = [*data, *HSTU, "--out", str(tmp_path), "--steps", "4"]
    (whole,) = run_ranks(1, drawn, arguments)
    assert list(map(len, whole)) == [13, 13, 13, 1]
    for number in (2, 3):
        parts = run_ranks(number, drawn, arguments)
        for step, users in enumerate(whole):
            assert sorted(user for part in parts for user in part[step]) == sorted(users)
            counts = [len(part[step]) for part in parts]
            assert max(counts) - min(counts) <= 2


def test_scores_of_ranks_are_those_of_one(data: list[str], tmp_path: Path) -> None:
    """The metrics of a finished run are the same where ranks evaluate it again."""
    steps_of(data, tmp_path, STEPS, 1, SASREC)
    expected = read(tmp_path, "metrics.json")
    for number in (2, 3):
        steps_of(data, tmp_path, STEPS, number, SASREC)
        found = read(tmp_path, "metrics.json")
        assert found["SASRec"] == pytest.approx(expected["SASRec"], abs=1e-9)


def test_what_several_ranks_refuse(
    data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    arguments = [*data, "--out", str(tmp_path), "--steps", "1"]
    for more, message in (
        (["--device", "cpu:0"], "--device must be auto, cuda or cpu where torchrun gives each"),
        (["--graph"], "--graph needs a single process, got several that torchrun has started"),
    ):
        for result in run_ranks(2, train, [*arguments, *more]):
            assert (result.error or "").startswith(message)
    monkeypatch.setenv("RANK", "0")
    assert train_retrieval.main([*arguments, "--seeds", "2"]) == 1
    message = "--seeds must be 1 where torchrun has started processes, got 2"
    assert message in capsys.readouterr().err


def test_under_torchrun(data: list[str], tmp_path: Path) -> None:
    """With baselines, which the first process tunes; negatives differ, and the loss falls."""
    out = tmp_path / "run"
    few = [word for word in data if word != "--no-baselines"]
    few += ["--eval-every", "15", "--checkpoint-every", "14"]
    code, printed = torchrun(
        EXAMPLES / "train_retrieval.py", *few, "--out", str(out), "--steps", "30"
    )
    assert code == 0, printed
    assert "Training on 2 x the CPU" in printed
    assert list(read(out, "metrics.json")) == ["popularity", "co-occurrence", "HSTU"]
    losses = read(out, "history.json")["losses"]
    assert sum(losses[-8:]) < 0.97 * sum(losses[:8])
    assert Checkpoints(out / "checkpoints").steps() == [28, 30]
