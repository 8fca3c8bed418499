"""Packing: bytes against an independent writer, skipped slots, in-place stores, and pools past 2 GiB."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import packers
import pytest

from jmla import kernels
from jmla.kernels import launch_pallas, layouts
from jmla.kernels.kv_pack import plan
from jmla.kernels.layouts import KVLayout

STATIC = ("layout", "eps", "scale_form", "implementation")
pack = jax.jit(kernels.kv_pack, static_argnames=STATIC)
unpack = jax.jit(kernels.kv_unpack, static_argnames="layout")


def on_device() -> None:
    """Leaves out what only a real device can show."""
    if all(device.platform != "gpu" for device in jax.devices()):
        pytest.skip("needs an NVIDIA GPU")


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
def test_bytes_equal_those_of_an_independent_writer(layout: KVLayout, implementation: str) -> None:
    """Old bytes are 0x3F: padding, other rows and other pages must keep them."""
    rows = some_rows(6, layout.width)
    slots = [0, 3 * layout.page_size - 1, -1, layout.page_size, 3 * layout.page_size, layout.page_size - 1]
    old = np.full((3, layout.page_stride), 0x3F, np.uint8)
    got = np.asarray(
        pack(rows, jnp.asarray(slots, jnp.int32), jnp.asarray(old), layout=layout, implementation=implementation)
    )
    np.testing.assert_array_equal(got, expected(layout, rows, slots, old))


@pytest.mark.parametrize("width", [128, 16])
@pytest.mark.parametrize("form", ["float32", "power_of_two"])
def test_rotated_index_rows_equal_those_of_an_independent_writer(width: int, form: str, implementation: str) -> None:
    layout = layouts.index132(5, width=width, scale_form=form)
    rows = np.random.default_rng(3).integers(-2000, 2000, (4, width)).astype(np.float32)  # sums of these are exact
    slots, old = [9, 0, -1, 4], np.full((2, layout.page_stride), 0x3F, np.uint8)
    got = pack(rows, jnp.asarray(slots, jnp.int32), jnp.asarray(old), layout=layout, implementation=implementation)
    np.testing.assert_array_equal(got, expected(layout, rows, slots, old))
    back = unpack(got, jnp.asarray(slots, jnp.int32), layout=layout)
    assert np.abs(np.delete(back - rows, 2, axis=0)).max() < 2000 * width**0.5 / 16
    np.testing.assert_array_equal(back[2], np.zeros(width))


def test_a9_plain_e4m3_saturates_under_a_fixed_scale(implementation: str) -> None:
    layout = layouts.plain(72, "float8_e4m3fn", 3)
    rows = some_rows(4, 72)
    rows[3, :4] = [1e9, -1e9, 448.0001, 465]
    slots, old = [0, 5, 2, 4], np.full((2, layout.page_stride), 0x3F, np.uint8)
    got = np.asarray(
        pack(
            rows,
            jnp.asarray(slots, jnp.int32),
            jnp.asarray(old),
            layout=layout,
            kv_scale=0.75,
            implementation=implementation,
        )
    )
    np.testing.assert_array_equal(got, expected(layout, rows, slots, old, 0.75))
    assert not np.isin(got, [0x7F, 0xFF]).any()
    back = unpack(got, jnp.array([4], jnp.int32), layout=layout, kv_scale=0.75)
    np.testing.assert_array_equal(back[0, :2], [336, -336])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_typed_pools_hold_the_same_bytes(dtype: str, implementation: str) -> None:
    layout = layouts.plain(24, dtype, 4)
    rows, slots = some_rows(3, 24), jnp.array([7, -1, 2], jnp.int32)
    typed = pack(rows, slots, layout.zeros(2), layout=layout, implementation=implementation)
    raw = pack(rows, slots, layout.zeros(2, raw=True), layout=layout, implementation=implementation)
    assert typed.dtype == jnp.dtype(dtype)
    assert np.asarray(typed).tobytes() == np.asarray(raw).tobytes()
    np.testing.assert_array_equal(unpack(typed, slots, layout=layout), unpack(raw, slots, layout=layout))


def test_a5_power_of_two_scale(implementation: str) -> None:
    layout = layouts.inline656()
    rows = np.zeros((1, 576), np.float32)
    rows[0, :128] = 336  # 0.75 is raised to 1
    pool = pack(rows, jnp.array([0], jnp.int32), layout.zeros(1), layout=layout, implementation=implementation)
    np.testing.assert_array_equal(np.asarray(pool)[0, 512:528].view("<f4"), [1.0, 2.0**-13, 2.0**-13, 2.0**-13])
    back = np.zeros((1, 576), np.float32)
    back[0, :128] = 320  # the even one of its neighbours 320 and 352
    np.testing.assert_array_equal(unpack(pool, jnp.array([0], jnp.int32), layout=layout), back)


def test_a5_float32_scale_overrides_the_form_of_the_layout(implementation: str) -> None:
    layout = layouts.inline656()
    rows = np.zeros((1, 576), np.float32)
    rows[0, :128] = 336
    pool = pack(
        rows,
        jnp.array([0], jnp.int32),
        layout.zeros(1),
        layout=layout,
        scale_form="float32",
        implementation=implementation,
    )
    np.testing.assert_array_equal(np.asarray(pool)[0, 512:516].view("<f4"), np.float32([0.75]))
    np.testing.assert_array_equal(unpack(pool, jnp.array([0], jnp.int32), layout=layout), rows)
    with pytest.raises(ValueError, match="power"):
        kernels.kv_pack(
            rows[:, :512], [0], layouts.footer584(2).zeros(1), layout=layouts.footer584(2), scale_form="float32"
        )


@pytest.mark.parametrize(("min_amax", "zero"), [(448e-4, 114), (1e-4, 105), (1e-8, 92)])
def test_footer_scale_bytes_of_the_specification(min_amax: float, zero: int, implementation: str) -> None:
    layout = layouts.footer584(2, min_amax=min_amax)
    rows = np.zeros((1, 512), np.float32)
    rows[0, [0, 64, 128, 192]] = [448, 449, 1.0, -0.875]
    pool = np.asarray(
        pack(rows, jnp.array([1], jnp.int32), layout.zeros(1), layout=layout, implementation=implementation)
    )
    assert pool[0, layout.scale_address(1) :][:8].tolist() == [127, 128, 119, 118, zero, zero, zero, 0]


def test_a8_rope_keeps_bf16_beside_a_small_latent(implementation: str) -> None:
    layout = layouts.inline656()
    rows = np.full((1, 576), 0.01, np.float32)
    rows[0, 512:] = 3.0 + np.arange(64) / 100
    back = unpack(
        pack(rows, jnp.array([0], jnp.int32), layout.zeros(1), layout=layout, implementation=implementation),
        jnp.array([0]),
        layout=layout,
    )
    np.testing.assert_array_equal(back[0, 512:], jnp.asarray(rows[0, 512:]).astype(jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_allclose(back[0, :512], 0.01, rtol=1 / 16)


@pytest.mark.parametrize(
    "layout",
    [layouts.inline656(64), layouts.inline656(64, scale_form="float32"), layouts.footer584(64), layouts.index132()],
    ids=["inline-pow2", "inline-f32", "footer", "index"],
)
def test_a9_no_nan_codes_and_half_a_step(layout: KVLayout, implementation: str) -> None:
    """Random magnitudes over the range of float32: codes are finite, errors at most half a step of the code."""
    rng = np.random.default_rng(4)
    rows = rng.standard_normal((64, layout.width)).astype(np.float32)
    rows *= np.ldexp(np.float32(1), rng.integers(-60, 100, (64, 1))).astype(np.float32)
    rows[:8] = np.float32(3.0e38) * rng.uniform(-1, 1, (8, layout.width))
    slots = jnp.arange(64, dtype=jnp.int32)
    pool = pack(rows, slots, layout.zeros(1), layout=layout, implementation=implementation)
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


def test_a10_rows_without_rope_do_not_meet_stale_bytes(implementation: str) -> None:
    layout = layouts.inline656(4, nope=32, rope=0)
    rows = np.random.default_rng(5).standard_normal((3, 32)).astype(np.float32)
    slots = jnp.array([0, 1, 5], jnp.int32)
    q = jnp.asarray(np.random.default_rng(6).standard_normal((1, 2, 32)), jnp.float32)
    pools = [jnp.full((2, layout.page_stride), byte, jnp.uint8) for byte in (0x3F, 0x00)]
    pools = [pack(rows, slots, pool, layout=layout, implementation=implementation) for pool in pools]
    stale, clean = (kernels.sparse_mla(q, pool, slots[None], layout=layout, scale=0.5) for pool in pools)
    np.testing.assert_array_equal(stale[0], clean[0])
    np.testing.assert_array_equal(stale[1], clean[1])
    keys = np.asarray(unpack(pools[0], slots, layout=layout))
    logits = 0.5 * np.asarray(q)[0] @ keys.T
    weights = np.exp(logits - logits.max(1, keepdims=True))
    np.testing.assert_allclose(stale[0][0], weights @ keys / weights.sum(1, keepdims=True), atol=1e-5)


@pytest.mark.parametrize("typed", [False, True])
def test_b7_skipped_rows_leave_the_last_slot_alone(typed: bool, implementation: str) -> None:
    layout = layouts.plain(8, "float32", 4) if typed else layouts.footer584(4, nope=24, rope=8)
    old = np.random.default_rng(7).integers(1, 100, layout.pool_shape(1)).astype(layout.pool_dtype())
    rows = np.ones((6, layout.width), np.float32)
    slots = jnp.array([-1, 2, 4, 2**31 - 1, -(2**31), -7], jnp.int32)
    new = pack(rows, slots, jnp.asarray(old), layout=layout, implementation=implementation)
    keep = np.ones(old.size, bool)
    if typed:
        keep[16:24] = False
    else:
        keep[2 * layout.row_bytes : 3 * layout.row_bytes] = False
        keep[layout.scale_address(2) :][: layout.scale_bytes] = False
    np.testing.assert_array_equal(np.asarray(new).reshape(-1)[keep], old.reshape(-1)[keep])
    np.testing.assert_array_equal(unpack(new, slots[1:2], layout=layout), rows[:1])


def test_a_nan_spoils_its_own_tile_only(implementation: str) -> None:
    layout = layouts.footer584(2)
    rows = np.ones((2, 512), np.float32)
    rows[0, 70] = np.nan
    slots = jnp.array([0, 1], jnp.int32)
    back = np.array(
        unpack(pack(rows, slots, layout.zeros(1), layout=layout, implementation=implementation), slots, layout=layout)
    )
    assert np.isnan(back[0, 64:128]).all()
    rows[0, 64:128] = back[0, 64:128] = 0
    np.testing.assert_array_equal(back, rows)


def test_norm_and_rotation_before_the_store(implementation: str) -> None:
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
        implementation=implementation,
    )
    want = rows.copy()
    want[:, :16] *= weight / np.sqrt((rows[:, :16] ** 2).mean(1, keepdims=True) + 1e-2)
    pairs = (want[:, 16::2] + 1j * want[:, 17::2]) * np.exp(1j * angles)
    want[:, 16::2], want[:, 17::2] = pairs.real, pairs.imag
    np.testing.assert_allclose(unpack(got, jnp.arange(5, dtype=jnp.int32), layout=layout), want, atol=1e-5)


# layout, values under the norm, rotated values
PREPARED = {
    "v3.2": (layouts.inline656(64), 512, 64),
    "glm": (layouts.inline656(64, scale_form="float32"), 512, 64),
    "v4-window": (layouts.footer584(256), 512, 64),
    "v4-csa-unpadded": (layouts.footer584(64, padded=False), 512, 64),
    "v4-index": (layouts.index132(64), 128, 64),
    "index-turned-whole": (layouts.index132(5, width=16, scale_form="power_of_two"), 9, 16),
    "index-odd": (layouts.index132(5, width=24, hadamard=False), 24, 6),
    "plain-576": (layouts.plain(576, "bfloat16", 64), 512, 64),
    "plain-e4m3": (layouts.plain(40, "float8_e4m3fn", 3), 33, 8),
    "plain-turned-whole": (layouts.plain(24, "float32", 4), 24, 24),
    "plain-odd-width": (layouts.plain(27, "float32", 4), 25, 6),
    "plain-one": (layouts.plain(1, "float32", 4), 1, 0),
    "norm-of-a-part": (layouts.footer584(5, nope=24, rope=8), 3, 8),
    "norm-into-rope": (layouts.footer584(5, nope=200, rope=24), 210, 10),
    "turned-beyond-rope": (layouts.inline656(4, nope=160, rope=8), 0, 100),
    "turned-all": (layouts.inline656(4, nope=160, rope=8), 168, 168),
    "turned-part-of-rope": (layouts.inline656(4, nope=36, rope=12), 36, 4),
    "many-tiles": (layouts.footer584(3, nope=640, rope=2), 642, 2),
}


def prepared(layout: KVLayout, normed: int, turned: int, count: int, dtype: Any = np.float32) -> dict[str, Any]:
    """Random arguments of ``kv_pack``."""
    rng = np.random.default_rng(13)
    rows = (rng.standard_normal((count, layout.width)) * 10.0 ** rng.integers(-2, 3, (count, 1))).astype(dtype)
    angles = rng.uniform(0, 6, (count, turned // 2))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    weight = rng.standard_normal(normed).astype(np.float32)
    return {
        "rows": jnp.asarray(rows),
        "norm_weight": jnp.asarray(weight) if normed else None,
        "eps": 1e-3,
        "cos_sin": jnp.asarray(table) if turned else None,
    }


def assert_close_to(got: Any, layout: KVLayout, slots: list[int], given: dict[str, Any]) -> None:
    """Against float64: a value may fall on the other side of a rounding border, by one step, and hardly any does."""
    weight, table = given["norm_weight"], given["cos_sin"]
    meant = packers.normed_and_turned(
        np.asarray(given["rows"]).astype(np.float64),
        None if weight is None else np.asarray(weight).astype(np.float64),
        given["eps"],
        None if table is None else np.asarray(table),
        layout.hadamard,
    )
    plain = dataclasses.replace(layout, hadamard=False)
    pool = np.zeros((np.asarray(got).shape[0], layout.page_stride), np.uint8)
    want = expected(plain, meant, slots, pool)
    at = jnp.asarray(slots, jnp.int32)
    values, wanted = (
        np.asarray(layouts.gather_rows(jnp.asarray(p), at, plain)).astype(np.float64) for p in (got, want)
    )
    assert np.isfinite(values).all()
    step = np.abs(wanted) / 8
    if layout.kind != "plain":
        tiles = [
            np.abs(meant[:, i : i + layout.tile]).max(1, keepdims=True) for i in range(0, layout.nope, layout.tile)
        ]
        amax = np.repeat(np.concatenate(tiles, axis=1), layout.tile, axis=1)[:, : layout.nope]
        step[:, : layout.nope] = np.maximum(step[:, : layout.nope], np.maximum(amax, layout.min_amax) / 448 * 2.0**-8)
    elif layout.value_dtype == "float8_e4m3fn":
        step = np.maximum(step, 2.0**-9)
    error = np.abs(values - wanted)
    assert (error <= step * 1.001).all()
    differ = (error > 1e-5 * np.abs(wanted) + 1e-6 * np.abs(meant).max(1, keepdims=True)).sum()
    assert differ <= max(1, 1e-3 * values.size), differ


def test_slices_of_larger_arrays(implementation: str) -> None:
    """A weight that starts at an odd place of a packed array, and one layer's pool cut out and put back."""
    layout = layouts.footer584(64)
    rows = jax.random.normal(jax.random.key(0), (8, 512))
    packed = jax.random.normal(jax.random.key(1), (2, 518))
    slots = jnp.arange(8, dtype=jnp.int32) * 9
    pools = jax.random.bits(jax.random.key(2), (3, 2, layout.page_stride), jnp.uint8)

    @jax.jit
    def layer(pools: jax.Array, at: jax.Array) -> jax.Array:
        weight, pool = packed[at, 6:], jax.lax.dynamic_index_in_dim(pools, at, keepdims=False)
        pool = pack(rows, slots, pool, layout=layout, norm_weight=weight, implementation=implementation)
        return jax.lax.dynamic_update_index_in_dim(pools, pool, at, 0)

    got = layer(pools, jnp.int32(1))
    one = pack(rows, slots, pools[1], layout=layout, norm_weight=packed[1, 6:] + 0, implementation=implementation)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(jnp.stack([pools[0], one, pools[2]])))


