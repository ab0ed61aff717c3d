"""Leave-one-out evaluation over the whole catalogue: HR@10, HR@50 and NDCG@10."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hstu_attn.data import EventLog, JaggedBatch, Windows, consecutive_batches, jagged_batch
from hstu_attn.upload import upload

__all__ = [
    "Evaluation",
    "Metrics",
    "Scorer",
    "metrics_of_ranks",
    "ranks_of_targets",
    "seen_items",
    "without_seen",
]

SCORES_PER_BATCH = 2**27  # fp32, of which some copies are made
KEPT_ROWS = 2**23  # of some 60 bytes each

Scorer = Callable[[JaggedBatch], Tensor]
"""Scores of all items after the last row of each sequence, `(batch, num_items)`."""


@dataclass(frozen=True)
class Metrics:
    """Means over users.

    `hit_rate_10` is the fraction of users whose target is among the first ten items; `ndcg_10`
    weighs each such hit by `1 / log2(rank + 1)`.
    """

    hit_rate_10: float
    hit_rate_50: float
    ndcg_10: float


def ranks_of_targets(scores: Tensor, targets: Tensor) -> Tensor:
    """Returns the rank of each row's target, from 1.

    It is one more than the number of items with a higher score, plus half of those with an equal
    score. NaN ranks last.

    Args:
        scores: `(batch, num_items)`.
        targets: `(batch,)` int64.

    Returns:
        `(batch,)` fp32.
    """
    target_scores = scores.gather(1, targets[:, None])
    not_below = (~(scores < target_scores)).sum(dim=1)
    ties = ((scores == target_scores).sum(dim=1) - 1).clamp(min=0)
    return not_below - ties / 2


def metrics_of_ranks(ranks: Tensor) -> Metrics:
    """Returns the metrics of ranks `(num_users,)`."""
    gains = torch.where(ranks <= 10, 1 / torch.log2(ranks.double() + 1), 0.0)
    return Metrics(
        hit_rate_10=(ranks <= 10).double().mean().item(),
        hit_rate_50=(ranks <= 50).double().mean().item(),
        ndcg_10=gains.mean().item(),
    )


def seen_items(log: EventLog, windows: Windows) -> Tensor:
    """Returns what each user has seen, as places in scores `(batch, num_items)`: `(n,)` int64.

    These are the items of all events before the window's last one, including those before the
    window.
    """
    starts = log.offsets[windows.users]
    counts = windows.ends - 1 - starts
    first = np.cumsum(counts) - counts
    items = log.items[np.arange(counts.sum()) + np.repeat(starts - first, counts)]
    return torch.from_numpy(np.repeat(np.arange(len(windows)) * log.num_items, counts) + items)


def without_seen(scores: Tensor, seen: Tensor) -> Tensor:
    """Returns scores `(batch, num_items)` with -inf in the places of `seen_items`."""
    return scores.flatten().index_fill(0, seen, -math.inf).view_as(scores)


class Evaluation:
    """Ranks the last target of each window among all items; the host waits for a GPU once.

    Batches are made in the first evaluation, and kept on the device unless they are large.

    Args:
        log: the events.
        windows: one per user, as `hstu_attn.data.held_out_windows` makes them.
        tokens_per_batch: rows scored at a time; fewer where the catalogue is large.
        exclude_seen: leaves out of the ranking what the user did before.
        device: where to score.
    """

    def __init__(
        self,
        log: EventLog,
        windows: Windows,
        *,
        tokens_per_batch: int,
        exclude_seen: bool,
        device: torch.device,
    ) -> None:
        self.log = log
        self.windows = windows
        self.tokens_per_batch = tokens_per_batch
        self.exclude_seen = exclude_seen
        self.device = device
        self._kept: list[tuple[JaggedBatch, Tensor | None]] | None = None

    @torch.no_grad()
    def __call__(self, scorer: Scorer) -> Metrics:
        """Returns the metrics of a scorer."""
        if self._kept is None and self.windows.lengths.sum() <= KEPT_ROWS:
            self._kept = list(self._batches())
        ranks = []
        for batch, seen in self._batches() if self._kept is None else self._kept:
            scores = scorer(batch)
            if seen is not None:
                scores = without_seen(scores, seen)
            ranks.append(ranks_of_targets(scores, batch.target_items[batch.seq_offsets[1:] - 1]))
        return metrics_of_ranks(torch.cat(ranks).cpu())

    def _batches(self) -> Iterator[tuple[JaggedBatch, Tensor | None]]:
        """Yields batches and what their users have seen, both on the device."""
        users = max(1, SCORES_PER_BATCH // self.log.num_items)
        for together in consecutive_batches(self.windows.lengths, self.tokens_per_batch):
            for indices in np.split(together, range(users, len(together), users)):
                windows = self.windows.take(indices)
                batch, seen = jagged_batch(self.log, windows).to(self.device), None
                if self.exclude_seen:
                    (seen,) = upload([seen_items(self.log, windows)], self.device)
                yield batch, seen
