"""Tests of the queue with a fake clock: order, shares, expected waits, and displaced requests."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
from hstu_attn.serving import OverloadedError
from hstu_attn.serving.batch import Request
from hstu_attn.serving.errors import LongWaitError
from hstu_attn.serving.fair_queue import FairQueue

NOTHING = np.empty((0, 3), np.int64)
NO_ITEMS = np.empty(0, np.int64)


def wanted(_: Request) -> bool:
    return False


def cancelled(one: Request) -> bool:
    return one.future.cancelled()


def request(client: str, user: int | str, now: float = 0.0, deadline: float = math.inf) -> Request:
    return Request(user, NOTHING, NO_ITEMS, 0, False, None, now, client, deadline)


def refusal(queue: FairQueue, one: Request, displaced: list[Request] | None = None) -> str | None:
    """Puts a request; returns the reason of a refusal, or adds the requests that it displaced."""
    try:
        gone = queue.put(one, 0.0, wanted)
    except OverloadedError as error:
        return str(error)
    if gone is not None and displaced is not None:
        displaced.append(gone)
    return None


def told(call: Callable[[], object]) -> str:
    """Returns the message if a request is refused for its expected wait, or an empty text."""
    try:
        call()
    except LongWaitError as error:
        return str(error)
    return ""


def names(requests: list[Request]) -> list[tuple[str, Any]]:
    return [(found.client, found.user) for found in requests]


def fill(queue: FairQueue, client: str, users: list[int], now: float = 0.0) -> list[Request]:
    made = [request(client, user, now) for user in users]
    assert all(queue.put(one, now, wanted) is None for one in made)
    return made


def test_clients_take_turns_and_so_do_their_users() -> None:
    queue = FairQueue(100, 4)
    fill(queue, "a", [1, 1, 1, 2, 3, 4, 5])
    fill(queue, "b", [7, 7, 8])
    fill(queue, "c", [9])
    assert names(queue.take(0, wanted)) == [("a", 1), ("b", 7), ("c", 9), ("a", 2)]
    assert names(queue.take(0, wanted)) == [("b", 8), ("a", 3), ("b", 7), ("a", 4)]
    assert names(queue.take(0, wanted)) == [("a", 5), ("a", 1)]
    assert names(queue.take(0, wanted)) == [("a", 1)]
    assert queue.take(0, wanted) == []
    assert len(queue) == 0


def test_a_user_is_never_twice_in_a_batch_whichever_client_asks() -> None:
    queue = FairQueue(100, 8)
    fill(queue, "a", [1, 2])
    fill(queue, "b", [1, 2, 3])
    assert names(queue.take(0, wanted)) == [("a", 1), ("b", 2), ("b", 3)]
    assert names(queue.take(0, wanted)) == [("a", 2), ("b", 1)]


@pytest.mark.slow
def test_a_flood_takes_no_more_than_its_share_of_each_batch() -> None:
    """One client floods the queue for many users; two others get their thirds of each batch."""
    queue, rng = FairQueue(600, 9), random.Random(0)
    served: Counter[str] = Counter()
    for _ in range(100):
        served["refused"] += sum(
            refusal(queue, request("flood", rng.randrange(10**6))) is not None for _ in range(40)
        )
        for name in ("b", "c"):
            for user in range(3):
                displaced = queue.put(request(name, f"{name} {user}"), 0, wanted)
                assert displaced is None or displaced.client == "flood"
        batch = names(queue.take(0, wanted))
        shares = Counter(client for client, _ in batch)
        assert shares == {"flood": 3, "b": 3, "c": 3}
        served.update(shares)
    assert served["b"] == served["c"] == 300
    assert served["refused"] > 1000


@pytest.mark.parametrize("seed", range(3))
def test_whoever_has_less_than_its_share_finds_room(seed: int) -> None:
    """Random floods: a client with fewer than `max_size / clients` waiting is never refused, none
    of its requests is displaced, and the same holds for the users of a client.
    """
    rng, size = random.Random(seed), 24
    queue = FairQueue(size, 5)
    clients: Counter[str] = Counter()
    users: Counter[tuple[str, Any]] = Counter()
    outcomes: Counter[str] = Counter()
    for turn in range(3000):
        made = request(rng.choice("aaaaaaaabbc"), int(6 * rng.random() ** 3))
        key = made.client, made.user
        share = size / len({*clients, made.client})
        before = len(queue)
        displaced: list[Request] = []
        error = refusal(queue, made, displaced)
        if error is not None:
            assert (before, len(queue)) == (size, size)
            assert "(max_queue), got 24" in error
            assert clients[made.client] >= math.floor(share)
            assert users[key] + 1 >= max(n for who, n in users.items() if who[0] == made.client)
            outcomes["refused"] += 1
        else:
            for one in displaced:
                other = one.client, one.user
                assert clients[one.client] > math.floor(share) - (other[0] == key[0])
                assert users[other] == max(n for who, n in users.items() if who[0] == other[0])
                if other[0] != key[0]:
                    assert clients[other[0]] == max(clients.values()) > clients[key[0]] + 1
                else:
                    assert users[other] > users[key] + 1
                clients[other[0]] -= 1
                users[other] -= 1
                outcomes["displaced"] += 1
            clients[made.client] += 1
            users[key] += 1
        if rng.random() < 0.15:
            for taken in queue.take(turn, wanted):
                clients[taken.client] -= 1
                users[taken.client, taken.user] -= 1
        clients, users = +clients, +users
        assert len(queue) == clients.total() <= size
    assert outcomes["refused"] > 100
    assert outcomes["displaced"] > 100


def test_the_expected_wait_is_that_of_the_turns() -> None:
    """The queue serves a batch of 4 each second: the expected wait equals the actual one."""
    queue = FairQueue(1000, 4)
    assert queue.expected_wait("a", 1, 0.0) == 0.0
    fill(queue, "a", [1])
    queue.take(0.0, wanted)
    queue.finish(1.0)
    assert queue.batch_seconds == 1.0
    fill(queue, "a", [*range(100, 140), *[7] * 9], now=1.0)
    fill(queue, "b", [*range(200, 206)], now=1.0)
    told = {}
    for client, user in (("a", 1), ("a", 7), ("b", 2), ("c", 3)):
        told[client, user] = queue.expected_wait(client, user, 1.0)
    # Before "c", one request of each other client is served; before "b", 6 of its own and 7 of "a".
    assert told["c", 3] == 0.0
    assert told["b", 2] == 13 // 4
    assert told["a", 1] == (41 + 6) // 4
    assert told["a", 7] == (40 + 6) // 4 + 9
    for client, user in told:
        fill(queue, client, [user], now=1.0)
    assert queue.backlog(1.0) == 58 // 4
    waits = {}
    for second in range(60):
        for taken in queue.take(1.0 + second, wanted):
            waits[taken.client, taken.user] = float(second)
        queue.finish(2.0 + second)
    for key, wait in told.items():
        assert abs(waits[key] - wait) <= 1  # each estimate ignores the other three requests


@pytest.mark.parametrize("seed", range(3))
def test_no_wait_is_longer_than_the_bound(seed: int) -> None:
    """A request that is accepted by the bound alone would also be accepted by the exact wait."""
    queue, rng, told = FairQueue(10**6, 4), random.Random(seed), list[float]()
    now = 0.0
    for _ in range(300):
        client, user = rng.choice("abc"), int(20 * rng.random() ** 2)
        mine = sum(one.user == user for one in queue._clients.get(client, ()))
        told.append(queue.expected_wait(client, user, now))
        assert told[-1] <= queue._longest_wait(mine, now)
        fill(queue, client, [user], now)
        now += rng.random()
        if rng.random() < 0.2:
            queue.finish(now)
            queue.take(now, wanted)
    assert sum(wait > 0 for wait in told) > 100


@pytest.mark.parametrize("seed", range(3))
def test_a_client_is_refused_without_a_request_if_any_of_its_users_would_be(seed: int) -> None:
    queue, rng, refusals = FairQueue(10**6, 4, max_seconds=2.0), random.Random(seed), 0
    now = 0.0
    for n in range(600):
        client = rng.choice("aab")
        one = request(client, n, now)
        early = told(lambda: queue.check(client, now))  # noqa: B023  # it is called at once
        assert early == told(lambda: queue.put(one, now, wanted))  # noqa: B023
        refusals += bool(early)
        now += 0.1 * rng.random()
        if rng.random() < 0.2:
            queue.finish(now)
            queue.take(now, wanted)
    assert 100 < refusals < 500


def test_what_may_make_room_is_no_reason_to_refuse_a_client() -> None:
    queue = FairQueue(1000, 1, max_seconds=0.5)
    fill(queue, "a", [1])
    queue.take(0.0, wanted)
    waiting = fill(queue, "a", [2, 3])
    queue.check("a", 0.0)  # the duration of a batch is not known yet
    with pytest.raises(LongWaitError, match=r"at most 0\.5 s .*, got 2 s"):
        queue.check("a", 1.0)
    waiting[0].future.cancel()
    queue.check("a", 1.0)


def test_a_batch_that_runs_for_long_lengthens_the_wait() -> None:
    queue = FairQueue(1000, 2, max_seconds=3.0)
    fill(queue, "a", [1])
    queue.take(0.0, wanted)
    queue.finish(1.0)
    fill(queue, "a", [1], now=1.0)
    queue.take(1.0, wanted)
    assert queue.started == 1.0
    fill(queue, "a", [2, 3], now=1.0)
    assert queue.expected_wait("a", 4, 1.25) == pytest.approx(1 + 0.75)
    assert queue.expected_wait("a", 4, 5.0) == pytest.approx(4.0)
    with pytest.raises(OverloadedError, match=r"at most 3 s .*, got 4 s") as refused:
        queue.put(request("a", 4), 5.0, wanted)
    assert refused.value.retry_after == pytest.approx(1.0)
    with pytest.raises(OverloadedError, match=r"at most 0.5 s .*deadline"):
        queue.put(request("a", 4, deadline=1.75), 1.25, wanted)
    assert queue.put(request("a", 4, deadline=3.25), 1.25, wanted) is None
    assert len(queue) == 3


def test_what_fits_into_the_next_batch_is_never_refused_for_time() -> None:
    """This lets the queue measure again an engine that was slow for a while."""
    queue = FairQueue(1000, 2, max_seconds=0.5)
    now = 0.0
    for seconds in [60.0] + [0.01] * 40:
        fill(queue, "a", [1, 2], now)
        queue.take(now, wanted)
        now += seconds
        queue.finish(now)
    assert queue.batch_seconds < 0.02


def test_what_need_not_be_served_makes_room() -> None:
    queue = FairQueue(3, 3)
    made = fill(queue, "a", [1, 2, 3])
    kept, late = request("a", 4), request("a", 5, deadline=5.0)
    assert "(max_queue), got 3" in str(refusal(queue, kept))
    made[0].future.cancel()
    assert queue.put(kept, 0.0, cancelled) is None
    made[2].future.cancel()
    assert queue.put(late, 1.0, cancelled) is None
    assert "(max_queue), got 3" in str(refusal(queue, request("a", 6)))
    assert queue.put(request("a", 6), 5.0, lambda one: one is late) is None
    assert len(queue) == 3
    assert names(queue.take(5.0, lambda one: one is kept)) == [("a", 2), ("a", 6)]
    assert (len(queue), queue.oldest) == (0, math.inf)


def test_what_need_not_be_served_is_no_reason_to_refuse() -> None:
    queue = FairQueue(1000, 1, max_seconds=2.5)
    fill(queue, "a", [1])
    queue.take(0.0, wanted)
    queue.finish(1.0)
    gone = fill(queue, "a", [2, 3], now=1.0)
    assert queue.put(request("a", 4), 1.0, wanted) is None
    assert queue.expected_wait("a", 5, 1.0) == 3.0
    gone[0].future.cancel()
    gone[1].future.cancel()
    assert queue.put(request("a", 5), 1.0, cancelled) is None
    assert names(queue.take(1.0, wanted)) == [("a", 4)]
    assert names(queue.take(1.0, wanted)) == [("a", 5)]


def test_the_oldest_is_known_until_the_queue_is_empty() -> None:
    queue = FairQueue(10, 1)
    assert queue.oldest == math.inf
    fill(queue, "a", [1], now=3.0)
    fill(queue, "a", [2], now=4.0)
    assert queue.oldest == 3.0
    queue.take(5.0, wanted)
    assert queue.oldest <= 4.0
    queue.take(5.0, wanted)
    assert queue.oldest == math.inf
    fill(queue, "b", [1, 2], now=9.0)
    assert [one.user for one in queue.clear()] == [1, 2]
    assert (len(queue), queue.oldest) == (0, math.inf)
