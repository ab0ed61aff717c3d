"""Tests of reading Amazon reviews and KuaiRand's logs, real and synthetic, and of their layouts."""

from __future__ import annotations

import dataclasses
import gzip
import io
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import train_retrieval

from hstu_attn.data import (
    ACTIONS,
    EventLog,
    JaggedBatch,
    check_batch,
    held_out_windows,
    jagged_batch,
    open_event_log,
    preprocess,
    table,
    training_windows,
    unpack_actions,
)
from hstu_attn.data.layout import MalformedLines
from hstu_attn.data.synthetic import synthetic_events, write_synthetic_movielens
from hstu_attn.data.synthetic_layouts import (
    KUAIRAND_HEADER,
    write_synthetic_amazon,
    write_synthetic_kuairand,
)

SIZE = {"num_users": 30, "num_items": 100, "mean_events": 22}
YEARS: list[Any] = [2018, 2023]  # the years whose layout can be synthesized

AMAZON = [  # user, item, rating, day; in no order
    ("AZ", "B000000003", "5.0", 3),
    ("AB", "B000000001", "4.0", 1),
    ("AZ", "B000000001", "3.0", 1),
    ("AB", "0000000002", "2.0", 2),
    ("AB", "B000000003", "1.0", 2),  # equal days keep the order of the file
    ("AZ", "0000000002", "4.0", 2),
    ("AC", "0000000002", "4.0", 2),  # a user with too few events
]
DAY = 86_400


def write_amazon(directory: Path, year: int, end: str = "\n", suffix: str = "") -> Path:
    if year == 2014:
        lines = [f"{u},{i},{r},{DAY * (day + 9000)}" for u, i, r, day in AMAZON]
    elif year == 2018:
        lines = [f"{i},{u},{r},{DAY * (day + 9000)}" for u, i, r, day in AMAZON]
    else:
        lines = ["user_id,parent_asin,rating,timestamp"]
        lines += [f"{u},{i},{r},{1000 * DAY * (day + 9000) + 7}" for u, i, r, day in AMAZON]
    text = "".join(line + end for line in lines).encode()
    path = directory / f"Things.csv{suffix}"
    path.write_bytes(gzip.compress(text) if suffix else text)
    return path


def kuairand_line(user: int, video: int, time_ms: int, **values: int) -> str:
    columns: dict[str, int] = dict.fromkeys(KUAIRAND_HEADER.split(","), 0)
    columns |= {"user_id": user, "video_id": video, "time_ms": time_ms, "duration_ms": 9000}
    columns |= {"date": 20220408, **values}
    return ",".join(map(str, columns.values())) + "\n"


def write_kuairand(directory: Path) -> list[Path]:
    start = 1_650_000_000_000
    files = {
        "log_standard_4_08_to_4_21_1k.csv": [
            kuairand_line(4, 70, start + 900, is_click=1, long_view=1, play_time_ms=12_345, tab=14),
            kuairand_line(4, 60, start + 100, is_click=1, is_like=1),  # before the line above
            kuairand_line(2, 60, start, is_hate=1),
        ],
        "log_standard_4_22_to_5_08_1k.csv": [
            kuairand_line(4, 60, start + 5000, is_profile_enter=1, is_rand=1),
            kuairand_line(2, 70, start + 6000, is_click=1, is_follow=1, is_comment=1, is_forward=1),
            kuairand_line(2, 80, start + 7000, long_view=1),
        ],
    }
    for name, lines in files.items():
        (directory / name).write_text(KUAIRAND_HEADER + "\n" + "".join(lines))
    return [directory / name for name in files]


