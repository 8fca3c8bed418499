"""An independent writer and reader of the cache bytes, in plain NumPy and struct.

Written from the byte tables of the formats, with flat byte addresses in Python integers; no code of the library in it.
"""

import math
import struct
from collections.abc import Sequence

import numpy as np


def e4m3_decode(code: int) -> float:
    """Value of an E4M3FN byte: bias 7, no infinity, NaN at 0x7F and 0xFF."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3 = np.array([e4m3_decode(code) for code in range(256)])
MAGNITUDES = E4M3[:127]  # codes 0x00 .. 0x7E, ascending, up to 448


def e4m3_encode(values: np.ndarray) -> np.ndarray:
    """Nearest codes, ties to the even code, saturated at 448; -0.0 keeps its sign."""
    magnitude = np.minimum(np.abs(values.astype(np.float64)), 448.0)
    high = np.searchsorted(MAGNITUDES, magnitude)
    low = np.maximum(high - 1, 0)
    below, above = magnitude - MAGNITUDES[low], MAGNITUDES[high] - magnitude
    code = np.where((below < above) | ((below == above) & (low % 2 == 0)), low, high)
    return (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def bf16_bytes(values: np.ndarray) -> bytes:
    """Little-endian bf16 of finite float32 values, ties to even."""
    out = b""
    for (bits,) in struct.iter_unpack("<I", values.astype("<f4").tobytes()):
        out += struct.pack("<H", (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
    return out


def bf16_values(raw: bytes) -> np.ndarray:
    words = np.frombuffer(raw, "<u2").astype("<u4") << 16
    return words.astype("<u4").view("<f4")


def tile_scale(amax: np.float32, form: str, min_amax: float) -> np.float32:
    amax = max(np.float32(amax), np.float32(min_amax))
    if form == "float32":
        return np.float32(amax) / np.float32(448)
    if amax == 0:
        return np.float32(0)
    mantissa, exponent = math.frexp(float(amax) / 448)  # exact enough: amax has 24 bits, the quotient 53
    return np.float32(2.0 ** (exponent - 1 if mantissa == 0.5 else exponent))


def quantise_tile(values: np.ndarray, form: str, min_amax: float) -> tuple[bytes, np.float32]:
    """Codes (reciprocal form) and scale of one tile."""
    values = values.astype(np.float32)
    scale = tile_scale(np.abs(values).max(), form, min_amax)
    inverse = np.float32(0) if scale == 0 else np.float32(1) / scale
    return e4m3_encode(values * inverse).tobytes(), scale


def tiles_of(row: np.ndarray, tile: int) -> list[np.ndarray]:
    return [row[i : i + tile] for i in range(0, len(row), tile)]


def sylvester(width: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _put(flat: bytearray, address: int, raw: bytes) -> None:
    flat[address : address + len(raw)] = raw


def pack_inline(
    rows: np.ndarray, slots: Sequence[int], pool: np.ndarray, size: int, nope: int, form: str, min_amax: float
) -> np.ndarray:
    """[codes | float32 scale for each 128 | bf16 rest], one row after another."""
    flat, stride = bytearray(pool.tobytes()), pool.shape[1]
    rope = rows.shape[1] - nope
    row_bytes = nope + 4 * math.ceil(nope / 128) + 2 * rope
    for row, slot in zip(rows, slots, strict=True):
        if not 0 <= slot < len(pool) * size:
            continue
        at = (slot // size) * stride + (slot % size) * row_bytes
        pairs = [quantise_tile(tile, form, min_amax) for tile in tiles_of(row[:nope], 128)]
        codes = b"".join(code for code, _ in pairs)
        scales = b"".join(struct.pack("<f", scale) for _, scale in pairs)
        _put(flat, at, codes + scales + bf16_bytes(row[nope:]))
    return np.frombuffer(bytes(flat), np.uint8).reshape(pool.shape)


def pack_footer(
    rows: np.ndarray, slots: Sequence[int], pool: np.ndarray, size: int, nope: int, min_amax: float
) -> np.ndarray:
    """Rows [codes | bf16 rest], then behind all rows 8 bytes a row: exponent + 127 for each 64 codes, padded with 0."""
    flat, stride = bytearray(pool.tobytes()), pool.shape[1]
    row_bytes = nope + 2 * (rows.shape[1] - nope)
    scale_bytes = 8 * math.ceil(math.ceil(nope / 64) / 8)
    for row, slot in zip(rows, slots, strict=True):
        if not 0 <= slot < len(pool) * size:
            continue
        page, t = (slot // size) * stride, slot % size
        pairs = [quantise_tile(tile, "power_of_two", min_amax) for tile in tiles_of(row[:nope], 64)]
        exponents = bytes(int(math.log2(float(scale))) + 127 for _, scale in pairs)
        _put(flat, page + t * row_bytes, b"".join(code for code, _ in pairs) + bf16_bytes(row[nope:]))
        _put(flat, page + size * row_bytes + t * scale_bytes, exponents.ljust(scale_bytes, b"\0"))
    return np.frombuffer(bytes(flat), np.uint8).reshape(pool.shape)


def pack_index(
    rows: np.ndarray, slots: Sequence[int], pool: np.ndarray, size: int, rotate: bool, form: str, min_amax: float
) -> np.ndarray:
    """Codes of all rows, then a float32 scale for each. Rotated rows must have exact sums (integers, say)."""
    flat, stride = bytearray(pool.tobytes()), pool.shape[1]
    width = rows.shape[1]
    for row, slot in zip(rows, slots, strict=True):
        if not 0 <= slot < len(pool) * size:
            continue
        page, t = (slot // size) * stride, slot % size
        if rotate:
            row = (sylvester(width) @ row.astype(np.float64)).astype(np.float32) * np.float32(width**-0.5)
        code, scale = quantise_tile(row, form, min_amax)
        _put(flat, page + t * width, code)
        _put(flat, page + size * width + 4 * t, struct.pack("<f", scale))
    return np.frombuffer(bytes(flat), np.uint8).reshape(pool.shape)


def pack_plain(
    rows: np.ndarray, slots: Sequence[int], pool: np.ndarray, size: int, dtype: str, scale: float = 1.0
) -> np.ndarray:
    """Rows of float32, bf16, or e4m3 under one scale."""
    flat, stride = bytearray(pool.tobytes()), pool.shape[1]
    for row, slot in zip(rows, slots, strict=True):
        if not 0 <= slot < len(pool) * size:
            continue
        if dtype == "float32":
            raw = row.astype("<f4").tobytes()
        elif dtype == "bfloat16":
            raw = bf16_bytes(row)
        else:
            raw = e4m3_encode(row.astype(np.float32) * (np.float32(1) / np.float32(scale))).tobytes()
        _put(flat, (slot // size) * stride + (slot % size) * len(raw), raw)
    return np.frombuffer(bytes(flat), np.uint8).reshape(pool.shape)


def read_inline(pool: np.ndarray, slot: int, size: int, nope: int, rope: int) -> np.ndarray:
    tiles = math.ceil(nope / 128)
    row_bytes = nope + 4 * tiles + 2 * rope
    at = (slot // size) * pool.shape[1] + (slot % size) * row_bytes
    raw = pool.reshape(-1)[at : at + row_bytes].tobytes()
    scales = np.repeat(np.array(struct.unpack(f"<{tiles}f", raw[nope : nope + 4 * tiles])), 128)[:nope]
    codes = E4M3[np.frombuffer(raw[:nope], np.uint8)]
    return np.concatenate([codes * scales, bf16_values(raw[nope + 4 * tiles :])]).astype(np.float32)


def read_footer(pool: np.ndarray, slot: int, size: int, nope: int, rope: int) -> np.ndarray:
    row_bytes, tiles = nope + 2 * rope, math.ceil(nope / 64)
    scale_bytes = 8 * math.ceil(tiles / 8)
    flat, page, t = pool.reshape(-1), (slot // size) * pool.shape[1], slot % size
    raw = flat[page + t * row_bytes : page + (t + 1) * row_bytes].tobytes()
    exponents = flat[page + size * row_bytes + t * scale_bytes :][:tiles].astype(np.float64) - 127
    codes = E4M3[np.frombuffer(raw[:nope], np.uint8)]
    return np.concatenate([codes * np.repeat(2.0**exponents, 64)[:nope], bf16_values(raw[nope:])]).astype(np.float32)


def read_index(pool: np.ndarray, slot: int, size: int, width: int) -> np.ndarray:
    flat, page, t = pool.reshape(-1), (slot // size) * pool.shape[1], slot % size
    (scale,) = struct.unpack("<f", flat[page + size * width + 4 * t :][:4].tobytes())
    return (E4M3[flat[page + t * width :][:width]] * scale).astype(np.float32)


def normed_and_turned(
    rows: np.ndarray, weight: np.ndarray | None, eps: float, table: np.ndarray | None, rotate: bool = False
) -> np.ndarray:
    """Norm over the leading and rotation of the trailing values in float64, then Hadamard; rounded to float32."""
    out = rows.astype(np.float64)
    if weight is not None:
        n = len(weight)
        out[:, :n] *= weight / np.sqrt((out[:, :n] ** 2).mean(axis=1, keepdims=True) + eps)
    if table is not None:
        half = table.shape[1] // 2
        tail = out[:, out.shape[1] - 2 * half :]
        tail = (tail[:, 0::2] + 1j * tail[:, 1::2]) * (table[:, :half].astype(np.float64) + 1j * table[:, half:])
        out[:, out.shape[1] - 2 * half :] = np.stack([tail.real, tail.imag], axis=-1).reshape(len(out), -1)
    if rotate:
        out = out @ sylvester(out.shape[1]) / out.shape[1] ** 0.5
    return out.astype(np.float32)
