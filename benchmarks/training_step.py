"""Attention's share of a training step on a GPU.

    python -m benchmarks.training_step --json training_step.json
    python -m benchmarks.training_step --impls hstu_attn triton --heads 4 --head-dim 64

The step is that of examples/train_retrieval.py, by its model and with its defaults: forward,
sampled softmax, backward, clipping and AdamW, on histories of one length with random items. Left
out are the relative bias, which GPUs do not have yet, and what waits for the GPU. The columns of
columns.py that are HSTU attention take part, each held to the tolerance of the tests first. Rounds
are interleaved, and a step's time is the median by events.

The times of attention are from a profile of a few more steps: those in which the GPU runs a kernel
that was launched in the forward, or in the backward, of attention's autograd function. The kernels
of one function may overlap, and that time counts once. "busy" is the time of all kernels; where it
is less than the step, the GPU waits for the host.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest import mock

IMPLS = ("hstu_attn", "hstu_attn_sm80", "triton")


class Options(argparse.Namespace):
    """The command line."""

    json: Path | None
    trace: Path | None
    impls: list[str]
    rounds: int
    commit: str | None
    batch: int
    length: int
    items: int
    dim: int
    layers: int
    heads: int
    head_dim: int
    dropout: float
    negatives: int
    temperature: float
    clip_norm: float


def parse(arguments: Sequence[str] | None = None) -> Options:
    """The command line; sizes are those of the example unless it says otherwise."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training_step", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--json", type=Path, metavar="FILE", help="write the results to FILE")
    add("--trace", type=Path, metavar="FILE", help="write the Chrome trace of each implementation "
        "beside FILE, with its name before the suffix")  # fmt: skip
    add("--impls", nargs="+", default=IMPLS, metavar="NAME", help="hstu_attn, hstu_attn_smNN, "
        f"triton (default: {', '.join(IMPLS)})")  # fmt: skip
    add("--rounds", type=int, default=21, help="steps that are timed (default 21)")
    add("--commit", help="what to record as the commit, where there is no repository")
    add("--batch", type=int, default=8, help="histories in a step (default 8)")
    add("--length", type=int, default=4096, help="events of each (default 4096)")
    add("--items", type=int, default=10000, help="size of the catalogue (default 10000)")
    add("--dim", type=int, help="width of the embeddings (default: heads times head dim)")
    add("--layers", type=int, default=2, help="HSTU layers (default 2)")
    add("--heads", type=int, default=2, help="heads of each (default 2)")
    add("--head-dim", type=int, default=32, help="width of a head (default 32)")
    add("--dropout", type=float, default=0.2, help="of inputs and in each layer (default 0.2)")
    add("--negatives", type=int, default=256, help="of the loss (default 256)")
    add("--temperature", type=float, default=0.1, help="of the loss (default 0.1)")
    add("--clip-norm", type=float, default=1.0, help="largest gradient norm (default 1)")
    options = parser.parse_args(arguments, namespace=Options())
    options.dim = options.dim or options.heads * options.head_dim
    return options


if __name__ == "__main__":
    parse()  # --help or a wrong option ends here, before torch is imported

import torch
from torch import Tensor

from hstu_attn import HSTULayerConfig, layer
from hstu_attn.data import JaggedBatch

from . import attention
from .columns import Column, is_ours
from .gpu import Gpu
from .report import ROOT, gpu_software, rounded, text_table, write_records
from .workloads import Workload

sys.path.insert(0, str(ROOT / "examples"))

from recommender.model import RetrievalModel, sampled_softmax_loss

__all__ = ["Options", "Training", "busy_ms", "kernels_of", "main"]

Event = dict[str, Any]  # of a Chrome trace
Record = dict[str, Any]

# Both autograd functions of attention are called this: ops.py and triton_hstu.py.
FUNCTIONS = {"attention forward": "_Attention", "attention backward": "_AttentionBackward"}
ON_GPU = ("kernel", "gpu_memset", "gpu_memcpy")
SPIN = "spin_kernel"  # before each step, by Gpu.milliseconds
WARM_UP = 3
PROFILED_STEPS = 3
LEARNING_RATE = 4e-5  # of the example's first step
BETAS = (0.9, 0.98)
SECONDS = 3600  # between two events


# ---------------------------------------------------------------------------------------------
# The step
# ---------------------------------------------------------------------------------------------


def random_histories(options: Options, device: str) -> JaggedBatch:
    """Histories of one length, whose items are drawn uniformly."""
    shape = (options.batch, options.length + 1)
    items = torch.randint(options.items, shape, device=device)
    times = SECONDS * torch.arange(options.length + 1, device=device).expand(shape)
    return JaggedBatch(
        users=torch.arange(options.batch, device=device),
        seq_offsets=options.length * torch.arange(options.batch + 1, device=device),
        items=items[:, :-1].flatten(),
        timestamps=times[:, :-1].flatten(),
        target_items=items[:, 1:].flatten(),
        target_timestamps=times[:, 1:].flatten(),
    )


