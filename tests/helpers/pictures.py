"""Pictures that tests do not look at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import pytest
from matplotlib.figure import Figure

__all__ = ["not_rendered"]


@contextmanager
def not_rendered() -> Iterator[None]:
    """Figures are drawn and their files are written, but matplotlib does not render them, which
    takes as long as the training in a test.
    """

    def write(figure: Figure, file: BinaryIO, **_: Any) -> None:
        file.write(b"not rendered")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Figure, "savefig", write)
        yield
