"""A layer's steps in plain torch: the definition, for any device and any width.

steps.py says what the tensors are. The gradients of parameters come in the dtype of the sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..fp8_linear import Factor, quantize_rows
from .options import PHILOX_ROUNDS, GateOptions, dropout_threshold

__all__ = [
    "activation_backward",
    "gate",
    "gate_backward",
    "kept_elements",
    "layer_norm",
    "layer_norm_backward",
    "quantize_rows",
    "quantized_gate",
    "quantized_layer_norm",
    "silu",
]


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype


# ---------------------------------------------------------------------------------------------
# Layer norm
# ---------------------------------------------------------------------------------------------


def _normalized(x: Tensor, eps: float, centered: bool) -> tuple[Tensor, Tensor]:
    """Returns rows of mean 0 and variance 1, and each row's factor, in the dtype of the sums.

    Without `centered` the rows keep their mean and have a mean square of 1.
    """
    wide = x.to(_sum_dtype(x)).contiguous()
    if centered:
        wide = wide - wide.mean(dim=-1, keepdim=True)
    factor = (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return wide * factor, factor


def _normalized_backward(dunit: Tensor, unit: Tensor, factor: Tensor, centered: bool) -> Tensor:
    along = unit * (dunit * unit).mean(dim=-1, keepdim=True)
    if centered:
        dunit = dunit - dunit.mean(dim=-1, keepdim=True)
    return factor * (dunit - along)


def _affine(unit: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        unit = unit * weight.to(unit.dtype)
    return unit if bias is None else unit + bias.to(unit.dtype)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool = True
) -> Tensor:
    """Returns the rows of `x` `(total, width)` normalized, times `weight`, plus `bias`.

    The result has the dtype of `x`.

    `weight` and `bias` are `(width,)`. Without `centered` the mean is not subtracted, as in
    RMSNorm.
    """
    return _affine(_normalized(x, eps, centered)[0], weight, bias).to(x.dtype)


def quantized_layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    keep: bool,
) -> tuple[Tensor | None, Factor]:
    """Returns the result of `layer_norm` (None unless `keep`), and its quantized rows."""
    normed = layer_norm(x, weight, bias, eps, centered)
    return normed if keep else None, quantize_rows(normed)


def layer_norm_backward(
    dnormed: Tensor,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    again: bool,
    residual_sums: bool,
    centered: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of `layer_norm`, and optionally its result and sums of `residual`.

    The gradient of `x` includes `residual` `(total, width)`. With `again`, the result of the
    forward is returned, else None. The gradient of a `weight` or `bias` that is None is None.
    With `residual_sums`, the sums of the columns of `residual` are returned, else None.
    """
    unit, factor = _normalized(x, eps, centered)
    dresult = dnormed.to(unit.dtype)
    dunit = dresult if weight is None else dresult * weight.to(unit.dtype)
    dx = _normalized_backward(dunit, unit, factor, centered) + residual
    return (
        dx.to(x.dtype),
        _affine(unit, weight, bias).to(x.dtype) if again else None,
        None if weight is None else (dresult * unit).sum(dim=0),
        None if bias is None else dresult.sum(dim=0),
        residual.sum(dim=0, dtype=_sum_dtype(x)) if residual_sums else None,
    )


# ---------------------------------------------------------------------------------------------
# SiLU
# ---------------------------------------------------------------------------------------------


def silu(z: Tensor, in_place: bool) -> Tensor:
    """Computes `z * sigmoid(z)`, contiguous or written over `z`, possibly a slice of columns."""
    return torch.nn.functional.silu(z, inplace=in_place)


def activation_backward(gradient: Tensor, z: Tensor, activated: int, sums: bool) -> Tensor | None:
    """Turns the gradient of SiLU's result into that of `z`, in place.

    `gradient` is `(total, width)`; only its first `activated` columns had an activation. With
    `sums`, the sums of all columns afterwards are returned, `(width,)`: the gradient of a bias.
    """
    if activated:
        first = gradient[:, :activated]
        wide = z[:, :activated].to(_sum_dtype(z))
        sigmoid = torch.sigmoid(wide)
        first.copy_(first * (sigmoid * (1 + wide * (1 - sigmoid))))
    return gradient.sum(dim=0, dtype=_sum_dtype(z)) if sums else None


# ---------------------------------------------------------------------------------------------
# Dropout
# ---------------------------------------------------------------------------------------------

_MASK32 = 2**32 - 1


def _philox(seed: Tensor, counters: list[Tensor]) -> list[Tensor]:
    """Computes Philox4x32 (Salmon et al. 2011).

    Each group of four counters gives four words of 32 bits, held in int64.
    """
    c0, c1, c2, c3 = counters
    key0, key1 = seed & _MASK32, (seed >> 32) & _MASK32
    for _ in range(PHILOX_ROUNDS):
        # NOTE: a 64-bit product may wrap to a negative int64; the mask clears the sign bits.
        product0, product2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = (
            ((product2 >> 32) & _MASK32) ^ c1 ^ key0,
            ((product0 >> 32) & _MASK32) ^ c3 ^ key1,
        )
        c1, c3 = product2 & _MASK32, product0 & _MASK32
        key0, key1 = (key0 + 0x9E3779B9) & _MASK32, (key1 + 0xBB67AE85) & _MASK32
    return [c0, c1, c2, c3]


