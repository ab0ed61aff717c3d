"""The layouts in which MovieLens is published.

The 100K set is `u.data`, with tabs between the fields, and `u.item`. The 1M and 10M sets are
`ratings.dat` and `movies.dat`, with fields separated by `::`. The 20M, 25M, 32M and latest sets are
`ratings.csv` and `movies.csv`, with headers.
"""

from __future__ import annotations

import csv
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .amazon import FIRST_MILLISECOND
from .layout import (
    Events,
    MalformedLineError,
    MalformedLines,
    Reject,
    only_source,
    parse_natural_number,
)
from .table import read_table

__all__ = ["MOVIELENS_100K", "MOVIELENS_CSV", "MOVIELENS_DAT", "MovieLensLayout"]

LOWEST_RATING, HIGHEST_RATING = 0.5, 5.0


@dataclass(frozen=True)
class MovieLensLayout:
    """One of the MovieLens layouts.

    Args:
        name: the name in the manifest of the preprocessed log.
        delimiter: the separator of the fields of a line.
        columns: the columns of the ratings: user, item, rating and timestamp.
        has_header: whether the first lines of both files name their columns.
        titles_file: name of the file of titles, next to the ratings.
        titles_encoding: text encoding of the titles file.
        titles_delimiter: the separator of its fields; the first two are the item and the title.
        titles_fields: the number of fields in a line of the titles file.
    """

    name: str
    delimiter: bytes
    columns: tuple[str, str, str, str]
    has_header: bool
    titles_file: str
    titles_encoding: str
    titles_delimiter: str
    titles_fields: int = 3

    def read(
        self, sources: Sequence[Path], malformed: MalformedLines, progress: bool
    ) -> Generator[Events, None, None]:
        """Reads the events of the one file of ratings; malformed lines go to `malformed`."""
        source = only_source(sources, self.name)
        for block in read_table(
            source,
            self.columns,
            has_header=self.has_header,
            progress=progress,
            delimiter=self.delimiter,
            malformed=malformed,
        ):
            user, item, rating, timestamp = self.columns
            events = Events(
                block.natural(user),
                block.natural(item),
                block.decimal(rating, LOWEST_RATING, HIGHEST_RATING),
                block.natural(timestamp, most=FIRST_MILLISECOND - 1, unit="seconds"),
            )
            yield events.select(block.report())

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
                    if number == 1 and self.has_header:
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
        delimiter = self.titles_delimiter
        fields = next(csv.reader([text]), []) if delimiter == "," else text.split(delimiter)
        if len(fields) != self.titles_fields:
            raise MalformedLineError(
                f"expected {self.titles_fields} fields separated by {delimiter!r}, "
                f"got {len(fields)}"
            )
        return parse_natural_number("item", fields[0].encode()), fields[1]


COLUMNS = ("user", "item", "rating", "timestamp")

MOVIELENS_100K = MovieLensLayout(
    "movielens-100k", b"\t", COLUMNS, False, "u.item", "latin-1", "|", 24
)
MOVIELENS_DAT = MovieLensLayout(
    "movielens-dat", b"::", COLUMNS, False, "movies.dat", "latin-1", "::"
)
MOVIELENS_CSV = MovieLensLayout(
    "movielens-csv",
    b",",
    ("userId", "movieId", "rating", "timestamp"),
    True,
    "movies.csv",
    "utf-8",
    ",",
)
