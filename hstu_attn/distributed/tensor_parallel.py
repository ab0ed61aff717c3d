"""Tensor parallelism: the heads of HSTU layers are divided among the ranks of a group.

Rank `r` of `world` holds the heads `r * heads / world` to `(r + 1) * heads / world`: their columns
of u, v, q and k in the first linear, which all ranks apply to the same rows, and the columns of the
output linear that read them. Each computes attention for its heads, and the outputs of the last
linear are summed over the ranks. The norm of the attention output, between the two, is over all
heads; its mean and variance, or its mean square, are combined from those of the ranks. (A
`GroupNorm` stays within heads.)

    stack = shard_heads(stack, init_device_mesh("cuda", (8,)))

Then every rank calls the stack with the same rows and gets the same result. Parameters that all
ranks hold (the input norm, the output bias, tables of a relative bias whose heads the ranks do not
divide) get the same, whole gradient on each, and the sharded parameters the gradients of their
shards, so no gradient must be synchronized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..bias import bias_of_heads
from ..call import BiasTensors
from ..layer import HSTULayer
from ..layer_config import HSTULayerConfig
from ..layer_math import ComposedSteps, Weights, cast_like

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "TensorParallelHSTULayer",
    "gather_state_dict",
    "shard_heads",
    "shard_state_dict",
]


def shard_heads(module: nn.Module, mesh: DeviceMesh | dist.ProcessGroup) -> nn.Module:
    """Divides the heads of HSTU layers among the ranks of a group.

    Args:
        module: an `HSTULayer`, or a module that holds some, such as an `HSTUStack`. Its parameters
            must be equal on all ranks.
        mesh: a mesh of one dimension, or a group of ranks.

    Returns:
        `module`, whose layers have been replaced; for an `HSTULayer`, what replaces it. Make
        optimizers afterwards: the parameters are new ones.

    Raises:
        ValueError: where the ranks do not divide the number of heads, and for a mesh of more than
            one dimension.
    """
    group = _group_of(mesh)
    if isinstance(module, HSTULayer):
        return TensorParallelHSTULayer(module, group)
    layers = {name: x for name, x in module.named_modules() if isinstance(x, HSTULayer)}
    made = {name: TensorParallelHSTULayer(layer, group) for name, layer in layers.items()}
    for name, layer in made.items():
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, layer)
    return module


def _group_of(mesh: DeviceMesh | dist.ProcessGroup) -> dist.ProcessGroup:
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, got {mesh.ndim}")
    return mesh.get_group()


# ---------------------------------------------------------------------------------------------
# The layer
# ---------------------------------------------------------------------------------------------


class TensorParallelHSTULayer(HSTULayer):
    """The heads of an `HSTULayer` that one rank holds; its `config` counts only these heads.

    With dropout, each rank uses its own random numbers for the columns of its heads, even if
    torch's generators are in the same state on all ranks. The generators should be in the same
    state, so that dropout outside of the layers is the same on all ranks.

    Args:
        layer: the whole layer, with equal parameters on all ranks.
        group: the ranks that share its heads.

    Attributes:
        full_config: the configuration of the whole layer.
        divides_tables: whether the tables of a relative bias are divided among the ranks; else each
            rank holds whole ones.

    Raises:
        ValueError: where the ranks do not divide the number of heads.
    """

    def __init__(self, layer: HSTULayer, group: dist.ProcessGroup) -> None:
        config = layer.config
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        if config.num_heads % world:
            raise ValueError(
                f"num_heads: expected a multiple of the {world} ranks, got {config.num_heads}"
            )
        heads = config.num_heads // world
        divides_tables = config.relative_bias_heads % world == 0
        tables = config.relative_bias_heads // world if divides_tables else 1
        local_config = replace(config, num_heads=heads, relative_bias_heads=tables)
        super().__init__(local_config, device="meta")
        self.full_config = config
        self.divides_tables = divides_tables
        self.group = group
        self.first_head = rank * heads
        parts = _partition(config, world)
        for name, parameter in layer.named_parameters():
            local = parameter.detach()
            local = _part_of(local, *parts[name], rank, world) if name in parts else local.clone()
            owner, _, attribute = name.rpartition(".")
            made = nn.Parameter(local, requires_grad=parameter.requires_grad)
            setattr(self.get_submodule(owner), attribute, made)
            if name in parts:
                mark_divided(made, group)
        self.train(layer.training)

    def forward_cached(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raises NotImplementedError: a cache holds all heads.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("forward_cached: expected a layer with all heads")

    def _steps(self) -> ShardedSteps:
        return ShardedSteps(self.config, self._weights(), self.training, self.group)

    def _is_fused(self, x: Tensor) -> bool:
        return False

    def _bias(self, with_times: bool) -> BiasTensors:
        _, pos_weight, ts_weight = super()._bias(with_times)
        return None, self._local_table(pos_weight), self._local_table(ts_weight)

    def _local_table(self, table: Tensor | None) -> Tensor | None:
        """Returns the part of a table that this rank's heads use."""
        if table is None or self.divides_tables:
            return table
        table = _same_on_all(table, self.group)
        return bias_of_heads(
            table, self.full_config.num_heads, self.first_head, self.config.num_heads
        )


