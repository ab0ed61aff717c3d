"""Tests of bucket thresholds, and of the dense and relative bias objects."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hstu_attn import DenseBias, Mask, RelativeBias, hstu_attention
from hstu_attn.bias import (
    bias_of_heads,
    default_bucket_thresholds,
    thresholds_tensor,
    time_bucket,
)
from hstu_attn.call import bias_times

INT64_MAX = 2**63 - 1


def research_bucket(difference: int) -> int:
    """Returns buckets according to the formula of the public research HSTU, in fp64."""
    return math.floor(math.log(float(max(abs(difference), 1))) / 0.301)


def bucket_of(difference: int, num_buckets: int = 10**6) -> int:
    thresholds = thresholds_tensor(torch.device("cpu"))
    return int(time_bucket(torch.tensor([difference]), thresholds, num_buckets))


@given(st.integers(0, INT64_MAX) | st.integers(0, 100) | st.integers(0, 62).map(lambda n: 2**n))
def test_default_buckets_are_the_formula(difference):
    assert bucket_of(difference) == research_bucket(difference)


def test_default_buckets_are_the_formula_on_both_sides_of_every_threshold():
    thresholds = default_bucket_thresholds()
    assert len(thresholds) == research_bucket(INT64_MAX)
    assert list(thresholds) == sorted(thresholds)
    around = {t + step for t in thresholds for step in (-1, 0, 1) if 0 <= t + step <= INT64_MAX}
    for difference in around | {0, 1, INT64_MAX}:
        assert bucket_of(difference) == research_bucket(difference)


def test_default_buckets_are_torchs_formula_for_every_small_difference():
    difference = torch.arange(200_000)
    formula = (torch.log(difference.clamp(min=1).double()) / 0.301).floor().long()
    thresholds = thresholds_tensor(torch.device("cpu"))
    assert torch.equal(time_bucket(difference, thresholds, 10**6), formula)


def public_buckets(difference: Tensor, function: str, num_buckets: int, *units: float) -> Tensor:
    """Returns buckets as in Meta's Triton kernel of 2024, in fp64: clamp, divide, map, truncate."""
    increment, divisor = units
    scaled = difference.double().clamp(min=1e-6) / increment
    scaled = (scaled.log() if function == "log" else scaled.sqrt()) / divisor
    return scaled.clamp(0, num_buckets).long()


THRESHOLDS = {"log": RelativeBias.log_thresholds, "sqrt": RelativeBias.sqrt_thresholds}


@pytest.mark.parametrize("num_buckets", [0, 7, 128, 2048])
@pytest.mark.parametrize(
    ("function", "increment", "divisor"),
    [
        ("log", 1.0, 1.0),
        ("log", 60.0, 1.0),
        ("log", 1.0, 0.301),
        ("log", 0.301, 1.0),
        ("log", 1e-3, 0.05),
        ("sqrt", 1.0, 1.0),
        ("sqrt", 60.0, 1.0),
        ("sqrt", 3600.0, 0.7),
        ("sqrt", 1e-6, 10.0),
    ],
)
def test_thresholds_of_the_public_functions(function, num_buckets, increment, divisor):
    thresholds = THRESHOLDS[function](num_buckets, increment, divisor)
    assert thresholds.dtype == torch.int64
    assert len(thresholds) <= num_buckets
    assert thresholds.diff().ge(0).all()
    near = (thresholds[:, None] + torch.arange(-2, 3)).flatten()
    powers = 2 ** torch.arange(63)
    some = torch.randint(INT64_MAX, (1000,))
    difference = torch.cat([torch.arange(200_000), near, powers, powers - 1, some])
    difference = difference[difference >= 0]  # differences beyond INT64_MAX have wrapped around
    wanted = public_buckets(difference, function, num_buckets, increment, divisor)
    found = time_bucket(difference, thresholds, num_buckets + 1)
    assert torch.equal(found, wanted)
    end = torch.tensor([INT64_MAX])
    last = int(public_buckets(end, function, num_buckets, increment, divisor))
    assert int(time_bucket(end, thresholds, num_buckets + 1)) == last == len(thresholds)


def test_thresholds_of_the_square_root_of_minutes():
    found = RelativeBias.sqrt_thresholds(100, increment=60.0)
    assert torch.equal(found, 60 * torch.arange(1, 101) ** 2)


def test_the_default_is_a_list_of_logarithms():
    found = RelativeBias.log_thresholds(1000, divisor=0.301)
    assert tuple(found.tolist()) == default_bucket_thresholds()


