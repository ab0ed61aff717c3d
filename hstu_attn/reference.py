"""HSTU attention in plain PyTorch: the reference for every kernel of this library.

It is dense, computes one sequence at a time, is differentiable by plain autograd and runs on any
device. It is written for reading and for comparisons, not for speed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .bias import (
    Bias,
    DenseBias,
    RelativeBias,
    thresholds_tensor,
    time_bucket,
    time_difference,
)
from .call import AttentionCall, bias_tensors
from .mask import Mask, dense_mask, mask_heads
from .paged import PagedKV
from .paged_quantization import dequantize_rows, quantize_for_pages
from .quantization import (
    E4M3,
    Quantization,
    dequantize,
    dequantized_rows,
    quantize_qkv,
    round_weights,
    weight_scales,
)

__all__ = ["hstu_attention"]


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    mask: Mask | None = None,
    bias: Bias | Tensor | None = None,
    alpha: float = 1.0,
    scaling_seqlen: int = -1,
    attn_scale: Tensor | None = None,
    paged_kv: PagedKV | None = None,
    quant_mode: int = -1,
    deterministic: bool = False,
    sm_margin: int = 0,
    quantization: Quantization | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """Computes `hstu_attn.hstu_attention` by definition; it has the same arguments and two more.

    Args:
        compute_dtype: the dtype of every intermediate. None means fp64 for fp64 inputs and fp32 for
            all others. In tests the exact result is this function on inputs cast to fp64, and the
            same-dtype reference is this function with `compute_dtype=q.dtype`.
        scales: `(total_q, heads)`, the factor of each row of the weights before it is rounded to
            e4m3; None means that weights are not rounded.

    Returns:
        `(total_q, heads, Dv)` in q's dtype; where that is float8_e4m3fn, in `compute_dtype`, or
        bf16 if that is None.

    `deterministic` and `sm_margin` are accepted and ignored. With a quantization, tensors must be
    on a CPU, and everything but the casts to e4m3 is computed in `compute_dtype`.
    """
    del deterministic, sm_margin
    if quant_mode != -1:
        quantization = Quantization(quant_mode)
    if q.dtype == E4M3 or quantization is not None:
        arguments = {**locals(), "quant_mode": -1, "quantization": None}
        return _quantized_attention(quantization, arguments)
    mask = Mask.full() if mask is None else mask
    if isinstance(bias, Tensor):
        bias = DenseBias(bias)
    if compute_dtype is None:
        compute_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    offsets_q, offsets_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()

    pieces: list[Tensor] = []
    written = 0
    for b in range(len(offsets_q) - 1):
        begin_q, begin_k = offsets_q[b], offsets_k[b]
        q_len = _length(offsets_q, seqused_q, b)
        k_len = _length(offsets_k, seqused_k, b)
        # With pages, targets are rows of q.
        most_targets = k_len if paged_kv is None else min(k_len, q_len)
        targets = min(_entry(mask.num_targets, b), most_targets)
        queries = q[begin_q : begin_q + q_len].to(compute_dtype)
        if paged_kv is None:
            keys, values = k[begin_k : begin_k + k_len], v[begin_k : begin_k + k_len]
        else:
            keys, values = _paged_keys_values(
                paged_kv, k, v, b, history=k_len - targets, targets=targets, end=begin_q + q_len
            )

        scores = torch.einsum("ihd,jhd->hij", queries, keys.to(compute_dtype))
        if isinstance(bias, DenseBias):
            scores = scores + _dense_bias(bias, b, q_len, k_len, q.shape[1]).to(compute_dtype)
        elif bias is not None and k_len > 0:
            scores = scores + _relative_bias(
                bias, begin_q, begin_k, q_len, k_len, q.shape[1], compute_dtype
            )
        x = alpha * scores
        activated = x * torch.sigmoid(x)
        visible = _visible(mask, q_len, k_len, b, targets, begin_q).to(q.device)
        if scales is not None:
            row_scales = scales[begin_q : begin_q + q_len].t()[..., None]
            activated = round_weights(activated, row_scales.to(compute_dtype))
        weights = torch.where(visible, activated, 0)
        weights = weights * _scale(
            attn_scale, scaling_seqlen, max_seqlen_q, slice(begin_q, begin_q + q_len), compute_dtype
        )
        output = torch.einsum("hij,jhd->ihd", weights, values.to(compute_dtype))

        pieces.append(q.new_zeros((begin_q - written, q.shape[1], v.shape[2])))
        pieces.append(output.to(q.dtype))
        written = begin_q + q_len
    pieces.append(q.new_zeros((q.shape[0] - written, q.shape[1], v.shape[2])))
    return torch.cat(pieces)


def _quantized_attention(quantization: Quantization | None, arguments: dict[str, Any]) -> Tensor:
    """Computes `hstu_attention(**arguments)` of quantized q, k and v, with rounded weights.

    There is no quantization where q, k and v are codes already.
    The gradients are those without a quantization or, with `keep="e4m3"`, those of the quantized q,
    k and v. `backward="e4m3"` changes nothing here, because the reference rounds no gradients.
    """
    q, k, v, bias = (arguments[name] for name in ("q", "k", "v", "bias"))
    cu_seqlens_q, cu_seqlens_k = arguments["cu_seqlens_q"], arguments["cu_seqlens_k"]
    sequences = (
        cu_seqlens_q,
        cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k,
        arguments["seqused_q"],
        arguments["seqused_k"],
    )
    descales = [arguments.pop(f"{name}_descale") for name in "qkv"]
    compute_dtype = arguments["compute_dtype"]
    with torch.no_grad():
        wide = torch.float64 in (compute_dtype, q.dtype)
        dtype = torch.float64 if wide else torch.float32
        biases = bias_tensors(bias)
        if (paged := arguments["paged_kv"]) is not None:
            mask: Mask | None = arguments["mask"]
            call = AttentionCall(
                *(*sequences[:2], 0, 0, *sequences[2:]),
                alpha=arguments["alpha"],
                num_targets=None if mask is None else mask.num_targets,
            )
            values = quantize_for_pages(q, k, v, call, paged.arguments, biases, dtype)
            changes = dict(zip(("q", "k", "v", "scales"), values, strict=True))
        else:
            mode, smooth_k = -1, False
            if quantization is not None:
                mode, smooth_k = quantization.mode, quantization.smooth_k
            x = quantize_qkv(q, k, v, *sequences, mode, smooth_k, *descales)
            inputs = dequantize(x, *sequences, q.shape[2], dtype)
            scales = weight_scales(inputs.score_bound, arguments["alpha"], biases)
            changes = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "scales": scales}
        out = hstu_attention(**{**arguments, **changes})
    if q.dtype == E4M3:
        return out.to(compute_dtype or torch.bfloat16)
    out = out.to(q.dtype)
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))):
        return out
    if quantization is not None and quantization.keep == "e4m3":
        kept = dequantized_rows(x.kept, sequences[1], q.shape[2], dtype)
        for name, of_codes in zip("qkv", kept, strict=True):
            given = arguments[name].to(dtype)
            arguments[name] = given + (of_codes - given).detach()
    plain = hstu_attention(**arguments).to(q.dtype)
    return out + (plain - plain.detach())


def _length(offsets: list[int], seqused: Tensor | None, b: int) -> int:
    length = offsets[b + 1] - offsets[b]
    return length if seqused is None else max(0, min(int(seqused[b]), length))


def _entry(values: Tensor | None, b: int) -> int:
    return 0 if values is None else max(0, int(values[b]))


def _visible(mask: Mask, q_len: int, k_len: int, b: int, targets: int, begin_q: int) -> Tensor:
    """Returns bool `(heads or 1, q_len, k_len)`."""
    return torch.stack(
        [
            dense_mask(
                mask,
                q_len,
                k_len,
                num_contexts=_entry(mask.num_contexts, b),
                num_targets=targets,
                first_row=begin_q,
                head=head,
            )
            for head in range(mask_heads(mask))
        ]
    )


def _scale(
    attn_scale: Tensor | None,
    scaling_seqlen: int,
    max_seqlen_q: int,
    rows: slice,
    compute_dtype: torch.dtype,
) -> Tensor | float:
    if attn_scale is None:
        return 1.0 / (max_seqlen_q if scaling_seqlen == -1 else scaling_seqlen)
    if attn_scale.numel() == 1:
        return attn_scale.to(compute_dtype).reshape(())
    return attn_scale[rows].to(compute_dtype)[:, None]


def _positions(q_len: int, k_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns absolute positions of the rows, as a column, and of the keys, as a row."""
    rows = torch.arange(q_len, device=device) + (k_len - q_len)
    return rows[:, None].clamp(min=0), torch.arange(k_len, device=device)[None, :]


