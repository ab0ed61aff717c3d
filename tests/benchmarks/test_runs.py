"""Tests that run each benchmark once, from its command line to its records, tables and plots.

A `FakeGpu` replaces the GPU. `test_counts.py` tests the figures.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import (
    attention,
    context,
    cpu,
    cpu_limits,
    engine,
    implementations,
    layer,
    paged,
    plots,
    stack,
    tables,
    train,
    training_step,
)
from benchmarks.cases import Case
from benchmarks.record import read_records
from hstu_attn import hstu_attention
from hstu_attn.serving import Engine
from tests.helpers.arrivals import check_arrivals
from tests.helpers.fake_gpu import FakeGpu

ORIGIN = {"benchmark", "cpu", "date", "commit", "hstu_attn", "torch", "python", "command"}
SMALL = Case(2, 5, 40, 2, 16, torch.float32, mask_name="context + targets")
STEP = "--batch 2 --length 24 --heads 2 --head-dim 8 --rounds 3 --commit abc"


def run(main, tmp_path, arguments, status=0, failing=()):
    """Runs a benchmark and prints its tables; returns the records of its file."""
    path = tmp_path / "records.json"
    gpu = [] if main in (cpu.main, cpu_limits.main, engine.main) else [FakeGpu()]
    assert main([*arguments.split(), "--json", str(path)], *gpu) == status
    records = read_records(path)
    assert all(record.keys() >= ORIGIN for record in records)
    assert {record["impl"] for record in records if record.get("error")} == set(failing)
    assert len(tables.text(records).splitlines()) > 2
    return records


@pytest.fixture
def small_cases(monkeypatch):
    """Replaces the cases of `benchmarks.attention` by tiny ones of every kind."""
    cases = [
        replace(SMALL, mask_name="causal", shortest=40),
        SMALL,
        replace(SMALL, mask_name="causal", shortest=40, group="rab", bias_heads=2),
        replace(SMALL, mask_name="causal", group="relative", tables=("position", "time")),
        replace(SMALL, dtype=torch.bfloat16, group="fp8", passes=("forward",)),
        *(replace(SMALL, group="masks", mask_name=name) for name in ("causal", "local", "func")),
        replace(SMALL, group="host", passes=("host", "host with autograd")),
    ]
    monkeypatch.setattr(attention, "attention_cases", lambda head_dims: cases)


def kernel(us, operator, name):
    """Returns a kernel's event as it is in a Chrome trace."""
    arguments = {"External id": operator, "correlation": 1}
    return {"cat": "kernel", "name": name, "ts": 0, "dur": us, "args": arguments}


# ---------------------------------------------------------------------------------------------
# Kernels
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_attention(small_cases, monkeypatch, tmp_path):
    """An implementation with a wrong result is not timed, and makes the run fail."""
    make, broken = implementations.make, "hstu_attn_sm99"

    def wrong(q, k, v, **options):
        return hstu_attention(q, k, v, **options) * 1.01

    def make_or_break(name):
        return implementations.Implementation(name, wrong) if name == broken else make(name)

    monkeypatch.setattr(implementations, "make", make_or_break)
    command = f"--rounds 2 --impls hstu_attn hstu_attn_fp8 dense_bias flash2 {broken} --commit abc"
    records = run(attention.main, tmp_path, command, status=1, failing=[broken])
    assert all("AssertionError: out: error" in r["error"] for r in records if r["error"])
    records = [r for r in records if r["impl"] != broken]
    assert {r["group"] for r in records} == {"table", "rab", "relative", "fp8", "masks", "host"}
    assert {r["group"] for r in records if r["impl"] == "hstu_attn_fp8"} == {"fp8"}
    assert {r["group"] for r in records if r["impl"] == "dense_bias"} == {"relative"}
    assert {r["commit"] for r in records} == {"abc"}
    for r in records:
        assert r["rounds"] == 2
        assert (r["executed_tiles"] is not None) == (r["group"] == "masks")
        if r["group"] == "host":
            assert r["host_us"] == FakeGpu.HOST_US
            continue
        assert r["ms"] == FakeGpu.MS
        assert r["tflops"] == pytest.approx(r["flops"] / FakeGpu.MS / 1e9, 1e-3)
        assert r["share_of_matmul"] == pytest.approx(r["tflops"] / 0.5, 1e-3)
        assert r["peak_memory_bytes"] == 2**20
    assert {r["case"] for r in records if r["impl"] == "flash2"} == {"2 x 40"}
    drawn = {path.name for path in plots.draw(tmp_path / "records.json", tmp_path / "plots")}
    assert drawn == {"roofline.png", "forward-backward-d16.png", "roofline-relative.png"}


