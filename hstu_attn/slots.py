"""Left padding: `composed.py` pads groups of packed sequences to one length.

A slot is a position in a padded sequence. Each sequence of a group is padded in front, so its last
row is in the last row slot and its last key in the last key slot. In every sequence, the distance
of a row and a key is then the distance of their slots, although lengths may be on the GPU only.
Padding (empty slots) holds zeros. Heads come before sequences:
`(heads * sequences, slots, head dim)`.

On a GPU the host reads no length, so groups have `max_seqlen_q` and `max_seqlen_k` slots. On a CPU
a group has as many slots as its longest sequence needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .call import AttentionCall
from .mask import Mask, mask_heads, packed_intervals

__all__ = ["CPU_SCORES", "Batch", "Group", "Inputs", "Rows"]

# On a CPU, sequences share a group while their scores have at most this many elements: larger
# groups would need more padding, and smaller groups more calls of torch's functions.
CPU_SCORES = 2**18


class Inputs(NamedTuple):
    """The inputs of the forward and the backward; `call` and `pages` as in `ops.attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    rab: Tensor | None
    pos_weight: Tensor | None
    ts_weight: Tensor | None
    call: AttentionCall
    pages: Sequence[Tensor | None]


# ---------------------------------------------------------------------------------------------
# Packed rows
# ---------------------------------------------------------------------------------------------


class Rows:
    """Packed tensors of one shape, concatenated so that one operation moves the rows of all.

    Attributes:
        tensors: `(total, heads, head dim)` each.
        kind: "rows" or "keys": whether the tensors' rows are in row slots or in key slots.
        rows: `(total + 1, tensors * heads, head dim)`: the last row stands for all empty slots.
    """

    def __init__(self, tensors: Sequence[Tensor], kind: str, dtype: torch.dtype) -> None:
        total, heads, dim = tensors[0].shape
        self.tensors, self.kind = tensors, kind
        self.rows = tensors[0].new_empty((total + 1, len(tensors) * heads, dim), dtype=dtype)

    def load(self) -> Rows:
        torch.cat(list(self.tensors), 1, out=self.rows[:-1])
        self.rows[-1].zero_()
        if self.rows.device.type == "cpu":
            # Without this copy, index_select on a CPU would copy all rows for each group.
            self.rows = self.rows.transpose(0, 1).contiguous().transpose(0, 1)
        return self

    def store(self) -> None:
        parts = self.rows[:-1].chunk(len(self.tensors), 1)
        for tensor, part in zip(self.tensors, parts, strict=True):
            tensor.copy_(part)

    def gather(self, group: Group) -> Tensor:
        """Returns `(tensors, heads * sequences, slots, head dim)`."""
        slots = self.rows.transpose(0, 1).index_select(1, group.index[self.kind])
        return slots.view(len(self.tensors), group.count, -1, slots.shape[2])

    def scatter(self, group: Group, slots: Tensor) -> None:
        _, columns, dim = self.rows.shape
        rows = self.rows.transpose(0, 1)
        rows.index_copy_(1, group.index[self.kind], slots.view(columns, -1, dim))


# ---------------------------------------------------------------------------------------------
# Sequences and their slots
# ---------------------------------------------------------------------------------------------


def _to_mask(call: AttentionCall) -> Mask:
    if call.row_spans is not None:
        return Mask(row_spans=call.row_spans)
    if call.func is not None:
        return Mask(func=call.func, func_causal=call.window_right == 0)
    # NOTE: direct callers of the operator may pass options that Mask refuses; they are left out.
    left, right = max(call.window_left, -1), max(call.window_right, -1)
    if right != 0:
        return Mask((left, right))
    full = max(call.min_full_attn_seq_len, 0) if left >= 0 else 0
    group_size = max(call.target_group_size, 1)
    return Mask((left, 0), call.num_contexts, call.num_targets, group_size, full)


def _load_offsets(offsets: Tensor, used: Tensor | None, total: int) -> tuple[Tensor, Tensor]:
    """Returns where sequences begin and end, `(sequences, 1)` each, in `[0, total]`.

    A sequence whose end is before its beginning is empty, as in csrc/common/sequence.h.
    """
    offsets = offsets.clamp(0, total)[:, None]
    begin, end = offsets[:-1], offsets[1:]
    if used is not None:
        end = end.minimum(begin + used.to(torch.int64)[:, None].clamp(min=0))
    return begin, end


def _length(begin: Tensor, end: Tensor) -> Tensor:
    return (end - begin).clamp(min=0).to(torch.int64)


class _Ranges(NamedTuple):
    """Where the rows and the keys of each sequence begin and end, `(sequences, 1)` each."""

    q_begin: Tensor
    q_end: Tensor
    k_begin: Tensor
    k_end: Tensor


class _Part(NamedTuple):
    """The indices of a group's sequences in the batch, and the number of slots per sequence."""

    numbers: slice | Tensor
    max_q: int
    max_k: int


class Batch:
    """The inputs of a call, and the values that its groups of sequences share.

    Attributes:
        max_q, max_k: the largest number of row slots and of key slots of a sequence.
        has_one_index: whether row n of q and row n of k are always in the same slot.
        window: the window if the mask consists of it alone, else None.
        factor: multiplies the weights of all rows.
        row_scale: `attn_scale`, which multiplies the rows, or None.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        q, k, _, rab, *_, call, pages = inputs
        kv_cache, _, page_ids, *_ = pages
        self.total_q, self.total_k, max_k = q.shape[0], k.shape[0], call.max_seqlen_k
        if kv_cache is not None and page_ids is not None:
            self.total_k = page_ids.shape[0] * kv_cache.shape[2] + self.total_q
            if not call.strict and rab is None:
                max_k = self.total_k  # max_seqlen_k may be less than the cached lengths
        self.max_k = min(max_k, self.total_k)
        # Rows before the first key see no keys.
        self.max_q = min(call.max_seqlen_q, self.total_q, self.max_k)
        self.has_one_index = (
            kv_cache is None
            and (self.max_q, self.total_q) == (self.max_k, self.total_k)
            and call.cu_seqlens_q is call.cu_seqlens_k
            and call.seqused_q is call.seqused_k
        )
        self.mask = mask = _to_mask(call)
        others = (mask.row_spans, mask.func, mask.num_contexts, mask.num_targets)
        is_window = mask.min_full_attn_seq_len == 0 and all(x is None for x in others)
        self.window = mask.window_size if is_window else None
        length = call.max_seqlen_q if call.scaling_seqlen == -1 else call.scaling_seqlen
        self.row_scale = call.attn_scale
        self.factor = 1.0 if self.row_scale is not None else 1 / length

    def rows(self, *tensors: Tensor) -> list[Rows]:
        """Returns rows for the first of q, k, v and dout, in order, or for tensors like them."""
        dtype = self.inputs.q.dtype
        if self.has_one_index and len({tensor.shape for tensor in tensors}) == 1:
            return [Rows(tensors, "rows", dtype)]
        keys = "rows" if self.has_one_index else "keys"
        kinds = ("rows", keys, keys, "rows")
        return [Rows([x], kind, dtype) for x, kind in zip(tensors, kinds, strict=False)]

    def groups(self, max_elements: int) -> Iterator[Group]:
        """Divides the sequences into groups; `max_elements` limits a group's keys on a GPU."""
        if self.max_q == 0:
            return
        call, device = self.inputs.call, self.inputs.q.device
        q_range = k_range = _load_offsets(call.cu_seqlens_q, call.seqused_q, self.total_q)
        if not self.has_one_index:
            k_range = _load_offsets(call.cu_seqlens_k, call.seqused_k, self.total_k)
        before_end = torch.arange(-self.max_k, 0, device=device)
        ranges = _Ranges(*q_range, *k_range)
        if device.type == "cpu":
            parts = self._by_length(ranges)
        else:
            parts = self._in_order(ranges, max_elements)
        for part in parts:
            yield Group(self, part, before_end[-part.max_k :], ranges)

    def _in_order(self, ranges: _Ranges, max_elements: int) -> Iterator[_Part]:
        """Makes groups with the same number of sequences; the host reads no length."""
        q, _, v, *_ = self.inputs
        sequences = ranges.q_begin.shape[0]
        elements = q.shape[1] * self.max_k * max(q.shape[2], v.shape[2])
        count = max(1, max_elements // elements)
        for first in range(0, sequences, count):
            yield _Part(slice(first, min(first + count, sequences)), self.max_q, self.max_k)

    def _by_length(self, ranges: _Ranges) -> Iterator[_Part]:
        """Makes groups on a CPU, the longest sequences first, padded to a group's longest one."""
        q_begin, q_end, k_begin, k_end = (x.flatten() for x in ranges)
        q_lengths, k_lengths = _length(q_begin, q_end), _length(k_begin, k_end)
        heads = self.inputs.q.shape[1]
        order = k_lengths.argsort(descending=True, stable=True)
        rows_of, keys_of = q_lengths[order].tolist(), k_lengths[order].tolist()
        first = 0
        while first < len(keys_of) and (keys := min(self.max_k, keys_of[first])) > 0:
            end = first + max(1, CPU_SCORES // (heads * keys * min(self.max_q, keys)))
            if (rows := min(self.max_q, keys, max(rows_of[first:end]))) > 0:
                yield _Part(order[first:end], rows, keys)
            first = end


class Group:
    """Some sequences of the batch, and their slots.

    Attributes:
        numbers: the indices of the group's sequences in the batch.
        max_q, max_k: row slots and key slots of a sequence.
        sequences, heads, count: number of sequences, number of heads, and their product.
        q_begin, q_end: `(sequences, 1)`: the range `[q_begin, q_end)` of each sequence in q.
        k_begin, k_end: `(sequences, 1)`: the range in k; with pages, in the timestamps of keys.
        before_end: `(max_k,)`: the key in each slot, counted from the end: -1 is the last key.
        packed_row: `(sequences, max_q)`: the row of q in each slot; arbitrary if empty.
        packed_key: `(sequences, max_k)`: the row of k in each slot; arbitrary if empty.
        row_is_empty, key_is_empty: `(sequences, max_q)` and `(sequences, max_k)`: whether a slot
            is empty. The slot of a row before the first key counts as empty.
        index: by `Rows.kind`, the index in `Rows.rows` of each slot's row; empty slots have the
            index of the row of zeros.
        q, k, v: `(heads * sequences, slots, head dim)`.
    """

    q: Tensor
    k: Tensor
    v: Tensor

    def __init__(self, batch: Batch, part: _Part, before_end: Tensor, ranges: _Ranges) -> None:
        self.batch, self.before_end = batch, before_end
        self.numbers, self.max_q, self.max_k = part
        q_begin, q_end, k_begin, k_end = (x[self.numbers] for x in ranges)
        self.sequences, self.heads = q_begin.shape[0], batch.inputs.q.shape[1]
        self.count = self.sequences * self.heads
        self.q_begin, self.q_end, self.k_begin, self.k_end = q_begin, q_end, k_begin, k_end
        self.packed_key = k_end + before_end
        self.key_is_empty = self.packed_key < k_begin
        self.packed_row, self.row_is_empty = self.packed_key, self.key_is_empty
        if not batch.has_one_index:
            self.packed_row = q_end + before_end[self.max_k - self.max_q :]
            self.row_is_empty = self.packed_row < q_begin.maximum(q_end - (k_end - k_begin))
        self.index = {"rows": _row_index(self.packed_row, self.row_is_empty, batch.total_q)}
        if batch.inputs.pages[0] is not None:
            is_history = self.key_is_empty | (before_end < -self.targets)
            self.index["keys"] = _row_index(q_end + before_end, is_history, batch.inputs.k.shape[0])
        elif not batch.has_one_index:
            self.index["keys"] = _row_index(self.packed_key, self.key_is_empty, batch.total_k)

    def take(self, packed: Sequence[Rows]) -> list[Tensor]:
        """Gathers q, k, v and any further tensors into slots; returns `Rows.gather` of each."""
        gathered = [rows.gather(self) for rows in packed]
        self.q, self.k, self.v, *_ = (x for slots in gathered for x in slots.unbind())
        if self.batch.inputs.pages[0] is not None:
            self.k, self.v = (x + self._history(n, x.dtype) for n, x in enumerate((self.k, self.v)))
        return gathered

    @cached_property
    def targets(self) -> Tensor:
        """`(sequences, 1)`: with pages, the number of keys that are in k and v."""
        counts = self.batch.inputs.call.num_targets
        if counts is None:
            return torch.zeros_like(self.q_end)
        targets = self.of_sequences(counts).clamp(min=0)
        return targets.minimum(torch.minimum(self.q_length, self.k_length))

    def _history(self, n: int, dtype: torch.dtype) -> Tensor:
        """Returns the cached keys (`n` is 0) or values (`n` is 1) in slots; other slots hold 0."""
        kv_cache, page_offsets, page_ids, _, kv_scales = self.batch.inputs.pages
        assert kv_cache is not None
        assert page_offsets is not None
        assert page_ids is not None
        is_elsewhere = self.key_is_empty | (self.before_end >= -self.targets)
        page_size = kv_cache.shape[2]
        key = self.before_end + self.k_length
        page = self.of_sequences(page_offsets) + key.clamp(min=0) // page_size
        ids = F.pad(page_ids.to(torch.int64), (0, 1))  # never empty, so indexing is valid
        page = ids[page.clamp(0, page_ids.shape[0])].clamp(0, kv_cache.shape[0] - 1)
        slot = key % page_size
        if kv_scales is None:
            cached = kv_cache[page, n, slot]
        else:
            codes = kv_cache.view(torch.uint8)[page, n, slot].view(kv_cache.dtype)
            cached = codes.to(dtype) * kv_scales[page, n, slot].to(dtype)[..., None]
        cached = cached.masked_fill_(is_elsewhere[..., None, None], 0)
        return cached.permute(2, 0, 1, 3).flatten(0, 1)

    def of_sequences(self, values: Tensor) -> Tensor:
        """Selects the group's sequences from `(batch or more,)`; returns int64 `(sequences, 1)`."""
        return values[self.numbers][:, None].to(torch.int64)

    @cached_property
    def q_length(self) -> Tensor:
        return _length(self.q_begin, self.q_end)

    @cached_property
    def k_length(self) -> Tensor:
        return _length(self.k_begin, self.k_end)

    @cached_property
    def times(self) -> Tensor:
        """`(sequences, max_k)`: the times of the keys."""
        timestamps = self.batch.inputs.call.timestamps
        assert timestamps is not None
        padded = F.pad(timestamps, (0, 1))  # never empty, so indexing is valid
        index = self.packed_key.clamp(0, timestamps.shape[0])
        return padded[index].masked_fill_(self.key_is_empty, 0)

    @cached_property
    def intervals(self) -> Tensor:
        """`(1 or heads, sequences, max_q, m, 2)`: the intervals of key slots that rows see."""
        mask, shape = self.batch.mask, self.packed_row.shape
        # Empty slots get the index of a row after the last one, which sees no keys.
        row = (self.packed_row - self.q_begin).masked_fill(self.row_is_empty, self.batch.total_q)
        counts = (
            torch.zeros_like(self.q_length) if count is None else self.of_sequences(count)
            for count in (mask.num_contexts, mask.num_targets)
        )
        columns = (self.q_length, self.k_length, *counts)
        intervals = [
            packed_intervals(
                mask,
                self.packed_row.clamp(min=0).flatten(),
                row.flatten(),
                *(x.expand(shape).flatten() for x in columns),
                head=head,
            )
            for head in range(mask_heads(mask))
        ]
        of_keys: Tensor = torch.stack(intervals).unflatten(1, shape)
        return of_keys + (self.max_k - self.k_length)[..., None, None]

    def scale_rows_(self, x: Tensor) -> None:
        """Multiplies rows in slots by `attn_scale`, if it is given."""
        scale = self.batch.row_scale
        if scale is None:
            return
        scale = scale.to(x.dtype).flatten()
        if scale.shape[0] > 1:
            scale = scale[self.packed_row.clamp(min=0)][..., None]
        self.by_head(x).mul_(scale)

    def by_head(self, x: Tensor) -> Tensor:
        """Returns a view `(..., heads, sequences, slots, any)`."""
        by_head: Tensor = x.unflatten(-3, (self.heads, self.sequences))
        return by_head


def _row_index(row: Tensor, is_empty: Tensor, total: int) -> Tensor:
    return row.masked_fill(is_empty, total).flatten()
