"""Checkpoints of a run on any number of ranks, which continue on any other number.

    checkpoints = Checkpoints(directory)
    step = checkpoints.load(model, optimizer, sampler=sampler) or 0
    ...
    checkpoints.save(step, model, optimizer, sampler=sampler)

`directory/step-000000001000/` is a checkpoint by `torch.distributed.checkpoint` (the model with its
divided tables, and the optimizers' state, each rank writing what it owns), next to `run.pt` (the
step, and the states of other objects) and `rank-00000.pt` .. (each rank's random generators). It is
written under a temporary name and renamed when it is complete on the disk, so that a kill at any
moment leaves the last complete checkpoint. All ranks must see the same directory; several machines
need a shared file system.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.optim import Optimizer

from .torchrec_tables import TorchrecTables

__all__ = ["Checkpoints"]

# "replaced" is a whole checkpoint too: see _publish.
_NAME = re.compile(r"step-(\d{12})(\.replaced)?")

# Optimizer state is keyed by parameter name, so that parameter groups may change.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class HasState(Protocol):
    """An object that is saved and loaded by its state, for example a sampler or a scheduler."""

    def state_dict(self) -> Mapping[str, object]: ...

    def load_state_dict(self, state: Any, /) -> object: ...


class Checkpoints:
    """The newest checkpoints of a run.

    All ranks of the default process group construct and call it together. One process without a
    group may use it, too.

    Args:
        directory: the directory of the checkpoints; made if absent.
        keep: the number of checkpoints to keep: the one just saved and the newest others.
        group: the group of all ranks; its collectives must work on the CPU (gloo, or
            "cpu:gloo,cuda:nccl"). None is the default group.
    """

    def __init__(
        self, directory: Path | str, *, keep: int = 2, group: dist.ProcessGroup | None = None
    ) -> None:
        if keep <= 0:
            raise ValueError(f"keep: expected a positive number, got {keep}")
        self.directory = Path(directory)
        self.keep = keep
        self.group = group
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.directory.mkdir(parents=True, exist_ok=True)

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, in order."""
        return sorted(self._found())

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer] = (),
        **others: HasState,
    ) -> Path:
        """Saves a checkpoint of the step, replacing one that exists.

        Args:
            step: the number of completed optimizer steps.
            model: a plain model, or the result of `hstu_attn.distributed.parallelize`.
            optimizers: the optimizers of the model's parameters. The optimizers of torchrec's
                tables are saved as well.
            others: objects with `state_dict` and `load_state_dict`, such as a sampler or a
                scheduler. Their states must be small, of tensors and plain Python values, and the
                same on all ranks; the first rank writes them.

        Returns:
            The path of the checkpoint.
        """
        if not 0 <= step < 10**12:
            raise ValueError(f"step: expected 0 to 10^12 - 1, got {step}")
        final = self.directory / f"step-{step:012d}"
        temporary = final.with_suffix(".writing")
        if self.rank == 0:
            for left in self.directory.glob("step-*.writing"):
                shutil.rmtree(left)
            temporary.mkdir()
            run = {"step": step, "others": {name: it.state_dict() for name, it in others.items()}}
            _write(temporary / "run.pt", run)
        self._barrier()
        _write(temporary / f"rank-{self.rank:05d}.pt", _random_state())
        state = _state_to_save(model, optimizers)
        with _quiet_alone():
            save_tensors(
                state,
                storage_writer=FileSystemWriter(temporary, sync_files=True),
                process_group=self.group,
            )
        # The first rank now knows that every rank has written its part.
        if self.rank == 0:
            self._publish(temporary, final)
        self._barrier()
        return final

    def load(
        self,
        model: nn.Module,
        optimizers: Optimizer | Sequence[Optimizer] = (),
        *,
        step: int | None = None,
        **others: HasState,
    ) -> int | None:
        """Loads a checkpoint of the same model.

        It may have been saved on another number of ranks or under another strategy. Each rank
        restores its random generators; a rank that did not exist when the checkpoint was saved
        keeps its own.

        Args:
            model: as in `save`; loaded in place.
            optimizers: as in `save`.
            step: the step of the checkpoint; None is the newest.
            others: some of the objects that were saved, by the same names. They are loaded first,
                so that one of them may raise an error for the checkpoint of another run before
                anything else is loaded.

        Returns:
            The step; None if `step` is None and there is no checkpoint.

        Raises:
            ValueError: there is no checkpoint of `step`, or it lacks an object of `others`.
            RuntimeError: another rank cannot read the checkpoint.
        """
        found = {number: path.name for number, path in self._found().items()}
        if dist.is_initialized():
            shared = [found]
            dist.broadcast_object_list(shared, group=self.group, group_src=0)
            (found,) = shared
        if step is None and not found:
            return None
        wanted = max(found) if step is None else step
        if wanted not in found:
            raise ValueError(f"step: expected one of {sorted(found)}, got {wanted}")
        path = self.directory / found[wanted]
        run, generators, saved = self._read_together(path)
        missing = others.keys() - run["others"].keys()
        if missing:
            raise ValueError(
                f"others: expected names among {sorted(run['others'])}, which {path} has, "
                f"got {sorted(missing)}"
            )
        for name, other in others.items():
            other.load_state_dict(run["others"][name])
        state = _state_of(model, optimizers)
        never_stepped = _without_state(state["optimizers"], saved)
        left = {key: state["optimizers"].pop(key) for key in never_stepped}
        with _quiet_alone():
            load_tensors(state, storage_reader=FileSystemReader(path), process_group=self.group)
        state["optimizers"].update(left)
        set_state_dict(
            model,
            optimizers,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizers"],
            options=_OPTIONS,
        )
        named = _named_parameters(model)
        for name in {_parameter_of(key) for key in never_stepped}:
            for optimizer in _as_list(optimizers):
                optimizer.state.pop(named[name], None)
        for name, optimizer in _fused_optimizers(model).items():
            optimizer.load_state_dict(state["fused"][name])
            # This sets Adam's step count, which the checkpoint's state lacks.
            optimizer.set_optimizer_step(wanted)
        if generators is not None:
            _restore_random_state(generators)
        return wanted

    def clear(self) -> None:
        """Removes all checkpoints; all ranks call it together."""
        if self.rank == 0:
            self._remove(self._found().values())
        self._barrier()

    def _read_together(
        self, path: Path
    ) -> tuple[dict[str, Any], dict[str, Any] | None, Collection[str]]:
        """Returns the content of `run.pt`, this rank's random generators and the names of tensors.

        If one rank fails, all do, before any of them changes anything or waits for the others.
        """
        of_rank = path / f"rank-{self.rank:05d}.pt"
        error: Exception | None = None
        try:
            run = _read(path / "run.pt")
            generators = _read(of_rank) if of_rank.exists() else None
            saved = FileSystemReader(path).read_metadata().state_dict_metadata.keys()
        except Exception as caught:
            error = caught
        problems = [None if error is None else f"{type(error).__name__}: {error}"]
        if dist.is_initialized():
            (mine,) = problems
            problems *= dist.get_world_size(self.group)
            dist.all_gather_object(problems, mine, group=self.group)
        if error is not None:
            raise error
        said = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]
        if said:
            raise RuntimeError(
                f"{path}: expected a checkpoint that all ranks can read, got {'; '.join(said)}"
            )
        return run, generators, saved

    def _found(self) -> dict[int, Path]:
        result: dict[int, Path] = {}
        for path in sorted(self.directory.iterdir(), reverse=True):
            if match := _NAME.fullmatch(path.name):
                result[int(match[1])] = path  # the shorter name comes last: it is the newer
        return result

    def _publish(self, temporary: Path, final: Path) -> None:
        """Renames a complete checkpoint to its final name, and removes those no longer kept."""
        _sync_directory(temporary)
        replaced = final.with_suffix(".replaced")
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(final, replaced)
        os.replace(temporary, final)
        _sync_directory(self.directory)
        # The checkpoint just saved stays, even if a run has gone back from later ones.
        others = [path for _, path in sorted(self._found().items()) if path != final]
        left = {final, *others[max(0, len(others) + 1 - self.keep) :]}
        self._remove(
            path
            for path in list(self.directory.iterdir())
            if _NAME.fullmatch(path.name) and path not in left
        )

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in paths:
            # It is renamed to a name that does not count first, because removing may be
            # interrupted.
            doomed = path.with_name(f"{path.name}.writing")
            if doomed.exists():  # left by a writer that was killed
                shutil.rmtree(doomed)
            os.replace(path, doomed)
            shutil.rmtree(doomed)

    def _barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier(self.group)


