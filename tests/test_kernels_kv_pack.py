"""Packing: bytes against an independent writer, skipped slots, in-place stores, and pools past 2 GiB."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import packers
import pytest

from jmla import kernels
from jmla.kernels import layouts
from jmla.kernels.layouts import KVLayout

STATIC = ("layout", "eps", "scale_form")
pack = jax.jit(kernels.kv_pack, static_argnames=STATIC)
unpack = jax.jit(kernels.kv_unpack, static_argnames="layout")


def some_rows(count: int, width: int, seed: int = 0) -> np.ndarray:
    """Rows of very different sizes, all-zero tiles and exact powers of two among them."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, width)) * 10.0 ** rng.integers(-9, 5, (count, 1))
    rows[1, : width // 2] = 0
    rows[2] = rng.choice([-448, -1, 0, 0.875, 448], width)
    return rows.astype(np.float32)


def expected(layout: KVLayout, rows: np.ndarray, slots: list[int], pool: np.ndarray, scale: float = 1.0) -> np.ndarray:
    """The independent packer for a layout."""
    size, form, eps = layout.page_size, layout.scale_form, layout.min_amax
    if layout.kind == "inline":
        return packers.pack_inline(rows, slots, pool, size, layout.nope, form, eps)
    if layout.kind == "footer":
        return packers.pack_footer(rows, slots, pool, size, layout.nope, eps)
    if layout.kind == "index":
        return packers.pack_index(rows, slots, pool, size, layout.hadamard, form, eps)
    return packers.pack_plain(rows, slots, pool, size, layout.value_dtype, scale)


BYTES = [
    layouts.inline656(),
    layouts.inline656(scale_form="float32"),
    layouts.inline656(scale_form="float32", min_amax=0.0),
    layouts.inline656(min_amax=0.0),
    layouts.inline656(3, min_amax=1e-4, page_stride=4 * 656),
    layouts.inline656(4, nope=160, rope=8),
    layouts.inline656(4, nope=512, rope=0),
    *[layouts.footer584(size, padded=padded) for size in (2, 61, 64, 256) for padded in (True, False)],
    layouts.footer584(4, min_amax=1e-4),
    layouts.footer584(4, min_amax=448e-4),
    layouts.footer584(5, nope=24, rope=8),
    layouts.index132(hadamard=False),
    layouts.index132(hadamard=False, scale_form="power_of_two"),
    layouts.index132(7, width=32, hadamard=False),
    layouts.plain(72, "bfloat16", 3),
    layouts.plain(72, "float32", 3),
]


@pytest.mark.parametrize(
    "layout",
    BYTES,
    ids=lambda v: f"{v.name}-{v.page_size}-{v.page_stride}-{v.scale_form}-{v.min_amax}",
)
def test_bytes_equal_those_of_an_independent_writer(layout: KVLayout) -> None:
    """Old bytes are 0x3F: padding, other rows and other pages must keep them."""
    rows = some_rows(6, layout.width)
    slots = [0, 3 * layout.page_size - 1, -1, layout.page_size, 3 * layout.page_size, layout.page_size - 1]
    old = np.full((3, layout.page_stride), 0x3F, np.uint8)
    got = np.asarray(pack(rows, jnp.asarray(slots, jnp.int32), jnp.asarray(old), layout=layout))
    np.testing.assert_array_equal(got, expected(layout, rows, slots, old))


@pytest.mark.parametrize("width", [128, 16])
@pytest.mark.parametrize("form", ["float32", "power_of_two"])
def test_rotated_index_rows_equal_those_of_an_independent_writer(width: int, form: str) -> None:
    layout = layouts.index132(5, width=width, scale_form=form)
    rows = np.random.default_rng(3).integers(-2000, 2000, (4, width)).astype(np.float32)  # sums of these are exact
    slots, old = [9, 0, -1, 4], np.full((2, layout.page_stride), 0x3F, np.uint8)
    got = pack(rows, jnp.asarray(slots, jnp.int32), jnp.asarray(old), layout=layout)
    np.testing.assert_array_equal(got, expected(layout, rows, slots, old))
    back = unpack(got, jnp.asarray(slots, jnp.int32), layout=layout)
    assert np.abs(np.delete(back - rows, 2, axis=0)).max() < 2000 * width**0.5 / 16
    np.testing.assert_array_equal(back[2], np.zeros(width))


def test_a9_plain_e4m3_saturates_under_a_fixed_scale() -> None:
    layout = layouts.plain(72, "float8_e4m3fn", 3)
    rows = some_rows(4, 72)
    rows[3, :4] = [1e9, -1e9, 448.0001, 465]
    slots, old = [0, 5, 2, 4], np.full((2, layout.page_stride), 0x3F, np.uint8)
    got = np.asarray(pack(rows, jnp.asarray(slots, jnp.int32), jnp.asarray(old), layout=layout, kv_scale=0.75))
    np.testing.assert_array_equal(got, expected(layout, rows, slots, old, 0.75))
    assert not np.isin(got, [0x7F, 0xFF]).any()
    back = unpack(got, jnp.array([4], jnp.int32), layout=layout, kv_scale=0.75)
    np.testing.assert_array_equal(back[0, :2], [336, -336])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_typed_pools_hold_the_same_bytes(dtype: str) -> None:
    layout = layouts.plain(24, dtype, 4)
    rows, slots = some_rows(3, 24), jnp.array([7, -1, 2], jnp.int32)
    typed = pack(rows, slots, layout.zeros(2), layout=layout)
    raw = pack(rows, slots, layout.zeros(2, raw=True), layout=layout)
    assert typed.dtype == jnp.dtype(dtype)
    assert np.asarray(typed).tobytes() == np.asarray(raw).tobytes()
    np.testing.assert_array_equal(unpack(typed, slots, layout=layout), unpack(raw, slots, layout=layout))


def test_a5_power_of_two_scale() -> None:
    layout = layouts.inline656()
    rows = np.zeros((1, 576), np.float32)
    rows[0, :128] = 336  # 0.75 is raised to 1
    pool = pack(rows, jnp.array([0], jnp.int32), layout.zeros(1), layout=layout)
    np.testing.assert_array_equal(np.asarray(pool)[0, 512:528].view("<f4"), [1.0, 2.0**-13, 2.0**-13, 2.0**-13])
    back = np.zeros((1, 576), np.float32)
    back[0, :128] = 320  # the even one of its neighbours 320 and 352
    np.testing.assert_array_equal(unpack(pool, jnp.array([0], jnp.int32), layout=layout), back)


def test_a5_float32_scale_overrides_the_form_of_the_layout() -> None:
    layout = layouts.inline656()
    rows = np.zeros((1, 576), np.float32)
    rows[0, :128] = 336
    pool = pack(rows, jnp.array([0], jnp.int32), layout.zeros(1), layout=layout, scale_form="float32")
    np.testing.assert_array_equal(np.asarray(pool)[0, 512:516].view("<f4"), np.float32([0.75]))
    np.testing.assert_array_equal(unpack(pool, jnp.array([0], jnp.int32), layout=layout), rows)
    with pytest.raises(ValueError, match="power"):
        kernels.kv_pack(
            rows[:, :512], [0], layouts.footer584(2).zeros(1), layout=layouts.footer584(2), scale_form="float32"
        )


@pytest.mark.parametrize(("min_amax", "zero"), [(448e-4, 114), (1e-4, 105), (1e-8, 92)])
def test_footer_scale_bytes_of_the_specification(min_amax: float, zero: int) -> None:
    layout = layouts.footer584(2, min_amax=min_amax)
    rows = np.zeros((1, 512), np.float32)
    rows[0, [0, 64, 128, 192]] = [448, 449, 1.0, -0.875]
    pool = np.asarray(pack(rows, jnp.array([1], jnp.int32), layout.zeros(1), layout=layout))
    assert pool[0, layout.scale_address(1) :][:8].tolist() == [127, 128, 119, 118, zero, zero, zero, 0]


def test_a8_rope_keeps_bf16_beside_a_small_latent() -> None:
    layout = layouts.inline656()
    rows = np.full((1, 576), 0.01, np.float32)
    rows[0, 512:] = 3.0 + np.arange(64) / 100
    back = unpack(pack(rows, jnp.array([0], jnp.int32), layout.zeros(1), layout=layout), jnp.array([0]), layout=layout)
    np.testing.assert_array_equal(back[0, 512:], jnp.asarray(rows[0, 512:]).astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_allclose(back[0, :512], 0.01, rtol=1 / 16)


@pytest.mark.parametrize(
    "layout",
    [layouts.inline656(64), layouts.inline656(64, scale_form="float32"), layouts.footer584(64), layouts.index132()],
    ids=["inline-pow2", "inline-f32", "footer", "index"],
)
def test_a9_no_nan_codes_and_half_a_step(layout: KVLayout) -> None:
    """Random magnitudes over the range of float32: codes are finite, errors at most half a step of the code."""
    rng = np.random.default_rng(4)
    rows = rng.standard_normal((64, layout.width)).astype(np.float32)
    rows *= np.ldexp(np.float32(1), rng.integers(-60, 100, (64, 1))).astype(np.float32)
    rows[:8] = np.float32(3.0e38) * rng.uniform(-1, 1, (8, layout.width))
    slots = jnp.arange(64, dtype=jnp.int32)
    pool = pack(rows, slots, layout.zeros(1), layout=layout)
    raw = np.asarray(pool)[0, : 64 * layout.row_bytes].reshape(64, layout.row_bytes)[:, : layout.nope]
    assert not np.isin(raw, [0x7F, 0xFF]).any()
    stored = np.asarray(layouts.gather_rows(pool, slots, layout))[:, : layout.nope]
    meant = np.asarray(kernels.layouts.unrotate(rows, layout))[:, : layout.nope]  # the rotation is its own inverse
    pad = -layout.nope % layout.tile
    amax = np.abs(np.pad(meant, ((0, 0), (0, pad))).reshape(64, -1, layout.tile)).max(-1)
    step = np.repeat(np.maximum(amax, layout.min_amax) / 448, layout.tile, axis=1)[:, : layout.nope]
    if layout.scale_form == "power_of_two":
        step = step * 2  # the scale is up to twice the quotient
    bound = np.maximum(np.abs(meant) / 16, step * 2.0**-10) * 1.0001
    assert (np.abs(stored.astype(np.float64) - meant) <= bound).all()


def test_a10_rows_without_rope_do_not_meet_stale_bytes() -> None:
    layout = layouts.inline656(4, nope=32, rope=0)
    rows = np.random.default_rng(5).standard_normal((3, 32)).astype(np.float32)
    slots = jnp.array([0, 1, 5], jnp.int32)
    q = jnp.asarray(np.random.default_rng(6).standard_normal((1, 2, 32)), jnp.float32)
    pools = [jnp.full((2, layout.page_stride), byte, jnp.uint8) for byte in (0x3F, 0x00)]
    pools = [pack(rows, slots, pool, layout=layout) for pool in pools]
    stale, clean = (kernels.sparse_mla(q, pool, slots[None], layout=layout, scale=0.5) for pool in pools)
    np.testing.assert_array_equal(stale[0], clean[0])
    np.testing.assert_array_equal(stale[1], clean[1])
    keys = np.asarray(unpack(pools[0], slots, layout=layout))
    logits = 0.5 * np.asarray(q)[0] @ keys.T
    weights = np.exp(logits - logits.max(1, keepdims=True))
    np.testing.assert_allclose(stale[0][0], weights @ keys / weights.sum(1, keepdims=True), atol=1e-5)


@pytest.mark.parametrize("typed", [False, True])
def test_b7_skipped_rows_leave_the_last_slot_alone(typed: bool) -> None:
    layout = layouts.plain(8, "float32", 4) if typed else layouts.footer584(4, nope=24, rope=8)
    old = np.random.default_rng(7).integers(1, 100, layout.pool_shape(1)).astype(layout.pool_dtype())
    rows = np.ones((6, layout.width), np.float32)
    slots = jnp.array([-1, 2, 4, 2**31 - 1, -(2**31), -7], jnp.int32)
    new = pack(rows, slots, jnp.asarray(old), layout=layout)
    keep = np.ones(old.size, bool)
    if typed:
        keep[16:24] = False
    else:
        keep[2 * layout.row_bytes : 3 * layout.row_bytes] = False
        keep[layout.scale_address(2) :][: layout.scale_bytes] = False
    np.testing.assert_array_equal(np.asarray(new).reshape(-1)[keep], old.reshape(-1)[keep])
    np.testing.assert_array_equal(unpack(new, slots[1:2], layout=layout), rows[:1])


def test_a_nan_spoils_its_own_tile_only() -> None:
    layout = layouts.footer584(2)
    rows = np.ones((2, 512), np.float32)
    rows[0, 70] = np.nan
    slots = jnp.array([0, 1], jnp.int32)
    back = np.array(unpack(pack(rows, slots, layout.zeros(1), layout=layout), slots, layout=layout))
    assert np.isnan(back[0, 64:128]).all()
    rows[0, 64:128] = back[0, 64:128] = 0
    np.testing.assert_array_equal(back, rows)


def test_norm_and_rotation_before_the_store() -> None:
    layout = layouts.plain(24, "float32", 4)
    rng = np.random.default_rng(8)
    rows, weight = rng.standard_normal((5, 24)), rng.standard_normal(16)
    angles = rng.uniform(0, 6, (5, 4))
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    got = pack(
        jnp.asarray(rows, jnp.float32),
        jnp.arange(5, dtype=jnp.int32),
        layout.zeros(2),
        layout=layout,
        norm_weight=jnp.asarray(weight, jnp.float32),
        eps=1e-2,
        cos_sin=jnp.asarray(cos_sin, jnp.float32),
    )
    want = rows.copy()
    want[:, :16] *= weight / np.sqrt((rows[:, :16] ** 2).mean(1, keepdims=True) + 1e-2)
    pairs = (want[:, 16::2] + 1j * want[:, 17::2]) * np.exp(1j * angles)
    want[:, 16::2], want[:, 17::2] = pairs.real, pairs.imag
    np.testing.assert_allclose(unpack(got, jnp.arange(5, dtype=jnp.int32), layout=layout), want, atol=1e-5)


@pytest.mark.parametrize("layout", [layouts.inline656(64), layouts.footer584(64)], ids=["inline", "footer"])
def test_a_row_has_the_same_bytes_whatever_rows_stand_beside_it(layout: KVLayout) -> None:
    rng = np.random.default_rng(9)
    rows, angles = rng.standard_normal((33, layout.width)), rng.uniform(0, 6, (33, 32))
    cos_sin = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    weight = jnp.asarray(rng.standard_normal(512), jnp.float32)
    whole = None
    for count in (33, 1, 2, 7, 16):
        new = pack(
            jnp.asarray(rows[:count], jnp.float32),
            jnp.arange(count, dtype=jnp.int32),
            layout.zeros(1),
            layout=layout,
            norm_weight=weight,
            cos_sin=jnp.asarray(cos_sin[:count]),
        )
        got = layouts.gather_rows(new, jnp.arange(count, dtype=jnp.int32), layout)
        whole = got if whole is None else whole
        np.testing.assert_array_equal(got, whole[:count])


@pytest.mark.parametrize(
    "layout",
    [layouts.inline656(), layouts.footer584(64), layouts.index132(), layouts.plain(576, "bfloat16", 64)],
    ids=lambda layout: layout.name,
)
def test_a_donated_pool_is_updated_in_place(layout: KVLayout) -> None:
    pool = layout.zeros(64)
    rows, slots = jnp.ones((4, layout.width)), jnp.array([1, -1, 64, 4000], jnp.int32)
    step = jax.jit(lambda rows, slots, pool: kernels.kv_pack(rows, slots, pool, layout=layout), donate_argnums=2)
    compiled = step.lower(rows, slots, pool).compile()
    shape = ",".join(map(str, pool.shape))
    copies = [line for line in compiled.as_text().splitlines() if " copy(" in line and f"[{shape}]" in line]
    assert not copies
    assert compiled.memory_analysis().temp_size_in_bytes < pool.nbytes // 8
    before = pool.unsafe_buffer_pointer()
    after = step(rows, slots, pool)
    assert after.unsafe_buffer_pointer() == before
    assert pool.is_deleted()


def test_typed_pools_are_differentiable() -> None:
    layout = layouts.plain(4, "float32", 2)
    rows, slots = jnp.ones((3, 4)), jnp.array([3, -1, 0], jnp.int32)
    weight = jnp.arange(16.0).reshape(4, 4)

    def loss(rows: jax.Array, pool: jax.Array) -> jax.Array:
        new = kernels.kv_pack(rows, slots, pool, layout=layout)
        return jnp.sum(weight * kernels.kv_unpack(new, jnp.arange(4, dtype=jnp.int32), layout=layout))

    d_rows, d_pool = jax.jit(jax.grad(loss, argnums=(0, 1)))(rows, layout.zeros(2))
    np.testing.assert_array_equal(d_rows, [weight[3], np.zeros(4), weight[0]])
    np.testing.assert_array_equal(d_pool.reshape(4, 4), np.array([np.zeros(4), weight[1], weight[2], np.zeros(4)]))


def test_wrong_arguments_are_named() -> None:
    layout = layouts.footer584(4, nope=24, rope=8)
    pool, rows = layout.zeros(2), jnp.ones((2, 32))
    good = {"rows": rows, "slots": np.array([0, 1]), "pool": pool, "layout": layout}
    cases = [
        (ValueError, "slots.*int32", {"slots": np.array([2**32, 2**32 + 3])}),
        (TypeError, "slots.*float", {"slots": np.array([0.0, 1.0])}),
        (TypeError, "slots.*int16", {"slots": jnp.array([0, 1], jnp.int16)}),
        (ValueError, "slots", {"slots": np.array([0])}),
        (ValueError, "rows", {"rows": jnp.ones((2, 31))}),
        (TypeError, "rows", {"rows": jnp.ones((2, 32), jnp.int32)}),
        (ValueError, "norm_weight", {"norm_weight": jnp.ones(33)}),
        (TypeError, "cos_sin", {"cos_sin": jnp.ones((2, 8), jnp.bfloat16)}),
        (ValueError, "cos_sin", {"cos_sin": jnp.ones((2, 7))}),
        (ValueError, "cos_sin", {"cos_sin": jnp.ones((1, 8))}),
        (ValueError, "kv_scale", {"kv_scale": 1.0}),
        (ValueError, "scale_form", {"scale_form": "ue8m0"}),
        (ValueError, "triton", {"implementation": "triton"}),
    ]
    for error, match, change in cases:
        call = {**good, **change}
        with pytest.raises(error, match=match):
            kernels.kv_pack(call.pop("rows"), call.pop("slots"), call.pop("pool"), **call)


def test_debug_checks_name_the_bad_row() -> None:
    layout = layouts.footer584(4, nope=24, rope=8)
    rows = np.ones((2, 32), np.float32)
    with pytest.raises(kernels.ValueCheckError, match=r"slots.*slots\[1\] = 8"), kernels.debug_checks():
        pack(rows, jnp.array([0, 8], jnp.int32), layout.zeros(2), layout=layout)
    with pytest.raises(kernels.ValueCheckError, match="distinct"), kernels.debug_checks():
        pack(rows, jnp.array([3, 3], jnp.int32), layout.zeros(2), layout=layout)
    rows[1, 5] = np.nan
    with pytest.raises(kernels.ValueCheckError, match=r"rows\[1, 5\] = nan"), kernels.debug_checks():
        pack(rows, jnp.array([0, 1], jnp.int32), layout.zeros(2), layout=layout)
    with kernels.debug_checks():  # a skipped row may hold anything
        pack(rows, jnp.array([0, -1], jnp.int32), layout.zeros(2), layout=layout)


LARGE = {
    "e3-e7-index-page-2066": (dataclasses.replace(layouts.index132(), page_stride=1_039_680), 2200),
    "e4-footer-slot-4-million": (layouts.footer584(64, padded=False), 63_000),
    "e5-inline-last-page": (layouts.inline656(), 56_000),
}


@pytest.mark.parametrize(("layout", "pages"), LARGE.values(), ids=LARGE)
def test_e3_e4_e5_e7_reads_past_2_gib(layout: KVLayout, pages: int) -> None:
    """The pool is a lazily zeroed host array that the device shares: only the pages in use take memory."""
    assert pages * layout.page_stride > 2.1 * 2**30
    raw = np.zeros(pages * layout.page_stride + 64, np.uint8)
    raw = raw[-raw.ctypes.data % 64 :][: pages * layout.page_stride]  # aligned, or the device copies it
    pool = raw.reshape(pages, layout.page_stride)
    page = page_of_one_row(layout)
    far = [2, pages // 2, 2066 if layout.kind == "index" else pages - 2, pages - 1]
    for at in far:
        pool[at] = page
    shared = jax.device_put(pool, may_alias=True)
    slots = jnp.asarray([at * layout.page_size + 5 for at in far], jnp.int32)
    got = np.asarray(unpack(shared, slots, layout=layout))
    assert np.abs(got[0]).max() > 0
    np.testing.assert_array_equal(got, np.broadcast_to(got[0], got.shape))
    np.testing.assert_array_equal(unpack(shared, slots[1:] + 1, layout=layout), np.zeros((3, layout.width)))


def page_of_one_row(layout: KVLayout) -> np.ndarray:
    """A page with one row, at offset 5."""
    rows = np.random.default_rng(10).integers(-9, 9, (1, layout.width)).astype(np.float32)
    return expected(layout, rows, [5], np.zeros((1, layout.page_stride), np.uint8))[0]


def test_e4_e7_writes_past_2_gib() -> None:
    layout, pages = layouts.footer584(64, padded=False), 63_000
    slots = jnp.array([2 * 64 + 5, 4_000_000, pages * 64 - 1, -1], jnp.int32)
    assert layout.data_address(4_000_000) > 2**31
    row = np.random.default_rng(10).integers(-9, 9, (1, 512)).astype(np.float32)

    @jax.jit
    def write_and_read(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        pool = kernels.kv_pack(rows, slots, layout.zeros(pages), layout=layout)
        used = jnp.sum(jnp.any(pool[:, : layout.footer_offset : 7] != 0, axis=1))
        return kernels.kv_unpack(pool, slots, layout=layout), used

    got, used = write_and_read(jnp.asarray(np.repeat(row, 4, axis=0)))
    np.testing.assert_array_equal(got[:3], np.repeat(row, 3, axis=0))
    np.testing.assert_array_equal(got[3], np.zeros(512))
    assert used == 3
