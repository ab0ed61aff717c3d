"""Tests of two engines on one store, where the later model has more items than the earlier one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
from hstu_attn.serving import Engine, EventOrderError, NoHistoryError
from tests.helpers.serving_models import LONGEST, assert_close, make_cache, make_model
from tests.helpers.stores import Place

pytestmark = pytest.mark.parametrize("place", ["memory", "redis"], indirect=True)

EARLIER, LATER = 40, 55  # items of the two models


@pytest.fixture(params=["retrieval", "ranking"])
def engines(request: pytest.FixtureRequest, place: Place) -> Iterator[list[Engine]]:
    """The earlier model and the later one, each with stores and caches of its own."""
    models = [make_model(request.param) for _ in range(2)]
    shared = place.open(LONGEST)
    stores = [shared, shared if place.kind == "memory" else place.open(LONGEST)]
    engines = []
    for model, items, store in zip(models, (EARLIER, LATER), stores, strict=True):
        model.num_items = items
        engines.append(Engine(model, make_cache(9), store=store, skip_unknown_items=True))
    yield engines
    for engine in engines:
        engine.close()


@pytest.mark.slow
def test_each_model_reads_the_events_that_it_knows(engines: list[Engine]) -> None:
    rng = random.Random(0)
    stored: dict[int, list[tuple[int, int, int]]] = {user: [] for user in range(4)}
    skipped = 0
    for turn in range(1, 31):
        for user, events in stored.items():
            engine: Any = rng.choice(engines)
            known, at = engine.model.num_items, turn * 1000
            new = [(rng.randrange(known), at + n, 0) for n in range(rng.randrange(1, 4))]
            scores = engine.score(user, new, [1, 2, 3])
            events += new
            if len(events) > LONGEST:
                del events[: len(events) - (LONGEST - LONGEST // 8)]
            read = [event for event in events if event[0] < known]
            skipped += len(events) - len(read)
            assert_close(scores, engine.model.whole(np.array(read), [1, 2, 3], read[-1][1]))
            ((_, rows),) = engine.store.read([user], [0])  # type: ignore[misc]
            assert [*map(tuple, rows.tolist())] == events
    assert skipped > 100
    # Ignored events do not cause others to be recomputed.
    assert all(engine.stats().hit_tokens > 500 for engine in engines)


def test_events_that_are_left_out_are_stored_ones(engines: list[Engine]) -> None:
    """Ignored events keep their order and are stored; a user who has no others counts as new."""
    earlier, later = engines
    model: Any = earlier.model
    later.score(1, [(EARLIER, 100)], [1])
    with pytest.raises(EventOrderError, match="expected times from 100 up"):
        earlier.score(1, [(5, 99)], [1])
    if not model.candidates_are_rows:
        with pytest.raises(NoHistoryError):
            earlier.score(1, [], [1])
    expected = model.whole(np.array([(5, 100, 0)]), [1, 7], 100)
    for _ in range(2):  # the second time, the request is repeated
        assert_close(earlier.score(1, [(5, 100)], [1, 7]), expected)
    both = np.array([(EARLIER, 100, 0), (5, 100, 0)])
    ((_, rows),) = later.store.read([1], [0])  # type: ignore[misc]
    assert rows.tolist() == both.tolist()
    assert_close(later.score(1, [], [1, 7]), later.model.whole(both, [1, 7], 100))  # type: ignore[union-attr]
