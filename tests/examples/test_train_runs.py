"""Tests of repeating a command of the training examples: no run is replaced, a finished run can be
trained for more epochs, and an invalid command fails before it does any work.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import train_ranking
import train_retrieval
from recommender import options
from recommender.directory import EARLIER_VALUES
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hstu_attn.data import ACTIONS, LAYOUT_NAMES
from hstu_attn.data.synthetic import write_synthetic_movielens
from hstu_attn.distributed import Checkpoints
from tests.helpers.paths import EXAMPLES

STEPS = 24
SMALL = [
    *("--dim", "16", "--layers", "1", "--steps", str(STEPS), "--eval-every", "8"),
    *("--checkpoint-every", "4", "--warmup-steps", "5", "--device", "cpu"),
]
OF_EXAMPLE = {
    "train_retrieval": ["--max-seq-len", "30", "--tokens-per-batch", "256", "--negatives", "32"],
    "train_ranking": ["--history", "12", "--targets", "6", "--tasks", "rating_4"],
}
MODULES = {"train_retrieval": train_retrieval, "train_ranking": train_ranking}
EVALUATIONS = {"train_retrieval": 36 + 3, "train_ranking": 10 + 5}

Files = dict[str, bytes]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic_movielens(tmp_path_factory.mktemp("data"), 50, 120, 25)


@pytest.fixture(params=list(MODULES))
def example(request: pytest.FixtureRequest) -> ModuleType:
    return MODULES[request.param]


def arguments(example: ModuleType, ratings: Path, out: Path, *more: str) -> list[str]:
    own = OF_EXAMPLE[example.__name__]
    return [*SMALL, *own, "--data", str(ratings), "--out", str(out), *more]


@pytest.fixture(scope="module")
def finished_runs(ratings: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Makes a finished run of each example, for tests to copy."""
    torch.set_num_threads(1)
    found = {}
    for name, module in MODULES.items():
        found[name] = tmp_path_factory.mktemp(name) / "run"
        assert module.main(arguments(module, ratings, found[name])) == 0
    return found


@pytest.fixture
def finished(example: ModuleType, finished_runs: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_runs[example.__name__], tmp_path / "run"))


def files(directory: Path) -> Files:
    """Returns the contents of a directory's files."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def learning_rates(out: Path) -> list[float]:
    accumulator = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    return [point.value for point in accumulator.Scalars("train/learning_rate")]


def fail(*_: Any, **__: Any) -> Any:
    raise AssertionError("this comes too late")


# --- nothing is replaced --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("left", [None, "checkpoints", "best.pt", "history.json", "metrics.json"])
def test_a_directory_with_a_run_is_refused(
    left: str | None,
    example: ModuleType,
    finished: Path,
    ratings: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A directory is refused even if only one part of a run is left in it."""
    if left is not None:
        for path in finished.iterdir():
            if path.name != left:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = files(finished)
    assert example.main(arguments(example, ratings, finished)) == 1
    error = capsys.readouterr().err
    assert f"--out: expected a directory without a run; got {finished}, which holds " in error
    assert left is None or f"holds {left}. " in error
    assert "Add --resume to continue that run" in error
    assert "name another --out" in error
    assert files(finished) == before
    if left not in (None, "checkpoints"):  # there is nothing to continue from
        assert example.main(arguments(example, ratings, finished, "--resume")) == 1
        error = capsys.readouterr().err
        assert f"--resume: expected {finished} to hold a checkpoint; got {left} alone" in error
        assert files(finished) == before


