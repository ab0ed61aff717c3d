"""Plots of stored results.

    python -m benchmarks.plots attention.json plots
    python -m benchmarks.plots benchmarks/results/h200/paged.json plots

The plots by benchmark:

    attention     roofline.png: TFLOP/s by FLOPs per moved byte, and the limits set by the matrix
                  product and the copy of the same run; roofline-relative.png: the same for cases
                  with a relative bias; forward-backward-dD.png for each head dim D: a bar for each
                  implementation and case of the table
    train         train-STRATEGY.png: tokens/s per GPU by the number of GPUs
    paged         paged.png: the time of each form, and its lower bound
    published     published-SET.png: the metrics after each epoch
    fp8_training  fp8-training-RECIPE.png: the training loss and NDCG@10 of each precision
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PARSER = argparse.ArgumentParser(
    prog="python -m benchmarks.plots",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
)
PARSER.add_argument("file", type=Path, metavar="FILE", help="what a benchmark's --json wrote")
PARSER.add_argument("folder", type=Path, metavar="DIR", help="where the plots go")

if __name__ == "__main__":
    PARSER.parse_args()  # --help or a wrong option ends here, before torch is imported

from .record import Record, read_records

__all__ = ["bars", "curves", "draw", "main", "paged", "precisions", "roofline", "training"]

DIRECTIONS = ("forward", "backward")
MARKERS = {"forward": "o", "backward": "s"}
COLORS = {
    "hstu_attn": "#3d6ea5",
    "triton": "#c97b2a",
    "dense_bias": "#c97b2a",
    "flash2": "#8b8b86",
    "cudnn": "#3f8f62",
}
OTHER = "#7f9fc4"  # this library with the kernels of another architecture
DPI = 120


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _measured(records: Sequence[Record], group: str = "table") -> list[Record]:
    """Returns the records of a group that did not fail."""
    return [r for r in records if r.get("group") == group and r.get("tflops")]


def _implementations(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(r["impl"] for r in records))


def _title(record: Record) -> str:
    return f"{record['gpu']}, {record['dtype']}, commit {record['commit']}, {record['date']}"


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    _pyplot().close(figure)


def roofline(measured: Sequence[Record], path: Path) -> None:
    """Draws TFLOP/s by arithmetic intensity, with the limits measured in the same run."""
    figure, axes = _pyplot().subplots(figsize=(9, 6))
    for impl in _implementations(measured):
        for direction in DIRECTIONS:
            chosen = [r for r in measured if (r["impl"], r["pass"]) == (impl, direction)]
            axes.scatter(
                [r["flops"] / r["least_bytes"] for r in chosen],
                [r["tflops"] for r in chosen],
                s=28,
                marker=MARKERS[direction],
                color=COLORS.get(impl, OTHER),
                alpha=0.85,
                label=f"{impl}, {direction}",
            )
    peak, bandwidth = measured[0]["matmul_tflops"], measured[0]["copy_tbps"]
    intensities = [r["flops"] / r["least_bytes"] for r in measured]
    lowest = min(r["tflops"] for r in measured)
    ends = [min(peak / bandwidth, *intensities) / 2, max(peak / bandwidth, *intensities) * 2]
    corner = peak / bandwidth
    axes.plot([ends[0], corner, ends[1]], [ends[0] * bandwidth, peak, peak], color="#333333")
    axes.set(
        xscale="log",
        yscale="log",
        ylim=(min(peak / 30, lowest / 3), peak * 1.3),  # so that the legend has room below
        xlabel="FLOP per byte that has to be moved",
        ylabel="TFLOP/s",
        title=_title(measured[0]),
    )
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.legend(fontsize=8, ncols=2, loc="lower right")
    _save(figure, path)


def bars(records: Sequence[Record], head_dim: int, path: Path) -> None:
    """Draws fractions of the matmul's speed for one head dim, by case and implementation."""
    measured = [r for r in _measured(records) if r["head_dim"] == head_dim]
    impls = _implementations(measured)
    cases = list(dict.fromkeys(r["case"] for r in measured))
    share = {(r["case"], r["pass"], r["impl"]): r["share_of_matmul"] for r in measured}
    figure, panels = _pyplot().subplots(2, 1, figsize=(10, 7), sharex=True)
    width = 0.8 / len(impls)
    for axes, direction in zip(panels, DIRECTIONS, strict=True):
        for n, impl in enumerate(impls):
            found = [
                (x, share[case, direction, impl])
                for x, case in enumerate(cases)
                if (case, direction, impl) in share
            ]
            places = [x + (n - (len(impls) - 1) / 2) * width for x, _ in found]
            heights = [height for _, height in found]
            color = COLORS.get(impl, OTHER)
            drawn = axes.bar(places, heights, width, color=color, label=impl)
            axes.bar_label(drawn, fmt="%.2f", fontsize=7)
        axes.set(ylabel=f"{direction}, share of matmul", ylim=(0, 1))
    panels[0].set_title(f"head dim {head_dim}; {_title(measured[0])}")
    panels[0].legend(fontsize=8, ncols=len(impls), loc="upper left")
    labels = [case.replace(", ", ",\n") for case in cases]
    panels[1].set_xticks(range(len(cases)), labels, fontsize=8)
    _save(figure, path)


