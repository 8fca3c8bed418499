"""Many requests over one model and one paged cache: continuous batching, chunked prefill, prefix reuse, preemption."""

from jmla.engine.engine import Engine
from jmla.engine.request import Handle
from jmla.engine.stats import Stats

__all__ = ["Engine", "Handle", "Stats"]
