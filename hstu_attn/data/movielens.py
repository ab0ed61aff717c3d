"""The layouts in which MovieLens is published.

The 1M and 10M sets are `ratings.dat` and `movies.dat`, with fields separated by `::`. The 20M, 25M,
32M and latest sets are `ratings.csv` and `movies.csv`, with headers.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .layout import (
    Event,
    Events,
    MalformedLineError,
    MalformedLines,
    Reject,
    only_source,
    parse_natural_number,
    read_lines,
)

__all__ = ["MOVIELENS_CSV", "MOVIELENS_DAT", "MovieLensLayout"]

LOWEST_RATING, HIGHEST_RATING = 0.5, 5.0


@dataclass(frozen=True)
class MovieLensLayout:
    """One of the two MovieLens layouts.

    Args:
        name: the name in the manifest of the preprocessed log.
        delimiter: between the fields of a line.
        header: the first line of the ratings file, or None where neither file has one.
        titles_file: name of the file of titles, next to the ratings.
        titles_encoding: its text encoding.
    """

    name: str
    delimiter: bytes
    header: bytes | None
    titles_file: str
    titles_encoding: str

    def parse(self, line: bytes) -> Event:
        """Parses user, item, rating and timestamp of a line.

        Raises:
            MalformedLineError: saying what is wrong with it.
        """
        fields = line.split(self.delimiter)
        if len(fields) != 4:
            raise MalformedLineError(
                f"expected 4 fields separated by {self.delimiter.decode()!r}, got {len(fields)}"
            )
        user, item, rating_text, timestamp = fields
        try:
            rating = float(rating_text)
        except ValueError:
            rating = float("nan")
        if not LOWEST_RATING <= rating <= HIGHEST_RATING:
            raise MalformedLineError(
                f"rating: expected a number from {LOWEST_RATING} to {HIGHEST_RATING}, "
                f"got {rating_text.decode(errors='backslashreplace')!r}"
            )
        return (
            parse_natural_number("user", user),
            parse_natural_number("item", item),
            rating,
            parse_natural_number("timestamp", timestamp),
        )

    def read(self, sources: Sequence[Path], malformed: MalformedLines, progress: bool) -> Events:
        """Reads the events of the one file of ratings."""
        return read_lines(only_source(sources, self.name), self, malformed, progress)

    def companions(self, source: Path) -> list[Path]:
        """Returns the file of titles, where it exists."""
        titles = source.with_name(self.titles_file)
        return [titles] if titles.is_file() else []

    def read_titles(self, source: Path, reject: Reject) -> dict[int, str]:
        """Returns the titles by item id, from the file next to `source`; empty without one.

        Malformed lines go to `reject`.
        """
        titles: dict[int, str] = {}
        for path in self.companions(source):
            with path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if number == 1 and self.header is not None:
                        continue
                    line = line.rstrip(b"\r\n")
                    try:
                        item, title = self._parse_title(line)
                    except MalformedLineError as error:
                        reject(path, number, line, str(error))
                    else:
                        titles[item] = title
        return titles

    def _parse_title(self, line: bytes) -> tuple[int, str]:
        text = line.decode(self.titles_encoding, errors="replace")
        delimiter = self.delimiter.decode()
        fields = next(csv.reader([text]), []) if delimiter == "," else text.split(delimiter)
        if len(fields) != 3:
            raise MalformedLineError(
                f"expected 3 fields separated by {delimiter!r}, got {len(fields)}"
            )
        return parse_natural_number("item", fields[0].encode()), fields[1]


MOVIELENS_DAT = MovieLensLayout("movielens-dat", b"::", None, "movies.dat", "latin-1")
MOVIELENS_CSV = MovieLensLayout(
    "movielens-csv", b",", b"userId,movieId,rating,timestamp", "movies.csv", "utf-8"
)
