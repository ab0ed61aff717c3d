"""Trains a generative recommender that predicts what each user will do about each candidate.

    python examples/train_ranking.py                                        # a made-up data set
    python examples/train_ranking.py --data KuaiRand-Pure/data --out runs/views
    python examples/train_ranking.py --data KuaiRand-Pure/data --out runs/views --resume
    python examples/train_ranking.py --data KuaiRand-Pure/data --out runs/views --resume --epochs 6
    python examples/train_ranking.py --data ml-1m/ratings.dat --out runs/stars --tasks rating_4=0.5
    python examples/train_ranking.py --data ml-1m/ratings.dat --out runs/late --held-out-share 0.1
    python examples/train_ranking.py --data Video_Games.csv.gz --out runs/games --no-baselines

Data are KuaiRand's logs, whose tasks are its actions; MovieLens ratings or Amazon reviews, whose
tasks are ratings of that many stars or more; or Parquet or CSV files, whose columns `--columns`
names, with either kind of tasks. Each user's last events are for testing, the ones before them for
validation, and the rest for training; with `--held-out-share`, two points in time split the events
of all users instead.

A sequence is a request: contextual features, a history of alternating items and actions, and
candidates that see all of these but not each other. In training the candidates are a user's next
`--targets` events, so that one pass over a history trains on all of them, and each event is a
candidate once per epoch. More candidates per pass cost less each, but the history is older for the
last ones. The input has neither the actions nor the times of the candidates, so that no label leaks
into it.

Evaluation uses AUC and normalized entropy of each task, next to rates of items and users. The
output directory holds the curves, also for TensorBoard, the metrics and checkpoints, from which a
killed run continues exactly. A directory that holds a run is never written over: `--resume`
continues the run, or with more `--epochs` trains a finished one on, and another `--out` starts a
new one.

With several GPUs, or CPU processes, the steps are those of a single process, divided among them:

    torchrun --nproc-per-node 8 examples/train_ranking.py --data ...

Each process has a part of every embedding table (--tables) and all of the layers (--strategy ddp)
or a part of them (fsdp2). A run may continue on another number of processes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from recommender.options import (
    Options,
    Strategy,
    choose_device,
    make_parser,
    open_data,
    parse,
)

SYNTHETIC_DATA = Path("runs/synthetic-kuairand")


class RankingOptions(Options):
    """The command line."""

    tasks: list[str] | None
    history: int
    targets: int
    held_out: int
    held_out_share: float | None
    sequences_per_batch: int
    user_buckets: int
    target_group_size: int
    strategy: Strategy
    tables: Literal["replicated", "sharded", "torchrec"]

    not_part_of_the_run = (*Options.not_part_of_the_run, "strategy", "tables")


def parse_arguments(arguments: list[str] | None = None) -> RankingOptions:
    parser = make_parser(
        __doc__, "runs/ranking", SYNTHETIC_DATA, epochs=3, learning_rate=3e-3, dropout=0.1
    )
    ranking = parser.add_argument_group("ranking")
    ranking.add_argument(
        "--tasks",
        nargs="+",
        metavar="ACTION[=WEIGHT]",
        help="actions to predict, and the weights of their losses; None is is_click, is_like and "
        "long_view, or ratings of at least 4 and of 5 (rating_4, rating_5)",
    )
    ranking.add_argument("--history", type=int, default=64, help="events before the candidates")
    ranking.add_argument(
        "--targets", type=int, default=16, help="candidates of a training sequence"
    )
    ranking.add_argument(
        "--held-out", type=int, default=5, help="events of each user for validation, and for test"
    )
    ranking.add_argument(
        "--held-out-share",
        type=float,
        metavar="SHARE",
        help="in place of --held-out, test on the latest SHARE of the events of all users, "
        "validate on as large a share before it, and train on what is earlier",
    )
    ranking.add_argument(
        "--sequences-per-batch", type=int, default=32, help="of one step, over all processes"
    )
    ranking.add_argument(
        "--user-buckets", type=int, default=100_000, help="largest table of user embeddings"
    )
    ranking.add_argument(
        "--target-group-size", type=int, default=1, help="candidates that see each other causally"
    )
    many = parser.add_argument_group("several processes, started by torchrun")
    many.add_argument(
        "--strategy",
        choices=get_args(Strategy),
        default="ddp",
        help="whether a rank has all parameters outside the tables (ddp), or a part",
    )
    many.add_argument(
        "--tables",
        choices=("replicated", "sharded", "torchrec"),
        default="sharded",
        help="each has all embedding tables, or a part of the rows of each; those of torchrec "
        "update only the rows of a batch, by an optimizer of their own, and are not clipped",
    )
    options = RankingOptions()
    positive = (
        *("history", "targets", "held_out", "sequences_per_batch", "user_buckets"),
        "target_group_size",
    )
    parse(parser, arguments, options, positive)
    share = options.held_out_share
    if share is not None and not 0 < share < 0.5:
        parser.error(f"--held-out-share must be above 0 and below 0.5, got {share:g}")
    return options


if __name__ == "__main__":
    parse_arguments()  # --help or a wrong option ends here, before torch is imported

import numpy as np
import torch
from recommender.curves import plot_curves
from recommender.directory import BaselineMetrics, check_directory
from recommender.files import write_json
from recommender.loop import Trainer, progress_bar, seed_everything
from recommender.processes import Processes, device_of
from recommender.ranking import (
    EmbeddingTables,
    RankingConfig,
    RankingModel,
    ranking_loss,
    read_ranking_model,
    save_ranking_model,
    task_labels,
)
from recommender.ranking_data import (
    RATING_ACTIONS,
    EndlessBatches,
    RankingBatch,
    RankingData,
    Split,
    check_ranking_batch,
)
from recommender.ranking_metrics import (
    NUM_CANDIDATES,
    Scorer,
    base_rates,
    evaluate_ranking,
    fit_rates,
    mean_entropy,
)
from torch import Tensor, nn

from hstu_attn.data import ACTIONS, AttentionCost, BalancedBatchSampler
from hstu_attn.data.synthetic_layouts import write_synthetic_kuairand
from hstu_attn.distributed import (
    ShardedEmbeddings,
    World,
    run,
    torchrec_embedding_collection,
)

SYNTHETIC_LOGS = [
    SYNTHETIC_DATA / f"log_standard_{dates}_synthetic.csv"
    for dates in ("4_08_to_4_21", "4_22_to_5_08")
]
CPU = torch.device("cpu")
EVALUATION_ROWS = 32768
TABLES, TORCHREC_TABLES = "embeddings.tables.", "embeddings.collection.embeddings."
DEFAULT_TASKS = {"is_click", "long_view", "is_like", "rating_4", "rating_5"}


def task_weights(chosen: list[str] | None, actions: tuple[str, ...]) -> dict[str, float]:
    """Returns the weight of each task's loss.

    Args:
        chosen: the values of `--tasks`.
        actions: the actions of the data.

    Raises:
        ValueError: an action that the data do not have, one named twice, or a wrong weight.
    """
    if chosen is None:
        return {action: 1.0 for action in actions if action in DEFAULT_TASKS}
    weights: dict[str, float] = {}
    for text in chosen:
        name, _, weight = text.partition("=")
        if name not in actions or name in weights:
            raise ValueError(f"--tasks must be different ones of {', '.join(actions)}, got {text}")
        try:
            weights[name] = float(weight or 1)
        except ValueError:
            weights[name] = -1.0
        if not 0 < weights[name] < float("inf"):
            raise ValueError(f"--tasks must have positive weights, got {text}")
    return weights


def embedding_tables(
    options: RankingOptions, sizes: Mapping[str, int], device: torch.device, processes: Processes
) -> nn.Module:
    """Makes the tables that `--tables` names; a single process has undivided ones.

    Initial rows do not depend on the number of processes, except those of torchrec.

    Raises:
        ValueError: torchrec is not installed.
    """
    tables = {name: (size, options.dim) for name, size in sizes.items()}
    mesh = processes.mesh
    if options.tables == "torchrec" and mesh is not None:
        optimizer = torch.optim.Adam if device.type == "cuda" else torch.optim.Adagrad
        try:
            return torchrec_embedding_collection(
                tables, mesh, optimizer=optimizer, options={"lr": options.learning_rate}
            )
        except ImportError as error:
            raise ValueError(
                f"--tables torchrec needs torchrec and fbgemm-gpu, see docs/distributed.md: {error}"
            ) from error
    if mesh is None or options.tables == "replicated":
        return EmbeddingTables(sizes, options.dim, options.seed, device)
    return ShardedEmbeddings(tables, mesh, seed=options.seed, device=device)


class RankingTrainer(Trainer[RankingBatch]):
    """Trains the model to predict the actions on candidates.

    Args:
        options: the command line.
        data: the events.
        weights: the weights of the tasks' losses.
        device: where to train.
        processes: the processes of the run.
    """

    def __init__(
        self,
        options: RankingOptions,
        data: RankingData,
        weights: Mapping[str, float],
        device: torch.device,
        processes: Processes,
    ) -> None:
        seed_everything(options.seed)
        self.data = data
        self.weights = torch.tensor(list(weights.values()), device=device)
        self.config = RankingConfig(
            sizes=data.sizes,
            actions=data.actions,
            tasks=tuple(weights),
            max_history=options.history,
            max_targets=data.most_targets,
            dim=options.dim,
            heads=options.heads,
            head_dim=options.head_dim,
            layers=options.layers,
            dropout=options.dropout,
            target_group_size=options.target_group_size,
            fp8=options.layer_fp8,
        )
        embeddings = embedding_tables(options, data.sizes, device, processes)
        self.model = RankingModel(self.config, options.compute_dtype(device), embeddings).to(device)
        self.windows = data.windows("training")
        sampler = BalancedBatchSampler(
            self.windows.lengths,
            AttentionCost.of_layer(self.config.layer),
            options.sequences_per_batch,
            num_ranks=processes.num_ranks,
            rank=processes.rank,
            seed=options.seed,
        )
        identity = {
            "data content": data.log.manifest["content"],
            "tables of torchrec": options.tables == "torchrec",
        }
        super().__init__(options, self.model, EndlessBatches(sampler), identity, processes)

    def draw(self) -> RankingBatch:
        batch = self.data.batch(self.windows.take(next(self.batches)))
        config = self.config
        check_ranking_batch(batch, config.sizes, len(config.actions), config.max_rows)
        return batch

    def losses_of(self, batch: RankingBatch) -> tuple[Tensor, Tensor]:
        labels = task_labels(self.config, batch.target_actions)
        return ranking_loss(self.trained(batch), labels, self.weights), batch.target_offsets

    def evaluate(self, split: Split) -> dict[str, float]:
        """Returns the model's metrics."""
        self.model.eval()
        return evaluate_split(
            self.model, self.data, self.config.tasks, split, self.device, self.processes
        )

    def validate(self) -> dict[str, float]:
        return self.evaluate("validation")

    def quality(self, metrics: Mapping[str, float]) -> float:
        return -mean_entropy(metrics)

    def describe(self, metrics: Mapping[str, float]) -> str:
        tasks = self.config.tasks
        return "  ".join(
            f"{task} AUC {metrics[f'auc/{task}']:.4f} NE {metrics[f'ne/{task}']:.4f}"
            for task in tasks
        )

    def save_best(self, path: Path, validation: Mapping[str, float]) -> None:
        state = self.processes.whole_state(self.model)
        if self.processes.is_first:
            named = {name.replace(TORCHREC_TABLES, TABLES): state[name] for name in state}
            save_ranking_model(path, self.model, named, validation, self.data.log)

    def load_best(self, path: Path) -> None:
        state = read_ranking_model(path)["model"]
        if self.options.tables == "torchrec":
            state = {name.replace(TABLES, TORCHREC_TABLES): state[name] for name in state}
        self.processes.load_whole_state(self.model, state)

    def plot(self, path: Path) -> None:
        labels = {f"auc/{task}": f"AUC {task}" for task in self.config.tasks}
        label = "binary cross-entropy"
        plot_curves(path, self.losses, self.validation, self.baselines, labels, label)


