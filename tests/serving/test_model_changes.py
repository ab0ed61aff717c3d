"""Tests of changing an engine's model under load: each answer is that of one model, and an invalid
model has no effect.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
from recommender.model import RetrievalModel
from recommender.served import ServedRetrieval

from hstu_attn.serving import (
    Engine,
    EngineClosedError,
    Event,
    GraphBuckets,
    MemoryStore,
    ModelCheckError,
    PagedKVCache,
    Probe,
)
from tests.helpers.serving_models import (
    DIM,
    HEADS,
    ITEMS,
    LAYERS,
    LONGEST,
    RANKING,
    RESEARCH,
    STU,
    Gate,
    Histories,
    RankingModel,
    Retrieval,
    assert_close,
    make_cache,
    some_events,
    strengthen,
)
from tests.helpers.stores import Place

pytestmark = pytest.mark.usefixtures("one_thread")

PROBE = [(1, 10, 0), (2, 20, 0), (3, 30, 0)]


class Sound(ServedRetrieval):
    """The example's model, which answers for all items."""

    whole = Retrieval.whole


def retrieval(
    config: Any = RESEARCH,
    layers: int = LAYERS,
    items: int = ITEMS,
    dtype: torch.dtype = torch.float64,
) -> Sound:
    inner = RetrievalModel(items, config, layers, LONGEST, 0.2, compute_dtype=dtype)
    strengthen(inner)
    return Sound(inner)


