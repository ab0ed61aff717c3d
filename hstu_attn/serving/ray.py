"""Engines in the replicas of a Ray Serve deployment (`pip install hstu_attn[ray]`)."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from ray import serve
from ray.serve.handle import DeploymentBroadcastResponse

from .. import _host
from .engine import Engine
from .events import User
from .priority import take_priority

__all__ = ["SCRAPE_SECONDS", "STUCK_SECONDS", "Replica", "Served", "deployment"]

LOG = logging.getLogger(__name__)
STUCK_SECONDS = 60.0
"""A batch that takes longer than this is not expected to end."""
SCRAPE_SECONDS = 5.0
"""The metrics of a replica that takes longer to return them are left out."""


async def _no_metrics() -> Sequence[Any]:
    return ()


class Served(NamedTuple):
    """The engine and the application that a replica serves.

    Attributes:
        engine: over a store that all replicas share.
        app: the ASGI application of the engine, which closes it when it shuts down.
        metrics: an async function that returns what this replica contributes to `Replica.metrics`.
            The result is pickled, as metrics of prometheus_client can be.
        change: lets the model that a `user_config` names take over, and raises an error where that
            is not possible and nothing has changed. `{}` is the model that `build` has loaded.
            None is for a deployment whose `user_config` is `{}`.
    """

    engine: Engine
    app: Callable[..., Awaitable[None]]
    metrics: Callable[[], Awaitable[Sequence[Any]]] = _no_metrics
    change: Callable[[Any], None] | None = None


class Replica:
    """An engine and its application in a process of Ray Serve.

    A second process, `memory-holder`, has the same memory. It lets the connections of a killed
    replica be closed at once, and ends up to 0.2 s after it.

    Ray gives a worker the niceness of `RAY_worker_niceness`, 15 by default, so that a replica that
    starts leaves the processors to those that serve. Once it has started, it takes the niceness of
    the process that Ray has started it from. Where it may not (it lacks CAP_SYS_NICE), it logs a
    warning and serves with its own.

    Args:
        build: makes them. It gets the replica, by whose `forget` and `prune` the application
            deletes events, and by whose `metrics` it returns those of all replicas.
        arguments: are passed to `build` as well.
    """

    def __init__(
        self, build: Callable[..., Served], *arguments: object, **keywords: object
    ) -> None:
        self._served = build(self, *arguments, **keywords)
        self._config: Any = {}
        self._started = False
        _host.start_memory_holder()  # other replicas get what this one has not answered
        # A full garbage collection walks over every object of torch and Ray, and no request is
        # answered meanwhile. Frozen objects are left out of it.
        gc.collect()
        gc.freeze()
        if sys.platform == "linux":
            try:
                take_priority(os.getppid())
            except PermissionError:
                LOG.warning(
                    "The replica serves with the niceness of its start, since it lacks CAP_SYS_NICE"
                )

    def __serve_build_asgi_app__(self) -> Callable[..., Awaitable[None]]:
        return self._served.app

    async def reconfigure(self, user_config: Any) -> None:
        """Lets the model that the deployment's `user_config` names take over, between two batches.

        Ray calls it when the replica starts, and again when `user_config` is deployed with another
        value, while requests are answered. A running replica keeps its model where the new one
        cannot be served, and logs why: Ray would end a replica whose `reconfigure` fails.

        Raises:
            ValueError: there is a `user_config`, but no `Served.change`.
            Exception: the replica starts, and `Served.change` has raised this.
        """
        if user_config == self._config:  # Ray also calls it for other reasons.
            return
        try:
            if self._served.change is None:
                raise ValueError(
                    f"user_config: expected {{}}, as Served.change is None; got {user_config}"
                )
            await asyncio.to_thread(self._served.change, user_config)
        except Exception as error:
            if not self._started:
                raise
            LOG.error("The model has not been changed to that of %s: %s", user_config, error)
        else:
            self._config = user_config

    def check_health(self) -> None:
        """Lets Ray replace the replica when its engine can no longer answer.

        A store that fails is no reason: another replica would not reach it either.

        Raises:
            RuntimeError: the engine's thread has ended, or a batch takes longer than
                `STUCK_SECONDS`.
        """
        self._started = True  # Ray calls it after `reconfigure` and before the first request.
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
        self._ask_all("release", [user]).results(timeout_s=STUCK_SECONDS)

    def prune(self, *, before: int = 0, latest: int | None = None) -> int:
        """Deletes old events of all users, and what all replicas have cached of them.

        Args:
            before: as in `Engine.prune`.
            latest: likewise.

        Returns:
            How many users' events have been changed.

        Raises:
            ValueError: for a negative number.
            StoreError: if the store cannot delete them.
            RayError: if a replica ended meanwhile; the events are deleted.
        """
        changed: list[User] = []
        try:
            for users in self._served.engine.store.prune(before=before, latest=latest):
                changed += users
        finally:
            if changed:
                self._ask_all("release", changed).results(timeout_s=STUCK_SECONDS)
        return len(changed)

    def metrics(self) -> dict[str, Sequence[Any]]:
        """Returns the metrics of each running replica by its id, the `replica` of Ray's metrics.

        Those of a replica that does not answer are left out.
        """
        asked = self._ask_all("own_metrics")
        found = asked.results(timeout_s=SCRAPE_SECONDS, return_exceptions=True)
        return dict(one for one in found if not isinstance(one, BaseException))

    @staticmethod
    def _ask_all(method: str, *arguments: object) -> DeploymentBroadcastResponse:
        here = serve.get_replica_context()
        handle = serve.get_deployment_handle(here.deployment, here.app_name)
        return handle.broadcast(method, *arguments)

    async def own_metrics(self) -> tuple[str, Sequence[Any]]:
        """Returns the id and the metrics of this replica."""
        return serve.get_replica_context().replica_tag, await self._served.metrics()

    async def release(self, users: Sequence[User]) -> None:
        """Frees what this replica has cached of users."""
        await asyncio.to_thread(self._served.engine.forget, *users, stored=False)

    async def stats(self) -> dict[str, Any]:
        """Returns the fields of the engine's `EngineStats`, and the `pid` of the replica."""
        return {"pid": os.getpid(), **asdict(self._served.engine.stats())}


