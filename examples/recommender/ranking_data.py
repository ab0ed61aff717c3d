"""The data of a ranking model.

They are windows of a user's events, in which the actions on the last few events are predicted from
the earlier events.

A window is a request as it is served: a history of events with their actions, then candidates that
are scored together. The candidates are the user's next events, without their actions, which are the
labels. The time of the request is the time of the first candidate. The input has no information
from after that time except the candidates' items.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hstu_attn.capture import pad_offsets, pad_rows, padded_size
from hstu_attn.data import ACTIONS, BalancedBatchSampler, EventLog, SamplerState
from hstu_attn.data.batches import require_each
from hstu_attn.upload import upload

__all__ = [
    "CONTEXTS",
    "RATING_ACTIONS",
    "EndlessBatches",
    "RankingBatch",
    "RankingData",
    "RankingWindows",
    "Split",
    "check_ranking_batch",
    "context_rows",
    "event_bits",
    "hashed_rows",
]

Split = Literal["training", "validation", "test"]

RATING_LEVELS = (2, 3, 4, 5)
RATING_ACTIONS = tuple(f"rating_{level}" for level in RATING_LEVELS)
"""Actions of data that have ratings: of at least this many stars."""

CONTEXTS = ("user", "activity", "hour")
"""The contextual features of a window: the user; how many events they had before, by powers of two;
and the hour of the day, UTC."""

ACTIVITY_BUCKETS = 32
SECONDS_PER_HOUR, HOURS_PER_DAY = 3600, 24
HASH_MULTIPLIER = 0x9E3779B97F4A7C15  # the factor of Fibonacci hashing: 2**64 over the golden ratio


@dataclass(frozen=True)
class RankingWindows:
    """Runs of consecutive events of one user each: a history, perhaps empty, then candidates.

    Attributes:
        users: `(n,)` int64, the user of each window.
        starts: `(n,)` int64, the first event of each history.
        requests: `(n,)` int64, the first candidate.
        ends: `(n,)` int64, one past the last candidate.
    """

    users: NDArray[np.int64]
    starts: NDArray[np.int64]
    requests: NDArray[np.int64]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.users)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Returns the rows of each sequence in the model.

        They are those of contexts, two for each event of the history, and one for each candidate.
        """
        return len(CONTEXTS) + 2 * (self.requests - self.starts) + self.ends - self.requests

    def take(self, indices: NDArray[np.int64]) -> RankingWindows:
        """Returns the windows at the indices, in their order."""
        return RankingWindows(*(getattr(self, field.name)[indices] for field in fields(self)))


@dataclass(frozen=True)
class RankingBatch:
    """Packed windows.

    Window `b` owns the events `history_offsets[b] .. history_offsets[b + 1]` and the candidates
    `target_offsets[b] .. target_offsets[b + 1]`. Events and candidates past the last offset, as
    `padded` appends them, belong to no window.

    Attributes:
        contexts: `(batch, len(CONTEXTS))` int64.
        history_offsets: `(batch + 1,)` int64.
        history_items: `(events,)` int64.
        history_actions: `(events,)` int64, what the user did about each, as bits.
        history_timestamps: `(events,)` int64.
        request_timestamps: `(batch,)` int64, when the candidates are scored.
        target_offsets: `(batch + 1,)` int64.
        target_items: `(targets,)` int64, the candidates.
        target_actions: `(targets,)` int64, the labels; not an input of the model.
    """

    contexts: Tensor
    history_offsets: Tensor
    history_items: Tensor
    history_actions: Tensor
    history_timestamps: Tensor
    request_timestamps: Tensor
    target_offsets: Tensor
    target_items: Tensor
    target_actions: Tensor

    @property
    def total(self) -> int:
        """Returns the number of rows of the windows in the model; on a GPU this synchronizes."""
        of_windows = 2 * self.history_offsets[-1] + self.target_offsets[-1]
        return self.contexts.numel() + int(of_windows)

    def to(self, device: torch.device) -> RankingBatch:
        """Returns the batch on another device, by one asynchronous copy."""
        return RankingBatch(*upload([getattr(self, field.name) for field in fields(self)], device))

    def padded(self) -> RankingBatch:
        """Pads the batch with empty windows and unused events, so that few shapes occur.

        The number of windows becomes a power of two, and the numbers of events and of candidates a
        `hstu_attn.capture.padded_size`.
        """
        windows = padded_size(len(self.contexts), 1)
        events, targets = padded_size(len(self.history_items)), padded_size(len(self.target_items))
        return RankingBatch(
            contexts=pad_rows(self.contexts, windows),
            history_offsets=pad_offsets(self.history_offsets, windows),
            history_items=pad_rows(self.history_items, events),
            history_actions=pad_rows(self.history_actions, events),
            history_timestamps=pad_rows(self.history_timestamps, events),
            request_timestamps=pad_rows(self.request_timestamps, windows),
            target_offsets=pad_offsets(self.target_offsets, windows),
            target_items=pad_rows(self.target_items, targets),
            target_actions=pad_rows(self.target_actions, targets),
        )


