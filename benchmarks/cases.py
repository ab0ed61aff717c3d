"""The batches that benchmarks measure: jagged sequences with random lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Case", "Inputs"]


@dataclass(frozen=True)
class Case:
    """A jagged causal batch.

    Attributes:
        batch: number of sequences.
        shortest: lengths are drawn uniformly from `shortest` to `longest` tokens, both included.
        longest: see `shortest`.
        heads: attention heads.
        head_dim: width of a head of q, k and v.
        dtype: of q, k, v, the output and the gradients.
    """

    batch: int
    shortest: int
    longest: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The lengths in words, such as "16 x 32..512"."""
        return f"{self.batch} x {self.shortest}..{self.longest}"

    @property
    def dtype_name(self) -> str:
        """ "float32", "bfloat16" and so on."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def alpha(self) -> float:
        """The factor of the scores."""
        return 1 / math.sqrt(self.head_dim)

    @property
    def lengths(self) -> list[int]:
        """The same on every run."""
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(self.shortest, self.longest + 1, (self.batch,), generator=generator)
        return [int(length) for length in lengths]

    def flops(self, backward: bool) -> float:
        """Floating-point operations of the visible half of the score matrices.

        The forward multiplies twice, the backward five times.
        """
        forward = 4 * sum(length**2 for length in self.lengths) * self.heads * self.head_dim / 2
        return 2.5 * forward if backward else forward


@dataclass(frozen=True)
class Inputs:
    """What one call gets: packed q, k, v and the gradient of the output, each `(total, H, D)`."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def random(cls, case: Case, seed: int) -> Inputs:
        """Normally distributed inputs of a case."""
        generator = torch.Generator().manual_seed(seed)
        shape = (sum(case.lengths), case.heads, case.head_dim)
        tensors = [torch.randn(shape, generator=generator).to(case.dtype) for _ in range(4)]
        return cls(*tensors)

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v as fresh tensors that require a gradient and share the memory."""
        q, k, v = (x.detach().requires_grad_() for x in (self.q, self.k, self.v))
        return q, k, v
