"""Cases of the selection: decode and prefill widths of the released models, and rows that are hard to search."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jmla.bench.case import Case, Work
from jmla.bench.timing import L2_BYTES
from jmla.kernels import top_k
from jmla.kernels.shapes import INDEX

# torch.topk(sorted=False), float32, on an H200: (rows, columns, k) -> microseconds.
TORCH = {
    (64, 32_768, 512): 74.0,
    (64, 32_768, 2048): 75.0,
    (64, 131_072, 512): 147.0,
    (64, 131_072, 2048): 150.0,
    (4096, 32_768, 512): 1610.0,
    (4096, 32_768, 2048): 1660.0,
}
# Model, rows, columns.
SHAPES = (
    ("v4-flash", 64, 8192),
    ("v4-pro", 64, 8192),
    ("v4-flash", 64, 32_768),
    ("v3.2", 64, 32_768),
    ("v3.2", 8, 131_072),
    ("v4-flash", 64, 131_072),
    ("v3.2", 64, 131_072),
    ("v3.2", 1, 1_048_576),
    ("v4-flash", 4096, 32_768),
    ("v3.2", 4096, 32_768),
)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _scores(key: jax.Array, rows: int, n: int, narrow: bool) -> jax.Array:
    """Sums of rectified products, as the indexer makes them; ``narrow``: 5 of 8 columns within a thousandth."""
    weights, products, place = jax.random.split(key, 3)
    scores = jnp.zeros((rows, n))
    for head in range(4):
        product = jax.random.normal(jax.random.fold_in(products, head), (rows, n))
        scores += jax.random.normal(jax.random.fold_in(weights, head), (rows, 1)) * jnp.maximum(product, 0)
    if narrow:
        inside, spread = jax.random.uniform(place, (2, rows, n))
        scores = jnp.where(inside < 0.625, 1 + 1e-3 * spread, scores)
    return scores


def _build(rows: int, n: int, k: int, narrow: bool = False, part: float = 1.0) -> Work:
    """``part``: of the columns that the text has reached."""
    count = min(max(-(-L2_BYTES // (4 * rows * n)), 1) + 1, 64)
    sets = [(_scores(jax.random.key(i), rows, n, narrow),) for i in range(count)]
    lengths = jnp.full((rows,), int(n * part), jnp.int32)

    def run(implementation: str) -> Any:
        return lambda scores, lengths: top_k(scores, lengths, k, implementation=implementation)

    return Work(run, sets, shared=(lengths,))


def cases() -> list[Case]:
    """See the module."""

    def case(name: str, rows: int, n: int, k: int, **kwargs: Any) -> Case:
        peer_us = None if kwargs else TORCH.get((rows, n, k))
        return Case(
            "top_k",
            f"{name} {rows} x {n}, k {k}",
            partial(_build, rows, n, k, **kwargs),
            bytes=rows * (4 * n * kwargs.get("part", 1.0) + 4 * k),
            peer="torch.topk" if peer_us else None,
            peer_us=peer_us,
            implementations=("triton", "xla") if peer_us else ("triton",),
            calls=10 if rows * n > 1 << 26 else 30,
        )

    found = [case(model, rows, n, INDEX[model].top_k) for model, rows, n in SHAPES]
    found.append(case("narrow bin", 64, 131_072, 2048, narrow=True))
    found.append(case("sixteenth of a table", 64, 131_072, 2048, part=1 / 16))
    return found
