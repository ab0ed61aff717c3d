"""How text files spell events, and what happens to lines that do not follow their layout."""

from __future__ import annotations

import gzip
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

__all__ = [
    "Event",
    "EventLayout",
    "Events",
    "LineLayout",
    "MalformedLineError",
    "MalformedLines",
    "only_source",
    "open_bytes",
    "parse_natural_number",
    "read_lines",
    "shown",
]

EXAMPLES_KEPT = 10
LONGEST_NATURAL_NUMBER = 18  # digits: always fits int64
LONGEST_SHOWN_LINE = 200  # bytes

Event = tuple[int, int, float, int]
"""User, item, rating, timestamp in seconds."""

Reject = Callable[[Path, int, bytes, str], None]
"""Takes a malformed line: path, line number from 1, the line, and what is wrong with it."""


class MalformedLineError(ValueError):
    """A line that does not follow its layout; the message says how."""


@dataclass(frozen=True)
class Events:
    """The events of a source in its order, one element each.

    Attributes:
        users: int64, the source's ids, or indices into `user_keys`.
        items: int64, the source's ids, or indices into `item_keys`.
        ratings: float32.
        timestamps: int64, of which `ticks_per_second` make a second.
        user_keys: the source's ids where they are text, sorted.
        item_keys: the same of items.
        columns: what else the layout tells of each event, by name.
    """

    users: NDArray[np.int64]
    items: NDArray[np.int64]
    ratings: NDArray[np.float32]
    timestamps: NDArray[np.int64]
    ticks_per_second: int = 1
    user_keys: NDArray[np.bytes_] | None = None
    item_keys: NDArray[np.bytes_] | None = None
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)


class EventLayout(Protocol):
    """A text layout of events; another layout is another class with these members."""

    @property
    def name(self) -> str:
        """Stands in the manifest of the preprocessed log."""

    def companions(self, source: Path) -> list[Path]:
        """Further files that the preprocessed log is made from."""

    def read(self, sources: Sequence[Path], malformed: MalformedLines, progress: bool) -> Events:
        """Reads all events; a malformed line goes to `malformed` or raises a `ValueError`."""

    def read_titles(self, source: Path, reject: Reject) -> dict[int, str]:
        """Returns titles by item id; malformed lines go to `reject`."""


class LineLayout(Protocol):
    """A layout that is parsed line by line, by `read_lines`."""

    @property
    def header(self) -> bytes | None:
        """The first line of the file, or None where it has none."""

    def parse(self, line: bytes) -> Event:
        """Parses a line without its line break, or raises a `MalformedLineError`."""


def parse_natural_number(name: str, text: bytes) -> int:
    """Parses a number of at most 18 ASCII digits.

    Raises:
        MalformedLineError: for anything else, naming the field.
    """
    if not text.isdigit() or len(text) > LONGEST_NATURAL_NUMBER:
        raise MalformedLineError(
            f"{name}: expected a number of at most {LONGEST_NATURAL_NUMBER} digits, "
            f"got {shown(text)!r}"
        )
    return int(text)


def shown(text: bytes) -> str:
    """Decodes bytes of a file for a message."""
    return text[:LONGEST_SHOWN_LINE].decode(errors="backslashreplace")


def only_source(sources: Sequence[Path], layout: str) -> Path:
    """Returns the only file of a layout that reads one file.

    Raises:
        ValueError: there are more.
    """
    if len(sources) != 1:
        raise ValueError(f"the layout {layout} is one file, got {len(sources)}: {sources[1]}, ...")
    return sources[0]


@contextmanager
def open_bytes(path: Path, progress: bool) -> Iterator[tuple[IO[bytes], Callable[[], object]]]:
    """Opens a file, and unpacks it where its name ends in .gz.

    Yields the file and a function that moves the progress bar to what has been read so far.

    Raises:
        ValueError: a .gz file that is damaged or cut short.
    """
    bar = tqdm(
        total=path.stat().st_size,
        desc=f"reading {path.name}",
        unit="B",
        unit_scale=True,
        disable=not progress,
    )
    with path.open("rb") as raw, bar:

        def moved() -> object:
            return bar.update(raw.tell() - bar.n)

        if path.suffix != ".gz":
            yield raw, moved
            return
        try:
            with gzip.open(raw, "rb") as unpacked:
                yield cast("IO[bytes]", unpacked), moved
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: expected a whole gzip file, got: {error}") from error


def read_lines(
    source: Path, layout: LineLayout, malformed: MalformedLines, progress: bool
) -> Events:
    """Reads the events of a file that is parsed line by line, in its order."""
    users, items, ratings, timestamps = array("q"), array("q"), array("f"), array("q")
    with open_bytes(source, progress) as (file, moved):
        for number, raw in enumerate(file, start=1):
            line = raw.rstrip(b"\r\n")
            if number == 1 and layout.header is not None:
                if line != layout.header:
                    raise ValueError(
                        f"{source}:1: expected the header {layout.header.decode()!r}, "
                        f"got {shown(line)!r}"
                    )
                continue
            try:
                user, item, rating, timestamp = layout.parse(line)
            except MalformedLineError as error:
                malformed.reject(source, number, line, str(error))
            else:
                users.append(user)
                items.append(item)
                ratings.append(rating)
                timestamps.append(timestamp)
            if number % 65536 == 0:
                moved()
        moved()
    return Events(
        np.frombuffer(users, np.int64),
        np.frombuffer(items, np.int64),
        np.frombuffer(ratings, np.float32),
        np.frombuffer(timestamps, np.int64),
    )


class MalformedLines:
    """Malformed lines: all of them counted and written to a report, the first few kept.

    Attributes:
        count: how many there were.
        examples: the first ones, as `path:line number: reason: text`.
    """

    def __init__(self, report: IO[str]) -> None:
        self.count = 0
        self.examples: list[str] = []
        self._report = report

    def reject(self, path: Path, number: int, line: bytes, reason: str) -> None:
        """Records a line; this is a `Reject`."""
        entry = f"{path}:{number}: {reason}: {shown(line)!r}"
        self.count += 1
        if len(self.examples) < EXAMPLES_KEPT:
            self.examples.append(entry)
        self._report.write(entry + "\n")
