"""Data parallelism: every rank has the model and a part of each global batch.

    model = parallelize(model, mesh, "fsdp2", compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=1e-3)
    ...
    loss = global_mean(losses.sum(), len(losses), mesh)
    loss.backward()
    norm = clip_gradients(model.parameters(), 1.0)
    optimizer.step()

A step is the same on any number of ranks, up to the rounding of sums, if they have the same global
batch: gradients of all parameters are means over ranks, and `global_mean` makes that the
gradient of the mean over the global batch however unevenly ranks share it.

Tables of `hstu_attn.distributed.embedding.ShardedEmbedding` are divided already and are
left as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.parallel import DistributedDataParallel

from ..layer import HSTULayer
from .embedding import ShardedEmbedding
from .tensor_parallel import divided_over, mark_divided
from .torchrec_tables import TorchrecTables

__all__ = ["clip_gradients", "global_mean", "parallelize", "parameter_groups"]


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | None,
    strategy: Literal["ddp", "fsdp2"] = "ddp",
    *,
    compute_dtype: torch.dtype | None = None,
    ignored_modules: Collection[nn.Module] = (),
    find_unused_parameters: bool = False,
) -> nn.Module:
    """Makes the gradients of all parameters means over the ranks of `mesh`.

    Parameters stay in their dtype, so that fp32 ones are the optimizer's master weights in either
    strategy. Each `hstu_attn.layer.HSTULayer` casts its input to `compute_dtype` and computes in
    it. Under `"ddp"` the layer casts its parameters where it uses them. Under `"fsdp2"` they are
    cast before the all-gather, which halves the traffic, and gradients are reduced in fp32. Other
    modules compute in the dtype of their parameters.

    Args:
        model: a model on its device. All ranks get the parameters and buffers of the first.
        mesh: one-dimensional. None, or a mesh of one rank, only sets `compute_dtype`.
        strategy: `"ddp"` keeps all parameters on every rank and reduces gradients;
            `"fsdp2"` divides parameters, gradients and optimizer state of each layer, and those
            of the rest of the model, among the ranks.
        compute_dtype: the dtype in which HSTU layers compute; None is the dtype of their input.
        ignored_modules: modules inside the model that reduce their own gradients, in addition to
            `ShardedEmbedding`.
        find_unused_parameters: under `"ddp"`, allows parameters that a step does not use on this
            rank. Under `"fsdp2"` all ranks are to use the same ones in a step.

    Returns:
        Under `"ddp"` a wrapper of `model`, else `model` itself, changed in place.

    Raises:
        ValueError: for an unknown strategy, or a mesh of more dimensions.
    """
    if strategy not in ("ddp", "fsdp2"):
        raise ValueError(f"strategy: expected 'ddp' or 'fsdp2', got {strategy!r}")
    if mesh is not None and mesh.ndim != 1:
        raise ValueError(f"mesh: expected one dimension, got {mesh.ndim}: {mesh}")
    layers = [module for module in model.modules() if isinstance(module, HSTULayer)]
    if compute_dtype is not None and (mesh is None or mesh.size() == 1 or strategy == "ddp"):
        for layer in layers:
            layer.register_forward_pre_hook(_casts_to(compute_dtype), with_kwargs=True)
    if mesh is None or mesh.size() == 1:
        return model
    ignored = _ignored(model, ignored_modules)
    if strategy == "ddp":
        # NOTE: DDP looks for names, which it takes from an attribute that this sets.
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(ignored))
        return DistributedDataParallel(
            model,
            process_group=mesh.get_group(),
            gradient_as_bucket_view=True,
            find_unused_parameters=find_unused_parameters,
        )
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name not in ignored:
                dist.broadcast(tensor, group=mesh.get_group(), group_src=0)
    of_heads = {name: divided_over(parameter) for name, parameter in model.named_parameters()}
    parameters = {tensor for tensor in ignored.values() if isinstance(tensor, nn.Parameter)}
    in_dtype = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in layers:
        policy = MixedPrecisionPolicy() if compute_dtype is None else in_dtype
        fully_shard(layer, mesh=mesh, mp_policy=policy, ignored_params=parameters)
    if model not in layers:
        fully_shard(model, mesh=mesh, ignored_params=parameters)
    for name, parameter in model.named_parameters():  # fully_shard has made new ones
        if group := of_heads[name]:
            mark_divided(parameter, group)
    return model


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Returns parameter groups for an optimizer.

    The parameters that every rank has whole come first, then those that are divided among ranks:
    optimizers update the parameters of a group together and cannot mix the two kinds. Options of a
    group, such as its learning rate, may be added. The parameters of torchrec's tables, which have
    their own optimizer, are in no group.
    """
    whole: list[nn.Parameter] = []
    divided: list[nn.Parameter] = []
    elsewhere = {
        parameter
        for module in model.modules()
        if isinstance(module, TorchrecTables)
        for parameter in module.parameters()
    }
    for parameter in model.parameters():
        if parameter in elsewhere:
            continue
        (divided if isinstance(parameter, DTensor) else whole).append(parameter)
    return [{"params": group} for group in (whole, divided) if group]


