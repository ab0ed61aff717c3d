"""Tests of Meta's `hstu_mha` and `delta_hstu_mha`: the documented call, and every mask."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hstu_attn import Mask
from hstu_attn.compat.generative_recommenders import delta_hstu_mha, hstu_mha
from hstu_attn.testing import check_against_reference, make_batch, offsets
from tests.helpers.public_masks import meta_mask

ALPHA = 0.3


def formula(
    max_seq_len: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    *,
    delta: int | None = None,
    targets: list[int] | None = None,
    attn_scale: Tensor | None = None,
    **mask: int,
) -> Tensor:
    """Computes one sequence after another in plain PyTorch, with the mask of `public_masks`."""
    outputs = []
    start = 0
    for b, length in enumerate(lengths):
        visible = meta_mask(length, targets=None if targets is None else targets[b], **mask)
        queries = q[start : start + length] if delta is None else q[b * delta : (b + 1) * delta]
        visible = visible[length - queries.shape[0] :]
        scores = ALPHA * torch.einsum("ihd,jhd->hij", queries, k[start : start + length])
        weights = torch.nn.functional.silu(scores) * visible
        scale = 1 / max_seq_len
        if attn_scale is not None:
            scale = attn_scale[start : start + length, None] if attn_scale.dim() else attn_scale
        outputs.append(torch.einsum("hij,jhd->ihd", weights * scale, v[start : start + length]))
        start += length
    return torch.cat(outputs)


def inputs(lengths: list[int], heads: int = 2, dim: int = 16, dim_v: int = 24) -> list[Tensor]:
    total = sum(lengths)
    return [
        torch.randn(total, heads, width, dtype=torch.float64, requires_grad=True)
        for width in (dim, dim, dim_v)
    ]


def assert_same(actual: Tensor, expected: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected)
    assert expected.any()
    dout = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves, dout)
    for gradient, other in zip(torch.autograd.grad(actual, leaves, dout), wanted, strict=True):
        torch.testing.assert_close(gradient, other)


def test_signatures():
    assert list(inspect.signature(hstu_mha).parameters) == [
        *("max_seq_len", "alpha", "q", "k", "v", "seq_offsets", "causal", "dropout_pr"),
        *("training", "num_targets", "attn_scale", "max_attn_len", "contextual_seq_len"),
        *("min_full_attn_seq_len", "sort_by_length", "kernel", "enable_tma"),
        *("attn_func", "scaling_seqlen"),
    ]
    assert list(inspect.signature(delta_hstu_mha).parameters) == [
        *("max_seq_len", "alpha", "delta_q", "k", "v", "seq_offsets", "num_targets"),
        *("max_attn_len", "contextual_seq_len", "kernel", "enable_tma"),
        *("scaling_seqlen", "attn_func"),
    ]


def test_the_documented_call():
    """The call is as in the layers of Meta's library, except for the import."""
    lengths, targets = [30, 12, 45], [4, 1, 9]
    q, k, v = inputs(lengths)
    out = hstu_mha(
        max_seq_len=64,
        alpha=ALPHA,
        q=q,
        k=k,
        v=v,
        seq_offsets=offsets(lengths).long(),
        causal=True,
        dropout_pr=0.0,
        training=True,
        num_targets=torch.tensor(targets),
        max_attn_len=0,
        contextual_seq_len=0,
        sort_by_length=True,
        kernel="TRITON",
    )
    assert_same(out, formula(64, q, k, v, lengths, targets=targets), [q, k, v])


COMBINATIONS = [
    {"targets": targets, "max_attn_len": window, "contextual": contexts, "min_full": full}
    for targets in (False, True)
    for window in (0, 1, 6)
    for contexts in (0, 1, 3)
    for full in ((0, 4) if window else (0, 4)[:1] if contexts else (0, 4))
]


def name_of(combination: dict[str, Any]) -> str:
    parts = [f"{key}-{value}" for key, value in combination.items() if value]
    return "-".join(parts) or "causal"