def evaluate_split(
    scorer: Scorer,
    data: RankingData,
    tasks: tuple[str, ...],
    split: Split,
    device: torch.device,
    processes: Processes | None = None,
) -> dict[str, float]:
    """Returns the metrics of a scorer on the events held out for validation or test.

    Several processes evaluate them together.
    """
    return evaluate_ranking(
        scorer,
        data,
        data.windows(split),
        tasks,
        rows_per_batch=EVALUATION_ROWS,
        device=device,
        processes=processes,
    )


def print_table(metrics: Mapping[str, Mapping[str, float]], tasks: tuple[str, ...]) -> None:
    """Prints one row for each name."""
    width = max(len(name) for name in metrics)
    print(f"\n{'':{width}}" + "".join(f"  {task:>16}" for task in tasks))
    print(f"{'':{width}}" + f"  {'AUC':>7}  {'NE':>7}" * len(tasks))
    for name, row in metrics.items():
        numbers = [f"  {row[f'auc/{task}']:7.4f}  {row[f'ne/{task}']:7.4f}" for task in tasks]
        print(f"{name:{width}}" + "".join(numbers))


def measure_baselines(
    data: RankingData, tasks: tuple[str, ...], processes: Processes
) -> BaselineMetrics:
    """Returns the metrics of the rates; validation chooses how item and user rates are smoothed."""
    shown = processes.is_first
    # The progress bar counts each candidate in validation, then the three chosen ones in the test
    # and two of them in validation again.
    with progress_bar("baselines", NUM_CANDIDATES + 5, "evaluation", shown=shown) as bar:

        def measure(scorer: Scorer, split: Split) -> dict[str, float]:
            metrics = evaluate_split(scorer, data, tasks, split, CPU, processes)
            bar.update()
            return metrics

        def quality(scorer: Scorer) -> float:
            return -mean_entropy(measure(scorer, "validation"))

        rates = fit_rates(data, tasks, quality)
        drawn = {name: rate for name, rate in rates.items() if name != "base rate"}
        return {
            "validation": {name: measure(rate, "validation") for name, rate in drawn.items()},
            "test": {name: measure(rate, "test") for name, rate in rates.items()},
            "note": "",
        }


