"""Attention composed of torch functions, called like `hstu_attention`, on any device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hstu_attn import composed, hstu_attention, slots
from hstu_attn.bias import Bias
from hstu_attn.call import AttentionCall, bias_tensors, bias_times, make_call
from hstu_attn.ops import NO_PAGES
from hstu_attn.paged import PagedKV
from hstu_attn.testing import Batch


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


def chunked_attention(q: Tensor, k: Tensor, v: Tensor, alpha: float, chunk: int = 1024) -> Tensor:
    """Computes causal attention of padded `(batch, heads, length, head dim)` in a simple way.

    This is the baseline of speed. Autograd saves O(N^2) elements for the backward.
    """
    length = q.shape[2]
    results = []
    for first in range(0, length, chunk):
        end = min(first + chunk, length)
        x = torch.matmul(q[:, :, first:end], k[:, :, :end].transpose(2, 3)) * alpha
        hidden = torch.ones(end - first, end, dtype=torch.bool, device=q.device).triu(first + 1)
        weights = F.silu(x).masked_fill(hidden, 0)
        results.append(torch.matmul(weights, v[:, :, :end]) * (1 / length))
    return torch.cat(results, 2)


class Operations(TorchDispatchMode):
    """Counts operations that compute something, and the elements of the largest new tensor.

    On a GPU each operation is at least one kernel. Views and allocations are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.largest = 0

    @property
    def count(self) -> int:
        return self.names.total()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        results = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        for result in results if isinstance(results, tuple | list) else [results]:
            is_new = not func.is_view and not any(result is argument for argument in args)
            if isinstance(result, Tensor) and is_new:
                self.largest = max(self.largest, result.numel())
        if not func.is_view and name != "_unsafe_view" and "empty" not in name:
            self.names[name] += 1
        return results


def count_composed(batch: Batch) -> tuple[Operations, Operations]:
    """Counts the operations of a batch's forward and backward; it may have meta tensors."""
    leaves = batch.q, batch.k, batch.v, *bias_tensors(batch.bias)
    arguments = {n: x for n, x in batch.options().items() if n not in ("bias", "paged_kv")}
    call = make_call(times=bias_times(batch.bias), **arguments)
    out = torch.empty_like(batch.v)
    gradients = [None if leaf is None else torch.empty_like(leaf) for leaf in leaves]
    with Operations() as forward:
        composed.forward(*leaves, *call, *NO_PAGES, out)
    with Operations() as backward:
        composed.backward(out, *leaves, *call, *gradients)
    return forward, backward


def count_chunked(lengths: list[int], heads: int, dim: int) -> tuple[Operations, Operations]:
    """Counts the operations of `chunked_attention`, forward and backward, on meta tensors.

    Sequences of equal lengths are one batch; otherwise they are computed one by one.
    """
    count = len(lengths) if len(set(lengths)) == 1 else 1
    rows = [count * length for length in lengths[: len(lengths) // count]]
    q, k, v = (
        torch.empty(sum(rows), heads, dim, device="meta", requires_grad=True) for _ in range(3)
    )
    with Operations() as forward:
        parts = zip(*(x.split(rows) for x in (q, k, v)), strict=True)
        results = [
            chunked_attention(
                *(x.unflatten(0, (count, -1)).transpose(1, 2).contiguous() for x in part),
                dim**-0.5,
            )
            for part in parts
        ]
        out = torch.cat([x.transpose(1, 2).flatten(0, 1) for x in results])
    with Operations() as backward:
        out.backward(torch.empty_like(out))
    return forward, backward


def attention_of(device: str) -> Callable[..., Tensor]:
    """Returns the function that calls the composition: on a GPU, through C++, the public one."""
    return hstu_attention if device == "cuda" else composed_attention


def group_in_order(patch: pytest.MonkeyPatch) -> None:
    """Makes the CPU group sequences as a GPU does, without reading their lengths."""

    def divide(batch: slots.Batch, ranges: Any) -> Iterator[Any]:
        return batch._in_order(ranges, composed.CHUNK_ELEMENTS // 4)

    patch.setattr(slots.Batch, "_by_length", divide)
