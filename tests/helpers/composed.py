"""The composition of torch's functions as a function like `hstu_attention`, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hstu_attn import hstu_attention
from hstu_attn.bias import Bias
from hstu_attn.call import AttentionCall, bias_tensors, bias_times, make_call
from hstu_attn.ops import NO_PAGES
from hstu_attn.paged import PagedKV


class _Composed(torch.autograd.Function):
    """Calls the operators that C++ calls for fp32 and fp64 on a GPU."""

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
        pages: tuple[Tensor | None, ...],
    ) -> Tensor:
        tensors = (q, k, v, rab, pos_weight, ts_weight)
        ctx.save_for_backward(*tensors)
        ctx.call = call
        out = q.new_empty((q.shape[0], q.shape[1], v.shape[2]))
        assert torch.ops.hstu_attn.composed_fwd(*tensors, *call, *pages, out)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        gradients = [None if tensor is None else torch.empty_like(tensor) for tensor in tensors]
        for n in (4, 5):  # those of the tables are fp32
            gradients[n] = None if gradients[n] is None else gradients[n].float()
        assert torch.ops.hstu_attn.composed_bwd(dout, *tensors, *ctx.call, *gradients)
        results = (
            None if gradient is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(gradients, tensors, strict=True)
        )
        return (*results, None, None)


def composed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Bias | None = None,
    paged_kv: PagedKV | None = None,
    **arguments: Any,
) -> Tensor:
    call = make_call(times=bias_times(bias), **arguments)
    pages = NO_PAGES if paged_kv is None else paged_kv.arguments
    return _Composed.apply(q, k, v, *bias_tensors(bias), call, pages)


def attention_of(device: str) -> Callable[..., Tensor]:
    """Returns what reaches the composition: on a GPU the public function, which C++ hands to it."""
    return hstu_attention if device == "cuda" else composed_attention
