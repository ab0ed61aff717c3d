"""What the benchmark of the paged cache counts and compares, without a GPU."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import host_tier, paged, plots, readme
from benchmarks.report import read_results, write_records
from hstu_attn import Mask
from hstu_attn.cached import StepTensors
from hstu_attn.mask import dense_mask
from hstu_attn.serving import CachedRows
from hstu_attn.serving.host_tier import HostTier
from hstu_attn.testing import assert_matches, make_paged_batch


@pytest.mark.parametrize(
    "request_",
    [
        paged.Request(64, history=300, new=40, candidates=70, batch=2),
        paged.Request(64, history=300, new=0, candidates=1, batch=1, page_size=32),
        paged.Request(64, history=50, new=50, candidates=8, batch=3),
    ],
    ids=["usual", "scoring", "nothing cached"],
)
def test_flops_are_those_of_the_pairs_that_see_each_other(request_):
    r = request_
    visible = dense_mask(
        Mask.causal(num_targets=torch.tensor([r.candidates])),
        r.new + r.candidates,
        r.history + r.candidates,
        num_targets=r.candidates,
    )
    assert r.flops == 4 * r.batch * int(visible.sum()) * paged.HEADS * r.head_dim


def test_bytes_count_pages_rows_and_candidates_once():
    r = paged.Request(128, history=256, new=64, candidates=32, batch=2)
    row = 4 * 128 * 2
    pages = 2 * 2 * 256
    q_and_out = 2 * 2 * (64 + 32)
    k_and_v = 2 * 2 * 32
    assert r.bytes == row * (pages + q_and_out + k_and_v)
    assert r.needs_us(matmul_tflops=1e9, copy_tbps=1.0) == pytest.approx(r.bytes / 1e6)
    assert r.needs_us(matmul_tflops=1.0, copy_tbps=1e9) == pytest.approx(r.flops / 1e6)


def test_gathered_pages_give_the_same_attention():
    r = paged.Request(32, history=50, new=7, candidates=9, batch=3, page_size=16)
    inputs = make_paged_batch(
        [r.cached] * 3, [r.new] * 3, [r.candidates] * 3, page_size=16, heads=paged.HEADS
    )
    exact = paged.paged(inputs)
    assert_matches("gather", paged.gather(inputs, r), exact.double(), exact)


def test_cases_vary_one_thing():
    cases = paged.requests([64, 256])
    assert len(set(cases)) == len(cases)
    for dim in (64, 256):
        of_dim = [r for r in cases if r.head_dim == dim]
        assert {r.batch for r in of_dim} == {1, 8, 64}
        assert {r.history for r in of_dim} == {256, 1024, 4096, 16384}
        assert {r.new for r in of_dim} >= {0, 128, 256}
        assert {r.candidates for r in of_dim} == {32, 256, 1024}
        assert {r.page_size for r in of_dim} == {16, 32, 64, 128}
        assert any(r.cached == 0 for r in of_dim)


def test_records_become_a_plot_and_a_table(tmp_path):
    origin = {
        "gpu": "a GPU",
        "torch": "2.13",
        "date": "2026-01-01",
        "commit": "abc",
        "matmul_tflops": 800.0,
        "copy_tbps": 4.2,
        "append_tbps": 3.9,
        "command": "python -m benchmarks.paged",
    }
    records = []
    for request in paged.requests([64])[:4]:
        for impl, us in (("graph", 40.0), ("paged", 45.0), ("gather", 300.0), ("recompute", 200.0)):
            case = {**asdict(request), "impl": impl, "us": us, "needs_us": 20.0}
            records.append({**origin, **case})
    plots.paged(records, tmp_path / "paged.png")
    assert (tmp_path / "paged.png").stat().st_size > 1000
    (tmp_path / "gpu").mkdir()
    write_records(tmp_path / "gpu/paged.json", records)
    lines = readme.paged_tables(tmp_path)
    rows = [line for line in lines if line.startswith("| 64 |")]
    assert len(rows) == 4
    assert rows[1].startswith("| 64 | 4096 | 128 | 256 | 8 | 128 | 20 | 40 | 45 | - | 300 | 200 |")
    assert rows[1].endswith("| 0.50 |")


# ---------------------------------------------------------------------------------------------
# Users who return from host memory
# ---------------------------------------------------------------------------------------------

RETURNING = host_tier.Case(
    layers=2,
    width=64,
    heads=2,
    head_dim=64,
    history=40,
    new=5,
    candidates=7,
    batch=3,
    page_size=16,
)
BYTES = 3 * 3 * 16 * (2 * 2) * (2 * 64) * 2  # three pages a user; layers, keys and values; bf16


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_returning_users_are_measured(device):
    record = host_tier.measure(RETURNING, device, rounds=3)
    assert record["bytes_from_host"] == record["bytes_to_host"] == RETURNING.bytes == BYTES
    assert record["host_hits"] == RETURNING.batch
    us = {name: record[f"{name}_us"] for name in ("resident", "returning", "copies", "recompute")}
    assert min(us.values()) > 0
    assert record["fastest_returning_us"] <= us["returning"] <= record["with_evictions_us"]
    assert record["from_host_gbps"] == pytest.approx(BYTES / us["copies"] / 1e3, 1e-2)
    hidden = 1 - (us["returning"] - us["resident"]) / us["copies"]
    assert record["hidden"] == pytest.approx(hidden, abs=1e-2)
    assert 0 < record["hidden_at_most"] <= 1


def test_returning_users_get_what_residents_get():
    """Also what they would get of a copy of their pages, in no cache."""
    users = host_tier.Users(RETURNING, "cpu")
    first = users.who_are_away()
    outputs = [users.score(first), users.score(first)]
    for _ in range(2):
        users.score(users.who_are_away())
    assert users.cache.stats().host_hits == 3 * 3
    outputs.append(users.score(first))
    assert users.cache.stats().host_hits == 4 * 3
    with users.cache.step(first, [0] * 3) as step:
        pages = users.cache.kv_cache[:, step.page_ids.long()].clone()
        tables = (step.page_offsets, torch.arange(9, dtype=torch.int32), step.last_page_lens)
        copied = StepTensors(pages, *tables, step.cached_lens - 5)
    rows = CachedRows(copied, torch.arange(4) * 12, 12, 47, torch.full((3,), 7))
    outputs.append(users._stack.forward_cached(users._x, rows))
    for output in outputs:
        assert output.shape == (3 * (5 + 7), 64)
        assert torch.equal(output, outputs[0])
    assert users.recompute().shape == (3 * (40 + 7), 64)


def test_rows_that_do_not_come_back_are_caught(monkeypatch):
    monkeypatch.setattr(HostTier, "_bring_back", lambda self, host_ids, device_ids: [])
    with pytest.raises(AssertionError, match=r"other outputs of range\(.*\) than before"):
        host_tier.measure(RETURNING, "cpu", rounds=1)


def test_returning_users_become_tables(tmp_path):
    times = {"resident": 2400.0, "returning": 19800.0, "with_evictions": 39000.0}
    record = {
        "group": host_tier.GROUP,
        **asdict(RETURNING),
        **{f"{name}_us": us for name, us in times.items()},
        "copies_us": 19500.0,
        "recompute_us": 13000.0,
        "from_host_gbps": 55.06,
        "to_host_gbps": 54.2,
        "hidden": 0.108,
        "hidden_at_most": 0.123,
    }
    figures = ["40", "3", "2.40", "19.80", "39.00", "19.50", "55.1", "54.2", "0.11 of 0.12"]
    header, row = host_tier.table([record])
    assert row.split() == [*" ".join(figures).split(), "13.00"]
    assert header.split("  ")[-1] == "recompute ms"
    origin = {"gpu": "a GPU", "torch": "2.13", "date": "2026-01-01", "commit": "a", "command": "b"}
    older = {**origin, "impl": "cached", "us": 2400.0}
    (tmp_path / "gpu").mkdir()
    write_records(tmp_path / "gpu/paged-stack.json", [older])
    assert readme.paged_tables(tmp_path) == []
    write_records(tmp_path / "gpu/paged-stack.json", [older, {**origin, **record}])
    lines = readme.paged_tables(tmp_path)
    assert lines[-1] == "| 40 | 3 | 2.4 | 19.8 | 39 | 19.5 | 55.1 | 54.2 | 0.11 of 0.12 | 13 |"
    assert "in a step of 2 layers of 2 heads of 64" in lines[1]


def test_both_kinds_of_records_are_in_one_file(monkeypatch, tmp_path, capsys):
    small = paged.Request(64, history=40, new=5, candidates=7, batch=2, page_size=16)
    sizes = {"HEADS": 2, "LAYERS": 2, "WIDTH": 64, "RETURNING": (small, replace(small, batch=1))}
    for name, value in sizes.items():
        monkeypatch.setattr(paged, name, value)
    monkeypatch.setattr(paged, "measure_stack", lambda gpu, rounds: {"cached": [2.0, 3.0, 1.0]})
    path = tmp_path / "paged-stack.json"
    options = argparse.Namespace(rounds=1, json=path)
    paged.run_stack(SimpleNamespace(device="cpu"), options, {"gpu": "a GPU"})
    cached, *returning = read_results(path)
    assert (cached["impl"], cached["us"], cached["fastest_us"]) == ("cached", 2000, 1000)
    assert [record["batch"] for record in returning] == [2, 1]
    for record in returning:
        assert (record["gpu"], record["group"]) == ("a GPU", host_tier.GROUP)
        assert record["bytes_from_host"] == record["batch"] * BYTES // 3
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in printed[-2:]] == [["40", "2"], ["40", "1"]]


def test_the_stack_returns_with_its_own_sizes():
    case = paged.stack_case(paged.STACK)
    assert (case.layers, case.width, case.heads, case.head_dim) == (8, 1024, 4, 256)
    assert case.bytes == 2**30
    assert {paged.stack_case(request).bytes for request in paged.RETURNING} == {2**30}


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="expected an NVIDIA GPU"):
        paged.main([])
