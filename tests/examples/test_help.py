"""Tests of the help of every example and benchmark: it does not import torch, and the program
accepts the commands in it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

pytestmark = pytest.mark.documented

# These take long to import; hstu_attn imports torch.
HEAVY = {"hstu_attn", "matplotlib", "numpy", "tensorboard", "torch", "triton", "uvicorn"}


def programs() -> list[str]:
    """Returns the programs as they are called: a path, or "-m" and a module."""
    found = []
    for directory in ("examples", "benchmarks"):
        for path in sorted((ROOT / directory).glob("*.py")):
            if '__name__ == "__main__"' in path.read_text():
                name = f"{directory}/{path.name}"
                found.append(name if directory == "examples" else f"-m {directory}.{path.stem}")
    return found


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program; the standard error also lists the imported modules."""
    return subprocess.run(
        [sys.executable, "-X", "importtime", *program.split(), *arguments],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "100", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def imported(result: subprocess.CompletedProcess[str]) -> set[str]:
    """Returns the packages that a program imported."""
    names = re.findall(r"^import time:.*\| +(\S+)$", result.stderr, re.MULTILINE)
    assert "argparse" in names
    return {name.split(".")[0] for name in names}


def test_there_are_programs() -> None:
    assert {"examples/train_retrieval.py", "-m benchmarks.cpu"} <= set(programs())


@pytest.mark.slow
@pytest.mark.parametrize("program", programs())
def test_help_comes_at_once_with_examples(program: str) -> None:
    result = run(program, "--help")
    assert result.returncode == 0, result.stderr
    assert not imported(result) & HEAVY
    # A command may continue on the next line.
    text = result.stdout.replace("\\\n", " ")
    usage = set(re.findall(r"--[a-z][a-z-]*", text.split("\n\n")[0]))
    commands = re.findall(rf"^ +(?:python|torchrun) .*{re.escape(program)}.*$", text, re.MULTILINE)
    assert commands
    for command in commands:
        words = shlex.split(command, comments=True)
        last = program.split()[-1]
        given = words[words.index(last) + 1 :]
        given = given[: [*given, "--"].index("--")]  # options after "--" are of another program
        # The parser reads the values before it reads --help, and the usage lists the options.
        tried = run(program, *given, "--help")
        assert tried.returncode == 0, tried.stderr
        assert {word for word in given if word.startswith("--")} <= usage


@pytest.mark.slow
@pytest.mark.parametrize("program", programs())
def test_a_wrong_option_is_said_at_once(program: str) -> None:
    result = run(program, "--no-such-option")
    assert result.returncode == 2
    assert "error: " in result.stderr
    assert not imported(result) & HEAVY


def test_help_has_the_groups_of_the_benchmark_of_attention() -> None:
    from benchmarks.cases import GROUPS

    text = " ".join(run("-m benchmarks.attention", "--help").stdout.split())
    assert f"groups ({', '.join(GROUPS)})" in text
