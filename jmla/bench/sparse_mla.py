"""Shapes of the sparse attention: decode from FP8 pools by batch, and prefill, beside FlashMLA's recorded times."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jmla.bench.case import Case, Work
from jmla.kernels import Epilogue, kv_pack, sparse_mla
from jmla.kernels.layouts import KVLayout, footer584
from jmla.kernels.shapes import ATTENTION, AttentionShape

POOL_BYTES = 2 << 30  # of the pool that most slots are read from: many times the L2 cache
DISTINCT_ROWS = 1 << 17  # of a pool, the rest repeats them
SETS_BYTES = 150e6  # of the rows that all input sets together read

# FlashMLA, microseconds by batch: commit 9241ae3 on an H200.
DECODE = {
    "v3.2": {1: 17.4, 2: 16.7, 4: 19.3, 8: 25.8, 16: 38.5, 32: 61.6, 64: 92.1, 128: 183, 256: 364},
    "v4-flash-csa": {1: 13.0, 2: 13.1, 4: 14.0, 8: 14.8, 16: 17.6, 32: 24.3, 64: 43.0, 128: 44.5, 256: 86.1},
    "v4-pro-csa": {1: 14.2, 2: 15.1, 4: 16.0, 8: 19.6, 16: 27.3, 32: 44.5, 64: 52.3, 128: 102, 256: 201},
    "v4-flash-hca": {1: 28.4, 8: 45.9, 64: 230},
    "v4-pro-hca": {1: 25.5, 8: 61.0, 64: 324},
}
# 4096 rows over 32768 keys, which FlashMLA reads in bf16 and these kernels straight from the FP8 pool.
PREFILL = {"v3.2": 4070, "v4-flash-csa": 716, "v4-pro-csa": 2294}
WITHOUT_PEER = {"glm-5": (1, 8, 64)}  # decode batches of models whose rows no peer was measured on
WITH_CODES = {"v4-flash-csa": (1, 16, 32, 64, 128), "v4-pro-csa": (1, 8, 32, 64)}  # batches that end in an epilogue too
TIMED_BY_ALL = (1, 64)  # batches at which the portable kernel and XLA are timed too


@functools.lru_cache(maxsize=4)
def _pool(layout: KVLayout, pages: int) -> jax.Array:
    """A pool of normal rows."""

    @jax.jit
    def fill() -> jax.Array:
        distinct = min(pages, DISTINCT_ROWS // layout.page_size)
        rows = jax.random.normal(jax.random.key(layout.page_size), (distinct * layout.page_size, layout.width))
        slots = jnp.arange(len(rows), dtype=jnp.int32)
        one = kv_pack(rows, slots, layout.zeros(distinct), layout=layout, implementation="xla")
        return jnp.tile(one, (-(-pages // distinct), 1))[:pages]

    return fill()


def _build(shape: AttentionShape, rows: int, keys: int | None, codes: bool = False) -> Work:
    layouts = [shape.layout] + ([shape.extra_layout] if shape.extra_layout is not None else [])
    columns = [shape.columns, shape.extra_columns][: len(layouts)]
    pools = []
    for i, layout in enumerate(layouts):
        most = POOL_BYTES if i == len(layouts) - 1 else POOL_BYTES // 16
        pages = most // layout.page_stride if keys is None else -(-keys // layout.page_size)
        pools.append(_pool(layout, pages))
    count = 1
    if keys is None:
        attended = rows * sum(columns) * 600
        count = max(3, min(60, math.ceil(SETS_BYTES / attended)))

    @jax.jit
    def one_set(seed: jax.Array) -> Any:
        keys = jax.random.split(jax.random.key(seed), 3)
        q = jax.random.normal(keys[0], (rows, shape.heads, shape.width)).astype(jnp.bfloat16)
        slots = [
            jax.random.randint(key, (rows, width), 0, len(pool) * layout.page_size, jnp.int32)
            for key, width, pool, layout in zip(keys[1:], columns, pools, layouts, strict=False)
        ]
        return (q, *slots)

    epilogue = None
    if codes:
        cos_sin = jax.random.normal(jax.random.key(2), (rows, 64))
        epilogue = Epilogue(cos_sin, groups=shape.groups, scale_form="ue8m0")
    sinks = jax.random.normal(jax.random.key(1), (shape.heads,)) if shape.sinks else None

    def run(implementation: str, epilogue: Epilogue | None = epilogue) -> Callable[..., Any]:
        def call(q: jax.Array, *rest: Any) -> Any:
            slots, pools = rest[: len(layouts)], rest[len(layouts) :]
            extra = None
            if shape.extra_layout is not None:
                extra = (pools[1], shape.extra_layout, slots[1], None)
            return sparse_mla(
                q,
                pools[0],
                slots[0],
                layout=shape.layout,
                scale=shape.scale,
                extra=extra,
                sinks=sinks,
                epilogue=epilogue,
                implementation=implementation,
            )

        return call

    without = functools.partial(run, epilogue=None) if codes else None
    return Work(run, [one_set(jnp.uint32(i)) for i in range(count)], tuple(pools), without=without)


def _case(
    shape: AttentionShape, rows: int, peer_us: float | None, keys: int | None = None, codes: bool = False
) -> Case:
    every = keys is None and rows in TIMED_BY_ALL and not codes
    row_bytes = shape.layout.bytes_per_token
    return Case(
        op="sparse_mla",
        name=f"{shape.name} decode{' to codes' if codes else ''}, batch {rows}"
        if keys is None
        else f"{shape.name} prefill, {rows} x {keys}",
        build=lambda: _build(shape, rows, keys, codes),
        flops=shape.flops(rows),
        bytes=rows
        * ((shape.columns + shape.extra_columns) * row_bytes + 2 * shape.heads * (shape.width + shape.v_dim)),
        peer="FlashMLA" if peer_us else None,
        peer_us=peer_us,
        implementations=("cute", "triton", "portable", "xla") if every else ("cute", "triton"),
        calls=40 if keys is None else 4,
    )


def cases() -> list[Case]:
    """Decode at every recorded batch, also to codes, then prefill."""
    found = []
    for name, times in DECODE.items():
        shape = ATTENTION[name]
        if name.endswith("hca"):  # the peer's compressed pages hold 64 entries
            shape = _paged_64(shape)
        found += [_case(shape, rows, us) for rows, us in times.items()]
    found += [_case(ATTENTION[name], rows, None) for name, batches in WITHOUT_PEER.items() for rows in batches]
    found += [
        _case(ATTENTION[name], rows, None, codes=True) for name, batches in WITH_CODES.items() for rows in batches
    ]
    return found + [_case(ATTENTION[name], 4096, us, 32768) for name, us in PREFILL.items()]


def _paged_64(shape: AttentionShape) -> AttentionShape:
    return dataclasses.replace(shape, extra_layout=footer584(64))
