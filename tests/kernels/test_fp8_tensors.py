"""Tests of attention of other libraries' e4m3 tensors: TransformerEngine's and torchao's."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hstu_attn import hstu_attention
from hstu_attn.quantization import E4M3
from hstu_attn.testing import make_batch
from tests.helpers.fp8 import relative_error

LENGTHS = [130, 0, 7, 40]


class DType(Enum):
    """The names of TransformerEngine's dtypes; the package itself cannot be imported on a CPU."""

    kFloat8E4M3 = 7
    kFloat8E5M2 = 8


class Float8TensorStorage:
    """The attributes of TransformerEngine's class."""

    def __init__(self, data: Tensor, scale_inv: Tensor, fp8_dtype: DType) -> None:
        self._data, self._scale_inv, self._fp8_dtype = data, scale_inv, fp8_dtype

    def dequantize(self) -> Tensor:
        return self._data.view(E4M3).float() * self._scale_inv


def quantized(x: Tensor) -> Float8TensorStorage:
    descale = (x.abs().max() / 448).float().reshape(1)
    return Float8TensorStorage((x / descale).to(E4M3).view(torch.uint8), descale, DType.kFloat8E4M3)


@pytest.fixture
def batch():
    return make_batch(LENGTHS, dim=64, heads=3, mask="causal")


def attend(batch: Any, *qkv: Any, **options: Any) -> Tensor:
    return hstu_attention(*qkv, **batch.options(), **options)


def check(batch: Any, made: list[Any], codes: list[Tensor], descales: list[Tensor]) -> None:
    """Compares results with those of codes and descales, and of the dequantized tensors."""
    found = attend(batch, *made)
    names = ("q_descale", "k_descale", "v_descale")
    assert torch.equal(found, attend(batch, *codes, **dict(zip(names, descales, strict=True))))
    exact = attend(batch, *(x.dequantize().double() for x in made))
    assert found.dtype == torch.bfloat16
    assert relative_error(found, exact) < 0.03  # because weights are rounded to e4m3


def test_tensors_of_transformer_engine(batch):
    made = [quantized(x) for x in (batch.q, batch.k, batch.v)]
    check(batch, made, [x._data.view(E4M3) for x in made], [x._scale_inv for x in made])


def test_one_of_three_and_given_descales(batch):
    k = quantized(batch.k)
    one = torch.ones(())
    q, v = batch.q.to(E4M3), batch.v.to(E4M3)
    found = attend(batch, q, k, v, q_descale=one, v_descale=one)
    others = {"q_descale": one, "k_descale": k._scale_inv, "v_descale": one}
    assert torch.equal(found, attend(batch, q, k._data.view(E4M3), v, **others))
    with pytest.raises(ValueError, match="k_descale: expected None with a Float8TensorStorage"):
        attend(batch, q, k, v, **others)


def test_scales_of_heads_and_rows(batch):
    """The attributes of torchao's Float8Tensor, with scales that broadcast."""
    tensors = (batch.q, batch.k, batch.v)
    of_head = [x.abs().amax((0, 2), keepdim=True) / 448 for x in tensors]
    of_row = [x.abs().amax(2, keepdim=True) / 448 for x in tensors]

    def made(scales: list[Tensor]) -> list[Any]:
        both = zip(tensors, scales, strict=True)
        return [
            SimpleNamespace(
                qdata=(x / scale).to(E4M3),
                scale=scale,
                dequantize=lambda x=x, scale=scale: (x / scale).to(E4M3).float() * scale,
            )
            for x, scale in both
        ]

    for scales in (of_head, [of_row[0], *of_head[1:]]):
        wrapped = made(scales)
        descales = [scale.flatten().expand(len(LENGTHS), -1) for scale in of_head]
        if scales[0] is of_row[0]:
            descales[0] = of_row[0].squeeze(2).t()
        check(batch, wrapped, [x.qdata for x in wrapped], descales)
    with pytest.raises(ValueError, match=r"k: expected a SimpleNamespace with a scale for the ten"):
        attend(batch, *made(of_row))


def test_what_is_refused(batch):
    q, k, v = (quantized(x) for x in (batch.q, batch.k, batch.v))
    e5m2 = Float8TensorStorage(v._data, v._scale_inv, DType.kFloat8E5M2)
    with pytest.raises(ValueError, match=r"v: expected float8_e4m3fn, got .*FLOAT8E5M2"):
        attend(batch, q, k, e5m2)
    other = SimpleNamespace(qdata=batch.k.to(torch.float8_e5m2), scale=torch.ones(()))
    with pytest.raises(ValueError, match=r"k: expected float8_e4m3fn, got .*torch.float8_e5m2"):
        attend(batch, q, other, v)
    transposed = Float8TensorStorage(None, v._scale_inv, DType.kFloat8E4M3)
    with pytest.raises(ValueError, match="v: expected a Float8TensorStorage with `_data`"):
        attend(batch, q, k, transposed)
    with pytest.raises(NotImplementedError, match="q: expected scales of fp32"):
        attend(batch, SimpleNamespace(_rowwise_data=q._data), k, v)
    with pytest.raises(ValueError, match="q: expected a tensor, got list"):
        attend(batch, [1], k, v)
    q.requires_grad = True
    with pytest.raises(NotImplementedError, match="q: attention of a Float8TensorStorage has no"):
        attend(batch, q, k, v)
    with torch.no_grad():
        attend(batch, q, k, v)


def test_tensors_of_torchao(batch):
    quantization = pytest.importorskip("torchao.quantization", reason="needs torchao")
    tensors = (batch.q, batch.k, batch.v)

    def made(x: Tensor, granularity: Any, dtype: torch.dtype = E4M3) -> Any:
        return quantization.Float8Tensor.from_hp(x, dtype, granularity)

    by_tensor = [made(x, quantization.PerTensor()) for x in tensors]
    descales = [x.scale.reshape(()) for x in by_tensor]
    check(batch, by_tensor, [x.qdata for x in by_tensor], descales)
    with_rows = [made(batch.q, quantization.PerRow()), *by_tensor[1:]]
    descales[0] = with_rows[0].scale.squeeze(2).t()
    check(batch, with_rows, [x.qdata for x in with_rows], descales)
    e5m2 = made(batch.v, quantization.PerTensor(), torch.float8_e5m2)
    with pytest.raises(
        ValueError, match=r"v: expected float8_e4m3fn, got a Float8Tensor of .*e5m2"
    ):
        attend(batch, *by_tensor[:2], e5m2)


def test_training_tensors_of_torchao(batch):
    module = pytest.importorskip("torchao.float8.float8_training_tensor", reason="needs torchao")
    made = []
    for x in (batch.q, batch.k, batch.v):
        scale = 448 / x.abs().max()
        codes = (x * scale).to(E4M3)
        tensor = module.Float8TrainingTensor(codes, scale, x.dtype, module.LinearMMConfig())
        assert torch.equal(tensor.to_original_precision(), codes.float() / scale)
        tensor.dequantize = tensor.to_original_precision
        made.append(tensor)
    check(batch, made, [x._data for x in made], [x._scale.reciprocal() for x in made])
