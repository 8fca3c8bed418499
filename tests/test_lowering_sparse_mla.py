"""The sparse attention compiled for each GPU without one: shared memory fits, and hardly anything spills."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jmla.kernels import sparse_mla
from jmla.kernels.layouts import plain
from jmla.kernels.shapes import ATTENTION, AttentionShape
from tests import lowering

pytestmark = pytest.mark.lowering

# Bytes that a thread spills, measured with Triton 3.6 and 3.9, rounded up.
SPILLS = {90: 1400, 100: 1500, 120: 300}
SPILLS_OF_HOPPER = 160  # of the kernel whose warps have roles


def plain_rows(name: str) -> AttentionShape:
    """A model's attention over bf16 rows."""
    shape = ATTENTION[name]
    given = {"layout": shape.layout, "extra_layout": shape.extra_layout}
    rows = {name: plain(x.width, "bfloat16", x.page_size) for name, x in given.items() if x is not None}
    return dataclasses.replace(shape, **rows)


def arguments(shape: AttentionShape, rows: int, heads: int) -> list[Any]:
    """Shapes of queries, pools, slots and lengths."""
    arrays = [jax.ShapeDtypeStruct((rows, heads, shape.width), jnp.bfloat16)]
    for layout, columns in ((shape.layout, shape.columns), (shape.extra_layout, shape.extra_columns)):
        if layout is not None:
            arrays.append(jax.eval_shape(lambda layout=layout: layout.zeros(4096)))
            arrays.append(jax.ShapeDtypeStruct((rows, columns), jnp.int32))
            arrays.append(jax.ShapeDtypeStruct((rows,), jnp.int32))
    return arrays


def attend(
    shape: AttentionShape,
    heads: int,
    q: Any,
    pool: Any,
    slots: Any,
    lengths: Any,
    *extra: Any,
    implementation: str = "triton",
) -> Any:
    given = (extra[0], shape.extra_layout, *extra[1:]) if extra else None
    sinks = jnp.zeros(heads) if shape.sinks else None
    options = {"layout": shape.layout, "scale": shape.scale, "sinks": sinks, "implementation": implementation}
    options["v_dim"] = shape.v_dim
    return sparse_mla(q, pool, slots, lengths, extra=given, **options)


CASES = {
    "v3.2": (ATTENTION["v3.2"], 128, 128),
    "v3.2 splits": (ATTENTION["v3.2"], 8, 128),
    "v4-flash": (ATTENTION["v4-flash-csa"], 128, 64),
    "v4-flash splits": (ATTENTION["v4-flash-csa"], 8, 64),
    "glm-5": (ATTENTION["glm-5"], 64, 64),
    "glm-5 shard": (ATTENTION["glm-5"], 64, 8),
    "v3.2 bf16": (plain_rows("v3.2"), 128, 128),
    "v4-flash bf16": (plain_rows("v4-flash-csa"), 128, 64),
}
USUAL = ("v3.2", "v4-flash", "v4-flash splits", "v3.2 bf16")


@pytest.mark.parametrize("capability", lowering.CAPABILITIES)
@pytest.mark.parametrize("case", lowering.cases(CASES, USUAL))
def test_shared_memory_and_spills(case: str, capability: int) -> None:
    shape, rows, heads = CASES[case]
    found = lowering.lower(
        functools.partial(attend, shape, heads), *arguments(shape, rows, heads), capability=capability
    )
    assert [kernel.name for kernel in found][1:] in ([], ["_finish"])
    for kernel in found:
        bound = SPILLS_OF_HOPPER if kernel.name == "attend" else SPILLS[capability]
        assert kernel.spills <= bound, kernel
