"""The dispatcher operators: loading them, their fake kernels, and their gradients.

`torch.ops.hstu_attn.hstu_varlen_fwd`, `..._fwd_out`, `..._bwd` and `..._bwd_out` come from
`_C.abi3.so`. Gradients are recorded in one of two ways. Eager calls go through
`torch.autograd.Function`s that call the raw operators below autograd, because
`torch.library.register_autograd` costs a call 140 us or more of host time when gradients are
recorded. `register_autograd` serves `torch.compile`, `torch.export` and direct callers.

A bad argument raises ValueError, and a case that is not built raises NotImplementedError. Direct
callers and compiled code get a RuntimeError of the same text in place of NotImplementedError, and
from torch 2.15 on in place of both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import composed
from .call import NO_BIAS, AttentionCall, BiasTensors
from .quantization import BLOCK, E4M3, max_blocks, padded_head_dim

__all__ = [
    "LIBRARY_PATH",
    "append_paged_kv",
    "attention",
    "attention_backward",
    "attention_backward_of_silu",
    "attention_gradients",
    "attention_packed",
    "below_autograd",
    "check_build",
    "explain_types",
    "has_cuda_kernels",
    "only_once",
    "packed_rows",
    "refuse_tangents",
]

LIBRARY_PATH = Path(__file__).with_name("_C.abi3.so")

REINSTALL = "pip install --no-cache-dir --force-reinstall --no-deps ."  # in a checkout

SINGLE_BACKWARD = (
    "hstu_attn: the backward of HSTU attention cannot be differentiated again "
    "(create_graph=True is not supported)"
)

NO_FORWARD_MODE = (
    "hstu_attn: HSTU attention has no forward-mode derivative (torch.func.jvp, jacfwd and "
    "torch.autograd.forward_ad are not supported)"
)

# The forward operator takes the tensors that get gradients, the fields of AttentionCall, and the
# pages; the backward operator takes no pages.
_GRADIENTS = slice(0, 6)  # q, k, v, rab, pos_weight, ts_weight
_RAB, _TABLES = 3, slice(4, 6)
_KV_CACHE = _GRADIENTS.stop + len(AttentionCall._fields)

# kv_cache, page_offsets, page_ids, last_page_lens, kv_scales
NO_PAGES: tuple[None, ...] = (None,) * 5


# ---------------------------------------------------------------------------------------------
# Loading
# ---------------------------------------------------------------------------------------------


def _missing(*_: Any, **__: Any) -> Any:
    raise ImportError(_load_error)


_Result = TypeVar("_Result")

_load_error = ""
_fwd: Callable[..., Tensor] = _missing
_bwd: Callable[..., tuple[Tensor, ...]] = _missing
_bwd_out: Callable[..., None] = _missing
_has_cuda_kernels = False


def load(path: Path = LIBRARY_PATH) -> bool:
    """Loads the operator library and registers its Python side; False if the library is missing."""
    global _load_error
    if not path.exists():
        checkout = path.parents[1]
        if (checkout / "setup.py").exists():
            hint = (
                f"This is the checkout in {checkout}, and it is not built: run `pip install -e .` "
                "there, or leave that folder to import a hstu_attn that is installed elsewhere."
            )
        else:
            hint = f"In a checkout, with g++ and torch >= 2.10 installed, run `{REINSTALL}`."
        _load_error = f"hstu_attn: the operator library {path} does not exist. {hint}"
        return False
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(
            f"hstu_attn: the operator library {path} does not load into torch {torch.__version__} "
            f"({error}). It needs torch >= 2.10 and the C and C++ libraries of the system that it "
            f"was built on, or newer ones. To build it here, run in a checkout: `{REINSTALL}`."
        ) from error
    register()
    return True


def register() -> None:
    """Registers fake kernels and gradients for the loaded operators, and binds them."""
    global _fwd, _bwd, _bwd_out, _has_cuda_kernels
    namespace = torch.ops.hstu_attn
    _fwd = namespace.hstu_varlen_fwd.default
    _bwd = namespace.hstu_varlen_bwd.default
    _bwd_out = namespace.hstu_varlen_bwd_out.default
    torch.library.register_fake("hstu_attn::hstu_varlen_fwd", _fwd_fake)
    torch.library.register_fake("hstu_attn::hstu_varlen_bwd", _bwd_fake)
    torch.library.register_fake("hstu_attn::quantize_qkv", _quantize_fake)
    torch.library.register_fake("hstu_attn::linear_fp8", _linear_fp8_fake)
    torch.library.register_fake("hstu_attn::project_fp8", _project_fp8_fake)
    for name, like in _WITHOUT_RESULTS.items():
        torch.library.register_fake(f"hstu_attn::{name}", _checks_devices(name, like))
    torch.library.register_autograd(
        "hstu_attn::hstu_varlen_fwd", _fwd_gradients, setup_context=_save_for_gradients
    )
    torch.library.register_autograd("hstu_attn::hstu_varlen_bwd", _no_second_gradients)
    composed.register()
    _has_cuda_kernels = torch._C._dispatch_has_kernel_for_dispatch_key(
        "hstu_attn::hstu_varlen_fwd", "CUDA"
    )


def has_cuda_kernels() -> bool:
    """Returns whether this build has kernels for CUDA tensors."""
    return _has_cuda_kernels


# ---------------------------------------------------------------------------------------------
# Fake kernels
# ---------------------------------------------------------------------------------------------


def _check_devices(schema: torch.FunctionSchema, args: tuple[Any, ...], like: str = "q") -> None:
    """Checks that all tensors are on the device of one argument.

    The kernels check this, too, but a single meta tensor would keep the call from reaching them.
    """
    arguments = [argument.name for argument in schema.arguments]
    device = args[arguments.index(like)].device
    # NOTE: arguments at the end that have their default are left out.
    for name, value in zip(arguments, args, strict=False):
        if isinstance(value, Tensor) and value.device != device:
            raise ValueError(f"{name}: expected a tensor on {device}, got one on {value.device}")


def _fwd_fake(*args: Any) -> Tensor:
    _check_devices(torch.ops.hstu_attn.hstu_varlen_fwd.default._schema, args)
    q, _, v, *_ = args
    dtype = torch.bfloat16 if q.dtype == E4M3 else q.dtype
    out: Tensor = q.new_empty((q.shape[0], q.shape[1], v.shape[2]), dtype=dtype)
    return out


def _bwd_fake(*args: Any) -> tuple[Tensor, ...]:
    _check_devices(torch.ops.hstu_attn.hstu_varlen_bwd.default._schema, args)
    _, q, k, v, rab, pos_weight, ts_weight, *_, has_drab, has_dtables = args

    def table_gradient(table: Tensor | None) -> Tensor:
        if not has_dtables or table is None:
            return q.new_empty((0,))  # type: ignore[no-any-return]
        return table.new_empty(table.shape, dtype=torch.float)

    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        rab.new_empty(rab.shape) if has_drab and rab is not None else q.new_empty((0,)),
        table_gradient(pos_weight),
        table_gradient(ts_weight),
    )


# Operators that write into arguments, and the argument whose device the others must have.
_WITHOUT_RESULTS = {
    "hstu_varlen_fwd_out": "q",
    "hstu_varlen_bwd_out": "q",
    "forward_fp8": "q",
    "backward_of_silu": "q",
    "append_paged_kv": "k",
}


def _checks_devices(name: str, like: str) -> Callable[..., None]:
    """Returns the fake kernel of an operator without results."""

    def fake(*args: Any) -> None:
        _check_devices(getattr(torch.ops.hstu_attn, name).default._schema, args, like)

    return fake


def _linear_fp8_fake(*args: Any) -> Tensor:
    _check_devices(torch.ops.hstu_attn.linear_fp8.default._schema, args, like="x")
    *_, residual = args
    return residual.new_empty(residual.shape)  # type: ignore[no-any-return]


def _project_fp8_fake(*args: Any) -> tuple[Tensor, ...]:
    _check_devices(torch.ops.hstu_attn.project_fp8.default._schema, args, like="x")
    x, _, weight, _, _, cu_seqlens, heads, keeps_z = args
    total, columns = x.shape[0], weight.shape[0]
    blocks, head_dim = max_blocks(total, cu_seqlens.shape[0] - 1), columns // 4 // heads
    rows = (total, heads, head_dim)
    return (
        x.new_empty((total, columns if keeps_z else columns // 4), dtype=torch.bfloat16),
        *(x.new_empty(shape) for shape in (rows, rows, (blocks, heads, head_dim, BLOCK))),
        *(
            x.new_empty((heads, count), dtype=torch.float)
            for count in (total, blocks, blocks, total, blocks)
        ),
    )


def _quantize_fake(*args: Any) -> tuple[Tensor, ...]:
    _check_devices(torch.ops.hstu_attn.quantize_qkv.default._schema, args)
    q, _, v, cu_seqlens_q, _, _, _, _, smooth_k, *_ = args
    (total_q, heads, head_dim), (total_k, _, head_dim_v) = q.shape, v.shape
    blocks = max_blocks(total_k, cu_seqlens_q.shape[0] - 1)
    padded_dim = padded_head_dim(head_dim)

    def codes(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=E4M3)  # type: ignore[no-any-return]

    def floats(*shape: int) -> Tensor:
        return q.new_empty(shape, dtype=torch.float)  # type: ignore[no-any-return]

    return (
        codes(total_q, heads, padded_dim),
        codes(total_k, heads, padded_dim),
        codes(blocks, heads, head_dim_v, BLOCK),
        *(floats(heads, count) for count in (total_q, blocks, blocks, total_q, blocks)),
        floats(heads, total_q) if smooth_k else floats(0),
        floats(cu_seqlens_q.shape[0] - 1, heads, head_dim) if smooth_k else floats(0),
    )


# ---------------------------------------------------------------------------------------------
# Gradients for torch.compile, torch.export and direct callers
# ---------------------------------------------------------------------------------------------


def _save_for_gradients(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.tensor_slots = [n for n, value in enumerate(inputs) if isinstance(value, Tensor)]
    ctx.save_for_backward(*[inputs[n] for n in ctx.tensor_slots])
    ctx.inputs = [None if isinstance(value, Tensor) else value for value in inputs]


def _fwd_gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    args = list(ctx.inputs)
    for slot, tensor in zip(ctx.tensor_slots, ctx.saved_tensors, strict=True):
        args[slot] = tensor
    _check_gradients(args[0], args[_KV_CACHE])
    needs = ctx.needs_input_grad
    gradients = torch.ops.hstu_attn.hstu_varlen_bwd(
        dout.contiguous(), *args[:_KV_CACHE], needs[_RAB], any(needs[_TABLES])
    )
    wanted = zip(needs[_GRADIENTS], gradients, args[_GRADIENTS], strict=True)
    return (
        *(gradient.to(value.dtype) if needed else None for needed, gradient, value in wanted),
        *(None for _ in args[_GRADIENTS.stop :]),
    )


def _no_second_gradients(ctx: Any, *_: Tensor) -> None:
    del ctx
    raise RuntimeError(SINGLE_BACKWARD)


def _check_gradients(q: Tensor, kv_cache: Tensor | None) -> None:
    if kv_cache is not None:
        raise NotImplementedError(
            "paged_kv: attention over a paged KV cache has no backward; call it under "
            "torch.no_grad()"
        )
    if q.dtype == E4M3:
        raise NotImplementedError(
            "q: attention of float8_e4m3fn has no backward; call it under torch.no_grad(), or with "
            "bfloat16 or float16 and quantization=Quantization()"
        )


# ---------------------------------------------------------------------------------------------
# Gradients for eager calls
# ---------------------------------------------------------------------------------------------


def refuse_tangents(*values: Any) -> None:
    """Raises NotImplementedError if forward-mode differentiation has given a tensor a tangent.

    Below autograd the tangent would be lost, and the derivative would silently be zero.
    """
    if forward_ad._current_level < 0:  # there is no forward-mode differentiation
        return
    for value in values:
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise NotImplementedError(NO_FORWARD_MODE)


def below_autograd(op: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
    """Calls `op`, a raw operator, below autograd; raises errors with the types of the C++ code.

    `args` contains tensors.
    """
    refuse_tangents(*args)
    try:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args, **kwargs)
    except RuntimeError as error:
        _raise_what_is_meant(error)
        raise


def _raise_what_is_meant(error: RuntimeError) -> None:
    # NOTE: Python exceptions do not pass through the stable ABI; see csrc/api/composed.cpp.
    if "hstu_attn::composed_" in str(error) and (failure := composed.take_failure()):
        raise failure from None
    # NOTE: csrc/common/not_implemented.h says why the stable ABI has no exception of this type.
    _, marker, text = str(error).partition("NotImplementedError: ")
    if marker:
        raise NotImplementedError(text) from None
    # NOTE: csrc/api/arguments.h throws errors of this form, which torch up to 2.14 raises as
    # ValueError.
    if _BAD_ARGUMENT.match(str(error)):
        raise ValueError(str(error)) from None


_BAD_ARGUMENT = re.compile(r"\w+: expected .*, got ")


class _Once(torch.autograd.Function):
    """Passes gradients through, and raises an error if they are differentiated again.

    It also takes the inputs of the first backward, so that autograd keeps every path to them:
    otherwise a second derivative could silently be zero.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        del ctx
        return tuple(gradient.detach() for gradient in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError(SINGLE_BACKWARD)


def only_once(
    inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Wraps `gradients` so that differentiating them again raises `SINGLE_BACKWARD`."""
    sources = [tensor for tensor in inputs if tensor is not None]
    present = [gradient for gradient in gradients if gradient is not None]
    guarded = iter(_Once.apply(len(sources), *sources, *present))
    return [None if gradient is None else next(guarded) for gradient in gradients]


def packed_rows(dout: Tensor) -> Tensor:
    """Returns the gradient of an output with a contiguous last dimension and without strides of 0.

    An expanded gradient, such as that of a mean over rows, is copied: the Hopper kernels do not
    accept strides of 0, and the sm80 kernels, which accept them, are slower with them.

    Args:
        dout: `(total_q, heads, D)`, of any strides.
    """
    is_packed = dout.stride(-1) == 1 and 0 not in dout.stride()
    return dout if is_packed else dout.contiguous()


class _Attention(torch.autograd.Function):
    """The autograd function of eager calls with separate q, k and v."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rab: Tensor | None,
        pos_weight: Tensor | None,
        ts_weight: Tensor | None,
        call: AttentionCall,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, rab, pos_weight, ts_weight)
        ctx.call = call
        return below_autograd(_fwd, q, k, v, rab, pos_weight, ts_weight, *call, *NO_PAGES)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        # NOTE: each access to `saved_tensors` unpacks all; activation checkpointing allows one.
        *_, pos_weight, ts_weight = saved = ctx.saved_tensors
        _, _, _, has_drab, has_dpos, has_dts, _ = ctx.needs_input_grad
        dq, dk, dv, drab, dpos, dts = below_autograd(
            _bwd, packed_rows(dout), *saved, *ctx.call, has_drab, has_dpos or has_dts
        )
        gradients: Sequence[Tensor | None] = (
            dq,
            dk,
            dv,
            drab if has_drab else None,
            dpos.to(pos_weight.dtype) if has_dpos else None,
            dts.to(ts_weight.dtype) if has_dts else None,
        )
        if torch.is_grad_enabled():
            gradients = only_once((dout, *saved), gradients)
        return (*gradients, None)


class _AttentionPacked(torch.autograd.Function):
    """The autograd function of one `(total, 3, heads, D)` tensor, whose gradient is packed, too."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        rab: Tensor | None,
        pos_weight: Tensor | None,
        ts_weight: Tensor | None,
        call: AttentionCall,
    ) -> Tensor:
        ctx.save_for_backward(qkv, rab, pos_weight, ts_weight)
        ctx.call = call
        return below_autograd(_fwd, *qkv.unbind(1), rab, pos_weight, ts_weight, *call, *NO_PAGES)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        # NOTE: activation checkpointing allows a single access to `saved_tensors`.
        qkv, rab, pos_weight, ts_weight = saved = ctx.saved_tensors
        _, has_drab, has_dpos, has_dts, _ = ctx.needs_input_grad
        dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
        drab, dpos, dts = attention_backward(
            packed_rows(dout),
            qkv.unbind(1),
            ctx.call,
            (rab, pos_weight, ts_weight),
            dqkv.unbind(1),
            (has_drab, has_dpos, has_dts),
        )
        gradients: Sequence[Tensor | None] = (
            dqkv,
            drab,
            None if dpos is None else dpos.to(pos_weight.dtype),
            None if dts is None else dts.to(ts_weight.dtype),
        )
        if torch.is_grad_enabled():
            gradients = only_once((dout, *saved), gradients)
        return (*gradients, None)


# ---------------------------------------------------------------------------------------------
# Calls
# ---------------------------------------------------------------------------------------------


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    bias: BiasTensors = NO_BIAS,
    pages: Sequence[Tensor | None] = NO_PAGES,
) -> Tensor:
    """Calls the operator once, with gradients where an input requires one.

    Args:
        q, k, v: `(total, heads, head dim)`.
        call: the arguments that all layers share for a batch.
        bias: `(rab, pos_weight, ts_weight)`.
        pages: `PagedKV.arguments`.

    Returns:
        `(total_q, heads, Dv)`, contiguous, of q's dtype; bf16 if q is float8_e4m3fn.

    Raises:
        ValueError, NotImplementedError: as `hstu_attention`.
    """
    try:
        check_build(q)
        if torch.compiler.is_compiling():
            return torch.ops.hstu_attn.hstu_varlen_fwd(  # type: ignore[no-any-return]
                q, k, v, *bias, *call, *pages
            )
        if torch.is_grad_enabled() and (
            q.requires_grad or k.requires_grad or v.requires_grad or _any_requires_grad(bias)
        ):
            _check_gradients(q, pages[0])
            return _Attention.apply(q, k, v, *bias, call)  # type: ignore[no-any-return]
        return below_autograd(_fwd, q, k, v, *bias, *call, *pages)
    except (AttributeError, RuntimeError, TypeError):
        op = torch.ops.hstu_attn.hstu_varlen_fwd.default
        explain_types(op, q, k, v, *bias, *call, *pages)
        raise


def attention_packed(qkv: Tensor, call: AttentionCall, bias: BiasTensors = NO_BIAS) -> Tensor:
    """Calls `attention` with `qkv.unbind(1)`; the gradient is written packed, without a copy."""
    records = torch.is_grad_enabled() and (qkv.requires_grad or _any_requires_grad(bias))
    if not records or torch.compiler.is_compiling():
        q, k, v = qkv.unbind(1)
        return attention(q, k, v, call, bias)
    try:
        check_build(qkv)
        return _AttentionPacked.apply(qkv, *bias, call)  # type: ignore[no-any-return]
    except (AttributeError, RuntimeError, TypeError):
        op = torch.ops.hstu_attn.hstu_varlen_fwd.default
        explain_types(op, *qkv.unbind(1), *bias, *call, *NO_PAGES)
        raise


def attention_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v of a call of `attention` without a bias.

    A caller's own autograd function can use it. The arguments are as in `attention`, and `dout` is
    `(total_q, heads, Dv)`.
    """
    dq, dk, dv, *_ = below_autograd(_bwd, dout, q, k, v, *NO_BIAS, *call, False, False)
    return dq, dk, dv


def attention_backward(
    dout: Tensor,
    qkv: Sequence[Tensor],
    call: AttentionCall,
    bias: BiasTensors,
    gradients: Sequence[Tensor],
    has_dbias: Sequence[bool],
) -> BiasTensors:
    """Computes the backward of `attention` below autograd, into the given tensors.

    Args:
        dout: gradient of the result; its last dimension is contiguous.
        qkv: q, k and v.
        call, bias: as in `attention`.
        gradients: dq, dk and dv, which may be strided.
        has_dbias: which of rab, pos_weight and ts_weight get a gradient.

    Returns:
        The gradients of rab, pos_weight and ts_weight, None where not wanted; the gradients of
        pos_weight and ts_weight are fp32.
    """
    rab, pos_weight, ts_weight = bias
    has_drab, has_dpos, has_dts = has_dbias
    drab = rab.new_empty(rab.shape) if has_drab and rab is not None else None
    dpos, dts = (
        table.new_empty(table.shape, dtype=torch.float) if wanted and table is not None else None
        for table, wanted in ((pos_weight, has_dpos), (ts_weight, has_dts))
    )
    below_autograd(_bwd_out, dout, *qkv, *bias, *call, *gradients, drab, dpos, dts)
    return drab, dpos, dts


def attention_backward_of_silu(
    dout: Tensor,
    z: Sequence[Tensor],
    call: AttentionCall,
    bias: BiasTensors,
    gradients: Sequence[Tensor],
) -> None:
    """Computes the e4m3 backward of attention of SiLU, which is not stored in 16 bits, on a GPU.

    Args:
        dout, call, bias: as in `attention_backward`; `call.backward_e4m3` is True.
        z: what SiLU turns into q, k and v.
        gradients: dq, dk and dv: the gradients of the results of SiLU.
    """
    op = torch.ops.hstu_attn.backward_of_silu
    below_autograd(op, dout, *z, *bias, *call, *gradients)


def check_build(q: Tensor) -> None:
    """Raises NotImplementedError if this build has no kernels for the device of `q`."""
    if not _has_cuda_kernels and q.is_cuda:
        raise NotImplementedError(
            f"q: this build of hstu_attn has no CUDA kernels, got a tensor on {q.device}; build it "
            "with HSTU_ATTN_CUDA=1 and a CUDA toolkit"
        )


def _any_requires_grad(bias: BiasTensors) -> bool:
    if bias is NO_BIAS:
        return False
    return any(tensor is not None and tensor.requires_grad for tensor in bias)


def append_paged_kv(*args: Tensor | None) -> None:
    """Calls the operator `append_paged_kv`; see `hstu_attn.append_paged_kv`."""
    op = torch.ops.hstu_attn.append_paged_kv.default
    try:
        if torch.compiler.is_compiling():
            op(*args)
        else:
            below_autograd(op, *args)
    except (RuntimeError, TypeError):
        explain_types(op, *args)
        raise


# ---------------------------------------------------------------------------------------------
# Errors that the operators cannot raise
# ---------------------------------------------------------------------------------------------

# For each argument type in a schema: the Python types that it accepts, and their name in errors.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "Tensor": ((Tensor,), "a tensor"),
    "Optional[Tensor]": ((Tensor, type(None)), "a tensor or None"),
    "int": ((int, torch.SymInt), "an int"),
    "float": ((int, float, torch.SymFloat), "a float"),
}


def explain_types(op: torch._ops.OpOverload[..., Any], *args: Any) -> None:
    """Raises an error that names an argument of a failed call whose type the operator refuses.

    It is called only after a failure, to keep the check out of the hot path.

    Args:
        op: the operator.
        args: all of its arguments, by position.

    Raises:
        ValueError: naming the first such argument, if there is one.
    """
    for argument, value in zip(op._schema.arguments, args, strict=True):
        types, expected = _TYPES.get(str(argument.type), ((object,), ""))
        if not isinstance(value, types):
            raise ValueError(f"{argument.name}: expected {expected}, got {type(value).__name__}")


load()
