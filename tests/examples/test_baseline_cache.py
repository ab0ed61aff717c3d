"""Tests of the baselines that the retrieval example keeps with the preprocessed data."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import train_retrieval
from recommender.baseline_cache import cached_baselines
from recommender.directory import BaselineMetrics

from hstu_attn.data.synthetic import write_synthetic_movielens

SMALL = [
    *("--dim", "16", "--layers", "1", "--max-seq-len", "30", "--tokens-per-batch", "256"),
    *("--negatives", "32", "--steps", "2", "--device", "cpu"),
]


@pytest.mark.slow
def test_tuned_baselines_are_kept_with_the_data(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A second run reads them and prints the same numbers; other options or data tune again."""
    data = write_synthetic_movielens(tmp_path, 50, 120, 25)
    tuned = 0
    measure = train_retrieval.measure_baselines

    def counted(*given: Any) -> Any:
        nonlocal tuned
        tuned += 1
        return measure(*given)

    monkeypatch.setattr(train_retrieval, "measure_baselines", counted)

    def run(name: str, *more: str) -> tuple[int, str]:
        """Trains in a new directory; returns the number of tunings, and the baselines' rows."""
        nonlocal tuned
        tuned = 0
        given = [*SMALL, "--data", str(data), "--out", str(tmp_path / name), *more]
        assert train_retrieval.main(given) == 0
        printed = capsys.readouterr().out
        rows = re.findall(r"^(?:popularity|co-occurrence).*$", printed, re.MULTILINE)
        assert ("read from" in printed) == (not tuned and "--no-baselines" not in more)
        return tuned, "\n".join(rows)

    count, rows = run("first")
    assert count == 1
    (kept,) = tmp_path.glob("hstu_cache/*/baselines-*.json")
    assert rows.count("\n") == 2  # popularity, co-occurrence, and the setting that was chosen
    assert "co-occurrence: reach " in rows
    assert run("second") == (0, rows)
    assert run("third", "--seed", "5", "--dim", "32") == (0, rows)  # does not concern them
    first, second = (tmp_path / name / "baselines.json" for name in ("first", "second"))
    assert json.loads(first.read_text()) == json.loads(second.read_text())
    assert run("none", "--no-baselines") == (0, "")

    # Other options change the baselines, which are kept separately.
    for more in (("--exclude", "nothing"), ("--max-seq-len", "20"), ("--min-item-events", "9")):
        assert run("changed" + more[0], *more)[0] == 1
        assert run("again" + more[0], *more)[0] == 0
    assert run("back") == (0, rows)
    monkeypatch.setattr(train_retrieval, "VERSION", -1)
    assert run("version") == (1, rows)
    monkeypatch.undo()
    monkeypatch.setattr(train_retrieval, "measure_baselines", counted)

    # A damaged file, or one that was made for something else, is replaced by the same bytes.
    whole = kept.read_bytes()
    other = next(path for path in kept.parent.glob("baselines-*.json") if path != kept)
    content = json.loads(whole)
    content["metrics"]["test"]["popularity"]["ndcg_10"] += 0.125
    damaged = (b"", whole[:-40], b"\xff", b"[1]", b"{}", json.dumps(content).encode())
    for number, content_of_file in enumerate((*damaged, other.read_bytes())):
        kept.write_bytes(content_of_file)
        assert run(f"damaged-{number}") == (1, rows)
        assert kept.read_bytes() == whole

    # Other data are tuned again, too.
    lines = data.read_bytes().splitlines(keepends=True)
    data.write_bytes(b"".join(lines[:-1]))
    assert run("data")[0] == 1
    assert not kept.exists()


def test_baselines_that_cannot_be_kept_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics: BaselineMetrics = {
        "validation": {},
        "test": {"popularity": {"ndcg_10": 0.1}},
        "note": "x",
    }
    directory = tmp_path / "absent"
    assert cached_baselines(directory, {"version": 1}, lambda: metrics) == metrics
    assert f"not kept for further runs: [Errno 2] No such file or directory: '{directory}" in (
        capsys.readouterr().err
    )
