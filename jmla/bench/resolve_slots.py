"""From the indexer's choices, in the order of their scores, to slots."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jmla import kernels
from jmla.bench.case import Case, Work

REQUESTS, PAGES = 64, 512  # 131072 tokens a request
PAGE = 256  # tokens; a compressed stream has a quarter of them
# local ids, rows of a page of them, columns of the window
SHAPES = {
    "v3.2 2048": (2048, PAGE, 0),
    "v4-flash window 128 + 512": (512, PAGE // 4, 128),
    "v4-pro window 128 + 1024": (1024, PAGE // 4, 128),
}


def _work(columns: int, page_size: int, window: int, count: int) -> Work:
    sets = max(2, -(-(80 << 20) // (count * columns * 4))) if count > REQUESTS else 8

    @jax.jit
    def inputs(key: jax.Array) -> tuple[jax.Array, ...]:
        ids, places = jax.random.split(key)
        return (
            jax.random.randint(ids, (count, columns), 0, PAGES * page_size, jnp.int32),
            jnp.arange(count, dtype=jnp.int32) * REQUESTS // count,
            jax.random.randint(places, (count,), 0, PAGES * PAGE, jnp.int32),
        )

    table = jax.random.permutation(jax.random.key(1), REQUESTS * PAGES).reshape(REQUESTS, PAGES).astype(jnp.int32)

    def run(implementation: str) -> Callable[..., Any]:
        def resolve(
            local: jax.Array, rows: jax.Array, positions: jax.Array, table: jax.Array, offset: jax.Array
        ) -> Any:
            return kernels.resolve_slots(
                local,
                rows,
                table,
                page_size=page_size,
                layer_offset=offset,
                window=(table, PAGE, window, positions, offset) if window else None,
                implementation=implementation,
            )

        return resolve

    keys = jax.random.split(jax.random.key(0), sets)
    return Work(run, [inputs(key) for key in keys], (table, jnp.int32(3 * REQUESTS * PAGES)))


def cases() -> list[Case]:
    """Bytes are those of the ids read and of the slots written."""
    return [
        Case(
            "resolve_slots",
            f"{name}, {count} rows",
            functools.partial(_work, *shape, count),
            bytes=count * 4 * (2 * shape[0] + shape[2]),
            calls=60 if count == REQUESTS else 30,
        )
        for count in (REQUESTS, 4096)
        for name, shape in SHAPES.items()
    ]
