"""Tests of the operator, forward and backward, against the fp64 reference and its tolerance."""

from __future__ import annotations

import pytest
import torch

from hstu_attn import DenseBias, Mask, RelativeBias, hstu_attention
from hstu_attn.testing import (
    BIAS_NAMES,
    MASK_NAMES,
    check_against_reference,
    make_batch,
    make_lengths,
    offsets,
    run,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEAD_DIMS = ((32, 32), (64, 64), (40, 24), (128, 128), (8, 16), (256, 256), (64, 128), (256, 8))
TILE = 64
CHUNK = 512


def for_device(device: str, dtype: torch.dtype) -> torch.dtype:
    """Returns a 16-bit type for fp32 and fp64, which no GPU kernel has: see test_composed.py."""
    if device == "cpu":
        return dtype
    return {torch.float32: torch.bfloat16, torch.float64: torch.float16}.get(dtype, dtype)


def _product() -> list[object]:
    """Returns every mask with every bias; all pairs of dtype, head dims and delta-q occur."""
    cases: list[object] = []
    for m, mask in enumerate(MASK_NAMES):
        for b, bias in enumerate((None, *BIAS_NAMES)):
            dtype = DTYPES[(m + b) % len(DTYPES)]
            dims = HEAD_DIMS[(m + b // 2 + b) % len(HEAD_DIMS)]
            delta = (m + b // 3) % 2 == 1
            name = f"{mask}-{bias or 'no-bias'}-{str(dtype)[6:]}-{dims[0]}x{dims[1]}"
            cases.append(
                pytest.param(mask, bias, dtype, dims, delta, id=name + ("-delta" if delta else ""))
            )
    return cases


@pytest.mark.parametrize(("mask", "bias", "dtype", "dims", "delta"), _product())
def test_mask_and_bias(device, mask, bias, dtype, dims, delta):
    lengths_k = [*make_lengths(2, 110), 0, int(torch.randint(1, 20, ()))]
    lengths_q = [int(torch.randint(length + 1, ())) for length in lengths_k] if delta else None
    batch = make_batch(
        lengths_k,
        lengths_q,
        dim=dims[0],
        dim_v=dims[1],
        dtype=for_device(device, dtype),
        device=device,
        mask=mask,
        bias=bias,
    )
    check_against_reference(hstu_attention, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "length",
    [0, 1, TILE - 1, TILE, TILE + 1, 2 * TILE - 1, 2 * TILE, 2 * TILE + 1, CHUNK, CHUNK + 1],
)
def test_length(device, length, dtype):
    for mask in ("causal", "local-context-target"):
        batch = make_batch(
            [length, 3, length], dtype=for_device(device, dtype), device=device, mask=mask
        )
        check_against_reference(hstu_attention, batch)


@pytest.mark.parametrize("bias", ["rab", "position-time"])
@pytest.mark.parametrize("rows", [1, TILE - 1, TILE, TILE + 1])
def test_delta_rows_of_a_longer_sequence(device, rows, bias):
    batch = make_batch(
        [3 * TILE + 5, rows],
        [rows, rows],
        dtype=torch.bfloat16,
        device=device,
        mask="context-target",
        bias=bias,
    )
    check_against_reference(hstu_attention, batch)


@pytest.mark.slow
@pytest.mark.parametrize("bias", [None, "position-time"])
def test_many_tiny_sequences(device, bias):
    lengths = torch.randint(0, 4, (300,)).tolist()
    batch = make_batch(lengths, dtype=torch.bfloat16, device=device, mask="target", bias=bias)
    check_against_reference(hstu_attention, batch)


@pytest.mark.slow
@pytest.mark.parametrize("bias", ["rab", "position-time"])
def test_one_long_sequence_among_short_ones(device, bias):
    batch = make_batch(
        [3, 2500, 0, 40],
        heads=1,
        dtype=torch.bfloat16,
        device=device,
        mask="context-target",
        bias=bias,
    )
    check_against_reference(hstu_attention, batch)


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "full"])
def test_long_sums(device, mask):
    """Over thousands of terms, errors grow no faster than in PyTorch."""
    dtype = for_device(device, torch.float32)
    check_against_reference(
        hstu_attention, make_batch([2000], heads=1, dtype=dtype, device=device, mask=mask)
    )


def test_several_heads_share_a_bias_head(device):
    batch = make_batch([70, 12], heads=6, dtype=torch.bfloat16, device=device, mask="causal")
    rab = torch.randn(2, 3, 70, 70, dtype=torch.bfloat16, device=device)
    check_against_reference(hstu_attention, batch.with_bias(DenseBias(rab)))


def test_several_heads_share_a_table(device):
    batch = make_batch([70, 12], heads=6, dtype=torch.bfloat16, device=device, mask="causal")
    times = torch.randint(0, 10**6, (82,), device=device)
    tables = RelativeBias(
        torch.randn(2, 31, device=device), torch.randn(3, 9, device=device), times
    )
    check_against_reference(hstu_attention, batch.with_bias(tables))


def test_own_thresholds(device):
    thresholds = torch.tensor([0, 5, 5, 100, 2**40], device=device)
    batch = make_batch([50], dtype=torch.bfloat16, device=device, mask="causal")
    bias = RelativeBias(
        None,
        torch.randn(1, 6, device=device),
        torch.randint(0, 300, (50,), device=device) * 2**33,
        None,
        thresholds,
    )
    check_against_reference(hstu_attention, batch.with_bias(bias))


# ---------------------------------------------------------------------------------------------
# The edges of sequences
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("contexts", "targets"),
    [([0, 0], [70, 5]), ([60, 5], [10, 0]), ([70, 5], [0, 0]), ([0, 0], [0, 0]), ([69, 0], [1, 4])],
    ids=["all-targets", "no-history", "all-context", "neither", "one-target"],
)
@pytest.mark.parametrize("window", [-1, 7], ids=["causal", "window"])
def test_contexts_and_targets_fill_the_sequence(device, contexts, targets, window):
    mask = Mask(
        (window, 0),
        torch.tensor(contexts, device=device),
        torch.tensor(targets, device=device),
        3,
    )
    batch = make_batch([70, 5], dtype=torch.bfloat16, device=device, mask=mask)
    check_against_reference(hstu_attention, batch)


def test_more_contexts_than_history_are_clamped(device):
    mask = Mask.causal(
        num_contexts=torch.tensor([50], device=device), num_targets=torch.tensor([6], device=device)
    )
    check_against_reference(
        hstu_attention, make_batch([20], dtype=torch.bfloat16, device=device, mask=mask)
    )


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]], ids=["no-sequence", "one", "three"])
@pytest.mark.parametrize("bias", [None, "rab", "position-time"])
def test_nothing_to_do(device, lengths, bias):
    batch = make_batch(lengths, dtype=torch.bfloat16, device=device, mask="causal", bias=bias)
    result = run(hstu_attention, batch, torch.zeros(0, 2, 32, dtype=torch.bfloat16, device=device))
    assert result["out"].shape == (0, 2, 32)
    for name in set(result) - {"out"}:
        assert not result[name].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tokens", [False, True], ids=["history", "contexts-and-targets"])
