"""Parquet files and text files of events, one or more, whose columns the caller names.

    open_event_log("events/", columns={"user": "account", "item": "sku", "timestamp": "at"})
    open_event_log("log.csv", columns={"user": "account", "item": "sku", "timestamp": "at"})

A text file has a header. A comma, a semicolon, a tab or a bar separates its fields, which may be in
double quotes.

* `user`, `item`: whole numbers from 0, or text. Ids in a text file are always text, so that `007`
  is not read as 7.
* `timestamp`: a timestamp or a date of Parquet, ISO 8601 in text files, or whole numbers: seconds
  or milliseconds, distinguished by their size.
* `rating`: numbers. It may be absent, and each event then has a rating of 1.
* Actions of a user, as in `hstu_attn.data.kuairand`: columns named as `ACTIONS`, each true or false
  (or 1 or 0). `EventLog.columns` holds `actions` if at least one of these columns exists.

A feature without a given column name is read from the column named as the feature; other columns
are not read. A null is an error.

It needs pyarrow: `pip install hstu_attn[parquet]`.
"""

from __future__ import annotations

import csv
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from .amazon import FIRST_MILLISECOND
from .kuairand import ACTIONS
from .layout import LONGEST_NATURAL_NUMBER, Events, MalformedLines, Reject, open_bytes
from .table import KEY, LONGEST_KEY

__all__ = ["FEATURES", "CsvLayout", "ParquetLayout", "parquet_files"]

FEATURES = ("user", "item", "timestamp", "rating")
BATCH_EVENTS = 1 << 18
DELIMITERS = ",;\t|"
TICKS_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def parquet_files(directory: Path) -> list[Path]:
    """Returns the Parquet files in a directory and below, in the order of their paths."""
    return sorted(directory.rglob("*.parquet"))


