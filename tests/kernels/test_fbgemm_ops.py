"""Tests of FBGEMM's raw operators: schemas, calls, numbers, and loading them with FBGEMM itself."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import hstu_attn.compat.fbgemm  # noqa: F401
from hstu_attn import DenseBias, Mask, hstu_attn_varlen_func
from hstu_attn.testing import (
    Batch,
    assert_matches_reference,
    check_against_reference,
    make_batch,
    make_paged_batch,
)

BF16 = torch.bfloat16
fbgemm = torch.ops.fbgemm
VERSIONS = ["80", "90"]

# The declarations of hstu_ops_gpu.cpp in pytorch/FBGEMM, fbgemm_gpu/experimental/hstu/src.
SEQUENCES = [
    *("Tensor cu_seqlens_q", "Tensor cu_seqlens_k", "Tensor? seqused_q", "Tensor? seqused_k"),
    *("int max_seqlen_q", "int max_seqlen_k", "int scaling_seqlen=-1"),
]
MASK = [
    *("Tensor? num_contexts=None", "Tensor? num_targets=None", "int target_group_size=1"),
    *("int window_size_left=-1", "int window_size_right=-1", "float alpha=1."),
]
DECLARED = {
    "hstu_varlen_fwd_80": [
        *("Tensor q", "Tensor k", "Tensor v", *SEQUENCES, *MASK),
        *("Tensor? rab=None", "Tensor? func=None", "Tensor? kv_cache=None"),
        *("Tensor? page_offsets=None", "Tensor? page_ids=None", "Tensor? last_page_lens=None"),
    ],
    "hstu_varlen_bwd_80": [
        *("Tensor dout", "Tensor q", "Tensor k", "Tensor v", *SEQUENCES),
        *("Tensor? dq=None", "Tensor? dk=None", "Tensor? dv=None", *MASK),
        *("Tensor? rab=None", "bool has_drab=False", "Tensor? func=None"),
        "bool deterministic=False",
    ],
    "hstu_varlen_fwd_90": [
        *("Tensor q", "Tensor k", "Tensor v", *SEQUENCES, *MASK),
        *("Tensor? rab=None", "Tensor? func=None", "int quant_mode=-1", "int output_dtype=-1"),
        *("Tensor? vt=None", "Tensor? cu_seqlens_vt_descale=None", "Tensor? q_descale=None"),
        *("Tensor? k_descale=None", "Tensor? v_descale=None", "Tensor? vt_descale=None"),
        "Tensor? cu_seqlens_q_block_descale=None",
        "Tensor? cu_seqlens_kv_block_descale=None",
    ],
    "hstu_varlen_bwd_90": [
        *("Tensor dout", "Tensor? dout_t", "Tensor q", "Tensor? q_t", "Tensor k", "Tensor? k_t"),
        *("Tensor v", *SEQUENCES),
        *("Tensor? dq_=None", "Tensor? dk_=None", "Tensor? dv_=None", *MASK),
        *("int quant_mode=-1", "Tensor? rab=None", "bool has_drab=False", "Tensor? func=None"),
        *("Tensor? q_descale=None", "Tensor? qt_descale=None", "Tensor? k_descale=None"),
        *("Tensor? kt_descale=None", "Tensor? v_descale=None", "Tensor? do_descale=None"),
        *("Tensor? dot_descale=None", "Tensor? cu_seqlens_qt_descale=None"),
        "Tensor? cu_seqlens_kt_descale=None",
        "Tensor? cu_seqlens_q_block_descale=None",
        "Tensor? cu_seqlens_kv_block_descale=None",
        *("int output_dtype=-1", "bool deterministic=False"),
    ],
}


@pytest.mark.parametrize("name", DECLARED)
def test_schemas_are_those_of_fbgemm(name):
    returns = ", ".join(["Tensor"] * (2 if "fwd" in name else 4))
    expected = f"fbgemm::{name}({', '.join(DECLARED[name])}) -> ({returns})"
    declared = torch._C.parse_schema(expected)
    assert str(getattr(fbgemm, name).default._schema) == str(declared)
    assert [argument.split()[-1].split("=")[0] for argument in DECLARED[name]] == [
        argument.name for argument in declared.arguments
    ]


# ---------------------------------------------------------------------------------------------
# Calls
# ---------------------------------------------------------------------------------------------


def sequences(batch: Batch) -> tuple[Any, ...]:
    return (
        batch.cu_seqlens_q,
        batch.cu_seqlens_k,
        batch.seqused_q,
        batch.seqused_k,
        batch.max_seqlen_q,
        batch.max_seqlen_k,
        batch.scaling_seqlen,
    )


def mask_arguments(batch: Batch) -> tuple[Any, ...]:
    mask = batch.mask
    left, right = mask.window_size
    return (
        mask.num_contexts,
        mask.num_targets,
        mask.target_group_size,
        left,
        0 if mask.func_causal else right,
        batch.alpha,
    )


def rab_of(batch: Batch) -> Tensor | None:
    return batch.bias.rab if isinstance(batch.bias, DenseBias) else None


def code_of(dtype: torch.dtype) -> int:
    return {BF16: 0, torch.float16: 1}.get(dtype, -1)


def forward(version: str, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Passes all arguments by position, as FBGEMM's Python functions and recsys-examples do."""
    qkv = (batch.q, batch.k, batch.v)
    last = (rab_of(batch), batch.mask.func)
    if version == "90":
        fp8 = (-1, code_of(batch.q.dtype), *[None] * 8)
        return fbgemm.hstu_varlen_fwd_90(
            *qkv, *sequences(batch), *mask_arguments(batch), *last, *fp8
        )
    return fbgemm.hstu_varlen_fwd_80(
        *qkv, *sequences(batch), *mask_arguments(batch), *last, *[None] * 4
    )


