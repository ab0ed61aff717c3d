"""Time and memory of a call on a GPU, and the peak rates of that GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["MATMUL_FLOPS", "PEAK_TFLOPS", "Gpu"]

SPIN_CYCLES = 500_000  # a quarter of a millisecond
MOST_SPIN_CYCLES = 16 * SPIN_CYCLES
MATMUL_SIZE = 8192
MATMUL_FLOPS = 2 * MATMUL_SIZE**3
COPY_BYTES = 2**30
# Dense bf16, from the data sheets. "NVIDIA H200 NVL" is a different GPU, and not listed.
PEAK_TFLOPS = {"NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H200": 989.4}
HOST_CALLS = 20  # few enough that the stream's queue never makes the host wait


class Gpu:
    """The current CUDA device."""

    device = "cuda"

    def __init__(self) -> None:
        self.name = torch.cuda.get_device_name()
        self._spin_cycles = SPIN_CYCLES

    def milliseconds(self, call: Callable[[], Any], *, spin: bool = True) -> float:
        """Times one call by events, in milliseconds.

        Args:
            call: the call to time.
            spin: whether a spin kernel runs first, so that all kernels of the call are queued
                before the first one starts, and launches are not timed. If the first one starts
                too early, the call is repeated after a longer spin. If False, the GPU is idle
                beforehand, and the time includes the launches that it waits for.
        """
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        while True:
            if spin:
                torch.cuda._sleep(self._spin_cycles)
            else:
                torch.cuda.synchronize()
            start.record()
            call()
            end.record()
            is_late = start.query()
            end.synchronize()
            if not (spin and is_late) or self._spin_cycles >= MOST_SPIN_CYCLES:
                return float(start.elapsed_time(end))
            self._spin_cycles *= 2

    def captured(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Captures the call in a CUDA graph that can be replayed."""
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    def host_microseconds(self, call: Callable[[], Any]) -> float:
        """Times a call on the host in microseconds, without waiting for the GPU."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        elapsed = time.perf_counter() - start
        torch.cuda.synchronize()
        return 1e6 * elapsed / HOST_CALLS

    def peak_bytes(self, call: Callable[[], Any]) -> int:
        """Returns the peak of the bytes that a call allocates, including its result."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)

    def held_bytes(self, call: Callable[[], Any]) -> int:
        """Returns the bytes that a call's result keeps allocated."""
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        result = call()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        del result
        return int(held)

    def release(self) -> None:
        """Returns freed memory to the device, before other shapes need it."""
        torch.cuda.empty_cache()

    def matmul(self) -> Callable[[], Any]:
        """Returns a call that multiplies two bf16 matrices."""
        shape = (MATMUL_SIZE, MATMUL_SIZE)
        a, b = (torch.randn(shape, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return lambda: a @ b

    def limits(self, rounds: int) -> dict[str, float]:
        """Measures TFLOP/s of a bf16 matmul, and TB/s of a copy, counting reads and writes."""
        source = torch.zeros(COPY_BYTES, device=self.device, dtype=torch.int8)
        target = torch.empty_like(source)

        def median(call: Callable[[], Any]) -> float:
            times = [self.milliseconds(call) for _ in range(3 + rounds)]
            return statistics.median(times[3:])

        return {
            "matmul_tflops": MATMUL_FLOPS / median(self.matmul()) / 1e9,
            "copy_tbps": 2 * COPY_BYTES / median(lambda: target.copy_(source)) / 1e9,
        }
