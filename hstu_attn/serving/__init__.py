"""Serving: an inference server around the operator (`pip install hstu_attn[serving]`).

Engine           scores for many users at once, on keys and values that it keeps
ServedModel      what an engine needs of a model; CatalogueModel, of one for retrieval;
                 UncachedModel, of one that computes each request whole
GraphBuckets     the shapes that an engine captures in CUDA graphs
EventStore       the users' latest events, from which an engine recomputes what is not cached
PagedKVCache     the keys and values of many users in pages, under an LRU policy
CachedRows       where the rows of `HSTUStack.forward_cached` are; StepTensors, the tensors it needs
ScoringStep      a step over cached rows as a function of tensors, to be exported
check_cacheable  refuses layers whose keys and values cannot be cached
"""

from ..cached import CachedRows, StepTensors, check_cacheable
from .answers import Recommendation
from .cache import CacheStats, CacheStep, OutOfPagesError, PagedKVCache
from .engine import Engine
from .errors import DeadlineError, EngineClosedError, NoHistoryError, OverloadedError
from .events import Event, EventStore
from .export import ScoringStep
from .graphs import GraphBuckets
from .model import CatalogueModel, Requests, Rows, ServedModel, UncachedModel
from .stats import EngineStats, Histogram

__all__ = [
    "CacheStats",
    "CacheStep",
    "CachedRows",
    "CatalogueModel",
    "DeadlineError",
    "Engine",
    "EngineClosedError",
    "EngineStats",
    "Event",
    "EventStore",
    "GraphBuckets",
    "Histogram",
    "NoHistoryError",
    "OutOfPagesError",
    "OverloadedError",
    "PagedKVCache",
    "Recommendation",
    "Requests",
    "Rows",
    "ScoringStep",
    "ServedModel",
    "StepTensors",
    "UncachedModel",
    "check_cacheable",
]
