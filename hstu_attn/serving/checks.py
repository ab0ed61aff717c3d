"""Checks of what an engine is given."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .cache import PagedKVCache
from .events import EventStore
from .model import ServedModel, UncachedModel, check_model, row_dtype

__all__ = ["check_fit", "check_range"]


def check_range(name: str, what: str, values: np.ndarray[Any, Any], limit: int) -> None:
    """Raises ValueError unless all values are from 0 to `limit - 1`."""
    wrong = np.flatnonzero((values < 0) | (values >= limit))
    if len(wrong):
        raise ValueError(
            f"{name}: expected {what} from 0 to {limit - 1}, got {values[wrong[0]]} at {wrong[0]}"
        )


def check_fit(
    model: ServedModel | UncachedModel, cache: PagedKVCache | None, store: EventStore
) -> None:
    """Raises ValueError unless an engine can serve the model with the cache and the store."""
    if store.max_events > model.max_history:
        raise ValueError(
            f"store: expected max_events of at most the model's max_history = {model.max_history}, "
            f"got {store.max_events}"
        )
    if isinstance(model, UncachedModel):
        if cache is not None:
            raise ValueError(
                "cache: expected None for a model that computes each request whole "
                f"(score_requests), got {type(cache).__name__}"
            )
        return
    if cache is None:
        raise ValueError(
            "cache: expected a PagedKVCache for a model without score_requests, got None"
        )
    check_model(model)
    config = model.stack.config
    layers, pages, _, page_size, *heads = cache.kv_cache.shape
    expected = [len(model.stack.layers), config.num_heads, config.attention_dim]
    if [layers, *heads] != expected:
        raise ValueError(
            f"cache: expected layers, heads and head dim of the model, {expected}, got "
            f"{[layers, *heads]}"
        )
    needed = -(-store.max_events // page_size)
    if pages < needed:
        raise ValueError(
            f"cache: expected at least {needed} pages of {page_size} tokens, for one history of "
            f"{store.max_events} events, got {pages}"
        )
    device = next(model.stack.parameters()).device
    if cache.kv_cache.device != device:
        raise ValueError(
            f"cache: expected the model's device, {device}, got {cache.kv_cache.device}"
        )
    dtype = row_dtype(model)
    if cache.kv_cache.dtype not in (dtype, torch.float8_e4m3fn):
        raise ValueError(
            f"cache: expected the dtype of the model's rows, {dtype}, or {torch.float8_e4m3fn}, "
            f"got {cache.kv_cache.dtype}"
        )
