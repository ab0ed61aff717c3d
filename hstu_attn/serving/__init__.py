"""Serving: an inference server around the operator (`pip install hstu_attn[serving]`).

Engine           scores for many users at once, on keys and values that it keeps
ServedModel      what an engine needs of a model; CatalogModel, of one for retrieval;
                 UncachedModel, of one that computes each request whole
GraphBuckets     the shapes that an engine captures in CUDA graphs
EventStore       the users' latest events, from which an engine recomputes what is not cached:
                 MemoryStore, SQLiteStore or RedisStore; open_store takes a path or a URL
PagedKVCache     the keys and values of many users in pages, under an LRU policy
CachedRows       where the rows of `HSTUStack.forward_cached` are; StepTensors, the tensors it needs
ScoringStep      a step over cached rows as a function of tensors, to be exported
check_cacheable  refuses layers whose keys and values cannot be cached
"""

from ..cached import CachedRows, StepTensors, check_cacheable
from .answers import RequestOptions
from .cache import CacheStats, CacheStep, OutOfPagesError, PagedKVCache
from .engine import Engine
from .errors import DeadlineError, EngineClosedError, NoHistoryError, OverloadedError
from .events import (
    Event,
    EventOrderError,
    EventStore,
    EventTimeError,
    MemoryStore,
    StoreDamagedError,
    StoreError,
)
from .export import ScoringStep
from .graphs import GraphBuckets
from .model import CatalogModel, Requests, Rows, ServedModel, UncachedModel
from .redis_store import RedisStore
from .scoring import Recommendation
from .sqlite_store import SQLiteStore
from .stats import EngineStats, Histogram
from .stores import open_store
from .versions import ModelCheckError, Probe

__all__ = [
    "CacheStats",
    "CacheStep",
    "CachedRows",
    "CatalogModel",
    "DeadlineError",
    "Engine",
    "EngineClosedError",
    "EngineStats",
    "Event",
    "EventOrderError",
    "EventStore",
    "EventTimeError",
    "GraphBuckets",
    "Histogram",
    "MemoryStore",
    "ModelCheckError",
    "NoHistoryError",
    "OutOfPagesError",
    "OverloadedError",
    "PagedKVCache",
    "Probe",
    "Recommendation",
    "RedisStore",
    "RequestOptions",
    "Requests",
    "Rows",
    "SQLiteStore",
    "ScoringStep",
    "ServedModel",
    "StepTensors",
    "StoreDamagedError",
    "StoreError",
    "UncachedModel",
    "check_cacheable",
    "open_store",
]
