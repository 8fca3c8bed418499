"""Public function of the selection: checks, then the implementation."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .. import dispatch, launch
from ..checks import check_float, check_shape, int32_array
from . import xla

CHUNK = 32_768  # columns that one program of the kernel holds; a wider row is narrowed first


def _refuses(shapes: Mapping[str, Any]) -> str | None:
    if shapes["n"] > CHUNK < 2 * shapes["k"]:
        return f"chooses at most {CHUNK // 2} of more than {CHUNK} columns"
    return None


launch.register("top_k", f"{__package__}.triton", _refuses)
dispatch.register("top_k", "xla", xla.top_k)


def top_k(scores: jax.Array, lengths: jax.Array | None, k: int, *, implementation: str | None = None) -> jax.Array:
    """The columns of the k largest scores of each row, exactly.

    Of equal scores (0.0 and -0.0 are equal) the lower columns are chosen. Columns from ``lengths`` on, -inf and NaN
    never are. They are given in ascending order, whatever their scores, and what is missing to k is -1, at the end: so
    a row is a function of the set that is chosen, and holds ``min(k, eligible columns)`` distinct columns.

    Args:
        scores: ``[R, n]`` float.
        lengths: ``[R]`` int32 columns of each row that count, or None for all; zero or less: none.
        k: columns to choose; may exceed n.
        implementation: "triton", "xla", or None for the best.

    Returns:
        ``[R, k]`` int32.

    Raises:
        TypeError: a dtype other than stated.
        ValueError: a shape or k other than stated.
    """
    check_float("scores", scores)
    check_shape("scores", scores, (None, None), "[R, n]")
    if k < 1:
        raise ValueError(f"Expected {k=} to be at least 1")
    rows, n = scores.shape
    if lengths is not None:
        lengths = int32_array("lengths", lengths)
        check_shape("lengths", lengths, (rows,), "[R]")
    return dispatch.call("top_k", implementation, {"R": rows, "n": n, "k": k}, jnp.asarray(scores), lengths, k=k)
