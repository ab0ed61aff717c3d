"""The configuration of an HSTU layer, with the details in which public implementations differ."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from .quantization import Quantization

__all__ = ["FP8", "HSTULayerConfig"]

Norm = Literal["layer_norm", "rms_norm"]
LinearActivation = Literal["silu", "silu_u", "none"]


@dataclass(frozen=True)
class FP8:
    """The choice of the parts of a layer that are computed in FP8. Experimental.

    FP8 changes no parameters; fp32 parameters are master weights. Gradients use the
    straight-through estimator for the quantization.

    Attributes:
        attention: how attention quantizes q, k and v in the forward; None computes it in 16 bits.
        linears: whether the two linears, and the gradients of their inputs, are matrix products in
            e4m3 with a scale for each row of both factors. Gradients of their weights are bf16
            products. It needs bf16 `x`, and on a GPU compute capability 8.9 or later.

    On Hopper GPUs, with both parts, `Quantization(mode=2)` and no `smooth_k`, the product that
    makes u, v, q and k also quantizes v, q and k, if sequences are long.
    """

    attention: Quantization | None = field(default_factory=Quantization)
    linears: bool = False

    def __post_init__(self) -> None:
        attention: Any = self.attention
        if isinstance(attention, dict):  # made by `dataclasses.asdict`
            attention = Quantization(**attention)
            object.__setattr__(self, "attention", attention)
        if not isinstance(attention, (Quantization, type(None))):
            raise ValueError(
                f"attention: expected a Quantization or None, got {type(attention).__name__}"
            )


@dataclass(frozen=True, kw_only=True)
class HSTULayerConfig:
    """The configuration of an `HSTULayer`.

    Widths that end in `_dim` are per head, except `embedding_dim`.

    Widths:
        embedding_dim: width of a row of `x`.
        num_heads: number of attention heads.
        hidden_dim: width of u and v in each head (`linear_dim` or `dv` elsewhere).
        attention_dim: width of q and k in each head (`dqk` elsewhere).

    The linear to u, v, q, k:
        linear_bias: whether it has a bias.
        linear_activation: `"silu"` on all four, `"silu_u"` on u alone, or `"none"`.
        linear_init_std: standard deviation of its initial normal weights; None is Xavier uniform.

    Attention:
        attn_alpha: factor on the scores; None is `1 / sqrt(attention_dim)`.
        scaling_seqlen: the divisor of the attention weights; -1 is the call's `max_seq_len`.
        causal: whether each row sees only itself and earlier rows.
        target_aware: the last `num_targets` rows are candidates that do not see each other;
            False ignores `num_targets`.
        target_group_size: candidates of a group of this size see each other causally.
        max_attn_len: how far back a row sees; 0 is no limit.
        min_full_attn_seq_len: the number of last history rows to which `max_attn_len` does not
            apply.
        contextual_seq_len: the number of context rows at the start of every sequence; all rows see
            them, and they see all history. A call may give `num_contexts` per sequence instead.

    Relative attention bias, learned:
        enable_relative_attention_bias: adds a bias by distance and, when a call gives
            `timestamps`, one by elapsed time.
        relative_bias_max_seq_len: distances at or beyond it share one entry.
        relative_bias_heads: 1 shares the tables over all heads; otherwise a divisor of num_heads.
        num_buckets: the elapsed time falls into `num_buckets + 1` buckets; 0 has no time table.
        time_thresholds: the elapsed times, non-decreasing, at which a next bucket begins, as in
            `RelativeBias`: `tuple(RelativeBias.sqrt_thresholds(128, 60.0).tolist())` has buckets of
            the square root of minutes. None is the logarithm of seconds over 0.301.

    Norms, of `x` before the first linear and of the attention output after it:
        input_norm: `"layer_norm"`, or `"rms_norm"`, which divides a row by the root of its mean
            square (Zhang and Sennrich 2019, arXiv 1910.07467): no mean is subtracted, and there is
            no bias.
        output_norm: the same choice for the attention output.
        norm_affine: whether both norms have a learned weight, and a layer norm a learned bias too.
        norm_eps: added to the variance, or to the mean square, in both norms; positive.
        use_group_norm: normalize the attention output within each head, not over all heads; needs
            `output_norm="layer_norm"`.

    Output:
        concat_u: the output linear also reads u.
        concat_x: the output linear also reads the attention output before the norm.
        concat_ua: the output linear also reads u and the attention output after the norm.
        output_dropout_ratio: dropout before the output linear (`linear_dropout_rate` elsewhere).
        output_bias: whether the output linear has a bias.

    FP8, experimental:
        fp8: the parts to compute in FP8, an `FP8` or its `dataclasses.asdict`; None is none. The
            state dict is the same, so a layer may be trained in FP8 and served without it:
            `dataclasses.replace(config, fp8=None)`.

    How it is computed. These fields change results by rounding at most. The `recompute` fields do
    not change a bit where the device runs the layer's steps in plain torch. Below, `c` is the
    number of bytes of an element of `x`.
        fused: True runs the layer as one autograd function, with custom kernels between the
            matrix products on GPUs; False composes it of torch's functions. None fuses it where
            `x` is bf16 or fp16 on a GPU and Triton is installed, but not under autocast or
            `torch.export`. Layers that share sequences or heads with other ranks are composed.
        recompute_norm: a fused layer recomputes the normalized `x` in the backward, which saves
            `c * embedding_dim` bytes a row.
        recompute_linear: a fused layer recomputes the first linear's output, which saves
            `c * sum(split_sizes)` bytes a row at the cost of a second matrix product.
        recompute_silu: a fused layer recomputes SiLU of v, q and k, which saves
            `c * sum(split_sizes[1:])` bytes a row with `linear_activation="silu"`. With FP8
            attention it is always recomputed. SiLU of u is always recomputed.
        recompute_gate: a fused layer recomputes the input of the output linear, which saves
            `c * output_features` bytes a row.
    """

    embedding_dim: int
    num_heads: int
    hidden_dim: int
    attention_dim: int
    linear_bias: bool = True
    linear_activation: LinearActivation = "silu"
    linear_init_std: float | None = None
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
    time_thresholds: tuple[int, ...] | None = None
    input_norm: Norm = "layer_norm"
    output_norm: Norm = "layer_norm"
    norm_affine: bool = True
    norm_eps: float = 1e-6
    use_group_norm: bool = False
    concat_u: bool = False
    concat_x: bool = False
    concat_ua: bool = False
    output_dropout_ratio: float = 0.0
    output_bias: bool = True
    fp8: FP8 | None = None
    fused: bool | None = None
    recompute_norm: bool = False
    recompute_linear: bool = False
    recompute_silu: bool = False
    recompute_gate: bool = False

    def __post_init__(self) -> None:
        for name in ("embedding_dim", "num_heads", "hidden_dim", "attention_dim"):
            self._require(name, getattr(self, name) > 0, "a positive number")
        for name in ("max_attn_len", "min_full_attn_seq_len", "contextual_seq_len", "num_buckets"):
            self._require(name, getattr(self, name) >= 0, "zero or a positive number")
        norms = ("layer_norm", "rms_norm")
        self._require("input_norm", self.input_norm in norms, f"one of {norms}")
        self._require("output_norm", self.output_norm in norms, f"one of {norms}")
        self._require(
            "output_norm",
            self.output_norm == "layer_norm" or not self.use_group_norm,
            "'layer_norm' with use_group_norm",
        )
        self._require("norm_eps", self.norm_eps > 0, "a positive number")
        activations = ("silu", "silu_u", "none")
        self._require("linear_activation", self.linear_activation in activations, str(activations))
        std = self.linear_init_std
        self._require(
            "linear_init_std", std is None or 0 < std < math.inf, "None or a positive number"
        )
        self._require("output_dropout_ratio", 0 <= self.output_dropout_ratio < 1, "in [0, 1)")
        self._require(
            "scaling_seqlen", self.scaling_seqlen == -1 or self.scaling_seqlen > 0, "-1 or positive"
        )
        self._require(
            "concat_ua",
            not (self.concat_ua and (self.concat_u or self.concat_x)),
            "False with concat_u or concat_x",
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
        thresholds = self.time_thresholds
        if thresholds is not None:
            rising = all(a <= b for a, b in pairwise((0, *thresholds)))
            self._require(
                "time_thresholds",
                isinstance(thresholds, tuple) and rising,
                "a tuple of non-negative, non-decreasing integers",
            )
        self._check_fp8()
        if not self.causal:
            self._require(
                "causal", self.contextual_seq_len == 0, "True where contextual_seq_len is given"
            )

    def _check_fp8(self) -> None:
        fp8: Any = self.fp8
        if isinstance(fp8, dict):
            object.__setattr__(self, "fp8", FP8(**fp8))
        self._require("fp8", isinstance(self.fp8, (FP8, type(None))), "an FP8 or None")
        if not self.has_fp8_linears:
            return
        widths = {
            "embedding_dim": self.embedding_dim,
            "num_heads * hidden_dim": self.num_heads * self.hidden_dim,
            "num_heads * attention_dim": self.num_heads * self.attention_dim,
        }
        for name, width in widths.items():
            if width % 16:
                raise ValueError(f"{name}: expected a multiple of 16 with FP8 linears, got {width}")

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"{name}: expected {expected}, got {getattr(self, name)!r}")

    @property
    def linear_dim(self) -> int:
        """Width of u and v in each head; another name of `hidden_dim`."""
        return self.hidden_dim

    @property
    def dqk(self) -> int:
        """Width of q and k in each head; another name of `attention_dim`."""
        return self.attention_dim

    @property
    def quantization(self) -> Quantization | None:
        """Returns how attention quantizes q, k and v; None means no quantization."""
        return None if self.fp8 is None else self.fp8.attention

    @property
    def has_fp8_linears(self) -> bool:
        """Returns whether the linears are matrix products in e4m3."""
        return self.fp8 is not None and self.fp8.linears

    @property
    def alpha(self) -> float:
        """The factor on the scores: `attn_alpha` or its default."""
        return 1 / math.sqrt(self.attention_dim) if self.attn_alpha is None else self.attn_alpha

    @property
    def split_sizes(self) -> tuple[int, int, int, int]:
        """The numbers of columns of u, v, q and k, in this order, in the first linear's output.

        Within each, the columns of a head are contiguous, and the heads follow one another.
        """
        hidden, attention = self.num_heads * self.hidden_dim, self.num_heads * self.attention_dim
        return hidden, hidden, attention, attention

    @property
    def output_parts(self) -> tuple[str, ...]:
        """The parts that the output linear reads, side by side.

        They are "u", "x" (the attention output), "normed" (the attention output after the norm) and
        "gated" (the product of "normed" and u).
        """
        if self.concat_ua:
            return ("u", "normed", "gated")
        return ("u",) * self.concat_u + ("x",) * self.concat_x + ("gated",)

    @property
    def output_features(self) -> int:
        """The number of columns that the output linear reads."""
        return len(self.output_parts) * self.num_heads * self.hidden_dim

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
        """Returns the configuration of the paper's public experiments.

        It has SiLU on u, v, q and k, unscaled scores, a relative bias by position and time, norms
        without weights, and no bias in the first linear, whose initial weights are N(0, 0.02).
        """
        return cls(
            embedding_dim=embedding_dim,
            num_heads=num_heads,
            hidden_dim=linear_dim,
            attention_dim=attention_dim,
            linear_bias=False,
            linear_activation=linear_activation,
            linear_init_std=0.02,
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
        linear_bias: bool = True,
        input_norm: Norm = "layer_norm",
        output_norm: Norm = "layer_norm",
    ) -> HSTULayerConfig:
        """Returns the configuration of the public `STULayer`.

        It has SiLU on u alone and scores over sqrt(attention_dim); the output linear has no bias
        and also reads u and the raw attention output.

        `linear_bias=False` corresponds to `uvqk_bias=None` in the functions that `STULayer` calls.
        `"rms_norm"` is the `RMSNorm` of that library, whose default `eps` is 1e-5; both norms here
        use the layer's 1e-6, unless `dataclasses.replace` sets another `norm_eps`.
        """
        return cls(
            embedding_dim=embedding_dim,
            num_heads=num_heads,
            hidden_dim=hidden_dim,
            attention_dim=attention_dim,
            linear_bias=linear_bias,
            linear_activation="silu_u",
            attn_alpha=attn_alpha,
            causal=causal,
            target_aware=target_aware,
            max_attn_len=max_attn_len or 0,
            contextual_seq_len=contextual_seq_len,
            input_norm=input_norm,
            output_norm=output_norm,
            use_group_norm=use_group_norm,
            concat_u=True,
            concat_x=True,
            output_dropout_ratio=output_dropout_ratio,
            output_bias=False,
        )
