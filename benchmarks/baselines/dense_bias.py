"""HSTU attention with a relative bias that torch functions first expand to a dense one.

Without a kernel that computes the bias, a model makes `(batch, heads, N, N)` weights from its two
tables in each call, and autograd sums their gradient by position and by bucket.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hstu_attn import DenseBias, RelativeBias
from hstu_attn import hstu_attention as attention_with_bias
from hstu_attn.bias import thresholds_tensor, time_bucket, time_difference

__all__ = ["dense_form", "hstu_attention"]


def dense_form(bias: RelativeBias, cu_seqlens: Tensor, longest: int, dtype: torch.dtype) -> Tensor:
    """Returns the dense form of a relative bias with default thresholds and row times.

    Args:
        bias: the tables, and the times of keys, which are also the times of rows.
        cu_seqlens: `(batch + 1,)`, of rows and of keys.
        longest: the longest sequence, in tokens.
        dtype: the dtype of the result.

    Returns:
        `(batch, heads, longest, longest)`; weights past a sequence are arbitrary.
    """
    place = torch.arange(longest, device=cu_seqlens.device)
    total: Tensor | float = 0.0
    # NOTE: F.embedding's backward sorts the indices. The backward of indexing with a tensor adds
    # scores one by one to an entry, which takes seconds at 16 x 2048.
    if bias.pos_weight is not None:
        reach = bias.pos_weight.shape[1] // 2
        index = (place - place[:, None]).clamp(-reach, reach) + reach
        total = F.embedding(index, bias.pos_weight.t())
    if bias.ts_weight is not None:
        assert bias.timestamps is not None
        last = cu_seqlens[1:, None] - 1
        rows = cu_seqlens[:-1, None] + place
        times = bias.timestamps[torch.minimum(rows, last)]
        row_times = bias.timestamps[torch.minimum(rows + 1, last)]
        difference = time_difference(row_times[:, :, None], times[:, None, :])
        thresholds = thresholds_tensor(times.device)
        bucket = time_bucket(difference, thresholds, bias.ts_weight.shape[1])
        total = total + F.embedding(bucket, bias.ts_weight.t())
    assert isinstance(total, Tensor)
    shape = (cu_seqlens.shape[0] - 1, longest, longest, total.shape[-1])
    return total.expand(shape).permute(0, 3, 1, 2).to(dtype, memory_format=torch.contiguous_format)


def hstu_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Computes `hstu_attn.hstu_attention` with a relative bias in its dense form."""
    bias, longest = options["bias"], options["max_seqlen_q"]
    rab = dense_form(bias, options["cu_seqlens_q"], longest, q.dtype)
    return attention_with_bias(q, k, v, **options | {"bias": DenseBias(rab)})
