"""Packing of a prefill chunk and of a decode step into pools that hold other tokens too."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jmla import kernels
from jmla.bench.case import Case, Work
from jmla.kernels import layouts
from jmla.kernels.layouts import KVLayout

PREFILL, DECODE = 65_536, 64  # rows
SLOTS = 4 * PREFILL  # of a pool
# layout, values under the norm, rotated values
ROWS = {
    "v4 window footer584(256)": (layouts.footer584(256), 512, 64),
    "v4 csa footer584(64)": (layouts.footer584(64), 512, 64),
    "v3.2 inline656 2^n scales": (layouts.inline656(64), 512, 64),
    "glm inline656 float32 scales": (layouts.inline656(64, scale_form="float32"), 512, 64),
    "v3.2 index132 Hadamard": (layouts.index132(64), 0, 0),
    "v4 index132 norm, rope, Hadamard": (layouts.index132(64), 128, 64),
    "plain bf16 576": (layouts.plain(576, "bfloat16", 64), 512, 64),
    "plain bf16 512": (layouts.plain(512, "bfloat16", 64), 512, 64),
}
COMPARED = ("v4 csa footer584(64)", "glm inline656 float32 scales", "v3.2 index132 Hadamard")  # XLA's time too


def _work(layout: KVLayout, normed: int, turned: int, count: int, scattered: bool) -> Work:
    sets = 2 if count == PREFILL else 8
    pages = SLOTS // layout.page_size

    @jax.jit
    def inputs(key: jax.Array) -> tuple[jax.Array, ...]:
        rows, angles, weight, place = jax.random.split(key, 4)
        if scattered:
            slots = jax.random.permutation(place, SLOTS)
        else:
            first = layout.page_size * jax.random.permutation(place, pages)
            slots = (first[:, None] + jnp.arange(layout.page_size)).ravel()
        angle = jax.random.uniform(angles, (count, turned // 2), maxval=6.0)
        return (
            jax.random.normal(rows, (count, layout.width), jnp.bfloat16),
            slots[:count].astype(jnp.int32),
            jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=1),
            1 + 0.1 * jax.random.normal(weight, (normed,), jnp.float32),
        )

    def run(implementation: str) -> Callable[..., Any]:
        def pack(rows: jax.Array, slots: jax.Array, table: jax.Array, weight: jax.Array, pool: jax.Array) -> jax.Array:
            return kernels.kv_pack(
                rows,
                slots,
                pool,
                layout=layout,
                norm_weight=weight if normed else None,
                cos_sin=table if turned else None,
                implementation=implementation,
            )

        return pack

    return Work(run, [inputs(key) for key in jax.random.split(jax.random.key(0), sets)], state=layout.zeros(pages))


def cases() -> list[Case]:
    """Bytes are those of the bf16 rows read and of the packed rows written.

    A prefill fills pages from end to end, a decode step writes one row of each. One prefill is timed with its rows
    scattered over all slots too.
    """
    shapes = [(name, count, count == DECODE) for count in (PREFILL, DECODE) for name in ROWS]
    shapes.append((COMPARED[0], PREFILL, True))
    return [
        Case(
            "kv_pack",
            f"{name}, {count} rows" + (" scattered" if scattered and count == PREFILL else ""),
            functools.partial(_work, *ROWS[name], count, scattered),
            bytes=count * (2 * ROWS[name][0].width + ROWS[name][0].bytes_per_token),
            implementations=("triton", "cute", "pallas", *(("xla",) if name in COMPARED else ())),
            calls=20 if count == PREFILL else 60,
        )
        for name, count, scattered in shapes
    ]
