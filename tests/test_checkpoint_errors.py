"""Damaged and unfitting checkpoints: one error that lists everything."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from jmla.models.checkpoint import CheckpointError, collect_tensors, load_params, save_checkpoint, write_safetensors
from jmla.models.checkpoint.reader import INDEX, Checkpoint, HeaderError, read_header
from jmla.models.config import read_config
from tests import fixtures_checkpoint as fx

WQ_A = "layers.0.attn.wq_a"


@pytest.fixture(scope="module")
def tensors():
    return fx.draw(fx.V4)


@pytest.fixture
def stored(tensors):
    return fx.build(fx.V4, tensors, dialect="original", number_format="published")[0]


def problems(folder, stored=None, config=fx.V4, shards=1):
    if stored is not None:
        fx.write_stored(folder, config, stored, shards)
    with pytest.raises(CheckpointError) as caught:
        load_params(folder, config)
    assert isinstance(caught.value, ValueError)
    return caught.value.problems


# ---- tensors


def test_all_problems_in_one_error(stored, tmp_path):
    del stored["layers.0.attn_norm.weight"]
    stored["strange"] = np.zeros(2, np.float32)
    stored["norm.weight"] = np.zeros(7, ml_dtypes.bfloat16)
    stored["layers.1.ffn.experts.0.w2.scale"].view(np.uint8)[0, 0] = 255
    stored["layers.0.ffn.gate.tid2eid"][0, 0] = 6
    stored["layers.1.attn.attn_sink"][0] = np.nan
    del stored[WQ_A + ".scale"]
    stored["layers.1.attn.wkv.weight"] = stored["layers.1.attn.wkv.weight"].astype(np.int64)
    found = problems(tmp_path, stored)
    expected = (
        "layers.0.attn_norm.weight: missing, expected [160]",
        "strange: F32 [2] has no place",
        "norm.weight: BF16 [7], expected [160]",
        "layers.1.ffn.experts.0.w2.scale: NaN",
        "layers.0.ffn.gate.tid2eid: ids 0..6, expected 0..5",
        "layers.1.attn.attn_sink: NaN",
        WQ_A + ".weight: F8_E4M3 [144, 160] has no scale",
        "layers.1.attn.wkv.weight: I64",
    )
    assert len(found) == len(expected)
    for start in expected:
        assert any(p.startswith(start) for p in found), (start, found)


def test_long_lists_are_cut_but_kept(stored, tmp_path):
    gone = [name for name in stored if name.startswith("layers.3.ffn.experts.") and name.endswith(".weight")]
    fx.write_stored(tmp_path, fx.V4, {n: w for n, w in stored.items() if not n.startswith("layers.3.ffn.experts.")})
    with pytest.raises(CheckpointError) as caught:
        load_params(tmp_path, fx.V4)
    assert {p.split(":")[0] for p in caught.value.problems} == set(gone)
    assert len(gone) < 20 or len(str(caught.value).splitlines()) == 22
    fx.write_stored(tmp_path, fx.V4, {n: w for n, w in stored.items() if not n.startswith(("layers.3.", "layers.2."))})
    with pytest.raises(CheckpointError) as caught:
        load_params(tmp_path, fx.V4)
    lines = str(caught.value).splitlines()
    assert len(lines) == 22
    assert lines[0].endswith(f"{len(caught.value.problems)} problems")
    assert lines[-1] == f"  ... and {len(caught.value.problems) - 20} more"


@pytest.mark.parametrize("name", [WQ_A, "layers.1.ffn.experts.0.w1"])
def test_k6_quantised_weight_without_its_scale(name, stored, tmp_path):
    del stored[name + ".scale"]
    (found,) = problems(tmp_path, stored)
    assert found.startswith(f"{name}.weight: ")
    for candidate in (".scale", ".weight_scale_inv", ".weight_scale"):
        assert name + candidate in found


def test_k6_scale_without_its_weight(stored, tmp_path):
    del stored[WQ_A + ".weight"]
    assert any(p.startswith(f"{WQ_A}.scale: a scale without its weight") for p in problems(tmp_path, stored))


def test_scales_that_do_not_belong(stored, tensors, tmp_path):
    name = "layers.0.attn.wo_b"
    stored[name + ".scale"] = np.ones((3, 2), np.float32).astype(ml_dtypes.float8_e8m0fnu)
    stored[WQ_A + ".weight"] = tensors[WQ_A + ".weight"]  # no longer quantised, but its scale is still there
    stored["layers.1.ffn.experts.0.w1.scale"] = stored["layers.1.ffn.experts.0.w1.scale"][:, :3]
    e8m0 = stored["layers.1.ffn.experts.0.w3.scale"].astype(np.float32)
    stored["layers.1.ffn.experts.0.w3.scale"] = e8m0.astype(ml_dtypes.float8_e4m3fn)
    found = problems(tmp_path, stored)
    assert len(found) == 4
    assert any(p.startswith(name + ".scale: F8_E8M0 [3, 2] does not cover") for p in found)
    assert any(p.startswith(WQ_A + ".weight: F32") and "has a scale" in p for p in found)
    assert any("w1.scale: F8_E8M0 [32, 3], expected [32, 5]: one for 32 values" in p for p in found)
    assert any("w3.scale" in p and "weight_scale_2" in p for p in found)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_scales_of_float32(value, tmp_path):
    stored, _ = fx.build(fx.V32, fx.draw(fx.V32), dialect="transformers", number_format="fp8_float32")
    name = "model.layers.2.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
    assert stored[name].shape == (2, 2)  # 136 rows: a partial block
    stored[name][1, 1] = value
    (found,) = problems(tmp_path, stored, fx.V32)
    assert found == f"{name}: NaN or infinite scales"


def test_nan_weights(stored, tmp_path):
    stored["embed.weight"][3, 4] = np.nan
    stored["layers.2.attn.wq_b.weight"].view(np.uint8)[0, 0] = 0x7F
    found = problems(tmp_path, stored)
    assert "embed.weight: NaN or infinite values" in found
    del stored["embed.weight"]
    stored["embed.weight"] = np.zeros((40, 160), ml_dtypes.bfloat16)
    assert problems(tmp_path, stored) == ("layers.2.attn.wq_b.weight: NaN or infinite values",)


def test_k10_odd_and_misshapen_fp4(stored, tmp_path):
    name = "layers.1.ffn.experts.0.w1.weight"
    stored[name] = stored[name][:, :-1]
    (found,) = problems(tmp_path, stored)
    assert found.startswith(f"{name}: I8 [32, 79] (values: [32, 158]), expected [32, 160]")


def fp4_file(folder, stored, name, shape, data):
    """Writes the checkpoint with one tensor as safetensors' own F4, whose shape counts values."""
    raw = {n: (code_of(w), list(w.shape), w.tobytes()) for n, w in stored.items()}
    raw[name] = ("F4", shape, data)
    fx.write_stored(folder, fx.V4, {})
    fx.write_raw(folder / "model.safetensors", raw)


