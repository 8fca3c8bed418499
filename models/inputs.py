"""Checks of what steps are given: shapes and dtypes always, values where they are on the host anyway."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmla.kernels.layouts import KVLayout
from jmla.models.cache import PagedCache, check_alive
from jmla.models.config.common import shown
from jmla.models.params import layer_counts
from jmla.models.spec import Model, ModelSpec, cache_layouts, pages_of

Array = jax.Array


def is_host(x: Any) -> bool:
    return not isinstance(x, jax.Array | jax.core.Tracer)


def on_device(array: Any, dtype: Any) -> Array:
    """An array for a step. Of what is on the host it is a copy of NumPy's: the CPU backend may read an array where it
    lies, and later than it was given, when the caller has changed it."""
    return jax.device_put(np.array(array, dtype)) if is_host(array) else array.astype(dtype)


def as_array(name: str, values: Any) -> Any:
    """A NumPy array of what is on the host; arrays on the device as they are.

    Raises:
        TypeError: neither an array nor numbers, or integers of more than 64 bits.
        ValueError: lists of unequal lengths.
    """
    if not is_host(values):
        return values
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"Expected {name} to be an array or lists of equal lengths, got {shown(values)}") from error
    if array.dtype == object:
        kind = type(values).__name__
        raise TypeError(f"Expected {name} to be an array or lists of numbers of at most 64 bits, got {kind}")
    return array


def as_integers(name: str, values: Any) -> Any:
    """As ``as_array``, of integers.

    Raises:
        TypeError: another dtype.
        ValueError: lists of unequal lengths.
    """
    array = as_array(name, values)
    if not jnp.issubdtype(array.dtype, jnp.integer) and (array.size or not is_host(array)):
        raise TypeError(f"Expected {name} to be integers, got dtype {array.dtype}")
    return array


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
        ValueError: another rank, nothing in it, or an id out of range.
    """
    tokens = as_integers("tokens", tokens)
    if tokens.ndim != shape.count(",") + 1:
        raise ValueError(f"Expected tokens to be {shape}, got shape {tokens.shape}")
    if 0 in tokens.shape:
        sizes = "B >= 1 and T >= 1" if tokens.ndim > 1 else "B >= 1"
        raise ValueError(f"Expected tokens {shape} with {sizes}, got shape {tokens.shape}")
    if not is_host(tokens):
        return tokens.astype(jnp.int32)
    low, high = 0, spec.config.vocab_size - 1
    counts = None if counts is None else as_integers("lengths", counts)
    if counts is not None and is_host(counts) and counts.shape == tokens.shape[:1]:
        tokens = np.where(np.arange(tokens.shape[1]) < counts[:, None], tokens, 0)
    elif counts is not None:
        low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    bad = (tokens < low) | (tokens > high)
    if bad.any():
        raise ValueError(f"Expected token ids in {low}..{high}, got {int(tokens[bad][0])}")
    return on_device(tokens, np.int32)


def check_counts(name: str, counts: Any, batch: int, length: int) -> Array:
    """Numbers of tokens ``[B]`` as int32; host arrays are also checked to be in ``0..length``.

    Raises:
        TypeError: not integers.
        ValueError: another shape, or a number out of range.
    """
    counts = as_integers(name, counts)
    if is_host(counts) and counts.size and (counts.min() < 0 or counts.max() > length):
        raise ValueError(f"Expected {name} in 0..{length}, the width of tokens; got {shown(counts.tolist())}")
    if counts.shape != (batch,):
        raise ValueError(f"Expected {name} to have shape ({batch},), one per row of tokens; got {counts.shape}")
    return on_device(counts, np.int32)


def check_active(active: Any, batch: int) -> Array:
    """Which rows take part, ``[B]``, as counts of 0 or 1 token; None is all.

    Raises:
        TypeError: not bool.
        ValueError: another shape.
    """
    if active is None:
        return jnp.ones((batch,), jnp.int32)
    active = as_array("active", active)
    if active.dtype != bool and active.size:
        raise TypeError(f"Expected active to be bool, got dtype {active.dtype}")
    if active.shape != (batch,):
        raise ValueError(f"Expected active to have shape ({batch},), got {active.shape}")
    return on_device(active, np.int32)


def check_hidden(hidden: Any, shape: tuple[int, ...]) -> Array:
    """What the draft block takes over from the trunk, of the given shape.

    Raises:
        TypeError: not floating point.
        ValueError: another shape.
    """
    hidden = as_array("hidden", hidden)
    if not jnp.issubdtype(hidden.dtype, jnp.floating):
        raise TypeError(f"Expected hidden to be floating point, got dtype {hidden.dtype}")
    if hidden.shape != shape:
        raise ValueError(f"Expected hidden to have shape {shape}, got {hidden.shape}")
    return on_device(hidden, hidden.dtype)


def check_selected(selected: Any, shape: tuple[int, ...], longest: int) -> Array:
    """Positions that a draft step attends, of the given shape, -1 for none; not looked at on the device.

    Raises:
        TypeError: no integers.
        ValueError: another shape.
    """
    selected = as_integers("selected", selected)
    if selected.shape != shape:
        raise ValueError(f"Expected selected to have shape {shape}, got {selected.shape}")
    if is_host(selected) and not np.all((selected >= -1) & (selected < longest)):
        raise ValueError(f"Expected selected to hold positions in 0..{longest - 1}, or -1; got {shown(selected)}")
    return on_device(selected, np.int32)


def check_cache(model: Model, cache: PagedCache, batch: int) -> None:
    """Refuses a cache of another batch or another model, and one that a step has consumed."""
    check_alive(cache)
    held = np.shape(cache.lengths)[:1]
    if held and held[0] != batch:
        raise ValueError(f"Expected tokens to have {held[0]} rows, one per row of the cache; got {batch}")
    spec = model.spec
    wanted = (tuple(cache_layouts(spec).items()), tuple(layer_counts(spec.config, spec.drafting).items()))
    if (cache.layouts, cache.layers) != wanted:
        raise ValueError(
            f"Expected a cache made by jmla.init_cache for this model: {_describe(*wanted)}; "
            f"got one of {_describe(cache.layouts, cache.layers)}"
        )
    if cache.pools.keys() != dict(cache.layouts).keys():
        raise ValueError(
            f"Expected cache.pools to have {', '.join(dict(cache.layouts))}; got {shown(list(cache.pools))}"
        )
    table = (batch, pages_of(cache.max_seq_len))
    shapes = {"lengths": table[:1], "draft_lengths": table[:1], "table": table}
    for name, shape in (shapes | ({"window_table": table} if spec.is_v4 else {})).items():
        got = getattr(cache, name)
        if getattr(got, "shape", None) != shape or got.dtype != np.int32:
            raise ValueError(f"Expected cache.{name} to be an int32 array of shape {shape}, got {shown(got)}")
    if cache.chunk < min(spec.prefill_chunk, cache.max_seq_len):
        raise ValueError(
            f"Expected a cache whose window pages take chunks of {spec.prefill_chunk} tokens, the model's "
            f"prefill_chunk; this one was made for at most {cache.chunk}"
        )


def _describe(layouts: tuple[tuple[str, KVLayout], ...], layers: tuple[tuple[str, int], ...]) -> str:
    counts = dict(layers)
    return ", ".join(f"{counts.get(name, 0)} x {name} {layout.name}" for name, layout in layouts)
