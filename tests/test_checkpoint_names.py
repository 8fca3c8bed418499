"""Names in every dialect, and tensors that come in optional, tied or ignorable forms."""

import dataclasses
import re
import warnings
from collections import Counter

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from jmla.models.checkpoint import CheckpointError, CheckpointWarning, collect_tensors, load_params
from jmla.models.checkpoint.dialects import Names
from jmla.models.checkpoint.places import placements
from tests import fixtures_checkpoint as fx

DIALECTS = [("v4", d) for d in fx.V4_DIALECTS] + [(f, d) for f in ("v32", "glm") for d in fx.DSA_DIALECTS]


@pytest.fixture(scope="module")
def drawn():
    return {family: fx.draw(config) for family, config in fx.CONFIGS.items()}


def load(folder, config, stored, dtype="float32"):
    fx.write_stored(folder, config, stored)
    params, report = load_params(folder, config, dtype)
    return collect_tensors(config, params), report


def plain(family):
    return "original" if family == "v4" else "transformers"


@pytest.mark.parametrize(("family", "dialect"), DIALECTS)
@pytest.mark.parametrize("number_format", ["float32", "fp8", "nvfp4"])
def test_k4_each_name_is_one_thing_and_nothing_is_twice(family, dialect, number_format, drawn):
    config = fx.CONFIGS[family]
    stored, _ = fx.build(config, drawn[family], dialect=dialect, number_format=number_format)
    names = Names(config, placements(config))
    found = {key: names.locate(key) for key in stored}
    assert None not in found.values()
    counts = Counter(place for place in found.values() if place[1] != "ignored")
    assert set(counts.values()) == {1}
    for key, (_, role) in found.items():
        is_scale = re.search(r"(weight|proj)_scale(_inv)?$|\w\.scale$", key) and not re.search(r"(attn|ffn)_hc\.", key)
        assert (role == "scale") == bool(is_scale), key
    values = {name for name, role in counts if role == "value"}
    inside = {s.name for name in values & names.fused.keys() for s in names.fused[name].slices}
    assert (values - names.fused.keys()) | inside == placements(config).keys()


def test_parameters_called_scale_are_not_scales():
    names = Names(fx.V4, placements(fx.V4))
    assert names.locate("layers.2.hc_attn_scale") == ("layers.2.hc_attn_scale", "value")
    assert names.locate("model.layers.2.attn_hc.scale") == ("layers.2.hc_attn_scale", "value")
    assert names.locate("model.hc_head.hc_scale") == ("hc_head_scale", "value")
    assert names.locate("layers.2.attn.wq_a.scale") == ("layers.2.attn.wq_a.weight", "scale")
    for unknown in (
        "layers.2.attn.wq_a",
        "layers.2.attn.attn_sink.weight",
        "layers.2.attn.wq_a.weight_x",
        "xembed.weight",
    ):
        assert names.locate(unknown) is None


@pytest.mark.parametrize("suffix", [".scale", ".weight_scale", ".weight_scale_inv"])
@pytest.mark.parametrize("family", ["v4", "v32"])
def test_k5_scale_aliases_load_alike(family, suffix, drawn, tmp_path):
    config = fx.CONFIGS[family]
    stored, twin = fx.build(config, drawn[family], dialect=plain(family), number_format="fp8", suffix=suffix)
    assert any(name.endswith(suffix) for name in stored)
    for name in [n for n in stored if n.endswith(suffix)][:3]:
        stored[name.removesuffix(suffix) + ".input_scale"] = np.ones((), np.float32)
    got, _ = load(tmp_path, config, stored)
    for name, expected in twin.items():
        assert_array_equal(got[name], expected, err_msg=name)


def test_k5_unknown_tensors_are_named(drawn, tmp_path):
    stored, _ = fx.build(fx.V32, drawn["v32"], dialect="transformers")
    stored["model.layers.1.self_attn.q_c_proj.weight_scale"] = np.ones((1, 1), np.float32)
    stored["model.layers.1.mystery"] = np.ones(3, np.float32)
    stored["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)  # known and useless
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, fx.V32, stored)
    assert len(caught.value.problems) == 2
    assert "model.layers.1.self_attn.q_c_proj.weight_scale: F32 [1, 1]" in str(caught.value)
    assert "model.layers.1.mystery: F32 [3]" in str(caught.value)


def test_the_same_tensor_under_two_names(drawn, tmp_path):
    stored, _ = fx.build(fx.V4, drawn["v4"], dialect="original")
    stored["model.layers.0.self_attn.q_a_proj.weight"] = stored["layers.0.attn.wq_a.weight"]
    with pytest.raises(CheckpointError, match=r"the same as .*wq_a\.weight"):
        load(tmp_path, fx.V4, stored)
    stored, _ = fx.build(fx.V32, drawn["v32"], dialect="fused")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    stored[name] = drawn["v32"][name]
    with pytest.raises(CheckpointError, match=r"up_proj\.weight: both from"):
        load(tmp_path, fx.V32, stored)


# ---- the draft block


def is_draft(name, config):
    return name.startswith(("mtp.", f"model.layers.{config.num_hidden_layers}."))


