"""Functions that run the retrieval example on the ranks of a test's process pool."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import train_retrieval
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.helpers.pictures import not_rendered
from tests.helpers.ranking_ranks import Result, this_world


def _first_items(num_items: int, shape: Sequence[int], **_: Any) -> Tensor:
    """Replaces `torch.randint`, so that all ranks draw the same negatives."""
    return torch.arange(shape[-1]).remainder(num_items).expand(*shape)


def train(arguments: Sequence[str]) -> Result:
    """Runs the example on this rank, with the same negatives for all rows."""
    printed, error = io.StringIO(), None
    options = train_retrieval.parse_arguments(list(arguments))
    drawn = mock.patch.object(torch, "randint", _first_items)
    with drawn, contextlib.redirect_stdout(printed), not_rendered():
        try:
            train_retrieval.train(options, this_world())
        except (RuntimeError, ValueError) as raised:
            error = str(raised)
    return Result(printed.getvalue(), error)


def _trainer(arguments: Sequence[str]) -> train_retrieval.RetrievalTrainer:
    options = train_retrieval.parse_arguments(list(arguments))
    world = this_world()
    with contextlib.redirect_stdout(io.StringIO()):
        log = train_retrieval.open_data(options, [], lambda _: None)
    processes = train_retrieval.Processes(world)
    return train_retrieval.RetrievalTrainer(options, log, world.device, processes)


def drawn(arguments: Sequence[str]) -> list[list[int]]:
    """Returns the users of the batches that this rank draws."""
    trainer = _trainer(arguments)
    return [trainer.draw().users.tolist() for _ in range(trainer.steps)]


def tables(arguments: Sequence[str]) -> tuple[int, tuple[int, ...], int]:
    """Continues a run, and describes this rank's part of the item table.

    Returns:
        The number of this rank's rows, the shape of the scores of a batch, and the size of the
        optimizer's first moments of these rows.
    """
    trainer = _trainer(arguments)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.start()
    weight = trainer.model.item_embedding.weight
    moments = trainer.optimizer.state[weight]["exp_avg"]
    here = [each.to_local() if isinstance(each, DTensor) else each for each in (weight, moments)]
    log, length = trainer.log, trainer.retrieval.max_seq_len
    windows = train_retrieval.held_out_windows(log, "test", length)
    with torch.no_grad():
        scores = trainer.model.scores(train_retrieval.jagged_batch(log, windows))
    return len(here[0]), tuple(scores.shape), here[1].numel()
