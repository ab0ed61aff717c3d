"""Tests of runs under torchrun: they end as they should, and soon after a rank fails."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from hstu_attn.distributed import RunStopped, World, is_launched, run, stop_together
from tests.helpers.paths import ROOT
from tests.helpers.torchrun import torchrun

pytestmark = pytest.mark.slow


def launch(how: str, directory: Path, device: str) -> tuple[int, str, float]:
    """Returns the exit code, the output, and the seconds from a rank's failure to the end."""
    code, printed = torchrun(
        ROOT / "tests/helpers/launched.py", how, str(directory), device_type=device
    )
    ended = time.time()
    failed = directory / "raised"
    return code, printed, ended - failed.stat().st_mtime if failed.exists() else 0.0


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(kernels=False))]


def skip_without_gpus(name: str) -> None:
    if name == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")


@pytest.mark.parametrize("where", DEVICES)
def test_ends_well(where: str, tmp_path: Path) -> None:
    """On a CPU no thread is left, even of a group that a model holds in a reference cycle: if such
    a thread frees a tensor while Python exits, the process aborts.
    """
    skip_without_gpus(where)
    code, printed, _ = launch("cycle" if where == "cpu" else "well", tmp_path, where)
    assert code == 0, printed
    for rank in range(2):
        name = "cpu" if where == "cpu" else f"cuda:{rank}"
        assert (tmp_path / f"rank-{rank}").read_text() == f"2 {name} 3.5"
        if where == "cpu":
            assert "gloo" not in (tmp_path / f"threads-{rank}").read_text()


@pytest.mark.faults
@pytest.mark.parametrize("where", DEVICES)
def test_a_rank_that_raises_ends_the_run(where: str, tmp_path: Path) -> None:
    """The other rank sleeps and is ended; the error is shown as that of rank 1."""
    skip_without_gpus(where)
    code, printed, seconds = launch("raise", tmp_path, where)
    assert code != 0
    assert 0 < seconds < 60
    summary = printed[printed.rindex("Root Cause") :]
    assert "rank      : 1" in summary
    assert "LookupError: the item 17 is nowhere" in summary


@pytest.mark.faults
@pytest.mark.parametrize("where", DEVICES)
def test_a_rank_that_dies_ends_the_run(where: str, tmp_path: Path) -> None:
    skip_without_gpus(where)
    code, _, seconds = launch("die", tmp_path, where)
    assert code != 0
    assert 0 < seconds < 60


@pytest.mark.faults
@pytest.mark.parametrize("where", DEVICES)
def test_a_problem_of_a_rank_stops_all(where: str, tmp_path: Path) -> None:
    skip_without_gpus(where)
    code, printed, _ = launch("nan", tmp_path, where)
    assert code != 0
    message = "RunStopped: rank 1: the loss is nan at step 3"
    assert message in printed[printed.rindex("Root Cause") :]
    assert printed.count(message) >= 2
    assert not list(tmp_path.iterdir())


def test_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not is_launched()
    world = run(lambda world: world, device_type="cpu")
    assert world == World(0, 0, 1, torch.device("cpu"), None)
    stop_together(None, None)
    with pytest.raises(RunStopped, match="rank 0: no rows"):
        stop_together("no rows", None)
    with pytest.raises(ValueError, match="device_type: expected 'cuda' or 'cpu', got 'gpu'"):
        run(lambda world: world, device_type="gpu")
    monkeypatch.setenv("RANK", "0")
    assert is_launched()
