"""Skips the rendering of figures that tests do not check."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from matplotlib.figure import Figure

__all__ = ["not_rendered"]


@contextmanager
def not_rendered() -> Iterator[None]:
    """Training runs write the files of their figures, but matplotlib does not render them, because
    rendering takes as long as the training of a test. Figures of benchmarks, which are saved to a
    path, are rendered.
    """
    render = Figure.savefig

    def write(figure: Figure, target: BinaryIO | Path, **options: Any) -> None:
        if isinstance(target, Path):
            render(figure, target, **options)
        else:
            target.write(b"not rendered")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Figure, "savefig", write)
        yield
