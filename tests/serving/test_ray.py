"""Tests of a replica on Ray Serve that need no Ray to run; see tests/examples/test_serve_ray.py."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
pytest.importorskip("ray.serve")
from hstu_attn.serving import Engine
from hstu_attn.serving import ray as replicas
from hstu_attn.serving.ray import Replica, Served, deployment
from tests.helpers.serving_models import make_cache, make_model

pytestmark = pytest.mark.slow  # Ray takes a while to be imported


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    """Undoes the `gc.freeze` of a replica in this process."""
    yield
    gc.unfreeze()


async def app(*_: Any) -> None:
    raise NotImplementedError


def test_garbage_collection_leaves_out_what_a_replica_has_loaded() -> None:
    with Engine(make_model("retrieval"), make_cache(12)) as engine:
        gc.unfreeze()
        Replica(lambda replica: Served(engine, app))
    assert gc.get_freeze_count() > 10_000
    assert len(gc.get_objects()) < 0.1 * gc.get_freeze_count()


def test_a_replica_is_healthy_while_its_engine_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, entered, release = make_model("retrieval"), threading.Event(), threading.Event()
    embed = model.embed

    def held(rows: Any) -> Any:
        entered.set()
        assert release.wait(20)
        return embed(rows)

    with Engine(model, make_cache(12)) as engine:
        replica = Replica(lambda replica: Served(engine, app))
        engine.score(1, [(1, 1)], [1])
        replica.check_health()
        monkeypatch.setattr(model, "embed", held)
        monkeypatch.setattr(replicas, "STUCK_SECONDS", 0.05)
        future = engine.submit_score(1, [(1, 2)], [1])
        assert entered.wait(20)
        time.sleep(0.1)
        with pytest.raises(RuntimeError, match="a batch has taken 0 s"):
            replica.check_health()
        release.set()
        future.result(20)
        end = time.monotonic() + 20
        while engine.stats().running and time.monotonic() < end:
            time.sleep(0.01)
        replica.check_health()
        with monkeypatch.context() as patched:
            patched.setattr(engine, "_worker", threading.Thread())  # has not been started
            with pytest.raises(RuntimeError, match="the engine's thread has ended"):
                replica.check_health()


def test_a_running_replica_keeps_what_it_serves_where_a_change_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    changes: list[Any] = []

    def change(user_config: Any) -> None:
        if user_config == {"model": "wrong"}:
            raise ValueError("not a model")
        changes.append(user_config)

    def reconfigure(user_config: Any) -> None:
        asyncio.run(replica.reconfigure(user_config))

    with Engine(make_model("retrieval"), make_cache(12)) as engine:
        replica = Replica(lambda replica: Served(engine, app, change=change))
        reconfigure({})  # keeps the loaded model
        assert changes == []
        with pytest.raises(ValueError, match="not a model"):
            reconfigure({"model": "wrong"})  # a model that cannot be served
        reconfigure({"model": "right"})
        replica.check_health()
        reconfigure({"model": "right"})  # as when Ray gives it another rank
        reconfigure({"model": "wrong"})
        assert "to that of {'model': 'wrong'}: not a model" in caplog.text
        reconfigure({"model": "right"})
        assert changes == [{"model": "right"}]
        reconfigure({})
        assert changes == [{"model": "right"}, {}]

        replica = Replica(lambda replica: Served(engine, app))
        with pytest.raises(ValueError, match=r"as Served\.change is None"):
            reconfigure({"a": 1})


def test_a_killed_replica_is_noticed_within_a_second() -> None:
    """Until its next health check, Ray starts no other replica."""
    assert deployment()._deployment_config.health_check_period_s == 1
    assert deployment(health_check_period_s=5)._deployment_config.health_check_period_s == 5
