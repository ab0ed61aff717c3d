"""The implementations that benchmarks.attention compares.

- hstu_attn: this library, with the kernels that it chooses for the GPU
- hstu_attn_sm80 and the like: this library, with the kernels of the named architecture
  (HSTU_ATTN_FORCE_ARCH)
- hstu_attn_fp8: FP8 attention, including the time to quantize q, k and v
- hstu_attn_fp8_backward: the backward in e4m3, including the time to quantize its inputs
- hstu_attn_e4m3: FP8 attention of q, k and v that are already quantized
- dense_bias: hstu_attn with the dense form of a relative bias, as in baselines/dense_bias.py
- triton: the baseline of baselines/triton_hstu.py
- flash2, cudnn: softmax attention of torch on a dense causal batch of the same shape
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import hstu_attn
from hstu_attn import Quantization, reference
from hstu_attn.call import NO_BIAS, make_call
from hstu_attn.quantization import Quantized
from hstu_attn.testing import Batch, check_against_reference, run

from .cases import Case
from .timing import environment

__all__ = ["FP8", "Implementation", "Prepared", "is_installed", "make"]

ARCH_VARIABLE = "HSTU_ATTN_FORCE_ARCH"
FP8 = ("hstu_attn_fp8", "hstu_attn_e4m3", "hstu_attn_fp8_backward")
MOST_DENSE_PAIRS = 16 * 2048**2  # of a row and a key; autograd holds several such tensors
FP8_TOLERANCE = 6e-2  # of outputs and gradients, against fp64 with unquantized inputs


@dataclass(frozen=True)
class Prepared:
    """A call on a batch: a function, its arguments, the tensors to differentiate, and dO."""

    function: Callable[..., Tensor]
    leaves: tuple[Tensor, ...]
    dout: Tensor

    def forward(self) -> Tensor:
        """Calls the function without gradients."""
        with torch.no_grad():
            return self.function(*self.leaves)

    def with_autograd(self) -> Tensor:
        """Returns the output, which holds what the backward needs."""
        return self.function(*self.leaves)

    def backward_of(self, out: Tensor) -> tuple[Tensor, ...]:
        """Computes the gradients of everything that requires one; `out` may be used again."""
        wanted = [leaf for leaf in self.leaves if leaf.requires_grad]
        return torch.autograd.grad(out, wanted, self.dout, retain_graph=True)


class Implementation:
    """An implementation of HSTU attention, called like `hstu_attn.hstu_attention`."""

    def __init__(self, name: str, function: Callable[..., Tensor], arch: str | None = None):
        self.name, self.function, self.arch = name, function, arch

    def active(self) -> AbstractContextManager[None]:
        """Returns the context in which its calls and their backward run."""
        return environment(ARCH_VARIABLE, self.arch) if self.arch else nullcontext()

    def takes(self, case: Case) -> bool:
        """Returns whether the implementation takes part in the comparison of the case."""
        return self.arch is None or case.group != "scan"

    def check(self, case: Case, device: str) -> None:
        """Checks the results against the tests' tolerance, on a small batch of the same kind."""
        batch = case.make_small(device)
        with self.active():
            check_against_reference(self.function, batch, **self._options(case))

    def prepare(self, case: Case, batch: Batch) -> Prepared:
        """Prepares the call on a batch."""
        tensors = batch.differentiable()
        for name, tensor in tensors.items():
            wanted = name != "rab" or case.bias_gradient
            tensors[name] = tensor.detach().requires_grad_(wanted)
        options = self._options(case)
        leaves, dout = tuple(tensors.values()), torch.randn_like(batch.v)
        if batch.bias is None:  # called as users do, so that the host time is representative
            call = functools.partial(self.function, **batch.options(), **options)
            return Prepared(call, leaves, dout)

        def with_bias(*leaves: Tensor) -> Tensor:
            used = batch.with_tensors(dict(zip(tensors, leaves, strict=True)))
            return self.function(used.q, used.k, used.v, **used.options(), **options)

        return Prepared(with_bias, leaves, dout)

    def _options(self, case: Case) -> dict[str, Any]:
        return {"deterministic": True} if case.deterministic else {}


