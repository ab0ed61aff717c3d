"""Sets the number of examples of a property test, in proportion to the profile of the run."""

from __future__ import annotations

from typing import Any

import hypothesis


def examples(factor: float, **options: Any) -> hypothesis.settings:
    """Returns settings with `factor` times the examples of the profile, and these options.

    The profile of `make test` is `suite` and that of `make test-quick` is `quick`, both of
    tests/conftest.py.
    """
    number = max(1, round(factor * hypothesis.settings.default.max_examples))
    return hypothesis.settings(max_examples=number, **options)
