"""Index scores against a float64 reference, and against themselves in other batches, chunks and page tables."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import kernel_reference as reference
import ml_dtypes
import numpy as np
import pytest

from jmla.kernels import debug_checks, index_scores, kv_pack, launch, top_k
from jmla.kernels.checks import ValueCheckError
from jmla.kernels.layouts import footer584, index132, plain
from jmla.kernels.shapes import INDEX

_run = run = jax.jit(index_scores, static_argnames=("layout", "implementation"))
PLAIN = plain(16, "float32", 4)


@pytest.fixture
def floats(implementation):
    """What an implementation takes unquantised: (layout of 16 values, dtype of queries)."""
    return (PLAIN, "float32") if implementation == "xla" else (plain(16, "bfloat16", 4), "bfloat16")


def skip_unless_served(implementation, layout, dtype, heads=1):
    """Float32 products and very many heads are left to XLA."""
    if implementation == "triton" and ((layout.kind == "plain" and dtype == "float32") or heads > 256):
        pytest.skip("served by xla")


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


def assert_scores_close(got, want, quantised=False, implementation="xla"):
    got = np.asarray(got)
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
    some = np.isfinite(want)
    assert np.isfinite(got[some]).all()
    error = np.abs(got[some] - want[some]) / max(1e-6, np.abs(want[some]).max(initial=0))
    # Rounding of the rotated q may move a code by one step here and there.
    assert error.max(initial=0) <= (1e-2 if quantised else 3e-6 if implementation == "xla" else 1e-5)
    if quantised and error.size:
        # Tensor cores keep 13 bits behind the largest of the e4m3 products that they add.
        assert np.median(error) <= (1e-4 if implementation == "xla" else 5e-4)


def assert_same(got, want):
    """Bitwise; to rounding in the interpreter, whose NumPy products add up in another order for another shape."""
    if launch.interpreter is None:
        np.testing.assert_array_equal(got, want)
    else:
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


GRID = [
    # layout, requests, steps, heads, pages of a request, dtype of q
    (index132(64), 2, 3, 5, 5, "float32"),
    (index132(61, hadamard=False, scale_form="power_of_two"), 1, 17, 64, 5, "bfloat16"),
    (index132(2, width=16), 3, 1, 16, 40, "float32"),
    (plain(16, "float32", 64), 2, 2, 4, 5, "float32"),
    (plain(128, "bfloat16", 256), 1, 3, 300, 2, "bfloat16"),
    (plain(16, "float8_e4m3fn", 4), 2, 70, 4, 3, "float32"),
    (plain(16, "float8_e4m3fn", 4), 2, 3, 1, 3, "bfloat16"),
    (plain(128, "bfloat16", 64), 2, 2, 64, 3, "bfloat16"),
    (index132(256), 2, 1, 43, 2, "bfloat16"),
    (index132(64), 1, 5, 128, 3, "bfloat16"),
    (index132(64, hadamard=False), 2, 2, 32, 3, "bfloat16"),
    (index132(2, width=16), 1, 2, 1, 70, "bfloat16"),
    (index132(64, page_stride=64 * 132 + 12), 2, 2, 4, 3, "bfloat16"),
]


@pytest.mark.parametrize(("layout", "requests", "steps", "heads", "width", "dtype"), GRID)
def test_matches_reference(layout, requests, steps, heads, width, dtype, implementation):
    skip_unless_served(implementation, layout, dtype, heads)
    rng = np.random.default_rng(heads)
    q, weights, pool, lengths, table = make_case(rng, layout, 7, requests, steps, heads, width, dtype)
    table[0, 1] = -1
    table[-1, -1] = 7  # past the pool
    lengths[-1] = width * layout.page_size + 9
    got = run(q, weights, pool, layout=layout, lengths=lengths, table=table, implementation=implementation)
    assert got.shape == (requests * steps, width * layout.page_size)
    assert got.dtype == jnp.float32
    want = expected_scores(q, weights, pool, lengths, table, layout)
    assert_scores_close(got, want, layout.kind == "index", implementation)


@pytest.mark.parametrize("name", INDEX)
def test_named_shapes(name, implementation):
    shape = INDEX[name]
    rng = np.random.default_rng(shape.heads)
    q, weights, pool, lengths, table = make_case(rng, shape.layout, 5, 2, 1, shape.heads, 5, "bfloat16")
    got = run(q, weights, pool, layout=shape.layout, lengths=lengths, table=table, implementation=implementation)
    want = expected_scores(q, weights, pool, lengths, table, shape.layout)
    assert_scores_close(got, want, True, implementation)


def test_a3_relu_of_each_head(floats, implementation):
    """q.k = (+1, -5), w = (1, 1): 1, not -4."""
    layout, dtype = floats
    pool = np.zeros((1, 64), dtype)
    pool[0, :2] = 1, 2
    q = np.zeros((1, 2, 16), dtype)
    q[0, 0, 0], q[0, 1, :2] = 1, (-1, -2)
    keys = {"lengths": np.array([1], np.int32), "table": np.zeros((1, 1), np.int32)}
    call = partial(run, layout=layout, implementation=implementation, **keys)
    assert float(call(q, np.ones((1, 2), np.float32), pool)[0, 0]) == 1
    assert float(call(q, -np.ones((1, 2), np.float32), pool)[0, 0]) == -1  # weights may be negative


@pytest.mark.parametrize("layout", [index132(64), plain(32, "bfloat16", 64)], ids=lambda x: x.name)
def test_a4_one_and_two_query_tokens(layout, implementation):
    rng = np.random.default_rng(0)
    q, weights, pool, lengths, table = make_case(rng, layout, 4, 1, 2, 8, 3, "bfloat16")
    lengths[:] = 150, 151
    call = partial(run, layout=layout, implementation=implementation)
    both = call(q, weights, pool, lengths=lengths, table=table)
    one = call(q[:1], weights[:1], pool, lengths=lengths[:1], table=table)
    assert_same(both[0], one[0])


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        (index132(64), "float32"),
        (index132(64), "bfloat16"),
        (plain(128, "float32", 64), "float32"),
        (plain(128, "bfloat16", 64), "bfloat16"),
    ],
    ids=str,
)
def test_c6_chunks_and_batches_are_bitwise_equal(layout, dtype, heads, implementation):
    """Rows alone, in chunks, beside other requests, with wider tables and other pages: the same bits."""
    skip_unless_served(implementation, layout, dtype)
    if heads > 8 and (implementation == "xla" or launch.interpreter is not None):
        pytest.skip("on the device only")
    rng = np.random.default_rng(1)
    q, weights, pool, lengths, table = make_case(rng, layout, 9, 1, 24, heads, 7, dtype)
    run = partial(_run, implementation=implementation)
    whole = np.asarray(run(q, weights, pool, layout=layout, lengths=lengths, table=table))
    for part in (slice(0, 1), slice(0, 2), slice(0, 5), slice(5, 24), slice(7, 23)):
        got = run(q[part], weights[part], pool, layout=layout, lengths=lengths[part], table=table)
        assert_same(got, whole[part])
    place = rng.permutation(9)
    moved = np.empty_like(pool)
    moved[place] = pool
    wide = np.concatenate([place[table[0]], [3, 1, -1, 2, 2]]).astype(np.int32)
    tables = np.stack([wide[::-1], wide]).copy()
    two = [np.concatenate([x[::-1], x]) for x in (q, weights, lengths)]
    got = run(two[0], two[1], moved, layout=layout, lengths=two[2], table=tables)
    assert_same(got[24:, : whole.shape[1]], whole)
    assert np.isneginf(np.asarray(got[24:, whole.shape[1] :])).all()
    pool = pool[table[0]]
    got = run(q, weights, pool, layout=layout, bounds=(np.zeros_like(lengths), lengths))
    assert_same(got, whole)


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


def test_c15_bounds_keep_padding_and_future_out(floats, implementation):
    """A left-padded row scores as the unpadded one does; nothing before the start or from the end on is ever chosen."""
    layout, dtype = floats
    run = partial(_run, layout=layout, implementation=implementation)
    rng = np.random.default_rng(4)
    keys = rng.normal(size=(12, 16)).astype(dtype)
    q, weights = rng.normal(size=(2, 3, 16)).astype(dtype), rng.normal(size=(2, 3)).astype(np.float32)
    padded = np.full((16, 16), np.nan, dtype)
    padded[4:] = keys
    start, end = np.array([4, 4], np.int32), np.array([11, 12], np.int32)
    got = run(q, weights, padded.reshape(4, 64), bounds=(start, end))
    plain_row = run(q, weights, keys.reshape(3, 64), bounds=(start - 4, end - 4))
    np.testing.assert_array_equal(got[:, 4:], plain_row)
    assert np.isneginf(np.asarray(got[:, :4])).all()
    assert np.isneginf(np.asarray(got[0, 11:])).all()
    chosen = np.asarray(top_k(got, None, 16))
    assert set(chosen[0]) == {*range(4, 11), -1}
    nothing = run(q, weights, keys.reshape(3, 64), bounds=(end, start))
    assert np.isneginf(np.asarray(nothing)).all()


def test_d4_content_that_does_not_count_never_matters(implementation):
    layout = index132(4)
    run = partial(_run, implementation=implementation)
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


def test_d12_no_rows(floats, implementation):
    layout, dtype = floats
    call = partial(run, layout=layout, implementation=implementation)
    nothing, lengths = np.zeros((0, 4), np.float32), np.zeros(0, np.int32)
    q, pool = np.zeros((0, 4, 16), dtype), np.zeros((2, 64), dtype)
    assert call(q, nothing, pool, lengths=lengths, table=np.zeros((2, 3), np.int32)).shape == (0, 12)
    q, some, lengths = np.zeros((2, 4, 16), dtype), np.zeros((2, 4), np.float32), np.full(2, 9, np.int32)
    assert call(q, some, pool, lengths=lengths, table=np.zeros((2, 0), np.int32)).shape == (2, 0)
    got = call(q, some, pool[:0], lengths=lengths, table=np.zeros((2, 3), np.int32))
    np.testing.assert_array_equal(got, np.full((2, 12), -np.inf))


def test_vmap(floats, implementation):
    layout, dtype = floats
    rng = np.random.default_rng(6)
    q, weights, pool, lengths, table = make_case(rng, layout, 4, 2, 2, 3, 3, dtype)
    call = partial(index_scores, layout=layout, implementation=implementation)
    both = call(q, weights, pool, lengths=lengths, table=table)
    by_request = (x.reshape(2, 2, *x.shape[1:]) for x in (q, weights, lengths))
    each = jax.vmap(lambda q, w, n, t: call(q, w, pool, lengths=n, table=t[None]))(*by_request, table)
    np.testing.assert_allclose(each.reshape(4, -1), both, rtol=1e-6, atol=1e-6)


def test_gradients(floats, implementation):
    """Of queries, weights and a typed pool, against automatic differentiation of the plain formula."""
    layout, dtype = floats
    rng = np.random.default_rng(7)
    q, weights, pool, lengths, table = make_case(rng, layout, 80, 1, 3, 5, 70, dtype)
    lengths[:] = 280, 0, 133
    cotangent = rng.normal(size=(3, 280)).astype(np.float32)

    def score(scores):
        return jnp.sum(jnp.where(jnp.isneginf(scores), 0, scores) * cotangent)

    def tiled(q, weights, pool):
        keys = {"lengths": lengths, "table": table}
        return score(index_scores(q, weights, pool, layout=layout, implementation=implementation, **keys))

    def formula(q, weights, pool):
        q, pool = q.astype(jnp.float32), pool.astype(jnp.float32)
        keys = pool[table[0]].reshape(-1, 16)
        dots = jax.nn.relu(jnp.einsum("rhd,nd->rhn", q, keys, precision="highest"))
        scores = jnp.sum(dots * weights[..., None], axis=1)
        return score(jnp.where(np.arange(280) < lengths[:, None], scores, -jnp.inf))

    got = jax.jit(jax.grad(tiled, argnums=(0, 1, 2)))(q, weights, pool)
    want = jax.grad(formula, argnums=(0, 1, 2))(q, weights, pool)
    for a, b in zip(got, want, strict=True):
        a, b = (np.asarray(x).astype(np.float32) for x in (a, b))
        rtol = 1e-4 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(a, b, rtol=rtol, atol=0.1 * rtol * np.abs(b).max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zero_and_nan_rows_of_e4m3_queries_stay_apart(dtype, implementation):
    layout = index132(4)
    rng = np.random.default_rng(8)
    q, weights, pool, lengths, table = make_case(rng, layout, 3, 1, 3, 4, 2, dtype)
    lengths[:] = 8
    q[0], q[1, 2, 5] = 0, np.nan
    pool[table[0, 1], layout.footer_offset :] = 0  # codes under a zero scale are not trusted
    pool[table[0, 1], : layout.footer_offset] = 0x7F
    got = np.asarray(run(q, weights, pool, layout=layout, lengths=lengths, table=table, implementation=implementation))
    np.testing.assert_array_equal(got[0], 0)
    assert np.isnan(got[1]).all()
    assert np.isfinite(got[2]).all()
    np.testing.assert_array_equal(got[2, 4:], 0)


def test_nan_keys_that_count_are_not_hidden(implementation):
    layout = index132(4)
    rng = np.random.default_rng(10)
    q, weights, pool, lengths, table = make_case(rng, layout, 2, 1, 2, 4, 1, "bfloat16")
    lengths[:] = 3, 4
    table[:] = 1
    pool[1, 2 * 128 + 7] = 0x7F
    pool[1, 3 * 128 + 7] = 0xFF
    got = np.asarray(run(q, weights, pool, layout=layout, lengths=lengths, table=table, implementation=implementation))
    np.testing.assert_array_equal(np.isnan(got), [[False, False, True, False], [False, False, True, True]])
    assert np.isneginf(got[0, 3])


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
        (ValueError, "triton.*cannot run", lambda: call(implementation="triton", **keys)),
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


def test_e3_scores_of_pages_past_2_gib(implementation):
    """Pages past 2 GiB into the pool score as the same pages in a small pool do; the pool is zeroed lazily."""
    if launch.interpreter is not None:
        pytest.skip("the interpreter copies pools")
    run = partial(_run, implementation=implementation)
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
    want = expected_scores(q, weights, small, lengths, table, small_layout)
    assert_scores_close(got, want, True, implementation)


def test_wide_tables_and_holes(implementation):
    """Much wider than any length; a leading block of holes, a row of holes, lengths of 0 and past the table."""
    layout = index132(64)
    rng = np.random.default_rng(13)
    q, weights, pool, lengths, table = make_case(rng, layout, 6, 4, 2, 8, 40, "bfloat16")
    table[0, :3] = -1
    table[1] = -1
    table[2, 1::2] = 1 << 30
    lengths[:] = 400, 401, 2560, 9, 130, 2560, 0, -5
    got = run(q, weights, pool, layout=layout, lengths=lengths, table=table, implementation=implementation)
    want = expected_scores(q, weights, pool, lengths, table, layout)
    assert_scores_close(got, want, True, implementation)


CHOICES = [
    {"tiles": 1, "early": 1},
    {"tiles": 4, "early": 4},
    {"tiles": 4, "early": 2},
    {"tiles": 4, "early": 0, "ahead": 1},
    {"tiles": 16, "early": 0},
    {"tiles": 2, "early": 0, "fused": False},
    {"tiles": 2, "early": 0, "rows": 8, "fused": False},
    {"tiles": 1, "early": 1, "rows": 8},
    {"tile": 128, "tiles": 2, "early": 1, "rows": 8},  # two pages a tile, and half a one at the end
]


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton"], indirect=True)
@pytest.mark.parametrize("choices", CHOICES, ids=lambda c: "-".join(f"{k}{int(v)}" for k, v in c.items()))
@pytest.mark.parametrize("paged", [True, False], ids=["table", "bounds"])
def test_every_plan_gives_the_same_bits(choices, paged, implementation):
    from jmla.kernels.index_scores import triton

    layout = index132(64)
    rng = np.random.default_rng(14)
    q, weights, pool, lengths, table = make_case(rng, layout, 9, 1, 5, 16, 9, "bfloat16")
    q, weights, pool = jnp.asarray(q), jnp.asarray(weights), jnp.asarray(pool)
    start, end = (None, lengths) if paged else (np.int32([0, 70, 200, 64, 500]), np.int32([576, 200, 300, 64, 560]))
    call = partial(triton.scores, q, weights, pool, start, end, table if paged else None, layout=layout)
    assert_same(call(**choices), call())


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton"], indirect=True)
@pytest.mark.parametrize(
    ("requests", "steps", "pages", "paged"),
    [(64, 1, 100, True), (2, 2, 2200, True), (1, 700, 70, True), (1, 700, 70, False), (3, 3, 40, True)],
)
def test_repeats_are_bitwise_equal_and_right(requests, steps, pages, paged, implementation):
    """Shapes that take every kind of plan, against XLA; on a device only."""
    if launch.interpreter is not None:
        pytest.skip("on the device only")
    layout = index132(64)
    rng = np.random.default_rng(15)
    keys = jax.random.normal(jax.random.key(0), (300 * 64, 128))
    pool = kv_pack(keys, jnp.arange(300 * 64, dtype=jnp.int32), layout.zeros(300), layout=layout)
    q = jax.random.normal(jax.random.key(1), (requests * steps, 64, 128), jnp.bfloat16)
    weights = jax.random.normal(jax.random.key(2), (requests * steps, 64))
    lengths = rng.integers(0, pages * 64 + 1, requests * steps).astype(np.int32)
    table = rng.integers(0, 300, (requests, pages)).astype(np.int32)
    where = {"lengths": lengths, "table": table} if paged else {"bounds": (lengths // 3, lengths)}
    from jmla.kernels.index_scores import triton

    if (requests, steps) == (2, 2):
        assert triton.plan(q, pool, None, jnp.asarray(table), layout)[0].tile == 128
    call = partial(run, q, weights, pool, layout=layout, **where)
    first = np.asarray(call(implementation="triton"))
    for _ in range(20):
        np.testing.assert_array_equal(call(implementation="triton"), first)
    assert_scores_close(first, np.asarray(call(implementation="xla")), True, "triton")
