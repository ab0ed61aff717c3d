"""Tests of the serving engine: its answers equal those of the model without a cache for the stored
events, and failed requests have no effect on later ones.
"""

from __future__ import annotations

import math
import random
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hstu_attn.layer import HSTULayerConfig

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
from hstu_attn.serving import (
    CatalogModel,
    Engine,
    Event,
    GraphBuckets,
    MemoryStore,
    NoHistoryError,
    OutOfPagesError,
    PagedKVCache,
)
from hstu_attn.serving.scoring import Scorer
from tests.helpers.serving_models import (
    DIM,
    HEADS,
    ITEMS,
    LAYERS,
    LONGEST,
    POISON,
    RANKING,
    SPOILT,
    STU,
    Boom,
    Histories,
    RankingModel,
    assert_close,
    check_answers,
    make_cache,
    make_model,
    some_events,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SOME_SHAPES = GraphBuckets(batch_sizes=(2, 5), row_counts=(8, 24, 40))  # smaller than some batches


# ---------------------------------------------------------------------------------------------
# Traffic from several threads
# ---------------------------------------------------------------------------------------------


@dataclass
class Sent:
    events: list[Event]
    candidates: list[int]
    at: int | None
    future: Future[Tensor]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "graphs", "runs_ahead"),
    [
        *((name, False, False) for name in ("retrieval", *RANKING)),
        ("retrieval", False, True),
        ("retrieval", SOME_SHAPES, False),
        ("ranking, times", SOME_SHAPES, True),
    ],
)
def test_random_traffic(
    name: str, graphs: bool | GraphBuckets, runs_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads send requests for common users. Each user's requests are recorded in order of
    arrival, and later answered again one by one without a cache.

    With `runs_ahead`, answers are returned asynchronously, as on a GPU.
    """
    monkeypatch.setattr(Scorer, "runs_ahead", runs_ahead)
    model = make_model(name)
    cache = make_cache(12)  # four full histories
    users, per_thread = 15, 150
    sent: dict[int, list[Sent]] = {user: [] for user in range(users)}
    starts = [0] * users  # index of each user's first remaining event
    locks = [threading.Lock() for _ in range(users)]
    engine = Engine(model, cache, max_batch_size=6, max_wait=0.001, graphs=graphs)

    def send(thread: int) -> None:
        rng = random.Random(torch.initial_seed() + thread)
        for _ in range(per_thread):
            user = int(users * rng.random() ** 2)
            count = rng.choice([0, 1, 1, 2, 9, 30])
            candidates = [rng.randrange(ITEMS - 2) for _ in range(rng.choice([0, 1, 4]))]
            poisoned = rng.random() < 0.05
            if rng.random() < 0.05:
                candidates.append(SPOILT)
            with locks[user]:
                events = some_events(rng, starts[user], count, model.num_actions)
                starts[user] += 10**6
                if poisoned:
                    events.append(Event(POISON, starts[user]))
                at = rng.choice([None, starts[user] + rng.randrange(10**6)])
                future = engine.submit_score(user, events, candidates, at=at)
                sent[user].append(Sent(events, candidates, at, future))
            if rng.random() < 0.05:
                future.cancel()
            elif rng.random() < 0.5:
                future.exception()  # waits

    threads = [threading.Thread(target=send, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.close()

    histories, answered = Histories(model), 0
    for user, requests in sent.items():
        for request in requests:
            future = request.future
            assert future.done()
            if future.cancelled():
                continue
            poisoned = any(event.item == POISON for event in request.events)
            error = future.exception()
            if error is None:
                expected = histories.expect(user, request.events, request.candidates, request.at)
                assert_close(future.result(), expected)
                answered += 1
            elif isinstance(error, Boom):
                assert poisoned
            elif isinstance(error, FloatingPointError):
                assert SPOILT in request.candidates
            else:
                assert isinstance(error, NoHistoryError)
                assert not model.candidates_are_rows
                assert not len(histories.after(user, request.events))

    stats = engine.stats()
    assert stats.requests == 3 * per_thread == stats.completed + stats.failed + stats.cancelled
    assert stats.completed == answered == sum(stats.latency.counts)
    assert stats.batches == sum(stats.batch_size.counts)
    assert stats.hit_tokens > 100
    assert 0 < stats.graph_batches < stats.batches if graphs else stats.graph_batches == 0
    assert stats.users == sum(len(events) > 0 for events in histories.events.values())
    assert stats.queued == 0
    assert cache.stats().evictions > 0
    assert cache.stats().pinned_pages == 0
    lengths = [len(events) for events in histories.events.values()]
    assert max(lengths) > LONGEST - 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["retrieval", "retrieval, no bias", "ranking", "ranking, times"])
def test_bf16(name: str, device: str) -> None:
    check_answers(name, torch.bfloat16, device)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["retrieval", "ranking, times"])
def test_fp32(name: str) -> None:
    check_answers(name, torch.float32, "cpu")


def test_a_stale_row_would_be_seen() -> None:
    """The last row's time is that of the next request or event; another time changes the scores."""
    model = make_model("retrieval")
    events = np.array(some_events(random.Random(0), 0, 9), np.int64)
    now, later = (model.whole(events, [1, 2, 3], at) for at in (10**6, 10**8))
    assert (now - later).abs().max() > 1e-3
    with Engine(model, make_cache(3)) as engine:
        assert_close(engine.score(1, events, [1, 2, 3], at=10**6), now)
        assert_close(engine.score(1, [], [1, 2, 3], at=10**8), later)
        assert_close(engine.score(1, [], [1, 2, 3], at=10**6), now)
        assert engine.stats().hit_tokens == 16
        assert engine.stats().new_tokens == 9
        assert engine.stats().recomputed_tokens == 2


# ---------------------------------------------------------------------------------------------
# Failures
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", ["retrieval", "ranking, times"])
def test_a_failure_is_alone_and_leaves_no_trace(name: str, graphs: bool) -> None:
    model = make_model(name)
    histories, rng = Histories(model), random.Random(1)
    cache = make_cache(24)
    with Engine(model, cache, max_batch_size=8, max_wait=30.0, graphs=graphs) as engine:

        def batch(events_of: dict[int, list[Event]], candidates: list[int]) -> None:
            futures = {
                user: engine.submit_score(user, events, candidates if user != 5 else [SPOILT])
                for user, events in events_of.items()
            }
            for user, future in futures.items():
                if any(event.item == POISON for event in events_of[user]):
                    with pytest.raises(Boom):
                        future.result(10)
                elif user == 5:
                    with pytest.raises(FloatingPointError, match="scores: expected finite"):
                        future.result(10)
                else:
                    expected = histories.expect(user, events_of[user], candidates, None)
                    assert_close(future.result(10), expected)

        for turn in range(6):
            events = {user: some_events(rng, turn * 10**7, 7) for user in range(8)}
            for user in (0, 1) if turn % 2 else (3,):
                events[user].append(Event(POISON, turn * 10**7 + 10**6))
            batch(events, [1, 2])
    assert engine.stats().failed == 9 + 6
    assert cache.stats().pinned_pages == 0


def test_a_failure_keeps_what_was_cached() -> None:
    model = make_model("retrieval")
    histories = Histories(model)
    cache = make_cache(24)
    with Engine(model, cache) as engine:
        long = some_events(random.Random(0), 0, LONGEST)
        request = (7, long, [1, 2], None)
        assert_close(engine.score(*request[:3]), histories.expect(*request))
        before = cache.stats()
        with pytest.raises(Boom):  # this request would shorten the history
            engine.score(7, [(POISON, 10**7)], [1])
        assert cache.stats() == before
        hits = engine.stats().hit_tokens
        request = (7, [], [3], None)
        assert_close(engine.score(*request[:3]), histories.expect(*request))
        assert engine.stats().hit_tokens == hits + LONGEST - 1


def test_what_the_worker_did_not_expect_does_not_stop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("retrieval")
    histories, cache = Histories(model), make_cache(12)
    store = MemoryStore(100, LONGEST)
    with Engine(model, cache, store=store) as engine:
        engine.score(1, [(1, 1)], [1])
        histories.expect(1, [Event(1, 1)], [1], None)
        with monkeypatch.context() as patch:
            for method in ("commit", "read"):
                patch.setattr(store, method, lambda *_: 1 / 0)
                for _ in range(2):
                    with pytest.raises(ZeroDivisionError):
                        engine.score(1, [(2, 2)], [1], timeout=10)
                engine.forget(99)  # waits for the worker, which frees rows after it has failed
                assert cache.stats().users == 0
                patch.undo()
                engine.score(2, [(2, 2)], [1])
        request = (1, [Event(3, 3)], [1, 2], None)
        assert_close(engine.score(*request[:3]), histories.expect(*request))


def test_a_batch_that_does_not_fit_is_split() -> None:
    model = make_model("retrieval")
    histories, rng = Histories(model), random.Random(2)
    with Engine(model, make_cache(3), max_batch_size=8, max_wait=30.0) as engine:
        for turn in range(3):
            requests = [
                (user, some_events(rng, turn * 10**7, 20), [1, 2], None) for user in range(8)
            ]
            futures = [engine.submit_score(*request[:3]) for request in requests]
            for request, future in zip(requests, futures, strict=True):
                assert_close(future.result(10), histories.expect(*request))
        assert engine.stats().batch_size.counts[:4] == [24, 0, 0, 0]


def test_a_cache_that_does_not_evict_fills_up() -> None:
    model = make_model("retrieval")
    histories = Histories(model)
    with Engine(model, make_cache(3, evict=False)) as engine:
        events = some_events(random.Random(3), 0, 20)
        for user in (1, 2, 1):
            if user == 2:
                with pytest.raises(OutOfPagesError):
                    engine.score(user, events, [1])
            else:
                events_now = events if user not in histories.events else []
                request = (user, events_now, [1], None)
                assert_close(engine.score(*request[:3]), histories.expect(*request))


# ---------------------------------------------------------------------------------------------
# Users, events and the catalog
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop", [0, 3, LONGEST - 1])
def test_long_histories_are_shortened(drop: int) -> None:
    model = make_model("ranking, times")
    histories, rng = Histories(model, drop), random.Random(4)
    with Engine(model, make_cache(9), store=MemoryStore(100, LONGEST, drop)) as engine:
        for turn in range(12):
            count = 100 if turn == 6 else 9
            request = (1, some_events(rng, turn * 10**7, count), [1, 2], None)
            assert_close(engine.score(*request[:3]), histories.expect(*request))
        assert engine.stats().users == 1


def test_what_another_engine_left_in_the_cache_is_not_used() -> None:
    model, cache = make_model("retrieval"), make_cache(12)
    for item in (1, 2):
        with Engine(model, cache) as engine:
            events = np.array([(item, time, 0) for time in range(20)])
            for count in (10, 20):
                scores = engine.score("someone", events[count - 10 : count], [3, 4])
                assert_close(scores, model.whole(events[:count], [3, 4], count - 1))


def test_forgotten_users_start_from_nothing() -> None:
    model = make_model("retrieval")
    cache = make_cache(12)
    with Engine(model, cache, store=MemoryStore(2, LONGEST), max_batch_size=2) as engine:
        for user in (1, 2, 1, 3):  # 2 is forgotten
            engine.score(user, [(user, 5), (user, 6)], [1])
        assert engine.stats().hit_tokens == 1
        assert engine.stats().users == 2
        with pytest.raises(NoHistoryError, match="new_events: expected some of the new user 2"):
            engine.score(2, [], [1])
        expected = model.whole(np.array([(9, 9, 0)]), [1, 2], 9)
        assert_close(engine.score(2, [(9, 9)], [1, 2]), expected)


@pytest.mark.parametrize("name", ["ranking", "ranking, times"])
def test_users_without_events_can_be_ranked_for(name: str) -> None:
    model = make_model(name)
    with Engine(model, make_cache(12)) as engine:
        expected = model.whole(np.empty((0, 3), np.int64), [4, 5], 0)
        assert_close(engine.score("nobody", [], [4, 5]), expected)
        assert engine.score("nobody", [], []).shape == (0,)


def test_a_store_may_hold_events_before() -> None:
    model = make_model("retrieval")
    store, histories = MemoryStore(100, LONGEST), Histories(model)
    events = some_events(random.Random(5), 0, 50)
    for a, b in pairwise([0, 20, 50]):
        store.add("a", events[a:b])
        histories.after("a", events[a:b])
        histories.events["a"] = histories.after("a", events[a:b])
    with Engine(model, make_cache(12), store=store) as engine:
        assert_close(engine.score("a", [], [1, 2]), histories.expect("a", [], [1, 2], None))


@pytest.mark.parametrize("exclude_seen", [True, False])
def test_recommendations(exclude_seen: bool) -> None:
    model = make_model("retrieval")
    histories, rng = Histories(model), random.Random(6)
    with Engine(model, make_cache(12), max_batch_size=4, max_wait=30.0) as engine:
        for turn in range(4):
            futures: list[tuple[int, list[Event], int, Future[Any]]] = []
            for user, k in ((1, 1), (2, 7), (3, 1000)):
                events = some_events(rng, turn * 10**7, 4)
                future = engine.submit_recommend(user, events, k, exclude_seen=exclude_seen)
                futures.append((user, events, k, future))
            scored = engine.score(4, [(4, turn)], [5, 6])
            assert_close(scored, histories.expect(4, [Event(4, turn)], [5, 6], None))
            for user, events, k, future in futures:
                scores = histories.expect(user, events, list(range(ITEMS)), None)
                seen = set(histories.events[user][:, 0].tolist()) if exclude_seen else set()
                best = sorted(set(range(ITEMS)) - seen, key=lambda item: -scores[item])[:k]
                answer = future.result(10)
                assert answer.items.tolist() == best
                assert_close(answer.scores, scores[best])


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_a_recommendation_with_a_score_that_is_not_finite_fails_alone(spoilt: float) -> None:
    model = make_model("retrieval")
    histories, catalog = Histories(model), model.score_catalog

    def score_catalog(states: Tensor) -> Tensor:
        scores: Tensor = catalog(states)
        scores[1, 7] = spoilt
        return scores

    model.score_catalog = score_catalog
    with Engine(model, make_cache(12), max_batch_size=3, max_wait=30.0) as engine:
        futures = [engine.submit_recommend(user, [(user, 3)], 2 + user) for user in (1, 2, 3)]
        with pytest.raises(FloatingPointError, match="scores: expected finite"):
            futures[1].result(10)
        for user in (1, 3):
            answer = futures[user - 1].result(10)
            assert len(answer.items) == 2 + user
            expected = histories.expect(user, [Event(user, 3)], answer.items.tolist(), None)
            assert_close(answer.scores, expected)


def test_nothing_is_recommended_to_who_has_no_events() -> None:
    """This holds although candidates are rows: without events, a user has no row to score by."""
    model = make_model("ranking")
    model.score_catalog = lambda states: model.head(states) * torch.arange(ITEMS)
    with Engine(model, make_cache(12), max_batch_size=2, max_wait=30.0) as engine:
        known = engine.submit_recommend(1, [(2, 3), (4, 5)], 3)
        unknown = engine.submit_recommend(2, [], 3)
        assert known.result(10).items.shape == (3,)
        with pytest.raises(NoHistoryError):
            unknown.result(10)


# ---------------------------------------------------------------------------------------------
# Bad input
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"user": 1.5}, "user: expected an int or a str, got float"),
        ({"user": "\ud800"}, "user: expected Unicode text, got"),
        ({"new_events": [(ITEMS, 1)]}, "new_events: expected items from 0 to 59, got 60 at 0"),
        ({"new_events": [(1, 1), (-1, 1)]}, "new_events: expected items .*, got -1 at 1"),
        ({"new_events": [(1, -1)]}, "new_events: expected times from 0 to .*, got -1"),
        ({"new_events": [(1, 1, 1)]}, "new_events: expected actions from 0 to 0, got 1"),
        ({"new_events": [(1, 1.5)]}, "new_events: expected integers .*, got float64"),
        ({"new_events": [(1,)]}, "new_events: expected rows of item, time and action, got"),
        ({"new_events": [(1, 2**63)]}, "new_events: expected integers within int64, got"),
        ({"candidates": [1, ITEMS]}, "candidates: expected items from 0 to 59, got 60 at 1"),
        ({"candidates": [1, -1]}, "candidates: expected items from 0 to 59, got -1 at 1"),
        ({"candidates": np.array([2**63], np.uint64)}, "candidates: .*, got 9223372036854775808"),
        ({"candidates": [0.5]}, "candidates: expected integers of one dimension, got float64"),
        ({"candidates": [[1]]}, r"candidates: expected integers .* of shape \(1, 1\)"),
        ({"candidates": [1] * 9}, "candidates: expected at most 8, got 9"),
        ({"at": -1}, "at: expected None or a time from 0 to .*, got -1"),
        ({"at": 2**62}, "at: expected None or a time"),
    ],
)
def test_bad_requests_are_refused(arguments: dict[str, Any], message: str) -> None:
    with Engine(make_model("retrieval"), make_cache(3), max_candidates=8) as engine:
        with pytest.raises(ValueError, match=f"^{message}"):
            engine.submit_score(**{"user": 1, "new_events": [], "candidates": [], **arguments})
        assert engine.stats().requests == 0


