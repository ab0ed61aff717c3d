"""FP8 attention: its options, and how q, k, v and the weights are quantized by torch's functions.

The CUDA kernels (csrc/quantize/quantize.cu) and `quantize_qkv` give bitwise equal codes and
descales. Every function works for any floating dtype, so that tests can compute in fp64.

A block is 128 keys of one sequence. The offsets alone determine a block's number: the block with
keys `[128 * j, 128 * j + 128)` of sequence `b` has number `cu_seqlens_k[b] // 128 + b + j`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "BLOCK",
    "E4M3",
    "LARGEST_CODE",
    "SMALLEST_DESCALE",
    "Dequantized",
    "Quantization",
    "Quantized",
    "bias_bound",
    "dequantize",
    "dequantized_rows",
    "max_blocks",
    "padded_head_dim",
    "quantize_qkv",
    "round_weights",
    "weight_scales",
]

E4M3 = torch.float8_e4m3fn
BLOCK = 128
_BY_SEQUENCE = 3  # the mode with a scale for each sequence and head

# As in csrc/quantize: rows of q8 and k8 are padded to a multiple of this.
_HEAD_DIM_UNIT = 16
LARGEST_CODE = 448.0
SMALLEST_DESCALE = 2.0**-60
_NORM_MARGIN = 1 + 2.0**-12
# kNormLimit and kRounding of csrc/quantize/codes.h.
_NORM_LIMIT = 225.0
_ROUNDING = 17 / 16
# Within a block, the CUDA kernel adds rows 16 apart first, and then these sums.
_ROWS_AT_ONCE = 16


@dataclass(frozen=True)
class Quantization:
    """The way in which `hstu_attention` quantizes q, k and v to e4m3.

    Attributes:
        mode: the granularity of the scales: 0 has no scales, 1 has one per row of q and per block
            of 128 keys of k and v, 2 per block of 128 rows of a head, 3 per sequence and head, 4
            per sequence, and 5 per tensor. Use 2: it takes one pass. With pages, use 1; each row of
            k and v in pages has a scale. In mode 5 a huge value in one sequence costs all other
            sequences precision; NaN and infinity never leave their sequence.
        smooth_k: whether the mean of k over each sequence and head is subtracted before k is
            quantized; its product with q is then added to the scores in fp32. Where k is not
            centered, as after SiLU, this halves the error.
        keep: what a call saves for its backward: "inputs" saves q, k and v, and the gradients are
            those without quantization; "e4m3" saves the quantized tensors in half the memory, and
            the gradients are those at the dequantized values.
        backward: "16-bit", or "e4m3", which is experimental: q, k, v and the gradient of the output
            are quantized for the backward, with one scale for each sequence and head, and so are
            the weights and the gradients of scores. Rows of the gradient of the output also have
            scales of their own, so that the gradients of small rows of q are as accurate as those
            of large ones. On a GPU, for head dims from 65 on without a bias.
    """

    mode: int = 2
    smooth_k: bool = False
    keep: str = "inputs"
    backward: str = "16-bit"

    def __post_init__(self) -> None:
        if self.mode not in range(6):
            raise ValueError(f"mode: expected a number from 0 to 5, got {self.mode!r}")
        if self.keep not in ("inputs", "e4m3"):
            raise ValueError(f"keep: expected 'inputs' or 'e4m3', got {self.keep!r}")
        if self.backward not in ("16-bit", "e4m3"):
            raise ValueError(f"backward: expected '16-bit' or 'e4m3', got {self.backward!r}")


class Quantized(NamedTuple):
    """The result of `torch.ops.hstu_attn.quantize_qkv`.

    A value is approximately its code times its descale. `blocks` is `total_k // 128 + batch`.
    Elements outside the rows and blocks of sequences are zero on a CPU and undefined on a GPU.

    Attributes:
        q8: float8_e4m3fn `(total_q, heads, D)`, with D rounded up to a multiple of 16; the elements
            beyond D are 0.
        k8: `(total_k, heads, D)`, likewise.
        v8: `(blocks, heads, Dv, 128)`: blocks of 128 keys, transposed, in the order in which the
            accumulator of S holds keys (csrc/quantize/quantize.h); 0 past the end of a sequence.
        q_descale: fp32 `(heads, total_q)`.
        k_descale, v_descale: fp32 `(heads, blocks)`.
        q_norm: `(heads, total_q)`: an upper bound of the Euclidean norm of each dequantized row of
            q8; NaN counts as 0.
        k_norm: `(heads, blocks)`: the largest such bound of the rows of k8 in a block.
        q_mean_product: `(heads, total_q)`: with `smooth_k`, rows of q times the mean that was
            subtracted from K, to be added to the scores; else `(0,)`.
        k_mean: `(batch, heads, D)`: with `smooth_k`, that mean; else `(0,)`.
    """

    q8: Tensor
    k8: Tensor
    v8: Tensor
    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor
    q_norm: Tensor
    k_norm: Tensor
    q_mean_product: Tensor
    k_mean: Tensor

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """Returns the fields that `dequantized_rows` needs."""
        codes = (self.q8, self.k8, self.v8)
        return *codes, self.q_descale, self.k_descale, self.v_descale, self.k_mean


def max_blocks(rows: int, batch: int) -> int:
    """Returns the number of blocks that `batch` sequences with `rows` keys may have."""
    return rows // BLOCK + batch


def padded_head_dim(head_dim: int) -> int:
    """Returns the last dimension of q8 and k8."""
    return -(-head_dim // _HEAD_DIM_UNIT) * _HEAD_DIM_UNIT


class _Rows:
    """The rows of a packed tensor that belong to sequences.

    Attributes:
        row: the index of each row in the tensor.
        sequence: the sequence of each row.
        block: the block of each row.
        slot: the place of each row in its block.
        lengths: the number of rows of each sequence.
        first_block: the number of the first block of each sequence.
    """

    def __init__(self, offsets: Tensor, used: Tensor | None, total: int) -> None:
        offsets = offsets.to(torch.int64).clamp(0, total)
        begin = offsets[:-1]
        lengths = (offsets[1:] - begin).clamp(min=0)
        if used is not None:
            lengths = lengths.minimum(used.to(torch.int64).clamp(min=0))
        batch = lengths.shape[0]
        self.lengths, self.num_blocks = lengths, max_blocks(total, batch)
        self.sequence = torch.repeat_interleave(torch.arange(batch), lengths)
        first = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        position = torch.arange(self.sequence.shape[0]) - first
        self.row = begin[self.sequence] + position
        self.first_block = begin // BLOCK + torch.arange(batch)
        self.block = self.first_block[self.sequence] + position // BLOCK
        self.slot = position % BLOCK


def _slot_positions(slots: Tensor) -> Tensor:
    """Returns where v8 has the keys of a block: the inverse of `key_at` in C++."""
    within = slots % 16
    return slots - within + within % 8 // 2 * 4 + within // 8 * 2 + within % 2


# ---------------------------------------------------------------------------------------------
# q, k and v
# ---------------------------------------------------------------------------------------------


def quantize_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    mode: int,
    smooth_k: bool,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    silu: bool = False,
) -> Quantized:
    """Computes `torch.ops.hstu_attn.quantize_qkv`, which also checks the arguments.

    Codes are `x / descale`, rounded to nearest with ties to even; NaN and infinity become NaN. A
    descale is the largest finite magnitude of the values that share it, divided by 448, and at
    least 2^-60. In modes 1 and 2, the descales of q and k are then multiplied by the smallest of
    2, 4, ..., 32 for which each row divided by its descale has a Euclidean norm of at most 225,
    computed with squares rounded up to integers. Then codes have norms of at most 240, so that
    products of q and k fit into fp16.

    Args:
        q, k, v: `(total, heads, head dim)`: bf16 or fp16 to quantize, or float8_e4m3fn, whose codes
            are kept.
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: as in `hstu_attention`.
        mode, smooth_k: as in `Quantization`; mode -1 if q, k and v are float8_e4m3fn.
        q_descale, k_descale, v_descale: descales of float8_e4m3fn q, k and v: fp32, `()`, `(1,)`,
            `(batch,)`, `(batch, heads)` or `(heads, blocks)`; also `(heads, total_q)` for q.
        silu: whether to quantize SiLU of q, k and v, computed in fp32 and rounded to their dtype. A
            GPU approximates SiLU, so that codes may differ from those of a CPU.
    """
    if silu:
        q, k, v = (F.silu(x.float()).to(x.dtype) for x in (q, k, v))
    q_rows = _Rows(cu_seqlens_q, seqused_q, q.shape[0])
    k_rows = _Rows(cu_seqlens_k, seqused_k, k.shape[0])
    mean = _mean_by_sequence(k, k_rows) if smooth_k else None
    q_mean_product = torch.empty(0)
    if mean is not None:
        # Infinities become NaN, as in the codes of their rows.
        rows = q[q_rows.row].float().nan_to_num(torch.nan, torch.nan, torch.nan)
        product = (rows * mean[q_rows.sequence]).sum(-1)
        q_mean_product = _scatter(product, q_rows.row, q.shape[0]).t()
    limits_norms = mode in (1, 2)
    q_codes, q_scales, q_norms = _quantize(q, q_rows, mode, limits_norms, None, q_descale)
    block_mode = 2 if mode == 1 else mode
    k_codes, k_scales, k_norms = _quantize(k, k_rows, block_mode, limits_norms, mean, k_descale)
    v_codes, v_scales, _ = _quantize(v, k_rows, block_mode, False, None, v_descale)
    blocks = k_rows.num_blocks
    v8 = torch.zeros((blocks, BLOCK, *v.shape[1:]), dtype=torch.uint8)
    v8[k_rows.block, _slot_positions(k_rows.slot)] = v_codes.view(torch.uint8)
    return Quantized(
        _pad(q_codes, q_rows.row, q.shape[0]),
        _pad(k_codes, k_rows.row, k.shape[0]),
        v8.permute(0, 2, 3, 1).contiguous().view(E4M3),
        _scatter(q_scales, q_rows.row, q.shape[0]).t().contiguous(),
        _scatter(k_scales, k_rows.block, blocks).t().contiguous(),
        _scatter(v_scales, k_rows.block, blocks).t().contiguous(),
        _scatter(q_norms, q_rows.row, q.shape[0]).t().contiguous(),
        _largest(k_norms, k_rows.block, blocks).t().contiguous(),
        q_mean_product.contiguous(),
        torch.empty(0) if mean is None else mean,
    )


def _mean_by_sequence(k: Tensor, rows: _Rows) -> Tensor:
    """Returns fp32 `(batch, heads, D)`, added in the order of the CUDA kernel.

    NaN and infinity count as 0.
    """
    values = k[rows.row].float()
    values = torch.where(values.isfinite(), values, 0)
    padded = values.new_zeros((rows.num_blocks, BLOCK, *k.shape[1:]))
    padded[rows.block, rows.slot] = values
    steps = padded.unflatten(1, (-1, _ROWS_AT_ONCE))
    by_row = reduce(torch.add, steps.unbind(1))
    by_block = reduce(torch.add, by_row.unbind(1))
    mean = values.new_zeros((rows.lengths.shape[0], *k.shape[1:]))
    first_blocks = rows.first_block.tolist()
    for b, length in enumerate(rows.lengths.tolist()):
        if length == 0:
            continue
        first = first_blocks[b]
        sums = by_block[first : first + -(-length // BLOCK)]
        nothing = torch.zeros_like(sums[0])
        even, odd = (reduce(torch.add, part.unbind(0), nothing) for part in (sums[::2], sums[1::2]))
        mean[b] = (even + odd) / torch.full_like(even, length)
    return mean


def _quantize(
    x: Tensor,
    rows: _Rows,
    mode: int,
    limits_norms: bool,
    mean: Tensor | None,
    given: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns codes `(rows, heads, head dim)`, descales and bounds of norms `(rows, heads)`."""
    if given is not None:
        codes = x.view(torch.uint8)[rows.row].view(E4M3)
        scales = _expand_descale(given, rows, x.shape)
        return codes, scales, _norm(codes, scales)
    values = x[rows.row].float()
    if mean is not None:
        values = values - mean[rows.sequence]
    is_finite = values.isfinite()
    largest = torch.where(is_finite, values, 0).abs().amax(-1)
    scales = _descales(largest, rows, mode)
    if not limits_norms:
        codes = _to_codes(values, scales)
        return codes, scales, _norm(codes, scales)
    scaled = torch.where(is_finite, values, 0) * (scales * 2).reciprocal()[..., None]
    # NOTE: fp64 has the squares exactly, and integers below 2^24 have one sum in every order.
    sums = scaled.double().square().ceil().sum(-1).float()
    norms = sums.sqrt() * (scales * 2) * _ROUNDING
    if mode == 2:
        sums = _largest(sums, rows.block, rows.num_blocks)[rows.block]
    scales = scales * _growth_of_descales(sums)
    return _to_codes(values, scales), scales, norms


