"""Tests of the benchmarks' figures: FLOPs, bytes, pairs, tiles, kernels and ratios."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import against, cpu, layer
from benchmarks.cases import HEAD_DIMS, Case, Inputs, attention_cases
from benchmarks.gpu import Gpu
from benchmarks.paged_cases import Request, requests
from benchmarks.record import ROOT
from benchmarks.timing import Variant, take_turns
from hstu_attn import Mask
from hstu_attn.layer import HSTULayerConfig, HSTUStack
from hstu_attn.mask import dense_mask

SMALL = Case(2, 5, 40, 2, 16, torch.float32)


# ---------------------------------------------------------------------------------------------
# FLOPs and bytes
# ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["context", "targets", "context + targets", "local", "semi-local", "row spans"]
)
def test_pairs_and_tiles_are_those_of_the_mask(name):
    case = replace(SMALL, mask_name=name)
    mask, lengths = case.mask(case.lengths), case.lengths
    pairs, tiles, row = 0, 0, 0
    for n, length in enumerate(lengths):
        counts = {
            key: 0 if values is None else int(values[n])
            for key, values in mask.__dict__.items()
            if key in ("num_contexts", "num_targets")
        }
        visible = dense_mask(mask, length, length, first_row=row, **counts)
        pairs += int(visible.sum())
        for first_q in range(0, length, 8):
            rows = visible[first_q : first_q + 8]
            tiles += sum(bool(rows[:, k : k + 16].any()) for k in range(0, length, 16))
        row += length
    assert case.flops(backward=False) == 4 * pairs * 2 * 16
    assert case.executed_tiles(8, 16) == 2 * tiles


def test_cases_of_attention():
    table = [c for c in attention_cases() if c.group == "table"]
    assert [c.head_dim for c in table] == [dim for dim in HEAD_DIMS for _ in range(6)]
    case = next(c for c in table if c.name == "4 x 8192")
    assert case.flops(backward=False) == 4 * 4 * 8192**2 * 4 * 64 / 2
    assert case.flops(backward=True) == 2.5 * case.flops(backward=False)
    biased = Case(2, 16, 16, 3, 8, torch.bfloat16, bias_heads=1, bias_gradient=True)
    rows, bias = 2 * 32 * 3 * 8, 2 * 2 * 16 * 16
    assert biased.least_bytes(backward=False) == 4 * rows + bias
    assert biased.least_bytes(backward=True) == 7 * rows + 2 * bias


@pytest.mark.parametrize(("new", "candidates"), [(40, 70), (0, 1), (300, 8)])
def test_flops_and_bytes_of_requests(new, candidates):
    r = Request(64, history=300, new=new, candidates=candidates, batch=2)
    mask = Mask.causal(num_targets=torch.tensor([candidates]))
    sizes = (new + candidates, 300 + candidates)
    visible = dense_mask(mask, *sizes, num_targets=candidates)
    assert r.flops == 4 * 2 * int(visible.sum()) * 4 * 64
    pages, q_and_out, k_and_v = 2 * 2 * 300, 2 * 2 * (new + candidates), 2 * 2 * candidates
    assert r.bytes == 4 * 64 * 2 * (pages + q_and_out + k_and_v)
    assert r.needs_us(matmul_tflops=1e9, copy_tbps=1.0) == pytest.approx(r.bytes / 1e6)
    assert r.needs_us(matmul_tflops=1.0, copy_tbps=1e9) == pytest.approx(r.flops / 1e6)
    assert len(set(requests([64, 256]))) == len(requests([64, 256])) == 30


def test_flops_of_layers_are_those_of_a_count():
    """FLOPs of products equal torch's count, and those of attention count half of all pairs."""
    config = HSTULayerConfig(
        embedding_dim=24, num_heads=2, hidden_dim=16, attention_dim=8, concat_u=True, fused=False
    )
    batch, length = 3, 10
    rows = layer.Batch.random(config, batch, length, "cpu")
    x = rows.x.detach().float().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        output = HSTUStack(config, 1)(x, rows.seq_offsets, length)
        forward = counter.get_total_flops()
        output.sum().backward()
        both = counter.get_total_flops()
    found = layer.layer_flops(config, batch * [length])
    attention = 2 * batch * 2 * (8 + 16) * length**2 / 2
    assert found == {layer.FORWARD: forward + attention, layer.BOTH: both + 3.5 * attention}


def test_a_wrong_result_of_the_cpu_benchmark_is_an_error():
    case = cpu.Case(3, 5, 40, heads=2, head_dim=8, dtype=torch.float32)
    exact = cpu.exact_results(case, Inputs.random(case, seed=1))
    wrong = [exact[0], exact[1], exact[2] * 1.001, exact[3]]
    with pytest.raises(AssertionError, match="dk has a relative error of"):
        cpu.check(case, "wrong", wrong, exact)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
