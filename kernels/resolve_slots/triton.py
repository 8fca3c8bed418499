"""The index conversion as one Triton kernel: a program converts one segment of one row and finds its length."""

from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ..fallback import with_xla_rules
from ..launch import launch
from ..layouts import MAX_SLOTS
from . import xla

PROGRAM_COLUMNS = 2048  # ids that a program holds at a time
THREAD_COLUMNS = 8  # ids of a thread

_MAX_SLOTS = tl.constexpr(MAX_SLOTS)


@triton.jit
def _segment(
    local,
    position,
    table,
    pages,
    layer_offset,
    slots,
    COLUMNS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the slots of a row whose table has ``pages`` entries, and gives 1 + its last valid column.

    Without ``local`` ids: the slots of its window.
    """
    bound = 0
    for start in tl.range(0, COLUMNS, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < COLUMNS
        if local is None:
            ids = tl.maximum(position - COLUMNS + 1, 0) + column
            ids = tl.where(ids <= position, ids, -1)
        else:
            ids = tl.load(local + column, mask=inside, other=-1)
        ordinal, offset = ids // PAGE_SIZE, ids % PAGE_SIZE
        valid = inside & (ids >= 0) & (ordinal < pages)
        page = tl.load(table + ordinal, mask=valid, other=-1)
        room = _MAX_SLOTS - layer_offset - offset
        valid = (page >= 0) & (room >= 0) & (page <= room // PAGE_SIZE)
        tl.store(slots + column, tl.where(valid, page * PAGE_SIZE + offset + layer_offset, -1), mask=inside)
        bound = tl.maximum(bound, tl.max(tl.where(valid, column + 1, 0)))
    return bound


@triton.jit
def _resolve(
    local,
    rows,
    table,
    layer_offset,
    window_table,
    positions,
    window_offset,
    batch,
    pages,
    window_pages,
    slots,
    lengths,
    extra_slots,
    extra_lengths,
    COLUMNS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    WINDOW_PAGE_SIZE: tl.constexpr,
    WINDOW_BLOCK: tl.constexpr,
):
    """Grid (rows, segments): the window, then the local ids; without ``extra_slots`` side by side in one row."""
    SPLIT: tl.constexpr = extra_slots is not None
    STRIDE: tl.constexpr = WINDOW if SPLIT else WINDOW + COLUMNS
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    request = tl.load(rows + row)
    real = (request >= 0) & (request < batch)
    request = tl.where(real, request, 0).to(tl.int64)
    if WINDOW > 0:
        position = tl.load(positions + row)
        if segment == 0:
            bound = _segment(
                None,
                position,
                window_table + request * window_pages,
                tl.where(real, window_pages, 0),
                tl.load(window_offset),
                slots + row * STRIDE,
                WINDOW,
                WINDOW_PAGE_SIZE,
                WINDOW_BLOCK,
            )
            if SPLIT or COLUMNS == 0:
                tl.store(lengths + row, bound)
    if COLUMNS > 0 and segment == (WINDOW > 0):
        bound = _segment(
            local + row * COLUMNS,
            None,
            table + request * pages,
            tl.where(real, pages, 0),
            tl.load(layer_offset),
            extra_slots + row * COLUMNS if SPLIT else slots + row * STRIDE + WINDOW,
            COLUMNS,
            PAGE_SIZE,
            BLOCK,
        )
        if SPLIT:
            tl.store(extra_lengths + row, bound)
        elif WINDOW > 0:
            tl.store(lengths + row, tl.where(real & (position >= 0), WINDOW + bound, 0))
        else:
            tl.store(lengths + row, bound)


def _block(columns: int) -> int:
    return min(1 << max(columns - 1, 0).bit_length(), PROGRAM_COLUMNS)


def _resolve_slots(
    local: jax.Array | None,
    rows: jax.Array,
    table: jax.Array,
    layer_offset: jax.Array,
    window_table: jax.Array | None,
    positions: jax.Array | None,
    window_offset: jax.Array | None,
    *,
    page_size: int,
    window_sizes: tuple[int, int] | None,
    split: bool,
) -> Any:
    """See ``jmla.kernels.resolve_slots``."""
    operands = (local, rows, table, layer_offset, window_table, positions, window_offset)
    if any(x is not None and x.size == 0 for x in operands):
        return xla.resolve_slots(*operands, page_size=page_size, window_sizes=window_sizes, split=split)
    count = rows.shape[0]
    columns = 0 if local is None else local.shape[1]
    window_page_size, window = (1, 0) if window_sizes is None else window_sizes
    both = columns > 0 and window > 0
    widths = [window, columns] if both and split else [window + columns]
    shapes = [shape for width in widths for shape in ((count, width), (count,))]
    absent: dict[str, Any] = {} if len(widths) == 2 else {"extra_slots": None, "extra_lengths": None}
    out = launch(
        _resolve,
        *operands,
        table.shape[0],  # these three are no constants: engines have many of them
        table.shape[1],
        0 if window_table is None else window_table.shape[1],
        out=tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes),
        grid=(count, 2 if both else 1),
        num_warps=min(max(max(_block(columns), _block(window)) // (32 * THREAD_COLUMNS), 1), 16),
        COLUMNS=columns,
        PAGE_SIZE=page_size,
        BLOCK=_block(columns),
        WINDOW=window,
        WINDOW_PAGE_SIZE=window_page_size,
        WINDOW_BLOCK=_block(window),
        **absent,
    )
    return out if len(widths) == 1 else (out[:2], out[2:])


resolve_slots = with_xla_rules(_resolve_slots, xla.resolve_slots)
