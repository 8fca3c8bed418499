"""Configurations: every dialect of config.json, and errors that name field, value and what is supported."""

import dataclasses
import json
import subprocess
import sys

import pytest

from jmla.models.config import (
    ConfigError,
    DsaConfig,
    GenerationDefaults,
    V4Config,
    Yarn,
    from_dict,
    read_config,
    read_generation_config,
    to_dict,
)
from tests import tiny
from tests.conftest import ROOT
from tests.golden.configs import CASES

# ---- the published configurations

V4_FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "vocab_size": 129280,
}
V4_PRO = V4_FLASH | {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0],
    "index_topk": 1024,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
}
# DeepSeek's inference/config.json of the same model
V4_INFERENCE = {
    "vocab_size": 129280,
    "dim": 4096,
    "moe_inter_dim": 2048,
    "n_layers": 43,
    "n_hash_layers": 3,
    "n_heads": 64,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "n_activated_experts": 6,
    "score_func": "sqrtsoftplus",
    "route_scale": 1.5,
    "swiglu_limit": 10.0,
    "q_lora_rank": 1024,
    "head_dim": 512,
    "rope_head_dim": 64,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "window_size": 128,
    "original_seq_len": 65536,
    "rope_theta": 10000,
    "rope_factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "dtype": "fp8",
    "scale_fmt": "ue8m0",
    "scale_dtype": "fp8",
    "expert_dtype": "fp4",
    "compress_rope_theta": 160000,
    "compress_ratios": V4_FLASH["compress_ratios"],
}
V32 = {
    "model_type": "deepseek_v32",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 163840,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "attention_bias": False,
    "hidden_act": "silu",
}
GLM5 = {k: v for k, v in V32.items() if k not in ("rope_theta", "rope_scaling", "bos_token_id", "moe_layer_freq")} | {
    "model_type": "glm_moe_dsa",
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "head_dim": 192,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
    "index_n_heads": 32,
    "indexer_rope_interleave": True,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "max_position_embeddings": 202752,
    "pad_token_id": 154820,
    "eos_token_id": [154820, 154827, 154829],
    "dtype": "bfloat16",
}
SHARED_RULE = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
GLM52 = GLM5 | {
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "max_position_embeddings": 1048576,
    "index_topk_pattern": None,
    "indexer_types": ["full" if i < 3 or i % 4 == 2 else "shared" for i in range(78)],
    "index_share_for_mtp_iteration": True,
    "moe_router_dtype": "float32",
} | SHARED_RULE  # fmt: skip


def transformers_v4(values):
    """The same configuration as transformers 5.24 rewrites and saves it."""
    names = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    layers, hashed = values["num_hidden_layers"], values["num_hash_layers"]
    factor = values["qk_rope_head_dim"] / values["head_dim"]
    gone = ("compress_ratios", "num_hash_layers", "rope_scaling", "qk_rope_head_dim", "torch_dtype")
    scaling = {k: v for k, v in values["rope_scaling"].items() if k != "type"}
    return {k: v for k, v in values.items() if k not in gone} | {
        "dtype": "bfloat16",
        "layer_types": [names[ratio] for ratio in values["compress_ratios"][:layers]],
        "compress_rates": {names[4]: 4, names[128]: values.get("compress_rate_hca", 128)},
        "mlp_layer_types": ["hash_moe"] * hashed + ["moe"] * (layers - hashed),
        "partial_rotary_factor": factor,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": values["rope_theta"], "partial_rotary_factor": factor},
            "compress": scaling
            | {
                "rope_type": "yarn",
                "rope_theta": values["compress_rope_theta"],
                "partial_rotary_factor": factor,
                "attention_factor": 1.0,
            },
        },
    }


def transformers_dsa(values):
    """V3.2 or GLM with the fields that transformers 5.24 saves."""
    layers, dense = values["num_hidden_layers"], values["first_k_dense_replace"]
    gone = ("rope_theta", "rope_scaling", "first_k_dense_replace")
    rope = values.get("rope_parameters") or values["rope_scaling"] | {"rope_type": "yarn", "rope_theta": 10000}
    return {k: v for k, v in values.items() if k not in gone} | {
        "rope_parameters": rope,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (layers - dense),
        "layer_types": ["indexed_attention"] * layers,
        "head_dim": 64,
    }


# ---- reading


