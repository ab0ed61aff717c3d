"""The example's server in a separate process, and a client."""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.helpers.paths import EXAMPLES


class Client:
    """A client that opens a connection for each request."""

    def __init__(self, address: str) -> None:
        self.host, port = address.removeprefix("http://").split(":")
        self.port = int(port)

    def send(
        self, method: str, path: str, body: Any = None, headers: Any = None, **options: Any
    ) -> tuple[int, Any, Any]:
        """Returns the status, the headers and the decoded body."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            if body is not None and not isinstance(body, bytes) and not hasattr(body, "__next__"):
                body = json.dumps(body).encode()
            headers = {"Content-Type": "application/json", **(headers or {})}
            connection.request(method, path, body, headers, **options)
            response = connection.getresponse()
            text = response.read().decode()
            is_json = response.headers.get_content_type() == "application/json"
            if is_json:
                return response.status, response.headers, json.loads(text) if text else None
            return response.status, response.headers, text
        finally:
            connection.close()

    def post(self, path: str, **body: Any) -> Any:
        status, _, answer = self.send("POST", path, body)
        assert status == 200, answer
        return answer

    def metrics(self) -> dict[str, float]:
        """Returns the metrics without labels, and the counts of answers by path and status."""
        status, headers, text = self.send("GET", "/metrics")
        assert status == 200
        assert headers["Content-Type"].startswith("text/plain")
        values = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(sample.labels.values())
                values[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return values


def assert_retry_after(headers: Mapping[str, str], held_since: float) -> None:
    """Asserts that Retry-After is a second, or somewhat longer on a busy machine.

    The engine estimates it from the time that the running batch has taken, since `held_since` on
    the clock of `time.monotonic`. Waiting requests fill fewer than four batches.
    """
    held = time.monotonic() - held_since
    assert 1 <= int(headers["Retry-After"]) <= max(1, math.ceil(4 * held))


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    """Runs the server as a user starts it, on the CPU; its stderr is printed here.

    By default events may have any past time.
    """
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / "serve.py"), "--port", "0"]
    command += ["--device", "cpu", "--store", "memory", "--earliest-time", "0"]
    command += arguments
    server = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if found := re.search(r"^Serving .* at (http://\S+)$", line):
                yield server, Client(found[1])
                break
        else:
            raise AssertionError(f"the server ended with status {server.wait()} before it served")
    finally:
        status = server.poll()
        server.kill()
        _, errors = server.communicate()
        if status or errors:
            state = "still ran" if status is None else f"had ended with status {status}"
            print(f"the server {state}; its stderr:\n{errors}", file=sys.stderr)
