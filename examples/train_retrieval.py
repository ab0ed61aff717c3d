"""Trains a generative recommender: a stack of HSTU layers that predicts each user's next item.

    python examples/train_retrieval.py                                      # a made-up data set
    python examples/train_retrieval.py --data ml-1m/ratings.dat --epochs 60
    python examples/train_retrieval.py --data ml-1m/ratings.dat --epochs 60 --resume
    python examples/train_retrieval.py --data Video_Games.csv.gz
    python examples/train_retrieval.py --data KuaiRand-Pure/data --only long_view

Data are MovieLens ratings (`ratings.dat` or `ratings.csv`, with the titles beside them), Amazon
reviews (ratings only, of 2018 or 2023) or KuaiRand's logs. Of each user the last event is for
testing, the one before it for validation, and the rest for training (arXiv 2402.17152, section
4.1.1). Training is by sampled softmax; evaluation ranks the whole catalogue and stands beside two
baselines. The output directory holds the curves, the metrics and checkpoints, from which a killed
run continues exactly.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from recommender.baselines import CoOccurrence, Popularity, co_occurrence_candidates
from recommender.checkpoint import Checkpoints, random_state, restore_random_state
from recommender.curves import plot_curves
from recommender.evaluation import Metrics, Scorer, evaluate, mask_seen
from recommender.model import RetrievalModel, sampled_softmax_loss
from recommender.saved import load_model, save_model
from tqdm import tqdm

from hstu_attn import HSTULayerConfig, RelativeBias, hstu_attention
from hstu_attn.data import (
    ACTIONS,
    LAYOUT_NAMES,
    BatchSampler,
    EventLog,
    LayoutName,
    held_out_windows,
    jagged_batch,
    open_event_log,
    training_windows,
)
from hstu_attn.data.synthetic import write_synthetic_movielens

Split = Literal["validation", "test"]

SYNTHETIC_DATA = Path("runs/synthetic-movielens")
CPU = torch.device("cpu")
EVALUATION_TOKENS = 16384
NOT_PART_OF_THE_RUN = (
    *("data", "layout", "only", "cache_dir", "out", "resume", "device", "show_user"),
    "checkpoint_every",
)


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and what to look at."""


class Options(argparse.Namespace):
    """The command line."""

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
    tokens_per_batch: int
    max_seq_len: int
    dim: int
    layers: int
    heads: int
    dropout: float
    learning_rate: float
    weight_decay: float
    warmup_steps: int
    clip_norm: float
    negatives: int
    temperature: float
    similarity: str
    keep_seen: bool
    eval_every: int
    checkpoint_every: int
    show_user: str | None


