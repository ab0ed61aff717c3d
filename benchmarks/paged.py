"""Attention over a paged KV cache, for inference.

    python -m benchmarks.paged --quick
    python -m benchmarks.paged --json paged.json --plot paged.png
    python -m benchmarks.paged --stack --json paged_stack.json

A request has a history, most of it cached, new events at its end, and candidates; events see what
came before them, candidates the history and themselves. Times are those of the GPU for one layer,
medians of interleaved rounds over several input sets that are together too large for the caches:

    paged     attention that reads pages, launched from Python
    graph     the same, captured in a CUDA graph and replayed
    append    the new events' keys and values into their pages
    gather    pages copied into packed keys and values first, then attention without pages
    recompute attention of all rows of the history and the candidates, as if nothing were cached

The forms' outputs are first compared with the reference. "needs" is what the bytes and the FLOPs
need at the least: the longer of the two, bytes at the rate of a copy and FLOPs at that of an 8192^3
bf16 product in the same run. Keys and values of pages count once, q, k, v and the output once each.

`--stack` measures a stack of layers instead (8 of 4 heads of 256, width 1024, in bf16; batch 8): a
step on a cache, launched from Python and as a replayed graph, and the whole stack on all rows; and
users who come back from host memory, whose columns the head of `benchmarks/host_tier.py` explains.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paged", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--head-dims", type=int, nargs="+", default=[64, 128, 256], metavar="D",
        help="(default 64 128 256)",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=int, default=21, help="of which the median counts (default 21)"
    )
    parser.add_argument("--quick", action="store_true", help="history 4096 at batch 1 and 8 alone")
    parser.add_argument("--stack", action="store_true", help="a stack of layers instead")
    parser.add_argument("--json", type=Path, help="where the results go")
    parser.add_argument("--plot", type=Path, help="a picture of the results")
    parser.add_argument("--commit", help="of the sources; by default what git says")
    return parser


if __name__ == "__main__":
    _parser().parse_args()  # --help or a wrong option ends here, before torch is imported

import torch

from hstu_attn import Mask, PagedKV, append_paged_kv, hstu_attention
from hstu_attn.reference import hstu_attention as reference_attention
from hstu_attn.testing import Batch, assert_matches, make_paged_batch, run

from . import host_tier, plots
from .gpu import Gpu
from .report import gpu_software, rounded, text_table, write_records

__all__ = ["Request", "main", "requests"]

HEADS = 4
CACHE_BYTES = 2**27  # input sets together hold more: twice an H200's L2 cache
WARM_UP = 2
IMPLS = ("paged", "graph", "append", "gather", "recompute")


@dataclass(frozen=True)
class Request:
    """A batch of equal requests."""

    head_dim: int
    history: int  # cached and new events
    new: int
    candidates: int
    batch: int
    page_size: int = 128

    @property
    def cached(self) -> int:
        return self.history - self.new

    @property
    def rows(self) -> int:
        """Of all requests."""
        return self.batch * (self.new + self.candidates)

    @property
    def flops(self) -> float:
        """4 for each head, row, visible key and column."""
        new = self.new * self.cached + self.new * (self.new + 1) / 2
        candidates = self.candidates * (self.history + 1)
        return 4.0 * self.batch * HEADS * self.head_dim * (new + candidates)

    @property
    def bytes(self) -> int:
        """Keys and values of the history in pages; q and the output; k and v of candidates."""
        row = HEADS * self.head_dim * 2
        history = 2 * self.batch * self.history
        return row * (history + 2 * self.rows + 2 * self.batch * self.candidates)

    def needs_us(self, matmul_tflops: float, copy_tbps: float) -> float:
        """The longer of what bytes and FLOPs need."""
        return max(self.flops / matmul_tflops, self.bytes / copy_tbps) / 1e6


def requests(head_dims: Sequence[int]) -> list[Request]:
    """The cases: each varies one thing of a history of 4096 with 256 candidates."""
    found: list[Request] = []
    for dim in head_dims:
        usual = Request(dim, history=4096, new=128, candidates=256, batch=8)
        cases = [
            *(replace(usual, batch=batch) for batch in (1, 8, 64)),
            *(
                replace(usual, history=history, new=min(128, history // 4))
                for history in (256, 1024, 16384)
            ),
            *(replace(usual, new=new) for new in (0, 256, 2048, 4096)),
            *(replace(usual, candidates=candidates) for candidates in (32, 1024)),
            *(replace(usual, page_size=page_size) for page_size in (16, 32, 64)),
        ]
        found += list(dict.fromkeys(cases))
    return found


# ---------------------------------------------------------------------------------------------
# Inputs and forms
# ---------------------------------------------------------------------------------------------


def make_inputs(request: Request) -> Batch:
    """Pages in random order, each used once."""
    r = request
    pages_each = -(-r.history // r.page_size)
    shape = (r.batch * pages_each, 2, r.page_size, HEADS, r.head_dim)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    cache = torch.empty(shape, **options).uniform_(-1, 1)
    q, k, v = (torch.empty(r.rows, HEADS, r.head_dim, **options).uniform_(-1, 1) for _ in range(3))

    def offsets(length: int) -> torch.Tensor:
        return torch.arange(r.batch + 1, dtype=torch.int32, device="cuda") * length

    ids = torch.randperm(r.batch * pages_each, device="cuda").int()
    last = torch.full((r.batch,), (r.history - 1) % r.page_size + 1, device="cuda").int()
    targets = torch.full((r.batch,), r.candidates, dtype=torch.int32, device="cuda")
    return Batch(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=offsets(r.new + r.candidates),
        max_seqlen_q=r.new + r.candidates,
        cu_seqlens_k=offsets(r.history + r.candidates),
        max_seqlen_k=r.history + r.candidates,
        mask=Mask.causal(num_targets=targets),
        alpha=r.head_dim**-0.5,
        scaling_seqlen=r.history,
        paged_kv=PagedKV(cache, offsets(pages_each), ids, last),
    )


def paged(batch: Batch) -> torch.Tensor:
    return run(hstu_attention, batch)["out"]


def append(batch: Batch) -> None:
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
    """Equal lengths, whole pages: what a user would write without a kernel that reads pages."""
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
    """Without a cache: rows for the whole history."""
    total = request.batch * (request.history + request.candidates)
    q, k, v = (
        torch.empty(total, HEADS, request.head_dim, dtype=torch.bfloat16, device="cuda").uniform_(
            -1, 1
        )
        for _ in range(3)
    )
    return replace(
        batch,
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=batch.cu_seqlens_k,
        max_seqlen_q=batch.max_seqlen_k,
        paged_kv=None,
    )


def captured(call: Callable[[], Any]) -> Callable[[], None]:
    """A graph of the call, to be replayed."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def check(request: Request) -> None:
    """Both forms that read the cache, on a small batch of the same kind, against the reference."""
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
        heads=HEADS,
        dim=small.head_dim,
        dtype=torch.bfloat16,
        device="cuda",
    )
    exact = run(reference_attention, inputs, dtype=torch.float64)["out"]
    same_dtype_reference = run(reference_attention, inputs, compute_dtype=torch.bfloat16)["out"]
    assert_matches("paged", paged(inputs), exact, same_dtype_reference)
    assert_matches("gather", gather(inputs, small), exact, same_dtype_reference)