class Training:
    """The example's model, which computes its layers in bf16, its optimizer and a batch."""

    dtype = torch.bfloat16

    def __init__(self, options: Options, device: str) -> None:
        torch.manual_seed(0)
        self.options = options
        config = HSTULayerConfig.research(
            embedding_dim=options.dim,
            num_heads=options.heads,
            linear_dim=options.head_dim,
            attention_dim=options.head_dim,
            max_sequence_len=options.length,
            linear_dropout_rate=options.dropout,
            enable_relative_attention_bias=False,
        )
        # A fused layer has attention inside, where columns cannot take its place.
        config = replace(config, fused=False)
        self.model = RetrievalModel(
            options.items,
            config,
            options.layers,
            options.length,
            options.dropout,
            compute_dtype=self.dtype,
        ).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0
        )
        self.batch = random_histories(options, device)

    def step(self) -> Tensor:
        """One step; returns its loss."""
        options, batch = self.options, self.batch
        loss = sampled_softmax_loss(
            self.model,
            self.model(batch),
            batch.target_items,
            options.negatives,
            options.temperature,
        )
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), options.clip_norm)
        self.optimizer.step()
        return loss.detach()


# ---------------------------------------------------------------------------------------------
# The profile
# ---------------------------------------------------------------------------------------------


def read_events(path: Path) -> list[Event]:
    """The events of a Chrome trace that have a duration."""
    events: list[Event] = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def _operator_id(event: Event) -> int:
    """The number of an operator, or of the one that launched a kernel; 0 for none."""
    number: int = event.get("args", {}).get("External id", 0)
    return number


def kernels_of(function: str, events: Sequence[Event]) -> list[Event]:
    """What the GPU ran for the calls of an autograd function, or of its backward.

    Raises:
        RuntimeError: if there was no call, or nothing ran for one.
    """
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    launched: dict[int, list[Event]] = {}  # by the operator that was at work
    for event in events:
        if event.get("cat") in ON_GPU and (operator := _operator_id(event)):
            launched.setdefault(operator, []).append(event)

    def kernels_of_call(call: Event) -> list[Event]:
        start, end = call["ts"], call["ts"] + call["dur"]
        inside = [x for x in operators if x["tid"] == call["tid"] and start <= x["ts"] < end]
        return [kernel for x in inside for kernel in launched.get(_operator_id(x), [])]

    found = [kernels_of_call(event) for event in operators if event["name"] == function]
    if not found or not all(found):
        raise RuntimeError(
            f"profile: expected kernels of every call of {function}, got those of "
            f"{sum(map(bool, found))} of {len(found)} calls"
        )
    return [kernel for kernels in found for kernel in kernels]


def busy_ms(kernels: Sequence[Event]) -> float:
    """Milliseconds in which at least one of them ran."""
    total = until = 0.0
    for kernel in sorted(kernels, key=itemgetter("ts")):
        start, end = kernel["ts"], kernel["ts"] + kernel["dur"]
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total / 1e3


def ms_by_name(kernels: Sequence[Event]) -> dict[str, float | None]:
    """Milliseconds of a step by the kernels' names without arguments, the longest first."""
    sums: dict[str, float] = {}
    for kernel in kernels:
        name = kernel["name"].replace("(anonymous namespace)::", "").removeprefix("void ")
        name = re.split("[<(]", name)[0].strip()
        sums[name] = sums.get(name, 0.0) + kernel["dur"] / 1e3
    longest_first = sorted(sums.items(), key=itemgetter(1), reverse=True)
    return {name: rounded(ms / PROFILED_STEPS) for name, ms in longest_first}


# ---------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------


