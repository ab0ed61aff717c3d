"""Fixtures of the tests of examples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from matplotlib.figure import Figure

from tests.helpers.pictures import not_rendered

_RENDER = Figure.savefig


@pytest.fixture(autouse=True, scope="module")
def _not_rendered() -> Iterator[None]:
    """Disables the rendering of training runs' figures for fixtures and tests."""
    with not_rendered():
        yield


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enables the rendering of figures for a test."""
    monkeypatch.setattr(Figure, "savefig", _RENDER)