def test_v4_flash():
    c = from_dict(V4_FLASH)
    assert isinstance(c, V4Config)
    assert c.layer_kinds == ("window", "window", *("csa", "hca") * 20, "csa")
    assert [c.layer_kinds.count(kind) for kind in ("window", "csa", "hca")] == [2, 21, 20]
    assert c.layer_routing == ("hash",) * 3 + ("learned",) * 40
    assert (c.csa_ratio, c.hca_ratio, c.draft_kind, c.num_nextn_predict_layers) == (4, 128, "window", 1)
    assert c.yarn == Yarn(16.0, 32.0, 1.0, 65536, None, None)
    assert (c.rope_theta, c.compress_rope_theta, c.qk_rope_head_dim) == (10000.0, 160000.0, 64)
    assert (c.bos_token_id, c.eos_token_id, c.pad_token_id, c.torch_dtype) == (0, (1,), None, "bfloat16")
    assert hash(c) == hash(from_dict(dict(V4_FLASH)))


def test_v4_pro():
    c = from_dict(V4_PRO)
    assert [c.layer_kinds.count(kind) for kind in ("window", "csa", "hca")] == [0, 30, 31]
    assert (c.routed_scaling_factor, c.index_topk, c.o_groups, c.n_routed_experts) == (2.5, 1024, 16, 384)


def test_v32():
    c = from_dict(V32)
    assert isinstance(c, DsaConfig)
    assert c.mlp_layer_types == ("dense",) * 3 + ("sparse",) * 58
    assert c.indexer_types == ("full",) * 61
    assert not c.indexer_rope_interleave
    assert c.yarn == Yarn(40.0, 32.0, 1.0, 4096, 1.0, 1.0)
    assert (c.rms_norm_eps, c.latent_norm_eps, c.rope_theta, c.n_group, c.topk_group) == (1e-6, 1e-6, 1e4, 8, 4)


def test_glm():
    c = from_dict(GLM5)
    assert c.indexer_types == ("full",) * 78
    assert (c.rope_theta, c.yarn, c.max_position_embeddings) == (1e6, None, 202752)
    assert (c.rms_norm_eps, c.latent_norm_eps) == (1e-5, 1e-6)
    assert c.indexer_rope_interleave
    assert not c.index_share_for_mtp_iteration
    assert (c.eos_token_id, c.pad_token_id, c.bos_token_id) == ((154820, 154827, 154829), 154820, None)
    assert from_dict(GLM5 | {"latent_norm_eps": 1e-5}).latent_norm_eps == 1e-5
    shared = from_dict(GLM52)
    assert [i for i, kind in enumerate(shared.indexer_types) if kind == "full"] == [0, 1, *range(2, 78, 4)]
    assert shared.index_share_for_mtp_iteration


@pytest.mark.parametrize("values", [V4_FLASH, V4_PRO, CASES["v4_small"].config], ids=["flash", "pro", "small"])
def test_v4_dialects_agree(values):
    original, rewritten = from_dict(values), from_dict(transformers_v4(values))
    assert rewritten == original
    assert from_dict(transformers_v4(values) | {"qk_rope_head_dim": values["qk_rope_head_dim"]}) == original


def test_v4_inference_dialect():
    published = dataclasses.replace(from_dict(V4_FLASH), bos_token_id=None, eos_token_id=())
    assert from_dict(V4_INFERENCE) == published
    assert from_dict(V4_INFERENCE | {"n_mtp_layers": 0, "norm_eps": 1e-5, "dtype": "bf16"}) == dataclasses.replace(
        published, num_nextn_predict_layers=0, rms_norm_eps=1e-5
    )


@pytest.mark.parametrize("values", [V32, GLM5, GLM52], ids=["v32", "glm5", "glm52"])
def test_dsa_dialects_agree(values):
    assert from_dict(transformers_dsa(values)) == from_dict(values)


def test_old_rope_fields_of_glm():
    old = {k: v for k, v in GLM5.items() if k != "rope_parameters"} | {"rope_theta": 1000000, "rope_scaling": None}
    assert from_dict(old) == from_dict(GLM5)
    assert from_dict(GLM5 | {"rope_theta": 1000000}) == from_dict(GLM5)


