"""Tests of captured graphs of an engine's steps: the shapes to which batches are padded, and that
padding, replays and failed captures change no answer.

Without a GPU nothing is captured, and the same calls run on the same padded buffers.
"""

from __future__ import annotations

import itertools
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
from hstu_attn.serving import CacheStep, Engine, GraphBuckets, MemoryStore, graphs
from hstu_attn.serving.batch import Request
from hstu_attn.serving.events import event_rows
from hstu_attn.serving.graphs import Shape, StackGraphs, StepLimits
from hstu_attn.testing import assert_matches
from tests.helpers.serving_models import (
    ITEMS,
    LONGEST,
    SPOILT,
    Histories,
    assert_as_near,
    assert_close,
    check_answers,
    make_cache,
    make_model,
    on_device,
    some_events,
    twin,
)

MODELS = ["retrieval", "retrieval, no bias", "ranking, times", "ranking, window"]
Batch = list[tuple[int, list[Any], list[int]]]  # user, events and candidates of each request


def uncaptured(device: torch.device) -> Callable[[Any], Any]:
    """Replaces `capture_on`: the call runs on the padded buffers without a graph."""
    return lambda call: call


def serve(engine: Engine, batch: Batch) -> list[Tensor]:
    """Serves the requests in one batch on this thread, while the engine's own is idle."""
    requests = [
        Request(user, event_rows(events, "events"), np.array(listed, np.int64), 0, False, None, 0.0)
        for user, events, listed in batch
    ]
    with torch.no_grad():
        engine._serve(requests)
    return [request.future.result(0) for request in requests]


class Comparison:
    """Compares engines' answers with exact ones; errors must be about those of the last engine."""

    def __init__(self, name: str, model: Any) -> None:
        self.histories = Histories(twin(name, model, torch.float64))
        self.found: list[list[Tensor]] = []
        self.exact: list[Tensor] = []

    def serve(self, batch: Batch, *engines: Engine) -> list[list[Tensor]]:
        answers = [serve(engine, batch) for engine in engines]
        self.found.append([torch.cat(scores) for scores in answers])
        self.exact += [self.histories.expect(*request, None) for request in batch]
        return answers

    def check(self) -> None:
        *found, same_dtype_reference = (
            torch.cat(scores) for scores in zip(*self.found, strict=True)
        )
        for scores in found:
            exact = torch.cat(self.exact)
            assert_as_near(scores, exact, same_dtype_reference)
            assert_matches("scores", scores, exact, same_dtype_reference)


def traffic(turns: int, actions: int, seed: int = 0) -> Iterator[Batch]:
    """Makes batches of 1 to 8 requests, most with few rows, by 12 users who return."""
    rng = random.Random(f"{torch.initial_seed()} {seed}")
    for turn in range(turns):
        users = rng.sample(range(12), rng.randint(1, 8))
        yield [
            (
                user,
                some_events(rng, turn * 10**6, rng.choice([1, 1, 2, 9, 30]), actions),
                [rng.randrange(SPOILT) for _ in range(rng.choice([0, 1, 6]))],
            )
            for user in users
        ]


def make_graphs(buckets: GraphBuckets, limits: StepLimits) -> StackGraphs:
    model = make_model("ranking")
    cache = make_cache(3)
    made = StackGraphs(
        model.stack, cache.kv_cache, buckets, limits, reads_times=False, with_targets=True
    )
    for capture in made.captures(None):
        capture()
    return made


# ---------------------------------------------------------------------------------------------
# Shapes
# ---------------------------------------------------------------------------------------------


def test_a_batch_takes_the_smallest_shape_that_holds_it() -> None:
    buckets = GraphBuckets(row_counts=(64, 512, 1024, 4096, 10**6))
    of = make_graphs(buckets, StepLimits(requests=20, events=300, candidates=300))._shape_of
    assert of(1, 1, 1) == Shape(1, 64, 64)
    assert of(1, 65, 65) == Shape(1, 512, 512)
    assert of(3, 64, 62) == Shape(4, 64, 64)
    assert of(17, 64, 4) == of(20, 64, 4) == Shape(20, 64, 64)
    assert of(21, 64, 4) is None
    # A batch with a longer request has another graph, since its tiles may differ.
    assert of(4, 512, 128) == Shape(4, 512, 128)
    assert of(4, 512, 129) == Shape(4, 512, 512)
    assert of(2, 1000, 512) == Shape(2, 1024, 512)
    assert of(2, 1000, 590) == Shape(2, 1024, 600)  # 600 is the most that requests may have
    assert of(16, 4096, 257) == Shape(16, 4096, 600)
    assert of(20, 4097, 300) == Shape(20, 10**6, 600)


