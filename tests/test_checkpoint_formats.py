"""Number formats: what is loaded equals, bit for bit, the values that the formats stand for."""

import dataclasses
import itertools
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from jmla.models.checkpoint import CheckpointError, collect_tensors, load_params, quantise_fp4, quantise_fp8
from jmla.models.checkpoint.dequant import decode_scale, fit_block, unpack_fp4
from jmla.models.config import V4Config
from jmla.models.params import abstract_params
from tests import fixtures_checkpoint as fx
from tests import tiny

CASES = [
    *itertools.product(["v4"], fx.V4_DIALECTS, fx.FORMATS),
    *itertools.product(["v32", "glm"], fx.DSA_DIALECTS, [f for f in fx.FORMATS if f != "published"]),
]


@pytest.fixture(scope="module")
def drawn():
    return {family: fx.draw(config) for family, config in fx.CONFIGS.items()}


@pytest.mark.parametrize(("family", "dialect", "number_format"), CASES)
def test_loads_as_its_dequantised_twin(family, dialect, number_format, drawn, tmp_path):
    config = fx.CONFIGS[family]
    shards = 2 if number_format in ("published", "fp8", "nvfp4") else 1  # a weight and its scale in different files
    twin = fx.write_fixture(
        tmp_path / "a", config, drawn[family], dialect=dialect, number_format=number_format, shards=shards
    )
    params, report = load_params(tmp_path / "a", config, "float32")
    assert report.drafting
    got = collect_tensors(config, params)
    assert got.keys() == twin.keys()
    for name, expected in twin.items():
        assert_array_equal(got[name], expected, err_msg=name, strict=name.endswith("weight"))
    plain = "original" if family == "v4" else "transformers"
    fx.write_fixture(tmp_path / "b", config, twin, dialect=plain)
    for dtype in ("float32", "bfloat16"):
        one, _ = load_params(tmp_path / "a", config, dtype)
        two, _ = load_params(tmp_path / "b", config, dtype)
        assert jax.tree.structure(one) == jax.tree.structure(two)
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(two), strict=True):
            assert_array_equal(x, y, err_msg=str(path), strict=True)


@pytest.mark.parametrize("family", fx.CONFIGS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_destinations_are_those_of_the_model(family, dtype, drawn, tmp_path):
    config = fx.CONFIGS[family]
    dialect = "original" if family == "v4" else "transformers"
    fx.write_fixture(tmp_path, config, drawn[family], dialect=dialect, number_format="bfloat16")
    params, _ = load_params(tmp_path, config, dtype)
    shapes = abstract_params(config, dtype)
    assert jax.tree.structure(params) == jax.tree.structure(shapes)
    for x, s in zip(jax.tree.leaves(params), jax.tree.leaves(shapes), strict=True):
        assert isinstance(x, np.ndarray)
        assert (x.shape, x.dtype) == (s.shape, s.dtype)
        assert x.ctypes.data % 64 == 0  # what JAX takes without a copy


def test_reports_formats_and_progress(drawn, tmp_path):
    fx.write_fixture(tmp_path, fx.V4, drawn["v4"], dialect="hybrid", number_format="published")
    calls = []
    _, report = load_params(tmp_path, fx.V4, progress=lambda done, total: calls.append((done, total)))
    assert report.dialect == "hybrid"
    assert report.formats["fp4"] == 6 * 6 * 3  # five layers and the draft block, six experts of three matrices
    assert report.formats["integer"] == 1
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1] > 0


def test_no_second_copy_on_the_host(monkeypatch, tmp_path):
    """Beyond the parameters themselves, loading holds a few chunks of rows."""
    config = dataclasses.replace(fx.V32, vocab_size=8000, num_nextn_predict_layers=0)
    fx.write_fixture(tmp_path, config, fx.draw(config), dialect="transformers", number_format="bfloat16")
    monkeypatch.setattr("jmla.models.checkpoint.load.CHUNK", 1 << 12)
    load_params(tmp_path, config, "float32")  # once, for what is cached for good
    tracemalloc.start()
    params, _ = load_params(tmp_path, config, "float32")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    held = sum(x.nbytes for x in jax.tree.leaves(params))
    assert held > 10 << 20
    assert held <= peak < held + (3 << 20)


