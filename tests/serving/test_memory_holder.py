"""Tests that a killed process closes its connections before its memory is freed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

# Starts the process twice, and sends its id through a socket that it opens afterwards.
_HOLDER = """
import socket, sys, time
from hstu_attn import _host

process = _host.start_memory_holder()
assert _host.start_memory_holder() == process
with socket.create_connection(("localhost", int(sys.argv[1]))) as connection:
    connection.sendall(str(process).encode())
    time.sleep(600)
"""


def _state(process: int) -> str | None:
    """Returns the state of a process in one letter; None if there is none."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return None
    return text.rpartition(")")[2].split()[0]


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline, "expected within 10 s"
        time.sleep(0.05)


def test_connections_of_a_killed_process_are_closed_before_its_memory_is_freed() -> None:
    with socket.create_server(("localhost", 0)) as server:
        command = [sys.executable, "-c", _HOLDER, str(server.getsockname()[1])]
        with subprocess.Popen(command) as program:
            connection, _ = server.accept()
            connection.settimeout(10)
            holder = int(connection.recv(100))
            if holder == 0:
                program.kill()
                pytest.skip("needs Linux 5.9")
            try:
                _wait_until(lambda: Path(f"/proc/{holder}/comm").read_text() == "memory-holder\n")
                assert os.listdir(f"/proc/{holder}/fd") == []  # closed before it takes the name
                os.kill(holder, signal.SIGSTOP)  # it has the memory until it goes on
                _wait_until(lambda: _state(holder) == "T")
            finally:
                program.kill()
            assert connection.recv(100) == b""
            assert _state(holder) == "T"
            os.kill(holder, signal.SIGCONT)
    _wait_until(lambda: _state(holder) in (None, "Z"))


def test_an_end_without_a_kill_is_as_before() -> None:
    program = "from hstu_attn import _host; _host.start_memory_holder(); raise SystemExit(7)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 7