def test_a_full_batch_of_the_usual_size_has_a_shape() -> None:
    """The batch has 32 requests: 128 candidates, a new event, and the rewritten previous event."""
    limits = StepLimits(requests=32, events=2048, candidates=128)
    of = make_graphs(GraphBuckets(), limits)._shape_of
    assert of(32, 32 * 130, 130) == Shape(32, 4608, 144)


def test_shapes_that_no_batch_needs_are_left_out() -> None:
    limits = StepLimits(requests=3, events=20, candidates=0)
    shapes = set(make_graphs(GraphBuckets(ahead=True), limits)._replays)
    assert shapes == {Shape(1, 64, 20), Shape(2, 64, 20), Shape(3, 64, 20)}
    buckets = GraphBuckets(batch_sizes=(2, 16, 32), row_counts=(8, 40, 1000, 2000), ahead=True)
    shapes = set(make_graphs(buckets, StepLimits(9, 150, 0))._replays)
    assert shapes == {
        *(Shape(2, 8, 8), Shape(2, 40, 40), Shape(2, 1000, 150), Shape(2, 2000, 150)),
        *(Shape(16, 40, 40), Shape(16, 1000, 128), Shape(16, 1000, 150)),
        *(Shape(16, 2000, 128), Shape(16, 2000, 150)),
    }


@pytest.mark.parametrize("name", ["batch_sizes", "row_counts"])
@pytest.mark.parametrize("counts", [(), (0, 1), (2, 1), (1, 1), (-1,)])
def test_wrong_buckets_are_refused(name: str, counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"^{name}: expected increasing positive counts, got"):
        GraphBuckets(**{name: counts})


