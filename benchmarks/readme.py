"""Writes the tables of README.md and docs/ from the stored results.

    python -m benchmarks.readme
    python -m benchmarks.readme --check

A table stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`; what is between the two is
replaced. With `--check` nothing is written, and the exit status says whether all are current.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--check", action="store_true", help="write nothing")
    return parser


if __name__ == "__main__":
    _parser().parse_args()  # --help or a wrong option ends here, before torch is imported

from . import host_tier
from .cpu_limits import MATMUL
from .report import RESULTS, ROOT, read_results

__all__ = ["DOCUMENTS", "cpu_tables", "gpu_tables", "render"]

Record = dict[str, Any]
NOTHING = "No results are stored."
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
IMPLEMENTATIONS = ("hstu_attn", "per sequence", "padded", "compiled")


def _markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---" if n < 1 else "---:" for n in range(len(header))]
    return [f"| {' | '.join(cells)} |" for cells in (header, rule, *rows)]


def _number(x: float | None, digits: int = 3) -> str:
    """With so many significant digits, and never an exponent."""
    if x is None:
        return "-"
    rounded = float(f"{x:.{digits}g}")
    return f"{rounded:.0f}" if rounded >= 10 ** (digits - 1) else f"{rounded:.{digits}g}"


def _origin(records: Sequence[Record]) -> str:
    record = records[0]
    commits = " and ".join(dict.fromkeys(r["commit"] for r in records))
    features = [f for f in record["features"] if f.endswith("bf16")] or record["features"]
    return (
        f"{record['cpu']} ({', '.join(features)}), {record['threads']} threads, "
        f"torch {record['torch']}, {record['date']}, commit {commits}"
    )


# ---------------------------------------------------------------------------------------------
# The CPU kernels
# ---------------------------------------------------------------------------------------------


def _cpu_row(records: list[Record]) -> list[str]:
    found = {(r["impl"], r["pass"]): r for r in records}
    first = records[0]

    def both(field: str, name: str) -> str:
        values = [found[name, direction][field] for direction in ("forward", "backward")]
        return "-" if None in values else " / ".join(map(_number, values))

    def speedup(over: Sequence[str]) -> str:
        ratios = []
        for direction in ("forward", "backward"):
            ours = found["hstu_attn", direction]["ms"]
            others = [found[name, direction]["ms"] for name in over]
            ratios.append(f"{min(ms for ms in others if ms is not None) / ours:.1f}")
        return " / ".join(ratios)

    memory = [_number(found[name, "backward"]["peak_mib"]) for name in IMPLEMENTATIONS]
    return [
        first["case"],
        str(first["head_dim"]),
        DTYPES[first["dtype"]],
        *(both("ms", name) for name in IMPLEMENTATIONS),
        speedup(IMPLEMENTATIONS[1:2]),
        speedup(IMPLEMENTATIONS[1:]),
        *memory,
    ]


def cpu_tables(folder: Path = RESULTS / "cpu") -> list[str]:
    """One table for each machine."""
    lines: list[str] = []
    for path in sorted(folder.glob("*.json")):
        records = read_results(path)
        groups: dict[tuple[Any, ...], list[Record]] = {}
        for record in records:
            key = (record["case"], record["head_dim"], record["dtype"])
            groups.setdefault(key, []).append(record)
        header = [
            *("sequences x lengths", "D", "dtype"),
            *IMPLEMENTATIONS,
            *("over per sequence", "over best other"),
            *(f"MiB {name}" for name in IMPLEMENTATIONS),
        ]
        lines += [f"{_origin(records)}:", ""]
        lines += [*_markdown_table(header, map(_cpu_row, groups.values())), ""]
        skipped = sorted({f"{r['case']}, {r['dtype']}" for r in records if r["skipped"]})
        if skipped:
            lines += [f"Not measured: padded forms of {'; '.join(skipped)} (too large).", ""]
    return lines[:-1]


# ---------------------------------------------------------------------------------------------
# The kernels for GPUs
# ---------------------------------------------------------------------------------------------

GPU_YARDSTICKS = ("triton", "flash2")
DIRECTIONS = ("forward", "backward")


def _gpu_row(records: list[Record], impls: Sequence[str]) -> list[str]:
    """Shares of the matrix product, then how many times as fast as each yardstick."""
    found = {(r["impl"], r["pass"]): r for r in records}

    def share(impl: str, direction: str) -> str:
        record = found.get((impl, direction))
        if record and record["error"]:
            return "failed"
        value = record and record["share_of_matmul"]
        return f"{value:.2f}" if value else "-"

    def times_as_fast(impl: str, other: str, direction: str) -> str:
        slower, faster = (found.get((name, direction), {}).get("ms") for name in (other, impl))
        return f"{slower / faster:.2f}" if slower and faster else "-"

    def both(cells: Iterable[str]) -> str:
        forward, backward = cells
        return "-" if forward == backward == "-" else f"{forward} / {backward}"

    return [
        records[0]["case"],
        str(records[0]["head_dim"]),
        *(both(share(impl, direction) for direction in DIRECTIONS) for impl in impls),
        *(
            both(times_as_fast(impl, other, direction) for direction in DIRECTIONS)
            for impl in impls
            if impl.startswith("hstu_attn")
            for other in GPU_YARDSTICKS
        ),
    ]


def gpu_tables(folder: Path = RESULTS) -> list[str]:
    """One table for each file of a GPU: the cases of the table group."""
    lines: list[str] = []
    for path in sorted(folder.glob("*/*.json")):
        every = read_results(path)
        records = [r for r in every if r.get("group") == "table"]
        if not records:
            continue
        groups: dict[tuple[Any, ...], list[Record]] = {}
        for record in records:
            groups.setdefault((record["case"], record["head_dim"]), []).append(record)
        impls = list(dict.fromkeys(r["impl"] for r in records))
        ours = [impl for impl in impls if impl.startswith("hstu_attn")]
        over = [f"{impl} over {other}" for impl in ours for other in GPU_YARDSTICKS]
        first = records[0]
        lines += [
            f"{first['gpu']}, torch {first['torch']}, CUDA {first['cuda']}, Triton "
            f"{first['triton']}, {first['date']}, commit {first['commit']}; the matrix product "
            f"runs at {_number(first['matmul_tflops'])} TFLOP/s:",
            "",
            *_markdown_table(
                ["sequences x lengths", "D", *impls, *over],
                (_gpu_row(group, impls) for group in groups.values()),
            ),
            "",
            f"`{first['command']}`",
            "",
        ]
    return lines[:-1]


# ---------------------------------------------------------------------------------------------
# Other libraries
# ---------------------------------------------------------------------------------------------

PEERS = ("FBGEMM hstu", "Meta CUDA", "Meta Triton")
SUMMARY = ("32 x 1024", "8 x 4096", "2 x 16384")


def _h200() -> tuple[list[Record], list[Record]]:
    """The records of this library's table and those of the other libraries, of an H200."""
    ours = read_results(RESULTS / "h200/attention.json")
    return [r for r in ours if r["group"] == "table"], read_results(RESULTS / "h200/peers.json")


def speed_lines() -> list[str]:
    """What README.md says about speed: one shape, forward and backward, beside others."""
    ours, theirs = (
        [r for r in records if (r["case"], r["head_dim"]) == ("8 x 4096", 128)]
        for records in _h200()
    )
    found = {(r["impl"], r["pass"]): r for r in ours}
    forward, backward = (found["hstu_attn", direction] for direction in DIRECTIONS)
    faster, rates = [], []
    for own in (forward, backward):
        best = max(r["tflops"] for r in theirs if r["pass"] == own["pass"])
        faster.append(f"{found['flash2', own['pass']]['ms'] / own['ms']:.1f}")
        rates.append(f"{own['tflops'] / best:.1f}")
    return [
        f"On an {forward['gpu'].removeprefix('NVIDIA ')}, 8 causal sequences of 4096 tokens "
        f"({forward['heads']} heads of 128, bf16) take {_number(forward['ms'])} ms forward "
        f"({forward['tflops']:.0f} TFLOP/s) and",
        f"{_number(backward['ms'])} ms backward ({backward['tflops']:.0f}): {' and '.join(faster)} "
        f"times as fast as torch's FlashAttention-2 at the same shape, {' and '.join(rates)} times "
        "the",
        "TFLOP/s of the fastest of the [other HSTU kernels](#beside-other-libraries) "
        f"({forward['date']}, commit {forward['commit'][:7]}).",
    ]


def peer_tables(cases: Sequence[str] = ()) -> list[str]:
    """This library beside others on causal batches; `cases` selects some, none means all."""
    ours, theirs = _h200()
    found = {(r["impl"], r["case"], r["head_dim"], r["pass"]): r for r in theirs + ours}
    rows = []
    for case, head_dim in dict.fromkeys((r["case"], r["head_dim"]) for r in theirs):
        if cases and case not in cases:
            continue
        cells = []
        for impl in ("hstu_attn", *PEERS):
            times = []
            for direction in DIRECTIONS:
                tflops = found[impl, case, head_dim, direction]["tflops"]
                ms = found["hstu_attn", case, head_dim, direction]["flops"] / tflops / 1e9
                times.append(f"{_number(ms)} ({tflops:.0f})")
            cells.append(" / ".join(times))
        rows.append([case, str(head_dim), *cells])
    own, other = ours[0], theirs[0]
    return [
        *_markdown_table(["sequences x length", "D", "hstu_attn", *PEERS], rows),
        "",
        f"hstu_attn: {own['gpu']}, torch {own['torch']}, {own['date']}, commit {own['commit']}, "
        f"matrix product {_number(own['matmul_tflops'])} TFLOP/s. The others, in another "
        f"run: {other['gpu']}, torch {other['torch']}, {other['date']}, matrix product "
        f"{_number(other['matmul_tflops'])} TFLOP/s; {other['method']}.",
    ]


def peer_summary() -> list[str]:
    """The rows of `peer_tables` that README.md shows."""
    return peer_tables(SUMMARY)


# ---------------------------------------------------------------------------------------------
# A training step
# ---------------------------------------------------------------------------------------------

STEP_PASSES = ("attention forward", "attention backward", "step")


def step_tables(folder: Path = RESULTS) -> list[str]:
    """One table for all files: a row for each implementation in each of them."""
    rows, origins = [], []
    for path in sorted(folder.glob("*/*.json")):
        every = read_results(path)
        records = [r for r in every if r.get("group") == "training step"]
        for impl in dict.fromkeys(r["impl"] for r in records):
            found = {r["pass"]: r for r in records if r["impl"] == impl}
            step = found["step"]
            model = f"{step['layers']} of {step['heads']} x {step['head_dim']}"
            times = [_number(found[name]["ms"]) for name in STEP_PASSES]
            rows.append([step["case"], model, impl, *times, _number(step["busy_ms"])])
        if records:
            first = records[0]
            origins.append(
                f"{first['gpu']}, torch {first['torch']}, CUDA {first['cuda']}, Triton "
                f"{first['triton']}, {first['date']}, commit {first['commit']}: "
                f"`{first['command']}`"
            )
    header = ["sequences x length", "layers of heads x D", "", *STEP_PASSES, "GPU busy"]
    lines = _markdown_table(header, rows) if rows else []
    for origin in origins:
        lines += ["", origin]
    return lines


# ---------------------------------------------------------------------------------------------
# Layers, and training on several GPUs
# ---------------------------------------------------------------------------------------------


def _gpu_origin(record: Record) -> str:
    return (
        f"{record['gpu']}, torch {record['torch']}, CUDA {record['cuda']}, Triton "
        f"{record['triton']}, {record['date']}, commit {record['commit']}: `{record['command']}`"
    )


def _files_of(group: str, folder: Path) -> list[list[Record]]:
    """The records of each file that has some of a group."""
    files = [read_results(path) for path in sorted(folder.glob("*/*.json"))]
    chosen = [[r for r in records if r.get("group") == group] for records in files]
    return [records for records in chosen if records]


