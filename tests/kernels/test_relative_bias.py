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
from hstu_attn.testing import MASK_NAMES, check_against_reference, make_batch, run

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


class Case(NamedTuple):
    """A call; a number of heads of 0 means that there is no such table."""

    lengths: list[int]
    is_delta: bool
    mask: str
    table_heads: tuple[int, int]
    reach: int
    buckets: int
    times: str
    row_times: str | None
    thresholds: str
    has_fp32_tables: bool
    dim: int
    seed: int


def cases() -> st.SearchStrategy[Case]:
    heads = st.sampled_from([0, 1, 2, HEADS])
    return st.builds(
        Case,
        lengths=st.lists(st.sampled_from([0, 1, 7, 64, 65, 130, 200]), min_size=1, max_size=3),
        is_delta=st.booleans(),
        mask=st.sampled_from(MASK_NAMES),
        table_heads=st.tuples(heads, heads).filter(any),
        reach=st.sampled_from([1, 2, 50, 250]),
        buckets=st.sampled_from([1, 2, 64, 129, 300]),
        times=st.sampled_from([*TIMES]),
        row_times=st.sampled_from([None, *TIMES]),
        thresholds=st.sampled_from([*THRESHOLDS]),
        has_fp32_tables=st.booleans(),
        dim=st.sampled_from([32, 64]),
        seed=st.integers(0, 2**31),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
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
    table_dtype = torch.float32 if case.has_fp32_tables else dtype
    position_heads, time_heads = case.table_heads
    found: dict[str, Tensor | None] = {}
    if position_heads:
        found["pos_weight"] = torch.randn(position_heads, 2 * case.reach - 1).to(table_dtype)
    if time_heads:
        found["ts_weight"] = torch.randn(time_heads, case.buckets).to(table_dtype)
        found["timestamps"] = TIMES[case.times](len(batch.k))
        found["thresholds"] = THRESHOLDS[case.thresholds]()
        if case.row_times:
            found["row_timestamps"] = TIMES[case.row_times](len(batch.q))
    bias = RelativeBias(**{n: None if x is None else x.to(device) for n, x in found.items()})
    # Without keys the reference reads no table, so that none has a gradient.
    has_keys = sum(case.lengths) > 0
    check_against_reference(hstu_attention, batch.with_bias(bias), backward=has_keys)


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
