"""Tests of the relative bias: random times, thresholds and tables against the reference; NaN in a
table; bitwise deterministic gradients; memory.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import Tensor

from hstu_attn import RelativeBias, hstu_attention
from hstu_attn.bias import thresholds_tensor, time_bucket, time_difference
from hstu_attn.testing import (
    MASK_NAMES,
    Batch,
    check_against_reference,
    make_batch,
    make_paged_batch,
    run,
)
from tests.helpers import raw_ops
from tests.helpers.examples import examples
from tests.helpers.head_dims import HEAD_DIMS

HEADS = 4
BF16 = torch.bfloat16
INT64 = torch.iinfo(torch.int64)


def a_log(total: int) -> Tensor:
    """Returns the times of a log, in seconds: bursts, hours, days."""
    gaps = torch.tensor([0, 0, 1, 5, 60, 3600, 86400, 10**7])
    return 1_600_000_000 + gaps[torch.randint(len(gaps), (total,))].cumsum(0)


def far_apart(total: int) -> Tensor:
    ends = torch.tensor([INT64.min, -(2**62), -1, 0, 1, 2**62, INT64.max])
    return ends[torch.randint(len(ends), (total,))]


def with_outliers(total: int) -> Tensor:
    """Returns times of a log, some of them 2^62 s earlier or later, so up to 2^63 s apart."""
    return a_log(total) + torch.tensor([0, 0, -(2**62), 2**62])[torch.randint(4, (total,))]


TIMES: dict[str, Callable[[int], Tensor]] = {
    "log": a_log,
    "log before 1970": lambda total: a_log(total) - 2**33,
    "outliers": with_outliers,
    "equal": lambda total: torch.full((total,), 12345),
    "falling": lambda total: -a_log(total),
    "unsorted": lambda total: torch.randint(-(10**6), 10**6, (total,)),
    "far apart": far_apart,
}
THRESHOLDS: dict[str, Callable[[], Tensor | None]] = {
    "default": lambda: None,
    "roots": lambda: RelativeBias.sqrt_thresholds(300, 60.0),
    "many, some equal": lambda: torch.randint(10**6, (500,)).sort().values,
    "close together": lambda: 10 * torch.arange(300),
    "one": lambda: torch.tensor([3600]),
    "none": lambda: torch.tensor([], dtype=torch.int64),
    "ends": lambda: torch.tensor([0, 0, 2**62, INT64.max]),
}


class Tables(NamedTuple):
    """The tables and times of a bias; a number of heads of 0 means that there is no such table."""

    heads: tuple[int, int]  # of positions, of times
    reach: int
    buckets: int
    times: str
    row_times: str | None
    thresholds: str
    are_fp32: bool


class Case(NamedTuple):
    lengths: list[int]
    is_delta: bool
    has_unused_rows: bool
    mask: str
    dim: int
    alpha: float
    scale: str | None
    seed: int
    is_deterministic: bool
    tables: Tables


class PagedCase(NamedTuple):
    sequences: list[tuple[int, int, int]]  # cached, new and target tokens
    page_size: int
    dim: int
    seed: int
    tables: Tables
    are_fp8: bool


HEADS_OF_TABLE = st.sampled_from([0, 1, 2, HEADS])
TABLES = st.builds(
    Tables,
    heads=st.tuples(HEADS_OF_TABLE, HEADS_OF_TABLE).filter(any),
    reach=st.sampled_from([1, 2, 50, 250]),
    buckets=st.sampled_from([1, 2, 64, 129, 256, 300]),
    times=st.sampled_from([*TIMES]),
    row_times=st.sampled_from([None, *TIMES]),
    thresholds=st.sampled_from([*THRESHOLDS]),
    are_fp32=st.booleans(),
)
DIMS, SEEDS = st.sampled_from(HEAD_DIMS), st.integers(0, 2**31)
CASES = st.builds(
    Case,
    lengths=st.lists(st.sampled_from([0, 1, 7, 64, 65, 130, 300]), min_size=1, max_size=3),
    is_delta=st.booleans(),
    has_unused_rows=st.booleans(),
    mask=st.sampled_from(MASK_NAMES),
    dim=DIMS,
    alpha=st.sampled_from([0.1, 1.0, -0.5, 0.0]),
    scale=st.sampled_from([None, "one", "by row"]),
    seed=SEEDS,
    is_deterministic=st.booleans(),
    tables=TABLES,
)
PAGED_CASES = st.builds(
    PagedCase,
    sequences=st.lists(
        st.tuples(*(st.sampled_from(counts) for counts in ([0, 5, 150], [0, 1, 70], [0, 3, 66]))),
        min_size=1,
        max_size=3,
    ),
    page_size=st.sampled_from([16, 64]),
    dim=DIMS,
    seed=SEEDS,
    tables=TABLES,
    are_fp8=st.booleans(),
)


def make_bias(tables: Tables, rows: int, keys: int, like: Tensor) -> RelativeBias:
    """Makes the bias of a call, on the device of `like`."""
    dtype = torch.float32 if tables.are_fp32 else like.dtype
    position_heads, time_heads = tables.heads
    found: dict[str, Tensor | None] = {}
    if position_heads:
        found["pos_weight"] = torch.randn(position_heads, 2 * tables.reach - 1).to(dtype)
    if time_heads:
        found["ts_weight"] = torch.randn(time_heads, tables.buckets).to(dtype)
        found["timestamps"] = TIMES[tables.times](keys)
        found["thresholds"] = THRESHOLDS[tables.thresholds]()
        if tables.row_times:
            found["row_timestamps"] = TIMES[tables.row_times](rows)
    return RelativeBias(**{n: None if x is None else x.to(like.device) for n, x in found.items()})


with_dtypes = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"]
)
random_cases = examples(0.5, suppress_health_check=[HealthCheck.function_scoped_fixture])


@with_dtypes
@random_cases
@given(case=CASES)
def test_random_calls(device, dtype, case):
    torch.manual_seed(case.seed)
    lengths_q = None
    if case.is_delta:
        lengths_q = [int(torch.randint(length + 1, ())) for length in case.lengths]
    rows = case.lengths if lengths_q is None else lengths_q
    options = {}
    if case.has_unused_rows:
        options["seqused_q"] = torch.tensor([n - n // 3 for n in rows], device=device)
        options["seqused_k"] = torch.tensor([n - n // 6 for n in case.lengths], device=device)
    if case.scale is not None:
        count = 1 if case.scale == "one" else sum(rows)
        options["attn_scale"] = torch.rand(count, device=device) / 100
    batch = make_batch(
        case.lengths,
        lengths_q,
        heads=HEADS,
        dim=case.dim,
        dtype=dtype,
        device=device,
        mask=case.mask,
        alpha=case.alpha,
        **options,
    )
    bias = make_bias(case.tables, len(batch.q), len(batch.k), batch.q)
    # Without keys the reference reads no table, so that none has a gradient.
    has_keys = sum(case.lengths) > 0
    check_against_reference(
        hstu_attention,
        batch.with_bias(bias),
        backward=has_keys,
        deterministic=case.is_deterministic,
    )


@with_dtypes
@random_cases
@given(case=PAGED_CASES)
def test_random_calls_with_pages(device, dtype, case):
    """Times of cached keys are given like those of all others, without pages."""
    torch.manual_seed(case.seed)
    batch = make_paged_batch(
        *zip(*case.sequences, strict=True),
        page_size=case.page_size,
        heads=HEADS,
        dim=case.dim,
        dtype=dtype,
        device=device,
        fp8=case.are_fp8,
    )
    bias = make_bias(case.tables, len(batch.q), int(batch.cu_seqlens_k[-1]), batch.q)
    check_against_reference(hstu_attention, batch.with_bias(bias), backward=False)


def random_dout(batch: Batch) -> Tensor:
    return torch.empty_like(batch.q).uniform_(-1, 1)


def some_tables(**changes: object) -> Tables:
    options = {"heads": (1, 1), "reach": 100, "buckets": 64, "times": "log", "row_times": None}
    return Tables(**{**options, "thresholds": "default", "are_fp32": True, **changes})


# ---------------------------------------------------------------------------------------------
# NaN, and nothing at all
# ---------------------------------------------------------------------------------------------


def scores_that_read(bias: RelativeBias, table: str, entry: int, lengths: list[int]) -> Tensor:
    """Returns bool `(rows, keys)` of a causal batch: the scores that read an entry of a table."""
    parts = []
    for times in bias.timestamps.cpu().split(lengths):
        position = torch.arange(len(times))
        distance = position - position[:, None]
        if table == "pos_weight":
            reads = distance == entry - bias.pos_weight.shape[1] // 2
        else:
            row_times = torch.cat([times[1:], times[-1:]])
            difference = time_difference(row_times[:, None], times[None, :])
            thresholds = thresholds_tensor(torch.device("cpu"))
            reads = time_bucket(difference, thresholds, bias.ts_weight.shape[1]) == entry
        parts.append(reads & (distance <= 0))
    return torch.block_diag(*parts).bool()


def rows_and_keys(reads: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Returns row and key of each score of `reads`, counted from the start of their sequence.

    `reads` is a bool `(rows, keys)` of a batch.
    """
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    offsets = torch.cat([torch.full((n,), start) for n, start in zip(lengths, starts, strict=True)])
    rows, keys = (index - offsets[index] for index in reads.cpu().nonzero(as_tuple=True))
    return rows, keys


