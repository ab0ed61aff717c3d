"""An engine over HTTP: scores, recommendations and predictions as JSON, health, and metrics."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from hstu_attn.serving import (
    DeadlineError,
    Engine,
    EngineClosedError,
    EventOrderError,
    EventTimeError,
    NoHistoryError,
    OverloadedError,
    RequestOptions,
    StoreError,
)
from recommender.http_access import ARRIVED, BEARER, CLIENT, Access, Guard, overloaded
from recommender.http_admin import add_admin
from recommender.http_metrics import Metrics, OfReplicas
from recommender.http_schemas import (
    START_HEADER,
    Problem,
    State,
    engine_events,
    ranking_schemas,
    retrieval_schemas,
)
from recommender.models import Models
from recommender.rate_limited_log import RateLimitedLog
from recommender.saved import SavedModel
from recommender.serve_options import MAX_BODY_BYTES
from recommender.served_ranking import SavedRanking

__all__ = ["Service", "make_app"]

LOG = logging.getLogger("recommender.server")
RARE = RateLimitedLog(LOG)
SECONDS = "hstu_attn.seconds"  # a key of a request's scope: the time in which it is to be answered
WRONG_EVENTS: dict[type[Exception], tuple[str, str]] = {
    NoHistoryError: ("no_history", "The user is new: at least one event is needed"),
    EventOrderError: (
        "event_order",
        "Events are oldest first, and none is older than the user's last stored one",
    ),
}
MAX_ERRORS = 20  # a 422 names no more
STUCK_SECONDS = 60.0
"""A batch that takes longer than this is not expected to end."""
STORE_SECONDS = 1.0
"""A store that answers later is taken for one that does not."""
Answer = TypeVar("Answer")
TIMEOUT_HEADER = "X-Request-Timeout-Ms"
START_PATTERN = r"t=[0-9]{1,12}(\.[0-9]{1,9})?"
TIMEOUT: dict[str, Any] = {
    "name": TIMEOUT_HEADER,
    "in": "header",
    "description": "In how many milliseconds the answer is of use; at most the server's timeout.",
    "schema": {"type": "number", "exclusiveMinimum": 0},
}
START: dict[str, Any] = {
    "name": START_HEADER,
    "in": "header",
    "description": "When a proxy got the request, in seconds since 1970: time counts from then.",
    "schema": {"type": "string", "pattern": f"^{START_PATTERN}$", "example": "t=1764184221.125"},
}
PROBLEMS: dict[int | str, dict[str, Any]] = {
    401: {"model": Problem, "description": "A client's token is needed."},
    413: {"model": Problem, "description": "The body is too large."},
    503: {"model": Problem, "description": "There is too much to do; Retry-After says until when."},
    504: {"model": Problem, "description": "There was no answer in time; there was no effect."},
}


class Service(NamedTuple):
    """The engine and the saved model that answer the paths of a model.

    Attributes:
        engine: serves the saved model.
        saved: the saved model, for its items and titles.
        timeout: seconds that a request may take.
        index_of: the model's item of each of the data set's ids.
    """

    engine: Engine
    saved: SavedModel | SavedRanking
    timeout: float
    index_of: dict[int | str, int]

    def indices(self, items: Iterable[int | str], *path: str) -> list[int]:
        """Returns the model's item numbers of the ids in a list, or in a field of its elements."""
        found = []
        for place, item in enumerate(items):
            if item not in self.index_of:
                where = ["body", path[0], place, *path[1:]]
                raise invalid(where, "unknown_item", "Item is not in the catalog")
            found.append(self.index_of[item])
        return found

    def options(self, request: Request, body: Any) -> RequestOptions:
        """Returns the engine's options for a request: its client, time and deadline."""
        # NOTE: not parameters of the path, which cost FastAPI a tenth of a request's time.
        seconds, arrived = self.timeout, request.scope[ARRIVED]
        if (text := request.headers.get(TIMEOUT_HEADER)) is not None:
            asked = math.nan
            with suppress(ValueError):
                asked = float(text) / 1000
            if not asked > 0:  # NaN is not
                where = ["header", TIMEOUT_HEADER]
                raise invalid(where, "timeout", "Expected a positive number of milliseconds")
            seconds = min(seconds, asked)
        request.scope[SECONDS] = seconds
        if (text := request.headers.get(START_HEADER)) is not None:
            if not re.fullmatch(START_PATTERN, text):
                where = ["header", START_HEADER]
                raise invalid(where, "start", 'Expected "t=" and the seconds since 1970')
            here = time.monotonic() - arrived
            # A clock that is behind the proxy's grants no more time.
            arrived -= max(time.time() - float(text.removeprefix("t=")) - here, 0.0)
        return {
            "at": body.time,
            "client": request.scope[CLIENT],
            "deadline": arrived + seconds,
            "request_id": body.request_id,
        }

    async def answer(self, future: Future[Answer], deadline: float) -> Answer:
        """Waits for an answer until the deadline.

        Raises:
            DeadlineError: there was no answer in time; the request had no effect.
            StoreError: there was no answer in time because the events were being stored. They may
                or may not have been stored.
        """
        wrapped = asyncio.wrap_future(future)
        done, _ = await asyncio.wait({wrapped}, timeout=max(deadline - time.monotonic(), 0.0))
        if not done:
            if future.cancel():
                raise DeadlineError
            if not future.done():
                wrapped.cancel()
                raise StoreError("store: expected an answer in time, got none")
        return await wrapped


