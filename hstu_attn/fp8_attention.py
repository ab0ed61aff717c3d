"""FP8 attention in two steps: q, k and v are quantized, and attention is computed from the codes.

`attention_keeping_e4m3` saves the codes for its backward: `Quantization(keep="e4m3")`. The backward
first dequantizes them to 16 bits, and then runs the 16-bit kernels. The gradient of the
quantization is the straight-through estimator: the gradients of a quantized value are those of the
value.

`attention_of_silu` applies SiLU to q, k and v where it quantizes them, without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import ops
from .call import NO_BIAS, AttentionCall, BiasTensors
from .quantization import Quantized, dequantized_rows

__all__ = [
    "attention_keeping_e4m3",
    "attention_of_codes",
    "attention_of_e4m3",
    "attention_of_silu",
]


def attention_keeping_e4m3(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, bias: BiasTensors = NO_BIAS
) -> Tensor:
    """Calls `ops.attention`; where gradients are recorded, q, k and v are kept in e4m3.

    Args:
        q, k, v: `(total, heads, head dim)`, bf16 or fp16.
        call: has a `quant_mode` from 0 to 5.
        bias: `(rab, pos_weight, ts_weight)`.

    Returns:
        `(total_q, heads, Dv)` of q's dtype.

    Raises:
        ValueError, NotImplementedError: as `hstu_attention`.
    """
    inputs = (q, k, v, *bias)
    records = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if not records:
        return ops.attention(q, k, v, call, bias)
    ops.check_build(q)
    return _Attention.apply(q, k, v, *bias, call)  # type: ignore[no-any-return]


class _Attention(torch.autograd.Function):
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
        x = _quantize(q, k, v, call)
        bias = (rab, pos_weight, ts_weight)
        if q.is_cuda:
            out = attention_of_codes(x, q.new_empty((*q.shape[:2], v.shape[2])), call, bias)
        else:
            # NOTE: this quantizes once more: there is no operator for codes on a CPU.
            op = torch.ops.hstu_attn.hstu_varlen_fwd
            out = _run(op, q, k, v, *bias, *call, *ops.NO_PAGES)
        ctx.save_for_backward(*bias, *x.kept)
        ctx.call, ctx.head_dim, ctx.dtype = call, q.shape[2], q.dtype
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        rab, pos_weight, ts_weight, *codes = saved = ctx.saved_tensors
        _, _, _, has_drab, has_dpos, has_dts, _ = ctx.needs_input_grad
        call = ctx.call
        q, k, v = dequantized_rows(codes, call.cu_seqlens_k, ctx.head_dim, ctx.dtype)
        dq, dk, dv, drab, dpos, dts = _run(
            torch.ops.hstu_attn.hstu_varlen_bwd,
            ops.packed_rows(dout),
            *(q, k, v, rab, pos_weight, ts_weight, *_plain(call)),
            has_drab,
            has_dpos or has_dts,
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
            # NOTE: the codes lead to no input: without this, a second derivative might be lost.
            inputs = dout.new_zeros((), requires_grad=True)
            gradients = ops.only_once((inputs, dout, *saved), gradients)
        return (*gradients, None)


def attention_of_e4m3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    bias: BiasTensors,
    pages: Sequence[Tensor | None],
    out_dtype: torch.dtype,
) -> Tensor:
    """Computes attention of float8_e4m3fn q, k and v in `out_dtype`, bf16 or fp16.

    The other arguments are those of `ops.attention`.

    Raises:
        ValueError, NotImplementedError: as `hstu_attention`.
    """
    dtypes = (torch.bfloat16, torch.float16)
    if out_dtype not in dtypes:
        raise ValueError(f"out_dtype: expected one of {dtypes} with float8_e4m3fn, got {out_dtype}")
    inputs = (q, k, v, *bias)
    records = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if records or out_dtype == torch.bfloat16:
        return ops.attention(q, k, v, call, bias, pages)  # raises where it records gradients
    ops.check_build(q)
    out = q.new_empty((*q.shape[:2], v.shape[-1]), dtype=out_dtype)
    _run(torch.ops.hstu_attn.hstu_varlen_fwd_out, q, k, v, *bias, *call, *pages, out)
    return out


def attention_of_silu(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, bias: BiasTensors = NO_BIAS
) -> Tensor:
    """Computes FP8 attention of SiLU of q, k and v, which on a GPU is not stored in 16 bits.

    Arguments, result and errors are those of `attention_keeping_e4m3`. Gradients are not recorded.
    """
    if not q.is_cuda:
        # torch computes SiLU of 16-bit numbers in fp32, as the kernel does.
        return ops.attention(F.silu(q), F.silu(k), F.silu(v), call, bias)
    codes = _quantize(q, k, v, call, silu=True)
    return attention_of_codes(codes, q.new_empty((*q.shape[:2], v.shape[2])), call, bias)


def _quantize(
    q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, silu: bool = False
) -> Quantized:
    sequences = (call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_q, call.seqused_k)
    op = torch.ops.hstu_attn.quantize_qkv
    return Quantized(*_run(op, q, k, v, *sequences, call.quant_mode, call.smooth_k, silu=silu))


def attention_of_codes(x: Quantized, out: Tensor, call: AttentionCall, bias: BiasTensors) -> Tensor:
    """Writes attention of the codes to `out`, on a GPU, and returns it.

    `call` has the mode in which they were quantized.
    """
    of_codes = _plain(call)._replace(
        q_descale=x.q_descale, k_descale=x.k_descale, v_descale=x.v_descale
    )
    _run(
        torch.ops.hstu_attn.forward_fp8,
        *(x.q8, x.k8, x.v8, *bias, *of_codes),
        x.q_norm,
        x.k_norm,
        x.q_mean_product if call.smooth_k else None,
        call.quant_mode in (1, 2),  # then norms of rows are limited
        out,
    )
    return out


def _plain(call: AttentionCall) -> AttentionCall:
    return call._replace(quant_mode=-1, smooth_k=False)


def _run(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        return op(*args, **kwargs)
    return ops.below_autograd(op, *args, **kwargs)
