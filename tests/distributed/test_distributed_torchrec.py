"""Tests of torchrec's tables against plain tables on all ranks' ids; they need torchrec."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from hstu_attn.distributed import (
    Checkpoints,
    ShardedEmbeddings,
    parallelize,
    torchrec_embedding_collection,
)
from tests.helpers.distributed_runs import BACKENDS, device_type, run_ranks

TABLES = {"item": (7, 4), "user": (300, 4)}

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torchrec", "fbgemm_gpu")),
    reason="needs torchrec and fbgemm-gpu",
)


class Scored(nn.Module):
    def __init__(self, tables: nn.Module, weight: Tensor) -> None:
        super().__init__()
        self.tables = tables
        self.linear = nn.Linear(*reversed(weight.shape), bias=False, device=weight.device)
        with torch.no_grad():
            self.linear.weight.copy_(weight)

    def forward(self, ids: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        rows = self.tables(ids)
        return rows, sum(self.linear(part).square().sum() for part in rows.values())  # type: ignore[return-value]


def step(backend: str, ids: list[dict[str, Tensor]], weight: Tensor) -> tuple[object, ...]:
    """Runs a step of SGD under DDP; returns rows before and after, and the linear's gradient."""
    device = device_type(backend)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    mine = {name: part.to(device) for name, part in ids[dist.get_rank()].items()}
    every = {name: torch.arange(rows, device=device) for name, (rows, _) in TABLES.items()}
    tables = torchrec_embedding_collection(
        TABLES, mesh, optimizer=torch.optim.SGD, options={"lr": 0.5}, std=0.3
    )
    initial = {name: rows.detach().cpu() for name, rows in tables(every).items()}
    scored = Scored(tables, weight.to(device))
    model = parallelize(scored, mesh, "ddp", ignored_modules=[tables])
    rows, loss = model(mine)
    before = {name: part.detach().cpu() for name, part in rows.items()}
    loss.backward()
    after = {name: part.detach().cpu() for name, part in tables(every).items()}
    gradient = scored.linear.weight.grad
    assert gradient is not None
    with pytest.raises(ValueError, match="item ids: expected 0 to 6, got 7 in row 1"):
        tables({**every, "item": torch.tensor([0, 7])})
    return initial, before, after, gradient.cpu()


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [((40, 9), (3, 700)), ((5, 1), (0, 0))])
def test_against_plain_tables(backend: str, lengths: tuple[tuple[int, int], ...]) -> None:
    ids = [
        {
            name: torch.randint(rows, (length,))
            for (name, (rows, _)), length in zip(TABLES.items(), rank, strict=True)
        }
        for rank in lengths
    ]
    weight = torch.randn(2, 4)
    results = run_ranks(2, step, backend, ids, weight, backend=backend)
    initial = results[0][0]
    assert initial["user"].std().item() == pytest.approx(0.3, rel=0.2)
    tables = ShardedEmbeddings(TABLES)
    for name, (rows, _) in TABLES.items():
        tables.tables[name].copy_table(initial[name].view(rows, 4))  # type: ignore[operator]
    model = Scored(tables, weight)
    losses = []
    for rank in range(2):
        expected, loss = model(ids[rank])
        losses.append(loss)
        for name, part in expected.items():
            assert torch.equal(results[rank][1][name], part)
    (sum(losses) / 2).backward()  # type: ignore[union-attr]
    torch.optim.SGD(tables.parameters(), lr=0.5).step()
    for _, _, after, gradient in results:
        for name in TABLES:
            torch.testing.assert_close(after[name], tables.tables[name].weight.detach())
        torch.testing.assert_close(gradient, model.linear.weight.grad)


def part_of_run(
    backend: str, directory: str, ids: Tensor, weight: Tensor, steps: int
) -> list[float]:
    """Runs steps from the newest checkpoint, saves another one, and returns the losses."""
    torch.manual_seed(len(ids))  # torch's default generator draws the initial rows
    device = device_type(backend)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    # fbgemm has no Adam for CPUs.
    kind = torch.optim.Adagrad if device == "cpu" else torch.optim.Adam
    tables = torchrec_embedding_collection(
        {"item": TABLES["item"]}, mesh, optimizer=kind, options={"lr": 0.1}
    )
    model = parallelize(Scored(tables, weight.to(device)), mesh, ignored_modules=[tables])
    optimizer = torch.optim.Adagrad(model.module.linear.parameters(), lr=0.1)  # type: ignore[union-attr]
    checkpoints = Checkpoints(directory)
    step = checkpoints.load(model, optimizer) or 0
    losses = []
    for _ in range(steps):
        loss = (model({"item": ids.to(device)})[1] - 1).square()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    checkpoints.save(step + steps, model, optimizer)
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_continues_on_other_ranks(backend: str, tmp_path: Path) -> None:
    """Rows and the fused optimizer's state are restored; all ranks have the same ids."""
    arguments = torch.randint(7, (20,)), torch.randn(2, 4)
    straight = run_ranks(
        2, part_of_run, backend, str(tmp_path / "straight"), *arguments, 4, backend=backend
    )[0]
    start = str(tmp_path / "start")
    first = run_ranks(2, part_of_run, backend, start, *arguments, 2, backend=backend)[0]
    assert first == pytest.approx(straight[:2], rel=1e-6)
    for ranks in (2, 3):
        directory = str(tmp_path / str(ranks))
        shutil.copytree(start, directory)
        for losses in run_ranks(
            ranks, part_of_run, backend, directory, *arguments, 2, backend=backend
        ):
            assert losses == pytest.approx(straight[2:], rel=1e-5)
