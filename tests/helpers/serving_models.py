"""Helpers for the serving tests: small models of both kinds, which can be made to fail, and the
expected answers of an engine.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from recommender.model import RetrievalModel
from recommender.served import ServedRetrieval
from torch import Tensor, nn

from hstu_attn.data import JaggedBatch
from hstu_attn.layer import HSTULayerConfig, HSTUStack
from hstu_attn.serving import Engine, Event, PagedKVCache, Rows
from hstu_attn.testing import assert_matches

ITEMS, LONGEST, LAYERS, HEADS, DIM = 60, 40, 2, 2, 16
POISON = ITEMS - 1  # the last layer fails where this item is computed
SPOILT = ITEMS - 2  # the score of this item as a candidate is NaN

RESEARCH = HSTULayerConfig.research(
    embedding_dim=24, num_heads=HEADS, linear_dim=DIM, attention_dim=DIM, max_sequence_len=LONGEST
)
STU = replace(
    HSTULayerConfig.stu(embedding_dim=24, num_heads=HEADS, hidden_dim=DIM, attention_dim=DIM),
    scaling_seqlen=LONGEST,
)
RETRIEVAL = {
    "retrieval": RESEARCH,
    "retrieval, no bias": replace(RESEARCH, enable_relative_attention_bias=False),
}
RANKING = {
    "ranking": STU,
    "ranking, window": replace(STU, max_attn_len=7),
    "ranking, rms norms": replace(
        STU, input_norm="rms_norm", output_norm="rms_norm", linear_bias=False
    ),
    "ranking, times": replace(
        STU, enable_relative_attention_bias=True, relative_bias_max_seq_len=20
    ),
}


COMPUTED = threading.local()  # whether the thread computes POISON


class Boom(Exception):
    pass


def strengthen(model: torch.nn.Module) -> None:
    """Enlarges the weights, so that a stale row changes the scores."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_((1.0 if "weight" in name else 0.3) * torch.randn_like(parameter) * 0.3)


class RankingModel(nn.Module):
    """Embeds items, positions and actions; scores each candidate by its state."""

    candidates_are_rows = True

    def __init__(
        self, config: HSTULayerConfig, layers: int, items: int, actions: int, max_history: int
    ) -> None:
        super().__init__()
        self.num_items, self.num_actions, self.max_history = items, actions, max_history
        self.reads_times = config.enable_relative_attention_bias
        self.item = nn.Embedding(items, config.embedding_dim)
        self.action = nn.Embedding(actions + 1, config.embedding_dim)  # the last one: a candidate
        self.position = nn.Embedding(max_history + 1, config.embedding_dim)
        self.stack = HSTUStack(config, layers)
        self.head = nn.Linear(config.embedding_dim, 1)

    def embed(self, rows: Rows) -> Tensor:
        actions = rows.actions.masked_fill(rows.is_candidate, self.num_actions)
        x = self.item(rows.items) + self.action(actions) + self.position(rows.positions)
        return x.to(self.stack.layers[0].uvqk.weight.dtype)

    def score(self, states: Tensor, candidates: Tensor) -> Tensor:
        return self.head(states).squeeze(1)

    @torch.no_grad()
    def whole(self, events: np.ndarray, candidates: list[int], at: int) -> Tensor:
        """Returns the scores `(len(candidates),)` of a user's candidates without a cache."""
        n, m = len(events), len(candidates)
        items, times, actions = torch.from_numpy(events).T.contiguous()
        listed = torch.tensor(candidates, dtype=torch.int64)
        times = torch.cat([times, torch.full((m + 1,), at)])
        x = torch.cat([self.item(items) + self.action(actions), self.item(listed)])
        x[:n] += self.position.weight[:n]
        x[n:] += self.position.weight[n] + self.action.weight[-1]
        timed = {"timestamps": times[:-1], "row_timestamps": times[1:]} if self.reads_times else {}
        states = self.stack(
            x, torch.tensor([0, n + m]), n + m, num_targets=torch.tensor([m]), **timed
        )
        return self.head(states[n:]).squeeze(1)


class Retrieval(ServedRetrieval):
    """The retrieval example's model, which fails at POISON and scores SPOILT as NaN."""

    def embed(self, rows: Any) -> Tensor:
        COMPUTED.poison = bool((rows.items == POISON).any())
        return super().embed(rows)

    def score(self, states: Tensor, candidates: Tensor) -> Tensor:
        return super().score(states, candidates).masked_fill(candidates == SPOILT, torch.nan)

    @torch.no_grad()
    def whole(self, events: np.ndarray, candidates: list[int], at: int) -> Tensor:
        items, times, _ = torch.from_numpy(events).T.contiguous()
        later = torch.cat([times[1:], torch.tensor([at])])
        batch = JaggedBatch(
            torch.zeros(1), torch.tensor([0, len(items)]), items, times, items, later
        )
        return self.model.scores(batch)[0, candidates]


class Ranking(RankingModel):
    """The ranking model, which fails at POISON and scores SPOILT as NaN."""

    def embed(self, rows: Any) -> Tensor:
        COMPUTED.poison = bool((rows.items == POISON).any())
        return super().embed(rows)

    def score(self, states: Tensor, candidates: Tensor) -> Tensor:
        return super().score(states, candidates).masked_fill(candidates == SPOILT, torch.nan)


def fail_if_poisoned(layer: torch.nn.Module) -> None:
    steps = layer._steps

    def poisoned_steps() -> Any:
        if getattr(COMPUTED, "poison", False):
            raise Boom("poisoned")
        return steps()

    layer._steps = poisoned_steps


