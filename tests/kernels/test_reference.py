"""Tests of the reference against the formula, one score at a time in Python numbers."""

from __future__ import annotations

import math

import pytest
import torch

from hstu_attn import Mask, RelativeBias, reference
from hstu_attn.call import bias_times
from hstu_attn.mask import dense_mask
from hstu_attn.testing import (
    BIAS_NAMES,
    MASK_NAMES,
    Batch,
    make_batch,
    make_paged_batch,
    poison,
    run,
)


def entry(values: torch.Tensor | None, b: int) -> int:
    return 0 if values is None else int(values[b])


def by_hand(batch: Batch) -> torch.Tensor:
    """Computes the formulas 'forward', 'rab' and 'relative bias' of the definition by loops."""
    out = torch.zeros(batch.q.shape[0], batch.q.shape[1], batch.v.shape[2], dtype=torch.float64)
    heads = batch.q.shape[1]
    for b in range(batch.cu_seqlens_q.shape[0] - 1):
        q0, k0 = int(batch.cu_seqlens_q[b]), int(batch.cu_seqlens_k[b])
        q_len, k_len = int(batch.cu_seqlens_q[b + 1]) - q0, int(batch.cu_seqlens_k[b + 1]) - k0
        if batch.seqused_q is not None:
            q_len, k_len = int(batch.seqused_q[b]), int(batch.seqused_k[b])
        for head in range(heads):
            visible = dense_mask(
                batch.mask,
                q_len,
                k_len,
                num_contexts=entry(batch.mask.num_contexts, b),
                num_targets=entry(batch.mask.num_targets, b),
                first_row=q0,
                head=head,
            )
            for r in range(q_len):
                i = r + k_len - q_len
                scale = 1 / (
                    batch.max_seqlen_q if batch.scaling_seqlen == -1 else batch.scaling_seqlen
                )
                if batch.attn_scale is not None:
                    factors = batch.attn_scale.flatten().tolist()
                    scale = factors[q0 + r] if len(factors) > 1 else factors[0]
                for j in range(k_len):
                    if not visible[r, j]:
                        continue
                    score = float(batch.q[q0 + r, head].double() @ batch.k[k0 + j, head].double())
                    x = batch.alpha * (score + bias_by_hand(batch, b, head, r, i, j, k_len))
                    out[q0 + r, head] += x / (1 + math.exp(-x)) * scale * batch.v[k0 + j, head]
    return out