def code_of(w):
    names = {"bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "float32": "F32"}
    return (names | {"int8": "I8", "int64": "I64"})[w.dtype.name]


def test_k10_fp4_with_a_logical_shape(stored, tmp_path):
    name = "layers.1.ffn.experts.0.w1.weight"
    fx.write_stored(tmp_path / "a", fx.V4, stored)
    expected = collect_tensors(fx.V4, load_params(tmp_path / "a", fx.V4, "float32")[0])
    fp4_file(tmp_path / "b", stored, name, [32, 160], stored[name].tobytes())
    got = collect_tensors(fx.V4, load_params(tmp_path / "b", fx.V4, "float32")[0])
    assert_array_equal(got[name], expected[name])
    fp4_file(tmp_path / "b", stored, name, [32, 159], stored[name].tobytes()[: 32 * 159 // 2])
    (found,) = problems(tmp_path / "b")
    assert found.startswith(f"{name}: F4 [32, 159]: an odd number")


def test_the_wrong_family(stored, tmp_path):
    found = problems(tmp_path, stored, fx.V32)
    assert any("model.layers.0.self_attn.q_a_proj.weight: missing" in p for p in found)
    assert any(p.startswith(WQ_A + ".weight: F8_E4M3") for p in found)


def test_arguments(stored, tmp_path):
    fx.write_stored(tmp_path, fx.V4, stored)
    with pytest.raises(ValueError, match="dtype='float16'"):
        load_params(tmp_path, fx.V4, "float16")
    with pytest.raises(NotADirectoryError):
        load_params(tmp_path / "model.safetensors", fx.V4)


# ---- files


def test_k9_every_dtype_is_read_bit_for_bit(tmp_path):
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, 3 * 8, np.uint8)
    dtypes = {
        "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "F8_E5M2": ml_dtypes.float8_e5m2, "I8": np.int8, "U8": np.uint8, "F16": np.float16, "F32": np.float32,
        "F64": np.float64, "I64": np.int64, "I32": np.int32, "BOOL": np.bool_,
    }  # fmt: skip
    arrays = {code: (raw % 2 if code == "BOOL" else raw).view(dtype).reshape(3, -1) for code, dtype in dtypes.items()}
    write_safetensors(tmp_path / "model.safetensors", arrays)
    header = read_header(tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.tensors.keys() == dtypes.keys()
    for code, array in arrays.items():
        assert header[code].code == code
        view = checkpoint.view(checkpoint.tensors[code])
        assert view.dtype == array.dtype
        assert view.shape == array.shape
        assert view.tobytes() == array.tobytes()
    entries = {"a": ("U8", [1], b"\x05"), "b": ("BF16", [2], raw[:4].tobytes()), "c": ("F4", [3, 2], b"\x21\x43\x65")}
    fx.write_raw(tmp_path / "model.safetensors", entries)  # b at an odd offset
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.view(checkpoint.tensors["b"]).tobytes() == raw[:4].tobytes()
    assert_array_equal(checkpoint.view(checkpoint.tensors["c"]), [[0x21], [0x43], [0x65]])


def test_files_of_the_reference_library(tmp_path):
    """The library's own writer and this reader agree, and the other way round."""
    numpy = pytest.importorskip("safetensors.numpy")
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    numpy.save_file({"x": array, "y": array[0]}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert_array_equal(checkpoint.view(checkpoint.tensors["x"]), array)
    write_safetensors(tmp_path / "other.safetensors", {"x": array, "empty": np.zeros((0, 3), np.float32)})
    back = numpy.load_file(tmp_path / "other.safetensors")
    assert_array_equal(back["x"], array)
    assert back["empty"].shape == (0, 3)


@pytest.mark.parametrize("cut", [0, 4, 30, -1])
def test_truncated_file(cut, stored, tmp_path):
    fx.write_stored(tmp_path, fx.V4, stored)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    (found,) = problems(tmp_path)
    assert found.startswith("file model.safetensors: ")


def damage(name, **changes):
    return lambda header: header[name].update(changes)


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (damage("a", data_offsets=[0, 7]), "7 bytes for a"),
        (damage("a", data_offsets=[8, 0]), "no dtype, shape and offsets of a"),
        (damage("b", data_offsets=[4, 12]), "overlap or leave a gap at b"),
        (damage("b", data_offsets=[12, 20]), "overlap or leave a gap at b"),
        (damage("b", shape=[-2]), "no dtype, shape and offsets of b"),
        (damage("b", shape=3), "no dtype, shape and offsets of b"),
        (lambda header: header.pop("b"), "16 bytes|damaged"),
        (lambda header: header.update(a=3), "no dtype, shape and offsets of a"),
    ],
)
def test_contradicting_headers(patch, message, tmp_path):
    file = tmp_path / "x.safetensors"
    fx.write_raw(file, {"a": ("F32", [2], bytes(8)), "b": ("F32", [2], bytes(8))})
    assert read_header(file).keys() == {"a", "b"}
    fx.write_raw(file, {"a": ("F32", [2], bytes(8)), "b": ("F32", [2], bytes(8))}, patch)
    with pytest.raises(HeaderError, match=message):
        read_header(file)


@pytest.mark.parametrize(
    "text", [b"{", b"[]", b'{"a":1,"a":1}', b"\xff\xff", b"[" * 100_000], ids=lambda x: str(x)[:30]
)
def test_headers_that_are_none(text, tmp_path):
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(HeaderError):
        read_header(file)
    file.write_bytes(struct.pack("<Q", 2**40) + text)
    with pytest.raises(HeaderError, match="truncated"):
        read_header(file)


def test_shards(stored, tensors, tmp_path):
    fx.write_stored(tmp_path, fx.V4, stored, shards=3)
    params, _ = load_params(tmp_path, fx.V4)
    files = sorted(tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / INDEX).read_text())
    pair = {index["weight_map"][WQ_A + part] for part in (".weight", ".scale")}
    assert len(pair) == 2

    index["weight_map"]["layers.0.nowhere"] = files[1].name
    (tmp_path / INDEX).write_text(json.dumps(index))
    lacks = f"file {files[1].name}: lacks 1 tensor (layers.0.nowhere) that the index says it holds"
    assert problems(tmp_path) == (lacks,)

    del index["weight_map"]["layers.0.nowhere"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    held = sorted(name for name, file in index["weight_map"].items() if file == files[0].name)
    lost = f"the index says that it holds {len(held)} tensors ({', '.join(held[:3])}, ...)"
    kept = files[0].read_bytes()
    files[0].unlink()  # nothing is said of the weights and scales that it leaves alone
    assert problems(tmp_path) == (f"file {files[0].name}: missing; {lost}",)
    files[0].symlink_to(tmp_path / "nowhere")
    assert problems(tmp_path) == (f"file {files[0].name}: missing; {lost}",)
    files[0].unlink()
    files[0].mkdir()
    (found,) = problems(tmp_path)
    assert found.startswith(f"file {files[0].name}: cannot be read")
    assert found.endswith(lost)
    files[0].rmdir()
    files[0].write_bytes(kept[:-5])
    (found,) = problems(tmp_path)
    assert found.startswith(f"file {files[0].name}: ")
    assert found.endswith(f"truncated, or damaged; {lost}")
    files[0].write_bytes(files[1].read_bytes())
    (found,) = problems(tmp_path)
    assert found.startswith(f"file {files[0].name}: lacks {len(held)} tensors ({', '.join(held[:3])}, ...)")
    files[0].write_bytes(kept)
    again, _ = load_params(tmp_path, fx.V4)
    assert_array_equal(again["ends"]["embed"], params["ends"]["embed"])

    (tmp_path / INDEX).unlink()
    (found,) = problems(tmp_path)
    assert "3 *.safetensors files but no model.safetensors.index.json" in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "cannot be read as JSON"),
        (b"{", "cannot be read as JSON"),
        (b"[" * 100_000, "too many levels"),
        (b"\xff", "cannot be read as JSON"),
        (b'{"weight_map": {"a": "x", "a": "y"}}', "the name 'a' twice"),
        *(
            (text, "no JSON object with a weight_map")
            for text in (b"[]", b"{}", b'{"weight_map": 3}', b'{"weight_map": {}}', b'{"weight_map": {"a": [1]}}')
        ),
    ],
    ids=lambda x: str(x)[:30],
)
def test_broken_index(text, message, tmp_path):
    (tmp_path / INDEX).write_bytes(text)
    (found,) = problems(tmp_path)
    assert found.startswith(f"file {INDEX}: ")
    assert message in found


