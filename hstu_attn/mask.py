"""Defines which keys a query sees: the `Mask` object and its row spans.

Every mask is, for each query row, a union of half-open key intervals; all but `func` with five or
more bounds need at most two, `[a0, a1) U [b0, b1)`, called a *row span*. This module is the Python
definition of the masks; `csrc/common/mask.h` is the same definition for the kernels, and the tests
compare the two. No other Python module compares a row with a column.

Notation, for one sequence: `q_len` query rows are the last of `k_len` positions, so row `r` is at
position `i = r + k_len - q_len`. The first `c` positions are contextual, the last `T` are targets
(candidates), and `h = k_len - T` is the first target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "Mask",
    "batch_row_spans",
    "clip_to_keys",
    "dense_mask",
    "key_range",
    "mask_heads",
    "packed_intervals",
    "row_intervals",
    "row_spans",
    "sees_anything",
    "select_rows",
    "visible_keys",
]

_INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class Mask:
    """The keys that each query row may see, for a whole batch.

    Use a constructor (`Mask.full`, `Mask.causal`, `Mask.local`, `Mask.semi_local`,
    `Mask.from_row_spans`, `Mask.from_func`) or the fields below. The masks are those of Zhai et al.
    2024, "Actions Speak Louder than Words" (arXiv 2402.17152, sections 3 and 4: causal attention
    over a user's history, and candidates that see the history but not each other) and of the public
    HSTU libraries.

    Attributes:
        window_size: `(left, right)` in positions: row `i` sees keys `[i - left, i + right]`. `-1`
            is unlimited and `0` means 0, so `(-1, -1)` is full attention and `(-1, 0)` causal.
        num_contexts: int32 or int64 `(batch,)`: contextual tokens, first in each sequence. They see
            everything before the targets. Needs a window `(-1, 0)` or `(left, 0)`.
        num_targets: int32 or int64 `(batch,)`: candidates, last in each sequence. A candidate sees
            everything before the targets and, causally, its own group. Needs the same windows as
            `num_contexts`.
        target_group_size: candidates that see each other causally; at least 1.
        min_full_attn_seq_len: with a window `(left, 0)`, this many positions before the
            targets, and the targets, attend as if there were no window. 0 turns it off.
        row_spans: int32 `(total_q, 4)` or `(heads, total_q, 4)`: `a0, a1, b0, b1` of each query
            row, which sees `[a0, a1) U [b0, b1)`. Excludes every other field.
        func: int32 `(1 or heads, n, >= total_q)` with odd `n`: each query row sees
            `[0, F0) U [F1, F2) U ...`, as FBGEMM defines it. Excludes every other field.
        func_causal: whether `func` is intersected with the causal mask.

    Raises:
        ValueError: for fields that exclude each other. The call checks shapes and dtypes.
    """

    window_size: tuple[int, int] = (-1, -1)
    num_contexts: Tensor | None = None
    num_targets: Tensor | None = None
    target_group_size: int = 1
    min_full_attn_seq_len: int = 0
    row_spans: Tensor | None = None
    func: Tensor | None = None
    func_causal: bool = False

    def __post_init__(self) -> None:
        _check_window(self.window_size)
        if self.target_group_size < 1:
            raise ValueError(
                f"target_group_size: expected at least 1, got {self.target_group_size}"
            )
        _check_counts(min_full_attn_seq_len=self.min_full_attn_seq_len)
        if self.row_spans is not None or self.func is not None:
            self._check_arbitrary()
            return
        if self.func_causal:
            raise ValueError("func_causal: expected False without func, got True")
        self._check_composed()

    def _check_arbitrary(self) -> None:
        name = "row_spans" if self.row_spans is not None else "func"
        if self.row_spans is not None and self.func is not None:
            raise ValueError("row_spans: expected only one of row_spans and func, got both")
        for other, given in (
            ("num_contexts", self.num_contexts is not None),
            ("num_targets", self.num_targets is not None),
            ("min_full_attn_seq_len", self.min_full_attn_seq_len > 0),
            ("window_size", tuple(self.window_size) != (-1, -1)),
        ):
            if given:
                value = getattr(self, other)
                came = "a tensor" if isinstance(value, Tensor) else repr(value)
                raise ValueError(
                    f"{other}: expected its default with {name}, which is the whole mask, "
                    f"got {came}"
                )
        if self.row_spans is not None and self.func_causal:
            raise ValueError("func_causal: expected False with row_spans, got True")

    def _check_composed(self) -> None:
        left, right = self.window_size
        for name, lengths in (
            ("num_contexts", self.num_contexts),
            ("num_targets", self.num_targets),
        ):
            if lengths is not None and right != 0:
                raise ValueError(
                    f"{name}: expected window_size (-1, 0) or (left, 0), got "
                    f"window_size {(left, right)}"
                )
        if self.min_full_attn_seq_len > 0 and (left < 0 or right != 0):
            raise ValueError(
                "min_full_attn_seq_len: expected window_size (left, 0) with left >= 0, "
                f"got window_size {(left, right)}"
            )

    @staticmethod
    def full() -> Mask:
        """Makes a mask where every row sees every key of its sequence."""
        return Mask()

    @staticmethod
    def causal(
        *,
        num_contexts: Tensor | None = None,
        num_targets: Tensor | None = None,
        target_group_size: int = 1,
    ) -> Mask:
        """Makes a mask where row `i` sees keys up to `i`, with contexts and candidates if given."""
        return Mask((-1, 0), num_contexts, num_targets, target_group_size)

    @staticmethod
    def local(
        left: int,
        right: int = 0,
        *,
        num_contexts: Tensor | None = None,
        num_targets: Tensor | None = None,
        target_group_size: int = 1,
        min_full_attn_seq_len: int = 0,
    ) -> Mask:
        """Makes a mask where row `i` sees keys `i - left` to `i + right`; options need right 0."""
        return Mask(
            (left, right), num_contexts, num_targets, target_group_size, min_full_attn_seq_len
        )

    @staticmethod
    def semi_local(
        left: int,
        prefix: int,
        cu_seqlens_q: Tensor,
        total_q: int,
        *,
        cu_seqlens_k: Tensor | None = None,
        num_contexts: Tensor | None = None,
        num_targets: Tensor | None = None,
        target_group_size: int = 1,
    ) -> Mask:
        """Makes the causal mask within two windows.

        Row `i` sees the keys `i - left` to `i`, and of the earlier keys the first `prefix` of its
        sequence.

        This is the semi-local attention of ULTRA-HSTU (Ding et al. 2026, arXiv 2602.16986, section
        4.2.1), whose local window K1 is `left` and whose global window K2 is `prefix`. K1 counts
        the keys before the row; TorchEasyRec's `sla_k1` counts the row too, so there
        `left = sla_k1 - 1`. A mask in which the last rows alone see beyond the window is
        `Mask.local` with `min_full_attn_seq_len`.

        That definition covers a history only. Contextual and candidate tokens follow the rules of
        the other masks, as far as two intervals can express them: a candidate sees the whole
        history, whatever the windows are, and causally its own group. A contextual token sees
        everything before the targets. Other rows see all contextual tokens if `prefix` is at least
        their number, or where their local window reaches into them.

        The result is a mask of row spans on the device of `cu_seqlens_q`. Nothing is copied to the
        host, and one mask serves all layers and calls with the same offsets.

        Args:
            left: keys before the row in the local window, 0 or more.
            prefix: keys at the start of a sequence in the global window, 0 or more.
            cu_seqlens_q: int32 or int64 `(batch + 1,)` query offsets.
            total_q: rows of q. Rows past the last offset see nothing.
            cu_seqlens_k: `(batch + 1,)` key offsets; None means `cu_seqlens_q`. The queries are the
                last positions of a sequence.
            num_contexts, num_targets, target_group_size: as in `Mask`.

        Raises:
            ValueError: for a negative window, or a tensor of another dtype or shape.
        """
        _check_counts(left=left, prefix=prefix, total_q=total_q)
        _check_tensor("cu_seqlens_q", cu_seqlens_q, _INDEX_DTYPES, (1,))
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        batch = cu_seqlens_q.shape[0] - 1
        for name, tensor, size in (
            ("cu_seqlens_k", cu_seqlens_k, batch + 1),
            ("num_contexts", num_contexts, batch),
            ("num_targets", num_targets, batch),
        ):
            if tensor is not None:
                _check_tensor(name, tensor, _INDEX_DTYPES, (1,))
                if tensor.shape[0] != size:
                    raise ValueError(
                        f"{name}: expected shape ({size},) for a batch of {batch}, got "
                        f"{tuple(tensor.shape)}"
                    )
        tokens = (num_contexts, num_targets, target_group_size)
        within, beyond = (
            batch_row_spans(mask, cu_seqlens_q, cu_seqlens_k, total_q=total_q)
            for mask in (Mask((left, 0), *tokens), Mask((-1, 0), *tokens))
        )
        begin, end, _, _ = within.unbind(1)
        history = torch.stack([torch.zeros_like(begin), begin.clamp(max=prefix), begin, end], 1)
        is_target = beyond[:, 3:] > 0  # the second interval is a candidate's own group
        return Mask(row_spans=torch.where(is_target, beyond, history))

    @staticmethod
    def from_row_spans(spans: Tensor) -> Mask:
        """Makes a mask of given row spans: int32 `(total_q, 4)` or `(heads, total_q, 4)`."""
        return Mask(row_spans=spans)

    @staticmethod
    def from_func(func: Tensor, causal: bool = False) -> Mask:
        """Makes FBGEMM's arbitrary mask, int32 `(1 or heads, n, >= total_q)`, optionally causal."""
        return Mask(func=func, func_causal=causal)

    @property
    def is_arbitrary(self) -> bool:
        """Returns whether the caller gives each row's intervals (`row_spans` or `func`)."""
        return self.row_spans is not None or self.func is not None


def _check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 0:
            raise ValueError(f"{name}: expected 0 or more, got {count}")


def _check_window(window: tuple[int, int]) -> None:
    if len(window) != 2:
        raise ValueError(f"window_size: expected (left, right), got {window!r}")
    if window[0] < -1 or window[1] < -1:
        raise ValueError(
            f"window_size: expected -1 (unlimited) or more on each side, got {tuple(window)}"
        )


def _check_tensor(
    name: str, value: object, dtypes: tuple[torch.dtype, ...], dims: tuple[int, ...]
) -> None:
    wanted = " or ".join(str(dtype) for dtype in dtypes)
    if not isinstance(value, Tensor):
        raise ValueError(f"{name}: expected a {wanted} tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        raise ValueError(f"{name}: expected dtype {wanted}, got {value.dtype}")
    if value.dim() not in dims:
        ranks = " or ".join(f"{dim}-D" for dim in dims)
        raise ValueError(f"{name}: expected a {ranks} tensor, got shape {tuple(value.shape)}")


# ---------------------------------------------------------------------------------------------
# Row spans: the definition
# ---------------------------------------------------------------------------------------------


def _closed_form_spans(
    mask: Mask, row: Tensor, q_len: Tensor, k_len: Tensor, contexts: Tensor, targets: Tensor
) -> Tensor:
    """Returns the intervals `(rows, 2, 2)` of a mask that is not arbitrary; arguments broadcast."""
    left, right = mask.window_size
    position = row + (k_len - q_len)
    first_target = k_len - targets.clamp(min=0).minimum(k_len)
    contexts = contexts.clamp(min=0).minimum(first_target)
    zero = torch.zeros_like(position)

    if right != 0:  # full, or a window with a right side: nothing can be composed with it
        begin = position - left if left >= 0 else zero
        end = position + right + 1 if right > 0 else zero + k_len
        group_begin = group_end = zero
    else:
        is_target = position >= first_target
        # A target's window is counted from the end of the history.
        begin = torch.minimum(position, first_target) - left if left >= 0 else zero
        begin = torch.where(begin < contexts, 0, begin)
        if mask.min_full_attn_seq_len > 0:
            unwindowed = position >= first_target - mask.min_full_attn_seq_len
            begin = torch.where(unwindowed, 0, begin)
        end = torch.minimum(position + 1, first_target)
        group = torch.div(position - first_target, mask.target_group_size, rounding_mode="floor")
        group_begin = torch.where(is_target, first_target + group * mask.target_group_size, 0)
        group_end = torch.where(is_target, position + 1, 0)
        is_context = position < contexts
        begin = torch.where(is_context, 0, begin)
        end = torch.where(is_context, first_target, end)

    intervals = torch.stack([begin, end, group_begin, group_end], -1).view(-1, 2, 2)
    return _clip(intervals, position, row, q_len, k_len)


def _func_intervals(bounds: Tensor, causal: bool, position: Tensor) -> Tensor:
    """Converts bounds `(n, rows)` to intervals `(rows, (n + 1) / 2, 2)`."""
    bounds = bounds.to(torch.int64)
    starts = torch.cat([torch.zeros_like(bounds[:1]), bounds[1::2]])
    intervals = torch.stack([starts, bounds[0::2]], -1).transpose(0, 1)
    if causal:
        intervals = torch.minimum(intervals, (position + 1)[:, None, None])
    return intervals


def _clip(intervals: Tensor, position: Tensor, row: Tensor, q_len: Tensor, k_len: Tensor) -> Tensor:
    """Clips to `[0, k_len)`; rows past `q_len` or before the first key see nothing."""
    intervals = torch.minimum(intervals.clamp(min=0), torch.as_tensor(k_len)[..., None, None])
    sees = (position >= 0) & (row < q_len)
    empty = (intervals[..., :1] >= intervals[..., 1:]) | ~sees[:, None, None]
    return intervals.masked_fill(empty, 0)


def row_intervals(
    mask: Mask,
    q_len: int,
    k_len: int,
    *,
    num_contexts: int = 0,
    num_targets: int = 0,
    first_row: int = 0,
    head: int = 0,
) -> Tensor:
    """Returns the key intervals that each query row of one sequence sees.

    Args:
        mask: the mask; its `num_contexts` and `num_targets` are replaced by the arguments below.
        q_len: query rows of the sequence.
        k_len: keys of the sequence.
        num_contexts: contextual tokens of the sequence, 0 if `mask` has none.
        num_targets: candidates of the sequence, 0 if `mask` has none.
        first_row: the sequence's first row in `row_spans` or `func`.
        head: the head whose `row_spans` or `func` to use, where these differ by head.

    Returns:
        int64 `(q_len, m, 2)`: half-open intervals, clipped to `[0, k_len)`, empty ones `(0, 0)`.
        They may touch or overlap; a key is visible if it is in any of them.
    """
    device = _mask_device(mask)
    row = torch.arange(q_len, device=device)
    q_length, k_length, contexts, targets = (
        torch.tensor(value, device=device) for value in (q_len, k_len, num_contexts, num_targets)
    )
    return packed_intervals(
        mask, first_row + row, row, q_length, k_length, contexts, targets, head=head
    )


def packed_intervals(
    mask: Mask,
    packed_row: Tensor,
    row: Tensor,
    q_len: Tensor,
    k_len: Tensor,
    contexts: Tensor,
    targets: Tensor,
    *,
    head: int = 0,
) -> Tensor:
    """Returns the key intervals of given rows of any sequences, as `row_intervals` does.

    All tensors are int64, `(rows,)` or of a shape that broadcasts to it.

    Args:
        mask: the mask of the batch.
        packed_row: where the rows are in the packed queries, and in `row_spans` or `func`.
        row: the rows within their sequences; one at or past `q_len` sees nothing.
        q_len, k_len: query rows and keys of the rows' sequences.
        contexts, targets: contextual tokens and candidates of the rows' sequences.
        head: as for `row_intervals`.
    """
    if not mask.is_arbitrary:
        return _closed_form_spans(mask, row, q_len, k_len, contexts, targets)
    position = row + (k_len - q_len)
    intervals = _arbitrary_intervals(mask, packed_row, position, head)
    return _clip(intervals, position, row, q_len, k_len)


def key_range(mask: Mask, first: int, end: int) -> tuple[int, int | None]:
    """Returns a range of positions with all keys that rows `[first, end)` see.

    Args:
        mask: the mask of a batch.
        first, end: positions `[first, end)` of rows, in any sequence.

    Returns:
        the first position, 0 or more, and the end of the range; None is the end of the sequence.
    """
    left, right = (-1, 0 if mask.func_causal else -1) if mask.is_arbitrary else mask.window_size
    sees_all = (mask.num_contexts, mask.num_targets) != (None, None) or mask.min_full_attn_seq_len
    begin = 0 if left < 0 or sees_all else max(0, first - left)
    return begin, None if right < 0 or mask.num_contexts is not None else end + right


def mask_heads(mask: Mask) -> int:
    """Returns the number of masks along the heads: 1 if all heads share one."""
    if mask.row_spans is not None and mask.row_spans.dim() == 3:
        return mask.row_spans.shape[0]
    return 1 if mask.func is None else mask.func.shape[0]


def _arbitrary_intervals(mask: Mask, packed_row: Tensor, position: Tensor, head: int) -> Tensor:
    if mask.row_spans is not None:
        spans = mask.row_spans if mask.row_spans.dim() == 2 else mask.row_spans[head]
        return spans[packed_row].to(torch.int64).view(-1, 2, 2)
    assert mask.func is not None
    bounds = mask.func[head if mask.func.shape[0] > 1 else 0]
    return _func_intervals(bounds[:, packed_row], mask.func_causal, position)


def _mask_device(mask: Mask) -> torch.device:
    for tensor in (mask.row_spans, mask.func):
        if tensor is not None:
            return tensor.device
    return torch.device("cpu")


def row_spans(
    mask: Mask,
    q_len: int,
    k_len: int,
    num_contexts: int = 0,
    num_targets: int = 0,
    *,
    first_row: int = 0,
    head: int = 0,
) -> Tensor:
    """Returns row spans of one sequence, int32 `(q_len, 4)`; arguments as for `row_intervals`.

    Raises:
        ValueError: for a `func` of five or more bounds: a row may need more than two intervals.
    """
    intervals = row_intervals(
        mask,
        q_len,
        k_len,
        num_contexts=num_contexts,
        num_targets=num_targets,
        first_row=first_row,
        head=head,
    )
    return _as_spans(intervals)


def _as_spans(intervals: Tensor) -> Tensor:
    count = intervals.shape[1]
    if count > 2:
        raise ValueError(
            f"func: expected at most 3 bounds for a row span, got n = {2 * count - 1}; "
            "use row_intervals"
        )
    spans = intervals.new_zeros((intervals.shape[0], 4), dtype=torch.int32)
    spans[:, : 2 * count] = intervals.flatten(1)
    return spans


def batch_row_spans(
    mask: Mask,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    total_q: int | None = None,
    head: int = 0,
) -> Tensor:
    """Returns row spans of a packed batch, int32 `(total_q, 4)`, without a loop over the sequences.

    Rows outside every sequence, and rows at or past `seqused_q`, see nothing. Keys are numbered
    within their sequence.

    Args:
        mask: the mask of the batch.
        cu_seqlens_q: `(batch + 1,)` query offsets.
        cu_seqlens_k: `(batch + 1,)` key offsets.
        seqused_q: `(batch,)` valid query rows of each sequence; None means all.
        seqused_k: `(batch,)` valid keys of each sequence; None means all.
        total_q: query rows of the batch; None means `cu_seqlens_q[-1]`.
        head: as for `row_intervals`.
    """
    device = cu_seqlens_q.device
    starts_q = cu_seqlens_q.to(torch.int64)
    starts_k = cu_seqlens_k.to(torch.int64)
    lengths_q = _used_lengths(starts_q, seqused_q)
    lengths_k = _used_lengths(starts_k, seqused_k)
    batch = lengths_q.shape[0]
    rows = int(starts_q[-1]) if total_q is None else total_q
    if batch == 0 or rows == 0:
        return torch.zeros((rows, 4), dtype=torch.int32, device=device)

    packed_row = torch.arange(rows, device=device)
    sequence = torch.searchsorted(starts_q, packed_row, right=True) - 1
    inside = (sequence >= 0) & (sequence < batch)
    sequence = sequence.clamp(0, batch - 1)
    row = packed_row - starts_q[sequence]
    # A row outside every sequence gets length 0, so that it is past the end.
    q_len = torch.where(inside, lengths_q[sequence], 0)
    k_len = lengths_k[sequence]
    zeros = torch.zeros(batch, dtype=torch.int64, device=device)
    contexts = zeros if mask.num_contexts is None else mask.num_contexts.to(torch.int64)
    targets = zeros if mask.num_targets is None else mask.num_targets.to(torch.int64)
    return _as_spans(
        packed_intervals(
            mask,
            packed_row,
            row,
            q_len,
            k_len,
            contexts[sequence],
            targets[sequence],
            head=head,
        )
    )


def _used_lengths(starts: Tensor, seqused: Tensor | None) -> Tensor:
    lengths = starts.diff()
    return lengths if seqused is None else seqused.to(torch.int64).clamp(min=0).minimum(lengths)


def select_rows(mask: Mask, seq_offsets: Tensor, rows: Tensor, total_q: int) -> Mask:
    """Returns the mask of some rows of a packed batch, as an arbitrary mask.

    Args:
        mask: the mask of a batch that has as many queries as keys in each sequence.
        seq_offsets: `(batch + 1,)` offsets of its sequences.
        rows: `(rows,)` integers, the chosen rows of the packed batch.
        total_q: rows of the packed batch.

    Returns:
        a mask with `row_spans`, or with `func` if `mask` has a `func` of five or more bounds. Its
        row `n` is row `rows[n]` of the batch.
    """
    if mask.func is not None and mask.func.shape[1] > 3:
        func = mask.func.index_select(2, rows)
        if mask.func_causal:
            starts = seq_offsets.to(rows.dtype)
            position = rows - starts[torch.searchsorted(starts, rows, right=True) - 1]
            func = torch.minimum(func, (position + 1).to(torch.int32))
        return Mask.from_func(func)
    spans = [
        batch_row_spans(mask, seq_offsets, seq_offsets, total_q=total_q, head=head)
        for head in range(mask_heads(mask))
    ]
    chosen = [of_head.index_select(0, rows) for of_head in spans]
    return Mask.from_row_spans(chosen[0] if len(chosen) == 1 else torch.stack(chosen))


def clip_to_keys(mask: Mask, first_key: Tensor, num_keys: Tensor, shift: Tensor) -> Mask:
    """Returns the part of an arbitrary mask that is in a range of keys, renumbered.

    Args:
        mask: a mask with `row_spans`, or with `func` and no `func_causal`.
        first_key: `(rows,)` integers: for each row, the first key of the range.
        num_keys: `(rows,)` integers: the keys in the range.
        shift: `(rows,)` integers: the number that the first key of the range gets.
    """
    first_key, num_keys, shift = (x.to(torch.int32) for x in (first_key, num_keys, shift))
    if mask.row_spans is not None:
        first_key, num_keys, shift = (x[:, None] for x in (first_key, num_keys, shift))
        bounds = mask.row_spans
    else:
        assert mask.func is not None
        assert not mask.func_causal
        # The first interval of a func begins at 0. It becomes empty here, and its keys go to the
        # second interval.
        bounds = F.pad(mask.func, (0, 0, 1, 0))
    bounds = (bounds.clamp(min=0) - first_key).clamp(min=0).minimum(num_keys) + shift
    if mask.row_spans is not None:
        return Mask.from_row_spans(bounds)
    return Mask.from_func(F.pad(bounds, (0, 0, 1, 0)))


def sees_anything(mask: Mask) -> Tensor:
    """Returns whether any row has a non-empty interval, as a bool scalar tensor.

    The mask must be arbitrary, without `func_causal`.
    """
    if mask.row_spans is not None:
        begins, ends = mask.row_spans[..., 0::2], mask.row_spans[..., 1::2]
    else:
        assert mask.func is not None
        assert not mask.func_causal
        ends = mask.func[:, 0::2]
        begins = F.pad(mask.func[:, 1::2], (0, 0, 1, 0))
    return (begins < ends).any()


def dense_mask(
    mask: Mask,
    q_len: int,
    k_len: int,
    *,
    num_contexts: int = 0,
    num_targets: int = 0,
    first_row: int = 0,
    head: int = 0,
) -> Tensor:
    """Returns a bool `(q_len, k_len)` tensor, True where the row sees the key.

    The arguments are those of `row_intervals`.
    """
    intervals = row_intervals(
        mask,
        q_len,
        k_len,
        num_contexts=num_contexts,
        num_targets=num_targets,
        first_row=first_row,
        head=head,
    )
    return visible_keys(intervals, torch.arange(k_len, device=intervals.device))


def visible_keys(intervals: Tensor, column: Tensor) -> Tensor:
    """Returns bool `(..., keys)`: whether a key is in any of the intervals of a row.

    Args:
        intervals: `(..., m, 2)`, half-open.
        column: `(keys,)` the keys' numbers.
    """
    shape = (*intervals.shape[:-2], column.shape[0])
    visible = torch.zeros(shape, dtype=torch.bool, device=intervals.device)
    for interval in intervals.unbind(-2):
        begin, end = interval[..., :1], interval[..., 1:]
        visible |= (column >= begin) & (column < end)
    return visible
