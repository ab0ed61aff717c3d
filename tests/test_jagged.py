"""What stands around the layers, against loops over plain lists, and what must hold whatever the
numbers are: no copy to the host, no graph break, zeros past the last offset, nothing read out of
bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

from hstu_attn.jagged import (
    add_position_time_embeddings,
    concat_jagged,
    deinterleave_jagged,
    dense_to_jagged,
    interleave_jagged,
    jagged_backend,
    jagged_ids,
    jagged_positions,
    jagged_to_dense,
    split_jagged,
)

WIDTH = 3
Arguments = tuple[Any, ...]


def to_offsets(lengths: list[int], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=dtype)


def rows_of(total: int, dtype: torch.dtype = torch.float64, width: int = WIDTH) -> Tensor:
    return torch.randn(total, width).to(dtype)


def sequences(values: Tensor, offsets: Tensor) -> list[list[Any]]:
    """The rows of each sequence, as lists."""
    return [values[start:end].tolist() for start, end in pairwise(offsets.tolist())]


def assert_packed(values: Tensor, offsets: Tensor, expected: list[list[Any]]) -> None:
    """The sequences, and zeros past them."""
    assert offsets.tolist() == to_offsets([len(rows) for rows in expected]).tolist()
    assert sequences(values, offsets) == expected
    assert not values[int(offsets[-1]) :].any()


@st.composite
def batches(draw: st.DrawFn, parts: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Parts of the same sequences, with rows past the last offset that hold NaN."""
    size = draw(st.integers(0, 5))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    found = []
    for _ in range(parts):
        lengths = draw(st.lists(st.integers(0, 6), min_size=size, max_size=size))
        values = rows_of(sum(lengths) + draw(st.integers(0, 3)))
        values[sum(lengths) :] = math.nan
        found.append((values, to_offsets(lengths, dtype)))
    return found


