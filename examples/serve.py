r"""Serves the model that train_retrieval.py or train_ranking.py saved, over HTTP.

    python examples/serve.py                                        # users start without events
    python examples/serve.py --data ml-1m/ratings.dat               # with the data set's events
    python examples/serve.py --model runs/ranking/best.pt           # POST /rank
    curl -H 'Content-Type: application/json' localhost:8000/recommend \
      -d '{"user": 1, "events": [{"item": 1, "time": 1767225600}]}'

Users and items have the data set's ids: whole numbers, or text where the data set's ids are text
(Amazon reviews). Requests bring new events, which the server stores. For a retrieval model it also
caches the layers' keys and values, so that each event is computed about once; on a GPU the layers'
steps are captured in CUDA graphs before the server listens. A ranking model computes the whole
history for each request. recommender/http.py describes the paths and the limits of a request,
http_access.py the authentication, connections.py the limits of a connection, and
docs/quickstart/serving.md all of them.
"""

from __future__ import annotations

import socket
import sys

from recommender.serve_options import parse_arguments


def listen_later(host: str, port: int) -> socket.socket:
    """Returns a bound socket that refuses connections until its `listen` is called.

    Binding it early shows that the address is free.

    NOTE: asyncio turns off Nagle's algorithm only for a socket with an explicit protocol, which
    socket.create_server does not set. With Nagle's algorithm, answers are some 40 ms late.

    Raises:
        OSError: the address is in use, is not one of this machine, or may not be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise OSError(
            f"--host, --port: expected a free address of this machine; got {host} and {port} "
            f"({error.strerror})"
        ) from error
    return bound


def main(arguments: list[str] | None = None) -> int:
    """Runs the server; the exit status is 1 if it cannot be started."""
    options = parse_arguments(__doc__, arguments)
    try:
        with listen_later(options.host, options.port) as listener:
            from recommender.server import serve  # imports torch, which takes a while

            serve(options, listener)
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
