"""Pages of a KV cache in host memory, and the copies between host and device pages."""

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
        layers: a CUDA event for each layer, recorded after the layer's copies; empty without copies
            and on a CPU, where copies are synchronous.
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

    On a GPU, the copies of a step overlap with its computation. Below, `main` is the stream that is
    current when the step begins, and `side` is the tier's own stream. These races are prevented:

    - The step overwrites pages of an evicted user before they are copied. So `main` first gathers
      the pages into a buffer, after the work of earlier steps, which may have written them, and
      before the work of this step, which may overwrite them.
    - A page gets the rows of a returning user while a kernel still reads those of its former owner.
      So `side` waits for the earlier steps and the gathering on `main` before it writes a page.
    - A kernel reads a layer of a returning user, or appends to it, before the copy is done. So any
      user of a layer first lets its stream wait for the layer's event (`Returning.wait`).
    - A page is given to another user while `side` still writes it, because the step failed before
      it used that layer. So the end of a step always waits for the last layer.
    - A host page is overwritten before it has been read, or read before it has been written. So
      only `side` touches host pages, in the order of the calls of `move`. This is the order in
      which the page table assigned the pages if the caller holds one lock over both.
    - A buffer is reused while a copy still reads or writes it. So only `side` uses the buffers of
      returning users, and `record_stream` tells torch that `side` reads the one that `main` filled.

    Args:
        tensors: the tensors of the cache, each `(layers, device pages, ...)`, contiguous; a page of
            a layer has a multiple of 8 bytes.
        num_pages: the number of pages of the host.

    Attributes:
        lock: to be held from the moment the page table moves users until `move` has returned.
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
        """Copies pages between the tiers; on a GPU asynchronously.

        Args:
            evicted: `(2, n)` pages to copy to the host: device pages, then host pages.
            returning: `(2, n)` pages to copy to the device: device pages, then host pages.

        Returns:
            The copies to wait for before a layer is used, and at the end of the step.
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
        """Waits for all copies; returns the host pages as int64 `(layers, num_pages, words)`.

        The caller holds `lock`.
        """
        if self._side is not None:
            self._side.synchronize()
        return self._host_pages

    @contextmanager
    def _on_side(self, *inputs: Tensor) -> Iterator[None]:
        """Runs the block, which reads `inputs`, on the side stream after main's work so far."""
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

    Returns for each run the index of its first page, the index after its last page, and the
    first page.
    """
    starts = np.flatnonzero(np.diff(pages, prepend=-2) != 1)
    ends = np.append(starts[1:], len(pages))
    return list(zip(starts.tolist(), ends.tolist(), pages[starts].tolist(), strict=False))
