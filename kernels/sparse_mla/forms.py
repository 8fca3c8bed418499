"""How the Triton kernels cut rows into pieces, and which rows they cannot cut; needs no Triton."""

import math
from collections.abc import Mapping
from typing import Any

from ..layouts import KVLayout

LOG2E, LN2 = math.log2(math.e), math.log(2)  # the kernels' exponentials are of base 2
# PTX that moves the bits of the four e4m3 codes in $2 into those of bf16 values, 2^-120 times as large: codes 0 and 1
# in c, codes 2 and 3 in d. (A conversion instruction would take longer.)
PLACE = """
    .reg .b32 a, b, c, d;
    prmt.b32 a, $2, 0, 0x1404;
    prmt.b32 b, $2, 0, 0x3424;
    shr.u32 c, a, 4;
    shr.u32 d, b, 4;
    and.b32 c, c, 0x07f007f0;
    and.b32 d, d, 0x07f007f0;
    lop3.b32 c, a, 0x80008000, c, 0xEA;
    lop3.b32 d, b, 0x80008000, d, 0xEA;
"""
CHUNK = 128  # most dims of one matrix product
WIDEST = 640  # values of a row
NARROW = 128  # values of an output under the first of its two powers of two, see gluon.py


def _powers(width: int) -> tuple[int, ...]:
    """Powers of two, falling and at most ``CHUNK``, that sum to ``width``."""
    out: list[int] = []
    while width:
        out.append(min(CHUNK, 1 << (width.bit_length() - 1)))
        width -= out[-1]
    return tuple(out)


def chunks(layout: KVLayout, v_dim: int) -> tuple[tuple[int, ...], int, int]:
    """Widths of the chunks, how many are quantised, and how many are values."""
    if layout.kind == "plain":
        values = _powers(v_dim)
        return values + _powers(layout.width - v_dim), 0, len(values)
    codes = _powers(layout.nope)
    widths = codes + _powers(layout.rope)
    return widths, len(codes), len(codes) if layout.kind == "inline" else len(widths)


def alignment(layout: KVLayout) -> int:
    return math.gcd(16, layout.page_stride, layout.row_bytes)


def refuses(shapes: Mapping[str, Any]) -> str | None:
    """Why the kernel cannot serve, or None; see ``launch.register``."""
    layouts, v_dim = shapes["_layouts"], shapes["v_dim"]
    first = layouts[0]
    for layout in layouts:
        if any(
            getattr(layout, name) != getattr(first, name) for name in ("kind", "nope", "rope", "tile", "value_dtype")
        ):
            return "two pools must hold rows of one form"
        if alignment(layout) < (4 if layout.kind == "inline" else 2):
            return f"rows must lie at multiples of their values' bytes, the page stride is {layout.page_stride}"
    if first.value_dtype == "float32" or shapes["q"] == "float32":
        return "the products are bfloat16, too coarse for float32"
    widths, codes, _ = chunks(first, v_dim)
    if min(widths) < 16 or len(widths) > 12:
        return f"rows must be sums of a few powers of two from 16 on, got {first.nope} + {first.rope} and {v_dim=}"
    if codes and (first.tile & (first.tile - 1) or (first.kind == "inline" and first.tile < CHUNK)):
        return f"the tile of a scale must be a power of two, for inline rows at least {CHUNK}; got {first.tile}"
    if sum(widths) > WIDEST:
        return f"rows of up to {WIDEST} values fit in shared memory, got {sum(widths)}"
    return None
