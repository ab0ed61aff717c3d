"""A store of events in a file, by SQLite."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from .events import (
    Change,
    EventStore,
    Stored,
    StoreDamagedError,
    StoreError,
    User,
    check_limits,
    user_key,
    user_of,
)

__all__ = ["SQLiteStore"]

LOG = logging.getLogger("hstu_attn.serving")

_APPLICATION, _LAYOUT = 0x48535455, 1  # PRAGMA application_id ("HSTU") and user_version
_WAIT_SECONDS = 10.0  # to wait for another program that uses the file, such as a backup
_PRUNED_AT_ONCE = 200  # users per transaction, so that no transaction delays requests for long

# `seq` numbers a user's events; events `first` to `next - 1` exist.
_SCHEMA = f"""
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
BEGIN;
CREATE TABLE users (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  name BLOB NOT NULL UNIQUE,
  version INTEGER NOT NULL,
  first INTEGER NOT NULL,
  next INTEGER NOT NULL
);
CREATE TABLE events (
  user INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  item INTEGER NOT NULL,
  time INTEGER NOT NULL,
  action INTEGER NOT NULL,
  PRIMARY KEY (user, seq)
) WITHOUT ROWID;
CREATE TABLE notes (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE counts (users INTEGER NOT NULL);
INSERT INTO counts VALUES (0);
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {_LAYOUT};
COMMIT;
"""


class SQLiteStore(EventStore):
    """Events in an SQLite file of one process; they survive its end, kill -9 and power loss.

    A `commit` is one transaction, which is on the disk when it returns, by one fsync of the
    write-ahead log; if it raises, nothing of it is stored. Opening reads no events, and takes as
    long for a million users as for one.

    When the file is opened, the events that a killed process has stored are recovered from the log,
    with a warning.

    Deleted events are overwritten with zeros, and `forget` and `prune` empty the log beside the
    file (`path` with `-wal`). Where SQLite has moved rows between pages it leaves copies in the
    unused parts of pages; `compact` removes the copies, and commits wait for it.

    Other programs may read the file while it is open, as `sqlite3 PATH ".backup COPY"` does.

    Args:
        path: the path of the file, which is created if missing. It must be on a local disk.
        max_events: as in `EventStore`. It may change between two openings of a file.
        drop: as in `EventStore`.

    Raises:
        OSError: if the file cannot be made or opened.
        ValueError: for a size out of range; for a file that is empty, damaged or something else,
            which is left as it is; if another process has it open.
        StoreError: if the events that a killed process has stored cannot be recovered.
    """

    def __init__(self, path: str | os.PathLike[str], max_events: int, drop: int | None = None):
        super().__init__(max_events, drop)
        self.path = Path(path)
        self._lock_file = self._take()
        try:
            if not self.path.exists():
                self._make()
            with self.path.open("r+b"):  # the system's error says more than SQLite's
                pass
            log = Path(f"{self.path.resolve()}-wal")
            was_killed = log.exists() and log.stat().st_size > 0  # `close` removes the log
            # With a connection of its own, a reader does not wait for a transaction of the writer.
            self._reader, self._writer = self._open(), self._open()
            self._reading, self._writing = threading.Lock(), threading.Lock()
            if was_killed:
                with self._errors("recover"):
                    _, pages, _ = self._writer.execute("PRAGMA wal_checkpoint").fetchone()
                LOG.warning(
                    "%s: was not closed when it was used last; %d pages of changes have been "
                    "recovered from its log, and %d users have events",
                    *(self.path, pages, self._users),
                )
        except BaseException:
            self._lock_file.close()
            raise

    def _take(self) -> Any:
        """Locks a file beside the store, and returns it; the lock ends with the process."""
        lock = open(f"{self.path.resolve()}-lock", "ab")  # noqa: SIM115  # closed by `close`
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise ValueError(
                f"{self.path}: expected a store that no other process has open (several processes "
                "share one by Redis), got one that is in use"
            ) from None
        return lock

    def _make(self) -> None:
        """Creates an empty store under a temporary name, and renames it when it is complete."""
        for end in ("-wal", "-journal"):
            log = Path(f"{self.path}{end}")
            if log.exists():
                raise ValueError(
                    f"{self.path}: expected it beside its log, {log.name}; got no such file"
                )
        temporary = Path(f"{self.path}-new")
        for path in (temporary, Path(f"{temporary}-wal"), Path(f"{temporary}-shm")):
            path.unlink(missing_ok=True)
        try:
            connection = sqlite3.connect(temporary, isolation_level=None)
            try:
                connection.executescript(_SCHEMA)
            finally:
                connection.close()  # moves the log's content into the file
            os.rename(temporary, self.path)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except sqlite3.Error as error:
            raise OSError(f"{self.path}: a store could not be made ({error})") from error

    def _open(self) -> sqlite3.Connection:
        try:
            connection = sqlite3.connect(
                f"{self.path.resolve().as_uri()}?mode=rw",
                uri=True,
                timeout=_WAIT_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
            application = connection.execute("PRAGMA application_id").fetchone()[0]
            layout = connection.execute("PRAGMA user_version").fetchone()[0]
            if (application, layout) != (_APPLICATION, _LAYOUT):
                connection.close()
                raise ValueError(
                    f"{self.path}: expected a store of events of layout {_LAYOUT}, got a database "
                    f"of application {application:#x} and layout {layout}, or an empty file"
                )
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA secure_delete = ON")
            self._users = int(connection.execute("SELECT users FROM counts").fetchone()[0])
        except (sqlite3.Error, TypeError) as error:
            raise ValueError(
                f"{self.path}: expected a store of events, got a file that is damaged or something "
                f"else, and is left as it is ({error})"
            ) from error
        return connection

    def __len__(self) -> int:
        return self._users

    # --- reading and appending -------------------------------------------------------------------

    def read(self, users: Sequence[User], versions: Sequence[int]) -> list[Stored | None]:
        """Reads the events of the users whose version is 0.

        No other process changes events, so events that the caller has are not read again.
        """
        keys = [
            None if version else user_key(user)
            for user, version in zip(users, versions, strict=True)
        ]
        if not any(keys):
            return [None] * len(keys)
        with self._errors("read"), self._reading, self._transaction(self._reader, "BEGIN"):
            return [None if key is None else self._read(key) for key in keys]

    def _read(self, key: bytes) -> Stored | None:
        row = self._reader.execute("SELECT id, version FROM users WHERE name = ?", [key]).fetchone()
        if row is None:
            return None
        events = self._reader.execute(
            "SELECT item, time, action FROM events WHERE user = ? ORDER BY seq", row[:1]
        )
        rows = np.array(events.fetchall()).reshape(-1, 3)
        if rows.size and rows.dtype.kind != "i":
            raise StoreDamagedError(
                f"{self.path}: expected events of integers of user {user_of(key)!r}, got others"
            )
        return Stored(row[1], rows.astype(np.int64))

    def commit(self, changes: Sequence[Change]) -> list[int]:
        """Makes changes in one transaction; as `EventStore.commit`."""
        with self._errors("write"), self._writing:
            with self._transaction(self._writer):
                made = [self._change(change) for change in changes]
                created = sum(new for _, new in made)
                if created:
                    self._writer.execute("UPDATE counts SET users = users + ?", [created])
            self._users += created
        return [version for version, _ in made]

    def _change(self, change: Change) -> tuple[int, bool]:
        """Makes a change within a transaction; returns the version, and whether a user is new."""
        execute, key = self._writer.execute, user_key(change.user)
        row = execute("SELECT id, version, first, next FROM users WHERE name = ?", [key]).fetchone()
        if change.version != (0 if row is None else row[1]):
            return 0, False
        version = _new_version()
        if row is None:
            number, first, following = None, 0, 0
        else:
            number, _, first, following = row
        kept_from = following - change.kept
        end = following + len(change.events)
        if number is None:
            number = execute(
                "INSERT INTO users (name, version, first, next) VALUES (?, ?, ?, ?)",
                [key, version, kept_from, end],
            ).lastrowid
        else:
            execute(
                "UPDATE users SET version = ?, first = ?, next = ? WHERE id = ?",
                [version, kept_from, end, number],
            )
        if kept_from > first:
            execute("DELETE FROM events WHERE user = ? AND seq < ?", [number, kept_from])
        self._writer.executemany(
            "INSERT INTO events VALUES (?, ?, ?, ?, ?)",
            [(number, following + n, *event) for n, event in enumerate(change.events.tolist())],
        )
        return version, row is None

    # --- deleting --------------------------------------------------------------------------------

    def forget(self, user: User) -> None:
        """Deletes a user's events and name, and empties the log."""
        key = user_key(user)
        with self._errors("write"), self._writing:
            with self._transaction(self._writer):
                row = self._writer.execute("SELECT id FROM users WHERE name = ?", [key]).fetchone()
                if row is not None:
                    self._delete(row[0])
            self._users -= row is not None
            self._empty_log()

    def _delete(self, number: int) -> None:
        self._writer.execute("DELETE FROM events WHERE user = ?", [number])
        self._writer.execute("DELETE FROM users WHERE id = ?", [number])
        self._writer.execute("UPDATE counts SET users = users - 1")

    def prune(self, *, before: int = 0, latest: int | None = None) -> Iterator[list[User]]:
        """Deletes old events, some users per transaction; as `EventStore.prune`."""
        check_limits(before, latest)
        number: int | None = 0
        while number is not None:
            with self._errors("write"), self._writing:
                with self._transaction(self._writer):
                    number, users, deleted = self._prune_some(number, before, latest)
                self._users -= deleted
            if users:
                yield users
        with self._errors("write"), self._writing:
            self._empty_log()

    def _prune_some(
        self, after: int, before: int, latest: int | None
    ) -> tuple[int | None, list[User], int]:
        """Prunes the users with the next numbers.

        Returns the last number, or None if there was none; the changed users; and how many of them
        have no events any more.
        """
        execute = self._writer.execute
        rows = execute(
            "SELECT id, name, first, next FROM users WHERE id > ? ORDER BY id LIMIT ?",
            [after, _PRUNED_AT_ONCE],
        ).fetchall()
        users: list[User] = []
        deleted = 0
        for number, name, first, following in rows:
            kept_from = first if latest is None else max(first, following - latest)
            if before:
                query = "SELECT max(seq) + 1 FROM events WHERE user = ? AND time < ?"
                kept_from = max(kept_from, execute(query, [number, before]).fetchone()[0] or 0)
            if kept_from == first:
                continue
            users.append(user_of(name))
            if kept_from == following:
                self._delete(number)
                deleted += 1
                continue
            execute("DELETE FROM events WHERE user = ? AND seq < ?", [number, kept_from])
            execute(
                "UPDATE users SET version = ?, first = ? WHERE id = ?",
                [_new_version(), kept_from, number],
            )
        return (rows[-1][0] if rows else None), users, deleted

    def _empty_log(self) -> None:
        """Moves the log's content into the file, and leaves the log without a byte."""
        if self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            raise StoreError(
                f"{self.path}: what was deleted is still in the log, which another program has "
                f"been reading for {_WAIT_SECONDS:.0f} s; delete again when it has ended"
            )

    def compact(self) -> None:
        """Rewrites the file (VACUUM); the disk needs free space of twice the file's size."""
        with self._errors("compact"), self._writing:
            self._writer.execute("VACUUM")
            self._empty_log()

    # --- notes -----------------------------------------------------------------------------------

    def note(self, name: str) -> bytes | None:
        """Returns the value of a note, as `EventStore.note`."""
        with self._errors("read"), self._reading:
            row = self._reader.execute("SELECT value FROM notes WHERE name = ?", [name]).fetchone()
        return None if row is None else bytes(row[0])

    def set_note(self, name: str, value: bytes) -> None:
        """Sets a note, as `EventStore.set_note`."""
        with self._errors("write"), self._writing, self._transaction(self._writer):
            self._writer.execute("REPLACE INTO notes VALUES (?, ?)", [name, value])

    def replace_note(self, name: str, expected: bytes | None, value: bytes) -> bool:
        """Sets a note that has the expected value, as `EventStore.replace_note`."""
        execute = self._writer.execute
        with self._errors("write"), self._writing, self._transaction(self._writer):
            row = execute("SELECT value FROM notes WHERE name = ?", [name]).fetchone()
            found = None if row is None else bytes(row[0])
            if found == expected:
                execute("REPLACE INTO notes VALUES (?, ?)", [name, value])
        return found == expected

    def close(self) -> None:
        """Closes the file, after moving the log's content into it where that is possible."""
        with self._reading, self._writing:
            self._reader.close()
            self._writer.close()
            self._lock_file.close()

    # --- connections -----------------------------------------------------------------------------

    @contextmanager
    def _transaction(
        self, connection: sqlite3.Connection, begin: str = "BEGIN IMMEDIATE"
    ) -> Iterator[None]:
        connection.execute(begin)
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            # After some errors SQLite has already rolled back, and then ROLLBACK fails.
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise

    @contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OverflowError) as error:
            # A damaged file raises DatabaseError itself, not a subclass; damaged rows raise
            # IntegrityError.
            damaged = type(error) in (sqlite3.DatabaseError, sqlite3.IntegrityError)
            kind = StoreDamagedError if damaged else StoreError
            raise kind(f"{self.path}: could not {action} events ({error})") from error


def _new_version() -> int:
    """Returns a version that is unique and not 0."""
    return secrets.randbits(62) + 1
