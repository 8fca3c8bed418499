"""Layouts: addresses, sizes, reading, and the limits of int32 addressing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import packers
import pytest

from jmla import kernels
from jmla.kernels import layouts, quant
from jmla.kernels.layouts import KVLayout

unpack = jax.jit(kernels.kv_unpack, static_argnames="layout")


def test_inline_addresses_of_the_specification() -> None:
    layout = layouts.inline656()
    assert (layout.data_address(200), layout.scale_address(200, 1), layout.rope_address(200)) == (
        131200,
        131716,
        131728,
    )


@pytest.mark.parametrize(
    ("padded", "data", "rope", "scale"), [(False, 115008, 115456, 149034), (True, 115200, 115648, 149226)]
)
def test_footer_addresses_of_the_specification(padded: bool, data: int, rope: int, scale: int) -> None:
    layout, slot = layouts.footer584(64, padded=padded), 3 * 64 + 5
    assert (layout.data_address(slot), layout.rope_address(slot), layout.scale_address(slot, 2)) == (data, rope, scale)


def test_index_address_follows_all_codes() -> None:
    layout = layouts.index132()
    assert layout.data_address(64 + 3) == 8448 + 3 * 128
    assert layout.scale_address(64 + 3) == 8448 + 64 * 128 + 4 * 3


@pytest.mark.parametrize(
    ("page_size", "tight", "padded"),
    [(256, 149504, 149760), (128, 74752, 74880), (64, 37376, 37440), (2, 1168, 1728), (61, 35624, 35712)],
)
def test_footer_strides(page_size: int, tight: int, padded: int) -> None:
    assert layouts.footer584(page_size, padded=False).page_stride == tight
    assert layouts.footer584(page_size).page_stride == padded
    assert layouts.footer584(page_size).footer_offset == page_size * 576


def test_names_and_bytes_of_a_row() -> None:
    table = [
        (layouts.inline656(), "inline656", 656, 41984),
        (layouts.footer584(64, padded=False), "footer584", 584, 37376),
        (layouts.index132(), "index132", 132, 8448),
        (layouts.plain(576, "bfloat16", 64), "plain-bfloat16", 1152, 73728),
        (layouts.plain(512, "float8_e4m3fn", 64), "plain-float8_e4m3fn", 512, 32768),
    ]
    for layout, name, size, stride in table:
        assert (layout.name, layout.bytes_per_token, layout.page_stride) == (name, size, stride)
        assert hash(layout) == hash(dataclasses.replace(layout))


@pytest.mark.parametrize(
    "layout",
    [layouts.plain(576, "float8_e4m3fn", 64), layouts.plain(576, "bfloat16", 64), layouts.inline656()],
    ids=lambda layout: layout.name,
)
def test_a7_budget_counts_bytes_of_the_cache_dtype(layout: KVLayout) -> None:
    page = 64 * {"plain-float8_e4m3fn": 576, "plain-bfloat16": 1152, "inline656": 656}[layout.name]
    assert layout.pages_for_budget(10 * page) == 10
    assert layout.pages_for_budget(10 * page - 1) == 9
    assert layout.pool_shape(10, raw=True) == (10, page)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layouts.inline656(page_stride=41983), "41984"),
        (lambda: dataclasses.replace(layouts.footer584(64), scale_form="float32"), "power"),
        (lambda: layouts.footer584(64, min_amax=0.0), "power"),
        (lambda: layouts.index132(width=96), "power of two"),
        (lambda: layouts.plain(512, "float16", 64), "bfloat16"),
        (lambda: layouts.inline656(0), "page_size"),
        (lambda: layouts.inline656(scale_form="ue8m0"), "power_of_two"),
        (lambda: layouts.inline656(min_amax=-1.0), "min_amax"),
    ],
)
def test_impossible_layouts_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a6_pool_of_another_layout_is_refused_by_both_names() -> None:
    bf16, inline = layouts.plain(576, "bfloat16", 64), layouts.inline656()
    for pool, layout in [(inline.zeros(2), bf16), (bf16.zeros(2), inline), (layouts.footer584(64).zeros(2), inline)]:
        with pytest.raises(ValueError, match=layout.name) as error:
            kernels.kv_unpack(pool, np.array([0]), layout=layout)
        text = str(error.value)
        assert str(layout.page_stride) in text
        assert pool.dtype.name in text
        assert str(pool.shape[1]) in text


def test_a6_padded_and_tight_pools_are_not_mixed_up() -> None:
    pool = layouts.footer584(64, padded=True).zeros(2)
    with pytest.raises(ValueError, match=r"37376.*37440"):
        kernels.kv_unpack(pool, np.array([0]), layout=layouts.footer584(64, padded=False))


def test_e2_byte_addresses_are_exact_past_31_bits() -> None:
    layout = dataclasses.replace(layouts.index132(), page_stride=1_039_680)
    assert layout.data_address(2066 * 64) == 2_147_978_880
    assert layouts.inline656().data_address(8_000_000) == 8_000_000 * 656
    for stride, first in [(576, 3728271), (584, 3677199), (656, 3273604), (132, 16268816)]:
        layout = layouts.plain(stride, "float8_e4m3fn", 1)
        assert layout.data_address(first - 1) < 2**31 <= layout.data_address(first)


@pytest.mark.parametrize("page_size", [1, 64, 256])
def test_e6_e8_pools_beyond_int32_slots_are_refused(page_size: int) -> None:
    layout = layouts.footer584(page_size)
    most = (2**31 - 1) // page_size
    assert layout.pool_shape(most) == (most, layout.page_stride)
    with pytest.raises(ValueError, match="int32"):
        layout.pool_shape(most + 1)
    with pytest.raises(ValueError, match="int32"):
        layout.zeros(most + 1)
    too_large = jax.ShapeDtypeStruct((most + 1, layout.page_stride), jnp.uint8)
    slots = jax.ShapeDtypeStruct((1,), jnp.int32)
    with pytest.raises(ValueError, match="int32"):
        jax.eval_shape(lambda p, s: kernels.kv_unpack(p, s, layout=layout), too_large, slots)


def written(layout: KVLayout, slots: list[int], pages: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """A pool written by the independent packer, and the rows that its independent reader finds."""
    rng = np.random.default_rng(layout.page_stride)
    rows = (rng.standard_normal((len(slots), layout.width)) * rng.uniform(0.01, 30, (len(slots), 1))).astype(np.float32)
    pool, size = np.zeros((pages, layout.page_stride), np.uint8), layout.page_size
    if layout.kind == "inline":
        pool = packers.pack_inline(rows, slots, pool, size, layout.nope, layout.scale_form, layout.min_amax)
        read = [packers.read_inline(pool, slot, size, layout.nope, layout.rope) for slot in slots]
    elif layout.kind == "footer":
        pool = packers.pack_footer(rows, slots, pool, size, layout.nope, layout.min_amax)
        read = [packers.read_footer(pool, slot, size, layout.nope, layout.rope) for slot in slots]
    else:
        pool = packers.pack_index(rows, slots, pool, size, False, layout.scale_form, layout.min_amax)
        read = [packers.read_index(pool, slot, size, layout.width) for slot in slots]
    return pool, np.stack(read)


READ = [
    layouts.inline656(),
    layouts.inline656(3, scale_form="float32", page_stride=4 * 656),
    layouts.inline656(4, nope=160, rope=8),
    layouts.footer584(2),
    layouts.footer584(61),
    layouts.footer584(64, padded=False),
    layouts.footer584(256),
    layouts.footer584(5, nope=24, rope=8),
    layouts.index132(hadamard=False),
    layouts.index132(7, width=32, hadamard=False, scale_form="power_of_two"),
]


@pytest.mark.parametrize("layout", READ, ids=lambda layout: f"{layout.name}-{layout.page_size}-{layout.page_stride}")
def test_reader_finds_what_an_independent_writer_wrote(layout: KVLayout) -> None:
    slots = [0, layout.page_size - 1, layout.page_size, 3 * layout.page_size - 1]
    pool, rows = written(layout, slots)
    got = unpack(jnp.asarray(pool), jnp.asarray(slots, jnp.int32), layout=layout)
    np.testing.assert_array_equal(got, rows)
    whole = layouts.unpack_pages(jnp.asarray(pool), layout)
    np.testing.assert_array_equal(whole.reshape(-1, layout.width)[np.array(slots)], rows)


def test_b8_b11_v5_slots_that_do_not_exist_read_zeros() -> None:
    layout = layouts.footer584(4, nope=24, rope=8)
    pool = np.full((3, layout.page_stride), 0x7F, np.uint8)
    pool[1] = 0
    capacity = 12
    slots = np.array([-1, -5, capacity, 2147480000, 2**31 - 1, -(2**31), 4])
    got = kernels.kv_unpack(jnp.asarray(pool), slots, layout=layout)
    np.testing.assert_array_equal(got, np.zeros((7, 32)))
    assert np.isnan(kernels.kv_unpack(jnp.asarray(pool), np.array([capacity - 1]), layout=layout)).any()


def test_codes_under_a_zero_scale_are_not_trusted() -> None:
    layout = layouts.inline656(1)
    pool = np.zeros((1, 656), np.uint8)
    pool[0, :512] = 0x7F
    np.testing.assert_array_equal(
        kernels.kv_unpack(jnp.asarray(pool), np.array([0]), layout=layout), np.zeros((1, 576))
    )


def test_a11_pages_move_by_the_real_stride() -> None:
    layout = layouts.footer584(2)  # 560 bytes of padding a page
    slots = list(range(8))
    pool, rows = written(layout, slots, pages=4)
    exported = np.asarray(jnp.asarray(pool)[np.array([1, 3])])
    assert exported.tobytes() == pool[1].tobytes() + pool[3].tobytes()
    restored = layout.zeros(4).at[np.array([1, 3])].set(exported)
    np.testing.assert_array_equal(unpack(restored, jnp.arange(8, dtype=jnp.int32), layout=layout)[2:4], rows[2:4])
    np.testing.assert_array_equal(unpack(restored, jnp.arange(8, dtype=jnp.int32), layout=layout)[6:], rows[6:])


def test_an_empty_pool_reads_zeros() -> None:
    layout = layouts.index132(4)
    assert kernels.kv_unpack(layout.zeros(0), np.array([[0, -1]]), layout=layout).shape == (1, 2, 128)


def test_every_code_and_scale_byte_decodes() -> None:
    codes = jnp.arange(256, dtype=jnp.uint8)
    got = np.asarray(quant.from_bytes(codes, jnp.float8_e4m3fn).astype(jnp.float32))
    np.testing.assert_array_equal(got, packers.E4M3.astype(np.float32))
    scales = np.asarray(quant.e8m0_value(codes))
    assert scales[0] == 0
    assert np.isnan(scales[255])
    np.testing.assert_array_equal(scales[1:255], np.ldexp(1.0, np.arange(1, 255) - 127).astype(np.float32))


def test_power_of_two_scale_is_exact_beside_every_power() -> None:
    powers = np.ldexp(np.float32(448), np.arange(-100, 119)).astype(np.float32)
    amax = np.concatenate([powers, np.nextafter(powers, np.float32(0)), np.nextafter(powers, np.float32(np.inf))])
    got = np.asarray(jax.jit(quant.tile_scale, static_argnums=(1, 2))(amax, "power_of_two", 0.0))
    want = np.ldexp(1.0, np.concatenate([np.arange(-100, 119)] * 2 + [np.arange(-99, 120)]))
    np.testing.assert_array_equal(got, want.astype(np.float32))
    assert quant.tile_scale(jnp.zeros(1), "power_of_two", 0.0)[0] == 0


def test_float32_scale_is_a_correctly_rounded_quotient() -> None:
    amax = np.random.default_rng(0).uniform(0.01, 500, 1 << 16).astype(np.float32)
    got = jax.jit(quant.tile_scale, static_argnums=(1, 2))(amax, "float32", 1e-4)
    np.testing.assert_array_equal(got, amax / np.float32(448))


def test_codes_round_to_even_and_saturate() -> None:
    middles = (packers.MAGNITUDES[1:] + packers.MAGNITUDES[:-1]) / 2
    values = np.concatenate([middles, packers.MAGNITUDES, [449, 464, 465, 1000, 3e38]]).astype(np.float32)
    values = np.concatenate([values, np.nextafter(values, np.float32(0)), -values])
    got = np.asarray(jax.jit(quant.e4m3)(values)).view(np.uint8)
    np.testing.assert_array_equal(got, packers.e4m3_encode(values))
    assert np.isnan(np.float32(quant.e4m3(jnp.array([jnp.nan]))[0]))


def test_hadamard_is_the_sylvester_matrix_and_its_own_inverse() -> None:
    x = np.random.default_rng(1).standard_normal((3, 128)).astype(np.float32)
    rotated = quant.hadamard(x)
    np.testing.assert_allclose(rotated, x @ packers.sylvester(128) / 128**0.5, atol=2e-6)
    np.testing.assert_allclose(quant.hadamard(rotated), x, atol=2e-6)
    with pytest.raises(ValueError, match="power of two"):
        quant.hadamard(jnp.ones((1, 96)))
