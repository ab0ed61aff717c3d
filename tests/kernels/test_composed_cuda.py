"""Tests of fp32 and fp64 on a GPU: TF32, repeatability, graphs, compilation, memory, errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from hstu_attn import (
    HSTULayer,
    HSTULayerConfig,
    Mask,
    RelativeBias,
    composed,
    hstu_attention,
    hstu_attn_qkvpacked_func,
    reference,
)
from hstu_attn.testing import (
    Batch,
    allowed_error,
    assert_matches,
    check_against_reference,
    make_batch,
    run,
)
from tests.helpers import raw_ops, tf32
from tests.helpers.composed import composed_attention

gpu = pytest.mark.gpu

FP32, FP64 = torch.float32, torch.float64
KINDS = [None, "rab", "rab-1-head", "position-time"]

with_dtypes = pytest.mark.parametrize("dtype", [FP32, FP64], ids=["fp32", "fp64"])


@pytest.fixture(autouse=True)
def _precision() -> Iterator[None]:
    """Products use fp32 unless a test changes it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def random_dout(batch: Batch) -> torch.Tensor:
    return torch.randn(*batch.q.shape[:2], batch.v.shape[2]).to(batch.q)


# ---------------------------------------------------------------------------------------------
# TF32
# ---------------------------------------------------------------------------------------------


def tf32_references(batch: Batch, dout: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """The formula in plain PyTorch with TF32 products, for each way in which GPUs round factors.

    As in all tests, the tolerance is twice the error of the worst reference, plus two roundings.
    """
    results = []
    for truncates in (False, True):
        with tf32.Tf32Einsum(truncates):
            results.append(run(reference.hstu_attention, batch, dout, compute_dtype=FP32))
    return results


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("truncates", [False, True], ids=["nearest", "toward-zero"])
def test_the_bound_of_tf32(monkeypatch, kind, truncates):
    """Checks the bound on a CPU, with products rounded as GPUs may round them."""
    batch = make_batch([150, 40], dim=64, mask="context-target", bias=kind)
    dout = random_dout(batch)
    exact = run(reference.hstu_attention, batch, dout, FP64)
    references = tf32_references(batch, dout)

    def product_(to, a, b, *, beta=1, alpha=1):
        product = alpha * tf32.matmul(a, b, truncates)
        return to.copy_(product if beta == 0 else beta * to + product)

    monkeypatch.setattr(torch.Tensor, "baddbmm_", product_)
    for name, value in run(composed_attention, batch, dout).items():
        assert_matches(name, value, exact[name], *(found[name] for found in references))


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [32, 128])
@pytest.mark.parametrize("setting", ["allow_tf32", "high", "highest"])
def test_products_obey_torchs_settings(dim, kind, setting):
    batch = make_batch([500, 130], dim=dim, device="cuda", mask="context-target", bias=kind)
    dout = random_dout(batch)
    exact = run(reference.hstu_attention, batch, dout, FP64)
    in_fp32 = run(reference.hstu_attention, batch, dout, compute_dtype=FP32)
    references = tf32_references(batch, dout)
    if setting == "allow_tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
    else:
        torch.set_float32_matmul_precision(setting)
    actual = run(hstu_attention, batch, dout)
    if setting == "highest":
        torch.backends.cuda.matmul.allow_tf32 = False
        check_against_reference(hstu_attention, batch)
        return
    for name, value in actual.items():
        assert_matches(name, value, exact[name], *(found[name] for found in references))
    error = (actual["out"].double() - exact["out"]).abs().max().item()
    assert error > allowed_error(exact["out"], [in_fp32["out"]], FP32)


# ---------------------------------------------------------------------------------------------
# Equal inputs, equal results
# ---------------------------------------------------------------------------------------------


@gpu
@with_dtypes
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_repeatable(dtype, kind):
    batch = make_batch(
        [700, 130, 3], heads=4, dtype=dtype, device="cuda", mask="context-target", bias=kind
    )
    if kind == "position-time":  # most scores are of a few buckets
        batch.bias.timestamps.clamp_(max=50)
    dout = random_dout(batch)
    expected = run(hstu_attention, batch, dout, deterministic=True)
    for _ in range(5):
        torch.empty(10**7, device="cuda").uniform_()  # so that blocks of memory change
        for name, value in run(hstu_attention, batch, dout, deterministic=True).items():
            assert torch.equal(value, expected[name]), name


