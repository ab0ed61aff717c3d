"""Packed batches without padding, drawn by length in an order that can be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..capture import pad_offsets, pad_rows, padded_size
from ..upload import upload
from .events import EventLog
from .kuairand import ACTIONS
from .split import Windows

__all__ = [
    "BatchSampler",
    "JaggedBatch",
    "SamplerState",
    "check_batch",
    "consecutive_batches",
    "jagged_batch",
    "require_each",
]

BATCHES_PER_POOL = 16


@dataclass(frozen=True)
class JaggedBatch:
    """Packed sequences of events and the event that follows each of them.

    Sequence `b` owns the rows `seq_offsets[b] .. seq_offsets[b + 1]`. Rows past the last offset, as
    `padded` appends them, belong to no sequence.

    Attributes:
        users: `(batch,)` int64, indices into the log's users.
        seq_offsets: `(batch + 1,)` int64.
        items: `(total,)` int64, the events seen.
        timestamps: `(total,)` int64, when they happened.
        target_items: `(total,)` int64, the next event of each row.
        target_timestamps: `(total,)` int64, the time of the next event: the time of the prediction.
        actions: `(total,)` int64, the user's actions on `items`, as the bits of
            `hstu_attn.data.kuairand.ACTIONS`; None if the log does not have them.
        target_actions: `(total,)` int64, the user's actions on `target_items`, the labels of a
            ranking model.
    """

    users: Tensor
    seq_offsets: Tensor
    items: Tensor
    timestamps: Tensor
    target_items: Tensor
    target_timestamps: Tensor
    actions: Tensor | None = None
    target_actions: Tensor | None = None

    @property
    def total(self) -> int:
        """Returns the number of rows of all sequences; on a GPU this synchronizes."""
        return int(self.seq_offsets[-1])

    def to(self, device: torch.device) -> JaggedBatch:
        """Copies the batch to another device by one asynchronous copy."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        return replace(self, **dict(zip(given, upload([*given.values()], device), strict=True)))

    def padded(self) -> JaggedBatch:
        """Pads the batch with empty sequences and unused rows, so that few shapes occur.

        The number of sequences becomes a power of two, and the number of rows a `padded_size`.
        """
        sequences = padded_size(len(self.users), 1)
        rows = {
            field.name: pad_rows(tensor, padded_size(len(tensor)))
            for field in fields(self)
            if (tensor := getattr(self, field.name)) is not None
        }
        rows["users"] = pad_rows(self.users, sequences)
        rows["seq_offsets"] = pad_offsets(self.seq_offsets, sequences)
        return JaggedBatch(**rows)


def jagged_batch(log: EventLog, windows: Windows) -> JaggedBatch:
    """Packs the windows, in their order."""
    lengths = windows.lengths
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rows = np.arange(offsets[-1]) + np.repeat(windows.starts - offsets[:-1], lengths)
    columns = [
        windows.users,
        offsets,
        log.items[rows],
        log.timestamps[rows],
        log.items[rows + 1],
        log.timestamps[rows + 1],
    ]
    if "actions" in log.columns:
        columns += [log.columns["actions"][rows], log.columns["actions"][rows + 1]]
    return JaggedBatch(*(torch.from_numpy(column.astype(np.int64)) for column in columns))


def check_batch(batch: JaggedBatch, num_items: int) -> None:
    """Checks a batch that was made elsewhere, before its values index embeddings.

    Args:
        batch: the batch.
        num_items: items are from 0 to `num_items - 1`.

    Raises:
        ValueError: naming the feature, the row, what was expected and what is there.
    """
    offsets, total = batch.seq_offsets, len(batch.items)
    if offsets.shape != (len(batch.users) + 1,):
        raise ValueError(
            f"seq_offsets: expected shape ({len(batch.users) + 1},), one more than users, "
            f"got {tuple(offsets.shape)}"
        )
    steps = torch.diff(offsets, prepend=offsets.new_zeros(1))
    require_each(
        steps >= 0, "seq_offsets", offsets, "offsets that start from 0 and do not decrease"
    )
    if offsets[0] != 0 or offsets[-1] != total:
        raise ValueError(
            f"seq_offsets: expected values from 0 to the {total} rows of items, "
            f"got {int(offsets[0])} and {int(offsets[-1])}"
        )
    bits = 1 << len(ACTIONS)
    for name, limit in (
        ("items", num_items),
        ("target_items", num_items),
        ("timestamps", None),
        ("target_timestamps", None),
        ("actions", bits),
        ("target_actions", bits),
    ):
        feature = getattr(batch, name)
        if feature is None:
            continue
        if feature.shape != (total,):
            raise ValueError(f"{name}: expected shape ({total},), got {tuple(feature.shape)}")
        if limit is not None:
            good = (feature >= 0) & (feature < limit)
            require_each(good, name, feature, f"0 to {limit - 1}")
    times = batch.timestamps
    same_sequence = torch.ones(total, dtype=torch.bool, device=times.device)
    starts = offsets[:-1]
    same_sequence[starts[starts < total]] = False
    in_order = torch.diff(times, prepend=times[:1]) >= 0
    require_each(in_order | ~same_sequence, "timestamps", times, "no decrease within a sequence")
    later = batch.target_timestamps >= times
    require_each(later, "target_timestamps", batch.target_timestamps, "none before timestamps")