def test_one_row_or_one_scale_of_fp8_per_output(tmp_path):
    """Scales ``[out, 1]`` are one a row."""
    tensors = fx.draw(fx.V32)
    stored, _ = fx.build(fx.V32, tensors, dialect="transformers")
    name = "model.layers.0.self_attn.o_proj.weight"
    w = tensors[name]
    scale = np.abs(w).max(axis=1, keepdims=True) / np.float32(448)
    codes = np.clip(w / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    stored[name], stored[name.removesuffix(".weight") + ".weight_scale"] = codes, scale
    fx.write_stored(tmp_path, fx.V32, stored)
    got = collect_tensors(fx.V32, load_params(tmp_path, fx.V32, "float32")[0])
    assert_array_equal(got[name], codes.astype(np.float32) * scale)


# ---- field defects


@pytest.mark.parametrize("exposed", ["E8M0", "U8"])
def test_k2_e8m0_bytes_are_exponents(exposed, tmp_path):
    """120, 127 and 130 are 2^-7, 1 and 8, however the bytes are labelled; 255 is NaN and an error."""
    dtype = ml_dtypes.float8_e8m0fnu if exposed == "E8M0" else np.uint8
    assert_array_equal(decode_scale(np.array([120, 127, 130], np.uint8).view(dtype)), np.float32([0.0078125, 1, 8]))
    assert decode_scale(np.array([0], np.uint8).view(dtype))[0] == 2.0**-127
    stored, _ = fx.build(fx.V4, fx.draw(fx.V4), dialect="original", number_format="published")
    name = "layers.1.ffn.experts.2.w1"
    scale = np.resize(np.array([120, 127, 130], np.uint8), stored[name + ".scale"].shape)
    stored[name + ".scale"] = scale.view(dtype)
    fx.write_stored(tmp_path, fx.V4, stored)
    got = collect_tensors(fx.V4, load_params(tmp_path, fx.V4, "float32")[0])
    factors = np.resize(np.float32([0.0078125, 1, 8]), scale.shape)
    assert_array_equal(got[name + ".weight"], fx.blocks(fx.unpacked(stored[name + ".weight"]), factors, 1, 32))
    scale[3, 1] = 255
    fx.write_stored(tmp_path, fx.V4, stored)
    with pytest.raises(CheckpointError, match=rf"{name}\.scale: NaN"):
        load_params(tmp_path, fx.V4)


def wide_v4() -> V4Config:
    return dataclasses.replace(
        tiny.V4, num_hidden_layers=1, layer_kinds=("window",), layer_routing=("hash",), n_routed_experts=384,
        vocab_size=192, num_nextn_predict_layers=0, hidden_size=8, moe_intermediate_size=2,
    )  # fmt: skip


def test_k3_routing_table_keeps_its_integers(tmp_path):
    config = wide_v4()
    stored, _ = fx.build(config, fx.draw(config), dialect="original")
    name = "layers.0.ffn.gate.tid2eid"
    stored[name] = np.arange(384).reshape(192, 2)
    fx.write_stored(tmp_path, config, stored)
    got = collect_tensors(config, load_params(tmp_path, config, "bfloat16")[0])[name]
    assert got.dtype == np.int32
    assert_array_equal(got, stored[name])
    for wrong in (384, -1):
        stored[name][5, 1] = wrong
        fx.write_stored(tmp_path, config, stored)
        with pytest.raises(CheckpointError, match=rf"{name}: ids .*{wrong}.*expected 0\.\.383"):
            load_params(tmp_path, config)
    stored[name] = stored[name].astype(np.float32)
    fx.write_stored(tmp_path, config, stored)
    with pytest.raises(CheckpointError, match=rf"{name}: F32 .*expected integers"):
        load_params(tmp_path, config)


def test_k10_fp4_low_nibble_first_and_slices_in_values():
    row = np.array([[0x21, 0x9F]], np.uint8)
    assert_array_equal(unpack_fp4(row), np.float32([[0.5, 1.0, -6.0, -0.5]]))
    assert_array_equal(unpack_fp4(row.view(np.int8)), unpack_fp4(row))
    assert_array_equal(unpack_fp4(row, 2, 4), np.float32([[-6.0, -0.5]]))
    for start, stop in ((1, 4), (0, 3), (2, 6), (-2, 2)):
        with pytest.raises(ValueError, match="two values share a byte"):
            unpack_fp4(row, start, stop)


# ---- blocks and quantisers


@pytest.mark.parametrize(
    ("shape", "grid", "hint", "block"),
    [
        ((576, 7168), (5, 56), None, (128, 128)),  # not 116 rows
        ((1024, 4096), (8, 32), None, (128, 128)),
        ((64, 4096), (1, 32), None, (128, 128)),
        ((96, 96), (3, 3), None, (32, 32)),
        ((96, 96), (2, 2), None, (64, 64)),
        ((96, 96), (2, 2), (48, 48), (48, 48)),
        ((1024, 4096), (32, 8), None, None),  # transposed
        ((1024, 4096), (1024, 1), None, (1, 4096)),
        ((1024, 4096), (9, 32), None, None),
        ((40, 24), (1, 1), None, (40, 24)),
        ((8, 256), (8, 2), (1, 128), (1, 128)),
    ],
)
def test_fit_block(shape, grid, hint, block):
    assert fit_block(shape, grid, hint) == block


def test_quantise_fp8_rounds_to_the_nearest_code():
    rng = np.random.default_rng(0)
    w = (rng.standard_normal((200, 300)) * np.exp(rng.uniform(-8, 8, (200, 1)))).astype(np.float32)
    codes, scales = quantise_fp8(w)
    assert scales.shape == (2, 3)
    assert_array_equal(scales, np.exp2(np.round(np.log2(scales))))
    back = fx.blocks(codes, scales, 128, 128)
    wide = np.repeat(np.repeat(scales, 128, 0), 128, 1)[:200, :300]
    assert np.all(np.abs(back - w) <= np.maximum(np.abs(w) * 2.0**-4, wide * 2.0**-10))
    amax = np.abs(w[:128, :128]).max()
    assert scales[0, 0] / 2 < amax / 448 <= scales[0, 0]
    zero_codes, zero_scales = quantise_fp8(np.zeros((3, 5), np.float32))
    assert_array_equal(zero_codes.astype(np.float32), np.zeros((3, 5), np.float32))
    assert zero_scales == 2.0**-22


def test_quantise_fp4_rounds_to_the_nearest_code():
    rng = np.random.default_rng(1)
    w = (rng.standard_normal((7, 64)) * np.exp(rng.uniform(-8, 8, (7, 1)))).astype(np.float32)
    packed, scale = quantise_fp4(w)
    assert packed.shape == (7, 32)
    assert scale.shape == (7, 2)
    codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    scaled = np.abs(w) / np.repeat(scale, 32, axis=1)
    nearest = np.abs(scaled[..., None] - codes).min(axis=-1)
    back = fx.unpacked(packed) * np.repeat(scale, 32, axis=1)
    assert_array_equal(np.abs(back - w) / np.repeat(scale, 32, axis=1), nearest)
    with pytest.raises(ValueError, match="multiple of group=32"):
        quantise_fp4(w[:, :48])