@pytest.mark.parametrize("case", PREPARED)
def test_norm_and_rotation_of_every_part(case: str, implementation: str) -> None:
    layout, normed, turned = PREPARED[case]
    if implementation == "pallas" and 0 < layout.rope < plan.LEAST_ROPE and not launch_pallas.interpreting:
        pytest.skip("refused")
    given = prepared(layout, normed, turned, 8)
    slots = [2, 0, 3 * layout.page_size - 1, layout.page_size, 2 * layout.page_size, -1, 3 * layout.page_size, 1]
    pool = jnp.zeros((3, layout.page_stride), jnp.uint8)
    got = pack(
        given["rows"],
        jnp.asarray(slots, jnp.int32),
        pool,
        layout=layout,
        implementation=implementation,
        **{k: v for k, v in given.items() if k != "rows"},
    )
    assert_close_to(got, layout, slots, given)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton"], indirect=True)
@pytest.mark.parametrize("count", [32, 33, 34])
@pytest.mark.parametrize("case", PREPARED)
def test_two_blocks_of_rows_in_a_program(
    case: str, count: int, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large calls have them where their rows come out even: the bytes are those of one block."""
    from jmla.kernels.kv_pack import triton

    layout, normed, turned = PREPARED[case]
    given = prepared(layout, normed, turned, count, ml_dtypes.bfloat16)
    rows = given.pop("rows").at[5].set(jnp.nan).at[7].set(0)
    pages = -(-count // layout.page_size) + 1
    slots = np.random.default_rng(20).permutation(pages * layout.page_size)[:count].astype(np.int32)
    slots[3:5] = -1, pages * layout.page_size
    packed = []
    for many in (8, 1 << 20):
        monkeypatch.setattr(triton, "MANY_ROWS", many)
        packed.append(
            triton.kv_pack(rows, slots, layout.zeros(pages, raw=True), *_operands(given), layout=layout, eps=1e-3)
        )
    np.testing.assert_array_equal(np.asarray(packed[0]), np.asarray(packed[1]))


def _operands(given: dict[str, Any]) -> tuple[Any, Any, None]:
    return given["norm_weight"], given["cos_sin"], None


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn])
def test_rows_of_other_dtypes_are_widened(dtype: Any, implementation: str) -> None:
    layout, normed, turned = PREPARED["norm-into-rope"]
    given = prepared(layout, normed, turned, 4, dtype)
    rows, slots = given.pop("rows"), jnp.array([7, 0, 4, 2], jnp.int32)
    packed = [
        np.asarray(pack(r, slots, layout.zeros(2), layout=layout, implementation=implementation, **given))
        for r in (rows, rows.astype(jnp.float32))
    ]
    np.testing.assert_array_equal(packed[0], packed[1])
    assert packed[0].any()


SPOILED = [
    layouts.inline656(2),
    layouts.inline656(2, scale_form="float32"),
    layouts.footer584(2),
    layouts.index132(2, width=32, hadamard=False),
    layouts.plain(72, "bfloat16", 2),
    layouts.plain(72, "float8_e4m3fn", 2),
]


@pytest.mark.parametrize("layout", SPOILED, ids=lambda v: f"{v.name}-{v.scale_form}")
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_own_tile_only(layout: KVLayout, value: float, implementation: str) -> None:
    rows = np.random.default_rng(14).standard_normal((3, layout.width)).astype(np.float32)
    clean = rows.copy()
    rows[0, 3], rows[1, -1] = value, value
    slots, pool = jnp.array([2, 0, 1], jnp.int32), layout.zeros(2, raw=True)
    got, want = (
        np.array(unpack(pack(r, slots, pool, layout=layout, implementation=implementation), slots, layout=layout))
        for r in (rows, clean)
    )
    tile = 1 if layout.kind == "plain" else layout.tile
    last = (layout.width - 1) // tile * tile if layout.rope == 0 else layout.width - 1
    if layout.value_dtype == "float8_e4m3fn" and layout.kind == "plain" and np.isinf(value):
        assert got[0, 3] == np.sign(value) * 448
    else:
        assert not np.isfinite(got[0, :tile]).all() if tile > 1 else not np.isfinite(got[0, 3])
        assert not np.isfinite(got[1, last:]).all()
    start = 3 if tile == 1 else 0
    got[0, start : start + tile] = want[0, start : start + tile]
    got[1, last:] = want[1, last:]
    np.testing.assert_array_equal(got, want)


FORMS = {
    "inline": layouts.inline656(64),
    "inline-float32": layouts.inline656(64, scale_form="float32"),
    "footer": layouts.footer584(64),
    "index": layouts.index132(64, hadamard=False),
    "plain": layouts.plain(576, "bfloat16", 64),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_byte_of_many_bf16_rows(form: str, implementation: str) -> None:
    layout, rng = FORMS[form], np.random.default_rng(15)
    rows = rng.standard_normal((72, layout.width)) * 10.0 ** rng.uniform(-4, 3, (72, 1))
    rows = rows.astype(ml_dtypes.bfloat16)
    slots = rng.permutation(4 * 64)[:72]
    old = rng.integers(0, 256, (4, layout.page_stride)).astype(np.uint8)
    got = pack(rows, jnp.asarray(slots, jnp.int32), jnp.asarray(old), layout=layout, implementation=implementation)
    want = expected(layout, rows.astype(np.float32), slots.tolist(), old)
    np.testing.assert_array_equal(got, want)


def test_rotated_index_rows_are_bitwise_those_of_xla(implementation: str) -> None:
    layout = layouts.index132(64, scale_form="power_of_two")
    rows = jnp.asarray(np.random.default_rng(16).standard_normal((48, 128)), jnp.float32)
    slots = jnp.asarray(np.random.default_rng(17).permutation(128)[:48], jnp.int32)
    got, want = (pack(rows, slots, layout.zeros(2), layout=layout, implementation=n) for n in (implementation, "xla"))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "implementation",
    [pytest.param("cute", marks=pytest.mark.gpu), pytest.param("cute", id="cute-lanes")],
    indirect=True,
)
@pytest.mark.parametrize("count", [7, 32, 33])
@pytest.mark.parametrize("case", PREPARED)
def test_two_rows_of_a_group_of_threads(
    case: str, count: int, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large calls have them: the bytes are those of one row."""
    cute = pytest.importorskip("jmla.kernels.kv_pack.cute", reason="nvidia-cutlass-dsl is not installed")
    layout, normed, turned = PREPARED[case]
    given = prepared(layout, normed, turned, count, ml_dtypes.bfloat16)
    rows = given.pop("rows").at[5].set(jnp.nan).at[3].set(0)
    pages = -(-count // layout.page_size) + 1
    slots = np.random.default_rng(20).permutation(pages * layout.page_size)[:count].astype(np.int32)
    slots[1:3] = -1, pages * layout.page_size
    packed = []
    for many in (1 << 20, 1):
        monkeypatch.setattr(cute, "MANY_ROWS", many)
        packed.append(
            cute.kv_pack(rows, slots, layout.zeros(pages, raw=True), *_operands(given), layout=layout, eps=1e-3)
        )
    np.testing.assert_array_equal(np.asarray(packed[0]), np.asarray(packed[1]))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["cute"], indirect=True)
@pytest.mark.parametrize("case", ["v3.2", "glm", "v4-window", "v4-csa-unpadded", "v4-index", "plain-576"])
def test_the_kernels_write_the_same_bytes(case: str, implementation: str) -> None:
    layout, normed, turned = PREPARED[case]
    for count in (5, 5000):
        given = prepared(layout, normed, turned, count, ml_dtypes.bfloat16)
        rows = given.pop("rows")
        pages = -(-count // layout.page_size)
        slots = np.random.default_rng(21).permutation(pages * layout.page_size)[:count].astype(np.int32)
        packed = [
            np.asarray(pack(rows, slots, layout.zeros(pages), layout=layout, implementation=name, **given))
            for name in (implementation, "triton")
        ]
        np.testing.assert_array_equal(packed[0], packed[1])


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "cute"])
@pytest.mark.parametrize("case", ["v3.2", "glm", "v4-window", "v4-index", "plain-576"])
def test_twenty_repeats_give_the_same_bytes(case: str, implementation: str) -> None:
    on_device()
    layout, normed, turned = PREPARED[case]
    given = prepared(layout, normed, turned, 4096, ml_dtypes.bfloat16)
    rows = given.pop("rows")
    slots = jnp.asarray(np.random.default_rng(18).permutation(64 * layout.page_size)[:4096], jnp.int32)
    call = {"layout": layout, "implementation": implementation, **given}
    first = np.asarray(pack(rows, slots, layout.zeros(64, raw=True), **call))
    for _ in range(20):
        np.testing.assert_array_equal(pack(rows, slots, layout.zeros(64, raw=True), **call), first)
    few = [slice(at, at + 1) for at in (0, 77, 4095)]  # programs of one row instead of many
    for at in few:
        part = {k: v[at] if k == "cos_sin" and v is not None else v for k, v in call.items()}
        alone = layouts.gather_rows(pack(rows[at], slots[at], layout.zeros(64, raw=True), **part), slots[at], layout)
        np.testing.assert_array_equal(alone, layouts.gather_rows(jnp.asarray(first), slots[at], layout))
    checked = {**given, "rows": rows[:256], "cos_sin": None if given["cos_sin"] is None else given["cos_sin"][:256]}
    assert_close_to(first, layout, np.asarray(slots[:256]).tolist(), checked)


