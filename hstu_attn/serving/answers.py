"""What callers of an engine get, and how they wait for it."""

from __future__ import annotations

import concurrent.futures
import math
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from .batch import Plan
from .errors import DeadlineError
from .events import ITEM

__all__ = ["Recommendation", "best_items", "deadline_after", "finite_or_none", "result_of"]

Answer = TypeVar("Answer")


class Recommendation(NamedTuple):
    """The best items of the catalogue, best first: int64 `(k,)`, and their scores `(k,)`."""

    items: Tensor
    scores: Tensor


def finite_or_none(scores: Tensor, plans: list[Plan]) -> list[Tensor | Recommendation | None]:
    """Splits the scores of all candidates; None stands for those with one that is not finite."""
    listed = scores.split([len(plan.request.candidates) for plan in plans])
    if scores.isfinite().all():
        return [*listed]
    return [found if found.isfinite().all() else None for found in listed]


def best_items(catalogue: Tensor, plans: list[Plan]) -> list[Recommendation]:
    """Returns the best items of each row of scores `(len(plans), num_items)`."""
    if any(plan.request.exclude_seen for plan in plans):
        seen = [
            plan.after.events[:, ITEM] if plan.request.exclude_seen else np.empty(0, np.int64)
            for plan in plans
        ]
        rows = np.repeat(np.arange(len(plans)), [len(items) for items in seen])
        indices = torch.from_numpy(np.stack([rows, np.concatenate(seen)])).to(catalogue.device)
        catalogue = catalogue.index_put(
            tuple(indices), torch.tensor(-torch.inf, dtype=catalogue.dtype, device=catalogue.device)
        )
    most = min(max(plan.request.top_k for plan in plans), catalogue.shape[1])
    best = catalogue.topk(most)
    recommendations = []
    for plan, scores, items in zip(plans, best.values.cpu(), best.indices.cpu(), strict=True):
        unseen = scores[: plan.request.top_k] != -torch.inf
        count = int(unseen.sum())
        recommendations.append(Recommendation(items[:count], scores[:count]))
    return recommendations


def deadline_after(timeout: float | None) -> float:
    """Returns the time of `time.monotonic` that is `timeout` seconds away."""
    return math.inf if timeout is None else time.monotonic() + timeout


def result_of(future: Future[Answer], timeout: float | None) -> Answer:
    """Waits for an answer; if it is late, cancels the request."""
    try:
        return future.result(timeout)
    except concurrent.futures.TimeoutError:
        with suppress(DeadlineError):
            if not future.cancel():
                return future.result()  # it came at the last moment
    raise TimeoutError(f"timeout: expected an answer within {timeout} s")