class _GlobalMean(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local_sum: Tensor, count: Tensor, group: dist.ProcessGroup | None
    ) -> Tensor:
        total = torch.stack([local_sum.detach().double(), count.to(local_sum.device).double()])
        ranks = 1
        if group is not None:
            dist.all_reduce(total, group=group)
            ranks = group.size()
        counted = total[1].clamp(min=1)
        ctx.save_for_backward((ranks / counted).to(local_sum.dtype))
        return (total[0] / counted).to(local_sum.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (factor,) = ctx.saved_tensors
        return gradients[0] * factor, None, None


def global_mean(local_sum: Tensor, count: int | Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Returns the mean over the global batch, whose parts on the ranks may have any sizes.

    Its value is the same on every rank. Its gradient with regard to `local_sum` is the number of
    ranks over the global count, so that the mean over ranks of the parameters' gradients is the
    gradient of this mean.

    Args:
        local_sum: floating scalar, the sum over this rank's part of the batch, 0 if it is empty.
        count: the number of terms in the sum.
        mesh: one-dimensional, the ranks; None is this process alone.

    Returns:
        A scalar of the dtype of `local_sum`; 0 where no rank has anything.

    Raises:
        ValueError: if `local_sum` is not a scalar.
    """
    if local_sum.dim() != 0:
        raise ValueError(f"local_sum: expected a scalar, got the shape {tuple(local_sum.shape)}")
    count = torch.as_tensor(count, device=local_sum.device)
    result: Tensor = _GlobalMean.apply(local_sum, count, None if mesh is None else mesh.get_group())
    return result


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scales gradients so that the Euclidean norm of all of them together is at most `max_norm`.

    Replicated gradients count once and sharded gradients with the shards of all ranks, so the norm
    is that of the same model on one rank. All ranks must call this together.

    Args:
        parameters: some may be DTensors, on any meshes, or belong to layers whose heads
            `shard_heads` has divided. Those without a gradient do not count.
        max_norm: the largest norm; infinity only computes the norm.

    Returns:
        The norm before clipping, a scalar, the same on every rank; useful for logging and for
        detecting a gradient that is not finite. In that case gradients stay as they are, so that
        they can be inspected.

    Raises:
        ValueError: for a gradient that is a sum not yet carried out (`Partial`).
    """
    by_ranks: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            groups, local = _local_part(parameter.grad)
            if of_heads := divided_over(parameter):
                groups = (*groups, of_heads)
            by_ranks.setdefault(groups, []).append(local)
    every = [part for parts in by_ranks.values() for part in parts]
    if not every:
        return torch.zeros(())
    squares = []
    for groups, parts in by_ranks.items():
        square = nn.utils.get_total_norm(parts).to(every[0].device) ** 2
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    norm = torch.stack(squares).sum().sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    factor = factor.masked_fill(~norm.isfinite(), 1.0)
    for part in every:
        part.mul_(factor.to(part.device))
    return norm


def _local_part(gradient: Tensor) -> tuple[tuple[dist.ProcessGroup, ...], Tensor]:
    """Returns this rank's part of a gradient, and the groups over which its parts are summed."""
    if not isinstance(gradient, DTensor):
        return (), gradient
    groups = []
    for dimension, placement in enumerate(gradient.placements):
        if isinstance(placement, Partial):
            raise ValueError(f"gradients: expected no Partial placement, got {gradient.placements}")
        if isinstance(placement, Shard):
            groups.append(gradient.device_mesh.get_group(dimension))
    return tuple(groups), gradient.to_local()


def _ignored(model: nn.Module, modules: Collection[nn.Module]) -> dict[str, Tensor]:
    """Returns by name the parameters and buffers that data parallelism leaves alone."""
    result: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, ShardedEmbedding) or any(module is other for other in modules):
            result.update(module.named_parameters(prefix))
            result.update(module.named_buffers(prefix))
    return result


def _casts_to(dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        is_floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if is_floating else value

    def hook(
        module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(cast, arguments)), {key: cast(value) for key, value in named.items()}

    return hook
