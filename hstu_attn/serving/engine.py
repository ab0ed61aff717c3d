"""An engine that scores for many users at once, on keys and values that it keeps."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..cached import CachedRows
from .batch import Batch, Plan, Request, pack
from .cache import CacheStep, PagedKVCache
from .events import ACTION, ITEM, LATEST_TIME, TIME, EventStore, Int64s, User, event_rows
from .graphs import GraphBuckets, StackGraphs, StepLimits
from .model import CatalogueModel, ServedModel, check_model, row_dtype
from .stats import Counters, EngineStats

__all__ = [
    "Engine",
    "EngineClosedError",
    "NoHistoryError",
    "OverloadedError",
    "Recommendation",
]

Ints = Sequence[int] | np.ndarray[Any, Any] | Tensor
Events = Sequence[tuple[int, ...]] | np.ndarray[Any, Any]
Answer = TypeVar("Answer")


class OverloadedError(RuntimeError):
    """The queue is full; the request was not accepted, and may be made again later."""


class EngineClosedError(RuntimeError):
    """The engine has been closed; the request was not served."""


class NoHistoryError(ValueError):
    """A retrieval model was asked for a user without any event."""


class Recommendation(NamedTuple):
    """The best items of the catalogue, best first: int64 `(k,)`, and their scores `(k,)`."""

    items: Tensor
    scores: Tensor


class Engine:
    """Serves a model from several threads, computing only what a user's cached rows lack.

    A request brings a user's new events and asks for scores after them. A worker thread takes
    waiting requests together, in their order of arrival and never two of one user, so that each
    sees the events of those before it. The answer is that of the model on the user's whole history
    (at most the latest `store.max_events` events, see `EventStore`), up to rounding.

    What is cached is each event's keys and values, but the last event is computed again by every
    request: its state is what candidates are compared with, and a relative bias by time lets it
    depend on when the user is asked or acts next. Evicted users are recomputed from their events.

    A request that fails, times out or is cancelled has no effect: its events are not stored. If a
    batch fails, its halves are computed apart, so that a request fails alone.

    Args:
        model: its layers must be cacheable (`check_cacheable`) and in evaluation mode.
        cache: for this engine alone, and cleared. It has the model's number of layers, heads and
            head dim and the dtype of its rows, is on the model's device, and holds at least one
            history of `max_events`.
        store: the users' events; None is an `EventStore` for 100000 users.
        max_batch_size: requests computed together, at most.
        max_wait: how long a request may wait for others to join it, in seconds.
        max_queue: requests that may wait.
        max_candidates: candidates of a request.
        graphs: whether the stack's steps are captured in CUDA graphs and replayed, which saves the
            host what launching each kernel takes; `GraphBuckets` says for which shapes. None means
            on a GPU. Batches are padded to the shapes, so scores may be rounded differently; with
            True on a CPU they are padded likewise, which only costs time.

    Raises:
        ValueError: for a model, a cache or a store that do not fit, or a size out of range.

    Example:
        >>> with Engine(model, cache) as engine:
        ...     scores = engine.score(7, [Event(item=3, time=100)], candidates=[1, 2, 5])
        ...     best = engine.recommend(7, [], k=10)
    """

    def __init__(
        self,
        model: ServedModel,
        cache: PagedKVCache,
        *,
        store: EventStore | None = None,
        max_batch_size: int = 32,
        max_wait: float = 0.002,
        max_queue: int = 1024,
        max_candidates: int = 1024,
        graphs: bool | GraphBuckets | None = None,
    ) -> None:
        if store is None:
            store = EventStore(100_000, model.max_history)
        sizes = {"max_batch_size": max_batch_size, "max_queue": max_queue}
        for name, size in {**sizes, "max_candidates": max_candidates}.items():
            if size < 1:
                raise ValueError(f"{name}: expected a positive count, got {size}")
        if not 0 <= max_wait < float("inf"):
            raise ValueError(f"max_wait: expected seconds from 0 up, got {max_wait}")
        _check_model(model, cache, store)
        self.model = model
        self.max_batch_size = max_batch_size
        self.max_wait = max_wait
        self.max_queue = max_queue
        self.max_candidates = max_candidates
        self._device = cache.kv_cache.device
        self._cache = cache
        self._cache.clear()
        self._store = store  # the worker's alone, as is the cache
        self._graphs = self._make_graphs(graphs)
        self._counters = Counters()
        self._queue: deque[Request] = deque()
        self._closed = False
        self._changed = threading.Condition()  # of the queue, or of whether the engine is closed
        self._worker = threading.Thread(target=self._work, name="hstu_attn engine", daemon=True)
        self._worker.start()

    # --- what callers do -------------------------------------------------------------------------

    def score(
        self,
        user: User,
        new_events: Events,
        candidates: Ints,
        *,
        at: int | None = None,
        timeout: float | None = None,
    ) -> Tensor:
        """Stores a user's new events and scores candidates after them.

        Args:
            user: an unknown one has no events yet.
            new_events: `(n, 3)` integers, or `Event`s, oldest first: item, time and action, which
                may be left out.
            candidates: `(m,)` items; may be none.
            at: the time at which the model is asked; None is that of the user's last event.
            timeout: seconds to wait for the answer; None is for ever.

        Returns:
            `(m,)` on the CPU, of the dtype of the model's scores.

        Raises:
            ValueError: for items, actions, times or counts out of range, or events or candidates
                that are not integers.
            NoHistoryError: a ValueError: no event of the user, and candidates are not rows.
            OverloadedError: if too many requests wait; at once.
            TimeoutError: after `timeout`.
            EngineClosedError: if the engine is or gets closed.
            OutOfPagesError: if the cache does not evict, and is full.
            FloatingPointError: if a score is not finite.
        """
        return _result(self.submit_score(user, new_events, candidates, at=at), timeout)

    def recommend(
        self,
        user: User,
        new_events: Events,
        k: int,
        *,
        exclude_seen: bool = True,
        at: int | None = None,
        timeout: float | None = None,
    ) -> Recommendation:
        """Stores a user's new events and finds the best items of the catalogue after them.

        Args:
            k: how many items; fewer where the catalogue has no more.
            exclude_seen: whether items in the user's history (what the engine keeps of it) are
                left out.

        The other arguments and the errors are those of `score`; a model that is no `CatalogueModel`
        is a ValueError, too.
        """
        future = self.submit_recommend(user, new_events, k, exclude_seen=exclude_seen, at=at)
        return _result(future, timeout)

    def submit_score(
        self, user: User, new_events: Events, candidates: Ints, *, at: int | None = None
    ) -> Future[Tensor]:
        """Starts `score` and returns its future.

        Errors of the arguments and OverloadedError are raised at once, all others by the future.
        The future can be cancelled until the answer is there; a cancelled request has no effect.
        """
        listed = np.asarray(candidates)
        if not listed.size:
            listed = listed.astype(np.int64)
        if listed.ndim != 1 or listed.dtype.kind not in "iu":
            raise ValueError(
                f"candidates: expected integers of one dimension, got {listed.dtype} of shape "
                f"{listed.shape}"
            )
        if len(listed) > self.max_candidates:
            raise ValueError(
                f"candidates: expected at most {self.max_candidates}, got {len(listed)}"
            )
        _check_range("candidates", "items", listed, self.model.num_items)
        return self._submit(user, new_events, listed.astype(np.int64), 0, False, at)

    def submit_recommend(
        self,
        user: User,
        new_events: Events,
        k: int,
        *,
        exclude_seen: bool = True,
        at: int | None = None,
    ) -> Future[Recommendation]:
        """Starts `recommend` and returns its future, as `submit_score` does for `score`."""
        if not isinstance(self.model, CatalogueModel):
            raise ValueError(
                "model: expected one that scores its whole catalogue (score_catalogue), got "
                f"{type(self.model).__name__}"
            )
        if k < 1:
            raise ValueError(f"k: expected a positive count, got {k}")
        none = np.empty(0, np.int64)
        return self._submit(user, new_events, none, k, exclude_seen, at)

    def stats(self) -> EngineStats:
        """Returns what has been done, at one moment."""
        with self._changed:
            queued = len(self._queue)
        return self._counters.snapshot(queued, users=len(self._store))

    def close(self, *, finish: bool = True) -> None:
        """Accepts no more requests, and returns when the waiting ones are served.

        Without `finish` these fail with EngineClosedError instead. A second call does nothing.
        """
        with self._changed:
            self._closed = True
            dropped = [] if finish else [*self._queue]
            if not finish:
                self._queue.clear()
            self._changed.notify_all()
        for request in dropped:
            self._fail(request, EngineClosedError("the engine was closed before this was served"))
        self._worker.join()

    @property
    def closed(self) -> bool:
        """Whether the engine accepts no more requests."""
        return self._closed

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @torch.no_grad()
    def _make_graphs(self, graphs: bool | GraphBuckets | None) -> StackGraphs | None:
        if graphs is None:
            graphs = self._device.type == "cuda"
        if graphs is False:
            return None
        model = self.model
        return StackGraphs(
            model.stack,
            self._cache.kv_cache,
            GraphBuckets() if graphs is True else graphs,
            StepLimits(
                self.max_batch_size,
                self._store.max_events,
                self.max_candidates if model.candidates_are_rows else 0,
            ),
            reads_times=model.reads_times,
            with_targets=model.candidates_are_rows,
            kv_scales=self._cache.kv_scales,
            dtype=row_dtype(model),
        )

    def _submit(
        self,
        user: User,
        new_events: Events,
        candidates: Int64s,
        top_k: int,
        exclude_seen: bool,
        at: int | None,
    ) -> Future[Any]:
        if not isinstance(user, (int, str)):
            raise ValueError(f"user: expected an int or a str, got {type(user).__name__}")
        events = event_rows(new_events, "new_events")
        for column, what, limit in (
            (ITEM, "items", self.model.num_items),
            (TIME, "times", LATEST_TIME),
            (ACTION, "actions", self.model.num_actions),
        ):
            _check_range("new_events", what, events[:, column], limit)
        if at is not None and not (isinstance(at, int) and 0 <= at < LATEST_TIME):
            raise ValueError(f"at: expected None or a time from 0 to {LATEST_TIME - 1}, got {at!r}")
        now = time.monotonic()
        request = Request(user, events, candidates, top_k, exclude_seen, at, now)
        with self._changed:
            if self._closed:
                raise EngineClosedError("the engine is closed")
            if len(self._queue) >= self.max_queue:
                self._queue = deque(r for r in self._queue if not self._dropped(r))
            if len(self._queue) >= self.max_queue:
                with self._counters.change() as stats:
                    stats.rejected += 1
                raise OverloadedError(
                    f"the engine is overloaded: expected fewer than {self.max_queue} waiting "
                    f"requests (max_queue), got {len(self._queue)}"
                )
            with self._counters.change() as stats:
                stats.requests += 1
            self._queue.append(request)
            self._changed.notify_all()
        return request.future

    # --- what the worker does --------------------------------------------------------------------

    def _work(self) -> None:
        with torch.no_grad():
            while batch := self._next_batch():
                self._serve(batch)

    def _next_batch(self) -> list[Request]:
        """Returns requests of different users, oldest first; none once the engine is closed."""
        batch: list[Request] = []
        with self._changed:
            while not batch:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    break
                latest = self._queue[0].submitted + self.max_wait
                self._changed.wait_for(
                    lambda: len(self._queue) >= self.max_batch_size or self._closed,
                    timeout=max(0.0, latest - time.monotonic()),
                )
                batch = self._take()
        return batch

    def _take(self) -> list[Request]:
        batch: list[Request] = []
        waiting: deque[Request] = deque()
        users: set[User] = set()
        for request in self._queue:
            if self._dropped(request):
                continue
            fits = len(batch) < self.max_batch_size and request.user not in users
            (batch if fits else waiting).append(request)
            users.add(request.user)
        self._queue = waiting
        return batch

    def _dropped(self, request: Request) -> bool:
        """Returns whether a waiting request has been cancelled; if so, counts it."""
        if not request.future.cancelled():
            return False
        request.future.set_running_or_notify_cancel()
        with self._counters.change() as stats:
            stats.cancelled += 1
        return True

    def _serve(self, requests: list[Request]) -> None:
        try:
            self._serve_plans(self._plan(requests))
        except Exception as error:  # none may wait for ever, nor find rows that have no history
            self._cache.clear()
            for request in requests:
                if not request.future.done():
                    self._fail(request, error)

    def _plan(self, requests: list[Request]) -> list[Plan]:
        plans = []
        for request in requests:
            before = self._store.history(request.user)
            after = self._store.extended(before, request.events)
            if len(after.events) or self.model.candidates_are_rows:
                plans.append(Plan(request, before, after))
            else:
                self._fail(
                    request,
                    NoHistoryError(f"new_events: expected some of the new user {request.user!r}"),
                )
        return plans

    def _serve_plans(self, plans: list[Plan]) -> None:
        """Serves plans together or, if that fails, for example with OutOfPagesError, in halves."""
        if not plans:
            return
        try:
            answers = self._compute(plans)
        except Exception as error:
            if len(plans) == 1:
                self._fail(plans[0].request, error)
            else:
                half = len(plans) // 2
                self._serve_plans(plans[:half])
                self._serve_plans(plans[half:])
        else:
            for plan, answer in zip(plans, answers, strict=True):
                self._finish(plan, answer)

    def _compute(self, plans: list[Plan]) -> list[Tensor | Recommendation | None]:
        keys = [plan.after.key for plan in plans]
        cached = self._cache.lookup(keys).tolist()
        kept = [max(count - 1, 0) for count in cached]
        lengths = [len(plan.after.events) for plan in plans]
        new = [length - count for length, count in zip(lengths, cached, strict=True)]
        last = [count - first for count, first in zip(cached, kept, strict=True)]
        with self._cache.step(keys, new, cached_lens=cached, rewritten=last) as step:
            batch = pack(
                plans,
                kept,
                self._device,
                candidates_are_rows=self.model.candidates_are_rows,
                reads_times=self.model.reads_times,
            )
            states, by_graph = self._states(step, batch)
            answers = self._answers(plans, batch, states)
        computed = sum(lengths) - sum(kept)
        first_time = sum(
            min(len(plan.request.events), length)
            for plan, length in zip(plans, lengths, strict=True)
        )
        with self._counters.change() as stats:
            stats.batches += 1
            stats.graph_batches += by_graph
            stats.batch_size.add(len(plans))
            stats.hit_tokens += sum(kept)
            stats.new_tokens += first_time
            stats.recomputed_tokens += computed - first_time
        return answers

    def _states(self, step: CacheStep, batch: Batch) -> tuple[Tensor, bool]:
        """Returns the stack's output `(total, embedding_dim)`, and whether a graph computed it.

        There may be more rows after the output's. The output of a graph stays valid until the next
        batch.
        """
        x = self.model.embed(batch.rows)
        if self._graphs is not None:
            states = self._graphs.run(step, batch, x)
            if states is not None:
                return states, True
        seq_offsets, num_targets = step.upload(batch.seq_offsets, batch.num_targets)
        rows = CachedRows(
            step,
            seq_offsets,
            batch.max_seq_len,
            batch.max_key_len,
            num_targets if self.model.candidates_are_rows else None,
        )
        times = (batch.key_times, batch.row_times) if self.model.reads_times else ()
        return self.model.stack.forward_cached(x, rows, *times), False

    def _answers(
        self, plans: list[Plan], batch: Batch, states: Tensor
    ) -> list[Tensor | Recommendation | None]:
        """Returns the answers on the CPU, and None for those with a score that is not finite.

        Copying them waits for the device, so anything that fails there has failed by then.
        """
        scores = self.model.score(states[batch.state_rows], batch.candidates).cpu()
        listed = scores.split([len(plan.request.candidates) for plan in plans])
        answers: list[Tensor | Recommendation | None] = [*listed]
        if not scores.isfinite().all():
            answers = [found if found.isfinite().all() else None for found in listed]
        asking = [number for number, plan in enumerate(plans) if plan.request.top_k]
        if asking and isinstance(self.model, CatalogueModel):
            chosen = torch.tensor(asking, device=self._device)
            catalogue = self.model.score_catalogue(states[batch.last_rows[chosen]])
            best = _best(catalogue, [plans[number] for number in asking])
            for number, recommendation in zip(asking, best, strict=True):
                finite = recommendation.scores.isfinite().all()
                answers[number] = recommendation if finite else None
        return answers

    def _finish(self, plan: Plan, answer: Tensor | Recommendation | None) -> None:
        """Stores the events and answers; if the answer is no longer wanted, forgets the rows."""
        request = plan.request
        if answer is None:
            self._cache.free([plan.after.key])
            self._fail(request, FloatingPointError("scores: expected finite ones, got NaN or Inf"))
            return
        wanted = request.future.set_running_or_notify_cancel()  # else cancelled; now it cannot be
        unused = self._store.put(request.user, plan.after) if wanted else [plan.after.key]
        if unused:
            self._cache.free(unused)
        with self._counters.change() as stats:
            if wanted:
                stats.completed += 1
                stats.latency.add(time.monotonic() - request.submitted)
            else:
                stats.cancelled += 1
        if wanted:
            request.future.set_result(answer)

    def _fail(self, request: Request, error: Exception) -> None:
        future = request.future
        wanted = future.running() or future.set_running_or_notify_cancel()
        with self._counters.change() as stats:
            if wanted:
                stats.failed += 1
            else:
                stats.cancelled += 1
        if wanted:
            future.set_exception(error)


def _result(future: Future[Answer], timeout: float | None) -> Answer:
    try:
        return future.result(timeout)
    except concurrent.futures.TimeoutError:
        if future.cancel():
            raise TimeoutError(f"timeout: expected an answer within {timeout} s") from None
        return future.result()  # it came at the last moment


def _best(catalogue: Tensor, plans: list[Plan]) -> list[Recommendation]:
    """Returns the best items of each row of scores `(len(plans), num_items)`."""
    if any(plan.request.exclude_seen for plan in plans):
        seen = [
            plan.after.events[:, ITEM] if plan.request.exclude_seen else np.empty(0, np.int64)
            for plan in plans
        ]
        rows = np.repeat(np.arange(len(plans)), [len(items) for items in seen])
        indices = torch.from_numpy(np.stack([rows, np.concatenate(seen)])).to(catalogue.device)
        catalogue = catalogue.index_put(
            tuple(indices), torch.tensor(-torch.inf, dtype=catalogue.dtype, device=catalogue.device)
        )
    most = min(max(plan.request.top_k for plan in plans), catalogue.shape[1])
    best = catalogue.topk(most)
    recommendations = []
    for plan, scores, items in zip(plans, best.values.cpu(), best.indices.cpu(), strict=True):
        unseen = scores[: plan.request.top_k] != -torch.inf
        count = int(unseen.sum())
        recommendations.append(Recommendation(items[:count], scores[:count]))
    return recommendations


# --- checks --------------------------------------------------------------------------------------


def _check_range(name: str, what: str, values: np.ndarray[Any, Any], limit: int) -> None:
    wrong = np.flatnonzero((values < 0) | (values >= limit))
    if len(wrong):
        raise ValueError(
            f"{name}: expected {what} from 0 to {limit - 1}, got {values[wrong[0]]} at {wrong[0]}"
        )


def _check_model(model: ServedModel, cache: PagedKVCache, store: EventStore) -> None:
    if store.max_events > model.max_history:
        raise ValueError(
            f"store: expected max_events of at most the model's max_history = {model.max_history}, "
            f"got {store.max_events}"
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