def backward(
    version: str,
    batch: Batch,
    dout: Tensor,
    rab: Tensor | None,
    has_drab: bool,
    gradients: tuple[Tensor | None, ...] = (None, None, None),
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    q, k, v, mask = batch.q, batch.k, batch.v, mask_arguments(batch)
    if version == "90":
        return fbgemm.hstu_varlen_bwd_90(
            *(dout, None, q, None, k, None, v),
            *(*sequences(batch), *gradients, *mask, -1),
            *(rab, has_drab, batch.mask.func, *[None] * 11),
            *(code_of(dout.dtype), deterministic),
        )
    return fbgemm.hstu_varlen_bwd_80(
        *(dout, q, k, v, *sequences(batch), *gradients, *mask),
        *(rab, has_drab, batch.mask.func, deterministic),
    )


class Wrapper(torch.autograd.Function):
    """The raw operators as public libraries wrap them: the returned rab goes to the backward."""

    @staticmethod
    def forward(
        ctx: Any, version: str, batch: Batch, q: Tensor, k: Tensor, v: Tensor, rab: Tensor | None
    ) -> Tensor:
        batch = replace(batch, q=q, k=k, v=v, bias=None if rab is None else DenseBias(rab))
        out, padded = forward(version, batch)
        ctx.save_for_backward(q, k, v, padded)
        ctx.version, ctx.batch = version, batch
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, padded = ctx.saved_tensors
        batch = replace(ctx.batch, q=q, k=k, v=v)
        *gradients, drab = backward(ctx.version, batch, dout, padded, padded is not None)
        return None, None, *gradients, drab


def wrapped(version: str) -> Callable[..., Tensor]:
    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        batch = Batch(q, k, v, **options)
        return Wrapper.apply(version, batch, q, k, v, rab_of(batch))

    return call


# ---------------------------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("mask", ["full", "causal", "local", "context-target", "func-5"])
@pytest.mark.parametrize("bias", [None, "rab", "rab-1-head"])
def test_numbers(device, version, mask, bias):
    """The longest sequence has 70 keys, not a multiple of 8, so that rab is padded."""
    batch = make_batch([30, 0, 70, 1], dtype=BF16, device=device, mask=mask, bias=bias)
    check_against_reference(wrapped(version), batch)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("longest", [64, 70], ids=["aligned", "padded"])
def test_delta_queries_and_scaling(device, version, dtype, longest):
    batch = make_batch(
        [30, longest],
        [11, 20],
        dtype=dtype,
        device=device,
        mask="target",
        bias="rab",
        scaling_seqlen=17,
    )
    check_against_reference(wrapped(version), batch)


@pytest.mark.parametrize("version", VERSIONS)
def test_causal_func_and_seqused(device, version):
    seqused = torch.tensor([20, 64], dtype=torch.int32, device=device)
    batch = make_batch([30, 64], dtype=BF16, device=device, mask="func-3-causal", seqused_q=seqused)
    check_against_reference(wrapped(version), replace(batch, seqused_k=seqused))


@pytest.mark.parametrize("reused", [False, True], ids=["exact", "reused-buffers"])
def test_paged(device, reused):
    """NVIDIA's paged inference layer passes the page tables of the largest batch, and the longest
    new sequence as `max_seqlen_k`.
    """
    batch = make_paged_batch([20, 0, 33], [3, 5, 1], [2, 0, 4], dtype=BF16, device=device)
    max_seqlen_k = batch.max_seqlen_q if reused else batch.max_seqlen_k
    lengths = sequences(replace(batch, max_seqlen_k=max_seqlen_k))

    def table(values: Tensor) -> Tensor:
        return torch.cat([values, values.new_full((7,), -1)]) if reused else values

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        pages = options["paged_kv"]
        tables = (pages.page_offsets, pages.page_ids, pages.last_page_lens)
        out, rab = fbgemm.hstu_varlen_fwd_80(
            *(q, k, v, *lengths, *mask_arguments(batch), None, None),
            *(pages.kv_cache, *map(table, tables)),
        )
        assert rab is None
        return out

    check_against_reference(call, batch, backward=False)


def test_calls_of_the_public_libraries(device):
    """NVIDIA's fused layer omits the last arguments of the forward."""
    batch = make_batch([30, 0, 70], dtype=BF16, device=device, mask="context-target")
    with torch.no_grad():
        expected = hstu_attn_varlen_func(
            *(batch.q, batch.k, batch.v, *sequences(batch), batch.mask.num_contexts),
            *(batch.mask.num_targets, batch.mask.target_group_size, (-1, 0), batch.alpha),
        )
    arguments = (batch.q, batch.k, batch.v, *sequences(batch), *mask_arguments(batch), None, None)
    for out, rab in (
        fbgemm.hstu_varlen_fwd_80(*arguments),
        fbgemm.hstu_varlen_fwd_90(*arguments, -1, 0),
        fbgemm.hstu_varlen_fwd_90(*arguments),
    ):
        assert torch.equal(out, expected)
        assert rab is None


@pytest.mark.parametrize("version", VERSIONS)
def test_gradients_are_written_where_they_belong(device, deterministic, version):
    batch = make_batch([30, 0, 70], dtype=BF16, device=device, mask="context-target", bias="rab")
    dout = torch.randn_like(batch.q)
    rab = rab_of(batch)
    rows, heads, dim = batch.q.shape
    wide = torch.full((rows, 4, heads, dim), 7.0, dtype=BF16, device=device)
    given = wide.unbind(1)[1:]
    *written, drab = backward(version, batch, dout, rab, True, given, deterministic=True)
    *fresh, drab_again = backward(version, batch, dout, rab, True)
    for tensor, other, place in zip(written, fresh, given, strict=True):
        assert tensor.data_ptr() == place.data_ptr()
        assert torch.equal(tensor, other)
        assert torch.equal(place, other)
    assert torch.equal(drab, drab_again)
    assert drab.shape == rab.shape
    assert torch.equal(wide[:, 0], torch.full_like(wide[:, 0], 7.0))
    # Only dk is given, and rab is padded, as the forward returns it.
    _, padded = forward(version, batch)
    assert padded.shape[-1] == 72
    assert torch.equal(padded[..., :70], rab)
    assert not padded[..., 70:].any()
    # NOTE: on sm90, this call may have other bits than those above: it alone has an unaligned rab,
    # for which the sm80 kernels run.
    dk = torch.full_like(batch.k, 7.0)
    dq, returned, dv, drab = backward(version, batch, dout, padded, False, (None, dk, None))
    assert returned.data_ptr() == dk.data_ptr()
    assert_matches_reference({"dq": dq, "dk": dk, "dv": dv}, batch, dout)
    assert drab is None


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("longest", [8, 9], ids=["aligned", "padded"])
def test_the_returned_rab_is_a_copy(version, longest):
    """The schema promises new tensors, on which compiled code relies."""
    batch = make_batch([longest], dtype=BF16, mask="causal", bias="rab")
    _, rab = forward(version, batch)
    assert torch.equal(rab[..., :longest], batch.bias.rab)
    assert rab.data_ptr() != batch.bias.rab.data_ptr()


@pytest.mark.parametrize("version", VERSIONS)
def test_calls_outside_an_autograd_function(version):
    """`requires_grad` of inputs has no effect, and the backward accepts the returned tensors."""
    batch = make_batch([9], dtype=BF16, mask="causal", bias="rab")
    expected, _ = forward(version, batch)
    wanted = backward(version, batch, expected, rab_of(batch), True)
    for tensor in (batch.q, batch.k, batch.v, batch.bias.rab):
        tensor.requires_grad_()
    out, rab = forward(version, batch)
    assert torch.equal(out, expected)
    for gradient, other in zip(backward(version, batch, out, rab, True), wanted, strict=True):
        assert torch.equal(gradient, other)


def test_clamped_as_the_python_function(device, deterministic):
    """An emptied sequence keeps its count of targets, and rows before the first key see nothing."""
    q, k, v = (torch.randn(rows, 2, 32, dtype=BF16, device=device) for rows in (9, 12, 12))
    offsets_q, offsets_k, targets = (
        torch.tensor(values, dtype=torch.int32, device=device)
        for values in ([0, 0, 4, 9], [0, 0, 9, 12], [3, 2, 7])
    )
    arguments = (q, k, v, offsets_q, offsets_k, None, None, 5, 9, -1)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = hstu_attn_varlen_func(*leaves, *arguments[3:], None, targets, 1, (-1, 0), 0.3)
    dout = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves, dout)
    for version in VERSIONS:
        batch = Batch(
            *(q, k, v, offsets_q, offsets_k, 5, 9, Mask((-1, 0), None, targets)), alpha=0.3
        )
        out, _ = forward(version, batch)
        assert torch.equal(out, expected)
        assert not out[4:6].any()
        gradients = backward(version, batch, dout, None, False)[:3]
        for gradient, other in zip(gradients, wanted, strict=True):
            assert torch.equal(gradient, other)


