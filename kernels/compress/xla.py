"""Compression in plain JAX: ring write, then one softmax a channel over the tokens of each closing window."""

import jax
import jax.numpy as jnp

_TILE_TOKENS = 128  # tokens of the windows that are pooled together; the tile is the same however long the chunk is


def compress(
    values: jax.Array,
    gates: jax.Array,
    state: jax.Array,
    positions: jax.Array,
    ape: jax.Array,
    layer: jax.Array | int | None = None,
    *,
    ratio: int,
    overlap: bool,
) -> tuple[jax.Array, jax.Array]:
    """See ``jmla.kernels.compress``."""
    if layer is None:
        entries, states = compress(values, gates, state[None], positions, ape, 0, ratio=ratio, overlap=overlap)
        return entries, states[0]
    batch, steps, width = values.shape
    ring = state.shape[2]
    span = ratio * (2 if overlap else 1)
    d = width // 2 if overlap else width
    windows = steps // ratio + 1
    if batch == 0 or steps == 0:
        return jnp.zeros((batch, windows, d), jnp.float32), state

    valid = positions >= 0
    first = positions[:, 0]
    end = first + jnp.sum(valid, axis=1, dtype=jnp.int32)
    rows = jnp.concatenate([values, gates], axis=-1).astype(jnp.float32)
    # Of a chunk longer than the ring only the last tokens stay, so that no slot is written twice.
    keep = valid & (positions >= end[:, None] - ring)
    slots = jnp.where(keep, positions % ring, ring)  # slot `ring` is out of bounds: dropped
    every = jnp.arange(batch)[:, None]
    new_state = state.at[layer, every, slots].set(rows, mode="drop")

    lookback = span - 1  # tokens before the chunk that a window closing in it may need
    in_ring = steps + lookback <= ring
    if in_ring:  # reading after the write leaves the old state free for an update in place
        source = new_state
    else:
        before = (first[:, None] + jnp.arange(-lookback, 0, dtype=jnp.int32)) % ring
        source = jnp.concatenate([state[layer, every, before], rows], axis=1)

    window = first[:, None] // ratio + jnp.arange(windows, dtype=jnp.int32)
    closes = (first[:, None] >= 0) & ((window + 1) * ratio <= end[:, None])
    offsets = jnp.arange(ratio - span, ratio, dtype=jnp.int32)
    scores_bias = _own_half(jnp.tile(ape.astype(jnp.float32), (span // ratio, 1))[None], ratio, overlap)

    def gather(row: jax.Array, token: jax.Array) -> jax.Array:
        place = token % ring if in_ring else token - first[row][:, None] + lookback
        at = (layer, row[:, None], place) if in_ring else (row[:, None], place)
        return source.at[at].get(mode="clip")

    def pool(picked: jax.Array, token: jax.Array, closing: jax.Array) -> jax.Array:
        present = ((token >= 0) & closing[:, None])[..., None]
        value = jnp.where(present, _own_half(picked[..., :width], ratio, overlap), 0)
        score = _own_half(picked[..., width:], ratio, overlap) + scores_bias
        # Before the first window there are no tokens: weight zero. Windows that stay open pool zeros.
        score = jnp.where(closing[:, None, None], jnp.where(present, score, -jnp.inf), 0)
        weight = jnp.exp(score - jax.lax.stop_gradient(jnp.max(score, axis=1, keepdims=True)))
        return jnp.sum(weight * value, axis=1) / jnp.sum(weight, axis=1)

    tile = max(1, _TILE_TOKENS // span)
    total = batch * windows
    tiles = -(-total // tile)

    def one_tile(args: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        row, start, closing = args
        token = start[:, None] + offsets
        # Two conditionals: the pooling compiles alone, whatever its tokens come from, and rounds alike everywhere.
        some = jnp.any(closing)
        blank = jnp.zeros((tile, span, 2 * width), jnp.float32)
        picked = jax.lax.cond(some, lambda: gather(row, token), lambda: blank)
        return jax.lax.cond(some, pool, lambda *_: jnp.zeros((tile, d), jnp.float32), picked, token, closing)

    def split(x: jax.Array) -> jax.Array:
        return jnp.pad(x.reshape(total), (0, tiles * tile - total)).reshape(tiles, tile)

    row_of = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], (batch, windows))
    entries = jax.lax.map(one_tile, (split(row_of), split(window * ratio), split(closes)))
    return entries.reshape(tiles * tile, d)[:total].reshape(batch, windows, d), new_state


def _own_half(x: jax.Array, ratio: int, overlap: bool) -> jax.Array:
    """``[..., span, W]`` -> ``[..., span, d]``: first halves of the tokens before, second halves of the window's."""
    if not overlap:
        return x
    d = x.shape[-1] // 2
    return jnp.concatenate([x[..., :ratio, :d], x[..., ratio:, d:]], axis=-2)
