"""Tests of cases that only the CUDA kernels can get wrong.

Tests for both devices are elsewhere, with a `device` parameter. These use sizes at which tiles,
shared memory and 32-bit offsets matter, and all of them need a GPU.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from hstu_attn import DenseBias, Mask, hstu_attention, reference
from hstu_attn.testing import (
    MASK_NAMES,
    Batch,
    assert_matches,
    make_batch,
    make_lengths,
    make_mask,
    offsets,
    poisoned_memory,
    run,
)
from tests.helpers import raw_ops
from tests.helpers.cuda_checks import DENSE_BIASES, DTYPES, check, random_dout
from tests.helpers.head_dims import HEAD_DIMS
from tests.helpers.small_batches import check_small_batch

pytestmark = pytest.mark.gpu

SMALL_MEMORY = "101376"  # bytes a block may use on GPUs of compute capability 8.6, 8.9 and 12.0
ALL_BUT_ONE = 2**31 - 1  # the sm_margin that leaves one multiprocessor
both_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])


# ---------------------------------------------------------------------------------------------
# Scales
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_a_scale_for_each_row(dim, dtype):
    """Scales are as small as the inverse of a long length, for which fp16 has few bits."""
    lengths = [300, 0, 70, 129]
    batch = make_batch(
        lengths,
        dim=dim,
        dtype=dtype,
        device="cuda",
        mask="context-target",
        attn_scale=torch.rand(sum(lengths), device="cuda") / 4096,
        scaling_seqlen=4096,
    )
    check(batch)


# ---------------------------------------------------------------------------------------------
# Head dims
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_every_head_dim(dim):
    dim_v = 8 * int(torch.randint(1, 33, ()))
    for n, (width, bias) in enumerate(
        ((dim, None), (dim_v, "rab"), (dim, "position-time"), (dim_v, "position-time"))
    ):
        batch = make_batch(
            [150, 1, 0, 70],
            dim=dim,
            dim_v=width,
            dtype=DTYPES[(dim // 8 + n) % 2],
            device="cuda",
            mask="context-target",
            bias=bias,
        )
        check(batch)


@pytest.mark.parametrize("mask", MASK_NAMES)
@pytest.mark.parametrize("dim", [72, 96, 136, 192])
def test_masks_at_head_dims_of_sm90_alone(dim, mask):
    """Kernels of sm90 without a bias have tiles of 96 and 192 columns, others do not."""
    dtype = DTYPES[MASK_NAMES.index(mask) % 2]
    for lengths_k in (
        [700, 300, 0, 129],
        [0, 1, *(64 * n + step for n in (1, 2, 3) for step in (-1, 0, 1))],
    ):
        lengths_q = [int(torch.randint(length + 1, ())) for length in lengths_k]
        for rows in (None, lengths_q):
            check(make_batch(lengths_k, rows, dim=dim, dtype=dtype, device="cuda", mask=mask))


@both_dtypes
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_lengths_around_tiles(dim, dtype):
    lengths = [0, 1, 2, *(size + step for size in (32, 64, 128, 256) for step in (-1, 0, 1))]
    for mask in ("full", "causal"):
        check(make_batch(lengths, dim=dim, dtype=dtype, device="cuda", mask=mask))
    rows = [int(torch.randint(length + 1, ())) for length in lengths]
    batch = make_batch(lengths, rows, dim=dim, dtype=dtype, device="cuda", mask="target")
    check(batch)


# ---------------------------------------------------------------------------------------------
# Masks and biases over many tiles
# ---------------------------------------------------------------------------------------------


def _masks_and_biases() -> list[object]:
    """Returns every mask with two biases; head dims, dtypes and delta-q alternate."""
    cases: list[object] = []
    for m, mask in enumerate(MASK_NAMES):
        for n in range(2):
            bias = DENSE_BIASES[(m + 2 * n + m // 5) % len(DENSE_BIASES)]
            dim, dtype = HEAD_DIMS[(m + n) % len(HEAD_DIMS)], DTYPES[(m // 4 + n) % 2]
            delta = (m + n) % 2 == 1
            name = f"{mask}-{bias or 'no-bias'}-{dim}-{str(dtype)[6:]}"
            cases.append(
                pytest.param(mask, bias, dim, dtype, delta, id=name + ("-delta" if delta else ""))
            )
    return cases


@pytest.mark.parametrize(("mask", "bias", "dim", "dtype", "delta"), _masks_and_biases())
def test_masks_over_many_tiles(mask, bias, dim, dtype, delta):
    lengths_k = [*make_lengths(2, 700, 300), 0, 129]
    lengths_q = [int(torch.randint(length + 1, ())) for length in lengths_k] if delta else None
    batch = make_batch(
        lengths_k, lengths_q, dim=dim, dtype=dtype, device="cuda", mask=mask, bias=bias
    )
    check(batch)


@pytest.mark.parametrize("window", [(200, 0), (0, 300), (130, 65), (64, 64), (1000, 1000)])
def test_windows_wider_than_tiles(window):
    batch = make_batch([700, 90], dtype=DTYPES[0], device="cuda", mask=Mask.local(*window))
    check(batch)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("window", [-1, 150], ids=["causal", "window"])
def test_candidates_over_several_tiles(window, dim):
    """Targets fill whole tiles; they see the history and their group but not each other."""
    lengths = [600, 300, 5]
    mask = Mask(
        (window, 0),
        torch.tensor([40, 0, 2], device="cuda"),
        torch.tensor([333, 300, 0], device="cuda"),
        48,
        0 if window < 0 else 100,
    )
    check(make_batch(lengths, dim=dim, dtype=DTYPES[0], device="cuda", mask=mask))


@both_dtypes
@pytest.mark.parametrize("bias_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("fp32", [False, True], ids=["same-dtype", "fp32"])
def test_heads_that_share_a_bias_head(bias_heads, fp32, dtype):
    batch = make_batch([200, 33], heads=6, dim=64, dtype=dtype, device="cuda", mask="causal")
    # The rows are of odd length in a larger tensor, so each starts at another alignment.
    rab = torch.empty(2, bias_heads, 203, 211, device="cuda").uniform_(-1, 1)
    rab = rab.to(torch.float32 if fp32 else dtype)[:, :, 1:201, 5:205]
    check(batch.with_bias(DenseBias(rab)))


@pytest.mark.parametrize("n", range(len(MASK_NAMES)), ids=MASK_NAMES)
def test_aligned_bias(n):
    """This bias can be copied in whole tiles; entries outside of the sequences are never used."""
    lengths_k = [704, 300, 0, 129]
    lengths_q = [int(torch.randint(length + 1, ())) for length in lengths_k] if n % 2 else None
    dtype = DTYPES[n // 2 % 2]
    batch = make_batch(
        lengths_k,
        lengths_q,
        heads=4,
        dim=HEAD_DIMS[n % len(HEAD_DIMS)],
        dtype=dtype,
        device="cuda",
        mask=MASK_NAMES[n],
    )
    rab = torch.empty(4, (1, 2, 4)[n % 3], 704, 704, dtype=dtype, device="cuda").uniform_(-1, 1)
    batch = batch.with_bias(DenseBias(rab))
    check(batch)
    dout = random_dout(batch)
    expected = run(hstu_attention, batch, dout, deterministic=True)
    poisoned = rab.clone()
    for b, length in enumerate(lengths_k):
        poisoned[b, :, length:] = poisoned[b, :, :, length:] = torch.nan
    batch = batch.with_bias(DenseBias(poisoned))
    for name, tensor in run(hstu_attention, batch, dout, deterministic=True).items():
        assert torch.equal(tensor, expected[name]), name


@both_dtypes
@pytest.mark.parametrize("stored", [(1, 1), (1, 8), (4, 1)], ids=["one", "by-head", "by-sequence"])
@pytest.mark.parametrize("size", [1000, 1001], ids=["aligned", "unaligned"])
def test_bias_for_several_sequences_or_heads(size, stored, dtype, monkeypatch, capfd):
    """sm90 reads a bias of stride 0; it copies one with unaligned rows where that is faster."""
    monkeypatch.setenv("HSTU_ATTN_DEBUG", "1")
    lengths = [size, 700, 0, 333]
    batch = make_batch(lengths, heads=8, dim=256, dtype=dtype, device="cuda", mask="causal")
    rab = torch.empty(*stored, size, size, dtype=dtype, device="cuda").uniform_(-1, 1)
    check(batch.with_bias(DenseBias(rab.expand(4, stored[1], size, size))))
    printed = capfd.readouterr().err
    kernels = "sm" + os.environ["HSTU_ATTN_FORCE_ARCH"]
    assert f"backward by {kernels}\n" in printed
    is_copied_in_forward = size % 8 == 0 or stored == (1, 1)
    assert (f"forward by {kernels}\n" in printed) == (is_copied_in_forward or kernels == "sm80")


def test_rab_is_larger_than_the_sequences():
    batch = make_batch([150, 70], dtype=DTYPES[0], device="cuda", mask="target")
    batch.max_seqlen_k = 301
    check(batch.with_bias(DenseBias(torch.randn(2, 1, 301, 301, device="cuda"))))


# ---------------------------------------------------------------------------------------------
# Shared memory
# ---------------------------------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize("bias", [None, "rab", "rab-1-head", "position", "position-time"])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_small_shared_memory(monkeypatch, dim, bias, dtype):
    monkeypatch.setenv("HSTU_ATTN_SHARED_MEMORY", SMALL_MEMORY)
    for mask in ("context-target", "local"):
        batch = make_batch(
            [400, 1, 65], [290, 1, 30], dim=dim, dtype=dtype, device="cuda", mask=mask, bias=bias
        )
        check(batch)


@pytest.mark.parametrize("bias", [None, "rab", "position", "position-time"])
def test_too_little_shared_memory(monkeypatch, bias):
    batch = make_batch([600], dim=64, dtype=DTYPES[0], device="cuda", bias=bias)
    needs = r"this kernel needs \d+ bytes of shared memory for a block, .* allows"
    for name, limit in (("forward", 16384), ("backward", 65536)):
        monkeypatch.setenv("HSTU_ATTN_SHARED_MEMORY", str(limit))
        with pytest.raises(NotImplementedError, match=f"{name}: {needs} {limit}"):
            run(hstu_attention, batch, random_dout(batch))


# ---------------------------------------------------------------------------------------------
# A small case of each kernel, also for compute-sanitizer
# ---------------------------------------------------------------------------------------------


@pytest.mark.sanitize
@pytest.mark.parametrize("memory", ["", SMALL_MEMORY], ids=["all-memory", "small-memory"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["any-order", "deterministic"])
@pytest.mark.parametrize("bias", [None, "rab", "rab-1-head", "position", "position-time"])
@pytest.mark.parametrize("dim", HEAD_DIMS)
@both_dtypes
def test_every_kernel(monkeypatch, dtype, dim, bias, deterministic, memory):
    monkeypatch.setenv("HSTU_ATTN_SHARED_MEMORY", memory)
    batch = make_batch(
        [200, 0, 67],  # rows of the bias are aligned to 16 bytes
        [200, 0, 40],
        heads=2,
        dim=dim,
        dim_v=dim - 8,
        dtype=dtype,
        device="cuda",
        mask="context-target",
        bias=bias,
    )
    # With a margin, sm80 does not run its kernels for short sequences; with one multiprocessor
    # left, the forward also has a list of work tiles.
    sm_margin = ALL_BUT_ONE if deterministic else 1
    check_small_batch(hstu_attention, batch, deterministic=deterministic, sm_margin=sm_margin)


@pytest.mark.sanitize
@pytest.mark.parametrize("memory", ["", SMALL_MEMORY], ids=["all-memory", "small-memory"])
@pytest.mark.parametrize("bias", [None, "rab"])
@pytest.mark.parametrize(("longest", "more"), [(32, 0), (64, 0), (128, 0), (128, 100), (300, 0)])
@pytest.mark.parametrize("dim", HEAD_DIMS)
@both_dtypes
def test_every_kernel_for_short_sequences(monkeypatch, dtype, dim, longest, more, bias, memory):
    monkeypatch.setenv("HSTU_ATTN_SHARED_MEMORY", memory)
    if os.environ["HSTU_ATTN_FORCE_ARCH"] == "90":
        pytest.skip("sm90 has no kernels of its own for them")
    ones = [1] * more  # many sequences are computed by other kernels
    options = {"heads": 2, "dim": dim, "dim_v": dim - 8, "dtype": dtype, "device": "cuda"}
    options |= {"mask": "context-target", "bias": bias}
    batch = make_batch([longest, 0, 5, *ones], [longest, 0, 3, *ones], **options)
    batch.seqused_q = torch.tensor([longest - 3, 0, 3, *ones], device="cuda")
    batch.seqused_k = torch.tensor([longest, 0, 4, *ones], device="cuda")
    check_small_batch(hstu_attention, batch)


@pytest.mark.sanitize
@pytest.mark.parametrize("deterministic", [False, True], ids=["any-order", "deterministic"])
@pytest.mark.parametrize("mask", ["spans", "func-5"])
def test_masks_given_by_row(mask, deterministic):
    batch = make_batch(
        [130, 0, 267], [130, 0, 240], dim=64, dtype=torch.bfloat16, device="cuda", mask=mask
    )
    check_small_batch(hstu_attention, batch, deterministic=deterministic)


@pytest.mark.parametrize("bias", [None, "rab", "position", "position-time"])
@pytest.mark.parametrize("mask", MASK_NAMES)
def test_with_and_without_a_list_of_work(mask, bias):
    """A forward without a list of work tiles has the bits of one with a list."""
    batch = make_batch(
        [300, 0, 129, 1, 64], device="cuda", dtype=torch.bfloat16, mask=mask, bias=bias
    )
    used = torch.tensor([280, 0, 129, 0, 1], dtype=torch.int32, device="cuda")
    batch.seqused_q = batch.seqused_k = used
    out = run(hstu_attention, batch)["out"]
    assert torch.equal(run(hstu_attention, batch, sm_margin=ALL_BUT_ONE)["out"], out)
    assert out[:280].any()
    for begin, end in ((280, 300), (429, 430), (431, 494)):
        assert not out[begin:end].any()


@pytest.mark.parametrize(
    ("mask", "blocks"),
    [
        *((mask, blocks) for mask in MASK_NAMES for blocks in (15, 30) if mask != "causal"),
        ("causal", 15),
        pytest.param("causal", 30, marks=pytest.mark.sanitize),
    ],
)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_backward_with_and_without_a_list_of_work(mask, dim, blocks):
    """Without a list, 30 work tiles are divided among the blocks: each has one or two."""
    if os.environ["HSTU_ATTN_FORCE_ARCH"] != "90":
        pytest.skip("the backward of sm80 always has a list, except for short sequences")
    lengths, rows = [300, 0, 129, 1, 64], [260, 0, 129, 1, 3]
    batch = make_batch(lengths, rows, dim=dim, device="cuda", dtype=torch.bfloat16, mask=mask)
    batch.seqused_q = torch.tensor([240, 0, 129, 0, 1], device="cuda")
    batch.seqused_k = torch.tensor([280, 0, 129, 0, 1], device="cuda")
    dout = random_dout(batch)
    batch.scaling_seqlen = 300
    overstated = replace(batch, max_seqlen_k=5000)
    listed = run(hstu_attention, overstated, dout, sm_margin=ALL_BUT_ONE)
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    with poisoned_memory("cuda"):
        margin = multiprocessors - blocks * (2 if dim > 128 else 1)
        found = run(hstu_attention, batch, dout, sm_margin=margin)
    assert torch.equal(found["dk"], listed["dk"])
    assert torch.equal(found["dv"], listed["dv"])
    assert found["dk"].any()
    torch.testing.assert_close(found["dq"], listed["dq"], rtol=1e-2, atol=1e-4)  # any order of sums


@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 11])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_the_first_work_tile_of_a_block(dim, blocks):
    """It is not in the list: it is one of the last row tiles of the batch, or one of the first."""
    batch = make_batch(
        [1500, 0, 129, 700, 1], heads=1, dim=dim, device="cuda", dtype=DTYPES[0], mask="causal"
    )
    out = run(hstu_attention, batch)["out"]
    multiprocessors = torch.cuda.get_device_properties("cuda").multi_processor_count
    with poisoned_memory("cuda"):
        few = run(hstu_attention, batch, sm_margin=multiprocessors - blocks)["out"]
    assert torch.equal(few, out)


# ---------------------------------------------------------------------------------------------
# Long, many, large
# ---------------------------------------------------------------------------------------------


def check_sequences(
    batch: Batch, dout: torch.Tensor, result: dict[str, torch.Tensor], first: int, last: int
) -> None:
    """Compares sequences `first` to `last` (exclusive) of a batch too large for the reference."""
    begin_q, end_q = batch.cu_seqlens_q[[first, last]].tolist()
    begin_k, end_k = batch.cu_seqlens_k[[first, last]].tolist()
    rows, keys = slice(begin_q, end_q), slice(begin_k, end_k)
    longest = slice(int(batch.cu_seqlens_k.diff().max()))  # a bias may be larger than any sequence
    biases = (slice(first, last), slice(None), longest, longest)
    targets = batch.mask.num_targets
    part = replace(
        batch,
        q=batch.q[rows],
        k=batch.k[keys],
        v=batch.v[keys],
        cu_seqlens_q=batch.cu_seqlens_q[first : last + 1] - begin_q,
        cu_seqlens_k=batch.cu_seqlens_k[first : last + 1] - begin_k,
        mask=replace(batch.mask, num_targets=None if targets is None else targets[first:last]),
        bias=None if batch.bias is None else DenseBias(batch.bias.rab[biases]),
        scaling_seqlen=batch.max_seqlen_q,
    )
    slices = {"out": rows, "dq": rows, "dk": keys, "dv": keys, "drab": biases}
    exact = run(reference.hstu_attention, part, dout[rows], torch.float64)
    same_dtype_reference = run(
        reference.hstu_attention, part, dout[rows], compute_dtype=batch.q.dtype
    )
    for name, tensor in result.items():
        assert_matches(name, tensor[slices[name]], exact[name], same_dtype_reference[name])


def test_thousands_of_tiny_sequences():
    lengths = torch.randint(0, 9, (4096,)).tolist()
    batch = make_batch(lengths, dim=64, dtype=DTYPES[0], device="cuda", mask="target")
    dout = random_dout(batch)
    result = run(hstu_attention, batch, dout)
    for first in (0, 2000, 4000):
        check_sequences(batch, dout, result, first, first + 96)


def _silu_gradients_of_keys(
    batch: Batch, dout: torch.Tensor, keys: slice, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Returns dK and dV of some keys of a causal sequence, from all rows that see them."""
    q, do = (x[keys.start :, 0].to(dtype) for x in (batch.q, dout))
    k, v = (x[keys, 0].to(dtype).requires_grad_() for x in (batch.k, batch.v))
    scores = torch.nn.functional.silu(batch.alpha * (q @ k.T)) / batch.scaling_seqlen
    out = scores.tril() @ v
    dk, dv = torch.autograd.grad(out, (k, v), do)
    return {"dk": dk[:, None], "dv": dv[:, None]}


