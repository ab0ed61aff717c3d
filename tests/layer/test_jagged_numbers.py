"""Tests of jagged operations and embeddings against loops over plain lists."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hstu_attn.jagged import (
    JaggedParts,
    add_position_time_embeddings,
    concat_jagged,
    deinterleave_jagged,
    dense_to_jagged,
    interleave_jagged,
    jagged_ids,
    jagged_positions,
    jagged_to_dense,
    split_jagged,
)
from tests.helpers.jagged_rows import WIDTH, assert_packed, rows_of, sequences, to_offsets


@st.composite
def batches(draw: st.DrawFn, parts: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Draws parts of the same sequences, with NaN in the rows past the last offset."""
    size = draw(st.integers(0, 5))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    found = []
    for _ in range(parts):
        lengths = draw(st.lists(st.integers(0, 6), min_size=size, max_size=size))
        values = rows_of(sum(lengths) + draw(st.integers(0, 3)))
        values[sum(lengths) :] = math.nan
        found.append((values, to_offsets(lengths, dtype)))
    return found


@given(batches())
def test_positions_and_ids(batch):
    ((values, offsets),) = batch
    total, size = values.shape[0], offsets.shape[0] - 1
    ids, positions = jagged_ids(offsets, total), jagged_positions(offsets, total)
    assert ids.dtype == positions.dtype == torch.int64
    lengths = offsets.diff().tolist()
    outside = total - int(offsets[-1])
    assert ids.tolist() == [b for b in range(size) for _ in range(lengths[b])] + [size] * outside
    assert positions.tolist() == [i for n in lengths for i in range(n)] + [0] * outside


@given(st.integers(1, 4).flatmap(batches))
def test_concat_and_split(parts):
    values, offsets = concat_jagged(parts)
    assert values.shape == (sum(rows.shape[0] for rows, _ in parts), WIDTH)
    assert offsets.dtype == parts[0][1].dtype
    each = [sequences(*part) for part in parts]
    expected = [[row for rows in parts for row in rows] for parts in zip(*each, strict=True)]
    assert_packed(values, offsets, expected)
    all_offsets = [part_offsets for _, part_offsets in parts]
    layout = JaggedParts(all_offsets, [rows.shape[0] for rows, _ in parts])
    for tensors in ([rows for rows, _ in parts], [rows[:, 0].long() for rows, _ in parts]):
        expected_rows, _ = concat_jagged(list(zip(tensors, all_offsets, strict=True)))
        assert torch.equal(layout.concat(tensors), expected_rows)
    assert torch.equal(layout.offsets, offsets)
    for split, totals in (
        (split_jagged(values, all_offsets), [values.shape[0]] * len(parts)),
        (
            split_jagged(values, all_offsets, [rows.shape[0] for rows, _ in parts]),
            [rows.shape[0] for rows, _ in parts],
        ),
        (
            [layout.part(values, n) for n in range(len(parts))],
            [rows.shape[0] for rows, _ in parts],
        ),
    ):
        for n, rows in enumerate(split):
            assert rows.shape == (totals[n], WIDTH)
            assert_packed(rows, all_offsets[n], each[n])


@given(batches())
def test_interleave_and_deinterleave(batch):
    ((items, offsets),) = batch
    actions = rows_of(items.shape[0])
    values, doubled = interleave_jagged(items, actions, offsets)
    assert doubled.dtype == offsets.dtype
    expected = [
        [row for pair in zip(rows, others, strict=True) for row in pair]
        for rows, others in zip(sequences(items, offsets), sequences(actions, offsets), strict=True)
    ]
    assert_packed(values, doubled, expected)
    again, actions_again, halved = deinterleave_jagged(
        values.masked_fill((torch.arange(len(values)) >= doubled[-1])[:, None], math.nan), doubled
    )
    assert_packed(again, halved, sequences(items, offsets))
    assert_packed(actions_again, halved, sequences(actions, offsets))


@given(batches(), st.integers(0, 8), st.sampled_from([0.0, -2.5]))
def test_to_dense_and_back(batch, max_len, fill):
    ((values, offsets),) = batch
    dense = jagged_to_dense(values, offsets, max_len, fill)
    assert dense.shape == (offsets.shape[0] - 1, max_len, WIDTH)
    kept = [rows[:max_len] for rows in sequences(values, offsets)]
    assert dense.tolist() == [rows + [[fill] * WIDTH] * (max_len - len(rows)) for rows in kept]
    packed = dense_to_jagged(dense, offsets, values.shape[0])
    expected = [
        rows[:max_len] + [[0.0] * WIDTH] * (len(rows) - max_len)
        for rows in sequences(values, offsets)
    ]
    assert_packed(packed, offsets, expected)


