"""TF32 products in plain PyTorch, on any device: products of fp32 factors rounded to 11 bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_DROPPED_BITS = 13


def to_tf32(x: Tensor, truncates: bool) -> Tensor:
    """Rounds fp32 to TF32, to nearest or toward zero; GPUs may do either."""
    half = 0 if truncates else 1 << (_DROPPED_BITS - 1)
    bits = x.float().contiguous().view(torch.int32) + half
    return (bits & -(1 << _DROPPED_BITS)).view(torch.float32)


def matmul(a: Tensor, b: Tensor, truncates: bool) -> Tensor:
    left, right = (to_tf32(x, truncates).double() for x in (a, b))
    return (left @ right).float()


class _Einsum(torch.autograd.Function):
    """`einsum` of two tensors, in which each summed index occurs in both tensors."""

    @staticmethod
    def forward(ctx: Any, equation: str, a: Tensor, b: Tensor, truncates: bool) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.equation, ctx.truncates = equation, truncates
        return _product(equation, a, b, truncates)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        names, result = ctx.equation.split("->")
        names_a, names_b = names.split(",")
        da = _product(f"{result},{names_b}->{names_a}", dout, b, ctx.truncates)
        db = _product(f"{result},{names_a}->{names_b}", dout, a, ctx.truncates)
        return None, da, db, None


def _product(equation: str, a: Tensor, b: Tensor, truncates: bool) -> Tensor:
    left, right = (to_tf32(x, truncates).double() for x in (a, b))
    return torch.einsum(equation, left, right).float()


class Tf32Einsum(torch.overrides.TorchFunctionMode):
    """Makes each fp32 `einsum`, and its backward, use TF32 factors."""

    def __init__(self, truncates: bool) -> None:
        super().__init__()
        self.truncates = truncates

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.einsum and args[1].dtype == torch.float32:
            return _Einsum.apply(*args, self.truncates)
        return func(*args, **(kwargs or {}))