@pytest.mark.slow
def test_scan(monkeypatch, tmp_path, capsys):
    equal = replace(SMALL, mask_name="causal", shortest=40, group="scan", dtype=torch.bfloat16)
    cases = [equal, replace(equal, head_dim=32), replace(equal, batch=9, shortest=1, longest=3)]
    monkeypatch.setattr(attention, "scan_cases", lambda head_dims: cases)
    command = "--rounds 2 --commit abc --cases scan --impls hstu_attn hstu_attn_sm80 flash2"
    records = run(attention.main, tmp_path, command)
    assert {r["impl"] for r in records} == {"hstu_attn", "flash2"}
    assert "scan" not in {case.group for case in attention.cases(attention.PARSER.parse_args([]))}


def test_paged(monkeypatch, tmp_path):
    monkeypatch.setattr(paged, "APPEND", replace(paged.APPEND, batch=2, history=64, new=64))
    requests = [paged.Request(32, 50, new, 9, 3, page_size=16) for new in (7, 0)]
    monkeypatch.setattr(paged, "requests", lambda head_dims: requests)
    records = run(paged.main, tmp_path, "--rounds 3")
    forms = ["paged", "graph", "e4m3", "fp8", "append", "gather", "recompute"]
    assert [r["impl"] for r in records] == [*forms, *(f for f in forms if f != "append")]
    assert {r["us"] for r in records} == {r["fastest_us"] for r in records} == {1e3 * FakeGpu.MS}
    moved = 2 * 2 * paged.APPEND.heads * 128 * 2 * 2 * 64  # read and written, k and v, bf16
    tbps = pytest.approx(moved / FakeGpu.MS / 1e9, 1e-3)
    assert all(r["append_tbps"] == tbps for r in records)
    row = tables.text(records).splitlines()[-1].split()
    assert row[:6] == ["32", "50", "0", "9", "3", "16"]


@pytest.mark.slow
def test_stack(monkeypatch, tmp_path):
    pytest.importorskip("hstu_attn._host", reason="_host has not been built")
    sizes = {"layers": 2, "width": 64, "heads": 2, "page_size": 16}
    scoring = stack.Stack(64, history=40, new=5, candidates=7, batch=3, **sizes)
    monkeypatch.setattr(stack, "CASES", [scoring, replace(scoring, group=stack.HOST_TIER)])
    *scored, back = run(paged.main, tmp_path, "--stack --rounds 3")
    assert [r["impl"] for r in scored] == ["cached", "graph", "recompute"]
    assert {r["benchmark"] for r in (*scored, back)} == {"stack"}
    pages = 3 * 3 * 16 * (2 * 2) * (2 * 64) * 2  # pages, rows, layers x (k, v), heads x D, bytes
    assert back["bytes_from_host"] == back["bytes_to_host"] == pages == scoring.page_bytes
    assert back["returning_us"] <= back["with_evictions_us"]
    assert back["from_host_gbps"] == pytest.approx(pages / back["copies_us"] / 1e3, 1e-2)


@pytest.mark.slow
def test_cpu(tmp_path):
    options = "--quick --cases float32 --rounds 1"
    records = run(cpu.main, tmp_path, options)
    assert len(records) == 8
    assert {r["case"] for r in records} == {"3 x 8..48"}
    [case] = cpu.BENCHMARK.selected(cpu.PARSER.parse_args(options.split()))
    for r in records:
        flops = case.flops(backward=r["pass"] == "backward")
        assert r["gflops"] == pytest.approx(flops / r["ms"] / 1e6, 2e-3)
        assert r["gflops"] < 1000  # no CPU is that fast on a few tiny sequences
        assert r["fastest_ms"] <= r["ms"]
        assert 0 <= r["peak_mib"] < 200
    torch._dynamo.reset()


