"""The latest events of each user, on the host, from which a cache can be computed again."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Event", "EventStore", "History", "event_rows"]

Int64s = np.ndarray[Any, np.dtype[np.int64]]
User = int | str

ITEM, TIME, ACTION = range(3)  # columns
LATEST_TIME = 2**62  # differences of times stay within int64


class Event(NamedTuple):
    """An action of a user: the item, the time, and the kind of action.

    `time` is in seconds, or in any other unit that the model was trained with. `action` is 0 for
    models that read none.
    """

    item: int
    time: int
    action: int = 0


class History(NamedTuple):
    """A user's events at one moment.

    Attributes:
        key: under which a cache knows these events and those that will be appended to them. No
            other events ever have it.
        events: int64 `(n, 3)`, oldest first: item, time and action.
        dropped: how many events the user had before these.
    """

    key: int
    events: Int64s
    dropped: int = 0


def event_rows(
    events: Sequence[tuple[int, ...]] | np.ndarray[Any, Any], name: str = "events"
) -> Int64s:
    """Converts events to int64 `(n, 3)`: item, time and action, which is 0 if it is missing.

    `name` is what errors call them.

    Raises:
        ValueError: for what is not integers in rows of two or three.
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
    actions = np.zeros((len(rows), 3 - rows.shape[1]), np.int64)
    return np.concatenate([rows, actions], axis=1, dtype=np.int64)


class EventStore:
    """The latest events of recently served users, in memory. It is not thread-safe.

    A model takes a limited number of events, and positions count from the first of them, so
    dropping the oldest one shifts all others and makes whatever is cached of them useless. So they
    are dropped some at a time: a history that would be longer than `max_events` is cut to its
    latest `max_events - drop`, which then can grow again.

    Args:
        max_users: beyond these, the user served least recently is forgotten.
        max_events: no history is longer.
        drop: how many fewer a history that was cut has; None is an eighth of `max_events`. With 0 a
            full history is always the very latest events, and each new one costs a recomputation.

    Raises:
        ValueError: for a size out of range.
    """

    def __init__(self, max_users: int, max_events: int, drop: int | None = None) -> None:
        for name, size in (("max_users", max_users), ("max_events", max_events)):
            if size < 1:
                raise ValueError(f"{name}: expected a positive count, got {size}")
        if drop is None:
            drop = max_events // 8
        if not 0 <= drop < max_events:
            raise ValueError(f"drop: expected from 0 to {max_events - 1}, got {drop}")
        self.max_users = max_users
        self.max_events = max_events
        self.drop = drop
        self._histories: OrderedDict[User, History] = OrderedDict()
        self._keys = itertools.count()

    def __len__(self) -> int:
        return len(self._histories)

    def history(self, user: User) -> History:
        """Returns a user's events; an unknown user has none, under a new key."""
        found = self._histories.get(user)
        return found or History(next(self._keys), np.empty((0, 3), np.int64))

    def extended(self, history: History, events: Int64s) -> History:
        """Returns the history with `events`, `(n, 3)`, appended; stores nothing.

        If the oldest events are dropped, the history gets a new key.
        """
        together = np.concatenate([history.events, events])
        if len(together) <= self.max_events:
            return History(history.key, together, history.dropped)
        first = len(together) - self.max_events + self.drop
        return History(next(self._keys), together[first:], history.dropped + first)

    def put(self, user: User, history: History) -> list[int]:
        """Stores a user's events in place of the previous ones.

        Returns the keys that no history has any more.
        """
        unused = []
        replaced = self._histories.pop(user, None)
        if replaced is not None and replaced.key != history.key:
            unused.append(replaced.key)
        self._histories[user] = history
        if len(self._histories) > self.max_users:
            unused.append(self._histories.popitem(last=False)[1].key)
        return unused

    def add(
        self,
        user: User,
        events: Sequence[tuple[int, ...]] | np.ndarray[Any, Any],
        dropped: int = 0,
    ) -> None:
        """Appends events to a user's, before the store is given to an engine.

        `dropped` is how many events of the user were before them and are left out.

        Raises:
            ValueError: as `event_rows`.
        """
        history = self.history(user)
        history = history._replace(dropped=history.dropped + dropped)
        self.put(user, self.extended(history, event_rows(events)))
