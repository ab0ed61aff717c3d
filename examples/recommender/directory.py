"""The directory of a run, `--out`: its files, and whether this run may write into it.

    run.json        the options and data of the run; a run that continues it must share them
    baselines.json  the metrics of the baselines, which are measured once for each run
    checkpoints/    the checkpoints from which the run continues
    best.pt         the model with the best validation metrics so far
    history.json    losses and metrics of validation, or of the test with `--protocol published`;
                    curves.png and tensorboard/ show them
    metrics.json    the result of the test, written when the run is finished

No command removes or replaces these files of another run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from recommender.options import Options

__all__ = ["BASELINES", "RUN", "BaselineMetrics", "check_directory", "difference", "read_json"]

RUN, BASELINES = "run.json", "baselines.json"

# A run that was started before these options existed was made with these values of them.
EARLIER_VALUES = {
    "model": "hstu",
    "schedule": "cosine",
    "negatives_per": "batch",
    "relative_bias": "time",
    "exclude": "seen",
    "protocol": "validated",
    "catalog": "log",
    "ties": "log",
    "smooth_k": True,
}


class BaselineMetrics(TypedDict):
    """Metrics of each baseline by name, and what else a table says of them."""

    validation: dict[str, dict[str, float]]
    test: dict[str, dict[str, float]]
    note: str


def _held_by(out: Path) -> list[str]:
    """Lists the names of the checkpoints and results in a directory."""
    # A name that ends in ".writing" is of a checkpoint that is not whole.
    names = [path.name for path in (out / "checkpoints").glob("step-*")]
    has_checkpoints = any(not name.endswith(".writing") for name in names)
    found = ["checkpoints"] if has_checkpoints else []
    return found + [x for x in ("best.pt", "history.json", "metrics.json") if (out / x).exists()]


def read_json(path: Path) -> Any:
    """Reads a JSON file; returns None if there is no file.

    Raises:
        ValueError: the file is not JSON.
    """
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON; got {error}") from error


def difference(made_with: Mapping[str, Any], wanted: Mapping[str, Any], out: Path) -> str | None:
    """Says in what this run differs from the one in `out` that it is to continue.

    Args:
        made_with: options and data of the run in `out`, by name.
        wanted: the options and data of this run that must be the same.
        out: the directory.

    Returns:
        None if they are the same.
    """
    earlier = dict(EARLIER_VALUES)
    if made_with.get("keep_seen"):  # of a run from before --exclude
        earlier["exclude"] = "nothing"
    for name, value in wanted.items():
        of_run = made_with.get(name, earlier.get(name))
        if of_run != value:
            return (
                f"--resume: the run in {out} was made with {name} = {of_run!r}, this "
                f"run has {value!r}; train that one with another --out"
            )
    return None


def check_directory(options: Options) -> None:
    """Raises an error for a directory with a run, unless `--resume` continues it with its options.

    It runs before the data are read, and makes the directory if there is none.

    Raises:
        OSError: the directory cannot be made.
        ValueError: it holds a run; naming what it holds, and what can be done.
    """
    out = options.out
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out: expected a directory; got the file {out}")
    out.mkdir(parents=True, exist_ok=True)
    held = _held_by(out)
    if not options.resume:
        if held:
            raise ValueError(
                f"--out: expected a directory without a run; got {out}, which holds "
                f"{', '.join(held)}. Add --resume to continue that run (a finished one is only "
                "evaluated again, or trained on with more --epochs), or name another --out for a "
                "new one"
            )
        return
    made_with = read_json(out / RUN)
    if made_with is not None:
        if problem := difference(made_with, options.identity(), out):
            raise ValueError(problem)
    elif held and "checkpoints" not in held:
        raise ValueError(
            f"--resume: expected {out} to hold a checkpoint; got {', '.join(held)} alone, which a "
            "new run would replace. Name another --out for it"
        )
