"""A cache of tuned baselines beside the preprocessed data, so that each is tuned once."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from recommender.directory import BaselineMetrics
from recommender.files import write_json

__all__ = ["cached_baselines"]


def cached_baselines(
    directory: Path, depends_on: Mapping[str, Any], measure: Callable[[], BaselineMetrics]
) -> BaselineMetrics:
    """Returns the metrics of the baselines from the cache, or computes and caches them.

    A file that is damaged, or has another `depends_on`, is replaced. If the directory cannot be
    written to, the metrics are not cached.

    Args:
        directory: the directory of the preprocessed data.
        depends_on: everything that the metrics depend on, by name, serializable as JSON.
        measure: computes the metrics.
    """
    path = directory / f"baselines-{_digest(depends_on)}.json"
    found = _read(path, depends_on)
    if found is not None:
        print(f"Baselines: tuned by an earlier run, read from {path}")
        return found
    metrics = measure()
    kept = {
        "depends_on": depends_on,
        "metrics": metrics,
        "digest": _digest([depends_on, metrics]),
    }
    try:
        write_json(path, kept)
    except OSError as error:
        print(f"Baselines: not kept for further runs: {error}", file=sys.stderr)
    return metrics


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _read(path: Path, depends_on: Mapping[str, Any]) -> BaselineMetrics | None:
    """Returns the metrics in a file that is whole and was made for `depends_on`, otherwise None."""
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(kept, dict) or "metrics" not in kept:
        return None
    metrics: BaselineMetrics = kept["metrics"]
    return metrics if kept.get("digest") == _digest([depends_on, metrics]) else None
