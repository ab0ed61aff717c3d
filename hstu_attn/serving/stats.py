"""Counts of what an engine does, in the form that Prometheus takes."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

__all__ = ["EngineStats", "Histogram"]


@dataclass
class Histogram:
    """A count of values between bounds.

    Attributes:
        bounds: increasing; bucket `n` holds the values up to `bounds[n]` and above the bound
            before, and one more bucket the rest.
        counts: the counts of each bucket.
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
    """What an engine has done since it was made.

    Attributes:
        requests: accepted; each ends as completed, failed or cancelled.
        completed: answered.
        failed: ended by an error.
        cancelled: timed out, or cancelled by the caller; without an effect.
        rejected: refused because the queue was full; not among `requests`.
        batches: computed.
        graph_batches: the batches that a captured graph computed.
        hit_tokens: rows of events that the cache had, so that they were not computed.
        new_tokens: rows of events that came with the requests.
        recomputed_tokens: other rows of events that were computed: the last one before a request,
            whose time may have changed; and those of evicted users, of shortened histories and of
            what was in the store beforehand.
        batch_size: the sizes of the batches, in requests.
        latency: from submission to the answer, in seconds, of completed requests.
        queued: requests that wait now.
        users: whose events are stored now.
    """

    requests: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    rejected: int = 0
    batches: int = 0
    graph_batches: int = 0
    hit_tokens: int = 0
    new_tokens: int = 0
    recomputed_tokens: int = 0
    batch_size: Histogram = field(
        default_factory=lambda: Histogram((1, 2, 4, 8, 16, 32, 64, 128, 256))
    )
    latency: Histogram = field(
        default_factory=lambda: Histogram(
            (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
        )
    )
    queued: int = 0
    users: int = 0


class Counters:
    """An `EngineStats` that several threads change and read."""

    def __init__(self) -> None:
        self._stats = EngineStats()
        self._lock = threading.Lock()

    @contextmanager
    def change(self) -> Iterator[EngineStats]:
        """Yields the counts, for this thread alone until the block is left."""
        with self._lock:
            yield self._stats

    def snapshot(self, queued: int, users: int) -> EngineStats:
        """Returns a copy."""
        with self._lock:
            stats = self._stats
            return replace(
                stats,
                batch_size=replace(stats.batch_size, counts=[*stats.batch_size.counts]),
                latency=replace(stats.latency, counts=[*stats.latency.counts]),
                queued=queued,
                users=users,
            )
