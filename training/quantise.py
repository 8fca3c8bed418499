"""Straight-through quantisation of the weights in training, to the formats in which they are stored.

Matrices that the published V4 dialect stores in FP8 are rounded to e4m3 in 128 x 128 blocks with power-of-two scales,
routed experts to e2m1 in blocks of 32 along the input. The gradient passes as if nothing had happened.
"""

from typing import Any

import jax
import jax.numpy as jnp

FP8 = {"wq_a", "wq_b", "wkv", "wo_a", "wo_b", "index_q", "shared_gate_up", "shared_down", "e_proj", "h_proj"}
FP4 = {"gate_up", "down"}


def _power_of_two(x: jax.Array) -> jax.Array:
    """The smallest power of two at or above ``x > 0``."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    up = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return jax.lax.bitcast_convert_type(up << 23, jnp.float32)


def _through(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Rounds to a narrow type and back; the barrier keeps the compiler from taking the two casts for nothing."""
    return jax.lax.optimization_barrier(x.astype(dtype)).astype(jnp.float32)


def fp8(w: jax.Array) -> jax.Array:
    """``w [..., out, in]`` rounded to e4m3 with one power-of-two scale a block of 128 x 128."""
    rows, cols = w.shape[-2:]
    r, c = -(-rows // 128), -(-cols // 128)
    padded = jnp.pad(w, [(0, 0)] * (w.ndim - 2) + [(0, r * 128 - rows), (0, c * 128 - cols)])
    blocks = padded.reshape(*w.shape[:-2], r, 128, c, 128)
    scale = _power_of_two(jnp.maximum(jnp.max(jnp.abs(blocks), axis=(-3, -1), keepdims=True), 1e-4) / 448)
    back = _through(blocks / scale, jnp.float8_e4m3fn) * scale
    return back.reshape(padded.shape)[..., :rows, :cols]


def fp4(w: jax.Array) -> jax.Array:
    """``w [..., out, in]`` rounded to e2m1 with one power-of-two scale for 32 inputs."""
    blocks = w.reshape(*w.shape[:-1], -1, 32)
    scale = _power_of_two(jnp.maximum(jnp.max(jnp.abs(blocks), axis=-1, keepdims=True), 1e-30) / 6)
    return (_through(blocks / scale, jnp.float4_e2m1fn) * scale).reshape(w.shape)


def straight_through(params: Any, amount: jax.Array | float = 1.0) -> Any:
    """The parameters as they will be read back from the checkpoint, with the identity as their gradient.

    ``amount`` 0 leaves them as they are, so that one compiled step serves both phases of the training.
    """

    def one(path: Any, w: jax.Array) -> jax.Array:
        name = path[-1].key
        if name == "shared_gate_up":  # one array here, two matrices with scales of their own in the checkpoint
            rounded = jnp.concatenate([fp8(half) for half in jnp.split(w, 2, axis=-2)], axis=-2)
        elif name in FP8:
            rounded = fp8(w.reshape(*w.shape[:-3], -1, w.shape[-1]) if name == "wo_a" else w).reshape(w.shape)
        elif name in FP4:
            rounded = fp4(w)
        else:
            return w
        return w + jax.lax.stop_gradient(rounded - w) * amount

    return jax.tree_util.tree_map_with_path(one, params)