def bias_by_hand(batch: Batch, b: int, head: int, r: int, i: int, j: int, k_len: int) -> float:
    bias, heads = batch.bias, batch.q.shape[1]
    if bias is None:
        return 0.0
    if not isinstance(bias, RelativeBias):
        return float(bias.rab[b, head * bias.rab.shape[1] // heads, i, j])
    total = 0.0
    if bias.pos_weight is not None:
        reach = (bias.pos_weight.shape[1] + 1) // 2 - 1
        index = min(max(j - i, -reach), reach) + reach
        total += float(bias.pos_weight[head * bias.pos_weight.shape[0] // heads, index])
    if bias.ts_weight is not None:
        q0, k0 = int(batch.cu_seqlens_q[b]), int(batch.cu_seqlens_k[b])
        if bias.row_timestamps is not None:
            row_time = int(bias.row_timestamps[q0 + r])
        else:
            row_time = int(bias.timestamps[k0 + min(i + 1, k_len - 1)])
        difference = abs(row_time - int(bias.timestamps[k0 + j]))
        _, _, thresholds = bias_times(bias)
        bucket = sum(int(t) <= difference for t in thresholds)
        bucket = min(bucket, bias.ts_weight.shape[1] - 1)
        total += float(bias.ts_weight[head * bias.ts_weight.shape[0] // heads, bucket])
    return total


def assert_by_hand(batch: Batch) -> None:
    out = reference.hstu_attention(batch.q, batch.k, batch.v, **batch.options())
    expected = by_hand(batch)
    assert expected.abs().max() > 0
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", MASK_NAMES)
def test_every_mask(name):
    assert_by_hand(make_batch([5, 0, 11], [3, 0, 11], dim=8, dtype=torch.float64, mask=name))


@pytest.mark.parametrize("name", BIAS_NAMES)
def test_every_bias(name):
    batch = make_batch(
        [6, 9], [2, 9], dim=8, dim_v=16, dtype=torch.float64, mask="causal", bias=name
    )
    assert_by_hand(batch)


@pytest.mark.parametrize("shape", [None, (), (1,), (11,)], ids=str)
def test_every_scale(shape):
    batch = make_batch([4, 7], dim=8, dtype=torch.float64, mask="causal")
    if shape is None:
        batch.scaling_seqlen = 21
    else:
        batch.attn_scale = torch.rand(shape) + 0.1
    assert_by_hand(batch)


def test_rows_past_seqused_do_not_count():
    batch = make_batch(
        [6, 8],
        [6, 5],
        dim=8,
        dtype=torch.float64,
        mask="context-target",
        bias="position-time",
        seqused_q=torch.tensor([3, 0]),
        seqused_k=torch.tensor([5, 8]),
    )
    assert_by_hand(batch)
    clean = run(reference.hstu_attention, batch, torch.ones(11, 2, 8, dtype=torch.float64))
    poison(batch.q[3:], batch.k[5:6], batch.v[5:6])
    dirty = run(reference.hstu_attention, batch, torch.ones(11, 2, 8, dtype=torch.float64))
    for name, value in clean.items():
        assert torch.equal(value, dirty[name])
    assert not dirty["out"][3:].any()
    assert not dirty["dq"][3:].any()
    assert not dirty["dk"][5:6].any()


def test_fewer_keys_in_pages_equal_all_keys_packed():
    cached, new, targets = [21, 0, 5], [3, 4, 0], [2, 0, 6]
    batch = make_paged_batch(cached, new, targets, dim=8, dtype=torch.float64)
    pages = batch.paged_kv
    keys, values = [], []
    for b in range(3):
        history = cached[b] + new[b]
        ids = pages.page_ids[pages.page_offsets[b] : pages.page_offsets[b + 1]]
        end = int(batch.cu_seqlens_q[b + 1])
        for column, packed, found in ((0, batch.k, keys), (1, batch.v, values)):
            tokens = [pages.kv_cache[ids[t // 16], column, t % 16] for t in range(history)]
            tokens += [packed[end - targets[b] + t] for t in range(targets[b])]
            found += tokens
    out = reference.hstu_attention(batch.q, batch.k, batch.v, **batch.options())
    options = {**batch.options(), "paged_kv": None}
    packed_out = reference.hstu_attention(
        batch.q, torch.stack(keys), torch.stack(values), **options
    )
    assert torch.isfinite(out).all()
    assert torch.equal(out, packed_out)


@pytest.mark.parametrize("bias", [None, "rab-1-head", "position-time"])
def test_gradients_are_those_of_the_formula(bias):
    """Gradients are compared with the closed form dX = M dP s (1 + X (1 - s))."""
    batch = make_batch([7], [5], dim=8, dtype=torch.float64, mask="causal", bias=bias, alpha=0.6)
    dout = torch.randn(5, 2, 8, dtype=torch.float64)
    actual = run(reference.hstu_attention, batch, dout)
    visible = dense_mask(batch.mask, 5, 7)
    for head in range(2):
        q, k, v, do = batch.q[:, head], batch.k[:, head], batch.v[:, head], dout[:, head]
        x = torch.tensor(
            [
                [
                    batch.alpha
                    * (float(q[r] @ k[j]) + bias_by_hand(batch, 0, head, r, r + 2, j, 7))
                    for j in range(7)
                ]
                for r in range(5)
            ],
            dtype=torch.float64,
        )
        s = torch.sigmoid(x)
        weights = visible * x * s / batch.max_seqlen_q
        ds = batch.alpha * visible * (do @ v.T / batch.max_seqlen_q) * s * (1 + x * (1 - s))
        torch.testing.assert_close(actual["dv"][:, head], weights.T @ do)
        torch.testing.assert_close(actual["dq"][:, head], ds @ k)
        torch.testing.assert_close(actual["dk"][:, head], ds.T @ q)


def test_compute_dtype_is_used():
    batch = make_batch([40], dim=32, mask="full")
    exact = run(reference.hstu_attention, batch, dtype=torch.float64)["out"]
    coarse = run(reference.hstu_attention, batch, compute_dtype=torch.bfloat16)["out"]
    fine = run(reference.hstu_attention, batch)["out"]
    assert coarse.dtype == fine.dtype == torch.float32
    assert (coarse - exact).abs().max() > 100 * (fine - exact).abs().max() > 0


def test_no_mask_means_full():
    batch = make_batch([3], dim=8)
    options = {**batch.options(), "mask": None}
    assert torch.equal(
        reference.hstu_attention(batch.q, batch.k, batch.v, **options),
        reference.hstu_attention(batch.q, batch.k, batch.v, **{**options, "mask": Mask.full()}),
    )