def parse_arguments(arguments: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    files = parser.add_argument_group("files")
    files.add_argument(
        "--data",
        type=Path,
        nargs="+",
        help="MovieLens ratings.dat or ratings.csv, Amazon reviews as ratings only, or KuaiRand's "
        "logs or their directory, each also as .gz; without it a made-up data set is written to "
        f"{SYNTHETIC_DATA} once and read from there",
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
        "--out", type=Path, default=Path("runs/retrieval"), help="curves, metrics, checkpoints"
    )
    files.add_argument(
        "--resume",
        action="store_true",
        help="continue from the checkpoint in --out, if there is one; "
        "without this a run starts anew and replaces what --out holds",
    )

    training = parser.add_argument_group("training")
    training.add_argument("--epochs", type=int, default=28, help="passes over the training events")
    training.add_argument("--steps", type=int, help="optimizer steps; None is by --epochs")
    training.add_argument(
        "--tokens-per-batch", type=int, default=2048, help="events per optimizer step"
    )
    training.add_argument(
        "--max-seq-len", type=int, default=100, help="events per sequence; longer ones are cut"
    )
    training.add_argument("--learning-rate", type=float, default=4e-3, help="highest; cosine decay")
    training.add_argument("--warmup-steps", type=int, default=100, help="linear, from zero")
    training.add_argument("--weight-decay", type=float, default=0.0, help="of AdamW")
    training.add_argument("--clip-norm", type=float, default=1.0, help="largest gradient norm")
    training.add_argument(
        "--negatives", type=int, default=256, help="items each batch is contrasted with"
    )
    training.add_argument("--temperature", type=float, default=0.1, help="divides the scores")
    training.add_argument("--seed", type=int, default=0, help="of everything random")

    model = parser.add_argument_group("model")
    model.add_argument("--dim", type=int, default=64, help="width of the item embeddings")
    model.add_argument("--layers", type=int, default=2, help="HSTU layers")
    model.add_argument("--heads", type=int, default=2, help="heads; each has --dim / --heads")
    model.add_argument("--dropout", type=float, default=0.2, help="of inputs and in each layer")
    model.add_argument(
        "--similarity", choices=("cosine", "dot"), default="cosine", help="of users and items"
    )

    running = parser.add_argument_group("running")
    running.add_argument(
        "--device", default="auto", help="auto is cuda where it has the kernels, otherwise cpu"
    )
    running.add_argument(
        "--bf16", action="store_true", help="compute the layers in bfloat16; always so on cuda"
    )
    running.add_argument("--eval-every", type=int, default=300, help="steps between validations")
    running.add_argument("--checkpoint-every", type=int, default=300, help="steps between saves")
    running.add_argument(
        "--keep-seen", action="store_true", help="rank items that the user has seen, too"
    )
    running.add_argument("--show-user", help="id of the user to recommend for; None is the first")
    options = parser.parse_args(arguments, namespace=Options())
    positive = (
        *("steps", "epochs", "tokens_per_batch", "max_seq_len", "learning_rate", "clip_norm"),
        *("negatives", "temperature", "layers", "eval_every", "checkpoint_every"),
    )
    for name in positive:
        value = getattr(options, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    if options.heads <= 0 or options.dim % (8 * options.heads):
        parser.error("--dim must be a multiple of 8 times --heads")
    return options


def choose_device(name: str) -> torch.device:
    """The device of that name; for "auto" a GPU that can train the model, otherwise the CPU."""
    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        if has_relative_bias(torch.device("cuda")):
            return torch.device("cuda")
        print("Training on the CPU: hstu_attn has no kernels with a relative bias for the GPU")
    return CPU


def has_relative_bias(device: torch.device) -> bool:
    """Whether attention with the model's relative bias is built for the device."""
    q = torch.zeros(1, 1, 32, dtype=torch.bfloat16, device=device)
    offsets = torch.tensor([0, 1], device=device)
    bias = RelativeBias(torch.zeros(1, 1, device=device))
    try:
        hstu_attention(q, q, q, cu_seqlens_q=offsets, max_seqlen_q=1, bias=bias)
    except NotImplementedError:
        return False
    return True


def open_data(options: Options) -> EventLog:
    """The events to train on; writes the made-up ones where no file is given."""
    sources = options.data
    if sources is None:
        sources = [SYNTHETIC_DATA / "ratings.dat"]
        if not sources[0].exists():
            print(f"Writing a made-up data set to {sources[0]}")
            write_synthetic_movielens(SYNTHETIC_DATA)
    log = open_event_log(
        sources, options.cache_dir, progress=True, layout=options.layout, only=options.only
    )
    print(f"{', '.join(map(str, sources))}: {log.describe()}")
    return log


def share_of_repeats(log: EventLog) -> float:
    """The share of users whose last event is on an item that they had before."""
    counts = np.diff(log.offsets)
    on_last_item = log.items == np.repeat(log.items[log.offsets[1:] - 1], counts)
    return float((np.add.reduceat(on_last_item, log.offsets[:-1], dtype=np.int64) > 1).mean())


def evaluate_split(
    scorer: Scorer, log: EventLog, split: Split, options: Options, device: torch.device
) -> Metrics:
    """Metrics of a scorer on the events held out for validation or test."""
    return evaluate(
        scorer,
        log,
        held_out_windows(log, split, options.max_seq_len),
        tokens_per_batch=EVALUATION_TOKENS,
        exclude_seen=not options.keep_seen,
        device=device,
    )


def fit_baselines(log: EventLog, options: Options) -> tuple[Popularity, CoOccurrence]:
    """Popularity, and the co-occurrence that does best on the validation events."""
    candidates = tqdm(
        co_occurrence_candidates(log), desc="fitting baselines", unit="setting", leave=False
    )
    co_occurrence = max(
        candidates,
        key=lambda scorer: evaluate_split(scorer, log, "validation", options, CPU).ndcg_10,
    )
    return Popularity(log), co_occurrence


class Trainer:
    """A run: the model, its optimizer, the position in the data, and what has been measured.

    Args:
        options: the command line.
        log: the events.
        device: where to train.
        baselines: validation metrics by name, for the picture.
    """

    def __init__(
        self, options: Options, log: EventLog, device: torch.device, baselines: dict[str, Metrics]
    ) -> None:
        random.seed(options.seed)
        np.random.seed(options.seed)  # noqa: NPY002
        torch.manual_seed(options.seed)
        self.options = options
        self.log = log
        self.device = device
        self.baselines = baselines
        head_dim = options.dim // options.heads
        config = HSTULayerConfig.research(
            embedding_dim=options.dim,
            num_heads=options.heads,
            linear_dim=head_dim,
            attention_dim=head_dim,
            max_sequence_len=options.max_seq_len,
            linear_dropout_rate=options.dropout,
        )
        self.model = RetrievalModel(
            log.num_items,
            config,
            options.layers,
            options.max_seq_len,
            options.dropout,
            l2_normalise=options.similarity == "cosine",
            compute_dtype=torch.bfloat16
            if options.bf16 or device.type == "cuda"
            else torch.float32,
        ).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=options.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=options.weight_decay,
        )
        self.windows = training_windows(log, options.max_seq_len)
        self.sampler = BatchSampler(self.windows.lengths, options.tokens_per_batch, options.seed)
        self.steps = options.steps or options.epochs * self.sampler.batches_per_epoch
        self.losses: list[float] = []
        self.validation: dict[int, Metrics] = {}
        self.checkpoints = Checkpoints(options.out)
        self.best = options.out / "best.pt"

    @property
    def step(self) -> int:
        """Steps made so far."""
        return len(self.losses)

    def run(self) -> None:
        """Trains to the last step, validating and saving on the way; then takes the weights that
        did best in validation."""
        options = self.options
        with tqdm(
            desc="training",
            total=self.steps,
            initial=self.step,
            unit="step",
            mininterval=0.5 if sys.stderr.isatty() else 15,
        ) as bar:
            while self.step < self.steps:
                self.losses.append(self._train_step())
                last = self.step == self.steps
                bar.update()
                bar.set_postfix(self._progress(), refresh=False)
                if last or self.step % options.eval_every == 0:
                    self._validate(bar)
                if last or self.step % options.checkpoint_every == 0:
                    self._save()
        self.model = load_model(self.best, self.device).model

    def resume(self) -> None:
        """Continues from the newest checkpoint, if there is one.

        Raises:
            TrainingError: it belongs to other data or other options.
        """
        state = self.checkpoints.load()
        if state is None:
            print(f"No checkpoint in {self.options.out}: starting anew")
            return
        for name, value in self._identity().items():
            if state["identity"].get(name) != value:
                raise TrainingError(
                    f"the checkpoint in {self.options.out} was made with {name} = "
                    f"{state['identity'].get(name)!r}, this run has {value!r}"
                )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sampler.load_state_dict(state["sampler"])
        self.losses = state["losses"]
        self.validation = {step: Metrics(**values) for step, values in state["validation"].items()}
        restore_random_state(state["random"])
        print(f"Continuing after step {self.step} of {self.steps}")

    def evaluate(self, split: Split) -> Metrics:
        """The model's metrics."""
        self.model.eval()
        return evaluate_split(self.model.scores, self.log, split, self.options, self.device)

    def _train_step(self) -> float:
        options = self.options
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        batch = jagged_batch(self.log, self.windows.take(next(self.sampler))).to(self.device)
        loss = sampled_softmax_loss(
            self.model,
            self.model(batch),
            batch.target_items,
            options.negatives,
            options.temperature,
        )
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), options.clip_norm)
        if not math.isfinite(loss.item()) or not math.isfinite(norm.item()):
            raise TrainingError(
                f"the loss is {loss.item()} and the norm of its gradient {norm.item()} "
                f"at step {self.step + 1} (epoch {self.sampler.epoch}, batch {self.sampler.batch}, "
                f"seed {options.seed}). Nothing was saved after the last good checkpoint in "
                f"{options.out}. A lower --learning-rate, more --warmup-steps or a higher "
                "--temperature may help."
            )
        self.optimizer.step()
        return loss.item()

    def _learning_rate(self) -> float:
        warmup = min(1.0, (self.step + 1) / max(1, self.options.warmup_steps))
        decay = (1 + math.cos(math.pi * self.step / self.steps)) / 2
        return self.options.learning_rate * warmup * decay

    def _progress(self) -> dict[str, str]:
        recent = self.losses[-50:]
        shown = {"epoch": str(self.sampler.epoch), "loss": f"{sum(recent) / len(recent):.3f}"}
        if self.validation:
            shown["NDCG@10"] = f"{list(self.validation.values())[-1].ndcg_10:.4f}"
        return shown

    def _validate(self, bar: tqdm[Any]) -> None:
        metrics = self.evaluate("validation")
        if metrics.ndcg_10 >= max((m.ndcg_10 for m in self.validation.values()), default=0.0):
            save_model(self.best, self.model, self.log.item_ids, self.log.titles)
        self.validation[self.step] = metrics
        bar.write(
            f"step {self.step:5d}  loss {self._progress()['loss']}  validation "
            f"HR@10 {metrics.hit_rate_10:.4f}  HR@50 {metrics.hit_rate_50:.4f}  "
            f"NDCG@10 {metrics.ndcg_10:.4f}"
        )

    def _identity(self) -> dict[str, Any]:
        """What two runs must share for one to continue the other."""
        chosen = {
            name: value
            for name, value in vars(self.options).items()
            if name not in NOT_PART_OF_THE_RUN
        }
        return {**chosen, "data content": self.log.manifest["content"]}

    def _save(self) -> None:
        validation = {step: asdict(metrics) for step, metrics in self.validation.items()}
        self.checkpoints.save(
            {
                "identity": self._identity(),
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "sampler": self.sampler.state_dict(),
                "losses": self.losses,
                "validation": validation,
                "random": random_state(),
            }
        )
        history = {"losses": self.losses, "validation": validation}
        (self.options.out / "history.json").write_text(json.dumps(history, indent=1))
        plot_curves(self.options.out / "curves.png", self.losses, self.validation, self.baselines)


