"""The interfaces of the models that an engine serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..cached import check_cacheable
from ..layer import HSTUStack
from .events import Int64s, User

__all__ = [
    "CatalogModel",
    "Requests",
    "Rows",
    "ServedModel",
    "UncachedModel",
    "check_model",
    "row_dtype",
]


class Rows(NamedTuple):
    """The rows of a batch that a model embeds, on its device.

    Each request has some events of its user, oldest first, and then, if candidates are rows, its
    candidates.

    Attributes:
        items: int64 `(total,)`, below the model's `num_items`.
        actions: int64 `(total,)`, what the user did, below `num_actions`; 0 for a candidate.
        positions: int64 `(total,)`: for an event, the number of earlier events of its user; for a
            candidate, the number of all events of its user, so that its place in the list does not
            matter.
        is_candidate: bool `(total,)`.
    """

    items: Tensor
    actions: Tensor
    positions: Tensor
    is_candidate: Tensor


class ModelSizes(Protocol):
    """The sizes of any model that an engine serves."""

    @property
    def num_items(self) -> int:
        """Number of items; items are numbered from 0 to `num_items - 1`."""

    @property
    def num_actions(self) -> int:
        """Number of actions, numbered from 0; 1 if the model reads none."""

    @property
    def max_history(self) -> int:
        """The longest history in events that the model takes."""


class ServedModel(ModelSizes, Protocol):
    """A model of events and candidates: an `HSTUStack` between an embedding and scores.

    A row of the stack is an event or, where `candidates_are_rows`, a candidate. The embedding of a
    row must depend on that row alone; otherwise it cannot be cached. A relative bias by position
    counts candidates, so with such a bias a candidate's score depends on its place in the list.
    """

    @property
    def stack(self) -> HSTUStack:
        """The layers, in evaluation mode."""

    @property
    def reads_times(self) -> bool:
        """Returns whether the layers are given times, for their relative bias by elapsed time."""

    @property
    def candidates_are_rows(self) -> bool:
        """Returns whether candidates are rows after the history (targets, in groups of one).

        True is usual for ranking. False, as in retrieval, compares candidates with the state after
        the last event.
        """

    def embed(self, rows: Rows) -> Tensor:
        """Returns the input of the stack, `(total, embedding_dim)`.

        It has the dtype of the cache, or any dtype if the cache is float8_e4m3fn.
        """

    def score(self, states: Tensor, candidates: Tensor) -> Tensor:
        """Returns floating-point scores `(n,)` of candidates `(n,)` int64, or `(n, tasks)`.

        `states` `(n, embedding_dim)` is the stack's output for each candidate: at its own row or,
        where candidates are not rows, at the row of its user's last event.
        """


@runtime_checkable
class CatalogModel(ServedModel, Protocol):
    """A retrieval model, which can score all items at once."""

    def score_catalog(self, states: Tensor) -> Tensor:
        """Returns the scores of all items, `(n, num_items)`.

        `states` `(n, embedding_dim)` are the stack's output after the last event of each user.
        """


class Requests(NamedTuple):
    """Requests with all of their users' events, for a model without a cache, in host memory.

    Request `b` has the events `event_offsets[b] .. event_offsets[b + 1]` and the candidates
    `candidate_offsets[b] .. candidate_offsets[b + 1]`.

    Attributes:
        users: the users whose requests these are.
        contexts: what the callers of `Engine.submit_score` gave as `context`.
        event_offsets: int64 `(B + 1,)`.
        events: int64 `(n, 3)`, each user's oldest first: item, time and action.
        times: int64 `(B,)`, the times at which the model is queried.
        candidate_offsets: int64 `(B + 1,)`.
        candidates: int64 `(m,)`, items.
    """

    users: Sequence[User]
    contexts: Sequence[Any]
    event_offsets: Int64s
    events: Int64s
    times: Int64s
    candidate_offsets: Int64s
    candidates: Int64s


@runtime_checkable
class UncachedModel(ModelSizes, Protocol):
    """A model whose rows change with every request, so that no keys and values can be cached.

    Examples are models with contextual rows, which see all of the history and are seen by it, and
    models that embed the age of a row or its position counted from the end.
    """

    @property
    def candidates_are_rows(self) -> bool:
        """Returns whether candidates can be scored for a user without events."""

    def score_requests(self, requests: Requests) -> Tensor:
        """Returns floating-point scores of all candidates, `(m,)`, or `(m, tasks)` for several."""


def check_model(model: ServedModel) -> None:
    """Checks whether a model can be served from a cache.

    Raises:
        ValueError: as `check_cacheable`; for candidates that see each other, for times without a
            table, or for training mode.
    """
    config = model.stack.config
    check_cacheable(config, with_targets=model.candidates_are_rows)
    if model.candidates_are_rows and config.target_group_size != 1:
        raise ValueError(
            "target_group_size: expected 1, so that candidates do not see each other, got "
            f"{config.target_group_size}"
        )
    if model.reads_times and not (config.enable_relative_attention_bias and config.num_buckets):
        raise ValueError(
            "reads_times: expected False of a model without a time table "
            "(enable_relative_attention_bias with num_buckets > 0 makes one), got True"
        )
    if model.stack.training:
        raise ValueError("model: expected evaluation mode (eval()), got training mode")


@torch.no_grad()
def row_dtype(model: ServedModel) -> torch.dtype:
    """Returns the dtype in which a model embeds rows, which is that of its cache."""
    device = next(model.stack.parameters()).device
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return model.embed(Rows(zero, zero, zero, zero.bool())).dtype
