"""Reads events from text files, and reports lines that do not follow their layout."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

__all__ = [
    "EventLayout",
    "Events",
    "MalformedLineError",
    "MalformedLines",
    "only_source",
    "open_bytes",
    "parse_natural_number",
    "shown",
]

EXAMPLES_KEPT = 10
LONGEST_NATURAL_NUMBER = 18  # digits: always fits int64
LONGEST_SHOWN_LINE = 200  # bytes

Reject = Callable[[Path, int, bytes, str], None]
"""Takes a malformed line: path, line number from 1, the line, and what is wrong with it."""


class MalformedLineError(ValueError):
    """A line that does not follow its layout; the message says how."""


@dataclass(frozen=True)
class Events:
    """Consecutive events of a source; each array has one element per event.

    Attributes:
        users: the source's user ids, int64 or text (ASCII).
        items: the source's item ids, int64 or text (ASCII).
        ratings: float32.
        timestamps: int64, in ticks; a second has `ticks_per_second` ticks.
        columns: further columns of the layout, by name.
    """

    users: NDArray[Any]
    items: NDArray[Any]
    ratings: NDArray[np.float32]
    timestamps: NDArray[np.int64]
    ticks_per_second: int = 1
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)

    def select(self, keep: NDArray[np.bool_]) -> Events:
        """Returns the events for which `keep` holds."""
        return replace(
            self,
            users=self.users[keep],
            items=self.items[keep],
            ratings=self.ratings[keep],
            timestamps=self.timestamps[keep],
            columns={name: column[keep] for name, column in self.columns.items()},
        )


class EventLayout(Protocol):
    """The protocol of the classes that read a layout of events."""

    @property
    def name(self) -> str:
        """The name of the layout in the manifest of the preprocessed log."""

    def companions(self, source: Path) -> list[Path]:
        """Returns the further files from which the preprocessed log is made."""

    def read(
        self, sources: Sequence[Path], malformed: MalformedLines, progress: bool
    ) -> Generator[Events, None, None]:
        """Reads all events in blocks of some megabytes, in the order of the source.

        A malformed line goes to `malformed` or raises a `ValueError`.
        """

    def read_titles(self, source: Path, reject: Reject) -> dict[int, str]:
        """Returns titles by item id; malformed lines go to `reject`."""


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
        ValueError: there are several files.
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


class MalformedLines:
    """Counts malformed lines, writes them to a report, and keeps the first few.

    Attributes:
        count: the number of malformed lines.
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
