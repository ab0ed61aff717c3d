"""Stores the events of batches, while an engine computes the next one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from .batch import Plan, Request
from .events import EventStore, User
from .scoring import Recommendation

__all__ = ["LOG", "Commits"]

LOG = logging.getLogger("hstu_attn.serving")

Answer = Tensor | Recommendation


class Commits:
    """At most one batch's commit at a time; a request is answered when its events are stored.

    Args:
        store: has the events.
        answer: is called with a request and its answer; from another thread, if the store waits.
        fail: likewise, with a request and its error.
        done: is called from the other thread when `end` would no longer wait.

    Attributes:
        users: the users of the commit under way.
    """

    def __init__(
        self,
        store: EventStore,
        answer: Callable[[Request, Answer], None],
        fail: Callable[[Request, Exception], None],
        done: Callable[[], None],
    ) -> None:
        self.users: set[User] = set()
        self._store = store
        self._answer = answer
        self._fail = fail
        self._done = done
        self._thread = ThreadPoolExecutor(1, "hstu_attn commit") if store.waits else None
        self._pending: Future[list[tuple[Plan, int | None]]] | None = None
        self._store_works = True

    def start(self, answered: Sequence[tuple[Plan, Answer]]) -> None:
        """Begins to store the events of plans, none being under way."""
        assert self._pending is None
        self.users = {plan.request.user for plan, _ in answered}
        if self._thread is not None:
            self._pending = self._thread.submit(self._commit, answered)
            self._pending.add_done_callback(lambda _: self._done())
        else:
            self._pending = Future()
            self._pending.set_result(self._commit(answered))

    def end(self) -> list[tuple[Plan, int | None]]:
        """Waits for the commit under way.

        Returns:
            Its plans, each with the new version of its history; 0 if another process has changed
            the user's events, so that the request is to be planned anew; None if it failed. Nothing
            if no commit is under way.
        """
        if self._pending is None:
            return []
        pending, self._pending = self._pending, None
        self.users = set()
        return pending.result()

    def _commit(self, answered: Sequence[tuple[Plan, Answer]]) -> list[tuple[Plan, int | None]]:
        plans = [plan for plan, _ in answered]
        try:
            versions = self._store.commit([plan.change for plan in plans])
        except Exception as error:
            self.tell(error)
            for plan in plans:
                self._fail(plan.request, error)
            return [(plan, None) for plan in plans]
        self.tell(None)
        for (plan, answer), version in zip(answered, versions, strict=True):
            if version:
                self._answer(plan.request, answer)
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
        """Ends the thread; no commit is under way."""
        if self._thread is not None:
            self._thread.shutdown()
