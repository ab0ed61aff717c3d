"""From the requests of a batch to the rows of a cached forward, on the host."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .events import ACTION, ITEM, TIME, History, Int64s, User
from .model import Rows

__all__ = ["Batch", "Plan", "Request", "pack"]


@dataclass(frozen=True, eq=False)
class Request:
    """What one caller asked for.

    Attributes:
        user: whose events.
        events: `(n, 3)` new ones.
        candidates: `(m,)` items to score; none where the best of the catalogue are asked for.
        top_k: how many of the catalogue; 0 where candidates are scored.
        exclude_seen: whether items of the user's history are left out of those.
        at: the time at which the model is asked; None is the time of the last event.
        submitted: by `time.monotonic`.
        future: of the answer.
    """

    user: User
    events: Int64s
    candidates: Int64s
    top_k: int
    exclude_seen: bool
    at: int | None
    submitted: float
    future: Future[Any] = field(default_factory=Future)


class Plan(NamedTuple):
    """A request with its user's events when it is served, and with those it brings."""

    request: Request
    before: History
    after: History

    @property
    def at(self) -> int:
        """The time at which the model is asked."""
        if self.request.at is not None:
            return self.request.at
        return int(self.after.events[-1, TIME]) if len(self.after.events) else 0


class Batch(NamedTuple):
    """A batch on the device: `total` rows of `B` requests, `total_k` keys, `n` candidates.

    Attributes:
        rows: what the model embeds.
        max_seq_len: most rows of a request.
        max_key_len: most keys of a request.
        host_offsets: `seq_offsets` as an array.
        host_targets: `num_targets` as an array.
        row_times: int64 `(total,)`, when each row is asked: at its user's next event, or now.
        key_times: int64 `(total_k,)`.
        candidates: int64 `(n,)`, of all requests.
        seq_offsets: int64 `(B + 1,)`.
        num_targets: int64 `(B,)`.
        state_rows: int64 `(n,)`, the row whose state each candidate is scored by.
        last_rows: int64 `(B,)`, the row of each user's last event.
    """

    rows: Rows
    max_seq_len: int
    max_key_len: int
    host_offsets: Int64s
    host_targets: Int64s
    row_times: Tensor
    key_times: Tensor
    candidates: Tensor
    seq_offsets: Tensor
    num_targets: Tensor
    state_rows: Tensor
    last_rows: Tensor


def pack(
    plans: Sequence[Plan], kept: Sequence[int], candidates_are_rows: bool, device: torch.device
) -> Batch:
    """The rows to compute: of each plan the events after the first `kept`, and its candidates."""
    parts, q_lens, k_lens, targets, counts = [], [], [], [], []
    for plan, first in zip(plans, kept, strict=True):
        events, candidates = plan.after.events, plan.request.candidates
        n = len(events)
        targets.append(len(candidates) if candidates_are_rows else 0)
        targeted = candidates[: targets[-1]]
        times = np.append(events[:, TIME], np.full(len(targeted) + 1, plan.at))
        parts.append(
            (
                np.append(events[first:, ITEM], targeted),
                np.append(events[first:, ACTION], np.zeros_like(targeted)),
                np.append(np.arange(first, n), np.full_like(targeted, n)),
                np.append(np.zeros(n - first, np.int64), np.ones_like(targeted)),
                times[first + 1 :],
                times[:-1],
                candidates,
            )
        )
        counts.append(len(candidates))
        q_lens.append(n - first + len(targeted))
        k_lens.append(n + len(targeted))

    ends = np.cumsum(np.asarray(q_lens))
    last_rows = ends - targets - 1
    state_rows = np.repeat(last_rows, counts)
    if candidates_are_rows:
        state_rows += 1 + np.arange(sum(counts)) - np.repeat(np.cumsum(counts) - counts, counts)
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    seq_offsets, num_targets = np.append(0, ends), np.asarray(targets)
    columns += [seq_offsets, num_targets, state_rows, last_rows]
    items, actions, positions, is_candidate, *others = _upload(columns, device)
    rows = Rows(items, actions, positions, is_candidate.bool())
    return Batch(rows, max(*q_lens, 1), max(*k_lens, 1), seq_offsets, num_targets, *others)


def _upload(arrays: Sequence[Int64s], device: torch.device) -> list[Tensor]:
    """The arrays on the device, by one copy."""
    together = torch.from_numpy(np.concatenate(arrays).astype(np.int64, copy=False))
    if device.type == "cuda":
        together = together.pin_memory()  # else the copy would wait for the GPU
    uploaded = together.to(device, non_blocking=True)
    return list(uploaded.split([len(array) for array in arrays]))
