"""HSTU layers on a GPU, fused and composed.

    python -m benchmarks.layer --json layer.json
    python -m benchmarks.layer --impls fused composed --layers 8 --batch 8

One layer, or a stack of them, with fp32 weights on bf16 rows of equal causal sequences, forward,
and forward with backward, in which gradients of the rows and of every weight are computed. The
implementations:

    fused                the layer as one autograd function
    fused_recompute      the same with the flags that recompute all but matrix products
    fused_recompute_all  the same with every flag that recomputes
    composed             the layer of torch's functions around the attention operator
    compiled             the same under torch.compile

Each is first held to the composed layer on a small batch. Then rounds are interleaved, and a time
is the median by events. FLOPs are those of the matrix products, 2 for each product of two numbers,
and of attention, 4 * L^2 / 2 for each head and column; the backward counts twice the forward of the
products and 2.5 times that of attention, and nothing that is recomputed. "share" is that of a
product of two 8192 x 8192 matrices in bf16, which takes part in every round: work as long as this
lowers the GPU's clocks, for all of it alike. "MFU" is the share of what the data sheet says of
bf16. "kept" is the memory that the forward leaves allocated, its result
included, and "peak" the highest point of forward and backward.

The times of kernels are from a profile of a few more rounds of forward and backward. For the
kernels of the fused layer's steps the bytes of rows that they must move are known, and so is the
share of the speed of a device copy in the same run.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

RECOMPUTE = {"recompute_norm": True, "recompute_silu": True, "recompute_gate": True}
RECOMPUTE_ALL = {**RECOMPUTE, "recompute_linear": True}
IMPLS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "fused_recompute": {"fused": True, **RECOMPUTE},
    "fused_recompute_all": {"fused": True, **RECOMPUTE_ALL},
    "composed": {"fused": False},
    "compiled": {"fused": False},
}


class Options(argparse.Namespace):
    """The command line."""

    json: Path | None
    trace: Path | None
    impls: list[str]
    rounds: int
    commit: str | None
    batch: int
    length: int
    dim: int
    heads: int
    head_dim: int
    dropout: float
    layers: int


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layer", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write the results to FILE")
    add("--trace", type=Path, metavar="FILE", help="write the Chrome trace of each implementation "
        "beside FILE, with its name before the suffix")  # fmt: skip
    add("--impls", nargs="+", default=list(IMPLS), choices=IMPLS, metavar="NAME",
        help=f"of {', '.join(IMPLS)} (default: all)")  # fmt: skip
    add("--rounds", type=int, default=21, help="times of each pass (default 21)")
    add("--commit", help="what to record as the commit, where there is no repository")
    add("--batch", type=int, default=32, help="sequences (default 32)")
    add("--length", type=int, default=4096, help="rows of each (default 4096)")
    add("--dim", type=int, default=1024, help="width of the rows (default 1024)")
    add("--heads", type=int, default=4, help="(default 4)")
    add("--head-dim", type=int, default=256, help="of u, v, q and k (default 256)")
    add("--layers", type=int, default=1, help="one after another (default 1)")
    add("--dropout", type=float, default=0.0, help="before the output linear (default 0); with it "
        "the results of implementations are not compared")  # fmt: skip
    return parser.parse_args(arguments, namespace=Options())


if __name__ == "__main__":
    parse()  # --help or a wrong option ends here, before torch is imported

import torch
from torch import Tensor

from hstu_attn import HSTULayerConfig
from hstu_attn.layer import HSTUStack

from .attention import explain
from .gpu import MATMUL_FLOPS, Gpu
from .report import gpu_software, rounded, text_table, write_records
from .training_step import ON_GPU, SPIN, Event, Record, read_events

__all__ = ["IMPLS", "Options", "group_of", "layer_flops", "main", "step_bytes"]

FORWARD, BOTH = "forward", "forward and backward"
SMALL_BATCH, SMALL_LENGTH = 2, 160
TOLERANCE = 0.1  # of the norm of the composed layer's result, on the small batch
WARM_UP = 3
PROFILED_ROUNDS = 3
# Dense bf16, by the data sheets; an "NVIDIA H200 NVL" is another.
PEAK_TFLOPS = {"NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H200": 989.4}
DTYPE = torch.bfloat16


def make_config(options: Options) -> HSTULayerConfig:
    """The layer that is measured."""
    return HSTULayerConfig(
        embedding_dim=options.dim,
        num_heads=options.heads,
        hidden_dim=options.head_dim,
        attention_dim=options.head_dim,
        output_dropout_ratio=options.dropout,
    )


# ---------------------------------------------------------------------------------------------
# What there is to do
# ---------------------------------------------------------------------------------------------


def layer_flops(config: HSTULayerConfig, batch: int, length: int) -> dict[str, float]:
    """Of a layer by pass: see above."""
    products = 2 * batch * length * config.embedding_dim
    products *= sum(config.split_sizes) + config.output_features
    widths = config.attention_dim + config.hidden_dim
    attention = 2 * batch * length**2 / 2 * config.num_heads * widths
    return {FORWARD: products + attention, BOTH: 3 * products + 3.5 * attention}


def step_bytes(config: HSTULayerConfig, rows: int) -> dict[str, int]:
    """Bytes of rows that a launch of each kernel of triton_kernels.py reads and writes."""
    width, (u, *_), columns = config.embedding_dim, config.split_sizes, sum(config.split_sizes)
    activated = {"silu": columns, "silu_u": u, "none": 0}[config.linear_activation]
    read_by_output = config.output_features
    elements = {
        "layer_norm": 2 * width,
        "layer_norm_backward": (4 + config.recompute_norm) * width,
        "silu": 2 * activated,
        # With a bias every column is read once for its gradient.
        "activation_backward": 2 * activated + (columns if config.linear_bias else activated),
        "gate": 2 * u + read_by_output,
        "gate_backward": 4 * u + (1 + config.recompute_gate) * read_by_output,
    }
    return {name: DTYPE.itemsize * rows * n for name, n in elements.items()}


_PRODUCTS = re.compile(r"gemm|nvjet|cutlass|cublas|xmma|splitK", re.IGNORECASE)


def group_of(kernel: str) -> str:
    """ "attention", "gemm" or "elementwise", which is all else, by the name of a kernel."""
    if "hstu::" in kernel:
        return "attention"
    return "gemm" if _PRODUCTS.search(kernel) else "elementwise"


# ---------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """Rows of equal sequences, and a gradient of the result."""

    x: Tensor
    cotangent: Tensor
    seq_offsets: Tensor
    max_seq_len: int

    @classmethod
    def random(cls, config: HSTULayerConfig, batch: int, length: int, device: str) -> Batch:
        """Normally distributed."""
        shape = (batch * length, config.embedding_dim)
        x, cotangent = (torch.randn(shape, dtype=DTYPE, device=device) for _ in range(2))
        offsets = length * torch.arange(batch + 1, device=device)
        return cls(x.requires_grad_(), cotangent, offsets, length)


@dataclass
class Entrant:
    """One implementation: its layers, its times, and why it is out of the race."""

    impl: str
    config: HSTULayerConfig
    layers: int
    stack: HSTUStack | None = None
    call: Callable[..., Tensor] | None = None
    times: dict[str, list[float]] = field(default_factory=lambda: {FORWARD: [], BOTH: []})
    kept: int | None = None
    peak: int | None = None
    kernels: list[Event] = field(default_factory=list)
    error: str = ""

    def attempt(self, action: Callable[..., Any], *arguments: Any) -> None:
        """Do it, unless something failed before; a failure leaves the others."""
        if self.error:
            return
        try:
            action(*arguments)
        except Exception as failure:
            self.error = explain(failure)
            traceback.print_exc()

    def begin(self, weights: dict[str, Tensor], device: str) -> None:
        """Make the layers, of given weights."""
        self.stack = HSTUStack(self.config, self.layers, device=device)
        self.stack.load_state_dict(weights)
        self.call = torch.compile(self.stack) if self.impl == "compiled" else self.stack

    def forward(self, batch: Batch) -> Tensor:
        """The result, which holds what the backward needs."""
        assert self.call is not None
        return self.call(batch.x, batch.seq_offsets, batch.max_seq_len)

    def both(self, batch: Batch) -> tuple[Tensor, ...]:
        """The result and the gradients of the rows and of every weight."""
        assert self.stack is not None
        output = self.forward(batch)
        leaves = [batch.x, *self.stack.parameters()]
        return (output, *torch.autograd.grad(output, leaves, batch.cotangent))

    def check(self, batch: Batch, expected: Sequence[Tensor]) -> None:
        """Raises AssertionError where a result is not that of the composed layer."""
        assert self.stack is not None
        names = ("output", "dx", *(f"d {n}" for n, _ in self.stack.named_parameters()))
        for name, actual, wanted in zip(names, self.both(batch), expected, strict=True):
            error = (actual.float() - wanted.float()).norm() / wanted.float().norm()
            assert error <= TOLERANCE, f"{name}: relative error {error:.3g}"

    def warm_up(self, batch: Batch) -> None:
        """Also tunes and compiles."""
        for _ in range(WARM_UP):
            self.both(batch)

    def time(self, batch: Batch, gpu: Gpu) -> None:
        """One more round."""
        self.times[FORWARD].append(gpu.milliseconds(lambda: self.forward(batch)))
        self.times[BOTH].append(gpu.milliseconds(lambda: self.both(batch)))

    def measure_memory(self, batch: Batch, gpu: Gpu) -> None:
        """What the forward keeps, and the highest point of both."""
        self.kept = gpu.held_bytes(lambda: self.forward(batch))
        self.peak = gpu.peak_bytes(lambda: self.both(batch))

    def profile(self, batch: Batch, gpu: Gpu, path: Path) -> None:
        """Find the kernels of some more rounds; the Chrome trace goes to `path`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with torch.profiler.profile() as profiler:
            for _ in range(PROFILED_ROUNDS):
                gpu.milliseconds(lambda: self.both(batch))
        profiler.export_chrome_trace(str(path))
        self.kernels = [
            event
            for event in read_events(path)
            if event.get("cat") in ON_GPU and SPIN not in event["name"]
        ]

    def records(self, options: Options, limits: dict[str, float]) -> list[Record]:
        """A record for each pass, and one of the kernels of both."""
        if self.error:
            return [{"impl": self.impl, "pass": BOTH, "ms": None, "error": self.error}]
        flops = layer_flops(self.config, options.batch, options.length)
        peak = limits.get("peak_tflops")
        found: list[Record] = []
        for name, times in self.times.items():
            ms = statistics.median(times)
            tflops = self.layers * flops[name] / ms / 1e9
            found.append(
                {
                    "impl": self.impl,
                    "pass": name,
                    "ms": rounded(ms),
                    "fastest_ms": rounded(min(times)),
                    "rounds": len(times),
                    "flops": self.layers * flops[name],
                    "tflops": rounded(tflops),
                    "share_of_matmul": rounded(tflops / limits["matmul_tflops"]),
                    "mfu": rounded(tflops / peak) if peak else None,
                    "kept_memory_bytes": self.kept,
                    "peak_memory_bytes": self.peak,
                    "error": "",
                }
            )
        return [*found, self.kernel_record(options, limits["copy_tbps"])]

    def kernel_record(self, options: Options, copy_tbps: float) -> Record:
        """Milliseconds of one forward and backward by groups and kernels, the longest first."""
        bytes_of = step_bytes(self.config, options.batch * options.length)
        by_name: dict[str, list[float]] = {}
        for event in self.kernels:
            by_name.setdefault(short_name(event["name"]), []).append(event["dur"] / 1e3)
        groups = dict.fromkeys(("gemm", "attention", "elementwise"), 0.0)
        kernels: dict[str, Record] = {}
        for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1])):
            ms, launches = sum(times) / PROFILED_ROUNDS, len(times) / PROFILED_ROUNDS
            groups[group_of(name)] += ms
            kernels[name] = {"group": group_of(name), "ms": rounded(ms), "launches": launches}
            if name in bytes_of:
                moved = launches * bytes_of[name]
                share = moved / ms / 1e9 / copy_tbps
                kernels[name] |= {"bytes": int(moved), "share_of_copy": rounded(share)}
        return {
            "impl": self.impl,
            "pass": "kernels",
            "ms": rounded(sum(groups.values())),
            "rounds": PROFILED_ROUNDS,
            **{f"{group}_ms": rounded(ms) for group, ms in groups.items()},
            "kernels": kernels,
            "error": "",
        }


