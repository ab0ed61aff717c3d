"""Turns the requests of a batch into the rows of a cached forward, on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..upload import upload
from .events import ACTION, ITEM, TIME, Change, Int64s, User
from .histories import History
from .model import Requests, Rows

__all__ = ["Batch", "Plan", "Request", "pack", "whole_requests"]


@dataclass(eq=False, slots=True)
class Request:
    """The request of one caller.

    Attributes:
        user: the user whose events these are.
        events: `(n, 3)` new events of the user.
        candidates: `(m,)` items to score; empty in a request for the best items of the catalog.
        top_k: the number of items to return from the catalog; 0 where candidates are scored.
        exclude_seen: whether items of the user's history are left out of the returned items.
        at: the time at which the model is queried; None is the time of the last event.
        submitted: when it was submitted, by `time.monotonic`.
        client: the client that the request is made for; clients take turns in the queue.
        deadline: the time by `time.monotonic` after which the answer is of no use.
        request_id: an id that all attempts at this request share; None if the caller gave none.
        context: what an `UncachedModel` reads besides events and candidates.
        span: the caller's OpenTelemetry span, if it is recorded.
        future: the future of the answer.
    """

    user: User
    events: Int64s
    candidates: Int64s
    top_k: int
    exclude_seen: bool
    at: int | None
    submitted: float
    client: str = ""
    deadline: float = math.inf
    request_id: str | None = None
    context: Any = None
    span: Any = None
    future: Future[Any] = field(default_factory=Future)


class Plan(NamedTuple):
    """A request, the user's history with the request's new events, and the change to store."""

    request: Request
    after: History
    change: Change

    @property
    def at(self) -> int:
        """The time at which the model is queried."""
        if self.request.at is not None:
            return self.request.at
        return int(self.after.events[-1, TIME]) if len(self.after.events) else 0

    @property
    def new(self) -> int:
        """The number of events in the history that are new with this request."""
        return min(len(self.change.events) - self.change.moved, len(self.after.events))


class Batch(NamedTuple):
    """A batch: `total` rows of `B` requests, `total_k` keys, `n` candidates.

    Tensors are on the device. Arrays are still to be copied to it, with the tables of the cache's
    step.

    Attributes:
        rows: the rows that the model embeds.
        max_seq_len: the largest number of rows of a request.
        max_key_len: the largest number of keys of a request.
        seq_offsets: int64 `(B + 1,)` array.
        num_targets: int64 `(B,)` array.
        row_times: int64 `(total,)`, the time at which each row predicts: that of its user's next
            event or, for the last event and candidates, that of the query; empty without times.
        key_times: int64 `(total_k,)`, or empty likewise.
        candidates: int64 `(n,)`, of all requests.
        state_rows: int64 `(n,)`, the row whose state each candidate is scored by.
        last_rows: int64 `(B,)`, the row of each user's last event.
    """

    rows: Rows
    max_seq_len: int
    max_key_len: int
    seq_offsets: Int64s
    num_targets: Int64s
    row_times: Tensor
    key_times: Tensor
    candidates: Tensor
    state_rows: Tensor
    last_rows: Tensor


def pack(
    plans: Sequence[Plan],
    kept: Sequence[int],
    device: torch.device,
    *,
    candidates_are_rows: bool,
    reads_times: bool,
) -> Batch:
    """Packs the rows to compute: each plan's events after the first `kept`, and its candidates."""
    first = np.asarray(kept)
    histories = [plan.after.events for plan in plans]
    listed = [plan.request.candidates for plan in plans]
    lengths, counts = np.array([[*map(len, histories)], [*map(len, listed)]])
    targets = counts if candidates_are_rows else np.zeros_like(counts)
    written = lengths - first
    candidates = np.concatenate(listed)
    events = np.concatenate([history[k:] for history, k in zip(histories, kept, strict=True)])
    seq_offsets = np.append(0, np.cumsum(written + targets))
    last_rows = seq_offsets[1:] - targets - 1
    state_rows = np.repeat(last_rows, counts)
    if candidates_are_rows:
        state_rows += _ranges(np.ones_like(counts), counts)

    # Where candidates are rows, they are most of the rows, and each has a state of its own.
    event_rows = _ranges(seq_offsets[:-1], written)
    items, actions, positions, is_candidate = np.zeros((4, seq_offsets[-1]), np.int64)
    items[event_rows] = events[:, ITEM]
    actions[event_rows] = events[:, ACTION]
    positions[event_rows] = _ranges(first, written)
    if candidates_are_rows:
        items[state_rows] = candidates
        positions[state_rows] = np.repeat(lengths, targets)
        is_candidate[state_rows] = 1

    row_times = key_times = np.empty(0, np.int64)
    if reads_times:
        # An event's row predicts at the time of the next event; the last one and targets at `at`.
        after = np.repeat([plan.at for plan in plans], targets + 1)
        ends = np.cumsum(targets + 1).tolist()
        rows_of, keys_of = [], []
        for history, k, begin, end in zip(histories, kept, [0, *ends[:-1]], ends, strict=True):
            times = history[:, TIME]
            rows_of += [times[k + 1 :], after[begin if len(times) else begin + 1 : end]]
            keys_of += [times, after[begin + 1 : end]]
        row_times, key_times = np.concatenate(rows_of), np.concatenate(keys_of)

    columns = [items, actions, positions, is_candidate, row_times, key_times, candidates]
    columns += [state_rows, last_rows]
    (together,) = upload([torch.from_numpy(np.concatenate(columns, dtype=np.int64))], device)
    uploaded = together.split([len(column) for column in columns])
    rows = Rows(uploaded[0], uploaded[1], uploaded[2], is_candidate=uploaded[3].bool())
    longest = int((written + targets).max(initial=1)), int((lengths + targets).max(initial=1))
    return Batch(rows, *longest, seq_offsets, targets, *uploaded[4:])


def whole_requests(plans: Sequence[Plan]) -> Requests:
    """Returns all events and candidates of the plans, for a model that computes them whole."""
    lengths = [len(plan.after.events) for plan in plans]
    counts = [len(plan.request.candidates) for plan in plans]
    return Requests(
        users=[plan.request.user for plan in plans],
        contexts=[plan.request.context for plan in plans],
        event_offsets=np.append(0, np.cumsum(lengths)),
        events=np.concatenate([plan.after.events for plan in plans]),
        times=np.array([plan.at for plan in plans]),
        candidate_offsets=np.append(0, np.cumsum(counts)),
        candidates=np.concatenate([plan.request.candidates for plan in plans]),
    )


def _ranges(starts: Int64s, lengths: Int64s) -> Int64s:
    """Returns the ranges `[start, start + length)`, concatenated."""
    before = np.cumsum(lengths) - lengths
    numbers: Int64s = np.arange(lengths.sum()) + np.repeat(starts - before, lengths)
    return numbers
