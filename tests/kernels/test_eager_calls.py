"""Tests of eager calls: torch's modes, tracers and threads, and objects that calls keep alive."""

from __future__ import annotations

import contextlib
import copy
import gc
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from hstu_attn import hstu_attention
from hstu_attn.testing import Batch, make_batch


def small(**changes: Any) -> Batch:
    return make_batch([9, 0, 70], [5, 0, 70], dim=16, dim_v=24, mask="causal", **changes)


def call(batch: Batch, **changes: Any) -> Tensor:
    return hstu_attention(batch.q, batch.k, batch.v, **{**batch.options(), **changes})


# ---------------------------------------------------------------------------------------------
# Modes, subclasses and tracers
# ---------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operator():
    batch = small()
    with Recorder() as recorder:
        out = call(batch)
    assert "hstu_attn.hstu_varlen_fwd.default" in recorder.seen
    assert torch.equal(out, call(batch))


def test_a_function_mode_sees_the_operator():
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            del types
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        call(small())
    assert torch.ops.hstu_attn.hstu_varlen_fwd.default in seen


def test_a_tensor_subclass_sees_the_operator():
    seen = []

    class Loud(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs)

    batch = small()
    changed = copy.copy(batch)
    changed.cu_seqlens_k = batch.cu_seqlens_k.as_subclass(Loud)
    out = call(changed)
    assert type(out) is Loud
    assert torch.ops.hstu_attn.hstu_varlen_fwd.default in seen
    assert torch.equal(out.as_subclass(Tensor), call(batch))


def test_fake_tensors():
    batch = small()
    with FakeTensorMode(allow_non_fake_inputs=True):
        inside = call(batch)
    assert type(inside).__name__ == "FakeTensor"
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(t) for t in (batch.q, batch.k, batch.v)]
    outside = hstu_attention(*fakes, **batch.options())
    assert inside.shape == outside.shape == (75, 2, 24)


def test_traced_graphs_hold_the_operator():
    batch = small()

    def function(q: Tensor) -> Tensor:
        return hstu_attention(q, batch.k, batch.v, **batch.options())

    graph = make_fx(function)(batch.q)
    assert any("hstu_varlen_fwd" in str(node.target) for node in graph.graph.nodes)
    assert torch.equal(graph(batch.q), function(batch.q))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_jit_traces_hold_the_operator():
    batch = small()

    def function(q: Tensor) -> Tensor:
        return hstu_attention(q, batch.k, batch.v, **batch.options())

    traced = torch.jit.trace(function, (batch.q,), check_trace=False)
    assert "hstu_attn::hstu_varlen_fwd" in str(traced.graph)
    assert torch.equal(traced(batch.q), function(batch.q))


def test_profiles_show_the_operator():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call(small())
    assert "hstu_attn::hstu_varlen_fwd" in {event.key for event in profile.key_averages()}


def test_lazily_negated_tensors():
    batch = small()
    scale = torch.rand(75)
    out = call(batch, attn_scale=torch._neg_view(scale))
    assert torch.equal(out, -call(batch, attn_scale=scale))


def test_a_sparse_tensor_is_refused():
    batch = small()
    with pytest.raises(NotImplementedError, match="Sparse"):
        hstu_attention(batch.q, batch.k.to_sparse(), batch.v, **batch.options())


# ---------------------------------------------------------------------------------------------
# Outputs, threads and references
# ---------------------------------------------------------------------------------------------


def test_parameters_without_gradients():
    batch = small(attn_scale=torch.rand(75), alpha=2)
    expected = call(batch)
    parameters = {n: torch.nn.Parameter(t) for n, t in batch.differentiable().items()}
    with torch.no_grad():
        out = call(batch.with_tensors(parameters))
    assert not out.requires_grad
    assert torch.equal(out, expected)


def test_outputs_are_new_tensors_of_the_mode():
    batch = small()
    versions = [t._version for t in (batch.q, batch.k, batch.v)]
    out = call(batch)
    assert out._version == 0
    assert versions == [t._version for t in (batch.q, batch.k, batch.v)]
    assert not out.is_inference()
    with torch.inference_mode():
        inside = call(batch)
        clones = [t.clone() for t in (batch.q, batch.k, batch.v)]
        of_clones = hstu_attention(*clones, **batch.options())
    assert inside.is_inference()
    assert torch.equal(inside, out)
    assert torch.equal(of_clones, out)


def test_many_threads_at_once():
    batches = [small() for _ in range(8)]
    expected = [call(batch) for batch in batches]
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(50):
            if not torch.equal(call(batches[n]), expected[n]):
                wrong.append(n)
            with contextlib.suppress(ValueError):
                call(batches[n], sm_margin=-1)
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.slow
def test_no_reference_is_kept():
    batch = small(bias="position-time")
    bad = {**batch.options(), "seqused_k": torch.zeros(75)}
    objects = [batch.q, batch.k, batch.v, batch.cu_seqlens_q, batch.cu_seqlens_k]
    objects += [batch.bias.pos_weight, batch.bias.timestamps]

    def calls(count: int) -> None:
        for _ in range(count):
            call(batch)
            with contextlib.suppress(ValueError):
                hstu_attention(batch.q, batch.k, batch.v, **bad)

    calls(3)
    gc.collect()
    before = [sys.getrefcount(item) for item in objects], len(gc.get_objects())
    calls(200)
    gc.collect()
    after = [sys.getrefcount(item) for item in objects], len(gc.get_objects())
    assert before[0] == after[0]
    assert after[1] - before[1] < 100
