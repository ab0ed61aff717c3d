"""Copies from the host to a device: many tensors in one copy, and batches ahead of their use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import fields
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

__all__ = ["Prefetcher", "upload"]

ALIGNMENT = 16  # bytes; a copy then looks to every kernel like an allocation of its own


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies tensors from the CPU to a device together, without waiting for the device.

    On a GPU it is one asynchronous copy on the current stream, from pinned memory that torch keeps
    until the copy is done. On a CPU nothing is copied, as in `Tensor.to`.

    Args:
        tensors: tensors on the CPU, of any shapes and dtypes.
        device: the device of the copies.

    Returns:
        On a GPU the copies, contiguous; they are parts of one allocation, which lives as long as
        any of them. On a CPU `tensors`.
    """
    if device.type == "cpu":
        return list(tensors)
    together, sizes = pack(tensors, pinned=device.type == "cuda")
    return _parts(together.to(device, non_blocking=True), sizes, tensors)


def pack(tensors: Sequence[Tensor], pinned: bool = False) -> tuple[Tensor, list[int]]:
    """Copies tensors into one allocation, each from a multiple of `ALIGNMENT` on.

    Returns:
        The bytes, and the number of bytes of each tensor with the padding after it.
    """
    sizes = [size for tensor in tensors for size in (tensor.nbytes, -tensor.nbytes % ALIGNMENT)]
    together = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
    for part, tensor in zip(_parts(together, sizes, tensors), tensors, strict=True):
        part.copy_(tensor)
    return together, sizes


def _parts(together: Tensor, sizes: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of bytes, of the shapes and dtypes of other tensors.

    `sizes` are those of each tensor and of the padding after it, in bytes.
    """
    return [
        part.view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(together.split(sizes)[::2], like, strict=True)
    ]


class Batch(Protocol):
    """A dataclass of tensors, or of None in place of some."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def to(self: AnyBatch, device: torch.device) -> AnyBatch:
        """Copies the batch to another device as `upload` does."""


AnyBatch = TypeVar("AnyBatch", bound=Batch)


class Prefetcher(Generic[AnyBatch]):
    """Makes each batch and starts its copy to the device while the step before runs.

    The copy runs on a separate stream, so on a GPU it overlaps with kernels queued before. `take`
    makes the current stream wait for the copy, but not the host.

    Args:
        draw: makes the next batch on the CPU. It is called in the thread of the caller, one batch
            ahead, so it must not depend on the step before.
        device: where the batches are used.

    Example:
        >>> prefetcher = Prefetcher(draw, device)
        >>> for _ in range(steps):
        ...     on_cpu, batch = prefetcher.take()
        ...     loss = loss_of(batch)
        ...     loss.backward()       # on a GPU this is queued
        ...     prefetcher.start()    # and computed while the next batch is made
        ...     print(loss.item())    # where the host waits
    """

    def __init__(self, draw: Callable[[], AnyBatch], device: torch.device) -> None:
        self._draw = draw
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next: Future[tuple[AnyBatch, AnyBatch]] | None = None

    def start(self) -> None:
        """Makes the next batch and starts its copy, unless that has been done.

        An exception of `draw` is raised by `take`, when the batch is due.
        """
        if self._next is not None:
            return
        result: Future[tuple[AnyBatch, AnyBatch]] = Future()
        try:
            batch = self._draw()
            with torch.cuda.stream(self._stream):  # a None stream changes nothing
                result.set_result((batch, batch.to(self._device)))
        except Exception as error:
            result.set_exception(error)
        self._next = result

    def take(self) -> tuple[AnyBatch, AnyBatch]:
        """Returns the next batch on the CPU, and its copy for work on the current stream.

        Raises:
            Exception: whatever `draw` has raised.
        """
        self.start()
        assert self._next is not None
        result, self._next = self._next, None
        batch, copy = result.result()
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            # The allocator may give the memory away again once the current stream has used it.
            for field in fields(copy):
                tensor = getattr(copy, field.name)
                if tensor is not None:
                    tensor.record_stream(current)
        return batch, copy
