"""Tests of FBGEMM's two functions: the documented call, the argument order, and the rules."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from hstu_attn import (
    DenseBias,
    Mask,
    hstu_attention,
    hstu_attn_qkvpacked_func,
    hstu_attn_varlen_func,
)
from hstu_attn.testing import Batch, check_against_reference, make_batch, offsets
from tests.helpers.public_masks import fbgemm_mask, func_mask

BF16 = torch.bfloat16


def positional(batch: Batch, **changes: Any) -> list[Any]:
    """Returns all arguments of the varlen function in FBGEMM's order, with defaults."""
    values = {
        "q": batch.q,
        "k": batch.k,
        "v": batch.v,
        "cu_seqlens_q": batch.cu_seqlens_q,
        "cu_seqlens_k": batch.cu_seqlens_k,
        "seqused_q": None,
        "seqused_k": None,
        "max_seqlen_q": batch.max_seqlen_q,
        "max_seqlen_k": batch.max_seqlen_k,
        "scaling_seqlen": -1,
        "num_contexts": batch.mask.num_contexts,
        "num_targets": batch.mask.num_targets,
        "target_group_size": batch.mask.target_group_size,
        "window_size": batch.mask.window_size,
        "alpha": batch.alpha,
        "rab": None,
        "has_drab": False,
        "kv_cache": None,
        "page_offsets": None,
        "page_ids": None,
        "last_page_lens": None,
        "func": None,
        "quant_mode": -1,
    }
    return list({**values, **changes}.values())


def ours(batch: Batch, **changes: Any) -> Tensor:
    return hstu_attention(batch.q, batch.k, batch.v, **{**batch.options(), **changes})


def test_the_order_of_the_arguments():
    batch = make_batch([3], mask="causal")
    names = list(inspect.signature(hstu_attn_varlen_func).parameters)
    assert names == list(dict.fromkeys(names))
    assert len(positional(batch)) == len(names)
    assert names == [
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"),
        *("max_seqlen_q", "max_seqlen_k", "scaling_seqlen", "num_contexts", "num_targets"),
        *("target_group_size", "window_size", "alpha", "rab", "has_drab"),
        *("kv_cache", "page_offsets", "page_ids", "last_page_lens", "func", "quant_mode"),
    ]
    packed = list(inspect.signature(hstu_attn_qkvpacked_func).parameters)
    assert packed == ["qkv", *names[3:17], "func"]


def padded_formula(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], visible: Tensor, alpha: float, scale: float
) -> Tensor:
    """Computes the formula with a padded matrix for the whole batch."""
    batch, longest = len(lengths), max(lengths)
    padded = []
    for x in (q, k, v):
        rows = torch.zeros(batch, longest, *x.shape[1:], dtype=torch.float64)
        for b, part in enumerate(x.double().split(lengths)):
            rows[b, : lengths[b]] = part
        padded.append(rows)
    scores = alpha * torch.einsum("bihd,bjhd->bhij", padded[0], padded[1])
    weights = torch.nn.functional.silu(scores) * visible[:, None] * scale
    out = torch.einsum("bhij,bjhd->bihd", weights, padded[2])
    return torch.cat([out[b, : lengths[b]] for b in range(batch)])


def assert_near(out: Tensor, expected: Tensor) -> None:
    """Asserts that results differ as little as rounding to bf16 explains."""
    assert expected.abs().max() > 0
    assert (out.detach().double().cpu() - expected).abs().max() <= 0.01 * expected.abs().max()


def test_the_documented_call():
    """The call is as in FBGEMM's README and tests, except for the import."""
    heads, head_dim = 2, 64
    contexts, histories, targets = [2, 0, 3], [9, 4, 1], [4, 3, 5]
    lengths = [c + h + t for c, h, t in zip(contexts, histories, targets, strict=True)]
    max_seqlen = 3 + 9 + 5
    cu_seqlens = offsets(lengths)
    q, k, v = (
        torch.empty(sum(lengths), heads, head_dim, dtype=BF16).uniform_(-1, 1).requires_grad_()
        for _ in range(3)
    )
    out = hstu_attn_varlen_func(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        seqused_q=None,
        seqused_k=None,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        scaling_seqlen=-1,
        num_contexts=torch.tensor(contexts, dtype=torch.int32),
        num_targets=torch.tensor(targets, dtype=torch.int32),
        target_group_size=2,
        window_size=(-1, 0),
        alpha=1.0 / head_dim,
        rab=None,
        has_drab=False,
        func=None,
    )
    visible = torch.zeros(3, max(lengths), max(lengths))
    for b, length in enumerate(lengths):
        visible[b, :length, :length] = fbgemm_mask(
            contexts[b], histories[b], targets[b], window=(-1, 0), group=2
        )
    expected = padded_formula(
        q.detach(), k.detach(), v.detach(), lengths, visible, 1 / head_dim, 1 / max_seqlen
    )
    assert_near(out, expected)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert dq.any()
    assert dk.any()
    assert dv.any()


