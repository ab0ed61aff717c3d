"""A whole HSTU layer as one operator and one autograd function.

The forward is `hstu_unit` of layer_math.py:

    normed = norm(x)                                  (total, embedding_dim)
    z = normed @ uvqk_weight.T + uvqk_bias            (total, columns of u, v, q and k)
    u, v, q, k = silu(z)                              of all columns, of u alone, or of none
    attention = hstu_attention(q, k, v)               (total, heads * hidden_dim)
    y = dropout(norm(attention) * u)                  with the other configured parts
    output = x + y @ output_weight.T + output_bias

The kernels of the gate compute SiLU of u and do not store it.

Let c be the bytes of an element, e = embedding_dim, h = heads * hidden_dim, w the columns of z, s
the columns of v, q and k that go through SiLU, and p the parts of y. For each row, the forward
saves for the backward, in bytes:

    x          c * e            which the layer before usually saves, too
    z          c * w            unless `recompute_linear`
    attention  c * h
    normed     c * e            unless `recompute_norm`
    silu(z)    c * s            unless `recompute_silu`, or attention quantizes q, k and v
    y          c * p * h        unless `recompute_gate`

and one seed for dropout. To recompute the norm or the gate costs one write, because kernels of the
backward read their inputs anyway. To recompute SiLU costs a pass over memory, and to recompute z
costs a norm and the larger matrix product. Statistics of the norms are not saved, because the
backward reads whole rows. The forward and the backward cast weights to the dtype of `x` where they
use them, and do not save the casts.

In FP8, the kernel that computes an input of a matrix product or of attention also quantizes it: the
norm, the gate, and for q, k and v the kernel that applies SiLU. On Hopper GPUs that kernel also
computes z, if sequences are long. SiLU of q, k and v exists in 16 bits only in a backward that is
not in e4m3, so it is always recomputed.

As in ops.py, eager calls go through one `torch.autograd.Function` that calls the functions below,
and `torch.ops.hstu_attn.hstu_layer_forward` and `..._backward` serve `torch.compile`,
`torch.export` and fake tensors, which see one operator each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from .. import ops
from ..call import AttentionCall
from ..fp8_linear import input_product
from ..layer_math import Weights, split_uvqk
from .forward import (
    FusedSteps,
    apply_linear,
    bias_tensors,
    forward_of_call,
    functions_for,
    fuses_silu,
    normalize,
    projects_codes,
    split_z,
    without_autocast,
)
from .settings import Kept, Settings
from .steps import HAS_TRITON, Steps

__all__ = [
    "Settings",
    "hstu_layer",
    "is_traced",
    "suits",
]


def suits(x: Tensor) -> bool:
    """Returns whether rows like `x` go through the fused layer by default.

    Exported programs do not use it: they are compiled ahead of time for machines without Python,
    and these operators are written in Python.
    """
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and HAS_TRITON
        and ops.has_cuda_kernels()
        and not torch.is_autocast_enabled("cuda")
        and not torch.compiler.is_exporting()
    )


def is_traced(x: Tensor) -> bool:
    """Returns whether the call is traced as operators: by a compiler, or with fake tensors."""
    return torch.compiler.is_compiling() or isinstance(x, FakeTensor)


# ---------------------------------------------------------------------------------------------
# Backward
# ---------------------------------------------------------------------------------------------


def _linear_backward(
    gradient: Tensor, weight: Tensor, settings: Settings, functions: Steps
) -> Tensor:
    """Returns the gradient of a linear's input."""
    if not settings.fp8_linears:
        return gradient @ weight.to(gradient.dtype)
    return input_product(gradient, weight, functions.quantize_rows)


def _weight_gradient(doutput: Tensor, read: Tensor, weight: Tensor) -> Tensor:
    """Returns `doutput.T @ read` in the weight's dtype, for fp32 weights without prior rounding."""
    if weight.dtype == torch.float32 and doutput.dtype != torch.float32 and doutput.is_cuda:
        return torch.mm(doutput.t(), read, out_dtype=torch.float32)
    return torch.mm(doutput.t(), read).to(weight.dtype)


