"""Embedding tables of torchrec, for tables whose dense gradients would not fit in memory.

torchrec's fused kernels update only the rows of a batch, in the backward pass.

    tables = torchrec_embedding_collection(
        {"item": (1_000_000_000, 512)}, mesh, optimizer=torch.optim.Adam, options={"lr": 1e-3}
    )
    model = parallelize(Model(tables), mesh, "ddp", ignored_modules=[tables])
    rows = tables({"item": item_ids})["item"]       # (total, 512)

It takes and returns what `hstu_attn.distributed.embedding.ShardedEmbeddings` does. It needs
torchrec and fbgemm-gpu: `pip install fbgemm-gpu` (or `fbgemm-gpu-cpu`) in the version that fits
torch, and `pip install --no-deps torchrec tensordict torchmetrics tqdm pyre-extensions psutil`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .embedding import check_range, device_of

__all__ = ["TorchrecTables", "torchrec_embedding_collection"]

# fbgemm's kernel that finds each id's owner works on bags of ids at a time, so that one bag of all
# ids would be work for one thread.
IDS_PER_BAG = 32


class TorchrecTables(nn.Module):
    """Tables of torchrec, looked up by feature; made by `torchrec_embedding_collection`.

    Attributes:
        collection: torchrec's `ShardedEmbeddingCollection`.
    """

    def __init__(self, collection: nn.Module, num_embeddings: Mapping[str, int]) -> None:
        super().__init__()
        self.collection = collection
        self.num_embeddings = dict(num_embeddings)

    @property
    def fused_optimizer(self) -> Any:
        """The tables' optimizer, which steps in the backward pass; its learning rate may be set."""
        return self.collection.fused_optimizer

    def forward(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Looks rows up, all ranks together.

        Args:
            ids: the ids of each feature, by its name: `(total,)` int32 or int64, of all features
                and on one device.

        Returns:
            The rows of each feature, `(total, embedding_dim)`.

        Raises:
            ValueError: other features, or ids of this rank that are out of range.
        """
        from torchrec import KeyedJaggedTensor

        if ids.keys() != self.num_embeddings.keys():
            raise ValueError(
                f"ids: expected the features {sorted(self.num_embeddings)}, got {sorted(ids)}"
            )
        check_range(ids, self.num_embeddings)
        names = list(self.num_embeddings)
        totals = [ids[name].shape[0] for name in names]
        bags = max(1, max(totals) // IDS_PER_BAG)
        values = torch.cat([ids[name].long() for name in names])
        bag = torch.arange(bags, dtype=torch.int32, device=values.device)
        lengths = [total // bags + (bag < total % bags).int() for total in totals]
        rows = self.collection(
            KeyedJaggedTensor(
                keys=names,
                values=values,
                lengths=torch.cat(lengths),
            )
        )
        return {name: rows[name].values() for name in names}


def torchrec_embedding_collection(
    tables: Mapping[str, tuple[int, int]],
    mesh: DeviceMesh,
    *,
    optimizer: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    std: float = 0.02,
) -> TorchrecTables:
    """Makes torchrec's `EmbeddingCollection`, its rows divided among ranks.

    Gradients are means over ranks, as everywhere in `hstu_attn.distributed`. The tables' optimizer
    runs within the backward pass, so `hstu_attn.distributed.clip_gradients` does not see their
    gradients, and no other optimizer may have their parameters.

    Args:
        tables: the number of rows and their width by feature; the width is the same for all.
        mesh: one-dimensional, the ranks; needed even for one rank.
        optimizer: the optimizer of the tables: `torch.optim.SGD`, `Adagrad` or, on GPUs, `Adam`, or
            one of torchrec, as `torchrec.optim.RowWiseAdagrad`.
        options: the options of the optimizer, such as `lr`.
        std: deviation of the initial rows, which depend on the number of ranks.

    Raises:
        ImportError: torchrec or fbgemm-gpu are not installed.
        ValueError: a mesh of more dimensions.
    """
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, got {mesh.ndim}: {mesh}")
    from torchrec import EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.shard import shard
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingEnv
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    configs = [
        EmbeddingConfig(
            name=name,
            embedding_dim=width,
            num_embeddings=rows,
            feature_names=[name],
            init_fn=lambda tensor: nn.init.normal_(tensor, std=std),
        )
        for name, (rows, width) in tables.items()
    ]
    # The meta device allocates no memory until the tables are divided.
    collection = EmbeddingCollection(tables=configs, device=torch.device("meta"))
    apply_optimizer_in_backward(optimizer, collection.parameters(), dict(options))
    sharder = EmbeddingCollectionSharder()
    plan = construct_module_sharding_plan(
        collection,
        {name: row_wise() for name in tables},
        sharder=sharder,
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", mesh.size())),
        world_size=mesh.size(),
        device_type=mesh.device_type,
    )
    sharded = shard(
        collection,
        plan,
        env=ShardingEnv.from_process_group(mesh.get_group()),
        device=device_of(mesh),
        sharder=sharder,
    )
    return TorchrecTables(sharded, {name: rows for name, (rows, _) in tables.items()})
