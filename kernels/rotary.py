"""Rotation by tabulated angles, the one form for packers, the attention's epilogue and the networks."""

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, table: jax.Array, *, interleaved: bool = True, inverse: bool = False) -> jax.Array:
    """Rotates all of ``x [..., dims]`` by ``table [..., dims]``, cosines then sines; float32 result.

    Pairs are ``(2i, 2i + 1)`` when interleaved, ``(i, i + dims / 2)`` otherwise; ``inverse`` turns back.
    """
    half = table.shape[-1] // 2
    cos, sin = table[..., :half], table[..., half:]
    if inverse:
        sin = -sin
    x = x.astype(jnp.float32)
    if interleaved:
        pairs = x.reshape(*x.shape[:-1], half, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def rotate_tail(x: jax.Array, table: jax.Array, *, inverse: bool = False) -> jax.Array:
    """Rotates the last ``table.shape[-1]`` values of ``x`` in interleaved pairs; same dtype as ``x``."""
    dims = table.shape[-1]
    turned = rotate(x[..., x.shape[-1] - dims :], table, inverse=inverse).astype(x.dtype)
    return jnp.concatenate([x[..., : x.shape[-1] - dims], turned], axis=-1)
