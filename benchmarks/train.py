"""Training steps of the ranking model on the GPUs of a machine.

    python -m benchmarks.train --cases equal
    torchrun --nproc-per-node 8 -m benchmarks.train --json train.json
    torchrun --nproc-per-node 8 -m benchmarks.train --strategy fsdp2 --cases weak strong

The step is that of examples/train_ranking.py: embeddings, HSTU layers in bf16 with fp32 master
weights, the loss of several tasks, backward, clipping and AdamW. Tables are divided among the GPUs,
and the rest is replicated (ddp) or divided (fsdp2). Users and items are random. The cases:

    equal     sequences of one length, so many on each GPU
    weak      lengths vary: of 2, 4, ... GPUs, each has as many sequences as one GPU alone
    strong    the same, but all together have as many as one GPU alone

Lengths are log-normal, up to a largest one. "balanced" divides the sequences of a step by their
FLOPs (hstu_attn.data.balance), "dealt" in turn, as many to each. Every number of GPUs has its turn,
on the first ranks of the run; a step's time is that of the slowest rank, and the median of all
steps counts. FLOPs are those of the layers' products and of attention, 4 * L^2 / 2 for each head
and column; the backward counts twice the forward of the products and 2.5 times that of attention.
"share" is that of a product of two 8192 x 8192 matrices in bf16, which takes part in every step,
and "MFU" that of what the GPU's data sheet says. "scaling" is the rows a second of a GPU beside
those of one GPU alone in the same case, or, of strong scaling, the FLOPs.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal


class Options(argparse.Namespace):
    """The command line."""

    json: Path | None
    trace: Path | None
    commit: str | None
    steps: int
    cases: list[str]
    strategy: Literal["ddp", "fsdp2"]
    batch: int
    length: int
    targets: int
    items: int
    users: int
    dim: int
    heads: int
    layers: int
    dropout: float


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write the results to FILE")
    add("--trace", type=Path, metavar="FILE", help="write the Chrome trace of a step of each case "
        "beside FILE, with the case and the number of GPUs before the suffix")  # fmt: skip
    add("--commit", help="what to record as the commit, where there is no repository")
    add("--steps", type=int, default=12, help="that are timed (default 12)")
    add("--cases", nargs="+", default=["equal", "weak", "strong"], metavar="CASE",
        choices=["equal", "weak", "strong"], help="default: all")  # fmt: skip
    add("--strategy", default="ddp", choices=["ddp", "fsdp2"], help="default: ddp")
    add("--batch", type=int, default=32, help="sequences on one GPU (default 32)")
    add("--length", type=int, default=4096, help="rows of a sequence where all are equal; else the "
        "median is half of it, and the most twice (default 4096)")  # fmt: skip
    add("--targets", type=int, default=33, help="candidates of each (default 33)")
    add("--items", type=int, default=200_000, help="rows of their table (default 200000)")
    add("--users", type=int, default=100_000, help="rows of their table (default 100000)")
    add("--dim", type=int, default=1024, help="width of the layers (default 1024)")
    add("--heads", type=int, default=4, help="of each, dim / heads wide (default 4)")
    add("--layers", type=int, default=8, help="HSTU layers (default 8)")
    add("--dropout", type=float, default=0.0, help="in the model (default 0)")
    return parser.parse_args(arguments, namespace=Options())


if __name__ == "__main__":
    parse()  # --help or a wrong option ends here, before torch is imported

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hstu_attn import HSTULayerConfig
from hstu_attn.data.balance import AttentionCost, balance, imbalance
from hstu_attn.distributed import (
    ShardedEmbeddings,
    World,
    clip_gradients,
    global_mean,
    parallelize,
    parameter_groups,
    run,
)

from .gpu import MATMUL_FLOPS, Gpu
from .layer import PEAK_TFLOPS
from .report import ROOT, gpu_software, rounded, text_table, write_records

sys.path.insert(0, str(ROOT / "examples"))

from recommender.ranking import RankingConfig, RankingModel, task_labels
from recommender.ranking_data import CONTEXTS, RankingBatch

__all__ = ["Options", "main", "measure_all", "random_batch", "step_flops"]

Record = dict[str, Any]
Lengths = NDArray[np.int64]

ACTIONS = ("is_click", "is_like", "long_view")
WARM_UP = 3
BATCHES = 4  # that take turns
SIGMA = 0.6  # of the logarithm of a length
SECONDS = 3600  # between two events
CLIP_NORM = 1.0


# ---------------------------------------------------------------------------------------------
# What there is to do
# ---------------------------------------------------------------------------------------------


def model_config(options: Options) -> RankingConfig:
    """Of the example's model."""
    return RankingConfig(
        sizes={"item": options.items, "user": options.users, "activity": 32, "hour": 24},
        actions=ACTIONS,
        tasks=ACTIONS,
        max_history=options.length,
        max_targets=options.targets,
        dim=options.dim,
        heads=options.heads,
        layers=options.layers,
        dropout=options.dropout,
    )


