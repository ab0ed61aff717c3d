"""The operator under the names and argument orders of other libraries.

FBGEMM's two functions are at the top level of `hstu_attn`; here are the others, one module for each
library. `hstu_attn.compat.fbgemm`, with FBGEMM's raw operators, has to be imported by that name,
since the import registers them in `torch.ops.fbgemm`.
"""

from . import generative_recommenders

__all__ = ["generative_recommenders"]
