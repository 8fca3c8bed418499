"""Index scores: decode over page tables, and causal prefill whose rows are the last ones of the keys."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmla import kernels
from jmla.bench.case import Case, Work
from jmla.bench.timing import L2_BYTES
from jmla.kernels.layouts import KVLayout, index132, plain

LAYOUT = index132(64)
DISTINCT = 4096  # pages of a pool; the others repeat them
# (requests, keys) -> microseconds of DeepGEMM, 64 heads, one row a request
DECODE = {
    (1, 8192): 3.9,
    (8, 8192): 5.9,
    (64, 8192): 22.1,
    (1, 32768): 4.7,
    (8, 32768): 12.9,
    (64, 32768): 73.9,
    (1, 131072): 8.4,
    (8, 131072): 39.0,
    (64, 131072): 277.0,
}
PREFILL = {(1024, 32768, 64): 552.0, (4096, 32768, 64): 2080.0, (4096, 131072, 64): 8670.0, (4096, 32768, 32): 1120.0}


@functools.partial(jax.jit, static_argnames=("layout", "pages"))
def random_pool(layout: KVLayout, pages: int) -> jax.Array:
    """Keys as quantising normal values leaves them."""
    distinct = min(pages, DISTINCT)
    codes, scales = jax.random.split(jax.random.key(1))
    values = jax.random.normal(codes, (distinct, layout.page_size * layout.width))
    if layout.kind == "plain":
        pool = values.astype(layout.value_dtype)
    else:
        values = jnp.clip(150 * values, -448, 448).astype(jnp.float8_e4m3fn)
        scale = jax.random.uniform(scales, (distinct, layout.page_size), minval=0.004, maxval=0.01)
        parts = [jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(distinct, -1) for x in (values, scale)]
        pool = jnp.concatenate(parts, axis=1)
    return jnp.tile(pool, (-(-pages // distinct), 1))[:pages]


def queries(seed: int, rows: int, heads: int) -> tuple[jax.Array, jax.Array]:
    """``(q [rows, heads, 128] bf16, weights [rows, heads])``."""
    q, weights = jax.random.split(jax.random.key(seed))
    return jax.random.normal(q, (rows, heads, 128), jnp.bfloat16), jax.random.normal(weights, (rows, heads))


def decode(layout: KVLayout, requests: int, steps: int, keys: int, heads: int, prepared: bool = False) -> Work:
    """Every input set has pages of its own, in any order, and all sets together more than the L2 cache.

    With ``prepared`` queries are rotated and quantised before, which is how the peer takes them: the kernel alone.
    """
    width = keys // layout.page_size
    sets = max(2, -(-5 * L2_BYTES // (4 * requests * width * layout.page_stride)))
    if requests * width * layout.page_stride > L2_BYTES:
        sets = 1
    order = np.random.default_rng(0).permutation(sets * requests * width).astype(np.int32)
    tables = jnp.asarray(order.reshape(sets, requests, width))
    lengths = jnp.asarray(np.tile(np.arange(keys - steps + 1, keys + 1, dtype=np.int32), requests))

    def run(implementation: str) -> Callable[..., Any]:
        def call(q: jax.Array, weights: jax.Array, table: jax.Array, lengths: jax.Array, pool: jax.Array) -> jax.Array:
            if prepared:
                from jmla.kernels.index_scores import triton

                return triton.scores(q, weights, pool, None, lengths, table, layout=layout)
            return kernels.index_scores(
                q, weights, pool, layout=layout, lengths=lengths, table=table, implementation=implementation
            )

        return call

    asked = [queries(i, requests * steps, heads) for i in range(sets)]
    if prepared:
        from jmla.kernels.index_scores.triton import quantise_queries

        asked = [jax.jit(quantise_queries)(*pair) for pair in asked]
    inputs = [(*pair, tables[i]) for i, pair in enumerate(asked)]
    return Work(run, inputs, (lengths, random_pool(layout, sets * requests * width)))


def prefill(layout: KVLayout, rows: int, keys: int, heads: int) -> Work:
    """Row i sees the first ``keys - rows + 1 + i`` keys."""
    end = jnp.arange(keys - rows + 1, keys + 1, dtype=jnp.int32)

    def run(implementation: str) -> Callable[..., Any]:
        def call(q: jax.Array, weights: jax.Array, start: jax.Array, end: jax.Array, pool: jax.Array) -> jax.Array:
            bounds = (start, end)
            return kernels.index_scores(q, weights, pool, layout=layout, bounds=bounds, implementation=implementation)

        return call

    pool = random_pool(layout, keys // layout.page_size)
    return Work(run, [queries(i, rows, heads) for i in range(2)], (jnp.zeros_like(end), end, pool))


def _decode_case(
    requests: int,
    steps: int,
    keys: int,
    heads: int,
    peer_us: float | None,
    layout: KVLayout = LAYOUT,
    implementations: tuple[str, ...] = ("triton",),
    prepared: bool = False,
) -> Case:
    rows = requests * steps
    return Case(
        "index_scores",
        f"decode {requests} x {keys}, {steps} row{'s' * (steps > 1)}, {heads} heads"
        + (f", {layout.name}" if layout != LAYOUT else "")
        + (", queries in e4m3" if prepared else ""),
        functools.partial(decode, layout, requests, steps, keys, heads, prepared),
        flops=2 * rows * keys * heads * layout.width,
        bytes=requests * keys * layout.bytes_per_token + 4 * rows * keys,
        peer="DeepGEMM" if peer_us else None,
        peer_us=peer_us,
        implementations=implementations,
        calls=40 if requests * keys < 1 << 22 else 12,
    )


def _prefill_case(
    rows: int, keys: int, heads: int, peer_us: float | None, implementations: tuple[str, ...] = ("triton",)
) -> Case:
    return Case(
        "index_scores",
        f"prefill {rows} x {keys}, {heads} heads",
        functools.partial(prefill, LAYOUT, rows, keys, heads),
        flops=2 * heads * LAYOUT.width * (rows * keys - rows * (rows - 1) // 2),
        bytes=keys * LAYOUT.bytes_per_token + 4 * rows * keys,
        peer="DeepGEMM" if peer_us else None,
        peer_us=peer_us,
        implementations=implementations,
        calls=6 if rows * keys < 1 << 28 else 3,
    )


def cases() -> list[Case]:
    """Operations are those on keys that count, bytes those of the keys and of all scores.

    The peer's times are of queries that another kernel has quantised; those of batch 1 and 8 come in that form too.
    """
    found = [
        _decode_case(b, 1, n, 64, us, implementations=("triton", "xla") if b * n == 8192 else ("triton",))
        for (b, n), us in DECODE.items()
    ]
    found += [_decode_case(b, 1, n, 64, us, prepared=True) for (b, n), us in DECODE.items() if b < 64]
    found += [
        _decode_case(64, 2, 131072, 64, 308.0),
        _decode_case(1, 2, 32768, 64, None),
        _decode_case(1, 1, 32768, 32, None),
        _decode_case(64, 1, 131072, 32, None),
        _decode_case(64, 4, 32768, 64, None),
        _decode_case(64, 1, 32768, 64, None, plain(128, "bfloat16", 64)),
    ]
    found += [_prefill_case(*shape, us) for shape, us in PREFILL.items()]
    return [*found, _prefill_case(64, 32768, 64, None, ("triton", "xla"))]  # XLA's loops take long on more rows
