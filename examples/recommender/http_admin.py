"""The HTTP paths of administrators: changes of the model, and deletion."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Annotated, Any, Generic

from fastapi import APIRouter, HTTPException
from pydantic import BaseModel, ConfigDict, Field, create_model

from hstu_attn.serving import EventStore, StoreError
from recommender.http_schemas import Id
from recommender.models import Models

__all__ = ["add_admin"]

LOG = logging.getLogger("recommender.server")


class Done(BaseModel):
    """The answer of a path that has changed something."""

    done: str


class Forget(BaseModel, Generic[Id]):
    """The user whose events are deleted."""

    model_config = ConfigDict(extra="forbid", strict=True)
    user: Id


class Prune(BaseModel):
    """The events to delete: those before a time, and all but the latest of each user."""

    model_config = ConfigDict(extra="forbid", strict=True)
    before: Annotated[int, Field(ge=0, lt=2**62)] = 0
    latest: Annotated[int, Field(ge=0)] | None = None


def add_admin(
    router: APIRouter,
    store: EventStore,
    text_ids: bool,
    forget: Callable[[int | str], None],
    prune: Callable[..., int],
    models: Models | None,
) -> None:
    """Adds paths to those that ask for an administrator's token.

    `text_ids` is whether the ids of users are text; no user has one of the other kind.

    POST /model           switches to the model that has been written to the file of --model
    POST /model/previous  switches back to the previous model; both need `models`
    POST /forget          user -> deletes a user's events
    POST /prune           before, latest -> deletes old events of all users
    POST /compact         rewrites the store's files, without what was deleted

    Each path answers when its work is done. 409 explains why a model cannot be served; nothing has
    changed then.
    """

    async def do(what: Callable[[], Any]) -> Any:
        try:
            return await asyncio.to_thread(what)
        except StoreError as error:
            LOG.error("An administrator's request failed: %s", error)
            raise
        except (OSError, ValueError) as error:
            LOG.error("An administrator's request changed nothing: %s", error)
            raise HTTPException(409, f"Nothing has changed: {error}") from error

    if models is not None:

        @router.post("/model", response_model=Done)
        async def load() -> Done:
            return Done(done=f"The model of {await do(models.load_and_swap)} has taken over")

        @router.post("/model/previous", response_model=Done)
        async def roll_back() -> Done:
            await do(models.roll_back)
            return Done(done="The model of before has taken over")

    async def forget_user(body: Any) -> Done:
        await do(lambda: forget(body.user))
        return Done(done="The user's events are deleted")

    ids: Any = str if text_ids else int
    forget_user.__annotations__["body"] = create_model("Forget", __base__=Forget[ids])
    router.post("/forget", response_model=Done)(forget_user)

    @router.post("/prune", response_model=Done)
    async def prune_users(body: Prune) -> Done:
        count = await do(lambda: prune(before=body.before, latest=body.latest))
        return Done(done=f"Old events of {count} users are deleted")

    @router.post("/compact", response_model=Done)
    async def compact() -> Done:
        await do(store.compact)
        return Done(done="The store's files are being, or have been, rewritten")
