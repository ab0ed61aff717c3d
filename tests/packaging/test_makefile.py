"""Tests that `make` alone lists the targets and starts nothing."""

from __future__ import annotations

import re
import shutil
import subprocess

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