def is_entry_of(distances: Tensor, entries: int) -> Tensor:
    """Returns bool `(entries,)`: the entries of a position table for any of some distances."""
    found = torch.zeros(entries, dtype=torch.bool)
    found[(distances.flatten() + entries // 2).clamp(0, entries - 1)] = True
    return found


def sm90_nan_distances(rows: Tensor, keys: Tensor, dim: int) -> Tensor:
    """Returns the distances whose sums are NaN in a deterministic backward, where dS of scores is.

    A product of a block of 8 x 8 scores with the identity, or with zeros, spreads a NaN over the 8
    keys of its row. A warp goes along a diagonal of blocks, both rows and keys counted from the end
    of a tile. The last 8 diagonals end within the tile, and each goes on at its first keys, where
    the distances are larger by the keys of a tile. Blocks 0 to 3 are also multiplied by zeros for
    what comes after the end of diagonals 4 to 7, and blocks 4 to 7 for that of diagonals 0 to 3.
    """
    tile = 64 if dim == 256 else 128
    block = 7 - rows % 64 // 8
    chunk = tile // 8 - 1 - keys % tile // 8
    diagonal = (chunk - block) % (tile // 8) - (tile // 8 - 8)
    is_in_both = (diagonal >= 0) & (block // 4 != diagonal // 4)
    move = torch.where(block + diagonal < 8, tile, -tile) * is_in_both
    near = (keys // 8 * 8 - rows)[:, None] + torch.arange(8)
    return torch.cat([near, near + move[:, None]])


@pytest.mark.parametrize("times", ["log", "unsorted"])
@pytest.mark.parametrize(("table", "entry"), [("pos_weight", 80), ("ts_weight", 40)])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_nan_stays_in_the_rows_that_read_it(device, dim, table, entry, times):
    """Results without a NaN term have the same bits as if the weight were zero instead of NaN."""
    lengths = [203, 67]
    batch = make_batch(lengths, dim=dim, dtype=BF16, device=device, mask="causal")
    bias = make_bias(some_tables(times=times), 270, 270, batch.q)
    dout = random_dout(batch)
    results = []
    for weight in (0.0, float("nan")):
        weights = getattr(bias, table).clone()
        weights[0, entry] = weight
        batch = batch.with_bias(replace(bias, **{table: weights}))
        results.append(run(hstu_attention, batch, dout, deterministic=True))
    expected, found = results

    reads = scores_that_read(bias, table, entry, lengths).to(device)
    rows, keys = reads.any(1), reads.any(0)
    assert rows.any()
    assert not rows.all()
    is_nan = {name: torch.zeros_like(tensor, dtype=torch.bool) for name, tensor in found.items()}
    for name, where in (("out", rows), ("dq", rows), ("dk", keys), ("dv", keys)):
        is_nan[name][where] = True
    # NaN scores are terms of most entries of the other table.
    if table == "ts_weight":
        is_nan["dts_weight"][0, entry] = True
    else:
        del is_nan["dts_weight"]
    # GPU kernels sum the position table's gradient by matrix products, in which 0 * NaN is NaN.
    del is_nan["dpos_weight"]
    zero_gradient, gradient = (result["dpos_weight"][0].cpu() for result in results)
    nan_rows, nan_keys = rows_and_keys(reads, lengths)
    own = is_entry_of(nan_keys - nan_rows, len(gradient))
    may_be_nan = must_be_nan = own
    if device == "cuda" and os.environ["HSTU_ATTN_FORCE_ARCH"] == "90":
        may_be_nan = must_be_nan = is_entry_of(
            sm90_nan_distances(nan_rows, nan_keys, dim), len(gradient)
        )
        assert must_be_nan[own].all()
    elif device == "cuda":
        near = (nan_keys - nan_rows)[:, None] + torch.arange(-15, 16)
        may_be_nan = is_entry_of(near, len(gradient))
    assert gradient[must_be_nan].isnan().all()
    torch.testing.assert_close(gradient[~may_be_nan], zero_gradient[~may_be_nan], rtol=0, atol=0)
    for name, where in is_nan.items():
        assert torch.equal(found[name].isnan(), where), name
        # NOTE: sm90 sums dts_weight of a tile in fp32 or a fixed point, but score by score where
        # a tile has NaN.
        atol = 1e-6 * float(expected[name].abs().max()) if name == "dts_weight" else 0
        torch.testing.assert_close(
            found[name][~where], expected[name][~where], rtol=0, atol=atol, msg=name
        )


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_sums_of_large_weights_are_in_the_range_of_fp16(device, dim):
    batch = make_batch([203, 67], dim=dim, dtype=BF16, device=device, mask="causal")
    bias = make_bias(some_tables(), 270, 270, batch.q)
    tables = {name: getattr(bias, name).sign().mul(31_000) for name in ("pos_weight", "ts_weight")}
    check_against_reference(
        hstu_attention, batch.with_bias(replace(bias, **tables)), backward=False
    )


@pytest.mark.parametrize("lengths_k", [[], [0, 0], [150, 3]], ids=["batch", "keys", "rows"])
def test_tables_that_nothing_reads_have_gradients_of_zero(device, lengths_k):
    lengths_q = [0] * len(lengths_k)
    batch = make_batch(lengths_k, lengths_q, dtype=BF16, device=device, mask="causal")
    batch = batch.with_bias(make_bias(some_tables(), 0, len(batch.k), batch.q))
    gradients = {
        f"d{name}": torch.full_like(tensor, float("nan"))
        for name, tensor in batch.differentiable().items()
    }
    raw_ops.backward_out(batch, random_dout(batch), gradients)
    for name, gradient in gradients.items():
        assert not gradient.any(), name


# ---------------------------------------------------------------------------------------------
# The same bits, and memory
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True], ids=["any-order", "deterministic"])
@pytest.mark.parametrize("buckets", [pytest.param(64, marks=pytest.mark.sanitize), 300])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_gradients_of_tables_are_the_same_in_every_run(device, dim, buckets, deterministic):
    """This holds without `deterministic`, as the sums do not depend on the order of additions."""
    batch = make_batch(
        [700, 3, 0, 260], heads=4, dim=dim, dtype=BF16, device=device, mask="context-target"
    )
    tables = some_tables(heads=(2, 2), buckets=buckets, thresholds="close together")
    bias = make_bias(tables, len(batch.q), len(batch.k), batch.q)
    batch, dout = batch.with_bias(bias), random_dout(batch)
    expected = run(hstu_attention, batch, dout, deterministic=deterministic)
    for _ in range(1 if device == "cpu" or "SANITIZER_TOOL" in os.environ else 10):
        found = run(hstu_attention, batch, dout, deterministic=deterministic)
        for name in ("dpos_weight", "dts_weight"):
            assert expected[name].any()
            assert torch.equal(found[name], expected[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_memory_grows_with_the_tokens(dim):
    """Forward and backward take less than a byte per score, including gradients."""
    peaks = []
    for length in (8192, 16384):
        batch = make_batch([length], heads=1, dim=dim, dtype=BF16, device="cuda", mask="causal")
        batch = batch.with_bias(make_bias(some_tables(reach=length), length, length, batch.q))
        dout = random_dout(batch)
        gc.collect()  # so that nothing older is freed meanwhile
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(hstu_attention, batch, dout)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] < 8192**2
    assert peaks[1] < 2.5 * peaks[0]