@pytest.fixture(params=[table.BLOCK_BYTES, 64], ids=["one block", "many blocks"])
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "BLOCK_BYTES", request.param)


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize("year", [2014, *YEARS])
@pytest.mark.parametrize(
    ("end", "suffix"), [("\n", ""), ("\r\n", ""), ("\n", ".gz"), ("\r\n", ".gz")]
)
def test_reads_amazon(tmp_path: Path, year: int, end: str, suffix: str) -> None:
    log = open_event_log(write_amazon(tmp_path, year, end, suffix))
    assert log.manifest["fingerprint"]["layout"] == f"amazon-{year}"
    assert log.user_ids.tolist() == [0, 1]
    assert log.item_ids.tolist() == [0, 1, 2]
    assert log.user_keys is not None
    assert log.item_keys is not None
    assert log.user_keys.tolist() == [b"AB", b"AZ"]
    assert log.source_user_ids == ["AB", "AZ"]
    assert log.source_item_ids == [log.titles[item].removeprefix("item ") for item in log.item_ids]
    assert log.item_keys.tolist() == [b"0000000002", b"B000000001", b"B000000003"]
    assert log.titles == ["item 0000000002", "item B000000001", "item B000000003"]
    assert log.offsets.tolist() == [0, 3, 6]
    assert log.items.tolist() == [1, 0, 2, 1, 0, 2]
    assert log.ratings.tolist() == [4, 2, 1, 3, 4, 5]
    assert log.timestamps.tolist() == [DAY * (9000 + day) for day in (1, 2, 2, 1, 2, 3)]
    assert log.columns == {}
    assert [log.user_name(user) for user in range(2)] == ["AB", "AZ"]
    assert [log.find_user(name) for name in ("AZ", "AC", "ZZ", "")] == [1, None, None, None]


@pytest.mark.usefixtures("_blocks")
def test_reads_kuairand(tmp_path: Path) -> None:
    paths = write_kuairand(tmp_path)
    log = open_event_log(paths)
    assert log.user_ids.tolist() == [2, 4]
    assert log.item_ids.tolist() == [60, 70, 80]
    assert log.user_keys is None
    assert log.source_user_ids == log.user_ids.tolist()
    assert log.source_item_ids == log.item_ids.tolist()
    assert log.items.tolist() == [0, 1, 2, 0, 1, 0]
    assert (log.timestamps - 1_650_000_000).tolist() == [0, 6, 7, 0, 0, 5]
    assert log.ratings.tolist() == [0, 1, 0, 1, 1, 0]
    assert {name: column.dtype.name for name, column in log.columns.items()} == {
        "actions": "uint8",
        "play_time_ms": "int32",
        "duration_ms": "int32",
        "is_rand": "uint8",
        "tab": "uint8",
    }
    expected: list[set[str]] = [
        {"is_hate"},
        {"is_click", "is_follow", "is_comment", "is_forward"},
        {"long_view"},
        {"is_click", "is_like"},
        {"is_click", "long_view"},
        {"is_profile_enter"},
    ]
    labels = unpack_actions(torch.from_numpy(np.array(log.columns["actions"])))
    assert labels.tolist() == [[float(name in row) for name in ACTIONS] for row in expected]
    assert log.columns["play_time_ms"].tolist() == [0, 0, 0, 0, 12_345, 0]
    assert log.columns["duration_ms"].tolist() == [9000] * 6
    assert log.columns["is_rand"].tolist() == [0, 0, 0, 0, 0, 1]
    assert log.columns["tab"].tolist() == [0, 0, 0, 0, 14, 0]
    assert (log.find_user("4"), log.find_user("3"), log.find_user("AB")) == (1, None, None)

    # A directory reads as its files do; a batch has the inputs and the targets.
    assert open_event_log(tmp_path).manifest["content"] == log.manifest["content"]
    batch = jagged_batch(log, held_out_windows(log, "test", 10)).to(torch.device("cpu"))
    assert batch.actions is not None
    assert batch.target_actions is not None
    assert batch.actions.tolist() == log.columns["actions"][[0, 1, 3, 4]].tolist()
    assert batch.target_actions.tolist() == log.columns["actions"][[1, 2, 4, 5]].tolist()


@pytest.mark.usefixtures("_blocks")
def test_reads_other_forms_of_kuairand(tmp_path: Path) -> None:
    """Files as tools write them: with tabs, a column of row numbers, CRLF or a byte order mark."""
    paths = write_kuairand(tmp_path)
    expected = open_event_log(paths).manifest["content"]
    first, second = (path.read_text().splitlines() for path in paths)
    rows = [f"{'' if number == 0 else number - 1},{line}" for number, line in enumerate(first)]
    paths[0].write_text("\ufeff" + "\n".join(rows), encoding="utf-8")
    paths[1].write_text("".join(line.replace(",", "\t") + "\r\n" for line in second), newline="")
    for order in (paths, paths[::-1]):
        log = open_event_log(order)
        assert log.manifest["fingerprint"]["layout"] == "kuairand"
        assert log.manifest["content"] == expected
    with paths[1].open("a") as file:
        file.write(second[1].replace(",", "\t", 3) + "\n")
    message = r"08_1k.csv:5: expected 19 fields separated by '\\t' \(user_id, video_id, .*got 4: "
    with pytest.raises(ValueError, match=message):
        open_event_log(paths)


