"""Load generators, for a constant concurrency or random arrivals; CPU use of other processes."""

from __future__ import annotations

import asyncio
import bisect
import ctypes
import gc
import itertools
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import numpy as np

from .record import Record, rounded

__all__ = [
    "OVERLOAD",
    "PATIENCE",
    "CpuUse",
    "Load",
    "arrive_at_random",
    "at_loads",
    "keep_freed_memory",
    "keep_futures_under_way",
    "keep_under_way",
    "longest_pause",
    "no_collections",
    "rate_under_way",
    "resident_mib",
    "submit_at_random",
    "zipf",
]

PATIENCE = 1.0
"""The seconds in which a request that arrives at random must be answered."""

T = TypeVar("T")

_STAT = Path("/proc/stat")
_TICK = 1 / os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)  # proc(5): user, nice, system, idle, iowait, irq, softirq, steal, ...
_COUNTED = 8  # the columns after steal are contained in the first two
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h of glibc
_INT_MAX = 2**31 - 1
OVERLOAD = 1.5  # relative to the rate of answers at a constant concurrency


def keep_freed_memory() -> None:
    """Makes malloc reuse freed memory instead of mapping fresh pages, as tuned allocators do.

    Otherwise every call maps large tensors again, and the time to clear their pages dominates,
    which varies on virtual machines whose hosts reclaim free memory. Has no effect without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _INT_MAX)


def resident_mib() -> float:
    """Returns how much memory of this process is resident, in MiB, on Linux."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(frozen=True)
class CpuUse:
    """Counters at one moment, in seconds."""

    wall: float
    machine: float  # CPU time of all processes, the hypervisor's other guests included
    own: float  # CPU time of this process

    @classmethod
    def now(cls) -> CpuUse:
        """Reads Linux's counters; elsewhere the machine's is 0, as if nothing else ran."""
        machine = 0.0
        if _STAT.exists():
            columns = _STAT.read_text().split("\n", 1)[0].split()[1 : 1 + _COUNTED]
            ticks = [int(x) for n, x in enumerate(columns) if n not in _IDLE]
            machine = sum(ticks) * _TICK
        return cls(time.perf_counter(), machine, time.process_time())

    def others_since(self) -> float:
        """Returns how many processors other processes have used since this moment, on average.

        The system counts in steps of a hundredth of a second; up to two steps are ignored.
        """
        now = CpuUse.now()
        others = (now.machine - self.machine) - (now.own - self.own) - 2 * _TICK
        return max(0.0, others) / max(now.wall - self.wall, _TICK)


@dataclass(frozen=True)
class Load(Generic[T]):
    """The results of a load test.

    Attributes:
        seconds: the seconds of the measurement, without the warm-up; where requests arrive at
            random, until the last answer.
        latencies: seconds of each request that was sent and answered during the measurement.
        failed: the number of requests that were not answered successfully.
        before: the snapshot at the start.
        after: the snapshot at the end.
        event_seconds: the duration of the event in the middle of the measurement.
        pause: the longest time, in seconds, in which requests waited and none was answered; only
            if requests arrive at random.
    """

    seconds: float
    latencies: list[float]
    failed: int
    before: T
    after: T
    event_seconds: float = 0.0
    pause: float = 0.0

    @property
    def rate(self) -> float:
        """Answers a second."""
        return len(self.latencies) / self.seconds

    def figures(self) -> Record:
        """Returns requests/s and percentiles of the clients' latency in milliseconds."""
        p50, p95, p99 = 1e3 * np.percentile(self.latencies, [50, 95, 99])
        return {
            "seconds": rounded(self.seconds),
            "answered": len(self.latencies),
            "qps": rounded(self.rate),
            "p50_ms": rounded(float(p50)),
            "p95_ms": rounded(float(p95)),
            "p99_ms": rounded(float(p99)),
            "worst_ms": rounded(1e3 * max(self.latencies)),
        }


