"""Layers and inputs for the layer tests, and a reference layer that loops over sequences."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hstu_attn import RelativeBias
from hstu_attn.layer import HSTULayer, HSTULayerConfig

LENGTHS = (7, 0, 1, 12, 5)
MAX_SEQ_LEN = 12
TARGETS = (2, 0, 0, 4, 5)
BASE = HSTULayerConfig(embedding_dim=24, num_heads=4, hidden_dim=16, attention_dim=8)
ROOTS = tuple(RelativeBias.sqrt_thresholds(20, 3600.0).tolist())
BIASED: dict[str, Any] = {"enable_relative_attention_bias": True, "relative_bias_max_seq_len": 6}
RMS_NORMS: dict[str, Any] = {"input_norm": "rms_norm", "output_norm": "rms_norm"}
RESEARCH = HSTULayerConfig.research(
    embedding_dim=24, num_heads=2, linear_dim=8, attention_dim=16, max_sequence_len=MAX_SEQ_LEN
)
STU = HSTULayerConfig.stu(
    embedding_dim=24, num_heads=2, hidden_dim=16, attention_dim=8, output_dropout_ratio=0.0
)
RMS_STU = HSTULayerConfig.stu(
    embedding_dim=24,
    num_heads=2,
    hidden_dim=16,
    attention_dim=8,
    output_dropout_ratio=0.0,
    linear_bias=False,
    **RMS_NORMS,
)
DROPPING = replace(STU, output_dropout_ratio=0.3)
RECOMPUTE = {
    "recompute_norm": True,
    "recompute_linear": True,
    "recompute_silu": True,
    "recompute_gate": True,
}

CASES: dict[str, tuple[HSTULayerConfig, set[str]]] = {
    "base": (BASE, set()),
    "research": (RESEARCH, {"timestamps"}),
    "research row times": (RESEARCH, {"timestamps", "row_timestamps"}),
    "research, positions only": (RESEARCH, set()),
    "research, concat_ua": (replace(RESEARCH, concat_ua=True), {"timestamps"}),
    "research, no bias": (replace(RESEARCH, enable_relative_attention_bias=False), set()),
    "stu": (STU, {"num_targets"}),
    "stu, group norm": (replace(STU, use_group_norm=True), {"num_targets"}),
    "group norm": (replace(BASE, use_group_norm=True), set()),
    "group norm without weights": (replace(BASE, use_group_norm=True, norm_affine=False), set()),
    "rms norms": (replace(BASE, **RMS_NORMS), set()),
    "rms norms without weights": (
        replace(BASE, **RMS_NORMS, norm_affine=False, concat_ua=True), set()
    ),
    "rms output norm": (replace(BASE, output_norm="rms_norm", concat_x=True), set()),
    "stu, rms norms, no bias": (RMS_STU, {"num_targets"}),
    "stu, rms and group norm": (
        replace(STU, input_norm="rms_norm", use_group_norm=True), {"num_targets"}
    ),
    "no activation": (replace(BASE, linear_activation="none"), set()),
    "alpha": (replace(BASE, attn_alpha=0.7), set()),
    "scaling": (replace(BASE, scaling_seqlen=100), set()),
    "no biases": (replace(BASE, linear_bias=False, output_bias=False), set()),
    "concat_u": (replace(BASE, concat_u=True), set()),
    "concat_x": (replace(BASE, concat_x=True), set()),
    "full": (replace(BASE, causal=False), set()),
    "two-sided window": (replace(BASE, causal=False, max_attn_len=3), set()),
    "window": (replace(BASE, max_attn_len=3), set()),
    "window, recent rows without": (replace(BASE, max_attn_len=2, min_full_attn_seq_len=2), set()),
    "target groups": (replace(BASE, target_group_size=2), {"num_targets"}),
    "target unaware": (replace(BASE, target_aware=False), {"num_targets"}),
    "contexts": (BASE, {"num_contexts", "num_targets"}),
    "window, targets": (replace(BASE, max_attn_len=3), {"num_targets"}),
    "bias of several heads": (replace(BASE, **BIASED, relative_bias_heads=2), {"timestamps"}),
    "bias, few buckets": (replace(BASE, **BIASED, num_buckets=7), {"timestamps", "num_targets"}),
    "bias, buckets of roots": (
        replace(BASE, **BIASED, num_buckets=20, time_thresholds=ROOTS), {"timestamps"}
    ),
}  # fmt: skip


def make_inputs(config: HSTULayerConfig, names: set[str], dtype: torch.dtype) -> dict[str, Any]:
    """Returns the arguments of a call of the layer, for sequences of the lengths above."""
    lengths = torch.tensor(LENGTHS)
    total = int(lengths.sum())
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    times = torch.randint(0, 10**6, (total,)).sort().values
    optional = {
        "num_targets": torch.tensor(TARGETS),
        "num_contexts": torch.tensor([1, 0, 0, 2, 0]),
        "timestamps": times,
        "row_timestamps": times + torch.randint(1, 10**5, (total,)),
    }
    return {
        "x": torch.randn(total, config.embedding_dim, dtype=dtype),
        "seq_offsets": offsets,
        "max_seq_len": MAX_SEQ_LEN,
        **{name: optional[name] for name in names},
    }


def make_layer(config: HSTULayerConfig, dtype: torch.dtype = torch.float64) -> HSTULayer:
    """Returns a layer whose parameters are all random."""
    layer = HSTULayer(config, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def visible(config: HSTULayerConfig, i: int, j: int, length: int, c: int, targets: int) -> bool:
    """Returns whether row i of a sequence sees key j."""
    history = length - targets
    window = config.max_attn_len
    if not config.causal:
        return window == 0 or abs(i - j) <= window
    if i < c:
        return j < history
    if j > i:
        return False
    if i >= history and j >= history:
        group = config.target_group_size
        return (i - history) // group == (j - history) // group
    unlimited = config.min_full_attn_seq_len > 0 and i >= history - config.min_full_attn_seq_len
    if window == 0 or unlimited:
        return True
    first = min(i, history) - window
    return j >= (0 if first < c else first)


def plain_bias(layer: HSTULayer, head: int, i: int, j: int, gap: int | None) -> Tensor:
    """Returns the relative bias of row i and key j in a head; `gap` in seconds."""
    config = layer.config
    assert layer.position_weight is not None
    table = head * config.relative_bias_heads // config.num_heads
    reach = config.relative_bias_max_seq_len - 1
    bias = layer.position_weight[table, min(max(j - i, -reach), reach) + reach]
    if gap is not None:
        assert layer.time_weight is not None
        if config.time_thresholds == ROOTS:
            bucket = math.floor(math.sqrt(abs(gap) / 3600))
        else:
            bucket = math.floor(math.log(max(abs(gap), 1)) / 0.301)
        bias = bias + layer.time_weight[table, min(bucket, config.num_buckets)]
    return bias


def normalize(x: Tensor, eps: float) -> Tensor:
    centered = x - x.mean(dim=-1, keepdim=True)
    return centered / (centered.square().mean(dim=-1, keepdim=True) + eps).sqrt()


def plain_norm(x: Tensor, kind: str, norm: torch.nn.Module, eps: float) -> Tensor:
    if kind == "rms_norm":
        unit = x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()
        return unit if norm.weight is None else unit * norm.weight
    unit = normalize(x, eps)
    return unit if norm.weight is None else unit * norm.weight + norm.bias


def plain_layer(
    layer: HSTULayer,
    x: Tensor,
    seq_offsets: Tensor,
    max_seq_len: int,
    num_targets: Tensor | None = None,
    num_contexts: Tensor | None = None,
    timestamps: Tensor | None = None,
    row_timestamps: Tensor | None = None,
) -> Tensor:
    """Computes the layer without dropout, sequence by sequence and head by head."""
    config, results = layer.config, []
    heads, hidden, attention = config.num_heads, config.hidden_dim, config.attention_dim
    for b, (start, end) in enumerate(pairwise(seq_offsets)):
        rows, length = x[start:end], int(end - start)
        if length == 0:
            continue
        targets = int(num_targets[b]) if num_targets is not None and config.target_aware else 0
        contexts = config.contextual_seq_len if num_contexts is None else int(num_contexts[b])
        normed = plain_norm(rows, config.input_norm, layer.input_norm, config.norm_eps)
        uvqk = normed @ layer.uvqk.weight.T
        if config.linear_bias:
            uvqk = uvqk + layer.uvqk.bias
        if config.linear_activation == "silu":
            uvqk = uvqk * torch.sigmoid(uvqk)
        u, v = uvqk[:, : heads * hidden], uvqk[:, heads * hidden : 2 * heads * hidden]
        q, k = uvqk[:, 2 * heads * hidden :].chunk(2, dim=1)
        if config.linear_activation == "silu_u":
            u = u * torch.sigmoid(u)
        mask = torch.tensor(
            [[visible(config, i, j, length, contexts, targets) for j in range(length)]
             for i in range(length)]
        )  # fmt: skip
        outputs, normed_outputs = [], []
        for head in range(heads):
            qk = slice(head * attention, (head + 1) * attention)
            scores = q[:, qk] @ k[:, qk].T
            if config.enable_relative_attention_bias:
                gaps: list[list[int | None]] = [[None] * length] * length
                if timestamps is not None:
                    times = timestamps[start:end]
                    asked = (
                        torch.cat([times[1:], times[-1:]])
                        if row_timestamps is None
                        else row_timestamps[start:end]
                    )
                    gaps = (asked[:, None] - times).tolist()
                scores = scores + torch.stack(
                    [torch.stack([plain_bias(layer, head, i, j, gaps[i][j])
                                  for j in range(length)]) for i in range(length)]
                )  # fmt: skip
            scores = config.alpha * scores
            scale = max_seq_len if config.scaling_seqlen == -1 else config.scaling_seqlen
            weights = torch.where(mask, scores * torch.sigmoid(scores) / scale, 0.0)
            outputs.append(weights @ v[:, head * hidden : (head + 1) * hidden])
            if config.use_group_norm:
                one = normalize(outputs[-1], config.norm_eps)
                if config.norm_affine:
                    one = one * layer.output_norm.weight[head] + layer.output_norm.bias[head]
                normed_outputs.append(one)
        a = torch.cat(outputs, dim=1)
        if config.use_group_norm:
            normed_a = torch.cat(normed_outputs, dim=1)
        else:
            normed_a = plain_norm(a, config.output_norm, layer.output_norm, config.norm_eps)
        parts = [normed_a * u]
        if config.concat_x:
            parts.insert(0, a)
        if config.concat_u:
            parts.insert(0, u)
        if config.concat_ua:
            parts = [u, normed_a, normed_a * u]
        y = torch.cat(parts, dim=1) @ layer.output.weight.T
        results.append(rows + (y + layer.output.bias if config.output_bias else y))
    return torch.cat(results)


def with_config(layer: HSTULayer, **changes: Any) -> HSTULayer:
    """Returns a layer with the same parameters and a changed configuration."""
    other = copy.copy(layer)
    other.config = replace(layer.config, **changes)
    return other


def run(
    layer: HSTULayer,
    inputs: dict[str, Any],
    cotangent: Tensor,
    call: Callable[..., Tensor] = HSTULayer.__call__,
) -> dict[str, Tensor]:
    """Returns the output and all existing gradients by name.

    `call` gets the layer and its arguments; it may be `plain_layer`.
    """
    x = inputs["x"].detach().requires_grad_()
    leaves = {"x": x, **dict(layer.named_parameters())}
    output = call(layer, **{**inputs, "x": x})
    gradients = torch.autograd.grad(output, list(leaves.values()), cotangent, allow_unused=True)
    found = zip(leaves, gradients, strict=True)
    return {"output": output.detach()} | {f"d {n}": g for n, g in found if g is not None}


def assert_all_close(
    actual: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float
) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            actual[name], tensor, **tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )
