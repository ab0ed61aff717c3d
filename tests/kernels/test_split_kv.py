"""Tests of `sm90/split_heuristic.h`, through `_host`: the number of splits of a call's keys."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

_host = pytest.importorskip("hstu_attn._host", reason="_host has not been built")

NO_LIMIT = 2**31 - 1  # keys of a split where there is only one


def test_example_of_the_comment():
    assert _host.plan_split_kv(row_tiles=96, key_tiles=34) == ("global memory", 2, 27 * 128)


@pytest.mark.parametrize(
    ("row_tiles", "reduction", "splits"),
    [
        (1, "cluster", 8),
        (14, "cluster", 8),
        (15, "cluster", 4),
        (30, "cluster", 4),
        (31, "global memory", 4),
        (132, "none", 1),
    ],
)
def test_few_rows_have_more_splits(row_tiles, reduction, splits):
    plan = _host.plan_split_kv(row_tiles=row_tiles, key_tiles=128, clusters=(14, 30))
    assert plan[:2] == (reduction, splits)


def test_without_clusters_splits_go_through_global_memory():
    plan = _host.plan_split_kv(row_tiles=16, key_tiles=128)
    assert plan == ("global memory", 8, 16 * 128)


@pytest.mark.parametrize(("key_tiles", "splits"), [(1, 1), (8, 1), (12, 3), (34, 3), (128, 3)])
def test_long_histories_have_more_splits(key_tiles, splits):
    assert _host.plan_split_kv(row_tiles=44, key_tiles=key_tiles)[1] == splits


def test_splits_save_the_time_to_make_a_list():
    # Two splits save half of the tiles, but a list takes the time of three.
    assert _host.plan_split_kv(row_tiles=64, key_tiles=10)[0] == "none"
    assert _host.plan_split_kv(row_tiles=64, key_tiles=14)[0] == "global memory"


def test_invalid_blocks():
    with pytest.raises(ValueError, match="blocks: expected at least 1, got 0"):
        _host.plan_split_kv(row_tiles=1, key_tiles=1, blocks=0)


def longest_block(lengths: list[int], blocks: int) -> int:
    """Returns the end of the last block if each takes the next work tile as soon as it is idle."""
    ends = [0] * blocks
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


@given(
    row_tiles=st.integers(0, 300),
    key_tiles=st.integers(1, 200),
    tile_keys=st.sampled_from([64, 128]),
    head_dim=st.sampled_from([64, 128, 256]),
    blocks=st.integers(1, 140),
    clusters=st.tuples(st.integers(0, 17), st.integers(0, 35)),
)
def test_splits_cover_all_keys_and_end_sooner(
    row_tiles, key_tiles, tile_keys, head_dim, blocks, clusters
):
    reduction, splits, keys_per_split = _host.plan_split_kv(
        row_tiles=row_tiles,
        key_tiles=key_tiles,
        tile_keys=tile_keys,
        head_dim=head_dim,
        blocks=blocks,
        clusters=clusters,
    )
    if reduction == "cluster":
        assert 0 < clusters[(8, 4).index(splits)] >= row_tiles
        return
    assert row_tiles > max(clusters) or not any(clusters)
    if reduction == "none":
        assert (splits, keys_per_split) == (1, NO_LIMIT)
        return
    assert 2 <= splits <= 8
    assert keys_per_split % tile_keys == 0
    tiles = keys_per_split // tile_keys
    last = key_tiles - (splits - 1) * tiles
    assert 0 < last <= key_tiles
    lengths = [tiles] * (row_tiles * (splits - 1)) + [last] * row_tiles
    unsplit = longest_block([key_tiles] * row_tiles, blocks)
    assert longest_block(lengths, blocks) < 0.9 * unsplit
