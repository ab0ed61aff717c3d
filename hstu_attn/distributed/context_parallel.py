"""Context parallelism: the rows of long sequences are divided among the ranks of a group.

Each sequence of a packed batch is cut into `2 * world` chunks, and rank `r` holds chunks `r` and
`2 * world - 1 - r` of it. Under a causal mask one chunk is cheap and one is expensive, so that all
ranks have the same work. All of a layer but attention works on each row separately. For attention,
keys and values travel around the ring of ranks, while each rank computes its rows' attention to the
keys that it holds. HSTU attention (Zhai et al. 2024, "Actions Speak Louder than Words",
arXiv 2402.17152, section 3.2) has no softmax, so the outputs for parts of the keys add up; they are
added in fp32, in the order of the ring, and rounded once. The backward sends keys and values around
again, and their gradients after them. With a bias, ranks exchange rows for heads instead:
context_heads.py.

A rank's rows are a packed batch too: for each sequence the first chunk, then the second.

    rows = ContextBatch(seq_offsets, max_seq_len, group)    where the rows are; once for each batch
    x = rows.shard(x)                                       this rank's rows
    x = stack(x, seq_offsets, max_seq_len, context=rows)    offsets are those of whole sequences
    loss = loss_of(x, rows.shard(labels))                   summed, or averaged over all rows

Each rank's parameters get the gradient of its rows: sum them over the group.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import ops
from ..bias import Bias
from ..call import (
    AttentionCall,
    BiasTensors,
    bias_tensors,
    bias_times,
    make_call,
    mask_of,
    with_mask,
)
from ..mask import Mask, clip_to_keys, sees_anything, select_rows
from ..quantization import E4M3, Quantization
from .context_heads import attend_by_heads
from .context_rows import (
    MaskMemo,
    Shard,
    check_call,
    chunk_bounds,
    locate_rows,
    shard_index,
    shard_rows,
    to_offsets,
)

__all__ = [
    "ContextBatch",
    "chunk_bounds",
    "context_parallel_attention",
    "gather_rows",
    "shard_index",
    "shard_rows",
]

_KEYS_TAG, _GRADIENTS_TAG = 1, 2  # messages between two ranks that are in flight at once


def gather_rows(
    local: Tensor, seq_offsets: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Inverts `shard_rows`; all ranks of a group call it, as `ContextBatch.gather`."""
    return ContextBatch(seq_offsets, 0, group).gather(local)


# ---------------------------------------------------------------------------------------------
# A batch over a group
# ---------------------------------------------------------------------------------------------


