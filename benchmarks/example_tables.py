"""The tables of the examples: the metrics of models, and the speed of their servers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from .record import Record
from .table import (
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

__all__ = [
    "engine",
    "fp8_training",
    "published",
    "ranking",
    "retrieval",
    "serving",
    "soak",
    "startup",
]


def retrieval(files: Sequence[File]) -> list[Table]:
    """Returns one table for each machine."""
    names = {"hit_rate_10": "HR@10", "hit_rate_50": "HR@50", "ndcg_10": "NDCG@10"}
    return [
        Table(
            ["", *names.values()],
            [[r["model"], *(f"{r[name]:.4f}" for name in names)] for r in records],
            after=f"{records[0]['seconds']:.0f} seconds on {cpu_origin(records)}.",
        )
        for records in files
    ]


PUBLISHED = {
    "hit_rate_10": "HR@10",
    "ndcg_10": "NDCG@10",
    "hit_rate_50": "HR@50",
    "ndcg_50": "NDCG@50",
    "hit_rate_200": "HR@200",
    "ndcg_200": "NDCG@200",
    "mrr": "MRR",
}


def _spread(record: Record, name: str) -> str:
    return _with_deviation(record["mean"][name], record["deviation"][name])


def published(files: Sequence[File]) -> list[Table]:
    """Returns a table for each data set, with the published metrics below the measured ones."""
    tables = []
    every = [record for file in files for record in file]
    for records in by(every, "set", "fingerprint"):
        first, rows = records[0], {}
        mark = ", order only" if first["order_only"] else ""
        for recipe in by(records, "recipe", "options"):
            name = " ".join(filter(None, (recipe[0]["recipe"], recipe[0]["options"])))
            for record in recipe:
                row = f"{name}, {record['row']}" if record["of_model"] else record["row"]
                runs = [str(record["seeds"]), number(record["seconds"])]
                cells = [_spread(record, key) for key in PUBLISHED]
                rows[row + mark] = [*cells, *(runs if record["of_model"] else ("-", "-"))]
            if given := recipe[0]["published"]:
                cells = [f"{given[key]:.4f}" if key in given else "-" for key in PUBLISHED]
                rows[f"{recipe[0]['recipe']}, published"] = [*cells, "-", "-"]
        note = f" {first['note']}" if first["note"] else ""
        before = (
            f"{first['set']}: {first['events']:,} events of {first['users']:,} users on "
            f"{first['items']:,} items, content {first['fingerprint']}.{note} {first['epochs']} "
            f"epochs; means and standard deviations over the seeds. {gpu_origin(first)}:"
        )
        header = ["", *PUBLISHED.values(), "seeds", "seconds"]
        tables.append(Table(header, [[name, *cells] for name, cells in rows.items()], before))
    return tables


def _with_deviation(mean: float, deviation: float | None) -> str:
    return f"{mean:.4f}" + (f" ± {deviation:.4f}" if deviation else "")


def ranking(files: Sequence[File]) -> list[Table]:
    """Returns one table for each file; it describes the data set if that is not synthetic."""
    kinds = {"auc": "AUC", "ne": "NE"}
    tables = []
    for records in files:
        first = records[0]
        names = [name.partition("/") for name in first["metrics"]]
        header = ["", *(f"{task}, {kinds[kind]}" for kind, _, task in names)]
        rows = []
        for r in records:
            deviations = r.get("deviation", {})
            cells = [_with_deviation(x, deviations.get(n)) for n, x in r["metrics"].items()]
            rows.append([r["model"], *cells])
        before = ""
        if "data" in first:
            given = f", `{first['options']}`" if first["options"] else ""
            order = ", order only" if first["order_only"] else ""
            before = (
                f"{first['data']}{given}: {first['events']:,} events of {first['users']:,} users "
                f"on {first['items']:,} items, content {first['fingerprint']}{order}; seeds: "
                f"{first['seeds']}."
            )
        origin = gpu_origin(first) if first.get("gpu") else f"{cpu_origin(records)}."
        tables.append(Table(header, rows, before, after=origin))
    return tables


FP8_TRAINING = {"loss": "loss", **dict(list(PUBLISHED.items())[:3])}


def fp8_training(files: Sequence[File]) -> list[Table]:
    """Returns a table for each recipe: figures over the seeds, and differences from bf16."""
    header = ["", *FP8_TRAINING.values(), *(f"{x} - bf16" for x in FP8_TRAINING.values())]
    tables = []
    for records in (x for file in files for x in by(file, "recipe", "shared", "row")):
        first, rows = records[0], []
        base: dict[str, dict[str, float]] = next(
            (r["of_seeds"] for r in records if r["precision"] == "bf16"), {}
        )
        for r in records:
            runs = r["of_seeds"]
            cells = [_over_seeds([run[name] for run in runs.values()]) for name in FP8_TRAINING]
            pairs = [(runs[seed], base[seed]) for seed in runs if seed in base and runs is not base]
            changes = [
                [run[name] - of_bf16[name] for run, of_bf16 in pairs] for name in FP8_TRAINING
            ]
            rows.append([r["precision"], *cells, *(_over_seeds(x, "+") for x in changes)])
        before = (
            f"`{first['recipe']} {first['shared']}` on {first['data']}, {first['row']}; epochs: "
            f"{first['epochs']}; seeds: {first['seeds']}. {gpu_origin(first)}:"
        )
        tables.append(Table(header, rows, before))
    return tables


def _over_seeds(values: Sequence[float], sign: str = "") -> str:
    """Returns the mean, and the standard deviation if there are several values; "-" if none."""
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}.4f}{deviation}" if values else "-"


LOAD = number_columns(p50_ms="median ms", p95_ms="p95 ms", p99_ms="p99 ms", mean_batch="in a batch")


def _origin(records: File) -> str:
    first = records[0]
    others = first.get("others", 0)
    meanwhile = f"; other work kept {others:.1f} processors busy" if others > 0.05 else ""
    return f"{gpu_origin(first) if first['gpu'] else cpu_origin(records)}{meanwhile}."


def _meanwhile(record: Record) -> str:
    seconds = record.get("event_seconds")
    return f"{record['event']}, in {number(seconds)} s" if seconds else str(record["event"])


ARRIVALS: Cells = {
    "load": lambda r: f"{r['load']:.0%}",
    "meanwhile": _meanwhile,
    **number_columns(qps="a second", p50_ms="median ms", p95_ms="p95 ms", p99_ms="p99 ms"),
    **number_columns(worst_ms="worst ms"),
    "pause ms": lambda r: number(r.get("pause_ms")),
    "fsync ms": lambda r: number(r.get("fsync_ms")),
    **number_columns(failed="failed"),
}


def serving(files: Sequence[File]) -> list[Table]:
    """Returns one table for each machine."""
    columns: Cells = {
        "requests under way": lambda r: str(r["concurrency"]),
        **number_columns(qps="a second"),
        **LOAD,
    }
    made = []
    for records in files:
        if "load" in records[0]:
            made.append(arrivals(records))
        else:
            made.append(record_table(columns, records, after=_origin(records)))
    return made


def startup(files: Sequence[File]) -> list[Table]:
    """Returns one table for each machine."""
    columns: Cells = {
        "store": lambda r: r["store"],
        "users": lambda r: f"{r['users']:,}",
        "events": lambda r: f"{r['events']:,}",
        **number_columns(fill_seconds="s to fill", ready_seconds="s to ready"),
        **number_columns(first_ms="ms of the first answer"),
    }
    return [record_table(columns, records, after=_origin(records)) for records in files]


def soak(records: File) -> Table:
    """Returns the table of a soak test: the resident memory after each part."""

    def memory(part: float) -> Callable[[Record], str]:
        return lambda r: f"{r['memory_mib'][round(part * len(r['memory_mib'])) - 1]:.1f}"

    columns: Cells = {
        "requests": lambda r: f"{r['soak']:,}",
        **number_columns(qps="a second"),
        "evictions": lambda r: f"{r['evictions']:,}",
        **{f"MiB after {part:.0%}": memory(part) for part in (0.01, 0.1, 0.5, 1)},
    }
    return record_table(columns, records, after=f"{cpu_origin(records)}.")


def engine(files: Sequence[File]) -> list[Table]:
    """Returns for each file a table by concurrency and, if it has loads, a table by load."""
    if soaks := [records for records in files if "soak" in records[0]]:
        return [*map(soak, soaks), *engine([r for r in files if "soak" not in r[0]])]
    columns: Cells = {
        "requests under way": lambda r: str(r["concurrency"]),
        "graphs": lambda r: str(r["graphs"]),
        **number_columns(qps="requests/s"),
        **LOAD,
        **number_columns(graph_share="by graphs", hit_share="cached"),
    }
    tables = []
    for records in files:
        of_loads = [r for r in records if "load" in r]
        tables.append(record_table(columns, [r for r in records if "load" not in r]))
        if of_loads:
            tables.append(arrivals(of_loads))
    return tables


def arrivals(records: File) -> Table:
    """Returns the table of the loads of an engine or of servers."""
    first = records[0]
    columns = dict(ARRIVALS)
    if first.get("fsync_ms") is None:
        del columns["fsync ms"]
    if "servers" in first:
        columns = {"served by": lambda r: r["servers"], **columns}
    else:
        columns |= number_columns(mean_batch="in a batch", hit_share="cached")
    histories = ""
    if "log" in first:
        histories = f", histories as long as in {first['log']}, cut at {first['history']:,} events"
    before = (
        f"{first['capacity']:,.0f} requests/s are answered if more arrive than can be; users by "
        f"a Zipf distribution with the exponent {first['zipf']:g}{histories}:"
    )
    return record_table(columns, records, before, after=_origin(records))
