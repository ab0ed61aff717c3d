"""Unpacks e4m3 tensors of TransformerEngine and torchao, recognized by their attributes.

    TransformerEngine   Float8Tensor, Float8TensorStorage   _data, _scale_inv, _fp8_dtype
    torchao             Float8Tensor                        qdata, scale
    torchao             Float8TrainingTensor                _data, _scale (1 / descale)

Neither package is imported. Their tensors report a dtype of bf16 or fp32, so the operator would
read dequantized values, or no data at all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .call import Descales
from .quantization import E4M3

__all__ = ["unwrapped"]


class _Parts(NamedTuple):
    """The codes of a tensor, and its descale `()` or `(..., 1)`, which broadcasts."""

    codes: Tensor
    descale: Tensor


def unwrapped(
    qkv: tuple[Tensor, Tensor, Tensor], descales: Descales, cu_seqlens: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], Descales]:
    """Returns q, k and v as plain torch tensors, and their descales.

    Args:
        qkv: plain torch tensors, or tensors of the classes in the module's docstring.
        descales: the descales of the plain torch tensors.
        cu_seqlens: `(batch + 1,)` offsets of the sequences.

    Raises:
        ValueError: for e5m2, for a tensor that has its own descale and is given another, or for
            scales that the operator does not take.
        NotImplementedError: for a tensor of another format, or one that requires a gradient.
    """
    tensors, found = [], []
    for name, tensor, given in zip("qkv", qkv, descales, strict=True):
        parts = _parts_of(name, tensor)
        if parts is None:
            tensors.append(tensor)
            found.append(given)
            continue
        kind = type(tensor).__name__
        if given is not None:
            raise ValueError(f"{name}_descale: expected None with a {kind}, which has its own")
        if torch.is_grad_enabled() and getattr(tensor, "requires_grad", False):
            raise NotImplementedError(
                f"{name}: attention of a {kind} has no backward; call it under torch.no_grad()"
            )
        tensors.append(parts.codes)
        found.append(_descale_of(name, kind, parts, cu_seqlens))
    q, k, v = tensors
    q_descale, k_descale, v_descale = found
    return (q, k, v), (q_descale, k_descale, v_descale)


def _parts_of(name: str, tensor: Any) -> _Parts | None:
    """Returns the codes and descale of a tensor of these packages, and None for other tensors."""
    kind = type(tensor).__name__
    if hasattr(tensor, "_fp8_dtype") and hasattr(tensor, "_scale_inv"):
        dtype = str(tensor._fp8_dtype).upper()
        if "E4M3" not in dtype:
            raise ValueError(f"{name}: expected float8_e4m3fn, got a {kind} of {dtype}")
        if tensor._data is None:
            raise ValueError(f"{name}: expected a {kind} with `_data`, got its transpose alone")
        return _Parts(tensor._data.view(E4M3), tensor._scale_inv)
    if hasattr(tensor, "qdata") and hasattr(tensor, "scale"):
        codes, descale = tensor.qdata, tensor.scale
    elif hasattr(tensor, "_data") and hasattr(tensor, "_scale"):
        codes, descale = tensor._data, tensor._scale.reciprocal()
    elif hasattr(tensor, "_rowwise_data"):
        raise NotImplementedError(
            f"{name}: expected scales of fp32 that q, k or v take, got {kind}"
        )
    else:
        return None
    if codes.dtype != E4M3:
        raise ValueError(f"{name}: expected float8_e4m3fn, got a {kind} of {codes.dtype}")
    return _Parts(codes, descale)


def _descale_of(name: str, kind: str, parts: _Parts, cu_seqlens: Tensor) -> Tensor:
    """Returns the descale in a shape that the operator takes."""
    codes, descale = parts.codes, parts.descale.float()
    if descale.numel() == 1:
        return descale.reshape(())
    if codes.dim() == 3 and descale.shape == (1, codes.shape[1], 1):
        return descale.reshape(1, -1).expand(len(cu_seqlens) - 1, -1)
    if name == "q" and descale.shape == (*codes.shape[:2], 1):
        return descale.squeeze(2).t()
    expected = "a scale for the tensor or for each head"
    if name == "q":
        expected += " or for each row of each head"
    raise ValueError(f"{name}: expected a {kind} with {expected}, got {tuple(descale.shape)}")
