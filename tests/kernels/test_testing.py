"""Tests of `hstu_attn.testing`: tolerances and poisoned memory find errors; inputs are varied."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hstu_attn import DenseBias, Mask, RelativeBias, hstu_attention, reference
from hstu_attn.mask import batch_row_spans, dense_mask
from hstu_attn.testing import (
    BIAS_NAMES,
    MASK_NAMES,
    allowed_error,
    assert_matches,
    check_against_reference,
    make_batch,
    make_lengths,
    make_mask,
    make_paged_batch,
    offsets,
    poison,
    poisoned_memory,
    run,
)


def test_the_allowed_error():
    exact = torch.tensor([1.0, -4.0], dtype=torch.float64)
    same_dtype_reference = torch.tensor([1.25, -4.0])
    worse = torch.tensor([1.0, -3.5])
    two_roundings = 4 * torch.finfo(torch.bfloat16).eps
    allowed = allowed_error(exact, [same_dtype_reference], torch.bfloat16)
    assert allowed == pytest.approx(2 * 0.25 + two_roundings)
    allowed = allowed_error(exact, [same_dtype_reference, worse], torch.bfloat16)
    assert allowed == pytest.approx(2 * 0.5 + two_roundings)
    assert allowed_error(exact[:0], [same_dtype_reference[:0]], torch.float32) == 0


def test_a_result_within_the_rule_passes_and_one_beyond_fails():
    exact = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    same_dtype_reference = exact.float() + 0.125
    assert_matches("x", exact.float() + 0.24, exact, same_dtype_reference)
    with pytest.raises(AssertionError, match=r"x: error 2\.6.* at \[0, 0\].* 2 of 2 elements"):
        assert_matches("x", exact.float() + 0.26, exact, same_dtype_reference)
    with pytest.raises(AssertionError, match="NaN or Inf"):
        assert_matches("x", torch.tensor([[1.0, float("nan")]]), exact, same_dtype_reference)
    with pytest.raises(AssertionError, match=r"\(2,\) != \(1, 2\)"):
        assert_matches("x", torch.ones(2), exact, same_dtype_reference)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda name, x: x * 1.001 if name == "out" else x,
        lambda name, x: x.roll(1, 0) if name == "dk" else x,
        lambda name, x: torch.zeros_like(x) if name == "drab" else x,
        lambda name, x: x.masked_fill(x == x.max(), float("nan")) if name == "dq" else x,
    ],
    ids=["scaled", "shifted", "zero", "one-nan"],
)
def test_a_wrong_implementation_is_found(spoil):
    """The check fails for a function with a wrong output or a wrong gradient."""
    batch = make_batch([20, 7], mask="causal", bias="rab")
    check_against_reference(reference.hstu_attention, batch)

    class Spoilt(torch.autograd.Function):
        @staticmethod
        def forward(ctx, name, x):
            ctx.name = name
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return None, spoil(ctx.name, gradient)

    def wrong(q, k, v, *, bias, **options):
        q, k, v = Spoilt.apply("dq", q), Spoilt.apply("dk", k), Spoilt.apply("dv", v)
        bias = DenseBias(Spoilt.apply("drab", bias.rab))
        out = reference.hstu_attention(q, k, v, bias=bias, **options)
        return spoil("out", out)

    with pytest.raises(AssertionError, match=r"^(out|dq|dk|drab): "):
        check_against_reference(wrong, batch)


@pytest.mark.parametrize(("factor", "passes"), [(1 + 2**-11, True), (1 + 2**-8, False)])
def test_an_entry_that_one_score_reads_may_be_rounded_once(factor, passes):
    """A sequence of one token has one score, so its gradient is all of a table's.

    It is one product: where a sum cancels, the error of fp16 would allow more than a rounding.
    """
    batch = make_batch([1], heads=1, dtype=torch.float16, mask="causal")
    batch.q.zero_()
    batch.v.zero_()[..., 0] = 1
    batch = batch.with_bias(RelativeBias(torch.ones(1, 1)))

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weights):
            return weights.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * factor

    def call(q, k, v, *, bias, **options):
        bias = RelativeBias(Scaled.apply(bias.pos_weight))
        fp32 = reference.hstu_attention(q, k, v, bias=bias, compute_dtype=torch.float32, **options)
        return fp32.to(q.dtype)

    if passes:
        check_against_reference(call, batch)
    else:
        with pytest.raises(AssertionError, match="dpos_weight: error"):
            check_against_reference(call, batch)


def test_an_unwritten_output_is_found():
    def lazy(q, k, v, **options):
        return q.new_empty(q.shape[0], q.shape[1], v.shape[2])

    with pytest.raises(AssertionError, match="out: has NaN or Inf"):
        check_against_reference(lazy, make_batch([20, 7]), backward=False)


def test_poison():
    floats, ints = torch.zeros(3, requires_grad=True), torch.zeros(3, dtype=torch.int32)
    poison(floats, None, ints)
    assert floats.isnan().all()
    assert (ints == 2**31 - 1).all()


def test_poisoned_memory_is_nan_and_leaves_no_trace():
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned_memory():
        assert torch.empty(100).isnan().all()
        assert torch.zeros(2).new_empty((3, 4)).isnan().all()
    assert torch.are_deterministic_algorithms_enabled() == before


def test_lengths():
    assert make_lengths(0, 9) == []
    lengths = make_lengths(50, 9, shortest=2)
    assert max(lengths) == 9
    assert min(lengths) >= 2
    assert offsets([3, 0, 4]).tolist() == [0, 3, 3, 7]


@pytest.mark.parametrize("name", MASK_NAMES)
def test_masks_show_something_and_hide_something(name):
    lengths = [40, 55, 60]
    mask = make_mask(name, lengths)
    shown = total = start = 0
    for b, length in enumerate(lengths):
        visible = dense_mask(
            mask,
            length,
            length,
            num_contexts=0 if mask.num_contexts is None else int(mask.num_contexts[b]),
            num_targets=0 if mask.num_targets is None else int(mask.num_targets[b]),
            first_row=start,
        )
        start += length
        shown += int(visible.sum())
        total += visible.numel()
    assert shown > 0
    assert (shown < total) == (name != "full")


@pytest.mark.parametrize("name", BIAS_NAMES)
def test_biases_matter(name):
    batch = make_batch([12, 30], mask="causal", bias=name)
    with_bias = run(reference.hstu_attention, batch)["out"]
    without = run(reference.hstu_attention, replace(batch, bias=None))["out"]
    assert (with_bias - without).abs().max() > 1e-4


def test_paged_batches_hide_nan_where_pages_are_to_be_read():
    batch = make_paged_batch([20], [3], [2], page_size=16)
    assert batch.k[:3].isnan().all()
    assert torch.isfinite(batch.k[3:]).all()
    assert batch.paged_kv.kv_cache.isnan().any()
    assert torch.isfinite(run(reference.hstu_attention, batch)["out"]).all()


def test_batch_row_spans_of_an_empty_batch():
    spans = batch_row_spans(Mask.full(), offsets([]), offsets([]), total_q=2)
    assert torch.equal(spans, torch.zeros(2, 4, dtype=torch.int32))


def test_the_rule_does_not_hang_on_the_order_of_a_sum():
    """With few rows, a matrix product sums in SIMD lanes, more accurately than sequentially."""
    for _ in range(40):
        batch = make_batch([100, 60], [2, 4], dim=256, dim_v=8, dtype=torch.float32, mask="no-left")
        check_against_reference(hstu_attention, batch)
