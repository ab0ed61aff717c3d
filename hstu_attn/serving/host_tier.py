"""Pages of a KV cache in host memory, and the copies between them and those of the device."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..upload import upload

__all__ = ["HostTier", "Returning"]

Int64s = np.ndarray[Any, np.dtype[np.int64]]


class Returning:
    """The copies that bring a step's users back, layer by layer.

    Args:
        device: the device of the cache.
        layers: an event for each layer, recorded when its copies are done; none on a CPU, where
            they are done when they have been made, and where there are no copies.
    """

    def __init__(self, device: torch.device, layers: list[torch.cuda.Event]) -> None:
        self._device = device
        self._layers = layers

    @property
    def is_under_way(self) -> bool:
        """Returns whether some copies may not have been finished by the GPU."""
        return bool(self._layers)

    def wait(self, layer: int) -> None:
        """Lets the current stream, not the host, wait for the copies of the layers up to `layer`.

        `layer` counts from 0; -1 is the last one.
        """
        if self._layers:
            torch.cuda.current_stream(self._device).wait_event(self._layers[layer])


class HostTier:
    """Host pages `(layers, num_pages, words)` of each tensor of a cache, pinned if it is on a GPU.

    On a GPU, copies of one step overlap with its computation. Below, `main` is the stream that is
    current when the step begins, and `side` a stream of the tier's own. What may go wrong, and why
    it does not:

    - The pages of an evicted user are written again too early. They are first gathered into a
      buffer, on main: after all work of earlier steps, which wrote them, and before that of this
      step, which may write them.
    - A page is filled with a returning user's rows while its former owner's are still read. Side
      waits for main before it writes any: for the work of earlier steps, and for the gathering.
    - The rows of a returning user are read, or written next to, before they are there. Whoever uses
      a layer lets its stream wait for that layer's event first (`Returning.wait`).
    - Such a page is given to another user while side still writes it, because the step failed
      before it came to that layer. The end of a step waits for the last layer in any case.
    - A host page is written before it has been read, or read before it has been written. Only side
      touches host pages, in the order in which `move` was called; and that is the order in which
      the page table gave them away, if one lock is held over both.
    - A buffer is used again while a copy still reads or writes it. Those of returning users belong
      to side alone, and torch is told that side reads the one that main filled.

    Args:
        tensors: the tensors of the cache, each `(layers, device pages, ...)`, contiguous; a page of
            a layer has a multiple of 8 bytes.
        num_pages: the number of pages of the host.

    Attributes:
        lock: to hold from when the page table moves users until `move` has returned.
        page_bytes: the bytes of one page in all layers and tensors.
    """

    def __init__(self, tensors: Sequence[Tensor], num_pages: int) -> None:
        self._device = tensors[0].device
        self._device_pages = [tensor.flatten(2).view(torch.int64) for tensor in tensors]
        self._side = torch.cuda.Stream(self._device) if tensors[0].is_cuda else None
        self._host_pages = [
            torch.empty(
                (pages.shape[0], num_pages, pages.shape[2]),
                dtype=torch.int64,
                device="cpu",
                pin_memory=self._side is not None,
            )
            for pages in self._device_pages
        ]
        self.lock = threading.Lock()
        self.page_bytes = sum(8 * pages.shape[0] * pages.shape[2] for pages in self._device_pages)

    @torch.no_grad()
    def move(self, evicted: Int64s, returning: Int64s) -> Returning:
        """Copies pages between the tiers; on a GPU it only starts to, and does not wait.

        Args:
            evicted: `(2, n)` pages to copy to the host: those on the device, those on the host.
            returning: `(2, n)` pages to copy to the device, likewise.

        Returns:
            What to wait for before a layer is used, and at the end of the step.
        """
        if not evicted.size and not returning.size:
            return Returning(self._device, [])
        pages = np.concatenate([evicted[0], returning[0]])
        (ids,) = upload([torch.from_numpy(pages)], self._device)
        leaving, arriving = ids.split([evicted.shape[1], returning.shape[1]])
        gathered = [pages.index_select(1, leaving) for pages in self._device_pages]
        with self._on_side(ids, *gathered):
            events = self._bring_back(returning[1], arriving)
            self._take_away(gathered, evicted[1])
        return Returning(self._device, events)

    def settled(self) -> list[Tensor]:
        """Returns the host pages when no copy is under way, as int64 `(layers, num_pages, words)`.

        The caller holds `lock`.
        """
        if self._side is not None:
            self._side.synchronize()
        return self._host_pages

    @contextmanager
    def _on_side(self, *inputs: Tensor) -> Iterator[None]:
        """Runs the block on the side stream, after main's work so far; it reads `inputs`."""
        if self._side is None:
            yield
            return
        main = torch.cuda.current_stream(self._device)
        for tensor in inputs:
            tensor.record_stream(self._side)
        self._side.wait_stream(main)
        try:
            with torch.cuda.stream(self._side):
                yield
        except BaseException:
            main.wait_stream(self._side)  # the pages that side writes will be given to others
            raise

    def _bring_back(self, host_ids: Int64s, device_ids: Tensor) -> list[torch.cuda.Event]:
        """Copies pages from the host, layer by layer, and records an event after each layer."""
        events: list[torch.cuda.Event] = []
        if not len(host_ids):
            return events
        runs = _runs(host_ids)
        for layer in range(len(self._device_pages[0])):
            for device, host in zip(self._device_pages, self._host_pages, strict=True):
                device_pages, host_pages = device[layer], host[layer]
                buffer = device_pages.new_empty(len(host_ids), device_pages.shape[1])
                for start, end, page in runs:
                    rows = host_pages[page : page + end - start]
                    buffer[start:end].copy_(rows, non_blocking=True)
                device_pages.index_copy_(0, device_ids, buffer)
            if self._side is not None:
                events.append(self._side.record_event())
        return events

    def _take_away(self, gathered: Sequence[Tensor], host_ids: Int64s) -> None:
        """Copies pages to the host, from `(layers, n, words)` of each tensor."""
        runs = _runs(host_ids)
        for buffers, host in zip(gathered, self._host_pages, strict=True):
            for buffer, host_pages in zip(buffers, host, strict=True):
                for start, end, page in runs:
                    rows = host_pages[page : page + end - start]
                    rows.copy_(buffer[start:end], non_blocking=True)


def _runs(pages: Int64s) -> list[tuple[int, int, int]]:
    """Finds runs of consecutive pages, each of which is copied at once.

    Returns the indices of the first page of each run and after the last, and the first page.
    """
    starts = np.flatnonzero(np.diff(pages, prepend=-2) != 1)
    ends = np.append(starts[1:], len(pages))
    return list(zip(starts.tolist(), ends.tolist(), pages[starts].tolist(), strict=False))
