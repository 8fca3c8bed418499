"""Configuration of DeepSeek-V4, from every dialect of its config.json."""

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
    one_of,
    read_dtype,
    read_theta,
    read_yarn,
    unsupported,
)

# Field names of DeepSeek's own inference/config.json, by the name in the config.json of the model repository.
ALIASES = {
    "hidden_size": ("dim",),
    "moe_intermediate_size": ("moe_inter_dim",),
    "num_hidden_layers": ("n_layers",),
    "num_hash_layers": ("n_hash_layers",),
    "num_attention_heads": ("n_heads",),
    "num_experts_per_tok": ("n_activated_experts",),
    "scoring_func": ("score_func",),
    "routed_scaling_factor": ("route_scale",),
    "qk_rope_head_dim": ("rope_head_dim",),
    "sliding_window": ("window_size",),
    "rms_norm_eps": ("norm_eps",),
    "num_nextn_predict_layers": ("n_mtp_layers",),
    "original_max_position_embeddings": ("original_seq_len",),
    "n_routed_experts": ("num_local_experts",),
    "torch_dtype": ("dtype",),
}
KINDS = {0: "window", 4: "csa", 128: "hca"}
LAYER_TYPES = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "csa",
    "heavily_compressed_attention": "hca",
}
ROUTING = {"hash_moe": "hash", "moe": "learned"}
PAGE_TOKENS = 256  # raw tokens of a cache page, which holds whole compression windows


