"""CuTe DSL kernels on a GPU as parts of programs: loops over layers, shards, exported and stored programs, warm-up."""

import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmla import kernels
from jmla.bench import timing
from jmla.bench.trace import traced
from jmla.engine import Engine, stored
from jmla.kernels import dispatch, launch_cute, layouts
from jmla.kernels.shapes import ATTENTION
from jmla.kernels.sparse_mla.epilogue import Epilogue, assemble, finish
from tests.test_gpu_sparse_mla import attend, inputs

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parent.parent
SHAPE, ROWS, LAYERS = ATTENTION["v4-flash-csa"], 4, 5
KERNELS = pytest.mark.parametrize("rows", [ROWS, 32], ids=["one kernel", "two kernels"])  # of the attention
AUTO = jax.sharding.AxisType.Auto
P = jax.sharding.PartitionSpec


@pytest.fixture(autouse=True)
def _strictly(tmp_path: Path) -> Iterator[None]:
    """Kernels are made anew for each test, and one that cannot be made is an error."""
    if jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU")
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    if reason := launch_cute.unwritten(dispatch.Target()):
        pytest.skip(reason)
    from jmla.kernels import cute_cache

    former = cute_cache.configure(directory=tmp_path / "kernels", strict=True, compiling=True)
    cute_cache.forget()
    yield
    cute_cache.configure(**vars(former))
    cute_cache.forget()


def check_in_a_process(code: str, *arguments: object, **environment: str) -> None:
    """Code runs in a new process to its end."""
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | environment
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]


def check_equal(got: Any, want: Any) -> None:
    """Arrays are the same bit for bit."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8))


# ---- a loop over layers


def layer(
    number: Any, q: jax.Array, pools: list[jax.Array], slots: list[jax.Array], name: str | None = "cute"
) -> tuple[jax.Array, list[jax.Array]]:
    """Packs a row of each query into the first pool, and attends."""
    to = 7 * (len(q) * number + jnp.arange(len(q), dtype=jnp.int32))
    window = kernels.kv_pack(q[:, 0], to, pools[0], layout=SHAPE.layout, implementation=name)
    out, _ = attend(SHAPE, q, [window, pools[1]], slots, implementation=name)
    return q + out, [window, pools[1]]


def check_a_loop(rows: int) -> None:
    """One program with the loop in it, against a program for each layer; pools are updated in place."""
    q, pools, slots = inputs(SHAPE, rows)

    def layers(q: jax.Array, pools: list[jax.Array], name: str) -> Any:
        return jax.lax.fori_loop(0, LAYERS, lambda i, x: layer(i, *x, slots, name), (q, pools))

    one = jax.jit(functools.partial(layer, slots=slots))
    want: Any = (q, pools)
    for number in range(LAYERS):
        want = one(number, *want)
    loop = jax.jit(layers, static_argnames="name", donate_argnums=1)
    for _ in range(4):  # a graph is recorded at first, and then updated: the pools are elsewhere each time
        given = [jnp.array(pool) for pool in pools]
        check_equal(loop(q, given, name="cute"), want)
        assert given[0].is_deleted()
    out, _ = loop(q, [jnp.array(pool) for pool in pools], name="xla")
    x, y = (np.asarray(x, np.float64) for x in (want[0], out))
    assert 1 - 2 * np.sum(x * y) / np.sum(x**2 + y**2) < 1e-3


@KERNELS
def test_a_loop_over_layers(rows: int) -> None:
    check_a_loop(rows)


@KERNELS
def test_a_loop_over_layers_inside_command_buffers(rows: int, tmp_path: Path) -> None:
    """In a process of its own, as the flags are read when XLA starts."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {timing.XLA_FLAGS}"
    code = f"from tests import test_gpu_cute as t; t.check_a_loop({rows})"
    check_in_a_process(code, XLA_FLAGS=flags, XDG_CACHE_HOME=str(tmp_path))


# ---- shards