def test_nothing_to_pack(implementation: str) -> None:
    layout = layouts.footer584(2, nope=24, rope=8)
    pool = jnp.full((2, layout.page_stride), 7, jnp.uint8)
    none = jnp.zeros((0,), jnp.int32)
    got = pack(jnp.zeros((0, 32)), none, pool, layout=layout, implementation=implementation)
    np.testing.assert_array_equal(got, pool)
    got = pack(jnp.ones((2, 32)), jnp.zeros(2, jnp.int32), pool[:0], layout=layout, implementation=implementation)
    assert got.shape == (0, layout.page_stride)
    got = pack(jnp.ones((2, 32)), jnp.array([-1, 4]), pool, layout=layout, implementation=implementation)
    np.testing.assert_array_equal(got, pool)


def test_a_traced_scale_of_plain_rows(implementation: str) -> None:
    layout = layouts.plain(24, "float8_e4m3fn", 4)
    rows, slots = some_rows(4, 24), [1, 7, -1, 0]
    got = pack(
        rows,
        jnp.asarray(slots, jnp.int32),
        layout.zeros(2),
        layout=layout,
        kv_scale=jnp.float32(3.7e-3),
        implementation=implementation,
    )
    want = expected(layout, rows, slots, np.zeros((2, layout.page_stride), np.uint8), np.float32(3.7e-3))
    assert np.asarray(got).tobytes() == want.tobytes()


