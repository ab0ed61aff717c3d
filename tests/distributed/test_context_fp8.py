"""Tests of FP8 attention under context parallelism: what ranks pass on, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hstu_attn import Quantization, RelativeBias, hstu_attention
from hstu_attn.call import NO_BIAS, make_call
from hstu_attn.distributed.context_parallel import ContextBatch, context_parallel_attention
from hstu_attn.quantization import E4M3
from hstu_attn.testing import make_bias
from tests.helpers.distributed_runs import run_ranks
from tests.helpers.fp8 import accuracy_batch, relative_error

LENGTHS = [0, 300, 1, 37]


def _check_quantization() -> None:
    """Checks that every rank quantizes, with and without a bias, and that gradients do not."""
    for bias, quantization in (
        (None, Quantization()),
        (None, Quantization(1, smooth_k=True)),
        (None, Quantization(4)),
        ("position", Quantization()),
        ("position", Quantization(5, smooth_k=True)),
    ):
        batch = accuracy_batch("silu", 32, LENGTHS, heads=2)
        if bias:
            batch = batch.with_bias(make_bias(bias, batch, dtype=torch.float32))
        exact = hstu_attention(batch.q, batch.k, batch.v, **batch.options())
        quantized = replace(batch, quantization=quantization)
        whole = hstu_attention(batch.q, batch.k, batch.v, **quantized.options())
        context = ContextBatch(batch.cu_seqlens_q, batch.max_seqlen_q)
        names = ("mask", "bias", "alpha", "scaling_seqlen", "quantization")
        options = {name: getattr(quantized, name) for name in names}
        local = [context.shard(x).requires_grad_() for x in (batch.q, batch.k, batch.v)]
        found = context.attention(*local, **options)
        label = f"{bias}, {quantization}"
        of_one_rank = relative_error(context.shard(whole), context.shard(exact))
        error = relative_error(found, context.shard(exact))
        assert 0.5 * of_one_rank < error < 1.5 * of_one_rank, (label, error, of_one_rank)
        offsets = {"cu_seqlens": batch.cu_seqlens_q, "max_seqlen": batch.max_seqlen_q}
        assert torch.equal(context_parallel_attention(*local, **offsets, **options), found)

        dout = context.shard(torch.randn_like(batch.v))
        without = context.attention(*local, **options | {"quantization": None})
        assert not torch.equal(without, found), label
        gradients = torch.autograd.grad(found, local, dout)
        for ours, theirs in zip(gradients, torch.autograd.grad(without, local, dout), strict=True):
            assert torch.equal(ours, theirs), label


def _check_refusals() -> None:
    offsets = torch.tensor([0, 6, 11])
    context = ContextBatch(offsets, 6)
    q = torch.zeros(len(context.rows), 2, 16, dtype=torch.bfloat16)
    one = torch.ones(())
    for bias in (NO_BIAS, (None, torch.zeros(2, 5), None)):
        for changes, name in (
            ({"attn_scale": one}, "attn_scale"),
            ({"descales": (one, one, one)}, "q_descale"),
            ({"seqused_k": torch.tensor([5, 5])}, "seqused_k"),
        ):
            call = make_call(offsets, 6, **changes)
            with pytest.raises(NotImplementedError, match=f"{name}: context parallelism"):
                context.attend(q, q, q, call, bias)
    with pytest.raises(NotImplementedError, match=r"q: .* does not have float8_e4m3fn"):
        context.attention(*[q.to(E4M3)] * 3)
    with pytest.raises(ValueError, match="quantization: expected a Quantization or None, got int"):
        context.attention(q, q, q, quantization=2, bias=RelativeBias(torch.zeros(2, 5)))
    with pytest.raises(ValueError, match="quant_mode: expected -1, or an FP8 mode"):
        context.attention(q, q, q, quantization=Quantization(6))


def _check_all() -> None:
    _check_quantization()
    _check_refusals()


def test_two_ranks():
    run_ranks(2, _check_all)


def test_a_new_argument_is_refused_until_it_is_passed_on(monkeypatch):
    from hstu_attn.distributed import context_rows

    passed_on = context_rows._PASSED_ON - {"quant_mode"}
    monkeypatch.setattr(context_rows, "_PASSED_ON", passed_on)
    call = make_call(torch.tensor([0, 6]), 6, quantization=Quantization())
    with pytest.raises(NotImplementedError, match="quant_mode: context parallelism"):
        context_rows.check_call(call)
