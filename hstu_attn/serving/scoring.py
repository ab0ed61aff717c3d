"""Scores of a batch: a model over the cache that it fills."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from ..cached import CachedRows
from .batch import Batch, Plan, pack, whole_requests
from .cache import CacheStep, PagedKVCache
from .events import ITEM, EventStore
from .graphs import GraphBuckets, StackGraphs, StepLimits
from .model import CatalogModel, ServedModel, UncachedModel, check_model, row_dtype

__all__ = ["Computed", "Recommendation", "Scorer", "check_fit"]


UNCACHED_EVENTS = 2**20
"""How many events an engine without a cache keeps in memory, over all users.

It need not read these from the store.
"""


class Recommendation(NamedTuple):
    """The best items of the catalog, best first: int64 `(k,)`, and their scores `(k,)`."""

    items: Tensor
    scores: Tensor


class Computed(NamedTuple):
    """The results of a batch.

    Attributes:
        answers: the answer to each plan, on the CPU; None where a score is not finite.
        by_graph: whether a captured graph computed the layers.
        kept: events that the cache had, and that were not computed.
        computed: events that were.
    """

    answers: list[Tensor | Recommendation | None]
    by_graph: bool
    kept: int
    computed: int


class Scorer:
    """Computes batches with one model. Nothing is shared between two of them but a cache.

    Args:
        model: is in evaluation mode, and fits the cache (`check_fit`).
        cache: knows users by the keys of their histories; None for an `UncachedModel`.
        graphs: as in `Engine`.
        limits: those of every batch, if candidates are rows.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: ServedModel | UncachedModel,
        cache: PagedKVCache | None,
        graphs: GraphBuckets | bool | None,
        limits: StepLimits,
    ) -> None:
        self.model = model
        # isinstance() looks for each attribute of the protocol, so it is not called by requests.
        self.catalog_model = model if isinstance(model, CatalogModel) else None
        self.cache = cache
        self._graphs: StackGraphs | None = None
        if graphs is None:
            graphs = cache is not None and cache.kv_cache.is_cuda
        if graphs and cache is not None:
            model = cast(ServedModel, model)
            self._graphs = StackGraphs(
                model.stack,
                cache.kv_cache,
                GraphBuckets() if graphs is True else graphs,
                limits if model.candidates_are_rows else limits._replace(candidates=0),
                reads_times=model.reads_times,
                with_targets=model.candidates_are_rows,
                kv_scales=cache.kv_scales,
                dtype=row_dtype(model),
            )

    @property
    def capacity(self) -> int:
        """Returns how many events, of all users together, an engine keeps in memory."""
        return UNCACHED_EVENTS if self.cache is None else self.cache.capacity

    def captures(self, served: Scorer | None = None) -> list[Callable[[], object]]:
        """Returns what captures the graphs that are wanted before the first batch, each by itself.

        Args:
            served: the scorer that computes until then.
        """
        if self._graphs is None:
            return []
        return [
            torch.no_grad()(capture)
            for capture in self._graphs.captures(None if served is None else served._graphs)
        ]

    def free(self, keys: Sequence[int]) -> None:
        """Forgets the rows of histories."""
        if self.cache is not None:
            self.cache.free(keys)

    def clear(self) -> None:
        """Forgets all rows."""
        if self.cache is not None:
            self.cache.clear()

    def wipe(self, keys: Sequence[int]) -> None:
        """Overwrites all rows in the cache's pages but those of histories."""
        if self.cache is not None:
            self.cache.wipe(keys)

    @property
    def runs_ahead(self) -> bool:
        """Returns whether a device computes batches, so that the host is free meanwhile."""
        return self.cache is not None and self.cache.kv_cache.is_cuda

    @torch.no_grad()
    def compute(self, plans: list[Plan], meanwhile: Callable[[], None] = lambda: None) -> Computed:
        """Computes a batch, and keeps its rows in the cache; if that fails, the cache is as before.

        Args:
            plans: of different users.
            meanwhile: is called when the device has been given its work, before the host waits for
                it; perhaps more than once, or never if something fails.

        Raises:
            OutOfPagesError: if the cache has no room.
            Exception: whatever the model raises.
        """
        if self.cache is None:
            return self._compute_whole(plans)
        model = cast(ServedModel, self.model)
        keys = [plan.after.key for plan in plans]
        cached = self.cache.lookup(keys).tolist()
        kept = [max(count - 1, 0) for count in cached]
        lengths = [len(plan.after.events) for plan in plans]
        new = [length - count for length, count in zip(lengths, cached, strict=True)]
        last = [count - first for count, first in zip(cached, kept, strict=True)]
        with self.cache.step(keys, new, cached_lens=cached, rewritten=last) as step:
            batch = pack(
                plans,
                kept,
                self.cache.kv_cache.device,
                candidates_are_rows=model.candidates_are_rows,
                reads_times=model.reads_times,
            )
            states, by_graph = self._states(model, step, batch, meanwhile)
            answers = self._answers(model, plans, batch, states, meanwhile)
        return Computed(answers, by_graph, sum(kept), sum(lengths) - sum(kept))

    def _compute_whole(self, plans: list[Plan]) -> Computed:
        requests = whole_requests(plans)
        scores = cast(UncachedModel, self.model).score_requests(requests).cpu()
        return Computed(_finite_or_none(scores, plans), False, 0, len(requests.events))

    def _states(
        self, model: ServedModel, step: CacheStep, batch: Batch, meanwhile: Callable[[], None]
    ) -> tuple[Tensor, bool]:
        """Returns the stack's output `(total, embedding_dim)`, and whether a graph computed it.

        There may be more rows after the output's. The output of a graph stays valid until the next
        batch.
        """
        x = model.embed(batch.rows)
        if self._graphs is not None:
            states = self._graphs.run(step, batch, x, before_capture=meanwhile)
            if states is not None:
                return states, True
        seq_offsets, num_targets = step.upload(batch.seq_offsets, batch.num_targets)
        rows = CachedRows(
            step,
            seq_offsets,
            batch.max_seq_len,
            batch.max_key_len,
            num_targets if model.candidates_are_rows else None,
        )
        times = (batch.key_times, batch.row_times) if model.reads_times else ()
        return model.stack.forward_cached(x, rows, *times), False

    def _answers(
        self,
        model: ServedModel,
        plans: list[Plan],
        batch: Batch,
        states: Tensor,
        meanwhile: Callable[[], None],
    ) -> list[Tensor | Recommendation | None]:
        """Returns the answers on the CPU, and None for those with a score that is not finite.

        Copying them waits for the device, so anything that fails there has failed by then.
        """
        asking = [number for number, plan in enumerate(plans) if plan.request.top_k]
        answers: list[Tensor | Recommendation | None]
        if len(asking) < len(plans) or len(batch.candidates):
            scores = model.score(states[batch.state_rows], batch.candidates)
            meanwhile()
            answers = _finite_or_none(scores.cpu(), plans)
        else:
            meanwhile()
            answers = [None] * len(plans)
        if asking and self.catalog_model is not None:
            chosen = torch.tensor(asking, device=states.device)
            catalog = self.catalog_model.score_catalog(states[batch.last_rows[chosen]])
            best = _best(catalog, [plans[number] for number in asking])
            for number, recommendation in zip(asking, best, strict=True):
                answers[number] = recommendation
        return answers


