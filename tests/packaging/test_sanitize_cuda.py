"""Tests of running tests under compute-sanitizer, with a fake program in its place."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tools.sanitize_cuda import Job, deal

# Runs the tests, writes down its own arguments, and reports errors of the tool BAD_TOOL.
SANITIZER = f"""\
#!{sys.executable}
import os, subprocess, sys
tool, program = sys.argv[2], sys.argv.index({sys.executable!r})
status = subprocess.call(sys.argv[program:])
with open(os.environ["CALLS"], "a") as file:
    print(tool, *sys.argv[3:program], sep=" ", file=file)
errors = 2 if tool == os.environ.get("BAD_TOOL") else 0
if tool == "racecheck":
    print(f"=== RACECHECK SUMMARY: {{errors}} hazards displayed ({{errors}} errors, 0 warnings)")
else:
    print(f"=== ERROR SUMMARY: {{errors}} errors")
    if errors > 1:
        print(f"=== ERROR SUMMARY: {{errors - 1}} errors were not printed.")
sys.exit(86 if errors else status)
"""
TESTS = """\
import os
import pytest
arch = pytest.mark.parametrize("arch", ["sm90", "sm80"])
@pytest.mark.gpu
@pytest.mark.sanitize
@arch
@pytest.mark.parametrize("number", range(3))
def test_kernel(number, arch):
    assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
    with open(os.environ["RAN"], "a") as file:
        print(os.environ["SANITIZER_TOOL"], os.path.basename(os.getcwd()), arch, number, file=file)
    assert f"{os.environ['SANITIZER_TOOL']} {number}" != os.environ.get("BAD_TEST"), "wrong"
@pytest.mark.gpu
def test_that_is_left_out():
    raise AssertionError
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("plain", "plain/race"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test_kernels.py").write_text(TESTS)
        (tmp_path / name / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n  sanitize\n")
    program = tmp_path / "sanitizer"
    program.write_text(SANITIZER)
    program.chmod(0o755)
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # for a faster start of pytest
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    return tmp_path


def sanitize(tree: Path, *tools: str, **variables: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "tools.sanitize_cuda", *tools, "--workers", "4"]
    command += ["--sanitizer", str(tree / "sanitizer"), "--racecheck-tree", "race"]
    ended = subprocess.run(
        [*command, "--", "test_kernels.py"],
        cwd=tree / "plain",
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert not ended.stderr
    return ended.returncode, ended.stdout


@pytest.mark.slow
def test_each_test_runs_once_under_each_tool(tree: Path) -> None:
    status, printed = sanitize(tree, "memcheck", "initcheck", "racecheck")
    assert status == 0
    for tool in ("memcheck", "initcheck", "racecheck"):
        assert f"\n{tool}: 6 passed, 0 failed, 0 skipped, 0 errors of the tool: good\n" in printed
    ran = sorted((tree / "ran").read_text().splitlines())
    assert ran == sorted(
        f"{tool} {'race' if tool == 'racecheck' else 'plain'} {arch} {number}"
        for tool in ("memcheck", "initcheck", "racecheck")
        for arch in ("sm90", "sm80")
        for number in range(3)
    )
    for call in (tree / "calls").read_text().splitlines():
        only_ours = "--kernel-name kernel_substring=hstu" in call
        assert only_ours == (not call.startswith("initcheck"))


@pytest.mark.slow
def test_errors_and_failures_are_said(tree: Path) -> None:
    tools = ["memcheck", "synccheck", "racecheck"]
    status, printed = sanitize(tree, *tools, BAD_TOOL="synccheck", BAD_TEST="racecheck 1")
    assert status == 1
    assert "\nmemcheck: 6 passed, 0 failed, 0 skipped, 0 errors of the tool: good\n" in printed
    assert "\nsynccheck: 6 passed, 0 failed, 0 skipped, 2 errors of the tool: BAD\n" in printed
    assert "\nracecheck: 4 passed, 2 failed, 0 skipped, 0 errors of the tool: BAD\n" in printed
    assert "exit status 86" in printed
    assert "AssertionError: wrong" in printed


@pytest.mark.slow
def test_a_process_that_dies_is_an_error(tree: Path) -> None:
    (tree / "sanitizer").write_text("#!/bin/sh\nexit 0\n")
    status, printed = sanitize(tree, "memcheck")
    assert status == 1
    assert "\nmemcheck: 0 passed, 0 failed, 0 skipped, 0 errors of the tool: BAD\n" in printed


def test_slower_tools_get_more_processes() -> None:
    tests = [f"test_x.py::test[{n}-{arch}]" for n in range(20) for arch in ("sm80", "sm90")]
    tools = ["memcheck", "racecheck", "initcheck", "synccheck"]
    jobs = deal(tools, tests, Path("race"), workers=8)
    assert len(jobs) == 8
    processes = Counter(job.tool for job in jobs)
    assert processes["racecheck"] > processes["memcheck"] > processes["synccheck"] == 1
    for tool in tools:
        dealt = [test for job in jobs if job.tool == tool for test in job.tests]
        assert sorted(dealt) == sorted(tests)
    assert len(deal(tools, tests, Path("race"), workers=1)) == 4
    few = tests[1:3]
    assert Job("racecheck", Path("race"), few[:1]) in deal(["racecheck"], few, Path("race"), 8)
