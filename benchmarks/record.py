"""Records: the result of a measurement, with the machine, the date and the command.

A record is a flat dict: the `benchmark` that made it, its origin (`origin`), its case and
implementation (`case`, `impl`, `pass` and the sizes), and the figures. `error` is the reason of a
failure. A file is a JSON list with one record in each line.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import hstu_attn

__all__ = [
    "BASELINES",
    "RESULTS",
    "ROOT",
    "Record",
    "commit_of",
    "origin",
    "read_records",
    "rounded",
    "write_records",
]

Record = dict[str, Any]
BASELINES = ("dense_bias", "triton", "flash2", "cudnn")

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"

# Instruction sets that the kernels use, by their names in /proc/cpuinfo.
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
_SOURCES = ("csrc", "hstu_attn", "benchmarks/*.py", "setup.py")


def rounded(x: float | None) -> float | None:
    """Rounds to four significant digits."""
    return None if x is None else float(f"{x:.4g}")


def _cpuinfo(key: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    found = re.search(rf"^{key}\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def _triton_version() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def commit_of(root: Path = ROOT) -> str:
    """Returns the commit of a checkout, with "+" if its sources have changed, or "unknown".

    `HSTU_ATTN_COMMIT` names the commit of this tree where the tree is not a repository.
    """
    if root == ROOT and (commit := os.environ.get("HSTU_ATTN_COMMIT")):
        return commit

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if git("status", "--porcelain", "--", *_SOURCES) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def origin(command: str, commit: str | None = None, gpu: str | None = None) -> Record:
    """Returns the fields of every record that describe the machine, the software and the run.

    Args:
        command: the command line.
        commit: the commit of this tree; None to ask the repository.
        gpu: the GPU's name; None for a CPU benchmark.
    """
    flags = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return {
        "cpu": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "features": [feature for feature in _FEATURES if feature in flags],
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "cuda": torch.version.cuda,
        "triton": _triton_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit or commit_of(),
        "hstu_attn": hstu_attn.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": command,
    }


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Writes a JSON list with one record in each line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")


def read_records(path: Path) -> list[Record]:
    """Reads what `write_records` wrote."""
    records: list[Record] = json.loads(path.read_text())
    return records
