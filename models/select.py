"""What an indexer picks: scores and top-k over tiles of rows, so that no array of all rows by all keys exists."""

import jax
import jax.numpy as jnp

from jmla import kernels
from jmla.models.context import StepContext

TILE_ELEMENTS = 1 << 24  # scores held at a time: 64 MiB of float32
ROW_TILE = 16  # fewest rows of a request in a tile
NARROWEST = 4096  # columns below which the width of the scores is not adapted to the text


def widths(pages: int, page_size: int = 64) -> list[int]:
    """Numbers of pages, widest first, of which a pass takes the least that holds its longest text."""
    out = [pages]
    while out[-1] * page_size > NARROWEST:
        out.append(-(-out[-1] // 4))
    return out


def select(
    ctx: StepContext, q: jax.Array, weights: jax.Array, pool: jax.Array, table: jax.Array, visible: jax.Array, k: int
) -> jax.Array:
    """The ``k`` best of the keys that each row sees.

    The scores are as wide as the longest text of the pass needs, up to a factor of four, not as the cache allows.

    Args:
        ctx: the pass.
        q: ``[R, Hi, Di]`` index queries.
        weights: ``[R, Hi]`` float32 head weights, with the scores' constant factors.
        pool: the index stream's pool.
        table: ``[B, W]`` its kernel pages, this layer's.
        visible: ``[R]`` keys that each row sees.
        k: keys to pick.

    Returns:
        ``[R, k]`` int32 ordinals within the request, in ascending order, -1 filled.
    """
    layout = ctx.layouts["index"]
    batch, pages = table.shape
    rows = q.shape[0] // batch
    sizes = widths(pages, layout.page_size)

    def with_pages(count: int) -> jax.Array:
        tile = max(TILE_ELEMENTS // (batch * count * layout.page_size), ROW_TILE)
        tile = min(tile // ROW_TILE * ROW_TILE, rows)
        tiles = -(-rows // tile)

        def split(x: jax.Array) -> jax.Array:  # [R, ...] -> [tiles, B * tile, ...]
            x = x.reshape(batch, rows, *x.shape[1:])
            x = jnp.pad(x, [(0, 0), (0, tiles * tile - rows)] + [(0, 0)] * (x.ndim - 2))
            x = x.reshape(batch, tiles, tile, *x.shape[2:]).swapaxes(0, 1)
            return x.reshape(tiles, batch * tile, *x.shape[3:])

        def one_tile(parts: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            q, weights, visible = parts
            scores = kernels.index_scores(
                q,
                weights,
                pool,
                layout=layout,
                lengths=visible,
                table=table[:, :count],
                implementation=ctx.implementation("index_scores"),
            )
            return kernels.top_k(scores, visible, k, implementation=ctx.implementation("top_k"))

        # Nothing can be learnt through a choice; saying so spares the backward pass the scores.
        parts = jax.lax.stop_gradient((split(q), split(weights), split(visible)))
        chosen = jax.lax.map(one_tile, parts)
        return chosen.reshape(tiles, batch, tile, k).swapaxes(0, 1).reshape(batch, tiles * tile, k)[:, :rows]

    longest = jnp.max(visible)
    fitting = sum((longest <= w * layout.page_size).astype(jnp.int32) for w in sizes[1:])
    branches = [lambda count=count: with_pages(count) for count in sizes]
    chosen = jax.lax.switch(fitting, branches) if len(branches) > 1 else branches[0]()
    return chosen.reshape(batch * rows, k)
