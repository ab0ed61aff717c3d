"""Operations on packed ("jagged") sequences around HSTU layers.

They join and split sequences, interleave items and actions, convert padded batches, and embed
position and time.

A packed tensor is `values` `(total, ...)` with `offsets` `(batch + 1,)` int32 or int64:
sequence `b` owns the rows `offsets[b] .. offsets[b + 1]`. `total` may be larger than the last
offset; the rows past it belong to no sequence, so that a batch can be padded to a size that was
compiled or captured. These rows are zeros in every result and get no gradient, whatever their
values.

No function pads its tensors internally or copies to the host. The sizes of all results follow from
the sizes of the arguments, so every function runs in a CUDA graph, in
`torch.compile(fullgraph=True)` and in `torch.export`. All functions are differentiable in their
floating-point arguments. Shapes, dtypes and devices are checked; the values of offsets are not.
Offsets that do not start at 0, decrease or exceed the rows give arbitrary rows, but nothing outside
of a tensor is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .fx import Proxy, record_call

__all__ = [
    "JaggedParts",
    "add_position_time_embeddings",
    "concat_jagged",
    "deinterleave_jagged",
    "dense_to_jagged",
    "interleave_jagged",
    "jagged_backend",
    "jagged_ids",
    "jagged_positions",
    "jagged_to_dense",
    "split_jagged",
]


# ---------------------------------------------------------------------------------------------
# Indices of rows
# ---------------------------------------------------------------------------------------------


def jagged_ids(offsets: Tensor, total: int) -> Tensor:
    """Returns the index of the sequence of each packed row.

    Args:
        offsets: `(batch + 1,)` int32 or int64.
        total: the number of rows.

    Returns:
        `(total,)` int64; `batch` for rows past the last offset, which belong to no sequence.

    Raises:
        ValueError: for another shape or dtype of `offsets`, or a negative `total`.
    """
    if isinstance(offsets, Proxy):
        return record_call(jagged_ids, (offsets,), **locals())
    _check_offsets("offsets", offsets)
    _check_size("total", total)
    return _locate(offsets, total)[0]


def jagged_positions(offsets: Tensor, total: int) -> Tensor:
    """Returns the position of each packed row within its sequence, from 0.

    Args:
        offsets: `(batch + 1,)` int32 or int64.
        total: the number of rows.

    Returns:
        `(total,)` int64; 0 for rows past the last offset.

    Raises:
        ValueError: for another shape or dtype of `offsets`, or a negative `total`.
    """
    if isinstance(offsets, Proxy):
        return record_call(jagged_positions, (offsets,), **locals())
    _check_offsets("offsets", offsets)
    _check_size("total", total)
    return _locate(offsets, total)[1]


# ---------------------------------------------------------------------------------------------
# Sequences in parts
# ---------------------------------------------------------------------------------------------


def concat_jagged(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Joins the sequences of several packed tensors, for example contexts, history and targets.

    Sequence `b` of the result is sequence `b` of the first part, then of the second, and so on.

    Args:
        parts: `(values, offsets)` of each part: `values` `(total_i, ...)` of one dtype, with equal
            sizes except for the first dimension, and `offsets` `(batch + 1,)` int32 or int64.

    Returns:
        `values` `(sum of total_i, ...)`, and `offsets` `(batch + 1,)`, the sum of the parts'
        offsets.

    Raises:
        ValueError: for an empty `parts`, or parts that differ in shape, dtype or device.
    """
    if len(parts) and isinstance(parts[0][0], Proxy):
        return record_call(concat_jagged, (parts[0][0],), **locals())
    if not len(parts):
        raise ValueError("parts: expected at least one part, got none")
    first = parts[0][0]
    for number, (values, offsets) in enumerate(parts):
        _check_values(f"parts[{number}] values", values)
        _check_like(f"parts[{number}] values", values, "parts[0] values", first)
        size = None if number == 0 else parts[0][1].shape[0]
        _check_offsets(f"parts[{number}] offsets", offsets, first.device, size)
    layout = JaggedParts(
        [offsets for _, offsets in parts], [values.shape[0] for values, _ in parts]
    )
    return layout.concat([values for values, _ in parts]), layout.offsets


