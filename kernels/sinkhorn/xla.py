"""Sinkhorn iterations in plain JAX."""

import jax
import jax.numpy as jnp


def sinkhorn(logits: jax.Array, *, iters: int, eps: float) -> jax.Array:
    """See ``jmla.kernels.sinkhorn``."""
    mix = jax.nn.softmax(logits, axis=-1) + eps
    mix = mix / (jnp.sum(mix, axis=-2, keepdims=True) + eps)

    def step(mix: jax.Array, _: None) -> tuple[jax.Array, None]:
        mix = mix / (jnp.sum(mix, axis=-1, keepdims=True) + eps)
        return mix / (jnp.sum(mix, axis=-2, keepdims=True) + eps), None

    return jax.lax.scan(step, mix, None, length=iters - 1)[0]
