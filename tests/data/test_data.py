"""Tests of reading MovieLens files, the preprocessed form, the split and the batches."""

from __future__ import annotations

import gzip
import json
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from hstu_attn.data import (
    BatchSampler,
    EventLog,
    consecutive_batches,
    held_out_windows,
    jagged_batch,
    open_event_log,
    table,
    training_windows,
)
from hstu_attn.data.synthetic import write_synthetic_movielens
from hstu_attn.data.synthetic_scale import write_synthetic_scale

EVENTS = [  # user, item, rating, timestamp, in no order
    (7, 30, 5, 300),
    (3, 10, 4, 100),
    (7, 10, 3, 100),
    (3, 20, 2, 200),
    (7, 40, 1, 400),
    (3, 30, 5, 200),  # equal times keep the order of the file
    (7, 20, 4, 200),
    (9, 20, 4, 200),  # a user with too few events
]


def write_dat(directory: Path, extra: bytes = b"") -> Path:
    path = directory / "ratings.dat"
    path.write_bytes(b"".join(f"{u}::{i}::{r}::{t}\n".encode() for u, i, r, t in EVENTS) + extra)
    titles = "10::Amélie (2001)::Comedy|Romance\n20::Alien (1979)::Horror\n30::Heat (1995)::Crime\n"
    (directory / "movies.dat").write_bytes(titles.encode("latin-1"))
    return path


def write_csv(directory: Path) -> Path:
    path = directory / "ratings.csv"
    lines = [f"{u},{i},{r - 0.5},{t}\r\n" for u, i, r, t in EVENTS]
    path.write_text("userId,movieId,rating,timestamp\r\n" + "".join(lines), newline="")
    (directory / "movies.csv").write_text(
        'movieId,title,genres\n10,"City of Lost Children, The (1995)",Drama\n', encoding="utf-8"
    )
    return path


def check_events(log: EventLog) -> None:
    assert log.user_ids.tolist() == [3, 7]
    assert log.item_ids.tolist() == [10, 20, 30, 40]
    assert log.offsets.tolist() == [0, 3, 7]
    assert log.items.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert log.timestamps.tolist() == [100, 200, 200, 100, 200, 300, 400]
    assert (log.num_users, log.num_items, log.num_events) == (2, 4, 7)
    assert (log.manifest["dropped_users"], log.manifest["dropped_events"]) == (1, 1)
    assert isinstance(log.items, np.memmap)


