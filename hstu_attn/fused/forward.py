"""The forward of the fused layer; operator.py has its formula and says what it saves.

`FusedSteps` computes the steps around attention. `forward_of_call` runs them with attention of
packed rows, and `infer` with another attention, without gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from .. import ops
from ..call import AttentionCall, BiasTensors
from ..fp8_attention import attention_of_codes, attention_of_silu
from ..fp8_linear import (
    MAX_SEQUENCES,
    Factor,
    add_linear,
    check_rows,
    has_kernel,
    product,
    project,
)
from ..layer_math import Attend, Weights, hstu_unit, linear, split_uvqk
from ..quantization import Quantized
from .settings import Settings
from .steps import Steps, steps_for

__all__ = [
    "FusedSteps",
    "apply_linear",
    "bias_tensors",
    "forward_of_call",
    "functions_for",
    "fuses_silu",
    "infer",
    "normalize",
    "projects_codes",
    "split_z",
    "without_autocast",
]

_Rest = ParamSpec("_Rest")
_Result = TypeVar("_Result")


def without_autocast(
    function: Callable[Concatenate[Tensor, _Rest], _Result],
) -> Callable[Concatenate[Tensor, _Rest], _Result]:
    """Disables autocast, which would mix other dtypes into a computation in the dtype of `x`."""

    @functools.wraps(function)
    def wrapped(tensor: Tensor, /, *args: _Rest.args, **kwargs: _Rest.kwargs) -> _Result:
        kind = tensor.device.type
        if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
            return function(tensor, *args, **kwargs)
        with torch.autocast(kind, enabled=False):
            return function(tensor, *args, **kwargs)

    return wrapped


def functions_for(x: Tensor, settings: Settings) -> Steps:
    """Returns the implementation of the steps for rows like `x`."""
    return steps_for(x, x.shape[1], settings.num_heads * settings.hidden_dim // settings.groups)


def normalize(x: Tensor, weights: Weights, settings: Settings, functions: Steps) -> Tensor:
    """Returns the normalized rows."""
    weight, bias = weights.input_norm_weight, weights.input_norm_bias
    return functions.layer_norm(x, weight, bias, settings.norm_eps, settings.input_centered)


def split_z(
    z: Tensor, activated: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Splits `z` as `split_uvqk` does; takes v, q and k from `activated` if it is given."""
    u, *vqk = split_uvqk(z, settings)
    if activated is not None:
        parts = activated.split(settings.split_sizes[1:], dim=1)
        vqk = [part.unflatten(1, (settings.num_heads, -1)) for part in parts]
    v, q, k = vqk
    return u, v, q, k


def apply_linear(
    x: Tensor | Factor, weight: Tensor, bias: Tensor | None, settings: Settings, functions: Steps
) -> Tensor:
    """Computes `x @ weight.T + bias`; in FP8 if `x` is quantized or the settings say so."""
    if isinstance(x, Tensor):
        if not settings.fp8_linears:
            return linear(x, weight, bias)
        x = functions.quantize_rows(x)
    return product(x, functions.quantize_rows(weight), bias)


# `project` computes blocks of 128 rows of one sequence: at this mean length, blocks have 12 % more
# rows than sequences. It saves a quarter of the time, so this limit is a cautious estimate.
MIN_PROJECTED_LENGTH = 512


def projects_codes(x: Tensor, call: AttentionCall, settings: Settings) -> bool:
    """Returns whether one kernel computes z and quantizes SiLU of q, k and v."""
    sequences = call.cu_seqlens_k.shape[0] - 1
    return (
        settings.fp8_linears
        and fuses_silu(call, settings)
        and call.quant_mode == 2
        and not call.smooth_k
        and call.seqused_q is None
        and call.seqused_k is None
        and settings.hidden_dim == settings.attention_dim
        and settings.hidden_dim in (64, 128, 256)
        and sequences <= MAX_SEQUENCES
        and x.shape[0] >= MIN_PROJECTED_LENGTH * sequences
        and has_kernel(x, settings.split_sizes[0])
    )


