"""Sparse attention in plain JAX: tiles of 16 rows, and of 128 slots with an online softmax.

The tiles are the same however many rows or columns a call has, and a tile's arithmetic stands in a conditional, which
XLA compiles apart from what surrounds it. So a row's bits depend neither on its batch mates nor on the width of its
index row, and memory is bounded by one tile of unpacked rows.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ..layouts import gather_rows
from .epilogue import Epilogue, assemble, finish
from .source import Source

ROW_TILE = 16
SLOT_TILE = 128


def sparse_mla(
    q: jax.Array,
    sources: tuple[Source, ...],
    sinks: jax.Array | None,
    q_scale: jax.Array | None,
    out_scale: Any,
    epilogue: Epilogue | None,
    *,
    scale: Any,
    v_dim: int,
    out_dtype: Any,
    deterministic: bool | None = None,
) -> tuple[Any, jax.Array]:
    """Attention of ``q [R, H, D]`` over all sources under one softmax; always deterministic.

    Returns:
        Output ``[R, H, v_dim]`` of ``out_dtype`` (with ``epilogue``: its codes and scales) and lse ``[R, H]`` float32.
    """
    del deterministic
    rows = q.shape[0]
    tiles = -(-rows // ROW_TILE)

    def split(x: jax.Array, fill: int = 0) -> jax.Array:
        pad = [(0, tiles * ROW_TILE - rows)] + [(0, 0)] * (x.ndim - 1)
        return jnp.pad(x, pad, constant_values=fill).reshape(tiles, ROW_TILE, *x.shape[1:])

    def one_tile(args: Any) -> Any:
        (q_tile, q_scale_tile, cos_sin), slots = args
        out, lse = _attend(q_tile, q_scale_tile, slots, sources, scale, sinks)
        return finish(out[..., :v_dim], out_scale, epilogue, cos_sin, out_dtype), lse

    by_row = jax.tree.map(split, (q, q_scale, None if epilogue is None else epilogue.cos_sin))
    slots = [split(source.slots(), -1) for source in sources]
    result = jax.lax.map(jax.checkpoint(one_tile), (by_row, slots))
    out, lse = jax.tree.map(lambda x: x.reshape(tiles * ROW_TILE, *x.shape[2:])[:rows], result)
    return (out if epilogue is None else assemble(out[0], out[1], epilogue)), lse


def _attend(
    q: jax.Array,
    q_scale: jax.Array | None,
    slots: list[jax.Array],
    sources: tuple[Source, ...],
    scale: Any,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """One tile of rows: normalised output ``[16, H, D]`` in float32, and lse ``[16, H]`` without the sink."""
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    q = q.astype(jnp.float32)
    logit_scale = jnp.float32(scale) if q_scale is None else (scale * q_scale)[..., None]

    def step(source: Source, carry: Any, tile: jax.Array) -> tuple[Any, None]:
        taken = tile >= 0

        def attend(top: jax.Array, mass: jax.Array, out: jax.Array) -> Any:
            kv = gather_rows(source.pool, tile, source.layout, kv_scale=source.kv_scale)
            # A weight of zero does not cancel NaN: what is masked is zero in the values, and -inf in the logits.
            kv = jnp.where(taken[..., None], kv, 0)
            logits = jnp.einsum("rhd,rkd->rhk", q, kv, precision=precision) * logit_scale
            logits = jnp.where(taken[:, None], logits, -jnp.inf)
            new_top = jnp.maximum(top, jax.lax.stop_gradient(jnp.max(logits, axis=-1)))
            base = jnp.where(new_top == -jnp.inf, 0, new_top)  # no key yet: exp(-inf - 0), not exp(-inf + inf)
            weights = jnp.exp(logits - base[..., None])
            decay = jnp.exp(top - base)
            mass = mass * decay + jnp.sum(weights, axis=-1)
            out = out * decay[..., None] + jnp.einsum("rhk,rkd->rhd", weights, kv, precision=precision)
            return new_top, mass, out

        return jax.lax.cond(jnp.any(taken), attend, lambda *same: same, *carry), None

    shape = q.shape[:2]
    carry = jnp.full(shape, -jnp.inf, q.dtype), jnp.zeros(shape, q.dtype), jnp.zeros(q.shape, q.dtype)
    for source, row_slots in zip(sources, slots, strict=True):
        width = -(-row_slots.shape[1] // SLOT_TILE) * SLOT_TILE
        padded = jnp.pad(row_slots, ((0, 0), (0, width - row_slots.shape[1])), constant_values=-1)
        tiles = padded.reshape(ROW_TILE, -1, SLOT_TILE).swapaxes(0, 1)
        body = jax.checkpoint(lambda carry, tile, source=source: step(source, carry, tile))
        carry, _ = jax.lax.scan(body, carry, tiles)
    top, mass, out = carry

    empty = mass == 0
    mass = jnp.where(empty, 1, mass)
    lse = jnp.where(empty, 0, top) + jnp.log(mass)
    share = 1 / mass
    if sinks is not None:
        # exp(lse) / (exp(lse) + exp(sink)), finite for sinks of any size.
        share *= jax.nn.sigmoid(lse - sinks.astype(jnp.float32))
    return out * share[..., None], jnp.where(empty, -jnp.inf, lse)
