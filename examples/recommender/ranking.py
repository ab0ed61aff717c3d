"""A ranking model and its loss (arXiv 2402.17152, section 2.2).

The model predicts what a user will do about each candidate, one probability per task.

The rows of a sequence are, in this order,

    contexts            one row for each contextual feature
    history             two rows for each event: the item, then what the user did about it
    candidates          one row each: the item

Contexts and history see each other as `HSTULayer` masks them; each candidate sees both and itself,
but no other candidate (or, with `target_group_size`, those before it in its group). Only
candidates have a loss. NOTE: history rows must have none, although they are causal: contextual rows
see all of the history, and through them its rows see their own actions from the second layer on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstu_attn import FP8, HSTULayerConfig
from hstu_attn.data import ACTIONS, EventLog, unpack_actions
from hstu_attn.distributed import ShardedEmbedding
from hstu_attn.jagged import (
    JaggedParts,
    add_position_time_embeddings,
    interleave_jagged,
    jagged_ids,
)
from hstu_attn.layer import HSTUStack
from recommender.checkpoint import write_state
from recommender.ranking_data import CONTEXTS, RankingBatch

__all__ = [
    "EmbeddingTables",
    "RankingConfig",
    "RankingModel",
    "load_ranking_model",
    "ranking_loss",
    "ranking_model_of",
    "read_ranking_model",
    "save_ranking_model",
    "task_labels",
]

TIME_BUCKETS = 2048  # square roots of minutes: eight years


@dataclass(frozen=True, kw_only=True)
class RankingConfig:
    """The sizes and the options of a `RankingModel`.

    Attributes:
        sizes: the sizes of the embedding tables by feature: "item" and each of `CONTEXTS`.
        actions: the names of the bits of an action.
        tasks: the names of the predicted actions.
        max_history: the most events of a history.
        max_targets: the most candidates of a sequence.
        dim: width of the embeddings and of the layers.
        heads: heads of a layer.
        layers: how many layers.
        dropout: the dropout ratio of the inputs, and in each layer.
        target_group_size: candidates in such a group see each other causally; 1 is none.
        head_dim: width of a head; None is `dim / heads`.
        fp8: what the layers compute in FP8.
    """

    sizes: dict[str, int]
    actions: tuple[str, ...]
    tasks: tuple[str, ...]
    max_history: int
    max_targets: int
    dim: int
    heads: int
    layers: int
    dropout: float = 0.0
    target_group_size: int = 1
    head_dim: int | None = None
    fp8: FP8 | None = None

    @property
    def max_rows(self) -> int:
        """Returns the largest number of rows that a sequence has."""
        return len(CONTEXTS) + 2 * self.max_history + self.max_targets

    @property
    def layer(self) -> HSTULayerConfig:
        """Returns the configuration of each layer."""
        width = self.head_dim or self.dim // self.heads
        config = HSTULayerConfig.stu(
            embedding_dim=self.dim,
            num_heads=self.heads,
            hidden_dim=width,
            attention_dim=width,
            output_dropout_ratio=self.dropout,
            contextual_seq_len=len(CONTEXTS),
        )
        return replace(
            config,
            target_group_size=self.target_group_size,
            fp8=self.fp8,
            scaling_seqlen=self.max_rows,
        )


class EmbeddingTables(nn.Module):
    """One undivided embedding table for each feature.

    The names and the initial rows are those of `hstu_attn.distributed.ShardedEmbeddings`, which can
    take its place, as can any module with this `forward`.

    Args:
        sizes: rows of each table, by feature.
        dim: width.
        seed: the seed of the initial rows.
        device: where the tables are made, on whose kind the initial rows depend; None is torch's
            default.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        dim: int,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        drawn = {
            name: ShardedEmbedding(name, size, dim, seed=seed, device=device).local_weight()
            for name, size in sizes.items()
        }
        self.tables = nn.ModuleDict(
            {
                name: nn.Embedding.from_pretrained(rows.detach(), freeze=False)
                for name, rows in drawn.items()
            }
        )

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """Looks up int64 indices `(n,)` of each feature: `(n, dim)` fp32."""
        return {name: self.tables[name](indices) for name, indices in features.items()}


