"""CUDA graphs of calls and of training steps."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from typing import Any, Generic

import torch
import torch.nn.functional as F
from torch import Tensor

from .upload import AnyBatch

__all__ = ["CapturedStep", "CudaCapture", "capture_on", "pad_offsets", "pad_rows", "padded_size"]

Call = Callable[[], None]

_WARM_UPS = 1  # loads the kernels, which a capture must not do
_CAPTURING = threading.Lock()  # one capture at a time: each sets the GPU's random generator
_SIZES_PER_OCTAVE = 4


# ---------------------------------------------------------------------------------------------
# Calls
# ---------------------------------------------------------------------------------------------


def capture_on(device: torch.device, warm_ups: int = _WARM_UPS) -> Callable[[Call], Call]:
    """Returns a function that captures a call in a CUDA graph; on a CPU it returns the call."""
    return CudaCapture(device, warm_ups) if device.type == "cuda" else lambda call: call


class CudaCapture:
    """Captures calls in CUDA graphs, which share memory: they must be replayed on one stream.

    Args:
        device: the GPU, with its index.
        warm_ups: how often a call runs before it is captured.
    """

    def __init__(self, device: torch.device, warm_ups: int = _WARM_UPS) -> None:
        self._device = device
        self._warm_ups = warm_ups
        self._side = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._failed: list[torch.cuda.CUDAGraph] = []

    def __call__(self, call: Call) -> Call:
        """Runs the call `warm_ups` times, and captures it.

        Raises:
            RuntimeError: if the call cannot be captured. Errors of the call are passed on.
        """
        graph = torch.cuda.CUDAGraph()
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._side):
                for _ in range(self._warm_ups):
                    call()
                with _CAPTURING, _no_garbage_collection():
                    # NOTE: torch.cuda.graph would synchronize the GPU, collect garbage and empty
                    # the memory cache, which would delay requests that are being served. Other
                    # threads may do work on the GPU that cannot be captured.
                    graph.capture_begin(self._pool, capture_error_mode="thread_local")
                    try:
                        call()
                    finally:
                        graph.capture_end()
        except BaseException:
            self._end_failed(graph)
            raise
        finally:
            self._side.synchronize()  # before anyone writes the buffers that the call reads
        return graph.replay

    def _end_failed(self, graph: torch.cuda.CUDAGraph) -> None:
        """Ends the pool of a failed capture.

        NOTE: torch before 2.12 does not end the pool of an invalidated capture: it would keep freed
        memory that two streams have used, and ask the graph which stream it captures.
        """
        self._failed.append(graph)
        with suppress(RuntimeError):  # if the call failed and not the capture, the pool has ended
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keeps unreachable graphs and events alive: destroying one would invalidate a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# ---------------------------------------------------------------------------------------------
# Training steps
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Graph(Generic[AnyBatch]):
    """The graph of one shape of batch.

    Attributes:
        inputs: the batch that `replay` reads.
        replay: runs a step.
        output: the tensor that `replay` writes.
    """

    inputs: AnyBatch
    replay: Call
    output: list[Tensor]


class CapturedStep(Generic[AnyBatch]):
    """Runs training steps as CUDA graphs, one for each shape of batch.

    A graph launches the kernels of a whole step at once, so that a small model does not wait for
    the host. It reads its batch from static tensors, to which each batch is copied. The step of the
    first batch of a shape runs without a graph: kernels are compiled, and the optimizer allocates
    its state, which must be outside of the graph. The second batch of a shape captures the graph.

    On a CPU there are no graphs, but the step still runs on the static tensors.

    Args:
        step: runs a step with a batch: forward, backward, and the update of the parameters. It must
            not wait for the device, and values that change between steps must be in tensors on the
            device, such as the learning rate of an optimizer with `capturable=True`.
        device: the device of the batches.

    Example:
        >>> step = CapturedStep(make_step, device)
        >>> for batch in batches:                         # of few shapes: see `padded_size`
        ...     learning_rate.fill_(schedule(number))     # the optimizer's, on the device
        ...     losses.append(step(batch.to(device)))
        >>> print(torch.stack(losses).tolist())           # the host waits here
    """

    def __init__(self, step: Callable[[AnyBatch], Tensor], device: torch.device) -> None:
        self._step = step
        self._capture = capture_on(device, warm_ups=0)
        self._graphs: dict[tuple[Any, ...], _Graph[AnyBatch] | None] = {}

    def __call__(self, batch: AnyBatch) -> Tensor:
        """Runs a step; returns the result of `step`, in a tensor that later steps do not overwrite.

        Raises:
            RuntimeError: the step cannot be captured.
        """
        shape = tuple(
            (name, tensor.shape, tensor.dtype) for name, tensor in _tensors(batch).items()
        )
        if shape not in self._graphs:
            self._graphs[shape] = None
            return self._step(batch)
        graph = self._graphs[shape]
        if graph is None:
            graph = self._graphs[shape] = self._capture_for(batch)
        torch._foreach_copy_([*_tensors(graph.inputs).values()], [*_tensors(batch).values()])
        graph.replay()
        return graph.output[0].clone()

    def _capture_for(self, batch: AnyBatch) -> _Graph[AnyBatch]:
        inputs = replace(batch, **{name: x.clone() for name, x in _tensors(batch).items()})
        output: list[Tensor] = []
        torch.cuda.empty_cache()  # a capture cannot use what steps without a graph have cached

        def call() -> None:
            output[:] = [self._step(inputs)]

        try:
            return _Graph(inputs, self._capture(call), output)
        except Exception as error:
            # A failed capture may leave torch's CUDA generator unusable, so training cannot
            # continue.
            raise RuntimeError(
                f"step: expected one that a CUDA graph can capture, got {error!r}"
            ) from error


def _tensors(batch: Any) -> dict[str, Tensor]:
    """Returns the tensors of a dataclass by the names of its fields."""
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: value for name, value in values.items() if value is not None}


# ---------------------------------------------------------------------------------------------
# Batches of few shapes
# ---------------------------------------------------------------------------------------------


def padded_size(count: int, sizes_per_octave: int = _SIZES_PER_OCTAVE) -> int:
    """Rounds a size up to one of few sizes, so that padded batches have few shapes.

    Args:
        count: 0 or more.
        sizes_per_octave: the number of sizes between one power of two and the next.

    Returns:
        At least `count`, and less than `count * (1 + 1 / sizes_per_octave) + 1`.
    """
    step = max(1, (1 << max(count - 1, 0).bit_length()) // (2 * sizes_per_octave))
    return -(-count // step) * step


def pad_rows(rows: Tensor, size: int) -> Tensor:
    """Appends zeros to `rows` `(n, ...)` up to `size` of them."""
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, size - len(rows)))


def pad_offsets(offsets: Tensor, num_sequences: int) -> Tensor:
    """Appends empty sequences to `offsets` `(batch + 1,)` up to `num_sequences` of them."""
    return torch.cat([offsets, offsets[-1:].expand(num_sequences + 1 - len(offsets))])
