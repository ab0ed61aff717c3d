"""Tables of records: what a benchmark prints, and what README.md and docs/ show.

    python -m benchmarks.report
    python -m benchmarks.report --check

Writes the tables of the documents from the stored results (`benchmarks/results`). A table stands
between `<!-- NAME:begin -->` and `<!-- NAME:end -->`; what is between the two is replaced.
`DOCUMENTS` says which file has which tables. With `--check` nothing is written, and the exit status
says whether all are current.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

PARSER = argparse.ArgumentParser(
    prog="python -m benchmarks.report",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
)
PARSER.add_argument("--check", action="store_true", help="write nothing")

if __name__ == "__main__":
    PARSER.parse_args()  # --help or a wrong option ends here, before torch is imported

from .record import BASELINES, RESULTS, ROOT, Record, read_records

__all__ = ["DOCUMENTS", "TABLES", "Table", "render", "text"]

File = list[Record]  # the records of a file, all of one benchmark and group
NOTHING = "No results are stored."
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Table:
    """A table with a paragraph before it and one behind it, where they are not empty."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    before: str = ""
    after: str = ""

    def markdown(self) -> list[str]:
        """Lines of Markdown."""
        rule = ["---" if n < 1 else "---:" for n in range(len(self.header))]
        return self._lines(f"| {' | '.join(cells)} |" for cells in (self.header, rule, *self.rows))

    def text(self) -> list[str]:
        """Lines with aligned columns, the first one flush left and the others right."""
        rows = [self.header, *self.rows]
        widths = [max(len(row[n]) for row in rows) for n in range(len(self.header))]
        return self._lines(
            "  ".join(
                cell.rjust(width) if n else cell.ljust(width)
                for n, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )

    def _lines(self, table: Iterable[str]) -> list[str]:
        before, after = ([x] if x else [] for x in (self.before, self.after))
        return [*before, *([""] if before else []), *table, *([""] if after else []), *after]


def _number(x: float | None, digits: int = 3) -> str:
    """With so many significant digits, and never an exponent."""
    if x is None:
        return "-"
    rounded = float(f"{x:.{digits}g}")
    return f"{rounded:.0f}" if rounded >= 10 ** (digits - 1) else f"{rounded:.{digits}g}"


def _cpu_origin(records: File) -> str:
    record = records[0]
    commits = " and ".join(dict.fromkeys(r["commit"] for r in records))
    features = [f for f in record["features"] if f.endswith("bf16")] or record["features"]
    return (
        f"{record['cpu']} ({', '.join(features)}), {record['threads']} threads, "
        f"torch {record['torch']}, {record['date']}, commit {commits}"
    )


def _gpu_origin(record: Record, *, command: bool = True) -> str:
    said = (
        f"{record['gpu'] or record['cpu']}, torch {record['torch']}, CUDA {record['cuda']}, Triton "
        f"{record['triton']}, {record['date']}, commit {record['commit']}"
    )
    return f"{said}: `{record['command']}`" if command else said


def _by(records: Iterable[Record], *names: str) -> list[File]:
    """The records in groups that are equal in these fields."""
    found: dict[tuple[object, ...], File] = {}
    for record in records:
        found.setdefault(tuple(record[name] for name in names), []).append(record)
    return list(found.values())


# ---------------------------------------------------------------------------------------------
# The CPU kernels
# ---------------------------------------------------------------------------------------------

CPU_IMPLS = ("hstu_attn", "per sequence", "padded", "compiled")
MATMUL = "torch.matmul"


def _cpu_row(records: File) -> list[str]:
    found = {(r["impl"], r["pass"]): r for r in records}
    directions = ("forward", "backward")

    def both(name: str) -> str:
        values = [found[name, direction]["ms"] for direction in directions]
        return "-" if None in values else " / ".join(map(_number, values))

    def speedup(over: Sequence[str]) -> str:
        ratios = []
        for direction in directions:
            others = [found[name, direction]["ms"] for name in over]
            fastest = min(ms for ms in others if ms is not None)
            ratios.append(f"{fastest / found['hstu_attn', direction]['ms']:.1f}")
        return " / ".join(ratios)

    return [
        *(records[0]["case"], str(records[0]["head_dim"]), DTYPES[records[0]["dtype"]]),
        *(both(name) for name in CPU_IMPLS),
        *(speedup(CPU_IMPLS[1:2]), speedup(CPU_IMPLS[1:])),
        *(_number(found[name, "backward"]["peak_mib"]) for name in CPU_IMPLS),
    ]


def cpu(files: Sequence[File]) -> list[Table]:
    """One table for each machine."""
    header = [
        *("sequences x lengths", "D", "dtype"),
        *CPU_IMPLS,
        *("over per sequence", "over best other"),
        *(f"MiB {name}" for name in CPU_IMPLS),
    ]
    tables = []
    for records in files:
        rows = [_cpu_row(group) for group in _by(records, "case", "head_dim", "dtype")]
        skipped = "; ".join(sorted({f"{r['case']}, {r['dtype']}" for r in records if r["skipped"]}))
        after = f"Not measured: padded forms of {skipped} (too large)." if skipped else ""
        tables.append(Table(header, rows, f"{_cpu_origin(records)}:", after))
    return tables


def cpu_limits(files: Sequence[File]) -> list[Table]:
    """One table for each machine."""
    header = ["instruction set", "dtype", "D", "forward", "of matmul", "backward", "of matmul"]
    tables = []
    for records in files:
        product = {r["dtype"]: r["gflops"] for r in records if r["impl"] == MATMUL}
        rows = []
        for group in _by(records, "dtype", "impl", "head_dim"):
            first = group[0]
            if first["impl"] == MATMUL:
                continue
            row = [first["impl"], DTYPES[first["dtype"]], str(first["head_dim"])]
            for r in group:
                row += [_number(r["gflops"]), f"{r['gflops'] / product[r['dtype']]:.2f}"]
            rows.append(row)
        products = " and ".join(f"{_number(x)} in {DTYPES[dtype]}" for dtype, x in product.items())
        before = f"{_cpu_origin(records)}; `torch.matmul` {products}:"
        tables.append(Table(header, rows, before))
    return tables


# ---------------------------------------------------------------------------------------------
# The kernels for GPUs
# ---------------------------------------------------------------------------------------------

COMPARED = ("triton", "flash2")  # baselines that each of this library's columns is compared with


def _attention_row(records: File, impls: Sequence[str], passes: Sequence[str]) -> list[str]:
    found = {(r["impl"], r["pass"]): r for r in records}

    def share(impl: str, direction: str) -> str:
        record = found.get((impl, direction), {})
        if record.get("error"):
            return "failed"
        value = record.get("share_of_matmul")
        return f"{value:.2f}" if value else _number(record.get("host_us"))

    def times_as_fast(impl: str, other: str, direction: str) -> str:
        slower, faster = (found.get((name, direction), {}).get("ms") for name in (other, impl))
        return f"{slower / faster:.2f}" if slower and faster else "-"

    def joined(cells: Iterable[str]) -> str:
        every = list(cells)
        return "-" if set(every) == {"-"} else " / ".join(every)

    return [
        *(records[0]["case"], str(records[0]["head_dim"])),
        *(joined(share(impl, direction) for direction in passes) for impl in impls),
        *(
            joined(times_as_fast(impl, other, direction) for direction in passes)
            for impl in impls
            if impl not in BASELINES
            for other in COMPARED
        ),
    ]


def attention(files: Sequence[File]) -> list[Table]:
    """One table for each file: shares of the product, and how many times as fast as baselines.

    Of the group "host" it shows microseconds of the host.
    """
    tables = []
    for records in files:
        first = records[0]
        impls = list(dict.fromkeys(r["impl"] for r in records))
        passes = list(dict.fromkeys(r["pass"] for r in records))
        ours = [impl for impl in impls if impl not in BASELINES]
        over = [f"{impl} over {other}" for impl in ours for other in COMPARED]
        rows = [_attention_row(each, impls, passes) for each in _by(records, "case", "head_dim")]
        before = (
            f"{_gpu_origin(first, command=False)}; the matrix product runs at "
            f"{_number(first['matmul_tflops'])} TFLOP/s:"
        )
        header = ["sequences x lengths", "D", *impls, *over]
        tables.append(Table(header, rows, before, f"`{first['command']}`"))
    return tables


# ---------------------------------------------------------------------------------------------
# Other libraries
# ---------------------------------------------------------------------------------------------

PEERS = ("FBGEMM hstu", "Meta CUDA", "Meta Triton")
SUMMARY = ("32 x 1024", "8 x 4096", "2 x 16384")  # the cases that README.md shows
DIRECTIONS = ("forward", "backward")


def _h200() -> tuple[File, File]:
    """The records of this library's table and those of the other libraries, of an H200."""
    [ours], [theirs] = stored("attention"), stored("peers")
    return ours, theirs


def speed() -> list[str]:
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


def peers(cases: Sequence[str] = ()) -> list[str]:
    """This library beside others on causal batches; `cases` selects some, none means all."""
    ours, theirs = _h200()
    found = {(r["impl"], r["case"], r["head_dim"], r["pass"]): r for r in theirs + ours}
    rows = []
    for [first, *_] in _by(theirs, "case", "head_dim"):
        case, head_dim = first["case"], first["head_dim"]
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
    after = (
        f"hstu_attn: {own['gpu']}, torch {own['torch']}, {own['date']}, commit {own['commit']}, "
        f"matrix product {_number(own['matmul_tflops'])} TFLOP/s. The others, in another "
        f"run: {other['gpu']}, torch {other['torch']}, {other['date']}, matrix product "
        f"{_number(other['matmul_tflops'])} TFLOP/s; {other['method']}."
    )
    return Table(["sequences x length", "D", "hstu_attn", *PEERS], rows, after=after).markdown()


# ---------------------------------------------------------------------------------------------
# Layers, and training
# ---------------------------------------------------------------------------------------------


def training_step(files: Sequence[File]) -> list[Table]:
    """One table for all files: a row for each implementation in each of them."""
    passes = ("attention forward", "attention backward", "step")
    rows = []
    for records in files:
        for found in _by(records, "impl"):
            by_pass = {r["pass"]: r for r in found}
            step = by_pass["step"]
            model = f"{step['layers']} of {step['heads']} x {step['head_dim']}"
            times = [_number(by_pass[name]["ms"]) for name in passes]
            rows.append([step["case"], model, step["impl"], *times, _number(step["busy_ms"])])
    header = ["sequences x length", "layers of heads x D", "", *passes, "GPU busy"]
    origins = "\n\n".join(_gpu_origin(records[0]) for records in files)
    return [Table(header, rows, after=origins)] if rows else []


def layer(files: Sequence[File]) -> list[Table]:
    """For each file a table of the passes, and of one layer one of the fused layer's kernels."""
    tables = []
    for records in files:
        first = records[0]
        rows, kernels = [], []
        for r in records:
            if r["error"]:
                continue
            if r["pass"] != "kernels":
                numbers = [r["ms"], r["tflops"], r["share_of_matmul"], r["mfu"]]
                memory = [r["kept_memory_bytes"], r["peak_memory_bytes"]]
                sizes = [f"{size / 2**30:.2f}" for size in memory]
                rows.append([f"{r['impl']}, {r['pass']}", *map(_number, numbers), *sizes])
            elif first["layers"] == 1 and r["impl"] == "fused":
                kernels = [
                    [
                        *(name.rpartition("::")[2], kernel["group"], f"{kernel['launches']:g}"),
                        _number(kernel["ms"]),
                        _number(kernel.get("share_of_copy"), 2),
                    ]
                    for name, kernel in r["kernels"].items()
                ]
        before = (
            f"{first['case']}, width {first['dim']}, {first['heads']} heads of "
            f"{first['head_dim']}, dropout {first['dropout']}, layers: {first['layers']}; product "
            f"{_number(first['matmul_tflops'])} TFLOP/s, copy {_number(first['copy_tbps'])} TB/s. "
            f"{_gpu_origin(first)}:"
        )
        header = ["", "ms", "TFLOP/s", "of product", "MFU", "kept GiB", "peak GiB"]
        tables.append(Table(header, rows, before))
        if kernels:
            header = ["kernel of fused, both passes", "", "launches", "ms", "of copy"]
            tables.append(Table(header, kernels))
    return tables


def train(files: Sequence[File]) -> list[Table]:
    """One table for each file."""
    header = [
        *("case", "GPUs", "tokens", "load of the most loaded", "ms", "tokens/s per GPU"),
        *("TFLOP/s per GPU", "of product", "MFU", "scaling"),
    ]
    tables = []
    for records in files:
        first = records[0]
        rows = [
            [
                *(f"{r['case']}, {r['division']}", str(r["gpus"]), str(r["tokens"])),
                *(f"{r['imbalance']:.2f}", _number(r["ms"])),
                f"{r['tokens_per_second_per_gpu']:.0f}",
                *(_number(r[x]) for x in ("tflops_per_gpu", "share_of_matmul", "mfu")),
                "-" if r["scaling"] is None else f"{r['scaling']:.2f}",
            ]
            for r in records
        ]
        before = (
            f"{first['strategy']}, {first['layers']} layers of width {first['dim']}, "
            f"{first['heads']} heads. {_gpu_origin(first)}:"
        )
        tables.append(Table(header, rows, before))
    return tables


def context(files: Sequence[File]) -> list[Table]:
    """One table of all files."""
    header = ["", "GPUs", "ms", "TFLOP/s per GPU", "over one GPU", "waiting"]
    rows, origins = [], []
    for records in files:
        first = records[0]
        for r in records:
            if r["gpus"] > 1:
                numbers = [_number(r[x]) for x in ("ms", "tflops_per_gpu", "speedup")]
                waiting = f"{100 * r['waiting_share']:.1f} %"
                rows.append([r["pass"], str(r["gpus"]), *numbers, waiting])
        sizes = f"{first['case']}, {first['heads']} heads of {first['head_dim']}"
        origins.append(f"{sizes}. {_gpu_origin(first)}")
    return [Table(header, rows, after="\n\n".join(origins))] if rows else []


# ---------------------------------------------------------------------------------------------
# The paged cache
# ---------------------------------------------------------------------------------------------

PAGED_FIELDS = ("head_dim", "history", "new", "candidates", "batch", "page_size")
PAGED_FORMS = ("graph", "paged", "append", "gather", "recompute")
HOST_TIER_TIMES = ("resident", "returning", "with_evictions", "copies")


def paged(files: Sequence[File]) -> list[Table]:
    """One table for each GPU."""
    header = ["D", *PAGED_FIELDS[1:-1], "page", "needs", *PAGED_FORMS, "needs / graph"]
    tables = []
    for records in files:
        first = records[0]
        rows = []
        for group in _by(records, *PAGED_FIELDS):
            us = {r["impl"]: r["us"] for r in group}
            needs, graph = group[0]["needs_us"], us["graph"]
            rows.append(
                [
                    *(str(group[0][field]) for field in PAGED_FIELDS),
                    *(_number(x) for x in (needs, *map(us.get, PAGED_FORMS))),
                    f"{needs / graph:.2f}" if graph else "failed",
                ]
            )
        before = (
            f"{first['gpu']}, torch {first['torch']}, {first['date']}, commit {first['commit']}; "
            f"product {_number(first['matmul_tflops'])} TFLOP/s, copy {first['copy_tbps']} TB/s, "
            f"appending 256 MB {first['append_tbps']} TB/s; "
            f"microseconds; `{first['command']}`:"
        )
        tables.append(Table(header, rows, before))
    return tables


def stack(files: Sequence[File]) -> list[Table]:
    """For each file, a table of steps whose users return from host memory."""
    header = [
        *("history", "batch", *(name.replace("_", " ") for name in HOST_TIER_TIMES)),
        *("from host, GB/s", "to host, GB/s", "hidden", "recompute"),
    ]
    tables = []
    for records in files:
        first = records[0]
        if "hidden" not in first:
            continue  # a scoring step
        rows = [
            [
                *(str(r["history"]), str(r["batch"])),
                *(_number(r[f"{name}_us"] / 1e3) for name in HOST_TIER_TIMES),
                *(_number(r[f"{name}_host_gbps"]) for name in ("from", "to")),
                f"{r['hidden']:.2f} of {r['hidden_at_most']:.2f}",
                _number(r["recompute_us"] / 1e3),
            ]
            for r in records
        ]
        before = (
            f"Users who return from host memory, in a step of {first['layers']} layers of "
            f"{first['heads']} heads of {first['head_dim']}, as the head of "
            "`benchmarks/stack.py` explains. "
            f"{first['gpu']}, torch {first['torch']}, {first['date']}, commit {first['commit']}; "
            f"milliseconds; `{first['command']}`:"
        )
        tables.append(Table(header, rows, before))
    return tables


# ---------------------------------------------------------------------------------------------
# The examples
# ---------------------------------------------------------------------------------------------


def retrieval(files: Sequence[File]) -> list[Table]:
    """One table for each machine."""
    names = ("hit_rate_10", "hit_rate_50", "ndcg_10")
    return [
        Table(
            ["", "HR@10", "HR@50", "NDCG@10"],
            [[r["model"], *(f"{r[name]:.4f}" for name in names)] for r in records],
            after=f"{records[0]['seconds']:.0f} seconds on {_cpu_origin(records)}.",
        )
        for records in files
    ]


def ranking(files: Sequence[File]) -> list[Table]:
    """One table for each machine."""
    kinds = {"auc": "AUC", "ne": "NE"}
    tables = []
    for records in files:
        names = [name.partition("/") for name in records[0]["metrics"]]
        header = ["", *(f"{task}, {kinds[kind]}" for kind, _, task in names)]
        rows = [[r["model"], *(f"{x:.4f}" for x in r["metrics"].values())] for r in records]
        tables.append(Table(header, rows, after=f"{_cpu_origin(records)}."))
    return tables


LOAD_FIELDS = {"p50_ms": "median ms", "p95_ms": "p95 ms", "p99_ms": "p99 ms"}


def serving(files: Sequence[File]) -> list[Table]:
    """One table for each machine."""
    fields = {"qps": "a second", **LOAD_FIELDS, "mean_batch": "in a batch"}
    return [
        Table(
            ["requests under way", *fields.values()],
            [[str(r["concurrency"]), *(_number(r[name]) for name in fields)] for r in records],
            after=f"{_cpu_origin(records)}.",
        )
        for records in files
    ]


def engine(files: Sequence[File]) -> list[Table]:
    """One table for each file."""
    fields = {"qps": "requests/s", **LOAD_FIELDS, "mean_batch": "in a batch"}
    fields |= {"graph_share": "by graphs", "hit_share": "cached"}
    return [
        Table(
            ["requests under way", "graphs", *fields.values()],
            [
                [str(r["concurrency"]), str(r["graphs"]), *(_number(r[name]) for name in fields)]
                for r in records
            ],
        )
        for records in files
    ]


def cache(files: Sequence[File]) -> list[Table]:
    """One table for each file."""
    sizes = ("batch", "history", "page_size", "new")
    times = ("step_us", "step_p95_us", "engine_us", "engine_p95_us")
    return [
        Table(
            [*sizes, *times],
            [[*(str(r[name]) for name in sizes), *(_number(r[name]) for name in times)] for r in x],
        )
        for x in files
    ]


# ---------------------------------------------------------------------------------------------
# The documents
# ---------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[Sequence[File]], list[Table]]] = {
    make.__name__: make
    for make in (
        *(attention, cache, context, cpu, cpu_limits, engine, layer, paged, ranking, retrieval),
        *(serving, stack, train, training_step),
    )
}
SHOWN = {"attention": "table", "stack": "host tier"}  # the group that documents show


