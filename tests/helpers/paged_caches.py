"""Helpers for tests of the paged KV cache; all keys and values are different integers."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any

import torch

from hstu_attn.serving import CacheStep, PagedKVCache

LAYERS, PAGE, HEADS, DIM = 2, 16, 2, 3
USERS = range(-3, 7)


def make_cache(num_pages: int = 8, device: str = "cpu", **options: Any) -> PagedKVCache:
    """Makes a cache of integers, so that stored values can be compared bit for bit."""
    return PagedKVCache(LAYERS, num_pages, PAGE, HEADS, DIM, torch.int64, device, **options)


def rows(layer: int, tokens: list[int]) -> torch.Tensor:
    """Returns keys and values `(2, tokens, heads, dim)`, unique for each token and layer."""
    ids = torch.tensor(tokens, dtype=torch.int64) * LAYERS + layer
    values = ids[:, None] * (2 * HEADS * DIM) + torch.arange(2 * HEADS * DIM)
    return values.view(len(tokens), 2, HEADS, DIM).transpose(0, 1)


def append(step: CacheStep, tokens: list[int]) -> None:
    for layer in range(LAYERS):
        step.append(layer, *rows(layer, tokens).to(step.slots.device))


def read(pages: torch.Tensor, ids: list[int], length: int) -> torch.Tensor:
    """Returns the `(layers, 2, length, heads, dim)` of a user whose pages have these `ids`."""
    held = pages[:, torch.tensor(ids, dtype=torch.int64, device=pages.device)].transpose(1, 2)
    return held.reshape(LAYERS, 2, -1, HEADS, DIM)[:, :, :length].cpu()


def check_rows(pages: torch.Tensor, ids: list[int], tokens: list[int]) -> None:
    expected = torch.stack([rows(layer, tokens) for layer in range(LAYERS)])
    assert torch.equal(read(pages, ids, len(tokens)), expected)


def host_cache(cache: PagedKVCache) -> torch.Tensor:
    """Returns the pages of the host tier, in the shape of `kv_cache`."""
    assert cache._host_tier is not None
    return cache._host_tier._host_pages[0].unflatten(2, (2, PAGE, HEADS, DIM))


def page_lists(step: CacheStep) -> list[list[int]]:
    ends = step.page_offsets.tolist()
    return [step.page_ids[a:b].tolist() for a, b in pairwise(ends)]


def flat(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


def pages_of(length: int) -> int:
    return -(-length // PAGE)


class Boom(Exception):
    pass


@contextmanager
def unchanged(cache: PagedKVCache, users: range):
    """Checks that the failing call inside the context does not change the cache."""

    def state() -> object:
        table = cache._table
        held = [(table.pages(user), table.host_pages(user)) for user in users]
        return cache.stats(), cache.lookup(users).tolist(), held, cache.kv_cache.clone()

    *before, content = state()
    yield
    *after, content_after = state()
    assert after == before
    assert torch.equal(content, content_after)


def fill(cache: PagedKVCache, **counts: int) -> None:
    """Runs one step for each user: `_3=20` gives user 3 twenty tokens."""
    for name, count in counts.items():
        with cache.step([int(name[1:])], [count]) as step:
            append(step, list(range(count)))
