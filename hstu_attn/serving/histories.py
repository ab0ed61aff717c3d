"""The users' events that an engine has in memory, and the keys under which rows are cached."""

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
        key: the cache's id of these events and of events appended to them later. No other events
            ever get the same key.
        version: the version of the events in the store; 0 for a user without events.
        events: int64 `(n, 3)`, oldest first: item, time and action. The model reads them.
        room: a larger buffer that begins with the events, to append to; None if there is none.
        stored: `(m, 3)`, the events including those on items that the model does not know; None if
            there are no such events.
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
        """All stored events but those in `ahead`, `(m, 3)`."""
        return self.events if self.stored is None else self.stored


class Histories:
    """The last read histories of the users whose rows may be cached; not thread-safe.

    Cached rows are valid only for the events that they were computed from. Another process may have
    changed a user's events since, and a server that crashed may have lost some. So the events that
    a store returns are compared with the known history, and get the same key only if they begin
    with it. A store returns no events of a user if the known version is still the current one.

    Stored events may be later than `time_range` allows, either because they came from a clock that
    was ahead or because the clock of this process is behind. Since the two cases cannot be told
    apart, such events stay stored. As long as they are too late, they are left out of histories and
    do not prevent that earlier events are added.

    Args:
        store: the store of the users' events.
        capacity: the most events to keep in memory, as many as a cache can hold; beyond it, the
            least recently read user is dropped. May be changed.
        num_items: the upper limit of the items of stored events.
        num_actions: the upper limit of the actions of stored events.
        free: is called with keys that no history has any more.
        time_range: as in `Engine`.
        skip_unknown_items: whether events on items from `num_items` up, which another model
            stored, are left out of histories; False makes them an error.
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
        self._size = 0  # events of all users; a user counts at least one
        self._told = -math.inf  # the time of the last log line on events that are ahead
        self._keys = itertools.count()

    def read(self, users: Sequence[User]) -> list[History | StoreDamagedError]:
        """Returns the current histories; an unknown user gets an empty one with a new key.

        If a user's events are damaged or are not the model's, the list has an error in place of the
        history.

        Args:
            users: users without repetition.

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
        """Logs that a user has events that are ahead, at most once a minute."""
        if time.monotonic() - self._told >= _SECONDS_BETWEEN_LINES:
            self._told = time.monotonic()
            LOG.warning(
                "%d stored events of user %r, the last at %d, are left out while they lie ahead, "
                "and perhaps those of others: no event is later than %d by this machine's clock",
                *(len(ahead), user, ahead[-1, TIME], latest),
            )

    def _history(self, key: int, version: int, stored: Int64s, ahead: Int64s) -> History:
        """Returns a history of stored events, without those on unknown items."""
        known = stored[:, ITEM] < self._num_items
        if known.all():
            return History(key, version, stored, ahead=ahead)
        return History(key, version, stored[known], None, stored, ahead)

    def extended(self, user: User, history: History, events: Int64s) -> tuple[History, Change]:
        """Returns the history with a request's events, and the change that stores them.

        An event that equals an event of the history in item, time and action is left out: the
        request has been sent before. If the request's latest `max_events - drop` events are all in
        the history, the whole request counts as a repetition and adds nothing, because its older
        events may have been dropped since. Other events must not be older than the history's last
        event. If the oldest events are dropped, the history gets a new key.

        Events that are ahead stay stored, after the new ones. Since a store can only append, the
        change removes them and appends them again.

        Args:
            user: the user whose history it is.
            history: the current one.
            events: `(n, 3)`, oldest first.

        Raises:
            EventOrderError: if a new event is older than the history's last one.
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
        """Keeps a history, whose events are stored, as the known history of its user."""
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
        """Drops the histories and cached rows of users; unknown users are ignored."""
        dropped = [self._known.pop(user) for user in users if user in self._known]
        self._size -= sum(max(1, len(history.events)) for history in dropped)
        self._free([history.key for history in dropped])


def _is_divided_elsewhere(history: History, latest: int) -> bool:
    """Returns whether `ahead` has become outdated since the history was read."""
    events, ahead = history.in_time, history.ahead
    return bool(
        (len(events) and events[-1, TIME] > latest) or (len(ahead) and ahead[0, TIME] <= latest)
    )


def _unknown(before: Int64s, events: Int64s, most: int) -> Int64s:
    """Returns the events that are not in `before`, without duplicates.

    If the latest `most` events are all in `before`, it returns none: the other events may have
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
