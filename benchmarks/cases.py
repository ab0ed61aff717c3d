"""The batches that benchmarks measure, and the cases of benchmarks.attention in groups.

- table: causal batches, and jagged ones with contextual tokens and targets
- rab: a dense bias, with and without its gradient
- relative: a relative bias with the gradients of its tables, to compare with the same batch of
  `table` and with the dense bias of `rab`
- fp8: the forward with quantized q, k and v, compared with bf16
- fp8_backward: the backward with products in e4m3, compared with bf16
- deterministic: the bitwise deterministic backward
- masks: masks other than plain causal, compared by the number of tiles that a kernel computes
- latency: one short sequence
- host: the host's time of a call, on a sequence too short to keep a GPU busy
- scan: random causal shapes against softmax attention, and many tiny sequences; measured only if
  requested by name
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hstu_attn import DenseBias, Mask, RelativeBias
from hstu_attn.mask import batch_row_spans, dense_mask
from hstu_attn.mask_tiles import TileKind, tile_kinds
from hstu_attn.testing import Batch, make_batch

__all__ = [
    "GROUPS",
    "HEAD_DIMS",
    "SCAN_HEAD_DIMS",
    "Case",
    "Inputs",
    "attention_cases",
    "scan_cases",
]

HEADS, BIAS_HEADS = 4, 4
HEAD_DIMS = (64, 128, 256)
TABLE_LENGTHS = ((32, 1024), (16, 2048), (8, 4096), (4, 8192), (2, 16384))
MASKS = ("causal", "context", "targets", "local", "semi-local", "row spans", "func")
LATENCY_LENGTHS = (64, 128, 256, 512)
BUCKETS = 128
# Kinds of gaps between a user's events, as (fraction, mean [s]): bursts, hours and days.
GAPS = ((0.6, 60.0), (0.25, 3600.0), (0.15, 3 * 86400.0))
SCAN_HEAD_DIMS, SCAN_SHAPES = (32, 40, 64, 96, 128, 192, 256), 30  # of each head dim
SCAN_BATCHES, SCAN_LENGTHS, SCAN_HEADS = (1, 1024), (50, 32768), (1, 2, 4, 8)
SCAN_TOKENS = 2**17  # of a batch, at most
CONTEXTS, TARGETS = 8, 64
WINDOW, PREFIX = 1 / 4, 1 / 16  # of masks, as fractions of the longest sequence
SMALL = (1, 67, 300)  # lengths of the batch that is checked


@dataclass(frozen=True)
class Case:
    """A jagged batch, its mask, its bias, and the passes of it that are measured.

    Attributes:
        batch: number of sequences.
        shortest: lengths are drawn uniformly from `shortest` to `longest` tokens, both included.
        longest: see `shortest`.
        heads: attention heads.
        head_dim: width of a head of q, k and v.
        dtype: the dtype of q, k, v, the output and the gradients.
        group: one of `GROUPS`, or the name of the benchmark.
        mask_name: one of `MASKS`, or "context + targets".
        bias_heads: heads of a dense bias; 0 for none.
        bias_gradient: whether the dense bias gets a gradient.
        tables: tables of a relative bias ("position", "time"), which get gradients.
        deterministic: whether the backward must be bitwise deterministic.
        passes: the passes to measure: "forward", "backward", "host" or "host with autograd".
    """

    batch: int
    shortest: int
    longest: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    group: str = "table"
    mask_name: str = "causal"
    bias_heads: int = 0
    bias_gradient: bool = False
    tables: tuple[str, ...] = ()
    deterministic: bool = False
    passes: tuple[str, ...] = ("forward", "backward")

    @property
    def name(self) -> str:
        """A name such as "4 x 8192", "16 x 2048, rab" or "32 x 1024..4096, context + targets"."""
        equal = self.shortest == self.longest
        lengths = f"{self.longest}" if equal else f"{self.shortest}..{self.longest}"
        words = [f"{self.batch} x {lengths}"]
        if self.mask_name != "causal":
            words.append(self.mask_name)
        if self.bias_heads:
            words.append("rab with dRab" if self.bias_gradient else "rab")
        if self.tables:
            words.append(f"relative bias by {' and '.join(self.tables)}")
        if self.deterministic:
            words.append("deterministic")
        if self.group == "scan":
            words.append("1 head" if self.heads == 1 else f"{self.heads} heads")
        return ", ".join(words)

    @property
    def dtype_name(self) -> str:
        """The dtype's name, such as "float32" or "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def alpha(self) -> float:
        """The factor of the scores."""
        return 1 / math.sqrt(self.head_dim)

    @property
    def lengths(self) -> list[int]:
        """Returns the lengths, which are the same on every run."""
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(self.shortest, self.longest + 1, (self.batch,), generator=generator)
        return [int(length) for length in lengths]

    @property
    def has_bias(self) -> bool:
        """Returns whether a bias is added to the scores."""
        return bool(self.bias_heads or self.tables)

    @property
    def is_dense_causal(self) -> bool:
        """Returns whether softmax attention on a dense batch has the same shape."""
        plain = self.mask_name == "causal" and not self.has_bias and not self.deterministic
        return plain and self.shortest == self.longest

    def mask(self, lengths: list[int], device: str = "cpu") -> Mask:
        """Returns the mask for a batch with these lengths."""
        generator = torch.Generator().manual_seed(1)
        most = torch.tensor([min(TARGETS, length // 2) for length in lengths])
        random = (torch.rand(len(lengths), generator=generator) * (most + 1)).long()
        contexts = torch.tensor([min(CONTEXTS, length // 2) for length in lengths])
        if self.mask_name in ("row spans", "func"):
            return self._given_mask(lengths, device)
        window, prefix = (int(part * max(lengths)) for part in (WINDOW, PREFIX))
        offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
        made = {
            "causal": lambda: Mask.causal(),
            "context": lambda: Mask.causal(num_contexts=contexts.to(device)),
            "targets": lambda: Mask.causal(num_targets=most.to(device)),
            "local": lambda: Mask.local(window),
            "semi-local": lambda: Mask.semi_local(
                window, prefix, offsets, sum(lengths), num_targets=most.to(device)
            ),
            "context + targets": lambda: Mask.causal(
                num_contexts=contexts.to(device), num_targets=random.to(device)
            ),
        }
        return made[self.mask_name]()

    def _given_mask(self, lengths: list[int], device: str) -> Mask:
        """Returns a mask of a prefix and a sliding window, as row spans or as `func`."""
        row = torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths])
        prefix = (row + 1).clamp(max=int(PREFIX * max(lengths)))
        window = int(WINDOW * max(lengths))
        spans = [0 * row, prefix, (row - window).maximum(prefix), row + 1]
        if self.mask_name == "row spans":
            return Mask.from_row_spans(torch.stack(spans, 1).to(device))
        return Mask.from_func(torch.stack(spans[1:])[None].to(device))

    def make(self, seed: int, device: str, lengths: list[int] | None = None) -> Batch:
        """Returns the batch with random contents, and with `lengths` if they are given."""
        lengths = self.lengths if lengths is None else lengths
        torch.manual_seed(seed)
        bias: DenseBias | RelativeBias | None = None
        if self.tables:
            bias = self._relative_bias(lengths, device)
        elif self.bias_heads:
            shape = (len(lengths), self.bias_heads, max(lengths), max(lengths))
            bias = DenseBias(torch.empty(shape, dtype=self.dtype, device=device).uniform_(-1, 1))
        return make_batch(
            lengths,
            heads=self.heads,
            dim=self.head_dim,
            dtype=self.dtype,
            device=device,
            mask=self.mask(lengths, device),
            bias=bias,
        )

    def _relative_bias(self, lengths: list[int], device: str) -> RelativeBias:
        """Returns random tables, and event times that are separated by random gaps."""

        def table(size: int) -> Tensor:
            return torch.empty(self.heads, size, device=device).uniform_(-1, 1)

        position = table(2 * max(lengths) - 1) if "position" in self.tables else None
        if "time" not in self.tables:
            return RelativeBias(position)
        fractions, means = torch.tensor(GAPS, device=device).T
        kinds = torch.multinomial(fractions, sum(lengths), replacement=True)
        gaps = torch.empty(sum(lengths), device=device).exponential_() * means[kinds]
        times = torch.cat([own.cumsum(0) for own in gaps.long().split(lengths)])
        return RelativeBias(position, table(BUCKETS), times)

    def make_small(self, device: str) -> Batch:
        """Returns a batch of the same kind that is small enough for the reference."""
        return self.make(0, device, list(SMALL))

    def visible_pairs(self) -> float:
        """Returns the number of visible pairs of a row and a key, for one head."""
        if self.mask_name == "causal":
            return sum(length**2 for length in self.lengths) / 2
        offsets = torch.tensor([0, *self.lengths]).cumsum(0)
        spans = batch_row_spans(self.mask(self.lengths), offsets, offsets).long()
        return float((spans[:, 1::2] - spans[:, ::2]).sum())

    def flops(self, backward: bool) -> float:
        """Returns the FLOPs: two matmuls forward, five backward, of visible pairs."""
        forward = 4 * self.visible_pairs() * self.heads * self.head_dim
        return 2.5 * forward if backward else forward

    def least_bytes(self, backward: bool) -> int:
        """Returns the bytes that are moved if every tensor is read or written once."""
        rows = (7 if backward else 4) * sum(self.lengths) * self.heads * self.head_dim
        biases = 2 if backward and self.bias_gradient else 1
        bias = biases * self.batch * self.bias_heads * max(self.lengths) ** 2
        times = sum(self.lengths) if "time" in self.tables else 0
        return (rows + bias) * self.dtype.itemsize + times * torch.int64.itemsize

    def executed_tiles(self, tile_q: int, tile_k: int) -> int:
        """Returns the number of tiles with a visible element, over all sequences and heads."""
        mask = self.mask(self.lengths)
        first_row, count = 0, 0
        counted: dict[tuple[int, ...], int] = {}
        for n, length in enumerate(self.lengths):
            contexts, targets = (
                0 if counts is None else int(counts[n])
                for counts in (mask.num_contexts, mask.num_targets)
            )
            key = (length, contexts, targets)  # with arbitrary masks all sequences are equal
            if key not in counted:
                visible = dense_mask(
                    mask, length, length,
                    num_contexts=contexts, num_targets=targets, first_row=first_row,
                )  # fmt: skip
                kinds = tile_kinds(visible, tile_q, tile_k)
                counted[key] = int((kinds != TileKind.EMPTY).sum())
            count += counted[key]
            first_row += length
        return count * self.heads


@dataclass(frozen=True)
class Inputs:
    """Packed q, k, v and the gradient of the output, each `(total, H, D)`, on a CPU."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def random(cls, case: Case, seed: int) -> Inputs:
        """Makes normally distributed inputs of a case."""
        generator = torch.Generator().manual_seed(seed)
        shape = (sum(case.lengths), case.heads, case.head_dim)
        tensors = [torch.randn(shape, generator=generator).to(case.dtype) for _ in range(4)]
        return cls(*tensors)

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v as new tensors that require a gradient and share the memory."""
        q, k, v = (x.detach().requires_grad_() for x in (self.q, self.k, self.v))
        return q, k, v


# ---------------------------------------------------------------------------------------------
# The cases of benchmarks.attention
# ---------------------------------------------------------------------------------------------


def _equal(batch: int, length: int, head_dim: int, group: str) -> Case:
    return Case(batch, length, length, HEADS, head_dim, torch.bfloat16, group)


def _table(head_dim: int) -> list[Case]:
    equal = [_equal(batch, length, head_dim, "table") for batch, length in TABLE_LENGTHS]
    jagged = Case(32, 1024, 4096, HEADS, head_dim, torch.bfloat16, mask_name="context + targets")
    return [*equal, jagged]


def _rab(head_dim: int) -> list[Case]:
    if head_dim > 128:
        return []
    plain = replace(_equal(16, 2048, head_dim, "rab"), bias_heads=BIAS_HEADS)
    return [plain, replace(plain, bias_gradient=True, passes=("backward",))]


def _relative(head_dim: int) -> list[Case]:
    short, long = (_equal(*shape, head_dim, "relative") for shape in ((16, 2048), (2, 16384)))
    both = ("position", "time")
    return [
        replace(short, tables=("position",)),
        replace(short, tables=both),
        replace(long, tables=both),
    ]


def _fp8(head_dim: int) -> list[Case]:
    shapes = ((16, 2048), (8, 4096), (2, 16384))
    return [replace(_equal(*shape, head_dim, "fp8"), passes=("forward",)) for shape in shapes]


def _fp8_backward(head_dim: int) -> list[Case]:
    shapes = ((16, 2048), (8, 4096), (2, 16384)) if head_dim > 64 else ()
    return [
        replace(_equal(*shape, head_dim, "fp8_backward"), passes=("backward",)) for shape in shapes
    ]


def _deterministic(head_dim: int) -> list[Case]:
    plain = replace(_equal(4, 8192, head_dim, "deterministic"), passes=("backward",))
    return [plain, replace(plain, deterministic=True)]


def _masks(head_dim: int) -> list[Case]:
    return [replace(_equal(8, 4096, head_dim, "masks"), mask_name=name) for name in MASKS]


def _latency(head_dim: int) -> list[Case]:
    return [_equal(1, length, head_dim, "latency") for length in LATENCY_LENGTHS]


def _host(head_dim: int) -> list[Case]:
    return [replace(_equal(1, 64, head_dim, "host"), passes=("host", "host with autograd"))]


def _spread(rng: random.Random, least: int, most: int) -> int:
    """Returns a number whose logarithm is uniform."""
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))


def scan_cases(head_dims: tuple[int, ...] = SCAN_HEAD_DIMS) -> list[Case]:
    """Returns the cases of the group "scan", which are the same on every run.

    Args:
        head_dims: a subset of `SCAN_HEAD_DIMS`; only its cases are returned.
    """
    rng, cases = random.Random(0), []
    for head_dim in SCAN_HEAD_DIMS:
        shapes: set[tuple[int, int, int]] = set()
        while len(shapes) < SCAN_SHAPES:
            batch, length = _spread(rng, *SCAN_BATCHES), _spread(rng, *SCAN_LENGTHS)
            heads = rng.choice(SCAN_HEADS)
            if batch * length <= SCAN_TOKENS:
                shapes.add((batch, length, heads))
        cases += [
            Case(batch, length, length, heads, head_dim, torch.bfloat16, "scan")
            for batch, length, heads in sorted(shapes)
        ]
    tiny = Case(4096, 1, 20, HEADS, 64, torch.bfloat16, "scan")
    return [case for case in (*cases, tiny) if case.head_dim in head_dims]


_MAKERS = {
    "table": _table,
    "rab": _rab,
    "relative": _relative,
    "fp8": _fp8,
    "fp8_backward": _fp8_backward,
    "deterministic": _deterministic,
    "masks": _masks,
    "latency": _latency,
    "host": _host,
}
GROUPS = (*_MAKERS, "scan")


def attention_cases(head_dims: tuple[int, ...] = HEAD_DIMS) -> list[Case]:
    """Returns the cases of benchmarks.attention except the scan, group by group."""
    return [w for make in _MAKERS.values() for head_dim in head_dims for w in make(head_dim)]
