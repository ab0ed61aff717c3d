"""The command-line options that the training examples share, and the data and device they name.

Nothing here imports torch before the options are parsed, so that `--help` and a wrong option are
answered at once.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from recommender.files import naming

if TYPE_CHECKING:
    import torch

    from hstu_attn import FP8
    from hstu_attn.data import Catalog, EventLog, LayoutName, Ties

__all__ = [
    "Interval",
    "Options",
    "Schedule",
    "Strategy",
    "add_log_options",
    "add_reading_options",
    "choose_device",
    "make_parser",
    "open_data",
    "parse",
]

Strategy: TypeAlias = Literal["ddp", "fsdp2"]
Schedule: TypeAlias = Literal["cosine", "constant"]
Interval: TypeAlias = "int | Literal['epoch']"  # steps, or an epoch

# As in hstu_attn.data, which would import torch.
LAYOUT_NAMES = ("movielens", "amazon", "amazon-2014", "amazon-2018", "kuairand", "parquet", "csv")
ACTIONS = (
    *("is_click", "is_like", "is_follow", "is_comment", "is_forward", "is_hate", "long_view"),
    "is_profile_enter",
)

# These options may differ when a run is continued; the loop checks steps and epochs.
NOT_PART_OF_THE_RUN = (
    *(
        "data",
        "layout",
        "columns",
        "only",
        "cache_dir",
        "out",
        "resume",
        "device",
        "checkpoint_every",
    ),
    *("min_user_events", "min_item_events"),
    *("steps", "epochs", "baselines", "graph"),
)
POSITIVE = (
    *("min_user_events", "min_item_events"),
    *("steps", "epochs", "learning_rate", "layers", "eval_every", "checkpoint_every"),
    *("dim", "heads"),
)
LARGEST_HEAD_DIM = 256
LARGEST_SEED = 2**32 - 1


class Options(argparse.Namespace):
    """The options that every training example has."""

    data: list[Path] | None
    layout: LayoutName | None
    columns: dict[str, str] | None
    only: str | None
    catalog: Catalog = "log"
    ties: Ties = "log"
    min_user_events: int
    min_item_events: int
    cache_dir: Path | None
    out: Path
    resume: bool
    seed: int
    device: str
    bf16: bool
    fp8: Literal["attention", "layer"] | None
    smooth_k: bool
    graph: bool | None
    steps: int | None
    epochs: int
    seeds: int = 1
    dim: int
    layers: int
    heads: int
    head_dim: int | None
    dropout: float
    learning_rate: float
    schedule: Schedule
    weight_decay: float
    warmup_steps: int
    clip_norm: float
    eval_every: Interval
    checkpoint_every: Interval
    baselines: bool

    not_part_of_the_run: tuple[str, ...] = NOT_PART_OF_THE_RUN

    def identity(self) -> dict[str, Any]:
        """Returns the options that a resumed run must share with the original run."""
        return {
            name: value
            for name, value in vars(self).items()
            if name not in self.not_part_of_the_run
        }

    @property
    def uses_kernels(self) -> bool:
        """Returns whether heads must have a width that the kernels of HSTU attention take."""
        return True

    @property
    def dim_per_head(self) -> int:
        """Width of q, k, u and v in each head."""
        return self.head_dim or self.dim // self.heads

    def compute_dtype(self, device: torch.device) -> torch.dtype:
        """Returns the dtype in which the layers compute; parameters are fp32."""
        import torch

        is_16_bits = self.bf16 or self.fp8 or device.type == "cuda"
        return torch.bfloat16 if is_16_bits else torch.float32

    @property
    def layer_fp8(self) -> FP8 | None:
        """The value of `fp8` in the config of the layers."""
        from hstu_attn import FP8, Quantization

        if self.fp8 is None:
            return None
        return FP8(Quantization(smooth_k=self.smooth_k), linears=self.fp8 == "layer")

    def describe_precision(self, device: torch.device) -> str:
        """Returns a description of the precision in which the layers compute."""
        fp8 = {
            None: "",
            "attention": ", attention in FP8",
            "layer": ", attention and linears in FP8",
        }
        smooth = "" if self.fp8 is None or self.smooth_k else ", without smooth_k"
        return str(self.compute_dtype(device)).removeprefix("torch.") + fp8[self.fp8] + smooth


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, and keeps the line breaks of paragraphs."""