def test_keeps_only_events_with_an_action(tmp_path: Path) -> None:
    paths = write_synthetic_kuairand(tmp_path, **SIZE)
    whole = open_event_log(paths)
    log = open_event_log(paths, only="is_click")
    bit = 1 << ACTIONS.index("is_click")
    assert (log.columns["actions"] & bit).all()
    clicks = int((whole.columns["actions"] & bit > 0).sum())
    assert whole.num_events > log.num_events + log.manifest["dropped_events"] == clicks
    left_out = f"Left out: {whole.num_events - clicks:,} events without is_click"
    assert left_out in log.describe()
    # The preprocessed forms of both are next to each other.
    assert len(list(tmp_path.glob("hstu_cache/*"))) == 2
    with pytest.raises(ValueError, match=r"only: expected one of is_click, .*got 'is_click_'"):
        open_event_log(paths, only="is_click_")
    with pytest.raises(ValueError, match="only: expected None for the layout movielens-dat, got"):
        open_event_log(write_synthetic_movielens(tmp_path / "movielens", **SIZE), only="is_click")


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("year", YEARS)
def test_synthetic_amazon(tmp_path: Path, year: Any, compress: bool) -> None:
    paths = [
        write_synthetic_amazon(tmp_path / name, year, seed=seed, compress=compress, **SIZE)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert paths[0].read_bytes() == paths[1].read_bytes() != paths[2].read_bytes()
    log = open_event_log(paths[0])
    text = gzip.decompress(paths[0].read_bytes()) if compress else paths[0].read_bytes()
    rows = [line.split(",") for line in text.decode().splitlines()][year == 2023 :]
    user, item = (1, 0) if year == 2018 else (0, 1)
    check_round_trip(log, group((row[user], row[item]) for row in rows))
    events = list(synthetic_events(seed=0, **SIZE))
    assert numbered(row[user] for row in rows) == numbered(event[0] for event in events)
    assert numbered(row[item] for row in rows) == numbered(event[1] for event in events)
    assert sorted(log.ratings.tolist()) == sorted(float(event[2]) for event in events)
    assert log.user_keys is not None
    assert {len(key) for key in log.user_keys.tolist()} == {14 if year == 2018 else 28}
    assert bool((log.timestamps % DAY == 0).all()) == (year == 2018)


@pytest.mark.parametrize("compress", [False, True])
def test_synthetic_kuairand(tmp_path: Path, compress: bool) -> None:
    both = [
        write_synthetic_kuairand(tmp_path / name, seed=seed, compress=compress, **SIZE)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    texts = [b"".join(path.read_bytes() for path in paths) for paths in both]
    assert texts[0] == texts[1] != texts[2]
    log = open_event_log(tmp_path / "a")
    assert len(log.manifest["fingerprint"]["files"]) == 2
    events = list(synthetic_events(seed=0, **SIZE))
    check_round_trip(log, group((str(user), str(item)) for user, item, _, _ in events))
    assert log.user_ids.tolist() == list(range(30))
    rate = {
        name: float((log.columns["actions"] >> bit & 1).mean()) for bit, name in enumerate(ACTIONS)
    }
    assert 0.4 < rate["is_click"] < 0.95
    assert 0.01 < rate["is_like"] < rate["long_view"] <= rate["is_click"]
    # long_view means that 18 seconds were watched, or all of a shorter video.
    played, duration = log.columns["play_time_ms"], log.columns["duration_ms"]
    long_view = (log.columns["actions"] >> ACTIONS.index("long_view") & 1).astype(bool)
    assert (long_view == (played >= np.minimum(duration, 18_000))).all()
    windows = training_windows(log, 8)
    check_batch(jagged_batch(log, windows), log.num_items)


def check_round_trip(log: EventLog, histories: dict[str, list[str]]) -> None:
    """Checks that the log has these users with these items, by name and oldest first."""
    items = log.item_ids.astype(str) if log.item_keys is None else log.item_keys.astype(str)
    read = {
        log.user_name(user): items[log.items[start:end]].tolist()
        for user, (start, end) in enumerate(zip(log.offsets, log.offsets[1:], strict=False))
    }
    assert read == histories


def group(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    histories: dict[str, list[str]] = {}
    for user, item in pairs:
        histories.setdefault(user, []).append(item)
    return histories


def numbered(names: Iterable[object]) -> list[int]:
    """Numbers names in the order of their first occurrence."""
    numbers: dict[object, int] = {}
    return [numbers.setdefault(name, len(numbers)) for name in names]


LINE = "U1,B000000001,5.0,1500000000000"


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            "U1,B000000001,5.0",
            r"expected 4 fields separated by ',' \(user_id, .*got 3: 'U1",
        ),
        ("U1,B000000001,5.0,1,2", r"expected 4 fields .*got 5: 'U1,B000000001,5.0,1,2'"),
        ("", "expected 4 fields .*got 1: ''"),
        (",B000000001,5.0,1500000000000", "column 1, user_id: expected 1 to 64 printable .*got ''"),
        ("U 1,B000000001,5.0,1500000000000", "column 1, user_id: expected .*got 'U 1'"),
        ('"U1",B000000001,5.0,1500000000000', "column 1, user_id: expected .*quotes, got '\"U1\"'"),
        (f"{'U' * 65},B1,5.0,1500000000000", "column 1, user_id: expected .*got 'UUU"),
        ("U1,B\xe91,5.0,1500000000000", "column 2, parent_asin: expected .*got"),
        ("U1,B000000001,good,1500000000000", "column 3, rating: expected a number from 0.0 to 5.0"),
        ("U1,B000000001,5.5,1500000000000", "column 3, rating: expected .*got '5.5'"),
        ("U1,B000000001,nan,1500000000000", "column 3, rating: expected .*got 'nan'"),
        ("U1,B000000001,-1,1500000000000", "column 3, rating: expected .*got '-1'"),
        ("U1,B000000001,5.0,1500000000", "column 4, timestamp: expected a whole number from 1000"),
        ("U1,B000000001,5.0,", "column 4, timestamp: expected .*got ''"),
        (
            "U1,B000000001,5.0,1500000000000.5",
            "column 4, timestamp: expected .*got '1500000000000.5'",
        ),
        ("U1,B000000001,5.0,-500000000000", "column 4, timestamp: expected .*got '-500000000000'"),
        ("U1,B000000001,5.0,9999999999999999999", "column 4, .*of at most 18 digits, got '9999"),
    ],
)
def test_a_malformed_line_is_an_error(tmp_path: Path, bad: str, message: str) -> None:
    path = tmp_path / "Things.csv"
    lines = ["user_id,parent_asin,rating,timestamp", *[LINE] * 40, bad, LINE, "worse"]
    path.write_text("\n".join(lines), encoding="latin-1")
    with pytest.raises(ValueError, match=rf"Things.csv:42: {message}"):
        open_event_log(path)
    assert not list(tmp_path.glob("hstu_cache/*"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0000013714,A2SUAM1J3GNN3B,5.0,1400000000\nA2SUAM1J3GNN3B,0000013714,5.0,1400000000\n",
            r"Things.csv:2: column 1, item: expected an ASIN of 10 characters .*got 'A2SUAM1J3G",
        ),
        (
            "A2SUAM1J3GNN3B,0000013714,5.0,1400000000\n0000013714,A2SUAM1J3GNN3B,5.0,1400000000\n",
            r"Things.csv:2: column 2, item: expected an ASIN of 10 characters .*got 'A2SUAM1J3G",
        ),
        (
            "0000013714,A2SUAM1J3GNN3B,5.0,1400000000000\n",
            r"Things.csv:1: column 4, timestamp: expected a whole number of seconds from 0 to 999",
        ),
        ("", r"Things.csv:1: expected reviews of Amazon with the item, .*got ''"),
    ],
)
def test_refuses_files_that_are_not_amazon_ratings(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "Things.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        open_event_log(path, layout="amazon")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"is_like": 2}, "column 7, is_like: expected a whole number from 0 to 1, got '2'"),
        ({"long_view": -1}, "column 12, long_view: expected a whole number from 0 to 1, got '-1'"),
        ({"play_time_ms": 2**31}, "column 13, play_time_ms: expected .* to 2147483647, got"),
        ({"time_ms": 1_650_000_000}, "column 5, time_ms: expected a whole number from 1000"),
        ({"tab": 256}, "column 19, tab: expected a whole number from 0 to 255, got '256'"),
    ],
)
def test_a_malformed_log_is_an_error(tmp_path: Path, values: dict[str, int], message: str) -> None:
    paths = write_kuairand(tmp_path)
    line = kuairand_line(**{"user": 1, "video": 2, "time_ms": 1_650_000_000_000, **values})
    paths[1].write_text(paths[1].read_text() + line)
    with pytest.raises(ValueError, match=rf"log_standard_4_22_to_5_08_1k.csv:5: {message}"):
        open_event_log(tmp_path)


