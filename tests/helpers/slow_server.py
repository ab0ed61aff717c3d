"""The example's HTTP server in this process, with a saved model that can be paused or fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import serve
import torch
from recommender import serve_options
from recommender.saved import load_model
from recommender.server import make_engine, make_server
from torch import Tensor

from hstu_attn.serving import Engine
from tests.helpers.http_client import Client


class SlowServer:
    """A server in this process whose model waits until it is released."""

    def __init__(self, checkpoint: Path, *arguments: str) -> None:
        always = ["--model", str(checkpoint), "--earliest-time", "0"]
        options = serve_options.parse_arguments(None, [*always, *arguments])
        saved = load_model(options.model, torch.device("cpu"))
        self.engine: Engine = make_engine(options, saved)
        self.go_on, self.reached = threading.Event(), threading.Event()
        embed = self.engine.model.embed

        def slow_embed(rows: Any) -> Tensor:
            self.reached.set()
            assert self.go_on.wait(20)
            if self.go_on_with_error:
                raise RuntimeError("a failure")
            return embed(rows)

        self.go_on_with_error = False
        self.engine.model.embed = slow_embed
        listener = serve.listen_later("127.0.0.1", 0)
        listener.listen()
        self.client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}")
        self.server = make_server(options, self.engine, saved)
        self.thread = threading.Thread(target=self.server.run, args=([listener],))
        self.thread.start()

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


@contextmanager
def slow(checkpoint: Path, *arguments: str) -> Iterator[SlowServer]:
    server = SlowServer(checkpoint, *arguments)
    try:
        yield server
    finally:
        server.go_on.set()
        server.stop()
