"""The requests that wait for an engine. Dropped and expired requests end with an error here."""

from __future__ import annotations

import time

from .batch import Request
from .errors import DeadlineError, LongWaitError, OverloadedError
from .fair_queue import FairQueue
from .stats import Counters

__all__ = ["Waiting"]


class Waiting:
    """A `FairQueue` on the clock of `time.monotonic` that ends dropped and expired requests.

    Only the counters are thread-safe.

    Args:
        queue: the requests that wait.
        max_wait: how long a request may wait for others to join its batch, in seconds.
        counters: count how requests end.
    """

    def __init__(self, queue: FairQueue, max_wait: float, counters: Counters) -> None:
        self.queue = queue
        self.max_wait = max_wait
        self._counters = counters

    def __len__(self) -> int:
        return len(self.queue)

    def admit(self, request: Request) -> None:
        """Appends a request to the queue, which may displace and so end another one.

        Raises:
            DeadlineError: if the request's deadline has passed.
            OverloadedError: as `FairQueue.put`.
        """
        now = request.submitted
        if request.deadline <= now:
            with self._counters.change() as stats:
                stats.requests += 1
                stats.expired += 1
            raise DeadlineError("deadline: expected a time to come, got one that has passed")
        try:
            displaced = self.queue.put(request, now, self._dropped)
        except OverloadedError as error:
            with self._counters.change() as stats:
                if isinstance(error, LongWaitError):
                    stats.shed += 1
                else:
                    stats.rejected += 1
            raise
        with self._counters.change() as stats:
            stats.requests += 1
        if displaced is not None:
            self._displace(displaced)

    def check(self, client: str) -> None:
        """Checks whether `admit` might accept a request of a client.

        Raises:
            LongWaitError: as `FairQueue.check`.
        """
        try:
            self.queue.check(client, time.monotonic())
        except LongWaitError:
            with self._counters.change() as stats:
                stats.shed += 1
            raise

    @property
    def patience(self) -> float:
        """Returns the seconds that a batch that is not full still waits for further requests."""
        if len(self.queue) >= self.queue.max_batch_size:
            return 0.0
        return max(0.0, self.queue.oldest + self.max_wait - time.monotonic())

    @property
    def ready(self) -> bool:
        """Returns whether a batch can be taken now, without waiting for further requests."""
        return len(self.queue) > 0 and not self.patience

    def take(self) -> list[Request]:
        """Takes the next batch."""
        return self.queue.take(time.monotonic(), self._dropped)

    def finish(self) -> None:
        """Records that the batch taken last has been served."""
        self.queue.finish(time.monotonic())

    def level(self) -> dict[str, float]:
        """Returns the fields of `EngineStats` on waiting and running requests."""
        now, started = time.monotonic(), self.queue.started
        return {
            "queued": len(self.queue),
            "backlog": self.queue.backlog(now),
            "running": 0.0 if started is None else now - started,
        }

    def _dropped(self, request: Request) -> bool:
        """Returns whether a waiting request is cancelled or past its deadline; if so, ends it."""
        future = request.future
        late = time.monotonic() >= request.deadline
        if not (late or future.cancelled()):
            return False
        with self._counters.change() as stats:
            if late:
                stats.expired += 1
            else:
                stats.cancelled += 1
        if future.set_running_or_notify_cancel():
            future.set_exception(DeadlineError("deadline: it passed while the request waited"))
        return True

    def _displace(self, request: Request) -> None:
        """Ends a request that another one has displaced from the queue."""
        wanted = request.future.set_running_or_notify_cancel()
        with self._counters.change() as stats:
            if wanted:
                stats.displaced += 1
            else:
                stats.cancelled += 1
        if wanted:
            request.future.set_exception(
                OverloadedError(
                    "the engine is overloaded: this request gave way to one of a client or user "
                    f"with fewer of the {self.queue.max_size} that may wait (max_queue)"
                )
            )
