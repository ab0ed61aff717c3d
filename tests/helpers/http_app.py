"""The example's HTTP server in this process, with a small model that can be paused."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import serve
from recommender import serve_options
from recommender.saved import SavedModel
from recommender.server import make_server

from hstu_attn.serving import Engine
from tests.helpers.http_client import Client
from tests.helpers.serving_models import ITEMS, make_cache, make_model

FIRST_ID = 100
"""The data set's id of the model's first item."""
EVENT = {"item": FIRST_ID + 1, "time": 5}


class Running:
    """A server, its engine, and a gate that pauses the model while it is closed.

    Args:
        engine: keyword arguments of `Engine`.
        arguments: the command line of the server; its model file is not used.
    """

    def __init__(self, engine: dict[str, Any], *arguments: str) -> None:
        self.options = serve_options.parse_arguments(None, ["--model", __file__, *arguments])
        model = make_model("retrieval")
        self.saved = SavedModel(
            model.model,
            np.arange(FIRST_ID, FIRST_ID + ITEMS),
            [f"title {n}" for n in range(ITEMS)],
        )
        self.engine = Engine(model, make_cache(12), **engine)
        self.opened, self.reached = threading.Event(), threading.Event()
        self.opened.set()
        embed = model.embed

        def gated(rows: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(20)
            return embed(rows)

        model.embed = gated
        self.server = make_server(self.options, self.engine, self.saved)
        listener = serve.listen_later("127.0.0.1", 0)
        listener.listen()
        self.port = listener.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self.client = Client(self.address)
        self.thread = threading.Thread(target=self.server.run, args=([listener],))
        self.thread.start()

    def hold(self) -> None:
        """Makes the next batch wait until `release`."""
        self.opened.clear()
        self.reached.clear()

    def release(self) -> None:
        self.opened.set()

    def wait_for(self, **levels: float) -> None:
        """Waits until the engine's statistics have these values."""
        limit = time.monotonic() + 10
        while any(getattr(self.engine.stats(), name) != value for name, value in levels.items()):
            assert time.monotonic() < limit, self.engine.stats()
            time.sleep(0.002)

    def stop(self) -> None:
        self.release()
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()
        assert self.engine.closed


@contextmanager
def running(*arguments: str, **engine: Any) -> Iterator[Running]:
    """Runs a server with this command line; keyword arguments are passed to its engine."""
    server = Running(engine, *arguments)
    try:
        yield server
    finally:
        server.stop()


def body(user: int, **more: Any) -> dict[str, Any]:
    """Returns the body of a valid /score request."""
    return {"user": user, "events": [EVENT], "candidates": [FIRST_ID, FIRST_ID + 2], **more}
