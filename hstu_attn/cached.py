"""The rows of a forward with a KV cache, and their places in the batch and in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch.nn.functional as F
from torch import Tensor

from .layer_config import HSTULayerConfig
from .paged import PagedKV

__all__ = ["CachedPages", "CachedRows", "StepTensors", "check_cacheable"]


def check_cacheable(config: HSTULayerConfig, with_targets: bool) -> None:
    """Raises ValueError unless the keys and values of layers with this configuration can be cached.

    They can be cached if a row's output depends neither on later rows nor on anything else in the
    call.

    Args:
        config: the configuration of the layers.
        with_targets: whether calls have targets.

    Raises:
        ValueError: naming the field that lets a row's output depend on later rows or on lengths in
            the call, or that the pages of a cache cannot hold.
    """
    windowed = config.max_attn_len > 0
    quantization = config.quantization
    for name, holds, expected in (
        ("causal", config.causal, "True: else a row sees later ones"),
        (
            "contextual_seq_len",
            config.contextual_seq_len == 0,
            "0: contextual rows see the whole history",
        ),
        (
            "min_full_attn_seq_len",
            not windowed or config.min_full_attn_seq_len == 0,
            "0: a row that is among the last ones now will not be later",
        ),
        (
            "scaling_seqlen",
            config.scaling_seqlen > 0,
            "positive: else the scale depends on the lengths in a call",
        ),
        (
            "hidden_dim",
            config.hidden_dim == config.attention_dim,
            f"attention_dim = {config.attention_dim}: keys and values share pages",
        ),
        (
            "target_aware",
            config.target_aware or not with_targets,
            "True: targets are not cached, so none may see another",
        ),
        (
            "fp8",
            quantization is None or (quantization.mode, quantization.smooth_k) == (1, False),
            "None, or attention=None or Quantization(mode=1): pages have a scale for each row",
        ),
    ):
        if not holds:
            raise ValueError(
                f"{name}: expected, for a cache, {expected}; got {getattr(config, name)!r}"
            )


class CachedPages(Protocol):
    """The cached tokens of a batch's users.

    It is an open step of a `hstu_attn.serving.PagedKVCache`, or `StepTensors`.
    """

    @property
    def cached_lens(self) -> Tensor:
        """int32 or int64 `(B,)` cached tokens of each user that the step does not rewrite."""

    def paged_kv(self, layer: int) -> PagedKV:
        """Returns the pages of a layer, including pages for the rows to write."""


class StepTensors(NamedTuple):
    """`CachedPages` as plain tensors on one device, for `torch.export` or for a cache of your own.

    Attributes:
        kv_caches: the caches of each layer `(num_pages, 2, page_size, heads, head_dim)`, as in
            `PagedKV`; or all in one tensor, as in `PagedKVCache`.
        page_offsets: int32 or int64 `(B + 1,)`, as in `PagedKV`, including pages for the rows to
            write.
        page_ids: int32 or int64 `(page_offsets[-1],)`.
        last_page_lens: int32 or int64 `(B,)`, counting the rows to write.
        cached_lens: int32 or int64 `(B,)` cached tokens of each user that are not rewritten.
        kv_scales: the scales of each layer, or of all layers in one tensor, as in `PagedKV`, if the
            caches are of float8_e4m3fn; else None.
    """

    kv_caches: Sequence[Tensor] | Tensor
    page_offsets: Tensor
    page_ids: Tensor
    last_page_lens: Tensor
    cached_lens: Tensor
    kv_scales: Sequence[Tensor] | Tensor | None = None

    def paged_kv(self, layer: int) -> PagedKV:
        """Returns the pages of a layer, counted from 0."""
        scales = None if self.kv_scales is None else self.kv_scales[layer]
        return PagedKV(
            self.kv_caches[layer], self.page_offsets, self.page_ids, self.last_page_lens, scales
        )


class CachedRows:
    """The rows that `HSTUStack.forward_cached` takes, with an open step of a cache.

    Sequence `b` of the batch owns rows `seq_offsets[b]` to `seq_offsets[b + 1]`: the tokens of its
    user that the step writes, then targets, which are not cached. Nothing is copied to the host.

    Args:
        step: the open step, of the same users in the same order; or its tensors.
        seq_offsets: int32 or int64 `(batch + 1,)`, on the device of the cache.
        max_seq_len: at least the number of rows of any sequence.
        max_key_len: at least the number of rows and cached tokens together of any sequence.
        num_targets: int32 or int64 `(batch,)`, the targets of each sequence; None means 0.

    Attributes:
        key_offsets: int64 `(batch + 1,)`, offsets of cached tokens and rows together.

    Raises:
        ValueError: for offsets or counts of another batch size than that of the step.

    Example:
        >>> with cache.step(users, new_tokens) as step:
        ...     rows = CachedRows(step, seq_offsets, max_seq_len=64, max_key_len=512)
        ...     y = stack.forward_cached(x, rows)
    """

    def __init__(
        self,
        step: CachedPages,
        seq_offsets: Tensor,
        max_seq_len: int,
        max_key_len: int,
        num_targets: Tensor | None = None,
    ) -> None:
        batch = step.cached_lens.shape[0]
        if seq_offsets.shape != (batch + 1,):
            raise ValueError(
                f"seq_offsets: expected shape ({batch + 1},), one more than the step has users, "
                f"got {tuple(seq_offsets.shape)}"
            )
        if num_targets is not None and num_targets.shape != (batch,):
            raise ValueError(
                f"num_targets: expected shape ({batch},), one for each user of the step, got "
                f"{tuple(num_targets.shape)}"
            )
        self.step = step
        self.seq_offsets = seq_offsets
        self.max_seq_len = max_seq_len
        self.max_key_len = max_key_len
        self.num_targets = num_targets
        self.key_offsets = seq_offsets + F.pad(step.cached_lens.cumsum(0), (1, 0))

    def check(self, config: HSTULayerConfig) -> None:
        """Raises ValueError if layers with this configuration cannot be cached."""
        check_cacheable(config, with_targets=self.num_targets is not None)
