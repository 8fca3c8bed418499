"""Where each tensor of a checkpoint goes among the parameters of a model."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jmla.models import dsa, v4
from jmla.models.config import DsaConfig, V4Config
from jmla.models.params import Config, Kind, draft_kind, draft_module, ends_module, layer_module, layer_stacks


@dataclasses.dataclass(frozen=True)
class Piece:
    """One copy from a checkpoint tensor: ``params[path][index] = tensor.reshape(reshape)[take]``."""

    path: tuple[str, ...]
    index: tuple[Any, ...]
    reshape: tuple[int, ...] | None = None
    take: tuple[Any, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a canonical checkpoint tensor goes.

    Attributes:
        shape: logical (dequantised) shape, ``[out, in]`` for matrices.
        pieces: the copies that distribute it.
        optional: belongs to the draft block, without which the model still runs.
        integer: expert ids; stays int32.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    optional: bool = False
    integer: bool = False


def placements(config: Config, drafting: bool = True) -> dict[str, Placement]:
    """Canonical checkpoint names to the places they fill.

    Canonical names are those of the published checkpoints: DeepSeek's own for V4, the Hugging Face ones for V3.2 and
    GLM, with experts one by one and the draft block under ``mtp.0.`` or the layer after the last.
    """
    is_v4 = isinstance(config, V4Config)
    out = dict(_v4_ends(config) if isinstance(config, V4Config) else _dsa_ends(config))
    for number, stack in enumerate(layer_stacks(config)):
        for repeat in range(stack.repeats):
            for j, kind in enumerate(stack.unit):
                layer = stack.first + repeat * len(stack.unit) + j
                prefix = f"layers.{layer}." if is_v4 else f"model.layers.{layer}."
                for name, place in _layer(config, kind):
                    out[prefix + name] = _under(place, ("stacks", f"{number:02d}", str(j)), (repeat,))
    if drafting and config.num_nextn_predict_layers:
        prefix = "mtp.0." if is_v4 else f"model.layers.{config.num_hidden_layers}."
        for name, place in _layer(config, draft_kind(config)):
            out[prefix + name] = dataclasses.replace(_under(place, ("draft", "layer"), ()), optional=True)
        extras = _v4_draft(config) if isinstance(config, V4Config) else _dsa_draft(config)
        for name, place in extras:
            out[prefix + name] = dataclasses.replace(_under(place, ("draft",), ()), optional=True)
    return out


Places = Iterator[tuple[str, Placement]]


def _under(place: Placement, path: tuple[str, ...], index: tuple[Any, ...]) -> Placement:
    pieces = tuple(dataclasses.replace(p, path=path + p.path, index=index + p.index) for p in place.pieces)
    return dataclasses.replace(place, pieces=pieces)


def _whole(shape: tuple[int, ...], *path: str, index: tuple[Any, ...] = (), reshape: Any = None) -> Placement:
    return Placement(shape, (Piece(path, index or (slice(None),), reshape),))


def _vector(module: Any, name: str, part: int | None = None) -> Placement:
    """A named array of a module's packed vectors, or part of it along its first axis."""
    where, shape = module.small.place(name)
    if part is not None:
        size = (where.stop - where.start) // shape[0]
        where, shape = slice(where.start + part * size, where.start + (part + 1) * size), shape[1:]
    return Placement(shape, (Piece(("small", "values"), (where,), (where.stop - where.start,)),))


def _layer(config: Config, kind: Kind) -> Places:
    if isinstance(config, V4Config) and isinstance(kind, v4.LayerKind):
        return _v4_layer(config, kind)
    if isinstance(config, DsaConfig) and isinstance(kind, dsa.LayerKind):
        return _dsa_layer(config, kind)
    raise TypeError(f"Expected {kind=} to belong to the family of {config.model_type}")


def _gated(name: str, names: tuple[str, str, str], width: int, hidden: int, path: tuple[str, ...], at: tuple) -> Places:
    """The three matrices of a gated feed-forward; gate and up share one destination, gate rows first."""
    gate, up, down = names
    gate_up, out = (*path[:-1], path[-1] + "gate_up"), (*path[:-1], path[-1] + "down")
    yield f"{name}.{gate}.weight", _whole((width, hidden), *gate_up, index=(*at, slice(0, width)))
    yield f"{name}.{up}.weight", _whole((width, hidden), *gate_up, index=(*at, slice(width, 2 * width)))
    yield f"{name}.{down}.weight", _whole((hidden, width), *out, index=at)


