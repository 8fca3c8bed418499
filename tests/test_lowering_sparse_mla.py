"""The sparse attention compiled for each GPU without one: shared memory fits, and hardly anything spills."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jmla.kernels import sparse_mla
from jmla.kernels.shapes import ATTENTION, AttentionShape
from tests import lowering

# Bytes that a thread spills, measured with Triton 3.6 and 3.9, rounded up.
SPILLS = {90: 1400, 100: 1500, 120: 300}
SPILLS_OF_HOPPER = 32  # of the kernel whose warps have roles


def arguments(shape: AttentionShape, rows: int, heads: int) -> list[Any]:
    """Shapes of queries, pools, slots and lengths."""
    arrays = [jax.ShapeDtypeStruct((rows, heads, shape.width), jnp.bfloat16)]
    for layout, columns in ((shape.layout, shape.columns), (shape.extra_layout, shape.extra_columns)):
        if layout is not None:
            arrays.append(jax.ShapeDtypeStruct((4096, layout.page_stride), jnp.uint8))
            arrays.append(jax.ShapeDtypeStruct((rows, columns), jnp.int32))
            arrays.append(jax.ShapeDtypeStruct((rows,), jnp.int32))
    return arrays


def attend(shape: AttentionShape, heads: int, q: Any, pool: Any, slots: Any, lengths: Any, *extra: Any) -> Any:
    given = (extra[0], shape.extra_layout, *extra[1:]) if extra else None
    sinks = jnp.zeros(heads) if shape.sinks else None
    options = {"layout": shape.layout, "scale": shape.scale, "sinks": sinks, "implementation": "triton"}
    return sparse_mla(q, pool, slots, lengths, extra=given, **options)


@pytest.mark.parametrize("capability", lowering.CAPABILITIES)
@pytest.mark.parametrize(
    ("name", "rows", "heads"),
    [("v3.2", 128, 128), ("v4-flash-csa", 128, 64), ("v4-flash-csa", 8, 64), ("glm-5", 64, 8)],
)
def test_shared_memory_and_spills(name: str, rows: int, heads: int, capability: int) -> None:
    shape = ATTENTION[name]
    found = lowering.lower(
        functools.partial(attend, shape, heads), *arguments(shape, rows, heads), capability=capability
    )
    assert [kernel.name for kernel in found][1:] in ([], ["_finish"])
    for kernel in found:
        bound = SPILLS_OF_HOPPER if kernel.name == "attend" else SPILLS[capability]
        assert kernel.spills <= bound, kernel
