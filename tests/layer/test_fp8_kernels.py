"""Tests of the Triton kernels that write e4m3, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hstu_attn import fp8_linear
from hstu_attn.fused.options import GateOptions
from tests.helpers.triton_interpreter import interpreter, round_e4m3_as_gpus_do

pytest.importorskip("triton", reason="needs triton")
from hstu_attn.fused import triton_steps

DEVICES = [
    pytest.param("cpu", marks=interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu(kernels=False)),
]


def bits(codes: Tensor) -> Tensor:
    """Returns the codes as bytes, with a single byte for all NaN."""
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


def assert_quantized(result: tuple[Tensor | None, fp8_linear.Factor], wanted: Tensor, keep: bool):
    """Checks codes and descales against the 16-bit rows, which are returned on request."""
    kept, (codes, descales) = result
    assert (kept is not None) == keep
    if kept is not None:
        torch.testing.assert_close(kept, wanted, rtol=0, atol=0, equal_nan=True)
    of_codes, of_rows = fp8_linear.quantize_rows(wanted.cpu())
    assert torch.equal(descales.cpu(), of_rows)
    assert torch.equal(bits(codes), bits(of_codes))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keep", [False, True], ids=["codes", "both"])
@pytest.mark.parametrize("centered", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize(("rows", "width"), [(0, 16), (37, 48), (3, 2064)])
def test_quantized_layer_norm(rows, width, centered, keep, device, monkeypatch):
    if device == "cpu":
        round_e4m3_as_gpus_do(monkeypatch)
    x = torch.randn(rows, width, device=device).bfloat16()
    if rows > 2:
        x[1, 3] = torch.nan
    weight, bias = torch.randn(width, device=device), torch.randn(width, device=device)
    for of_norm in ((weight, bias), (None, None)):
        wanted = triton_steps.layer_norm(x, *of_norm, 1e-6, centered)
        found = triton_steps.quantized_layer_norm(x, *of_norm, 1e-6, centered, keep)
        assert_quantized(found, wanted, keep)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keep", [False, True], ids=["codes", "both"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("parts", [("gated",), ("u", "x", "normed", "gated")], ids=["one", "four"])
def test_quantized_gate(parts, groups, dropout, keep, device, monkeypatch):
    if device == "cpu":
        round_e4m3_as_gpus_do(monkeypatch)
    attention, u = (torch.randn(37, 48, device=device).bfloat16() for _ in range(2))
    attention[1, 3] = torch.nan
    size = 48 if groups == 1 else groups
    weight, bias = torch.randn(size, device=device), torch.randn(size, device=device)
    seed = torch.tensor([7], device=device) if dropout else None
    options = GateOptions(groups, 1e-6, parts, dropout, activates_u=dropout > 0)
    inputs = (attention, u, weight, bias, seed, options)
    assert_quantized(triton_steps.quantized_gate(*inputs, keep), triton_steps.gate(*inputs), keep)
