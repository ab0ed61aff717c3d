"""Tests of the operators in the dispatcher: schemas, fake kernels, autograd, opcheck."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hstu_attn
from hstu_attn import hstu_attention, ops
from hstu_attn.call import AttentionCall
from hstu_attn.paged import quantize_rows
from hstu_attn.testing import Batch, make_batch, make_paged_batch, run
from tests.helpers import raw_ops

LIBRARY = torch.ops.hstu_attn
CASES = [
    ("causal", None),
    ("local-context-target", "rab-1-head"),
    ("spans-by-head", "rab-strided"),
    ("func-5-causal", "position-time"),
    ("min-full", "position-row-time"),
]
IDS = [f"{mask}-{bias or 'no-bias'}" for mask, bias in CASES]


def batch_of(mask: str, bias: str | None, *, requires_grad: bool = False) -> Batch:
    batch = make_batch([9, 0, 70], [5, 0, 70], dim=16, dim_v=24, mask=mask, bias=bias)
    if requires_grad:
        leaves = {n: t.clone().requires_grad_() for n, t in batch.differentiable().items()}
        batch = batch.with_tensors(leaves)
    return batch


def dout_of(batch: Batch) -> torch.Tensor:
    return torch.randn(batch.q.shape[0], 2, batch.v.shape[2])


# ---------------------------------------------------------------------------------------------
# opcheck
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "bias"), CASES, ids=IDS)
def test_opcheck_forward(mask, bias):
    batch = batch_of(mask, bias, requires_grad=True)
    arguments = raw_ops.arguments(batch, paged=True)
    torch.library.opcheck(LIBRARY.hstu_varlen_fwd.default, (), arguments)


# NOTE: torch compares the arguments that an operator must not change, and cannot compare e4m3.
FP8_CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_opcheck_forward_paged(fp8):
    batch = make_paged_batch([20, 3], [4, 1], [2, 0], dim=16, fp8=fp8)
    arguments = raw_ops.arguments(batch, paged=True)
    checks = {"test_utils": FP8_CHECKS} if fp8 else {}
    torch.library.opcheck(LIBRARY.hstu_varlen_fwd.default, (), arguments, **checks)


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_opcheck_append(fp8):
    batch = make_paged_batch([20, 3], [4, 1], [2, 0], dim=16)
    k, v = torch.randn(2, *batch.k.shape)
    pages = batch.paged_kv
    cache, scales = pages.kv_cache.nan_to_num(), None
    if fp8:
        cache, scales = quantize_rows(cache)
    arguments = (
        *(k, v, cache, pages.page_offsets, pages.page_ids),
        *(batch.cu_seqlens_q, batch.cu_seqlens_k, batch.mask.num_targets, scales),
    )
    checks = {"test_utils": FP8_CHECKS} if fp8 else {}
    torch.library.opcheck(LIBRARY.append_paged_kv.default, arguments, **checks)


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "bias"), CASES, ids=IDS)
def test_opcheck_forward_out(mask, bias):
    batch = batch_of(mask, bias)
    arguments = raw_ops.arguments(batch, paged=True) | {"out": dout_of(batch)}
    torch.library.opcheck(LIBRARY.hstu_varlen_fwd_out.default, (), arguments)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [False, True], ids=["inputs", "inputs-and-biases"])
@pytest.mark.parametrize(("mask", "bias"), CASES, ids=IDS)
def test_opcheck_backward(mask, bias, wanted):
    batch = batch_of(mask, bias)
    arguments = {
        "dout": dout_of(batch),
        **raw_ops.arguments(batch, paged=False),
        "has_drab": wanted and bias is not None and bias.startswith("rab"),
        "has_dtables": wanted,
    }
    torch.library.opcheck(LIBRARY.hstu_varlen_bwd.default, (), arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "bias"), CASES, ids=IDS)
def test_opcheck_backward_out(mask, bias):
    batch = batch_of(mask, bias)
    gradients: dict[str, Any] = dict.fromkeys(("drab", "dpos_weight", "dts_weight"))
    gradients |= {f"d{n}": torch.zeros(t.shape) for n, t in batch.differentiable().items()}
    arguments = {"dout": dout_of(batch), **raw_ops.arguments(batch, paged=False), **gradients}
    torch.library.opcheck(LIBRARY.hstu_varlen_bwd_out.default, (), arguments)


# ---------------------------------------------------------------------------------------------
# Schemas
# ---------------------------------------------------------------------------------------------


def schema(name: str) -> torch.FunctionSchema:
    return getattr(LIBRARY, name).default._schema


def test_schemas_mark_what_they_write():
    written = {
        name: [a.name for a in schema(name).arguments if a.alias_info and a.alias_info.is_write]
        for name in dir_of_library()
    }
    assert written == {
        "hstu_varlen_fwd": [],
        "hstu_varlen_fwd_out": ["out"],
        "hstu_varlen_bwd": [],
        "hstu_varlen_bwd_out": ["dq", "dk", "dv", "drab", "dpos_weight", "dts_weight"],
    }


def dir_of_library() -> list[str]:
    return ["hstu_varlen_fwd", "hstu_varlen_fwd_out", "hstu_varlen_bwd", "hstu_varlen_bwd_out"]


def test_lengths_are_symbolic_and_the_python_order_is_the_schemas():
    arguments = schema("hstu_varlen_fwd").arguments
    names = [argument.name for argument in arguments]
    differentiable = ["q", "k", "v", "rab", "pos_weight", "ts_weight"]
    paged = ["kv_cache", "page_offsets", "page_ids", "last_page_lens", "kv_scales"]
    assert names == [*differentiable, *AttentionCall._fields, *paged]
    assert names[ops._GRADIENTS] == differentiable
    assert names[ops._KV_CACHE] == "kv_cache"
    text = str(schema("hstu_varlen_fwd"))
    symbolic = {name for name in names if f"SymInt {name}" in text}
    assert symbolic == {
        "max_seqlen_q",
        "max_seqlen_k",
        "scaling_seqlen",
        "target_group_size",
        "window_left",
        "window_right",
        "min_full_attn_seq_len",
    }
    shared = [a.name for a in schema("hstu_varlen_bwd").arguments]
    assert shared[1:-2] == names[: ops._KV_CACHE]


# ---------------------------------------------------------------------------------------------
# Autograd
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mask", "bias"), CASES, ids=IDS)
def test_the_operator_itself_has_gradients(mask, bias):
    """The eager function's gradients and the operator's are equal."""
    batch = batch_of(mask, bias, requires_grad=True)
    dout = dout_of(batch)
    eager = run(hstu_attention, batch, dout)
    leaves = batch.differentiable()
    direct = torch.autograd.grad(raw_ops.forward(batch), list(leaves.values()), dout)
    for name, gradient in zip(leaves, direct, strict=True):
        assert gradient.dtype == leaves[name].dtype
        assert torch.equal(gradient, eager[f"d{name}"]), name


@pytest.mark.parametrize("wanted", ["q", "k", "v", "rab"])
def test_gradients_of_one_input_alone(wanted):
    """A single gradient has the same values; without the rab gradient, sums may be reordered."""
    batch = batch_of("causal", "rab-1-head")
    dout = dout_of(batch)
    expected = run(hstu_attention, batch, dout)[f"d{wanted}"]
    leaf = batch.differentiable()[wanted].requires_grad_()
    for function in (
        lambda: hstu_attention(batch.q, batch.k, batch.v, **batch.options()),
        lambda: raw_ops.forward(batch),
    ):
        (gradient,) = torch.autograd.grad(function(), leaf, dout)
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("wanted", ["pos_weight", "ts_weight"])
def test_gradients_of_one_table_alone(wanted):
    batch = batch_of("causal", "position-time")
    dout = dout_of(batch)
    expected = run(hstu_attention, batch, dout)[f"d{wanted}"]
    leaf = batch.differentiable()[wanted].requires_grad_()
    out = hstu_attention(batch.q, batch.k, batch.v, **batch.options())
    (gradient,) = torch.autograd.grad(out, leaf, dout)
    assert torch.equal(gradient, expected)


def test_tables_of_q_dtype_get_gradients_of_theirs():
    batch = make_batch([30], dtype=torch.bfloat16, mask="causal", bias="position-time")
    result = run(hstu_attention, batch, torch.ones_like(batch.v))
    assert result["dpos_weight"].dtype == torch.bfloat16
    assert result["dts_weight"].dtype == torch.bfloat16


def test_nothing_is_saved_without_gradients():
    batch = batch_of("causal", None, requires_grad=True)
    out = hstu_attention(batch.q, batch.k, batch.v, **batch.options())
    assert out.requires_grad
    with torch.no_grad():
        out = hstu_attention(batch.q, batch.k, batch.v, **batch.options())
    assert out.grad_fn is None
    with torch.inference_mode():
        assert hstu_attention(batch.q, batch.k, batch.v, **batch.options()).is_inference()


def test_only_inputs_and_bias_are_saved():
    batch = batch_of("context-target", "rab", requires_grad=True)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hstu_attention(batch.q, batch.k, batch.v, **batch.options())
    inputs = {t.data_ptr() for t in (batch.q, batch.k, batch.v, batch.bias.rab)}
    assert {t.data_ptr() for t in saved} == inputs
    assert len(saved) == 4


def test_activation_checkpointing():
    batch = batch_of("causal", "position-time", requires_grad=True)
    dout = dout_of(batch)
    leaves = batch.differentiable()

    def call(q: torch.Tensor) -> torch.Tensor:
        return hstu_attention(q, batch.k, batch.v, **batch.options())

    plain = torch.autograd.grad(call(batch.q), list(leaves.values()), dout)
    out = torch.utils.checkpoint.checkpoint(call, batch.q, use_reentrant=False)
    for first, second in zip(
        plain, torch.autograd.grad(out, list(leaves.values()), dout), strict=True
    ):
        assert torch.equal(first, second)


def test_input_changed_before_the_backward_is_noticed():
    batch = batch_of("causal", None, requires_grad=True)
    doubled = batch.q * 2
    out = hstu_attention(doubled, batch.k, batch.v, **batch.options())
    doubled.mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_autocast_leaves_dtypes_alone():
    batch = batch_of("causal", None, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert hstu_attention(batch.q, batch.k, batch.v, **batch.options()).dtype == torch.float32


def test_fake_tensors_have_the_shapes_of_real_ones():
    """Eager calls work under FakeTensorMode, which tools that estimate memory use."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    batch = batch_of("context-target", "position-time")
    dout = dout_of(batch)
    real = run(hstu_attention, batch, dout)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        leaves = {n: mode.from_tensor(t) for n, t in batch.differentiable().items()}
        fake = run(hstu_attention, batch.with_tensors(leaves), mode.from_tensor(dout))
    for name, value in real.items():
        assert fake[name].shape == value.shape, name
        assert fake[name].dtype == value.dtype, name
        assert fake[name].stride() == value.stride(), name


