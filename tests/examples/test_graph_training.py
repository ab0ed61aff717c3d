"""Tests of both examples' training steps in CUDA graphs, and on a CPU without graphs: what
they compute, how a run continues, and how it stops."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import train_ranking
import train_retrieval
from recommender import model
from recommender.loop import Trainer, TrainingError
from recommender.processes import ALONE, Processes
from recommender.ranking_data import RankingData
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hstu_attn import capture
from hstu_attn.data import open_event_log
from hstu_attn.data.synthetic import write_synthetic_movielens
from hstu_attn.distributed import Checkpoints

STEPS = 20
SMALL = [
    *("--dim", "16", "--layers", "1", "--steps", str(STEPS), "--eval-every", "10"),
    *("--checkpoint-every", "10", "--warmup-steps", "5", "--dropout", "0", "--no-baselines"),
]
OF_EXAMPLE = {
    "train_retrieval": ["--max-seq-len", "30", "--tokens-per-batch", "256", "--negatives", "32"],
    "train_ranking": ["--history", "12", "--targets", "6", "--tasks", "rating_4", "rating_5"],
}
MODULES = {"train_retrieval": train_retrieval, "train_ranking": train_ranking}
GPU = pytest.mark.gpu
WAITING = {  # for the device, or copying a constant of the host to it
    *("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2"),
    *("aten::repeat_interleave.Tensor", "aten::equal", "aten::lift_fresh"),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic_movielens(tmp_path_factory.mktemp("data"), 50, 120, 25)


@pytest.fixture(params=list(MODULES))
def example(request: pytest.FixtureRequest) -> ModuleType:
    return MODULES[request.param]


@pytest.fixture
def train(example: ModuleType, ratings: Path) -> Callable[..., int]:
    """Runs the example with a directory and more arguments; returns its status."""

    def run(out: Path, *more: str) -> int:
        own = OF_EXAMPLE[example.__name__]
        paths = ["--data", str(ratings), "--out", str(out)]
        status: int = example.main([*SMALL, *own, *paths, *more])
        return status

    return run


def history(out: Path) -> tuple[list[float], list[list[float]]]:
    """Returns the losses of a run, and its validation metrics without their names."""
    found = json.loads((out / "history.json").read_text())
    return found["losses"], [list(metrics.values()) for metrics in found["validation"].values()]


def make_trainer(
    example: ModuleType, ratings: Path, out: Path, device: str, *more: str
) -> Trainer[Any]:
    own = OF_EXAMPLE[example.__name__]
    arguments = [*SMALL, *own, "--out", str(out), "--device", device, *more]
    options = example.parse_arguments(arguments)
    log = open_event_log(ratings)
    if example is train_retrieval:
        return train_retrieval.RetrievalTrainer(options, log, torch.device(device))
    data = RankingData(log, options.history, options.targets, options.held_out, 1000)
    weights = {"rating_4": 1.0, "rating_5": 0.5}
    return train_ranking.RankingTrainer(options, data, weights, torch.device(device), Processes())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_padding_changes_neither_loss_nor_gradients(
    example: ModuleType, ratings: Path, tmp_path: Path, device: str
) -> None:
    more = ["--no-graph"]
    if example is train_retrieval:
        more += ["--temperature", "1"]  # with lower ones, rounding errors exceed the bounds
    trainer = make_trainer(example, ratings, tmp_path, device, *more)
    parameters = dict(trainer.trained.named_parameters())
    added = 0
    for seed in range(4):
        batch = trainer.draw()
        padded = batch.padded()
        added += len(padded.target_items) - len(batch.target_items)
        found = []
        for each in (batch, padded):
            torch.manual_seed(seed)  # for the negatives
            loss, count = trainer.loss(each.to(trainer.device))
            trainer.optimizer.zero_grad()
            loss.backward()
            gradients = {name: parameter.grad for name, parameter in parameters.items()}
            found.append((loss, count, gradients))
        # On a GPU layers are in bf16, and products of other shapes may have other kernels.
        rtol, atol = (1e-4, 1e-5) if device == "cpu" else (1e-2, 0.1)
        torch.testing.assert_close(found[1], found[0], rtol=rtol, atol=atol)
    assert added > 0


def test_gradients_are_clipped_unless_the_norm_is_0(
    example: ModuleType, ratings: Path, tmp_path: Path
) -> None:
    for clip_norm in (0.0, 1e-3):
        arguments = ("--clip-norm", str(clip_norm))
        trainer = make_trainer(example, ratings, tmp_path, "cpu", *arguments)
        batch = trainer.draw()
        torch.manual_seed(3)  # for the negatives
        norm = trainer._gradients(batch)[1]
        gradients = [parameter.grad for parameter in trainer.trained.parameters()]
        torch.manual_seed(3)
        trainer.optimizer.zero_grad()
        loss, count = trainer.loss(batch)
        (loss / count).backward()
        whole = [parameter.grad for parameter in trainer.trained.parameters()]
        expected = torch.cat([gradient.flatten() for gradient in whole]).norm()
        assert expected > 1e-2
        torch.testing.assert_close(norm, expected)
        factor = clip_norm / expected if clip_norm else torch.tensor(1.0)
        torch.testing.assert_close(gradients, [factor * gradient for gradient in whole])


class Operators(TorchDispatchMode):
    """Collects the names of the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def test_no_operator_of_a_step_waits_for_the_device(
    example: ModuleType, ratings: Path, tmp_path: Path
) -> None:
    """No operator of a step waits for the device or copies a host constant to it, since neither
    can be captured.
    """
    trainer = make_trainer(example, ratings, tmp_path, "cpu", "--dropout", "0.2")
    trainer._gradients(trainer.draw().padded())  # a warm-up, which makes cached objects
    batch = trainer.draw().padded()
    with Operators() as operators:
        trainer._gradients(batch)
    assert {"hstu_attn::hstu_varlen_fwd", "hstu_attn::hstu_varlen_bwd"} <= operators.names
    assert not WAITING & operators.names


