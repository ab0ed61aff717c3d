"""The gradients of a relative bias' tables, which torch's functions sum from those of the scores.

There are no atomic additions in a varying order, so the sums are deterministic.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["PositionGradient", "TimeGradient", "sum_heads"]

# A bucket is summed in this many parts at the same time, each by one block of threads.
_PARTS = 32


def sum_heads(x: Tensor, heads: int) -> Tensor:
    """Sums consecutive heads that share a head of a bias: `(all heads, ...)` to `(heads, ...)`."""
    return x if x.shape[0] == heads else x.unflatten(0, (heads, -1)).sum(1)


class PositionGradient:
    """The gradient of the position table: the gradient dx of the scores, summed by diagonal."""

    def __init__(self, dpos_weight: Tensor, dtype: torch.dtype) -> None:
        self.result = dpos_weight
        self.sums = torch.zeros(dpos_weight.shape, dtype=dtype, device=dpos_weight.device)

    def add(self, dx: Tensor, lowest_distance: int) -> None:
        by_head = sum_heads(dx.sum(1), self.sums.shape[0])
        heads, rows, keys = by_head.shape
        # With `rows` columns more, a row that is read one element short begins one element later
        # than the row before it. So the diagonals become columns.
        skewed = F.pad(by_head.flip(1), (0, rows)).flatten(1)[:, : rows * (rows + keys - 1)]
        diagonals = skewed.view(heads, rows, rows + keys - 1).sum(1)
        # Distances beyond the table are added to its ends.
        reach = self.sums.shape[1] // 2
        first = lowest_distance
        low = min(max(-reach - first, 0), diagonals.shape[1])
        high = max(min(reach + 1 - first, diagonals.shape[1]), 0)
        self.sums[:, 0] += diagonals[:, :low].sum(1)
        self.sums[:, -1] += diagonals[:, high:].sum(1)
        if low < high:
            begin = first + low + reach
            self.sums[:, begin : begin + high - low] += diagonals[:, low:high]

    def store(self) -> None:
        self.result.copy_(self.sums)


class TimeGradient:
    """The gradient of the time table: the gradient dx of the scores, summed by bucket.

    Sorting dx by bucket makes the elements of a bucket consecutive. A bucket is summed in `_PARTS`
    parts: no atomic addition is needed, and few elements are added one by one.
    """

    def __init__(self, dts_weight: Tensor, dtype: torch.dtype) -> None:
        self.result = dts_weight
        self.sums = torch.zeros(dts_weight.shape, dtype=dtype, device=dts_weight.device)

    def add(self, dx: Tensor, buckets: Tensor) -> None:
        heads, count = self.sums.shape
        by_bucket, order = torch.sort(buckets.flatten(), stable=True)
        edges = torch.arange(count + 1, dtype=torch.int32, device=dx.device)
        bounds = torch.searchsorted(by_bucket, edges)
        parts = torch.arange(_PARTS, device=dx.device)
        begins = bounds[:-1, None] + bounds.diff()[:, None] * parts // _PARTS
        offsets = torch.cat([begins.flatten(), bounds[-1:]])
        for head, values in enumerate(sum_heads(dx, heads).unbind()):
            sums = torch.segment_reduce(
                values.flatten()[order], "sum", offsets=offsets, unsafe=True, initial=0
            )
            self.sums[head] += sums.view(count, _PARTS).sum(1)

    def store(self) -> None:
        self.result.copy_(self.sums)
