"""The part of a training step on a GPU that attention takes.

    python -m benchmarks.training_step --json training_step.json
    python -m benchmarks.training_step --impls hstu_attn triton --heads 4 --head-dim 64

The step is that of examples/train_retrieval.py, with its model and its defaults: forward, sampled
softmax, backward, clipping and AdamW, on histories of one length with random items. It leaves out
the relative bias, which the other implementations lack, and operations that wait for the GPU. Each
implementation of HSTU attention is first checked against the tests' tolerance. Rounds are
interleaved, and a step's time is the median over the rounds, by CUDA events.

The times of attention are from a profile of a few more steps: the time in which the GPU runs
kernels launched by the forward, or by the backward, of attention's autograd function. Kernels that
overlap count once. "busy" is the time of all kernels; if it is less than the step's time, the GPU
waits for the host.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from types import SimpleNamespace
from unittest import mock

from . import cli

IMPLS = ("hstu_attn", "hstu_attn_sm80", "triton")

PARSER = cli.parser("training_step", __doc__, rounds=21, trace="each implementation")
_add = PARSER.add_argument
_add("--impls", nargs="+", default=IMPLS, metavar="NAME", help="hstu_attn, hstu_attn_smNN, triton "
     f"(default: {', '.join(IMPLS)})")  # fmt: skip
_add("--batch", type=int, default=8, help="histories in a step (default: 8)")
_add("--length", type=int, default=4096, help="events of each (default: 4096)")
_add("--layers", type=int, default=2, help="HSTU layers (default: 2)")
_add("--heads", type=int, default=2, help="heads of each (default: 2)")
_add("--head-dim", type=int, default=32, help="width of a head (default: 32)")

if __name__ == "__main__":
    PARSER.parse_args()  # --help or a wrong option ends here, before torch is imported

import torch
from torch import Tensor

from hstu_attn import HSTULayerConfig, Mask, hstu_attention, ops
from hstu_attn.call import NO_BIAS, AttentionCall, BiasTensors
from hstu_attn.data import JaggedBatch

from .attention import make_implementations
from .cases import Case
from .implementations import Implementation
from .profile import Event, busy_ms, kernels_of, on_gpu, profile, short_name
from .record import ROOT, Record, rounded
from .runner import Benchmark
from .timing import Call, Run, Variant, take_turns

sys.path.insert(0, str(ROOT / "examples"))

from recommender.model import RetrievalModel, sampled_softmax_loss

__all__ = ["BENCHMARK", "Training", "main"]

# The autograd functions of attention have this name in ops.py and in triton_hstu.py.
FUNCTIONS = {"attention forward": "_Attention", "attention backward": "_AttentionBackward"}
PROFILED_STEPS = 3
ITEMS = 10000
SECONDS = 3600  # seconds between two events
# The example's defaults; the learning rate is that of its first step.
DROPOUT, NEGATIVES, TEMPERATURE, CLIP_NORM = 0.2, 256, 0.1, 1.0
LEARNING_RATE, BETAS = 4e-5, (0.9, 0.98)


# ---------------------------------------------------------------------------------------------
# The step
# ---------------------------------------------------------------------------------------------


def random_histories(options: argparse.Namespace, device: str) -> JaggedBatch:
    """Makes histories of one length, whose items are drawn uniformly."""
    shape = (options.batch, options.length + 1)
    items = torch.randint(ITEMS, shape, device=device)
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
    """The example's model with layers in bf16, its optimizer and a batch."""

    dtype = torch.bfloat16

    def __init__(self, options: argparse.Namespace, device: str) -> None:
        torch.manual_seed(0)
        config = HSTULayerConfig.research(
            embedding_dim=options.heads * options.head_dim,
            num_heads=options.heads,
            linear_dim=options.head_dim,
            attention_dim=options.head_dim,
            max_sequence_len=options.length,
            linear_dropout_rate=DROPOUT,
            enable_relative_attention_bias=False,
        )
        # A fused layer's attention cannot be replaced by another implementation.
        config = replace(config, fused=False)
        self.model = RetrievalModel(
            ITEMS,
            config,
            options.layers,
            options.length,
            DROPOUT,
            compute_dtype=self.dtype,
        ).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0
        )
        self.batch = random_histories(options, device)

    def step(self) -> Tensor:
        """Runs one step; returns its loss."""
        states, targets = self.model(self.batch), self.batch.target_items
        losses = sampled_softmax_loss(self.model, states, targets, NEGATIVES, TEMPERATURE)
        loss = losses.mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        return loss.detach()


