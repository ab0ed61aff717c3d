"""An engine that scores for many users at once, on keys and values that it keeps."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .answers import Answers, RequestOptions, deadline_after, result_of
from .batch import Plan, Request
from .cache import PagedKVCache
from .commits import LOG, Commits
from .errors import EngineClosedError, NoHistoryError
from .events import (
    EventOrderError,
    EventStore,
    Int64s,
    MemoryStore,
    StoreError,
    User,
    check_at,
    check_user,
    checked_candidates,
    checked_events,
)
from .fair_queue import FairQueue
from .graphs import GraphBuckets, StepLimits
from .histories import Histories
from .jobs import Jobs
from .model import ServedModel, UncachedModel
from .scoring import Recommendation, Scorer, check_fit
from .stats import Counters, EngineStats
from .tracing import current_span, record_spans
from .versions import Probe, check_successor, short_turns, with_pauses
from .waiting import Waiting

__all__ = ["Engine"]

if TYPE_CHECKING:
    from typing_extensions import Unpack

Ints = Sequence[int] | np.ndarray[Any, Any] | Tensor
Events = Sequence[tuple[int, ...]] | np.ndarray[Any, Any]


class Engine:
    """Serves a model from several threads, computing only what a user's cached rows lack.

    A request brings a user's new events and asks for scores after them. A worker thread takes
    waiting requests together, never two of one user, and a user's in their order of arrival, so
    that each sees the events of those before it. Clients take turns, and so do the users of each.
    The answer is that of the model on the user's whole history (at most the latest
    `store.max_events` events, see `EventStore`), up to rounding.

    What is cached is each event's keys and values, but the last event is computed again by every
    request: its state is what candidates are compared with, and a relative bias by time lets it
    depend on when the user is asked or acts next. Evicted users are recomputed from their events.

    A request that fails, times out or is cancelled has no effect: its events are not stored. One
    whose deadline passes while it waits is not computed. If the queue is full, the latest request
    of the client with the most waiting requests is dropped in favor of a client with fewer, and
    likewise among the users of a client; other requests are refused. If a batch fails, its halves
    are computed apart, so that a request fails alone. What is answered has been stored: the events
    of a batch by one `commit` of the store, while the next batch is computed if that has no user in
    common. Where a store does not know whether it has stored a request's events, the request fails
    with a StoreError. It may be sent again: an event that is equal to one of the user's stored ones
    in item, time and action is that event.

    Args:
        model: its layers must be cacheable (`check_cacheable`) and in evaluation mode. An
            `UncachedModel` computes each request whole.
        cache: for this engine alone, and cleared; None with an `UncachedModel`. It has the model's
            number of layers, heads and head dim and the dtype of its rows, is on the model's
            device, and holds at least one history of `max_events`.
        store: the users' events; None is a `MemoryStore` for 100000 users, whose `drop` is 0 with
            an `UncachedModel`. It is not closed with the engine.
        max_batch_size: requests computed together, at most.
        max_wait: seconds that a request may wait for others; with 0, a batch has the requests that
            wait already.
        max_queue: requests that may wait.
        max_queue_seconds: a request is refused if it would wait for longer, as far as is known
            from what waits and how long the latest batches took.
        max_candidates: candidates of a request.
        graphs: whether the stack's steps are captured in CUDA graphs and replayed, which saves the
            host what launching each kernel takes; `GraphBuckets` says for which shapes. None means
            on a GPU. Batches are padded to the shapes, so scores may be rounded differently; with
            True on a CPU they are padded likewise, which only costs time.
        time_range: returns the earliest and the latest time that an event may have now, in the
            model's unit; for example `lambda: (631_152_000, int(time.time()) + 300)`, from 1990
            until in five minutes. None takes any. Stored events that are later than that are left
            out of histories while they are; a clock is wrong, or was when they came.
        skip_unknown_items: whether stored events on items from the model's `num_items` up, which an
            engine of a later model stored, are left out of histories; False fails their users.

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
        max_wait: float = 0.0,
        max_queue: int = 1024,
        max_queue_seconds: float = math.inf,
        max_candidates: int = 1024,
        graphs: bool | GraphBuckets | None = None,
        time_range: Callable[[], tuple[int, int]] | None = None,
        skip_unknown_items: bool = False,
    ) -> None:
        if store is None:
            store = MemoryStore(100_000, model.max_history, 0 if cache is None else None)
        sizes = {"max_batch_size": max_batch_size, "max_queue": max_queue}
        for name, size in {**sizes, "max_candidates": max_candidates}.items():
            if size < 1:
                raise ValueError(f"{name}: expected a positive count, got {size}")
        if not 0 <= max_wait < float("inf"):
            raise ValueError(f"max_wait: expected seconds from 0 up, got {max_wait}")
        if not max_queue_seconds > 0:
            raise ValueError(f"max_queue_seconds: expected seconds over 0, got {max_queue_seconds}")
        check_fit(model, cache, store)
        self.max_batch_size = max_batch_size
        self.max_candidates = max_candidates
        self._time_range = time_range
        self._store = store
        limits = StepLimits(max_batch_size, store.max_events, max_candidates)
        self._make_scorer = partial(Scorer, graphs=graphs, limits=limits)
        self._scorer = self._make_scorer(model, cache)  # the worker's alone, as are the histories
        self._previous: Scorer | None = None
        self._changing = threading.Lock()  # is held while a model is changed
        self._scorer.clear()
        for capture in self._scorer.captures():
            capture()
        self._histories = Histories(
            *(store, self._scorer.capacity, model.num_items, model.num_actions),
            free=lambda keys: self._scorer.free(keys),
            time_range=time_range,
            skip_unknown_items=skip_unknown_items,
        )
        self._counters = Counters()
        self._answers = answers = Answers(self._counters)
        answer = answers.give if store.waits else answers.hold  # in the thread that has stored them
        self._commits = Commits(store, answer, answers.fail, self._settle_soon)
        self._jobs = Jobs()
        queue = FairQueue(max_queue, max_batch_size, max_queue_seconds)
        self._waiting = Waiting(queue, max_wait, self._counters)
        self._closed = False
        self._changed = threading.Condition()  # guards the queue, the jobs and `_closed`
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
    ) -> Tensor:
        """Stores a user's new events and scores candidates after them.

        Args:
            user: an unknown one has no events yet.
            new_events: `(n, 3)` integers, or `Event`s, oldest first: item, time and action, which
                may be left out.
            candidates: `(m,)` items; may be none.
            at: the time at which the model is asked; None is that of the user's last event.
            timeout: seconds to wait for the answer; None is forever.
            client: the client on whose behalf it asks; clients take turns in the queue.

        Returns:
            `(m,)` on the CPU, of the dtype of the model's scores; `(m, tasks)` where it has tasks.

        Raises:
            ValueError: for items, actions, times or counts out of range, or events or candidates
                that are not integers.
            NoHistoryError: a ValueError: no event of the user, and no candidates that are rows.
            OverloadedError: if too many requests wait, or so many that the answer would come after
                `timeout`; mostly at once.
            TimeoutError: after `timeout`.
            EngineClosedError: if the engine is or gets closed.
            OutOfPagesError: if the cache does not evict, and is full.
            FloatingPointError: if a score is not finite.
            EventTimeError: a ValueError: an event's time is out of `time_range`.
            EventOrderError: a ValueError: events are not oldest first, or one is older than the
                user's last stored event, and is none of the stored ones.
            StoreError: if the store cannot be read or written.
        """
        options: RequestOptions = {"at": at, "client": client, "deadline": deadline_after(timeout)}
        return result_of(self.submit_score(user, new_events, candidates, **options), timeout)

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
    ) -> Recommendation:
        """Stores a user's new events and finds the best items of the catalog after them.

        Args:
            k: how many items; fewer where the catalog has no more.
            exclude_seen: whether items in the user's history (what the engine keeps of it) are
                left out.

        The other arguments and the errors are those of `score`; a model that is no `CatalogModel`
        is a ValueError, too.
        """
        options: RequestOptions = {"at": at, "client": client, "deadline": deadline_after(timeout)}
        future = self.submit_recommend(user, new_events, k, exclude_seen=exclude_seen, **options)
        return result_of(future, timeout)

    def submit_score(
        self, user: User, new_events: Events, candidates: Ints, **options: Unpack[RequestOptions]
    ) -> Future[Tensor]:
        """Starts `score` and returns its future.

        Errors of the arguments are raised at once, and so are OverloadedError and DeadlineError
        where that is known; all others by the future. The future can be cancelled until the answer
        is there; a cancelled request has no effect.

        Args:
            user: as in `score`, as are events and candidates.
            new_events: likewise.
            candidates: likewise.
            options: who asks, and until when, as in `RequestOptions`.
        """
        items = checked_candidates(candidates, self.model.num_items, self.max_candidates)
        return self._submit(user, new_events, items, 0, False, options)

    def submit_recommend(
        self,
        user: User,
        new_events: Events,
        k: int,
        *,
        exclude_seen: bool = True,
        **options: Unpack[RequestOptions],
    ) -> Future[Recommendation]:
        """Starts `recommend` and returns its future, as `submit_score` does for `score`."""
        if self._scorer.catalog_model is None:
            raise ValueError(
                "model: expected one that scores its whole catalog (score_catalog), got "
                f"{type(self.model).__name__}"
            )
        if k < 1:
            raise ValueError(f"k: expected a positive count, got {k}")
        return self._submit(user, new_events, np.empty(0, np.int64), k, exclude_seen, options)

    # --- what operators do -----------------------------------------------------------------------

    def swap(
        self,
        model: ServedModel | UncachedModel,
        *,
        cache: PagedKVCache | None = None,
        probe: Probe | None = None,
    ) -> None:
        """Replaces the model while requests are served, and returns when it has taken over.

        The new model is checked in the calling thread. Its graphs are captured between batches, one
        at a time, so that no request waits for more than one. It then takes over between two
        batches: each answer is of the one model or of the other, on the same events, and rows that
        the old one has cached are not used any more. The old model stays in memory, with its
        graphs, for `roll_back`.

        Args:
            model: scores the same items and actions, in evaluation mode, on the engine's device.
            cache: for the new model alone, and cleared; needed where layers, heads, head dim or
                dtype differ. None shares the memory of the served model's cache, which holds the
                keys and values of one model at a time.
            probe: what the new model must answer; None asks for finite scores.

        Raises:
            ModelCheckError: a ValueError: the model does not fit, or fails the check. The served
                model stays, and so does its cache.
            EngineClosedError: if the engine is or gets closed.
        """
        with self._changing, short_turns():
            old = self._scorer
            new_cache = old.cache if cache is None else cache
            check_successor(model, old.model, new_cache, self._store, probe)
            scorer = self._make_scorer(model, new_cache)
            with_pauses(scorer.captures(old), self._between_batches)
            self._between_batches(lambda: self._take_over(scorer, previous=old))

    def roll_back(self) -> None:
        """Lets the model of before the last `swap` take over again, as `swap` does.

        Raises:
            ValueError: if there is none: no swap, or it has been rolled back.
            EngineClosedError: if the engine is or gets closed.
        """
        with self._changing:
            previous = self._previous
            if previous is None:
                raise ValueError("model: expected one before this to roll back to, got none")
            self._between_batches(lambda: self._take_over(previous, previous=None))

    def forget(self, *users: User, stored: bool = True) -> None:
        """Deletes users' events from the store, and what is computed from them.

        The cache's pages hold nothing of them afterwards. Requests of the users that are under way
        may store events again. With `stored` False only what is computed is deleted, as when
        another process has deleted the events.

        Raises:
            StoreError: if the store cannot delete them.
            EngineClosedError: if the engine is or gets closed.
        """
        try:
            for user in users if stored else ():
                self._store.forget(user)
        finally:  # where that fails, the store may have deleted them all the same
            self._between_batches(lambda: self._drop(*users))

    def prune(self, *, before: int = 0, latest: int | None = None) -> int:
        """Deletes old events of all users, and what is computed from them, as `forget` does.

        Args:
            before: events with an earlier time are deleted.
            latest: how many events of a user stay at most; None is all others.

        Returns:
            How many users' events have been changed.

        Raises:
            ValueError: for a negative number.
            StoreError: if the store cannot delete them.
            EngineClosedError: if the engine is or gets closed.
        """
        count = 0
        try:
            for users in self._store.prune(before=before, latest=latest):
                self._between_batches(partial(self._histories.drop, *users))
                count += len(users)
        finally:
            if count:
                self._between_batches(self._drop)
        return count

    @property
    def model(self) -> ServedModel | UncachedModel:
        """The model that is served."""
        return self._scorer.model

    @property
    def store(self) -> EventStore:
        """The users' events."""
        return self._store

    def stats(self) -> EngineStats:
        """Returns what has been done, at one moment."""
        with self._changed:
            level = self._waiting.level()
        return self._counters.snapshot(**level, users=len(self._store))

    def close(self, *, finish: bool = True) -> None:
        """Accepts no more requests, and returns when the waiting ones are served.

        Without `finish` these fail with EngineClosedError instead. A second call does nothing.
        """
        with self._changed:
            self._closed = True
            dropped = [] if finish else self._waiting.queue.clear()
            self._changed.notify_all()
        for request in dropped:
            error = EngineClosedError("the engine was closed before this was served")
            self._answers.fail(request, error)
        self._worker.join()
        self._commits.close()

    @property
    def closed(self) -> bool:
        """Returns whether the engine accepts no more requests."""
        return self._closed

    @property
    def alive(self) -> bool:
        """Returns whether the computing thread runs, or has ended because the engine was closed."""
        return self._closed or self._worker.is_alive()

    def check_load(self, client: str = "") -> None:
        """Checks that a request of a client may be let in, without one: this takes less time.

        Raises:
            OverloadedError: if it would be refused whoever its user is.
        """
        with self._changed:
            self._waiting.check(client)

    def check_store(self) -> None:
        """Reads something from the store, from the calling thread.

        Raises:
            StoreError: if it cannot be read.
        """
        self._store.note("check")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _between_batches(self, job: Callable[[], object]) -> None:
        """Lets the worker do something when no batch is under way, and waits for it."""

        def settled() -> None:
            self._settle()
            job()

        with self._changed:
            if self._closed:
                raise EngineClosedError("the engine is closed")
            done = self._jobs.add(settled)
            self._changed.notify_all()
        done.result()

    def _drop(self, *users: User) -> None:
        """Forgets what is computed of users, and overwrites what the caches' pages hold of it."""
        self._histories.drop(*users)
        self._scorer.wipe(self._histories.keys())
        if self._previous is not None and self._previous.cache is not self._scorer.cache:
            self._previous.wipe([])

    def _settle_soon(self) -> None:
        with self._changed:
            self._jobs.add_alone(partial(self._settle, wait=False))
            self._changed.notify_all()

    def _take_over(self, scorer: Scorer, previous: Scorer | None) -> None:
        scorer.clear()
        self._scorer, self._previous = scorer, previous
        self._histories.capacity = scorer.capacity

    def _submit(
        self,
        user: User,
        new_events: Events,
        candidates: Int64s,
        top_k: int,
        exclude_seen: bool,
        options: RequestOptions,
    ) -> Future[Any]:
        check_user(user)
        events = checked_events(
            new_events, self.model.num_items, self.model.num_actions, self._time_range
        )
        check_at(at := options.get("at"))
        request = Request(
            *(user, events, candidates, top_k, exclude_seen, at, time.monotonic()),
            client=options.get("client", ""),
            deadline=options.get("deadline", math.inf),
            request_id=options.get("request_id"),
            context=options.get("context"),
            span=current_span(),
        )
        with self._changed:
            if self._closed:
                raise EngineClosedError("the engine is closed")
            self._waiting.admit(request)
            self._changed.notify_all()
        return request.future

    # --- what the worker does --------------------------------------------------------------------

    def _work(self) -> None:
        with torch.no_grad():
            while True:
                self._jobs.run(self._answers.hand_out)
                if batch := self._next_batch():
                    self._serve(batch)
                elif self._closed and not self._jobs:
                    break
            self._settle()
            self._answers.hand_out()

    def _next_batch(self) -> list[Request]:
        """Returns requests of different users.

        There are none once the engine is closed, or when there are jobs and nothing else to do. The
        batch before it is finished, by which the queue measures how long batches take. Its answers
        are handed out before this thread waits for anything.
        """
        with self._changed:
            self._waiting.finish()
            if self._waiting.ready:
                return self._waiting.take()
        self._answers.hand_out()
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) or self._closed or self._jobs)
            if len(self._waiting):
                self._changed.wait_for(
                    lambda: self._closed or not self._waiting.patience, self._waiting.patience
                )
            return self._waiting.take()

    def _serve(self, requests: list[Request]) -> None:
        try:
            if self._commits.hold_up(requests):
                self._settle()
            taken = time.monotonic()
            self._serve_plans(self._plan(requests), taken)
        except Exception as error:  # none may wait forever, nor find rows that have no history
            LOG.exception("A batch failed in a way that was not foreseen")
            self._settle()
            self._answers.hand_out()
            self._scorer.clear()
            for request in requests:
                if not request.future.done():
                    self._answers.fail(request, error)

    def _plan(self, requests: list[Request]) -> list[Plan]:
        plans = []
        try:
            histories = self._histories.read([request.user for request in requests])
        except StoreError as error:
            self._commits.tell(error)
            for request in requests:
                self._answers.fail(request, error)
            return []
        for request, history in zip(requests, histories, strict=True):
            user = request.user
            try:
                if isinstance(history, StoreError):
                    LOG.error("%s", history)
                    raise history
                after, change = self._histories.extended(user, history, request.events)
                if not len(after.events) and (request.top_k or not self.model.candidates_are_rows):
                    raise NoHistoryError(f"new_events: expected some of the new user {user!r}")
            except (StoreError, EventOrderError, NoHistoryError) as error:
                self._answers.fail(request, error)
            else:
                plans.append(Plan(request, after, change))
        return plans

    def _serve_plans(self, plans: list[Plan], taken: float) -> None:
        """Serves plans together or, if that fails, for example with OutOfPagesError, in halves.

        `taken` is when they were taken from the queue.
        """
        if not plans:
            self._answers.hand_out()
            return
        started = time.monotonic()
        try:
            computed = self._scorer.compute(plans, self._answers.hand_out)
        except Exception as error:
            self._answers.hand_out()
            if len(plans) == 1:
                self._answers.fail(plans[0].request, error)
            else:
                half = len(plans) // 2
                self._serve_plans(plans[:half], taken)
                self._serve_plans(plans[half:], taken)
            return
        ended = time.monotonic()
        new = sum(plan.new for plan in plans)
        with self._counters.change() as stats:
            stats.batches += 1
            stats.graph_batches += computed.by_graph
            stats.batch_size.add(len(plans))
            stats.hit_tokens += computed.kept
            stats.new_tokens += new
            stats.recomputed_tokens += computed.computed - new
            stats.step_time.add(ended - started)
            for plan in plans:
                stats.queue_time.add(taken - plan.request.submitted)
        self._finish(plans, computed.answers)
        record_spans((plan.request for plan in plans), taken, started, ended, len(plans))

    def _finish(self, plans: list[Plan], answers: list[Tensor | Recommendation | None]) -> None:
        """Answers what changes nothing, and lets the others be stored and answered.

        If the next batch can be taken at once, and a device computes it, answers are handed out
        when it has begun to; those of a store that waits, when they are stored.
        """
        changing: list[tuple[Plan, Tensor | Recommendation]] = []
        for plan, answer in zip(plans, answers, strict=True):
            request, key = plan.request, plan.after.key
            if answer is None:
                self._scorer.free([key])
                error = FloatingPointError("scores: expected finite ones, got NaN or Inf")
                self._answers.fail(request, error)
            # Afterwards it cannot be cancelled. It is running if it is computed a second time.
            elif not (request.future.running() or request.future.set_running_or_notify_cancel()):
                self._scorer.free([key])
                with self._counters.change() as stats:
                    stats.cancelled += 1
            elif len(plan.change.events):
                changing.append((plan, answer))
            else:
                if plan.after.version:
                    self._histories.put(request.user, plan.after)
                self._answers.hold([(request, answer)])
        if changing:
            self._commits.start(changing)
            if not self._store.waits:
                self._settle()
        if self._store.waits or not (self._scorer.runs_ahead and self._waiting.ready):
            self._answers.hand_out()

    def _settle(self, wait: bool = True) -> None:
        """Notes what has been stored, and serves again what was planned on old events.

        With `wait` nothing is under way afterwards.
        """
        while ended := self._commits.end(wait):
            again = []
            for plan, version in ended:
                if version:
                    self._histories.put(plan.request.user, plan.after._replace(version=version))
                    continue
                self._scorer.free([plan.after.key])
                self._histories.drop(plan.request.user)
                if version is not None:
                    again.append(plan.request)
            if again:
                self._serve(again)