def make_model(name: str, dtype: torch.dtype = torch.float64) -> Any:
    model: Any
    if name in RETRIEVAL:
        inner = RetrievalModel(ITEMS, RETRIEVAL[name], LAYERS, LONGEST, 0.2, compute_dtype=dtype)
        strengthen(inner)
        model = Retrieval(inner)
    else:
        model = Ranking(RANKING[name], LAYERS, ITEMS, 3, LONGEST).to(dtype)
        strengthen(model)
        model.eval()
    fail_if_poisoned(model.stack.layers[-1])
    return model


def make_cache(
    num_pages: int, dtype: torch.dtype = torch.float64, device: str = "cpu", **options: Any
) -> PagedKVCache:
    return PagedKVCache(LAYERS, num_pages, 16, HEADS, DIM, dtype, device, **options)


class Gate:
    """Pauses a model's computation, optionally only of batches with `item`, until it is opened."""

    def __init__(self, model: Any, item: int | None = None) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        embed = model.embed

        def gated(rows: Any) -> Tensor:
            if item is None or (rows.items == item).any():
                self.reached.set()
                assert self.opened.wait(10)
            return embed(rows)

        model.embed = gated


class Histories:
    """The events of each user, and the scores that an engine should return for them."""

    def __init__(self, model: Any, drop: int = LONGEST // 8) -> None:
        self.model, self.drop = model, drop
        self.events: dict[int, np.ndarray] = {}

    def after(self, user: int, events: Sequence[Event]) -> np.ndarray:
        known = self.events.get(user, np.empty((0, 3), np.int64))
        together = np.concatenate([known, np.array(events, np.int64).reshape(-1, 3)])
        return together if len(together) <= LONGEST else together[-(LONGEST - self.drop) :]

    def expect(
        self, user: int, events: Sequence[Event], candidates: list[int], at: int | None
    ) -> Tensor:
        """Stores the events; returns the expected scores."""
        after = self.events[user] = self.after(user, events)
        if at is None:
            at = int(after[-1, 1]) if len(after) else 0
        return self.model.whole(after, candidates, at)


def assert_close(scores: Tensor, expected: Tensor) -> None:
    tolerance = 1e-9 if scores.dtype == torch.float64 else 1e-5
    torch.testing.assert_close(scores, expected, rtol=tolerance, atol=tolerance)


def on_device(model: Any, device: str) -> Any:
    """Returns the model on the device; a retrieval model is rebuilt, because some of its tensors
    are not moved by `Module.to`.
    """
    return Retrieval(model.model.to(device)) if isinstance(model, Retrieval) else model.to(device)


def twin(name: str, model: Any, dtype: torch.dtype) -> Any:
    """Returns a model with the same weights that computes in `dtype` on the CPU."""
    other = make_model(name, dtype)
    inner = (lambda served: served.model) if name in RETRIEVAL else lambda served: served
    inner(other).load_state_dict(inner(model).state_dict())
    return other


def assert_as_near(scores: Tensor, exact: Tensor, same_dtype_reference: Tensor) -> None:
    """Asserts that scores are about as close to the exact ones as those of a reference.

    Root mean squares of errors are compared. Largest errors are less reliable: normalizing almost
    equal numbers magnifies a few errors, so those of equally good computations may differ by a
    factor of 3. With 2,020 models of `check_answers` whose candidates are rows, on a CPU in bf16,
    the logarithm of the ratio of root mean squares had a standard deviation of at most 0.10 among
    the scores of a user, and the largest ratio was 1.60: a factor of 2 is seven deviations away.
    For the largest errors the standard deviation was 0.3, and the largest ratio 3.2.
    """
    assert torch.isfinite(scores).all()
    error, reference_error = (
        (x.double() - exact).square().mean().sqrt().item() for x in (scores, same_dtype_reference)
    )
    # The last term is for references that are exact by chance.
    allowed = 2 * reference_error + torch.finfo(torch.float32).eps * exact.abs().max().item()
    assert error <= allowed, f"scores: the error is {error:.3e}, at most {allowed:.3e} is allowed"


def check_answers(name: str, dtype: torch.dtype, device: str, **options: Any) -> None:
    """Checks that scores with a cache are about as close to the exact ones as without a cache."""
    model = make_model(name, dtype)
    plain, exact = (Histories(twin(name, model, d)) for d in (dtype, torch.float64))
    rng = random.Random(0)
    found: list[list[Tensor]] = [[], [], []]
    users, turns = 3, 60
    if device != "cpu":
        model = on_device(model, device)
    with Engine(model, make_cache(12, dtype, device), **options) as engine:
        for turn in range(turns):
            candidates = [rng.randrange(SPOILT) for _ in range(10)]
            request = (turn % users, some_events(rng, turn * 10**6, 3), candidates, None)
            for scores, more in zip(
                found,
                (engine.score(*request[:3]), exact.expect(*request), plain.expect(*request)),
                strict=True,
            ):
                scores.append(more)
    for user in range(users):
        assert_as_near(*(torch.cat(scores[user::users]) for scores in found))
    assert_matches("scores", *map(torch.cat, found))


def some_events(rng: random.Random, start: int, count: int, actions: int = 1) -> list[Event]:
    times = sorted(start + rng.randrange(10**6) for _ in range(count))
    return [Event(rng.randrange(SPOILT), at, rng.randrange(actions)) for at in times]
