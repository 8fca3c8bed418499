"""The least that a kernel launch costs."""

import jax
import triton
import triton.language as tl

from jmla.kernels.launch import launch


@triton.jit
def _copy_16(source, target):
    column = tl.arange(0, 16)
    tl.store(target + column, tl.load(source + column))


def empty(x: jax.Array) -> jax.Array:
    """Copies 16 float32 values."""
    return launch(_copy_16, x, out=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(1,), num_warps=1)