@dataclass
class Entrant(attention.Entrant):
    """A column, and what trains with it."""

    training: Training | None = None
    kernels: dict[str, list[Event]] = field(default_factory=dict)  # of the profile, by pass
    busy: float | None = None  # milliseconds of a step

    def begin(self, options: Options, gpu: Gpu) -> None:
        """Make the model and warm up, which may also tune and compile."""
        self.training = Training(options, gpu.device)
        for _ in range(WARM_UP):
            self.step()

    def step(self) -> None:
        """One step with this column's attention in the layers."""
        assert self.training
        with mock.patch.object(layer, "hstu_attention", self.column.function):
            self.training.step()

    def time_step(self, gpu: Gpu) -> None:
        """One more round."""
        self.times.append(gpu.milliseconds(self.step))

    def profile(self, gpu: Gpu, path: Path) -> None:
        """Find the kernels of some more steps; the Chrome trace goes to `path`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with torch.profiler.profile() as profiler:
            for _ in range(PROFILED_STEPS):
                gpu.milliseconds(self.step)
        profiler.export_chrome_trace(str(path))
        events = read_events(path)
        self.kernels = {name: kernels_of(x, events) for name, x in FUNCTIONS.items()}
        on_gpu = [x for x in events if x.get("cat") in ON_GPU and SPIN not in x["name"]]
        self.busy = busy_ms(on_gpu) / PROFILED_STEPS

    def records(self) -> list[Record]:
        """A record for each pass; times are of one step."""
        if self.error:
            return []
        step = statistics.median(self.times)
        fields: list[Record] = [
            {
                "pass": name,
                "ms": busy_ms(kernels) / PROFILED_STEPS,
                "rounds": PROFILED_STEPS,
                "kernels": ms_by_name(kernels),
            }
            for name, kernels in self.kernels.items()
        ]
        whole = {
            "pass": "step",
            "ms": step,
            "rounds": len(self.times),
            "busy_ms": rounded(self.busy),
        }
        return [
            {
                "impl": self.column.name,
                **record,
                "ms": rounded(record["ms"]),
                "share_of_step": rounded(record["ms"] / step),
            }
            for record in (*fields, whole)
        ]


def measure(
    gpu: Gpu, options: Options, workload: Workload, wanted: Sequence[Column], folder: Path
) -> list[Entrant]:
    """Times and profiles every column; traces go to the folder."""
    entrants = [Entrant(column) for column in wanted]
    for entrant in entrants:
        entrant.attempt(entrant.column.check, workload, gpu.device)
    for entrant in entrants:
        entrant.attempt(entrant.begin, options, gpu)
    for round_ in range(options.rounds if entrants else 0):
        first = round_ % len(entrants)
        for entrant in (*entrants[first:], *entrants[:first]):
            entrant.attempt(entrant.time_step, gpu)
    for entrant in entrants:
        entrant.attempt(entrant.profile, gpu, trace_path(options.trace, entrant, folder))
    return entrants


def trace_path(wanted: Path | None, entrant: Entrant, folder: Path) -> Path:
    """Where a trace goes: beside the file that was asked for, or into a folder."""
    path = wanted or folder / "trace.json"
    return path.with_stem(f"{path.stem}-{entrant.column.name}")


# ---------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------


def table_rows(records: Sequence[Record]) -> list[list[str]]:
    """A header, and a row for each implementation: milliseconds and shares of the step."""
    header = ["ms, share of step", *FUNCTIONS, "other", "step", "busy"]
    rows = []
    for impl in dict.fromkeys(r["impl"] for r in records):
        found = {r["pass"]: r for r in records if r["impl"] == impl}
        step = found["step"]["ms"]
        times = [found[name]["ms"] for name in FUNCTIONS]
        cells = [f"{ms:.3f} {ms / step:.3f}" for ms in (*times, step - sum(times))]
        rows.append([impl, *cells, f"{step:.3f}", f"{found['step']['busy_ms']:.3f}"])
    return [header, *rows]


def main(arguments: Sequence[str] | None = None, gpu: Gpu | None = None) -> int:
    """Measures, prints and writes what was asked for."""
    options = parse(arguments)
    if gpu is None:
        if not torch.cuda.is_available():
            sys.exit("benchmarks.training_step: expected an NVIDIA GPU and a CUDA build of torch")
        gpu = Gpu()
    made = {name: attention.make_column(name) for name in options.impls}
    wanted = [column for column in made.values() if isinstance(column, Column)]
    workload = Workload(
        options.batch,
        options.length,
        options.length,
        options.heads,
        options.head_dim,
        Training.dtype,
        group="training step",
    )
    command = " ".join(["python -m benchmarks.training_step", *(arguments or sys.argv[1:])])
    described = {
        **gpu_software(gpu.name, command, options.commit),
        "case": workload.name,
        "group": workload.group,
        "dim": options.dim,
        "layers": options.layers,
        "heads": options.heads,
        "head_dim": options.head_dim,
        "dtype": workload.dtype_name,
    }
    print(
        f"{gpu.name}, hstu_attn {described['hstu_attn']} ({described['commit']}), torch "
        f"{described['torch']}, CUDA {described['cuda']}, Triton {described['triton']}\n"
        f"{workload.name}: {options.layers} layers of width {options.dim}, {options.heads} heads "
        f"of {options.head_dim}, {workload.dtype_name}; medians of {options.rounds} steps\n",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        entrants = measure(gpu, options, workload, wanted, Path(folder))
    records = [{**described, **r} for entrant in entrants for r in entrant.records()]
    print("\n".join(text_table(table_rows(records))))
    if options.json:
        write_records(options.json, records)
    failed = {name: reason for name, reason in made.items() if isinstance(reason, str)}
    failed |= {entrant.column.name: entrant.error for entrant in entrants if entrant.error}
    for name, reason in failed.items():
        print(f"  FAILED  {name}: {reason}")
    return int(any(map(is_ours, failed)))


if __name__ == "__main__":
    sys.exit(main())
