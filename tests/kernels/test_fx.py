"""Tests of `torch.fx.symbolic_trace`: each public function is one node of the graph, and the
graph computes what the traced code does.
"""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hstu_attn import (
    DenseBias,
    Mask,
    PagedKV,
    RelativeBias,
    append_paged_kv,
    hstu_attention,
    hstu_attn_qkvpacked_func,
    hstu_attn_varlen_func,
    jagged,
)
from hstu_attn.compat.generative_recommenders import delta_hstu_mha, hstu_mha
from hstu_attn.testing import make_paged_batch, offsets

LENGTHS = [20, 0, 7]
TOTAL = sum(LENGTHS)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return leaf(TOTAL, 2, 16), leaf(TOTAL, 2, 16), leaf(TOTAL, 2, 24)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# A case has the function that must be one node, code that calls it, and the code's arguments.


def own_attention(q, k, v, cu_seqlens, targets, pos_weight):
    return hstu_attention(
        q * 2,
        k,
        v,
        cu_seqlens_q=cu_seqlens,
        max_seqlen_q=20,
        mask=Mask.causal(num_targets=targets),
        bias=RelativeBias(pos_weight),
        alpha=0.3,
    )


def func_attention(q, k, v, cu_seqlens, func, rab):
    mask = Mask.from_func(func, causal=True)
    return hstu_attention(
        q, k, v, cu_seqlens_q=cu_seqlens, max_seqlen_q=20, mask=mask, bias=DenseBias(rab)
    )


def span_attention(q, k, v, cu_seqlens, spans):
    mask = Mask.from_row_spans(spans)
    return hstu_attention(q, k, v, cu_seqlens_q=cu_seqlens, max_seqlen_q=20, mask=mask)


def varlen(q, k, v, cu_seqlens, contexts, targets, rab):
    return hstu_attn_varlen_func(
        *(q, k, v, cu_seqlens, cu_seqlens, None, None, 20, 20, -1, contexts, targets),
        window_size=(-1, 0),
        alpha=0.3,
        rab=rab,
        has_drab=True,
    )


def packed(qkv, cu_seqlens):
    return hstu_attn_qkvpacked_func(qkv, cu_seqlens, cu_seqlens, None, None, 20, 20)


def meta(q, k, v, cu_seqlens, targets):
    return hstu_mha(20, 0.3, q, k, v, cu_seqlens, num_targets=targets, contextual_seq_len=2)


def meta_with_func(q, k, v, cu_seqlens, targets, func):
    return hstu_mha(
        20, 0.3, q, k, v, cu_seqlens, num_targets=targets, attn_func=func, scaling_seqlen=31
    )


def meta_delta(q, k, v, cu_seqlens, targets):
    return delta_hstu_mha(20, 0.3, q[:9], k, v, cu_seqlens, targets)


def paged(q, k, v, cu_seqlens_q, cu_seqlens_k, cache, page_offsets, page_ids, last_page_lens):
    return hstu_attention(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=8,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_k=40,
        mask=Mask.causal(),
        paged_kv=PagedKV(cache, page_offsets, page_ids, last_page_lens),
    )


def paged_arguments() -> tuple[Tensor, ...]:
    batch = make_paged_batch([20, 33], [3, 1], [0, 0], dtype=torch.float32)
    pages = batch.paged_kv
    return (
        *(batch.q, batch.k, batch.v, batch.cu_seqlens_q, batch.cu_seqlens_k),
        *(pages.kv_cache, pages.page_offsets, pages.page_ids, pages.last_page_lens),
    )


def joined(x, x_offsets, y, y_offsets):
    values, joined_offsets = jagged.concat_jagged([(x * 2, x_offsets), (y, y_offsets)])
    return values + joined_offsets[-1]


def split(x, x_offsets, y_offsets):
    first, second = jagged.split_jagged(x, [x_offsets, y_offsets], [TOTAL, TOTAL])
    return first - second


def embedded(x, x_offsets, positions, times, timestamps, targets):
    return jagged.add_position_time_embeddings(
        x, x_offsets, positions, time_table=times, timestamps=timestamps, num_targets=targets
    )


