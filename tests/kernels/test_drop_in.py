"""Tests of arguments that the public libraries' functions accept, unlike `hstu_attention`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hstu_attn import (
    Mask,
    PagedKV,
    append_paged_kv,
    hstu_attention,
    hstu_attn_qkvpacked_func,
    hstu_attn_varlen_func,
)
from hstu_attn.compat.generative_recommenders import delta_hstu_mha, hstu_mha
from hstu_attn.interface import clamped_attention
from hstu_attn.testing import (
    BIAS_NAMES,
    MASK_NAMES,
    Batch,
    check_against_reference,
    make_batch,
    make_paged_batch,
    offsets,
    run,
)
from tests.helpers import raw_ops
from tests.helpers.small_batches import check_small_batch

BF16 = torch.bfloat16
Attention = Callable[..., Tensor]


def varlen(**replaced: Any) -> Attention:
    """Returns `hstu_attn_varlen_func` as a function with the arguments of `hstu_attention`; the
    arguments given here replace some.
    """

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        mask, bias, paged = options["mask"], options["bias"], options["paged_kv"]
        arguments = {
            "cu_seqlens_q": options["cu_seqlens_q"],
            "cu_seqlens_k": options["cu_seqlens_k"],
            "seqused_q": options["seqused_q"],
            "seqused_k": options["seqused_k"],
            "max_seqlen_q": options["max_seqlen_q"],
            "max_seqlen_k": options["max_seqlen_k"],
            "scaling_seqlen": options["scaling_seqlen"],
            "num_contexts": mask.num_contexts,
            "num_targets": mask.num_targets,
            "target_group_size": mask.target_group_size,
            "window_size": (-1, 0) if mask.func_causal else mask.window_size,
            "alpha": options["alpha"],
            "rab": None if bias is None else bias.rab,
            "has_drab": bias is not None,
            "func": mask.func,
        }
        if paged is not None:
            names = ("kv_cache", "page_offsets", "page_ids", "last_page_lens")
            arguments |= {name: getattr(paged, name) for name in names}
        return hstu_attn_varlen_func(q, k, v, **{**arguments, **replaced})

    return call


def ints(values: list[int], device: str, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, device=device).to(dtype)


def refuse(name: str, function: Attention, batch: Batch) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: expected .*got "):
        function(batch.q, batch.k, batch.v, **batch.options())


# ---------------------------------------------------------------------------------------------
# More queries than keys
# ---------------------------------------------------------------------------------------------

# NOTE: rows of a bias of 136 entries are aligned to 16 bytes, as sm90's kernels need them.
QUERIES, KEYS = [70, 9, 200, 4, 1], [70, 5, 136, 0, 1]


def check_rows_in_front(results: dict[str, Tensor], queries: list[int], keys: list[int]) -> None:
    """Checks that rows before the first key have an output and a gradient of exactly 0."""
    begin = 0
    for q_len, k_len in zip(queries, keys, strict=True):
        front = slice(begin, begin + max(0, q_len - k_len))
        assert not results["out"][front].any()
        assert not results["dq"][front].any()
        begin += q_len


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mask", MASK_NAMES)
def test_more_queries_than_keys(mask, dtype):
    batch = make_batch(KEYS, QUERIES, dtype=dtype, mask=mask)
    refuse("max_seqlen_q", hstu_attention, batch)
    refuse("cu_seqlens_q", hstu_attention, replace(batch, max_seqlen_k=200))
    check_rows_in_front(check_against_reference(clamped_attention, batch), QUERIES, KEYS)


@pytest.mark.parametrize("bias", BIAS_NAMES)
def test_more_queries_than_keys_beside_a_bias(bias):
    batch = make_batch(KEYS, QUERIES, mask="causal", bias=bias)
    check_rows_in_front(check_against_reference(clamped_attention, batch), QUERIES, KEYS)


@pytest.mark.sanitize
@pytest.mark.parametrize("bias", [None, "rab"], ids=["plain", "rab"])
@pytest.mark.parametrize("mask", ["full", "causal", "context-target", "func-3", "func-5-causal"])
def test_more_queries_than_keys_in_fbgemm_calls(device, mask, bias):
    batch = make_batch(KEYS, QUERIES, dtype=BF16, device=device, mask=mask, bias=bias)
    check_rows_in_front(check_small_batch(varlen(), batch), QUERIES, KEYS)


def test_rows_in_front_leave_the_others_as_they_are():
    """Without the rows in front, the sequence has as many queries as keys and the same results."""
    queries, keys = [9, 6], [5, 6]
    batch = make_batch(keys, queries, dtype=torch.float64, mask="causal")
    visible = torch.arange(15) >= 4
    shortened = replace(
        batch, q=batch.q[visible], cu_seqlens_q=batch.cu_seqlens_k, max_seqlen_q=6, scaling_seqlen=9
    )
    dout = torch.randn_like(batch.q)
    actual = run(clamped_attention, batch, dout)
    expected = run(hstu_attention, shortened, dout[visible])
    for name in ("out", "dq"):
        torch.testing.assert_close(actual[name][visible], expected[name])
    for name in ("dk", "dv"):
        torch.testing.assert_close(actual[name], expected[name])


def test_packed_tensor_with_more_queries_than_keys(device):
    """Queries and keys are rows of one tensor, divided into different sequences."""
    queries, keys = [30, 2, 8], [9, 2, 29]
    batch = make_batch(keys, queries, dtype=BF16, device=device, mask="causal")

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return hstu_attn_qkvpacked_func(
            torch.stack([q, k, v], 1),
            options["cu_seqlens_q"],
            options["cu_seqlens_k"],
            None,
            None,
            options["max_seqlen_q"],
            options["max_seqlen_k"],
            window_size=(-1, 0),
            alpha=options["alpha"],
        )

    check_rows_in_front(check_against_reference(call, batch), queries, keys)


# ---------------------------------------------------------------------------------------------
# Counts beyond what a sequence has
# ---------------------------------------------------------------------------------------------

LENGTHS = [0, 2, 70, 9]
# The counts as passed, and what they mean.
TARGETS, POSSIBLE_TARGETS = [7, 3, 100, -2], [0, 2, 70, 0]
FEW_TARGETS = [7, 3, 5, -2], [0, 2, 5, 0]
CONTEXTS, POSSIBLE_CONTEXTS = [3, -1, -(2**31), 2], [0, 0, 0, 2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("window", [(-1, 0), (5, 0)], ids=["causal", "local"])
@pytest.mark.parametrize(
    ("targets", "possible"), [(TARGETS, POSSIBLE_TARGETS), FEW_TARGETS], ids=["all", "few"]
)
def test_counts_are_clamped(device, dtype, window, targets, possible):
    mask = Mask(window, ints(POSSIBLE_CONTEXTS, device), ints(possible, device), 2)
    batch = make_batch(LENGTHS, dtype=BF16, device=device, mask=mask)
    call = varlen(
        num_targets=ints(targets, device, dtype), num_contexts=ints(CONTEXTS, device, dtype)
    )
    check_against_reference(call, batch)


@pytest.mark.parametrize("name", ["num_targets", "num_contexts"])
@pytest.mark.parametrize("value", [-1, 10])
def test_counts_that_hstu_attention_refuses(name, value):
    counts = torch.tensor([0, 0, 0, value])
    batch = make_batch(LENGTHS, mask=replace(Mask.causal(), **{name: counts}))
    if (name, value) != ("num_contexts", 10):
        refuse(name, hstu_attention, batch)
    clamped = replace(Mask.causal(), **{name: counts.clamp(0, 9)})
    out = clamped_attention(batch.q, batch.k, batch.v, **batch.options())
    batch.mask = clamped
    assert torch.equal(out, hstu_attention(batch.q, batch.k, batch.v, **batch.options()))


@pytest.mark.parametrize("contexts", [0, 2])
def test_meta_calls_of_emptied_sequences(device, contexts):
    """Stochastic depth empties sequences and keeps their counts of targets."""
    targets, possible = [7, 3, 5, 0], [0, 2, 5, 0]
    batch = make_batch(LENGTHS, dtype=BF16, device=device, scaling_seqlen=80)

    def meta(q: Tensor, k: Tensor, v: Tensor, counts: list[int]) -> Tensor:
        return hstu_mha(
            80,
            batch.alpha,
            q,
            k,
            v,
            batch.cu_seqlens_q,
            num_targets=ints(counts, device),
            contextual_seq_len=contexts,
        )

    # In a sequence with fewer tokens than contexts, each row sees itself alone.
    kept = [0, 0, contexts, contexts]
    mask = Mask.causal(num_contexts=ints(kept, device), num_targets=ints(possible, device))
    batch = replace(batch, mask=mask, max_seqlen_q=80, max_seqlen_k=80)
    check_against_reference(lambda q, k, v, **_: meta(q, k, v, targets), batch)


def test_negative_targets_of_meta_calls():
    """A count of -2 means no targets, and a sequence of 2 tokens still has no 3 contexts."""
    q, k, v = torch.randn(3, 11, 2, 16).unbind(0)
    outputs = [
        hstu_mha(9, 0.3, q, k, v, offsets([2, 9]), num_targets=counts, contextual_seq_len=3)
        for counts in (torch.tensor([-2, -1]), torch.tensor([0, 0]), None)
    ]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_delta_calls_with_sequences_shorter_than_delta(device):
    lengths, delta = [20, 4, 0, 12], 13
    batch = make_batch(lengths, [delta] * 4, dtype=BF16, device=device, mask="causal")
    batch.scaling_seqlen = 20

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return delta_hstu_mha(20, batch.alpha, q, k, v, options["cu_seqlens_k"])

    check_rows_in_front(check_against_reference(call, batch), [delta] * 4, lengths)


# ---------------------------------------------------------------------------------------------
# Pages
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_seqlen_k", [130, 40, 0])
def test_max_seqlen_k_of_paged_calls_may_be_below_the_cached_lengths(device, max_seqlen_k):
    batch = make_paged_batch([300, 16, 0], [33, 0, 5], [7, 64, 0], dtype=BF16, device=device)
    check_against_reference(varlen(max_seqlen_k=max_seqlen_k), batch, backward=False)
    if device == "cpu":
        name = "max_seqlen_k" if max_seqlen_k >= batch.max_seqlen_q else "max_seqlen_q"
        refuse(name, hstu_attention, replace(batch, max_seqlen_k=max_seqlen_k))


def test_max_seqlen_k_must_be_right_without_pages_and_beside_a_bias():
    batch = make_batch([70, 5], [3, 5], mask="causal")
    refuse("max_seqlen_k", varlen(max_seqlen_k=69), batch)
    paged = make_paged_batch([40, 16], [3, 0], [0, 2])
    refuse("max_seqlen_k", varlen(max_seqlen_k=10, rab=torch.zeros(2, 1, 10, 10)), paged)


@pytest.mark.parametrize("targets", [[9, 90], [-1, 3]], ids=["more-than-rows", "negative"])
def test_targets_of_paged_calls_are_at_most_the_rows(device, targets):
    """Targets are rows of q; if the count is larger, all rows are targets."""
    possible = [min(max(0, count), rows) for count, rows in zip(targets, (6, 4), strict=True)]
    new = [rows - count for count, rows in zip(possible, (6, 4), strict=True)]
    batch = make_paged_batch([40, 16], new, possible, dtype=BF16, device=device)
    check_against_reference(varlen(num_targets=ints(targets, device)), batch, backward=False)


def test_paged_sequences_that_read_no_page_need_none(device):
    """Emptied sequences keep their counts of targets, and 16 as length of the last page."""
    batch = make_paged_batch([40, 0, 0], [3, 0, 0], [5, 0, 4], dtype=BF16, device=device)
    full = (batch.paged_kv.last_page_lens - 1) % 16 + 1
    assert full.tolist()[1:] == [16, 16]
    call = varlen(last_page_lens=full, num_targets=ints([5, 8, 4], device))
    check_against_reference(call, batch, backward=False)


def test_pages_that_do_not_match_the_lengths_are_refused():
    def fresh() -> Batch:
        return make_paged_batch([40, 16], [3, 0], [5, 2])

    for name, index, value in (
        ("page_ids", 1, 99),
        ("page_ids", 0, -1),
        ("page_offsets", 1, 2),
        ("page_offsets", 2, 99),
        ("last_page_lens", 0, 16),
    ):
        batch = fresh()
        getattr(batch.paged_kv, name)[index] = value
        refuse(name, varlen(), batch)


def with_larger_tables(pages: PagedKV) -> PagedKV:
    """Returns the same pages in larger buffers, which end with values of another batch."""

    def extended(values: Tensor, count: int) -> Tensor:
        return torch.cat([values, values.new_full((count,), 2**31 - 1)])

    return PagedKV(
        pages.kv_cache,
        extended(pages.page_offsets, 5),
        extended(pages.page_ids, 40),
        extended(pages.last_page_lens, 3),
        pages.kv_scales,
    )


@pytest.mark.sanitize
@pytest.mark.parametrize("function", [hstu_attention, varlen()], ids=["ours", "fbgemm"])
def test_page_tables_of_a_larger_batch(device, function):
    batch = make_paged_batch([90, 16, 0], [33, 0, 5], [7, 4, 0], dtype=BF16, device=device)
    expected = run(function, batch)["out"]
    batch.paged_kv = with_larger_tables(batch.paged_kv)
    assert torch.equal(run(function, batch)["out"], expected)
    check_small_batch(function, batch, backward=False)


@pytest.mark.gpu
def test_checked_calls_take_page_tables_of_a_larger_batch(monkeypatch):
    monkeypatch.setenv("HSTU_ATTN_CHECK", "1")
    batch = make_paged_batch([90, 16], [33, 0], [7, 4], dtype=BF16, device="cuda")
    batch.paged_kv = with_larger_tables(batch.paged_kv)
    check_against_reference(hstu_attention, batch, backward=False)


def test_append_to_page_tables_of_a_larger_batch(device):
    batch = make_paged_batch([40, 16, 0], [3, 17, 5], [5, 0, 2], dtype=BF16, device=device)
    k, v = torch.randn(2, *batch.k.shape, device=device).to(BF16).unbind(0)
    empty = torch.zeros_like(batch.paged_kv.kv_cache)
    caches = []
    for pages in (batch.paged_kv, with_larger_tables(batch.paged_kv)):
        pages.kv_cache = empty.clone()
        append_paged_kv(
            k,
            v,
            pages,
            cu_seqlens_q=batch.cu_seqlens_q,
            cu_seqlens_k=batch.cu_seqlens_k,
            num_targets=batch.mask.num_targets,
        )
        caches.append(pages.kv_cache)
    assert torch.equal(*caches)
    assert not torch.equal(caches[0], empty)


@pytest.mark.parametrize("name", ["page_offsets", "last_page_lens"])
def test_page_tables_that_are_too_short(name):
    batch = make_paged_batch([40, 16], [3, 0], [5, 2])
    setattr(batch.paged_kv, name, getattr(batch.paged_kv, name)[:-1])
    refuse(name, hstu_attention, batch)
    refuse(name, varlen(), batch)
    if name == "page_offsets":
        with pytest.raises(ValueError, match=r"page_offsets: expected at least 3 values .*got "):
            append_paged_kv(
                batch.k,
                batch.v,
                batch.paged_kv,
                cu_seqlens_q=batch.cu_seqlens_q,
                cu_seqlens_k=batch.cu_seqlens_k,
            )


# ---------------------------------------------------------------------------------------------
# What raises on a CPU in every function
# ---------------------------------------------------------------------------------------------

X = torch.zeros(12, 2, 16)


def call_packed(q_offsets: Tensor, k_offsets: Tensor) -> Tensor:
    qkv = torch.zeros(12, 3, 2, 16)
    return hstu_attn_qkvpacked_func(qkv, q_offsets, k_offsets, None, None, 12, 12)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ours": lambda q, k: hstu_attention(
        X, X, X, cu_seqlens_q=q, cu_seqlens_k=k, max_seqlen_q=12, max_seqlen_k=12
    ),
    "varlen": lambda q, k: hstu_attn_varlen_func(X, X, X, q, k, None, None, 12, 12, -1),
    "qkvpacked": call_packed,
    "meta": lambda q, k: hstu_mha(12, 1.0, X, X, X, torch.maximum(q, k)),
    "delta": lambda q, k: delta_hstu_mha(12, 1.0, X, X, X, k if k[-1] != 12 else q),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
@pytest.mark.parametrize("wrong", [[0, 7, 6, 13], [-1, 5, 5, 13], [0, 5, 5, 13]])
@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
def test_offsets_that_decrease_or_pass_the_end(function, wrong, of_keys):
    good, bad = torch.tensor([0, 5, 5, 12]), torch.tensor(wrong)
    with pytest.raises(ValueError, match=r"^cu_seqlens_[qk]: expected .*offsets.*got "):
        function(*((good, bad) if of_keys else (bad, good)))


def test_lengths_that_are_not_clamped():
    batch = make_batch(LENGTHS, mask="causal")
    refuse("seqused_q", varlen(seqused_q=torch.tensor([0, 3, 70, 9])), batch)
    refuse("seqused_k", varlen(seqused_k=torch.tensor([0, -1, 70, 9])), batch)
    refuse("max_seqlen_q", varlen(max_seqlen_q=69), batch)
    refuse("max_seqlen_q", varlen(max_seqlen_q=-1), batch)


@pytest.mark.gpu
def test_checked_calls_on_a_gpu_clamp_the_same(monkeypatch):
    monkeypatch.setenv("HSTU_ATTN_CHECK", "1")
    batch = make_batch(KEYS, QUERIES, dtype=BF16, device="cuda", mask="causal")
    batch.max_seqlen_k = 200
    refuse("cu_seqlens_q", hstu_attention, batch)
    check_against_reference(varlen(num_targets=ints([-1] * 5, "cuda")), batch)
    bad = batch.cu_seqlens_k.clone()
    bad[1] = 10**6
    refuse("cu_seqlens_k", varlen(cu_seqlens_k=bad), batch)


# ---------------------------------------------------------------------------------------------
# Strides
# ---------------------------------------------------------------------------------------------


def by_columns(x: Tensor) -> Tensor:
    """Returns the same values with the last dimension's elements 8 or more apart."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def check_copies(function: Attention, batch: Batch) -> None:
    dout = torch.randn_like(batch.q)
    expected = run(function, batch, dout)
    strided = replace(batch, **{name: by_columns(getattr(batch, name)) for name in "qkv"})
    assert all(getattr(strided, name).stride(-1) > 1 for name in "qkv")
    actual = run(function, strided, dout)
    for name, value in expected.items():
        assert value.any()
        assert torch.equal(actual[name], value), name