@pytest.mark.parametrize("version", VERSIONS)
def test_other_strides(version, device):
    """Like the Python function, the operators copy tensors with a strided last dimension."""
    batch = make_batch([30, 7], dtype=BF16, device=device, mask="causal")
    turned = {name: getattr(batch, name).mT.contiguous().mT for name in "qkv"}
    out, _ = forward(version, batch)
    dout = torch.randn_like(out)
    other, _ = forward(version, replace(batch, **turned))
    assert torch.equal(out, other)
    wanted = backward(version, batch, dout, None, False, deterministic=True)
    gradients = backward(
        version, replace(batch, **turned), dout.mT.contiguous().mT, None, False, deterministic=True
    )
    assert all(torch.equal(*pair) for pair in zip(gradients[:3], wanted[:3], strict=True))


# ---------------------------------------------------------------------------------------------
# What is refused
# ---------------------------------------------------------------------------------------------

FP8_ARGUMENTS = [
    (name, argument.split()[1].split("=")[0])
    for name, arguments in DECLARED.items()
    for argument in arguments
    if "descale" in argument or argument.split()[1].split("=")[0] in ("vt", "dout_t", "q_t", "k_t")
]


def named(name: str, batch: Batch, **changes: Any) -> Any:
    operator = getattr(fbgemm, name)
    required = {
        argument.name: None
        for argument in operator.default._schema.arguments
        if not argument.has_default_value()
    }
    values = {
        **required,
        **dict(zip("qkv", (batch.q, batch.k, batch.v), strict=True)),
        "cu_seqlens_q": batch.cu_seqlens_q,
        "cu_seqlens_k": batch.cu_seqlens_k,
        "max_seqlen_q": batch.max_seqlen_q,
        "max_seqlen_k": batch.max_seqlen_k,
        "window_size_right": 0,
    }
    if "bwd" in name:
        values["dout"] = torch.ones_like(batch.q)
    return operator(**{**values, **changes})


