"""Saves and loads trained retrieval models as self-contained files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hstu_attn.layer import HSTULayerConfig
from recommender.checkpoint import write_state
from recommender.model import RetrievalModel

__all__ = ["SASREC", "SavedModel", "load_model", "save_model"]

SASREC = "SASRec"
"""The `kind` in files of SASRec models, which `load_model` refuses.

Files of `save_model` have no `kind`.
"""


class _OtherModelError(Exception):
    """A file holds a model of another kind."""


class SavedModel(NamedTuple):
    """A trained model and its catalog.

    Attributes:
        model: in evaluation mode.
        item_ids: `(num_items,)`, increasing: the data set's ids of the model's items, int64 or
            text.
        titles: one per item.
    """

    model: RetrievalModel
    item_ids: NDArray[np.int64] | NDArray[np.str_]
    titles: list[str]

    @property
    def has_text_ids(self) -> bool:
        """Returns whether the data set's item and user ids are text."""
        return self.item_ids.dtype.kind == "U"


def save_model(
    path: Path,
    model: RetrievalModel,
    item_ids: Sequence[int | str] | NDArray[np.int64],
    titles: Sequence[str],
    validation: Mapping[str, float] | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Saves the model and its catalog, as in `SavedModel`, and replaces an existing file.

    The file also holds the model's validation metrics by name. `weights` is the state dict to save;
    None is the state dict of `model`.
    """
    arguments = {
        "num_items": model.item_embedding.num_embeddings,
        "config": asdict(model.config),
        "num_layers": len(model.stack.layers),
        "max_seq_len": model.max_seq_len,
        "dropout_ratio": model.dropout_ratio,
        "l2_normalise": model.l2_normalize,  # the spelling in existing files
        "compute_dtype": str(model.compute_dtype).removeprefix("torch."),
    }
    state = {
        "arguments": arguments,
        "model": model.state_dict() if weights is None else dict(weights),
        "item_ids": np.asarray(item_ids).tolist(),
        "titles": list(titles),
        "validation": dict(validation or {}),
    }
    write_state(path, state)


def load_model(
    path: Path,
    device: torch.device,
    compute_dtype: torch.dtype | None = None,
    fp8: bool = True,
) -> SavedModel:
    """Loads a model that `save_model` has written.

    Args:
        path: the path of the file.
        device: the device of the model.
        compute_dtype: the dtype of the layers; None is as in training.
        fp8: whether a model trained in FP8 computes in FP8; a KV cache supports FP8 mode 1 only.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file holds no such model; the message says if it is a SASRec model.
    """
    with path.open("rb") as file:
        try:
            state: Any = torch.load(file, "cpu", weights_only=True)
            if state.get("kind") == SASREC:
                raise _OtherModelError
            arguments, item_ids, titles = (
                state[name] for name in ("arguments", "item_ids", "titles")
            )
            config = HSTULayerConfig(**arguments.pop("config"))
            if not fp8:
                config = replace(config, fp8=None)
            dtype = getattr(torch, arguments.pop("compute_dtype"))
            l2_normalize = arguments.pop("l2_normalise")
            model = RetrievalModel(
                **arguments,
                l2_normalize=l2_normalize,
                config=config,
                compute_dtype=compute_dtype or dtype,
            )
            model.load_state_dict(state["model"])
        except _OtherModelError:
            raise ValueError(
                f"{path}: expected an HSTU model, as train_retrieval.py --model hstu saves it, "
                "which alone is served; got a SASRec model (--model sasrec)"
            ) from None
        except Exception as error:  # torch.load raises errors of many classes for foreign files
            raise ValueError(
                f"{path} is not a model that train_retrieval.py has saved, or is damaged "
                f"({type(error).__name__})"
            ) from error
    return SavedModel(model.to(device).eval(), np.array(item_ids), titles)
