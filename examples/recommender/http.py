"""An engine over HTTP: scores and recommendations as JSON, health, and metrics for Prometheus."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from itertools import accumulate
from typing import Annotated, Any, Generic, TypeVar

from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hstu_attn.serving import Engine, EngineClosedError, Histogram, NoHistoryError, OverloadedError
from recommender.saved import SavedModel

__all__ = ["MAX_BODY_BYTES", "MAX_CANDIDATES", "MAX_EVENTS", "MAX_K", "make_app"]

MAX_BODY_BYTES = 2**20
MAX_EVENTS = 1000
MAX_CANDIDATES = 1000
MAX_K = 1000
MAX_ERRORS = 20  # that a 422 names
LONGEST_ID = 64  # characters of an id that is text
RETRY_AFTER = {"Retry-After": "1"}  # seconds

Answer = TypeVar("Answer")
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Text = Annotated[str, Field(min_length=1, max_length=LONGEST_ID)]
Id = TypeVar("Id", int, str)
Time = Annotated[int, Field(ge=0, lt=2**62)]


class Strict(BaseModel):
    """Takes no other types than those named, and no fields that it does not know."""

    model_config = ConfigDict(extra="forbid", strict=True)


class EventBody(Strict, Generic[Id]):
    """An event: an item of the catalogue, by the data set's id, and when, in seconds."""

    item: Id
    time: Time


class UserBody(Strict, Generic[Id]):
    """A user, what the user did since the last request, and when it is asked (None: just then)."""

    user: Id
    events: list[EventBody[Id]] = Field(default=[], max_length=MAX_EVENTS)
    time: Time | None = None


class ScoreBody(UserBody[Id], Generic[Id]):
    """Asks for the scores of items."""

    candidates: list[Id] = Field(max_length=MAX_CANDIDATES)


class RecommendBody(UserBody[Id], Generic[Id]):
    """Asks for the best items of the catalogue."""

    k: int = Field(default=10, ge=1, le=MAX_K)
    exclude_seen: bool = True


