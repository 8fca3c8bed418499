"""Public function of the selection: checks, then the implementation."""

import jax
import jax.numpy as jnp

from . import xla


def top_k(scores: jax.Array, lengths: jax.Array | None, k: int) -> jax.Array:
    """The columns of the k largest scores of each row, exactly.

    Sorted by score, largest first, equal scores (0.0 and -0.0 are equal) by column. Columns from ``lengths`` on, -inf
    and NaN are never chosen; what is missing to k is -1, at the end. So a row holds ``min(k, eligible columns)``
    distinct columns.

    Args:
        scores: ``[R, n]`` float.
        lengths: ``[R]`` int32 columns of each row that count, or None for all; zero or less: none.
        k: columns to choose; may exceed n.

    Returns:
        ``[R, k]`` int32.

    Raises:
        TypeError: a dtype other than stated.
        ValueError: a shape or k other than stated.
    """
    if not jnp.issubdtype(scores.dtype, jnp.floating):
        raise TypeError(f"Expected scores to be floating point, got {scores.dtype}")
    if scores.ndim != 2:
        raise ValueError(f"Expected {scores.shape=} to be [R, n]")
    if k < 1:
        raise ValueError(f"Expected {k=} to be at least 1")
    if lengths is not None:
        if lengths.dtype != jnp.int32:
            raise TypeError(f"Expected lengths to be int32, got {lengths.dtype}")
        if lengths.shape != scores.shape[:1]:
            raise ValueError(f"Expected {lengths.shape=} to be {scores.shape[:1]} for {scores.shape=}")
    return xla.top_k(scores, lengths, k)
