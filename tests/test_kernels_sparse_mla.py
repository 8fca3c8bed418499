"""Sparse attention against a float64 reference, row by row, over layouts, shapes and every kind of hole."""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import kernel_reference as reference
import ml_dtypes
import numpy as np
import pytest

from jmla.kernels import debug_checks, dispatch, merge, sparse_mla
from jmla.kernels.checks import ValueCheckError
from jmla.kernels.layouts import footer584, index132, inline656, plain
from jmla.kernels.shapes import ATTENTION
from jmla.kernels.sparse_mla import Epilogue

SMALL = plain(8, "float32", 4)  # the layout of most defect cases
HUGE = 2147480000


@partial(jax.jit, static_argnames=("layout", "scale", "extra_layout"))
def run(q, pool, indices, lengths=None, *, layout, scale, extra=None, extra_layout=None, **options):
    """``sparse_mla`` under jit; ``extra`` is (pool, indices, lengths)."""
    if extra is not None:
        extra = (extra[0], extra_layout, *extra[1:])
    return sparse_mla(q, pool, indices, lengths, layout=layout, scale=scale, extra=extra, **options)


def make_case(rng, layout, pages, rows, heads, columns, dtype="float32", holes=0.2):
    """A pool, queries, indices with holes, duplicates and garbage past the lengths, and the lengths."""
    pool = reference.random_pool(rng, layout, pages)
    q = rng.normal(size=(rows, heads, layout.width)).astype(dtype)
    indices = rng.integers(0, pages * layout.page_size, (rows, columns)).astype(np.int32)
    indices[rng.random(indices.shape) < holes] = -1
    lengths = rng.integers(0, columns + 1, rows).astype(np.int32)
    lengths[: min(3, rows)] = (columns, 0, columns // 2)[: min(3, rows)]
    past = np.arange(columns) >= lengths[:, None]
    indices[past & (rng.random(indices.shape) < 0.5)] = 2**31 - 1
    return pool, q, indices, lengths


def small_pool(pages=2, seed=0):
    return np.random.default_rng(seed).normal(size=(pages, 32)).astype(np.float32)


def small(q, pool, indices, lengths=None, **options):
    """``sparse_mla`` of the small layout on lists."""
    indices = np.asarray(indices, np.int64)
    lengths = None if lengths is None else np.asarray(lengths, np.int32)
    return run(q, pool, jnp.asarray(indices, jnp.int32), lengths, layout=SMALL, scale=0.5, **options)


def queries(rows, heads=2, seed=1):
    return np.random.default_rng(seed).normal(size=(rows, heads, 8)).astype(np.float32)


GRID = [
    # layout, extra layout, heads, columns, extra columns, dtype of q
    (inline656(61), None, 1, 133, 0, "bfloat16"),
    (inline656(64, scale_form="float32"), None, 43, 1, 0, "float32"),
    (inline656(2, nope=160, rope=16), None, 4, 192, 0, "float32"),
    (footer584(256), footer584(2), 4, 128, 133, "bfloat16"),
    (footer584(64), footer584(64, padded=False), 43, 192, 1, "float32"),
    (footer584(61, nope=24, rope=8, padded=False), footer584(2, nope=24, rope=8), 1, 7, 300, "float32"),
    (plain(40, "bfloat16", 64), plain(40, "float32", 2), 4, 133, 20, "float32"),
    (plain(576, "bfloat16", 61), None, 8, 192, 0, "bfloat16"),
]


@pytest.mark.parametrize(("layout", "extra_layout", "heads", "columns", "extra_columns", "dtype"), GRID)
def test_matches_reference(layout, extra_layout, heads, columns, extra_columns, dtype, implementation):
    rng = np.random.default_rng(heads + columns)
    rows, pages = 5, max(2, 130 // layout.page_size)
    pool, q, indices, lengths = make_case(rng, layout, pages, rows, heads, columns, dtype)
    v_dim = {"inline": layout.nope, "footer": layout.width}.get(layout.kind, 24)
    scale, sinks = 0.3 * layout.width**-0.5, rng.normal(size=heads).astype(np.float32)
    sources, extra = [(reference.unpack(pool, layout), indices, lengths)], None
    if extra_layout is not None:
        extra_pool, _, extra_indices, _ = make_case(rng, extra_layout, 40, rows, heads, extra_columns)
        sources.append((reference.unpack(extra_pool, extra_layout), extra_indices, None))
        extra = (extra_pool, extra_layout, extra_indices, None)
    options = {"sinks": sinks, "implementation": implementation}
    call = jax.jit(partial(sparse_mla, layout=layout, extra=extra, scale=scale, v_dim=v_dim, **options))
    with served(implementation):
        out, lse = call(q, pool, indices, lengths)
    assert out.dtype == q.dtype
    assert lse.dtype == jnp.float32
    expected = reference.attention(q, sources, scale, v_dim, sinks)
    reference.assert_attention_close((out, lse), expected, tight=dtype == "float32")


@contextlib.contextmanager
def served(implementation):
    """Skips what a kernel leaves to XLA, and says why."""
    try:
        yield
    except dispatch.CannotRun as error:
        if implementation == "xla":
            raise
        pytest.skip(str(error))


def check_named(shape, heads, implementation):
    rng = np.random.default_rng(heads)
    pages = -(-256 // shape.layout.page_size)
    pool, q, indices, lengths = make_case(rng, shape.layout, pages, 3, heads, shape.columns, "bfloat16", holes=0.01)
    extra, sources = None, [(reference.unpack(pool, shape.layout), indices, lengths)]
    if shape.extra_layout is not None:
        pages = -(-256 // shape.extra_layout.page_size)
        extra_pool, _, slots, counts = make_case(rng, shape.extra_layout, pages, 3, heads, shape.extra_columns)
        extra, sources = (
            (extra_pool, shape.extra_layout, slots, counts),
            [
                *sources,
                (reference.unpack(extra_pool, shape.extra_layout), slots, counts),
            ],
        )
    sinks = rng.normal(size=heads).astype(np.float32) if shape.sinks else None
    options = {"sinks": sinks, "implementation": implementation}
    call = jax.jit(partial(sparse_mla, layout=shape.layout, extra=extra, scale=shape.scale, **options))
    with served(implementation):
        got = call(q, pool, indices, lengths)
    reference.assert_attention_close(got, reference.attention(q, sources, shape.scale, shape.v_dim, sinks))


@pytest.mark.parametrize("name", ["v3.2", "glm-5", "v4-flash-csa", "v4-pro-hca"])
def test_named_shapes(name, implementation):
    check_named(ATTENTION[name], 8, implementation)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "heads"), [(s.name, h) for s in ATTENTION.values() for h in s.shards()])
def test_named_shapes_of_every_shard(name, heads, implementation):
    check_named(ATTENTION[name], heads, implementation)


@pytest.mark.parametrize("heads", [1, 4, 8, 43])
def test_d13_head_counts(heads):
    """Each head is what it would be alone."""
    pool, q = small_pool(), queries(3, heads)
    sinks = np.linspace(-2, 2, heads).astype(np.float32)
    indices = [[0, 3, -1, 7], [1, 1, 2, -1], [5, -1, -1, -1]]
    out, lse = small(q, pool, indices, sinks=sinks)
    assert out.shape == (3, heads, 8)
    for h in range(heads):
        one, one_lse = small(q[:, h : h + 1], pool, indices, sinks=sinks[h : h + 1])
        np.testing.assert_allclose(out[:, h], one[:, 0], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(lse[:, h], one_lse[:, 0], rtol=1e-6)


@pytest.mark.parametrize("columns", [1, 133, 192, 1024])
def test_v4_widths(columns):
    """Any width is used to its last column."""
    pool, q = small_pool(300), queries(2)
    indices = np.random.default_rng(columns).permutation(1200)[:columns].astype(np.int32)[None].repeat(2, 0)
    expected = reference.attention(q, [(reference.unpack(pool, SMALL), indices, None)], 0.5, 8)
    reference.assert_attention_close(small(q, pool, indices), expected, tight=True)


# Holes


def test_b2_padding_rows_are_zero_whatever_slot_0_holds():
    pool = small_pool()
    pool[0, :8] = np.nan
    out, lse = small(queries(4), pool, [[4, 5], [5, 6], [7, -1], [-1, -1]])
    np.testing.assert_array_equal(out[3], 0)
    assert np.isneginf(np.asarray(lse[3])).all()
    assert np.isfinite(np.asarray(out)).all()


def test_b6_id_past_the_pool_is_a_hole():
    pool, q = small_pool(pages=1), queries(2)
    got, hole = small(q, pool, [[0, 4], [1, 2]]), small(q, pool, [[0, -1], [1, 2]])
    np.testing.assert_array_equal(got[0], hole[0])
    np.testing.assert_array_equal(got[1], hole[1])


def test_b7_b8_hole_reads_nothing_even_from_a_nan_last_slot():
    pool = small_pool()
    pool[-1, -8:] = np.nan
    got, alone = small(queries(1), pool, [[2, -1]]), small(queries(1), pool, [[2]])
    np.testing.assert_array_equal(got[0], alone[0])
    np.testing.assert_array_equal(got[1], alone[1])


def test_b9_duplicates_count_twice():
    pool, q = small_pool(), queries(1)
    rows = reference.unpack(pool, SMALL)
    out, lse = small(q, pool, [[3, 3, 5]])
    logits = 0.5 * np.float64(q[0]) @ rows[[3, 5]].T
    weights = np.exp(logits) * [2, 1]
    np.testing.assert_allclose(out[0], weights @ rows[[3, 5]] / weights.sum(1, keepdims=True), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse[0], np.log(weights.sum(1)), rtol=1e-6)
    single, single_lse = small(q, pool, [[3, -1, -1]])
    double, double_lse = small(q, pool, [[3, 3, -1]])
    np.testing.assert_allclose(double, single, rtol=1e-6)
    np.testing.assert_allclose(double_lse - single_lse, np.log(2), rtol=1e-5)


def test_b10_v3_tail_of_holes_without_lengths():
    pool, q = small_pool(), queries(2)
    indices = [[1, 2, -1, -1], [3, -1, -1, -1]]
    with_lengths, without = small(q, pool, indices, [2, 1]), small(q, pool, indices)
    np.testing.assert_array_equal(without[0], with_lengths[0])
    np.testing.assert_array_equal(without[1], with_lengths[1])


def test_b11_v5_sentinels_and_bounds():
    pool, q = small_pool(), queries(1)
    got, holes = small(q, pool, [[1, HUGE, -1]]), small(q, pool, [[1, -1, -1]])
    np.testing.assert_array_equal(got[0], holes[0])
    capacity = 8  # the last slot is read, the next and a huge one are holes
    got, last = small(q, pool, [[capacity - 1, capacity, 2**31 - 1]]), small(q, pool, [[7, -1, -1]])
    np.testing.assert_array_equal(got[0], last[0])
    assert np.abs(np.asarray(got[0])).max() > 0
    got = small(q, pool, [[1, -5, -(2**31)]])
    np.testing.assert_array_equal(got[0], holes[0])


def test_leading_block_of_holes():
    """The first tiles hold nothing; and holes in front of a length bound do not move it."""
    pool, q = small_pool(), queries(1)
    indices = np.full((1, 300), -1, np.int32)
    indices[0, [0, 280]] = 3, 6
    indices[0, 0] = -1
    got, alone = small(q, pool, indices, [281]), small(q, pool, [[6]])
    np.testing.assert_array_equal(got[0], alone[0])
    assert not np.asarray(small(q, pool, indices, [280])[0]).any()


# Sinks, empty rows, NaN


def test_d2_sinks_of_any_size():
    pool, q = small_pool(), queries(2, heads=6)
    sinks = np.array([3e38, -3e38, 0, np.inf, -np.inf, 1.5], np.float32)
    indices = [[0, 1, 2], [-1, -1, -1]]
    plain_out, plain_lse = small(q, pool, indices)
    out, lse = small(q, pool, indices, sinks=sinks)
    assert np.isfinite(np.asarray(out)).all()
    np.testing.assert_array_equal(out[0, [0, 3]], 0)
    np.testing.assert_array_equal(out[0, [1, 4]], plain_out[0, [1, 4]])
    for h in (2, 5):  # not multiplied by the scale, and without a value
        share = 1 / (1 + np.exp(sinks[h] - np.float64(plain_lse[0, h])))
        np.testing.assert_allclose(out[0, h], plain_out[0, h] * share, rtol=1e-5)
    np.testing.assert_array_equal(lse, plain_lse)  # the sink is not in it
    np.testing.assert_array_equal(out[1], 0)


def test_d3_empty_row_and_merge():
    pool, q = small_pool(), queries(3)
    out, lse = small(q, pool, [[0, 1], [2, 3], [-1, HUGE]], [0, -1, 2])
    np.testing.assert_array_equal(out, 0)
    assert np.isneginf(np.asarray(lse)).all()
    full, full_lse = small(q, pool, [[0, 1], [2, 3], [4, 5]])
    merged, merged_lse = merge(jnp.stack([out, full]), jnp.stack([lse, full_lse]))
    np.testing.assert_allclose(merged, full, rtol=1e-6)
    np.testing.assert_allclose(merged_lse, full_lse, rtol=1e-6)
    nothing, nothing_lse = merge(jnp.stack([out, out]), jnp.stack([lse, lse]))
    np.testing.assert_array_equal(nothing, 0)
    assert np.isneginf(np.asarray(nothing_lse)).all()


@pytest.mark.parametrize("layout", [footer584(4), inline656(4), plain(8, "float32", 4)], ids=lambda x: x.name)
def test_d4_d5_unused_slots_may_hold_anything(layout):
    """Five tokens in two pages of four, everything else NaN bytes: as in a pool of zeros, with any kind of hole."""
    clean = reference.random_pool(np.random.default_rng(0), layout, 2)
    raw = clean.view(np.uint8).reshape(2, -1).copy()
    dirty = np.full_like(raw, 0x7F if layout.kind != "plain" else 0xFF)
    zero = np.zeros_like(raw)
    for slot in range(3, 8):  # slot 0, where holes might be sent, is not among them
        page, t = divmod(slot, 4)
        for pool in (dirty, zero):
            data = slice(t * layout.row_bytes, (t + 1) * layout.row_bytes)
            pool[page, data] = raw[page, data]
            foot = layout.footer_offset + t * layout.scale_bytes
            if layout.has_footer:
                pool[page, foot : foot + layout.scale_bytes] = raw[page, foot : foot + layout.scale_bytes]
    q = np.random.default_rng(1).normal(size=(2, 2, layout.width)).astype(np.float32)
    indices, lengths = np.array([[4, -1, 5, 0, 1], [3, 7, 8, -1, 2]], np.int32), np.array([3, 4], np.int32)
    results = [run(q, pool, indices, lengths, layout=layout, scale=0.04) for pool in (dirty, zero)]
    assert np.isfinite(np.asarray(results[0][0])).all()
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])


def test_d6_d8_padded_rows_are_zero_after_a_poisoned_call():
    pool, q = small_pool(), queries(4)
    indices = [[0, 1, 2, 3, 4]] * 4
    clean = small(q, pool, indices, [5, 0, 0, 0])
    small(np.full_like(q, np.nan), np.full_like(pool, np.nan), indices, [5, 5, 5, 5])
    again = small(q, pool, indices, [5, 0, 0, 0])
    np.testing.assert_array_equal(again[0][1:], 0)
    np.testing.assert_array_equal(again[0], clean[0])


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8, 16])
def test_d7_d9_more_splits_than_keys(splits):
    pool, q = small_pool(), queries(1)
    whole = small(q, pool, [[1, 4, 6]])
    parts = [small(q, pool, np.array([[1, 4, 6] + [-1] * 13])[:, i::splits]) for i in range(splits)]
    outs, lses = jnp.stack([p[0] for p in parts]), jnp.stack([p[1] for p in parts])
    outs = jnp.where(jnp.isneginf(lses)[..., None], jnp.nan, outs)  # an empty part's output is never looked at
    merged = merge(outs, lses)
    np.testing.assert_allclose(merged[0], whole[0], rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(merged[1], whole[1], rtol=2e-6)
    for _ in range(20):
        np.testing.assert_array_equal(merge(outs, lses)[0], merged[0])


def test_d10_lse_is_natural():
    pool = np.zeros((2, 32), np.float32)
    pool[0, :8] = 1
    q = np.full((1, 1, 8), 0.5, np.float32)  # 0.5 * (0.5 * 8) = 2
    assert float(small(q, pool, [[0]])[1][0, 0]) == pytest.approx(2.0, rel=1e-6)
    pool, q = small_pool(4), queries(1)
    whole = small(q, pool, [range(10)])
    parts = small(q, pool, [range(9)]), small(q, pool, [[9]])
    merged = merge(jnp.stack([p[0] for p in parts]), jnp.stack([p[1] for p in parts]))
    np.testing.assert_allclose(merged[0], whole[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(merged[1], whole[1], rtol=1e-6)


def test_d11_hole_that_is_also_past_the_length():
    pool = small_pool()
    q = jnp.asarray(queries(2), jnp.bfloat16)
    out, lse = small(q, pool, [[-1, -1, 3, -1], [-1, 2, 3, HUGE]], [3, 2])
    assert np.isfinite(np.asarray(out, np.float32)).all()
    rows = reference.unpack(pool, SMALL)
    np.testing.assert_allclose(out[1], np.tile(rows[2], (2, 1)), rtol=1e-2)
    assert np.isfinite(np.asarray(lse)).all()


def test_d12_no_rows():
    out, lse = small(queries(0), small_pool(), np.zeros((0, 4)))
    assert out.shape == (0, 2, 8)
    assert lse.shape == (0, 2)
    out, lse = small(queries(2), small_pool(), np.zeros((2, 0)))  # no columns
    np.testing.assert_array_equal(out, 0)
    assert np.isneginf(np.asarray(lse)).all()


# Independence of what stands around


def test_rows_are_bitwise_independent():
    """Of the number of rows, of batch mates and of the padded width; twenty repeats give the same bits."""
    rng = np.random.default_rng(3)
    layout, extra_layout = footer584(64), footer584(2)
    pool, q, indices, lengths = make_case(rng, layout, 4, 40, 4, 133)
    extra_pool, _, slots, counts = make_case(rng, extra_layout, 60, 40, 4, 300)
    counts[:20] = np.minimum(counts[:20], 100)
    sinks = rng.normal(size=4).astype(np.float32)

    def call(rows, width=133, extra_width=300):
        pads = [((0, 0), (0, width - 133)), ((0, 0), (0, extra_width - 300))]
        main, other = (np.pad(x[rows], p, constant_values=-1) for x, p in zip((indices, slots), pads, strict=True))
        extra = (extra_pool, other, counts[rows])
        attend = partial(run, layout=layout, scale=0.04, sinks=sinks, extra_layout=extra_layout)
        return tuple(np.asarray(x) for x in attend(q[rows], pool, main, lengths[rows], extra=extra))

    every = call(np.arange(40))
    for rows in ([0], [17], range(5), range(16), range(3, 20), [39, 0, 0, 21]):
        for got, want in zip(call(np.array(rows)), every, strict=True):
            np.testing.assert_array_equal(got, want[np.array(rows)])
    for got, want in zip(call(np.arange(40), 1024, 512), every, strict=True):
        np.testing.assert_array_equal(got, want)
    for _ in range(20):
        np.testing.assert_array_equal(call(np.arange(5))[0], every[0][:5])


def test_dense_form_and_vmap():
    pool = small_pool()
    q = queries(6).reshape(2, 3, 2, 8)
    indices = np.random.default_rng(0).integers(-1, 8, (2, 3, 5)).astype(np.int32)
    lengths = np.array([[5, 0, 3], [1, 2, 9]], np.int32)
    flat = small(q.reshape(6, 2, 8), pool, indices.reshape(6, 5), lengths.reshape(6))
    dense = run(q, pool, indices, lengths, layout=SMALL, scale=0.5)
    assert dense[0].shape == (2, 3, 2, 8)
    assert dense[1].shape == (2, 3, 2)
    np.testing.assert_array_equal(dense[0].reshape(6, 2, 8), flat[0])
    np.testing.assert_array_equal(dense[1].reshape(6, 2), flat[1])
    attend = partial(sparse_mla, layout=SMALL, scale=0.5)
    each = jax.vmap(attend, in_axes=(0, None, 0, 0))(q, pool, indices, lengths)
    np.testing.assert_allclose(each[0], dense[0], rtol=1e-6, atol=1e-6)
    pools = jnp.stack([pool, 2 * pool])  # p7: also over pools
    both = jax.vmap(attend)(q, pools, indices, lengths)
    np.testing.assert_allclose(both[0][0], dense[0][0], rtol=1e-6, atol=1e-6)


def test_raw_and_typed_plain_pools_agree():
    pool = small_pool()
    typed, raw = (small(queries(2), p, [[0, 5], [7, -1]]) for p in (pool, pool.view(np.uint8)))
    np.testing.assert_array_equal(typed[0], raw[0])


# Scales and the epilogue


def test_scales_of_e4m3_queries_pools_and_output():
    rng = np.random.default_rng(5)
    layout, other = plain(32, "float8_e4m3fn", 4), plain(32, "float8_e4m3fn", 2)
    pool, extra_pool = (reference.random_pool(rng, x, 3) for x in (layout, other))
    q = rng.normal(size=(3, 4, 32)).astype(ml_dtypes.float8_e4m3fn)
    q_scale = rng.uniform(0.5, 2, (3, 4)).astype(np.float32)
    indices = rng.integers(0, 6, (3, 5)).astype(np.int32)
    got = run(
        q,
        pool,
        indices,
        layout=layout,
        scale=0.2,
        extra=(extra_pool, indices, None),
        extra_layout=other,
        q_scale=q_scale,
        kv_scale=(0.5, 2.0),
        out_scale=3.0,
    )
    assert got[0].dtype == jnp.bfloat16
    sources = [
        (0.5 * reference.unpack(pool, layout), indices, None),
        (2 * reference.unpack(extra_pool, other), indices, None),
    ]
    out, lse = reference.attention(q.astype(np.float64) * q_scale[..., None], sources, 0.2, 32)
    reference.assert_attention_close(got, (3 * out, lse))
    shared = run(q, pool, indices, layout=layout, scale=0.2, q_scale=0.25, kv_scale=0.5)
    out = reference.attention(q.astype(np.float64) * 0.25, sources[:1], 0.2, 32)
    reference.assert_attention_close(shared, out)


@pytest.mark.parametrize(("scale_form", "block"), [("fp32", 128), ("ue8m0", 32)])
def test_epilogue(scale_form, block):
    """Rotation back, then codes and scales where the grouped product wants them."""
    rng = np.random.default_rng(6)
    layout, rows, heads, groups, rope = footer584(4, nope=112, rope=16), 6, 4, 2, 16
    pool, q, indices, _ = make_case(rng, layout, 3, rows, heads, 7)
    angles = rng.uniform(0, 6, (rows, rope // 2)).astype(np.float32)
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    plain_out, plain_lse = run(q, pool, indices, layout=layout, scale=0.1, out_scale=2.0)
    epilogue = Epilogue(cos_sin, groups, block, scale_form)
    result, lse = run(q, pool, indices, layout=layout, scale=0.1, out_scale=2.0, epilogue=epilogue)
    np.testing.assert_array_equal(lse, plain_lse)

    turned = np.array(plain_out, np.float64)
    pairs = (turned[..., 112::2] + 1j * turned[..., 113::2]) * np.exp(-1j * angles)[:, None]
    turned[..., 112::2], turned[..., 113::2] = pairs.real, pairs.imag
    blocks = turned.reshape(rows, groups, -1, block)  # heads of a group, then the blocks of a head
    scales = np.maximum(np.abs(blocks).max(-1), 1e-4) / 448
    if scale_form == "ue8m0":
        scales = 2.0 ** np.ceil(np.log2(scales))
    count = heads // groups * 128 // block
    assert result.codes.shape == (groups, rows, heads // groups * 128)
    assert result.codes.dtype == jnp.float8_e4m3fn
    stored = np.asarray(result.scales)
    if scale_form == "fp32":
        assert stored.shape == (groups, count, 8)
    else:
        assert stored.shape == (groups, -(-count // 4), 8)
        assert stored.dtype == np.int32
        by_row = np.ascontiguousarray(np.moveaxis(stored, 1, 2)).view(np.uint8).reshape(groups, 8, -1)
        exponents = np.moveaxis(by_row[..., :count], 1, 2).astype(np.float64)
        stored = np.where(exponents == 0, 0, 2.0 ** (exponents - 127))
    np.testing.assert_array_equal(stored[:, :, rows:], 0)
    np.testing.assert_allclose(stored[:, :, :rows], np.transpose(scales, (1, 2, 0)), rtol=1e-5)
    values = np.asarray(result.codes).astype(np.float64).reshape(groups, rows, count, block)
    values = values * np.moveaxis(stored[:, :, :rows], 1, 2)[..., None]
    error = np.abs(np.moveaxis(values, 0, 1) - blocks)
    assert (error <= np.maximum(np.abs(blocks) / 15.9, 2.0**-9 * scales[..., None])).all()


def test_epilogue_of_dense_rows_and_bad_ones():
    rng = np.random.default_rng(7)
    layout = plain(32, "float32", 4)
    pool, q, indices, _ = make_case(rng, layout, 3, 6, 4, 7)
    cos_sin = rng.normal(size=(6, 8)).astype(np.float32)
    call = partial(sparse_mla, layout=layout, scale=0.1)
    flat, _ = call(q, pool, indices, epilogue=Epilogue(cos_sin, 2, 32))
    dense, _ = call(
        q.reshape(2, 3, 4, 32),
        pool,
        indices.reshape(2, 3, 7),
        epilogue=Epilogue(cos_sin.reshape(2, 3, 8), 2, 32),
    )
    np.testing.assert_array_equal(np.asarray(flat.codes).view(np.uint8), np.asarray(dense.codes).view(np.uint8))
    for bad, word in (
        (Epilogue(cos_sin, 3, 32), "groups"),
        (Epilogue(cos_sin, 2, 64), "block"),
        (Epilogue(cos_sin, 2, 128), "block"),
        (Epilogue(cos_sin[:5], 2, 32), "cos_sin"),
        (Epilogue(cos_sin[:, :7], 2, 32), "cos_sin"),
        (Epilogue(cos_sin, 2, 32, "bf16"), "scale_form"),
    ):
        with pytest.raises(ValueError, match=word):
            call(q, pool, indices, epilogue=bad)


# Gradients


def test_gradients():
    """Of queries, both typed pools and sinks, against automatic differentiation of the plain formula."""
    rng = np.random.default_rng(8)
    layout = plain(12, "float32", 4)
    pool, q, indices, lengths = make_case(rng, layout, 4, 19, 3, 150)
    lengths[3:] = 150
    extra_pool, _, slots, _ = make_case(rng, layout, 4, 19, 3, 5)
    sinks = rng.normal(size=3).astype(np.float32)
    weight, lse_weight = rng.normal(size=(19, 3, 8)), rng.normal(size=(19, 3))

    def score(out, lse):
        return jnp.sum(out * weight) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, lse) * lse_weight)

    def tiled(q, pool, extra_pool, sinks):
        extra = (extra_pool, layout, slots, None)
        return score(
            *sparse_mla(q, pool, indices, lengths, layout=layout, scale=0.4, extra=extra, sinks=sinks, v_dim=8)
        )

    def formula(q, pool, extra_pool, sinks):
        both = jnp.concatenate([pool.reshape(-1, 12), extra_pool.reshape(-1, 12)])
        at = np.concatenate(
            [np.where(np.arange(150) < lengths[:, None], indices, -1), np.where(slots >= 0, slots + 16, -1)], 1
        )
        taken = (at >= 0) & (at < 32)
        keys = both[np.where(taken, at, 0)]
        logits = jnp.where(taken[:, None], 0.4 * jnp.einsum("rhd,rkd->rhk", q, keys, precision="highest"), -1e30)
        lse = jax.nn.logsumexp(logits, axis=-1)
        weights = jnp.exp(logits - jnp.logaddexp(lse, sinks)[..., None])
        out = jnp.einsum("rhk,rkd->rhd", weights, keys[..., :8], precision="highest")
        some = taken.any(1)[:, None]
        return score(jnp.where(some[..., None], out, 0), jnp.where(some, lse, -jnp.inf))

    args = (q, pool, extra_pool, sinks)
    got = jax.jit(jax.value_and_grad(tiled, argnums=(0, 1, 2, 3)))(*args)
    want = jax.jit(jax.value_and_grad(formula, argnums=(0, 1, 2, 3)))(*args)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4)
    for a, b in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5 * np.abs(b).max())


def test_gradients_ignore_nan_in_unused_slots():
    pool = small_pool()
    pool[0, :8] = np.nan

    def loss(q, pool, sinks):
        out, _ = sparse_mla(q, pool, indices, layout=SMALL, scale=0.5, sinks=sinks)
        return jnp.sum(out**2)

    indices = np.array([[4, -1], [-1, -1]], np.int32)
    sinks = np.array([0, -np.inf], np.float32)
    for grad in jax.grad(loss, argnums=(0, 1, 2))(queries(2), pool, sinks):
        assert np.isfinite(np.asarray(grad)).all()


# Checks


def test_value_checks():
    pool, q = small_pool(), queries(1)
    call = partial(sparse_mla, q, pool, layout=SMALL, scale=0.5)
    bad = np.array([[1, 8]], np.int32)
    with debug_checks():
        call(np.array([[1, -1]], np.int32), sinks=np.zeros(2, np.float32))
        call(bad, np.array([1], np.int32))  # past the length
    for arguments, word in (
        ((bad,), "indices"),
        ((np.array([[1, -2]], np.int32),), "indices"),
        ((np.array([[1, 2]], np.int32), np.array([3], np.int32)), "lengths"),
    ):
        with pytest.raises(ValueCheckError, match=word), debug_checks():
            call(*arguments)
    with pytest.raises(ValueCheckError, match="sinks"), debug_checks():
        call(np.array([[1, 2]], np.int32), sinks=np.array([0, np.nan], np.float32), validate=True)


def test_bad_arguments():
    pool, q = small_pool(), queries(2)
    indices = np.zeros((2, 3), np.int32)
    call = partial(sparse_mla, layout=SMALL, scale=0.5)
    cases = [
        (TypeError, "float16", lambda: call(q.astype(np.float16), pool, indices)),
        (TypeError, "indices", lambda: call(q, pool, indices.astype(np.float32))),
        (ValueError, "int32", lambda: call(q, pool, indices + np.int64(2**33))),
        (ValueError, "indices", lambda: call(q, pool, indices[:1])),
        (ValueError, "lengths", lambda: call(q, pool, indices, np.zeros(3, np.int32))),
        (ValueError, "pool", lambda: call(q, pool[:, :-1], indices)),
        (ValueError, "width", lambda: call(q[..., :7], pool, indices)),
        (ValueError, "sinks", lambda: call(q, pool, indices, sinks=np.zeros(3, np.float32))),
        (ValueError, "q_scale", lambda: call(q, pool, indices, q_scale=1.0)),
        (ValueError, "kv_scale", lambda: call(q, pool, indices, kv_scale=1.0)),
        (ValueError, "kv_scale", lambda: call(q, pool, indices, kv_scale=(None, None))),
        (ValueError, "v_dim", lambda: call(q, pool, indices, v_dim=9)),
        (ValueError, "out_scale", lambda: call(q, pool, indices, out_scale=np.ones((2, 1), np.float32))),
        (
            ValueError,
            "extra",
            lambda: call(q, pool, indices, extra=(pool[:, :4], plain(4, "float32", 1), indices, None)),
        ),
        (ValueError, "pallas", lambda: call(q, pool, indices, implementation="pallas")),
        (ValueError, "R, H, D", lambda: call(q[0], pool, indices)),
        (
            ValueError,
            "index132",
            lambda: sparse_mla(
                np.zeros((2, 1, 128), np.float32), index132().zeros(1), indices, layout=index132(), scale=1.0
            ),
        ),
    ]
    for error, word, bad in cases:
        with pytest.raises(error, match=word):
            bad()


@pytest.mark.slow
def test_e3_slots_past_two_gibibytes():
    layout = inline656(64)
    pages = 2**31 // layout.page_stride + 2
    pool = layout.zeros(pages)
    tail = reference.random_pool(np.random.default_rng(0), layout, 1)
    pool = jax.jit(lambda p: jax.lax.dynamic_update_slice(p, tail, (pages - 1, 0)), donate_argnums=0)(pool)
    q = np.random.default_rng(1).normal(size=(1, 2, 576)).astype(np.float32)
    slots = np.arange(64, dtype=np.int32)[None]
    far = run(q, pool, slots + (pages - 1) * 64, layout=layout, scale=0.04)
    near = run(q, tail, slots, layout=layout, scale=0.04)
    np.testing.assert_array_equal(far[0], near[0])
    assert np.abs(np.asarray(far[0])).max() > 0
