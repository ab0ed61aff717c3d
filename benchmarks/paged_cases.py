"""Batches of equal requests on a paged KV cache: what benchmarks.paged measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hstu_attn import Mask, PagedKV
from hstu_attn.testing import Batch

__all__ = ["Request", "make_inputs", "requests"]


@dataclass(frozen=True)
class Request:
    """A batch of equal requests: a history, most of it cached, new events at its end, candidates.

    Attributes:
        head_dim: width of a head.
        history: events of each request, cached and new ones.
        new: events of each request that are not cached.
        candidates: the number of candidates of each request.
        batch: number of requests.
        page_size: tokens of a page.
        heads: attention heads.
    """

    head_dim: int
    history: int
    new: int
    candidates: int
    batch: int
    page_size: int = 128
    heads: int = 4

    @property
    def name(self) -> str:
        """A name such as "8 x 4096, 128 new, 256 candidates, pages of 128"."""
        return (
            f"{self.batch} x {self.history}, {self.new} new, {self.candidates} candidates, pages "
            f"of {self.page_size}"
        )

    @property
    def cached(self) -> int:
        """Number of cached events of each request."""
        return self.history - self.new

    @property
    def rows(self) -> int:
        """Number of query rows of all requests."""
        return self.batch * (self.new + self.candidates)

    @property
    def flops(self) -> float:
        """Returns the FLOPs: 4 for each head, row, visible key and column."""
        new = self.new * self.cached + self.new * (self.new + 1) / 2
        candidates = self.candidates * (self.history + 1)
        return 4.0 * self.batch * self.heads * self.head_dim * (new + candidates)

    @property
    def bytes(self) -> int:
        """Returns the bytes of the history's pages, q, the output, and the candidates' k and v."""
        row = self.heads * self.head_dim * 2
        history = 2 * self.batch * self.history
        return row * (history + 2 * self.rows + 2 * self.batch * self.candidates)

    def needs_us(self, matmul_tflops: float, copy_tbps: float) -> float:
        """Returns a lower bound of the time, from bytes and FLOPs, in microseconds."""
        return max(self.flops / matmul_tflops, self.bytes / copy_tbps) / 1e6


def requests(head_dims: Sequence[int]) -> list[Request]:
    """Returns the cases: each varies one parameter of a history of 4096 with 256 candidates."""
    found: list[Request] = []
    for dim in head_dims:
        usual = Request(dim, history=4096, new=128, candidates=256, batch=8)
        found += [
            *(replace(usual, batch=batch) for batch in (1, 8, 64)),
            *(
                replace(usual, history=history, new=min(128, history // 4))
                for history in (256, 1024, 16384)
            ),
            *(replace(usual, new=new) for new in (0, 256, 2048, 4096)),
            *(replace(usual, candidates=candidates) for candidates in (32, 1024)),
            *(replace(usual, page_size=page_size) for page_size in (16, 32, 64)),
        ]
    return list(dict.fromkeys(found))


def make_inputs(request: Request, device: str = "cuda") -> Batch:
    """Makes the bf16 inputs of a request; its pages are in random order, each used once."""
    r = request
    pages_each = -(-r.history // r.page_size)
    shape = (r.batch * pages_each, 2, r.page_size, r.heads, r.head_dim)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    cache = torch.empty(shape, **options).uniform_(-1, 1)
    q, k, v = (
        torch.empty(r.rows, r.heads, r.head_dim, **options).uniform_(-1, 1) for _ in range(3)
    )

    def offsets(length: int) -> torch.Tensor:
        return torch.arange(r.batch + 1, dtype=torch.int32, device=device) * length

    ids = torch.randperm(r.batch * pages_each, device=device).int()
    last = torch.full((r.batch,), (r.history - 1) % r.page_size + 1, device=device).int()
    targets = torch.full((r.batch,), r.candidates, dtype=torch.int32, device=device)
    return Batch(
        q=q,
        k=k,
        v=v,
        cu_seqlens_q=offsets(r.new + r.candidates),
        max_seqlen_q=r.new + r.candidates,
        cu_seqlens_k=offsets(r.history + r.candidates),
        max_seqlen_k=r.history + r.candidates,
        mask=Mask.causal(num_targets=targets),
        alpha=r.head_dim**-0.5,
        scaling_seqlen=r.history,
        paged_kv=PagedKV(cache, offsets(pages_each), ids, last),
    )