def make_app(engine: Engine, saved: SavedModel, timeout: float) -> FastAPI:
    """Returns the application.

    POST /score      user, events, candidates -> a score for each candidate
    POST /recommend  user, events, k, exclude_seen -> the best items, with titles and scores
    GET  /health     200 while requests are accepted; HEAD likewise
    GET  /metrics    for Prometheus

    Users and items are named by the data set's ids: numbers, or text where the saved model's are. A
    wrong body is answered 422 and the places in it, or 400 where it cannot be parsed; too large a
    one 413; a full queue 503 with Retry-After; and no answer in time 504, in which case the request
    had no effect.

    Args:
        engine: serves the saved model; closed when the application shuts down.
        saved: for its items and titles.
        timeout: seconds that a request may take.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    app = FastAPI(title="hstu_attn", lifespan=lifespan)
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    responses = Counter(
        "hstu_http_responses", "Answers, by path and status.", ["path", "status"], registry=registry
    )
    app.add_middleware(Guard, responses=responses)
    ids: Sequence[int | str] = saved.item_ids.tolist()
    index_of: dict[int | str, int] = {item: index for index, item in enumerate(ids)}

    def indices(items: Iterable[int | str], *path: str) -> list[int]:
        """Returns the model's item numbers of the ids in a list, or in a field of its elements."""
        found = []
        for place, item in enumerate(items):
            if item not in index_of:
                where = ["body", path[0], place, *path[1:]]
                raise invalid(where, "unknown_item", "Item is not in the catalogue")
            found.append(index_of[item])
        return found

    def events_of(body: UserBody[Any]) -> list[tuple[int, int]]:
        items = indices((event.item for event in body.events), "events", "item")
        return [(item, event.time) for item, event in zip(items, body.events, strict=True)]

    async def answer(future: Future[Answer]) -> Answer:
        wrapped = asyncio.wrap_future(future)
        done, _ = await asyncio.wait({wrapped}, timeout=timeout)
        if not done and future.cancel():
            raise HTTPException(504, f"No answer within {timeout} s; the request had no effect")
        return await wrapped

    async def score(body: ScoreBody[Any]) -> JSONResponse:
        candidates = indices(body.candidates, "candidates")
        future = engine.submit_score(body.user, events_of(body), candidates, at=body.time)
        return JSONResponse({"user": body.user, "scores": (await answer(future)).tolist()})

    async def recommend(body: RecommendBody[Any]) -> JSONResponse:
        future = engine.submit_recommend(
            body.user, events_of(body), body.k, exclude_seen=body.exclude_seen, at=body.time
        )
        best = await answer(future)
        items = [
            {"item": ids[index], "title": saved.titles[index], "score": value}
            for index, value in zip(best.items.tolist(), best.scores.tolist(), strict=True)
        ]
        return JSONResponse({"user": body.user, "items": items})

    text = saved.has_text_ids
    for path, endpoint, body in (
        ("/score", score, ScoreBody[Text] if text else ScoreBody[Int64]),
        ("/recommend", recommend, RecommendBody[Text] if text else RecommendBody[Int64]),
    ):
        endpoint.__annotations__["body"] = body  # by which FastAPI checks and documents it
        app.post(path)(endpoint)

    @app.head("/health")
    @app.get("/health")
    async def health() -> JSONResponse:
        stats = engine.stats()
        state = {"status": "ok", "users": stats.users, "queued": stats.queued}
        if engine.closed:
            return JSONResponse({**state, "status": "closed"}, 503)
        return JSONResponse(state)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(OverloadedError)
    @app.exception_handler(EngineClosedError)
    async def unavailable(_: object, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": str(error)}, 503, RETRY_AFTER)

    @app.exception_handler(RequestValidationError)
    async def wrong_body(_: object, error: RequestValidationError) -> Response:
        # NOTE: not FastAPI's own answer, which repeats the input: that may be large, or hold what
        # JSON or UTF-8 cannot (NaN, an unpaired surrogate), so that encoding the answer fails.
        detail = [
            {name: part[name] for name in ("type", "loc", "msg")}
            for part in error.errors()[:MAX_ERRORS]
        ]
        return Response(json.dumps({"detail": detail}), 422, media_type="application/json")

    @app.exception_handler(NoHistoryError)
    async def no_history(request: object, error: Exception) -> Response:
        message = "The user is new: at least one event is needed"
        return await wrong_body(request, invalid(["body", "events"], "no_history", message))

    return app


def invalid(where: Sequence[object], kind: str, message: str) -> RequestValidationError:
    """Returns the error that FastAPI answers with status 422."""
    return RequestValidationError([{"type": kind, "loc": where, "msg": message}])


class Guard:
    """Refuses large bodies, and counts answers by path and status."""

    def __init__(self, app: ASGIApp, responses: Counter) -> None:
        self.app = app
        self.responses = responses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        received = 0

        async def limited_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MAX_BODY_BYTES:
                raise too_large()
            return message

        def count(status: int) -> None:
            path = getattr(scope.get("route"), "path", "other")
            self.responses.labels(path, status).inc()

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                count(message["status"])
            await send(message)

        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            error = too_large()
            response = JSONResponse({"detail": error.detail}, error.status_code)
            await response(scope, receive, counted_send)
            return
        try:
            await self.app(scope, limited_receive, counted_send)
        except Exception:  # answered 500 further out
            count(500)
            raise


def too_large() -> HTTPException:
    """For a body over the limit."""
    return HTTPException(413, f"The body must have at most {MAX_BODY_BYTES} bytes")


class EngineCollector(Collector):
    """An engine's statistics, as Prometheus takes them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterable[Metric]:
        """Yields the metrics at one moment."""
        stats = self.engine.stats()
        for name, text, value in (
            ("requests", "Requests accepted.", stats.requests),
            ("completed", "Requests answered.", stats.completed),
            ("failed", "Requests ended by an error.", stats.failed),
            ("cancelled", "Requests timed out or cancelled.", stats.cancelled),
            ("rejected", "Requests refused because the queue was full.", stats.rejected),
            ("graph_batches", "Batches computed by a captured graph.", stats.graph_batches),
            ("hit_tokens", "Rows of events read from the cache.", stats.hit_tokens),
            ("new_tokens", "Rows of events computed first.", stats.new_tokens),
            ("recomputed_tokens", "Rows of events computed again.", stats.recomputed_tokens),
        ):
            yield CounterMetricFamily(f"hstu_engine_{name}", text, value)
        yield GaugeMetricFamily("hstu_engine_queued", "Requests that wait.", stats.queued)
        yield GaugeMetricFamily("hstu_engine_users", "Users with stored events.", stats.users)
        yield histogram("batch_size", "Requests in a batch.", stats.batch_size)
        yield histogram("latency_seconds", "From arrival to answer.", stats.latency)


def histogram(name: str, text: str, values: Histogram) -> Metric:
    """Returns a histogram in Prometheus' cumulative form."""
    bounds = [*map(str, values.bounds), "+Inf"]
    buckets = list(zip(bounds, accumulate(values.counts), strict=True))
    return HistogramMetricFamily(f"hstu_engine_{name}", text, buckets, values.total)
