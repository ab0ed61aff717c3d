"""The Triton baseline of the benchmarks: without a GPU through Triton's interpreter, in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hstu_attn import Mask
from hstu_attn.testing import check_against_reference, make_batch
from tests.helpers.triton_interpreter import interpreter

pytest.importorskip("triton", reason="needs triton")
from benchmarks import implementations
from benchmarks.baselines import triton_hstu

gpu = pytest.mark.gpu(kernels=False)

attention = implementations.make(
    "triton"
).function  # with the arguments of hstu_attn.hstu_attention

MASKS = {
    "causal": (None, None),
    "context": ((3, 18, 0), None),
    "target": (None, (1, 20, 0)),
    "all targets": (None, (17, 33, 31)),
    "context-target": ((2, 18, 4), (15, 15, 27)),
}
TILES = ((16, 16), (32, 16), (16, 32))


def make_mask(name: str, device: str = "cpu") -> Mask:
    contexts, targets = (
        None if counts is None else torch.tensor(counts, device=device) for counts in MASKS[name]
    )
    return Mask.causal(num_contexts=contexts, num_targets=targets)


def use_tiles(monkeypatch: pytest.MonkeyPatch, config: Any) -> None:
    for kernel in (triton_hstu.forward_kernel, triton_hstu.backward_kernel):
        monkeypatch.setattr(kernel, "configs", [config])


@interpreter
@pytest.mark.parametrize("tiles", TILES, ids=["{}x{}".format(*tiles) for tiles in TILES])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, tiles, monkeypatch):
    use_tiles(monkeypatch, triton_hstu.config(*tiles, warps=4, stages=1, tma=False))
    batch = make_batch([17, 47, 31], mask=make_mask(name), alpha=-0.3)
    check_against_reference(attention, batch)


@interpreter
def test_lengths_around_a_tile(monkeypatch):
    use_tiles(monkeypatch, triton_hstu.config(16, 16, warps=4, stages=1, tma=False))
    batch = make_batch([0, 1, 15, 16, 17, 0, 33], mask=Mask.causal(), scaling_seqlen=20)
    check_against_reference(attention, batch)


@interpreter
def test_forward_through_tensor_descriptors(monkeypatch):
    """The interpreter has no descriptors to add to, so the backward cannot follow."""
    use_tiles(monkeypatch, triton_hstu.config(16, 32, warps=4, stages=1, tma=True))
    batch = make_batch([17, 47, 31], mask=make_mask("context-target"))
    check_against_reference(attention, batch, backward=False)


@interpreter
def test_strided_inputs():
    batch = make_batch([9, 40], dim=32, mask=Mask.causal())
    q, k, v = torch.randn(49, 4, 2, 32).unbind(1)[:3]
    batch = batch.with_tensors({"q": q, "k": k, "v": v})
    check_against_reference(attention, batch)


def test_what_the_kernels_do_not_take():
    x = torch.randn(8, 2, 48)
    offsets = torch.tensor([0, 8])
    with pytest.raises(ValueError, match=r"q: expected a head dim of \(32, 64, 128, 256\), got 48"):
        triton_hstu.hstu_attention(x, x, x, offsets, 8, 8)
    x = torch.randn(8, 2, 64)[..., ::2]
    with pytest.raises(ValueError, match="q: expected 2 x 32 contiguous elements in each row"):
        triton_hstu.hstu_attention(x, x, x, offsets, 8, 8)


def configurations() -> list[Any]:
    """Every one that the tuner may choose, by pass and head dim."""
    return [
        pytest.param(kernel, dim, config, id=f"{name}-{dim}-{config}")
        for name, kernel, by_dim in (
            ("forward", triton_hstu.forward_kernel, triton_hstu.FORWARD_CONFIGS),
            ("backward", triton_hstu.backward_kernel, triton_hstu.BACKWARD_CONFIGS),
        )
        for dim, configs in by_dim.items()
        for config in configs
    ]


@gpu
@pytest.mark.parametrize(("kernel", "dim", "config"), configurations())
def test_every_configuration(kernel, dim, config, monkeypatch):
    """Each is forced for its pass; lengths around its tiles, and a mask with every rule."""
    use_tiles(monkeypatch, triton_hstu.FP32_CONFIG)
    monkeypatch.setattr(kernel, "configs", [config])
    lengths = [0, 1, 127, 128, 129, 300]
    counts = {
        "num_contexts": torch.tensor([0, 0, 3, 0, 70, 8], device="cuda"),
        "num_targets": torch.tensor([0, 1, 64, 128, 5, 17], device="cuda"),
    }
    for mask in (Mask.causal(), Mask.causal(**counts)):
        batch = make_batch(lengths, dim=dim, dtype=torch.bfloat16, device="cuda", mask=mask)
        check_against_reference(attention, batch, backward=kernel is triton_hstu.backward_kernel)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dim", triton_hstu.HEAD_DIMS)
def test_tuned(dim, dtype):
    batch = make_batch([700, 65, 2], dim=dim, dtype=dtype, device="cuda", mask=Mask.causal())
    check_against_reference(attention, batch)
