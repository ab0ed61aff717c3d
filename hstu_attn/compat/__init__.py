"""The operator under the names and argument orders of other libraries.

FBGEMM's two functions are at the top level of `hstu_attn`; here are the others, one module for each
library.
"""

from . import generative_recommenders

__all__ = ["generative_recommenders"]
