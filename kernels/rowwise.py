"""Row-independent execution: the same bits for a row whatever rows stand beside it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

ROW_TILE = 16  # rows a tile; an XLA product of fewer rows rounds differently for each count


def rowwise(fn: Callable[..., Any], *rows: Any, deterministic: bool) -> Any:
    """Applies ``fn``, which treats the rows of its inputs one by one, to all rows.

    With ``deterministic`` the rows are padded to a multiple of 16 and ``fn`` runs on one tile of 16 rows after another,
    behind optimisation barriers, so that the compiled arithmetic of a row depends neither on the number of rows nor on
    their neighbours. Without it this is ``fn(*rows)``.

    Args:
        fn: takes arrays (or pytrees of arrays) with a leading row axis, returns the same.
        rows: pytrees of ``[R, ...]`` arrays that agree in ``R``.
        deterministic: whether to fix the tiles.

    Returns:
        What ``fn`` returns, ``[R, ...]`` each.
    """
    if not deterministic:
        return fn(*rows)
    leaves = jax.tree.leaves(rows)
    count = leaves[0].shape[0]
    tiles = -(-count // ROW_TILE)

    def split(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, tiles * ROW_TILE - count)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(tiles, ROW_TILE, *x.shape[1:])

    def one_tile(tile: Any) -> Any:
        return jax.lax.optimization_barrier(fn(*jax.lax.optimization_barrier(tile)))

    out = jax.lax.map(one_tile, jax.tree.map(split, rows))
    return jax.tree.map(lambda y: y.reshape(tiles * ROW_TILE, *y.shape[2:])[:count], out)