def layer_tables(folder: Path = RESULTS) -> list[str]:
    """For each file a table of the passes, and for one layer one of the fused layer's kernels."""
    lines: list[str] = []
    for records in _files_of("layer", folder):
        first = records[0]
        rows, kernels = [], []
        for r in records:
            if r["error"]:
                continue
            if r["pass"] != "kernels":
                memory = [r["kept_memory_bytes"], r["peak_memory_bytes"]]
                numbers = [r["ms"], r["tflops"], r["share_of_matmul"], r["mfu"]]
                sizes = [f"{size / 2**30:.2f}" for size in memory]
                rows.append([f"{r['impl']}, {r['pass']}", *map(_number, numbers), *sizes])
            elif first["layers"] == 1 and r["impl"] == "fused":
                kernels = [
                    [
                        name.rpartition("::")[2],
                        kernel["group"],
                        f"{kernel['launches']:g}",
                        _number(kernel["ms"]),
                        _number(kernel.get("share_of_copy"), 2),
                    ]
                    for name, kernel in r["kernels"].items()
                ]
        lines += [
            f"{first['case']}, width {first['dim']}, {first['heads']} heads of "
            f"{first['head_dim']}, dropout {first['dropout']}, layers: {first['layers']}; product "
            f"{_number(first['matmul_tflops'])} TFLOP/s, copy {_number(first['copy_tbps'])} TB/s. "
            f"{_gpu_origin(first)}:",
            "",
            *_markdown_table(
                ["", "ms", "TFLOP/s", "of product", "MFU", "kept GiB", "peak GiB"], rows
            ),
            "",
        ]
        if kernels:
            header = ["kernel of fused, both passes", "", "launches", "ms", "of copy"]
            lines += [*_markdown_table(header, kernels), ""]
    return lines[:-1]


def train_tables(folder: Path = RESULTS) -> list[str]:
    """A table for each file."""
    header = [
        *("case", "GPUs", "rows", "load of the most loaded", "ms", "rows/s a GPU"),
        *("TFLOP/s a GPU", "of product", "MFU", "scaling"),
    ]
    lines: list[str] = []
    for records in _files_of("train", folder):
        first = records[0]
        rows = [
            [
                f"{r['case']}, {r['division']}",
                str(r["gpus"]),
                str(r["rows"]),
                f"{r['imbalance']:.2f}",
                _number(r["ms"]),
                f"{r['rows_per_second_per_gpu']:.0f}",
                *(_number(r[x]) for x in ("tflops_per_gpu", "share_of_matmul", "mfu")),
                "-" if r["scaling"] is None else f"{r['scaling']:.2f}",
            ]
            for r in records
        ]
        lines += [
            f"{first['strategy']}, {first['layers']} layers of width {first['dim']}, "
            f"{first['heads']} heads. {_gpu_origin(first)}:",
            "",
            *_markdown_table(header, rows),
            "",
        ]
    return lines[:-1]


def context_tables(folder: Path = RESULTS) -> list[str]:
    """One table of all files."""
    rows, origins = [], []
    for records in _files_of("context", folder):
        first = records[0]
        for r in records:
            if r["gpus"] == 1:
                continue
            numbers = [_number(r[x]) for x in ("ms", "tflops_per_gpu", "speedup")]
            rows.append([r["pass"], str(r["gpus"]), *numbers, f"{100 * r['waiting_share']:.1f} %"])
        origins += [
            "",
            f"{first['case']}, {first['heads']} heads of {first['head_dim']}. {_gpu_origin(first)}",
        ]
    header = ["", "GPUs", "ms", "TFLOP/s a GPU", "over one GPU", "waiting"]
    return [*_markdown_table(header, rows), *origins] if rows else []


# ---------------------------------------------------------------------------------------------
# The paged cache
# ---------------------------------------------------------------------------------------------

PAGED_FIELDS = ("head_dim", "history", "new", "candidates", "batch", "page_size")
HOST_TIER_TIMES = ("resident", "returning", "with_evictions", "copies")
PAGED_FORMS = ("graph", "paged", "append", "gather", "recompute")


