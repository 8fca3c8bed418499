"""Pieces that the networks share: packed small vectors, matrix products, norms, embeddings."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx


def weight(shape: tuple[int, ...], dtype: str) -> nnx.Param:
    """A parameter of zeros; modules are built under ``nnx.eval_shape``, so nothing is allocated."""
    return nnx.Param(jnp.zeros(shape, dtype))


class Packed(nnx.Module):
    """Many small float32 arrays of a layer in one parameter, so that a step has few leaves.

    ``packed["name"]`` gives the array. ``place`` tells a loader where a named array lies.
    """

    def __init__(self, fields: Sequence[tuple[str, tuple[int, ...]]]):
        self.fields = tuple(fields)
        self.values = weight((sum(math.prod(shape) for _, shape in self.fields),), "float32")

    def place(self, name: str) -> tuple[slice, tuple[int, ...]]:
        start = 0
        for field, shape in self.fields:
            size = math.prod(shape)
            if field == name:
                return slice(start, start + size), shape
            start += size
        raise KeyError(f"Expected {name=} to be one of {[field for field, _ in self.fields]}")

    def __getitem__(self, name: str) -> jax.Array:
        where, shape = self.place(name)
        return self.values[...][where].reshape(shape)


def product(x: jax.Array, w: jax.Array, out_dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """``x [..., in]`` times ``w [out, in]``: accumulated in float32, returned in ``out_dtype`` (default: of ``x``)."""
    out = jax.lax.dot_general(
        x,
        w.astype(x.dtype) if w.dtype != x.dtype and x.dtype == jnp.float32 else w,
        (((x.ndim - 1,), (w.ndim - 1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    return out.astype(x.dtype if out_dtype is None else out_dtype)


def einsum(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """``jnp.einsum`` with float32 accumulation, full precision for float32 inputs; dtype of ``x``."""

    def narrow(x: jax.Array, w: jax.Array) -> jax.Array:
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        return jnp.einsum(spec, x, w, precision=precision, preferred_element_type=jnp.float32)

    def widened(x: jax.Array, w: jax.Array) -> jax.Array:
        return narrow(x.astype(jnp.float32), w.astype(jnp.float32))

    if x.dtype == jnp.float32:
        return narrow(x, w)
    # XLA's CPU backend lacks some batched bf16 products with float32 results.
    return jax.lax.platform_dependent(x, w, cpu=widened, default=narrow).astype(x.dtype)


def rms_norm(x: jax.Array, scale: jax.Array | None, eps: float) -> jax.Array:
    """``x * rsqrt(mean(x^2) + eps) * scale`` in float32, cast once at the end."""
    x32 = x.astype(jnp.float32)
    out = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (out if scale is None else out * scale).astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Layer normalisation with weight and bias in float32, cast once at the end."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    out = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (out * scale + bias).astype(x.dtype)


def embed(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows of ``table [V, D]``; an id outside ``0..V-1`` gives zeros (JAX alone would let -1 read the last row)."""
    vocab = table.shape[0]
    inside = (ids >= 0) & (ids < vocab)
    return jnp.where(inside[..., None], table[jnp.where(inside, ids, 0)], 0)


def swiglu(gate_up: jax.Array, limit: float | None) -> jax.Array:
    """``silu(gate) * up`` in float32 of ``[gate | up]``; V4 clamps the gate from above and ``up`` on both sides."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return jax.nn.silu(gate) * up
