"""HSTU layers for packed sequences: one sequential transduction unit, and a stack of them.

The unit is the one of "Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers
for Generative Recommendations" (arXiv 2402.17152, section 3). For the rows ``x`` of a batch:

    u, v, q, k = split(silu(linear(norm(x))))
    a = hstu_attention(q, k, v)
    y = norm(a) * u                      optionally beside u and a
    output = x + linear(dropout(y))

Two public implementations of it differ in details. Every such detail is a field of
:class:`HSTULayerConfig`; :meth:`HSTULayerConfig.research` and :meth:`HSTULayerConfig.stu` set them
as the paper's experiments and as the production-style `STULayer` do.

Sequences are packed: ``x`` is ``(total, embedding_dim)``, and sequence ``b`` owns the rows
``seq_offsets[b] .. seq_offsets[b + 1]``. There is no padding and nothing is copied to the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hstu_attn.bias import RelativeBias
from hstu_attn.interface import hstu_attention
from hstu_attn.jagged import jagged_positions
from hstu_attn.mask import Mask
from hstu_attn.paged import append_paged_kv

if TYPE_CHECKING:
    from hstu_attn.distributed.context_parallel import ContextBatch
    from hstu_attn.serving.rows import CachedRows

__all__ = [
    "HSTULayer",
    "HSTULayerConfig",
    "HSTUStack",
    "PositionalEmbedding",
]


@dataclass(frozen=True, kw_only=True)
class HSTULayerConfig:
    """What one :class:`HSTULayer` computes. Widths ending in ``_dim`` are per head but for
    ``embedding_dim``.

    Widths:
        embedding_dim: width of a row of ``x``.
        num_heads: number of attention heads.
        hidden_dim: width of u and v in each head (``linear_dim`` or ``dv`` elsewhere).
        attention_dim: width of q and k in each head (``dqk`` elsewhere).

    The linear to u, v, q, k:
        linear_bias: whether it has a bias.
        linear_activation: ``"silu"`` on all four, ``"silu_u"`` on u alone, or ``"none"``.

    Attention:
        attn_alpha: factor on the scores; None is ``1 / sqrt(attention_dim)``.
        scaling_seqlen: the attention weights are divided by it; -1 is the call's ``max_seq_len``.
        causal: each row sees itself and what came before it.
        target_aware: the last ``num_targets`` rows are candidates that do not see each other;
            False ignores ``num_targets``.
        target_group_size: candidates in such a group see each other causally.
        max_attn_len: how far back a row sees; 0 is no limit.
        min_full_attn_seq_len: the last so many history rows see without that limit.
        contextual_seq_len: the first so many rows of every sequence are context, seen by all rows
            and seeing all history. A call may give ``num_contexts`` per sequence instead.

    Relative attention bias, learned:
        enable_relative_attention_bias: adds a bias by distance and, when a call gives
            ``timestamps``, one by elapsed time.
        relative_bias_max_seq_len: distances at or beyond it share one entry.
        relative_bias_heads: 1 shares the tables over all heads; otherwise a divisor of num_heads.
        num_buckets: the elapsed time falls into ``num_buckets + 1`` logarithmic buckets; 0 has no
            time table.

    Output:
        norm_affine: whether both norms have a learned weight and bias.
        norm_eps: added to the variance in both norms.
        use_group_norm: normalise the attention output within each head, not over all heads.
        concat_u: the output linear also reads u.
        concat_x: the output linear also reads the attention output as it was before the norm.
        concat_ua: the output linear also reads u and the attention output after the norm.
        output_dropout_ratio: dropout before the output linear (``linear_dropout_rate`` elsewhere).
        output_bias: whether the output linear has a bias.
    """

    embedding_dim: int
    num_heads: int
    hidden_dim: int
    attention_dim: int
    linear_bias: bool = True
    linear_activation: Literal["silu", "silu_u", "none"] = "silu"
    attn_alpha: float | None = None
    scaling_seqlen: int = -1
    causal: bool = True
    target_aware: bool = True
    target_group_size: int = 1
    max_attn_len: int = 0
    min_full_attn_seq_len: int = 0
    contextual_seq_len: int = 0
    enable_relative_attention_bias: bool = False
    relative_bias_max_seq_len: int = 0
    relative_bias_heads: int = 1
    num_buckets: int = 128
    norm_affine: bool = True
    norm_eps: float = 1e-6
    use_group_norm: bool = False
    concat_u: bool = False
    concat_x: bool = False
    concat_ua: bool = False
    output_dropout_ratio: float = 0.0
    output_bias: bool = True

    def __post_init__(self) -> None:
        for name in ("embedding_dim", "num_heads", "hidden_dim", "attention_dim"):
            self._require(name, getattr(self, name) > 0, "a positive number")
        for name in ("max_attn_len", "min_full_attn_seq_len", "contextual_seq_len", "num_buckets"):
            self._require(name, getattr(self, name) >= 0, "zero or a positive number")
        activations = ("silu", "silu_u", "none")
        self._require("linear_activation", self.linear_activation in activations, str(activations))
        self._require("output_dropout_ratio", 0 <= self.output_dropout_ratio < 1, "in [0, 1)")
        self._require(
            "scaling_seqlen", self.scaling_seqlen == -1 or self.scaling_seqlen > 0, "-1 or positive"
        )
        self._require(
            "concat_ua",
            not (self.concat_ua and (self.concat_u or self.concat_x)),
            "False beside concat_u or concat_x",
        )
        if self.enable_relative_attention_bias:
            self._require(
                "relative_bias_max_seq_len", self.relative_bias_max_seq_len > 0, "a positive number"
            )
            self._require(
                "relative_bias_heads",
                self.relative_bias_heads > 0 and self.num_heads % self.relative_bias_heads == 0,
                f"a divisor of num_heads = {self.num_heads}",
            )
        if not self.causal:
            self._require(
                "causal", self.contextual_seq_len == 0, "True where contextual_seq_len is given"
            )

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"{name} must be {expected}, got {getattr(self, name)!r}")

    @property
    def linear_dim(self) -> int:
        """Width of u and v in each head; another name of ``hidden_dim``."""
        return self.hidden_dim

    @property
    def dqk(self) -> int:
        """Width of q and k in each head; another name of ``attention_dim``."""
        return self.attention_dim

    @property
    def alpha(self) -> float:
        """The factor on the scores that is in force."""
        return 1 / math.sqrt(self.attention_dim) if self.attn_alpha is None else self.attn_alpha

    @property
    def split_sizes(self) -> tuple[int, int, int, int]:
        """Columns of u, v, q and k, in this order, in the output of the first linear. Within each
        the heads follow one another."""
        hidden, attention = self.num_heads * self.hidden_dim, self.num_heads * self.attention_dim
        return hidden, hidden, attention, attention

    @property
    def output_features(self) -> int:
        """Columns that the output linear reads."""
        parts = 3 if self.concat_ua else 1 + self.concat_u + self.concat_x
        return parts * self.num_heads * self.hidden_dim

    @classmethod
    def research(
        cls,
        *,
        embedding_dim: int,
        num_heads: int,
        linear_dim: int,
        attention_dim: int,
        max_sequence_len: int,
        linear_dropout_rate: float = 0.0,
        linear_activation: Literal["silu", "none"] = "silu",
        enable_relative_attention_bias: bool = True,
        concat_ua: bool = False,
        num_buckets: int = 128,
    ) -> HSTULayerConfig:
        """The unit of the paper's public experiments: SiLU on u, v, q and k, unscaled scores, a
        relative bias by position and time, norms without weights, no bias in the first linear."""
        return cls(
            embedding_dim=embedding_dim,
            num_heads=num_heads,
            hidden_dim=linear_dim,
            attention_dim=attention_dim,
            linear_bias=False,
            linear_activation=linear_activation,
            attn_alpha=1.0,
            scaling_seqlen=max_sequence_len,
            enable_relative_attention_bias=enable_relative_attention_bias,
            relative_bias_max_seq_len=max_sequence_len,
            num_buckets=num_buckets,
            norm_affine=False,
            concat_ua=concat_ua,
            output_dropout_ratio=linear_dropout_rate,
        )

    @classmethod
    def stu(
        cls,
        *,
        embedding_dim: int,
        num_heads: int,
        hidden_dim: int,
        attention_dim: int,
        output_dropout_ratio: float = 0.3,
        causal: bool = True,
        target_aware: bool = True,
        max_attn_len: int | None = None,
        attn_alpha: float | None = None,
        use_group_norm: bool = False,
        contextual_seq_len: int = 0,
    ) -> HSTULayerConfig:
        """The unit of the public `STULayer`: SiLU on u alone, scores over sqrt(attention_dim),
        the output linear reads u and the raw attention output too and has no bias."""
        return cls(
            embedding_dim=embedding_dim,
            num_heads=num_heads,
            hidden_dim=hidden_dim,
            attention_dim=attention_dim,
            linear_activation="silu_u",
            attn_alpha=attn_alpha,
            causal=causal,
            target_aware=target_aware,
            max_attn_len=max_attn_len or 0,
            contextual_seq_len=contextual_seq_len,
            use_group_norm=use_group_norm,
            concat_u=True,
            concat_x=True,
            output_dropout_ratio=output_dropout_ratio,
            output_bias=False,
        )


class HSTULayer(nn.Module):
    """One sequential transduction unit (arXiv 2402.17152, section 3) over packed sequences.

    The computation runs in the dtype of ``x``; parameters are cast to it where they are used. So
    fp32 parameters with bf16 inputs train with fp32 master weights.

    Args:
        config: the widths and options.
        device: where the parameters are made.
        dtype: floating dtype of the parameters.
    """

    output_norm: nn.LayerNorm | nn.GroupNorm
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
        self.input_norm = nn.LayerNorm(
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
            self.output_norm = nn.LayerNorm(
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
        """Draws new parameters: Xavier uniform linears, zero biases, bias tables of deviation
        0.02, unit norms."""
        self.input_norm.reset_parameters()
        self.output_norm.reset_parameters()
        for linear in (self.uvqk, self.output):
            nn.init.xavier_uniform_(linear.weight)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)
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
    ) -> Tensor:
        """Applies the unit.

        Args:
            x: ``(total, embedding_dim)``, floating.
            seq_offsets: ``(batch + 1,)`` int32 or int64, on the device of ``x``.
            max_seq_len: no sequence is longer.
            num_targets: ``(batch,)`` integers, the candidates at the end of each sequence.
            num_contexts: ``(batch,)`` integers, the contextual rows at the start of each sequence;
                None is ``config.contextual_seq_len`` in all.
            timestamps: ``(total,)`` int64 event times in seconds, for the relative bias; None
                leaves elapsed time out of it.
            row_timestamps: ``(total,)`` int64, the time at which each row is asked to predict;
                None is the time of the next event in its sequence.
            context: how the rows of the batch lie on the ranks of a group that shares its
                sequences. Then ``x`` and the result are this rank's rows, and the other arguments
                those of the whole sequences.

        Returns:
            ``(total, embedding_dim)`` in the dtype of ``x``.

        Raises:
            ValueError: a shape or dtype that does not fit, ``num_targets`` or ``num_contexts``
                without causal attention, or ``timestamps`` where no table uses them.
            NotImplementedError: a relative bias beside ``context``.
        """
        u, v, q, k = self._project(x)
        if context is not None:
            attention = context.attention(
                q,
                k,
                v,
                mask=self._mask(seq_offsets, num_targets, num_contexts),
                bias=self._bias(timestamps, row_timestamps),
                alpha=self.config.alpha,
                scaling_seqlen=self.config.scaling_seqlen,
            )
            return self._output(x, attention, u)
        attention = hstu_attention(
            q,
            k,
            v,
            cu_seqlens_q=seq_offsets,
            max_seqlen_q=max_seq_len,
            mask=self._mask(seq_offsets, num_targets, num_contexts),
            bias=self._bias(timestamps, row_timestamps),
            alpha=self.config.alpha,
            scaling_seqlen=self.config.scaling_seqlen,
        )
        return self._output(x, attention, u)

    @torch.no_grad()
    def forward_cached(
        self,
        x: Tensor,
        rows: CachedRows,
        layer: int,
        timestamps: Tensor | None = None,
        row_timestamps: Tensor | None = None,
    ) -> Tensor:
        """Applies the unit to the newest rows of sequences whose earlier keys and values are in a
        cache, and writes those of the new history there. For inference: no gradients.

        The result is that of the same rows in :meth:`forward` of the whole sequences, if what is
        cached came from the same model. A row's output depends on its row time, which is by default
        the time of the next event: write a row again (``rewritten`` of the cache's step) where that
        has changed.

        Args:
            x: ``(total, embedding_dim)``, of each sequence the rows to write, then the targets; in
                the dtype of the cache, or any beside one of float8_e4m3fn.
            rows: where these rows lie, and the open step of the cache.
            layer: the number of this layer in the cache, from 0.
            timestamps: ``(total_k,)`` int64 event times of cached and given rows together.
            row_timestamps: ``(total,)`` int64, as in :meth:`forward`.

        Returns:
            ``(total, embedding_dim)`` in the dtype of ``x``.

        Raises:
            ValueError: as :meth:`forward` and
                :func:`hstu_attn.serving.check_cacheable`.
        """
        rows.check(self.config)
        u, v, q, k = self._project(x)
        pages = rows.step.paged_kv(layer)
        append_paged_kv(
            k,
            v,
            pages,
            cu_seqlens_q=rows.seq_offsets,
            cu_seqlens_k=rows.key_offsets,
            num_targets=rows.num_targets,
        )
        attention = hstu_attention(
            q,
            k,
            v,
            cu_seqlens_q=rows.seq_offsets,
            max_seqlen_q=rows.max_seq_len,
            cu_seqlens_k=rows.key_offsets,
            max_seqlen_k=rows.max_key_len,
            mask=self._mask(rows.seq_offsets, rows.num_targets, None),
            bias=self._bias(timestamps, row_timestamps),
            alpha=self.config.alpha,
            scaling_seqlen=self.config.scaling_seqlen,
            paged_kv=pages,
        )
        return self._output(x, attention, u)

    def extra_repr(self) -> str:
        return f"num_heads={self.config.num_heads}, alpha={self.config.alpha:.4g}"

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """u ``(total, heads * hidden)``, and v, q, k ``(total, heads, width)`` as strided views of
        one buffer."""
        config = self.config
        if x.dim() != 2 or x.shape[1] != config.embedding_dim:
            raise ValueError(
                f"x must have shape (total, {config.embedding_dim}), got {tuple(x.shape)}"
            )
        normed = F.layer_norm(
            x,
            self.input_norm.normalized_shape,
            _cast_optional(self.input_norm.weight, x),
            _cast_optional(self.input_norm.bias, x),
            self.input_norm.eps,
        )
        uvqk = F.linear(normed, _cast(self.uvqk.weight, x), _cast_optional(self.uvqk.bias, x))
        if config.linear_activation == "silu":
            uvqk = F.silu(uvqk)
        u, v, q, k = uvqk.split(config.split_sizes, dim=1)
        if config.linear_activation == "silu_u":
            u = F.silu(u)
        v, q, k = (part.unflatten(1, (config.num_heads, -1)) for part in (v, q, k))
        return u, v, q, k

    def _gate(self, attention: Tensor, u: Tensor) -> Tensor:
        """What the output linear reads: ``norm(attention) * u`` and what is concatenated to it.
        ``attention`` is ``(total, heads, hidden)``."""
        config, norm = self.config, self.output_norm
        weight, bias = _cast_optional(norm.weight, u), _cast_optional(norm.bias, u)
        flat = attention.flatten(1)
        if isinstance(norm, nn.GroupNorm):
            normed = F.group_norm(attention, norm.num_groups, weight, bias, norm.eps).flatten(1)
        else:
            normed = F.layer_norm(flat, norm.normalized_shape, weight, bias, norm.eps)
        gated = normed * u
        if config.concat_ua:
            return torch.cat([u, normed, gated], dim=1)
        parts = [u] * config.concat_u + [flat] * config.concat_x + [gated]
        return torch.cat(parts, dim=1) if len(parts) > 1 else gated

    def _output(self, x: Tensor, attention: Tensor, u: Tensor) -> Tensor:
        """What follows attention ``(total, heads, hidden)``, added to ``x``."""
        y = F.dropout(self._gate(attention, u), self.config.output_dropout_ratio, self.training)
        return x + F.linear(y, _cast(self.output.weight, x), _cast_optional(self.output.bias, x))

    def _mask(
        self, seq_offsets: Tensor, num_targets: Tensor | None, num_contexts: Tensor | None
    ) -> Mask:
        config = self.config
        if not config.target_aware:
            num_targets = None
        if not config.causal:
            if num_targets is not None or num_contexts is not None:
                raise ValueError("num_targets and num_contexts need causal=True in the config")
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

    def _bias(
        self, timestamps: Tensor | None, row_timestamps: Tensor | None
    ) -> RelativeBias | None:
        if timestamps is not None and self.time_weight is None:
            raise ValueError(
                "timestamps must be None in a layer without a time table "
                "(enable_relative_attention_bias with num_buckets > 0 makes one)"
            )
        if timestamps is None and row_timestamps is not None:
            raise ValueError("row_timestamps must be None without timestamps")
        if self.position_weight is None:
            return None
        return RelativeBias(
            pos_weight=self.position_weight,
            ts_weight=None if timestamps is None else self.time_weight,
            timestamps=timestamps,
            row_timestamps=row_timestamps,
        )


class HSTUStack(nn.Module):
    """``num_layers`` layers of one configuration, each reading the output of the one before.

    Args:
        config: the configuration of every layer.
        num_layers: how many.
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
            raise ValueError(f"num_layers must be a positive number, got {num_layers}")
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
        """Applies the layers in turn; arguments, result and errors are those of
        :meth:`HSTULayer.forward`."""
        rest = (num_targets, num_contexts, timestamps, row_timestamps, context)
        for layer in self.layers:
            x = layer(x, seq_offsets, max_seq_len, *rest)
        return x

    def forward_cached(
        self,
        x: Tensor,
        rows: CachedRows,
        timestamps: Tensor | None = None,
        row_timestamps: Tensor | None = None,
    ) -> Tensor:
        """Applies the layers in turn to the newest rows of sequences, layer ``n`` with that layer
        of the cache; arguments, result and errors are those of :meth:`HSTULayer.forward_cached`."""
        for number, layer in enumerate(self.layers):
            unit = cast(HSTULayer, layer)
            x = unit.forward_cached(x, rows, number, timestamps, row_timestamps)
        return x


class PositionalEmbedding(nn.Module):
    """Adds a learned embedding of its position to each packed row:
    ``dropout(x * sqrt(embedding_dim) + position[i])``.

    Args:
        max_seq_len: how many positions are learned; no sequence is longer.
        embedding_dim: width of a row.
        dropout_ratio: dropout on the sum.
    """

    def __init__(self, max_seq_len: int, embedding_dim: int, dropout_ratio: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(max_seq_len, embedding_dim)
        self.dropout_ratio = dropout_ratio
        nn.init.trunc_normal_(self.embedding.weight, std=math.sqrt(1 / embedding_dim))

    def forward(self, x: Tensor, seq_offsets: Tensor) -> Tensor:
        """``x`` is ``(total, embedding_dim)``, ``seq_offsets`` ``(batch + 1,)``; returns the shape
        and dtype of ``x``."""
        return self.at(x, jagged_positions(seq_offsets, x.shape[0]))

    def at(self, x: Tensor, positions: Tensor) -> Tensor:
        """The same for rows at the given positions, ``(total,)`` int64."""
        added = self.embedding(positions).to(x.dtype)
        return F.dropout(x * math.sqrt(x.shape[1]) + added, self.dropout_ratio, self.training)


def _cast(parameter: Tensor, like: Tensor) -> Tensor:
    return parameter.to(like.dtype)


def _cast_optional(parameter: Tensor | None, like: Tensor) -> Tensor | None:
    return None if parameter is None else parameter.to(like.dtype)
