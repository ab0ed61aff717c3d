"""Steps of a stack as CUDA graphs: captured once for a shape, replayed for any users."""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cached import CachedRows, StepTensors
from ..capture import Call, capture_on
from ..layer import HSTUStack
from .batch import Batch
from .cache import CacheStep

__all__ = ["GraphBuckets", "Shape", "StackGraphs", "StepLimits"]

_TILE_ROWS = 128  # kernels choose their splits as if no sequence had fewer rows


@dataclass(frozen=True)
class GraphBuckets:
    """The shapes that batches are padded to, so that one captured graph serves many batches.

    A batch takes the smallest shape that holds its requests and rows. A batch larger than every
    shape is computed without a graph: it has enough work to hide the kernel launches.

    Args:
        batch_sizes: numbers of requests, increasing; None is the powers of two below the engine's
            `max_batch_size`, and `max_batch_size`.
        row_counts: numbers of rows of all requests together, increasing. Rows are the events to
            compute and, where candidates are rows, the candidates.
        ahead: whether all shapes are captured before the engine serves a model; otherwise a shape
            is captured for the first batch that needs it, which waits. With `Engine.swap`, the
            shapes that the old model has captured are captured before the switch.

    Raises:
        ValueError: for counts that are not positive and increasing.
    """

    batch_sizes: tuple[int, ...] | None = None
    row_counts: tuple[int, ...] = (
        *(64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096),
        *(4608, 6144, 8192),  # the first of these holds 32 requests with 128 candidates each
    )
    ahead: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_sizes", "row_counts"):
            counts = getattr(self, name)
            if counts is None and name == "batch_sizes":
                continue
            if not counts or list(counts) != sorted({count for count in counts if count > 0}):
                raise ValueError(f"{name}: expected increasing positive counts, got {counts}")


class StepLimits(NamedTuple):
    """The limits that no step of an engine exceeds.

    Attributes:
        requests: the number of requests in a step.
        events: the number of events of a user.
        candidates: the number of candidates of a request, where candidates are rows; else 0.
    """

    requests: int
    events: int
    candidates: int

    @property
    def keys(self) -> int:
        """The largest number of keys of a request."""
        return max(1, self.events + self.candidates)


class Shape(NamedTuple):
    """The shape that a graph is captured for.

    Attributes:
        batch: the number of requests, including padding requests, which have no rows.
        rows: the number of rows of all requests and of padding rows, which belong to no request.
        longest: the most rows of a request; kernels choose the number of splits (split-KV) by it.
    """

    batch: int
    rows: int
    longest: int


