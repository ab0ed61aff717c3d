"""Tests of the benchmark that trains recipes and compares their metrics with published ones."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import train_retrieval

from benchmarks import plots, published, ranking, tables
from benchmarks.record import ROOT
from hstu_attn.data import open_event_log
from hstu_attn.data.synthetic import write_synthetic_movielens


def in_order_only(ratings: Path, directory: Path, first: int) -> Path:
    """Writes ratings whose times are each user's event numbers, starting at `first`."""
    lines = [line.split("::") for line in ratings.read_text("latin-1").splitlines()]
    lines.sort(key=lambda fields: (int(fields[0]), int(fields[3])))
    numbers: dict[str, int] = {}
    directory.mkdir()
    path = directory / "ratings.dat"
    with path.open("w") as file:
        for user, item, rating, _ in lines:
            numbers[user] = numbers.get(user, first) + 1
            file.write(f"{user}::{item}::{rating}::{numbers[user]}\n")
    return path


@pytest.mark.parametrize("first", [0, 1_300_000_000])
def test_data_without_times_are_told(tmp_path: Path, first: int) -> None:
    ratings = write_synthetic_movielens(tmp_path, 50, 120, 25)
    assert published.has_times(open_event_log(ratings))
    order = in_order_only(ratings, tmp_path / "order", first)
    assert not published.has_times(open_event_log(order))