@pytest.mark.slow
def test_cpu_limits(monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_limits, "HEAD_DIMS", (8,))
    monkeypatch.setattr(cpu_limits, "Case", lambda *sizes, **named: SMALL)
    records = run(cpu_limits.main, tmp_path, "--rounds 1 --cases float32")
    assert records[0]["impl"] == tables.MATMUL
    assert {r["dtype"] for r in records} == {"float32"}


# ---------------------------------------------------------------------------------------------
# Layers and engines
# ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_layer(monkeypatch, tmp_path):
    names = {
        "void hstu::(anonymous namespace)::forward<true>(hstu::Params)": 400,
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_bias_TNN": 100,
        "void hstu::sm90::run_projection<hstu::sm90::Projection<256>>(hstu::Params)": 200,
        "gate_backward": 20,
    }
    events = layer.PROFILED_ROUNDS * [kernel(us, 1, name) for name, us in names.items()]
    monkeypatch.setattr(layer, "profile", lambda *arguments: events)
    records = run(layer.main, tmp_path, f"{STEP} --dim 16 --impls fused fused_recompute composed")
    assert [r["pass"] for r in records] == 3 * [layer.FORWARD, layer.BOTH, "kernels"]
    for r in records:
        if r["pass"] != "kernels":
            assert r["tflops"] == pytest.approx(r["flops"] / FakeGpu.MS / 1e9, 1e-3)
            assert (r["kept_memory_bytes"], r["peak_memory_bytes"]) == (2**19, 2**20)
            continue
        assert (r["attention_ms"], r["gemm_ms"], r["elementwise_ms"]) == (0.4, 0.3, 0.02)
        gate = r["kernels"]["gate_backward"]
        assert gate["bytes"] == 2 * 48 * 16 * (5 + (r["impl"] == "fused_recompute"))
        assert gate["share_of_copy"] == pytest.approx(gate["bytes"] / 0.02 / 1e9 / 0.01, 1e-3)


def test_training_step(monkeypatch, tmp_path):
    """The test adds to the profile a kernel for each operator that would launch one on a GPU."""
    made = {"hstu_attn::hstu_varlen_fwd": 300, "hstu_attn::hstu_varlen_bwd": 700, "aten::mm": 50}
    profile = training_step.profile

    def with_kernels(*arguments):
        events = profile(*arguments)
        kernels = [
            {**kernel(made[e["name"]], e["args"]["External id"], e["name"]), "ts": 1000 * n}
            for n, e in enumerate(events)
            if e["name"] in made
        ]
        return [*events, *kernels]

    monkeypatch.setattr(training_step, "profile", with_kernels)
    sizes = "--layers 2 --impls hstu_attn"
    found = {r["pass"]: r for r in run(training_step.main, tmp_path, f"{STEP} {sizes}")}
    assert found["attention forward"]["ms"] == pytest.approx(2 * 0.3)
    assert found["attention backward"]["ms"] == pytest.approx(2 * 0.7)
    assert found["attention forward"]["kernels"] == {"hstu_attn::hstu_varlen_fwd": 0.6}
    products = found["step"]["busy_ms"] - 2.0
    assert products == pytest.approx(0.05 * round(products / 0.05), abs=1e-3)
    assert products >= 3 * 4 * 0.05 - 1e-3  # at least the products of the layers' linears


def test_the_training_step_is_that_of_the_example():
    import train_retrieval

    ours, theirs = training_step.PARSER.parse_args([]), train_retrieval.parse_arguments([])
    assert (ours.heads, ours.layers) == (theirs.heads, theirs.layers)
    assert ours.heads * ours.head_dim == theirs.dim
    for name in ("dropout", "negatives", "temperature", "clip_norm"):
        assert getattr(training_step, name.upper()) == getattr(theirs, name)
    first = theirs.learning_rate / theirs.warmup_steps
    assert first == pytest.approx(training_step.LEARNING_RATE)


@pytest.mark.slow
def test_engine(tmp_path):
    pytest.importorskip("hstu_attn._host", reason="_host has not been built")
    sizes = "--layers 2 --width 32 --heads 2 --head-dim 16 --history 40 --candidates 5 --users 6"
    load = "--max-batch-size 4 --concurrency 1 6 --seconds 0.3 --device cpu"
    records = run(engine.main, tmp_path, f"{sizes} {load}")
    forms = [(r["concurrency"], r["graphs"]) for r in records]
    assert forms == [(1, False), (1, True), (6, False), (6, True)]
    for r in records:
        assert 0 < r["p50_ms"] <= r["p95_ms"] <= r["p99_ms"]
        assert r["graph_share"] == float(r["graphs"])
        assert 1 <= r["mean_batch"] <= 4
        assert r["hit_share"] > 0.5