@without_autocast
def _backward(
    dout: Tensor,
    x: Tensor,
    kept: Kept,
    weights: Weights,
    call: AttentionCall,
    seed: Tensor | None,
    settings: Settings,
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Returns the gradients of `x` and of the requested `weights`; None for other weights.

    The matrix product for the gradient of a frozen weight is skipped.
    """
    functions = functions_for(x, settings)
    wants = dict(zip(Weights._fields, wanted, strict=True))
    attention, z, normed, activated, y = kept
    if z is None and projects_codes(x, call, settings):
        only_z = settings._replace(recompute_linear=False, recompute_norm=True)
        steps = FusedSteps(x, weights, seed, only_z)
        steps.project_codes(x, call)
        z = steps.kept["z"]
        del steps
    elif z is None:
        again = normalize(x, weights, settings, functions) if normed is None else normed
        z = apply_linear(again, weights.uvqk_weight, weights.uvqk_bias, settings, functions)
        del again
    columns_of_u = settings.split_sizes[0]
    # The e4m3 backward applies SiLU where it quantizes q, k and v.
    quantizes_silu = z.is_cuda and call.backward_e4m3 and fuses_silu(call, settings)
    if settings.activated and activated is None and not quantizes_silu:
        activated = functions.silu(z[:, columns_of_u:], in_place=False)
    u, v, q, k = split_z(z, activated, settings)
    dout = dout.contiguous()
    duvqk = torch.empty_like(z)
    du, dv, dq, dk = split_uvqk(duvqk, settings)

    dy = _linear_backward(dout, weights.output_weight, settings, functions)
    dattention, y_again, dgate_weight, dgate_bias = functions.gate_backward(
        dy,
        attention,
        u,
        weights.gate_weight,
        weights.gate_bias,
        seed,
        settings.gate,
        du,
        y is None and wants["output_weight"],
    )
    del dy
    doutput_weight = None
    if wants["output_weight"]:
        y = cast(Tensor, y_again if y is None else y)
        doutput_weight = _weight_gradient(dout, y, weights.output_weight)
    del y, y_again

    dattention = dattention.unflatten(1, (settings.num_heads, settings.hidden_dim))
    of_attention = (dattention, (q, k, v), call, bias_tensors(weights), (dq, dk, dv))
    dpos_weight = dts_weight = None
    if quantizes_silu:
        ops.attention_backward_of_silu(*of_attention)
    else:
        _, dpos_weight, dts_weight = ops.attention_backward(*of_attention, (False, True, True))
    del dattention, of_attention, activated, u, v, q, k
    has_bias = weights.uvqk_bias is not None
    sums = [
        functions.activation_backward(duvqk[:, columns], z[:, columns], activated, has_bias)
        for columns, activated in (
            (slice(columns_of_u), 0),
            (slice(columns_of_u, None), settings.activated),
        )
    ]
    duvqk_bias = torch.cat(cast(list[Tensor], sums)) if has_bias else None

    dnormed = _linear_backward(duvqk, weights.uvqk_weight, settings, functions)
    dx, normed_again, dnorm_weight, dnorm_bias, doutput_bias = functions.layer_norm_backward(
        dnormed,
        x,
        dout,
        weights.input_norm_weight,
        weights.input_norm_bias,
        settings.norm_eps,
        normed is None and wants["uvqk_weight"],
        weights.output_bias is not None,
        settings.input_centered,
    )
    del dnormed
    duvqk_weight = None
    if wants["uvqk_weight"]:
        normed = cast(Tensor, normed_again if normed is None else normed)
        duvqk_weight = _weight_gradient(duvqk, normed, weights.uvqk_weight)
    gradients = {
        "input_norm_weight": dnorm_weight,
        "input_norm_bias": dnorm_bias,
        "uvqk_weight": duvqk_weight,
        "uvqk_bias": duvqk_bias,
        "gate_weight": dgate_weight,
        "gate_bias": dgate_bias,
        "output_weight": doutput_weight,
        "output_bias": doutput_bias,
        "pos_weight": dpos_weight,
        "ts_weight": dts_weight,
    }
    results: list[Tensor | None] = [dx]
    for name, weight in weights._asdict().items():
        gradient = gradients[name] if wants[name] else None
        if weight is None or gradient is None:
            results.append(None)
        else:
            results.append(gradient.to(weight.dtype))
    return results


# ---------------------------------------------------------------------------------------------
# The operators, for torch.compile, torch.export and fake tensors
# ---------------------------------------------------------------------------------------------

_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "int": "SymInt",
    "float": "float",
    "bool": "bool",
    "LinearActivation": "str",
    "Sequence[str]": "str[]",
}


def _schema(*fields: type) -> str:
    """Returns the arguments of an operator's schema: the fields of these classes, in order."""
    # NOTE: the annotations of a NamedTuple in a file like this one are `ForwardRef`s of their text.
    return ", ".join(
        f"{_TYPES[kind.__forward_arg__]} {name}"
        for c in fields
        for name, kind in c.__annotations__.items()
    )


_ARGUMENTS = f"Tensor x, {_schema(Weights, AttentionCall)}, Tensor? seed, {_schema(Settings)}"
_NUM_WEIGHTS, _NUM_CALL = len(Weights._fields), len(AttentionCall._fields)


def _unpack(
    arguments: Sequence[Any],
) -> tuple[Tensor, Weights, AttentionCall, Tensor | None, Settings]:
    x, *rest = arguments
    end = _NUM_WEIGHTS + _NUM_CALL
    return (
        x,
        Weights(*rest[:_NUM_WEIGHTS]),
        AttentionCall(*rest[_NUM_WEIGHTS:end]),
        rest[end],
        Settings(*rest[end + 1 :]),
    )


def _kept_from(tensors: Sequence[Tensor], settings: Settings) -> Kept:
    return Kept(**dict(zip(settings.kept, tensors, strict=True)))


@torch.library.custom_op(
    "hstu_attn::hstu_layer_forward", mutates_args=(), schema=f"({_ARGUMENTS}) -> Tensor[]"
)
def _forward_operator(*arguments: Any) -> list[Tensor]:
    """Implements the forward operator: returns the result and the saved tensors."""
    x, weights, call, seed, settings = _unpack(arguments)
    with torch.no_grad():
        out, kept = forward_of_call(x, weights, call, seed, settings)
    return [out, *kept]


@torch.library.custom_op(
    "hstu_attn::hstu_layer_backward",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor[] kept, bool[] wanted, {_ARGUMENTS}) -> Tensor[]",
)
def _backward_operator(
    dout: Tensor, kept: list[Tensor], wanted: list[bool], *arguments: Any
) -> list[Tensor]:
    """Returns the gradients of `x` and of the weights; an unwanted gradient is an empty tensor."""
    x, weights, call, seed, settings = _unpack(arguments)
    with torch.no_grad():
        gradients = _backward(
            dout, x, _kept_from(kept, settings), weights, call, seed, settings, wanted
        )
    return [x.new_empty(0) if gradient is None else gradient for gradient in gradients]