def test_the_documented_packed_call():
    heads, head_dim, lengths = 4, 32, [5, 17, 2]
    qkv = torch.empty(24, 3, heads, head_dim, dtype=BF16).uniform_(-1, 1).requires_grad_()
    cu_seqlens = offsets(lengths)
    out = hstu_attn_qkvpacked_func(
        qkv=qkv,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        seqused_q=None,
        seqused_k=None,
        max_seqlen_q=17,
        max_seqlen_k=17,
    )
    visible = torch.zeros(3, 17, 17)
    for b, length in enumerate(lengths):
        visible[b, :length, :length] = 1
    expected = padded_formula(*qkv.detach().unbind(1), lengths, visible, 1.0, 1 / 17)
    assert_near(out, expected)
    (dqkv,) = torch.autograd.grad(out, qkv, torch.ones_like(out))
    assert dqkv.shape == qkv.shape
    assert dqkv.is_contiguous()


@pytest.mark.parametrize("mask", ["full", "causal", "local", "context-target", "local-target"])
def test_positional_calls_equal_ours(device, mask):
    batch = make_batch([30, 7, 0], [11, 7, 0], dtype=BF16, device=device, mask=mask)
    assert torch.equal(hstu_attn_varlen_func(*positional(batch)), ours(batch))


def test_short_positional_calls():
    """FBGEMM's README omits everything after `scaling_seqlen`."""
    batch = make_batch([30, 7], dtype=BF16, alpha=1.0)
    assert torch.equal(hstu_attn_varlen_func(*positional(batch)[:10]), ours(batch))
    assert torch.equal(hstu_attn_varlen_func(*positional(batch)[:12]), ours(batch))


def test_nones_and_lists_mean_the_defaults(device):
    batch = make_batch([30, 7], dtype=BF16, device=device, mask="target")
    changed = positional(batch, target_group_size=None, window_size=[-1, 0], quant_mode=None)
    assert torch.equal(hstu_attn_varlen_func(*changed), ours(batch))


def test_scaling_seqlen(device):
    batch = make_batch([30, 7], dtype=BF16, device=device, mask="causal")
    out = hstu_attn_varlen_func(*positional(batch, scaling_seqlen=11))
    assert torch.equal(out, ours(batch, scaling_seqlen=11))


@pytest.mark.parametrize("mask", ["causal", "context-target"])
@pytest.mark.parametrize("bias", [None, "rab-1-head"])
def test_packed_gradients_are_written_packed(deterministic, device, mask, bias):
    lengths = [70, 0, 5]
    batch = make_batch(lengths, dtype=BF16, device=device, mask=mask, bias=bias)
    qkv = torch.stack([batch.q, batch.k, batch.v], 1).requires_grad_()
    rab = None if bias is None else batch.bias.rab.clone().requires_grad_()
    dout = torch.randn_like(batch.v)

    arguments = positional(batch)[3:15]
    out = hstu_attn_qkvpacked_func(qkv, *arguments, rab, rab is not None)
    leaves = [qkv] if rab is None else [qkv, rab]
    gradients = torch.autograd.grad(out, leaves, dout)

    separate = batch.with_bias(None if rab is None else DenseBias(rab))
    parts = [x.clone().requires_grad_() for x in (batch.q, batch.k, batch.v)]
    expected = hstu_attention(*parts, **separate.options())
    wanted = torch.autograd.grad(expected, [*parts, *leaves[1:]], dout)
    assert torch.equal(out, expected)
    assert torch.equal(gradients[0], torch.stack(wanted[:3], 1))
    if rab is not None:
        assert torch.equal(gradients[1], wanted[3])


def test_packed_tensor_may_be_a_view(device):
    batch = make_batch([20, 9], dtype=BF16, device=device, mask="causal")
    wide = torch.zeros(29, 5, 2, 32, dtype=BF16, device=device)
    wide[:, 1:4] = torch.stack([batch.q, batch.k, batch.v], 1)
    qkv = wide[:, 1:4].requires_grad_()
    out = hstu_attn_qkvpacked_func(qkv, *positional(batch)[3:15])
    assert torch.equal(out, ours(batch))
    (dqkv,) = torch.autograd.grad(out, qkv, torch.ones_like(out))
    assert dqkv.shape == qkv.shape


# ---------------------------------------------------------------------------------------------
# rab and has_drab
# ---------------------------------------------------------------------------------------------


def test_has_drab_gives_the_gradient_of_rab(device):
    batch = make_batch([30, 7], dtype=BF16, device=device, mask="causal", bias="rab")

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        values = positional(batch, q=q, k=k, v=v, rab=options["bias"].rab, has_drab=True)
        return hstu_attn_varlen_func(*values)

    check_against_reference(call, batch)