@pytest.mark.parametrize("combination", COMBINATIONS, ids=name_of)
def test_every_mask(combination):
    # The sequences of 1 and 2 rows are shorter than the contextual tokens.
    lengths = [25, 1, 40, 2, 7]
    targets = [5, 0, 13, 1, 7] if combination["targets"] else None
    q, k, v = inputs(lengths)
    out = hstu_mha(
        50,
        ALPHA,
        q,
        k,
        v,
        offsets(lengths),
        num_targets=None if targets is None else torch.tensor(targets, dtype=torch.int32),
        max_attn_len=combination["max_attn_len"],
        contextual_seq_len=combination["contextual"],
        min_full_attn_seq_len=combination["min_full"],
    )
    expected = formula(
        50,
        q,
        k,
        v,
        lengths,
        targets=targets,
        max_attn_len=combination["max_attn_len"],
        contextual=combination["contextual"],
        min_full=combination["min_full"],
    )
    assert_same(out, expected, [q, k, v])


@pytest.mark.parametrize("delta", [1, 4, 9])
@pytest.mark.parametrize("targets", [None, [3, 0, 9], [9, 1, 2]], ids=["none", "some", "all"])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("contexts", [0, 2])
def test_delta(delta, targets, window, contexts):
    lengths = [20, 9, 31]
    _, k, v = inputs(lengths)
    delta_q = torch.randn(3 * delta, 2, 16, dtype=torch.float64, requires_grad=True)
    out = delta_hstu_mha(
        40,
        ALPHA,
        delta_q,
        k,
        v,
        offsets(lengths),
        num_targets=None if targets is None else torch.tensor(targets),
        max_attn_len=window,
        contextual_seq_len=contexts,
    )
    expected = formula(
        40,
        delta_q,
        k,
        v,
        lengths,
        delta=delta,
        targets=targets,
        max_attn_len=window,
        contextual=contexts,
    )
    assert_same(out, expected, [delta_q, k, v])


