"""Functions that run the ranking example on the ranks of a test's process pool."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import train_ranking
from recommender.ranking import ranking_loss
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hstu_attn.distributed import World
from tests.helpers.distributed_runs import device_type
from tests.helpers.pictures import not_rendered


@dataclass(frozen=True)
class Result:
    """The output of a rank and the error that stopped it."""

    printed: str
    error: str | None


def this_world(backend: str = "gloo") -> World:
    """Returns the `World` of this process."""
    kind = device_type(backend)
    if not dist.is_initialized():
        return World(0, 0, 1, torch.device(kind), None)
    rank, number = dist.get_rank(), dist.get_world_size()
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    return World(rank, rank, number, device, init_device_mesh(kind, (number,)))


def train(
    arguments: Sequence[str],
    backend: str = "gloo",
    spoilt: tuple[int, int] | None = None,
    rows: int | None = None,
) -> Result:
    """Runs the example on this rank.

    Args:
        arguments: the command line.
        backend: the backend of the process group.
        spoilt: the rank and the step whose loss is replaced by NaN.
        rows: the number of rows of an evaluation batch.
    """
    world = this_world(backend)
    losses = 0

    def loss(*tensors: Tensor) -> Tensor:
        nonlocal losses
        losses += 1
        return ranking_loss(*tensors) * (math.nan if (world.rank, losses) == spoilt else 1)

    kept = train_ranking.EVALUATION_ROWS
    train_ranking.ranking_loss = loss
    train_ranking.EVALUATION_ROWS = rows or kept
    printed, error = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(printed), not_rendered():
            train_ranking.train(train_ranking.parse_arguments(list(arguments)), world)
    except (RuntimeError, ValueError) as raised:
        error = str(raised)
    finally:
        train_ranking.ranking_loss = ranking_loss
        train_ranking.EVALUATION_ROWS = kept
    return Result(printed.getvalue(), error)


def make_trainer(arguments: Sequence[str]) -> train_ranking.RankingTrainer:
    """Makes the trainer of a run of two tasks on this rank."""
    world = this_world()
    options = train_ranking.parse_arguments(list(arguments))
    processes = train_ranking.Processes(world, options.strategy)
    with contextlib.redirect_stdout(io.StringIO()):
        log = train_ranking.open_data(options, [], lambda _: None)
    data = train_ranking.RankingData(log, options.history, options.targets, options.held_out, 1000)
    weights = {"is_click": 1.0, "long_view": 0.5}
    return train_ranking.RankingTrainer(options, data, weights, world.device, processes)


def evaluate(arguments: Sequence[str], path: str, rows: int) -> tuple[dict[str, float], int]:
    """Returns a saved model's test metrics, and this rank's number of rows of the item table."""
    trainer = make_trainer(arguments)
    trainer.load_best(Path(path))
    kept = train_ranking.EVALUATION_ROWS
    train_ranking.EVALUATION_ROWS = rows
    try:
        metrics = trainer.evaluate("test")
    finally:
        train_ranking.EVALUATION_ROWS = kept
    tables = dict(trainer.model.named_parameters())
    table = tables.get("embeddings.tables.item.weight", torch.empty(0))  # not with torchrec
    return metrics, len(table.to_local() if isinstance(table, DTensor) else table)


def initial_state(arguments: Sequence[str]) -> dict[str, Tensor]:
    """Returns the gathered state of the model before the first step, on the first rank."""
    trainer = make_trainer(arguments)
    return dict(trainer.processes.whole_state(trainer.model))


def history(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "history.json").read_text())
    return found