@pytest.mark.slow
def test_an_interrupt_leaves_a_run_as_it_was(
    example: ModuleType,
    finished: Path,
    ratings: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C leaves a run as it was, at the first further step and while data are read."""
    before = files(finished)
    again = arguments(example, ratings, finished, "--resume", "--steps", "30")

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    trainer = {"train_retrieval": "RetrievalTrainer", "train_ranking": "RankingTrainer"}
    monkeypatch.setattr(getattr(example, trainer[example.__name__]), "draw", interrupt)
    assert example.main(again) == 130
    assert "--resume continues" in capsys.readouterr().err
    after = files(finished)
    assert {name: after[name] for name in before} == before
    assert all(name.startswith("tensorboard") for name in after.keys() - before.keys())
    monkeypatch.setattr(example, "open_data", interrupt)
    assert example.main(again) == 130
    assert files(finished) == after


@pytest.mark.slow
def test_a_start_that_made_nothing_is_no_run(
    example: ModuleType, ratings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was stopped before training can start again, also with other options, and then
    computes its baselines again.
    """
    run = arguments(example, ratings, tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(example.Trainer, "run", fail)
        with pytest.raises(AssertionError):
            example.main([*run, "--seed", "1"])
    baselines = tmp_path / "run" / "baselines.json"
    expected = baselines.read_text()
    baselines.write_text("{}")
    assert example.main(run) == 0
    assert baselines.read_text() == expected
    assert json.loads((tmp_path / "run" / "run.json").read_text())["seed"] == 0


@pytest.mark.slow
def test_best_changes_only_for_a_better_one(
    ratings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saved best model may be newer than the checkpoint from which the run resumes."""
    out = tmp_path / "run"
    run = arguments(train_retrieval, ratings, out, "--no-baselines", "--eval-every", "3")
    by_step = {3: 0.1, 6: 0.3, 9: 0.2, 12: 0.2, 15: 0.1, 18: 0.4, 21: 0.2, 24: 0.3}
    kept: dict[int, float] = {}
    stop_after = 13

    def validate(trainer: train_retrieval.RetrievalTrainer) -> dict[str, float]:
        if trainer.step > 3:
            state = torch.load(out / "best.pt", weights_only=True)
            kept[trainer.step] = state["validation"]["ndcg_10"]
        return dict.fromkeys(train_retrieval.LABELS, by_step[trainer.step])

    draw = train_retrieval.RetrievalTrainer.draw

    def stop(trainer: train_retrieval.RetrievalTrainer) -> Any:
        if trainer.step == stop_after:
            raise KeyboardInterrupt
        return draw(trainer)

    monkeypatch.setattr(train_retrieval.RetrievalTrainer, "validate", validate)
    monkeypatch.setattr(train_retrieval.RetrievalTrainer, "draw", stop)
    for every in ("4", "100"):
        kept.clear()
        stop_after = 7 if every == "4" else 13
        arguments_of = [*run, "--checkpoint-every", every]
        assert train_retrieval.main(arguments_of) == 130
        done = max(Checkpoints(out / "checkpoints").steps(), default=0)
        assert done == (4 if every == "4" else 0)  # and the best model is that of step 6
        kept.clear()
        stop_after = 17
        assert train_retrieval.main([*arguments_of, "--resume"]) == 130
        assert set(kept.values()) == {0.3}
        assert torch.load(out / "best.pt", weights_only=True)["validation"]["ndcg_10"] == 0.3
        stop_after = 100
        assert train_retrieval.main([*arguments_of, "--resume"]) == 0
        assert kept[21] == kept[24] == 0.4
        shutil.rmtree(out)


# --- a full disk ----------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoilt", "named"),
    [
        *(("run.json", None), ("baselines.json", None), ("best.pt", None), ("history.json", None)),
        *(("curves.png", None), ("metrics.json", None)),
        *((".distcp", "checkpoints"), ("rank-00000.pt", "checkpoints")),
    ],
)
def test_a_full_disk_is_said_with_the_path(
    spoilt: str,
    named: str | None,
    ratings: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The error comes when a file is moved to its place; the run continues once there is room."""
    out = tmp_path / "run"
    run = arguments(train_retrieval, ratings, out)
    sync, full = os.fsync, True

    def fsync(descriptor: int) -> None:
        if full and spoilt in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert train_retrieval.main(run) == 1
    lines = [x for x in capsys.readouterr().err.splitlines() if x.strip() and "%|" not in x]
    assert lines == [f"error: [Errno 28] No space left on device: '{out / (named or spoilt)}'"]
    assert not list(out.glob("*.tmp"))
    assert not (out / spoilt).exists()
    full = False
    assert train_retrieval.main([*run, "--resume"]) == 0
    assert len(json.loads((out / "history.json").read_text())["losses"]) == STEPS


@pytest.mark.faults
@pytest.mark.slow
def test_a_full_disk_for_preprocessed_data(
    example: ModuleType, ratings: Path, tmp_path: Path
) -> None:
    """The system's file size limit simulates a full disk; the error is the same."""
    cache = tmp_path / "cache"
    program = [sys.executable, str(EXAMPLES / f"{example.__name__}.py")]
    result = subprocess.run(
        [*program, *arguments(example, ratings, tmp_path / "run", "--cache-dir", str(cache))],
        env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert re.search(rf"^error: \[Errno \d+\] .*: '{cache}.*'$", result.stderr, re.MULTILINE)
    assert "Traceback" not in result.stderr


@pytest.mark.faults
@pytest.mark.slow
def test_a_full_disk_keeps_the_former_best(
    example: ModuleType,
    finished: Path,
    ratings: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save = torch.save

    def save_half(state: Any, file: Any, *more: Any, **named: Any) -> None:
        if "best.pt" in str(getattr(file, "name", "")):
            file.write(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(state, file, *more, **named)

    monkeypatch.setattr(torch, "save", save_half)
    state = torch.load(finished / "best.pt", weights_only=True)
    worst = 1e9 if example is train_ranking else -1e9  # the worst entropy, or the worst hit rate
    state["validation"] = dict.fromkeys(state["validation"], worst)
    with (finished / "best.pt").open("wb") as file:
        save(state, file)
    worse = (finished / "best.pt").read_bytes()
    again = arguments(example, ratings, finished, "--resume", "--steps", "32")
    assert example.main(again) == 1
    assert f"No space left on device: '{finished / 'best.pt'}'" in capsys.readouterr().err
    assert (finished / "best.pt").read_bytes() == worse


# --- what is wrong is said first ------------------------------------------------------------------


@pytest.mark.slow
def test_metrics_are_written_before_anything_can_fail(
    example: ModuleType, ratings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("print_table", "plot_curves"):
        with monkeypatch.context() as patched:
            patched.setattr(example, name, fail)
            run = arguments(example, ratings, tmp_path / name, "--checkpoint-every", "100")
            with pytest.raises(AssertionError):
                example.main(run)
        assert "HSTU" in json.loads((tmp_path / name / "metrics.json").read_text())


def test_an_unknown_user_is_found_first(
    ratings: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(train_retrieval, "RetrievalTrainer", fail)
    monkeypatch.setattr(train_retrieval, "measure_baselines", fail)
    run = arguments(train_retrieval, ratings, tmp_path, "--show-user", "99999")
    assert train_retrieval.main(run) == 1
    assert "--show-user must be a user of the data, got 99999" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--dropout", "1"], "--dropout must be from 0 to below 1, got 1.0"),
        (["--learning-rate", "nan"], "--learning-rate must be positive, got nan"),
        (["--clip-norm", "inf"], "--clip-norm must be 0 or more, got inf"),
        (["--clip-norm", "-0.5"], "--clip-norm must be 0 or more, got -0.5"),
        (["--weight-decay", "-1"], "--weight-decay must be 0 or more, got -1.0"),
        (["--warmup-steps", "-1"], "--warmup-steps must be 0 or more, got -1"),
        (["--min-user-events", "0"], "--min-user-events must be positive, got 0"),
        (["--seed", "-1"], "--seed must be from 0 to 4294967295, got -1"),
        (["--dim", "-16"], "--dim must be positive, got -16"),
        (["--dim", "1024", "--heads", "2"], "--dim must be at most 256 times --heads, got 1024"),
        (["--dim", "50", "--heads", "1"], "where --head-dim is not given, got 50"),
        (["--head-dim", "50"], "from 8 to 256, which the kernels take (the nearest: 48 and 56)"),
        (["--head-dim", "0"], "--head-dim must be a multiple of 8 from 8 to 256"),
        (["--head-dim", "264"], "(the nearest: 256), got 264"),
        (["--device", "tpu"], "--device must be auto, cpu, cuda or cuda:NUMBER, got tpu"),
        (["--device", "cuda:99"], "--device: expected one of this machine, where torch sees "),
    ],
)
def test_options_are_checked_before_data_are_read(
    wrong: list[str],
    message: str,
    example: ModuleType,
    ratings: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(example, "open_data", fail)
    try:
        status = example.main(arguments(example, ratings, tmp_path, *wrong))
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    assert status in (1, 2)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--tasks", "rating_9"], "--tasks must be different ones of is_click, is_like, "),
        (["--tasks", "rating_4=0"], "--tasks must have positive weights, got rating_4=0"),
        (["--tables", "torchrec"], "--tables torchrec needs processes that torchrun has started"),
    ],
)
def test_options_of_ranking_are_checked_before_data_are_read(
    wrong: list[str],
    message: str,
    ratings: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(train_ranking, "open_data", fail)
    assert train_ranking.main(arguments(train_ranking, ratings, tmp_path, *wrong)) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_with_other_options_is_refused_before_data_are_read(
    example: ModuleType,
    finished: Path,
    ratings: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(example, "open_data", fail)
    before = files(finished)
    run = arguments(example, ratings, finished, "--resume", "--clip-norm", "2")
    assert example.main(run) == 1
    error = capsys.readouterr().err
    assert f"the run in {finished} was made with clip_norm = 1.0, this run has 2.0" in error
    assert files(finished) == before
    file = finished / "best.pt"
    assert example.main(arguments(example, ratings, file)) == 1
    assert f"--out: expected a directory; got the file {file}" in capsys.readouterr().err


def test_a_run_with_other_data_is_refused_before_baselines_are_tuned(
    example: ModuleType,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(example, "measure_baselines", fail)
    (tmp_path / "other").mkdir()
    other = write_synthetic_movielens(tmp_path / "other", 40, 120, 25)
    for without in ((), ("checkpoints",), ("run.json",)):
        for name in without:
            path = finished / name
            path.rename(tmp_path / name)
        before = files(finished)
        assert example.main(arguments(example, other, finished, "--resume")) == 1
        assert "was made with data content = " in capsys.readouterr().err
        assert files(finished) == before
        for name in without:
            if (finished / name).exists():
                shutil.rmtree(finished / name)  # the empty folder for checkpoints
            (tmp_path / name).rename(finished / name)


def test_tasks_are_checked_without_baselines(
    ratings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A task with only positive labels cannot be learned."""
    spoiled = tmp_path / "ratings.dat"
    lines = ratings.read_text("latin-1").splitlines()
    spoiled.write_text("\n".join(re.sub(r"^(\d+::\d+)::\d", r"\1::5", line) for line in lines))
    run = arguments(train_ranking, spoiled, tmp_path / "run", "--no-baselines")
    assert train_ranking.main(run) == 1
    assert "tasks: expected both labels in the training events" in capsys.readouterr().err


def test_choices_are_those_of_the_library() -> None:
    """The command line repeats the choices, because it is parsed before torch is imported."""
    assert options.LAYOUT_NAMES == LAYOUT_NAMES
    assert options.ACTIONS == ACTIONS


# --- a finished run -------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_finished_run_is_trained_on(
    example: ModuleType,
    finished: Path,
    ratings: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A longer run has its own learning rates, and an interruption does not change its results; a
    shorter run is refused.
    """
    longer = 36
    first = json.loads((finished / "history.json").read_text())
    continued = finished.with_name("interrupted")
    shutil.copytree(finished, continued)
    monkeypatch.setattr(example, "measure_baselines", fail)  # the run has its baselines already
    run = arguments(example, ratings, finished, "--resume", "--steps", str(longer))
    assert example.main(run) == 0
    assert f"Continuing after step {STEPS} of {longer}" in capsys.readouterr().out
    history = json.loads((finished / "history.json").read_text())
    assert len(history["losses"]) == longer
    assert history["losses"][:STEPS] == first["losses"]
    assert list(history["validation"]) == ["8", "16", "24", "32", "36"]
    highest = example.parse_arguments([]).learning_rate
    expected = [
        highest * min(1, (step + 1) / 5) * (1 + math.cos(math.pi * step / steps)) / 2
        for step in range(longer)
        for steps in [STEPS if step < STEPS else longer]
    ]
    assert learning_rates(finished) == pytest.approx(expected, rel=1e-5)
    rows = json.loads((finished / "metrics.json").read_text())
    assert len(rows) > 1  # the report has the baselines

    stopped_at = STEPS + 6
    trainer = {"train_retrieval": "RetrievalTrainer", "train_ranking": "RankingTrainer"}
    kind = getattr(example, trainer[example.__name__])
    draw = kind.draw

    def stop(self: Any) -> Any:
        if self.step == stopped_at:
            raise KeyboardInterrupt
        return draw(self)

    again = arguments(example, ratings, continued, "--resume", "--steps", str(longer))
    with monkeypatch.context() as patched:
        patched.setattr(kind, "draw", stop)
        assert example.main(again) == 130
    assert example.main(again) == 0
    assert json.loads((continued / "history.json").read_text()) == history
    assert json.loads((continued / "metrics.json").read_text()) == rows

    before = files(finished)
    assert example.main(arguments(example, ratings, finished, "--resume")) == 1
    error = capsys.readouterr().err
    assert f"--resume: expected --epochs or --steps for at least the {longer} steps" in error
    assert error.rstrip().endswith(f"got {STEPS}")
    assert files(finished) == before


@pytest.mark.slow
def test_a_constant_rate_does_not_depend_on_the_steps(
    example: ModuleType,
    ratings: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An extended run has the losses, rates and metrics of a run of that length."""
    longer = 32
    whole, continued = tmp_path / "whole", tmp_path / "continued"
    constant = ("--schedule", "constant", "--no-baselines")
    more = (*constant, "--steps", str(longer))
    assert example.main(arguments(example, ratings, whole, *more)) == 0
    assert example.main(arguments(example, ratings, continued, *constant)) == 0
    again = arguments(example, ratings, continued, "--resume", *more)
    assert example.main([*again, "--schedule", "cosine"]) == 1
    message = "was made with schedule = 'constant', this run has 'cosine'"
    assert message in capsys.readouterr().err
    assert example.main(again) == 0
    highest = example.parse_arguments([]).learning_rate
    rates = [highest * min(1, (step + 1) / 5) for step in range(longer)]
    for out in (whole, continued):
        assert learning_rates(out) == pytest.approx(rates, rel=1e-6)
    for name in ("history.json", "metrics.json"):
        assert (continued / name).read_text() == (whole / name).read_text()


@pytest.mark.slow
def test_a_run_from_before_an_option_existed_is_continued(
    example: ModuleType,
    finished: Path,
    ratings: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its checkpoints lack these options, whose defaults are the behavior of the old run."""
    made_with = json.loads((finished / "run.json").read_text())
    for name in EARLIER_VALUES:
        made_with.pop(name, None)  # an option of one example is in its runs alone
    (finished / "run.json").write_text(json.dumps(made_with))
    state_dict = example.Trainer.state_dict

    def earlier_state(trainer: Any) -> dict[str, Any]:
        state = dict(state_dict(trainer))
        return {**state, "identity": made_with}

    with monkeypatch.context() as patched:
        patched.setattr(example.Trainer, "state_dict", earlier_state)
        again = arguments(example, ratings, finished, "--resume", "--steps", "28")
        assert example.main(again) == 0
    assert example.main([*again, "--schedule", "constant"]) == 1
    message = "was made with schedule = 'cosine', this run has 'constant'"
    assert message in capsys.readouterr().err
    assert example.main(arguments(example, ratings, finished, "--resume", "--steps", "30")) == 0
    assert "Continuing after step 28 of 30" in capsys.readouterr().out


@pytest.mark.slow
def test_epochs_are_raised(ratings: Path, tmp_path: Path) -> None:
    run = arguments(train_ranking, ratings, tmp_path / "run", "--no-baselines")
    place = run.index("--steps")
    del run[place : place + 2]
    assert train_ranking.main([*run, "--epochs", "1"]) == 0
    steps = len(json.loads((tmp_path / "run" / "history.json").read_text())["losses"])
    assert train_ranking.main([*run, "--epochs", "2", "--resume"]) == 0
    losses = json.loads((tmp_path / "run" / "history.json").read_text())["losses"]
    assert len(losses) == 2 * steps


# --- baselines ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_baselines_show_a_total_and_can_be_left_out(
    example: ModuleType, ratings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    run = arguments(example, ratings, out, "--cache-dir", str(tmp_path / "cache"))
    assert example.main([*run, "--no-baselines"]) == 0
    assert "baselines" not in capsys.readouterr().err
    (name,) = json.loads((out / "metrics.json").read_text())
    assert name == "HSTU"
    losses = json.loads((out / "history.json").read_text())["losses"]

    # The same run computes the baselines later, once.
    total = EVALUATIONS[example.__name__]
    assert example.main([*run, "--resume"]) == 0
    assert f"{total}/{total} [" in capsys.readouterr().err
    rows = json.loads((out / "metrics.json").read_text())
    assert len(rows) >= 3
    for more in ((), ("--no-baselines",)):
        assert example.main([*run, "--resume", *more]) == 0
        assert "baselines: " not in capsys.readouterr().err
        assert json.loads((out / "metrics.json").read_text()) == rows
    # They do not change the training.
    whole = arguments(example, ratings, tmp_path / "whole")
    assert example.main(whole) == 0
    assert json.loads((tmp_path / "whole" / "history.json").read_text())["losses"] == losses
