"""Merging parts: against attention over all keys, empty and poisoned parts, sinks, gradients."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmla import kernels

merge = jax.jit(kernels.merge)


def parts(splits: list[int], seed: int = 0, shift: float = 0.0):
    """Attention over consecutive parts of the keys, and over all of them, in float64."""
    rng = np.random.default_rng(seed)
    total = sum(splits)
    logits, values = rng.standard_normal((3, 2, total)) * 3 + shift, rng.standard_normal((total, 4))

    def attention(start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        if start == end:
            return np.full((3, 2, 4), np.nan), np.full((3, 2), -np.inf)
        lse = np.logaddexp.reduce(logits[..., start:end], axis=-1)
        return np.exp(logits[..., start:end] - lse[..., None]) @ values[start:end], lse

    ends = np.cumsum([0, *splits])
    outs, lses = zip(*[attention(a, b) for a, b in itertools.pairwise(ends)], strict=True)
    return jnp.float32(np.stack(outs)), jnp.float32(np.stack(lses)), attention(0, total)


@pytest.mark.parametrize("splits", [[9, 1], [3, 0, 0, 5], [0, 1], [1] * 16, [7]], ids=str)
def test_d3_d10_parts_equal_the_whole(splits: list[int]) -> None:
    for shift in (0.0, 80.0, -200.0):
        outs, lses, (out, lse) = parts(splits, len(splits), shift)
        got, got_lse = merge(outs, lses)
        np.testing.assert_allclose(got, out, atol=5e-5)
        np.testing.assert_allclose(got_lse, lse, rtol=1e-6, atol=1e-5)


def test_d9_a_poisoned_empty_part_is_not_looked_at() -> None:
    x = jnp.array([[1.5, -2.0]])
    outs = jnp.stack([jnp.full_like(x, jnp.nan), x])[:, None]
    lses = jnp.array([-jnp.inf, 0.0]).reshape(2, 1, 1)
    first = merge(outs, lses)
    np.testing.assert_array_equal(first[0][0], x)
    assert first[1].tolist() == [[0.0]]
    for _ in range(20):
        again = merge(outs, lses)
        assert again[0].tobytes() == first[0].tobytes()
        assert again[1].tobytes() == first[1].tobytes()


def test_d3_all_parts_empty() -> None:
    for sinks in (None, jnp.zeros(2), jnp.array([jnp.inf, -jnp.inf])):
        out, lse = kernels.merge(jnp.full((3, 1, 2, 4), jnp.nan), jnp.full((3, 1, 2), -jnp.inf), sinks)
        np.testing.assert_array_equal(out, np.zeros((1, 2, 4)))
        np.testing.assert_array_equal(lse, np.full((1, 2), -np.inf))


def test_d2_sinks_enter_once_and_never_the_lse() -> None:
    outs, lses, (out, lse) = parts([4, 3, 2])
    sinks = np.array([0.5, -1.0])
    got, got_lse = merge(outs, lses, jnp.float32(sinks))
    np.testing.assert_allclose(got, out * (np.exp(lse) / (np.exp(lse) + np.exp(sinks)))[..., None], atol=5e-6)
    np.testing.assert_allclose(got_lse, lse, rtol=1e-6)
    for large, keep in [(3e38, 0.0), (jnp.inf, 0.0), (-3e38, 1.0), (-jnp.inf, 1.0)]:
        got, got_lse = merge(outs, lses, jnp.full(2, large))
        np.testing.assert_allclose(got, out * keep, atol=5e-6)
        np.testing.assert_allclose(got_lse, lse, rtol=1e-6)


def test_merging_in_two_steps_equals_one() -> None:
    outs, lses, _ = parts([4, 3, 2, 6])
    left, right = merge(outs[:2], lses[:2]), merge(outs[2:], lses[2:])
    got = merge(jnp.stack([left[0], right[0]]), jnp.stack([left[1], right[1]]), jnp.ones(2))
    want = merge(outs, lses, jnp.ones(2))
    np.testing.assert_allclose(got[0], want[0], atol=2e-6)
    np.testing.assert_allclose(got[1], want[1], atol=2e-6)


def test_output_keeps_the_dtype_and_accumulates_in_float32() -> None:
    outs, lses, (out, _) = parts([4] * 32)
    got, lse = merge(outs.astype(jnp.bfloat16), lses)
    assert got.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(got.astype(jnp.float32), out, atol=0.02)


def test_gradients_are_finite_beside_empty_parts() -> None:
    outs, lses, _ = parts([4, 0, 3])
    lses = lses.at[:, 0].set(-jnp.inf)  # one query without any key
    outs = jnp.nan_to_num(outs)

    def loss(outs: jax.Array, lses: jax.Array, sinks: jax.Array) -> jax.Array:
        out, lse = kernels.merge(outs, lses, sinks)
        return jnp.sum(out**2) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0.0))

    grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(outs, lses, jnp.zeros(2))
    assert all(np.isfinite(g).all() for g in grads)
    step = 1e-2
    up, down = (loss(outs, lses.at[0, 1, 0].add(d), jnp.zeros(2)) for d in (step, -step))
    np.testing.assert_allclose(grads[1][0, 1, 0], (up - down) / (2 * step), rtol=1e-2)


def test_wrong_arguments_are_named() -> None:
    outs, lses = jnp.zeros((2, 3, 4)), jnp.zeros((2, 3))
    cases = [
        (ValueError, "lses", (outs, jnp.zeros((2, 1)))),
        (ValueError, "outs", (outs[:0], lses[:0])),
        (ValueError, "outs", (lses, lses)),
        (TypeError, "lses", (outs, lses.astype(jnp.bfloat16))),
        (TypeError, "outs", (outs.astype(jnp.int32), lses)),
        (ValueError, "sinks", (outs, lses, jnp.zeros(4))),
        (TypeError, "sinks", (outs, lses, jnp.zeros(3, jnp.bfloat16))),
    ]
    for error, match, args in cases:
        with pytest.raises(error, match=match):
            kernels.merge(*args)


def test_debug_checks_name_the_bad_lse() -> None:
    outs, lses = jnp.zeros((2, 3, 4)), jnp.zeros((2, 3))
    with pytest.raises(kernels.ValueCheckError, match=r"lses\[1, 2\] = inf"), kernels.debug_checks():
        merge(outs, lses.at[1, 2].set(jnp.inf))
    with kernels.debug_checks():
        merge(outs.at[0].set(jnp.nan), lses.at[0].set(-jnp.inf))
