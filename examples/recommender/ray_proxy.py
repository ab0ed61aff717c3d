"""The limits of connections in the HTTP proxies of Ray Serve, which have none of their own.

Ray calls the function that RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names when a proxy starts:

    export RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=recommender.ray_proxy:limit
"""

from __future__ import annotations

from functools import partial

from uvicorn.config import HTTP_PROTOCOLS

from recommender.connections import LimitedHTTP
from recommender.serve_options import MAX_CONNECTIONS, TIMEOUT

__all__ = ["limit"]

limited = partial(LimitedHTTP, arrival_timeout=TIMEOUT, max_connections=MAX_CONNECTIONS)


def limit(max_connections: int = MAX_CONNECTIONS, arrival_timeout: float = TIMEOUT) -> None:
    """Lets uvicorn, which the proxy starts next in this process, limit connections.

    A function of your own that calls this one may have other limits.

    Args:
        max_connections: how many may be open at a time, as `serve.py --max-connections`.
        arrival_timeout: seconds for a request to arrive, and for the client to take its answer, as
            `serve.py --timeout`.
    """
    limited.keywords.update(arrival_timeout=arrival_timeout, max_connections=max_connections)
    HTTP_PROTOCOLS["auto"] = f"{__name__}:limited"  # Ray does not name one