class _ByName(argparse.Action):
    """Stores `NAME=VALUE` arguments as a dict."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        pairs = [text.partition("=") for text in values]
        if not all(name and value for name, _, value in pairs):
            parser.error(f"{option_string} must be FEATURE=COLUMN, got {' '.join(values)}")
        setattr(namespace, self.dest, {name: value for name, _, value in pairs})


def make_parser(
    documentation: str | None, out: str, made_up_data: Path, **defaults: Any
) -> argparse.ArgumentParser:
    """Returns a parser of the shared options, to which an example adds its own.

    Args:
        documentation: the documentation of the example: its first paragraph, and below the options
            the rest, which starts with commands as examples.
        out: the default of `--out`.
        made_up_data: the path of the made-up data set.
        defaults: the defaults of those options whose best value depends on the example.
    """
    description, _, examples = (documentation or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description,
        epilog=f"examples:\n{examples}",
        formatter_class=_HelpFormatter,
    )
    files = parser.add_argument_group("files")
    files.add_argument(
        "--data",
        type=Path,
        nargs="+",
        help="MovieLens u.data, ratings.dat or ratings.csv, Amazon reviews as ratings only, "
        "KuaiRand's logs or their directory, each also as .gz, Parquet files or their directory, "
        "or CSV files with --columns; without it a made-up data set is "
        f"written to {made_up_data} once and read from there",
    )
    add_reading_options(files)
    files.add_argument(
        "--min-user-events",
        type=int,
        default=1,
        help="leave out users with fewer events; this and --min-item-events are applied once, "
        "together, to the counts of all events",
    )
    files.add_argument(
        "--min-item-events", type=int, default=1, help="leave out items with fewer events"
    )
    files.add_argument(
        "--cache-dir", type=Path, help="of the preprocessed data; None is next to --data"
    )
    files.add_argument(
        "--out", type=Path, default=Path(out), help="curves, metrics, checkpoints, TensorBoard"
    )
    files.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --out from its last checkpoint, or start one if there is none; a "
        "finished run is evaluated again, or with more --epochs or --steps trained on, at the "
        "learning rates that the longer run has from there; without this, an --out that holds a "
        "run is refused",
    )

    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=int, help="passes over the training events")
    training.add_argument("--steps", type=int, help="optimizer steps; None is by --epochs")
    training.add_argument("--learning-rate", type=float, help="highest, of --schedule")
    training.add_argument(
        "--schedule",
        choices=get_args(Schedule),
        default="cosine",
        help="of the learning rate: cosine decays to zero at the last step; constant stays, so "
        "that the steps of a run do not depend on how many there are",
    )
    training.add_argument("--warmup-steps", type=int, default=100, help="linear, from zero")
    training.add_argument("--weight-decay", type=float, default=0.0, help="of AdamW")
    training.add_argument(
        "--clip-norm", type=float, default=1.0, help="largest gradient norm; 0 does not clip"
    )
    training.add_argument("--seed", type=int, default=0, help="of everything random")

    model = parser.add_argument_group("model")
    model.add_argument("--dim", type=int, default=64, help="width of the embeddings")
    model.add_argument("--layers", type=int, default=2, help="HSTU layers")
    model.add_argument("--heads", type=int, default=2, help="heads of a layer")
    model.add_argument(
        "--head-dim",
        type=int,
        help=f"width of a head, a multiple of 8 to {LARGEST_HEAD_DIM}, with any --dim; None is "
        "--dim / --heads",
    )
    model.add_argument("--dropout", type=float, default=0.2, help="of inputs and in each layer")

    running = parser.add_argument_group("running")
    running.add_argument(
        "--device", default="auto", help="auto is cuda where it has the kernels, otherwise cpu"
    )
    running.add_argument(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="compute the layers in bfloat16; always so on cuda",
    )
    running.add_argument(
        "--fp8",
        choices=("attention", "layer"),
        help="compute attention, or also the linears of the layers, in FP8 (experimental); the "
        "rest in bfloat16",
    )
    running.add_argument(
        "--smooth-k",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with --fp8, quantize keys without the mean that they have after SiLU",
    )
    running.add_argument(
        "--graph",
        action=argparse.BooleanOptionalAction,
        help="capture training steps in CUDA graphs, for batches padded to few shapes; None is on "
        "a GPU that a single process uses",
    )
    every: dict[str, Any] = {"type": _interval, "default": 300, "metavar": "STEPS"}
    running.add_argument("--eval-every", **every, help="steps between evaluations, or epoch")
    running.add_argument("--checkpoint-every", **every, help="steps between saves, or epoch")
    running.add_argument(
        "--baselines",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="tune the baselines, which takes its time before the training begins; a run that is "
        "continued without this shows those that it has",
    )
    parser.set_defaults(**defaults)
    return parser


def add_reading_options(files: argparse._ActionsContainer) -> None:
    """Adds the options that say how `--data` is read, which the server has too."""
    files.add_argument(
        "--layout", choices=LAYOUT_NAMES, help="of --data; None finds it in the first line"
    )
    files.add_argument(
        "--columns",
        nargs="+",
        action=_ByName,
        metavar="FEATURE=COLUMN",
        help="the columns of Parquet or CSV files that hold user, item, timestamp and rating; "
        "those not given have these names, and rating may be absent",
    )
    files.add_argument(
        "--only", choices=ACTIONS, help="events with this action alone, where the data have actions"
    )


def _interval(text: str) -> Interval:
    return "epoch" if text == "epoch" else int(text)


def parse(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    options: Options,
    positive: Sequence[str] = (),
) -> None:
    """Parses the arguments into `options` and checks them.

    Args:
        parser: what `make_parser` made, with the example's own options.
        arguments: the arguments; None is the command line.
        options: the namespace that gets the values.
        positive: names of further options that must be positive.
    """
    parser.parse_args(arguments, namespace=options)
    for name in (*POSITIVE, *positive):
        value = getattr(options, name)
        is_positive = value in (None, "epoch") or 0 < value < math.inf
        _require(parser, options, name, is_positive, "be positive")
    _require(parser, options, "dropout", 0 <= options.dropout < 1, "be from 0 to below 1")
    for name in ("weight_decay", "warmup_steps", "clip_norm"):
        _require(parser, options, name, 0 <= getattr(options, name) < math.inf, "be 0 or more")
    in_range = 0 <= options.seed <= LARGEST_SEED
    _require(parser, options, "seed", in_range, f"be from 0 to {LARGEST_SEED}")
    is_device = re.fullmatch(r"auto|(cpu|cuda)(:\d+)?", options.device) is not None
    _require(parser, options, "device", is_device, "be auto, cpu, cuda or cuda:NUMBER")
    _check_model(parser, options)


def _check_model(parser: argparse.ArgumentParser, options: Options) -> None:
    """Ends the program with an error if the model cannot have the given widths or FP8."""
    head_dim = options.head_dim
    if not options.uses_kernels:
        is_divisible = options.dim % options.heads == 0
        _require(parser, options, "dim", is_divisible, "be a multiple of --heads")
        for name in ("head_dim", "fp8"):
            is_absent = getattr(options, name) is None
            _require(parser, options, name, is_absent, "not be given with this model")
    elif head_dim is None:
        is_divisible = options.dim % (8 * options.heads) == 0
        multiple = "be a multiple of 8 times --heads where --head-dim is not given"
        _require(parser, options, "dim", is_divisible, multiple)
        fits = options.dim <= LARGEST_HEAD_DIM * options.heads
        _require(parser, options, "dim", fits, f"be at most {LARGEST_HEAD_DIM} times --heads")
    else:
        rounded = (head_dim // 8 * 8, -(-head_dim // 8) * 8)
        near = sorted({min(max(8, each), LARGEST_HEAD_DIM) for each in rounded})
        expected = f"be a multiple of 8 from 8 to {LARGEST_HEAD_DIM}, which the kernels take"
        nearest = f"{expected} (the nearest: {' and '.join(map(str, near))})"
        _require(parser, options, "head_dim", near == [head_dim], nearest)


def _require(
    parser: argparse.ArgumentParser, options: Options, name: str, holds: bool, what: str
) -> None:
    if not holds:
        parser.error(f"--{name.replace('_', '-')} must {what}, got {getattr(options, name)}")


def choose_device(name: str) -> torch.device:
    """Returns the named device; "auto" is a GPU that has kernels, otherwise the CPU.

    Raises:
        ValueError: this machine does not have the device.
    """
    import torch

    from hstu_attn import ops

    if name == "auto":
        has_gpu = torch.cuda.is_available() and ops.has_cuda_kernels()
        return torch.device("cuda" if has_gpu else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"--device: expected one of this machine, where torch sees {torch.cuda.device_count()} "
            f"GPUs; got {name}"
        )
    return device


def add_log_options(group: argparse._ArgumentGroup) -> None:
    """Adds the options of `open_event_log` that the retrieval example alone has."""
    group.add_argument(
        "--catalog",
        choices=("log", "titles"),
        default="log",
        help="the items that are drawn as negatives and ranked: those with events, or also all "
        "others in MovieLens's file of titles next to --data (movies.dat, movies.csv or u.item)",
    )
    group.add_argument(
        "--ties",
        choices=("log", "quicksort"),
        default="log",
        help="the order of a user's events of equal times: that of --data, or the one that NumPy's "
        "quicksort of all times leaves, as in the data of the published results",
    )


def open_data(
    options: Options, made_up_data: Sequence[Path], write: Callable[[Path], object]
) -> EventLog:
    """Returns the events to train on.

    Args:
        options: the files, how to read them, and the directory of the preprocessed data.
        made_up_data: the files of the made-up data set, which are read if no file is given.
        write: writes the made-up data set into a directory, if it is absent.

    Raises:
        OSError: a file cannot be read, or the preprocessed data cannot be written.
        ValueError: the data have no known layout, or hold no usable events.
    """
    from hstu_attn.data import open_event_log

    sources = options.data or list(made_up_data)
    with naming(options.cache_dir or sources[0].parent):
        if options.data is None and not all(path.exists() for path in sources):
            print(f"Writing a made-up data set to {sources[0].parent}")
            write(sources[0].parent)
        log = open_event_log(
            sources,
            options.cache_dir,
            progress=True,
            layout=options.layout,
            columns=options.columns,
            only=options.only,
            min_user_events=options.min_user_events,
            min_item_events=options.min_item_events,
            catalog=options.catalog,
            ties=options.ties,
        )
    print(f"{', '.join(map(str, sources))}: {log.describe()}")
    return log