# ---------------------------------------------------------------------------------------------
# The package
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_import_needs_torch_alone():
    """The operator runs where all packages except torch and its dependencies are hidden."""
    import subprocess
    import sys

    script = """
import sys
for name in ("numpy", "scipy", "pandas", "matplotlib", "tqdm", "fbgemm_gpu", "torchrec", "triton"):
    sys.modules[name] = None
import torch
import hstu_attn
offsets = torch.tensor([0, 3])
q = torch.ones(3, 1, 8)
print(tuple(hstu_attn.hstu_attention(q, q, q, cu_seqlens_q=offsets, max_seqlen_q=3).shape))
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == "(3, 1, 8)"


def test_public_names():
    for name in hstu_attn.__all__:
        assert getattr(hstu_attn, name) is not None, name
        assert name in dir(hstu_attn)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = hstu_attn.nonsense
    assert hstu_attn.__version__ == hstu_attn._version.__version__


def test_docstring_example():
    """The example in the docstring of `hstu_attention` runs as it is."""
    source = hstu_attention.__doc__.split("Example:")[1]
    lines = [line.strip()[4:] for line in source.splitlines() if line.strip()[:3] in (">>>", "...")]
    scope = {"torch": torch, "hstu_attention": hstu_attention, "Mask": hstu_attn.Mask}
    exec("\n".join(lines), scope)
    assert scope["out"].shape == (8, 2, 32)
