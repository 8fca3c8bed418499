"""Selection by XLA's own top-k, on cleaned scores."""

import jax
import jax.numpy as jnp


def top_k(scores: jax.Array, lengths: jax.Array | None, *, k: int) -> jax.Array:
    """See ``jmla.kernels.top_k``."""
    n = scores.shape[1]
    scores = scores.astype(jnp.float32)
    if lengths is not None:
        scores = jnp.where(jnp.arange(n) < lengths[:, None], scores, -jnp.inf)
    # lax.top_k ranks NaN first, and 0.0 before -0.0; equal scores it gives in ascending order. Zeros are told by their
    # bits: in arithmetic on the CPU the smallest numbers are zeros too.
    minus_zero = jax.lax.bitcast_convert_type(scores, jnp.int32) == jnp.iinfo(jnp.int32).min
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, jnp.where(minus_zero, 0.0, scores))
    best, index = jax.lax.top_k(scores, min(k, n))
    index = jnp.sort(jnp.where(best > -jnp.inf, index.astype(jnp.int32), n), axis=1)
    index = jnp.where(index < n, index, -1)
    return jnp.pad(index, ((0, 0), (0, k - min(k, n))), constant_values=-1)
