"""Tests of the accuracy that docs/kernels/cpu.md states, on every instruction set."""

from __future__ import annotations

import pytest
import torch

from hstu_attn import DenseBias, hstu_attention

LEVELS = ("baseline", "avx2", "avx512", "avx512bf16", "amx")
# The output is rounded once; in fp32 the rounding of large exponents X dominates.
ALLOWED = {torch.float32: 2.0**-17, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def silu(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Computes silu(X) by attention: X is the bias of one query and one key, q is 0 and v is 1."""
    count = x.shape[0]
    q, v = torch.zeros(count, 1, 8, dtype=dtype), torch.ones(count, 1, 8, dtype=dtype)
    bias = DenseBias(x.view(count, 1, 1, 1))
    offsets = torch.arange(count + 1)
    return hstu_attention(q, q, v, cu_seqlens_q=offsets, max_seqlen_q=1, bias=bias)[:, 0, 0]


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Sets the instruction set of the kernels."""
    monkeypatch.setenv("HSTU_ATTN_CPU_ISA", request.param)
    try:
        silu(torch.zeros(1), torch.float32)
    except ValueError as error:
        if "a level that this processor supports" in str(error):
            pytest.skip(f"this processor has no {request.param}")
        raise
    return request.param


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", ALLOWED)
def test_the_relative_error_of_silu(dtype):
    """The relative error is as small for strongly negative X, where silu is near 0."""
    lowest = -14 if dtype == torch.float16 else -87  # below, silu is a subnormal number
    x = torch.cat([torch.empty(20000).uniform_(lowest, 40), torch.linspace(-9, -7, 2001)])
    found = silu(x, dtype).double()
    exact = x.double() * torch.sigmoid(x.double())
    normal = exact.abs() >= torch.finfo(dtype).tiny
    error = ((found - exact) / exact).abs()[normal].max().item()
    assert error <= 1.01 * ALLOWED[dtype]


@pytest.mark.usefixtures("level")
def test_a_long_sum_is_made_of_partial_sums():
    """In fp32 over 256 dims, a single sequential sum would have an error of 3.6 half ulps."""
    q, k = (torch.rand(1024, 1, 256) for _ in range(2))
    v, offsets = torch.ones(1024, 1, 8), torch.arange(1025)
    found = hstu_attention(q, k, v, cu_seqlens_q=offsets, max_seqlen_q=1)[:, 0, 0].double()
    exact = (q.double() * k.double()).sum((1, 2))  # silu(x) is x for so large an x
    error = ((found - exact) / exact).square().mean().sqrt().item()
    assert error <= 2 * 2.0**-24
