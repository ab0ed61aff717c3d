"""Lines of the log about what clients can cause as often as they like."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter

__all__ = ["SparingLog"]


class SparingLog:
    """Warns of each kind of thing at once, and then at most once in some seconds, with a count.

    It is not thread-safe: the event loop of the server is to call it.

    Args:
        log: gets the lines.
        seconds: between two lines of a kind.
    """

    def __init__(self, log: logging.Logger, seconds: float = 10.0) -> None:
        self._log = log
        self._seconds = seconds
        self._untold: Counter[str] = Counter()
        self._told: dict[str, float] = {}

    def warn(self, what: str, *values: object) -> None:
        """Counts a thing, and logs it unless one of its kind has been logged a moment ago.

        Args:
            what: its kind: a text with places for the values, as `logging` takes it.
            values: the values of this one.
        """
        self._untold[what] += 1
        now = time.monotonic()
        if now - self._told.get(what, -math.inf) >= self._seconds:
            self._told[what] = now
            self._log.warning(f"{what} (%d since the last such line)", *values, self._untold[what])
            del self._untold[what]
