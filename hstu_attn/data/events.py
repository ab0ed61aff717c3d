"""Event logs on disk: who did what, how it was rated, and when, grouped by user in time order.

A source is streamed once and turned into arrays, memory-mapped afterwards, with a JSON
manifest with a fingerprint of the source and of the options. Opening the same source again maps
the arrays; a changed source is read again. The directory is written under another name and renamed,
so it is either whole or absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from .detect import LayoutName, detect_layout, source_files
from .kuairand import ACTIONS
from .layout import EventLayout, Events, MalformedLines
from .movielens import MovieLensLayout
from .preprocess import LEAST_USER_EVENTS, preprocess

__all__ = ["Catalog", "EventLog", "Ties", "open_event_log"]

Catalog: TypeAlias = Literal["log", "titles"]
"""The items of a log: those that have events, or those of the file of titles, too."""
Ties: TypeAlias = Literal["log", "quicksort"]
"""The order of a user's events of equal times: that of the log, or one that NumPy's sort leaves."""

FORMAT_VERSION = 3
CATALOG_OF_TITLES = '--catalog titles (catalog="titles")'  # in messages
ARRAYS = ("user_ids", "item_ids", "offsets", "items", "ratings", "timestamps")


class EventLog:
    """The events of all users, memory-mapped.

    User `u` owns the events `offsets[u] .. offsets[u + 1]`, oldest first. Events of equal times
    keep the order of the file, unless `open_event_log` was given other `ties`.

    Attributes:
        user_ids: `(num_users,)` int64, the source's user ids, increasing; if the ids are text, the
            numbers from 0.
        item_ids: `(num_items,)` int64, the item ids likewise. With `catalog="titles"` they include
            items without events.
        user_keys: `(num_users,)`, the source's user ids if they are text (ASCII), increasing;
            otherwise None.
        item_keys: `(num_items,)`, the source's item ids likewise.
        offsets: `(num_users + 1,)` int64.
        items: `(num_events,)` int32, indices into `item_ids`.
        ratings: `(num_events,)` float32.
        timestamps: `(num_events,)` int64, seconds.
        columns: further columns of the layout, by name, `(num_events,)` each.
        titles: the title of each item, or its id if the source has no title.
        directory: the directory of the preprocessed form.
        manifest: counts of read, kept and rejected events, and the fingerprint.
        malformed_report: a file that lists every malformed line.
    """

    user_ids: NDArray[np.int64]
    item_ids: NDArray[np.int64]
    offsets: NDArray[np.int64]
    items: NDArray[np.int32]
    ratings: NDArray[np.float32]
    timestamps: NDArray[np.int64]

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.manifest: dict[str, Any] = json.loads((directory / "manifest.json").read_text())
        for name in ARRAYS:
            setattr(self, name, np.load(directory / f"{name}.npy", mmap_mode="r"))
        keys = {
            name: np.load(directory / f"{name}.npy", mmap_mode="r")
            for name in self.manifest["keys"]
        }
        self.user_keys: NDArray[np.bytes_] | None = keys.get("user_keys")
        self.item_keys: NDArray[np.bytes_] | None = keys.get("item_keys")
        self.columns: dict[str, NDArray[Any]] = {
            name: np.load(directory / f"column-{name}.npy", mmap_mode="r")
            for name in self.manifest["columns"]
        }
        self.titles: list[str] = json.loads((directory / "titles.json").read_text())
        self.malformed_report = directory / "malformed.txt"

    @property
    def num_users(self) -> int:
        return len(self.user_ids)

    @property
    def num_items(self) -> int:
        return len(self.item_ids)

    @property
    def num_events(self) -> int:
        return len(self.items)

    @property
    def source_user_ids(self) -> Sequence[int | str]:
        """The source's ids of all users, in the log's order; text if the source's ids are text."""
        return _source_ids(self.user_ids, self.user_keys)

    @property
    def source_item_ids(self) -> Sequence[int | str]:
        """The source's ids of all items, in the log's order; text if the source's ids are text."""
        return _source_ids(self.item_ids, self.item_keys)

    def user_name(self, user: int) -> str:
        """Returns the source's id of a user, as text."""
        return _name(self.user_ids, self.user_keys, user)

    def find_user(self, name: str) -> int | None:
        """Returns the user with that id in the source, or None."""
        if self.user_keys is not None:
            place = int(np.searchsorted(self.user_keys, np.bytes_(name.encode())))
        else:
            if not (name.isascii() and name.isdigit()):
                return None
            place = int(np.searchsorted(self.user_ids, int(name)))
        return place if place < self.num_users and self.user_name(place) == name else None

    def describe(self) -> str:
        """Returns a summary, in some lines, of the events that were read and left out."""
        manifest = self.manifest
        # Preprocessed forms that were made before `catalog` existed do not have this number.
        eventless = manifest.get("eventless_items", 0)
        lines = [
            f"{self.num_events:,} events of {self.num_users:,} users on "
            f"{self.num_items - eventless:,} items"
        ]
        if eventless:
            lines[0] += f", and {eventless:,} items without events"
        if manifest["other_events"]:
            lines.append(
                f"Left out: {manifest['other_events']:,} events without "
                f"{manifest['fingerprint']['only']}"
            )
        if manifest["rare_events"]:
            lines.append(
                f"Left out: {manifest['rare_events']:,} events of users with fewer than "
                f"{manifest['fingerprint']['min_user_events']} events or on items with fewer than "
                f"{manifest['fingerprint']['min_item_events']}"
            )
        if manifest["dropped_users"]:
            lines.append(
                f"Left out: {manifest['dropped_users']:,} users with fewer than "
                f"{LEAST_USER_EVENTS} events ({manifest['dropped_events']:,} events)"
            )
        if manifest["malformed_lines"]:
            lines.append(
                f"Left out: {manifest['malformed_lines']:,} malformed lines, "
                f"all listed in {self.malformed_report}"
            )
            lines += [f"  {example}" for example in manifest["malformed_examples"]]
            more = manifest["malformed_lines"] - len(manifest["malformed_examples"])
            if more:
                lines.append(f"  ... and {more:,} more")
        return "\n".join(lines)


