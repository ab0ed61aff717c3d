"""The masks of the two public HSTU libraries, as plain loops over rows and columns.

They are the reference of `hstu_attn.mask`, and share no code with it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fbgemm_mask(
    contexts: int,
    history: int,
    targets: int,
    *,
    window: tuple[int, int] = (-1, -1),
    group: int = 1,
) -> Tensor:
    """Returns FBGEMM's mask: tokens are `contexts`, then `history`, then `targets`, which come
    in groups.

    It starts from the causal triangle or the band. Contextual rows then also see everything up
    to the targets, and target rows no longer see the targets of earlier groups.
    """
    length = contexts + history + targets
    first_target = contexts + history
    left, right = window
    visible = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(length):
            seen = (left < 0 or j >= i - left) and (right < 0 or j <= i + right)
            if i < contexts and j < first_target:
                seen = True
            if i >= first_target and j >= first_target:
                same_group = (i - first_target) // group == (j - first_target) // group
                seen = seen and same_group
            if i < contexts and j >= first_target:
                seen = False
            visible[i, j] = seen
    return visible


def func_mask(bounds: list[int], row_position: int | None, length: int) -> list[bool]:
    """Returns FBGEMM's arbitrary mask of a row, whose `bounds` are F0, F1, ...; it is causal if
    `row_position` is given.
    """
    seen = [j < bounds[0] for j in range(length)]
    for n in range(1, len(bounds) // 2 + 1):
        for j in range(length):
            if bounds[2 * n - 1] <= j < bounds[2 * n]:
                seen[j] = True
    if row_position is not None:
        seen = [value and j <= row_position for j, value in enumerate(seen)]
    return seen


def meta_mask(
    length: int,
    *,
    targets: int | None = None,
    max_attn_len: int = 0,
    contextual: int = 0,
    min_full: int = 0,
) -> Tensor:
    """Returns the mask of Meta's generative-recommenders: every token gets a rank, and ranks are
    compared.

    The contextual tokens share the first rank, history tokens count up from there, and all
    targets share the rank after the history. A row sees itself and every token of lower rank, as
    far back as `max_attn_len`, unless it is among the last `min_full` ranks before the targets.
    Rows of the first rank also see every token of a rank below the last one, if there are
    contextual tokens at all.
    """
    last_rank = length
    ranks = list(range(length))
    if contextual > 0:
        ranks = [max(rank - contextual + 1, 0) for rank in ranks]
        last_rank = length - contextual + 1
    if targets is not None:
        last_rank -= targets
        ranks = [min(rank, last_rank) for rank in ranks]
    visible = torch.zeros(length, length, dtype=torch.bool)
    for i, row in enumerate(ranks):
        for j, column in enumerate(ranks):
            distance = row - column
            seen = distance > 0 or i == j
            if max_attn_len > 0:
                unlimited = min_full > 0 and row >= last_rank - min_full
                seen = seen and (distance <= max_attn_len or unlimited)
            if contextual > 0 and row == 0 and column < last_rank:
                seen = True
            visible[i, j] = seen
    return visible
