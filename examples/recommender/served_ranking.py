"""The interface of the ranking model for the serving engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hstu_attn.serving import Requests
from recommender.ranking import RankingModel, ranking_model_of, read_ranking_model
from recommender.ranking_data import CONTEXTS, RankingBatch, context_rows, hashed_rows

__all__ = ["SavedRanking", "ServedRanking", "is_ranking_model", "load_saved_ranking"]


USERS = "embeddings.tables.user.weight"


class SavedRanking(NamedTuple):
    """A trained ranking model and the ids of its items and users.

    Attributes:
        model: the model in evaluation mode. Its user embedding table has one more row than in
            training: the mean of the other rows, for users unknown in training.
        item_ids: `(num_items,)`, increasing: the data set's ids of the model's items, int64 or
            text.
        user_ids: `(num_users,)`, increasing: the data set's ids of the users in training, int64 or
            text.
    """

    model: RankingModel
    item_ids: NDArray[np.int64] | NDArray[np.str_]
    user_ids: NDArray[np.int64] | NDArray[np.str_]

    @property
    def has_text_ids(self) -> bool:
        """Returns whether the data set's item and user ids are text."""
        return self.item_ids.dtype.kind == "U"


def is_ranking_model(path: Path) -> bool:
    """Returns whether a file holds what train_ranking.py saves; False for any other file."""
    try:
        read_ranking_model(path)
    except Exception:  # torch.load raises errors of many classes for foreign files
        return False
    return True


def load_saved_ranking(
    path: Path, device: torch.device, compute_dtype: torch.dtype | None = None
) -> SavedRanking:
    """Loads a model that train_ranking.py has saved, and appends a row for new users.

    Args:
        path: the path of the file.
        device: the device of the model.
        compute_dtype: the dtype of the layers; None is as in training.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file holds no ranking model, is damaged, or lacks the ids of the data.
    """
    try:
        state = read_ranking_model(path)
        users = state["model"][USERS]
        state["model"][USERS] = torch.cat([users, users.mean(0, keepdim=True)])
        state["ranking"]["sizes"]["user"] += 1
        model = ranking_model_of(state, device, compute_dtype)
    except (RuntimeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a model that train_ranking.py has saved, or is damaged "
            f"({type(error).__name__})"
        ) from error
    if not {"item_ids", "user_ids"} <= set(state):
        raise ValueError(
            f"{path}: expected a model with the ids of its items and users, as train_ranking.py "
            "saves it now; got one without them: train it again"
        )
    ids = (state[name] for name in ("item_ids", "user_ids"))
    return SavedRanking(model, *(x.numpy() if isinstance(x, Tensor) else np.array(x) for x in ids))


class ServedRanking:
    """A trained model as a `hstu_attn.serving.UncachedModel`, with a score for each task.

    The contextual rows attend to the whole history and change with each request, as do the ages of
    the events, so nothing can be cached between requests.

    The `context` of a request is the number of events that the user has had, which is a contextual
    feature; None is the length of the history.

    Args:
        saved: the trained model; its limit on rows per sequence is adjusted to `max_candidates`.
        max_candidates: the most candidates of a request, which may be more than in training.
    """

    candidates_are_rows = True

    def __init__(self, saved: SavedRanking, max_candidates: int) -> None:
        self.model, config = saved.model.eval(), saved.model.config
        self.num_items = config.sizes["item"]
        self.num_actions = 1 << len(config.actions)
        self.max_history = config.max_history
        self.tasks = config.tasks
        self.user_ids = saved.user_ids
        self.new_user = config.sizes["user"] - 1
        self.model.max_rows = config.max_rows - config.max_targets + max_candidates

    def user_row(self, user: int | str) -> int:
        """Returns the row of a user's embedding."""
        if isinstance(user, str) != (self.user_ids.dtype.kind == "U"):
            return self.new_user
        if isinstance(user, int) and not -(2**63) <= user < 2**63:
            return self.new_user
        known: NDArray[Any] = self.user_ids
        place = int(np.searchsorted(known, user))
        if place == len(known) or known[place] != user:
            return self.new_user
        return int(hashed_rows(np.array([place]), len(known), self.new_user)[0])

    def batch(self, requests: Requests) -> RankingBatch:
        """Returns the requests as a batch of the form used in training, on the CPU."""
        users = np.array([self.user_row(user) for user in requests.users], np.int64)
        before = np.diff(requests.event_offsets)
        for number, told in enumerate(requests.contexts):
            if told is not None:
                before[number] = told
        contexts = context_rows(users, before, requests.times)
        assert contexts.shape == (len(users), len(CONTEXTS))
        items, times, actions = requests.events.T
        columns = (
            *(contexts, requests.event_offsets, items, actions, times, requests.times),
            *(requests.candidate_offsets, requests.candidates, np.zeros_like(requests.candidates)),
        )
        return RankingBatch(
            *(torch.from_numpy(np.ascontiguousarray(column, np.int64)) for column in columns)
        )

    def score_requests(self, requests: Requests) -> Tensor:
        """Returns the probability of each task for each candidate, `(n, tasks)` fp32."""
        device = self.model.position.device
        logits: Tensor = self.model(self.batch(requests).to(device))
        return logits.sigmoid()