# ---------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------


def describe(run: Run) -> Record:
    """Returns the sizes of the model."""
    names = ("layers", "heads", "head_dim")
    sizes = {name: getattr(run.options, name) for name in names}
    return {"dim": sizes["heads"] * sizes["head_dim"], **sizes, "dtype": "bfloat16"}


def layer_attention(implementation: Implementation) -> Callable[..., Tensor]:
    """Returns the replacement of `hstu_attn.ops.attention`, for causal masks without a bias."""
    if implementation.function is hstu_attention:
        return ops.attention  # unchanged, because a stack prepares its call once

    def attention(
        q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, bias: BiasTensors
    ) -> Tensor:
        assert bias == NO_BIAS
        return implementation.function(
            q,
            k,
            v,
            cu_seqlens_q=call.cu_seqlens_q,
            max_seqlen_q=call.max_seqlen_q,
            mask=Mask.causal(num_contexts=call.num_contexts, num_targets=call.num_targets),
            alpha=call.alpha,
            scaling_seqlen=call.scaling_seqlen,
        )

    return attention


def measure(run: Run, name: str) -> Iterator[Record]:
    """Measures the step of each implementation, and the time of attention within it."""
    options, gpu = run.options, run.the_gpu()
    sizes = (options.batch, options.length, options.length, options.heads, options.head_dim)
    case = Case(*sizes, Training.dtype)

    def make(implementation: Implementation) -> list[Call]:
        implementation.check(case, gpu.device)
        training = Training(options, gpu.device)

        def step() -> None:
            operators = SimpleNamespace(attention=layer_attention(implementation))
            with mock.patch("hstu_attn.layer.ops", operators):
                training.step()

        return [step]

    every = [
        Variant(each.name, "step", functools.partial(make, each), gpu.milliseconds, each.active)
        for each in make_implementations(*options.impls)
    ]
    for variant in every:
        variant.attempt(variant.prepare)
    take_turns(every, options.rounds)
    for variant in every:
        step = functools.partial(gpu.milliseconds, *variant.calls)
        events = variant.attempt(profile, PROFILED_STEPS, step, options.trace, variant.impl)
        found = variant.attempt(step_records, variant, events)
        for record in found or [{"pass": "step", **variant.figures()}]:
            yield {"case": case.name, "impl": variant.impl, **record}


def step_records(variant: Variant, events: Sequence[Event]) -> list[Record]:
    """Returns a record of each pass of attention and one of the step; times are of one step."""
    step = variant.median
    found: list[Record] = []
    for name, function in FUNCTIONS.items():
        kernels = kernels_of(function, events)
        ms = busy_ms(kernels) / PROFILED_STEPS
        found.append(
            {
                "pass": name,
                "ms": rounded(ms),
                "rounds": PROFILED_STEPS,
                "kernels": ms_by_name(kernels),
                "share_of_step": rounded(ms / step),
            }
        )
    busy = rounded(busy_ms(on_gpu(events)) / PROFILED_STEPS)
    return [*found, {"pass": "step", **variant.figures(), "busy_ms": busy, "share_of_step": 1.0}]


def ms_by_name(kernels: Sequence[Event]) -> dict[str, float | None]:
    """Returns milliseconds per step by kernel name (without arguments), longest first."""
    sums: dict[str, float] = {}
    for kernel in kernels:
        name = short_name(kernel["name"])
        sums[name] = sums.get(name, 0.0) + kernel["dur"] / 1e3
    longest_first = sorted(sums.items(), key=itemgetter(1), reverse=True)
    return {name: rounded(ms / PROFILED_STEPS) for name, ms in longest_first}


BENCHMARK = Benchmark("training_step", PARSER, measure, describe=describe)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