@pytest.mark.parametrize("file", ["../x", "/etc/passwd", "..", ".", "", "a/b", "a\0b", "\ud800", "x" * 300])
def test_index_may_not_leave_the_directory(file, tmp_path):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"embed.weight": file}}))
    (found,) = problems(tmp_path)
    assert found.startswith(f"file {file!r}: not the name of a file beside {INDEX}; ")
    assert found.endswith("it holds 1 tensor (embed.weight)")


def test_names_that_are_no_text(tmp_path):
    """An error stays readable, a line a problem, whatever a file calls its tensors."""
    names = ["\ud800\n", "x" * 9999, f"layers.{'9' * 5000}.attn.wq_a.weight"]
    fx.write_raw(tmp_path / "model.safetensors", {name: ("F32", [0], b"") for name in names})
    with pytest.raises(CheckpointError, match=r"\\ud800 : F32 \[0\] has no place") as caught:
        load_params(tmp_path, fx.V4)
    assert len(str(caught.value).encode()) < 20_000
    assert len(str(caught.value).splitlines()) == 22


def test_no_files(tmp_path):
    (found,) = problems(tmp_path)
    assert found.startswith("no model.safetensors")


# ---- writing


@pytest.mark.parametrize("family", fx.CONFIGS)
@pytest.mark.parametrize("shards", [1, 3])
def test_save_checkpoint_round_trip(family, shards, tmp_path):
    """What was saved is loaded, and saving what was loaded changes nothing more."""
    config = fx.CONFIGS[family]
    save_checkpoint(tmp_path / "a", config, fx.draw(config), shards=shards)
    assert read_config(tmp_path / "a") == config
    params, report = load_params(tmp_path / "a", config, "float32")
    assert report.formats.get("fp4", 0) == (6 * 6 * 3 if family == "v4" else 0)
    first = collect_tensors(config, params)
    save_checkpoint(tmp_path / "b", config, first)
    second = collect_tensors(config, load_params(tmp_path / "b", config, "float32")[0])
    assert first.keys() == second.keys()
    for name, w in first.items():
        assert_array_equal(w, second[name], err_msg=name)


