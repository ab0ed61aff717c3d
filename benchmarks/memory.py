"""Peak memory of a call, from the resident set of a process of its own.

The process runs the call twice. Before the second time it resets the kernel's record of its
largest resident set (`/proc/self/clear_refs`), and afterwards reads how far that went beyond what
was resident before. So everything counts that the call holds at once: its outputs, what it saves
for the backward, and scratch that no allocator hook of torch would see; inputs, masks, libraries
and threads do not. glibc is told to map each block of 64 KiB or more by itself, so that what has
been freed is neither resident nor used again unseen.

    python -m benchmarks.memory 4

The process, which :class:`MemoryProbe` starts, says when it is ready, then reads cases from its
standard input and answers each with a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("threads", type=int, help="of the kernels")
    return parser


if __name__ == "__main__":
    _parser().parse_args()  # --help or a wrong option ends here, before torch is imported

import torch

from .baselines import plain_torch
from .cases import Case, Inputs

__all__ = ["MemoryProbe", "peak_growth"]

_ROOT = Path(__file__).resolve().parents[1]
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
_RESET_PEAK = "5"  # proc(5), /proc/pid/clear_refs


def _status_kib(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
    assert found, field
    return int(found[1])


def peak_growth(call: Callable[[], object]) -> float:
    """MiB by which the resident set grows at most while `call` runs, its result included.

    Raises:
        OSError: where the system does not keep such a record.
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

        def forward(attention: plain_torch.Attention = attention) -> torch.Tensor:
            with torch.no_grad():
                return attention(inputs.q, inputs.k, inputs.v)

        def backward(attention: plain_torch.Attention = attention) -> tuple[torch.Tensor, ...]:
            leaves = inputs.leaves()
            out = attention(*leaves)
            return (out, *torch.autograd.grad(out, leaves, inputs.dout))

        found[name] = {"forward": peak_growth(forward), "backward": peak_growth(backward)}
    return found


class MemoryProbe:
    """The process that measures; a context manager."""

    def __init__(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.memory", str(torch.get_num_threads())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
            env={**os.environ, **_MALLOC},
        )
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._requests, self._answers = process, process.stdin, process.stdout
        self._answers.readline()  # it has started, and no longer disturbs what is timed here

    def peak_mib(self, case: Case, names: Sequence[str]) -> dict[str, dict[str, float]] | None:
        """MiB by implementation and direction; None where the system does not tell.

        "forward" is a call without gradients, "backward" a call that records them and its backward.
        """
        request = {"case": {**asdict(case), "dtype": case.dtype_name}, "names": list(names)}
        try:
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
            answer = self._answers.readline()
        except BrokenPipeError:
            return None
        found: dict[str, dict[str, float]] | None = json.loads(answer) if answer else None
        return found

    def __enter__(self) -> MemoryProbe:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._requests.close()
        self._process.wait()
        self._answers.close()


def _main() -> None:
    torch.set_num_threads(_parser().parse_args().threads)
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        fields = request["case"]
        case = Case(**{**fields, "dtype": getattr(torch, fields["dtype"])})
        try:
            answer: dict[str, dict[str, float]] | None = _measure(case, request["names"])
        except OSError as error:
            print(f"memory: not measured ({error})", file=sys.stderr)
            answer = None
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main()
