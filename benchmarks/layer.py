"""HSTU layers on a GPU, fused and composed.

    python -m benchmarks.layer --json layer.json
    python -m benchmarks.layer --impls fused composed --layers 8 --batch 8

It times one layer or a stack of layers, with fp32 weights and bf16 rows of equal causal sequences:
the forward, and the forward with a backward to the rows and every weight. The implementations:

    fused                the layer as one autograd function
    fused_recompute      fused, with the flags that recompute everything but matrix products
    fused_recompute_all  fused, with all recompute flags
    fused_fp8_attention  fused, with attention in FP8 (mode 2)
    fused_fp8            fused, with attention and matrix products in FP8
    fused_fp8_backward   fused_fp8, with the backward of attention in FP8, too
    composed             the layer as torch functions around the attention operator
    compiled             composed, under torch.compile

Each is first compared with the composed layer on a small batch. Then rounds are interleaved, and a
time is the median over the rounds, by CUDA events. FLOPs are those of the matrix products, 2 for
each multiply-add, and of attention, 4 * L^2 / 2 for each head and column; the backward counts twice
the forward of the products and 2.5 times that of attention, without recomputation. "share" is the
fraction of the FLOP/s of an 8192^3 bf16 matrix product, which runs in every round, because work as
long as this lowers the GPU's clocks. "MFU" is the fraction of the data sheet's bf16 peak. "kept" is
the memory that the forward leaves allocated, including its result, and "peak" the peak memory of
forward and backward.

Kernel times are from a profile of a few more rounds of forward and backward. For the fused layer's
elementwise kernels the table also has their memory bandwidth, from the bytes of rows that they must
move, as a fraction of that of a device copy in the same run.
"""

from __future__ import annotations

import argparse
import functools
import gc
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import cli

RECOMPUTE = {"recompute_norm": True, "recompute_silu": True, "recompute_gate": True}
RECOMPUTE_ALL = {**RECOMPUTE, "recompute_linear": True}
IMPLS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "fused_recompute": {"fused": True, **RECOMPUTE},
    "fused_recompute_all": {"fused": True, **RECOMPUTE_ALL},
    "fused_fp8_attention": {"fused": True, "fp8": {"attention": {"mode": 2}}},
    "fused_fp8": {"fused": True, "fp8": {"attention": {"mode": 2}, "linears": True}},
    "fused_fp8_backward": {
        "fused": True,
        "fp8": {"attention": {"mode": 2, "backward": "e4m3"}, "linears": True},
    },
    "composed": {"fused": False},
    "compiled": {"fused": False},
}

PARSER = cli.parser("layer", __doc__, rounds=21, trace="each implementation")
_add = PARSER.add_argument
_add("--impls", nargs="+", default=list(IMPLS), choices=IMPLS, metavar="NAME",
     help=f"of {', '.join(IMPLS)} (default: all)")  # fmt: skip
_add("--batch", type=int, default=32, help="sequences (default: 32)")
_add("--length", type=int, default=4096, help="tokens of each (default: 4096)")
_add("--dim", type=int, default=1024, help="width of the layers (default: 1024)")
_add("--heads", type=int, default=4, help="(default: 4)")
_add("--head-dim", type=int, default=256, help="of u, v, q and k (default: 256)")
_add("--layers", type=int, default=1, help="one after another (default: 1)")
_add("--dropout", type=float, default=0.0, help="before the output linear (default: 0); with it "
     "the results of implementations are not compared")  # fmt: skip

if __name__ == "__main__":
    PARSER.parse_args()  # --help or a wrong option ends here, before torch is imported

import torch
from torch import Tensor

from hstu_attn import HSTULayerConfig
from hstu_attn.layer import HSTUStack

from .gpu import MATMUL_FLOPS, PEAK_TFLOPS
from .profile import Event, on_gpu, profile, short_name
from .record import Record, rounded
from .runner import Benchmark
from .timing import Call, Run, Variant, take_turns

__all__ = ["BENCHMARK", "IMPLS", "group_of", "layer_flops", "main", "step_bytes"]

FORWARD, BOTH = "forward", "forward and backward"
SMALL_BATCH, SMALL_LENGTH = 2, 160
# The allowed relative error (norm) on the small batch, against the composed layer in 16 bits.
TOLERANCE, FP8_TOLERANCE = 0.1, 0.2
PROFILED_ROUNDS = 3
DTYPE = torch.bfloat16


def make_config(options: argparse.Namespace) -> HSTULayerConfig:
    """Returns the layer that is measured."""
    return HSTULayerConfig(
        embedding_dim=options.dim,
        num_heads=options.heads,
        hidden_dim=options.head_dim,
        attention_dim=options.head_dim,
        output_dropout_ratio=options.dropout,
    )


