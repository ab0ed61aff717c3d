"""The part of the command line that the training examples share, and what follows from it: the data
and the device."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hstu_attn.data import ACTIONS, LAYOUT_NAMES, EventLog, LayoutName, open_event_log

__all__ = ["Options", "make_parser", "open_data", "parse"]

# What may differ between a run and the one that continues it.
NOT_PART_OF_THE_RUN = (
    *("data", "layout", "only", "cache_dir", "out", "resume", "device", "checkpoint_every"),
)
POSITIVE = (
    *("steps", "epochs", "learning_rate", "clip_norm", "layers", "eval_every", "checkpoint_every"),
)


class Options(argparse.Namespace):
    """The options that every training example has."""

    data: list[Path] | None
    layout: LayoutName | None
    only: str | None
    cache_dir: Path | None
    out: Path
    resume: bool
    seed: int
    device: str
    bf16: bool
    steps: int | None
    epochs: int
    dim: int
    layers: int
    heads: int
    dropout: float
    learning_rate: float
    weight_decay: float
    warmup_steps: int
    clip_norm: float
    eval_every: int
    checkpoint_every: int

    not_part_of_the_run: tuple[str, ...] = NOT_PART_OF_THE_RUN

    def identity(self) -> dict[str, Any]:
        """What a run must share with the one that it continues."""
        return {
            name: value
            for name, value in vars(self).items()
            if name not in self.not_part_of_the_run
        }

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        """Of the layers; parameters are fp32."""
        return torch.bfloat16 if self.bf16 or device.type == "cuda" else torch.float32


def make_parser(
    documentation: str | None, out: str, made_up_data: Path, **defaults: Any
) -> argparse.ArgumentParser:
    """A parser of the shared options, to which an example adds its own.

    Args:
        documentation: of the example; its first paragraph is shown.
        out: the default of `--out`.
        made_up_data: where the made-up data set lies.
        defaults: of those options whose best value depends on the example.
    """
    parser = argparse.ArgumentParser(
        description=(documentation or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    files = parser.add_argument_group("files")
    files.add_argument(
        "--data",
        type=Path,
        nargs="+",
        help="MovieLens ratings.dat or ratings.csv, Amazon reviews as ratings only, or KuaiRand's "
        "logs or their directory, each also as .gz; without it a made-up data set is written to "
        f"{made_up_data} once and read from there",
    )
    files.add_argument(
        "--layout", choices=LAYOUT_NAMES, help="of --data; None is told by its first line"
    )
    files.add_argument(
        "--only", choices=ACTIONS, help="events with this action alone, where the data have actions"
    )
    files.add_argument(
        "--cache-dir", type=Path, help="preprocessed data go here; None is beside the data"
    )
    files.add_argument(
        "--out", type=Path, default=Path(out), help="curves, metrics, checkpoints, TensorBoard"
    )
    files.add_argument(
        "--resume",
        action="store_true",
        help="continue from the checkpoint in --out, if there is one; "
        "without this a run starts anew and replaces what --out holds",
    )

    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=int, help="passes over the training events")
    training.add_argument("--steps", type=int, help="optimizer steps; None is by --epochs")
    training.add_argument("--learning-rate", type=float, help="highest; cosine decay")
    training.add_argument("--warmup-steps", type=int, default=100, help="linear, from zero")
    training.add_argument("--weight-decay", type=float, default=0.0, help="of AdamW")
    training.add_argument("--clip-norm", type=float, default=1.0, help="largest gradient norm")
    training.add_argument("--seed", type=int, default=0, help="of everything random")

    model = parser.add_argument_group("model")
    model.add_argument("--dim", type=int, default=64, help="width of the embeddings")
    model.add_argument("--layers", type=int, default=2, help="HSTU layers")
    model.add_argument("--heads", type=int, default=2, help="heads; each has --dim / --heads")
    model.add_argument("--dropout", type=float, default=0.2, help="of inputs and in each layer")

    running = parser.add_argument_group("running")
    running.add_argument(
        "--device", default="auto", help="auto is cuda where it has the kernels, otherwise cpu"
    )
    running.add_argument(
        "--bf16", action="store_true", help="compute the layers in bfloat16; always so on cuda"
    )
    running.add_argument("--eval-every", type=int, default=300, help="steps between validations")
    running.add_argument("--checkpoint-every", type=int, default=300, help="steps between saves")
    parser.set_defaults(**defaults)
    return parser


def parse(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    options: Options,
    positive: Sequence[str] = (),
) -> None:
    """Fills in the options.

    Args:
        parser: what :func:`make_parser` made, with the example's own options.
        arguments: None is the command line.
        options: where they go.
        positive: names of further options that must be positive.
    """
    parser.parse_args(arguments, namespace=options)
    for name in (*POSITIVE, *positive):
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    if options.heads <= 0 or options.dim % (8 * options.heads):
        parser.error("--dim must be a multiple of 8 times --heads")


def open_data(
    options: Options, made_up_data: Sequence[Path], write: Callable[[Path], object]
) -> EventLog:
    """The events to train on.

    Args:
        options: the files, how to read them and where their preprocessed form goes.
        made_up_data: is read where no file is given.
        write: writes it into a directory, where it is absent.
    """
    sources = options.data
    if sources is None:
        sources = list(made_up_data)
        if not all(path.exists() for path in sources):
            print(f"Writing a made-up data set to {sources[0].parent}")
            write(sources[0].parent)
    log = open_event_log(
        sources, options.cache_dir, progress=True, layout=options.layout, only=options.only
    )
    print(f"{', '.join(map(str, sources))}: {log.describe()}")
    return log