def test_strides_that_hstu_attention_refuses_are_copied(device, deterministic):
    batch = make_batch([23, 40], dtype=BF16, device=device, mask="causal")
    check_copies(varlen(), batch)
    check_copies(
        lambda q, k, v, **_: hstu_mha(40, 0.3, q, k, v, batch.cu_seqlens_q),
        batch,
    )
    delta = make_batch([23, 40], [8, 8], dtype=BF16, device=device, mask="causal")
    check_copies(
        lambda q, k, v, **_: delta_hstu_mha(40, 0.3, q, k, v, delta.cu_seqlens_k),
        delta,
    )
    refuse("q", hstu_attention, replace(batch, q=by_columns(batch.q)))


def test_a_packed_tensor_in_any_strides_is_copied(device, deterministic):
    batch = make_batch([23, 40], dtype=BF16, device=device)
    qkv = torch.stack([batch.q, batch.k, batch.v], 1)
    results = []
    for x in (qkv, by_columns(qkv)):
        leaf = x.detach().requires_grad_()
        out = hstu_attn_qkvpacked_func(
            leaf, batch.cu_seqlens_q, batch.cu_seqlens_q, None, None, 40, 40
        )
        results.append((out, *torch.autograd.grad(out, leaf, torch.ones_like(out))))
    for actual, expected in zip(*results, strict=True):
        assert expected.any()
        assert torch.equal(actual, expected)