def test_refuses_logs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected KuaiRand's log_standard_"):
        open_event_log(tmp_path)
    path = tmp_path / "log_standard_x.csv"
    path.write_text(KUAIRAND_HEADER.replace(",is_hate", "").replace(",tab", "") + "\n")
    with pytest.raises(ValueError, match=":1: expected a header that names is_hate, tab once, got"):
        open_event_log(path)
    path.write_text(KUAIRAND_HEADER + "\n")
    with pytest.raises(ValueError, match="expected events, got none"):
        open_event_log(path)
    with pytest.raises(ValueError, match="source: expected at least one file, got none"):
        open_event_log([])
    with pytest.raises(
        ValueError,
        match="layout: expected one of movielens, amazon, amazon-2014, amazon-2018, kuairand, "
        "parquet, csv, got",
    ):
        open_event_log(path, layout="netflix")  # type: ignore[arg-type]
    amazon = write_amazon(tmp_path, 2023)
    with pytest.raises(ValueError, match="the layout amazon-2023 is one file, got 2"):
        open_event_log([amazon, amazon])


Rows = list[tuple[bytes, int, float]]


def read_line_by_line(text: bytes, delimiter: bytes) -> tuple[Rows, list[int]]:
    """Returns key, whole number and rating of each line, and the numbers of malformed lines."""
    rows, malformed = [], []
    for number, line in enumerate(text.removesuffix(b"\n").split(b"\n") if text else [], start=1):
        fields = line.removesuffix(b"\r").split(delimiter)
        patterns = (rb"[!#-~]{1,64}", rb"\d{1,18}", rb"\d+(\.\d*)?")
        good = len(fields) == 3 and all(map(re.fullmatch, patterns, fields))
        if good and 0 <= float(fields[2]) <= 5:
            rows.append((fields[0], int(fields[1]), float(np.float32(float(fields[2])))))
        else:
            malformed.append(number)
    return rows, malformed


