"""Metrics of the predicted probabilities of actions, and the baselines of a ranking model.

AUC says how well candidates are ranked, and normalized entropy how well the probabilities fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hstu_attn.data import consecutive_batches
from recommender.processes import Processes
from recommender.ranking_data import CONTEXTS, RankingBatch, RankingData, RankingWindows

__all__ = [
    "NUM_CANDIDATES",
    "Rates",
    "Scorer",
    "auc",
    "base_rates",
    "evaluate_ranking",
    "fit_rates",
    "mean_entropy",
    "normalized_entropy",
]

FloatArray: TypeAlias = NDArray[np.float64]

Scorer = Callable[[RankingBatch], Tensor]
"""The logits of the tasks for each candidate, `(targets, tasks)`."""

STRENGTHS = (1.0, 3.0, 10.0, 30.0, 100.0)
NUM_CANDIDATES = 2 * len(STRENGTHS)
"""How many scorers `fit_rates` compares."""


def auc(labels: NDArray[np.bool_], scores: NDArray[np.float64]) -> float:
    """Returns the area under the ROC curve.

    It is the fraction of pairs of a true and a false label whose scores are in that order, where
    ties count half.

    Args:
        labels: `(n,)`.
        scores: `(n,)`, higher is likelier.

    Returns:
        From 0 to 1; NaN where all labels are the same.

    Raises:
        ValueError: a score is NaN.
    """
    if np.isnan(scores).any():
        raise ValueError(
            f"scores: expected no NaN, got one in row {int(np.isnan(scores).argmax())}"
        )
    positives = int(labels.sum())
    pairs = positives * (len(labels) - positives)
    if not pairs:
        return math.nan
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # from 1; the mean of those that are tied
    return float((ranks[place[labels]].sum() - positives * (positives + 1) / 2) / pairs)


def normalized_entropy(labels: NDArray[np.bool_], logits: NDArray[np.float64]) -> float:
    """Returns the mean log loss over the entropy of the labels' rate.

    The entropy is the log loss of always predicting that rate: 0 is perfect, and 1 is as good as
    the rate. See He et al. 2014, "Practical Lessons from Predicting Clicks on Ads at Facebook",
    section 2.

    Args:
        labels: `(n,)`.
        logits: `(n,)`, of the probabilities of true.

    Returns:
        0 or more; NaN where all labels are the same.
    """
    rate = labels.mean()
    if rate in (0.0, 1.0):
        return math.nan
    loss = (np.logaddexp(0.0, logits) - labels * logits).mean()
    return float(loss / -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)))


@torch.no_grad()
def evaluate_ranking(
    scorer: Scorer,
    data: RankingData,
    windows: RankingWindows,
    tasks: Sequence[str],
    *,
    rows_per_batch: int,
    device: torch.device,
    processes: Processes | None = None,
) -> dict[str, float]:
    """Scores the candidates of windows.

    Several processes each score one batch at a time. All of them score equally often, because a
    sharded model computes on all processes at once; a process without a batch scores its last one
    again. The logits are put into the order of the batches, so metrics equal those of one process.

    Args:
        scorer: returns the logits.
        data: the events.
        windows: for example those of the test.
        tasks: names of actions, the columns of the logits.
        rows_per_batch: rows of the model scored at a time.
        device: where to score.
        processes: those that share the work; None is this one alone.

    Returns:
        "auc/TASK" and "ne/TASK" of each task, over all candidates; the same on each process.
    """
    processes = processes or Processes()
    batches = list(consecutive_batches(windows.lengths, rows_per_batch))
    scored: list[tuple[Tensor, NDArray[np.bool_]]] = []
    for start in range(0, len(batches), processes.num_ranks):
        number = start + processes.rank
        batch = data.batch(windows.take(batches[min(number, len(batches) - 1)]))
        logits = scorer(batch.to(device)).double()
        if number < len(batches):
            scored.append((logits, data.labels(batch.target_actions.numpy(), tasks)))
    found = [(logits.cpu().numpy(), labels) for logits, labels in scored]
    by_rank = processes.gather(found)
    metrics = {}
    if by_rank:
        in_order = [
            by_rank[number % processes.num_ranks][number // processes.num_ranks]
            for number in range(len(batches))
        ]
        of_all, labels = zip(*in_order, strict=True)
        metrics = _metrics(np.concatenate(of_all), np.concatenate(labels), tasks)
    return processes.from_first(metrics)


def _metrics(
    logits: FloatArray, labels: NDArray[np.bool_], tasks: Sequence[str]
) -> dict[str, float]:
    metrics = {}
    for task, truth, scores in zip(tasks, labels.T, logits.T, strict=True):
        metrics[f"auc/{task}"] = auc(truth, scores)
        metrics[f"ne/{task}"] = normalized_entropy(truth, scores)
    return metrics


def mean_entropy(metrics: Mapping[str, float]) -> float:
    """Returns the mean normalized entropy of the tasks, without those where it is NaN."""
    values = [value for name, value in metrics.items() if name.startswith("ne/")]
    return float(np.mean([value for value in values if not math.isnan(value)] or [math.inf]))


@dataclass(frozen=True)
class Rates:
    """Scores candidates by rates in the training events.

    The score is the overall logit plus the differences for the rate of the item and of the user.

    Attributes:
        base: `(tasks,)` fp64.
        items: `(num_items, tasks)` fp64.
        users: `(rows of the users' table, tasks)` fp64.
    """

    base: Tensor
    items: Tensor
    users: Tensor

    def __call__(self, batch: RankingBatch) -> Tensor:
        users = batch.contexts[:, CONTEXTS.index("user")]
        of_candidates = users.repeat_interleave(batch.target_offsets.diff())
        return self.base + self.items[batch.target_items] + self.users[of_candidates]


def base_rates(data: RankingData, tasks: Sequence[str]) -> FloatArray:
    """Returns the fraction of the training events in which each task's action was done, `(tasks,)`.

    Raises:
        ValueError: in the training events a task's action was always done, or never.
    """
    rates: FloatArray = data.labels(data.bits[data.training_events()], tasks).mean(axis=0)
    for task, rate in zip(tasks, rates.tolist(), strict=True):
        if rate in (0.0, 1.0):
            raise ValueError(
                f"tasks: expected both labels in the training events, got {task} at a rate of "
                f"{rate:.0%} (is it what --only keeps?)"
            )
    return rates


def fit_rates(
    data: RankingData, tasks: Sequence[str], quality: Callable[[Scorer], float]
) -> dict[str, Rates]:
    """Returns the baselines: the base rate, each item's rate, and each item's and user's rate.

    A rate is that of the training events and of `strength` further ones at the base rate, so that
    few events say little; the strength is the one that does best.

    Args:
        data: the events.
        tasks: names of actions.
        quality: highest for the best scorer, for example in validation.

    Raises:
        ValueError: in the training events a task's action was always done, or never.
    """
    events = data.training_events()
    labels = data.labels(data.bits[events], tasks)
    overall_rates = base_rates(data, tasks)
    base = _logit(overall_rates)
    item_sums = _sums(data.log.items[events], data.sizes["item"], labels)
    user_sums = _sums(data.user_rows(data.user_of(events)), data.sizes["user"], labels)

    def added(sums: tuple[FloatArray, FloatArray], strength: float) -> Tensor:
        counts, done = sums
        rates = (done + strength * overall_rates) / (counts + strength)
        return torch.from_numpy(_logit(rates) - base)

    overall = torch.from_numpy(base)
    no_items, no_users = (
        torch.zeros(data.sizes[name], len(tasks), dtype=torch.float64) for name in ("item", "user")
    )
    of_items = [Rates(overall, added(item_sums, strength), no_users) for strength in STRENGTHS]
    best = max(of_items, key=quality)
    of_both = [replace(best, users=added(user_sums, strength)) for strength in STRENGTHS]
    return {
        "base rate": Rates(overall, no_items, no_users),
        "item rate": best,
        "item and user rate": max(of_both, key=quality),
    }


def _sums(
    rows: NDArray[np.integer[Any]], size: int, labels: NDArray[np.bool_]
) -> tuple[FloatArray, FloatArray]:
    """Counts the events of each row, `(size, 1)`, and the events with each task's action.

    The latter are `(size, tasks)`.
    """
    counts = np.bincount(rows, minlength=size).astype(np.float64)[:, None]
    done = [np.bincount(rows, weights=column, minlength=size) for column in labels.T]
    return counts, np.stack(done, axis=1)


def _logit(rates: FloatArray) -> FloatArray:
    return np.log(rates) - np.log1p(-rates)
