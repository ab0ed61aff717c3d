"""Bucket thresholds, and the dense and relative bias objects."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hstu_attn import DenseBias, RelativeBias
from hstu_attn.bias import default_bucket_thresholds, default_thresholds_tensor, time_bucket
from hstu_attn.call import bias_times

INT64_MAX = 2**63 - 1


def research_bucket(difference: int) -> int:
    """The formula of the public research HSTU, in fp64."""
    return math.floor(math.log(float(max(abs(difference), 1))) / 0.301)


def bucket_of(difference: int, num_buckets: int = 10**6) -> int:
    thresholds = default_thresholds_tensor(torch.device("cpu"))
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
    thresholds = default_thresholds_tensor(torch.device("cpu"))
    assert torch.equal(time_bucket(difference, thresholds, 10**6), formula)


def test_the_last_bucket_takes_the_rest():
    assert bucket_of(10**9, num_buckets=5) == 4


def test_thresholds_are_made_once_for_each_device():
    device = torch.device("cpu")
    assert default_thresholds_tensor(device) is default_thresholds_tensor(device)


def test_calls_have_the_default_thresholds():
    bias = RelativeBias(None, torch.zeros(1, 8), torch.zeros(3, dtype=torch.int64))
    assert bias_times(bias)[2] is default_thresholds_tensor(torch.device("cpu"))
    own = torch.tensor([1, 10])
    bias = RelativeBias(None, torch.zeros(1, 3), torch.zeros(3, dtype=torch.int64), None, own)
    assert bias_times(bias)[2] is own


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