def test_how_many_arguments_fp8_has():
    """FBGEMM declares this many; the next test checks that each is refused."""
    assert len(FP8_ARGUMENTS) == 8 + 14


@pytest.mark.parametrize(("name", "argument"), FP8_ARGUMENTS)
def test_arguments_of_fp8(name, argument):
    batch = make_batch([9], dtype=BF16)
    with pytest.raises(NotImplementedError, match=rf"^{argument}: expected None.* got a tensor"):
        named(name, batch, **{argument: torch.ones(1)})


@pytest.mark.parametrize("name", ["hstu_varlen_fwd_90", "hstu_varlen_bwd_90"])
def test_quant_mode_and_output_dtype(name):
    batch = make_batch([9], dtype=BF16)
    for quant_mode in range(6):
        with pytest.raises(NotImplementedError, match=rf"^quant_mode: {quant_mode} .*FP8"):
            named(name, batch, quant_mode=quant_mode)
    with pytest.raises(ValueError, match=r"^quant_mode: expected .* got 9"):
        named(name, batch, quant_mode=9)
    for tensor in (named(name, batch)[0], named(name, batch, output_dtype=0)[0]):
        assert tensor.dtype == BF16
    for output_dtype in (1, 2, -2):
        with pytest.raises(NotImplementedError, match=rf"^output_dtype: .* got {output_dtype}$"):
            named(name, batch, output_dtype=output_dtype)


