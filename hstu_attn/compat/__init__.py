"""The operator under the names and argument orders of other libraries.

FBGEMM's two functions are at the top level of `hstu_attn`; this package has one module for each
other library. `hstu_attn.compat.fbgemm`, with FBGEMM's raw operators, must be imported explicitly,
because the import registers them in `torch.ops.fbgemm`.
"""

from . import generative_recommenders

__all__ = ["generative_recommenders"]