# In GiB at head dim 256: inputs and results 0.5; the reference of 64 rows in fp64, 1.3, in addition
# to the gradients of the previous reference, 0.5.
@pytest.mark.gpu_memory(3)
@pytest.mark.parametrize("deterministic", [False, True], ids=["any-order", "deterministic"])
@pytest.mark.parametrize("dim", [64, 256])
def test_one_very_long_sequence(dim, deterministic):
    length = 131072
    batch = make_batch(
        [length],
        heads=1,
        dim=dim,
        dtype=DTYPES[0],
        device="cuda",
        mask="causal",
        scaling_seqlen=1000,
    )
    dout = random_dout(batch)
    result = run(hstu_attention, batch, dout, deterministic=deterministic)
    for end in (64, 8191, 70001, length):
        rows = slice(end - 64, end)
        part = replace(
            batch,
            q=batch.q[rows],
            k=batch.k[:end],
            v=batch.v[:end],
            cu_seqlens_q=offsets([64], "cuda"),
            cu_seqlens_k=offsets([end], "cuda"),
        )
        exact = run(reference.hstu_attention, part, dout[rows], torch.float64)
        same_dtype_reference = run(
            reference.hstu_attention, part, dout[rows], compute_dtype=batch.q.dtype
        )
        for name in ("out", "dq"):
            assert_matches(name, result[name][rows], exact[name], same_dtype_reference[name])
        exact = _silu_gradients_of_keys(batch, dout, rows, torch.float64)
        same_dtype_reference = _silu_gradients_of_keys(batch, dout, rows, batch.q.dtype)
        for name in ("dk", "dv"):
            assert_matches(name, result[name][rows], exact[name], same_dtype_reference[name])


