"""Converts the events of a source to the arrays that `EventLog` memory-maps, in bounded memory.

This is an external sort, whose temporary files are in the directory of the log:

1. The blocks that the layout reads are appended to the spool, column by column. Users, items and
   the number of events of each are counted.
2. Chunks of the spool become runs: users and items are replaced by their ranks, rare ones are left
   out, and the events are sorted by user.
3. Users are divided into ranges of about a chunk's events. The events of a range are read from all
   runs, sorted by user and time, and appended to the arrays of the log.

Besides a chunk, memory holds the distinct ids of users and items, and a few numbers for each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from .layout import Events

__all__ = ["LEAST_USER_EVENTS", "Preprocessed", "preprocess"]

LEAST_USER_EVENTS = 3  # one each for training, validation and test
CHUNK_EVENTS = 1 << 21
PENDING_IDS = 1 << 20  # ids that are counted by block and not yet merged


@dataclass(frozen=True)
class Preprocessed:
    """The record of what was written and of what was left out.

    Attributes:
        item_ids: `(num_items,)` int64, the source's ids, or numbers from 0 if these ids are text.
        keys: the arrays of ids that are text, by name: "user_keys", "item_keys".
        columns: the names of further columns.
        num_users: users that have enough events.
        eventless_items: the number of items in `item_ids` without events.
        content: a hash of all arrays.
        num_events: events of the source.
        rare_events: events of users or on items with too few events.
        dropped_users: remaining users with fewer than `LEAST_USER_EVENTS` events.
        dropped_events: the events of those users.
    """

    item_ids: NDArray[np.int64]
    keys: dict[str, NDArray[np.bytes_]]
    columns: list[str]
    num_users: int
    eventless_items: int
    content: str
    num_events: int
    rare_events: int
    dropped_users: int
    dropped_events: int


class _Ids:
    """The distinct ids of users or of items, and the number of events of each.

    A text id is numbered by its position in a file that holds the distinct keys of each block,
    block after block. `close` replaces this file by a file of the ranks of these keys.

    Args:
        path: the path of both files.

    Attributes:
        values: `(n,)`, the sorted ids; complete after `close`.
        counts: `(n,)` int64, the number of events of each id; complete after `close`.
    """

    def __init__(self, path: Path) -> None:
        self.values: NDArray[Any] = np.empty(0, np.int64)
        self.counts = np.empty(0, np.int64)
        self._path = path
        self._key_blocks: list[tuple[np.dtype[Any], int]] = []
        self._num_keys = 0
        self._pending: list[tuple[NDArray[Any], NDArray[np.int64]]] = []
        self._num_pending = 0

    @property
    def keys(self) -> NDArray[np.bytes_] | None:
        """The values where they are text, otherwise None."""
        return self.values if self.values.dtype.kind == "S" else None

    def add(self, ids: NDArray[Any]) -> NDArray[np.int64]:
        """Counts the ids of a block; returns the ids, or the numbers of text ids."""
        different, places, counts = np.unique(ids, return_inverse=True, return_counts=True)
        self._pending.append((different, counts))
        self._num_pending += len(different)
        if self._num_pending > max(PENDING_IDS, len(self.values) // 2):
            self._merge()
        if ids.dtype.kind != "S":
            return ids
        with self._path.open("ab") as file:
            file.write(different.tobytes())
        numbers: NDArray[np.int64] = self._num_keys + places
        self._key_blocks.append((different.dtype, len(different)))
        self._num_keys += len(different)
        return numbers

    def close(self) -> None:
        """Merges the ids of all blocks, and finds the ranks of the keys."""
        self._merge()
        if self.keys is None:
            return
        ranks = self._path.with_suffix(".ranks")
        with self._path.open("rb") as keys, ranks.open("wb") as file:
            for dtype, count in self._key_blocks:
                block = np.frombuffer(keys.read(count * dtype.itemsize), dtype)
                file.write(np.searchsorted(self.keys, block).astype(np.int32).tobytes())
        ranks.replace(self._path)

    def ranks(self, numbers: NDArray[np.int64]) -> NDArray[np.int32]:
        """Returns the positions in `values` of one or more numbers that `add` returned."""
        if self.keys is None:
            return np.searchsorted(self.values, numbers).astype(np.int32)
        # Numbers that `add` returned in succession are close to each other.
        first = int(numbers.min())
        count = int(numbers.max()) + 1 - first
        return np.fromfile(self._path, np.int32, count, offset=4 * first)[numbers - first]

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def _merge(self) -> None:
        parts = [(self.values, self.counts)] if len(self.values) else []
        parts += self._pending
        self._pending, self._num_pending = [], 0
        if not parts:
            return
        values, counts = (np.concatenate(part) for part in zip(*parts, strict=True))
        order = np.argsort(values, kind="stable")
        values = values[order]
        firsts = np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]]))
        if len(values):
            self.values, self.counts = values[firsts], np.add.reduceat(counts[order], firsts)


class _Store:
    """Append-only columns of events, in one file per column."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        self._dtypes: dict[str, np.dtype[Any]] = {}
        self.num_events = 0

    def append(self, columns: Mapping[str, NDArray[Any]]) -> None:
        for name, column in columns.items():
            self._dtypes[name] = column.dtype
            with self._path(name).open("ab") as file:
                file.write(column.tobytes())
        self.num_events += len(columns["users"])

    def read(self, start: int, stop: int) -> dict[str, NDArray[Any]]:
        """Returns the events `[start, stop)`."""
        return {
            name: np.fromfile(self._path(name), dtype, stop - start, offset=start * dtype.itemsize)
            for name, dtype in self._dtypes.items()
        }

    def column(self, name: str) -> NDArray[Any]:
        """Returns a column of all events."""
        return np.fromfile(self._path(name), self._dtypes[name])

    def places(self, start: int, stop: int, users: NDArray[np.int32]) -> NDArray[np.int64]:
        """Returns where each user's events begin in a run, which is sorted by user."""
        run = np.memmap(self._path("users"), np.int32, "r")[start:stop]
        return start + np.searchsorted(run, users)

    def remove(self) -> None:
        for name in self._dtypes:
            self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self._directory / f"{self._name}-{name}.bin"


