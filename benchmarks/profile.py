"""Profiles: the kernels that a GPU ran, from a Chrome trace of torch's profiler."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

__all__ = ["Event", "busy_ms", "kernels_of", "on_gpu", "profile", "short_name"]

Event = dict[str, Any]  # of a Chrome trace
ON_GPU = ("kernel", "gpu_memset", "gpu_memcpy")
SPIN = "spin_kernel"  # before each call, by Gpu.milliseconds


def profile(rounds: int, call: Callable[[], Any], trace: Path | None, name: str) -> list[Event]:
    """Profiles `rounds` calls; returns the events that have a duration.

    Args:
        rounds: the number of calls.
        call: the call to profile.
        trace: the value of `--trace`; a Chrome trace is stored next to it.
        name: the suffix of the trace file's stem.
    """
    with torch.profiler.profile() as profiler:
        for _ in range(rounds):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = trace or Path(folder, "trace.json")
        path = path.with_stem(f"{path.stem}-{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        events: list[Event] = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def _operator_id(event: Event) -> int:
    """Returns the id of an operator, or of the operator that launched a kernel; 0 for none."""
    number: int = event.get("args", {}).get("External id", 0)
    return number


def kernels_of(function: str, events: Sequence[Event]) -> list[Event]:
    """Returns the GPU's events that the calls of an autograd function, or its backward, launched.

    Raises:
        RuntimeError: if there was no call, or a call launched nothing.
    """
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    launched: dict[int, list[Event]] = {}  # by the operator that launched them
    for event in events:
        if event.get("cat") in ON_GPU and (operator := _operator_id(event)):
            launched.setdefault(operator, []).append(event)

    def kernels_of_call(call: Event) -> list[Event]:
        start, end = call["ts"], call["ts"] + call["dur"]
        inside = [x for x in operators if x["tid"] == call["tid"] and start <= x["ts"] < end]
        return [kernel for x in inside for kernel in launched.get(_operator_id(x), [])]

    found = [kernels_of_call(event) for event in operators if event["name"] == function]
    if not found or not all(found):
        raise RuntimeError(
            f"profile: expected kernels of every call of {function}, got those of "
            f"{sum(map(bool, found))} of {len(found)} calls"
        )
    return [kernel for kernels in found for kernel in kernels]


def busy_ms(kernels: Sequence[Event]) -> float:
    """Returns the milliseconds in which at least one of the events ran."""
    total = until = 0.0
    for kernel in sorted(kernels, key=itemgetter("ts")):
        start, end = kernel["ts"], kernel["ts"] + kernel["dur"]
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total / 1e3


def on_gpu(events: Sequence[Event]) -> list[Event]:
    """Returns the kernels, copies and fills among events, without the spin kernels."""
    return [x for x in events if x.get("cat") in ON_GPU and SPIN not in x["name"]]


def short_name(kernel: str) -> str:
    """Returns the name of a kernel without arguments, return type and anonymous namespaces."""
    name = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split("[<(]", name)[0].strip()
