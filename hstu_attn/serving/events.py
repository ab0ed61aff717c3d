"""Stores of the latest events of each user, from which a cache can be computed again."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

__all__ = [
    "Change",
    "Event",
    "EventOrderError",
    "EventStore",
    "EventTimeError",
    "MemoryStore",
    "StoreDamagedError",
    "StoreError",
    "Stored",
    "appended",
    "check_at",
    "check_limits",
    "check_range",
    "check_times",
    "check_user",
    "checked_candidates",
    "checked_events",
    "event_rows",
    "first_kept",
    "user_key",
    "user_of",
]

Int64s = np.ndarray[Any, np.dtype[np.int64]]
User = int | str

ITEM, TIME, ACTION = range(3)  # columns of event arrays
LATEST_TIME = 2**62  # differences of times stay within int64
_SEEDED = "seeded"


class EventTimeError(ValueError):
    """An event's time is implausible: it is in another unit, or a clock is wrong.

    Attributes:
        place: the index of the event in the request, from 0.
        time: the event's time.
        limits: the earliest and the latest time that the event may have.
    """

    def __init__(
        self, message: str, place: int = 0, time: int = 0, limits: tuple[int, int] = (0, 0)
    ) -> None:
        super().__init__(message)
        self.place, self.time, self.limits = place, time, limits


class EventOrderError(ValueError):
    """An event is older than its predecessor in the request or in the user's stored events."""


class StoreError(RuntimeError):
    """The store cannot be read or written now."""


class StoreDamagedError(StoreError):
    """The store's data are damaged, perhaps only those of some users."""


class Event(NamedTuple):
    """An action of a user: the item, the time, and the kind of action.

    `time` is in seconds, or in any other unit that the model was trained with. `action` is 0 for
    models that read none.
    """

    item: int
    time: int
    action: int = 0


class Stored(NamedTuple):
    """The events of a user in a store, and their version.

    Attributes:
        version: changes with every change of the user's events; 0 if the user has none.
        events: int64 `(n, 3)`, oldest first: item, time and action.
    """

    version: int
    events: Int64s


class Change(NamedTuple):
    """A change of a user's events.

    Attributes:
        user: the user whose events change.
        version: the version of the events that the change was computed from; the change is made
            only if the stored events still have this version.
        kept: the number of stored events that stay, the latest ones.
        events: int64 `(n, 3)`, the events to append.
        moved: how many of `events` are stored events that are removed and appended again.
    """

    user: User
    version: int
    kept: int
    events: Int64s
    moved: int = 0


