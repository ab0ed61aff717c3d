"""Trains a generative recommender: a stack of HSTU layers that predicts each user's next item.

    python examples/train_retrieval.py                                      # a made-up data set
    python examples/train_retrieval.py --data ml-1m/ratings.dat --out runs/ml
    python examples/train_retrieval.py --data ml-1m/ratings.dat --out runs/r --recipe hstu-ml-1m
    python examples/train_retrieval.py --data ml-1m/ratings.dat --recipe sasrec-ml-1m --seeds 3
    python examples/train_retrieval.py --data ml-1m/ratings.dat --out runs/ml --resume
    python examples/train_retrieval.py --data ml-1m/ratings.dat --out runs/ml --resume --epochs 60
    python examples/train_retrieval.py --data Video_Games.csv.gz --out runs/games --no-baselines
    python examples/train_retrieval.py --data KuaiRand-Pure/data --out runs/views --only long_view

Data are MovieLens ratings (`u.data`, `ratings.dat` or `ratings.csv`, with the titles next to them),
Amazon reviews (ratings only, of 2014, 2018 or 2023), KuaiRand's logs, or Parquet or CSV files whose
columns `--columns` names. Each user's last event is for testing, the one before it for validation,
and the rest for training; `--protocol published` trains on all but the last event, as published
results do (arXiv 2402.17152, section 4.1.1). A recipe, a TOML file of options, reproduces one of
these results. Training uses sampled softmax; evaluation ranks the whole catalog and compares with
two baselines.

The output directory holds the curves, the metrics and checkpoints, from which a killed run
continues exactly; `tensorboard --logdir OUT/tensorboard` shows them live. A directory that holds a
run is never written over: `--resume` continues the run, or with more `--epochs` trains a finished
one on, and another `--out` starts a new one.

With several GPUs, or CPU processes, each process has a part of the rows of the item embeddings and
of their optimizer state (--tables), and a part of each batch:

    torchrun --nproc-per-node 8 examples/train_retrieval.py --data ...
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, cast

from recommender.options import (
    NOT_PART_OF_THE_RUN,
    Options,
    add_log_options,
    choose_device,
    make_parser,
    open_data,
    parse,
)
from recommender.recipes import add_recipe, with_recipe

SYNTHETIC_DATA = Path("runs/synthetic-movielens")
MODELS = {"hstu": "HSTU", "sasrec": "SASRec"}  # and what tables call them

LABELS = {
    "hit_rate_10": "HR@10",
    "ndcg_10": "NDCG@10",
    "hit_rate_50": "HR@50",
    "ndcg_50": "NDCG@50",
    "hit_rate_200": "HR@200",
    "ndcg_200": "NDCG@200",
    "mrr": "MRR",
}


class RetrievalOptions(Options):
    """The command line."""

    recipe: str | None
    published: dict[str, float]
    model: Literal["hstu", "sasrec"]
    tokens_per_batch: int | None
    sequences_per_batch: int | None
    max_seq_len: int
    negatives: int
    negatives_per: Literal["batch", "row"]
    temperature: float
    similarity: str
    relative_bias: Literal["time", "position", "none"]
    protocol: Literal["validated", "published"]
    exclude: Literal["seen", "window", "nothing"]
    show_user: str | None
    seeds: int
    tables: Literal["replicated", "sharded"]

    not_part_of_the_run = (
        *NOT_PART_OF_THE_RUN,
        *("recipe", "published", "show_user", "seeds", "tables"),
    )

    @property
    def uses_kernels(self) -> bool:
        return self.model == "hstu"


class _InPlaceOf(argparse.Action):
    """Stores an option and sets the option that it replaces to None; the last one given counts."""

    def __init__(self, *arguments: Any, other: str, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.other = other

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, self.other, None)


def parse_arguments(arguments: list[str] | None = None) -> RetrievalOptions:
    parser = make_parser(
        __doc__, "runs/retrieval", SYNTHETIC_DATA, epochs=28, learning_rate=4e-3, dropout=0.2
    )
    retrieval = parser.add_argument_group("retrieval")
    add_recipe(retrieval)
    retrieval.add_argument(
        "--model",
        choices=MODELS,
        default="hstu",
        help="HSTU layers, or SASRec (softmax attention, in plain torch) to compare with",
    )
    retrieval.add_argument(
        "--tokens-per-batch",
        type=int,
        default=2048,
        action=_InPlaceOf,
        other="sequences_per_batch",
        help="events per optimizer step; all training events of a user are seen once an epoch",
    )
    retrieval.add_argument(
        "--sequences-per-batch",
        type=int,
        action=_InPlaceOf,
        other="tokens_per_batch",
        help="users per optimizer step, in random order, in place of --tokens-per-batch; the "
        "latest --max-seq-len events of each user are seen once an epoch, and no earlier ones",
    )
    retrieval.add_argument(
        "--max-seq-len", type=int, default=100, help="events per sequence; longer ones are cut"
    )
    retrieval.add_argument(
        "--negatives", type=int, default=256, help="random items each next item is contrasted with"
    )
    retrieval.add_argument(
        "--negatives-per",
        choices=("batch", "row"),
        default="batch",
        help="whether all rows of a batch share --negatives, or each row has that many of its own",
    )
    retrieval.add_argument("--temperature", type=float, default=0.1, help="divides the scores")
    retrieval.add_argument(
        "--similarity", choices=("cosine", "dot"), default="cosine", help="of users and items"
    )
    retrieval.add_argument(
        "--relative-bias",
        choices=("time", "position", "none"),
        default="time",
        help="of the attention scores of HSTU: by position and time, by position alone, or none",
    )
    retrieval.add_argument(
        "--protocol",
        choices=("validated", "published"),
        default="validated",
        help="validated trains on all but the last two events of each user, and tests the weights "
        "that are best in validation; published trains on all but the last event, tests at each "
        "evaluation, and reports the last and the best of these tests",
    )
    retrieval.add_argument(
        "--exclude",
        choices=("seen", "window", "nothing"),
        default="seen",
        help="what is left out of the ranking of a user: every item seen before, those of the last "
        "--max-seq-len events, or nothing",
    )
    add_log_options(retrieval)
    retrieval.add_argument("--show-user", help="id of the user to recommend for; None is the first")
    retrieval.add_argument(
        "--seeds",
        type=int,
        default=1,
        help="runs with as many seeds from --seed on, each in a directory of its own in --out, and "
        "reports means and standard deviations",
    )
    many = parser.add_argument_group("several processes, started by torchrun")
    many.add_argument(
        "--tables",
        choices=("replicated", "sharded"),
        default="sharded",
        help="each has all item embeddings, or a part of their rows",
    )
    options = RetrievalOptions()
    positive = (
        "seeds",
        "tokens_per_batch",
        "sequences_per_batch",
        "max_seq_len",
        "negatives",
        "temperature",
    )
    arguments, options.published = with_recipe(parser, arguments, LABELS.values())
    parse(parser, arguments, options, positive)
    return options


if __name__ == "__main__":
    parse_arguments()  # --help or a wrong option ends here, before torch is imported

import numpy as np
import torch
from recommender.baseline_cache import cached_baselines
from recommender.baselines import (
    CANDIDATES,
    NUM_CANDIDATES,
    VERSION,
    CoOccurrence,
    Popularity,
    co_occurrence_candidates,
)
from recommender.checkpoint import write_state
from recommender.curves import plot_curves
from recommender.directory import BaselineMetrics, check_directory
from recommender.evaluation import Evaluation, Metrics, Scorer, excluded_items, without_items
from recommender.files import write_json
from recommender.loop import Trainer, progress_bar, seed_everything
from recommender.model import RetrievalModel, sampled_softmax_loss
from recommender.processes import ALONE, Processes, device_of
from recommender.sasrec import SASRec
from recommender.saved import SASREC, save_model
from recommender.seeds import Table, train_seeds
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hstu_attn import HSTULayerConfig
from hstu_attn.data import (
    HELD_OUT,
    BatchSampler,
    EventLog,
    JaggedBatch,
    balance,
    check_batch,
    held_out_windows,
    jagged_batch,
    training_windows,
)
from hstu_attn.data.synthetic import write_synthetic_movielens
from hstu_attn.distributed import World, is_launched, run

Split = Literal["validation", "test"]

CPU = torch.device("cpu")
LONGEST_TUNING = timedelta(hours=2)  # other processes wait while the first tunes the baselines
EVALUATION_TOKENS = {"cpu": 2**14, "cuda": 2**17}
SHOWN = ("hit_rate_10", "ndcg_10", "hit_rate_50")  # while training, and in the curves
RANKED = {
    "seen": "all items that the user has not seen",
    "window": "all items but those of the sequence that the model reads",
    "nothing": "all items",
}


def fraction_of_repeats(log: EventLog) -> float:
    """Returns the fraction of users whose last event is on an item that they had seen before."""
    counts = np.diff(log.offsets)
    on_last_item = log.items == np.repeat(log.items[log.offsets[1:] - 1], counts)
    return float((np.add.reduceat(on_last_item, log.offsets[:-1], dtype=np.int64) > 1).mean())


def make_evaluations(
    log: EventLog, options: RetrievalOptions, device: torch.device
) -> dict[Split, Evaluation]:
    """Returns the evaluations on the events held out for validation and for test."""
    splits: tuple[Split, ...] = ("validation", "test")
    return {
        split: Evaluation(
            log,
            held_out_windows(log, split, options.max_seq_len),
            tokens_per_batch=EVALUATION_TOKENS[device.type],
            excluded=options.exclude,
            device=device,
        )
        for split in splits
    }


def baselines_depend_on(log: EventLog, options: RetrievalOptions) -> dict[str, Any]:
    """Returns everything on which the result of `measure_baselines` depends, as JSON."""
    return {
        "version": VERSION,
        "data content": log.manifest["content"],
        "held out": HELD_OUT,
        "max_seq_len": options.max_seq_len,
        "exclude": options.exclude,
        "metrics": [field.name for field in fields(Metrics)],
        "candidates": CANDIDATES,
    }


def measure_baselines(log: EventLog, options: RetrievalOptions) -> BaselineMetrics:
    """Returns the metrics of popularity and of the co-occurrence that is best in validation."""
    evaluations = make_evaluations(log, options, CPU)
    with progress_bar("baselines", NUM_CANDIDATES + 3, "evaluation") as bar:

        def measure(scorer: Scorer, split: Split) -> dict[str, float]:
            metrics = evaluations[split](scorer)
            bar.update()
            return asdict(metrics)

        best: tuple[dict[str, float], CoOccurrence] | None = None
        for scorer in co_occurrence_candidates(log):
            metrics = measure(scorer, "validation")
            if best is None or metrics["ndcg_10"] > best[0]["ndcg_10"]:
                best = metrics, scorer
        assert best is not None
        of_best, co_occurrence = best
        popularity = Popularity(log)
        return {
            "validation": {
                "popularity": measure(popularity, "validation"),
                "co-occurrence": of_best,
            },
            "test": {
                "popularity": measure(popularity, "test"),
                "co-occurrence": measure(co_occurrence, "test"),
            },
            "note": f"co-occurrence: {co_occurrence.describe()}, the best of its settings in "
            "validation",
        }


def make_model(
    options: RetrievalOptions,
    num_items: int,
    device: torch.device,
    mesh: DeviceMesh | None = None,
) -> RetrievalModel | SASRec:
    """Returns the untrained model, on the CPU except for a table sharded over ranks.

    Args:
        options: the command line.
        num_items: the size of the catalog.
        device: where the model will be.
        mesh: the ranks that divide the rows of the item embeddings; None divides nothing.
    """
    shared: dict[str, Any] = {
        "num_layers": options.layers,
        "max_seq_len": options.max_seq_len,
        "dropout_ratio": options.dropout,
        "l2_normalize": options.similarity == "cosine",
        "compute_dtype": options.compute_dtype(device),
        "mesh": mesh,
    }
    if options.model == "sasrec":
        return SASRec(num_items, options.dim, options.heads, **shared)
    config = HSTULayerConfig.research(
        embedding_dim=options.dim,
        num_heads=options.heads,
        linear_dim=options.dim_per_head,
        attention_dim=options.dim_per_head,
        max_sequence_len=options.max_seq_len,
        linear_dropout_rate=options.dropout,
        enable_relative_attention_bias=options.relative_bias != "none",
        num_buckets=128 if options.relative_bias == "time" else 0,
    )
    return RetrievalModel(num_items, replace(config, fp8=options.layer_fp8), **shared)


def baselines_of(log: EventLog, options: RetrievalOptions) -> BaselineMetrics:
    """Returns the result of `measure_baselines`, cached from an earlier run on the same data."""
    return cached_baselines(
        log.directory,
        baselines_depend_on(log, options),
        lambda: measure_baselines(log, options),
    )


class RetrievalTrainer(Trainer[JaggedBatch]):
    """Trains the model to distinguish each row's next item from others.

    Args:
        options: the command line.
        log: the events.
        device: where to train.
        processes: the processes of the run.
    """

    advice = "A lower --learning-rate, more --warmup-steps or a higher --temperature may help."

    def __init__(
        self,
        options: RetrievalOptions,
        log: EventLog,
        device: torch.device,
        processes: Processes | None = None,
    ) -> None:
        seed_everything(options.seed)
        processes = processes or Processes()
        mesh = processes.mesh if options.tables == "sharded" else None
        self.model = make_model(options, log.num_items, device, mesh).to(device)
        self.retrieval = options
        self.log = log
        self.split = "test" if options.protocol == "published" else "validation"
        self.windows = training_windows(
            log,
            options.max_seq_len,
            before=self.split,
            latest_only=options.sequences_per_batch is not None,
        )
        self.evaluations = make_evaluations(log, options, device)
        batches = BatchSampler(
            self.windows.lengths,
            options.tokens_per_batch,
            options.seed,
            options.sequences_per_batch,
        )
        identity = {"data content": log.manifest["content"]}
        super().__init__(options, self.model, batches, identity, processes)

    def draw(self) -> JaggedBatch:
        windows = self.windows.take(next(self.batches))
        if self.processes.num_ranks > 1:
            parts = balance(windows.lengths, self.processes.num_ranks, seed=self.options.seed)
            windows = windows.take(parts[self.processes.rank])
        batch = jagged_batch(self.log, windows)
        check_batch(batch, self.log.num_items)
        return batch

    def losses_of(self, batch: JaggedBatch) -> tuple[Tensor, Tensor]:
        losses = sampled_softmax_loss(
            self.model,
            self.trained(batch),
            batch.target_items,
            self.retrieval.negatives,
            self.retrieval.temperature,
            self.retrieval.negatives_per == "row",
        )
        return losses, batch.seq_offsets

    def evaluate(self, split: Split) -> Metrics:
        """Returns the model's metrics."""
        self.model.eval()
        return self.evaluations[split](self.model.scores)

    def validate(self) -> dict[str, float]:
        return asdict(self.evaluate(self.split))

    def results(self) -> dict[str, dict[str, float]]:
        """Returns the rows of the trained model in the table of the test."""
        name = MODELS[self.retrieval.model]
        if self.split == "validation":
            return {name: asdict(self.evaluate("test"))}
        tests = self.validation
        return {
            f"{name}, last epoch": tests[max(tests)],
            f"{name}, best epoch": max(reversed(tests.values()), key=self.quality),
        }

    def quality(self, metrics: Mapping[str, float]) -> float:
        return metrics["ndcg_10"]

    def describe(self, metrics: Mapping[str, float]) -> str:
        return "  ".join(f"{LABELS[name]} {metrics[name]:.4f}" for name in SHOWN)

    def save_best(self, path: Path, validation: Mapping[str, float]) -> None:
        weights = self.processes.whole_state(self.model)
        if not self.processes.is_first:
            return
        if isinstance(self.model, SASRec):  # SASRec is not served
            state = {"kind": SASREC, "model": weights, "validation": dict(validation)}
            write_state(path, state)
        else:
            log = self.log
            save_model(path, self.model, log.source_item_ids, log.titles, validation, weights)

    def load_best(self, path: Path) -> None:
        state = torch.load(path, "cpu", weights_only=True, mmap=True)
        self.processes.load_whole_state(self.model, state["model"])

    def plot(self, path: Path) -> None:
        label = "sampled softmax cross-entropy"
        shown = {name: LABELS[name] for name in SHOWN}
        split = self.split.capitalize()
        plot_curves(path, self.losses, self.validation, self.baselines, shown, label, split)


