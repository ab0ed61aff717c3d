"""An engine that scores the requests of many users in batches, with a KV cache."""

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
    """Serves a model to several threads, and computes only the rows that are not cached.

    A request brings a user's new events and asks for scores after them. A worker thread batches
    waiting requests. A batch has at most one request of each user, and a user's requests are served
    in order of arrival, so each sees the events of the earlier ones. Clients take turns, and so do
    the users of a client. The answer is the model's on the user's whole history (at most the latest
    `store.max_events` events, see `EventStore`), up to rounding.

    The keys and values of every event are cached, but every request computes the last event again:
    candidates are compared with its state, and a relative bias by time lets that state depend on
    the time of the query or of the next event. Evicted users are recomputed from their events.

    A request that fails, times out or is cancelled has no effect: its events are not stored. A
    request whose deadline passes while it waits is not computed. If the queue is full, the latest
    request of the client with the most waiting requests is dropped in favor of a client with fewer,
    and likewise among the users of a client; other requests are refused. If a batch fails, it is
    split in halves that are computed separately, so that only the faulty request fails. A request
    is answered after its events are stored: one `commit` of the store writes the events of a batch,
    while the next batch is computed if the two share no user. If the store cannot tell whether it
    has stored a request's events, the request fails with a StoreError. It may be retried: an event
    that equals a stored event of the user in item, time and action is not stored twice.

    Args:
        model: its layers must be cacheable (`check_cacheable`) and in evaluation mode. An
            `UncachedModel` computes each request whole.
        cache: used by this engine only, which clears it; None with an `UncachedModel`. It has the
            model's number of layers, heads and head dim and the dtype of its rows, is on the
            model's device, and holds at least one history of `max_events`.
        store: the users' events; None is a `MemoryStore` for 100000 users, whose `drop` is 0 with
            an `UncachedModel`. It is not closed with the engine.
        max_batch_size: the most requests in a batch.
        max_wait: seconds that a request may wait for others to join its batch; with 0, a batch is
            the requests that are waiting.
        max_queue: the most requests that may wait.
        max_queue_seconds: a request is refused if it would wait longer, estimated from the queue
            and the duration of the latest batches.
        max_candidates: the most candidates of a request.
        graphs: whether the stack's steps are captured in CUDA graphs and replayed, which saves the
            host the kernel launches; a `GraphBuckets` chooses the shapes. None means on a GPU only.
            Batches are padded to the shapes, so scores may be rounded differently. With True on a
            CPU they are padded too, which only costs time.
        time_range: returns the earliest and the latest time that an event may have now, in the
            model's unit; for example `lambda: (631_152_000, int(time.time()) + 300)`, from 1990
            until in five minutes. None accepts any time. Stored events beyond the latest time are
            left out of histories until it reaches them: this clock or the clock of their source is
            wrong.
        skip_unknown_items: whether stored events on items from the model's `num_items` up, which an
            engine of a later model stored, are left out of histories; False fails requests of
            their users.

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
        self._scorer = self._make_scorer(model, cache)  # only the worker uses it and the histories
        self._previous: Scorer | None = None
        self._changing = threading.Lock()  # held while the model is replaced
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
        answer = answers.give if store.waits else answers.hold  # called by the thread that stores
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
            user: the user's id; an unknown user has no events yet.
            new_events: `(n, 3)` integers, or `Event`s, oldest first: item, time and action. The
                action may be left out.
            candidates: `(m,)` items to score; may be empty.
            at: the time at which the model is queried; None is the time of the user's last event.
            timeout: seconds to wait for the answer; None is forever.
            client: the client that the request is made for; clients take turns in the queue.

        Returns:
            `(m,)` on the CPU, of the dtype of the model's scores; `(m, tasks)` where it has tasks.

        Raises:
            ValueError: for items, actions, times or counts out of range, or events or candidates
                that are not integers.
            NoHistoryError: a ValueError: the user has no event, and candidates are not rows.
            OverloadedError: if too many requests wait, or so many that the answer would come after
                `timeout`; usually raised without waiting.
            TimeoutError: after `timeout`.
            EngineClosedError: if the engine is or gets closed.
            OutOfPagesError: if the cache does not evict, and is full.
            FloatingPointError: if a score is not finite.
            EventTimeError: a ValueError: an event's time is out of `time_range`.
            EventOrderError: a ValueError: events are not oldest first, or a new one is older than
                the user's last stored event.
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
            k: the number of items; fewer are returned where the catalog has no more.
            exclude_seen: whether items in the user's history, as far as the engine keeps it, are
                left out.

        The other arguments and the errors are those of `score`. A model that is not a
        `CatalogModel` is a ValueError, too.
        """
        options: RequestOptions = {"at": at, "client": client, "deadline": deadline_after(timeout)}
        future = self.submit_recommend(user, new_events, k, exclude_seen=exclude_seen, **options)
        return result_of(future, timeout)

    def submit_score(
        self, user: User, new_events: Events, candidates: Ints, **options: Unpack[RequestOptions]
    ) -> Future[Tensor]:
        """Starts `score` and returns its future.

        This call raises errors of the arguments, and OverloadedError and DeadlineError where they
        are known at once; the future raises all others. The future can be cancelled until it has
        the answer; a cancelled request has no effect.

        Args:
            user: as in `score`.
            new_events: as in `score`.
            candidates: as in `score`.
            options: the fields of `RequestOptions`, such as the client and the deadline.
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
        """Replaces the model while requests are served, and returns when the new one is in use.

        The new model is checked in the calling thread. Its graphs are captured between batches, one
        at a time, so that no request waits for more than one capture. The switch then takes place
        between two batches: either model computes an answer from the same events, and rows that the
        old model has cached are not used any more. The old model stays in memory, with its graphs,
        for `roll_back`.

        Args:
            model: scores the same items and actions, in evaluation mode, on the engine's device.
            cache: used by the new model only, and cleared; needed where layers, heads, head dim or
                dtype differ. None shares the memory of the served model's cache, which holds the
                keys and values of one model at a time.
            probe: what the new model must answer; None asks for finite scores.

        Raises:
            ModelCheckError: a ValueError: the model does not fit, or fails the check. The served
                model and its cache stay in use.
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
        """Switches back to the model that was served before the last `swap`, as `swap` does.

        Raises:
            ValueError: if there is no such model, or the last swap has been rolled back.
            EngineClosedError: if the engine is or gets closed.
        """
        with self._changing:
            previous = self._previous
            if previous is None:
                raise ValueError("model: expected one before this to roll back to, got none")
            self._between_batches(lambda: self._take_over(previous, previous=None))

    def forget(self, *users: User, stored: bool = True) -> None:
        """Deletes users' events from the store, and the cached rows computed from them.

        The cache's pages hold nothing of the users afterwards. Pending requests of the users may
        store events again. With `stored=False` only the cached rows are deleted, for example
        because another process has deleted the events.

        Raises:
            StoreError: if the store cannot delete them.
            EngineClosedError: if the engine is or gets closed.
        """
        try:
            for user in users if stored else ():
                self._store.forget(user)
        finally:  # a store that fails may have deleted the events all the same
            self._between_batches(lambda: self._drop(*users))

    def prune(self, *, before: int = 0, latest: int | None = None) -> int:
        """Deletes old events of all users, and the cached rows computed from them.

        Args:
            before: events with an earlier time are deleted.
            latest: the most events to keep of each user, the newest ones; None sets no limit.

        Returns:
            The number of users whose events have been changed.

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
        """The served model."""
        return self._scorer.model

    @property
    def store(self) -> EventStore:
        """The store of the users' events."""
        return self._store

    def stats(self) -> EngineStats:
        """Returns a snapshot of the engine's counters and state."""
        with self._changed:
            level = self._waiting.level()
        return self._counters.snapshot(**level, users=len(self._store))

    def close(self, *, finish: bool = True) -> None:
        """Refuses new requests, and returns when the waiting ones are served.

        With `finish=False` waiting requests fail with EngineClosedError. A second call does
        nothing.
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
        """Returns whether the worker thread runs, or has ended because the engine was closed."""
        return self._closed or self._worker.is_alive()

    def check_load(self, client: str = "") -> None:
        """Checks whether a client's request might be accepted; cheaper than submitting one.

        Raises:
            OverloadedError: if any request of the client would be refused, whichever its user.
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
        """Runs a job in the worker thread between two batches, and waits for it."""

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
        """Drops users' histories and cached rows, and overwrites the rows in the caches' pages."""
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
        """Returns the next requests to compute, all of different users.

        The list is empty once the engine is closed, or when there are only jobs to do. The previous
        batch counts as finished now, from which the queue learns how long batches take. Its answers
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
        except Exception as error:  # no request may wait forever or use rows without a history
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

        `taken` is the time at which the plans were taken from the queue.
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
        """Answers plans that change no events, and starts to store and answer the others.

        If the next batch is ready and a device computes it, answers are handed out after that batch
        has been launched. With a store that waits, answers are given when events are stored.
        """
        changing: list[tuple[Plan, Tensor | Recommendation]] = []
        for plan, answer in zip(plans, answers, strict=True):
            request, key = plan.request, plan.after.key
            if answer is None:
                self._scorer.free([key])
                error = FloatingPointError("scores: expected finite ones, got NaN or Inf")
                self._answers.fail(request, error)
            # From here on a request cannot be cancelled. In a second computation it is running.
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
        """Processes finished commits, and serves again the plans based on outdated events.

        With `wait` no commit is running afterwards.
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