def keep_under_way(
    connect: Callable[[int], Callable[[], bool]],
    snapshot: Callable[[], T],
    *,
    concurrency: int,
    seconds: float,
    warm_up: float,
) -> Load[T]:
    """Keeps requests in flight for a given time, after a warm-up.

    Args:
        connect: is called in each thread with the thread's number; returns a function that sends a
            request, waits for its answer and returns whether the answer is correct.
        snapshot: is called at the start and at the end of the measurement.
        concurrency: requests in flight, each in a thread.
        seconds: the seconds of the measurement.
        warm_up: seconds before it, at most `seconds`.

    Raises:
        RuntimeError: if no request was answered.
    """
    start = time.perf_counter() + min(warm_up, seconds)
    end = start + seconds
    latencies: list[list[float]] = [[] for _ in range(concurrency)]
    failed = [0] * concurrency

    def work(thread: int) -> None:
        send = connect(thread)
        while (sent := time.perf_counter()) < end:
            answered = send()
            now = time.perf_counter()
            if start <= sent and now <= end:
                if answered:
                    latencies[thread].append(now - sent)
                else:
                    failed[thread] += 1

    threads = [threading.Thread(target=work, args=(n,)) for n in range(concurrency)]
    for thread in threads:
        thread.start()
    time.sleep(max(0.0, start - time.perf_counter()))
    before = snapshot()
    for thread in threads:
        thread.join()
    together = [x for found in latencies for x in found]
    if not together:
        raise RuntimeError(f"no request was answered in {seconds} s ({sum(failed)} failed)")
    return Load(seconds, together, sum(failed), before, snapshot())


def keep_futures_under_way(
    send: Callable[[], Future[Any]],
    snapshot: Callable[[], T],
    *,
    concurrency: int,
    seconds: float,
    warm_up: float,
) -> Load[T]:
    """Keeps requests in flight for a given time, after a warm-up; this thread sends all of them.

    Args:
        send: sends a request and returns the future of its answer.
        snapshot: is called at the start and at the end of the measurement.
        concurrency: requests in flight.
        seconds: the seconds of the measurement.
        warm_up: seconds before it, at most `seconds`.

    Raises:
        RuntimeError: if no request was answered; if one failed, its error is raised.
    """
    start = time.perf_counter() + min(warm_up, seconds)
    end = start + seconds
    done: SimpleQueue[tuple[float, float, Future[Any]]] = SimpleQueue()
    latencies: list[float] = []
    before = None

    def begin() -> None:
        sent = time.perf_counter()
        send().add_done_callback(lambda future: done.put((sent, time.perf_counter(), future)))

    for _ in range(concurrency):
        begin()
    while concurrency:
        sent, answered, future = done.get()
        future.result()
        if before is None and answered >= start:
            before = snapshot()
        if start <= sent and answered <= end:
            latencies.append(answered - sent)
        if answered < end:
            begin()
        else:
            concurrency -= 1
    if before is None or not latencies:
        raise RuntimeError(f"no request was answered in {seconds} s")
    return Load(seconds, latencies, 0, before, snapshot())


async def rate_under_way(
    send: Callable[[], Awaitable[bool]], *, concurrency: int, seconds: float, warm_up: float
) -> float:
    """Returns the requests answered per second with `concurrency` requests always in flight.

    If no request is answered in `seconds`, the measurement goes on until the first answer.

    Raises:
        RuntimeError: if there is no answer in `10 * seconds` either.
    """
    start = time.perf_counter() + warm_up
    answered, end = 0, start + seconds

    async def work() -> None:
        nonlocal answered, end
        while (now := time.perf_counter()) < end or (not answered and now < start + 10 * seconds):
            was_answered = await send()
            now = time.perf_counter()
            if was_answered and start <= now and (now < end or not answered):
                answered, end = answered + 1, max(end, now)

    await asyncio.gather(*(work() for _ in range(concurrency)))
    if not answered:
        raise RuntimeError(f"expected answers in {10 * seconds:g} s, got none")
    return answered / (end - start)


