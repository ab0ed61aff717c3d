"""Tests of an embedding table with rows divided among ranks, against `nn.Embedding` on all ids."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hstu_attn.distributed import Checkpoints, ShardedEmbedding
from tests.helpers.distributed_runs import BACKENDS, device_type, run_ranks

ROWS, WIDTH = 7, 3


def mesh_of(backend: str) -> object:
    if not dist.is_initialized():
        return None
    return init_device_mesh(device_type(backend), (dist.get_world_size(),))


def lookup(
    backend: str, table: Tensor, ids: list[Tensor], factors: list[Tensor], options: dict
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Looks up a rank's ids, and computes the gradient of a weighted sum of their rows."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    device = device_type(backend)
    embedding = ShardedEmbedding("item", *table.shape, mesh_of(backend), device=device, **options)
    embedding.copy_table(table.to(device))
    rows = embedding(ids[rank].to(device))
    (rows.float() * factors[rank].to(device)).sum().backward()
    gradient = embedding.weight.grad
    assert gradient is not None
    full, full_gradient = embedding.weight.detach(), gradient
    if isinstance(full, DTensor):
        full, full_gradient = full.full_tensor(), gradient.full_tensor()
    # A lookup that is routed ahead of time gives the same rows.
    again = embedding(embedding.route(ids[rank].to(device)))
    same = torch.equal(again, rows)
    return rows.detach().cpu(), full.cpu(), full_gradient.cpu(), same


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "num_ranks", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))]
)
@pytest.mark.parametrize("num_rows", [7, 4])
@pytest.mark.parametrize("lengths", [(40, 9, 5), (3, 0, 0), (0, 8, 1), (0, 0, 0)])
def test_against_one_table(
    backend: str, num_ranks: int, num_rows: int, lengths: tuple[int, ...]
) -> None:
    """Rows and gradients are equal with repeated ids, with ranks without ids, and with a last
    rank that owns fewer rows than the others, or none.
    """
    table = torch.randn(num_rows, WIDTH)
    ids = [torch.randint(num_rows, (length,)) for length in lengths[:num_ranks]]
    factors = [torch.randn(len(part), WIDTH) for part in ids]
    reference = nn.Embedding.from_pretrained(table.clone(), freeze=False)
    expected = [reference(part) for part in ids]
    loss = sum(((rows * factor).sum() for rows, factor in zip(expected, factors, strict=True)))
    (loss / num_ranks).backward()
    for rank, (rows, full, gradient, same) in enumerate(
        run_ranks(num_ranks, lookup, backend, table, ids, factors, {}, backend=backend)
    ):
        torch.testing.assert_close(rows, expected[rank].detach(), rtol=0, atol=0)
        torch.testing.assert_close(full, table, rtol=0, atol=0)
        torch.testing.assert_close(gradient, reference.weight.grad)
        assert same


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_shapes_and_dtypes(backend: str, num_ranks: int) -> None:
    """Ids may have two dimensions, and rows may be sent in bf16."""
    table = torch.randn(ROWS, WIDTH)
    ids = [torch.randint(ROWS, (4, 5), dtype=torch.int32) for _ in range(num_ranks)]
    factors = [torch.randn(4, 5, WIDTH).bfloat16().float() for _ in range(num_ranks)]
    options = {"output_dtype": torch.bfloat16}
    results = run_ranks(num_ranks, lookup, backend, table, ids, factors, options, backend=backend)
    expected = torch.zeros(ROWS, WIDTH)
    for part, factor in zip(ids, factors, strict=True):
        expected.index_add_(0, part.flatten().long(), factor.flatten(0, 1) / num_ranks)
    for rank, (rows, _, gradient, _) in enumerate(results):
        assert rows.dtype == torch.bfloat16
        assert torch.equal(rows, table.bfloat16()[ids[rank].long()])
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, expected, rtol=0.02, atol=0.05)


def continued(directory: str, load: bool) -> Tensor:
    """Runs a step with no row on the last rank; loads a checkpoint first, or saves one."""
    embedding = ShardedEmbedding("item", 4, WIDTH, mesh_of("gloo"), std=1.0)
    optimizer = torch.optim.Adam(embedding.parameters(), lr=0.1)
    checkpoints = Checkpoints(directory)
    if load:
        checkpoints.load(embedding, optimizer)
    embedding(torch.arange(4)).pow(3).sum().backward()
    optimizer.step()
    if not load:
        checkpoints.save(1, embedding, optimizer)
    weight = embedding.weight.detach()
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


@pytest.mark.slow
def test_a_checkpoint_where_a_rank_has_no_row(tmp_path: Path) -> None:
    directory = str(tmp_path)
    (before,) = run_ranks(1, continued, directory, False)
    (after,) = run_ranks(1, continued, directory, True)
    assert not torch.equal(before, after)
    for table in run_ranks(3, continued, directory, True):
        torch.testing.assert_close(table, after)
    run_ranks(3, continued, directory, False)
    torch.testing.assert_close(run_ranks(1, continued, directory, True)[0], after)


def initial_rows(backend: str, name: str, seed: int, rows: int) -> Tensor:
    table = ShardedEmbedding(name, rows, 2, mesh_of(backend), seed=seed, std=0.5)
    weight = table.weight.detach()
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


@pytest.mark.slow
def test_initial_rows_do_not_depend_on_the_number_of_ranks() -> None:
    rows = 9001  # an odd number of rows in more than two blocks
    (one,) = run_ranks(1, initial_rows, "gloo", "item", 3, rows)
    for number in (2, 3):
        for many in run_ranks(number, initial_rows, "gloo", "item", 3, rows):
            assert torch.equal(many, one)
    assert one.std().item() == pytest.approx(0.5, rel=0.05)
    assert abs(one.mean().item()) < 0.02
    assert len(one.unique()) > 0.99 * one.numel()
    assert not torch.equal(initial_rows("gloo", "user", 3, rows), one)
    assert not torch.equal(initial_rows("gloo", "item", 4, rows), one)


def what_is_refused(ids: list[Tensor]) -> str:
    rank = dist.get_rank() if dist.is_initialized() else 0
    embedding = ShardedEmbedding("item", ROWS, WIDTH, mesh_of("gloo"))
    with pytest.raises(ValueError, match="item ids") as caught:
        embedding(ids[rank])
    # The group can still be used.
    assert embedding(torch.tensor([ROWS - 1])).shape == (1, WIDTH)
    return str(caught.value)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("wrong", [-1, ROWS])
def test_ids_out_of_range(wrong: int, num_ranks: int) -> None:
    """The last rank, which has them, reports the wrong ids; other ranks refer to that rank."""
    bad, good = torch.tensor([0, 6, wrong, 1]), torch.tensor([2, 2])
    message = f"item ids: expected 0 to 6, got {wrong} in row 2"
    elsewhere = "item ids: expected 0 to 6, which they are not on rank 1 of the mesh"
    ids, expected = [good, bad][-num_ranks:], [elsewhere, message][-num_ranks:]
    assert run_ranks(num_ranks, what_is_refused, ids) == expected


def refuse_mesh() -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    with pytest.raises(ValueError, match="mesh") as caught:
        ShardedEmbedding("item", ROWS, WIDTH, mesh)
    return str(caught.value)


def test_refuses() -> None:
    with pytest.raises(ValueError, match="num_embeddings: expected a positive number, got 0"):
        ShardedEmbedding("item", 0, 3)
    with pytest.raises(ValueError, match=r"item ids: expected int32 or int64, got torch.float32"):
        ShardedEmbedding("item", 4, 3)(torch.ones(2))
    with pytest.raises(ValueError, match=r"table: expected shape \(4, 3\), got \(3, 4\)"):
        ShardedEmbedding("item", 4, 3).copy_table(torch.ones(3, 4))


@pytest.mark.slow
def test_refuses_a_mesh_of_two_dimensions() -> None:
    assert "mesh: expected one dimension, got 2" in run_ranks(2, refuse_mesh)[0]


@pytest.mark.slow
def test_the_library_does_not_import_it() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import hstu_attn, hstu_attn.distributed; "
        "print([name for name in set(sys.modules) - before if 'distributed' in name])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "['hstu_attn.distributed']"
