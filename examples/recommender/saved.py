"""Trained models in files that hold all that is needed to use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from hstu_attn.layer import HSTULayerConfig
from recommender.checkpoint import write_state
from recommender.model import RetrievalModel

__all__ = ["SavedModel", "load_model", "save_model"]


class SavedModel(NamedTuple):
    """A trained model and its catalogue.

    Attributes:
        model: in evaluation mode.
        item_ids: ``(num_items,)`` int64, increasing: the data set's ids of the model's items.
        titles: one per item.
    """

    model: RetrievalModel
    item_ids: NDArray[np.int64]
    titles: list[str]


def save_model(
    path: Path, model: RetrievalModel, item_ids: NDArray[np.int64], titles: Sequence[str]
) -> None:
    """Writes the model and its catalogue, as in :class:`SavedModel`, in place of what was there."""
    arguments = {
        "num_items": model.item_embedding.num_embeddings,
        "config": asdict(model.config),
        "num_layers": len(model.stack.layers),
        "max_seq_len": model.max_seq_len,
        "dropout_ratio": model.dropout_ratio,
        "l2_normalise": model.l2_normalise,
        "compute_dtype": str(model.compute_dtype).removeprefix("torch."),
    }
    state = {
        "arguments": arguments,
        "model": model.state_dict(),
        "item_ids": torch.tensor(item_ids),
        "titles": list(titles),
    }
    write_state(path, state)


def load_model(
    path: Path, device: torch.device, compute_dtype: torch.dtype | None = None
) -> SavedModel:
    """Reads what :func:`save_model` wrote.

    Args:
        path: of the file.
        device: of the model.
        compute_dtype: of the layers; None is as in training.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else.
    """
    state: Any = torch.load(path, device, weights_only=True)
    if not isinstance(state, dict) or not {"arguments", "model", "item_ids", "titles"} <= set(
        state
    ):
        raise ValueError(f"{path} is not a model that train_retrieval.py has saved")
    arguments = state["arguments"]
    model = RetrievalModel(
        **{
            **arguments,
            "config": HSTULayerConfig(**arguments["config"]),
            "compute_dtype": compute_dtype or getattr(torch, arguments["compute_dtype"]),
        }
    )
    model.load_state_dict(state["model"])
    return SavedModel(model.to(device).eval(), state["item_ids"].cpu().numpy(), state["titles"])