def paged(records: Sequence[Record], path: Path) -> None:
    """Draws benchmarks.paged at batch 8 and pages of 128: each form and the least possible time."""
    forms = ("graph", "e4m3", "fp8", "gather", "recompute")
    found: dict[tuple[int, ...], dict[str, Record]] = {}
    for r in records:
        if (r["batch"], r["page_size"]) == (8, 128):
            key = (r["head_dim"], r["history"], r["new"], r["candidates"])
            found.setdefault(key, {})[r["impl"]] = r
    dims = sorted({key[0] for key in found})
    figure, axes = _pyplot().subplots(1, len(dims), figsize=(5.5 * len(dims), 5), squeeze=False)
    for axis, dim in zip(axes[0], dims, strict=True):
        cases = {key[1:]: value for key, value in found.items() if key[0] == dim}
        for n, name in enumerate(forms):
            heights = [case[name]["us"] for case in cases.values()]
            axis.bar([x + 0.16 * n for x in range(len(cases))], heights, 0.15, label=name)
        needs = [case["graph"]["needs_us"] for case in cases.values()]
        axis.hlines(
            needs,
            [x - 0.1 for x in range(len(cases))],
            [x + 0.7 for x in range(len(cases))],
            colors="black",
            label="needs",
        )
        labels = [f"{history} / {new} / {candidates}" for history, new, candidates in cases]
        axis.set_xticks([x + 0.3 for x in range(len(cases))], labels, rotation=60, ha="right")
        axis.set_yscale("log")
        axis.set_title(f"head dim {dim}")
        axis.set_xlabel("history / new / candidates")
    axes[0][0].set_ylabel("microseconds, batch 8")
    axes[0][0].legend(loc="lower center", bbox_to_anchor=(0.5, 1.06), ncols=5)
    _save(figure, path)


def training(records: Sequence[Record], path: Path) -> None:
    """Draws benchmarks.train: tokens/s per GPU by the number of GPUs."""
    figure, axes = _pyplot().subplots(figsize=(7, 4.5))
    kinds = dict.fromkeys((r["case"], r["division"]) for r in records)
    for case, division in kinds:
        line = [r for r in records if (r["case"], r["division"]) == (case, division)]
        # Each line begins at one GPU.
        start = "weak" if case == "strong" else case
        alone = [r for r in records if (r["case"], r["gpus"]) == (start, 1)]
        points = [*(alone if line[0]["gpus"] > 1 else []), *line]
        axes.plot(
            [r["gpus"] for r in points],
            [r["tokens_per_second_per_gpu"] / 1e3 for r in points],
            marker="o",
            label=f"{case}, {division}",
        )
    axes.set(xlabel="GPUs", ylabel="thousand tokens/s per GPU", title=_title(records[0]))
    axes.set_xticks(sorted({r["gpus"] for r in records}))
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    _save(figure, path)


