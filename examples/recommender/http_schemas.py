"""The types of requests and answers; FastAPI checks requests by these, and documents both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model

__all__ = [
    "MAX_CANDIDATES",
    "MAX_EVENTS",
    "MAX_K",
    "MODEL_PATHS",
    "START_HEADER",
    "Problem",
    "State",
    "Strict",
    "UserBody",
    "engine_events",
    "ranking_schemas",
    "retrieval_schemas",
]

MODEL_PATHS = ("/score", "/recommend", "/rank")
START_HEADER = "X-Request-Start"
"""The time when a proxy got the request, in nginx's form: "t=" and the seconds since 1970."""
MAX_EVENTS = 1000
MAX_CANDIDATES = 1000
MAX_K = 1000
LONGEST_ID = 64  # characters of an id that is text

Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Text = Annotated[str, Field(min_length=1, max_length=LONGEST_ID)]
Id = TypeVar("Id", int, str)
Count = Annotated[int, Field(ge=0, lt=2**62)]
EVENTS_BEFORE = (
    "How many events the user has had in all, those of this request included, which the model "
    "reads; null is as many as the server keeps, at most the model's longest history."
)
Time = Annotated[int, Field(ge=0, lt=2**62, description="In seconds.")]


class Strict(BaseModel):
    """Takes no other types than those named, and no fields that it does not know."""

    model_config = ConfigDict(extra="forbid", strict=True)


class EventBody(Strict, Generic[Id]):
    """An event: an item of the catalog, by the data set's id, and when, in seconds."""

    item: Id
    time: Time


class UserBody(Strict, Generic[Id]):
    """A user, what the user did since the last request, and when it is asked (None: just then)."""

    user: Id
    events: list[EventBody[Id]] = Field(default=[], max_length=MAX_EVENTS)
    time: Time | None = None
    request_id: Text | None = Field(
        default=None, description="The same for each attempt to make this request."
    )


class ScoreBody(UserBody[Id], Generic[Id]):
    """Asks for the scores of items."""

    candidates: list[Id] = Field(max_length=MAX_CANDIDATES)


class RecommendBody(UserBody[Id], Generic[Id]):
    """Asks for the best items of the catalog."""

    k: int = Field(default=10, ge=1, le=MAX_K)
    exclude_seen: bool = True


class ScoreAnswer(Strict, Generic[Id]):
    """A score for each candidate, in their order."""

    user: Id
    scores: list[float]


class ItemAnswer(Strict, Generic[Id]):
    """An item of the catalog and its score."""

    item: Id
    title: str
    score: float


class RecommendAnswer(Strict, Generic[Id]):
    """The best items, best first."""

    user: Id
    items: list[ItemAnswer[Id]]


class Problem(Strict):
    """The reason why a request was not answered."""

    detail: str


class State(Strict):
    """The state of the server: whether it does its work, and what waits."""

    status: str
    users: int
    queued: int


def retrieval_schemas(text_ids: bool) -> dict[str, type[BaseModel]]:
    """Returns the types of requests and answers of a retrieval model, by name.

    `text_ids` is whether the ids of users and items are text.
    """
    ids: Any = Text if text_ids else Int64
    generic: tuple[Any, ...] = ScoreBody, RecommendBody, ScoreAnswer, RecommendAnswer
    return {
        # The documentation needs names without the type argument.
        model.__name__: create_model(model.__name__, __base__=model[ids], __doc__=model.__doc__)
        for model in generic
    }


def ranking_schemas(
    text_ids: bool, actions: Sequence[str], tasks: Sequence[str]
) -> dict[str, type[BaseModel]]:
    """Returns the types of requests and answers of a ranking model, by name.

    Args:
        text_ids: whether the ids of users and items are text.
        actions: the names of the actions of users.
        tasks: the names of the predicted tasks.
    """
    ids: Any = Text if text_ids else Int64
    action: Any = Literal[tuple(actions)]
    event = create_model(
        "ActionEventBody",
        __base__=EventBody[ids],
        __doc__="An event, and what the user did about the item: any of the data's actions.",
        actions=(list[action], Field(default=[], max_length=len(actions))),
    )
    body = create_model(
        "RankBody",
        __base__=ScoreBody[ids],
        __doc__="Asks for what the user would do about items at that time.",
        events=(list[event], Field(default=[], max_length=MAX_EVENTS)),  # type: ignore[valid-type]
        events_before=(Count | None, Field(default=None, description=EVENTS_BEFORE)),
    )
    probabilities = create_model(
        "Probabilities",
        __base__=Strict,
        __doc__="Of each task, its probability for each candidate, in their order.",
        **dict.fromkeys(tasks, (list[float], ...)),  # type: ignore[call-overload]
    )
    answer = create_model(
        "RankAnswer",
        __base__=Strict,
        __doc__="What the user would do about the candidates.",
        user=(ids, ...),
        probabilities=(probabilities, ...),
    )
    return {"RankBody": body, "RankAnswer": answer}


def engine_events(
    events: Sequence[Any], items: Sequence[int], actions: Sequence[str] = ()
) -> list[tuple[int, int, int]]:
    """Returns the events of a body as an engine takes them.

    Args:
        events: the events of the body.
        items: the model's number of each event's item.
        actions: the names of the actions of users, one bit each; if empty, all events have the
            action 0.
    """
    bits = {action: 1 << bit for bit, action in enumerate(actions)}
    return [
        (item, event.time, sum(bits[action] for action in set(event.actions)) if bits else 0)
        for item, event in zip(items, events, strict=True)
    ]
