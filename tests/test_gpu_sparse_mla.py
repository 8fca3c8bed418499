"""Sparse attention on a GPU: thousands of rows of every kind against float32, repeats, far ends of large pools."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmla.kernels import Epilogue, dispatch, kv_pack, sparse_mla
from jmla.kernels.layouts import footer584, gather_rows, inline656, plain
from jmla.kernels.shapes import ATTENTION

pytestmark = pytest.mark.gpu
ROWS = 96
KERNELS = pytest.mark.parametrize("implementation", ["triton", "cute"])

LAYOUTS = [
    (inline656(64), None),
    (inline656(61), None),
    (inline656(2), inline656(256)),
    (inline656(64, scale_form="float32"), None),
    (inline656(61, scale_form="float32"), inline656(2)),
    (footer584(256), footer584(64)),
    (footer584(64, padded=False), footer584(2)),
    (footer584(61), None),
    (plain(576, "bfloat16", 64), None),
    (plain(512, "bfloat16", 61), plain(512, "bfloat16", 2)),
]
HEADS = [1, 4, 43, 64, 128]
COLUMNS = [1, 133, 640]


@pytest.fixture(autouse=True)
def _device():
    if jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU: the interpreter would take hours")


@contextlib.contextmanager
def served():
    """Skips what a kernel leaves to others, and says why."""
    try:
        yield
    except dispatch.CannotRun as error:
        pytest.skip(str(error))


@functools.lru_cache(maxsize=16)
def random_pool(layout, pages):
    """Rows of the size that FlashMLA's tests have, for its tolerances; NaN bytes wherever no row is stored."""
    rows = 0.1 * jax.random.normal(jax.random.key(layout.page_size), (pages * layout.page_size, layout.width))
    pool = layout.zeros(pages)
    if layout.kind != "plain":
        pool = pool | jnp.uint8(0xFF)
    slots = np.arange(len(rows), dtype=np.int32)
    slots[5::7] = -1  # every seventh slot stays NaN, and is never attended
    return kv_pack(rows, slots, pool, layout=layout, implementation="xla")


