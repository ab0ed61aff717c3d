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
    """Numbers by step, in event files of one directory.

    A run that was killed has written numbers of steps after its last checkpoint. The one that
    continues it writes those steps again, and marks the place (`purge_step`) from which readers
    leave out what was there before.

    Args:
        directory: holds the files; None writes nothing.
        steps_done: a run continues after this many steps; 0 removes what the directory holds.

    Raises:
        OSError: the files cannot be written, here or in a method; it has the path.
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

    What those could not write is raised by the next method of `Scalars`.
    """
    if type(failed.thread).__module__ != "tensorboard.summary.writer.event_file_writer":
        show(failed)
