"""The biases that are added to the scores: a dense one, or one that the kernel computes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "Bias",
    "DenseBias",
    "RelativeBias",
    "bias_of_heads",
    "default_bucket_thresholds",
    "thresholds_tensor",
    "time_bucket",
    "time_difference",
]

# Width of a time bucket in units of ln(seconds), as in the public research HSTU.
BUCKET_LOG_WIDTH = 0.301
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, eq=False)
class DenseBias:
    """A dense relative attention bias.

    Attributes:
        rab: `(batch, bias heads, max_seqlen_k, max_seqlen_k)`, of q's dtype or fp32, last dimension
            contiguous. `rab[b, n, i, j]` is added to the score of the query at absolute position
            `i` and the key at position `j`. The number of heads must be a multiple of the number of
            bias heads; head `x` uses bias head `x // (heads / bias heads)`. If it requires a
            gradient it gets one, of the same shape, 0 outside the mask.

    Raises:
        ValueError: if there is no tensor. Shape and dtype are checked by the call.
    """

    rab: Tensor

    def __post_init__(self) -> None:
        if self.rab is None:
            raise ValueError("rab: expected a tensor, got None")


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """A bias of position and time differences, computed in the kernel from two small tables.

    bias[n, i, j] = pos_weight[n, clamp(j - i, -(R-1), R-1) + R - 1]
                  + ts_weight[n, bucket(|row_time[i] - timestamps[j]|)]

    This is the relative bias of Zhai et al. 2024 (arXiv 2402.17152, section 3.2) with no
    `(batch, heads, N, N)` tensor in memory. Either table may be left out.

    `hstu_attention` multiplies the sum of score and bias by `alpha`. Tables trained where the bias
    is added to `alpha` times the score must be divided by `alpha`; gradients are then those of the
    divided tables.

    Attributes:
        pos_weight: `(1 or a divisor of heads, 2R - 1)`, fp32 or q's dtype.
        ts_weight: `(1 or a divisor of heads, buckets)`, fp32 or q's dtype; needs `timestamps`.
        timestamps: int64 `(total_k,)`: the time of each key's event, in seconds or any other unit.
        row_timestamps: int64 `(total_q,)`: the time of each query row. None means the time of the
            event after the row or, for the last row, its own time.
        thresholds: int64, non-decreasing: `bucket(d)` counts the entries that are `<= d` and is
            clamped to the last bucket. None means `floor(ln(max(d, 1)) / 0.301)`, exactly.
            `log_thresholds` and `sqrt_thresholds` make other thresholds.

    Raises:
        ValueError: if no table is given, or times without their table. Shapes, dtypes and whether
            a table has its times are checked by the call.
    """

    pos_weight: Tensor | None = None
    ts_weight: Tensor | None = None
    timestamps: Tensor | None = None
    row_timestamps: Tensor | None = None
    thresholds: Tensor | None = None

    def __post_init__(self) -> None:
        if self.pos_weight is None and self.ts_weight is None:
            raise ValueError("pos_weight: expected pos_weight or ts_weight or both, got neither")
        if self.ts_weight is None:
            for name, value in (
                ("timestamps", self.timestamps),
                ("row_timestamps", self.row_timestamps),
                ("thresholds", self.thresholds),
            ):
                if value is not None:
                    raise ValueError(f"{name}: expected None without ts_weight, got a tensor")

    @staticmethod
    def log_thresholds(
        num_buckets: int,
        increment: float = 1.0,
        divisor: float = 1.0,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Makes thresholds of logarithmic buckets.

        With them `bucket(d)` is `ln(max(d, 1e-6) / increment) / divisor`, truncated and clamped to
        `[0, num_buckets]`, for every int64 `d >= 0` as fp64 computes it. Increment 1 and divisor
        0.301 are the default of this class.

        Args:
            num_buckets: the last bucket; `ts_weight` has one column more.
            increment: the unit of time differences, such as 60.0 for minutes.
            divisor: width of a bucket, in natural logarithms.
            device: where the thresholds are made.

        Returns:
            int64 `(num_buckets,)`, non-decreasing; shorter where no int64 reaches the last buckets.

        Raises:
            ValueError: for a negative `num_buckets`, or an `increment` or `divisor` that is not
                positive and finite.
        """
        _check_thresholds(num_buckets, increment, divisor)
        found = _first_differences(
            lambda d: math.log(max(float(d), 1e-6) / increment) / divisor, num_buckets
        )
        return torch.tensor(found, dtype=torch.int64, device=device)

    @staticmethod
    def sqrt_thresholds(
        num_buckets: int,
        increment: float = 1.0,
        divisor: float = 1.0,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Makes thresholds of buckets of the square root.

        With them `bucket(d)` is `sqrt(max(d, 1e-6) / increment) / divisor`, truncated and clamped
        to `[0, num_buckets]`, for every int64 `d >= 0` as fp64 computes it. `divisor` is the width
        of a bucket in square roots; the rest is as in `log_thresholds`.
        """
        _check_thresholds(num_buckets, increment, divisor)
        found = _first_differences(
            lambda d: math.sqrt(max(float(d), 1e-6) / increment) / divisor, num_buckets
        )
        return torch.tensor(found, dtype=torch.int64, device=device)


Bias = DenseBias | RelativeBias


def _first_differences(value: Callable[[int], float], num_buckets: int) -> tuple[int, ...]:
    """Returns the smallest int64 `d >= 0` with `value(d) >= b`, for `b` from 1 to `num_buckets`.

    `value` must not decrease. The list ends before the first `b` that no int64 reaches.
    """
    found: list[int] = []
    for bucket in range(1, num_buckets + 1):
        if value(_INT64_MAX) < bucket:
            break
        low = found[-1] if found else 0
        found.append(bisect_left(range(_INT64_MAX), float(bucket), low, _INT64_MAX, key=value))
    return tuple(found)


def _check_thresholds(num_buckets: int, increment: float, divisor: float) -> None:
    if num_buckets < 0:
        raise ValueError(f"num_buckets: expected 0 or more, got {num_buckets}")
    for name, number in (("increment", increment), ("divisor", divisor)):
        if not 0 < number < math.inf:
            raise ValueError(f"{name}: expected a positive finite number, got {number}")


# These are computed once: bisection over 63 bits for each of 145 buckets takes a millisecond or
# two.
_DEFAULT_THRESHOLDS = _first_differences(
    lambda d: math.log(float(max(d, 1))) / BUCKET_LOG_WIDTH, 1 << 10
)


def default_bucket_thresholds() -> tuple[int, ...]:
    """Returns the smallest time difference of each bucket from 1 on, up to the largest int64.

    With these, counting the entries `<= d` gives `floor(ln(max(d, 1)) / 0.301)` as fp64 computes
    it, for every `d >= 0`. The list is non-decreasing: bucket 1 holds no integer, so its entry
    equals that of bucket 2.
    """
    return _DEFAULT_THRESHOLDS


_thresholds: dict[tuple[torch.device, tuple[int, ...] | None], Tensor] = {}


def thresholds_tensor(device: torch.device, values: tuple[int, ...] | None = None) -> Tensor:
    """Returns thresholds as int64 on `device`, made once for each device and each list.

    Compiled graphs hold the tensor on its device. If they held a list, each call would copy the
    list from the host, and `torch.compile` would not capture the graphs as CUDA graphs.

    Args:
        device: the device of the tensor.
        values: the thresholds; None is `default_bucket_thresholds`.
    """
    thresholds = _thresholds.get((device, values))
    if thresholds is None:
        numbers = _DEFAULT_THRESHOLDS if values is None else values
        thresholds = torch.tensor(numbers, dtype=torch.int64, device=device)
        # A tensor that torch.export traces, or one without data, must not be cached.
        if type(thresholds) is Tensor and not torch.compiler.is_compiling():
            _thresholds[device, values] = thresholds
    return thresholds


# NOTE: this is what torch.compiler.assume_constant_result does, which imports the whole compiler.
thresholds_tensor._dynamo_marked_constant = True  # type: ignore[attr-defined]


def bias_of_heads(
    table: Tensor | None, heads: int, first: int, count: int, dim: int = 0
) -> Tensor | None:
    """Returns the part of a bias tensor that some heads of a call use.

    Args:
        table: the tensor, with a divisor of `heads` along `dim`; or None.
        heads: the heads of the whole call.
        first: the first of the heads.
        count: the number of consecutive heads.
        dim: the dimension of the heads.

    Returns:
        a tensor for a call of `count` heads: a view, or a copy where heads that share an entry are
        divided unevenly.
    """
    if table is None:
        return None
    sharing = heads // table.shape[dim]
    entry, last = first // sharing, (first + count - 1) // sharing
    if entry == last or (first % sharing == 0 and count % sharing == 0):
        return table.narrow(dim, entry, last + 1 - entry)
    number = torch.arange(first, first + count, device=table.device)
    return table.index_select(dim, number // sharing)


def time_difference(times: Tensor, others: Tensor) -> Tensor:
    """Returns `|times - others|`, saturated at the largest int64.

    Every threshold is at most the largest int64, so this does not change the bucket.
    """
    difference = torch.maximum(times, others) - torch.minimum(times, others)
    return difference.masked_fill_(difference < 0, _INT64_MAX)


def time_bucket(difference: Tensor, thresholds: Tensor, num_buckets: int) -> Tensor:
    """Returns the bucket of each time difference: the number of thresholds `<= d`, clamped."""
    bucket = torch.searchsorted(thresholds, difference.contiguous(), right=True)
    return bucket.clamp(max=num_buckets - 1)