def test_reads_dat_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = write_dat(tmp_path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    log = open_event_log(path)
    check_events(log)
    assert log.manifest["malformed_lines"] == 0


def test_reads_dat(tmp_path: Path) -> None:
    log = open_event_log(write_dat(tmp_path))
    check_events(log)
    assert log.ratings.tolist() == [4, 2, 5, 3, 4, 5, 1]
    assert log.titles == ["Amélie (2001)", "Alien (1979)", "Heat (1995)", "item 40"]
    assert "Left out: 1 users with fewer than 3 events (1 events)" in log.describe()
    assert "malformed" not in log.describe()


def test_reads_csv(tmp_path: Path) -> None:
    log = open_event_log(write_csv(tmp_path))
    check_events(log)
    assert log.ratings.tolist() == [3.5, 1.5, 4.5, 2.5, 3.5, 4.5, 0.5]
    assert log.titles[:2] == ["City of Lost Children, The (1995)", "item 20"]


def test_reads_the_layout_of_100k(tmp_path: Path) -> None:
    """Tabs between fields; titles between bars, with 22 more fields, in latin-1."""
    lines = "".join("\t".join(map(str, event)) + "\n" for event in EVENTS)
    genres = "|".join("0" * 19)
    titles = f"10|Amélie (2001)|01-Jan-2001||http://a/|{genres}\n20|Alien (1979)|1979|\n"
    for path, pack in ((tmp_path / "u.data", bytes), (tmp_path / "u.data.gz", gzip.compress)):
        path.write_bytes(pack(lines.encode()))
        path.with_name("u.item").write_bytes(titles.encode("latin-1"))
        log = open_event_log(path)
        check_events(log)
        assert log.manifest["fingerprint"]["layout"] == "movielens-100k"
        assert log.titles[:2] == ["Amélie (2001)", "item 20"]
        assert log.manifest["malformed_examples"] == [
            f"{path.with_name('u.item')}:2: expected 24 fields separated by '|', got 4: "
            "'20|Alien (1979)|1979|'"
        ]


@pytest.mark.parametrize("block_bytes", [table.BLOCK_BYTES, 64])
def test_malformed_lines_are_reported_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    fields = "expected 4 fields separated by '::' (user, item, rating, timestamp), got"
    whole = "expected a whole number of at most 18 digits, got"
    seconds = "expected a whole number of seconds from 0 to 99999999999, got"
    stars = "column 3, rating: expected a number from 0.5 to 5.0, got"
    bad = {
        b"1::2::3": f"{fields} 3",
        b"1::2::3::4::5": f"{fields} 5",
        b"1:2::3::4": f"{fields} 3",
        b"": f"{fields} 1",
        b"x::2::3::4": f"column 1, user: {whole} 'x'",
        b"1::-2::3::4": f"column 2, item: {whole} '-2'",
        b"1:::2::3::4": f"column 2, item: {whole} ':2'",
        b"1::2::good::4": f"{stars} 'good'",
        b"1::2::nan::4": f"{stars} 'nan'",
        b"1::2::6::4": f"{stars} '6'",
        b"1::2::3::4.5": f"column 4, timestamp: {seconds} '4.5'",
        b"1::2::3::1700000000000": f"column 4, timestamp: {seconds} '1700000000000'",
        b"1::2::3::9999999999999999999": f"column 4, timestamp: {seconds} '9999999999999999999'",
        b"\xff\x00::2::3::4": f"column 1, user: {whole} " + r"'\\xff\x00'",
        b"1::2::3::": f"column 4, timestamp: {seconds} ''",
        b"::::::": f"column 1, user: {whole} ''",
    }
    monkeypatch.setattr(table, "BLOCK_BYTES", block_bytes)
    path = write_dat(tmp_path, b"".join(line + b"\n" for line in bad))
    (tmp_path / "movies.dat").open("ab").write(b"11:Lost::x\n")
    log = open_event_log(path)
    check_events(log)
    assert log.manifest["malformed_lines"] == len(bad) + 1
    report = log.malformed_report.read_text().splitlines()
    assert len(report) == len(bad) + 1
    for number, (entry, reason) in enumerate(
        zip(report, bad.values(), strict=False), start=len(EVENTS) + 1
    ):
        assert entry.startswith(f"{path}:{number}: {reason}")
    assert report[-1].startswith(f"{tmp_path / 'movies.dat'}:4: expected 3 fields")

    described = log.describe().splitlines()
    assert described[2] == (
        f"Left out: {len(bad) + 1} malformed lines, all listed in {log.malformed_report}"
    )
    assert described[3:-1] == [f"  {entry}" for entry in report[:10]]
    assert described[-1] == f"  ... and {len(bad) + 1 - 10} more"
    # The skipped lines are also reported when the preprocessed form is read.
    assert open_event_log(path).describe() == log.describe()


def test_a_missing_last_line_break_is_fine(tmp_path: Path) -> None:
    path = write_dat(tmp_path, b"3::40::5::500")
    log = open_event_log(path)
    assert log.manifest["malformed_lines"] == 0
    assert log.offsets.tolist() == [0, 4, 8]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("ratings.txt", b"1::2::3::4\n", r"ends in .dat, .csv or .data .*ratings.txt"),
        (
            "ratings.csv",
            b"1,2,3,4\n",
            r"ratings.csv:1: expected the header 'userId,.*got '1,2,3,4'",
        ),
        ("ratings.dat", b"", r"no user with at least 3 events \(0 events, 0 malformed lines\)"),
        ("ratings.dat", b"1,2,3,4\n", r"1 malformed lines\)\n  .*ratings.dat:1: expected 4 fields"),
        ("ratings.dat", b"1::2::3::4\n", r"no user with at least 3 events \(1 events"),
    ],
)
def test_refuses_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        open_event_log(tmp_path / name)
    assert not list(tmp_path.glob("hstu_cache/*"))


def test_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"ratings\.dat"):
        open_event_log(tmp_path / "ratings.dat")


def test_preprocesses_once_and_again_when_the_source_changes(tmp_path: Path) -> None:
    path = write_dat(tmp_path)
    first = open_event_log(path)
    manifests = list(tmp_path.glob("hstu_cache/*/manifest.json"))
    written = manifests[0].stat().st_mtime_ns
    assert open_event_log(path).manifest == first.manifest
    assert manifests[0].stat().st_mtime_ns == written

    write_dat(tmp_path, b"3::40::5::500\n")
    second = open_event_log(path)
    assert second.num_events == first.num_events + 1
    assert second.manifest["content"] != first.manifest["content"]
    assert len(list(tmp_path.glob("hstu_cache/*"))) == 1
    assert first.items.tolist() == [0, 1, 2, 0, 1, 2, 3]  # the old form can still be read

    os.utime(tmp_path / "movies.dat", ns=(0, 0))
    assert open_event_log(path).manifest["content"] == second.manifest["content"]
    assert len(list(tmp_path.glob("hstu_cache/*"))) == 1


