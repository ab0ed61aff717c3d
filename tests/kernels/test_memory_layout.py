"""Tests of strides, preallocated outputs, unused rows with garbage, and memory around tensors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from hstu_attn import DenseBias, Mask, RelativeBias, hstu_attention
from hstu_attn.ops import packed_rows
from hstu_attn.testing import (
    MASK_NAMES,
    Batch,
    assert_matches_reference,
    check_against_reference,
    make_batch,
    make_mask,
    offsets,
    poison,
    poisoned_memory,
    run,
)
from tests.helpers import raw_ops

BF16 = torch.bfloat16


def random_dout(batch: Batch) -> torch.Tensor:
    return torch.randn(
        (*batch.q.shape[:2], batch.v.shape[2]), dtype=batch.q.dtype, device=batch.q.device
    )


def strided_batch(device: str, **options: object) -> Batch:
    """Returns a batch of slices of a buffer `(total, heads * (2 * Dv + 2 * D))` of u, v, q, k."""
    heads, dim, dim_v, lengths = 3, 32, 40, [70, 0, 9]
    batch = make_batch(
        lengths, heads=heads, dim=dim, dim_v=dim_v, dtype=BF16, device=device, **options
    )
    width = heads * (2 * dim_v + 2 * dim)
    uvqk = torch.empty(sum(lengths), width, dtype=BF16, device=device).uniform_(-1, 1)
    _, v, q, k = uvqk.split([heads * dim_v, heads * dim_v, heads * dim, heads * dim], dim=1)
    return replace(
        batch,
        q=q.unflatten(1, (heads, dim)),
        k=k.unflatten(1, (heads, dim)),
        v=v.unflatten(1, (heads, dim_v)),
    )


# ---------------------------------------------------------------------------------------------
# Strides
# ---------------------------------------------------------------------------------------------


def test_slices_of_one_buffer(device):
    batch = strided_batch(device, mask="context-target", bias="rab")
    assert not batch.q.is_contiguous()
    check_against_reference(hstu_attention, batch)


def test_heads_before_rows(device):
    batch = make_batch([65, 7], heads=3, dtype=BF16, device=device, mask="causal")
    for name in ("q", "k", "v"):
        value = getattr(batch, name).transpose(0, 1).contiguous().transpose(0, 1)
        batch = replace(batch, **{name: value})
    assert batch.q.stride(1) > batch.q.stride(0)
    check_against_reference(hstu_attention, batch)


def test_one_head_of_q_and_k_for_all(device):
    """q and k have heads of stride 0."""
    batch = make_batch([40], heads=4, dtype=BF16, device=device, mask="causal")
    shared = replace(batch, q=batch.q[:, :1].expand(-1, 4, -1), k=batch.k[:, :1].expand(-1, 4, -1))
    check_against_reference(hstu_attention, shared)


@pytest.mark.parametrize("kind", ["sum", "transposed", "expanded-rows"])
def test_any_gradient_of_the_output(device, kind):
    """An expanded gradient is copied."""
    batch = make_batch([50, 3], heads=2, dim_v=16, dtype=BF16, device=device, mask="causal")
    shape = (53, 2, 16)
    dout = {
        "sum": torch.ones((), dtype=BF16, device=device).expand(shape),
        "transposed": torch.randn((16, 2, 53), dtype=BF16, device=device).permute(2, 1, 0),
        "expanded-rows": torch.randn((1, 1, 16), dtype=BF16, device=device).expand(shape),
    }[kind]
    results = run(hstu_attention, batch, dout)
    assert_matches_reference(results, batch, dout)
    assert results["dq"].any()


def test_only_an_expanded_gradient_is_copied(device):
    expanded = torch.randn(1, 2, 16, device=device).expand(5, 2, 16)
    packed = packed_rows(expanded)
    assert 0 not in packed.stride()
    assert torch.equal(packed, expanded)
    part = torch.randn(5, 2, 32, device=device)[..., 8:24]
    assert packed_rows(part) is part


def test_the_operator_takes_an_expanded_gradient(device):
    """On sm90, a stride of 0 makes the sm80 kernels run."""
    batch = make_batch([50, 3], heads=2, dim_v=16, dtype=BF16, device=device, mask="causal")
    dout = torch.randn((1, 1, 16), dtype=BF16, device=device).expand(53, 2, 16)
    dq, dk, dv, *_ = raw_ops.backward(batch, dout, has_drab=False, has_dtables=False)
    results = {**run(hstu_attention, batch, dout), "dq": dq, "dk": dk, "dv": dv}
    assert_matches_reference(results, batch, dout)
    assert dq.any()


def test_rows_of_spans_and_func_may_be_strided(device):
    lengths = [33, 12]
    batch = make_batch(lengths, dtype=BF16, device=device, mask="spans-by-head")
    expected = run(hstu_attention, batch)["out"]
    wide = torch.zeros(2, 45, 7, dtype=torch.int32, device=device)
    wide[:, :, 2:6] = batch.mask.row_spans
    batch.mask = Mask.from_row_spans(wide[:, :, 2:6])
    assert torch.equal(run(hstu_attention, batch)["out"], expected)

    batch = make_batch(lengths, dtype=BF16, device=device, mask="func-9-by-head")
    expected = run(hstu_attention, batch)["out"]
    wide = torch.zeros(2, 10, 60, dtype=torch.int32, device=device)
    wide[:, :9, 3:48] = batch.mask.func
    batch.mask = Mask.from_func(wide[:, :9, 3:48])
    assert torch.equal(run(hstu_attention, batch)["out"], expected)


def test_tables_may_be_strided(device):
    batch = make_batch([41], heads=4, dtype=BF16, device=device, mask="causal")
    wide = torch.randn(4, 30, device=device)
    times = torch.randint(0, 10**6, (41,), device=device)
    batch = batch.with_bias(RelativeBias(wide[::2, :21], wide[1:3, 5:], times))
    check_against_reference(hstu_attention, batch)


@pytest.mark.parametrize("steps", [(1, 2), (3, 1)], ids=["heads", "batch"])
def test_rab_of_any_stride(device, steps):
    batch = make_batch([21, 17], heads=4, dtype=BF16, device=device, mask="causal")
    rab = torch.randn(6, 8, 23, 25, dtype=BF16, device=device)
    rab = rab[:: steps[0], :: steps[1]][:2, :4, 1:22, 3:24]
    check_against_reference(hstu_attention, batch.with_bias(DenseBias(rab)))


def test_one_rab_for_every_sequence_and_head(device):
    """A rab of stride 0 has a gradient of the expanded shape, which autograd sums."""
    batch = make_batch([21, 17], heads=4, dtype=BF16, device=device, mask="causal")
    one = torch.randn(1, 1, 21, 21, dtype=BF16, device=device)
    check_against_reference(hstu_attention, batch.with_bias(DenseBias(one.expand(2, 2, 21, 21))))


# ---------------------------------------------------------------------------------------------
# Preallocated outputs
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [None, "rab-1-head", "rab-strided", "position-time"])
@pytest.mark.parametrize("used", [False, True], ids=["all-rows", "seqused"])
def test_out_ops_write_everything_and_nothing_else(deterministic, device, bias, used):
    batch = strided_batch(device, mask="local-context-target", bias=bias)
    if used:
        batch.seqused_q = torch.tensor([31, 0, 9], dtype=torch.int32, device=device)
        batch.seqused_k = torch.tensor([50, 0, 9], dtype=torch.int32, device=device)
    dout = random_dout(batch)
    expected = run(hstu_attention, batch, dout)

    # Every output is part of a larger buffer of NaN, of which nothing else may change.
    buffers: dict[str, torch.Tensor] = {}

    def room(name: str, like: torch.Tensor) -> torch.Tensor:
        shape = [size + 2 for size in like.shape]
        buffers[name] = torch.full(shape, float("nan"), dtype=like.dtype, device=device)
        return buffers[name][tuple(slice(1, 1 + size) for size in like.shape)]

    out = room("out", expected["out"])
    raw_ops.forward_out(batch, out)
    gradients = {name: room(name, expected[name]) for name in expected if name.startswith("d")}
    for name in ("dpos_weight", "dts_weight"):
        if name in gradients:
            gradients[name] = torch.full_like(expected[name], float("nan"), dtype=torch.float32)
            del buffers[name]
    raw_ops.backward_out(batch, dout, gradients)

    assert torch.equal(out, expected["out"])
    for name, gradient in gradients.items():
        assert torch.equal(gradient.to(expected[name].dtype), expected[name]), name
    for name, buffer in buffers.items():
        assert buffer.isnan().sum() == buffer.numel() - expected[name].numel(), name


def test_gradients_in_one_packed_buffer(deterministic, device):
    batch = make_batch([33, 0, 64], heads=2, dtype=BF16, device=device, mask="context-target")
    dout = random_dout(batch)
    expected = run(hstu_attention, batch, dout)
    dqkv = torch.full((97, 3, 2, 32), float("nan"), dtype=BF16, device=device)
    dq, dk, dv = dqkv.unbind(1)
    raw_ops.backward_out(batch, dout, {"dq": dq, "dk": dk, "dv": dv})
    for n, name in enumerate(("dq", "dk", "dv")):
        assert torch.equal(dqkv[:, n], expected[name])


@pytest.mark.parametrize("mask", ["full", "local", "context-target", "spans", "func-5"])
def test_drab_is_zero_wherever_nothing_is_seen(device, mask):
    batch = make_batch([40, 11], [25, 3], dtype=BF16, device=device, mask=mask, bias="rab")
    dout = random_dout(batch)
    drab = torch.full_like(batch.bias.rab, float("nan"))
    outputs = {"dq": torch.empty_like(batch.q), "dk": torch.empty_like(batch.k)}
    outputs["dv"] = torch.empty_like(batch.v)
    raw_ops.backward_out(batch, dout, {**outputs, "drab": drab})
    assert torch.isfinite(drab).all()
    assert drab.any()
    assert not drab[0, :, :15].any()
    assert not drab[1, :, :8].any()
    assert not drab[1, :, :, 11:].any()


def test_gradients_that_are_not_asked_for_are_empty(device):
    batch = make_batch([9], dtype=BF16, device=device, bias="rab")
    *_, drab, dpos, dts = raw_ops.backward(
        batch, random_dout(batch), has_drab=False, has_dtables=True
    )
    assert (drab.numel(), dpos.numel(), dts.numel()) == (0, 0, 0)


def test_gradients_of_tables_that_there_are_not_are_empty(device):
    batch = make_batch([9], dtype=BF16, device=device, bias="position")
    *_, drab, dpos, dts = raw_ops.backward(
        batch, random_dout(batch), has_drab=False, has_dtables=True
    )
    assert (drab.numel(), dts.numel()) == (0, 0)
    assert dpos.shape == batch.bias.pos_weight.shape
    assert dpos.dtype == torch.float32


# ---------------------------------------------------------------------------------------------
# Rows that do not count
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MASK_NAMES)
def test_what_is_past_seqused_never_matters(deterministic, device, name):
    lengths_q, lengths_k = [20, 70, 9], [66, 70, 30]
    used_q, used_k = [13, 0, 9], [60, 65, 9]
    batch = make_batch(
        lengths_k,
        lengths_q,
        dtype=BF16,
        device=device,
        mask=make_mask(name, used_k, lengths_q, device=device),
        bias="rab",
        seqused_q=torch.tensor(used_q, device=device),
        seqused_k=torch.tensor(used_k, device=device),
    )
    dout = random_dout(batch)
    clean = run(hstu_attention, batch, dout)
    dirty_dout = dout.clone()
    for b in range(3):
        q_end, k_end = int(batch.cu_seqlens_q[b + 1]), int(batch.cu_seqlens_k[b + 1])
        q_rest = slice(q_end - lengths_q[b] + used_q[b], q_end)
        k_rest = slice(k_end - lengths_k[b] + used_k[b], k_end)
        poison(batch.q[q_rest], batch.k[k_rest], batch.v[k_rest], dirty_dout[q_rest])
        poison(batch.bias.rab[b, :, used_k[b] :], batch.bias.rab[b, :, :, used_k[b] :])
        if batch.mask.row_spans is not None:
            poison(batch.mask.row_spans[..., q_rest, :])
        if batch.mask.func is not None:
            poison(batch.mask.func[..., q_rest])
    with poisoned_memory(device):
        dirty = run(hstu_attention, batch, dirty_dout)
    for key, value in clean.items():
        assert torch.equal(value, dirty[key]), key
    for b in range(3):
        q_end, k_end = int(batch.cu_seqlens_q[b + 1]), int(batch.cu_seqlens_k[b + 1])
        assert not dirty["out"][q_end - lengths_q[b] + used_q[b] : q_end].any()
        assert not dirty["dq"][q_end - lengths_q[b] + used_q[b] : q_end].any()
        assert not dirty["dk"][k_end - lengths_k[b] + used_k[b] : k_end].any()
        assert not dirty["dv"][k_end - lengths_k[b] + used_k[b] : k_end].any()


@pytest.mark.parametrize("bias", ["rab", "position-row-time"])
def test_seqused_against_the_reference(device, bias):
    batch = make_batch(
        [66, 70, 30],
        [20, 70, 9],
        dtype=BF16,
        device=device,
        mask=make_mask("min-full-context-target", [60, 65, 9], device=device),
        bias=bias,
        seqused_q=torch.tensor([13, 0, 9], device=device),
        seqused_k=torch.tensor([60, 65, 9], device=device),
    )
    check_against_reference(hstu_attention, batch)


def test_rows_of_no_sequence_are_zero(deterministic, device):
    """The first offset may be above 0 and the last below the total."""
    batch = make_batch([30, 20], dtype=BF16, device=device, mask="causal")
    dout = random_dout(batch)
    expected = run(hstu_attention, batch, dout)
    padded = replace(
        batch,
        q=torch.nn.functional.pad(batch.q, (0, 0, 0, 0, 5, 9), value=float("nan")),
        k=torch.nn.functional.pad(batch.k, (0, 0, 0, 0, 3, 2), value=float("nan")),
        v=torch.nn.functional.pad(batch.v, (0, 0, 0, 0, 3, 2), value=float("nan")),
        cu_seqlens_q=batch.cu_seqlens_q + 5,
        cu_seqlens_k=batch.cu_seqlens_k + 3,
    )
    with poisoned_memory(device):
        result = run(
            hstu_attention, padded, torch.nn.functional.pad(dout, (0, 0, 0, 0, 5, 9), value=1e4)
        )
    for name, begin in (("out", 5), ("dq", 5), ("dk", 3), ("dv", 3)):
        assert torch.equal(result[name][begin : begin + 50], expected[name])
        result[name][begin : begin + 50] = 0
        assert not result[name].any(), name


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("where", ["q", "k", "v", "dout", "rab"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
def test_nan_and_inf_stay_in_their_sequence(deterministic, device, where, value, dtype):
    if device == "cuda":
        dtype = BF16
    lengths = [13, 70, 40]
    batch = make_batch(lengths, dtype=dtype, device=device, mask="causal", bias="rab")
    dout = random_dout(batch)
    clean = run(hstu_attention, batch, dout)
    begin, end = 13, 83
    if where == "rab":
        batch.bias.rab[1, :, 5] = value
    else:
        {"q": batch.q, "k": batch.k, "v": batch.v, "dout": dout}[where][begin + 3] = value
    dirty = run(hstu_attention, batch, dout)
    changed = 0
    for name, tensor in clean.items():
        rows = slice(1, 2) if name == "drab" else slice(begin, end)
        changed += not torch.isfinite(dirty[name][rows]).all()
        dirty[name][rows] = 0
        tensor[rows] = 0
        assert torch.equal(dirty[name], tensor), name
    assert changed, "nothing was poisoned"


# ---------------------------------------------------------------------------------------------
# Determinism
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [None, "rab-1-head", "position-time"])
def test_equal_inputs_give_equal_bits(device, bias):
    lengths = [900, 3, 0, 211, 64, 700]
    batch = make_batch(lengths, dtype=BF16, device=device, mask="context-target", bias=bias)
    dout = random_dout(batch)
    first = run(hstu_attention, batch, dout, deterministic=True)
    for _ in range(4):
        again = run(hstu_attention, batch, dout, deterministic=True)
        for name, value in first.items():
            assert torch.equal(value, again[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
def test_the_number_of_threads_does_not_matter(dtype):
    batch = make_batch(
        [900, 3, 0, 211, 64, 700], dtype=dtype, mask="context-target", bias="position-time"
    )
    dout = random_dout(batch)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 7):
            torch.set_num_threads(count)
            results.append(run(hstu_attention, batch, dout))
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        for name, value in results[0].items():
            assert torch.equal(value, result[name]), name


def test_a_sequence_does_not_depend_on_its_batch(device):
    lengths = [130, 40, 300]
    batch = make_batch(lengths, dtype=BF16, device=device, mask="causal", scaling_seqlen=100)
    together = run(hstu_attention, batch)["out"].split(lengths)
    for b, length in enumerate(lengths):
        rows = slice(sum(lengths[:b]), sum(lengths[: b + 1]))
        alone = replace(
            batch,
            q=batch.q[rows],
            k=batch.k[rows],
            v=batch.v[rows],
            cu_seqlens_q=offsets([length], device),
            cu_seqlens_k=offsets([length], device),
        )
        assert torch.equal(run(hstu_attention, alone)["out"], together[b])


# ---------------------------------------------------------------------------------------------
# Large tensors
# ---------------------------------------------------------------------------------------------


def test_offsets_beyond_two_to_the_31_elements():
    """Rows may be far apart, as strides and offsets are 64-bit; nothing between is touched."""
    rows, heads, dim = 8, 2, 32
    stride = 2**29
    # Untouched pages of an anonymous mapping cost nothing.
    storage = torch.UntypedStorage(2 * (stride * (rows - 1) + heads * dim))
    wide = torch.empty(0, dtype=BF16).set_(storage, 0, (rows, heads, dim), (stride, dim, 1))
    assert wide.stride(0) * (rows - 1) > 2**31
    batch = make_batch([5, 3], heads=heads, dim=dim, dtype=BF16, mask="causal")
    expected = run(hstu_attention, batch)["out"]
    wide.copy_(batch.q)
    assert torch.equal(run(hstu_attention, replace(batch, q=wide))["out"], expected)
    wide.copy_(batch.k)
    assert torch.equal(run(hstu_attention, replace(batch, k=wide))["out"], expected)
    raw_ops.forward_out(batch, wide)
    assert torch.equal(wide, expected)
    dout = random_dout(batch)
    gradients = run(hstu_attention, batch, dout)
    outputs = {"dq": torch.empty_like(batch.q), "dk": wide, "dv": torch.empty_like(batch.v)}
    raw_ops.backward_out(batch, dout, outputs)
    assert torch.equal(wide, gradients["dk"])


@pytest.mark.gpu
@pytest.mark.gpu_memory(9)  # q and the output take 4.0 GiB each
def test_more_than_two_to_the_31_elements():
    total, length = 2**22 + 4096, 4096
    lengths = [length] * (total // length)
    shape = (total, 4, 128)
    q = torch.empty(shape, dtype=BF16, device="cuda").uniform_(-1, 1)
    assert q.numel() > 2**31
    cu_seqlens = offsets(lengths, "cuda")
    out = hstu_attention(
        q, q, q, cu_seqlens_q=cu_seqlens, max_seqlen_q=length, mask=Mask.causal(), alpha=0.1
    )
    last = q[-length:]
    expected = hstu_attention(
        last,
        last,
        last,
        cu_seqlens_q=offsets([length], "cuda"),
        max_seqlen_q=length,
        mask=Mask.causal(),
        alpha=0.1,
    )
    assert torch.equal(out[-length:], expected)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["baseline", "avx2", "avx512"])
@pytest.mark.parametrize("head_dim", [56, 64])
def test_cpu_results_that_no_cache_holds_equal_those_of_parts(
    level: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors of more than 8 MB are stored past the caches if rows are aligned."""
    monkeypatch.setenv("HSTU_ATTN_CPU_ISA", level)
    count, length, heads = 640, 32, 2
    shape = (count * length, heads, head_dim)
    assert math.prod(shape) * 4 > 8 << 20 > math.prod(shape) * 2

    def results(part: slice) -> list[torch.Tensor]:
        leaves = [x[part].clone().requires_grad_() for x in inputs]
        offsets = torch.arange(0, leaves[0].shape[0] + 1, length)
        out = hstu_attention(*leaves, cu_seqlens_q=offsets, max_seqlen_q=length, mask=Mask.causal())
        return [out.detach(), *torch.autograd.grad(out, leaves, dout[part])]

    inputs, dout = torch.randn(3, *shape), torch.randn(shape)
    half = count // 2 * length
    try:
        whole = results(slice(None))
    except ValueError as error:
        if "a level that this processor supports" not in str(error):
            raise
        pytest.skip(f"this processor has no {level}")
    parts = zip(results(slice(half)), results(slice(half, None)), strict=True)
    for found, part in zip(whole, parts, strict=True):
        assert torch.equal(found, torch.cat(part))
