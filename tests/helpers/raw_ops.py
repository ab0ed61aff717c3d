"""Calls `torch.ops.hstu_attn.*` for a `Batch`, with the argument names of the schema."""

from __future__ import annotations

from typing import Any

import torch
from torch.torch_version import TorchVersion

from hstu_attn.call import bias_tensors, bias_times, make_call
from hstu_attn.ops import NO_PAGES
from hstu_attn.testing import Batch

ops = torch.ops.hstu_attn

# The error of a bad argument: torch >= 2.15 turns C++ exceptions of any type into RuntimeError.
BAD_ARGUMENT = ValueError if TorchVersion(torch.__version__) < (2, 15) else RuntimeError

_PAGED = ("kv_cache", "page_offsets", "page_ids", "last_page_lens", "kv_scales")


def arguments(batch: Batch, *, paged: bool) -> dict[str, Any]:
    """Returns all arguments of the forward; with `paged`, also those of the paged operators."""
    options = batch.options()
    bias, pages = options.pop("bias"), options.pop("paged_kv")
    result = {
        "q": batch.q,
        "k": batch.k,
        "v": batch.v,
        **dict(zip(("rab", "pos_weight", "ts_weight"), bias_tensors(bias), strict=True)),
        **make_call(**options, times=bias_times(bias))._asdict(),
    }
    if paged:
        values = NO_PAGES if pages is None else pages.arguments
        result |= dict(zip(_PAGED, values, strict=True))
    return result


def forward(batch: Batch, **changes: Any) -> torch.Tensor:
    return ops.hstu_varlen_fwd(**{**arguments(batch, paged=True), **changes})


def forward_out(batch: Batch, out: torch.Tensor, **changes: Any) -> None:
    ops.hstu_varlen_fwd_out(**{**arguments(batch, paged=True), **changes}, out=out)


def backward(
    batch: Batch, dout: torch.Tensor, *, has_drab: bool, has_dtables: bool, **changes: Any
) -> tuple[torch.Tensor, ...]:
    return ops.hstu_varlen_bwd(
        dout=dout,
        **{**arguments(batch, paged=False), **changes},
        has_drab=has_drab,
        has_dtables=has_dtables,
    )


def backward_out(
    batch: Batch, dout: torch.Tensor, gradients: dict[str, torch.Tensor | None], **changes: Any
) -> None:
    """Computes into `gradients`: dq, dk, dv, and drab, dpos_weight, dts_weight if not None."""
    outputs = dict.fromkeys(("dq", "dk", "dv", "drab", "dpos_weight", "dts_weight")) | gradients
    ops.hstu_varlen_bwd_out(dout=dout, **{**arguments(batch, paged=False), **changes}, **outputs)
