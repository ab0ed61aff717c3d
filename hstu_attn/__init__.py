"""HSTU attention for generative recommenders, as a PyTorch extension.

    hstu_attention             the operator: packed sequences, a mask object, a bias object
    Mask                       the keys that each query row sees
    DenseBias, RelativeBias    the biases that are added to the scores
    PagedKV, append_paged_kv   a paged KV cache, for inference, and how it is filled
    Quantization               how FP8 attention quantizes
    hstu_attn_varlen_func      the operator with the arguments of FBGEMM's `hstu` package
    hstu_attn_qkvpacked_func   `hstu_attn_varlen_func` for q, k and v in one tensor
    HSTULayer, HSTUStack       the transduction layer around the operator
    FP8                        the parts of a layer that are computed in FP8
    jagged                     functions that join, split and embed packed sequences
    compat                     the operator with the names and arguments of other libraries
    reference, testing         the operator in plain PyTorch, and tools to compare with it
    info                       a check of this machine's kernels: `python -m hstu_attn.info`

The formula is that of Zhai et al. 2024, "Actions Speak Louder than Words" (arXiv 2402.17152).
"""

from typing import TYPE_CHECKING, Any

from ._version import __version__
from .bias import DenseBias, RelativeBias
from .interface import hstu_attention, hstu_attn_qkvpacked_func, hstu_attn_varlen_func
from .mask import Mask
from .paged import PagedKV, append_paged_kv
from .quantization import Quantization

if TYPE_CHECKING:
    from . import compat, jagged, reference, testing
    from .layer import FP8, HSTULayer, HSTULayerConfig, HSTUStack

__all__ = [
    "FP8",
    "DenseBias",
    "HSTULayer",
    "HSTULayerConfig",
    "HSTUStack",
    "Mask",
    "PagedKV",
    "Quantization",
    "RelativeBias",
    "__version__",
    "append_paged_kv",
    "compat",
    "hstu_attention",
    "hstu_attn_qkvpacked_func",
    "hstu_attn_varlen_func",
    "jagged",
    "reference",
    "testing",
]

_LAZY_NAMES = dict.fromkeys(("FP8", "HSTULayer", "HSTULayerConfig", "HSTUStack"), "layer")
_LAZY_MODULES = {"compat", "jagged", "reference", "testing"}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _LAZY_MODULES:
        return import_module(f"{__name__}.{name}")
    if name in _LAZY_NAMES:
        value = getattr(import_module(f"{__name__}.{_LAZY_NAMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
