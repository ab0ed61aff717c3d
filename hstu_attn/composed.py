"""HSTU attention composed of torch's functions, for fp32 and fp64 on a GPU and for FP8 on a CPU.

`register` makes `forward` and `backward` the kernels of two operators with the schemas of
`hstu_varlen_fwd_out` and `hstu_varlen_bwd_out`. csrc/api/composed.cpp calls them through the
dispatcher, after C++ has checked the arguments, so that autograd, `torch.compile`, `torch.export`
and direct callers reach them by the same operators as any kernel. Products are those of
`torch.matmul`, so `torch.backends.cuda.matmul.allow_tf32` and
`torch.set_float32_matmul_precision` apply to them.

A call is divided into chunks: some query rows of some sequences with their keys. What is computed
for a chunk has at most `CHUNK_ELEMENTS` elements (or one row of one sequence), so that memory grows
with the number of tokens. On a GPU the host reads no value, so a CUDA graph can capture a call. No
element is added to by several threads in an order that may vary, so that equal inputs give bitwise
equal results.

Within a chunk, each sequence is padded in front to `max_seqlen_q` row slots and `max_seqlen_k` key
slots, on a CPU to the longest sequence that is computed with it: its last row is in the last row
slot, its last key in the last key slot. The distance of a row and a key is then that of their slots
in every sequence, although lengths may be on the GPU only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .bias import time_bucket, time_difference
from .call import AttentionCall
from .mask import Mask, key_range, mask_heads, packed_intervals, visible_keys
from .quantization import (
    E4M3,
    Quantized,
    dequantize,
    quantize_qkv,
    round_weights,
    weight_scales,
)

__all__ = [
    "CHUNK_ELEMENTS",
    "CPU_SCORES",
    "backward",
    "forward",
    "quantize",
    "register",
    "take_failure",
]

# About ten tensors of this size exist at a time: 64 MiB each in fp32.
CHUNK_ELEMENTS = 2**24

# On a CPU, sequences are computed together while their scores have at most this many elements: more
# of them would be padded to longer ones, and fewer would call torch's functions more often.
CPU_SCORES = 2**18

# Parts of a bucket that are summed at the same time: a sum by one block of threads each.
_PARTS = 32

_failure = threading.local()


def register() -> None:
    """Registers `forward` and `backward` as kernels for CUDA tensors, and for tests on the CPU."""
    for name, kernel in (("composed_fwd", forward), ("composed_bwd", backward)):
        torch.library.impl(f"hstu_attn::{name}", ("cpu", "cuda"), _as_kernel(kernel))
    torch.library.impl("hstu_attn::composed_quantize", "cpu", _as_kernel(quantize))


def take_failure() -> Exception | None:
    """Returns what a kernel has last raised in this thread, once: C++ turns it into another."""
    failure = getattr(_failure, "error", None)
    _failure.error = None
    return failure


def _as_kernel(function: Callable[..., None]) -> Callable[..., bool]:
    def kernel(*args: Any) -> bool:
        # NOTE: autocast and autograd would else apply to each function that is called here.
        with torch.no_grad(), torch.autocast(args[0].device.type, enabled=False):
            try:
                function(*args)
            except Exception as error:
                _failure.error = type(error)(*error.args)  # without the tensors in the traceback
                raise
        return True  # the kernel that stands in where there is no Python returns False

    return kernel


class _Inputs(NamedTuple):
    """The inputs of the forward and the backward; `call` and `pages` as in `ops.attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    rab: Tensor | None
    pos_weight: Tensor | None
    ts_weight: Tensor | None
    call: AttentionCall
    pages: Sequence[Tensor | None]


_NUM_TENSORS, _NUM_PAGES = 6, 5
_NUM_INPUTS = _NUM_TENSORS + len(AttentionCall._fields)


def _read_inputs(args: Sequence[Any], pages: Sequence[Tensor | None]) -> _Inputs:
    call = AttentionCall(*args[_NUM_TENSORS:_NUM_INPUTS])
    return _Inputs._make((*args[:_NUM_TENSORS], call, pages))


def forward(*args: Any) -> None:
    """Computes the forward into the last argument; the arguments are those of the schema."""
    inputs = _read_inputs(args, args[_NUM_INPUTS:-1])
    out = args[-1]
    scales = None
    if inputs.call.quant_mode >= 0 or inputs.q.dtype == E4M3:
        inputs, scales = _quantized(inputs)
    rows = inputs.v.new_zeros((out.shape[0] + 1, *out.shape[1:]))
    for group in _groups(inputs):
        results = []
        for chunk in group.chunks():
            weights = F.silu(chunk.scores(), inplace=True)
            if scales is not None:
                weights = round_weights(weights, group.rows_of(scales, empty=1)[:, :, chunk.rows])
            results.append(torch.matmul(chunk.hide_(weights), group.v[:, :, chunk.keys]))
        rows.index_copy_(0, group.packed_rows, _to_rows(torch.cat(results, 2).mul_(group.scale)))
    out.copy_(rows[:-1])


def _quantized(inputs: _Inputs) -> tuple[_Inputs, Tensor]:
    """Returns inputs that e4m3 represents, in fp32, and scales `(total_q, heads, 1)` of weights."""
    q, k, v, rab, pos_weight, ts_weight, call, _ = inputs
    sequences = (call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k)
    descales = (call.q_descale, call.k_descale, call.v_descale)
    quantized = quantize_qkv(q, k, v, *sequences, call.quant_mode, call.smooth_k, *descales)
    values = dequantize(quantized, *sequences, q.shape[2])
    scales = weight_scales(values.score_bound, call.alpha, (rab, pos_weight, ts_weight))
    return inputs._replace(q=values.q, k=values.k, v=values.v), scales[..., None]


def quantize(*args: Any) -> None:
    """Computes `quantize_qkv` into the last ten of the schema's arguments."""
    count = len(Quantized._fields)
    for output, result in zip(args[-count:], quantize_qkv(*args[:-count]), strict=True):
        output.copy_(result)


def backward(dout: Tensor, *args: Any) -> None:
    """Computes the backward into the last six arguments; the arguments are those of the schema."""
    inputs = _read_inputs(args, (None,) * _NUM_PAGES)
    call = inputs.call
    dq, dk, dv, drab, dpos_weight, dts_weight = args[_NUM_INPUTS:]
    dq_rows, dk_rows, dv_rows = (x.new_zeros((x.shape[0] + 1, *x.shape[1:])) for x in inputs[:3])
    if drab is not None:
        drab.zero_()
    dpos = None if dpos_weight is None else _PositionGradient(dpos_weight, dout.dtype)
    dts = None if dts_weight is None else _TimeGradient(dts_weight, dout.dtype)
    for group in _groups(inputs):
        group_dk, group_dv = torch.zeros_like(group.k), torch.zeros_like(group.v)
        group_dout = group.rows_of(dout).mul_(group.scale)
        group_dq = []
        for chunk in group.chunks():
            keys = chunk.keys
            scaled_dout = group_dout[:, :, chunk.rows]
            x = chunk.scores()
            sigmoid = torch.sigmoid(x)
            weights = x.mul_(sigmoid)
            # The derivative of x * s is s * (1 + x * (1 - s)) = s + x * s * (1 - s).
            dx = torch.addcmul(sigmoid, weights, 1 - sigmoid)
            dx.mul_(torch.matmul(scaled_dout, group.v[:, :, keys].transpose(2, 3)))
            chunk.hide_(dx)
            chunk.hide_(weights)
            group_dv[:, :, keys] += torch.matmul(weights.transpose(2, 3), scaled_dout)
            group_dk[:, :, keys] += torch.matmul(dx.transpose(2, 3), chunk.scaled_q)
            group_dq.append(torch.matmul(dx, group.k[:, :, keys]))
            if drab is not None:
                values = _sum_heads(dx, drab.shape[1]) * call.alpha
                drab.index_put_(chunk.rab_index, values.to(drab.dtype))
            if dpos is not None:
                dpos.add(dx, chunk)
            if dts is not None:
                dts.add(dx, chunk.buckets)
        result = torch.cat(group_dq, 2).mul_(call.alpha)
        dq_rows.index_copy_(0, group.packed_rows, _to_rows(result))
        dk_rows.index_copy_(0, group.packed_keys, _to_rows(group_dk))
        dv_rows.index_copy_(0, group.packed_keys, _to_rows(group_dv))
    for gradient, rows in ((dq, dq_rows), (dk, dk_rows), (dv, dv_rows)):
        gradient.copy_(rows[:-1])
    if dpos is not None:
        dpos.store(call.alpha)
    if dts is not None:
        dts.store(call.alpha)


# ---------------------------------------------------------------------------------------------
# Sequences
# ---------------------------------------------------------------------------------------------


class _Sequences(NamedTuple):
    """Sequences of a batch, int64 `(sequences, 1)` each, clamped as in csrc/common/sequence.h.

    Attributes:
        q_end, k_end: the rows of q and of k (with pages, the times of keys) after their last ones.
        q_len, k_len: their rows and keys.
        contexts, targets: their contextual tokens and candidates.
        number: their numbers in the batch.
    """

    q_end: Tensor
    q_len: Tensor
    k_end: Tensor
    k_len: Tensor
    contexts: Tensor
    targets: Tensor
    number: Tensor


def _load_sequences(call: AttentionCall, total_q: int, total_k: int, paged: bool) -> _Sequences:
    def load(offsets: Tensor, used: Tensor | None, total: int) -> tuple[Tensor, Tensor]:
        offsets = offsets.to(torch.int64)
        begin = offsets[:-1].clamp(0, total)
        length = offsets[1:].clamp(max=total) - begin
        if used is not None:
            length = length.minimum(used.to(torch.int64))
        length = length.clamp(min=0)
        return begin + length, length

    q_end, q_len = load(call.cu_seqlens_q, call.seqused_q, total_q)
    k_end, k_len = load(call.cu_seqlens_k, call.seqused_k, total_k)
    number = torch.arange(q_len.shape[0], device=q_len.device)
    contexts, targets = (
        torch.zeros_like(q_len) if count is None else count.to(torch.int64).clamp(min=0)
        for count in (call.num_contexts, call.num_targets)
    )
    targets = targets.minimum(torch.minimum(q_len, k_len) if paged else k_len)
    columns = (q_end, q_len, k_end, k_len, contexts, targets, number)
    return _Sequences(*(column[:, None] for column in columns))


def _to_mask(call: AttentionCall) -> Mask:
    if call.row_spans is not None:
        return Mask(row_spans=call.row_spans)
    if call.func is not None:
        return Mask(func=call.func, func_causal=call.window_right == 0)
    # NOTE: a direct caller of the operator may ask for what Mask refuses: that is left out.
    left, right = max(call.window_left, -1), max(call.window_right, -1)
    if right != 0:
        return Mask((left, right))
    full = max(call.min_full_attn_seq_len, 0) if left >= 0 else 0
    group_size = max(call.target_group_size, 1)
    return Mask((left, 0), call.num_contexts, call.num_targets, group_size, full)


class _Group:
    """Some sequences of the batch, and their keys and values.

    Attributes:
        max_q, max_k: row slots and key slots of a sequence.
        row: `(sequences, max_q)`: the number of each row slot in its sequence, negative if empty.
        key: `(sequences, max_k)`: the same of key slots.
        packed_row: `(sequences, max_q)`: the row of q in each slot; arbitrary if empty.
        packed_rows: `(sequences * max_q,)`: the row of q in each slot, or total_q if empty.
        packed_keys: `(sequences * max_k,)`: the row of k in each slot, or total_k if empty.
        timestamps: `(sequences, max_k)`: the times of the keys; None without a time table.
        scaled_q: `(sequences, heads, max_q, head dim)`: alpha times q, 0 in empty slots.
        k, v: `(sequences, heads, max_k, head dim)`, 0 in empty slots.
    """

    def __init__(self, inputs: _Inputs, sequences: _Sequences, max_q: int, max_k: int) -> None:
        self.inputs, self.sequences = inputs, sequences
        self.max_q, self.max_k = max_q, max_k
        self.mask = _to_mask(inputs.call)

        q, k, v = inputs[:3]
        q_end, q_len, k_end, k_len, *_ = sequences
        self.row = torch.arange(max_q, device=q.device) + (q_len - max_q)
        self.key = torch.arange(max_k, device=q.device) + (k_len - max_k)
        self.packed_row = q_end - q_len + self.row
        self.packed_rows = self.packed_row.masked_fill(self.row < 0, q.shape[0]).flatten()
        self.scaled_q = self.rows_of(q).mul_(inputs.call.alpha)

        packed_key = k_end - k_len + self.key
        is_empty = self.key < 0
        self.packed_keys = packed_key.masked_fill(is_empty, k.shape[0]).flatten()
        self.timestamps = None
        if inputs.ts_weight is not None and (timestamps := inputs.call.timestamps) is not None:
            times = F.pad(timestamps, (0, 1))  # so that there is one to take
            index = packed_key.clamp(0, timestamps.shape[0])
            self.timestamps = times[index].masked_fill_(is_empty, 0)
        if inputs.pages[0] is None:
            self.k, self.v = (_to_slots(x, packed_key, is_empty) for x in (k, v))
        else:
            self.k, self.v = (self._paged(n, x) for n, x in enumerate((k, v)))

    def _paged(self, n: int, x: Tensor) -> Tensor:
        """Returns keys (`n` 0) or values (1): the history's from pages, the targets' from `x`."""
        kv_cache, page_offsets, page_ids, _, kv_scales = self.inputs.pages
        assert kv_cache is not None
        assert page_offsets is not None
        assert page_ids is not None
        q_end, _, _, k_len, _, targets, number = self.sequences
        is_empty, is_target = self.key < 0, self.key >= k_len - targets
        page_size = kv_cache.shape[2]
        page = page_offsets.to(torch.int64)[number] + self.key.clamp(min=0) // page_size
        ids = F.pad(page_ids.to(torch.int64), (0, 1))  # so that there is one to take
        page = ids[page.clamp(0, page_ids.shape[0])].clamp(0, kv_cache.shape[0] - 1)
        slot = self.key % page_size
        if kv_scales is None:
            cached = kv_cache[page, n, slot]
        else:
            codes = kv_cache.view(torch.uint8)[page, n, slot].view(kv_cache.dtype)
            cached = codes.to(x.dtype) * kv_scales[page, n, slot].to(x.dtype)[..., None]
        cached = cached.masked_fill_((is_empty | is_target)[..., None, None], 0).transpose(1, 2)
        return _to_slots(x, q_end - k_len + self.key, is_empty | ~is_target) + cached

    def rows_of(self, x: Tensor, empty: float = 0) -> Tensor:
        """Returns rows of `(total_q, heads, head dim)` in slots, `empty` where no key is before."""
        sees_none = self.row + (self.sequences.k_len - self.sequences.q_len) < 0
        return _to_slots(x, self.packed_row, sees_none | (self.row < 0), empty)

    @cached_property
    def intervals(self) -> Tensor:
        """`(sequences, 1 or heads, max_q, m, 2)`: the intervals of key slots that rows see."""
        _, q_len, _, k_len, contexts, targets, _ = self.sequences
        intervals = [
            packed_intervals(
                self.mask,
                self.packed_row.clamp(min=0).flatten(),
                torch.where(self.row < 0, q_len, self.row).flatten(),
                *(x.expand(-1, self.max_q).flatten() for x in (q_len, k_len, contexts, targets)),
                head=head,
            )
            for head in range(mask_heads(self.mask))
        ]
        of_keys: Tensor = torch.stack(intervals).unflatten(1, self.row.shape).transpose(0, 1)
        return of_keys + (self.max_k - k_len)[..., None, None, None]

    @property
    def scale(self) -> Tensor | float:
        """Returns the factor of each row of the weights."""
        call = self.inputs.call
        if call.attn_scale is None:
            length = call.max_seqlen_q if call.scaling_seqlen == -1 else call.scaling_seqlen
            return 1 / length
        scale = call.attn_scale.to(self.scaled_q.dtype).flatten()
        if scale.shape[0] == 1:
            return scale
        return scale[self.packed_row.clamp(min=0)][:, None, :, None]

    @property
    def is_triangle(self) -> bool:
        """Returns whether rows see the key slots up to their own.

        Keys in empty slots are among them. They are 0, and so are their weights without a bias.
        """
        inputs, mask = self.inputs, self.mask
        others = (inputs.rab, inputs.pos_weight, inputs.ts_weight, mask.num_contexts)
        if any(x is not None for x in (*others, mask.num_targets)):
            return False
        return not mask.is_arbitrary and mask.window_size == (-1, 0)

    def chunks(self) -> Iterator[_Chunk]:
        """Divides the row slots."""
        sequences, heads, max_k, _ = self.k.shape
        rows = max(1, CHUNK_ELEMENTS // (sequences * heads * max_k))
        for first in range(0, self.max_q, rows):
            yield _Chunk(self, first, min(first + rows, self.max_q))


def _groups(inputs: _Inputs) -> Iterator[_Group]:
    """Divides the sequences, so that their keys have at most `CHUNK_ELEMENTS` elements."""
    q, k, _, rab, *_, call, pages = inputs
    total_q, total_k, max_k = q.shape[0], k.shape[0], call.max_seqlen_k
    kv_cache, _, page_ids, *_ = pages
    if kv_cache is not None and page_ids is not None:
        total_k = page_ids.shape[0] * kv_cache.shape[2] + total_q
        if not call.strict and rab is None:
            max_k = total_k  # here max_seqlen_k may be less than the cached lengths
    max_k = min(max_k, total_k)
    # Rows in front of the first key see nothing.
    max_q = min(call.max_seqlen_q, total_q, max_k)
    if max_q == 0:
        return
    sequences = _load_sequences(call, total_q, total_k, kv_cache is not None)
    divide = _by_length if q.device.type == "cpu" else _in_order
    yield from divide(inputs, sequences, max_q, max_k)


def _in_order(inputs: _Inputs, sequences: _Sequences, max_q: int, max_k: int) -> Iterator[_Group]:
    """Makes groups of equally many sequences; the host reads no length."""
    width = max(inputs.q.shape[2], inputs.v.shape[2])
    count = max(1, CHUNK_ELEMENTS // (inputs.q.shape[1] * max_k * width))
    for part in zip(*(column.split(count) for column in sequences), strict=True):
        yield _Group(inputs, _Sequences(*part), max_q, max_k)


def _by_length(inputs: _Inputs, sequences: _Sequences, max_q: int, max_k: int) -> Iterator[_Group]:
    """Makes groups of sequences on a CPU, the longest first, each padded to its longest."""
    heads = inputs.q.shape[1]
    order = sequences.k_len.flatten().argsort(descending=True, stable=True)
    sequences = _Sequences(*(column[order] for column in sequences))
    q_lengths, k_lengths = (x.flatten().tolist() for x in (sequences.q_len, sequences.k_len))
    first = 0
    while first < len(k_lengths) and (keys := min(max_k, k_lengths[first])) > 0:
        end = first + max(1, CPU_SCORES // (heads * keys * min(max_q, keys)))
        if (rows := min(max_q, keys, max(q_lengths[first:end]))) > 0:
            part = (column[first:end] for column in sequences)
            yield _Group(inputs, _Sequences(*part), rows, keys)
        first = end


def _to_slots(x: Tensor, row: Tensor, is_empty: Tensor, empty: float = 0) -> Tensor:
    """Gathers rows of `(total, heads, head dim)` to `(sequences, heads, slots, head dim)`."""
    rows = x[row.clamp(0, x.shape[0] - 1)]
    return rows.masked_fill_(is_empty[..., None, None], empty).transpose(1, 2).contiguous()


def _to_rows(x: Tensor) -> Tensor:
    """Converts `(sequences, heads, slots, head dim)` to `(sequences * slots, heads, head dim)`."""
    return x.transpose(1, 2).flatten(0, 1)


def _sum_heads(x: Tensor, heads: int) -> Tensor:
    """Sums over the heads of `(sequences, all heads, ...)` that share one of fewer heads."""
    return x if x.shape[1] == heads else x.unflatten(1, (heads, -1)).sum(2)


# ---------------------------------------------------------------------------------------------
# Scores
# ---------------------------------------------------------------------------------------------


class _Chunk:
    """The row slots `[first, end)` of a group, with the key slots that any of them may see.

    Attributes:
        rows, keys: those slots.
        scaled_q: the group's of these rows.
        packed_row: the group's, of these rows.
        lowest_distance: slot of the first key minus slot of the last row.
    """

    def __init__(self, group: _Group, first: int, end: int) -> None:
        self.group = group
        self.rows = slice(first, end)
        # The row slots are those of the last keys.
        ahead = group.max_k - group.max_q
        begin, last = key_range(group.mask, first + ahead, end + ahead)
        self.keys = slice(begin, group.max_k if last is None else min(last, group.max_k))
        self.lowest_distance = self.keys.start - (end - 1 + ahead)
        self.packed_row = group.packed_row[:, self.rows]
        self.scaled_q = group.scaled_q[:, :, self.rows]

    def hide_(self, x: Tensor) -> Tensor:
        """Sets `x`, of the shape of the scores, to 0 where the mask hides a key from a row."""
        if self.group.is_triangle:  # only the last keys are hidden from any of the rows
            x[..., self.rows.start - self.rows.stop :].tril_()
            return x
        return x.masked_fill_(self._hidden, 0)

    @cached_property
    def _hidden(self) -> Tensor:
        column = torch.arange(self.keys.start, self.keys.stop, device=self.scaled_q.device)
        return visible_keys(self.group.intervals[:, :, self.rows], column).logical_not_()

    def scores(self) -> Tensor:
        """Returns alpha times the biased scores, `(sequences, heads, rows, keys)`."""
        scores = torch.matmul(self.scaled_q, self.group.k[:, :, self.keys].transpose(2, 3))
        for bias in self._biases():
            by_head = scores.unflatten(1, (bias.shape[1], -1))
            by_head.add_(bias[:, :, None], alpha=self.group.inputs.call.alpha)
        return scores

    def _biases(self) -> Iterator[Tensor]:
        """Yields biases `(sequences or 1, bias heads, rows, keys)`."""
        _, _, _, rab, pos_weight, ts_weight, *_ = self.group.inputs
        if rab is not None:
            yield rab[self.rab_index].to(self.scaled_q.dtype)
        if pos_weight is not None:
            yield self._position_bias(pos_weight)
        if ts_weight is not None:
            weights = ts_weight.to(self.scaled_q.dtype)[:, self.buckets]
            yield weights.transpose(0, 1)

    @cached_property
    def rab_index(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The indices of the scores in a dense bias.

        Consecutive slots have consecutive positions, no more of them than the bias has rows, and
        those of the first empty slots are negative. Modulo the size, no two slots have the same
        position, and that of an empty slot is none of the sequence's rows or keys. So the gradient
        of each score is written to an element of its own, and empty slots write zeros.
        """
        group, rab = self.group, self.group.inputs.rab
        assert rab is not None
        k_len = group.sequences.k_len
        row = group.row[:, self.rows] + (k_len - group.sequences.q_len)
        return (
            group.sequences.number[..., None, None],
            torch.arange(rab.shape[1], device=rab.device)[:, None, None],
            (row % rab.shape[2])[:, None, :, None],
            (group.key[:, self.keys] % rab.shape[3])[:, None, None, :],
        )

    def _position_bias(self, pos_weight: Tensor) -> Tensor:
        """Returns `(1, bias heads, rows, keys)`: rows of one sequence of distances, shifted."""
        rows, keys = self.rows.stop - self.rows.start, self.keys.stop - self.keys.start
        reach = pos_weight.shape[1] // 2
        first = self.lowest_distance
        distance = torch.arange(first, first + rows + keys - 1, device=pos_weight.device)
        weights = pos_weight.to(self.scaled_q.dtype)[:, distance.clamp(-reach, reach) + reach]
        return weights.unfold(1, keys, 1).flip(1)[None]

    @cached_property
    def buckets(self) -> Tensor:
        """int32 `(sequences, rows, keys)`: the time bucket of each score."""
        group, call = self.group, self.group.inputs.call
        ts_weight = group.inputs.ts_weight
        assert ts_weight is not None
        assert group.timestamps is not None
        assert call.ts_thresholds is not None
        times = group.timestamps
        if call.row_timestamps is not None:
            row_times = call.row_timestamps[self.packed_row.clamp(min=0)]
        else:
            # The time of the key after the row's, and for the last row its own.
            ahead = group.max_k - group.max_q
            following = torch.cat([times[:, 1:], times[:, -1:]], 1)
            row_times = following[:, ahead + self.rows.start : ahead + self.rows.stop]
        difference = time_difference(row_times[:, :, None], times[:, None, self.keys])
        return time_bucket(difference, call.ts_thresholds, ts_weight.shape[1]).to(torch.int32)


# ---------------------------------------------------------------------------------------------
# Gradients of the tables
# ---------------------------------------------------------------------------------------------


class _PositionGradient:
    """The gradient of the position table: sums of dX over its diagonals, times alpha."""

    def __init__(self, dpos_weight: Tensor, dtype: torch.dtype) -> None:
        self.result = dpos_weight
        self.sums = torch.zeros(dpos_weight.shape, dtype=dtype, device=dpos_weight.device)

    def add(self, dx: Tensor, chunk: _Chunk) -> None:
        by_head = _sum_heads(dx.sum(0, keepdim=True), self.sums.shape[0])[0]
        heads, rows, keys = by_head.shape
        # With `rows` columns more, a row that is read one element short begins one element later
        # than the row before it. So the diagonals become columns.
        skewed = F.pad(by_head.flip(1), (0, rows)).flatten(1)[:, : rows * (rows + keys - 1)]
        diagonals = skewed.view(heads, rows, rows + keys - 1).sum(1)
        # Distances beyond the table are added to its ends.
        reach = self.sums.shape[1] // 2
        first = chunk.lowest_distance
        low = min(max(-reach - first, 0), diagonals.shape[1])
        high = max(min(reach + 1 - first, diagonals.shape[1]), 0)
        self.sums[:, 0] += diagonals[:, :low].sum(1)
        self.sums[:, -1] += diagonals[:, high:].sum(1)
        if low < high:
            begin = first + low + reach
            self.sums[:, begin : begin + high - low] += diagonals[:, low:high]

    def store(self, alpha: float) -> None:
        self.result.copy_(self.sums * alpha)


class _TimeGradient:
    """The gradient of the time table: sums of dX over the scores of a bucket, times alpha.

    Scores are sorted by their buckets. Then the sum of a bucket, in `_PARTS` parts, is one of
    consecutive elements: no atomic addition is needed, and few scores are added one by one.
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
        for head, values in enumerate(_sum_heads(dx, heads).unbind(1)):
            sums = torch.segment_reduce(
                values.flatten()[order], "sum", offsets=offsets, unsafe=True, initial=0
            )
            self.sums[head] += sums.view(count, _PARTS).sum(1)

    def store(self, alpha: float) -> None:
        self.result.copy_(self.sums * alpha)
