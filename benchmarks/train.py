"""Training steps of the ranking model on the GPUs of a machine.

    python -m benchmarks.train --cases equal
    torchrun --nproc-per-node 8 -m benchmarks.train --json train.json
    torchrun --nproc-per-node 8 -m benchmarks.train --strategy fsdp2 --cases weak strong

The step is that of examples/train_ranking.py: embeddings, HSTU layers in bf16 with fp32 master
weights, the loss of several tasks, backward, clipping and AdamW. Tables are divided among the GPUs,
and the rest is replicated (ddp) or divided (fsdp2). Users and items are random. The cases:

    equal     sequences of one length, as many on each GPU
    weak      weak scaling: lengths vary, and each GPU has as many sequences as one GPU alone
    strong    strong scaling: lengths vary, and all GPUs together have as many as one GPU alone

Lengths are log-normal, up to a maximum. "balanced" divides the sequences of a step by their FLOPs
(hstu_attn.data.balance), "dealt" round-robin. 1, 2, 4, ... GPUs are measured in turn, on the first
ranks of the run; a step's time is that of the slowest rank, and the median over all steps is
reported. FLOPs are those of the layers' products and of attention, 4 * L^2 / 2 for each head and
column; the backward counts twice the forward of the products and 2.5 times that of attention.
"share" is the fraction of the FLOP/s of an 8192^3 bf16 matrix product, which runs in every step,
and "MFU" the fraction of the data sheet's peak. "scaling" is the tokens/s per GPU (for strong
scaling, the FLOP/s per GPU) relative to one GPU alone in the same case.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import partial

from . import cli

PARSER = cli.parser("train", __doc__, cases="equal, weak or strong", trace="a step of each case")
_add = PARSER.add_argument
_add("--rounds", "--steps", type=int, default=12, help="timed steps (default: 12)")
_add("--strategy", default="ddp", choices=["ddp", "fsdp2"], help="(default: ddp)")
_add("--batch", type=int, default=32, help="sequences on one GPU (default: 32)")
_add("--length", type=int, default=4096, help="tokens of a sequence where all are equal; else the "
     "median is half of it, and the most twice (default: 4096)")  # fmt: skip
_add("--targets", type=int, default=33, help="candidates of each (default: 33)")
_add("--items", type=int, default=200_000, help="rows of their table (default: 200000)")
_add("--users", type=int, default=100_000, help="rows of their table (default: 100000)")
_add("--dim", type=int, default=1024, help="width of the layers (default: 1024)")
_add("--heads", type=int, default=4, help="of each, dim / heads wide (default: 4)")
_add("--layers", type=int, default=8, help="HSTU layers (default: 8)")

if __name__ == "__main__":
    PARSER.parse_args()  # --help or a wrong option ends here, before torch is imported

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hstu_attn.data.balance import AttentionCost, balance, imbalance
from hstu_attn.distributed import (
    ShardedEmbeddings,
    World,
    clip_gradients,
    global_mean,
    parallelize,
    parameter_groups,
)

from . import ranks
from .gpu import MATMUL_FLOPS, PEAK_TFLOPS
from .layer import BOTH, layer_flops
from .profile import profile
from .record import ROOT, Record, rounded
from .runner import Benchmark
from .timing import Run

sys.path.insert(0, str(ROOT / "examples"))

from recommender.ranking import RankingConfig, RankingModel, task_labels
from recommender.ranking_data import CONTEXTS, RankingBatch

__all__ = ["BENCHMARK", "main", "random_batch"]

Lengths = NDArray[np.int64]

CASES = ("equal", "weak", "strong")
ACTIONS = ("is_click", "is_like", "long_view")
WARM_UP = 3
BATCHES = 4  # different batches, used in turn
SIGMA = 0.6  # standard deviation of the logarithm of a length
SECONDS = 3600  # seconds between two events
CLIP_NORM = 1.0


def describe(run: Run) -> Record:
    """Returns the strategy and the sizes of the model."""
    names = ("strategy", "dim", "heads", "layers", "length", "items")
    return {**{name: getattr(run.options, name) for name in names}, "dtype": "bfloat16"}


# ---------------------------------------------------------------------------------------------
# The model and its batches
# ---------------------------------------------------------------------------------------------


def model_config(options: argparse.Namespace) -> RankingConfig:
    """Returns the configuration of the example's model."""
    return RankingConfig(
        sizes={"item": options.items, "user": options.users, "activity": 32, "hour": 24},
        actions=ACTIONS,
        tasks=ACTIONS,
        max_history=options.length,
        max_targets=options.targets,
        dim=options.dim,
        heads=options.heads,
        layers=options.layers,
        dropout=0.0,
    )


