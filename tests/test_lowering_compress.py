"""The compressor's kernel compiled without a GPU: one launch a call, nothing spills, the ring updated in place."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct as Shape

from jmla import kernels
from jmla.kernels import shapes
from tests import lowering

pytestmark = pytest.mark.lowering

# shape, rows, steps of a call
CASES = {
    "csa-decode": ("v4-csa", 64, 1),
    "csa-prefill": ("v4-csa", 1, 4096),
    "index-decode": ("v4-index", 64, 1),
    "index-prefill": ("v4-index", 1, 4096),
    "hca-decode": ("v4-hca", 64, 1),
    "hca-prefill": ("v4-hca", 1, 4096),
    "widest-window": ("widest-window", 1, 4096),
}
USUAL = ("csa-decode", "csa-prefill", "hca-decode", "hca-prefill")
OTHERS = {"widest-window": shapes.CompressShape("widest-window", 256, True, 512)}
SPILLS = 4  # bytes; seen with Triton 3.6 for the widest window on sm_120, 0 otherwise and with Triton 3.9
SHARED = 16_384  # bytes; windows whose slots lie with several warps are summed through it


def operands(name: str, rows: int, steps: int, dtype: Any = jnp.float32) -> tuple[list[Shape], dict[str, Any]]:
    """Shapes of the operands of ``compress`` and its static arguments."""
    shape = (shapes.COMPRESS | OTHERS)[name]
    width, slots = (2 * shape.width, 2 * shape.ratio) if shape.overlap else (shape.width, shape.ratio)
    arrays = [
        Shape((rows, steps, width), dtype),
        Shape((rows, steps, width), dtype),
        Shape((rows, slots, 2 * width), jnp.float32),
        Shape((rows, steps), jnp.int32),
        Shape((shape.ratio, width), jnp.float32),
    ]
    return arrays, {"ratio": shape.ratio, "overlap": shape.overlap}


@pytest.mark.parametrize("capability", lowering.CAPABILITIES)
@pytest.mark.parametrize("case", lowering.cases(CASES, USUAL))
def test_one_kernel_without_spills(case: str, capability: int) -> None:
    arrays, static = operands(*CASES[case])

    def compress(*arrays: jax.Array) -> Any:
        *given, ape = arrays
        return kernels.compress(*given, ape=ape, implementation="triton", **static)

    (kernel,) = lowering.lower(compress, *arrays, capability=capability)
    assert kernel.spills <= SPILLS, kernel
    assert kernel.shared <= SHARED, kernel


def test_the_state_is_an_operand_that_the_kernel_writes_into() -> None:
    arrays, static = operands("v4-csa", 64, 1, jnp.bfloat16)
    step = jax.jit(lambda *xs: kernels.compress(*xs[:-1], ape=xs[-1], **static), donate_argnums=2)
    with kernels.target(compute_capability=90):
        text = step.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@triton_kernel_call" in line]
    assert len(calls) == 1
    # The last output: jax-triton takes the buffers of the others to come first.
    assert "output_operand_aliases = [#stablehlo.output_operand_alias<output_tuple_indices = [1]" in calls[0]
    assert "operand_index = 2" in calls[0]


def test_the_number_of_rows_is_not_compiled_in() -> None:
    programs = []
    for rows in (1, 64):
        arrays, static = operands("v4-csa", rows, 1)
        with lowering._recorded() as results, kernels.target(compute_capability=90):
            step = jax.jit(lambda *xs, static=static: kernels.compress(*xs[:-1], ape=xs[-1], **static))
            step.trace(*arrays).lower(lowering_platforms=("cuda",))
        programs += [ptx for _, _, ptx in results]
    assert len(programs) == 2
    assert programs[0] == programs[1]
