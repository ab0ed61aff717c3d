"""Tells whether Triton's interpreter can replace a GPU in tests."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Any

import numpy
import pytest
import torch
from torch.torch_version import TorchVersion

__all__ = ["interpreter", "round_e4m3_as_gpus_do"]


def _why_not() -> str | None:
    if torch.cuda.is_available():
        return "Triton's interpreter is for machines without a GPU"
    if not importlib.util.find_spec("triton"):
        return "needs triton"
    too_new = TorchVersion(numpy.__version__) >= "2.4"
    if too_new and TorchVersion(importlib.metadata.version("triton")) < "3.7":
        return "Triton's interpreter needs numpy < 2.4 before Triton 3.7"
    return None


_reason = _why_not()
interpreter = pytest.mark.skipif(_reason is not None, reason=_reason or "")


def round_e4m3_as_gpus_do(patch: pytest.MonkeyPatch) -> None:
    """Makes the interpreter convert fp32 to e4m3 as torch and GPUs do.

    The interpreter's own conversion loses carries into the exponent, and has no NaN.
    """
    from triton.runtime import interpreter as module

    convert = module._convert_float

    def converted(value: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target.name != "fp8e4nv":
            return convert(value, source, target, rounding)
        values = torch.from_numpy(numpy.array(value, dtype=numpy.float32))
        return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    patch.setattr(module, "_convert_float", converted)
