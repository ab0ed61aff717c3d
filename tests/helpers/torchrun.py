"""Runs programs by torchrun."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from pathlib import Path

from tests.helpers.distributed_runs import PRELOADED, free_port
from tests.helpers.paths import ROOT

__all__ = ["torchrun"]


def torchrun(program: Path, *arguments: str, device_type: str = "cpu") -> tuple[int, str]:
    """Runs a program as two ranks on this machine; returns the exit code and the output.

    The launcher is forked from a process that has already imported torch.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if device_type == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    launcher = ["--nnodes", "1", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
    launcher += ["--master-port", str(free_port())]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.NamedTemporaryFile() as output:
        process = context.Process(
            target=_launch,
            args=([*launcher, str(program), *arguments], environment, output.name),
        )
        process.start()
        process.join(300)
        if process.exitcode is None:
            process.terminate()
            process.join()
            raise TimeoutError(Path(output.name).read_text())
        return process.exitcode, Path(output.name).read_text()


def _launch(arguments: list[str], environment: dict[str, str], output: str) -> None:
    """Does the same as `python -m torch.distributed.run`."""
    from torch.distributed.run import main

    os.environ.clear()
    os.environ.update(environment)
    with open(output, "wb") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    main(arguments)
