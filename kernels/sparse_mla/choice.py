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
    Measured("v3.2", 1, 12.4, 12.9),
    Measured("v3.2", 4, 16.4, 16.9),
    Measured("v3.2", 8, 21.6, 21.9),
    Measured("v3.2", 16, 31.6, 33.4),
    Measured("v3.2", 32, 47.1, 56.0),
    Measured("v3.2", 64, 84.3, 98.7),
    Measured("v3.2", 128, 167.4, 187.4),
    Measured("v4-flash-csa", 1, 8.5, 10.3),
    Measured("v4-flash-csa", 8, 11.4, 12.5),
    Measured("v4-flash-csa", 16, 13.9, 15.3),
    Measured("v4-flash-csa", 32, 16.5, 19.6),
    Measured("v4-flash-csa", 64, 19.6, 27.0),
    Measured("v4-flash-csa", 128, 29.2, 34.9),
    Measured("v4-flash-csa", 256, 56.3, 66.6),
    Measured("v4-pro-csa", 1, 11.1, 12.6),
    Measured("v4-pro-csa", 8, 16.8, 18.5),
    Measured("v4-pro-csa", 32, 27.9, 36.5),
    Measured("v4-pro-csa", 64, 44.8, 54.3),
    Measured("v4-pro-csa", 128, 85.3, 104.2),
    Measured("v4-flash-hca", 1, 15.7, 19.7),
    Measured("v4-flash-hca", 8, 31.5, 36.8),
    Measured("v4-flash-hca", 64, 148.0, 181.1),
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
