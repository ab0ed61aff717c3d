"""Quantization of rows for float8_e4m3fn pages, and of the inputs of FP8 attention over pages.

The CUDA kernels are in csrc/paged/append.cu and csrc/quantize/paged.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .call import AttentionCall
from .quantization import E4M3, LARGEST_CODE, SMALLEST_DESCALE, bias_bound

__all__ = ["PagedInputs", "dequantize_rows", "quantize_for_pages", "quantize_rows"]

# kPagedWeightScale of csrc/sm90/e4m3_pages.h: for head dims up to 128, and for larger head dims.
_WEIGHT_SCALES = (2.0**-5, 2.0**-6)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes rows as `append_paged_kv` does for a float8_e4m3fn cache.

    Returns the elements of rows `(..., head dim)`, and a float32 scale `(...)` of each row.
    """
    scales = _largest(x)
    scales = torch.where(scales > 0, scales, 1)
    return _to_codes(x.float() / scales[..., None]), scales


def dequantize_rows(elements: Tensor, scales: Tensor) -> Tensor:
    """Returns float64 `(..., head dim)`: the exact values that `quantize_rows` has stored."""
    return elements.to(torch.float64) * scales.to(torch.float64)[..., None]


class PagedInputs(NamedTuple):
    """The values with which FP8 attention over pages computes, and how it rounds weights.

    Attributes:
        q, k, v: `(total_q, heads, D)`: the dequantized rows.
        weight_scales: `(total_q, heads)`: the factors by which rows of the weights are multiplied
            before they are rounded to e4m3.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    weight_scales: Tensor


def quantize_for_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    pages: Sequence[Tensor | None],
    biases: Sequence[Tensor | None] = (),
    dtype: torch.dtype = torch.float32,
) -> PagedInputs:
    """Quantizes q, k and v of a call with float8_e4m3fn pages, and returns dequantized rows.

    Rows of k and v are quantized as in `append_paged_kv`. Rows of q are divided by their Euclidean
    norm, so that products with rows of pages fit into fp16.

    Args:
        q, k, v: `(total_q, heads, D)`, bf16 or fp16, on a CPU.
        call: the arguments of the call.
        pages: `PagedKV.arguments`, with scales.
        biases: the biases that are added to the scores.
        dtype: the dtype of the result; fp64 holds the values exactly.
    """
    rows = torch.where(q.isfinite(), q, 0).double()
    q_scales = rows.square().sum(-1).sqrt().float().clamp(min=SMALLEST_DESCALE)
    k_scales, v_scales = (_largest(x).clamp(min=SMALLEST_DESCALE) for x in (k, v))
    q_codes, k_codes, v_codes = (
        _to_codes(x.float() * scales.reciprocal()[..., None])
        for x, scales in ((q, q_scales), (k, k_scales), (v, v_scales))
    )
    largest = _largest_key_scales(_needed(k_scales, k_codes), call, pages)
    # The attention weight that code 1 represents.
    unit = abs(call.alpha) / 2 * q_scales * largest / _WEIGHT_SCALES[q.shape[2] > 128]
    unit = unit + bias_bound(call.alpha, biases) / LARGEST_CODE

    def values(codes: Tensor, scales: Tensor) -> Tensor:
        return codes.to(dtype) * scales.to(dtype)[..., None]

    return PagedInputs(
        values(q_codes, q_scales),
        values(k_codes, k_scales),
        values(v_codes, v_scales),
        torch.where(unit > 0, 1 / unit, 1),
    )


def _largest(x: Tensor) -> Tensor:
    """Returns the largest finite magnitude of each row divided by that of e4m3."""
    x = x.float()
    largest = torch.where(x.isfinite(), x, 0).abs().amax(-1)
    # NOTE: the divisor is a tensor, because torch on a GPU would multiply by the rounded reciprocal
    # of a number.
    return largest / torch.full_like(largest, LARGEST_CODE)


def _to_codes(x: Tensor) -> Tensor:
    """Rounds numbers to e4m3; NaN and infinity become NaN."""
    codes = x.clamp(-LARGEST_CODE, LARGEST_CODE)
    return torch.where(x.isfinite(), codes, torch.nan).to(E4M3)


def _needed(scales: Tensor, codes: Tensor) -> Tensor:
    """Returns the scales, but 0 for rows without a nonzero number and for non-finite scales."""
    magnitudes = codes.view(torch.uint8) & 0x7F
    has_number = ((magnitudes > 0) & (magnitudes < 0x7F)).any(-1)
    return torch.where(has_number & scales.isfinite(), scales, 0)


def _largest_key_scales(
    k_scales: Tensor, call: AttentionCall, pages: Sequence[Tensor | None]
) -> Tensor:
    """Returns `(total_q, heads)`: for each row, the largest scale of its sequence's keys."""
    kv_cache, page_offsets, page_ids, _, kv_scales = pages
    assert kv_cache is not None
    assert page_offsets is not None
    assert page_ids is not None
    assert kv_scales is not None
    result = torch.zeros_like(k_scales)
    q_offsets, k_offsets = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()
    counts = [0] * len(q_offsets) if call.num_targets is None else call.num_targets.tolist()
    for b in range(len(q_offsets) - 1):
        q_len = _length(q_offsets, call.seqused_q, b)
        k_len = _length(k_offsets, call.seqused_k, b)
        targets = max(min(counts[b], q_len, k_len), 0)
        end = q_offsets[b] + q_len
        ids = page_ids[int(page_offsets[b]) : int(page_offsets[b + 1])].to(torch.int64)
        codes = kv_cache.view(torch.uint8)[ids][:, 0]
        history = _needed(kv_scales[ids][:, 0], codes).flatten(0, 1)[: k_len - targets]
        of_keys = torch.cat([history, k_scales[end - targets : end]])
        if of_keys.shape[0] > 0:
            result[q_offsets[b] : end] = of_keys.amax(0)
    return result


def _length(offsets: list[int], used: Tensor | None, b: int) -> int:
    length = max(offsets[b + 1] - offsets[b], 0)
    return length if used is None else max(0, min(int(used[b]), length))
