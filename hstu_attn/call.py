"""The arguments of the attention operator that all layers of a step share, in one object.

`make_call` turns a mask, a batch's offsets and the options of `hstu_attention` into an
`AttentionCall` once; `ops.attention` and its backward take it for every layer. The arguments that
differ from layer to layer are passed separately: q, k, v, the tensors of a bias, and pages.

This module and the classes of mask.py and bias.py check which options may be combined. Only the
operator checks shapes, dtypes, devices and values, in csrc/api/arguments.cpp.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from .bias import Bias, DenseBias, RelativeBias, thresholds_tensor
from .mask import Mask
from .quantization import Quantization

__all__ = [
    "NO_BIAS",
    "NO_DESCALES",
    "NO_TIMES",
    "AttentionCall",
    "BiasTensors",
    "Descales",
    "Times",
    "bias_tensors",
    "bias_times",
    "make_call",
    "mask_of",
    "with_mask",
]

# rab, pos_weight and ts_weight, which get gradients as q, k and v do.
BiasTensors: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]
NO_BIAS: BiasTensors = (None, None, None)

# timestamps, row_timestamps and ts_thresholds.
Times: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]
NO_TIMES: Times = (None, None, None)

# q_descale, k_descale and v_descale.
Descales: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]
NO_DESCALES: Descales = (None, None, None)

_FULL = Mask.full()


class AttentionCall(NamedTuple):
    """The operator's arguments between the tensors of a bias and the pages.

    The fields are arguments of `torch.ops.hstu_attn.hstu_varlen_fwd`, by the names and in the order
    of its schema (csrc/api/arguments.h).

    Attributes:
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
        scaling_seqlen, attn_scale, alpha: as in `hstu_attention`.
        num_contexts, num_targets, target_group_size, min_full_attn_seq_len, row_spans, func: as in
            `Mask`.
        window_left, window_right: the window of `Mask`; with `func_causal`, (-1, 0).
        timestamps, row_timestamps, ts_thresholds: as in `RelativeBias`; one `timestamps` serves the
            tables of all layers.
        quant_mode, smooth_k: as in `Quantization`; -1 means that nothing is quantized.
        q_descale, k_descale, v_descale: as in `hstu_attention`.
        backward_e4m3: whether `Quantization.backward` is "e4m3".
        deterministic, sm_margin: as in `hstu_attention`.
        strict: whether counts and lengths that the kernels clamp are errors where values are
            checked (on a CPU, or with `HSTU_ATTN_CHECK=1`): see `interface.clamped_attention`.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    scaling_seqlen: int = -1
    attn_scale: Tensor | None = None
    alpha: float = 1.0
    num_contexts: Tensor | None = None
    num_targets: Tensor | None = None
    target_group_size: int = 1
    window_left: int = -1
    window_right: int = -1
    min_full_attn_seq_len: int = 0
    row_spans: Tensor | None = None
    func: Tensor | None = None
    timestamps: Tensor | None = None
    row_timestamps: Tensor | None = None
    ts_thresholds: Tensor | None = None
    quant_mode: int = -1
    smooth_k: bool = False
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    backward_e4m3: bool = False
    deterministic: bool = False
    sm_margin: int = 0
    strict: bool = True


