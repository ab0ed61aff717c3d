"""The benchmarks of serving that need no server: small runs from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("hstu_attn._host", reason="_host has not been built")

from benchmarks import cache
from benchmarks.report import read_results


def test_cache_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "HISTORIES", ((40, 16),))
    path = tmp_path / "results.json"
    cache.main(f"--device cpu --batch 3 64 --new 2 --rounds 5 --json {path}".split())
    records = read_results(path)
    assert [record["batch"] for record in records] == [3, 64]
    for record in records:
        assert record["history"] == 40
        assert 0 < record["step_us"] <= record["step_p95_us"]
        assert 0 < record["engine_us"] <= record["engine_p95_us"]