def test_rows_that_the_kernel_cannot_cut() -> None:
    def reason(layout: KVLayout, turned: int = 0) -> str | None:
        return plan.refuses({"_layout": layout, "_turned": turned})

    def reason_cute(layout: KVLayout, turned: int = 0) -> str | None:
        return plan.refuses_cute({"_layout": layout, "_turned": turned})

    for case in PREPARED.values():
        assert reason(case[0], case[2]) is reason_cute(case[0], case[2]) is None
    for layout in BYTES:
        assert reason(layout) is reason_cute(layout) is None
    assert "tiles" in str(reason_cute(dataclasses.replace(layouts.inline656(4, nope=192), tile=96)))
    assert "bytes" in str(reason_cute(layouts.inline656(4, nope=30)))
    assert "bytes" in str(reason(layouts.inline656(4, nope=30)))  # scales at byte 30
    assert "stride" in str(reason(dataclasses.replace(layouts.plain(8, "float32", 4), page_stride=130)))
    assert "even" in str(reason(layouts.footer584(4, nope=25)))
    assert "pairs" in str(reason(layouts.footer584(4, nope=24, rope=7), 4))
    assert "pairs" in str(reason(layouts.index132(4, width=25, hadamard=False), 4))
    assert reason(layouts.footer584(4, nope=24, rope=7)) is None
    with kernels.target(compute_capability=90), pytest.raises(ValueError, match="cannot run"):
        kernels.kv_pack(
            jnp.zeros((1, 94)),
            [0],
            layouts.inline656(4, nope=30).zeros(1),
            layout=layouts.inline656(4, nope=30),
            implementation="triton",
        )