@pytest.mark.parametrize("delta", [False, True], ids=["all-rows", "last-rows"])
def test_semi_local(device, delta, tokens, dtype):
    """The mask has a window of 40 keys and a prefix of 20; some sequences are shorter than both."""
    lengths_k = [300, 0, 1, 35, 130]
    lengths_q = [70, 0, 1, 35, 129] if delta else lengths_k
    counts = {
        "num_contexts": torch.tensor([3, 0, 0, 2, 50], device=device),
        "num_targets": torch.tensor([11, 0, 1, 33, 4], device=device),
        "target_group_size": 2,
    }
    mask = Mask.semi_local(
        40,
        20,
        offsets(lengths_q, device),
        sum(lengths_q),
        cu_seqlens_k=offsets(lengths_k, device),
        **(counts if tokens else {}),
    )
    assert mask.row_spans.device.type == device
    batch = make_batch(
        lengths_k, lengths_q, dtype=for_device(device, dtype), device=device, mask=mask
    )
    check_against_reference(hstu_attention, batch)


def test_rows_that_see_nothing_are_zero(device):
    spans = torch.zeros(90, 4, dtype=torch.int32, device=device)
    spans[::3] = torch.tensor([4, 9, 20, 30], dtype=torch.int32, device=device)
    batch = make_batch(
        [90], dtype=torch.bfloat16, device=device, mask=Mask.from_row_spans(spans), bias="rab"
    )
    result = check_against_reference(hstu_attention, batch)
    blind = torch.ones(90, dtype=torch.bool, device=device)
    blind[::3] = False
    assert not result["out"][blind].any()
    assert not result["dq"][blind].any()
    assert not result["drab"][0, :, blind].any()
    assert not result["dk"][9:20].any()