def split_jagged(
    values: Tensor, parts_offsets: Sequence[Tensor], totals: Sequence[int] | None = None
) -> list[Tensor]:
    """Splits each sequence into its parts; inverts `concat_jagged`.

    Args:
        values: `(total, ...)`, for each sequence the rows of the first part, then of the second,
            and so on.
        parts_offsets: the offsets of each part `(batch + 1,)` int32 or int64.
        totals: the number of rows of each result. None is `total` for each, because the host does
            not know how many rows belong to a part.

    Returns:
        For each part `(total_i, ...)`; rows past the last offset of the part are zeros.

    Raises:
        ValueError: for no part, offsets that do not fit `values` or each other in shape, dtype or
            device, or another number of `totals` than of parts.
    """
    if isinstance(values, Proxy):
        return record_call(split_jagged, (values,), **locals())
    _check_values("values", values)
    if totals is None:
        totals = [values.shape[0]] * len(parts_offsets)
    layout = JaggedParts(parts_offsets, totals)
    return [layout.part(values, number) for number in range(len(totals))]


class JaggedParts:
    """Joins and splits several tensors whose sequences have the same parts.

    It computes the row indices once, while `concat_jagged` and `split_jagged` compute them in each
    call. It cannot be constructed in a `torch.fx.symbolic_trace`.

    Args:
        parts_offsets: the offsets of each part, `(batch + 1,)` int32 or int64.
        totals: the number of rows of each part.

    Raises:
        ValueError: for no part, offsets that do not fit each other in shape, dtype or device, or
            another number of `totals` than of parts.

    Example:
        >>> parts = JaggedParts([history_offsets, target_offsets], [len(history), len(targets)])
        >>> x = parts.concat([history, targets])
        >>> timestamps = parts.concat([history_timestamps, target_timestamps])
        >>> of_targets = parts.part(stack(x, parts.offsets, max_seq_len), 1)
    """

    def __init__(self, parts_offsets: Sequence[Tensor], totals: Sequence[int]) -> None:
        if not len(parts_offsets):
            raise ValueError("parts_offsets: expected at least one tensor, got none")
        first = parts_offsets[0]
        for number, offsets in enumerate(parts_offsets):
            _check_offsets(f"parts_offsets[{number}]", offsets, first.device, first.shape[0])
        if len(totals) != len(parts_offsets):
            raise ValueError(f"totals: expected {len(parts_offsets)} numbers, got {len(totals)}")
        for number, total in enumerate(totals):
            _check_size(f"totals[{number}]", total)
        self._parts_offsets = parts_offsets
        self._totals = totals
        self._lengths, self._starts = _segments(parts_offsets)
        self._sources: tuple[Tensor, Tensor] | None = None

    @property
    def offsets(self) -> Tensor:
        """Offsets `(batch + 1,)` of the joined sequences, the sum of the parts' offsets."""
        offsets = self._parts_offsets[0]
        for others in self._parts_offsets[1:]:
            offsets = offsets + others
        return offsets

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """Joins one tensor of each part, as `concat_jagged` does.

        Args:
            parts: the tensor of each part, `(totals[i], ...)`.

        Returns:
            `(sum of totals, ...)`.

        Raises:
            ValueError: for parts that do not fit `totals`, or each other in shape, dtype or
                device.
        """
        for number, values in enumerate(parts):
            _check_values(f"parts[{number}]", values)
            _check_like(f"parts[{number}]", values, "parts[0]", parts[0])
        rows = [values.shape[0] for values in parts]
        if rows != [*self._totals]:
            raise ValueError(f"parts: expected tensors of {[*self._totals]} rows, got {rows}")
        if self._sources is None:
            bases = accumulate(self._totals[:-1], initial=0)
            sources = torch.stack(
                [
                    offsets[:-1] + base
                    for offsets, base in zip(self._parts_offsets, bases, strict=True)
                ],
                dim=1,
            )
            ends, shifts = self._starts + self._lengths, sources - self._starts
            self._sources = _sources(ends.flatten(), shifts.flatten(), sum(self._totals))
        return _take(torch.cat([*parts]), *self._sources)

    def part(self, values: Tensor, number: int) -> Tensor:
        """Takes one part out of joined sequences, as `split_jagged` does.

        Args:
            values: `(total, ...)`, the joined sequences.
            number: the number of the part, from 0.

        Returns:
            `(totals[number], ...)`; rows past the last offset of the part are zeros.

        Raises:
            ValueError: for values without rows or on another device than the offsets.
        """
        offsets = self._parts_offsets[number]
        _check_values("values", values)
        _check_offsets(f"parts_offsets[{number}]", offsets, values.device)
        shifts = self._starts[:, number] - offsets[:-1]
        return _take(values, *_sources(offsets[1:].long(), shifts, self._totals[number]))