def with_published(table: Table, published: Mapping[str, float]) -> Table:
    """Returns the table with a last row of the published metrics, if there are any."""
    row = {name: published[label] for name, label in LABELS.items() if label in published}
    return {**table, "published": row} if row else table


def print_table(metrics: Table, caption: str) -> None:
    """Prints one row for each name, with "-" for a metric that it does not have."""
    width = max(len(name) for name in metrics)
    print(f"\n{caption}\n\n{'':{width}}" + "".join(f"  {label:>8}" for label in LABELS.values()))
    for name, row in metrics.items():
        cells = (f"{row[column]:.4f}" if column in row else "-" for column in LABELS)
        print(f"{name:{width}}" + "".join(f"  {cell:>8}" for cell in cells))


def find_user(log: EventLog, name: str | None) -> int:
    """Returns the user whose recommendations are shown.

    Args:
        log: the events.
        name: the user's id in the data; None is the first user.

    Raises:
        ValueError: the data have no such user.
    """
    found = 0 if name is None else log.find_user(name)
    if found is None:
        raise ValueError(f"--show-user must be a user of the data, got {name}")
    return found


@torch.no_grad()
def print_recommendations(trainer: RetrievalTrainer, user: int, count: int = 10) -> None:
    """Prints the model's first recommendations for one user, next to what they last watched.

    They are made before the event that is held out for testing.
    """
    log, options = trainer.log, trainer.retrieval
    trainer.model.eval()
    window = held_out_windows(log, "test", options.max_seq_len).take(np.array([user]))
    scores = trainer.model.scores(jagged_batch(log, window).to(trainer.device))
    excluded = excluded_items(log, window, options.exclude)
    scores = without_items(scores, excluded.to(scores.device))
    end = int(window.ends[0]) - 1
    watched = [log.titles[item] for item in log.items[max(end - count, log.offsets[user]) : end]]
    recommended = scores[0].topk(min(count, log.num_items)).indices.tolist()
    next_item = int(log.items[end])

    print(f"\nUser {log.user_name(user)}\n")
    print(f"     {'watched last (newest first)':40}  recommended")
    for place, (seen, item) in enumerate(
        itertools.zip_longest(reversed(watched), recommended, fillvalue=None), start=1
    ):
        title = "" if item is None else log.titles[item]
        mark = "   <- watched next" if item == next_item else ""
        print(f"{place:3}  {seen or '':40.40}  {title}{mark}")
    print(f"\nWatched next: {log.titles[next_item]}")


