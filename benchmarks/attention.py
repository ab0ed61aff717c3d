"""The kernels for GPUs beside Triton and softmax attention.

    python -m benchmarks.attention --quick
    python -m benchmarks.attention --json attention.json --plot plots
    python -m benchmarks.attention --cases masks "4 x 8192" --head-dims 128

The cases are those of workloads.py, the implementations those of columns.py. Each implementation of
HSTU attention is first held to the tolerance of the tests, on a small batch of the same kind. Then
rounds are interleaved (in each, every implementation runs once, on the next of several input sets,
which together are too large for the caches wherever a batch is large), and the median counts.

Times are those of the GPU, by events, of the forward without gradients and of the backward alone.
FLOPs are counted from the pairs of a row and a key that it sees, half of all for plain causal; the
backward counts 2.5 times the forward. "share" is that of a product of two 8192 x 8192 matrices in
bf16, measured in the same run. "us host" is what a call takes of the host, with nothing to wait
for. Where something fails, the table says so, the rest goes on, and if it was this library that
failed the exit status is 1.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

TILE = (128, 128)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write the results to FILE, after every case")
    add("--plot", type=Path, metavar="DIR", help="draw them into DIR; needs --json")
    add("--cases", nargs="+", default=[], metavar="TEXT", help="groups (table, rab, "
        "deterministic, masks, latency, host) or parts of cases' names (default: all)")  # fmt: skip
    add("--head-dims", nargs="+", type=int, metavar="D", help="(default 64 128 256)")
    add("--impls", nargs="+", metavar="NAME", help="hstu_attn, hstu_attn_smNN, triton, flash2, "
        "cudnn (default: all, with the architecture of --arch)")  # fmt: skip
    add("--arch", default="80", help="architecture of the second column (default 80)")
    add("--rounds", type=int, default=21, help="rounds of each case (default 21)")
    add("--tile", nargs=2, type=int, default=TILE, metavar=("ROWS", "KEYS"),
        help="tile by which the executed tiles of masks are counted (default 128 128)")  # fmt: skip
    add("--quick", action="store_true", help="only two cases of the table, D 64 and 128")
    add("--commit", help="what to record as the commit, where there is no repository")
    return parser


if __name__ == "__main__":
    _parser().parse_args()  # --help or a wrong option ends here, before torch is imported

import torch

from hstu_attn.testing import Batch

from . import columns, plots
from .columns import Call, Column
from .gpu import Gpu
from .report import gpu_software, rounded, text_table, write_records
from .workloads import HEAD_DIMS, QUICK, Workload, workloads

__all__ = ["GpuResult", "explain", "main", "measure"]

INPUT_SETS = 3
WARM_UP = 2
YARDSTICKS = ("triton", "flash2")
T = TypeVar("T")


@dataclass(frozen=True)
class GpuResult:
    """One implementation of one pass of one case."""

    case: str
    group: str
    heads: int
    head_dim: int
    dtype: str
    direction: str
    impl: str
    flops: float
    least_bytes: int
    executed_tiles: int | None = None
    ms: float | None = None  # median of the rounds
    fastest_ms: float | None = None
    rounds: int = 0
    tflops: float | None = None
    share_of_matmul: float | None = None
    peak_memory_bytes: int | None = None
    host_us: float | None = None
    error: str = ""

    @classmethod
    def of(
        cls, workload: Workload, direction: str, impl: str, tiles: int | None, **fields: Any
    ) -> GpuResult:
        """With what the workload says."""
        return cls(
            case=workload.name,
            group=workload.group,
            heads=workload.heads,
            head_dim=workload.head_dim,
            dtype=workload.dtype_name,
            direction=direction,
            impl=impl,
            flops=workload.flops(direction == "backward"),
            least_bytes=workload.least_bytes(direction == "backward"),
            executed_tiles=tiles,
            **fields,
        )

    def record(self) -> dict[str, Any]:
        """For a file; "pass" is not a name that Python allows."""
        return {"pass" if k == "direction" else k: v for k, v in asdict(self).items()}


# ---------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------


@dataclass
class Entrant:
    """A column in one case: what it runs, how long that took, and why it is out of the race."""

    column: Column
    calls: list[Call] = field(default_factory=list)
    runs: list[Callable[[], Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    peak: int | None = None
    error: str = ""

    def attempt(self, action: Callable[..., T], *arguments: Any) -> T | None:
        """The action's result; None if it fails, with a report, and from then on."""
        if self.error:
            return None
        try:
            with self.column.active():
                return action(*arguments)
        except Exception as failure:
            self.error = explain(failure)
            traceback.print_exc()
            return None

    def prepare(self, workload: Workload, batches: Sequence[Batch]) -> None:
        """Make the calls, one for each input set."""
        self.calls = [self.column.prepare(workload, batch) for batch in batches]

    def enter(self, direction: str, gpu: Gpu) -> None:
        """Make what is timed of a pass, run it for the first time, and see what memory it needs.

        The first run may tune and compile; it is also what the graphs of the backward are made by.
        """
        self.times, self.peak = [], None
        self.runs = [_run_of(direction, call) for call in self.calls]
        for _ in range(WARM_UP):
            self.runs[-1]()
        if not _is_host(direction):
            self.peak = gpu.peak_bytes(self.runs[0])

    def time(self, round_: int, clock: Callable[[Callable[[], Any]], float]) -> None:
        """One more round."""
        self.times.append(clock(self.runs[round_ % INPUT_SETS]))

    def fields(self, flops: float, host: bool) -> dict[str, Any]:
        """What was measured, for a result."""
        if self.error:
            return {"error": self.error}
        median = statistics.median(self.times)
        if host:
            return {"rounds": len(self.times), "host_us": rounded(median)}
        return {
            "rounds": len(self.times),
            "ms": rounded(median),
            "fastest_ms": rounded(min(self.times)),
            "tflops": rounded(flops / median / 1e9),
            "peak_memory_bytes": self.peak,
        }