@_forward_operator.register_fake
def _forward_fake(*arguments: Any) -> list[Tensor]:
    x, weights, _, _, settings = _unpack(arguments)
    columns = {
        "attention": settings.num_heads * settings.hidden_dim,
        "z": weights.uvqk_weight.shape[0],
        "normed": x.shape[1],
        "activated": settings.activated,
        "y": weights.output_weight.shape[1],
    }
    kept = [x.new_empty((x.shape[0], columns[name])) for name in settings.kept]
    return [x.new_empty(x.shape), *kept]


@_backward_operator.register_fake
def _backward_fake(
    dout: Tensor, kept: list[Tensor], wanted: list[bool], *arguments: Any
) -> list[Tensor]:
    x, weights, *_ = _unpack(arguments)
    return [
        x.new_empty(x.shape),
        *(
            w.new_empty(w.shape) if want and w is not None else x.new_empty(0)
            for w, want in zip(weights, wanted, strict=True)
        ),
    ]


def _save_for_operator(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.tensor_slots = [n for n, value in enumerate(inputs) if isinstance(value, Tensor)]
    ctx.inputs = [None if isinstance(value, Tensor) else value for value in inputs]
    ctx.save_for_backward(*[inputs[n] for n in ctx.tensor_slots], *output[1:])


def _operator_gradients(ctx: Any, gradients: list[Tensor]) -> tuple[Tensor | None, ...]:
    # NOTE: each access to `saved_tensors` unpacks all; activation checkpointing allows one.
    saved, count = ctx.saved_tensors, len(ctx.tensor_slots)
    arguments = list(ctx.inputs)
    for slot, tensor in zip(ctx.tensor_slots, saved[:count], strict=True):
        arguments[slot] = tensor
    wanted = list(ctx.needs_input_grad[1 : 1 + _NUM_WEIGHTS])
    result = torch.ops.hstu_attn.hstu_layer_backward(
        gradients[0], list(saved[count:]), wanted, *arguments
    )
    of_inputs = (x if want else None for x, want in zip(result, (True, *wanted), strict=True))
    return (*of_inputs, *(None for _ in arguments[1 + _NUM_WEIGHTS :]))


_forward_operator.register_autograd(_operator_gradients, setup_context=_save_for_operator)


# ---------------------------------------------------------------------------------------------
# Eager calls
# ---------------------------------------------------------------------------------------------


class _Layer(torch.autograd.Function):
    """The autograd function of the layer in eager mode."""

    @staticmethod
    def forward(
        ctx: Any,
        call: AttentionCall,
        seed: Tensor | None,
        settings: Settings,
        x: Tensor,
        *parameters: Any,
    ) -> Tensor:
        weights = Weights(*parameters)
        out, kept = forward_of_call(x, weights, call, seed, settings)
        ctx.call, ctx.settings = call, settings
        ctx.save_for_backward(seed, x, *weights, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        # NOTE: each access to `saved_tensors` unpacks all; activation checkpointing allows one.
        seed, x, *saved = ctx.saved_tensors
        weights, kept = Weights(*saved[:_NUM_WEIGHTS]), saved[_NUM_WEIGHTS:]
        wanted = ctx.needs_input_grad[4:]
        with torch.no_grad():
            gradients: Sequence[Tensor | None] = _backward(
                dout,
                x,
                _kept_from(kept, ctx.settings),
                weights,
                ctx.call,
                seed,
                ctx.settings,
                wanted,
            )
        # NOTE: torch's once_differentiable would lose the autograd edges to x and the weights.
        if torch.is_grad_enabled():
            gradients = ops.only_once((dout, x, *weights), gradients)
        return (None, None, None, *gradients)


def hstu_layer(
    x: Tensor, weights: Weights, call: AttentionCall, seed: Tensor | None, settings: Settings
) -> Tensor:
    """Computes the layer, with gradients where an input requires one.

    Args:
        x: `(total, embedding_dim)`, of one of the dtypes of attention.
        weights: the parameters.
        call: the call of attention.
        seed: the seed of dropout, int64 `(1,)`; None is no dropout.
        settings: see the class; this function sets `has_backward`.

    Returns:
        `(total, embedding_dim)` in the dtype of `x`.

    Raises:
        ValueError, NotImplementedError: as `hstu_attn.hstu_attention`.
    """
    records = torch.is_grad_enabled() and (
        x.requires_grad or any(w is not None and w.requires_grad for w in weights)
    )
    settings = settings._replace(
        has_backward=records,
        recompute_silu=settings.recompute_silu or fuses_silu(call, settings),
    )
    try:
        if is_traced(x):
            results = torch.ops.hstu_attn.hstu_layer_forward(x, *weights, *call, seed, *settings)
            return cast(Tensor, results[0])
        ops.refuse_tangents(x, *weights)
        if records:
            return cast(Tensor, _Layer.apply(call, seed, settings, x, *weights))
        with torch.no_grad():
            return forward_of_call(x, weights, call, seed, settings)[0]
    except (AttributeError, RuntimeError, TypeError):
        op = torch.ops.hstu_attn.hstu_layer_forward.default
        ops.explain_types(op, x, *weights, *call, seed, *settings)
        raise
