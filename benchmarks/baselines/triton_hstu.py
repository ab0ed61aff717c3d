"""HSTU attention in Triton: the baseline that the CUDA kernels are measured against.

Jagged causal attention with contextual tokens and targets (in groups of one), in bf16, fp16 or
fp32. The kernels are in triton_kernels.py; this module tunes and calls them.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
from torch import Tensor

from . import triton_kernels

__all__ = ["HEAD_DIMS", "hstu_attention", "hstu_attention_backward", "hstu_attention_forward"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# ---------------------------------------------------------------------------------------------
# Tuning
# ---------------------------------------------------------------------------------------------


def config(rows: int, keys: int, warps: int, stages: int, tma: bool) -> triton.Config:
    tiles = {"ROWS": rows, "KEYS": keys, "TMA": tma}
    return triton.Config(tiles, num_warps=warps, num_stages=stages)


# Candidate configurations by head dim, for 16-bit inputs on Hopper. They were chosen from a few
# dozen because they fit into shared memory and spill the fewest registers.
FORWARD_CONFIGS = {
    32: [
        config(128, 64, 4, 3, False),
        config(128, 64, 4, 3, True),
        config(128, 128, 8, 3, True),
    ],
    64: [
        config(128, 64, 4, 3, False),
        config(128, 64, 4, 3, True),
        config(128, 64, 8, 3, True),
        config(128, 128, 8, 2, False),
        config(128, 128, 8, 2, True),
    ],
    128: [
        config(64, 64, 4, 2, True),
        config(128, 64, 8, 3, False),
        config(128, 64, 8, 3, True),
        config(128, 128, 8, 2, False),
        config(128, 128, 8, 2, True),
    ],
    256: [
        config(64, 64, 4, 2, True),
        config(128, 32, 8, 3, True),
        config(128, 64, 8, 2, False),
        config(128, 64, 8, 2, True),
    ],
}
BACKWARD_CONFIGS = {
    32: [
        config(64, 64, 4, 2, True),
        config(64, 128, 8, 2, False),
        config(64, 128, 8, 2, True),
    ],
    64: [
        config(64, 64, 4, 2, False),
        config(64, 64, 4, 2, True),
        config(64, 128, 8, 2, False),
        config(64, 128, 8, 2, True),
        config(128, 128, 8, 2, True),
    ],
    128: [
        config(32, 128, 8, 2, True),
        config(64, 64, 8, 2, True),
        config(64, 64, 4, 2, True),
        config(64, 128, 8, 2, False),
        config(64, 128, 8, 2, True),
    ],
    256: [
        config(16, 64, 8, 2, True),
        config(32, 64, 8, 2, False),
        config(32, 64, 8, 2, True),
        config(64, 64, 8, 1, False),
    ],
}
FP32_CONFIG = config(32, 32, 4, 1, False)  # not tuned; fp32 is only for checking results
HEAD_DIMS = tuple(FORWARD_CONFIGS)


def _tuned(
    kernel: Any, configs: dict[int, list[triton.Config]], reset_to_zero: list[str] | None = None
) -> Any:
    """Returns the kernel, tuned once for each head dim, dtype, bucket of lengths and kind of mask.

    In the interpreter it is not tuned, and always uses `FP32_CONFIG`.
    """

    def choose(_: Any, arguments: dict[str, Any], **constants: Any) -> list[triton.Config]:
        if arguments["q"].dtype == torch.float32:
            return [FP32_CONFIG]
        return configs[constants["DIM"]]

    every = [config for of_dim in configs.values() for config in of_dim]
    return triton.autotune(
        [FP32_CONFIG] if INTERPRETED else every,
        key=["DIM", "length_bucket"],
        reset_to_zero=reset_to_zero,
        prune_configs_by={"early_config_prune": choose},
    )(kernel)


forward_kernel = _tuned(triton_kernels.forward, FORWARD_CONFIGS)
backward_kernel = _tuned(triton_kernels.backward, BACKWARD_CONFIGS, ["dq"])


def _length_bucket(max_seqlen: int) -> int:
    """Returns the upper limit of the lengths that share one tuned configuration."""
    return next((bucket for bucket in (512, 1024, 4096) if max_seqlen <= bucket), 16384)


# ---------------------------------------------------------------------------------------------
# The operator
# ---------------------------------------------------------------------------------------------


def _check(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        heads, dim = x.shape[1:]
        if dim not in HEAD_DIMS:
            raise ValueError(f"{name}: expected a head dim of {HEAD_DIMS}, got {dim}")
        row_bytes = x.stride(0) * x.element_size()
        if x.stride()[1:] != (dim, 1) or row_bytes % 16 or x.data_ptr() % 16:
            raise ValueError(
                f"{name}: expected {heads} x {dim} contiguous elements in each row, and rows that "
                f"start at multiples of 16 bytes, got strides {x.stride()}"
            )


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocates the tensor descriptors that the programs of one launch make."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def _constants(q: Tensor) -> dict[str, Any]:
    exact = q.dtype == torch.float32
    return {
        "HEADS": q.shape[1],
        "DIM": q.shape[2],
        "HARDWARE": not (exact or INTERPRETED or torch.version.hip),
        "PRECISION": "ieee" if exact else "tf32",
    }


def _launch(kernel: Any, tile: str, max_seqlen: int, *arguments: Any) -> None:
    """Runs a kernel for every sequence, head and `tile` of the longest sequence."""
    q, offsets = arguments[0], arguments[7 if kernel is backward_kernel else 4]
    programs = (len(offsets) - 1) * q.shape[1]
    if not programs or not max_seqlen:
        return
    triton.set_allocator(_scratch)  # for this thread; autograd has its own

    def grid(config: dict[str, Any]) -> tuple[int, int]:
        return programs, triton.cdiv(max_seqlen, config[tile])

    kernel[grid](*arguments, _length_bucket(max_seqlen), **_constants(q))


def hstu_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scaling_seqlen: int,
    num_contexts: Tensor | None = None,
    num_targets: Tensor | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """Computes the output without autograd.

    Args:
        q, k, v: `(total, heads, D)`, bf16, fp16 or fp32, with `D` 32, 64, 128 or 256; rows may be
            strided, by multiples of 16 bytes.
        cu_seqlens: int32 or int64 `(batch + 1,)`: offsets of the sequences.
        max_seqlen: at least the longest sequence.
        scaling_seqlen: the output is divided by this.
        num_contexts: int32 or int64 `(batch,)`: contextual tokens of each sequence.
        num_targets: the same for targets.
        alpha: factor of the scores.

    Returns:
        `(total, heads, D)` of q's dtype.
    """
    _check(q=q, k=k, v=v)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _launch(
        forward_kernel, "ROWS", max_seqlen, q, k, v, out, cu_seqlens, num_contexts, num_targets,
        *(x.stride(0) for x in (q, k, v, out)), alpha / 2, 1 / scaling_seqlen,
    )  # fmt: skip
    return out


def hstu_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scaling_seqlen: int,
    num_contexts: Tensor | None = None,
    num_targets: Tensor | None = None,
    alpha: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of q, k and v; arguments as in `hstu_attention_forward`."""
    _check(dout=dout, q=q, k=k, v=v)
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
    tensors = (q, k, v, dout, dq, dk, dv)
    _launch(
        backward_kernel, "KEYS", max_seqlen, *tensors, cu_seqlens, num_contexts, num_targets,
        *(x.stride(0) for x in tensors), alpha / 2, 1 / scaling_seqlen,
    )  # fmt: skip
    return dq.to(q.dtype), dk, dv


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.arguments = arguments
        return hstu_attention_forward(q, k, v, *arguments)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        gradients = hstu_attention_backward(dout.contiguous(), *ctx.saved_tensors, *ctx.arguments)
        return (*gradients, *(None for _ in ctx.arguments))


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scaling_seqlen: int,
    num_contexts: Tensor | None = None,
    num_targets: Tensor | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """Computes `hstu_attention_forward`, differentiable in q, k and v."""
    arguments = (cu_seqlens, max_seqlen, scaling_seqlen, num_contexts, num_targets, alpha)
    out: Tensor = _Attention.apply(q, k, v, *arguments)
    return out
