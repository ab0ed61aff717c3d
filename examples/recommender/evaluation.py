"""Leave-one-out evaluation over the whole catalog: hit rates, NDCG and MRR."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hstu_attn.data import EventLog, JaggedBatch, Windows, consecutive_batches, jagged_batch
from hstu_attn.upload import upload

__all__ = [
    "Evaluation",
    "Excluded",
    "Metrics",
    "Scorer",
    "excluded_items",
    "metrics_of_ranks",
    "ranks_of_targets",
    "without_items",
]

SCORES_PER_BATCH = 2**27  # fp32; some copies of the scores are made
KEPT_ROWS = 2**23  # a row takes some 60 bytes

Excluded = Literal["seen", "window", "nothing"]
"""The items excluded from a ranking: all that the user has seen, the window's items, or none."""

Scorer = Callable[[JaggedBatch], Tensor]
"""Scores of all items after the last row of each sequence, `(batch, num_items)`."""


@dataclass(frozen=True)
class Metrics:
    """Means over users.

    `hit_rate_k` is the fraction of users whose target is among the first `k` items; `ndcg_k` weighs
    each such hit by `1 / log2(rank + 1)`. `mrr` is the mean of `1 / rank`.
    """

    hit_rate_10: float
    hit_rate_50: float
    hit_rate_200: float
    ndcg_10: float
    ndcg_50: float
    ndcg_200: float
    mrr: float


def ranks_of_targets(scores: Tensor, targets: Tensor) -> Tensor:
    """Returns the rank of each row's target, from 1.

    The rank is 1 plus the number of items with a higher score, plus half the number of other items
    with an equal score. NaN ranks last. An excluded target, whose score is -inf, has the rank
    infinity: it is a miss at any `k`.

    Args:
        scores: `(batch, num_items)`.
        targets: `(batch,)` int64.

    Returns:
        `(batch,)` fp32.
    """
    target_scores = scores.gather(1, targets[:, None])
    not_below = (~(scores < target_scores)).sum(dim=1)
    ties = ((scores == target_scores).sum(dim=1) - 1).clamp(min=0)
    return (not_below - ties / 2).masked_fill(target_scores.squeeze(1) == -math.inf, math.inf)


def metrics_of_ranks(ranks: Tensor) -> Metrics:
    """Returns the metrics of ranks `(num_users,)`."""
    ranks = ranks.double()
    gains = 1 / torch.log2(ranks + 1)
    means = {"mrr": (1 / ranks).mean().item()}
    for k in (10, 50, 200):
        is_hit = ranks <= k
        means[f"hit_rate_{k}"] = is_hit.double().mean().item()
        means[f"ndcg_{k}"] = torch.where(is_hit, gains, 0.0).mean().item()
    return Metrics(**means)


def excluded_items(log: EventLog, windows: Windows, excluded: Excluded) -> Tensor:
    """Returns the excluded items of each user as flat indices into scores `(batch, num_items)`.

    "seen" excludes the items of all the user's events before the window's last event; "window"
    excludes the items of only those of these events that are in the window.

    Returns:
        `(n,)` int64.
    """
    if excluded == "nothing":
        return torch.empty(0, dtype=torch.int64)
    starts = log.offsets[windows.users] if excluded == "seen" else windows.starts
    counts = windows.ends - 1 - starts
    first = np.cumsum(counts) - counts
    items = log.items[np.arange(counts.sum()) + np.repeat(starts - first, counts)]
    return torch.from_numpy(np.repeat(np.arange(len(windows)) * log.num_items, counts) + items)


def without_items(scores: Tensor, excluded: Tensor) -> Tensor:
    """Returns scores `(batch, num_items)` with -inf at the indices of `excluded_items`."""
    return scores.flatten().index_fill(0, excluded, -math.inf).view_as(scores)


class Evaluation:
    """Ranks the last target of each window among all items, with one GPU synchronization.

    Batches are made in the first evaluation, and kept on the device unless they are large.

    Args:
        log: the events.
        windows: one per user, as `hstu_attn.data.held_out_windows` makes them.
        tokens_per_batch: rows scored at a time; fewer where the catalog is large.
        excluded: the items excluded from each ranking.
        device: the device that computes the scores.
    """

    def __init__(
        self,
        log: EventLog,
        windows: Windows,
        *,
        tokens_per_batch: int,
        excluded: Excluded,
        device: torch.device,
    ) -> None:
        self.log = log
        self.windows = windows
        self.tokens_per_batch = tokens_per_batch
        self.excluded = excluded
        self.device = device
        self._kept: list[tuple[JaggedBatch, Tensor]] | None = None

    @torch.no_grad()
    def __call__(self, scorer: Scorer) -> Metrics:
        """Returns the metrics of a scorer."""
        if self._kept is None and self.windows.lengths.sum() <= KEPT_ROWS:
            self._kept = list(self._batches())
        ranks = []
        for batch, excluded in self._batches() if self._kept is None else self._kept:
            scores = without_items(scorer(batch), excluded)
            ranks.append(ranks_of_targets(scores, batch.target_items[batch.seq_offsets[1:] - 1]))
        return metrics_of_ranks(torch.cat(ranks).cpu())

    def _batches(self) -> Iterator[tuple[JaggedBatch, Tensor]]:
        """Yields batches and the indices of their excluded items, both on the device."""
        users = max(1, SCORES_PER_BATCH // self.log.num_items)
        for together in consecutive_batches(self.windows.lengths, self.tokens_per_batch):
            for indices in np.split(together, range(users, len(together), users)):
                windows = self.windows.take(indices)
                places = excluded_items(self.log, windows, self.excluded)
                (excluded,) = upload([places], self.device)
                yield jagged_batch(self.log, windows).to(self.device), excluded
