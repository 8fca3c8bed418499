"""The CuTe kernels compiled without a GPU: nothing spills; the packer takes no shared memory and any number of rows."""

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct as Shape

from jmla import kernels
from jmla.kernels import dispatch, layouts
from jmla.kernels.shapes import ATTENTION
from tests import lowering
from tests.test_lowering_kv_pack import CASES
from tests.test_lowering_sparse_mla import arguments, attend

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from jmla.kernels import cute_cache

pytestmark = pytest.mark.lowering

USUAL = ("v4-window-many",)
REGISTERS = 96  # of a thread of the packer: at most 72 were seen
ATTENDED = {  # shape, rows and heads of the attention
    "v4-flash": ("v4-flash-csa", 64, 64),
    "v4-flash few": ("v4-flash-csa", 1, 64),
    "v4-flash many": ("v4-flash-csa", 256, 64),
    "v4-flash shard": ("v4-flash-csa", 64, 16),
    "v4-flash window": ("v4-flash-window", 8, 64),
    "v4-flash-hca": ("v4-flash-hca", 64, 64),
    "v4-flash-hca few": ("v4-flash-hca", 1, 64),
    "v4-pro": ("v4-pro-csa", 64, 128),
    "v4-pro few": ("v4-pro-csa", 8, 128),
    "v3.2": ("v3.2", 64, 128),
    "v3.2 few": ("v3.2", 1, 128),
    "glm-5": ("glm-5", 64, 64),
}
ELF = b"\x7fELF"


@pytest.fixture(autouse=True)
def _compile_afresh() -> Iterator[None]:
    former = cute_cache.configure(directory=None, strict=True)
    cute_cache.forget()
    yield
    cute_cache.configure(**vars(former))
    cute_cache.forget()


