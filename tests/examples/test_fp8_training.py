"""Tests of the examples in FP8, and of the benchmark that compares them with bf16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import train_retrieval
from recommender.ranking import RankingConfig
from recommender.saved import load_model

from benchmarks import fp8_training, plots
from hstu_attn import FP8, Quantization
from hstu_attn.data.synthetic import write_synthetic_movielens

SMALL = [
    *("--dim", "32", "--layers", "1", "--max-seq-len", "30", "--tokens-per-batch", "256"),
    *("--negatives", "32", "--eval-every", "20", "--warmup-steps", "5"),
]


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic_movielens(tmp_path_factory.mktemp("data"), 50, 120, 25)


RECIPE = """
dim = 64
heads = 1
layers = 1
dropout = 0.2
max-seq-len = 30
sequences-per-batch = 8
learning-rate = 4e-3
warmup-steps = 5
negatives = 32
eval-every = "epoch"
"""


@pytest.mark.slow
def test_precisions_side_by_side(ratings, tmp_path, capsys):
    """FP8 changes the losses, but much less than training reduces them."""
    path, recipe, runs = tmp_path / "fp8.json", tmp_path / "small.toml", tmp_path / "runs"
    recipe.write_text(RECIPE)
    given = ["--data", str(ratings), "--recipe", str(recipe), "--device", "cpu", "--seeds", "1"]
    more = ["--epochs", "3", "--shared", "--runs", str(runs), "--json", str(path)]
    assert fp8_training.main([*given, *more]) == 0
    printed = capsys.readouterr().out
    fp8 = ("attention", "attention", "attention and linears")
    for n, text in enumerate(("", *(f", {what} in FP8" for what in fp8))):
        without = ", without smooth_k" if n == 2 else ""
        assert f"Training on the CPU, layers in bfloat16{text}{without}\n" in printed
    records = {record["precision"]: record for record in json.loads(path.read_text())}
    assert list(records) == list(fp8_training.PRECISIONS)
    losses = {}
    for name, options in fp8_training.PRECISIONS.items():
        (out,) = runs.glob(f"*.toml {' '.join(options)}/seed-0")
        losses[name] = torch.tensor(json.loads((out / "history.json").read_text())["losses"])
        of_epochs = [part.mean().item() for part in losses[name].tensor_split(3)]
        record = records[name]
        assert record["losses"] == pytest.approx(of_epochs, rel=1e-3)
        assert record["of_seeds"]["0"]["loss"] == pytest.approx(of_epochs[-1], abs=1e-5)
        assert record["of_seeds"]["0"]["ndcg_10"] == record["mean"]["ndcg_10"]
        assert (len(record["curve"]), record["curve_split"]) == (3, "validation")
    fall = records["bf16"]["losses"][0] - records["bf16"]["losses"][-1]
    assert fall > 1
    for name in list(records)[1:]:
        difference = (losses[name] - losses["bf16"]).abs()
        assert (difference > 0).float().mean() > 0.9, name
        assert difference[0] < 0.01 * fall, name  # the same weights, batch and negatives
        assert difference.max() < 0.05 * fall, name
    is_other = losses["attention"] != losses["attention without smooth_k"]
    assert is_other.float().mean() > 0.9
    assert plots.draw(path, tmp_path)[0].read_bytes()[:4] == b"\x89PNG"


def test_a_model_trained_in_fp8_in_a_file(ratings, tmp_path):
    out = tmp_path / "run"
    run = ["--data", str(ratings), "--out", str(out), "--steps", "4", "--no-baselines"]
    assert train_retrieval.main([*SMALL, *run, "--device", "cpu", "--fp8", "layer"]) == 0
    cpu = torch.device("cpu")
    trained = load_model(out / "best.pt", cpu).model
    assert trained.config.fp8 == FP8(Quantization(smooth_k=True), linears=True)
    assert trained.compute_dtype == torch.bfloat16
    served = load_model(out / "best.pt", cpu, fp8=False).model
    assert served.config.fp8 is None
    assert served.state_dict().keys() == trained.state_dict().keys()


def test_a_ranking_model_has_layers_in_fp8():
    sizes = {"dim": 32, "heads": 2, "layers": 1, "max_history": 5, "max_targets": 2}
    fp8 = FP8(linears=True)
    tables = {"sizes": {"item": 5}, "actions": ("is_click",), "tasks": ("is_click",)}
    config = RankingConfig(**tables, **sizes, fp8=fp8)
    assert config.layer.fp8 == fp8
