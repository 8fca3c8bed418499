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


def check_ids(spec: ModelSpec, tokens: Any, shape: str, counts: Any = None) -> Array:
    """Token ids as int32 of the right rank; host arrays are also checked for range before JAX could cut them.

    Args:
        spec: static facts of the model.
        tokens: integers on the host or the device.
        shape: ``"[B]"`` or ``"[B, T]"``.
        counts: ``[B]`` valid tokens of each row, as the caller gave them: what stands past them may be any integer. If
            they are on the device, ids on the host are checked to fit int32 alone.

    Raises:
        TypeError: not integers.
        ValueError: another rank, or an id out of range.
    """
    axes = shape.count(",") + 1
    if not is_host(tokens):
        return _device_integers("tokens", tokens, shape, axes)
    tokens = np.asarray(tokens)
    if tokens.size and not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(f"Expected tokens to be integers, got dtype {tokens.dtype}")
    if tokens.ndim != axes:
        raise ValueError(f"Expected tokens to be {shape}, got shape {tokens.shape}")
    low, high = 0, spec.config.vocab_size - 1
    if counts is not None and is_host(counts) and np.shape(counts) == tokens.shape[:1]:
        tokens = np.where(np.arange(tokens.shape[1]) < np.asarray(counts)[:, None], tokens, 0)
    elif counts is not None:
        low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    bad = (tokens < low) | (tokens > high)
    if bad.any():
        raise ValueError(f"Expected token ids in {low}..{high}, got {int(tokens[bad][0])}")
    return jnp.asarray(tokens.astype(np.int32))


def _device_integers(name: str, values: Array, shape: str, axes: int) -> Array:
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise TypeError(f"Expected {name} to be integers, got dtype {values.dtype}")
    if values.ndim != axes:
        raise ValueError(f"Expected {name} to be {shape}, got shape {values.shape}")
    return values.astype(jnp.int32)


def check_counts(name: str, counts: Any, batch: int, length: int) -> Array:
    """Numbers of tokens ``[B]`` as int32; host arrays are also checked to be in ``0..length``.

    Raises:
        TypeError: not integers.
        ValueError: another shape, or a number out of range.
    """
    if is_host(counts):
        counts = np.asarray(counts)
        if counts.size and not np.issubdtype(counts.dtype, np.integer):
            raise TypeError(f"Expected {name} to be integers, got dtype {counts.dtype}")
        if counts.size and (counts.min() < 0 or counts.max() > length):
            raise ValueError(f"Expected {name} in 0..{length}, the width of tokens; got {counts.tolist()}")
        counts = counts.astype(np.int32)
    elif not jnp.issubdtype(counts.dtype, jnp.integer):
        raise TypeError(f"Expected {name} to be integers, got dtype {counts.dtype}")
    if counts.shape != (batch,):
        raise ValueError(f"Expected {name} to have shape ({batch},), one per row of tokens; got {counts.shape}")
    return jnp.asarray(counts).astype(jnp.int32)


def check_active(active: Any, batch: int) -> Array:
    """Which rows take part, ``[B]``, as counts of 0 or 1 token; None is all.

    Raises:
        TypeError: not bool.
        ValueError: another shape.
    """
    if active is None:
        return jnp.ones((batch,), jnp.int32)
    active = np.asarray(active) if is_host(active) else active
    if active.dtype != bool and active.size:
        raise TypeError(f"Expected active to be bool, got dtype {active.dtype}")
    if active.shape != (batch,):
        raise ValueError(f"Expected active to have shape ({batch},), got {active.shape}")
    return jnp.asarray(active).astype(jnp.int32)


def check_hidden(hidden: Any, shape: tuple[int, ...]) -> Array:
    """What the draft block takes over from the trunk, of the given shape.

    Raises:
        TypeError: not floating point.
        ValueError: another shape.
    """
    hidden = jnp.asarray(hidden)
    if not jnp.issubdtype(hidden.dtype, jnp.floating):
        raise TypeError(f"Expected hidden to be floating point, got dtype {hidden.dtype}")
    if hidden.shape != shape:
        raise ValueError(f"Expected hidden to have shape {shape}, got {hidden.shape}")
    return hidden


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