def _to_codes(values: Tensor, scales: Tensor) -> Tensor:
    scaled = (values * scales.reciprocal()[..., None]).clamp(-LARGEST_CODE, LARGEST_CODE)
    return torch.where(values.isfinite(), scaled, torch.nan).to(E4M3)


def _growth_of_descales(squares: Tensor) -> Tensor:
    """Returns the least powers of two, from 2 to 32, that make norms of rows at most 225.

    Args:
        squares: for each row, the sum of the squares of `x / (2 * descale)`, each square rounded up
            to an integer; in mode 2, the largest of these sums in the row's block.
    """
    growth = torch.full_like(squares, 2)
    for n in range(4):
        growth = torch.where(squares > _NORM_LIMIT**2 * 4**n, growth * 2, growth)
    return growth


def _descales(largest: Tensor, rows: _Rows, mode: int) -> Tensor:
    """Returns the descale of each row and head, given its largest magnitude."""
    if mode == 0 or largest.numel() == 0:
        return torch.ones_like(largest)
    if mode > 1:
        group = rows.block if mode == 2 else rows.sequence
        if mode == 5:
            group = torch.zeros_like(group)
        of_group = _largest(largest, group, int(group.max()) + 1)
        if mode > 3:
            of_group = of_group.amax(1, keepdim=True).expand_as(of_group)
        largest = of_group[group]
    # NOTE: the divisor is a tensor, because torch might multiply by the rounded reciprocal of a
    # number.
    scales = largest / torch.full_like(largest, LARGEST_CODE)
    return scales.clamp(min=SMALLEST_DESCALE)


