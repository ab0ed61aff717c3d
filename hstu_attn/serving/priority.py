"""The priority of a process, by which the system divides its processors."""

from __future__ import annotations

import os

__all__ = ["take_priority"]


def take_priority(process: int) -> None:
    """Gives each thread of this process the niceness of another process, on Linux.

    The niceness belongs to a thread there, which passes it on to threads that it starts.

    Args:
        process: its id.

    Raises:
        PermissionError: the niceness is lower, and this process may not lower its own. That needs
            the capability CAP_SYS_NICE or a limit RLIMIT_NICE of 20 less the niceness.
    """
    wanted = os.getpriority(os.PRIO_PROCESS, process)

    def has_changed(thread: int) -> bool:
        try:
            if os.getpriority(os.PRIO_PROCESS, thread) == wanted:
                return False
            os.setpriority(os.PRIO_PROCESS, thread, wanted)
        except ProcessLookupError:  # it has ended
            return False
        return True

    # A thread that still had the old niceness may have started another one meanwhile.
    while any(has_changed(int(thread)) for thread in os.listdir("/proc/self/task")):
        pass
