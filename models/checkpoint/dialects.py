"""Names: which canonical tensor a checkpoint's tensor is, or is the scale of, in every dialect.

Canonical names are those of ``jmla.models.checkpoint.places.placements``. DeepSeek-V4 is found under DeepSeek's own
names, under those of transformers, under the mixture that ``save_pretrained`` writes, and under per-expert mixtures;
V3.2 and GLM under one kind of names. Experts come one by one or fused. Names are matched whole, never by a part:
``hc_attn_scale`` is a parameter, and ``x.weight_scale_inv`` must not be taken for ``x.weight``.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from jmla.models.checkpoint.places import Placement
from jmla.models.config import DsaConfig, V4Config

# What follows the name of a matrix, and what it then is.
SUFFIXES = {
    ".weight": "value",
    ".weight_packed": "value",
    ".weight_scale_inv": "scale",
    ".weight_scale": "scale",
    ".scale": "scale",
    ".weight_scale_2": "factor",
    ".weight_global_scale": "divisor",
}
# Fused experts are parameters of their own, so their suffixes may lack the ".weight".
FUSED_SUFFIXES = SUFFIXES | {
    "": "value",
    "_packed": "value",
    "_scale_inv": "scale",
    "_scale": "scale",
    "_scale_2": "factor",
    "_global_scale": "divisor",
    "_input_scale": "ignored",
    "_input_global_scale": "ignored",
}
SCALE_NAMES = (".scale", ".weight_scale_inv", ".weight_scale")
# Scales of activations and caches, and tables that are computed here.
IGNORED = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale", "rotary_emb.inv_freq")
DSPARK = re.compile(r"mtp\.\d+\.(main_proj|main_norm|markov_head|confidence_head)\b|mtp\.[1-9]\d*\.")

_V4_TOP = {"embed_tokens": "embed", "lm_head": "head"}
_V4_HYPER = {f"hc_head.{p}{n}": f"hc_head_{n}" for n in ("fn", "base", "scale") for p in ("hc_", "")}
_V4_PARTS = (
    {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "attn.sinks": "attn.attn_sink",
        "attn.q_a_proj": "attn.wq_a",
        "attn.q_a_norm": "attn.q_norm",
        "attn.q_b_proj": "attn.wq_b",
        "attn.kv_proj": "attn.wkv",
        "attn.norm": "attn.kv_norm",
        "attn.o_a_proj": "attn.wo_a",
        "attn.o_b_proj": "attn.wo_b",
        "attn.compressor.kv_proj": "attn.compressor.wkv",
        "attn.compressor.gate_proj": "attn.compressor.wgate",
        "attn.compressor.position_bias": "attn.compressor.ape",
        "attn.compressor.kv_norm": "attn.compressor.norm",
        "attn.indexer.q_b_proj": "attn.indexer.wq_b",
        "attn.indexer.scorer.weights_proj": "attn.indexer.weights_proj",
        "attn.indexer.kv_proj": "attn.indexer.compressor.wkv",
        "attn.indexer.gate_proj": "attn.indexer.compressor.wgate",
        "attn.indexer.position_bias": "attn.indexer.compressor.ape",
        "attn.indexer.kv_norm": "attn.indexer.compressor.norm",
        "ffn.gate.e_score_correction_bias": "ffn.gate.bias",
    }
    | {f"{part}_hc.{n}": f"hc_{part}_{n}" for part in ("attn", "ffn") for n in ("fn", "base", "scale")}
    | _V4_HYPER
)
_V4_MATRICES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(\w+)")
_FUSED = {"w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}
_FUSED |= {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}
_LAYER = re.compile(r"(?:model\.)?(layers|mtp)\.(\d{1,9})\.(.+)")


@functools.lru_cache(maxsize=4096)
def _v4_part(rest: str) -> str:
    """The canonical name, without its layer, of a part of a V4 layer."""
    rest = re.sub(r"^self_attn\.", "attn.", rest)
    rest = re.sub(r"^attn\.compressor\.indexer\.", "attn.indexer.", rest)
    rest = re.sub(r"^mlp\.", "ffn.", rest)
    expert = re.fullmatch(r"(ffn\.(?:shared_experts|experts\.\d+)\.)(\w+)", rest)
    if expert:
        return expert[1] + _V4_MATRICES.get(expert[2], expert[2])
    return _V4_PARTS.get(rest, rest)


@dataclass(frozen=True)
class Slice:
    """One expert's matrix inside a fused one: rows ``start..stop`` of matrix ``expert``."""

    name: str
    expert: int
    start: int
    stop: int


