"""SASRec in plain torch: a transformer with softmax attention, to calibrate data and protocol."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hstu_attn.data import JaggedBatch
from hstu_attn.jagged import dense_to_jagged, jagged_to_dense
from hstu_attn.layer import PositionalEmbedding
from recommender.model import ItemModel

__all__ = ["SASRec"]

NORM_EPS = 1e-8


class SASRec(ItemModel):
    """Predicts each row's next item by softmax attention (arXiv 1808.09781).

    It is the variant that the HSTU paper compares with: sampled softmax instead of binary
    cross-entropy, and layer norms without weights. It reads no timestamps.

    Args:
        num_items: size of the catalog.
        dim: width of the embeddings, of the layers and of their hidden rows.
        num_heads: heads of a layer, a divisor of `dim`.
        num_layers: how many layers.
        max_seq_len: the largest length of a sequence.
        dropout_ratio: the dropout ratio of the embedded inputs, of the attention weights, and of
            both linears of a feed-forward network.
        l2_normalize: as in `ItemModel`.
        compute_dtype: the autocast dtype of the layers; embeddings and scores are fp32.
        mesh: as in `ItemModel`.
    """

    def __init__(
        self,
        num_items: int,
        dim: int,
        num_heads: int,
        num_layers: int,
        max_seq_len: int,
        dropout_ratio: float,
        l2_normalize: bool = True,
        compute_dtype: torch.dtype = torch.float32,
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__(num_items, dim, l2_normalize, mesh)
        self.max_seq_len = max_seq_len
        self.compute_dtype = compute_dtype
        self.position = PositionalEmbedding(max_seq_len, dim, dropout_ratio)
        self.layers = nn.ModuleList(
            _Layer(dim, num_heads, dropout_ratio) for _ in range(num_layers)
        )

    def forward(self, batch: JaggedBatch) -> Tensor:
        """Returns the state of each row, `(total, dim)` fp32, to compare with items."""
        x = self.position(self.item_embedding(batch.items), batch.seq_offsets)
        longest = self.max_seq_len
        if not x.is_cuda:  # on CUDA, tolist would synchronize, and graphs need a fixed length
            longest = max([1, *batch.seq_offsets.diff().tolist()])  # a rank may have no sequence
        padded = jagged_to_dense(x, batch.seq_offsets, longest)
        # The autocast cache would keep tensors of one captured graph for the next.
        is_16_bits = self.compute_dtype != torch.float32
        with torch.autocast(x.device.type, self.compute_dtype, is_16_bits, cache_enabled=False):
            for layer in self.layers:
                padded = layer(padded)
        rows = dense_to_jagged(padded.float(), batch.seq_offsets, x.shape[0])
        return self.state_vectors(rows)


class _Layer(nn.Module):
    """Causal attention with layer norm on its queries only, and a feed-forward network.

    The weights start Xavier normal; the biases of the attention start as zeros.
    """

    def __init__(self, dim: int, num_heads: int, dropout_ratio: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout_ratio = dropout_ratio
        self.query = nn.Linear(dim, dim)
        self.key_and_value = nn.Linear(dim, 2 * dim)
        self.output = nn.Linear(dim, dim)
        self.up = nn.Linear(dim, dim)
        self.down = nn.Linear(dim, dim)
        for linear in (self.query, self.key_and_value, self.output):
            nn.init.zeros_(linear.bias)
        for weight in (self.output.weight, self.up.weight, self.down.weight):
            nn.init.xavier_normal_(weight)
        # As in nn.MultiheadAttention, query, key and value are initialized as one weight
        # (3 * dim, dim).
        together = nn.init.xavier_normal_(torch.empty(3 * dim, dim))
        with torch.no_grad():
            self.query.weight.copy_(together[:dim])
            self.key_and_value.weight.copy_(together[dim:])

    def forward(self, x: Tensor) -> Tensor:
        """Computes the layer for padded sequences `(batch, longest, dim)`.

        Padding follows the rows of each sequence, so causal attention does not see it.
        """
        normed = F.layer_norm(x, x.shape[-1:], eps=NORM_EPS)
        query = self._heads(self.query(normed))
        key, value = map(self._heads, self.key_and_value(x).chunk(2, dim=-1))
        dropout = self.dropout_ratio if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, None, dropout, is_causal=True)
        y = normed + self.output(attended.transpose(1, 2).flatten(2))
        y = F.layer_norm(y, y.shape[-1:], eps=NORM_EPS)
        hidden = self._drop(F.relu(self.up(y)))
        added: Tensor = self._drop(self.down(hidden))
        return y + added

    def _heads(self, x: Tensor) -> Tensor:
        """Returns `(batch, num_heads, longest, dim / num_heads)`."""
        heads: Tensor = x.unflatten(2, (self.num_heads, -1))
        return heads.transpose(1, 2)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout_ratio, self.training)
