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
        at: the time at which the model is asked; None is that of the user's last event.
        client: the client on whose behalf it is made; clients take turns in the queue.
        deadline: a time on the clock of `time.monotonic`. A request that still waits then is not
            computed, and its future raises DeadlineError.
        request_id: the same for each attempt to make a request, for traces.
        context: for an `UncachedModel`, what it reads of a request beside events and candidates.
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
    """Ends requests that have been computed, or cannot be, and counts them.

    Whoever waits for an answer runs as soon as it is there. In the same process that holds up the
    engine's thread, since only one thread at a time runs Python. So answers can be held until a
    device has something to do.

    Args:
        counters: count what becomes of requests.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._held: list[tuple[Request, Any]] = []

    def hold(self, answered: Sequence[tuple[Request, Any]]) -> None:
        """Keeps answers until `hand_out`, which the same thread is to call."""
        self._held += answered

    def hand_out(self) -> None:
        """Gives the answers that are held."""
        held, self._held = self._held, []
        if held:
            self.give(held)

    def give(self, answered: Sequence[tuple[Request, Any]]) -> None:
        """Gives requests, which are running, their answers."""
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
