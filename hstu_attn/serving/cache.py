"""A KV cache of many users in pages of equal size: the pages of each user, and their content."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..paged import PagedKV, check_page_size, quantize_rows
from ..upload import upload
from .host_tier import HostTier, Returning
from .wiping import UsedPages

try:
    from .. import _host
except ImportError as error:
    raise ImportError(
        f"hstu_attn._host: expected it to be built, got {error} (make install)"
    ) from error

__all__ = ["CacheStats", "CacheStep", "OutOfPagesError", "PagedKVCache"]

OutOfPagesError: type[RuntimeError] = _host.OutOfPagesError

Ints = Sequence[int] | np.ndarray[Any, Any] | Tensor
Int32s = np.ndarray[Any, np.dtype[np.int32]]
Int64s = np.ndarray[Any, np.dtype[np.int64]]


class CacheStats(NamedTuple):
    """Counts of a cache's pages, users, hits and evictions.

    `used_pages` are all pages but `free_pages`; `pinned_pages` are the pages of users in open
    steps. `hits` and `misses` count the users of finished steps that had and had no cached tokens;
    `evictions` counts the users who lost their pages on the device.

    `host_users` counts the users whose tokens are only in the host tier, and `returning_users`
    those whom open steps bring back, who are in both tiers until the step ends. `host_hits` counts
    the hits that came from the host tier. `losses` counts the users whose tokens were dropped,
    because the host tier had no room for them or needed their room for others. `bytes_to_host` and
    `bytes_from_host` count the bytes copied.
    """

    free_pages: int
    used_pages: int
    pinned_pages: int
    users: int
    hits: int
    misses: int
    evictions: int
    free_host_pages: int
    used_host_pages: int
    host_users: int
    returning_users: int
    host_hits: int
    losses: int
    bytes_to_host: int
    bytes_from_host: int


class CacheStep:
    """One batch's use of a cache: what `PagedKVCache.step` yields.

    The batch has `B` users and `N` tokens to write: for each user the rewritten tokens, then the
    new ones.

    The tensors are made together, when one of them is first read or used, or by `upload`. On a GPU
    this is an asynchronous copy on the current stream, so do it before a CUDA graph is captured.

    Attributes:
        cached_lens: int32 `(B,)` cached tokens of each user that the step does not rewrite; 0 for
            an unknown user.
        slots: int32 `(N,)` `page * page_size + offset` of each token to write, in batch order.
        page_offsets: int32 `(B + 1,)`, as in `PagedKV`, including the pages of the new tokens.
        page_ids: int32 `(page_offsets[-1],)`.
        last_page_lens: int32 `(B,)`.
        host_tables: `page_offsets`, `page_ids`, `last_page_lens`, `cached_lens` and `slots` as
            arrays.
        is_returning: whether the step copies users' pages back from the host; the copies of later
            layers may still be running.
    """

    __slots__ = (
        "_kv_cache",
        "_kv_scales",
        "_lengths",
        "_on_device",
        "_on_host",
        "_open",
        "_returning",
        "_rows",
    )

    def __init__(
        self,
        kv_cache: Tensor,
        tables: Int32s,
        lengths: Sequence[int],
        returning: Returning | None = None,
        kv_scales: Tensor | None = None,
    ) -> None:
        self._on_host = torch.from_numpy(tables)
        self._lengths = lengths
        self._on_device: tuple[Tensor, ...] | None = None
        self._kv_cache = kv_cache
        self._kv_scales = kv_scales
        self._returning = returning
        self._rows: tuple[Tensor, Tensor] | None = None
        self._open = True

    @property
    def host_tables(self) -> tuple[Int32s, ...]:
        return tuple(table.numpy() for table in self._on_host.split(self._lengths))

    @property
    def page_offsets(self) -> Tensor:
        return self._tables[0]

    @property
    def page_ids(self) -> Tensor:
        return self._tables[1]

    @property
    def last_page_lens(self) -> Tensor:
        return self._tables[2]

    @property
    def cached_lens(self) -> Tensor:
        return self._tables[3]

    @property
    def slots(self) -> Tensor:
        return self._tables[4]

    def upload(self, *others: Int64s) -> list[Tensor]:
        """Makes the step's tensors, and copies other arrays to the cache's device with them.

        Args:
            others: tensors on the CPU, of any shapes and dtypes.

        Returns:
            The copies of `others`, as by `hstu_attn.upload.upload`.
        """
        arrays = map(torch.from_numpy, others)
        tables, *rest = upload([self._on_host, *arrays], self._kv_cache.device)
        self._on_device = tables.split(self._lengths)
        return rest

    def paged_kv(self, layer: int) -> PagedKV:
        """Returns a layer's pages for `hstu_attention`; append the layer's keys and values first.

        Raises:
            ValueError: if there is no such layer.
            RuntimeError: if the step has ended.
        """
        pages = self._layer(layer)
        scales = None if self._kv_scales is None else self._kv_scales[layer]
        return PagedKV(pages, self.page_offsets, self.page_ids, self.last_page_lens, scales)

    @torch.no_grad()
    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Writes the keys and values of the `N` tokens of a layer into their slots.

        Args:
            layer: the number of the layer, from 0.
            k: `(N, heads, head_dim)` in batch order, of the cache's dtype and on its device. For a
                float8_e4m3fn cache, k has another floating dtype and is quantized as by
                `append_paged_kv`.
            v: the same for values.

        Raises:
            ValueError: if there is no such layer, or for a wrong shape, dtype or device.
            RuntimeError: if the step has ended.
        """
        pages = self._layer(layer)
        shape = (self.slots.shape[0], *pages.shape[3:])
        for name, tensor in (("k", k), ("v", v)):
            if self._kv_scales is None:
                dtype, has_dtype = str(pages.dtype), tensor.dtype == pages.dtype
            else:
                dtype = "floating of two bytes or more"
                has_dtype = tensor.is_floating_point() and tensor.itemsize > 1
            if (tuple(tensor.shape), tensor.device) != (shape, pages.device) or not has_dtype:
                raise ValueError(
                    f"{name}: expected shape {shape}, {dtype} on {pages.device}, got "
                    f"{tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}"
                )
        if self._rows is None:
            page_size = pages.shape[2]
            self._rows = self.slots // page_size, self.slots % page_size
        for part, tensor in enumerate((k, v)):
            if self._kv_scales is None:
                pages[:, part][self._rows] = tensor
            else:
                elements, scales = quantize_rows(tensor)
                pages.view(torch.uint8)[:, part][self._rows] = elements.view(torch.uint8)
                self._kv_scales[layer][:, part][self._rows] = scales

    @property
    def is_returning(self) -> bool:
        return self._returning is not None and self._returning.is_under_way

    @property
    def _tables(self) -> tuple[Tensor, ...]:
        if self._on_device is None:
            self.upload()
        assert self._on_device is not None
        return self._on_device

    def _layer(self, layer: int) -> Tensor:
        if not self._open:
            raise RuntimeError("step: expected an open one, got one that has ended")
        if not 0 <= layer < self._kv_cache.shape[0]:
            raise ValueError(
                f"layer: expected from 0 to {self._kv_cache.shape[0] - 1}, got {layer}"
            )
        if self._returning is not None:
            self._returning.wait(layer)
        return self._kv_cache[layer]


