"""Spans of OpenTelemetry, where `opentelemetry-api` is installed."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from .batch import Request

trace: Any
try:
    from opentelemetry import trace
except ImportError:
    trace = None

__all__ = ["current_span", "record_spans"]


def current_span() -> Any:
    """Returns the caller's span, or None if there is none or it is not recorded."""
    if trace is None:
        return None
    span = trace.get_current_span()
    return span if span.is_recording() else None


def record_spans(
    requests: Iterable[Request], taken: float, started: float, computed: float, batch_size: int
) -> None:
    """Records spans for the requests of a batch, as children of the callers' spans.

    Args:
        requests: the requests of the batch; those without a span are left out.
        taken: when the batch was taken from the queue, by `time.monotonic`.
        started: when the step that computed these requests began.
        computed: when the step's answers had been computed.
        batch_size: the number of requests of the step.
    """
    recorded = [request for request in requests if request.span is not None]
    if not recorded:
        return
    tracer, to_epoch = trace.get_tracer("hstu_attn.serving"), _start_of_monotonic_time()
    for request in recorded:
        above = trace.set_span_in_context(request.span)
        attributes: dict[str, Any] = {"hstu_attn.batch_size": batch_size}
        if request.request_id is not None:
            attributes["hstu_attn.request_id"] = request.request_id
        for name, start, end in (
            ("hstu_attn queue", request.submitted, taken),
            ("hstu_attn batch", taken, started),
            ("hstu_attn step", started, computed),
        ):
            tracer.start_span(
                name,
                above,
                start_time=to_epoch + int(start * 1e9),
                attributes=attributes,
            ).end(to_epoch + int(end * 1e9))


def _start_of_monotonic_time() -> int:
    """Returns when `time.monotonic` was 0, in nanoseconds since the epoch.

    The thread may be descheduled between the readings of two clocks, so the closest pair counts.
    """
    readings = [(time.monotonic_ns(), time.time_ns(), time.monotonic_ns()) for _ in range(3)]
    before, now, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return now - (before + after) // 2
