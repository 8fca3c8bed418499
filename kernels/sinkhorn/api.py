"""Public function of the Sinkhorn iterations: checks, then the implementation."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .. import dispatch, launch
from ..checks import check_dtype, check_shape
from . import xla

WIDEST = 16  # streams of a kernel


def _refuses(shapes: Mapping[str, Any]) -> str | None:
    """Why the Triton kernel cannot serve, or None; see ``launch.register``."""
    streams = shapes["N"]
    if streams < 2 or streams > WIDEST or streams & (streams - 1):
        return f"the number of streams must be a power of two from 2 to {WIDEST}, got {streams}"
    return None


launch.register("sinkhorn", f"{__package__}.triton", _refuses)
dispatch.register("sinkhorn", "xla", xla.sinkhorn)


def sinkhorn(logits: jax.Array, *, iters: int, eps: float, implementation: str | None = None) -> jax.Array:
    """Near doubly stochastic matrices, which mix the residual streams of hyper-connections.

    A softmax over rows plus ``eps``, then ``2 * iters - 1`` normalisations, of columns and rows in turn and ending on
    columns, each of which divides by the sum plus ``eps`` (DeepSeek-V4 `inference/model.py`).

    Args:
        logits: ``[R, N, N]`` float32.
        iters: of the iterations, at least 1.
        eps: added to each sum.
        implementation: "triton", "xla", or None for the best.

    Returns:
        ``[R, N, N]`` float32.

    Raises:
        TypeError: a dtype other than stated.
        ValueError: a shape or number other than stated, an implementation that cannot run.
    """
    check_dtype("logits", logits, jnp.float32)
    check_shape("logits", logits, (None, None, None), "[R, N, N]")
    rows, streams, others = logits.shape
    if streams != others or not streams:
        raise ValueError(f"Expected {logits.shape=} to be [R, N, N] with N of at least 1")
    if iters < 1:
        raise ValueError(f"Expected {iters=} to be at least 1")
    shapes = {"R": rows, "N": streams}
    return dispatch.call("sinkhorn", implementation, shapes, jnp.asarray(logits), iters=iters, eps=eps)
