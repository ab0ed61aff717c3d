"""A fair queue of requests: their order, their expected wait, and which one a full queue drops."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from itertools import chain
from typing import Any

from .batch import Request
from .errors import LongWaitError, OverloadedError
from .events import User

__all__ = ["FairQueue"]

SMOOTHING = 0.2  # the weight of the latest batch in the average


class _Client:
    """The waiting requests of one client, by user; the users are in the order of their turns."""

    def __init__(self) -> None:
        self.users: OrderedDict[User, deque[Request]] = OrderedDict()
        self.size = 0

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self.users.values())

    def waiting(self, user: User) -> int:
        return len(self.users.get(user, ()))

    def put(self, request: Request) -> None:
        self.users.setdefault(request.user, deque()).append(request)
        self.size += 1

    def take(self, taken: Collection[User]) -> Request | None:
        """Takes the next request of a user who is not in `taken`."""
        user = next((user for user in self.users if user not in taken), None)
        if user is None:
            return None
        requests = self.users[user]
        request = requests.popleft()
        self.size -= 1
        self.users.move_to_end(user)
        if not requests:
            del self.users[user]
        return request

    def displace(self) -> Request:
        """Takes the latest request of the user with the most waiting requests."""
        user = max(self.users, key=lambda user: len(self.users[user]))
        request = self.users[user].pop()
        self.size -= 1
        if not self.users[user]:
            del self.users[user]
        return request

    def remove(self, unwanted: Callable[[Request], bool]) -> None:
        for user, requests in [*self.users.items()]:
            kept = deque(request for request in requests if not unwanted(request))
            self.size -= len(requests) - len(kept)
            if kept:
                self.users[user] = kept
            else:
                del self.users[user]


def too_long(wait: float, longest: float) -> LongWaitError:
    """Returns the error for a request that would wait for too long."""
    return LongWaitError(
        f"the engine is overloaded: expected a wait of at most {longest:.3g} s "
        f"(max_queue_seconds, or the deadline), got {wait:.3g} s",
        retry_after=wait - longest,
    )


class FairQueue:
    """A fair queue of the requests of clients and their users; not thread-safe, reads no clock.

    Clients take turns, and so do the users of a client. So with `n` clients waiting, each gets at
    least every `n`-th place of a batch, whatever the others send, as long as it has enough users: a
    batch never has two requests of one user. Requests of one client for one user are served in the
    order of arrival.

    If the queue is full, a client with fewer waiting requests displaces one of the client with the
    most: the latest request of that client's user with the most. The users of a client displace
    each other likewise. So a client with fewer than `max_size / n` waiting requests always finds
    room.

    Args:
        max_size: the most requests that may wait.
        max_batch_size: the most requests in a batch.
        max_seconds: a request is refused if it is expected to wait longer.
    """

    def __init__(self, max_size: int, max_batch_size: int, max_seconds: float = math.inf) -> None:
        self.max_size = max_size
        self.max_batch_size = max_batch_size
        self.max_seconds = max_seconds
        self.batch_seconds = 0.0
        """The seconds that the latest batches took on average; 0 before the first one."""
        self.oldest = math.inf
        """No waiting request was submitted earlier."""
        self._clients: OrderedDict[str, _Client] = OrderedDict()  # in the order of their turns
        self._size = 0
        self._started: float | None = None
        self._first_deadline = math.inf  # no waiting request has an earlier one
        self._cancelled = False  # whether a request may have been cancelled since `remove`

    def __len__(self) -> int:
        return self._size

    @property
    def started(self) -> float | None:
        """Returns when the running batch was taken; None if no batch is running."""
        return self._started

    def expected_wait(self, client: str, user: User | None, now: float) -> float:
        """Returns the most seconds that a request would wait, at the pace of the latest batches.

        `user=None` stands for a user with no waiting request. The wait of a request that fits into
        the next batch counts as 0, so that some requests are accepted even if batches are slow, and
        their batches show when the pace has improved.
        """
        own = self._clients.get(client, _Client())
        mine = 0 if user is None else own.waiting(user)
        if self._size < self.max_batch_size and not mine:
            return 0.0
        ahead = sum(min(len(requests), mine + 1) for requests in own.users.values())
        ahead += sum(
            min(other.size, ahead + 1) for other in self._clients.values() if other is not own
        )
        # The user's own requests take a batch each, at worst after all requests ahead of them.
        batches = (ahead - mine) // self.max_batch_size + mine
        return self._seconds(batches, now)

    def _longest_wait(self, mine: int, now: float) -> float:
        """Returns an upper bound of `expected_wait`, if the user has `mine` requests waiting.

        Unlike `expected_wait` it does not loop over the waiting clients.
        """
        return self._seconds((self._size - mine) // self.max_batch_size + mine, now)

    def backlog(self, now: float) -> float:
        """Returns the seconds until the last request is taken, at the latest batches' pace."""
        return self._seconds(max(self._size - 1, 0) // self.max_batch_size, now)

    def _seconds(self, batches: int, now: float) -> float:
        """Returns how long the running batch and `batches` more would take."""
        if not batches:
            return 0.0
        running = 0.0 if self._started is None else now - self._started
        rest = 0.0 if self._started is None else max(self.batch_seconds - running, 0.0)
        return batches * max(self.batch_seconds, running) + rest

    def check(self, client: str, now: float) -> None:
        """Refuses a client whose requests would all wait for too long.

        Raises:
            LongWaitError: if any request of the client would wait for more than `max_seconds`,
                whichever its user and even if requests are removed.
        """
        if self._longest_wait(0, now) > self.max_seconds and not self._may_remove(now):
            wait = self.expected_wait(client, None, now)
            if wait > self.max_seconds:
                raise too_long(wait, self.max_seconds)

    def put(
        self, request: Request, now: float, unwanted: Callable[[Request], bool]
    ) -> Request | None:
        """Appends a request; returns the request that it displaces, if any.

        Args:
            request: the request, which names its client and user.
            now: the time, on the clock of the requests.
            unwanted: returns whether a waiting request need not be served any more; if there seems
                to be no room, such requests are removed first.

        Raises:
            LongWaitError: if the request would wait for more than `max_seconds`, or past its
                deadline.
            OverloadedError: if the queue is full.
        """
        own = self._clients.get(request.client) or _Client()
        longest = min(self.max_seconds, request.deadline - now)
        wait, full = 0.0, self._size >= self.max_size
        if full or self._longest_wait(own.waiting(request.user), now) > longest:
            wait = self.expected_wait(request.client, request.user, now)
            if (full or wait > longest) and self._may_remove(now):
                self.remove(unwanted)
                wait = self.expected_wait(request.client, request.user, now)
                own = self._clients.get(request.client) or _Client()
        if wait > longest:
            raise too_long(wait, longest)
        displaced = None
        if self._size >= self.max_size:
            largest = max(self._clients.values(), key=lambda client: client.size)
            if largest.size <= own.size + 1:
                largest = own
            most = max(map(len, largest.users.values()), default=0)
            if largest is own and most <= own.waiting(request.user) + 1:
                raise OverloadedError(
                    f"the engine is overloaded: expected fewer than {self.max_size} waiting "
                    f"requests (max_queue), got {self._size}",
                    retry_after=wait,
                )
            displaced = largest.displace()
            self._size -= 1
        self._clients.setdefault(request.client, own).put(request)
        self._size += 1
        self.oldest = min(self.oldest, request.submitted)
        self._first_deadline = min(self._first_deadline, request.deadline)
        request.future.add_done_callback(self._note_end)
        return displaced

    def take(self, now: float, unwanted: Callable[[Request], bool]) -> list[Request]:
        """Takes the requests of a batch, of different users, and drops `unwanted` requests.

        A batch that is not empty counts as running until `finish`.
        """
        batch: list[Request] = []
        users: set[User] = set()
        turns = deque(self._clients.items())
        while turns and len(batch) < self.max_batch_size:
            name, client = turns.popleft()
            before = client.size
            request = client.take(users)
            while request is not None and unwanted(request):
                request = client.take(users)
            self._size -= before - client.size
            if request is not None:
                batch.append(request)
                users.add(request.user)
                turns.append((name, client))
                self._clients.move_to_end(name)
            if not client.size:
                self._clients.pop(name, None)
        if not self._size:
            self.oldest = math.inf
        if batch:
            self._started = now
        return batch

    def finish(self, now: float) -> None:
        """Records that the batch taken last has been served."""
        if self._started is not None:
            seconds = now - self._started
            if self.batch_seconds:
                seconds = self.batch_seconds + SMOOTHING * (seconds - self.batch_seconds)
            self.batch_seconds = seconds
            self._started = None

    def _note_end(self, future: Future[Any]) -> None:
        """Records whether a request was cancelled; the thread that ends the request calls this."""
        if future.cancelled():
            self._cancelled = True

    def _may_remove(self, now: float) -> bool:
        """Returns whether some waiting requests may be unwanted; finding them takes time."""
        return self._cancelled or now >= self._first_deadline

    def remove(self, unwanted: Callable[[Request], bool]) -> None:
        """Removes the unwanted requests."""
        self._cancelled = False
        for name, client in [*self._clients.items()]:
            client.remove(unwanted)
            if not client.size:
                del self._clients[name]
        self._size = sum(client.size for client in self._clients.values())
        deadlines = (one.deadline for client in self._clients.values() for one in client)
        self._first_deadline = min(deadlines, default=math.inf)
        if not self._size:
            self.oldest = math.inf

    def clear(self) -> list[Request]:
        """Removes and returns all requests."""
        removed: list[Request] = []

        def unwanted(request: Request) -> bool:
            removed.append(request)
            return True

        self.remove(unwanted)
        return removed
