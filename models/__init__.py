"""The networks: DeepSeek-V4, DeepSeek-V3.2 and GLM-5, and the paged cache that their steps thread through."""

from jmla.models.branches import fork
from jmla.models.cache import CacheConsumedError, PagedCache, bytes_per_row, bytes_per_token, copy, init_cache
from jmla.models.checkpoint.places import placements
from jmla.models.params import abstract_params, layer_counts, layer_stacks
from jmla.models.spec import Model, ModelSpec, make_model
from jmla.models.steps import decode, draft, forward, prefill
from jmla.models.undo import rollback

__all__ = [
    "CacheConsumedError",
    "Model",
    "ModelSpec",
    "PagedCache",
    "abstract_params",
    "bytes_per_row",
    "bytes_per_token",
    "copy",
    "decode",
    "draft",
    "fork",
    "forward",
    "init_cache",
    "layer_counts",
    "layer_stacks",
    "make_model",
    "placements",
    "prefill",
    "rollback",
]
