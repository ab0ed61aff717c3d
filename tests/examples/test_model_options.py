"""Tests of the command-line options that shape the model of either training example."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
import train_ranking
import train_retrieval
from recommender.model import RetrievalModel
from recommender.ranking import load_ranking_model
from recommender.saved import load_model
from torch import nn

from hstu_attn import HSTULayer, HSTULayerConfig
from hstu_attn.data.synthetic import write_synthetic_movielens

COMMON = ["--layers", "1", "--steps", "16", "--warmup-steps", "2", "--device", "cpu"]
OF_EXAMPLE = {
    "train_retrieval": ["--max-seq-len", "30", "--tokens-per-batch", "256", "--negatives", "32"],
    "train_ranking": ["--history", "12", "--targets", "6", "--tasks", "rating_4"],
}


@pytest.mark.slow
@pytest.mark.parametrize("example", [train_retrieval, train_ranking])
@pytest.mark.parametrize("head_dim", [8, 24])
def test_a_head_dim_apart_from_the_width(
    head_dim: int, example: ModuleType, tmp_path: Path
) -> None:
    """A model of width 10 has weights of the given head dim, and is trained, saved and loaded."""
    width, heads = 10, 3
    ratings = write_synthetic_movielens(tmp_path, 50, 120, 25)
    out = tmp_path / "run"
    shape = ["--dim", str(width), "--heads", str(heads), "--head-dim", str(head_dim)]
    paths = ["--data", str(ratings), "--out", str(out), "--no-baselines"]
    assert example.main([*COMMON, *OF_EXAMPLE[example.__name__], *shape, *paths]) == 0
    losses = json.loads((out / "history.json").read_text())["losses"]
    assert all(map(math.isfinite, losses))
    assert sum(losses[-4:]) < sum(losses[:4])
    device, best = torch.device("cpu"), out / "best.pt"
    model: nn.Module = (
        load_model(best, device).model
        if example is train_retrieval
        else load_ranking_model(best, device)
    )
    (layer,) = (module for module in model.modules() if isinstance(module, HSTULayer))
    config = layer.config
    assert (config.embedding_dim, config.num_heads) == (width, heads)
    assert (config.hidden_dim, config.attention_dim) == (head_dim, head_dim)
    weights = {parameter.shape for parameter in layer.parameters()}
    assert any(4 * heads * head_dim in shape for shape in weights)  # u, v, q and k


def test_initial_embeddings_of_retrieval() -> None:
    """Items are normal within two standard deviations, positions Xavier normal."""
    config = HSTULayerConfig.research(
        embedding_dim=64, num_heads=2, linear_dim=32, attention_dim=32, max_sequence_len=400
    )
    model = RetrievalModel(3000, config, 1, 400, 0.0)
    items, positions = model.item_embedding.weight, model.position.embedding.weight
    assert 0.0399 < items.abs().max().item() <= 0.04
    assert items.std().item() == pytest.approx(0.02 * 0.8796, rel=0.01)
    assert positions.shape == (400, 64)
    assert positions.std().item() == pytest.approx(math.sqrt(2 / 464), rel=0.02)
    assert positions.abs().max().item() > 3 * math.sqrt(2 / 464)


@pytest.mark.parametrize(
    ("kind", "tables"),
    [
        ("time", {"position_weight", "time_weight"}),
        ("position", {"position_weight"}),
        ("none", set()),
    ],
)
def test_forms_of_the_relative_bias(kind: str, tables: set[str], tmp_path: Path) -> None:
    """The saved model has only the tables of that form; runs of other forms are not resumed."""
    ratings = write_synthetic_movielens(tmp_path, 50, 120, 25)
    out = tmp_path / "run"
    paths = ["--data", str(ratings), "--out", str(out), "--no-baselines"]
    asked = [*COMMON, *OF_EXAMPLE["train_retrieval"], *paths, "--relative-bias"]
    assert train_retrieval.main([*asked, kind]) == 0
    model = load_model(out / "best.pt", torch.device("cpu")).model
    names = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    assert {name for name in names if name in ("position_weight", "time_weight")} == tables
    assert model.reads_times == (kind == "time")
    other = "none" if kind == "time" else "time"
    assert train_retrieval.main([*asked, other, "--resume"]) == 1
