"""HSTU attention composed of torch's functions, for fp32 and fp64 on a GPU and for FP8 on a CPU.

`register` makes `forward` and `backward` the kernels of two operators with the schemas of
`hstu_varlen_fwd_out` and `hstu_varlen_bwd_out`. csrc/api/composed.cpp calls them through the
dispatcher, after C++ has checked the arguments, so that autograd, `torch.compile`, `torch.export`
and direct callers reach them by the same operators as any kernel. `torch.baddbmm` computes the
matrix products, so `torch.backends.cuda.matmul.allow_tf32` and
`torch.set_float32_matmul_precision` apply to them.

A call is divided into chunks: some query rows of some sequences with their keys. A chunk has at
most `CHUNK_ELEMENTS` scores (or the scores of one row of one sequence), so that memory grows with
the number of tokens. On a GPU the host reads no value, so a CUDA graph can capture a call. There
are no atomic additions in a varying order, so equal inputs give bitwise equal results. slots.py
describes how sequences are padded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .bias import time_bucket, time_difference
from .call import AttentionCall
from .mask import key_range, visible_keys
from .paged_quantization import quantize_for_pages
from .quantization import (
    E4M3,
    Quantized,
    dequantize,
    quantize_for_backward,
    quantize_qkv,
    round_weights,
    weight_scales,
)
from .slots import Batch, Group, Inputs, Rows
from .table_gradients import PositionGradient, TimeGradient, sum_heads

__all__ = ["CHUNK_ELEMENTS", "backward", "forward", "quantize", "register", "take_failure"]

# The largest number of scores in a chunk: 256 MiB in fp32. The forward holds one tensor of this
# size, the backward two, and each temporary tensor of a bias needs as much again.
CHUNK_ELEMENTS = 2**26

# Rows of a chunk. More rows make fewer, larger products; fewer rows compute fewer scores that the
# mask hides. The rows of all heads and sequences should occupy all multiprocessors.
_CHUNK_ROWS = 512
_CHUNK_SLOTS = 2**14
_WINDOW_ROWS = 256

# Rows of a chunk on a CPU, whose caches then hold the scores of some thousand keys.
_CPU_ROWS = 128

# The buckets of a time table take as much memory as the scores of this many heads.
_HEADS_OF_BUCKETS = 8

_failure = threading.local()


def register() -> None:
    """Registers `forward` and `backward` as kernels for CUDA tensors, and for tests on the CPU."""
    for name, kernel in (("composed_fwd", forward), ("composed_bwd", backward)):
        torch.library.impl(f"hstu_attn::{name}", ("cpu", "cuda"), _as_kernel(kernel))
    torch.library.impl("hstu_attn::composed_quantize", "cpu", _as_kernel(quantize))


def take_failure() -> Exception | None:
    """Returns and clears the last exception of a kernel in this thread, which C++ replaces."""
    failure = getattr(_failure, "error", None)
    _failure.error = None
    return failure


def _as_kernel(function: Callable[..., None]) -> Callable[..., bool]:
    def kernel(*args: Any) -> bool:
        # NOTE: otherwise, autocast and autograd would apply to each torch function called here.
        with torch.no_grad(), torch.autocast(args[0].device.type, enabled=False):
            try:
                function(*args)
            except Exception as error:
                _failure.error = type(error)(*error.args)  # without the tensors in the traceback
                raise
        return True  # the fallback kernel for processes without Python returns False

    return kernel


_NUM_TENSORS, _NUM_PAGES = 6, 5
_NUM_INPUTS = _NUM_TENSORS + len(AttentionCall._fields)


def _read_inputs(args: Sequence[Any], pages: Sequence[Tensor | None]) -> Inputs:
    call = AttentionCall(*args[_NUM_TENSORS:_NUM_INPUTS])
    return Inputs._make((*args[:_NUM_TENSORS], call, pages))


def forward(*args: Any) -> None:
    """Writes the forward's result to the last argument; the schema lists the arguments."""
    inputs = _read_inputs(args, args[_NUM_INPUTS:-1])
    scales = None
    if inputs.call.quant_mode >= 0 or inputs.q.dtype == E4M3:
        inputs, scales = _quantized(inputs)
    batch = Batch(inputs)
    packed_scales = [] if scales is None else [rows.load() for rows in batch.rows(scales)]
    packed = [rows.load() for rows in batch.rows(*inputs[:3])]
    (result,) = batch.rows(args[-1])
    result.rows.zero_()
    for group in batch.groups(CHUNK_ELEMENTS // 4):
        group.take(packed)
        out = group.v.new_empty((group.q.shape[0], group.max_q, group.v.shape[2]))
        for chunk in _chunks(group):
            weights = F.silu(chunk.scores_(out.new_empty(chunk.shape)), inplace=True)
            for rows in packed_scales:
                weights = round_weights(weights, chunk.row_scales(rows))
            chunk.hide_(weights)
            values = group.v[:, chunk.keys]
            out[:, chunk.rows].baddbmm_(weights, values, beta=0, alpha=batch.factor)
            del weights  # frees the memory for the weights of the next chunk
        group.scale_rows_(out)
        result.scatter(group, out)
    result.store()


def _quantized(inputs: Inputs) -> tuple[Inputs, Tensor]:
    """Returns the quantized inputs, in fp32, and the weights' scales `(total_q, heads, 1)`."""
    q, k, v, rab, pos_weight, ts_weight, call, pages = inputs
    biases = (rab, pos_weight, ts_weight)
    if pages[0] is not None:
        q, k, v, scales = quantize_for_pages(q, k, v, call, pages, biases)
        return inputs._replace(q=q, k=k, v=v), scales[..., None]
    sequences = (call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k)
    descales = (call.q_descale, call.k_descale, call.v_descale)
    quantized = quantize_qkv(q, k, v, *sequences, call.quant_mode, call.smooth_k, *descales)
    values = dequantize(quantized, *sequences, q.shape[2])
    scales = weight_scales(values.score_bound, call.alpha, biases)
    return inputs._replace(q=values.q, k=values.k, v=values.v), scales[..., None]


def quantize(*args: Any) -> None:
    """Writes the results of `quantize_qkv` to the last ten of the schema's arguments."""
    count = len(Quantized._fields)
    for output, result in zip(args[-count:], quantize_qkv(*args[:-count]), strict=True):
        output.copy_(result)


def backward(dout: Tensor, *args: Any) -> None:
    """Writes the gradients to the last six arguments; the schema lists the arguments."""
    inputs = _read_inputs(args, (None,) * _NUM_PAGES)
    dq, dk, dv, drab, dpos_weight, dts_weight = args[_NUM_INPUTS:]
    scales: tuple[Tensor, ...] = ()
    columns: tuple[Tensor, ...] = ()
    if inputs.call.backward_e4m3:
        inputs, dout, columns, scales = _quantized_for_backward(inputs, dout)
    batch = Batch(inputs)
    if scales and batch.row_scale is not None:  # dout is multiplied by row_scale below
        factor = torch.where(batch.row_scale == 0, 1, batch.row_scale)
        scales = (scales[0], scales[1] / factor)
    packed_scales, packed_columns = (
        [rows.load() for each in tensors for rows in batch.rows(each)]
        for tensors in (scales, columns)
    )
    packed = [rows.load() for rows in batch.rows(*inputs[:3], dout)]
    results = batch.rows(dq, dk, dv)
    for rows in results:
        rows.rows.zero_()
    if drab is not None:
        drab.zero_()
    dpos = None if dpos_weight is None else PositionGradient(dpos_weight, dout.dtype)
    dts = None if dts_weight is None else TimeGradient(dts_weight, dout.dtype)
    for group in batch.groups(CHUNK_ELEMENTS // 4):
        gathered = group.take(packed)
        group_dout = gathered[-1][-1]
        group.scale_rows_(group_dout)
        of_columns = [group.q, group_dout]
        if columns:
            of_columns = [rows.gather(group)[0] for rows in packed_columns]
            group.scale_rows_(of_columns[1])
        gradients = [torch.zeros_like(slots[:3]) for slots in gathered[: len(results)]]
        of_group = [gradient for slots in gradients for gradient in slots.unbind()]
        for chunk in _chunks(group):
            dx = _backward_chunk(chunk, packed_scales, group_dout, *of_columns, *of_group)
            if drab is not None:
                drab.index_put_(chunk.rab_index, sum_heads(dx, drab.shape[1]).to(drab.dtype))
            if dpos is not None:
                dpos.add(dx, chunk.lowest_distance)
            if dts is not None:
                dts.add(dx, chunk.buckets)
            del dx  # frees the memory for dx of the next chunk
        for rows, slots in zip(results, gradients, strict=True):
            rows.scatter(group, slots)
    for rows in results:
        rows.store()
    for table in (dpos, dts):
        if table is not None:
            table.store()


def _quantized_for_backward(
    inputs: Inputs, dout: Tensor
) -> tuple[Inputs, Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns the quantized inputs and `dout`, in fp32, and two pairs of tensors.

    The first pair is q for the gradient of k, and `dout` for the gradient of v. The second one is
    `(total_q, heads, 1)` each: the scales of the weights, and of the gradients of the scores.
    """
    q, k, v, *biases, call, _ = inputs
    sequences = (call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k)
    x = quantize_for_backward(q, k, v, dout, sequences, call.alpha, biases)
    scales = (x.weight_scales[..., None], x.score_scales[..., None])
    columns = (x.q_columns, x.dout_columns)
    return inputs._replace(q=x.q, k=x.k, v=x.v), x.dout, columns, scales


def _backward_chunk(
    chunk: _Chunk,
    scales: Sequence[Rows],
    dout: Tensor,
    q_columns: Tensor,
    dout_columns: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> Tensor:
    """Adds to the gradients dq, dk and dv of a group; returns the gradient of the biases, by head.

    With scales, weights and gradients of scores are rounded to e4m3.

    Args:
        chunk: rows and keys of the group.
        scales: of weights and of gradients of scores, or none.
        dout: of the group, in row slots.
        q_columns, dout_columns: q and dout, or what stands for them in the sums over rows.
        dq, dk, dv: the gradients of the group.
    """
    group, batch, rows, keys = chunk.group, chunk.batch, chunk.rows, chunk.keys
    dout, alpha = dout[:, rows], batch.inputs.call.alpha
    both = dout.new_empty((2, *chunk.shape))  # so that one operation hides keys from both
    x, dx = both.unbind()
    chunk.scores_(x)
    factor = batch.factor * alpha
    values = group.v[:, keys].transpose(1, 2)
    dx.baddbmm_(dout, values, beta=0, alpha=1 if scales else factor)
    torch.ops.aten.silu_backward.grad_input(dx, x, grad_input=dx)
    weights = F.silu(x, inplace=True)
    if scales:
        of_weights, of_scores = (chunk.row_scales(rows) for rows in scales)
        weights.copy_(round_weights(weights, of_weights))
        dx.copy_(round_weights(dx, of_scores)).mul_(factor)
    chunk.hide_(both)
    dv[:, keys].baddbmm_(weights.transpose(1, 2), dout_columns[:, rows], alpha=batch.factor)
    dk[:, keys].baddbmm_(dx.transpose(1, 2), q_columns[:, rows])
    dq[:, rows].baddbmm_(dx, group.k[:, keys], beta=0)
    return group.by_head(dx)


# ---------------------------------------------------------------------------------------------
# Scores
# ---------------------------------------------------------------------------------------------


def _chunks(group: Group) -> Iterator[_Chunk]:
    """Divides the row slots into chunks. The last chunk comes first: it may see the most keys."""
    inputs, mask, max_k = group.batch.inputs, group.batch.mask, group.max_k
    fitting = CHUNK_ELEMENTS // (group.count * max_k)
    if inputs.ts_weight is not None:
        fitting = fitting * group.heads // max(group.heads, _HEADS_OF_BUCKETS)
    begin, _ = key_range(mask, max_k - 1, max_k)
    is_on_cpu = group.q.device.type == "cpu"
    rows = _CPU_ROWS if is_on_cpu else max(_CHUNK_ROWS, _CHUNK_SLOTS // group.count)
    # If a chunk had more rows than a row sees keys, a window would be a small part of the chunk.
    rows = max(1, min(rows, fitting, max(max_k - begin, _WINDOW_ROWS)))
    for first in reversed(range(0, group.max_q, rows)):
        yield _Chunk(group, first, min(first + rows, group.max_q))


class _Chunk:
    """The row slots `[first, end)` of a group, with the key slots that any of them may see.

    Attributes:
        rows, keys: slices of the row slots and of the key slots.
        shape: the shape of the scores, `(heads * sequences, rows, keys)`.
        distance: slot of the first key minus slot of the first row.
    """

    def __init__(self, group: Group, first: int, end: int) -> None:
        self.group, self.batch = group, group.batch
        self.rows = slice(first, end)
        # Row slot n has the same position in a sequence as key slot n + ahead.
        ahead = group.max_k - group.max_q
        begin, last = key_range(self.batch.mask, first + ahead, end + ahead)
        self.keys = slice(begin, group.max_k if last is None else min(last, group.max_k))
        self.shape = (group.count, end - first, self.keys.stop - begin)
        self.distance = begin - (first + ahead)

    def scores_(self, x: Tensor) -> Tensor:
        """Sets `x` to alpha times the biased scores, and returns it."""
        group, alpha = self.group, self.batch.inputs.call.alpha
        x.baddbmm_(
            group.q[:, self.rows], group.k[:, self.keys].transpose(1, 2), beta=0, alpha=alpha
        )
        for bias in self._biases():
            group.by_head(x).unflatten(0, (bias.shape[0], -1)).add_(bias[:, None], alpha=alpha)
        return x

    def hide_(self, x: Tensor) -> None:
        """Sets `x` `(..., *self.shape)` to 0 where the mask hides keys from rows.

        In empty slots keys and rows are 0, so without a bias their weights are 0, too.
        """
        inputs = self.batch.inputs
        biases = (inputs.rab, inputs.pos_weight, inputs.ts_weight)
        if self.batch.window is not None and all(bias is None for bias in biases):
            self._cut_(x, *self.batch.window)
        else:
            self.group.by_head(x).masked_fill_(self._hidden, 0)

    def _cut_(self, x: Tensor, left: int, right: int) -> Tensor:
        """Sets `(..., rows, keys)` to 0 outside of the window, and returns it."""
        rows, keys = x.shape[-2:]
        after = right - self.distance  # the last key that the first row sees
        if right >= 0 and after + 1 < keys:
            begin = max(after, 0)
            x[..., begin:].tril_(after - begin)
        before = -left - self.distance  # the first key that the first row sees
        if left >= 0 and before + rows > 1:
            x[..., : before + rows - 1].triu_(before)
        return x

    @cached_property
    def _hidden(self) -> Tensor:
        """Whether a key is hidden: bool, broadcasts to `(heads, sequences, rows, keys)`."""
        group = self.group
        if self.batch.window is not None:
            row_is_empty = group.row_is_empty[:, self.rows, None]
            visible = (row_is_empty | group.key_is_empty[:, None, self.keys]).logical_not_()
            return self._cut_(visible, *self.batch.window).logical_not_()
        column = torch.arange(self.keys.start, self.keys.stop, device=group.q.device)
        return visible_keys(group.intervals[:, :, self.rows], column).logical_not_()

    def _biases(self) -> Iterator[Tensor]:
        """Yields biases `(bias heads, sequences or 1, rows, keys)`."""
        q, _, _, rab, pos_weight, ts_weight, *_ = self.batch.inputs
        if rab is not None:
            yield rab[self.rab_index].to(q.dtype)
        if pos_weight is not None:
            yield self._position_bias(pos_weight.to(q.dtype))
        if ts_weight is not None:
            yield ts_weight.to(q.dtype)[:, self.buckets]

    @cached_property
    def rab_index(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The indices of the scores in a dense bias.

        The slots of a sequence have consecutive positions, at most as many as the bias has rows or
        columns. Empty slots come first and have negative positions. Modulo the size of the bias,
        all slots have different positions, so the gradient of each score is written to an element
        of its own, and empty slots write zeros to elements outside of the sequence.
        """
        group, rab = self.group, self.batch.inputs.rab
        assert rab is not None
        position = group.before_end + group.k_length
        row = position[:, group.max_k - group.max_q :][:, self.rows]
        numbers = torch.arange(rab.shape[0], device=rab.device)[group.numbers]
        return (
            numbers[:, None, None],
            torch.arange(rab.shape[1], device=rab.device)[:, None, None, None],
            (row % rab.shape[2])[..., None],
            (position[:, self.keys] % rab.shape[3])[:, None],
        )

    def row_scales(self, scales: Rows) -> Tensor:
        """Returns the scales of the chunk's row slots; the scale of an empty slot is 1."""
        slots = scales.gather(self.group)[0, :, self.rows]
        return slots.masked_fill_(slots == 0, 1)

    @property
    def lowest_distance(self) -> int:
        """Slot of the first key minus slot of the last row."""
        return self.distance - (self.shape[1] - 1)

    def _position_bias(self, weights: Tensor) -> Tensor:
        """Returns `(bias heads, 1, rows, keys)`: each row is a window of one vector, shifted."""
        _, rows, keys = self.shape
        reach = weights.shape[1] // 2
        first = self.lowest_distance
        distance = torch.arange(first, first + rows + keys - 1, device=weights.device)
        by_distance = weights[:, distance.clamp_(-reach, reach).add_(reach)]
        return by_distance.unfold(1, keys, 1).flip(1)[:, None]

    @cached_property
    def buckets(self) -> Tensor:
        """int32 `(sequences, rows, keys)`: the time bucket of each score."""
        call, ts_weight = self.batch.inputs.call, self.batch.inputs.ts_weight
        assert ts_weight is not None
        assert call.ts_thresholds is not None
        times = self.group.times
        if call.row_timestamps is not None:
            row_times = call.row_timestamps[self.group.packed_row[:, self.rows].clamp(min=0)]
        else:
            # A row takes the time of the next key; the last row takes the time of its own key.
            ahead = self.group.max_k - self.group.max_q
            following = torch.cat([times[:, 1:], times[:, -1:]], 1)
            row_times = following[:, ahead + self.rows.start : ahead + self.rows.stop]
        difference = time_difference(row_times[:, :, None], times[:, None, self.keys])
        return time_bucket(difference, call.ts_thresholds, ts_weight.shape[1]).to(torch.int32)