@pytest.mark.parametrize("index_dtypes", [(torch.int32, torch.int64), (torch.int64, torch.int32)])
def test_index_dtypes_mix(device, index_dtypes):
    first, second = index_dtypes
    batch = make_batch(
        [30, 41], [8, 41], dtype=torch.bfloat16, device=device, mask="context-target"
    )
    expected = run(hstu_attention, batch)["out"]
    batch.cu_seqlens_q = batch.cu_seqlens_q.to(first)
    batch.cu_seqlens_k = batch.cu_seqlens_k.to(second)
    batch.seqused_q = torch.tensor([8, 41], dtype=second, device=device)
    batch.seqused_k = torch.tensor([30, 41], dtype=first, device=device)
    batch.mask = Mask.causal(
        num_contexts=batch.mask.num_contexts.to(second),
        num_targets=batch.mask.num_targets.to(first),
        target_group_size=2,
    )
    assert torch.equal(run(hstu_attention, batch)["out"], expected)


# ---------------------------------------------------------------------------------------------
# Scale, alpha and the activation
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [None, "rab"])
@pytest.mark.parametrize("shape", [(), (1,), (100,)], ids=["scalar", "one", "per-row"])
def test_attn_scale(device, shape, bias):
    batch = make_batch(
        [64, 36],
        dtype=torch.bfloat16,
        device=device,
        mask="causal",
        bias=bias,
        attn_scale=torch.rand(shape, device=device) - 0.3,
    )
    check_against_reference(hstu_attention, batch)


def test_attn_scale_of_a_strided_view_is_refused_or_right(device):
    wide = torch.rand(100, 2, device=device)
    batch = make_batch([100], dtype=torch.bfloat16, device=device, attn_scale=wide[:, 0])
    with pytest.raises(ValueError, match="attn_scale"):
        run(hstu_attention, batch)


def test_scaling_seqlen(device):
    batch = make_batch([90], dtype=torch.bfloat16, device=device, mask="local", scaling_seqlen=33)
    check_against_reference(hstu_attention, batch)


@pytest.mark.parametrize("alpha", [1.0, 0.0, -0.7, -3.0, 1e-6, 5.0])
@pytest.mark.parametrize("bias", [None, "rab", "position-time"])
def test_alpha(device, alpha, bias):
    batch = make_batch(
        [66, 20], dtype=torch.bfloat16, device=device, mask="context-target", bias=bias, alpha=alpha
    )
    check_against_reference(hstu_attention, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("factor", [30.0, 3e3, 1e8])
def test_huge_inputs(device, dtype, factor):
    """Scores are far beyond the overflow of exp."""
    batch = make_batch([70], dim=64, dtype=for_device(device, dtype), device=device, mask="causal")
    batch.q, batch.k = batch.q * factor, batch.k * factor
    result = check_against_reference(hstu_attention, batch)
    assert result["out"].abs().max() > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_silu_of_strongly_negative_scores(device, dtype):
    """Around -8 silu is 0.3 % of its argument, so an error beyond 2^-12 |x| is noticed."""
    size = 256
    batch = make_batch(
        [size], heads=1, dim=8, dtype=for_device(device, dtype), device=device, alpha=1.0
    )
    batch.q.zero_()
    x = torch.linspace(-12, -4, size * size, dtype=torch.float32, device=device)
    batch = batch.with_bias(DenseBias(x.view(1, 1, size, size)))
    batch.scaling_seqlen = 1
    # Row i sees only key i, whose value is 1, so the output is one silu.
    position = torch.arange(size, dtype=torch.int32, device=device)
    zero = torch.zeros_like(position)
    batch.mask = Mask.from_row_spans(torch.stack([position, position + 1, zero, zero], 1))
    batch.v.fill_(1)
    silu = run(hstu_attention, batch)["out"][:, 0, 0].double()
    x = batch.bias.rab[0, 0].diagonal().double()
    exact = x * torch.sigmoid(x)
    rounding = torch.finfo(batch.q.dtype).eps
    # P is rounded once before the product with V, and the output once after it.
    assert ((silu - exact).abs() <= 2**-12 * x.abs() + rounding * exact.abs()).all()
    # tanh.approx is exactly -1 below about x = -8.
    assert (silu <= 0 if device == "cuda" else silu < 0).all()


def test_exactly_zero_at_zero_alpha(device):
    batch = make_batch([40], dtype=torch.bfloat16, device=device, mask="causal", alpha=0.0)
    result = run(hstu_attention, batch, torch.ones_like(batch.v))
    assert not result["out"].any()
    assert not result["dq"].any()
    assert not result["dv"].any()


# ---------------------------------------------------------------------------------------------
# Gradients in fp64
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [None, "rab-1-head", "rab"])
@pytest.mark.parametrize("mask", ["context-target", "min-full-context-target", "func-5"])
def test_gradcheck(mask, bias):
    batch = make_batch(
        [7, 0, 3], [5, 0, 3], heads=2, dim=8, dtype=torch.float64, mask=mask, bias=bias
    )
    leaves = {n: t.clone().requires_grad_() for n, t in batch.differentiable().items()}

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        changed = batch.with_tensors(dict(zip(leaves, tensors, strict=True)))
        return hstu_attention(changed.q, changed.k, changed.v, **changed.options())

    assert torch.autograd.gradcheck(call, tuple(leaves.values()), fast_mode=bias is not None)


