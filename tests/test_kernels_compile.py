"""What users of such kernels have met while compiling and starting: caches, aliases, batching, scratch, copies."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmla
from jmla import kernels
from jmla.kernels import layouts
from jmla.models import Model, PagedCache, make_model, steps
from jmla.models.random import init_random
from tests.tiny import V4

ROOT = Path(__file__).resolve().parent.parent
EITHER = pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("triton", marks=pytest.mark.gpu)], indirect=True
)


def small_model(*kinds: str, **options: Any) -> Model:
    """A random V4 with these layers."""
    config = dataclasses.replace(
        V4, num_hidden_layers=len(kinds), layer_kinds=kinds, layer_routing=("learned",) * len(kinds)
    )
    params = jax.tree.map(jnp.asarray, init_random(config, drafting=False))
    return make_model(config, params, dtype="float32", **options)


def in_a_process(code: str, **environment: str) -> Any:
    """What a new process prints as its last line, in JSON."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu"} | environment
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


# ---- compiling once


def test_p2_an_option_that_is_left_out_makes_no_other_program() -> None:
    """None in place of an array is another structure to JAX; steps fill it in before."""
    model = small_model("window", kv_layout="float32")
    cache = jmla.init_cache(model, 2, 256)
    compiled = steps._compiled("advance", True)
    before = compiled._cache_size()
    for active in (None, [True, False], np.array([False, True]), jnp.array([True, True])):
        _, cache = jmla.decode(model, [3, 4], cache, active=active)
    assert cache.lengths.tolist() == [3, 3]
    assert compiled._cache_size() == before + 1


START = """
import collections, json, jax, numpy as np
counted = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counted.update([event.rpartition("/")[2]]))
import jmla
from tests.test_kernels_compile import small_model
model = small_model("csa")
cache = jmla.init_cache(model, 1, 256)
logits, cache = jmla.prefill(model, [[3, 4, 5, 6]], [4], cache)
logits, cache = jmla.decode(model, [7], cache)
print(json.dumps([counted["cache_hits"], counted["cache_misses"], np.asarray(logits).sum().item()]))
"""


@pytest.mark.slow
def test_p3_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    """With JAX's persistent cache, the programs of another process are found again."""
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    _, misses, first = in_a_process(START, PYTHONHASHSEED="1", **environment)
    hits, none, second = in_a_process(START, PYTHONHASHSEED="2", **environment)
    assert misses > 0
    assert none == 0
    assert hits >= misses
    assert second == first


LOWERED = """
import hashlib, json, jax, jax.numpy as jnp
from jmla import kernels
from jmla.kernels import layouts
layout = layouts.footer584(64)

def step(rows, slots, pool, scores):
    chosen = kernels.top_k(scores, None, 64)
    return kernels.kv_pack(rows, slots, pool, layout=layout), chosen

shapes = [((4, 512), "bfloat16"), ((4,), "int32"), ((16, layout.page_stride), "uint8"), ((4, 4096), "float32")]
with kernels.target(compute_capability=90):
    lowered = jax.jit(step).trace(*(jax.ShapeDtypeStruct(*s) for s in shapes)).lower(lowering_platforms=("cuda",))
text = lowered.as_text()
print(json.dumps([text.count("triton_kernel_call"), hashlib.sha256(text.encode()).hexdigest()]))
"""


@pytest.mark.slow
def test_p3_kernels_are_the_same_program_in_every_process() -> None:
    """What the persistent cache goes by must not depend on the process: no address, no order of a set."""
    for needed in ("triton", "jax_triton", "jax_cuda13_plugin"):
        pytest.importorskip(needed, reason="the extra 'lowering' is not installed")
    (calls, first), (_, second) = (in_a_process(LOWERED, PYTHONHASHSEED=seed) for seed in ("1", "2"))
    assert calls >= 2
    assert second == first


# ---- buffers