def train(options: RankingOptions, world: World) -> None:
    """Runs the job on this process, from reading the file to printing the table."""
    device = device_of(options, world)
    if options.tables == "torchrec" and world.mesh is None:
        raise ValueError("--tables torchrec needs processes that torchrun has started")
    task_weights(options.tasks, (*ACTIONS, *RATING_ACTIONS))  # of any data
    processes = Processes(world, options.strategy)
    processes.together(lambda: check_directory(options))
    with processes.one_voice():
        with processes.first_goes_first():
            log = open_data(options, SYNTHETIC_LOGS, write_synthetic_kuairand)
        data = RankingData(
            log,
            options.history,
            options.targets,
            options.held_out,
            options.user_buckets,
            options.held_out_share,
        )
        weights = task_weights(options.tasks, data.actions)
        tasks = tuple(weights)
        base_rates(data, tasks)  # refuses a task that cannot be learned
        trainer = RankingTrainer(options, data, weights, device, processes)
        trainer.start()
        baselines = trainer.compare_with(lambda: measure_baselines(data, tasks, processes))
        trainer.run()

        table = {**baselines["test"], "HSTU": trainer.evaluate("test")}
        if processes.is_first:
            # The result is on the disk before anything else can fail.
            write_json(options.out / "metrics.json", table)
            report(trainer, table)


def report(trainer: RankingTrainer, table: Mapping[str, Mapping[str, float]]) -> None:
    """Prints what the test found, and draws the curves."""
    out, data = trainer.options.out, trainer.data
    begins, ends = data.bounds[2:]
    users, events = np.count_nonzero(ends > begins), (ends - begins).sum()
    print(f"\nTest: the last events of {users:,} users, {events:,} in all.")
    print_table(table, trainer.config.tasks)
    trainer.plot(out / "curves.png")
    print(
        f"\nCurves: {out / 'curves.png'}, tensorboard --logdir {out / 'tensorboard'}; "
        f"metrics: {out / 'metrics.json'}; model: {trainer.best}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs the job; the exit status is 1 if it fails."""
    options = parse_arguments(arguments)
    try:
        run(
            lambda world: train(options, world),
            device_type=choose_device(options.device).type,
        )
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted; --resume continues from the last checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