def test_pools_whose_bytes_pallas_cannot_reach() -> None:
    layout = layouts.footer584(64)

    def reason(layout: KVLayout, pages: int) -> str | None:
        pool = jax.ShapeDtypeStruct(layout.pool_shape(pages), layout.pool_dtype())
        return plan.refuses_pallas({"_layout": layout, "_turned": 0, "_pool": pool})

    for gib, refused in ((1.9, False), (2.1, True), (3.9, True), (4.1, False)):
        assert ("GiB" in str(reason(layout, round(gib * 2**30 / layout.page_stride)))) == refused
    assert reason(layouts.plain(512, "bfloat16", 64), 50_000) is None  # 3 GiB, whose values have two bytes
    assert "bytes" in str(reason(layouts.inline656(4, nope=30), 1))


@pytest.mark.parametrize("layout", [layouts.inline656(64), layouts.footer584(64)], ids=["inline", "footer"])
def test_a_row_has_the_same_bytes_whatever_rows_stand_beside_it(layout: KVLayout, implementation: str) -> None:
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
            implementation=implementation,
        )
        got = layouts.gather_rows(new, jnp.arange(count, dtype=jnp.int32), layout)
        whole = got if whole is None else whole
        np.testing.assert_array_equal(got, whole[:count])


@pytest.mark.parametrize(
    "layout",
    [layouts.inline656(), layouts.footer584(64), layouts.index132(), layouts.plain(576, "bfloat16", 64)],
    ids=lambda layout: layout.name,
)
def test_a_donated_pool_is_updated_in_place(layout: KVLayout, implementation: str) -> None:
    if implementation != "xla":
        on_device()
    pool = layout.zeros(64)
    rows, slots = jnp.ones((4, layout.width)), jnp.array([1, -1, 64, 4000], jnp.int32)
    step = jax.jit(
        lambda rows, slots, pool: kernels.kv_pack(rows, slots, pool, layout=layout, implementation=implementation),
        donate_argnums=2,
    )
    compiled = step.lower(rows, slots, pool).compile()
    shape = ",".join(map(str, pool.shape))
    copies = [line for line in compiled.as_text().splitlines() if " copy(" in line and f"[{shape}]" in line]
    assert not copies
    assert compiled.memory_analysis().temp_size_in_bytes < pool.nbytes // 8
    before = pool.unsafe_buffer_pointer()
    after = step(rows, slots, pool)
    assert after.unsafe_buffer_pointer() == before
    assert pool.is_deleted()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_typed_pools_are_differentiable(dtype: str, implementation: str) -> None:
    layout = layouts.plain(4, dtype, 2)
    rows, slots = jnp.ones((3, 4)), jnp.array([3, -1, 0], jnp.int32)
    weight = jnp.arange(16.0).reshape(4, 4)

    def loss(rows: jax.Array, pool: jax.Array) -> jax.Array:
        new = kernels.kv_pack(rows, slots, pool, layout=layout, implementation=implementation)
        return jnp.sum(weight * kernels.kv_unpack(new, jnp.arange(4, dtype=jnp.int32), layout=layout))

    d_rows, d_pool = jax.jit(jax.grad(loss, argnums=(0, 1)))(rows, layout.zeros(2))
    np.testing.assert_array_equal(d_rows, [weight[3], np.zeros(4), weight[0]])
    np.testing.assert_array_equal(d_pool.reshape(4, 4), np.array([np.zeros(4), weight[1], weight[2], np.zeros(4)]))


