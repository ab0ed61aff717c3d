"""Calls of `torch.ops.hstu_attn.*` for a `Batch`, by the names of the schema."""

from __future__ import annotations

from typing import Any

import torch
from torch.torch_version import TorchVersion

from hstu_attn import DenseBias
from hstu_attn.testing import Batch

ops = torch.ops.hstu_attn

# What a bad argument raises here: the type is lost on the way from C++ in newer releases of torch.
BAD_ARGUMENT = ValueError if TorchVersion(torch.__version__) < (2, 15) else RuntimeError

_PAGED = ("kv_cache", "page_offsets", "page_ids", "last_page_lens", "kv_scales")


def arguments(batch: Batch, *, paged: bool) -> dict[str, Any]:
    """Everything that the forward is called with; `paged` for the ops that have those arguments."""
    mask, bias = batch.mask, batch.bias
    is_dense = isinstance(bias, DenseBias)
    relative = None if is_dense else bias
    result = {
        "q": batch.q,
        "k": batch.k,
        "v": batch.v,
        "cu_seqlens_q": batch.cu_seqlens_q,
        "cu_seqlens_k": batch.cu_seqlens_k,
        "seqused_q": batch.seqused_q,
        "seqused_k": batch.seqused_k,
        "max_seqlen_q": batch.max_seqlen_q,
        "max_seqlen_k": batch.max_seqlen_k,
        "scaling_seqlen": batch.scaling_seqlen,
        "attn_scale": batch.attn_scale,
        "alpha": batch.alpha,
        "num_contexts": mask.num_contexts,
        "num_targets": mask.num_targets,
        "target_group_size": mask.target_group_size,
        "window_left": mask.window_size[0],
        "window_right": 0 if mask.func_causal else mask.window_size[1],
        "min_full_attn_seq_len": mask.min_full_attn_seq_len,
        "row_spans": mask.row_spans,
        "func": mask.func,
        "rab": bias.rab if is_dense else None,
        "pos_weight": getattr(relative, "pos_weight", None),
        "ts_weight": getattr(relative, "ts_weight", None),
        "timestamps": getattr(relative, "timestamps", None),
        "row_timestamps": getattr(relative, "row_timestamps", None),
        "ts_thresholds": getattr(relative, "thresholds", None),
    }
    if paged:
        result |= {name: getattr(batch.paged_kv, name, None) for name in _PAGED}
    descales = dict.fromkeys(("q_descale", "k_descale", "v_descale"))
    deterministic = torch.are_deterministic_algorithms_enabled()
    return {
        **result,
        "quant_mode": -1,
        **descales,
        "deterministic": deterministic,
        "sm_margin": 0,
        "strict": True,
    }


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
    """Writes `gradients`: dq, dk, dv, and drab, dpos_weight, dts_weight where wanted."""
    outputs = dict.fromkeys(("dq", "dk", "dv", "drab", "dpos_weight", "dts_weight")) | gradients
    ops.hstu_varlen_bwd_out(dout=dout, **{**arguments(batch, paged=False), **changes}, **outputs)