@dataclass(frozen=True)
class Fused:
    """A fused tensor ``[E, out, in]`` and the canonical tensors inside it."""

    shape: tuple[int, int, int]
    slices: tuple[Slice, ...]


@dataclass
class Names:
    """What each name of a checkpoint means for a configuration.

    Attributes:
        config: of the model.
        places: canonical tensors that the model takes.
        fused: fused experts by canonical name, ``...experts.gate_up_proj`` and ``...experts.down_proj``.
    """

    config: V4Config | DsaConfig
    places: Mapping[str, Placement]
    fused: dict[str, Fused] = field(init=False)

    def __post_init__(self) -> None:
        self.fused = _fused(self.places)

    def locate(self, key: str) -> tuple[str, str] | None:
        """Canonical name and role ("value", "scale", "factor", "divisor") of a checkpoint's tensor.

        The role "ignored" is that of tensors without use, "draft" that of a draft block that the model does not have.
        None if the name is unknown.
        """
        if key.endswith(IGNORED):
            return key, "ignored"
        name = self._rename(key)
        if name in self.places and not name.endswith(".weight"):
            return name, "value"
        for suffix, role in SUFFIXES.items():
            if key.endswith(suffix):
                name = self._rename(key.removesuffix(suffix)) + ".weight"
                if name in self.places:
                    return name, role
        for suffix, role in FUSED_SUFFIXES.items():
            name = self._rename(key.removesuffix(suffix)) if key.endswith(suffix) else ""
            if name in self.fused:
                return (key if role == "ignored" else name), role
        return self._without_use(key)

    def _rename(self, stem: str) -> str:
        """The canonical form of a name without its suffix."""
        layer = _LAYER.fullmatch(stem)
        if not isinstance(self.config, V4Config):
            return stem if stem.startswith(("model.", "lm_head")) else f"model.{stem}"
        if layer is None:
            top = stem.removeprefix("model.")
            return _V4_TOP.get(top, _V4_HYPER.get(top, top))
        kind, number, rest = layer.groups()
        if kind == "layers" and int(number) == self.config.num_hidden_layers:
            kind, number = "mtp", "0"
        return f"{kind}.{number}.{_v4_part(rest)}"

    def _without_use(self, key: str) -> tuple[str, str] | None:
        layer = _LAYER.fullmatch(key)
        if layer is None:
            return None
        kind, number, rest = layer[1], int(layer[2]), layer[3]
        draft = number == 0 if kind == "mtp" else number == self.config.num_hidden_layers
        if kind == "mtp" and not isinstance(self.config, V4Config):
            return None
        copies = ("emb.tok_emb.weight", "embed_tokens.weight", "head.weight", "shared_head.head.weight")
        if draft and rest in copies:
            return key, "ignored"  # copies of the embedding and the head
        if draft and self.config.num_nextn_predict_layers == 0:
            return key, "draft"
        if isinstance(self.config, DsaConfig) and rest.startswith("self_attn.indexer."):
            types = self.config.indexer_types
            if number < len(types) and types[number] == "shared":
                return key, "ignored"  # a layer that shares its choice has no use for an indexer
        return None


def _fused(places: Mapping[str, Placement]) -> dict[str, Fused]:
    """The fused tensors that hold the experts among ``places``: gate rows, then up rows; and down."""
    found: dict[str, dict[tuple[int, str], str]] = {}
    for name in places:
        match = _EXPERT.fullmatch(name.removesuffix(".weight"))
        if match is not None and match[3] in _FUSED:
            found.setdefault(match[1] + _FUSED[match[3]], {})[int(match[2]), match[3]] = name
    out = {}
    for fused, members in found.items():
        slices = []
        for (expert, part), name in members.items():
            rows = places[name].shape[0]
            start = rows if part in ("w3", "up_proj") else 0
            slices.append(Slice(name, expert, start, start + rows))
        count = 1 + max(expert for expert, _ in members)
        out[fused] = Fused((count, max(s.stop for s in slices), places[slices[0].name].shape[1]), tuple(slices))
    return out


def dialect(config: V4Config | DsaConfig, names: Mapping[str, object]) -> str:
    """What kind of names a checkpoint has, for messages."""
    if not isinstance(config, V4Config):
        return "transformers"
    if any(name.startswith("layers.") for name in names):
        return "original"
    if any(".self_attn." in name for name in names):
        return "transformers"
    return "hybrid"