@EITHER
@pytest.mark.parametrize("jitted", [False, True])
def test_p6_a_pool_that_is_used_again_after_packing_is_as_it_was(implementation: str, jitted: bool) -> None:
    """The kernel works in place; without donation it must be given a copy, and with it the old pool is gone."""
    layout = layouts.footer584(4)
    rows = jnp.asarray(np.random.default_rng(0).standard_normal((2, 512)), jnp.bfloat16)
    slots = jnp.array([5, 0], jnp.int32)
    pool = layout.zeros(2).at[:].set(7)

    def pack(pool: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        new = kernels.kv_pack(rows, slots, pool, layout=layout, implementation=implementation)
        again = kernels.kv_pack(rows[:1], slots[1:], pool, layout=layout, implementation=implementation)
        return new, again, pool

    new, again, old = jax.jit(pack)(pool) if jitted else pack(pool)
    np.testing.assert_array_equal(old, 7)
    np.testing.assert_array_equal(pool, 7)
    for got, packed in ((new, [5, 0]), (again, [0])):
        touched = np.asarray(
            kernels.kv_unpack(got, jnp.arange(8), layout=layout) != kernels.kv_unpack(old, jnp.arange(8), layout=layout)
        ).any(axis=-1)
        assert np.flatnonzero(touched).tolist() == sorted(packed)
    donated = jax.jit(lambda pool: pack(pool)[0], donate_argnums=0)(pool)
    np.testing.assert_array_equal(donated, new)
    assert pool.is_deleted()


@EITHER
def test_p8_d8_what_scratch_memory_held_before_does_not_matter(implementation: str) -> None:
    """Rows of few keys and many columns, cut into shares whose parts meet in scratch that nobody clears.

    Before each call memory is filled with NaN and freed, so that a GPU's allocator hands it out again.
    """
    layout = layouts.plain(64, "bfloat16", 64)
    rng = np.random.default_rng(0)
    pool = jnp.asarray(0.3 * rng.standard_normal((2, 64 * 64)), jnp.bfloat16)
    q = jnp.asarray(rng.standard_normal((3, 2, 64)), jnp.bfloat16)
    slots = np.full((3, 2048), -1, np.int32)
    slots[0, :3], slots[1, -1] = [5, 77, 100], 9  # and a row of holes
    attend = functools.partial(kernels.sparse_mla, layout=layout, scale=0.1, deterministic=True)
    call = jax.jit(functools.partial(attend, implementation=implementation))
    results = []
    for _ in range(3):
        jax.block_until_ready([jnp.full((1 << 20,), jnp.nan) for _ in range(16)])
        results.append(jax.tree.map(np.asarray, call(q, pool, slots)))
    want = attend(q, pool, slots, implementation="xla")
    for out, lse in results:
        np.testing.assert_array_equal(out.astype(np.float32), results[0][0].astype(np.float32))
        np.testing.assert_array_equal(lse, results[0][1])
        np.testing.assert_allclose(out.astype(np.float32), want[0].astype(np.float32), rtol=2.01 / 128, atol=1e-3)
        np.testing.assert_allclose(lse, want[1], rtol=8.01 / 65536)
    assert not results[0][0][2].any()
    assert np.isneginf(results[0][1][2]).all()


# ---- batching


@EITHER
def test_p7_vmap_of_the_attention_over_layers(implementation: str) -> None:
    """Kernel calls have no batching rule of their own: one runs after another, and each result is that of its layer."""
    layout = layouts.plain(64, "bfloat16", 4)
    rng = np.random.default_rng(0)
    pools = jnp.asarray(rng.standard_normal((3, 2, 4 * 64)), jnp.bfloat16)
    q = jnp.asarray(rng.standard_normal((3, 2, 2, 64)), jnp.bfloat16)
    slots = jnp.array([[0, 5, -1], [7, -1, 3]], jnp.int32)
    attend = functools.partial(kernels.sparse_mla, layout=layout, scale=0.1, implementation=implementation)
    each = jax.jit(jax.vmap(attend, in_axes=(0, 0, None)))(q, pools, slots)
    nested = jax.vmap(jax.vmap(attend, in_axes=(0, None, None)), in_axes=(0, 0, None))(q[:, None], pools, slots)
    for i in range(3):
        alone = attend(q[i], pools[i], slots)
        for got in (each, jax.tree.map(lambda x: x[:, 0], nested)):
            np.testing.assert_allclose(got[0][i].astype(np.float32), alone[0].astype(np.float32), rtol=1e-2, atol=1e-3)
            np.testing.assert_allclose(got[1][i], alone[1], rtol=1e-5)
    assert np.abs(np.asarray(each[0], np.float32)).max() > 0.1


def test_p7_vmap_of_the_attention_lowers_for_a_gpu() -> None:
    for needed in ("triton", "jax_triton", "jax_cuda13_plugin"):
        pytest.importorskip(needed, reason="the extra 'lowering' is not installed")
    layout = layouts.plain(64, "bfloat16", 4)
    attend = functools.partial(kernels.sparse_mla, layout=layout, scale=0.1, implementation="triton")
    shapes = [((3, 2, 2, 64), "bfloat16"), ((3, 2, 256), "bfloat16"), ((2, 3), "int32")]
    with kernels.target(compute_capability=90):
        traced = jax.jit(jax.vmap(attend, in_axes=(0, 0, None))).trace(*(jax.ShapeDtypeStruct(*s) for s in shapes))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "triton_kernel_call" in text
    assert "stablehlo.while" in text


# ---- memory of a step


def memory(model: Model, factor: int) -> tuple[int, Any]:
    """Bytes of all pools, and the memory of a compiled decode step, with room for ``factor`` times two short rows."""
    cache = jmla.init_cache(model, 2, 256)
    pools = {name: jax.ShapeDtypeStruct((factor * len(p), p.shape[1]), p.dtype) for name, p in cache.pools.items()}
    shapes: PagedCache = jax.eval_shape(lambda: cache).replace(pools=pools)
    step = steps._compiled("advance", True)
    inputs = {name: jax.ShapeDtypeStruct(shape, "int32") for name, shape in (("tokens", (2, 1)), ("counts", (2,)))}
    options = {"all_logits": False, "return_hidden": False}
    compiled = step.lower(spec=model.spec, params=model.params, cache=shapes, **inputs, **options).compile()
    return sum(int(np.prod(p.shape)) * p.dtype.itemsize for p in pools.values()), compiled.memory_analysis()


@pytest.mark.slow
@pytest.mark.parametrize("kv_layout", ["footer584", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_step_holds_its_pools_once_whatever_their_size(kv_layout: str) -> None:
    """Layers of all kinds, some of them scanned: donated pools come back in place, and nothing else grows with them."""
    model = small_model("window", "csa", "hca", "csa", "hca", kv_layout=kv_layout)
    (few, small), (many, large) = memory(model, 4), memory(model, 64)
    assert many == 16 * few
    assert large.alias_size_in_bytes - small.alias_size_in_bytes == many - few
    assert large.temp_size_in_bytes == small.temp_size_in_bytes
