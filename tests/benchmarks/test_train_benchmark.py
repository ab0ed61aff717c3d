"""`python -m benchmarks.train` without a GPU: what there is to do, and a run of two ranks."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import layer, plots, readme, train
from benchmarks.report import write_records
from hstu_attn.distributed import World
from hstu_attn.layer import HSTUStack
from tests.helpers.distributed_runs import run_ranks

SIZES = {"batch": 4, "length": 40, "targets": 3, "items": 50, "users": 20}
SIZES |= {"dim": 16, "heads": 2, "layers": 2, "steps": 2}
TINY = [f"--{name}={size}" for name, size in SIZES.items()]


def test_flops_are_those_of_a_count():
    """Against torch's own count of the products, for sequences of one length."""
    options = train.parse(TINY)
    config, batch, length = train.model_config(options).layer, 3, 10
    stack = HSTUStack(config, options.layers)
    rows = layer.Batch.random(config, batch, length, "cpu")
    x = rows.x.detach().float().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        stack(x, rows.seq_offsets, length).sum().backward()
    found = train.step_flops(config, options.layers, np.full(batch, length))
    widths = config.attention_dim + config.hidden_dim
    attention = 2 * batch * config.num_heads * widths * length**2 / 2
    assert found == counter.get_total_flops() + options.layers * 3.5 * attention


@pytest.mark.parametrize("case", ["equal", "weak"])
def test_batches_are_whole(case):
    from recommender.ranking_data import check_ranking_batch  # benchmarks.train says where it is

    options, generator = train.parse(TINY), np.random.default_rng(3)
    lengths = train.random_lengths(options, case, 50, generator)
    assert lengths.max() <= (40 if case == "equal" else 80)
    assert (len(set(lengths)) == 1) == (case == "equal")
    batch = train.random_batch(options, lengths, generator)
    config = train.model_config(options)
    check_ranking_batch(batch, config.sizes, len(config.actions), config.max_rows)
    rows = 3 + 2 * batch.history_offsets.diff() + batch.target_offsets.diff()
    assert rows.tolist() == lengths.tolist()
    assert batch.total == lengths.sum()


def test_the_time_of_a_step():
    calls = []

    def step() -> None:
        calls.append(1)
        time.sleep(0.01)

    assert train.elapsed_ms(step, torch.device("cpu")) >= 10
    assert calls == [1]


def _measure(arguments: list[str]) -> list[dict[str, Any]]:
    """By a clock that does not depend on the machine: 10 ms a step on rank 0, 20 on rank 1."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank = dist.get_rank()
    world = World(rank, rank, mesh.size(), torch.device("cpu"), mesh)

    def elapsed_ms(step: Callable[[], Any], device: torch.device) -> float:
        assert device == world.device
        step()
        return 10.0 * (1 + rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "elapsed_ms", elapsed_ms)
        return train.measure_all(train.parse(arguments), world, None)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_run_of_two_ranks(strategy, tmp_path):
    records, others = run_ranks(2, _measure, [*TINY, "--strategy", strategy])
    assert [(r["case"], r["division"], r["gpus"]) for r in records] == [
        ("equal", "balanced", 1),
        ("weak", "balanced", 1),
        ("equal", "balanced", 2),
        ("weak", "balanced", 2),
        ("weak", "dealt", 2),
        ("strong", "balanced", 2),
        ("strong", "dealt", 2),
    ]
    assert len(others) == 5
    of = {(r["case"], r["division"], r["gpus"]): r for r in records}
    assert of["equal", "balanced", 2]["rows"] == 2 * of["equal", "balanced", 1]["rows"]
    for case in ("weak", "strong"):
        balanced, dealt = of[case, "balanced", 2], of[case, "dealt", 2]
        assert balanced["rows"] == dealt["rows"]
        assert 1 <= balanced["imbalance"] <= dealt["imbalance"]
    for record in records:
        assert record["scaling"] > 0
        assert record["ms"] == 10 * record["gpus"]  # the slowest rank's
        speed = record["rows"] / record["ms"] / record["gpus"] * 1e3
        # A median over batches; only those of the equal case have the mean number of rows each.
        tolerance = 1e-9 if record["case"] == "equal" else 0.1
        assert record["rows_per_second_per_gpu"] == pytest.approx(speed, rel=tolerance)
    assert of["equal", "balanced", 2]["scaling"] == 0.5
    assert len(train.table_rows(records)) == 8

    described = dict.fromkeys(("gpu", "torch", "cuda", "triton", "date", "commit", "dtype"), "x")
    described |= {"command": "x", "group": "train", "strategy": strategy, "layers": 2, "dim": 16}
    file = tmp_path / "gpu/train.json"
    write_records(file, [{"heads": 2, **described, **record} for record in records])
    table = "\n".join(readme.train_tables(tmp_path))
    assert table.count("\n| ") == 9
    assert "| strong, dealt | 2 |" in table
    assert plots.draw(file, tmp_path) == [tmp_path / f"train-{strategy}.png"]

    write_records(
        file, [{"heads": 2, **described, **record, "scaling": None} for record in records]
    )
    assert "| - |" in "\n".join(readme.train_tables(tmp_path))


def test_a_case_has_the_memory_to_itself(monkeypatch):
    """Models in cycles of references are gone before the next case is measured."""
    alive: list[weakref.ref[nn.Module]] = []

    def measure(options: train.Options, *rest: Any) -> dict[str, Any]:
        assert not any(reference() for reference in alive)
        model = nn.Linear(2, 2)
        model.cycle = [model]
        alive.append(weakref.ref(model))
        return {"case": rest[0], "gpus": 1, "rows_per_second_per_gpu": 1.0}

    monkeypatch.setattr(train, "measure", measure)
    gc.disable()
    try:
        train.measure_all(train.parse(TINY), World(0, 0, 1, torch.device("cpu"), None), None)
    finally:
        gc.enable()
    assert len(alive) == 2
