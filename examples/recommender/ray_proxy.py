"""The limits of the HTTP proxies of Ray Serve, which have none of their own.

Ray calls the function that RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names when a proxy starts:

    export RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=recommender.ray_proxy:limit
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from functools import partial
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS

from recommender.connections import LimitedHTTP
from recommender.http_schemas import MODEL_PATHS, START_HEADER
from recommender.rate_limited_log import RateLimitedLog
from recommender.serve_options import MAX_CONNECTIONS, TIMEOUT

__all__ = ["LoadShedder", "limit"]

LOG = RateLimitedLog(logging.getLogger("recommender.server"))
MAX_WAIT = 0.5  # seconds
ALWAYS = 16
SMOOTHING = 0.02  # the weight of the latest answer in the average


class LoadShedder:
    """Sheds load: refuses requests for scores that would be answered too late, before reading them.

    Otherwise, in an overload, requests queue in the proxy and in replicas until their clients have
    given up, and the processors compute answers that nobody waits for.

    The expected wait of a request is the time for all pending requests at the pace of the latest
    answers. If it is longer than `max_wait`, the request is answered 503 with Retry-After. A client
    with fewer pending requests than its equal share is refused only at twice the wait, so that a
    client with many requests does not shut out others. `ALWAYS` requests may be pending however
    slow they are.

    An admitted request gets the header `X-Request-Start`, so that the time that it waits for a
    replica counts toward its deadline.

    While Ray starts, its proxy answers 404, because it knows no application yet. This becomes 503
    with Retry-After, too, because clients do not retry a 404.

    Args:
        max_wait: the longest expected wait in seconds.
    """

    def __init__(self, max_wait: float) -> None:
        self.max_wait = max_wait
        self.seconds_each = 0.0
        """The seconds between two answers on average, while requests are under way."""
        self._under_way: Counter[str] = Counter()  # of each client, which has some
        self._answered = 0
        self._last = 0.0  # when a request was answered, or the first of those under way came

    def wrap(self, app: ASGIApp) -> ASGIApp:
        """Wraps an application, and refuses requests in its place."""

        async def shedding(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or not scope["path"].endswith(MODEL_PATHS):
                await app(scope, receive, send)
                return
            client = client_of(scope)
            if wait := self.excess(client):
                LOG.warn(
                    "Refused a request: %d are under way, %.3g s of work",
                    *(self._under_way.total(), self.max_wait + wait),
                )
                headers = {"Retry-After": str(math.ceil(wait))}
                answer = JSONResponse({"detail": "There is too much to do"}, 503, headers)
                await answer(scope, receive, send)
                return
            name = START_HEADER.lower().encode()
            if name not in dict(scope["headers"]):
                # Deadlines count from here: the request may wait for a replica.
                start = (name, b"t=%.3f" % time.time())
                scope = {**scope, "headers": [*scope["headers"], start]}
            known = True

            async def replacing(message: Message) -> None:
                nonlocal known
                if is_unknown_path(message):
                    known = False
                    headers = {"Retry-After": "1"}
                    detail = f"Nothing is served at {scope['path']}, or not yet"
                    await JSONResponse({"detail": detail}, 503, headers)(scope, receive, send)
                elif known:
                    await send(message)

            self.begin(client, time.monotonic())
            try:
                await app(scope, receive, replacing)
            finally:
                self.end(client, time.monotonic(), known)

        return shedding

    def excess(self, client: str) -> float:
        """Returns the seconds by which a client's next request would wait too long; 0 admits it."""
        total, own = self._under_way.total(), self._under_way[client]
        clients = len(self._under_way) + (not own)
        most = max(self.max_wait / self.seconds_each if self.seconds_each else math.inf, ALWAYS)
        if total < most or (total < 2 * most and own < most / clients):
            return 0.0
        return max(total * self.seconds_each - self.max_wait, self.seconds_each)

    def begin(self, client: str, now: float) -> None:
        """Counts an admitted request."""
        if not self._under_way:
            self._last = now
        self._under_way[client] += 1

    def end(self, client: str, now: float, of_replica: bool = True) -> None:
        """Counts the answer of a request. Only answers of replicas change the pace."""
        self._under_way[client] -= 1
        if not self._under_way[client]:
            del self._under_way[client]
        if not of_replica:
            return
        self._answered += 1
        weight = max(1 / self._answered, SMOOTHING)
        # An outage without any answer does not count as a pace.
        self.seconds_each += weight * (min(now - self._last, self.max_wait) - self.seconds_each)
        self._last = now


def is_unknown_path(message: Message) -> bool:
    """Returns whether Ray's proxy begins to answer 404; the application's answers are JSON."""
    if message["type"] != "http.response.start" or message["status"] != 404:
        return False
    kind = dict(message.get("headers", ())).get(b"content-type", b"")
    return not kind.startswith(b"application/json")


def client_of(scope: Scope) -> str:
    """Returns the client as in a replica's queue: identified by token, or else by address."""
    token = dict(scope["headers"]).get(b"authorization", b"")
    return token.decode("latin-1") or (scope.get("client") or ("",))[0]


class ProxyHTTP(LimitedHTTP):
    """A connection of a proxy, whose requests pass a `LoadShedder`.

    Args:
        shedder: the `LoadShedder` that all connections share.
        arguments: the arguments of `LimitedHTTP`.
    """

    def __init__(self, *, shedder: LoadShedder, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.shedder = shedder
        self.app = shedder.wrap(self.app)


limited = partial(
    ProxyHTTP,
    arrival_timeout=TIMEOUT,
    max_connections=MAX_CONNECTIONS,
    shedder=LoadShedder(MAX_WAIT),
)


def limit(
    max_connections: int = MAX_CONNECTIONS,
    arrival_timeout: float = TIMEOUT,
    max_wait: float = MAX_WAIT,
) -> None:
    """Makes uvicorn, which the proxy starts next in this process, limit connections and requests.

    For other limits, write a function that calls this one with other arguments.

    Args:
        max_connections: the most open connections, as `serve.py --max-connections`.
        arrival_timeout: seconds for a request to arrive, and for the client to take its answer, as
            `serve.py --timeout`.
        max_wait: seconds that a request for scores may wait for others in the proxy and the
            replicas, as far as is known: see `LoadShedder`.
    """
    limited.keywords.update(
        arrival_timeout=arrival_timeout,
        max_connections=max_connections,
        shedder=LoadShedder(max_wait),
    )
    HTTP_PROTOCOLS["auto"] = f"{__name__}:limited"  # Ray does not name one
