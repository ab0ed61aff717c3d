"""FBGEMM's raw HSTU operators, for code that calls them directly.

Importing this module registers the four operators

    torch.ops.fbgemm.hstu_varlen_fwd_80    torch.ops.fbgemm.hstu_varlen_bwd_80
    torch.ops.fbgemm.hstu_varlen_fwd_90    torch.ops.fbgemm.hstu_varlen_bwd_90

with the schemas that FBGEMM's `fbgemm_gpu/experimental/hstu` declares, each of them unless FBGEMM's
own is loaded already. (FBGEMM's library cannot be loaded afterwards: torch refuses to define an
operator twice.) `fbgemm_gpu` itself may be imported before or after. All four run this library's
kernels for the device of `q`, a CPU or any GPU that it supports; the number in a name is FBGEMM's
choice of kernel and chooses nothing here.

The arguments mean the same as in `hstu_attn_varlen_func`, which this module also has, and are
clamped in the same way. The operators differ from it as follows:

* The forward returns `(out, rab)`: the `rab` that the backward takes, its last dimension padded to
  a multiple of 8, or None without `rab`.
* The backward returns `(dq, dk, dv, drab)`, with None for `drab` unless `has_drab` is set. Tensors
  given as `dq`, `dk` and `dv`, which may be strided views, are written and returned. `rab` may be
  padded or not.
* `output_dtype` is 0 for bf16, 1 for fp16 and -1 for the dtype of `q`; it must mean q's dtype.
* `deterministic` asks for bitwise equal results in every run.
* As in FBGEMM, no operator records gradients: the caller of the forward must call the backward.
  The operators can be traced (`torch.compile`, `torch.export`), except for a backward into given
  tensors, because the schema does not declare that it writes them.

Errors are those of `hstu_attn_varlen_func`. The arguments of FP8 (`quant_mode`, `vt`, the descales
and so on) raise NotImplementedError: FBGEMM quantizes in Python before it calls these operators,
and this library's `hstu_attn_varlen_func` quantizes within the call.

For code that imports the package `hstu` and its module `hstu.hstu_ops_gpu`, `install_as_hstu` lets
both imports find this module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import interface, ops
from ..call import bias_tensors, make_call
from ..interface import hstu_attn_qkvpacked_func, hstu_attn_varlen_func

__all__ = ["hstu_attn_qkvpacked_func", "hstu_attn_varlen_func", "install_as_hstu"]

_Outputs: TypeAlias = tuple[Tensor | None, ...]

_SEQUENCES = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "int max_seqlen_q, int max_seqlen_k, int scaling_seqlen=-1"
)
_MASK = (
    "Tensor? num_contexts=None, Tensor? num_targets=None, int target_group_size=1, "
    "int window_size_left=-1, int window_size_right=-1, float alpha=1.0"
)
_SCHEMAS = {
    "hstu_varlen_fwd_80": (
        f"(Tensor q, Tensor k, Tensor v, {_SEQUENCES}, {_MASK}, Tensor? rab=None, "
        "Tensor? func=None, Tensor? kv_cache=None, Tensor? page_offsets=None, "
        "Tensor? page_ids=None, Tensor? last_page_lens=None) -> (Tensor, Tensor)"
    ),
    "hstu_varlen_bwd_80": (
        f"(Tensor dout, Tensor q, Tensor k, Tensor v, {_SEQUENCES}, Tensor? dq=None, "
        f"Tensor? dk=None, Tensor? dv=None, {_MASK}, Tensor? rab=None, bool has_drab=False, "
        "Tensor? func=None, bool deterministic=False) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    "hstu_varlen_fwd_90": (
        f"(Tensor q, Tensor k, Tensor v, {_SEQUENCES}, {_MASK}, Tensor? rab=None, "
        "Tensor? func=None, int quant_mode=-1, int output_dtype=-1, Tensor? vt=None, "
        "Tensor? cu_seqlens_vt_descale=None, Tensor? q_descale=None, Tensor? k_descale=None, "
        "Tensor? v_descale=None, Tensor? vt_descale=None, "
        "Tensor? cu_seqlens_q_block_descale=None, Tensor? cu_seqlens_kv_block_descale=None"
        ") -> (Tensor, Tensor)"
    ),
    "hstu_varlen_bwd_90": (
        "(Tensor dout, Tensor? dout_t, Tensor q, Tensor? q_t, Tensor k, Tensor? k_t, Tensor v, "
        f"{_SEQUENCES}, Tensor? dq_=None, Tensor? dk_=None, Tensor? dv_=None, {_MASK}, "
        "int quant_mode=-1, Tensor? rab=None, bool has_drab=False, Tensor? func=None, "
        "Tensor? q_descale=None, Tensor? qt_descale=None, Tensor? k_descale=None, "
        "Tensor? kt_descale=None, Tensor? v_descale=None, Tensor? do_descale=None, "
        "Tensor? dot_descale=None, Tensor? cu_seqlens_qt_descale=None, "
        "Tensor? cu_seqlens_kt_descale=None, Tensor? cu_seqlens_q_block_descale=None, "
        "Tensor? cu_seqlens_kv_block_descale=None, int output_dtype=-1, bool deterministic=False"
        ") -> (Tensor, Tensor, Tensor, Tensor)"
    ),
}

# FBGEMM rounds the last dimension of rab up to a multiple of this many elements.
_RAB_ALIGNMENT = 8


def install_as_hstu() -> None:
    """Lets `import hstu` and `import hstu.hstu_ops_gpu` find this module, in this process.

    Code written for FBGEMM's `hstu` package then needs no edit: call this before it is imported.

    Raises:
        RuntimeError: if another package `hstu` is installed or imported.
    """
    this = sys.modules[__name__]
    if sys.modules.get("hstu") is this:
        return
    other = find_spec("hstu")
    if other is not None:
        raise RuntimeError(f"hstu: expected no other package of this name, got {other.origin}")
    sys.modules["hstu"] = sys.modules["hstu.hstu_ops_gpu"] = this


# `import hstu.hstu_ops_gpu` binds `hstu`, of which this is then an attribute.
hstu_ops_gpu = sys.modules[__name__]


# ---------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------


def _forward(
    *, window_size_left: int, window_size_right: int, rab: Tensor | None, **arguments: Any
) -> _Outputs:
    if arguments.get("kv_cache") is None:
        for name in ("page_offsets", "page_ids", "last_page_lens"):
            if arguments.get(name) is not None:
                raise ValueError(f"{name}: expected None without kv_cache, got a tensor")
    window_size = (window_size_left, window_size_right)
    out = hstu_attn_varlen_func(window_size=window_size, rab=rab, **arguments)
    return out, None if rab is None else F.pad(rab, (0, -rab.shape[-1] % _RAB_ALIGNMENT))


def _backward(
    *,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scaling_seqlen: int,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    num_contexts: Tensor | None,
    num_targets: Tensor | None,
    target_group_size: int,
    window_size_left: int,
    window_size_right: int,
    alpha: float,
    rab: Tensor | None,
    has_drab: bool,
    func: Tensor | None,
    deterministic: bool,
    quant_mode: int = -1,
) -> _Outputs:
    if rab is not None and rab.shape[-1] == max_seqlen_k + -max_seqlen_k % _RAB_ALIGNMENT:
        rab = rab[..., :max_seqlen_k]
    ops.check_build(q)
    dout, q, k, v = (interface.with_contiguous_rows(x) for x in (dout, q, k, v))
    window_size = (window_size_left, window_size_right)
    bias = interface.fbgemm_bias(rab, has_drab)
    call = make_call(
        cu_seqlens_q,
        max_seqlen_q,
        cu_seqlens_k,
        max_seqlen_k,
        seqused_q,
        seqused_k,
        interface.fbgemm_mask(num_contexts, num_targets, target_group_size, window_size, func),
        alpha=alpha,
        scaling_seqlen=scaling_seqlen,
        quant_mode=quant_mode,
        deterministic=deterministic,
        strict=False,
    )
    gradients = tuple(
        torch.empty_like(x) if given is None else given
        for x, given in zip((q, k, v), (dq, dk, dv), strict=True)
    )
    drab, _, _ = ops.attention_backward(
        dout, (q, k, v), call, bias_tensors(bias), gradients, (has_drab, False, False)
    )
    return (*gradients, drab)


def _backward_fake(
    *, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, **arguments: Any
) -> _Outputs:
    for name, tensor in (("dq", dq), ("dk", dk), ("dv", dv)):
        if tensor is not None:
            raise NotImplementedError(
                f"{name}: expected None in a traced call, because the schema does not say that it "
                "is written, got a tensor"
            )
    return _backward(dq=None, dk=None, dv=None, **arguments)


# ---------------------------------------------------------------------------------------------
# Registration
# ---------------------------------------------------------------------------------------------

_OUTPUT_DTYPES = {0: torch.bfloat16, 1: torch.float16}


def _check_output_dtype(q: Tensor, output_dtype: int) -> None:
    if output_dtype != -1 and _OUTPUT_DTYPES.get(output_dtype) != q.dtype:
        raise NotImplementedError(
            f"output_dtype: expected -1, or 0 for bf16 or 1 for fp16 as q is {q.dtype}, got "
            f"{output_dtype}"
        )


def _is_fp8_argument(name: str) -> bool:
    return name.endswith("descale") or name in ("vt", "dout_t", "q_t", "k_t")


def _kernel(name: str, function: Callable[..., _Outputs]) -> Callable[..., _Outputs]:
    """Wraps `function`, which takes arguments by name, as a kernel of an operator."""
    declared = getattr(torch.ops.fbgemm, name).default._schema.arguments
    names = [argument.name.rstrip("_") for argument in declared]  # hstu_varlen_bwd_90 has `dq_`
    defaults = {n: a.default_value for n, a in zip(names, declared, strict=True)}
    fp8_names = [n for n in names if _is_fp8_argument(n)]

    def kernel(*values: Any) -> _Outputs:
        # The dispatcher leaves out arguments at the end that have their default.
        arguments = {**defaults, **dict(zip(names, values, strict=False))}
        for fp8_name in fp8_names:
            if arguments.pop(fp8_name) is not None:
                raise NotImplementedError(
                    f"{fp8_name}: expected None, because FP8 kernels are not built, got a tensor"
                )
        if 0 <= (mode := arguments.get("quant_mode", -1)) <= 5:
            raise NotImplementedError(
                f"quant_mode: {mode} is FP8, which the raw operators do not have"
            )
        _check_output_dtype(arguments["q"], arguments.pop("output_dtype", -1))
        if torch.is_grad_enabled():
            with torch.no_grad():
                return function(**arguments)
        return function(**arguments)

    return kernel


def _register(library: torch.library.Library) -> None:
    for name, schema in _SCHEMAS.items():
        if hasattr(torch.ops.fbgemm, name):
            continue
        library.define(name + schema)
        is_forward = "fwd" in name
        kernel = _kernel(name, _forward if is_forward else _backward)
        library.impl(name, kernel, "CPU")
        library.impl(name, kernel, "CUDA")
        # The operators that a kernel calls have fake kernels, so that it can be its own.
        fake = kernel if is_forward else _kernel(name, _backward_fake)
        torch.library.register_fake(f"fbgemm::{name}", fake, lib=library)


_library = torch.library.Library("fbgemm", "FRAGMENT")
_register(_library)