@contextmanager
def no_collections() -> Iterator[None]:
    """Turns Python's garbage collector off in this process.

    A collection delays a client by up to 0.15 s, which would count as the server's time.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def zipf(users: Sequence[T], exponent: float, rng: random.Random) -> Callable[[], T]:
    """Returns a function that draws a user from a Zipf distribution.

    Args:
        users: the users. They are shuffled; then the n-th is drawn with a probability proportional
            to `1 / n**exponent`.
        exponent: the exponent; 0 draws all users equally often.
        rng: the random generator.
    """
    ordered = rng.sample(users, len(users))
    until = list(itertools.accumulate(n**-exponent for n in range(1, len(users) + 1)))
    return lambda: ordered[min(bisect.bisect(until, rng.random() * until[-1]), len(ordered) - 1)]


def poisson(rate: float, start: float, rng: random.Random) -> Iterator[float]:
    """Yields the endless times of a Poisson process of `rate` events/s that starts at `start`."""
    due = start
    while True:
        yield (due := due + rng.expovariate(rate))


def longest_pause(due: Sequence[float], answered: Sequence[float]) -> float:
    """Returns the longest time in which requests waited and none was answered, in seconds.

    A latency can be longer than this, because other requests may be answered meanwhile.

    Args:
        due: the time when each request was due to be sent.
        answered: the time when each request was answered.
    """
    order = np.argsort(answered)
    ends = np.asarray(answered)[order]
    # Element n: the earliest due time of the requests that the first n answers leave unanswered.
    waiting = np.minimum.accumulate(np.asarray(due)[order][::-1])[::-1]
    begins = np.maximum(waiting, np.append(-np.inf, ends[:-1]))
    return float((ends - begins).max())


def timed(action: Callable[[], object]) -> float:
    """Returns the seconds that an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


async def arrive_at_random(
    send: Callable[[], Awaitable[bool]],
    *,
    rate: float,
    seconds: float,
    warm_up: float,
    rng: random.Random,
    middle: Callable[[], object] | None = None,
    most: int | None = None,
) -> Load[None]:
    """Sends requests at the times of a Poisson process, without waiting for earlier answers.

    A latency counts from the time at which the request was due to be sent.

    Args:
        send: sends a request, waits for its answer and returns whether the answer is correct.
        rate: requests a second, on average.
        seconds: the seconds of the measurement.
        warm_up: seconds before it.
        rng: draws the times.
        middle: is called in a thread in the middle of the measurement, which goes on for another
            half of `seconds` after `middle` has returned.
        most: the largest number of requests in flight; None for no limit. Further requests that
            become due are not sent, and count as failed: otherwise they would wait in the client
            and time out, and the server's work for them would be wasted.

    Raises:
        RuntimeError: if no request was answered.
    """
    start = time.perf_counter() + warm_up
    half, end = start + seconds / 2, start + seconds
    answers: list[tuple[float, float]] = []
    failed = under_way = 0

    async def work(due: float) -> None:
        nonlocal failed, under_way
        answered = False
        if most is None or under_way < most:
            under_way += 1
            answered = await send()
            under_way -= 1
        if due < start:
            return
        if answered:
            answers.append((due, time.perf_counter()))
        else:
            failed += 1

    tasks: list[asyncio.Task[None]] = []
    event: asyncio.Task[float] | None = None
    for due in poisson(rate, start - warm_up, rng):
        if event is not None and not event.done():
            end = max(end, due + seconds / 2)
        if due >= end:
            break
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(work(due)))
        if middle is not None and event is None and due >= half:
            event = asyncio.create_task(asyncio.to_thread(timed, middle))
    await asyncio.gather(*tasks)
    end = max(end, time.perf_counter())
    event_seconds = 0.0 if event is None else await event
    if not answers:
        raise RuntimeError(f"no request was answered in {seconds} s ({failed} failed)")
    latencies, pause = [at - due for due, at in answers], longest_pause(*zip(*answers, strict=True))
    return Load(end - start, latencies, failed, None, None, event_seconds, pause)


