"""The options with which an engine is asked, and the answers for which its callers wait."""

from __future__ import annotations

import concurrent.futures
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypedDict, TypeVar

from .batch import Request
from .errors import DeadlineError
from .stats import Counters

__all__ = ["Answers", "RequestOptions", "deadline_after", "result_of"]

Answer = TypeVar("Answer")


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of a request, such as the client that makes it; all are optional.

    Attributes:
        at: the time at which the model is queried; None is the time of the user's last event.
        client: the client that the request is made for; clients take turns in the queue.
        deadline: a time on the clock of `time.monotonic`. A request that still waits then is not
            computed, and its future raises DeadlineError.
        request_id: an id for traces, which all attempts at the request share.
        context: what an `UncachedModel` reads of a request besides events and candidates.
    """

    at: int | None
    client: str
    deadline: float
    request_id: str | None
    context: Any


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


class Answers:
    """Completes requests with their answers or errors, and counts them.

    A caller that waits for an answer runs as soon as the answer is set. If it is in the same
    process, it delays the engine's thread, because both need the GIL. So answers can be held until
    the device has work.

    Args:
        counters: count how requests end.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._held: list[tuple[Request, Any]] = []

    def hold(self, answered: Sequence[tuple[Request, Any]]) -> None:
        """Keeps answers until the same thread calls `hand_out`."""
        self._held += answered

    def hand_out(self) -> None:
        """Sets the answers that `hold` has kept."""
        held, self._held = self._held, []
        if held:
            self.give(held)

    def give(self, answered: Sequence[tuple[Request, Any]]) -> None:
        """Sets the answers of requests whose futures are running."""
        now = time.monotonic()
        with self._counters.change() as stats:
            stats.completed += len(answered)
            for request, _ in answered:
                stats.latency.add(now - request.submitted)
        for request, answer in answered:
            request.future.set_result(answer)

    def fail(self, request: Request, error: Exception) -> None:
        """Ends a request with an error, unless it has been cancelled."""
        future = request.future
        wanted = future.running() or future.set_running_or_notify_cancel()
        with self._counters.change() as stats:
            if wanted:
                stats.failed += 1
            else:
                stats.cancelled += 1
        if wanted:
            future.set_exception(error)