def test_what_is_no_tensor_is_named():
    cu_seqlens = torch.tensor([0, 12])
    with pytest.raises(ValueError, match=r"^k: expected a tensor, got list"):
        hstu_attn_varlen_func(X, [1.0], X, cu_seqlens, cu_seqlens, None, None, 12, 12, -1)


# ---------------------------------------------------------------------------------------------
# Every way to the kernels
# ---------------------------------------------------------------------------------------------


def call_with_wrong_targets(q: Tensor, k: Tensor, v: Tensor, targets: Tensor) -> Tensor:
    cu_seqlens_q, cu_seqlens_k = offsets([9, 6]), offsets([5, 6])
    return hstu_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, None, None, 9, 6, -1, None, targets, 1, (-1, 0)
    )


def arguments_with_wrong_targets() -> tuple[Tensor, ...]:
    shapes = (15, 2, 16), (11, 2, 16), (11, 2, 16)
    return *(torch.randn(shape, requires_grad=True) for shape in shapes), torch.tensor([7, -1])


def with_gradients(function: Attention, arguments: tuple[Tensor, ...]) -> list[Tensor]:
    out = function(*arguments)
    return [out, *torch.autograd.grad(out, arguments[:3], torch.ones_like(out))]


@pytest.mark.slow
def test_compiled_and_exported_calls_clamp_the_same():
    arguments = arguments_with_wrong_targets()
    expected = with_gradients(call_with_wrong_targets, arguments)
    compiled = torch.compile(call_with_wrong_targets, fullgraph=True, backend="aot_eager")
    for actual, value in zip(with_gradients(compiled, arguments), expected, strict=True):
        torch.testing.assert_close(actual, value)

    class Module(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            return call_with_wrong_targets(*inputs)

    exported = torch.export.export(Module(), arguments).module()
    torch.testing.assert_close(exported(*arguments), expected[0])


def test_the_operator_says_whether_it_is_strict():
    batch = make_batch([5, 6], [9, 6], mask="causal")
    with pytest.raises(raw_ops.BAD_ARGUMENT, match=r"max_seqlen_q: expected at most .*got 9"):
        raw_ops.forward(batch)
    out = raw_ops.forward(batch, strict=False)
    assert torch.equal(out, clamped_attention(batch.q, batch.k, batch.v, **batch.options()))
    dout = torch.randn_like(out)
    with pytest.raises(raw_ops.BAD_ARGUMENT, match=r"max_seqlen_q: expected at most .*got 9"):
        raw_ops.backward(batch, dout, has_drab=False, has_dtables=False)
    gradients = raw_ops.backward(batch, dout, has_drab=False, has_dtables=False, strict=False)
    expected = run(clamped_attention, batch, dout)
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=False):
        assert torch.equal(gradient, expected[name])
