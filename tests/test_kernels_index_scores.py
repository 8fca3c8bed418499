"""Index scores against a float64 reference, and against themselves in other batches, chunks and page tables."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import kernel_reference as reference
import ml_dtypes
import numpy as np
import pytest

from jmla.kernels import debug_checks, index_scores, kv_pack, top_k
from jmla.kernels.checks import ValueCheckError
from jmla.kernels.layouts import footer584, index132, plain
from jmla.kernels.shapes import INDEX

run = jax.jit(index_scores, static_argnames=("layout", "implementation"))
PLAIN = plain(16, "float32", 4)


def make_case(rng, layout, pages, requests, steps, heads, width, dtype="float32"):
    pool = reference.random_pool(rng, layout, pages)
    q = rng.normal(size=(requests * steps, heads, layout.width)).astype(dtype)
    weights = rng.normal(size=(requests * steps, heads)).astype(np.float32)
    table = rng.integers(0, pages, (requests, width)).astype(np.int32)
    lengths = rng.integers(0, width * layout.page_size + 1, requests * steps).astype(np.int32)
    return q, weights, pool, lengths, table


def expected_scores(q, weights, pool, lengths, table, layout):
    steps, size = len(q) // len(table), layout.page_size
    columns = (table[..., None] * size + np.arange(size)).reshape(len(table), -1).repeat(steps, 0)
    present = ((table >= 0) & (table < len(pool))).repeat(size, 1).repeat(steps, 0)
    counted = present & (np.arange(columns.shape[1]) < lengths[:, None])
    return reference.index_scores(q, weights, reference.unpack(pool, layout), columns, counted, layout)


def assert_scores_close(got, want, quantised=False):
    got = np.asarray(got)
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    some = np.isfinite(want)
    assert np.isfinite(got[some]).all()
    error = np.abs(got[some] - want[some]) / max(1e-6, np.abs(want[some]).max(initial=0))
    # Rounding of the rotated q may move a code by one step here and there.
    assert error.max(initial=0) <= (1e-2 if quantised else 3e-6)
    if quantised and error.size:
        assert np.median(error) <= 1e-4


GRID = [
    # layout, requests, steps, heads, pages of a request, dtype of q
    (index132(64), 2, 3, 5, 5, "float32"),
    (index132(61, hadamard=False, scale_form="power_of_two"), 1, 17, 64, 5, "bfloat16"),
    (index132(2, width=16), 3, 1, 16, 40, "float32"),
    (plain(16, "float32", 64), 2, 2, 4, 5, "float32"),
    (plain(128, "bfloat16", 256), 1, 3, 300, 2, "bfloat16"),
    (plain(16, "float8_e4m3fn", 4), 2, 70, 4, 3, "float32"),
]


@pytest.mark.parametrize(("layout", "requests", "steps", "heads", "width", "dtype"), GRID)
def test_matches_reference(layout, requests, steps, heads, width, dtype):
    rng = np.random.default_rng(heads)
    q, weights, pool, lengths, table = make_case(rng, layout, 7, requests, steps, heads, width, dtype)
    table[0, 1] = -1
    table[-1, -1] = 7  # past the pool
    lengths[-1] = width * layout.page_size + 9
    got = run(q, weights, pool, layout=layout, lengths=lengths, table=table)
    assert got.shape == (requests * steps, width * layout.page_size)
    assert got.dtype == jnp.float32
    want = expected_scores(q, weights, pool, lengths, table, layout)
    assert_scores_close(got, want, quantised=layout.kind == "index")


@pytest.mark.parametrize("name", INDEX)
def test_named_shapes(name):
    shape = INDEX[name]
    rng = np.random.default_rng(shape.heads)
    q, weights, pool, lengths, table = make_case(rng, shape.layout, 5, 2, 1, shape.heads, 5, "bfloat16")
    got = run(q, weights, pool, layout=shape.layout, lengths=lengths, table=table)
    assert_scores_close(got, expected_scores(q, weights, pool, lengths, table, shape.layout), quantised=True)


def test_a3_relu_of_each_head():
    """q.k = (+1, -5), w = (1, 1): 1, not -4."""
    pool = np.zeros((1, 64), np.float32)
    pool[0, :2] = 1, 2
    q = np.zeros((1, 2, 16), np.float32)
    q[0, 0, 0], q[0, 1, :2] = 1, (-1, -2)
    call = partial(run, layout=PLAIN, lengths=np.array([1], np.int32), table=np.zeros((1, 1), np.int32))
    assert float(call(q, np.ones((1, 2), np.float32), pool)[0, 0]) == 1
    assert float(call(q, -np.ones((1, 2), np.float32), pool)[0, 0]) == -1  # weights may be negative


@pytest.mark.parametrize("layout", [index132(64), plain(32, "bfloat16", 64)], ids=lambda x: x.name)
def test_a4_one_and_two_query_tokens(layout):
    rng = np.random.default_rng(0)
    q, weights, pool, lengths, table = make_case(rng, layout, 4, 1, 2, 8, 3)
    lengths[:] = 150, 151
    both = run(q, weights, pool, layout=layout, lengths=lengths, table=table)
    one = run(q[:1], weights[:1], pool, layout=layout, lengths=lengths[:1], table=table)
    np.testing.assert_array_equal(both[0], one[0])


@pytest.mark.parametrize("layout", [index132(64), plain(128, "float32", 64)], ids=lambda x: x.name)
def test_c6_chunks_and_batches_are_bitwise_equal(layout):
    """Rows alone, in chunks, beside other requests, with wider tables and other pages: the same bits."""
    rng = np.random.default_rng(1)
    q, weights, pool, lengths, table = make_case(rng, layout, 9, 1, 24, 8, 7)
    whole = np.asarray(run(q, weights, pool, layout=layout, lengths=lengths, table=table))
    for part in (slice(0, 1), slice(0, 5), slice(5, 24), slice(7, 23)):
        got = run(q[part], weights[part], pool, layout=layout, lengths=lengths[part], table=table)
        np.testing.assert_array_equal(got, whole[part])
    place = rng.permutation(9)
    moved = np.empty_like(pool)
    moved[place] = pool
    wide = np.concatenate([place[table[0]], [3, 1, -1, 2, 2]]).astype(np.int32)
    tables = np.stack([wide[::-1], wide]).copy()
    two = [np.concatenate([x[::-1], x]) for x in (q, weights, lengths)]
    got = run(two[0], two[1], moved, layout=layout, lengths=two[2], table=tables)
    np.testing.assert_array_equal(got[24:, : whole.shape[1]], whole)
    assert np.isneginf(np.asarray(got[24:, whole.shape[1] :])).all()


def test_c6_zero_scores_are_found():
    layout = plain(16, "float32", 64)
    rng = np.random.default_rng(2)
    q, weights, pool, lengths, table = make_case(rng, layout, 2, 1, 2, 4, 2)
    lengths[:] = 100
    with debug_checks():
        index_scores(q, weights, pool, layout=layout, lengths=lengths, table=table)
    with pytest.raises(ValueCheckError, match="other than zero"), debug_checks():
        index_scores(q, weights, np.zeros_like(pool), layout=layout, lengths=lengths, table=table)
    with pytest.raises(ValueCheckError, match="NaN"), debug_checks():
        index_scores(np.full_like(q, np.nan), weights, pool, layout=layout, lengths=lengths, table=table)


def test_c8_rotation_on_both_sides_keeps_the_order():
    """Keys as the packer writes them: rank order with rotation is that of the exact scores, almost everywhere."""
    rng = np.random.default_rng(3)
    keys, q = rng.normal(size=(192, 128)).astype(np.float32), rng.normal(size=(4, 16, 128)).astype(np.float32)
    weights = rng.uniform(0.1, 1, (4, 16)).astype(np.float32)
    exact = np.einsum("rh,rhn->rn", weights, np.maximum(np.einsum("rhd,nd->rhn", np.float64(q), keys), 0))
    lengths, table = np.full(4, 192, np.int32), np.arange(3, dtype=np.int32)[None]
    best = np.asarray(top_k(jnp.asarray(exact, jnp.float32), None, 20))
    for hadamard in (True, False):
        layout = index132(64, hadamard=hadamard)
        pool = kv_pack(jnp.asarray(keys), jnp.arange(192, dtype=jnp.int32), layout.zeros(3), layout=layout)
        got = run(q, weights, pool, layout=layout, lengths=lengths, table=table)
        np.testing.assert_allclose(got, exact, rtol=0.1, atol=0.02 * exact.max())
        chosen = np.asarray(top_k(got, lengths, 20))
        overlap = [len(set(a) & set(b)) for a, b in zip(chosen, best, strict=True)]
        assert min(overlap) >= 17
    floats = run(q, weights, keys.reshape(3, -1), layout=plain(128, "float32", 64), lengths=lengths, table=table)
    np.testing.assert_array_equal(top_k(floats, lengths, 20), best)


def test_c15_bounds_keep_padding_and_future_out():
    """A left-padded row scores as the unpadded one does; nothing before the start or from the end on is ever chosen."""
    rng = np.random.default_rng(4)
    keys = rng.normal(size=(12, 16)).astype(np.float32)
    q, weights = rng.normal(size=(2, 3, 16)).astype(np.float32), rng.normal(size=(2, 3)).astype(np.float32)
    padded = np.full((16, 16), np.nan, np.float32)
    padded[4:] = keys
    start, end = np.array([4, 4], np.int32), np.array([11, 12], np.int32)
    got = run(q, weights, padded.reshape(4, 64), layout=PLAIN, bounds=(start, end))
    plain_row = run(q, weights, keys.reshape(3, 64), layout=PLAIN, bounds=(start - 4, end - 4))
    np.testing.assert_array_equal(got[:, 4:], plain_row)
    assert np.isneginf(np.asarray(got[:, :4])).all()
    assert np.isneginf(np.asarray(got[0, 11:])).all()
    chosen = np.asarray(top_k(got, None, 16))
    assert set(chosen[0]) == {*range(4, 11), -1}
    nothing = run(q, weights, keys.reshape(3, 64), layout=PLAIN, bounds=(end, start))
    assert np.isneginf(np.asarray(nothing)).all()


def test_d4_content_that_does_not_count_never_matters():
    layout = index132(4)
    rng = np.random.default_rng(5)
    q, weights, clean, _, _ = make_case(rng, layout, 3, 1, 2, 4, 2)
    dirty = np.full_like(clean, 0xFF)
    dirty[1] = clean[1]
    dirty[1, 3 * 128 : 4 * 128] = 0x7F
    table, lengths = np.array([[1, -1, 0]], np.int32), np.array([3, 0], np.int32)
    got = run(q, weights, dirty, layout=layout, lengths=lengths, table=table)
    want = run(q, weights, clean, layout=layout, lengths=lengths, table=table)
    np.testing.assert_array_equal(got, want)
    assert np.isfinite(np.asarray(got[0, :3])).all()
    assert np.isneginf(np.asarray(got[0, 3:])).all()
    assert np.isneginf(np.asarray(got[1])).all()


def test_d12_no_rows():
    table = np.zeros((2, 3), np.int32)
    got = run(
        np.zeros((0, 4, 16), np.float32),
        np.zeros((0, 4), np.float32),
        np.zeros((2, 64), np.float32),
        layout=PLAIN,
        lengths=np.zeros(0, np.int32),
        table=table,
    )
    assert got.shape == (0, 12)


def test_vmap():
    rng = np.random.default_rng(6)
    q, weights, pool, lengths, table = make_case(rng, PLAIN, 4, 2, 2, 3, 3)
    call = partial(index_scores, layout=PLAIN)
    both = call(q, weights, pool, lengths=lengths, table=table)
    by_request = (x.reshape(2, 2, *x.shape[1:]) for x in (q, weights, lengths))
    each = jax.vmap(lambda q, w, n, t: call(q, w, pool, lengths=n, table=t[None]))(*by_request, table)
    np.testing.assert_allclose(each.reshape(4, -1), both, rtol=1e-6, atol=1e-6)


def test_gradients():
    """Of queries, weights and a typed pool, against automatic differentiation of the plain formula."""
    rng = np.random.default_rng(7)
    q, weights, pool, lengths, table = make_case(rng, PLAIN, 80, 1, 3, 5, 70)
    lengths[:] = 280, 0, 133
    cotangent = rng.normal(size=(3, 280)).astype(np.float32)

    def score(scores):
        return jnp.sum(jnp.where(jnp.isneginf(scores), 0, scores) * cotangent)

    def tiled(q, weights, pool):
        return score(index_scores(q, weights, pool, layout=PLAIN, lengths=lengths, table=table))

    def formula(q, weights, pool):
        keys = pool[table[0]].reshape(-1, 16)
        dots = jax.nn.relu(jnp.einsum("rhd,nd->rhn", q, keys, precision="highest"))
        scores = jnp.sum(dots * weights[..., None], axis=1)
        return score(jnp.where(np.arange(280) < lengths[:, None], scores, -jnp.inf))

    got = jax.jit(jax.grad(tiled, argnums=(0, 1, 2)))(q, weights, pool)
    want = jax.grad(formula, argnums=(0, 1, 2))(q, weights, pool)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(b).max())


def test_zero_and_nan_rows_of_e4m3_queries_stay_apart():
    layout = index132(4)
    rng = np.random.default_rng(8)
    q, weights, pool, lengths, table = make_case(rng, layout, 3, 1, 3, 4, 2)
    lengths[:] = 8
    q[0], q[1] = 0, np.nan
    got = np.asarray(run(q, weights, pool, layout=layout, lengths=lengths, table=table))
    np.testing.assert_array_equal(got[0], 0)
    assert np.isfinite(got[2]).all()


def test_bad_arguments():
    rng = np.random.default_rng(9)
    q, weights, pool, lengths, table = make_case(rng, PLAIN, 4, 2, 2, 3, 3)
    call = partial(index_scores, q, weights, pool, layout=PLAIN)
    footer, keys = footer584(4), {"lengths": lengths, "table": table}
    cases = [
        (ValueError, "table", lambda: call(lengths=lengths)),
        (ValueError, "bounds", lambda: call(bounds=(lengths, lengths), **keys)),
        (ValueError, "multiple", lambda: call(lengths=lengths, table=table[[0, 1, 1]])),
        (ValueError, "lengths", lambda: call(lengths=lengths[:3], table=table)),
        (ValueError, "weights", lambda: index_scores(q, weights[:, :2], pool, layout=PLAIN, **keys)),
        (ValueError, "pool", lambda: index_scores(q, weights, pool[:, 1:], layout=PLAIN, **keys)),
        (ValueError, r"\[R, Hi, Di\]", lambda: index_scores(q[..., 1:], weights, pool, layout=PLAIN, **keys)),
        (TypeError, "table", lambda: call(lengths=lengths, table=table.astype(np.float32))),
        (TypeError, "q", lambda: index_scores(q.astype(np.int32), weights, pool, layout=PLAIN, **keys)),
        (ValueError, "triton", lambda: call(implementation="triton", **keys)),
        (
            ValueError,
            "footer584",
            lambda: index_scores(
                np.zeros((4, 3, 512), ml_dtypes.bfloat16), weights, footer.zeros(1), layout=footer, **keys
            ),
        ),
    ]
    for error, word, bad in cases:
        with pytest.raises(error, match=word):
            bad()


def test_e3_scores_of_pages_past_2_gib():
    """Pages past 2 GiB into the pool score as the same pages in a small pool do; the pool is zeroed lazily."""
    small_layout = index132(64)
    layout, pages = dataclasses.replace(small_layout, page_stride=1_039_680), 2200
    assert 2066 * layout.page_stride > 2**31
    rng = np.random.default_rng(12)
    q, weights, small, _, _ = make_case(rng, small_layout, 3, 1, 3, 4, 4)
    raw = np.zeros(pages * layout.page_stride + 64, np.uint8)
    raw = raw[-raw.ctypes.data % 64 :][: pages * layout.page_stride]  # aligned, or the device copies it
    pool = raw.reshape(pages, layout.page_stride)
    pool[[2, 2066, 2199], : small_layout.page_stride] = small
    lengths = np.array([256, 200, 131], np.int32)
    table = np.array([[2066, 2199, 2, 2066]], np.int32)
    got = run(q, weights, jax.device_put(pool, may_alias=True), layout=layout, lengths=lengths, table=table)
    table = np.array([[1, 2, 0, 1]], np.int32)
    want = run(q, weights, small, layout=small_layout, lengths=lengths, table=table)
    np.testing.assert_array_equal(got, want)
    assert_scores_close(got, expected_scores(q, weights, small, lengths, table, small_layout), quantised=True)
