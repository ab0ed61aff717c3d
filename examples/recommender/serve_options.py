"""The command line of the server.

The module imports neither torch nor numpy, so that wrong options and `--help` are answered at once.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from recommender.options import add_reading_options

if TYPE_CHECKING:
    from hstu_attn.data import LayoutName

__all__ = [
    "ADMIN_TOKENS",
    "MAX_BODY_BYTES",
    "MAX_CONNECTIONS",
    "TIMEOUT",
    "TOKENS",
    "ServeOptions",
    "parse_arguments",
]

MAX_BODY_BYTES = 2**20
MAX_CONNECTIONS = 900
TIMEOUT = 5.0  # seconds
TOKENS, ADMIN_TOKENS = "HSTU_ATTN_TOKENS", "HSTU_ATTN_ADMIN_TOKENS"  # environment variables
PAGE_SIZES = (16, 32, 64, 128, 256)  # as in hstu_attn.paged, which would import torch


class ServeOptions(argparse.Namespace):
    """The options of the command line."""

    model: Path
    probe: Path | None
    data: list[Path] | None
    layout: LayoutName | None
    columns: dict[str, str] | None
    only: str | None
    cache_dir: Path | None
    host: str
    port: int
    device: str
    bf16: bool
    cache_mib: int
    page_size: int
    store: str | None
    earliest_time: int | None
    ahead_seconds: int
    max_users: int
    max_batch_size: int
    max_wait_ms: float
    max_queue: int
    max_queue_ms: float
    max_connections: int
    max_body_bytes: int
    timeout: float
    drain_seconds: float
    token_file: Path | None
    admin_token_file: Path | None
    trusted_proxies: str | None


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and keeps the line breaks of the description."""


class Parser(argparse.ArgumentParser):
    """Reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (--help lists the options)\n")


def number(
    least: float, most: float, kind: type[int] | type[float] = int
) -> Callable[[str], float]:
    """Returns a converter to numbers from `least` to `most`, for `add_argument(type=...)`."""

    def convert(text: str) -> float:
        value = math.nan
        with suppress(ValueError):
            value = kind(text)
        if not least <= value <= most:  # true for NaN
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(
                f"expected {what} from {least:.10g} to {most:.10g}; got {text!r}"
            )
        return value

    return convert


def device(text: str) -> str:
    """Checks the name of a device, for `add_argument(type=...)`."""
    name, _, index = text.partition(":")
    is_cuda = name == "cuda" and (index.isdecimal() or text == name)
    if text not in ("auto", "cpu") and not is_cuda:
        raise argparse.ArgumentTypeError(f"expected auto, cpu, cuda or cuda:N; got {text!r}")
    return text


def parse_arguments(documentation: str | None, arguments: list[str] | None = None) -> ServeOptions:
    """Parses the options; exits if one is wrong, or names a file that does not exist.

    Args:
        documentation: the docstring of the program, for `--help`.
        arguments: the arguments; None is the command line.
    """
    parser = Parser(prog="serve.py", description=documentation, formatter_class=Formatter)
    count = number(1, 10**9)
    parser.add_argument(
        "--model", type=Path, default=Path("runs/retrieval/best.pt"), help="the trained model"
    )
    parser.add_argument(
        "--probe",
        type=Path,
        help="a request and the answer that each model must give nearly, the first and those that "
        "take over; None is any request, and any answer that is finite",
    )
    parser.add_argument(
        "--data",
        type=Path,
        nargs="+",
        help="what users did before: the training data, read as --layout, --columns and --only of "
        "the training say",
    )
    add_reading_options(parser)
    parser.add_argument(
        "--cache-dir", type=Path, help="of the preprocessed data; None is next to --data"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=number(0, 65535), default=8000, help="0 is any that is free")
    parser.add_argument(
        "--device",
        type=device,
        default="auto",
        help="auto is cuda where it has the kernels, otherwise cpu",
    )
    parser.add_argument(
        "--bf16", action="store_true", help="compute the layers in bfloat16; always so on cuda"
    )
    parser.add_argument("--cache-mib", type=count, default=256, help="for keys and values")
    parser.add_argument(
        "--page-size", type=int, choices=PAGE_SIZES, default=32, help="events in a cache page"
    )
    parser.add_argument(
        "--store",
        help="where events are kept: the path of an SQLite file, redis://host:port/database, or "
        "memory, which ends with the process; None is events.sqlite next to --model",
    )
    parser.add_argument(
        "--earliest-time",
        type=number(0, 2**62),
        help="events of earlier times, which may be in another unit, are refused; None is that of "
        "1990, or of the first event of --data if that is earlier",
    )
    parser.add_argument(
        "--ahead-seconds",
        type=number(0, 10**9),
        default=300,
        help="events that are further ahead of this machine's clock are refused",
    )
    parser.add_argument(
        "--max-users", type=count, default=10**6, help="whose events are kept in memory"
    )
    parser.add_argument("--max-batch-size", type=count, default=32, help="requests in a batch")
    parser.add_argument(
        "--max-wait-ms",
        type=number(0, 10**6, float),
        default=0.0,
        help="how long a request waits for others",
    )
    parser.add_argument("--max-queue", type=count, default=1024, help="requests that may wait")
    parser.add_argument(
        "--max-queue-ms",
        type=number(1e-3, 10**6, float),
        default=1000.0,
        help="a request that would wait for longer is refused",
    )
    parser.add_argument(
        "--max-connections",
        type=count,
        default=MAX_CONNECTIONS,
        help="open at a time; each is an open file (ulimit -n)",
    )
    parser.add_argument(
        "--max-body-bytes",
        type=count,
        default=MAX_BODY_BYTES,
        help="of a request; larger ones are refused",
    )
    parser.add_argument(
        "--timeout",
        type=number(1e-3, 3600, float),
        default=TIMEOUT,
        help="seconds for a request to arrive, for its answer, and for the client to take it",
    )
    parser.add_argument(
        "--drain-seconds",
        type=number(0, 3600, float),
        default=0.0,
        help="how long requests are still accepted after SIGTERM, while /ready says 503",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        help=f"tokens of clients, one a line; {TOKENS} holds more; without any, everybody may ask",
    )
    parser.add_argument(
        "--admin-token-file",
        type=Path,
        help=f"tokens for the paths below /admin; {ADMIN_TOKENS} holds more; without any, nobody "
        "may use them",
    )
    parser.add_argument(
        "--trusted-proxies",
        help="addresses, with commas, whose X-Forwarded-For names the client",
    )
    options = parser.parse_args(arguments, namespace=ServeOptions())
    if not options.model.is_file():
        parser.error(
            "argument --model: expected a file that train_retrieval.py or train_ranking.py saved "
            f"(make demo, make ranking); got {options.model}, which is no file"
        )
    if options.probe is not None and not options.probe.is_file():
        parser.error(f"argument --probe: expected a file, got {options.probe}, which is none")
    for path in options.data or ():
        if not path.exists():
            parser.error(f"argument --data: expected a file or directory; got {path}")
    return options
