"""The baselines of sequence models: popularity, and item-to-item co-occurrence."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hstu_attn.data import EventLog, JaggedBatch
from hstu_attn.data.split import HELD_OUT

__all__ = [
    "CANDIDATES",
    "NUM_CANDIDATES",
    "VERSION",
    "CoOccurrence",
    "Popularity",
    "co_occurrence_candidates",
]

VERSION = 2
"""Is increased when a baseline or an evaluation changes: metrics kept before are then not read."""

REACHES = (1, 5, 20)
BACKWARD_WEIGHTS = (0.0, 0.5, 1.0)
RECENCY_DECAYS = (0.3, 0.6, 0.8, 0.95)
NUM_CANDIDATES = len(REACHES) * len(BACKWARD_WEIGHTS) * len(RECENCY_DECAYS)
"""How many settings of the co-occurrence `co_occurrence_candidates` has."""
CANDIDATES = {
    "reach": REACHES,
    "backward_weight": BACKWARD_WEIGHTS,
    "recency_decay": RECENCY_DECAYS,
}
"""The values that `co_occurrence_candidates` combines, by the name of the setting."""


class Popularity:
    """Scores every item by how often it occurs in the training events."""

    def __init__(self, log: EventLog) -> None:
        self.counts = _training_counts(log)

    def __call__(self, batch: JaggedBatch) -> Tensor:
        return self.counts.expand(len(batch.users), -1)


@dataclass(frozen=True)
class CoOccurrence:
    """Scores items by their co-occurrence with the items of a user.

    The score of item j is the sum over the user's events i of `recency_decay ** (events since i) *
    similarity[i, j]`.

    Attributes:
        similarity: `(num_items, num_items)` sparse CSR, transposed: rows are j.
        reach: the largest distance of co-occurring events, which have weight `1 / distance`.
        backward_weight: the weight of an item j before i, relative to an item j after i.
        recency_decay: the decay of an event's weight with each later event.
    """

    similarity: Tensor
    reach: int
    backward_weight: float
    recency_decay: float

    def __call__(self, batch: JaggedBatch) -> Tensor:
        lengths = batch.seq_offsets.diff()
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        age = batch.seq_offsets[1:][sequence] - 1 - torch.arange(len(sequence))
        weights = torch.zeros(self.similarity.shape[0], len(lengths))
        weights.index_put_(
            (batch.items, sequence), self.recency_decay ** age.float(), accumulate=True
        )
        return (self.similarity @ weights).T

    def describe(self) -> str:
        """Returns the settings, for a table."""
        return (
            f"reach {self.reach}, backward {self.backward_weight:g}, decay {self.recency_decay:g}"
        )


def co_occurrence_candidates(log: EventLog) -> Iterator[CoOccurrence]:
    """Returns the co-occurrence baseline in several settings, from which validation chooses.

    The similarity is the co-occurrence in the training events over the geometric mean of the items'
    counts.
    """
    counts = _training_counts(log).clamp(min=1)
    for reach, forward in _forward_co_occurrence(log):
        for backward_weight in BACKWARD_WEIGHTS:
            both = (forward.T + backward_weight * forward).coalesce()
            j, i = both.indices()
            values = both.values() / (counts[i] * counts[j]).sqrt()
            similarity = _sparse(both.indices(), values, both.shape)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
                similarity = similarity.to_sparse_csr()  # several times faster to multiply by
            for recency_decay in RECENCY_DECAYS:
                yield CoOccurrence(similarity, reach, backward_weight, recency_decay)


def _sparse(indices: Tensor, values: Tensor, shape: tuple[int, int] | torch.Size) -> Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)


def _training_events(log: EventLog) -> tuple[Tensor, Tensor]:
    """Item and user of each event that may be trained on, `(n,)` int64 each, in order."""
    counts = np.diff(log.offsets)
    users = np.repeat(np.arange(log.num_users), counts)
    from_end = np.repeat(log.offsets[1:], counts) - np.arange(log.num_events)
    keep = from_end > HELD_OUT["validation"]
    return torch.from_numpy(log.items[keep].astype(np.int64)), torch.from_numpy(users[keep])


def _training_counts(log: EventLog) -> Tensor:
    items, _ = _training_events(log)
    return torch.bincount(items, minlength=log.num_items).float()


def _forward_co_occurrence(log: EventLog) -> Iterator[tuple[int, Tensor]]:
    """Sums `1 / distance` over the pairs (i, later j) of a user's events, for each reach.

    The results are `(num_items, num_items)` sparse COO.
    """
    items, users = _training_events(log)
    shape = (log.num_items, log.num_items)
    total = torch.zeros(shape, layout=torch.sparse_coo)
    for distance in range(1, max(REACHES) + 1):
        same_user = users[distance:] == users[:-distance]
        pairs = torch.stack([items[:-distance][same_user], items[distance:][same_user]])
        weights = torch.full((pairs.shape[1],), 1 / distance)
        total = (total + _sparse(pairs, weights, shape)).coalesce()
        if distance in REACHES:
            yield distance, total
