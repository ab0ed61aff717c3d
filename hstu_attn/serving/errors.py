"""The errors that say why an engine does not answer a request."""

from __future__ import annotations

__all__ = [
    "DeadlineError",
    "EngineClosedError",
    "LongWaitError",
    "NoHistoryError",
    "OverloadedError",
]


class OverloadedError(RuntimeError):
    """The engine is overloaded; the request had no effect, and may be retried later.

    Attributes:
        retry_after: the estimated seconds until the engine may accept requests again.
    """

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class LongWaitError(OverloadedError):
    """The request was refused because it would have waited for too long."""


class EngineClosedError(RuntimeError):
    """The engine has been closed; the request was not served."""


class NoHistoryError(ValueError):
    """A retrieval model was asked for a user without any event."""


class DeadlineError(TimeoutError):
    """The deadline of a request passed before it was computed; the request had no effect."""