def _run_of(direction: str, call: Call) -> Callable[[], Any]:
    if direction == "backward":
        return functools.partial(call.backward_of, call.record())
    return call.record if direction == "host with autograd" else call.forward


def _is_host(direction: str) -> bool:
    return direction.startswith("host")


def explain(failure: BaseException) -> str:
    """The first line of an error, which the table has room for."""
    lines = str(failure).strip().splitlines() or [""]
    return f"{type(failure).__name__}: {lines[0]}"[:300]


def measure(
    gpu: Gpu, workload: Workload, wanted: Sequence[Column], rounds: int, tile: Sequence[int] = TILE
) -> list[GpuResult]:
    """All results of a case, of every column that takes it."""
    entrants = [Entrant(column) for column in wanted if column.takes(workload)]
    for entrant in entrants:
        entrant.attempt(entrant.column.check, workload, gpu.device)
    batches = [workload.make(seed, gpu.device) for seed in range(INPUT_SETS)]
    for entrant in entrants:
        entrant.attempt(entrant.prepare, workload, batches)

    tiles = workload.executed_tiles(*tile) if workload.group == "masks" else None
    results = []
    for direction in workload.passes if entrants else ():
        for entrant in entrants:
            entrant.attempt(entrant.enter, direction, gpu)
        host = _is_host(direction)
        clock = gpu.host_microseconds if host else gpu.milliseconds
        for round_ in range(rounds):
            first = round_ % len(entrants)
            for entrant in (*entrants[first:], *entrants[:first]):
                entrant.attempt(entrant.time, round_, clock)
        flops = workload.flops(direction == "backward")
        results += [
            GpuResult.of(workload, direction, e.column.name, tiles, **e.fields(flops, host))
            for e in entrants
        ]
    del entrants, batches
    gc.collect()
    gpu.release()
    return results


# ---------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------

_COLUMNS = (
    *("case", "D", "pass", "impl", "ms", "TFLOP/s", "share"),
    *(f"x {name}" for name in YARDSTICKS),
    *("MiB", "us host", "per tile"),
)
_WIDEST = (
    *("32 x 1024..4096, context + targets", "128", "host with autograd", "hstu_attn_sm80"),
    *("1234.567", "1234.5", "0.12", "12.34", "12.34", "12345.6", "1234.5", "12.34"),
)