def deployment(**options: Any) -> serve.Deployment:
    """Returns a deployment of `Replica`, to be bound to the arguments of that.

    A request goes to the replica that a hash of its header `X-Session-Id` names, for which
    `hstu_attn.serving.client.Client` takes the user; without the header, and where that replica has
    too much to do or is gone, to another one. Any of them answers it rightly from the shared store;
    the one that has served the user before has the user's pages. Where HAProxy is enabled
    (`RAY_SERVE_ENABLE_HA_PROXY=1`), it chooses the replica by an algorithm of its own:
    `RAY_SERVE_HAPROXY_BALANCE_ALGORITHM='hdr(X-Session-Id)'` does likewise.

    Deployed again with another `user_config`, and otherwise as before, the replicas go on: one
    after another, at most a fifth at a time, they change their model by `Served.change`. Other
    changes replace the replicas: a quarter of the new ones, at least one, are started at a time,
    and so many of the old ones are drained once they serve, so that a model that cannot be served
    changes nothing. `serve.run` always replaces them, `serve deploy` and the REST API do not.

    Ray's access log is off unless `logging_config` is given.

    Args:
        options: the options of `serve.deployment`, in place of those chosen here.

    Example:
        >>> def build(replica, model):
        ...     engine = make_engine(model, open_store("redis://host:6379/0", 1000))
        ...     return Served(engine, make_app(engine, replica.forget, replica.prune))
        >>> serve.run(deployment(num_replicas=2).bind(build, "model.pt"))
    """
    chosen: dict[str, Any] = {
        "user_config": {},  # Ray calls `reconfigure` also where the YAML has none any more.
        "max_ongoing_requests": 1024,  # the engine's queue is fair, and refuses what is too much
        "max_queued_requests": 1024,  # of each proxy, when all replicas have as many as they may
        "backpressure_config": {"retry_after_s": 1},
        "max_surge_percent": 25,  # a start takes processors (GPUs, too) that serving needs
        # RAY_SERVE_THROUGHPUT_OPTIMIZED=1 lets Ray write the lines of 1,000 requests at once, and
        # no request is answered meanwhile.
        "logging_config": {"enable_access_log": False},
    }
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":  # HAProxy chooses the replica itself.
        router = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
        chosen["request_router_config"] = {"request_router_class": router}
    return serve.deployment(**{**chosen, **options})(serve.ingress()(Replica))