CASES: dict[
    str, tuple[Callable[..., Any], Callable[..., Any], Callable[[], tuple[Tensor, ...]]]
] = {
    "own": (
        hstu_attention,
        own_attention,
        lambda: (*qkv(), offsets(LENGTHS), ints([3, 0, 2]), leaf(2, 9)),
    ),
    "own-func": (
        hstu_attention,
        func_attention,
        lambda: (
            *(*qkv(), offsets(LENGTHS)),
            *(torch.randint(0, 20, (1, 3, TOTAL), dtype=torch.int32), leaf(3, 2, 20, 20)),
        ),
    ),
    "own-spans": (
        hstu_attention,
        span_attention,
        lambda: (*qkv(), offsets(LENGTHS), torch.randint(0, 20, (TOTAL, 4), dtype=torch.int32)),
    ),
    "own-paged": (hstu_attention, paged, paged_arguments),
    "varlen": (
        hstu_attn_varlen_func,
        varlen,
        lambda: (
            *(*qkv(), offsets(LENGTHS)),
            *(ints([2, 0, 1]), ints([3, 0, 2]), leaf(3, 1, 20, 20)),
        ),
    ),
    "packed": (
        hstu_attn_qkvpacked_func,
        packed,
        lambda: (leaf(TOTAL, 3, 2, 16), offsets(LENGTHS)),
    ),
    "meta": (hstu_mha, meta, lambda: (*qkv(), offsets(LENGTHS), ints([3, 0, 2]))),
    "meta-func": (
        hstu_mha,
        meta_with_func,
        lambda: (
            *(*qkv(), offsets(LENGTHS), ints([3, 0, 2])),
            torch.randint(0, 20, (1, 3, TOTAL), dtype=torch.int32),
        ),
    ),
    "meta-delta": (
        delta_hstu_mha,
        meta_delta,
        lambda: (*qkv(), offsets([12, 5, 10]), ints([3, 0, 2])),
    ),
    "ids": (
        jagged.jagged_ids,
        lambda x, x_offsets: jagged.jagged_ids(x_offsets, x.shape[0]),
        lambda: (leaf(TOTAL), offsets(LENGTHS)),
    ),
    "positions": (
        jagged.jagged_positions,
        lambda x, x_offsets: jagged.jagged_positions(x_offsets, x.shape[0]),
        lambda: (leaf(TOTAL), offsets(LENGTHS)),
    ),
    "concat": (
        jagged.concat_jagged,
        joined,
        lambda: (leaf(TOTAL, 3), offsets(LENGTHS), leaf(6, 3), offsets([1, 3, 2])),
    ),
    "split": (
        jagged.split_jagged,
        split,
        lambda: (leaf(TOTAL, 3), offsets([15, 0, 4]), offsets([5, 0, 3])),
    ),
    "interleave": (
        jagged.interleave_jagged,
        lambda x, y, x_offsets: jagged.interleave_jagged(x, y, x_offsets)[0],
        lambda: (leaf(TOTAL, 3), leaf(TOTAL, 3), offsets(LENGTHS)),
    ),
    "deinterleave": (
        jagged.deinterleave_jagged,
        lambda x, x_offsets: jagged.deinterleave_jagged(x, x_offsets)[1],
        lambda: (leaf(12, 3), offsets([4, 0, 8])),
    ),
    "to-jagged": (
        jagged.dense_to_jagged,
        lambda x, x_offsets: jagged.dense_to_jagged(x, x_offsets, TOTAL),
        lambda: (leaf(3, 20, 4), offsets(LENGTHS)),
    ),
    "to-dense": (
        jagged.jagged_to_dense,
        lambda x, x_offsets: jagged.jagged_to_dense(x, x_offsets, 20),
        lambda: (leaf(TOTAL, 4), offsets(LENGTHS)),
    ),
    "embeddings": (
        jagged.add_position_time_embeddings,
        embedded,
        lambda: (
            *(leaf(TOTAL, 4), offsets(LENGTHS), leaf(30, 4), leaf(10, 4)),
            *(torch.randint(0, 100000, (TOTAL,)), ints([3, 0, 2])),
        ),
    ),
}

