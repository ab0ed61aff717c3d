"""Tests of `hstu_attn.mask` against the public libraries' definitions, and of its errors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hstu_attn import Mask
from hstu_attn.compat.generative_recommenders import _mask as meta_arguments_to_mask
from hstu_attn.mask import (
    batch_row_spans,
    dense_mask,
    key_range,
    mask_heads,
    row_intervals,
    row_spans,
)
from hstu_attn.mask_tiles import TileKind, kv_tiles, q_tiles, tile_kinds
from hstu_attn.testing import MASK_NAMES, make_mask, offsets
from tests.helpers.public_masks import fbgemm_mask, func_mask, meta_mask


def composed(window: tuple[int, int], contexts: int, targets: int, group: int) -> Mask:
    """Returns a mask of one sequence."""
    one_sided = window[1] == 0
    return Mask(
        window,
        torch.tensor([contexts]) if one_sided else None,
        torch.tensor([targets]) if one_sided else None,
        group,
    )


def spans_to_dense(spans: torch.Tensor, k_len: int) -> torch.Tensor:
    """Returns the dense mask of row spans, computed key by key."""
    rows = [
        [any(begin <= j < end for begin, end in ((a0, a1), (b0, b1))) for j in range(k_len)]
        for a0, a1, b0, b1 in spans.tolist()
    ]
    return torch.tensor(rows, dtype=torch.bool).view(len(rows), k_len)


# ---------------------------------------------------------------------------------------------
# FBGEMM
# ---------------------------------------------------------------------------------------------


@given(
    contexts=st.integers(0, 6),
    history=st.integers(0, 14),
    targets=st.integers(0, 9),
    group=st.integers(1, 4),
    delta=st.integers(0, 29),
)
def test_causal_with_contexts_and_targets_is_fbgemms(contexts, history, targets, group, delta):
    length = contexts + history + targets
    q_len = max(0, length - delta)
    mask = composed((-1, 0), contexts, targets, group)
    ours = dense_mask(mask, q_len, length, num_contexts=contexts, num_targets=targets)
    theirs = fbgemm_mask(contexts, history, targets, window=(-1, 0), group=group)
    assert torch.equal(ours, theirs[length - q_len :])


@given(
    length=st.integers(0, 20),
    left=st.integers(-1, 25),
    right=st.integers(-1, 25),
    delta=st.integers(0, 20),
)
def test_windows_are_fbgemms(length, left, right, delta):
    q_len = max(0, length - delta)
    ours = dense_mask(Mask((left, right)), q_len, length)
    theirs = fbgemm_mask(0, length, 0, window=(left, right))
    assert torch.equal(ours, theirs[length - q_len :])


@given(data=st.data(), pairs=st.integers(0, 4), causal=st.booleans())
def test_func_is_fbgemms(data, pairs, causal):
    k_len = data.draw(st.integers(1, 12))
    q_len = data.draw(st.integers(1, k_len))
    bound = st.integers(-2, k_len + 2)
    rows = data.draw(
        st.lists(
            st.lists(bound, min_size=2 * pairs + 1, max_size=2 * pairs + 1),
            min_size=q_len,
            max_size=q_len,
        )
    )
    func = torch.tensor(rows, dtype=torch.int32).t()[None]
    ours = dense_mask(Mask.from_func(func, causal), q_len, k_len)
    for r, bounds in enumerate(rows):
        position = r + k_len - q_len if causal else None
        assert ours[r].tolist() == func_mask(bounds, position, k_len)


# ---------------------------------------------------------------------------------------------
# Meta's generative-recommenders
# ---------------------------------------------------------------------------------------------


@given(
    length=st.integers(1, 18),
    targets=st.none() | st.integers(0, 20),
    max_attn_len=st.integers(0, 9),
    contextual=st.integers(0, 7),
    min_full=st.integers(0, 12),
    delta=st.integers(0, 17),
)
def test_every_combination_is_metas(length, targets, max_attn_len, contextual, min_full, delta):
    mask = meta_arguments_to_mask(
        torch.tensor([0, length]),
        None if targets is None else torch.tensor([targets]),
        max_attn_len,
        contextual,
        min_full,
    )
    q_len = max(1, length - delta)
    ours = dense_mask(
        mask,
        q_len,
        length,
        num_contexts=0 if mask.num_contexts is None else int(mask.num_contexts),
        num_targets=0 if mask.num_targets is None else int(mask.num_targets),
    )
    theirs = meta_mask(
        length,
        targets=targets,
        max_attn_len=max_attn_len,
        contextual=contextual,
        min_full=min_full,
    )
    assert torch.equal(ours, theirs[length - q_len :])


# ---------------------------------------------------------------------------------------------
# ULTRA-HSTU
# ---------------------------------------------------------------------------------------------


def semi_local_mask(
    length: int, left: int, prefix: int, contexts: int, targets: int, group: int
) -> torch.Tensor:
    """Returns the semi-local mask of one sequence, computed pair by pair."""
    history = max(length - targets, 0)
    contexts = min(contexts, history)

    def sees(i: int, j: int) -> bool:
        if i < contexts:
            return j < history
        if i >= history:
            same_group = (i - history) // group == (j - history) // group
            return j < history or (same_group and j <= i)
        return j <= i and (i - j <= left or j < prefix or i - left < contexts)

    rows = [[sees(i, j) for j in range(length)] for i in range(length)]
    return torch.tensor(rows, dtype=torch.bool).view(length, length)


@given(data=st.data(), left=st.integers(0, 9), prefix=st.integers(0, 9), group=st.integers(1, 3))
def test_semi_local_by_pairs(data, left, prefix, group):
    lengths = data.draw(st.lists(st.integers(0, 15), max_size=4))
    each = [(n, *(data.draw(st.integers(0, n + 1)) for _ in range(3))) for n in lengths]
    tokens = data.draw(st.sampled_from([(), ("contexts",), ("targets",), ("contexts", "targets")]))
    contexts = [c if "contexts" in tokens else 0 for _, c, _, _ in each]
    targets = [t if "targets" in tokens else 0 for _, _, t, _ in each]
    q_lens = [min(q, n) for n, _, _, q in each]  # the last rows of each sequence
    mask = Mask.semi_local(
        left,
        prefix,
        offsets(q_lens).to(data.draw(st.sampled_from([torch.int32, torch.int64]))),
        sum(q_lens) + 2,
        cu_seqlens_k=offsets(lengths),
        num_contexts=torch.tensor(contexts, dtype=torch.int64) if "contexts" in tokens else None,
        num_targets=torch.tensor(targets, dtype=torch.int32) if "targets" in tokens else None,
        target_group_size=group,
    )
    assert mask.row_spans.dtype == torch.int32
    assert mask.row_spans.shape == (sum(q_lens) + 2, 4)
    assert not mask.row_spans[sum(q_lens) :].any()
    row = 0
    for n, c, t, q_len in zip(lengths, contexts, targets, q_lens, strict=True):
        wanted = semi_local_mask(n, left, prefix, c, t, group)[n - q_len :]
        assert torch.equal(dense_mask(mask, q_len, n, first_row=row), wanted)
        assert torch.equal(spans_to_dense(mask.row_spans[row : row + q_len], n), wanted)
        row += q_len


def test_semi_local_is_the_published_equation():
    """With rows counted from the end and keys from 1, `M[i, j] = 1` where `L - K1 <= i + j <=
    L`, or where `j <= K2` and `j <= L - i` (arXiv 2602.16986).
    """
    length, k1, k2 = 11, 3, 2
    wanted = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(1, length + 1):
            local, reach = length - k1 <= i + j <= length, j <= k2 and j <= length - i
            wanted[length - 1 - i, j - 1] = local or reach
    mask = Mask.semi_local(k1, k2, torch.tensor([0, length]), length)
    assert torch.equal(dense_mask(mask, length, length), wanted)


def test_semi_local_without_a_window_that_ends_is_causal():
    lengths = [9, 0, 4]
    for left, prefix in ((8, 0), (0, 9), (20, 20)):
        mask = Mask.semi_local(left, prefix, offsets(lengths), 13)
        for n, row in ((9, 0), (4, 9)):
            causal = dense_mask(Mask.causal(), n, n)
            assert torch.equal(dense_mask(mask, n, n, first_row=row), causal)


def test_semi_local_reads_no_data():
    """Tensors without data suffice, so nothing can be copied to the host."""
    ends = torch.empty(4, dtype=torch.int64, device="meta")
    counts = torch.empty(3, dtype=torch.int32, device="meta")
    mask = Mask.semi_local(2, 3, ends, 50, num_contexts=counts, num_targets=counts)
    assert mask.row_spans.is_meta
    assert mask.row_spans.shape == (50, 4)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("left", {"left": -1}),
        ("prefix", {"prefix": -1}),
        ("total_q", {"total_q": -2}),
        ("target_group_size", {"target_group_size": 0}),
        ("cu_seqlens_q", {"cu_seqlens_q": [0, 3, 6]}),
        ("cu_seqlens_q", {"cu_seqlens_q": torch.tensor([0.0, 3.0, 6.0])}),
        ("cu_seqlens_k", {"cu_seqlens_k": torch.tensor([0, 6])}),
        ("num_contexts", {"num_contexts": torch.tensor([1, 1, 1])}),
        ("num_targets", {"num_targets": torch.tensor([[1], [1]])}),
        ("num_targets", {"num_targets": torch.tensor([1])}),
    ],
)
def test_semi_local_refuses(name, changes):
    arguments = {"left": 2, "prefix": 1, "cu_seqlens_q": torch.tensor([0, 3, 6]), "total_q": 6}
    with pytest.raises(ValueError, match=rf"^{name}: expected .*got "):
        Mask.semi_local(**{**arguments, **changes})


# ---------------------------------------------------------------------------------------------
# The pieces fit together
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASK_NAMES)
def test_intervals_are_clipped_and_ordered(name):
    lengths_k, q_len = [17], 11
    mask = make_mask(name, lengths_k, [q_len])
    intervals = row_intervals(mask, q_len, 17, num_contexts=2, num_targets=5)
    assert intervals.shape[0] == q_len
    assert intervals.min() >= 0
    assert intervals.max() <= 17
    begin, end = intervals.unbind(-1)
    assert ((begin < end) | ((begin == 0) & (end == 0))).all()
    assert (begin < end).any(), "a mask that shows nothing tests nothing"


@pytest.mark.parametrize(
    "name", [name for name in MASK_NAMES if "5" not in name and "9" not in name]
)
@pytest.mark.parametrize("use_part", [False, True], ids=["all-rows", "seqused"])
def test_batch_row_spans_equal_each_sequence(name, use_part):
    lengths_k, lengths_q = [9, 0, 21, 4, 30], [9, 0, 1, 2, 17]
    mask = make_mask(name, lengths_k, lengths_q)
    used_q = [5, 0, 1, 2, 10] if use_part else lengths_q
    used_k = [6, 0, 20, 3, 30] if use_part else lengths_k
    total_q = sum(lengths_q) + 3
    if mask.row_spans is not None:
        mask = Mask.from_row_spans(torch.cat([mask.row_spans] * 2, dim=-2))
    if mask.func is not None:
        mask = Mask.from_func(torch.cat([mask.func] * 2, dim=-1), mask.func_causal)
    spans = batch_row_spans(
        mask,
        offsets(lengths_q),
        offsets(lengths_k),
        seqused_q=torch.tensor(used_q) if use_part else None,
        seqused_k=torch.tensor(used_k) if use_part else None,
        total_q=total_q,
        head=1,
    )
    expected = torch.zeros(total_q, 4, dtype=torch.int32)
    start = 0
    for b, (q_len, k_len) in enumerate(zip(used_q, used_k, strict=True)):
        expected[start : start + q_len] = row_spans(
            mask,
            q_len,
            k_len,
            0 if mask.num_contexts is None else int(mask.num_contexts[b]),
            0 if mask.num_targets is None else int(mask.num_targets[b]),
            first_row=start,
            head=1,
        )
        start += lengths_q[b]
    assert spans.dtype == torch.int32
    assert torch.equal(spans, expected)
    assert spans.any()


@pytest.mark.parametrize("name", ["causal", "local", "context-target", "spans", "func-3"])
def test_spans_and_dense_mask_say_the_same(name):
    mask = make_mask(name, [23], [15])
    options = {"num_contexts": 3, "num_targets": 6, "first_row": 0}
    spans = row_spans(mask, 15, 23, **options)
    assert torch.equal(spans_to_dense(spans, 23), dense_mask(mask, 15, 23, **options))


def test_rows_before_the_first_key_see_nothing():
    visible = dense_mask(Mask.full(), 5, 3)
    assert not visible[:2].any()
    assert visible[2:].all()
    assert not dense_mask(Mask.from_row_spans(torch.full((5, 4), 9).int()), 5, 3).any()


def test_counts_past_the_sequence_are_clamped():
    everything_is_target = dense_mask(
        Mask.causal(num_targets=torch.tensor([9])), 4, 4, num_targets=9
    )
    assert torch.equal(everything_is_target, torch.eye(4, dtype=torch.bool))
    mask = Mask.causal(num_contexts=torch.tensor([9]), num_targets=torch.tensor([1]))
    visible = dense_mask(mask, 4, 4, num_contexts=9, num_targets=1)
    assert torch.equal(visible, fbgemm_mask(3, 0, 1, window=(-1, 0)))


@given(st.data(), st.sampled_from(MASK_NAMES), st.integers(0, 30), st.integers(0, 30))
def test_key_range_holds_what_the_rows_see(data, name, q_len, k_len):
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    q_len, k_len = min(q_len, k_len), max(q_len, k_len)
    mask = make_mask(name, [k_len], [q_len])
    counts = {
        count: 0 if getattr(mask, count) is None else int(getattr(mask, count)[0])
        for count in ("num_contexts", "num_targets")
    }
    first = data.draw(st.integers(0, q_len))
    end = data.draw(st.integers(first, q_len))
    ahead = k_len - q_len
    begin, last = key_range(mask, first + ahead, end + ahead)
    heads = range(mask_heads(mask))
    for visible in (dense_mask(mask, q_len, k_len, **counts, head=head) for head in heads):
        columns = visible[first:end].any(0).nonzero()
        assert (columns >= begin).all()
        assert last is None or (columns < last).all()
    # The counts are tensors, which `key_range` does not read.
    has_counts = any(getattr(mask, count) is not None for count in counts)
    exact = not has_counts and not mask.min_full_attn_seq_len and mask.window_size[0] >= 0
    if exact and first < end and last is not None:
        assert last - begin <= end - first + sum(mask.window_size)


def test_wide_func_has_no_row_spans():
    with pytest.raises(ValueError, match=r"func.*at most 3.*n = 5"):
        row_spans(Mask.from_func(torch.zeros(1, 5, 2, dtype=torch.int32)), 2, 2)


# ---------------------------------------------------------------------------------------------
# Tiles
# ---------------------------------------------------------------------------------------------


@given(
    data=st.data(),
    q_len=st.integers(0, 13),
    k_len=st.integers(0, 13),
    tile_q=st.integers(1, 5),
    tile_k=st.integers(1, 5),
)
def test_tiles_by_counting(data, q_len, k_len, tile_q, tile_k):
    bits = data.draw(st.lists(st.booleans(), min_size=q_len * k_len, max_size=q_len * k_len))
    visible = torch.tensor(bits, dtype=torch.bool).view(q_len, k_len)
    kinds = tile_kinds(visible, tile_q, tile_k)
    assert kinds.shape == (-(-q_len // tile_q), -(-k_len // tile_k))
    for m in range(kinds.shape[0]):
        for n in range(kinds.shape[1]):
            tile = visible[m * tile_q : (m + 1) * tile_q, n * tile_k : (n + 1) * tile_k]
            expected = TileKind.PARTIAL if tile.any() else TileKind.EMPTY
            if tile.all() and tile.shape[1] == tile_k:
                expected = TileKind.FULL
            assert kinds[m, n] == expected


def test_tile_lists_leave_out_what_is_empty():
    visible = dense_mask(Mask.causal(), 8, 8)
    partial, full = TileKind.PARTIAL, TileKind.FULL
    assert kv_tiles(visible, 4, 2) == [
        [(0, partial), (1, partial)],
        [(0, full), (1, full), (2, partial), (3, partial)],
    ]
    assert q_tiles(visible, 4, 2) == [
        [(0, partial), (1, full)],
        [(0, partial), (1, full)],
        [(1, partial)],
        [(1, partial)],
    ]


# ---------------------------------------------------------------------------------------------
# Validation
# ---------------------------------------------------------------------------------------------

INT = torch.tensor([1, 2])
SPANS = torch.zeros(6, 4, dtype=torch.int32)
FUNC = torch.zeros(1, 3, 6, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("window_size", {"window_size": (-2, 0)}),
        ("window_size", {"window_size": (3, -5)}),
        ("window_size", {"window_size": (3,)}),
        ("target_group_size", {"window_size": (-1, 0), "target_group_size": 0}),
        ("min_full_attn_seq_len", {"window_size": (2, 0), "min_full_attn_seq_len": -1}),
        ("min_full_attn_seq_len", {"min_full_attn_seq_len": 3}),
        ("min_full_attn_seq_len", {"window_size": (-1, 0), "min_full_attn_seq_len": 3}),
        ("min_full_attn_seq_len", {"window_size": (2, 1), "min_full_attn_seq_len": 3}),
        ("num_contexts", {"num_contexts": INT}),
        ("num_contexts", {"window_size": (2, 1), "num_contexts": INT}),
        ("num_targets", {"num_targets": INT}),
        ("num_targets", {"window_size": (2, -1), "num_targets": INT}),
        ("row_spans", {"row_spans": SPANS, "func": FUNC}),
        ("window_size", {"row_spans": SPANS, "window_size": (-1, 0)}),
        ("num_targets", {"row_spans": SPANS, "num_targets": INT}),
        ("num_contexts", {"func": FUNC, "num_contexts": INT}),
        ("min_full_attn_seq_len", {"func": FUNC, "min_full_attn_seq_len": 4}),
        ("window_size", {"func": FUNC, "window_size": (4, 0)}),
        ("func_causal", {"func_causal": True}),
        ("func_causal", {"row_spans": SPANS, "func_causal": True}),
    ],
)
def test_what_has_no_meaning_is_refused(name, arguments):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*got "):
        Mask(**arguments)


def test_constructors_fill_the_fields():
    contexts, targets = torch.tensor([1]), torch.tensor([2])
    assert Mask.full().window_size == (-1, -1)
    assert Mask.causal().window_size == (-1, 0)
    local = Mask.local(
        4, num_contexts=contexts, num_targets=targets, target_group_size=3, min_full_attn_seq_len=5
    )
    assert local.window_size == (4, 0)
    assert local.num_contexts is contexts
    assert local.num_targets is targets
    assert (local.target_group_size, local.min_full_attn_seq_len) == (3, 5)
    assert Mask.local(2, 3).window_size == (2, 3)
    assert Mask.from_row_spans(SPANS).row_spans is SPANS
    assert Mask.from_func(FUNC, causal=True).func_causal
    assert Mask.from_func(FUNC).is_arbitrary
    assert not local.is_arbitrary