class RankingModel(nn.Module):
    """Predicts the actions on each candidate.

    Args:
        config: sizes and widths.
        compute_dtype: the dtype of the layers; embeddings and head are fp32, as are all
            parameters.
        embeddings: looks rows up by feature; None is `EmbeddingTables`.

    Attributes:
        max_rows: the most rows of a sequence. No result depends on it, so a server raises it for
            more candidates than training had.
    """

    def __init__(
        self,
        config: RankingConfig,
        compute_dtype: torch.dtype = torch.float32,
        embeddings: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.max_rows = config.max_rows
        self.compute_dtype = compute_dtype
        dim = config.dim
        self.embeddings = EmbeddingTables(config.sizes, dim) if embeddings is None else embeddings
        self.action = nn.Linear(len(ACTIONS), dim)
        positions = len(CONTEXTS) + 2 * config.max_history + 1
        self.position = nn.Parameter(torch.empty(positions, dim))
        self.time = nn.Parameter(torch.empty(TIME_BUCKETS, dim))
        for table in (self.position, self.time):
            nn.init.trunc_normal_(table, std=0.02)
        self.stack = HSTUStack(config.layer, config.layers)
        self.head = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, len(config.tasks))
        )

    def forward(self, batch: RankingBatch) -> Tensor:
        """Returns the logits of the tasks for each candidate, `(targets, tasks)` fp32.

        The batch's `target_actions` are not read.
        """
        history_events, num_windows = len(batch.history_items), len(batch.contexts)
        rows = self.embeddings(
            {
                "item": torch.cat([batch.history_items, batch.target_items]),
                **{name: batch.contexts[:, column] for column, name in enumerate(CONTEXTS)},
            }
        )
        history_items, targets = rows["item"].tensor_split([history_events])
        history, history_offsets = interleave_jagged(
            history_items,
            self.action(unpack_actions(batch.history_actions)),
            batch.history_offsets,
        )
        context_offsets = torch.arange(num_windows + 1, device=targets.device) * len(CONTEXTS)
        contexts = torch.stack([rows[name] for name in CONTEXTS], dim=1).flatten(0, 1)
        parts = JaggedParts(
            [context_offsets, history_offsets, batch.target_offsets],
            [len(contexts), len(history), len(targets)],
        )
        offsets, num_targets = parts.offsets, batch.target_offsets.diff()
        x = add_position_time_embeddings(
            parts.concat([contexts, history, targets]),
            offsets,
            self.position,
            time_table=self.time,
            timestamps=parts.concat(_timestamps(batch)),
            query_timestamps=batch.request_timestamps,
            num_targets=num_targets,
            contextual_seq_len=len(CONTEXTS),
            scale=math.sqrt(self.config.dim),
        )
        x = F.dropout(x, self.config.dropout, self.training)
        x = self.stack(x.to(self.compute_dtype), offsets, self.max_rows, num_targets=num_targets)
        logits: Tensor = self.head(parts.part(x, 2).float())
        return logits


def _timestamps(batch: RankingBatch) -> list[Tensor]:
    """Returns the times of the rows of contexts, of history and of candidates.

    Contexts and candidates have the time of the request, because it is unknown when a candidate
    was really looked at.
    """
    request = batch.request_timestamps
    windows = jagged_ids(batch.target_offsets, len(batch.target_items)).clamp(max=len(request) - 1)
    return [
        request.repeat_interleave(len(CONTEXTS)),
        batch.history_timestamps.repeat_interleave(2),
        request[windows],
    ]


def task_labels(config: RankingConfig, actions: Tensor) -> Tensor:
    """Converts action bits `(n,)` to labels of the tasks, `(n, tasks)` fp32 zeros and ones."""
    labels = unpack_actions(actions).unbind(1)
    return torch.stack([labels[config.actions.index(task)] for task in config.tasks], dim=1)


def ranking_loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Returns the binary cross-entropy of each candidate, a weighted sum over tasks.

    Args:
        logits: `(targets, tasks)` fp32.
        labels: `(targets, tasks)` fp32, zeros and ones.
        weights: `(tasks,)` fp32.

    Returns:
        `(targets,)` fp32.
    """
    return F.binary_cross_entropy_with_logits(logits, labels, reduction="none") @ weights


def save_ranking_model(
    path: Path,
    model: RankingModel,
    parameters: Mapping[str, Tensor] | None = None,
    validation: Mapping[str, float] | None = None,
    log: EventLog | None = None,
) -> None:
    """Writes the model to a file, and replaces an existing one.

    Args:
        path: the path of the file.
        model: the model, whose parameters may be sharded over processes.
        parameters: the full state dict, with the names of a single process; None is the model's.
        validation: the model's validation metrics, by name.
        log: the log whose ids of items and users the file gets; a server needs them.
    """
    state: dict[str, Any] = {
        "ranking": asdict(model.config),
        "compute_dtype": str(model.compute_dtype).removeprefix("torch."),
        "model": dict(model.state_dict() if parameters is None else parameters),
        "validation": dict(validation or {}),
    }
    if log is not None:
        for name, ids in (("item_ids", log.source_item_ids), ("user_ids", log.source_user_ids)):
            state[name] = torch.tensor(ids) if isinstance(ids[0], int) else list(ids)
    write_state(path, state)


def load_ranking_model(
    path: Path, device: torch.device, compute_dtype: torch.dtype | None = None
) -> RankingModel:
    """Loads a model that `save_ranking_model` has written, in evaluation mode.

    Args:
        path: the path of the file.
        device: the device of the model.
        compute_dtype: the dtype of the layers; None is as in training.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else.
    """
    return ranking_model_of(read_ranking_model(path), device, compute_dtype)


def ranking_model_of(
    state: Mapping[str, Any], device: torch.device, compute_dtype: torch.dtype | None = None
) -> RankingModel:
    """Returns the model of what `read_ranking_model` returned, as `load_ranking_model` does."""
    config = RankingConfig(**state["ranking"])
    model = RankingModel(config, compute_dtype or getattr(torch, state["compute_dtype"]))
    model.load_state_dict(state["model"])
    return model.to(device).eval()


def read_ranking_model(path: Path) -> dict[str, Any]:
    """Returns what `save_ranking_model` wrote, its tensors mapped from the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else.
    """
    state: Any = torch.load(path, "cpu", weights_only=True, mmap=True)
    if not isinstance(state, dict) or not {"ranking", "compute_dtype", "model"} <= set(state):
        raise ValueError(f"{path} is not a model that train_ranking.py has saved")
    return state
