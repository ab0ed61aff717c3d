"""Divides the sequences of a batch among ranks by their cost instead of their number.

The rank with the most work determines the time of a step. The cost of attention grows with the
square of a sequence's length, so ranks with equally many sequences, or rows, can differ widely:

    cost = AttentionCost.of_layer(config)               # a + b L for each of L rows, in FLOPs
    parts = balance(cost(lengths), num_ranks=8)         # parts[rank]: which sequences
    sampler = BalancedBatchSampler(lengths, cost, 1024, num_ranks=8, rank=rank, seed=0)

Costs are integers and the seed breaks ties, so all ranks compute the same division independently.

With 1,024 sequences of log-normal lengths (median 200, sigma 1, at most 8,192), 8 ranks and a layer
of width 512 with 4 heads of 128, the most loaded rank has 1.31 times the mean load where sequences
are dealt round in turn, and less than 1.0001 times where they are balanced (means of 20 batches,
computed by `tests/data/test_balance.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from ..layer_config import HSTULayerConfig
from .batches import SamplerState

__all__ = ["AttentionCost", "BalancedBatchSampler", "balance", "imbalance"]

EXCHANGES_PER_RANK = 4


@dataclass(frozen=True)
class AttentionCost:
    """The FLOPs of a sequence in an HSTU layer.

    They are `per_row * L + per_pair * pairs(L)` for a sequence of `L` rows. A pair is a row and a
    key that the row sees: there are `L (L + 1) / 2` pairs in causal attention, `L^2` otherwise, and
    about `L * max_attn_len` where that is less.

    Args:
        per_row: FLOPs of the linear layers for a row.
        per_pair: FLOPs of attention, all heads, for a pair.
        causal: whether each row sees only itself and earlier rows.
        max_attn_len: how far back a row sees; 0 is no limit. Only where attention is causal.
    """

    per_row: int
    per_pair: int
    causal: bool = True
    max_attn_len: int = 0

    @staticmethod
    def of_layer(config: HSTULayerConfig, training: bool = True) -> AttentionCost:
        """Returns the cost of a layer. The cost of a stack is a multiple, with the same balance.

        Args:
            config: the configuration of the layer.
            training: whether to count the backward pass too: twice the forward of a linear layer,
                and five matrix products for the two of attention's forward.
        """
        # Two FLOPs for each multiplication with its addition.
        linear = 2 * config.embedding_dim * (sum(config.split_sizes) + config.output_features)
        attention = 2 * config.num_heads * (config.attention_dim + config.hidden_dim)
        return AttentionCost(
            per_row=3 * linear if training else linear,
            per_pair=7 * attention // 2 if training else attention,
            causal=config.causal,
            max_attn_len=config.max_attn_len if config.causal else 0,
        )

    def pairs(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the number of pairs of a row and a key it sees, for these sequence lengths."""
        rows = np.asarray(lengths, np.int64)
        if not self.causal:
            return rows * rows
        unseen = np.maximum(rows - 1 - self.max_attn_len, 0) if self.max_attn_len else 0 * rows
        return (rows * (rows + 1) - unseen * (unseen + 1)) // 2

    def __call__(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the cost of sequences of these lengths, `(n,)` int64."""
        return self.per_row * np.asarray(lengths, np.int64) + self.per_pair * self.pairs(lengths)


def balance(
    costs: NDArray[np.int64], num_ranks: int, *, equal_counts: bool = False, seed: int = 0
) -> list[NDArray[np.int64]]:
    """Divides sequences among ranks so that the largest sum of costs is small.

    Sequences are assigned in order of decreasing cost, each to the rank with the least cost so far;
    without `equal_counts` this greedy division has at most 4/3 of the optimal largest sum. Then the
    most loaded rank gives a sequence to the least loaded one, or exchanges one with it, as long as
    that helps and at most `4 * num_ranks` times. Each time the sequences of both ranks are sorted.
    The time is O(n log n) if each rank has about `n / num_ranks` sequences.

    Args:
        costs: `(n,)` integers, not negative.
        num_ranks: the number of parts.
        equal_counts: whether the ranks' numbers of sequences may differ by one at most.
        seed: breaks ties. The same arguments give the same division everywhere.

    Returns:
        `num_ranks` increasing arrays of indices into `costs`.

    Raises:
        ValueError: costs that are not integers or are negative, or no ranks.
    """
    costs = np.asarray(costs)
    if costs.ndim != 1 or not np.issubdtype(costs.dtype, np.integer):
        raise ValueError(
            f"costs: expected one dimension of integers, got {costs.ndim} dimensions of "
            f"{costs.dtype}"
        )
    if num_ranks <= 0:
        raise ValueError(f"num_ranks: expected a positive number, got {num_ranks}")
    if (costs < 0).any():
        row = int(np.argmax(costs < 0))
        raise ValueError(f"costs: expected none negative, got {costs[row]} in row {row}")
    shuffled = np.random.default_rng(seed).permutation(len(costs))
    order = shuffled[np.argsort(-costs[shuffled].astype(np.int64), kind="stable")]
    parts, loads = _longest_first(order.tolist(), costs.tolist(), num_ranks, equal_counts)
    _exchange(parts, loads, costs, may_move=not equal_counts)
    return [np.array(sorted(part), np.int64) for part in parts]


def imbalance(costs: NDArray[np.int64], parts: list[NDArray[np.int64]]) -> float:
    """Returns the largest load over the mean load: the slowdown of a step by the imbalance."""
    loads = [int(costs[part].sum()) for part in parts]
    return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0


def _longest_first(
    order: list[int], costs: list[int], num_ranks: int, equal_counts: bool
) -> tuple[list[list[int]], list[int]]:
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    least, larger = divmod(len(order), num_ranks)  # `larger` ranks may have one more
    heap = [(0, rank) for rank in range(num_ranks)]
    for index in order:
        load, rank = heapq.heappop(heap)
        while equal_counts and len(parts[rank]) >= least + (larger > 0):
            load, rank = heapq.heappop(heap)  # the rank before is full, and leaves the heap
        parts[rank].append(index)
        loads[rank] = load + costs[index]
        if equal_counts and len(parts[rank]) > least:
            larger -= 1
        else:
            heapq.heappush(heap, (loads[rank], rank))
    return parts, loads


def _exchange(
    parts: list[list[int]], loads: list[int], costs: NDArray[np.int64], may_move: bool
) -> None:
    """Evens out the most and the least loaded rank, again and again."""
    for _ in range(EXCHANGES_PER_RANK * len(parts)):
        high = max(range(len(parts)), key=loads.__getitem__)
        low = min(range(len(parts)), key=loads.__getitem__)
        gap = loads[high] - loads[low]
        if gap < 2 or not parts[high]:
            return
        given = np.array(parts[high])
        # A sequence of the other rank comes back or, where counts may differ, nothing.
        back = np.array([*parts[low], *([-1] if may_move else [])], np.int64)
        if not len(back):
            return
        back_costs = np.where(back >= 0, costs[back], 0)
        order = np.argsort(back_costs, kind="stable")
        back, back_costs = back[order], back_costs[order]
        # The best difference of the two is half the gap: look at the neighbors of that.
        place = np.searchsorted(back_costs, costs[given] - gap // 2)
        places = np.stack([(place - 1).clip(0), place.clip(max=len(back) - 1)])
        moved = costs[given] - back_costs[places]
        larger = np.where((moved > 0) & (moved < gap), np.maximum(gap - moved, moved), gap)
        side, row = divmod(int(np.argmin(larger)), len(given))
        if larger[side, row] >= gap:
            return
        there, here = int(given[row]), int(back[places[side, row]])
        parts[high].remove(there)
        parts[low].append(there)
        if here >= 0:
            parts[low].remove(here)
            parts[high].append(here)
        loads[high] -= int(moved[side, row])
        loads[low] += int(moved[side, row])


class BalancedBatchSampler(Sampler[list[int]]):
    """The sequences of one rank, batch by batch, for `DataLoader(batch_sampler=...)`.

    Each epoch shuffles all sequences, cuts them into global batches and divides each batch among
    the ranks by cost. Ranks do not communicate: their samplers differ only in `rank`. All ranks
    have equally many batches, and no batch is empty. The global batches are the same for every
    number of ranks: if fewer than half a batch of sequences is left over, they join the last batch.

    An iteration yields the remaining batches of an epoch. Since a loader may prefetch batches, the
    training loop calls `advance` after each step, and the position is saved with the model:

        while training:
            for batch in loader:                        # of this sampler
                ...
                sampler.advance()

    NOTE: ranks have different numbers of sequences and rows. Before gradients are averaged, a loss
    that is a mean over rows must be weighted by the rank's fraction of the global batch's rows, as
    `hstu_attn.distributed.global_mean` does.

    Args:
        lengths: `(n,)`, rows of each sequence, positive.
        cost: the cost of sequences by their lengths.
        global_batch_size: sequences of a batch over all ranks.
        num_ranks: the number of ranks.
        rank: this rank.
        seed: the seed of the order, which depends only on the seed and the epoch.
        equal_counts: whether the ranks' numbers of sequences in a batch may differ by one at most.
        drop_last: whether to leave out the last global batch of an epoch if it is smaller.
        shuffle: whether to shuffle; if False, global batches are consecutive sequences.

    Raises:
        ValueError: arguments out of range, or too few sequences for every rank to have one in each
            batch.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        cost: AttentionCost,
        global_batch_size: int,
        *,
        num_ranks: int,
        rank: int,
        seed: int = 0,
        equal_counts: bool = False,
        drop_last: bool = False,
        shuffle: bool = True,
    ) -> None:
        lengths = np.asarray(lengths)
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank: expected 0 to num_ranks - 1 = {num_ranks - 1}, got {rank}")
        if global_batch_size < num_ranks:
            raise ValueError(
                f"global_batch_size: expected at least num_ranks = {num_ranks}, "
                f"got {global_batch_size}"
            )
        fewest = global_batch_size if drop_last else num_ranks
        if len(lengths) < fewest:
            raise ValueError(
                f"lengths: expected at least {fewest} sequences for one batch, got {len(lengths)}"
            )
        if (lengths <= 0).any():
            row = int(np.argmax(lengths <= 0))
            raise ValueError(f"lengths: expected positive lengths, got {lengths[row]} in row {row}")
        self.costs = cost(lengths)
        self.global_batch_size = global_batch_size
        self.num_ranks = num_ranks
        self.rank = rank
        self.seed = seed
        self.equal_counts = equal_counts
        self.drop_last = drop_last
        self.shuffle = shuffle
        self.epoch = 0
        self.batch = 0
        last = len(lengths) - (len(self) - 1) * global_batch_size
        if not drop_last and last < num_ranks:
            raise ValueError(
                f"global_batch_size = {global_batch_size} leaves {last} of {len(lengths)} "
                f"sequences for the last batch of an epoch, fewer than num_ranks = {num_ranks}"
            )

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration go through this epoch from its start."""
        self.epoch, self.batch = epoch, 0

    def advance(self) -> None:
        """Counts one more batch; after the last one of an epoch the next epoch begins."""
        self.batch += 1
        if self.batch == len(self):
            self.set_epoch(self.epoch + 1)

    def state_dict(self) -> SamplerState:
        """Returns the position: the epoch, and the number of its batches that are done.

        The position is the same on all ranks, and can be loaded with any number of ranks.
        """
        return {"epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: SamplerState) -> None:
        """Makes the next iteration continue from a position.

        The position comes from a sampler with the same sequences, batch size, seed and options.

        Raises:
            ValueError: an epoch has fewer batches.
        """
        if not 0 <= state["batch"] < len(self):
            raise ValueError(
                f"batch: expected 0 to {len(self) - 1}, the last of an epoch, got {state['batch']}"
            )
        self.epoch, self.batch = state["epoch"], state["batch"]

    def __len__(self) -> int:
        """Returns the number of batches of a whole epoch."""
        number, rest = divmod(len(self.costs), self.global_batch_size)
        return number + (not self.drop_last and (2 * rest >= self.global_batch_size or not number))

    def __iter__(self) -> Iterator[list[int]]:
        order = np.arange(len(self.costs))
        if self.shuffle:
            order = np.random.default_rng((self.seed, self.epoch)).permutation(order)
        for number in range(self.batch, len(self)):
            start, end = (self.global_batch_size * place for place in (number, number + 1))
            if number == len(self) - 1 and not self.drop_last:
                end = len(order)
            batch = order[start:end]
            parts = balance(
                self.costs[batch],
                self.num_ranks,
                equal_counts=self.equal_counts,
                seed=self.seed,
            )
            yield batch[parts[self.rank]].tolist()
