"""Writes files atomically: a killed writer or a full disk leaves no partial file."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["naming", "write_json", "write_whole"]


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the path to the error of a failed write, for example on a full disk.

    Libraries wrap the system's error in their own errors, so it is searched among the causes.

    Raises:
        OSError: with the path, if the system could not write.
    """
    try:
        yield
    except BaseException as error:
        # CheckpointException derives from BaseException, so interrupts are told apart from it here.
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        found = _system_error(error)
        if found is None or (found is error and found.filename is not None):
            raise
        # numpy's own error for a full disk has a text but no errno.
        number, text = found.errno or errno.EIO, found.strerror or str(found)
        raise OSError(number, text, str(found.filename or path)) from error


def _system_error(error: BaseException | None) -> OSError | None:
    """Returns the OSError that caused an error, or that it holds as `CheckpointException` does."""
    while error is not None and not isinstance(error, OSError):
        for failure, *_ in getattr(error, "failures", {}).values():
            if found := _system_error(failure):
                return found
        error = error.__cause__ or error.__context__
    return error


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replaces a file once its new content is complete on the disk.

    Args:
        path: the path of the file.
        write: writes the content into a file next to it.

    Raises:
        OSError: the file cannot be written; the old file is unchanged.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with naming(path), temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Replaces a file by the JSON of a value, as `write_whole` does."""
    write_whole(path, lambda file: file.write(json.dumps(value, indent=1).encode()))