class StackGraphs:
    """Runs a stack on batches padded to a few shapes, by CUDA graphs over static buffers.

    A graph has fixed addresses. So a batch's tables and rows are copied into static buffers, and
    the graph of its shape is replayed: it reads lengths and pages from the buffers, and writes keys
    and values into the pages and the output into a buffer. All shapes share the buffers and, on a
    GPU, the memory pool of intermediate results, so they must all run on one stream. Only the stack
    is captured; the embedding and scoring of a model need not be capturable.

    A shape is captured with an empty batch, so neither the capture nor its failure touches a user's
    pages. If the capture fails, later batches of that shape are computed without a graph.

    Args:
        stack: the layers; their parameters may change in place, but not move.
        kv_cache: as `PagedKVCache.kv_cache`.
        buckets: the shapes.
        limits: the limits of the steps.
        reads_times: whether the stack is given times.
        with_targets: whether candidates are rows.
        kv_scales: as `PagedKVCache.kv_scales`.
        dtype: the dtype of the rows; None is that of the cache.
    """

    def __init__(
        self,
        stack: HSTUStack,
        kv_cache: Tensor,
        buckets: GraphBuckets,
        limits: StepLimits,
        *,
        reads_times: bool,
        with_targets: bool,
        kv_scales: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._stack = stack
        self._kv_cache = kv_cache
        self._kv_scales = kv_scales
        self._max_keys = limits.keys
        self._pages_each = -(-limits.events // kv_cache.shape[3])
        self._with_targets = with_targets
        sizes = buckets.batch_sizes or _powers_of_two(limits.requests)
        self._batch_sizes = _needed(sizes, limits.requests)
        self._row_counts = _needed(buckets.row_counts, limits.requests * limits.keys)
        self._ahead = buckets.ahead
        self._replays: dict[Shape, Call | None] = {}
        self._capture = capture_on(kv_cache.device)

        batch, rows = self._batch_sizes[-1], self._row_counts[-1]
        device, width = kv_cache.device, stack.config.embedding_dim
        self._tables = torch.zeros(
            _sections(batch)[-1].start + batch * self._pages_each, dtype=torch.int32, device=device
        )
        self._x = torch.zeros((rows, width), dtype=dtype or kv_cache.dtype, device=device)
        self._states = torch.zeros_like(self._x)
        self._times: tuple[Tensor, ...] = ()
        if reads_times:
            self._times = tuple(
                torch.zeros(count, dtype=torch.int64, device=device)
                for count in (batch * self._max_keys, rows)
            )

    def captures(self, served: StackGraphs | None) -> list[Callable[[], object]]:
        """Returns one function for each shape to capture before the first run.

        Args:
            served: the graphs of the model served until then. Unless all shapes are captured ahead,
                the shapes to capture are those that `served` has captured; None if there is none.
        """
        had = [] if served is None else [s for s, replay in served._replays.items() if replay]
        shapes = dict.fromkeys(self._shapes() if self._ahead else had)
        return [partial(self._replay_of, shape) for shape in shapes]

    def run(
        self,
        step: CacheStep,
        batch: Batch,
        x: Tensor,
        before_capture: Callable[[], None] = lambda: None,
    ) -> Tensor | None:
        """Returns the stack's output, or None if the batch has to be computed without a graph.

        The first rows are those of the batch; they are valid until the next run.

        Args:
            step: an open step of the cache.
            batch: the batch of the step's users.
            x: `(total, embedding_dim)`, the embedded rows.
            before_capture: is called before a graph is captured, which takes long.

        Raises:
            RuntimeError: from the GPU; on a CPU, whatever the stack raises.
        """
        total = len(batch.rows.items)
        if (x.shape, x.dtype) != ((total, self._x.shape[1]), self._x.dtype):
            return None  # the stack raises the error
        if step.is_returning:
            return None  # a graph would wait for the rows of all layers before the first
        shape = self._shape_of(len(batch.num_targets), total, batch.max_seq_len)
        if shape is not None and shape not in self._replays:
            before_capture()
        replay = None if shape is None else self._replay_of(shape)
        if shape is None or replay is None:
            return None
        self._fill(shape, step, batch, x)
        replay()
        return self._states[: shape.rows]

    # --- shapes ----------------------------------------------------------------------------------

    def _shape_of(self, requests: int, rows: int, longest: int) -> Shape | None:
        batch = _at_least(self._batch_sizes, requests)
        total = None if batch is None else _at_least(self._row_counts, max(rows, batch))
        if batch is None or total is None:
            return None
        return next(shape for shape in self._of(batch, total) if shape.longest >= longest)

    def _of(self, batch: int, rows: int) -> list[Shape]:
        """Returns a shape for requests with about equally many rows, and one for any requests."""
        most = min(rows, self._max_keys)
        even = min(most, max(-(-rows // batch), _TILE_ROWS))
        return [Shape(batch, rows, longest) for longest in sorted({even, most})]

    def _shapes(self) -> Iterator[Shape]:
        for batch in self._batch_sizes:
            for rows in self._row_counts:
                if rows >= batch:
                    yield from self._of(batch, rows)

    # --- buffers ---------------------------------------------------------------------------------

    def _fill(self, shape: Shape, step: CacheStep, batch: Batch, x: Tensor) -> None:
        """Copies the batch into the buffers, its tables padded to the shape by one copy."""
        page_offsets, page_ids, last_page_lens, cached_lens, _ = step.host_tables
        sections = _sections(shape.batch)
        # With pageable memory the host would wait for the GPU. torch keeps pinned memory until the
        # copy is done.
        on_host = torch.zeros(
            sections[-1].start + len(page_ids), dtype=torch.int32, pin_memory=self._tables.is_cuda
        )
        tables = on_host.numpy()
        values: list[np.ndarray[Any, Any]] = [page_offsets, last_page_lens, cached_lens]
        values += [batch.seq_offsets, batch.num_targets, page_ids]
        for section, value in zip(sections, values, strict=True):
            tables[section][: len(value)] = value
        for section, offsets in ((sections[0], page_offsets), (sections[3], batch.seq_offsets)):
            tables[section][len(offsets) :] = offsets[-1]
        self._tables[: len(on_host)].copy_(on_host, non_blocking=True)
        self._x[: len(x)].copy_(x)
        for buffer, times in zip(self._times, (batch.key_times, batch.row_times), strict=False):
            buffer[: len(times)].copy_(times)

    def _call(self, shape: Shape) -> Call:
        """Makes the call to capture: the stack, from buffer to buffer."""
        sections = _sections(shape.batch)
        first = sections[-1].start
        sections[-1] = slice(first, first + shape.batch * self._pages_each)
        page_offsets, last_page_lens, cached_lens, seq_offsets, targets, page_ids = (
            self._tables[section] for section in sections
        )
        tables = (page_offsets, page_ids, last_page_lens, cached_lens)
        step = StepTensors(self._kv_cache, *tables, self._kv_scales)
        num_targets = targets if self._with_targets else None
        x, states = self._x[: shape.rows], self._states[: shape.rows]
        times = [*self._times]
        if times:
            times[1] = times[1][: shape.rows]

        def call() -> None:
            rows = CachedRows(step, seq_offsets, shape.longest, self._max_keys, num_targets)
            states.copy_(self._stack.forward_cached(x, rows, *times))

        return call

    def _replay_of(self, shape: Shape) -> Call | None:
        if shape not in self._replays:
            self._replays[shape] = None
            self._tables.zero_()  # requests without rows
            try:
                self._replays[shape] = self._capture(self._call(shape))
            except Exception as error:
                warnings.warn(
                    f"graphs: batches padded to {shape} are computed without a graph, which could "
                    f"not be captured: {error!r}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return self._replays[shape]


# --- arithmetic ----------------------------------------------------------------------------------


def _powers_of_two(most: int) -> list[int]:
    """Returns the powers of two below `most`, and `most`."""
    return [*(2**n for n in range((most - 1).bit_length())), most]


def _needed(counts: Sequence[int], most: int) -> Sequence[int]:
    """Drops the counts above the smallest one that is at least `most`."""
    return counts[: bisect_left(counts, most) + 1]


def _at_least(counts: Sequence[int], least: int) -> int | None:
    found = bisect_left(counts, least)
    return counts[found] if found < len(counts) else None


def _sections(batch: int) -> list[slice]:
    """Returns the offsets of the tables of `batch` requests in a buffer.

    The tables are page_offsets, last_page_lens, cached_lens, seq_offsets, num_targets and page_ids.
    """
    ends = [*accumulate((batch + 1, batch, batch, batch + 1, batch), initial=0)]
    return [*(slice(a, b) for a, b in pairwise(ends)), slice(ends[-1], None)]