class FusedSteps:
    """Computes the steps of one forward with the functions of `Steps`.

    Args:
        x: the rows, whose device, dtype and width choose the implementation.
        weights: the weights of the layer.
        seed: the seed of dropout, int64 `(1,)`; None is no dropout.
        settings: the settings of the call.

    Attributes:
        kept: the saved tensors for the backward, by the names in `settings.kept`.
    """

    def __init__(
        self, x: Tensor, weights: Weights, seed: Tensor | None, settings: Settings
    ) -> None:
        self.weights = weights
        self.seed = seed
        self.settings = settings
        self.functions = functions_for(x, settings)
        self.kept: dict[str, Tensor] = {}
        self._names = settings.kept

    def project(self, x: Tensor) -> Tensor:
        weights, settings = self.weights, self.settings
        normed: Tensor | None
        read: Tensor | Factor
        if settings.fp8_linears:
            normed, read = self._quantized_norm(x)
        else:
            normed = read = normalize(x, weights, settings, self.functions)
        z = self._linear(read, weights.uvqk_weight, weights.uvqk_bias)
        self._keep(normed=normed, z=z)
        return z

    def project_codes(self, x: Tensor, call: AttentionCall) -> tuple[Tensor, Quantized]:
        """Returns u before SiLU, and the quantized v, q and k, for `projects_codes`."""
        weights, settings = self.weights, self.settings
        normed, factor = self._quantized_norm(x)
        z, codes = project(
            factor,
            self.functions.quantize_rows(weights.uvqk_weight),
            weights.uvqk_bias,
            call.cu_seqlens_k,
            settings.num_heads,
            keeps_z="z" in self._names,
        )
        self._keep(normed=normed, z=z)
        return z[:, : settings.split_sizes[0]], codes

    def _quantized_norm(self, x: Tensor) -> tuple[Tensor | None, Factor]:
        weights, settings = self.weights, self.settings
        return self.functions.quantized_layer_norm(
            x,
            weights.input_norm_weight,
            weights.input_norm_bias,
            settings.norm_eps,
            settings.input_centered,
            keep="normed" in self._names,
        )

    def activate(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        activated, settings = None, self.settings
        if settings.activated:
            of_vqk = z[:, settings.split_sizes[0] :]
            activated = self.functions.silu(of_vqk, in_place=not settings.has_backward)
        self._keep(activated=activated)
        return split_z(z, activated, settings)

    def gate(self, attention: Tensor, u: Tensor) -> Tensor | Factor:
        attention = attention.flatten(1)
        weight, bias = self.weights.gate_weight, self.weights.gate_bias
        of_call = (attention, u, weight, bias, self.seed, self.settings.gate)
        y: Tensor | None
        read: Tensor | Factor
        if self.settings.fp8_linears:
            y, read = self.functions.quantized_gate(*of_call, keep="y" in self._names)
        else:
            y = read = self.functions.gate(*of_call)
        self._keep(attention=attention, y=y)
        return read

    def add_output(self, x: Tensor, y: Tensor | Factor) -> Tensor:
        """Computes `x + linear(y)` with one addition in the epilogue of the product.

        Without a bias, the epilogue adds `x`. With a bias, the epilogue adds the bias at no cost,
        and `x` is added in place afterwards; `addmm`, which copies `x` first, would need as much
        memory traffic. Of the e4m3 products, that of `add_linear` adds a matrix.
        """
        if not isinstance(y, Tensor):
            if has_kernel(x, x.shape[1]) and x.is_contiguous():
                factor = self.functions.quantize_rows(self.weights.output_weight)
                return add_linear(y, factor, self.weights.output_bias, x)
            result = self._linear(y, self.weights.output_weight, self.weights.output_bias)
            return result.add_(x)
        weight, bias = self.weights.output_weight.to(x.dtype).t(), self.weights.output_bias
        if bias is None:
            return torch.addmm(x, y, weight)
        return torch.addmm(bias.to(x.dtype), y, weight).add_(x)

    def _linear(self, x: Tensor | Factor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return apply_linear(x, weight, bias, self.settings, self.functions)

    def _keep(self, **tensors: Tensor | None) -> None:
        for name, tensor in tensors.items():
            if name in self._names and tensor is not None:
                self.kept[name] = tensor


def bias_tensors(weights: Weights) -> BiasTensors:
    """Returns the tables of the relative bias as attention takes them."""
    return None, weights.pos_weight, weights.ts_weight


@without_autocast
def _forward(
    x: Tensor, weights: Weights, seed: Tensor | None, settings: Settings, attend: Attend
) -> tuple[Tensor, list[Tensor]]:
    """Returns the result, and the tensors that `settings.kept` names for the backward."""
    if settings.fp8_linears:
        check_rows(x)
    steps = FusedSteps(x, weights, seed, settings)
    out = hstu_unit(x, steps, attend)
    return out, [steps.kept[name] for name in settings.kept]


@without_autocast
def _forward_of_codes(
    x: Tensor, weights: Weights, call: AttentionCall, seed: Tensor | None, settings: Settings
) -> tuple[Tensor, list[Tensor]]:
    """Does the work of `forward_of_call` where `projects_codes` holds."""
    check_rows(x)
    steps = FusedSteps(x, weights, seed, settings)
    u, codes = steps.project_codes(x, call)
    attention = x.new_empty(codes.q8.shape)
    attention_of_codes(codes, attention, call, bias_tensors(weights))
    out = steps.add_output(x, steps.gate(attention, u))
    return out, [steps.kept[name] for name in settings.kept]


def fuses_silu(call: AttentionCall, settings: Settings) -> bool:
    """Returns whether attention applies SiLU to q, k and v when it quantizes them."""
    return call.quant_mode >= 0 and settings.linear_activation == "silu"


def forward_of_call(
    x: Tensor, weights: Weights, call: AttentionCall, seed: Tensor | None, settings: Settings
) -> tuple[Tensor, list[Tensor]]:
    """Calls `_forward` with attention of packed rows."""
    if projects_codes(x, call, settings):
        return _forward_of_codes(x, weights, call, seed, settings)
    attention: Callable[..., Tensor] = ops.attention
    if fuses_silu(call, settings):
        attention, settings = attention_of_silu, settings._replace(linear_activation="silu_u")
    attend = functools.partial(attention, call=call, bias=bias_tensors(weights))
    return _forward(x, weights, seed, settings, attend)


@torch.no_grad()
def infer(
    x: Tensor, weights: Weights, seed: Tensor | None, settings: Settings, attend: Attend
) -> Tensor:
    """Computes the layer without gradients, with an attention function other than the packed one.

    Args:
        x: `(total, embedding_dim)`, of one of the dtypes of attention.
        weights, settings: see their classes; `has_backward` is False.
        seed: the seed of dropout, int64 `(1,)`; None is no dropout.
        attend: the attention function.

    Returns:
        `(total, embedding_dim)` in the dtype of `x`.
    """
    return _forward(x, weights, seed, settings, attend)[0]