@gpu
@with_dtypes
@pytest.mark.parametrize("kind", KINDS)
def test_torchs_switch_for_deterministic_algorithms(monkeypatch, deterministic, dtype, kind):
    """The switch refuses functions with varying sums; products need the environment variable."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    batch = make_batch([90, 30], dtype=dtype, device="cuda", mask="context-target", bias=kind)
    check_against_reference(hstu_attention, batch)
    dout = random_dout(batch)
    expected = run(hstu_attention, batch, dout)
    for name, value in run(hstu_attention, batch, dout).items():
        assert torch.equal(value, expected[name]), name


@gpu
def test_table_gradients_take_no_sequential_path():
    """Scores in a single bucket take about as long as scores in all buckets."""
    batch = make_batch([1500] * 4, heads=1, device="cuda", mask="causal", bias="time")
    dout = random_dout(batch)

    def milliseconds(times: torch.Tensor) -> float:
        changed = batch.with_bias(replace(batch.bias, timestamps=times))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run(hstu_attention, changed, dout)
        start.record()
        run(hstu_attention, changed, dout)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    spread = milliseconds(batch.bias.timestamps)
    assert milliseconds(torch.zeros_like(batch.bias.timestamps)) < 3 * spread


# ---------------------------------------------------------------------------------------------
# The host is not waited for
# ---------------------------------------------------------------------------------------------


@gpu
@with_dtypes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", ["context-target", "func-5", "spans-by-head"])
def test_nothing_waits_for_the_host(dtype, kind, mask):
    batch = make_batch([70, 30], dtype=dtype, device="cuda", mask=mask, bias=kind)
    dout = random_dout(batch)
    run(hstu_attention, batch, dout)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(hstu_attention, batch, dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_takes_other_lengths(monkeypatch, kind):
    """A captured forward and backward are replayed with other offsets, counts and values."""
    monkeypatch.setattr(composed, "CHUNK_ELEMENTS", 20_000)
    shapes = ([90, 40, 0], [64, 1, 65])
    batch, other = (
        replace(
            make_batch(lengths, device="cuda", mask="context-target", bias=kind),
            max_seqlen_q=90,
            max_seqlen_k=90,
            scaling_seqlen=90,
        )
        for lengths in shapes
    )
    if kind in ("rab", "rab-1-head"):
        other = other.with_bias(make_batch([90] * 3, device="cuda", bias=kind).bias)
    elif kind:
        tables = {"pos_weight": batch.bias.pos_weight + 1, "ts_weight": batch.bias.ts_weight - 1}
        other = other.with_bias(replace(other.bias, **tables))
    dout = random_dout(batch)

    def tensors(of: Batch) -> list[torch.Tensor]:
        times = [] if kind != "position-time" else [of.bias.timestamps]
        counts = [of.cu_seqlens_q, of.cu_seqlens_k, of.mask.num_contexts, of.mask.num_targets]
        return [*of.differentiable().values(), *counts, *times]

    values = {name: t.detach().clone() for name, t in batch.differentiable().items()}
    static = batch.with_tensors({name: t.requires_grad_() for name, t in values.items()})
    first = [t.detach().clone() for t in tensors(batch)]

    def step() -> dict[str, torch.Tensor]:
        out = hstu_attention(static.q, static.k, static.v, **static.options())
        leaves = static.differentiable()
        gradients = torch.autograd.grad(out, list(leaves.values()), dout)
        return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for source in (tensors(other), first):
        with torch.no_grad():
            for to, value in zip(tensors(static), source, strict=True):
                to.copy_(value)
        graph.replay()
        replayed = {name: value.clone() for name, value in captured.items()}
        for name, value in step().items():
            assert torch.equal(replayed[name], value), name
        assert replayed["out"].any()


@gpu
def test_memory_grows_with_the_tokens():
    """Besides inputs and outputs, memory holds a chunk and one or two copies of packed tensors."""
    peaks = []
    for length in (8192, 16384):
        batch = make_batch([length], heads=1, device="cuda", mask="causal", bias="position-time")
        dout = random_dout(batch)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(hstu_attention, batch, dout)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    # The buckets take 8 bytes per score, and sorting them three times that; therefore chunks of one
    # head have an eighth of the elements.
    assert max(peaks) < 4 * 4 * composed.CHUNK_ELEMENTS
    assert peaks[1] < 1.3 * peaks[0]


# ---------------------------------------------------------------------------------------------
# Ways to get there
# ---------------------------------------------------------------------------------------------


@gpu
@with_dtypes
def test_compiled_calls_have_equal_bits(dtype):
    batch = make_batch([70, 30], dtype=dtype, device="cuda", mask="causal", bias="position-time")
    dout = random_dout(batch)
    expected = run(hstu_attention, batch, dout)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
        return hstu_attention(q, k, v, **options)

    found = run(torch.compile(call, fullgraph=True), batch, dout)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@gpu
def test_an_exported_program_has_equal_bits():
    batch = make_batch([70, 30], device="cuda", mask="causal", bias="position-time")

    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return hstu_attention(q, k, v, **batch.options())

    arguments = (batch.q, batch.k, batch.v)
    program = torch.export.export(Attention(), arguments)
    assert torch.equal(program.module()(*arguments), Attention()(*arguments))


@gpu
@with_dtypes
def test_operators_and_their_out_variants(dtype):
    batch = make_batch([70, 30], dtype=dtype, device="cuda", mask="causal", bias="rab-strided")
    dout = random_dout(batch)
    expected = run(hstu_attention, batch, dout)
    wide = batch.q.new_full((*batch.q.shape[:2], 50), 7)
    raw_ops.forward_out(batch, wide[..., 9:41])
    assert torch.equal(wide[..., 9:41], expected["out"])
    assert (wide[..., :9] == 7).all()
    assert (wide[..., 41:] == 7).all()
    gradients = {name: torch.empty_like(batch.q) for name in ("dq", "dk", "dv")}
    gradients["drab"] = torch.full_like(batch.bias.rab, 7)
    raw_ops.backward_out(batch, dout, gradients)
    for name, value in gradients.items():
        assert torch.equal(value, expected[name]), name


@gpu
def test_packed_qkv():
    batch = make_batch([70, 30], device="cuda")
    qkv = torch.stack([batch.q, batch.k, batch.v], 1).requires_grad_()
    dout = random_dout(batch)
    expected = run(hstu_attention, replace(batch, mask=Mask.causal(), alpha=0.3), dout)
    offsets = batch.cu_seqlens_q
    out = hstu_attn_qkvpacked_func(
        qkv, offsets, offsets, None, None, 70, 70, window_size=(-1, 0), alpha=0.3
    )
    assert torch.equal(out, expected["out"])
    out.backward(dout)
    for n, name in enumerate(("dq", "dk", "dv")):
        assert torch.equal(qkv.grad[:, n], expected[name]), name


@gpu
@with_dtypes
@pytest.mark.parametrize("mask", ["context-target", "func-5", "spans-by-head"])
def test_checked_calls(monkeypatch, dtype, mask):
    monkeypatch.setenv("HSTU_ATTN_CHECK", "1")
    batch = make_batch([70, 30], dtype=dtype, device="cuda", mask=mask)
    check_against_reference(hstu_attention, batch)
    batch.cu_seqlens_q = torch.tensor([0, 110, 100], dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match=r"^cu_seqlens_q: expected .*, got "):
        run(hstu_attention, batch)


@gpu
@with_dtypes
def test_checked_thresholds(monkeypatch, dtype):
    monkeypatch.setenv("HSTU_ATTN_CHECK", "1")
    batch = make_batch([70, 30], dtype=dtype, device="cuda", bias="position-time")
    check_against_reference(hstu_attention, batch)
    batch.bias = replace(batch.bias, thresholds=torch.tensor([1, 5, 4], device="cuda"))
    with pytest.raises(ValueError, match=r"^ts_thresholds: expected .*, got 4 at index 2"):
        run(hstu_attention, batch)


@gpu
def test_an_error_in_python_arrives_as_it_was_raised(monkeypatch):
    batch = make_batch([70, 30], device="cuda")

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no room for a chunk")

    monkeypatch.setattr(composed, "Batch", fail)
    with pytest.raises(torch.OutOfMemoryError, match="no room for a chunk"):
        run(hstu_attention, batch)
    with pytest.raises(RuntimeError, match="composed_fwd: "):
        raw_ops.forward(batch)
    assert composed.take_failure() is not None


@gpu
def test_the_debug_output_names_torch(monkeypatch, capfd):
    monkeypatch.setenv("HSTU_ATTN_DEBUG", "1")
    batch = make_batch([70, 30], device="cuda")
    run(hstu_attention, batch, random_dout(batch))
    assert [line for line in capfd.readouterr().err.splitlines() if "hstu_attn" in line] == [
        "hstu_attn: forward by torch's functions",
        "hstu_attn: backward by torch's functions",
    ]


@gpu
def test_the_research_layer_trains_as_on_a_cpu():
    """Five steps of SGD in fp32, with both tables."""
    torch.manual_seed(5)
    config = HSTULayerConfig.research(
        embedding_dim=32, num_heads=2, linear_dim=16, attention_dim=16, max_sequence_len=50
    )
    lengths = [50, 0, 17]
    offsets = torch.tensor([0, 50, 50, 67])
    times = torch.randint(0, 10**6, (67,))
    x, target = torch.randn(2, 67, 32)

    def train(device: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(7)
        layer = HSTULayer(config).to(device)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        losses = []
        for _ in range(5):
            out = layer(x.to(device), offsets.to(device), max(lengths), timestamps=times.to(device))
            loss = (out - target.to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, {name: p.detach().cpu() for name, p in layer.named_parameters()}

    (losses, parameters), (expected, expected_parameters) = train("cuda"), train("cpu")
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, value in parameters.items():
        torch.testing.assert_close(value, expected_parameters[name], rtol=1e-4, atol=1e-5)


@gpu
def test_a_second_gpu_is_used_for_its_tensors():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    batch = make_batch([70, 30], device="cuda:1", mask="causal", bias="position-time")
    assert isinstance(batch.bias, RelativeBias)
    result = check_against_reference(hstu_attention, batch)
    assert {value.device.index for value in result.values()} == {1}