def submit_at_random(
    send: Callable[[], Future[Any]],
    snapshot: Callable[[], T],
    *,
    refusals: tuple[type[Exception], ...],
    rate: float,
    seconds: float,
    warm_up: float,
    rng: random.Random,
    middle: Callable[[], object] | None = None,
) -> Load[T]:
    """Sends requests as `arrive_at_random` does, all from this thread, by futures.

    Args:
        send: sends a request and returns the future of its answer.
        snapshot: is called at the start and at the end of the measurement.
        refusals: errors, from `send` or a future, that count as failed requests; others are
            raised.
        rate: as in `arrive_at_random`, as are the arguments after it.
        seconds: likewise.
        warm_up: likewise.
        rng: likewise.
        middle: likewise.

    Raises:
        RuntimeError: if no request was answered.
    """
    start = time.perf_counter() + warm_up
    half, end = start + seconds / 2, start + seconds
    # Holds no futures, because so many objects would slow down garbage collection.
    done: SimpleQueue[tuple[float, float, BaseException | None]] = SimpleQueue()
    before = snapshot()
    sent, is_warm = 0, False
    event: Future[float] | None = None

    def ended(due: float, future: Future[Any]) -> None:
        done.put((due, time.perf_counter(), future.exception()))

    with ThreadPoolExecutor(1) as pool:
        for due in poisson(rate, start - warm_up, rng):
            if event is not None and not event.done():
                end = max(end, due + seconds / 2)
            if due >= end:
                break
            time.sleep(max(0.0, due - time.perf_counter()))
            if not is_warm and due >= start:
                before, is_warm = snapshot(), True
            if middle is not None and event is None and due >= half:
                event = pool.submit(timed, middle)
            try:
                send().add_done_callback(partial(ended, due))
            except refusals as error:
                # A traceback refers to this frame, so the error would be part of a reference cycle.
                done.put((due, time.perf_counter(), error.with_traceback(None)))
            sent += 1
        ends = [done.get() for _ in range(sent)]
        event_seconds = 0.0 if event is None else event.result()
    for _, _, failure in ends:
        if failure is not None and not isinstance(failure, refusals):
            raise failure
    measured = [each for each in ends if each[0] >= start]
    answers = [(due, answered) for due, answered, failure in measured if failure is None]
    failed = len(measured) - len(answers)
    if not answers:
        raise RuntimeError(f"no request was answered in {seconds} s ({failed} failed)")
    end = max(end, *(answered for _, answered, _ in ends))
    latencies, pause = [at - due for due, at in answers], longest_pause(*zip(*answers, strict=True))
    return Load(end - start, latencies, failed, before, snapshot(), event_seconds, pause)


def at_loads(
    under_way: float,
    run: Callable[[float, Callable[[], object] | None], Load[T]],
    loads: Sequence[float],
    events: Sequence[tuple[str, Callable[[], object]]],
) -> Iterator[tuple[Record, Load[T]]]:
    """Yields the result of an overload, then each load, then the first load with each event.

    The overload is `OVERLOAD` times `under_way`; the rate of answers under it is the capacity. The
    loads are fractions of the capacity.

    Args:
        under_way: the requests answered per second at a constant concurrency.
        run: runs a load test with random arrivals, given `rate` and `middle` of
            `arrive_at_random`.
        loads: the fractions.
        events: the name and the action of each event. It gets a run of its own, in the middle of
            which the action is called.

    Yields:
        The fields `capacity` (requests/s), `load`, `event`, `event_seconds` and `pause_ms` of a
        record, and the measured load.
    """
    load = run(OVERLOAD * under_way, None)
    capacity = load.rate

    def record(number: float | None, event: str) -> Record:
        return {
            "capacity": rounded(capacity),
            "load": number,
            "event": event,
            "event_seconds": rounded(load.event_seconds),
            "pause_ms": rounded(1e3 * load.pause),
        }

    yield record(rounded(OVERLOAD * under_way / capacity), ""), load
    for number in loads:
        load = run(number * capacity, None)
        yield record(number, ""), load
    for event, action in events:
        load = run(loads[0] * capacity, action)
        yield record(loads[0], event), load
