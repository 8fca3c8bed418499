"""Public function of the merge: checks, then the implementation."""

import jax
import jax.numpy as jnp

from .. import dispatch
from ..checks import check_dtype, check_float, check_shape, check_values, checking
from . import xla

dispatch.register("merge", "xla", xla.merge)


def merge(
    outs: jax.Array, lses: jax.Array, sinks: jax.Array | None = None, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Joins attention results over disjoint parts of the keys into the result over all of them.

    ``L = log(sum_p exp(lse_p))``, ``out = sum_p exp(lse_p - L) * out_p``, natural logarithms, all in float32. A part
    whose lse is -inf is empty: it has no weight, and its output is not looked at (NaN included). When every part is
    empty the result is 0 and -inf. The sink enters here once, at the end: ``out * exp(L) / (exp(L) + exp(sink))``; so
    the parts must not hold it, and the returned lse does not either.

    Args:
        outs: ``[P, ..., H, D]`` float, normalised outputs of the parts, without sink.
        lses: ``[P, ..., H]`` float32.
        sinks: ``[H]`` float32 logits, not scaled, or None; -inf is no sink, +inf gives output 0.
        implementation: None or "xla".

    Returns:
        ``(out [..., H, D] of the dtype of outs, lse [..., H] float32)``.

    Raises:
        TypeError: a dtype other than stated.
        ValueError: shapes that do not agree, no part, an implementation that cannot run.
    """
    check_float("outs", outs)
    check_dtype("lses", lses, jnp.float32)
    if outs.ndim < 3 or outs.shape[0] == 0:
        raise ValueError(f"Expected {outs.shape=} to be [P, ..., H, D] with P of at least 1")
    check_shape("lses", lses, outs.shape[:-1], "[P, ..., H]")
    if sinks is not None:
        check_dtype("sinks", sinks, jnp.float32)
        check_shape("sinks", sinks, (outs.shape[-2],), "[H]")
    if checking():
        empty = lses == -jnp.inf
        check_values("merge", "lses", jnp.isnan(lses) | (lses == jnp.inf), lses, "to be finite or -inf")
        check_values("merge", "outs", ~jnp.isfinite(outs) & ~empty[..., None], outs, "to be finite in parts with keys")
        if sinks is not None:
            check_values("merge", "sinks", jnp.isnan(sinks), sinks, "to be numbers")
    shapes = {"parts": outs.shape[0], "dtype": outs.dtype.name}
    return dispatch.call("merge", implementation, shapes, outs, lses, sinks)
