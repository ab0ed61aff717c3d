"""Peak memory of a call, from the resident set of a separate process.

The process runs the call twice. Before the second time it resets the kernel's record of its
largest resident set (`/proc/self/clear_refs`), and afterwards compares that record with the
resident set before the call. So the peak includes all memory that the call holds at once: outputs,
tensors saved for the backward, and scratch that no allocator hook of torch would see. It excludes
inputs, masks, libraries and threads. glibc maps each block of 64 KiB or more separately, so that
freed memory is not resident, and every reuse of it counts.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from .baselines import plain_torch
from .cases import Case, Inputs
from .record import ROOT

__all__ = ["answer", "peak_growth", "peak_mib"]

_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_RESET_PEAK = "5"  # proc(5), /proc/pid/clear_refs


def _status_kib(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    assert found, field
    return int(found[1])


def peak_growth(call: Callable[[], object]) -> float:
    """Returns the growth of the peak resident set during `call` in MiB, including its result.

    Raises:
        OSError: if the system does not record the peak.
    """
    call()
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    before = _status_kib("VmRSS")
    result = call()
    peak = _status_kib("VmHWM")
    del result
    return max(0, peak - before) / 1024


def _measure(case: Case, names: Sequence[str]) -> dict[str, dict[str, float]]:
    inputs = Inputs.random(case, seed=0)
    found = {}
    for name in names:
        attention = plain_torch.make(name, case)
        forward = partial(torch.no_grad()(attention), *inputs.leaves())
        both = partial(plain_torch.gradients, attention, inputs)
        found[name] = {"forward": peak_growth(forward), "backward": peak_growth(both)}
    return found


def peak_mib(case: Case, names: Sequence[str]) -> dict[str, dict[str, float]] | None:
    """Returns MiB by implementation and pass; None if the system does not report it.

    "forward" is a call without gradients, "backward" a call that records them and its backward.
    """
    request = {
        "case": {**asdict(case), "dtype": case.dtype_name},
        "names": list(names),
        "threads": torch.get_num_threads(),
    }
    program = "from benchmarks.memory import answer; answer()"
    ended = subprocess.run(
        [sys.executable, "-c", program, json.dumps(request)],
        cwd=ROOT,
        env={**os.environ, **_MALLOC},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, dict[str, float]] | None = json.loads(ended.stdout)
    return found


def answer() -> None:
    """Is the main program of the separate process: prints the result of `peak_mib` as JSON."""
    request = json.loads(sys.argv[1])
    torch.set_num_threads(request["threads"])
    case = Case(**{**request["case"], "dtype": getattr(torch, request["case"]["dtype"])})
    found = None
    try:
        found = _measure(case, request["names"])
    except OSError as error:
        print(f"memory: not measured ({error})", file=sys.stderr)
    print(json.dumps(found))
