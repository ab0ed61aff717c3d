"""Event logs for training recommenders: reading, preprocessing, splitting and batching.

    log = open_event_log("ml-1m/ratings.dat")           # parsed once, memory-mapped afterwards
    windows = training_windows(log, max_seq_len=200)    # leave-one-out: the last two are held out
    sampler = BatchSampler(windows.lengths, tokens_per_batch=8192, seed=0)
    batch = jagged_batch(log, windows.take(next(sampler)))

Besides MovieLens it reads Amazon reviews (`hstu_attn.data.amazon`), KuaiRand
(`hstu_attn.data.kuairand`), and Parquet or CSV files by the names of their columns
(`hstu_attn.data.parquet`).
`BalancedBatchSampler` divides batches among ranks by their cost.

It needs numpy and tqdm in addition to torch: `pip install hstu_attn[data]`.
"""

from .balance import AttentionCost, BalancedBatchSampler, balance, imbalance
from .batches import (
    BatchSampler,
    JaggedBatch,
    SamplerState,
    check_batch,
    consecutive_batches,
    jagged_batch,
)
from .detect import LAYOUT_NAMES, LayoutName
from .events import Catalog, EventLog, Ties, open_event_log
from .kuairand import ACTIONS, unpack_actions
from .split import HELD_OUT, Windows, held_out_windows, training_windows

__all__ = [
    "ACTIONS",
    "HELD_OUT",
    "LAYOUT_NAMES",
    "AttentionCost",
    "BalancedBatchSampler",
    "BatchSampler",
    "Catalog",
    "EventLog",
    "JaggedBatch",
    "LayoutName",
    "SamplerState",
    "Ties",
    "Windows",
    "balance",
    "check_batch",
    "consecutive_batches",
    "held_out_windows",
    "imbalance",
    "jagged_batch",
    "open_event_log",
    "training_windows",
    "unpack_actions",
]
