"""The kernels of the selection compile for every target, with few spills."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jmla.kernels import top_k
from jmla.kernels.shapes import INDEX
from tests import lowering

pytestmark = pytest.mark.lowering

# Bytes of a thread, most of them outside of the search; seen with Triton 3.6 and 3.9: up to 184, 600 and 536.
SPILLED = {90: 200, 100: 640, 120: 580}


@pytest.mark.parametrize("capability", lowering.CAPABILITIES)
@pytest.mark.parametrize(
    ("name", "rows", "n", "dtype", "kernels"),
    [
        ("v3.2", 64, 131_072, "float32", ["_narrow", "_choose"]),
        ("v4-pro", 4096, 32_768, "float32", ["_choose"]),
        ("v4-flash", 8, 8192, "bfloat16", ["_choose"]),
    ],
)
def test_selection(name, rows, n, dtype, kernels, capability):
    shapes = jax.ShapeDtypeStruct((rows, n), jnp.dtype(dtype)), jax.ShapeDtypeStruct((rows,), jnp.int32)
    select = partial(top_k, k=INDEX[name].top_k, implementation="triton")
    compiled = lowering.lower(select, *shapes, capability=capability)
    assert [kernel.name for kernel in compiled] == kernels
    for kernel in compiled:
        assert kernel.spills <= SPILLED[capability], kernel
        assert kernel.registers <= 128, kernel


def test_every_pass_shortens_the_row():
    """The widest choice that is served, of a row just too wide for one program, is traced to its end."""
    from jmla.kernels.top_k import triton

    scores = jax.ShapeDtypeStruct((2, 40_000), jnp.float32)
    assert jax.eval_shape(lambda x: triton.top_k(x, None, k=16_384), scores).shape == (2, 16_384)
