"""What both implementations of a layer's steps share, and the choice between them.

An implementation is a module with the functions of :class:`Steps`; torch_steps.py says what each
computes. Rows are the packed rows of a batch. Matrices are `(total, columns)` with contiguous
columns; where a function says so, they may be slices of columns of a wider matrix. Parameters are
of any floating dtype and take part as they are: a master weight in fp32 is not rounded first. Means
and sums are in fp32 for 16-bit rows, else in the dtype of the rows.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = [
    "HAS_TRITON",
    "MAX_WIDTH",
    "PHILOX_ROUNDS",
    "GateOptions",
    "Steps",
    "dropout_threshold",
    "steps_for",
]

# A program of the Triton kernels holds a whole row that is normalised in its registers.
MAX_WIDTH = 8192
HAS_TRITON = importlib.util.find_spec("triton") is not None
# Of dropout's random numbers: the fewest with which they pass BigCrush (Salmon et al. 2011,
# "Parallel random numbers: as easy as 1, 2, 3"). With ten the gate would wait for their arithmetic.
PHILOX_ROUNDS = 7
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class GateOptions(NamedTuple):
    """How attention's output is gated.

    Attributes:
        groups: 1 normalises all columns of a row together; more normalises so many groups of
            neighbouring columns each by itself, with one weight and one bias for a group.
        eps: added to the variance.
        parts: what the result holds side by side: "u"; "x", the attention output; "normed", the
            same normalised; and last, always, "gated", the product of "normed" and "u".
        dropout: of the elements of the result.
        centered: False leaves the mean in, so that the norm is RMSNorm.
    """

    groups: int
    eps: float
    parts: tuple[str, ...]
    dropout: float
    centered: bool = True


class Steps(Protocol):
    """The functions of an implementation."""

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        centered: bool = True,
    ) -> Tensor: ...

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


def dropout_threshold(ratio: float) -> int:
    """An element is dropped where its 16 random bits are below this number.

    The ratio in force is therefore a multiple of `2**-16`, at most `2**-17` away from the one that
    was asked for; what is kept is scaled by what is in force.
    """
    return min(round(ratio * 2**16), 2**16 - 1)


def steps_for(x: Tensor, *widths: int) -> Steps:
    """The implementation for rows like those of `x`, of which so many columns are normalised."""
    if x.is_cuda and HAS_TRITON and x.dtype in TRITON_DTYPES and max(widths) <= MAX_WIDTH:
        from . import triton_steps

        return triton_steps
    from . import torch_steps

    return torch_steps
