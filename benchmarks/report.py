"""Records of results, the machine they come from, and tables of text."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import hstu_attn

from .cases import Case

__all__ = [
    "RESULTS",
    "ROOT",
    "Result",
    "cpu_features",
    "cpu_name",
    "environment",
    "gpu_software",
    "print_environment",
    "read_results",
    "rounded",
    "software",
    "text_table",
    "write_records",
    "write_results",
]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"

# Instruction sets that make a difference to the kernels, by their names in /proc/cpuinfo.
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")


@dataclass(frozen=True)
class Result:
    """One implementation of one pass of one case."""

    case: str
    batch: int
    shortest: int
    longest: int
    heads: int
    head_dim: int
    dtype: str
    direction: str  # "forward" or "backward"
    impl: str
    ms: float | None  # median of the rounds; None where it was not measured
    fastest_ms: float | None
    rounds: int
    gflops: float | None
    peak_mib: float | None
    skipped: str = ""  # why it was not measured

    @classmethod
    def of(
        cls,
        case: Case,
        direction: str,
        impl: str,
        *,
        ms: Sequence[float] = (),
        peak_mib: float | None = None,
        skipped: str = "",
    ) -> Result:
        """The result for the milliseconds of each round."""
        ordered = sorted(ms)
        median = ordered[len(ordered) // 2] if ordered else None
        return cls(
            case=case.name,
            batch=case.batch,
            shortest=case.shortest,
            longest=case.longest,
            heads=case.heads,
            head_dim=case.head_dim,
            dtype=case.dtype_name,
            direction=direction,
            impl=impl,
            ms=rounded(median),
            fastest_ms=rounded(ordered[0] if ordered else None),
            rounds=len(ordered),
            gflops=rounded(median and case.flops(direction == "backward") / median / 1e6),
            peak_mib=rounded(peak_mib),
            skipped=skipped,
        )


def rounded(x: float | None) -> float | None:
    """With four significant digits."""
    return None if x is None else float(f"{x:.4g}")


# ---------------------------------------------------------------------------------------------
# Where results come from
# ---------------------------------------------------------------------------------------------


def _cpuinfo(key: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    found = re.search(rf"^{key}\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def cpu_name() -> str:
    """The processor's name as the system has it."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_features() -> list[str]:
    """The instruction sets of the processor that kernels choose by."""
    flags = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return [feature for feature in _FEATURES if feature in flags]


def _commit() -> str:
    """The commit measured; with "+" where the sources differ from it.

    A tree without a repository is told its commit by HSTU_ATTN_COMMIT.
    """
    if told := os.environ.get("HSTU_ATTN_COMMIT"):
        return told
    sources = ["csrc", "hstu_attn", "benchmarks/*.py", "setup.py"]
    try:
        commit = _git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--", *sources) else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def environment(command: str) -> dict[str, Any]:
    """What every record says about the machine and the software."""
    return {
        "cpu": cpu_name(),
        "features": cpu_features(),
        "threads": torch.get_num_threads(),
        **software(command),
    }


def software(command: str, commit: str | None = None) -> dict[str, Any]:
    """What every record says about the software, and when it was measured."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit or _commit(),
        "hstu_attn": hstu_attn.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": command,
    }


def gpu_software(gpu: str, command: str, commit: str | None = None) -> dict[str, Any]:
    """The same beside the name of a GPU, with what its kernels are compiled by."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {"gpu": gpu, **software(command, commit), "cuda": torch.version.cuda, "triton": triton}


def print_environment(environment: dict[str, Any]) -> None:
    """Two lines about it."""
    print(
        f"hstu_attn {environment['hstu_attn']} ({environment['commit']}), "
        f"torch {environment['torch']}, Python {environment['python']}\n"
        f"{environment['cpu']} ({' '.join(environment['features'])}), "
        f"{environment['threads']} threads"
    )


# ---------------------------------------------------------------------------------------------
# Files and tables
# ---------------------------------------------------------------------------------------------


def write_results(path: Path, environment: dict[str, Any], results: Sequence[Result]) -> None:
    """Flat records: the environment's fields, then the result's."""
    write_records(path, [{**environment, **_json_names(asdict(result))} for result in results])


def write_records(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """A JSON list with one record a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")


def _json_names(record: dict[str, Any]) -> dict[str, Any]:
    return {("pass" if name == "direction" else name): value for name, value in record.items()}


def read_results(path: Path) -> list[dict[str, Any]]:
    """What `write_records` wrote."""
    records: list[dict[str, Any]] = json.loads(path.read_text())
    return records


def text_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with each column as wide as its widest cell; the first one flush left, others right."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if n else cell.ljust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