def short_name(kernel: str) -> str:
    """Without arguments, return type and anonymous namespaces."""
    name = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split("[<(]", name)[0].strip()


def measure(gpu: Gpu, options: Options, folder: Path) -> tuple[list[Entrant], float]:
    """Checks, times and profiles every implementation; traces go to the folder. Also returns the
    TFLOP/s of the product."""
    config = make_config(options)
    torch.manual_seed(0)
    weights = HSTUStack(config, options.layers, device=gpu.device).state_dict()
    composed = Entrant("composed", replace(config, fused=False), options.layers)
    composed.begin(weights, gpu.device)
    entrants = [
        Entrant(name, replace(config, **IMPLS[name]), options.layers) for name in options.impls
    ]
    for entrant in entrants:
        entrant.attempt(entrant.begin, weights, gpu.device)
    if not options.dropout:
        small = Batch.random(config, SMALL_BATCH, SMALL_LENGTH, gpu.device)
        expected = composed.both(small)
        for entrant in entrants:
            entrant.attempt(entrant.check, small, expected)
    batch = Batch.random(config, options.batch, options.length, gpu.device)
    for entrant in entrants:
        entrant.attempt(entrant.warm_up, batch)
    matmul, products = gpu.matmul(), []
    for round_ in range(options.rounds):
        products.append(gpu.milliseconds(matmul))
        first = round_ % len(entrants)
        for entrant in (*entrants[first:], *entrants[:first]):
            entrant.attempt(entrant.time, batch, gpu)
    for entrant in entrants:
        gc.collect()
        gpu.release()
        entrant.attempt(entrant.measure_memory, batch, gpu)
        path = options.trace or folder / "trace.json"
        path = path.with_stem(f"{path.stem}-{entrant.impl}")
        entrant.attempt(entrant.profile, batch, gpu, path)
    return entrants, MATMUL_FLOPS / statistics.median(products) / 1e9


