"""Tests of `torch.compile`, `torch.export` and AOTInductor with dynamic sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim

from hstu_attn import (
    DenseBias,
    Mask,
    RelativeBias,
    hstu_attention,
    hstu_attn_qkvpacked_func,
    hstu_attn_varlen_func,
)
from hstu_attn.bias import default_bucket_thresholds
from hstu_attn.compat.generative_recommenders import delta_hstu_mha, hstu_mha
from hstu_attn.testing import offsets

HEADS, DIM = 2, 16
ALPHA = 0.25
# Totals, batch sizes and maximum lengths all differ; compilation uses the first. Its sizes differ
# from the 4 of a row span, because the compiler would assume equal sizes to be the same.
BATCHES = ([5, 70, 3, 11, 6], [40, 9], [1, 2, 3, 20, 88, 4])

Arguments = tuple[Any, ...]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def qkv(lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    total = sum(lengths)
    return leaf(total, HEADS, DIM), leaf(total, HEADS, DIM), leaf(total, HEADS, DIM)


# A case has a function to compile, and makes its arguments for given lengths.


def composed(q, k, v, cu_seqlens, longest, contexts, targets):
    mask = Mask.causal(num_contexts=contexts, num_targets=targets, target_group_size=2)
    return hstu_attention(
        q, k, v, cu_seqlens_q=cu_seqlens, max_seqlen_q=longest, mask=mask, alpha=ALPHA
    )


def composed_arguments(lengths: list[int]) -> Arguments:
    targets = [length // 2 for length in lengths]
    contexts = [min(2, length - length // 2) for length in lengths]
    return (*qkv(lengths), offsets(lengths), max(lengths), ints(contexts), ints(targets))


def with_objects(q, k, v, cu_seqlens, longest, mask, bias):
    return hstu_attention(
        q, k, v, cu_seqlens_q=cu_seqlens, max_seqlen_q=longest, mask=mask, bias=bias, alpha=ALPHA
    )


def objects_arguments(lengths: list[int]) -> Arguments:
    bias = RelativeBias(leaf(HEADS, 21), leaf(1, 30), torch.randint(0, 10**6, (sum(lengths),)))
    return (*qkv(lengths), offsets(lengths), max(lengths), Mask.local(9), bias)


def dense_arguments(lengths: list[int]) -> Arguments:
    bias = DenseBias(leaf(len(lengths), 1, max(lengths), max(lengths)))
    return (*qkv(lengths), offsets(lengths), max(lengths), Mask.causal(), bias)


def relative(q, k, v, cu_seqlens, longest, pos_weight, ts_weight, timestamps):
    bias = RelativeBias(pos_weight, ts_weight, timestamps)
    return hstu_attention(
        q, k, v, cu_seqlens_q=cu_seqlens, max_seqlen_q=longest, mask=Mask.causal(), bias=bias
    )


def relative_arguments(lengths: list[int]) -> Arguments:
    times = torch.randint(0, 10**6, (sum(lengths),))
    return (*qkv(lengths), offsets(lengths), max(lengths), leaf(HEADS, 21), leaf(1, 30), times)


def spans(q, k, v, cu_seqlens, longest, row_spans, attn_scale):
    mask = Mask.from_row_spans(row_spans)
    return hstu_attention(
        q, k, v, cu_seqlens_q=cu_seqlens, max_seqlen_q=longest, mask=mask, attn_scale=attn_scale
    )


def spans_arguments(lengths: list[int]) -> Arguments:
    total = sum(lengths)
    row_spans = torch.randint(0, max(lengths), (total, 4), dtype=torch.int32)
    return (*qkv(lengths), offsets(lengths), max(lengths), row_spans, torch.rand(total))


def semi_local(q, k, v, cu_seqlens, longest, num_contexts, num_targets):
    mask = Mask.semi_local(
        9, 3, cu_seqlens, q.shape[0], num_contexts=num_contexts, num_targets=num_targets
    )
    return hstu_attention(q, k, v, cu_seqlens_q=cu_seqlens, max_seqlen_q=longest, mask=mask)


def fbgemm(q, k, v, cu_seqlens, longest, rab):
    return hstu_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        None,
        None,
        longest,
        longest,
        -1,
        None,
        None,
        1,
        (-1, 0),
        ALPHA,
        rab,
        True,
    )


def fbgemm_arguments(lengths: list[int]) -> Arguments:
    longest = max(lengths)
    rab = leaf(len(lengths), HEADS, longest, longest)
    return (*qkv(lengths), offsets(lengths), longest, rab)


def packed(packed_qkv, cu_seqlens, longest):
    return hstu_attn_qkvpacked_func(
        packed_qkv, cu_seqlens, cu_seqlens, None, None, longest, longest, window_size=(-1, 0)
    )


def packed_arguments(lengths: list[int]) -> Arguments:
    return leaf(sum(lengths), 3, HEADS, DIM), offsets(lengths), max(lengths)


def meta(q, k, v, seq_offsets, longest, targets):
    return hstu_mha(
        longest,
        ALPHA,
        q,
        k,
        v,
        seq_offsets,
        num_targets=targets,
        max_attn_len=20,
        contextual_seq_len=2,
        min_full_attn_seq_len=5,
    )


def meta_arguments(lengths: list[int]) -> Arguments:
    targets = ints([length // 3 for length in lengths]).long()
    return (*qkv(lengths), offsets(lengths).long(), max(lengths), targets)


CASES: dict[str, tuple[Callable[..., Tensor], Callable[[list[int]], Arguments]]] = {
    "mask-made-inside": (composed, composed_arguments),
    "mask-and-bias-passed": (with_objects, objects_arguments),
    "rab-passed": (with_objects, dense_arguments),
    "tables": (relative, relative_arguments),
    "row-spans": (spans, spans_arguments),
    "semi-local": (semi_local, composed_arguments),
    "fbgemm": (fbgemm, fbgemm_arguments),
    "packed": (packed, packed_arguments),
    "meta": (meta, meta_arguments),
}


def leaves_of(arguments: Arguments) -> list[Tensor]:
    found = []
    for value in arguments:
        values = vars(value).values() if isinstance(value, (RelativeBias, DenseBias)) else [value]
        found += [t for t in values if isinstance(t, Tensor) and t.requires_grad]
    return found


def assert_same(compiled: Callable[..., Tensor], function: Any, arguments: Arguments) -> None:
    """Asserts that outputs and gradients have the same bits, since the same kernels run."""
    leaves = leaves_of(arguments)
    out, expected = compiled(*arguments), function(*arguments)
    assert torch.equal(out, expected)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, dout)
    for n, gradient in enumerate(torch.autograd.grad(expected, leaves, dout)):
        assert torch.equal(gradients[n], gradient), f"gradient {n}"
        assert gradient.any()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_compile_with_dynamic_sizes(name):
    """One graph is compiled, without breaks, and is not recompiled for other sizes."""
    function, arguments = CASES[name]
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    assert_same(compiled, function, arguments(BATCHES[0]))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in BATCHES[1:]:
            assert_same(compiled, function, arguments(lengths))


@pytest.mark.slow
def test_graphs_hold_the_default_thresholds():
    """A graph that held a list would copy it from the host in each call."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    arguments = relative_arguments([5, 3])
    with torch.no_grad():
        found = torch.compile(relative, fullgraph=True, backend=backend)(*arguments)
        assert torch.equal(found, relative(*arguments))
    (graph,) = graphs
    assert torch.tensor not in [node.target for node in graph.graph.nodes]
    held = [*graph.buffers()]
    wanted = torch.tensor(default_bucket_thresholds())
    assert [torch.equal(x, wanted) for x in held] == [True]

    class Module(torch.nn.Module):
        def forward(self, *arguments: Any) -> Tensor:
            return relative(*arguments)

    with torch.no_grad():
        program = torch.export.export(Module(), arguments)
    assert [torch.equal(x, wanted) for x in program.constants.values()] == [True]
    copies = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten._to_copy.default)
    assert not {node.target for node in program.graph.nodes} & {*copies}


