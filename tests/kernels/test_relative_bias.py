"""Tests of the relative bias with random times, thresholds and tables, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from hstu_attn import RelativeBias, hstu_attention
from hstu_attn.mask import dense_mask
from hstu_attn.testing import (
    MASK_NAMES,
    check_against_reference,
    make_batch,
    make_paged_batch,
    run,
)

pytestmark = pytest.mark.gpu_missing("relative bias")

HEADS = 4
INT64 = torch.iinfo(torch.int64)


def a_log(total: int) -> Tensor:
    """Returns the times of a log, in seconds: bursts, hours, days."""
    gaps = torch.tensor([0, 0, 1, 5, 60, 3600, 86400, 10**7])
    return 1_600_000_000 + gaps[torch.randint(len(gaps), (total,))].cumsum(0)


def far_apart(total: int) -> Tensor:
    ends = torch.tensor([INT64.min, -(2**62), -1, 0, 1, 2**62, INT64.max])
    return ends[torch.randint(len(ends), (total,))]


TIMES: dict[str, Callable[[int], Tensor]] = {
    "log": a_log,
    "equal": lambda total: torch.full((total,), 12345),
    "falling": lambda total: -a_log(total),
    "unsorted": lambda total: torch.randint(-(10**6), 10**6, (total,)),
    "far apart": far_apart,
}
THRESHOLDS: dict[str, Callable[[], Tensor | None]] = {
    "default": lambda: None,
    "roots": lambda: RelativeBias.sqrt_thresholds(300, 60.0),
    "many, some equal": lambda: torch.randint(10**6, (500,)).sort().values,
    "one": lambda: torch.tensor([3600]),
    "none": lambda: torch.tensor([], dtype=torch.int64),
    "ends": lambda: torch.tensor([0, 0, 2**62, INT64.max]),
}


class Tables(NamedTuple):
    """What a bias is made of; a number of heads of 0 means that there is no such table."""

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
    mask: str
    dim: int
    seed: int
    tables: Tables


class PagedCase(NamedTuple):
    sequences: list[tuple[int, int, int]]  # cached, new and target tokens
    page_size: int
    dim: int
    seed: int
    tables: Tables


HEADS_OF_TABLE = st.sampled_from([0, 1, 2, HEADS])
TABLES = st.builds(
    Tables,
    heads=st.tuples(HEADS_OF_TABLE, HEADS_OF_TABLE).filter(any),
    reach=st.sampled_from([1, 2, 50, 250]),
    buckets=st.sampled_from([1, 2, 64, 129, 300]),
    times=st.sampled_from([*TIMES]),
    row_times=st.sampled_from([None, *TIMES]),
    thresholds=st.sampled_from([*THRESHOLDS]),
    are_fp32=st.booleans(),
)
DIMS, SEEDS = st.sampled_from([32, 64]), st.integers(0, 2**31)
CASES = st.builds(
    Case,
    lengths=st.lists(st.sampled_from([0, 1, 7, 64, 65, 130, 200]), min_size=1, max_size=3),
    is_delta=st.booleans(),
    mask=st.sampled_from(MASK_NAMES),
    dim=DIMS,
    seed=SEEDS,
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
random_cases = settings(
    max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@with_dtypes
@random_cases
@given(case=CASES)
def test_random_calls(device, dtype, case):
    torch.manual_seed(case.seed)
    lengths_q = None
    if case.is_delta:
        lengths_q = [int(torch.randint(length + 1, ())) for length in case.lengths]
    batch = make_batch(
        case.lengths,
        lengths_q,
        heads=HEADS,
        dim=case.dim,
        dtype=dtype,
        device=device,
        mask=case.mask,
    )
    bias = make_bias(case.tables, len(batch.q), len(batch.k), batch.q)
    # Without keys the reference reads no table, so that none has a gradient.
    has_keys = sum(case.lengths) > 0
    check_against_reference(hstu_attention, batch.with_bias(bias), backward=has_keys)


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
    )
    bias = make_bias(case.tables, len(batch.q), int(batch.cu_seqlens_k[-1]), batch.q)
    check_against_reference(hstu_attention, batch.with_bias(bias), backward=False)


@pytest.mark.parametrize("mask", ["causal", "local-target"])
@pytest.mark.parametrize("table", ["pos_weight", "ts_weight"])
def test_nan_in_a_table_stays_in_the_rows_that_read_it(device, deterministic, mask, table):
    length, entry = 150, 3
    batch = make_batch([length], dtype=torch.bfloat16, device=device, mask=mask)
    times = torch.arange(length, device=device)  # the bucket is the distance
    tables = {
        "pos_weight": torch.randn(1, 2 * length - 1, device=device),
        "ts_weight": torch.randn(1, length + 1, device=device),
    }
    thresholds = torch.arange(1, length + 1, device=device)
    bias = RelativeBias(**tables, timestamps=times, row_timestamps=times, thresholds=thresholds)
    good = run(hstu_attention, batch.with_bias(bias))["out"]
    tables[table][0, length - 1 - entry if table == "pos_weight" else entry] = torch.nan
    found = run(hstu_attention, batch.with_bias(bias))["out"]

    counts = {"num_contexts": 0, "num_targets": 0}
    for name in counts:
        value = getattr(batch.mask, name)
        counts[name] = 0 if value is None else int(value[0])
    distance = torch.arange(length)[:, None] - torch.arange(length)
    reads = (dense_mask(batch.mask, length, length, **counts) & (distance == entry)).any(1)
    assert reads.any()
    assert found.cpu()[reads].isnan().all()
    assert torch.equal(found.cpu()[~reads], good.cpu()[~reads])
