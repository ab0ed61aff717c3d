"""Limits on uvicorn's HTTP connections: their number, and how long a client may take.

uvicorn has neither limit: `limit_concurrency` answers 503 but leaves connections open, and a client
that sends a request byte by byte, or reads no answer, can hold its connection forever.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from recommender.rate_limited_log import RateLimitedLog

__all__ = ["LimitedHTTP"]

LOG = RateLimitedLog(logging.getLogger("recommender.server"))
TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\n"
LAST_ANSWER = b"Content-Length: 0\r\nConnection: close\r\n\r\n"


class LimitedHTTP(H11Protocol):
    """A connection that the server closes in three cases that uvicorn tolerates.

    1. `max_connections` other connections are open: the server answers 503 and closes at once.
    2. A request is incomplete `arrival_timeout` after its first byte (for the first request, after
       the connection was made): the server closes, after a 408 if the headers have arrived.
    3. The client does not read the response within `arrival_timeout`: the server aborts.

    The log reports each case, at a limited rate.

    Args:
        arrival_timeout: the time limit in seconds.
        max_connections: the most connections that may be open at a time.
        arguments: the arguments that uvicorn passes to its protocols.
    """

    def __init__(self, *, arrival_timeout: float, max_connections: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.arrival_timeout = arrival_timeout
        self.max_connections = max_connections
        self.arrival_timer: asyncio.TimerHandle | None = None
        self.write_timer: asyncio.TimerHandle | None = None

    def connection_made(  # type: ignore[override]  # as in uvicorn
        self, transport: asyncio.Transport
    ) -> None:
        super().connection_made(transport)
        # Any unsent byte pauses writing, so that the timer of writing knows of it.
        transport.set_write_buffer_limits(high=0)
        if len(self.connections) > self.max_connections:
            LOG.warn("Refused a connection: %d are open", self.max_connections)
            self.close(TOO_MANY)
        else:
            self.set_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.set_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # A request that came with the one before may have begun, and its body may never come.
        if self.conn.their_state is h11.SEND_BODY:
            self.set_timer()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.stop_timer()
        self.stop_write_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.write_timer is None:
            self.write_timer = self.loop.call_later(self.arrival_timeout, self.give_up)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stop_write_timer()

    def stop_write_timer(self) -> None:
        if self.write_timer is not None:
            self.write_timer.cancel()
            self.write_timer = None

    def set_timer(self) -> None:
        """Lets the timer run while a request is arriving."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self.stop_timer()
        elif self.arrival_timer is None:
            self.arrival_timer = self.loop.call_later(self.arrival_timeout, self.time_out)

    def stop_timer(self) -> None:
        if self.arrival_timer is not None:
            self.arrival_timer.cancel()
            self.arrival_timer = None

    def give_up(self) -> None:
        seconds = self.arrival_timeout
        LOG.warn("Aborted a connection whose client has taken no answer for %g s", seconds)
        self.transport.abort()

    def time_out(self) -> None:
        seconds = self.arrival_timeout
        LOG.warn("Closed a connection whose request has not arrived whole within %g s", seconds)
        self.close(TOO_SLOW if self.conn.our_state is h11.SEND_RESPONSE else b"")

    def close(self, status: bytes) -> None:
        """Closes the connection after an answer without a body, or after none."""
        if status:
            self.transport.write(status + LAST_ANSWER)
        self.transport.close()
