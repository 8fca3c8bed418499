"""The index conversion in XLA: one gather from the table."""

from typing import Any

import jax
import jax.numpy as jnp

from ..layouts import MAX_SLOTS


def resolve_slots(
    local: jax.Array | None,
    rows: jax.Array,
    table: jax.Array,
    layer_offset: jax.Array,
    window_table: jax.Array | None,
    positions: jax.Array | None,
    window_offset: jax.Array | None,
    *,
    page_size: int,
    window_sizes: tuple[int, int] | None,
    split: bool,
) -> Any:
    """See ``jmla.kernels.resolve_slots``."""
    extra = None if local is None else _convert(local, rows, table, page_size, layer_offset)
    if window_table is None or positions is None or window_offset is None or window_sizes is None:
        return None if extra is None else (extra, _bound(extra))
    window_page_size, length = window_sizes
    ids = jnp.maximum(positions - length + 1, 0)[:, None] + jnp.arange(length, dtype=jnp.int32)
    ids = jnp.where(ids <= positions[:, None], ids, -1)
    slots = _convert(ids, rows, window_table, window_page_size, window_offset)
    if extra is None:
        return slots, _bound(slots)
    if split:
        return (slots, _bound(slots)), (extra, _bound(extra))
    real = (rows >= 0) & (rows < table.shape[0]) & (positions >= 0)
    return jnp.concatenate([slots, extra], axis=1), jnp.where(real, length + _bound(extra), 0)


def _convert(ids: jax.Array, rows: jax.Array, table: jax.Array, page_size: int, layer_offset: jax.Array) -> jax.Array:
    batch, width = table.shape
    if batch == 0 or width == 0:
        return jnp.full(ids.shape, -1, jnp.int32)
    ordinal, offset = ids // page_size, ids % page_size
    valid = ((rows >= 0) & (rows < batch))[:, None] & (ids >= 0) & (ordinal < width)
    page = table[jnp.where(valid, rows[:, None], 0), jnp.where(valid, ordinal, 0)]
    valid &= (page >= 0) & (page <= (MAX_SLOTS - layer_offset - offset) // page_size)
    return jnp.where(valid, page * page_size + offset + layer_offset, -1)


def _bound(slots: jax.Array) -> jax.Array:
    """1 + the last valid column of each row."""
    columns = jnp.arange(1, slots.shape[1] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(slots >= 0, columns, 0), axis=1, initial=0)