@pytest.mark.parametrize("make", THRESHOLDS.values())
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("num_buckets", (-1,)),
        ("increment", (3, 0.0)),
        ("increment", (3, -1.0)),
        ("divisor", (3, 1.0, 0.0)),
        ("divisor", (3, 1.0, math.inf)),
        ("divisor", (3, 1.0, math.nan)),
    ],
)
def test_units_that_make_no_thresholds(make, name, arguments):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got {arguments[-1]}"):
        make(*arguments)


def test_a_bias_added_after_alpha_has_tables_divided_by_alpha(device):
    """The scores are those of Meta's Triton kernel of 2024, `alpha * q k + bias`."""
    length, heads, dim, alpha = 9, 2, 8, 0.25
    q, k, v = torch.randn(3, length, heads, dim, dtype=torch.float64)
    pos_weight, ts_weight = torch.randn(1, 2 * length - 1), torch.randn(1, 21)
    times = torch.randint(1, 5000, (length,)).cumsum(0)
    row_times = torch.cat([times[1:], times[-1:]])
    buckets = public_buckets(row_times[:, None] - times, "sqrt", 20, 60.0, 1.0)
    position = torch.arange(length)
    bias = pos_weight[0, position - position[:, None] + length - 1] + ts_weight[0, buckets]
    scores = alpha * torch.einsum("ihd,jhd->hij", q, k) + bias
    weights = (scores * scores.sigmoid()).tril() / length
    wanted = torch.einsum("hij,jhd->ihd", weights, v)

    thresholds = RelativeBias.sqrt_thresholds(20, 60.0, device=device)
    tables = (pos_weight.to(device) / alpha, ts_weight.to(device) / alpha)
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    found = hstu_attention(
        *(x.to(device, dtype) for x in (q, k, v)),
        cu_seqlens_q=torch.tensor([0, length], device=device),
        max_seqlen_q=length,
        mask=Mask.causal(),
        bias=RelativeBias(*tables, times.to(device), None, thresholds),
        alpha=alpha,
    )
    tolerance = 1e-6 if device == "cpu" else 0.05
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=tolerance, atol=tolerance)


def test_the_last_bucket_takes_the_rest():
    assert bucket_of(10**9, num_buckets=5) == 4


def test_thresholds_are_made_once_for_each_device():
    device = torch.device("cpu")
    assert thresholds_tensor(device) is thresholds_tensor(device)


def test_thresholds_without_data_are_not_kept():
    device = torch.device("cpu", 3)
    with FakeTensorMode():
        assert isinstance(thresholds_tensor(device), FakeTensor)
    assert torch.equal(thresholds_tensor(device), torch.tensor(default_bucket_thresholds()))


def test_calls_have_the_default_thresholds():
    bias = RelativeBias(None, torch.zeros(1, 8), torch.zeros(3, dtype=torch.int64))
    assert bias_times(bias)[2] is thresholds_tensor(torch.device("cpu"))
    own = torch.tensor([1, 10])
    bias = RelativeBias(None, torch.zeros(1, 3), torch.zeros(3, dtype=torch.int64), None, own)
    assert bias_times(bias)[2] is own


@pytest.mark.parametrize("entries", [1, 2, 3, 6])
@pytest.mark.parametrize(("first", "count"), [(0, 6), (0, 3), (3, 3), (2, 2), (1, 4), (5, 1)])
def test_the_part_of_a_table_that_some_heads_use(entries, first, count):
    table = torch.randn(2, entries, 5)
    part = bias_of_heads(table, 6, first, count, dim=1)
    assert count % part.shape[1] == 0
    whole = table.repeat_interleave(6 // entries, 1)[:, first : first + count]
    assert torch.equal(part.repeat_interleave(count // part.shape[1], 1), whole)
    if (first, count) == (0, 6):
        assert part.shape == table.shape
        assert part.data_ptr() == table.data_ptr()


TIMES = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("pos_weight", {}),
        ("timestamps", {"pos_weight": torch.zeros(1, 5), "timestamps": TIMES}),
        ("row_timestamps", {"pos_weight": torch.zeros(1, 5), "row_timestamps": TIMES}),
        ("thresholds", {"pos_weight": torch.zeros(1, 5), "thresholds": TIMES}),
    ],
)
def test_incomplete_relative_biases_are_refused(name, arguments):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*got "):
        RelativeBias(**arguments)


def test_a_dense_bias_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"^rab: expected .*got None"):
        DenseBias(None)
