"""Training on many GPUs: a process per GPU, ranks joined by `torch.distributed`.

    launch              starting the ranks' processes, and failing together
    embedding           embedding tables whose rows are divided among the ranks
    parallel            data parallelism of other modules, and losses and clipping that are the
                        same on any number of ranks
    context_parallel    sequences that are divided among ranks, for more tokens than a GPU should
                        hold; context_rows says which rows a rank has
    tensor_parallel     layers whose heads are divided among ranks
    checkpoint          saving, and loading on any number of ranks
    torchrec_tables     embedding tables of torchrec, if it is installed

All modules are imported lazily.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import Checkpoints
    from .context_parallel import ContextBatch, context_parallel_attention
    from .embedding import RoutedIds, ShardedEmbedding, ShardedEmbeddings
    from .launch import RunStopped, World, is_launched, run, stop_together
    from .parallel import clip_gradients, global_mean, parallelize, parameter_groups
    from .tensor_parallel import gather_state_dict, shard_heads, shard_state_dict
    from .torchrec_tables import torchrec_embedding_collection

__all__ = [
    "Checkpoints",
    "ContextBatch",
    "RoutedIds",
    "RunStopped",
    "ShardedEmbedding",
    "ShardedEmbeddings",
    "World",
    "clip_gradients",
    "context_parallel_attention",
    "gather_state_dict",
    "global_mean",
    "is_launched",
    "parallelize",
    "parameter_groups",
    "run",
    "shard_heads",
    "shard_state_dict",
    "stop_together",
    "torchrec_embedding_collection",
]

_LAZY_NAMES = {
    "Checkpoints": "checkpoint",
    "ContextBatch": "context_parallel",
    "RoutedIds": "embedding",
    "RunStopped": "launch",
    "ShardedEmbedding": "embedding",
    "ShardedEmbeddings": "embedding",
    "World": "launch",
    "clip_gradients": "parallel",
    "context_parallel_attention": "context_parallel",
    "gather_state_dict": "tensor_parallel",
    "global_mean": "parallel",
    "is_launched": "launch",
    "parallelize": "parallel",
    "parameter_groups": "parallel",
    "run": "launch",
    "shard_heads": "tensor_parallel",
    "shard_state_dict": "tensor_parallel",
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
