"""Linear maps with e4m3 matrix products, with a scale for each row of both factors.

    z = x W^T + b         x and W have a scale for each row
    dx = dz W             dz has a scale for each row, W one for each column
    dW = dz^T x           a bf16 product: it sums over rows, whose scales differ

Scales are as in quantization.py: the largest finite magnitude over 448. A factor is quantized from
its own dtype, so an fp32 weight is rounded once. Results are bf16, the only dtype for which
`torch._scaled_mm` takes scales of rows; on a CPU it computes the same sums in fp32.

On Hopper GPUs a kernel of this library (csrc/sm90/projection.h) computes two of a layer's maps and
what follows them: `add_linear` adds the residual, and `project` quantizes silu(z) of v, q and k for
attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import ops
from .quantization import E4M3, LARGEST_CODE, SMALLEST_DESCALE, Quantized

__all__ = [
    "MAX_SEQUENCES",
    "Factor",
    "QuantizeRows",
    "add_linear",
    "check_rows",
    "fp8_linear",
    "has_kernel",
    "input_product",
    "product",
    "project",
    "quantize_rows",
]

MAX_SEQUENCES = 1024
"""The most sequences of a batch for `project`: kMaxProjectionSequences."""

MIN_ELEMENTS = 2**23
"""The fewest results of `add_linear`: then each multiprocessor of an H200 has one tile or two."""

Factor = tuple[Tensor, Tensor]
"""Codes and descales of a matrix, as `quantize_rows` returns them."""

QuantizeRows = Callable[[Tensor], Factor]
"""`quantize_rows`, or a kernel for it."""


def quantize_rows(x: Tensor) -> Factor:
    """Quantizes each row of `x` `(rows, width)` to e4m3.

    Returns:
        Codes `(rows, width)` float8_e4m3fn and descales `(rows, 1)` fp32; `codes * descales`
        approximates `x`. NaN and infinity become NaN, and do not affect the scale of their row.
    """
    wide = x.float()
    is_finite = wide.isfinite()
    largest = torch.where(is_finite, wide, 0).abs().amax(1, keepdim=True)
    # NOTE: the divisor is a tensor, because torch might multiply by the rounded reciprocal of a
    # number.
    descales = (largest / torch.full_like(largest, LARGEST_CODE)).clamp(min=SMALLEST_DESCALE)
    scaled = (wide * descales.reciprocal()).clamp(-LARGEST_CODE, LARGEST_CODE)
    return torch.where(is_finite, scaled, torch.nan).to(E4M3), descales


def product(x: Factor, weight: Factor, bias: Tensor | None = None) -> Tensor:
    """Computes `x @ weight.T + bias` of quantized factors, bf16.

    Args:
        x: the result of `quantize_rows` for `(rows, n)`; `n` is a multiple of 16.
        weight: the result of `quantize_rows` for `(columns, n)`; `columns` is a multiple of 16.
        bias: `(columns,)` of any floating dtype.
    """
    (x_codes, x_descales), (codes, descales) = x, weight
    if x_codes.shape[0] == 0:
        return x_descales.new_empty((0, codes.shape[0]), dtype=torch.bfloat16)
    if bias is not None:
        bias = bias.to(torch.bfloat16)
    if x_codes.device.type == "cpu":
        # NOTE: on CPUs with AMX, torch 2.11 takes one scale for each factor only.
        z = x_codes.float() @ codes.float().t() * x_descales * descales.t()
        return (z if bias is None else z + bias).to(torch.bfloat16)
    return torch._scaled_mm(
        x_codes,
        codes.t(),
        x_descales,
        descales.t(),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def input_product(gradient: Tensor, weight: Tensor, quantize: QuantizeRows) -> Tensor:
    """Computes `gradient @ weight`, the gradient of a linear map's input, bf16.

    Args:
        gradient: `(rows, columns)`.
        weight: `(columns, n)`, of any floating dtype.
        quantize: `quantize_rows`, or a kernel for it.
    """
    return product(quantize(gradient), quantize(weight.t().contiguous()))


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def has_kernel(x: Tensor, columns: int) -> bool:
    """Returns whether `add_linear` or `project` can map rows like `x` to `columns` columns.

    For `project` they are the columns of u, of v, of q and of k.
    """
    return (
        x.is_cuda
        and torch._C._dispatch_has_kernel_for_dispatch_key("hstu_attn::linear_fp8", "CUDA")
        and _is_hopper(x.device)
        and x.shape[0] * columns >= MIN_ELEMENTS
        and columns % 256 == 0
    )


def add_linear(x: Factor, weight: Factor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Computes `residual + product(x, weight, bias)`, which is rounded once.

    Args:
        x, weight, bias: as for `product`.
        residual: `(rows, columns)` bf16, contiguous.

    Returns:
        `(rows, columns)` bf16.
    """
    op = torch.ops.hstu_attn.linear_fp8
    return ops.below_autograd(op, *x, *weight, _fp32_bias(bias, weight), residual)  # type: ignore[no-any-return]


