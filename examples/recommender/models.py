"""Loads served models, numbers their items as the store does, and swaps them while serving."""

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

CATALOG = "catalogue"  # key of the store's note about its items and actions


def load_served(path: Path, bf16: bool, device: torch.device) -> SavedModel | SavedRanking:
    """Loads a retrieval or ranking model, which computes in bf16 on a GPU or with `bf16`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file holds no such model, or is damaged.
    """
    dtype = torch.bfloat16 if bf16 or device.type == "cuda" else None
    if is_ranking_model(path):
        return load_saved_ranking(path, device, dtype)
    return load_model(path, device, dtype, fp8=False)


def aligned(saved: SavedModel | SavedRanking, store: EventStore) -> SavedModel | SavedRanking:
    """Returns the model with its items numbered as in the events of the store.

    The store keeps the item ids of the first model that it is used with (`note_items`). A later
    model may have more items, which get the next numbers. An earlier model, which does not have
    these items, can still be aligned.

    Raises:
        ValueError: the model has neither all items of the store nor exactly those of an earlier
            model, or it has other actions.
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
    """Writes the items and actions of an `aligned` model to the store, before its events.

    The items of a later model stay in the store.

    Raises:
        ValueError: another model has written other items or actions since this one was aligned.
        StoreError: the store cannot be read or written.
    """
    actions = list(saved.model.config.actions) if isinstance(saved, SavedRanking) else []
    ids = saved.item_ids.tolist()
    mine = json.dumps({"actions": actions, "items": ids}).encode()
    while True:  # until no other process writes the note meanwhile
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
    """Returns the names of a ranking model's tasks and actions; a retrieval model has none."""
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
        ValueError: the model has other items, or is a ranking model with another order, which
            cannot change because some items are looked up by a hash of their numbers.
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
    """Returns the model in the form that an engine serves."""
    if isinstance(saved, SavedRanking):
        return ServedRanking(saved, max_candidates)
    return ServedRetrieval(saved.model)


def make_cache(options: ServeOptions, served: ServedRetrieval) -> PagedKVCache:
    """Returns a cache for keys and values, of the size in the options.

    Raises:
        ValueError: the cache is too small for one history.
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
    """Returns the cache layout of a model; models with equal layouts can share a cache."""
    config = served.stack.config
    return len(served.stack.layers), config.num_heads, config.dqk, served.model.compute_dtype


class Models:
    """Swaps the model of an engine, one swap at a time.

    Args:
        options: the options, with the file of the model and the size of a cache.
        saved: the served model.
        engine: the engine that serves the model.
        max_candidates: the most candidates of a request.

    Attributes:
        changes: counts the swaps by outcome: taken over or refused.
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
        """Loads the model of a file, checks it, and swaps it in once it is ready.

        A model with another cache layout gets a second cache, of the same size; the first cache is
        kept for a rollback.

        Args:
            path: the file; None is the file in the options, which may have been rewritten.

        Returns:
            The path of the file.

        Raises:
            OSError: the file or the file of the probe cannot be read.
            ValueError: the file is damaged, or its model does not fit the served model or fails its
                checks; nothing has changed.
            RuntimeError: the device has no memory for the model; nothing has changed.
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
        """Returns whether a model can use the cache of the model that is served now."""
        old = self._engine.model
        # If the served model is of another kind, the engine raises the error.
        return not isinstance(old, ServedRetrieval) or page_shape(old) == page_shape(served)

    def roll_back(self) -> None:
        """Swaps the previous model back in.

        Raises:
            ValueError: there is no model to go back to.
        """
        with self._lock:
            self._engine.roll_back()
            self._taken_over.inc()
