"""The GPU benchmarks as far as they do not need a GPU: counts, records, tables, plots, profiles."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from benchmarks import attention, columns, layer, plots, readme, training_step
from benchmarks.gpu import Gpu
from benchmarks.report import read_results
from benchmarks.workloads import HEAD_DIMS, Workload, workloads
from hstu_attn import hstu_attention
from hstu_attn.mask import dense_mask

FIELDS = {
    *("gpu", "date", "commit", "torch", "cuda", "case", "head_dim", "dtype", "pass", "impl"),
    *("ms", "tflops", "share_of_matmul", "peak_memory_bytes", "host_us", "error", "command"),
}
SMALL = Workload(2, 5, 40, 2, 16, torch.float32, mask_name="context + targets")


class FakeGpu(Gpu):
    """The CPU in the place of a GPU."""

    device = "cpu"

    def __init__(self) -> None:
        self.name = "fake"

    def milliseconds(self, call):
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)

    def host_microseconds(self, call):
        return 1e3 * self.milliseconds(call)

    def peak_bytes(self, call):
        call()
        return 2**20

    def held_bytes(self, call):
        call()
        return 2**19

    def release(self):
        pass

    def matmul(self):
        return lambda: time.sleep(1e-4)

    def limits(self, rounds):
        return {"matmul_tflops": 0.5, "copy_tbps": 0.01}


class Broken(columns.Column):
    """Right on the small batch, and then it fails."""

    def prepare(self, workload, batch):
        raise RuntimeError("no such kernel\nand more")


@pytest.fixture
def small_cases(monkeypatch):
    """Tiny cases of every kind in the place of the real ones."""
    cases = [
        replace(SMALL, mask_name="causal", shortest=40),
        SMALL,
        replace(SMALL, mask_name="causal", shortest=40, group="rab", bias_heads=2),
        *(replace(SMALL, group="masks", mask_name=name) for name in ("causal", "local", "func")),
        replace(SMALL, group="host", passes=("host", "host with autograd")),
    ]
    monkeypatch.setattr(attention, "workloads", lambda head_dims: cases)


@pytest.fixture
def broken(monkeypatch):
    """The column "triton" is broken, and so is "hstu_attn_sm99"; "cudnn" is not installed."""
    make = columns.make

    def make_or_break(name):
        if name == "cudnn":
            raise ImportError("cudnn is missing")
        if name in ("triton", "hstu_attn_sm99"):
            return Broken(name, hstu_attention)
        return make(name)

    monkeypatch.setattr(columns, "make", make_or_break)


def run(path, *arguments):
    return attention.main(["--rounds", "2", "--json", str(path), *arguments], FakeGpu())


def test_a_run_from_end_to_end(small_cases, tmp_path, capsys):
    file, folder = tmp_path / "results.json", tmp_path / "plots"
    arguments = ["--impls", "hstu_attn", "flash2", "--commit", "abc", "--plot", str(folder)]
    status = run(file, *arguments)
    printed = capsys.readouterr().out
    assert status == 0, printed
    records = read_results(file)
    assert {r["group"] for r in records} == {"table", "rab", "masks", "host"}
    assert {r["commit"] for r in records} == {"abc"}
    for record in records:
        assert record.keys() >= FIELDS
        assert not record["error"]
        if record["group"] == "host":
            assert record["host_us"] > 0
            assert record["ms"] is None
        else:
            assert record["tflops"] == pytest.approx(record["flops"] / record["ms"] / 1e9, 1e-3)
            assert record["share_of_matmul"] == pytest.approx(record["tflops"] / 0.5, 1e-3)
            assert record["peak_memory_bytes"] == 2**20
        assert (record["executed_tiles"] is not None) == (record["group"] == "masks")
    dense = [r for r in records if r["impl"] == "flash2"]
    assert {r["case"] for r in dense} == {"2 x 40"}
    assert {path.name for path in folder.iterdir()} == {"roofline.png", "forward-backward-d16.png"}
    assert "host with autograd" in printed


def test_what_fails_is_told_and_the_rest_goes_on(small_cases, broken, tmp_path, capsys):
    file = tmp_path / "results.json"
    assert run(file, "--impls", "hstu_attn", "triton", "cudnn") == 0
    printed = capsys.readouterr().out
    assert "MISSING  cudnn: ImportError: cudnn is missing" in printed
    assert "FAILED  triton: RuntimeError: no such kernel" in printed
    assert "FAILED: cudnn (1), triton (" in printed
    records = read_results(file)
    assert {r["impl"] for r in records if r["error"]} == {"triton"}
    assert all(r["ms"] is None for r in records if r["error"])
    assert run(file, "--impls", "hstu_attn_sm99", "hstu_attn", "--cases", "host") == 1


def test_a_wrong_result_is_not_timed(small_cases, monkeypatch, tmp_path):
    wrong = columns.Column("hstu_attn", lambda *x, **options: hstu_attention(*x, **options) * 1.01)
    monkeypatch.setattr(columns, "make", lambda name: wrong)
    assert run(tmp_path / "results.json", "--impls", "hstu_attn", "--cases", "table") == 1
    records = read_results(tmp_path / "results.json")
    assert all("AssertionError: out: error" in r["error"] for r in records)


@pytest.mark.parametrize("module", [attention, layer, training_step])
def test_without_a_gpu_it_says_so(module, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="expected an NVIDIA GPU and a CUDA build of torch"):
        module.main([])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "nothing"], "--cases: expected groups or parts of names"),
        (["--plot", "folder"], "--plot: expected --json beside it"),
    ],
)
def test_options_that_make_no_sense(arguments, message, capsys):
    with pytest.raises(SystemExit):
        attention.main(arguments, FakeGpu())
    assert message in capsys.readouterr().err


def test_an_unknown_column():
    with pytest.raises(ValueError, match="impls: expected hstu_attn, hstu_attn_smNN, triton"):
        columns.make("unknown")


def test_the_architecture_is_forced_in_its_column_alone(monkeypatch):
    monkeypatch.delenv(columns.ARCH_VARIABLE, raising=False)
    with columns.make("hstu_attn_sm80").active():
        assert columns.os.environ[columns.ARCH_VARIABLE] == "80"
    with columns.make("hstu_attn").active():
        assert columns.ARCH_VARIABLE not in columns.os.environ


def test_the_table_has_its_rows():
    table = [w for w in workloads() if w.group == "table"]
    assert len(table) == 18
    assert {w.head_dim for w in table} == set(HEAD_DIMS)
    jagged = next(w for w in table if not w.is_dense_causal)
    assert jagged.name == "32 x 1024..4096, context + targets"
    mask = jagged.mask(jagged.lengths)
    assert mask.num_contexts.tolist() == [8] * 32
    assert 0 <= mask.num_targets.min() < mask.num_targets.max() <= 64


def test_flops_of_plain_causal_are_half_of_all():
    workload = next(w for w in workloads((64,)) if w.name == "4 x 8192")
    assert workload.flops(backward=False) == 4 * 4 * 8192**2 * 4 * 64 / 2
    assert workload.flops(backward=True) == 2.5 * workload.flops(backward=False)


@pytest.mark.parametrize("name", ["context", "targets", "context + targets", "local", "row spans"])
def test_pairs_and_tiles_are_those_of_the_mask(name):
    workload = replace(SMALL, mask_name=name)
    mask, lengths = workload.mask(workload.lengths), workload.lengths
    pairs, tiles, row = 0, 0, 0
    for n, length in enumerate(lengths):
        counts = {
            key: 0 if values is None else int(values[n])
            for key, values in mask.__dict__.items()
            if key in ("num_contexts", "num_targets")
        }
        visible = dense_mask(mask, length, length, first_row=row, **counts)
        pairs += int(visible.sum())
        for first_q in range(0, length, 8):
            rows = visible[first_q : first_q + 8]
            tiles += sum(bool(rows[:, k : k + 16].any()) for k in range(0, length, 16))
        row += length
    assert workload.flops(backward=False) == 4 * pairs * 2 * 16
    assert workload.executed_tiles(8, 16) == 2 * tiles


def test_bytes_that_have_to_be_moved():
    workload = Workload(2, 16, 16, 3, 8, torch.bfloat16, bias_heads=1, bias_gradient=True)
    rows, bias = 2 * 32 * 3 * 8, 2 * 2 * 16 * 16
    assert workload.least_bytes(backward=False) == 4 * rows + bias
    assert workload.least_bytes(backward=True) == 7 * rows + 2 * bias


def record(impl, direction, ms, **fields):
    return {
        "gpu": "NVIDIA H200",
        "date": "2026-01-02",
        "commit": "abc",
        "torch": "2.11.0",
        "cuda": "13.0",
        "triton": "3.6.0",
        "command": "a command",
        "matmul_tflops": 782.0,
        "copy_tbps": 4.3,
        "case": "4 x 8192",
        "group": "table",
        "head_dim": 64,
        "ms": ms,
        "dtype": "bfloat16",
        "pass": direction,
        "impl": impl,
        "flops": 1e12,
        "error": "",
        "least_bytes": 1e9,
        "executed_tiles": None,
        "peak_memory_bytes": 2**21,
        "tflops": ms and 1e3 / ms,
        "share_of_matmul": ms and 1e3 / ms / 782,
        "host_us": None,
        **fields,
    }


RECORDS = [
    record("hstu_attn", "forward", 2.0),
    record("triton", "forward", 4.0),
    record("flash2", "forward", 3.0),
    record("hstu_attn", "backward", 5.0),
    record("triton", "backward", None, error="RuntimeError: no"),
]


def test_records_become_rows_of_text():
    rows = attention.table_rows(RECORDS)
    assert rows[0] == [
        *("4 x 8192", "64", "forward", "hstu_attn", "2.000", "500.0", "0.64", "2.00", "1.50"),
        *("2.0", "-", "-"),
    ]
    assert rows[3][7:9] == ["-", "-"]
    assert rows[4][4] == "FAILED"
    masks = [
        record("hstu_attn", "forward", 2.0, group="masks", executed_tiles=100),
        record("hstu_attn", "forward", 1.1, group="masks", executed_tiles=50, case="local"),
    ]
    assert [row[-1] for row in attention.table_rows(masks)] == ["1.00", "0.91"]


def test_records_become_a_table_of_the_readme(tmp_path):
    (tmp_path / "h200").mkdir()
    attention.write_records(tmp_path / "h200/some.json", RECORDS)
    lines = readme.gpu_tables(tmp_path)
    assert lines[0].startswith("NVIDIA H200, torch 2.11.0, CUDA 13.0, Triton 3.6.0, 2026-01-02")
    assert lines[2] == (
        "| sequences x lengths | D | hstu_attn | triton | flash2 | hstu_attn over triton "
        "| hstu_attn over flash2 |"
    )
    assert lines[4] == (
        "| 4 x 8192 | 64 | 0.64 / 0.26 | 0.32 / failed | 0.43 / - | 2.00 / - | 1.50 / - |"
    )
    assert lines[-1] == "`a command`"


def test_plots_of_a_stored_file(tmp_path):
    attention.write_records(tmp_path / "some.json", RECORDS)
    plots.main([str(tmp_path / "some.json"), str(tmp_path / "first")])
    plots.main([str(tmp_path / "some.json"), str(tmp_path / "second")])
    for name in ("roofline.png", "forward-backward-d64.png"):
        drawn = [(tmp_path / folder / name).read_bytes() for folder in ("first", "second")]
        assert drawn[0].startswith(b"\x89PNG")
        assert drawn[0] == drawn[1]


# ---------------------------------------------------------------------------------------------
# The training step
# ---------------------------------------------------------------------------------------------

TINY = [
    *("--batch", "2", "--length", "24", "--heads", "2", "--head-dim", "8", "--items", "50"),
    *("--layers", "2", "--negatives", "8", "--rounds", "3", "--commit", "abc"),
]


def train(path, *arguments):
    return training_step.main([*TINY, "--json", str(path), *arguments], FakeGpu())


def kernel(start, duration, operator=0, name="other"):
    """As in a Chrome trace; times are in microseconds."""
    arguments = {"External id": operator, "correlation": 1}
    return {"cat": "kernel", "name": name, "ts": start, "dur": duration, "args": arguments}


@pytest.fixture
def made_up_kernels(monkeypatch):
    """For each operator of a profile of the CPU, what a GPU might have run."""
    read = training_step.read_events
    made = {
        "hstu_attn::hstu_varlen_fwd": [
            (0, 300, "void hstu::(anonymous namespace)::prepare<true>(hstu::Params)"),
            (200, 200, "void hstu::sm90::forward<hstu::Traits<64> >(int)"),
        ],
        "hstu_attn::hstu_varlen_bwd": [(0, 700, "hstu::backward")],
        "aten::mm": [(0, 50, "gemm")],
        "aten::randint": [(0, 930, "at::cuda::(anonymous namespace)::spin_kernel(long)")],
    }

    def with_kernels(path):
        events = read(path)
        for n, event in enumerate(events.copy()):
            events += [
                kernel(1000 * n + start, duration, event["args"]["External id"], name)
                for start, duration, name in made.get(event["name"], [])
            ]
        return events

    monkeypatch.setattr(training_step, "read_events", with_kernels)


def test_a_training_step_from_end_to_end(made_up_kernels, tmp_path, capsys):
    file, trace = tmp_path / "gpu/results.json", tmp_path / "traces/gpu/step.json"
    file.parent.mkdir()
    status = train(file, "--impls", "hstu_attn", "--trace", str(trace))
    printed = capsys.readouterr().out
    assert status == 0, printed
    records = {r["pass"]: r for r in read_results(file)}
    assert list(records) == ["attention forward", "attention backward", "step"]
    step = records["step"]["ms"]
    for r in records.values():
        assert r.keys() >= FIELDS - {"tflops", "share_of_matmul", "peak_memory_bytes", "host_us",
                                     "error"}  # fmt: skip
        assert r["share_of_step"] == pytest.approx(r["ms"] / step, 2e-3)
        assert (r["case"], r["dtype"], r["dim"]) == ("2 x 24", "bfloat16", 16)
    forward, backward = (records[f"attention {name}"] for name in ("forward", "backward"))
    assert forward["ms"] == pytest.approx(2 * 0.4)  # two layers; the kernels overlap
    assert forward["kernels"] == {"hstu::prepare": 0.6, "hstu::sm90::forward": 0.4}
    assert backward["ms"] == pytest.approx(2 * 0.7)
    assert backward["kernels"] == {"hstu::backward": 1.4}
    products = records["step"]["busy_ms"] - forward["ms"] - backward["ms"]
    assert products >= 3 * 4 * 0.05 - 1e-3  # of the layers' linears, at least
    assert products == pytest.approx(0.05 * round(products / 0.05), abs=1e-3)
    row = printed.splitlines()[-1].split()
    assert row[0] == "hstu_attn"
    assert sum(map(float, row[1:6:2])) == pytest.approx(float(row[7]), abs=2e-3)
    assert sum(map(float, row[2:7:2])) == pytest.approx(1, abs=2e-3)
    assert [path.name for path in trace.parent.iterdir()] == ["step-hstu_attn.json"]
    assert readme.gpu_tables(tmp_path) == []
    table = readme.step_tables(tmp_path)
    assert table[2].startswith("| 2 x 24 | 2 of 2 x 8 | hstu_attn | 0.8 | 1.4 | ")
    assert "commit abc" in table[-1]


def test_an_implementation_that_fails_leaves_the_others(
    made_up_kernels, broken, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(Broken, "check", Broken.prepare)
    assert train(tmp_path / "results.json", "--impls", "hstu_attn", "triton", "cudnn") == 0
    printed = capsys.readouterr().out
    assert "FAILED  cudnn: ImportError: cudnn is missing" in printed
    assert "FAILED  triton: RuntimeError: no such kernel" in printed
    assert {r["impl"] for r in read_results(tmp_path / "results.json")} == {"hstu_attn"}
    assert train(tmp_path / "results.json", "--impls", "hstu_attn_sm99") == 1


def test_a_profile_without_kernels_is_an_error(tmp_path, capsys):
    assert train(tmp_path / "results.json", "--impls", "hstu_attn") == 1
    assert "expected kernels of every call of _Attention, got those of 0 of 6 calls" in (
        capsys.readouterr().out
    )


def test_layers_call_the_attention_of_the_column():
    shapes = []

    def spy(q, k, v, **options):
        shapes.append(tuple(q.shape))
        return hstu_attention(q, k, v, **options)

    options = training_step.parse(TINY)
    entrant = training_step.Entrant(columns.Column("spy", spy))
    entrant.begin(options, FakeGpu())
    assert shapes == training_step.WARM_UP * options.layers * [(48, 2, 8)]
    training, same = (training_step.Training(options, "cpu") for _ in range(2))
    before = [parameter.clone() for parameter in training.model.parameters()]
    assert training.step().isfinite()
    for old, new in zip(before, training.model.parameters(), strict=True):
        assert not torch.equal(old, new)
    for parameter, other in zip(before, same.model.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_kernels_belong_to_the_function_that_launched_them():
    def operator(name, start, duration, number, thread=1):
        return {
            "cat": "cpu_op",
            "name": name,
            "ts": start,
            "dur": duration,
            "tid": thread,
            "args": {"External id": number},
        }

    events = [
        operator("_Attention", 10, 20, 1),
        operator("aten::empty", 12, 3, 2),
        operator("aten::mul", 15, 5, 3, thread=2),
        operator("aten::add", 30, 5, 4),
        kernel(100, 10, 1),
        kernel(105, 10, 2),
        kernel(200, 10, 3),
        kernel(300, 10, 4),
        {**kernel(130, 5, 2), "cat": "gpu_memset"},
        {**kernel(140, 5, 1), "cat": "gpu_user_annotation"},
        {"cat": "kernel", "name": "unknown", "ts": 150, "dur": 5, "args": {}},
    ]
    found = training_step.kernels_of("_Attention", events)
    assert sorted(event["ts"] for event in found) == [100, 105, 130]
    assert training_step.busy_ms(found) == pytest.approx(0.020)
    with pytest.raises(RuntimeError, match="got those of 0 of 0 calls"):
        training_step.kernels_of("_AttentionBackward", events)


def test_the_step_is_that_of_the_example():
    import train_retrieval

    ours, theirs = training_step.parse([]), train_retrieval.parse_arguments([])
    for name in ("dim", "heads", "layers", "dropout", "negatives", "temperature", "clip_norm"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.dim == ours.heads * ours.head_dim
    first = theirs.learning_rate / theirs.warmup_steps
    assert first == pytest.approx(training_step.LEARNING_RATE)
    assert ours.length == 4096
