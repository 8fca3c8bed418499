"""Exact top-k against a sort in NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmla.kernels import launch
from jmla.kernels.shapes import INDEX
from jmla.kernels.top_k import top_k

select = jax.jit(top_k, static_argnums=2, static_argnames="implementation")


def reference(scores, lengths, k):
    out = np.full((scores.shape[0], k), -1, np.int32)
    with np.errstate(invalid="ignore"):  # signalling NaN
        scores = np.asarray(scores).astype(np.float64)
    for r, row in enumerate(scores):
        n = row.size if lengths is None else min(row.size, max(int(lengths[r]), 0))
        eligible = np.flatnonzero(row[:n] > -np.inf)
        best = np.sort(eligible[np.argsort(-row[eligible], kind="stable")[:k]])
        out[r, : best.size] = best
    return out


def check(scores, lengths, k, implementation):
    got = select(scores, lengths, k, implementation=implementation)
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got, reference(scores, lengths, k))


def on_a_gpu():
    if launch.interpreter is not None or all(device.platform != "gpu" for device in jax.devices()):
        pytest.skip("too large for the interpreter")


@pytest.mark.parametrize("k", [1, 2, 7, 133, 192])
@pytest.mark.parametrize("few_values", [False, True])
def test_matches_sort(k, few_values, implementation):
    rng = np.random.default_rng(k)
    scores = rng.normal(size=(9, 150)).astype(np.float32)
    if few_values:
        scores = np.round(scores)
    scores[rng.random(scores.shape) < 0.1] = -np.inf
    scores[rng.random(scores.shape) < 0.05] = np.nan
    scores[0, 3] = np.inf
    lengths = np.array([150, 0, -1, 1, 149, 200, 40, 133, -7], np.int32)
    check(scores, lengths, k, implementation)
    check(scores, None, k, implementation)


def test_c4_negative_lengths(implementation):
    scores = np.tile(np.arange(6, dtype=np.float32), (4, 1))
    got = select(scores, np.array([-1, 0, 1, 5], np.int32), 4, implementation=implementation)
    np.testing.assert_array_equal(got, [[-1] * 4, [-1] * 4, [0, -1, -1, -1], [1, 2, 3, 4]])


def test_c5_equal_scores_past_length(implementation):
    got = select(np.full((1, 8), 3.5, np.float32), np.array([5], np.int32), 4, implementation=implementation)
    np.testing.assert_array_equal(got, [[0, 1, 2, 3]])


def test_c5_zeros_of_either_sign_are_equal(implementation):
    scores = np.array([[-1.0, -0.0, 0.0, -0.0, -1.0, 0.0]], np.float32)
    for k in (1, 2, 3, 4, 5):
        check(scores, None, k, implementation)


def test_c7_k_past_columns(implementation):
    got = select(np.zeros((1, 3), np.float32), np.array([1], np.int32), 8, implementation=implementation)
    np.testing.assert_array_equal(got, [[0] + [-1] * 7])
    assert select(np.zeros((2, 0), np.float32), None, 2, implementation=implementation).tolist() == [[-1, -1]] * 2
    assert select(np.zeros((0, 5), np.float32), None, 2, implementation=implementation).shape == (0, 2)


def test_c13_nan_is_never_chosen(implementation):
    got = select(np.array([[np.nan, 1, 3]], np.float32), None, 2, implementation=implementation)
    np.testing.assert_array_equal(got, [[1, 2]])
    got = select(np.full((1, 3), np.nan, np.float32), None, 2, implementation=implementation)
    np.testing.assert_array_equal(got, [[-1, -1]])


def test_c14_negative_nan_small_k(implementation):
    scores = np.random.default_rng(0).normal(size=(1, 1024)).astype(np.float32)
    scores[0, 100:103] = np.array([0xFFC00000, 0xFFFFFFFF, 0x7FC00000], np.uint32).view(np.float32)
    for k in (8, 16):
        check(scores, None, k, implementation)


@pytest.mark.parametrize("k", [1, 133, 192, *sorted({shape.top_k for shape in INDEX.values()})])
def test_widths_of_the_models(k, implementation):
    scores = np.random.default_rng(1).permutation(2200).astype(np.float32)[None]
    check(scores, np.array([2150], np.int32), k, implementation)


@pytest.mark.parametrize("n", [1, 3, 127, 128, 129, 250, 1030, 4096, 8200])
def test_any_number_of_columns(n, implementation):
    rng = np.random.default_rng(n)
    for k in sorted({1, min(n, 37), n}):
        check(rng.normal(size=(2, n)).astype(np.float32), None, k, implementation)


def hard_rows(n, rng):
    """Rows that mislead a search by guessing or by bits, by name."""
    normal = rng.normal(size=n).astype(np.float32)
    narrow = normal.copy()
    narrow[rng.permutation(n)[: n * 5 // 8]] = 1 + rng.random(n * 5 // 8) * 1e-3
    ulps = (np.float32(1).view(np.uint32) + rng.integers(0, 3, n, dtype=np.uint32)).view(np.float32)
    outliers = normal.copy()
    outliers[[0, n // 2, -1]] = 3e38, -3e38, 1e-38
    infinite = normal.copy()
    infinite[rng.permutation(n)[: n // 3]] = np.inf
    holes = normal.copy()
    holes[rng.random(n) < 0.99] = -np.inf
    return {
        "all equal": np.full(n, 3.5, np.float32),
        "two values": np.where(rng.random(n) < 0.5, 1, 2).astype(np.float32),
        "one above the rest": np.where(np.arange(n) == n - 1, 2, 1).astype(np.float32),
        "neighbours": ulps,
        "zeros": np.where(rng.random(n) < 0.5, 0.0, -0.0).astype(np.float32),
        "zeros among others": (np.round(normal) * np.where(rng.random(n) < 0.5, 1, -1)).astype(np.float32),
        "narrow": narrow.astype(np.float32),
        "outliers": outliers,
        "infinities": infinite,
        "extremes": np.where(normal > 0, np.finfo(np.float32).max, -np.finfo(np.float32).max).astype(np.float32),
        "any bits": rng.integers(0, 2**32, n, dtype=np.uint32).view(np.float32),
        "holes": holes,
        "nothing": np.full(n, np.nan, np.float32),
        "bfloat16": (normal.view(np.uint32) & 0xFFFF0000).view(np.float32),
        "rising": np.arange(n, dtype=np.float32),
        "falling": -np.exp(np.linspace(-80, 80, n)).astype(np.float32),
        "heavy tail": rng.standard_cauchy(n).astype(np.float32),
    }


@pytest.mark.parametrize("n", [700, 5000])
@pytest.mark.parametrize("k", [1, 64, 512])
def test_hard_rows(n, k, implementation):
    rows = hard_rows(n, np.random.default_rng(n + k))
    check(np.stack(list(rows.values())), None, k, implementation)


def test_smallest_numbers_are_told_apart(implementation):
    bits = np.random.default_rng(0).integers(0, 2**22, (2, 1000), dtype=np.uint32)
    scores = np.where(np.arange(1000) % 3 == 0, bits | 0x80000000, bits).astype(np.uint32).view(np.float32)
    for k in (5, 300, 900):
        check(scores, None, k, implementation)


@pytest.mark.parametrize(("n", "k"), [(33_000, 16), (40_001, 512), (70_000, 2048), (33_000, 5000)])
def test_rows_wider_than_a_program(n, k, implementation):
    rng = np.random.default_rng(k)
    rows = hard_rows(n, rng)
    scores = np.stack([rng.normal(size=n).astype(np.float32), rows["two values"], rows["holes"], rows["falling"]])
    check(scores, np.array([n, n - 7, 20_000, 16_384], np.int32), k, implementation)
    check(scores[:2], None, k, implementation)
    check(scores, np.array([0, -3, 1, 16_385], np.int32), k, implementation)


def test_rows_narrowed_twice(implementation):
    scores = np.random.default_rng(5).normal(size=(2, 280_000)).astype(np.float32)
    scores[1] = np.round(scores[1] * 20)
    check(scores, np.array([280_000, 270_001], np.int32), 2048, implementation)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float64"])
def test_other_dtypes(dtype, implementation):
    scores = np.random.default_rng(3).normal(size=(3, 1204)).astype(jnp.dtype(dtype))
    scores[:, 5:9] = np.array([np.nan, -0.0, 0.0, -np.nan], scores.dtype)
    if dtype == "float64":
        scores = scores.astype(np.float32).astype(np.float64)
    check(scores, np.array([1204, 1001, 3], np.int32), 300, implementation)


def test_low_precision_scores_and_vmap(implementation):
    scores = jnp.asarray(np.random.default_rng(2).normal(size=(3, 2, 20)), jnp.bfloat16)
    lengths = jnp.array([[20, 3], [5, 0], [19, 20]])
    choose = partial(top_k, k=5, implementation=implementation)
    got = jax.vmap(lambda s: choose(s, None))(scores)
    ragged = jax.vmap(choose)(scores, lengths)
    shared = jax.vmap(choose, in_axes=(1, None), out_axes=1)(scores, jnp.array([20, 7, 1]))
    nested = jax.vmap(jax.vmap(lambda s: choose(s, None)))(scores[:, None])
    for i in range(3):
        np.testing.assert_array_equal(got[i], reference(scores[i], None, 5))
        np.testing.assert_array_equal(nested[i, 0], got[i])
        np.testing.assert_array_equal(ragged[i], reference(scores[i], lengths[i], 5))
    for i in range(2):
        np.testing.assert_array_equal(shared[:, i], reference(scores[:, i], [20, 7, 1], 5))


def test_gradients_pass_through_the_choice(implementation):
    scores = jnp.asarray(np.random.default_rng(4).normal(size=(2, 30)), jnp.float32)

    def best(scores):
        chosen = top_k(scores, jnp.array([30, 9]), 4, implementation=implementation)
        return jnp.sum(jnp.take_along_axis(scores, chosen, axis=1) ** 2)

    want = np.zeros((2, 30), np.float32)
    for r, columns in enumerate(reference(scores, [30, 9], 4)):
        want[r, columns] = 2 * scores[r, columns]
    np.testing.assert_allclose(jax.grad(best)(scores), want, rtol=1e-6)


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


def test_what_the_kernel_refuses(implementation):
    if implementation != "triton":
        pytest.skip("a limit of the kernel")
    with pytest.raises(ValueError, match="16384"):
        top_k(np.zeros((1, 32_769), np.float32), None, 16_385, implementation="triton")


@pytest.mark.parametrize(("rows", "n"), [(64, 131_072), (16, 1_048_576), (300, 32_768)])
@pytest.mark.parametrize("k", [512, 1024, 2048])
def test_large(rows, n, k, implementation):
    on_a_gpu()
    rng = np.random.default_rng(n + k)
    scores = rng.standard_normal((rows, n), np.float32)
    hard = list(hard_rows(n, rng).values())[:rows]
    scores[-len(hard) :] = hard
    lengths = rng.integers(0, n + 1, rows).astype(np.int32)
    lengths[::3] = n
    lengths[1::11] = k + rng.integers(-3, 4, lengths[1::11].size)
    check(scores, lengths, k, implementation)
    check(scores, None, k, implementation)


def test_repeats_are_equal(implementation):
    on_a_gpu()
    rng = np.random.default_rng(0)
    scores = np.stack([*hard_rows(131_072, rng).values()])
    first = np.asarray(select(scores, None, 2048, implementation=implementation))
    for _ in range(20):
        np.testing.assert_array_equal(select(scores, None, 2048, implementation=implementation), first)


def test_scores_past_4_gib(implementation):
    """More scores than int32 can count: the last rows must be those of their own offsets."""
    on_a_gpu()
    if implementation != "triton":
        pytest.skip("an offset of the kernel")
    rows, n, k = 2100, 1 << 20, 512

    def hashed(rows):
        x = jnp.uint32(rows)[:, None] * jnp.uint32(747796405) + jnp.arange(n, dtype=jnp.uint32) * jnp.uint32(2891336453)
        x = (x ^ (x >> 15)) * jnp.uint32(2246822519)
        return (x >> 8).astype(jnp.float32)

    got = select(jax.jit(hashed)(jnp.arange(rows)), None, k, implementation=implementation)
    some = np.array([0, 1023, 2047, 2048, 2049, rows - 1])
    np.testing.assert_array_equal(np.asarray(got)[some], reference(np.asarray(hashed(jnp.asarray(some))), None, k))