class _ArrayFile:
    """A .npy file of a vector, written from its beginning to its end."""

    def __init__(self, path: Path, dtype: np.dtype[Any], length: int) -> None:
        self.path, self.dtype, self.length = path, dtype, length
        header = {"descr": dtype.str, "fortran_order": False, "shape": (length,)}
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            self._begin = file.tell()

    def append(self, values: NDArray[Any]) -> None:
        with self.path.open("ab") as file:
            file.write(values.astype(self.dtype, copy=False).tobytes())

    def chunks(self) -> Iterator[NDArray[Any]]:
        for start in range(0, self.length, CHUNK_EVENTS):
            place = self._begin + start * self.dtype.itemsize
            yield np.fromfile(self.path, self.dtype, CHUNK_EVENTS, offset=place)

    def replace(self, values: NDArray[Any]) -> None:
        """Replaces every element x by `values[x]`."""
        with self.path.open("r+b") as file:
            file.seek(self._begin)
            for chunk in self.chunks():
                file.write(values[chunk].astype(self.dtype).tobytes())


def preprocess(
    blocks: Iterable[Events],
    min_user_events: int,
    min_item_events: int,
    directory: Path,
    progress: bool,
    catalog: Collection[int] = (),
    quicksort: bool = False,
) -> Preprocessed:
    """Writes the arrays of an `EventLog` into a directory.

    Args:
        blocks: the events, all with the same columns and ticks.
        min_user_events: leaves out users with fewer events.
        min_item_events: leaves out items with fewer events. Events of users and of items are
            counted before any are left out.
        directory: where arrays and temporary files go.
        progress: shows progress bars while sorting.
        catalog: the source's ids, as numbers, of items that are kept even without events.
        quicksort: orders events of one user and time as NumPy's quicksort of the times of all
            events does, instead of as in the source. It takes 24 bytes of memory for each event.

    Returns:
        The record of what was written. If no user has enough events, there are no arrays of
        events, and `num_users` is 0.
    """
    users, items = _Ids(directory / "user-keys.bin"), _Ids(directory / "item-keys.bin")
    spool = _Store(directory, "spool")
    ticks_per_second = 1
    for block in blocks:
        ticks_per_second = block.ticks_per_second
        spool.append(
            {
                "users": users.add(block.users),
                "items": items.add(block.items),
                "ratings": block.ratings,
                "timestamps": block.timestamps,
                **{f"column-{name}": column for name, column in block.columns.items()},
            }
        )
    users.close()
    items.close()

    runs = _Store(directory, "run")
    rare = users.counts < min_user_events, items.counts < min_item_events
    places = _places_by_quicksort(spool.column("timestamps")) if quicksort else None
    with _sorting(spool, "sorting", progress) as bar:
        bounds, events_of_user = _write_runs(spool, runs, users, items, rare, places, bar)
    del places
    for temporary in (spool, users, items):
        temporary.remove()
    kept = events_of_user >= LEAST_USER_EVENTS
    offsets = np.concatenate([[0], np.cumsum(events_of_user[kept])])
    seen = np.zeros(len(items.counts), bool)
    files: dict[str, _ArrayFile] = {}
    if kept.any():
        with _sorting(runs, "merging", progress) as bar:
            files = _merge_runs(
                runs, bounds, events_of_user, seen, ticks_per_second, directory, bar
            )
    runs.remove()
    item_ids = items.values[seen]
    if len(catalog):
        item_ids = np.union1d(item_ids, np.array([*catalog], np.int64))
    if files and not np.array_equal(item_ids, items.values):
        files["items"].replace(np.searchsorted(item_ids, items.values))

    keys: dict[str, NDArray[np.bytes_]] = {}
    user_ids = users.values[kept]
    if users.keys is not None:
        keys["user_keys"], user_ids = user_ids, np.arange(len(user_ids))
    if items.keys is not None:
        keys["item_keys"], item_ids = item_ids, np.arange(len(item_ids))
    columns = [name for name in files if name.startswith("column-")]
    small = {"user_ids": user_ids, "item_ids": item_ids, "offsets": offsets, **keys}
    content = hashlib.blake2b(digest_size=16)
    order = ("user_ids", "item_ids", "offsets", "items", "ratings", "timestamps", *keys, *columns)
    for name in order:
        if name in small:
            np.save(directory / f"{name}.npy", small[name])
            content.update(small[name].tobytes())
        elif name in files:
            for chunk in files[name].chunks():
                content.update(chunk.tobytes())
    return Preprocessed(
        item_ids=item_ids,
        keys=keys,
        columns=[name.removeprefix("column-") for name in columns],
        num_users=len(user_ids),
        eventless_items=len(item_ids) - int(seen.sum()),
        content=content.hexdigest(),
        num_events=spool.num_events,
        rare_events=spool.num_events - runs.num_events,
        dropped_users=int(((events_of_user > 0) & ~kept).sum()),
        dropped_events=runs.num_events - int(offsets[-1]),
    )