def _compressor(name: str, norm: str, module: Any, hidden: int, width: int, ratio: int, path: str) -> Places:
    yield f"{name}.wkv.weight", _whole((width, hidden), path, "proj", index=(slice(0, width),))
    yield f"{name}.wgate.weight", _whole((width, hidden), path, "proj", index=(slice(width, 2 * width),))
    yield f"{name}.ape", _whole((ratio, width), path, "ape")
    yield f"{name}.norm.weight", _vector(module, norm)


def _v4_layer(c: V4Config, kind: v4.LayerKind) -> Places:
    module, hidden = layer_module(c, kind, "float32"), c.hidden_size
    mixes = (2 + c.hc_mult) * c.hc_mult
    yield "attn_norm.weight", _vector(module, "attn_norm")
    yield "ffn_norm.weight", _vector(module, "ffn_norm")
    for part, name in enumerate(("attn", "ffn")):
        yield f"hc_{name}_fn", _whole((mixes, c.hc_mult * hidden), "hc_fn", index=(part,))
        yield f"hc_{name}_base", _vector(module, "hc_base", part)
        yield f"hc_{name}_scale", _vector(module, "hc_scale", part)
    yield "attn.attn_sink", _vector(module, "attn_sink")
    yield "attn.wq_a.weight", _whole((c.q_lora_rank, hidden), "wq_a")
    yield "attn.q_norm.weight", _vector(module, "q_norm")
    yield "attn.wq_b.weight", _whole((c.num_attention_heads * c.head_dim, c.q_lora_rank), "wq_b")
    yield "attn.wkv.weight", _whole((c.head_dim, hidden), "wkv")
    yield "attn.kv_norm.weight", _vector(module, "kv_norm")
    group_width = c.num_attention_heads * c.head_dim // c.o_groups
    yield (
        "attn.wo_a.weight",
        _whole((c.o_groups * c.o_lora_rank, group_width), "wo_a", reshape=(c.o_groups, c.o_lora_rank, group_width)),
    )
    yield "attn.wo_b.weight", _whole((hidden, c.o_groups * c.o_lora_rank), "wo_b")
    if kind.attention != "window":
        overlap = kind.attention == "csa"
        width, ratio = (2 * c.head_dim, c.csa_ratio) if overlap else (c.head_dim, c.hca_ratio)
        yield from _compressor("attn.compressor", "compressor_norm", module, hidden, width, ratio, "compressor")
    if kind.attention == "csa":
        width = 2 * c.index_head_dim
        yield "attn.indexer.wq_b.weight", _whole((c.index_n_heads * c.index_head_dim, c.q_lora_rank), "index_q")
        yield "attn.indexer.weights_proj.weight", _whole((c.index_n_heads, hidden), "index_weights")
        yield from _compressor("attn.indexer.compressor", "indexer_norm", module, hidden, width, c.csa_ratio, "indexer")
    yield "ffn.gate.weight", _whole((c.n_routed_experts, hidden), "moe", "gate")
    if kind.routing == "hash":
        table = _whole((c.vocab_size, c.num_experts_per_tok), "moe", "fixed")
        yield "ffn.gate.tid2eid", dataclasses.replace(table, integer=True)
    else:
        yield "ffn.gate.bias", _vector(module, "gate_bias")
    names = ("w1", "w3", "w2")
    for e in range(c.n_routed_experts):
        yield from _gated(f"ffn.experts.{e}", names, c.moe_intermediate_size, hidden, ("moe", ""), (e,))
    shared = c.moe_intermediate_size * c.n_shared_experts
    yield from _gated("ffn.shared_experts", names, shared, hidden, ("moe", "shared_"), ())


def _v4_head(c: V4Config, module: Any) -> Places:
    yield "hc_head_fn", _whole((c.hc_mult, c.hc_mult * c.hidden_size), "hyper", "fn")
    yield "hc_head_base", _vector(module, "hc_base")
    yield "hc_head_scale", _vector(module, "hc_scale")
    yield "norm.weight", _vector(module, "norm")


