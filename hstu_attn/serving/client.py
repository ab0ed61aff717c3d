"""An asynchronous client of `examples/serve.py` (`pip install hstu_attn[client]`)."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import quote

import aiohttp

from .errors import DeadlineError

__all__ = ["Client", "RecommendedItem", "RequestError", "UnavailableError"]

Id = int | str

BEFORE_SENDING = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
DIED = (500, 502)
SESSION_HEADER, TIMEOUT_HEADER = "X-Session-Id", "X-Request-Timeout-Ms"
LONGEST_BACKOFF = 5.0  # seconds
SHORTEST_ATTEMPT = 1e-3  # seconds; to aiohttp, a timeout that is not positive is no timeout


class RequestError(RuntimeError):
    """The server refused a request; a retry would be refused too.

    Attributes:
        status: the HTTP status of the response, mostly 300 to 499.
        detail: the server's explanation.
    """

    def __init__(self, status: int, detail: Any) -> None:
        super().__init__(f"the server answered {status}: {detail}")
        self.status = status
        self.detail = detail


class UnavailableError(RuntimeError):
    """No server took the request in any of the attempts."""


class RecommendedItem(NamedTuple):
    """An item of the catalog, and its score."""

    item: Id
    title: str
    score: float


class Client:
    """Asks a server for scores, recommendations and predictions.

    A request is retried, after exponential backoff with jitter, if the server could not be reached,
    the connection was lost or an attempt timed out, and for the statuses 503, 500 and 502. After a
    503 the pause is at least its Retry-After; a proxy answers 500 or 502 when its server has died.
    After any of these failures but the first, the server may have stored the request's events. The
    retry is safe, because the server ignores events that it has already stored for the user. For
    any other status there is no retry.

    The header `X-Session-Id` holds the user, so that a load balancer can send a user's requests to
    the server that has the user's pages.

    Each attempt sends the remaining time, so that the server does not compute an answer that would
    come too late.

    Args:
        address: the address of the server or of a load balancer: `http://host:port`.
        token: the bearer token, for servers that require one.
        timeout: seconds until a request fails, including all its attempts and pauses; each
            request may have its own.
        attempts: the most attempts at a request.
        attempt_timeout: seconds after which an attempt is abandoned and the next one made; None is
            the rest of the timeout.
        backoff: the longest pause after the first attempt, in seconds; the limit doubles with each
            attempt, up to 5 s.
        connections: the most connections that are open at a time.

    Example:
        >>> async with Client("http://127.0.0.1:8000") as client:
        ...     items = await client.recommend(7, [(3, 1767225600)], k=10)
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        timeout: float = 5.0,
        attempts: int = 4,
        attempt_timeout: float | None = None,
        backoff: float = 0.05,
        connections: int = 100,
    ) -> None:
        seconds = {"timeout": timeout, "backoff": backoff, "attempt_timeout": attempt_timeout}
        for name, value in seconds.items():
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name}: expected positive seconds, got {value}")
        if not address.startswith(("http://", "https://")):
            raise ValueError(f"address: expected http://host:port, got {address!r}")
        for name, count in {"attempts": attempts, "connections": connections}.items():
            if count < 1:
                raise ValueError(f"{name}: expected a positive count, got {count}")
        self.address = address.rstrip("/")
        self.timeout = timeout
        self.attempts = attempts
        self.attempt_timeout = attempt_timeout
        self.backoff = backoff
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections; pending requests fail."""
        if self._session is not None:
            await self._session.close()

    async def score(
        self,
        user: Id,
        events: Sequence[tuple[Id, int]],
        candidates: Sequence[Id],
        *,
        at: int | None = None,
        timeout: float | None = None,
    ) -> list[float]:
        """Returns the score of each candidate for a user.

        Args:
            user: the user's id in the data set. Items have the data set's ids too.
            events: `(item, time)` of what the user did since the last request, oldest first.
            candidates: the items to score.
            at: the time at which the model is queried; None is the time of the user's last event.
            timeout: seconds, in place of the client's timeout.

        Raises:
            RequestError: the server refused the request.
            UnavailableError: no server accepted the request.
            DeadlineError: a TimeoutError: there was no answer in time. The events may or may not
                have been stored.
        """
        body = {"user": user, "events": _events(events), "candidates": [*candidates], "time": at}
        found: list[float] = (await self._ask("/score", body, timeout))["scores"]
        return found

    async def recommend(
        self,
        user: Id,
        events: Sequence[tuple[Id, int]],
        k: int = 10,
        *,
        exclude_seen: bool = True,
        at: int | None = None,
        timeout: float | None = None,
    ) -> list[RecommendedItem]:
        """Returns the best items of the catalog for a user, best first.

        Args:
            user: as in `score`; so are the errors.
            events: as in `score`.
            k: the number of items; fewer are returned where the catalog has no more.
            exclude_seen: whether items of the user's history are left out.
            at: as in `score`.
            timeout: as in `score`.
        """
        body = {"user": user, "events": _events(events), "k": k, "exclude_seen": exclude_seen}
        answer = await self._ask("/recommend", {**body, "time": at}, timeout)
        return [RecommendedItem(**item) for item in answer["items"]]

    async def rank(
        self,
        user: Id,
        events: Sequence[tuple[Id, int, Sequence[str]]],
        candidates: Sequence[Id],
        *,
        at: int | None = None,
        events_before: int | None = None,
        timeout: float | None = None,
    ) -> dict[str, list[float]]:
        """Returns the probability of each task for each candidate.

        Args:
            user: as in `score`; so are the errors.
            events: item, time, and the names of the user's actions on the item, for each event.
            candidates: as in `score`.
            at: as in `score`.
            events_before: the number of events that the user has had in all; None is the number
                that the server keeps.
            timeout: as in `score`.
        """
        body: dict[str, Any] = {"user": user, "candidates": [*candidates], "time": at}
        body["events"] = [
            {"item": item, "time": when, "actions": [*actions]} for item, when, actions in events
        ]
        body["events_before"] = events_before
        answer = await self._ask("/rank", body, timeout)
        found: dict[str, list[float]] = answer["probabilities"]
        return found

    async def _ask(self, path: str, body: dict[str, Any], timeout: float | None) -> Any:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._connections)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        text = json.dumps({**body, "request_id": uuid.uuid4().hex}).encode()
        session = quote(str(body["user"]), safe="")
        for attempt in itertools.count():
            late, pause = False, 0.0
            try:
                left = deadline - time.monotonic()
                status, headers, answer = await self._send(path, text, session, left)
                if status == 200:
                    return answer
                problem = f"the server answered {status}: {answer}"
                late = status == 504
                if status == 503:
                    pause = _seconds(headers.get("Retry-After"))
                elif not late and status not in DIED:
                    raise RequestError(status, answer)
            except BEFORE_SENDING as error:
                problem = f"the server was not reached: {error}"
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                problem = f"the connection was lost: {error!r}"
            except asyncio.TimeoutError:
                late, problem = True, "there was no answer in time"
            pause += random.uniform(0, min(self.backoff * 2**attempt, LONGEST_BACKOFF))
            if attempt + 1 == self.attempts or time.monotonic() + pause >= deadline:
                kind = DeadlineError if late else UnavailableError
                raise kind(f"no answer in {attempt + 1} attempts; the last time, {problem}")
            await asyncio.sleep(pause)

    async def _send(
        self, path: str, text: bytes, session: str, left: float
    ) -> tuple[int, Mapping[str, str], Any]:
        """Makes one attempt; returns the status, the headers, and the answer or its `detail`."""
        assert self._session is not None
        most = left if self.attempt_timeout is None else min(left, self.attempt_timeout)
        most = max(most, SHORTEST_ATTEMPT)  # a pause may have taken longer than it was to take
        async with self._session.post(
            self.address + path,
            data=text,
            headers={TIMEOUT_HEADER: f"{most * 1000:.3f}", SESSION_HEADER: session},
            timeout=aiohttp.ClientTimeout(total=most),
            allow_redirects=False,
        ) as response:
            received = await response.read()
            try:
                answer = json.loads(received)
            except ValueError:  # the answer is from what is between client and server
                answer = received[:200].decode(errors="replace")
            if response.status == 200 and not isinstance(answer, dict):
                raise RequestError(response.status, answer)
            if response.status != 200 and isinstance(answer, dict):
                answer = answer.get("detail", answer)
            return response.status, response.headers, answer


def _events(events: Sequence[tuple[Id, int]]) -> list[dict[str, Any]]:
    return [{"item": item, "time": when} for item, when in events]


def _seconds(retry_after: str | None) -> float:
    """Returns the seconds of a Retry-After header; 0 for a date or a missing header."""
    return float(retry_after) if retry_after is not None and retry_after.isdecimal() else 0.0
