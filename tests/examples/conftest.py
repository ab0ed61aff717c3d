"""Fixtures of the tests of examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import pytest
from matplotlib.figure import Figure


@pytest.fixture
def rendered() -> None:
    """Lets a test see the pictures of training runs, which other tests do without."""


@pytest.fixture(autouse=True)
def _pictures_where_they_are_looked_at(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs of tests draw curves and write their files, but matplotlib does not render them, which
    takes as long as the training itself. It does in fixtures of modules and in other processes.
    """
    if "rendered" in request.fixturenames:
        yield
        return

    def write(figure: Figure, file: BinaryIO, **_: Any) -> None:
        file.write(b"not rendered")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Figure, "savefig", write)
        yield
