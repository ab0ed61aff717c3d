"""Batches, descales and errors for the tests of FP8 attention."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hstu_attn import hstu_attention, reference
from hstu_attn.quantization import BLOCK, E4M3, dequantize, quantize_qkv
from hstu_attn.testing import Batch, make_batch, run

BF16 = torch.bfloat16
MODES = range(6)
LENGTHS = [130, 0, 7, 40]  # of e4m3_batch()


def relative_error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def accuracy_batch(kind: str, dim: int, lengths: list[int], **options: Any) -> Batch:
    options = {"mask": "causal", "heads": 1, "scaling_seqlen": max(lengths), **options}
    batch = make_batch(lengths, options.pop("rows", None), dim=dim, dtype=BF16, **options)
    for n, tensor in enumerate((batch.q, batch.k, batch.v)):
        # NOTE: in bf16, normal_() of torch 2.11 on a CPU gives some zeros and nothing above 3.4.
        normal = torch.randn(tensor.shape)
        tensor.copy_(F.silu(normal) if kind == "silu" else normal)
        if kind == "outliers":
            # NOTE: outliers are in different rows of each tensor, so that no single weight
            # dominates a row's error.
            tensor.view(-1)[17 * n * dim :: 101 * dim + 1] *= 30
    return batch


def e4m3_batch(device: str = "cpu", dim: int = 64, heads: int = 3, **options: Any) -> Batch:
    batch = make_batch(LENGTHS, dim=dim, heads=heads, **{"mask": "causal", **options})
    q, k, v = (x.mul(100).to(E4M3) for x in (batch.q, batch.k, batch.v))
    return to_device(replace(batch, q=q, k=k, v=v), device)


def descales(shape: tuple[int, ...], device: str = "cpu") -> dict[str, Tensor]:
    names = ("q_descale", "k_descale", "v_descale")
    return {name: torch.rand(shape, device=device) / 50 + 0.01 for name in names}


def to_device(x: Any, device: str) -> Any:
    """Returns `x` with its tensors, and those in its fields, on a device."""
    if isinstance(x, Tensor):
        return x.to(device)
    if not is_dataclass(x) or isinstance(x, type):
        return x
    return replace(x, **{f.name: to_device(getattr(x, f.name), device) for f in fields(x)})


def exact_and_emulated(batch: Batch, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns fp64 outputs of the dequantized inputs, without and with rounded weights."""
    inputs, sequences = (batch.q, batch.k, batch.v), (batch.cu_seqlens_q, batch.cu_seqlens_k)
    quantized = quantize_qkv(*inputs, *sequences, None, None, -1, False, *given.values())
    x = dequantize(quantized, *sequences, None, None, batch.q.shape[2], torch.float64)
    options = batch.options()
    exact = reference.hstu_attention(x.q[..., :-1], x.k[..., :-1], x.v, **options)
    emulated = reference.hstu_attention(*inputs, **options, **given, compute_dtype=torch.float64)
    return exact, emulated


def assert_gradients_of_kept_codes(
    batch: Batch, dout: Tensor, of_inputs: dict[str, Tensor]
) -> None:
    """Checks a call with `keep="e4m3"`; `of_inputs` has the results without `keep`.

    The gradients must be those at the dequantized inputs, up to the rounding of bf16.
    """
    expected = run(reference.hstu_attention, to_device(batch, "cpu"), dout.cpu(), torch.float64)
    found = run(hstu_attention, batch, dout)
    assert torch.equal(found.pop("out"), of_inputs["out"])
    for name, gradient in found.items():
        assert relative_error(gradient.cpu(), expected[name]) <= 1e-2, name
        assert not torch.equal(gradient, of_inputs[name]), name


def shapes_of_descales(name: str) -> list[tuple[int, ...]]:
    total, count, heads = sum(LENGTHS), len(LENGTHS), 3
    shapes: list[tuple[int, ...]] = [(), (1,), (count,), (count, heads)]
    shapes.append((heads, total // BLOCK + count))
    return [*shapes, (heads, total)] if name == "q_descale" else shapes