def _cell(x: float | None, digits: int) -> str:
    return "-" if x is None else f"{x:.{digits}f}"


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def table_rows(records: Sequence[dict[str, Any]]) -> list[list[str]]:
    """A row for each record: times, and how many times as fast as each yardstick."""

    def same(record: dict[str, Any]) -> tuple[Any, ...]:
        return record["case"], record["group"], record["head_dim"], record["pass"]

    ms = {(*same(r), r["impl"]): r["ms"] for r in records}
    per_tile = {
        (r["head_dim"], r["pass"], r["impl"]): r["ms"] / r["executed_tiles"]
        for r in reversed(records)  # plain causal is the first, and stays
        if r["ms"] and r["executed_tiles"]
    }
    rows = []
    for r in records:
        start = [r["case"], str(r["head_dim"]), r["pass"], r["impl"]]
        if r["error"]:
            rows.append([*start, "FAILED", *[""] * (len(_COLUMNS) - len(start) - 1)])
            continue
        tile = None
        if r["ms"] and r["executed_tiles"]:
            causal = per_tile[r["head_dim"], r["pass"], r["impl"]]
            tile = causal / (r["ms"] / r["executed_tiles"])
        peak = r["peak_memory_bytes"]
        rows.append(
            [
                *start,
                _cell(r["ms"], 3),
                _cell(r["tflops"], 1),
                _cell(r["share_of_matmul"], 2),
                *(_cell(_ratio(ms.get((*same(r), name)), r["ms"]), 2) for name in YARDSTICKS),
                _cell(None if peak is None else peak / 2**20, 1),
                _cell(r["host_us"], 1),
                _cell(tile, 2),
            ]
        )
    return rows


def print_records(records: Sequence[dict[str, Any]], shown: int) -> None:
    """The rows of the records from `shown` on, below the names of the columns at first."""
    _, header, *lines = text_table([_WIDEST, _COLUMNS, *table_rows(records)])
    print("\n".join([*([] if shown else [header]), *lines[shown:]]), flush=True)
    for record in records[shown:]:
        if record["error"]:
            print(f"  FAILED  {record['impl']}: {record['error']}", flush=True)


# ---------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------


def selected(options: argparse.Namespace) -> list[Workload]:
    """The workloads that were asked for."""
    found = workloads(tuple(options.head_dims or HEAD_DIMS))
    if options.quick:
        names = [w for w in found if w.group == "table" and w.name in QUICK]
        return [w for w in names if w.head_dim <= 128]
    texts = options.cases
    return [
        w for w in found
        if not texts or w.group in texts or any(text in w.name for text in texts)
    ]  # fmt: skip


def make_column(name: str) -> Column | str:
    """A column, or why there is none."""
    try:
        return columns.make(name)
    except Exception as failure:
        return explain(failure)


def main(arguments: Sequence[str] | None = None, gpu: Gpu | None = None) -> int:
    """Measures, prints, writes and draws what was asked for."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.plot and not options.json:
        parser.error("--plot: expected --json beside it, since plots are made from that file")
    cases = selected(options)
    if not cases:
        parser.error(f"--cases: expected groups or parts of names, got {options.cases}")
    if gpu is None:
        if not torch.cuda.is_available():
            sys.exit("benchmarks.attention: expected an NVIDIA GPU and a CUDA build of torch")
        gpu = Gpu()
    ours = ("hstu_attn", f"hstu_attn_sm{options.arch}")
    names = options.impls or (*ours, *YARDSTICKS, "cudnn")
    made = {name: make_column(name) for name in names}
    missing = {name: reason for name, reason in made.items() if isinstance(reason, str)}
    wanted = [column for column in made.values() if isinstance(column, Column)]

    command = " ".join(["python -m benchmarks.attention", *(arguments or sys.argv[1:])])
    limits = {name: rounded(x) for name, x in gpu.limits(options.rounds).items()}
    described = {**gpu_software(gpu.name, command, options.commit), **limits}
    print(
        f"{gpu.name}, hstu_attn {described['hstu_attn']} ({described['commit']}), torch "
        f"{described['torch']}, CUDA {described['cuda']}, Triton {described['triton']}\n"
        f"8192^3 bf16 product {limits['matmul_tflops']} TFLOP/s, copy {limits['copy_tbps']} TB/s; "
        f"{cases[0].heads} heads, medians of {options.rounds} rounds\n",
        flush=True,
    )
    for name, reason in missing.items():
        print(f"  MISSING  {name}: {reason}\n", flush=True)
    records: list[dict[str, Any]] = []
    for workload in cases:
        shown = len(records)
        for result in measure(gpu, workload, wanted, options.rounds, options.tile):
            record = {**described, **result.record()}
            if result.tflops:
                record["share_of_matmul"] = rounded(result.tflops / described["matmul_tflops"])
            records.append(record)
        print_records(records, shown)
        if options.json:
            write_records(options.json, records)
    if options.plot:
        plots.draw(options.json, options.plot)
    failed = [*missing, *(r["impl"] for r in records if r["error"])]
    if failed:
        print(f"\nFAILED: {', '.join(f'{x} ({failed.count(x)})' for x in sorted(set(failed)))}")
    return int(any(map(columns.is_ours, failed)))


if __name__ == "__main__":
    sys.exit(main())