@pytest.mark.slow
def test_reads_what_a_reader_of_single_lines_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables are random, and most have one byte inserted or changed."""
    generator = random.Random(0)
    path = tmp_path / "table.csv"
    outcomes = set()
    for _ in range(600):
        monkeypatch.setattr(table, "BLOCK_BYTES", generator.choice([1, 7, 40, 1 << 20]))
        delimiter = generator.choice([b",", b"\t", b"::"])
        lines = [
            delimiter.join(
                (
                    bytes(generator.choices(b"ABCxyz019_", k=generator.randint(1, 20))),
                    b"%d" % generator.randrange(10 ** generator.randint(1, 18)),
                    generator.choice([b"5.0", b"3", b"0.5"]),
                )
            )
            for _ in range(generator.randint(1, 12))
        ]
        text = generator.choice([b"\n", b"\r\n"]).join(lines) + generator.choice([b"", b"\n"])
        place = generator.randrange(len(text))
        change = generator.choice([*b',:\t\n\r 0a"\xff-.\x00', None])
        if change is not None:
            text = text[:place] + bytes([change]) + text[place + generator.randint(0, 1) :]
        path.write_bytes(text)
        expected, bad = read_line_by_line(text, delimiter)

        def read(malformed: MalformedLines | None, delimiter: bytes = delimiter) -> Rows:
            rows: Rows = []
            for block in table.read_table(
                path,
                "knr",
                has_header=False,
                progress=False,
                delimiter=delimiter,
                malformed=malformed,
            ):
                columns = block.keys("k"), block.natural("n"), block.decimal("r", 0, 5)
                keep = block.report()
                rows += zip(*(column[keep].tolist() for column in columns), strict=True)
            return rows

        report = io.StringIO()
        malformed = MalformedLines(report)
        assert read(malformed) == expected
        assert malformed.count == len(bad)
        reported = re.findall(rf"^{re.escape(str(path))}:(\d+): ", report.getvalue(), re.MULTILINE)
        assert list(map(int, reported)) == bad
        if bad:
            with pytest.raises(ValueError, match=r"table.csv:\d+: ") as error:
                read(None)
            # A block's columns are checked one after another, so this may name a later line.
            assert int(str(error.value).removeprefix(f"{path}:").split(":")[0]) in bad
        else:
            assert read(None) == expected
        outcomes.add(bool(bad))
    assert outcomes == {False, True}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"min_user_events": 21, "min_item_events": 4}, {"ties": "quicksort"}]
)
@pytest.mark.parametrize("kind", ["movielens", "amazon", "kuairand"])
def test_chunks_do_not_matter(
    kind: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading in small chunks, also smaller than a user, gives the same log as one chunk."""
    write = {
        "movielens": write_synthetic_movielens,
        "amazon": write_synthetic_amazon,
        "kuairand": write_synthetic_kuairand,
    }[kind]
    source: Any = write(tmp_path, **SIZE)
    if kind == "movielens":  # users in no order, and equal times
        lines = source.read_text().splitlines()
        lines = [re.sub(r"\d\d\d$", "000", line) for line in lines]
        random.Random(0).shuffle(lines)
        source.write_text("\n".join([*lines, "1::1::5::0", "9::2::5::0", "1::3::5::0"]))
    expected = open_event_log(source, **options)
    monkeypatch.setattr(table, "BLOCK_BYTES", 300)
    monkeypatch.setattr(preprocess, "PENDING_IDS", 8)
    for chunk in (40, 300):
        monkeypatch.setattr(preprocess, "CHUNK_EVENTS", chunk)
        log = open_event_log(source, tmp_path / str(chunk), **options)
        assert log.manifest == expected.manifest
        for name in ("user_ids", "item_ids", "offsets", "items", "ratings", "timestamps"):
            assert (getattr(log, name) == getattr(expected, name)).all()
        for name, column in expected.columns.items():
            assert (log.columns[name] == column).all()
            assert log.columns[name].dtype == column.dtype
        assert {path.suffix for path in log.directory.iterdir()} == {".npy", ".json", ".txt"}


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    expected = open_event_log(write_kuairand(tmp_path)).manifest["content"]
    for path in tmp_path.glob("*.csv"):
        rows = [line.split(",") for line in path.read_text().splitlines()]
        rows = [[*row[::-1], "more"] for row in rows]
        path.write_text("".join(",".join(row) + "\n" for row in rows))
    assert open_event_log(tmp_path).manifest["content"] == expected