@KERNELS
def test_shards(rows: int) -> None:
    """Each device packs and attends rows of its own, as it would alone."""
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AUTO,))
    parts = [inputs(SHAPE, rows, seed) for seed in range(len(devices))]
    whole = jax.tree.map(lambda *xs: jnp.concatenate(xs), *parts)
    step = functools.partial(layer, 0)
    sharded = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    got = jax.tree.map(np.asarray, jax.jit(sharded)(*whole))
    alone = [jax.tree.map(np.asarray, jax.jit(step)(*part)) for part in parts]
    check_equal(got, jax.tree.map(lambda *xs: np.concatenate(xs), *alone))


# ---- batching, and what memory held before


def test_vmap_runs_one_call_after_another() -> None:
    """P7: a kernel call has no batching rule of its own."""
    parts = [inputs(SHAPE, ROWS, seed) for seed in range(2)]
    step = functools.partial(layer, 0)
    got = jax.jit(jax.vmap(step))(*jax.tree.map(lambda *xs: jnp.stack(xs), *parts))
    alone = [jax.jit(step)(*part) for part in parts]
    check_equal(got, jax.tree.map(lambda *xs: np.stack(xs), *alone))


@pytest.mark.parametrize("rows", [1, 40])
def test_what_memory_held_before_does_not_matter(rows: int) -> None:
    """Before each call memory is filled with NaN and freed, so that outputs get it; rows of few keys and of none."""
    q, pools, slots = inputs(SHAPE, rows)
    slots = [s.at[: rows // 2 or 1, 1:].set(-1).at[rows // 3].set(-1) for s in slots]
    call = jax.jit(functools.partial(attend, SHAPE, implementation="cute"))
    results = []
    for _ in range(5):
        jax.block_until_ready([jnp.full((1 << 20,), jnp.nan) for _ in range(16)])
        results.append(jax.tree.map(np.asarray, call(q, pools, slots)))
    for result in results:
        check_equal(result, results[0])
    assert not results[0][0][rows // 3].any()
    assert np.isneginf(results[0][1][rows // 3]).all()
    assert np.isfinite(results[0][0].astype(np.float32)).all()


# ---- programs of another process

LOADED = """
import sys
from pathlib import Path
import jax, numpy as np
from jmla.kernels import cute_cache, launch_cute
from tests.test_gpu_cute import SHAPE, inputs

cute_cache.configure(compiling=False, directory=None)
folder = Path(sys.argv[1])
{load}
results = [np.asarray(x).view(np.uint8) for x in jax.tree.leaves(program(*inputs(SHAPE, {rows})))]
assert not [name for name in sys.modules if name.endswith((".kv_pack.cute", ".sparse_mla.cute"))]
np.savez(folder / "results.npz", *results)
"""


def check_elsewhere(folder: Path, load: str, rows: int, want: Any) -> None:
    """Runs a program that this process left in ``folder``, in one that compiles no kernel."""
    check_in_a_process(LOADED.format(load=load, rows=rows), folder)
    with np.load(folder / "results.npz") as results:
        check_equal([results[name] for name in results.files], want)


@KERNELS
def test_an_exported_program_runs_in_a_fresh_process(rows: int, tmp_path: Path) -> None:
    pytest.importorskip("flatbuffers", reason="jax.export writes programs with flatbuffers")
    given = inputs(SHAPE, rows)
    program = jax.jit(functools.partial(layer, 0))
    exported = jax.export.export(program, disabled_checks=launch_cute.export_checks())(*given)
    (tmp_path / "program").write_bytes(exported.serialize())
    load = """
launch_cute.enable()
program = jax.export.deserialize(bytearray((folder / "program").read_bytes())).call
"""
    check_elsewhere(tmp_path, load, rows, program(*given))


@KERNELS
def test_a_stored_program_runs_in_a_fresh_process(rows: int, tmp_path: Path) -> None:
    """As ``Engine.warmup`` keeps them beside JAX's cache; nothing else registers what the program calls."""
    given = inputs(SHAPE, rows)
    program = jax.jit(functools.partial(layer, 0)).lower(*given).compile()
    stored.ProgramStore(tmp_path).save("program", program)
    load = """
from jmla.engine.stored import ProgramStore
program = ProgramStore(folder).load("program")
"""
    check_elsewhere(tmp_path, load, rows, program(*given))


# ---- codes


@pytest.mark.parametrize("rows", [1, 32, 64, 128])
def test_codes_take_a_kernel_less_than_values_that_are_rotated_and_quantised(rows: int) -> None:
    q, pools, slots = inputs(SHAPE, rows)
    epilogue = Epilogue(jax.random.normal(jax.random.key(0), (rows, 64)), groups=8, scale_form="ue8m0")

    def apart(q: jax.Array, pools: Any, slots: Any) -> Any:
        out, lse = attend(SHAPE, q, pools, slots, implementation="cute")
        return assemble(*finish(out, None, epilogue, epilogue.cos_sin, None), epilogue), lse

    together = functools.partial(attend, SHAPE, epilogue=epilogue, implementation="cute")
    counts = []
    for fn in (jax.jit(together), jax.jit(apart)):
        jax.block_until_ready(fn(q, pools, slots))
        counts.append(len(traced(functools.partial(fn, q, pools, slots))))
    assert 0 < counts[0] < counts[1], counts


# ---- warm-up


def test_warming_up_makes_what_serving_selects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernels that tracing lists are those that workers make; no others are asked for afterwards."""
    from jmla.kernels import cute_cache
    from tests.test_gpu_models import narrow_flash

    monkeypatch.setattr(stored.ProgramStore, "open", lambda: None)  # which may know all programs
    monkeypatch.setattr(dispatch, "_choices", {})
    options = {"max_requests": 2, "pages": 32, "max_seq_len": 2048, "prefill_chunk": 256}
    engine, again = (Engine(narrow_flash(4), **options) for _ in range(2))
    with dispatch.following(engine._model.params, engine._cache), launch_cute.collecting() as listed:
        for function, _, args in engine._jobs():
            function.trace(*args)
    assert listed
    assert not (tmp_path / "kernels").exists()
    engine.warmup(progress=False)
    made = {file.stem for file in (tmp_path / "kernels").glob("*.bin")}
    assert made == {job.key for job in listed}
    cute_cache.forget()
    cute_cache.configure(compiling=False)
    prompts = [2 + np.arange(count, dtype=np.int32) % 500 for count in (5, 90, 700)]
    for serving in (engine, again):  # the second one traces on its way
        assert all(completion.token_ids for completion in serving.generate(prompts, max_new_tokens=20))
    served = {choice.implementation for choice in dispatch.report() if choice.op == "sparse_mla"}
    assert "cute on cuda" in served, str(dispatch.report())
    assert "Another implementation serves" not in caplog.text


def test_a_cold_start_that_cannot_compile_is_served_by_triton(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from jmla.kernels import cute_cache

    monkeypatch.setattr(dispatch, "_choices", {})
    cute_cache.configure(strict=False, compiling=False)
    given = inputs(SHAPE, ROWS)
    for _ in range(2):
        got = jax.jit(functools.partial(attend, SHAPE))(*given)
        jax.clear_caches()
    check_equal(got, jax.jit(functools.partial(attend, SHAPE, implementation="triton"))(*given))
    assert caplog.text.count("Another implementation serves") == 1
    choice = next(choice for choice in dispatch.report() if choice.op == "sparse_mla")
    assert choice.implementation.startswith("triton on cuda")
    assert "compiling is off" in dict(choice.others)["cute"]
    with pytest.raises(cute_cache.Uncompiled, match="compiling is off"):
        jax.jit(functools.partial(attend, SHAPE, implementation="cute"))(*given)


def test_every_kind_of_pool_of_the_packer_in_one_program() -> None:
    """Several kernels of one source in a program, each with its own bytes."""
    rows = jax.random.normal(jax.random.key(0), (ROWS, 576), jnp.bfloat16)
    slots = jnp.arange(ROWS, dtype=jnp.int32)
    kinds = [layouts.footer584(64), layouts.inline656(64), layouts.index132(64), layouts.plain(576, "bfloat16", 64)]
    kinds.append(layouts.inline656(64, scale_form="float32"))

    def packed(name: str) -> list[jax.Array]:
        return [
            kernels.kv_pack(rows[:, : layout.width], slots, layout.zeros(1), layout=layout, implementation=name)
            for layout in kinds
        ]

    check_equal(jax.jit(lambda: packed("cute"))(), jax.jit(lambda: packed("triton"))())
