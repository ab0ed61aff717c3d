"""Tests of the retrieval example: metrics and baselines against brute force, a run from end to
end, and runs that are killed.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import train_retrieval
from matplotlib.image import imread
from recommender import evaluation
from recommender import model as model_module
from recommender.baselines import CoOccurrence, Popularity, co_occurrence_candidates
from recommender.curves import plot_curves
from recommender.evaluation import (
    Evaluation,
    Metrics,
    metrics_of_ranks,
    ranks_of_targets,
)
from recommender.model import RetrievalModel, sampled_softmax_loss
from recommender.saved import load_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hstu_attn import HSTULayerConfig, ops
from hstu_attn.data import EventLog, JaggedBatch, held_out_windows, jagged_batch, open_event_log
from hstu_attn.data.synthetic import write_synthetic_movielens
from hstu_attn.distributed import Checkpoints
from tests.helpers.checkpoint_files import newest_checkpoint
from tests.helpers.paths import EXAMPLES

SMALL = [
    *("--dim", "16", "--layers", "1", "--max-seq-len", "30", "--tokens-per-batch", "256"),
    *("--negatives", "32", "--steps", "24", "--eval-every", "8", "--checkpoint-every", "4"),
    *("--device", "cpu"),
]


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic_movielens(tmp_path_factory.mktemp("data"), 50, 120, 25)


@pytest.fixture(scope="module")
def log(ratings: Path) -> EventLog:
    return open_event_log(ratings)


def histories(log: EventLog) -> list[list[int]]:
    return [log.items[a:b].tolist() for a, b in pairwise(log.offsets)]


def ranking(scores: Tensor) -> list[int]:
    """Returns the items, best first."""
    return sorted(range(len(scores)), key=scores.tolist().__getitem__, reverse=True)


def brute_force_metrics(rankings: list[list[int]], targets: list[int]) -> dict[str, float]:
    sums = dict.fromkeys((field.name for field in fields(Metrics)), 0.0)
    for order, target in zip(rankings, targets, strict=True):
        rank = 1 + order.index(target)
        sums["mrr"] += 1 / rank
        for k in (10, 50, 200):
            if rank <= k:
                sums[f"hit_rate_{k}"] += 1
                sums[f"ndcg_{k}"] += 1 / math.log2(rank + 1)
    return {name: total / len(targets) for name, total in sums.items()}


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize("has_kernels", [False, True])
def test_auto_is_a_gpu_with_kernels(
    has_gpu: bool, has_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(ops, "has_cuda_kernels", lambda: has_kernels)
    expected = "cuda" if has_gpu and has_kernels else "cpu"
    assert train_retrieval.choose_device("auto") == torch.device(expected)


def test_metrics_against_brute_force() -> None:
    scores = torch.randn(200, 400)
    targets = torch.randint(400, (200,))
    rankings = [ranking(row) for row in scores]
    metrics = asdict(metrics_of_ranks(ranks_of_targets(scores, targets)))
    assert metrics == pytest.approx(brute_force_metrics(rankings, targets.tolist()), rel=1e-6)
    assert metrics["hit_rate_10"] < metrics["hit_rate_50"] < metrics["hit_rate_200"] < 1


def test_ranks_of_ties_and_nan() -> None:
    scores = torch.tensor(
        [[3.0, 2.0, 1.0], [1.0, 1.0, 1.0], [math.nan, 1.0, 0.0], [5.0, math.nan, 1]]
    )
    ranks = ranks_of_targets(scores, torch.tensor([0, 1, 0, 2]))
    assert ranks.tolist() == [1.0, 2.0, 3.0, 3.0]


def test_a_target_that_the_ranking_leaves_out_is_a_miss() -> None:
    """This also holds if the catalog is small, and most of it is left out with the target."""
    scores = torch.tensor([[-math.inf, -math.inf, -math.inf, 1.0], [0.0, -math.inf, 2.0, 1.0]])
    metrics = metrics_of_ranks(ranks_of_targets(scores, torch.tensor([0, 0])))
    assert (metrics.hit_rate_200, metrics.mrr) == (0.5, 1 / 6)
    assert metrics.ndcg_200 == pytest.approx(0.25)


@pytest.mark.parametrize("excluded", ["seen", "window", "nothing"])
@pytest.mark.parametrize("split", ["validation", "test"])
@pytest.mark.parametrize("limit", [None, "KEPT_ROWS", "SCORES_PER_BATCH"])
def test_evaluation_against_brute_force(
    log: EventLog,
    split: Any,
    excluded: Any,
    limit: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Random scores may be equal, and then the brute force prefers one of them.
    table = torch.rand(log.num_users, log.num_items).argsort(dim=1).float()
    max_seq_len = 10  # shorter than the histories

    def scorer(batch: JaggedBatch) -> Tensor:
        return table[batch.users]

    if limit is not None:
        monkeypatch.setattr(evaluation, limit, 3 * log.num_items)
    evaluate = Evaluation(
        log,
        held_out_windows(log, split, max_seq_len),
        tokens_per_batch=64,
        excluded=excluded,
        device=torch.device("cpu"),
    )
    metrics = evaluate(scorer)
    assert evaluate(scorer) == metrics  # whether batches are cached or made again
    assert (evaluate._kept is None) == (limit == "KEPT_ROWS")
    rankings, targets = [], []
    for user, events in enumerate(histories(log)):
        end = len(events) - (1 if split == "test" else 2)
        start = {"seen": 0, "window": max(0, end - max_seq_len), "nothing": end}[excluded]
        left_out = set(events[start:end])
        rankings.append([item for item in ranking(table[user]) if item not in left_out])
        targets.append(events[end])
    expected = brute_force_metrics(rankings, targets)
    assert asdict(metrics) == pytest.approx(expected, rel=1e-6)


def test_baselines_against_brute_force(log: EventLog) -> None:
    events = [history[:-2] for history in histories(log)]
    counts = np.zeros(log.num_items)
    for history in events:
        np.add.at(counts, history, 1)
    batch = jagged_batch(log, held_out_windows(log, "test", max_seq_len=12))
    assert (Popularity(log)(batch) == torch.tensor(counts)).all()

    checked = 0
    for scorer in co_occurrence_candidates(log):
        if (scorer.reach, scorer.backward_weight) not in ((1, 0.0), (5, 0.5)):
            continue
        similarity = brute_force_similarity(events, counts, scorer)
        expected = np.zeros((log.num_users, log.num_items))
        offsets = batch.seq_offsets.tolist()
        for user in range(log.num_users):
            rows = batch.items[offsets[user] : offsets[user + 1]].tolist()
            for age, item in enumerate(reversed(rows)):
                expected[user] += scorer.recency_decay**age * similarity[item]
        np.testing.assert_allclose(scorer(batch).numpy(), expected, rtol=1e-4, atol=1e-6)
        checked += 1
    assert checked == 8


def brute_force_similarity(
    events: list[list[int]], counts: np.ndarray[Any, Any], scorer: CoOccurrence
) -> np.ndarray[Any, Any]:
    similarity = np.zeros((len(counts), len(counts)))
    for history in events:
        for i, first in enumerate(history):
            for distance, later in enumerate(history[i + 1 : i + 1 + scorer.reach], start=1):
                similarity[first, later] += 1 / distance
                similarity[later, first] += scorer.backward_weight / distance
    return similarity / np.sqrt(np.outer(np.maximum(counts, 1), np.maximum(counts, 1)))


def small_model(l2_normalize: bool = True) -> RetrievalModel:
    config = HSTULayerConfig.research(
        embedding_dim=16, num_heads=2, linear_dim=8, attention_dim=8, max_sequence_len=12
    )
    return RetrievalModel(7, config, 1, 12, 0.0, l2_normalize)


@pytest.mark.parametrize("l2_normalize", [True, False])
@pytest.mark.parametrize(
    ("per_row", "few_items", "part"),
    [
        (False, 0, 2**24),
        *((True, 0, part) for part in (2**24, 7 * 9 * 16, 1)),
        *((True, 1, part) for part in (2**24, 7 * 7, 1)),
    ],
)
def test_sampled_softmax_loss(
    l2_normalize: bool, per_row: bool, few_items: int, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks losses and gradients, computed in chunks of 40, of 7 and of 1 rows."""
    monkeypatch.setattr(model_module, "PART_ELEMENTS", part)
    monkeypatch.setattr(model_module, "FEW_ITEMS", few_items)
    model = small_model(l2_normalize).double()
    weight = model.item_embedding.weight
    states = torch.randn(40, 16, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(7, (40,))
    factors = torch.randn(40, dtype=torch.float64)  # different gradients of the losses
    torch.manual_seed(0)
    found = sampled_softmax_loss(model, states, targets, 9, 0.5, per_row)
    of_found = torch.autograd.grad((found * factors).sum(), (states, weight))
    torch.manual_seed(0)
    drawn = torch.randint(7, (40, 9) if per_row else (9,)).tolist()
    table = weight / weight.norm(dim=1, keepdim=True) if l2_normalize else weight
    losses = []
    for row, (state, target) in enumerate(zip(states, targets.tolist(), strict=True)):
        negatives = drawn[row] if per_row else drawn
        candidates = [target, *(item for item in negatives if item != target)]
        logits = table[candidates] @ state / 0.5
        losses.append(logits.logsumexp(0) - logits[0])
    expected = torch.stack(losses)
    torch.testing.assert_close(found, expected)
    of_expected = torch.autograd.grad((expected * factors).sum(), (states, weight))
    torch.testing.assert_close(of_found, of_expected)


@pytest.mark.parametrize("few_items", [0, 1])
def test_negatives_per_row_are_taken_in_parts(
    few_items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor of the forward or the backward holds the vectors of all negatives at once."""
    rows, negatives, limit = 200, 50, 2**14
    monkeypatch.setattr(model_module, "PART_ELEMENTS", limit)
    monkeypatch.setattr(model_module, "FEW_ITEMS", few_items)
    model = small_model()
    states = torch.randn(rows, 16, requires_grad=True)
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.numel())
            return result

    with Sizes():
        targets = torch.randint(7, (rows,))
        sampled_softmax_loss(model, states, targets, negatives, 0.5, True).sum().backward()
    assert rows * negatives < largest <= limit < rows * negatives * 16


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
@pytest.mark.parametrize("baselines", [{}, {"popularity": {"ndcg_10": 0.2}}])
def test_the_picture_of_a_run_of_one_step(
    baselines: dict[str, dict[str, float]], tmp_path: Path
) -> None:
    """It shows the metric, and a line for the baseline where there is one."""
    path = tmp_path / "curves.png"
    plot_curves(path, [2.0], {1: {"ndcg_10": 0.1}}, baselines, {"ndcg_10": "NDCG@10"}, "loss")
    right_half = imread(path)[:, 660:, :3]
    assert right_half.shape == (504, 660, 3)
    is_blue = right_half[..., 2] - right_half[..., 0] > 0.2
    longest = int(is_blue.sum(axis=1).max())
    assert (longest > 100) == bool(baselines)  # a dashed line, or the label alone
    assert longest > 20


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_a_run_from_end_to_end(
    ratings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    arguments = [*SMALL, "--data", str(ratings), "--out", str(out), "--show-user", "3", "--bf16"]
    assert train_retrieval.main(arguments) == 0
    printed = capsys.readouterr().out
    for text in (
        "events of 50 users on",
        "Training on the CPU, layers in bfloat16\n",
        "step    16  loss",
        "popularity ",
        "co-occurrence ",
        "HSTU ",
        "User 3\n",
        "Watched next: The ",
    ):
        assert text in printed
    rows = json.loads((out / "metrics.json").read_text())
    assert set(rows) == {"popularity", "co-occurrence", "HSTU"}
    assert f"{rows['HSTU']['ndcg_10']:.4f}" in printed
    history = json.loads((out / "history.json").read_text())
    assert len(history["losses"]) == 24
    assert list(history["validation"]) == ["8", "16", "24"]
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")

    # The file of the best model holds the whole model and its catalog.
    saved = load_model(out / "best.pt", torch.device("cpu"))
    log = open_event_log(ratings)
    assert (saved.item_ids == log.item_ids).all()
    assert saved.titles == log.titles
    evaluate = Evaluation(
        log,
        held_out_windows(log, "test", 30),
        tokens_per_batch=16384,
        excluded="seen",
        device=torch.device("cpu"),
    )
    assert asdict(evaluate(saved.model.scores)) == rows["HSTU"]
    assert saved.model.compute_dtype == torch.bfloat16

    # A finished run is only reported.
    assert train_retrieval.main([*arguments, "--resume"]) == 0
    assert "Continuing after step 24 of 24" in capsys.readouterr().out
    assert json.loads((out / "metrics.json").read_text()) == rows

    # A run is not resumed with other options.
    assert train_retrieval.main([*arguments, "--resume", "--dropout", "0.5"]) == 1
    assert "was made with dropout = 0.2, this run has 0.5" in capsys.readouterr().err


def test_other_files_are_not_taken_for_a_model(tmp_path: Path) -> None:
    path = tmp_path / "other.pt"
    torch.save({"weight": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"other\.pt is not a model that train_retrieval\.py"):
        load_model(path, torch.device("cpu"))


@pytest.mark.faults
@pytest.mark.slow
def test_a_killed_run_continues_exactly(ratings: Path, tmp_path: Path) -> None:
    def command(out: Path, *more: str) -> list[str]:
        script = str(EXAMPLES / "train_retrieval.py")
        return [sys.executable, script, *SMALL, "--data", str(ratings), "--out", str(out), *more]

    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    uninterrupted = subprocess.Popen(
        command(whole), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    run = subprocess.Popen(
        command(killed), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not Checkpoints(killed / "checkpoints").steps():
        assert run.poll() is None
        time.sleep(0.01)
    run.send_signal(signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    at_kill = max(Checkpoints(killed / "checkpoints").steps())
    assert 0 < at_kill < 24

    resumed = subprocess.run(
        command(killed, "--resume"), env=environment, capture_output=True, text=True, check=True
    )
    assert f"Continuing after step {at_kill} of 24" in resumed.stdout
    assert uninterrupted.wait() == 0
    for name in ("history.json", "metrics.json"):
        assert (killed / name).read_text() == (whole / name).read_text()
    states = [newest_checkpoint(out) for out in (whole, killed)]
    for name, parameter in states[0]["model"].items():
        assert torch.equal(parameter, states[1]["model"][name])


def test_a_nan_loss_stops_and_spoils_nothing(
    ratings: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = 0

    def loss(*arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return sampled_softmax_loss(*arguments) * (math.nan if calls == 7 else 1)

    monkeypatch.setattr(train_retrieval, "sampled_softmax_loss", loss)
    assert train_retrieval.main([*SMALL, "--data", str(ratings), "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "error: the loss is nan" in error
    assert re.search(r"at step 7 \(epoch \d+, batch \d+, seed 0\)", error)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [4]
    state = newest_checkpoint(tmp_path)
    assert all(parameter.isfinite().all() for parameter in state["model"].values())


def test_malformed_files_are_reported(
    ratings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoiled = tmp_path / "ratings.dat"
    spoiled.write_bytes(b"1::2::3\n" + ratings.read_bytes() + b"oops\n")
    lines = spoiled.read_bytes().count(b"\n")
    arguments = [*SMALL, "--data", str(spoiled), "--out", str(tmp_path / "run"), "--steps", "1"]
    assert train_retrieval.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "Left out: 2 malformed lines, all listed in" in printed
    expected = "expected 4 fields separated by '::' (user, item, rating, timestamp)"
    assert f"{spoiled}:1: {expected}, got 3: '1::2::3'" in printed
    assert f"{spoiled}:{lines}: {expected}, got 1: 'oops'" in printed

    spoiled.write_bytes(b"nothing of use\n")
    assert train_retrieval.main([*arguments, "--out", str(tmp_path / "other")]) == 1
    assert "no user with at least 3 events" in capsys.readouterr().err
    absent = ["--data", str(tmp_path / "absent.csv"), "--out", str(tmp_path / "none")]
    assert train_retrieval.main(absent) == 1
    assert "absent.csv" in capsys.readouterr().err


def test_refuses_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--dim", "20"], "--dim must be a multiple of 8 times --heads"),
        (["--tokens-per-batch", "0"], "--tokens-per-batch must be positive"),
        (["--temperature", "-1"], "--temperature must be positive"),
    ):
        with pytest.raises(SystemExit):
            train_retrieval.main(arguments)
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_damaged_checkpoints(
    ratings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run continues from the newest checkpoint that can be read."""
    arguments = [*SMALL, "--data", str(ratings), "--out", str(tmp_path)]
    assert train_retrieval.main(arguments) == 0
    last, previous = (tmp_path / "checkpoints" / f"step-{step:012d}" for step in (24, 20))
    tensors = next(last.glob("*.distcp"))
    tensors.write_bytes(tensors.read_bytes()[:100])
    history = (tmp_path / "history.json").read_text()
    capsys.readouterr()
    assert train_retrieval.main([*arguments, "--resume"]) == 0
    printed = capsys.readouterr()
    assert "the checkpoint of step 24 cannot be read" in printed.err
    assert "Continuing after step 20 of 24" in printed.out
    assert (tmp_path / "history.json").read_text() == history
    for directory in (last, previous):
        (directory / "run.pt").write_bytes(b"")
    assert train_retrieval.main([*arguments, "--resume"]) == 1
    assert re.search(r"error: no checkpoint in .* can be read", capsys.readouterr().err)
