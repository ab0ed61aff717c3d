"""The served model: its items as the store numbers them, and its change while it is served."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from prometheus_client import Counter

from hstu_attn.serving import Engine, EventStore, PagedKVCache
from recommender.http_probe import read_probe
from recommender.saved import SavedModel, load_model
from recommender.serve_options import ServeOptions
from recommender.served import ServedRetrieval
from recommender.served_ranking import (
    SavedRanking,
    ServedRanking,
    is_ranking_model,
    load_saved_ranking,
)

__all__ = ["Models", "aligned", "load_served", "make_cache", "make_served"]

CATALOG = "catalogue"  # the note of a store that says what its items and actions are


def load_served(path: Path, bf16: bool, device: torch.device) -> SavedModel | SavedRanking:
    """Reads a model, of whichever kind it is; on a GPU, and with `bf16`, it computes in bf16.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else, or is damaged.
    """
    dtype = torch.bfloat16 if bf16 or device.type == "cuda" else None
    if is_ranking_model(path):
        return load_saved_ranking(path, device, dtype)
    return load_model(path, device, dtype, fp8=False)


def aligned(saved: SavedModel | SavedRanking, store: EventStore) -> SavedModel | SavedRanking:
    """Returns the model with its items numbered as the events of the store are.

    The store notes the ids of the first model that it is used with (`note_items`). A later model
    may have learned other items too, which are numbered after them. The model before it, which does
    not know those, is aligned as well.

    Raises:
        ValueError: the model knows neither all of the items nor those of a model before it, or has
            other actions.
        StoreError: the store cannot be read.
    """
    actions = list(saved.model.config.actions) if isinstance(saved, SavedRanking) else []
    note = store.note(CATALOG)
    noted = {"actions": actions, "items": []} if note is None else json.loads(note)
    if noted["actions"] != actions:
        raise ValueError(
            f"--store: expected a model with the actions of its events, {noted['actions']}; got "
            f"{actions}: name another store"
        )
    ids = saved.item_ids.tolist()
    order = noted["items"][: len(ids)]
    if set(order) != set(ids):
        known = set(noted["items"])
        order = noted["items"] + [item for item in ids if item not in known]
    return reordered(saved, order)


def note_items(saved: SavedModel | SavedRanking, store: EventStore) -> None:
    """Notes the items and actions of an `aligned` model, whose events are stored from then on.

    Items that a later model has noted stay.

    Raises:
        ValueError: another model has noted others since the model was aligned.
        StoreError: the store cannot be read or written.
    """
    actions = list(saved.model.config.actions) if isinstance(saved, SavedRanking) else []
    ids = saved.item_ids.tolist()
    mine = json.dumps({"actions": actions, "items": ids}).encode()
    while True:  # until no other process notes others meanwhile
        note = store.note(CATALOG)
        noted = {"actions": actions, "items": []} if note is None else json.loads(note)
        items = noted["items"]
        if noted["actions"] != actions or items[: len(ids)] != ids[: len(items)]:
            raise ValueError(
                "--store: expected the items and actions that the model was aligned with, got "
                "others: another model has been started meanwhile; start this one again"
            )
        if len(items) >= len(ids) or store.replace_note(CATALOG, note, mine):
            return


def names_of(saved: SavedModel | SavedRanking) -> dict[str, tuple[str, ...]]:
    """Returns what a ranking model predicts, and what it reads; a retrieval model has no names."""
    config = saved.model.config if isinstance(saved, SavedRanking) else None
    return {
        "tasks": () if config is None else config.tasks,
        "actions": () if config is None else config.actions,
    }


def reordered(
    saved: SavedModel | SavedRanking, order: Sequence[int | str]
) -> SavedModel | SavedRanking:
    """Returns the model with its items in another order.

    Raises:
        ValueError: the model has other items; a ranking model, which looks some of them up by a
            hash of their numbers, has them in another order.
    """
    numbers = {item: number for number, item in enumerate(saved.item_ids.tolist())}
    if list(numbers) == list(order):
        return saved
    lacking = [item for item in order if item not in numbers]
    if lacking or len(order) != len(numbers):
        raise ValueError(
            f"expected a model of the {len(order)} items of the events, got one of {len(numbers)} "
            f"that lacks {len(lacking)} of them: start the server with it, and with another --store"
        )
    if isinstance(saved, SavedRanking):
        raise ValueError("expected a ranking model with its items in the order of the events'")
    rows = [numbers[item] for item in order]
    with torch.no_grad():
        table = saved.model.item_embedding.weight
        table.copy_(table[torch.tensor(rows, device=table.device)])
    return SavedModel(saved.model, np.array(order), [saved.titles[row] for row in rows])


def make_served(
    saved: SavedModel | SavedRanking, max_candidates: int
) -> ServedRetrieval | ServedRanking:
    """Returns what an engine serves."""
    if isinstance(saved, SavedRanking):
        return ServedRanking(saved, max_candidates)
    return ServedRetrieval(saved.model)


def make_cache(options: ServeOptions, served: ServedRetrieval) -> PagedKVCache:
    """Returns a cache of the size that the options name.

    Raises:
        ValueError: it is too small for one history.
    """
    config, dtype = served.stack.config, served.model.compute_dtype
    layers = len(served.stack.layers)
    row_bytes = 2 * layers * config.num_heads * config.dqk * dtype.itemsize
    page_bytes = row_bytes * options.page_size
    pages = options.cache_mib * 2**20 // page_bytes
    needed = -(-served.max_history // options.page_size)
    if pages < needed:
        raise ValueError(
            f"--cache-mib: expected at least {-(-needed * page_bytes // 2**20)}, which holds a "
            f"history of {served.max_history} events; got {options.cache_mib}"
        )
    device = served.model.item_embedding.weight.device
    return PagedKVCache(
        layers, pages, options.page_size, config.num_heads, config.dqk, dtype, device
    )


def page_shape(served: ServedRetrieval) -> tuple[object, ...]:
    """Returns what two models that can be served from one cache have in common."""
    config = served.stack.config
    return len(served.stack.layers), config.num_heads, config.dqk, served.model.compute_dtype


class Models:
    """Changes the model of an engine, one change at a time.

    Args:
        options: name the file of the model, and the size of a cache.
        saved: the served model.
        engine: serves it.
        max_candidates: how many a request may have.

    Attributes:
        changes: counts the models that have taken over, and those that could not.
    """

    def __init__(
        self,
        options: ServeOptions,
        saved: SavedModel | SavedRanking,
        engine: Engine,
        max_candidates: int,
    ) -> None:
        self._options = options
        self._items: Sequence[int | str] = saved.item_ids.tolist()
        self._names = names_of(saved)
        self._device = next(saved.model.parameters()).device
        self._engine = engine
        self._max_candidates = max_candidates
        self._lock = threading.Lock()
        self.changes = Counter(
            "hstu_model_changes",
            "Models that were to take over, by whether they have.",
            ["outcome"],
            registry=None,
        )
        self._taken_over = self.changes.labels(outcome="taken over")
        self._refused = self.changes.labels(outcome="refused")

    def load_and_swap(self, path: Path | None = None) -> Path:
        """Lets the model of a file take over, once it has been checked and is ready.

        A model with other layers gets a second cache, of the same size; the first one is kept for
        the way back.

        Args:
            path: None is the file that the options name, which may have been written again.

        Returns:
            The file.

        Raises:
            OSError: the file, or that of the probe, cannot be read.
            ValueError: it is damaged, or its model is another or not sound; nothing has changed.
            RuntimeError: the device has no memory for it; nothing has changed.
        """
        path = path or self._options.model
        with self._lock, self._refused.count_exceptions():
            saved = load_served(path, self._options.bf16, self._device)
            for what, names in names_of(saved).items():
                if names != (expected := self._names[what]):
                    raise ValueError(
                        f"{path}: expected a model with the {what} of the served one, "
                        f"{', '.join(expected) or 'none'}; got {', '.join(names) or 'none'}"
                    )
            try:
                saved = reordered(saved, self._items)
                served = make_served(saved, self._max_candidates)
                cache = None
                if isinstance(served, ServedRetrieval) and not self._fits(served):
                    cache = make_cache(self._options, served)
                probe = read_probe(self._options.probe, saved)
                self._engine.swap(served, cache=cache, probe=probe)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
            self._taken_over.inc()
        return path

    def _fits(self, served: ServedRetrieval) -> bool:
        """Returns whether a model can be served from the cache of the served one."""
        old = self._engine.model
        # Where the served model is of another kind, the engine says what is wrong.
        return not isinstance(old, ServedRetrieval) or page_shape(old) == page_shape(served)

    def roll_back(self) -> None:
        """Lets the model of before the last change take over again.

        Raises:
            ValueError: there is none.
        """
        with self._lock:
            self._engine.roll_back()
            self._taken_over.inc()
