"""The settings of a call of the fused layer, and the tensors that its forward saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..layer_config import LinearActivation
from .options import GateOptions

__all__ = ["Kept", "Settings"]


class Settings(NamedTuple):
    """The layer's configuration, and whether this call has a backward.

    Attributes:
        num_heads, hidden_dim, attention_dim, linear_activation, norm_eps: as in `HSTULayerConfig`.
        input_centered, output_centered: whether the norm is LayerNorm; else it is RMSNorm.
        groups: into how many groups of columns the norm of attention's output divides a row: 1 or
            `num_heads`.
        parts: the parts of y: see `GateOptions`.
        dropout: the dropout ratio of y.
        fp8_linears: as `FP8.linears`.
        recompute_norm, recompute_linear, recompute_silu, recompute_gate: as in `HSTULayerConfig`.
        has_backward: whether the forward saves tensors for a backward.
    """

    num_heads: int
    hidden_dim: int
    attention_dim: int
    linear_activation: LinearActivation
    norm_eps: float
    input_centered: bool
    output_centered: bool
    groups: int
    parts: Sequence[str]
    dropout: float
    fp8_linears: bool
    recompute_norm: bool
    recompute_linear: bool
    recompute_silu: bool
    recompute_gate: bool
    has_backward: bool = False

    @property
    def gate(self) -> GateOptions:
        """The options of the gate."""
        return GateOptions(
            groups=self.groups,
            eps=self.norm_eps,
            parts=tuple(self.parts),
            dropout=self.dropout,
            centered=self.output_centered,
            activates_u=self.linear_activation != "none",
        )

    @property
    def split_sizes(self) -> tuple[int, int, int, int]:
        """Columns of u, v, q and k."""
        hidden, attention = self.num_heads * self.hidden_dim, self.num_heads * self.attention_dim
        return hidden, hidden, attention, attention

    @property
    def activated(self) -> int:
        """Returns how many columns of z go through SiLU before attention: those of v, q and k."""
        return sum(self.split_sizes[1:]) if self.linear_activation == "silu" else 0

    @property
    def kept(self) -> list[str]:
        """The fields of `Kept` that the forward saves for the backward, in order."""
        is_kept = {
            "attention": True,
            "z": not self.recompute_linear,
            "normed": not self.recompute_norm,
            "activated": self.activated and not self.recompute_silu,
            "y": not self.recompute_gate,
        }
        return [name for name, kept in is_kept.items() if kept and self.has_backward]


class Kept(NamedTuple):
    """The contiguous tensors that the forward saves for the backward; operator.py lists them.

    `activated` is `silu(z)` of the columns of v, q and k.
    """

    attention: Tensor
    z: Tensor | None = None
    normed: Tensor | None = None
    activated: Tensor | None = None
    y: Tensor | None = None
