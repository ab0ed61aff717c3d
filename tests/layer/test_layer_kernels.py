"""Tests of the fused layer's Triton kernels, in Triton's interpreter, against plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hstu_attn.fused import torch_steps
from hstu_attn.fused.options import GateOptions, dropout_threshold
from hstu_attn.fused.steps import steps_for
from tests.helpers.triton_interpreter import interpreter

pytest.importorskip("triton", reason="needs triton")
from hstu_attn.fused import triton_steps

gpu = pytest.mark.gpu(kernels=False)

EPS = 1e-3
LARGER = pytest.param(21, 64, marks=pytest.mark.slow)
SHAPES = [(0, 24), (1, 16), (5, 24), (7, 130), LARGER, (3, 2049)]
CONCATENATIONS = [("gated",), ("u", "x", "gated"), ("x", "gated"), ("u", "normed", "gated")]


NORMS = {"layer": (1, True), "group": (3, True), "rms": (1, False)}  # groups, centered


def _gates() -> list[object]:
    """Returns every concatenation with every norm; all pairs of either with a dropout occur."""
    return [
        pytest.param(parts, norm, 0.4 * ((n + m) % 2), id=f"{'-'.join(parts)}-{norm}")
        for n, parts in enumerate(CONCATENATIONS)
        for m, norm in enumerate(NORMS)
    ]


def leaf(*shape: int, **options: Any) -> Tensor:
    return torch.randn(shape, **options).requires_grad_()


def parameter(present: bool, size: int) -> Tensor | None:
    return leaf(size) if present else None


def close(actual: Tensor | None, expected: Tensor | None) -> None:
    assert (actual is None) == (expected is None)
    if actual is not None:
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@contextmanager
def few_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches few programs, so that each has several tiles, the last of them partial."""
    with monkeypatch.context() as patch:
        for name in ("LAYER_NORM", "SILU", "GATE"):
            form = getattr(triton_steps, name)
            patch.setattr(triton_steps, name, form._replace(elements=128))
        gates = ("GATE_BACKWARD", "GATE_BACKWARD_AGAIN")
        for name in ("LAYER_NORM_BACKWARD", "ACTIVATION_BACKWARD", *gates):
            form = getattr(triton_steps, name)
            patch.setattr(triton_steps, name, form._replace(elements=64, programs=2))
        yield


