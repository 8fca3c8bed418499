"""The mixing matrices of V4's hyper-connections, beside XLA."""

import functools
from collections.abc import Callable

import jax

from jmla import kernels
from jmla.bench.case import Case, Work

STREAMS, ITERS, EPS = 4, 20, 1e-6  # of the released models


def _work(rows: int) -> Work:
    def run(implementation: str) -> Callable[..., jax.Array]:
        return functools.partial(kernels.sinkhorn, iters=ITERS, eps=EPS, implementation=implementation)

    keys = jax.random.split(jax.random.key(0), 4)
    return Work(run, [(jax.random.normal(key, (rows, STREAMS, STREAMS)),) for key in keys])


def cases() -> list[Case]:
    """Bytes are those of the logits and of the matrices."""
    return [
        Case("sinkhorn", f"{rows} rows", functools.partial(_work, rows), bytes=8 * rows * STREAMS**2)
        for rows in (1, 64, 4096)
    ]
