"""The benchmarks of serving that need no server: small runs from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("hstu_attn._host", reason="_host has not been built")

from benchmarks import cache, engine
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


def test_an_engine_under_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    sizes = "--layers 2 --width 32 --heads 2 --head-dim 16 --history 40 --candidates 5 --users 6"
    load = "--max-batch-size 4 --concurrency 1 6 --seconds 0.5 --device cpu"
    engine.main(f"{sizes} {load} --json {path}".split())
    assert "with graphs: ready after" in capsys.readouterr().out
    records = read_results(path)
    forms = [(record["concurrency"], record["graphs"]) for record in records]
    assert forms == [(1, False), (1, True), (6, False), (6, True)]
    for record in records:
        assert record["layers"] == 2
        assert record["answered"] > 0
        assert 0 < record["p50_ms"] <= record["p95_ms"] <= record["p99_ms"]
        assert 1 <= record["mean_batch"] <= 4
        assert record["graph_share"] == float(record["graphs"])
        assert record["hit_share"] > 0.5
