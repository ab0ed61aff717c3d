"""How text files spell events, and what happens to lines that do not follow their layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol

__all__ = ["Event", "EventLayout", "MalformedLineError", "MalformedLines", "parse_natural_number"]

EXAMPLES_KEPT = 10
LONGEST_NATURAL_NUMBER = 18  # digits: always fits int64
LONGEST_SHOWN_LINE = 200  # bytes

Event = tuple[int, int, float, int]
"""User, item, rating, timestamp in seconds."""

Reject = Callable[[Path, int, bytes, str], None]
"""Takes a malformed line: path, line number from 1, the line, and what is wrong with it."""


class MalformedLineError(ValueError):
    """A line that does not follow its layout; the message says how."""


class EventLayout(Protocol):
    """A text layout of events, one a line. Another layout is another class with these members."""

    @property
    def name(self) -> str:
        """Stands in the manifest of the preprocessed log."""

    @property
    def header(self) -> bytes | None:
        """The first line of the file, or None where it has none."""

    def parse(self, line: bytes) -> Event:
        """The event of a line without its line break, or a :class:`MalformedLineError`."""

    def companions(self, source: Path) -> list[Path]:
        """Further files that the preprocessed log is made from."""

    def read_titles(self, source: Path, reject: Reject) -> dict[int, str]:
        """Titles by item id; malformed lines go to ``reject``."""


def parse_natural_number(name: str, text: bytes) -> int:
    """A number of at most 18 ASCII digits.

    Raises:
        MalformedLineError: for anything else, naming the field.
    """
    if not text.isdigit() or len(text) > LONGEST_NATURAL_NUMBER:
        raise MalformedLineError(
            f"{name} must be a number of at most {LONGEST_NATURAL_NUMBER} digits, "
            f"got {text.decode(errors='backslashreplace')!r}"
        )
    return int(text)


class MalformedLines:
    """Malformed lines: all of them counted and written to a report, the first few kept.

    Attributes:
        count: how many there were.
        examples: the first ones, as ``path:line number: reason: text``.
    """

    def __init__(self, report: IO[str]) -> None:
        self.count = 0
        self.examples: list[str] = []
        self._report = report

    def reject(self, path: Path, number: int, line: bytes, reason: str) -> None:
        """Records a line; this is a ``Reject``."""
        text = line[:LONGEST_SHOWN_LINE].decode(errors="backslashreplace")
        entry = f"{path}:{number}: {reason}: {text!r}"
        self.count += 1
        if len(self.examples) < EXAMPLES_KEPT:
            self.examples.append(entry)
        self._report.write(entry + "\n")
