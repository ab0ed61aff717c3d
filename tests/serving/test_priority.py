"""Tests of giving a process the priority of another process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

# Prints the niceness of the process's threads before and after, and of one that starts afterwards.
_PROGRAM = """
import os, sys, threading
os.nice(5)  # also that of the threads that the next line starts
from hstu_attn.serving.priority import take_priority

def niceness():
    threads = map(int, os.listdir("/proc/self/task"))
    return {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads}

end = threading.Event()
threading.Thread(target=end.wait).start()
print(*niceness())
if len(sys.argv) > 1:
    os.setuid(int(sys.argv[1]))
try:
    take_priority(os.getppid())
except PermissionError:
    print("refused")
threading.Thread(target=end.wait).start()
print(*niceness())
end.set()
"""


def _run(*arguments: str) -> list[str]:
    command = [sys.executable, "-c", _PROGRAM, *arguments]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=60
    ).stdout.splitlines()


def test_all_threads_take_the_priority() -> None:
    here = os.getpriority(os.PRIO_PROCESS, 0)
    before, *after = _run()
    assert before == str(here + 5)
    if after == ["refused", before]:
        pytest.skip("needs the capability CAP_SYS_NICE")
    assert after == [str(here)]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, which gives up its capabilities")
def test_a_refusal_is_a_permission_error() -> None:
    before, *after = _run("65534")
    assert after == ["refused", before]
