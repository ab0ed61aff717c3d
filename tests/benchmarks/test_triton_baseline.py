"""Tests of the Triton baseline; without a GPU they use Triton's interpreter and fp32."""

from __future__ import annotations

import pytest
import torch

from hstu_attn import Mask
from hstu_attn.testing import check_against_reference, make_batch
from tests.helpers.triton_interpreter import interpreter

pytest.importorskip("triton", reason="needs triton")
from benchmarks import implementations
from benchmarks.baselines import triton_hstu

# It is called with the arguments of hstu_attn.hstu_attention.
attention = implementations.make("triton").function


def use_tiles(monkeypatch: pytest.MonkeyPatch, config: object) -> None:
    for kernel in (triton_hstu.forward_kernel, triton_hstu.backward_kernel):
        monkeypatch.setattr(kernel, "configs", [config])


@interpreter
@pytest.mark.slow
@pytest.mark.parametrize(
    ("contexts", "targets", "tiles"),
    [
        (None, None, (16, 16)),
        ((0, 0, 2, 18, 4), (0, 1, 15, 15, 33), (16, 32)),
        ((0, 0, 2, 18, 4), (0, 1, 15, 15, 33), (32, 16)),
    ],
    ids=["causal", "context-target", "context-target-32x16"],
)
def test_masks(contexts, targets, tiles, monkeypatch):
    use_tiles(monkeypatch, triton_hstu.config(*tiles, warps=4, stages=1, tma=False))
    counts = (None if count is None else torch.tensor(count) for count in (contexts, targets))
    mask = Mask.causal(**dict(zip(("num_contexts", "num_targets"), counts, strict=True)))
    batch = make_batch([0, 1, 17, 47, 33], mask=mask, alpha=-0.3, scaling_seqlen=20)
    tensors = batch.differentiable().items()
    strided = {name: x.repeat(1, 2, 1)[:, : x.shape[1]] for name, x in tensors}
    check_against_reference(attention, batch.with_tensors(strided))


def test_what_the_kernels_do_not_take():
    x = torch.randn(8, 2, 48)
    offsets = torch.tensor([0, 8])
    with pytest.raises(ValueError, match=r"q: expected a head dim of \(32, 64, 128, 256\), got 48"):
        triton_hstu.hstu_attention(x, x, x, offsets, 8, 8)
    x = torch.randn(8, 2, 64)[..., ::2]
    with pytest.raises(ValueError, match="q: expected 2 x 32 contiguous elements in each row"):
        triton_hstu.hstu_attention(x, x, x, offsets, 8, 8)


@pytest.mark.gpu(kernels=False)
@pytest.mark.parametrize("dim", triton_hstu.HEAD_DIMS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_every_configuration(direction, dim, monkeypatch):
    """Every configuration of the tuner gives correct results for lengths around its tile sizes."""
    by_dim = {
        "forward": triton_hstu.FORWARD_CONFIGS,
        "backward": triton_hstu.BACKWARD_CONFIGS,
    }
    kernel = getattr(triton_hstu, f"{direction}_kernel")
    use_tiles(monkeypatch, triton_hstu.FP32_CONFIG)
    counts = {
        "num_contexts": torch.tensor([0, 0, 3, 0, 70, 8], device="cuda"),
        "num_targets": torch.tensor([0, 1, 64, 128, 5, 17], device="cuda"),
    }
    for config in by_dim[direction][dim]:
        monkeypatch.setattr(kernel, "configs", [config])
        for mask in (Mask.causal(), Mask.causal(**counts)):
            lengths = [0, 1, 127, 128, 129, 300]
            batch = make_batch(lengths, dim=dim, dtype=torch.bfloat16, device="cuda", mask=mask)
            check_against_reference(attention, batch, backward=direction == "backward")
