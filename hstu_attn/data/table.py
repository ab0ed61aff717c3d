"""Tables of text with comma-separated fields, read in blocks of some megabytes.

Each column of a block is checked and converted by array operations. A field that does not follow
its layout raises a `ValueError` that names the file, line, column, expectation and value.

Fields are not quoted in the tables that are read here; a quote is a malformed field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from .layout import LONGEST_NATURAL_NUMBER, open_bytes, shown

__all__ = ["Block", "KeyIndex", "read_table"]

BLOCK_BYTES = 1 << 22
LONGEST_KEY = 64  # bytes
COMMA, LINE_BREAK, CARRIAGE_RETURN, QUOTE = b',\n\r"'
DECIMAL = re.compile(rb"\d+(\.\d*)?")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Block:
    """Some consecutive lines of a table.

    Attributes:
        path: the file.
        first_line: the number of the first line, from 1.
        names: the names of the columns.
        data: the bytes of the lines.
        starts: `(lines, columns)`, where each field begins in `data`.
        stops: `(lines, columns)`, one past its end.
    """

    path: Path
    first_line: int
    names: Sequence[str]
    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    def natural(
        self, name: str, least: int = 0, most: int = 10**LONGEST_NATURAL_NUMBER - 1
    ) -> NDArray[np.int64]:
        """Converts a column of whole numbers.

        Raises:
            ValueError: a field that is something else, or is not from `least` to `most`.
        """
        starts, lengths = self._fields(name)
        bad = (lengths < 1) | (lengths > LONGEST_NATURAL_NUMBER)
        numbers = np.zeros(len(self), np.int64)
        for place in range(min(int(lengths.max()), LONGEST_NATURAL_NUMBER)):
            inside = lengths > place
            digits = self.data[np.where(inside, starts + place, 0)] - np.uint8(ord("0"))
            bad |= inside & (digits > 9)
            numbers = np.where(inside, 10 * numbers + digits, numbers)
        self._require(~bad & (numbers >= least) & (numbers <= most), name, _whole(least, most))
        return numbers

    def keys(self, name: str) -> NDArray[np.bytes_]:
        """Converts a column of ids that are text.

        Raises:
            ValueError: a field that is empty, too long, or has blanks, quotes or other than ASCII.
        """
        starts, lengths = self._fields(name)
        expected = f"1 to {LONGEST_KEY} printable ASCII characters without blanks and quotes"
        self._require((lengths >= 1) & (lengths <= LONGEST_KEY), name, expected)
        places = np.arange(int(lengths.max()))
        outside = places >= lengths[:, None]
        text = self.data[np.where(outside, 0, starts[:, None] + places)]
        good = ((text > ord(" ")) & (text <= ord("~")) & (text != QUOTE)) | outside
        self._require(good.all(axis=1), name, expected)
        text[outside] = 0
        return text.view(f"S{len(places)}").reshape(-1)

    def decimal(self, name: str, least: float, most: float) -> NDArray[np.float32]:
        """Converts a column of decimal numbers of which few are different.

        Raises:
            ValueError: a field that is something else, or is not from `least` to `most`.
        """
        texts, places = np.unique(self.keys(name), return_inverse=True)
        numbers = np.array([float(t) if DECIMAL.fullmatch(t) else np.nan for t in texts.tolist()])
        good = (numbers >= least) & (numbers <= most)
        self._require(good[places], name, f"a number from {least} to {most}")
        return numbers.astype(np.float32)[places]

    def refuse(self, row: int, name: str, expected: str) -> NoReturn:
        """Raises the `ValueError` of a malformed field."""
        column = self.names.index(name)
        text = self.data[self.starts[row, column] : self.stops[row, column]].tobytes()
        raise ValueError(
            f"{self.path}:{self.first_line + row}: column {column + 1}, {name}: "
            f"expected {expected}, got {shown(text)!r}"
        )

    def _require(self, good: NDArray[np.bool_], name: str, expected: str) -> None:
        if not good.all():
            self.refuse(int(np.argmin(good)), name, expected)

    def _fields(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        column = self.names.index(name)
        starts = self.starts[:, column]
        return starts, self.stops[:, column] - starts


def _whole(least: int, most: int) -> str:
    if most < 10**LONGEST_NATURAL_NUMBER - 1:
        return f"a whole number from {least} to {most}"
    above = f" from {least}" if least else ""
    return f"a whole number{above} of at most {LONGEST_NATURAL_NUMBER} digits"


def read_table(
    path: Path, names: Sequence[str], *, has_header: bool, progress: bool
) -> Iterator[Block]:
    """Reads the lines of a file block by block; unpacks it if its name ends in .gz.

    Args:
        path: the file.
        names: the names of all columns in their order; with a header, of those that it must name,
            in any order and among others.
        has_header: whether the first line names the columns.
        progress: shows a progress bar.

    Raises:
        ValueError: a header without one of the columns, or a line with another number of fields.
    """
    line = 1
    with open_bytes(path, progress) as (file, moved):
        if has_header:
            header = file.readline().rstrip(b"\r\n").removeprefix(BYTE_ORDER_MARK)
            found = header.decode(errors="backslashreplace").split(",")
            missing = [name for name in names if found.count(name) != 1]
            if missing:
                raise ValueError(
                    f"{path}:1: expected a header that names {', '.join(missing)} once, "
                    f"got {shown(header)!r}"
                )
            names = found
            line += 1
        while data := file.read(BLOCK_BYTES) + file.readline():
            moved()
            if not data.endswith(b"\n"):
                data += b"\n"
            block, rest = _split(path, line, names, data)
            line += len(block)
            if len(block):
                yield block
            if rest is not None:
                raise ValueError(
                    f"{path}:{line}: expected {len(names)} fields separated by ',' "
                    f"({', '.join(names)}), got {rest.count(b',') + 1}: {shown(rest)!r}"
                )


def _split(
    path: Path, first_line: int, names: Sequence[str], text: bytes
) -> tuple[Block, bytes | None]:
    """Returns the lines before the first malformed one, and the malformed line or None."""
    data = np.frombuffer(text, np.uint8)
    breaks = np.flatnonzero((data == COMMA) | (data == LINE_BREAK))
    fields = np.diff(np.flatnonzero(data[breaks] == LINE_BREAK), prepend=-1)
    bad = fields != len(names)
    rest = None
    if bad.any():
        row = int(np.argmax(bad))
        rest = text.split(b"\n", row + 1)[row].rstrip(b"\r")
        breaks = breaks[: row * len(names)]
    starts = np.concatenate([[0], breaks[:-1] + 1])[: len(breaks)].reshape(-1, len(names))
    stops = breaks.reshape(-1, len(names))
    last = stops[:, -1]
    last -= (data[np.maximum(last - 1, 0)] == CARRIAGE_RETURN) & (last > starts[:, -1])
    return Block(path, first_line, names, data, starts, stops), rest


class KeyIndex:
    """Numbers for ids that are text, handed out block by block."""

    def __init__(self) -> None:
        self._number_of: dict[bytes, int] = {}

    def numbers(self, keys: NDArray[np.bytes_]) -> NDArray[np.int64]:
        """Returns a number for each key, in the order in which keys were first seen."""
        different, places = np.unique(keys, return_inverse=True)
        known = self._number_of
        numbers = [known.setdefault(key, len(known)) for key in different.tolist()]
        return np.array(numbers, np.int64)[places]

    def sorted(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.bytes_], NDArray[np.int64]]:
        """Returns all keys, sorted, and for each number the index of its key among them.

        The indices do not depend on the order of the lines.
        """
        keys = np.array(list(self._number_of), dtype=np.bytes_)
        order = np.argsort(keys)
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        return keys[order], place[numbers]
