"""Inference of DeepSeek-V4, DeepSeek-V3.2 and GLM-5 in JAX.

``import jmla`` is cheap: each name below is imported when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jmla import kernels as kernels
    from jmla import models as models
    from jmla.beam import Beam, beam_search
    from jmla.completion import Completion, TokenLogprob
    from jmla.engine import Engine
    from jmla.generation import generate, generate_tokens
    from jmla.kernels import debug_checks
    from jmla.loading import load
    from jmla.models import (
        CacheConsumedError,
        Model,
        PagedCache,
        copy,
        decode,
        draft,
        fork,
        forward,
        init_cache,
        prefill,
        rollback,
    )
    from jmla.sampling import SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "Beam": "jmla.beam",
    "CacheConsumedError": "jmla.models",
    "Completion": "jmla.completion",
    "Engine": "jmla.engine",
    "Model": "jmla.models",
    "PagedCache": "jmla.models",
    "SamplingParams": "jmla.sampling",
    "TokenLogprob": "jmla.completion",
    "beam_search": "jmla.beam",
    "copy": "jmla.models",
    "debug_checks": "jmla.kernels",
    "decode": "jmla.models",
    "draft": "jmla.models",
    "fork": "jmla.models",
    "forward": "jmla.models",
    "generate": "jmla.generation",
    "generate_tokens": "jmla.generation",
    "init_cache": "jmla.models",
    "load": "jmla.loading",
    "prefill": "jmla.models",
    "rollback": "jmla.models",
}

__all__ = [
    "Beam",
    "CacheConsumedError",
    "Completion",
    "Engine",
    "Model",
    "PagedCache",
    "SamplingParams",
    "TokenLogprob",
    "beam_search",
    "copy",
    "debug_checks",
    "decode",
    "draft",
    "fork",
    "forward",
    "generate",
    "generate_tokens",
    "init_cache",
    "load",
    "prefill",
    "rollback",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in ("kernels", "models"):
        value = importlib.import_module(f"jmla.{name}")
    else:
        raise AttributeError(f"module 'jmla' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "kernels", "models"})
