"""The retrieval model and its loss.

The model has item and position embeddings, a stack of HSTU layers, and scores by dot products with
the item embeddings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from hstu_attn.data import JaggedBatch
from hstu_attn.distributed import ShardedEmbedding
from hstu_attn.layer import HSTULayerConfig, HSTUStack, PositionalEmbedding

__all__ = ["ItemModel", "RetrievalModel", "sampled_softmax_loss"]

PART_ELEMENTS = 2**24  # of item vectors or scores at a time, 64 MiB; at least one row
FEW_ITEMS = 32  # up to this many times a row's items, it is faster to score the whole catalog


class ItemModel(nn.Module):
    """Item embeddings, and scores of items for the state of a row.

    Sequence models are subclasses, whose `forward` returns the states.

    Args:
        num_items: size of the catalog.
        dim: width of the embeddings, which start as N(0, 0.02) truncated at two standard
            deviations.
        l2_normalize: scores are cosine similarities; False: dot products with layer-normalized
            states.
        mesh: the ranks that shard the rows of the embeddings, which then start untruncated; all
            ranks call a method together. None keeps the whole table in this process.
    """

    item_embedding: nn.Embedding | ShardedEmbedding

    def __init__(
        self, num_items: int, dim: int, l2_normalize: bool, mesh: DeviceMesh | None = None
    ) -> None:
        super().__init__()
        self.l2_normalize = l2_normalize
        if mesh is None:
            self.item_embedding = nn.Embedding(num_items, dim)
            nn.init.trunc_normal_(self.item_embedding.weight, std=0.02, a=-0.04, b=0.04)
        else:
            seed = torch.initial_seed()
            self.item_embedding = ShardedEmbedding("item", num_items, dim, mesh, seed=seed)

    def state_vectors(self, x: Tensor) -> Tensor:
        """Returns the state vectors of layer outputs `(n, dim)`, which items are scored against."""
        x = x.float()
        return F.normalize(x, dim=1) if self.l2_normalize else F.layer_norm(x, x.shape[1:])

    def item_vectors(self, items: Tensor | None = None) -> Tensor:
        """Returns the vectors `(n, dim)` fp32 of the given items, or of all items on this rank.

        Their dot products with state vectors are the scores.
        """
        table = self.item_embedding
        vectors: Tensor
        if items is not None:
            vectors = table(items)
        elif isinstance(table, ShardedEmbedding):
            vectors = table.local_weight()
        else:
            vectors = table.weight
        return F.normalize(vectors, dim=1) if self.l2_normalize else vectors

    def scores(self, batch: JaggedBatch) -> Tensor:
        """Returns scores `(batch, num_items)` of all items after each sequence's last row.

        Ranks that shard the table pass the same batch, and each rank scores its own items.
        """
        states: Tensor = self(batch)
        scores = states[batch.seq_offsets[1:] - 1] @ self.item_vectors().T
        table = self.item_embedding
        return _of_all_ranks(scores, table) if isinstance(table, ShardedEmbedding) else scores


def _of_all_ranks(scores: Tensor, table: ShardedEmbedding) -> Tensor:
    """Joins each rank's scores `(batch, owned)` to `(batch, num_items)`."""
    if table.num_ranks == 1:
        return scores
    assert table.mesh is not None
    owned = -(-table.num_embeddings // table.num_ranks)  # by the first rank; the last may own fewer
    columns = F.pad(scores, (0, owned - scores.shape[1])).T.contiguous()
    joined = columns.new_empty(table.num_ranks * owned, columns.shape[1])
    dist.all_gather_into_tensor(joined, columns, group=table.mesh.get_group())
    return joined[: table.num_embeddings].T


class RetrievalModel(ItemModel):
    """Predicts each row's next item (arXiv 2402.17152, section 4.1.1).

    The weights start as in that paper's public experiments; positions are Xavier normal.

    Args:
        num_items: size of the catalog.
        config: the configuration of the layers; its `embedding_dim` is the width of the item
            embeddings. Timestamps are read if it has time buckets in its relative bias.
        num_layers: how many layers.
        max_seq_len: the largest length of a sequence.
        dropout_ratio: the dropout ratio of the embedded inputs.
        l2_normalize: as in `ItemModel`.
        compute_dtype: the dtype of the layers; embeddings and scores are fp32.
        mesh: as in `ItemModel`.
    """

    def __init__(
        self,
        num_items: int,
        config: HSTULayerConfig,
        num_layers: int,
        max_seq_len: int,
        dropout_ratio: float,
        l2_normalize: bool = True,
        compute_dtype: torch.dtype = torch.float32,
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__(num_items, config.embedding_dim, l2_normalize, mesh)
        self.config = config
        self.max_seq_len = max_seq_len
        self.dropout_ratio = dropout_ratio
        self.compute_dtype = compute_dtype
        self.reads_times = config.enable_relative_attention_bias and config.num_buckets > 0
        self.position = PositionalEmbedding(max_seq_len, config.embedding_dim, dropout_ratio)
        nn.init.xavier_normal_(self.position.embedding.weight)
        self.stack = HSTUStack(config, num_layers)

    def forward(self, batch: JaggedBatch) -> Tensor:
        """Returns the state of each row, `(total, embedding_dim)` fp32, to compare with items."""
        x = self.position(self.item_embedding(batch.items), batch.seq_offsets)
        x = self.stack(
            x.to(self.compute_dtype),
            batch.seq_offsets,
            self.max_seq_len,
            timestamps=batch.timestamps if self.reads_times else None,
            row_timestamps=batch.target_timestamps if self.reads_times else None,
        )
        return self.state_vectors(x)


class _ScoresOfOwnItems(Function):
    """Scores each row's own items without materializing all their vectors `(n, k, dim)`.

    Forward and backward process chunks of rows. A chunk gathers the vectors of its items or, if the
    catalog is small, works on the scores of all items.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, vectors: Tensor, items: Tensor) -> Tensor:
        """Returns the scores `(n, k)`.

        Args:
            ctx: the autograd context, which saves the arguments.
            states: `(n, dim)`.
            vectors: the vectors of all items, `(num_items, dim)`.
            items: `(n, k)` int64.
        """
        ctx.save_for_backward(states, vectors, items)
        scores = states.new_empty(items.shape)
        if _has_few_items(vectors, items):
            for rows in _parts_of_rows(items, len(vectors)):
                scores[rows] = (states[rows] @ vectors.T).gather(1, items[rows])
            return scores
        for rows in _parts_of_rows(items, items.shape[1] * states.shape[1]):
            gathered = vectors[items[rows]]
            scores[rows] = (gathered @ states[rows, :, None]).squeeze(2)
        return scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_scores: Tensor) -> tuple[Tensor, Tensor, None]:
        states, vectors, items = ctx.saved_tensors
        of_states, of_vectors = torch.empty_like(states), torch.zeros_like(vectors)
        if _has_few_items(vectors, items):
            for rows in _parts_of_rows(items, len(vectors)):
                of_all = states.new_zeros(len(items[rows]), len(vectors))
                of_all.scatter_add_(1, items[rows], of_scores[rows])
                torch.mm(of_all, vectors, out=of_states[rows])
                of_vectors.addmm_(of_all.T, states[rows])
            return of_states, of_vectors, None
        for rows in _parts_of_rows(items, items.shape[1] * states.shape[1]):
            of_states[rows] = (of_scores[rows, None] @ vectors[items[rows]]).squeeze(1)
            products = of_scores[rows, :, None] * states[rows, None]
            of_vectors.index_add_(0, items[rows].flatten(), products.flatten(0, 1))
        return of_states, of_vectors, None


def _has_few_items(vectors: Tensor, items: Tensor) -> bool:
    return len(vectors) <= FEW_ITEMS * items.shape[1]


def _parts_of_rows(items: Tensor, elements: int) -> Iterator[slice]:
    """Yields slices of rows of `elements` elements: at most `PART_ELEMENTS`, or one row."""
    count = max(1, PART_ELEMENTS // max(1, elements))
    for first in range(0, len(items), count):
        yield slice(first, first + count)


def _vectors_of(model: ItemModel, items: Tensor) -> tuple[Tensor, Tensor]:
    """Returns item vectors `(n, dim)`, and the index into them of each of `items`, of any shape.

    The vectors are those of all items or, if ranks shard the table, of `items` only.
    """
    if not isinstance(model.item_embedding, ShardedEmbedding):
        return model.item_vectors(), items
    different, places = torch.unique(items, return_inverse=True)
    return model.item_vectors(different), places


def sampled_softmax_loss(
    model: ItemModel,
    states: Tensor,
    target_items: Tensor,
    num_negatives: int,
    temperature: float,
    per_row: bool = False,
) -> Tensor:
    """Returns the cross-entropy of each row's next item against sampled negatives.

    The negatives are drawn uniformly. A negative that is a row's target is ignored in that row.

    Args:
        model: gives the item vectors.
        states: `(total, embedding_dim)` fp32.
        target_items: `(total,)` int64.
        num_negatives: the number of negatives per row.
        temperature: divides the scores.
        per_row: draws negatives for each row; False draws one set, which all rows share.

    Returns:
        `(total,)` fp32.
    """
    num_items = model.item_embedding.num_embeddings
    shape = (len(states), num_negatives) if per_row else (num_negatives,)
    negatives = torch.randint(num_items, shape, device=states.device)
    positive = (states * model.item_vectors(target_items)).sum(dim=1, keepdim=True)
    if per_row:
        vectors, places = _vectors_of(model, negatives)
        negative: Tensor = _ScoresOfOwnItems.apply(states, vectors, places)
    else:
        negative = states @ model.item_vectors(negatives).T
    negative = negative.masked_fill(target_items[:, None] == negatives, float("-inf"))
    logits = torch.cat([positive, negative], dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros_like(target_items), reduction="none")
