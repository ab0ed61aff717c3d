"""Tests of FP8 on several ranks: their communication, and refused configurations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hstu_attn import (
    FP8,
    HSTULayerConfig,
    HSTUStack,
    Mask,
    Quantization,
    RelativeBias,
    hstu_attention,
)
from hstu_attn.call import NO_BIAS, make_call
from hstu_attn.distributed.context_parallel import ContextBatch, context_parallel_attention
from hstu_attn.distributed.tensor_parallel import shard_heads, shard_state_dict
from hstu_attn.quantization import E4M3
from hstu_attn.testing import make_bias
from tests.helpers.distributed_runs import run_ranks
from tests.helpers.fp8 import accuracy_batch, relative_error

LENGTHS = [0, 300, 1, 37]


Errors = list[tuple[str, float, float]]  # name, error on a rank, error in one process


def _errors_of_attention() -> Errors:
    """Returns errors with and without a bias; checks that gradients equal those in 16 bits."""
    errors = []
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
        errors.append((label, relative_error(found, context.shard(exact)), of_one_rank))
        offsets = {"cu_seqlens": batch.cu_seqlens_q, "max_seqlen": batch.max_seqlen_q}
        assert torch.equal(context_parallel_attention(*local, **offsets, **options), found)

        dout = context.shard(torch.randn_like(batch.v))
        without = context.attention(*local, **options | {"quantization": None})
        assert not torch.equal(without, found), label
        gradients = torch.autograd.grad(found, local, dout)
        for ours, theirs in zip(gradients, torch.autograd.grad(without, local, dout), strict=True):
            assert torch.equal(ours, theirs), label
    return errors


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
    call = make_call(offsets, 6)._replace(quant_mode=6)
    with pytest.raises(ValueError, match="quant_mode: expected -1, or an FP8 mode"):
        context.attend(q, q, q, call, bias)


def _errors_of_layers() -> Errors:
    """Returns errors of layers that share rows, and of layers that share heads."""
    errors = []
    widths = {"embedding_dim": 64, "num_heads": 2, "hidden_dim": 32, "attention_dim": 32}
    config = HSTULayerConfig(**widths, scaling_seqlen=300)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    x = torch.randn(sum(LENGTHS), 64).bfloat16()
    weights = {name: p.detach() for name, p in HSTUStack(config, 2).named_parameters()}

    def increment(fp8: FP8 | None, context: ContextBatch | None, heads: bool) -> torch.Tensor:
        stack: nn.Module = HSTUStack(replace(config, fp8=fp8), 2)
        if heads:
            stack = shard_heads(stack, dist.group.WORLD)
            stack.load_state_dict(shard_state_dict(stack, weights))
        else:
            stack.load_state_dict(weights)
        rows = x if context is None else context.shard(x)
        out = stack(rows, offsets, 300, context=context)
        out.sum().backward()
        assert all(p.grad.isfinite().all() for p in stack.parameters())
        return out.detach().double() - rows

    exact = increment(None, None, False)
    context = ContextBatch(offsets, 300)
    for fp8 in (FP8(Quantization(smooth_k=True)), FP8(Quantization(), linears=True)):
        whole = increment(fp8, None, False)
        for shared, found, part in (
            ("heads", increment(fp8, None, True), lambda x: x),
            ("rows", increment(fp8, context, False), context.shard),
        ):
            error, of_one_rank = (relative_error(x, part(exact)) for x in (found, part(whole)))
            errors.append((f"{shared}, {fp8}", error, of_one_rank))
    return errors


@pytest.mark.slow
@pytest.mark.parametrize("errors_of", [_errors_of_attention, _errors_of_layers])
def test_two_ranks_quantize_as_one_does(errors_of):
    for errors in run_ranks(2, errors_of):
        for label, error, of_one_rank in errors:
            assert 0.01 < error < 0.15, label  # 16 bits have errors of .002
            assert 0.5 * of_one_rank < error < 1.5 * of_one_rank, (label, error, of_one_rank)


@pytest.mark.slow
def test_refusals():
    run_ranks(2, _check_refusals)


def test_settings_of_a_call_are_passed_on_and_tensors_of_others_are_refused():
    from hstu_attn.distributed import context_parallel, context_rows

    offsets = torch.tensor([0, 6])
    whole = make_call(offsets, 6, mask=Mask.causal())
    settings = {
        name: not default if isinstance(default, bool) else default + 3
        for name, default in whole._field_defaults.items()
        if default is not None and not name.startswith("window")
    }
    whole = whole._replace(**settings)
    context_rows.check_call(whole)
    mask = Mask.from_row_spans(torch.ones(4, 4, dtype=torch.int32))
    part = context_parallel._Call(context_parallel._Keys.SHARD, offsets, offsets, 2, 4, mask)
    settings |= {"target_group_size": 1, "min_full_attn_seq_len": 0}  # as the part's mask needs
    expected = make_call(offsets, 2, offsets, 4, mask=mask)._replace(**settings)
    assert part.arguments(whole) == expected

    for name in ("attn_scale", "seqused_q", "q_descale"):
        with pytest.raises(NotImplementedError, match=f"{name}: context parallelism"):
            context_rows.check_call(whole._replace(**{name: torch.ones(6)}))
