"""Tests of checkpoints on any number of ranks, and of the directories left by killed writers."""

from __future__ import annotations

import multiprocessing
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hstu_attn.distributed import Checkpoints, parameter_groups
from tests.helpers.distributed_runs import BACKENDS, run_ranks
from tests.helpers.distributed_training import Run, Training
from tests.helpers.killed_writer import model_of, save_and_die


def part_of_run(run: Run, directory: str, number: int) -> tuple[Any, dict[str, Tensor], Any]:
    """Resumes a run from its newest checkpoint for a number of steps, and saves another one."""
    training = Training(run)
    checkpoints = Checkpoints(directory)
    step = checkpoints.load(training.model, training.optimizer, sampler=training.sampler) or 0
    for group in training.optimizer.param_groups:
        group["lr"] *= 0.5 if step else 1  # tests that the options of groups are restored
    results = training.steps(number)
    checkpoints.save(step + number, training.model, training.optimizer, sampler=training.sampler)
    return results, training.parameters(), training.sampler.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "parts",
    [
        [(1, "ddp"), (2, "ddp"), (1, "ddp")],
        [(2, "fsdp2"), (1, "ddp"), (2, "fsdp2")],
        [(2, "ddp"), (2, "fsdp2"), (3, "fsdp2")],
    ],
)
def test_continues_on_other_ranks(backend: str, parts: list[Any], tmp_path: Path) -> None:
    """A run in parts of 3 steps, with 4 steps an epoch, equals one run of one rank."""
    seed = int(torch.randint(2**31, ()))
    # GPUs have no kernels for fp32.
    dtype, tolerance = (None, 2e-5) if backend == "gloo" else (torch.bfloat16, 0.05)
    for ranks, strategy in parts:
        run = Run(strategy, backend, compute_dtype=dtype, data_seed=seed)
        on_one = part_of_run(run, str(tmp_path / "one"), 3)
        many = run_ranks(ranks, part_of_run, run, str(tmp_path / "many"), 3, backend=backend)
        for results, parameters, position in many:
            torch.testing.assert_close(results, on_one[0], rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(parameters, on_one[1], rtol=tolerance, atol=tolerance)
            assert position == on_one[2]
    assert position == {"epoch": 2, "batch": 1}
    assert Checkpoints(tmp_path / "many").steps() == [6, 9]
    assert sorted(path.name for path in (tmp_path / "many").iterdir()) == [
        "step-000000000006",
        "step-000000000009",
    ]


def without_a_break(run: Run) -> tuple[Any, dict[str, Tensor]]:
    training = Training(run)
    first = training.steps(3)
    for group in training.optimizer.param_groups:
        group["lr"] *= 0.5
    return [first, training.steps(3)], training.parameters()


@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize(("num_ranks", "strategy"), [(1, "ddp"), (2, "ddp"), (2, "fsdp2")])
def test_a_break_changes_nothing(num_ranks: int, strategy: Any, tmp_path: Path) -> None:
    """A run that is interrupted and continued on as many ranks has the same bits."""
    run = Run(strategy, data_seed=int(torch.randint(2**31, ())))
    straight = run_ranks(num_ranks, without_a_break, run)
    first = run_ranks(num_ranks, part_of_run, run, str(tmp_path), 3)
    second = run_ranks(num_ranks, part_of_run, run, str(tmp_path), 3)
    for rank, (results, parameters) in enumerate(straight):
        assert [first[rank][0], second[rank][0]] == results
        for name, parameter in parameters.items():
            assert torch.equal(second[rank][1][name], parameter)


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), np.random.rand()]  # noqa: NPY002