def project(
    x: Factor, weight: Factor, bias: Tensor | None, cu_seqlens: Tensor, heads: int, keeps_z: bool
) -> tuple[Tensor, Quantized]:
    """Computes `z = product(x, weight, bias)`, and quantizes SiLU of its columns of v, q and k.

    Args:
        x, weight, bias: as for `product`; the columns are those of u, v, q and k, in this order, as
            many of each.
        cu_seqlens: the offsets of the sequences, int32 or int64 `(batch + 1,)`; at most
            `MAX_SEQUENCES`.
        heads: the number of heads.
        keeps_z: whether z is wanted, not u's columns alone.

    Returns:
        z, bf16 `(rows, columns)` or `(rows, columns / 4)`; and the result of `quantize_qkv` in mode
        2, from SiLU with an absolute error of `2**-12 * abs(z)`. The norms are larger by about 1 %,
        so that a few descales are twice as large; magnitudes above 1e18 may have larger descales.
    """
    op = torch.ops.hstu_attn.project_fp8
    arguments = (*x, *weight, _fp32_bias(bias, weight), cu_seqlens, heads, keeps_z)
    z, q8, k8, v8, *factors = ops.below_autograd(op, *arguments)
    q_descale, k_descale, v_descale, q_norm, k_norm = factors
    none = z.new_empty(0, dtype=torch.float)  # K's mean is not subtracted
    descales, norms = (q_descale, k_descale, v_descale), (q_norm, k_norm)
    return z, Quantized(q8, k8, v8, *descales, *norms, none, none)


def _fp32_bias(bias: Tensor | None, weight: Factor) -> Tensor:
    if bias is None:
        return torch.zeros(weight[0].shape[0], dtype=torch.float, device=weight[0].device)
    bias = bias.detach().to(torch.float).contiguous()
    return bias if bias.data_ptr() % 16 == 0 else bias.clone()


class _Linear(torch.autograd.Function):
    """The linear map, with straight-through gradients for both quantizations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return product(quantize_rows(x), quantize_rows(weight), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            input_product(dz, weight, quantize_rows) if wants_x else None,
            torch.mm(dz.t(), x).to(weight.dtype) if wants_weight else None,
            dz.sum(0, dtype=torch.float).to(ctx.bias_dtype) if wants_bias else None,
        )


def check_rows(x: Tensor) -> None:
    """Raises ValueError for rows that are not bf16."""
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x: expected bfloat16 with FP8 linears, got {x.dtype}")


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes `x @ weight.T + bias` by an e4m3 product, with gradients.

    Args:
        x: `(rows, n)` bf16, or a dtype that autocast casts to bf16.
        weight: `(columns, n)` of any floating dtype.
        bias: `(columns,)` of any floating dtype.

    Returns:
        `(rows, columns)` bf16.

    Raises:
        ValueError: for `x` of another dtype.
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    check_rows(x)
    return cast(Tensor, _Linear.apply(x, weight, bias))
