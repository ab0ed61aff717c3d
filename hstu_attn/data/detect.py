"""Finds the layout of a source by the name that the caller gives, or by its first line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from .amazon import AMAZON_2014, AMAZON_2018, AMAZON_2023, ASIN_LENGTH, place_of_item
from .kuairand import KUAIRAND, kuairand_logs
from .layout import EventLayout, open_bytes, shown
from .movielens import MOVIELENS_100K, MOVIELENS_CSV, MOVIELENS_DAT
from .parquet import CsvLayout, ParquetLayout, parquet_files
from .table import BYTE_ORDER_MARK, delimiter_of

__all__ = ["LAYOUT_NAMES", "LayoutName", "detect_layout", "source_files"]

LayoutName = Literal[
    "movielens", "amazon", "amazon-2014", "amazon-2018", "kuairand", "parquet", "csv"
]
LAYOUT_NAMES: tuple[LayoutName, ...] = get_args(LayoutName)

WITHOUT_HEADER = {layout.name: layout for layout in (AMAZON_2014, AMAZON_2018)}
LONGEST_HEADER = 4096  # bytes


def source_files(source: str | Path | Sequence[str | Path]) -> list[Path]:
    """Returns the files of a source, which is one path or several paths of files or directories.

    A directory stands for its Parquet files, at any depth, or else for its KuaiRand logs.

    Raises:
        ValueError: there are no files.
    """
    given = [source] if isinstance(source, str | Path) else source
    files = []
    for path in map(Path, given):
        files += (parquet_files(path) or kuairand_logs(path)) if path.is_dir() else [path]
    if not files:
        raise ValueError("source: expected at least one file, got none")
    return files


def detect_layout(
    source: Path, name: LayoutName | None = None, columns: Mapping[str, str] | None = None
) -> EventLayout:
    """Returns the layout of a file, by the ending of its name and by its first line.

    Args:
        source: the file.
        name: one of `LAYOUT_NAMES`; None detects the layout.
        columns: names of the columns of Parquet files or of text files with a header, by feature.

    Raises:
        ValueError: no layout fits, `columns` is given for a layout with fixed column names, or
            either of two fields in a line of Amazon reviews may be the item.
    """
    if name is not None and name not in LAYOUT_NAMES:
        raise ValueError(f"layout: expected one of {', '.join(LAYOUT_NAMES)}, got {name!r}")
    if name == "parquet" or (name is None and source.suffix == ".parquet"):
        return ParquetLayout(columns or {})
    if name == "csv" or (name is None and columns is not None):
        return CsvLayout(columns or {})
    if columns is not None:
        raise ValueError(f"columns: expected None for the layout {name}, got {dict(columns)}")
    suffix = source.with_suffix("").suffix if source.suffix == ".gz" else source.suffix
    if name in (None, "movielens"):
        if suffix not in (".dat", ".csv", ".data"):
            raise ValueError(
                f"source: expected a name that ends in .dat, .csv or .data (or one of them and "
                f".gz), got {str(source)!r}"
            )
        if suffix != ".csv":
            return MOVIELENS_DAT if suffix == ".dat" else MOVIELENS_100K
        if name == "movielens":
            return MOVIELENS_CSV
    if name == "kuairand":
        return KUAIRAND
    if name in WITHOUT_HEADER:
        return WITHOUT_HEADER[name]
    with open_bytes(source, progress=False) as (file, _):
        line = file.readline(LONGEST_HEADER).rstrip(b"\r\n").removeprefix(BYTE_ORDER_MARK)
    fields = line.decode(errors="backslashreplace").split(",")
    if "parent_asin" in fields:
        return AMAZON_2023
    may_be_ratings = (
        len(fields) == 4 and fields[3].isdigit() and ASIN_LENGTH in (len(fields[0]), len(fields[1]))
    )
    if name == "amazon" or may_be_ratings:
        place = place_of_item(fields)
        if place is not None:
            return (AMAZON_2018, AMAZON_2014)[place]
        raise ValueError(
            f"{source}:1: expected reviews of Amazon with the item, an ASIN of 10 characters, "
            f"either first (2018) or second (2014), got {shown(line)!r}; name one by "
            "--layout amazon-2018 or amazon-2014 (layout=...)"
        )
    if fields[:2] == ["userId", "movieId"]:
        return MOVIELENS_CSV
    if {b"user_id", b"video_id", b"time_ms"} <= set(line.split(delimiter_of(line))):
        return KUAIRAND
    raise ValueError(
        f"{source}:1: expected the header {','.join(MOVIELENS_CSV.columns)!r} (MovieLens), "
        f"{','.join(AMAZON_2023.columns)!r} (Amazon, 2023) or that of KuaiRand's logs, or a line "
        f"{','.join(AMAZON_2018.columns)!r} (Amazon, 2018) or "
        f"{','.join(AMAZON_2014.columns)!r} (2014), got {shown(line)!r}; --columns (columns=...) "
        "reads a file with another header by the names of its columns"
    )