def test_bad_recommendations_are_refused() -> None:
    with (
        Engine(make_model("ranking"), make_cache(3)) as engine,
        pytest.raises(ValueError, match="model: expected one that scores its whole catalog"),
    ):
        engine.recommend(1, [], 5)
    with (
        Engine(make_model("retrieval"), make_cache(3)) as engine,
        pytest.raises(ValueError, match="k: expected a positive count, got 0"),
    ):
        engine.recommend(1, [(1, 1)], 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(STU, causal=False), "causal: expected, for a cache, True"),
        (replace(STU, contextual_seq_len=1), "contextual_seq_len: expected, for a cache, 0"),
        (
            replace(STU, max_attn_len=5, min_full_attn_seq_len=2),
            "min_full_attn_seq_len: expected, for a cache, 0",
        ),
        (replace(STU, scaling_seqlen=-1), "scaling_seqlen: expected, for a cache, positive"),
        (replace(STU, hidden_dim=8), "hidden_dim: expected, for a cache, attention_dim = 16"),
        (replace(STU, target_aware=False), "target_aware: expected, for a cache, True"),
        (replace(STU, target_group_size=2), "target_group_size: expected 1, .* got 2"),
    ],
)
def test_what_would_not_be_sound_is_refused(config: HSTULayerConfig, message: str) -> None:
    model = RankingModel(config, LAYERS, ITEMS, 3, LONGEST).double().eval()
    with pytest.raises(ValueError, match=message):
        Engine(model, make_cache(12))


