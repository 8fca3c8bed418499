"""Rotary position embedding: frequencies (plain and YaRN), tables of cosines and sines, and the two pairings."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jmla.kernels.rotary import rotate, rotate_tail
from jmla.models.config import Yarn

__all__ = ["cos_sin", "inverse_frequencies", "rotate", "rotate_head", "rotate_tail"]


@functools.lru_cache(maxsize=64)
def inverse_frequencies(dims: int, theta: float, yarn: Yarn | None) -> np.ndarray:
    """Angular frequency of each of the ``dims / 2`` pairs, float32.

    YaRN (Peng et al. 2023, section 3.2): pairs that turn more than ``beta_fast`` times within the original context keep
    their frequency, pairs that turn less than ``beta_slow`` times are slowed by ``factor``, with a linear ramp between.
    """
    pairs = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    base = (np.float32(1.0) / np.power(np.float32(theta), pairs, dtype=np.float32)).astype(np.float32)
    if yarn is None:
        return base

    def pair_of(turns: float) -> float:
        return dims * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), dims - 1)
    span = np.float32(max(high - low, 1e-3))
    ramp = np.clip((np.arange(dims // 2, dtype=np.float32) - np.float32(low)) / span, 0, 1).astype(np.float32)
    return (base / np.float32(yarn.factor) * ramp + base * (np.float32(1) - ramp)).astype(np.float32)


def cos_sin(positions: jax.Array, frequencies: np.ndarray, magnitude: float = 1.0) -> jax.Array:
    """Table rows for ``positions [...]`` (int32): ``[..., dims]`` float32, first all cosines, then all sines."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1) * np.float32(magnitude)


def rotate_head(x: jax.Array, table: jax.Array, *, interleaved: bool) -> jax.Array:
    """Rotates the first ``table.shape[-1]`` values of ``x``; same dtype as ``x``."""
    dims = table.shape[-1]
    turned = rotate(x[..., :dims], table, interleaved=interleaved).astype(x.dtype)
    return jnp.concatenate([turned, x[..., dims:]], axis=-1)
