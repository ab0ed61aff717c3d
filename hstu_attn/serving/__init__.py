"""Serving: what an inference server needs beside the operator (`pip install hstu_attn[serve]`).

PagedKVCache     the keys and values of many users in pages, under an LRU policy
OutOfPagesError  raised where a batch needs more pages than there are
CachedRows       where the rows of `HSTUStack.forward_cached` lie
check_cacheable  refuses layers whose keys and values cannot be cached
"""

from .cache import CacheStats, CacheStep, OutOfPagesError, PagedKVCache
from .rows import CachedRows, check_cacheable

__all__ = [
    "CacheStats",
    "CacheStep",
    "CachedRows",
    "OutOfPagesError",
    "PagedKVCache",
    "check_cacheable",
]
