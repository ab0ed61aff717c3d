"""Training on many GPUs: a process per GPU, ranks joined by ``torch.distributed``.

    launch              starting the ranks' processes, and failing together
    embedding           embedding tables whose rows are divided among the ranks
    parallel            data parallelism of everything else, and losses and clipping that are the
                        same on any number of ranks
    checkpoint          saving and loading, on another number of ranks if need be
    torchrec_tables     tables by torchrec, where it is installed

Nothing here is imported before it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import Checkpoints
    from .embedding import RoutedIds, ShardedEmbedding, ShardedEmbeddings
    from .launch import RunStopped, World, run, stop_together
    from .parallel import clip_gradients, global_mean, parallelize, parameter_groups
    from .torchrec_tables import torchrec_embedding_collection

__all__ = [
    "Checkpoints",
    "RoutedIds",
    "RunStopped",
    "ShardedEmbedding",
    "ShardedEmbeddings",
    "World",
    "clip_gradients",
    "global_mean",
    "parallelize",
    "parameter_groups",
    "run",
    "stop_together",
    "torchrec_embedding_collection",
]

_LAZY_NAMES = {
    "Checkpoints": "checkpoint",
    "RoutedIds": "embedding",
    "RunStopped": "launch",
    "ShardedEmbedding": "embedding",
    "ShardedEmbeddings": "embedding",
    "World": "launch",
    "clip_gradients": "parallel",
    "global_mean": "parallel",
    "parallelize": "parallel",
    "parameter_groups": "parallel",
    "run": "launch",
    "stop_together": "launch",
    "torchrec_embedding_collection": "torchrec_tables",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY_NAMES:
        value = getattr(import_module(f"{__name__}.{_LAZY_NAMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
