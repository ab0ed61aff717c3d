"""Pools of processes that run test functions as the ranks of a process group.

A pool is started once for all tests with the same number of ranks. A test sends it an importable
function and its arguments, and gets the result of each rank.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import socket
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)
PRELOADED = ["hstu_attn.distributed", __name__]  # by the forkserver, which the first pool starts
BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)]


class RankPool:
    """Processes that each are a rank of the default process group; with NCCL each has a GPU."""

    def __init__(self, number: int, backend: str) -> None:
        # The forkserver imports torch once for all ranks; with CUDA, processes cannot fork.
        context = multiprocessing.get_context("forkserver" if backend == "gloo" else "spawn")
        context.set_forkserver_preload(PRELOADED)
        self.directory = tempfile.TemporaryDirectory(prefix="ranks-")
        for rank in range(number):
            _stacks(self.directory.name, rank).touch()
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(number):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, number, backend, self.directory.name, there), daemon=True
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Returns each rank's result of `function(*arguments)`; all ranks start from one seed.

        Raises:
            RuntimeError: if a rank failed; the message has its traceback, and the stacks of ranks
                that did not answer in time. The pool cannot be used afterwards.
        """
        seed = int(torch.randint(2**31, ()))
        for pipe in self.pipes:
            pipe.send((seed, function, arguments))
        results: dict[Connection, Any] = {}
        while len(results) < len(self.pipes):
            waiting = [pipe for pipe in self.pipes if pipe not in results]
            ready = wait(waiting, timeout=2 * TIMEOUT.total_seconds())
            if not ready:
                raise RuntimeError(f"ranks did not answer in time\n{self._states()}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    good, results[pipe] = pipe.recv()
                except EOFError:
                    raise RuntimeError(f"a rank ended\n{self._states()}") from None
                if not good:
                    rank = self.pipes.index(pipe)
                    raise RuntimeError(f"rank {rank}: {results[pipe]}\n{self._states()}")
        return [results[pipe] for pipe in self.pipes]

    def _states(self) -> str:
        """Returns each rank's exit code, None while it runs, and the stacks of its threads if it
        did not answer for a long time or was ended by a signal such as SIGSEGV.
        """
        texts = []
        for rank, process in enumerate(self.processes):
            process.join(timeout=1)
            stacks = _stacks(self.directory.name, rank).read_text()
            texts.append(f"rank {rank}: exit code {process.exitcode}\n{stacks}")
        return "\n".join(texts)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.directory.cleanup()


def _stacks(directory: str, rank: int) -> Path:
    """Returns the file with the stacks of a rank that hung or crashed."""
    return Path(directory, f"stacks-{rank}")


def _serve(rank: int, number: int, backend: str, directory: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    stacks = _stacks(directory, rank).open("w")
    faulthandler.enable(stacks)
    if backend == "nccl":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=number,
        timeout=TIMEOUT,
    )
    while True:
        try:
            seed, function, arguments = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(seed)
        faulthandler.dump_traceback_later(0.8 * TIMEOUT.total_seconds(), file=stacks)
        try:
            answer = True, function(*arguments)
        except Exception:
            answer = False, traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        pipe.send(answer)


_pools: dict[tuple[int, str], RankPool] = {}


def run_ranks(
    number: int, function: Callable[..., Any], *arguments: Any, backend: str = "gloo"
) -> list[Any]:
    """Returns the result of `function(*arguments)` on each of `number` ranks. A single rank is
    this process, without a process group. Skips the test if NCCL has too few GPUs.
    """
    if number == 1:
        return [function(*arguments)]
    if backend == "nccl" and torch.cuda.device_count() < number:
        pytest.skip(f"needs {number} GPUs")
    key = number, backend
    if key not in _pools:
        _pools[key] = RankPool(number, backend)
    try:
        return _pools[key](function, *arguments)
    except RuntimeError:
        _pools.pop(key).close()
        raise


@atexit.register
def close_pools() -> None:
    """Ends the processes of all pools."""
    while _pools:
        _pools.popitem()[1].close()


def device_type(backend: str) -> str:
    return "cuda" if backend == "nccl" else "cpu"


def free_port() -> int:
    """Returns an unused TCP port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
