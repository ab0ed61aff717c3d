"""Authenticates clients, and refuses wrong tokens and large bodies before a request is read."""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from fastapi import HTTPException, Security
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hstu_attn.serving import OverloadedError
from recommender.http_metrics import Metrics
from recommender.http_schemas import MODEL_PATHS

__all__ = ["ARRIVED", "BEARER", "CLIENT", "Access", "Guard", "overloaded", "read_tokens"]

ARRIVED, CLIENT = "hstu_attn.arrived", "hstu_attn.client"  # keys of a request's scope
PATH = "hstu_attn.path"  # key of the path of a request refused before its route was found
OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/docs", "/openapi.json"})
ADMIN_PATHS = "/admin/"
SHORTEST_TOKEN = 16
BEARER = HTTPBearer(auto_error=False, description="The token of a client.")


def read_tokens(
    path: Path | None, variable: str, environment: Mapping[str, str] = os.environ
) -> list[str]:
    """Returns the tokens of a file and of an environment variable, one in a line or word.

    Raises:
        OSError: the file cannot be read.
        ValueError: there is a file or a variable without a token, or a token that is too short or
            has characters that a header cannot have. The message does not contain the token.
    """
    texts = {} if path is None else {str(path): path.read_text()}
    if variable in environment:
        texts[variable] = environment[variable]
    tokens = []
    for where, text in texts.items():
        words = text.split()
        if not words:
            raise ValueError(f"{where}: expected at least one token, got none")
        for number, word in enumerate(words, 1):
            if len(word) < SHORTEST_TOKEN or not (word.isascii() and word.isprintable()):
                raise ValueError(
                    f"{where}: expected tokens of at least {SHORTEST_TOKEN} printable ASCII "
                    f"characters, got another one (number {number})"
                )
        tokens += words
    return tokens


class Access:
    """The tokens of clients and of administrators; only their hashes are kept.

    Args:
        tokens: the tokens of clients; several allow a rotation of tokens. Without any, everybody
            is admitted as a client.
        admin_tokens: the tokens of administrators. Without any, nobody is an administrator.
    """

    def __init__(self, tokens: Sequence[str] = (), admin_tokens: Sequence[str] = ()) -> None:
        self._tokens = [_hash(token.encode()) for token in tokens]
        self._admin_tokens = [_hash(token.encode()) for token in admin_tokens]

    @property
    def is_open(self) -> bool:
        """Returns whether clients need no token."""
        return not self._tokens

    def client_of(self, token: bytes, address: str) -> str | None:
        """Returns a client's name for the fair queue, or None for a wrong token.

        The name is the index of the token among the clients' tokens, or the address without tokens.
        """
        if self.is_open:
            return address
        place = _place(token, self._tokens)
        return None if place is None else f"token {place}"

    def is_admin(self, token: bytes) -> bool:
        """Returns whether a token is one of an administrator."""
        return _place(token, self._admin_tokens) is not None

    def require_admin(
        self, credentials: Annotated[HTTPAuthorizationCredentials | None, Security(BEARER)]
    ) -> None:
        """Refuses a request without an administrator's token: a dependency for FastAPI.

        Raises:
            HTTPException: 401 without a token; 403 with a token that is no administrator's.
        """
        if credentials is None:
            raise HTTPException(401, "A token is needed", {"WWW-Authenticate": "Bearer"})
        if not self.is_admin(credentials.credentials.encode()):
            raise HTTPException(403, "An administrator's token is needed")


def overloaded(error: Exception) -> HTTPException:
    """Returns the answer to a request that cannot be computed now, with Retry-After."""
    seconds = math.ceil(getattr(error, "retry_after", 0.0))
    return HTTPException(503, str(error), {"Retry-After": str(max(seconds, 1))})


def _hash(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _place(token: bytes, known: Sequence[bytes]) -> int | None:
    """Returns the index of the token's hash in `known`, in a time independent of the token."""
    hashed = _hash(token)
    equal = [hmac.compare_digest(hashed, other) for other in known]
    return equal.index(True) if any(equal) else None


class Guard:
    """Refuses requests by their headers, limits bodies, and counts answers by path and status.

    Args:
        app: the application that answers accepted requests.
        access: the tokens.
        metrics: where answers are counted.
        max_body_bytes: the size of the largest accepted body.
        check_load: raises OverloadedError if no request of a client can be computed now.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        metrics: Metrics,
        max_body_bytes: int,
        check_load: Callable[[str], None],
    ) -> None:
        self.app = app
        self.access = access
        self.metrics = metrics
        self.max_body_bytes = max_body_bytes
        self.check_load = check_load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope[ARRIVED] = arrived = time.monotonic()
        received = 0
        status = 500

        async def limited_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_body_bytes:
                raise self.too_large()
            return message

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            error = self.refusal(scope)
            if error is None:
                await self.app(scope, limited_receive, watched_send)
            else:
                answer = JSONResponse({"detail": error.detail}, error.status_code, error.headers)
                await answer(scope, receive, watched_send)
        finally:  # an outer layer answers exceptions with 500
            path = getattr(scope.get("route"), "path", scope.get(PATH, "other"))
            self.metrics.responses.labels(path, status).inc()
            self.metrics.seconds.labels(path).observe(time.monotonic() - arrived)

    def refusal(self, scope: Scope) -> HTTPException | None:
        """Returns the error of a request that is refused, or None; records its client."""
        headers = dict(scope["headers"])
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path not in OPEN_PATHS and not path.startswith(ADMIN_PATHS):
            kind, _, token = headers.get(b"authorization", b"").partition(b" ")
            address = (scope.get("client") or ("",))[0]
            known = self.access.client_of(token if kind.lower() == b"bearer" else b"", address)
            if known is None:
                problem = "A client's token is needed"
                return HTTPException(401, problem, {"WWW-Authenticate": "Bearer"})
            scope[CLIENT] = known
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.max_body_bytes:
            return self.too_large()
        if path in MODEL_PATHS and scope["method"] == "POST":
            # NOTE: reading and checking the body would take most of the time of a refused request.
            try:
                self.check_load(scope[CLIENT])
            except OverloadedError as error:
                scope[PATH] = path
                return overloaded(error)
        return None

    def too_large(self) -> HTTPException:
        """Returns the error for a body over the limit."""
        return HTTPException(413, f"The body must have at most {self.max_body_bytes} bytes")
