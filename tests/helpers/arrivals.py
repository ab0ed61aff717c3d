"""Checks the number of requests of a benchmark with random arrivals."""

from __future__ import annotations

from benchmarks.record import Record


def check_arrivals(record: Record, seconds: float) -> None:
    """Asserts that as many requests as a Poisson process brings have arrived.

    Args:
        record: a record of `benchmarks.load.at_loads`, with the figures of its load.
        seconds: the seconds of the measurement that were asked for. `record["seconds"]` is longer,
            since it also counts the wait for the last answers. Requests arrive for `seconds`, or
            longer with an event, until at most the worst latency before the end.
    """
    shortest = longest = seconds
    if record["event"]:
        longest = record["seconds"]
        if not record["failed"]:  # there are no latencies of failed requests
            shortest = max(seconds, longest - record["worst_ms"] / 1e3)
    rate, count = record["load"] * record["capacity"], record["answered"] + record["failed"]
    assert count > rate * shortest - 5 * (rate * shortest) ** 0.5 - 5
    assert count < rate * longest + 5 * (rate * longest) ** 0.5 + 5