def _finite_or_none(scores: Tensor, plans: Sequence[Plan]) -> list[Tensor | Recommendation | None]:
    """Splits the scores of all candidates; None stands for those with one that is not finite."""
    listed = scores.split([len(plan.request.candidates) for plan in plans])
    if scores.isfinite().all():
        return [*listed]
    return [found if found.isfinite().all() else None for found in listed]


def _best(catalog: Tensor, plans: Sequence[Plan]) -> list[Recommendation | None]:
    """Returns the best items of each row of scores `(len(plans), num_items)`.

    A row's result is None if a score among them is not finite.
    """
    if any(plan.request.exclude_seen for plan in plans):
        seen = [
            plan.after.events[:, ITEM] if plan.request.exclude_seen else np.empty(0, np.int64)
            for plan in plans
        ]
        rows = np.repeat(np.arange(len(plans)), [len(items) for items in seen])
        indices = torch.from_numpy(np.stack([rows, np.concatenate(seen)])).to(catalog.device)
        catalog = catalog.index_put(
            tuple(indices), torch.tensor(-torch.inf, dtype=catalog.dtype, device=catalog.device)
        )
    most = min(max(plan.request.top_k for plan in plans), catalog.shape[1])
    best = catalog.topk(most)
    scores, items = best.values.cpu(), best.indices.cpu()
    # NumPy takes less time than torch for arrays as small as these.
    numbers = scores.double().numpy()
    wanted = np.array([plan.request.top_k for plan in plans])
    is_unseen = (numbers != -np.inf) & (np.arange(most) < wanted[:, None])
    counts = is_unseen.sum(axis=1).tolist()
    finite = (np.isfinite(numbers) | ~is_unseen).all(axis=1).tolist()
    return [
        Recommendation(row_items[:count], row_scores[:count]) if is_finite else None
        for row_items, row_scores, count, is_finite in zip(
            items.unbind(), scores.unbind(), counts, finite, strict=True
        )
    ]


def check_fit(
    model: ServedModel | UncachedModel, cache: PagedKVCache | None, store: EventStore
) -> None:
    """Checks whether a model can be served from a cache, with the histories of a store.

    An `UncachedModel` can be without.

    Raises:
        ValueError: if not.
    """
    if store.max_events > model.max_history:
        raise ValueError(
            f"store: expected max_events of at most the model's max_history = {model.max_history}, "
            f"got {store.max_events}"
        )
    if isinstance(model, UncachedModel):
        if cache is not None:
            raise ValueError(
                "cache: expected None for a model that computes each request whole "
                f"(score_requests), got {type(cache).__name__}"
            )
        return
    if cache is None:
        raise ValueError(
            "cache: expected a PagedKVCache for a model without score_requests, got None"
        )
    check_model(model)
    config = model.stack.config
    layers, pages, _, page_size, *heads = cache.kv_cache.shape
    expected = [len(model.stack.layers), config.num_heads, config.attention_dim]
    if [layers, *heads] != expected:
        raise ValueError(
            f"cache: expected layers, heads and head dim of the model, {expected}, got "
            f"{[layers, *heads]}"
        )
    needed = -(-store.max_events // page_size)
    if pages < needed:
        raise ValueError(
            f"cache: expected at least {needed} pages of {page_size} tokens, for one history of "
            f"{store.max_events} events, got {pages}"
        )
    device = next(model.stack.parameters()).device
    if cache.kv_cache.device != device:
        raise ValueError(
            f"cache: expected the model's device, {device}, got {cache.kv_cache.device}"
        )
    dtype = row_dtype(model)
    if cache.kv_cache.dtype not in (dtype, torch.float8_e4m3fn):
        raise ValueError(
            f"cache: expected the dtype of the model's rows, {dtype}, or {torch.float8_e4m3fn}, "
            f"got {cache.kv_cache.dtype}"
        )
