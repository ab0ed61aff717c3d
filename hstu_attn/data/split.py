"""Leave-one-out split of the events of each user.

The last event is for testing, the one before it for validation, and the rest for training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .events import EventLog

__all__ = ["HELD_OUT", "Windows", "held_out_windows", "training_windows"]

HELD_OUT: dict[str, int] = {"validation": 2, "test": 1}
"""The event that each split predicts, counted from the end of the user's events."""


@dataclass(frozen=True)
class Windows:
    """Runs of consecutive events of one user each.

    A run of n events makes a sequence of n - 1 rows: each event but the last is an input, and the
    event after it is its target.

    Attributes:
        users: `(n,)` int64, the user of each run.
        starts: `(n,)` int64, the first event of each run.
        ends: `(n,)` int64, one past the last event of each run.
    """

    users: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.users)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Rows of each sequence, `(n,)` int64."""
        return self.ends - self.starts - 1

    def take(self, indices: NDArray[np.int64]) -> Windows:
        """Returns the runs at the indices, in their order."""
        return Windows(self.users[indices], self.starts[indices], self.ends[indices])


def training_windows(
    log: EventLog,
    max_seq_len: int,
    *,
    before: Literal["validation", "test"] = "validation",
    latest_only: bool = False,
) -> Windows:
    """Returns the training events, in sequences of at most `max_seq_len` rows.

    A longer history is cut from its recent end, so only its oldest sequence is short. The target of
    the last row of a sequence is the first input of the next sequence.

    Args:
        log: the events.
        max_seq_len: rows of the longest sequence.
        before: the split before whose held-out event the training events end.
        latest_only: keeps only the most recent sequence of each user.
    """
    limits = log.offsets[1:] - HELD_OUT[before]
    rows = np.maximum(limits - log.offsets[:-1] - 1, 0)
    pieces = -(-rows // max_seq_len)
    if latest_only:
        pieces = np.minimum(pieces, 1)
    users = np.repeat(np.arange(log.num_users), pieces)
    piece = np.arange(len(users)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    ends = limits[users] - piece * max_seq_len
    starts = np.maximum(ends - 1 - max_seq_len, log.offsets[users])
    return Windows(users, starts, ends)


def held_out_windows(
    log: EventLog, split: Literal["validation", "test"], max_seq_len: int
) -> Windows:
    """Returns one sequence per user, whose last target is the event that `split` holds out.

    Its inputs are the events before that one, at most `max_seq_len` of them.
    """
    ends = log.offsets[1:] - HELD_OUT[split] + 1
    starts = np.maximum(ends - 1 - max_seq_len, log.offsets[:-1])
    return Windows(np.arange(log.num_users), starts, ends)
