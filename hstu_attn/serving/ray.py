"""Engines in the replicas of a Ray Serve deployment (`pip install hstu_attn[ray]`)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, NamedTuple

from ray import serve

from .engine import Engine
from .events import User

__all__ = ["STUCK_SECONDS", "Replica", "Served", "deployment"]

STUCK_SECONDS = 60.0
"""A batch that takes longer than this is not expected to end."""


class Served(NamedTuple):
    """The engine and the application that a replica serves.

    Attributes:
        engine: over a store that all replicas share.
        app: the ASGI application of the engine, which closes it when it shuts down.
    """

    engine: Engine
    app: Callable[..., Awaitable[None]]


class Replica:
    """An engine and its application in a process of Ray Serve.

    Args:
        build: makes them. It gets the function by which the application deletes a user's events.
        arguments: are passed to `build` as well.
    """

    def __init__(
        self, build: Callable[..., Served], *arguments: object, **keywords: object
    ) -> None:
        self._served = build(self.forget, *arguments, **keywords)

    def __serve_build_asgi_app__(self) -> Callable[..., Awaitable[None]]:
        return self._served.app

    def check_health(self) -> None:
        """Lets Ray replace the replica when its engine can no longer answer.

        A store that fails is no reason: another replica would not reach it either.

        Raises:
            RuntimeError: the engine's thread has ended, or a batch takes longer than
                `STUCK_SECONDS`.
        """
        engine = self._served.engine
        if not engine.alive:
            raise RuntimeError("the engine's thread has ended")
        if (seconds := engine.stats().running) > STUCK_SECONDS:
            raise RuntimeError(f"a batch has taken {seconds:.0f} s")

    def forget(self, user: User) -> None:
        """Deletes a user's events from the store, and what all replicas have cached of them.

        Raises:
            StoreError: if the store cannot delete them.
            RayError: if a replica ended meanwhile; the events are deleted.
        """
        self._served.engine.forget(user)
        here = serve.get_replica_context()
        handle = serve.get_deployment_handle(here.deployment, here.app_name)
        handle.broadcast("release", user).results(timeout_s=STUCK_SECONDS)

    async def release(self, user: User) -> None:
        """Frees what this replica has cached of a user."""
        await asyncio.to_thread(self._served.engine.forget, user, stored=False)

    async def stats(self) -> dict[str, Any]:
        """Returns the fields of the engine's `EngineStats`, and the `pid` of the replica."""
        return {"pid": os.getpid(), **asdict(self._served.engine.stats())}


def deployment(**options: Any) -> serve.Deployment:
    """Returns a deployment of `Replica`, to be bound to the arguments of that.

    A request goes to the replica that a hash of its header `X-Session-Id` names, for which
    `hstu_attn.serving.client.Client` takes the user; without the header, and where that replica has
    too much to do or is gone, to another one. Any of them answers it rightly from the shared store;
    the one that has served the user before has the user's pages.

    A new version's replicas are started before those of the old one are drained, one for one, so
    that a model that cannot be served changes nothing.

    Args:
        options: the options of `serve.deployment`, in place of those chosen here.

    Example:
        >>> def build(forget, model):
        ...     engine = make_engine(model, open_store("redis://host:6379/0", 1000))
        ...     return Served(engine, make_app(engine, forget))
        >>> serve.run(deployment(num_replicas=2).bind(build, "model.pt"))
    """
    chosen: dict[str, Any] = {
        "request_router_config": {
            "request_router_class": (
                "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
            ),
        },
        "max_ongoing_requests": 1024,  # the engine's queue is fair, and refuses what is too much
        "max_queued_requests": 1024,
        "max_surge_percent": 100,
    }
    return serve.deployment(**{**chosen, **options})(serve.ingress()(Replica))
