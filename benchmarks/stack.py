"""A stack of layers over a paged KV cache: `python -m benchmarks.paged --stack`.

The stack has 8 layers of width 1024, with 4 heads of 256, in bf16. The first part is a scoring step
of 8 users, with the time that the host takes to launch it:

    cached          the step on a cache, launched from Python
    graph           `cached`, captured in a CUDA graph and replayed
    recompute       the stack on all rows of the history and the candidates, with no cache

The second part is users who return from host memory. A `PagedKVCache` has room on the GPU for two
of three batches of users. A step of the batch that was evicted copies its users back from pinned
host memory, layer by layer while the layers compute, and evicts the least recently used users to
the host. Each step writes the same new events again, so that all steps do equal work on equally
many pages. Times are measured on the host, from before the cache's step is opened until the GPU has
finished the given part; medians of interleaved rounds:

    resident        a step of all layers whose users are on the GPU
    returning       a step whose users all return from the host, until its output is computed
    with evictions  `returning`, until the evicted users have been copied to the host as well; the
                    next step's copies would wait for this
    copies          a step that evicts users, copies as many back and computes nothing
    from host       the bandwidth of the copies from the host: their bytes in the time of `copies`
    to host         the bandwidth of the copies to the host, which follow on the same stream
    hidden          the fraction of `copies` that overlaps with computation: the difference of
                    `copies` + `resident` and `returning`. After "of" is the largest possible
                    fraction: all of `copies`, or the time of `resident` where that is shorter
    recompute       the stack on all rows of the history and the candidates, with no cache

First, the outputs of each batch after its return are checked to equal its outputs before its first
eviction, bit for bit, and users to be where they are expected, on the GPU or the host.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hstu_attn import HSTULayerConfig, HSTUStack
from hstu_attn.cached import StepTensors
from hstu_attn.serving import CachedRows, CacheStats, PagedKVCache

from .gpu import Gpu
from .paged_cases import Request, make_inputs
from .record import Record, rounded
from .timing import WARM_UP, Call, Run, Variant, take_turns

__all__ = ["CASES", "HOST_TIER", "Stack", "Users", "measure", "measure_returning"]

HOST_TIER = "host tier"  # the group of users who return from host memory
GROUPS = 3  # batches of users; one is on the host, which has room for two
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Stack(Request):
    """A batch of equal requests to a stack of layers.

    Attributes:
        layers: the number of layers of the stack.
        width: the width of a row.
        group: "stack", or `HOST_TIER`.
    """

    layers: int = 8
    width: int = 1024
    group: str = "stack"

    @property
    def pages(self) -> int:
        """Pages of the batch."""
        return self.batch * -(-self.history // self.page_size)

    @property
    def page_bytes(self) -> int:
        """Bytes of the batch's pages, in all layers."""
        row = self.heads * self.head_dim * DTYPE.itemsize
        return self.pages * self.layers * 2 * self.page_size * row

    def make_stack(self, device: str) -> HSTUStack:
        """Returns the layers, with random weights."""
        config = HSTULayerConfig.stu(
            embedding_dim=self.width,
            num_heads=self.heads,
            hidden_dim=self.head_dim,
            attention_dim=self.head_dim,
        )
        config = replace(config, scaling_seqlen=self.history)
        return HSTUStack(config, self.layers, device=device, dtype=DTYPE).eval()