class RankingData:
    """Windows and batches of a log, for training, validation and test by time.

    The last `held_out` events of each user are the candidates of the test, and those before them
    the candidates of the validation. Users with few events have fewer held out, so that one event
    is always trained on.

    With `held_out_share`, the latest events of all users, that fraction of them, are for the test,
    and as many before them for the validation, as when a model is trained at one time and serves
    afterwards. These events are divided into windows as in training: the history of a window has
    all earlier events of the user. Some users have no events to train on, or none held out.

    Args:
        log: the events.
        max_history: events before the candidates; older ones are left out.
        max_targets: candidates of a window in training.
        held_out: events of each user in validation and test, candidates of one window.
        user_buckets: users share this many embeddings, by a hash, if there are more users.
        held_out_share: above 0 and below a half; None holds out `held_out` events of each user.

    Attributes:
        actions: the names of the bits of an action.
        bits: `(num_events,)` uint8, what was done, as bits.
        sizes: the sizes of the embedding tables that the features index, by name.
        bounds: `(4, num_users)` int64, the first event of each user in training, validation and
            test, and one past the user's last.
        most_targets: no window has more candidates.

    Raises:
        ValueError: times by which no event is in one of the splits.
    """

    def __init__(
        self,
        log: EventLog,
        max_history: int,
        max_targets: int,
        held_out: int,
        user_buckets: int,
        held_out_share: float | None = None,
    ) -> None:
        self.log = log
        self.max_history = max_history
        self.max_targets = max_targets
        self.actions, self.bits = event_bits(log)
        self.sizes = {
            "item": log.num_items,
            "user": min(log.num_users, user_buckets),
            "activity": ACTIVITY_BUCKETS,
            "hour": HOURS_PER_DAY,
        }
        first, last = log.offsets[:-1], log.offsets[1:]
        if held_out_share is None:
            held_out_events = np.minimum(held_out, (np.diff(log.offsets) - 1) // 2)
            self.held_out_targets = int(held_out_events.max())
            self.bounds = np.stack(
                [first, last - 2 * held_out_events, last - held_out_events, last]
            )
        else:
            self.held_out_targets = max_targets
            ends = [first + _count_before(log, time) for time in _cuts(log, held_out_share)]
            self.bounds = np.stack([first, *ends, last])
        self.most_targets = max(max_targets, self.held_out_targets)

    def windows(self, split: Split) -> RankingWindows:
        """Returns all windows of a split.

        Each event of the split is a candidate once. The windows are cut from the recent end, so
        that only the oldest window of a user has fewer candidates.
        """
        splits = get_args(Split)
        if split not in splits:
            raise ValueError(f"split: expected one of {splits}, got {split!r}")
        most = self.max_targets if split == "training" else self.held_out_targets
        first, last = self.bounds[splits.index(split) : splits.index(split) + 2]
        pieces = -(-(last - first) // most)
        users = np.repeat(np.arange(self.log.num_users), pieces)
        piece = np.arange(len(users)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        ends = last[users] - piece * most
        requests = np.maximum(ends - most, first[users])
        starts = np.maximum(requests - self.max_history, self.log.offsets[users])
        return RankingWindows(users, starts, requests, ends)

    def batch(self, windows: RankingWindows) -> RankingBatch:
        """Packs windows, in their order."""
        log = self.log
        history, history_offsets = _events_of(windows.starts, windows.requests)
        targets, target_offsets = _events_of(windows.requests, windows.ends)
        request_timestamps = log.timestamps[windows.requests]
        columns: tuple[NDArray[Any], ...] = (
            self._contexts(windows, request_timestamps),
            history_offsets,
            log.items[history],
            self.bits[history],
            log.timestamps[history],
            request_timestamps,
            target_offsets,
            log.items[targets],
            self.bits[targets],
        )
        return RankingBatch(*(torch.from_numpy(column.astype(np.int64)) for column in columns))

    def training_events(self) -> NDArray[np.int64]:
        """Returns the events that are candidates in training, increasing."""
        windows = self.windows("training")
        return np.sort(_events_of(windows.requests, windows.ends)[0])

    def user_of(self, events: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the user of each event."""
        return np.searchsorted(self.log.offsets, events, side="right") - 1

    def user_rows(self, users: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the row of each user in the table "user"."""
        return hashed_rows(users, self.log.num_users, self.sizes["user"])

    def labels(self, bits: NDArray[Any], tasks: Sequence[str]) -> NDArray[np.bool_]:
        """Converts action bits `(n,)` to labels of the tasks, `(n, tasks)`."""
        columns = np.array([self.actions.index(task) for task in tasks])
        done: NDArray[np.bool_] = (bits[:, None] >> columns & 1).astype(bool)
        return done

    def _contexts(
        self, windows: RankingWindows, request_timestamps: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        events_before = windows.requests - self.log.offsets[windows.users]
        return context_rows(self.user_rows(windows.users), events_before, request_timestamps)


def hashed_rows(users: NDArray[np.int64], num_users: int, buckets: int) -> NDArray[np.int64]:
    """Returns the rows of users in a table of `buckets` rows; several share one if there are more.

    Users are numbered from 0 to `num_users - 1`.
    """
    if num_users <= buckets:
        return users
    hashed = users.astype(np.uint64) * np.uint64(HASH_MULTIPLIER) >> np.uint64(32)
    rows: NDArray[np.int64] = (hashed % np.uint64(buckets)).astype(np.int64)
    return rows


def context_rows(
    user_rows: NDArray[np.int64], events_before: NDArray[np.int64], times: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Returns the contextual features of requests, `(n, len(CONTEXTS))`.

    Args:
        user_rows: `(n,)`, the row of each user in the table "user".
        events_before: `(n,)`, how many events each user had before.
        times: `(n,)`, of the requests, in seconds.
    """
    activity = np.log2(events_before + 1).astype(np.int64).clip(max=ACTIVITY_BUCKETS - 1)
    hour = times // SECONDS_PER_HOUR % HOURS_PER_DAY
    return np.stack([user_rows, activity, hour], axis=1)


def event_bits(log: EventLog) -> tuple[tuple[str, ...], NDArray[np.uint8]]:
    """Returns the names of a log's actions, and what was done at each event, as bits of them."""
    if "actions" in log.columns:
        return ACTIONS, log.columns["actions"]
    return RATING_ACTIONS, _rating_bits(log.ratings)


def _cuts(log: EventLog, share: float) -> tuple[int, int]:
    """Returns the times at which the validation and the test begin."""
    count = round(share * log.num_events)
    places = [log.num_events - 2 * count, log.num_events - count]
    times = np.partition(log.timestamps, [0, *places])
    validation, test = times[places].tolist()
    if not (times[0] < validation < test):
        raise ValueError(
            f"held_out_share: expected times that differ where {share:g} of the {log.num_events:,} "
            f"events are for validation and for test, got {validation} and {test} (the first is "
            f"{times[0]})"
        )
    return validation, test


def _count_before(log: EventLog, time: int) -> NDArray[np.int64]:
    """Returns how many events each user has before a time."""
    before: NDArray[np.int64] = np.add.reduceat(
        log.timestamps < time, log.offsets[:-1], dtype=np.int64
    )
    return before


def _rating_bits(ratings: NDArray[np.float32]) -> NDArray[np.uint8]:
    bits = np.zeros(len(ratings), np.uint8)
    for bit, level in enumerate(RATING_LEVELS):
        bits |= (ratings >= level).astype(np.uint8) << bit
    return bits


def _events_of(
    starts: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the events of all runs, one run after the other, and the offsets of the runs."""
    lengths = ends - starts
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths), offsets


def check_ranking_batch(
    batch: RankingBatch, sizes: Mapping[str, int], num_actions: int, max_rows: int
) -> None:
    """Checks a batch on the CPU before its values index embeddings.

    Args:
        batch: the batch.
        sizes: the sizes of the embedding tables, by the names of the features.
        num_actions: how many bits an action has.
        max_rows: no sequence has more rows in the model.

    Raises:
        ValueError: naming the feature, the row, what was expected and what is there.
    """
    size = len(batch.contexts)
    if batch.contexts.shape != (size, len(CONTEXTS)):
        raise ValueError(
            f"contexts: expected shape (batch, {len(CONTEXTS)}), got {tuple(batch.contexts.shape)}"
        )
    for column, name in enumerate(CONTEXTS):
        _check_range(f"contexts ({name})", batch.contexts[:, column], size, sizes[name])
    _check_range("request_timestamps", batch.request_timestamps, size, None)
    for part, features in (
        ("history", {"items": sizes["item"], "actions": 1 << num_actions, "timestamps": None}),
        ("target", {"items": sizes["item"], "actions": 1 << num_actions}),
    ):
        total = len(getattr(batch, f"{part}_items"))
        _check_offsets(f"{part}_offsets", getattr(batch, f"{part}_offsets"), size, total)
        for name, limit in features.items():
            _check_range(f"{part}_{name}", getattr(batch, f"{part}_{name}"), total, limit)
    rows = 2 * batch.history_offsets.diff() + batch.target_offsets.diff() + len(CONTEXTS)
    require_each(rows <= max_rows, "rows of a sequence", rows, f"at most {max_rows}")
    times = batch.history_timestamps
    request = torch.repeat_interleave(batch.request_timestamps, batch.history_offsets.diff())
    require_each(times <= request, "history_timestamps", times, "none after the request")


def _check_range(name: str, feature: Tensor, total: int, limit: int | None) -> None:
    if feature.shape != (total,) or feature.dtype != torch.int64:
        raise ValueError(
            f"{name}: expected int64 of shape ({total},), "
            f"got {feature.dtype} of {tuple(feature.shape)}"
        )
    if limit is not None:
        good = (feature >= 0) & (feature < limit)
        require_each(good, name, feature, f"0 to {limit - 1}")


def _check_offsets(name: str, offsets: Tensor, size: int, total: int) -> None:
    _check_range(name, offsets, size + 1, None)
    steps = torch.diff(offsets, prepend=offsets.new_zeros(1))
    require_each(steps >= 0, name, offsets, "offsets that start from 0 and do not decrease")
    if offsets[0] != 0 or offsets[-1] != total:
        raise ValueError(
            f"{name}: expected values from 0 to {total}, "
            f"got {int(offsets[0])} and {int(offsets[-1])}"
        )


class EndlessBatches(Iterator[NDArray[np.int64]]):
    """One rank's batches, epoch after epoch, in an order that can be continued.

    Args:
        sampler: draws the batches of an epoch.
    """

    def __init__(self, sampler: BalancedBatchSampler) -> None:
        self.sampler = sampler
        self._epoch = iter(sampler)

    @property
    def epoch(self) -> int:
        """The epoch of the last batch that was drawn, from 0."""
        return self.sampler.epoch

    @property
    def batch(self) -> int:
        """Returns how many batches of the epoch have been drawn."""
        return self.sampler.batch

    @property
    def batches_per_epoch(self) -> int:
        """Batches of an epoch, the same on every rank."""
        return len(self.sampler)

    def __next__(self) -> NDArray[np.int64]:
        if self.batch == self.batches_per_epoch:
            self.load_state_dict({"epoch": self.epoch + 1, "batch": 0})
        indices = np.array(next(self._epoch), np.int64)
        self.sampler.batch += 1
        return indices

    def state_dict(self) -> SamplerState:
        """Returns the position: the epoch, and how many of its batches have been drawn."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: SamplerState) -> None:
        """Continues from a position of a sampler with the same arguments."""
        if state["batch"] == self.batches_per_epoch:  # the next batch is of the next epoch
            state = {"epoch": state["epoch"] + 1, "batch": 0}
        self.sampler.load_state_dict(state)
        self._epoch = iter(self.sampler)