def sound(name: str, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Any:
    if name == "retrieval":
        return Sound(retrieval(dtype=dtype).model.to(device))
    model = RankingModel(RANKING[name], LAYERS, ITEMS, 3, LONGEST).to(dtype)
    strengthen(model)
    return model.eval().to(device)


# ---------------------------------------------------------------------------------------------
# Changes
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "graphs"),
    [
        ("retrieval", False),
        ("ranking, times", False),
        ("retrieval", GraphBuckets(batch_sizes=(2, 5), row_counts=(8, 24, 40))),
    ],
)
def test_changes_under_load(name: str, graphs: bool | GraphBuckets, place: Place) -> None:
    """Each thread appends events to its own users while models take turns. Each answer is that of
    one model for the user's events; requests after a change are answered by the new model.
    """
    models = [sound(name) for _ in range(2)]
    store = place.open(LONGEST)
    failures, counts, ended = list[BaseException](), [0, 0], threading.Event()
    engine = Engine(models[0], make_cache(9), store=store, max_wait=0.001, graphs=graphs)

    def send(thread: int) -> None:
        rng, turn = random.Random(thread), 0
        histories = [Histories(model) for model in models]
        try:
            while not ended.is_set() or turn < 20:
                turn += 1
                user = 10 * thread + rng.randrange(3)
                events = some_events(
                    rng, turn * 10**7, rng.choice([0, 1, 3]), models[0].num_actions
                )
                if turn <= 3:
                    user, events = 10 * thread + turn - 1, [Event(1, turn * 10**7)]
                scores = engine.score(user, events, [1, 2, 3], timeout=60)
                expected = [h.expect(user, events, [1, 2, 3], None) for h in histories]
                near = [torch.allclose(scores, e, 1e-5, 1e-5) for e in expected]
                assert sum(near) == 1, (scores, expected)
                counts[near.index(True)] += 1
        except BaseException as error:
            failures.append(error)

    with engine:
        threads = [threading.Thread(target=send, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        mine = [Histories(model) for model in models]

        def check(current: int, turn: int) -> None:
            events = [Event(turn % ITEMS, turn)]
            expected = [histories.expect("mine", events, [4, 5], None) for histories in mine]
            assert_close(engine.score("mine", events, [4, 5]), expected[current])

        try:
            check(0, 0)
            for turn in range(1, 13):
                if turn % 3:
                    engine.swap(models[turn % 3 % 2])
                    check(turn % 3 % 2, turn)
                else:
                    engine.roll_back()
                    check(1, turn)
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        assert not failures
        assert min(counts) > 0
        assert engine.stats().failed == 0
        assert engine.stats().hit_tokens > 0


def test_rows_of_the_other_model_are_not_used() -> None:
    models = [sound("retrieval") for _ in range(2)]
    events = np.array(some_events(random.Random(0), 0, 30), np.int64)
    expected = [model.whole(events, [1, 2, 3], 10**6) for model in models]
    assert (expected[0] - expected[1]).abs().max() > 1e-3
    cache = make_cache(9, host_pages=9)
    with Engine(models[0], cache) as engine:
        engine.score(7, events, [1], at=10**6)
        for change, current in (
            (lambda: engine.swap(models[1]), 1),
            (engine.roll_back, 0),
            (lambda: engine.swap(models[1]), 1),
            (lambda: engine.swap(models[0]), 0),
            (engine.roll_back, 1),
        ):
            change()
            assert engine.model is models[current]
            assert cache.stats().users == cache.stats().host_users == 0
            for hits in (0, 29):
                before = engine.stats().hit_tokens
                assert_close(engine.score(7, [], [1, 2, 3], at=10**6), expected[current])
                assert engine.stats().hit_tokens == before + hits
        with pytest.raises(ValueError, match=r"model: expected one before this .*, got none"):
            engine.roll_back()


def test_a_change_waits_for_the_batch_under_way() -> None:
    models = [sound("retrieval") for _ in range(2)]
    with Engine(models[0], make_cache(9), max_wait=0.0) as engine:
        gate = Gate(models[0])
        first = engine.submit_score(1, [(1, 1)], [2, 3])
        assert gate.reached.wait(10)
        change = threading.Thread(target=engine.swap, args=(models[1],))
        change.start()
        change.join(0.3)  # meanwhile the new model has been checked
        assert change.is_alive()
        assert engine.model is models[0]
        later = engine.submit_score(2, [(1, 1)], [2, 3])
        gate.opened.set()
        change.join(20)
        events = np.array([(1, 1, 0)])
        assert_close(first.result(20), models[0].whole(events, [2, 3], 1))
        assert_close(later.result(20), models[1].whole(events, [2, 3], 1))


def test_a_model_of_other_shapes_has_a_cache_of_its_own() -> None:
    old, new = sound("retrieval"), retrieval(layers=3)
    events = np.array([(1, 1, 0), (2, 2, 0)])
    caches = [make_cache(9), PagedKVCache(3, 6, 32, HEADS, DIM, torch.float64)]
    with Engine(old, caches[0]) as engine:
        engine.score(1, events, [1])
        with pytest.raises(ModelCheckError, match=r"cache: expected layers, heads .*\[3, 2, 16\]"):
            engine.swap(new)
        engine.swap(new, cache=caches[1])
        for model, cache in ((new, caches[1]), (old, caches[0])):
            assert engine.model is model
            assert_close(engine.score(1, [], [1, 2]), model.whole(events, [1, 2], 2))
            assert cache.stats().users == 1
            engine.forget(2)
            if model is new:
                engine.roll_back()
        with pytest.raises(ModelCheckError, match="cache: expected at least 3 pages"):
            engine.swap(old, cache=make_cache(2))


@pytest.mark.parametrize("name", ["retrieval", "ranking"])
def test_a_check_records_no_gradients(name: str) -> None:
    """With gradients, the check could deadlock with a thread that uses the same parameters."""
    models, enabled = [sound(name) for _ in range(2)], list[bool]()

    class Recorder(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if args and isinstance(args[0], torch.Tensor):
                enabled.append(torch.is_grad_enabled())
            return func(*args, **(kwargs or {}))

    with Engine(models[0], make_cache(9)) as engine:
        with Recorder():
            engine.swap(models[1])
        assert len(enabled) > 20
        assert not any(enabled)


def test_a_probe_says_what_a_model_answers() -> None:
    models = [sound("retrieval") for _ in range(2)]
    expected = models[1].whole(np.array(PROBE), [4, 5], 40)
    with Engine(models[0], make_cache(9)) as engine:
        probe = Probe(PROBE, [4, 5], at=40, expected=expected.tolist(), tolerance=1e-6)
        engine.swap(models[1], probe=probe)
        with pytest.raises(
            ModelCheckError, match=r"^model: expected the probe's scores within 1e-06 \* \(1 \+ .*"
        ):
            engine.swap(models[0], probe=probe)
        assert engine.model is models[1]
        for wrong, message in (
            (Probe([], [1]), "probe: expected 1 to 40 events and at least one candidate, got 0 "),
            (Probe(PROBE, []), "probe: expected .* got 3 and 0"),
            (replace(probe, expected=[1.0]), "probe.expected: expected a score for each of 2"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.swap(models[1], probe=wrong)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_new_model_has_graphs_before_it_takes_over(
    ahead: bool, captured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The serving thread captures the graphs, and serves requests between captures."""
    old, new = sound("ranking"), sound("ranking")
    events = np.array(some_events(random.Random(0), 0, 30, 3), np.int64)
    expected = [model.whole(events, [1, 2], 0) for model in (old, new)]
    assert (expected[0] - expected[1]).abs().max() > 1e-3
    buckets = GraphBuckets(row_counts=(8, 64), ahead=ahead)
    with Engine(old, make_cache(40), max_batch_size=4, graphs=buckets) as engine:
        engine.score(1, events, [1, 2])  # 32 rows
        engine.score(1, [], [1, 2])  # 3 rows
        shapes = 6 if ahead else 2
        assert len(captured) == shapes
        answers: list[torch.Tensor] = []

        def ask_between(seconds: float) -> None:
            assert engine.model is old
            assert seconds > 0
            answers.append(engine.score(1, [], [1, 2], timeout=20))

        with monkeypatch.context() as patch:
            patch.setattr("hstu_attn.serving.versions.time.sleep", ask_between)
            engine.swap(new)
        assert len(captured) == 2 * shapes
        assert len(answers) == shapes
        for scores in answers:
            assert_close(scores, expected[0])
        for _ in range(2):
            assert_close(engine.score(1, [], [1, 2]), expected[1])
        assert len(captured) == 2 * shapes
        assert engine.stats().graph_batches == engine.stats().batches


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["retrieval", "ranking, times"])
def test_changes_on_a_gpu(name: str) -> None:
    """Graphs of the new model are captured while those of the old one are replayed."""
    models = [sound(name, torch.bfloat16, "cuda") for _ in range(2)]
    events = np.array(some_events(random.Random(0), 0, 30, models[0].num_actions), np.int64)
    alone = []
    for model in models:
        with Engine(model, make_cache(30, torch.bfloat16, "cuda"), graphs=False) as engine:
            alone.append(engine.score(1, events, [1, 2, 3], at=10**6).float())
    assert (alone[0] - alone[1]).abs().max() > 0.05
    failures, counts, ended = list[BaseException](), [0, 0], threading.Event()
    cache, buckets = make_cache(30, torch.bfloat16, "cuda"), GraphBuckets(ahead=True)
    with Engine(models[0], cache, graphs=buckets, max_batch_size=4) as engine:

        def send(user: int) -> None:
            try:
                engine.score(user, events, [1], at=10**6)
                while not ended.is_set():
                    scores = engine.score(user, [], [1, 2, 3], at=10**6, timeout=60).float()
                    near = [torch.allclose(scores, e, 0.02, 0.02) for e in alone]
                    assert sum(near) == 1, (scores, alone)
                    counts[near.index(True)] += 1
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=send, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        try:
            for current in (1, 0, 1):
                engine.swap(models[current])
                graphs = engine._scorer._graphs
                assert graphs is not None
                assert all(replay is not None for replay in graphs._replays.values())
            engine.roll_back()
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        assert not failures
        assert min(counts) > 0
        assert engine.stats().graph_batches == engine.stats().batches


# ---------------------------------------------------------------------------------------------
# Models that are not sound
# ---------------------------------------------------------------------------------------------


def spoil(change: Callable[[Any], None], name: str = "retrieval") -> Any:
    model = sound(name)
    with torch.no_grad():
        change(model)
    return model


def fail(rows: Any) -> Any:
    raise RuntimeError("no such kernel")


@pytest.mark.faults
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: spoil(lambda m: m.stack.layers[1].uvqk.weight[0, 0].fill_(torch.nan)),
            "model: expected finite weights, got NaN or Inf in stack.layers.1.uvqk.weight",
        ),
        (
            lambda: spoil(lambda m: m.item_vectors[7].fill_(torch.inf)),
            "model: expected finite weights, got NaN or Inf in item_vectors",
        ),
        (
            lambda: spoil(
                lambda m: setattr(m, "score_catalog", lambda x: x.float() @ m.item_vectors.T / 0)
            ),
            "model: expected finite scores of the probe, got NaN or Inf",
        ),
        (
            lambda: spoil(lambda m: setattr(m, "embed", fail)),
            r"model: expected rows of events, got RuntimeError\('no such kernel'\)",
        ),
        (
            lambda: spoil(lambda m: setattr(m, "score", lambda *_: 1 / 0)),
            "model: expected an answer to the probe, got ZeroDivisionError",
        ),
        (lambda: spoil(lambda m: m.stack.train()), "model: expected evaluation mode"),
        (lambda: retrieval(items=ITEMS + 1), "expected num_items of the served model, 60, got 61"),
        (
            lambda: sound("ranking"),
            "model: expected num_actions of the served model, 1, got 3",
        ),
        (
            lambda: spoil(lambda m: setattr(m, "max_history", LONGEST - 1)),
            "store: expected max_events of at most the model's max_history = 39, got 40",
        ),
        (
            lambda: retrieval(replace(RESEARCH, attention_dim=32, hidden_dim=32)),
            "cache: expected layers, heads and head dim of the model",
        ),
    ],
)
def test_a_model_that_is_not_sound_changes_nothing(make: Callable[[], Any], message: str) -> None:
    served = sound("retrieval")
    events = np.array(some_events(random.Random(0), 0, 20), np.int64)
    cache = make_cache(9)
    with Engine(served, cache) as engine:
        engine.score(7, events, [1])
        model, before = make(), cache.stats()
        if message.endswith("of the probe, got NaN or Inf"):
            assert torch.isfinite(model.item_vectors).all()
        with pytest.raises(ModelCheckError, match=message):
            engine.swap(model)
        assert cache.stats() == before
        assert engine.model is served
        with pytest.raises(ValueError, match="got none"):
            engine.roll_back()
        at = int(events[-1, 1])
        assert_close(engine.score(7, [], [1, 2]), served.whole(events, [1, 2], at))
        assert engine.stats().hit_tokens == 19


@pytest.mark.parametrize("is_sound", [True, False])
def test_threads_take_short_turns_while_a_model_is_checked(is_sound: bool) -> None:
    """Otherwise each torch call of the serving thread would wait 5 ms for the interpreter lock."""
    before, turns = sys.getswitchinterval(), []
    model = sound("retrieval")
    inner = model.score

    def score(*arguments: Any) -> torch.Tensor:
        turns.append(sys.getswitchinterval())
        return inner(*arguments) * (1 if is_sound else torch.nan)

    model.score = score
    with Engine(sound("retrieval"), make_cache(16)) as engine:
        with nullcontext() if is_sound else pytest.raises(ModelCheckError):
            engine.swap(model)
        assert turns
        assert max(turns) < before / 10
        assert sys.getswitchinterval() == before


def test_models_of_other_kinds_are_refused() -> None:
    with Engine(sound("ranking"), make_cache(9)) as engine:
        for model, message in (
            (
                RankingModel(STU, LAYERS, ITEMS, 2, LONGEST).double().eval(),
                "num_actions .*, 3, got 2",
            ),
            (sound("retrieval"), "expected num_actions of the served model, 3, got 1"),
        ):
            with pytest.raises(ModelCheckError, match=message):
                engine.swap(model)


def test_a_closed_engine_takes_no_model() -> None:
    models = [sound("retrieval") for _ in range(2)]
    engine = Engine(models[0], make_cache(9), store=MemoryStore(10, LONGEST))
    engine.swap(models[1])
    engine.close()
    for change in (lambda: engine.swap(models[0]), engine.roll_back):
        with pytest.raises(EngineClosedError):
            change()
    assert engine.model is models[1]