def test_the_order_of_equal_times(tmp_path: Path) -> None:
    """Events are sorted as by pandas: all by time with NumPy's default sort, then by user."""
    rng = np.random.default_rng(1)
    users, items, times = (rng.integers(most, size=4000) for most in (20, 400, 30))
    path = tmp_path / "ratings.dat"
    rows = zip(users.tolist(), items.tolist(), times.tolist(), strict=True)
    path.write_text("".join(f"{user + 1}::{item + 1}::3::{time}\n" for user, item, time in rows))
    found = {}
    for ties, kind in (("log", "stable"), ("quicksort", "quicksort")):
        order = np.argsort(times, kind=kind)
        order = order[np.argsort(users[order], kind="stable")]
        log = open_event_log(path, ties=ties)
        assert (log.item_ids[log.items] == items[order] + 1).all()
        assert (log.timestamps == times[order]).all()
        assert open_event_log(path, ties=ties).directory == log.directory
        found[ties] = log
    assert "ties" not in found["log"].manifest["fingerprint"]
    assert found["log"].directory != found["quicksort"].directory
    assert (found["log"].items != found["quicksort"].items).any()
    with pytest.raises(ValueError, match="ties: expected one of log, quicksort, got 'no'"):
        open_event_log(path, ties="no")


def test_rare_users_and_items_are_left_out_once(tmp_path: Path) -> None:
    pairs = [(user, item) for user in (1, 2, 3) for item in (10, 20, 30)]
    pairs += [(1, 40), (1, 50), (2, 40), (4, 10), (4, 60), (4, 70), (4, 80), (5, 50), (5, 50)]
    path = tmp_path / "ratings.dat"
    path.write_text("".join(f"{u}::{i}::4::{100 + n}\n" for n, (u, i) in enumerate(pairs)))

    def histories(min_user: int, min_item: int) -> dict[int, list[int]]:
        log = open_event_log(path, min_user_events=min_user, min_item_events=min_item)
        spans = zip(log.user_ids.tolist(), log.offsets, log.offsets[1:], strict=False)
        return {user: log.item_ids[log.items[a:b]].tolist() for user, a, b in spans}

    of_1, of_2, of_3 = [10, 20, 30, 40, 50], [10, 20, 30, 40], [10, 20, 30]
    assert histories(1, 1) == {1: of_1, 2: of_2, 3: of_3, 4: [10, 60, 70, 80]}
    # Item 50 has three events, two of them by user 5, who is left out; item 40 has two.
    assert histories(3, 3) == {1: [10, 20, 30, 50], 2: of_3, 3: of_3}
    assert histories(4, 1) == {1: of_1, 2: of_2, 4: [10, 60, 70, 80]}
    # Counts include all events, so the events of user 3 count for item 20, which has three.
    assert histories(4, 3) == {1: [10, 20, 30, 50], 2: of_3}
    log = open_event_log(path, min_user_events=4, min_item_events=3)
    assert (log.manifest["rare_events"], log.manifest["dropped_events"]) == (10, 1)
    assert (
        "Left out: 10 events of users with fewer than 4 events or on items with fewer than 3"
    ) in log.describe()
    assert "or on items" not in open_event_log(path).describe()
    assert len(list(tmp_path.glob("hstu_cache/*"))) == 4
    for name in ("min_user_events", "min_item_events"):
        with pytest.raises(ValueError, match=f"{name}: expected 1 or more, got 0"):
            open_event_log(path, **{name: 0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no user with at least 3 events"):
        open_event_log(path, min_user_events=9)


def test_an_interrupted_preprocessing_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_dat(tmp_path)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", fail)
        with pytest.raises(OSError, match="disk full"):
            open_event_log(path)
    assert not list(tmp_path.glob("hstu_cache/*"))
    check_events(open_event_log(path))


def test_cache_directory_may_be_shared(tmp_path: Path) -> None:
    logs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        extra = b"3::40::5::500\n" * (name == "b")
        path = write_dat(tmp_path / name, extra)
        logs.append(open_event_log(path, cache_dir=tmp_path / "cache"))
    assert [log.num_events for log in logs] == [7, 8]
    assert len(list((tmp_path / "cache").glob("*/manifest.json"))) == 2


def make_log(tmp_path: Path, counts: list[int]) -> EventLog:
    """Returns a log in which user u has `counts[u]` events; all times and items differ."""
    lines, event = [], 0
    for user, count in enumerate(counts):
        for _ in range(count):
            lines.append(f"{user}::{event}::3::{1000 + event}\n")
            event += 1
    (tmp_path / "ratings.dat").write_text("".join(lines))
    return open_event_log(tmp_path / "ratings.dat")


def test_leave_one_out(tmp_path: Path) -> None:
    counts = [3, 4, 5, 6, 17, 40]
    log = make_log(tmp_path, counts)
    max_seq_len = 5
    history = [log.items[a:b].tolist() for a, b in zip(log.offsets, log.offsets[1:], strict=False)]

    test = jagged_batch(log, held_out_windows(log, "test", max_seq_len))
    validation = jagged_batch(log, held_out_windows(log, "validation", max_seq_len))
    for batch, from_end in ((test, 1), (validation, 2)):
        assert batch.users.tolist() == list(range(len(counts)))
        offsets = batch.seq_offsets.tolist()
        for user, events in enumerate(history):
            rows = slice(offsets[user], offsets[user + 1])
            before = events[: len(events) - from_end]
            assert batch.items[rows].tolist() == before[-max_seq_len:]
            assert batch.target_items[offsets[user + 1] - 1] == events[-from_end]

    windows = training_windows(log, max_seq_len)
    assert windows.lengths.min() > 0
    assert windows.lengths.max() == max_seq_len
    batch = jagged_batch(log, windows)
    # The targets are exactly the training events, without the first of each user, once each.
    assert sorted(batch.target_items.tolist()) == sorted(
        item for events in history for item in events[1:-2]
    )
    assert ((batch.target_items - batch.items) == 1).all()
    assert ((batch.target_timestamps - batch.timestamps) == 1).all()
    assert (batch.timestamps == batch.items + 1000).all()
    assert np.bincount(windows.users, minlength=6).tolist() == [0, 1, 1, 1, 3, 8]

    # The latest sequence of each user that has one: all events but the last one, for training.
    for before, held_out in (("validation", 2), ("test", 1)):
        latest = training_windows(log, max_seq_len, before=before, latest_only=True)
        batch = jagged_batch(log, latest)
        expected = {
            user: events[-held_out - max_seq_len - 1 : -held_out] if len(events) > held_out else []
            for user, events in enumerate(history)
        }
        expected = {user: events for user, events in expected.items() if len(events) > 1}
        assert batch.users.tolist() == list(expected)
        offsets = batch.seq_offsets.tolist()
        for (first, end), events in zip(pairwise(offsets), expected.values(), strict=True):
            assert batch.items[first:end].tolist() == events[:-1]
            assert batch.target_items[first:end].tolist() == events[1:]


def test_batches_hold_each_sequence_once_an_epoch_and_keep_the_budget() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    lengths[7] = 1000  # longer than the budget, so its batch has no other sequence
    sampler = BatchSampler(lengths, tokens_per_batch=400, seed=1)
    orders = []
    for epoch in range(2):
        batches = [next(sampler) for _ in range(sampler.batches_per_epoch)]
        assert sampler.state_dict() == {"epoch": epoch, "batch": len(batches)}
        orders.append(np.concatenate(batches))
        assert sorted(orders[-1]) == list(range(500))
        assert all(lengths[b].sum() <= 400 or len(b) == 1 for b in batches)
        sums = np.array([lengths[batch].sum() for batch in batches])
        assert len(batches) < 1.25 * lengths.sum() / 400
        assert np.median(sums) > 300
        # The lengths within a batch differ little.
        spread = np.mean([np.ptp(lengths[batch]) for batch in batches])
        assert spread < 0.2 * np.ptp(np.delete(lengths, 7))
    assert (orders[0] != orders[1]).any()


def test_batches_of_a_number_of_sequences() -> None:
    """Each sequence occurs once per epoch, in random order regardless of its length."""
    lengths = np.sort(np.random.default_rng(0).integers(1, 100, 500))
    sampler = BatchSampler(lengths, None, 1, sequences_per_batch=64)
    orders = []
    for _ in range(2):
        batches = [next(sampler) for _ in range(sampler.batches_per_epoch)]
        assert [len(batch) for batch in batches] == [64] * 7 + [52]
        orders.append(np.concatenate(batches))
        assert sorted(orders[-1]) == list(range(500))
        assert abs(np.corrcoef(orders[-1], np.arange(500))[0, 1]) < 0.15
        assert min(np.ptp(lengths[batch]) for batch in batches) > 0.8 * np.ptp(lengths)
    assert (orders[0] != orders[1]).any()
    assert [len(x) for x in BatchSampler(lengths, None, 1, 500)._batches] == [500]
    assert [len(x) for x in BatchSampler(lengths, None, 1, 501)._batches] == [500]


@pytest.mark.parametrize("sizes", [(200, None), (None, 7)])
def test_sampler_resumes_at_any_batch(sizes: tuple[int | None, int | None]) -> None:
    tokens, sequences = sizes
    lengths = np.random.default_rng(0).integers(1, 50, 60)
    whole = BatchSampler(lengths, tokens, 3, sequences)
    expected = [next(whole).tolist() for _ in range(30)]
    assert whole.epoch >= 2
    for stop in (0, 1, 7, 8, 29):
        first = BatchSampler(lengths, tokens, 3, sequences)
        for _ in range(stop):
            next(first)
        second = BatchSampler(lengths, tokens, 3, sequences)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert [next(second).tolist() for _ in range(30 - stop)] == expected[stop:]
    other = BatchSampler(lengths, tokens, 4, sequences)
    assert [next(other).tolist() for _ in range(30)] != expected


def test_consecutive_batches_keep_the_order() -> None:
    lengths = np.array([3, 3, 3, 9, 1])
    batches = [batch.tolist() for batch in consecutive_batches(lengths, 6)]
    assert batches == [[0, 1], [2], [3], [4]]


def test_sampler_refuses() -> None:
    with pytest.raises(ValueError, match="lengths: expected at least one sequence"):
        BatchSampler(np.array([], dtype=np.int64), 10, seed=0)
    with pytest.raises(ValueError, match="tokens_per_batch: expected a positive number, got 0"):
        BatchSampler(np.array([1]), 0, seed=0)
    with pytest.raises(ValueError, match="sequences_per_batch: expected a positive number, got -1"):
        BatchSampler(np.array([1]), None, 0, -1)
    for sizes in ((None, None), (8, 8)):
        with pytest.raises(ValueError, match=rf"expected one of them and None, got {sizes[0]} and"):
            BatchSampler(np.array([1]), sizes[0], 0, sizes[1])


def test_synthetic_data_are_movielens_shaped_and_repeatable(tmp_path: Path) -> None:
    paths = [
        write_synthetic_movielens(tmp_path / name, 60, 200, 40, seed)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert paths[0].read_bytes() == paths[1].read_bytes() != paths[2].read_bytes()
    log = open_event_log(paths[0])
    assert log.manifest["malformed_lines"] == 0
    assert log.num_users == 60
    assert np.diff(log.offsets).min() >= 20
    assert 30 < np.diff(log.offsets).mean() < 50
    assert all(title.endswith(")") for title in log.titles)
    for start, end in zip(log.offsets, log.offsets[1:], strict=False):
        assert len(set(log.items[start:end].tolist())) == end - start
        assert (np.diff(log.timestamps[start:end]) > 0).all()


def test_synthetic_data_refuse(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_items: expected 1 to"):
        write_synthetic_movielens(tmp_path, num_items=10_000)
    with pytest.raises(ValueError, match="mean_events: expected 20 to a quarter"):
        write_synthetic_movielens(tmp_path, num_items=100)


def test_random_events_are_as_many_as_wanted(tmp_path: Path) -> None:
    size = {"num_users": 70, "num_items": 50, "num_events": 3001}
    paths = [
        write_synthetic_scale(tmp_path / name, **size, seed=seed)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert paths[0].read_bytes() == paths[1].read_bytes() != paths[2].read_bytes()
    log = open_event_log(paths[0])
    assert log.manifest["fingerprint"]["layout"] == "movielens-csv"
    assert log.manifest["malformed_lines"] == 0
    assert (log.num_users, log.num_items, log.num_events) == (70, 50, 3001)
    assert np.diff(log.offsets).min() >= 20
    assert np.bincount(log.items).max() > 3 * 3001 / 50
    with pytest.raises(ValueError, match="num_events: expected at least 20 for each of 70 users"):
        write_synthetic_scale(tmp_path, 70, 50, 1399)
