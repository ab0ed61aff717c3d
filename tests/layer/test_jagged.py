"""Tests of properties of jagged operations: no copy to the host, no graph break, zeros past the
last offset, and no read out of bounds. Tests of the numbers are in test_jagged_numbers.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

from hstu_attn.jagged import (
    JaggedParts,
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
from tests.helpers.jagged_rows import WIDTH, rows_of, to_offsets

Arguments = tuple[Any, ...]


# ---------------------------------------------------------------------------------------------
# Every function, compiled, exported and differentiated
# ---------------------------------------------------------------------------------------------


class Batch:
    """Arguments for given lengths, with rows past the last offset; some only give a size."""

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


def several(a: Tensor, b: Tensor, a_offsets: Tensor, b_offsets: Tensor) -> tuple[Tensor, ...]:
    parts = JaggedParts([a_offsets, b_offsets], [a.shape[0], b.shape[0]])
    first, second = parts.concat([a, b]), parts.concat([a[:, 0] * 2, b[:, 0]])
    return first, second, parts.part(first * second[:, None], 1), parts.offsets


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
    "several": (several, lambda b: (b.values, b.half, b.offsets, b.shorter)),
    "interleave": (interleave_jagged, lambda b: (b.values, b.others, b.offsets)),
    "deinterleave": (deinterleave_jagged, lambda b: (b.pairs, 2 * b.offsets)),
    "dense-to-jagged": (packed, lambda b: (b.dense, b.offsets, b.rows)),
    "jagged-to-dense": (padded, lambda b: (b.values, b.offsets, b.room)),
    "places": (places, lambda b: (b.offsets, b.rows)),
    "embeddings": (embedded, lambda b: (b.values, *b.tables, b.offsets, b.times, b.targets)),
}
# Compilation uses the first; equal sizes would be compiled as the same symbol.
LENGTHS = ([5, 9, 3, 0, 13, 6], [20, 9], [1, 2, 3, 21, 0, 14, 4])

every_function = pytest.mark.parametrize(("function", "arguments"), CASES.values(), ids=CASES)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def differentiable(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [output for output in outputs if output.is_floating_point()]


@pytest.mark.slow
@every_function
@pytest.mark.usefixtures("fresh_compiler")
def test_compile_with_dynamic_sizes(function, arguments):
    """One graph is compiled without breaks or recompilation, and gives the same numbers."""
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


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_compile_with_inductor():
    """Inductor compiles the construction of a layer's rows from parts, forward and backward."""

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


@pytest.mark.slow
@every_function
def test_export(function, arguments):
    """An exported program with dynamic sizes computes other batches."""

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
    """Tensors without data have no numbers to copy, and all sizes are known."""
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
    """NaN past the last offset changes neither results nor gradients, and has no gradient."""
    lengths = [3, 0, 4]
    given = arguments(Batch(lengths))
    poisoned = list(given)
    ends = [t[-1] for t in given if t.dtype == torch.int64 and t.shape == (len(lengths) + 1,)]
    end = int(sum(ends)) if function in (split, split_sized) else int(ends[0])
    for n, t in enumerate(given[: 2 if function in (concat, several, interleave_jagged) else 1]):
        if t.is_floating_point() and function is not packed:
            poisoned[n] = t.clone()
            poisoned[n][int(ends[n]) if function in (concat, several) else end :] = math.nan
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
    """Without sequences, or with only empty ones, gradients can still be computed."""
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
    """Wrong offsets stay in bounds; on a CPU an index out of bounds raises."""
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
        (r"parts_offsets\[1\]", lambda: JaggedParts([O, O.to("meta")], [6, 6])),
        ("parts", lambda: JaggedParts([O, O], [6, 6]).concat([X])),
        ("parts", lambda: JaggedParts([O, O], [6, 6]).concat([X, X[:5]])),
        (r"parts\[1\]", lambda: JaggedParts([O, O], [6, 6]).concat([X, X.double()])),
        ("values", lambda: JaggedParts([O], [6]).part(torch.tensor(1.0), 0)),
        (r"parts_offsets\[0\]", lambda: JaggedParts([O], [6]).part(X.to("meta"), 0)),
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
    """A graph is captured once and replayed for other lengths; a synchronization would raise."""
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
