"""Checkpoints of small models in every dialect and number format, with what each of them means.

`write_fixture` stores canonical tensors in a dialect and a number format and returns their twin: the float32 values
that a correct reader gets, worked out here with plain NumPy and without the loader's code.
"""

import dataclasses
import json
import re
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jmla.models.checkpoint import quantise_fp4, quantise_fp8, write_safetensors
from jmla.models.checkpoint.places import placements
from jmla.models.checkpoint.write import encode, pack_fp4, write_index
from jmla.models.config import DsaConfig, V4Config, to_dict
from tests import tiny

# Widths above 128 that it does not divide, so that scales have partial blocks in both directions.
V4 = dataclasses.replace(
    tiny.V4, hidden_size=160, head_dim=64, q_lora_rank=144, o_lora_rank=80, moe_intermediate_size=32, vocab_size=40
)
V32 = dataclasses.replace(
    tiny.V32, hidden_size=160, q_lora_rank=144, kv_lora_rank=128, moe_intermediate_size=32, vocab_size=40
)
GLM = dataclasses.replace(
    tiny.GLM, hidden_size=160, q_lora_rank=48, kv_lora_rank=144, moe_intermediate_size=32, vocab_size=40
)
CONFIGS = {"v4": V4, "v32": V32, "glm": GLM}
V4_DIALECTS = ("original", "transformers", "hybrid", "mixed")
DSA_DIALECTS = ("transformers", "fused")
FORMATS = ("published", "fp8", "fp8_u8", "fp8_float32", "fp8_tensor", "nvfp4", "nvfp4_compressed", "bfloat16")

Tensors = dict[str, np.ndarray]


def draw(config: V4Config | DsaConfig, seed: int = 0) -> Tensors:
    """Random canonical tensors: float32, and distinct expert ids."""
    rng = np.random.default_rng(seed)
    out: Tensors = {}
    for name, place in placements(config).items():
        if place.integer:
            ids = np.tile(np.arange(config.n_routed_experts), (place.shape[0], 1))
            out[name] = rng.permuted(ids, axis=1)[:, : place.shape[1]]
        else:
            centre = 1.0 if name.endswith("norm.weight") else 0.0
            spread = place.shape[-1] ** -0.5 if len(place.shape) > 1 else 0.2
            out[name] = (centre + spread * rng.standard_normal(place.shape)).astype(np.float32)
    return out


# ---- names

_V4_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}
_V4_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "hc_attn_fn": "attn_hc.fn",
    "hc_attn_base": "attn_hc.base",
    "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn",
    "hc_ffn_base": "ffn_hc.base",
    "hc_ffn_scale": "ffn_hc.scale",
    "attn.attn_sink": "self_attn.sinks",
    "attn.wq_a": "self_attn.q_a_proj",
    "attn.q_norm": "self_attn.q_a_norm",
    "attn.wq_b": "self_attn.q_b_proj",
    "attn.wkv": "self_attn.kv_proj",
    "attn.kv_norm": "self_attn.kv_norm",
    "attn.wo_a": "self_attn.o_a_proj",
    "attn.wo_b": "self_attn.o_b_proj",
    "attn.compressor.wkv": "self_attn.compressor.kv_proj",
    "attn.compressor.wgate": "self_attn.compressor.gate_proj",
    "attn.compressor.ape": "self_attn.compressor.position_bias",
    "attn.compressor.norm": "self_attn.compressor.kv_norm",
    "attn.indexer.wq_b": "self_attn.compressor.indexer.q_b_proj",
    "attn.indexer.weights_proj": "self_attn.compressor.indexer.scorer.weights_proj",
    "attn.indexer.compressor.wkv": "self_attn.compressor.indexer.kv_proj",
    "attn.indexer.compressor.wgate": "self_attn.compressor.indexer.gate_proj",
    "attn.indexer.compressor.ape": "self_attn.compressor.indexer.position_bias",
    "attn.indexer.compressor.norm": "self_attn.compressor.indexer.kv_norm",
    "ffn.gate": "mlp.gate",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
    "ffn.shared_experts.w3": "mlp.shared_experts.up_proj",
}
_FUSED = {"w1": 0, "w3": 1, "gate_proj": 0, "up_proj": 1}


