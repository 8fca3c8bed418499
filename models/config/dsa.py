"""Configuration of DeepSeek-V3.2 and GLM-5, from every dialect of their config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jmla.models.config.common import (
    EXPERTS_MAX,
    LAYERS_MAX,
    WIDTH_MAX,
    ConfigError,
    Fields,
    Yarn,
    check_at_most,
    check_common,
    check_divides,
    check_even,
    read_dtype,
    read_theta,
    read_yarn,
    unsupported,
)

ALIASES = {
    "n_routed_experts": ("num_experts", "num_local_experts"),
    "torch_dtype": ("dtype",),
}
SPARSE_TYPES = ("indexed_attention", "deepseek_sparse_attention")  # what transformers calls every layer of these models
PATTERN = {"F": "full", "S": "shared"}


@dataclasses.dataclass(frozen=True)
class DsaConfig:
    """DeepSeek-V3.2 or GLM-5 as the code runs it.

    Attributes:
        model_type: "deepseek_v32" or "glm_moe_dsa".
        mlp_layer_types: feed-forward of each trunk layer: "dense" or "sparse" (experts).
        latent_norm_eps: of the norms of the query and KV latents; 1e-6 unless config.json has the field.
        indexer_types: each trunk layer has an indexer of its own ("full") or takes the choice of the nearest full
            layer before it ("shared").
        indexer_rope_interleave: pairing of the indexer's rotary embedding.
        index_share_for_mtp_iteration: whether further draft steps attend the positions that the first one chose (see
            ``selected`` of ``jmla.draft``).
        num_nextn_predict_layers: draft blocks, 0 or 1.
        eos_token_id: ids that end a text, maybe none.
        torch_dtype: dtype that the checkpoint declares.

    All other fields are those of config.json.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    mlp_layer_types: tuple[str, ...]
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    latent_norm_eps: float
    rope_theta: float
    yarn: Yarn | None
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    indexer_types: tuple[str, ...]
    indexer_rope_interleave: bool
    index_share_for_mtp_iteration: bool
    max_position_embeddings: int
    num_nextn_predict_layers: int
    bos_token_id: int | None
    eos_token_id: tuple[int, ...]
    pad_token_id: int | None
    torch_dtype: str


def read_dsa(values: Mapping[str, Any]) -> DsaConfig:
    """Reads the config.json of a DeepSeek-V3.2 or GLM-5 repository, or what transformers saves.

    ``head_dim`` is not read: these files have it wrong.

    Raises:
        ConfigError: a missing, contradictory or unsupported field.
    """
    fields = Fields(values, ALIASES)
    model_type = fields.choice("model_type", ("deepseek_v32", "glm_moe_dsa"))
    glm = model_type == "glm_moe_dsa"
    check_common(fields)
    fields.choice("scoring_func", ("sigmoid",), "sigmoid")
    fields.choice("moe_layer_freq", (1,), 1)
    fields.choice("moe_router_dtype", ("float32", "fp32"), "float32")
    if not fields.flag("rope_interleave", True):
        raise unsupported("rope_interleave", False, "true")
    layers = fields.integer("num_hidden_layers", high=LAYERS_MAX)
    vocab_size = fields.integer("vocab_size")
    if fields.has("layer_types"):
        fields.items("layer_types", SPARSE_TYPES, layers)
    theta, yarn = _rope(fields)
    one = 1 if glm else ...
    config = DsaConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        moe_intermediate_size=fields.integer("moe_intermediate_size"),
        num_hidden_layers=layers,
        mlp_layer_types=_mlp_types(fields, layers),
        num_attention_heads=fields.integer("num_attention_heads"),
        q_lora_rank=fields.integer("q_lora_rank"),
        kv_lora_rank=fields.integer("kv_lora_rank", high=WIDTH_MAX),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim", high=WIDTH_MAX),
        v_head_dim=fields.integer("v_head_dim"),
        n_routed_experts=fields.integer("n_routed_experts", high=EXPERTS_MAX),
        n_shared_experts=fields.integer("n_shared_experts"),
        num_experts_per_tok=fields.integer("num_experts_per_tok"),
        n_group=fields.integer("n_group", one),
        topk_group=fields.integer("topk_group", one),
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        routed_scaling_factor=fields.number("routed_scaling_factor"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5 if glm else 1e-6),
        latent_norm_eps=fields.number("latent_norm_eps", 1e-6),
        rope_theta=theta,
        yarn=yarn,
        index_n_heads=fields.integer("index_n_heads"),
        index_head_dim=fields.integer("index_head_dim", high=WIDTH_MAX),
        index_topk=fields.integer("index_topk"),
        indexer_types=_indexer_types(fields, layers),
        indexer_rope_interleave=fields.flag("indexer_rope_interleave", glm),
        index_share_for_mtp_iteration=fields.flag("index_share_for_mtp_iteration", False),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        num_nextn_predict_layers=fields.integer("num_nextn_predict_layers", 0, low=0, high=1),
        bos_token_id=fields.token("bos_token_id", vocab_size),
        eos_token_id=fields.tokens("eos_token_id", vocab_size),
        pad_token_id=fields.token("pad_token_id"),
        torch_dtype=read_dtype(fields),
    )
    _check(config)
    return config