def kept_elements(
    seed: Tensor, rows: int, parts: int, groups: int, width: int, threshold: int
) -> Tensor:
    """Returns which elements dropout keeps, bool `(rows, parts, groups, width)`.

    `seed` is int64 `(1,)`. Column `8 * n + i` of a group uses the 16 bits from bit `16 * (i % 2)`
    of word `i // 2` of Philox at the counters `(n, row, part * groups + group, 0)`.
    """
    device = seed.device
    block, row, unit = torch.meshgrid(
        torch.arange(-(-width // 8), device=device),
        torch.arange(rows, device=device),
        torch.arange(parts * groups, device=device),
        indexing="ij",
    )
    words = torch.stack(_philox(seed, [block, row, unit, torch.zeros_like(row)]), dim=-1)
    halves = torch.stack([words & 0xFFFF, words >> 16], dim=-1)  # (blocks, rows, units, 4, 2)
    bits = halves.permute(1, 2, 0, 3, 4).reshape(rows, parts, groups, 8 * block.shape[0])
    kept: Tensor = bits[..., :width] >= threshold
    return kept


def _dropout_factors(
    seed: Tensor | None, rows: int, width: int, options: GateOptions, dtype: torch.dtype
) -> Tensor | None:
    """Returns the factors of dropout, `(rows, parts, groups, width)`, or None without dropout."""
    if seed is None:
        return None
    threshold = dropout_threshold(options.dropout)
    kept = kept_elements(seed, rows, len(options.parts), options.groups, width, threshold)
    return kept.to(dtype) * (2**16 / (2**16 - threshold))


# ---------------------------------------------------------------------------------------------
# Gate
# ---------------------------------------------------------------------------------------------


def _grouped(x: Tensor, groups: int) -> Tensor:
    grouped: Tensor = x.unflatten(1, (groups, x.shape[1] // groups))
    return grouped


def _by_column(parameter: Tensor | None, groups: int) -> Tensor | None:
    """Reshapes to `(groups, 1 or width)`, to multiply `(total, groups, width)`."""
    return None if parameter is None else parameter.reshape(groups, -1)


def _assemble(
    attention: Tensor,
    u: Tensor,
    normed: Tensor,
    factors: Tensor | None,
    options: GateOptions,
) -> Tensor:
    """Joins parts of `(total, groups, width)` each into `(total, parts * columns)`."""
    values = {"u": u, "x": attention, "normed": normed, "gated": normed * u}
    y = torch.stack([values[name].to(normed.dtype) for name in options.parts], dim=1)
    y = y if factors is None else y * factors
    return y.flatten(1).to(attention.dtype)


def _activated(u: Tensor, options: GateOptions) -> Tensor:
    return torch.nn.functional.silu(u) if options.activates_u else u


def gate(
    attention: Tensor,
    u: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    options: GateOptions,
) -> Tensor:
    """Returns the parts of `options` side by side, `(total, parts * columns)`, after dropout.

    Args:
        attention: `(total, columns)`, contiguous.
        u: `(total, columns)`; may be a slice of columns.
        weight, bias: parameters of the norm: `(columns,)`, or `(groups,)` with several groups.
        seed: int64 `(1,)`, which alone determines the elements that dropout keeps; None is no
            dropout.
    """
    groups = options.groups
    attention, u = _grouped(attention, groups), _grouped(u, groups)
    unit, _ = _normalized(attention, options.eps, options.centered)
    normed = _affine(unit, _by_column(weight, groups), _by_column(bias, groups))
    rows, _, width = attention.shape
    factors = _dropout_factors(seed, rows, width, options, unit.dtype)
    return _assemble(attention, _activated(u.to(unit.dtype), options), normed, factors, options)


def quantized_gate(
    attention: Tensor,
    u: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    options: GateOptions,
    keep: bool,
) -> tuple[Tensor | None, Factor]:
    """Returns the result of `gate` (None unless `keep`), and its quantized rows."""
    y = gate(attention, u, weight, bias, seed, options)
    return y if keep else None, quantize_rows(y)


def gate_backward(
    dy: Tensor,
    attention: Tensor,
    u: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    options: GateOptions,
    du: Tensor,
    again: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of `gate`, and optionally its result.

    The four results are the gradient of `attention`; the result of the forward with `again`, else
    None; and the gradients of `weight` and `bias`, None for a parameter that is None. The gradient
    of `u` is written to `du`, which may be a slice of columns.
    """
    groups = options.groups
    attention, u = _grouped(attention, groups), _grouped(u, groups)
    unit, factor = _normalized(attention, options.eps, options.centered)
    weight, bias = _by_column(weight, groups), _by_column(bias, groups)
    normed = _affine(unit, weight, bias)
    given_u = u.to(unit.dtype)
    u = _activated(given_u, options)
    rows, _, width = attention.shape
    factors = _dropout_factors(seed, rows, width, options, unit.dtype)

    gradients = dy.unflatten(1, (len(options.parts), groups, width)).to(unit.dtype)
    if factors is not None:
        gradients = gradients * factors
    of_part = dict(zip(options.parts, gradients.unbind(1), strict=True))
    du_wide = of_part["gated"] * normed
    if "u" in of_part:
        du_wide = du_wide + of_part["u"]
    if options.activates_u:
        sigmoid = given_u.sigmoid()
        du_wide = du_wide * sigmoid * (1 + given_u * (1 - sigmoid))
    du.copy_(du_wide.flatten(1))
    dnormed = of_part["gated"] * u
    if "normed" in of_part:
        dnormed = dnormed + of_part["normed"]
    dunit = dnormed if weight is None else dnormed * weight.to(unit.dtype)
    dattention = _normalized_backward(dunit, unit, factor, options.centered)
    if "x" in of_part:
        dattention = dattention + of_part["x"]

    def summed(terms: Tensor) -> Tensor:
        return terms.sum(dim=0).flatten() if groups == 1 else terms.sum(dim=(0, 2))

    y = _assemble(attention, u, normed, factors, options) if again else None
    return (
        dattention.flatten(1).to(attention.dtype),
        y,
        None if weight is None else summed(dnormed * unit),
        None if bias is None else summed(dnormed),
    )