def test_gradcheck_of_the_tables():
    """Gradients of the tables are fp32, so the tolerance is a little wider."""
    batch = make_batch([9, 5], [7, 5], heads=2, dim=8, dtype=torch.float64, mask="causal")
    times = torch.randint(0, 1000, (14,))
    tables = (
        torch.randn(2, 7, dtype=torch.float64, requires_grad=True),
        torch.randn(1, 12, dtype=torch.float64, requires_grad=True),
    )

    def call(*values: torch.Tensor) -> torch.Tensor:
        bias = RelativeBias(*values, times)
        return hstu_attention(batch.q, batch.k, batch.v, **{**batch.options(), "bias": bias})

    assert torch.autograd.gradcheck(call, tables, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------
# Streams and devices
# ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_work_is_queued_on_the_current_stream(deterministic):
    """Inputs that only a side stream has written are read, forward and backward."""
    batch = make_batch([300, 70], dtype=torch.bfloat16, device="cuda", mask="context-target")
    dout = torch.randn_like(batch.v)
    expected = run(hstu_attention, batch, dout)
    late = {name: torch.empty_like(t) for name, t in batch.differentiable().items()}
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**8)
        for name, tensor in batch.differentiable().items():
            late[name].copy_(tensor)
        result = run(hstu_attention, batch.with_tensors(late), dout)
    stream.synchronize()
    for name, value in expected.items():
        assert torch.equal(result[name], value), name


@pytest.mark.gpu
def test_work_is_done_on_the_tensors_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    batch = make_batch([300, 70], dtype=torch.bfloat16, device="cuda:1", mask="causal", bias="rab")
    assert torch.cuda.current_device() == 0
    result = check_against_reference(hstu_attention, batch)
    assert {value.device.index for value in result.values()} == {1}


# ---------------------------------------------------------------------------------------------
# Every instruction set that the CPU kernels are compiled for
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512", "avx512bf16"])
def test_instruction_set(isa, monkeypatch):
    """The variable limits the instruction set of each call."""
    monkeypatch.setenv("HSTU_ATTN_CPU_ISA", isa)
    try:
        run(hstu_attention, make_batch([1]))
    except ValueError as error:
        if "a level that this processor supports" in str(error):
            pytest.skip(f"this processor has no {isa}")
        raise
    masks = (("causal", None), ("context-target", "position-time"), ("spans", "rab"))
    for dtype in DTYPES:
        for dim, dim_v in ((32, 32), (40, 24), (128, 64), (256, 256)):
            for mask, bias in masks:
                kind = {"dim": dim, "dim_v": dim_v, "dtype": dtype, "mask": mask, "bias": bias}
                check_against_reference(hstu_attention, make_batch([131, 3], [70, 3], **kind))
