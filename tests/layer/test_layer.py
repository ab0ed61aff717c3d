"""Tests of the HSTU layer against a reference layer in fp64, and of its properties."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hstu_attn.layer import HSTULayer, HSTULayerConfig, HSTUStack, PositionalEmbedding
from hstu_attn.testing import assert_matches
from tests.helpers.layers import (
    BASE,
    BIASED,
    CASES,
    MAX_SEQ_LEN,
    RESEARCH,
    RMS_NORMS,
    RMS_STU,
    STU,
    make_inputs,
    make_layer,
    plain_layer,
    run,
)


@pytest.mark.parametrize("name", CASES)
def test_layer_computes_what_it_says(name: str) -> None:
    config, names = CASES[name]
    layer, inputs = make_layer(config), make_inputs(config, names, torch.float64)
    leaves = [inputs["x"].requires_grad_(), *layer.parameters()]
    output, expected = layer(**inputs), plain_layer(layer, **inputs)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    cotangent = torch.randn_like(output)
    # Without timestamps the time table does not change the result.
    gradients = torch.autograd.grad(output, leaves, cotangent, allow_unused=True)
    expected_gradients = torch.autograd.grad(expected, leaves, cotangent, allow_unused=True)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "config", [RESEARCH, STU, replace(STU, use_group_norm=True), replace(STU, **RMS_NORMS)]
)
def test_layer_follows_the_dtype_of_its_input(config: HSTULayerConfig, dtype: torch.dtype) -> None:
    # A norm of almost equal numbers would magnify rounding errors without limit.
    config = replace(config, norm_eps=1.0)
    layer = make_layer(config, torch.float32)
    double, same_dtype = deepcopy(layer).double(), deepcopy(layer).to(dtype)
    results: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
    # The gradient of a weight per head is two numbers, so errors of several batches are summed.
    for _ in range(4):
        inputs = make_inputs(config, set(), dtype)
        cotangent = torch.randn_like(inputs["x"])
        found = run(layer, inputs, cotangent)
        exact = run(double, {**inputs, "x": inputs["x"].double()}, cotangent.double(), plain_layer)
        reference = run(same_dtype, inputs, cotangent, plain_layer)
        assert_matches("output", found["output"], exact["output"], reference["output"])
        assert found.keys() == exact.keys() == reference.keys()
        for name, tensor in found.items():
            assert tensor.dtype == (dtype if name in ("output", "d x") else torch.float32), name
            results.setdefault(name, []).append((tensor, exact[name], reference[name]))
    for name, triples in results.items():
        actual, wanted, plain = map(torch.stack, zip(*triples, strict=True))
        allowed = 2 * (plain - wanted).norm() + 8 * torch.finfo(dtype).eps * wanted.norm()
        assert 0 < (actual - wanted).norm() <= allowed, name


@pytest.mark.parametrize("config", [RESEARCH, STU])
def test_sequences_do_not_touch_each_other(config: HSTULayerConfig) -> None:
    stack = HSTUStack(config, 2).double()
    names = {"timestamps"} if config is RESEARCH else {"num_targets"}
    inputs = make_inputs(config, names, torch.float64)
    together = stack(**inputs)
    offsets = inputs["seq_offsets"].tolist()
    for b, (start, end) in enumerate(pairwise(offsets)):
        alone = {
            "x": inputs["x"][start:end],
            "seq_offsets": torch.tensor([0, end - start]),
            "max_seq_len": MAX_SEQ_LEN,
        }
        if "timestamps" in names:
            alone["timestamps"] = inputs["timestamps"][start:end]
        else:
            alone["num_targets"] = inputs["num_targets"][b : b + 1]
        torch.testing.assert_close(together[start:end], stack(**alone), rtol=1e-12, atol=1e-12)

    spoiled = inputs["x"].clone()
    spoiled[offsets[3] : offsets[4]] = float("nan")
    others = torch.ones(len(spoiled), dtype=torch.bool)
    others[offsets[3] : offsets[4]] = False
    output = stack(**{**inputs, "x": spoiled})
    torch.testing.assert_close(output[others], together[others], rtol=0, atol=0)


def test_no_row_sees_what_comes_later() -> None:
    stack = HSTUStack(RESEARCH, 3).double()
    inputs = make_inputs(RESEARCH, {"timestamps", "row_timestamps"}, torch.float64)
    before = stack(**inputs)
    place = 15  # in the sequence of 12 rows, which starts at row 8
    changed = {name: value.clone() if isinstance(value, Tensor) else value
               for name, value in inputs.items()}  # fmt: skip
    changed["x"][place] += 1
    changed["timestamps"][place] += 10_000
    after = stack(**changed)
    torch.testing.assert_close(after[8:place], before[8:place], rtol=0, atol=0)
    assert not torch.allclose(after[place:20], before[place:20])


def test_q_k_and_v_are_views_of_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        seen.extend((v, q, k))
        return v

    monkeypatch.setattr("hstu_attn.layer.ops.attention", attention)
    layer = HSTULayer(BASE)
    layer(**make_inputs(BASE, set(), torch.float32))
    columns = sum(BASE.split_sizes)
    assert len({part.untyped_storage().data_ptr() for part in seen}) == 1
    assert all(part.stride(0) == columns for part in seen)
    offsets = [part.storage_offset() for part in seen]
    u, v, q, _ = BASE.split_sizes
    assert offsets == [u, u + v, u + v + q]


def test_dropout_is_before_the_output_linear_and_only_in_training() -> None:
    layer = make_layer(replace(BASE, output_dropout_ratio=0.5))
    inputs = make_inputs(BASE, set(), torch.float64)
    torch.manual_seed(1)
    first = layer(**inputs)
    assert not torch.equal(first, layer(**inputs))
    torch.manual_seed(1)
    torch.testing.assert_close(layer(**inputs), first, rtol=0, atol=0)
    layer.eval()
    torch.testing.assert_close(layer(**inputs), plain_layer(layer, **inputs))


def test_stack_applies_its_layers_in_turn() -> None:
    stack = HSTUStack(STU, 3).double()
    inputs = make_inputs(STU, {"num_targets"}, torch.float64)
    x = inputs["x"]
    for layer in stack.layers:
        x = layer(**{**inputs, "x": x})
    torch.testing.assert_close(stack(**inputs), x, rtol=0, atol=0)


def test_empty_batches() -> None:
    for config in (RESEARCH, STU, replace(STU, use_group_norm=True), replace(STU, **RMS_NORMS)):
        layer = HSTULayer(config)
        for offsets in ([0], [0, 0, 0]):
            x = torch.zeros(0, config.embedding_dim, requires_grad=True)
            output = layer(x, torch.tensor(offsets), MAX_SEQ_LEN)
            assert output.shape == x.shape
            output.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, RMS_NORMS], ids=["layer norms", "rms norms"])
def test_compiled_stack_is_the_same(changes: dict[str, Any]) -> None:
    stack = HSTUStack(replace(RESEARCH, output_dropout_ratio=0.0, **changes), 2)
    inputs = make_inputs(RESEARCH, {"timestamps"}, torch.float32)
    compiled = torch.compile(stack, fullgraph=True, backend="aot_eager")
    output, expected = compiled(**inputs), stack(**inputs)
    torch.testing.assert_close(output, expected)
    parameters = list(stack.parameters())
    for gradient, wanted in zip(
        torch.autograd.grad(output.square().sum(), parameters),
        torch.autograd.grad(expected.square().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-4)


def test_embedding_of_positions() -> None:
    offsets = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    embedding = PositionalEmbedding(max_seq_len=4, embedding_dim=16)
    x = torch.randn(5, 16)
    table = embedding.embedding.weight
    expected = 4 * x + table[[0, 1, 2, 0, 1]]
    torch.testing.assert_close(embedding(x, offsets), expected)


def test_initial_positions_end_at_two_deviations() -> None:
    table = PositionalEmbedding(max_seq_len=1000, embedding_dim=25).embedding.weight
    assert 0.39 < table.abs().max() <= 0.4  # twice sqrt(1 / 25)
    # A normal distribution truncated there has 0.8796 of its standard deviation.
    assert table.std().item() == pytest.approx(0.8796 * 0.2, rel=0.03)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 0}, "num_heads: expected a positive number, got 0"),
        ({"max_attn_len": -1}, "max_attn_len: expected zero or a positive number, got -1"),
        ({"linear_activation": "relu"}, "linear_activation: expected"),
        ({"input_norm": "rms"}, "input_norm: expected one of .*'rms_norm'.*, got 'rms'"),
        ({"output_norm": None}, "output_norm: expected one of .*'rms_norm'.*, got None"),
        (
            {"output_norm": "rms_norm", "use_group_norm": True},
            "output_norm: expected 'layer_norm' with use_group_norm, got 'rms_norm'",
        ),
        ({"norm_eps": 0.0}, "norm_eps: expected a positive number, got 0.0"),
        ({"output_dropout_ratio": 1.0}, "output_dropout_ratio: expected"),
        ({"concat_ua": True, "concat_u": True}, "concat_ua: expected False with"),
        ({"scaling_seqlen": 0}, "scaling_seqlen: expected -1 or positive, got 0"),
        ({"enable_relative_attention_bias": True}, "relative_bias_max_seq_len: expected"),
        ({**BIASED, "relative_bias_heads": 3}, "relative_bias_heads: expected a divisor"),
        ({**BIASED, "time_thresholds": [1, 2]}, "time_thresholds: expected a tuple"),
        ({**BIASED, "time_thresholds": (1, 3, 2)}, "time_thresholds: expected a tuple .* non-decr"),
        ({**BIASED, "time_thresholds": (-1, 3)}, "time_thresholds: expected a tuple of non-neg"),
        ({"causal": False, "contextual_seq_len": 2}, "causal: expected True"),
    ],
)
def test_config_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(BASE, **changes)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (BASE, {"x": torch.zeros(25, 8)}, r"x: expected shape \(total, 24\), got \(25, 8\)"),
        (BASE, {"timestamps": torch.zeros(25, dtype=torch.int64)}, "without a time table"),
        (RESEARCH, {"row_timestamps": torch.zeros(25, dtype=torch.int64)}, "without timestamps"),
        (
            replace(BASE, causal=False),
            {"num_targets": torch.zeros(5)},
            "expected None with causal=False",
        ),
        (BASE, {"num_targets": torch.zeros(3, dtype=torch.int64)}, "num_targets"),
        (BASE, {"seq_offsets": torch.tensor([0, 30])}, "cu_seqlens_q"),
    ],
)
def test_call_refuses(config: HSTULayerConfig, changes: dict[str, Any], message: str) -> None:
    inputs = make_inputs(config, set(), torch.float32)
    with pytest.raises(ValueError, match=message):
        HSTULayer(config)(**{**inputs, **changes})


def test_stack_refuses_no_layers() -> None:
    with pytest.raises(ValueError, match="num_layers: expected a positive number, got 0"):
        HSTUStack(BASE, 0)


def test_public_names_and_settings() -> None:
    assert (RESEARCH.linear_dim, RESEARCH.dqk, RESEARCH.alpha) == (8, 16, 1.0)
    assert STU.alpha == 1 / math.sqrt(8)
    assert STU.output_features == 3 * 2 * 16
    assert HSTULayer(RESEARCH).uvqk.bias is None
    assert HSTULayer(STU).output.bias is None
    assert HSTULayer(RESEARCH).input_norm.weight is None


def test_parameters_of_a_layer_with_rms_norms() -> None:
    """Only the output linear has a bias, in the state dict and among the gradients."""
    assert HSTULayerConfig(**asdict(RMS_STU)) == RMS_STU
    layer = HSTULayer(RMS_STU, dtype=torch.float64)
    names = ["input_norm.weight", "uvqk.weight", "output_norm.weight", "output.weight"]
    assert list(layer.state_dict()) == [name for name, _ in layer.named_parameters()] == names
    assert layer.input_norm.bias is None
    assert torch.equal(layer.output_norm.weight, torch.ones(32).double())
    inputs = make_inputs(RMS_STU, {"num_targets"}, torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    other = HSTULayer(RMS_STU, dtype=torch.float64)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(**inputs), layer(**inputs))


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_norms_are_torchs(eps: float) -> None:
    """The input of the first linear equals `torch.nn.functional`'s norm of the rows."""
    x = 3 + torch.randn(9, 24, dtype=torch.float64)
    for kind, function in (("layer_norm", F.layer_norm), ("rms_norm", F.rms_norm)):
        config = replace(BASE, input_norm=kind, norm_eps=eps, linear_activation="none")
        layer = make_layer(config)
        norm = layer.input_norm
        rest = (norm.weight,) if kind == "rms_norm" else (norm.weight, norm.bias)
        wanted = F.linear(function(x, (24,), *rest, eps=eps), layer.uvqk.weight, layer.uvqk.bias)
        torch.testing.assert_close(layer._steps().project(x), wanted, rtol=1e-12, atol=1e-12)


