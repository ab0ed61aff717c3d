"""Tests of the examples in FP8, and of the benchmark that compares them with bf16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import train_retrieval
from recommender.ranking import RankingConfig
from recommender.saved import load_model

from benchmarks import fp8_training
from hstu_attn import FP8, Quantization
from hstu_attn.data.synthetic import write_synthetic_movielens

SMALL = [
    *("--dim", "32", "--layers", "1", "--max-seq-len", "30", "--tokens-per-batch", "256"),
    *("--negatives", "32", "--eval-every", "20", "--warmup-steps", "5"),
]


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic_movielens(tmp_path_factory.mktemp("data"), 50, 120, 25)


@pytest.mark.slow
def test_fp8_learns_what_bf16_learns(ratings, tmp_path, capsys):
    path = tmp_path / "fp8.json"
    run = ["--device", "cpu", "--seeds", "0", "--steps", "40", "--json", str(path)]
    assert fp8_training.main([*run, "--", *SMALL, "--data", str(ratings)]) == 0
    printed = capsys.readouterr().out
    for text in ("", ", attention in FP8", ", attention and linears in FP8"):
        assert f"Training on the CPU, layers in bfloat16{text}\n" in printed
    assert "test_ndcg_10" in printed
    records = {record["precision"]: record for record in json.loads(path.read_text())}
    assert list(records) == ["bf16", "attention", "layer"]
    losses = {name: torch.tensor(record["losses"]) for name, record in records.items()}
    fall = losses["bf16"][0] - losses["bf16"][-1]
    assert fall > 1
    for name in ("attention", "layer"):
        difference = (losses[name] - losses["bf16"]).abs().max()
        assert 0 < difference < 0.03 * fall, name


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


def test_a_failed_run_is_an_error(tmp_path):
    options = ["--data", str(tmp_path / "none"), "--device", "cpu"]
    with pytest.raises(RuntimeError, match=r"train_retrieval.py --data .* failed"):
        fp8_training.train("retrieval", options)
