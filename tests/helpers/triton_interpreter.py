"""Whether Triton's interpreter can stand for a GPU in tests."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import numpy
import pytest
import torch
from torch.torch_version import TorchVersion

__all__ = ["interpreter"]


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
