"""The timing loop of a benchmark, and the options of a run.

A benchmark times a list of `Variant`s in interleaved rounds (`take_turns`): in each round every
variant runs once, on the next of several input sets, starting with a different variant. The median
over the rounds is reported.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .gpu import Gpu
from .record import Record, rounded

__all__ = [
    "WARM_UP",
    "Call",
    "Run",
    "Variant",
    "clocked",
    "environment",
    "explain",
    "take_turns",
]

WARM_UP = 2
T = TypeVar("T")
Call = Callable[[], Any]


def explain(failure: BaseException) -> str:
    """Returns the type and the first line of an error."""
    lines = str(failure).strip().splitlines() or [""]
    return f"{type(failure).__name__}: {lines[0]}"[:300]


@contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable inside the context."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def clocked(call: Call) -> float:
    """Returns the milliseconds that a call takes on the host."""
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


@dataclass
class Variant:
    """One implementation of one pass of a case.

    Attributes:
        impl: name of the implementation.
        direction: the pass, such as "forward".
        make: makes the calls that are timed, one for each input set; it also checks the
            implementation's result.
        clock: returns the time of a call, in the unit of the benchmark.
        active: makes the context in which `make` and the calls run.
        calls: the calls that `make` returned.
        times: the time of each round.
        error: the reason of a failure, after which the variant is left out; empty without one.
    """

    impl: str
    direction: str
    make: Callable[[], Sequence[Call]]
    clock: Callable[[Call], float]
    active: Callable[[], AbstractContextManager[Any]] = nullcontext
    calls: Sequence[Call] = ()
    times: list[float] = field(default_factory=list)
    error: str = ""

    def attempt(self, action: Callable[..., T], *arguments: Any) -> T | None:
        """Returns the action's result; None if it fails, which is printed, or after a failure."""
        if self.error:
            return None
        try:
            with self.active():
                return action(*arguments)
        except Exception as failure:
            self.error = explain(failure)
            traceback.print_exc()
            return None

    def prepare(self) -> None:
        """Makes the calls and runs each once as a warm-up, which may tune and compile."""
        self.calls = self.make()
        for number in range(max(WARM_UP, len(self.calls))):
            self.calls[number % len(self.calls)]()

    def time(self, number: int) -> None:
        """Times the round of this number."""
        self.times.append(self.clock(self.calls[number % len(self.calls)]))

    @property
    def median(self) -> float:
        """Returns the median of all rounds."""
        return statistics.median(self.times)

    def figures(self, name: str = "ms") -> Record:
        """Returns the median, the shortest time and the number of rounds, or the error."""
        if self.error:
            return {name: None, "error": self.error}
        return {
            name: rounded(self.median),
            f"fastest_{name}": rounded(min(self.times)),
            "rounds": len(self.times),
            "error": "",
        }


def take_turns(
    variants: Sequence[Variant], rounds: int, before: Call | None = None, first: int = 0
) -> None:
    """Times all variants, which have been prepared, in interleaved rounds.

    Args:
        variants: the variants; failed ones are skipped.
        rounds: the number of rounds; in each, every variant runs once.
        before: is called before each round.
        first: the number of the first round; selects the first variant and the input set.
    """
    for number in range(first, first + rounds):
        if before:
            before()
        begins = number % max(1, len(variants))
        for variant in (*variants[begins:], *variants[:begins]):
            variant.attempt(variant.time, number)


@dataclass
class Run:
    """The options, the device and the ranks that a benchmark is given.

    Attributes:
        options: the command line.
        gpu: the GPU; None where the benchmark runs on a CPU.
        world: the ranks of a benchmark of several GPUs, `hstu_attn.distributed.World`.
        limits: TFLOP/s of an 8192^3 bf16 matrix product (`matmul_tflops`) and TB/s of a device
            copy (`copy_tbps`) in this run; empty without a GPU.
        kept: values that a benchmark keeps from one case to the next.
    """

    options: argparse.Namespace
    gpu: Gpu | None = None
    world: Any = None
    limits: dict[str, float] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """The device, "cuda" or "cpu"; a rank has its own device."""
        if self.world is not None:
            return str(self.world.device)
        return self.gpu.device if self.gpu else "cpu"

    @property
    def is_first(self) -> bool:
        """Returns whether this process prints and writes."""
        return self.world is None or self.world.rank == 0

    def the_gpu(self) -> Gpu:
        """Returns the GPU of a benchmark that needs one."""
        assert self.gpu is not None
        return self.gpu
