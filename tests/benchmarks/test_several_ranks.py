"""Tests of `benchmarks.train` and `benchmarks.context` on two ranks of a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks import context, plots, ranks, tables, train
from benchmarks.record import read_records
from hstu_attn.distributed import World
from tests.helpers.distributed_runs import run_ranks

SIZES = {"batch": 4, "length": 40, "targets": 3, "items": 50, "users": 20}
SIZES |= {"dim": 16, "heads": 2, "layers": 2, "steps": 2}
TRAIN = [f"--{name}={size}" for name, size in SIZES.items()]
CONTEXT = "--length 300 --heads 2 --head-dim 16 --rounds 3 --commit abc".split()  # noqa: SIM905


def world() -> World:
    """Returns this rank's `World`, with all ranks of the process group."""
    if not dist.is_initialized():
        return World(0, 0, 1, torch.device("cpu"), None)
    rank, number = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (number,))
    return World(rank, rank, number, torch.device("cpu"), mesh)


def _train(path: str, *arguments: str) -> int:
    """Runs `benchmarks.train` with a fake clock: a step takes 10 ms on rank 0, 20 on rank 1."""
    here = world()
    with pytest.MonkeyPatch.context() as patch:
        time = lambda clock, call: call() is None or 10.0 * (1 + here.rank)  # noqa: E731
        patch.setattr(ranks.Clock, "time", time)
        return train.BENCHMARK.main([*TRAIN, *arguments, "--json", path], world=here)


@pytest.mark.slow
def test_training(tmp_path):
    path = tmp_path / "train.json"
    assert run_ranks(2, _train, str(path), "--strategy", "fsdp2") == [0, 0]
    records = read_records(path)
    found = {(r["case"], r["division"], r["gpus"]): r for r in records}
    assert list(found) == [
        *(("equal", "balanced", 1), ("equal", "balanced", 2)),
        *(("weak", "balanced", 1), ("weak", "balanced", 2), ("weak", "dealt", 2)),
        *(("strong", "balanced", 2), ("strong", "dealt", 2)),
    ]
    equal = found["equal", "balanced", 2]
    assert equal["tokens"] == 2 * found["equal", "balanced", 1]["tokens"]
    assert equal["scaling"] == 0.5
    assert equal["tokens_per_second_per_gpu"] == equal["tokens"] / 20 / 2 * 1e3
    assert {r["ms"] / r["gpus"] for r in records} == {10.0}  # times are those of the slowest rank
    for case in ("weak", "strong"):
        balanced, dealt = found[case, "balanced", 2], found[case, "dealt", 2]
        assert balanced["tokens"] == dealt["tokens"]
        assert 1 <= balanced["imbalance"] <= dealt["imbalance"]
    rows = tables.train([records])[0].rows
    assert [row[0] for row in rows][-1] == "strong, dealt"
    assert plots.draw(path, tmp_path) == [tmp_path / "train-fsdp2.png"]


def _context(path: str) -> int:
    return context.BENCHMARK.main([*CONTEXT, "--json", path], world=world())


@pytest.mark.slow
def test_one_sequence_over_two_ranks(tmp_path):
    path = tmp_path / "context.json"
    assert run_ranks(2, _context, str(path)) == [0, 0]
    records = read_records(path)
    assert [(r["impl"], r["pass"], r["gpus"]) for r in records] == [
        (impl, name, gpus)
        for impl, gpus in (("hstu_attention", 1), ("context parallel", 2))
        for name in ("forward", "backward", "both")
    ]
    flops = {"forward": 4 * 300**2 * 2 * 16 / 2}
    flops |= {"backward": 2.5 * flops["forward"], "both": 3.5 * flops["forward"]}
    alone = {r["pass"]: r["ms"] for r in records[:3]}
    for r in records:
        per_gpu = flops[r["pass"]] / r["ms"] / r["gpus"] / 1e9
        assert r["tflops_per_gpu"] == pytest.approx(per_gpu, rel=1e-3)
        assert r["speedup"] == pytest.approx(alone[r["pass"]] / r["ms"], rel=2e-3)
        assert (r["waiting_share"] == 0) == (r["gpus"] == 1)
        assert all(0 < r[f"difference_{name}"] < 0.01 for name in context.RESULTS)


def test_a_wrong_result_fails(monkeypatch, capsys):
    shared = context.ContextBatch.attention
    wrong = lambda *arguments, **options: shared(*arguments, **options) * 1.05  # noqa: E731
    monkeypatch.setattr(context.ContextBatch, "attention", wrong)
    assert context.BENCHMARK.main(CONTEXT, world=world()) == 1
    assert "expected differences of at most 0.01, got out 0.05" in capsys.readouterr().out
