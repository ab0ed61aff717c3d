"""Fixtures of the tests of serving."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.stores import KINDS, Place, RedisServer, redis_server


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A place for a store of each kind, empty."""
    server = None
    if request.param == "redis":
        server = request.getfixturevalue("shared_redis")
        server.client.flushall()
    place = Place(request.param, tmp_path, server)
    yield place
    place.close()