def test_indexer_types_before_pattern_before_frequency():
    layers = {"num_hidden_layers": 4, "first_k_dense_replace": 1}
    values = GLM5 | layers | SHARED_RULE
    types = ["full", "shared", "shared", "full"]
    assert from_dict(values).indexer_types == ("full", "full", "full", "shared")
    assert from_dict(values | {"index_topk_pattern": "FSFS"}).indexer_types == ("full", "shared", "full", "shared")
    assert from_dict(values | {"index_topk_pattern": "FSFS", "indexer_types": types}).indexer_types == tuple(types)


def test_interleaving_of_the_indexer_when_absent():
    for values, expected in ((V32, False), (GLM5, True)):
        without = {k: v for k, v in values.items() if k != "indexer_rope_interleave"}
        assert from_dict(without).indexer_rope_interleave is expected


def test_compress_ratios_with_more_zeros_than_draft_blocks():
    """A later upload of V4-Flash has 46 entries for 43 layers."""
    for more in ([0], [0, 0]):
        assert from_dict(V4_FLASH | {"compress_ratios": V4_FLASH["compress_ratios"] + more}) == from_dict(V4_FLASH)
    unsaid = {k: v for k, v in V4_FLASH.items() if k != "num_nextn_predict_layers"}
    longer = from_dict(unsaid | {"compress_ratios": V4_FLASH["compress_ratios"] + [0, 0]})
    assert longer.num_nextn_predict_layers == 1


def test_compress_ratios_without_the_draft_entry():
    short = V4_FLASH | {"compress_ratios": V4_FLASH["compress_ratios"][:43]}
    assert from_dict(short) == from_dict(V4_FLASH)
    without = {k: v for k, v in V4_FLASH.items() if k != "num_nextn_predict_layers"}
    assert from_dict(without).num_nextn_predict_layers == 1
    assert from_dict(without | {"compress_ratios": short["compress_ratios"]}).num_nextn_predict_layers == 0


def test_ones_for_zeros_of_other_engines():
    """A list without any 0 may write 1 for sliding-only layers; beside a 0 it is another architecture's."""
    ones = [1 if ratio == 0 else ratio for ratio in V4_FLASH["compress_ratios"]]
    assert from_dict(V4_FLASH | {"compress_ratios": ones}) == from_dict(V4_FLASH)
    ones[0] = 0
    with pytest.raises(ConfigError, match=r"compress_ratios\[1\]=1 .*lists without 0"):
        from_dict(V4_FLASH | {"compress_ratios": ones})
    with pytest.raises(ConfigError, match=r"compress_ratios\[0\]=1"):
        from_dict(V4_FLASH | {"compress_ratios": [1, 2, *V4_FLASH["compress_ratios"][2:]]})


def test_k13_rotary_fraction_is_applied_once():
    values = transformers_v4(V4_FLASH)
    assert values["partial_rotary_factor"] == 0.125
    for given in (values, values | {"qk_rope_head_dim": 64}):
        assert from_dict(given).qk_rope_head_dim == 64
    with pytest.raises(ConfigError, match=r"partial_rotary_factor=0\.125 .*qk_rope_head_dim is 8"):
        from_dict(values | {"qk_rope_head_dim": 8})
    with pytest.raises(ConfigError, match=r"partial_rotary_factor=0\.1 "):
        from_dict(values | {"partial_rotary_factor": 0.1})
    inner = {"main": {"rope_theta": 10000, "partial_rotary_factor": 0.25}, "compress": {"rope_theta": 160000}}
    with pytest.raises(ConfigError, match=r"rope_parameters\.main\.partial_rotary_factor=0\.25"):
        from_dict(values | {"rope_parameters": inner})


@pytest.mark.parametrize(
    "config", [*tiny.CONFIGS.values(), *(from_dict(v) for v in (V4_FLASH, V4_PRO, V32, GLM5, GLM52))]
)
def test_to_dict_describes_the_configuration(config):
    values = json.loads(json.dumps(to_dict(config)))
    assert from_dict(values) == config
    mixed = dataclasses.replace(config, latent_norm_eps=1e-5) if isinstance(config, DsaConfig) else dataclasses.replace(
        config, csa_ratio=8, hca_ratio=64, layer_routing=("learned", "hash") * 50, yarn=None, eos_token_id=(1, 2)
    )  # fmt: skip
    if isinstance(mixed, V4Config):
        mixed = dataclasses.replace(mixed, layer_routing=mixed.layer_routing[: mixed.num_hidden_layers])
    assert from_dict(to_dict(mixed)) == mixed


