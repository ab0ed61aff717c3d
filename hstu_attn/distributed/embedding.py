"""Embedding tables whose rows are divided among ranks.

    items = ShardedEmbedding("item", 10_000_000, 512, mesh=mesh, seed=0)
    rows = items(item_ids)                          # (total, 512), as of one table

Rank `r` of `n` owns the rows `r * ceil(rows / n) ..`; the parameter is a `DTensor` with
`Shard(0)`, so that `torch.distributed.checkpoint` and torch's optimizers know what it is. A
lookup sends ids to their owners, and rows come back; the backward pass sends the rows' gradients to
the owners.

Each distinct id of a batch is sent once. Removing duplicates costs little compared to the exchange:
ids must be sorted by owner anyway, and the host must know how many ids each owner gets, so one copy
to the host is needed anyway. `ShardedEmbedding.route` does this part, which depends only on ids,
ahead of time.

Gradients are means of the ranks' gradients, as in `DistributedDataParallel` and `fully_shard`. With
the loss of `hstu_attn.distributed.parallel.global_mean` on every rank, this is the gradient of the
mean over the global batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["RoutedIds", "ShardedEmbedding", "ShardedEmbeddings", "check_range", "device_of"]

# Rows are drawn in blocks, each from a generator of its own, so that no rank draws the others'.
ROWS_PER_BLOCK = 4096


@dataclass(frozen=True)
class RoutedIds:
    """The places that the rows of a lookup come from; made by `ShardedEmbedding.route`.

    Attributes:
        owned: `(received,)` int64, the local rows that ranks request, ordered by rank.
        inverse: int64 of the shape of the ids: for each id, the index of its row among the distinct
            rows that come back.
        sent: the number of ids sent to each rank.
        received: the number of ids received from each rank.
    """

    owned: Tensor
    inverse: Tensor
    sent: list[int]
    received: list[int]


class ShardedEmbedding(nn.Module):
    """`num_embeddings` rows of width `embedding_dim`, divided among the ranks of a mesh.

    Initial rows are normal with deviation `std` and depend on `name`, `seed` and the kind of
    device, not on the number of ranks.

    NOTE: the gradient is dense over the rows that a rank owns, as in `nn.Embedding`.

    Args:
        name: the name of the feature; errors name it.
        num_embeddings: rows of the table.
        embedding_dim: width of a row.
        mesh: the ranks, one-dimensional. None is a table of this process only, whose parameter is a
            plain tensor. With one rank nothing is sent.
        std: deviation of the initial rows.
        seed: the seed of the initial rows.
        output_dtype: the dtype in which rows and their gradients are sent, and rows returned; the
            gradients of several ranks are summed in the table's dtype. None is the table's dtype.
        device: where the table is made; None is the mesh's device.
        dtype: floating dtype of the table.
    """

    _bounds: Tensor

    def __init__(
        self,
        name: str,
        num_embeddings: int,
        embedding_dim: int,
        mesh: DeviceMesh | None = None,
        *,
        std: float = 0.02,
        seed: int = 0,
        output_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for label, size in (("num_embeddings", num_embeddings), ("embedding_dim", embedding_dim)):
            if size <= 0:
                raise ValueError(f"{label}: expected a positive number, got {size}")
        if mesh is not None and mesh.ndim != 1:
            raise ValueError(f"mesh: expected one dimension, got {mesh.ndim}: {mesh}")
        self.name = name
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.mesh = mesh
        self.std = std
        self.seed = seed
        self.output_dtype = output_dtype
        self.num_ranks = 1 if mesh is None else mesh.size()
        rank = 0 if mesh is None else mesh.get_local_rank()
        # Rows are divided as by torch.chunk and Shard(0): the last ranks may own fewer rows, or
        # none.
        rows_per_rank = -(-num_embeddings // self.num_ranks)
        bounds = torch.arange(self.num_ranks + 1) * rows_per_rank
        bounds = bounds.clamp(max=num_embeddings)
        self.first_row, self.end_row = int(bounds[rank]), int(bounds[rank + 1])
        if device is None and mesh is not None:
            device = device_of(mesh)
        local = torch.empty(
            self.end_row - self.first_row, embedding_dim, device=device, dtype=dtype
        )
        self.register_buffer("_bounds", bounds.to(local.device), persistent=False)
        if mesh is not None:
            # NOTE: importing this takes half as long as torch, and a server needs none of it.
            from torch.distributed.tensor import DTensor, Shard

            local = DTensor.from_local(
                local,
                mesh,
                [Shard(0)],
                run_check=False,
                shape=torch.Size((num_embeddings, embedding_dim)),
                stride=(embedding_dim, 1),
            )
        self.weight = nn.Parameter(local)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the initial rows."""
        local = self.local_weight()
        for block in range(self.first_row // ROWS_PER_BLOCK, -(-self.end_row // ROWS_PER_BLOCK)):
            start = block * ROWS_PER_BLOCK
            end = min(start + ROWS_PER_BLOCK, self.num_embeddings)
            generator = torch.Generator(local.device)
            generator.manual_seed(zlib.crc32(f"{self.name} {self.seed} {block}".encode()))
            rows = torch.empty(end - start, self.embedding_dim, device=local.device)
            rows.normal_(0, self.std, generator=generator)
            first, last = max(start, self.first_row), min(end, self.end_row)
            local[first - self.first_row : last - self.first_row] = rows[
                first - start : last - start
            ]

    @torch.no_grad()
    def copy_table(self, table: Tensor) -> None:
        """Copies the rows of `table`, `(num_embeddings, embedding_dim)`, the same on each rank.

        Raises:
            ValueError: for another shape.
        """
        if table.shape != self.weight.shape:
            raise ValueError(
                f"table: expected shape {tuple(self.weight.shape)}, got {tuple(table.shape)}"
            )
        self.local_weight().copy_(table[self.first_row : self.end_row])

    def local_weight(self) -> Tensor:
        """Returns the rows of this rank, `(owned, embedding_dim)`.

        Their gradients reach the parameter.
        """
        weight: Tensor = self.weight
        to_local = getattr(weight, "to_local", None)  # of a DTensor
        return weight if to_local is None else cast(Tensor, to_local())

    def forward(self, ids: Tensor | RoutedIds) -> Tensor:
        """Looks rows up.

        Each rank has its own ids. All ranks call this together, including one without ids.

        Args:
            ids: int32 or int64 of any shape, or what `route` returned for them.

        Returns:
            The shape of the ids with `embedding_dim` behind it, in `output_dtype`.

        Raises:
            ValueError: ids that are not integers, or on every rank if an id of any rank is not from
                0 to `num_embeddings - 1`.
        """
        routed = ids if isinstance(ids, RoutedIds) else self.route(ids)
        rows = F.embedding(routed.owned, self.local_weight())
        if self.output_dtype is not None:
            rows = rows.to(self.output_dtype)
        if self.num_ranks > 1:
            mesh = cast(DeviceMesh, self.mesh)
            rows = _Exchange.apply(
                rows, routed.received, routed.sent, mesh.get_group(), self.num_ranks
            )
            rows = F.embedding(routed.inverse, rows)
        return rows

    @torch.no_grad()
    def route(self, ids: Tensor) -> RoutedIds:
        """Computes the part of a lookup that depends on ids alone; all ranks call it together.

        It may run while an earlier step is computed. It copies to the host, so on a GPU the host
        waits for it.

        Arguments and errors are those of `forward`.
        """
        if ids.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{self.name} ids: expected int32 or int64, got {ids.dtype}")
        ids = ids.long()
        if self.num_ranks == 1:
            check_range({self.name: ids}, {self.name: self.num_embeddings})
            return RoutedIds(ids, ids, [], [])
        distinct, inverse = torch.unique(ids, return_inverse=True)
        # The distinct ids are in order, so those of an owner are neighbors.
        places = torch.searchsorted(distinct, self._bounds)
        outside = (places[0] > 0) | (places[-1] < len(distinct))
        sent = torch.where(outside, -1, places.diff())
        received = torch.empty_like(sent)
        group = cast(DeviceMesh, self.mesh).get_group()
        dist.all_to_all_single(received, sent, group=group)
        sent_counts, received_counts = torch.stack([sent, received]).tolist()
        if min(sent_counts) < 0:
            check_range({self.name: ids}, {self.name: self.num_embeddings})
        if min(received_counts) < 0:
            raise ValueError(
                f"{self.name} ids: expected 0 to {self.num_embeddings - 1}, which they are not "
                f"on rank {received_counts.index(-1)} of the mesh"
            )
        owned = distinct.new_empty(sum(received_counts))
        dist.all_to_all_single(owned, distinct, received_counts, sent_counts, group=group)
        return RoutedIds(owned - self.first_row, inverse, sent_counts, received_counts)

    def extra_repr(self) -> str:
        return (
            f"{self.name!r}, {self.num_embeddings}, {self.embedding_dim}, "
            f"rows {self.first_row} to {self.end_row - 1} of {self.num_ranks} ranks"
        )


class ShardedEmbeddings(nn.Module):
    """A `ShardedEmbedding` for each feature.

    Args:
        tables: the number of rows and their width, by feature.
        mesh: as in `ShardedEmbedding`.
        options: further arguments of every `ShardedEmbedding`.
    """

    def __init__(
        self, tables: Mapping[str, tuple[int, int]], mesh: DeviceMesh | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {name: ShardedEmbedding(name, *size, mesh, **options) for name, size in tables.items()}
        )

    def forward(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the rows of each feature's ids, as `ShardedEmbedding.forward` does.

        All ranks name the same features in the same order.
        """
        return {name: self.tables[name](feature) for name, feature in ids.items()}


def check_range(ids: Mapping[str, Tensor], num_embeddings: Mapping[str, int]) -> None:
    """Checks that ids are rows of their tables; it copies their range to the host once.

    Raises:
        ValueError: naming the feature, the id and the row where it is.
    """
    present = {name: feature for name, feature in ids.items() if feature.numel()}
    if not present:
        return
    ranges = torch.stack([torch.stack(feature.aminmax()) for feature in present.values()])
    for (name, feature), (smallest, largest) in zip(present.items(), ranges.tolist(), strict=True):
        rows = num_embeddings[name]
        if smallest < 0 or largest >= rows:
            row = int(((feature < 0) | (feature >= rows)).flatten().nonzero()[0])
            raise ValueError(
                f"{name} ids: expected 0 to {rows - 1}, "
                f"got {int(feature.flatten()[row])} in row {row}"
            )


class _Exchange(torch.autograd.Function):
    """Sends rows to the ranks that look them up.

    The backward pass sends the mean over ranks of their gradients back to the owners of the rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        sent: list[int],
        received: list[int],
        group: dist.ProcessGroup,
        num_ranks: int,
    ) -> Tensor:
        ctx.exchange = (sent, received, group, num_ranks)
        result = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sent, received, group, num_ranks = ctx.exchange
        (gradient,) = gradients
        result = gradient.new_empty(sum(sent), gradient.shape[1])
        dist.all_to_all_single(result, gradient.contiguous(), sent, received, group=group)
        return result / num_ranks, None, None, None, None


def device_of(mesh: DeviceMesh) -> torch.device:
    """Returns the device of this rank in a mesh; on a machine with several GPUs the current one."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)