def describe(run: Run) -> Record:
    """Returns the sizes of the layers."""
    options, gpu = run.options, run.the_gpu()
    peak = {"peak_tflops": PEAK_TFLOPS[gpu.name]} if gpu.name in PEAK_TFLOPS else {}
    names = ("layers", "dim", "heads", "head_dim", "dropout")
    return {**peak, **{x: getattr(options, x) for x in names}, "dtype": "bfloat16"}


# ---------------------------------------------------------------------------------------------
# FLOPs, bytes and kinds of kernels
# ---------------------------------------------------------------------------------------------


def layer_flops(config: HSTULayerConfig, lengths: Sequence[int]) -> dict[str, float]:
    """Returns the FLOPs of a layer by pass; the module's docstring has the formula."""
    products = 2 * sum(lengths) * config.embedding_dim
    products *= sum(config.split_sizes) + config.output_features
    widths = config.attention_dim + config.hidden_dim
    attention = float(sum(length**2 for length in lengths)) * config.num_heads * widths
    return {FORWARD: products + attention, BOTH: 3 * products + 3.5 * attention}


def step_bytes(config: HSTULayerConfig, rows: int) -> dict[str, int]:
    """Returns the bytes of rows that each kernel of triton_kernels.py moves in one launch."""
    width, (u, *vqk) = config.embedding_dim, config.split_sizes
    activated = sum(vqk) if config.linear_activation == "silu" else 0
    read_by_output = config.output_features
    elements: dict[str, float] = {
        "layer_norm": 2 * width,
        "layer_norm_backward": (4 + config.recompute_norm) * width,
        "silu": 2 * activated,
        # With a linear bias, its gradient reads all columns, in two launches: u, and the rest.
        "activation_backward": (u + 2 * activated + sum(vqk)) / 2
        if config.linear_bias
        else 3 * activated,
        "gate": 2 * u + read_by_output,
        "gate_backward": 4 * u + (1 + config.recompute_gate) * read_by_output,
    }
    if config.has_fp8_linears:
        # FP8 codes are half an element; 16-bit values are stored too if the backward reads them.
        elements["layer_norm"] += (0.5 - config.recompute_norm) * width
        elements["gate"] += (0.5 - config.recompute_gate) * read_by_output
    return {name: int(DTYPE.itemsize * rows * n) for name, n in elements.items()}


_PRODUCTS = re.compile(r"gemm|nvjet|cutlass|cublas|xmma|splitK", re.IGNORECASE)


def group_of(kernel: str) -> str:
    """Returns the group of a kernel, by its name: "attention", "gemm" or else "elementwise"."""
    if "hstu::" in kernel:
        return "gemm" if "run_projection" in kernel else "attention"
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
        """Makes normally distributed rows."""
        shape = (batch * length, config.embedding_dim)
        x, cotangent = (torch.randn(shape, dtype=DTYPE, device=device) for _ in range(2))
        offsets = length * torch.arange(batch + 1, device=device)
        return cls(x.requires_grad_(), cotangent, offsets, length)


@dataclass
class Layers:
    """One implementation of the layers.

    Attributes:
        impl: its name.
        config: the configuration of each layer.
        stack: the layers.
        call: the layers, compiled where the implementation is.
    """

    impl: str
    config: HSTULayerConfig
    stack: HSTUStack
    call: Any = None

    def __post_init__(self) -> None:
        self.call = torch.compile(self.stack) if self.impl == "compiled" else self.stack

    def forward(self, batch: Batch) -> Tensor:
        """Returns the result, with its autograd graph."""
        result: Tensor = self.call(batch.x, batch.seq_offsets, batch.max_seq_len)
        return result

    def both(self, batch: Batch) -> tuple[Tensor, ...]:
        """Returns the result and the gradients of the rows and of every weight."""
        output = self.forward(batch)
        leaves = [batch.x, *self.stack.parameters()]
        return (output, *torch.autograd.grad(output, leaves, batch.cotangent))

    def check(self, batch: Batch, expected: Sequence[Tensor]) -> None:
        """Raises AssertionError if a result differs too much from the composed layer's."""
        tolerance = FP8_TOLERANCE if self.config.fp8 else TOLERANCE
        names = ("output", "dx", *(f"d {n}" for n, _ in self.stack.named_parameters()))
        for name, actual, wanted in zip(names, self.both(batch), expected, strict=True):
            error = (actual.float() - wanted.float()).norm() / wanted.float().norm()
            assert error <= tolerance, f"{name}: relative error {error:.3g}"