def test_reads_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(V32))
    assert read_config(tmp_path) == read_config(tmp_path / "config.json") == from_dict(V32)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        read_config(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps(V32 | {"hidden_size": 0}))
    with pytest.raises(ConfigError, match=r"config\.json: Expected hidden_size=0"):
        read_config(tmp_path)


NO_OBJECTS = [
    (b"{", "to be JSON"),
    (b"", "to be JSON"),
    (b"\xff{}", "to be JSON: 'utf-8'"),
    (b"[" * 100_000, "too many levels"),
    (b'{"a":' * 100_000, "too many levels"),
    (b'{"top_k": 1, "top_k": 2}', "the name 'top_k' twice"),
    (b'{"top_k": ' + b"9" * 5000 + b"}", "to be JSON"),
    (b"[]", "a JSON object, got list"),
    (b"null", "a JSON object, got NoneType"),
]


@pytest.mark.parametrize(("data", "message"), NO_OBJECTS, ids=lambda x: str(x)[:20])
@pytest.mark.parametrize("name", ["config", "generation_config"])
def test_files_without_an_object(name, data, message, tmp_path):
    (tmp_path / f"{name}.json").write_bytes(data)
    with pytest.raises(ConfigError, match=rf"/{name}\.json .*{message}"):
        {"config": read_config, "generation_config": read_generation_config}[name](tmp_path)


def test_needs_no_jax():
    """The package itself: its parent imports the networks, so it is loaded from where it lies."""
    code = "import sys; sys.modules['jax'] = sys.modules['flax'] = sys.modules['numpy'] = None\n"
    code += "import types\n"
    for name in ("jmla", "jmla.models"):
        code += f"m = types.ModuleType({name!r}); m.__path__ = [{str(ROOT / name.replace('.', '/'))!r}]\n"
        code += f"sys.modules[{name!r}] = m\n"
    code += "import jmla.models.config as c; print(c.from_dict is not None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "True", done.stderr


# ---- errors


def small(values, **changes):
    """The values with changes; None removes a field."""
    return {k: v for k, v in (values | changes).items() if v is not None}


@pytest.mark.parametrize(
    "model_type",
    [
        "deepseek_v41",
        "glm5_next",
        "glm5_next_text",
        "deepseek_v3",
        "llama",
        "",
        None,
        3,
        ["deepseek_v4"],
        {"a": 1},
        True,
    ],
)
def test_unsupported_models(model_type):
    with pytest.raises(ConfigError, match=r"model_type=.*deepseek_v4, deepseek_v32, glm_moe_dsa") as caught:
        from_dict({"model_type": model_type, "hidden_size": 4})
    assert isinstance(caught.value, ValueError)
    assert repr(model_type) in str(caught.value)


@pytest.mark.parametrize("values", [[], "deepseek_v4", None, {1: 2}])
def test_not_an_object(values):
    with pytest.raises(ConfigError, match="to be an object"):
        from_dict(values)


@pytest.mark.parametrize("values", [V4_FLASH, V32, GLM5], ids=["v4", "v32", "glm"])
def test_v2_missing_index_topk_is_an_error(values):
    with pytest.raises(ValueError, match="index_topk"):
        from_dict(small(values, index_topk=None))
    with pytest.raises(ValueError, match="index_topk"):
        from_dict(values | {"index_topk": None})


def test_v6_ratio_three_is_refused():
    ratios = [0, 0, 3, *V4_FLASH["compress_ratios"][3:]]
    with pytest.raises(ConfigError, match=r"compress_ratios\[2\]=3 .*0, 4, 128"):
        from_dict(V4_FLASH | {"compress_ratios": ratios})
    for rate in (3, 1, 0, 512, -4):
        with pytest.raises(ConfigError, match=rf"compress_rate_hca={rate}"):
            from_dict(V4_FLASH | {"compress_rate_hca": rate})
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 24}
    with pytest.raises(ConfigError, match=r"compress_rates\.heavily_compressed_attention=24"):
        from_dict(transformers_v4(V4_FLASH) | {"compress_rates": rates})
    given = from_dict(V4_FLASH | {"compress_rate_hca": 8, "compress_ratios": [0, 0, *[4, 8] * 20, 4, 0]})
    assert given.layer_kinds == from_dict(V4_FLASH).layer_kinds
    assert given.hca_ratio == 8