def plain_embedding(
    x: Tensor,
    offsets: Tensor,
    position_table: Tensor,
    time_table: Tensor | None = None,
    timestamps: Tensor | None = None,
    query_timestamps: Tensor | None = None,
    num_targets: Tensor | None = None,
    contextual_seq_len: int = 0,
    count_from: str = "end",
    time_bucket: str = "sqrt",
    time_bucket_width: float = 60.0,
    scale: float = 1.0,
) -> Tensor:
    """Computes the embedding row by row, with the indices of the public code."""
    out = torch.zeros_like(x)
    for b, (start, end) in enumerate(pairwise(offsets.tolist())):
        high = end - start - (0 if num_targets is None else int(num_targets[b]))
        for i in range(end - start):
            position = min(i, high)
            if count_from == "end":
                position = i if i < contextual_seq_len else high - position + contextual_seq_len
            added = position_table[min(position, len(position_table) - 1)]
            if time_table is not None:
                query = timestamps[end - 1] if query_timestamps is None else query_timestamps[b]
                age = max(int(query) - int(timestamps[start + i]), 1e-6) / time_bucket_width
                value = math.log(age) if time_bucket == "log" else math.sqrt(age)
                added = added + time_table[min(int(max(value, 0)), len(time_table) - 1)]
            out[start + i] = x[start + i] * scale + added
    return out


@given(
    batches(),
    st.sampled_from(["start", "end"]),
    st.sampled_from(["sqrt", "log"]),
    st.sampled_from([59.7311, 0.3703]),  # chosen so that no age is near a bucket's bound
    st.sampled_from([0, 2]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_position_and_time(batch, count_from, time_bucket, width, contexts, targets, times, query):
    ((x, offsets),) = batch
    lengths = offsets.diff()
    options: dict[str, Any] = {"count_from": count_from, "scale": 1.7}
    if count_from == "end":
        options["contextual_seq_len"] = contexts
    if targets:
        options["num_targets"] = (torch.rand(lengths.shape) * (lengths + 1)).to(offsets.dtype)
    if times:
        timestamps = torch.randint(0, 10**5, (x.shape[0],))
        options |= {"time_table": rows_of(20), "timestamps": timestamps}
        options |= {"time_bucket": time_bucket, "time_bucket_width": width}
        if query:
            options["query_timestamps"] = torch.randint(0, 2 * 10**5, lengths.shape)
    table = rows_of(5)
    torch.testing.assert_close(
        add_position_time_embeddings(x, offsets, table, **options),
        plain_embedding(x, offsets, table, **options),
    )


def test_positions_of_the_public_code():
    """The rows have two contextual tokens, four of history and two targets."""
    table = torch.arange(10.0)[:, None]

    def entries(**options: Any) -> list[int]:
        x, offsets = torch.zeros(8, 1), torch.tensor([0, 8])
        return add_position_time_embeddings(x, offsets, table, **options)[:, 0].int().tolist()

    two = torch.tensor([2])
    assert entries() == [8, 7, 6, 5, 4, 3, 2, 1]
    assert entries(num_targets=two) == [6, 5, 4, 3, 2, 1, 0, 0]
    assert entries(num_targets=two, contextual_seq_len=2) == [0, 1, 6, 5, 4, 3, 2, 2]
    assert entries(count_from="start") == [0, 1, 2, 3, 4, 5, 6, 7]
    assert entries(count_from="start", num_targets=two) == [0, 1, 2, 3, 4, 5, 6, 6]


def test_bounds_of_time_buckets():
    """The times are the first second of a bucket and the second before it."""
    table, zeros = torch.arange(6.0)[:, None], torch.zeros(1, 1)
    ages = [0, 59, 60, 239, 240, 539, 540, 10**9]
    timestamps = 10**9 - torch.tensor([*ages, -5])  # the last row is later than the query
    entries = add_position_time_embeddings(
        torch.zeros(9, 1),
        torch.tensor([0, 9]),
        zeros,
        time_table=table,
        timestamps=timestamps,
        query_timestamps=torch.tensor([10**9]),
    )
    assert entries[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 5, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)], ids=str)
def test_dtypes_and_shapes(dtype, shape, device):
    """Functions that move rows take any dtype and any trailing sizes."""
    lengths = [3, 0, 2]
    offsets = to_offsets(lengths).to(device)
    values = torch.randint(0, 2, (6, *shape), device=device).to(dtype)
    kept = values.clone()
    kept[5:] = 0
    joined, _ = concat_jagged([(values, offsets), (values, offsets)])
    assert joined.dtype == dtype
    for part in split_jagged(joined, [offsets, offsets], [6, 6]):
        assert torch.equal(part, kept)
    both, doubled = interleave_jagged(values, values, offsets)
    items, actions, _ = deinterleave_jagged(both, doubled)
    assert torch.equal(items, kept)
    assert torch.equal(actions, kept)
    dense = jagged_to_dense(values, offsets, 4, 1)
    assert dense.dtype == dtype
    assert (dense[:, 3:] == 1).all()
    assert torch.equal(dense_to_jagged(dense, offsets, 6), kept)


def test_embeddings_take_the_dtype_of_the_rows():
    """With fp32 tables and bf16 rows, the tables' sum is rounded once and then added."""
    x, offsets = rows_of(7, torch.bfloat16), to_offsets([3, 4])
    table, times = rows_of(9, torch.float32), rows_of(4, torch.float32)
    timestamps = torch.zeros(7, dtype=torch.int64)
    out = add_position_time_embeddings(x, offsets, table, time_table=times, timestamps=timestamps)
    added = (table[[3, 2, 1, 4, 3, 2, 1]] + times[0]).bfloat16()
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, x + added)
