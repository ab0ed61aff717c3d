"""An engine that scores for many users at once, on keys and values that it keeps."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ..cached import CachedRows
from .answers import Recommendation, best_items, deadline_after, finite_or_none, result_of
from .batch import Batch, Plan, Request, pack, whole_requests
from .cache import CacheStep, PagedKVCache
from .checks import check_fit, check_range
from .errors import DeadlineError, EngineClosedError, NoHistoryError, OverloadedError
from .events import ACTION, ITEM, LATEST_TIME, TIME, EventStore, Int64s, User, event_rows
from .fair_queue import FairQueue
from .graphs import GraphBuckets, StackGraphs, StepLimits
from .model import CatalogueModel, ServedModel, UncachedModel, row_dtype
from .stats import Counters, EngineStats
from .tracing import current_span, record_spans

__all__ = ["Engine"]

Ints = Sequence[int] | np.ndarray[Any, Any] | Tensor
Events = Sequence[tuple[int, ...]] | np.ndarray[Any, Any]


class Engine:
    """Serves a model from several threads, computing only what a user's cached rows lack.

    A request brings a user's new events and asks for scores after them. A worker thread takes
    waiting requests together, never two of one user, and a user's in their order of arrival, so
    that each sees the events of those before it. Clients take turns, and so do the users of each.
    The answer is that of the model on the user's whole history
    (at most the latest `store.max_events` events, see `EventStore`), up to rounding.

    What is cached is each event's keys and values, but the last event is computed again by every
    request: its state is what candidates are compared with, and a relative bias by time lets it
    depend on when the user is asked or acts next. Evicted users are recomputed from their events.

    A request that fails, times out or is cancelled has no effect: its events are not stored. One
    whose deadline passes while it waits is not computed. If the queue is full, the client with most
    requests in it gives way to one with fewer, and so do users; other requests are refused. If a
    batch fails, its halves are computed apart, so that a request fails alone.

    Args:
        model: its layers must be cacheable (`check_cacheable`) and in evaluation mode. An
            `UncachedModel` computes each request whole.
        cache: for this engine alone, and cleared; None with an `UncachedModel`. It has the model's
            number of layers, heads and head dim and the dtype of its rows, is on the model's
            device, and holds at least one history of `max_events`.
        store: the users' events; None is an `EventStore` for 100000 users. With an `UncachedModel`
            there is no cache to spare, so its `drop` is 0 then.
        max_batch_size: requests computed together, at most.
        max_wait: how long a request may wait for others to join it, in seconds.
        max_queue: requests that may wait.
        max_queue_seconds: a request is refused if it would wait for longer, as far as is known
            from what waits and how long the latest batches took.
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
        model: ServedModel | UncachedModel,
        cache: PagedKVCache | None,
        *,
        store: EventStore | None = None,
        max_batch_size: int = 32,
        max_wait: float = 0.002,
        max_queue: int = 1024,
        max_queue_seconds: float = math.inf,
        max_candidates: int = 1024,
        graphs: bool | GraphBuckets | None = None,
    ) -> None:
        if store is None:
            store = EventStore(100_000, model.max_history, 0 if cache is None else None)
        sizes = {"max_batch_size": max_batch_size, "max_queue": max_queue}
        for name, size in {**sizes, "max_candidates": max_candidates}.items():
            if size < 1:
                raise ValueError(f"{name}: expected a positive count, got {size}")
        if not 0 <= max_wait < float("inf"):
            raise ValueError(f"max_wait: expected seconds from 0 up, got {max_wait}")
        if not max_queue_seconds > 0:
            raise ValueError(
                f"max_queue_seconds: expected a positive number, got {max_queue_seconds}"
            )
        check_fit(model, cache, store)
        self.model = model
        self.max_batch_size = max_batch_size
        self.max_wait = max_wait
        self.max_queue = max_queue
        self.max_candidates = max_candidates
        self._cache = cache
        if cache is not None:
            cache.clear()
        self._store = store  # the worker's alone, as is the cache
        self._graphs = self._make_graphs(graphs)
        self._counters = Counters()
        self._queue = FairQueue(max_queue, max_batch_size, max_queue_seconds)
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
        client: str = "",
        request_id: str | None = None,
    ) -> Tensor:
        """Stores a user's new events and scores candidates after them.

        Args:
            user: an unknown one has no events yet.
            new_events: `(n, 3)` integers, or `Event`s, oldest first: item, time and action, which
                may be left out.
            candidates: `(m,)` items; may be none.
            at: the time at which the model is asked; None is that of the user's last event.
            timeout: seconds to wait for the answer; None is for ever.
            client: on whose behalf, for a fair share of the queue.
            request_id: the same for each attempt to make this request.

        Returns:
            `(m,)` on the CPU, of the dtype of the model's scores.

        Raises:
            ValueError: for items, actions, times or counts out of range, or events or candidates
                that are not integers.
            NoHistoryError: a ValueError: no event of the user, and candidates are not rows.
            OverloadedError: if too many requests wait, or so many that the answer would come after
                `timeout`; mostly at once.
            TimeoutError: after `timeout`.
            EngineClosedError: if the engine is or gets closed.
            OutOfPagesError: if the cache does not evict, and is full.
            FloatingPointError: if a score is not finite.
        """
        deadline = deadline_after(timeout)
        future = self.submit_score(
            user,
            new_events,
            candidates,
            at=at,
            client=client,
            deadline=deadline,
            request_id=request_id,
        )
        return result_of(future, timeout)

    def recommend(
        self,
        user: User,
        new_events: Events,
        k: int,
        *,
        exclude_seen: bool = True,
        at: int | None = None,
        timeout: float | None = None,
        client: str = "",
        request_id: str | None = None,
    ) -> Recommendation:
        """Stores a user's new events and finds the best items of the catalogue after them.

        Args:
            k: how many items; fewer where the catalogue has no more.
            exclude_seen: whether items in the user's history (what the engine keeps of it) are
                left out.

        The other arguments and the errors are those of `score`; a model that is no `CatalogueModel`
        is a ValueError, too.
        """
        deadline = deadline_after(timeout)
        future = self.submit_recommend(
            user,
            new_events,
            k,
            exclude_seen=exclude_seen,
            at=at,
            client=client,
            deadline=deadline,
            request_id=request_id,
        )
        return result_of(future, timeout)

    def submit_score(
        self,
        user: User,
        new_events: Events,
        candidates: Ints,
        *,
        at: int | None = None,
        client: str = "",
        deadline: float = math.inf,
        request_id: str | None = None,
    ) -> Future[Tensor]:
        """Starts `score` and returns its future.

        Errors of the arguments are raised at once, and so are OverloadedError and DeadlineError
        where that is known; all others by the future. The future can be cancelled until the answer
        is there; a cancelled request has no effect. After `deadline`, on the clock of
        `time.monotonic`, a request that still waits is not computed: its future raises
        DeadlineError.
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
        check_range("candidates", "items", listed, self.model.num_items)
        asked = listed.astype(np.int64), 0, False, at
        return self._submit(user, new_events, *asked, client, deadline, request_id)

    def submit_recommend(
        self,
        user: User,
        new_events: Events,
        k: int,
        *,
        exclude_seen: bool = True,
        at: int | None = None,
        client: str = "",
        deadline: float = math.inf,
        request_id: str | None = None,
    ) -> Future[Recommendation]:
        """Starts `recommend` and returns its future, as `submit_score` does for `score`."""
        if not isinstance(self.model, CatalogueModel):
            raise ValueError(
                "model: expected one that scores its whole catalogue (score_catalogue), got "
                f"{type(self.model).__name__}"
            )
        if k < 1:
            raise ValueError(f"k: expected a positive count, got {k}")
        asked = np.empty(0, np.int64), k, exclude_seen, at
        return self._submit(user, new_events, *asked, client, deadline, request_id)

    def stats(self) -> EngineStats:
        """Returns what has been done, at one moment."""
        now = time.monotonic()
        with self._changed:
            queued = len(self._queue)
            backlog = self._queue.backlog(now)
            started = self._queue.started
        return self._counters.snapshot(
            queued=queued,
            backlog=backlog,
            running=0.0 if started is None else now - started,
            users=len(self._store),
        )

    def close(self, *, finish: bool = True) -> None:
        """Accepts no more requests, and returns when the waiting ones are served.

        Without `finish` these fail with EngineClosedError instead. A second call does nothing.
        """
        with self._changed:
            self._closed = True
            dropped = [] if finish else self._queue.clear()
            self._changed.notify_all()
        for request in dropped:
            self._fail(request, EngineClosedError("the engine was closed before this was served"))
        self._worker.join()

    @property
    def closed(self) -> bool:
        """Whether the engine accepts no more requests."""
        return self._closed

    @property
    def alive(self) -> bool:
        """Whether the thread that computes lives as it should: until the engine is closed."""
        return self._closed or self._worker.is_alive()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @torch.no_grad()
    def _make_graphs(self, graphs: bool | GraphBuckets | None) -> StackGraphs | None:
        if graphs is None:
            graphs = self._cache is not None and self._cache.kv_cache.is_cuda
        model = self.model
        if graphs is False or self._cache is None or isinstance(model, UncachedModel):
            return None
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
        client: str,
        deadline: float,
        request_id: str | None,
    ) -> Future[Any]:
        if not isinstance(user, (int, str)):
            raise ValueError(f"user: expected an int or a str, got {type(user).__name__}")
        events = event_rows(new_events, "new_events")
        for column, what, limit in (
            (ITEM, "items", self.model.num_items),
            (TIME, "times", LATEST_TIME),
            (ACTION, "actions", self.model.num_actions),
        ):
            check_range("new_events", what, events[:, column], limit)
        if at is not None and not (isinstance(at, int) and 0 <= at < LATEST_TIME):
            raise ValueError(f"at: expected None or a time from 0 to {LATEST_TIME - 1}, got {at!r}")
        now = time.monotonic()
        asked = user, events, candidates, top_k, exclude_seen, at, now
        request = Request(*asked, client, deadline, request_id, current_span())
        with self._changed:
            if self._closed:
                raise EngineClosedError("the engine is closed")
            if deadline <= now:
                with self._counters.change() as stats:
                    stats.requests += 1
                    stats.expired += 1
                raise DeadlineError("deadline: expected a time to come, got one that has passed")
            size = len(self._queue)
            try:
                displaced = self._queue.put(request, now, self._dropped)
            except OverloadedError:
                with self._counters.change() as stats:
                    stats.rejected += size >= self.max_queue
                    stats.shed += size < self.max_queue
                raise
            with self._counters.change() as stats:
                stats.requests += 1
            self._changed.notify_all()
        if displaced is not None:
            self._displace(displaced)
        return request.future

    # --- what the worker does --------------------------------------------------------------------

    def _work(self) -> None:
        with torch.no_grad():
            while batch := self._next_batch():
                self._serve(batch)

    def _next_batch(self) -> list[Request]:
        """Returns requests of different users; none once the engine is closed and all are served.

        Those that came before are finished, by which the queue measures how long a batch takes.
        """
        batch: list[Request] = []
        with self._changed:
            self._queue.finish(time.monotonic())
            while not batch:
                self._changed.wait_for(lambda: len(self._queue) or self._closed)
                if not len(self._queue):
                    break
                latest = self._queue.oldest + self.max_wait
                self._changed.wait_for(
                    lambda: len(self._queue) >= self.max_batch_size or self._closed,
                    timeout=max(0.0, latest - time.monotonic()),
                )
                batch = self._queue.take(time.monotonic(), self._dropped)
        return batch

    def _dropped(self, request: Request) -> bool:
        """Returns whether a waiting request need not be served any more; if so, ends it."""
        future = request.future
        late = time.monotonic() >= request.deadline
        if not (late or future.cancelled()):
            return False
        with self._counters.change() as stats:
            if late:
                stats.expired += 1
            else:
                stats.cancelled += 1
        if future.set_running_or_notify_cancel():
            future.set_exception(DeadlineError("deadline: it passed while the request waited"))
        return True

    def _displace(self, request: Request) -> None:
        """Ends a request that gave way to another."""
        wanted = request.future.set_running_or_notify_cancel()
        with self._counters.change() as stats:
            if wanted:
                stats.displaced += 1
            else:
                stats.cancelled += 1
        if wanted:
            request.future.set_exception(
                OverloadedError(
                    "the engine is overloaded: this request gave way to one of a client or user "
                    f"with fewer of the {self.max_queue} that may wait (max_queue)"
                )
            )

    def _serve(self, requests: list[Request]) -> None:
        try:
            taken = time.monotonic()
            self._serve_plans(self._plan(requests), taken)
        except Exception as error:  # none may wait for ever, nor find rows that have no history
            if self._cache is not None:
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

    def _serve_plans(self, plans: list[Plan], taken: float) -> None:
        """Serves plans together or, if that fails, for example with OutOfPagesError, in halves.

        `taken` is when they were taken from the queue.
        """
        if not plans:
            return
        started = time.monotonic()
        try:
            answers = self._compute(plans)
        except Exception as error:
            if len(plans) == 1:
                self._fail(plans[0].request, error)
            else:
                half = len(plans) // 2
                self._serve_plans(plans[:half], taken)
                self._serve_plans(plans[half:], taken)
        else:
            computed = time.monotonic()
            with self._counters.change() as stats:
                stats.step_time.add(computed - started)
                for plan in plans:
                    stats.queue_time.add(taken - plan.request.submitted)
            for plan, answer in zip(plans, answers, strict=True):
                self._finish(plan, answer)
            record_spans((plan.request for plan in plans), taken, started, computed, len(plans))

    def _compute(self, plans: list[Plan]) -> list[Tensor | Recommendation | None]:
        if self._cache is None:
            return self._compute_whole(plans)
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
                self._cache.kv_cache.device,
                candidates_are_rows=self.model.candidates_are_rows,
                reads_times=cast(ServedModel, self.model).reads_times,
            )
            states, by_graph = self._states(step, batch)
            answers = self._answers(plans, batch, states)
        self._count_batch(plans, hits=sum(kept), by_graph=by_graph)
        return answers

    def _compute_whole(self, plans: list[Plan]) -> list[Tensor | Recommendation | None]:
        model = cast(UncachedModel, self.model)
        scores = model.score_requests(whole_requests(plans)).cpu()
        self._count_batch(plans, hits=0, by_graph=False)
        return finite_or_none(scores, plans)

    def _count_batch(self, plans: list[Plan], *, hits: int, by_graph: bool) -> None:
        """Counts a batch, in which `hits` events were not computed."""
        lengths = [len(plan.after.events) for plan in plans]
        first_time = sum(
            min(len(plan.request.events), length)
            for plan, length in zip(plans, lengths, strict=True)
        )
        with self._counters.change() as stats:
            stats.batches += 1
            stats.graph_batches += by_graph
            stats.batch_size.add(len(plans))
            stats.hit_tokens += hits
            stats.new_tokens += first_time
            stats.recomputed_tokens += sum(lengths) - hits - first_time

    def _states(self, step: CacheStep, batch: Batch) -> tuple[Tensor, bool]:
        """Returns the stack's output `(total, embedding_dim)`, and whether a graph computed it.

        There may be more rows after the output's. The output of a graph stays valid until the next
        batch.
        """
        model = cast(ServedModel, self.model)
        x = model.embed(batch.rows)
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
        times = (batch.key_times, batch.row_times) if model.reads_times else ()
        return model.stack.forward_cached(x, rows, *times), False

    def _answers(
        self, plans: list[Plan], batch: Batch, states: Tensor
    ) -> list[Tensor | Recommendation | None]:
        """Returns the answers on the CPU, and None for those with a score that is not finite.

        Copying them waits for the device, so anything that fails there has failed by then.
        """
        scores = (
            cast(ServedModel, self.model).score(states[batch.state_rows], batch.candidates).cpu()
        )
        answers = finite_or_none(scores, plans)
        asking = [number for number, plan in enumerate(plans) if plan.request.top_k]
        if asking and isinstance(self.model, CatalogueModel):
            chosen = torch.tensor(asking, device=states.device)
            catalogue = self.model.score_catalogue(states[batch.last_rows[chosen]])
            best = best_items(catalogue, [plans[number] for number in asking])
            for number, recommendation in zip(asking, best, strict=True):
                finite = recommendation.scores.isfinite().all()
                answers[number] = recommendation if finite else None
        return answers

    def _finish(self, plan: Plan, answer: Tensor | Recommendation | None) -> None:
        """Stores the events and answers; if the answer is no longer wanted, forgets the rows."""
        request = plan.request
        if answer is None:
            self._forget([plan.after.key])
            self._fail(request, FloatingPointError("scores: expected finite ones, got NaN or Inf"))
            return
        wanted = request.future.set_running_or_notify_cancel()  # else cancelled; now it cannot be
        unused = self._store.put(request.user, plan.after) if wanted else [plan.after.key]
        self._forget(unused)
        with self._counters.change() as stats:
            if wanted:
                stats.completed += 1
                stats.latency.add(time.monotonic() - request.submitted)
            else:
                stats.cancelled += 1
        if wanted:
            request.future.set_result(answer)

    def _forget(self, keys: list[int]) -> None:
        """Frees the rows of histories that are not used any more."""
        if keys and self._cache is not None:
            self._cache.free(keys)

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
