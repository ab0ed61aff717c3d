"""Eager calls past the dispatcher: the operator's numbers and errors, and where they stand back."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hstu_attn
from hstu_attn import (
    Mask,
    fast_call,
    hstu_attention,
    hstu_attn_qkvpacked_func,
    ops,
)
from hstu_attn.testing import (
    BIAS_NAMES,
    MASK_NAMES,
    Batch,
    make_batch,
    make_paged_batch,
    offsets,
    run,
)
from tests.kernels import test_errors

HAS_API = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
pytestmark = pytest.mark.skipif(not HAS_API, reason="this torch has no DLPack exchange API")


class Counter:
    """Fast calls that were tried and that were made."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.tried = self.made = 0

    def __call__(self, *arguments: Any) -> Any:
        self.tried += 1
        out = self.function(*arguments)
        self.made += out is not NotImplemented
        return out


@pytest.fixture
def counter(monkeypatch) -> Counter:
    counter = Counter(fast_call.forward)
    monkeypatch.setattr(fast_call, "forward", counter)
    return counter


@contextlib.contextmanager
def operator_alone() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_call, "forward", fast_call.leave_to_operator)
        yield


def call(batch: Batch, **changes: Any) -> Tensor:
    return hstu_attention(batch.q, batch.k, batch.v, **{**batch.options(), **changes})


def small(**changes: Any) -> Batch:
    return make_batch([9, 0, 70], [5, 0, 70], dim=16, dim_v=24, mask="causal", **changes)


def assert_fast(counter: Counter, batch: Batch) -> None:
    """By a fast call, with and without gradients, what the operator gives."""
    before = counter.made
    out = call(batch)
    assert counter.made == before + 1
    with operator_alone():
        expected = call(batch)
    assert torch.equal(out, expected)
    assert (out.dtype, out.stride()) == (expected.dtype, expected.stride())


# ---------------------------------------------------------------------------------------------
# The same results
# ---------------------------------------------------------------------------------------------


def test_the_build_has_fast_calls():
    assert fast_call.forward is not fast_call.leave_to_operator


@pytest.mark.parametrize("mask", MASK_NAMES)
def test_masks(counter, device, mask):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    batch = make_batch([9, 0, 70], [5, 0, 70], dim=32, mask=mask, device=device, dtype=dtype)
    assert_fast(counter, batch)


@pytest.mark.parametrize("bias", BIAS_NAMES)
def test_biases(counter, device, bias):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    assert_fast(counter, small(bias=bias, device=device, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(counter, dtype):
    assert_fast(counter, small(dtype=dtype))


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_pages(counter, device, fp8):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    batch = make_paged_batch([20, 3], [4, 1], [2, 0], dim=16, device=device, dtype=dtype, fp8=fp8)
    assert_fast(counter, batch)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]], ids=["none", "one", "two"])
def test_empty_batches(counter, device, lengths):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    assert_fast(counter, make_batch(lengths, dim=16, device=device, dtype=dtype))