def paged_tables(folder: Path = RESULTS) -> list[str]:
    """One table for each GPU."""
    lines: list[str] = []
    for path in sorted(folder.glob("*/paged.json")):
        records = read_results(path)
        cases: dict[tuple[Any, ...], dict[str, Record]] = {}
        for record in records:
            key = tuple(record[field] for field in PAGED_FIELDS)
            cases.setdefault(key, {})[record["impl"]] = record
        rows = []
        for key, found in cases.items():
            needs = found["graph"]["needs_us"]
            times = [_number(found[name]["us"]) if name in found else "-" for name in PAGED_FORMS]
            share = f"{needs / found['graph']['us']:.2f}"
            rows.append([*map(str, key), _number(needs), *times, share])
        header = ["D", *PAGED_FIELDS[1:-1], "page", "needs", *PAGED_FORMS, "needs / graph"]
        first = records[0]
        lines += [
            f"{first['gpu']}, torch {first['torch']}, {first['date']}, commit {first['commit']}; "
            f"product {_number(first['matmul_tflops'])} TFLOP/s, copy {first['copy_tbps']} TB/s, "
            f"appending 256 MB {first['append_tbps']} TB/s; "
            f"microseconds; `{first['command']}`:",
            "",
            *_markdown_table(header, rows),
            "",
        ]
    return lines[:-1] + host_tier_tables(folder)


def host_tier_tables(folder: Path) -> list[str]:
    """For each file that has some, a table of steps whose users return from host memory."""
    lines: list[str] = []
    for records in _files_of(host_tier.GROUP, folder):
        rows = []
        for r in records:
            times = [r[f"{name}_us"] / 1e3 for name in HOST_TIER_TIMES]
            rates = [_number(r[f"{name}_host_gbps"]) for name in ("from", "to")]
            sizes = [str(r[name]) for name in ("history", "batch")]
            numbers = [*map(_number, times), *rates, host_tier.hidden_text(r)]
            rows.append([*sizes, *numbers, _number(r["recompute_us"] / 1e3)])
        header = ["history", "batch", *(name.replace("_", " ") for name in HOST_TIER_TIMES)]
        header += ["from host, GB/s", "to host, GB/s", "hidden", "recompute"]
        first = records[0]
        lines += [
            "",
            f"Users who return from host memory, in a step of {first['layers']} layers of "
            f"{first['heads']} heads of {first['head_dim']}, as the head of "
            "`benchmarks/host_tier.py` explains. "
            f"{first['gpu']}, torch {first['torch']}, {first['date']}, commit {first['commit']}; "
            f"milliseconds; `{first['command']}`:",
            "",
            *_markdown_table(header, rows),
        ]
    return lines


# ---------------------------------------------------------------------------------------------
# The examples that train
# ---------------------------------------------------------------------------------------------


def retrieval_tables(folder: Path = RESULTS / "retrieval") -> list[str]:
    """One table for each machine."""
    lines: list[str] = []
    for path in sorted(folder.glob("*.json")):
        records = read_results(path)
        rows = [
            [r["model"], *(f"{r[name]:.4f}" for name in ("hit_rate_10", "hit_rate_50", "ndcg_10"))]
            for r in records
        ]
        lines += _markdown_table(["", "HR@10", "HR@50", "NDCG@10"], rows)
        seconds = records[0]["seconds"]
        lines += ["", f"{seconds:.0f} seconds on {_origin(records)}.", ""]
    return lines[:-1]


def ranking_tables(folder: Path = RESULTS / "ranking") -> list[str]:
    """One table for each machine."""
    lines: list[str] = []
    for path in sorted(folder.glob("*.json")):
        records = read_results(path)
        kinds = {"auc": "AUC", "ne": "NE"}
        names = [name.partition("/") for name in records[0]["metrics"]]
        header = ["", *(f"{task}, {kinds[kind]}" for kind, _, task in names)]
        rows = [[r["model"], *(f"{x:.4f}" for x in r["metrics"].values())] for r in records]
        lines += [*_markdown_table(header, rows), "", f"{_origin(records)}.", ""]
    return lines[:-1]


