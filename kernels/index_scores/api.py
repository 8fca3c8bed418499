"""Public function of the index scores: checks, then the implementation."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .. import dispatch, launch
from ..checks import check_float, check_pool, check_shape, check_values, checking, int32_array
from ..layouts import KVLayout
from . import xla

SUSPICIOUS_COLUMNS = 32  # so many scores that are all zero are a fault, not a coincidence
TRITON_HEADS, TRITON_WIDTH = 256, 128  # at most, of the Triton kernel


def _triton_refuses(shapes: Mapping[str, Any]) -> str | None:
    if shapes["Hi"] > TRITON_HEADS or shapes["Di"] > TRITON_WIDTH:
        return f"takes up to {TRITON_HEADS} heads of up to {TRITON_WIDTH} values"
    if shapes["layout"] == "plain-float32":
        return "has no product of float32 keys"
    if shapes["layout"].startswith("plain") and shapes["q"] != "bfloat16":
        return f"meets plain keys with bfloat16 queries, not {shapes['q']}"
    if shapes["page"] % 4 or shapes["footer"] % 4:
        return "reads pages and scales at multiples of 4 bytes only"
    if shapes["_tiles"] > 1:
        return "reads one scale a row"
    return None


launch.register("index_scores", f"{__package__}.triton", _triton_refuses)
dispatch.register("index_scores", "xla", xla.index_scores)


def index_scores(
    q: jax.Array,
    weights: jax.Array,
    pool: jax.Array,
    *,
    layout: KVLayout,
    lengths: jax.Array | None = None,
    table: jax.Array | None = None,
    bounds: tuple[jax.Array, jax.Array] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Scores of queries against cached keys: ``score[r, n] = sum_h weights[r, h] * relu(q[r, h] . key[n])``.

    With a quantised layout q is first rotated if the layout's keys are, then quantised to e4m3 with one scale
    ``max(amax, 1e-4) / 448`` a row and head, as the keys are; with a plain layout it is used as it is. All factors
    (``heads^-0.5 * width^-0.5``) are in ``weights`` already.

    Keys are given by pages: with ``table`` and ``lengths``, column n of the rows of request b is offset
    ``n % page_size`` of page ``table[b, n // page_size]``, and columns from ``lengths`` on do not count. Or by
    ``bounds``: column n is slot n of the pool, and columns ``start <= n < end`` count. Keys that do not count, or whose
    page is -1 or not in the pool, score -inf whatever they hold.

    A row's scores are bitwise the same whatever rows stand beside it; with "triton" on compute capability 9.0 also
    however many rows a request has, and whether keys come by table or by bounds. Differentiable in ``q``, ``weights``
    and a typed pool where the layout is plain.

    Args:
        q: ``[R, Hi, Di]`` float.
        weights: ``[R, Hi]`` float.
        pool: a pool of ``layout``, bytes or typed.
        layout: of the pool.
        lengths: ``[R]`` int32, with ``table``; zero or less: no key.
        table: ``[B, W]`` int32 page ids; R is a multiple of B, and row r belongs to request ``r // (R / B)``.
        bounds: ``(start [R], end [R])`` int32, in place of ``lengths`` and ``table``.
        implementation: "triton", "xla", or None for the best.

    Returns:
        ``[R, n]`` float32; n is ``W * page_size`` with a table, ``pages * page_size`` with bounds.

    Raises:
        TypeError: a dtype other than stated.
        ValueError: a shape other than stated, or neither or both of table and bounds.
    """
    for name, array in (("q", q), ("weights", weights)):
        check_float(name, array)
    check_shape("q", q, (None, None, layout.width), "[R, Hi, Di]")
    rows, heads, dim = q.shape
    check_shape("weights", weights, (rows, heads), "[R, Hi]")
    if layout.kind not in ("index", "plain"):
        raise ValueError(f"Expected layout {layout.name} to be of index keys; supported kinds: index, plain")
    check_pool(pool, layout)
    if (table is None) == (bounds is None) or (lengths is None) != (table is None):
        raise ValueError("Expected table with lengths, or bounds alone")
    if bounds is not None:
        start, end = (int32_array(f"bounds[{i}]", bound) for i, bound in enumerate(bounds))
        check_shape("bounds[0]", start, (rows,), "[R]")
        pages = pool.shape[0]
    else:
        start, end, table = None, int32_array("lengths", lengths), int32_array("table", table)
        check_shape("table", table, (None, None), "[B, W]")
        requests, pages = table.shape
        if requests == 0 or rows % requests:
            raise ValueError(f"Expected the {rows} rows of q to be a multiple of the {requests} requests of the table")
    check_shape("lengths" if bounds is None else "bounds[1]", end, (rows,), "[R]")
    shapes = {
        "R": rows,
        "Hi": heads,
        "Di": dim,
        "columns": pages * layout.page_size,
        "layout": layout.name,
        "q": q.dtype.name,
        "page": layout.page_stride,
        "footer": layout.footer_offset,
        "_tiles": layout.num_tiles,
    }
    arrays = (jnp.asarray(q), jnp.asarray(weights), jnp.asarray(pool), start, end, table)
    scores = dispatch.call("index_scores", implementation, shapes, *arrays, layout=layout)
    if checking():
        _check_scores(scores)
    return scores


def _check_scores(scores: jax.Array) -> None:
    check_values("index_scores", "scores", jnp.isnan(scores), scores, "to hold no NaN")
    counted = scores > -jnp.inf
    zero = jnp.all((scores == 0) | ~counted, axis=1) & (jnp.sum(counted, axis=1) >= SUSPICIOUS_COLUMNS)
    check_values("index_scores", "row", zero, jnp.sum(counted, axis=1), "to have a score other than zero")