def dialect_name(name: str, dialect: str) -> str:
    """A canonical V4 name (experts apart: `fuse`) as a dialect writes it."""
    if dialect == "original" or name.startswith("mtp."):
        return name
    layer = re.fullmatch(r"(layers\.\d+\.)(.+)", name)
    if dialect == "hybrid":  # the renaming of save_pretrained, which loses kv_norm and part of the top
        if layer is None:
            return name if name == "head.weight" else _V4_TOP[name]
        return f"model.{layer[1]}{layer[2].replace('attn.kv_norm', 'attn.norm')}"
    if layer is None:
        return "head.weight" if dialect == "mixed" and name == "head.weight" else _V4_TOP[name]
    rest = layer[2]
    expert = re.fullmatch(r"ffn\.(experts\.\d+\.w[123]\.weight)", rest)
    if expert:
        return f"model.{layer[1]}mlp.{expert[1]}"
    stem = rest.removesuffix(".weight")
    return f"model.{layer[1]}{_V4_LAYER[stem]}{rest.removeprefix(stem)}"


# ---- number formats


def blocks(codes: np.ndarray, scales: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The plain meaning of a block format: every value times the scale of its block."""
    wide = np.repeat(np.repeat(scales, rows, axis=0), columns, axis=1)[: codes.shape[0], : codes.shape[1]]
    return codes.astype(np.float32) * wide.astype(np.float32)


def unpacked(packed: np.ndarray) -> np.ndarray:
    """FP4 values of packed bytes, low nibble first."""
    nibbles = np.stack([packed.view(np.uint8) & 15, packed.view(np.uint8) >> 4], axis=-1)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    return (values[nibbles & 7] * np.where(nibbles & 8, np.float32(-1), np.float32(1))).reshape(len(packed), -1)


def is_expert(name: str) -> bool:
    return re.fullmatch(r".+\.experts\.\d+\.\w+\.weight", name) is not None


def is_quantised(name: str) -> bool:
    """Whether the FP8 checkpoints have this matrix in FP8."""
    v4 = r".*(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|shared_experts\.w[123]|mtp\.0\.[eh]_proj)\.weight"
    dsa = r".*(self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|indexer\.wq_b|indexer\.wk)"
    dsa += r"|mlp\.(shared_experts\.)?(gate|up|down)_proj)\.weight"
    return is_expert(name) or re.fullmatch(v4, name) is not None or re.fullmatch(dsa, name) is not None


def store(name: str, w: np.ndarray, number_format: str, suffix: str) -> tuple[Tensors, np.ndarray]:
    """One canonical tensor in a number format, and its float32 twin. ``suffix`` is that of its scale."""
    stem = name.removesuffix(".weight")
    if np.issubdtype(w.dtype, np.integer):
        return {name: w.astype(np.int64)}, w
    if number_format == "float32":
        return {name: w.copy()}, w
    if number_format == "published" and is_expert(name):  # of DeepSeek-V4
        packed, scale = quantise_fp4(w)
        stored = {name: packed.view(np.int8), stem + suffix: scale.astype(ml_dtypes.float8_e8m0fnu)}
        return stored, blocks(unpacked(packed), scale, 1, 32)
    if number_format.startswith("nvfp4") and is_expert(name):
        return _nvfp4(stem, w, number_format == "nvfp4_compressed")
    if number_format != "bfloat16" and not number_format.startswith("nvfp4") and is_quantised(name):
        if number_format == "fp8_tensor":
            scale = np.float32(np.abs(w).max() / 448)
            codes = np.clip(w / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
            return {name: codes, stem + suffix: np.array(scale)}, codes.astype(np.float32) * scale
        codes, scales = quantise_fp8(w, power_of_two=number_format != "fp8_float32")
        kept = scales if number_format == "fp8_float32" else scales.astype(ml_dtypes.float8_e8m0fnu)
        kept = kept.view(np.uint8) if number_format == "fp8_u8" else kept
        return {name: codes, stem + suffix: kept}, blocks(codes, scales, 128, 128)
    array = encode(name, w.copy(), quantised=False)[name]
    return {name: array}, array.astype(np.float32)


def _nvfp4(stem: str, w: np.ndarray, compressed: bool) -> tuple[Tensors, np.ndarray]:
    """NVFP4: e4m3 scales of 16 values under one float32 scale, which compressed-tensors stores as its reciprocal."""
    whole = np.float32(np.abs(w).max() / (448 * 6))
    tiles = w.reshape(len(w), -1, 16)
    scale = np.maximum(np.abs(tiles).max(axis=-1) / 6 / whole, 2.0**-9).astype(ml_dtypes.float8_e4m3fn)
    packed = pack_fp4((tiles / (scale.astype(np.float32) * whole)[..., None]).reshape(w.shape))
    value = blocks(unpacked(packed), scale, 1, 16)
    if compressed:
        reciprocal = np.float32(1) / whole
        names = (f"{stem}.weight_packed", f"{stem}.weight_scale", f"{stem}.weight_global_scale")
        extra = {f"{stem}.input_global_scale": np.ones(1, np.float32)}
        stored = dict(zip(names, (packed, scale, np.array([reciprocal], np.float32)), strict=True)) | extra
        return stored, value / reciprocal
    names = (f"{stem}.weight", f"{stem}.weight_scale", f"{stem}.weight_scale_2")
    stored = dict(zip(names, (packed, scale, np.array(whole)), strict=True)) | {f"{stem}.input_scale": np.array(whole)}
    return stored, value * whole


# ---- files


def build(
    config: V4Config | DsaConfig, tensors: Tensors, *, dialect: str, number_format: str = "float32", suffix: str = ""
) -> tuple[Tensors, Tensors]:
    """What a checkpoint stores under which names, and the float32 twin under canonical names.

    Args:
        suffix: of scales; default the one that the dialect has.
    """
    v4 = isinstance(config, V4Config)
    suffix = suffix or (".scale" if dialect in ("original", "hybrid") and v4 else ".weight_scale_inv")
    stored: Tensors = {}
    twin: Tensors = {}
    fused: dict[tuple[str, str], dict[tuple[int, int], str]] = {}
    for name, w in tensors.items():
        expert = re.fullmatch(r"(?!mtp\.)(.+\.experts)\.(\d+)\.(\w+)\.weight", name)
        if expert and dialect == ("transformers" if v4 else "fused"):
            whole = "down_proj" if expert[3] in ("w2", "down_proj") else "gate_up_proj"
            fused.setdefault((expert[1], whole), {})[int(expert[2]), _FUSED.get(expert[3], 0)] = name
            continue
        parts, twin[name] = store(name, w, number_format, suffix)
        stem = name.removesuffix(".weight")
        renamed = dialect_name(name, dialect).removesuffix(".weight") if v4 else stem
        stored |= {renamed + part.removeprefix(stem): array for part, array in parts.items()}
    for (base, whole), members in fused.items():
        parts, values = _store_fused(tensors, members, number_format)
        base = re.sub(r"^(layers\.\d+\.)ffn\.", r"model.\1mlp.", base)
        stored |= {f"{base}.{whole}{part}": array for part, array in parts.items()}
        twin |= values
    return stored, twin


def _store_fused(tensors: Tensors, members: dict[tuple[int, int], str], number_format: str) -> tuple[Tensors, Tensors]:
    """Stacked experts by what follows their fused name, and their twins. Gate and up rows may share scale blocks."""
    stacks: dict[str, list[np.ndarray]] = {}
    twin: Tensors = {}
    suffixes = {".weight": "", ".weight_scale": "_scale", ".weight_scale_2": "_scale_2", ".s": "_scale_inv"}
    suffixes |= {".weight_packed": "_packed", ".weight_global_scale": "_global_scale"}
    suffixes |= {".input_global_scale": "_input_global_scale"}
    for expert in range(1 + max(e for e, _ in members)):
        names = [members[expert, j] for j in (0, 1) if (expert, j) in members]
        matrix = np.concatenate([tensors[name] for name in names])
        parts, values = store("x.experts.0.w1.weight", matrix, number_format, ".s")
        for name, array in parts.items():
            part = name.removeprefix("x.experts.0.w1")
            if part in suffixes:
                stacks.setdefault(suffixes[part], []).append(array)
        twin |= dict(zip(names, np.split(values, len(names)), strict=True))
    return {part: np.stack(arrays) for part, arrays in stacks.items()}, twin


def write_fixture(
    folder: Path,
    config: V4Config | DsaConfig,
    tensors: Tensors,
    *,
    dialect: str,
    number_format: str = "float32",
    suffix: str = "",
    shards: int = 1,
) -> Tensors:
    """Writes a checkpoint directory; returns the twin. With shards, a weight and its scale lie in different files."""
    stored, twin = build(config, tensors, dialect=dialect, number_format=number_format, suffix=suffix)
    write_stored(folder, config, stored, shards)
    return twin


def write_stored(folder: Path, config: V4Config | DsaConfig, stored: Tensors, shards: int = 1) -> None:
    """Writes config.json and tensors as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_dict(config)))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", stored)
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        names = sorted(stored)[shard::shards]
        write_safetensors(folder / file, {name: stored[name] for name in names})
        weight_map |= dict.fromkeys(names, file)
    write_index(folder, weight_map, sum(array.nbytes for array in stored.values()))


def write_raw(file: Path, entries: dict[str, tuple[str, list[int], bytes]], patch: Any = None) -> None:
    """Writes a safetensors file from dtype codes, shapes and bytes; ``patch(header)`` may damage the header."""
    header, position = {}, 0
    for name, (code, shape, data) in entries.items():
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    if patch is not None:
        patch(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in entries.values()))
