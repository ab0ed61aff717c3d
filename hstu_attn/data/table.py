"""Tables of text with delimited fields, read in blocks of some megabytes.

Each column of a block is checked and converted by array operations. A line that does not follow
its layout raises a `ValueError` that names the file, line, column, expectation and value, or is
left out and reported.

Fields are not quoted in the tables that are read here; a quote is a malformed field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from .layout import LONGEST_NATURAL_NUMBER, MalformedLines, open_bytes, shown

__all__ = ["Block", "delimiter_of", "read_table"]

BLOCK_BYTES = 1 << 22
LONGEST_KEY = 64  # bytes
LINE_BREAK, CARRIAGE_RETURN, QUOTE = b'\n\r"'
KEY = re.compile(rb"[!#-~]{1,%d}" % LONGEST_KEY)
DECIMAL = re.compile(rb"\d+(\.\d*)?")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Block:
    """Some lines of a table.

    Attributes:
        path: the file.
        names: the names of the columns.
        numbers: `(lines,)` int64, the number of each line in the file, from 1.
        data: the bytes of the lines.
        starts: `(lines, columns)`, where each field begins in `data`.
        stops: `(lines, columns)`, one past the end of each field in `data`.
        malformed: where malformed lines are reported; None means that the first one is an error.
        reasons: the reason and the text of each malformed line, by line number.
    """

    path: Path
    names: Sequence[str]
    numbers: NDArray[np.int64]
    data: NDArray[np.uint8]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    malformed: MalformedLines | None = None
    reasons: dict[int, tuple[bytes, str]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.numbers)

    def report(self) -> NDArray[np.bool_]:
        """Reports the malformed lines of the columns converted so far, in the order of the lines.

        Returns:
            `(lines,)`, True for the lines that are not malformed.
        """
        if self.malformed is None or not self.reasons:
            return np.ones(len(self), bool)
        for number, (text, reason) in sorted(self.reasons.items()):
            self.malformed.reject(self.path, number, text, reason)
        return ~np.isin(self.numbers, list(self.reasons))

    def natural(
        self,
        name: str,
        least: int = 0,
        most: int = 10**LONGEST_NATURAL_NUMBER - 1,
        unit: str | None = None,
    ) -> NDArray[np.int64]:
        """Converts a column of whole numbers, whose unit is in the message of an error.

        Raises:
            ValueError: a field that is something else, or is not from `least` to `most`, where
                malformed lines are errors.
        """
        starts, lengths = self._fields(name)
        bad = (lengths < 1) | (lengths > LONGEST_NATURAL_NUMBER)
        numbers = np.zeros(len(self), np.int64)
        for place in range(min(int(lengths.max(initial=0)), LONGEST_NATURAL_NUMBER)):
            inside = lengths > place
            digits = self.data[np.where(inside, starts + place, 0)] - np.uint8(ord("0"))
            bad |= inside & (digits > 9)
            numbers = np.where(inside, 10 * numbers + digits, numbers)
        self._require(
            ~bad & (numbers >= least) & (numbers <= most), name, _whole(least, most, unit)
        )
        return numbers

    def keys(self, name: str) -> NDArray[np.bytes_]:
        """Converts a column of ids that are text.

        Raises:
            ValueError: a field that is empty, too long, or has blanks, quotes or other than ASCII,
                where malformed lines are errors.
        """
        keys, good = self._text(name)
        expected = f"1 to {LONGEST_KEY} printable ASCII characters without blanks and quotes"
        self._require(good, name, expected)
        return keys

    def decimal(self, name: str, least: float, most: float) -> NDArray[np.float32]:
        """Converts a column of decimal numbers with few distinct values.

        Raises:
            ValueError: a field that is something else, or is not from `least` to `most`, where
                malformed lines are errors.
        """
        keys, good = self._text(name)
        texts, places = np.unique(keys, return_inverse=True)
        numbers = np.array([float(t) if DECIMAL.fullmatch(t) else np.nan for t in texts.tolist()])
        in_range = (numbers >= least) & (numbers <= most)
        self._require(good & in_range[places], name, f"a number from {least} to {most}")
        return numbers.astype(np.float32)[places]

    def refuse(self, row: int, name: str, expected: str) -> NoReturn:
        """Raises the `ValueError` of a malformed field."""
        raise ValueError(f"{self.path}:{self.numbers[row]}: {self._reason(row, name, expected)}")

    def _reason(self, row: int, name: str, expected: str) -> str:
        column = self.names.index(name)
        text = self.data[self.starts[row, column] : self.stops[row, column]].tobytes()
        return f"column {column + 1}, {name}: expected {expected}, got {shown(text)!r}"

    def _require(self, good: NDArray[np.bool_], name: str, expected: str) -> None:
        if good.all():
            return
        if self.malformed is None:
            self.refuse(int(np.argmin(good)), name, expected)
        for row in np.flatnonzero(~good).tolist():
            line = self.data[self.starts[row, 0] : self.stops[row, -1]].tobytes()
            reason = self._reason(row, name, expected)
            self.reasons.setdefault(int(self.numbers[row]), (line, reason))

    def _text(self, name: str) -> tuple[NDArray[np.bytes_], NDArray[np.bool_]]:
        """Returns the fields of a column, cut at `LONGEST_KEY`, and which may be keys."""
        starts, lengths = self._fields(name)
        places = np.arange(min(max(1, int(lengths.max(initial=0))), LONGEST_KEY))
        outside = places >= lengths[:, None]
        text = self.data[np.where(outside, 0, starts[:, None] + places)]
        printable = ((text > ord(" ")) & (text <= ord("~")) & (text != QUOTE)) | outside
        text[outside] = 0
        good = (lengths >= 1) & (lengths <= LONGEST_KEY) & printable.all(axis=1)
        return text.view(f"S{len(places)}").reshape(-1), good

    def _fields(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        column = self.names.index(name)
        starts = self.starts[:, column]
        return starts, self.stops[:, column] - starts


def _whole(least: int, most: int, unit: str | None) -> str:
    number = f"a whole number of {unit}" if unit else "a whole number"
    if most < 10**LONGEST_NATURAL_NUMBER - 1:
        return f"{number} from {least} to {most}"
    above = f" from {least}" if least else ""
    return f"{number}{above} of at most {LONGEST_NATURAL_NUMBER} digits"


def read_table(
    path: Path,
    names: Sequence[str],
    *,
    has_header: bool,
    progress: bool,
    delimiter: bytes | None = b",",
    malformed: MalformedLines | None = None,
) -> Iterator[Block]:
    """Reads the lines of a file block by block; unpacks it if its name ends in .gz.

    Args:
        path: the file.
        names: the names of all columns in their order; with a header, the required columns in any
            order.
        has_header: whether the first line names the columns.
        progress: shows a progress bar.
        delimiter: the separator of fields, one byte or more; None detects it from the header.
        malformed: where malformed lines are reported, which `Block.report` leaves out; None means
            that they are errors.

    Raises:
        ValueError: a header without one of the columns, or, without `malformed`, a line with a
            wrong number of fields.
    """
    line = 1
    with open_bytes(path, progress) as (file, moved):
        if has_header:
            header = file.readline().rstrip(b"\r\n").removeprefix(BYTE_ORDER_MARK)
            delimiter = delimiter or delimiter_of(header)
            found = header.decode(errors="backslashreplace").split(delimiter.decode())
            missing = [name for name in names if found.count(name) != 1]
            if missing:
                raise ValueError(
                    f"{path}:1: expected a header that names {', '.join(missing)} once, "
                    f"got {shown(header)!r}"
                )
            names = found
            line += 1
        assert delimiter is not None
        while data := file.read(BLOCK_BYTES) + file.readline():
            moved()
            if line == 1:
                data = data.removeprefix(BYTE_ORDER_MARK)
            if not data.endswith(b"\n"):
                data += b"\n"
            block, lines = _split(path, line, names, data, delimiter, malformed)
            line += lines
            if malformed is not None:
                yield block
                continue
            if len(block):
                yield block
            for number, (_, reason) in block.reasons.items():
                raise ValueError(f"{path}:{number}: {reason}")


def delimiter_of(header: bytes) -> bytes:
    """Returns the delimiter of a header: a tab if it contains one, otherwise a comma."""
    return b"\t" if b"\t" in header else b","


def _places(text: bytes, data: NDArray[np.uint8], delimiter: bytes) -> NDArray[np.int64]:
    """Returns the positions of the delimiter; of overlapping matches only the first counts."""
    at = data == delimiter[0]
    for place, byte in enumerate(delimiter[1:], start=1):
        at[:-place] &= data[place:] == byte
        at[-place:] = False
    found = np.flatnonzero(at)
    if len(delimiter) > 1 and (np.diff(found) < len(delimiter)).any():
        matches = re.finditer(re.escape(delimiter), text)
        found = np.array([match.start() for match in matches], np.int64)
    return found


def _split(
    path: Path,
    first_line: int,
    names: Sequence[str],
    text: bytes,
    delimiter: bytes,
    malformed: MalformedLines | None,
) -> tuple[Block, int]:
    """Returns the lines with one field per name, and the number of all lines.

    Malformed lines are in `Block.reasons`. Without `malformed`, only the first one is, and the
    block ends before it.
    """
    data = np.frombuffer(text, np.uint8)
    breaks = np.flatnonzero(data == LINE_BREAK)
    places = np.concatenate([_places(text, data, delimiter), breaks])
    places.sort(kind="stable")
    is_break = data[places] == LINE_BREAK
    starts = np.concatenate([[0], (places + np.where(is_break, 1, len(delimiter)))[:-1]])
    fields = np.diff(np.flatnonzero(is_break), prepend=-1)
    numbers = np.arange(first_line, first_line + len(fields))
    bad = np.flatnonzero(fields != len(names))
    reasons = {}
    if len(bad):
        if malformed is None:
            bad = bad[:1]
        ends = breaks[bad]
        begins = np.where(bad > 0, breaks[bad - 1] + 1, 0)
        for row, begin, end in zip(bad.tolist(), begins.tolist(), ends.tolist(), strict=True):
            line = text[begin:end].rstrip(b"\r")
            reason = (
                f"expected {len(names)} fields separated by {delimiter.decode()!r} "
                f"({', '.join(names)}), got {fields[row]}"
            )
            if malformed is None:
                reason += f": {shown(line)!r}"
            reasons[first_line + row] = line, reason
        good = fields == len(names)
        if malformed is None:
            good[bad[0] :] = False
        keep = np.repeat(good, fields)
        numbers, starts, places = numbers[good], starts[keep], places[keep]
    starts = starts.reshape(-1, len(names))
    stops = places.reshape(-1, len(names))
    last = stops[:, -1]
    last -= (data[np.maximum(last - 1, 0)] == CARRIAGE_RETURN) & (last > starts[:, -1])
    return Block(path, names, numbers, data, starts, stops, malformed, reasons), len(fields)
