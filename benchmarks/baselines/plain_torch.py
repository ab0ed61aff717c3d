"""Jagged causal HSTU attention in plain torch: baselines of this library's kernels.

Each function here prepares, for one batch, a function from packed q, k and v to the output. Tensors
that do not depend on q, k and v (masks, indices) are made once, beforehand, and their time and
memory are not counted. All of these functions compute

    out = (causal * silu(alpha * Q K^T) / N) V            N: the length of the longest sequence
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import hstu_attn

from ..cases import Case, Inputs

__all__ = ["NAMES", "Attention", "gradients", "make", "padded_bytes"]

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def make(name: str, case: Case) -> Attention:
    """Returns one of `NAMES` for the batch of `case`."""
    return _MAKERS[name](case)


def gradients(attention: Attention, inputs: Inputs) -> tuple[Tensor, ...]:
    """Computes the gradients of q, k and v."""
    leaves = inputs.leaves()
    out = attention(*leaves)
    return torch.autograd.grad(out, leaves, inputs.dout)


def padded_bytes(case: Case) -> int:
    """Returns the bytes of all score-sized tensors that the padded backward holds at once.

    These are the saved scores, their silu and the masked weights and, at the peak, two gradients.
    """
    scores = case.batch * case.heads * max(case.lengths) ** 2
    return 5 * scores * case.dtype.itemsize


def _hstu_attn(case: Case) -> Attention:
    offsets = torch.tensor([0, *case.lengths]).cumsum(0)
    longest = max(case.lengths)
    mask = hstu_attn.Mask.causal()

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = hstu_attn.hstu_attention(
            q, k, v, cu_seqlens_q=offsets, max_seqlen_q=longest, mask=mask, alpha=case.alpha
        )
        return out

    return attention


def _causal_weights(case: Case) -> Tensor:
    """Returns 1/N where a row sees a key and 0 elsewhere: the mask and the scale in one factor."""
    longest = max(case.lengths)
    return (torch.ones(longest, longest).tril() / longest).to(case.dtype)


def _per_sequence(case: Case) -> Attention:
    """Computes two torch matmuls for each sequence.

    Views come from `split`, whose backward writes each gradient once; `alpha` is part of the first
    product; without gradients, operations on the scores are in place.
    """
    lengths = case.lengths
    weights = _causal_weights(case)
    masks = [weights[:length, :length] for length in lengths]
    unused = torch.zeros((), dtype=case.dtype)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        in_place = not torch.is_grad_enabled()
        pieces = [x.transpose(0, 1).split(lengths, 1) for x in (q, k, v)]
        outputs = []
        for q_b, k_b, v_b, mask in zip(*pieces, masks, strict=True):
            scores = torch.baddbmm(unused, q_b, k_b.transpose(1, 2), beta=0, alpha=case.alpha)
            activated = F.silu(scores, inplace=in_place)
            visible = activated.mul_(mask) if in_place else activated * mask
            outputs.append(torch.bmm(visible, v_b).transpose(0, 1))
        return torch.cat(outputs)

    return attention


def _padded(case: Case) -> Attention:
    """Computes two torch matmuls for the whole batch, padded to its longest sequence."""
    batch, longest = case.batch, max(case.lengths)
    weights = _causal_weights(case)
    rows = torch.cat([torch.arange(n) + b * longest for b, n in enumerate(case.lengths)])

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        in_place = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
        heads, head_dim = q.shape[1:]

        def pad(x: Tensor) -> Tensor:
            padded = x.new_zeros(batch * longest, heads, head_dim).index_copy(0, rows, x)
            return padded.view(batch, longest, heads, head_dim).transpose(1, 2).flatten(0, 1)

        scores = torch.bmm(pad(q * case.alpha), pad(k).transpose(1, 2))
        activated = F.silu(scores, inplace=in_place)
        visible = activated.mul_(weights) if in_place else activated * weights
        padded_out = torch.bmm(visible, pad(v)).view(batch, heads, longest, head_dim)
        return padded_out.transpose(1, 2).flatten(0, 1).index_select(0, rows)

    return attention


def _compiled(case: Case) -> Attention:
    """Returns the padded function under `torch.compile`, compiled for this batch.

    It is compiled at the first call without and at the first call with gradients.
    """
    torch._dynamo.reset()  # torch compiles a function only a limited number of times
    compiled: Attention = torch.compile(_padded(case), dynamic=False)
    return compiled


_MAKERS: dict[str, Callable[[Case], Attention]] = {
    "hstu_attn": _hstu_attn,
    "per sequence": _per_sequence,
    "padded": _padded,
    "compiled": _compiled,
}
NAMES = tuple(_MAKERS)