@pytest.mark.slow
def test_compile_without_being_told_that_sizes_are_dynamic():
    """The second batch makes sizes dynamic; later batches are not compiled again."""
    compiled = torch.compile(composed, fullgraph=True, backend="aot_eager")
    for lengths in BATCHES[:2]:
        assert_same(compiled, composed, composed_arguments(lengths))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same(compiled, composed, composed_arguments(BATCHES[2]))


class Block(torch.nn.Module):
    """A layer around the operator, as a user compiles it."""

    def __init__(self) -> None:
        super().__init__()
        self.uvqk = torch.nn.Linear(32, 4 * HEADS * DIM)
        self.out = torch.nn.Linear(HEADS * DIM, 32)
        self.pos_weight = torch.nn.Parameter(torch.randn(1, 31))

    def forward(self, x: Tensor, cu_seqlens: Tensor, num_targets: Tensor, longest: int) -> Tensor:
        uvqk = torch.nn.functional.silu(self.uvqk(x)).unflatten(1, (4, HEADS, DIM))
        u, v, q, k = uvqk.unbind(1)
        attended = hstu_attention(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens,
            max_seqlen_q=longest,
            mask=Mask.causal(num_targets=num_targets),
            bias=RelativeBias(self.pos_weight),
            alpha=DIM**-0.5,
        )
        return x + self.out((attended * u).flatten(1))


