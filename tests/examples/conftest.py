"""Fixtures of the tests of examples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.pictures import not_rendered


@pytest.fixture
def rendered() -> None:
    """Lets a test see the pictures of training runs, which other tests do without."""


@pytest.fixture(autouse=True)
def _pictures_where_they_are_looked_at(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fixtures of modules, and programs that tests start, render their pictures."""
    if "rendered" in request.fixturenames:
        yield
        return
    with not_rendered():
        yield