class ContextBatch:
    """The distribution of a packed batch's rows over the ranks of a group, for all layers.

    The constructor copies four numbers to the host. The first call with a mask that is neither full
    nor plainly causal also copies the list of key chunks that this rank sees. Nothing else
    synchronizes with the host. Every rank must construct it from the same offsets, and mask tensors
    must not change while it is in use.

    Args:
        seq_offsets: `(batch + 1,)` int32 or int64, the offsets of the whole sequences, from 0 up.
        max_seq_len: at least the length of the longest whole sequence.
        group: the ranks that share the sequences; None means all ranks, or this process alone
            without `torch.distributed`.
        sm_margin: streaming multiprocessors that attention leaves free on a GPU, for the
            communication that overlaps with it.

    Attributes:
        rank, world: this rank within the group, and the group's size.
        rows: int64 `(local rows,)`: the index of each local row in the packed batch.
        positions: int64 `(local rows,)`: the position of each local row in its sequence.
        offsets: int32 `(batch + 1,)`: the offsets of the sequences' local rows.

    Raises:
        ValueError: if `seq_offsets` is not a vector of integers, or for a negative `max_seq_len`.
    """

    def __init__(
        self,
        seq_offsets: Tensor,
        max_seq_len: int,
        group: dist.ProcessGroup | None = None,
        sm_margin: int = 0,
    ) -> None:
        if seq_offsets.dim() != 1 or seq_offsets.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                "seq_offsets: expected int32 or int64 (batch + 1,), got "
                f"{seq_offsets.dtype} {tuple(seq_offsets.shape)}"
            )
        if max_seq_len < 0:
            raise ValueError(f"max_seq_len: expected 0 or more, got {max_seq_len}")
        is_distributed = dist.is_available() and dist.is_initialized()
        self.group = group
        self.rank = dist.get_rank(group) if is_distributed else 0
        self.world = dist.get_world_size(group) if is_distributed else 1
        self.seq_offsets = seq_offsets
        self.max_seq_len = max_seq_len
        self.sm_margin = sm_margin

        self.bounds = chunk_bounds(seq_offsets, self.world)
        shard = Shard.of(self.bounds, self.rank)
        # Keys travel in slots: two for each sequence, as long as its longest chunk. So the shards
        # of all ranks have the same layout. A slot's unused rows hold zeros, and a key and a value
        # of zero contribute exactly zero to every output and gradient, under any mask.
        slot_lengths = self.bounds[:, 1]
        slot_offsets = to_offsets(2 * slot_lengths)
        second_offsets = to_offsets(shard.second)
        counts = (shard.offsets, second_offsets, slot_offsets, seq_offsets.to(torch.int64))
        on_host: list[int] = torch.stack([offsets[-1] for offsets in counts]).tolist()
        num_rows, num_second, self.num_slots, self.total = on_host

        located = sequence, number, is_second = shard.locate(num_rows)
        self.positions = shard.positions(*located)
        self.rows = seq_offsets.to(torch.int64)[sequence] + self.positions
        self.offsets = shard.offsets.to(torch.int32)
        into_second = (slot_lengths - shard.first)[sequence] * is_second
        # Where each local row is in the shard that travels.
        self.slots = slot_offsets[sequence] + number + into_second
        self.calls = _Calls(self, shard, slot_lengths, slot_offsets, sequence, num_second)
        self.masks = MaskMemo()
        self._slot_offsets = slot_offsets

    def shard(self, x: Tensor) -> Tensor:
        """Returns this rank's rows of `x` `(total, ...)`, differentiably."""
        return x.index_select(0, self.rows)

    def gather(self, local: Tensor) -> Tensor:
        """Returns the rows of all ranks, `(total, ...)`, from each rank's `(local rows, ...)`.

        Differentiable: a row's gradient is the sum of all ranks' gradients of the row.
        """
        self._check_rows("local", local)
        padded = self.to_slots(local)
        if self.world > 1:
            padded = cast(Tensor, _AllGather.apply(padded, self.group, self.world))
        return padded.index_select(0, self.gather_index)

    def to_slots(self, local: Tensor) -> Tensor:
        """Returns `(slots, ...)`, the same number on every rank, with the local rows in theirs."""
        padded = local.new_zeros((self.num_slots, *local.shape[1:]))
        return padded.index_copy(0, self.slots, local)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask | None = None,
        bias: Bias | Tensor | None = None,
        alpha: float = 1.0,
        scaling_seqlen: int = -1,
        quantization: Quantization | None = None,
    ) -> Tensor:
        """Computes `hstu_attention` of the whole sequences, for the local rows.

        Gradients of k and v take in what the rows of all ranks contribute, so that every rank must
        call the backward too. Equal inputs give bitwise equal results if they do in the operator.

        With a bias, each rank gets all rows of a part of the heads, instead of keys and values in
        a ring: see `context_heads`.

        Args:
            q: `(local rows, heads, D)`, as for `hstu_attention`.
            k: `(local rows, heads, D)`.
            v: `(local rows, heads, Dv)`.
            mask: the mask of the whole packed batch; None means that rows see everything in their
                sequence.
            bias: as for `hstu_attention` of the whole sequences, with the times of all rows and the
                tensors of all heads. The gradients of its tensors cover only the work of this rank;
                their sum over the group is the whole gradient.
            alpha: factor of the biased scores.
            scaling_seqlen: `scale = 1 / scaling_seqlen`; -1 means the batch's `max_seq_len`.
            quantization: as for `hstu_attention`, but a scale or mean of a whole sequence or tensor
                is computed over the rows, keys and heads of one call of the operator.

        Returns:
            `(local rows, heads, Dv)` of q's dtype. Without a bias, the operator rounds each part of
            a sum to that dtype, and the parts, one or two for each rank, are added in fp32.

        Raises:
            ValueError: for q, k or v of another number of rows or of different dtypes; and as
                `hstu_attention`.
            NotImplementedError: for float8_e4m3fn q, k and v on several ranks.
        """
        call = make_call(
            self.seq_offsets,
            self.max_seq_len,
            mask=mask,
            times=bias_times(bias),
            alpha=alpha,
            scaling_seqlen=scaling_seqlen,
            quantization=quantization,
        )
        return self.attend(q, k, v, call, bias_tensors(bias))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, bias: BiasTensors
    ) -> Tensor:
        """Computes `attention` for a call of the whole sequences, which layers share.

        Args:
            q, k, v: as in `attention`.
            call: what `make_call` makes of the whole sequences. `sm_margin` is that of this batch.
            bias: `(rab, pos_weight, ts_weight)`.

        Raises:
            ValueError, NotImplementedError: as `attention`; the latter also for arguments in `call`
                that several ranks do not pass on.
        """
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            self._check_rows(name, tensor)
            if tensor.dim() != 3 or tensor.dtype != q.dtype:
                raise ValueError(
                    f"{name}: expected {q.dtype} (local rows, heads, width), got {tensor.dtype} "
                    f"{tuple(tensor.shape)}"
                )
        call = call._replace(sm_margin=self.sm_margin)
        if self.world == 1:
            return ops.attention(q, k, v, call, bias)
        check_call(call)
        if q.dtype == E4M3:
            raise NotImplementedError(
                "q: context parallelism does not have float8_e4m3fn; pass bfloat16 or float16 and "
                "quantization=Quantization()"
            )
        if any(tensor is not None for tensor in bias):
            return attend_by_heads(self, q, k, v, call, bias)
        plan = self.calls.of_mask(mask_of(call))
        return cast(Tensor, _ContextAttention.apply(q, k, v, self, plan, call))

    def shift(self, outgoing: Tensor, incoming: Tensor, tag: int) -> list[dist.Work]:
        """Starts to send a tensor to the next rank of the ring and to receive the previous rank's.

        Both tensors have the same size.
        """
        if outgoing.numel() == 0:
            return []
        following, preceding = (self._global_rank(self.rank + step) for step in (1, -1))
        transfers: list[dist.Work] = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, outgoing, following, self.group, tag),
                dist.P2POp(dist.irecv, incoming, preceding, self.group, tag),
            ]
        )
        return transfers

    def _global_rank(self, rank: int) -> int:
        rank %= self.world
        if self.group is None:
            return rank
        return int(dist.get_global_rank(self.group, rank))

    def _check_rows(self, name: str, tensor: Tensor) -> None:
        if tensor.dim() < 1 or tensor.shape[0] != self.rows.shape[0]:
            raise ValueError(
                f"{name}: expected the {self.rows.shape[0]} rows of rank {self.rank} of "
                f"{self.world}, got shape {tuple(tensor.shape)}"
            )

    @cached_property
    def gather_index(self) -> Tensor:
        """int64 `(total,)`: where each row of the packed batch is in the slots of all ranks."""
        sequence, position = locate_rows(self.seq_offsets.to(torch.int64), self.total)
        chunks = 2 * self.world
        # The first chunks have a row more than the others.
        length = self.bounds[sequence, -1] // chunks
        in_long = self.bounds[sequence, -1] % chunks * (length + 1)
        chunk = torch.where(
            position < in_long,
            position // (length + 1),
            chunks - 1 - (self.bounds[sequence, -1] - 1 - position) // length.clamp(min=1),
        )
        is_second = chunk >= self.world
        rank = torch.where(is_second, chunks - 1 - chunk, chunk)
        number = position - self.bounds[sequence, chunk]
        slot = self._slot_offsets[sequence] + number + self.bounds[sequence, 1] * is_second
        return rank * self.num_slots + slot


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    mask: Mask | None = None,
    bias: Bias | Tensor | None = None,
    alpha: float = 1.0,
    scaling_seqlen: int = -1,
    group: dist.ProcessGroup | None = None,
    quantization: Quantization | None = None,
) -> Tensor:
    """Constructs a `ContextBatch` and calls its `attention` once.

    Several layers should share one `ContextBatch` instead, which reads the offsets only once.

    Args:
        q: `(local rows, heads, D)`: the rows that `shard_rows` gives this rank.
        k: `(local rows, heads, D)`.
        v: `(local rows, heads, Dv)`.
        cu_seqlens: `(batch + 1,)` int32 or int64, the offsets of the whole sequences.
        max_seqlen: at least the length of the longest whole sequence.
        mask, bias, alpha, scaling_seqlen: as for `hstu_attention` of the whole sequences.
        group: the ranks that share the sequences; None means all.
        quantization: as in `ContextBatch.attention`.

    Returns:
        `(local rows, heads, Dv)` of q's dtype.

    Raises:
        ValueError, NotImplementedError: as `ContextBatch` and its `attention`.
    """
    return ContextBatch(cu_seqlens, max_seqlen, group).attention(
        q,
        k,
        v,
        mask=mask,
        bias=bias,
        alpha=alpha,
        scaling_seqlen=scaling_seqlen,
        quantization=quantization,
    )