def test_gradients_of_norm_and_rotation_are_those_of_xla(implementation: str) -> None:
    layout = layouts.plain(24, "float32", 4)
    rng = np.random.default_rng(12)
    rows, weight = jnp.asarray(rng.standard_normal((5, 24)), jnp.float32), jnp.asarray(rng.standard_normal(16))
    table, slots = jnp.asarray(rng.standard_normal((5, 8)), jnp.float32), jnp.array([3, -1, 7, 0, 2], jnp.int32)
    towards = jnp.asarray(rng.standard_normal((2, 96)), jnp.float32)

    def gradients(name: str) -> Any:
        def loss(rows: jax.Array, weight: jax.Array, table: jax.Array) -> jax.Array:
            pool = layout.zeros(2)
            new = kernels.kv_pack(
                rows, slots, pool, layout=layout, norm_weight=weight, cos_sin=table, implementation=name
            )
            return jnp.sum(new * towards)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(rows, weight.astype(jnp.float32), table)

    for got, want in zip(gradients(implementation), gradients("xla"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        assert np.abs(np.asarray(got)).max() > 0.1


@pytest.mark.parametrize("layout", [layouts.footer584(2, nope=24, rope=8), layouts.plain(8, "float32", 4)])
def test_vmap_packs_into_each_pool(layout: KVLayout, implementation: str) -> None:
    rng = np.random.default_rng(11)
    rows = jnp.asarray(rng.standard_normal((3, 2, layout.width)), jnp.float32)
    slots = jnp.array([[0, 3], [-1, 1], [2, 0]], jnp.int32)
    pools = jnp.stack([layout.zeros(2)] * 3)

    def one(rows: jax.Array, slots: jax.Array, pool: jax.Array) -> jax.Array:
        return kernels.kv_pack(rows, slots, pool, layout=layout, implementation=implementation)

    got = jax.jit(jax.vmap(one))(rows, slots, pools)
    for i in range(3):
        np.testing.assert_array_equal(got[i], one(rows[i], slots[i], pools[i]))
    assert np.asarray(got).any(axis=(1, 2)).all()


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
        (ValueError, "cute", {"implementation": "cute"}),
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


def test_e4_e7_writes_past_2_gib(implementation: str) -> None:
    if implementation != "xla":
        on_device()
    layout, pages = layouts.footer584(64, padded=False), 116_000 if implementation == "pallas" else 63_000
    slots = jnp.array([2 * 64 + 5, 4_000_000, pages * 64 - 1, -1], jnp.int32)
    assert layout.data_address(4_000_000) > 2**31
    row = np.random.default_rng(10).integers(-9, 9, (1, 512)).astype(np.float32)

    @jax.jit
    def write_and_read(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        pool = kernels.kv_pack(rows, slots, layout.zeros(pages), layout=layout, implementation=implementation)
        used = jnp.sum(jnp.any(pool[:, : layout.footer_offset : 7] != 0, axis=1))
        return kernels.kv_unpack(pool, slots, layout=layout), used

    got, used = write_and_read(jnp.asarray(np.repeat(row, 4, axis=0)))
    np.testing.assert_array_equal(got[:3], np.repeat(row, 3, axis=0))
    np.testing.assert_array_equal(got[3], np.zeros(512))
    assert used == 3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("layout", "pages"),
    [*LARGE.values(), (layouts.plain(576, "bfloat16", 64), 31_000), (layouts.plain(512, "float32", 64), 18_000)],
    ids=[*LARGE, "plain-bf16", "plain-float32"],
)
def test_e4_e7_the_kernel_writes_at_the_far_end_of_large_pools(layout: KVLayout, pages: int) -> None:
    on_device()
    assert pages * layout.page_stride > 2.1 * 2**30
    middle = 2**31 // layout.page_stride  # the page that byte 2^31 lies in
    end = pages * layout.page_size
    slots = jnp.array([5, middle * layout.page_size, (middle + 1) * layout.page_size - 1, end - 1, end, -1], jnp.int32)
    row = np.random.default_rng(19).integers(-9, 9, (1, layout.width)).astype(np.float32)
    step = jax.jit(
        lambda rows, pool: kernels.kv_pack(rows, slots, pool, layout=layout, implementation="triton"), donate_argnums=1
    )
    pool = step(jnp.asarray(np.repeat(row, 6, axis=0)), layout.zeros(pages))
    back = np.asarray(unpack(pool, slots[:4], layout=layout))
    small = pack(row, jnp.array([5], jnp.int32), layout.zeros(1), layout=layout, implementation="triton")
    np.testing.assert_array_equal(back, np.repeat(unpack(small, jnp.array([5]), layout=layout), 4, axis=0))
    assert np.abs(back).max() > 0
    used = np.flatnonzero(jax.jit(lambda pool: jnp.any(pool != 0, axis=1))(pool))
    assert used.tolist() == [0, middle, pages - 1]


LOOP = """
import json, time
import jax, jax.numpy as jnp, numpy as np
from jmla import kernels
from jmla.kernels import layouts

LAYERS, ROWS = 40, 64
layout = layouts.footer584(256)
rng = np.random.default_rng(0)
rows = jnp.asarray(rng.standard_normal((ROWS, 512)), jnp.bfloat16)
table = jnp.asarray(rng.standard_normal((ROWS, 64)), jnp.float32)
weight = jnp.asarray(rng.standard_normal(512), jnp.float32)

def measure(gib):
    pages = (gib << 30) // layout.page_stride // LAYERS
    local = jnp.asarray(rng.permutation(pages * 256)[:ROWS], jnp.int32)

    def layer(i, pool):
        return kernels.kv_pack(rows, local + i * pages * 256, pool, layout=layout, norm_weight=weight, cos_sin=table)

    step = jax.jit(lambda pool: jax.lax.fori_loop(0, LAYERS, layer, pool), donate_argnums=0)
    pool = jax.block_until_ready(step(jnp.zeros((pages * LAYERS, layout.page_stride), jnp.uint8)))
    times = []
    for _ in range(9):
        begin = time.perf_counter()
        for _ in range(10):
            pool = step(pool)
        jax.block_until_ready(pool)
        times.append(time.perf_counter() - begin)
    ends = jnp.concatenate([local[:4], local[:4] + (LAYERS - 1) * pages * 256])
    return sorted(times)[4] / 10, np.asarray(kernels.kv_unpack(pool, ends, layout=layout)).reshape(2, 4, 512)

small, first = measure(1)
large, second = measure(8)
assert np.abs(first).max() > 0 and (first[0] == first[1]).all() and (second == first).all()
assert [c.implementation for c in kernels.report() if c.op == "kv_pack"] == ["triton on cuda or xla"], kernels.report()
peak = jax.local_devices()[0].memory_stats()["peak_bytes_in_use"]
print(json.dumps({"small": small, "large": large, "peak": peak}))
"""


@pytest.mark.gpu
def test_a_loop_over_layers_holds_one_pool_and_its_time_does_not_depend_on_it() -> None:
    """In a process of its own: the peak counts from the start of a process."""
    on_device()
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", LOOP], capture_output=True, text=True, env=environment, cwd=root)
    assert done.returncode == 0, done.stderr[-2000:]
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["peak"] < 8.5 * 2**30, got
    assert got["large"] < 1.5 * got["small"], got