class PagedKVCache:
    """The keys and values of many users, for every layer of a model, for inference.

    A user is an int64 id; an unknown one starts empty. Methods may be called from several threads,
    and none waits for a GPU. The GPU work of all steps must be ordered, by one stream or by events:
    a page that is freed while a kernel still reads it may be written by the next step.

    With `host_pages`, the pages of evicted users move to host memory, which drops its least
    recently used users when it is full. A step copies the pages of its users back: a layer's rows
    are ready for work queued after the step's `paged_kv` or `append` of that layer, and the copies
    of later layers overlap with that work.

    Args:
        num_layers: layers of the model; one page id names that page of every layer.
        num_pages: pages to share among the users.
        page_size: tokens of a page: 16, 32, 64, 128 or 256.
        heads: attention heads.
        head_dim: the head dim of keys and of values.
        dtype: the dtype of the cache. With float8_e4m3fn, rows of any floating dtype are stored as
            one byte per element, with a scale for each row and head.
        device: the device of the cache; None means torch's default device.
        evict: whether a batch that finds too few free pages evicts users that are in no open step,
            the least recently used first; False raises an error instead.
        host_pages: pages of the same size in host memory, pinned if the device is a GPU (torch then
            takes a power of two of bytes); only with `evict`.

    Attributes:
        kv_cache: `(num_layers, num_pages, 2, page_size, heads, head_dim)`, index 0 keys, 1 values.
            A layer's rows of a step's users are valid after the step's `paged_kv` of that layer.
        kv_scales: float32 `(num_layers, num_pages, 2, page_size, heads)` of a float8_e4m3fn cache,
            as in `PagedKV`; else None.

    Raises:
        ValueError: for a size out of range.

    Example:
        >>> cache = PagedKVCache(1, num_pages=8, page_size=16, heads=2, head_dim=32)
        >>> k = v = torch.zeros(5, 2, 32, dtype=torch.bfloat16)
        >>> with cache.step(users=[7, 11], new_tokens=[3, 2]) as step:
        ...     step.append(0, k, v)
        ...     pages = step.paged_kv(0)  # for hstu_attention(..., paged_kv=pages)
        >>> cache.lookup([7, 11, 13]).tolist()
        [3, 2, 0]
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        *,
        evict: bool = True,
        host_pages: int = 0,
    ) -> None:
        sizes = {"num_layers": num_layers, "heads": heads, "head_dim": head_dim}
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}: expected a positive count, got {size}")
        check_page_size(page_size)
        self._table = _host.PageTable(num_pages, page_size, evict=evict, host_pages=host_pages)
        self.kv_cache = torch.zeros(
            (num_layers, num_pages, 2, page_size, heads, head_dim), dtype=dtype, device=device
        )
        self.kv_scales: Tensor | None = None
        if dtype == torch.float8_e4m3fn:
            self.kv_scales = torch.zeros(
                self.kv_cache.shape[:-1], dtype=torch.float32, device=device
            )
        self._host_tier = None
        self._used = UsedPages(num_pages, page_size)
        self._used_on_host = UsedPages(host_pages, page_size)
        if host_pages:
            self._host_tier = HostTier(self._tensors, host_pages)

    @contextmanager
    def step(
        self,
        users: Ints,
        new_tokens: Ints,
        *,
        cached_lens: Ints | None = None,
        rewritten: Ints | None = None,
    ) -> Iterator[CacheStep]:
        """Makes room for a batch's new tokens, and pins its users until the block is left.

        An exception inside the block drops the new tokens: lengths, pages and cached rows are as
        before, except for users evicted meanwhile and for rows that the block has rewritten.
        (A user who came from the host tier is back in it, with all rows unchanged.)
        When the block ends without an exception, every token of the step must have been written in
        every layer.

        Args:
            users: `(B,)` ids on the CPU, each once, none of them in another open step.
            new_tokens: `(B,)` the number of new tokens of each user.
            cached_lens: `(B,)` the numbers of cached tokens that the caller expects, for example
                from an earlier `lookup`; another thread may have evicted a user since. None accepts
                any.
            rewritten: `(B,)` how many of each user's last cached tokens are rewritten, because
                their rows depend on later tokens. None means none.

        Yields:
            A `CacheStep`, its tensors on the cache's device.

        Raises:
            ValueError: for ids or counts that are not as described. The cache is unchanged.
            OutOfPagesError: if there are too few pages, or, with `evict=False`, too few free pages.
                The cache is unchanged.
        """
        number, tables, lengths, returning = self._begin(
            _int64s("users", users),
            _int64s("new_tokens", new_tokens),
            None if cached_lens is None else _int64s("cached_lens", cached_lens),
            None if rewritten is None else _int64s("rewritten", rewritten),
        )
        step = None
        try:
            try:
                step = CacheStep(self.kv_cache, tables, lengths, returning, self.kv_scales)
                yield step
            finally:
                if returning is not None:
                    returning.wait(-1)  # before others may own the pages
        except BaseException:
            self._table.roll_back(number)
            raise
        else:
            self._table.release(number)
        finally:
            if step is not None:
                step._open = False

    def _begin(
        self,
        users: Int64s,
        new_tokens: Int64s,
        cached_lens: Int64s | None,
        rewritten: Int64s | None,
    ) -> tuple[int, Int32s, Sequence[int], Returning | None]:
        """Opens a step; returns its number, tables and lengths, and the copies to wait for."""
        if self._host_tier is None:
            number, tables, lengths = self._table.begin(users, new_tokens, cached_lens, rewritten)
            self._used.add(tables[lengths[0] :][: lengths[1]])
            return number, tables, lengths, None
        with self._host_tier.lock:
            number, tables, lengths = self._table.begin(users, new_tokens, cached_lens, rewritten)
            self._used.add(tables[lengths[0] :][: lengths[1]])
            try:
                evicted, back = self._table.moves(number)
                self._used_on_host.add(evicted[1])
                returning = self._host_tier.move(evicted, back)
            except BaseException:
                self._table.cancel(number)
                raise
        return number, tables, lengths, returning

    def lookup(self, users: Ints) -> Tensor:
        """Returns int32 `(B,)` on the CPU: the tokens of each user in either tier, 0 if unknown.

        This does not count as a use, and includes new tokens of open steps.
        """
        return torch.from_numpy(self._table.lookup(_int64s("users", users)))

    def free(self, users: Ints) -> None:
        """Forgets users, known or not.

        Raises:
            ValueError: if one of them is in an open step. The cache is unchanged.
        """
        self._table.free(_int64s("users", users))

    def clear(self) -> None:
        """Forgets all users.

        Raises:
            ValueError: if a step is open. The cache is unchanged.
        """
        self._table.clear()

    def wipe(self, users: Ints) -> None:
        """Overwrites with zeros all rows of both tiers that hold no token of a user.

        Freed pages keep their keys and values until they are overwritten, and so does the unused
        end of a page that was reassigned. On a GPU the wipe is ordered like the work of a step;
        with a host tier, the host waits for running copies.

        Args:
            users: all users with cached tokens. If any other user has some, all are forgotten.

        Raises:
            ValueError: if a step is open. No step may be opened during the call.
        """
        counts = self._table.stats()
        if counts["pinned_pages"]:
            raise ValueError("step: expected none to be open, got one")
        ids = _int64s("users", users)
        lengths = self._table.lookup(ids).tolist()
        held = list(map(self._table.pages, ids.tolist()))
        held_on_host = list(map(self._table.host_pages, ids.tolist()))
        pages = sum(map(len, held)) + sum(map(len, held_on_host))
        if pages != counts["used_pages"] + counts["used_host_pages"]:
            self._table.clear()
            held, held_on_host, lengths = [], [], []
        tensors = [tensor.flatten(2).view(torch.int64) for tensor in self._tensors]
        self._used.wipe(tensors, held, lengths)
        if self._host_tier is not None:
            with self._host_tier.lock:
                self._used_on_host.wipe(self._host_tier.settled(), held_on_host, lengths)

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return (self.kv_cache,) if self.kv_scales is None else (self.kv_cache, self.kv_scales)

    @property
    def capacity(self) -> int:
        """The number of tokens that the pages of both tiers can hold."""
        counts = self.stats()
        pages = counts.free_pages + counts.used_pages
        pages += counts.free_host_pages + counts.used_host_pages
        return pages * self.kv_cache.shape[3]

    def stats(self) -> CacheStats:
        """Returns a consistent snapshot of the counts of pages and users."""
        counts = self._table.stats()
        page_bytes = 0 if self._host_tier is None else self._host_tier.page_bytes
        for direction in ("to_host", "from_host"):
            counts["bytes_" + direction] = page_bytes * counts.pop("pages_" + direction)
        return CacheStats(**counts)


def _int64s(name: str, values: Ints) -> Int64s:
    if isinstance(values, Tensor) and values.device.type != "cpu":
        raise ValueError(f"{name}: expected values on the CPU, got a tensor on {values.device}")
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got shape {array.shape}")
    if array.size and (array.dtype.kind not in "iu" or not np.can_cast(array.dtype, np.int64)):
        raise ValueError(f"{name}: expected integers within int64, got {array.dtype}")
    return np.ascontiguousarray(array, dtype=np.int64)
