"""Prometheus metrics of an engine and of its HTTP answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from hstu_attn.serving import Engine, Histogram
from hstu_attn.serving.stats import SECONDS

__all__ = ["Metrics", "OfReplicas"]


class Metrics(Collector):
    """The counters and the latencies of the server.

    Args:
        engine: the engine, whose statistics are included.
        ready: returns whether new requests should be sent here, without waiting for the store.

    Attributes:
        registry: the registry of the metrics.
        responses: counts answers, by path and status.
        seconds: how long answers took, by path.
    """

    def __init__(self, engine: Engine, ready: Callable[[], bool]) -> None:
        self.engine = engine
        self.ready = ready
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.responses = Counter(
            "hstu_http_responses",
            "Answers, by path and status.",
            ["path", "status"],
            registry=self.registry,
        )
        self.seconds = PrometheusHistogram(
            "hstu_http_seconds",
            "From the head of a request to the end of its answer, by path.",
            ["path"],
            buckets=SECONDS,
            registry=self.registry,
        )

    def collect(self) -> Iterable[Metric]:
        """Yields the metrics of the engine at one moment."""
        stats = self.engine.stats()
        for name, text, value in (
            ("requests", "Requests accepted.", stats.requests),
            ("completed", "Requests answered.", stats.completed),
            ("failed", "Requests ended by an error.", stats.failed),
            ("cancelled", "Requests cancelled, or late while computed.", stats.cancelled),
            ("expired", "Requests too late before they were computed.", stats.expired),
            ("displaced", "Requests that gave way to others.", stats.displaced),
            ("rejected", "Requests refused because the queue was full.", stats.rejected),
            ("shed", "Requests refused because the wait was too long.", stats.shed),
            ("graph_batches", "Batches computed by a captured graph.", stats.graph_batches),
            ("hit_tokens", "Rows of events read from the cache.", stats.hit_tokens),
            ("new_tokens", "Rows of events computed first.", stats.new_tokens),
            ("recomputed_tokens", "Rows of events computed again.", stats.recomputed_tokens),
        ):
            yield CounterMetricFamily(f"hstu_engine_{name}", text, value)
        for name, text, level in (
            ("queued", "Requests that wait.", stats.queued),
            ("users", "Users with stored events.", stats.users),
            ("backlog_seconds", "That the last of these will wait.", stats.backlog),
            ("running_seconds", "Since the current batch was begun.", stats.running),
        ):
            yield GaugeMetricFamily(f"hstu_engine_{name}", text, level)
        yield GaugeMetricFamily("hstu_ready", "Whether requests should come here.", self.ready())
        yield histogram("batch_size", "Requests in a batch.", stats.batch_size)
        yield histogram("latency_seconds", "From arrival to answer.", stats.latency)
        yield histogram("queue_seconds", "From arrival to the batch.", stats.queue_time)
        yield histogram("step_seconds", "Computation of a batch.", stats.step_time)


class OfReplicas(Collector):
    """The metrics of several replicas, with the label `replica`.

    Args:
        metrics: the metrics of each replica, by the name of the replica.
    """

    def __init__(self, metrics: Mapping[str, Iterable[Metric]]) -> None:
        self.metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Returns each metric once, with the samples of all replicas."""
        found: dict[str, Metric] = {}
        for replica, metrics in self.metrics.items():
            for one in metrics:
                metric = found.setdefault(one.name, Metric(one.name, one.documentation, one.type))
                metric.samples += [
                    sample._replace(labels={**sample.labels, "replica": replica})
                    for sample in one.samples
                ]
        return found.values()


def histogram(name: str, text: str, values: Histogram) -> Metric:
    """Returns a histogram in Prometheus' cumulative form."""
    bounds = [*map(str, values.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(values.counts), strict=True))
    return HistogramMetricFamily(f"hstu_engine_{name}", text, buckets, values.total)
