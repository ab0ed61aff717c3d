"""HSTU layers for packed sequences: one sequential transduction unit, and a stack of them.

The unit is the one of "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers
for Generative Recommendations" (arXiv 2402.17152, section 3). For the rows `x` of a batch:

    u, v, q, k = split(silu(linear(norm(x))))
    a = hstu_attention(q, k, v)
    y = norm(a) * u                      optionally concatenated with u and a
    output = x + linear(dropout(y))

`norm` is a layer norm or RMSNorm.

Two public implementations of the unit differ in details. Every such detail is a field of
`HSTULayerConfig`; `HSTULayerConfig.research` sets the fields as in the paper's experiments, and
`HSTULayerConfig.stu` as in the production-style `STULayer`.

Sequences are packed: `x` is `(total, embedding_dim)`, and sequence `b` owns the rows
`seq_offsets[b] .. seq_offsets[b + 1]`. There is no padding and nothing is copied to the host.
"""

from __future__ import annotations

import math
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import ops
from .bias import thresholds_tensor
from .cached import CachedRows
from .call import NO_BIAS, NO_TIMES, AttentionCall, BiasTensors, Times, make_call
from .fused import operator as fused
from .fused.forward import infer
from .jagged import jagged_positions
from .layer_config import FP8, HSTULayerConfig
from .layer_math import ComposedSteps, Weights, hstu_unit
from .mask import Mask
from .paged import append_paged_kv

__all__ = [
    "FP8",
    "HSTULayer",
    "HSTULayerConfig",
    "HSTUStack",
    "PositionalEmbedding",
]


