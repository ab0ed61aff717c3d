"""A step over cached rows as a function of tensors, for deployment without Python."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ..bias import thresholds_tensor
from ..cached import CachedRows, StepTensors
from ..paged import check_page_size
from .model import Rows, ServedModel, check_model, row_dtype

__all__ = ["ScoringStep"]

# The arguments of `ScoringStep.forward` after the caches: dtype and size.
_VECTORS = {
    "page_offsets": (torch.int32, "batch + 1"),
    "page_ids": (torch.int32, "listed pages"),
    "last_page_lens": (torch.int32, "batch"),
    "cached_lens": (torch.int32, "batch"),
    "seq_offsets": (torch.int64, "batch + 1"),
    "items": (torch.int64, "rows"),
    "actions": (torch.int64, "rows"),
    "positions": (torch.int64, "rows"),
    "is_candidate": (torch.bool, "rows"),
    "candidates": (torch.int64, "candidates"),
    "state_rows": (torch.int64, "candidates"),
    "num_targets": (torch.int64, "batch"),
    "key_times": (torch.int64, "keys"),
    "row_times": (torch.int64, "rows"),
}


class ScoringStep(nn.Module):
    """The step that `Engine` computes: it writes new events to the cache and scores candidates.

    Args:
        model: as in `Engine`.
        max_seq_len: the most rows of a user in a step. A longer history takes several steps, the
            first ones without candidates.
        max_key_len: the most events and candidates of a user together.

    Raises:
        ValueError: for a length out of range, or a model that cannot be served from a cache.

    Example:
        >>> step = ScoringStep(model, max_seq_len=64, max_key_len=512)
        >>> program = step.export(page_size=64)
        >>> torch._inductor.aoti_compile_and_package(program, package_path="step.pt2")
    """

    def __init__(self, model: ServedModel, max_seq_len: int, max_key_len: int) -> None:
        super().__init__()
        if max_seq_len < 1:
            raise ValueError(f"max_seq_len: expected a positive count, got {max_seq_len}")
        if max_key_len < max_seq_len:
            raise ValueError(
                f"max_key_len: expected at least max_seq_len = {max_seq_len}, got {max_key_len}"
            )
        check_model(model)
        self.model = model
        self.max_seq_len = max_seq_len
        self.max_key_len = max_key_len

    @torch.no_grad()
    def forward(
        self,
        kv_caches: tuple[Tensor, ...],
        page_offsets: Tensor,
        page_ids: Tensor,
        last_page_lens: Tensor,
        cached_lens: Tensor,
        seq_offsets: Tensor,
        items: Tensor,
        actions: Tensor,
        positions: Tensor,
        is_candidate: Tensor,
        candidates: Tensor,
        state_rows: Tensor,
        num_targets: Tensor | None = None,
        key_times: Tensor | None = None,
        row_times: Tensor | None = None,
        kv_scales: tuple[Tensor, ...] | None = None,
    ) -> Tensor:
        """Writes the new events of `B` users into their pages, and scores `n` candidates.

        The rows of a user are the events from `cached_lens` on, which are written, followed by the
        candidates where candidates are rows. There are `total` rows in all.

        Args:
            kv_caches: the caches of each layer `(num_pages, 2, page_size, heads, head_dim)`,
                contiguous, in the dtype in which the model embeds or float8_e4m3fn; written in
                place.
            page_offsets: int32 `(B + 1,)`, as in `PagedKV`, including pages for the new events.
            page_ids: int32 `(page_offsets[-1],)`.
            last_page_lens: int32 `(B,)`, counting the new events.
            cached_lens: int32 `(B,)` cached events of each user that the step does not rewrite.
            seq_offsets: int64 `(B + 1,)` offsets of the users' rows.
            items, actions, positions: int64 `(total,)`, as in `Rows`.
            is_candidate: bool `(total,)`, as in `Rows`.
            candidates: int64 `(n,)` items to score.
            state_rows: int64 `(n,)` the row whose state scores each candidate: the candidate's
                own row, or the row of its user's last event.
            num_targets: int64 `(B,)` candidates of each user, where candidates are rows.
            key_times: int64 `(total_k,)` times of each user's cached and given rows, where the
                model reads times.
            row_times: int64 `(total,)` the time at which each row predicts: that of its user's
                next event or, for the last event and candidates, the time of the query.
            kv_scales: float32 of each layer `(num_pages, 2, page_size, heads)`, contiguous, where
                the caches are of float8_e4m3fn; written in place.

        Returns:
            Scores `(n,)`, floating.

        Raises:
            ValueError: for an optional argument that is missing or that the model does not use;
                for a cache that does not fit the model; and as `HSTUStack.forward_cached`.
        """
        for name, value, wanted in (
            ("num_targets", num_targets, self.model.candidates_are_rows),
            ("key_times", key_times, self.model.reads_times),
            ("row_times", row_times, self.model.reads_times),
        ):
            if (value is not None) != wanted:
                expected, got = ("a tensor", "None") if wanted else ("None", "a tensor")
                raise ValueError(f"{name}: expected {expected} for this model, got {got}")
        layers = len(self.model.stack.layers)
        if len(kv_caches) != layers:
            raise ValueError(f"kv_caches: expected {layers} tensors, got {len(kv_caches)}")
        if kv_scales is not None and len(kv_scales) != layers:
            raise ValueError(f"kv_scales: expected {layers} tensors, got {len(kv_scales)}")
        tables = (page_offsets, page_ids, last_page_lens, cached_lens)
        pages = StepTensors(kv_caches, *tables, kv_scales)
        rows = CachedRows(pages, seq_offsets, self.max_seq_len, self.max_key_len, num_targets)
        x = self.model.embed(Rows(items, actions, positions, is_candidate))
        states = self.model.stack.forward_cached(x, rows, key_times, row_times)
        return self.model.score(states[state_rows], candidates)

    @torch.no_grad()
    def export(self, page_size: int, cache_dtype: torch.dtype | None = None) -> ExportedProgram:
        """Exports the step for the model's device and any number of users, rows, candidates, pages.

        The graph takes the arguments of `forward` that this model needs, by name or in the order of
        `forward`. It writes the caches in place.

        A package made with `torch._inductor.aoti_compile_and_package` does not check the shapes and
        dtypes of its inputs. With `AOTI_RUNTIME_CHECK_INPUTS=1` in the environment it does, and
        then also refuses sizes below 2.

        Args:
            page_size: tokens of a page: 16, 32, 64, 128 or 256.
            cache_dtype: float8_e4m3fn, or None for the dtype in which the model embeds.

        Raises:
            ValueError: for another page size.
        """
        check_page_size(page_size)  # otherwise the first call of the exported graph would raise
        stack, config = self.model.stack, self.model.stack.config
        device = next(stack.parameters()).device
        if self.model.reads_times:
            # Tensors made here are on the graph's device.
            thresholds_tensor(device, config.time_thresholds)
        wanted = dict(_VECTORS)
        if not self.model.candidates_are_rows:
            del wanted["num_targets"]
        if not self.model.reads_times:
            del wanted["key_times"], wanted["row_times"]

        pages, batch = Dim("pages"), Dim("batch")
        # Each size and its example. The examples differ, so that torch.export keeps the sizes
        # apart.
        sizes = {
            "batch": (batch, 3),
            "batch + 1": (batch + 1, 4),
            "listed pages": (Dim("listed_pages"), 7),
            "rows": (Dim("rows"), 11),
            "keys": (Dim("keys"), 13),
            "candidates": (Dim("candidates"), 5),
        }
        cache = torch.zeros(
            (9, 2, page_size, config.num_heads, config.attention_dim),
            dtype=cache_dtype or row_dtype(self.model),
            device=device,
        )
        # NOTE: a tensor for each layer. If they were views of one, AOTInductor (torch 2.13) would
        # lose the offsets of those that an operator writes, and write all layers into the first.
        inputs: dict[str, Any] = {"kv_caches": tuple(cache.clone() for _ in stack.layers)}
        shapes: dict[str, Any] = {"kv_caches": tuple({0: pages} for _ in stack.layers)}
        for name, (dtype, size) in wanted.items():
            dim, example = sizes[size]
            inputs[name] = torch.zeros(example, dtype=dtype, device=device)
            shapes[name] = {0: dim}
        if cache.dtype == torch.float8_e4m3fn:
            scales = torch.zeros(cache.shape[:-1], device=device)
            inputs["kv_scales"] = tuple(scales.clone() for _ in stack.layers)
            shapes["kv_scales"] = tuple({0: pages} for _ in stack.layers)
        return torch.export.export(self, (), inputs, dynamic_shapes=shapes)