def test_rows_of_no_sequence(counter, device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q = torch.randn(5, 2, 16, dtype=dtype, device=device)
    cu_seqlens = offsets([], device)
    assert_fast(counter, Batch(q, q, q, cu_seqlens, cu_seqlens, 0, 0))


@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "not-aligned"])
def test_views(counter, device, shift):
    """Slices of one tensor; where kernels cannot take one as it lies, a copy of it."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    lengths = [5, 40]
    memory = torch.randn(45, 2, 3 * 16 + 8, dtype=dtype, device=device)[..., shift:]
    q, k, v = memory[..., :48].split(16, dim=2)
    cu_seqlens = offsets(lengths, device)
    assert_fast(counter, Batch(q, k, v, cu_seqlens, cu_seqlens, 40, 40, Mask.causal()))


def test_parameters_and_scales(counter):
    batch = small(attn_scale=torch.rand(75), alpha=2)
    batch = batch.with_tensors(
        {n: torch.nn.Parameter(t) for n, t in batch.differentiable().items()}
    )
    with torch.no_grad():
        out = call(batch)
    assert counter.made == 1
    assert not out.requires_grad
    with operator_alone(), torch.no_grad():
        assert torch.equal(out, call(batch))


@pytest.mark.parametrize("bias", [None, "rab", "position-time"])
def test_gradients(counter, bias):
    batch = small(bias=bias)
    dout = torch.randn(75, 2, 24)
    found = run(hstu_attention, batch, dout)
    assert counter.made == 1
    with operator_alone():
        expected = run(hstu_attention, batch, dout)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_packed_gradients(counter):
    cu_seqlens = offsets([3, 9])
    leaf = torch.randn(12, 3, 2, 16, requires_grad=True)

    def gradient() -> Tensor:
        out = hstu_attn_qkvpacked_func(leaf, cu_seqlens, cu_seqlens, None, None, 9, 9)
        return torch.autograd.grad(out.square().sum(), leaf)[0]

    found = gradient()
    assert counter.made == 1
    with operator_alone():
        assert torch.equal(found, gradient())


def test_outputs_are_new_tensors_of_the_mode(counter):
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
    assert counter.made == 3
    assert inside.is_inference()
    assert torch.equal(inside, out)
    assert torch.equal(of_clones, out)


def test_many_threads_at_once(counter):
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
    assert counter.made >= 8 * 50


# ---------------------------------------------------------------------------------------------
# The same errors
# ---------------------------------------------------------------------------------------------


def error_of(function: Callable[[], Any]) -> tuple[type, str]:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function()
    return caught.type, str(caught.value)


@pytest.mark.parametrize("records", [False, True], ids=["plain", "recording"])
@pytest.mark.parametrize("case", test_errors.CASES)
def test_errors_are_those_of_the_operator(case, records):
    _, changes = test_errors.CASES[case]
    arguments = {**test_errors.good(), **changes}
    if records and isinstance(arguments["v"], Tensor) and arguments["v"].is_floating_point():
        arguments["v"] = arguments["v"].detach().clone().requires_grad_()
    found = error_of(lambda: hstu_attention(**arguments))
    with operator_alone():
        assert found == error_of(lambda: hstu_attention(**arguments))


@pytest.mark.parametrize(
    "changes",
    [{"alpha": "1"}, {"sm_margin": -1}, {"k": test_errors.FP32[:-1]}, {"max_seqlen_q": 2**70}],
    ids=["left-to-operator", "option", "shape", "beyond-int64"],
)
def test_who_finds_an_error(monkeypatch, changes):
    """The fast call where it knows the argument, else the operator."""
    raised = []

    def watched(*arguments: Any) -> Any:
        try:
            return forward(*arguments)
        except ValueError as error:
            raised.append(str(error))
            raise

    forward = fast_call.forward
    monkeypatch.setattr(fast_call, "forward", watched)
    kind, text = error_of(lambda: hstu_attention(**{**test_errors.good(), **changes}))
    if "sm_margin" in changes or "k" in changes:
        assert raised == [text]
    else:
        assert not raised
    assert kind in (ValueError, RuntimeError, OverflowError, TypeError)


# ---------------------------------------------------------------------------------------------
# What is left to the operator
# ---------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def assert_left(counter: Counter, batch: Batch) -> None:
    made = counter.made
    out = call(batch)
    assert counter.tried > made
    assert counter.made == made
    with operator_alone():
        assert torch.equal(out, call(batch))


def test_a_dispatch_mode_sees_the_operator(counter):
    with Recorder() as recorder:
        assert_left(counter, small())
    assert "hstu_attn.hstu_varlen_fwd.default" in recorder.seen


def test_a_function_mode_sees_the_operator(counter):
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            del types
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        assert_left(counter, small())
    assert torch.ops.hstu_attn.hstu_varlen_fwd.default in seen


def test_a_subclass_goes_to_the_operator(counter):
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
    assert counter.made == 0
    assert type(out) is Loud
    assert torch.ops.hstu_attn.hstu_varlen_fwd.default in seen
    assert torch.equal(out.as_subclass(Tensor), call(batch))


def test_fake_tensors(counter):
    from torch._subclasses.fake_tensor import FakeTensorMode

    batch = small()
    with FakeTensorMode(allow_non_fake_inputs=True):
        inside = call(batch)
    assert type(inside).__name__ == "FakeTensor"
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(t) for t in (batch.q, batch.k, batch.v)]
    outside = hstu_attention(*fakes, **batch.options())
    assert outside.shape == (75, 2, 24)
    assert counter.made == 0


def test_traced_graphs_hold_the_operator(counter):
    from torch.fx.experimental.proxy_tensor import make_fx

    batch = small()

    def function(q: Tensor) -> Tensor:
        return hstu_attention(q, batch.k, batch.v, **batch.options())

    graph = make_fx(function)(batch.q)
    assert any("hstu_varlen_fwd" in str(node.target) for node in graph.graph.nodes)
    assert counter.made == 0
    assert torch.equal(graph(batch.q), function(batch.q))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_jit_traces_hold_the_operator(counter):
    batch = small()

    def function(q: Tensor) -> Tensor:
        return hstu_attention(q, batch.k, batch.v, **batch.options())

    traced = torch.jit.trace(function, (batch.q,), check_trace=False)
    assert "hstu_attn::hstu_varlen_fwd" in str(traced.graph)
    assert counter.made == 0
    assert torch.equal(traced(batch.q), function(batch.q))


def test_functorch_transforms(counter):
    """The operator it must stay, which torch has no rule for: an error or a slow loop."""
    batch = small()

    def function(q: Tensor) -> Tensor:
        return hstu_attention(q, batch.k, batch.v, **batch.options())

    def outcome() -> Any:
        try:
            return torch.func.vmap(function)(torch.stack([batch.q, 2 * batch.q]))
        except RuntimeError as error:
            return str(error)

    found = outcome()
    assert counter.made == 0
    with operator_alone():
        expected = outcome()
    assert type(found) is type(expected)
    if isinstance(found, Tensor):
        assert torch.equal(found, expected)
    else:
        assert found == expected


def test_profiles_show_the_operator(counter):
    batch = small()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call(batch)
    assert counter.made == 0
    assert "hstu_attn::hstu_varlen_fwd" in {event.key for event in profile.key_averages()}
    call(batch)
    assert counter.made == 1


def test_lazily_negated_tensors(counter):
    batch = small()
    scale = torch.rand(75)
    negated = torch._neg_view(scale)
    out = call(batch, attn_scale=negated)
    assert counter.made == 0
    assert torch.equal(out, -call(batch, attn_scale=scale))
    assert counter.made == 1


def test_tensors_without_their_memory(counter, monkeypatch):
    """As FSDP leaves parameters between their uses; here the operator must not really run."""
    batch = small()
    freed = batch.k.clone()
    freed.untyped_storage().resize_(0)
    monkeypatch.setattr(ops, "_fwd", lambda *_: "the operator")
    assert hstu_attention(batch.q, freed, batch.v, **batch.options()) == "the operator"
    assert (counter.tried, counter.made) == (1, 0)


@pytest.mark.parametrize(
    "changes",
    [{"max_seqlen_k": True}, {"sm_margin": 0.0}, {"alpha": 10**400}],
    ids=["bool", "float", "beyond-double"],
)
def test_numbers_of_other_types(counter, changes):
    outcomes = []
    for context in (contextlib.nullcontext(), operator_alone()):
        with context:
            try:
                outcomes.append(hstu_attention(**{**test_errors.good(), **changes}))
            except Exception as error:
                outcomes.append((type(error), str(error)))
    assert type(outcomes[0]) is type(outcomes[1])
    if isinstance(outcomes[0], tuple):
        assert outcomes[0] == outcomes[1]
    assert counter.made == 0


def test_a_sparse_tensor(counter):
    batch = small()
    with pytest.raises(NotImplementedError, match="Sparse"):
        hstu_attention(batch.q, batch.k.to_sparse(), batch.v, **batch.options())
    assert (counter.tried, counter.made) == (1, 0)


# ---------------------------------------------------------------------------------------------
# Where there are no fast calls
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def connected_again() -> Iterator[None]:
    forward = fast_call.forward
    yield
    fast_call.forward = forward


@pytest.mark.usefixtures("connected_again")
@pytest.mark.parametrize("missing", ["host-module", "exchange-api", "function"])
def test_without_what_fast_calls_need(monkeypatch, missing, tmp_path):
    path = ops.LIBRARY_PATH
    batch = small()
    expected = call(batch)
    if missing == "host-module":
        monkeypatch.delattr(hstu_attn, "_host", raising=False)
        monkeypatch.setitem(sys.modules, "hstu_attn._host", None)
    elif missing == "exchange-api":
        monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    else:
        path = tmp_path / "other.so"
        subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", "-o", path], check=True)
    assert not fast_call.connect(path)
    assert fast_call.forward is fast_call.leave_to_operator
    assert torch.equal(call(batch), expected)


@pytest.mark.usefixtures("connected_again")
def test_the_switch(monkeypatch):
    monkeypatch.setenv("HSTU_ATTN_FAST_CALL", "0")
    assert not fast_call.connect(ops.LIBRARY_PATH)
    monkeypatch.delenv("HSTU_ATTN_FAST_CALL")
    assert fast_call.connect(ops.LIBRARY_PATH)


def test_other_versions_of_the_exchange_api():
    import hstu_attn._host as host

    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    table = (ctypes.c_uint64 * 8)(2)  # major version 2
    capsule = new_capsule(ctypes.addressof(table), b"dlpack_exchange_api", None)
    arguments = {"function": 0, "tensor_types": (), "obstacles": ()}
    with pytest.raises(ValueError, match=r"exchange_api: expected version 1 .*got 2\.0"):
        host.make_fast_forward(exchange_api=capsule, kinds="tttt", **arguments)
    api = torch.Tensor.__dlpack_c_exchange_api__
    for kinds in ("", "ttt", "ttti", "t" * 100):
        with pytest.raises(ValueError, match="kinds: expected"):
            host.make_fast_forward(exchange_api=api, kinds=kinds, **arguments)


def test_calls_of_another_version_are_left_to_the_operator():
    class Call(ctypes.Structure):
        _fields_ = [
            ("version", ctypes.c_int64),
            ("arguments", ctypes.c_void_p),
            ("error", ctypes.c_char_p),
        ]

    function = ctypes.CDLL(str(ops.LIBRARY_PATH)).hstu_attn_fast_fwd_out
    assert function(ctypes.byref(Call(0, None, None))) == 1


def test_the_variable_is_read_at_import():
    script = "from hstu_attn import fast_call as f; print(f.forward is f.leave_to_operator)"
    for value, expected in (("0", "True"), ("1", "False")):
        result = subprocess.run(
            [sys.executable, "-c", script],
            env={"HSTU_ATTN_FAST_CALL": value, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert result.stdout.strip() == expected


# ---------------------------------------------------------------------------------------------
# References
# ---------------------------------------------------------------------------------------------


def test_no_reference_is_kept():
    batch = small(bias="position-time")
    bad = {**batch.options(), "seqused_k": torch.zeros(75)}
    objects = [batch.q, batch.k, batch.v, batch.cu_seqlens_q, batch.cu_seqlens_k]
    objects += [batch.bias.pos_weight, batch.bias.timestamps, batch.max_seqlen_q, NotImplemented]
    objects += [Tensor, torch.nn.Parameter]

    def calls(count: int) -> None:
        for _ in range(count):
            call(batch)
            with contextlib.suppress(ValueError):
                hstu_attention(batch.q, batch.k, batch.v, **bad)
            with Recorder():
                call(batch)

    calls(3)
    gc.collect()
    before = [sys.getrefcount(item) for item in objects], len(gc.get_objects())
    calls(200)
    gc.collect()
    after = [sys.getrefcount(item) for item in objects], len(gc.get_objects())
    assert before[0] == after[0]
    assert after[1] - before[1] < 100


def test_no_output_is_kept():
    batch = small()
    gc.collect()
    alive = sum(type(item) is Tensor for item in gc.get_objects())
    for _ in range(50):
        call(batch)
    gc.collect()
    assert sum(type(item) is Tensor for item in gc.get_objects()) <= alive + 5


# ---------------------------------------------------------------------------------------------
# On a GPU
# ---------------------------------------------------------------------------------------------


def on_gpu(**changes: Any) -> Batch:
    return make_batch(
        [9, 0, 70], dim=32, mask="causal", device="cuda", dtype=torch.bfloat16, **changes
    )


@pytest.mark.gpu
def test_captured_graphs(counter):
    batch = on_gpu()
    expected = call(batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(batch)
    assert counter.made == 2
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_the_current_stream_is_used(counter):
    batch = on_gpu()
    expected = call(batch)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late = [2 * t for t in (batch.q, batch.k, batch.v)]
        halves = [t / 2 for t in late]
        out = hstu_attention(*halves, **batch.options())
    stream.synchronize()
    assert counter.made == 2
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_checked_values_and_devices(monkeypatch, counter):
    batch = copy.copy(on_gpu())
    batch.cu_seqlens_k = batch.cu_seqlens_q.cpu()
    found = error_of(lambda: call(batch))
    with operator_alone():
        assert found == error_of(lambda: call(batch))
    monkeypatch.setenv("HSTU_ATTN_CHECK", "1")
    batch.cu_seqlens_q = batch.cu_seqlens_k = batch.cu_seqlens_q.flip(0).contiguous()
    found = error_of(lambda: call(batch))
    assert found[0] is ValueError
    with operator_alone():
        assert found == error_of(lambda: call(batch))
    assert counter.made == 0


@pytest.mark.gpu
@pytest.mark.parametrize("change", ["dtype", "relative-bias"])
def test_what_is_not_built(change):
    batch = on_gpu() if change == "dtype" else on_gpu(bias="position")
    if change == "dtype":
        tensors = {name: tensor.float() for name, tensor in batch.differentiable().items()}
        batch = batch.with_tensors(tensors)
    found = error_of(lambda: call(batch))
    assert found[0] is NotImplementedError
    with operator_alone():
        assert found == error_of(lambda: call(batch))