@pytest.mark.slow
def test_random_arrivals_at_the_engine(tmp_path, monkeypatch):
    pytest.importorskip("hstu_attn._host", reason="_host has not been built")
    served, swap = [], Engine.swap

    def spy(self, model):
        served.append((threading.current_thread(), self.model))
        swap(self, model)
        served.append((threading.current_thread(), self.model))

    monkeypatch.setattr(Engine, "swap", spy)
    sizes = "--layers 1 --width 16 --heads 1 --head-dim 16 --history 40 --candidates 5 --users 40"
    load = "--concurrency 1 8 --seconds 0.5 --loads 0.3 0.5 --device cpu"
    under_way, overload, *records = run(engine.main, tmp_path, f"{sizes} {load}")
    assert under_way["concurrency"] == 8
    assert under_way["failed"] == 0
    capacity = overload["answered"] / overload["seconds"]
    assert overload["load"] * capacity == pytest.approx(1.5 * under_way["qps"], 1e-2)
    change = "the model changes"
    assert [(r["load"], r["event"]) for r in records] == [(0.3, ""), (0.5, ""), (0.3, change)]
    for r in (overload, *records):
        assert r["capacity"] == pytest.approx(capacity, 1e-3)
        assert r["graphs"] is True
        assert r["graph_share"] <= 1
        assert 0 < r["p50_ms"] <= r["p95_ms"] <= r["p99_ms"] <= r["worst_ms"]
        assert 0 < r["pause_ms"] <= r["worst_ms"]
    for r in records:
        check_arrivals(r, 0.5)
        assert (r["event_seconds"] > 0) == (r["event"] == change)
        assert r["seconds"] >= 0.5 + r["event_seconds"] * (r["event"] == change) / 2
    (thread, old), (_, new) = served
    assert thread is not threading.main_thread()
    weights = [model.head.weight.flatten().tolist() for model in (old, new)]
    assert weights[0] != weights[1]
    printed = tables.text([under_way, overload, *records])
    assert f"\n30%   {change}, in " in printed
    assert "exponent 1, histories as long as in MovieLens 20M, cut at 40 events:" in printed


def test_histories_are_as_long_as_in_the_log():
    """The lengths' quartiles are those of the fitted distribution, computed by hand."""
    options = engine.PARSER.parse_args(["--loads", "0.5", "--users", "50000"])
    options.history = 1000
    lengths = engine.lengths(options, np.random.default_rng(1))
    assert lengths.dtype == np.int64
    assert np.percentile(lengths, [25, 50, 75]) == pytest.approx([33.6, 62.2, 146.7], rel=0.05)
    assert 19 <= lengths.min() <= 21
    assert lengths.max() == 1000
    assert (lengths == 1000).mean() == pytest.approx(0.026, abs=0.003)


@pytest.mark.slow
def test_a_long_run_of_the_engine(tmp_path):
    pytest.importorskip("hstu_attn._host", reason="_host has not been built")
    sizes = "--layers 1 --width 16 --heads 1 --head-dim 16 --history 40 --candidates 5 --users 40"
    (record,) = run(engine.main, tmp_path, f"{sizes} --soak 1000 --device cpu")
    assert record["answered"] == record["soak"] == 1000
    assert record["evictions"] > 300
    assert len(record["memory_mib"]) == 100
    assert 50 < min(record["memory_mib"]) <= max(record["memory_mib"]) < 10_000


# ---------------------------------------------------------------------------------------------
# Command lines
# ---------------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for module in (attention, layer, paged, training_step):
        with pytest.raises(SystemExit, match="expected an NVIDIA GPU and a CUDA build of torch"):
            module.main([])
    for module in (context, train):
        with pytest.raises(SystemExit, match="expected NVIDIA GPUs and a CUDA build of torch"):
            module.main([])


def test_an_unknown_case_is_refused(capsys):
    with pytest.raises(SystemExit):
        cpu.main(["--cases", "nothing"])
    assert "--cases: expected groups or parts of these: 16 x 32..512 D64" in capsys.readouterr().err