def make_call(
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    mask: Mask | None = None,
    times: Times = NO_TIMES,
    alpha: float = 1.0,
    scaling_seqlen: int = -1,
    attn_scale: Tensor | None = None,
    quant_mode: int = -1,
    deterministic: bool = False,
    sm_margin: int = 0,
    strict: bool = True,
    quantization: Quantization | None = None,
    descales: Descales = NO_DESCALES,
    may_keep_e4m3: bool = False,
) -> AttentionCall:
    """Returns the call of a batch, for `ops.attention`.

    Args:
        times: `bias_times` of a bias; unlike its tables, all layers share them.
        strict: see `AttentionCall`.
        descales: `(q_descale, k_descale, v_descale)`.
        may_keep_e4m3: whether the caller supports `quantization.keep="e4m3"`.

    The other arguments are those of `hstu_attention`.

    Raises:
        ValueError: for a mask that is not a `Mask`, a quantization that is not a `Quantization` or
            that is given together with `quant_mode`, or an `attn_scale` that requires a gradient.
        NotImplementedError: for a `quantization.keep` that the caller does not support, or
            `quantization.backward="e4m3"` with lengths that kernels clamp (`strict=False`).
    """
    if mask is None:
        mask = _FULL
    elif not isinstance(mask, Mask):
        raise ValueError(f"mask: expected a Mask or None, got {type(mask).__name__}")
    if attn_scale is not None:
        _check_attn_scale(attn_scale)
    smooth_k = False
    if quantization is not None:
        quant_mode, smooth_k = _check_quantization(quantization, quant_mode)
        if quantization.keep == "e4m3" and not may_keep_e4m3:
            raise NotImplementedError(
                "quantization: only hstu_attention without pages has keep='e4m3'"
            )
        # NOTE: where a sequence has more rows than keys, the kernel's transposed rows begin at its
        # first row, and its tiles at the first row that is a key.
        if quantization.backward == "e4m3" and not strict:
            raise NotImplementedError(
                "quantization: lengths that kernels clamp do not have backward='e4m3'"
            )
    timestamps, row_timestamps, thresholds = times
    q_descale, k_descale, v_descale = descales
    window_left, window_right = mask.window_size
    # NOTE: positional arguments take a third of the time of keyword arguments.
    return AttentionCall(
        cu_seqlens_q,
        cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_q if max_seqlen_k is None else max_seqlen_k,
        seqused_q,
        seqused_k,
        scaling_seqlen,
        attn_scale,
        alpha,
        mask.num_contexts,
        mask.num_targets,
        mask.target_group_size,
        window_left,
        0 if mask.func_causal else window_right,
        mask.min_full_attn_seq_len,
        mask.row_spans,
        mask.func,
        timestamps,
        row_timestamps,
        thresholds,
        quant_mode,
        smooth_k,
        q_descale,
        k_descale,
        v_descale,
        quantization is not None and quantization.backward == "e4m3",
        deterministic or torch.are_deterministic_algorithms_enabled(),
        sm_margin,
        strict,
    )


def mask_of(call: AttentionCall) -> Mask:
    """Returns the mask from which a call was made, with the same tensors."""
    is_arbitrary = call.row_spans is not None or call.func is not None
    return Mask(
        (-1, -1) if is_arbitrary else (call.window_left, call.window_right),
        call.num_contexts,
        call.num_targets,
        call.target_group_size,
        call.min_full_attn_seq_len,
        call.row_spans,
        call.func,
        func_causal=call.func is not None and call.window_right == 0,
    )


def with_mask(call: AttentionCall, mask: Mask) -> AttentionCall:
    """Returns a call with another mask; its other arguments are those of `call`."""
    window_left, window_right = mask.window_size
    return call._replace(
        num_contexts=mask.num_contexts,
        num_targets=mask.num_targets,
        target_group_size=mask.target_group_size,
        window_left=window_left,
        window_right=0 if mask.func_causal else window_right,
        min_full_attn_seq_len=mask.min_full_attn_seq_len,
        row_spans=mask.row_spans,
        func=mask.func,
    )


def bias_tensors(bias: Bias | Tensor | None) -> BiasTensors:
    """Returns `(rab, pos_weight, ts_weight)` of a bias.

    Raises:
        ValueError: if `bias` is not a bias.
    """
    if bias is None:
        return NO_BIAS
    if isinstance(bias, RelativeBias):
        return None, bias.pos_weight, bias.ts_weight
    if isinstance(bias, DenseBias):
        return bias.rab, None, None
    if isinstance(bias, Tensor):
        return bias, None, None
    raise ValueError(
        f"bias: expected a DenseBias, a RelativeBias, a tensor or None, got {type(bias).__name__}"
    )


def bias_times(bias: Bias | Tensor | None) -> Times:
    """Returns `(timestamps, row_timestamps, ts_thresholds)` of a bias, or None for each."""
    if not isinstance(bias, RelativeBias) or bias.ts_weight is None:
        return NO_TIMES
    thresholds = bias.thresholds
    if thresholds is None:
        thresholds = thresholds_tensor(bias.ts_weight.device)
    return bias.timestamps, bias.row_timestamps, thresholds


def _check_quantization(quantization: Quantization, quant_mode: int) -> tuple[int, bool]:
    if not isinstance(quantization, Quantization):
        raise ValueError(
            f"quantization: expected a Quantization or None, got {type(quantization).__name__}"
        )
    if quant_mode != -1:
        raise ValueError(f"quant_mode: expected -1 with quantization, got {quant_mode}")
    return quantization.mode, quantization.smooth_k


def _check_attn_scale(attn_scale: Tensor) -> None:
    if not isinstance(attn_scale, Tensor):
        raise ValueError(f"attn_scale: expected a tensor, got {type(attn_scale).__name__}")
    if attn_scale.requires_grad:
        raise ValueError(
            "attn_scale: expected a tensor that does not require a gradient (it gets none), got "
            "requires_grad=True"
        )
