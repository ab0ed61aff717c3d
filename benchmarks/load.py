"""What the machine is doing beside what is timed: other work, and clearing memory."""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CpuUse", "keep_freed_memory"]

_STAT = Path("/proc/stat")
_TICK = 1 / os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)  # proc(5): user, nice, system, idle, iowait, irq, softirq, steal, ...
_COUNTED = 8  # the columns after steal are contained in the first two
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h of glibc
_INT_MAX = 2**31 - 1


def keep_freed_memory() -> None:
    """Has malloc hand out again what was freed, instead of fresh pages, as tuned allocators do.

    Else large tensors are mapped anew by every call, and what is timed is how fast the system
    clears their pages, which varies on virtual machines whose hosts take free memory back. Does
    nothing where malloc is not glibc's.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, _INT_MAX)


@dataclass(frozen=True)
class CpuUse:
    """Counters at one moment, in seconds."""

    wall: float
    machine: float  # CPU time of all processes, the hypervisor's other guests included
    own: float  # CPU time of this process

    @classmethod
    def now(cls) -> CpuUse:
        """The counters of Linux; elsewhere the machine's is 0, as if nothing else ran."""
        machine = 0.0
        if _STAT.exists():
            columns = _STAT.read_text().split("\n", 1)[0].split()[1 : 1 + _COUNTED]
            ticks = [int(x) for n, x in enumerate(columns) if n not in _IDLE]
            machine = sum(ticks) * _TICK
        return cls(time.perf_counter(), machine, time.process_time())

    def others_since(self) -> float:
        """How many processors all other processes have kept busy since then, on average.

        The system counts in steps of a hundredth of a second; two of them are not held against
        anyone.
        """
        now = CpuUse.now()
        others = (now.machine - self.machine) - (now.own - self.own) - 2 * _TICK
        return max(0.0, others) / max(now.wall - self.wall, _TICK)
