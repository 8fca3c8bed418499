"""Many requests over one model and one paged cache: continuous batching, chunked prefill, prefix reuse, preemption."""

from jmla.engine.engine import Engine, Stats
from jmla.engine.request import Handle

__all__ = ["Engine", "Handle", "Stats"]
