"""How to test an implementation of HSTU attention: inputs, poison, and the tolerance rule.

The rule, for every output and gradient: the largest error against the exact result may be at most
twice that of the same formula in plain PyTorch of the same dtype, plus two roundings of the exact
result. `allowed_error` is its only statement.

The error of plain PyTorch depends on the order in which it adds: a matrix product chooses that
order by its shape and by the processor. The bound of `check_against_reference` is therefore that of
the worst of eight orders: that of plain PyTorch, six random ones, and the one from left to right.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from . import reference
from .bias import Bias, DenseBias, RelativeBias
from .mask import Mask
from .paged import PagedKV, quantize_rows
from .quantization import Quantization

__all__ = [
    "BIAS_NAMES",
    "MASK_NAMES",
    "Batch",
    "allowed_error",
    "assert_matches",
    "assert_matches_reference",
    "check_against_reference",
    "make_batch",
    "make_bias",
    "make_lengths",
    "make_mask",
    "make_paged_batch",
    "offsets",
    "poison",
    "poisoned_memory",
    "run",
]


# ---------------------------------------------------------------------------------------------
# The tolerance rule
# ---------------------------------------------------------------------------------------------


def allowed_error(exact: Tensor, references: Sequence[Tensor], dtype: torch.dtype) -> float:
    """Returns the largest error that a result of `dtype` may have.

    Args:
        exact: the result in fp64.
        references: results of the same formula in plain PyTorch, computed in `dtype`; the worst
            one counts.
        dtype: the dtype of the result that is judged.
    """
    if exact.numel() == 0:
        return 0.0
    info = torch.finfo(dtype)
    largest = exact.abs().max().item()
    # One rounding moves a number by at most eps / 2 of its size, or by half the smallest step.
    two_roundings = info.eps * largest + info.tiny * info.eps
    if dtype == torch.float64:
        # Here the exact result is itself a sum in fp64, in another order.
        two_roundings *= 2**9
    worst = max((same_dtype.double() - exact).abs().max().item() for same_dtype in references)
    return 2 * worst + two_roundings


def assert_matches(name: str, actual: Tensor, exact: Tensor, *references: Tensor) -> None:
    """Raises AssertionError unless `actual` is within `allowed_error`."""
    _assert_within_bound(name, actual, exact, references)


def _assert_within_bound(
    name: str,
    actual: Tensor,
    exact: Tensor,
    references: Iterable[Tensor],
    rounded_to: torch.dtype | None = None,
) -> None:
    """Implements `assert_matches` for references that are computed only when needed.

    The bound is that of the worst reference, so each one can only raise it: as soon as it covers
    the error, the references that are left cannot change the result. `rounded_to` is the dtype that
    terms of the result are rounded to, if it is not the dtype of the result.
    """
    assert actual.shape == exact.shape, f"{name}: {tuple(actual.shape)} != {tuple(exact.shape)}"
    if actual.numel() == 0:
        return
    assert torch.isfinite(actual).all(), f"{name}: has NaN or Inf"
    error = (actual.double() - exact).abs()
    worst, allowed = error.max().item(), 0.0
    for same_dtype in references:
        allowed = max(allowed, allowed_error(exact, [same_dtype], rounded_to or actual.dtype))
        if worst <= allowed:
            return
    where = [int(n) for n in torch.unravel_index(error.argmax(), error.shape)]
    raise AssertionError(
        f"{name}: error {worst:.3e} at {where}, where {actual[tuple(where)].item():.6g} stands "
        f"for {exact[tuple(where)].item():.6g}; allowed {allowed:.3e}; "
        f"{(error > allowed).sum().item()} of {error.numel()} elements are off"
    )


# ---------------------------------------------------------------------------------------------
# Poison
# ---------------------------------------------------------------------------------------------


def poison(*tensors: Tensor | None) -> None:
    """Fills with NaN (floating point) or a huge number (integers), so that a leak is seen."""
    with torch.no_grad():
        for tensor in tensors:
            if tensor is not None:
                floating = tensor.is_floating_point()
                tensor.fill_(float("nan") if floating else torch.iinfo(tensor.dtype).max)


@contextlib.contextmanager
def poisoned_memory(device: torch.device | str = "cpu") -> Iterator[None]:
    """Makes fresh tensors hold NaN, so that memory which an operator fails to write shows.

    On a CPU torch itself fills what it allocates. On a GPU the blocks that the caching allocator
    hands out next are filled beforehand, so that no other setting changes.
    """
    if torch.device(device).type == "cuda":
        if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
            yield  # each tensor is an allocation of its own, and none is handed out again
            return
        blocks = [
            torch.full((size,), float("nan"), device=device)
            for size in (2**n for n in range(8, 25))
            for _ in range(8)
        ]
        del blocks
        yield
        return
    enabled = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


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
        lengths_q: query rows of each sequence; None means as many as keys. More than these is for
            the functions of other libraries' names: `hstu_attention` refuses it on a CPU.
        heads, dim, dim_v, dtype, device: of q, k and v; `dim_v` None means `dim`.
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


# ---------------------------------------------------------------------------------------------
# Comparison with the reference
# ---------------------------------------------------------------------------------------------


def run(
    function: Callable[..., Tensor],
    batch: Batch,
    dout: Tensor | None = None,
    dtype: torch.dtype | None = None,
    **extra: Any,
) -> dict[str, Tensor]:
    """Returns the output of `function` on `batch` as `out`, and with `dout` gradients as `d<name>`.

    Args:
        function: called like `hstu_attention`.
        batch: what it is called with; strides are kept.
        dout: gradient of the output; None runs the forward alone.
        dtype: if given, every differentiable tensor is cast to it before.
        extra: further arguments of `function`.
    """
    leaves = {}
    for name, tensor in batch.differentiable().items():
        leaf = tensor.detach()
        if dtype is not None:
            leaf = leaf.to(dtype)
        leaves[name] = leaf.requires_grad_(dout is not None)
    batch = batch.with_tensors(leaves)
    out = function(batch.q, batch.k, batch.v, **batch.options(), **extra)
    if dout is None:
        return {"out": out}
    names = list(leaves)
    gradients = torch.autograd.grad(out, [leaves[n] for n in names], dout.to(out.dtype))
    result = {f"d{n}": gradient for n, gradient in zip(names, gradients, strict=True)}
    return {"out": out.detach(), **result}


def check_against_reference(
    function: Callable[..., Tensor], batch: Batch, *, backward: bool = True, **extra: Any
) -> dict[str, Tensor]:
    """Checks `function` on `batch` against `allowed_error`; returns what it computed.

    Args:
        function: called like `hstu_attention`.
        batch: what it is called with.
        backward: whether to compare the gradients too, for a random gradient of the output.
        extra: further arguments of `function`.
    """
    dout = None
    if backward:
        shape = (batch.q.shape[0], batch.q.shape[1], batch.v.shape[2])
        dout = torch.empty(shape, dtype=batch.q.dtype, device=batch.q.device).uniform_(-1, 1)
    with poisoned_memory(batch.q.device):
        actual = run(function, batch, dout, **extra)
    assert_matches_reference(actual, batch, dout)
    return actual


def assert_matches_reference(
    actual: dict[str, Tensor], batch: Batch, dout: Tensor | None = None
) -> None:
    """Raises AssertionError unless results of `run` are within `allowed_error` of the reference.

    Args:
        actual: what `run` returned, or a part of it, on the device of `batch`.
        batch, dout: what `run` was given. The reference runs on their device.
    """
    with _single_threaded():
        exact = run(reference.hstu_attention, batch, dout, torch.float64)
        references = _SameDtypeReferences(batch, dout)
        for name, tensor in actual.items():
            assert tensor.dtype == next(iter(references))[name].dtype, f"{name}: {tensor.dtype}"
            # Kernels round the gradient of a score to q's dtype before they add it to a table's, so
            # an entry that one score reads is off by such a rounding, whatever the table's dtype.
            rounded_to = batch.q.dtype if name in ("dpos_weight", "dts_weight") else None
            _assert_within_bound(
                name, tensor, exact[name], (found[name] for found in references), rounded_to
            )


class _SameDtypeReferences:
    """The formula in the dtype of `batch`, by each summation order that the bound covers.

    Each is computed when it is first asked for. The dimensions of a paged batch are not shuffled:
    it has the order of plain PyTorch alone.
    """

    def __init__(self, batch: Batch, dout: Tensor | None) -> None:
        self._found: list[dict[str, Tensor]] = []
        self._others = self._compute(batch, dout)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from self._found
        for result in self._others:
            self._found.append(result)
            yield result

    @staticmethod
    def _compute(batch: Batch, dout: Tensor | None) -> Iterator[dict[str, Tensor]]:
        yield run(reference.hstu_attention, batch, dout, compute_dtype=batch.q.dtype)
        if batch.paged_kv is not None:
            return
        for _ in range(6):
            yield _in_another_order(batch, dout)
        with _LeftToRight():
            result = run(reference.hstu_attention, batch, dout, compute_dtype=batch.q.dtype)
        yield result


@contextlib.contextmanager
def _single_threaded() -> Iterator[None]:
    """Lets torch compute in one thread: small tensors are slower in several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _LeftToRight(torch.overrides.TorchFunctionMode):
    """Makes `einsum` of two tensors add its products one after another, in their dtype."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not torch.einsum:
            return func(*args, **(kwargs or {}))
        equation, left, right = args
        names, result = equation.split("->")
        names_left, names_right = names.split(",")
        (summed,) = set(names_left) & set(names_right) - set(result)
        dim_left, dim_right = names_left.index(summed), names_right.index(summed)
        product = equation.replace(summed, "")
        # A sum of nothing is zero.
        total = torch.einsum(equation, left.narrow(dim_left, 0, 0), right.narrow(dim_right, 0, 0))
        for a, b in zip(left.unbind(dim_left), right.unbind(dim_right), strict=True):
            total = total + torch.einsum(product, a, b)
        return total


def _in_another_order(batch: Batch, dout: Tensor | None) -> dict[str, Tensor]:
    """Computes the reference in the batch's dtype, summing over head dims in a random order."""
    device = batch.q.device
    order = torch.randperm(batch.q.shape[2], device=device)
    order_v = torch.randperm(batch.v.shape[2], device=device)
    shuffled = replace(batch, q=batch.q[..., order], k=batch.k[..., order], v=batch.v[..., order_v])
    result = run(
        reference.hstu_attention,
        shuffled,
        None if dout is None else dout[..., order_v],
        compute_dtype=batch.q.dtype,
    )
    back, back_v = order.argsort(), order_v.argsort()
    for name, inverse in (("out", back_v), ("dq", back), ("dk", back), ("dv", back_v)):
        if name in result:
            result[name] = result[name][..., inverse]
    return result
