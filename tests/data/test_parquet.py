"""Tests of reading Parquet and CSV files of events by the names of their columns."""

from __future__ import annotations

import datetime
import gzip
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import train_ranking
import train_retrieval

from hstu_attn.data import ACTIONS, EventLog, open_event_log, parquet, preprocess
from hstu_attn.data.synthetic_layouts import write_synthetic_kuairand

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

SIZE: dict[str, Any] = {"num_users": 30, "num_items": 100, "mean_events": 22}
NAMES = {"user": "account", "item": "sku", "timestamp": "at", "rating": "stars"}
START = 1_650_000_000
EVENTS: dict[str, list[Any]] = {
    "account": [7, 3, 7, 3, 7, 3, 7, 9],
    "sku": [30, 10, 10, 20, 40, 30, 20, 20],
    "stars": [5, 4, 3, 2, 1, 5, 4, 4],
    "at": [START + second for second in (300, 100, 100, 200, 400, 200, 200, 200)],
    "note": [None] * 8,
}


def write(path: Path, **changes: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {name: values for name, values in (EVENTS | changes).items() if values is not None}
    pq.write_table(pa.table(columns), path, row_group_size=3)
    return path


def check_events(log: EventLog) -> None:
    assert log.items.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert log.offsets.tolist() == [0, 3, 7]
    assert (log.timestamps - START).tolist() == [100, 200, 200, 100, 200, 300, 400]
    assert log.ratings.tolist() == [4, 2, 5, 3, 4, 5, 1]


TIMES = [datetime.datetime.fromtimestamp(second, datetime.timezone.utc) for second in EVENTS["at"]]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"at": [1000 * second + 999 for second in EVENTS["at"]]},
        {"at": pa.array(TIMES, pa.timestamp("s", "UTC"))},
        {"at": pa.array(TIMES, pa.timestamp("ns"))},
        {"account": pa.array(EVENTS["account"], pa.uint8())},
        {"account": pa.array(EVENTS["account"]).dictionary_encode()},
        {"stars": pa.array(EVENTS["stars"], pa.float64())},
    ],
    ids=["seconds", "milliseconds", "s", "ns", "uint8", "dictionary", "double"],
)
@pytest.mark.parametrize("batch", [parquet.BATCH_EVENTS, 2])
def test_reads_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], batch: int
) -> None:
    monkeypatch.setattr(parquet, "BATCH_EVENTS", batch)
    log = open_event_log(write(tmp_path / "events.parquet", **changes), columns=NAMES)
    check_events(log)
    assert log.user_ids.tolist() == [3, 7]
    assert log.item_ids.tolist() == [10, 20, 30, 40]
    assert log.user_keys is None
    assert log.columns == {}
    assert log.manifest["fingerprint"]["layout"] == "parquet"
    assert log.titles[0] == "item 10"


@pytest.mark.parametrize("encode", [False, True])
def test_reads_ids_that_are_text(tmp_path: Path, encode: bool) -> None:
    users, items = ([f"{n:04}x" for n in EVENTS[name]] for name in ("account", "sku"))
    item_column = pa.array(items).dictionary_encode() if encode else pa.array(items)
    path = write(tmp_path / "events.parquet", account=users, sku=item_column)
    log = open_event_log(path, columns=NAMES)
    check_events(log)
    assert log.source_user_ids == ["0003x", "0007x"]
    assert log.source_item_ids == ["0010x", "0020x", "0030x", "0040x"]


def test_many_files_are_one_log(tmp_path: Path) -> None:
    whole = open_event_log(write(tmp_path / "events.parquet"), columns=NAMES)
    for day, rows in enumerate((slice(0, 1), slice(1, 5), slice(5, 8), slice(8, 8))):
        part = {name: values[rows] for name, values in EVENTS.items()}
        part = {name: pa.array(values, pa.int64()) for name, values in part.items()}
        write(tmp_path / "parts" / f"day={day}" / "part-0.parquet", **part)
    log = open_event_log(tmp_path / "parts", columns=NAMES)
    assert log.manifest["content"] == whole.manifest["content"]
    paths = sorted((tmp_path / "parts").rglob("*.parquet"))
    log = open_event_log(paths, columns=NAMES)
    assert log.manifest["content"] == whole.manifest["content"]
    # Other columns give a separate preprocessed form.
    swapped = open_event_log(paths, columns=NAMES | {"rating": "sku"})
    assert swapped.ratings.max() == 40
    assert open_event_log(paths, columns=NAMES).ratings.max() == 5


