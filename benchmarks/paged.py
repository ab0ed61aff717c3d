"""Attention over a paged KV cache, for inference.

    python -m benchmarks.paged --json paged.json
    python -m benchmarks.paged --stack --json paged_stack.json
    python -m benchmarks.paged --against ../old --json ratios.json

A request has a history, most of it cached, new events at its end, and candidates; events see what
came before them, candidates the history and themselves. Times are microseconds of the GPU for one
layer, medians of interleaved rounds over several input sets that are together too large for the
caches:

    paged     attention that reads pages, launched from Python
    graph     `paged`, captured in a CUDA graph and replayed
    e4m3      `graph`, with pages of e4m3 with scales
    fp8       `e4m3`, with products in e4m3, for which q, k and v are quantized
    append    the new events' keys and values into their pages, captured and replayed
    gather    pages copied into packed keys and values first, then attention without pages
    recompute attention of all rows of the history and the candidates, without a cache

The outputs of `paged`, `e4m3`, `fp8` and `gather` are first compared with the reference. "needs" is
a lower bound of the time: the larger of the time to move the 16-bit tensors at the rate of a copy,
and the time of the FLOPs at the rate of an 8192^3 bf16 product in the same run. Keys and values of
pages count once, q, k, v and the output once each.

`--stack` measures a stack of layers instead, and users who return to it from host memory, as the
docstring of `benchmarks/stack.py` explains.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from . import cli

PARSER = cli.parser("paged", __doc__, rounds=21, cases="parts of cases' names", against=True)
PARSER.add_argument(
    "--head-dims", type=int, nargs="+", default=[64, 128, 256], metavar="D",
    help="(default: 64 128 256)",
)  # fmt: skip
PARSER.add_argument("--stack", action="store_true", help="a stack of layers instead")

if __name__ == "__main__":
    PARSER.parse_args()  # --help or a wrong option ends here, before torch is imported

import torch

from hstu_attn import PagedKV, Quantization, append_paged_kv, hstu_attention
from hstu_attn.paged import quantize_rows
from hstu_attn.reference import hstu_attention as reference_attention
from hstu_attn.testing import Batch, assert_matches, make_paged_batch, run

from .gpu import Gpu
from .paged_cases import Request, make_inputs, requests
from .record import Record, rounded
from .runner import Benchmark
from .timing import Call, Run, Variant, take_turns

__all__ = ["BENCHMARK", "main"]

CACHE_BYTES = 2**27  # input sets hold more together; twice an H200's L2 cache
QUANTIZATION = Quantization(mode=1)
FP8_ERROR = 0.06  # of the output, relative, in the Frobenius norm
APPEND = Request(128, history=2048, new=2048, candidates=64, batch=64)  # 256 MB of new events


def cases(options: argparse.Namespace) -> Sequence[Any]:
    """Returns the requests, or the cases of a stack."""
    if options.stack:
        if options.against:
            PARSER.error("--against: expected no --stack with it")
        from . import stack

        return stack.CASES
    return requests(options.head_dims)


# ---------------------------------------------------------------------------------------------
# Forms
# ---------------------------------------------------------------------------------------------


def paged(batch: Batch) -> torch.Tensor:
    """Computes attention of a batch, with or without pages."""
    return run(hstu_attention, batch)["out"]


def quantized(batch: Batch) -> Batch:
    """Returns the batch with pages of e4m3."""
    pages = batch.paged_kv
    assert pages is not None
    codes, scales = quantize_rows(pages.kv_cache)
    lists = (pages.page_offsets, pages.page_ids, pages.last_page_lens)
    return replace(batch, paged_kv=PagedKV(codes, *lists, scales))


def append(batch: Batch) -> None:
    """Writes the new events' keys and values into their pages."""
    assert batch.paged_kv is not None
    append_paged_kv(
        batch.k,
        batch.v,
        batch.paged_kv,
        cu_seqlens_q=batch.cu_seqlens_q,
        cu_seqlens_k=batch.cu_seqlens_k,
        num_targets=batch.mask.num_targets,
    )


def gather(batch: Batch, request: Request) -> torch.Tensor:
    """Computes attention on keys and values gathered from the pages; all lengths are equal."""
    assert batch.paged_kv is not None
    pages = batch.paged_kv.kv_cache[batch.paged_kv.page_ids.long()]
    packed = []
    for part, rows in zip(pages.unbind(1), (batch.k, batch.v), strict=True):
        history = part.reshape(request.batch, -1, *part.shape[2:])[:, : request.history]
        targets = rows.unflatten(0, (request.batch, -1))[:, request.new :]
        packed.append(torch.cat([history, targets], dim=1).flatten(0, 1))
    k, v = packed
    return run(hstu_attention, replace(batch, k=k, v=v, paged_kv=None))["out"]