def _state_of(
    model: nn.Module, optimizers: Optimizer | Sequence[Optimizer]
) -> dict[str, dict[str, Any]]:
    parameters, state = get_state_dict(model, optimizers, options=_OPTIONS)
    result: dict[str, dict[str, Any]] = {"model": parameters, "optimizers": state}
    if fused := _fused_optimizers(model):
        result["fused"] = {name: optimizer.state_dict() for name, optimizer in fused.items()}
    return result


def _state_to_save(
    model: nn.Module, optimizers: Optimizer | Sequence[Optimizer]
) -> dict[str, dict[str, Any]]:
    """Returns the state without the placeholders that torch adds for optimizers without steps."""
    stepped = [set(optimizer.state) for optimizer in _as_list(optimizers)]
    state = _state_of(model, optimizers)
    made = set()
    for optimizer, before in zip(_as_list(optimizers), stepped, strict=True):
        for parameter in optimizer.state.keys() - before:
            del optimizer.state[parameter]
            made.add(parameter)
    names = {name for name, parameter in _named_parameters(model).items() if parameter in made}
    state["optimizers"] = {
        key: value
        for key, value in state["optimizers"].items()
        if not (key.startswith("state.") and _parameter_of(key) in names)
    }
    return state


def _without_state(wanted: Iterable[str], saved: Collection[str]) -> list[str]:
    """Selects the keys of optimizer state whose parameters have no state in a checkpoint."""
    prefix = "optimizers."
    have = {_parameter_of(key.removeprefix(prefix)) for key in saved if key.startswith(prefix)}
    return [key for key in wanted if key.startswith("state.") and _parameter_of(key) not in have]