def has_fp8_kernels() -> bool:
    """Returns whether FP8 attention runs: on a GPU of sm90, or without a GPU (in tests)."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() == (9, 0)


class Fp8(Implementation):
    """FP8 attention with the recommended quantization; only the forward."""

    def __init__(self, name: str):
        super().__init__(name, hstu_attn.hstu_attention)

    def takes(self, case: Case) -> bool:
        return case.group == "fp8" and has_fp8_kernels()

    def check(self, case: Case, device: str) -> None:
        """Checks the error of the output on a small batch of the same kind."""
        batch = case.make_small(device)
        exact = run(reference.hstu_attention, batch, dtype=torch.float64)["out"]
        error = (self.prepare(case, batch).forward() - exact).norm() / exact.norm()
        assert error <= FP8_TOLERANCE, f"{self.name}: out has a relative error of {error:.3g}"

    def prepare(self, case: Case, batch: Batch) -> Prepared:
        inputs, options = (batch.q, batch.k, batch.v), batch.options()
        quantization = Quantization()
        if self.name == "hstu_attn_fp8":
            call = functools.partial(self.function, **options | {"quantization": quantization})
            return Prepared(call, inputs, torch.empty(0))
        sequences = (batch.cu_seqlens_q, batch.cu_seqlens_k, None, None)
        op = torch.ops.hstu_attn.quantize_qkv
        x = Quantized(*op(*inputs, *sequences, quantization.mode, quantization.smooth_k))
        descales = (x.q_descale, x.k_descale, x.v_descale)
        shared = {n: value for n, value in options.items() if n not in ("bias", "paged_kv")}
        rest = (x.q_norm, x.k_norm, None, quantization.mode in (1, 2))
        arguments = (*NO_BIAS, *make_call(**shared, descales=descales), *rest)
        out = torch.empty_like(batch.v)

        def forward(*inputs: Tensor) -> Tensor:
            torch.ops.hstu_attn.forward_fp8(*inputs, *arguments, out)
            return out

        return Prepared(forward, (x.q8, x.k8, x.v8), torch.empty(0))


class Fp8Backward(Implementation):
    """The backward in e4m3, including the time to quantize its inputs."""

    _quantization = Quantization(backward="e4m3")

    def __init__(self) -> None:
        super().__init__("hstu_attn_fp8_backward", hstu_attn.hstu_attention)

    def takes(self, case: Case) -> bool:
        return case.group == "fp8_backward" and has_fp8_kernels()

    def check(self, case: Case, device: str) -> None:
        """Checks the errors of the gradients on a small batch of the same kind."""
        batch = case.make_small(device)
        dout = torch.randn_like(batch.v)
        exact = run(reference.hstu_attention, batch, dout, torch.float64)
        found = run(self.function, replace(batch, quantization=self._quantization), dout)
        for name in ("dq", "dk", "dv"):
            error = (found[name] - exact[name]).norm() / exact[name].norm()
            assert error <= FP8_TOLERANCE, f"{self.name}: {name} is off by {error:.3g}"

    def prepare(self, case: Case, batch: Batch) -> Prepared:
        return super().prepare(case, replace(batch, quantization=self._quantization))


class DenseForm(Implementation):
    """This library with a dense bias that is made from the tables of a relative one."""

    def __init__(self) -> None:
        from .baselines import dense_bias

        super().__init__("dense_bias", dense_bias.hstu_attention)

    def takes(self, case: Case) -> bool:
        return bool(case.tables) and case.batch * case.longest**2 <= MOST_DENSE_PAIRS


class Triton(Implementation):
    """The Triton baseline."""

    def __init__(self) -> None:
        from .baselines import triton_hstu

        def function(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
            mask, longest = options["mask"], options["max_seqlen_q"]
            given = options["scaling_seqlen"]
            return triton_hstu.hstu_attention(
                q, k, v, options["cu_seqlens_q"], longest, longest if given == -1 else given,
                mask.num_contexts, mask.num_targets, options["alpha"],
            )  # fmt: skip

        super().__init__("triton", function)

    def takes(self, case: Case) -> bool:
        masks = ("causal", "context", "targets", "context + targets")
        plain = not case.has_bias and not case.deterministic
        return plain and case.mask_name in masks and case.group != "scan"  # each shape is tuned


class Softmax(Implementation):
    """One of torch's softmax backends, on the same packed tensors seen as a dense batch."""

    def __init__(self, name: str, backend: SDPBackend):
        def function(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

        super().__init__(name, function)

    def takes(self, case: Case) -> bool:
        return case.is_dense_causal

    def check(self, case: Case, device: str) -> None:
        """Checks nothing, because softmax attention is not HSTU attention."""

    def prepare(self, case: Case, batch: Batch) -> Prepared:
        def dense(x: Tensor) -> Tensor:
            shape = (case.batch, case.longest, case.heads, case.head_dim)
            return x.detach().view(shape).transpose(1, 2)

        leaves = tuple(dense(x).requires_grad_() for x in (batch.q, batch.k, batch.v))

        call = functools.partial(self.function, scale=batch.alpha)
        return Prepared(call, leaves, dense(torch.randn_like(batch.q)))


def is_installed(name: str) -> bool:
    """Returns whether the packages that an implementation needs are installed."""
    return name != "triton" or importlib.util.find_spec("triton") is not None


def make(name: str) -> Implementation:
    """Returns an implementation by its name.

    Raises:
        ValueError: there is no implementation of this name.
        ImportError: if what it needs is not installed.
    """
    if match := re.fullmatch(r"hstu_attn(?:_sm(\d+))?", name):
        return Implementation(name, hstu_attn.hstu_attention, match[1])
    if name == "hstu_attn_fp8_backward":
        return Fp8Backward()
    if name in FP8:
        return Fp8(name)
    if name == "dense_bias":
        return DenseForm()
    if name == "triton":
        return Triton()
    backends = {"flash2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    if name not in backends:
        raise ValueError(
            f"impls: expected hstu_attn, hstu_attn_smNN, {', '.join(FP8)}, dense_bias, triton, "
            f"flash2 or cudnn; got {name!r}"
        )
    return Softmax(name, backends[name])
