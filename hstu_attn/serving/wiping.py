"""Overwrites the rows of forgotten users that are still in pages of a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["UsedPages"]


class UsedPages:
    """The pages of one memory tier that may hold rows of forgotten users.

    Args:
        num_pages: pages of the tier, which are all zeros at first.
        page_size: tokens of a page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._page_size = page_size
        self._written = np.zeros(num_pages, np.bool_)  # whether written since the last `wipe`
        self._held = np.zeros(num_pages, np.bool_)  # whether a user had it at the last `wipe`

    def add(self, pages: np.ndarray[Any, Any]) -> None:
        """Records that pages `(n,)` are being written."""
        self._written[pages] = True

    @torch.no_grad()
    def wipe(
        self, tensors: Sequence[Tensor], held: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> None:
        """Overwrites with zeros all rows that hold no token of a user.

        Args:
            tensors: int64 `(layers, num_pages, words)`; a page has the keys and values of
                `page_size` tokens.
            held: the pages of each user in this tier, in order; may be empty.
            lengths: the number of tokens of each user.
        """
        tokens = np.zeros(len(self._held), np.int64)  # the number of tokens in each page
        pages = np.fromiter(chain.from_iterable(held), np.int64)
        counts = np.fromiter(map(len, held), np.int64, len(held))
        some = counts > 0
        tokens[pages] = self._page_size
        last = pages[counts.cumsum()[some] - 1]
        tokens[last] = (np.array(lengths, np.int64) - self._page_size * (counts - 1))[some]
        held_now = tokens > 0
        empty = np.flatnonzero((self._written | self._held) & ~held_now)
        partial = np.flatnonzero(self._written & held_now & (tokens < self._page_size))
        place, row = np.nonzero(np.arange(self._page_size) >= tokens[partial, None])
        for tensor in tensors:
            ids, page, rows = (
                torch.from_numpy(numbers).to(tensor.device)
                for numbers in (empty, partial[place], row)
            )
            tensor.index_fill_(1, ids, 0)
            tensor.view(torch.uint8).unflatten(2, (2, self._page_size, -1))[:, page, :, rows] = 0
        self._held = held_now
        self._written[:] = False