def _parameter_of(key: str) -> str:
    """Returns PARAMETER of a key "state.PARAMETER.NAME", and "" for any other key."""
    return key.removeprefix("state.").rpartition(".")[0] if key.startswith("state.") else ""


def _named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters by their names in a checkpoint, without the names of wrappers."""
    return {
        name.removeprefix("module.").replace("_orig_mod.", ""): parameter
        for name, parameter in model.named_parameters()
    }


def _as_list(optimizers: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def _fused_optimizers(model: nn.Module) -> dict[str, Any]:
    """Returns the optimizers of torchrec's tables by the names of the tables."""
    return {
        name.removeprefix("module."): module.fused_optimizer
        for name, module in model.named_modules()
        if isinstance(module, TorchrecTables)
    }


def _random_state() -> dict[str, Any]:
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if numpy := sys.modules.get("numpy"):
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = (name, keys.tolist(), *rest)
    return state


def _restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    numpy = sys.modules.get("numpy")
    if "numpy" in state and numpy:
        numpy.random.set_state(state["numpy"])


def _write(path: Path, state: dict[str, Any]) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _quiet_alone() -> Iterator[None]:
    """Silences torch's warning that a process without a group saves alone."""
    with warnings.catch_warnings():
        if not dist.is_initialized():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
