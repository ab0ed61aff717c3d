"""The file of `--probe`: a request with its answer, which a model must pass before it is served."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, create_model

from hstu_attn.serving import Probe
from recommender.http_schemas import Strict, engine_events, ranking_schemas, retrieval_schemas
from recommender.saved import SavedModel
from recommender.served_ranking import SavedRanking

__all__ = ["read_probe"]


def read_probe(path: Path | None, saved: SavedModel | SavedRanking) -> Probe | None:
    """Reads a probe: JSON with `body`, `answer` and `tolerance`; the last two may be missing.

    `body` is a request body of POST /score or POST /rank that has all of the user's events, and
    `answer` is its answer.

    Args:
        path: the path of the file; None is no probe.
        saved: a model of the probed kind, which has the ids and names of the data.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no probe, or has items that the model does not know.
    """
    if path is None:
        return None
    actions: tuple[str, ...] = ()
    if isinstance(saved, SavedRanking):
        actions, tasks = saved.model.config.actions, saved.model.config.tasks
        schemas = ranking_schemas(saved.has_text_ids, actions, tasks)
        body_type, answer_type = schemas["RankBody"], schemas["RankAnswer"]
    else:
        schemas = retrieval_schemas(saved.has_text_ids)
        body_type, answer_type = schemas["ScoreBody"], schemas["ScoreAnswer"]
    optional: Any = answer_type | None
    file_type: Any = create_model(
        "ProbeFile",
        __base__=Strict,
        body=(body_type, ...),
        answer=(optional, None),
        tolerance=(Annotated[float, Field(ge=0, allow_inf_nan=False)], Probe.tolerance),
    )
    try:
        read = file_type.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ValueError(f"--probe: {path}: {place}: {first['msg']}") from error
    body, numbers = read.body, {item: n for n, item in enumerate(saved.item_ids.tolist())}
    items, candidates = [event.item for event in body.events], body.candidates
    if unknown := {*items, *candidates} - {*numbers}:
        raise ValueError(
            f"--probe: {path}: expected items that the model knows, got {min(unknown)!r}"
        )
    expected: Any = None
    if read.answer is not None and isinstance(saved, SavedRanking):
        columns = [getattr(read.answer.probabilities, task) for task in tasks]
        expected = [*zip(*columns, strict=True)]
    elif read.answer is not None:
        expected = read.answer.scores
    return Probe(
        engine_events(body.events, [numbers[item] for item in items], actions),
        [numbers[item] for item in candidates],
        at=body.time,
        expected=expected,
        tolerance=read.tolerance,
        user=body.user,
        context=getattr(body, "events_before", None),
    )
