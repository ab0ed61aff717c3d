"""Serving: what an inference server needs beside the operator (`pip install hstu_attn[serve]`).

PagedKVCache     the keys and values of many users in pages, under an LRU policy
OutOfPagesError  raised where a batch needs more pages than there are
"""

from .cache import CacheStats, CacheStep, OutOfPagesError, PagedKVCache

__all__ = ["CacheStats", "CacheStep", "OutOfPagesError", "PagedKVCache"]
