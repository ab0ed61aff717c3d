"""The curves of a run for TensorBoard: `tensorboard --logdir OUT/tensorboard`."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from recommender.files import naming

__all__ = ["Scalars"]


class Scalars:
    """Writes scalars by step to TensorBoard event files in one directory.

    A killed run may have written steps after its last checkpoint. The run that continues it writes
    these steps again, and sets `purge_step` so that readers discard the older values.

    Args:
        directory: holds the files; None writes nothing.
        steps_done: the steps that the run has made so far; 0 empties the directory.

    Raises:
        OSError: the files cannot be written, here or in a method; the error has the path.
    """

    def __init__(self, directory: Path | None, steps_done: int) -> None:
        self._writer: SummaryWriter | None = None
        self._directory = directory or Path()
        if directory is None:
            return
        if steps_done == 0:
            shutil.rmtree(directory, ignore_errors=True)
        purge_step = steps_done + 1 if steps_done else None
        threading.excepthook = _without_writers
        with naming(directory):
            self._writer = SummaryWriter(str(directory), purge_step=purge_step)

    def write(self, group: str, values: Mapping[str, float], step: int) -> None:
        """Adds a point to the curves `group/name`."""
        if self._writer is None:
            return
        with naming(self._directory):
            for name, value in values.items():
                self._writer.add_scalar(f"{group}/{name}", value, step)

    def flush(self) -> None:
        """Writes everything to disk; call it before a checkpoint of the same step."""
        if self._writer is not None:
            with naming(self._directory):
                self._writer.flush()

    def close(self) -> None:
        """Flushes and closes the files."""
        if self._writer is not None:
            with naming(self._directory):
                self._writer.close()


def _without_writers(
    failed: threading.ExceptHookArgs,
    show: Callable[[threading.ExceptHookArgs], object] = threading.excepthook,
) -> None:
    """Reports exceptions that end threads, except in the threads that write TensorBoard's files.

    The next call of a method of `Scalars` raises the error of such a thread.
    """
    if type(failed.thread).__module__ != "tensorboard.summary.writer.event_file_writer":
        show(failed)