# ---------------------------------------------------------------------------------------------
# The server of the example
# ---------------------------------------------------------------------------------------------


def serving_tables(folder: Path = RESULTS / "serving") -> list[str]:
    """One table for each machine."""
    lines: list[str] = []
    for path in sorted(folder.glob("*.json")):
        records = read_results(path)
        fields = ("qps", "p50_ms", "p95_ms", "p99_ms", "mean_batch")
        rows = [[str(r["concurrency"]), *(_number(r[name]) for name in fields)] for r in records]
        header = ["requests under way", "a second", "median ms", "p95 ms", "p99 ms", "in a batch"]
        lines += [*_markdown_table(header, rows), "", f"{_origin(records)}.", ""]
    return lines[:-1]


# ---------------------------------------------------------------------------------------------
# The limits of the CPU kernels
# ---------------------------------------------------------------------------------------------


def limits_tables(folder: Path = RESULTS / "cpu-limits") -> list[str]:
    """One table for each machine."""
    lines: list[str] = []
    for path in sorted(folder.glob("*.json")):
        records = read_results(path)
        product = {r["dtype"]: r["gflops"] for r in records if r["impl"] == MATMUL}
        found = {(r["dtype"], r["impl"], r["head_dim"], r["pass"]): r for r in records}
        header = ["instruction set", "dtype", "D", "forward", "of matmul", "backward", "of matmul"]
        rows = []
        for dtype, impl, head_dim, direction in found:
            if impl == MATMUL or direction != "forward":
                continue
            row = [impl, DTYPES[dtype], str(head_dim)]
            for other in ("forward", "backward"):
                gflops = found[dtype, impl, head_dim, other]["gflops"]
                row += [_number(gflops), f"{gflops / product[dtype]:.2f}"]
            rows.append(row)
        products = " and ".join(f"{_number(x)} in {DTYPES[dtype]}" for dtype, x in product.items())
        lines += [f"{_origin(records)}; `torch.matmul` {products}:", ""]
        lines += [*_markdown_table(header, rows), ""]
    return lines[:-1]


# ---------------------------------------------------------------------------------------------
# The documents
# ---------------------------------------------------------------------------------------------

DOCUMENTS: dict[Path, dict[str, Callable[[], list[str]]]] = {
    ROOT / "README.md": {"speed": speed_lines, "peers": peer_summary},
    ROOT / "docs/performance.md": {
        "cpu": cpu_tables,
        "gpu": gpu_tables,
        "peers": peer_tables,
        "step": step_tables,
    },
    ROOT / "docs/quickstart/training.md": {
        "retrieval": retrieval_tables,
        "ranking": ranking_tables,
    },
    ROOT / "docs/quickstart/serving.md": {"serving": serving_tables},
    ROOT / "docs/distributed.md": {"train": train_tables, "context": context_tables},
    ROOT / "docs/kernels/cpu.md": {"limits": limits_tables},
    ROOT / "docs/kernels/layer.md": {"layer": layer_tables},
    ROOT / "docs/kernels/paged.md": {"paged": paged_tables},
}


def render(path: Path) -> str:
    """The text of a document with its tables made anew.

    Raises:
        ValueError: if the marks of a table are not in it exactly once.
    """
    text = path.read_text()
    for name, make in DOCUMENTS[path].items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"{path.name}: expected one {begin.strip()} and one {end}")
        before, rest = text.split(begin)
        after = rest.split(end)[1]
        text = before + "\n".join([begin, *(make() or [NOTHING]), "", end]) + after
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrites the documents, or checks them."""
    options = _parser().parse_args(arguments)
    status = 0
    for path in DOCUMENTS:
        rendered = render(path)
        if rendered == path.read_text():
            continue
        if options.check:
            print(f"{path.name}: its tables are not those of {RESULTS}", file=sys.stderr)
            status = 1
        else:
            path.write_text(rendered)
    return status


if __name__ == "__main__":
    sys.exit(main())
