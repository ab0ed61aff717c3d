"""Attention with a bias under context parallelism: ranks exchange rows for heads.

A bias depends on the positions of rows and keys in the whole sequence, which a shard of the keys
does not have. So each rank gets all rows of a part of the heads, calls the operator as one process
would, and returns the outputs to the ranks that hold the rows, as in Jacobs et al. 2023, "DeepSpeed
Ulysses" (arXiv 2309.14509). The backward exchanges gradients in the same way.

With fewer heads than ranks, several ranks share a head; each of them computes the head for the rows
of some of the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import ops
from ..bias import bias_of_heads
from ..call import AttentionCall, BiasTensors, mask_of, with_mask
from ..mask import Mask, select_rows
from .context_rows import MaskMemo

__all__ = ["attend_by_heads"]


class ContextBatch(Protocol):
    """The fields of a `context_parallel.ContextBatch` that the exchange reads."""

    group: dist.ProcessGroup | None
    rank: int
    world: int
    seq_offsets: Tensor
    total: int
    slots: Tensor
    num_slots: int
    masks: MaskMemo

    @property
    def gather_index(self) -> Tensor: ...

    def to_slots(self, local: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class _Part:
    """The work of a rank: its heads, for the rows of the ranks that it serves."""

    first: int  # the first of its heads
    count: int  # how many it has
    number: int  # its number among the ranks with the same heads
    ranks: int  # how many ranks have these heads

    @property
    def end(self) -> int:
        """The head after the last of its heads."""
        return self.first + self.count

    def serves(self, rank: int) -> bool:
        """Returns whether it computes the rows that `rank` holds."""
        return rank % self.ranks == self.number


@lru_cache
def _parts(heads: int, world: int) -> tuple[_Part, ...]:
    """Returns the part of each rank."""
    firsts = [rank * heads // world for rank in range(world + 1)]
    return tuple(
        _Part(
            first,
            max(firsts[rank + 1] - first, 1),
            number=rank - firsts.index(first),
            ranks=firsts[:world].count(first),
        )
        for rank, first in enumerate(firsts[:world])
    )


def attend_by_heads(
    batch: ContextBatch, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, bias: BiasTensors
) -> Tensor:
    """Computes `ops.attention` of the whole sequences, for the local rows.

    Every rank must call it, and its backward. A rank's gradients of the bias are those of the heads
    and rows that it computes; their sum over the group is the whole gradient.

    Args:
        batch: which rank holds which rows.
        q, k, v: `(local rows, heads, width)`.
        call, bias: the call and the bias of the whole sequences and all heads, equal on all ranks.

    Returns:
        `(local rows, heads, Dv)` of q's dtype.

    Raises:
        ValueError: for bias tensors whose heads do not divide those of q, or a mask of other heads;
            and as `hstu_attention`.
    """
    heads = q.shape[1]
    parts = _parts(heads, batch.world)
    mine = parts[batch.rank]
    # Errors of bias and mask are raised on all ranks, before any waits for another.
    own_bias = _bias_of_part(bias, heads, mine)
    mask = batch.masks.get(
        mask_of(call), lambda mask: _mask_of_part(batch, mask, heads, mine), heads
    )
    whole_q = cast(Tensor, _RowsToHeads.apply(q, batch, parts, True))
    kv = cast(Tensor, _RowsToHeads.apply(torch.cat([k, v], -1), batch, parts, False))
    whole_k, whole_v = kv.split([k.shape[2], v.shape[2]], -1)
    out = ops.attention(whole_q, whole_k, whole_v, with_mask(call, mask), own_bias)
    return cast(Tensor, _HeadsToRows.apply(out, batch, parts, heads))


def _bias_of_part(bias: BiasTensors, heads: int, part: _Part) -> BiasTensors:
    rab, pos_weight, ts_weight = bias
    for name, tensor, dims, of_heads in (
        ("rab", rab, 4, 1),
        ("pos_weight", pos_weight, 2, 0),
        ("ts_weight", ts_weight, 2, 0),
    ):
        if tensor is None:
            continue
        if tensor.dim() != dims or tensor.shape[of_heads] < 1 or heads % tensor.shape[of_heads]:
            raise ValueError(
                f"{name}: expected {dims} dimensions and a number of heads that divides {heads} in "
                f"dimension {of_heads}, got shape {tuple(tensor.shape)}"
            )
    return (
        bias_of_heads(rab, heads, part.first, part.count, dim=1),
        bias_of_heads(pos_weight, heads, part.first, part.count),
        bias_of_heads(ts_weight, heads, part.first, part.count),
    )


def _mask_of_part(batch: ContextBatch, mask: Mask, heads: int, part: _Part) -> Mask:
    """Returns the mask of a part's heads, in which rows that it does not serve see nothing.

    Those rows of q are zero, and nobody reads their outputs; the mask saves their time.
    """
    for name in ("row_spans", "func"):
        tensor = getattr(mask, name)
        if tensor is None or tensor.dim() != 3 or (name == "func" and tensor.shape[0] == 1):
            continue
        if tensor.shape[0] != heads:
            raise ValueError(f"{name}: expected {heads} heads, got shape {tuple(tensor.shape)}")
        mask = replace(mask, **{name: tensor[part.first : part.end]})
    if part.ranks == 1:
        return mask
    rows = torch.arange(batch.total, device=batch.seq_offsets.device)
    mask = select_rows(mask, batch.seq_offsets, rows, batch.total)
    served = batch.gather_index // max(batch.num_slots, 1) % part.ranks == part.number
    if mask.row_spans is not None:
        return Mask.from_row_spans(mask.row_spans * served[:, None])
    assert mask.func is not None
    return Mask.from_func(mask.func * served)


# ---------------------------------------------------------------------------------------------
# The exchange
# ---------------------------------------------------------------------------------------------


class _RowsToHeads(torch.autograd.Function):
    """Makes `(total, heads of this rank, width)` of each rank's `(local rows, heads, width)`.

    With `served_only`, rows of ranks that this one does not serve are zero.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, batch: ContextBatch, parts: Sequence[_Part], served_only: bool
    ) -> Tensor:
        ctx.rest = batch, parts, served_only, x.shape[1]
        return _to_heads(x, batch, parts, served_only)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        batch, parts, served_only, heads = ctx.rest
        return _to_rows(gradient, batch, parts, served_only, heads), None, None, None


