"""The training loop of the examples.

It makes steps, validates, writes checkpoints from which a killed run continues exactly, draws
curves, and stops when the loss is NaN or infinite.

An example subclasses `Trainer` and defines the batches, the loss and the validation.
"""

from __future__ import annotations

import math
import random
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from hstu_attn.capture import CapturedStep
from hstu_attn.data import SamplerState
from hstu_attn.distributed import Checkpoints, parameter_groups
from hstu_attn.distributed.torchrec_tables import TorchrecTables
from hstu_attn.upload import Batch as Prefetched
from hstu_attn.upload import Prefetcher
from recommender.checkpoint import write_state
from recommender.directory import BASELINES, RUN, BaselineMetrics, difference, read_json
from recommender.files import naming, write_json
from recommender.options import Interval, Options
from recommender.processes import Processes
from recommender.scalars import Scalars

__all__ = [
    "Batch",
    "Batches",
    "Trainer",
    "TrainingError",
    "progress_bar",
    "seed_everything",
]

SHOWN_NAMES = 5
READ_EVERY = 50  # steps between reads of captured losses; each read waits for the device
DRAW_EVERY = 30.0  # seconds; the curves are drawn after a checkpoint


class TrainingError(RuntimeError):
    """Training cannot go on; the message says why and what to look at."""


class Batch(Prefetched, Protocol):
    """A dataclass of tensors."""

    @property
    def total(self) -> int:
        """The number of rows of the batch."""

    def padded(self: AnyBatch) -> AnyBatch:
        """Appends padding, which belongs to no sequence, so that few shapes occur."""


AnyBatch = TypeVar("AnyBatch", bound=Batch)


class Batches(Protocol):
    """Draws batches of indices endlessly; its state can be saved and restored."""

    @property
    def batches_per_epoch(self) -> int: ...

    def __next__(self) -> Any: ...

    def state_dict(self) -> SamplerState: ...

    def load_state_dict(self, state: SamplerState) -> None: ...


class Position:
    """The position of a run in its data, for checkpoints and messages.

    It is the position after the batch of the current step, although the next batch may have been
    drawn already.
    """

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.update()

    def update(self) -> None:
        """Records the current position of the batches."""
        self._state = self.batches.state_dict()

    @property
    def epoch(self) -> int:
        """The epoch of the batch."""
        return self._state["epoch"]

    def state_dict(self) -> SamplerState:
        return self._state

    def load_state_dict(self, state: SamplerState) -> None:
        self.batches.load_state_dict(state)
        self.update()


