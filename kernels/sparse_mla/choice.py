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


MEASURED = (  # benchmarks/cute_h200.json
    Measured("v3.2", 1, 12.6, 13.3),
    Measured("v3.2", 2, 14.4, 14.5),
    Measured("v3.2", 4, 16.6, 16.7),
    Measured("v3.2", 8, 21.7, 21.9),
    Measured("v3.2", 16, 31.9, 33.4),
    Measured("v3.2", 32, 47.3, 56.1),
    Measured("v3.2", 64, 84.7, 98.6),
    Measured("v3.2", 128, 166.5, 186.1),
    Measured("v3.2", 256, 329.5, 359.6),
    Measured("v4-flash-csa", 1, 8.5, 10.5),
    Measured("v4-flash-csa", 2, 9.7, 11.0),
    Measured("v4-flash-csa", 4, 10.3, 11.6),
    Measured("v4-flash-csa", 8, 11.2, 12.5),
    Measured("v4-flash-csa", 16, 13.8, 15.5),
    Measured("v4-flash-csa", 32, 16.4, 19.6),
    Measured("v4-flash-csa", 64, 19.5, 27.0),
    Measured("v4-flash-csa", 128, 29.1, 34.9),
    Measured("v4-flash-csa", 256, 55.2, 66.4),
    Measured("v4-pro-csa", 1, 10.9, 12.8),
    Measured("v4-pro-csa", 2, 12.2, 13.6),
    Measured("v4-pro-csa", 4, 14.3, 15.3),
    Measured("v4-pro-csa", 8, 16.7, 18.1),
    Measured("v4-pro-csa", 16, 21.7, 24.0),
    Measured("v4-pro-csa", 32, 27.6, 36.5),
    Measured("v4-pro-csa", 64, 44.4, 54.0),
    Measured("v4-pro-csa", 128, 84.8, 103.2),
    Measured("v4-pro-csa", 256, 167.0, 201.3),
    Measured("v4-flash-hca", 1, 14.8, 19.9),
    Measured("v4-flash-hca", 8, 30.4, 36.6),
    Measured("v4-flash-hca", 64, 149.9, 180.7),
    Measured("v4-pro-hca", 1, 16.7, 21.1),
    Measured("v4-pro-hca", 8, 45.6, 54.9),
    Measured("v4-pro-hca", 64, 272.3, 326.9),
    Measured("glm-5", 1, 13.0, 13.2),
    Measured("glm-5", 8, 17.0, 17.5),
    Measured("glm-5", 64, 49.5, 59.2),
)


def nearest(shapes: Mapping[str, Any]) -> Measured | None:
    """The measurement of as many heads and a like layout that is nearest in rows and columns, if one is near.

    All are of bfloat16 queries. An epilogue leaves the choice: it costs either kernel the same at most.
    """
    rows, columns, layout = shapes["R"], sum(shapes["_columns"]), shapes["_layouts"][0]

    def factor(found: Measured) -> float:
        shape = ATTENTION[found.case]
        known = shape.heads, shape.layout.kind, shape.layout.scale_form
        if known != (shapes["H"], layout.kind, layout.scale_form) or not rows or not columns:
            return math.inf
        ratios = rows / found.rows, columns / (shape.columns + shape.extra_columns)
        return max(max(ratio, 1 / ratio) for ratio in ratios)

    if shapes["q"] != "bfloat16":
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
