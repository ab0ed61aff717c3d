"""Tests of the spans of a request: in the queue, until its step, and in the step."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("hstu_attn._host", reason="_host has not been built")
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from hstu_attn.serving import Engine, tracing
from tests.helpers.serving_models import make_cache, make_model


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """A separate tracer provider, because the global one can be set only once per process."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()


def spans_of(exporter: InMemorySpanExporter) -> dict[str, list[ReadableSpan]]:
    found: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


def test_the_spans_of_a_request_follow_each_other(exporter: InMemorySpanExporter) -> None:
    tracer = trace.get_tracer("test")
    with Engine(make_model("retrieval"), make_cache(12), max_batch_size=3, max_wait=30) as engine:
        callers: list[Any] = []
        futures = []
        for user in range(2):
            with tracer.start_as_current_span(f"caller {user}") as caller:
                callers.append(caller)
                how: Any = {"request_id": f"id {user}"}
                futures.append(engine.submit_score(user, [(1, 1)], [1], **how))
        futures.append(engine.submit_score(2, [(1, 1)], [1]))  # outside of a span
        assert all(len(future.result(10)) == 1 for future in futures)
    found = spans_of(exporter)
    names = ["hstu_attn queue", "hstu_attn batch", "hstu_attn step"]
    assert sorted(found) == sorted([*names, "caller 0", "caller 1"])
    for number, caller in enumerate(callers):
        parts = [found[name][number] for name in names]
        for part in parts:
            assert part.parent is not None
            assert part.parent.span_id == caller.get_span_context().span_id
            assert part.context.trace_id == caller.get_span_context().trace_id
            assert dict(part.attributes or {}) == {
                "hstu_attn.batch_size": 3,
                "hstu_attn.request_id": f"id {number}",
            }
        queue, batch, step = parts
        assert abs(queue.start_time - caller.start_time) < 10**9  # on the same clock
        assert queue.start_time <= queue.end_time
        assert abs(queue.end_time - batch.start_time) < 10**6
        assert abs(batch.end_time - step.start_time) < 10**6
        assert step.start_time < step.end_time


def test_a_span_that_is_not_recorded_has_none_below(exporter: InMemorySpanExporter) -> None:
    with (
        trace.use_span(trace.NonRecordingSpan(trace.INVALID_SPAN_CONTEXT)),
        Engine(make_model("retrieval"), make_cache(12)) as engine,
    ):
        assert tracing.current_span() is None
        engine.score(1, [(1, 1)], [1], timeout=10)
    assert spans_of(exporter) == {}


def test_without_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "opentelemetry", None)
        assert importlib.reload(tracing).current_span() is None
        with Engine(make_model("retrieval"), make_cache(12)) as engine:
            assert engine.score(1, [(1, 1)], [1], timeout=10).shape == (1,)
    assert importlib.reload(tracing).trace is trace
