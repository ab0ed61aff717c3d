"""Tests of the fused HSTU layer against the composed one: on the CPU with its steps in plain torch
and with its Triton kernels in Triton's interpreter, and on a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp import fully_shard
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from hstu_attn.fused import forward, operator, torch_steps
from hstu_attn.fused.options import dropout_threshold
from hstu_attn.layer import HSTULayer, HSTULayerConfig, HSTUStack
from tests.helpers.distributed_runs import run_ranks
from tests.helpers.layers import (
    BASE,
    CASES,
    DROPPING,
    RECOMPUTE,
    RESEARCH,
    RMS_NORMS,
    RMS_STU,
    STU,
    assert_all_close,
    make_inputs,
    make_layer,
    run,
    with_config,
)


@pytest.mark.parametrize("recompute", [{}, RECOMPUTE], ids=["kept", "recomputed"])
@pytest.mark.parametrize("name", CASES)
def test_fused_is_composed(name, recompute):
    config, names = CASES[name]
    layer, inputs = make_layer(config), make_inputs(config, names, torch.float64)
    cotangent = torch.randn_like(inputs["x"])
    composed = run(with_config(layer, fused=False), inputs, cotangent)
    fused = run(with_config(layer, fused=True, **recompute), inputs, cotangent)
    # The gradients of bias tables are fp32.
    tables = {n for n in composed if n.endswith(("position_weight", "time_weight"))}
    assert_all_close(
        {n: fused[n] for n in fused if n not in tables},
        {n: composed[n] for n in composed if n not in tables},
        rtol=1e-9,
        atol=1e-10,
    )
    for table in tables:
        torch.testing.assert_close(fused[table], composed[table], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("changes", [{}, RMS_NORMS], ids=["layer norms", "rms norms"])
def test_gradients_by_differences(changes):
    sizes = {"embedding_dim": 4, "num_heads": 1, "hidden_dim": 8, "attention_dim": 8}
    config = replace(DROPPING, **sizes, **changes)
    layer = make_layer(replace(config, fused=True, **RECOMPUTE))
    layer._seed = lambda x: torch.tensor([77])
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    parameters = dict(layer.named_parameters())

    def call(x: Tensor, *values: Tensor) -> Tensor:
        replaced = dict(zip(parameters, values, strict=True))
        arguments = (x, torch.tensor([0, 1, 4]), 3, torch.tensor([0, 1]))
        return torch.func.functional_call(layer, replaced, arguments)

    assert torch.autograd.gradcheck(call, (x, *parameters.values()), fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [{}, RECOMPUTE], ids=["kept", "recomputed"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("frozen", [["uvqk"], ["output"], ["input_norm", "uvqk", "output"]])
@pytest.mark.parametrize("config", [DROPPING, RMS_STU], ids=["layer norms", "rms norms, no bias"])
def test_frozen_weights(config, frozen, compiled, recompute, monkeypatch):
    """Frozen weights need no matrix product, and do not change other gradients."""
    torch._dynamo.reset()
    layer = HSTULayer(replace(config, fused=True, **recompute))
    x, offsets, longest, targets, *_ = compiled_inputs([5, 30, 3])
    x.requires_grad_()
    products: list[torch.Size] = []
    weight_gradient = operator._weight_gradient

    def counting(doutput: Tensor, read: Tensor, weight: Tensor) -> Tensor:
        products.append(weight.shape)
        return weight_gradient(doutput, read, weight)

    monkeypatch.setattr(operator, "_weight_gradient", counting)

    def train() -> dict[str, Tensor]:
        leaves = {n: p for n, p in layer.named_parameters() if p.requires_grad} | {"x": x}
        torch.manual_seed(4)
        called = torch.compile(layer, backend="aot_eager") if compiled else layer
        output = called(x, offsets, longest, targets)
        gradients = torch.autograd.grad(output.square().sum(), list(leaves.values()))
        return dict(zip(leaves, gradients, strict=True))

    expected = train()
    assert len(products) == 2
    for name in frozen:
        layer.get_submodule(name).requires_grad_(False)
    products.clear()
    if TorchVersion(torch.__version__) < (2, 13):  # 2.10 does not see that a weight was frozen
        torch._dynamo.reset()
    found = train()
    kept = {"uvqk": layer.uvqk, "output": layer.output}
    assert set(products) == {m.weight.shape for name, m in kept.items() if name not in frozen}
    assert found.keys() == {n for n in expected if n.split(".")[0] not in frozen}
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name
    torch._dynamo.reset()


def test_without_gradients():
    layer = make_layer(replace(STU, fused=True))
    inputs = make_inputs(STU, {"num_targets"}, torch.float64)
    with torch.no_grad():
        inferred = layer(**inputs)
    assert not inferred.requires_grad
    torch.testing.assert_close(inferred, layer(**inputs), rtol=1e-12, atol=1e-12)


def test_empty_batches(device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for config in (RESEARCH, STU, replace(STU, use_group_norm=True), RMS_STU):
        layer = HSTULayer(replace(config, fused=True), device=device)
        x = torch.zeros(0, config.embedding_dim, dtype=dtype, device=device, requires_grad=True)
        times = x.new_zeros(0, dtype=torch.int64) if config is RESEARCH else None
        layer(x, torch.tensor([0, 0], device=device), 8, timestamps=times).sum().backward()
        assert all(not p.grad.any() for p in layer.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("config", [STU, RMS_STU], ids=["layer norms", "rms norms"])
def test_bf16_rows_and_fp32_weights(config):
    """Rounding errors are at most the composed layer's, and twice those for any one element.

    Root mean squares over many layers are compared, because the largest of a few errors is
    sometimes more than twice that of the same formula with other roundings.
    """
    errors: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for _ in range(256):
        layer = make_layer(replace(config, fused=True, norm_eps=1.0), torch.float32)
        inputs = make_inputs(config, {"num_targets"}, torch.bfloat16)
        cotangent = torch.randn_like(inputs["x"])
        fused = run(layer, inputs, cotangent)
        composed = run(with_config(layer, fused=False), inputs, cotangent)
        double = with_config(copy.deepcopy(layer).double(), fused=False)
        exact = run(double, {**inputs, "x": inputs["x"].double()}, cotangent.double())
        assert fused.keys() == composed.keys() == exact.keys()
        for name, wanted in exact.items():
            assert fused[name].dtype == composed[name].dtype
            pair = tuple((found[name] - wanted) / wanted.abs().max() for found in (fused, composed))
            errors.setdefault(name, []).append(pair)
    for name, pairs in errors.items():
        error, allowed = (torch.stack(e).square() for e in zip(*pairs, strict=True))
        assert error.mean() <= allowed.mean(), name
        assert error.mean(0).max() <= 2**2 * allowed.mean(0).max(), name


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seq_offsets": [0, 4]}, "cu_seqlens_q: expected a tensor, got list"),
        ({"max_seq_len": 7.5}, "max_seqlen_q: expected an int, got float"),
        ({"num_targets": [1, 2]}, "num_targets: expected a tensor or None, got list"),
        ({"num_targets": torch.tensor([1])}, "num_targets: expected"),
        ({"seq_offsets": torch.zeros(4)}, "cu_seqlens_q: expected"),
    ],
)
def test_errors_are_those_of_attention(wrong, message, records):
    layer, inputs = make_layer(STU), make_inputs(STU, {"num_targets"}, torch.float64)
    for is_fused in (False, True):
        with torch.set_grad_enabled(records), pytest.raises(ValueError, match=f"^{message}"):
            with_config(layer, fused=is_fused)(**{**inputs, **wrong})


def test_fused_can_be_differentiated_once():
    layer = make_layer(replace(BASE, fused=True))
    inputs = make_inputs(BASE, set(), torch.float64)
    x = inputs["x"].requires_grad_()
    (dx,) = torch.autograd.grad(layer(**inputs).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        dx.sum().backward()


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_penalty_of_the_gradient_is_refused(checkpointed):
    """A gradient penalty's derivative has a path around the layer; that path alone is wrong."""
    layer = make_layer(replace(BASE, fused=True))
    inputs = make_inputs(BASE, set(), torch.float64)
    x = inputs["x"].requires_grad_()
    out = checkpoint(layer, **inputs, use_reentrant=False) if checkpointed else layer(**inputs)
    (plain,) = torch.autograd.grad(layer(**inputs).sum(), x)
    (dx,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    assert torch.equal(dx, plain)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad((dx * x).sum(), x)


@pytest.mark.parametrize("name", ["input_norm.bias", "output.weight"])
def test_fused_refuses_forward_mode(name):
    """This includes weights that attention does not read, whose tangent GPU kernels would drop."""
    layer = make_layer(replace(BASE, fused=True, norm_affine=True)).requires_grad_(False)
    inputs = make_inputs(BASE, set(), torch.float64)
    owner, _, attribute = name.rpartition(".")
    with forward_ad.dual_level():
        weight = layer.get_submodule(owner)._parameters.pop(attribute)
        dual = forward_ad.make_dual(weight.detach(), torch.ones_like(weight))
        setattr(layer.get_submodule(owner), attribute, dual)
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            layer(**inputs)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(x_dtype):
    layer = make_layer(replace(STU, fused=True, **RECOMPUTE), torch.float32)
    inputs = make_inputs(STU, {"num_targets"}, x_dtype)
    cotangent = torch.randn_like(inputs["x"])
    expected = run(layer, inputs, cotangent)
    with torch.autocast("cpu", torch.bfloat16 if x_dtype == torch.float32 else torch.float16):
        assert_all_close(run(layer, inputs, cotangent), expected, rtol=0, atol=0)
        x = inputs["x"].requires_grad_()
        output = layer(**inputs)
        with torch.no_grad():
            inferred = layer(**inputs)
    assert inferred.dtype == x_dtype
    torch.testing.assert_close(inferred, expected["output"])
    (dx,) = torch.autograd.grad(output, x, cotangent)
    assert torch.equal(dx, expected["d x"])


@pytest.mark.slow
@pytest.mark.parametrize("config", [DROPPING, replace(DROPPING, fused=True)])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(config, use_reentrant):
    """Checkpointing works for both layers; the recomputed forward has the same dropout."""
    stack = HSTUStack(config, 2).double()
    inputs = make_inputs(config, {"num_targets"}, torch.float64)
    rest = list(inputs.values())[1:]
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(8)
        x = inputs["x"].detach().requires_grad_()
        stack.zero_grad()
        output = x
        for layer in stack.layers:
            if checkpointed:
                output = checkpoint(layer, output, *rest, use_reentrant=use_reentrant)
            else:
                output = layer(output, *rest)
        output.square().sum().backward()
        results.append([output.detach(), x.grad, *(p.grad.clone() for p in stack.parameters())])
    for actual, expected in zip(*reversed(results), strict=True):
        assert actual.any()
        assert torch.equal(actual, expected)


def sharded_gradients(
    config: HSTULayerConfig, checkpointed: bool
) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns all gradients, from ranks that shard the weights and from one process."""
    stack, inputs = HSTUStack(config, 2), make_inputs(config, {"num_targets"}, torch.float32)
    stack(**inputs).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in stack.named_parameters()}
    stack.zero_grad(set_to_none=True)
    if checkpointed:
        apply_activation_checkpointing(stack, check_fn=lambda m: isinstance(m, HSTULayer))
    for layer in stack.layers:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(stack, reshard_after_forward=True)
    stack(**inputs).square().sum().backward()
    return {
        name: (
            parameter.grad.full_tensor(),
            expected[name.replace("_checkpoint_wrapped_module.", "")],
        )
        for name, parameter in stack.named_parameters()
    }


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
def test_sharded_weights(checkpointed):
    """FSDP2 frees the weights after the forward, and gathers them again for the backward."""
    config = replace(STU, fused=True, output_dropout_ratio=0.0, norm_eps=1e-2, **RECOMPUTE)
    for gradients in run_ranks(2, sharded_gradients, config, checkpointed):
        for actual, expected in gradients.values():
            assert expected.any()
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------------------------------------
# Dropout
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [DROPPING, replace(DROPPING, use_group_norm=True)])
def test_dropout_is_the_same_in_both_directions(config, monkeypatch):
    layer, inputs = make_layer(config), make_inputs(config, {"num_targets"}, torch.float64)
    cotangent = torch.randn_like(inputs["x"])
    torch.manual_seed(3)
    (seed,) = [layer._seed(inputs["x"])]
    groups = config.num_heads if config.use_group_norm else 1
    width = config.num_heads * config.hidden_dim // groups
    threshold = dropout_threshold(0.3)
    kept = torch_steps.kept_elements(seed, len(cotangent), 3, groups, width, threshold)
    factors = kept.flatten(1).double() / (1 - threshold / 2**16)

    def multiplied(y: Tensor, ratio: float, training: bool) -> Tensor:
        assert (ratio, training) == (0.3, True)
        return y * factors

    with monkeypatch.context() as patch:
        patch.setattr("hstu_attn.layer.F.dropout", multiplied)
        expected = run(with_config(layer, fused=False), inputs, cotangent)
    for recompute in ({}, RECOMPUTE):
        torch.manual_seed(3)
        actual = run(with_config(layer, fused=True, **recompute), inputs, cotangent)
        assert_all_close(actual, expected, rtol=1e-9, atol=1e-10)


def test_dropout_follows_the_seed_and_the_mode():
    layer = make_layer(replace(DROPPING, fused=True))
    inputs = make_inputs(DROPPING, {"num_targets"}, torch.float64)
    torch.manual_seed(1)
    first, second = layer(**inputs), layer(**inputs)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(layer(**inputs), first)
    layer.eval()
    composed = with_config(layer, fused=False)
    torch.testing.assert_close(layer(**inputs), composed(**inputs), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_dropout_keeps_the_mean():
    layer = make_layer(replace(DROPPING, fused=True))
    inputs = make_inputs(DROPPING, set(), torch.float64)
    with torch.no_grad():
        outputs = torch.stack([layer(**inputs) for _ in range(400)])
        mean = with_config(layer, output_dropout_ratio=0.0)(**inputs)
    deviation = outputs.std(dim=0) / 400**0.5
    assert ((outputs.mean(dim=0) - mean).abs() / deviation).square().mean() < 1.5


# ---------------------------------------------------------------------------------------------
# Memory that the forward keeps
# ---------------------------------------------------------------------------------------------


def kept_bytes(layer: HSTULayer, inputs: dict[str, Any]) -> int:
    """Returns the bytes that the forward saves, without arguments and parameters."""
    given = {t.data_ptr() for t in (*inputs.values(), *layer.parameters()) if torch.is_tensor(t)}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(**inputs)
    del output
    return sum(size for place, size in sizes.items() if place not in given)


@pytest.mark.parametrize("activation", ["silu", "silu_u", "none"])
def test_flags_save_what_they_promise(activation):
    config = replace(DROPPING, fused=True, linear_activation=activation)
    layer, inputs = make_layer(config), make_inputs(config, set(), torch.float64)
    heads_times_hidden, *_ = config.split_sizes
    saved = {
        "recompute_norm": config.embedding_dim,
        "recompute_linear": sum(config.split_sizes),
        "recompute_silu": sum(config.split_sizes[1:]) if activation == "silu" else 0,
        "recompute_gate": config.output_features,
    }
    row = 8 * len(inputs["x"])
    always = heads_times_hidden
    cotangent = torch.randn_like(inputs["x"])
    results = []
    for flags in product([False, True], repeat=4):
        chosen = dict(zip(saved, flags, strict=True))
        other = with_config(layer, **chosen)
        wanted = always + sum(saved[name] for name, flag in chosen.items() if not flag)
        assert kept_bytes(other, inputs) == row * wanted + 8  # 8 bytes of the seed
        torch.manual_seed(2)
        results.append(run(other, inputs, cotangent))
    for result in results[1:]:
        assert_all_close(result, results[0], rtol=0, atol=0)


def test_saved_configurations_load():
    """Configurations saved with and without these newer fields can be loaded."""
    new = {"fused", *RECOMPUTE, *RMS_NORMS}
    old = {name: value for name, value in asdict(STU).items() if name not in new}
    assert HSTULayerConfig(**old) == STU
    config = replace(STU, fused=True, recompute_silu=True)
    assert HSTULayerConfig(**asdict(config)) == config


def test_a_layer_is_fused_by_default_on_gpus_alone():
    x = torch.zeros(2, BASE.embedding_dim)
    assert not HSTULayer(BASE)._is_fused(x)
    assert not HSTULayer(BASE)._is_fused(x.bfloat16())
    assert HSTULayer(replace(BASE, fused=True))._is_fused(x)


# ---------------------------------------------------------------------------------------------
# torch.compile and torch.export
# ---------------------------------------------------------------------------------------------


def operator_arguments(config: HSTULayerConfig, names: set[str]) -> tuple[Any, ...]:
    """Returns the operator's arguments from a layer that records gradients."""
    layer, inputs = make_layer(config, torch.float32), make_inputs(config, names, torch.float32)
    seen: list[tuple[Any, ...]] = []

    def spy(x: Tensor, weights: Any, call: Any, seed: Any, settings: Any) -> Tensor:
        seen.append((x, *weights, *call, seed, *settings._replace(has_backward=True)))
        return x

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operator, "hstu_layer", spy)
        layer(**{**inputs, "x": inputs["x"].requires_grad_()})
    return seen[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "names"),
    [
        (replace(RESEARCH, fused=True), {"timestamps"}),
        (replace(DROPPING, fused=True, **RECOMPUTE), {"num_targets"}),
        (replace(BASE, fused=True, linear_activation="none"), set()),
        (replace(RMS_STU, fused=True, **RECOMPUTE), {"num_targets"}),
    ],
)
@pytest.mark.parametrize("columns_first", [False, True])
def test_operators_are_well_formed(config, names, columns_first):
    arguments = operator_arguments(config, names)
    if columns_first:  # the operators' outputs are contiguous all the same
        x, *rest = arguments
        arguments = (x.detach().t().contiguous().t().requires_grad_(), *rest)
    forward = torch.ops.hstu_attn.hstu_layer_forward.default
    torch.library.opcheck(forward, arguments)
    with torch.no_grad():
        out, *kept = forward(*arguments)
        plain = [t.detach() if torch.is_tensor(t) else t for t in arguments]
        backward = torch.ops.hstu_attn.hstu_layer_backward.default
        for wanted in ([True] * 10, [False, True] * 5):
            torch.library.opcheck(backward, (torch.randn_like(out), kept, wanted, *plain))