def print_table(metrics: dict[str, Metrics], caption: str) -> None:
    """One row for each name."""
    width = max(len(name) for name in metrics)
    print(f"\n{caption}\n\n{'':{width}}  {'HR@10':>7}  {'HR@50':>7}  {'NDCG@10':>7}")
    for name, row in metrics.items():
        print(f"{name:{width}}  {row.hit_rate_10:7.4f}  {row.hit_rate_50:7.4f}  {row.ndcg_10:7.4f}")


@torch.no_grad()
def print_recommendations(trainer: Trainer, count: int = 10) -> None:
    """The model's first recommendations for one user before the event held out for testing, beside
    what the user last watched."""
    log, options = trainer.log, trainer.options
    user = 0
    if options.show_user is not None:
        found = log.find_user(options.show_user)
        if found is None:
            raise ValueError(f"--show-user must be a user of the data, got {options.show_user}")
        user = found
    window = held_out_windows(log, "test", options.max_seq_len).take(np.array([user]))
    scores = trainer.model.scores(jagged_batch(log, window).to(trainer.device))
    if not options.keep_seen:
        scores = mask_seen(scores, log, window)
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


def train(options: Options) -> None:
    """The whole job, from the file to the table."""
    log = open_data(options)
    options.out.mkdir(parents=True, exist_ok=True)
    popularity, co_occurrence = fit_baselines(log, options)
    baselines: dict[str, Scorer] = {"popularity": popularity, "co-occurrence": co_occurrence}
    device = choose_device(options.device)
    trainer = Trainer(
        options,
        log,
        device,
        {
            name: evaluate_split(scorer, log, "validation", options, CPU)
            for name, scorer in baselines.items()
        },
    )
    if options.resume:
        trainer.resume()
    else:
        trainer.checkpoints.clear()
    trainer.run()

    table = {
        name: evaluate_split(scorer, log, "test", options, CPU)
        for name, scorer in baselines.items()
    }
    table["HSTU"] = trainer.evaluate("test")
    ranked = "all items" if options.keep_seen else "all items that the user has not seen"
    print_table(
        table,
        f"Test, leave-one-out: the last event of {log.num_users:,} users among {ranked} "
        f"({log.num_items:,} items in all).",
    )
    repeats = share_of_repeats(log)
    if repeats and not options.keep_seen:
        print(
            f"\nThe last item of {repeats:.1%} of the users is one that they had before: always a "
            "miss here. --keep-seen ranks such items, too."
        )
    print(f"\nco-occurrence: {co_occurrence.describe()}, the best of its settings in validation")
    print_recommendations(trainer)
    rows = {name: asdict(metrics) for name, metrics in table.items()}
    (options.out / "metrics.json").write_text(json.dumps(rows, indent=1))
    print(f"\nCurves: {options.out / 'curves.png'}; metrics: {options.out / 'metrics.json'}")


def main(arguments: list[str] | None = None) -> int:
    """Runs the job; the exit status is 1 where it cannot be done."""
    try:
        train(parse_arguments(arguments))
    except (OSError, ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted; --resume continues from the last checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