def open_event_log(
    source: str | Path | Sequence[str | Path],
    cache_dir: str | Path | None = None,
    progress: bool = False,
    *,
    layout: LayoutName | None = None,
    columns: Mapping[str, str] | None = None,
    only: str | None = None,
    min_user_events: int = 1,
    min_item_events: int = 1,
    catalog: Catalog = "log",
    ties: Ties = "log",
) -> EventLog:
    """Opens files of events, preprocessing them if that has not been done.

    Preprocessing needs memory for the distinct users and items, and for the events only if `ties`
    is "quicksort". While it runs, it needs up to 100 bytes per event in `cache_dir`.

    Args:
        source: one of these, each also with a name that ends in .gz:

            * MovieLens `u.data`, `ratings.dat` or `ratings.csv`; titles are read from `u.item`,
              `movies.dat` or `movies.csv` next to it. Malformed lines are left out and reported.
            * Amazon reviews, ratings only, of 2014, 2018 or 2023
              (`hstu_attn.data.amazon`). A malformed line is an error.
            * KuaiRand's logs, one file or several, or the directory that holds them
              (`hstu_attn.data.kuairand`). A malformed line is an error.
            * Parquet files, one or several, or the directory that holds them, and text files whose
              columns are named (`hstu_attn.data.parquet`). A malformed line is an error.
        cache_dir: where the preprocessed form goes; None is `hstu_cache` next to `source`.
        progress: shows a progress bar while reading.
        layout: "movielens", "amazon", one of its "amazon-2014" and "amazon-2018", "kuairand",
            "parquet" or "csv"; None finds it by a name that ends in .parquet, by `columns`, or by
            the first line.
        columns: the names of the columns of Parquet files, or of text files with a header, by
            feature: "user", "item", "timestamp" and "rating". A missing feature has a column of
            the feature's name; None means that for all features.
        only: keeps only the events with this action, for example "long_view", if the layout has
            actions.
        min_user_events: leaves out users with fewer events.
        min_item_events: leaves out items with fewer events. Both are applied once, together, to
            counts of the events that `only` keeps: users and items that are left may have fewer
            events afterwards. Users with fewer than 3 events are left out in the end.
        catalog: the items of the log. "log" means items with events. "titles" means all items of
            MovieLens's file of titles, with or without events, and items with events but no title;
            items whose events `min_item_events` leaves out stay in the catalog.
        ties: the order of a user's events with equal times. "log" is the order of the source.
            "quicksort" is the order after NumPy's quicksort, which is not stable, of the times of
            all events. It is the default of pandas, with which generative-recommenders prepared the
            published data. It takes 24 bytes of memory for each event, and the order may differ
            between processors with different vector instructions.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an unknown layout, a wrong header, a malformed line, no user with enough events,
            or no titles with `catalog="titles"`.
    """
    for name, least in (("min_user_events", min_user_events), ("min_item_events", min_item_events)):
        if least < 1:
            raise ValueError(f"{name}: expected 1 or more, got {least}")
    for name, value, known in (("catalog", catalog, Catalog), ("ties", ties, Ties)):
        if value not in get_args(known):
            raise ValueError(f"{name}: expected one of {', '.join(get_args(known))}, got {value!r}")
    sources = source_files(source)
    kind = detect_layout(sources[0], layout, columns)
    if catalog == "titles":
        _require_titles(sources[0], kind)
    root = Path(cache_dir) if cache_dir is not None else sources[0].parent / "hstu_cache"
    fingerprint = _fingerprint(sources, kind, only, min_user_events, min_item_events)
    if columns is not None:
        fingerprint["columns"] = dict(sorted(columns.items()))
    if catalog != "log":
        fingerprint["catalog"] = catalog
    if ties != "log":
        fingerprint["ties"] = ties
    digest = hashlib.blake2b(json.dumps(fingerprint).encode(), digest_size=6).hexdigest()
    directory = root / f"{sources[0].name}-{digest}"
    if not (directory / "manifest.json").is_file():
        root.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=root))
        try:
            _preprocess(sources, kind, fingerprint, temporary, progress)
            _remove_stale(root, sources, fingerprint)
            if not directory.is_dir():  # another process may have been faster
                os.replace(temporary, directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return EventLog(directory)


def _name(ids: NDArray[np.int64], keys: NDArray[np.bytes_] | None, index: int) -> str:
    return str(ids[index]) if keys is None else bytes(keys[index]).decode("ascii")


def _source_ids(ids: NDArray[np.int64], keys: NDArray[np.bytes_] | None) -> Sequence[int | str]:
    found: list[int | str] = (ids if keys is None else np.char.decode(keys, "ascii")).tolist()
    return found


def _fingerprint(
    sources: list[Path],
    layout: EventLayout,
    only: str | None,
    min_user_events: int,
    min_item_events: int,
) -> dict[str, Any]:
    """Returns the data on which the preprocessed form depends."""
    files = []
    for path in [*sources, *(path for source in sources for path in layout.companions(source))]:
        status = path.stat()
        files.append({"name": path.name, "size": status.st_size, "mtime_ns": status.st_mtime_ns})
    return {
        "format": FORMAT_VERSION,
        "layout": layout.name,
        "least_user_events": LEAST_USER_EVENTS,
        "only": only,
        "min_user_events": min_user_events,
        "min_item_events": min_item_events,
        "files": files,
    }


def _source_name(sources: list[Path]) -> str:
    return os.pathsep.join(str(source.resolve()) for source in sources)


def _remove_stale(root: Path, sources: list[Path], fingerprint: dict[str, Any]) -> None:
    """Removes preprocessed forms of earlier versions of the source."""
    current = [fingerprint[name] for name in ("format", "files")]
    for path in root.glob(f"{sources[0].name}-*/manifest.json"):
        manifest = json.loads(path.read_text())
        made_from = [manifest["fingerprint"][name] for name in ("format", "files")]
        if manifest["source"] == _source_name(sources) and made_from != current:
            shutil.rmtree(path.parent, ignore_errors=True)


def _require_titles(source: Path, layout: EventLayout) -> None:
    """Raises a ValueError unless there is a file of titles next to the source."""
    if not isinstance(layout, MovieLensLayout):
        raise ValueError(
            f"{CATALOG_OF_TITLES}: expected MovieLens ratings, which have a file of titles next to "
            f"them, got {source} of the layout {layout.name}"
        )
    if not layout.companions(source):
        path = source.with_name(layout.titles_file)
        raise ValueError(f"{CATALOG_OF_TITLES}: expected a file of titles {path}, got none")


def _with_action(block: Events, only: str, layout: EventLayout) -> Events:
    """Returns the events with an action."""
    if "actions" not in block.columns:
        raise ValueError(f"only: expected None for the layout {layout.name}, got {only!r}")
    if only not in ACTIONS:
        raise ValueError(f"only: expected one of {', '.join(ACTIONS)}, got {only!r}")
    return block.select((block.columns["actions"] >> ACTIONS.index(only) & 1).astype(bool))


def _preprocess(
    sources: list[Path],
    layout: EventLayout,
    fingerprint: dict[str, Any],
    directory: Path,
    progress: bool,
) -> None:
    """Writes the arrays, the titles, the malformed lines and, last, the manifest."""
    only = fingerprint["only"]
    needs_titles = fingerprint.get("catalog") == "titles"
    titles: dict[int, str] = {}
    with (directory / "malformed.txt").open("w", encoding="utf-8") as report:
        malformed = MalformedLines(report)
        read_events = 0

        def selected(blocks: Iterable[Events]) -> Iterator[Events]:
            nonlocal read_events
            for block in blocks:
                read_events += len(block.users)
                yield block if only is None else _with_action(block, only, layout)

        if needs_titles:
            titles = layout.read_titles(sources[0], malformed.reject)
            if not titles:
                path = layout.companions(sources[0])[0]
                raise ValueError(
                    f"{CATALOG_OF_TITLES}: expected titles in {path}, got "
                    f"{malformed.count:,} malformed lines"
                )
        with closing(layout.read(sources, malformed, progress)) as blocks:
            found = preprocess(
                selected(blocks),
                fingerprint["min_user_events"],
                fingerprint["min_item_events"],
                directory,
                progress,
                catalog=titles if needs_titles else (),
                quicksort=fingerprint.get("ties") == "quicksort",
            )
        if not needs_titles:
            titles = layout.read_titles(sources[0], malformed.reject)
    if not found.num_users:
        first = "".join(f"\n  {example}" for example in malformed.examples)
        raise ValueError(
            f"{sources[0]} has no user with at least {LEAST_USER_EVENTS} events "
            f"({found.dropped_events:,} events, {malformed.count:,} malformed lines){first}"
        )
    item_keys = found.keys.get("item_keys")
    (directory / "titles.json").write_text(
        json.dumps(
            [
                titles.get(int(item), f"item {_name(found.item_ids, item_keys, index)}")
                for index, item in enumerate(found.item_ids)
            ]
        )
    )
    manifest = {
        "source": _source_name(sources),
        "fingerprint": fingerprint,
        "content": found.content,
        "keys": list(found.keys),
        "columns": found.columns,
        "eventless_items": found.eventless_items,
        "read_events": read_events,
        "other_events": read_events - found.num_events,
        "rare_events": found.rare_events,
        "dropped_users": found.dropped_users,
        "dropped_events": found.dropped_events,
        "malformed_lines": malformed.count,
        "malformed_examples": malformed.examples,
    }
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=2))
