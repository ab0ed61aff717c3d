"""benchmarks.context from end to end, on CPUs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks import context
from benchmarks.report import read_results
from tests.helpers.distributed_runs import run_ranks

TINY = ["--length", "300", "--heads", "2", "--head-dim", "16", "--rounds", "3", "--commit", "abc"]


def _run(path: str) -> None:
    assert context.main([*TINY, "--json", path], "cpu") == 0
    dist.barrier()


def test_two_ranks_beside_one(tmp_path):
    path = tmp_path / "context.json"
    run_ranks(2, _run, str(path))
    records = read_results(path)
    assert [(r["impl"], r["pass"], r["gpus"]) for r in records] == [
        (impl, name, gpus)
        for impl, gpus in (("hstu_attention", 1), ("context parallel", 2))
        for name in ("forward", "backward", "both")
    ]
    flops = {"forward": 4 * 300**2 * 2 * 16 / 2}
    flops |= {"backward": 2.5 * flops["forward"], "both": 3.5 * flops["forward"]}
    alone = {r["pass"]: r["ms"] for r in records[:3]}
    for record in records:
        name = record["pass"]
        per_gpu = flops[name] / record["ms"] / record["gpus"] / 1e9
        assert record["tflops_per_gpu"] == pytest.approx(per_gpu, rel=1e-3)
        assert record["speedup"] == pytest.approx(alone[name] / record["ms"], rel=2e-3)
        assert record["waiting_share"] == 0 if record["gpus"] == 1 else record["waiting_share"] > 0
        assert record["rounds"] == 3
        assert record["commit"] == "abc"
        assert all(0 < record[f"difference_{name}"] < 0.01 for name in context.RESULTS)


def test_one_rank_alone(capsys):
    assert context.main(TINY, "cpu") == 0
    assert "1 x cpu" in capsys.readouterr().out


def test_a_wrong_result_fails(monkeypatch, capsys):
    shared = context.ContextBatch.attention

    def wrong(*arguments, **options):
        return shared(*arguments, **options) * 1.05

    monkeypatch.setattr(context.ContextBatch, "attention", wrong)
    assert context.main(TINY, "cpu") == 1
    assert "FAILED  out: expected a difference of at most 0.01" in capsys.readouterr().out


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="expected NVIDIA GPUs and a CUDA build of torch"):
        context.main([])