def test_stored_dtypes_are_the_published_ones(tmp_path):
    save_checkpoint(tmp_path, fx.V4, fx.draw(fx.V4))
    codes = {name: s.code for name, s in read_header(tmp_path / "model.safetensors").items()}
    expected = {
        "embed.weight": "BF16",
        "head.weight": "BF16",
        "hc_head_fn": "F32",
        "layers.1.attn_norm.weight": "BF16",
        "layers.1.hc_ffn_scale": "F32",
        "layers.1.attn.attn_sink": "F32",
        "layers.1.attn.wq_a.weight": "F8_E4M3",
        "layers.1.attn.wq_a.scale": "F8_E8M0",
        "layers.1.attn.wkv.scale": "F8_E8M0",
        "layers.1.attn.wo_a.weight": "F8_E4M3",
        "layers.1.attn.compressor.wkv.weight": "BF16",
        "layers.1.attn.compressor.ape": "F32",
        "layers.1.attn.indexer.wq_b.weight": "F8_E4M3",
        "layers.1.attn.indexer.weights_proj.weight": "BF16",
        "layers.1.attn.indexer.compressor.wgate.weight": "BF16",
        "layers.1.ffn.gate.weight": "BF16",
        "layers.1.ffn.gate.bias": "F32",
        "layers.0.ffn.gate.tid2eid": "I64",
        "layers.1.ffn.experts.5.w2.weight": "I8",
        "layers.1.ffn.experts.5.w2.scale": "F8_E8M0",
        "layers.1.ffn.shared_experts.w3.weight": "F8_E4M3",
        "mtp.0.e_proj.weight": "F8_E4M3",
        "mtp.0.enorm.weight": "BF16",
    }
    assert {name: codes[name] for name in expected} == expected
    assert "layers.1.attn.compressor.wkv.scale" not in codes


def test_save_checkpoint_refuses_other_tensors(tensors, tmp_path):
    with pytest.raises(ValueError, match="strange"):
        save_checkpoint(tmp_path, fx.V4, tensors | {"strange": np.zeros(1)})
    with pytest.raises(ValueError, match=r"embed\.weight"):
        save_checkpoint(tmp_path, fx.V4, tensors | {"embed.weight": np.zeros((1, 2))})
    assert not list(tmp_path.iterdir())
