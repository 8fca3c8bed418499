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
    Measured("v3.2", 1, 9.1, 13.3),
    Measured("v3.2", 2, 11.4, 14.6),
    Measured("v3.2", 4, 13.8, 17.0),
    Measured("v3.2", 8, 18.4, 21.9),
    Measured("v3.2", 16, 27.3, 33.5),
    Measured("v3.2", 32, 45.1, 56.5),
    Measured("v3.2", 64, 78.6, 98.8),
    Measured("v3.2", 128, 154.0, 185.6),
    Measured("v3.2", 256, 304.8, 360.6),
    Measured("v3.2", 4096, 4744.8, 5118.0),
    Measured("v4-flash-csa", 1, 6.8, 10.5),
    Measured("v4-flash-csa", 2, 7.4, 11.1),
    Measured("v4-flash-csa", 4, 7.8, 11.6),
    Measured("v4-flash-csa", 8, 9.5, 12.6),
    Measured("v4-flash-csa", 16, 11.7, 15.5),
    Measured("v4-flash-csa", 32, 14.8, 19.8),
    Measured("v4-flash-csa", 64, 19.1, 27.1),
    Measured("v4-flash-csa", 128, 28.0, 35.0),
    Measured("v4-flash-csa", 256, 53.9, 66.7),
    Measured("v4-flash-csa", 4096, 790.5, 937.1),
    Measured("v4-pro-csa", 1, 7.7, 13.0),
    Measured("v4-pro-csa", 2, 9.4, 13.7),
    Measured("v4-pro-csa", 4, 11.6, 15.4),
    Measured("v4-pro-csa", 8, 13.8, 18.1),
    Measured("v4-pro-csa", 16, 18.3, 24.3),
    Measured("v4-pro-csa", 32, 26.5, 36.8),
    Measured("v4-pro-csa", 64, 41.3, 54.3),
    Measured("v4-pro-csa", 128, 80.5, 104.3),
    Measured("v4-pro-csa", 256, 158.8, 202.7),
    Measured("v4-pro-csa", 4096, 2426.2, 2963.2),
    Measured("v4-flash-hca", 1, 13.7, 19.9),
    Measured("v4-flash-hca", 8, 26.4, 36.9),
    Measured("v4-flash-hca", 64, 136.9, 181.9),
    Measured("v4-pro-hca", 1, 15.6, 21.2),
    Measured("v4-pro-hca", 8, 41.0, 55.2),
    Measured("v4-pro-hca", 64, 251.4, 329.8),
    Measured("glm-5", 1, 8.6, 13.2),
    Measured("glm-5", 8, 14.2, 17.7),
    Measured("glm-5", 64, 46.2, 59.2),
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