def _expand_descale(given: Tensor, rows: _Rows, shape: Sequence[int]) -> Tensor:
    """Returns the given descale of each row and head."""
    total, heads = shape[0], shape[1]
    batch = rows.lengths.shape[0]
    if given.numel() == 1:
        return given.reshape(1, 1).expand(rows.row.shape[0], heads)
    if given.dim() == 1:
        return given[rows.sequence][:, None].expand(-1, heads)
    if given.shape == (batch, heads):
        return given[rows.sequence]
    return given.t()[rows.row if given.shape[1] == total else rows.block]


def _norm(codes: Tensor, scales: Tensor) -> Tensor:
    squares = codes.float().nan_to_num(0).square().sum(-1)
    return squares.sqrt() * scales * _NORM_MARGIN


def _largest(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Returns `(groups, heads)`: the largest of the `(rows, heads)` of each group, at least 0."""
    result = values.new_zeros((groups, values.shape[1]))
    return result.scatter_reduce_(0, group[:, None].expand_as(values), values, "amax")


def _scatter(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Returns `(size, ...)` with `values` at `index`. Equal indices must have equal values."""
    result = values.new_zeros((size, *values.shape[1:]))
    result[index] = values
    return result


def _pad(codes: Tensor, rows: Tensor, total: int) -> Tensor:
    """Returns `(total, heads, padded head dim)` with `codes` in `rows`."""
    head_dim = codes.shape[2]
    shape = (total, codes.shape[1], padded_head_dim(head_dim))
    result = torch.zeros(shape, dtype=torch.uint8)
    result[rows, :, :head_dim] = codes.view(torch.uint8)
    return result.view(E4M3)


# ---------------------------------------------------------------------------------------------
# The inputs that attention computes with
# ---------------------------------------------------------------------------------------------


class Dequantized(NamedTuple):
    """Dequantized q, k and v, and a bound of the scores of each row.

    Attributes:
        q: `(total_q, heads, D + 1)`: the last element is `q_mean_product`, or 0.
        k: `(total_k, heads, D + 1)`: the last element is 1.
        v: `(total_k, heads, Dv)`.
        score_bound: `(total_q, heads)`: the largest magnitude that `q . k` of the row can have.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    score_bound: Tensor


def dequantize(
    x: Quantized,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
) -> Dequantized:
    """Dequantizes `x` to `dtype`; rows outside every sequence are 0.

    Args:
        x: quantized q, k and v.
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: the arguments of their quantization.
        head_dim: D.
        dtype: fp64 holds the values exactly.
    """
    q_rows = _Rows(cu_seqlens_q, seqused_q, x.q8.shape[0])
    k_rows = _Rows(cu_seqlens_k, seqused_k, x.k8.shape[0])
    total_q, total_k = x.q8.shape[0], x.k8.shape[0]

    def values(codes: Tensor, rows: _Rows, scales: Tensor, total: int) -> Tensor:
        return _scatter(codes.to(dtype) * scales.to(dtype)[..., None], rows.row, total)

    def rows_of(codes: Tensor, rows: _Rows) -> Tensor:
        return codes.view(torch.uint8)[rows.row, :, :head_dim].view(E4M3)

    smooth = x.q_mean_product.numel() > 0
    product = x.q_mean_product.t() if smooth else torch.zeros_like(x.q_norm.t())
    q = values(rows_of(x.q8, q_rows), q_rows, x.q_descale.t()[q_rows.row], total_q)
    k = values(rows_of(x.k8, k_rows), k_rows, x.k_descale.t()[k_rows.block], total_k)
    slots = x.v8.view(torch.uint8).permute(0, 3, 1, 2)
    v_codes = slots[k_rows.block, _slot_positions(k_rows.slot)].contiguous().view(E4M3)
    v = values(v_codes, k_rows, x.v_descale.t()[k_rows.block], total_k)

    k_norms = x.k_norm.t()[k_rows.block]
    largest = _largest(k_norms, k_rows.sequence, k_rows.lengths.shape[0])
    bound = (x.q_norm.t()[q_rows.row] * largest[q_rows.sequence]) + product[q_rows.row].abs()
    one = torch.ones((total_k, k.shape[1], 1), dtype=dtype)
    return Dequantized(
        torch.cat([q, product[..., None].to(dtype)], -1),
        torch.cat([k, one], -1),
        v,
        _scatter(bound, q_rows.row, total_q),
    )


def dequantized_rows(
    kept: Sequence[Tensor], cu_seqlens_k: Tensor, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dequantized q, k (with its mean) and v, rounded to `dtype`.

    Nothing is copied to the host. Rows outside every sequence are undefined.

    Args:
        kept: `Quantized.kept`.
        cu_seqlens_k: `(batch + 1,)`, the offsets used in the quantization.
        head_dim: D.
        dtype: bf16, fp16 or wider, so that it holds every code.
    """
    q8, k8, v8, q_descale, k_descale, v_descale, k_mean = kept
    q = q8[..., :head_dim].to(dtype).mul_(q_descale.t()[..., None])
    if cu_seqlens_k.shape[0] < 2:
        return q, k8[..., :head_dim].to(dtype), q.new_zeros((*k8.shape[:2], v8.shape[2]))
    rows = torch.arange(k8.shape[0], device=k8.device)
    # NOTE: torch.compile of torch 2.11 fails for searchsorted in a slice, such as begin[:-1].
    begin = cu_seqlens_k.to(torch.int64)
    sequence = torch.searchsorted(begin, rows, right=True) - 1
    sequence = sequence.clamp(0, begin.shape[0] - 2)
    position = (rows - begin[sequence]).clamp(min=0)
    block = begin[sequence] // BLOCK + sequence + position // BLOCK
    block = block.clamp(0, v8.shape[0] - 1)

    k_factor = k_descale.t()[block][..., None]
    if k_mean.numel() == 0:
        k = k8[..., :head_dim].to(dtype).mul_(k_factor)
    else:
        k = torch.addcmul(k_mean[sequence], k8[..., :head_dim].float(), k_factor).to(dtype)
    codes = v8.view(torch.uint8).permute(0, 3, 1, 2)[block, _slot_positions(position % BLOCK)]
    v = codes.contiguous().view(E4M3).to(dtype).mul_(v_descale.t()[block][..., None])
    return q, k, v


def weight_scales(
    score_bound: Tensor, alpha: float, biases: Sequence[Tensor | None] = ()
) -> Tensor:
    """Returns the powers of two by which rows of the weights are multiplied before their cast.

    Weights are silu of the scores, so their magnitude is at most that of the scores. The scale is
    the largest power of two that keeps this bound within e4m3's range, so that weights neither
    overflow nor vanish.

    Args:
        score_bound: `Dequantized.score_bound`.
        alpha: as in `hstu_attention`.
        biases: what is added to the scores. Each adds the largest `alpha * bias` to the bound or,
            since silu is at least -0.2785, the largest `-alpha * bias` up to 0.2785: a bias of
            -1e9, which hides a key, costs weights no precision.
    """
    bound = abs(alpha) * score_bound.float() + bias_bound(alpha, biases)
    exponent = torch.frexp(LARGEST_CODE / bound).exponent - 1
    scales = torch.ldexp(torch.ones_like(bound), exponent).clamp(2.0**-90, 2.0**46)
    return torch.where(bound.isfinite(), torch.where(bound > 0, scales, 2.0**46), 1)


def bias_bound(alpha: float, biases: Sequence[Tensor | None]) -> float:
    """Returns how much biases raise the bound of silu of the scores; see `weight_scales`."""
    bound = 0.0
    for bias in biases:
        if bias is not None and bias.numel() > 0:
            added = alpha * bias.detach().float().nan_to_num(0, 0, 0)
            bound += max(float(added.max()), min(float(-added.min()), 0.2785), 0.0)
    return bound


def round_weights(weights: Tensor, scales: Tensor) -> Tensor:
    """Returns weights as e4m3 represents them with the scale of each row, in their dtype."""
    scaled = (weights * scales).clamp(-LARGEST_CODE, LARGEST_CODE)
    return scaled.to(E4M3).to(weights.dtype) / scales


class BackwardInputs(NamedTuple):
    """The dequantized inputs of the backward in e4m3, in fp32. Rows outside every sequence are 0.

    Attributes:
        q: `(total_q, heads, D)`, the dequantized q.
        k: `(total_k, heads, D)`, likewise.
        v: `(total_k, heads, Dv)`, likewise.
        dout: `(total_q, heads, Dv)`, likewise, with a scale for each row and head.
        q_columns: q for the gradient of k. Rows are multiplied by the power of two of dout's row
            before their cast, and divided by it after it.
        dout_columns: dout for the gradient of v, with one scale for a sequence and head.
        weight_scales: `(total_q, heads)`: powers of two that weights are multiplied by before their
            cast.
        score_scales: `(total_q, heads)`: likewise for the gradients of scores, without alpha and
            the scale of the weights.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    q_columns: Tensor
    dout_columns: Tensor
    weight_scales: Tensor
    score_scales: Tensor


def quantize_for_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    sequences: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    alpha: float,
    biases: Sequence[Tensor | None] = (),
) -> BackwardInputs:
    """Quantizes the inputs of the backward in e4m3 as csrc/sm90/backward_e4m3_factors.h says.

    Args:
        q, k, v, dout: bf16 or fp16, on a CPU.
        sequences: `cu_seqlens_q`, `cu_seqlens_k`, `seqused_q` and `seqused_k`.
        alpha: as in `hstu_attention`.
        biases: what is added to the scores.
    """
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = sequences
    of_q_and_k = quantize_qkv(q, k, k, *sequences, _BY_SEQUENCE, False)
    of_dout_and_v = quantize_qkv(dout, v, v, *sequences, _BY_SEQUENCE, False)
    values = dequantize(of_q_and_k, *sequences, q.shape[2])
    outer = dequantize(of_dout_and_v, *sequences, v.shape[2])
    rows = _Rows(cu_seqlens_q, seqused_q, q.shape[0])
    block = _Rows(cu_seqlens_k, seqused_k, k.shape[0]).first_block[rows.sequence]
    # The kernel's sums have as many terms as its tiles have columns.
    terms = 128 if max(q.shape[2], v.shape[2]) <= 128 else 256

    def descale(x: Quantized) -> Tensor:
        return x.q_descale.t()[rows.row] * x.k_descale.t()[block]

    def cast(x: Tensor, scales: Tensor, row_scales: Tensor) -> Tensor:
        codes = _to_codes(x[rows.row].float() * row_scales[..., None], scales)
        # NOTE: the quotient of the scales might be infinite.
        values = codes.float() * scales[..., None] / row_scales[..., None]
        return _scatter(values, rows.row, x.shape[0])

    of_dout, of_q = (x.q_descale.t()[rows.row] for x in (of_dout_and_v, of_q_and_k))
    row_scales = _row_scales(dout[rows.row].float(), of_dout)
    scores = weight_scales(descale(of_q_and_k) * (terms * LARGEST_CODE**2), alpha, biases)
    # NOTE: a sequence without keys has no descale.
    gradients = 1 / (descale(of_dout_and_v) * (512 * terms)).clamp(min=SMALLEST_DESCALE)
    gradients = gradients / row_scales
    return BackwardInputs(
        values.q[..., :-1],
        values.k[..., :-1],
        outer.v,
        cast(dout, of_dout, 1 / row_scales),
        cast(q, of_q, row_scales),
        outer.q[..., :-1],
        _scatter(scores, rows.row, q.shape[0]),
        _scatter(gradients, rows.row, q.shape[0]),
    )


def _row_scales(x: Tensor, descales: Tensor) -> Tensor:
    """Returns the least powers of two by which the descales of rows can be multiplied.

    Args:
        x: `(rows, heads, head dim)`.
        descales: `(rows, heads)`, not less than x needs.
    """
    largest = torch.where(x.isfinite(), x, 0).abs().amax(-1)
    needed = (largest / torch.full_like(largest, LARGEST_CODE)).clamp(min=SMALLEST_DESCALE)
    mantissa, exponent = torch.frexp((needed / descales).clamp(min=2.0**-40))
    return torch.ldexp(torch.ones_like(needed), exponent - (mantissa == 0.5).int())