SCORING = Stack(256, history=4096, new=128, candidates=256, batch=8)
# These cases have the same bytes of pages, and increasing work to recompute.
CASES = (
    SCORING,
    *(replace(SCORING, history=4096 * n, batch=8 // n, group=HOST_TIER) for n in (1, 4, 8)),
)


# ---------------------------------------------------------------------------------------------
# A scoring step
# ---------------------------------------------------------------------------------------------


def scoring_calls(case: Stack, gpu: Gpu) -> dict[str, Call]:
    """Returns a scoring step of the stack: `cached`, `graph` and `recompute`."""
    device = gpu.device
    stack = case.make_stack(device)
    inputs = make_inputs(case, device)
    assert inputs.paged_kv is not None
    pages = inputs.paged_kv
    tables = (pages.page_offsets, pages.page_ids, pages.last_page_lens)
    caches = pages.kv_cache.new_empty((case.layers, *pages.kv_cache.shape)).uniform_(-1, 1)
    cached_lens = torch.full((case.batch,), case.cached, dtype=torch.int32, device=device)
    targets = inputs.mask.num_targets
    total = case.batch * (case.history + case.candidates)
    x, whole = (
        torch.randn(rows, case.width, dtype=DTYPE, device=device) for rows in (case.rows, total)
    )

    def cached() -> Tensor:
        step = StepTensors(caches, *tables, cached_lens)
        lengths = (inputs.max_seqlen_q, inputs.max_seqlen_k)
        rows = CachedRows(step, inputs.cu_seqlens_q, *lengths, targets)
        return stack.forward_cached(x, rows)

    @torch.no_grad()
    def recompute() -> Tensor:
        offsets, longest = inputs.cu_seqlens_k, inputs.max_seqlen_k
        result: Tensor = stack(whole, offsets, longest, num_targets=targets)
        return result

    return {"cached": cached, "graph": gpu.captured(cached), "recompute": recompute}


def measure(run: Run, case: Stack) -> Iterator[Record]:
    """Yields a record of each form of a scoring step, or of users who return."""
    if case.group == HOST_TIER:
        yield {"benchmark": "stack", **measure_returning(case, run.device, run.options.rounds)}
        return
    gpu = run.the_gpu()

    def microseconds(call: Call) -> float:
        return 1e3 * gpu.milliseconds(call, spin=False)

    every = [
        Variant(name, "step", partial(list, [call]), microseconds)
        for name, call in scoring_calls(case, gpu).items()
    ]
    for variant in every:
        variant.attempt(variant.prepare)
    take_turns(every, run.options.rounds)
    for variant in every:
        sizes = {"case": case.name, **asdict(case)}
        yield {"benchmark": "stack", **sizes, "impl": variant.impl, **variant.figures("us")}


# ---------------------------------------------------------------------------------------------
# Users who return
# ---------------------------------------------------------------------------------------------


class Users:
    """Three batches of users with random keys and values, two on the device and one on the host.

    Args:
        case: the requests of a batch.
        device: the device of the cache and the stack.

    Attributes:
        cache: the cache of all users.
    """

    def __init__(self, case: Stack, device: str) -> None:
        self.case = case
        self.cache = PagedKVCache(
            case.layers,
            (GROUPS - 1) * case.pages,
            case.page_size,
            case.heads,
            case.head_dim,
            DTYPE,
            device,
            host_pages=2 * case.pages,
        )
        self._stack = case.make_stack(device)
        counts = torch.full((case.batch,), case.new + case.candidates)
        self._offsets = _offsets(counts).to(device)
        self._key_offsets = _offsets(counts + case.history - case.new).to(device)
        self._targets = torch.full((case.batch,), case.candidates, dtype=torch.int32, device=device)
        self._x, self._whole = (
            torch.randn(case.batch * rows, case.width, dtype=DTYPE, device=device)
            for rows in (case.new + case.candidates, case.history + case.candidates)
        )
        batches = [range(n * case.batch, (n + 1) * case.batch) for n in range(GROUPS)]
        self._turns: Iterator[range] = itertools.cycle(batches)
        self._before: dict[range, Tensor] = {}  # outputs of users before their first eviction
        for users in batches:
            self._fill(users)
            self._before[users] = self.score(users)

    def _fill(self, users: range) -> None:
        case = self.case
        shape = (case.batch * case.history, case.heads, case.head_dim)
        with self.cache.step(users, [case.history] * case.batch) as step:
            for layer in range(case.layers):
                k, v = (self._x.new_empty(shape).uniform_(-1, 1) for _ in range(2))
                step.append(layer, k, v)

    def who_are_away(self) -> range:
        """Returns the next batch in turn, whose step restores it and evicts the batch after it."""
        return next(self._turns)

    def score(self, users: range) -> Tensor:
        """Runs a step of all layers; returns the output of the new events and the candidates."""
        case = self.case
        counts = {"new_tokens": [0] * case.batch, "rewritten": [case.new] * case.batch}
        with self.cache.step(users, **counts) as step:
            lengths = case.new + case.candidates, case.history + case.candidates
            rows = CachedRows(step, self._offsets, *lengths, self._targets)
            return self._stack.forward_cached(self._x, rows)

    def bring_back(self, users: range) -> None:
        """Copies the users back, in a step that computes nothing."""
        with self.cache.step(users, [0] * self.case.batch):
            pass

    @torch.no_grad()
    def recompute(self) -> Tensor:
        """Returns the output of all rows, with no cache."""
        longest = self.case.history + self.case.candidates
        result: Tensor = self._stack(
            self._whole, self._key_offsets, longest, num_targets=self._targets
        )
        return result

    def check(self) -> None:
        """Checks each batch when it returns, and again when it is resident.

        Raises:
            AssertionError: if the outputs differ from those before the eviction, or users are not
                where they are expected.
        """
        for _ in range(GROUPS):
            users = self.who_are_away()
            for returning in (1, 0):
                before = self.cache.stats()
                output = self.score(users)
                after = self.cache.stats()
                _check_moves(before, after, self.case, steps=1, returning=returning)
                if not output.isfinite().all() or not torch.equal(output, self._before[users]):
                    raise AssertionError(f"host tier: other outputs of {users} than before")


def _offsets(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


def _check_moves(
    before: CacheStats, after: CacheStats, case: Stack, *, steps: int, returning: int
) -> None:
    """Checks the steps' cache hits on the device and on the host, and the bytes moved."""
    changes = {
        "hits": steps * case.batch,
        "host_hits": returning * case.batch,
        "losses": 0,
        "bytes_from_host": returning * case.page_bytes,
        "bytes_to_host": returning * case.page_bytes,
    }
    for name, expected in changes.items():
        got = getattr(after, name) - getattr(before, name)
        if got != expected:
            raise AssertionError(f"host tier: expected {expected} {name}, got {got}")


def _microseconds(call: Callable[[], Any], device: str) -> tuple[float, float]:
    """Times a call until the current stream is done, and until the whole device is idle."""
    is_gpu = device == "cuda"
    if is_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if is_gpu:
        torch.cuda.current_stream().synchronize()
    answered = time.perf_counter()
    if is_gpu:
        torch.cuda.synchronize()
    return 1e6 * (answered - start), 1e6 * (time.perf_counter() - start)


def measure_returning(case: Stack, device: str, rounds: int) -> Record:
    """Measures users that return to the cache: microseconds, bytes of a step, and rates in GB/s.

    Args:
        case: the requests of a batch.
        device: "cuda" or "cpu"; on a CPU nothing overlaps, and copies to the host are done before
            the layers compute.
        rounds: the number of rounds, whose medians are reported.

    Raises:
        AssertionError: see `Users.check`.
    """
    users = Users(case, device)
    users.check()
    times: dict[str, list[float]] = {}
    before = users.cache.stats()
    for n in range(WARM_UP + rounds):
        found: dict[str, float] = {}
        step = partial(users.score, users.who_are_away())
        found["returning"], found["with_evictions"] = _microseconds(step, device)
        found["resident"], _ = _microseconds(step, device)
        step_alone = partial(users.bring_back, users.who_are_away())
        found["copies"], both = _microseconds(step_alone, device)
        found["to_host"] = both - found["copies"]
        found["recompute"], _ = _microseconds(users.recompute, device)
        if n >= WARM_UP:
            for name, us in found.items():
                times.setdefault(name, []).append(us)
    after = users.cache.stats()
    moves = 2 * (WARM_UP + rounds)
    _check_moves(before, after, case, steps=3 * (WARM_UP + rounds), returning=moves)
    from_host = (after.bytes_from_host - before.bytes_from_host) // moves
    to_host = (after.bytes_to_host - before.bytes_to_host) // moves
    medians = {name: statistics.median(values) for name, values in times.items()}
    apart = medians["resident"] + medians["copies"]
    return {
        "case": case.name,
        **asdict(case),
        **{f"{name}_us": rounded(us) for name, us in medians.items()},
        "fastest_returning_us": rounded(min(times["returning"])),
        "bytes_from_host": from_host,
        "bytes_to_host": to_host,
        "host_hits": (after.host_hits - before.host_hits) // moves,
        "from_host_gbps": rounded(from_host / medians["copies"] / 1e3),
        "to_host_gbps": _rate(to_host, medians["to_host"], device),
        "hidden": rounded((apart - medians["returning"]) / medians["copies"]),
        "hidden_at_most": rounded(min(1.0, medians["resident"] / medians["copies"])),
    }


def _rate(moved: int, us: float, device: str) -> float | None:
    """Returns the rate in GB/s; None on a CPU, where one call copies in both directions."""
    return rounded(moved / us / 1e3) if device == "cuda" else None
