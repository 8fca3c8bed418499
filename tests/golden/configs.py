"""The golden cases: small models as the config.json of their original repositories would describe them."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One golden model.

    Attributes:
        config: config.json as a dict.
        seed: seed of weights and prompt, chosen so that no decision of the run is close (see README.md).
        prompt: number of prompt tokens.
        logits_at: positions whose logits are stored; those from `prompt` on follow the greedy continuation.
        draft_at: positions whose draft logits are stored, the prompt's last one included.
    """

    config: dict[str, Any]
    seed: int
    prompt: int
    logits_at: tuple[int, ...]
    draft_at: tuple[int, ...]


GREEDY = 64  # tokens of the greedy continuation
CHAIN = 3  # draft steps chained after the prompt's

_COMMON = {"torch_dtype": "bfloat16", "tie_word_embeddings": False, "attention_bias": False}

V4_SMALL: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 256,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_hash_layers": 3,
    "compress_ratios": [0, 0, 4, 128, 4, 128, 0],
    "compress_rate_hca": 8,
    "sliding_window": 16,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 4,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "swiglu_limit": 0.5,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 256,
    },
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
} | _COMMON

# The published attention (head 512, rope 64, window 128, ratios 4 and 128, index head 128, YaRN to 2**20) on a
# narrow and shallow model; every kind of attention and of routing occurs.
V4_TRUE_HEADS: dict[str, Any] = V4_SMALL | {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 64,
    "o_lora_rank": 32,
    "num_hash_layers": 2,
    "compress_ratios": [0, 4, 128, 4, 0],
    "sliding_window": 128,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 16,
    "swiglu_limit": 1.0,
    "rope_scaling": V4_SMALL["rope_scaling"] | {"original_max_position_embeddings": 65536},
    "max_position_embeddings": 1048576,
}
del V4_TRUE_HEADS["compress_rate_hca"]

V32: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "vocab_size": 256,
    "hidden_size": 96,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "index_topk": 8,
    "index_head_dim": 32,
    "index_n_heads": 16,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
    },
    "max_position_embeddings": 2560,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
} | _COMMON

# GLM-5: an indexer in every layer. GLM-5.2 adds sharing: full, full, full, shared, shared, shared, full, shared.
GLM: dict[str, Any] = {key: value for key, value in V32.items() if key not in ("rope_theta", "rope_scaling")} | {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 8,
    "first_k_dense_replace": 3,
    "qk_nope_head_dim": 48,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
    "indexer_rope_interleave": True,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "max_position_embeddings": 4096,
    "pad_token_id": 1,
    "eos_token_id": [1],
}
del GLM["bos_token_id"]
GLM_SHARED: dict[str, Any] = GLM | {"index_topk_freq": 4, "index_skip_topk_offset": 3}


def _case(config: dict[str, Any], seed: int, prompt: int) -> Case:
    """Stores the first positions, a spread over the prompt, its last eight, and some of the continuation."""
    spread = range(4, prompt - 8, (prompt - 12) // 20)
    logits_at = {0, 1, 2, 3, *spread, *range(prompt - 8, prompt), *range(prompt, prompt + GREEDY, 9)}
    return Case(config, seed, prompt, tuple(sorted(logits_at)), (0, 1, prompt // 2, *range(prompt - 5, prompt)))


CASES = {
    "v4_small": _case(V4_SMALL, seed=24, prompt=90),
    "v4_true_heads": _case(V4_TRUE_HEADS, seed=35, prompt=330),
    "v32": _case(V32, seed=14, prompt=90),
    "glm": _case(GLM, seed=23, prompt=90),
    "glm_shared": _case(GLM_SHARED, seed=26, prompt=90),
}
