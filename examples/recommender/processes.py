"""Collective operations of the processes of a run, which may also be a single process.

Under torchrun, each process is a rank of a `hstu_attn.distributed.World`, with its own GPU or on
the CPU. All processes must call the methods here together.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from hstu_attn.distributed import World, clip_gradients, global_mean, parallelize, stop_together
from recommender.options import Options, Strategy, choose_device

__all__ = ["ALONE", "Processes", "device_of"]

T = TypeVar("T")

ALONE = World(0, 0, 1, torch.device("cpu"), None)


def device_of(options: Options, world: World) -> torch.device:
    """Returns the device of this process.

    Raises:
        ValueError: `--device` or `--graph` is not for several processes.
    """
    device = choose_device(options.device)
    if world.mesh is None:
        return device
    if ":" in options.device:
        raise ValueError(
            "--device must be auto, cuda or cpu where torchrun gives each process its own, got "
            f"{options.device}"
        )
    if options.graph:
        raise ValueError("--graph needs a single process, got several that torchrun has started")
    return world.device


class Processes:
    """The processes of a run, of which this is one.

    Args:
        world: as `hstu_attn.distributed.run` gives it; by default this process alone.
        strategy: whether every process has the whole model except its tables (`"ddp"`) or its
            layers are divided, too (`"fsdp2"`).

    Attributes:
        rank: the index of this process's part of each batch, from 0.
        num_ranks: the number of parts into which batches are divided.
        mesh: all ranks; None for a single process.
        is_first: whether this process prints, and writes the files that all processes share.
    """

    def __init__(self, world: World = ALONE, strategy: Strategy = "ddp") -> None:
        self.rank = world.rank
        self.num_ranks = world.num_ranks
        self.mesh = world.mesh
        self.strategy = strategy
        self.is_first = world.rank == 0

    def prepare(
        self,
        model: nn.Module,
        compute_dtype: torch.dtype,
        ignored_modules: Collection[nn.Module] = (),
    ) -> nn.Module:
        """Returns the model that computes the loss.

        Args:
            model: the model, on its device, with fp32 parameters.
            compute_dtype: the dtype of the layers.
            ignored_modules: as in `hstu_attn.distributed.parallelize`.
        """
        return parallelize(
            model,
            self.mesh,
            self.strategy,
            compute_dtype=None if compute_dtype == torch.float32 else compute_dtype,
            ignored_modules=ignored_modules,
        )

    def mean(self, local_sum: Tensor, count: int | Tensor) -> Tensor:
        """Returns the mean over all processes' rows, given the sum and number of this one's."""
        return global_mean(local_sum, count, self.mesh)

    def clip_gradients(self, model: nn.Module, largest: float) -> Tensor:
        """Scales the gradients down to a norm over all parameters; returns the scalar norm before.

        If that norm is not finite, the gradients stay as they are, so that they can be inspected.
        """
        return clip_gradients(model.parameters(), largest)

    def stop(self, problem: str | None, kind: type[Exception]) -> None:
        """Raises on every process the problems that any of them reports, if there are any.

        The error is of class `kind` if that is given, otherwise a
        `hstu_attn.distributed.RunStopped`, which names the ranks.
        """
        if self.mesh is not None:
            stop_together(problem, self.mesh)
        elif problem is not None:
            raise kind(problem)

    def together(self, check: Callable[[], object]) -> None:
        """Runs a check on the first process; if it fails, all processes raise a ValueError.

        Args:
            check: raises a ValueError or an OSError, for example for a directory that all share.
        """
        problem = None
        if self.is_first:
            try:
                check()
            except (OSError, ValueError) as error:
                problem = str(error)
        problem = self.from_first(problem)
        if problem is not None:
            raise ValueError(problem)

    def wait(self) -> None:
        """Waits until all processes have called this (a barrier)."""
        if self.mesh is not None:
            dist.barrier()

    @contextlib.contextmanager
    def first_goes_first(self) -> Iterator[None]:
        """Runs the block on the first process before it runs on the others.

        The others can then read, for example, a cache that the first process has written.
        """
        if not self.is_first:
            self.wait()
        yield
        if self.is_first:
            self.wait()

    @contextlib.contextmanager
    def one_voice(self) -> Iterator[None]:
        """Suppresses the output of all processes but the first."""
        if self.is_first:
            yield
            return
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield

    def gather(self, value: T) -> list[T]:
        """Returns all processes' values, by rank, on the first process; an empty list elsewhere."""
        if self.mesh is None:
            return [value]
        values: list[Any] | None = [None] * self.num_ranks if self.is_first else None
        dist.gather_object(value, values)
        return values or []

    def from_first(self, value: T) -> T:
        """Returns the first process's value on all processes (a broadcast)."""
        if self.mesh is None:
            return value
        shared = [value]
        dist.broadcast_object_list(shared)
        return shared[0]

    def whole_state(self, model: nn.Module) -> dict[str, Tensor]:
        """Returns the model's full state dict, as a single process would have it.

        It is on the CPU of the first process; the others get an empty one.

        Args:
            model: the one given to `prepare`.
        """
        options = StateDictOptions(full_state_dict=True, cpu_offload=self.mesh is not None)
        return cast(dict[str, Tensor], get_model_state_dict(model, options=options))

    def load_whole_state(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Loads the result of `whole_state`, which every process has read from a file.

        Args:
            model: the one given to `prepare`.
            state: tensors by name; they may be mapped from the file, since each process reads its
                part.
        """
        whole = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, cast(dict[str, Any], state), options=whole)
