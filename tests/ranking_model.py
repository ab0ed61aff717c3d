"""A ranking model for the tests of serving: candidates are rows after the history, and do not see
each other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hstu_attn.layer import HSTULayerConfig, HSTUStack
from hstu_attn.serving import Rows
from hstu_attn.serving.events import Int64s


class RankingModel(nn.Module):
    """Embeds items, positions and what users did with them; scores each candidate by its state."""

    candidates_are_rows = True

    def __init__(
        self, config: HSTULayerConfig, layers: int, items: int, actions: int, max_history: int
    ) -> None:
        super().__init__()
        self.num_items, self.num_actions, self.max_history = items, actions, max_history
        self.reads_times = config.enable_relative_attention_bias
        self.item = nn.Embedding(items, config.embedding_dim)
        self.action = nn.Embedding(actions + 1, config.embedding_dim)  # the last one: a candidate
        self.position = nn.Embedding(max_history + 1, config.embedding_dim)
        self.stack = HSTUStack(config, layers)
        self.head = nn.Linear(config.embedding_dim, 1)

    def embed(self, rows: Rows) -> Tensor:
        actions = rows.actions.masked_fill(rows.is_candidate, self.num_actions)
        x = self.item(rows.items) + self.action(actions) + self.position(rows.positions)
        return x.to(self.stack.layers[0].uvqk.weight.dtype)

    def score(self, states: Tensor, candidates: Tensor) -> Tensor:
        return self.head(states).squeeze(1)

    @torch.no_grad()
    def whole(self, events: Int64s, candidates: list[int], at: int) -> Tensor:
        """The scores of one user's candidates without a cache, `(len(candidates),)`."""
        n, m = len(events), len(candidates)
        items, times, actions = torch.from_numpy(events).T.contiguous()
        listed = torch.tensor(candidates, dtype=torch.int64)
        times = torch.cat([times, torch.full((m + 1,), at)])
        x = torch.cat([self.item(items) + self.action(actions), self.item(listed)])
        x[:n] += self.position.weight[:n]
        x[n:] += self.position.weight[n] + self.action.weight[-1]
        timed = {"timestamps": times[:-1], "row_timestamps": times[1:]} if self.reads_times else {}
        states = self.stack(
            x, torch.tensor([0, n + m]), n + m, num_targets=torch.tensor([m]), **timed
        )
        return self.head(states[n:]).squeeze(1)
