"""Counts of what an engine does, in the form that Prometheus takes."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["SECONDS", "EngineStats", "Histogram"]

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
"""The bounds of histograms of time."""


@dataclass
class Histogram:
    """A histogram with fixed buckets, as in Prometheus.

    Attributes:
        bounds: increasing; bucket `n` holds the values above `bounds[n - 1]` up to `bounds[n]`,
            and one more bucket holds the values above all bounds.
        counts: the count of each bucket.
        total: the sum of the values.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass
class EngineStats:
    """Counts of what an engine has done since it was made, and its state at one moment.

    Attributes:
        requests: accepted requests; each ends as completed, failed, cancelled, expired or
            displaced.
        completed: requests that were answered.
        failed: requests that ended with an error.
        cancelled: requests that the caller cancelled, or whose deadline passed while they were
            computed; they had no effect.
        expired: requests whose deadline passed before they were computed; they had no effect.
        displaced: requests dropped from a full queue in favor of a client or a user with fewer
            requests; they had no effect.
        rejected: requests refused because the queue was full; not counted in `requests`.
        shed: requests refused because of a long expected wait; not counted in `requests`.
        batches: the batches that were computed.
        graph_batches: the batches that a captured graph computed.
        hit_tokens: rows of events that the cache had, so that they were not computed.
        new_tokens: rows of events that came with the requests.
        recomputed_tokens: other rows of events that were computed: the last event before a request,
            whose row time may have changed; and events of evicted users, of shortened histories and
            of users whose events were in the store beforehand.
        batch_size: the sizes of the batches, in requests.
        latency: the time from submission to the answer, in seconds, of completed requests.
        queue_time: the time from submission to the batch, in seconds, of computed requests.
        step_time: how long the computation of a batch took, in seconds.
        queued: requests that wait now.
        backlog: seconds that the last waiting request will wait, at the pace of the latest batches;
            0 if all requests fit into the next batch.
        running: seconds since the running batch was taken from the queue; 0 if there is none.
        users: the number of users with events in the store now.
    """

    requests: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    displaced: int = 0
    rejected: int = 0
    shed: int = 0
    batches: int = 0
    graph_batches: int = 0
    hit_tokens: int = 0
    new_tokens: int = 0
    recomputed_tokens: int = 0
    batch_size: Histogram = field(
        default_factory=lambda: Histogram((1, 2, 4, 8, 16, 32, 64, 128, 256))
    )
    latency: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    queue_time: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    step_time: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    queued: int = 0
    backlog: float = 0.0
    running: float = 0.0
    users: int = 0


class Counters:
    """An `EngineStats` that several threads change and read."""

    def __init__(self) -> None:
        self._stats = EngineStats()
        self._lock = threading.Lock()

    @contextmanager
    def change(self) -> Iterator[EngineStats]:
        """Yields the counts, locked for this thread until the block ends."""
        with self._lock:
            yield self._stats

    def snapshot(self, **now: Any) -> EngineStats:
        """Returns a copy of the counts, with the fields on the present state set from `now`."""
        with self._lock:
            stats = self._stats
            copied = replace(stats, **now)
            for name, value in vars(stats).items():
                if isinstance(value, Histogram):
                    setattr(copied, name, replace(value, counts=[*value.counts]))
            return copied