def test_tensors_without_data(monkeypatch):
    """Fake tensors get output shapes without running any step of the layer."""
    config = replace(DROPPING, fused=True)
    shape = (12, config.embedding_dim)

    def differentiated(device: str) -> Tensor:
        layer = HSTULayer(config, device=device)
        x = torch.empty(shape, device=device, requires_grad=True)
        offsets = torch.empty(3, dtype=torch.int64, device=device)
        layer(x, offsets, 7).sum().backward()
        with torch.no_grad():
            assert layer(x, offsets, 7).shape == shape
        assert all(p.grad.shape == p.shape for p in layer.parameters())
        return x.grad

    assert differentiated("meta").shape == shape
    monkeypatch.setattr(forward, "steps_for", lambda x, *widths: None)
    with FakeTensorMode():
        assert differentiated("cpu").shape == shape


def compiled_inputs(lengths: list[int], config: HSTULayerConfig = STU) -> tuple[Any, ...]:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    targets = torch.tensor([length // 3 for length in lengths])
    x = torch.randn(sum(lengths), config.embedding_dim)
    times = None
    if config.enable_relative_attention_bias:
        times = torch.randint(10**6, (len(x),)).cumsum(0)
    return x, offsets, max(lengths), targets, None, times


COMPILED = pytest.mark.parametrize("config", [DROPPING, RESEARCH], ids=["stu", "research"])


@pytest.mark.slow
@COMPILED
def test_compiled_stack(config):
    """The graph has one operator for each layer, and works for other sizes."""
    torch._dynamo.reset()
    stack = HSTUStack(replace(config, fused=True, recompute_gate=True), 2)
    parameters = list(stack.parameters())
    counts: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        from torch._dynamo.backends.debugging import aot_eager

        called = [n for n in graph.graph.nodes if "hstu_layer_forward" in str(n.target)]
        counts.append(len(called))
        return aot_eager(graph, inputs)

    compiled = torch.compile(stack, fullgraph=True, dynamic=True, backend=backend)
    for n, lengths in enumerate(([5, 70, 3, 11, 6], [40, 9], [1, 2, 3, 20, 88, 4])):
        inputs = compiled_inputs(lengths, config)
        results = []
        for model in (compiled, stack):
            torch.manual_seed(4)
            with torch._dynamo.config.patch(error_on_recompile=n > 0):
                output = model(*inputs)
            gradients = torch.autograd.grad(output.square().sum(), parameters)
            results.append((output, *gradients))
        for actual, expected in zip(*results, strict=True):
            assert torch.equal(actual, expected)
            assert actual.any()
    assert set(counts) == {2}
    torch._dynamo.reset()


@pytest.mark.slow
@COMPILED
def test_exported_layer(config):
    layer = HSTULayer(replace(config, fused=True)).eval()
    inputs = compiled_inputs([5, 70, 3], config)
    with torch.no_grad():
        program = torch.export.export(layer, inputs)
        called = [n for n in program.graph.nodes if "hstu_attn" in str(n.target)]
        assert len(called) == 1
        assert torch.equal(program.module()(*inputs), layer(*inputs))