def tables(*benchmarks: str, folder: Path = RESULTS) -> list[str]:
    """Markdown of the tables of stored results."""
    made = [x for each in benchmarks for x in TABLES[each](stored(each, folder))]
    lines = [line for table in made for line in (*table.markdown(), "")]
    return lines[:-1] or [NOTHING]


# What stands between marks in each document, by the marks' name.
DOCUMENTS: dict[Path, dict[str, Callable[[], list[str]]]] = {
    ROOT / "README.md": {"speed": speed, "peers": partial(peers, SUMMARY)},
    ROOT / "docs/performance.md": {
        "cpu": partial(tables, "cpu"),
        "gpu": partial(tables, "attention"),
        "peers": peers,
        "step": partial(tables, "training_step"),
    },
    ROOT / "docs/quickstart/training.md": {
        "retrieval": partial(tables, "retrieval"),
        "ranking": partial(tables, "ranking"),
    },
    ROOT / "docs/quickstart/serving.md": {"serving": partial(tables, "serving")},
    ROOT / "docs/distributed.md": {
        "train": partial(tables, "train"),
        "context": partial(tables, "context"),
    },
    ROOT / "docs/kernels/cpu.md": {"limits": partial(tables, "cpu_limits")},
    ROOT / "docs/kernels/layer.md": {"layer": partial(tables, "layer")},
    ROOT / "docs/kernels/paged.md": {"paged": partial(tables, "paged", "stack")},
}


def text(records: Sequence[Record]) -> str:
    """The tables of a run, as text with aligned columns."""
    grouped = _by(({"group": None, **r} for r in records), "benchmark", "group")
    tables = [table for file in grouped for table in TABLES[file[0]["benchmark"]]([file])]
    return "\n\n".join("\n".join(table.text()) for table in tables)


def stored(benchmark: str, folder: Path = RESULTS) -> list[File]:
    """The records of each stored file that are of a benchmark, and of the group that is shown."""
    group = SHOWN.get(benchmark)
    files = [read_records(path) for path in sorted(folder.glob("*/*.json"))]
    chosen = [
        [r for r in file if r["benchmark"] == benchmark and (not group or r["group"] == group)]
        for file in files
    ]
    return [records for records in chosen if records]


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
        text = before + "\n".join([begin, *make(), "", end]) + after
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrites the documents, or checks them."""
    options = PARSER.parse_args(arguments)
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