def recomputed(batch: Batch, request: Request) -> Batch:
    """Returns the batch without a cache, with rows for the whole history."""
    shape = (request.batch * (request.history + request.candidates), *batch.q.shape[1:])
    q, k, v = (batch.q.new_empty(shape).uniform_(-1, 1) for _ in range(3))
    return replace(
        batch,
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=batch.cu_seqlens_k,
        max_seqlen_q=batch.max_seqlen_k,
        paged_kv=None,
    )


def check(request: Request, device: str) -> None:
    """Compares the outputs of the forms with the reference, on a small batch of the same kind."""
    small = replace(
        request,
        batch=2,
        history=min(request.history, 300),
        new=min(request.new, 40),
        candidates=min(request.candidates, 70),
    )
    inputs = make_paged_batch(
        [small.cached] * 2,
        [small.new] * 2,
        [small.candidates] * 2,
        page_size=small.page_size,
        heads=small.heads,
        dim=small.head_dim,
        dtype=torch.bfloat16,
        device=device,
    )
    of_codes = quantized(inputs)
    for name, out, batch in (
        ("paged", paged(inputs), inputs),
        ("e4m3", paged(of_codes), of_codes),
        ("gather", gather(inputs, small), inputs),
    ):
        exact = run(reference_attention, batch, dtype=torch.float64)["out"]
        same_dtype_reference = run(reference_attention, batch, compute_dtype=torch.bfloat16)["out"]
        assert_matches(name, out, exact, same_dtype_reference)
    out = paged(replace(of_codes, quantization=QUANTIZATION)).double()
    exact = run(reference_attention, of_codes, dtype=torch.float64)["out"]
    error = float((out - exact).norm() / exact.norm())
    if not error <= FP8_ERROR:
        raise RuntimeError(f"fp8: expected an error of at most {FP8_ERROR}, got {error:.4f}")


# ---------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------


def variants(bench: Run, request: Request) -> list[Variant]:
    """Returns the forms of a request, which share input sets."""
    gpu = bench.the_gpu()

    @functools.cache
    def inputs() -> list[Batch]:
        check(request, gpu.device)
        sets = min(8, max(2, -(-CACHE_BYTES // request.bytes)))
        return [make_inputs(request, gpu.device) for _ in range(sets)]

    @functools.cache
    def of_codes() -> list[Batch]:
        return [quantized(batch) for batch in inputs()]

    @functools.cache
    def fp8() -> list[Batch]:
        return [replace(batch, quantization=QUANTIZATION) for batch in of_codes()]

    def graph(batch: Batch) -> Call:
        return gpu.captured(functools.partial(paged, batch))

    def microseconds(call: Call) -> float:
        return 1e3 * gpu.milliseconds(call)

    def variant(
        impl: str,
        make: Callable[[Batch], Call],
        count: int = 8,
        batches: Callable[[], list[Batch]] = inputs,
    ) -> Variant:
        return Variant(
            impl, "call", lambda: [make(batch) for batch in batches()[:count]], microseconds
        )

    forms = {
        "paged": variant("paged", lambda batch: functools.partial(paged, batch)),
        "graph": variant("graph", graph),
        "e4m3": variant("e4m3", graph, batches=of_codes),
        "fp8": variant("fp8", graph, batches=fp8),
        "append": variant("append", lambda batch: gpu.captured(functools.partial(append, batch))),
        "gather": variant("gather", lambda batch: functools.partial(gather, batch, request)),
        "recompute": variant(
            "recompute",
            lambda batch: functools.partial(paged, recomputed(batch, request)),
            count=2,  # two are large enough
        ),
    }
    if not request.new:
        del forms["append"]
    return list(forms.values())


def measure(bench: Run, case: Any) -> Iterator[Record]:
    """Measures each form."""
    if bench.options.stack:
        from . import stack

        yield from stack.measure(bench, case)
        return
    every = variants(bench, case)
    for variant in every:
        variant.attempt(variant.prepare)
    take_turns(every, bench.options.rounds)
    for variant in every:
        yield {
            "case": case.name,
            **asdict(case),
            "impl": variant.impl,
            **variant.figures("us"),
            "needs_us": rounded(case.needs_us(**bench.limits)),
            "flops": case.flops,
            "bytes": case.bytes,
        }


def append_tbps(gpu: Gpu, rounds: int) -> float:
    """Measures TB/s of appending 256 MB, counting bytes read and bytes written."""
    batch = make_inputs(APPEND, gpu.device)
    appending = Variant("", "", lambda: [functools.partial(append, batch)], gpu.milliseconds)
    appending.prepare()
    take_turns([appending], rounds)
    row = APPEND.heads * APPEND.head_dim * batch.k.element_size()
    moved = 2 * 2 * row * APPEND.batch * APPEND.new
    return moved / appending.median / 1e9


def describe(bench: Run) -> Record:
    """Returns the rate of appending, which every record of the requests has."""
    if bench.options.stack:
        return {}
    return {"append_tbps": rounded(append_tbps(bench.the_gpu(), bench.options.rounds))}


BENCHMARK = Benchmark("paged", PARSER, measure, cases, variants, describe)
main = BENCHMARK.main

if __name__ == "__main__":
    sys.exit(main())