def curves(records: Sequence[Record], path: Path) -> None:
    """Draws benchmarks.published: metrics by epoch, with the published ones as dashed lines."""
    metrics = {"hit_rate_10": "HR@10", "ndcg_10": "NDCG@10"}
    figure, panels = _pyplot().subplots(1, len(metrics), figsize=(11, 4.5))
    drawn = [r for r in records if r["curve"]]
    for axes, (name, label) in zip(panels, metrics.items(), strict=True):
        for n, record in enumerate(drawn):
            epochs = range(1, len(record["curve"]) + 1)
            legend = " ".join(filter(None, (record["recipe"], record["options"])))
            legend += ", order only" if record["order_only"] else ""
            values = [each[name] for each in record["curve"]]
            axes.plot(epochs, values, color=f"C{n}", linewidth=1.2, label=legend)
            if name in record["published"] and not record["options"]:
                axes.axhline(record["published"][name], color=f"C{n}", linestyle="--", linewidth=1)
        for style, r in zip((":", "-."), (r for r in records if r.get("level")), strict=False):
            value = r["level"][name]
            axes.axhline(value, color="#8b8b86", linestyle=style, linewidth=1, label=r["row"])
        axes.set(xlabel="epoch", ylabel=f"{label}, {drawn[0].get('curve_split', 'test')}")
        axes.grid(alpha=0.2)
    panels[0].legend(fontsize=8, loc="lower right")
    first = drawn[0]
    dashed = "; dashed: published" if any(r["published"] for r in drawn) else ""
    panels[0].set_title(f"{first['set']}{dashed}", fontsize=10)
    panels[1].set_title(f"{first['gpu'] or first['cpu']}, commit {first['commit']}", fontsize=10)
    _save(figure, path)


def precisions(records: Sequence[Record], path: Path) -> None:
    """Draws benchmarks.fp8_training: means over the seeds by epoch, a line for each precision."""
    figure, (loss, ndcg) = _pyplot().subplots(1, 2, figsize=(11, 4.5))
    for record in (r for r in records if r["curve"]):
        losses, tests = record["losses"], [each["ndcg_10"] for each in record["curve"]]
        of_tests = [record["epochs"] * (n + 1) / len(tests) for n in range(len(tests))]
        loss.plot(range(1, len(losses) + 1), losses, linewidth=1.2, label=record["precision"])
        ndcg.plot(of_tests, tests, marker=".", linewidth=1.2)
    first = records[0]
    loss.set(title=f"{Path(first['recipe']).stem} {first['shared']}", ylabel="loss, training")
    ndcg.set(title=f"{first['gpu'] or first['cpu']}, commit {first['commit']}")
    ndcg.set(ylabel=f"NDCG@10, {first['curve_split']}")
    for axes in (loss, ndcg):
        axes.set(xlabel="epoch")
        axes.grid(alpha=0.2)
    loss.legend(fontsize=8)
    _save(figure, path)


def draw(file: Path, folder: Path) -> list[Path]:
    """Draws all plots of a file of records; returns their paths."""
    records = read_records(file)
    drawn: list[Path] = []

    def add(name: str, make: Callable[..., None], *arguments: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        drawn.append(folder / name)
        make(*arguments, drawn[-1])

    benchmark = records[0]["benchmark"]
    if benchmark == "train":
        add(f"train-{records[0]['strategy']}.png", training, records)
    elif benchmark == "published":
        add(f"published-{records[0]['set']}.png", curves, records)
    elif benchmark == "fp8_training":
        add(f"fp8-training-{Path(records[0]['recipe']).stem}.png", precisions, records)
    elif benchmark == "paged":
        add("paged.png", paged, records)
    elif benchmark == "attention":
        if measured := _measured(records):
            add("roofline.png", roofline, measured)
        for head_dim in sorted({r["head_dim"] for r in measured}):
            add(f"forward-backward-d{head_dim}.png", bars, records, head_dim)
        if measured := _measured(records, "relative"):
            add("roofline-relative.png", roofline, measured)
    return drawn


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws the plots of a file."""
    options = PARSER.parse_args(arguments)
    for path in draw(options.file, options.folder):
        print(path)


if __name__ == "__main__":
    main()
