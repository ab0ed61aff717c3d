"""Tiles of a dense mask: how a kernel treats each tile, and in which order."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

__all__ = ["TileKind", "kv_tiles", "q_tiles", "tile_kinds"]


class TileKind(IntEnum):
    """The treatment of a tile by a kernel: skip it, mask its elements, or take it whole."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


def tile_kinds(visible: Tensor, tile_q: int, tile_k: int) -> Tensor:
    """Returns the `TileKind` of each tile of a dense mask, int8 `(q tiles, k tiles)`.

    A tile that reaches past the last key is never full. Rows past the last row are ignored.
    """
    q_len, k_len = visible.shape
    tiles_q, tiles_k = -(-q_len // tile_q), -(-k_len // tile_k)
    padded = visible.new_zeros((tiles_q * tile_q, tiles_k * tile_k))
    padded[:q_len, :k_len] = visible
    seen = padded.view(tiles_q, tile_q, tiles_k, tile_k).sum((1, 3))
    rows = torch.full((tiles_q, 1), tile_q, dtype=torch.int64, device=visible.device)
    if tiles_q:
        rows[-1] = q_len - (tiles_q - 1) * tile_q
    return (seen > 0).to(torch.int8) + (seen == rows * tile_k).to(torch.int8)


def kv_tiles(visible: Tensor, tile_q: int, tile_k: int) -> list[list[tuple[int, TileKind]]]:
    """Returns the key tiles that each row tile needs, in order: the forward's tile lists."""
    kinds = tile_kinds(visible, tile_q, tile_k)
    return [
        [(n, TileKind(kind)) for n, kind in enumerate(row) if kind != TileKind.EMPTY]
        for row in kinds.tolist()
    ]


def q_tiles(visible: Tensor, tile_q: int, tile_k: int) -> list[list[tuple[int, TileKind]]]:
    """Returns the row tiles that each key tile needs, in order: the backward's tile lists."""
    kinds = tile_kinds(visible, tile_q, tile_k)
    return [
        [(m, TileKind(kind)) for m, kind in enumerate(column) if kind != TileKind.EMPTY]
        for column in kinds.t().tolist()
    ]