# ---------------------------------------------------------------------------------------------
# A stack
# ---------------------------------------------------------------------------------------------

LAYERS, WIDTH = 8, 1024
STACK = Request(256, history=4096, new=128, candidates=256, batch=8)
# The same bytes, and ever more to recompute
RETURNING = tuple(replace(STACK, history=4096 * n, batch=8 // n) for n in (1, 4, 8))


def stack_case(request: Request) -> host_tier.Case:
    """The request beside the sizes of the stack."""
    return host_tier.Case(**asdict(request), heads=HEADS, layers=LAYERS, width=WIDTH)


def stack_calls() -> dict[str, Callable[[], Any]]:
    """A scoring step of the stack: `cached`, `graph` and `recompute`."""
    from hstu_attn.cached import StepTensors
    from hstu_attn.serving import CachedRows

    r = STACK
    stack = stack_case(r).make_stack("cuda")
    inputs = make_inputs(r)
    assert inputs.paged_kv is not None
    pages = inputs.paged_kv
    tables = (pages.page_offsets, pages.page_ids, pages.last_page_lens)
    caches = pages.kv_cache.new_empty((LAYERS, *pages.kv_cache.shape)).uniform_(-1, 1)
    cached_lens = torch.full((r.batch,), r.cached, dtype=torch.int32, device="cuda")
    targets = inputs.mask.num_targets
    x = torch.randn(r.rows, WIDTH, dtype=torch.bfloat16, device="cuda")
    total = r.batch * (r.history + r.candidates)
    whole = torch.randn(total, WIDTH, dtype=torch.bfloat16, device="cuda")

    def cached() -> torch.Tensor:
        step = StepTensors(caches, *tables, cached_lens)
        lengths = (inputs.max_seqlen_q, inputs.max_seqlen_k)
        rows = CachedRows(step, inputs.cu_seqlens_q, *lengths, targets)
        return stack.forward_cached(x, rows)

    @torch.no_grad()
    def recompute() -> torch.Tensor:
        offsets, longest = inputs.cu_seqlens_k, inputs.max_seqlen_k
        result: torch.Tensor = stack(whole, offsets, longest, num_targets=targets)
        return result

    return {"cached": cached, "graph": captured(cached), "recompute": recompute}


APPEND = Request(128, history=2048, new=2048, candidates=64, batch=64)


def append_tbps(gpu: Gpu, rounds: int) -> float:
    """TB/s of appending 256 MB, counting what is read and what is written."""
    batch = make_inputs(APPEND)
    times = [gpu.milliseconds(functools.partial(append, batch)) for _ in range(WARM_UP + rounds)]
    row = HEADS * APPEND.head_dim * 2
    moved = 2 * 2 * row * APPEND.batch * APPEND.new
    return moved / statistics.median(times[WARM_UP:]) / 1e9


def measure_stack(gpu: Gpu, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each form in each round; `cached` with what the host takes to launch it."""
    times: dict[str, list[float]] = {}
    calls = stack_calls()
    for n in range(WARM_UP + rounds):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            call()
            end.record()
            end.synchronize()
            if n >= WARM_UP:
                times.setdefault(name, []).append(start.elapsed_time(end))
    return times


# ---------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------


def measure(gpu: Gpu, request: Request, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each form in each round."""
    check(request)
    sets = min(8, max(2, -(-CACHE_BYTES // request.bytes)))
    calls: dict[str, list[Callable[[], Any]]] = {name: [] for name in IMPLS}
    for _ in range(sets):
        batch = make_inputs(request)
        calls["paged"].append(functools.partial(paged, batch))
        calls["graph"].append(captured(functools.partial(paged, batch)))
        if request.new:
            calls["append"].append(captured(functools.partial(append, batch)))
        calls["gather"].append(functools.partial(gather, batch, request))
    for _ in range(2):
        whole = recomputed(make_inputs(request), request)
        calls["recompute"].append(functools.partial(paged, whole))
    times: dict[str, list[float]] = {name: [] for name in IMPLS if calls[name]}
    for n in range(WARM_UP + rounds):
        for name, found in times.items():
            ms = gpu.milliseconds(calls[name][n % len(calls[name])])
            if n >= WARM_UP:
                found.append(ms)
    return times


def run_stack(gpu: Gpu, options: argparse.Namespace, described: dict[str, Any]) -> None:
    """Measures the stack, then users who return to it; prints and writes."""
    records: list[dict[str, Any]] = []
    case = asdict(stack_case(STACK))
    for name, found in measure_stack(gpu, options.rounds).items():
        us = 1e3 * statistics.median(found)
        print(f"{name:10s} {us:9.1f} us")
        fastest = rounded(1e3 * min(found))
        records.append(
            {**described, **case, "impl": name, "us": rounded(us), "fastest_us": fastest}
        )
    if options.json:
        write_records(options.json, records)
    returning: list[dict[str, Any]] = []
    for request in RETURNING:
        torch.cuda.empty_cache()
        returning.append(host_tier.measure(stack_case(request), gpu.device, options.rounds))
        if options.json:
            found_records = [{**described, **record} for record in returning]
            write_records(options.json, [*records, *found_records])
    print("\n".join(host_tier.table(returning)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes."""
    options = _parser().parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("benchmarks.paged: expected an NVIDIA GPU and a CUDA build of torch")
    gpu = Gpu()
    command = " ".join(["python -m benchmarks.paged", *(arguments or sys.argv[1:])])
    limits = {name: rounded(x) for name, x in gpu.limits(options.rounds).items()}
    described = {**gpu_software(gpu.name, command, options.commit), **limits}
    print(f"{gpu.name}: product {limits['matmul_tflops']} TFLOP/s, copy {limits['copy_tbps']} TB/s")
    records: list[dict[str, Any]] = []
    if options.stack:
        run_stack(gpu, options, described)
        return 0
    append_rate = rounded(append_tbps(gpu, options.rounds))
    described["append_tbps"] = append_rate
    print(f"append {append_rate} TB/s")
    cases = requests(options.head_dims)
    if options.quick:
        cases = [r for r in cases if (r.history, r.new, r.candidates) == (4096, 128, 256)]
        cases = [r for r in cases if r.batch <= 8]
    rows: list[list[str]] = []
    for request in cases:
        needs = request.needs_us(limits["matmul_tflops"] or 1, limits["copy_tbps"] or 1)
        times = measure(gpu, request, options.rounds)
        medians = {name: 1e3 * statistics.median(found) for name, found in times.items()}
        for name, us in medians.items():
            records.append(
                {
                    **described,
                    **asdict(request),
                    "heads": HEADS,
                    "impl": name,
                    "us": rounded(us),
                    "fastest_us": rounded(1e3 * min(times[name])),
                    "needs_us": rounded(needs),
                    "flops": request.flops,
                    "bytes": request.bytes,
                }
            )
        r = request
        names = [f"{r.history}", f"{r.new}", f"{r.candidates}", f"{r.batch}", f"{r.page_size}"]
        shown = [f"{medians[name]:.1f}" if name in medians else "-" for name in IMPLS]
        rows.append([f"{r.head_dim}", *names, f"{needs:.1f}", *shown])
        if options.json:
            write_records(options.json, records)
        torch.cuda.empty_cache()
    header = ["D", "history", "new", "candidates", "batch", "page", "needs us", *IMPLS]
    print("\n".join(text_table([header, *rows])))
    if options.plot:
        plots.paged(records, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
