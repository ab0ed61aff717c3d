"""Fixtures of the tests of serving."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.stores import KINDS, Place, RedisServer, redis_server


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Limits torch to one thread, because tests and the engine have threads of their own."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """An empty location for a store, parametrized over the kinds of stores."""
    server = None
    if request.param == "redis":
        server = request.getfixturevalue("shared_redis")
        server.client.flushall()
    place = Place(request.param, tmp_path, server)
    yield place
    place.close()


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns a list to which each captured call is appended."""
    from hstu_attn.serving import graphs

    calls: list[Any] = []
    capture_on = graphs.capture_on

    def counting(device: torch.device) -> Callable[[Any], Any]:
        capture = capture_on(device)

        def count(call: Any) -> Any:
            calls.append(call)
            return capture(call)

        return count

    monkeypatch.setattr(graphs, "capture_on", counting)
    return calls