def make_app(
    engine: Engine,
    saved: SavedModel | SavedRanking,
    timeout: float,
    access: Access | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    models: Models | None = None,
    forget: Callable[[int | str], None] | None = None,
    prune: Callable[..., int] | None = None,
    all_metrics: Callable[[], Mapping[str, Iterable[Metric]]] | None = None,
) -> FastAPI:
    """Returns the application.

    POST /score        user, events, candidates -> a score for each candidate
    POST /recommend    user, events, k, exclude_seen -> the best items, with titles and scores
    POST /rank         user, events, candidates -> each task's probability for each candidate
    GET  /live         200 unless the process should be replaced
    GET  /ready        200 while requests should come here
    GET  /health       200 while requests are accepted; HEAD likewise
    GET  /metrics      for Prometheus
    POST /admin/drain  an administrator: requests should not come here any more
    GET  /openapi.json the types of all of that; GET /docs shows them

    A retrieval model has the first two paths, a ranking model the third. Users and items are named
    by the data set's ids: numbers, or text if the saved model's ids are text. The status of an
    error is 422 for an invalid body, with the invalid places, 400 for a body that cannot be parsed,
    413 for a body that is too large, 401 for a wrong token, 503 with Retry-After for an overloaded
    server, and 504 for a timeout, in which case the request had no effect.

    `app.state.draining` is whether the server is draining: it still answers requests, but /ready
    answers 503. `app.state.registry` has the metrics of this process.

    Args:
        engine: serves the saved model; closed when the application shuts down.
        saved: the saved model, for its items and titles.
        timeout: seconds that a request may take; X-Request-Timeout-Ms may lower it.
        access: the tokens; None admits everybody as a client and nobody as an administrator.
        max_body_bytes: the size of the largest accepted body.
        models: changes the model; None leaves out the paths for this.
        forget: deletes a user's events; None is the engine's.
        prune: deletes old events, as `Engine.prune`; None is the engine's.
        all_metrics: returns a dict from the name of each replica to the result of its
            `app.state.metrics()`; None for a server without replicas.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    access = access or Access()
    app = FastAPI(title="hstu_attn", lifespan=lifespan)
    app.state.draining = False
    app.state.store = StoreProbe(engine)
    metrics = Metrics(engine, lambda: is_ready(app, engine))
    app.state.registry = metrics.registry
    if models is not None:
        metrics.registry.register(models.changes)

    async def own_metrics() -> list[Metric]:
        await app.state.store.ask()  # whether it answers is one of the metrics
        return [*metrics.registry.collect()]

    app.state.metrics = own_metrics
    app.add_middleware(
        Guard,
        access=access,
        metrics=metrics,
        max_body_bytes=max_body_bytes,
        check_load=engine.check_load,
    )
    ids: Sequence[int | str] = saved.item_ids.tolist()
    service = Service(engine, saved, timeout, {item: index for index, item in enumerate(ids)})
    # NOTE: paths are added to the application itself; those of a router take longer to be found.
    if isinstance(saved, SavedRanking):
        add_ranking(app, service, saved, access)
    else:
        add_retrieval(app, service, saved, ids, access)

    @app.get("/metrics", response_class=Response)
    async def show_metrics() -> Response:
        shown: Collector
        if all_metrics is not None:
            shown = OfReplicas(await asyncio.to_thread(all_metrics))
        else:
            shown = metrics.registry
            await app.state.store.ask()
        text = await asyncio.to_thread(generate_latest, shown)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    admin = APIRouter(prefix="/admin", dependencies=[Depends(access.require_admin)])

    @admin.post("/drain", response_model=State)
    async def drain() -> JSONResponse:
        app.state.draining = True
        return state_of(engine, "draining")

    deletion = (forget or engine.forget, prune or engine.prune)
    add_admin(admin, engine.store, saved.has_text_ids, *deletion, models)
    app.include_router(admin)
    add_health(app, engine)
    add_errors(app)
    return app


def add_path(
    app: FastAPI, endpoint: Callable[..., Any], body: type, answer: type, access: Access
) -> None:
    """Adds a path of a model under the name of its endpoint, whose `body` is given its type."""
    endpoint.__annotations__["body"] = body  # FastAPI checks the body by it
    extra: dict[str, Any] = {"parameters": [TIMEOUT, START]}
    if not access.is_open:  # the Guard checks it; this documents it
        extra["security"] = [{BEARER.scheme_name: []}]
    app.post(
        f"/{endpoint.__name__}",
        response_model=answer,
        responses=PROBLEMS,
        openapi_extra=extra,
    )(endpoint)


def add_retrieval(
    app: FastAPI, service: Service, saved: SavedModel, ids: Sequence[int | str], access: Access
) -> None:
    """Adds the paths of a retrieval model; `ids` are those of its items."""
    engine = service.engine

    def events_of(body: Any) -> list[tuple[int, int, int]]:
        items = service.indices((event.item for event in body.events), "events", "item")
        return engine_events(body.events, items)

    async def score(request: Request, body: Any) -> JSONResponse:
        candidates = service.indices(body.candidates, "candidates")
        options = service.options(request, body)
        future = engine.submit_score(body.user, events_of(body), candidates, **options)
        scores = await service.answer(future, options["deadline"])
        return JSONResponse({"user": body.user, "scores": scores.tolist()})

    async def recommend(request: Request, body: Any) -> JSONResponse:
        options = service.options(request, body)
        future = engine.submit_recommend(
            body.user, events_of(body), body.k, exclude_seen=body.exclude_seen, **options
        )
        best = await service.answer(future, options["deadline"])
        items = [
            {"item": ids[index], "title": saved.titles[index], "score": value}
            for index, value in zip(best.items.tolist(), best.scores.tolist(), strict=True)
        ]
        return JSONResponse({"user": body.user, "items": items})

    schemas = retrieval_schemas(saved.has_text_ids)
    add_path(app, score, schemas["ScoreBody"], schemas["ScoreAnswer"], access)
    add_path(app, recommend, schemas["RecommendBody"], schemas["RecommendAnswer"], access)


def add_ranking(app: FastAPI, service: Service, saved: SavedRanking, access: Access) -> None:
    """Adds the path of a ranking model."""
    config = saved.model.config

    async def rank(request: Request, body: Any) -> JSONResponse:
        candidates = service.indices(body.candidates, "candidates")
        items = service.indices((event.item for event in body.events), "events", "item")
        events = engine_events(body.events, items, config.actions)
        options = service.options(request, body)
        options["context"] = body.events_before
        future = service.engine.submit_score(body.user, events, candidates, **options)
        columns = (await service.answer(future, options["deadline"])).T.tolist()
        probabilities = dict(zip(config.tasks, columns, strict=True))
        return JSONResponse({"user": body.user, "probabilities": probabilities})

    schemas = ranking_schemas(saved.has_text_ids, config.actions, config.tasks)
    add_path(app, rank, schemas["RankBody"], schemas["RankAnswer"], access)


def add_health(app: FastAPI, engine: Engine) -> None:
    """Adds the paths that need no token."""
    unavailable: dict[int | str, dict[str, Any]] = {503: {"model": State}}

    @app.get("/live", response_model=State, responses=unavailable)
    async def live() -> JSONResponse:
        if not engine.alive:
            return state_of(engine, "dead", 503)
        stuck = engine.stats().running > STUCK_SECONDS
        return state_of(engine, "stuck", 503) if stuck else state_of(engine, "ok")

    @app.get("/ready", response_model=State, responses=unavailable)
    async def ready() -> JSONResponse:
        await app.state.store.ask()
        if is_ready(app, engine):
            return state_of(engine, "ok")
        if engine.closed:
            return state_of(engine, "closed", 503)
        return state_of(engine, "draining" if app.state.draining else "store", 503)

    @app.head("/health")
    @app.get("/health", response_model=State, responses=unavailable)
    async def health() -> JSONResponse:
        return state_of(engine, "closed", 503) if engine.closed else state_of(engine, "ok")


class StoreProbe:
    """Asks whether an engine's store can be read, by one thread at most."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers = True
        """Whether the latest probe could read the store."""
        self._task: asyncio.Task[str | None] | None = None

    async def ask(self) -> bool:
        """Returns whether the store answers within `STORE_SECONDS`."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(asyncio.to_thread(self._read))
        done, _ = await asyncio.wait({self._task}, timeout=STORE_SECONDS)
        problem = self._task.result() if done else f"no answer within {STORE_SECONDS:g} s"
        if self.answers and problem:
            LOG.error("Not ready: the store cannot be read: %s", problem)
        elif problem is None and not self.answers:
            LOG.warning("The store can be read again")
        self.answers = problem is None
        return self.answers

    def _read(self) -> str | None:
        """Returns why the store cannot be read."""
        try:
            self.engine.check_store()
        except Exception as error:  # stores raise errors of many classes
            return str(error) or repr(error)
        return None


def is_ready(app: FastAPI, engine: Engine) -> bool:
    """Returns whether requests should come here, by what the last question found of the store.

    An engine has captured its graphs when it is made, if it captures any ahead.
    """
    return app.state.store.answers and not (app.state.draining or engine.closed)


def state_of(engine: Engine, status: str, code: int = 200) -> JSONResponse:
    """Returns an answer with a `State`."""
    stats = engine.stats()
    return JSONResponse({"status": status, "users": stats.users, "queued": stats.queued}, code)


def add_errors(app: FastAPI) -> None:
    """Adds how errors are answered."""

    @app.exception_handler(OverloadedError)
    @app.exception_handler(EngineClosedError)
    async def unavailable(_: object, error: Exception) -> JSONResponse:
        answer = overloaded(error)
        return JSONResponse({"detail": answer.detail}, answer.status_code, answer.headers)

    @app.exception_handler(StoreError)
    async def not_stored(_: object, error: Exception) -> JSONResponse:
        detail = "Events cannot be read or stored now; the same request may be made again"
        return JSONResponse({"detail": detail}, 503, {"Retry-After": "1"})

    @app.exception_handler(DeadlineError)
    async def too_late(request: Request, _: Exception) -> JSONResponse:
        seconds = request.scope[SECONDS]
        detail = f"No answer within {seconds:g} s; the request had no effect"
        return JSONResponse({"detail": detail}, 504)

    @app.exception_handler(RequestValidationError)
    async def wrong_body(_: object, error: RequestValidationError) -> Response:
        # NOTE: not FastAPI's own answer, which repeats the input: that may be large, or hold what
        # JSON or UTF-8 cannot (NaN, an unpaired surrogate), so that encoding the answer fails.
        detail = [
            {name: part[name] for name in ("type", "loc", "msg")}
            for part in error.errors()[:MAX_ERRORS]
        ]
        return Response(json.dumps({"detail": detail}), 422, media_type="application/json")

    @app.exception_handler(EventTimeError)
    async def wrong_time(request: object, error: EventTimeError) -> Response:
        now = datetime.datetime.now(datetime.timezone.utc)
        earliest, latest = error.limits
        RARE.warn(
            "Refused events for their times, such as %d, which is not from %d to %d; this "
            "machine's clock says %s UTC",
            *(error.time, earliest, latest, f"{now:%Y-%m-%d %H:%M:%S}"),
        )
        message = f"Expected a time from {earliest} to {latest}, in seconds; got {error.time}"
        where = ["body", "events", error.place, "time"]
        return await wrong_body(request, invalid(where, "event_time", message))

    @app.exception_handler(NoHistoryError)
    @app.exception_handler(EventOrderError)
    async def wrong_events(request: object, error: Exception) -> Response:
        kind, message = WRONG_EVENTS[type(error)]
        return await wrong_body(request, invalid(["body", "events"], kind, message))


def invalid(where: Sequence[object], kind: str, message: str) -> RequestValidationError:
    """Returns the error that FastAPI answers with status 422."""
    return RequestValidationError([{"type": kind, "loc": where, "msg": message}])