def test_features_have_their_own_names(tmp_path: Path) -> None:
    own = {name: EVENTS[column] for name, column in NAMES.items()}
    drop = dict.fromkeys(EVENTS)
    check_events(open_event_log(write(tmp_path / "a.parquet", **drop, **own)))
    log = open_event_log(write(tmp_path / "b.parquet", **drop, **{**own, "rating": None}))
    assert log.ratings.tolist() == [1] * 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"at": None}, r"expected one column 'at', got account, sku, stars, note \(--columns"),
        ({"account": [7, 3, 7, None, 7, 3, 7, 9]}, "column account, row 3: expected no null, got"),
        (
            {"account": [7, 3, -7] * 2 + [1, 2]},
            "column account, row 2: expected a whole number .*-7",
        ),
        ({"account": [0.5] * 8}, "column account: expected whole numbers or text, got double"),
        ({"sku": ["a"] * 7 + ["b c"]}, "column sku, row 7: expected 1 to 64 printable .*'b c'"),
        ({"sku": [*"aaaaaa", "é", "a"]}, "column sku, row 6: expected 1 to 64 printable .*'é'"),
        ({"stars": ["good"] * 8}, "column stars: expected numbers, got string"),
        ({"stars": [1.0] * 7 + [np.nan]}, "column stars, row 7: expected a finite number, got nan"),
        ({"at": [0.5] * 8}, "column at: expected whole numbers, got double"),
        ({"at": [START] * 6 + [1000 * START] * 2}, "column at, row 6: expected seconds, as the"),
        (
            {"is_click": [0] * 7 + [2]},
            "column is_click, row 7: expected a whole number from 0 to 1",
        ),
    ],
)
def test_refuses_values(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "events.parquet", **changes)
    with pytest.raises(ValueError, match=rf"events.parquet: {message}"):
        open_event_log(path, columns=NAMES)
    assert not list(tmp_path.glob("hstu_cache/*"))


def test_rows_of_later_batches_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "BATCH_EVENTS", 2)
    path = write(tmp_path / "events.parquet", account=[7, 3, 7, 4, 7, None, 7, 9])
    with pytest.raises(ValueError, match="column account, row 5: expected no null, got None"):
        open_event_log(path, columns=NAMES)


def test_refuses_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [write(tmp_path / "a.parquet"), write(tmp_path / "b.parquet", sku=[*"abcdefgh"])]
    with pytest.raises(ValueError, match=r"b.parquet: expected items as in .*a.parquet, 'i', got"):
        open_event_log(paths, columns=NAMES)
    write(tmp_path / "b.parquet", is_like=[0] * 8)
    with pytest.raises(ValueError, match=r"b.parquet: expected columns as in .*'is_like'"):
        open_event_log(paths, columns=NAMES)
    write(tmp_path / "b.parquet", at=[1000 * second for second in EVENTS["at"]])
    with pytest.raises(
        ValueError, match=r"b.parquet: expected ticks per second as in .* 1, got 1000"
    ):
        open_event_log(paths, columns=NAMES)
    paths[1].write_bytes(b"PAR1 and more")
    with pytest.raises(ValueError, match=r"b.parquet: expected a Parquet file, got: "):
        open_event_log(paths, columns=NAMES)
    with pytest.raises(ValueError, match=r"columns: expected names for user, item, .*'users'"):
        open_event_log(paths, columns={"users": "account"})
    pq.write_table(pa.table({name: pa.array([], pa.int64()) for name in EVENTS}), paths[1])
    with pytest.raises(ValueError, match=r"b.parquet: expected events, got none"):
        open_event_log(paths[1], columns=NAMES)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"needs pyarrow: pip install 'hstu_attn\[parquet\]'"):
        open_event_log(paths[0], columns=NAMES)


def from_kuairand(directory: Path) -> tuple[EventLog, Path]:
    """Returns a log of KuaiRand, and its events as Parquet files."""
    log = open_event_log(write_synthetic_kuairand(directory, **SIZE))
    users = np.repeat(log.user_ids, np.diff(log.offsets))
    bits = log.columns["actions"]
    columns = {
        "user": users,
        "item": log.item_ids[log.items],
        "timestamp": log.timestamps.astype("datetime64[s]"),
        **{action: (bits >> bit & 1).astype(bool) for bit, action in enumerate(ACTIONS)},
    }
    for number, rows in enumerate(np.array_split(np.arange(log.num_events), 3)):
        part = {name: np.asarray(column)[rows] for name, column in columns.items()}
        path = directory / "events" / f"{number}.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table(part), path)
    return log, directory / "events"


def test_actions_and_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, directory = from_kuairand(tmp_path)
    monkeypatch.setattr(preprocess, "CHUNK_EVENTS", 100)
    log = open_event_log(directory)
    assert (log.columns["actions"] == expected.columns["actions"]).all()
    assert log.columns["actions"].dtype == np.uint8
    assert (log.items == expected.items).all()
    assert (log.timestamps == expected.timestamps).all()
    clicked = open_event_log(directory, only="is_click")
    assert 0 < clicked.num_events < log.num_events