# In GiB: q, dout and four results of 4.0 each; the sum of dq in fp32 over whole tiles, 8.5.
@pytest.mark.gpu_memory(34)
def test_backward_of_more_than_two_to_the_31_elements():
    length, heads, dim = 2048, 4, 128
    lengths = [length] * (2**22 // length + 2)
    total = sum(lengths)
    q = torch.empty((total, heads, dim), dtype=DTYPES[0], device="cuda").uniform_(-1, 1)
    assert q.numel() > 2**31
    cu_seqlens = offsets(lengths, "cuda")
    batch = Batch(q, q, q, cu_seqlens, cu_seqlens, length, length, Mask.causal(), alpha=0.1)
    dout = random_dout(batch)
    result = run(hstu_attention, batch, dout)
    for first in (0, len(lengths) - 1):
        check_sequences(batch, dout, result, first, first + 1)


# In GiB: the bias and its gradient, 5.0 or 6.0 each; for one head, sm80's sum in fp32, 10.0.
@pytest.mark.parametrize(
    "bias_heads",
    [
        pytest.param(1, marks=pytest.mark.gpu_memory(21)),
        pytest.param(2, marks=pytest.mark.gpu_memory(13)),
    ],
)
def test_rab_of_more_than_two_to_the_31_elements(bias_heads):
    size = 23200
    sequences = 5 if bias_heads == 1 else 3
    batch = make_batch([40] * (sequences - 1) + [130], dtype=DTYPES[0], device="cuda")
    batch.max_seqlen_k = size
    rab = torch.zeros(sequences, bias_heads, size, size, dtype=DTYPES[0], device="cuda")
    assert rab.numel() > 2**31
    rab[..., :130, :130].uniform_(-1, 1)
    batch = batch.with_bias(DenseBias(rab))
    dout = random_dout(batch)
    result = run(hstu_attention, batch, dout)
    for first in (0, sequences - 1):
        check_sequences(batch, dout, result, first, first + 1)
    assert not result["drab"][..., 130:, :].any()
    assert not result["drab"][..., 130:].any()


# ---------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("kind", ["base", "rows", "heads"])
def test_tensors_that_16_byte_copies_cannot_take(name, kind):
    batch = make_batch([90, 40], heads=3, dim=32, dtype=DTYPES[0], device="cuda", mask="causal")
    dout = random_dout(batch)
    expected = run(hstu_attention, batch, dout, deterministic=True)
    tensor = dout if name == "dout" else getattr(batch, name)
    total, heads, dim = tensor.shape
    strides = {
        "base": (heads * dim, dim, 1),
        "rows": (heads * dim + 1, dim, 1),
        "heads": (heads * (dim + 3), dim + 3, 1),
    }[kind]
    storage = torch.zeros(total * strides[0] + 1, dtype=tensor.dtype, device="cuda")
    odd = storage.as_strided((total, heads, dim), strides, storage_offset=int(kind == "base"))
    odd.copy_(tensor)
    if name == "dout":
        dout = odd
    else:
        batch = replace(batch, **{name: odd})
    result = run(hstu_attention, batch, dout, deterministic=True)
    for key, value in expected.items():
        assert torch.equal(result[key], value), key


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("bias", [None, "rab", "rab-1-head"])
def test_out_ops_write_their_part_of_a_buffer(monkeypatch, bias, aligned):
    """Each output is part of a larger buffer of NaN; 16-byte stores fit into it, or do not."""
    if bias and not aligned:  # sm80's kernels take these calls, and their bits differ
        monkeypatch.setenv("HSTU_ATTN_FORCE_ARCH", "80")
    batch = make_batch(
        [70, 0, 200], heads=2, dim=40, dim_v=64, dtype=DTYPES[0], device="cuda", bias=bias
    )
    batch.mask = make_mask("local-context-target", [50, 0, 131], device="cuda")
    batch.seqused_q = torch.tensor([31, 0, 131], dtype=torch.int32, device="cuda")
    batch.seqused_k = torch.tensor([50, 0, 131], dtype=torch.int32, device="cuda")
    dout = random_dout(batch)
    expected = run(hstu_attention, batch, dout, deterministic=True)
    margin = 8 if aligned else 3
    buffers = {}

    def room(like: torch.Tensor, name: str) -> torch.Tensor:
        *outer, inner = like.shape
        shape = [*(size + 2 for size in outer), inner + 2 * margin]
        buffers[name] = torch.full(shape, float("nan"), dtype=like.dtype, device="cuda")
        middle = [slice(1, 1 + size) for size in outer]
        return buffers[name][(*middle, slice(margin, margin + inner))]

    out = room(expected["out"], "out")
    raw_ops.forward_out(batch, out)
    assert torch.equal(out, expected["out"])
    gradients = {name: room(value, name) for name, value in expected.items() if name != "out"}
    raw_ops.backward_out(batch, dout, gradients, deterministic=True)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name
    for name, buffer in buffers.items():
        assert buffer.isnan().sum() == buffer.numel() - expected[name].numel(), name


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_no_query_rows_give_zero_gradients(dim):
    batch = make_batch([150, 3], [0, 0], dim=dim, dtype=DTYPES[0], device="cuda", mask="causal")
    batch.max_seqlen_q = 0
    outputs = {name: torch.full_like(batch.k, float("nan")) for name in ("dk", "dv")}
    raw_ops.backward_out(batch, random_dout(batch), {"dq": torch.empty_like(batch.q), **outputs})
    for name, value in outputs.items():
        assert torch.equal(value, torch.zeros_like(value)), name


def test_rows_without_a_batch_are_zero():
    batch = make_batch([150], dtype=DTYPES[0], device="cuda", mask="causal")
    batch.cu_seqlens_q = batch.cu_seqlens_k = torch.zeros(1, dtype=torch.int32, device="cuda")
    out = torch.full_like(batch.q, float("nan"))
    raw_ops.forward_out(batch, out)
    assert torch.equal(out, torch.zeros_like(out))