@dataclasses.dataclass(frozen=True)
class V4Config:
    """DeepSeek-V4 as the code runs it.

    Attributes:
        model_type: "deepseek_v4".
        layer_kinds: attention of each trunk layer: "window" (sliding only), "csa" (compressed sparse) or "hca"
            (heavily compressed).
        csa_ratio, hca_ratio: tokens that one compressed entry stands for; published models have 4 and 128.
        layer_routing: experts of each trunk layer chosen by "hash" of the token id or "learned".
        rope_theta: rotary base of window layers; ``compress_rope_theta`` and ``yarn`` are those of all others.
        num_nextn_predict_layers: draft blocks, 0 or 1; ``draft_kind`` is the attention of its layer.
        eos_token_id: ids that end a text, maybe none.
        torch_dtype: dtype that the checkpoint declares.

    All other fields are those of config.json.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    layer_kinds: tuple[str, ...]
    csa_ratio: int
    hca_ratio: int
    layer_routing: tuple[str, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    yarn: Yarn | None
    max_position_embeddings: int
    num_nextn_predict_layers: int
    draft_kind: str
    bos_token_id: int | None
    eos_token_id: tuple[int, ...]
    pad_token_id: int | None
    torch_dtype: str


def read_v4(values: Mapping[str, Any]) -> V4Config:
    """Reads the config.json of a DeepSeek-V4 repository, DeepSeek's inference/config.json, or what transformers saves.

    Raises:
        ConfigError: a missing, contradictory or unsupported field.
    """
    if isinstance(values.get("dtype"), str) and values["dtype"] in ("fp8", "bf16") and "dim" in values:
        values = {key: value for key, value in values.items() if key != "dtype"}  # of the matrices, not of activations
    fields = Fields(values, ALIASES)
    _check_relatives(fields)
    check_common(fields)
    fields.choice("scoring_func", ("sqrtsoftplus",), "sqrtsoftplus")
    fields.choice("num_key_value_heads", (1,), 1)
    fields.choice("n_group", (1,), 1)
    layers = fields.integer("num_hidden_layers", high=LAYERS_MAX)
    vocab_size = fields.integer("vocab_size")
    ratios = fields.get("compress_ratios", (list, tuple), "a list", ())
    drafts = fields.integer("num_nextn_predict_layers", int(len(ratios) > layers), low=0, high=1)
    csa, hca = _rates(fields)
    kinds, draft = _kinds(fields, layers, csa, hca)
    head_dim = fields.integer("head_dim", high=WIDTH_MAX)
    theta, compress_theta, yarn = _rope(fields)
    config = V4Config(
        model_type="deepseek_v4",
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        num_hidden_layers=layers,
        num_attention_heads=fields.integer("num_attention_heads"),
        head_dim=head_dim,
        qk_rope_head_dim=_rope_dim(fields, head_dim),
        q_lora_rank=fields.integer("q_lora_rank"),
        o_groups=fields.integer("o_groups"),
        o_lora_rank=fields.integer("o_lora_rank"),
        sliding_window=fields.integer("sliding_window"),
        layer_kinds=kinds,
        csa_ratio=csa or 4,
        hca_ratio=hca or 128,
        layer_routing=_routing(fields, layers),
        index_n_heads=fields.integer("index_n_heads"),
        index_head_dim=fields.integer("index_head_dim", high=WIDTH_MAX),
        index_topk=fields.integer("index_topk"),
        n_routed_experts=fields.integer("n_routed_experts", high=EXPERTS_MAX),
        num_experts_per_tok=fields.integer("num_experts_per_tok"),
        n_shared_experts=fields.integer("n_shared_experts"),
        moe_intermediate_size=fields.integer("moe_intermediate_size"),
        routed_scaling_factor=fields.number("routed_scaling_factor"),
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        swiglu_limit=fields.number("swiglu_limit"),
        hc_mult=fields.integer("hc_mult"),
        hc_sinkhorn_iters=fields.integer("hc_sinkhorn_iters"),
        hc_eps=fields.number("hc_eps", 1e-6),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        compress_rope_theta=compress_theta,
        yarn=yarn,
        max_position_embeddings=_positions(fields, yarn),
        num_nextn_predict_layers=drafts,
        draft_kind=draft,
        bos_token_id=fields.token("bos_token_id", vocab_size),
        eos_token_id=fields.tokens("eos_token_id", vocab_size),
        pad_token_id=fields.token("pad_token_id"),
        torch_dtype=read_dtype(fields),
    )
    check_divides("o_groups", config.o_groups, "num_attention_heads", config.num_attention_heads)
    check_at_most("num_experts_per_tok", config.num_experts_per_tok, "n_routed_experts", config.n_routed_experts)
    check_at_most("qk_rope_head_dim", config.qk_rope_head_dim, "index_head_dim", config.index_head_dim)
    return config


def _check_relatives(fields: Fields) -> None:
    """Refuses DeepSeek-V4.1 under the name of V4, and DSpark drafts."""
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
        fields.absent(name, "this is DeepSeek-V4.1, another architecture; supported: deepseek_v4")
    for name in fields.values:
        if name.startswith("dspark_"):
            fields.absent(
                name,
                "a DSpark draft, which is not supported; supported: the draft block of the first release "
                "(num_nextn_predict_layers 1, no dspark fields), or none",
            )


def _rates(fields: Fields) -> tuple[int | None, int | None]:
    """Compression ratios of CSA and HCA layers where they are given."""
    rates = fields.section("compress_rates")
    out = []
    for name, kind in (
        ("compress_rate_csa", "compressed_sparse_attention"),
        ("compress_rate_hca", "heavily_compressed_attention"),
    ):
        inner = rates.integer(kind, None, low=2, high=PAGE_TOKENS) if rates is not None else None
        outer = fields.integer(name, None, low=2, high=PAGE_TOKENS)
        if inner is not None and outer is not None and inner != outer:
            raise unsupported(name, outer, f"equal to compress_rates.{kind}={inner}")
        rate = inner if outer is None else outer
        if rate is not None and PAGE_TOKENS % rate:
            raise unsupported(name if outer else f"compress_rates.{kind}", rate, f"a divisor of {PAGE_TOKENS}")
        out.append(rate)
    return out[0], out[1]


def _kinds(fields: Fields, layers: int, csa: int | None, hca: int | None) -> tuple[tuple[str, ...], str]:
    """Attention of the trunk layers and of the draft block."""
    given = None
    if fields.has("layer_types"):
        types = fields.items("layer_types", tuple(LAYER_TYPES), layers)
        given = tuple(LAYER_TYPES[kind] for kind in types)
        if not fields.has("compress_ratios"):
            return given, "window"
    ratios = fields.get("compress_ratios", (list, tuple), "a list of 0, 4 and 128, or else layer_types")
    if len(ratios) < layers:
        raise ConfigError(
            f"Expected compress_ratios to have {layers} entries (num_hidden_layers), or more for draft blocks; "
            f"got {len(ratios)}"
        )
    known: dict[int, str] = KINDS | {r: k for r, k in ((csa, "csa"), (hca, "hca")) if r is not None and r not in KINDS}
    # TensorRT-LLM and vllm-ascend write 1 for sliding-only layers where DeepSeek writes 0. Only a list without any 0
    # can be theirs; in DeepSeek-V4.1, which has 0, 1 and 2, the value means something else.
    if 1 in ratios and 0 not in ratios and all(one_of(r, (*known, 1)) for r in ratios):
        known[1] = "window"
    for i, ratio in enumerate(ratios):
        if not one_of(ratio, known):
            hint = "; 1 stands for 0 only in lists without 0" if ratio == 1 else ""
            raise unsupported(
                f"compress_ratios[{i}]",
                ratio,
                f"one of {', '.join(str(r) for r in sorted(known))} (others only as given by compress_rates){hint}",
            )
    kinds = tuple(known[r] for r in ratios)
    if given is not None and given != kinds[:layers]:
        raise ConfigError("Expected layer_types and compress_ratios to describe the same layers; leave one of them out")
    for i in range(layers, len(kinds)):  # one a draft block; some uploads have more entries than blocks
        if kinds[i] != "window":
            raise unsupported(f"compress_ratios[{i}]", ratios[i], "0: the draft block has a sliding window only")
    return kinds[:layers], "window"


def _routing(fields: Fields, layers: int) -> tuple[str, ...]:
    if fields.has("mlp_layer_types"):
        return tuple(ROUTING[kind] for kind in fields.items("mlp_layer_types", tuple(ROUTING), layers))
    hashed = min(fields.integer("num_hash_layers", low=0), layers)
    return ("hash",) * hashed + ("learned",) * (layers - hashed)


def _rope_dim(fields: Fields, head_dim: int) -> int:
    """Width of the rotated part of a head: given, or as a fraction of the head, which is applied once."""
    dim = fields.integer("qk_rope_head_dim", None)
    sections = [fields]
    rope = fields.section("rope_parameters")
    if rope is not None:
        sections += [s for s in (rope, rope.section("main"), rope.section("compress")) if s is not None]
    for section in sections:
        factor = section.number("partial_rotary_factor", None)
        if factor is None:
            continue
        key, width = f"{section.where}partial_rotary_factor", head_dim * factor
        if width != round(width) or not 0 < width <= head_dim:
            raise unsupported(key, factor, f"a fraction of head_dim={head_dim} that is a whole number")
        if dim is not None and dim != round(width):
            raise unsupported(key, factor, f"{dim} / {head_dim}, as qk_rope_head_dim is {dim}")
        dim = round(width)
    if dim is None:
        dim = fields.integer("qk_rope_head_dim")  # raises: absent
    check_even("qk_rope_head_dim", dim)
    check_at_most("qk_rope_head_dim", dim, "head_dim", head_dim)
    return dim


def _rope(fields: Fields) -> tuple[float, float, Yarn | None]:
    """Rotary base of window layers, that of compressing layers, and the scaling of the latter."""
    rope, scaling = fields.section("rope_parameters"), fields.section("rope_scaling")
    main = compress = None
    if rope is not None:
        main, compress = rope.section("main"), rope.section("compress")
        if (main is None) != (compress is None):
            raise ConfigError("Expected rope_parameters to have both main and compress, or neither")
    if main is not None and read_yarn(main, fields) is not None:
        raise unsupported("rope_parameters.main.rope_type", "yarn", "'default': sliding layers are not scaled")
    described = compress or rope
    if described is not None:
        yarn = read_yarn(described, fields)
        if scaling is not None and read_yarn(scaling, fields) != yarn:
            raise ConfigError("Expected rope_parameters and rope_scaling to say the same; leave one of them out")
    elif scaling is not None:
        yarn = read_yarn(scaling, fields)
    elif fields.has("rope_factor"):  # inference/config.json
        flat = {name: fields.values[name] for name in ("beta_fast", "beta_slow") if name in fields.values}
        flat |= {"rope_type": "yarn", "factor": fields.number("rope_factor")}
        yarn = read_yarn(Fields(flat), fields) if fields.integer("original_max_position_embeddings", 0, low=0) else None
    else:
        yarn = None
    theta = read_theta(fields, "rope_theta", main if main is not None else rope)
    compress_theta = read_theta(fields, "compress_rope_theta", compress)
    if yarn is not None:  # this family scales neither cosines nor scores
        yarn = dataclasses.replace(yarn, mscale=None, mscale_all_dim=None)
    return theta, compress_theta, yarn


def _positions(fields: Fields, yarn: Yarn | None) -> int:
    if fields.has("max_position_embeddings") or not (fields.has("dim") and yarn is not None):
        return fields.integer("max_position_embeddings")
    longest = int(yarn.factor * yarn.original_max_position_embeddings)
    return Fields({"rope_factor * original_seq_len": longest}).integer("rope_factor * original_seq_len")


def v4_to_dict(config: V4Config) -> dict[str, Any]:
    """The config.json of the original dialect that describes ``config``; ``read_v4`` gives it back."""
    ratios = {kind: ratio for ratio, kind in KINDS.items()}
    out: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "num_key_value_heads": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    out |= dataclasses.asdict(config)
    for name in ("layer_kinds", "layer_routing", "csa_ratio", "hca_ratio", "yarn", "draft_kind"):
        del out[name]
    kinds = (*config.layer_kinds, *("window",) * config.num_nextn_predict_layers)
    out["compress_ratios"] = [ratios[kind] for kind in kinds]
    if config.csa_ratio != 4:
        out["compress_rate_csa"] = config.csa_ratio
    if config.hca_ratio != 128:
        out["compress_rate_hca"] = config.hca_ratio
    hashed = config.layer_routing.count("hash")
    if "hash" in config.layer_routing[hashed:]:
        names = {kind: name for name, kind in ROUTING.items()}
        out["mlp_layer_types"] = [names[kind] for kind in config.layer_routing]
    else:
        out["num_hash_layers"] = hashed
    if config.yarn is not None:
        scaling = dataclasses.asdict(config.yarn)
        out["rope_scaling"] = {"type": "yarn"} | {k: v for k, v in scaling.items() if v is not None}
    out["eos_token_id"] = list(config.eos_token_id) if len(config.eos_token_id) != 1 else config.eos_token_id[0]
    return {name: value for name, value in out.items() if value is not None}