def write_csv(
    path: Path, delimiter: str = ",", quote: str = "", at: Sequence[object] = EVENTS["at"]
) -> Path:
    columns = [*zip(*(EVENTS | {"at": at}).values(), strict=True)]
    lines = [[*EVENTS], *[("" if value is None else value for value in row) for row in columns]]
    text = "\n".join(delimiter.join(f"{quote}{value}{quote}" for value in row) for row in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8-sig")
    return path


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("log.csv", {}),
        ("log.csv", {"quote": '"'}),
        ("log.txt", {"delimiter": ";"}),
        ("log.tsv", {"delimiter": "\t"}),
        ("log.csv.gz", {"delimiter": "|"}),
        ("log.csv", {"at": [1000 * second + 999 for second in EVENTS["at"]]}),
        ("log.csv", {"at": [f"{time:%Y-%m-%d %H:%M:%S}" for time in TIMES]}),
        ("log.csv", {"at": [f"{time:%Y-%m-%dT%H:%M:%S}.5Z" for time in TIMES]}),
    ],
    ids=["commas", "quotes", "semicolons", "tabs", "gz", "milliseconds", "times", "zone"],
)
def test_reads_text_by_the_names_of_its_columns(
    tmp_path: Path, name: str, change: dict[str, Any]
) -> None:
    log = open_event_log(write_csv(tmp_path / name, **change), columns=NAMES)
    check_events(log)
    assert log.source_user_ids == ["3", "7"]
    assert log.source_item_ids == ["10", "20", "30", "40"]
    assert log.manifest["fingerprint"]["layout"] == "csv"


def test_text_without_ratings_in_several_files(tmp_path: Path) -> None:
    """Ids keep leading zeros, and later ids and files may have another format than the first."""
    rows = [("007", "1", 5), ("007", "x-2", 3), ("07", "1", 1), ("a7", "1", 2)] * 3
    for part in range(3):
        lines = [f"{START + time},{user},{item}\n" for user, item, time in rows[part::3]]
        (tmp_path / f"{part}.csv").write_text("timestamp,user,item\n" + "".join(lines))
    paths = sorted(tmp_path.glob("*.csv"))
    log = open_event_log(paths, layout="csv")
    assert log.source_user_ids == ["007", "07", "a7"]
    assert log.items.tolist() == [1, 1, 1, 0, 0, 0] + [0] * 6
    assert log.ratings.tolist() == [1] * 12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user,sku,at\n1,2,3\n", r"expected one column 'account', got user, sku, at \(--columns"),
        ("account,sku,at\n1,2,3\n1,2\n", r"expected a CSV file, got: .*Expected 3 columns"),
        ("account,sku,at\n1,2,3\n1,,3\n", r"column sku, row 1: expected 1 to 64 printable"),
        ("account,sku,at\n1,2,3\n1,2,\n", r"column at, row 1: expected no null, got None"),
        ("account,sku,at\n1,2,3.5\n", r"column at: expected whole numbers, got double"),
        ("account,sku,at\n1,2,soon\n", r"column at: expected whole numbers, got string"),
        ("account,sku,at,stars\n1,2,3,good\n", r"expected a CSV file, got: .*'good'"),
        ("account,sku,at\n", r"expected events, got none"),
        ("", r"expected one column 'account', got  "),
    ],
)
def test_refuses_text(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "log.csv"
    path.write_text(text)
    names = {name: NAMES[name] for name in ("user", "item", "timestamp")}
    if "stars" in text:
        names = NAMES
    with pytest.raises(ValueError, match=rf"log.csv: {message}"):
        open_event_log(path, columns=names)
    with pytest.raises(ValueError, match="columns: expected None for the layout movielens, got"):
        open_event_log(path, columns=names, layout="movielens")


@pytest.mark.slow
def test_trains_on_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, directory = from_kuairand(tmp_path)
    shared = [
        *("--data", str(directory), "--columns", "user=user", "item=item", "--dim", "16"),
        *("--layers", "1", "--steps", "2", "--eval-every", "2", "--device", "cpu"),
    ]
    ranking = ["--out", str(tmp_path / "a"), "--tasks", "is_like", "is_hate", "--history", "12"]
    assert train_ranking.main([*shared, *ranking]) == 0
    assert train_retrieval.main([*shared, "--out", str(tmp_path / "b"), "--no-baselines"]) == 0
    assert "events of 30 users" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        train_ranking.parse_arguments([*shared, "--columns", "user"])
    assert "--columns must be FEATURE=COLUMN, got user" in capsys.readouterr().err