# ---------------------------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("graphs", [True, GraphBuckets(ahead=True)], ids=["when needed", "ahead"])
def test_bf16(name: str, graphs: bool | GraphBuckets, device: str) -> None:
    check_answers(name, torch.bfloat16, device, graphs=graphs)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_replays_are_the_padded_calls_bit_for_bit(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All buffers and pages hold NaN before they are written."""
    dtype = torch.bfloat16
    model = make_model(name, dtype)
    comparison = Comparison(name, model)
    model = on_device(model, device)
    buckets = GraphBuckets(row_counts=(8, 24, 40, 64, 128))

    def make_engine(**options: Any) -> Engine:
        cache = make_cache(24, dtype, device)
        cache.kv_cache.fill_(torch.nan)
        engine = Engine(model, cache, max_batch_size=8, **options)
        if engine._scorer._graphs is not None:
            engine._scorer._graphs._x.fill_(torch.nan)
            engine._scorer._graphs._states.fill_(torch.nan)
        return engine

    replayed = make_engine(graphs=buckets)
    monkeypatch.setattr(graphs, "capture_on", uncaptured)
    called = make_engine(graphs=buckets)
    unpadded = make_engine()
    with replayed, called, unpadded:
        for batch in traffic(40, model.num_actions):
            found, same, _ = comparison.serve(batch, replayed, called, unpadded)
            assert all(map(torch.equal, found, same))
        comparison.check()
        stats = replayed.stats()
        assert 10 < stats.graph_batches == called.stats().graph_batches < stats.batches == 40
        assert stats.hit_tokens > 100


@pytest.mark.slow
@pytest.mark.parametrize("name", ["retrieval", "ranking", "ranking, times"])
def test_padded_answers_are_right(name: str) -> None:
    model = make_model(name)
    histories = Histories(model)
    with Engine(model, make_cache(24), max_batch_size=8, graphs=True) as engine:
        for batch in traffic(40, model.num_actions):
            for scores, (user, events, candidates) in zip(serve(engine, batch), batch, strict=True):
                assert_close(scores, histories.expect(user, events, candidates, None))
        assert engine.stats().graph_batches == engine.stats().batches == 40


@pytest.mark.parametrize("graphs", [False, True])
def test_tables_are_copied_once(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a graph the tables of the cache's step are copied, otherwise only the padded ones."""
    made = 0
    copy_tables = CacheStep.upload

    def count(step: CacheStep, *others: Any) -> list[Tensor]:
        nonlocal made
        made += 1
        return copy_tables(step, *others)

    monkeypatch.setattr(CacheStep, "upload", count)
    model = make_model("ranking")
    with Engine(model, make_cache(24), max_batch_size=8, graphs=graphs) as engine:
        for batch in traffic(5, model.num_actions):
            serve(engine, batch)
    assert made == (0 if graphs else 5)


@pytest.mark.slow
def test_users_who_return_from_the_host(device: str) -> None:
    """Users who return are computed without a graph, because their rows come layer by layer."""
    dtype = torch.bfloat16
    model = make_model("ranking", dtype)
    comparison = Comparison("ranking", model)
    model = on_device(model, device)
    cache = make_cache(16, dtype, device, host_pages=40)
    with (
        Engine(model, cache, max_batch_size=8, graphs=True) as engine,
        Engine(model, make_cache(40, dtype, device), max_batch_size=8) as roomy,
    ):
        for batch in traffic(40, model.num_actions):
            comparison.serve(batch, engine, roomy)
        comparison.check()
        assert cache.stats().host_hits > 10
        batches = engine.stats().graph_batches
        assert batches == engine.stats().batches if device == "cpu" else batches > 0


def test_recommendations_and_users_without_events() -> None:
    model = make_model("retrieval")
    with Engine(model, make_cache(12), graphs=True) as engine:
        histories = Histories(model)
        events = some_events(random.Random(0), 0, 5)
        expected = histories.expect(1, events, list(range(ITEMS)), None)
        best = engine.recommend(1, events, 5, exclude_seen=False)
        assert_close(best.scores, expected.topk(5).values)
    ranking = make_model("ranking")
    with Engine(ranking, make_cache(12), graphs=True) as engine:
        expected = ranking.whole(np.empty((0, 3), np.int64), [4, 5], 0)
        assert_close(engine.score("nobody", [], [4, 5]), expected)
        assert engine.score("nobody", [], []).shape == (0,)


# ---------------------------------------------------------------------------------------------
# Capturing
# ---------------------------------------------------------------------------------------------


def test_each_shape_is_captured_once(captured: list[Any], device: str) -> None:
    dtype = torch.bfloat16
    model = on_device(make_model("ranking", dtype), device)
    events = some_events(random.Random(0), 0, 3)
    with Engine(model, make_cache(40, dtype, device), max_batch_size=4, graphs=True) as engine:
        assert not captured
        for _ in range(3):
            for count in range(1, 5):
                serve(engine, [(user, events, [1]) for user in range(count)])
        assert len(captured) == 3
    captured.clear()
    cache = make_cache(40, dtype, device)
    before = cache.kv_cache.clone()
    buckets = GraphBuckets(row_counts=(8, 64), ahead=True)
    with Engine(model, cache, max_batch_size=4, graphs=buckets) as engine:
        assert len(captured) == 6
        assert torch.equal(cache.kv_cache, before)
        for count in range(1, 5):
            serve(engine, [(user, events, [1]) for user in range(count)])
        assert len(captured) == 6
        assert engine.stats().graph_batches == 4


def test_batches_without_a_shape_are_computed_all_the_same() -> None:
    model = make_model("ranking")
    histories = Histories(model)
    buckets = GraphBuckets(batch_sizes=(2,), row_counts=(4,))
    with Engine(model, make_cache(24), graphs=buckets) as engine:
        for users, count, graphed in (([1, 2], 1, 1), ([3, 4, 5], 1, 1), ([6], 9, 1), ([7], 3, 2)):
            batch = [(user, some_events(random.Random(0), 0, count), [3]) for user in users]
            for scores, (user, events, candidates) in zip(serve(engine, batch), batch, strict=True):
                assert_close(scores, histories.expect(user, events, candidates, None))
            assert engine.stats().graph_batches == graphed


def test_what_cannot_be_captured_is_computed_without_a_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A warning is logged once for each shape."""

    def broken(device: torch.device) -> Callable[[Any], Any]:
        def capture(call: Any) -> Any:
            call()
            raise RuntimeError("operation not permitted when stream is capturing")

        return capture

    monkeypatch.setattr(graphs, "capture_on", broken)
    model, cache = make_model("ranking"), make_cache(24)
    histories = Histories(model)
    with Engine(model, cache, max_batch_size=8, graphs=True) as engine:
        with pytest.warns(
            RuntimeWarning, match=r"^graphs: batches padded to Shape.* not permitted"
        ):
            serve(engine, [(99, [(1, 1)], [1])])
        cache.free([99])
        with warnings.catch_warnings(record=True) as issued:
            warnings.simplefilter("always")
            for batch in traffic(30, model.num_actions):
                for scores, (user, events, candidates) in zip(
                    serve(engine, batch), batch, strict=True
                ):
                    assert_close(scores, histories.expect(user, events, candidates, None))
        assert len(issued) < 10 < engine.stats().batches
        assert engine.stats().graph_batches == engine.stats().failed == 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:graphs")
def test_a_capture_that_fails_half_way_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer synchronizes with the GPU, which a graph cannot record."""
    dtype = torch.bfloat16
    model = make_model("ranking", dtype)
    comparison = Comparison("ranking", model)
    model = on_device(model, "cuda")
    with (
        Engine(model, make_cache(40, dtype, "cuda"), max_batch_size=8, graphs=True) as engine,
        Engine(model, make_cache(40, dtype, "cuda"), max_batch_size=8) as plain,
    ):
        batches = list(traffic(40, model.num_actions))
        layer = model.stack.layers[-1]
        with monkeypatch.context() as patch:
            patch.setattr(layer, "_check", lambda x: float(x.sum()))
            for batch in batches[:10]:
                comparison.serve(batch, engine, plain)
        failed = engine.stats().batches - engine.stats().graph_batches
        assert failed == 10
        engine._scorer._graphs._replays.clear()  # type: ignore[union-attr]
        for batch in batches[10:]:
            comparison.serve(batch, engine, plain)
        comparison.check()
        assert engine.stats().graph_batches > 20


@pytest.mark.gpu
def test_other_threads_may_use_the_gpu_meanwhile() -> None:
    """During a capture, other threads may draw random numbers, except from torch's default
    generator.
    """
    done = threading.Event()

    def work() -> int:
        generator = torch.Generator("cuda")
        for repeats in itertools.count():
            if done.is_set():
                return repeats
            rows = random.randint(1, 2000)
            a = torch.randn(rows, 300, device="cuda", generator=generator)
            (a @ a.T).sum().item()
            torch.cuda.empty_cache()
        raise AssertionError

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(work)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="graphs:")
                check_answers("ranking", torch.bfloat16, "cuda", graphs=GraphBuckets(ahead=True))
        finally:
            done.set()
        assert other.result() > 0


@pytest.mark.gpu
def test_weights_may_change_in_place() -> None:
    dtype = torch.bfloat16
    model = on_device(make_model("ranking", dtype), "cuda")
    events = some_events(random.Random(0), 0, LONGEST)
    store = MemoryStore(100, LONGEST)
    cache = make_cache(40, dtype, "cuda")
    with Engine(model, cache, store=store, graphs=True) as engine:
        (before,) = serve(engine, [(1, events, [1, 2, 3])])
        with torch.no_grad():
            model.stack.layers[0].uvqk.weight.neg_()
        cache.clear()
        (after,) = serve(engine, [(1, [], [1, 2, 3])])
        assert engine.stats().graph_batches == 2
    with Engine(model, make_cache(40, dtype, "cuda"), store=store) as plain:
        (expected,) = serve(plain, [(1, [], [1, 2, 3])])
    assert (after - expected).abs().max() < 0.1 * (after - before).abs().max()
