"""What the benchmark of the paged cache counts and compares, without a GPU."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from benchmarks import paged, plots, readme
from benchmarks.report import write_records
from hstu_attn import Mask
from hstu_attn.mask import dense_mask
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


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="expected an NVIDIA GPU"):
        paged.main([])
