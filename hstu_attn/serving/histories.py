"""The events of its users that an engine knows, and the keys under which rows are cached."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from .events import (
    ACTION,
    ITEM,
    LATEST_TIME,
    TIME,
    Change,
    EventOrderError,
    EventStore,
    Int64s,
    Stored,
    StoreDamagedError,
    User,
    appended,
)

__all__ = ["Histories", "History"]

LOG = logging.getLogger("hstu_attn.serving")
_ITEMS = 2**62  # no catalog has so many
_NO_EVENTS = np.empty((0, 3), np.int64)
_SECONDS_BETWEEN_LINES = 60.0  # a clock that has stepped back may concern all users


class History(NamedTuple):
    """A user's events at one moment.

    Attributes:
        key: the key under which a cache knows these events and those that will be appended to
            them. No other events ever have it.
        version: that of the store; 0 for a user without events.
        events: int64 `(n, 3)`, oldest first: item, time and action. The model reads them.
        room: begins with the events, and has memory for more of them; None if it is not known.
        stored: `(m, 3)`, with the events on items that the model does not know; None if there are
            none of these.
        ahead: `(k, 3)`, stored events that are later than the time range allows now.
    """

    key: int
    version: int
    events: Int64s
    room: Int64s | None = None
    stored: Int64s | None = None
    ahead: Int64s = _NO_EVENTS

    @property
    def in_time(self) -> Int64s:
        """All that is stored but what is ahead, `(m, 3)`."""
        return self.events if self.stored is None else self.stored


class Histories:
    """The histories of users whose rows may be cached, as they were when they were last read.

    Cached rows are valid for the very events that they were computed from. Another process may have
    changed a user's events since, and a server that crashed may have lost some. So whatever a store
    returns is compared with what is known, and keeps its key only if it begins with that. A store
    returns nothing where its version is the known one.

    Stored events that are later than `time_range` allows came when a clock was ahead, or the clock
    of this process is behind. Which of the two cannot be known here, so they stay stored. While
    they are too late they are left out of histories, and keep out no earlier event.

    It is for one thread alone.

    Args:
        store: has the events.
        capacity: events of all users to know, as many as a cache can hold; beyond these, the user
            who was read least recently is not known any more. May be changed.
        num_items: the items of stored events are below it.
        num_actions: the actions of stored events are below it.
        free: is called with keys that no history has any more.
        time_range: as in `Engine`.
        skip_unknown_items: whether items from `num_items` up are another model's, and left out.
    """

    def __init__(
        self,
        store: EventStore,
        capacity: int,
        num_items: int,
        num_actions: int,
        free: Callable[[Sequence[int]], None],
        time_range: Callable[[], tuple[int, int]] | None = None,
        skip_unknown_items: bool = False,
    ) -> None:
        self._store = store
        self.capacity = capacity
        self._num_items = num_items
        self._limits = (_ITEMS if skip_unknown_items else num_items, num_actions)
        self._free = free
        self._time_range = time_range
        self._known: OrderedDict[User, History] = OrderedDict()
        self._size = 0  # events of all, where a user counts as one at least
        self._told = -math.inf  # when the log last had a line on events that are ahead
        self._keys = itertools.count()

    def read(self, users: Sequence[User]) -> list[History | StoreDamagedError]:
        """Returns the current histories; an unknown user has none, under a new key.

        Where the store is damaged, or has events that the model does not know, an error is in the
        place of the history.

        Args:
            users: each once.

        Raises:
            StoreError: if the store cannot be read.
        """
        latest = LATEST_TIME if self._time_range is None else self._time_range()[1]
        known = [self._known.get(user) for user in users]
        versions = [
            0 if history is None or _is_divided_elsewhere(history, latest) else history.version
            for history in known
        ]
        try:
            found = self._store.read(users, versions)
        except StoreDamagedError as error:
            if len(users) == 1:
                return [error]
            return [history for user in users for history in self.read([user])]
        histories: list[History | StoreDamagedError] = []
        for user, history, version, stored in zip(users, known, versions, found, strict=True):
            if stored is None:
                unchanged = history if version else None
                histories.append(unchanged or History(next(self._keys), 0, _NO_EVENTS))
                continue
            try:
                histories.append(self._renewed(user, history, stored, latest))
            except StoreDamagedError as error:
                self.drop(user)
                histories.append(error)
        return histories

    def _renewed(self, user: User, known: History | None, stored: Stored, latest: int) -> History:
        events = stored.events
        for column, what, limit in ((ITEM, "items", 0), (ACTION, "actions", 1)):
            values, most = events[:, column], self._limits[limit]
            if len(values) and not 0 <= values.min() <= values.max() < most:
                raise StoreDamagedError(
                    f"store: expected {what} from 0 to {most - 1} of user {user!r}, got "
                    f"{values.min()} to {values.max()}: it is damaged, or of another model"
                )
        is_ahead = events[:, TIME] > latest
        ahead = _NO_EVENTS
        if is_ahead.any():
            events, ahead = events[~is_ahead], events[is_ahead]
            self._tell_of(user, ahead, latest)
        history = self._history(0, stored.version, self._store.cut(events), ahead)
        same = known and np.array_equal(known.events, history.events[: len(known.events)])
        history = history._replace(key=known.key if known and same else next(self._keys))
        self.put(user, history)
        return history

    def _tell_of(self, user: User, ahead: Int64s, latest: int) -> None:
        """Logs that a user has events that are ahead, if no line has said so in the last minute."""
        if time.monotonic() - self._told >= _SECONDS_BETWEEN_LINES:
            self._told = time.monotonic()
            LOG.warning(
                "%d stored events of user %r, the last at %d, are left out while they lie ahead, "
                "and perhaps those of others: no event is later than %d by this machine's clock",
                *(len(ahead), user, ahead[-1, TIME], latest),
            )

    def _history(self, key: int, version: int, stored: Int64s, ahead: Int64s) -> History:
        """Returns a history of stored events, without those on items that are not known."""
        known = stored[:, ITEM] < self._num_items
        if known.all():
            return History(key, version, stored, ahead=ahead)
        return History(key, version, stored[known], None, stored, ahead)

    def extended(self, user: User, history: History, events: Int64s) -> tuple[History, Change]:
        """Returns the history with a request's events, and the change that stores them.

        An event that is equal to one of the history in item, time and action is that event, and is
        left out: the request has been sent before. If the request's latest `max_events - drop`
        events are all in the history, the whole request counts as a repetition and adds nothing:
        its older events may have been dropped since. The others may not be older than the history's
        last event. If the oldest events are dropped, the history gets a new key.

        Events that are ahead stay stored, after the new ones. They are stored anew for that, as
        part of the change, since a store can only append.

        Args:
            user: the user whose history it is.
            history: the current one.
            events: `(n, 3)`, oldest first.

        Raises:
            EventOrderError: if an event is older than the last one.
        """
        before, ahead = history.in_time, history.ahead
        if len(events):
            stored = np.concatenate([before, ahead]) if len(ahead) else before
            events = _unknown(stored, events, self._store.max_events - self._store.drop)
        if len(events) and len(before) and events[0, TIME] < before[-1, TIME]:
            raise EventOrderError(
                f"new_events: expected times from {before[-1, TIME]} up, that of the user's last "
                f"stored event, got {events[0, TIME]}"
            )
        change = self._store.append(user, Stored(history.version, before), events)
        if not len(events):
            return history, change
        key, room, events = history.key, history.room, change.events
        if change.kept < len(before):
            key, room, before = next(self._keys), None, before[len(before) - change.kept :]
        if len(ahead):
            rows = np.concatenate([before, events, ahead])
            rows = rows[rows[:, TIME].argsort(kind="stable")]
            change = Change(user, history.version, 0, rows, len(before) + len(ahead))
        if history.stored is not None:
            stored = np.concatenate([before, events])
            return self._history(key, history.version, stored, ahead), change
        after = appended(before, before if room is None else room, events)
        return History(key, history.version, *after, ahead=ahead), change

    def put(self, user: User, history: History) -> None:
        """Makes a history, which is stored, the known one."""
        replaced = self._known.pop(user, None)
        unused = []
        if replaced is not None:
            self._size -= max(1, len(replaced.events))
            if replaced.key != history.key:
                unused.append(replaced.key)
        self._known[user] = history
        self._size += max(1, len(history.events))
        while self._size > self.capacity and len(self._known) > 1:
            _, oldest = self._known.popitem(last=False)
            self._size -= max(1, len(oldest.events))
            unused.append(oldest.key)
        if unused:
            self._free(unused)

    def keys(self) -> list[int]:
        """Returns the keys of the known histories."""
        return [history.key for history in self._known.values()]

    def drop(self, *users: User) -> None:
        """Forgets what is known and cached of users, who may be unknown."""
        dropped = [self._known.pop(user) for user in users if user in self._known]
        self._size -= sum(max(1, len(history.events)) for history in dropped)
        self._free([history.key for history in dropped])


def _is_divided_elsewhere(history: History, latest: int) -> bool:
    """Returns whether other events are ahead than when the history was read."""
    events, ahead = history.in_time, history.ahead
    return bool(
        (len(events) and events[-1, TIME] > latest) or (len(ahead) and ahead[0, TIME] <= latest)
    )


def _unknown(before: Int64s, events: Int64s, most: int) -> Int64s:
    """Returns the events that are neither among those before nor twice among themselves.

    If the latest `most` events are all among those before, it returns none: the others may have
    been stored and dropped.
    """
    first = int(events[0, TIME])  # the oldest
    if len(events) == 1 and (not len(before) or before[-1, TIME] < first):
        return events
    seen = set(map(tuple, before[before[:, TIME] >= first].tolist()))
    distinct = list(dict.fromkeys(map(tuple, events.tolist())))
    if seen.issuperset(distinct[-most:]):
        return events[:0]
    new = [event for event in distinct if event not in seen]
    return events if len(new) == len(events) else np.array(new, np.int64)