@pytest.mark.parametrize("family", fx.CONFIGS)
def test_k12_draft_block_is_kept_or_switched_off(family, drawn, tmp_path):
    config = fx.CONFIGS[family]
    stored, twin = fx.build(config, drawn[family], dialect=plain(family))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got, report = load(tmp_path / "with", config, stored)
    assert report.drafting
    drafts = [name for name in twin if is_draft(name, config)]
    assert drafts
    for name in drafts:
        assert_array_equal(got[name], twin[name], err_msg=name)

    trunk = {name: w for name, w in stored.items() if not is_draft(name, config)}
    with pytest.warns(CheckpointWarning, match="drafting is off"):
        got, report = load(tmp_path / "without", config, trunk)
    assert not report.drafting
    assert report.warnings
    assert not any(is_draft(name, config) for name in got)
    assert got.keys() == {name for name in twin if not is_draft(name, config)}

    some = {name: w for name, w in stored.items() if name not in drafts[:2]}
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "some", config, some)
    assert sorted(p.split(":")[0] for p in caught.value.problems) == sorted(drafts[:2])


def test_k12_draft_block_of_v4_under_the_next_layer_index(drawn, tmp_path):
    stored, twin = fx.build(fx.V4, drawn["v4"], dialect="transformers")
    renamed = {name.replace("mtp.0.", f"model.layers.{fx.V4.num_hidden_layers}."): w for name, w in stored.items()}
    got, report = load(tmp_path, fx.V4, renamed)
    assert report.drafting
    assert_array_equal(got["mtp.0.e_proj.weight"], twin["mtp.0.e_proj.weight"])
    assert_array_equal(got["mtp.0.hc_attn_scale"], twin["mtp.0.hc_attn_scale"])


def test_draft_block_that_the_configuration_lacks_is_left_alone(drawn, tmp_path):
    config = dataclasses.replace(fx.GLM, num_nextn_predict_layers=0)
    stored, _ = fx.build(fx.GLM, drawn["glm"], dialect="transformers")
    with pytest.warns(CheckpointWarning, match="num_nextn_predict_layers is 0"):
        _, report = load(tmp_path, config, stored)
    assert not report.drafting


@pytest.mark.parametrize("family", fx.CONFIGS)
def test_copies_of_embedding_and_head_are_accepted(family, drawn, tmp_path):
    config = fx.CONFIGS[family]
    stored, twin = fx.build(config, drawn[family], dialect=plain(family))
    table = np.zeros((config.vocab_size, config.hidden_size), ml_dtypes.bfloat16)
    for name in (
        ("emb.tok_emb.weight", "head.weight") if family == "v4" else ("embed_tokens.weight", "shared_head.head.weight")
    ):
        stored[("mtp.0." if family == "v4" else f"model.layers.{config.num_hidden_layers}.") + name] = table
    got, report = load(tmp_path, config, stored)
    assert report.drafting
    assert got.keys() == twin.keys()


def test_dspark_drafts_are_refused(drawn, tmp_path):
    stored, _ = fx.build(fx.V4, drawn["v4"], dialect="original")
    stored |= {f"mtp.{i}.main_proj.weight": np.ones((4, 4), np.float32) for i in range(3)}
    stored["mtp.2.markov_head.markov_w1.weight"] = np.ones((4, 4), np.float32)
    with pytest.raises(
        CheckpointError, match=r"mtp\.0\.main_proj\.weight and 3 more: a DSpark draft.*supported: the draft"
    ):
        load(tmp_path, fx.V4, stored)


# ---- layers that share an indexer's choice


def test_c12_shared_layers_need_no_indexer_and_ignore_one(drawn, tmp_path):
    assert fx.GLM.indexer_types == ("full", "shared", "full", "shared", "full", "shared")
    stored, twin = fx.build(fx.GLM, drawn["glm"], dialect="transformers", number_format="fp8")
    indexed = {int(m[1]) for m in (re.match(r"model\.layers\.(\d+)\.self_attn\.indexer\.", n) for n in stored) if m}
    assert indexed == {0, 2, 4, 6}
    extra = {n.replace(".0.", ".1."): w for n, w in stored.items() if n.startswith("model.layers.0.self_attn.indexer.")}
    assert any(name.endswith("wk.weight_scale_inv") for name in extra)
    without, _ = load(tmp_path / "a", fx.GLM, stored)
    ignored, _ = load(tmp_path / "b", fx.GLM, stored | extra)
    assert without.keys() == ignored.keys() == twin.keys()
    for name in twin:
        assert_array_equal(without[name], ignored[name])
    missing = {n: w for n, w in stored.items() if not n.startswith("model.layers.2.self_attn.indexer.k_norm.bias")}
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.indexer\.k_norm\.bias: missing"):
        load(tmp_path / "c", fx.GLM, missing)


# ---- float32 parameters


def test_parameters_kept_in_float32(drawn, tmp_path):
    """Stored in bf16 they are taken as they are, with a warning, and are float32 in memory."""
    stored, twin = fx.build(fx.V4, drawn["v4"], dialect="hybrid")
    narrow = {n: w.astype(ml_dtypes.bfloat16) if w.dtype == np.float32 else w for n, w in stored.items()}
    with pytest.warns(CheckpointWarning, match="belong in float32"):
        got, _ = load(tmp_path / "narrow", fx.V4, narrow, "bfloat16")
    for name in (
        "layers.1.hc_attn_fn",
        "layers.1.attn.compressor.ape",
        "layers.2.ffn.gate.bias",
        "layers.2.attn.attn_sink",
    ):
        assert_array_equal(got[name], twin[name].astype(ml_dtypes.bfloat16).astype(np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got, _ = load(tmp_path / "wide", fx.V4, stored, "bfloat16")
    exact = ("norm.weight", "_fn", "_base", "_scale", ".gate.weight", "gate.bias", "attn_sink", ".ape")
    for name, w in twin.items():
        if w.dtype == np.float32:
            assert_array_equal(got[name], w if name.endswith(exact) else w.astype(ml_dtypes.bfloat16), err_msg=name)