def packed(case: str, rows: int | None = None, capability: int = 90) -> str:
    """The program for a GPU that packs rows."""
    layout, normed, turned, count = CASES[case]
    count = rows or count

    def pack(rows: jax.Array, slots: jax.Array, pool: jax.Array, *rest: jax.Array) -> jax.Array:
        given = dict(
            zip([name for name, size in (("norm_weight", normed), ("cos_sin", turned)) if size], rest, strict=True)
        )
        return kernels.kv_pack(rows, slots, pool, layout=layout, implementation="cute", **given)

    rest = [Shape((normed,), jnp.float32)] * bool(normed) + [Shape((count, turned), jnp.float32)] * bool(turned)
    operands = [
        Shape((count, layout.width), jnp.bfloat16),
        Shape((count,), jnp.int32),
        Shape(layout.pool_shape(1000), layout.pool_dtype()),
        *rest,
    ]
    with kernels.target(compute_capability=capability):
        return jax.jit(pack).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def dumped(module: bytes, option: str) -> str:
    """What the assembler's tool says of the GPU's binary in an object file."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "kernel.cubin"
        file.write_bytes(module[module.index(ELF, len(ELF)) :])
        done = subprocess.run([str(tool), option, str(file)], capture_output=True, text=True)
    return done.stdout + done.stderr


def resources(module: bytes) -> list[dict[str, int]]:
    """What each kernel takes of a multiprocessor."""
    said = dumped(module, "-res-usage")
    found = re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", said)
    if not found or len(found) % 4:
        raise AssertionError(f"Expected cuobjdump to state the resources of kernels: {said}")
    return [{name: int(number) for name, number in found[i : i + 4]} for i in range(0, len(found), 4)]


def compiled(call: Callable[..., Any], *operands: Any) -> bytes:
    """The object file of the one call of a kernel in a function for Hopper."""
    with kernels.target(compute_capability=90):
        jax.jit(call).trace(*operands).lower(lowering_platforms=("cuda",))
    (module,) = cute_cache._memory.values()
    return module


@pytest.mark.parametrize("capability", lowering.CAPABILITIES)
@pytest.mark.parametrize("case", lowering.cases(CASES, USUAL))
def test_one_kernel_without_spills(case: str, capability: int) -> None:
    text = packed(case, capability=capability)
    assert text.count("custom_call @CuteDSLRT_NvJaxCutlassCall") == 1
    (module,) = cute_cache._memory.values()
    (used,) = resources(module)
    assert used["STACK"] == used["LOCAL"] == used["SHARED"] == 0, used
    assert used["REG"] <= REGISTERS, used


def test_the_pool_is_an_operand_that_the_kernel_writes_into() -> None:
    (call,) = (line for line in packed("v4-window").splitlines() if "@CuteDSLRT_NvJaxCutlassCall" in line)
    assert "output_tuple_indices = [], operand_index = 2" in call


@pytest.mark.parametrize("counts", [(1, 2048), (4096, 65_536)], ids=["few", "many"])
def test_the_number_of_rows_is_not_compiled_in(counts: tuple[int, int]) -> None:
    for count in counts:
        packed("v4-window", rows=count)
    assert len(cute_cache._memory) == 1


@pytest.mark.parametrize("case", lowering.cases(ATTENDED, ("v4-flash",)))
def test_the_attention_spills_nothing(case: str) -> None:
    name, rows, heads = ATTENDED[case]
    shape = ATTENTION[name]
    attended = functools.partial(attend, shape, heads, implementation="cute")
    with kernels.target(compute_capability=90):
        try:
            traced = jax.jit(lambda *xs: attended(*xs)).trace(*arguments(shape, rows, heads))
        except dispatch.CannotRun as error:
            pytest.skip(str(error))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @CuteDSLRT_NvJaxCutlassCall") == 1
    (module,) = cute_cache._memory.values()
    *more, first = resources(module)  # some forms have a second kernel, which completes what the first one made
    assert first["REG"] <= 128  # 512 threads have no more
    for used in (first, *more):
        assert used["STACK"] == used["LOCAL"] == 0, used


def test_an_architecture_that_it_is_not_written_for() -> None:
    layout = layouts.footer584(64)
    with (
        kernels.target(compute_capability=80),
        pytest.raises(ValueError, match="cute of kv_pack cannot run: is written"),
    ):
        kernels.kv_pack(jnp.ones((1, 512)), [0], layout.zeros(1), layout=layout, implementation="cute")


@pytest.mark.parametrize(("name", "rows"), [("v4-flash-csa", 128), ("v3.2", 64)])
def test_products_do_not_wait_for_each_other(name: str, rows: int) -> None:
    """The assembler makes every product wait for the one before where it does not see through the loop, here with a
    number of rounds that is known."""
    shape = ATTENTION[name]
    call = functools.partial(attend, shape, shape.heads, implementation="cute")
    given = [None if len(x.shape) == 1 else x for x in arguments(shape, rows, shape.heads)]  # no lengths
    code = dumped(compiled(call, *given), "-sass")
    assert code.count("HGMMA") > 80
    assert code.count("WARPGROUP.DEPBAR") <= 6


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("v4-flash-csa", 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("v4-flash-csa", 16), ("v4-flash-csa", 8), ("v3.2", 2))
        ),
    ],
)
def test_the_second_kernel_asks_for_all_parts_at_once(name: str, rows: int) -> None:
    """Which the assembler would rather do one by one, each when it is added."""
    shape = ATTENTION[name]
    call = functools.partial(attend, shape, shape.heads, implementation="cute")
    functions = dumped(compiled(call, *arguments(shape, rows, shape.heads)), "-sass").split("Function : ")
    (code,) = [code for code in functions if code.startswith("kernel_cutlass_combine")]
    loads = [load.start() for load in re.finditer(r"LDG\.E\.(64|128) ", code)]
    assert len(loads) > 4
    assert code.index("ACQBULK") < loads[0] < loads[-1] < code.index("SHFL")


@pytest.mark.parametrize(
    ("name", "rows", "count"),
    [
        ("v4-flash-csa", 128, 1),
        ("v4-flash-csa", 64, 1),
        ("v4-flash-csa", 16, 2),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("v4-flash-csa", 2, 2), ("v4-pro-csa", 32, 1), ("v3.2", 64, 2))
        ),
    ],
)
def test_how_many_kernels_codes_take(name: str, rows: int, count: int) -> None:
    shape = ATTENTION[name]
    epilogue = kernels.Epilogue(jnp.zeros((rows, 64)), groups=8, scale_form="ue8m0")

    def call(q: jax.Array, pool: jax.Array, slots: jax.Array, *more: jax.Array) -> Any:
        given = (more[0], shape.extra_layout, more[1], None) if more else None
        options = {"layout": shape.layout, "scale": shape.scale, "implementation": "cute"}
        return kernels.sparse_mla(q, pool, slots, extra=given, epilogue=epilogue, **options)

    given = [x for x in arguments(shape, rows, shape.heads) if len(x.shape) > 1]
    used = resources(compiled(call, *given))
    assert len(used) == count
    assert all(kernel["STACK"] == kernel["LOCAL"] == 0 for kernel in used), used