class _AllGather(torch.autograd.Function):
    """Gathers the tensors of all ranks, one after the other."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup | None, world: int) -> Tensor:
        ctx.group, ctx.world = group, world
        gathered = local.new_empty((world, *local.shape))
        dist.all_gather(list(gathered.unbind(0)), local.contiguous(), group=group)
        return gathered.flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        parts = gradient.unflatten(0, (ctx.world, -1)).contiguous()
        local = torch.empty_like(parts[0])
        dist.reduce_scatter(local, list(parts.unbind(0)), group=ctx.group)
        return local, None, None


# ---------------------------------------------------------------------------------------------
# The calls of the operator
# ---------------------------------------------------------------------------------------------


class _Keys(Enum):
    """The keys of a call."""

    OWN = "the local rows"
    SHARD = "the slots of a shard"
    FIRST_TWICE = "of each sequence the first slot, two times over"


@dataclass(frozen=True)
class _Call:
    """One call of the operator for the keys and values that are present."""

    keys: _Keys
    offsets_q: Tensor
    offsets_k: Tensor
    max_q: int
    max_k: int
    mask: Mask
    rows: Tensor | None = None  # the local rows that take part; None for all

    def arguments(self, whole: AttentionCall) -> AttentionCall:
        """Returns the arguments of the operator for a part of the call `whole`."""
        length = whole.max_seqlen_q if whole.scaling_seqlen == -1 else whole.scaling_seqlen
        return with_mask(whole, self.mask)._replace(
            cu_seqlens_q=self.offsets_q,
            cu_seqlens_k=self.offsets_k,
            max_seqlen_q=self.max_q,
            max_seqlen_k=self.max_k,
            scaling_seqlen=length or 1,
            timestamps=None,
            row_timestamps=None,
            ts_thresholds=None,
        )


class _Calls:
    """The calls that a rank makes for each shard.

    The operator wants no more queries than keys in a sequence. That holds in every call below,
    because a sequence has at least as many slots as a rank has rows of it, and no chunk is longer
    than an earlier one.
    """

    def __init__(
        self,
        batch: ContextBatch,
        shard: Shard,
        slot_lengths: Tensor,
        slot_offsets: Tensor,
        sequence: Tensor,
        num_second: int,
    ) -> None:
        # There is no reference cycle, so both free their tensors with the last use of the batch.
        self.batch: ContextBatch = weakref.proxy(batch)
        self.max_chunk = -(-batch.max_seq_len // (2 * batch.world))
        self.slot_lengths = slot_lengths
        self.slot_offsets = slot_offsets.to(torch.int32)
        self.sequence = sequence
        # Each chunk as a sequence of its own.
        self.chunk_offsets = to_offsets(torch.stack([shard.first, shard.second], 1).flatten()).int()
        self.each_slot_offsets = to_offsets(slot_lengths.repeat_interleave(2)).int()
        # The second chunk of every sequence.
        second_offsets = to_offsets(shard.second)
        of, number = locate_rows(second_offsets, num_second)
        self.second_rows = shard.offsets[of] + shard.first[of] + number
        self.second_offsets = second_offsets.to(torch.int32)
        # The slots to take: the first of every sequence, the second, and the first in place of the
        # second.
        of, number = locate_rows(to_offsets(slot_lengths), batch.num_slots // 2)
        self.first_slots = slot_offsets[of] + number
        self.second_slots = self.first_slots + slot_lengths[of]
        self.first_twice = torch.empty(
            batch.num_slots, dtype=torch.int64, device=slot_offsets.device
        )
        self.first_twice[self.first_slots] = self.first_slots
        self.first_twice[self.second_slots] = self.first_slots

    def of_mask(self, mask: Mask) -> list[list[_Call]]:
        """Returns the calls for each rank's shard, found once for the layers that share a mask."""
        return self.batch.masks.get(mask, self._find)

    def _find(self, mask: Mask) -> list[list[_Call]]:
        world = self.batch.world
        if _is_plain(mask, (-1, -1)):
            return [[self._all(mask)]] * world
        if _is_plain(mask, (-1, 0)):
            return [self._causal(source, mask) for source in range(world)]
        chosen = select_rows(mask, self.batch.seq_offsets, self.batch.rows, self.batch.total)
        parts = [self._by_chunk(source, chosen) for source in range(world)]
        sees = iter(torch.stack([sees_anything(part) for pair in parts for part in pair]).tolist())
        return [[self._all(part) for part in pair if next(sees)] for pair in parts]

    def _all(self, mask: Mask) -> _Call:
        most = 2 * self.max_chunk
        return _Call(_Keys.SHARD, self.batch.offsets, self.slot_offsets, most, most, mask)

    def _causal(self, source: int, mask: Mask) -> list[_Call]:
        """Returns the calls for the shard of rank `source` under a causal mask.

        The chunks of a sequence are in this order: first of the lower rank, first of the higher,
        second of the higher, second of the lower.
        """
        if source == self.batch.rank:
            offsets, most = self.batch.offsets, 2 * self.max_chunk
            return [_Call(_Keys.OWN, offsets, offsets, most, most, mask)]
        if source < self.batch.rank:
            # Both chunks see all of the first and nothing of the second.
            chunks, slots, most = self.chunk_offsets, self.each_slot_offsets, self.max_chunk
            return [_Call(_Keys.FIRST_TWICE, chunks, slots, most, most, Mask.full())]
        # The second chunk sees all of both.
        rows, slots, most = self.second_offsets, self.slot_offsets, self.max_chunk
        return [_Call(_Keys.SHARD, rows, slots, most, 2 * most, Mask.full(), self.second_rows)]

    def _by_chunk(self, source: int, mask: Mask) -> list[Mask]:
        """Returns what rows see of each of the two chunks of a shard.

        Rows that see two intervals of the sequence see at most two intervals of a chunk.
        """
        zero = torch.zeros_like(self.slot_lengths)
        chunks = ((source, zero), (2 * self.batch.world - 1 - source, self.slot_lengths))
        parts = []
        for chunk, shift in chunks:
            begin = self.batch.bounds[:, chunk]
            count = self.batch.bounds[:, chunk + 1] - begin
            parts.append(clip_to_keys(mask, *(x[self.sequence] for x in (begin, count, shift))))
        return parts