class _HeadsToRows(torch.autograd.Function):
    """Makes `(local rows, heads, width)` of each rank's `(total, heads of that rank, width)`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, batch: ContextBatch, parts: Sequence[_Part], heads: int
    ) -> Tensor:
        ctx.rest = batch, parts
        return _to_rows(x, batch, parts, True, heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        batch, parts = ctx.rest
        return _to_heads(gradient, batch, parts, True), None, None, None


def _to_heads(x: Tensor, batch: ContextBatch, parts: Sequence[_Part], served_only: bool) -> Tensor:
    mine, slots = parts[batch.rank], batch.to_slots(x)
    shape = (batch.num_slots, mine.count, x.shape[2])
    arrived = _exchange(
        [
            slots[: _slots(batch, part, batch.rank, served_only), part.first : part.end]
            for part in parts
        ],
        [(_slots(batch, mine, rank, served_only), *shape[1:]) for rank in range(batch.world)],
        batch.group,
    )
    whole = [of_rank if len(of_rank) else x.new_zeros(shape) for of_rank in arrived]
    return torch.cat(whole).index_select(0, batch.gather_index)


def _to_rows(
    x: Tensor, batch: ContextBatch, parts: Sequence[_Part], served_only: bool, heads: int
) -> Tensor:
    mine, width = parts[batch.rank], x.shape[2]
    slots = x.new_zeros((batch.world * batch.num_slots, mine.count, width))
    slots = slots.index_copy_(0, batch.gather_index, x).unflatten(0, (batch.world, -1))
    arrived = _exchange(
        [slots[rank, : _slots(batch, mine, rank, served_only)] for rank in range(batch.world)],
        [(_slots(batch, part, batch.rank, served_only), part.count, width) for part in parts],
        batch.group,
    )
    # Ranks with the same heads have a part of the sum each.
    dtype = x.dtype if served_only else torch.promote_types(x.dtype, torch.float32)
    total = x.new_zeros((batch.num_slots, heads, width), dtype=dtype)
    for part, of_part in zip(parts, arrived, strict=True):
        total[: len(of_part), part.first : part.end] += of_part
    return total.index_select(0, batch.slots).to(x.dtype)


def _slots(batch: ContextBatch, part: _Part, rank: int, served_only: bool) -> int:
    """Returns how many slots the rank of `part` and the holder of rows `rank` exchange."""
    return batch.num_slots if part.serves(rank) or not served_only else 0


def _exchange(
    outgoing: list[Tensor], shapes: list[tuple[int, ...]], group: dist.ProcessGroup | None
) -> list[Tensor]:
    """Sends `outgoing[r]` to each rank `r`; returns what arrives from each, of `shapes[r]`."""
    sent = torch.cat([x.flatten() for x in outgoing])
    sizes = [math.prod(shape) for shape in shapes]
    received = sent.new_empty(sum(sizes))
    dist.all_to_all_single(received, sent, sizes, [x.numel() for x in outgoing], group)
    return [x.view(shape) for x, shape in zip(received.split(sizes), shapes, strict=True)]
