"""Keys and values in pages: the KV cache of inference."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .fx import Proxy, record_call
from .paged_quantization import dequantize_rows, quantize_rows

__all__ = [
    "PAGE_SIZES",
    "PagedKV",
    "append_paged_kv",
    "check_page_size",
    "dequantize_rows",
    "quantize_rows",
]

PAGE_SIZES = (16, 32, 64, 128, 256)


def check_page_size(page_size: int) -> None:
    """Raises ValueError for a page size that the kernels do not support."""
    if page_size not in PAGE_SIZES:
        raise ValueError(f"page_size: expected one of {PAGE_SIZES}, got {page_size}")


class PagedKV:
    """The cached keys and values of a batch, in pages of equal size.

    With a `PagedKV`, q, k and v of a call are all packed by `cu_seqlens_q` and hold
    `[new history | targets]` of each sequence; `cu_seqlens_k` counts cached, new and target tokens
    together. The new history has already been appended to the pages, so keys `[0, h)` are read from
    pages and keys `[h, h + targets)` from the last rows of the sequence in k and v.

    Args:
        kv_cache: `(num_pages, 2, page_size, heads, head dim)`, index 0 keys, index 1 values; page
            sizes 16, 32, 64, 128 and 256. The dtype is that of q, or float8_e4m3fn with
            `kv_scales`.
        page_offsets: `(batch + 1,)` offsets into `page_ids`. The serving name is `kv_indptr`.
        page_ids: `(page_offsets[batch],)` the pages of each sequence, in order. The serving name is
            `kv_indices`.
        last_page_lens: `(batch,)` tokens in each sequence's last page, `(h - 1) % page_size + 1`,
            0 where `h` is 0. The serving name is `kv_last_page_len`.
            `page_offsets`, `page_ids` and `last_page_lens` may be larger buffers: entries beyond
            this batch are not read.
        kv_scales: float32 `(num_pages, 2, page_size, heads)`, factors of the elements of each row
            and head of a float8_e4m3fn cache; None for other caches.

    Raises:
        ValueError: if an argument is missing or given under both its names. The call checks shapes
            and dtypes.
    """

    __slots__ = ("kv_cache", "kv_scales", "last_page_lens", "page_ids", "page_offsets")

    kv_cache: Tensor
    page_offsets: Tensor
    page_ids: Tensor
    last_page_lens: Tensor
    kv_scales: Tensor | None

    def __init__(
        self,
        kv_cache: Tensor,
        page_offsets: Tensor | None = None,
        page_ids: Tensor | None = None,
        last_page_lens: Tensor | None = None,
        kv_scales: Tensor | None = None,
        *,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_last_page_len: Tensor | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self.kv_scales = kv_scales
        self.page_offsets = _one_of("page_offsets", page_offsets, "kv_indptr", kv_indptr)
        self.page_ids = _one_of("page_ids", page_ids, "kv_indices", kv_indices)
        self.last_page_lens = _one_of(
            "last_page_lens", last_page_lens, "kv_last_page_len", kv_last_page_len
        )

    @property
    def arguments(self) -> tuple[Tensor | None, ...]:
        """The fields in the order of the operator's arguments."""
        return (
            self.kv_cache,
            self.page_offsets,
            self.page_ids,
            self.last_page_lens,
            self.kv_scales,
        )

    def __fx_create_arg__(self, tracer: torch.fx.Tracer) -> torch.fx.Node:
        """Returns the node that makes these pages in a traced graph, where they are an argument."""
        arguments = {name: tracer.create_arg(getattr(self, name)) for name in self.__slots__}
        return tracer.create_node("call_function", PagedKV, (), arguments)


@torch.fx.has_side_effect
@torch.no_grad()
def append_paged_kv(
    k: Tensor,
    v: Tensor,
    paged_kv: PagedKV,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    num_targets: Tensor | None = None,
) -> None:
    """Writes the new history of a batch into its pages, before the attention that reads them.

    The arguments are those of the `hstu_attention` call that follows: k and v hold
    `[new history | targets]` of each sequence, and target rows are not written. One kernel writes
    the rows, without a copy of offsets to the host, so the call may be captured in a CUDA graph.

    In a float8_e4m3fn cache, each row of a head is stored as `x / scale`, rounded to the nearest
    (ties to even), and its scale `max |x| / 448` in `kv_scales`, so that rows that are already
    cached do not change. The maximum is over finite elements; the scale of a row whose finite
    elements are all 0 is 1; NaN and infinity are stored as NaN.

    Args:
        k, v: `(total_q, heads, head dim)` in any strides with a contiguous last dimension, of the
            dtype of the cache and on its device. For a float8_e4m3fn cache: any dtype on a CPU,
            bf16 and fp16 on a GPU, with heads of at most 256 elements.
        paged_kv: the pages, which have room for the new history.
        cu_seqlens_q: `(batch + 1,)` int32 or int64 offsets of the sequences in k and v.
        cu_seqlens_k: `(batch + 1,)` offsets that count cached, new and target tokens.
        num_targets: `(batch,)` targets at the end of each sequence; None is 0.

    Raises:
        ValueError: for a wrong shape, dtype or device; on the CPU also for offsets, counts or page
            ids that do not fit, or a page that two sequences would write. On a GPU such rows are
            left out.
        NotImplementedError: if this build or this GPU has no kernel for the arguments.
    """
    if isinstance(k, Proxy):
        return record_call(append_paged_kv, (k,), **locals())
    if not isinstance(paged_kv, PagedKV):
        raise ValueError(f"paged_kv: expected a PagedKV, got {type(paged_kv).__name__}")
    ops.append_paged_kv(
        k,
        v,
        paged_kv.kv_cache,
        paged_kv.page_offsets,
        paged_kv.page_ids,
        cu_seqlens_q,
        cu_seqlens_k,
        num_targets,
        paged_kv.kv_scales,
    )


def _one_of(name: str, value: Tensor | None, alias: str, alias_value: Tensor | None) -> Tensor:
    if value is not None and alias_value is not None:
        raise ValueError(f"{name}: expected only one of {name} and {alias}, got both")
    chosen = alias_value if value is None else value
    if chosen is None:
        raise ValueError(f"{name}: expected a tensor (also accepted as {alias}), got None")
    return chosen
