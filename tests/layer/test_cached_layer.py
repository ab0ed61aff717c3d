"""Tests of the layer with a KV cache against the layer without one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hstu_attn.layer import HSTULayerConfig, HSTUStack
from hstu_attn.testing import offsets

pytest.importorskip("hstu_attn._host", reason="_host has not been built")
from hstu_attn.serving import CachedRows, PagedKVCache, check_cacheable

LAYERS, USERS, LONGEST = 3, 6, 120
BASE = HSTULayerConfig(
    embedding_dim=24, num_heads=2, hidden_dim=16, attention_dim=16, scaling_seqlen=LONGEST
)
RESEARCH = HSTULayerConfig.research(
    embedding_dim=24, num_heads=2, linear_dim=16, attention_dim=16, max_sequence_len=LONGEST
)
STU = HSTULayerConfig.stu(embedding_dim=24, num_heads=2, hidden_dim=16, attention_dim=16)
RMS_STU = replace(
    STU, scaling_seqlen=LONGEST, input_norm="rms_norm", output_norm="rms_norm", linear_bias=False
)
CASES = {
    "base": BASE,
    "research": RESEARCH,
    "research, few positions": replace(RESEARCH, relative_bias_max_seq_len=9),
    "window": replace(BASE, max_attn_len=5),
    "target groups": replace(BASE, target_group_size=3),
    "stu, rms norms": RMS_STU,
    "stu, rms norms, fused": replace(RMS_STU, fused=True),
    "stu": replace(STU, scaling_seqlen=LONGEST),
    "stu, fused": replace(STU, scaling_seqlen=LONGEST, fused=True),
    "research, fused": replace(RESEARCH, fused=True),
}


def make_stack(config: HSTULayerConfig, dtype: torch.dtype) -> HSTUStack:
    stack = HSTUStack(config, LAYERS, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return stack


def packed(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts)


@pytest.mark.parametrize("name", CASES)
def test_histories_that_grow(name: str) -> None:
    """Each step rewrites a user's last row with the time of the next event."""
    config = CASES[name]
    stack = make_stack(config, torch.float64)
    timed = config.enable_relative_attention_bias
    cache = PagedKVCache(LAYERS, 24, 16, config.num_heads, config.dqk, torch.float64, "cpu")
    rng = random.Random(torch.initial_seed())
    history = {user: torch.empty(0, config.embedding_dim).double() for user in range(USERS)}
    times = {user: torch.empty(0, dtype=torch.int64) for user in range(USERS)}
    kept = 0
    for _ in range(25):
        users = rng.sample(range(USERS), 3)
        targets = [rng.choice([0, 1, 5]) for _ in users]
        asked = []
        for user in users:
            count = min(rng.choice([0, 1, 2, 13]), LONGEST - len(history[user]))
            history[user] = torch.cat([history[user], torch.randn(count, 24).double()])
            later = torch.randint(1, 10**5, (count,)).cumsum(0)
            times[user] = torch.cat([times[user], times[user][-1:].sum() + later])
            asked.append(int(times[user][-1:].sum()) + rng.randrange(10**5))
        lengths = [len(history[user]) for user in users]
        cached = cache.lookup(users).tolist()
        again = [min(n, 1) for n in cached]
        starts = [n - r for n, r in zip(cached, again, strict=True)]
        candidates = [torch.randn(t, 24).double() for t in targets]
        q_lens = [n - s + t for n, s, t in zip(lengths, starts, targets, strict=True)]
        k_lens = [n + t for n, t in zip(lengths, targets, strict=True)]
        num_targets = torch.tensor(targets, dtype=torch.int32) if any(targets) else None

        whole: dict[str, Any] = {"num_targets": num_targets}
        newest: dict[str, Any] = {}
        if timed:
            key_times = [
                torch.cat([times[u], torch.full((t,), at)])
                for u, t, at in zip(users, targets, asked, strict=True)
            ]
            row_times = [
                torch.cat([part[1:], torch.tensor([at])[: len(part)]])
                for part, at in zip(key_times, asked, strict=True)
            ]
            whole["timestamps"] = newest["timestamps"] = packed(key_times)
            whole["row_timestamps"] = packed(row_times)
            newest["row_timestamps"] = packed(
                [part[s:] for part, s in zip(row_times, starts, strict=True)]
            )
        rows = [torch.cat([history[u], c]) for u, c in zip(users, candidates, strict=True)]
        with torch.no_grad():
            expected = stack(packed(rows), offsets(k_lens, "cpu"), max(*k_lens, 1), **whole)
        expected = packed([e[s:] for e, s in zip(expected.split(k_lens), starts, strict=True)])
        new = [n - c for n, c in zip(lengths, cached, strict=True)]
        with cache.step(users, new, cached_lens=cached, rewritten=again) as step:
            where = CachedRows(
                step, offsets(q_lens, "cpu"), max(*q_lens, 1), max(*k_lens, 1), num_targets
            )
            x = packed([part[s:] for part, s in zip(rows, starts, strict=True)])
            y = stack.forward_cached(x, where, **newest)
        torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
        assert len(y) < len(packed(rows)) or not any(starts)
        kept += sum(starts)
    assert kept > 100


