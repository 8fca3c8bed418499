"""The merge in XLA: element-wise but for sums over the parts."""

import jax
import jax.numpy as jnp


def merge(outs: jax.Array, lses: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """See ``jmla.kernels.merge``."""
    filled = lses != -jnp.inf
    top = jnp.max(lses, axis=0)
    some = top != -jnp.inf
    top = jnp.where(some, top, 0.0)
    weights = jnp.where(filled, jnp.exp(jnp.where(filled, lses - top, 0.0)), 0.0)
    total = jnp.sum(weights, axis=0)
    safe = jnp.where(some, total, 1.0)
    values = jnp.where(filled[..., None], outs.astype(jnp.float32), 0.0)
    out = jnp.sum(weights[..., None] * values, axis=0) / safe[..., None]
    lse = jnp.where(some, top + jnp.log(safe), -jnp.inf)
    if sinks is not None:
        # The share that the sink leaves to the keys, 1 / (1 + exp(sink - lse)), without overflow.
        share = jax.nn.sigmoid(jnp.where(some, lse, 0.0) - sinks)
        out = out * jnp.where(some, share, 0.0)[..., None]
    return out.astype(outs.dtype), lse
