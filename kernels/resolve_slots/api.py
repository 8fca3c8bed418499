"""Public function of the index conversion: checks, then the implementation."""

from typing import Any

import jax
import jax.numpy as jnp

from .. import dispatch, launch
from ..checks import check_shape, check_values, checking, int32_array
from . import xla

launch.register("resolve_slots", f"{__package__}.triton")
dispatch.register("resolve_slots", "xla", xla.resolve_slots)


def resolve_slots(
    local: Any,
    rows: Any,
    table: Any,
    *,
    page_size: int,
    layer_offset: Any = 0,
    window: tuple[Any, int, int, Any, Any] | None = None,
    split: bool = True,
    implementation: str | None = None,
) -> Any:
    """Turns request-local ids into slot ids.

    ``slot = table[rows, local // page_size] * page_size + local % page_size + layer_offset``, and -1 where the local id
    is negative or past the table's width, the table holds no page (-1), the row is a padding row (outside the table),
    or the slot would not fit int32. The bound is that of the row's own table entry, so an id past a request's pages
    never lands in those of another. Ids stay in their columns; the length of a row is 1 + its last valid column, a
    bound on columns and not a count. Any width is served.

    The window of a query at position p with length L is the raw positions ``max(p - L + 1, 0) .. p``: column j is
    ``max(p - L + 1, 0) + j``, ascending and left-packed, -1 past p.

    Args:
        local: ``[R, K]`` int32 ids within the request; None with ``window`` for the window alone.
        rows: ``[R]`` int32, the row of the table that each query row belongs to; outside it: a padding row.
        table: ``[B, W]`` int32 page ids, -1 for no page.
        page_size: rows a page in the local stream.
        layer_offset: int32 scalar in slots, not negative, may be traced.
        window: ``(window_table [B, W'], window_page_size, window_length, positions [R], window_layer_offset)``.
        split: two segments with a length each (True), or one combined row.
        implementation: "triton", "xla", or None for the best.

    Returns:
        ``(slots [R, K] int32, lengths [R] int32)`` without ``window``. With it: ``(slots [R, L], lengths)`` of the
        window for ``local=None``; ``((slots [R, L], lengths), (extra_slots [R, K], extra_lengths))`` with ``split``,
        window first; else one ``(slots [R, L + K], lengths)``, in which all L window columns count before the local
        length, and the length of a padding row is 0.

    Raises:
        TypeError: a dtype other than integer (int32 for JAX arrays).
        ValueError: shapes that do not agree (nothing is broadcast), host values beyond int32, neither ``local`` nor
            ``window``, an implementation that cannot run.
    """
    if local is None and window is None:
        raise ValueError("Expected local ids, a window, or both")
    rows, table = int32_array("rows", rows), int32_array("table", table)
    check_shape("rows", rows, (None,), "[R]")
    check_shape("table", table, (None, None), "[B, W]")
    count = rows.shape[0]
    layer_offset = _scalar("layer_offset", layer_offset)
    if page_size < 1:
        raise ValueError(f"Expected {page_size=} to be at least 1")
    if local is not None:
        local = int32_array("local", local)
        check_shape("local", local, (count, None), "[R, K]")
    shapes: dict[str, Any] = {"page_size": page_size, "window": None, "split": split}
    if window is not None:
        window_table, window_page_size, window_length, positions, window_offset = window
        window_table, positions = int32_array("window_table", window_table), int32_array("positions", positions)
        check_shape("window_table", window_table, (table.shape[0], None), "[B, W']")
        check_shape("positions", positions, (count,), "[R]")
        if window_page_size < 1 or window_length < 1:
            raise ValueError(f"Expected {window_page_size=} and {window_length=} to be at least 1")
        window = (window_table, window_page_size, window_length, positions, _scalar("window offset", window_offset))
        shapes["window"] = window_length
    if checking():
        _check_values(local, rows, table, page_size, window)
    return dispatch.call(
        "resolve_slots",
        implementation,
        shapes,
        local,
        rows,
        table,
        layer_offset,
        *_arrays(window),
        page_size=page_size,
        window_sizes=window and window[1:3],
        split=split,
    )


def _arrays(window: tuple[Any, int, int, Any, Any] | None) -> tuple[Any, Any, Any]:
    return (None, None, None) if window is None else (window[0], window[3], window[4])


def _scalar(name: str, x: Any) -> jax.Array:
    x = int32_array(name, x)
    check_shape(name, x, (), "[]")
    return x


def _check_values(local: Any, rows: jax.Array, table: jax.Array, page_size: int, window: Any) -> None:
    op = "resolve_slots"
    batch, width = table.shape
    check_values(op, "rows", (rows < -1) | (rows >= batch), rows, f"to be -1 or in [0, {batch})")
    check_values(op, "table", table < -1, table, "to be -1 or a page id")
    if local is not None:
        bad = ((local < -1) | (local >= width * page_size)) & (rows >= 0)[:, None]
        check_values(op, "local", bad, local, f"to be -1 or in [0, {width * page_size})")
    if window is not None:
        positions = window[3]
        end = window[0].shape[1] * window[1]
        check_values(
            op, "positions", (positions < -1) | (positions >= jnp.int32(end)), positions, f"to be -1 or in [0, {end})"
        )