@pytest.mark.slow
def test_records_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ratings = write_synthetic_movielens(tmp_path / "times", 140, 100, 20)
    data = in_order_only(ratings, tmp_path / "order", 0)
    file = tmp_path / "records.json"
    shared = ["--data", str(data), "--device", "cpu", "--epochs", "2"]
    asked = ["--cases", "hstu-ml", "--seeds", "2", "--baselines", "--json", str(file), *shared]
    assert published.main(asked) == 0
    printed = capsys.readouterr().out
    records: list[dict[str, Any]] = json.loads(file.read_text())
    names = ["popularity", "co-occurrence", "HSTU, last epoch", "HSTU, best epoch"]
    assert [record["row"] for record in records] == names

    last = records[2]
    assert last["fingerprint"] == open_event_log(data).manifest["content"]
    assert (last["order_only"], last["users"], last["epochs"]) == (True, 140, 2)
    assert last["seconds"] > 0
    assert [len(record["curve"]) for record in records] == [0, 0, 2, 0]
    assert last["published"]["hit_rate_10"] == 0.3097
    assert [record["curve_split"] for record in records] == ["test"] * 4
    assert [record["level"] is None for record in records] == [False, False, True, True]
    assert records[0]["level"]["ndcg_10"] == records[0]["mean"]["ndcg_10"]

    (table,) = tables.published([records])
    rows = {row[0]: row[1:] for row in table.rows}
    assert list(rows) == [
        "popularity, order only",
        "co-occurrence, order only",
        "hstu-ml-1m, HSTU, last epoch, order only",
        "hstu-ml-1m, HSTU, best epoch, order only",
        "hstu-ml-1m, published",
    ]
    mean, deviation = last["mean"]["hit_rate_10"], last["deviation"]["hit_rate_10"]
    expected = f"{mean:.4f} ± {deviation:.4f}" if deviation else f"{mean:.4f}"
    assert rows["hstu-ml-1m, HSTU, last epoch, order only"][0] == expected
    assert rows["hstu-ml-1m, published"][:2] == ["0.3097", "0.1720"]
    assert rows["hstu-ml-1m, published"][-3:] == ["-", "-", "-"]
    assert rows["hstu-ml-1m, HSTU, last epoch, order only"][-2] == "2"
    assert rows["popularity, order only"][-2:] == ["-", "-"]
    assert re.search(rf"140 users on .* items, content {last['fingerprint']}", table.before)
    assert "hstu-ml-1m, published" in printed
    assert plots.draw(file, tmp_path) == [tmp_path / "published-ml-1m.png"]
    assert (tmp_path / "published-ml-1m.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_kept_runs_are_continued_and_finished_ones_are_reported(tmp_path: Path) -> None:
    """Stopped runs resume from their checkpoints, with the same records as uninterrupted runs.

    Seeds that are trained concurrently, in other processes, give the same records, except seconds.
    """
    data = write_synthetic_movielens(tmp_path, 50, 120, 25)
    shared = ["--cases", "hstu-ml-1m", "--data", str(data), "--device", "cpu", "--epochs", "2"]
    options = ["--", "--checkpoint-every", "1", "--relative-bias", "none"]
    name = " ".join(["hstu-ml-1m", *options[1:]])
    kept = [*shared, "--runs", str(tmp_path / "kept")]

    def records(*arguments: str) -> list[dict[str, Any]]:
        file = tmp_path / "records.json"
        assert published.main([*arguments, "--json", str(file), *options]) == 0
        found: list[dict[str, Any]] = json.loads(file.read_text())
        return found

    assert records(*kept, "--finished") == []
    run = tmp_path / "kept" / name / "seed-0"
    begun = ["--recipe", "hstu-ml-1m", "--data", str(data), "--device", "cpu", "--steps", "1"]
    assert train_retrieval.main([*begun, "--out", str(run), "--no-baselines", *options[1:]]) == 0
    (run / "metrics.json").unlink()  # as if it had been killed
    assert records(*kept, "--finished") == []

    whole = records(*shared, "--seeds", "2")
    made = records(*kept, "--seeds", "2", "--jobs", "2", "--shared", "--note", "Made up.")
    results = ("mean", "deviation", "curve", "seeds", "fingerprint")
    assert [[r[name] for name in results] for r in made] == [
        [r[name] for name in results] for r in whole
    ]
    assert [whole[0]["seconds"] > 0, made[0]["seconds"]] == [True, None]
    (table,) = tables.published([made])
    assert table.rows[0][0] == f"{name}, HSTU, last epoch"
    assert "Made up. 2 epochs" in table.before

    (run / "checkpoints").rename(run / "gone")  # nothing is trained again
    assert [r["mean"] for r in records(*kept, "--seeds", "2")] == [r["mean"] for r in whole]
    note = ["--note", "A user's events"]
    (reported, _) = records(*kept, "--seeds", "3", "--finished", *note)
    assert (reported["seeds"], reported["mean"]) == (2, whole[0]["mean"])
    # The recorded command is quoted, so that a shell parses it into the same arguments.
    assert shlex.split(reported["command"])[3:] == [
        *(*kept, "--seeds", "3", "--finished", *note),
        *("--json", str(tmp_path / "records.json"), *options),
    ]
    run.parent.rename(tmp_path / "kept" / f"{name} --dim 24")
    with pytest.raises(ValueError, match="was made with dim = 50, this run has 24"):
        published.main([*kept, "--finished", *options, "--dim", "24"])


@pytest.mark.slow
def test_ranking_on_ratings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    data = in_order_only(write_synthetic_movielens(tmp_path, 40, 100, 25), tmp_path / "order", 0)
    file = tmp_path / "records.json"
    few = ["--dim", "8", "--heads", "1", "--layers", "1", "--steps", "2", "--tasks", "rating_4"]
    monkeypatch.chdir(tmp_path)  # relative paths are relative to the caller's folder
    here = data.relative_to(tmp_path)
    asked = ["--data", str(here), "--seeds", "2", "--json", str(file), "--", *few]
    assert ranking.main(asked) == 0
    records = json.loads(file.read_text())
    assert [r["model"] for r in records] == ["base rate", "item rate", "item and user rate", "HSTU"]
    model = records[-1]
    assert 0 < model["metrics"]["auc/rating_4"] < 1
    assert records[1]["deviation"] == {"auc/rating_4": None, "ne/rating_4": None}
    (table,) = tables.ranking([records])
    assert table.before.startswith("order/ratings.dat, `--dim 8 --heads 1")
    assert table.before.endswith(f"content {model['fingerprint']}, order only; seeds: 2.")
    mean, deviation = (model[kind]["auc/rating_4"] for kind in ("metrics", "deviation"))
    assert table.rows[-1][:2] == ["HSTU", f"{mean:.4f} ± {deviation:.4f}"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "some", "--finished"], "--finished: expected --runs, which names a directory"),
        ([], "--data: expected the file of the data set; got none"),
    ],
)
def test_what_it_needs(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        published.main(["--cases", "hstu-ml", *arguments])