def random_lengths(
    options: argparse.Namespace, case: str, count: int, generator: np.random.Generator
) -> Lengths:
    """Returns the numbers of rows of a step's sequences: contexts, 2 per event, and candidates."""
    fixed: int = len(CONTEXTS) + options.targets
    rows = np.full(count, float(options.length))
    if case != "equal":
        rows = np.minimum(rows / 2 * generator.lognormal(0, SIGMA, count), 2 * options.length)
    return fixed + 2 * np.maximum((rows.astype(np.int64) - fixed) // 2, 1)


def random_batch(
    options: argparse.Namespace, lengths: Lengths, generator: np.random.Generator
) -> RankingBatch:
    """Makes sequences of the given `lengths`, of users and items drawn uniformly."""
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

    def __init__(
        self, options: argparse.Namespace, mesh: DeviceMesh | None, device: torch.device
    ) -> None:
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
        """Runs one training step; returns its loss, the mean over the candidates of all ranks."""
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


def divide(lengths: Lengths, cost: AttentionCost, ranks: int, balanced: bool) -> list[Lengths]:
    """Returns the indices of each rank's sequences."""
    if balanced:
        return balance(cost(lengths), ranks)
    return [np.arange(rank, len(lengths), ranks) for rank in range(ranks)]


def measure_on(run: Run, case: str, balanced: bool, mesh: DeviceMesh | None) -> Record:
    """Measures a case on the ranks of the mesh."""
    options, gpu, device = run.options, run.gpu, run.world.device
    num_ranks, rank = (mesh.size(), run.world.rank) if mesh else (1, 0)
    training = Training(options, mesh, device)
    layer = training.config.layer
    cost = AttentionCost.of_layer(layer)
    # `shared` makes the lengths, which are the same on all ranks, and `own` everything else.
    shared, own = np.random.default_rng(1), np.random.default_rng(2 + rank)
    count = options.batch * (1 if case == "strong" else num_ranks)
    batches, flops, tokens, unevenness = [], [], [], []
    for _ in range(BATCHES):
        lengths = random_lengths(options, case, count, shared)
        parts = divide(lengths, cost, num_ranks, balanced)
        batches.append(random_batch(options, lengths[parts[rank]], own).to(device))
        flops.append(options.layers * layer_flops(layer, lengths.tolist())[BOTH])
        tokens.append(int(lengths.sum()))
        unevenness.append(imbalance(cost(lengths), parts))
    matmul = gpu.matmul() if gpu else None
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    clock = ranks.Clock(device)
    times, products = [], []
    for number in range(WARM_UP + options.rounds):
        step = partial(training.step, batches[number % BATCHES])
        ranks.wait_for_all(mesh, device)
        times += ranks.over_all([clock.time(step)], dist.ReduceOp.MAX, mesh, device)
        if gpu and matmul:
            products.append(gpu.milliseconds(matmul))
    order = [number % BATCHES for number in range(WARM_UP, len(times))]
    timed = times[WARM_UP:]
    tflops = statistics.median(flops[n] / ms / 1e9 for n, ms in zip(order, timed, strict=True))
    speed = statistics.median(1e3 * tokens[n] / ms for n, ms in zip(order, timed, strict=True))
    product = MATMUL_FLOPS / statistics.median(products[WARM_UP:]) / 1e9 if products else None
    peak = PEAK_TFLOPS.get(gpu.name) if gpu else None
    record = {
        "case": case,
        "division": "balanced" if balanced else "dealt",
        "gpus": num_ranks,
        "sequences": count,
        "tokens": round(statistics.mean(tokens)),
        "imbalance": rounded(statistics.mean(unevenness)),
        "ms": rounded(statistics.median(timed)),
        "steps": len(timed),
        "tokens_per_second_per_gpu": rounded(speed / num_ranks),
        "tflops_per_gpu": rounded(tflops / num_ranks),
        "matmul_tflops": rounded(product),
        "share_of_matmul": rounded(tflops / num_ranks / product) if product else None,
        "mfu": rounded(tflops / num_ranks / peak) if peak else None,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if gpu else None,
    }
    if options.trace and rank == 0:
        profile(1, lambda: training.step(batches[0]), options.trace, f"{case}-{num_ranks}")
    elif options.trace:
        training.step(batches[0])
    return record


def measure(run: Run, case: str) -> Iterator[Record]:
    """Measures the case on 1, 2, 4, ... GPUs in turn; the first rank's records are used."""
    world: World = run.world
    meshes = run.kept.setdefault("meshes", {})
    for size in (2**n for n in range(world.num_ranks.bit_length())):
        if size not in meshes:
            # All ranks create each mesh; ranks outside of it wait for the next one.
            every = list(range(size))
            meshes[size] = None if size == 1 else DeviceMesh(world.device.type, every)
        if case == "strong" and size == 1:
            continue  # it equals the case "weak"
        for balanced in (True, False) if case != "equal" and size > 1 else (True,):
            if world.rank < size:
                gc.collect()  # frees the model of the previous case
                record = measure_on(run, case, balanced, meshes[size])
                yield {**record, "scaling": scaling(run.kept, record)}
                if run.gpu:
                    run.gpu.release()
            ranks.wait_for_all(world.mesh, world.device)


def scaling(kept: Record, record: Record) -> float | None:
    """Returns the record's speed relative to one GPU, if that was measured before.

    Args:
        kept: the records of one GPU by case; a record of one GPU is added.
        record: a record of any number of GPUs.
    """
    if record["gpus"] == 1:
        kept[record["case"]] = record
    one = kept.get("weak" if record["case"] == "strong" else record["case"])
    name = "tflops_per_gpu" if record["case"] == "strong" else "tokens_per_second_per_gpu"
    return rounded(record[name] / one[name]) if one else None


BENCHMARK = Benchmark("train", PARSER, measure, lambda options: CASES, describe=describe)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark as a rank; returns the exit status."""
    return ranks.start(BENCHMARK, arguments)


if __name__ == "__main__":
    sys.exit(main())
