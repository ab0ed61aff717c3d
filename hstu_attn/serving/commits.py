"""Stores the events of batches while an engine computes the next batches."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from .batch import Plan, Request
from .events import EventStore, StoreDamagedError, User
from .scoring import Recommendation

__all__ = ["LOG", "Commits"]

LOG = logging.getLogger("hstu_attn.serving")

_MOST_REQUESTS = 1024  # may wait for a store; a slower store holds up batches, too

Answer = Tensor | Recommendation
Ended = tuple[Plan, int | None]


class Commits:
    """Computed requests that are answered once their events are stored.

    One commit runs at a time. Requests that arrive meanwhile are stored together by the next
    commit, so a slow disk delays answers but not the computation of batches.

    Args:
        store: the store of the users' events.
        answer: is called with requests and their answers, from another thread if the store waits.
        fail: is called with a request and its error, from another thread if the store waits.
        done: is called from the other thread when `end` has something to return.

    Attributes:
        users: the users of requests that `end` has not returned yet; each has one request.
    """

    def __init__(
        self,
        store: EventStore,
        answer: Callable[[Sequence[tuple[Request, Answer]]], None],
        fail: Callable[[Request, Exception], None],
        done: Callable[[], None],
    ) -> None:
        self.users: set[User] = set()
        self._store = store
        self._answer = answer
        self._fail = fail
        self._done = done
        self._thread = ThreadPoolExecutor(1, "hstu_attn commit") if store.waits else None
        self._changed = threading.Condition()  # guards the next three
        self._waiting: list[tuple[Plan, Answer]] = []
        self._ended: list[Ended] = []
        self._running = False
        self._store_works = True

    def hold_up(self, requests: Sequence[Request]) -> bool:
        """Returns whether `end(wait=True)` must be called before these requests are planned."""
        if len(self.users) >= _MOST_REQUESTS:
            return True
        return not self.users.isdisjoint(request.user for request in requests)

    def start(self, answered: Sequence[tuple[Plan, Answer]]) -> None:
        """Starts to store the events of plans whose users are not in `users`."""
        self.users.update(plan.request.user for plan, _ in answered)
        if self._thread is None:
            self._ended += self._commit(answered)
            return
        with self._changed:
            self._waiting += answered
            if not self._running:
                self._running = True
                self._thread.submit(self._run)

    def end(self, wait: bool) -> list[Ended]:
        """Returns the plans whose commits have ended since the last call; `wait` awaits all.

        Returns:
            Plans, each with the new version of its history; 0 if another process has changed the
            user's events, so that the request must be planned again; None if the commit failed.
        """
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: not self._running)
            ended, self._ended = self._ended, []
        self.users.difference_update(plan.request.user for plan, _ in ended)
        return ended

    def _run(self) -> None:
        while True:
            with self._changed:
                answered, self._waiting = self._waiting, []
                if not answered:
                    self._running = False
                    self._changed.notify_all()
                    return
            ended = self._commit(answered)
            with self._changed:
                self._ended += ended
            self._done()

    def _commit(self, answered: Sequence[tuple[Plan, Answer]]) -> list[Ended]:
        plans = [plan for plan, _ in answered]
        try:
            versions = self._store.commit([plan.change for plan in plans])
        except StoreDamagedError as error:
            if len(plans) > 1:  # the events of one user may be damaged, and those of others not
                return [end for one in answered for end in self._commit([one])]
            LOG.error("%s", error)
            self._fail(plans[0].request, error)
            return [(plans[0], None)]
        except Exception as error:
            self.tell(error)
            for plan in plans:
                self._fail(plan.request, error)
            return [(plan, None) for plan in plans]
        self.tell(None)
        stored = zip(answered, versions, strict=True)
        self._answer([(plan.request, answer) for (plan, answer), version in stored if version])
        return [*zip(plans, versions, strict=True)]

    def tell(self, error: Exception | None) -> None:
        """Logs that the store has begun to fail, or works again."""
        if (error is None) == self._store_works:
            return
        self._store_works = error is None
        if error is not None:
            LOG.error("The store fails, and requests with it until it works again: %s", error)
        else:
            LOG.warning("The store works again")

    def close(self) -> None:
        """Ends the thread. No commit may be running."""
        if self._thread is not None:
            self._thread.shutdown()