def test_initial_weights() -> None:
    """`research` starts with N(0, 0.02) in the first linear; all else is Xavier uniform."""
    widths = {"embedding_dim": 192, "num_heads": 2, "attention_dim": 96}
    research = HSTULayerConfig.research(**widths, linear_dim=96, max_sequence_len=300)
    stu = HSTULayerConfig.stu(**widths, hidden_dim=96)
    for config in (research, stu):
        layer = HSTULayer(config)
        outputs = [layer.output.weight] + ([layer.uvqk.weight] if config is stu else [])
        for weight in outputs:
            bound = math.sqrt(6 / sum(weight.shape))
            assert 0.99 * bound < weight.abs().max().item() <= bound
            assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    layer = HSTULayer(research)
    assert layer.uvqk.weight.mean().item() == pytest.approx(0, abs=0.0005)
    assert layer.uvqk.weight.std().item() == pytest.approx(0.02, rel=0.02)
    beyond = (layer.uvqk.weight.abs() > 0.04).double().mean().item()
    assert beyond == pytest.approx(0.0455, rel=0.05)  # as for a normal distribution
    for table in (layer.position_weight, layer.time_weight):
        assert table is not None
        assert table.std().item() == pytest.approx(0.02, rel=0.25)
    with pytest.raises(ValueError, match="linear_init_std: expected None or a positive number"):
        replace(BASE, linear_init_std=0.0)
