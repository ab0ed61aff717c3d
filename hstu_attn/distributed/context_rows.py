"""Computes which rows of a packed batch each rank of a group holds in context parallelism.

Each sequence is cut into `2 * world` chunks, and rank `r` holds chunks `r` and `2 * world - 1 - r`
of it: under a causal mask a cheap one and an expensive one, so that all ranks have the same work.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import AttentionCall
from ..mask import Mask

__all__ = [
    "MaskMemo",
    "Shard",
    "check_call",
    "chunk_bounds",
    "locate_rows",
    "shard_index",
    "shard_rows",
    "to_offsets",
]

_Found = TypeVar("_Found")


def chunk_bounds(seq_offsets: Tensor, world: int) -> Tensor:
    """Returns where the chunks of each sequence begin and end.

    Args:
        seq_offsets: `(batch + 1,)` integers, the offsets of the sequences.
        world: ranks that share the sequences.

    Returns:
        int64 `(batch, 2 * world + 1)`: chunk `c` is positions `bounds[:, c] .. bounds[:, c + 1]`.
        Lengths differ by one at most, and no chunk is longer than the one before it.
    """
    chunks = 2 * world
    lengths = seq_offsets.to(torch.int64).diff()[:, None]
    number = torch.arange(chunks + 1, device=seq_offsets.device)
    return lengths // chunks * number + torch.minimum(lengths % chunks, number)


@dataclass(frozen=True)
class Shard:
    """The rows of one rank; all on the device of the offsets."""

    rank: int
    bounds: Tensor  # (batch, 2 * world + 1) of all chunks
    first: Tensor  # (batch,) length of each sequence's first chunk of this rank
    second: Tensor  # (batch,) and of its second
    offsets: Tensor  # (batch + 1,) of the rank's packed rows

    @classmethod
    def of(cls, bounds: Tensor, rank: int) -> Shard:
        lengths = bounds.diff(dim=1)
        first, second = lengths[:, rank], lengths[:, -1 - rank]
        return cls(rank, bounds, first, second, to_offsets(first + second))

    def locate(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Locates each of `count` local rows.

        Returns the sequence of each row, its number among the local rows of that sequence, and
        whether it is in the second chunk.
        """
        sequence, number = locate_rows(self.offsets, count)
        return sequence, number, number >= self.first[sequence]

    def positions(self, sequence: Tensor, number: Tensor, is_second: Tensor) -> Tensor:
        """Returns the position in its sequence of each row that `locate` found."""
        in_first = self.bounds[sequence, self.rank] + number
        in_second = self.bounds[sequence, -2 - self.rank] + number - self.first[sequence]
        return torch.where(is_second, in_second, in_first)


def to_offsets(lengths: Tensor) -> Tensor:
    """Returns `(n + 1,)` offsets of `n` parts of these lengths, one after the other."""
    return F.pad(lengths.cumsum(0), (1, 0))


def locate_rows(offsets: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the sequence of each of `count` packed rows, and the row's number within it."""
    row = torch.arange(count, device=offsets.device)
    sequence = torch.searchsorted(offsets, row, right=True) - 1
    return sequence, row - offsets[sequence]


def shard_index(seq_offsets: Tensor, rank: int, world: int) -> Tensor:
    """Returns the rows of the packed batch that a rank holds, in its order: int64 `(rows,)`.

    Their number is copied to the host. Arguments and errors are those of `shard_rows`.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank: expected 0 to world - 1 = {world - 1}, got {rank}")
    shard = Shard.of(chunk_bounds(seq_offsets, world), rank)
    located = shard.locate(int(shard.offsets[-1]))
    return seq_offsets.to(torch.int64)[located[0]] + shard.positions(*located)


def shard_rows(x: Tensor, seq_offsets: Tensor, rank: int, world: int) -> Tensor:
    """Returns the rows of `x` that a rank holds; for many tensors see `ContextBatch.shard`.

    Args:
        x: `(total, ...)`, rows of a packed batch.
        seq_offsets: `(batch + 1,)` integers on the device of `x`.
        rank: the rank within its group.
        world: ranks of the group.

    Raises:
        ValueError: for a rank that the group does not have.
    """
    return x.index_select(0, shard_index(seq_offsets, rank, world))


# The optional tensors whose rows of each rank are found. Settings hold for all rows.
_TENSORS = {
    *("num_contexts", "num_targets", "row_spans", "func"),
    *("timestamps", "row_timestamps", "ts_thresholds"),
}


def check_call(call: AttentionCall) -> None:
    """Checks that a call of whole sequences has only tensors that are divided among the ranks.

    Raises:
        NotImplementedError: naming the first other tensor.
    """
    for name, default in AttentionCall._field_defaults.items():
        if default is None and name not in _TENSORS and getattr(call, name) is not None:
            raise NotImplementedError(f"{name}: context parallelism does not have it")


class MaskMemo:
    """Keeps what has been computed from a mask, for the layers that share its tensors."""

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[Any, Any]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def get(self, mask: Mask, find: Callable[[Mask], _Found], *key: Hashable) -> _Found:
        """Returns `find(mask)`, which is called once for equal `key`, settings and tensors."""
        tensors = (mask.num_contexts, mask.num_targets, mask.row_spans, mask.func)
        numbers = (mask.target_group_size, mask.min_full_attn_seq_len, mask.func_causal)
        place = (*key, tuple(mask.window_size), *numbers, *map(id, tensors))
        if place not in self._found:
            # The tensors are kept, so that no other gets the identity of one.
            self._found[place] = tensors, find(mask)
        return cast(_Found, self._found[place][1])
