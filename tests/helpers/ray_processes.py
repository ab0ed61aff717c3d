"""Finds Ray's processes among the descendants of the test process."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def processes_below(pid: int) -> dict[int, str]:
    """Returns the ids of a process's descendants, with their command lines from /proc."""
    parents, commands = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            stat = (folder / "stat").read_text()
            parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_bytes().split(b"\0")
            commands[int(folder.name)] = b" ".join(words).decode(errors="replace")

    def is_below(one: int) -> bool:
        while one in parents and one != pid:
            one = parents[one]
        return one == pid

    return {one: command for one, command in commands.items() if one != pid and is_below(one)}


def processes_of_ray(name: str) -> list[int]:
    """Returns the process ids of the actors whose class name begins with `name`.

    Memory holders are left out; they have the same command line as their replica.
    """

    def is_holder(pid: int) -> bool:
        with suppress(OSError):  # it has ended
            return Path(f"/proc/{pid}/comm").read_text() == "memory-holder\n"
        return True

    below = processes_below(os.getpid())
    found = [pid for pid, command in below.items() if command.startswith(f"ray::{name}")]
    return [pid for pid in found if not is_holder(pid)]
