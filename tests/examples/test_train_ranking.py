"""Tests of the ranking example: a run that learns, runs that are killed, and runs that stop."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import train_ranking
from recommender.processes import ALONE, Processes
from recommender.ranking import load_ranking_model, ranking_loss
from recommender.ranking_data import RankingBatch, RankingData
from recommender.scalars import Scalars
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from hstu_attn.data import ACTIONS, open_event_log
from hstu_attn.data.synthetic import write_synthetic_movielens
from hstu_attn.data.synthetic_layouts import (
    KUAIRAND_HEADER,
    write_synthetic_amazon,
    write_synthetic_kuairand,
)
from hstu_attn.distributed import Checkpoints
from tests.helpers.checkpoint_files import newest_checkpoint
from tests.helpers.paths import EXAMPLES

STEPS = 24
SMALL = [
    *("--dim", "16", "--layers", "1", "--history", "12", "--targets", "6", "--held-out", "3"),
    *("--sequences-per-batch", "8", "--steps", str(STEPS), "--eval-every", "8"),
    *("--checkpoint-every", "4", "--warmup-steps", "5", "--device", "cpu"),
    *("--learning-rate", "1e-3"),
]
SIZE = {"num_users": 40, "num_items": 100, "mean_events": 24}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Limits torch to one thread: more do not speed up small tensors, and may wait for a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    paths = write_synthetic_kuairand(tmp_path_factory.mktemp("data"), **SIZE)
    return ["--data", *map(str, paths)]


def curves(directory: Path) -> dict[str, dict[int, float]]:
    """Returns the points of each curve, as TensorBoard reads them; each step occurs once."""
    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    accumulator.Reload()
    found = {}
    for tag in accumulator.Tags()["scalars"]:
        points = [(point.step, point.value) for point in accumulator.Scalars(tag)]
        found[tag] = dict(points)
        assert len(points) == len(found[tag]), f"{tag} has a step twice"
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_a_run_from_end_to_end(
    logs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    tasks = ["--tasks", "long_view", "is_click=0.5"]
    arguments = [*SMALL, *logs, "--out", str(out), "--bf16", *tasks]
    assert train_ranking.main(arguments) == 0
    printed = capsys.readouterr().out
    for text in (
        "events of 40 users on",
        "Training on the CPU, layers in bfloat16\n",
        "step    16  loss",
        "Test: the last events",
        "item rate ",
    ):
        assert text in printed
    rows = json.loads((out / "metrics.json").read_text())
    assert list(rows) == ["base rate", "item rate", "item and user rate", "HSTU"]
    assert rows["base rate"]["auc/long_view"] == 0.5
    assert f"{rows['HSTU']['ne/is_click']:.4f}" in printed
    history = json.loads((out / "history.json").read_text())
    assert len(history["losses"]) == STEPS
    assert list(history["validation"]) == ["8", "16", "24"]
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")

    # The file of the best model holds the whole model.
    model = load_ranking_model(out / "best.pt", torch.device("cpu"))
    assert model.compute_dtype == torch.bfloat16
    assert model.config.tasks == ("long_view", "is_click")
    data = RankingData(open_event_log([Path(path) for path in logs[1:]]), 12, 6, 3, 1000)
    again = train_ranking.evaluate_split(
        model, data, model.config.tasks, "test", torch.device("cpu")
    )
    assert again == rows["HSTU"]

    # TensorBoard has the same numbers.
    shown = curves(out / "tensorboard")
    assert list(shown["train/loss"]) == list(range(1, STEPS + 1))
    assert list(shown["train/loss"].values()) == pytest.approx(history["losses"], rel=1e-6)
    rates = [1e-3 * min(1, step / 5) for step in range(1, STEPS + 1)]
    rates = [r * (1 + math.cos(math.pi * n / STEPS)) / 2 for n, r in enumerate(rates)]
    assert list(shown["train/learning_rate"].values()) == pytest.approx(rates, rel=1e-5)
    for name in ("gradient_norm", "tokens_per_second"):
        assert len(shown[f"train/{name}"]) == STEPS
        assert min(shown[f"train/{name}"].values()) > 0
    for step, metrics in history["validation"].items():
        for name, value in metrics.items():
            assert shown[f"validation/{name}"][int(step)] == pytest.approx(value, rel=1e-6)

    # A finished run is only reported.
    assert train_ranking.main([*arguments, "--resume"]) == 0
    assert f"Continuing after step {STEPS} of {STEPS}" in capsys.readouterr().out
    assert json.loads((out / "metrics.json").read_text()) == rows
    assert curves(out / "tensorboard") == shown

    # A run is not resumed with other options.
    assert train_ranking.main([*arguments, "--resume", "--targets", "5"]) == 1
    assert "was made with targets = 6, this run has 5" in capsys.readouterr().err


@pytest.mark.slow
def test_kuairand_as_in_public_examples(tmp_path: Path) -> None:
    """Eight tasks, 100 candidates, and histories of 4,096 events, which one user has."""
    generator = random.Random(0)
    lines = [KUAIRAND_HEADER + "\n"]
    for user, count in enumerate((4450, 310, 40)):
        for number in range(count):
            values = dict.fromkeys(KUAIRAND_HEADER.split(","), 0)
            values |= {"user_id": user, "video_id": generator.randrange(50), "date": 20220408}
            values |= {"time_ms": 1_650_000_000_000 + 1000 * number}
            values |= {action: int(generator.random() < 0.3) for action in ACTIONS}
            lines.append(",".join(map(str, values.values())) + "\n")
    path = tmp_path / "log_standard_4_08_to_4_21_27k_part1.csv"
    path.write_text("".join(lines))
    out = tmp_path / "run"
    arguments = [
        *("--data", str(path), "--out", str(out), "--device", "cpu", "--dim", "8", "--heads", "1"),
        *("--layers", "1", "--steps", "2", "--eval-every", "2", "--sequences-per-batch", "2"),
        *("--history", "4096", "--targets", "100", "--held-out", "100", "--tasks", *ACTIONS),
    ]
    assert train_ranking.main(arguments) == 0
    rows = json.loads((out / "metrics.json").read_text())
    metrics = {f"{metric}/{action}" for metric in ("auc", "ne") for action in ACTIONS}
    assert all(metrics <= set(row) for row in rows.values())
    model = load_ranking_model(out / "best.pt", torch.device("cpu"))
    assert model.config.tasks == ACTIONS
    assert model.config.max_rows == 3 + 2 * 4096 + 100
    data = RankingData(open_event_log(path), 4096, 100, 100, 1000)
    lengths = data.windows("test").lengths
    assert lengths.tolist() == [model.config.max_rows, 3 + 2 * 210 + 100, 3 + 2 * 21 + 19]


@pytest.mark.slow
def test_ratings_divided_by_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ratings = write_synthetic_movielens(tmp_path, **SIZE)
    out = tmp_path / "run"
    arguments = [*SMALL, "--data", str(ratings), "--out", str(out), "--held-out-share", "0.1"]
    assert train_ranking.main(arguments) == 0
    log = open_event_log(ratings)
    start = np.sort(log.timestamps)[-round(0.1 * log.num_events)]
    late = np.add.reduceat(log.timestamps >= start, log.offsets[:-1], dtype=np.int64)
    expected = f"Test: the last events of {np.count_nonzero(late)} users, {late.sum()} in all."
    assert expected in capsys.readouterr().out
    rows = json.loads((out / "metrics.json").read_text())
    assert list(rows) == ["base rate", "item rate", "item and user rate", "HSTU"]
    assert set(rows["HSTU"]) == {"auc/rating_4", "ne/rating_4", "auc/rating_5", "ne/rating_5"}
    # A run cannot be resumed with other held-out events.
    assert train_ranking.main([*arguments[:-1], "0.2", "--resume"]) == 1
    assert "was made with held_out_share = 0.1, this run has 0.2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train_ranking.parse_arguments([*arguments[:-1], "0.5"])
    assert "--held-out-share must be above 0 and below 0.5, got 0.5" in capsys.readouterr().err


@pytest.mark.slow
def test_it_learns_what_no_rate_tells(tmp_path: Path) -> None:
    """The users' actions depend on a mood that changes at times. Only their latest actions reveal
    it; the rates of items are uninformative, and those of users almost so.
    """
    generator = random.Random(torch.initial_seed())
    lines = []
    for user in range(250):
        mood = generator.random() < 0.5
        for event, item in enumerate(generator.sample(range(60), 40)):
            mood ^= generator.random() < 0.04
            likes = mood ^ (generator.random() < 0.05)
            lines.append(f"{user + 1}::{item + 1}::{5 if likes else 2}::{1_000_000_000 + event}\n")
    ratings = tmp_path / "ratings.dat"
    ratings.write_text("".join(lines))
    out = tmp_path / "run"
    arguments = [
        *("--data", str(ratings), "--out", str(out), "--tasks", "rating_4", "--device", "cpu"),
        *("--dim", "16", "--history", "12", "--targets", "4", "--held-out", "4", "--layers", "1"),
        *("--steps", "200", "--eval-every", "50", "--sequences-per-batch", "16"),
        *("--learning-rate", "1e-2", "--warmup-steps", "20"),
    ]
    assert train_ranking.main(arguments) == 0
    rows = json.loads((out / "metrics.json").read_text())
    auc, entropy = (
        {name: row[f"{of}/rating_4"] for name, row in rows.items()} for of in ("auc", "ne")
    )
    assert auc["HSTU"] > 0.75
    assert auc["HSTU"] > max(auc["item rate"], auc["item and user rate"]) + 0.1
    assert entropy["HSTU"] < min(entropy["item rate"], entropy["item and user rate"]) - 0.1
    losses = json.loads((out / "history.json").read_text())["losses"]
    assert sum(losses[-30:]) < 0.9 * sum(losses[:30])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["amazon", "movielens"])
def test_trains_on_ratings(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if kind == "amazon":
        path = write_synthetic_amazon(tmp_path, **SIZE)
    else:
        path = write_synthetic_movielens(tmp_path, **SIZE)
    arguments = [*SMALL, "--data", str(path), "--out", str(tmp_path / "run"), "--steps", "2"]
    assert train_ranking.main([*arguments, "--target-group-size", "2"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"rating_4 +rating_5\n", printed)
    assert "HSTU " in printed


@pytest.mark.faults
@pytest.mark.slow
def test_a_killed_run_continues_exactly(logs: list[str], tmp_path: Path) -> None:
    def command(out: Path, *more: str) -> list[str]:
        script = str(EXAMPLES / "train_ranking.py")
        return [sys.executable, script, *SMALL, *logs, "--out", str(out), *more]

    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    uninterrupted = subprocess.Popen(command(whole), env=environment, **quiet)
    run = subprocess.Popen(command(killed), env=environment, **quiet)
    while not Checkpoints(killed / "checkpoints").steps():
        assert run.poll() is None
        time.sleep(0.01)
    time.sleep(random.Random(torch.initial_seed()).uniform(0, 0.3))
    run.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    at_kill = max(Checkpoints(killed / "checkpoints").steps())
    assert 0 < at_kill < STEPS

    resumed = subprocess.run(
        command(killed, "--resume"), env=environment, capture_output=True, text=True, check=True
    )
    assert f"Continuing after step {at_kill} of {STEPS}" in resumed.stdout
    assert uninterrupted.wait() == 0
    for name in ("history.json", "metrics.json"):
        assert (killed / name).read_text() == (whole / name).read_text()
    states = [newest_checkpoint(out) for out in (whole, killed)]
    for name, parameter in states[0]["model"].items():
        assert torch.equal(parameter, states[1]["model"][name])
    shown = [curves(out / "tensorboard") for out in (whole, killed)]
    for of_run in shown:
        assert len(of_run.pop("train/tokens_per_second")) == STEPS
    assert shown[0] == shown[1]


@pytest.mark.slow
def test_steps_written_again_are_shown_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "tensorboard"
    clock = time.time
    for n, (steps_done, last, offset) in enumerate(((0, 9, 0), (6, 8, 100), (7, 12, 200))):
        # TensorBoard orders files by the second in their names.
        monkeypatch.setattr(time, "time", lambda later=2 * n: clock() + later)
        scalars = Scalars(directory, steps_done)
        for step in range(steps_done + 1, last + 1):
            scalars.write("train", {"loss": step + offset}, step)
        scalars.close()
    expected = [*range(1, 7), 107, *range(208, 213)]
    assert curves(directory)["train/loss"] == dict(enumerate(expected, start=1))
    Scalars(directory, 0).close()
    assert curves(directory) == {}


@pytest.mark.slow
def test_a_nan_loss_stops_and_spoils_nothing(
    logs: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches: list[RankingBatch] = []
    check = train_ranking.check_ranking_batch

    def keep(batch: RankingBatch, *arguments: Any) -> None:
        check(batch, *arguments)
        batches.append(batch)

    def loss(*arguments: Tensor) -> Tensor:
        return ranking_loss(*arguments) * (math.nan if len(batches) == 7 else 1)

    monkeypatch.setattr(train_ranking, "check_ranking_batch", keep)
    monkeypatch.setattr(train_ranking, "ranking_loss", loss)
    assert train_ranking.main([*SMALL, *logs, "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "error: the loss is nan and the norm of its gradient nan at step 7 (epoch 0" in error
    assert "Not finite are the weights of none and the gradients of position, time, " in error
    assert f"The batch is in {tmp_path / 'bad-batch.pt'}" in error
    saved = torch.load(tmp_path / "bad-batch.pt", weights_only=True)
    assert saved["step"] == 7
    for name, tensor in saved["batch"].items():
        assert torch.equal(tensor, getattr(batches[6], name))
    assert Checkpoints(tmp_path / "checkpoints").steps() == [4]
    state = newest_checkpoint(tmp_path)
    assert all(parameter.isfinite().all() for parameter in state["model"].values())

    # Once the cause is removed, the run continues from there.
    monkeypatch.setattr(train_ranking, "ranking_loss", ranking_loss)
    arguments = [*SMALL, *logs, "--out", str(tmp_path), "--resume"]
    assert train_ranking.main(arguments) == 0
    assert "Continuing after step 4 of 24" in capsys.readouterr().out


def test_a_malformed_batch_stops(
    logs: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch_of, drawn = RankingData.batch, 0

    def spoilt(data: RankingData, windows: Any) -> RankingBatch:
        nonlocal drawn
        batch = batch_of(data, windows)
        if len(windows) == 8:  # the batch of a training step
            drawn += 1
            batch.target_items[2] += data.log.num_items * (drawn == 5)
        return batch

    monkeypatch.setattr(RankingData, "batch", spoilt)
    assert train_ranking.main([*SMALL, *logs, "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert re.search(r"malformed batch at step 5 \(epoch 0, batch 5, seed 0\): target_items", error)
    assert re.search(r"expected 0 to \d+, got \d+ in row 2$", error.strip())
    assert Checkpoints(tmp_path / "checkpoints").steps() == [4]


def test_refuses_arguments(
    logs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (["--targets", "0"], "--targets must be positive"),
        (["--dim", "20"], "--dim must be a multiple of 8 times --heads"),
    ):
        with pytest.raises(SystemExit):
            train_ranking.main(arguments)
        assert message in capsys.readouterr().err
    for tasks, message in (
        (["rating_4"], "must be different ones of is_click, is_like, .*, got rating_4"),
        (["is_click", "is_click=2"], "must be different ones of .* got is_click=2"),
        (["is_click=much"], "must have positive weights, got is_click=much"),
        (["is_click=-1"], "must have positive weights, got is_click=-1"),
    ):
        arguments = [*SMALL, *logs, "--out", str(tmp_path), "--tasks", *tasks]
        assert train_ranking.main(arguments) == 1
        assert re.search(f"error: --tasks {message}", capsys.readouterr().err)


def test_gradients_are_clipped_where_they_are_finite() -> None:
    model = torch.nn.Linear(3, 2)
    gradients = [10 * torch.randn_like(parameter) for parameter in model.parameters()]
    norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()

    def clip(largest: float) -> tuple[Tensor, list[Tensor]]:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        before = Processes().clip_gradients(model, largest)
        return before, [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]

    for largest, factor in ((float(norm) / 4, 0.25), (float(norm) * 4, 1.0)):
        before, clipped = clip(largest)
        torch.testing.assert_close(before, norm)
        for gradient, expected in zip(clipped, gradients, strict=True):
            torch.testing.assert_close(gradient, factor * expected)
    gradients[1][0] = math.inf
    before, clipped = clip(1.0)
    assert before.isinf()
    assert all(map(torch.equal, clipped, gradients))


def test_gradients_of_ranks_are_those_of_one(logs: list[str], tmp_path: Path) -> None:
    """The ranks' gradients add up to those of one process, because losses are sums."""
    arguments = [*SMALL, *logs, "--dropout", "0", "--out", str(tmp_path)]
    options = train_ranking.parse_arguments(arguments)
    data = RankingData(open_event_log([Path(path) for path in logs[1:]]), 12, 6, 3, 1000)

    def trainer(rank: int, num_ranks: int) -> train_ranking.RankingTrainer:
        processes = Processes(replace(ALONE, rank=rank, num_ranks=num_ranks))
        weights = {"is_click": 1.0, "long_view": 0.3}
        return train_ranking.RankingTrainer(options, data, weights, torch.device("cpu"), processes)

    def gradient(run: train_ranking.RankingTrainer, batch: RankingBatch) -> tuple[Tensor, Tensor]:
        loss, count = run.loss(batch)
        grads = torch.autograd.grad(loss, list(run.model.parameters()))
        return torch.cat([grad.flatten() for grad in grads]), count

    alone, ranks = trainer(0, 1), [trainer(rank, 3) for rank in range(3)]
    for _ in range(3):
        whole = alone.draw()
        expected, count = gradient(alone, whole)
        shares = [gradient(run, run.draw()) for run in ranks]
        assert sum(int(part) for _, part in shares) == int(count)
        total = torch.stack([part for part, _ in shares]).sum(dim=0)
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-6)


def test_retrieval_has_curves_too(tmp_path: Path) -> None:
    import train_retrieval

    ratings = write_synthetic_movielens(tmp_path, **SIZE)
    out = tmp_path / "run"
    arguments = [
        *("--data", str(ratings), "--out", str(out), "--device", "cpu", "--dim", "16"),
        *("--layers", "1", "--max-seq-len", "12", "--tokens-per-batch", "128", "--steps", "6"),
        *("--eval-every", "3", "--negatives", "16"),
    ]
    assert train_retrieval.main(arguments) == 0
    history = json.loads((out / "history.json").read_text())
    shown = curves(out / "tensorboard")
    assert list(shown["train/loss"].values()) == pytest.approx(history["losses"], rel=1e-6)
    for name in ("hit_rate_10", "hit_rate_50", "ndcg_10"):
        expected = {int(step): row[name] for step, row in history["validation"].items()}
        assert shown[f"validation/{name}"] == pytest.approx(expected, rel=1e-6)