# ---------------------------------------------------------------------------------------------
# Events of two rows
# ---------------------------------------------------------------------------------------------


def interleave_jagged(items: Tensor, actions: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Makes two rows for each event, its item and then its action.

    This is the input format of "Actions Speak Louder than Words" (arXiv 2402.17152, section 2.2).

    Args:
        items: `(total, ...)`, a row for each event.
        actions: the shape and dtype of `items`.
        offsets: `(batch + 1,)` int32 or int64, in events.

    Returns:
        `values` `(2 * total, ...)` and `offsets` `(batch + 1,)`, in rows.

    Raises:
        ValueError: for arguments that do not fit each other in shape, dtype or device.
    """
    if isinstance(items, Proxy):
        return record_call(interleave_jagged, (items,), **locals())
    _check_values("items", items)
    _check_offsets("offsets", offsets, items.device)
    _check_like("actions", actions, "items", items, rows=True)
    doubled = offsets * 2
    return _without_rows_past(torch.stack([items, actions], dim=1).flatten(0, 1), doubled), doubled


def deinterleave_jagged(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Separates items and actions; inverts `interleave_jagged`.

    Args:
        values: `(2 * total, ...)`, item and action rows alternating.
        offsets: `(batch + 1,)` int32 or int64, in rows; all even.

    Returns:
        `items` and `actions`, `(total, ...)` each and perhaps strided, and `offsets`
        `(batch + 1,)`, in events.

    Raises:
        ValueError: for an odd number of rows, or arguments that do not fit each other in shape,
            dtype or device.
    """
    if isinstance(values, Proxy):
        return record_call(deinterleave_jagged, (values,), **locals())
    _check_values("values", values)
    _check_offsets("offsets", offsets, values.device)
    if values.shape[0] % 2 != 0:
        raise ValueError(f"values: expected an even number of rows, got {values.shape[0]}")
    rows = _without_rows_past(values, offsets)
    return rows[0::2], rows[1::2], offsets // 2


# ---------------------------------------------------------------------------------------------
# Padded batches
# ---------------------------------------------------------------------------------------------

# NOTE: FBGEMM's CPU kernels have no fp64, and take the padding as a floating-point number. Its GPU
# kernels are not used, because they have not been tested against this module's guarantees.
_FBGEMM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FBGEMM_DEVICES = ("cpu",)


def jagged_backend(values: Tensor) -> Literal["fbgemm", "torch"]:
    """Returns which kernels `dense_to_jagged` and `jagged_to_dense` run for a tensor.

    These are `"fbgemm"` if `fbgemm_gpu` has been imported and `values` are fp32, bf16 or fp16 on
    the CPU; otherwise `"torch"`. The results are the same.
    """
    registered = hasattr(torch.ops.fbgemm, "jagged_to_padded_dense") and hasattr(
        torch.ops.fbgemm, "dense_to_jagged"
    )
    served = values.dtype in _FBGEMM_DTYPES and values.device.type in _FBGEMM_DEVICES
    return "fbgemm" if registered and served else "torch"


def dense_to_jagged(dense: Tensor, offsets: Tensor, total: int) -> Tensor:
    """Packs the first rows of each sequence of a padded batch.

    Args:
        dense: `(batch, max_len, ...)`.
        offsets: `(batch + 1,)` int32 or int64, the offsets of the sequences in the result.
        total: rows of the result.

    Returns:
        `(total, ...)`; rows past the last offset, or past `max_len` in a sequence, are zeros.

    Raises:
        ValueError: for arguments that do not fit each other in shape, dtype or device, or a
            negative `total`.
    """
    if isinstance(dense, Proxy):
        return record_call(dense_to_jagged, (dense,), **locals())
    if dense.dim() < 2:
        raise ValueError(f"dense: expected shape (batch, max_len, ...), got {tuple(dense.shape)}")
    _check_offsets("offsets", offsets, dense.device, dense.shape[0] + 1)
    _check_size("total", total)
    if jagged_backend(dense) == "fbgemm":
        rows = dense.flatten(2) if dense.dim() > 2 else dense.unsqueeze(2)
        packed: Tensor
        packed, _ = torch.ops.fbgemm.dense_to_jagged(rows, [_in_order(offsets, total)], total)
        return _without_rows_past(packed.reshape(total, *dense.shape[2:]), offsets)
    batch, max_len = dense.shape[:2]
    ids, positions = _locate(offsets, total)
    held = (ids < batch) & (positions < max_len)
    return _take(dense.flatten(0, 1), ids * max_len + positions, held)


def jagged_to_dense(values: Tensor, offsets: Tensor, max_len: int, fill: float = 0.0) -> Tensor:
    """Returns a padded batch of packed sequences.

    Args:
        values: `(total, ...)`.
        offsets: `(batch + 1,)` int32 or int64.
        max_len: rows of each sequence in the result; longer sequences are cut at the end.
        fill: the padding after shorter sequences, representable in the dtype of `values`.

    Returns:
        `(batch, max_len, ...)`.

    Raises:
        ValueError: for arguments that do not fit each other in shape, dtype or device, or a
            negative `max_len`.
    """
    if isinstance(values, Proxy):
        return record_call(jagged_to_dense, (values,), **locals())
    _check_values("values", values)
    _check_offsets("offsets", offsets, values.device)
    _check_size("max_len", max_len)
    batch, total = offsets.shape[0] - 1, values.shape[0]
    if jagged_backend(values) == "fbgemm":
        rows = values.flatten(1) if values.dim() > 1 else values.unsqueeze(1)
        padded: Tensor = torch.ops.fbgemm.jagged_to_padded_dense(
            rows, [_in_order(offsets, total)], [max_len], fill
        )
        return padded.reshape(batch, max_len, *values.shape[1:])
    columns = torch.arange(max_len, device=offsets.device)
    starts, lengths = offsets[:-1].long(), offsets.diff()
    held = columns < lengths.unsqueeze(1)
    rows = starts.unsqueeze(1) + columns
    taken = _take(values, rows.flatten(), held.flatten(), fill)
    return taken.reshape(batch, max_len, *values.shape[1:])


# ---------------------------------------------------------------------------------------------
# Position and time
# ---------------------------------------------------------------------------------------------


def add_position_time_embeddings(
    x: Tensor,
    offsets: Tensor,
    position_table: Tensor,
    *,
    time_table: Tensor | None = None,
    timestamps: Tensor | None = None,
    query_timestamps: Tensor | None = None,
    num_targets: Tensor | None = None,
    contextual_seq_len: int = 0,
    count_from: Literal["start", "end"] = "end",
    time_bucket: Literal["sqrt", "log"] = "sqrt",
    time_bucket_width: float = 60.0,
    scale: float = 1.0,
) -> Tensor:
    """Adds to each packed row a learned embedding of its position and one of its age.

    The result is `x * scale + (position_table[p] + time_table[t])`.

    It computes the functions of `ops/position.py` in Meta's public generative-recommenders:
    `add_timestamp_positional_embeddings` with `count_from="end"` and `time_bucket_width=60`,
    and `add_positional_embeddings` with `count_from="start"` and no time table. Meta's model
    has `scale = sqrt(width)`. With `n` the rows of a sequence before its targets and `i` the
    position of a row,

        p = max(n - i, 0) + contextual_seq_len      counted from the end, but for contextual rows,
        p = i                                       where i < contextual_seq_len
        p = min(i, n)                               counted from the start
        t = floor(f(max(query time - timestamp, 1e-6) / time_bucket_width)), at least 0,

    and indices beyond a table use its last entry. So all targets of a sequence have the same
    position. `t` is computed in fp32, as in Meta's code.

    Args:
        x: `(total, width)`, floating.
        offsets: `(batch + 1,)` int32 or int64.
        position_table: `(positions, width)`, floating.
        time_table: `(buckets, width)`, floating; None adds no embedding of time.
        timestamps: `(total,)` int64, the time of each row; required with `time_table`, else None.
        query_timestamps: `(batch,)` int64, the time from which ages count; None is the time of
            the last row of each sequence.
        num_targets: `(batch,)` int32 or int64, the number of target rows at the end of each
            sequence, two per target if targets are interleaved with actions; None is 0, so that
            every row has its own position.
        contextual_seq_len: this many rows at the start of every sequence are context. With
            `count_from="end"` they use the first entries of the table, which no other row uses. It
            must be 0 with `count_from="start"`.
        count_from: `"end"`, so that a position says how recent a row is, or `"start"`.
        time_bucket: `f`, `"sqrt"` or the natural `"log"`.
        time_bucket_width: the width in the unit of the timestamps; Meta's model has 60, with
            timestamps in seconds.
        scale: factor on `x`.

    Returns:
        `(total, width)` in the dtype of `x`, to which the sum of both embeddings is rounded first.

    Raises:
        ValueError: for arguments that do not fit each other in shape, dtype or device, an empty
            table, a time table without timestamps or the reverse, and an option out of range.
    """
    if isinstance(x, Proxy):
        return record_call(add_position_time_embeddings, (x,), **locals())
    if x.dim() != 2 or not x.is_floating_point():
        raise ValueError(f"x: expected floating (total, width), got {_kind(x)}")
    _check_offsets("offsets", offsets, x.device)
    total, batch = x.shape[0], offsets.shape[0] - 1
    _check_table("position_table", position_table, x)
    if num_targets is not None:
        _check_integers("num_targets", num_targets, batch, x.device, (torch.int32, torch.int64))
    if count_from not in ("start", "end"):
        raise ValueError(f"count_from: expected 'start' or 'end', got {count_from!r}")
    _check_size("contextual_seq_len", contextual_seq_len)
    if count_from == "start" and contextual_seq_len > 0:
        raise ValueError(
            f"contextual_seq_len: expected 0 with count_from='start', got {contextual_seq_len}"
        )
    if (time_table is None) != (timestamps is None):
        given = "timestamps" if time_table is None else "time_table"
        raise ValueError(f"{given}: expected time_table and timestamps or neither, got it alone")
    if query_timestamps is not None and timestamps is None:
        raise ValueError("query_timestamps: expected None without timestamps, got a tensor")

    ids, rows = _locate(offsets, total)
    lengths = offsets.diff().long()
    before_targets = _of_sequence(lengths if num_targets is None else lengths - num_targets, ids)
    positions = torch.minimum(rows, before_targets)
    if count_from == "end":
        positions = before_targets - positions + contextual_seq_len
        positions = torch.where(rows < contextual_seq_len, rows, positions)
    added = F.embedding(positions.clamp(0, position_table.shape[0] - 1), position_table)
    if time_table is not None and timestamps is not None:
        _check_table("time_table", time_table, x)
        _check_integers("timestamps", timestamps, total, x.device, (torch.int64,))
        if time_bucket not in ("sqrt", "log"):
            raise ValueError(f"time_bucket: expected 'sqrt' or 'log', got {time_bucket!r}")
        if not time_bucket_width > 0:
            raise ValueError(f"time_bucket_width: expected more than 0, got {time_bucket_width}")
        if query_timestamps is None:
            query_timestamps = _take(timestamps, offsets[1:].long() - 1, lengths > 0)
        else:
            _check_integers("query_timestamps", query_timestamps, batch, x.device, (torch.int64,))
        age = (_of_sequence(query_timestamps, ids) - timestamps).to(torch.float32)
        age = age.clamp(min=1e-6) / time_bucket_width
        bucket = age.log() if time_bucket == "log" else age.sqrt()
        buckets = bucket.clamp(0, time_table.shape[0] - 1).to(torch.int64)
        added = added + F.embedding(buckets, time_table)
    return _without_rows_past(x * scale + added.to(x.dtype), offsets)


# ---------------------------------------------------------------------------------------------
# Helpers
# ---------------------------------------------------------------------------------------------


def _locate(offsets: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Returns the sequence and the position of each row; `batch` and 0 for rows in no sequence."""
    offsets = offsets.long()
    rows = torch.arange(total, device=offsets.device)
    ids = torch.searchsorted(offsets[1:].contiguous(), rows, right=True)
    positions = (rows - offsets[ids]).masked_fill(ids == offsets.shape[0] - 1, 0)
    return ids, positions.clamp(min=0)


def _of_sequence(numbers: Tensor, ids: Tensor) -> Tensor:
    """Returns `numbers[ids]`, and 0 for rows that are in no sequence."""
    return F.pad(numbers, (0, 1))[ids]


def _segments(parts_offsets: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the length of each part of each sequence, and its start in the joined rows.

    Both are `(batch, parts)` int64.
    """
    lengths = torch.stack([offsets.long().diff() for offsets in parts_offsets], dim=1)
    ends = lengths.flatten().cumsum(0).view_as(lengths)
    return lengths, ends - lengths


def _sources(ends: Tensor, shifts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Returns the `rows` and `held` of `_take` that make `(total, ...)` of shifted segments.

    Row `r` is read from `r + shifts[s]`, where `s` is the first segment that ends after row `r`;
    rows past the last segment are not held.
    """
    rows = torch.arange(total, device=ends.device)
    segments = torch.searchsorted(ends.contiguous(), rows, right=True)
    return rows + _of_sequence(shifts, segments), segments < shifts.shape[0]


def _take(values: Tensor, rows: Tensor, held: Tensor, fill: float = 0) -> Tensor:
    """Returns `values[rows]` where `held`, and `fill` elsewhere."""
    if values.shape[0] == 0:  # indexing needs a row, even if no row is held
        values = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
    # NOTE: the remainder is in bounds for any offsets. Clamping would map all rows that are not
    # held to the same row, and on a GPU the atomic additions to its gradient would be serialized.
    rows = rows.remainder(values.shape[0])
    return values.index_select(0, rows).masked_fill(~_like_rows(held, values), fill)


def _without_rows_past(values: Tensor, offsets: Tensor) -> Tensor:
    """Returns `values` with zeros past the last offset."""
    past = torch.arange(values.shape[0], device=values.device) >= offsets[-1]
    return values.masked_fill(_like_rows(past, values), 0)


def _like_rows(flags: Tensor, values: Tensor) -> Tensor:
    return flags.view(flags.shape + (1,) * (values.dim() - 1))


def _in_order(offsets: Tensor, total: int) -> Tensor:
    """Makes offsets non-decreasing and at most `total`, for kernels that do not check them."""
    return F.pad(offsets[1:].clamp(0, total).cummax(0).values, (1, 0))


# ---------------------------------------------------------------------------------------------
# Checks on the host
# ---------------------------------------------------------------------------------------------


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"


def _check_offsets(
    name: str, offsets: Tensor, device: torch.device | None = None, size: int | None = None
) -> None:
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ValueError(f"{name}: expected shape (batch + 1,), got {tuple(offsets.shape)}")
    if size is not None and offsets.shape[0] != size:
        raise ValueError(f"{name}: expected shape ({size},), got {tuple(offsets.shape)}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: expected int32 or int64, got {offsets.dtype}")
    if device is not None and offsets.device != device:
        raise ValueError(f"{name}: expected a tensor on {device}, got one on {offsets.device}")


def _check_values(name: str, values: Tensor) -> None:
    if values.dim() < 1:
        raise ValueError(f"{name}: expected shape (total, ...), got ()")


def _check_like(name: str, values: Tensor, other: str, like: Tensor, rows: bool = False) -> None:
    """Checks dtype, device and shape against another tensor; with `rows`, any number of rows."""
    first = 0 if rows else 1
    fits = values.dim() == like.dim() and values.shape[first:] == like.shape[first:]
    if not fits or values.dtype != like.dtype or values.device != like.device:
        what = "a tensor like" if rows else "rows like those of"
        raise ValueError(f"{name}: expected {what} {other}, {_kind(like)}, got {_kind(values)}")


def _check_table(name: str, table: Tensor, x: Tensor) -> None:
    fits = table.dim() == 2 and table.shape[1] == x.shape[1] and table.shape[0] > 0
    if not fits or not table.is_floating_point() or table.device != x.device:
        raise ValueError(
            f"{name}: expected floating (1 or more, {x.shape[1]}) on {x.device}, got {_kind(table)}"
        )


def _check_integers(
    name: str, numbers: Tensor, size: int, device: torch.device, dtypes: tuple[torch.dtype, ...]
) -> None:
    if numbers.shape != (size,) or numbers.dtype not in dtypes or numbers.device != device:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}: expected {names} ({size},) on {device}, got {_kind(numbers)}")


def _check_size(name: str, size: int) -> None:
    if size < 0:
        raise ValueError(f"{name}: expected 0 or more, got {size}")
