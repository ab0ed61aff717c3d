"""Leave-one-out evaluation over the whole catalogue: HR@10, HR@50 and NDCG@10."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hstu_attn.data import EventLog, JaggedBatch, Windows, consecutive_batches, jagged_batch
from hstu_attn.upload import upload

__all__ = ["Metrics", "Scorer", "evaluate", "mask_seen", "metrics_of_ranks", "ranks_of_targets"]

SCORES_PER_BATCH = 2**27  # fp32, of which some copies are made

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


def mask_seen(scores: Tensor, log: EventLog, windows: Windows) -> Tensor:
    """Returns scores `(batch, num_items)` with -inf for the items that each user has seen.

    These are the items of all events before the window's last one, including those before the
    window.
    """
    starts = log.offsets[windows.users]
    counts = windows.ends - 1 - starts
    first = np.cumsum(counts) - counts
    items = log.items[np.arange(counts.sum()) + np.repeat(starts - first, counts)]
    places = np.repeat(np.arange(len(windows)) * log.num_items, counts) + items
    (on_device,) = upload([torch.from_numpy(places)], scores.device)
    return scores.flatten().index_fill(0, on_device, float("-inf")).view_as(scores)


@torch.no_grad()
def evaluate(
    scorer: Scorer,
    log: EventLog,
    windows: Windows,
    *,
    tokens_per_batch: int,
    exclude_seen: bool,
    device: torch.device,
) -> Metrics:
    """Ranks the last target of each window among all items.

    On a GPU the host waits once, at the end.

    Args:
        scorer: scores the items.
        log: the events.
        windows: one per user, as `hstu_attn.data.held_out_windows` makes them.
        tokens_per_batch: rows scored at a time; fewer where the catalogue is large.
        exclude_seen: leaves out of the ranking what the user did before.
        device: where to score.
    """
    ranks = []
    users = max(1, SCORES_PER_BATCH // log.num_items)
    batches = consecutive_batches(windows.lengths, tokens_per_batch)
    for indices in (part for x in batches for part in np.split(x, range(users, len(x), users))):
        chosen = windows.take(indices)
        batch = jagged_batch(log, chosen).to(device)
        scores = scorer(batch)
        if exclude_seen:
            scores = mask_seen(scores, log, chosen)
        ranks.append(ranks_of_targets(scores, batch.target_items[batch.seq_offsets[1:] - 1]))
    return metrics_of_ranks(torch.cat(ranks).cpu())
