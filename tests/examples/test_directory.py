"""Tests of reading the directory of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from recommender.directory import difference


@pytest.mark.parametrize("keep_seen", [None, False, True])
@pytest.mark.parametrize("exclude", ["seen", "window", "nothing"])
def test_a_run_from_before_exclude_ranked_what_keep_seen_says(
    keep_seen: bool | None, exclude: str
) -> None:
    made_with = {} if keep_seen is None else {"keep_seen": keep_seen}
    of_run = "nothing" if keep_seen else "seen"
    problem = difference(made_with, {"exclude": exclude}, Path("run"))
    if exclude == of_run:
        assert problem is None
    else:
        assert problem is not None
        assert f"exclude = {of_run!r}, this run has {exclude!r}" in problem


def test_the_model_of_a_run_is_the_same() -> None:
    for made_with, of_run in (({}, "hstu"), ({"model": "sasrec"}, "sasrec")):
        for model in ("hstu", "sasrec"):
            problem = difference(made_with, {"model": model}, Path("run"))
            assert (problem is None) == (model == of_run)
