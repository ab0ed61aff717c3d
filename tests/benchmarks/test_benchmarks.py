"""The benchmarks: a small run from end to end, and how results become tables."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import cpu, readme
from benchmarks.baselines import plain_torch
from benchmarks.cases import Case, Inputs
from benchmarks.load import CpuUse
from benchmarks.memory import peak_growth
from benchmarks.report import Result, environment, read_results, write_results

FP32 = torch.float32
CASE = Case(3, 5, 40, heads=2, head_dim=8, dtype=FP32)
FIELDS = {
    *("cpu", "threads", "date", "commit", "torch", "case", "head_dim", "dtype", "pass", "impl"),
    *("ms", "gflops", "peak_mib"),
}


@pytest.fixture(autouse=True)
def _same_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()


@pytest.mark.slow
def test_quick_run(tmp_path, capsys):
    path = tmp_path / "results.json"
    cpu.main(["--quick", "--only", "float32", "--rounds", "1", "--json", str(path)])
    printed = capsys.readouterr().out
    assert "Speedup over the per-sequence form" in printed
    assert len(re.findall(r"^3 x 8..48 +16 +float32 +(forward|backward) ", printed, re.M)) == 2

    records = read_results(path)
    assert len(records) == 2 * len(plain_torch.NAMES)
    for record in records:
        assert record.keys() >= FIELDS
        assert record["ms"] > 0
        assert record["gflops"] > 0
        assert record["peak_mib"] >= 0


def test_an_unknown_case_is_refused(capsys):
    with pytest.raises(SystemExit):
        cpu.main(["--only", "nothing"])
    assert "--only: expected a part of a case's name, got 'nothing'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["hstu_attn", "per sequence", "padded"])
def test_implementations_are_right(name):
    inputs = Inputs.random(CASE, seed=1)
    _, results = cpu.run_once(plain_torch.make(name, CASE), inputs)
    cpu.check(CASE, name, results, cpu.exact_results(CASE, inputs))


def test_a_wrong_implementation_is_caught():
    inputs = Inputs.random(CASE, seed=1)
    exact = cpu.exact_results(CASE, inputs)
    wrong = [exact[0], exact[1], exact[2] * 1.001, exact[3]]
    with pytest.raises(AssertionError, match="dk has a relative error of"):
        cpu.check(CASE, "wrong", wrong, exact)


def test_flops_of_equal_lengths():
    case = Case(2, 16, 16, heads=3, head_dim=8, dtype=FP32)
    assert case.lengths == [16, 16]
    assert case.flops(backward=False) == 2 * 2 * 8 * (2 * 16 * 16 * 3) / 2
    assert case.flops(backward=True) == 2.5 * case.flops(backward=False)


def test_padded_forms_that_do_not_fit_are_left_out(monkeypatch):
    class NoMemory:
        def peak_mib(self, case, names):
            return None

    monkeypatch.setattr(cpu, "PADDED_LIMIT", 0)
    results = cpu.measure(CASE, NoMemory(), cpu.Options(rounds=1, seconds=0, patience=0))
    assert {r.impl for r in results if r.skipped} == {"padded", "compiled"}
    assert all((r.ms is None) == bool(r.skipped) for r in results)
    row = cpu.table_row([r for r in results if r.direction == "forward"])
    assert row.count("-") == 6


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc"
)


@needs_proc
def test_peak_memory_of_a_known_call():
    grown = peak_growth(lambda: torch.ones(2**25).sum())
    assert 120 < grown < 140


@needs_proc
def test_other_work_is_seen():
    start = CpuUse.now()
    subprocess.run([sys.executable, "-c", "sum(range(2 * 10**7))"], check=True)
    assert start.others_since() > 0.2


def test_results_become_a_table(tmp_path):
    case = Case(16, 32, 512, heads=4, head_dim=64, dtype=torch.bfloat16)
    ms = {"hstu_attn": 2.0, "per sequence": 5.0, "padded": 8.0}
    results = [
        Result.of(case, direction, name, ms=[value, 9 * value, value], peak_mib=123.4)
        for direction in ("forward", "backward")
        for name, value in ms.items()
    ]
    results += [
        Result.of(case, direction, "compiled", skipped="it is too large")
        for direction in ("forward", "backward")
    ]
    write_results(tmp_path / "some.json", environment("a command"), results)
    lines = readme.cpu_tables(tmp_path)
    assert lines[4] == (
        "| 16 x 32..512 | 64 | bf16 | 2 / 2 | 5 / 5 | 8 / 8 | - | 2.5 / 2.5 | 2.5 / 2.5 "
        "| 123 | 123 | 123 | - |"
    )
    assert lines[-1] == "Not measured: padded forms of 16 x 32..512, bfloat16 (too large)."
