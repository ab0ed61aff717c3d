"""The interface of the retrieval model for the serving engine."""

from __future__ import annotations

from torch import Tensor

from hstu_attn.serving import Rows
from recommender.model import RetrievalModel

__all__ = ["ServedRetrieval"]


class ServedRetrieval:
    """A trained model as a `hstu_attn.serving.CatalogModel`.

    Candidates are scored against the state after a user's last event. The constructor puts the
    model into evaluation mode.

    Args:
        model: the trained model, whose weights must not change afterwards.
    """

    num_actions = 1
    candidates_are_rows = False

    def __init__(self, model: RetrievalModel) -> None:
        self.model = model.eval()
        self.stack = model.stack
        self.num_items = model.item_embedding.num_embeddings
        self.max_history = model.max_seq_len
        self.reads_times = model.reads_times
        self.item_vectors = model.item_vectors().detach()

    def embed(self, rows: Rows) -> Tensor:
        """Returns `(total, embedding_dim)` in the model's `compute_dtype`."""
        model = self.model
        x = model.position.at(model.item_embedding(rows.items), rows.positions)
        return x.to(model.compute_dtype)

    def score(self, states: Tensor, candidates: Tensor) -> Tensor:
        """Returns scores `(n,)` fp32 of candidates `(n,)` for states `(n, embedding_dim)`."""
        return (self.model.state_vectors(states) * self.item_vectors[candidates]).sum(dim=1)

    def score_catalog(self, states: Tensor) -> Tensor:
        """Returns scores `(n, num_items)` fp32 of all items for states `(n, embedding_dim)`."""
        return self.model.state_vectors(states) @ self.item_vectors.T
