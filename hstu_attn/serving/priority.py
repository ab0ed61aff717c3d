"""The scheduling priority (niceness) of a process."""

from __future__ import annotations

import os

__all__ = ["take_priority"]


def take_priority(process: int) -> None:
    """Gives each thread of this process the niceness of another process, on Linux.

    On Linux each thread has its own niceness, and threads that it starts inherit it.

    Args:
        process: the id of the other process.

    Raises:
        PermissionError: this process may not lower its niceness to that of the other process.
            Lowering it needs CAP_SYS_NICE or an RLIMIT_NICE of at least 20 minus the niceness.
    """
    wanted = os.getpriority(os.PRIO_PROCESS, process)

    def has_changed(thread: int) -> bool:
        try:
            if os.getpriority(os.PRIO_PROCESS, thread) == wanted:
                return False
            os.setpriority(os.PRIO_PROCESS, thread, wanted)
        except ProcessLookupError:  # the thread has ended
            return False
        return True

    # A thread that still had the old niceness may have started another one meanwhile.
    while any(has_changed(int(thread)) for thread in os.listdir("/proc/self/task")):
        pass
