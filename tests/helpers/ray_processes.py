"""The processes of Ray below that of the tests."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def processes_of_ray(name: str) -> list[int]:
    """Returns the processes of the actors whose class begins with a name."""
    parents, found = {}, []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            pid, words = int(folder.name), (folder / "cmdline").read_bytes()
            parents[pid] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if words.startswith(f"ray::{name}".encode()):
                found.append(pid)

    def is_below(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return [pid for pid in found if is_below(pid)]