def test_v6_compressor_state_of_another_ratio_is_refused():
    import jax.numpy as jnp

    from jmla import kernels

    state = jnp.zeros((1, 8, 32), jnp.float32)  # of ratio 4, two windows
    rows, positions = jnp.zeros((1, 1, 16)), jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="another ratio"):
        kernels.compress(rows, rows, state, positions, ratio=128, overlap=False, ape=jnp.zeros((128, 16)))
    with pytest.raises(ValueError, match="ratio=3"):
        kernels.compress(rows, rows, state, positions, ratio=3, overlap=False, ape=jnp.zeros((3, 16)))


def test_dspark_drafts():
    found = {"dspark_block_size": 5, "dspark_noise_token_id": 128799, "dspark_target_layer_ids": [40, 41, 42]}
    with pytest.raises(ConfigError, match=r"dspark_block_size=5: a DSpark draft.*supported"):
        from_dict(V4_FLASH | found | {"compress_ratios": [*V4_FLASH["compress_ratios"], 0, 0]})
    assert from_dict(V4_FLASH | {"dspark_block_size": 0}) == from_dict(V4_FLASH)


def test_v41_under_the_name_of_v4():
    with pytest.raises(ConfigError, match=r"kv_source_layer_ids.*V4\.1"):
        from_dict(V4_FLASH | {"kv_source_layer_ids": [2, 8, 14, 20]})


