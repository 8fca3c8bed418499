"""Manifold-constrained hyper-connections: several residual streams, collapsed before and mixed after each sublayer.

DeepSeek-V4 `inference/model.py`; everything is computed in float32.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jmla.models.config import V4Config
from jmla.models.layers import product, rms_norm, weight


class HyperHead(nnx.Module):
    """Collapse of the residual streams into one, before the final norm."""

    def __init__(self, config: V4Config):
        self.fn = weight((config.hc_mult, config.hc_mult * config.hidden_size), "float32")


def hyper_projection(x: jax.Array, fn: jax.Array, eps: float) -> jax.Array:
    """``(fn . v) * rsqrt(mean(v^2) + eps)`` of the flattened streams ``v``; ``x [R, N, D]``, ``fn [M, N * D]``."""
    flat = x.reshape(x.shape[0], -1).astype(jnp.float32)
    norm = jax.lax.rsqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + eps)
    return product(flat, fn) * norm


def weighted_sum(weights: jax.Array, x: jax.Array) -> jax.Array:
    """``sum_i weights[:, i] * x[:, i]`` in float32, in this order; ``[R, D]``."""
    total = weights[:, 0, None] * x[:, 0].astype(jnp.float32)
    for i in range(1, x.shape[1]):
        total = total + weights[:, i, None] * x[:, i].astype(jnp.float32)
    return total


def expand(x: jax.Array, y: jax.Array, post: jax.Array, mix: jax.Array) -> jax.Array:
    """Hyper-connection after a sublayer: ``X'_k = post_k y + sum_j mix[j, k] X_j``; ``[R, N, D]``."""
    streams = x.shape[1]
    y32, x32 = y.astype(jnp.float32), x.astype(jnp.float32)
    out = post[..., None] * y32[:, None, :]
    for j in range(streams):
        out = out + mix[:, j, :, None] * x32[:, j, None, :]
    return out.astype(x.dtype)


def head_logits(
    config: V4Config, x: jax.Array, fn: jax.Array, base: jax.Array, scale: jax.Array, norm: jax.Array, head: jax.Array
) -> jax.Array:
    """Collapse with sigmoid weights, RMSNorm, output head; float32 logits ``[R, V]``."""
    pre = jax.nn.sigmoid(hyper_projection(x, fn, config.rms_norm_eps) * scale[0] + base) + config.hc_eps
    collapsed = rms_norm(weighted_sum(pre, x).astype(x.dtype), norm, config.rms_norm_eps)
    return product(collapsed, head, jnp.float32)
