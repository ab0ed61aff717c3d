"""A test of the traces that the example's server exports."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
pytest.importorskip("fastapi")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.helpers.http_client import process
from tests.helpers.saved_models import ITEMS, save


@contextmanager
def collector(requests: list[Any]) -> Iterator[str]:
    """Takes traces by OTLP, uncompressed, into a list; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces":
                requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.slow
def test_the_spans_of_the_engine_are_below_those_of_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FastAPI exports spans as the environment configures, including those pending at SIGTERM."""
    save(tmp_path / "best.pt", 1)
    exported: list[Any] = []
    caller = f"00-{7:032x}-{9:016x}-01"  # the trace and span of the second request's sender
    with collector(exported) as address:
        monkeypatch.setenv("FASTAPI_OTEL_AUTO_CONFIGURE", "true")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        with process("--model", str(tmp_path / "best.pt")) as (server, client):
            sent = {"user": 1, "events": [{"item": ITEMS[0], "time": 5}], "candidates": ITEMS[:2]}
            for headers in ({}, {"traceparent": caller}):
                assert client.send("POST", "/score", sent, headers)[0] == 200
            server.terminate()
            assert server.wait(20) == 0
    spans = [
        span
        for request in exported
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    requests = [span for span in spans if span.name == "POST /score"]
    assert len(requests) == 2
    assert requests[0].parent_span_id == b""
    assert requests[1].parent_span_id == (9).to_bytes(8, "big")
    assert requests[1].trace_id == (7).to_bytes(16, "big")
    for request in requests:
        parents = [request.span_id]  # and FastAPI's spans below it, of which one is the endpoint's
        parents += [span.span_id for span in spans if span.parent_span_id == request.span_id]
        parts = [span for span in spans if span.name.startswith("hstu_attn ")]
        parts = [span for span in parts if span.parent_span_id in parents]
        names = ["hstu_attn queue", "hstu_attn batch", "hstu_attn step"]
        assert [part.name for part in parts] == names
        assert {part.trace_id for part in parts} == {request.trace_id}
        assert len({part.parent_span_id for part in parts}) == 1
        error = 10**6  # the engine has its times from another clock
        assert request.start_time_unix_nano - error <= parts[0].start_time_unix_nano
        assert parts[-1].end_time_unix_nano <= request.end_time_unix_nano + error
