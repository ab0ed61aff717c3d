"""Paged calls for each way in which the sm90 kernels divide keys among thread blocks."""

from __future__ import annotations

from dataclasses import replace

from hstu_attn.testing import Batch

__all__ = ["TILES", "with_tiles"]

# On Hopper, blocks divide the keys of a tile of rows if the shape of a call has few tiles: within
# a cluster, or as splits through device memory. The values are numbers of tiles.
TILES = {"8 blocks": 10, "4 blocks": 24, "splits": 50, "two splits": 80, "1 block": 132}


def with_tiles(batch: Batch, blocks: str, rows: int = 128) -> Batch:
    """Returns the batch with a `max_seqlen_q` that gives `TILES` tiles of `rows` rows and heads."""
    items = len(batch.cu_seqlens_q[1:]) * batch.q.shape[1]
    longest = max(TILES[blocks] // items * rows, batch.max_seqlen_q)
    return replace(
        batch,
        max_seqlen_q=longest,
        max_seqlen_k=max(longest, batch.max_seqlen_k),
        scaling_seqlen=500,
    )