# ---------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------


def _cell(x: float | None, digits: int) -> str:
    return "-" if x is None else f"{x:.{digits}f}"


def table_rows(records: Sequence[Record]) -> list[list[str]]:
    """A header, and a row for each implementation and pass."""
    rows = [["pass", "impl", "ms", "TFLOP/s", "share", "MFU", "kept MiB", "peak MiB"]]
    for r in records:
        if r["error"] or r["pass"] == "kernels":
            continue
        cells = [_cell(r["ms"], 3), _cell(r["tflops"], 1), _cell(r["share_of_matmul"], 3)]
        memory = (r["kept_memory_bytes"], r["peak_memory_bytes"])
        sizes = [_cell(None if size is None else size / 2**20, 0) for size in memory]
        rows.append([r["pass"], r["impl"], *cells, _cell(r["mfu"], 3), *sizes])
    return rows


def kernel_rows(records: Sequence[Record]) -> list[list[str]]:
    """A header, and for each implementation a row for each group and each kernel."""
    rows = [["kernel", "impl", "ms", "launches", "MiB", "of copy"]]
    for r in records:
        if r["pass"] != "kernels":
            continue
        rows += [
            [f"= {group}", r["impl"], _cell(r[f"{group}_ms"], 3), "", "", ""]
            for group in ("gemm", "attention", "elementwise")
        ]
        for name, kernel in r["kernels"].items():
            moved = kernel.get("bytes")
            cells = [_cell(kernel["ms"], 3), f"{kernel['launches']:g}"]
            size = _cell(None if moved is None else moved / 2**20, 0)
            rows.append(
                [name[-60:], r["impl"], *cells, size, _cell(kernel.get("share_of_copy"), 2)]
            )
    return rows


