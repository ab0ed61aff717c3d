"""A store of events in Redis, which several processes share."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from .events import (
    TIME,
    Change,
    EventStore,
    Stored,
    StoreDamagedError,
    StoreError,
    User,
    check_limits,
    first_kept,
    user_key,
    user_of,
)

__all__ = ["RedisStore"]

LOG = logging.getLogger("hstu_attn.serving")

_PRUNED_AT_ONCE = 500

# A user's events are a string: 8 bytes of version, then 24 bytes per event, as in the host's
# arrays. KEYS are the users' keys; in scripts that create or delete, the first key is the count of
# users. A missing string means no events and version 0.
_NONE = b"\0" * 8
_READ = """
local found = {}
for n, key in ipairs(KEYS) do
  local version = redis.call('GETRANGE', key, 0, 7)
  if version == '' then version = ARGV[#ARGV] end
  if version == ARGV[n] then found[n] = false
  elseif version == ARGV[#ARGV] then found[n] = version
  else found[n] = redis.call('GET', key) end
end
return found
"""
# If a change is sent a second time, because its answer was lost, the string has the new version.
_COMMIT = """
local made, none = {}, ARGV[#ARGV]
for n = 2, #KEYS do
  local key, at = KEYS[n], 4 * (n - 2)
  local expected, new = ARGV[at + 1], ARGV[at + 2]
  local kept, events = 24 * tonumber(ARGV[at + 3]), ARGV[at + 4]
  local version = redis.call('GETRANGE', key, 0, 7)
  if version == '' then version = none end
  if version == new then made[n - 1] = 1
  elseif version ~= expected then made[n - 1] = 0
  else
    if version == none then
      redis.call('INCR', KEYS[1])
      redis.call('SET', key, new .. events)
    elseif redis.call('STRLEN', key) == 8 + kept then
      redis.call('SETRANGE', key, 0, new)
      redis.call('APPEND', key, events)
    else
      local old = ''
      if kept > 0 then old = redis.call('GETRANGE', key, -kept, -1) end
      redis.call('SET', key, new .. old .. events)
    end
    made[n - 1] = 1
  end
end
return {made, tonumber(redis.call('GET', KEYS[1]) or 0)}
"""
_FORGET = """
if redis.call('DEL', KEYS[2]) == 1 then redis.call('DECR', KEYS[1]) end
return tonumber(redis.call('GET', KEYS[1]) or 0)
"""
# Each user's argument has the version that was read, the new version, and the number of events to
# keep. A string is deleted before a shorter one is set, because a server that is out of memory
# refuses a script whose first change is a SET.
_PRUNE = """
local made = {}
for n = 2, #KEYS do
  local key, at = KEYS[n], 3 * (n - 2)
  local kept = 24 * tonumber(ARGV[at + 3])
  made[n - 1] = 0
  if redis.call('GETRANGE', key, 0, 7) == ARGV[at + 1] then
    made[n - 1] = 1
    if kept == 0 then
      redis.call('DEL', key)
      redis.call('DECR', KEYS[1])
    else
      local rest = redis.call('GETRANGE', key, -kept, -1)
      redis.call('DEL', key)
      redis.call('SET', key, ARGV[at + 2] .. rest)
    end
  end
end
return {made, tonumber(redis.call('GET', KEYS[1]) or 0)}
"""
# The arguments are the new note and, if a note is expected, the expected one.
_REPLACE_NOTE = """
if (redis.call('GET', KEYS[1]) or nil) ~= ARGV[2] then return 0 end
redis.call('SET', KEYS[1], ARGV[1])
return 1
"""


class RedisStore(EventStore):
    """Events in a Redis server, which the engines of several processes and machines may share.

    Needs `pip install hstu_attn[redis]`. Each user's change is atomic and is made only if the
    stored version is the one that it was computed from, so two processes never lose each other's
    events. A batch's changes take one round trip. If the connection fails meanwhile, the changes
    may or may not have been made; the requests fail, and retrying them duplicates no event.

    The server's settings decide what survives a crash of Redis. With `appendonly yes`,
    `appendfsync always` keeps every acknowledged event: a Redis that cannot write exits before it
    answers. With `everysec`, the default, Redis answers before the event is on the disk, and may
    lose acknowledged events of the last second or two when the machine loses power, when its disk
    is full, or when it is killed while the disk is busy. Without an append-only file all events
    since the last snapshot are lost. `maxmemory-policy` must be `noeviction`, or Redis deletes
    histories when memory is short. Deleted events stay in Redis's files until the files are
    rewritten, which `compact` starts. The log warns of settings that lose events.

    Args:
        url: as in `redis.from_url`: `redis://[[user]:password@]host[:port]/[database]`, or
            `rediss://` for TLS. The server is a single primary, and no cluster.
        max_events: as in `EventStore`; the same in all processes.
        drop: as in `EventStore`.
        prefix: the beginning of all keys.
        timeout: seconds to wait for the server's answer to a command. A command is retried only if
            the connection has been closed, so that a hanging server costs one timeout, not two.
        wait_aof: whether an event is acknowledged only when the append-only file has it on the disk
            (WAITAOF, of Redis 7.2 and later); for `appendfsync everysec`.

    Raises:
        ImportError: without the package `redis`.
        ValueError: for a size out of range, a wrong URL, a cluster, or with `wait_aof` a server
            without WAITAOF, without an append-only file, or with `appendfsync no`.
        StoreError: if the server does not answer.
    """

    def __init__(
        self,
        url: str,
        max_events: int,
        drop: int | None = None,
        *,
        prefix: str = "hstu:",
        timeout: float = 2.0,
        wait_aof: bool = False,
    ) -> None:
        super().__init__(max_events, drop)
        if not 0 < timeout < float("inf"):
            raise ValueError(f"timeout: expected positive seconds, got {timeout}")
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ImportError(
                f"redis: expected the package (pip install 'hstu_attn[redis]'), got {error}"
            ) from error
        self._failure: type[Exception] = redis.RedisError
        self._refusal: type[Exception] = redis.ResponseError
        try:
            self._client: Any = redis.Redis.from_url(
                url,
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                # A pooled connection may be older than the server's restart.
                retry=Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,)),
            )
        except ValueError as error:  # the URL may hold a password
            raise ValueError(f"url: expected redis://host:port/database, got {error}") from None
        options = self._client.connection_pool.connection_kwargs
        self._place = f"redis at {options.get('host', options.get('path', 'localhost'))}"
        self._prefix = prefix.encode()
        self._count_key = self._prefix + b"users"
        self._timeout, self._wait_aof = timeout, wait_aof
        self._users = 0
        try:
            self._check_server()
        except BaseException:
            self._client.close()
            raise

    def _check_server(self) -> None:
        with self._errors("find"):
            server = self._client.info()
            if server.get("cluster_enabled"):
                raise ValueError("url: expected a single Redis server, got one of a cluster")
            if self._wait_aof:
                try:
                    self._client.execute_command("WAITAOF", 0, 0, 0)
                except self._refusal:
                    raise ValueError(
                        "wait_aof: expected Redis 7.2 or later, which has WAITAOF, got "
                        f"{server['redis_version']}"
                    ) from None
                if not server.get("aof_enabled"):
                    raise ValueError("wait_aof: expected a server with appendonly yes, got no")
            self._users = int(self._client.get(self._count_key) or 0)
            try:
                fsync = self._client.config_get("appendfsync").get("appendfsync", "unknown")
            except self._refusal:  # the Redis user has no permission
                fsync = "unknown"
            if self._wait_aof and fsync == "no":  # WAITAOF would never return
                raise ValueError("wait_aof: expected a server with appendfsync everysec, got no")
        if not server.get("aof_enabled"):
            LOG.warning("%s: has appendonly no, and loses events when it ends", self._place)
        elif fsync != "always" and not self._wait_aof:
            LOG.warning(
                "%s: has appendfsync %s, and not always: it may lose acknowledged events when its "
                "disk is full, when it is killed, or when the machine loses power",
                *(self._place, fsync),
            )
        policy = server.get("maxmemory_policy", "noeviction")
        if server.get("maxmemory") and policy != "noeviction":
            LOG.warning(
                "%s: has maxmemory-policy %s, and deletes events when memory is short",
                *(self._place, policy),
            )

    def __len__(self) -> int:
        return self._users

    def _key(self, user: User) -> bytes:
        return self._prefix + b"user:" + user_key(user)

    # --- reading and appending -------------------------------------------------------------------

    def read(self, users: Sequence[User], versions: Sequence[int]) -> list[Stored | None]:
        """Reads, in one round trip, the events of users whose version differs."""
        if not users:
            return []
        arguments = [*map(_packed, versions), _NONE]
        with self._errors("read"):
            keys = list(map(self._key, users))
            found = self._eval(_READ, keys, arguments)
            return [
                None if value is None else _stored(key, value)
                for key, value in zip(keys, found, strict=True)
            ]

    def commit(self, changes: Sequence[Change]) -> list[int]:
        """Makes changes in one round trip; as `EventStore.commit`.

        Raises:
            StoreError: if the server did not answer. Some or all changes may have been made.
        """
        if not changes:
            return []
        arguments: list[bytes | int] = []
        versions = [secrets.randbits(62) + 1 for _ in changes]
        for change, version in zip(changes, versions, strict=True):
            rows = np.ascontiguousarray(change.events, "<i8").tobytes()
            arguments += [_packed(change.version), _packed(version), change.kept, rows]
        keys = [self._count_key, *(self._key(change.user) for change in changes)]
        with self._errors("write"):
            made, self._users = self._eval(_COMMIT, keys, [*arguments, _NONE], writes=True)
        return [version if done else 0 for version, done in zip(versions, made, strict=True)]

    def _eval(
        self,
        script: str,
        keys: Sequence[bytes],
        arguments: Sequence[bytes | int],
        writes: bool = False,
    ) -> Any:
        call = (script, len(keys), *keys, *arguments)
        if not (writes and self._wait_aof):
            return self._client.eval(*call)
        with self._client.pipeline(transaction=False) as pipe:
            pipe.eval(*call)
            pipe.execute_command("WAITAOF", 1, 0, int(1000 * self._timeout / 2))
            answer, (on_disk, _) = pipe.execute()
        if not on_disk:
            raise StoreError(f"{self._place}: the append-only file was not written in time")
        return answer

    # --- deleting --------------------------------------------------------------------------------

    def forget(self, user: User) -> None:
        """Deletes a user's events.

        Other processes free what they have cached when they next serve the user.
        """
        with self._errors("write"):
            keys = [self._count_key, self._key(user)]
            self._users = self._eval(_FORGET, keys, [], writes=True)

    def prune(self, *, before: int = 0, latest: int | None = None) -> Iterator[list[User]]:
        """Deletes old events, some users at a time; as `EventStore.prune`.

        A user whose events change meanwhile is read again.
        """
        check_limits(before, latest)
        start = len(self._key("")) - 1
        cursor = None
        while cursor != 0:
            with self._errors("write"):
                pattern = re.sub(rb"([*?\[\\])", rb"\\\1", self._prefix) + b"user:*"
                cursor, keys = self._client.scan(cursor or 0, match=pattern, count=_PRUNED_AT_ONCE)
                users = [user_of(key[start:]) for key in self._prune_some(keys, before, latest)]
            if users:
                yield users

    def _prune_some(self, found: list[bytes], before: int, latest: int | None) -> list[bytes]:
        pruned = []
        remaining = sorted(set(found))
        while remaining:
            arguments: list[bytes | int] = []
            old = []
            values = self._client.mget(remaining)
            for key, value in zip(remaining, values, strict=True):
                if value is None:
                    continue
                times = _stored(key, value).events[:, TIME]
                kept = len(times) - first_kept(times, before, latest)
                if kept < len(times):
                    old.append(key)
                    arguments += [value[:8], _packed(secrets.randbits(62) + 1), kept]
            if not old:
                break
            keys = [self._count_key, *old]
            made, self._users = self._eval(_PRUNE, keys, arguments, writes=True)
            pruned += [key for key, done in zip(old, made, strict=True) if done]
            remaining = [key for key, done in zip(old, made, strict=True) if not done]
        return pruned

    def compact(self) -> None:
        """Makes the server rewrite its files in the background, without deleted data.

        The files are the append-only file and, if snapshots are on (the setting `save`), the
        snapshot. With snapshots off, an old snapshot is not rewritten.

        Raises:
            StoreError: if the server does not answer, or is already writing one of the files; in
                that case call this again later.
        """
        with self._errors("compact"):
            append_only = self._client.info("persistence")["aof_enabled"]
            snapshots = self._client.config_get("save")["save"]
            if append_only:
                self._client.bgrewriteaof()
            if snapshots or not append_only:
                self._client.bgsave(schedule=True)

    # --- notes -----------------------------------------------------------------------------------

    def note(self, name: str) -> bytes | None:
        """Returns the value of a note, as `EventStore.note`."""
        with self._errors("read"):
            value: bytes | None = self._client.get(self._prefix + b"note:" + name.encode())
        return value

    def set_note(self, name: str, value: bytes) -> None:
        """Sets a note, as `EventStore.set_note`."""
        with self._errors("write"):
            self._client.set(self._prefix + b"note:" + name.encode(), value)

    def replace_note(self, name: str, expected: bytes | None, value: bytes) -> bool:
        """Sets a note that has the expected value, as `EventStore.replace_note`."""
        arguments = [value] if expected is None else [value, expected]
        with self._errors("write"):
            key = self._prefix + b"note:" + name.encode()
            return bool(self._eval(_REPLACE_NOTE, [key], arguments, writes=True))

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    @contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except self._failure as error:
            # WRONGTYPE means that a key does not hold a string. The other users' keys may be right,
            # so `Histories` then reads each user separately.
            damaged = isinstance(error, self._refusal) and str(error).startswith("WRONGTYPE")
            kind = StoreDamagedError if damaged else StoreError
            raise kind(f"{self._place}: could not {action} events ({error})") from error


def _packed(version: int) -> bytes:
    return version.to_bytes(8, "big")


def _stored(key: bytes, value: bytes) -> Stored:
    if value == _NONE:
        return Stored(0, np.empty((0, 3), np.int64))
    if len(value) % 24 != 8:
        raise StoreDamagedError(
            f"redis: expected 8 bytes and 24 of each event in {key!r}, got {len(value)} bytes"
        )
    events = np.frombuffer(value, "<i8", offset=8).astype(np.int64).reshape(-1, 3)
    return Stored(int.from_bytes(value[:8], "big"), events)
