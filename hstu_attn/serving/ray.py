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
        engine: an engine over a store that all replicas share.
        app: the ASGI application of the engine, which closes it when it shuts down.
        metrics: an async function that returns what this replica contributes to `Replica.metrics`.
            The result is pickled, as metrics of prometheus_client can be.
        change: a function that switches to the model named by a `user_config`, or raises an error
            and changes nothing. `{}` names the model that `build` has loaded. None is for a
            deployment whose `user_config` is `{}`.
    """

    engine: Engine
    app: Callable[..., Awaitable[None]]
    metrics: Callable[[], Awaitable[Sequence[Any]]] = _no_metrics
    change: Callable[[Any], None] | None = None


class Replica:
    """An engine and its application in a process of Ray Serve.

    A second process, `memory-holder`, shares the memory of the replica. It allows the connections
    of a killed replica to be closed at once, and ends up to 0.2 s after the replica.

    Ray gives a worker the niceness of `RAY_worker_niceness`, 15 by default, so that a starting
    replica leaves the processors to the serving ones. Once it has started, the replica takes the
    niceness of the Ray process that has started it. Without permission to do so (CAP_SYS_NICE), it
    logs a warning and serves with the niceness of its start.

    Args:
        build: makes the `Served` engine and application. It is called with the replica, whose
            `forget`, `prune` and `metrics` act on all replicas, and with `arguments`.
        arguments: further arguments of `build`.
    """

    def __init__(
        self, build: Callable[..., Served], *arguments: object, **keywords: object
    ) -> None:
        self._served = build(self, *arguments, **keywords)
        self._config: Any = {}
        self._started = False
        _host.start_memory_holder()  # if this replica is killed, others get its unanswered requests
        # A full garbage collection visits every object of torch and Ray, and delays all requests.
        # It skips frozen objects.
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
        """Switches to the model named by the deployment's `user_config`, between two batches.

        Ray calls this when the replica starts, and again, while requests are served, when another
        `user_config` is deployed. If the new model cannot be served, a running replica keeps its
        model and logs the error instead of raising it, because Ray would then end the replica.

        Raises:
            ValueError: at the start, for a `user_config` without a `Served.change`.
            Exception: at the start, whatever `Served.change` raises.
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
        """Makes Ray replace the replica when its engine can no longer answer.

        A failing store does not fail this check: other replicas could not reach the store either.

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
        """Deletes a user's events from the store, and the cached rows in all replicas.

        Raises:
            StoreError: if the store cannot delete them.
            RayError: if a replica ended meanwhile; the events are deleted.
        """
        self._served.engine.forget(user)
        self._ask_all("release", [user]).results(timeout_s=STUCK_SECONDS)

    def prune(self, *, before: int = 0, latest: int | None = None) -> int:
        """Deletes old events of all users, and the cached rows in all replicas.

        Args:
            before: as in `Engine.prune`.
            latest: as in `Engine.prune`.

        Returns:
            The number of users whose events have been changed.

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
        """Returns the metrics of each running replica by its id (label `replica` of Ray's metrics).

        Replicas that do not answer are left out.
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
        """Drops the cached rows of users in this replica."""
        await asyncio.to_thread(self._served.engine.forget, *users, stored=False)

    async def stats(self) -> dict[str, Any]:
        """Returns the fields of the engine's `EngineStats`, and the `pid` of the replica."""
        return {"pid": os.getpid(), **asdict(self._served.engine.stats())}


def deployment(**options: Any) -> serve.Deployment:
    """Returns a deployment of `Replica`, to be bound to the arguments of `Replica`.

    A hash of the header `X-Session-Id`, to which `hstu_attn.serving.client.Client` sets the user,
    chooses the replica of a request. Without the header, or if that replica is overloaded or gone,
    the request goes to another one. Every replica answers correctly from the shared store, but only
    the one that has served the user before has the user's pages. HAProxy, where it is enabled
    (`RAY_SERVE_ENABLE_HA_PROXY=1`), has its own load balancing:
    `RAY_SERVE_HAPROXY_BALANCE_ALGORITHM='hdr(X-Session-Id)'` hashes the header too.

    When only `user_config` changes in a new deployment, the replicas keep running and switch their
    model by `Served.change`, at most a fifth of them at a time. Other changes replace the replicas:
    new ones are started a quarter at a time, at least one, and as many old ones are drained once
    these serve, so that a model that cannot be served changes nothing. `serve.run` always replaces
    replicas; `serve deploy` and the REST API do not.

    Ray's access log is off unless `logging_config` is given.

    Args:
        options: options of `serve.deployment`, which override those chosen here.

    Example:
        >>> def build(replica, model):
        ...     engine = make_engine(model, open_store("redis://host:6379/0", 1000))
        ...     return Served(engine, make_app(engine, replica.forget, replica.prune))
        >>> serve.run(deployment(num_replicas=2).bind(build, "model.pt"))
    """
    chosen: dict[str, Any] = {
        "user_config": {},  # Ray calls `reconfigure` even if the YAML has no `user_config` any more
        "max_ongoing_requests": 1024,  # the engine's own queue is fair, and sheds excess load
        "max_queued_requests": 1024,  # for each proxy, once all replicas have reached their limit
        "backpressure_config": {"retry_after_s": 1},
        # Ray notices by a health check that a replica was killed, and then starts another one.
        "health_check_period_s": 1,
        "max_surge_percent": 25,  # a start takes processors (GPUs, too) that serving needs
        # With RAY_SERVE_THROUGHPUT_OPTIMIZED=1 Ray writes the log lines of 1,000 requests at once,
        # which delays all requests.
        "logging_config": {"enable_access_log": False},
    }
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") != "1":  # HAProxy chooses the replica itself.
        router = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
        chosen["request_router_config"] = {"request_router_class": router}
    return serve.deployment(**{**chosen, **options})(serve.ingress()(Replica))
