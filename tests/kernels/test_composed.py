"""Tests of attention composed of torch functions, which computes fp32 and fp64 on a GPU.

On a GPU the public functions reach it; on a CPU its operators are called.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hstu_attn import DenseBias, Mask, RelativeBias, composed, hstu_attention, slots
from hstu_attn.testing import (
    BIAS_NAMES,
    MASK_NAMES,
    Batch,
    check_against_reference,
    make_batch,
    make_lengths,
    make_paged_batch,
    poison,
    run,
)
from tests.helpers import raw_ops
from tests.helpers.composed import (
    attention_of,
    composed_attention,
    count_chunked,
    count_composed,
    group_in_order,
)

FP32, FP64 = torch.float32, torch.float64
DTYPES = [FP32, FP64]

with_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "fp64"])


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits chunks to a few rows of one or two sequences."""
    monkeypatch.setattr(composed, "CHUNK_ELEMENTS", 5000)
    monkeypatch.setattr(composed, "_HEADS_OF_BUCKETS", 1)
    monkeypatch.setattr(slots, "CPU_SCORES", 5000)


def random_dout(batch: Batch) -> torch.Tensor:
    return torch.randn(*batch.q.shape[:2], batch.v.shape[2]).to(batch.q)


# ---------------------------------------------------------------------------------------------
# Against the reference
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "rab", "position-time"])
@pytest.mark.parametrize("mask", MASK_NAMES)
def test_mask_and_bias(device, small_chunks, mask, name):
    dtype = DTYPES[MASK_NAMES.index(mask) % 2]
    lengths_k = [*make_lengths(2, 60), 0, 11]
    for lengths_q in (lengths_k, [int(torch.randint(n + 1, ())) for n in lengths_k]):
        batch = make_batch(
            lengths_k, lengths_q, dim_v=24, dtype=dtype, device=device, mask=mask, bias=name
        )
        check_against_reference(attention_of(device), batch)


@pytest.mark.parametrize("dims", [(32, 32), (16, 40)], ids=["equal-dims", "other-dims"])
@pytest.mark.parametrize("used", [False, True], ids=["all", "used"])
def test_rows_and_keys_with_the_same_offsets(device, small_chunks, used, dims):
    """With equal offsets, rows and keys have the same slots, and one operation moves q, k and v."""
    lengths = [70, 0, 31, 12]
    batch = make_batch(lengths, dim=dims[0], dim_v=dims[1], device=device, mask="local-left")
    batch.cu_seqlens_k = batch.cu_seqlens_q
    if used:
        batch.seqused_q = batch.seqused_k = torch.tensor([51, 0, 31, 5], device=device)
        batch.attn_scale = torch.rand(sum(lengths), device=device)
    for mask in (Mask.causal(), Mask.full(), Mask((7, 3)), batch.mask):
        check_against_reference(attention_of(device), replace(batch, mask=mask))


