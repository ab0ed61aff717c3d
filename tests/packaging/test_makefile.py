"""Tests that plain `make` only lists the targets, and of the commands of GPU targets."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT


def test_make_alone_prints_every_target_and_makes_nothing(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    result = subprocess.run(["make"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["Makefile"]
    phony = re.search(r"^\.PHONY:((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    targets = set(phony[1].replace("\\", " ").split()) - {"help"}
    assert {"demo", "test", "wheel"} <= targets
    assert set(re.findall(r"\bmake ([a-z][a-z-]*)  ", result.stdout)) == targets
    assert "#" not in result.stdout
    assert "PYTHON ?=" not in result.stdout


# Stands for the Python of the environment: each call takes the next exit status of STATUSES.
PYTHON = """\
#!/bin/sh
echo "$@" >> "$CALLS"
exit $(echo $STATUSES | cut -d, -f $(wc -l < "$CALLS"))
"""


def make(tmp_path: Path, target: str, statuses: str, *options: str) -> tuple[int, list[str]]:
    """Returns the exit status of a target, and the arguments of its calls of Python."""
    venv, calls = tmp_path / "venv", tmp_path / "calls"
    (venv / "bin").mkdir(parents=True, exist_ok=True)
    (venv / "bin/python").write_text(PYTHON)
    (venv / "bin/python").chmod(0o755)
    calls.unlink(missing_ok=True)
    inherited = {name: text for name, text in os.environ.items() if "MAKE" not in name}
    inherited.pop("WORKERS", None)
    ended = subprocess.run(
        ["make", target, "--old-file", f"{venv}/.built", f"VENV={venv}", *options],
        cwd=ROOT,
        env={**inherited, "STATUSES": statuses, "CALLS": str(calls)},
        capture_output=True,
        text=True,
    )
    return ended.returncode, calls.read_text().splitlines()


@pytest.mark.parametrize("installed", [False, True])
def test_a_redis_server_is_installed_where_there_is_none(tmp_path, installed):
    programs, calls = tmp_path / "programs", tmp_path / "calls"
    programs.mkdir()
    for name in ("find", "id", "make"):
        (programs / name).symlink_to(shutil.which(name))
    for name in ("apt-get", "sudo", *(["redis-server"] if installed else [])):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {calls}\n')
        (programs / name).chmod(0o755)
    command = ["make", "ci-packages", "SUDO="]
    subprocess.run(command, cwd=ROOT, env={"PATH": str(programs)}, check=True, capture_output=True)
    expected = ["apt-get -qq update", "apt-get -qq install --yes redis-server"]
    assert (calls.read_text().splitlines() if calls.exists() else []) == (
        [] if installed else expected
    )


@pytest.mark.parametrize(
    ("statuses", "expected"), [("0,0", 0), ("0,5", 0), ("5,0", 0), ("1,0", 2), ("0,1", 2)]
)
def test_gpu_tests_that_need_much_memory_run_afterwards(tmp_path, statuses, expected):
    status, calls = make(tmp_path, "test-gpu", statuses, "PYTEST_ARGS=-k causal")
    assert status == expected
    parallel, alone = calls  # both, whatever the first one's status
    assert "-m gpu and not gpu_memory --numprocesses 8" in parallel
    assert "-m gpu and gpu_memory --numprocesses 1" in alone
    assert all(call.endswith("-k causal") for call in calls)


def test_workers_may_be_chosen(tmp_path):
    _, calls = make(tmp_path, "test-gpu", "0,0", "WORKERS=3")
    assert "--numprocesses 3" in calls[0]


def test_the_status_of_sanitizers_is_that_of_make(tmp_path):
    for statuses, expected in (("0", 0), ("1", 2)):
        status, (call,) = make(tmp_path, "sanitize-cuda", statuses, "SANITIZERS=memcheck initcheck")
        assert status == expected
        assert call.startswith("-m tools.sanitize_cuda memcheck initcheck ")