def test_what_does_not_fit_is_refused() -> None:
    model = make_model("retrieval")
    timeless = make_model("ranking")
    timeless.reads_times = True
    for arguments, message in (
        ((timeless, make_cache(12)), "reads_times: expected False of a model without a time"),
        ((make_model("ranking").train(), make_cache(12)), r"model: expected evaluation mode"),
        ((model, make_cache(2)), "cache: expected at least 3 pages of 16 tokens, .* got 2"),
        (
            (model, make_cache(12, torch.bfloat16)),
            "cache: expected the dtype .*float64, or .*got .*bf",
        ),
        ((model, PagedKVCache(3, 12, 16, HEADS, DIM, torch.float64)), "cache: expected layers"),
        ((model, PagedKVCache(2, 12, 16, HEADS, 8, torch.float64)), r"\[2, 2, 16\], got \[2, 2, 8"),
        ((model, PagedKVCache(2, 3, 16, HEADS, DIM, torch.float64, "meta")), "model's device, cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(*arguments)
    for options, message in (
        ({"store": MemoryStore(100, LONGEST + 1)}, "store: expected max_events of at most .* = 40"),
        ({"max_batch_size": 0}, "max_batch_size: expected a positive count, got 0"),
        ({"max_queue": 0}, "max_queue: expected a positive count, got 0"),
        ({"max_candidates": 0}, "max_candidates: expected a positive count, got 0"),
        ({"max_wait": -1}, "max_wait: expected seconds from 0 up, got -1"),
        ({"max_queue_seconds": 0.0}, "max_queue_seconds: expected seconds over 0, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(model, make_cache(12), **options)
    for sizes, message in (
        ((0, 5), "max_users: expected a positive count, got 0"),
        ((5, 0), "max_events: expected a positive count, got 0"),
        ((5, 5, 5), "drop: expected from 0 to 4, got 5"),
    ):
        with pytest.raises(ValueError, match=message):
            MemoryStore(*sizes)


def test_models_are_told_apart() -> None:
    assert isinstance(make_model("retrieval"), CatalogModel)
    assert not isinstance(make_model("ranking"), CatalogModel)
