"""The kernel of the Sinkhorn iterations compiles for every target, and keeps its matrices in registers."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jmla import kernels
from tests import lowering

pytestmark = pytest.mark.lowering


@pytest.mark.parametrize("capability", lowering.CAPABILITIES)
def test_nothing_spills(capability: int) -> None:
    call = functools.partial(kernels.sinkhorn, iters=20, eps=1e-6, implementation="triton")
    (kernel,) = lowering.lower(call, jax.ShapeDtypeStruct((64, 4, 4), jnp.float32), capability=capability)
    assert kernel.spills == 0, kernel
    assert kernel.shared <= 1024, kernel