def test_bad_arguments():
    batch = make_batch([9], dtype=BF16)
    for name in ("page_offsets", "page_ids", "last_page_lens"):
        with pytest.raises(ValueError, match=rf"^{name}: expected None without kv_cache"):
            named("hstu_varlen_fwd_80", batch, **{name: torch.zeros(2, dtype=torch.int32)})
    for version in VERSIONS:
        with pytest.raises(ValueError, match=r"^rab: expected a tensor with has_drab=True"):
            named(f"hstu_varlen_bwd_{version}", batch, has_drab=True)
        for width in (8, 10, 17):
            with pytest.raises(ValueError, match=r"^rab: expected .* got "):
                named(f"hstu_varlen_bwd_{version}", batch, rab=torch.zeros(1, 2, 9, width))
        with pytest.raises(ValueError, match=r"^window_size: expected .* with func"):
            named(
                f"hstu_varlen_fwd_{version}",
                batch,
                func=torch.zeros(1, 3, 9, dtype=torch.int32),
                window_size_left=3,
            )
    with pytest.raises(ValueError, match=r"^dq: expected .* got "):
        named("hstu_varlen_bwd_80", batch, dq=torch.zeros(9, 2, 16, dtype=BF16))


# ---------------------------------------------------------------------------------------------
# Tracing
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("bias", [None, "rab"])
def test_operator_checks(version, bias):
    batch = make_batch([9, 4], dtype=torch.float32, mask="target", bias=bias)
    forward_op = getattr(fbgemm, f"hstu_varlen_fwd_{version}")
    backward_op = getattr(fbgemm, f"hstu_varlen_bwd_{version}")
    arguments = [batch.q, batch.k, batch.v, *sequences(batch), *mask_arguments(batch)]
    torch.library.opcheck(forward_op, (*arguments, rab_of(batch), None))
    gradients = [None, None, None]
    values = [batch.q, batch.q, batch.k, batch.v, *sequences(batch), *gradients]
    if version == "90":
        values[1:4] = [None, batch.q, None, batch.k, None, batch.v]
    values += mask_arguments(batch)
    options = {"rab": rab_of(batch), "has_drab": bias is not None}
    torch.library.opcheck(backward_op, tuple(values), options)


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_compiled(version):
    torch._dynamo.reset()
    batch = make_batch([30, 7], dtype=BF16, mask="target", bias="rab")

    def step(q: Tensor, k: Tensor, v: Tensor, rab: Tensor) -> Tensor:
        options = replace(batch, q=q, k=k, v=v, bias=None)
        out, padded = forward(version, replace(options, bias=DenseBias(rab * 2)))
        dq, _, _, drab = backward(version, options, out, padded, True)
        return out.float().sum() + dq.float().sum() + drab.float().sum()

    leaves = (batch.q, batch.k, batch.v, rab_of(batch))
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*leaves), step(*leaves))


class Layer(torch.nn.Module):
    def forward(self, q: Tensor, cu_seqlens: Tensor, targets: Tensor) -> Tensor:
        out, _ = fbgemm.hstu_varlen_fwd_80(
            *(q, q, q, cu_seqlens, cu_seqlens, None, None, 30, 30, -1),
            *(None, targets, 1, -1, 0, 0.3),
        )
        return out


