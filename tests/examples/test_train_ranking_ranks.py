"""Tests of the ranking example on several ranks: the results equal those of one rank, and a run can
be killed, resumed and stopped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from recommender.ranking import load_ranking_model

from hstu_attn.data.synthetic_layouts import write_synthetic_kuairand
from hstu_attn.distributed import Checkpoints
from tests.helpers.checkpoint_files import newest_checkpoint
from tests.helpers.distributed_runs import BACKENDS, device_type, free_port, run_ranks
from tests.helpers.paths import EXAMPLES
from tests.helpers.ranking_ranks import Result, evaluate, history, initial_state, train

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
STEPS = 32
SMALL = [
    *("--dim", "16", "--layers", "2", "--history", "12", "--targets", "6", "--held-out", "3"),
    *("--sequences-per-batch", "8", "--steps", str(STEPS), "--eval-every", "16"),
    *("--checkpoint-every", "6", "--warmup-steps", "5", "--learning-rate", "3e-3"),
    *("--dropout", "0", "--tasks", "is_click", "long_view=0.5"),
]
ROWS = 100  # rows of an evaluation batch, so that there are several batches

# Runs with different orders of summation differ by fp32 rounding, which AdamW accumulates over the
# steps; a wrong weight of a rank's part changes the third digit.
TOLERANCE = {"rel": 2e-5, "abs": 2e-5}


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    directory = tmp_path_factory.mktemp("data")
    paths = write_synthetic_kuairand(directory, num_users=40, num_items=101, mean_events=24)
    return [*SMALL, "--data", *map(str, paths)]


def on_ranks(
    number: int, arguments: list[str], out: Path, *more: Any, **named: Any
) -> list[Result]:
    """Runs the example on this many ranks, or in this process alone."""
    return run_ranks(number, train, [*arguments, "--out", str(out)], *more, **named)


@pytest.fixture(scope="module")
def one(logs: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the result of the run of one process."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("one")
    (result,) = on_ranks(1, [*logs, "--device", "cpu"], out)
    assert result.error is None
    return out


def assert_same_run(out: Path, other: Path) -> None:
    """Compares losses and metrics up to rounding."""
    assert history(out)["losses"] == pytest.approx(history(other)["losses"], **TOLERANCE)
    steps, expected_steps = history(out)["validation"], history(other)["validation"]
    tables = [(steps, expected_steps), (metrics(out), metrics(other))]
    for table, expected in tables:
        assert table.keys() == expected.keys()
        for label, row in expected.items():
            for name, number in row.items():
                # A difference in the last digit of a logit may change the order of a few pairs.
                tolerance = {"abs": 2e-3} if name.startswith("auc") else TOLERANCE
                assert table[label][name] == pytest.approx(number, **tolerance), (label, name)


def metrics(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "metrics.json").read_text())
    return found


@pytest.mark.parametrize(
    ("strategy", "tables"), [("ddp", "sharded"), ("ddp", "replicated"), ("fsdp2", "sharded")]
)
def test_two_ranks_are_as_one(
    strategy: str, tables: str, logs: list[str], one: Path, tmp_path: Path
) -> None:
    arguments = [*logs, "--device", "cpu", "--strategy", strategy, "--tables", tables]
    first, second = on_ranks(2, arguments, tmp_path, "gloo", None, ROWS)
    assert first.error is None
    losses = history(tmp_path)["losses"]
    assert len(losses) == STEPS
    assert sum(losses[-8:]) < 0.97 * sum(losses[:8])
    assert_same_run(tmp_path, one)
    assert "step    16  loss" in first.printed
    assert "Test: the last events" in first.printed
    assert second == Result("", None)

    # The saved model equals that of one process.
    models = [load_ranking_model(out / "best.pt", CPU) for out in (tmp_path, one)]
    for (name, parameter), expected in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        torch.testing.assert_close(parameter, expected, rtol=2e-3, atol=2e-4, msg=name)


def test_ranks_start_from_the_same_values(logs: list[str], tmp_path: Path) -> None:
    seed = str(random.Random(torch.initial_seed()).randrange(10**6))
    arguments = [*logs, "--out", str(tmp_path), "--device", "cpu", "--seed", seed]
    (expected,) = run_ranks(1, initial_state, arguments)
    assert expected["embeddings.tables.item.weight"].std() == pytest.approx(0.02, rel=0.1)
    for number, more in (
        (2, ()),
        (2, ("--tables", "replicated")),
        (2, ("--strategy", "fsdp2")),
        (3, ("--strategy", "fsdp2")),
    ):
        first, *others = run_ranks(number, initial_state, [*arguments, *more])
        assert first.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(first[name], tensor), name
        assert not any(others)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_metrics_of_ranks_are_those_of_one(strategy: str, logs: list[str], one: Path) -> None:
    """The metrics of a model on the same batches have the same bits on any number of ranks."""
    arguments = [*logs, "--out", str(one), "--device", "cpu", "--strategy", strategy]
    best = str(one / "best.pt")
    ((expected, rows),) = run_ranks(1, evaluate, arguments, best, ROWS)
    assert rows == 101
    whole = metrics(one)["HSTU"]
    assert expected == pytest.approx(whole, rel=1e-5)  # the batches have other sizes
    for number in (2, 3):
        results = run_ranks(number, evaluate, arguments, best, ROWS)
        assert [found for found, _ in results] == [expected] * number
        assert sum(rows for _, rows in results) == 101


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_continues_on_other_ranks(
    strategy: str, logs: list[str], one: Path, tmp_path: Path
) -> None:
    """The run goes from 2 ranks to 1, to 3 and back to 2."""
    arguments = [*logs, "--device", "cpu", "--strategy", strategy]
    for number, step in ((2, 9), (1, 17), (3, 25), (2, None)):
        spoilt = None if step is None else (0, step - done(tmp_path))
        results = on_ranks(number, [*arguments, "--resume"], tmp_path, "gloo", spoilt)
        assert all((result.error is None) == (step is None) for result in results)
    assert "Continuing after step 24 of 32" in results[0].printed
    assert_same_run(tmp_path, one)


@pytest.mark.faults
def test_ranks_pass_over_a_checkpoint_together(logs: list[str], one: Path, tmp_path: Path) -> None:
    """All ranks skip a checkpoint, even if only one of them cannot read its part."""
    arguments = [*logs, "--device", "cpu"]
    on_ranks(2, arguments, tmp_path, "gloo", (0, 15))
    assert done(tmp_path) == 12
    (tmp_path / "checkpoints" / "step-000000000012" / "rank-00001.pt").write_bytes(b"")
    first, second = on_ranks(2, [*arguments, "--resume"], tmp_path)
    assert first.error is None
    assert second.error is None
    assert "Continuing after step 6 of 32" in first.printed
    assert_same_run(tmp_path, one)


def done(out: Path) -> int:
    return max(Checkpoints(out / "checkpoints").steps(), default=0)


@pytest.mark.faults
def test_nan_on_a_rank_stops_all(logs: list[str], tmp_path: Path) -> None:
    results = on_ranks(2, [*logs, "--device", "cpu"], tmp_path, "gloo", (1, 9))
    message = results[0].error
    assert message is not None
    assert results[1].error == message
    assert message.startswith("rank 1: the loss is nan and the norm of its gradient nan at step 9 ")
    assert f"The batch is in {tmp_path / 'bad-batch-1.pt'}" in message
    assert "Not finite are the weights of none and the gradients of " in message
    assert "A lower --learning-rate" in message
    saved = torch.load(tmp_path / "bad-batch-1.pt", weights_only=True)
    assert saved["step"] == 9
    assert 0 < len(saved["batch"]["contexts"]) < 8
    assert not (tmp_path / "bad-batch-0.pt").exists()
    assert Checkpoints(tmp_path / "checkpoints").steps() == [6]
    # Once the cause is removed, the run continues from there.
    first, _ = on_ranks(2, [*logs, "--device", "cpu", "--resume"], tmp_path)
    assert first.error is None
    assert "Continuing after step 6 of 32" in first.printed


def test_ranks_refuse_a_directory_together(logs: list[str], one: Path, tmp_path: Path) -> None:
    """All ranks refuse a start without `--resume`, or with other options, by the same message."""
    arguments = [*logs, "--device", "cpu"]
    out = Path(shutil.copytree(one, tmp_path / "run"))
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for more, message in (
        ([], f"--out: expected a directory without a run; got {out}, which holds checkpoints"),
        (["--resume", "--layers", "1"], f"--resume: the run in {out} was made with layers = 2, "),
    ):
        first, second = on_ranks(2, [*arguments, *more], out)
        assert first.error is not None
        assert first.error.startswith(message)
        assert second.error == first.error
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_ranks_train_a_finished_run_on(logs: list[str], one: Path, tmp_path: Path) -> None:
    """Two ranks train the finished run of one rank for more epochs."""
    out = Path(shutil.copytree(one, tmp_path / "run"))
    more = ["--resume", "--steps", str(STEPS + 8)]
    first, _ = on_ranks(2, [*logs, "--device", "cpu", *more], out)
    assert first.error is None
    assert f"Continuing after step {STEPS} of {STEPS + 8}" in first.printed
    assert history(out)["losses"][:STEPS] == history(one)["losses"]
    assert len(history(out)["losses"]) == STEPS + 8
    assert metrics(out).keys() == metrics(one).keys()


def test_ranks_do_not_take_one_device(logs: list[str], tmp_path: Path) -> None:
    for result in on_ranks(2, [*logs, "--device", "cpu:0"], tmp_path):
        assert result.error is not None
        assert result.error.startswith("--device must be auto, cuda or cpu where torchrun gives")
        assert result.error.endswith("got cpu:0")


def test_torchrec_is_asked_for_clearly(logs: list[str], tmp_path: Path) -> None:
    arguments = [*logs, "--device", "cpu", "--tables", "torchrec"]
    (result,) = on_ranks(1, arguments, tmp_path)
    assert result.error == "--tables torchrec needs processes that torchrun has started"
    if importlib.util.find_spec("torchrec") is None:
        for result in on_ranks(2, arguments, tmp_path):
            assert result.error is not None
            assert result.error.startswith("--tables torchrec needs torchrec and fbgemm-gpu, see ")


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torchrec", "fbgemm_gpu")),
    reason="needs torchrec and fbgemm-gpu",
)
def test_tables_of_torchrec(logs: list[str], tmp_path: Path) -> None:
    arguments = [*logs, "--device", "cpu", "--tables", "torchrec"]
    first, _ = on_ranks(2, arguments, tmp_path)
    assert first.error is None
    losses = history(tmp_path)["losses"]
    assert sum(losses[-8:]) < 0.97 * sum(losses[:8])
    # A single process can load the best model, and so can ranks that have other weights.
    best, expected = str(tmp_path / "best.pt"), metrics(tmp_path)["HSTU"]
    there = ["--out", str(tmp_path / "other"), "--seed", "1"]
    ((alone, _),) = run_ranks(1, evaluate, [*logs, "--device", "cpu", *there], best, 10**6)
    assert alone == pytest.approx(expected, rel=1e-5)
    for found, _ in run_ranks(2, evaluate, [*arguments, *there], best, 10**6):
        assert found == pytest.approx(expected, rel=1e-5)
    # The run is continued, with its learning rates.
    again = tmp_path / "again"
    on_ranks(2, arguments, again, "gloo", (0, 20))
    results = on_ranks(2, [*arguments, "--resume"], again)
    assert "Continuing after step 18 of 32" in results[0].printed
    assert history(again)["losses"] == pytest.approx(losses, rel=1e-6)


# --- under torchrun -------------------------------------------------------------------------------


def torchrun(arguments: list[str], **named: Any) -> subprocess.Popen[str]:
    # fmt: off
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2",
        "--master-addr", "127.0.0.1", "--master-port", str(free_port()),
        str(EXAMPLES / "train_ranking.py"), *arguments,
    ]
    # fmt: on
    environment = {
        **os.environ,
        "PYTHONPATH": str(EXAMPLES.parent),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.Popen(command, env=environment, text=True, **named)


def ranks_of(run: subprocess.Popen[str]) -> list[int]:
    """Returns the processes of the ranks that torchrun has started."""
    found = []
    for children in Path(f"/proc/{run.pid}/task").glob("*/children"):
        found += [int(pid) for pid in children.read_text().split()]
    return sorted(found)


def kill_after_a_checkpoint(run: subprocess.Popen[str], out: Path, whole_run: bool) -> list[int]:
    """Kills a rank, or all and torchrun, just after the first checkpoint; returns the ranks."""
    while not done(out):
        assert run.poll() is None
        time.sleep(0.01)
    generator = random.Random(torch.initial_seed())
    time.sleep(generator.uniform(0, 0.5))
    ranks = ranks_of(run)
    assert len(ranks) == 2
    for pid in [run.pid, *ranks] if whole_run else [generator.choice(ranks)]:
        os.kill(pid, signal.SIGKILL)
    return ranks


@pytest.mark.faults
def test_killed_under_torchrun(logs: list[str], one: Path, tmp_path: Path) -> None:
    """All processes of a run are killed at once, during a step or a checkpoint."""
    out = tmp_path / "run"
    arguments = [*logs, "--out", str(out), "--device", "cpu"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    run = torchrun(arguments, **quiet)
    kill_after_a_checkpoint(run, out, whole_run=True)
    assert run.wait() == -signal.SIGKILL
    assert 0 < done(out) < STEPS
    run = torchrun([*arguments, "--resume"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    printed, _ = run.communicate(timeout=120)
    assert run.returncode == 0, printed
    assert printed.count("Continuing after step ") == 1
    assert_same_run(out, one)


@pytest.mark.faults
def test_a_rank_that_is_killed_ends_the_run(logs: list[str], tmp_path: Path) -> None:
    arguments = [*logs, "--out", str(tmp_path), "--device", "cpu", "--steps", "10000"]
    run = torchrun(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    ranks = kill_after_a_checkpoint(run, tmp_path, whole_run=False)
    killed = time.monotonic()
    printed, _ = run.communicate(timeout=120)
    assert time.monotonic() - killed < 40
    assert run.returncode not in (0, None)
    assert "Signal 9 (SIGKILL)" in printed
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


# --- in bf16, and on GPUs -------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_bf16_on_ranks_is_as_on_one(
    strategy: str, backend: str, logs: list[str], tmp_path: Path
) -> None:
    """The runs are on 1, 2 and 4 GPUs, as many as there are, by NCCL, or on 2 processes of a
    CPU.

    bf16 keeps 8 bits: sums in another order differ by up to 2^-8 of an activation. A loss is a
    mean over some forty candidates with independent errors, and the weights of a later step
    carry the errors of earlier ones. The bounds are therefore 1 % for a step's loss, and 0.3 %
    for the mean of all steps.
    """
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    kind = device_type(backend)
    arguments = [*logs, "--device", kind, "--bf16", "--strategy", strategy, "--dim", "64"]
    losses = {}
    for number in (1, 2, 4) if backend == "nccl" else (1, 2):
        if backend == "nccl" and number > torch.cuda.device_count():
            continue
        out = tmp_path / str(number)
        results = on_ranks(number, arguments, out, backend, backend=backend)
        assert [result.error for result in results] == [None] * number
        losses[number] = torch.tensor(history(out)["losses"])
        saved = newest_checkpoint(out)["model"]
        assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
        assert load_ranking_model(out / "best.pt", CPU).compute_dtype == torch.bfloat16
    for number in losses:
        torch.testing.assert_close(losses[number], losses[1], rtol=1e-2, atol=0)
        torch.testing.assert_close(losses[number].mean(), losses[1].mean(), rtol=3e-3, atol=0)
