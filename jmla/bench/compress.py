"""The compressors of V4 in a decode step and a prefill chunk, beside XLA."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jmla import kernels
from jmla.bench.case import Case, Work
from jmla.kernels import shapes
from jmla.kernels.shapes import CompressShape

CHUNK = 4096  # tokens of a prefill
# rows, tokens of each
CALLS = {"decode, 1 row": (1, 1), "decode, 64 rows": (64, 1), f"prefill, {CHUNK} tokens": (1, CHUNK)}


def _sizes(shape: CompressShape) -> tuple[int, int]:
    """Values of a token, and tokens of the ring."""
    halves = 2 if shape.overlap else 1
    return halves * shape.width, halves * shape.ratio


def _work(shape: CompressShape, rows: int, steps: int) -> Work:
    width, ring = _sizes(shape)

    @jax.jit
    def inputs(key: jax.Array, number: int) -> tuple[jax.Array, ...]:
        values, gates = jax.random.normal(key, (2, rows, steps, width), jnp.float32)
        # The rows of a batch stand all over their windows; the last one closes its.
        start = shape.ratio * (2 + number) - 1 + (1 + jnp.arange(rows, dtype=jnp.int32)) * shape.ratio // rows
        return values, gates, start[:, None] + jnp.arange(steps, dtype=jnp.int32)

    ape = jax.random.normal(jax.random.key(1), (shape.ratio, width))

    def run(implementation: str) -> Callable[..., Any]:
        def compress(values: jax.Array, gates: jax.Array, positions: jax.Array, carried: Any) -> Any:
            state, first = carried
            entries, state = kernels.compress(
                values,
                gates,
                state,
                positions,
                ratio=shape.ratio,
                overlap=shape.overlap,
                ape=ape,
                implementation=implementation,
            )
            # A kernel cannot but compute them; XLA computes only what is asked for.
            return state, entries[0, 0, 0] if implementation != "xla" else first + entries[0, 0, 0]

        return compress

    state = jnp.zeros((rows, ring, 2 * width), jnp.float32)
    keys = jax.random.split(jax.random.key(0), 2 if steps > 1 else 8)
    return Work(run, [inputs(key, i) for i, key in enumerate(keys)], state=(state, jnp.float32(0)))


def _bytes(shape: CompressShape, rows: int, steps: int) -> int:
    """Of values and gates that are read and that enter the ring, of those that a step takes from it, of the entries."""
    width, ring = _sizes(shape)
    windows = rows * (steps // shape.ratio + 1)
    taken = -(-rows // shape.ratio) * ring * shape.width if steps == 1 else 0
    return 4 * (2 * (width * rows * (steps + min(steps, ring)) + taken) + windows * shape.width)


def cases() -> list[Case]:
    """The inputs are float32, as the networks give them; in a step of many rows some close a window."""
    return [
        Case(
            "compress",
            f"{name}, {call}",
            functools.partial(_work, shape, rows, steps),
            bytes=_bytes(shape, rows, steps),
            implementations=("triton", "pallas", "xla"),
            calls=20 if steps > 1 else 60,
        )
        for call, (rows, steps) in CALLS.items()
        for name, shape in shapes.COMPRESS.items()
    ]