def test_a_row_whose_time_changed_is_stale_unless_it_is_written_again() -> None:
    """`rewritten` writes a row whose time has changed."""
    stack = make_stack(RESEARCH, torch.float64)
    x, times = torch.randn(4, 24).double(), torch.tensor([0, 10, 20, 10**6])
    with torch.no_grad():
        expected = stack(x, torch.tensor([0, 4]), 4, timestamps=times)[3:]
    for again, equal in ((0, False), (1, True)):
        cache = PagedKVCache(LAYERS, 4, 16, 2, 16, torch.float64, "cpu")
        for start, end in ((0, 3), (3 - again, 4)):
            rewritten = None if start == 0 else [again]
            with cache.step([1], [end - start - (again if start else 0)], rewritten=rewritten) as s:
                where = CachedRows(s, torch.tensor([0, end - start]), end - start, end)
                y = stack.forward_cached(x[start:end], where, times[:end])
        assert torch.allclose(y[-1:], expected, rtol=1e-9, atol=1e-9) == equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    stack = make_stack(replace(RESEARCH, norm_eps=1.0), torch.float32)
    x, times = torch.randn(40, 24).to(dtype), torch.arange(40) * 1000
    with torch.no_grad():
        expected = stack(x, torch.tensor([0, 40]), 40, timestamps=times)
    cache = PagedKVCache(LAYERS, 4, 16, 2, 16, dtype, "cpu")
    with cache.step([1], [30]) as step:
        first = CachedRows(step, torch.tensor([0, 30]), 30, 30)
        stack.forward_cached(x[:30], first, times[:30], times[1:31])
    with cache.step([1], [10]) as step:
        y = stack.forward_cached(x[30:], CachedRows(step, torch.tensor([0, 10]), 10, 40), times)
    assert y.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(y, expected[30:], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(BASE, causal=False), "causal: expected, for a cache, True.*got False"),
        (replace(BASE, contextual_seq_len=2), "contextual_seq_len: expected, .* 0.*got 2"),
        (
            replace(BASE, max_attn_len=4, min_full_attn_seq_len=2),
            "min_full_attn_seq_len: expected, .* 0.*got 2",
        ),
        (replace(BASE, scaling_seqlen=-1), "scaling_seqlen: expected, .*positive.*got -1"),
        (replace(BASE, hidden_dim=8), "hidden_dim: expected, .*attention_dim = 16.*got 8"),
        (replace(BASE, target_aware=False), "target_aware: expected, .* True.*got False"),
    ],
)
def test_what_would_not_be_sound_is_refused(config: HSTULayerConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_cacheable(config, with_targets=True)
    stack = HSTUStack(config, 1)
    cache = PagedKVCache(1, 4, 16, 2, 16, torch.float32, "cpu")
    with cache.step([1], [0]) as step:
        rows = CachedRows(step, torch.tensor([0, 1]), 1, 1, torch.tensor([1]))
        with pytest.raises(ValueError, match=message):
            stack.forward_cached(torch.zeros(1, 24), rows)


def test_what_is_sound_is_not_refused() -> None:
    check_cacheable(replace(BASE, min_full_attn_seq_len=2), with_targets=True)
    check_cacheable(replace(BASE, target_aware=False), with_targets=False)


def test_rows_of_another_batch_are_refused() -> None:
    cache = PagedKVCache(1, 4, 16, 2, 16, torch.float32, "cpu")
    with cache.step([1, 2], [0, 0]) as step:
        with pytest.raises(ValueError, match=r"seq_offsets: expected shape \(3,\).* got \(2,\)"):
            CachedRows(step, torch.tensor([0, 1]), 1, 1)
        with pytest.raises(ValueError, match=r"num_targets: expected shape \(2,\).* got \(1,\)"):
            CachedRows(step, torch.tensor([0, 1, 1]), 1, 1, torch.tensor([1]))