class ContextBatch(Protocol):
    """The interface of a batch whose rows are distributed over the ranks of a group.

    `hstu_attn.distributed.ContextBatch` implements it.
    """

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, bias: BiasTensors
    ) -> Tensor:
        """Computes `ops.attention` for the local rows; `call` is that of the whole sequences."""


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm with an attribute `bias`, which is None, as other norms have one."""

    bias: None = None


_NORMS = {"layer_norm": nn.LayerNorm, "rms_norm": RMSNorm}


class HSTULayer(nn.Module):
    """One sequential transduction unit (arXiv 2402.17152, section 3) over packed sequences.

    The computation runs in the dtype of `x`; parameters are cast to it where they are used. So
    fp32 parameters with bf16 inputs train with fp32 master weights. `config.fused` says whether
    the layer is one autograd function or composed of torch's functions. A fused layer saves fewer
    tensors for the backward, its norms read fp32 weights without a cast, and autocast has no effect
    on it.

    Args:
        config: the widths and options.
        device: where the parameters are made.
        dtype: floating dtype of the parameters.
    """

    output_norm: nn.LayerNorm | nn.GroupNorm | RMSNorm
    position_weight: nn.Parameter | None
    time_weight: nn.Parameter | None

    def __init__(
        self,
        config: HSTULayerConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        width = config.num_heads * config.hidden_dim
        self.input_norm = _NORMS[config.input_norm](
            config.embedding_dim,
            eps=config.norm_eps,
            elementwise_affine=config.norm_affine,
            device=device,
            dtype=dtype,
        )
        self.uvqk = nn.Linear(
            config.embedding_dim,
            sum(config.split_sizes),
            bias=config.linear_bias,
            device=device,
            dtype=dtype,
        )
        if config.use_group_norm:
            self.output_norm = nn.GroupNorm(
                config.num_heads,
                config.num_heads,
                eps=config.norm_eps,
                affine=config.norm_affine,
                device=device,
                dtype=dtype,
            )
        else:
            self.output_norm = _NORMS[config.output_norm](
                width,
                eps=config.norm_eps,
                elementwise_affine=config.norm_affine,
                device=device,
                dtype=dtype,
            )
        self.output = nn.Linear(
            config.output_features,
            config.embedding_dim,
            bias=config.output_bias,
            device=device,
            dtype=dtype,
        )
        self.register_parameter("position_weight", None)
        self.register_parameter("time_weight", None)
        if config.enable_relative_attention_bias:
            heads = config.relative_bias_heads
            distances = 2 * config.relative_bias_max_seq_len - 1
            self.position_weight = nn.Parameter(
                torch.empty(heads, distances, device=device, dtype=dtype)
            )
            if config.num_buckets > 0:
                self.time_weight = nn.Parameter(
                    torch.empty(heads, config.num_buckets + 1, device=device, dtype=dtype)
                )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new parameters.

        Linears are Xavier uniform with zero biases, except that `linear_init_std` may change the
        first one; bias tables are normal with standard deviation 0.02, and norms are the identity.
        """
        self.input_norm.reset_parameters()
        self.output_norm.reset_parameters()
        for linear in (self.uvqk, self.output):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
        if self.config.linear_init_std is not None:
            nn.init.normal_(self.uvqk.weight, std=self.config.linear_init_std)
        for table in (self.position_weight, self.time_weight):
            if table is not None:
                nn.init.normal_(table, std=0.02)

    def forward(
        self,
        x: Tensor,
        seq_offsets: Tensor,
        max_seq_len: int,
        num_targets: Tensor | None = None,
        num_contexts: Tensor | None = None,
        timestamps: Tensor | None = None,
        row_timestamps: Tensor | None = None,
        context: ContextBatch | None = None,
        call: AttentionCall | None = None,
    ) -> Tensor:
        """Applies the unit.

        Args:
            x: `(total, embedding_dim)`, floating.
            seq_offsets: `(batch + 1,)` int32 or int64, on the device of `x`.
            max_seq_len: at least the length of the longest sequence.
            num_targets: `(batch,)` integers, the candidates at the end of each sequence.
            num_contexts: `(batch,)` integers, the contextual rows at the start of each sequence;
                None is `config.contextual_seq_len` for every sequence.
            timestamps: `(total,)` int64 event times in seconds, for the relative bias; None
                leaves elapsed time out of the bias.
            row_timestamps: `(total,)` int64, the time at which each row predicts; None is the time
                of the next event in its sequence.
            context: how the rows of the batch are distributed over the ranks of a group that shares
                its sequences. With it, `x` and the result are this rank's rows, and the other
                arguments describe the whole sequences.
            call: the result of `attention_call` for the arguments from `seq_offsets` to
                `row_timestamps`, which are then not read; a stack makes it once for all layers.

        Returns:
            `(total, embedding_dim)` in the dtype of `x`.

        Raises:
            ValueError: a shape or dtype that does not fit, `num_targets` or `num_contexts`
                without causal attention, or `timestamps` where no table uses them.
        """
        self._check(x)
        if call is None:
            call = attention_call(
                self.config,
                seq_offsets,
                max_seq_len,
                num_targets,
                num_contexts,
                timestamps,
                row_timestamps,
            )
        bias = self._bias(call.timestamps is not None)
        if context is None and self._is_fused(x):
            weights = self._weights(*bias[1:])
            return fused.hstu_layer(x, weights, call, self._seed(x), self._settings())

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if context is not None:
                return context.attend(q, k, v, call, bias)
            return ops.attention(q, k, v, call, bias)

        return hstu_unit(x, self._steps(), attend)

    @torch.no_grad()
    def forward_cached(
        self,
        x: Tensor,
        rows: CachedRows,
        layer: int,
        timestamps: Tensor | None = None,
        row_timestamps: Tensor | None = None,
        call: AttentionCall | None = None,
    ) -> Tensor:
        """Applies the unit to the newest rows of sequences whose earlier rows are in a cache.

        It writes the keys and values of the new history to the cache. It is for inference: there
        are no gradients.

        If the cached keys and values are the same model's, the result equals that of `forward` on
        the whole sequences for these rows. A row's output depends on its row time, by default the
        time of the next event: where that has changed, write the row again (`rewritten` of the
        cache's step).

        Args:
            x: `(total, embedding_dim)`, for each sequence the rows to write, then the targets; in
                the dtype of the cache, or any dtype with a float8_e4m3fn cache.
            rows: the places of these rows, and the open step of the cache.
            layer: the index of this layer in the cache, from 0.
            timestamps: `(total_k,)` int64 event times of cached and given rows together.
            row_timestamps: `(total,)` int64, as in `forward`.
            call: the result of `cached_call` for the rows and times; made once per stack.

        Returns:
            `(total, embedding_dim)` in the dtype of `x`.

        Raises:
            ValueError: as `forward` and
                `hstu_attn.serving.check_cacheable`.
        """
        self._check(x)
        if call is None:
            call = cached_call(self.config, rows, timestamps, row_timestamps)
        bias = self._bias(call.timestamps is not None)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            pages = rows.step.paged_kv(layer)
            append_paged_kv(
                k,
                v,
                pages,
                cu_seqlens_q=rows.seq_offsets,
                cu_seqlens_k=rows.key_offsets,
                num_targets=rows.num_targets,
            )
            return ops.attention(q, k, v, call, bias, pages.arguments)

        # Under torch.compile the layer is composed: the compiler fuses torch's functions itself.
        if self._is_fused(x) and not fused.is_traced(x):
            return infer(x, self._weights(), self._seed(x), self._settings(), attend)
        return hstu_unit(x, self._steps(), attend)

    def extra_repr(self) -> str:
        return f"num_heads={self.config.num_heads}, alpha={self.config.alpha:.4g}"

    def _check(self, x: Tensor) -> None:
        if x.dim() != 2 or x.shape[1] != self.config.embedding_dim:
            raise ValueError(
                f"x: expected shape (total, {self.config.embedding_dim}), got {tuple(x.shape)}"
            )

    def _is_fused(self, x: Tensor) -> bool:
        return fused.suits(x) if self.config.fused is None else self.config.fused

    def _weights(
        self, pos_weight: Tensor | None = None, ts_weight: Tensor | None = None
    ) -> Weights:
        return Weights(
            self.input_norm.weight,
            self.input_norm.bias,
            self.uvqk.weight,
            self.uvqk.bias,
            self.output_norm.weight,
            self.output_norm.bias,
            self.output.weight,
            self.output.bias,
            pos_weight,
            ts_weight,
        )

    def _seed(self, x: Tensor) -> Tensor | None:
        """Draws the seed of a fused layer's dropout on the device, with torch's generator."""
        if not self.training or self.config.output_dropout_ratio == 0:
            return None
        return torch.randint(2**63 - 1, (1,), device=x.device)

    def _settings(self) -> fused.Settings:
        config = self.config
        return fused.Settings(
            num_heads=config.num_heads,
            hidden_dim=config.hidden_dim,
            attention_dim=config.attention_dim,
            norm_eps=config.norm_eps,
            input_centered=config.input_norm == "layer_norm",
            output_centered=config.output_norm == "layer_norm",
            linear_activation=config.linear_activation,
            groups=config.num_heads if config.use_group_norm else 1,
            parts=config.output_parts,
            dropout=config.output_dropout_ratio,
            fp8_linears=config.has_fp8_linears,
            recompute_norm=config.recompute_norm,
            recompute_linear=config.recompute_linear,
            recompute_silu=config.recompute_silu,
            recompute_gate=config.recompute_gate,
        )

    def _steps(self) -> ComposedSteps:
        return ComposedSteps(self.config, self._weights(), self.training)

    def _bias(self, with_times: bool) -> BiasTensors:
        """Returns the tensors of the relative bias, with the time table if `with_times`."""
        if self.position_weight is None:
            return NO_BIAS
        return None, self.position_weight, self.time_weight if with_times else None


