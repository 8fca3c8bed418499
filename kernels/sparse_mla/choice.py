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
    Measured("v3.2", 1, 10.5, 13.0),
    Measured("v3.2", 2, 13.0, 14.5),
    Measured("v3.2", 4, 15.6, 16.8),
    Measured("v3.2", 8, 19.5, 22.0),
    Measured("v3.2", 16, 28.1, 33.4),
    Measured("v3.2", 32, 45.0, 56.1),
    Measured("v3.2", 64, 78.2, 98.0),
    Measured("v3.2", 128, 155.5, 186.1),
    Measured("v3.2", 256, 308.8, 359.1),
    Measured("v3.2", 4096, 4735.2, 5114.3),
    Measured("v4-flash-csa", 1, 7.3, 10.2),
    Measured("v4-flash-csa", 2, 8.2, 11.1),
    Measured("v4-flash-csa", 4, 9.0, 11.5),
    Measured("v4-flash-csa", 8, 10.3, 12.5),
    Measured("v4-flash-csa", 16, 12.5, 15.3),
    Measured("v4-flash-csa", 32, 15.6, 19.8),
    Measured("v4-flash-csa", 64, 19.1, 26.8),
    Measured("v4-flash-csa", 128, 28.1, 35.0),
    Measured("v4-flash-csa", 256, 53.6, 66.2),
    Measured("v4-flash-csa", 4096, 790.2, 932.3),
    Measured("v4-pro-csa", 1, 9.0, 12.5),
    Measured("v4-pro-csa", 2, 10.1, 13.6),
    Measured("v4-pro-csa", 4, 12.3, 15.1),
    Measured("v4-pro-csa", 8, 14.8, 18.3),
    Measured("v4-pro-csa", 16, 19.0, 24.2),
    Measured("v4-pro-csa", 32, 26.4, 36.4),
    Measured("v4-pro-csa", 64, 40.9, 53.8),
    Measured("v4-pro-csa", 128, 80.0, 103.2),
    Measured("v4-pro-csa", 256, 157.8, 200.8),
    Measured("v4-pro-csa", 4096, 2418.8, 2981.1),
    Measured("v4-flash-hca", 1, 14.0, 19.6),
    Measured("v4-flash-hca", 8, 27.9, 36.5),
    Measured("v4-flash-hca", 64, 141.6, 180.7),
    Measured("v4-pro-hca", 1, 15.7, 20.9),
    Measured("v4-pro-hca", 8, 42.5, 54.9),
    Measured("v4-pro-hca", 64, 255.8, 326.8),
    Measured("glm-5", 1, 10.1, 12.8),
    Measured("glm-5", 8, 15.9, 17.6),
    Measured("glm-5", 64, 47.1, 59.2),
)


def nearest(shapes: Mapping[str, Any]) -> Measured | None:
    """The measurement of as many heads and a like layout that is nearest in rows and columns, if one is near.

    All are of bfloat16 queries without an epilogue. One leaves the choice: with it this kernel was as far ahead on V4
    rows, and on others both take a second kernel.
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
