"""Tests of bad input: a ValueError names the argument, what was expected and the value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import hstu_attn
from hstu_attn import DenseBias, Mask, RelativeBias, hstu_attention, ops
from hstu_attn.testing import make_batch
from tests.helpers import raw_ops

LENGTHS = [5, 0, 7]
TOTAL, HEADS, DIM = 12, 4, 16
LONGEST = 7


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def good() -> dict[str, Any]:
    """Returns valid arguments; each test changes one of them."""
    batch = make_batch(LENGTHS, heads=HEADS, dim=DIM, mask="causal")
    return {"q": batch.q, "k": batch.k, "v": batch.v, **batch.options()}


def relative(**changes: Any) -> dict[str, Any]:
    tables = {
        "pos_weight": torch.zeros(2, 9),
        "ts_weight": torch.zeros(1, 8),
        "timestamps": torch.zeros(TOTAL, dtype=torch.int64),
        "row_timestamps": None,
        "thresholds": None,
    }
    return {"bias": RelativeBias(**{**tables, **changes})}


def call(arguments: dict[str, Any]) -> torch.Tensor:
    return hstu_attention(**arguments)


def transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def test_the_arguments_that_are_spoilt_here_are_good():
    assert torch.isfinite(call(good())).all()
    assert torch.isfinite(call({**good(), **relative()})).all()


META = torch.device("meta")
FP32 = torch.zeros(TOTAL, HEADS, DIM)
RAB = torch.zeros(3, 2, LONGEST, LONGEST)
SPANS = torch.zeros(TOTAL, 4, dtype=torch.int32)
FUNC = torch.zeros(1, 3, TOTAL, dtype=torch.int32)

# The name in the message, and the changed arguments.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # q, k, v
    "q-missing": ("q", {"q": None}),
    "q-list": ("q", {"q": [[1.0]]}),
    "k-missing": ("k", {"k": None}),
    "v-missing": ("v", {"v": None}),
    "q-2d": ("q", {"q": FP32[0]}),
    "k-4d": ("k", {"k": FP32[None]}),
    "v-2d": ("v", {"v": FP32[0]}),
    "q-int": ("q", {"q": FP32.long()}),
    "k-dtype": ("k", {"k": FP32.bfloat16()}),
    "v-dtype": ("v", {"v": FP32.double()}),
    "k-device": ("k", {"k": FP32.to(META)}),
    "v-device": ("v", {"v": FP32.to(META)}),
    "k-heads": ("k", {"k": FP32[:, :2]}),
    "v-heads": ("v", {"v": FP32[:, :2]}),
    "k-head-dim": ("k", {"k": FP32[..., :8]}),
    "k-rows": ("k", {"k": FP32[:-1]}),
    "q-stride": ("q", {"q": transposed(FP32)}),
    "k-stride": ("k", {"k": transposed(FP32)}),
    "v-stride": ("v", {"v": transposed(FP32)}),
    "q-head-dim-12": ("q", {"q": torch.zeros(TOTAL, 4, 12), "k": torch.zeros(TOTAL, 4, 12)}),
    "q-head-dim-264": ("q", {"q": torch.zeros(TOTAL, 4, 264), "k": torch.zeros(TOTAL, 4, 264)}),
    "q-head-dim-0": ("q", {"q": FP32[..., :0], "k": FP32[..., :0]}),
    "v-head-dim-7": ("v", {"v": torch.zeros(TOTAL, 4, 7)}),
    "q-no-heads": ("q", {"q": FP32[:, :0], "k": FP32[:, :0], "v": FP32[:, :0]}),
    # Offsets and lengths
    "cu-missing": ("cu_seqlens_q", {"cu_seqlens_q": None, "cu_seqlens_k": ints(0, 12)}),
    "cu-list": ("cu_seqlens_q", {"cu_seqlens_q": [0, 5, 5, 12]}),
    "cu-float": ("cu_seqlens_q", {"cu_seqlens_q": torch.tensor([0.0, 5, 5, 12])}),
    "cu-2d": ("cu_seqlens_q", {"cu_seqlens_q": ints(0, 5, 5, 12)[None]}),
    "cu-empty": ("cu_seqlens_q", {"cu_seqlens_q": ints()}),
    "cu-device": ("cu_seqlens_q", {"cu_seqlens_q": ints(0, 5, 5, 12).to(META)}),
    "cu-strided": ("cu_seqlens_q", {"cu_seqlens_q": ints(0, 0, 5, 5, 5, 5, 12, 12)[::2]}),
    "cu-negative": ("cu_seqlens_q", {"cu_seqlens_q": ints(-1, 5, 5, 12)}),
    "cu-decreasing": ("cu_seqlens_q", {"cu_seqlens_q": ints(0, 5, 4, 12)}),
    "cu-beyond": ("cu_seqlens_q", {"cu_seqlens_q": ints(0, 5, 5, 13)}),
    "cu-k-decreasing": ("cu_seqlens_k", {"cu_seqlens_k": ints(0, 7, 6, 12)}),
    "cu-k-beyond": ("cu_seqlens_k", {"cu_seqlens_k": ints(0, 5, 5, 99)}),
    "cu-k-other-batch": ("cu_seqlens_k", {"cu_seqlens_k": ints(0, 5, 12)}),
    "cu-k-float": ("cu_seqlens_k", {"cu_seqlens_k": torch.zeros(4)}),
    "more-queries-than-keys": ("cu_seqlens_q", {"cu_seqlens_k": ints(0, 4, 4, 11)}),
    "max-q-short": ("max_seqlen_q", {"max_seqlen_q": 6}),
    "max-q-negative": ("max_seqlen_q", {"max_seqlen_q": -1}),
    "max-q-above-max-k": ("max_seqlen_q", {"max_seqlen_q": 9, "max_seqlen_k": 8}),
    "max-q-float": ("max_seqlen_q", {"max_seqlen_q": 7.5}),
    "max-q-missing": ("max_seqlen_q", {"max_seqlen_q": None}),
    "max-k-short": (
        "max_seqlen_k",
        {"max_seqlen_q": 5, "max_seqlen_k": 6, "seqused_q": ints(5, 0, 5)},
    ),
    "seqused-q-too-long": ("seqused_q", {"seqused_q": ints(6, 0, 7)}),
    "seqused-q-negative": ("seqused_q", {"seqused_q": ints(-1, 0, 7)}),
    "seqused-q-batch": ("seqused_q", {"seqused_q": ints(1, 0)}),
    "seqused-q-dtype": ("seqused_q", {"seqused_q": torch.zeros(3)}),
    "seqused-k-too-long": ("seqused_k", {"seqused_k": ints(5, 0, 8)}),
    "seqused-k-batch": ("seqused_k", {"seqused_k": ints(5, 0, 7, 0)}),
    "seqused-k-list": ("seqused_k", {"seqused_k": [5, 0, 7]}),
    # Scale
    "scaling-zero": ("scaling_seqlen", {"scaling_seqlen": 0}),
    "scaling-negative": ("scaling_seqlen", {"scaling_seqlen": -3}),
    "scaling-tensor": ("scaling_seqlen", {"scaling_seqlen": torch.ones(2)}),
    "alpha-string": ("alpha", {"alpha": "1"}),
    "scale-shape": ("attn_scale", {"attn_scale": torch.ones(TOTAL - 1)}),
    "scale-2d": ("attn_scale", {"attn_scale": torch.ones(TOTAL, 1)}),
    "scale-dtype": ("attn_scale", {"attn_scale": torch.ones((), dtype=torch.float64)}),
    "scale-device": ("attn_scale", {"attn_scale": torch.ones((), device=META)}),
    "scale-gradient": ("attn_scale", {"attn_scale": torch.ones((), requires_grad=True)}),
    "scale-float": ("attn_scale", {"attn_scale": 0.5}),
    # Mask
    "mask-tensor": ("mask", {"mask": torch.ones(3)}),
    "contexts-batch": ("num_contexts", {"mask": Mask.causal(num_contexts=ints(1, 2))}),
    "contexts-negative": ("num_contexts", {"mask": Mask.causal(num_contexts=ints(-1, 0, 0))}),
    "contexts-device": ("num_contexts", {"mask": Mask.causal(num_contexts=ints(1, 0, 0).to(META))}),
    "targets-batch": ("num_targets", {"mask": Mask.causal(num_targets=ints(1, 0, 2, 1))}),
    "targets-negative": ("num_targets", {"mask": Mask.causal(num_targets=ints(1, 0, -2))}),
    "targets-too-many": ("num_targets", {"mask": Mask.causal(num_targets=ints(1, 0, 8))}),
    "spans-rows": ("row_spans", {"mask": Mask.from_row_spans(SPANS[:-1])}),
    "spans-heads": ("row_spans", {"mask": Mask.from_row_spans(SPANS.expand(2, TOTAL, 4))}),
    "contexts-list": ("num_contexts", {"mask": Mask.causal(num_contexts=[1, 2, 0])}),
    "contexts-float": ("num_contexts", {"mask": Mask.causal(num_contexts=torch.ones(3))}),
    "contexts-2d": ("num_contexts", {"mask": Mask.causal(num_contexts=ints(1, 0, 0)[None])}),
    "targets-int16": ("num_targets", {"mask": Mask.causal(num_targets=ints(1, 0, 2).short())}),
    "spans-dtype": ("row_spans", {"mask": Mask.from_row_spans(SPANS.long())}),
    "spans-width": ("row_spans", {"mask": Mask.from_row_spans(SPANS[:, :3])}),
    "spans-1d": ("row_spans", {"mask": Mask.from_row_spans(SPANS[0])}),
    "spans-list": ("row_spans", {"mask": Mask.from_row_spans(SPANS.tolist())}),
    "spans-device": ("row_spans", {"mask": Mask.from_row_spans(SPANS.to(META))}),
    "func-rows": ("func", {"mask": Mask.from_func(FUNC[..., :-1])}),
    "func-heads": ("func", {"mask": Mask.from_func(FUNC.expand(3, -1, -1))}),
    "func-even": ("func", {"mask": Mask.from_func(FUNC[:, :2])}),
    "func-dtype": ("func", {"mask": Mask.from_func(FUNC.long())}),
    "func-2d": ("func", {"mask": Mask.from_func(FUNC[0])}),
    "func-device": ("func", {"mask": Mask.from_func(FUNC.to(META))}),
    "func-stride": ("func", {"mask": Mask.from_func(FUNC.repeat(1, 1, 2)[..., ::2])}),
    # Dense bias
    "bias-string": ("bias", {"bias": "rab"}),
    "rab-3d": ("rab", {"bias": RAB[0]}),
    "rab-list": ("rab", {"bias": DenseBias([[1.0]])}),
    "rab-batch": ("rab", {"bias": RAB[:2]}),
    "rab-heads": ("rab", {"bias": torch.zeros(3, 3, LONGEST, LONGEST)}),
    "rab-no-heads": ("rab", {"bias": RAB[:, :0]}),
    "rab-size": ("rab", {"bias": torch.zeros(3, 2, LONGEST, LONGEST + 1)}),
    "rab-dtype": ("rab", {"bias": RAB.half()}),
    "rab-int": ("rab", {"bias": RAB.int()}),
    "rab-stride": ("rab", {"bias": DenseBias(RAB.transpose(2, 3))}),
    "rab-device": ("rab", {"bias": RAB.to(META)}),
    # Relative bias
    "pos-heads": ("pos_weight", relative(pos_weight=torch.zeros(3, 9))),
    "pos-1d": ("pos_weight", relative(pos_weight=torch.zeros(9))),
    "pos-even": ("pos_weight", relative(pos_weight=torch.zeros(2, 8))),
    "pos-dtype": ("pos_weight", relative(pos_weight=torch.zeros(2, 9, dtype=torch.half))),
    "pos-stride": ("pos_weight", relative(pos_weight=torch.zeros(9, 2).t())),
    "pos-device": ("pos_weight", relative(pos_weight=torch.zeros(2, 9, device=META))),
    "ts-heads": ("ts_weight", relative(ts_weight=torch.zeros(8, 8))),
    "ts-1d": ("ts_weight", relative(ts_weight=torch.zeros(8))),
    "ts-without-times": ("timestamps", relative(timestamps=None)),
    "ts-no-bucket": ("ts_weight", relative(ts_weight=torch.zeros(1, 0))),
    "ts-dtype": ("ts_weight", relative(ts_weight=torch.zeros(1, 8).long())),
    "times-rows": ("timestamps", relative(timestamps=torch.zeros(TOTAL + 1).long())),
    "times-dtype": ("timestamps", relative(timestamps=torch.zeros(TOTAL))),
    "times-int32": ("timestamps", relative(timestamps=torch.zeros(TOTAL).int())),
    "times-stride": ("timestamps", relative(timestamps=torch.zeros(2 * TOTAL).long()[::2])),
    "row-times-rows": ("row_timestamps", relative(row_timestamps=torch.zeros(3).long())),
    "row-times-dtype": ("row_timestamps", relative(row_timestamps=torch.zeros(TOTAL))),
    "thresholds-dtype": ("ts_thresholds", relative(thresholds=torch.zeros(3))),
    "thresholds-2d": ("ts_thresholds", relative(thresholds=torch.zeros(3, 1).long())),
    "thresholds-order": ("ts_thresholds", relative(thresholds=torch.tensor([1, 5, 4]))),
    # The rest
    "sm-margin": ("sm_margin", {"sm_margin": -1}),
    "quant-mode": ("quant_mode", {"quant_mode": 6}),
}


@pytest.mark.parametrize(("name", "changes"), CASES.values(), ids=CASES.keys())
def test_bad_argument(name, changes):
    with pytest.raises(ValueError, match=rf"^{name}: expected .*got "):
        call({**good(), **changes})


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("q", {"q": None}),
        ("k", {"k": FP32.bfloat16()}),
        ("cu_seqlens_q", {"cu_seqlens_q": ints(0, 5, 4, 12)}),
        ("max_seqlen_q", {"max_seqlen_q": 6}),
        ("rab", {"bias": RAB.half()}),
    ],
    ids=["missing", "dtype", "order", "length", "bias"],
)
def test_bad_argument_of_a_call_that_records_gradients(name, changes):
    arguments = good()
    arguments["v"].requires_grad_()
    with pytest.raises(ValueError, match=rf"^{name}: expected .*got "):
        call({**arguments, **changes})


# ---------------------------------------------------------------------------------------------
# Masks that only a direct call of the operator can have
# ---------------------------------------------------------------------------------------------

RAW_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "func-even": ("func", {"func": FUNC[:, :2]}),
    "func-dtype": ("func", {"func": FUNC.long()}),
    "spans-width": ("row_spans", {"row_spans": SPANS[:, :3]}),
    "spans-dtype": ("row_spans", {"row_spans": SPANS.long()}),
    "rab-and-table": ("pos_weight", {"rab": RAB, "pos_weight": torch.zeros(1, 3)}),
    "pos-even": ("pos_weight", {"pos_weight": torch.zeros(1, 4)}),
    "ts-without-times": ("timestamps", {"ts_weight": torch.zeros(1, 4)}),
    "ts-without-thresholds": (
        "ts_thresholds",
        {"ts_weight": torch.zeros(1, 4), "timestamps": torch.zeros(TOTAL).long()},
    ),
    "pages-without-cache": ("page_ids", {"page_ids": ints(0)}),
    "pages-missing": ("page_offsets", {"kv_cache": torch.zeros(1, 2, 16, HEADS, DIM)}),
    "scales-without-cache": ("kv_scales", {"kv_scales": torch.ones(1, 2, 16, HEADS)}),
    "descale": ("q_descale", {"q_descale": torch.ones(1)}),
}


@pytest.mark.parametrize(("name", "changes"), RAW_CASES.values(), ids=RAW_CASES.keys())
def test_bad_argument_of_the_operator(name, changes):
    batch = make_batch(LENGTHS, heads=HEADS, dim=DIM, mask="causal")
    with pytest.raises(raw_ops.BAD_ARGUMENT, match=rf"{name}: expected .*got "):
        raw_ops.forward(batch, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"window_left": -(2**40)},
        {"window_left": 2**40, "window_right": 2**40},
        {"window_right": 2, "num_targets": ints(2, 0, 7), "num_contexts": ints(1, 0, 2)},
        {"min_full_attn_seq_len": 2**40, "window_left": 3, "window_right": 1},
        {"min_full_attn_seq_len": -(2**40)},
        {"target_group_size": 0, "num_targets": ints(2, 0, 7)},
        {"target_group_size": -(2**40), "num_targets": ints(2, 0, 7)},
        {"row_spans": SPANS, "func": FUNC, "num_targets": ints(2, 0, 7)},
        {"func": FUNC, "window_left": 3, "min_full_attn_seq_len": 2},
    ],
)
def test_masks_without_a_meaning_do_no_harm(changes):
    """`Mask` refuses these; a direct call of the operator gives finite results."""
    batch = make_batch(LENGTHS, heads=HEADS, dim=DIM, mask="causal")
    out = raw_ops.forward(batch, **changes)
    assert torch.isfinite(out).all()
    gradients = raw_ops.backward(batch, out, has_drab=False, has_dtables=False, **changes)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


OUT = torch.zeros(TOTAL, HEADS, DIM)


@pytest.mark.parametrize(
    "out",
    [OUT[:-1], OUT[:, :2], OUT[..., :8], OUT.half(), transposed(OUT), OUT.to(META), OUT[None]],
    ids=["rows", "heads", "dim", "dtype", "stride", "device", "4d"],
)
def test_bad_output(out):
    batch = make_batch(LENGTHS, heads=HEADS, dim=DIM, mask="causal")
    in_python = out.device == META  # the fake kernel checks it
    error = ValueError if in_python else raw_ops.BAD_ARGUMENT
    with pytest.raises(error, match=r"out: expected .*got "):
        raw_ops.forward_out(batch, out)


BAD_GRADIENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dout-dtype": ("dout", {"dout": OUT.half()}),
    "dout-rows": ("dout", {"dout": OUT[:-1]}),
    "dout-stride": ("dout", {"dout": transposed(OUT)}),
    "dq-dtype": ("dq", {"dq": OUT.double()}),
    "dq-rows": ("dq", {"dq": OUT[1:]}),
    "dk-heads": ("dk", {"dk": OUT[:, 1:]}),
    "dv-stride": ("dv", {"dv": transposed(OUT)}),
    "drab-without-rab": ("drab", {"drab": RAB}),
    "dpos-without-table": ("dpos_weight", {"dpos_weight": torch.zeros(1, 3)}),
    "dts-without-table": ("dts_weight", {"dts_weight": torch.zeros(1, 3)}),
}


@pytest.mark.parametrize(("name", "changes"), BAD_GRADIENTS.values(), ids=BAD_GRADIENTS.keys())
def test_bad_gradient(name, changes):
    batch = make_batch(LENGTHS, heads=HEADS, dim=DIM, mask="causal")
    outputs = {"dout": OUT, "dq": OUT.clone(), "dk": OUT.clone(), "dv": OUT.clone(), **changes}
    dout = outputs.pop("dout")
    with pytest.raises(raw_ops.BAD_ARGUMENT, match=rf"{name}: expected .*got "):
        raw_ops.backward_out(batch, dout, outputs)


def test_bad_gradients_of_biases():
    batch = make_batch(LENGTHS, heads=HEADS, dim=DIM, mask="causal", bias="rab")
    outputs = {"dq": OUT.clone(), "dk": OUT.clone(), "dv": OUT.clone()}
    for drab in (batch.bias.rab[:, :1], batch.bias.rab.half(), batch.bias.rab.transpose(2, 3)):
        with pytest.raises(raw_ops.BAD_ARGUMENT, match=r"drab: expected .*got "):
            raw_ops.backward_out(batch, OUT, {**outputs, "drab": drab})
    batch = make_batch(LENGTHS, heads=HEADS, dim=DIM, mask="causal", bias="position-time")
    pos, ts = batch.bias.pos_weight, batch.bias.ts_weight
    for name, table in (("dpos_weight", pos), ("dts_weight", ts)):
        for wrong in (table[:, 1:], table.double(), torch.cat([table, table], 1)[:, ::2]):
            with pytest.raises(raw_ops.BAD_ARGUMENT, match=rf"{name}: expected .*got "):
                raw_ops.backward_out(batch, OUT, {**outputs, name: wrong})
    batch = make_batch(LENGTHS, heads=HEADS, dim=DIM, mask="causal")
    with pytest.raises(raw_ops.BAD_ARGUMENT, match=r"rab: expected .*got None"):
        raw_ops.backward(batch, OUT, has_drab=True, has_dtables=False)


# ---------------------------------------------------------------------------------------------
# What is not built, and what is missing
# ---------------------------------------------------------------------------------------------


def fbgemm_call(**changes: Any) -> torch.Tensor:
    arguments = good()
    return hstu_attn.hstu_attn_varlen_func(
        **{
            **{name: arguments[name] for name in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")},
            "seqused_q": None,
            "seqused_k": None,
            "max_seqlen_q": LONGEST,
            "max_seqlen_k": LONGEST,
            "scaling_seqlen": -1,
            "num_contexts": None,
            "num_targets": None,
            **changes,
        }
    )


def test_cuda_tensors_without_cuda_kernels(monkeypatch):
    """The check before the operator raises, for which no GPU is needed."""

    class OnCuda(torch.Tensor):
        is_cuda = True
        device = torch.device("cuda", 0)

    monkeypatch.setattr(ops, "_has_cuda_kernels", False)
    q = torch.zeros(1, 1, 8).as_subclass(OnCuda)
    with pytest.raises(NotImplementedError, match=r"q: .*no CUDA kernels.*cuda:0"):
        ops.check_build(q)


def test_a_missing_library_says_how_to_build_it(tmp_path, monkeypatch):
    monkeypatch.setattr(ops, "_load_error", "")
    assert not ops.load(tmp_path / "_C.abi3.so")
    monkeypatch.setattr(ops, "_fwd", ops._missing)
    with pytest.raises(ImportError, match=r"_C\.abi3\.so does not exist.*pip install"):
        call(good())


def test_a_broken_library_says_how_to_build_it(tmp_path):
    path = tmp_path / "_C.abi3.so"
    path.write_bytes(b"not a library")
    with pytest.raises(ImportError, match=r"does not load into torch .*pip install"):
        ops.load(path)


def test_types_of_errors_that_a_release_of_torch_loses():
    """The type of an error does not depend on how torch passes C++ exceptions on."""

    def raising(text):
        def op():
            raise RuntimeError(text)

        return op

    for text, kind, expected in (
        ("q: expected 3 dimensions, got 2", ValueError, r"^q: expected 3 dimensions, got 2$"),
        ("NotImplementedError: q: this build", NotImplementedError, r"^q: this build$"),
        ("CUDA error: expected nothing like it", RuntimeError, r"^CUDA error: expected nothing"),
    ):
        with pytest.raises(kind, match=expected) as raised:
            ops.below_autograd(raising(text))
        assert raised.type is kind


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("qkv", None), ("qkv", torch.zeros(3, 2, 1, 8)), ("qkv", torch.zeros(3, 3, 8))],
    ids=["missing", "two", "3d"],
)
def test_bad_packed_tensor(name, wrong):
    offsets = ints(0, 3)
    with pytest.raises(ValueError, match=rf"^{name}: expected .*got "):
        hstu_attn.hstu_attn_qkvpacked_func(wrong, offsets, offsets, None, None, 3, 3)


@pytest.mark.parametrize("loss", [torch.sum, lambda out: out.square().sum()], ids=["sum", "square"])
@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_second_derivatives_are_refused(loss, wanted):
    arguments = good()
    leaf = arguments[wanted].requires_grad_()
    (gradient,) = torch.autograd.grad(loss(call(arguments)), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(gradient.sum(), leaf)


def test_second_derivatives_of_a_packed_call_are_refused():
    offsets = ints(0, 5)
    qkv = torch.randn(5, 3, 2, 16, requires_grad=True)
    out = hstu_attn.hstu_attn_qkvpacked_func(qkv, offsets, offsets, None, None, 5, 5)
    (gradient,) = torch.autograd.grad(out.sum(), qkv, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(gradient.sum(), qkv)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_under_create_graph_are_right(checkpointed):
    arguments = good()
    leaf = arguments["k"].requires_grad_()
    (plain,) = torch.autograd.grad(call(arguments).sum(), leaf)
    out = checkpoint(call, arguments, use_reentrant=False) if checkpointed else call(arguments)
    (guarded,) = torch.autograd.grad(out.sum(), leaf, create_graph=True)
    assert guarded.requires_grad
    assert torch.equal(plain, guarded)


def test_gradients_of_a_packed_call_under_activation_checkpointing():
    offsets = ints(0, 5)
    qkv = torch.randn(5, 3, 2, 16, requires_grad=True)

    def packed(qkv):
        return hstu_attn.hstu_attn_qkvpacked_func(qkv, offsets, offsets, None, None, 5, 5)

    (plain,) = torch.autograd.grad(packed(qkv).sum(), qkv)
    out = checkpoint(packed, qkv, use_reentrant=False)
    (guarded,) = torch.autograd.grad(out.sum(), qkv, create_graph=True)
    assert torch.equal(plain, guarded)


def test_second_derivatives_of_the_operator_itself_are_refused():
    batch = make_batch(LENGTHS, heads=HEADS, dim=DIM, mask="causal")
    q = batch.q.requires_grad_()
    (dq,) = torch.autograd.grad(raw_ops.forward(batch).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(dq.sum(), q)


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
def test_forward_mode_derivatives_are_refused(name, records):
    arguments = {**good(), "bias": RAB}
    arguments["q"].requires_grad_(records)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(arguments[name], torch.ones_like(arguments[name]))
        with pytest.raises(NotImplementedError, match=r"forward.mode"):
            call({**arguments, name: dual})


def jvp(function):
    return lambda x: torch.func.jvp(function, (x,), (x,))


@pytest.mark.parametrize("transform", [torch.func.jacfwd, jvp])
def test_transforms_of_forward_mode_are_refused(transform):
    arguments = good()
    derivative = transform(lambda k: call({**arguments, "k": k}).sum())
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        derivative(arguments["k"])


def test_a_tangent_of_the_cotangent_is_refused():
    arguments = good()
    q = arguments["q"].requires_grad_()
    with forward_ad.dual_level():
        out = call(arguments)
        dual = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.autograd.grad(out, q, dual)


def test_gradients_beside_forward_mode_are_right():
    arguments = good()
    q = arguments["q"].requires_grad_()
    (expected,) = torch.autograd.grad(call(arguments).sum(), q)
    with forward_ad.dual_level():  # forward mode that does not involve this call
        (gradient,) = torch.autograd.grad(call(arguments).sum(), q)
    assert torch.equal(gradient, expected)


def test_nothing_is_written_after_a_failed_check():
    batch = make_batch(LENGTHS, heads=HEADS, dim=DIM, mask="causal")
    out = torch.full_like(batch.q, 7)
    with pytest.raises(raw_ops.BAD_ARGUMENT, match="cu_seqlens_q"):
        raw_ops.forward_out(batch, out, cu_seqlens_q=ints(0, 9, 3, 12))
    assert (out == 7).all()


@pytest.mark.gpu
def test_offsets_on_the_gpu_are_clamped():
    """Without HSTU_ATTN_CHECK=1 the host does not read offsets, and wrong ones must be harmless."""
    batch = make_batch([70, 30], dtype=torch.bfloat16, device="cuda", mask="causal")
    for wrong in ([0, 500, 100], [-5, 70, 100], [0, 70, 10**9], [100, 70, 0]):
        offsets = torch.tensor(wrong, dtype=torch.int32, device="cuda")
        out = hstu_attention(
            batch.q,
            batch.k,
            batch.v,
            cu_seqlens_q=offsets,
            max_seqlen_q=70,
            mask=batch.mask,
        )
        torch.cuda.synchronize()
        assert out.shape == batch.q.shape
