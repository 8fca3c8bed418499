"""Writing checkpoints: DeepSeek-V4 as it is published, other families plain."""

import json
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jmla.models.checkpoint.dequant import FP4_GROUP, FP8_BLOCK
from jmla.models.checkpoint.places import placements
from jmla.models.checkpoint.reader import DTYPES, INDEX, SINGLE
from jmla.models.config import DsaConfig, V4Config, to_dict

CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
E4M3_MAX, E2M1_MAX = 448.0, 6.0
# Stored dtypes of the published DeepSeek-V4 checkpoints, by name; matrices not named here are BF16.
_FP8 = re.compile(
    r".*(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|ffn\.shared_experts\.w[123]|mtp\.\d+\.[eh]_proj)\.weight"
)
_EXPERT = re.compile(r".*\.experts\.\d+\.w[123]\.weight")
_FLOAT32 = re.compile(r".*(hc_(attn|ffn|head)_(fn|base|scale)|attn_sink|\.ape|gate\.bias|e_score_correction_bias)")


def _power_of_two(x: np.ndarray) -> np.ndarray:
    """The smallest power of two at or above ``x > 0``, from the bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.int32)
    exponent = np.clip((bits >> 23) + ((bits & 0x7FFFFF) != 0), 1, 254)
    return (exponent << 23).astype(np.int32).view(np.float32)


def quantise_fp8(w: np.ndarray, block: int = FP8_BLOCK, power_of_two: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Rounds a matrix to e4m3 with one scale a block, ``max(amax, 1e-4) / 448`` or the power of two at or above it.

    Args:
        w: ``[out, in]`` float32.
        block: rows and columns of a block; those at the edges are partial.
        power_of_two: form of the scales, exact as E8M0.

    Returns:
        Codes ``[out, in]`` float8_e4m3fn, and float32 scales ``[ceil(out / block), ceil(in / block)]``.
    """
    rows, columns = w.shape
    r, c = -(-rows // block), -(-columns // block)
    padded = np.zeros((r * block, c * block), np.float32)
    padded[:rows, :columns] = w
    tiles = padded.reshape(r, block, c, block)
    scale = np.maximum(np.abs(tiles).max(axis=(1, 3)), np.float32(1e-4)) / np.float32(E4M3_MAX)
    scale = _power_of_two(scale) if power_of_two else scale
    codes = np.clip(tiles / scale[:, None, :, None], -E4M3_MAX, E4M3_MAX)
    return codes.reshape(padded.shape)[:rows, :columns].astype(ml_dtypes.float8_e4m3fn), scale


def quantise_fp4(w: np.ndarray, group: int = FP4_GROUP) -> tuple[np.ndarray, np.ndarray]:
    """Rounds a matrix to e2m1 with one power-of-two scale for ``group`` inputs.

    Args:
        w: ``[out, in]`` float32, ``in`` a multiple of ``group``.

    Returns:
        Packed ``[out, in / 2]`` uint8, even columns in the low nibbles; and float32 scales ``[out, in / group]``.

    Raises:
        ValueError: rows that are not whole groups.
    """
    rows, columns = w.shape
    if columns % group or group % 2:
        raise ValueError(f"Expected the width {columns} of FP4 rows to be a multiple of {group=}, and that to be even")
    tiles = w.astype(np.float32).reshape(rows, -1, group)
    amax = np.maximum(np.abs(tiles).max(axis=-1), np.float32(E2M1_MAX * 2.0**-126))
    scale = _power_of_two(amax / np.float32(E2M1_MAX))
    return pack_fp4((tiles / scale[..., None]).reshape(rows, columns)), scale


def pack_fp4(values: np.ndarray) -> np.ndarray:
    """Rounds float32 ``[..., n]`` to e2m1, clipped to 6, two in a byte: ``[..., n / 2]`` uint8."""
    codes = np.clip(values, -E2M1_MAX, E2M1_MAX).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def encode(name: str, w: np.ndarray, *, quantised: bool = True, fp4_experts: bool = True) -> dict[str, np.ndarray]:
    """A canonical DeepSeek-V4 tensor as the published checkpoints store it: itself and maybe a scale, by name.

    Args:
        name: canonical name.
        w: float32, or integers.
        quantised: FP8 and FP4 where the published checkpoints have them; else BF16.
        fp4_experts: routed experts in FP4, else in FP8 as the base models have them.
    """
    if np.issubdtype(w.dtype, np.integer):
        return {name: w.astype(np.int64)}
    w = np.asarray(w, np.float32)
    scale_name = name.removesuffix(".weight") + ".scale"
    expert = _EXPERT.fullmatch(name) is not None
    if quantised and expert and fp4_experts:
        packed, scale = quantise_fp4(w)
        return {name: packed.view(np.int8), scale_name: scale.astype(ml_dtypes.float8_e8m0fnu)}
    if quantised and (expert or _FP8.fullmatch(name)):
        codes, scale = quantise_fp8(w)
        return {name: codes, scale_name: scale.astype(ml_dtypes.float8_e8m0fnu)}
    return {name: w if _FLOAT32.fullmatch(name) else w.astype(ml_dtypes.bfloat16)}


def save_checkpoint(
    path: str | os.PathLike[str],
    config: V4Config | DsaConfig,
    tensors: Mapping[str, np.ndarray],
    *,
    quantised: bool = True,
    fp4_experts: bool = True,
    shards: int = 1,
) -> None:
    """Writes config.json and safetensors files.

    DeepSeek-V4 is written as it is published: FP8 in blocks of 128 x 128 and FP4 experts, both with E8M0 scales;
    BF16, F32 and I64 for the rest. V3.2 and GLM are written in BF16 and F32.

    Args:
        path: directory, made if it does not exist.
        config: of the model.
        tensors: canonical name (see ``jmla.models.checkpoint.places.placements``) to float32 or integer array.
        quantised: False writes BF16 where V4 has FP8 and FP4.
        fp4_experts: False writes routed experts in FP8.
        shards: number of files; above 1 there is an index.

    Raises:
        ValueError: tensors that are missing, unknown or misshapen; rows of experts that are not whole groups.
    """
    expected = placements(config)
    wrong = [
        name
        for name, place in expected.items()
        if (name not in tensors and not place.optional) or (name in tensors and tensors[name].shape != place.shape)
    ]
    wrong += [name for name in tensors if name not in expected]
    if wrong:
        raise ValueError(f"Expected the tensors of this configuration; missing, unknown or misshapen: {wrong[:20]}")
    if shards < 1:
        raise ValueError(f"Expected {shards=} to be at least 1")
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    described = to_dict(config)
    if quantised and isinstance(config, V4Config):
        described["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "scale_fmt": "ue8m0",
        }
        if fp4_experts:
            described["expert_dtype"] = "fp4"
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    quantised = quantised and isinstance(config, V4Config)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    size = 0
    for shard in range(shards):
        file = SINGLE if shards == 1 else f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part: dict[str, np.ndarray] = {}
        for name in names[shard * len(names) // shards : (shard + 1) * len(names) // shards]:
            part |= encode(name, tensors[name], quantised=quantised, fp4_experts=fp4_experts)
        write_safetensors(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
        size += sum(array.nbytes for array in part.values())
    if shards > 1:
        write_index(folder, weight_map, size)


def write_index(folder: Path, weight_map: Mapping[str, str], total_size: int) -> None:
    """Writes the index of a sharded checkpoint."""
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def write_safetensors(file: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes arrays, those of ml_dtypes included, to a safetensors file, widest values first so that all are aligned.

    Raises:
        TypeError: a dtype that the format lacks.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    for name in order:
        array = tensors[name]
        if array.dtype not in CODES:
            raise TypeError(f"Expected {name} to have one of the dtypes {', '.join(DTYPES)}, got {array.dtype}")
        stop = position + array.nbytes
        header[name] = {"dtype": CODES[array.dtype], "shape": list(array.shape), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            stream.write(np.ascontiguousarray(tensors[name]).view(np.uint8).data if tensors[name].size else b"")


def collect_tensors(config: V4Config | DsaConfig, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Canonical tensors, float32 or integer, of a model's parameters: the way back from ``load_params``."""
    out = {}
    for name, place in placements(config, "draft" in params).items():
        array = np.empty(place.shape, np.int32 if place.integer else np.float32)
        for piece in place.pieces:
            source: Any = params
            for key in piece.path:
                source = source[key]
            view = array if piece.reshape is None else array.reshape(piece.reshape)
            view[... if piece.take is None else piece.take] = np.asarray(source)[piece.index]
        out[name] = array
    return out
