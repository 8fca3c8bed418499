"""Exact top-k against a sort in NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmla.kernels.top_k import top_k

select = jax.jit(top_k, static_argnums=2)


def reference(scores, lengths, k):
    out = np.full((scores.shape[0], k), -1, np.int32)
    for r, row in enumerate(np.asarray(scores, np.float64)):
        n = row.size if lengths is None else min(row.size, max(int(lengths[r]), 0))
        eligible = [c for c in range(n) if row[c] > -np.inf]
        best = sorted(eligible, key=lambda c: (-row[c], c))[:k]
        out[r, : len(best)] = best
    return out


@pytest.mark.parametrize("k", [1, 2, 7, 133, 192])
@pytest.mark.parametrize("few_values", [False, True])
def test_matches_sort(k, few_values):
    rng = np.random.default_rng(k)
    scores = rng.normal(size=(9, 150)).astype(np.float32)
    if few_values:
        scores = np.round(scores)
    scores[rng.random(scores.shape) < 0.1] = -np.inf
    scores[rng.random(scores.shape) < 0.05] = np.nan
    scores[0, 3] = np.inf
    lengths = np.array([150, 0, -1, 1, 149, 200, 40, 133, -7], np.int32)
    np.testing.assert_array_equal(select(scores, lengths, k), reference(scores, lengths, k))
    np.testing.assert_array_equal(select(scores, None, k), reference(scores, None, k))


def test_c4_negative_lengths():
    scores = np.tile(np.arange(6, dtype=np.float32), (4, 1))
    got = select(scores, np.array([-1, 0, 1, 5], np.int32), 4)
    np.testing.assert_array_equal(got, [[-1] * 4, [-1] * 4, [0, -1, -1, -1], [4, 3, 2, 1]])


def test_c5_equal_scores_past_length():
    got = select(np.full((1, 8), 3.5, np.float32), np.array([5], np.int32), 4)
    np.testing.assert_array_equal(got, [[0, 1, 2, 3]])


def test_c5_zeros_of_either_sign_are_equal():
    np.testing.assert_array_equal(select(np.array([[-0.0, 0.0, -1.0]], np.float32), None, 3), [[0, 1, 2]])


def test_c7_k_past_columns():
    np.testing.assert_array_equal(select(np.zeros((1, 3), np.float32), np.array([1], np.int32), 8), [[0] + [-1] * 7])
    assert select(np.zeros((2, 0), np.float32), None, 2).tolist() == [[-1, -1], [-1, -1]]
    assert select(np.zeros((0, 5), np.float32), None, 2).shape == (0, 2)


def test_c13_nan_is_never_chosen():
    np.testing.assert_array_equal(select(np.array([[np.nan, 1, 3]], np.float32), None, 2), [[2, 1]])
    np.testing.assert_array_equal(select(np.full((1, 3), np.nan, np.float32), None, 2), [[-1, -1]])


def test_c14_negative_nan_small_k():
    scores = np.random.default_rng(0).normal(size=(1, 1024)).astype(np.float32)
    scores[0, 100:103] = np.array([0xFFC00000, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    for k in (8, 16):
        np.testing.assert_array_equal(select(scores, None, k), reference(scores, None, k))


def test_v4_widths():
    scores = np.random.default_rng(1).permutation(1100).astype(np.float32)[None]
    for k in (1, 133, 192, 1024):
        np.testing.assert_array_equal(select(scores, None, k)[0], np.argsort(-scores[0])[:k])


def test_low_precision_scores_and_vmap():
    scores = jnp.asarray(np.random.default_rng(2).normal(size=(3, 2, 20)), jnp.bfloat16)
    got = jax.vmap(partial(top_k, lengths=None, k=5))(scores)
    for i in range(3):
        np.testing.assert_array_equal(got[i], reference(np.asarray(scores[i]), None, 5))


def test_bad_arguments():
    scores = np.zeros((2, 4), np.float32)
    with pytest.raises(ValueError, match="k=0"):
        top_k(scores, None, 0)
    with pytest.raises(ValueError, match="lengths"):
        top_k(scores, np.zeros(3, np.int32), 1)
    with pytest.raises(ValueError, match="int32"):
        top_k(scores, np.full(2, 2**32, np.int64), 1)
    with pytest.raises(ValueError, match="cute"):
        top_k(scores, None, 1, implementation="cute")
    with pytest.raises(TypeError, match="float"):
        top_k(np.zeros((2, 4), np.int32), None, 1)
    with pytest.raises(ValueError, match=r"\[R, n\]"):
        top_k(scores[0], None, 1)
