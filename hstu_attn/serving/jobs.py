"""Jobs that other threads give to the thread of an engine, which runs them between batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from .commits import LOG

__all__ = ["Jobs"]


class Jobs:
    """A first-in, first-out queue of functions that one thread calls."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[Callable[[], object], Future[None] | None]] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Callable[[], object]) -> Future[None]:
        """Adds a job; the returned future completes with the job or has the job's exception."""
        done: Future[None] = Future()
        self._jobs.append((job, done))
        return done

    def add_alone(self, job: Callable[[], object]) -> None:
        """Adds a job that nobody waits for; an exception of the job is logged."""
        self._jobs.append((job, None))

    def run(self, before: Callable[[], None]) -> None:
        """Calls all jobs, and `before` before each job."""
        while self._jobs:
            before()
            job, done = self._jobs.popleft()
            try:
                job()
            except Exception as error:
                if done is None:
                    LOG.exception("What was to be done between batches failed")
                else:
                    done.set_exception(error)
            else:
                if done is not None:
                    done.set_result(None)