def seed_everything(seed: int) -> None:
    """Seeds the generators of Python, NumPy and torch; call it before the model is created."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)


def progress_bar(
    what: str, total: int, unit: str, *, initial: int = 0, shown: bool = True
) -> tqdm[Any]:
    """Returns a progress bar on standard error, which is updated rarely outside a terminal."""
    return tqdm(
        desc=what,
        total=total,
        initial=initial,
        unit=unit,
        mininterval=0.5 if sys.stderr.isatty() else 15,
        disable=not shown,
    )


@dataclass(frozen=True)
class Made(Generic[AnyBatch]):
    """A training step whose numbers the host has not read yet.

    Attributes:
        numbers: on the device, `(3,)` fp32: the loss, the norm of its gradient, and the sum of the
            loss over the batch of this process.
        batch: the batch, on the CPU.
        position: the position in the data after the batch.
        learning_rate: the learning rate of the step.
        started: when the host began the step, by `time.perf_counter`.
    """

    numbers: Tensor
    batch: AnyBatch
    position: SamplerState
    learning_rate: float
    started: float


class Trainer(ABC, Generic[AnyBatch]):
    """A run: the model, its optimizer, the position in the data, and the metrics so far.

    With `--graph`, which is the default on a GPU that one process uses, steps are captured in CUDA
    graphs. The graphs include the optimizer update, so a loss that is not finite is detected only
    after further steps; from the failed step on, updates change nothing.

    Args:
        options: the command-line options.
        model: the model, on its device.
        batches: the sampler of the batches of this process.
        identity: what a resumed run must share with the original run, besides the options.
        processes: the processes of the run; None is this process alone.

    Attributes:
        losses: the losses of the steps whose numbers have been read.
        split: the split that is evaluated during training.
        validation: metrics of `split` by step.
        baselines: metrics of the baselines in `split`, by baseline, for the plot.
        best_quality: the quality of the model in `best.pt`.
        seconds: the total time of training steps and of validation.
    """

    advice = "A lower --learning-rate or more --warmup-steps may help."
    split: Literal["validation", "test"] = "validation"

    def __init__(
        self,
        options: Options,
        model: nn.Module,
        batches: Batches,
        identity: Mapping[str, Any],
        processes: Processes | None = None,
    ) -> None:
        self.options = options
        self.batches = batches
        self.position = Position(batches)
        self.identity = {**options.identity(), **identity}
        self.processes = processes or Processes()
        self.device = next(model.parameters()).device
        is_graph = options.graph
        if is_graph is None:
            is_graph = self.device.type == "cuda" and self.processes.mesh is None
        self.captured = CapturedStep(self._whole_step, self.device) if is_graph else None
        self.prefetcher = Prefetcher(self._draw, self.device)
        tables = [module for module in model.modules() if isinstance(module, TorchrecTables)]
        self.trained = self.processes.prepare(model, options.compute_dtype(self.device), tables)
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.trained),
            lr=options.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=options.weight_decay,
            fused=True if is_graph else None,
            capturable=is_graph and self.device.type == "cuda",
        )
        # Captured steps read these: the learning rate, and 1 from the first failed step on.
        self.rate = torch.zeros((), device=self.device)
        self.has_failed = torch.zeros((), device=self.device)
        if is_graph:  # a fused optimizer skips the update if this is 1
            self.optimizer.found_inf = self.has_failed  # type: ignore[attr-defined]
        self.optimizers = [self.optimizer, *(table.fused_optimizer for table in tables)]
        self.steps_per_epoch = batches.batches_per_epoch
        self.steps = options.steps or options.epochs * self.steps_per_epoch
        self.losses: list[float] = []
        self.unread: list[Made[AnyBatch]] = []
        self.seconds = {"training": 0.0, "validation": 0.0}
        self.validation: dict[int, dict[str, float]] = {}
        self.baselines: Mapping[str, Mapping[str, float]] = {}
        self.best_quality = -math.inf
        self.checkpoints = Checkpoints(options.out / "checkpoints")
        self.best = options.out / "best.pt"
        if self.processes.rank:
            seed_everything(options.seed + self.processes.rank)  # different dropout on each rank

    # --- what an example defines ------------------------------------------------------------------

    @abstractmethod
    def draw(self) -> AnyBatch:
        """Returns the next batch of this process, on the CPU. Called one batch ahead of the steps.

        Raises:
            ValueError: the batch is malformed.
        """

    @abstractmethod
    def losses_of(self, batch: AnyBatch) -> tuple[Tensor, Tensor]:
        """Returns the losses of rows or candidates `(n,)`, and their offsets `(batch + 1,)`.

        Losses past the last offset belong to no sequence and are ignored.
        """

    @abstractmethod
    def validate(self) -> dict[str, float]:
        """Returns the metrics of the current model in `split`, the same on every process."""

    @abstractmethod
    def quality(self, metrics: Mapping[str, float]) -> float:
        """Returns a number that is highest for the best model."""

    @abstractmethod
    def describe(self, metrics: Mapping[str, float]) -> str:
        """Returns the metrics as one line of text."""

    @abstractmethod
    def save_best(self, path: Path, validation: Mapping[str, float]) -> None:
        """Saves the current model and its metrics, replacing an earlier save.

        All processes call it together.
        """

    @abstractmethod
    def load_best(self, path: Path) -> None:
        """Loads the model that `save_best` wrote."""

    @abstractmethod
    def plot(self, path: Path) -> None:
        """Plots the losses and the validation metrics."""

    # --- the run ----------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Steps made so far."""
        return len(self.losses) + len(self.unread)

    def start(self) -> None:
        """Continues the run in the directory if `--resume` is given, otherwise starts one.

        `recommender.directory.check_directory` has checked the directory.

        Raises:
            TrainingError: the run in the directory has other data, other options or more steps.
        """
        out = self.options.out
        made_with = None
        if self.options.resume:
            made_with = self.processes.from_first(read_json(out / RUN))
            if made_with and (problem := difference(made_with, self.identity, out)):
                raise TrainingError(problem)
            implementation = {
                name: self.optimizer.param_groups[0][name] for name in ("fused", "capturable")
            }
            self._resume()
            for group in self.optimizer.param_groups:  # a checkpoint has the earlier run's values
                group.update(implementation)
        if made_with is None and self.processes.is_first:
            (out / BASELINES).unlink(missing_ok=True)  # left by a run stopped before it trained
            write_json(out / RUN, self.identity)

    def compare_with(self, measure: Callable[[], BaselineMetrics]) -> BaselineMetrics:
        """Returns the metrics of the baselines.

        The metrics are computed once for each run. With `--no-baselines`, they are only read from
        the run's directory, if it has them.

        Args:
            measure: computes the metrics; all processes call it together.
        """
        path = self.options.out / BASELINES
        found: BaselineMetrics | None = self.processes.from_first(read_json(path))
        if found is None and not self.options.baselines:
            found = {"validation": {}, "test": {}, "note": ""}
        elif found is None:
            found = measure()
            if self.processes.is_first:
                write_json(path, found)
        self.baselines = found[self.split]
        return found

    def run(self) -> None:
        """Trains to the last step, validating and saving on the way.

        At the end the model has the weights with the best validation metrics.

        Raises:
            TrainingError: a batch is malformed, or the loss is not finite.
            OSError: a file cannot be written; the error has the path.
        """
        is_first = self.processes.is_first
        self.scalars = Scalars(self.options.out / "tensorboard" if is_first else None, self.step)
        first = self.step
        if is_first and first < self.steps:
            print(self._where_it_trains())
        self.drawn = -math.inf
        try:
            self._run()
        finally:
            self.scalars.close()
        if self.step > first:
            seconds = self.seconds["training"]
            print(
                f"{self.step - first:,} steps in {seconds:.1f} s "
                f"({(self.step - first) / seconds:.1f} a second), "
                f"validation in {self.seconds['validation']:.1f} s"
            )
        self.processes.wait()  # until the first process has written its last file
        self.load_best(self.best)

    def _run(self) -> None:
        options = self.options
        is_first = self.processes.is_first
        with progress_bar("training", self.steps, "step", initial=self.step, shown=is_first) as bar:
            while self.step < self.steps:
                self._train_step()
                last = self.step == self.steps
                validates = last or self.step % self._steps(options.eval_every) == 0
                saves = last or self.step % self._steps(options.checkpoint_every) == 0
                if validates or saves or self.step % READ_EVERY == 0:
                    self._read()
                bar.update()
                bar.set_postfix(epoch=self.position.epoch, loss=self._recent_loss(), refresh=False)
                if validates:
                    self._validate(bar)
                if saves:
                    self._save()
                    if is_first and not last:  # after the last step, the example plots them
                        self._draw_curves()

    def _steps(self, interval: Interval) -> int:
        return self.steps_per_epoch if interval == "epoch" else interval

    def _where_it_trains(self) -> str:
        """Returns a line that names the device and says how steps are computed on it."""
        on_gpu = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if on_gpu else "the CPU"
        several = f"{self.processes.num_ranks} x " if self.processes.num_ranks > 1 else ""
        precision = self.options.describe_precision(self.device)
        graphs = ", steps by CUDA graphs" if on_gpu and self.captured is not None else ""
        return f"Training on {several}{name}, layers in {precision}{graphs}"

    def _draw_curves(self) -> None:
        if time.monotonic() - self.drawn > DRAW_EVERY:
            self.plot(self.options.out / "curves.png")
            self.drawn = time.monotonic()

    def _train_step(self) -> None:
        started = time.perf_counter()
        self.trained.train()
        learning_rate = self._learning_rate()
        batch, on_device = self._take()
        if self.captured is None:
            self._set_learning_rate(learning_rate)
            numbers = self._gradients(on_device)
        else:
            self.rate.fill_(learning_rate)
            numbers = self.captured(on_device)
        if self.step + 1 < self.steps:
            self.prefetcher.start()  # while the device computes what has been queued
        made = Made(numbers, batch, self.position.state_dict(), learning_rate, started)
        self.unread.append(made)
        if self.captured is None:
            self._read()
            self.optimizer.step()

    def _gradients(self, batch: AnyBatch) -> Tensor:
        """Computes gradients, clipped by `--clip-norm`; returns the `numbers` of `Made`."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        local, count = self.loss(batch)
        loss = self.processes.mean(local, count)
        loss.backward()
        largest = self.options.clip_norm or math.inf
        norm = self.processes.clip_gradients(self.trained, largest)
        return torch.stack([number.detach() for number in (loss, norm.to(loss), local)])

    def _whole_step(self, batch: AnyBatch) -> Tensor:
        """Makes a step entirely on the device; returns the `numbers` of `Made`.

        From the first step with a loss or gradient that is not finite, the weights do not change.
        """
        numbers = self._gradients(batch)
        is_bad = ~numbers.isfinite().all()
        self.has_failed.copy_(torch.maximum(self.has_failed, is_bad.to(self.has_failed)))
        self._set_learning_rate(self.rate)
        self.optimizer.step()
        return numbers

    def loss(self, batch: AnyBatch) -> tuple[Tensor, Tensor]:
        """Returns the sum of a batch's losses, and the number of rows or candidates with a loss.

        Both are scalars on the device.
        """
        losses, offsets = self.losses_of(batch)
        count = offsets[-1]
        past = torch.arange(len(losses), device=losses.device) >= count
        return losses.masked_fill(past, 0.0).sum(), count

    def _set_learning_rate(self, learning_rate: float | Tensor) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate

    def _read(self) -> None:
        """Waits for the device, and records the numbers of the unread steps.

        Raises:
            TrainingError: the loss or the gradient norm of a step is not finite.
        """
        if not self.unread:
            return
        rows = torch.stack([made.numbers for made in self.unread]).tolist()
        seconds = time.perf_counter() - self.unread[0].started
        self.seconds["training"] += seconds
        tokens_per_second = sum(made.batch.total for made in self.unread) / seconds
        unread, self.unread = self.unread, []
        for made, (loss, norm, local) in zip(unread, rows, strict=True):
            numbers = {"loss": loss, "gradient_norm": norm}
            if not all(map(math.isfinite, numbers.values())):
                # Both numbers are the same on all processes. If the loss is not finite, only the
                # processes whose own sum is not finite report their batch; if only the norm is not,
                # every process does.
                is_here = math.isfinite(loss) or not math.isfinite(local)
                problem = self._what_is_not_finite(made, numbers) if is_here else None
                self.processes.stop(problem, TrainingError)
            self.losses.append(loss)
            numbers["learning_rate"] = made.learning_rate
            numbers["tokens_per_second"] = tokens_per_second
            self.scalars.write("train", numbers, len(self.losses))

    def _draw(self) -> AnyBatch:
        return self.draw() if self.captured is None else self.draw().padded()

    def _take(self) -> tuple[AnyBatch, AnyBatch]:
        """Takes the next batch; returns it on the CPU and on the device."""
        self.prefetcher.start()
        self.position.update()
        try:
            return self.prefetcher.take()
        except ValueError as error:
            where = self._where(self.step, self.position.state_dict())
            raise TrainingError(f"malformed batch {where}: {error}") from error

    def _learning_rate(self) -> float:
        """Returns the learning rate of the next step: linear warm-up times the schedule's factor.

        The factor is 1, or a cosine over all steps. A run that is continued with more steps follows
        the longer cosine.
        """
        warmup = min(1.0, (self.step + 1) / max(1, self.options.warmup_steps))
        if self.options.schedule == "constant":
            return self.options.learning_rate * warmup
        decay = (1 + math.cos(math.pi * self.step / self.steps)) / 2
        return self.options.learning_rate * warmup * decay

    def _recent_loss(self) -> str:
        recent = self.losses[-50:]
        return f"{sum(recent) / len(recent):.4f}" if recent else "not read yet"

    def _validate(self, bar: tqdm[Any]) -> None:
        started = time.perf_counter()
        metrics = self.validate()
        self.seconds["validation"] += time.perf_counter() - started
        if self.quality(metrics) >= self.best_quality:
            self.save_best(self.best, metrics)
            self.best_quality = self.quality(metrics)
        self.validation[self.step] = metrics
        self.scalars.write(self.split, metrics, self.step)
        place = f"step {self.step:5d}"
        if self.options.eval_every == "epoch":
            place = f"epoch {self.step / self.steps_per_epoch:3g}"
        described = self.describe(metrics)
        bar.write(f"{place}  loss {self._recent_loss()}  {self.split} {described}")

    # --- error reports ----------------------------------------------------------------------------

    def _where(self, steps_before: int, position: SamplerState) -> str:
        return (
            f"at step {steps_before + 1} (epoch {position['epoch']}, batch {position['batch']}, "
            f"seed {self.options.seed})"
        )

    def _what_is_not_finite(self, made: Made[AnyBatch], numbers: dict[str, float]) -> str:
        """Writes the batch of a failed step to a file; returns an error message with its path."""
        steps_before, batch = len(self.losses), made.batch
        if self.captured is not None:  # the gradients are now those of a later step
            self._gradients(batch.to(self.device))
        number = f"-{self.processes.rank}" if self.processes.num_ranks > 1 else ""
        path = self.options.out / f"bad-batch{number}.pt"
        tensors = {field.name: getattr(batch, field.name) for field in fields(batch)}
        write_state(path, {"step": steps_before + 1, **numbers, "batch": tensors})
        named = {
            name.removeprefix("module."): parameter  # DDP adds this prefix
            for name, parameter in self.trained.named_parameters()
        }
        weights = _not_finite(named)
        gradients = _not_finite({name: parameter.grad for name, parameter in named.items()})
        return (
            f"the loss is {numbers['loss']} and the norm of its gradient "
            f"{numbers['gradient_norm']} {self._where(steps_before, made.position)}. Not finite "
            f"are the weights of {weights} and the gradients of {gradients}. The batch is in "
            f"{path}; nothing was saved after the last good checkpoint in {self.options.out}. "
            f"{self.advice}"
        )

    # --- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the run for a checkpoint."""
        return {
            "identity": self.identity,
            "steps": self.steps,
            "losses": self.losses,
            "validation": self.validation,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state that `state_dict` returned.

        Raises:
            TrainingError: the state is of a run with other data, other options or more steps.
        """
        if problem := difference(state["identity"], self.identity, self.options.out):
            raise TrainingError(problem)
        steps = state.get("steps", len(state["losses"]))
        if steps > self.steps:
            raise TrainingError(
                f"--resume: expected --epochs or --steps for at least the {steps} steps that the "
                f"run in {self.options.out} was started for; got {self.steps}"
            )
        self.losses = state["losses"]
        self.validation = state["validation"]

    def _quality_of_best(self) -> float:
        """Returns the quality of `best.pt`, which may be newer than the last checkpoint."""
        if not self.best.exists():
            return -math.inf
        state = torch.load(self.best, "cpu", weights_only=True, mmap=True)
        if state.get("validation"):
            return self.quality(state["validation"])
        return max(map(self.quality, self.validation.values()), default=-math.inf)

    def _resume(self) -> None:
        """Continues from the newest checkpoint that can be read."""
        steps = self.processes.from_first(self.checkpoints.steps())
        for step in reversed(steps):
            try:
                self.checkpoints.load(
                    self.trained, self.optimizer, step=step, run=self, sampler=self.position
                )
            except TrainingError:
                raise
            # What a damaged file raises depends on where it is damaged.
            except (Exception, CheckpointException) as error:
                if self.processes.is_first:
                    print(
                        f"the checkpoint of step {step} cannot be read ({error})", file=sys.stderr
                    )
                continue
            finished = ": the run is finished, and more --epochs or --steps would train it on"
            print(
                f"Continuing after step {self.step} of {self.steps}"
                f"{finished if self.step == self.steps else ''}"
            )
            break
        else:
            if steps:
                raise TrainingError(f"no checkpoint in {self.checkpoints.directory} can be read")
            print(f"No checkpoint in {self.options.out} yet: training from the first step")
        self.best_quality = self.processes.from_first(self._quality_of_best())

    def _save(self) -> None:
        self.scalars.flush()
        self._set_learning_rate(self._learning_rate())  # a float, which any run can load
        with naming(self.checkpoints.directory):
            self.checkpoints.save(
                self.step, self.trained, self.optimizer, run=self, sampler=self.position
            )
        if self.processes.is_first:
            history = {"losses": self.losses, self.split: self.validation}
            write_json(self.options.out / "history.json", history)


def _not_finite(tensors: Mapping[str, Tensor | None]) -> str:
    """Returns the names of tensors with a NaN or an infinity in this process's part."""
    names = [
        name
        for name, tensor in tensors.items()
        if tensor is not None and not _local(tensor).isfinite().all()
    ]
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more if names else "none"


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
