"""Index scores in plain JAX: keys are unpacked once for a request and key tile, and meet fixed tiles of its rows."""

from typing import Any

import jax
import jax.numpy as jnp

from ..layouts import KVLayout, gather_rows
from ..quant import hadamard, quantise

KEY_TILE = 256
MATRIX_ROWS = 256  # rows times heads of one product, so that its arithmetic is the same for any number of rows
MIN_AMAX = 1e-4


def quantise_query(q: jax.Array, weights: jax.Array, layout: KVLayout) -> tuple[jax.Array, jax.Array]:
    """What meets quantised keys: e4m3 codes of q, and float32 weights that hold the scale of each row and head."""
    q = q.astype(jnp.float32)
    if layout.hadamard:
        q = hadamard(q)
    codes, scales = quantise(q, q.shape[-1], "float32", MIN_AMAX)
    return codes, weights.astype(jnp.float32) * scales[..., 0]


def index_scores(
    q: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    start: jax.Array | None,
    end: jax.Array,
    table: jax.Array | None,
    *,
    layout: KVLayout,
) -> jax.Array:
    """Scores ``[R, pages of a request * page_size]`` of columns ``start <= n < end``; -inf elsewhere and off the table.

    Args:
        q: ``[R, Hi, Di]``.
        weights: ``[R, Hi]``.
        pool: uint8 or typed.
        start: ``[R]`` int32, or None for 0.
        end: ``[R]`` int32.
        table: ``[B, W]`` int32 page ids, R a multiple of B; None: all pages of the pool in order, for all rows.
        layout: of ``pool``.
    """
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    weights = weights.astype(jnp.float32)
    if start is None:
        start = jnp.zeros_like(end)
    if table is None:
        table = jnp.arange(pool.shape[0], dtype=jnp.int32)[None]
    batch, pages = table.shape
    rows, heads, dim = q.shape
    steps, columns = rows // batch, pages * layout.page_size
    if rows == 0 or columns == 0 or pool.shape[0] == 0:
        return jnp.full((rows, columns), -jnp.inf, jnp.float32)
    tile = max(1, MATRIX_ROWS // heads)
    row_tiles, key_tiles = -(-steps // tile), -(-columns // KEY_TILE)

    def split(x: jax.Array) -> jax.Array:
        x = x.reshape(batch, steps, *x.shape[1:])
        x = jnp.pad(x, [(0, 0), (0, row_tiles * tile - steps)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(batch, row_tiles, tile, *x.shape[2:])

    def score_tile(args: Any, column: jax.Array, keys: jax.Array, present: jax.Array) -> jax.Array:
        q_tile, weight_tile, first, last = args
        inside = present & (column >= first[:, None]) & (column < last[:, None])

        def score(q_tile: jax.Array, weight_tile: jax.Array, keys: jax.Array) -> jax.Array:
            flat = q_tile.reshape(tile * heads, dim).astype(jnp.float32)
            dots = jnp.einsum("md,nd->mn", flat, keys, precision=precision).reshape(tile, heads, KEY_TILE)
            positive = jnp.where(dots <= 0, 0, dots)  # not a maximum, which may swallow NaN
            return jnp.sum(positive * weight_tile[..., None], axis=1)

        scores = jax.lax.cond(
            jnp.any(inside), score, lambda *_: jnp.zeros((tile, KEY_TILE), jnp.float32), q_tile, weight_tile, keys
        )
        return jnp.where(inside, scores, -jnp.inf)

    def one_request(args: Any) -> jax.Array:
        *by_row, pages_of = args
        if layout.kind == "index":
            given = by_row[0], by_row[1]
            codes, by_row[1] = jax.lax.map(lambda rows: quantise_query(rows[0], rows[1], layout), given)
            codes = jax.lax.optimization_barrier(codes)  # or XLA may take the casts to e4m3 and back for nothing
            by_row[0] = codes.astype(jnp.float32)
        longest, earliest = jnp.max(by_row[3]), jnp.min(jnp.where(by_row[3] > by_row[2], by_row[2], columns))

        def key_tile(column: jax.Array) -> jax.Array:
            def compute() -> jax.Array:
                page = pages_of[jnp.minimum(column // layout.page_size, pages - 1)]
                present = (column < columns) & (page >= 0) & (page < pool.shape[0])
                slots = jnp.where(present, page * layout.page_size + column % layout.page_size, -1)
                keys = jnp.where(present[:, None], gather_rows(pool, slots, layout), 0)
                return jax.lax.map(lambda rows: score_tile(rows, column, keys, present), tuple(by_row))

            reached = (column[0] < longest) & (column[-1] >= earliest)
            blank = jnp.full((row_tiles, tile, KEY_TILE), -jnp.inf, jnp.float32)
            return jax.lax.cond(reached, compute, lambda: blank)

        tiles = jnp.arange(key_tiles * KEY_TILE, dtype=jnp.int32).reshape(key_tiles, KEY_TILE)
        scores = jax.lax.map(jax.checkpoint(key_tile), tiles)
        return jnp.moveaxis(scores, 0, 2).reshape(row_tiles * tile, key_tiles * KEY_TILE)[:steps, :columns]

    by_row = split(q), split(weights), split(start), split(end)
    return jax.lax.map(one_request, (*by_row, table)).reshape(rows, columns)
