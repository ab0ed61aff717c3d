"""The steps of a layer between its matrix products, and the choice of their implementation.

An implementation is a module with the functions of `Steps`; torch_steps.py documents each. Rows
are the packed tokens of a batch. Matrices are `(total, columns)` with contiguous columns; where a
function says so, a matrix may be a slice of columns of a wider matrix. Parameters have any
floating dtype and are not rounded to that of the rows: an fp32 master weight is used in fp32. Means
and sums are in fp32 for 16-bit rows, else in the dtype of the rows.
"""

from __future__ import annotations

import importlib.util
from typing import Protocol

import torch
from torch import Tensor

from ..fp8_linear import Factor
from . import torch_steps
from .options import MAX_WIDTH, GateOptions

__all__ = ["HAS_TRITON", "Steps", "steps_for"]

HAS_TRITON = importlib.util.find_spec("triton") is not None
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Steps(Protocol):
    """The steps of the layer that an implementation provides."""

    def quantize_rows(self, x: Tensor) -> Factor: ...

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        centered: bool = True,
    ) -> Tensor: ...

    def quantized_layer_norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        centered: bool,
        keep: bool,
    ) -> tuple[Tensor | None, Factor]: ...

    def layer_norm_backward(
        self,
        dnormed: Tensor,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        again: bool,
        residual_sums: bool,
        centered: bool = True,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]: ...

    def silu(self, z: Tensor, in_place: bool) -> Tensor: ...

    def activation_backward(
        self, gradient: Tensor, z: Tensor, activated: int, sums: bool
    ) -> Tensor | None: ...

    def gate(
        self,
        attention: Tensor,
        u: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        seed: Tensor | None,
        options: GateOptions,
    ) -> Tensor: ...

    def quantized_gate(
        self,
        attention: Tensor,
        u: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        seed: Tensor | None,
        options: GateOptions,
        keep: bool,
    ) -> tuple[Tensor | None, Factor]: ...

    def gate_backward(
        self,
        dy: Tensor,
        attention: Tensor,
        u: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        seed: Tensor | None,
        options: GateOptions,
        du: Tensor,
        again: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]: ...


def steps_for(x: Tensor, *widths: int) -> Steps:
    """Returns the implementation for rows like `x`, whose norms are over `widths` columns."""
    if x.is_cuda and HAS_TRITON and x.dtype in TRITON_DTYPES and max(widths) <= MAX_WIDTH:
        from . import triton_steps  # imports Triton, which not every machine has

        return triton_steps
    return torch_steps