def test_without_has_drab_rab_gets_no_gradient(device):
    batch = make_batch([30, 7], dtype=BF16, device=device, mask="causal", bias="rab")
    rab = batch.bias.rab.requires_grad_()
    q = batch.q.requires_grad_()
    out = hstu_attn_varlen_func(*positional(batch, rab=rab, has_drab=False))
    assert torch.equal(out, ours(batch))
    out.sum().backward()
    assert rab.grad is None
    assert q.grad is not None


def test_has_drab_of_a_rab_that_requires_none(device):
    batch = make_batch([30, 7], dtype=BF16, device=device, mask="causal", bias="rab")
    q = batch.q.requires_grad_()
    hstu_attn_varlen_func(*positional(batch, rab=batch.bias.rab, has_drab=True)).sum().backward()
    assert batch.bias.rab.grad is None
    assert q.grad.any()


def test_has_drab_without_rab():
    batch = make_batch([4])
    message = r"^rab: expected a tensor with has_drab=True, got None"
    with pytest.raises(ValueError, match=message):
        hstu_attn_varlen_func(*positional(batch, has_drab=True))
    qkv = torch.stack([batch.q, batch.k, batch.v], 1)
    with pytest.raises(ValueError, match=message):
        hstu_attn_qkvpacked_func(qkv, *positional(batch)[3:15], None, True)


# ---------------------------------------------------------------------------------------------
# func
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [0, 1, 2, 4])
@pytest.mark.parametrize("causal", [False, True], ids=["alone", "causal"])
def test_func_ignores_contexts_and_targets(device, pairs, causal):
    """With window (-1, 0), `func` is intersected with causal, in both directions."""
    lengths = [23, 40]
    batch = make_batch(lengths, dtype=BF16, device=device, mask="context-target")
    rows, n = sum(lengths), 2 * pairs + 1
    # FBGEMM asks for 256 columns more than there are rows; what they hold does not matter.
    func = torch.randint(0, 41, (1, n, rows + 256), dtype=torch.int32, device=device)
    window = (-1, 0) if causal else (-1, -1)

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        values = positional(batch, q=q, k=k, v=v, func=func, window_size=window)
        return hstu_attn_varlen_func(*values)

    batch_with_func = Batch(**{**vars(batch), "mask": Mask.from_func(func, causal)})
    check_against_reference(call, batch_with_func)

    out = call(batch.q, batch.k, batch.v)
    visible = torch.zeros(2, 40, 40)
    for b in range(2):
        for r in range(lengths[b]):
            bounds = func[0, :, sum(lengths[:b]) + r].tolist()
            seen = func_mask(bounds, r if causal else None, lengths[b])
            visible[b, r, : lengths[b]] = torch.tensor(seen)
    expected = padded_formula(
        batch.q.cpu(), batch.k.cpu(), batch.v.cpu(), lengths, visible, batch.alpha, 1 / 40
    )
    assert_near(out, expected)


def test_func_with_a_finite_window():
    batch = make_batch([4])
    func = torch.zeros(1, 3, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^window_size: expected .*func, got \(3, 0\)"):
        hstu_attn_varlen_func(*positional(batch, func=func, window_size=(3, 0)))


@pytest.mark.parametrize("func", [torch.zeros(3, 4), torch.zeros(1, 2, 4), torch.zeros(1, 3, 4)])
def test_bad_func(func):
    batch = make_batch([4])
    if func.shape == (1, 2, 4):
        func = func.int()
    with pytest.raises(ValueError, match=r"^func: expected .*got "):
        hstu_attn_varlen_func(*positional(batch, func=func))


def test_contexts_and_targets_need_a_causal_window():
    batch = make_batch([4], mask="context-target")
    for window in ((-1, -1), (2, 2), (-1, 1)):
        with pytest.raises(ValueError, match=r"^num_contexts: expected window_size"):
            hstu_attn_varlen_func(*positional(batch, window_size=window))
    with pytest.raises(ValueError, match=r"^target_group_size"):
        hstu_attn_varlen_func(*positional(batch, target_group_size=0))


def test_max_seqlen_q_may_be_above_max_seqlen_k():
    """The maximum may be larger; for more queries than keys see tests/kernels/test_drop_in.py."""
    batch = make_batch([4])
    with pytest.raises(ValueError, match="max_seqlen_q"):
        ours(batch, max_seqlen_q=5, max_seqlen_k=4)
    out = hstu_attn_varlen_func(*positional(batch, max_seqlen_q=5, max_seqlen_k=4))
    assert torch.equal(out, ours(batch, max_seqlen_q=5, max_seqlen_k=5))