COMMON = [
    ({"hidden_act": "gelu"}, r"hidden_act='gelu' .*'silu'"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"mlp_bias": True}, "mlp_bias=True"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
    ({"topk_method": "greedy"}, r"topk_method='greedy' .*'noaux_tc'"),
    ({"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ({"max_position_embeddings": 2**31}, r"max_position_embeddings=2147483648 .*1\.\.2147483647"),
    ({"max_position_embeddings": 1e6}, r"max_position_embeddings=1000000\.0 .*an integer"),
    ({"hidden_size": 0}, "hidden_size=0"),
    ({"hidden_size": -4}, "hidden_size=-4"),
    ({"hidden_size": True}, "hidden_size=True"),
    ({"hidden_size": "4096"}, "hidden_size='4096'"),
    ({"num_hidden_layers": None}, "num_hidden_layers.*absent"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
    ({"rms_norm_eps": 0.0}, r"rms_norm_eps=0\.0"),
    ({"routed_scaling_factor": float("inf")}, "routed_scaling_factor=inf"),
    ({"qk_rope_head_dim": 63}, "qk_rope_head_dim=63 .*even"),
    ({"qk_rope_head_dim": 130}, "qk_rope_head_dim=130 .*at most"),
    ({"num_experts_per_tok": 1000}, "num_experts_per_tok=1000 .*at most"),
    ({"num_nextn_predict_layers": 2}, r"num_nextn_predict_layers=2 .*0\.\.1"),
    ({"torch_dtype": "int8", "dtype": "int8"}, "torch_dtype='int8'"),
    ({"eos_token_id": [1, -2]}, r"eos_token_id=\[1, -2\]"),
    ({"norm_topk_prob": 1}, "norm_topk_prob=1 .*true or false"),
    ({"mlp_layer_types": ["moe"]}, "mlp_layer_types to have .* entries"),
    ({"hidden_size": 10**400}, r"hidden_size=1000.* an integer in 1\.\."),
    ({"hidden_size": 10**5000}, "hidden_size=<int, too long to show> .* an integer"),
    ({"hidden_size": [1] * 1000}, r"hidden_size=\[1, 1.*\.\.\. to be an integer"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps=1000.* float32 number above 0"),
    ({"rms_norm_eps": 1e-300}, "rms_norm_eps=1e-300 .* float32 number"),
    ({"rms_norm_eps": 1e300}, r"rms_norm_eps=1e\+300 .* at most 3\.40282e\+38"),
    ({"num_hidden_layers": 10**6}, r"num_hidden_layers=1000000 .* 1\.\.1024"),
    ({"n_routed_experts": 2**31 - 1}, r"n_routed_experts=2147483647 .* 1\.\.4096"),
    ({"index_head_dim": 2**31 - 1}, r"index_head_dim=2147483647 .* 1\.\.65536"),
    ({"eos_token_id": 10**6}, r"eos_token_id=1000000 .* 0\.\.\d+"),
    ({"eos_token_id": [1, 10**400]}, r"eos_token_id=\[1, 1000.* 0\.\.\d+"),
    ({"eos_token_id": [True]}, r"eos_token_id=\[True\]"),
    ({"eos_token_id": {"a": 1}}, "eos_token_id={'a': 1}"),
    ({"bos_token_id": 10**6}, r"bos_token_id=1000000 .* -1\.\.\d+"),
    ({"n_group": 1.0}, r"n_group=1\.0"),
    ({"hidden_act": {"a": 1}}, "hidden_act={'a': 1}"),
]


@pytest.mark.parametrize("values", [V4_FLASH, V32, GLM5], ids=["v4", "v32", "glm"])
@pytest.mark.parametrize(("changes", "message"), COMMON)
def test_refused_in_all_families(values, changes, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(small(values) | changes)


YARN4 = V4_FLASH["rope_scaling"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compress_ratios": V4_FLASH["compress_ratios"][:42]}, "compress_ratios to have 43 entries.*got 42"),
        ({"compress_ratios": [*V4_FLASH["compress_ratios"][:43], 4]}, r"compress_ratios\[43\]=4 .*draft block"),
        ({"compress_ratios": [*V4_FLASH["compress_ratios"], 0, 128]}, r"compress_ratios\[45\]=128 .*draft block"),
        ({"compress_ratios": [0.5, *V4_FLASH["compress_ratios"][1:]]}, r"compress_ratios\[0\]=0\.5"),
        ({"compress_ratios": None}, "compress_ratios.*absent"),
        ({"compress_ratios": [1, [4], *[4] * 42]}, r"compress_ratios\[0\]=1 "),
        ({"compress_ratios": [[4], *V4_FLASH["compress_ratios"][1:]]}, r"compress_ratios\[0\]=\[4\]"),
        ({"rope_scaling": YARN4 | {"factor": 10**400}}, r"rope_scaling\.factor=1000"),
        ({"rope_theta": 1}, "rope_theta=1 .*above 1"),
        ({"head_dim": 2**31 - 2}, r"head_dim=2147483646 .* 1\.\.65536"),
        ({"layer_types": ["sliding_attention"] * 43}, "layer_types and compress_ratios"),
        ({"layer_types": ["full_attention"] * 43, "compress_ratios": None}, r"layer_types\[0\]='full_attention'"),
        ({"layer_types": ["sliding_attention"] * 42, "compress_ratios": None}, "layer_types to have 43 entries"),
        ({"num_hash_layers": None}, "num_hash_layers or n_hash_layers"),
        ({"num_hash_layers": -1}, "num_hash_layers=-1"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2"),
        ({"n_group": 8}, "n_group=8"),
        ({"o_groups": 7}, "o_groups=7 .*divisor of num_attention_heads=64"),
        ({"hc_mult": 0}, "hc_mult=0"),
        ({"swiglu_limit": 0}, "swiglu_limit=0"),
        ({"rope_scaling": YARN4 | {"type": "linear"}}, r"rope_scaling\.type='linear' .*'yarn'"),
        ({"rope_scaling": YARN4 | {"type": "yarn", "rope_type": "llama3"}}, r"rope_scaling\.(rope_)?type"),
        ({"rope_scaling": YARN4 | {"factor": 0.5}}, r"rope_scaling\.factor=0\.5"),
        ({"rope_scaling": YARN4 | {"factor": None}}, r"rope_scaling\.factor"),
        ({"rope_scaling": YARN4 | {"attention_factor": 1.27}}, r"attention_factor=1\.27"),
        ({"rope_scaling": YARN4 | {"truncate": False}}, "truncate=False"),
        ({"rope_scaling": YARN4 | {"original_max_position_embeddings": 0}}, "original_max_position_embeddings=0"),
        ({"rope_scaling": 3}, "rope_scaling=3 .*object"),
        ({"rope_theta": None}, "rope_theta"),
        ({"compress_rope_theta": -1}, "compress_rope_theta=-1"),
        ({"rope_parameters": {"main": {"rope_theta": 1}}}, "both main and compress"),
        ({"dim": 5}, "dim=5 .*equal to hidden_size=4096"),
    ],
)
def test_refused_in_v4(changes, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(V4_FLASH | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_types": ["shared", *["full"] * 77]}, r"indexer_types\[0\]='shared'"),
        ({"indexer_types": ["full"] * 77}, "indexer_types to have 78 entries.*got 77"),
        ({"indexer_types": ["half", *["full"] * 77]}, r"indexer_types\[0\]='half'"),
        ({"index_topk_pattern": "F" * 77}, "index_topk_pattern to have 78 entries"),
        ({"index_topk_pattern": [["F"], *"F" * 77]}, r"index_topk_pattern\[0\]=\['F'\]"),
        ({"moe_layer_freq": 1.0}, r"moe_layer_freq=1\.0"),
        ({"index_topk_pattern": "X" + "F" * 77}, r"index_topk_pattern\[0\]='X'"),
        ({"index_topk_pattern": "S" + "F" * 77}, r"indexer_types\[0\]='shared'"),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 0}, "index_skip_topk_offset=0"),
        ({"index_topk_freq": 0}, "index_topk_freq=0"),
        ({"n_group": 7}, "n_group=7 .*divisor of n_routed_experts=256"),
        ({"n_group": 256, "topk_group": 8}, "n_group=256"),
        ({"n_group": 8, "topk_group": 9}, "topk_group=9 .*n_group=8"),
        ({"n_group": 64, "topk_group": 1}, "num_experts_per_tok=8"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"moe_router_dtype": "bfloat16"}, "moe_router_dtype='bfloat16'"),
        ({"rope_interleave": False}, "rope_interleave=False"),
        ({"layer_types": ["sliding_attention"] * 78}, r"layer_types\[0\]"),
        ({"rope_theta": 5}, "rope_theta=5"),
        ({"rope_scaling": V32["rope_scaling"]}, "rope_parameters and rope_scaling"),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "dynamic"}}, r"rope_parameters\.rope_type='dynamic'"),
        ({"rope_parameters": {"rope_theta": 1e6, "factor": 2}}, r"rope_parameters\.factor"),
        ({"first_k_dense_replace": None}, "first_k_dense_replace"),
    ],
)
def test_refused_in_glm(changes, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(GLM5 | changes)


def test_c12_layer_zero_cannot_share():
    with pytest.raises(ConfigError, match=r"indexer_types\[0\]='shared' .*'full'"):
        from_dict(GLM52 | {"indexer_types": ["shared"] * 78})


# ---- generation_config.json


def test_generation_config(tmp_path):
    assert read_generation_config(tmp_path) == GenerationDefaults()
    values = {
        "do_sample": True,
        "temperature": 1,
        "top_p": 0.95,
        "eos_token_id": [3, 4],
        "pad_token_id": 3,
        "top_k": 50,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    read = read_generation_config(tmp_path)
    assert read == GenerationDefaults(
        temperature=1.0, top_p=0.95, top_k=50, do_sample=True, eos_token_id=(3, 4), pad_token_id=3
    )
    assert isinstance(read.temperature, float)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "bos_token_id": 0}))
    assert read_generation_config(tmp_path) == GenerationDefaults(eos_token_id=(1,), bos_token_id=0)
    for wrong in (
        {"temperature": -1},
        {"top_p": 1.5},
        {"top_p": 0},
        {"top_k": -1},
        {"eos_token_id": "x"},
        {"do_sample": 1},
        {"temperature": 10**400},
        {"temperature": float("inf")},
        {"temperature": [1]},
        {"min_p": float("nan")},
        {"repetition_penalty": 10**400},
        {"top_k": 1.5},
        {"max_new_tokens": 10**400},
        {"eos_token_id": [3, 40]},
        {"bos_token_id": 40},
    ):
        (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match=rf"/generation_config\.json: Expected {next(iter(wrong))}="):
            read_generation_config(tmp_path, vocab_size=40)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"generation_config\.json"):
        read_generation_config(tmp_path)


# ---- options of loading that the configuration decides


@pytest.mark.parametrize("values", [V4_FLASH, V32], ids=["v4", "v32"])
def test_v1_an_attention_that_is_not_sparse_is_refused_before_weights_are_read(values, tmp_path):
    import jmla

    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"implementation='dense' .*one of: .*xla"):
        jmla.load(tmp_path, implementation="dense")
    with pytest.raises(ValueError, match="kv_layout='dense'"):
        jmla.load(tmp_path, kv_layout="dense")
