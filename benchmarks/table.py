"""Tables, as Markdown or as text, and the formats of their cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .record import Record

__all__ = [
    "DTYPES",
    "Cells",
    "File",
    "Table",
    "by",
    "cpu_origin",
    "gpu_origin",
    "number",
    "number_columns",
    "record_table",
]

File = list[Record]  # the records of a file, all of one benchmark and group
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Table:
    """A table, with the paragraphs `before` and `after` unless they are empty."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    before: str = ""
    after: str = ""

    def markdown(self) -> list[str]:
        """Returns lines of Markdown."""
        rule = ["---" if n < 1 else "---:" for n in range(len(self.header))]
        return self._lines(f"| {' | '.join(cells)} |" for cells in (self.header, rule, *self.rows))

    def text(self) -> list[str]:
        """Returns lines with aligned columns, the first one flush left and the others right."""
        rows = [self.header, *self.rows]
        widths = [max(len(row[n]) for row in rows) for n in range(len(self.header))]
        return self._lines(
            "  ".join(
                cell.rjust(width) if n else cell.ljust(width)
                for n, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )

    def _lines(self, table: Iterable[str]) -> list[str]:
        before, after = ([x] if x else [] for x in (self.before, self.after))
        return [*before, *([""] if before else []), *table, *([""] if after else []), *after]


def number(x: float | None, digits: int = 3) -> str:
    """Formats a number with `digits` significant digits and no exponent."""
    if x is None:
        return "-"
    rounded = float(f"{x:.{digits}g}")
    return f"{rounded:.0f}" if rounded >= 10 ** (digits - 1) else f"{rounded:.{digits}g}"


Cells = dict[str, Callable[[Record], str]]  # by the header of their column


def record_table(columns: Cells, records: File, before: str = "", after: str = "") -> Table:
    """Returns a table with a row for each record."""
    rows = [[cell(record) for cell in columns.values()] for record in records]
    return Table(list(columns), rows, before, after)


def number_columns(**columns: str) -> Cells:
    """Returns columns of numbers; keyword arguments map a field to its column's header."""
    return {
        header: lambda record, field=field: number(record[field])  # type: ignore[misc]
        for field, header in columns.items()
    }


def cpu_origin(records: File) -> str:
    record = records[0]
    commits = " and ".join(dict.fromkeys(r["commit"] for r in records))
    features = [f for f in record["features"] if f.endswith("bf16")] or record["features"]
    return (
        f"{record['cpu']} ({', '.join(features)}), {record['threads']} threads, "
        f"torch {record['torch']}, {record['date']}, commit {commits}"
    )


def gpu_origin(record: Record) -> str:
    return (
        f"{record['gpu'] or record['cpu']}, torch {record['torch']}, CUDA {record['cuda']}, Triton "
        f"{record['triton']}, {record['date']}, commit {record['commit']}: `{record['command']}`"
    )


def by(records: Iterable[Record], *names: str) -> list[File]:
    """Groups the records by the values of these fields."""
    found: dict[tuple[object, ...], File] = {}
    for record in records:
        found.setdefault(tuple(record[name] for name in names), []).append(record)
    return list(found.values())
