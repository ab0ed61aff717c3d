"""A log with a rate limit for warnings that clients can cause at any rate."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter

__all__ = ["RateLimitedLog"]


class RateLimitedLog:
    """Logs the first warning of each kind at once, and further ones rarely, with their count.

    It is not thread-safe: the event loop of the server is to call it.

    Args:
        log: gets the lines.
        seconds: between two lines of a kind.
    """

    def __init__(self, log: logging.Logger, seconds: float = 10.0) -> None:
        self._log = log
        self._seconds = seconds
        self._counts: Counter[str] = Counter()
        self._logged_at: dict[str, float] = {}

    def warn(self, what: str, *values: object) -> None:
        """Counts a warning, and logs it unless one of its kind was logged in the last seconds.

        Args:
            what: its kind, a text with places for the values as `logging` takes it.
            values: the values of this warning.
        """
        self._counts[what] += 1
        now = time.monotonic()
        if now - self._logged_at.get(what, -math.inf) >= self._seconds:
            self._logged_at[what] = now
            self._log.warning(f"{what} (%d since the last such line)", *values, self._counts[what])
            del self._counts[what]
