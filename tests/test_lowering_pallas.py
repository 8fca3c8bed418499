"""Pallas kernels lowered for GPUs that are not there: one launch a call, in place."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct as Shape
from jax.sharding import AbstractDevice, AbstractMesh

from jmla import kernels
from jmla.kernels import layouts, shapes
from jmla.kernels.layouts import KVLayout

pytestmark = [pytest.mark.lowering, pytest.mark.slow]

DEVICES = {90: "NVIDIA H200", 100: "NVIDIA B200", 120: "NVIDIA RTX PRO 6000 Blackwell Server Edition"}
LAYOUTS = {
    "v3.2": layouts.inline656(64),
    "glm": layouts.inline656(64, scale_form="float32"),
    "v4-csa": layouts.footer584(64),
    "v4-index": layouts.index132(64),
    "plain": layouts.plain(576, "bfloat16", 64),
    "turned-beyond-rope": layouts.inline656(4, nope=160, rope=8),
}


def launches(fn: Any, *args: Any, capability: int) -> list[str]:
    """The lines of the program for a GPU that launch Pallas kernels."""
    device = AbstractDevice(DEVICES[capability], num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh), kernels.target(compute_capability=capability):
        text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    return [line for line in text.splitlines() if "__gpu$xla.gpu.triton" in line]


def assert_in_place(lines: list[str]) -> None:
    (line,) = lines
    assert "output_operand_aliases" in line
    assert "operand_index = 0" in line


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_packer(layout: KVLayout, capability: int) -> None:
    width = min(layout.width, 512)
    operands = [
        Shape((64, layout.width), jnp.bfloat16),
        Shape((64,), jnp.int32),
        Shape(layout.pool_shape(1000), layout.pool_dtype()),
        Shape((width,), jnp.float32),
        Shape((64, min(layout.width, 64)), jnp.float32),
    ]

    def pack(rows: jax.Array, slots: jax.Array, pool: jax.Array, weight: jax.Array, table: jax.Array) -> jax.Array:
        return kernels.kv_pack(
            rows, slots, pool, layout=layout, norm_weight=weight, cos_sin=table, implementation="pallas"
        )

    assert_in_place(launches(pack, *operands, capability=capability))


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize("steps", [1, 4096])
@pytest.mark.parametrize("name", shapes.COMPRESS)
def test_the_compressor(name: str, steps: int, capability: int) -> None:
    shape = shapes.COMPRESS[name]
    halves = 2 if shape.overlap else 1
    width = halves * shape.width
    operands = [
        *[Shape((2, steps, width), jnp.float32)] * 2,
        Shape((2, halves * shape.ratio, 2 * width), jnp.float32),
        Shape((2, steps), jnp.int32),
        Shape((shape.ratio, width), jnp.float32),
    ]

    def compress(*arrays: jax.Array) -> Any:
        *given, ape = arrays
        return kernels.compress(*given, ape=ape, ratio=shape.ratio, overlap=shape.overlap, implementation="pallas")

    assert_in_place(launches(compress, *operands, capability=capability))


def test_without_a_gpu_it_is_refused_and_not_chosen() -> None:
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("there is a GPU")
    layout = layouts.footer584(64)
    arrays = jnp.ones((1, 512)), jnp.zeros(1, jnp.int32), layout.zeros(1)
    with kernels.target(compute_capability=90), pytest.raises(ValueError, match="abstract mesh that names one"):
        kernels.kv_pack(*arrays, layout=layout, implementation="pallas")
    with kernels.target(compute_capability=80), pytest.raises(ValueError, match=r"needs compute capability 9\.0"):
        kernels.kv_pack(*arrays, layout=layout, implementation="pallas")
