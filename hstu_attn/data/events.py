"""Event logs on disk: who did what, how it was rated, and when, grouped by user in time order.

A text file is streamed once and turned into arrays, memory-mapped afterwards, beside a JSON
manifest with a fingerprint of the source and of the options. Opening the same source again maps
the arrays; a changed source is read anew. The directory is written under another name and renamed,
so it is either whole or absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from array import array
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from hstu_attn.data.layout import EventLayout, MalformedLineError, MalformedLines
from hstu_attn.data.movielens import detect_layout

__all__ = ["EventLog", "open_event_log"]

FORMAT_VERSION = 1
ARRAYS = ("user_ids", "item_ids", "offsets", "items", "ratings", "timestamps")
LEAST_USER_EVENTS = 3  # one to learn from, one to validate on, one to test on


class EventLog:
    """The events of all users, memory-mapped. User ``u`` owns events
    ``offsets[u] .. offsets[u + 1]``, oldest first; events of one second keep the file's order.

    Attributes:
        user_ids: ``(num_users,)`` int64, the source's ids.
        item_ids: ``(num_items,)`` int64, the source's ids.
        offsets: ``(num_users + 1,)`` int64.
        items: ``(num_events,)`` int32, indices into ``item_ids``.
        ratings: ``(num_events,)`` float32.
        timestamps: ``(num_events,)`` int64, seconds.
        titles: one per item; its id where the source has no title.
        manifest: what was read, kept and refused, and the fingerprint.
        malformed_report: a file that lists every malformed line.
    """

    user_ids: NDArray[np.int64]
    item_ids: NDArray[np.int64]
    offsets: NDArray[np.int64]
    items: NDArray[np.int32]
    ratings: NDArray[np.float32]
    timestamps: NDArray[np.int64]

    def __init__(self, directory: Path) -> None:
        self.manifest: dict[str, Any] = json.loads((directory / "manifest.json").read_text())
        for name in ARRAYS:
            setattr(self, name, np.load(directory / f"{name}.npy", mmap_mode="r"))
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

    def describe(self) -> str:
        """What was read and what was left out, in a few lines."""
        manifest = self.manifest
        lines = [
            f"{self.num_events:,} events of {self.num_users:,} users on {self.num_items:,} items"
        ]
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
    source: str | Path, cache_dir: str | Path | None = None, progress: bool = False
) -> EventLog:
    """Opens a file of events, preprocessing it if that has not been done.

    Preprocessing keeps up to some 100 bytes an event in memory.

    Args:
        source: MovieLens `ratings.dat` or `ratings.csv`; titles are read from `movies.dat` or
            `movies.csv` beside it.
        cache_dir: where the preprocessed form goes; None is `hstu_cache` beside ``source``.
        progress: shows a progress bar while reading.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an unknown layout, a wrong header, or no user with enough events.
    """
    source = Path(source)
    layout = detect_layout(source)
    root = Path(cache_dir) if cache_dir is not None else source.parent / "hstu_cache"
    fingerprint = _fingerprint(source, layout)
    digest = hashlib.blake2b(json.dumps(fingerprint).encode(), digest_size=6).hexdigest()
    directory = root / f"{source.name}-{digest}"
    if not (directory / "manifest.json").is_file():
        root.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=root))
        try:
            _preprocess(source, layout, fingerprint, temporary, progress)
            _remove_stale(root, source, keep=directory)
            if not directory.is_dir():  # another process may have been faster
                os.replace(temporary, directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return EventLog(directory)


def _fingerprint(source: Path, layout: EventLayout) -> dict[str, Any]:
    """What the preprocessed form depends on."""
    files = []
    for path in [source, *layout.companions(source)]:
        status = path.stat()
        files.append({"name": path.name, "size": status.st_size, "mtime_ns": status.st_mtime_ns})
    return {
        "format": FORMAT_VERSION,
        "layout": layout.name,
        "least_user_events": LEAST_USER_EVENTS,
        "files": files,
    }


def _remove_stale(root: Path, source: Path, keep: Path) -> None:
    """Removes what was made from earlier states of the source."""
    for manifest in root.glob(f"{source.name}-*/manifest.json"):
        made_from = json.loads(manifest.read_text())["source"]
        if made_from == str(source.resolve()) and manifest.parent != keep:
            shutil.rmtree(manifest.parent, ignore_errors=True)


def _preprocess(
    source: Path,
    layout: EventLayout,
    fingerprint: dict[str, Any],
    directory: Path,
    progress: bool,
) -> None:
    """Writes the arrays, the titles, the malformed lines and, last, the manifest."""
    with (directory / "malformed.txt").open("w", encoding="utf-8") as report:
        malformed = MalformedLines(report)
        users, items, ratings, timestamps = _read(source, layout, malformed, progress)
        titles = layout.read_titles(source, malformed.reject)

    order = np.lexsort((timestamps, users))
    _, user_of_event, events_of_user = np.unique(users, return_inverse=True, return_counts=True)
    keep = order[events_of_user[user_of_event[order]] >= LEAST_USER_EVENTS]
    if not len(keep):
        first = "".join(f"\n  {example}" for example in malformed.examples)
        raise ValueError(
            f"{source} has no user with at least {LEAST_USER_EVENTS} events "
            f"({len(users):,} events, {malformed.count:,} malformed lines){first}"
        )
    user_ids, counts = np.unique(users[keep], return_counts=True)
    item_ids, item_of_event = np.unique(items[keep], return_inverse=True)
    arrays: dict[str, NDArray[Any]] = {
        "user_ids": user_ids,
        "item_ids": item_ids,
        "offsets": np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        "items": item_of_event.astype(np.int32),
        "ratings": ratings[keep],
        "timestamps": timestamps[keep],
    }
    content = hashlib.blake2b(digest_size=16)
    for name in ARRAYS:
        np.save(directory / f"{name}.npy", arrays[name])
        content.update(arrays[name].tobytes())
    (directory / "titles.json").write_text(
        json.dumps([titles.get(int(item), f"item {item}") for item in item_ids])
    )
    manifest = {
        "source": str(source.resolve()),
        "fingerprint": fingerprint,
        "content": content.hexdigest(),
        "read_events": len(users),
        "dropped_users": int((events_of_user < LEAST_USER_EVENTS).sum()),
        "dropped_events": len(users) - len(keep),
        "malformed_lines": malformed.count,
        "malformed_examples": malformed.examples,
    }
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=2))


def _read(
    source: Path, layout: EventLayout, malformed: MalformedLines, progress: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """Users, items, ratings and timestamps of the events in the order of the file."""
    users, items, ratings, timestamps = array("q"), array("q"), array("f"), array("q")
    bar = tqdm(
        total=source.stat().st_size,
        desc=f"reading {source.name}",
        unit="B",
        unit_scale=True,
        disable=not progress,
    )
    with source.open("rb") as file, bar:
        for number, raw in enumerate(file, start=1):
            line = raw.rstrip(b"\r\n")
            if number == 1 and layout.header is not None:
                if line != layout.header:
                    raise ValueError(
                        f"{source}:1: expected the header {layout.header.decode()!r}, "
                        f"got {line.decode(errors='backslashreplace')!r}"
                    )
                continue
            try:
                user, item, rating, timestamp = layout.parse(line)
            except MalformedLineError as error:
                malformed.reject(source, number, line, str(error))
            else:
                users.append(user)
                items.append(item)
                ratings.append(rating)
                timestamps.append(timestamp)
            if number % 65536 == 0:
                bar.update(file.tell() - bar.n)
        bar.update(file.tell() - bar.n)
    return (
        np.frombuffer(users, np.int64),
        np.frombuffer(items, np.int64),
        np.frombuffer(ratings, np.float32),
        np.frombuffer(timestamps, np.int64),
    )