@pytest.fixture(params=["torch", pytest.param("triton", marks=interpreter)])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Returns each implementation of the steps, to compare with torch functions and autograd."""
    if request.param == "torch":
        yield torch_steps
    else:
        with few_programs(monkeypatch):
            yield triton_steps


@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("centered", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize("affine", [False, True])
def test_layer_norm(steps, rows, width, affine, centered):
    x, weight = leaf(rows, width), parameter(affine, width)
    bias = parameter(affine and centered, width)
    dnormed, residual = torch.randn(rows, width), torch.randn(rows, width)
    if centered:
        expected = F.layer_norm(x, (width,), weight, bias, EPS)
    else:
        # A mean much larger than the deviation tells the norms apart.
        x = (3 + x.detach()).requires_grad_()
        expected = F.rms_norm(x, (width,), weight, EPS)
    close(steps.layer_norm(x.detach(), weight, bias, EPS, centered), expected)
    leaves = [t for t in (x, weight, bias) if t is not None]
    gradients = dict(zip(leaves, torch.autograd.grad(expected, leaves, dnormed), strict=True))
    for again in (False, True):
        with torch.no_grad():
            result = steps.layer_norm_backward(
                dnormed, x, residual, weight, bias, EPS, again, again, centered
            )
        close(result[0], gradients[x] + residual)
        close(result[1], expected.detach() if again else None)
        for actual, of_parameter in zip(result[2:4], (weight, bias), strict=True):
            close(actual, gradients.get(of_parameter))
        close(result[4], residual.sum(dim=0) if again else None)


@interpreter
def test_rows_may_be_slices_of_wider_ones(monkeypatch):
    with few_programs(monkeypatch):
        wide = torch.randn(9, 100)
        x, residual = wide[:, 8:48], wide[:, 50:90]
        close(triton_steps.layer_norm(x, None, None, EPS), F.layer_norm(x, (40,), eps=EPS))
        dnormed = torch.randn(9, 40)
        arguments = (dnormed, x, residual, None, None, EPS, False, False)
        expected = torch_steps.layer_norm_backward(*arguments)[0]
        close(triton_steps.layer_norm_backward(*arguments)[0], expected)


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_silu(steps, rows, width):
    wide = torch.randn(rows, width + 9)
    columns = wide[:, 8 : 8 + width]
    expected = F.silu(columns)
    result = steps.silu(columns, False)
    assert result.is_contiguous()
    close(result, expected)
    outside = wide[:, width + 8 :].clone()
    assert steps.silu(columns, True).data_ptr() == columns.data_ptr()
    close(columns, expected)
    assert torch.equal(wide[:, width + 8 :], outside)


@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
def test_activation_backward(steps, rows, width, sums, fraction, monkeypatch):
    monkeypatch.setattr(triton_steps, "MAX_COLS", 1024 if width > 1024 else 64)
    activated = int(fraction * width)
    z, gradient = leaf(rows, width), torch.randn(rows, width)
    result = torch.cat([F.silu(z[:, :activated]), z[:, activated:]], dim=1)
    (dz,) = torch.autograd.grad(result, z, gradient)
    with torch.no_grad():
        total = steps.activation_backward(gradient, z, activated, sums)
    close(gradient, dz)
    close(total, dz.sum(0) if sums else None)


def plain_gate(
    attention: Tensor,
    u: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    options: GateOptions,
    kept: Tensor | None,
) -> Tensor:
    """Computes the gate with torch's norms; `kept` is the factor of dropout."""
    columns = attention.shape[1]
    if options.groups > 1:
        grouped = attention.unflatten(1, (options.groups, columns // options.groups))
        normed = F.group_norm(grouped, options.groups, weight, bias, options.eps).flatten(1)
    elif not options.centered:
        normed = F.rms_norm(attention, (columns,), weight, options.eps)
    else:
        normed = F.layer_norm(attention, (columns,), weight, bias, options.eps)
    u = F.silu(u) if options.activates_u else u
    values = {"u": u, "x": attention, "normed": normed, "gated": normed * u}
    y = torch.cat([values[name] for name in options.parts], dim=1)
    return y if kept is None else y * kept.flatten(1)


@pytest.mark.slow
@pytest.mark.parametrize("activates_u", [False, True], ids=["u", "silu_u"])
@pytest.mark.parametrize(("parts", "norm", "dropout"), _gates())
def test_gate(steps, parts, norm, dropout, activates_u):
    groups, centered = NORMS[norm]
    options = GateOptions(groups, EPS, parts, dropout, centered, activates_u)
    for (rows, width), affine in product([(0, 8), (1, 8), (7, 20)], [False, True]):
        columns = groups * width
        # u and its gradient are slices, as in the layer.
        attention, u = leaf(rows, columns), leaf(rows, columns + 8)
        size = groups if groups > 1 else columns
        weight, bias = parameter(affine, size), parameter(affine and centered, size)
        seed = torch.randint(2**63 - 1, (1,)) if dropout else None
        kept = None
        if seed is not None:
            threshold = dropout_threshold(dropout)
            bits = torch_steps.kept_elements(seed, rows, len(parts), groups, width, threshold)
            kept = bits / (1 - threshold / 2**16)
        expected = plain_gate(attention, u[:, :columns], weight, bias, options, kept)
        dy = torch.randn_like(expected)
        leaves = [t for t in (attention, u, weight, bias) if t is not None]
        gradients = dict(zip(leaves, torch.autograd.grad(expected, leaves, dy), strict=True))
        arguments = (attention, u[:, :columns], weight, bias, seed, options)
        with torch.no_grad():
            y = steps.gate(*arguments)
            close(y, expected.detach())
            for again in (False, True):
                target = torch.full_like(u, 7.0)
                result = steps.gate_backward(dy, *arguments, target[:, :columns], again)
                close(target[:, :columns], gradients[u][:, :columns])
                assert (target[:, columns:] == 7).all()
                close(result[0], gradients[attention])
                assert torch.equal(result[1], y) if again else result[1] is None
                for actual, of_parameter in zip(result[2:], (weight, bias), strict=True):
                    close(actual, gradients.get(of_parameter))


def test_wide_rows_and_fp64_go_to_torch():
    def chosen(dtype: torch.dtype, *widths: int, is_cuda: bool = True) -> Any:
        return steps_for(SimpleNamespace(is_cuda=is_cuda, dtype=dtype), *widths)

    assert chosen(torch.bfloat16, 8192, 64) is triton_steps
    assert chosen(torch.bfloat16, 64, 8193) is torch_steps
    assert chosen(torch.float64, 64) is torch_steps
    assert chosen(torch.bfloat16, 64, is_cuda=False) is torch_steps


def test_bits_of_dropout_are_philox():
    """The bits equal the known answers of Philox4x32-7 at zero and at all ones."""
    zero, ones = torch.zeros((), dtype=torch.int64), torch.tensor(2**32 - 1)
    words = torch_steps._philox(zero, [zero] * 4)
    assert [int(w) for w in words] == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]
    words = torch_steps._philox(torch.tensor(-1), [ones] * 4)
    assert [int(w) for w in words] == [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662]


def test_dropout_keeps_the_same_fraction_everywhere():
    ratio = 0.3
    kept = torch_steps.kept_elements(
        torch.tensor([5]), 4000, 2, 3, 21, dropout_threshold(ratio)
    ).double()
    deviation = (ratio * (1 - ratio)) ** 0.5
    for dims in ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
        fractions = kept.mean(dim=dims)
        count = kept.numel() / fractions.numel()
        # In one of a thousand seeds, the farthest of 4000 rows is 5 standard deviations away.
        assert (fractions - (1 - ratio)).abs().max() < 5 * deviation / count**0.5
    flat = kept.flatten(1) - kept.mean()
    neighbors = (flat[:, 1:] * flat[:, :-1]).mean() / deviation**2
    assert abs(neighbors) < 5 / flat.numel() ** 0.5
    other = torch_steps.kept_elements(torch.tensor([6]), 4000, 2, 3, 21, dropout_threshold(ratio))
    assert 0.55 < (other == kept.bool()).double().mean() < 0.61  # 0.7 * 0.7 + 0.3 * 0.3


# ---------------------------------------------------------------------------------------------
# On a GPU
# ---------------------------------------------------------------------------------------------

# In GiB for 131072 rows in fp32: three inputs and two results twice of 0.5 each, and the reference
# of some of the rows in fp64, 1.1; of the activation, four tensors of 1.0 and 0.9.
GPU_SHAPES = [
    *((1, 64), (4097, 1024), (1000, 520), (70, 8192)),
    pytest.param(131072, 1024, marks=pytest.mark.gpu_memory(6)),
]
ROWS_AT_ONCE = 2**14  # whose reference is computed at a time


def assert_rounded_once(actual: Tensor | None, expected: Tensor | None) -> None:
    """Asserts that results are `expected`, the same rows by plain torch in fp64, rounded once."""
    assert (actual is None) == (expected is None)
    if actual is None or expected is None:
        return
    largest = expected.abs().max().item()
    allowed = (torch.finfo(actual.dtype).eps + 2e-5) * largest
    assert (actual.double() - expected).abs().max().item() <= allowed


def wide(tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    return tuple(
        t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors
    )


def parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Returns the same rows of each tensor, some at a time."""
    return zip(*(tensor.split(ROWS_AT_ONCE) for tensor in tensors), strict=True)


def sums_of(found: list[tuple[Tensor | None, ...]]) -> list[Tensor | None]:
    """Returns the sums of all parts of the rows."""
    return [
        None if column[0] is None else torch.stack(column).sum(0)
        for column in zip(*found, strict=True)
    ]


gpu_shapes = pytest.mark.parametrize(("rows", "width"), GPU_SHAPES)
gpu_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])


@gpu
@pytest.mark.parametrize("centered", [True, False], ids=["layer", "rms"])
@gpu_dtypes
@gpu_shapes
def test_norm_on_a_gpu(rows, width, dtype, centered):
    x, dnormed, residual = (torch.randn(rows, width, dtype=dtype, device="cuda") for _ in range(3))
    weight, bias = (torch.randn(width, device="cuda") for _ in range(2))
    options = (weight, bias if centered else None, EPS)
    result = triton_steps.layer_norm(x, *options, centered)
    for actual, some in parts(result, x):
        assert_rounded_once(actual, torch_steps.layer_norm(*wide((some, *options, centered))))
    del result
    options = (*options, True, True, centered)
    dx, normed, *sums = triton_steps.layer_norm_backward(dnormed, x, residual, *options)
    wanted_sums = []
    for *actual, gradient, some, added in parts(dx, normed, dnormed, x, residual):
        wanted = torch_steps.layer_norm_backward(*wide((gradient, some, added, *options)))
        assert_rounded_once(actual[0], wanted[0])
        assert_rounded_once(actual[1], wanted[1])
        wanted_sums.append(wanted[2:])
    for found, expected in zip(sums, sums_of(wanted_sums), strict=True):
        assert_rounded_once(found, expected)
    again = triton_steps.layer_norm_backward(dnormed, x, residual, *options)
    for first, second in zip((dx, normed, *sums), again, strict=True):
        assert first is second or torch.equal(first, second)


@gpu
@gpu_dtypes
@gpu_shapes
def test_activation_on_a_gpu(rows, width, dtype):
    z, given = (torch.randn(rows, 2 * width, dtype=dtype, device="cuda") for _ in range(2))
    for actual, some in parts(triton_steps.silu(z, False), z):
        assert_rounded_once(actual, torch_steps.silu(some.double(), False))
    gradient = given.clone()
    sums = triton_steps.activation_backward(gradient, z, width, True)
    wanted_sums = []
    for actual, before, some in parts(gradient, given, z):
        wanted = before.double()
        wanted_sums.append((torch_steps.activation_backward(wanted, some.double(), width, True),))
        assert_rounded_once(actual, wanted)
    assert_rounded_once(sums, *sums_of(wanted_sums))


@gpu
@pytest.mark.parametrize("activates_u", [False, True], ids=["u", "silu_u"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(
    ("groups", "centered"), [(1, True), (4, True), (1, False)], ids=["layer", "group", "rms"]
)
@pytest.mark.parametrize("parts", CONCATENATIONS, ids="-".join)
@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        *((1, 64), (3000, 520)),
        # The reference in fp64 takes 5.3 GiB where dropout is drawn for three parts.
        pytest.param(32768, 1024, marks=pytest.mark.gpu_memory(7)),
    ],
)
def test_gate_on_a_gpu(rows, columns, parts, groups, centered, dropout, activates_u):
    options = GateOptions(groups, EPS, parts, dropout, centered, activates_u)
    attention, uvqk = (
        torch.randn(rows, n * columns, dtype=torch.bfloat16, device="cuda") for n in (1, 4)
    )
    size = columns if groups == 1 else groups
    weight, bias = (torch.randn(size, device="cuda") for _ in range(2))
    bias = bias if centered else None
    seed = torch.randint(2**63 - 1, (1,), device="cuda") if dropout else None
    arguments = (attention, uvqk[:, :columns], weight, bias, seed, options)
    y = triton_steps.gate(*arguments)
    assert_rounded_once(y, torch_steps.gate(*wide(arguments)))
    dy, du = torch.randn_like(y), torch.empty_like(uvqk)
    du_wide = du[:, :columns].double()
    results = triton_steps.gate_backward(dy, *arguments, du[:, :columns], True)
    expected = torch_steps.gate_backward(dy.double(), *wide(arguments), du_wide, True)
    for actual, wanted in zip(results, expected, strict=True):
        assert_rounded_once(actual, wanted)
    assert_rounded_once(du[:, :columns], du_wide)
