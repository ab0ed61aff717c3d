"""The formula of an HSTU layer, shared by all of its implementations.

`hstu_unit` is the formula. A `UnitSteps` computes its four steps around attention:

    ComposedSteps                       torch's functions, which autograd differentiates
    ShardedSteps (tensor_parallel.py)   torch's functions, for the heads that one rank holds
    FusedSteps (fused/forward.py)       kernels with one backward for the whole layer

How attention is called (packed, cached, or with keys from other ranks) is the caller's choice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .fp8_linear import fp8_linear
from .layer_config import HSTULayerConfig

__all__ = [
    "Attend",
    "ComposedSteps",
    "UnitShape",
    "UnitSteps",
    "Weights",
    "cast_like",
    "hstu_unit",
    "linear",
    "split_uvqk",
]

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of q, k `(total, heads, attention_dim)` and v `(total, heads, hidden_dim)`; the result
is `(total, heads, hidden_dim)`."""


class Weights(NamedTuple):
    """The parameters of a layer, in the order of the arguments of the fused operator.

    Like `x`, they get gradients.

    Attributes:
        input_norm_weight, input_norm_bias: `(embedding_dim,)`.
        uvqk_weight, uvqk_bias: `(columns of u, v, q and k, embedding_dim)` and `(columns,)`.
        gate_weight, gate_bias: parameters of the norm of attention's output:
            `(heads * hidden_dim,)`, or `(heads,)` where each head is normalized separately.
        output_weight, output_bias: `(embedding_dim, parts * heads * hidden_dim)` and
            `(embedding_dim,)`.
        pos_weight, ts_weight: the tables of a `hstu_attn.RelativeBias`.
    """

    input_norm_weight: Tensor | None
    input_norm_bias: Tensor | None
    uvqk_weight: Tensor
    uvqk_bias: Tensor | None
    gate_weight: Tensor | None
    gate_bias: Tensor | None
    output_weight: Tensor
    output_bias: Tensor | None
    pos_weight: Tensor | None
    ts_weight: Tensor | None


class UnitShape(Protocol):
    """The fields of an `HSTULayerConfig` that the formula reads."""

    @property
    def num_heads(self) -> int: ...

    @property
    def split_sizes(self) -> tuple[int, int, int, int]: ...


_Gated = TypeVar("_Gated")


class UnitSteps(Protocol[_Gated]):
    """The steps of the formula; the output linear reads a `_Gated`, which is a matrix of rows."""

    def project(self, x: Tensor) -> Tensor:
        """Computes `linear(norm(x))`: `(total, columns of u, v, q and k)`."""

    def activate(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Splits the result of `project` as `split_uvqk` does, and applies SiLU as configured.

        SiLU of u may be left to `gate`, the only reader of u.
        """

    def gate(self, attention: Tensor, u: Tensor) -> _Gated:
        """Returns the input of the output linear, after dropout.

        The input is `norm(attention) * u`, concatenated with the other configured parts.
        `attention` is `(total, heads, hidden_dim)`; `u` and each part of the result are
        `(total, heads * hidden_dim)`.
        """

    def add_output(self, x: Tensor, y: _Gated) -> Tensor:
        """Computes `x + linear(y)`."""


def hstu_unit(x: Tensor, steps: UnitSteps[_Gated], attend: Attend) -> Tensor:
    """Computes the layer's output for rows `(total, embedding_dim)`."""
    u, v, q, k = steps.activate(steps.project(x))
    attention = attend(q, k, v)
    return steps.add_output(x, steps.gate(attention, u))


def split_uvqk(z: Tensor, shape: UnitShape) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Splits `z` into views: u `(total, heads * hidden_dim)`; v, q, k `(total, heads, width)`."""
    u, v, q, k = z.split(shape.split_sizes, dim=1)
    v, q, k = (part.unflatten(1, (shape.num_heads, -1)) for part in (v, q, k))
    return u, v, q, k


def cast_like(parameter: Tensor | None, like: Tensor) -> Tensor | None:
    """Casts a parameter to the dtype of `like`."""
    return None if parameter is None else parameter.to(like.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes the linear map in the dtype of `x`."""
    return F.linear(x, weight.to(x.dtype), cast_like(bias, x))


class ComposedSteps:
    """The steps composed of torch's functions, in the dtype of the rows.

    Args:
        config: the configuration of the layer.
        weights: the weights of the layer.
        training: whether dropout is applied.
    """

    def __init__(self, config: HSTULayerConfig, weights: Weights, training: bool) -> None:
        self.config = config
        self.weights = weights
        self.training = training
        self.linear = fp8_linear if config.has_fp8_linears else linear

    def project(self, x: Tensor) -> Tensor:
        normed = self.normalize_input(x)
        return self.linear(normed, self.weights.uvqk_weight, self.weights.uvqk_bias)

    def activate(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if self.config.linear_activation == "silu":
            z = F.silu(z)
        u, v, q, k = split_uvqk(z, self.config)
        if self.config.linear_activation == "silu_u":
            u = F.silu(u)
        return u, v, q, k

    def gate(self, attention: Tensor, u: Tensor) -> Tensor:
        return self.dropout(self.concat_parts(attention, u))

    def add_output(self, x: Tensor, y: Tensor) -> Tensor:
        return x + self.linear(y, self.weights.output_weight, self.weights.output_bias)

    def normalize_input(self, x: Tensor) -> Tensor:
        config, weights = self.config, self.weights
        return _normalize(
            x, config.input_norm, weights.input_norm_weight, weights.input_norm_bias, config
        )

    def normalize_attention(self, attention: Tensor) -> Tensor:
        """Normalizes `attention`; returns `(total, heads * hidden_dim)`."""
        config = self.config
        weight, bias = self.weights.gate_weight, self.weights.gate_bias
        if not config.use_group_norm:
            return _normalize(attention, config.output_norm, weight, bias, config)
        weight, bias = cast_like(weight, attention), cast_like(bias, attention)
        heads = attention.unflatten(1, (config.num_heads, -1))
        return F.group_norm(heads, config.num_heads, weight, bias, config.norm_eps).flatten(1)

    def concat_parts(self, attention: Tensor, u: Tensor) -> Tensor:
        """Concatenates the parts that `config.output_parts` names, side by side."""
        attention = attention.flatten(1)
        normed = self.normalize_attention(attention)
        values = {"u": u, "x": attention, "normed": normed, "gated": normed * u}
        parts = [values[name] for name in self.config.output_parts]
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def dropout(self, y: Tensor) -> Tensor:
        return F.dropout(y, self.config.output_dropout_ratio, self.training)


def _normalize(
    x: Tensor, norm: str, weight: Tensor | None, bias: Tensor | None, config: HSTULayerConfig
) -> Tensor:
    """Normalizes the rows of `x` over all columns."""
    if norm == "rms_norm":
        return F.rms_norm(x, x.shape[1:], cast_like(weight, x), config.norm_eps)
    return F.layer_norm(x, x.shape[1:], cast_like(weight, x), cast_like(bias, x), config.norm_eps)
