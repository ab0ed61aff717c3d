"""Writes a log of random events, of any size, to measure how much can be read and trained.

In contrast to `hstu_attn.data.synthetic`, there is little to learn from: users have a lognormal
number of events, and items are drawn by popularity alone, which falls off as a power of their rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

import numpy as np

from .synthetic import FIRST_TIMESTAMP, write_whole

__all__ = ["ML_20M_SHAPE", "write_synthetic_scale"]

ML_20M_SHAPE = {"num_users": 138_493, "num_items": 26_744, "num_events": 20_000_263}
"""The size of MovieLens 20M."""

USERS_AT_ONCE = 4096
FEWEST_EVENTS = 20  # the minimum for each user, as in MovieLens
SPREAD = 1.0  # deviation of the logarithm of a user's number of events
POPULARITY_EXPONENT = 0.8
LONGEST_PAUSE = 2 * 86_400  # seconds between a user's events
YEAR = 365 * 86_400
HEADER = "userId,movieId,rating,timestamp\n"


def write_synthetic_scale(
    directory: str | Path, num_users: int, num_items: int, num_events: int, seed: int = 0
) -> Path:
    """Writes `ratings.csv` in the layout of MovieLens 20M, whole or not at all.

    Args:
        directory: created if absent.
        num_users: users, each with at least 20 events.
        num_items: items; some may not occur.
        num_events: events of all users.
        seed: the same arguments write the same file.

    Returns:
        The path of the file.

    Raises:
        ValueError: fewer than 20 events for each user.
    """
    if num_events < FEWEST_EVENTS * num_users:
        raise ValueError(
            f"num_events: expected at least {FEWEST_EVENTS} for each of {num_users:,} users, "
            f"got {num_events:,}"
        )
    generator = np.random.default_rng(seed)
    weights = generator.lognormal(0.0, SPREAD, num_users)
    spare = num_events - FEWEST_EVENTS * num_users
    ends = np.floor(np.cumsum(weights) / weights.sum() * spare + 0.5).astype(np.int64)
    counts = FEWEST_EVENTS + np.diff(ends, prepend=0)
    popularity = np.cumsum((np.arange(num_items) + 5.0) ** -POPULARITY_EXPONENT)
    names = 1 + generator.permutation(num_items)

    def write(file: TextIO) -> None:
        file.write(HEADER)
        for first in range(0, num_users, USERS_AT_ONCE):
            count = counts[first : first + USERS_AT_ONCE]
            total = int(count.sum())
            users = np.repeat(np.arange(first, first + len(count)) + 1, count)
            drawn = np.searchsorted(popularity, generator.random(total) * popularity[-1])
            ratings = generator.integers(1, 11, total) / 2
            times = np.cumsum(generator.integers(1, LONGEST_PAUSE, total))
            begins = np.cumsum(count) - count
            since = times - np.repeat(times[begins], count)
            starts = FIRST_TIMESTAMP + generator.integers(0, YEAR, len(count))
            columns = users, names[drawn], ratings, since + np.repeat(starts, count)
            rows = zip(*(column.tolist() for column in columns), strict=True)
            file.writelines(map("%d,%d,%s,%d\n".__mod__, rows))

    path = Path(directory) / "ratings.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, write)
    return path