def test_exported():
    batch = make_batch([30, 7], dtype=BF16, mask="target")
    arguments = (batch.q, batch.cu_seqlens_q, batch.mask.num_targets)
    rows = {0: torch.export.Dim("rows", min=2, max=4096)}
    program = torch.export.export(Layer(), arguments, dynamic_shapes=(rows, None, None))
    longer = (torch.cat([batch.q, batch.q[:5]]), *arguments[1:])
    assert torch.equal(program.module()(*longer), Layer()(*longer))


def test_a_traced_backward_into_given_tensors_is_refused():
    batch = make_batch([9], dtype=BF16, mask="causal")
    meta = replace(
        batch,
        **{
            name: getattr(batch, name).to("meta")
            for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
        },
    )
    out, _ = forward("80", meta)
    assert out.shape == batch.q.shape
    for version in VERSIONS:
        assert backward(version, meta, meta.q, None, False)[0].shape == batch.q.shape
        with pytest.raises(NotImplementedError, match=r"^dk: expected None in a traced call"):
            backward(version, meta, meta.q, None, False, (None, torch.empty_like(meta.k), None))


# ---------------------------------------------------------------------------------------------
# With FBGEMM installed
# ---------------------------------------------------------------------------------------------


def run(code: str) -> None:
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


USE = """
import torch
values = torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([3, 4]))
assert values.tolist() == [0, 3, 7], values
q = torch.randn(7, 1, 8)
out, rab = torch.ops.fbgemm.hstu_varlen_fwd_80(q, q, q, values, values, None, None, 4, 4)
assert out.shape == q.shape and rab is None
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("fbgemm_gpu") is None, reason="needs fbgemm_gpu")
@pytest.mark.parametrize(
    "imports",
    [
        "import fbgemm_gpu, hstu_attn.compat.fbgemm",
        "import hstu_attn.compat.fbgemm, fbgemm_gpu",
    ],
)
def test_beside_fbgemm_gpu(imports):
    run(f"{imports}\n{USE}")


@pytest.mark.slow
def test_nothing_is_registered_without_the_import():
    run(
        "import hstu_attn, torch\n"
        "from hstu_attn.compat import generative_recommenders\n"
        "assert not hasattr(torch.ops.fbgemm, 'hstu_varlen_fwd_80')"
    )


@pytest.mark.slow
def test_operators_of_fbgemm_stay():
    """An operator that exists already stays, and the others are added."""
    run(
        "import torch\n"
        "own = torch.library.Library('fbgemm', 'FRAGMENT')\n"
        "own.define('hstu_varlen_fwd_90(Tensor q) -> Tensor')\n"
        "own.impl('hstu_varlen_fwd_90', lambda q: q + 1, 'CPU')\n"
        "import hstu_attn.compat.fbgemm\n"
        "assert torch.ops.fbgemm.hstu_varlen_fwd_90(torch.zeros(1)).item() == 1\n"
        "schema = torch.ops.fbgemm.hstu_varlen_bwd_90.default._schema\n"
        "assert len(schema.arguments) == 40, schema\n"
    )


@pytest.mark.slow
def test_in_place_of_the_package_hstu():
    """The imports of TorchEasyRec and recsys-examples work unchanged."""
    run(
        "import hstu_attn, hstu_attn.compat.fbgemm as ours\n"
        "ours.install_as_hstu()\n"
        "ours.install_as_hstu()\n"
        "import hstu\n"
        "import hstu.hstu_ops_gpu\n"
        "from hstu import hstu_attn_varlen_func, hstu_attn_qkvpacked_func\n"
        "assert hstu_attn_varlen_func is hstu_attn.hstu_attn_varlen_func\n"
        "assert hstu.hstu_ops_gpu is ours\n"
    )


@pytest.mark.slow
def test_another_package_hstu_is_not_replaced(tmp_path):
    (tmp_path / "hstu").mkdir()
    (tmp_path / "hstu" / "__init__.py").write_text("")
    run(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import hstu_attn.compat.fbgemm as ours\n"
        "try:\n"
        "    ours.install_as_hstu()\n"
        "except RuntimeError as error:\n"
        "    assert 'hstu/__init__.py' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('no error')\n"
        "import hstu\n"
        "assert hstu is not ours\n"
    )