def test_peak_memory_of_a_known_call():
    """The call has its own process, because the system may reclaim unused memory of this one."""
    program = "import torch; from benchmarks.memory import peak_growth; "
    program += "print(peak_growth(lambda: torch.ones(2**25).sum()))"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert 120 < float(ended.stdout) < 140, ended.stderr


# ---------------------------------------------------------------------------------------------
# Taking turns, and comparing two libraries
# ---------------------------------------------------------------------------------------------


class EventOfSlowHost:
    """A fake CUDA event; the host takes 1.5 million cycles to queue a call of 2 ms."""

    spins: list[int]

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def synchronize(self):
        pass

    def query(self):
        return self.spins[-1] < 1_500_000

    def elapsed_time(self, end):
        return 3.0 if self.query() else 2.0


def test_the_gpu_spins_until_a_slow_host_has_queued_the_call(monkeypatch):
    spins, calls = [], []
    monkeypatch.setattr(EventOfSlowHost, "spins", spins, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", EventOfSlowHost)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setattr(torch.cuda, "_sleep", spins.append, raising=False)
    gpu = Gpu()
    assert gpu.milliseconds(lambda: calls.append(1)) == 2.0
    assert spins == [500_000, 1_000_000, 2_000_000]
    assert gpu.milliseconds(lambda: calls.append(1)) == 2.0
    assert (spins[3:], len(calls)) == ([2_000_000], 4)


def test_variants_take_turns():
    """Each round starts with a different variant; each variant cycles through its input sets."""
    called = []

    def variant(name):
        calls = [lambda n=n: called.append(f"{name}{n}") for n in range(2)]
        return Variant(name, "forward", lambda: calls, lambda call: call() or len(called))

    variants = [variant("a"), variant("b"), variant("c")]
    for each in variants:
        each.prepare()
    called.clear()
    variants[2].error = "it is out"
    take_turns(variants, 3)
    assert called == ["a0", "b0", "b1", "a1", "a0", "b0"]
    assert variants[0].figures() == {"ms": 4.0, "fastest_ms": 1.0, "rounds": 3, "error": ""}
    assert variants[2].figures() == {"ms": None, "error": "it is out"}


def test_ratios_of_two_libraries():
    """Ratios are of adjacent visits, so that a slow drift of both libraries cancels out."""
    fast, slow = ("hstu_attn", "forward"), ("hstu_attn", "backward")
    visits = [
        ({fast: 1.0 * drift, slow: 3.0}, {fast: 2.0 * drift, slow: 2.0}) for drift in (1, 3, 10)
    ]
    found = against.ratios(visits)
    assert [(r["pass"], r["ratio"]) for r in found] == [("forward", 0.5), ("backward", 1.5)]
    assert (found[0]["new"], found[0]["old"]) == (3.0, 6.0)
    assert found[0]["lowest_ratio"] == found[0]["highest_ratio"] == 0.5
    assert against.ratios([({fast: 1.0}, {fast: None})]) == []
    *_, last = against.summary([{**r, "case": "x", "head_dim": 64} for r in found])
    assert last.split()[:2] == ["all", f"{math.sqrt(0.75):.4f}"]
    assert last.endswith("at most 1.500 (x, D 64, hstu_attn, backward)")


@pytest.mark.slow
def test_a_library_against_itself(tmp_path, capfd):
    """Each worker imports the library of its checkout, and benchmarks of this tree."""
    (tmp_path / "old/benchmarks").mkdir(parents=True)
    (tmp_path / "old/benchmarks/__init__.py").write_text("raise ImportError('of the other tree')")
    (tmp_path / "old/hstu_attn").symlink_to(against.ROOT / "hstu_attn")
    path = tmp_path / "ratios.json"
    command = f"--quick --cases float32 --threads 1 --against {tmp_path / 'old'} --json {path}"
    assert cpu.main(command.split()) == 0
    assert "in the geometric mean of   1" in capfd.readouterr().out
    forward, backward = json.loads(path.read_text())
    assert (forward["pass"], backward["pass"]) == ("forward", "backward")
    # NOTE: the ratio is near 1 on a quiet machine, but a test cannot rely on that.
    assert forward["lowest_ratio"] <= forward["ratio"] <= forward["highest_ratio"]
    with pytest.raises(ValueError, match="--against: expected a built library in"):
        cpu.main(["--quick", "--against", str(tmp_path)])