# ---------------------------------------------------------------------------------------------
# The call that the layers of a batch share
# ---------------------------------------------------------------------------------------------


def attention_call(
    config: HSTULayerConfig,
    seq_offsets: Tensor,
    max_seq_len: int,
    num_targets: Tensor | None = None,
    num_contexts: Tensor | None = None,
    timestamps: Tensor | None = None,
    row_timestamps: Tensor | None = None,
) -> AttentionCall:
    """Makes the call of attention that all layers of a step share.

    Arguments and errors are those of `HSTULayer.forward`.
    """
    return make_call(
        seq_offsets,
        max_seq_len,
        mask=_mask(config, seq_offsets, num_targets, num_contexts),
        times=_times(config, timestamps, row_timestamps),
        alpha=config.alpha,
        scaling_seqlen=config.scaling_seqlen,
        quantization=config.quantization,
    )


def cached_call(
    config: HSTULayerConfig,
    rows: CachedRows,
    timestamps: Tensor | None = None,
    row_timestamps: Tensor | None = None,
) -> AttentionCall:
    """Makes the call of attention over a cache that all layers of a step share.

    Arguments and errors are those of `HSTULayer.forward_cached`.
    """
    rows.check(config)
    return make_call(
        rows.seq_offsets,
        rows.max_seq_len,
        rows.key_offsets,
        rows.max_key_len,
        mask=_mask(config, rows.seq_offsets, rows.num_targets, None),
        times=_times(config, timestamps, row_timestamps),
        alpha=config.alpha,
        scaling_seqlen=config.scaling_seqlen,
        quantization=config.quantization,
    )


def _mask(
    config: HSTULayerConfig,
    seq_offsets: Tensor,
    num_targets: Tensor | None,
    num_contexts: Tensor | None,
) -> Mask:
    """Makes the mask of a batch."""
    if not config.target_aware:
        num_targets = None
    if not config.causal:
        if num_targets is not None or num_contexts is not None:
            raise ValueError(
                "num_targets and num_contexts: expected None with causal=False in the config"
            )
        reach = config.max_attn_len or -1
        return Mask.local(reach, reach)
    if num_contexts is None and config.contextual_seq_len > 0:
        num_contexts = torch.full_like(
            seq_offsets[1:], config.contextual_seq_len, dtype=torch.int32
        )
    if config.max_attn_len == 0:
        return Mask.causal(
            num_contexts=num_contexts,
            num_targets=num_targets,
            target_group_size=config.target_group_size,
        )
    return Mask.local(
        config.max_attn_len,
        num_contexts=num_contexts,
        num_targets=num_targets,
        target_group_size=config.target_group_size,
        min_full_attn_seq_len=config.min_full_attn_seq_len,
    )


