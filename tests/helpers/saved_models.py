"""Small saved models for the example's server, its expected scores, and the contents of its store,
for tests that start servers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from recommender.model import RetrievalModel
from recommender.models import CATALOG
from recommender.ranking import RankingConfig, RankingModel, save_ranking_model
from recommender.ranking_data import ACTIVITY_BUCKETS
from recommender.saved import SavedModel, save_model

from hstu_attn.data import JaggedBatch
from hstu_attn.layer import HSTULayerConfig
from hstu_attn.serving import EventStore

ITEMS = [*range(100, 160)]
LONGEST = 1000  # more events than any test sends for a user


def save(path: Path, seed: int, items: Sequence[int] = ITEMS, layers: int = 2) -> None:
    """Saves a model with random weights."""
    torch.manual_seed(seed)
    config = HSTULayerConfig.research(
        embedding_dim=16, num_heads=2, linear_dim=8, attention_dim=8, max_sequence_len=LONGEST
    )
    model = RetrievalModel(len(items), config, layers, LONGEST, 0.2)
    torch.nn.init.normal_(model.item_embedding.weight)
    save_model(path, model.eval(), list(items), [f"item {item}" for item in items])


def whole(saved: SavedModel, events: Sequence[Sequence[int]], candidates: list[int]) -> list[float]:
    """Returns the scores of candidates after events on items, computed without a cache."""
    number = {int(item): n for n, item in enumerate(saved.item_ids)}
    items = torch.tensor([number[event[0]] for event in events])
    times = torch.tensor([event[1] for event in events])
    later = torch.cat([times[1:], times[-1:]])
    batch = JaggedBatch(torch.zeros(1), torch.tensor([0, len(items)]), items, times, items, later)
    with torch.no_grad():
        return saved.model.scores(batch)[0, [number[item] for item in candidates]].tolist()


def stored_events(store: EventStore, users: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """Returns each user's stored events as (item id, time)."""
    note = store.note(CATALOG)
    assert note is not None
    ids = json.loads(note)["items"]
    found = store.read(users, [0] * len(users))
    return {
        user: [] if events is None else [(ids[item], at) for item, at, _ in events.events.tolist()]
        for user, events in zip(users, found, strict=True)
    }


def save_ranking(path: Path, seed: int) -> None:
    """Saves a ranking model with random weights, for the items of `ITEMS` and ten users."""
    torch.manual_seed(seed)
    sizes = {"item": len(ITEMS), "user": 10, "activity": ACTIVITY_BUCKETS, "hour": 24}
    config = RankingConfig(
        sizes=sizes,
        actions=("click", "like"),
        tasks=("like", "click"),
        max_history=12,
        max_targets=6,
        dim=16,
        heads=2,
        layers=2,
    )
    model = RankingModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    save_ranking_model(path, model)
    state = torch.load(path, weights_only=True)
    ids = {"item_ids": torch.tensor(ITEMS), "user_ids": torch.arange(10)}
    torch.save({**state, **ids}, path)
