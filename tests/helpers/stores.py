"""Stores of events for tests, a Redis server among them."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from hstu_attn.serving import EventStore, MemoryStore, SQLiteStore
from hstu_attn.serving.events import User
from hstu_attn.serving.redis_store import RedisStore
from tests.conftest import NO_REDIS, NO_TMPFS

KINDS = ["memory", "sqlite", "redis"]


def events_of(store: EventStore, user: User) -> list[tuple[int, ...]]:
    """Returns a user's stored events."""
    (stored,) = store.read([user], [0])
    return [] if stored is None else [*map(tuple, stored.events.tolist())]


class SmallDisk:
    """A small file system in memory that can be filled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.filler = folder / "filler"

    def fill(self, room: int) -> None:
        """Fills the disk except for `room` bytes, a multiple of 4096."""
        with self.filler.open("ab", buffering=0) as file:
            with suppress(OSError):
                while True:
                    file.write(bytes(4096))
            file.truncate(file.tell() // 4096 * 4096 - room)

    def clear(self) -> None:
        """Frees the space that `fill` has taken."""
        self.filler.unlink()


@contextmanager
def small_disk(folder: Path, megabytes: int = 9) -> Iterator[SmallDisk]:
    """Mounts a file system at an empty folder; skips the test where that is not permitted."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0777", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip(NO_TMPFS)
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class RedisServer:
    """A durable `redis-server` on a free port of loopback."""

    def __init__(self, folder: Path) -> None:
        redis = pytest.importorskip("redis", reason=NO_REDIS)
        self.program = shutil.which("redis-server")
        if self.program is None:
            pytest.skip(f"{NO_REDIS} (make ci-packages)")
        self.folder = folder
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            self.port = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = redis.Redis(port=self.port, socket_timeout=10)
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Starts the server, and returns when it answers."""
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        options += ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        assert self.program is not None
        self.process = subprocess.Popen([self.program, *options], stdout=subprocess.DEVNULL)
        end = time.monotonic() + 20
        while time.monotonic() < end:
            assert self.process.poll() is None, "redis-server has ended"
            with suppress(Exception):
                if self.client.ping():
                    return
            time.sleep(0.02)
        raise AssertionError("redis-server does not answer")

    @property
    def has_wait_aof(self) -> bool:
        """Whether the server has the command WAITAOF."""
        version = str(self.client.info()["redis_version"])
        return tuple(map(int, version.split(".")[:2])) >= (7, 2)

    def kill(self) -> None:
        """Kills the server by SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextmanager
def redis_server(folder: Path) -> Iterator[RedisServer]:
    """Runs a Redis server; skips the test where there is none."""
    server = RedisServer(folder)
    try:
        yield server
    finally:
        server.kill()


class Place:
    """The location of a store of one kind, which can be opened repeatedly."""

    def __init__(self, kind: str, folder: Path, server: RedisServer | None) -> None:
        self.kind, self.folder, self.server = kind, folder, server
        self.opened: list[EventStore] = []

    def open(self, max_events: int = 40, drop: int | None = None) -> EventStore:
        store: EventStore
        if self.kind == "memory":
            store = MemoryStore(1000, max_events, drop)
        elif self.kind == "sqlite":
            store = SQLiteStore(self.folder / "events.sqlite", max_events, drop)
        else:
            assert self.server is not None
            store = RedisStore(self.server.url, max_events, drop)
        self.opened.append(store)
        return store

    def close(self) -> None:
        for store in self.opened:
            store.close()