def _times(
    config: HSTULayerConfig, timestamps: Tensor | None, row_timestamps: Tensor | None
) -> Times:
    """Returns `(timestamps, row_timestamps, ts_thresholds)` for layers with a time table."""
    has_table = config.enable_relative_attention_bias and config.num_buckets > 0
    if timestamps is not None and not has_table:
        raise ValueError(
            "timestamps: expected None in a layer without a time table "
            "(enable_relative_attention_bias with num_buckets > 0 makes one)"
        )
    if timestamps is None:
        if row_timestamps is not None:
            raise ValueError("row_timestamps: expected None without timestamps")
        return NO_TIMES
    # The operator rejects anything that is not a tensor.
    is_tensor = isinstance(timestamps, Tensor)
    thresholds = thresholds_tensor(timestamps.device, config.time_thresholds) if is_tensor else None
    return timestamps, row_timestamps, thresholds


class HSTUStack(nn.Module):
    """A sequence of `num_layers` layers with the same configuration.

    Args:
        config: the configuration of every layer.
        num_layers: the number of layers.
        device: where the parameters are made.
        dtype: floating dtype of the parameters.
    """

    def __init__(
        self,
        config: HSTULayerConfig,
        num_layers: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_layers <= 0:
            raise ValueError(f"num_layers: expected a positive number, got {num_layers}")
        self.config = config
        self.layers = nn.ModuleList(HSTULayer(config, device, dtype) for _ in range(num_layers))

    def forward(
        self,
        x: Tensor,
        seq_offsets: Tensor,
        max_seq_len: int,
        num_targets: Tensor | None = None,
        num_contexts: Tensor | None = None,
        timestamps: Tensor | None = None,
        row_timestamps: Tensor | None = None,
        context: ContextBatch | None = None,
    ) -> Tensor:
        """Applies the layers in turn.

        Arguments, result and errors are those of `HSTULayer.forward`.
        """
        inputs = (seq_offsets, max_seq_len, num_targets, num_contexts, timestamps, row_timestamps)
        call = attention_call(self.config, *inputs)
        for layer in self.layers:
            x = layer(x, *inputs, context, call)
        return x

    def forward_cached(
        self,
        x: Tensor,
        rows: CachedRows,
        timestamps: Tensor | None = None,
        row_timestamps: Tensor | None = None,
    ) -> Tensor:
        """Applies the layers in turn to the newest rows of sequences.

        Layer `n` uses layer `n` of the cache. Arguments, result and errors are those of
        `HSTULayer.forward_cached`.
        """
        call = cached_call(self.config, rows, timestamps, row_timestamps)
        for number, layer in enumerate(self.layers):
            unit = cast(HSTULayer, layer)
            x = unit.forward_cached(x, rows, number, timestamps, row_timestamps, call)
        return x


class PositionalEmbedding(nn.Module):
    """Adds a learned embedding of its position to each packed row.

    The result is `dropout(x * sqrt(embedding_dim) + position[i])`.

    Args:
        max_seq_len: the number of learned positions, and the length of the longest sequence.
        embedding_dim: width of a row.
        dropout_ratio: dropout on the sum.
    """

    def __init__(self, max_seq_len: int, embedding_dim: int, dropout_ratio: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(max_seq_len, embedding_dim)
        self.dropout_ratio = dropout_ratio
        std = math.sqrt(1 / embedding_dim)
        nn.init.trunc_normal_(self.embedding.weight, std=std, a=-2 * std, b=2 * std)

    def forward(self, x: Tensor, seq_offsets: Tensor) -> Tensor:
        """Adds the embeddings to `x` `(total, embedding_dim)`, with `seq_offsets` `(batch + 1,)`.

        Returns the shape and dtype of `x`.
        """
        return self.at(x, jagged_positions(seq_offsets, x.shape[0]))

    def at(self, x: Tensor, positions: Tensor) -> Tensor:
        """Adds the embeddings to rows at the given positions, `(total,)` int64."""
        added = self.embedding(positions).to(x.dtype)
        return F.dropout(x * math.sqrt(x.shape[1]) + added, self.dropout_ratio, self.training)
