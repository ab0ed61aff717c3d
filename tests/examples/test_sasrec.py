"""Tests of SASRec, with which the retrieval example is compared."""

from __future__ import annotations

import json
import math
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import serve
import torch
import torch.nn.functional as F
import train_retrieval
from recommender.evaluation import Evaluation
from recommender.sasrec import SASRec
from recommender.saved import load_model
from torch import Tensor, nn

from hstu_attn.data import JaggedBatch, held_out_windows, open_event_log
from hstu_attn.data.synthetic import write_synthetic_movielens
from tests.helpers.interrupted import interrupted_at

ITEMS, DIM, HEADS, LONGEST = 30, 12, 3, 9
SMALL = [
    *("--model", "sasrec", "--dim", "10", "--heads", "2", "--layers", "1", "--max-seq-len", "20"),
    *("--negatives", "16", "--sequences-per-batch", "32", "--warmup-steps", "2"),
    *("--device", "cpu", "--no-baselines", "--steps", "12", "--checkpoint-every", "4"),
]


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic_movielens(tmp_path_factory.mktemp("data"), 100, 120, 25)


def make_batch(lengths: tuple[int, ...] = (4, 1, 9, 0, 6)) -> JaggedBatch:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    items = torch.randint(ITEMS, (int(offsets[-1]) + 1,))
    times = torch.arange(len(items))
    users = torch.arange(len(lengths))
    return JaggedBatch(users, offsets, items[:-1], times[:-1], items[1:], times[1:])


def reference(model: SASRec, items: Tensor) -> Tensor:
    """Returns the states of one sequence, by torch's multi-head attention."""
    table, positions = model.item_embedding.weight, model.position.embedding.weight
    x = table[items] * math.sqrt(DIM) + positions[: len(items)]
    hidden = ~torch.ones(len(items), len(items), dtype=torch.bool).tril()
    for layer in model.layers:
        attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        weights: Any = layer
        with torch.no_grad():
            attention.in_proj_weight.copy_(
                torch.cat([weights.query.weight, weights.key_and_value.weight])
            )
            attention.in_proj_bias.copy_(
                torch.cat([weights.query.bias, weights.key_and_value.bias])
            )
            attention.out_proj.load_state_dict(weights.output.state_dict())
        normed = F.layer_norm(x, (DIM,), eps=1e-8)
        attended, _ = attention(normed[None], x[None], x[None], attn_mask=hidden)
        y = F.layer_norm(normed + attended[0], (DIM,), eps=1e-8)
        x = y + weights.down(weights.up(y).relu())
    return x / x.norm(dim=1, keepdim=True)


def test_states_against_multi_head_attention() -> None:
    model = SASRec(ITEMS, DIM, HEADS, 2, LONGEST, 0.5).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    batch = make_batch()
    states = model(batch)
    for first, end in pairwise(batch.seq_offsets.tolist()):
        if end > first:
            expected = reference(model, batch.items[first:end])
            torch.testing.assert_close(states[first:end], expected, rtol=1e-4, atol=1e-5)
    # Padding, as for graphs, changes no row.
    torch.testing.assert_close(model(batch.padded())[: batch.total], states)
    assert not model(batch.padded())[batch.total :].isnan().any()


def test_gradients_reach_every_weight_of_what_is_padded() -> None:
    model = SASRec(ITEMS, DIM, HEADS, 2, LONGEST, 0.0)
    batch = make_batch()
    factors = torch.randn(batch.total, DIM)
    gradients = []
    for each in (batch, batch.padded()):
        model.zero_grad()
        (model(each)[: batch.total] * factors).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is not None
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_bf16_is_near_fp32() -> None:
    model = SASRec(ITEMS, DIM, HEADS, 2, LONGEST, 0.0)
    batch = make_batch()
    expected = model(batch)
    model.compute_dtype = torch.bfloat16
    found = model(batch)
    assert found.dtype == torch.float32
    assert 0 < (found - expected).abs().max() < 0.03


def test_initial_weights() -> None:
    model = SASRec(2000, 96, 2, 1, 50, 0.0)
    (layer,) = model.layers
    weights: Any = layer
    for weight, fans in (
        (weights.query.weight, 96 + 3 * 96),
        (weights.key_and_value.weight, 96 + 3 * 96),
        (weights.output.weight, 96 + 96),
        (weights.up.weight, 96 + 96),
        (weights.down.weight, 96 + 96),
    ):
        assert weight.std().item() == pytest.approx(math.sqrt(2 / fans), rel=0.03)
        assert weight.abs().max().item() > 3 * math.sqrt(2 / fans)
    assert model.item_embedding.weight.abs().max().item() <= 0.04


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["--graph", "--no-graph"])
def test_a_run_learns_and_continues_exactly(
    ratings: Path,
    tmp_path: Path,
    graph: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(out: Path, *more: str) -> int:
        paths = ["--data", str(ratings), "--out", str(out)]
        return train_retrieval.main([*SMALL, *paths, graph, *more])

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert run(whole) == 0
    losses = json.loads((whole / "history.json").read_text())["losses"]
    assert sum(losses[-4:]) < sum(losses[:4])
    row = json.loads((whole / "metrics.json").read_text())["SASRec"]
    assert "SASRec" in capsys.readouterr().out

    # The file of the best model has the weights that were tested.
    log = open_event_log(ratings)
    model = SASRec(log.num_items, 10, 2, 1, 20, 0.2)
    model.load_state_dict(torch.load(whole / "best.pt", weights_only=True)["model"])
    windows = held_out_windows(log, "test", 20)
    cpu = torch.device("cpu")
    evaluate = Evaluation(log, windows, tokens_per_batch=512, excluded="seen", device=cpu)
    assert evaluate(model.eval().scores).ndcg_10 == pytest.approx(row["ndcg_10"], rel=1e-6)

    message = r"best\.pt: expected an HSTU model, .* got a SASRec model \(--model sasrec\)"
    with pytest.raises(ValueError, match=message):
        load_model(whole / "best.pt", cpu)
    with monkeypatch.context() as patched:
        patched.setattr(signal, "signal", lambda *_: None)
        assert serve.main(["--port", "0", "--model", str(whole / "best.pt")]) == 1
    assert "which alone is served" in capsys.readouterr().err

    with interrupted_at(10):
        assert run(stopped) == 130
    assert run(stopped, "--resume") == 0
    for name in ("history.json", "metrics.json"):
        assert (stopped / name).read_text() == (whole / name).read_text()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--dim", "9"], "--dim must be a multiple of --heads, got 9"),
        (["--head-dim", "8"], "--head-dim must not be given with this model, got 8"),
        (["--fp8", "layer"], "--fp8 must not be given with this model, got layer"),
    ],
)
def test_wrong_options(wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_retrieval.parse_arguments([*SMALL, *wrong])
    assert message in capsys.readouterr().err


@pytest.mark.gpu
def test_captured_steps_are_those_that_are_called(ratings: Path, tmp_path: Path) -> None:
    losses = []
    for graph in ("--graph", "--no-graph"):
        out = tmp_path / graph
        paths = ["--data", str(ratings), "--out", str(out)]
        options = [*SMALL, "--device", "cuda", "--dropout", "0", graph]
        assert train_retrieval.main([*options, *paths]) == 0
        losses.append(json.loads((out / "history.json").read_text())["losses"])
    assert losses[0][0] > losses[0][-1]
    assert sum(losses[0]) == pytest.approx(sum(losses[1]), rel=0.02)  # other negatives