def _dense_bias(bias: DenseBias, b: int, q_len: int, k_len: int, heads: int) -> Tensor:
    rows, columns = _positions(q_len, k_len, bias.rab.device)
    return bias.rab[b][:, rows, columns].repeat_interleave(heads // bias.rab.shape[1], 0)


def _relative_bias(
    bias: RelativeBias,
    begin_q: int,
    begin_k: int,
    q_len: int,
    k_len: int,
    heads: int,
    compute_dtype: torch.dtype,
) -> Tensor:
    """Returns `(heads, q_len, k_len)`."""
    table = bias.pos_weight if bias.pos_weight is not None else bias.ts_weight
    assert table is not None
    rows, columns = _positions(q_len, k_len, table.device)
    total = torch.zeros((heads, q_len, k_len), dtype=compute_dtype, device=table.device)
    if bias.pos_weight is not None:
        reach = bias.pos_weight.shape[1] // 2
        index = (columns - rows).clamp(-reach, reach) + reach
        weights = bias.pos_weight.to(compute_dtype)[:, index]
        total = total + weights.repeat_interleave(heads // weights.shape[0], 0)
    if bias.ts_weight is not None:
        assert bias.timestamps is not None
        times = bias.timestamps[begin_k : begin_k + k_len]
        if bias.row_timestamps is not None:
            row_times = bias.row_timestamps[begin_q : begin_q + q_len]
        else:
            # The time of the event that follows the row; the last event follows itself.
            row_times = torch.cat([times[1:], times[-1:]])[rows[:, 0]]
        thresholds = bias.thresholds
        if thresholds is None:
            thresholds = thresholds_tensor(times.device)
        difference = time_difference(row_times[:, None], times[None, :])
        bucket = time_bucket(difference, thresholds, bias.ts_weight.shape[1])
        weights = bias.ts_weight.to(compute_dtype)[:, bucket]
        total = total + weights.repeat_interleave(heads // weights.shape[0], 0)
    return total


def _paged_keys_values(
    paged: PagedKV, k: Tensor, v: Tensor, b: int, *, history: int, targets: int, end: int
) -> tuple[Tensor, Tensor]:
    """Returns keys and values of the history from the sequence's pages, and targets' from k and v.

    The targets are the last rows before row `end`.
    `last_page_lens` repeats what the lengths already say, so it is not read.
    """
    first, last = int(paged.page_offsets[b]), int(paged.page_offsets[b + 1])
    target_rows = slice(end - targets, end)
    ids = paged.page_ids[first:last].to(torch.int64)
    if paged.kv_scales is None:
        pages = paged.kv_cache[ids]
    else:
        codes = paged.kv_cache.view(torch.uint8)[ids].view(paged.kv_cache.dtype)
        pages = dequantize_rows(codes, paged.kv_scales[ids]).to(k.dtype)
    keys = torch.cat([pages[:, 0].flatten(0, 1)[:history], k[target_rows]])
    values = torch.cat([pages[:, 1].flatten(0, 1)[:history], v[target_rows]])
    return keys, values