def random_slots(rng, layout, pages, columns):
    """Slots and lengths of rows of every kind: full, empty, short, with holes at random, leading, or everywhere."""
    slots = rng.integers(0, pages * layout.page_size, (ROWS, columns)).astype(np.int32)
    slots = np.where(slots % 7 == 5, slots - 1, slots)
    lengths = rng.integers(0, columns + 1, ROWS).astype(np.int32)
    slots[rng.random(slots.shape) < 0.1] = -1
    lengths[0], lengths[1], lengths[2:10] = columns, 0, columns
    slots[2] = -1
    slots[3, : columns // 2 + 1] = -1
    slots[4, columns // 2 :] = -1
    slots[5] = 2**31 - 1
    slots[6] = -7
    slots[7] = max(slots[7].max(), 0)  # one slot again and again
    lengths[10:12] = -3, 2**30
    return slots, lengths


@functools.partial(jax.jit, static_argnames=("layouts", "scale", "v_dim"))
def reference(q, pools, slots, sinks, *, layouts, scale, v_dim):
    """The formula in float32 at the highest precision, over unpacked rows."""
    keys = jnp.concatenate(
        [gather_rows(p, s, layout) for p, s, layout in zip(pools, slots, layouts, strict=True)], axis=1
    )
    taken = jnp.concatenate(slots, axis=1) >= 0
    keys = jnp.where(taken[..., None], keys, 0)
    logits = jnp.einsum("rhd,rkd->rhk", q.astype(jnp.float32), keys, precision="highest") * scale
    logits = jnp.where(taken[:, None], logits, -jnp.inf)
    lse = jax.scipy.special.logsumexp(logits, axis=-1)
    finite = jnp.where(jnp.isinf(lse), 0, lse)
    weights = jnp.where(taken[:, None], jnp.exp(logits - finite[..., None]), 0)
    out = jnp.einsum("rhk,rkd->rhd", weights, keys[..., :v_dim], precision="highest")
    products = jnp.einsum("rhd,rkd->rhk", q.astype(jnp.float32) ** 2, keys**2) * scale**2
    return out * jax.nn.sigmoid(finite - sinks)[..., None], lse, jnp.sqrt(products.max(-1))


def counted(slots, lengths, capacity):
    slots = np.where(np.arange(slots.shape[1]) < lengths[:, None], slots, -1)
    return np.where((slots >= 0) & (slots < capacity), slots, -1)


GRID = [
    (layouts, HEADS[i % 5], columns) for i, (layouts, columns) in enumerate(itertools.product(LAYOUTS, COLUMNS))
] + [(layouts, heads, 133) for layouts in LAYOUTS[:7] for heads in (64, 128)]


# Cases that a kernel of its own serves on sm_90, where the one of the other GPUs is tested too.
TWICE = [i for i, ((layout, _), heads, _) in enumerate(GRID) if layout.kind != "plain" and heads >= 64][::2]


@pytest.mark.parametrize(
    ("number", "implementation"),
    [(i, name) for name in ("triton", "cute") for i in range(len(GRID))] + [(i, "portable") for i in TWICE],
)
def test_grid(number, implementation):
    """96 rows a case, 5,376 in all: heads, layouts, page sizes, widths, lengths, holes, sinks, one and two sources."""
    case, heads, columns = GRID[number]
    deterministic = True if number % 3 == 0 else None
    layout, extra_layout = case
    rng = np.random.default_rng(heads * 1000 + columns)
    v_dim = 512
    pages = -(-300 // layout.page_size)
    layouts, pools = (layout,), (random_pool(layout, pages),)
    slots, lengths = random_slots(rng, layout, pages, columns)
    shown, extra = [counted(slots, lengths, pages * layout.page_size)], None
    if extra_layout is not None:
        more = -(-300 // extra_layout.page_size)
        layouts, pools = (layout, extra_layout), (*pools, random_pool(extra_layout, more))
        extra_slots, extra_lengths = random_slots(rng, extra_layout, more, 200)
        extra = (pools[1], extra_layout, extra_slots, extra_lengths)
        shown.append(counted(extra_slots, extra_lengths, more * extra_layout.page_size))
    q = jnp.asarray(rng.normal(size=(ROWS, heads, layout.width)), jnp.bfloat16)
    sinks = jnp.asarray(rng.normal(size=heads), jnp.float32).at[0].set(-jnp.inf)
    call = functools.partial(
        sparse_mla,
        layout=layout,
        scale=0.05,
        v_dim=v_dim,
        sinks=sinks,
        deterministic=deterministic,
        implementation=implementation,
    )
    with served():
        got = jax.jit(lambda *xs: call(*xs, extra=extra))(q, pools[0], slots, lengths)
    want = reference(q, pools, tuple(shown), sinks, layouts=layouts, scale=0.05, v_dim=v_dim)
    out, lse, expected, expected_lse, spread = (np.asarray(x, np.float64) for x in (*got, *want))
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(expected_lse))
    error = np.abs(out - expected)
    assert ((error <= 1e-3) | (error <= 2.01 / 128 * np.abs(expected))).all(), error.max()
    if expected.any():
        assert 1 - 2 * np.sum(out * expected) / np.sum(out**2 + expected**2) <= 5e-6
    some = np.isfinite(expected_lse)
    error = np.abs(lse[some] - expected_lse[some])
    # Keys under float32 scales are rounded to bf16: the products of a logit err by up to 2^-8 of each, independently.
    whole = implementation == "cute" or (implementation == "triton" and heads > 16)
    rounds = whole and any(x.scale_form == "float32" for x in layouts)
    rounding = 3 * 2.0**-8 * spread[some] if rounds and layout.kind == "inline" else 0
    assert ((error <= 1e-6) | (error <= 8.01 / 65536 * np.abs(expected_lse[some]) + rounding)).all(), error.max()


def inputs(shape, rows, seed=0):
    layouts = [layout for layout in (shape.layout, shape.extra_layout) if layout is not None]
    pages = [-(-4096 // layout.page_size) for layout in layouts]
    keys = jax.random.split(jax.random.key(seed), 3)
    q = jax.random.normal(keys[0], (rows, shape.heads, shape.width)).astype(jnp.bfloat16)
    slots = [
        7 * jax.random.randint(key, (rows, width), 0, count * layout.page_size // 7, jnp.int32)
        for key, width, count, layout in zip(
            keys[1:], (shape.columns, shape.extra_columns), pages, layouts, strict=False
        )
    ]
    return q, [random_pool(layout, count) for layout, count in zip(layouts, pages, strict=True)], slots


def attend(shape, q, pools, slots, **options):
    extra = None if len(pools) == 1 else (pools[1], shape.extra_layout, slots[1], None)
    sinks = jnp.ones(shape.heads) if shape.sinks else None
    return sparse_mla(
        q, pools[0], slots[0], layout=shape.layout, scale=shape.scale, extra=extra, sinks=sinks, **options
    )


@KERNELS
@pytest.mark.parametrize("rows", [1, 32, 64])
@pytest.mark.parametrize("name", ["v3.2", "v4-flash-csa", "v4-flash-hca", "v4-pro-csa"])
def test_twenty_repeats_are_bitwise_equal(name, rows, implementation):
    shape = ATTENTION[name]
    q, pools, slots = inputs(shape, rows)
    call = jax.jit(functools.partial(attend, shape, implementation=implementation))
    with served():
        first = jax.tree.map(np.asarray, call(q, pools, slots))
    assert np.isfinite(first[0].astype(np.float32)).all()
    for _ in range(19):
        for x, y in zip(first, call(q, pools, slots), strict=True):
            np.testing.assert_array_equal(x, np.asarray(y))


@KERNELS
def test_no_rows(implementation):
    shape = ATTENTION["v4-flash-csa"]
    q, pools, slots = inputs(shape, 1)
    call = jax.jit(functools.partial(attend, shape, implementation=implementation))
    with served():
        out, lse = call(q[:0], pools, [s[:0] for s in slots])
    assert (out.shape, lse.shape) == ((0, 64, 512), (0, 64))


@KERNELS
@pytest.mark.parametrize("name", ["v3.2", "v4-flash-csa"])
def test_deterministic_rows_do_not_depend_on_their_mates_or_on_padding(name, implementation):
    shape = ATTENTION[name]
    q, pools, slots = inputs(shape, 9)
    call = jax.jit(functools.partial(attend, shape, implementation=implementation, deterministic=True))
    with served():
        whole, _ = call(q, pools, slots)
    alone, _ = call(q[4:5], pools, [s[4:5] for s in slots])
    padded, _ = call(q, pools, [jnp.pad(s, ((0, 0), (0, 100)), constant_values=-1) for s in slots])
    np.testing.assert_array_equal(np.asarray(whole[4:5]), np.asarray(alone))
    if len(slots) == 1:
        np.testing.assert_array_equal(np.asarray(whole), np.asarray(padded))


@KERNELS
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("layout", [inline656(64), footer584(64)], ids=lambda layout: layout.name)
def test_values_of_very_different_sizes(layout, rows, implementation):
    """Tiles of a row differ by 2^24 and rows by 2^40: each value is as exact as those that it is the mean of."""
    rng = np.random.default_rng(0)
    count, tile = 640, layout.tile
    tiles = -(-layout.nope // tile)
    data = rng.normal(size=(count, layout.width)).astype(np.float32)
    sizes = 2.0 ** (np.linspace(-20, 4, tiles) + rng.integers(-3, 4, (count, tiles)))
    data[:, : layout.nope] *= np.repeat(sizes, tile, 1)[:, : layout.nope]
    for size in (1.0, 2.0**-40, 2.0**30):
        pool = kv_pack(size * data, np.arange(count), layout.zeros(10), layout=layout, implementation="xla")
        q = jnp.zeros((rows, 64, layout.width), jnp.bfloat16)  # all weigh alike
        slots = jnp.asarray(np.stack([rng.permutation(count) for _ in range(rows)]), jnp.int32)
        call = functools.partial(sparse_mla, layout=layout, scale=1.0, v_dim=512, implementation=implementation)
        with served():
            out, _ = jax.jit(call)(q, pool, slots)
        values = np.asarray(gather_rows(pool, jnp.arange(count), layout), np.float64)[:, :512]
        want = values.mean(0)
        error = np.abs(np.asarray(out, np.float64) - want)
        allowed = 2.0**-8 * np.abs(want) + 2.0**-11 * np.abs(values).mean(0)
        assert (error <= allowed).all(), (size, (error / allowed).max())


@KERNELS
@pytest.mark.parametrize("name", ["v3.2", "v4-flash-csa"])
def test_holes_beside_queries_that_are_not_finite(name, implementation):
    """A row of holes gives zero and -inf whatever its query; other rows do not notice."""
    shape = ATTENTION[name]
    q, pools, slots = inputs(shape, 4)
    call = jax.jit(functools.partial(attend, shape, implementation=implementation))
    with served():
        out, lse = call(q, pools, slots)
    spoilt = q.at[1].set(jnp.nan).at[2].set(jnp.inf)
    holes = [s.at[1:3].set(-1) for s in slots]
    got, got_lse = call(spoilt, pools, holes)
    for row in (1, 2):
        np.testing.assert_array_equal(np.asarray(got[row]), 0)
        np.testing.assert_array_equal(np.asarray(got_lse[row]), -np.inf)
    for row in (0, 3):
        np.testing.assert_array_equal(np.asarray(got[row]), np.asarray(out[row]))
        np.testing.assert_array_equal(np.asarray(got_lse[row]), np.asarray(lse[row]))


@KERNELS
@pytest.mark.parametrize("layout", [inline656(64), footer584(64)], ids=lambda layout: layout.name)
def test_far_end_of_a_large_pool(layout, implementation):
    """Rows past byte 2^31 are read where they are."""
    pages = (5 << 29) // layout.page_stride
    near = random_pool(layout, 16)
    slots = np.array([[i for i in range(16 * layout.page_size) if i % 7 != 5]], np.int32)
    q = jax.random.normal(jax.random.key(1), (1, 64, layout.width)).astype(jnp.bfloat16)
    far = jax.jit(lambda x: jnp.full((pages, layout.page_stride), 0xFF, jnp.uint8).at[-16:].set(x))(near)
    call = functools.partial(sparse_mla, layout=layout, scale=0.05, implementation=implementation)
    with served():
        expected, _ = jax.jit(call)(q, near, slots)
    got, _ = jax.jit(call)(q, far, slots + (pages - 16) * layout.page_size)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


@KERNELS
@pytest.mark.parametrize(("block", "form"), [(128, "fp32"), (32, "ue8m0")])
@pytest.mark.parametrize(
    ("name", "rows"), [*(("v4-flash-csa", rows) for rows in (1, 4, 16, 32, 64, 70)), ("v3.2", 2), ("v3.2", 70)]
)
def test_epilogue(name, rows, block, form, implementation):
    """The fused epilogue against XLA's: values within a step and what bf16 weights round, equal scales of padding."""
    shape = ATTENTION[name]
    q, pools, slots = inputs(shape, rows)
    angles = jax.random.uniform(jax.random.key(2), (rows, 32), maxval=6.28)
    cos_sin = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=1)
    epilogue = Epilogue(cos_sin, groups=8, block=block, scale_form=form)
    with served():
        results = [
            jax.jit(functools.partial(attend, shape, epilogue=epilogue, implementation=name))(q, pools, slots)
            for name in (implementation, "xla")
        ]
    (got, lse), (want, want_lse) = jax.tree.map(np.asarray, results)
    np.testing.assert_allclose(lse, want_lse, rtol=8.01 / 65536)
    assert got.scales.shape == want.scales.shape
    values, expected = dequantised(got, block, form), dequantised(want, block, form)
    error, step = np.abs(values - expected), np.abs(expected) / 8
    assert ((error <= 1e-3) | (error <= 1.01 * step + 2.01 / 128 * np.abs(expected))).all(), error.max()
    assert np.mean(got.codes.view(np.uint8) != want.codes.view(np.uint8)) < 0.2
    np.testing.assert_array_equal(got.scales[..., rows:], 0)


@KERNELS
@pytest.mark.parametrize(("rows", "heads"), [(3, 64), (5, 43), (140, 100)])
def test_e4m3_queries_with_scales(rows, heads, implementation):
    """Queries as codes with a factor for each row and head, and a factor of the output, against XLA's."""
    layout, pages, rng = inline656(64), 64, np.random.default_rng(rows)
    pool = random_pool(layout, pages)
    q = jnp.asarray(rng.normal(size=(rows, heads, layout.width)), jnp.float8_e4m3fn)
    slots = 7 * jnp.asarray(rng.integers(0, pages * 64 // 7, (rows, 640)), jnp.int32)
    scales = {"q_scale": jnp.asarray(rng.uniform(0.5, 2, (rows, heads)), jnp.float32), "out_scale": 3.0}
    call = functools.partial(sparse_mla, q, pool, slots, layout=layout, scale=0.05, **scales)
    with served():
        out, lse = jax.tree.map(np.asarray, call(implementation=implementation))
    want, want_lse = jax.tree.map(np.asarray, call(implementation="xla"))
    np.testing.assert_allclose(lse, want_lse, rtol=8.01 / 65536, atol=1e-4)
    np.testing.assert_allclose(out.astype(np.float32), want.astype(np.float32), rtol=2.01 / 128, atol=1e-3 * 3)


def dequantised(made, block, form):
    """``[groups, R, width]`` of a quantised output."""
    groups, rows, width = made.codes.shape
    scales = made.scales
    if form == "ue8m0":  # four exponents a word
        exponents = scales.view(np.uint8).reshape(groups, -1, scales.shape[2], 4).swapaxes(2, 3)
        scales = (exponents.reshape(groups, -1, scales.shape[2]).astype(np.int32) << 23).view(np.float32)
    scales = scales[:, : width // block, :rows].swapaxes(1, 2)
    return np.asarray(made.codes).astype(np.float32) * np.repeat(scales, block, axis=2)
