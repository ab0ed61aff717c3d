"""Checks shared by the tests of GPU kernels."""

from __future__ import annotations

from typing import Any

import torch

from hstu_attn import hstu_attention
from hstu_attn.testing import Batch, check_against_reference

DTYPES = (torch.bfloat16, torch.float16)
DENSE_BIASES = (None, "rab", "rab-1-head", "rab-fp32", "rab-strided")


def random_dout(batch: Batch) -> torch.Tensor:
    shape = (*batch.q.shape[:2], batch.v.shape[2])
    return torch.empty(shape, dtype=batch.q.dtype, device=batch.q.device).uniform_(-1, 1)


def check(batch: Batch, **extra: Any) -> None:
    """Checks a batch with both orders of summation in the backward.

    The second call is limited to 4 multiprocessors, so that small batches use the tile sizes and
    the list of work tiles of large batches.
    """
    check_against_reference(hstu_attention, batch, **extra)
    margin = torch.cuda.get_device_properties(0).multi_processor_count - 4
    check_against_reference(hstu_attention, batch, deterministic=True, sm_margin=margin, **extra)
