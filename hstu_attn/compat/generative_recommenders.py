"""`hstu_mha` and `delta_hstu_mha` with the arguments of Meta's generative-recommenders.

A call written for `generative_recommenders.ops.hstu_attention` runs unchanged but for its import.
The mask is the one of that library's PyTorch reference, in its terms: `max_attn_len = l` is the
window `(l, 0)`, and `contextual_seq_len` is the same number of contextual tokens in every sequence.

On a CPU as on a GPU, `num_targets` is clamped to the length of its sequence, and a q, k or v whose
last dimension is not contiguous is copied: see `hstu_attn.interface.clamped_attention`.

TorchEasyRec and NVIDIA's recsys-examples derive their functions of these names from Meta's and add
`scaling_seqlen`, TorchEasyRec also `attn_func`. Both arguments are accepted here, after Meta's
arguments, so that a call which passes them by keyword runs unchanged too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..fx import Proxy, record_call
from ..interface import clamped_attention
from ..mask import Mask

__all__ = ["delta_hstu_mha", "hstu_mha"]


def hstu_mha(
    max_seq_len: int,
    alpha: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_offsets: Tensor,
    causal: bool = True,
    dropout_pr: float = 0.0,
    training: bool = True,
    num_targets: Tensor | None = None,
    attn_scale: Tensor | None = None,
    max_attn_len: int = 0,
    contextual_seq_len: int = 0,
    min_full_attn_seq_len: int = 0,
    sort_by_length: bool = False,
    kernel: Any = None,
    enable_tma: bool = False,
    attn_func: Tensor | None = None,
    scaling_seqlen: int = -1,
) -> Tensor:
    """Causal HSTU attention over packed sequences (Zhai et al. 2024, arXiv 2402.17152, 3.2).

    Args:
        max_seq_len: longest sequence, in tokens.
        alpha: factor of the scores, before silu.
        q: `(total, heads, D)`, bf16, fp16, fp32 or fp64.
        k: like q.
        v: `(total, heads, Dv)`.
        seq_offsets: `(batch + 1,)` int32 or int64 offsets of the sequences.
        causal: must be True.
        dropout_pr: must be 0.
        training: has no effect, since it only controls dropout.
        num_targets: `(batch,)` candidates, last in each sequence; a candidate sees the history and
            itself. A sequence that was emptied may keep its old number of candidates.
        attn_scale: the scale instead of `1 / scaling_seqlen`: a scalar tensor, or one factor for
            each row, `(total,)`. It gets no gradient and must not require one.
        max_attn_len: how far back a row sees; 0 means everything.
        contextual_seq_len: contextual tokens, first in each sequence; they see everything but the
            candidates. In a sequence with fewer tokens than this before the candidates, each row
            sees only itself.
        min_full_attn_seq_len: with `max_attn_len`, this many tokens at the end of the history, and
            the candidates, see everything before them.
        sort_by_length, kernel, enable_tma: hints about scheduling and the implementation. The
            result does not depend on them: this library chooses both.
        attn_func: an arbitrary mask as FBGEMM defines it, int32 `(1 or heads, n, >= total)` with
            odd `n`: row `i` sees keys `[0, F0) U [F1, F2) U ...` of its sequence, except later
            ones. It replaces the mask of `num_targets` and `contextual_seq_len`, which are then
            ignored, and excludes `max_attn_len`.
        scaling_seqlen: the scale is `1 / scaling_seqlen`; -1 means `max_seq_len`.

    Returns:
        `(total, heads, Dv)` of q's dtype.

    Raises:
        ValueError: for `causal=False`, `dropout_pr > 0`, a negative length, `attn_func` with
            `max_attn_len`, `attn_scale` with `scaling_seqlen`, and as `hstu_attn.hstu_attention`.
    """
    if isinstance(q, Proxy):
        return record_call(hstu_mha, (q,), **locals())
    del training, sort_by_length, kernel, enable_tma
    if not causal:
        raise ValueError("causal: expected True (only causal attention is supported), got False")
    if dropout_pr > 0:
        raise ValueError(f"dropout_pr: expected 0 (dropout is not supported), got {dropout_pr}")
    _check_max_seq_len(max_seq_len)
    if k.shape != q.shape:
        raise ValueError(f"k: expected the shape of q, {tuple(q.shape)}, got {tuple(k.shape)}")
    if v.shape[0] != q.shape[0]:
        raise ValueError(f"v: expected the rows of q, {q.shape[0]}, got {v.shape[0]}")
    if attn_scale is not None and scaling_seqlen != -1:
        raise ValueError(f"scaling_seqlen: expected -1 with attn_scale, got {scaling_seqlen}")
    return clamped_attention(
        q,
        k,
        v,
        cu_seqlens_q=seq_offsets,
        max_seqlen_q=max_seq_len,
        mask=_mask(
            seq_offsets,
            num_targets,
            max_attn_len,
            contextual_seq_len,
            min_full_attn_seq_len,
            attn_func,
        ),
        alpha=alpha,
        scaling_seqlen=scaling_seqlen,
        attn_scale=attn_scale if attn_scale is None else attn_scale.to(torch.float32),
    )


def delta_hstu_mha(
    max_seq_len: int,
    alpha: float,
    delta_q: Tensor,
    k: Tensor,
    v: Tensor,
    seq_offsets: Tensor,
    num_targets: Tensor | None = None,
    max_attn_len: int = 0,
    contextual_seq_len: int = 0,
    kernel: Any = None,
    enable_tma: bool = False,
    scaling_seqlen: int = -1,
    attn_func: Tensor | None = None,
) -> Tensor:
    """Computes `hstu_mha` for the newest rows of each sequence, over all of its keys.

    Args:
        max_seq_len: longest sequence, in tokens.
        alpha: factor of the scores, before silu.
        delta_q: `(batch * delta, heads, D)`: the last `delta` rows of each sequence, candidates
            included. Where a sequence is shorter, the rows in front see nothing and give 0.
        k: `(total, heads, D)`.
        v: `(total, heads, Dv)`.
        seq_offsets: `(batch + 1,)` offsets of the sequences in k and v.
        num_targets, max_attn_len, contextual_seq_len: as for `hstu_mha`.
        kernel, enable_tma: hints that cannot change the result and are not used, as for `hstu_mha`.
        scaling_seqlen: the scale is `1 / scaling_seqlen`; -1 means `max_seq_len`.
        attn_func: as for `hstu_mha`, but `(1 or heads, n, >= batch * delta)`: a column for each row
            of `delta_q`, with the positions of keys in the whole sequence.

    Returns:
        `(batch * delta, heads, Dv)` of delta_q's dtype.

    Raises:
        ValueError: if the rows of `delta_q` are not the same number for every sequence, and as
            `hstu_attn.hstu_attention`.
    """
    if isinstance(delta_q, Proxy):
        return record_call(delta_hstu_mha, (delta_q,), **locals())
    del kernel, enable_tma
    _check_max_seq_len(max_seq_len)
    rows, batch = delta_q.shape[0], seq_offsets.shape[0] - 1
    if batch == 0:
        delta = 0
    elif rows % batch != 0:
        raise ValueError(
            f"delta_q: expected the same number of rows for each of {batch} sequences, got {rows}"
        )
    else:
        delta = rows // batch
    offsets_q = torch.arange(batch + 1, dtype=seq_offsets.dtype, device=seq_offsets.device) * delta
    return clamped_attention(
        delta_q,
        k,
        v,
        cu_seqlens_q=offsets_q,
        max_seqlen_q=delta,
        cu_seqlens_k=seq_offsets,
        max_seqlen_k=max_seq_len,
        mask=_mask(seq_offsets, num_targets, max_attn_len, contextual_seq_len, 0, attn_func),
        alpha=alpha,
        scaling_seqlen=max_seq_len if scaling_seqlen == -1 else scaling_seqlen,
    )


def _check_max_seq_len(max_seq_len: int) -> None:
    if max_seq_len < 1:
        raise ValueError(f"max_seq_len: expected at least 1, got {max_seq_len}")


def _mask(
    seq_offsets: Tensor,
    num_targets: Tensor | None,
    max_attn_len: int,
    contextual_seq_len: int,
    min_full_attn_seq_len: int,
    attn_func: Tensor | None = None,
) -> Mask:
    for name, value in (
        ("max_attn_len", max_attn_len),
        ("contextual_seq_len", contextual_seq_len),
        ("min_full_attn_seq_len", min_full_attn_seq_len),
    ):
        if value < 0:
            raise ValueError(f"{name}: expected 0 or more, got {value}")
    if attn_func is not None:
        if max_attn_len > 0:
            raise ValueError(f"max_attn_len: expected 0 with attn_func, got {max_attn_len}")
        return Mask.from_func(attn_func, causal=True)
    num_contexts = None
    if contextual_seq_len > 0:
        lengths = seq_offsets.diff()
        history = lengths if num_targets is None else lengths - num_targets.clamp(min=0)
        # In a sequence too short for its contextual tokens each row sees only itself, as candidates
        # without a history do.
        complete = history >= contextual_seq_len
        num_contexts = complete.to(lengths.dtype) * contextual_seq_len
        num_targets = torch.where(complete, 0 if num_targets is None else num_targets, lengths)
    return Mask(
        (max_attn_len if max_attn_len > 0 else -1, 0),
        num_contexts,
        num_targets,
        1,
        min_full_attn_seq_len if max_attn_len > 0 else 0,
    )