def require_each(good: Tensor, name: str, feature: Tensor, expected: str) -> None:
    """Raises a ValueError unless `good` is true in every row.

    The message names the feature of the batch, the first row where `good` is false, and its value.
    """
    if not good.all():
        row = int((~good).nonzero()[0])
        raise ValueError(f"{name}: expected {expected}, got {int(feature[row])} in row {row}")


class SamplerState(TypedDict):
    """The position of a sampler of batches."""

    epoch: int
    batch: int


class BatchSampler(Iterator[NDArray[np.int64]]):
    """Draws batches of sequences endlessly, each sequence once per epoch.

    With `tokens_per_batch`, sequences are shuffled, sorted by length within pools of some batches,
    and cut where a batch would exceed that many rows; then the batches are shuffled. So the
    sequences of a batch have similar lengths, and batches have similar numbers of rows. With
    `sequences_per_batch`, sequences are shuffled and cut into batches of that many; the last batch
    may have fewer. The order depends only on `seed` and the epoch.

    Args:
        lengths: `(n,)`, rows of each sequence.
        tokens_per_batch: the most rows of a batch, unless it is a single longer sequence.
        seed: the seed of the order.
        sequences_per_batch: the number of sequences of a batch. Exactly one of
            `tokens_per_batch` and `sequences_per_batch` is given.

    Raises:
        ValueError: there is no sequence, both sizes or none are given, or one is not positive.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        tokens_per_batch: int | None,
        seed: int,
        sequences_per_batch: int | None = None,
    ) -> None:
        if not len(lengths):
            raise ValueError("lengths: expected at least one sequence, got none")
        if (tokens_per_batch is None) == (sequences_per_batch is None):
            raise ValueError(
                "tokens_per_batch and sequences_per_batch: expected one of them and None, got "
                f"{tokens_per_batch} and {sequences_per_batch}"
            )
        for name, size in (
            ("tokens_per_batch", tokens_per_batch),
            ("sequences_per_batch", sequences_per_batch),
        ):
            if size is not None and size <= 0:
                raise ValueError(f"{name}: expected a positive number, got {size}")
        self.lengths = lengths
        self.tokens_per_batch = tokens_per_batch
        self.sequences_per_batch = sequences_per_batch
        self.seed = seed
        self._start(epoch=0, batch=0)

    def __next__(self) -> NDArray[np.int64]:
        if self.batch == len(self._batches):
            self._start(self.epoch + 1, batch=0)
        self.batch += 1
        return self._batches[self.batch - 1]

    @property
    def batches_per_epoch(self) -> int:
        """Returns the number of batches of the current epoch."""
        return len(self._batches)

    def state_dict(self) -> SamplerState:
        """Returns the position: the epoch, and the number of its batches that have been drawn."""
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: SamplerState) -> None:
        """Continues from a position of a sampler with the same arguments."""
        self._start(state["epoch"], state["batch"])

    def _start(self, epoch: int, batch: int) -> None:
        self.epoch, self.batch = epoch, batch
        generator = np.random.default_rng((self.seed, epoch))
        order = generator.permutation(len(self.lengths))
        self._batches: list[NDArray[np.int64]]
        if self.sequences_per_batch is not None:
            cuts = range(self.sequences_per_batch, len(order), self.sequences_per_batch)
            self._batches = np.split(order, cuts)
            return
        assert self.tokens_per_batch is not None
        per_batch = max(1.0, self.tokens_per_batch / self.lengths.mean())
        pool = np.arange(len(order)) // max(1, int(BATCHES_PER_POOL * per_batch))
        order = order[np.lexsort((self.lengths[order], pool))]
        batches = list(_cut(order, self.lengths, self.tokens_per_batch))
        self._batches = [batches[index] for index in generator.permutation(len(batches))]


def consecutive_batches(
    lengths: NDArray[np.int64], tokens_per_batch: int
) -> Iterator[NDArray[np.int64]]:
    """Yields batches of consecutive indices with at most `tokens_per_batch` rows each."""
    return _cut(np.arange(len(lengths)), lengths, tokens_per_batch)


def _cut(
    order: NDArray[np.int64], lengths: NDArray[np.int64], tokens_per_batch: int
) -> Iterator[NDArray[np.int64]]:
    start = tokens = 0
    for end, length in enumerate(lengths[order].tolist()):
        if end > start and tokens + length > tokens_per_batch:
            yield order[start:end]
            start, tokens = end, 0
        tokens += length
    yield order[start:]