def random_numbers(directory: str) -> tuple[list[float], list[float]]:
    """Returns numbers drawn after a checkpoint is saved, and again after it is loaded."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)  # noqa: NPY002
    checkpoints = Checkpoints(directory)
    checkpoints.save(1, model_of(1))
    first = draw()
    assert checkpoints.load(model_of(0)) == 1
    return first, draw()


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_random_generators(num_ranks: int, tmp_path: Path) -> None:
    draws = run_ranks(num_ranks, random_numbers, str(tmp_path))
    assert all(first == again for first, again in draws)
    assert len({tuple(first) for first, _ in draws}) == num_ranks


def newest(directory: Path) -> int:
    """Returns the step of the newest checkpoint, after all of its contents have been checked."""
    model = model_of(0)
    step = Checkpoints(directory).load(model)
    assert step is not None
    assert {value for tensor in model.parameters() for value in tensor.flatten().tolist()} == {step}
    return step


@pytest.mark.faults
@pytest.mark.slow
def test_killed_writers(tmp_path: Path) -> None:
    """Writers are killed at each moment, also while a checkpoint replaces an older one."""
    moments = [  # the moment, the call, the steps saved, and the newest step afterwards
        ("before the tensors", 3, [1, 2, 3], 2),
        ("before the metadata", 3, [1, 2, 3], 2),
        ("before a name", 2, [1, 2], 1),
        ("after a name", 2, [1, 2], 2),
        ("before a name", 2, [1, 1], 1),
        ("after a name", 2, [1, 1], 1),
        ("before a name", 4, [1, 2, 3], 3),
        ("after a name", 4, [1, 2, 3], 3),
    ]
    # The forkserver imports torch once, and its processes are copies.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hstu_attn.distributed.checkpoint"])
    for number, (moment, call, steps, _) in enumerate(moments):
        arguments = (tmp_path / str(number), moment, call, steps)
        process = context.Process(target=save_and_die, args=arguments)
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    for number, (*_, expected) in enumerate(moments):
        directory = tmp_path / str(number)
        assert newest(directory) == expected, moments[number]
        # Training continues as if the writer had not been killed.
        checkpoints = Checkpoints(directory)
        for step in (expected, 7):
            checkpoints.save(step, model_of(step))
            assert newest(directory) == step
        assert [path.name for path in sorted(directory.iterdir())] == [
            f"step-{expected:012d}",
            "step-000000000007",
        ]


def test_what_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "new", keep=3)
    assert checkpoints.load(model_of(0)) is None
    with pytest.raises(ValueError, match=r"step: expected one of \[\], got 4"):
        checkpoints.load(model_of(0), step=4)
    for step in (1, 2, 3, 4):
        checkpoints.save(step, model_of(step))
    assert checkpoints.steps() == [2, 3, 4]
    model = model_of(0)
    assert checkpoints.load(model, step=3) == 3
    assert model.bias[0].item() == 3
    with pytest.raises(ValueError, match=r"step: expected one of \[2, 3, 4\], got 1"):
        checkpoints.load(model_of(0), step=1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters()))
    with pytest.raises(ValueError, match=r"others: expected names among \[\], which .*'scheduler'"):
        checkpoints.load(model, scheduler=scheduler)
    checkpoints.clear()
    assert checkpoints.steps() == []
    assert not list(checkpoints.directory.iterdir())
    with pytest.raises(ValueError, match="keep: expected a positive number, got 0"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(ValueError, match="step: expected 0 to 10\\^12 - 1, got -1"):
        checkpoints.save(-1, nn.Linear(1, 1))


class OfAnotherRun:
    """Refuses every state, like an object of another run."""

    def state_dict(self) -> dict[str, int]:
        return {"run": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise LookupError(f"this is of run {state['run']}")


def test_a_refused_checkpoint_changes_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, model_of(3), run=OfAnotherRun())
    model, generator = model_of(0), torch.get_rng_state()
    with pytest.raises(LookupError, match="this is of run 1"):
        checkpoints.load(model, run=OfAnotherRun())
    assert not any(parameter.any() for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), generator)


def save_until_a_rank_dies(directory: str) -> None:
    if dist.get_rank() == 1:
        save_and_die(Path(directory), "before the tensors", 2, [1, 2])
    checkpoints = Checkpoints(directory)
    for step in (1, 2):
        checkpoints.save(step, model_of(step))


@pytest.mark.slow
@pytest.mark.faults
def test_one_of_two_writers_is_killed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"a rank ended|Connection closed|onnection reset"):
        run_ranks(2, save_until_a_rank_dies, str(tmp_path))
    assert newest(tmp_path) == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".writing")]


def two_parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in model:
            fully_shard(part, mesh=mesh)
    return model, torch.optim.AdamW(parameter_groups(model), lr=0.1)


def steps_of_parts(model: Any, optimizer: torch.optim.Optimizer, used: list[int]) -> None:
    for number in used:
        optimizer.zero_grad()
        model[number](torch.linspace(-1, 1, 6).view(2, 3)).square().sum().backward()
        optimizer.step()


def break_after(directory: str, first: list[int]) -> list[list[Tensor]]:
    """Returns the parameters of a model after some steps: without a checkpoint, with one after
    the first steps, and continued from that checkpoint.
    """
    runs = [two_parts() for _ in range(3)]
    for run in runs[:2]:
        steps_of_parts(*run, first)
    checkpoints = Checkpoints(directory)
    checkpoints.save(len(first), *runs[1])
    assert checkpoints.load(*runs[2]) == len(first)
    for run in runs:
        steps_of_parts(*run, [1, 0, 1])
    return [
        [(p.to_local() if isinstance(p, DTensor) else p).detach() for p in model.parameters()]
        for model, _ in runs
    ]


@pytest.mark.slow
@pytest.mark.parametrize("first", [[], [0], [0, 1]])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_parameters_without_a_step_have_no_state(
    num_ranks: int, first: list[int], tmp_path: Path
) -> None:
    for straight, saved, continued in run_ranks(num_ranks, break_after, str(tmp_path), first):
        for wanted, *found in zip(straight, saved, continued, strict=True):
            assert all(torch.equal(wanted, parameter) for parameter in found)


def load_what_one_cannot(directory: str, name: str) -> tuple[str, bool]:
    """Loads a checkpoint that rank 1 cannot read; returns this rank's error and whether anything
    was loaded.
    """
    checkpoints = Checkpoints(directory)
    path = checkpoints.save(1, model_of(1))
    read, model = torch.load, model_of(0)

    def fails(file: Path, **options: Any) -> Any:
        if dist.get_rank() == 1 and file == path / name:
            raise OSError("no such luck")
        return read(file, **options)

    torch.load = fails
    try:
        checkpoints.load(model)
    except (OSError, RuntimeError) as error:
        return str(error), any(parameter.any() for parameter in model.parameters())
    finally:
        torch.load = read
    raise AssertionError("it was loaded")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run.pt", "rank-00001.pt"])
def test_ranks_fail_to_load_together(name: str, tmp_path: Path) -> None:
    (first, *changes), (second, *more) = run_ranks(2, load_what_one_cannot, str(tmp_path), name)
    assert second == "no such luck"
    assert first.endswith(
        "expected a checkpoint that all ranks can read, got rank 1: OSError: no such luck"
    )
    assert not any([*changes, *more])


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_what_was_just_saved_stays(keep: int, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=keep)
    for step in (7, 8, 9, 1):
        assert checkpoints.save(step, model_of(step)).exists()
    assert checkpoints.steps() == [1, *[8, 9][3 - keep :]]
    assert checkpoints.load(model_of(0), step=1) == 1


def test_cleared_beside_what_a_killed_writer_left(tmp_path: Path) -> None:
    """The leftovers of a writer that was killed while it replaced a checkpoint are removed."""
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(1, model_of(1))
    left = path.with_name(f"{path.name}.writing")
    left.mkdir()
    (left / "run.pt").touch()
    checkpoints.clear()
    assert not list(tmp_path.iterdir())
