"""Finds the code and commands in README.md, CONTRIBUTING.md and docs/, and runs commands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from hstu_attn import HSTULayerConfig
from tests.helpers.paths import ROOT

DOCS = sorted((ROOT / "docs").rglob("*.md"))
TEXTS = [*ROOT.glob("*.md"), ROOT / "third_party/README.md", *DOCS]
# Pages with complete programs; docs/distributed.md has only the outline of one.
COMPLETE = [page for page in TEXTS if page.name != "distributed.md"]


def found_in(pages: list[Path], pattern: str) -> dict[str, tuple[Path, str]]:
    """Returns each different match of a pattern with the first page that has it."""
    found: dict[str, tuple[Path, str]] = {}
    for page in pages:
        for match in re.findall(pattern, page.read_text(), re.MULTILINE | re.DOTALL):
            found.setdefault(match, (page, match))
    return found


SHELL = list(found_in(COMPLETE, r"^```sh\n(.*?)^```$").values())


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process that finds this tree's package."""
    variables = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    ended = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


def make_checkout(path: Path) -> Path:
    """Copies this tree as it is after `make install`; .venv is this process's environment."""
    for name in ("Makefile", "benchmarks", "csrc", "examples", "hstu_attn"):
        (path / name).symlink_to(ROOT / name)
    programs = path / ".venv/bin"
    programs.mkdir(parents=True)
    python = programs / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    (programs / "activate").write_text(f'PATH={shlex.quote(str(programs))}:"$PATH"\n')
    return path


def save_some_model(path: Path, items: list[int]) -> None:
    """Saves an untrained model for these items, as train_retrieval.py saves its best model."""
    from recommender.model import RetrievalModel
    from recommender.saved import save_model

    config = HSTULayerConfig.research(
        embedding_dim=32, num_heads=2, linear_dim=16, attention_dim=16, max_sequence_len=30
    )
    path.parent.mkdir(parents=True)
    model = RetrievalModel(len(items), config, 2, 30, 0.2)
    save_model(path, model, items, [f"item {item}" for item in items])