def kernel_record(layers: Layers, rows: int, copy_tbps: float, events: Sequence[Event]) -> Record:
    """Returns the milliseconds of one forward and backward by groups and kernels, longest first."""
    bytes_of = step_bytes(layers.config, rows)
    by_name: dict[str, list[float]] = {}
    for event in events:
        by_name.setdefault(short_name(event["name"]), []).append(event["dur"] / 1e3)
    groups = dict.fromkeys(("gemm", "attention", "elementwise"), 0.0)
    kernels: dict[str, Record] = {}
    for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1])):
        ms, launches = sum(times) / PROFILED_ROUNDS, len(times) / PROFILED_ROUNDS
        groups[group_of(name)] += ms
        kernels[name] = {"group": group_of(name), "ms": rounded(ms), "launches": launches}
        if name in bytes_of:
            moved = launches * bytes_of[name]
            fraction = moved / ms / 1e9 / copy_tbps
            kernels[name] |= {"bytes": int(moved), "share_of_copy": rounded(fraction)}
    return {
        "pass": "kernels",
        "ms": rounded(sum(groups.values())),
        "rounds": PROFILED_ROUNDS,
        **{f"{group}_ms": rounded(ms) for group, ms in groups.items()},
        "kernels": kernels,
        "error": "",
    }


def measure(run: Run, name: str) -> Iterator[Record]:
    """Checks each implementation, then measures its passes and its kernels."""
    options, gpu = run.options, run.the_gpu()
    case = f"{options.batch} x {options.length}"
    config = make_config(options)
    torch.manual_seed(0)
    weights = HSTUStack(config, options.layers, device=gpu.device).state_dict()

    def make_layers(impl: str) -> Layers:
        chosen = replace(config, **IMPLS[impl])
        stack = HSTUStack(chosen, options.layers, device=gpu.device)
        stack.load_state_dict(weights)
        return Layers(impl, chosen, stack)

    small = Batch.random(config, SMALL_BATCH, SMALL_LENGTH, gpu.device)
    batch = Batch.random(config, options.batch, options.length, gpu.device)
    expected = [] if options.dropout else make_layers("composed").both(small)

    @functools.cache
    def checked(impl: str) -> Layers:
        layers = make_layers(impl)
        if expected:
            layers.check(small, expected)
        return layers

    def make(impl: str, direction: str) -> list[Call]:
        layers = checked(impl)
        return [functools.partial(layers.both if direction == BOTH else layers.forward, batch)]

    every = [
        Variant(impl, name, functools.partial(make, impl, name), gpu.milliseconds)
        for impl in options.impls
        for name in (FORWARD, BOTH)
    ]
    for variant in every:
        variant.attempt(variant.prepare)
    matmul, products = gpu.matmul(), []
    take_turns(every, options.rounds, lambda: products.append(gpu.milliseconds(matmul)))
    matmul_tflops = MATMUL_FLOPS / statistics.median(products) / 1e9
    flops = layer_flops(config, options.batch * [options.length])
    for forward, both in zip(every[::2], every[1::2], strict=True):
        gc.collect()
        gpu.release()
        memory = {
            "kept_memory_bytes": forward.attempt(lambda v=forward: gpu.held_bytes(v.calls[0])),
            "peak_memory_bytes": both.attempt(lambda v=both: gpu.peak_bytes(v.calls[0])),
        }
        for variant in (forward, both):
            record: Record = {"case": case, "impl": variant.impl, "pass": variant.direction}
            record |= {"matmul_tflops": rounded(matmul_tflops), **variant.figures()}
            if not variant.error:
                work = options.layers * flops[variant.direction]
                tflops = work / variant.median / 1e9
                peak = PEAK_TFLOPS.get(gpu.name)
                record |= {
                    "flops": work,
                    "tflops": rounded(tflops),
                    "share_of_matmul": rounded(tflops / matmul_tflops),
                    "mfu": rounded(tflops / peak) if peak else None,
                    **memory,
                }
            yield record
        call = functools.partial(gpu.milliseconds, *both.calls)
        events = both.attempt(profile, PROFILED_ROUNDS, call, options.trace, both.impl)
        if events is not None:
            rows, copy_tbps = options.batch * options.length, run.limits["copy_tbps"]
            found = kernel_record(checked(both.impl), rows, copy_tbps, on_gpu(events))
            shared = {"case": case, "impl": both.impl, "matmul_tflops": rounded(matmul_tflops)}
            yield {**shared, **found}


BENCHMARK = Benchmark("layer", PARSER, measure, describe=describe)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
