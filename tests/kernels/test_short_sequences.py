"""Tests of the CUDA kernels for short sequences and for few rows. All need a GPU.

The sm80 kernels have tile sizes for sequences of at most 32, 64 and 512 tokens. In the backward, a
cluster of blocks may share a sequence of 65 to 512 tokens. On Hopper, forwards of longer sequences
may have no list of work tiles, and forwards of few rows have small tiles.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from hstu_attn import Mask, hstu_attention
from hstu_attn.testing import (
    MASK_NAMES,
    check_against_reference,
    make_batch,
    make_lengths,
    poisoned_memory,
    run,
)
from tests.helpers.cuda_checks import DENSE_BIASES, DTYPES, check, random_dout
from tests.helpers.head_dims import HEAD_DIMS
from tests.helpers.small_batches import check_small_batch

pytestmark = pytest.mark.gpu


def kernels_of(call: Callable[[], object]) -> list[str]:
    """Returns the names of the kernels that `call` launches."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events()]


@pytest.mark.parametrize("mask", MASK_NAMES)
@pytest.mark.parametrize("longest", [32, 64, 128, 180, 300])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_short_sequences(dim, longest, mask):
    count = 40 if longest <= 128 else 8
    lengths = [longest, 0, 1, 17, longest - 1, *make_lengths(count, longest)]
    number = dim // 32 + longest // 32 + MASK_NAMES.index(mask)
    options = {"dim": dim, "dtype": DTYPES[number % 2], "device": "cuda", "mask": mask}
    check(make_batch(lengths, bias=DENSE_BIASES[number % len(DENSE_BIASES)], **options))
    rows = [int(torch.randint(length + 1, ())) for length in lengths]
    scales = {"attn_scale": torch.rand(sum(rows), device="cuda"), "scaling_seqlen": 1}
    batch = make_batch(lengths, rows, dim_v=max(8, dim - 24), **scales, **options)
    used = {
        "seqused_q": torch.tensor([n - n // 3 for n in rows], device="cuda"),
        "seqused_k": torch.tensor([n - n // 6 for n in lengths], device="cuda"),
    }
    check(batch)
    check(replace(batch, **used))


@pytest.mark.parametrize("mask", ["causal", "func-3"])
@pytest.mark.parametrize(("count", "longest"), [(1000, 20), (60, 128), (200, 128), (90, 250)])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_many_short_sequences(dim, count, longest, mask):
    """There are several times as many blocks as are resident, except that with 60 sequences a block
    of the backward has a whole sequence, and adds up dQ of two tiles of keys."""
    lengths = [longest, 65, 64, *make_lengths(count, longest)]
    options = {"heads": 4, "dim": dim, "dtype": DTYPES[0], "device": "cuda"}
    check(make_batch(lengths, mask=mask, **options))


@pytest.mark.parametrize(
    ("mask", "longest"),
    [
        *((mask, longest) for mask in MASK_NAMES for longest in (128, 250)),
        *((mask, longest) for mask in ("causal", "local") for longest in (500, 1000)),
        pytest.param("context-target", 500, marks=pytest.mark.sanitize),
    ],
)
@pytest.mark.parametrize("dim", [*HEAD_DIMS, 96, 192])
def test_blocks_that_take_whole_sequences(dim, mask, longest):
    """They add up dQ in the order of a deterministic backward, without a list of work tiles.

    The first batch has five sequences and heads for each block, or cluster of two blocks, and the
    second one has two.
    """
    if os.environ["HSTU_ATTN_FORCE_ARCH"] != "90":
        pytest.skip("the kernels of sm80 are other ones")
    if longest > 500 and dim > 64:
        pytest.skip("above head dim 64, these sequences have more tiles than such a block takes")
    blocks_of_sequence = 2 if dim > 128 else 1
    different = [0, longest, longest // 2 + 1, 1, *make_lengths(6, longest)]
    for lengths, blocks in ((different, 4), ([longest] * 10, 10)):
        rows = [n if n < 2 else int(torch.randint(n, ())) for n in lengths]
        batch = make_batch(lengths, rows, dim=dim, dtype=DTYPES[0], device="cuda", mask=mask)
        batch.seqused_q = torch.tensor([n - n // 5 for n in rows], device="cuda")
        batch.seqused_k = torch.tensor([n - n // 6 for n in lengths], device="cuda")
        dout = random_dout(batch)
        margin = torch.cuda.get_device_properties(0).multi_processor_count
        margin -= blocks * blocks_of_sequence
        with poisoned_memory("cuda"):
            found = run(hstu_attention, batch, dout, sm_margin=margin)
        ordered = run(hstu_attention, batch, dout, deterministic=True)
        assert torch.equal(found["dq"], ordered["dq"])
        torch.testing.assert_close(found["dk"], ordered["dk"], rtol=2e-2, atol=1e-4)
        torch.testing.assert_close(found["dv"], ordered["dv"], rtol=2e-2, atol=1e-4)
        assert found["dq"].any()
        if mask == "causal":
            names = kernels_of(partial(run, hstu_attention, batch, dout, sm_margin=margin))
            assert any("run_backward" in name for name in names)
            assert not any("convert_dq" in name for name in names)  # it rounds sums of all blocks


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_nan_stays_in_the_tiles_that_see_it(dim):
    """Rows of a local mask that see no key of the first tile do not read it, although the block
    that computes their dQ takes this tile, too."""
    if os.environ["HSTU_ATTN_FORCE_ARCH"] != "90":
        pytest.skip("the kernels of sm80 are other ones")
    batch = make_batch([500] * 10, dim=dim, dtype=DTYPES[0], device="cuda", mask="local")
    batch.k[:8] = math.nan
    margin = torch.cuda.get_device_properties(0).multi_processor_count - (20 if dim > 128 else 10)
    found = run(hstu_attention, batch, random_dout(batch), sm_margin=margin)
    assert found["dq"][:8].isnan().all()
    assert found["dq"][256:].isfinite().all()


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_rows_that_see_no_key(dim):
    """O and dQ are zeros where whole tiles of rows see nothing."""
    lengths = [128, 100, *[1] * 100]
    batch = make_batch(lengths, dim=dim, dtype=DTYPES[0], device="cuda", mask="causal")
    spans = torch.zeros(int(batch.cu_seqlens_q[-1]), 4, dtype=torch.int32, device="cuda")
    spans[70:90, 1] = 128
    check(replace(batch, mask=Mask(row_spans=spans)))


@pytest.mark.parametrize("bias", [None, "position-time"])
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize(("count", "longest", "heads"), [(300, 120, 4), (60, 500, 1), (5, 250, 2)])
def test_short_sequences_without_a_list(count, longest, heads, dim, bias):
    """On Hopper the forward has no list, and a block has up to 10 work tiles, 2 or 1."""
    lengths = [0, longest, *make_lengths(count - 3, longest), 0]
    options = {"dim": dim, "heads": heads, "dtype": DTYPES[0], "device": "cuda", "bias": bias}
    batch = make_batch(lengths, mask="context-target", **options)
    check_against_reference(hstu_attention, batch, backward=False)
    rows = [int(torch.randint(length + 1, ())) for length in lengths]
    batch = make_batch(lengths, rows, mask="local", **options)
    check_against_reference(hstu_attention, batch, backward=False)


@pytest.mark.sanitize
@pytest.mark.parametrize("mask", ["full", "causal", "spans"])
@pytest.mark.parametrize(("dim", "longest"), [(32, 512), (64, 320), (128, 250), (256, 192)])
def test_clusters_of_blocks(dim, longest, mask):
    """The blocks of a cluster add up dQ in a fixed order, also of sequences with fewer tiles."""
    lengths = [longest, 0, 64, longest - 70, 1, 130]
    rows = [longest, 0, 1, 40, 1, 129]
    options = {"dim": dim, "dtype": DTYPES[1], "device": "cuda"}
    batch = make_batch(lengths, rows, mask=mask, bias="rab", **options)
    check_small_batch(hstu_attention, batch)
    if os.environ["HSTU_ATTN_FORCE_ARCH"] == "90":
        return  # sm90 adds to dQ in any order
    dout = random_dout(batch)
    first = run(hstu_attention, batch, dout)
    for _ in range(3):
        again = run(hstu_attention, batch, dout)
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("stated", [20, 64, 100, 200])
def test_sequences_longer_than_stated(stated, dim):
    """Nothing checks max_seqlen on a GPU, so that it need not be copied to the host."""
    batch = make_batch(
        [30, 200, 64, 0, 500, 129], dim=dim, dtype=DTYPES[0], device="cuda", mask="causal"
    )
    batch.scaling_seqlen = 200
    batch.max_seqlen_q = batch.max_seqlen_k = stated
    check(batch)


@pytest.mark.parametrize(
    ("dim", "longest", "count", "expected"),
    [
        (256, 64, 2, ["sm80", "sm80"]),
        (256, 128, 2, ["sm90", "sm90"]),
        (256, 128, 80, ["sm90", "sm90"]),
        (256, 192, 20, ["sm90", "sm80"]),
        (256, 192, 30, ["sm90", "sm90"]),
        (256, 193, 2, ["sm90", "sm90"]),
        (128, 128, 20, ["sm80", "sm90"]),
        (128, 128, 80, ["sm90", "sm90"]),
        (128, 192, 20, ["sm80", "sm80"]),
        (128, 193, 20, ["sm90", "sm80"]),
        (128, 256, 40, ["sm90", "sm90"]),
        (128, 257, 2, ["sm90", "sm90"]),
        (64, 128, 2000, ["sm80", "sm80"]),
        (64, 256, 2, ["sm80", "sm80"]),
        (64, 256, 100, ["sm80", "sm90"]),
        (64, 257, 2, ["sm90", "sm80"]),
        (64, 512, 50, ["sm80", "sm90"]),
        (64, 512, 200, ["sm90", "sm90"]),
        (64, 513, 50, ["sm90", "sm90"]),
    ],
)
def test_hopper_has_short_sequences_computed_by_sm80(
    dim, longest, count, expected, monkeypatch, capfd
):
    """This applies to forward and backward, unless HSTU_ATTN_FORCE_ARCH or sm_margin is set."""
    forced = "sm" + os.environ["HSTU_ATTN_FORCE_ARCH"]
    if forced == "sm80":
        pytest.skip("is about a choice that a GPU has which runs sm90's kernels")
    monkeypatch.setenv("HSTU_ATTN_DEBUG", "1")
    lengths = [longest, *[3] * (count - 1)]
    batch = make_batch(lengths, dim=dim, dtype=DTYPES[0], device="cuda", mask="causal")

    def chosen(**options):
        run(hstu_attention, batch, random_dout(batch), **options)
        return [line.split()[3].rstrip(",") for line in capfd.readouterr().err.splitlines()]

    assert chosen() == [forced, forced]
    monkeypatch.delenv("HSTU_ATTN_FORCE_ARCH")
    assert chosen() == expected
    assert chosen(sm_margin=1) == ["sm90", "sm90"]
    check(batch)


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_few_rows_have_small_tiles(dim):
    """On Hopper, calls whose tiles of 64 rows are resident at once have small tiles. A
    multiprocessor has one block of them, or two at head dim 32."""
    if os.environ["HSTU_ATTN_FORCE_ARCH"] != "90":
        pytest.skip("only sm90 has them")

    def has_small_tiles(length: int) -> bool:
        batch = make_batch([length], dim=dim, dtype=DTYPES[0], device="cuda", mask="causal")
        names = kernels_of(lambda: run(hstu_attention, batch))
        [name] = {name for name in names if "run_forward" in name}
        # The last arguments of Forward<...> are kHasSmallTiles and kIsClosedForm.
        flags = re.search(r"(true|false|\(bool\)[01]), (?:true|\(bool\)1)> ?>", name)
        return flags[1] in ("true", "(bool)1")

    blocks = torch.cuda.get_device_properties(0).multi_processor_count * (2 if dim == 32 else 1)
    assert has_small_tiles(64 * (blocks // 2))  # rows of each of 2 heads
    assert not has_small_tiles(64 * (blocks // 2) + 1)
