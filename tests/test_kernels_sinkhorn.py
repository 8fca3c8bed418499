"""Mixing matrices of hyper-connections: against float64, rows on their own, gradients, bad arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmla import kernels

EPS = 1e-6
sinkhorn = jax.jit(kernels.sinkhorn, static_argnames=("iters", "eps", "implementation"))


def logits(rows: int, streams: int, seed: int = 0) -> np.ndarray:
    """Of every size: hardly different, and far beyond what exponentials of float32 hold."""
    rng = np.random.default_rng(seed)
    return np.float32(rng.normal(size=(rows, streams, streams)) * 10.0 ** rng.integers(-2, 3, (rows, 1, 1)))


def reference(x: np.ndarray, iters: int) -> np.ndarray:
    x = x.astype(np.float64)
    mix = np.exp(x - x.max(axis=2, keepdims=True))
    mix = mix / mix.sum(axis=2, keepdims=True) + EPS
    mix /= mix.sum(axis=1, keepdims=True) + EPS
    for _ in range(iters - 1):
        mix /= mix.sum(axis=2, keepdims=True) + EPS
        mix /= mix.sum(axis=1, keepdims=True) + EPS
    return mix


@pytest.mark.parametrize("iters", [1, 2, 20])
@pytest.mark.parametrize(("rows", "streams"), [(1, 4), (64, 4), (33, 4), (5, 2), (6, 8)])
def test_equals_the_formula(rows: int, streams: int, iters: int, implementation: str) -> None:
    x = logits(rows, streams)
    got = np.asarray(sinkhorn(x, iters=iters, eps=EPS, implementation=implementation))
    np.testing.assert_allclose(got, reference(x, iters), rtol=1e-4, atol=1e-7)


def test_no_rows(implementation: str) -> None:
    assert sinkhorn(jnp.zeros((0, 4, 4)), iters=20, eps=EPS, implementation=implementation).shape == (0, 4, 4)


def test_rows_are_on_their_own(implementation: str) -> None:
    """Bit for bit, beside NaN and in batches of other sizes."""
    x = logits(24, 4)
    run = functools.partial(sinkhorn, iters=20, eps=EPS, implementation=implementation)
    whole = np.asarray(run(x))
    for part in (slice(5, 6), slice(3, 20)):
        np.testing.assert_array_equal(np.asarray(run(x[part])), whole[part])
    spoilt = x.copy()
    spoilt[7, 2, 1] = np.nan
    got = np.asarray(run(spoilt))
    assert np.isnan(got[7]).any()
    others = np.arange(24) != 7
    np.testing.assert_array_equal(got[others], whole[others])


def test_gradients(implementation: str) -> None:
    x, weights = logits(8, 4), np.float32(np.random.default_rng(1).normal(size=(8, 4, 4)))

    def loss(x: jax.Array, implementation: str) -> jax.Array:
        return jnp.sum(weights * kernels.sinkhorn(x, iters=5, eps=EPS, implementation=implementation))

    got, want = (jax.grad(loss)(x, name) for name in (implementation, "xla"))
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize(
    ("array", "iters", "error", "text"),
    [
        (np.zeros((2, 4, 4), np.float16), 20, TypeError, "logits to have dtype float32"),
        (np.zeros((2, 4, 3), np.float32), 20, ValueError, "N, N"),
        (np.zeros((2, 0, 0), np.float32), 20, ValueError, "N of at least 1"),
        (np.zeros((4, 4), np.float32), 20, ValueError, "R, N, N"),
        (np.zeros((2, 4, 4), np.float32), 0, ValueError, "iters=0 to be at least 1"),
    ],
)
def test_bad_arguments(array: np.ndarray, iters: int, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        kernels.sinkhorn(array, iters=iters, eps=EPS)


def test_three_streams_are_left_to_xla() -> None:
    with kernels.target(compute_capability=90), pytest.raises(ValueError, match="power of two"):
        kernels.sinkhorn(jnp.zeros((2, 3, 3)), iters=20, eps=EPS, implementation="triton")
