"""FP8 quantisation: scales, codes and the Hadamard rotation, in forms whose bits do not depend on the compiler."""

from typing import Literal

import jax
import jax.numpy as jnp

ScaleForm = Literal["power_of_two", "float32"]

E4M3_MAX = 448.0  # largest finite e4m3 value; JAX casts do not saturate, 465 becomes NaN
TINY = 2.0**-126  # smallest normal float32


def e4m3(x: jax.Array) -> jax.Array:
    """Rounds to the nearest e4m3 value, ties to even, saturating at +-448 (NaN stays NaN)."""
    return jnp.clip(x.astype(jnp.float32), -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)


def tile_scale(amax: jax.Array, scale_form: ScaleForm, min_amax: float) -> jax.Array:
    """The float32 scale of tiles whose largest magnitude is ``amax``.

    ``max(amax, min_amax) / 448``, correctly rounded, or the smallest power of two that is not below that quotient. The
    power of two is found from the bits of amax (448 is 1.75 * 2^8): a float logarithm can be one step low. Below the
    smallest normal number the scale is 0 ("float32") or 2^-126 ("power_of_two", amax above 0).
    """
    amax = jnp.maximum(amax.astype(jnp.float32), jnp.float32(min_amax))
    if scale_form == "power_of_two":
        bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
        exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000)
        exponent = jnp.where(amax > 0, jnp.maximum(exponent, 1), 0)
        scale = jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
        return jnp.where(jnp.isnan(amax), amax, scale)
    # XLA turns a division by a broadcast constant into a multiplication by its rounded reciprocal, which is not the
    # same for one value in two; a divisor of its own for each element keeps the division.
    scale = amax / jnp.where(jnp.isnan(amax), amax, jnp.float32(E4M3_MAX))
    return jnp.where(scale < TINY, 0.0, scale)


def quantise(
    x: jax.Array, tile: int, scale_form: ScaleForm = "float32", min_amax: float = 1e-4
) -> tuple[jax.Array, jax.Array]:
    """Quantises the last axis in tiles, one scale a tile; the last tile may be shorter.

    The codes are ``e4m3(x * (1 / scale))``: what XLA makes of ``x / scale`` under jit, and what the GPU writers of the
    field compute. For powers of two both are exact. Under a zero scale the codes are 0.

    Args:
        x: ``[..., W]`` float.
        tile: values under one scale.
        scale_form: "power_of_two" or "float32".
        min_amax: the largest magnitude of a tile is raised to this first.

    Returns:
        ``(codes [..., W] float8_e4m3fn, scales [..., ceil(W / tile)] float32)``.
    """
    width = x.shape[-1]
    tiles = -(-width // tile)
    x = x.astype(jnp.float32)
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, tiles * tile - width)])
    scales = tile_scale(jnp.max(jnp.abs(padded.reshape(*x.shape[:-1], tiles, tile)), axis=-1), scale_form, min_amax)
    inverse = jnp.where(scales == 0, 0.0, 1.0 / scales)
    return e4m3(x * spread(inverse, tile, width)), scales


def spread(scales: jax.Array, tile: int, width: int) -> jax.Array:
    """Repeats the ``[..., T]`` scales of tiles over their values: ``[..., width]``."""
    wide = jnp.broadcast_to(scales[..., None], (*scales.shape, tile))
    return wide.reshape(*scales.shape[:-1], -1)[..., :width]


def dequantise(codes: jax.Array, scales: jax.Array, tile: int) -> jax.Array:
    """``codes * scales`` in float32; codes under a zero scale are not trusted, they give 0."""
    wide = spread(scales, tile, codes.shape[-1])
    return jnp.where(wide == 0, 0.0, codes.astype(jnp.float32) * wide)


def e8m0_byte(scale: jax.Array) -> jax.Array:
    """The byte ``exponent + 127`` of power-of-two float32 scales (0xFF for NaN)."""
    return (jax.lax.bitcast_convert_type(scale, jnp.int32) >> 23).astype(jnp.uint8)


def e8m0_value(byte: jax.Array) -> jax.Array:
    """The float32 value of UE8M0 bytes; byte 0 is read as 0 and 0xFF as NaN."""
    value = jax.lax.bitcast_convert_type(byte.astype(jnp.int32) << 23, jnp.float32)
    return jnp.where(byte == 0xFF, jnp.nan, value)


def to_bytes(x: jax.Array) -> jax.Array:
    """The little-endian bytes of the last axis: ``[..., W]`` -> uint8 ``[..., W * itemsize]``."""
    raw = jax.lax.bitcast_convert_type(x, jnp.uint8)
    return raw if raw.ndim == x.ndim else raw.reshape(*x.shape[:-1], -1)


def from_bytes(raw: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Inverse of ``to_bytes``."""
    size = jnp.dtype(dtype).itemsize
    if size > 1:
        raw = raw.reshape(*raw.shape[:-1], -1, size)
    return jax.lax.bitcast_convert_type(raw, dtype)


def hadamard(x: jax.Array) -> jax.Array:
    """The orthonormal Walsh-Hadamard transform of the last axis (Sylvester order), its own inverse.

    Element by element (log2 W stages of half sums and half differences, then one multiplication by W^0.5), so that the
    bits of a row do not depend on the number of rows, and no intermediate overflows; a result beyond float32 saturates.

    Args:
        x: ``[..., W]`` float, W a power of two.

    Returns:
        ``[..., W]`` float32.
    """
    width = x.shape[-1]
    if width & (width - 1):
        raise ValueError(f"Expected {width=} to be a power of two")
    y = x.astype(jnp.float32)
    half = 1
    while half < width:
        pairs = y.reshape(*x.shape[:-1], width // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        a, b = 0.5 * a, 0.5 * b
        y = jnp.stack([a + b, a - b], axis=-2)
        half *= 2
    largest = jnp.finfo(jnp.float32).max
    return jnp.clip(y.reshape(x.shape) * jnp.float32(width**0.5), -largest, largest)
