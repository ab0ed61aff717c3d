"""Amazon reviews as ratings only, one review a line, unpacked or as `.csv.gz`.

* 2014 (http://jmcauley.ucsd.edu/data/amazon/, "ratings only"): `user,item,rating,timestamp` without
  a header, timestamps in seconds.
* 2018 (https://nijianmo.github.io/amazon/, "ratings only"): `item,user,rating,timestamp` without a
  header, timestamps in seconds, all at midnight.
* 2023 (https://amazon-reviews-2023.github.io/, "pure IDs", `rating_only` in
  https://github.com/hyp1231/AmazonReviews2023): `user_id,parent_asin,rating,timestamp` with a
  header, timestamps in milliseconds.

The position of the item in the first line distinguishes files of 2014 and 2018: an item's ASIN has
ten characters, and is the ten digits of an ISBN (the last may be X) or starts with B.

Ids are text. They are numbered in the order of the text, and the log keeps the text:
`EventLog.user_keys` and `item_keys`. The distinct ids are held in memory.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .layout import Events, MalformedLines, Reject, only_source
from .table import read_table

__all__ = [
    "AMAZON_2014",
    "AMAZON_2018",
    "AMAZON_2023",
    "ASIN_LENGTH",
    "FIRST_MILLISECOND",
    "AmazonLayout",
    "place_of_item",
]

LOWEST_RATING, HIGHEST_RATING = 0.0, 5.0
ASIN_LENGTH = 10
ASIN = re.compile(r"B[0-9A-Z]{9}|[0-9]{9}[0-9X]")
FIRST_MILLISECOND = 10**11  # the unit's threshold: 1973 in milliseconds, 5138 in seconds


@dataclass(frozen=True)
class AmazonLayout:
    """One of the layouts of ratings.

    Args:
        name: the name in the manifest of the preprocessed log.
        columns: the columns in their order.
        user: the column of users.
        item: the column of items.
        has_header: whether the first line names the columns.
        ticks_per_second: the ticks per second of the timestamps.
    """

    name: str
    columns: tuple[str, ...]
    user: str
    item: str
    has_header: bool
    ticks_per_second: int

    def read(
        self, sources: Sequence[Path], malformed: MalformedLines, progress: bool
    ) -> Generator[Events, None, None]:
        """Reads the events of the one file.

        Raises:
            ValueError: a malformed line.
        """
        source = only_source(sources, self.name)
        in_seconds = self.ticks_per_second == 1
        times = {"most": FIRST_MILLISECOND - 1} if in_seconds else {"least": FIRST_MILLISECOND}
        block = None
        for block in read_table(
            source, self.columns, has_header=self.has_header, progress=progress
        ):
            asins = block.keys(self.item)
            if not self.has_header:
                short = np.char.str_len(asins) != ASIN_LENGTH
                if short.any():
                    block.refuse(
                        int(np.argmax(short)),
                        self.item,
                        f"an ASIN of {ASIN_LENGTH} characters (the files of 2018 have the item "
                        "first, those of 2014 the user)",
                    )
            yield Events(
                block.keys(self.user),
                asins,
                block.decimal("rating", LOWEST_RATING, HIGHEST_RATING),
                block.natural("timestamp", unit="seconds" if in_seconds else None, **times),
                self.ticks_per_second,
            )
        if block is None:
            raise ValueError(f"{source}: expected ratings, got none")

    def companions(self, source: Path) -> list[Path]:
        """Returns no further files: titles are in files of other kinds."""
        return []

    def read_titles(self, source: Path, reject: Reject) -> dict[int, str]:
        """Returns no titles."""
        return {}


def place_of_item(fields: Sequence[str]) -> int | None:
    """Returns which of the first two fields of a line without a header is the item, 0 or 1.

    The item is the field with the length of an ASIN; if both fields have this length, the field
    with the form of an ASIN. None means that neither field is the item, or that both may be.
    """
    lengths = [len(field) == ASIN_LENGTH for field in fields[:2]]
    forms = [ASIN.fullmatch(field) is not None for field in fields[:2]]
    for found in (lengths, forms):
        if found.count(True) == 1:
            return found.index(True)
    return None


AMAZON_2014 = AmazonLayout(
    "amazon-2014", ("user", "item", "rating", "timestamp"), "user", "item", False, 1
)
AMAZON_2018 = AmazonLayout(
    "amazon-2018", ("item", "user", "rating", "timestamp"), "user", "item", False, 1
)
AMAZON_2023 = AmazonLayout(
    "amazon-2023",
    ("user_id", "parent_asin", "rating", "timestamp"),
    "user_id",
    "parent_asin",
    True,
    1000,
)