@pytest.mark.parametrize("shape", [(), (32,)], ids=["scalar", "per-row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_attn_scale(shape, dtype):
    lengths = [20, 12]
    q, k, v = inputs(lengths)
    attn_scale = torch.rand(shape, dtype=torch.float32).to(dtype)
    out = hstu_mha(40, ALPHA, q, k, v, offsets(lengths), attn_scale=attn_scale)
    expected = formula(40, q, k, v, lengths, attn_scale=attn_scale.double())
    assert_same(out, expected, [q, k, v])


# ---------------------------------------------------------------------------------------------
# What TorchEasyRec and recsys-examples add
# ---------------------------------------------------------------------------------------------


def semi_local(lengths: list[int], targets: list[int], window: int, prefix: int) -> Tensor:
    """Returns `func` `(3, rows)`: a row of the history sees the first `prefix` tokens and the
    last `window` up to itself; a target sees the history, without itself.
    """
    columns = []
    for length, count in zip(lengths, targets, strict=True):
        history = length - count
        for i in range(length):
            if i < history:
                columns.append((min(prefix, i + 1), max(prefix, i - window + 1), i + 1))
            else:
                columns.append((history, history, history))
    return torch.tensor(columns, dtype=torch.int32).T.contiguous()


def test_a_semi_local_call():
    """The call is as in TorchEasyRec except for the import; loops repeat what each row sees."""
    lengths, targets, window, prefix = [30, 0, 12, 45], [4, 0, 1, 9], 5, 3
    q, k, v = inputs(lengths)
    func = semi_local(lengths, targets, window, prefix)
    out = hstu_mha(
        max_seq_len=64,
        alpha=ALPHA,
        q=q,
        k=k,
        v=v,
        seq_offsets=offsets(lengths),
        causal=True,
        num_targets=torch.tensor(targets),
        max_attn_len=0,
        contextual_seq_len=2,
        attn_func=func.unsqueeze(0).expand(q.shape[1], 3, q.shape[0]),
        scaling_seqlen=100,
    )
    expected = torch.zeros_like(out)
    for b, length in enumerate(lengths):
        start, history = sum(lengths[:b]), length - targets[b]
        for i in range(length):
            seen = [j for j in range(i + 1) if j < prefix or j > i - window]
            if i >= history:
                seen = list(range(history))
            for j in seen:
                score = ALPHA * (q[start + i] * k[start + j]).sum(-1, keepdim=True)
                weight = torch.nn.functional.silu(score) / 100
                row = torch.zeros_like(expected)
                row[start + i] = 1
                expected = expected + row * (weight * v[start + j])
    assert_same(out, expected, [q, k, v])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("heads", [1, 2], ids=["one-for-all", "each-head"])
@pytest.mark.parametrize("pairs", [0, 1, 2])
def test_attn_func(device, dtype, heads, pairs):
    """An arbitrary mask is intersected with causal, which both functions always apply."""
    batch = make_batch([23, 0, 40], dtype=dtype, device=device)
    func = torch.randint(0, 41, (heads, 2 * pairs + 1, 63), dtype=torch.int32, device=device)
    batch = replace(batch, mask=Mask.from_func(func, causal=True), scaling_seqlen=17)

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return hstu_mha(
            40,
            options["alpha"],
            q,
            k,
            v,
            options["cu_seqlens_q"],
            attn_func=func,
            scaling_seqlen=17,
        )

    check_against_reference(call, batch)


@pytest.mark.parametrize("scaling_seqlen", [-1, 17])
@pytest.mark.parametrize("with_func", [False, True], ids=["causal", "func"])
def test_delta_with_scaling_seqlen_and_attn_func(device, scaling_seqlen, with_func):
    lengths, delta = [20, 9, 31], 4
    batch = make_batch(lengths, [delta] * 3, dtype=torch.bfloat16, device=device, mask="causal")
    func = torch.randint(0, 32, (1, 3, 3 * delta), dtype=torch.int32, device=device)
    batch = replace(
        batch,
        mask=Mask.from_func(func, causal=True) if with_func else batch.mask,
        scaling_seqlen=40 if scaling_seqlen == -1 else scaling_seqlen,
    )

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return delta_hstu_mha(
            40,
            options["alpha"],
            q,
            k,
            v,
            options["cu_seqlens_k"],
            scaling_seqlen=scaling_seqlen,
            attn_func=func if with_func else None,
        )

    check_against_reference(call, batch)


@pytest.mark.parametrize("scaling_seqlen", [-1, 17])
def test_scaling_seqlen(device, scaling_seqlen):
    batch = make_batch([23, 40], dtype=torch.bfloat16, device=device, mask="causal")
    batch = replace(batch, scaling_seqlen=64 if scaling_seqlen == -1 else scaling_seqlen)

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return hstu_mha(
            64,
            options["alpha"],
            q,
            k,
            v,
            options["cu_seqlens_q"],
            scaling_seqlen=scaling_seqlen,
        )

    check_against_reference(call, batch)


def test_hints_change_nothing():
    lengths = [20, 12]
    q, k, v = inputs(lengths)
    plain = hstu_mha(40, ALPHA, q, k, v, offsets(lengths))
    for hints in (
        {"sort_by_length": True},
        {"kernel": object()},
        {"enable_tma": True},
        {"training": False},
    ):
        assert torch.equal(hstu_mha(40, ALPHA, q, k, v, offsets(lengths), **hints), plain)
    delta = delta_hstu_mha(40, ALPHA, q[:6], k, v, offsets(lengths))
    hinted = delta_hstu_mha(
        40, ALPHA, q[:6], k, v, offsets(lengths), kernel="TRITON", enable_tma=True
    )
    assert torch.equal(delta, hinted)


@pytest.mark.gpu
@pytest.mark.parametrize("contexts", [0, 3])
def test_on_a_gpu(contexts):
    lengths = [25, 1, 40, 2, 7]
    q, k, v = (x.detach().bfloat16() for x in inputs(lengths))
    targets = torch.tensor([5, 0, 13, 1, 7])
    options = {"max_attn_len": 6, "contextual_seq_len": contexts, "min_full_attn_seq_len": 4}
    on_cpu = hstu_mha(50, ALPHA, q, k, v, offsets(lengths), num_targets=targets, **options)
    on_gpu = hstu_mha(
        50,
        ALPHA,
        q.cuda(),
        k.cuda(),
        v.cuda(),
        offsets(lengths, "cuda"),
        num_targets=targets.cuda(),
        **options,
    )
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=2e-2, atol=1e-3)


def test_an_empty_batch():
    q = torch.zeros(0, 2, 16)
    assert hstu_mha(8, ALPHA, q, q, q, torch.tensor([0])).shape == (0, 2, 16)
    assert delta_hstu_mha(8, ALPHA, q, q, q, torch.tensor([0])).shape == (0, 2, 16)
    contextual = hstu_mha(8, ALPHA, q, q, q, torch.tensor([0, 0]), contextual_seq_len=2)
    assert contextual.shape == (0, 2, 16)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("causal", {"causal": False}),
        ("dropout_pr", {"dropout_pr": 0.1}),
        ("max_seq_len", {"max_seq_len": 0}),
        ("max_seqlen_q", {"max_seq_len": 11}),
        ("max_attn_len", {"max_attn_len": -1}),
        ("contextual_seq_len", {"contextual_seq_len": -2}),
        ("min_full_attn_seq_len", {"min_full_attn_seq_len": -2}),
        ("k", {"k": torch.zeros(3, 2, 16)}),
        ("v", {"v": torch.zeros(3, 2, 16)}),
        ("num_targets", {"num_targets": torch.tensor([1])}),
        ("attn_scale", {"attn_scale": torch.ones((), requires_grad=True)}),
        ("attn_scale", {"attn_scale": torch.ones(5)}),
        ("scaling_seqlen", {"scaling_seqlen": 0}),
        ("scaling_seqlen", {"scaling_seqlen": 20, "attn_scale": torch.ones(())}),
        ("attn_func|func", {"attn_func": torch.zeros(1, 2, 32, dtype=torch.int32)}),
        ("attn_func|func", {"attn_func": torch.zeros(1, 3, 32)}),
        ("attn_func|func", {"attn_func": torch.zeros(1, 3, 31, dtype=torch.int32)}),
        (
            "max_attn_len",
            {"max_attn_len": 3, "attn_func": torch.zeros(1, 3, 32, dtype=torch.int32)},
        ),
    ],
)
def test_bad_argument(name, changes):
    lengths = [20, 12]
    total = sum(lengths)
    arguments = {
        "max_seq_len": 20,
        "alpha": ALPHA,
        "q": torch.zeros(total, 2, 16),
        "k": torch.zeros(total, 2, 16),
        "v": torch.zeros(total, 2, 16),
        "seq_offsets": offsets(lengths),
    }
    with pytest.raises(ValueError, match=rf"^({name}): expected .*got "):
        hstu_mha(**{**arguments, **changes})


def test_delta_rows_must_be_the_same_for_all():
    _, k, v = inputs([20, 12])
    with pytest.raises(ValueError, match=r"^delta_q: expected the same number .*got 7"):
        delta_hstu_mha(20, ALPHA, k[:7], k, v, offsets([20, 12]))
    # 13 rows of a sequence of 12 tokens: the first one sees nothing.
    out = delta_hstu_mha(20, ALPHA, k[:26], k, v, offsets([20, 12]))
    assert out[:13].any(dim=(1, 2)).all()
    assert not out[13].any()
    shorter = delta_hstu_mha(20, ALPHA, k[14:26], k[20:], v[20:], offsets([12]))
    torch.testing.assert_close(out[14:], shorter)
