"""The check that a new model must pass before it replaces the served model."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from .batch import Plan, Request
from .cache import PagedKVCache
from .events import ACTION, ITEM, TIME, Change, EventStore, User, event_rows
from .graphs import StepLimits
from .histories import History
from .model import CatalogModel, ServedModel, UncachedModel
from .scoring import Scorer, check_fit

__all__ = ["ModelCheckError", "Probe", "check_successor", "short_turns", "with_pauses"]

_CANDIDATES = 64  # number of candidates of the default probe
_PERIOD = 3600  # time between two events of the default probe
_PACE = 4  # A pause is this many times as long as the job before it.
_TURN = 2e-4  # seconds: the GIL's switch interval while a model is checked
_TURNS = threading.Lock()  # is held while the process-wide switch interval is changed


@contextmanager
def short_turns() -> Iterator[None]:
    """Lowers the GIL's switch interval to `_TURN` seconds.

    Checking a model is mostly Python. A serving thread releases the GIL in each call of torch and
    gets it back one switch interval later: after 5 ms by Python's default, which is longer than a
    batch takes.
    """
    with _TURNS:
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(before, _TURN))
        try:
            yield
        finally:
            sys.setswitchinterval(before)


def with_pauses(
    jobs: Iterable[Callable[[], object]], run: Callable[[Callable[[], object]], None]
) -> None:
    """Runs jobs one after another, with long pauses between them in which batches can run."""
    for job in jobs:
        started = time.monotonic()
        run(job)
        time.sleep(_PACE * (time.monotonic() - started))


class ModelCheckError(ValueError):
    """A new model cannot replace the served one: it does not fit, or its scores are wrong."""


@dataclass(frozen=True, eq=False)
class Probe:
    """A request, and the scores that a new model should return.

    Args:
        events: `(n, 3)` integers, or `Event`s, oldest first; at least one.
        candidates: `(m,)` items; at least one.
        at: the time of the request; None is the time of the last event.
        expected: `(m,)` scores, or `(m, n)` of a model with `n` scores for each candidate, for
            example from training; None accepts all finite scores.
        tolerance: the largest difference from an expected score `e`, as a fraction of `1 + |e|`.
        user: the user of the request; matters if the model uses user identities.
        context: as in `Engine.submit_score`.
    """

    events: Sequence[tuple[int, ...]] | np.ndarray
    candidates: Sequence[int]
    at: int | None = None
    expected: Sequence[float] | Sequence[Sequence[float]] | Tensor | None = None
    tolerance: float = 1e-2
    user: User = "probe"
    context: int | None = None


# NOTE: with gradients, two threads that use a model's parameters can deadlock: torch then takes a
# lock of the parameter before the GIL, and elsewhere the GIL before a lock of the parameter.
@torch.no_grad()
def check_successor(
    model: ServedModel | UncachedModel,
    served: ServedModel | UncachedModel,
    cache: PagedKVCache | None,
    store: EventStore,
    probe: Probe | None,
) -> None:
    """Checks whether a model can replace the served one; the probe runs in a cache of its own.

    Args:
        model: the new model.
        served: the model to replace.
        cache: the KV cache from which the new model would be served; it is not modified.
        store: the users' events.
        probe: None is a history of `store.max_events` events on items of the whole catalog.

    Raises:
        ModelCheckError: if the new model cannot replace the served one.
    """
    for name in ("num_items", "num_actions", "candidates_are_rows"):
        expected, got = getattr(served, name), getattr(model, name)
        if got != expected:
            raise ModelCheckError(
                f"model: expected {name} of the served model, {expected}, got {got}"
            )
    if isinstance(served, CatalogModel) and not isinstance(model, CatalogModel):
        raise ModelCheckError("model: expected one that scores its whole catalog, as the served")
    try:
        check_fit(model, cache, store)
    except ValueError as error:
        raise ModelCheckError(str(error)) from error
    except Exception as error:
        raise ModelCheckError(f"model: expected rows of events, got {error!r}") from error
    for name, tensor in _weights(model):
        if not tensor.isfinite().all():
            raise ModelCheckError(f"model: expected finite weights, got NaN or Inf in {name}")
    _check_scores(model, cache, store, probe or _default_probe(model, store))


def _weights(model: ServedModel | UncachedModel) -> Iterator[tuple[str, Tensor]]:
    """Yields the named floating-point tensors of a model and of the modules that it holds."""
    parts = {"model": model} if isinstance(model, nn.Module) else {**vars(model)}
    for name, part in {"stack": getattr(model, "stack", None), **parts}.items():
        if isinstance(part, nn.Module):
            for path, tensor in part.state_dict(keep_vars=True).items():
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    yield f"{name}.{path}", tensor
        elif isinstance(part, Tensor) and part.is_floating_point():
            yield name, part


def _default_probe(model: ServedModel | UncachedModel, store: EventStore) -> Probe:
    count = store.max_events
    events = np.zeros((count, 3), np.int64)
    events[:, ITEM] = np.linspace(0, model.num_items - 1, count)
    events[:, TIME] = np.arange(count) * _PERIOD
    events[:, ACTION] = np.arange(count) % model.num_actions
    candidates = np.linspace(0, model.num_items - 1, min(_CANDIDATES, model.num_items))
    return Probe(events, candidates.astype(np.int64).tolist())


def _check_scores(
    model: ServedModel | UncachedModel,
    like: PagedKVCache | None,
    store: EventStore,
    probe: Probe,
) -> None:
    events = event_rows(probe.events, "probe.events")
    if not 0 < len(events) <= store.max_events or not len(probe.candidates):
        raise ValueError(
            f"probe: expected 1 to {store.max_events} events and at least one candidate, got "
            f"{len(events)} and {len(probe.candidates)}"
        )
    kinds = [(np.array(probe.candidates, np.int64), 0)]
    if isinstance(model, CatalogModel):
        kinds.append((np.empty(0, np.int64), 1))  # the best item: a NaN score would rank first
    cache = None
    if like is not None:
        layers, _, _, page_size, heads, head_dim = like.kv_cache.shape
        cache = PagedKVCache(
            layers,
            -(-len(events) // page_size) * len(kinds),
            page_size,
            heads,
            head_dim,
            like.kv_cache.dtype,
            like.kv_cache.device,
        )
    limits = StepLimits(len(kinds), len(events), len(probe.candidates))
    plans = [
        Plan(
            Request(
                *(probe.user, events, candidates, top_k, False, probe.at, 0.0),
                context=probe.context,
            ),
            History(key, 0, events),
            Change(probe.user, 0, 0, events),
        )
        for key, (candidates, top_k) in enumerate(kinds)
    ]
    try:
        answers = Scorer(model, cache, False, limits).compute(plans).answers
    except Exception as error:
        raise ModelCheckError(f"model: expected an answer to the probe, got {error!r}") from error
    if any(answer is None for answer in answers):
        raise ModelCheckError("model: expected finite scores of the probe, got NaN or Inf")
    scores = answers[0]
    if probe.expected is None or not isinstance(scores, Tensor):
        return
    scores = scores.double()
    expected = torch.as_tensor(probe.expected, dtype=torch.float64, device="cpu")
    if expected.shape != scores.shape:
        raise ValueError(
            f"probe.expected: expected a score for each of {len(scores)} candidates, as shape "
            f"{tuple(scores.shape)}, got shape {tuple(expected.shape)}"
        )
    excess = (scores - expected).abs() - probe.tolerance * (1 + expected.abs())
    worst = int(excess.argmax())
    if not excess.flatten()[worst] <= 0:  # also refuses NaN
        raise ModelCheckError(
            f"model: expected the probe's scores within {probe.tolerance} * (1 + |score|), got "
            f"{scores.flatten()[worst]:.6g} for {expected.flatten()[worst]:.6g} of candidate "
            f"{worst // scores[0].numel()}"
        )