def event_rows(
    events: Sequence[tuple[int, ...]] | np.ndarray[Any, Any], name: str = "events"
) -> Int64s:
    """Converts events to int64 `(n, 3)`: item, time and action. A missing action is 0.

    Errors call the argument `name`.

    Raises:
        ValueError: unless the events are rows of two or three integers.
    """
    try:
        rows = np.asarray(
            events if isinstance(events, np.ndarray) else [Event(*event) for event in events]
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: expected rows of item, time and action, got {error}") from None
    if not rows.size:
        return np.empty((0, 3), np.int64)
    if rows.ndim != 2 or rows.shape[1] not in (2, 3):
        raise ValueError(f"{name}: expected rows of item, time and action, got shape {rows.shape}")
    if rows.dtype.kind not in "iu" or not np.can_cast(rows.dtype, np.int64):
        raise ValueError(f"{name}: expected integers within int64, got {rows.dtype}")
    if rows.shape[1] == 2:
        rows = np.column_stack([rows, np.zeros(len(rows), np.int64)])
    return np.array(rows, np.int64, order="C")  # never the caller's own array


def appended(events: Int64s, room: Int64s, new: Int64s) -> tuple[Int64s, Int64s]:
    """Appends rows to events in a larger buffer, and copies the events only if it is full.

    `events` do not change, but rows that an earlier call has appended to them may be overwritten.

    Args:
        events: `(n, 3)`, the first rows of `room`.
        room: `(n, 3)` or longer, the buffer; `events` itself if there is no larger one.
        new: `(m, 3)`, the rows to append.

    Returns:
        The events with the new ones, and their buffer.
    """
    count = len(events) + len(new)
    if count > len(room):
        room = np.empty((count + count // 8, 3), np.int64)
        room[: len(events)] = events
    room[len(events) : count] = new
    return room[:count], room


def check_range(name: str, what: str, values: np.ndarray[Any, Any], limit: int) -> None:
    """Checks that values `(n,)` are at least 0 and below a limit.

    Raises:
        ValueError: saying that `name` has `what` out of range.
    """
    # As an unsigned number, a negative value is above all limits.
    if np.maximum.reduce(values.astype(np.uint64), initial=0) >= limit:
        wrong = np.flatnonzero((values < 0) | (values >= limit))
        raise ValueError(
            f"{name}: expected {what} from 0 to {limit - 1}, got {values[wrong[0]]} at {wrong[0]}"
        )


def check_times(events: Int64s, time_range: Callable[[], tuple[int, int]] | None) -> None:
    """Checks the times of a request's events `(n, 3)`.

    Raises:
        EventOrderError: if they are not oldest first.
        EventTimeError: if a time is not within the range.
    """
    times = events[:, TIME]
    if len(times) > 1 and (times[1:] < times[:-1]).any():
        at = np.flatnonzero(times[1:] < times[:-1])[0] + 1
        raise EventOrderError(
            f"new_events: expected events oldest first, got time {times[at]} at {at} after "
            f"{times[at - 1]}"
        )
    if time_range is None or not len(times):
        return
    earliest, latest = time_range()
    for at in (0, len(times) - 1):
        if not earliest <= times[at] <= latest:
            raise EventTimeError(
                f"new_events: expected times from {earliest} to {latest}, in the model's unit, got "
                f"{times[at]} at {at}",
                *(at, int(times[at]), (earliest, latest)),
            )


def check_at(at: object) -> None:
    """Checks the time at which a request asks the model.

    Raises:
        ValueError: if it is neither None nor a time.
    """
    if at is not None and not (isinstance(at, int) and 0 <= at < LATEST_TIME):
        raise ValueError(f"at: expected None or a time from 0 to {LATEST_TIME - 1}, got {at!r}")


def checked_events(
    new_events: Sequence[tuple[int, ...]] | np.ndarray[Any, Any],
    num_items: int,
    num_actions: int,
    time_range: Callable[[], tuple[int, int]] | None,
) -> Int64s:
    """Converts the events of a request, as `event_rows`.

    Raises:
        ValueError: as `event_rows`, or for an item, action or time that is out of range.
    """
    events = event_rows(new_events, "new_events")
    if not len(events):
        return events
    limits = (num_items, LATEST_TIME, num_actions)
    if (events.view(np.uint64) >= np.array(limits, np.uint64)).any():  # or negative
        for column, what in ((ITEM, "items"), (TIME, "times"), (ACTION, "actions")):
            check_range("new_events", what, events[:, column], limits[column])
    check_times(events, time_range)
    return events


def checked_candidates(
    candidates: Sequence[int] | np.ndarray[Any, Any] | Tensor, num_items: int, most: int
) -> Int64s:
    """Converts the candidates of a request to int64 `(m,)`.

    Raises:
        ValueError: unless the candidates are one-dimensional integers, not too many of them, and
            items of the model.
    """
    items = np.asarray(candidates)
    if not items.size:
        items = items.astype(np.int64)
    if items.ndim != 1 or items.dtype.kind not in "iu":
        raise ValueError(
            f"candidates: expected integers of one dimension, got {items.dtype} of shape "
            f"{items.shape}"
        )
    if len(items) > most:
        raise ValueError(f"candidates: expected at most {most}, got {len(items)}")
    check_range("candidates", "items", items, num_items)
    return items.astype(np.int64)


def check_user(user: User) -> None:
    """Checks the user of a request, because a wrong one would fail a whole batch.

    Raises:
        ValueError: for another type, or for text that is not Unicode.
    """
    if not isinstance(user, (int, str)):
        raise ValueError(f"user: expected an int or a str, got {type(user).__name__}")
    user_key(user)


def user_key(user: User) -> bytes:
    """Returns a user as bytes, for example for a database; 7 and "7" are different users.

    Raises:
        ValueError: for text that is not Unicode.
    """
    if isinstance(user, int):
        return b"i%d" % user
    try:
        return b"s" + user.encode()
    except UnicodeEncodeError:
        raise ValueError(f"user: expected Unicode text, got {user!a}") from None


def user_of(key: bytes) -> User:
    """Returns the user whose `user_key` is `key`."""
    return key[1:].decode() if key[:1] == b"s" else int(key[1:])


class EventStore(ABC):
    """A store in which an engine keeps the latest events of its users.

    A user's events have a version, and a change is made only if it is based on the current version
    (optimistic locking). So several processes may share a store if its class says so: if two of
    them change a user's events at once, the second one reads the events again. All methods are
    thread-safe, and each change of a user is atomic.

    A model takes a limited number of events, and positions count from the first of them. Dropping
    the oldest event shifts all others and invalidates their cached rows, so events are dropped in
    groups: a history that would be longer than `max_events` is cut to its latest
    `max_events - drop` events, and can then grow again.

    Args:
        max_events: the largest length of a history.
        drop: the room, in events, that cutting a history makes; None is an eighth of `max_events`.
            With 0 a full history is always the very latest events, and each new event recomputes
            it.

    Attributes:
        waits: whether `commit` waits for a disk or another process; the engine then computes its
            next batch during the commit.

    Raises:
        ValueError: for a size out of range.
    """

    waits = True

    def __init__(self, max_events: int, drop: int | None = None) -> None:
        if max_events < 1:
            raise ValueError(f"max_events: expected a positive count, got {max_events}")
        if drop is None:
            drop = max_events // 8
        if not 0 <= drop < max_events:
            raise ValueError(f"drop: expected from 0 to {max_events - 1}, got {drop}")
        self.max_events = max_events
        self.drop = drop

    # --- methods that each class implements ------------------------------------------------------

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of users with events, as far as this process knows."""

    @abstractmethod
    def read(self, users: Sequence[User], versions: Sequence[int]) -> list[Stored | None]:
        """Reads the events of users.

        Args:
            users: users without repetition.
            versions: for each user the version of the events that the caller has; 0 if it has none.

        Returns:
            The events of each user; None if the caller's version is the stored one. There are
            more than `max_events` if a store with a larger limit has stored them or some are later
            than an engine's `time_range`.

        Raises:
            StoreError: if they cannot be read; a StoreDamagedError for damaged data of a user.
        """

    @abstractmethod
    def commit(self, changes: Sequence[Change]) -> list[int]:
        """Makes changes of different users, and returns when they are durable.

        How durable they are depends on the class.

        Returns:
            The new version of each user's events; 0 where the stored version was not the change's
            version, so that the change was not made.

        Raises:
            StoreError: if the changes could not be made. Each class says whether some may have been
                made all the same.
        """

    @abstractmethod
    def forget(self, user: User) -> None:
        """Deletes a user's events, if there are any.

        `Engine.forget` also frees the user's cached rows. The bytes may stay in the store's files,
        unreadable by its methods, until `compact`.

        Raises:
            StoreError: if they cannot be deleted.
        """

    @abstractmethod
    def prune(self, *, before: int = 0, latest: int | None = None) -> Iterator[list[User]]:
        """Deletes old events of all users, some users at a time.

        `Engine.prune` also frees the cached rows.

        Args:
            before: events with an earlier time are deleted.
            latest: the most events to keep of each user, the newest ones; None sets no limit.

        Yields:
            Users whose events have been changed.

        Raises:
            ValueError: for a negative number.
            StoreError: if events cannot be deleted; users yielded before have been pruned.
        """

    def compact(self) -> None:  # noqa: B027  # a store may have no files
        """Rewrites the store's files, so that they contain no deleted data.

        Raises:
            StoreError: if the files cannot be written.
        """

    @abstractmethod
    def note(self, name: str) -> bytes | None:
        """Returns the value that `set_note` stored last under a name, or None."""

    @abstractmethod
    def set_note(self, name: str, value: bytes) -> None:
        """Stores a small value of the application under a name, next to the events.

        Raises:
            StoreError: if it cannot be stored.
        """

    @abstractmethod
    def replace_note(self, name: str, expected: bytes | None, value: bytes) -> bool:
        """Sets a note only if its value is still the expected one (atomic compare-and-set).

        Args:
            name: the name of the note.
            expected: the value that `note` has returned.
            value: the new value.

        Returns:
            Whether the note had the expected value. If not, read the note again: it may have the
            new value, if the answer of a server was lost and the change was sent a second time.

        Raises:
            StoreError: if the note cannot be read or stored.
        """

    def close(self) -> None:  # noqa: B027  # nothing to do for some stores
        """Closes files and connections. The engines that use the store must be closed before."""

    # --- methods built on the above --------------------------------------------------------------

    def __enter__(self) -> EventStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cut(self, events: Int64s) -> Int64s:
        """Returns a history, cut if it is too long."""
        surplus = len(events) - self.max_events
        return events[surplus + self.drop :] if surplus > 0 else events

    def append(self, user: User, before: Stored, events: Int64s) -> Change:
        """Returns the change that appends events to `before` and cuts the result as `cut` does."""
        kept = len(before.events)
        if kept + len(events) > self.max_events:
            after = self.max_events - self.drop
            kept = max(0, after - len(events))
            events = events[len(events) - (after - kept) :]
        return Change(user, before.version, kept, events)

    def add(self, user: User, events: Sequence[tuple[int, ...]] | np.ndarray[Any, Any]) -> None:
        """Appends events to a user's history, before an engine uses the store.

        Raises:
            ValueError: as `event_rows`.
            StoreError: if the events cannot be read or written.
        """
        rows = event_rows(events)
        stored = 0
        while not stored:  # another process has changed the events since the read
            found = self.read([user], [0])[0] or Stored(0, np.empty((0, 3), np.int64))
            before = Stored(found.version, self.cut(found.events))
            (stored,) = self.commit([self.append(user, before, rows)])

    @property
    def seeded(self) -> bool:
        """Returns whether a call of `seed` has stored all of its histories.

        Raises:
            StoreError: if the store cannot be read.
        """
        return self.note(_SEEDED) is not None

    def seed(self, histories: Iterable[tuple[User, Int64s]], users_at_once: int = 1000) -> bool:
        """Stores histories of users that have none, unless the store has been seeded before.

        If the call is interrupted, the next call continues it.

        Args:
            histories: users, and their events, int64 `(n, 3)`, oldest first.
            users_at_once: the number of users that one `commit` stores.

        Returns:
            True unless the store had been seeded before.

        Raises:
            StoreError: if the histories cannot be stored.
        """
        if self.seeded:
            return False
        nothing = Stored(0, np.empty((0, 3), np.int64))
        remaining = iter(histories)
        while some := list(islice(remaining, users_at_once)):
            changes = [self.append(user, nothing, rows) for user, rows in some if len(rows)]
            self.commit(changes)  # does not change users who have events
        self.set_note(_SEEDED, b"1")
        return True


class MemoryStore(EventStore):
    """The events of recently served users, in the memory of this process.

    A history is overallocated by an eighth when it grows.

    Args:
        max_users: the most users; beyond it, the least recently served user is forgotten.
        max_events: as in `EventStore`.
        drop: as in `EventStore`.

    Raises:
        ValueError: for a size out of range.
    """

    waits = False

    def __init__(self, max_users: int, max_events: int, drop: int | None = None) -> None:
        super().__init__(max_events, drop)
        if max_users < 1:
            raise ValueError(f"max_users: expected a positive count, got {max_users}")
        self.max_users = max_users
        self._histories: OrderedDict[User, tuple[Stored, Int64s]] = OrderedDict()  # events, buffer
        self._notes: dict[str, bytes] = {}
        self._versions = itertools.count(1)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._histories)

    def read(self, users: Sequence[User], versions: Sequence[int]) -> list[Stored | None]:
        """Reads users' events and marks the users as served now; as `EventStore.read`."""
        with self._lock:
            found = []
            for user, version in zip(users, versions, strict=True):
                stored = None
                if user in self._histories:
                    stored, _ = self._histories[user]
                    self._histories.move_to_end(user)
                elif version:
                    stored = Stored(0, np.empty((0, 3), np.int64))
                found.append(None if stored is None or stored.version == version else stored)
            return found

    def commit(self, changes: Sequence[Change]) -> list[int]:
        """Makes changes, and forgets users beyond `max_users`; as `EventStore.commit`."""
        with self._lock:
            return [self._make(change) for change in changes]

    def _make(self, change: Change) -> int:
        user, version, kept, events, _ = change
        stored, room = self._histories.get(user, (None, events))
        if version != (0 if stored is None else stored.version):
            return 0
        if stored is not None:
            before = stored.events[len(stored.events) - kept :]
            events, room = appended(before, room if kept == len(stored.events) else before, events)
        now = next(self._versions)
        self._histories[user] = Stored(now, events), room
        self._histories.move_to_end(user)
        if len(self._histories) > self.max_users:
            self._histories.popitem(last=False)
        return now

    def forget(self, user: User) -> None:
        """Deletes a user's events."""
        with self._lock:
            self._histories.pop(user, None)

    def prune(self, *, before: int = 0, latest: int | None = None) -> Iterator[list[User]]:
        """Deletes old events, as `EventStore.prune`."""
        check_limits(before, latest)
        with self._lock:
            users = []
            for user, (stored, _) in [*self._histories.items()]:
                first = first_kept(stored.events[:, TIME], before, latest)
                if first == len(stored.events):
                    del self._histories[user]
                elif first:
                    events = stored.events[first:].copy()
                    self._histories[user] = Stored(next(self._versions), events), events
                if first:
                    users.append(user)
        yield users

    def note(self, name: str) -> bytes | None:
        """Returns the value of a note, as `EventStore.note`."""
        return self._notes.get(name)

    def set_note(self, name: str, value: bytes) -> None:
        """Sets a note, as `EventStore.set_note`."""
        with self._lock:
            self._notes[name] = value

    def replace_note(self, name: str, expected: bytes | None, value: bytes) -> bool:
        """Sets a note that has the expected value, as `EventStore.replace_note`."""
        with self._lock:
            if self._notes.get(name) != expected:
                return False
            self._notes[name] = value
        return True


def check_limits(before: int, latest: int | None) -> None:
    """Checks the arguments of `prune`."""
    for name, value in (("before", before), ("latest", 0 if latest is None else latest)):
        if value < 0:
            raise ValueError(f"{name}: expected a number from 0 up, got {value}")


def first_kept(times: Int64s, before: int, latest: int | None) -> int:
    """Returns how many of a user's oldest events `prune` deletes, given the times `(n,)`.

    If events are out of order, all events up to the last one that is too old are deleted.
    """
    old = np.flatnonzero(times < before)
    first = 0 if not len(old) else int(old[-1]) + 1
    return first if latest is None else max(first, len(times) - latest)
