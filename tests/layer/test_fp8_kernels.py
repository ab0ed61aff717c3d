"""Tests of the Triton kernels that write e4m3, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hstu_attn import fp8_linear
from tests.helpers.triton_interpreter import interpreter, round_e4m3_as_gpus_do

pytest.importorskip("triton", reason="needs triton")
from hstu_attn.fused import triton_steps

DEVICES = [
    pytest.param("cpu", marks=interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu(kernels=False)),
]


def bits(codes: Tensor) -> Tensor:
    """Returns the codes as bytes, all NaN as one."""
    return torch.where(codes.float().isnan(), 0x7F, codes.view(torch.uint8)).cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(0, 16), (1, 16), (37, 48), (3, 2064), (2, 8320)])
def test_quantize_rows(rows, width, dtype, device, monkeypatch):
    if device == "cpu":
        round_e4m3_as_gpus_do(monkeypatch)
    x = torch.randn(rows, width) * torch.randn(rows, 1).mul(8).exp()
    if rows > 2:
        x[0] = 0
        x[1, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        x[2] *= 1e-15
    x = x.to(dtype)
    wanted = fp8_linear.quantize_rows(x)
    sliced = torch.cat([x, x], 1).to(device)[:, :width]
    for source in (sliced, sliced.t().contiguous().t()):
        codes, descales = triton_steps.quantize_rows(source)
        assert torch.equal(descales.cpu(), wanted[1])
        assert torch.equal(bits(codes), bits(wanted[0]))