@pytest.mark.slow
@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=4),
    mask=st.sampled_from(MASK_NAMES),
    name=st.sampled_from((None, *BIAS_NAMES)),
    dtype=st.sampled_from(DTYPES),
    dims=st.sampled_from([(8, 8), (32, 8), (16, 40)]),
    heads=st.sampled_from([1, 2, 4]),
    chunk=st.sampled_from([1, 300, 2000, 10**4, 10**5, 2**24]),
    attn_scale=st.sampled_from([None, "one", "rows"]),
    used=st.booleans(),
    window_rows=st.sampled_from([1, 7, 256]),
    in_order=st.booleans(),
)
def test_random_batches(
    seed, lengths, mask, name, dtype, dims, heads, chunk, attn_scale, used, window_rows, in_order
):
    torch.manual_seed(seed)
    lengths_q, lengths_k = [min(pair) for pair in lengths], [max(pair) for pair in lengths]
    assume(any(lengths_k))  # without a key the reference does not read the tables
    options = {}
    if attn_scale is not None:
        options["attn_scale"] = torch.rand(1 if attn_scale == "one" else sum(lengths_q)) - 0.3
    if used:
        options["seqused_q"] = torch.tensor([n - n // 3 for n in lengths_q], dtype=torch.int32)
        options["seqused_k"] = torch.tensor([n - n // 3 // 2 for n in lengths_k])
    batch = make_batch(
        lengths_k,
        lengths_q,
        heads=heads,
        dim=dims[0],
        dim_v=dims[1],
        dtype=dtype,
        mask=mask,
        bias=name,
        **options,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composed, "CHUNK_ELEMENTS", chunk)
        patch.setattr(composed, "_WINDOW_ROWS", window_rows)
        patch.setattr(slots, "CPU_SCORES", chunk)
        if in_order:
            group_in_order(patch)
        check_against_reference(composed_attention, batch)


@with_dtypes
@pytest.mark.parametrize("alpha", [0.0, -0.7, 5.0])
@pytest.mark.parametrize("scaling_seqlen", [-1, 33])
def test_alpha_and_scaling_seqlen(device, dtype, alpha, scaling_seqlen):
    batch = make_batch(
        [66, 20],
        dtype=dtype,
        device=device,
        mask="context-target",
        alpha=alpha,
        scaling_seqlen=scaling_seqlen,
    )
    check_against_reference(attention_of(device), batch)


@pytest.mark.parametrize("size", [1, 9, 31, 1001])
def test_position_tables_of_any_size(device, small_chunks, size):
    """Distances beyond the table use its ends, also in chunks that are entirely beyond it."""
    batch = make_batch([120, 50], [70, 50], heads=6, device=device, mask="local-left")
    batch.mask = Mask.full()
    table = torch.randn(3, size, device=device)
    check_against_reference(attention_of(device), batch.with_bias(RelativeBias(table)))


@pytest.mark.parametrize("buckets", [1, 6, 300])
def test_own_thresholds(device, small_chunks, buckets):
    """Some thresholds are equal, one is 0; with 300 buckets most are empty."""
    thresholds = torch.tensor([0, 5, 5, 100, 2**40], device=device)
    batch = make_batch([50, 30], heads=4, device=device, mask="causal")
    times = torch.randint(-300, 300, (80,), device=device) * 2**33
    table = torch.randn(2, buckets, device=device)
    bias = RelativeBias(None, table, times, None, thresholds)
    check_against_reference(attention_of(device), batch.with_bias(bias))


def test_times_that_are_farther_apart_than_an_int64(device):
    times = torch.tensor([2**63 - 1, -(2**63), 0, -(2**62), 2**62, 2**62 + 7], device=device)
    batch = make_batch([6], device=device)
    bias = RelativeBias(None, torch.randn(1, 200, device=device), times)
    check_against_reference(attention_of(device), batch.with_bias(bias))
    check_against_reference(hstu_attention, batch.with_bias(bias))


@with_dtypes
def test_heads_share_a_dense_bias(device, small_chunks, dtype):
    batch = make_batch([70, 12], heads=6, dtype=dtype, device=device, mask="causal")
    rab = torch.randn(2, 3, 70, 70, dtype=FP32, device=device)
    check_against_reference(attention_of(device), batch.with_bias(DenseBias(rab)))


@with_dtypes
@pytest.mark.parametrize("name", [None, "rab", "position-time"])
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_pages(device, small_chunks, dtype, name, fp8):
    batch = make_paged_batch(
        [300, 16, 0, 5],
        [33, 0, 5, 0],
        [7, 64, 0, 2],
        dtype=dtype,
        device=device,
        target_group_size=3,
        fp8=fp8,
    )
    if name == "rab":
        size = batch.max_seqlen_k
        rab = torch.randn(4, 1, size, size, dtype=dtype, device=device)
        batch = batch.with_bias(DenseBias(rab))
    elif name:
        times = torch.randint(0, 10**6, (int(batch.cu_seqlens_k[-1]),), device=device)
        tables = torch.randn(2, 41, device=device), torch.randn(1, 30, device=device)
        batch = batch.with_bias(RelativeBias(*tables, times))
    check_against_reference(attention_of(device), batch, backward=False)


def test_pages_with_an_understated_length():
    """The functions named after those of other libraries accept an understated length."""
    batch = make_paged_batch([300, 16], [33, 0], [7, 64])
    understated = replace(batch, max_seqlen_k=1)
    check_against_reference(composed_attention, understated, backward=False, strict=False)


# ---------------------------------------------------------------------------------------------
# Rows of no sequence, and NaN, do not reach other rows
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "rab", "position-time"])
def test_rows_of_no_sequence_do_not_matter(device, small_chunks, name):
    batch = make_batch([70, 30], [50, 30], device=device, mask="context-target", bias=name)
    used_q = torch.tensor([41, 30], device=device)
    used_k = torch.tensor([60, 29], device=device)
    batch = replace(batch, seqused_q=used_q, seqused_k=used_k)
    dout = random_dout(batch)
    expected = run(attention_of(device), batch, dout)
    assert not expected["out"][41:50].any()
    assert not expected["dq"][41:50].any()
    assert not expected["dk"][60:70].any()
    poison(batch.q[41:50], dout[41:50], batch.k[60:70], batch.v[60:70], batch.k[99:], batch.v[99:])
    if name == "rab":
        poison(batch.bias.rab[0, :, 60:], batch.bias.rab[1, :, :, 29:])
    for key, value in run(attention_of(device), batch, dout).items():
        assert torch.equal(value, expected[key]), key


def test_nan_of_rows_without_keys(device, small_chunks):
    batch = make_batch([40, 5, 7], [40, 9, 3], dtype=FP32, device=device, mask="causal")
    dout = random_dout(batch)
    expected = run(attention_of(device), batch, dout)
    batch.q[40:44] = dout[40:44] = float("nan")  # before the first key of their sequence
    found = run(attention_of(device), batch, dout)
    assert not found["out"][40:44].any()
    for name, result in found.items():
        torch.testing.assert_close(result, expected[name])


def test_a_nan_of_a_table_stays_in_the_rows_that_read_it(device, small_chunks):
    batch = make_batch([40, 10], device=device, mask="causal", bias="position-time")
    dout = random_dout(batch)
    expected = run(attention_of(device), batch, dout)
    reach = batch.bias.pos_weight.shape[1] // 2
    batch.bias.pos_weight[0, reach - 20] = float("nan")  # of keys 20 positions before the row
    batch.bias.pos_weight[1, reach + 1 :] = float("nan")  # of keys after the row, which are hidden
    found = run(attention_of(device), batch, dout)
    assert found["out"][20:40, 0].isnan().all()
    assert found["dq"][20:40, 0].isnan().all()
    for name in ("out", "dq"):
        assert torch.equal(found[name][:, 1], expected[name][:, 1])
        for rows in (slice(0, 20), slice(40, 50)):
            assert torch.equal(found[name][rows], expected[name][rows])
    assert torch.equal(found["dpos_weight"][1], expected["dpos_weight"][1])


@pytest.mark.parametrize(
    "wrong",
    [
        {"cu_seqlens_q": [0, -7, 100]},
        {"cu_seqlens_q": [3, 70, 10**6]},
        {"cu_seqlens_k": [0, 10**9, 50]},
        {"cu_seqlens_k": [90, 10, 100]},
        {"seqused_k": [-3, 10**6]},
        {"max_seqlen_q": 5},
        {"max_seqlen_q": 5, "max_seqlen_k": 5},
        {"max_seqlen_q": 200, "max_seqlen_k": 200},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [None, "rab", "position-time"])
def test_wrong_offsets_and_lengths_do_no_harm(device, small_chunks, wrong, kind):
    """A wrong index would be an error on a CPU; on a GPU the context would be lost."""
    batch = make_batch([70, 30], device=device, mask="context-target", bias=kind)
    for name, value in wrong.items():
        is_length = isinstance(value, int)
        value = value if is_length else torch.tensor(value, device=device)
        batch = replace(batch, **{name: value})
    if kind == "rab":
        size = batch.max_seqlen_k
        batch = batch.with_bias(DenseBias(torch.randn(2, 1, size, size, device=device)))
    found = run(attention_of(device), batch, random_dout(batch))
    assert all(torch.isfinite(value).all() for value in found.values())


def test_autocast_does_not_apply(device):
    batch = make_batch([70, 30], device=device, mask="causal", bias="rab")
    dout = random_dout(batch)
    expected = run(attention_of(device), batch, dout)
    with torch.autocast(device, dtype=torch.bfloat16):
        found = run(attention_of(device), batch, dout)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_without_python_nothing_is_computed():
    """A device without a Python kernel gets the C++ kernel that raises an error."""
    batch = make_batch([5], device="meta", mask=Mask.full())
    arguments = raw_ops.arguments(batch, paged=True)
    assert torch.ops.hstu_attn.composed_fwd(**arguments, out=batch.v) is False
    arguments = raw_ops.arguments(batch, paged=False)
    gradients = {"dq": batch.q, "dk": batch.k, "dv": batch.v}
    gradients |= dict.fromkeys(("drab", "dpos_weight", "dts_weight"))
    assert torch.ops.hstu_attn.composed_bwd(dout=batch.v, **arguments, **gradients) is False


# ---------------------------------------------------------------------------------------------
# Operations and memory, counted without data
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "forward_more", "backward_more"),
    [([512] * 8, 3, 11), ([4096] * 4, 0, 0), ([512, 300, 211, 60, 512, 9, 100, 7], 0, 0)],
    ids=["small", "long", "ragged"],
)
def test_operations_are_few(lengths, forward_more, backward_more):
    """A small padded batch takes about as many operations as plain torch, any other fewer.

    Computing the rows' destinations on the GPU takes some operations for any lengths.
    """
    batch = make_batch(lengths, heads=4, dim=64, device="meta", mask="causal")
    forward, backward = count_composed(replace(batch, cu_seqlens_k=batch.cu_seqlens_q))
    plain_forward, plain_backward = count_chunked(lengths, 4, 64)
    assert forward.count <= plain_forward.count + forward_more, forward.names
    assert backward.count <= plain_backward.count + backward_more, backward.names


@pytest.mark.slow
@pytest.mark.parametrize(
    "bias",
    [None, "rab", "rab-1-head", pytest.param("position-time", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("heads", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_no_result_is_larger_than_two_chunks(heads, bias):
    """Memory grows with the number of tokens, except for a dense bias."""
    batch = make_batch([20_000, 20_000], heads=heads, device="meta", mask="causal", bias=bias)
    for operations in count_composed(batch):
        assert operations.largest <= 2 * composed.CHUNK_ELEMENTS, operations.names


# ---------------------------------------------------------------------------------------------
# Gradients
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [None, "rab-1-head", "rab"])
@pytest.mark.parametrize("mask", ["context-target", "min-full-context-target", "func-5"])
def test_gradcheck(device, small_chunks, mask, name):
    batch = make_batch([7, 0, 3], [5, 0, 3], dim=8, dtype=FP64, device=device, mask=mask, bias=name)
    leaves = {n: t.clone().requires_grad_() for n, t in batch.differentiable().items()}

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        changed = batch.with_tensors(dict(zip(leaves, tensors, strict=True)))
        return attention_of(device)(changed.q, changed.k, changed.v, **changed.options())

    assert torch.autograd.gradcheck(call, tuple(leaves.values()), fast_mode=name is not None)


@pytest.mark.slow
def test_gradcheck_of_the_tables(device):
    """Gradients of the tables are fp32, so the tolerance is a little wider."""
    batch = make_batch([9, 5], [7, 5], dim=8, dtype=FP64, device=device, mask="causal")
    times = torch.randint(0, 1000, (14,), device=device)
    tables = (
        torch.randn(2, 7, dtype=FP64, device=device, requires_grad=True),
        torch.randn(1, 12, dtype=FP64, device=device, requires_grad=True),
    )

    def call(*values: torch.Tensor) -> torch.Tensor:
        bias = RelativeBias(*values, times)
        return attention_of(device)(batch.q, batch.k, batch.v, **{**batch.options(), "bias": bias})

    assert torch.autograd.gradcheck(call, tables, rtol=1e-5, atol=1e-6)
