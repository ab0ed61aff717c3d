"""Tools to test an implementation of HSTU attention: inputs, poison, and the tolerance rule.

The rule for every output and gradient: the largest error against the exact result may be at most
twice the error of the same formula in plain PyTorch in the same dtype, plus two roundings of the
exact result. `allowed_error` implements it.

The error of plain PyTorch depends on the order in which it adds: a matrix product chooses that
order by its shape and by the processor. `check_against_reference` therefore uses the largest error
of eight orders: the order of plain PyTorch, six random orders, and left to right.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import reference
from .random_batches import (
    BIAS_NAMES,
    MASK_NAMES,
    Batch,
    make_batch,
    make_bias,
    make_lengths,
    make_mask,
    make_paged_batch,
    offsets,
    poison,
)

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


@contextlib.contextmanager
def poisoned_memory(device: torch.device | str = "cpu") -> Iterator[None]:
    """Fills uninitialized tensors with NaN, to detect memory that an operator fails to write.

    On a CPU torch itself fills the memory that it allocates. On a GPU the blocks that the caching
    allocator hands out next are filled beforehand, so that no other setting changes.
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
        batch: the arguments of the call; strides are kept.
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
        batch: the arguments of the call.
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

    Each one is computed lazily. A paged batch is computed only in the order of plain PyTorch,
    because its dimensions cannot be shuffled.
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
