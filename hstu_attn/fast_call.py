"""Eager calls of the forward operator without the dispatcher.

Torch's binding of Python arguments, the dispatcher and the boxed call of an operator of 38
arguments take most of the host time of a call. `forward` goes from Python straight to the kernels
instead (csrc/host/fast_call.cpp), where nothing but the kernels would see the call. It makes the
same checks with the same errors, and leaves a call to the operator by returning `NotImplemented`:
for anything but plain CPU and CUDA tensors and numbers, and while something listens to operators.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["connect", "forward", "leave_to_operator"]

# A letter for the type of an argument, for csrc/host/fast_call.cpp.
_KINDS = {"Tensor": "t", "Optional[Tensor]": "o", "int": "i", "float": "f", "bool": "b"}


def leave_to_operator(*_: Any) -> Any:
    """`forward` where there are no fast calls."""
    return NotImplemented


# Called with the arguments of hstu_varlen_fwd in order, some of them together in tuples.
forward: Callable[..., Any] = leave_to_operator


def connect(library: Path) -> bool:
    """Set `forward` up for the operator library at a path; False where calls need the operator.

    They do with an older torch, without `_host`, and with `HSTU_ATTN_FAST_CALL=0`.
    """
    global forward
    forward = leave_to_operator
    if os.environ.get("HSTU_ATTN_FAST_CALL") == "0":
        return False
    try:
        import hstu_attn._host as _host

        # Where one of these returns something true, operators are more than their kernels.
        obstacles = (
            torch._C._len_torch_dispatch_stack,  # TorchDispatchMode: fake tensors, tracing, counts
            torch._C._len_torch_function_stack,  # TorchFunctionMode
            torch._C._are_functorch_transforms_active,  # vmap, grad, functionalize
            torch._C._get_tracing_state,  # torch.jit.trace
            torch._C._autograd._profiler_enabled,
        )
        schema = torch.ops.hstu_attn.hstu_varlen_fwd_out.default._schema
        function = ctypes.CDLL(str(library)).hstu_attn_fast_fwd_out
        forward = _host.make_fast_forward(
            function=ctypes.cast(function, ctypes.c_void_p).value,
            kinds="".join(_KINDS[str(argument.type)] for argument in schema.arguments),
            exchange_api=torch.Tensor.__dlpack_c_exchange_api__,
            tensor_types=(torch.Tensor, torch.nn.Parameter),
            obstacles=obstacles,
        )
    except (AttributeError, ImportError, KeyError, OSError, ValueError):
        return False
    return True
