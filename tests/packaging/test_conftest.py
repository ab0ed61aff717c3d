"""Tests of the suite's own hooks: printing failures at once, and waiting for GPU memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import conftest
from tests.helpers import devices, failures_at_once
from tests.helpers.devices import why_no_memory
from tests.helpers.paths import ROOT

# The second test ends when the first one's failure has been read, or fails after a while.
TESTS = """\
import pathlib, time

def test_first():
    raise AssertionError("said at once")

def test_second():
    limit = time.monotonic() + 60
    while not pathlib.Path("was-read").exists():
        assert time.monotonic() < limit, "the failure was not printed"
        time.sleep(0.05)
"""


@pytest.mark.slow
def test_failures_of_workers_are_printed_at_once(tmp_path: Path) -> None:
    (tmp_path / "test_order.py").write_text(TESTS)
    assert conftest.pytest_sessionstart is failures_at_once.pytest_sessionstart
    plugin = failures_at_once.__name__
    command = [sys.executable, "-m", "pytest", "-p", plugin, "-n", "1", "test_order.py"]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "xdist.plugin",
    }
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        printed = ""
        for line in run.stdout:
            printed += line
            if "AssertionError: said at once" in line:
                (tmp_path / "was-read").touch()
    assert "___ test_order.py::test_first (call) ___" in printed
    assert "1 failed, 1 passed" in printed


def test_tests_wait_for_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_release_gpu_memory", lambda: None)  # the next test's
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (40 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert why_no_memory(40) is None
    assert why_no_memory(61) == "needs 61 GiB free, cuda:1 has 40.0 GiB"


def test_a_failure_that_pytest_keeps_holds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [0]

    class Held:
        def __del__(self) -> None:
            free[0] = 2**30

    def fail() -> None:
        held = Held()
        raise RuntimeError(held)

    with pytest.raises(RuntimeError) as caught:
        fail()
    monkeypatch.setattr(gc, "unfreeze", lambda: None)  # avoids a slow collection of older objects
    sys.last_value = caught.value  # as pytest does
    del caught
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free[0], 2**30))
    assert why_no_memory(1) is None