# A graph may also have objects among the arguments, and what the code itself computes.
BESIDE = {Mask, DenseBias, RelativeBias, PagedKV}
BESIDE |= {operator.getitem, operator.mul, operator.add, operator.sub, getattr}


@pytest.mark.parametrize("name", CASES)
def test_one_node(name):
    function, code, make_arguments = CASES[name]
    traced = torch.fx.symbolic_trace(code)
    targets = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert targets.count(function) == 1
    assert set(targets) <= {function, *BESIDE}

    arguments = make_arguments()
    expected = code(*arguments)
    leaves = [x for x in arguments if x.requires_grad]
    dout = torch.randn(expected.shape, dtype=torch.float64)
    for graph in (traced, copy.deepcopy(traced), pickle.loads(pickle.dumps(traced))):
        out = graph(*arguments)
        assert torch.equal(out, expected)
        if expected.requires_grad:
            wanted = torch.autograd.grad(expected, leaves, dout, retain_graph=True)
            gradients = torch.autograd.grad(out, leaves, dout)
            assert all(torch.equal(*pair) for pair in zip(gradients, wanted, strict=True))


def test_errors_come_when_the_graph_runs():
    """The graph's call, not the trace, checks the value that a proxy stands for."""
    traced = torch.fx.symbolic_trace(own_attention)
    *others, _, table = CASES["own"][2]()
    with pytest.raises(ValueError, match=r"^num_targets: expected int32 or int64, got float32"):
        traced(*others, torch.ones(3), table)
    traced = torch.fx.symbolic_trace(func_attention)
    *others, _, rab = CASES["own-func"][2]()
    with pytest.raises(ValueError, match=r"^func: expected .*an odd n"):
        traced(*others, torch.zeros(1, 2, TOTAL, dtype=torch.int32), rab)
    traced = torch.fx.symbolic_trace(paged)
    arguments = list(paged_arguments())
    arguments[5] = arguments[5][0]
    with pytest.raises(ValueError, match=r"^kv_cache: expected shape"):
        traced(*arguments)


class Layer(nn.Module):
    """A layer with tables as parameters and pages as buffers; it reads the appended rows."""

    def __init__(self, cache: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2, 9))
        self.register_buffer("cache", cache)

    def forward(self, q, k, v, cu_seqlens_q, cu_seqlens_k, page_offsets, page_ids, last_page_lens):
        pages = PagedKV(self.cache, page_offsets, page_ids, last_page_lens)
        append_paged_kv(k, v, pages, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
        return hstu_attention(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=8,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_k=40,
            mask=Mask.causal(),
            bias=RelativeBias(self.table),
            paged_kv=pages,
        )


def test_appending_stays_in_the_graph():
    """The append's result is unused, but dead code elimination keeps the append."""
    q, k, v, cu_seqlens_q, cu_seqlens_k, cache, *tables = paged_arguments()
    k, v = torch.randn_like(k), torch.randn_like(v)
    layer = Layer(cache.clone())
    traced = torch.fx.symbolic_trace(layer)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    targets = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert targets.count(append_paged_kv) == 1
    assert targets.count(hstu_attention) == 1
    traced = copy.deepcopy(traced)
    with torch.no_grad():
        expected = layer(q, k, v, cu_seqlens_q, cu_seqlens_k, *tables)
        out = traced(q, k, v, cu_seqlens_q, cu_seqlens_k, *tables)
    assert torch.equal(out, expected)
    assert torch.equal(traced.cache.nan_to_num(7), layer.cache.nan_to_num(7))
    assert not torch.equal(layer.cache.nan_to_num(7), cache.nan_to_num(7))


@pytest.mark.slow
def test_a_trace_of_a_compiled_call():
    """A trace may be compiled as a whole."""
    torch._dynamo.reset()
    _, code, make_arguments = CASES["varlen"]
    traced = torch.fx.symbolic_trace(code)
    arguments = make_arguments()
    compiled = torch.compile(traced, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), code(*arguments))
