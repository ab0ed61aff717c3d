"""Opens a store by a path or a URL."""

from __future__ import annotations

from .events import EventStore, MemoryStore
from .redis_store import RedisStore
from .sqlite_store import SQLiteStore

__all__ = ["open_store"]


def open_store(
    place: str, max_events: int, drop: int | None = None, *, max_users: int = 10**6
) -> EventStore:
    """Opens a store.

    Args:
        place: `memory`; a URL that begins with `redis://`, `rediss://` or `unix://`; or the path of
            an SQLite file, which is created if missing.
        max_events: as in `EventStore`.
        drop: as in `EventStore`.
        max_users: the most users of a store in memory.

    Raises:
        ImportError, OSError, ValueError, StoreError: as the stores.
    """
    if place == "memory":
        return MemoryStore(max_users, max_events, drop)
    if place.startswith(("redis://", "rediss://", "unix://")):
        return RedisStore(place, max_events, drop)
    return SQLiteStore(place, max_events, drop)
