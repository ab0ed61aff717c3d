"""Tests of calls on a GPU: streams, graphs, determinism, wrong offsets, and errors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from hstu_attn import Mask, hstu_attention
from hstu_attn.testing import (
    Batch,
    make_batch,
    make_lengths,
    offsets,
    poisoned_memory,
    run,
)
from tests.helpers import raw_ops
from tests.helpers.head_dims import HEAD_DIMS
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


def random_dout(batch: Batch) -> torch.Tensor:
    shape = (*batch.q.shape[:2], batch.v.shape[2])
    return torch.empty(shape, dtype=batch.q.dtype, device="cuda").uniform_(-1, 1)


def assert_same(result: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(result[name], value), name


@pytest.mark.parametrize("length", [100, 1000])
def test_a_thread_that_has_not_called_cuda(length):
    """No CUDA context is current in it, which the encoding of tensor maps needs."""
    batch = make_batch([length, 7], dim=128, dtype=BF16, device="cuda", mask="causal")
    dout = random_dout(batch)

    def call() -> tuple[torch.Tensor, ...]:
        out = raw_ops.forward(batch)
        return out, *raw_ops.backward(batch, dout, has_drab=False, has_dtables=False)[:3]

    expected = call()  # its memory is then reused, without a call of CUDA
    found = [x.clone() for x in expected]
    del expected
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        results = pool.submit(call).result()
    for result, values in zip(results, found, strict=True):
        torch.testing.assert_close(result, values)


# ---------------------------------------------------------------------------------------------
# Nothing waits for the GPU
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def forbidden_syncs() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("deterministic", [False, True], ids=["any-order", "deterministic"])
@pytest.mark.parametrize("mask", ["context-target", "spans", "func-5"])
@pytest.mark.parametrize("bias", [None, "rab-1-head"])
def test_calls_do_not_wait(request, bias, mask, deterministic):
    batch = make_batch([300, 0, 70], [200, 0, 70], device="cuda", dtype=BF16, mask=mask, bias=bias)
    dout = random_dout(batch)
    run(hstu_attention, batch, dout, deterministic=deterministic)  # loads the kernels
    request.getfixturevalue("forbidden_syncs")
    torch.cuda._sleep(10**9)
    run(hstu_attention, batch, dout, deterministic=deterministic)
    # NOTE: the fixture sees only torch's own synchronizations; this sees any.
    assert not torch.cuda.current_stream().query(), "the calls waited for the GPU"


def test_memory_of_a_call_is_not_handed_to_another_stream():
    """Only the call's own stream may reuse the workspace while the kernels run."""
    batch = make_batch([2000, 900], heads=4, dim=64, device="cuda", dtype=BF16, mask="causal")
    dout = random_dout(batch)
    expected = run(hstu_attention, batch, dout, deterministic=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    results = []
    for _ in range(5):
        with torch.cuda.stream(side):
            torch.cuda._sleep(10**7)
            results.append(run(hstu_attention, batch, dout, deterministic=True))
        with poisoned_memory("cuda"):  # on the main stream, at the same time
            results.append(run(hstu_attention, batch, dout, deterministic=True))
    torch.cuda.synchronize()
    for result in results:
        assert_same(result, expected)


# ---------------------------------------------------------------------------------------------
# CUDA graphs
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [None, "rab", "position-time"])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_a_graph_serves_other_lengths(dim, bias):
    """A captured graph is replayed with other offsets, targets and contents of its buffers."""
    total, longest = 1200, 600
    capture_lengths = [longest, 200, 0, 400]
    batch = make_batch(
        capture_lengths, dim=dim, device="cuda", dtype=BF16, mask="target", bias=bias
    )
    batch.cu_seqlens_q = batch.cu_seqlens_k  # the same tensor
    batch.scaling_seqlen = longest
    dout = random_dout(batch)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(hstu_attention, batch, dout, deterministic=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(hstu_attention, batch, dout, deterministic=True)

    for lengths, targets in (
        (capture_lengths, [100, 7, 0, 400]),
        ([1, 599, 0, 600], [0, 300, 0, 5]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([64, 65, 63, 128], [64, 1, 0, 128]),
    ):
        assert sum(lengths) <= total
        batch.cu_seqlens_k.copy_(offsets(lengths))
        batch.mask.num_targets.copy_(torch.tensor(targets))
        batch.q.uniform_(-1, 1)
        for tensor in captured.values():
            tensor.fill_(float("nan"))
        graph.replay()
        assert_same(captured, run(hstu_attention, batch, dout, deterministic=True))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_graph_of_many_short_sequences(dim):
    """In the backward of sm90, blocks count the sequences that they take: from 0 in each replay."""
    lengths = make_lengths(400, 120)
    batch = make_batch(lengths, dim=dim, device="cuda", dtype=BF16, mask="causal")
    batch.cu_seqlens_q = batch.cu_seqlens_k  # the same tensor
    dout = random_dout(batch)
    run(hstu_attention, batch, dout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(hstu_attention, batch, dout)
    for _ in range(2):
        batch.cu_seqlens_k.copy_(offsets(lengths))
        expected = run(hstu_attention, batch, dout)
        for tensor in captured.values():
            tensor.fill_(float("nan"))
        graph.replay()
        assert_same(captured, expected)
        lengths.reverse()


# ---------------------------------------------------------------------------------------------
# Determinism, and multiprocessors left free
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [None, "rab", "rab-1-head", "position-time"])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_deterministic_beside_other_work(dim, bias):
    lengths = [1500, 3, 0, 700, 64, 999]
    batch = make_batch(
        lengths, heads=4, dim=dim, device="cuda", dtype=BF16, mask="context-target", bias=bias
    )
    dout = random_dout(batch)
    expected = run(hstu_attention, batch, dout, deterministic=True)
    matrix = torch.randn(2048, 2048, device="cuda", dtype=BF16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        with torch.cuda.stream(side):
            for _ in range(8):
                matrix @ matrix
        assert_same(run(hstu_attention, batch, dout, deterministic=True), expected)
    torch.cuda.synchronize()


@pytest.mark.parametrize("bias", ["rab", "position-time"])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_sm_margin_changes_no_result(dim, bias):
    batch = make_batch([700, 300], dim=dim, device="cuda", dtype=BF16, mask="causal", bias=bias)
    dout = random_dout(batch)
    expected = run(hstu_attention, batch, dout, deterministic=True)
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    for margin in (1, multiprocessors - 1, multiprocessors, 2**31 - 1):
        result = run(hstu_attention, batch, dout, deterministic=True, sm_margin=margin)
        assert_same(result, expected)


# ---------------------------------------------------------------------------------------------
# Wrong offsets and counts
# ---------------------------------------------------------------------------------------------

WRONG_OFFSETS = {
    "decreasing": [0, 500, 100, 130],
    "swapped": [130, 70, 30, 0],
    "back-and-forth": [0, 130, 0, 130],
    "negative": [-50, 70, -3, 130],
    "beyond": [0, 70, 131, 10**9],
    "huge": [2**31 - 1, -(2**31), 2**31 - 1, 130],
}


def call_with_wrong_offsets(
    kind: str, dim: int, bias: str | None, deterministic: bool, longer: int = 1
) -> None:
    """Checks that a call with wrong offsets, lengths and counts writes nothing around the
    outputs.

    `longer` multiplies the lengths and the offsets; if it is not 1, the mask has a window of a
    few tiles.
    """
    lengths = [longer * length for length in (70, 30, 30)]
    batch = make_batch(lengths, dim=dim, device="cuda", dtype=BF16, mask="causal", bias=bias)
    wrong = [max(-(2**31), min(longer * offset, 2**31 - 1)) for offset in WRONG_OFFSETS[kind]]
    batch.cu_seqlens_q = torch.tensor(wrong, dtype=torch.int32, device="cuda")
    batch.cu_seqlens_k = batch.cu_seqlens_q.flip(0) if kind == "huge" else batch.cu_seqlens_q
    counts = torch.tensor([10**9, -5, 40], dtype=torch.int32, device="cuda")
    if longer != 1:
        batch.mask = Mask.local(300, 0)
    elif kind != "decreasing":
        batch.seqused_k = counts
        batch.mask = Mask.causal(num_contexts=counts.flip(0), num_targets=counts)
    dout = random_dout(batch)

    def room(like: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        buffer = torch.full((like.shape[0] + 200, *like.shape[1:]), 7.0, dtype=dtype, device="cuda")
        return buffer, buffer[100:-100]

    buffer, out = room(batch.q, BF16)
    raw_ops.forward_out(batch, out)
    buffers = [buffer]
    gradients = {}
    for name, like in batch.differentiable().items():
        dtype = torch.float32 if name.endswith("_weight") else BF16
        buffer, gradients[f"d{name}"] = room(like, dtype)
        buffers.append(buffer)
    raw_ops.backward_out(batch, dout, gradients, deterministic=deterministic)
    torch.cuda.synchronize()
    for buffer in buffers:
        assert (buffer[:100] == 7).all()
        assert (buffer[-100:] == 7).all()


@pytest.mark.sanitize
@pytest.mark.parametrize("bias", [None, "rab", "rab-1-head", "position-row-time"])
@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("kind", WRONG_OFFSETS)
def test_wrong_offsets_touch_nothing_else(kind, dim, bias):
    call_with_wrong_offsets(kind, dim, bias, deterministic=False)


@pytest.mark.parametrize("kind", WRONG_OFFSETS)
def test_wrong_offsets_do_not_hang_a_deterministic_backward(kind):
    """The backward's blocks wait for one another, so it runs in a process that can be killed."""
    script = (
        "from tests.kernels.test_cuda_calls import call_with_wrong_offsets\n"
        "for dim in (64, 256):\n"
        "    for bias in (None, 'rab-1-head', 'position-time'):\n"
        "        for longer in (1, 20):\n"
        f"            call_with_wrong_offsets({kind!r}, dim, bias, True, longer)\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=120)


def test_lengths_beyond_max_seqlen_stay_within_rab():
    batch = make_batch([70, 30], device="cuda", dtype=BF16, mask="causal", bias="rab")
    batch.max_seqlen_q = batch.max_seqlen_k = 40
    batch = batch.with_bias(replace(batch.bias, rab=batch.bias.rab[:, :, :40, :40]))
    drab = torch.full((2, 2, 44, 44), 7.0, dtype=BF16, device="cuda")
    gradients = {name: torch.empty_like(batch.q) for name in ("dq", "dk", "dv")}
    raw_ops.backward_out(batch, random_dout(batch), {**gradients, "drab": drab[:, :, 2:-2, 2:-2]})
    assert torch.isfinite(drab).all()
    drab[:, :, 2:-2, 2:-2] = 7
    assert (drab == 7).all()


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        *(("cu_seqlens_q", offsets) for offsets in WRONG_OFFSETS.values()),
        ("cu_seqlens_k", [0, 60, 100, 131]),
        ("seqused_q", [71, 30, 30]),
        ("seqused_k", [70, -1, 30]),
        ("num_targets", [0, 31, 0]),
        ("num_contexts", [0, 0, -1]),
        ("max_seqlen_q", 69),
    ],
)
def test_checked_calls_name_the_wrong_argument(monkeypatch, argument, values):
    monkeypatch.setenv("HSTU_ATTN_CHECK", "1")
    batch = make_batch([70, 30, 30], device="cuda", dtype=BF16, mask="causal")
    run(hstu_attention, batch, random_dout(batch))
    if not isinstance(values, int):
        values = torch.tensor(values, dtype=torch.int32, device="cuda")
    if hasattr(batch, argument):
        batch = replace(batch, **{argument: values})
    else:
        batch.mask = replace(batch.mask, **{argument: values})
    with pytest.raises(ValueError, match=rf"^{argument}: expected .*, got "):
        run(hstu_attention, batch)
    gradients = {name: torch.full_like(batch.q, 7) for name in ("dq", "dk", "dv")}
    with pytest.raises(ValueError, match=rf"^{argument}: expected .*, got "):
        raw_ops.backward_out(batch, random_dout(batch), gradients)
    assert all((gradient == 7).all() for gradient in gradients.values())


# ---------------------------------------------------------------------------------------------
# What is refused, and the environment
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_rows_before_the_first_key(mask):
    """If only the GPU knows that there are more queries than keys, the first rows see nothing."""
    batch = make_batch([200, 200], [150, 100], dim=64, device="cuda", dtype=BF16, mask=mask)
    batch = replace(
        batch, k=batch.k[:240], v=batch.v[:240], cu_seqlens_k=offsets([200, 40], "cuda")
    )
    result = run(hstu_attention, batch, random_dout(batch))
    for name in ("out", "dq"):
        assert not result[name][150:210].any()
        assert result[name][210:].any(dim=-1).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HSTU_ATTN_FORCE_ARCH", "75"),
        ("HSTU_ATTN_FORCE_ARCH", "sm80"),
        ("HSTU_ATTN_SHARED_MEMORY", "99 KB"),
        ("HSTU_ATTN_SHARED_MEMORY", "-1"),
    ],
)
def test_environment_variables_that_say_nothing(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    batch = make_batch([9], device="cuda", dtype=BF16)
    with pytest.raises(ValueError, match=rf"^{name}: expected .*, got {value}"):
        run(hstu_attention, batch)


def test_a_forced_architecture(monkeypatch):
    batch = make_batch([90], device="cuda", dtype=BF16, mask="causal")
    dout = random_dout(batch)
    monkeypatch.setenv("HSTU_ATTN_FORCE_ARCH", "80")
    forced = run(hstu_attention, batch, dout, deterministic=True)
    assert forced["dq"].any()
    if torch.cuda.get_device_capability() != (9, 0):
        monkeypatch.setenv("HSTU_ATTN_FORCE_ARCH", "90")
        with pytest.raises(NotImplementedError, match=r"^no sm90 kernels for a GPU of compute"):
            run(hstu_attention, batch)


def test_the_choice_of_kernels_is_printed(monkeypatch, capfd):
    """The line names sm90's kernels where the GPU has them and they can take the call."""
    monkeypatch.setenv("HSTU_ATTN_DEBUG", "1")
    forced = os.environ["HSTU_ATTN_FORCE_ARCH"]
    plain = make_batch([72], device="cuda", dtype=BF16, mask="causal")
    aligned = make_batch([72], device="cuda", dtype=BF16, mask="causal", bias="rab")
    shared = make_batch([72], device="cuda", dtype=BF16, mask="causal", bias="rab-1-head")
    half = make_batch([72], device="cuda", dtype=torch.float16, mask="causal", bias="rab")
    odd = make_batch([71], device="cuda", dtype=BF16, mask="causal", bias="rab-1-head")

    def printed(batch):
        run(hstu_attention, batch, random_dout(batch))
        return capfd.readouterr().err.split("\n")[:2]

    def by_sm80(why):
        return f"sm80, because of {why}" if forced == "90" else "sm80"

    forward, backward = "hstu_attn: forward by ", "hstu_attn: backward by "
    newest = f"sm{forced}"
    assert printed(plain) == [forward + newest, backward + newest]
    assert printed(aligned) == [forward + newest, backward + newest]
    assert printed(shared) == [forward + newest, backward + newest]
    assert printed(half) == [forward + newest, backward + newest]
    unaligned = "a rab in another dtype than q, or whose rows are not aligned to 16 bytes"
    assert printed(odd)[0] == forward + by_sm80(unaligned)


def test_backward_on_another_thread_than_the_forward():
    """autograd's thread has not set a device before the first backward."""
    script = (
        "import torch\n"
        "from hstu_attn import hstu_attention\n"
        "from hstu_attn.testing import check_against_reference, make_batch\n"
        "index = torch.cuda.device_count() - 1\n"
        "batch = make_batch([90, 3], device=f'cuda:{index}', dtype=torch.bfloat16, mask='causal')\n"
        "check_against_reference(hstu_attention, batch)\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=300)