def block_arguments(lengths: list[int]) -> Arguments:
    targets = ints([length // 4 for length in lengths])
    return torch.randn(sum(lengths), 32), offsets(lengths), targets, max(lengths)


@pytest.mark.slow
def test_compile_with_inductor():
    """Inductor's code around the operator is correct for three batches of other sizes."""
    block = Block()
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    parameters = list(block.parameters())
    for n, lengths in enumerate(BATCHES):
        arguments = block_arguments(lengths)
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            out = compiled(*arguments)
        expected = block(*arguments)
        torch.testing.assert_close(out, expected)
        gradients = torch.autograd.grad(out.square().sum(), parameters)
        for gradient, wanted in zip(
            gradients, torch.autograd.grad(expected.square().sum(), parameters), strict=True
        ):
            torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-3)


# ---------------------------------------------------------------------------------------------
# Export
# ---------------------------------------------------------------------------------------------


class Fixed(torch.nn.Module):
    """A block whose maximum length is a constant of the model, as in a server."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, cu_seqlens: Tensor, num_targets: Tensor) -> Tensor:
        return self.block(x, cu_seqlens, num_targets, 128)


def dynamic_shapes() -> tuple[Any, ...]:
    batch, total = Dim("batch", min=1, max=4096), Dim("total", min=2, max=2**20)
    return {0: total}, {0: batch + 1}, {0: batch}


def exported() -> tuple[Fixed, torch.export.ExportedProgram]:
    model = Fixed().eval()
    with torch.no_grad():
        program = torch.export.export(
            model, block_arguments(BATCHES[0])[:3], dynamic_shapes=dynamic_shapes()
        )
    return model, program


def test_export_with_dynamic_shapes():
    model, program = exported()
    called = [n for n in program.graph.nodes if "hstu_attn" in str(n.target)]
    assert len(called) == 1
    for lengths in BATCHES:
        arguments = block_arguments(lengths)[:3]
        with torch.no_grad():
            assert torch.equal(program.module()(*arguments), model(*arguments))


class Sized(torch.nn.Module):
    """A block whose maximum length is the size of a tensor, which export can vary."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, cu_seqlens: Tensor, num_targets: Tensor, room: Tensor) -> Tensor:
        return self.block(x, cu_seqlens, num_targets, room.shape[0])


def test_export_with_a_dynamic_maximum_length():
    def arguments(lengths: list[int]) -> Arguments:
        return (*block_arguments(lengths)[:3], torch.empty(max(lengths)))

    model = Sized().eval()
    shapes = (*dynamic_shapes(), {0: Dim("longest", min=2, max=4096)})
    with torch.no_grad():
        program = torch.export.export(model, arguments(BATCHES[0]), dynamic_shapes=shapes)
        for lengths in BATCHES:
            values = arguments(lengths)
            assert torch.equal(program.module()(*values), model(*values))


def test_export_survives_saving(tmp_path):
    model, program = exported()
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    arguments = block_arguments(BATCHES[1])[:3]
    with torch.no_grad():
        assert torch.equal(loaded.module()(*arguments), model(*arguments))


@pytest.mark.slow
def test_ahead_of_time_package(tmp_path):
    model, program = exported()
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "model.pt2")
    )
    packaged = torch._inductor.aoti_load_package(path)
    for lengths in BATCHES:
        arguments = block_arguments(lengths)[:3]
        with torch.no_grad():
            torch.testing.assert_close(packaged(*arguments), model(*arguments))


@pytest.mark.slow
def test_delta_compiles():
    def call(delta_q: Tensor, k: Tensor, v: Tensor, seq_offsets: Tensor, longest: int) -> Tensor:
        return delta_hstu_mha(longest, ALPHA, delta_q, k, v, seq_offsets, max_attn_len=7)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for n, lengths in enumerate(([30, 40, 9], [12, 13], [8, 80, 9, 20, 33])):
        delta = 3 + n
        _, k, v = qkv(lengths)
        arguments = (leaf(delta * len(lengths), HEADS, DIM), k, v, offsets(lengths), max(lengths))
        with torch._dynamo.config.patch(error_on_recompile=n > 0):
            assert_same(compiled, call, arguments)