def step_flops(config: HSTULayerConfig, num_layers: int, lengths: Lengths) -> float:
    """Forward and backward of the layers: see above."""
    products = 2.0 * lengths.sum() * config.embedding_dim
    products *= sum(config.split_sizes) + config.output_features
    widths = config.attention_dim + config.hidden_dim
    attention = float(np.square(lengths, dtype=np.float64).sum()) * config.num_heads * widths
    return float(num_layers * (3 * products + 3.5 * attention))


def random_lengths(
    options: Options, case: str, count: int, generator: np.random.Generator
) -> Lengths:
    """Rows of each sequence of a step: contexts, two for each event, and candidates."""
    fixed = len(CONTEXTS) + options.targets
    rows = np.full(count, float(options.length))
    if case != "equal":
        rows = np.minimum(rows / 2 * generator.lognormal(0, SIGMA, count), 2 * options.length)
    return fixed + 2 * np.maximum((rows.astype(np.int64) - fixed) // 2, 1)


def random_batch(
    options: Options, lengths: Lengths, generator: np.random.Generator
) -> RankingBatch:
    """Sequences of so many rows, of users and items drawn uniformly."""
    events = (lengths - len(CONTEXTS) - options.targets) // 2
    total, count = int(events.sum()), len(lengths)

    def offsets(numbers: Lengths) -> Tensor:
        return torch.from_numpy(np.concatenate([[0], np.cumsum(numbers)]))

    def draw(high: int, *shape: int) -> Tensor:
        return torch.from_numpy(generator.integers(high, size=shape))

    contexts = [draw(options.users, count), draw(32, count), draw(24, count)]
    return RankingBatch(
        contexts=torch.stack(contexts, dim=1),
        history_offsets=offsets(events),
        history_items=draw(options.items, total),
        history_actions=draw(2 ** len(ACTIONS), total),
        history_timestamps=SECONDS * torch.arange(total),
        request_timestamps=torch.full((count,), SECONDS * total),
        target_offsets=offsets(np.full(count, options.targets)),
        target_items=draw(options.items, count * options.targets),
        target_actions=draw(2 ** len(ACTIONS), count * options.targets),
    )


# ---------------------------------------------------------------------------------------------
# A step
# ---------------------------------------------------------------------------------------------


class Training:
    """The model on the ranks of a mesh, and its optimizer."""

    def __init__(self, options: Options, mesh: DeviceMesh | None, device: torch.device) -> None:
        torch.manual_seed(0)
        on_gpu = device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        config = model_config(options)
        tables = {name: (size, options.dim) for name, size in config.sizes.items()}
        embeddings = ShardedEmbeddings(tables, mesh, device=device)
        with torch.device(device):
            model = RankingModel(config, dtype, embeddings)
        self.config, self.mesh = config, mesh
        self.model: nn.Module = parallelize(
            model,
            mesh,
            options.strategy,
            compute_dtype=dtype if options.strategy == "fsdp2" else None,
        )
        self.optimizer = torch.optim.AdamW(parameter_groups(model), lr=1e-4, fused=on_gpu or None)

    def step(self, batch: RankingBatch) -> Tensor:
        """One step of the example; returns its loss, the mean over the candidates of all ranks."""
        logits = self.model(batch)
        labels = task_labels(self.config, batch.target_actions)
        losses = nn.functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
        loss = global_mean(losses, len(batch.target_items), self.mesh)
        loss.backward()
        clip_gradients(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


# ---------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------


def elapsed_ms(call: Callable[[], Any], device: torch.device) -> float:
    """From when all GPUs are idle until this one is."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def wait_for_all(mesh: DeviceMesh | None, device: torch.device) -> None:
    """Until every rank of the mesh is here and its GPU is idle."""
    if mesh is not None:
        dist.all_reduce(torch.zeros(1, device=device), group=mesh.get_group())
    if device.type == "cuda":
        torch.cuda.synchronize()


def divide(lengths: Lengths, cost: AttentionCost, ranks: int, balanced: bool) -> list[Lengths]:
    """Which sequences each rank has."""
    if balanced:
        return balance(cost(lengths), ranks)
    return [np.arange(rank, len(lengths), ranks) for rank in range(ranks)]


def measure(
    options: Options,
    case: str,
    balanced: bool,
    mesh: DeviceMesh | None,
    world: World,
    gpu: Gpu | None,
) -> Record:
    """A case on the ranks of the mesh, by one of them."""
    ranks, rank = (mesh.size(), world.rank) if mesh else (1, 0)
    training = Training(options, mesh, world.device)
    layer = training.config.layer
    cost = AttentionCost.of_layer(layer)
    shared, own = np.random.default_rng(1), np.random.default_rng(2 + rank)  # lengths, the rest
    batches, flops, rows, unevenness = [], [], [], []
    for _ in range(BATCHES):
        count = options.batch * (1 if case == "strong" else ranks)
        lengths = random_lengths(options, case, count, shared)
        parts = divide(lengths, cost, ranks, balanced)
        batches.append(random_batch(options, lengths[parts[rank]], own).to(world.device))
        flops.append(step_flops(layer, options.layers, lengths))
        rows.append(int(lengths.sum()))
        unevenness.append(imbalance(cost(lengths), parts))
    matmul = gpu.matmul() if gpu else None
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    times, products = [], []
    for number in range(WARM_UP + options.steps):
        step = partial(training.step, batches[number % BATCHES])
        wait_for_all(mesh, world.device)
        ms = torch.tensor(elapsed_ms(step, world.device), device=world.device)
        if mesh is not None:
            dist.all_reduce(ms, dist.ReduceOp.MAX, group=mesh.get_group())
        times.append(float(ms))
        if gpu and matmul:
            products.append(gpu.milliseconds(matmul))
    order = [number % BATCHES for number in range(WARM_UP, len(times))]
    timed = times[WARM_UP:]
    tflops = statistics.median(flops[n] / ms / 1e9 for n, ms in zip(order, timed, strict=True))
    speed = statistics.median(1e3 * rows[n] / ms for n, ms in zip(order, timed, strict=True))
    product = MATMUL_FLOPS / statistics.median(products[WARM_UP:]) / 1e9 if products else None
    peak = PEAK_TFLOPS.get(gpu.name) if gpu else None
    if options.trace and gpu and rank == 0:
        trace(options.trace, f"{case}-{ranks}", lambda: training.step(batches[0]))
    elif options.trace and gpu:
        training.step(batches[0])
    return {
        "case": case,
        "division": "balanced" if balanced else "dealt",
        "gpus": ranks,
        "sequences": options.batch * (1 if case == "strong" else ranks),
        "rows": round(statistics.mean(rows)),
        "imbalance": rounded(statistics.mean(unevenness)),
        "ms": rounded(statistics.median(timed)),
        "steps": len(timed),
        "rows_per_second_per_gpu": rounded(speed / ranks),
        "tflops_per_gpu": rounded(tflops / ranks),
        "matmul_tflops": rounded(product),
        "share_of_matmul": rounded(tflops / ranks / product) if product else None,
        "mfu": rounded(tflops / ranks / peak) if peak else None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if gpu else None,
    }


def trace(path: Path, name: str, step: Callable[[], Any]) -> None:
    """The Chrome trace of a step, beside the file that was asked for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile() as profiler:
        step()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path.with_stem(f"{path.stem}-{name}")))