def main(arguments: Sequence[str] | None = None, gpu: Gpu | None = None) -> int:
    """Measures, prints and writes what was asked for."""
    options = parse(arguments)
    if gpu is None:
        if not torch.cuda.is_available():
            sys.exit("benchmarks.layer: expected an NVIDIA GPU and a CUDA build of torch")
        gpu = Gpu()
    with tempfile.TemporaryDirectory() as folder:
        entrants, matmul_tflops = measure(gpu, options, Path(folder))
    limits = {**gpu.limits(options.rounds), "matmul_tflops": matmul_tflops}
    if gpu.name in PEAK_TFLOPS:
        limits["peak_tflops"] = PEAK_TFLOPS[gpu.name]
    command = " ".join(["python -m benchmarks.layer", *(arguments or sys.argv[1:])])
    described = {
        **gpu_software(gpu.name, command, options.commit),
        **{name: rounded(x) for name, x in limits.items()},
        "case": f"{options.batch} x {options.length}",
        "group": "layer",
        "layers": options.layers,
        "dim": options.dim,
        "heads": options.heads,
        "head_dim": options.head_dim,
        "dropout": options.dropout,
        "dtype": str(DTYPE).removeprefix("torch."),
    }
    print(
        f"{gpu.name}, hstu_attn {described['hstu_attn']} ({described['commit']}), torch "
        f"{described['torch']}, CUDA {described['cuda']}, Triton {described['triton']}\n"
        f"8192^3 bf16 product {described['matmul_tflops']} TFLOP/s, copy "
        f"{described['copy_tbps']} TB/s\n"
        f"{described['case']}, width {options.dim}, {options.heads} heads of {options.head_dim}, "
        f"layers: {options.layers}; medians of {options.rounds} rounds\n",
        flush=True,
    )
    records = [{**described, **r} for e in entrants for r in e.records(options, limits)]
    print("\n".join(text_table(table_rows(records))))
    print("\n" + "\n".join(text_table(kernel_rows(records))))
    if options.json:
        write_records(options.json, records)
    for entrant in entrants:
        if entrant.error:
            print(f"  FAILED  {entrant.impl}: {entrant.error}")
    return int(any(entrant.error for entrant in entrants))


if __name__ == "__main__":
    sys.exit(main())