@pytest.mark.parametrize(
    ("few_items", "sums_by"), [(0, "aten::index_add_"), (32, "aten::scatter_add_")]
)
def test_negatives_per_row_in_a_captured_step(
    few_items: int, sums_by: str, ratings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding leaves the losses of the rows as they are, and no operator waits for the device."""
    monkeypatch.setattr(model, "FEW_ITEMS", few_items)
    arguments = ("--negatives-per", "row", "--no-graph")
    trainer = make_trainer(train_retrieval, ratings, tmp_path, "cpu", *arguments)
    batch = trainer.draw()
    padded = batch.padded()
    assert len(padded.target_items) > len(batch.target_items)
    found = []
    for each in (batch, padded):
        torch.manual_seed(0)
        losses, offsets = trainer.losses_of(each)
        found.append(losses[: offsets[-1]])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    with Operators() as operators:
        trainer._gradients(padded)
    assert sums_by in operators.names
    assert not WAITING & operators.names


@pytest.mark.slow
def test_a_run_of_graphs_has_the_same_curves(
    train: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU, `--graph` means padded steps, a fused optimizer and losses that are read late."""
    for name in ("--graph", "--no-graph"):
        assert train(tmp_path / name, "--device", "cpu", name) == 0
        assert f"{STEPS} steps in " in capsys.readouterr().out
    losses, validations = history(tmp_path / "--graph")
    expected_losses, expected = history(tmp_path / "--no-graph")
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    for metrics, of_expected in zip(validations, expected, strict=True):
        assert metrics == pytest.approx(of_expected, rel=1e-3)
    assert losses[-1] != losses[-2]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_an_interrupted_run_continues(
    example: ModuleType,
    train: Callable[..., int],
    tmp_path: Path,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With dropout, the states of the random generators must be restored, too."""
    arguments = ["--graph", "--device", device, "--dropout", "0.2"]
    assert train(tmp_path / "whole", *arguments) == 0
    kinds = {"train_retrieval": "RetrievalTrainer", "train_ranking": "RankingTrainer"}
    kind = getattr(example, kinds[example.__name__])
    draw = kind.draw

    def stop(self: Any) -> Any:
        if self.step == 13:
            raise KeyboardInterrupt
        return draw(self)

    with monkeypatch.context() as patched:
        patched.setattr(kind, "draw", stop)
        assert train(tmp_path / "stopped", *arguments) == 130
    assert max(Checkpoints(tmp_path / "stopped" / "checkpoints").steps()) == 10
    assert train(tmp_path / "stopped", *arguments, "--resume") == 0
    losses, validations = history(tmp_path / "stopped")
    expected_losses, expected = history(tmp_path / "whole")
    if device == "cpu":
        assert (losses, validations) == (expected_losses, expected)
    else:
        assert losses == pytest.approx(expected_losses, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["--graph", "--no-graph"])
def test_a_run_continues_with_or_without_graphs(
    first: str, train: Callable[..., int], tmp_path: Path
) -> None:
    """Checkpoints are the same for both kinds of steps."""
    then = "--no-graph" if first == "--graph" else "--graph"
    whole, changed = tmp_path / "whole", tmp_path / "changed"
    assert train(whole, "--device", "cpu", "--no-graph") == 0
    assert train(whole, "--device", "cpu", "--no-graph", "--resume", "--steps", "30") == 0
    assert train(changed, "--device", "cpu", first) == 0
    assert train(changed, "--device", "cpu", then, "--resume", "--steps", "30") == 0
    losses, _ = history(changed)
    assert len(losses) == 30
    assert losses == pytest.approx(history(whole)[0], rel=1e-4)


def test_a_loss_that_is_not_finite_changes_nothing(
    example: ModuleType, ratings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps that run before the loss is read do not update the weights."""
    monkeypatch.setattr(Trainer, "_learning_rate", lambda _: 1e-3)
    expected = make_trainer(example, ratings, tmp_path / "good", "cpu", "--graph")
    for _ in range(6):
        expected._train_step()

    rare = ["--eval-every", str(STEPS), "--checkpoint-every", str(STEPS)]
    trainer = make_trainer(example, ratings, tmp_path / "bad", "cpu", "--graph", *rare)
    losses_of, calls = trainer.losses_of, 0

    def spoilt(batch: Any) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        losses, offsets = losses_of(batch)
        return losses * (math.nan if calls == 7 else 1), offsets

    monkeypatch.setattr(trainer, "losses_of", spoilt)
    trainer.start()
    message = r"the loss is nan .* at step 7 \(epoch \d+, batch \d+, seed 0\).*bad-batch\.pt"
    with pytest.raises(TrainingError, match=message):
        trainer.run()
    assert calls > STEPS
    assert len(trainer.losses) == 6
    assert torch.load(tmp_path / "bad" / "bad-batch.pt", weights_only=True)["step"] == 7
    for found, parameter in zip(
        trainer.trained.parameters(), expected.trained.parameters(), strict=True
    ):
        assert torch.equal(found, parameter)
    assert not Checkpoints(tmp_path / "bad" / "checkpoints").steps()


def test_several_processes_have_no_graphs() -> None:
    options = train_ranking.parse_arguments(["--graph", "--device", "cpu"])
    world: Any = replace(ALONE, mesh=object())
    with pytest.raises(ValueError, match="--graph needs a single process"):
        train_ranking.train(options, world)


@GPU
def test_captured_steps_are_those_that_are_called(
    train: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, on the same padded batches, a graph draws the same random numbers."""
    arguments = ["--device", "cuda", "--dropout", "0.2"]
    assert train(tmp_path / "captured", *arguments) == 0  # --graph is the default
    monkeypatch.setattr(capture, "capture_on", lambda *_, **__: lambda call: call)
    assert train(tmp_path / "called", *arguments) == 0
    losses, validations = history(tmp_path / "captured")
    expected_losses, expected = history(tmp_path / "called")
    assert losses == pytest.approx(expected_losses, rel=2e-3)
    for metrics, of_expected in zip(validations, expected, strict=True):
        assert metrics == pytest.approx(of_expected, rel=0.05, abs=0.05)


@GPU
def test_a_gpu_has_graphs_by_default(example: ModuleType, ratings: Path, tmp_path: Path) -> None:
    trainer = make_trainer(example, ratings, tmp_path, "cuda")
    assert trainer.captured is not None
    line = f"Training on {torch.cuda.get_device_name()}, layers in bfloat16, steps by CUDA graphs"
    assert trainer._where_it_trains() == line
    trainer.steps = 12
    for _ in range(trainer.steps):
        trainer._train_step()
    graphs = trainer.captured._graphs
    assert any(graph is not None for graph in graphs.values())
    assert len(trainer.unread) == 12  # the host has not waited for any loss