@dataclass(frozen=True)
class ParquetLayout:
    """The layout of Parquet files.

    Args:
        columns: the names of columns by feature, one of `FEATURES`.
        name: the name in the manifest of the preprocessed log.

    Raises:
        ValueError: `columns` has a key that is not in `FEATURES`.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    name: str = "parquet"
    kind: ClassVar[str] = "Parquet"

    def __post_init__(self) -> None:
        for feature in self.columns:
            if feature not in FEATURES:
                raise ValueError(
                    f"columns: expected names for {', '.join(FEATURES)}, got one for {feature!r}"
                )

    def read(
        self, sources: Sequence[Path], malformed: MalformedLines, progress: bool
    ) -> Generator[Events, None, None]:
        """Reads the events of all files, one file after the other.

        Raises:
            ValueError: pyarrow is not installed, or a file is damaged, lacks a column, or has a
                value that does not have its column's type.
        """
        try:
            import pyarrow as pa
        except ImportError as error:
            raise ValueError(
                f"{sources[0]} needs pyarrow: pip install 'hstu_attn[parquet]'"
            ) from error
        bar = tqdm(
            total=sum(source.stat().st_size for source in sources),
            desc=f"reading {len(sources)} {self.kind} files",
            unit="B",
            unit_scale=True,
            disable=not progress,
        )
        first: tuple[Path, list[str], Events] | None = None
        with bar:
            for source in sources:
                try:
                    row = 0
                    for names, batch in self._batches(source):
                        if not len(batch):
                            continue
                        columns = {key: batch.column(names[key]) for key in names}
                        events = _Columns(source, row, names, columns).events()
                        row += len(batch)
                        if first is None:
                            first = source, list(names), events
                        _require_alike(source, list(names), events, *first)
                        yield events
                except pa.ArrowInvalid as error:
                    raise ValueError(
                        f"{source}: expected a {self.kind} file, got: {error}"
                    ) from error
                bar.update(source.stat().st_size)
        if first is None:
            raise ValueError(f"{', '.join(map(str, sources))}: expected events, got none")

    def companions(self, source: Path) -> list[Path]:
        """Returns no further files."""
        return []

    def read_titles(self, source: Path, reject: Reject) -> dict[int, str]:
        """Returns no titles."""
        return {}

    def _batches(self, source: Path) -> Iterator[tuple[dict[str, str], Any]]:
        """Yields batches of the columns, with the names of the columns by feature or action."""
        from pyarrow import parquet

        with parquet.ParquetFile(source) as file:
            names = self._names(source, file.schema_arrow.names)
            for batch in file.iter_batches(BATCH_EVENTS, columns=[*names.values()]):
                yield names, batch

    def _names(self, source: Path, found: Sequence[str]) -> dict[str, str]:
        """Returns the columns to read, by feature or action."""
        names = {feature: self.columns.get(feature, feature) for feature in FEATURES}
        if "rating" not in self.columns and "rating" not in found:
            del names["rating"]
        missing = [name for name in names.values() if list(found).count(name) != 1]
        if missing:
            raise ValueError(
                f"{source}: expected one column {missing[0]!r}, got {', '.join(found)} "
                "(--columns, columns=..., names those of " + ", ".join(FEATURES) + ")"
            )
        return {**names, **{action: action for action in ACTIONS if action in found}}


@dataclass(frozen=True)
class CsvLayout(ParquetLayout):
    """The layout of delimited text files with a header.

    Args:
        columns: the names of columns by feature, one of `FEATURES`.
        name: the name in the manifest of the preprocessed log.
    """

    name: str = "csv"
    kind: ClassVar[str] = "CSV"

    def _batches(self, source: Path) -> Iterator[tuple[dict[str, str], Any]]:
        import pyarrow as pa
        from pyarrow import csv as text

        with open_bytes(source, progress=False) as (file, _):
            header = file.readline().decode("utf-8-sig", errors="backslashreplace")
        delimiter = max(DELIMITERS, key=header.count)
        names = self._names(source, next(csv.reader([header], delimiter=delimiter), []))
        # Types that are inferred from the first rows may not fit ids and ratings of later rows.
        types = {names[feature]: pa.string() for feature in ("user", "item")}
        if "rating" in names:
            types[names["rating"]] = pa.float32()
        with text.open_csv(
            source,
            parse_options=text.ParseOptions(delimiter=delimiter),
            convert_options=text.ConvertOptions(
                include_columns=[*names.values()], column_types=types
            ),
        ) as reader:
            for batch in reader:
                yield names, batch


def _require_alike(
    source: Path,
    names: list[str],
    events: Events,
    first_source: Path,
    first_names: list[str],
    first: Events,
) -> None:
    """Refuses files whose ids, times or columns are of another kind than in the first file."""
    kinds = [
        {
            "users": each.users.dtype.kind,
            "items": each.items.dtype.kind,
            "ticks per second": each.ticks_per_second,
            "columns": of_names,
        }
        for each, of_names in ((first, first_names), (events, names))
    ]
    for name, expected in kinds[0].items():
        if kinds[1][name] != expected:
            raise ValueError(
                f"{source}: expected {name} as in {first_source}, {expected!r}, "
                f"got {kinds[1][name]!r}"
            )


@dataclass(frozen=True)
class _Columns:
    """Columns of some consecutive events of a file.

    Attributes:
        source: the file.
        row: the number of the first event in the file, from 0.
        names: the names in the file, by feature or action.
        columns: `pyarrow.Array`s, by feature or action.
    """

    source: Path
    row: int
    names: dict[str, str]
    columns: dict[str, Any]

    def events(self) -> Events:
        """Returns the columns as events."""
        for feature, column in self.columns.items():
            if column.null_count:
                place = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
                self._refuse(feature, place, "no null")
        timestamps, ticks_per_second = self._timestamps()
        actions = np.zeros(len(timestamps), np.uint8)
        for bit, action in enumerate(ACTIONS):
            if action in self.columns:
                actions |= (self._natural(action, most=1) << bit).astype(np.uint8)
        has_actions = any(action in self.columns for action in ACTIONS)
        return Events(
            self._ids("user"),
            self._ids("item"),
            self._ratings(),
            timestamps,
            ticks_per_second,
            {"actions": actions} if has_actions else {},
        )

    def _ids(self, feature: str) -> NDArray[Any]:
        import pyarrow as pa

        column = self.columns[feature]
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if pa.types.is_integer(column.type):
            return self._natural(feature, column=column)
        encoded = self._cast(feature, column, pa.large_binary(), "whole numbers or text")
        encoded = encoded.dictionary_encode()
        keys = encoded.dictionary.to_pylist()
        places: NDArray[np.int32] = encoded.indices.to_numpy()
        good = np.array([KEY.fullmatch(key) is not None for key in keys])[places]
        expected = f"1 to {LONGEST_KEY} printable ASCII characters without blanks and quotes"
        self._require(feature, good, expected)
        different: NDArray[Any] = np.array(keys, np.bytes_)
        return different[places]

    def _timestamps(self) -> tuple[NDArray[np.int64], int]:
        import pyarrow as pa

        column = self.columns["timestamp"]
        if pa.types.is_date(column.type):
            column = column.cast(pa.timestamp("ms"))
        if pa.types.is_timestamp(column.type):
            stamps: NDArray[np.int64] = column.cast(pa.int64()).to_numpy()
            return stamps, TICKS_PER_SECOND[column.type.unit]
        times = self._natural("timestamp")
        in_seconds = bool(times[0] < FIRST_MILLISECOND)
        expected = f"{'seconds' if in_seconds else 'milliseconds'}, as the times before it are"
        self._require("timestamp", (times < FIRST_MILLISECOND) == in_seconds, expected)
        return times, 1 if in_seconds else 1000

    def _ratings(self) -> NDArray[np.float32]:
        import pyarrow as pa

        column = self.columns.get("rating")
        if column is None:
            return np.ones(len(self.columns["user"]), np.float32)
        values = self._cast("rating", column, pa.float32(), "numbers")
        ratings: NDArray[np.float32] = values.to_numpy(zero_copy_only=False)
        self._require("rating", np.isfinite(ratings), "a finite number")
        return ratings

    def _natural(
        self, feature: str, most: int = 10**LONGEST_NATURAL_NUMBER - 1, column: Any = None
    ) -> NDArray[np.int64]:
        import pyarrow as pa

        column = self.columns[feature] if column is None else column
        if not (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)):
            self._refuse_type(feature, column, "whole numbers")
        values: NDArray[Any] = column.to_numpy(zero_copy_only=False)
        self._require(feature, (values >= 0) & (values <= most), f"a whole number from 0 to {most}")
        return values.astype(np.int64, copy=False)

    def _cast(self, feature: str, column: Any, to: Any, expected: str) -> Any:
        import pyarrow as pa

        try:
            return column.cast(to)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            self._refuse_type(feature, column, expected)

    def _require(self, feature: str, good: NDArray[np.bool_], expected: str) -> None:
        if not good.all():
            self._refuse(feature, int(np.argmin(good)), expected)

    def _refuse(self, feature: str, place: int, expected: str) -> NoReturn:
        value = self.columns[feature][place].as_py()
        raise ValueError(
            f"{self.source}: column {self.names[feature]}, row {self.row + place}: "
            f"expected {expected}, got {value!r}"
        )

    def _refuse_type(self, feature: str, column: Any, expected: str) -> NoReturn:
        raise ValueError(
            f"{self.source}: column {self.names[feature]}: expected {expected}, got {column.type}"
        )
