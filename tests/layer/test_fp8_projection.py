"""Tests of the e4m3 linear maps with a layer's epilogues: `project` and `add_linear`."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hstu_attn import FP8, HSTULayerConfig, Quantization, fp8_linear
from hstu_attn.fp8_linear import Factor, add_linear, product, project, quantize_rows
from hstu_attn.fused import forward
from hstu_attn.layer import HSTULayer
from hstu_attn.quantization import E4M3, Quantized, dequantized_rows, max_blocks
from hstu_attn.testing import poisoned_memory
from tests.helpers.fp8 import relative_error
from tests.helpers.layers import run, with_config

BF16 = torch.bfloat16
NORM_LIMIT = 240  # Fp8Params::kHalfSumNorm
RAGGED = (0, 1, 127, 128, 129, 300, 0, 515)


@pytest.fixture
def hopper() -> None:
    if os.environ["HSTU_ATTN_FORCE_ARCH"] != "90":
        pytest.skip("one architecture is enough: the kernel is for sm90 alone")


def factors(total: int, depth: int, columns: int, dtype: torch.dtype = BF16) -> dict[str, Any]:
    """Returns the first arguments of `project`, on a GPU."""
    x = torch.randn(total, depth, dtype=dtype, device="cuda")
    weight = torch.randn(columns, depth, device="cuda") / depth**0.5
    bias = 0.1 * torch.randn(columns, device="cuda")
    return {"x": quantize_rows(x), "weight": quantize_rows(weight), "bias": bias}


def exact_product(x: Factor, weight: Factor, bias: Tensor | None) -> Tensor:
    x_values, weight_values = (codes.double() * descales for codes, descales in (x, weight))
    return x_values @ weight_values.t() + (0 if bias is None else bias.double())


def offsets_of(
    lengths: tuple[int, ...], first: int = 0, dtype: torch.dtype = torch.int64
) -> Tensor:
    return (first + torch.tensor([0, *lengths]).cumsum(0)).to("cuda", dtype)


def two_steps(z: Tensor, cu_seqlens: Tensor, heads: int) -> Quantized:
    """Quantizes SiLU of v, q and k of z with `quantize_qkv`."""
    _, v, q, k = (part.unflatten(1, (heads, -1)) for part in z.chunk(4, dim=1))
    arguments = (q, k, v, cu_seqlens, cu_seqlens, None, None, 2, False)
    return Quantized(*torch.ops.hstu_attn.quantize_qkv(*arguments, silu=True))


def values_of(codes: Quantized, cu_seqlens: Tensor) -> dict[str, Tensor]:
    """Returns the dequantized rows of sequences, fp64."""
    begin, end = cu_seqlens[0].item(), cu_seqlens[-1].item()

    def written(x: Tensor, dim: int = 0) -> Tensor:
        """Returns `x` with zeros outside the sequences, where the kernel writes nothing."""
        y = torch.zeros_like(x)
        y.narrow(dim, begin, end - begin).copy_(x.narrow(dim, begin, end - begin))
        return y

    codes = codes._replace(
        q8=written(codes.q8), k8=written(codes.k8), q_descale=written(codes.q_descale, 1)
    )
    head_dim = codes.q8.shape[2]
    rows = dequantized_rows(codes.kept, cu_seqlens, head_dim, torch.double)
    return {n: x[begin:end] for n, x in zip("qkv", rows, strict=True)}


def check_codes(found: Quantized, z: Tensor, cu_seqlens: Tensor, heads: int) -> None:
    """Checks codes, descales and norms against SiLU of `z`, fp64, and `quantize_qkv`."""
    usual = values_of(two_steps(z.to(BF16), cu_seqlens, heads), cu_seqlens)
    values = values_of(found, cu_seqlens)
    begin, end = cu_seqlens[0].item(), cu_seqlens[-1].item()
    _, v, q, k = (F.silu(part).unflatten(1, (heads, -1)) for part in z.double().chunk(4, dim=1))
    for name, wanted in (("q", q), ("k", k), ("v", v)):
        wanted = wanted[begin:end]
        own = relative_error(values[name], wanted)
        other = relative_error(usual[name], wanted)
        assert own < 1.05 * other + 1e-3, (name, own, other)
    norms = found.q8[begin:end].double().norm(dim=2)
    assert norms.max() <= NORM_LIMIT
    bound = found.q_norm.t()[begin:end].double()
    assert (bound >= norms * found.q_descale.t()[begin:end] * (1 - 1e-6)).all()
    assert found.k8[begin:end].double().norm(dim=2).max() <= NORM_LIMIT
    k_norms = values["k"].norm(dim=2)
    for b, first in enumerate(cu_seqlens[:-1].tolist()):
        last = cu_seqlens[b + 1].item()
        for n, row in enumerate(range(first, last, 128)):
            block = first // 128 + b + n
            rows = slice(row - begin, min(row + 128, last) - begin)
            assert (found.k_norm[:, block] >= k_norms[rows].amax(0) * (1 - 1e-6)).all()
            ends = found.v8[block].view(torch.uint8).count_nonzero(dim=(0, 1))
            assert ends.count_nonzero() <= last - row  # keys past the end are zero


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "head_dim", "depth"),
    [(4, 64, 16), (4, 64, 512), (2, 128, 144), (6, 128, 256), (1, 256, 1024), (4, 256, 128)],
)
def test_project(heads, head_dim, depth, hopper):
    width = heads * head_dim
    for lengths, first, after in (
        (RAGGED, 3, 200),
        ((640,) * 3, 0, 0),
        ((), 0, 130),
        ((5000,), 0, 1),
    ):
        total = first + sum(lengths) + after
        given = factors(total, depth, 4 * width)
        dtype = torch.int32 if first else torch.int64
        cu_seqlens = offsets_of(lengths, first, dtype)
        with poisoned_memory("cuda"):
            z, codes = project(**given, cu_seqlens=cu_seqlens, heads=heads, keeps_z=True)
            u, again = project(**given, cu_seqlens=cu_seqlens, heads=heads, keeps_z=False)
        exact = exact_product(**given)
        assert relative_error(z, exact) < 3e-3
        torch.testing.assert_close(z.double(), exact, rtol=1e-2, atol=1e-2 * exact.std().item())
        assert torch.equal(u, z[:, :width])
        if lengths:
            check_codes(codes, exact, cu_seqlens, heads)
            values, same = values_of(codes, cu_seqlens), values_of(again, cu_seqlens)
            assert all(torch.equal(values[name], same[name]) for name in values)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1e-12, 1.0, 300.0, 1e12])
def test_magnitudes_of_projected_values(scale, hopper):
    """Norms of codes stay limited, and rows of equal values need the smallest growth."""
    heads, depth, lengths = 1, 128, (400, 300)
    given = factors(sum(lengths), depth, 4 * 256)
    given["weight"] = quantize_rows(scale * given["weight"][0].float() * given["weight"][1])
    given["bias"] = torch.full_like(given["bias"], 2.0 * scale)
    cu_seqlens = offsets_of(lengths)
    _, codes = project(**given, cu_seqlens=cu_seqlens, heads=heads, keeps_z=True)
    check_codes(codes, exact_product(**given), cu_seqlens, heads)


@pytest.mark.gpu
def test_nan_stays_in_its_row(hopper):
    heads, depth, lengths = 2, 64, (200, 130)
    total = sum(lengths)
    x = torch.randn(total, depth, dtype=BF16, device="cuda")
    weight = quantize_rows(torch.randn(4 * 256, depth, device="cuda"))
    cu_seqlens = offsets_of(lengths)

    def codes_of(rows: Tensor) -> Quantized:
        return project(quantize_rows(rows), weight, None, cu_seqlens, heads, True)[1]

    bad = x.clone()
    bad[140] = torch.nan
    # Rows without it, whose blocks have no other magnitudes: row 140 is zero in one of them.
    x[140] = 0
    found, wanted = codes_of(bad), codes_of(x)
    values, clean = values_of(found, cu_seqlens), values_of(wanted, cu_seqlens)
    rest = torch.arange(total, device="cuda") != 140
    for name in ("q", "k", "v"):
        assert values[name][140].isnan().all()
        assert torch.equal(values[name][rest], clean[name][rest])
    assert torch.equal(found.k_descale[:, :3], wanted.k_descale[:, :3])
    assert found.k_norm.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("total", "depth", "columns"), [(1, 16, 256), (1000, 1024, 1024), (257, 144, 512)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_add_linear(total, depth, columns, has_bias, hopper):
    given = factors(total, depth, columns)
    if not has_bias:
        given["bias"] = None
    residual = torch.randn(total, columns, dtype=BF16, device="cuda")
    with poisoned_memory("cuda"):
        found = add_linear(**given, residual=residual)
    exact = exact_product(**given) + residual.double()
    assert relative_error(found, exact) < 3e-3
    usual = product(**given) + residual
    assert relative_error(found, exact) <= 1.1 * relative_error(usual, exact)


@pytest.mark.gpu
@pytest.mark.sanitize
def test_small_maps(hopper):
    given = factors(300, 144, 4 * 256)
    cu_seqlens = offsets_of((100, 150), 20)
    for heads in (1, 2, 4):
        z, codes = project(**given, cu_seqlens=cu_seqlens, heads=heads, keeps_z=True)
        check_codes(codes, exact_product(**given), cu_seqlens, heads)
    residual = torch.zeros_like(z)
    assert torch.equal(add_linear(**given, residual=residual), z)


CONFIG = HSTULayerConfig(
    embedding_dim=512, num_heads=4, hidden_dim=128, attention_dim=128, fused=True,
    fp8=FP8(Quantization(2), linears=True),
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_projects_codes(has_bias, hopper, monkeypatch):
    """The layer has the errors of one that quantizes z in a kernel of its own."""
    lengths = (4096, 0, 9000, 3800)
    total = sum(lengths)
    layer = HSTULayer(replace(CONFIG, linear_bias=has_bias)).cuda()
    cotangent = torch.randn(total, 512, dtype=BF16, device="cuda")
    inputs = {
        "x": torch.randn(total, 512, dtype=BF16, device="cuda"),
        "seq_offsets": offsets_of(lengths),
        "max_seq_len": max(lengths),
    }
    calls: list[str] = []
    for name in ("project", "add_linear"):
        function = getattr(forward, name)

        def counted(*args, name=name, function=function, **kwargs):
            calls.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(forward, name, counted)
    found = run(layer, inputs, cotangent)
    assert calls == ["project", "add_linear"]
    again = run(with_config(layer, recompute_linear=True, recompute_norm=True), inputs, cotangent)
    assert calls == ["project", "add_linear"] * 2 + ["project"]
    assert torch.equal(again["output"], found["output"])
    for name, tensor in found.items():  # sums in the backward have no fixed order
        assert relative_error(again[name], tensor.double()) < 2e-3, name
    with torch.no_grad():
        assert torch.equal(layer(**inputs), found["output"])
    monkeypatch.setattr(forward, "has_kernel", lambda x, columns: False)
    usual = run(layer, inputs, cotangent)
    exact = run(with_config(layer, fp8=None), inputs, cotangent)
    for name, tensor in exact.items():
        residual = {"output": inputs["x"], "d x": cotangent}.get(name, 0)
        wanted = tensor.double() - residual
        error = relative_error(found[name].double() - residual, wanted)
        other = relative_error(usual[name].double() - residual, wanted)
        assert error < 1.1 * other + 2e-3, (name, error, other)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": lambda t: t.float()}, "x: expected float8_e4m3fn, got float32"),
        ({"x": lambda t: t[:, :-1]}, "x: expected a depth that is a multiple of 16, got 63"),
        ({"x": lambda t: t.t().contiguous().t()}, r"x: expected a contiguous tensor, got strides"),
        ({"x_descale": lambda t: t[1:]}, r"x_descale: expected shape \(total, 1\) = \(10, 1\)"),
        ({"weight": lambda t: t[:, :32]}, r"weight: expected shape \(columns, depth\)"),
        ({"weight_descale": lambda t: t.double()}, "weight_descale: expected float32"),
        ({"bias": lambda t: t.cpu()}, "bias: expected the device of x"),
        ({"bias": lambda t: torch.cat([t, t])[1:1025]}, "bias: expected an address that is a mul"),
        ({"cu_seqlens": lambda t: t.float()}, "cu_seqlens: expected int32 or int64, got float32"),
        ({"cu_seqlens": lambda t: t.repeat(600)}, "cu_seqlens: expected offsets of at most 1024"),
        ({"heads": lambda n: 3}, "heads: expected a divisor of 256 columns, got 3"),
        ({"heads": lambda n: 8}, "there is no FP8 linear map but for head dims 64, 128, 256"),
    ],
)  # fmt: skip
def test_bad_arguments(changes, message, hopper):
    given = factors(10, 64, 1024)
    arguments = {
        "x": given["x"][0], "x_descale": given["x"][1],
        "weight": given["weight"][0], "weight_descale": given["weight"][1],
        "bias": given["bias"], "cu_seqlens": offsets_of((10,)), "heads": 4, "keeps_z": True,
    }  # fmt: skip
    for name, change in changes.items():
        arguments[name] = change(arguments[name])
    with pytest.raises((ValueError, NotImplementedError, RuntimeError), match=message):
        torch.ops.hstu_attn.project_fp8(*arguments.values())


def test_shapes_of_fake_tensors():
    with FakeTensorMode():
        x, weight = torch.empty(1000, 64, dtype=E4M3), torch.empty(2048, 64, dtype=E4M3)
        maps = (x, torch.empty(1000, 1), weight, torch.empty(2048, 1), torch.empty(2048))
        offsets = torch.empty(4, dtype=torch.int32)
        z, *codes = torch.ops.hstu_attn.project_fp8(*maps, offsets, 4, True)
        u, *_ = torch.ops.hstu_attn.project_fp8(*maps, offsets, 4, False)
        residual = torch.empty(1000, 2048, dtype=BF16)
        out = torch.ops.hstu_attn.linear_fp8(*maps, residual)
    blocks = max_blocks(1000, 3)
    rows = (1000, 4, 128)
    assert [tuple(t.shape) for t in (z, u, out)] == [(1000, 2048), (1000, 512), (1000, 2048)]
    assert {z.dtype, u.dtype, out.dtype} == {BF16}
    shapes = [rows, rows, (blocks, 4, 128, 128)]
    shapes += [(4, n) for n in (1000, blocks, blocks, 1000, blocks)]
    assert [tuple(t.shape) for t in codes] == shapes
    assert [t.dtype for t in codes] == [E4M3] * 3 + [torch.float] * 5


def test_no_kernel_on_a_cpu():
    assert not fp8_linear.has_kernel(torch.zeros(2**16, 256, dtype=BF16), 1024)
