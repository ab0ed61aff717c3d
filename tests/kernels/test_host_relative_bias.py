"""`relative_bias.h` and `table_sum.h`, through `_host`, against Python's integers and `fsum`."""

from __future__ import annotations

import math
import random
import struct

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

_host = pytest.importorskip("hstu_attn._host", reason="_host has not been built")

INT64 = (-(2**63), 2**63 - 1)

# Times as in a log, and of any size.
times = st.integers(1_700_000_000, 1_700_100_000) | st.integers(*INT64) | st.sampled_from(INT64)
differences = st.integers(0, 20) | st.integers(0, 100_000) | st.integers(0, INT64[1])
threshold_lists = st.lists(differences, max_size=15).map(sorted) | st.integers(0, 150).map(
    lambda count: [min(int(1.35**n), INT64[1]) for n in range(count)]
)


def bucket_of(thresholds: list[int], num_buckets: int, row_time: int, key_time: int) -> int:
    reached = sum(threshold <= abs(row_time - key_time) for threshold in thresholds)
    return min(reached, num_buckets - 1)


@st.composite
def near(draw: st.DrawFn, thresholds: list[int], time: int) -> int:
    """Any time, or one whose difference to `time` is next to a threshold."""
    if not thresholds or draw(st.booleans()):
        return draw(times)
    difference = draw(st.sampled_from(thresholds)) + draw(st.integers(-1, 1))
    return max(INT64[0], min(time + draw(st.sampled_from([-1, 1])) * difference, INT64[1]))


@given(data=st.data(), thresholds=threshold_lists, num_buckets=st.integers(1, 160), row_time=times)
def test_buckets_are_exact(data, thresholds, num_buckets, row_time):
    key_time = data.draw(near(thresholds, row_time))
    expected = bucket_of(thresholds, num_buckets, row_time, key_time)
    assert _host.Buckets(thresholds, num_buckets).bucket(row_time, key_time) == expected


@given(data=st.data(), thresholds=threshold_lists, num_buckets=st.integers(1, 160))
def test_a_bucket_range_has_the_buckets_of_all_rows_and_keys(data, thresholds, num_buckets):
    row_times = data.draw(st.lists(times, min_size=1, max_size=8))
    key_times = [
        data.draw(near(thresholds, data.draw(st.sampled_from(row_times)))) for _ in range(4)
    ]
    buckets = _host.Buckets(thresholds, num_buckets)
    first, last = buckets.range((min(row_times), max(row_times)), (min(key_times), max(key_times)))
    for row_time in row_times:
        expected = [bucket_of(thresholds, num_buckets, row_time, time) for time in key_times]
        assert first <= min(expected)
        assert max(expected) <= last
    if len(set(row_times)) == len(set(key_times)) == 1:
        assert first == last


def float32(bits: int) -> float:
    return struct.unpack("f", struct.pack("I", bits))[0]


# Values of every exponent, with denormals, and values of similar exponents.
finite = st.integers(0, 0xFFFFFFFF).map(float32).filter(math.isfinite)
alike = st.floats(-2.0, 2.0, width=32)
denormal = st.integers(0, 0x7FFFFF).map(float32) | st.integers(0x80000000, 0x807FFFFF).map(float32)


@given(values=st.lists(finite | alike | denormal, max_size=60), seed=st.integers(0, 1000))
def test_a_table_sum_is_exact_in_any_order(values, seed):
    values += [-value for value in values[::3]]
    total = _host.table_sum(values)
    magnitude = math.fsum(map(abs, values))
    assert abs(total - math.fsum(values)) <= 2**-50 * magnitude
    random.Random(seed).shuffle(values)
    assert _host.table_sum(values) == total


@given(values=st.lists(denormal | st.sampled_from([float32(0x00800000)]), max_size=60))
def test_a_table_sum_of_denormals_is_exact(values):
    assert _host.table_sum(values) == math.fsum(values)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_table_sum_with_a_number_that_is_not_finite_is_nan(value):
    assert math.isnan(_host.table_sum([1.0, value, -1.0]))
    assert math.isnan(_host.table_sum([math.inf, -value]))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_table_sum_of_many_numbers_does_not_overflow(sign):
    for exponent in range(255):
        value = sign * float32(exponent << 23 | 0x7FFFFF)
        assert _host.table_sum([value], 2**28) == 2**28 * value
    assert _host.table_sum([value, -value] * 1000 + [1.0]) == 1.0


bfloat16 = st.integers(0, 0xFFFF).map(lambda bits: float32(bits << 16)).filter(math.isfinite)
bfloat16_alike = st.integers(0x3C00, 0x4100).map(lambda bits: float32(bits << 16))
float16 = st.floats(width=16, allow_nan=False, allow_infinity=False)


@given(values=st.lists(bfloat16, min_size=1) | st.lists(bfloat16_alike | float16, min_size=1))
def test_a_fixed_point_sum_loses_little_of_the_largest_value(values):
    values = [value * (-1) ** n for n, value in enumerate(values)]
    largest = max(map(abs, values))
    by_value, of_sum = _host.fixed_point_sums(values)
    # Half a unit for each value, and the rounding to fp32.
    error = 2**-20 * largest * len(values) + 2**-127 * len(values)
    exact = math.fsum(values)
    assume(abs(exact) + error < 2**128)  # otherwise fp32 may round it to infinity
    assert abs(by_value - exact) <= error
    assert abs(of_sum - exact) <= error


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("fraction", [0, 1, 0x7F])
def test_a_fixed_point_sum_has_room_for_a_warps_scores(sign, fraction):
    for exponent in range(1, 244):
        value = sign * float32(exponent << 23 | fraction << 16)
        by_value, of_sum = _host.fixed_point_sums([value] * 2047)
        if exponent > 20:
            assert by_value == pytest.approx(2047 * value, rel=2**-22)
            assert of_sum == pytest.approx(2047 * value, rel=2**-22)


def test_buckets_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="num_buckets"):
        _host.Buckets([1], 0)
