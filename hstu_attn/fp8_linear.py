"""Linear maps with e4m3 matrix products, with a scale for each row of both factors.

    z = x W^T + b         x and W have a scale for each row
    dx = dz W             dz has a scale for each row, W one for each column
    dW = dz^T x           a bf16 product: it sums over rows, whose scales differ

Scales are as in quantization.py: the largest finite magnitude over 448. A factor is quantized from
its own dtype, so an fp32 weight is rounded once. Results are bf16, the only dtype for which
`torch._scaled_mm` takes scales of rows; on a CPU it computes the same sums in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .quantization import E4M3, LARGEST_CODE, SMALLEST_DESCALE

__all__ = [
    "Factor",
    "QuantizeRows",
    "check_rows",
    "fp8_linear",
    "input_product",
    "product",
    "quantize_rows",
]

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
    return torch._scaled_mm(
        x_codes,
        codes.t(),
        x_descales,
        descales.t(),
        bias=None if bias is None else bias.to(torch.bfloat16),
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