def _v4_ends(c: V4Config) -> Places:
    table = (c.vocab_size, c.hidden_size)
    yield "embed.weight", _under(_whole(table, "embed"), ("ends",), ())
    yield "head.weight", _under(_whole(table, "head"), ("ends",), ())
    for name, place in _v4_head(c, ends_module(c, "float32")):
        yield name, _under(place, ("ends",), ())


def _v4_draft(c: V4Config) -> Places:
    module, square = draft_module(c, "float32"), (c.hidden_size, c.hidden_size)
    yield "e_proj.weight", _whole(square, "e_proj")
    yield "h_proj.weight", _whole(square, "h_proj")
    yield "enorm.weight", _vector(module, "enorm")
    yield "hnorm.weight", _vector(module, "hnorm")
    yield from _v4_head(c, module)


def _dsa_layer(c: DsaConfig, kind: dsa.LayerKind) -> Places:
    module, hidden, heads, latent = (
        layer_module(c, kind, "float32"),
        c.hidden_size,
        c.num_attention_heads,
        c.kv_lora_rank,
    )
    nope, value = c.qk_nope_head_dim, c.v_head_dim
    yield "input_layernorm.weight", _vector(module, "attn_norm")
    yield "post_attention_layernorm.weight", _vector(module, "ffn_norm")
    yield "self_attn.q_a_proj.weight", _whole((c.q_lora_rank, hidden), "wq_a")
    yield "self_attn.q_a_layernorm.weight", _vector(module, "q_norm")
    yield "self_attn.q_b_proj.weight", _whole((heads * (nope + c.qk_rope_head_dim), c.q_lora_rank), "wq_b")
    yield "self_attn.kv_a_proj_with_mqa.weight", _whole((latent + c.qk_rope_head_dim, hidden), "wkv_a")
    yield "self_attn.kv_a_layernorm.weight", _vector(module, "kv_norm")
    by_head = (heads, nope + value, latent)
    everything = slice(None)
    yield (
        "self_attn.kv_b_proj.weight",
        Placement(
            (heads * (nope + value), latent),
            (
                Piece(("w_uk",), (everything,), by_head, (everything, slice(0, nope))),
                Piece(("w_uv",), (everything,), by_head, (everything, slice(nope, None))),
            ),
        ),
    )
    yield "self_attn.o_proj.weight", _whole((hidden, heads * value), "wo")
    if kind.indexer == "full":
        yield "self_attn.indexer.wq_b.weight", _whole((c.index_n_heads * c.index_head_dim, c.q_lora_rank), "index_q")
        yield "self_attn.indexer.wk.weight", _whole((c.index_head_dim, hidden), "index_k")
        yield "self_attn.indexer.k_norm.weight", _vector(module, "k_norm")
        yield "self_attn.indexer.k_norm.bias", _vector(module, "k_norm_bias")
        yield "self_attn.indexer.weights_proj.weight", _whole((c.index_n_heads, hidden), "index_weights")
    names = ("gate_proj", "up_proj", "down_proj")
    if kind.mlp == "dense":
        yield from _gated("mlp", names, c.intermediate_size, hidden, ("mlp", ""), ())
        return
    yield "mlp.gate.weight", _whole((c.n_routed_experts, hidden), "moe", "gate")
    yield "mlp.gate.e_score_correction_bias", _vector(module, "gate_bias")
    for e in range(c.n_routed_experts):
        yield from _gated(f"mlp.experts.{e}", names, c.moe_intermediate_size, hidden, ("moe", ""), (e,))
    shared = c.moe_intermediate_size * c.n_shared_experts
    yield from _gated("mlp.shared_experts", names, shared, hidden, ("moe", "shared", ""), ())


def _dsa_ends(c: DsaConfig) -> Places:
    table = (c.vocab_size, c.hidden_size)
    yield "model.embed_tokens.weight", _under(_whole(table, "embed"), ("ends",), ())
    yield "lm_head.weight", _under(_whole(table, "head"), ("ends",), ())
    yield "model.norm.weight", _under(_vector(ends_module(c, "float32"), "norm"), ("ends",), ())


def _dsa_draft(c: DsaConfig) -> Places:
    module = draft_module(c, "float32")
    yield "eh_proj.weight", _whole((c.hidden_size, 2 * c.hidden_size), "eh_proj")
    yield "enorm.weight", _vector(module, "enorm")
    yield "hnorm.weight", _vector(module, "hnorm")
    yield "shared_head.norm.weight", _vector(module, "norm")
