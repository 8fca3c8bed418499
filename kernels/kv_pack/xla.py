"""The packer in XLA: element-wise quantisation and a scatter of one contiguous slice a row."""

import jax
import jax.numpy as jnp

from ..layouts import KVLayout, is_raw, locate
from ..quant import e4m3, e8m0_byte, hadamard, quantise, to_bytes
from ..rotary import rotate_tail


def kv_pack(
    rows: jax.Array,
    slots: jax.Array,
    pool: jax.Array,
    norm_weight: jax.Array | None,
    cos_sin: jax.Array | None,
    kv_scale: jax.Array | float | None,
    *,
    layout: KVLayout,
    eps: float,
) -> jax.Array:
    """See ``jmla.kernels.kv_pack``."""
    if pool.shape[0] == 0 or rows.shape[0] == 0:
        return pool
    rows = rows.astype(jnp.float32)
    if norm_weight is not None:
        rows = _normalise(rows, norm_weight, eps)
    if cos_sin is not None:
        rows = rotate_tail(rows, cos_sin)
    data, scales = encode_rows(rows, layout, kv_scale)
    if not is_raw(pool):
        return store_rows(pool, slots, data, None, layout)
    return store_rows(pool, slots, to_bytes(data), scales, layout)


def encode_rows(
    rows: jax.Array, layout: KVLayout, kv_scale: jax.Array | float | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """The stored form of float32 rows ``[R, width]``; the inverse of ``layouts.decode_rows``.

    Returns:
        ``(data, scales)``: data uint8 ``[R, row_bytes]``, or typed ``[R, width]`` for plain layouts; scales uint8
        ``[R, scale_bytes]`` for layouts with a footer, else None.
    """
    if layout.kind == "plain":
        if kv_scale is not None:
            rows = rows * (1.0 / jnp.asarray(kv_scale, jnp.float32))
        return (e4m3(rows) if layout.value_dtype == "float8_e4m3fn" else rows.astype(layout.value_dtype)), None
    if layout.hadamard:
        rows = hadamard(rows)
    codes, scales = quantise(rows[:, : layout.nope], layout.tile, layout.scale_form, layout.min_amax)
    parts = [to_bytes(codes)]
    footer = None
    if layout.kind == "footer":
        footer = jnp.pad(e8m0_byte(scales), ((0, 0), (0, layout.scale_bytes - layout.num_tiles)))
    elif layout.kind == "index":
        footer = to_bytes(scales)
    else:
        parts.append(to_bytes(scales))
    if layout.rope:
        parts.append(to_bytes(rows[:, layout.nope :].astype(jnp.bfloat16)))
    return jnp.concatenate(parts, axis=1), footer


def store_rows(
    pool: jax.Array, slots: jax.Array, data: jax.Array, scales: jax.Array | None, layout: KVLayout
) -> jax.Array:
    """Scatters the stored form of rows to their slots."""
    page, offset, valid = locate(slots, layout, pool.shape[0])
    # Skipped rows go to pages behind the pool, each to its own, so that the starts stay distinct; XLA drops them. (A
    # negative index given to ``.at[...]`` would wrap to the last row.)
    page = jnp.where(valid, page, pool.shape[0] + jnp.arange(slots.shape[0], dtype=jnp.int32))
    pool = _scatter(pool, page, offset * data.shape[1], data)
    if scales is not None:
        pool = _scatter(pool, page, layout.footer_offset + offset * layout.scale_bytes, scales)
    return pool


def _scatter(pool: jax.Array, page: jax.Array, start: jax.Array, updates: jax.Array) -> jax.Array:
    dimensions = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    return jax.lax.scatter(
        pool,
        jnp.stack([page, start], axis=-1),
        updates,
        dimensions,
        unique_indices=True,
        mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
    )


def _normalise(rows: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    normed, rest = rows[:, : weight.size], rows[:, weight.size :]
    mean = _row_sum(normed * normed) * jnp.float32(1.0 / weight.size)
    normed = normed * jax.lax.rsqrt(mean + eps) * weight.astype(jnp.float32)
    return jnp.concatenate([normed, rest], axis=1)


def _row_sum(x: jax.Array) -> jax.Array:
    """Sums the last axis by halves, ``[R, 1]``: unlike a reduction, in an order that does not depend on R."""
    width = 1 << (x.shape[-1] - 1).bit_length()
    x = jnp.pad(x, ((0, 0), (0, width - x.shape[-1])))
    while width > 1:
        width //= 2
        x = x[:, :width] + x[:, width:]
    return x
