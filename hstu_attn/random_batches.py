"""Random inputs of attention calls: batches of every mask and bias, and paged ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from .bias import Bias, DenseBias, RelativeBias
from .mask import Mask
from .paged import PagedKV, quantize_rows
from .quantization import Quantization

__all__ = [
    "BIAS_NAMES",
    "MASK_NAMES",
    "Batch",
    "make_batch",
    "make_bias",
    "make_lengths",
    "make_mask",
    "make_paged_batch",
    "offsets",
    "poison",
]


def poison(*tensors: Tensor | None) -> None:
    """Fills with NaN (floating point) or a huge number (integers), so that a leak is seen."""
    with torch.no_grad():
        for tensor in tensors:
            if tensor is not None:
                floating = tensor.is_floating_point()
                tensor.fill_(float("nan") if floating else torch.iinfo(tensor.dtype).max)


# ---------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """The arguments of one call of `hstu_attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    mask: Mask = field(default_factory=Mask.full)
    bias: Bias | None = None
    alpha: float = 1.0
    scaling_seqlen: int = -1
    attn_scale: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    paged_kv: PagedKV | None = None
    quantization: Quantization | None = None

    def options(self) -> dict[str, Any]:
        """Returns everything but q, k and v, as keyword arguments."""
        names = [f.name for f in fields(self) if f.name not in ("q", "k", "v")]
        return {name: getattr(self, name) for name in names}

    def differentiable(self) -> dict[str, Tensor]:
        """Returns the tensors that get a gradient, by name."""
        found = {"q": self.q, "k": self.k, "v": self.v}
        if isinstance(self.bias, DenseBias):
            found["rab"] = self.bias.rab
        elif self.bias is not None:
            for name in ("pos_weight", "ts_weight"):
                table = getattr(self.bias, name)
                if table is not None:
                    found[name] = table
        return found

    def with_bias(self, bias: Bias | None) -> Batch:
        """Returns the same batch with another bias."""
        return replace(self, bias=bias)

    def with_tensors(self, tensors: dict[str, Tensor]) -> Batch:
        """Returns the same batch with other differentiable tensors."""
        bias = self.bias
        if isinstance(bias, DenseBias):
            bias = DenseBias(tensors["rab"])
        elif bias is not None:
            tables = {n: tensors[n] for n in ("pos_weight", "ts_weight") if n in tensors}
            bias = replace(bias, **tables)
        return replace(self, q=tensors["q"], k=tensors["k"], v=tensors["v"], bias=bias)


def offsets(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Returns int32 `(batch + 1,)` offsets of packed sequences."""
    return torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0).int()


def make_lengths(batch: int, longest: int, shortest: int = 0) -> list[int]:
    """Returns random lengths, one of which is the longest."""
    lengths = torch.randint(shortest, longest + 1, (batch,)).tolist()
    if batch:
        lengths[int(torch.randint(batch, ()))] = longest
    return lengths


def make_batch(
    lengths_k: Sequence[int],
    lengths_q: Sequence[int] | None = None,
    *,
    heads: int = 2,
    dim: int = 32,
    dim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    mask: str | Mask = "full",
    bias: str | Bias | None = None,
    **options: Any,
) -> Batch:
    """Makes a packed batch with random contents.

    Args:
        lengths_k: keys of each sequence.
        lengths_q: query rows of each sequence; None means `lengths_k`. Only the functions with
            other libraries' arguments accept more rows than keys on a CPU, not `hstu_attention`.
        heads, dim, dim_v, dtype, device: those of q, k and v; `dim_v` None means `dim`.
        mask: a mask, or one of `MASK_NAMES` with random contents.
        bias: a bias, or one of `BIAS_NAMES` with random contents.
        options: further fields of `Batch`.
    """
    lengths_q = lengths_k if lengths_q is None else lengths_q
    total_q, total_k = sum(lengths_q), sum(lengths_k)

    def random(rows: int, width: int) -> Tensor:
        return torch.empty((rows, heads, width), dtype=dtype, device=device).uniform_(-1, 1)

    batch = Batch(
        random(total_q, dim),
        random(total_k, dim),
        random(total_k, dim if dim_v is None else dim_v),
        offsets(lengths_q, device),
        offsets(lengths_k, device),
        max(lengths_q, default=0) or 1,
        max(lengths_k, default=0) or 1,
        **{"alpha": dim**-0.5, **options},
    )
    if isinstance(mask, str):
        mask = make_mask(mask, lengths_k, lengths_q, heads=heads, device=device)
    if isinstance(bias, str):
        bias = make_bias(bias, batch, dtype=dtype)
    return replace(batch, mask=mask, bias=bias)


# ---------------------------------------------------------------------------------------------
# Masks
# ---------------------------------------------------------------------------------------------

_COMPOSED_MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"window": (-1, 0)},
    "local": {"window": (7, 3)},
    "local-left": {"window": (7, 0)},
    "local-right": {"window": (0, 5)},
    "no-left": {"window": (-1, 4)},
    "no-right": {"window": (4, -1)},
    "context": {"window": (-1, 0), "contexts": True},
    "target": {"window": (-1, 0), "targets": True},
    "target-groups": {"window": (-1, 0), "targets": True, "group": 3},
    "context-target": {"window": (-1, 0), "contexts": True, "targets": True, "group": 2},
    "local-context": {"window": (5, 0), "contexts": True},
    "local-target": {"window": (5, 0), "targets": True},
    "local-context-target": {"window": (6, 0), "contexts": True, "targets": True, "group": 4},
    "min-full": {"window": (5, 0), "min_full": 9},
    "min-full-context-target": {
        "window": (4, 0),
        "contexts": True,
        "targets": True,
        "min_full": 6,
    },
}
_ARBITRARY_MASKS: dict[str, Callable[[int, int, int], Mask]] = {
    "spans": lambda heads, rows, longest: Mask.from_row_spans(_bounds((rows, 4), longest)),
    "spans-by-head": lambda heads, rows, longest: Mask.from_row_spans(
        _bounds((heads, rows, 4), longest)
    ),
    "func-1": lambda heads, rows, longest: Mask.from_func(_bounds((1, 1, rows), longest)),
    "func-3": lambda heads, rows, longest: Mask.from_func(_bounds((1, 3, rows + 5), longest)),
    "func-5": lambda heads, rows, longest: Mask.from_func(_bounds((1, 5, rows), longest)),
    "func-9-by-head": lambda heads, rows, longest: Mask.from_func(
        _bounds((heads, 9, rows), longest)
    ),
    "func-3-causal": lambda heads, rows, longest: Mask.from_func(
        _bounds((heads, 3, rows), longest), causal=True
    ),
    "func-5-causal": lambda heads, rows, longest: Mask.from_func(
        _bounds((1, 5, rows), longest), causal=True
    ),
}
MASK_NAMES = (*_COMPOSED_MASKS, *_ARBITRARY_MASKS)


def _bounds(shape: tuple[int, ...], longest: int) -> Tensor:
    """Returns interval bounds, a few of them negative, past the end or in the wrong order."""
    return torch.randint(-2, longest + 3, shape, dtype=torch.int32)


def make_mask(
    name: str,
    lengths_k: Sequence[int],
    lengths_q: Sequence[int] | None = None,
    *,
    heads: int = 2,
    device: torch.device | str = "cpu",
) -> Mask:
    """Makes one of `MASK_NAMES` for these lengths; further contents are random."""
    rows = sum(lengths_k if lengths_q is None else lengths_q)
    if name in _ARBITRARY_MASKS:
        mask = _ARBITRARY_MASKS[name](heads, rows, max(lengths_k, default=0))
        return replace(
            mask,
            row_spans=None if mask.row_spans is None else mask.row_spans.to(device),
            func=None if mask.func is None else mask.func.to(device),
        )
    chosen = _COMPOSED_MASKS[name]
    targets = [int(torch.randint(length + 1, ())) // 2 for length in lengths_k]
    if not chosen.get("targets"):
        targets = [0] * len(targets)
    contexts = [
        min(int(torch.randint(5, ())), length - targets[n]) for n, length in enumerate(lengths_k)
    ]

    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return Mask(
        chosen.get("window", (-1, -1)),
        tensor(contexts) if chosen.get("contexts") else None,
        tensor(targets) if chosen.get("targets") else None,
        chosen.get("group", 1),
        chosen.get("min_full", 0),
    )


# ---------------------------------------------------------------------------------------------
# Biases
# ---------------------------------------------------------------------------------------------

BIAS_NAMES = (
    "rab",
    "rab-1-head",
    "rab-fp32",
    "rab-strided",
    "position",
    "time",
    "position-time",
    "position-time-fp32",
    "position-row-time",
)


def make_bias(name: str, batch: Batch, dtype: torch.dtype) -> Bias:
    """Makes one of `BIAS_NAMES` for this batch, with random contents.

    The tables of a relative bias have `dtype`, but fp32 for fp64, since their gradients are fp32.
    """
    device = batch.q.device
    heads = batch.q.shape[1]
    sequences = batch.cu_seqlens_k.shape[0] - 1
    relative_fp64 = dtype == torch.float64 and not name.startswith("rab")
    table_dtype = torch.float32 if name.endswith("fp32") or relative_fp64 else dtype

    def table(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=table_dtype, device=device).uniform_(-1, 1)

    if name.startswith("rab"):
        size = batch.max_seqlen_k
        bias_heads = 1 if name == "rab-1-head" else heads
        if name != "rab-strided":
            return DenseBias(table(sequences, bias_heads, size, size))
        # Rows of odd length inside a larger tensor.
        return DenseBias(table(sequences, bias_heads, size + 2, 2 * size + 3)[:, :, 1:-1, :size])
    total_k = batch.k.shape[0]
    times = torch.randint(0, 10**9, (total_k,), device=device) >> torch.randint(
        0, 30, (total_k,), device=device
    )
    pos_weight = table(heads, 2 * (batch.max_seqlen_k - batch.max_seqlen_k // 8) - 1)
    ts_weight = table(1 if name == "time" else heads, 64)
    if name == "position":
        return RelativeBias(pos_weight[:1])
    if name == "time":
        return RelativeBias(None, ts_weight, times)
    row_times = None
    if "row-time" in name:
        row_times = torch.randint(0, 10**9, (batch.q.shape[0],), device=device)
    return RelativeBias(pos_weight, ts_weight, times, row_times)


# ---------------------------------------------------------------------------------------------
# Paged batches
# ---------------------------------------------------------------------------------------------


def make_paged_batch(
    cached: Sequence[int],
    new: Sequence[int],
    targets: Sequence[int],
    *,
    page_size: int = 16,
    heads: int = 2,
    dim: int = 32,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    window: tuple[int, int] = (-1, 0),
    target_group_size: int = 1,
    fp8: bool = False,
) -> Batch:
    """Makes a paged batch, with numbers of cached, new history and candidate tokens per sequence.

    Pages are in random order. Rows that no sequence owns are NaN, and so are the rows of k and v
    that the operator must take from the pages instead. With `fp8` the cache is of float8_e4m3fn;
    what counts as exact is what it holds.
    """
    lengths_q = [n + t for n, t in zip(new, targets, strict=True)]
    history = [c + n for c, n in zip(cached, new, strict=True)]
    lengths_k = [h + t for h, t in zip(history, targets, strict=True)]
    target_counts = torch.tensor(targets, dtype=torch.int32, device=device)
    has_targets = any(targets)
    batch = make_batch(
        lengths_q,
        heads=heads,
        dim=dim,
        dtype=dtype,
        device=device,
        mask=Mask(window, None, target_counts if has_targets else None, target_group_size),
    )
    pages = [-(-h // page_size) for h in history]
    num_pages = sum(pages) + 3
    page_ids = torch.randperm(num_pages)[: sum(pages)].int()
    cache = torch.full((num_pages, 2, page_size, heads, dim), float("nan"), dtype=dtype)
    page_offsets = offsets(pages)
    for b, length in enumerate(history):
        for position in range(length):
            page = page_ids[int(page_offsets[b]) + position // page_size]
            cache[int(page), :, position % page_size].uniform_(-1, 1)
    scales = None
    if fp8:
        is_owned = cache.isfinite().all(-1)
        magnitudes = 10 ** torch.empty((*is_owned.shape, 1)).uniform_(-1, 1)
        cache, scales = quantize_rows(cache * magnitudes)
        scales[~is_owned] = float("nan")
        scales = scales.to(device)
    for b, count in enumerate(new):
        start = int(batch.cu_seqlens_q[b])
        poison(batch.k[start : start + count], batch.v[start : start + count])
    last_page_lens = [(h - 1) % page_size + 1 if h else 0 for h in history]
    paged_kv = PagedKV(
        cache.to(device),
        page_offsets.to(device),
        page_ids.to(device),
        torch.tensor(last_page_lens, dtype=torch.int32, device=device),
        scales,
    )
    return replace(
        batch,
        cu_seqlens_k=offsets(lengths_k, device),
        max_seqlen_k=max(lengths_k, default=0) or 1,
        paged_kv=paged_kv,
    )