# ---------------------------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------------------------


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
    for split, totals in (
        (split_jagged(values, all_offsets), [values.shape[0]] * len(parts)),
        (
            split_jagged(values, all_offsets, [rows.shape[0] for rows, _ in parts]),
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
    """Row by row, as the public code counts."""
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
    st.sampled_from([59.7311, 0.3703]),  # no age is near a bucket's bound
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
    """Two contextual rows, four of history, two targets: the entries that its models learned."""
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
    """At the first second of a bucket, and one before it."""
    table, zeros = torch.arange(6.0)[:, None], torch.zeros(1, 1)
    ages = [0, 59, 60, 239, 240, 539, 540, 10**9]
    timestamps = 10**9 - torch.tensor([*ages, -5])  # the last row is in the future of the query
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
    """Everything that moves rows does so for any dtype and any sizes behind the first."""
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
    """Tables of fp32 beside rows of bf16: their sum is rounded once, then added."""
    x, offsets = rows_of(7, torch.bfloat16), to_offsets([3, 4])
    table, times = rows_of(9, torch.float32), rows_of(4, torch.float32)
    timestamps = torch.zeros(7, dtype=torch.int64)
    out = add_position_time_embeddings(x, offsets, table, time_table=times, timestamps=timestamps)
    added = (table[[3, 2, 1, 4, 3, 2, 1]] + times[0]).bfloat16()
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, x + added)


# ---------------------------------------------------------------------------------------------
# Every function, as it is compiled, exported and differentiated
# ---------------------------------------------------------------------------------------------


class Batch:
    """Arguments for given lengths: rows past the last offset, and empty tensors that only have a
    size."""

    def __init__(self, lengths: list[int], dtype: torch.dtype = torch.float32, extra: int = 2):
        self.total = sum(lengths) + extra
        self.offsets = to_offsets(lengths)
        self.shorter = to_offsets([length // 2 for length in lengths])
        self.values = rows_of(self.total, dtype)
        self.others = rows_of(self.total, dtype)
        self.half = rows_of(int(self.shorter[-1]) + 1, dtype)
        self.pairs = rows_of(2 * self.total, dtype)
        self.dense = torch.randn(len(lengths), max(lengths), WIDTH).to(dtype)
        self.room = torch.empty(max(lengths) - 1)
        self.rows = torch.empty(self.total)
        self.tables = rows_of(8, dtype), rows_of(11, dtype)
        self.times = torch.randint(0, 10**4, (self.total,))
        self.targets = torch.tensor([length // 3 for length in lengths], dtype=torch.int32)


def concat(a: Tensor, b: Tensor, a_offsets: Tensor, b_offsets: Tensor) -> tuple[Tensor, ...]:
    return concat_jagged([(a, a_offsets), (b, b_offsets)])


def split(values: Tensor, a_offsets: Tensor, b_offsets: Tensor) -> tuple[Tensor, ...]:
    return tuple(split_jagged(values, [a_offsets, b_offsets]))


def split_sized(
    values: Tensor, a_offsets: Tensor, b_offsets: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, ...]:
    return tuple(split_jagged(values, [a_offsets, b_offsets], [a.shape[0], b.shape[0]]))


def packed(dense: Tensor, offsets: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    return (dense_to_jagged(dense, offsets, rows.shape[0]),)


def padded(values: Tensor, offsets: Tensor, room: Tensor) -> tuple[Tensor, ...]:
    return (jagged_to_dense(values, offsets, room.shape[0], 0.5),)


def places(offsets: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    return jagged_ids(offsets, rows.shape[0]), jagged_positions(offsets, rows.shape[0])


def embedded(
    x: Tensor, position: Tensor, time: Tensor, offsets: Tensor, times: Tensor, targets: Tensor
) -> tuple[Tensor, ...]:
    recent = add_position_time_embeddings(
        x,
        offsets,
        position,
        time_table=time,
        timestamps=times,
        num_targets=targets,
        contextual_seq_len=1,
        scale=2.0,
    )
    return recent, add_position_time_embeddings(x, offsets, position, count_from="start")


CASES: dict[str, tuple[Callable[..., tuple[Tensor, ...]], Callable[[Batch], Arguments]]] = {
    "concat": (concat, lambda b: (b.values, b.half, b.offsets, b.shorter)),
    "split": (split, lambda b: (b.pairs, b.offsets, b.shorter)),
    "split-sized": (split_sized, lambda b: (b.pairs, b.offsets, b.shorter, b.values, b.half)),
    "interleave": (interleave_jagged, lambda b: (b.values, b.others, b.offsets)),
    "deinterleave": (deinterleave_jagged, lambda b: (b.pairs, 2 * b.offsets)),
    "dense-to-jagged": (packed, lambda b: (b.dense, b.offsets, b.rows)),
    "jagged-to-dense": (padded, lambda b: (b.values, b.offsets, b.room)),
    "places": (places, lambda b: (b.offsets, b.rows)),
    "embeddings": (embedded, lambda b: (b.values, *b.tables, b.offsets, b.times, b.targets)),
}
# The first is what is compiled for; sizes that are equal by chance would count as one.
LENGTHS = ([5, 9, 3, 0, 13, 6], [20, 9], [1, 2, 3, 21, 0, 14, 4])

every_function = pytest.mark.parametrize(("function", "arguments"), CASES.values(), ids=CASES)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def differentiable(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [output for output in outputs if output.is_floating_point()]


@every_function
@pytest.mark.usefixtures("fresh_compiler")
def test_compile_with_dynamic_sizes(function, arguments):
    """One graph, no break, and no second compilation for other sizes; the same numbers."""
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, lengths in enumerate(LENGTHS):
        given = arguments(Batch(lengths))
        leaves = [t.requires_grad_() for t in given if t.is_floating_point() and t.dim() > 1]
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            outputs = compiled(*given)
        expected = function(*given)
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
        if function is split_sized:
            leaves = leaves[:1]
        if leaves:
            seeds = [torch.randn_like(output) for output in differentiable(expected)]
            found = torch.autograd.grad(differentiable(outputs), leaves, seeds)
            wanted = torch.autograd.grad(differentiable(expected), leaves, seeds)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.usefixtures("fresh_compiler")
def test_compile_with_inductor():
    """Generated code for the whole way from parts to rows for a layer, forward and backward."""

    def call(batch: Batch) -> Tensor:
        history, offsets = interleave_jagged(batch.values, batch.others, batch.offsets)
        parts = [(history, offsets), (batch.half, batch.shorter)]
        x, offsets = concat_jagged(parts)
        times, _ = concat_jagged(
            [(torch.cat([batch.times] * 2), batch.offsets * 2), (batch.times, batch.shorter)]
        )
        x = add_position_time_embeddings(
            x,
            offsets,
            batch.tables[0],
            time_table=batch.tables[1],
            timestamps=times[: x.shape[0]],
            num_targets=batch.shorter.diff(),
        )
        return split_jagged(x, [part[1] for part in parts], [part[0].shape[0] for part in parts])[0]

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    for n, lengths in enumerate(LENGTHS[:2]):
        batch = Batch(lengths)
        leaves = [batch.values, batch.half, *batch.tables]
        for leaf in leaves:
            leaf.requires_grad_()
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            out = compiled(batch)
        expected = call(batch)
        torch.testing.assert_close(out, expected)
        seed = torch.randn_like(out)
        for found, wanted in zip(
            torch.autograd.grad(out, leaves, seed),
            torch.autograd.grad(expected, leaves, seed),
            strict=True,
        ):
            torch.testing.assert_close(found, wanted)


@every_function
def test_export(function, arguments):
    """With dynamic sizes; the program computes other batches, too."""

    class Module(torch.nn.Module):
        def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
            return function(*given)

    first = arguments(Batch(LENGTHS[0]))
    batch = Batch(LENGTHS[0])
    fixed = {table.shape for table in batch.tables}
    shapes = tuple(
        {}
        if t.shape in fixed
        else {d: Dim.DYNAMIC for d in range(t.dim()) if not (d and d == t.dim() - 1)}
        for t in first
    )
    program = torch.export.export(Module(), first, dynamic_shapes=(shapes,), strict=False)
    for lengths in LENGTHS:
        given = arguments(Batch(lengths))
        for output, expected in zip(program.module()(*given), function(*given), strict=True):
            assert torch.equal(output, expected)


@every_function
def test_nothing_is_copied_to_the_host(function, arguments):
    """Tensors without data have no number that could be asked for; sizes come out all the same."""
    given = arguments(Batch(LENGTHS[0]))
    real = function(*given)
    with FakeTensorMode() as mode:
        fake = function(*(mode.from_tensor(t) for t in given))
    for outputs in (fake, function(*(t.to("meta") for t in given))):
        for output, expected in zip(outputs, real, strict=True):
            assert (output.shape, output.dtype) == (expected.shape, expected.dtype)


@every_function
def test_gradients(function, arguments):
    given = arguments(Batch([3, 0, 4], torch.float64))
    leaves = [n for n, t in enumerate(given) if t.dtype == torch.float64]
    if function is split_sized:
        leaves = leaves[:1]
    if not leaves:
        return

    def call(*values: Tensor) -> list[Tensor]:
        changed = list(given)
        for n, value in zip(leaves, values, strict=True):
            changed[n] = value
        return differentiable(function(*changed))

    inputs = [given[n].clone().requires_grad_() for n in leaves]
    assert torch.autograd.gradcheck(call, inputs)
    assert torch.autograd.gradgradcheck(call, inputs)


@every_function
def test_rows_of_no_sequence_give_nothing(function, arguments):
    """NaN past the last offset changes neither results nor gradients, and gets none."""
    lengths = [3, 0, 4]
    given = arguments(Batch(lengths))
    poisoned = list(given)
    ends = [t[-1] for t in given if t.dtype == torch.int64 and t.shape == (len(lengths) + 1,)]
    end = int(sum(ends)) if function in (split, split_sized) else int(ends[0])
    for n, t in enumerate(given[: 2 if function in (concat, interleave_jagged) else 1]):
        if t.is_floating_point() and function is not packed:
            poisoned[n] = t.clone()
            poisoned[n][int(ends[n]) if function is concat else end :] = math.nan
    results = []
    for tensors in (given, poisoned):
        leaves = [t.requires_grad_() for t in tensors if t.is_floating_point() and t.dim() > 1]
        outputs = function(*tensors)
        assert all(output.isfinite().all() for output in outputs)
        gradients: tuple[Tensor, ...] = ()
        if leaves:
            found = differentiable(outputs)
            gradients = torch.autograd.grad(
                found, leaves, [torch.ones_like(t) for t in found], allow_unused=True
            )
        results.append([*outputs, *(g for g in gradients if g is not None)])
    for plain, other in zip(*results, strict=True):
        assert torch.equal(plain, other)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("extra", [0, 3])
def test_empty(lengths, extra):
    """No sequence, or none with a row; gradients flow all the same."""
    offsets = to_offsets(lengths)
    values = rows_of(extra).requires_grad_()
    dense = torch.randn(len(lengths), 4, WIDTH, requires_grad=True)
    timestamps = torch.zeros(extra, dtype=torch.int64)
    outputs = [
        concat_jagged([(values, offsets), (values, offsets)])[0],
        *split_jagged(values, [offsets, offsets], [extra, 5]),
        interleave_jagged(values, values, offsets)[0],
        *deinterleave_jagged(torch.cat([values, values]), offsets)[:2],
        dense_to_jagged(dense, offsets, extra),
        dense_to_jagged(dense[:, :0], offsets, extra),
        jagged_to_dense(values, offsets, 4),
        jagged_to_dense(values, offsets, 0),
        add_position_time_embeddings(
            values, offsets, rows_of(2), time_table=rows_of(2), timestamps=timestamps
        ),
    ]
    for output in outputs:
        assert output.requires_grad
        assert not output.any()
    sum(output.sum() for output in outputs).backward()
    assert not values.grad.any()


# ---------------------------------------------------------------------------------------------
# Wrong arguments
# ---------------------------------------------------------------------------------------------

WRONG_OFFSETS = ([2, 4, 6], [0, 5, 3], [-7, -3, 9], [0, 2**40, 2**50], [9, 9, 9], [0, -(2**62), 7])


@pytest.mark.parametrize("numbers", WRONG_OFFSETS, ids=str)
def test_wrong_offsets_stay_in_bounds(numbers):
    """On a CPU an index out of bounds raises."""
    offsets = torch.tensor(numbers)
    values, right = rows_of(6), torch.tensor([0, 3, 6])
    concat_jagged([(values, offsets), (values, right)])
    split_jagged(values, [right, offsets])
    interleave_jagged(values, values, offsets)
    deinterleave_jagged(values, offsets)
    dense_to_jagged(rows_of(2 * 3).view(2, 3, WIDTH), offsets, 6)
    jagged_to_dense(values, offsets, 4)
    assert (jagged_positions(offsets, 6) >= 0).all()
    ids = jagged_ids(offsets, 6)
    assert ((ids >= 0) & (ids <= 2)).all()
    add_position_time_embeddings(
        values,
        offsets,
        rows_of(4),
        time_table=rows_of(4),
        timestamps=torch.zeros(6, dtype=torch.int64),
        num_targets=torch.tensor([99, -99]),
    )


X, O, T = torch.zeros(6, WIDTH), torch.tensor([0, 2, 6]), torch.zeros(4, WIDTH)
L = torch.zeros(6, dtype=torch.int64)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("offsets", lambda: jagged_ids(torch.zeros(2, 2, dtype=torch.int64), 3)),
        ("offsets", lambda: jagged_ids(torch.zeros(0, dtype=torch.int64), 3)),
        ("offsets", lambda: jagged_positions(torch.zeros(3), 3)),
        ("total", lambda: jagged_positions(O, -1)),
        ("total", lambda: jagged_ids(O, -1)),
        ("parts", lambda: concat_jagged([])),
        (r"parts\[1\] values", lambda: concat_jagged([(X, O), (X[:, :2], O)])),
        (r"parts\[1\] values", lambda: concat_jagged([(X, O), (X.double(), O)])),
        (r"parts\[1\] values", lambda: concat_jagged([(X, O), (X.to("meta"), O)])),
        (r"parts\[0\] values", lambda: concat_jagged([(torch.tensor(1.0), O)])),
        (r"parts\[0\] offsets", lambda: concat_jagged([(X, torch.tensor(1))])),
        (r"parts\[1\] offsets", lambda: concat_jagged([(X, O), (X, O[:2])])),
        (r"parts\[1\] offsets", lambda: concat_jagged([(X, O), (X, O.to("meta"))])),
        ("parts_offsets", lambda: split_jagged(X, [])),
        (r"parts_offsets\[1\]", lambda: split_jagged(X, [O, O[:2]])),
        ("totals", lambda: split_jagged(X, [O, O], [6])),
        (r"totals\[1\]", lambda: split_jagged(X, [O, O], [6, -1])),
        ("values", lambda: split_jagged(torch.tensor(1.0), [O])),
        ("actions", lambda: interleave_jagged(X, X[:5], O)),
        ("actions", lambda: interleave_jagged(X, X.half(), O)),
        ("offsets", lambda: interleave_jagged(X, X, O.float())),
        ("values", lambda: deinterleave_jagged(X[:5], O)),
        ("offsets", lambda: deinterleave_jagged(X, O.to("meta"))),
        ("dense", lambda: dense_to_jagged(O, O, 6)),
        ("offsets", lambda: dense_to_jagged(torch.zeros(3, 4), O, 6)),
        ("total", lambda: dense_to_jagged(torch.zeros(2, 4), O, -6)),
        ("values", lambda: jagged_to_dense(torch.tensor(1.0), O, 4)),
        ("max_len", lambda: jagged_to_dense(X, O, -1)),
        ("offsets", lambda: jagged_to_dense(X, O.to("meta"), 4)),
        ("x", lambda: add_position_time_embeddings(X[:, 0], O, T)),
        ("x", lambda: add_position_time_embeddings(X.long(), O, T)),
        ("offsets", lambda: add_position_time_embeddings(X, O.float(), T)),
        ("position_table", lambda: add_position_time_embeddings(X, O, T[:, :2])),
        ("position_table", lambda: add_position_time_embeddings(X, O, T[:0])),
        ("position_table", lambda: add_position_time_embeddings(X, O, T.long())),
        ("num_targets", lambda: add_position_time_embeddings(X, O, T, num_targets=O)),
        ("num_targets", lambda: add_position_time_embeddings(X, O, T, num_targets=X[:2, 0])),
        ("count_from", lambda: add_position_time_embeddings(X, O, T, count_from="both")),
        (
            "contextual_seq_len",
            lambda: add_position_time_embeddings(X, O, T, contextual_seq_len=-1),
        ),
        (
            "contextual_seq_len",
            lambda: add_position_time_embeddings(X, O, T, contextual_seq_len=1, count_from="start"),
        ),
        ("time_table", lambda: add_position_time_embeddings(X, O, T, time_table=T)),
        ("timestamps", lambda: add_position_time_embeddings(X, O, T, timestamps=L)),
        ("query_timestamps", lambda: add_position_time_embeddings(X, O, T, query_timestamps=L)),
        *(
            (
                next(iter(changes)),
                lambda changes=changes: add_position_time_embeddings(
                    X, O, T, **{"time_table": T, "timestamps": L, **changes}
                ),
            )
            for changes in (
                {"time_table": T[:, :2]},
                {"time_table": T[:0]},
                {"timestamps": L[:3]},
                {"timestamps": L.float()},
                {"query_timestamps": L},
                {"query_timestamps": L[:2].int()},
                {"time_bucket": "linear"},
                {"time_bucket_width": 0.0},
            )
        ),
    ],
)
def test_bad_argument(name, call):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*got "):
        call()


# ---------------------------------------------------------------------------------------------
# FBGEMM's kernels, and GPUs
# ---------------------------------------------------------------------------------------------


def test_the_backend_is_torch_where_fbgemm_does_not_serve():
    for dtype in (torch.float64, torch.int64, torch.bool):
        assert jagged_backend(torch.zeros(1, dtype=dtype)) == "torch"
    assert jagged_backend(torch.zeros(1, device="meta")) == "torch"


def test_the_backend_is_torch_without_fbgemm():
    if not hasattr(torch.ops.fbgemm, "dense_to_jagged"):
        assert jagged_backend(torch.zeros(1)) == "torch"


@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (2,), (2, 3), (0,)], ids=str)
def test_fbgemm_gives_the_same(shape, dtype, offsets_dtype, monkeypatch):
    pytest.importorskip("fbgemm_gpu")
    largest = torch.iinfo(offsets_dtype).max
    wrong = [numbers for numbers in WRONG_OFFSETS if max(map(abs, numbers)) < largest]
    for numbers in ([0, 3, 3, 7], [0, 0, 0, 0], [0], *wrong):
        offsets = torch.tensor(numbers, dtype=offsets_dtype)
        results: dict[str, list[Tensor]] = {"fbgemm": [], "torch": []}
        values = torch.randn(9, *shape).to(dtype)
        dense = torch.randn(len(numbers) - 1, 3, *shape).to(dtype)
        for backend, found in results.items():
            leaves = [t.clone().requires_grad_() for t in (values, dense)]
            with monkeypatch.context() as patch:
                if backend == "torch":
                    patch.setattr("hstu_attn.jagged._FBGEMM_DTYPES", ())
                assert jagged_backend(values) == backend
                outputs = [
                    *(jagged_to_dense(leaves[0], offsets, n, 1.5) for n in (0, 2, 5)),
                    *(dense_to_jagged(leaves[1], offsets, total) for total in (0, 7, 9)),
                ]
            seeds = [torch.ones_like(output) for output in outputs]
            found += [*outputs, *torch.autograd.grad(outputs, leaves, seeds)]
        if numbers in WRONG_OFFSETS:
            continue
        for fbgemm, plain in zip(*results.values(), strict=True):
            assert torch.equal(fbgemm, plain), numbers


@pytest.mark.gpu(kernels=False)
@every_function
def test_on_a_gpu_in_a_graph(function, arguments):
    """Captured once, replayed for other lengths; a synchronisation would raise."""
    first, second = (arguments(Batch(lengths, extra=extra)) for lengths, extra in
                     (([5, 9, 3, 0], 2), ([2, 9, 1, 4], 3)))  # fmt: skip
    given = [t.cuda() for t in first]
    leaves = [t.requires_grad_() for t in given if t.is_floating_point() and t.dim() > 1]
    if function is split_sized:
        leaves = leaves[:1]

    def step() -> tuple[Tensor, ...]:
        outputs = function(*given)
        found = differentiable(outputs)
        if not leaves:
            return outputs
        return *outputs, *torch.autograd.grad(found, leaves, [t * 2 for t in found])

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for t, other in zip(given, second, strict=True):
            t.copy_(other)
    graph.replay()
    for output, expected in zip(captured, step(), strict=True):
        torch.testing.assert_close(output, expected)