def measure_all(options: Options, world: World, gpu: Gpu | None) -> list[Record]:
    """Every case on every number of GPUs, one after the other; the records are the first rank's."""
    records: list[Record] = []
    sizes = [2**n for n in range(world.num_ranks.bit_length()) if 2**n <= world.num_ranks]
    for size in sizes:
        # All ranks make each mesh; those that are not in it wait for the next.
        mesh = None if size == 1 else DeviceMesh(world.device.type, list(range(size)))
        for case in options.cases:
            if case == "strong" and size == 1:
                continue  # it is what "weak" is
            for balanced in (True, False) if case != "equal" and size > 1 else (True,):
                if world.rank < size:
                    gc.collect()  # of the case before, or its model counts as this one's memory
                    records.append(measure(options, case, balanced, mesh, world, gpu))
                    if gpu:
                        torch.cuda.empty_cache()
                wait_for_all(world.mesh, world.device)
    alone = {r["case"]: r for r in records if r["gpus"] == 1}
    for record in records:
        one = alone.get("weak" if record["case"] == "strong" else record["case"])
        by = "tflops_per_gpu" if record["case"] == "strong" else "rows_per_second_per_gpu"
        record["scaling"] = rounded(record[by] / one[by]) if one else None
    return records


# ---------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------


def table_rows(records: Sequence[Record]) -> list[list[str]]:
    """A header, and a row for each record."""
    rows = [
        ["case", "GPUs", "rows", "imbalance", "ms", "rows/s a GPU", "TFLOP/s a GPU", "share",
         "MFU", "scaling", "GiB"]
    ]  # fmt: skip
    for r in records:
        memory = r["peak_memory_bytes"]
        rows.append(
            [
                f"{r['case']}, {r['division']}",
                *(str(r[name]) for name in ("gpus", "rows", "imbalance", "ms")),
                *(str(r[name]) for name in ("rows_per_second_per_gpu", "tflops_per_gpu")),
                *(str(r[name]) for name in ("share_of_matmul", "mfu", "scaling")),
                "-" if memory is None else f"{memory / 2**30:.1f}",
            ]
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, and on the first rank prints and writes what was asked for."""
    options = parse(arguments)
    if not torch.cuda.is_available():
        sys.exit("benchmarks.train: expected NVIDIA GPUs and a CUDA build of torch")
    return run(lambda world: report(options, arguments, world))


def report(options: Options, arguments: Sequence[str] | None, world: World) -> int:
    """A rank's part."""
    gpu = Gpu()
    records = measure_all(options, world, gpu)
    if world.rank > 0:
        return 0
    several = world.num_ranks > 1
    prefix = f"torchrun --nproc-per-node {world.num_ranks} -m" if several else "python -m"
    command = " ".join([prefix, "benchmarks.train", *(arguments or sys.argv[1:])])
    described = {
        **gpu_software(gpu.name, command, options.commit),
        "group": "train",
        "strategy": options.strategy,
        "dim": options.dim,
        "heads": options.heads,
        "layers": options.layers,
        "length": options.length,
        "items": options.items,
        "dtype": "bfloat16",
    }
    print(
        f"{world.num_ranks} x {gpu.name}, hstu_attn {described['hstu_attn']} "
        f"({described['commit']}), torch {described['torch']}, CUDA {described['cuda']}\n"
        f"{options.layers} layers of width {options.dim}, {options.heads} heads, {options.strategy}"
        f"; medians of {options.steps} steps\n"
    )
    print("\n".join(text_table(table_rows(records))))
    if options.json:
        write_records(options.json, [{**described, **record} for record in records])
    return 0


if __name__ == "__main__":
    sys.exit(main())