def _is_plain(mask: Mask, window: tuple[int, int]) -> bool:
    return (
        not mask.is_arbitrary
        and tuple(mask.window_size) == window
        and mask.num_contexts is None
        and mask.num_targets is None
    )


# ---------------------------------------------------------------------------------------------
# The ring
# ---------------------------------------------------------------------------------------------


def _wait(transfers: list[dist.Work]) -> None:
    """Waits until transfers are finished, and removes them from the list."""
    while transfers:
        transfers.pop().wait()


def _ring(batch: ContextBatch, shard: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields every rank's shard in turn, this rank's first, each with the number of its rank.

    While one shard is used, the next is being received. It is received even if the consumer raises
    an exception: its memory must not be freed before, and the ranks' next messages would be
    mistaken for one that nobody has received.
    """
    for step in range(batch.world):
        is_last = step == batch.world - 1
        incoming = shard if is_last else torch.empty_like(shard)
        transfers = [] if is_last else batch.shift(shard, incoming, _KEYS_TAG)
        try:
            yield (batch.rank - step) % batch.world, shard
        finally:
            _wait(transfers)
        shard = incoming


class _ContextAttention(torch.autograd.Function):
    """Attention of the local rows with the keys of all ranks; it saves q, k and v."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: ContextBatch,
        plan: list[list[_Call]],
        whole: AttentionCall,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.rest = batch, plan, whole
        out = q.new_zeros((*q.shape[:2], v.shape[2]), dtype=_sum_dtype(q))
        for source, shard in _ring(batch, _pack(batch, k, v)):
            for call in plan[source]:
                keys = _keys_of(batch, call, k, v, shard)
                part = ops.attention(_rows_of(call, q), *keys, call.arguments(whole))
                _add_rows(out, call.rows, part)
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        batch, plan, whole = ctx.rest
        dout = ops.packed_rows(dout)
        dq = torch.zeros(q.shape, dtype=_sum_dtype(q), device=q.device)
        # The gradients of the shard at hand, which follow it around the ring and then come home.
        sums = dq.new_zeros((batch.num_slots, k.shape[1], k.shape[2] + v.shape[2]))
        arriving = sums
        transfers: list[dist.Work] = []
        try:
            for source, shard in _ring(batch, _pack(batch, k, v)):
                parts = []
                for call in plan[source]:
                    part, *of_keys = ops.attention_gradients(
                        _rows_of(call, dout),
                        _rows_of(call, q),
                        *_keys_of(batch, call, k, v, shard),
                        call.arguments(whole),
                    )
                    _add_rows(dq, call.rows, part)
                    parts.append((call, torch.cat(of_keys, -1)))
                _wait(transfers)
                sums = arriving
                for call, gradients in parts:
                    _add_keys(batch, call, sums, gradients)
                arriving = torch.empty_like(sums)
                transfers = batch.shift(sums, arriving, _GRADIENTS_TAG)
        finally:
            _wait(transfers)
        dk, dv = arriving.index_select(0, batch.slots).split([k.shape[2], v.shape[2]], -1)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


def _sum_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def _pack(batch: ContextBatch, k: Tensor, v: Tensor) -> Tensor:
    """Returns this rank's shard of keys and values in one tensor `(slots, heads, D + Dv)`."""
    shard = k.new_zeros((batch.num_slots, k.shape[1], k.shape[2] + v.shape[2]))
    return shard.index_copy_(0, batch.slots, torch.cat([k, v], -1))


def _rows_of(call: _Call, x: Tensor) -> Tensor:
    return x if call.rows is None else x.index_select(0, call.rows)


def _add_rows(total: Tensor, rows: Tensor | None, part: Tensor) -> None:
    if rows is None:
        total += part
    else:
        total.index_add_(0, rows, part.to(total.dtype))


def _keys_of(
    batch: ContextBatch, call: _Call, k: Tensor, v: Tensor, shard: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the keys and values of a call."""
    if call.keys is _Keys.OWN:
        return k, v
    if call.keys is _Keys.FIRST_TWICE:
        shard = shard.index_select(0, batch.calls.first_twice)
    return shard[..., : k.shape[2]], shard[..., k.shape[2] :]


def _add_keys(batch: ContextBatch, call: _Call, sums: Tensor, gradients: Tensor) -> None:
    """Adds the gradients of a call's keys and values to those of the shard."""
    if call.keys is _Keys.SHARD:
        sums += gradients
    elif call.keys is _Keys.OWN:
        sums.index_add_(0, batch.slots, gradients.to(sums.dtype))
    else:
        first = gradients.index_select(0, batch.calls.first_slots).to(sums.dtype)
        first += gradients.index_select(0, batch.calls.second_slots)
        sums.index_add_(0, batch.calls.first_slots, first)
