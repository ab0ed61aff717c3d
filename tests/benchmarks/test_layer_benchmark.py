"""The benchmark of a whole layer as far as it does not need a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import layer, plots, readme
from benchmarks.report import read_results
from hstu_attn.layer import HSTULayerConfig
from tests.benchmarks.test_gpu_benchmarks import FakeGpu, kernel

TINY = [
    *("--batch", "2", "--length", "24", "--dim", "16", "--heads", "2", "--head-dim", "8"),
    *("--rounds", "3", "--commit", "abc"),
]
FIELDS = {
    *("gpu", "date", "commit", "torch", "cuda", "case", "group", "dim", "heads", "head_dim"),
    *("dtype", "pass", "impl", "ms", "error", "command", "matmul_tflops", "copy_tbps"),
}


@pytest.fixture
def made_up_kernels(monkeypatch):
    """What a GPU might have run in the profiled rounds."""
    names = {
        "void hstu::(anonymous namespace)::forward<true>(hstu::Params)": 400,
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_bias_TNN": 300,
        "gate_backward": 20,
        "void at::native::vectorized_elementwise_kernel<4, Add>(int)": 5,
        "at::cuda::(anonymous namespace)::spin_kernel(long)": 999,
    }

    def events(path):
        return layer.PROFILED_ROUNDS * [kernel(0, us, 1, name) for name, us in names.items()]

    monkeypatch.setattr(layer, "read_events", events)


def run(path, *arguments):
    return layer.main([*TINY, "--json", str(path), *arguments], FakeGpu())


def test_a_run_from_end_to_end(made_up_kernels, monkeypatch, tmp_path, capsys):
    compiled = []

    def compile_nothing(module):
        compiled.append(module.config)
        return module

    monkeypatch.setattr(torch, "compile", compile_nothing)
    file = tmp_path / "gpu/layer.json"
    assert run(file, "--trace", str(tmp_path / "gpu/traces/layer.json")) == 0
    printed = capsys.readouterr().out
    records = read_results(file)
    assert [(r["impl"], r["pass"]) for r in records] == [
        (impl, name) for impl in layer.IMPLS for name in (layer.FORWARD, layer.BOTH, "kernels")
    ]
    assert [config.fused for config in compiled] == [False]
    assert {p.name for p in (tmp_path / "gpu/traces").iterdir()} == {
        f"layer-{impl}.json" for impl in layer.IMPLS
    }
    for r in records:
        assert r.keys() >= FIELDS
        if r["pass"] != "kernels":
            assert r["tflops"] == pytest.approx(r["flops"] / r["ms"] / 1e9, 1e-3)
            assert r["share_of_matmul"] == pytest.approx(r["tflops"] / r["matmul_tflops"], 1e-2)
            assert (r["kept_memory_bytes"], r["peak_memory_bytes"]) == (2**19, 2**20)
            assert r["mfu"] is None  # of a GPU without a data sheet
            continue
        assert (r["attention_ms"], r["gemm_ms"], r["elementwise_ms"]) == (0.4, 0.3, 0.025)
        assert next(iter(r["kernels"])) == "hstu::forward"
        gate = r["kernels"]["gate_backward"]
        again = r["impl"].startswith("fused_recompute")
        assert gate["bytes"] == 2 * 48 * 16 * (5 + again)
        assert gate["share_of_copy"] == pytest.approx(gate["bytes"] / 0.02 / 1e9 / 0.01, 1e-3)
        assert "bytes" not in r["kernels"]["at::native::vectorized_elementwise_kernel"]
    assert "fused_recompute" in printed
    assert readme.gpu_tables(tmp_path) == readme.step_tables(tmp_path) == []
    table = "\n".join(readme.layer_tables(tmp_path))
    assert all(f"| {impl}, {layer.BOTH} |" in table for impl in layer.IMPLS)
    assert "| gate_backward | elementwise | 1 | 0.02 |" in table
    assert plots.draw(file, tmp_path) == [tmp_path / "layer.png"]


def test_a_wrong_result_is_not_timed(made_up_kernels, monkeypatch, tmp_path, capsys):
    forward = layer.Entrant.forward

    def wrong(self, batch):
        return forward(self, batch) * (1.3 if self.impl == "fused" else 1)

    monkeypatch.setattr(layer.Entrant, "forward", wrong)
    assert run(tmp_path / "layer.json", "--impls", "fused", "composed") == 1
    assert "FAILED  fused: AssertionError: output: relative error 0.3" in capsys.readouterr().out
    failed, *others = read_results(tmp_path / "layer.json")
    assert failed["ms"] is None
    assert {r["impl"] for r in others} == {"composed"}


def test_flops_are_those_of_a_count():
    """Against torch's own count of the products, and pairs of rows one by one."""
    config = HSTULayerConfig(
        embedding_dim=24, num_heads=2, hidden_dim=16, attention_dim=8, concat_u=True, fused=False
    )
    batch, length = 3, 10
    rows = layer.Batch.random(config, batch, length, "cpu")
    entrant = layer.Entrant("composed", config, layers=1)
    entrant.begin(layer.HSTUStack(config, 1).state_dict(), "cpu")
    with FlopCounterMode(display=False) as counter:
        output = entrant.forward(rows)
        products = counter.get_total_flops()
        output.backward(rows.cotangent)
        products_of_both = counter.get_total_flops()
    found = layer.layer_flops(config, batch, length)
    attention = 2 * batch * 2 * (8 + 16) * length**2 / 2
    assert found[layer.FORWARD] == products + attention
    assert found[layer.BOTH] == products_of_both + 3.5 * attention


def test_bytes_of_steps():
    config = HSTULayerConfig(embedding_dim=10, num_heads=2, hidden_dim=3, attention_dim=4)
    found = layer.step_bytes(config, 7)
    assert found == {
        "layer_norm": 14 * 20,
        "layer_norm_backward": 14 * 40,
        "silu": 14 * 2 * 28,
        "activation_backward": 14 * 3 * 28,
        "gate": 14 * 3 * 6,
        "gate_backward": 14 * 5 * 6,
    }
    config = replace(config, linear_activation="silu_u", linear_bias=False, concat_ua=True)
    found = layer.step_bytes(replace(config, recompute_gate=True, recompute_norm=True), 7)
    assert found["activation_backward"] == 14 * 3 * 6
    assert found["silu"] == 14 * 2 * 6
    assert found["gate"] == 14 * 5 * 6
    assert found["gate_backward"] == 14 * 10 * 6
    assert found["layer_norm_backward"] == 14 * 50


def test_groups_of_kernels():
    assert layer.group_of("hstu::sm90::forward") == "attention"
    assert layer.group_of("sm90_xmma_gemm_bf16bf16") == "gemm"
    assert layer.group_of("nvjet_hsh_128x256_64x4") == "gemm"
    assert layer.group_of("void cutlass::Kernel2") == "gemm"
    assert layer.group_of("layer_norm_backward") == "elementwise"
