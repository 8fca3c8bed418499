"""Mixture of experts: routing rules of the three families and the grouped expert product."""

import jax
import jax.numpy as jnp

from jmla.kernels import dispatch
from jmla.kernels.rowwise import ROW_TILE
from jmla.models.layers import product, swiglu


def _best(scores: jax.Array, k: int) -> jax.Array:
    # XLA's GPU top-k mishandles NaN for small k, and NaN would rank first elsewhere.
    return jax.lax.top_k(jnp.where(jnp.isnan(scores), -jnp.inf, scores), k)[1].astype(jnp.int32)


def _normalised(scores: jax.Array, chosen: jax.Array, scale: float, norm: bool) -> jax.Array:
    picked = jnp.take_along_axis(scores, jnp.maximum(chosen, 0), axis=-1)
    picked = jnp.where(chosen >= 0, picked, 0)
    if norm:
        picked = picked / (jnp.sum(picked, axis=-1, keepdims=True) + 1e-20)
    return picked * scale


def route_v4(
    logits: jax.Array, bias: jax.Array | None, fixed: jax.Array | None, k: int, scale: float, norm: bool
) -> tuple[jax.Array, jax.Array]:
    """V4 routing: scores ``sqrt(softplus(logits))``.

    Learned layers choose the ``k`` best of score plus ``bias``; hash layers take ``fixed [R, k]`` (the table row of the
    token id, -1 for an invalid id). The bias never enters the weights.

    Returns:
        ``(chosen [R, k] int32, weights [R, k] float32)``.
    """
    scores = jnp.sqrt(jax.nn.softplus(logits))
    if fixed is not None:
        chosen = fixed
    elif bias is not None:
        chosen = _best(scores + bias, k)
    else:
        raise ValueError("Expected either bias (learned routing) or fixed (hash routing)")
    return chosen, _normalised(scores, chosen, scale, norm)


def route_grouped(
    logits: jax.Array, bias: jax.Array, k: int, groups: int, kept_groups: int, scale: float, norm: bool
) -> tuple[jax.Array, jax.Array]:
    """V3.2 and GLM routing: sigmoid scores, group-limited choice by score plus ``bias`` (DeepSeek-V3, section 2.1.2).

    A group's score is the sum of its two largest biased scores; experts outside the ``kept_groups`` best are excluded.

    Returns:
        ``(chosen [R, k] int32, weights [R, k] float32)``.
    """
    scores = jax.nn.sigmoid(logits)
    biased = scores + bias
    if groups > 1:
        by_group = biased.reshape(*biased.shape[:-1], groups, -1)
        two_best = jnp.sum(jax.lax.top_k(by_group, 2)[0], axis=-1)
        kept = jnp.any(jax.nn.one_hot(_best(two_best, kept_groups), groups, dtype=bool), axis=-2)
        biased = jnp.where(kept[..., None], by_group, -jnp.inf).reshape(biased.shape)
    chosen = _best(biased, k)
    return chosen, _normalised(scores, chosen, scale, norm)


def experts(
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    limit: float | None,
    layer: jax.Array | int | None = None,
) -> jax.Array:
    """Sum over the chosen experts of ``weight * down(swiglu(gate_up x))``.

    (Row, expert) pairs are sorted by expert, each expert's rows padded to tiles of 16, and one matrix product after
    another runs on tiles of that fixed size: a row's bits do not depend on the rows beside it.

    Args:
        x: ``[R, D]`` rows.
        chosen: ``[R, k]`` int32 expert ids; -1 contributes nothing.
        weights: ``[R, k]`` float32.
        gate_up: ``[E, 2I, D]``, gate rows first; or those of several layers, ``[L, E, 2I, D]``.
        down: ``[E, D, I]``, or ``[L, E, D, I]``.
        limit: clamp of the activation, or None.
        layer: which of several layers; only the experts in use are then read, where a slice would copy them all.

    Returns:
        ``[R, D]`` float32.
    """
    rows, k = chosen.shape
    num_experts = gate_up.shape[-3]
    pairs = rows * k
    expert = jnp.where(chosen >= 0, chosen, num_experts).reshape(pairs)
    order = jnp.argsort(expert, stable=True)
    counts = jnp.bincount(expert, length=num_experts)
    padded = -(-counts // ROW_TILE) * ROW_TILE
    ends = jnp.cumsum(padded)
    tiles = -(-pairs // ROW_TILE) + min(num_experts, pairs)
    sorted_expert = expert[order]
    clipped = jnp.minimum(sorted_expert, num_experts - 1)
    place = ends[clipped] - padded[clipped] + jnp.arange(pairs) - (jnp.cumsum(counts) - counts)[clipped]
    place = jnp.where(sorted_expert < num_experts, place, tiles * ROW_TILE)  # dropped
    source = jnp.full((tiles * ROW_TILE,), rows, jnp.int32).at[place].set((order // k).astype(jnp.int32), mode="drop")
    padded_x = jnp.concatenate([x, jnp.zeros((1, x.shape[1]), x.dtype)])[source].reshape(tiles, ROW_TILE, -1)
    tile_expert = jnp.searchsorted(ends, jnp.arange(tiles) * ROW_TILE, side="right")

    def one_tile(inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        tile, e = inputs

        def run(tile: jax.Array) -> jax.Array:
            known = jnp.minimum(e, num_experts - 1)
            at = known if layer is None else (layer, known)
            hidden = swiglu(product(tile, gate_up[at], jnp.float32), limit).astype(tile.dtype)
            return product(hidden, down[at], jnp.float32)

        if dispatch.current_target().platform == "cuda":  # there the host would wait at each branch; nobody reads these
            return run(tile)
        return jax.lax.cond(e < num_experts, run, lambda tile: jnp.zeros(tile.shape, jnp.float32), tile)

    out = jax.lax.map(one_tile, (padded_x, tile_expert)).reshape(tiles * ROW_TILE, -1)
    position = jnp.zeros((pairs,), place.dtype).at[order].set(place).reshape(rows, k)
    total = jnp.zeros((rows, x.shape[1]), jnp.float32)
    for j in range(k):  # in this order, so that the sum rounds the same way for every row
        valid = position[:, j] < tiles * ROW_TILE
        picked = out[jnp.where(valid, position[:, j], 0)]
        total = total + jnp.where(valid[:, None], picked * weights[:, j, None], 0)
    return total