def test_a_damaged_gzip_file_is_an_error(tmp_path: Path) -> None:
    path = write_synthetic_amazon(tmp_path, compress=True, **SIZE)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"Synthetic.csv.gz: expected a whole gzip file, got: "):
        open_event_log(path)
    path.write_bytes(b"user_id,parent_asin,rating,timestamp\n")
    with pytest.raises(ValueError, match=r"Synthetic.csv.gz: expected a whole gzip file, got: "):
        open_event_log(path)


def test_movielens_may_be_packed(tmp_path: Path) -> None:
    path = write_synthetic_movielens(tmp_path, **SIZE)
    packed = path.with_name("ratings.dat.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    logs = [open_event_log(source) for source in (path, packed)]
    assert logs[0].manifest["content"] == logs[1].manifest["content"]
    assert logs[0].titles == logs[1].titles


@pytest.mark.parametrize(
    ("fields", "year"),
    [
        ("A2SUAM1J3GNN3B,0000013714", 2014),
        ("0000013714,A2SUAM1J3GNN3B", 2018),
        ("#oc-R12MGTQS43,B000000001", 2014),
        ("A123456789,B000000001", 2014),  # a user of ten characters
        ("B000000001,A123456789", 2018),
        ("A123456789,000001371X", 2014),
        ("B000000001,B000000002", None),
        ("A123456789,A123456788", None),
        ("AB,AC", None),
    ],
)
@pytest.mark.parametrize("layout", [None, "amazon"])
def test_the_item_tells_amazons_layouts_apart(
    tmp_path: Path, fields: str, year: int | None, layout: Any
) -> None:
    path = tmp_path / "Things.csv"
    path.write_text("".join(f"{fields},5.0,{1_400_000_000 + n}\n" for n in range(3)))
    if year is None:
        if fields == "AB,AC" and layout is None:  # not recognizable as reviews
            with pytest.raises(ValueError, match=r"Things.csv:1: expected the header .*got 'AB,AC"):
                open_event_log(path)
            return
        message = rf"Things.csv:1: expected reviews .*got '{fields},5.0,1400000000'; name one by "
        with pytest.raises(ValueError, match=message + "--layout amazon-2018 or amazon-2014"):
            open_event_log(path, layout=layout)
        if fields == "AB,AC":
            return
    else:
        log = open_event_log(path, layout=layout)
        assert log.manifest["fingerprint"]["layout"] == f"amazon-{year}"
    first, second = fields.split(",")
    for named, user, item in (("amazon-2014", first, second), ("amazon-2018", second, first)):
        if len(item) == 10:
            log = open_event_log(path, layout=named)  # type: ignore[arg-type]
            assert log.source_user_ids == [user]
            assert log.source_item_ids == [item]
            assert log.num_events == 3


def test_a_named_layout_needs_no_telling_name(tmp_path: Path) -> None:
    path = write_amazon(tmp_path, 2018).rename(tmp_path / "things.txt")
    with pytest.raises(ValueError, match="ends in"):
        open_event_log(path)
    assert open_event_log(path, layout="amazon").num_events == 6


def test_repeated_items_are_told(tmp_path: Path) -> None:
    log = open_event_log(write_kuairand(tmp_path))
    # User 4 watches 60, 70 and 60 again; user 2 watches 60, 70 and 80.
    assert train_retrieval.fraction_of_repeats(log) == 0.5
    assert train_retrieval.fraction_of_repeats(open_event_log(write_amazon(tmp_path, 2023))) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["amazon", "kuairand"])
