"""Writes the tables of README.md and docs/ from the stored results (`benchmarks/results`).

    python -m benchmarks.report
    python -m benchmarks.report --check

A table is between the marks `<!-- NAME:begin -->` and `<!-- NAME:end -->`; the text between them is
replaced. `DOCUMENTS` lists the tables of each file. With `--check` nothing is written, and the exit
status tells whether all tables are up to date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

PARSER = argparse.ArgumentParser(
    prog="python -m benchmarks.report",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
)
PARSER.add_argument("--check", action="store_true", help="write nothing")

if __name__ == "__main__":
    PARSER.parse_args()  # --help or a wrong option ends here, before torch is imported

from .example_tables import arrivals, soak
from .record import RESULTS, ROOT, read_records
from .table import File
from .tables import TABLES, peers, speed

__all__ = ["DOCUMENTS", "render"]

SUMMARY = ("32 x 1024", "8 x 4096", "2 x 16384")  # cases of the library comparison in README.md
SHOWN = {"attention": "table", "stack": "host tier"}  # the default group of a benchmark
OTHERS = ("rab", "deterministic", "masks", "latency", "host", "scan")  # further groups of attention
SOURCES = "Stored in `benchmarks/results/h200/`: `attention.json` and `peers.json`."


def stored(benchmark: str, group: str | None = None) -> list[File]:
    """Returns the records of each stored file that belong to a benchmark and to a group.

    Args:
        benchmark: the benchmark's name.
        group: the group's name; None for the default, in `SHOWN`.
    """
    group = group or SHOWN.get(benchmark)
    files = [read_records(path) for path in sorted(RESULTS.glob("*/*.json"))]
    chosen = [
        [r for r in file if r["benchmark"] == benchmark and (not group or r["group"] == group)]
        for file in files
    ]
    return [records for records in chosen if records]


def tables(*benchmarks: str, group: str | None = None) -> list[str]:
    """Renders the tables of stored results as Markdown."""
    made = [x for each in benchmarks for x in TABLES[each](stored(each, group))]
    return [line for table in made for line in (*table.markdown(), "")][:-1]


def with_others(*cases: str) -> list[str]:
    """Renders the table that compares this library with others on an H200 as Markdown."""
    [ours], [theirs] = stored("attention"), stored("peers")
    return [*peers(ours, theirs, cases).markdown(), "", SOURCES]


def speed_lines() -> list[str]:
    """Renders the lines of README.md about speed."""
    [ours], [theirs] = stored("attention"), stored("peers")
    return [*speed(ours, theirs), SOURCES]


def soaks() -> list[str]:
    """Renders the soak tests of engines as Markdown."""
    return [
        line
        for records in stored("engine")
        if "soak" in records[0]
        for line in soak(records).markdown()
    ]


def engine_arrivals() -> list[str]:
    """Renders the load tests of engines with random arrivals as Markdown."""
    files = [[r for r in records if "load" in r] for records in stored("engine")]
    made = [arrivals(records) for records in files if records]
    return [line for x in made for line in (*x.markdown(), "")][:-1] or ["No results are stored."]


def published() -> list[str]:
    """Renders the metrics of the recipes as Markdown, with the stored plots of their curves."""
    pictures = [
        f'<img src="../{path.relative_to(ROOT).as_posix()}" width="800" '
        f'alt="HR@10 and NDCG@10 after each epoch, {path.stem.removeprefix("published-")}">'
        for path in sorted(RESULTS.glob("*/published-*.png"))
    ]
    between = [line for picture in pictures for line in ("", picture)]
    return [*(tables("published") or ["No results are stored."]), *between]


def fp8_training() -> list[str]:
    """Renders the metrics of training in FP8 as Markdown, with the stored plots of its curves."""
    pictures = [
        f'<img src="../../{path.relative_to(ROOT).as_posix()}" width="800" '
        'alt="Training loss and NDCG@10 after each epoch in bf16 and in FP8">'
        for path in sorted(RESULTS.glob("*/fp8-training-*.png"))
    ]
    return [*tables("fp8_training"), *(line for each in pictures for line in ("", each))]


def ranking(of_real_data: bool) -> list[str]:
    """Renders the ranking example's metrics on real or on synthetic data as Markdown."""
    files = [file for file in stored("ranking") if ("data" in file[0]) == of_real_data]
    return [line for table in TABLES["ranking"](files) for line in (*table.markdown(), "")][:-1]


# The text between marks in each document, by the marks' name.
DOCUMENTS: dict[Path, dict[str, Callable[[], list[str]]]] = {
    ROOT / "README.md": {"speed": speed_lines, "peers": partial(with_others, *SUMMARY)},
    ROOT / "docs/performance.md": {
        "cpu": partial(tables, "cpu"),
        "gpu": partial(tables, "attention"),
        **{group: partial(tables, "attention", group=group) for group in OTHERS},
        "peers": with_others,
        "step": partial(tables, "training_step"),
    },
    ROOT / "docs/quickstart/training.md": {
        "retrieval": partial(tables, "retrieval"),
        "ranking": partial(ranking, False),
    },
    ROOT / "docs/published.md": {"published": published, "ratings": partial(ranking, True)},
    ROOT / "docs/quickstart/serving.md": {
        "serving": partial(tables, "serving"),
        "arrivals": engine_arrivals,
        "soak": soaks,
    },
    ROOT / "docs/serving_events.md": {"startup": partial(tables, "startup")},
    ROOT / "docs/distributed.md": {
        "train": partial(tables, "train"),
        "context": partial(tables, "context"),
    },
    ROOT / "docs/kernels/cpu.md": {"limits": partial(tables, "cpu_limits")},
    ROOT / "docs/kernels/layer.md": {"layer": partial(tables, "layer")},
    ROOT / "docs/kernels/paged.md": {"paged": partial(tables, "paged", "stack")},
    ROOT / "docs/kernels/fp8.md": {
        "fp8": partial(tables, "attention", group="fp8"),
        "fp8_backward": partial(tables, "attention", group="fp8_backward"),
        "training": fp8_training,
    },
    ROOT / "docs/kernels/relative_bias.md": {
        "relative": partial(tables, "attention", group="relative")
    },
}


def render(path: Path) -> str:
    """Returns the text of a document with its tables replaced by new ones.

    Raises:
        ValueError: if the marks of a table are missing or occur more than once.
    """
    text = path.read_text()
    for name, make in DOCUMENTS[path].items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{path.name}: expected one {begin.strip()} and one {end}")
        before, rest = text.split(begin)
        after = rest.split(end)[1]
        text = before + "\n".join([begin, *make(), "", end]) + after
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrites the documents, or checks them."""
    options = PARSER.parse_args(arguments)
    status = 0
    for path in DOCUMENTS:
        rendered = render(path)
        if rendered == path.read_text():
            continue
        if options.check:
            print(f"{path.name}: its tables are not those of {RESULTS}", file=sys.stderr)
            status = 1
        else:
            path.write_text(rendered)
    return status


if __name__ == "__main__":
    sys.exit(main())