def _check(c: DsaConfig) -> None:
    """Refuses widths and counts that do not fit together."""
    check_even("qk_rope_head_dim", c.qk_rope_head_dim)
    check_at_most("qk_rope_head_dim", c.qk_rope_head_dim, "index_head_dim", c.index_head_dim)
    check_divides("n_group", c.n_group, "n_routed_experts", c.n_routed_experts)
    check_at_most("topk_group", c.topk_group, "n_group", c.n_group)
    per_group = c.n_routed_experts // c.n_group
    if c.n_group > 1 and per_group < 2:
        raise unsupported("n_group", c.n_group, f"at most half of n_routed_experts={c.n_routed_experts}")
    reachable = c.topk_group * per_group
    check_at_most("num_experts_per_tok", c.num_experts_per_tok, "topk_group * n_routed_experts / n_group", reachable)
    if c.indexer_types[0] != "full":
        raise unsupported("indexer_types[0]", c.indexer_types[0], "'full': there is no earlier layer to share with")


def _rope(fields: Fields) -> tuple[float, Yarn | None]:
    """Rotary base and scaling, from ``rope_parameters`` or from ``rope_theta`` and ``rope_scaling``."""
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    if new is None:
        return read_theta(fields, "rope_theta"), read_yarn(old, fields)
    yarn = read_yarn(new, fields)
    if old is not None and read_yarn(old, fields) != yarn:
        raise ConfigError("Expected rope_parameters and rope_scaling to say the same; leave one of them out")
    return read_theta(fields, "rope_theta", new), yarn


def _mlp_types(fields: Fields, layers: int) -> tuple[str, ...]:
    if fields.has("mlp_layer_types"):
        return fields.items("mlp_layer_types", ("dense", "sparse"), layers)
    dense = min(fields.integer("first_k_dense_replace", low=0), layers)
    return ("dense",) * dense + ("sparse",) * (layers - dense)


def _indexer_types(fields: Fields, layers: int) -> tuple[str, ...]:
    """Explicit types, else the pattern of F and S, else every ``freq``-th layer after the first ``offset``.

    The rule of GLM-5.2: layer i has an indexer iff ``max(i - offset + 1, 0) % freq == 0``; all do without the fields.
    """
    if fields.has("indexer_types"):
        return fields.items("indexer_types", ("full", "shared"), layers)
    if fields.has("index_topk_pattern"):
        pattern = fields.get("index_topk_pattern", (str, list, tuple), "a string of F and S")
        entries = [PATTERN.get(letter, letter) if isinstance(letter, str) else letter for letter in pattern]
        return Fields({"index_topk_pattern": entries}).items("index_topk_pattern", ("full", "shared"), layers)
    freq, offset = fields.integer("index_topk_freq", 1), fields.integer("index_skip_topk_offset", 2, low=0)
    types = tuple("full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(layers))
    if types[0] != "full":
        raise unsupported("index_skip_topk_offset", offset, f"such that layer 0 has an indexer ({freq=}): 1 or more")
    return types


def dsa_to_dict(config: DsaConfig) -> dict[str, Any]:
    """A config.json that describes ``config``; ``read_dsa`` gives it back."""
    glm = config.model_type == "glm_moe_dsa"
    out: dict[str, Any] = {
        "architectures": ["GlmMoeDsaForCausalLM" if glm else "DeepseekV32ForCausalLM"],
        "num_key_value_heads": config.num_attention_heads,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    out |= dataclasses.asdict(config)
    scaling = out.pop("yarn")
    if scaling is not None:
        out["rope_scaling"] = {"type": "yarn"} | {k: v for k, v in scaling.items() if v is not None}
    for name in ("mlp_layer_types", "indexer_types", "eos_token_id"):
        out[name] = list(out[name])
    if not glm:
        out["eos_token_id"] = out["eos_token_id"][0] if len(config.eos_token_id) == 1 else out["eos_token_id"]
    return {name: value for name, value in out.items() if value is not None}