def test_trains_on_them(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        *("--dim", "16", "--layers", "1", "--max-seq-len", "12", "--tokens-per-batch", "256"),
        *("--negatives", "16", "--steps", "2", "--eval-every", "2", "--device", "cpu"),
        *("--out", str(tmp_path / "run")),
    ]
    if kind == "amazon":
        path = write_synthetic_amazon(tmp_path, 2018, **SIZE)
        log = open_event_log(path)
        arguments += ["--data", str(path), "--show-user", log.user_name(3)]
        expected = f"User {log.user_name(3)}\n"
    else:
        paths = write_synthetic_kuairand(tmp_path, **SIZE)
        arguments += ["--data", *map(str, paths), "--layout", "kuairand", "--only", "long_view"]
        expected = "events without long_view"
    assert train_retrieval.main(arguments) == 0
    printed = capsys.readouterr().out
    assert expected in printed
    assert "HSTU " in printed


def test_a_malformed_batch_is_named(tmp_path: Path) -> None:
    log = open_event_log(write_kuairand(tmp_path))
    batch = jagged_batch(log, held_out_windows(log, "test", 10))
    check_batch(batch, log.num_items)
    assert batch.seq_offsets.tolist() == [0, 2, 4]

    def spoilt(name: str, row: int, value: int) -> JaggedBatch:
        values = getattr(batch, name).clone()
        values[row] = value
        return dataclasses.replace(batch, **{name: values})

    for name, row, value, message in (
        ("items", 1, 3, "items: expected 0 to 2, got 3 in row 1"),
        ("target_items", 3, -1, "target_items: expected 0 to 2, got -1 in row 3"),
        ("actions", 2, 256, "actions: expected 0 to 255, got 256 in row 2"),
        ("timestamps", 1, 5, "timestamps: expected no decrease within a sequence, got 5 in row 1"),
        (
            "target_timestamps",
            2,
            5,
            "target_timestamps: expected none before timestamps, got 5 in",
        ),
        (
            "seq_offsets",
            1,
            -1,
            "seq_offsets: expected offsets that start from 0 and do not decrease, got -1 in row 1",
        ),
        (
            "seq_offsets",
            2,
            5,
            "seq_offsets: expected values from 0 to the 4 rows of items, got",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            check_batch(spoilt(name, row, value), log.num_items)
    nothing = torch.zeros(0, dtype=torch.int64)
    check_batch(JaggedBatch(nothing, torch.zeros(1).long(), *[nothing] * 4), log.num_items)
    with pytest.raises(ValueError, match=r"actions: expected shape \(4,\), got \(3,\)"):
        check_batch(dataclasses.replace(batch, actions=torch.zeros(3)), log.num_items)
    with pytest.raises(ValueError, match=r"seq_offsets: expected shape \(3,\).*got \(2,\)"):
        check_batch(dataclasses.replace(batch, seq_offsets=torch.tensor([0, 4])), log.num_items)
