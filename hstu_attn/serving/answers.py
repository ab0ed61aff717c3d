"""How an engine is asked, and how callers wait for its answers."""

from __future__ import annotations

import concurrent.futures
import math
import time
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypedDict, TypeVar

from .errors import DeadlineError

__all__ = ["How", "deadline_after", "result_of"]

Answer = TypeVar("Answer")


class How(TypedDict, total=False):
    """Who asks an engine, and until when; each may be left out.

    Attributes:
        at: the time at which the model is asked; None is that of the user's last event.
        client: on whose behalf, for a fair share of the queue.
        deadline: on the clock of `time.monotonic`. After it, a request that still waits is not
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