def _sorting(store: _Store, what: str, progress: bool) -> tqdm[NoReturn]:
    """Returns a progress bar of the events of a store, which vanishes at its end."""
    return tqdm(
        total=store.num_events,
        desc=what,
        unit=" events",
        unit_scale=True,
        leave=False,
        disable=not progress,
    )


def _places_by_quicksort(times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the position of each event after NumPy's quicksort of all times."""
    order = np.argsort(times, kind="quicksort")
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    return places


def _write_runs(
    spool: _Store,
    runs: _Store,
    users: _Ids,
    items: _Ids,
    rare: tuple[NDArray[np.bool_], NDArray[np.bool_]],
    places: NDArray[np.int64] | None,
    bar: tqdm[NoReturn],
) -> tuple[list[int], NDArray[np.int64]]:
    """Sorts each chunk of the spool by user, and leaves out rare users and items.

    The runs have the column "places" if `places` is not None.

    Returns:
        The start of each run followed by the end of the last run, and the number of events of each
        user in all runs.
    """
    bounds = [0]
    events_of_user = np.zeros(len(users.counts), np.int64)
    for start in range(0, spool.num_events, CHUNK_EVENTS):
        columns = spool.read(start, min(start + CHUNK_EVENTS, spool.num_events))
        columns["users"] = users.ranks(columns["users"])
        columns["items"] = items.ranks(columns["items"])
        if places is not None:
            columns["places"] = places[start : start + CHUNK_EVENTS]
        keep = ~(rare[0][columns["users"]] | rare[1][columns["items"]])
        order = np.flatnonzero(keep)
        order = order[np.argsort(columns["users"][order], kind="stable")]
        runs.append({name: column[order] for name, column in columns.items()})
        bounds.append(runs.num_events)
        events_of_user += np.bincount(columns["users"][order], minlength=len(events_of_user))
        bar.update(len(keep))
    return bounds, events_of_user


def _merge_runs(
    runs: _Store,
    bounds: list[int],
    events_of_user: NDArray[np.int64],
    seen: NDArray[np.bool_],
    ticks_per_second: int,
    directory: Path,
    bar: tqdm[NoReturn],
) -> dict[str, _ArrayFile]:
    """Writes the events of each user with enough events, oldest first; marks items as seen."""
    kept = events_of_user >= LEAST_USER_EVENTS
    cuts = [0]  # the first user of each range
    before = np.concatenate([[0], np.cumsum(events_of_user)])
    while cuts[-1] < len(events_of_user):
        stop = int(np.searchsorted(before, before[cuts[-1]] + CHUNK_EVENTS, side="right")) - 1
        cuts.append(max(stop, cuts[-1] + 1))
    users = np.array(cuts, np.int32)
    places = [runs.places(start, stop, users) for start, stop in pairwise(bounds)]
    files: dict[str, _ArrayFile] = {}
    for number in range(len(cuts) - 1):
        # The runs are in the order of the source. Without places, events of equal times keep it.
        slices = [runs.read(place[number], place[number + 1]) for place in places]
        columns = {name: np.concatenate([part[name] for part in slices]) for name in slices[0]}
        order = np.lexsort((columns.pop("places", columns["timestamps"]), columns["users"]))
        bar.update(len(order))
        order = order[kept[columns.pop("users")[order]]]
        for name, column in columns.items():
            values = column[order]
            if name == "timestamps":
                values //= ticks_per_second
            if name == "items":
                seen[values] = True
            if name not in files:
                length = int(events_of_user[kept].sum())
                files[name] = _ArrayFile(directory / f"{name}.npy", values.dtype, length)
            files[name].append(values)
    return files
