"""Which rows the CuTe DSL kernel takes where none is named: those like the ones it was measured to be faster on."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..shapes import ATTENTION

NEAR = 4.0  # factor in rows and in columns within which a measurement tells of other shapes


class Measured(NamedTuple):
    """Microseconds of a call on an H200 among many in one program, as ``jmla.bench.sparse_mla`` times them."""

    case: str  # of ``shapes.ATTENTION``
    rows: int
    cute: float
    triton: float


MEASURED = (  # forms whose checks were run on the device too; others are not chosen
    Measured("v4-flash-csa", 1, 10.4, 10.4),
    Measured("v4-flash-csa", 8, 15.9, 12.5),
    Measured("v4-flash-csa", 16, 23.2, 15.3),
    Measured("v4-flash-csa", 32, 18.8, 19.6),
    Measured("v4-flash-csa", 64, 17.8, 27.0),
    Measured("v4-flash-csa", 128, 28.7, 34.9),
)


def nearest(shapes: Mapping[str, Any]) -> Measured | None:
    """The measurement of as many heads and a like layout that is nearest in rows and columns, if one is near.

    All are of bfloat16 queries without an epilogue.
    """
    rows, columns, layout = shapes["R"], sum(shapes["_columns"]), shapes["_layouts"][0]

    def factor(found: Measured) -> float:
        shape = ATTENTION[found.case]
        known = shape.heads, shape.layout.kind, shape.layout.scale_form
        if known != (shapes["H"], layout.kind, layout.scale_form) or not rows or not columns:
            return math.inf
        ratios = rows / found.rows, columns / (shape.columns + shape.extra_columns)
        return max(max(ratio, 1 / ratio) for ratio in ratios)

    if shapes["q"] != "bfloat16" or shapes["epilogue"]:
        return None
    found = min(MEASURED, key=factor)
    return found if factor(found) <= NEAR else None


def slower(shapes: Mapping[str, Any]) -> str | None:
    """Why Triton's kernel is to serve, or None."""
    if shapes["_deterministic"]:
        return "is chosen by the number of rows, on which deterministic results must not depend"
    found = nearest(shapes)
    if found is None:
        return "was not measured to be faster than triton on shapes like these"
    return None if found.cute < found.triton else _said(found)


def faster(shapes: Mapping[str, Any]) -> str | None:
    """Why the CuTe DSL kernel is to serve."""
    found = nearest(shapes)
    return None if found is None else _said(found)


def _said(found: Measured) -> str:
    return f"{found.cute} us against {found.triton} of triton on {found.case}, batch {found.rows}"
