"""Checks of what steps are given: shapes and dtypes always, values where they are on the host anyway."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmla.kernels.layouts import KVLayout
from jmla.models.cache import PagedCache, check_alive
from jmla.models.params import layer_counts
from jmla.models.spec import Model, ModelSpec, cache_layouts

Array = jax.Array


def is_host(x: Any) -> bool:
    return not isinstance(x, jax.Array | jax.core.Tracer)


def check_ids(spec: ModelSpec, tokens: Any, shape: str) -> Array:
    """Token ids as int32 of the right rank; host arrays are also checked for range before JAX could cut them."""
    vocab = spec.config.vocab_size
    if is_host(tokens):
        tokens = np.asarray(tokens)
        if tokens.size and (not np.issubdtype(tokens.dtype, np.integer)):
            raise TypeError(f"Expected tokens to be integers, got dtype {tokens.dtype}")
        if tokens.size and (tokens.min() < 0 or tokens.max() >= vocab):
            bad = tokens[(tokens < 0) | (tokens >= vocab)].flat[0]
            raise ValueError(f"Expected token ids in 0..{vocab - 1}, got {int(bad)}")
        tokens = jnp.asarray(tokens.astype(np.int32))
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"Expected tokens to be integers, got dtype {tokens.dtype}")
    if tokens.ndim != shape.count(",") + 1:
        raise ValueError(f"Expected tokens to be {shape}, got shape {tokens.shape}")
    return tokens.astype(jnp.int32)


def check_counts(name: str, counts: Any, batch: int, length: int) -> Array:
    if is_host(counts):
        counts = np.asarray(counts)
        if counts.size and not np.issubdtype(counts.dtype, np.integer):
            raise TypeError(f"Expected {name} to be integers, got dtype {counts.dtype}")
        if counts.size and (counts.min() < 0 or counts.max() > length):
            raise ValueError(f"Expected {name} in 0..{length}, the width of tokens; got {counts.tolist()}")
        counts = jnp.asarray(counts.astype(np.int32))
    if counts.shape != (batch,):
        raise ValueError(f"Expected {name} to have shape ({batch},), one per row of tokens; got {counts.shape}")
    return counts.astype(jnp.int32)


def check_cache(model: Model, cache: PagedCache, batch: int) -> None:
    if not isinstance(cache, PagedCache):
        raise TypeError(f"Expected cache to be a PagedCache (see jmla.init_cache), got {type(cache).__name__}")
    check_alive(cache)
    if cache.batch != batch:
        raise ValueError(f"Expected tokens to have {cache.batch} rows, one per row of the cache; got {batch}")
    spec = model.spec
    wanted = (tuple(cache_layouts(spec).items()), tuple(layer_counts(spec.config, spec.drafting).items()))
    if (cache.layouts, cache.layers) != wanted:
        raise ValueError(
            f"Expected a cache made by jmla.init_cache for this model: {_describe(*wanted)}; "
            f"got one of {_describe(cache.layouts, cache.layers)}"
        )
    if cache.chunk < min(spec.prefill_chunk, cache.max_seq_len):
        raise ValueError(
            f"Expected a cache whose window pages take chunks of {spec.prefill_chunk} tokens, the model's "
            f"prefill_chunk; this one was made for at most {cache.chunk}"
        )


def _describe(layouts: tuple[tuple[str, KVLayout], ...], layers: tuple[tuple[str, int], ...]) -> str:
    counts = dict(layers)
    return ", ".join(f"{counts[name]} x {name} {layout.name}" for name, layout in layouts)