def train(options: RetrievalOptions, world: World = ALONE) -> Table:
    """Runs the job on this process, from reading the file to printing the table.

    Returns:
        The table, the same on every process.
    """
    device = device_of(options, world)
    processes = Processes(world)
    processes.together(lambda: check_directory(options))
    with processes.one_voice():
        with processes.first_goes_first():
            log = open_data(options, [SYNTHETIC_DATA / "ratings.dat"], write_synthetic_movielens)
        user = find_user(log, options.show_user)
        trainer = RetrievalTrainer(options, log, device, processes)
        trainer.start()

        def measure() -> BaselineMetrics:
            found = baselines_of(log, options) if processes.is_first else None
            return cast("BaselineMetrics", processes.from_first(found))

        baselines = trainer.compare_with(measure)
        trainer.run()

        # The result is on the disk before anything else can fail.
        table = {**baselines["test"], **trainer.results()}
        if processes.is_first:
            write_json(options.out / "metrics.json", table)
        report(trainer, table, baselines["note"], user)
    return table


def report(trainer: RetrievalTrainer, table: Table, note: str, user: int) -> None:
    """Prints what the test found and what one user is recommended, and draws the curves.

    All processes call it together.

    Args:
        trainer: with the model that is reported.
        table: the metrics of the test.
        note: a note on the baselines.
        user: the user whose recommendations are shown.
    """
    log, options = trainer.log, trainer.retrieval
    print_table(
        with_published(table, options.published),
        f"Test, leave-one-out: the last event of {log.num_users:,} users among "
        f"{RANKED[options.exclude]} ({log.num_items:,} items in all).",
    )
    repeats = fraction_of_repeats(log)
    if repeats and options.exclude == "seen":
        print(
            f"\nThe last item of {repeats:.1%} of the users is one that they had before: always a "
            "miss here. --exclude nothing ranks such items, too."
        )
    if options.protocol == "published":
        print(
            "\nTrained on all events but the last; the best epoch is that of the best NDCG@10 here."
        )
    if note:
        print(f"\n{note}")
    print_recommendations(trainer, user)
    curves = options.out / "curves.png"
    if trainer.processes.is_first:
        trainer.plot(curves)
    metrics = options.out / "metrics.json"
    print(f"\nCurves: {curves}; metrics: {metrics}; model: {trainer.best}")


def main(arguments: list[str] | None = None) -> int:
    """Runs the job; the exit status is 1 if it fails."""
    try:
        options = parse_arguments(arguments)
        if options.seeds == 1:
            run(
                lambda world: train(options, world),
                device_type=choose_device(options.device).type,
                timeout=LONGEST_TUNING,
            )
        elif is_launched():
            raise ValueError(
                f"--seeds must be 1 where torchrun has started processes, got {options.seeds}"
            )
        else:
            summary = train_seeds(options, train)
            summary = with_published(summary, options.published)
            print_table(summary, f"Of {options.seeds} seeds, from {options.seed} on.")
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted; --resume continues from the last checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
