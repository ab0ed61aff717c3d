r"""Serves a trained model with Ray Serve replicas, which share a Redis server for the events.

    set -a && . examples/serve_ray.env && set +a
    serve run serve_ray:app model=runs/retrieval/best.pt store=redis://127.0.0.1:6379/0
    serve run examples/serve_ray.yaml                               # number of replicas, resources

The arguments are the options of serve.py, without leading dashes: `max-batch-size=64`, or
`bf16=true` for a flag. Options for sockets (host, port, connections, proxies) and draining have no
effect here, because Ray has its own. docs/quickstart/serving.md describes the deployment.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from ray import serve
from recommender.serve_options import ServeOptions, parse_arguments

from hstu_attn.serving.ray import Replica, Served, deployment

__all__ = ["app", "application"]


def build(replica: Replica, options: ServeOptions) -> Served:
    """Loads the model, and returns the engine and the application that a replica serves.

    Raises:
        OSError, ValueError: a file cannot be read or is damaged, or an option does not fit it.
        StoreError: the store does not answer.
    """
    from recommender.http import make_app  # these import torch, which only replicas need
    from recommender.http_schemas import MAX_CANDIDATES
    from recommender.models import Models, aligned, load_served
    from recommender.options import choose_device
    from recommender.server import make_engine, make_store, read_access

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    saved = load_served(options.model, options.bf16, choose_device(options.device))
    store = make_store(options, saved)
    saved = aligned(saved, store)
    engine = make_engine(options, saved, store)
    app = make_app(
        engine,
        saved,
        options.timeout,
        read_access(options),
        options.max_body_bytes,
        forget=replica.forget,
        prune=replica.prune,
        all_metrics=replica.metrics,
    )
    models = Models(options, saved, engine, MAX_CANDIDATES)
    app.state.registry.register(models.changes)

    def change(user_config: Mapping[str, str]) -> None:
        if unknown := set(user_config) - {"model"}:
            raise ValueError(f"user_config: expected model alone, got {', '.join(sorted(unknown))}")
        models.load_and_swap(Path(user_config.get("model", options.model)))

    return Served(engine, app, app.state.metrics, change)


def check_file(path: Path) -> None:
    """Checks that a model file is intact, before Ray begins to replace replicas.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is damaged, or is not a zip archive as torch.save writes it.
    """
    try:
        with ZipFile(path) as file:
            damaged = file.testzip()
    except BadZipFile as error:
        raise ValueError(f"model: expected what torch has saved, got {path} ({error})") from error
    if damaged:
        raise ValueError(f"model: expected a sound file, got {path}, where {damaged} is damaged")


def application(arguments: Mapping[str, Any], **chosen: Any) -> serve.Application:
    """Returns the Ray Serve application.

    Args:
        arguments: options of serve.py, by name.
        chosen: options of the Ray Serve deployment.

    Raises:
        OSError: the model's file cannot be read.
        ValueError: an argument is wrong, the file is damaged, or `store` is not one that replicas
            can share.
    """
    words = []
    for name, value in arguments.items():
        values = value if isinstance(value, list) else [value]
        words += [f"--{name}"] if value in (True, "true") else [f"--{name}", *map(str, values)]
    try:
        options = parse_arguments(__doc__, words)
    except SystemExit as error:  # argparse has printed the reason
        raise ValueError(f"arguments: expected options of serve.py, got {words}") from error
    if not (options.store or "").startswith(("redis://", "rediss://", "unix://")):
        raise ValueError(
            f"store: expected one that replicas share, redis://..., got {options.store}"
        )
    options.model = options.model.resolve()
    options.probe = options.probe and options.probe.resolve()
    check_file(options.model)
    return deployment(**chosen).bind(build, options)


def app(arguments: dict[str, Any]) -> serve.Application:
    """Returns the application for `serve run` and `serve deploy`, as `application` does."""
    return application(arguments)