class ShardedSteps(ComposedSteps):
    """The steps of the heads that one rank holds.

    Args:
        config, weights, training: as for `ComposedSteps`, those of the rank.
        group: the ranks that share the heads.
    """

    def __init__(
        self,
        config: HSTULayerConfig,
        weights: Weights,
        training: bool,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(config, weights, training)
        self.group = group

    def normalize_input(self, x: Tensor) -> Tensor:
        return _same_on_all(super().normalize_input(x), self.group)

    def normalize_attention(self, attention: Tensor) -> Tensor:
        config = self.config
        if config.use_group_norm:
            return super().normalize_attention(attention)
        weight = cast_like(self.weights.gate_weight, attention)
        bias = cast_like(self.weights.gate_bias, attention)
        centered = config.output_norm == "layer_norm"
        normed = _Normalize.apply(attention, config.norm_eps, self.group, centered)
        if weight is not None:
            normed = normed * weight
        if bias is not None:
            normed = normed + bias
        return cast(Tensor, normed).to(attention.dtype)

    def dropout(self, y: Tensor) -> Tensor:
        ratio = self.config.output_dropout_ratio
        if not self.training or ratio == 0:
            return y
        # It is on the CPU, so that the host does not wait for a GPU.
        seed = int(torch.randint(2**62, (), device="cpu"))
        generator = torch.Generator(y.device).manual_seed(seed + dist.get_rank(self.group))
        kept = torch.empty_like(y).bernoulli_(1 - ratio, generator=generator)
        return y * (kept / (1 - ratio))

    def add_output(self, x: Tensor, y: Tensor) -> Tensor:
        local = self.linear(y, self.weights.output_weight, None)
        total, bias = _sum_of_all(local, self.group), cast_like(self.weights.output_bias, x)
        return x + (total if bias is None else total + bias)


def mark_divided(parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    """Marks a parameter as divided among the ranks of a group; its tensor does not say so."""
    vars(parameter)["_divided_over"] = group


def divided_over(parameter: nn.Parameter) -> dist.ProcessGroup | None:
    """Returns the group of a parameter that `mark_divided` has marked, or None."""
    return vars(parameter).get("_divided_over")


# ---------------------------------------------------------------------------------------------
# Collectives
# ---------------------------------------------------------------------------------------------

# NOTE: torch.distributed.nn.functional.all_reduce sums gradients over the ranks as well, as is
# right where each rank has a loss of its own. Here all ranks compute one and the same loss.


class _SameOnAll(torch.autograd.Function):
    """Passes a replicated tensor on to computations that differ by rank; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _SumOfAll(torch.autograd.Function):
    """Sums a tensor over the ranks; each rank gets the sum, and each term the sum's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        del ctx
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        del ctx
        return gradient, None


class _Normalize(torch.autograd.Function):
    """LayerNorm without weights of rows whose columns are divided among the ranks.

    Each rank has the same number of columns. Rows are normalized with the mean and variance of all
    columns, in fp32 or wider. With `centered=False` the mean is taken as zero, which gives RMSNorm.

    Means and sums of squares about them are combined as by Chan, Golub and LeVeque, "Updating
    Formulae and a Pairwise Algorithm for Computing Sample Variances" (1979), so that a large mean
    costs no digits.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, eps: float, group: dist.ProcessGroup, centered: bool
    ) -> Tensor:
        ctx.group, ctx.world, ctx.dtype = group, dist.get_world_size(group), x.dtype
        ctx.centered = centered
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if centered:
            variances, means = torch.var_mean(x, 1, correction=0)
        else:
            variances = x.square().mean(1)
            means = torch.zeros_like(variances)
        local = torch.stack([means, variances])
        every = local.new_empty((ctx.world, *local.shape))
        dist.all_gather(list(every.unbind(0)), local, group=group)
        means, variances = every.unbind(1)
        mean = means.mean(0)
        variance = variances.mean(0) + (means - mean).square().mean(0)
        scale = torch.rsqrt(variance + eps)[:, None]
        normed = (x - mean[:, None]) * scale
        ctx.save_for_backward(normed, scale)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        normed, scale = ctx.saved_tensors
        sums = torch.stack([gradient.mean(1), (gradient * normed).mean(1)])
        dist.all_reduce(sums, group=ctx.group)
        mean, slope = (sums / ctx.world)[..., None].unbind(0)
        if ctx.centered:
            gradient = gradient - mean
        return ((gradient - slope * normed) * scale).to(ctx.dtype), None, None, None


def _same_on_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return cast(Tensor, _SameOnAll.apply(x, group))


def _sum_of_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return cast(Tensor, _SumOfAll.apply(x, group))


# ---------------------------------------------------------------------------------------------
# Parameters
# ---------------------------------------------------------------------------------------------


def _partition(config: HSTULayerConfig, world: int) -> dict[str, tuple[int, Sequence[int]]]:
    """Describes the parameters that are divided among the ranks.

    Returns for each the dimension, and the sizes of the parts along it; each part is divided by
    heads.
    """
    width = config.num_heads * config.hidden_dim
    normed = config.num_heads if config.use_group_norm else width
    divided: dict[str, tuple[int, Sequence[int]]] = {
        "uvqk.weight": (0, config.split_sizes),
        "uvqk.bias": (0, config.split_sizes),
        "output_norm.weight": (0, (normed,)),
        "output_norm.bias": (0, (normed,)),
        "output.weight": (1, (width,) * (config.output_features // width)),
    }
    if config.relative_bias_heads % world == 0:
        tables = (0, (config.relative_bias_heads,))
        divided |= {"position_weight": tables, "time_weight": tables}
    return divided


def _part_of(whole: Tensor, dim: int, sizes: Sequence[int], rank: int, world: int) -> Tensor:
    parts = whole.split(list(sizes), dim)
    return torch.cat([part.chunk(world, dim)[rank] for part in parts], dim)


def _whole_of(parts: Sequence[Tensor], dim: int, sizes: Sequence[int]) -> Tensor:
    """Inverts `_part_of`, given the tensors of all ranks."""
    split = [part.split([size // len(parts) for size in sizes], dim) for part in parts]
    return torch.cat([torch.cat(of_ranks, dim) for of_ranks in zip(*split, strict=True)], dim)


def _sharded(module: nn.Module) -> dict[str, tuple[TensorParallelHSTULayer, int, Sequence[int]]]:
    """Returns the parameters of a module that are divided, by their names in its state."""
    found = {}
    for name, layer in module.named_modules():
        if isinstance(layer, TensorParallelHSTULayer):
            prefix = f"{name}." if name else ""
            world = dist.get_world_size(layer.group)
            for of_layer, (dim, sizes) in _partition(layer.full_config, world).items():
                found[prefix + of_layer] = (layer, dim, sizes)
    return found


def gather_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Returns the state dict of the module with undivided layers; a collective of all ranks.

    Args:
        module: what `shard_heads` returned.
    """
    sharded = _sharded(module)
    whole: dict[str, Tensor] = {}
    for name, tensor in module.state_dict().items():
        whole[name] = tensor
        if name in sharded:
            layer, dim, sizes = sharded[name]
            parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(layer.group))]
            dist.all_gather(parts, tensor.contiguous(), group=layer.group)
            whole[name] = _whole_of(parts, dim, sizes)
    return whole


def shard_state_dict(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the part of the state of undivided layers that this rank's module loads.

    Args:
        module: what `shard_heads` returned.
        state: the state dict of the same module before `shard_heads`.

    Example:
        >>> stack.load_state_dict(shard_state_dict(stack, torch.load(path)))
    """
    sharded = _sharded(module)
    local = dict(state)
    for name in sharded.keys() & state.keys():
        layer, dim, sizes = sharded[name]
        group = layer.group
        local[name] = _part_of(
            state[name], dim, sizes, dist.get_rank(group), dist.get_world_size(group)
        )
    return local
