"""Tests of an engine's queue: order, batches, fairness, deadlines, overload, and shutdown."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from torch import Tensor

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
from hstu_attn.serving import (
    DeadlineError,
    Engine,
    EngineClosedError,
    Event,
    GraphBuckets,
    NoHistoryError,
    OverloadedError,
    graphs,
)
from hstu_attn.serving.scoring import Scorer
from tests.helpers.serving_models import (
    POISON,
    Boom,
    Gate,
    Histories,
    assert_close,
    make_cache,
    make_model,
    some_events,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Held:
    """An engine whose worker waits in user 0's request until the gate is opened."""

    engine: Engine
    gate: Gate
    first: Future[Tensor]
    histories: Histories


@pytest.fixture
def hold() -> Iterator[Callable[..., Held]]:
    made: list[Held] = []

    def start(**options: Any) -> Held:
        model = make_model("retrieval")
        engine = Engine(model, make_cache(12), **options)
        gate = Gate(model)
        first = engine.submit_score(0, [(1, 1)], [1])
        assert gate.reached.wait(10)
        made.append(Held(engine, gate, first, Histories(model)))
        return made[-1]

    yield start
    for held in made:
        held.gate.opened.set()
        held.engine.close()


def test_batches_are_of_different_users_who_take_turns(
    hold: Callable[..., Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = hold(max_batch_size=3, max_wait=0.0)
    served: list[list[tuple[Any, int]]] = []
    serve = held.engine._serve

    def record(requests: list[Any]) -> None:
        served.append([(request.user, request.at) for request in requests])
        serve(requests)

    monkeypatch.setattr(held.engine, "_serve", record)
    users = [1, 1, 2, 1, 3, 4, 2]
    requests = [(user, [Event(user, 10 + n)], [5, 6], n) for n, user in enumerate(users)]
    futures = [held.engine.submit_score(*request[:3], at=request[3]) for request in requests]
    assert held.engine.stats().queued == 7
    held.gate.opened.set()
    held.histories.expect(0, [Event(1, 1)], [1], None)
    for request, future in zip(requests, futures, strict=True):
        assert_close(future.result(10), held.histories.expect(*request))
    assert served == [[(1, 0), (2, 2), (3, 4)], [(4, 5), (1, 1), (2, 6)], [(1, 3)]]
    assert held.engine.stats().batch_size.counts[:3] == [2, 0, 2]


def test_a_batch_waits_for_others_but_not_for_long() -> None:
    model = make_model("retrieval")
    with Engine(model, make_cache(12), max_batch_size=2, max_wait=30.0) as engine:
        start = time.monotonic()
        pair = [engine.submit_score(user, [(1, 1)], [1]) for user in (1, 2)]
        assert all(future.result(10) is not None for future in pair)
        assert time.monotonic() - start < 10
        assert engine.stats().batches == 1
    with Engine(model, make_cache(12), max_batch_size=2, max_wait=0.2) as engine:
        start = time.monotonic()
        engine.score(1, [(1, 1)], [1])
        assert 0.2 <= time.monotonic() - start < 10


# ---------------------------------------------------------------------------------------------
# When answers are handed out
# ---------------------------------------------------------------------------------------------


def test_answers_are_handed_out_while_a_device_computes(
    hold: Callable[..., Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, a batch's answers are returned after the next batch has been launched."""
    monkeypatch.setattr(Scorer, "runs_ahead", True)
    held = hold(max_batch_size=2, max_wait=0.0)
    futures = [held.first]
    done: list[tuple[int, int]] = []
    scorer, compute = held.engine._scorer, held.engine._scorer.compute

    def count() -> int:
        return sum(future.done() for future in futures)

    def watched(plans: list[Any], meanwhile: Callable[[], None]) -> Any:
        def look() -> None:
            before = count()
            meanwhile()
            done.append((before, count()))

        return compute(plans, look)

    monkeypatch.setattr(scorer, "compute", watched)
    futures += [held.engine.submit_score(user, [(1, 1)], [1]) for user in range(1, 6)]
    held.gate.opened.set()
    assert all(len(future.result(10)) for future in futures)
    assert done == [(0, 1), (1, 3), (3, 5)]
    stats = held.engine.stats()
    assert stats.completed == sum(stats.latency.counts) == 6


def test_no_answer_waits_for_a_graph_to_be_captured(
    hold: Callable[..., Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scorer, "runs_ahead", True)
    captured: list[bool] = []

    def capture(call: Callable[[], None]) -> Callable[[], None]:
        captured.append(held.first.done())
        return call

    monkeypatch.setattr(graphs, "capture_on", lambda device: capture)
    buckets = GraphBuckets(batch_sizes=(1,), row_counts=(8, 40))
    held = hold(max_batch_size=1, max_wait=0.0, graphs=buckets)
    second = held.engine.submit_score(1, [(1, time) for time in range(20)], [1])  # another shape
    held.gate.opened.set()
    assert len(held.first.result(10)) == len(second.result(10)) == 1
    assert captured == [False, True]


@pytest.mark.parametrize("kind", ["has no history", "fails", "is cancelled"])
def test_no_answer_waits_for_a_batch_that_is_not_computed(
    hold: Callable[..., Held], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(Scorer, "runs_ahead", True)
    held = hold(max_batch_size=1, max_wait=0.0)
    events = {"has no history": [], "fails": [(POISON, 1)], "is cancelled": [(1, 1)]}[kind]
    second = held.engine.submit_score(1, events, [1])
    if kind == "is cancelled":
        # The request is cancelled after the queue has reported a batch.
        take = held.engine._waiting.take
        monkeypatch.setattr(held.engine._waiting, "take", lambda: (second.cancel(), take())[1])
    else:
        later = Gate(held.engine.model, item=9)
        third = held.engine.submit_score(2, [(9, 1)], [1])
    held.gate.opened.set()
    assert len(held.first.result(10)) == 1
    if kind != "is cancelled":
        assert later.reached.wait(10)
        assert isinstance(second.exception(10), NoHistoryError if not events else Boom)
        assert not third.done()
        later.opened.set()
        assert len(third.result(10)) == 1


def test_overload_is_refused_at_once(hold: Callable[..., Held]) -> None:
    held = hold(max_queue=2)
    waiting = [held.engine.submit_score(user, [(1, 1)], [1]) for user in (1, 2)]
    with pytest.raises(OverloadedError, match=r"expected fewer than 2 .*\(max_queue\), got 2"):
        held.engine.score(3, [(1, 1)], [1])
    assert held.engine.stats().rejected == 1
    assert waiting[0].cancel()  # cancelling makes room in the queue
    waiting.append(held.engine.submit_score(4, [(1, 1)], [1]))
    held.gate.opened.set()
    assert all(future.result(10) is not None for future in waiting[1:])
    stats = held.engine.stats()
    assert (stats.requests, stats.completed, stats.cancelled) == (4, 3, 1)


def test_what_the_caller_changes_afterwards_is_not_seen(hold: Callable[..., Held]) -> None:
    held = hold()
    events, candidates = np.array([[3, 5, 0], [4, 6, 0]]), np.array([7, 8])
    future = held.engine.submit_score(1, events, candidates)
    expected = held.histories.expect(1, [Event(3, 5), Event(4, 6)], [7, 8], None)
    events[:], candidates[:] = 9, 9
    held.gate.opened.set()
    assert_close(future.result(10), expected)


def test_what_timed_out_has_no_effect(hold: Callable[..., Held]) -> None:
    held = hold()
    with pytest.raises(TimeoutError, match=r"timeout: expected an answer within 0.02 s"):
        held.engine.score(1, [(7, 7)], [1], timeout=0.02)
    assert held.first.cancel()  # while it is computed
    with pytest.raises(CancelledError):
        held.first.result()
    held.gate.opened.set()
    for user in (0, 1):
        request = (user, [Event(3, 9)], [1, 2], None)
        assert_close(held.engine.score(*request[:3], timeout=10), held.histories.expect(*request))
    stats = held.engine.stats()
    assert (stats.requests, stats.completed, stats.cancelled, stats.expired) == (4, 2, 1, 1)


def test_what_is_too_late_is_not_computed(hold: Callable[..., Held]) -> None:
    held = hold(max_batch_size=4)
    late = held.engine.submit_score(1, [(7, 7)], [1], deadline=time.monotonic() + 0.02)
    kept = held.engine.submit_score(1, [(3, 9)], [1, 2], deadline=time.monotonic() + 60)
    with pytest.raises(DeadlineError, match="deadline: expected a time to come"):
        held.engine.submit_score(2, [(7, 7)], [1], deadline=time.monotonic())
    time.sleep(0.03)
    held.gate.opened.set()
    with pytest.raises(DeadlineError, match="deadline: it passed while the request waited"):
        late.result(10)
    expected = held.histories.expect(1, [Event(3, 9)], [1, 2], None)
    assert_close(kept.result(10), expected)
    stats = held.engine.stats()
    assert (stats.requests, stats.completed, stats.expired, stats.cancelled) == (4, 2, 2, 0)
    assert stats.new_tokens == 2
    assert sum(stats.queue_time.counts) == 2
    assert stats.queue_time.total >= 0.02
    assert sum(stats.step_time.counts) == stats.batches == 2


def test_what_would_wait_for_too_long_is_refused_at_once(hold: Callable[..., Held]) -> None:
    """The running batch has already taken longer than a request may wait."""
    held = hold(max_batch_size=2, max_queue_seconds=0.05)
    next_batch = [held.engine.submit_score(user, [(1, 1)], [1]) for user in (1, 2)]
    assert held.engine.stats().backlog == 0
    time.sleep(0.06)
    with pytest.raises(OverloadedError, match=r"a wait of at most 0.05 s .*, got") as refused:
        held.engine.submit_score(3, [(1, 1)], [1])
    assert refused.value.retry_after > 0
    stats = held.engine.stats()
    assert (stats.requests, stats.rejected, stats.shed, stats.queued) == (3, 0, 1, 2)
    assert stats.running > 0.06
    held.gate.opened.set()
    assert all(len(future.result(10)) == 1 for future in next_batch)
    assert held.engine.score(3, [(1, 1)], [1], timeout=10).shape == (1,)


def test_one_client_does_not_keep_others_out(hold: Callable[..., Held]) -> None:
    held = hold(max_queue=3)
    greedy = [held.engine.submit_score(user, [(1, 1)], [1], client="greedy") for user in (1, 1, 2)]
    other = held.engine.submit_score(3, [(1, 1)], [1], client="other")
    with pytest.raises(OverloadedError, match="gave way to one of a client or user with fewer"):
        greedy[1].result(10)
    with pytest.raises(OverloadedError, match=r"fewer than 3 .*\(max_queue\), got 3"):
        held.engine.submit_score(4, [(1, 1)], [1], client="greedy")
    held.gate.opened.set()
    assert all(len(future.result(10)) == 1 for future in (greedy[0], greedy[2], other))
    stats = held.engine.stats()
    assert (stats.requests, stats.completed, stats.displaced, stats.rejected) == (5, 4, 1, 1)


def test_what_is_cancelled_while_it_is_computed_has_no_effect() -> None:
    model = make_model("retrieval")
    histories, rng = Histories(model), random.Random(7)
    with Engine(model, make_cache(12)) as engine:
        for turn in range(6):
            request = (1, some_events(rng, turn * 10**7, 9), [1, 2], None)
            assert_close(engine.score(*request[:3]), histories.expect(*request))
            gate = Gate(model)
            future = engine.submit_score(1, [(4, turn * 10**7 + 10**6)], [1])
            assert gate.reached.wait(10)
            assert future.cancel()
            gate.opened.set()
        assert engine.stats().users == 1


def test_close_finishes_what_waits(hold: Callable[..., Held]) -> None:
    held = hold()
    waiting = [held.engine.submit_score(user, [(1, 1)], [1]) for user in (1, 1, 2)]
    closing = threading.Thread(target=held.engine.close)
    closing.start()
    while not held.engine.closed:
        time.sleep(0.001)
    with pytest.raises(EngineClosedError):
        held.engine.score(1, [(1, 1)], [1])
    held.gate.opened.set()
    closing.join(10)
    assert all(future.done() and len(future.result()) for future in (held.first, *waiting))


def test_close_may_fail_what_waits(hold: Callable[..., Held]) -> None:
    held = hold()
    waiting = [held.engine.submit_score(user, [(1, 1)], [1]) for user in (1, 1, 2)]
    closing = threading.Thread(target=held.engine.close, kwargs={"finish": False})
    closing.start()
    for future in waiting:
        with pytest.raises(EngineClosedError, match="closed before"):
            future.result(10)
    held.gate.opened.set()
    closing.join(10)
    assert len(held.first.result()) == 1
