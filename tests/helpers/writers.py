"""A client of the example's server that records acknowledged events, and the server's log."""

from __future__ import annotations

import http.client
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.helpers.http_client import Client
from tests.helpers.saved_models import ITEMS

NOW = int(time.time()) - 10**6


class Log:
    """The lines that a process writes to stderr."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self.lines: list[str] = []
        self.thread = threading.Thread(target=self.read, args=(server.stderr,), daemon=True)
        self.thread.start()

    def read(self, stream: Any) -> None:
        self.lines.extend(iter(stream.readline, ""))

    def wait_for(self, text: str) -> str:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            if found := [line for line in self.lines if text in line]:
                return found[-1]
            time.sleep(0.01)
        raise AssertionError(f"{text!r} is not in {self.lines}")


class Writer:
    """A client that sends a user's events, some at a time, and records the acknowledged ones."""

    def __init__(self, user: int) -> None:
        self.user = user
        self.rng = random.Random(user)
        self.time = NOW
        self.sent: list[list[tuple[int, int]]] = []
        self.acknowledged: list[list[tuple[int, int]]] = []
        self.statuses: Counter[int] = Counter()

    def make(self) -> list[tuple[int, int]]:
        events = []
        for _ in range(self.rng.choice([1, 1, 3])):
            self.time += self.rng.randrange(1, 50)
            events.append((self.rng.choice(ITEMS), self.time))
        self.sent.append(events)
        return events

    def send(self, client: Client, events: list[tuple[int, int]]) -> int:
        """Sends events and returns the status; they are unacknowledged if the connection ends."""
        body = {
            "user": self.user,
            "events": [{"item": item, "time": at} for item, at in events],
            "candidates": [ITEMS[0]],
        }
        try:
            status, _, answer = client.send("POST", "/score", body)
        except (OSError, http.client.HTTPException):
            status = 0
        self.statuses[status] += 1
        if status == 200:
            assert len(answer["scores"]) == 1
            self.acknowledged.append(events)
        return status

    def stream(self, client: Client, most: int = 10**6) -> None:
        """Sends events until the server is gone."""
        for _ in range(most):
            if not self.send(client, self.make()):
                break

    def check(self, stored: list[tuple[int, int]], may_be: Sequence[list[tuple[int, int]]]) -> None:
        """Checks that `stored` has all acknowledged requests and, whole, some of `may_be`."""
        remaining = list(stored)
        for events in self.sent:
            if events in self.acknowledged:
                assert remaining[: len(events)] == events
            elif events not in may_be or remaining[: len(events)] != events:
                continue
            del remaining[: len(events)]
        assert not remaining
