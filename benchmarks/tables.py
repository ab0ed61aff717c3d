"""The tables of records: one function for each benchmark, and comparisons with other libraries.

A function gets the records of some files, all of one benchmark and group, and makes `Table`s. A run
prints them at its end, and README.md and docs/ show them (`report.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from .example_tables import (
    engine,
    fp8_training,
    published,
    ranking,
    retrieval,
    serving,
    startup,
)
from .record import BASELINES, Record
from .table import (
    DTYPES,
    Cells,
    File,
    Table,
    by,
    cpu_origin,
    gpu_origin,
    number,
    number_columns,
    record_table,
)

__all__ = ["MATMUL", "TABLES", "peers", "scan", "speed", "text"]

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
        return "-" if None in values else " / ".join(map(number, values))

    def speedup(over: Sequence[str]) -> str:
        ratios = []
        for direction in directions:
            own, *others = (found[name, direction]["ms"] for name in ("hstu_attn", *over))
            measured = [ms for ms in others if ms]
            ratios.append(f"{min(measured) / own:.1f}" if own and measured else "-")
        return " / ".join(ratios)

    return [
        *(records[0]["case"], str(records[0]["head_dim"]), DTYPES[records[0]["dtype"]]),
        *(both(name) for name in CPU_IMPLS),
        *(speedup(CPU_IMPLS[1:2]), speedup(CPU_IMPLS[1:])),
        *(number(found[name, "backward"]["peak_mib"]) for name in CPU_IMPLS),
    ]


def cpu(files: Sequence[File]) -> list[Table]:
    """Returns one table for each machine."""
    header = [
        *("sequences x lengths", "D", "dtype"),
        *CPU_IMPLS,
        *("over per sequence", "over best other"),
        *(f"MiB {name}" for name in CPU_IMPLS),
    ]
    tables = []
    for records in files:
        rows = [_cpu_row(group) for group in by(records, "case", "head_dim", "dtype")]
        skipped = "; ".join(sorted({f"{r['case']}, {r['dtype']}" for r in records if r["skipped"]}))
        after = f"Not measured: padded forms of {skipped} (too large)." if skipped else ""
        tables.append(Table(header, rows, f"{cpu_origin(records)}:", after))
    return tables


def cpu_limits(files: Sequence[File]) -> list[Table]:
    """Returns one table for each machine."""
    header = ["instruction set", "dtype", "D", "forward", "of matmul", "backward", "of matmul"]
    tables = []
    for records in files:
        product = {r["dtype"]: r["gflops"] for r in records if r["impl"] == MATMUL}
        rows = []
        for group in by(records, "dtype", "impl", "head_dim"):
            first = group[0]
            if first["impl"] == MATMUL:
                continue
            row = [first["impl"], DTYPES[first["dtype"]], str(first["head_dim"])]
            for r in group:
                row += [number(r["gflops"]), f"{r['gflops'] / product[r['dtype']]:.2f}"]
            rows.append(row)
        products = " and ".join(f"{number(x)} in {DTYPES[dtype]}" for dtype, x in product.items())
        before = f"{cpu_origin(records)}; `torch.matmul` {products}:"
        tables.append(Table(header, rows, before))
    return tables


# ---------------------------------------------------------------------------------------------
# The kernels for GPUs
# ---------------------------------------------------------------------------------------------

COMPARED = ("dense_bias", "triton", "flash2")  # baselines with which this library is compared
VARIED = ("masks", "deterministic")  # groups of variants of one plain causal batch


def _attention_row(
    records: File, impls: Sequence[str], passes: Sequence[str], in_memory: Sequence[str]
) -> list[str]:
    found = {(r["impl"], r["pass"]): r for r in records}

    def figure(impl: str, direction: str) -> str:
        record = found.get((impl, direction), {})
        if record.get("error"):
            return "failed"
        if record.get("group") == "latency":
            return number(1e3 * record["ms"])
        value = record.get("share_of_matmul")
        return f"{value:.2f}" if value else number(record.get("host_us"))

    def times_as_fast(impl: str, other: str, direction: str) -> str:
        slower, faster = (found.get((name, direction), {}).get("ms") for name in (other, impl))
        return f"{slower / faster:.2f}" if slower and faster else "-"

    def mebibytes(impl: str, direction: str) -> str:
        peak = found.get((impl, direction), {}).get("peak_memory_bytes")
        return number(peak / 2**20) if peak else "-"

    return [
        *(records[0]["case"], str(records[0]["head_dim"])),
        *(_joined(figure(impl, direction) for direction in passes) for impl in impls),
        *(
            _joined(times_as_fast(impl, other, direction) for direction in passes)
            for impl in impls
            if impl not in BASELINES
            for other in COMPARED
            if other in impls
        ),
        *(_joined(mebibytes(impl, direction) for direction in passes) for impl in in_memory),
    ]


def _joined(cells: Iterable[str]) -> str:
    """Joins the cells of the passes into one; returns "-" if all of them are "-"."""
    every = list(cells)
    return "-" if set(every) == {"-"} else " / ".join(every)


def _is_plain(record: Record) -> bool:
    """Returns whether a case is plain causal; names of other cases have words after the lengths."""
    return "," not in record["case"]


def _over_plain(records: File, impls: Sequence[str], passes: Sequence[str]) -> list[list[str]]:
    """Returns the speed of each case relative to the plain causal case.

    Speed is the number of a mask's executed tiles, or of FLOPs where tiles were not counted, per
    time. A kernel computes about as many tiles.
    """

    def speed(record: Record) -> float:
        work = record["executed_tiles"] or record["flops"]
        return float(work / record["ms"])

    plain = {
        (r["head_dim"], r["impl"], r["pass"]): speed(r) for r in records if _is_plain(r) and r["ms"]
    }
    rows = []
    for group in by(records, "case", "head_dim"):
        found = {
            (r["impl"], r["pass"]): f"{speed(r) / plain[key]:.2f}"
            for r in group
            if r["ms"] and (key := (r["head_dim"], r["impl"], r["pass"])) in plain
        }
        rows.append([_joined(found.get((impl, each), "-") for each in passes) for impl in impls])
    return rows


def attention(files: Sequence[File]) -> list[Table]:
    """Returns one table for each file: the fraction of the matmul's speed, and speedups.

    For the group "latency" a table has GPU microseconds instead, and for "host" microseconds of the
    host. With a relative bias, compared with its dense form, it adds the peak memory of a call. In
    the groups of `VARIED` it has the speed relative to plain causal, and leaves out implementations
    that support only plain causal. The group "scan" has the table of `scan`.
    """
    tables = []
    for records in files:
        first = records[0]
        if first["group"] == "scan":
            tables.append(scan(records))
            continue
        varied = first["group"] in VARIED
        if varied:
            takers = {r["impl"] for r in records if not _is_plain(r)}
            records = [r for r in records if r["impl"] in takers] or records
        impls = list(dict.fromkeys(r["impl"] for r in records))
        passes = list(dict.fromkeys(r["pass"] for r in records))
        ours = [impl for impl in impls if impl not in BASELINES]
        over = [f"{impl} over {other}" for impl in ours for other in COMPARED if other in impls]
        in_memory = impls if "dense_bias" in impls else []
        rows = [
            _attention_row(each, impls, passes, in_memory)
            for each in by(records, "case", "head_dim")
        ]
        memory = [f"MiB {impl}" for impl in in_memory]
        header = ["sequences x lengths", "D", *impls, *over, *memory]
        if varied:
            header += [f"{impl} over plain" for impl in ours]
            more = _over_plain(records, ours, passes)
            rows = [[*row, *cells] for row, cells in zip(rows, more, strict=True)]
        filled = [n for n in range(len(header)) if any(row[n] != "-" for row in rows)]
        header, *rows = [[row[n] for n in filled] for row in (header, *rows)]
        unit = f"The matrix product runs at {number(first['matmul_tflops'])} TFLOP/s."
        if first["group"] in ("latency", "host"):
            unit = "Microseconds."
        tables.append(Table(header, rows, f"{unit} {gpu_origin(first)}:"))
    return tables


SOFTMAX = ("flash2", "cudnn")
SLOW, SHOWN_SLOWEST = 0.95, 5


def scan(records: File) -> Table:
    """Returns speedups over the faster softmax attention, at random shapes, by head dim and pass.

    A row has the median and the minimum of the speedups, and the number below `SLOW`. The text
    below the table has the slowest shapes and, for cases without softmax attention, the time
    relative to that of moving the bytes.
    """
    ratios: dict[tuple[str, str], list[float]] = {}
    named, alone = [], []
    for group in by(records, "case", "head_dim", "pass"):
        ms, first = {r["impl"]: r["ms"] for r in group if r["ms"]}, group[0]
        name = f"{first['case']} of {first['head_dim']}, {first['pass']}"
        if not (own := ms.get("hstu_attn")):
            continue
        if others := [ms[impl] for impl in SOFTMAX if impl in ms]:
            ratio = min(others) / own
            named.append((ratio, name))
            for head_dim in (str(first["head_dim"]), "all"):
                ratios.setdefault((head_dim, first["pass"]), []).append(ratio)
        else:
            needed = first["least_bytes"] / first["copy_tbps"] / 1e9  # [ms]
            alone.append(f"{name}: {number(1e3 * own)} us, {own / needed:.1f} times its bytes'")
    rows = []
    for key, x in sorted(ratios.items(), key=lambda item: item[0][0].rjust(3)):
        slow = sum(ratio < SLOW for ratio in x)
        figures = (f"{statistics.median(x):.2f}", f"{min(x):.2f}", str(slow))
        rows.append([*key, str(len(x)), *figures])
    slowest = [f"{name}: {ratio:.2f}" for ratio, name in sorted(named)[:SHOWN_SLOWEST]]
    header = ["D", "pass", "shapes", "median", "least", f"below {SLOW}"]
    before = f"Speed over the faster of {' and '.join(SOFTMAX)}. {gpu_origin(records[0])}:"
    return Table(header, rows, before, after="; ".join([*slowest, *alone]) + ".")


# ---------------------------------------------------------------------------------------------
# Other libraries
# ---------------------------------------------------------------------------------------------

PEERS = ("FBGEMM hstu", "Meta CUDA", "Meta Triton")
DIRECTIONS = ("forward", "backward")


def speed(ours: File, theirs: File) -> list[str]:
    """Returns README.md's lines about speed: one shape, forward and backward, against others.

    Args:
        ours: the records of `attention`.
        theirs: the records of the other libraries.
    """
    ours, theirs = (
        [r for r in records if (r["case"], r["head_dim"]) == ("8 x 4096", 128)]
        for records in (ours, theirs)
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
        f"({forward['heads']} heads of 128, bf16) take {number(forward['ms'])} ms forward "
        f"({forward['tflops']:.0f} TFLOP/s) and",
        f"{number(backward['ms'])} ms backward ({backward['tflops']:.0f}): {' and '.join(faster)} "
        f"times as fast as torch's FlashAttention-2 at the same shape, {' and '.join(rates)} times "
        "the",
        "TFLOP/s of the fastest of the [other HSTU kernels](#comparison-with-other-libraries) "
        f"({forward['date']}, commit {forward['commit'][:7]}).",
    ]


def peers(ours: File, theirs: File, cases: Sequence[str] = ()) -> Table:
    """Compares this library with others on causal batches.

    Args:
        ours: the records of `attention`.
        theirs: the records of the other libraries.
        cases: the names of the cases to show; empty for all.
    """
    found = {(r["impl"], r["case"], r["head_dim"], r["pass"]): r for r in theirs + ours}
    rows = []
    for [first, *_] in by(theirs, "case", "head_dim"):
        case, head_dim = first["case"], first["head_dim"]
        if cases and case not in cases:
            continue
        cells = []
        for impl in ("hstu_attn", *PEERS):
            times = []
            for direction in DIRECTIONS:
                tflops = found[impl, case, head_dim, direction]["tflops"]
                ms = found["hstu_attn", case, head_dim, direction]["flops"] / tflops / 1e9
                times.append(f"{number(ms)} ({tflops:.0f})")
            cells.append(" / ".join(times))
        rows.append([case, str(head_dim), *cells])
    own, other = ours[0], theirs[0]
    after = (
        f"hstu_attn: {own['gpu']}, torch {own['torch']}, {own['date']}, commit {own['commit']}, "
        f"matrix product {number(own['matmul_tflops'])} TFLOP/s. The others, in another "
        f"run: {other['gpu']}, torch {other['torch']}, {other['date']}, matrix product "
        f"{number(other['matmul_tflops'])} TFLOP/s; {other['method']}."
    )
    return Table(["sequences x length", "D", "hstu_attn", *PEERS], rows, after=after)


# ---------------------------------------------------------------------------------------------
# Layers, and training
# ---------------------------------------------------------------------------------------------


def training_step(files: Sequence[File]) -> list[Table]:
    """Returns one table for all files: a row for each implementation in each of them."""
    passes = ("attention forward", "attention backward", "step")
    rows = []
    for records in files:
        for found in by(records, "impl"):
            by_pass = {r["pass"]: r for r in found}
            step = by_pass["step"]
            model = f"{step['layers']} of {step['heads']} x {step['head_dim']}"
            times = [number(by_pass[name]["ms"]) for name in passes]
            rows.append([step["case"], model, step["impl"], *times, number(step["busy_ms"])])
    header = ["sequences x length", "layers of heads x D", "", *passes, "GPU busy"]
    origins = "\n\n".join(gpu_origin(records[0]) for records in files)
    return [Table(header, rows, after=origins)] if rows else []


def layer(files: Sequence[File]) -> list[Table]:
    """Returns for each file a table of passes and, for one layer, tables of the fused kernels."""
    tables = []
    for records in files:
        first = records[0]
        rows, of_kernels = [], []
        for r in records:
            if r["error"]:
                continue
            if r["pass"] != "kernels":
                numbers = [r["ms"], r["tflops"], r["share_of_matmul"], r["mfu"]]
                memory = [r["kept_memory_bytes"], r["peak_memory_bytes"]]
                sizes = [f"{size / 2**30:.2f}" for size in memory]
                rows.append([f"{r['impl']}, {r['pass']}", *map(number, numbers), *sizes])
            elif first["layers"] == 1 and r["impl"] in ("fused", "fused_fp8"):
                kernels = [
                    [
                        *(name.rpartition("::")[2], kernel["group"], f"{kernel['launches']:g}"),
                        number(kernel["ms"]),
                        number(kernel.get("share_of_copy"), 2),
                    ]
                    for name, kernel in r["kernels"].items()
                ]
                header = [f"kernel of {r['impl']}, both passes", "", "launches", "ms", "of copy"]
                of_kernels.append(Table(header, kernels))
        before = (
            f"{first['case']}, width {first['dim']}, {first['heads']} heads of "
            f"{first['head_dim']}, dropout {first['dropout']}, layers: {first['layers']}; product "
            f"{number(first['matmul_tflops'])} TFLOP/s, copy {number(first['copy_tbps'])} TB/s. "
            f"{gpu_origin(first)}:"
        )
        header = ["", "ms", "TFLOP/s", "of product", "MFU", "kept GiB", "peak GiB"]
        tables += [Table(header, rows, before), *of_kernels]
    return tables


def train(files: Sequence[File]) -> list[Table]:
    """Returns one table for each file."""
    columns: Cells = {
        "case": lambda r: f"{r['case']}, {r['division']}",
        "GPUs": lambda r: str(r["gpus"]),
        "tokens": lambda r: str(r["tokens"]),
        "load of the most loaded": lambda r: f"{r['imbalance']:.2f}",
        **number_columns(ms="ms"),
        "tokens/s per GPU": lambda r: f"{r['tokens_per_second_per_gpu']:.0f}",
        **number_columns(tflops_per_gpu="TFLOP/s per GPU", share_of_matmul="of product", mfu="MFU"),
        "scaling": lambda r: "-" if r["scaling"] is None else f"{r['scaling']:.2f}",
    }
    tables = []
    for records in files:
        first = records[0]
        before = (
            f"{first['strategy']}, {first['layers']} layers of width {first['dim']}, "
            f"{first['heads']} heads. {gpu_origin(first)}:"
        )
        tables.append(record_table(columns, records, before))
    return tables


def context(files: Sequence[File]) -> list[Table]:
    """Returns one table of all files."""
    columns: Cells = {
        "": lambda r: str(r["pass"]),
        "GPUs": lambda r: str(r["gpus"]),
        **number_columns(ms="ms", tflops_per_gpu="TFLOP/s per GPU", speedup="over one GPU"),
        "waiting": lambda r: f"{100 * r['waiting_share']:.1f} %",
    }
    origins = []
    for first, *_ in files:
        sizes = f"{first['case']}, {first['heads']} heads of {first['head_dim']}"
        origins.append(f"{sizes}. {gpu_origin(first)}")
    several = [r for records in files for r in records if r["gpus"] > 1]
    return [record_table(columns, several, after="\n\n".join(origins))] if several else []


# ---------------------------------------------------------------------------------------------
# The paged cache
# ---------------------------------------------------------------------------------------------

PAGED_FIELDS = ("head_dim", "history", "new", "candidates", "batch", "page_size")
PAGED_FORMS = ("graph", "e4m3", "fp8", "paged", "append", "gather", "recompute")
HOST_TIER_TIMES = ("resident", "returning", "with_evictions", "copies")


def paged(files: Sequence[File]) -> list[Table]:
    """Returns one table for each GPU."""
    header = ["D", *PAGED_FIELDS[1:-1], "page", "needs", *PAGED_FORMS, "needs / graph"]
    tables = []
    for records in files:
        first = records[0]
        rows = []
        for group in by(records, *PAGED_FIELDS):
            us = {r["impl"]: r["us"] for r in group}
            needs, graph = group[0]["needs_us"], us["graph"]
            rows.append(
                [
                    *(str(group[0][field]) for field in PAGED_FIELDS),
                    *(number(x) for x in (needs, *map(us.get, PAGED_FORMS))),
                    f"{needs / graph:.2f}" if graph else "failed",
                ]
            )
        before = (
            f"Microseconds; product {number(first['matmul_tflops'])} TFLOP/s, copy "
            f"{first['copy_tbps']} TB/s, appending 256 MB {first['append_tbps']} TB/s. "
            f"{gpu_origin(first)}:"
        )
        tables.append(Table(header, rows, before))
    return tables


def stack(files: Sequence[File]) -> list[Table]:
    """Returns for each file a table of steps whose users return from host memory."""
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
                *(number(r[f"{name}_us"] / 1e3) for name in HOST_TIER_TIMES),
                *(number(r[f"{name}_host_gbps"]) for name in ("from", "to")),
                f"{r['hidden']:.2f} of {r['hidden_at_most']:.2f}",
                number(r["recompute_us"] / 1e3),
            ]
            for r in records
        ]
        before = (
            f"Users who return from host memory, in a step of {first['layers']} layers of "
            f"{first['heads']} heads of {first['head_dim']}, as the head of "
            f"`benchmarks/stack.py` explains; milliseconds. {gpu_origin(first)}:"
        )
        tables.append(Table(header, rows, before))
    return tables


# ---------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[Sequence[File]], list[Table]]] = {
    make.__name__: make
    for make in (
        *(attention, context, cpu, cpu_limits, engine, fp8_training, layer, paged, published),
        *(ranking, retrieval, serving, stack, startup, train, training_step),
    )
}


def text(records: Sequence[Record]) -> str:
    """Returns the tables of a run, as text with aligned columns."""
    grouped = by(({"group": None, **r} for r in records), "benchmark", "group")
    made = [table for file in grouped for table in TABLES[file[0]["benchmark"]]([file])]
    return "\n\n".join("\n".join(table.text()) for table in made)
