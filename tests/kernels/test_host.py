"""Tests of `mask.h` and `scheduler.h`, through `_host`, against `hstu_attn.mask`."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hstu_attn import Mask
from hstu_attn.mask import dense_mask, row_spans
from hstu_attn.mask_tiles import TileKind, kv_tiles, q_tiles, tile_kinds
from tests.helpers.examples import examples

_host = pytest.importorskip("hstu_attn._host", reason="_host has not been built")


class Case(NamedTuple):
    """A sequence and its mask, in C++ and in Python."""

    host: _host.Mask
    visible: torch.Tensor
    mask: Mask
    contexts: int
    targets: int


def composed_case(
    q_len: int,
    k_len: int,
    window: tuple[int, int],
    contexts: int,
    targets: int,
    group: int,
    min_full: int,
) -> Case:
    """Draws a mask in closed form, without the fields that cannot be combined with its window."""
    if window[1] != 0:
        contexts = targets = min_full = 0
    if window[0] < 0:
        min_full = 0
    mask = Mask(window, target_group_size=group, min_full_attn_seq_len=min_full)
    host = _host.Mask(
        q_len,
        k_len,
        num_contexts=contexts,
        num_targets=targets,
        target_group_size=group,
        window_size=window,
        min_full_attn_seq_len=min_full,
    )
    visible = dense_mask(mask, q_len, k_len, num_contexts=contexts, num_targets=targets)
    return Case(host, visible, mask, contexts, targets)


@st.composite
def composed_cases(draw: st.DrawFn, longest: int = 40) -> Case:
    k_len = draw(st.integers(0, longest))
    return composed_case(
        draw(st.integers(0, k_len)),
        k_len,
        draw(
            st.tuples(st.integers(-1, longest), st.just(0))
            | st.tuples(st.integers(-1, longest), st.integers(-1, longest))
        ),
        draw(st.integers(0, longest // 2)),
        draw(st.integers(0, longest)),
        draw(st.integers(1, 6)),
        draw(st.integers(0, longest)),
    )


@st.composite
def arbitrary_cases(draw: st.DrawFn, longest: int = 20) -> Case:
    """Draws row spans, or func of up to nine bounds, sometimes out of order or out of range."""
    k_len = draw(st.integers(0, longest))
    q_len = draw(st.integers(0, k_len))
    bound = st.integers(-3, k_len + 3)
    if draw(st.booleans()):
        rows = draw(
            st.lists(st.lists(bound, min_size=4, max_size=4), min_size=q_len, max_size=q_len)
        )
        mask = Mask.from_row_spans(torch.tensor(rows, dtype=torch.int32).view(q_len, 4))
        host = _host.Mask(q_len, k_len, row_spans=rows)
    else:
        count = draw(st.sampled_from([1, 3, 5, 9]))
        causal = draw(st.booleans())
        rows = draw(
            st.lists(
                st.lists(bound, min_size=q_len, max_size=q_len), min_size=count, max_size=count
            )
        )
        mask = Mask.from_func(torch.tensor(rows, dtype=torch.int32).view(1, count, q_len), causal)
        host = _host.Mask(q_len, k_len, func=rows, func_causal=causal)
    return Case(host, dense_mask(mask, q_len, k_len), mask, 0, 0)


cases = composed_cases() | arbitrary_cases()
tile_sizes = st.integers(1, 9)


def has_spans(case: Case) -> bool:
    return case.mask.func is None or case.mask.func.shape[1] <= 3


def covered(pairs: list[tuple[int, int]], size: int) -> list[int]:
    """Returns the numbers in half-open ranges, which must be in order, disjoint and in range."""
    flat = [bound for pair in pairs for bound in pair]
    assert flat == sorted(flat)
    assert all(begin < end for begin, end in pairs)
    assert not flat or (flat[0] >= 0 and flat[-1] <= size)
    return [n for begin, end in pairs for n in range(begin, end)]


# ---------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------


@examples(4)
@given(case=cases)
def test_row_bits(case):
    q_len, k_len = case.visible.shape
    for r in range(q_len):
        for k0 in (0, 1, k_len // 2):
            bits = case.host.row_bits(r, k0)
            expected = [bool(seen) for seen in case.visible[r, k0:]]
            assert [bool(bits >> n & 1) for n in range(k_len - k0)] == expected
            assert bits < 2 ** max(k_len - k0, 0)


@examples(4)
@given(case=cases.filter(has_spans))
def test_row_spans(case):
    q_len, k_len = case.visible.shape
    spans = row_spans(case.mask, q_len, k_len, case.contexts, case.targets).tolist()
    for r in range(q_len):
        ours = set(covered_by_span(spans[r]))
        assert set(covered_by_span(case.host.row(r))) == ours


def covered_by_span(span: tuple[int, ...]) -> list[int]:
    a0, a1, b0, b1 = span
    return [*range(a0, a1), *range(b0, b1)]


def test_rows_before_the_first_key_see_nothing():
    host = _host.Mask(5, 3, window_size=(-1, -1))
    assert [host.row_bits(r, 0) for r in range(5)] == [0, 0, 7, 7, 7]
    spans = [[0, 3, 0, 0]] * 5
    host = _host.Mask(5, 3, row_spans=spans)
    assert [host.row_bits(r, 0) for r in range(5)] == [0, 0, 7, 7, 7]


def test_row_bits_of_a_long_row():
    host = _host.Mask(1, 1000, row_spans=[[10, 700, 800, 1000]])
    for k0 in range(0, 1000, 61):
        expected = sum(1 << n for n in range(64) if 10 <= k0 + n < 700 or 800 <= k0 + n < 1000)
        assert host.row_bits(0, k0) == expected


# ---------------------------------------------------------------------------------------------
# Tiles
# ---------------------------------------------------------------------------------------------


@examples(4)
@given(case=cases, tile_rows=tile_sizes, tile_keys=tile_sizes)
def test_tiles_are_classified(case, tile_rows, tile_keys):
    """The class is exact, except that a tile of a func of five or more bounds may be partial."""
    q_len = case.visible.shape[0]
    kinds = tile_kinds(case.visible, tile_rows, tile_keys)
    for m in range(kinds.shape[0]):
        r0, r1 = m * tile_rows, min((m + 1) * tile_rows, q_len)
        for n in range(kinds.shape[1]):
            kind = TileKind(case.host.classify(r0, r1, n * tile_keys, (n + 1) * tile_keys))
            if has_spans(case):
                assert kind == kinds[m, n]
            else:
                assert kind in (kinds[m, n], TileKind.PARTIAL)


@examples(4)
@given(case=cases, tile_rows=tile_sizes, tile_keys=tile_sizes)
def test_summaries_are_never_wrong(case, tile_rows, tile_keys):
    q_len, k_len = case.visible.shape
    for r0, k0 in itertools.product(range(0, q_len, tile_rows), range(0, k_len, tile_keys)):
        r1, k1 = min(r0 + tile_rows, q_len), min(k0 + tile_keys, k_len)
        seen = case.visible[r0:r1, k0:k1]
        kind = TileKind(case.host.classify_by_summary(r0, r1, k0, k1))
        assert kind != TileKind.EMPTY or not seen.any()
        assert kind != TileKind.FULL or seen.all()


@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (3, 0), (2, 1)])
def test_rows_before_the_first_key(window_size):
    """These rows see nothing, and no tile with one of them is full."""
    q_len, k_len = 13, 6
    host = _host.Mask(q_len, k_len, window_size=window_size)
    seen = torch.zeros(q_len, k_len, dtype=torch.bool)
    for r in range(q_len):
        a0, a1, b0, b1 = host.row(r)
        seen[r, a0:a1] = seen[r, b0:b1] = True
    assert not seen[: q_len - k_len].any()
    for r0, k0 in itertools.product(range(0, q_len, 4), range(0, k_len, 2)):
        r1, k1 = min(r0 + 4, q_len), k0 + 2
        part = seen[r0:r1, k0:k1]
        expected = TileKind.FULL if part.all() else TileKind(int(part.any()))
        assert TileKind(host.classify(r0, r1, k0, k1)) == expected
        told = TileKind(host.classify_by_summary(r0, r1, k0, k1))
        assert told in (expected, TileKind.PARTIAL)
        assert (told == TileKind.FULL) == (expected == TileKind.FULL)


def test_summaries_find_what_rows_share():
    """With a prefix and a window, the class of every tile is exact."""
    spans = [[0, min(r + 1, 8), max(r - 20, 8), r + 1] for r in range(64)]
    host = _host.Mask(64, 64, row_spans=spans)
    told = {0: 0, 1: 0, 2: 0}
    for r0, k0 in itertools.product(range(0, 64, 8), range(0, 64, 4)):
        kind = host.classify(r0, r0 + 8, k0, k0 + 4)
        assert host.classify_by_summary(r0, r0 + 8, k0, k0 + 4) == kind
        told[kind] += 1
    assert min(told.values()) > 10


@examples(4)
@given(case=composed_cases(), tile_rows=tile_sizes, tile_keys=tile_sizes)
def test_tile_lists_of_composed_masks(case, tile_rows, tile_keys):
    """Both directions visit each tile in which a row sees a key, and no other."""
    q_len, k_len = case.visible.shape
    forward = kv_tiles(case.visible, tile_rows, tile_keys)
    for m, expected in enumerate(forward):
        ranges = case.host.kv_tiles(m, tile_rows, tile_keys)
        visited = covered(ranges, -(-k_len // tile_keys))
        assert visited == [n for n, _ in expected]
    backward = q_tiles(case.visible, tile_rows, tile_keys)
    for n, expected in enumerate(backward):
        ranges = case.host.q_tiles(n, tile_rows, tile_keys)
        visited = covered(ranges, -(-q_len // tile_rows))
        assert visited == [m for m, _ in expected]


@examples(3)
@given(case=arbitrary_cases(), tile_rows=tile_sizes, tile_keys=tile_sizes)
def test_tile_lists_of_arbitrary_masks(case, tile_rows, tile_keys):
    """Both directions visit at least each tile in which a row sees a key."""
    q_len, k_len = case.visible.shape
    for m, expected in enumerate(kv_tiles(case.visible, tile_rows, tile_keys)):
        ranges = case.host.kv_tiles(m, tile_rows, tile_keys)
        assert {n for n, _ in expected} <= set(covered(ranges, -(-k_len // tile_keys)))
    for n, expected in enumerate(q_tiles(case.visible, tile_rows, tile_keys)):
        ranges = case.host.q_tiles(n, tile_rows, tile_keys)
        assert {m for m, _ in expected} <= set(covered(ranges, -(-q_len // tile_rows)))


@examples(3)
@given(case=composed_cases(), data=st.data())
def test_intervals_are_exact(case, data):
    """The intervals have exactly the keys that some row sees, and the rows that see some key."""
    q_len, k_len = case.visible.shape
    r0 = data.draw(st.integers(0, q_len))
    r1 = data.draw(st.integers(r0, q_len))
    keys = case.visible[r0:r1].any(0).nonzero().flatten().tolist()
    assert covered(case.host.kv_intervals(r0, r1), k_len) == keys
    k0 = data.draw(st.integers(0, k_len))
    k1 = data.draw(st.integers(k0, k_len))
    rows = case.visible[:, k0:k1].any(1).nonzero().flatten().tolist()
    assert covered(case.host.q_intervals(k0, k1), q_len) == rows


def test_bad_spans_are_refused():
    with pytest.raises(ValueError, match=r"row_spans: expected 4 values .*got 3"):
        _host.Mask(1, 1, row_spans=[[0, 1, 2]])


# ---------------------------------------------------------------------------------------------
# Schedule
# ---------------------------------------------------------------------------------------------

lengths = st.lists(st.integers(0, 150), min_size=0, max_size=7)


def schedule(
    q_lens: list[int], k_lens: list[int], *, backward: bool, window: tuple[int, int], **options: int
) -> list[_host.WorkTile]:
    def offsets(values: list[int]) -> list[int]:
        return [sum(values[:n]) for n in range(len(values) + 1)]

    return _host.schedule(
        backward=backward,
        cu_seqlens_q=offsets(q_lens),
        cu_seqlens_k=offsets(k_lens),
        window_size=window,
        **options,
    )


def cost(visible: torch.Tensor, tile: int) -> int:
    """Returns the tiles of a chunk, counted in each tile of rows from its first visible key.

    A tile of rows in the tests of the schedule sees one interval of keys.
    """
    total = 0
    for rows in visible.split(tile):
        total += -(-int(rows.any(0).sum()) // tile)
    return total


@given(
    data=st.data(),
    k_lens=lengths,
    backward=st.booleans(),
    window=st.sampled_from([(-1, -1), (-1, 0), (20, 0), (5, 9)]),
    heads_per_work_tile=st.sampled_from([1, 2]),
    chunk=st.sampled_from([16, 64]),
)
def test_every_row_is_worked_on_once_longest_first(
    data, k_lens, backward, window, heads_per_work_tile, chunk
):
    q_lens = [data.draw(st.integers(0, length)) for length in k_lens]
    tile = 8
    work_tiles = schedule(
        q_lens,
        k_lens,
        backward=backward,
        window=window,
        heads=4,
        heads_per_work_tile=heads_per_work_tile,
        tile_rows=tile,
        tile_keys=tile,
        chunk=chunk,
    )
    work = [
        (work_tile.sequence, work_tile.head, work_tile.begin, work_tile.end)
        for work_tile in work_tiles
    ]
    divided = k_lens if backward else q_lens
    expected = [
        (b, head, begin, min(begin + chunk, length))
        for b, length in enumerate(divided)
        for begin in range(0, length, chunk)
        for head in range(0, 4, heads_per_work_tile)
    ]
    assert sorted(work) == sorted(expected)

    mask = Mask(window)
    for work_tile in work_tiles:
        visible = dense_mask(mask, q_lens[work_tile.sequence], k_lens[work_tile.sequence])
        chunk_of = (slice(None), slice(work_tile.begin, work_tile.end))
        assert work_tile.cost == cost(visible[chunk_of if backward else chunk_of[::-1]], tile)

    costs = [work_tile.cost for work_tile in work_tiles]
    if not backward:
        assert costs == sorted(costs, reverse=True)
        return
    # In a backward, a chunk of keys follows the earlier chunks of its sequence and head, and moves
    # up for a later chunk that costs more.
    order = {}
    for place, (b, head, begin, _) in enumerate(work):
        order.setdefault((b, head), []).append((begin, place))
    for chunks in order.values():
        assert chunks == sorted(chunks)
    ranks = [
        max(
            other.cost
            for other in work_tiles
            if (other.sequence, other.head) == (work_tile.sequence, work_tile.head)
            and other.begin >= work_tile.begin
        )
        for work_tile in work_tiles
    ]
    assert ranks == sorted(ranks, reverse=True)


def test_schedule_refuses_offsets_that_do_not_match():
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        _host.schedule(backward=False, cu_seqlens_q=[0, 1], cu_seqlens_k=[0])


def test_targets_with_a_window_of_nothing_see_no_history():
    host = _host.Mask(1, 3, num_targets=2, window_size=(0, 0))
    assert host.row(0)[2:] == (2, 3)
    assert host.q_intervals(0, 2) == []
    assert host.q_intervals(2, 3) == [(0, 1)]
