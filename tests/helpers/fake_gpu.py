"""A fake GPU that runs on the CPU, for tests of benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.gpu import Gpu


class FakeGpu(Gpu):
    """Runs calls on the CPU; times and other GPU measurements are fixed values."""

    device = "cpu"
    MS, HOST_US = 2.0, 30.0  # the times of each call

    def __init__(self) -> None:
        self.name = "fake"

    def milliseconds(self, call: Callable[[], Any], *, spin: bool = True) -> float:
        call()
        return self.MS

    def host_microseconds(self, call: Callable[[], Any]) -> float:
        call()
        return self.HOST_US

    def captured(self, call: Callable[[], Any]) -> Callable[[], Any]:
        return call

    def peak_bytes(self, call: Callable[[], Any]) -> int:
        call()
        return 2**20

    def held_bytes(self, call: Callable[[], Any]) -> int:
        call()
        return 2**19

    def release(self) -> None:
        pass

    def matmul(self) -> Callable[[], Any]:
        return lambda: None

    def limits(self, rounds: int) -> dict[str, float]:
        return {"matmul_tflops": 0.5, "copy_tbps": 0.01}
