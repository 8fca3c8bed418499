"""The packer's kernel compiled without a GPU: nothing spills, no shared memory to speak of."""

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct as Shape

from jmla import kernels
from jmla.kernels import layouts
from jmla.kernels.layouts import KVLayout
from tests import lowering

pytestmark = pytest.mark.lowering

# layout, values under the norm, rotated values, rows
CASES = {
    "v3.2": (layouts.inline656(64), 512, 64, 64),
    "glm": (layouts.inline656(64, scale_form="float32"), 512, 64, 64),
    "v4-window": (layouts.footer584(256), 512, 64, 64),
    "v4-window-many": (layouts.footer584(256), 512, 64, 65_536),
    "v4-csa-one-row": (layouts.footer584(64), 512, 64, 1),
    "v3.2-index": (layouts.index132(64), 0, 0, 64),
    "v4-index": (layouts.index132(64), 128, 64, 64),
    "plain-576": (layouts.plain(576, "bfloat16", 64), 512, 64, 64),
    "plain-e4m3": (layouts.plain(512, "float8_e4m3fn", 64), 512, 64, 64),
    "small-footer": (layouts.footer584(5, nope=24, rope=8), 3, 8, 6),
    "many-tiles": (layouts.footer584(3, nope=640, rope=2), 642, 2, 6),
    "turned-beyond-rope": (layouts.inline656(4, nope=160, rope=8), 0, 100, 6),
    "plain-odd-width": (layouts.plain(27, "float32", 4), 25, 6, 6),
}
USUAL = ("v3.2", "v4-window-many", "v4-index", "plain-576")
SPILLS = 0  # bytes; seen with Triton 3.6 and 3.9
SHARED = 512  # bytes, of rows wider than a warp holds; none else


@pytest.mark.parametrize("capability", lowering.CAPABILITIES)
@pytest.mark.parametrize("case", lowering.cases(CASES, USUAL))
def test_one_kernel_without_spills(case: str, capability: int) -> None:
    layout, normed, turned, rows = CASES[case]

    def pack(rows: jax.Array, slots: jax.Array, pool: jax.Array, *rest: jax.Array) -> jax.Array:
        given = dict(
            zip([name for name, size in (("norm_weight", normed), ("cos_sin", turned)) if size], rest, strict=True)
        )
        return kernels.kv_pack(rows, slots, pool, layout=layout, implementation="triton", **given)

    rest = [Shape((normed,), jnp.float32)] * bool(normed) + [Shape((rows, turned), jnp.float32)] * bool(turned)
    (kernel,) = lowering.lower(
        pack,
        Shape((rows, layout.width), jnp.bfloat16),
        Shape((rows,), jnp.int32),
        Shape(layout.pool_shape(1000), layout.pool_dtype()),
        *rest,
        capability=capability,
    )
    assert kernel.spills <= SPILLS, kernel
    assert kernel.shared <= (0 if case in USUAL else SHARED), kernel


@pytest.mark.parametrize("layout", [layouts.footer584(64), layouts.plain(576, "bfloat16", 64)], ids=lambda v: v.name)
def test_the_pool_is_an_operand_that_the_kernel_writes_into(layout: KVLayout) -> None:
    pool = Shape(layout.pool_shape(1000), layout.pool_dtype())
    step = jax.jit(lambda rows, slots, pool: kernels.kv_pack(rows, slots, pool, layout=layout), donate_argnums=2)
    with kernels.target(compute_capability=90):
        traced = step.trace(Shape((64, layout.width), jnp.bfloat16), Shape((64,), jnp.int32), pool)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@triton_kernel_call" in line]
    assert len(calls) == 1
    assert "output_operand_aliases = [#stablehlo.output_operand_alias<output_tuple_indices = []" in calls[0]
    assert "operand_index = 2" in calls[0]


@pytest.mark.parametrize("counts", [(64, 2048), (4096, 65_536)], ids=["few", "many"])
def test_the_number_of_rows_is_not_compiled_in(counts: tuple[int, int]) -> None:
    layout = layouts.footer584(64)
    programs = []
    for rows in counts:
        with lowering._recorded() as results, kernels.target(compute_capability=90):
            jax.jit(lambda *xs: kernels.kv_pack(*xs, layout=layout)).trace(
                Shape((rows, 512), jnp.bfloat16),
                Shape((rows,), jnp.int32),
                Shape(layout.pool_shape(1000), jnp.uint8),
            ).lower(lowering_platforms=("cuda",))
        programs += [ptx for _, _, ptx in results]
    assert len(programs) == 2
    assert programs[0] == programs[1]
