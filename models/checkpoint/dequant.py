"""From stored numbers to float32: block FP8, per-tensor FP8, FP4 with E8M0 scales, NVFP4.

All products are formed in float32 from left to right, ``value * scale``, then ``* weight_scale_2`` or
``/ weight_global_scale``: the first product is exact for FP4, so each weight is rounded once.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jmla.models.checkpoint.reader import Checkpoint, Stored

FP4_GROUP = 32  # values under one scale, along the input
NVFP4_GROUP = 16
FP8_BLOCK = 128

_E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
# Both values of a byte, that of the low nibble first.
_PAIRS = np.stack([np.tile(_E2M1, 16), np.repeat(_E2M1, 16)], axis=-1)
_E8M0 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def unpack_fp4(packed: np.ndarray, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Values ``start..stop`` of rows of packed e2m1: byte j holds value 2j in its low nibble, 2j + 1 in its high one.

    Args:
        packed: ``[..., n / 2]`` uint8 or int8.
        start, stop: counted in values; default all.

    Returns:
        ``[..., stop - start]`` float32.

    Raises:
        ValueError: a bound in the middle of a byte, or outside the row.
    """
    width = 2 * packed.shape[-1]
    stop = width if stop is None else stop
    if start % 2 or stop % 2 or not 0 <= start <= stop <= width:
        raise ValueError(f"Expected {start=} and {stop=} to be even and in 0..{width}: two values share a byte")
    part = packed[..., start // 2 : stop // 2].view(np.uint8)
    return _PAIRS[part].reshape(*part.shape[:-1], stop - start)


def decode_scale(scale: np.ndarray, e4m3: bool = False) -> np.ndarray:
    """Scales as float32. Bytes are E8M0 exponents, ``2^(byte - 127)`` with 255 as NaN, or e4m3 codes if so told."""
    if scale.dtype == np.uint8:
        return (_E4M3 if e4m3 else _E8M0)[scale]
    if scale.dtype == ml_dtypes.float8_e8m0fnu:
        return _E8M0[scale.view(np.uint8)]
    return scale.astype(np.float32)


def fit_block(shape: tuple[int, int], grid: tuple[int, int], hint: tuple[int, int] | None) -> tuple[int, int] | None:
    """The block of which ``grid`` scales cover a matrix of ``shape``, blocks at the edges being partial.

    A square block (128 if it fits, else a power of two, else what divides evenly), the ``hint`` of the configuration
    if that fits, or one scale a row. Dividing the shape by the grid is not enough: 5 scales over 576 rows are blocks
    of 128, not of 116.

    Returns:
        Rows and columns of a block; None if no such block exists.
    """
    if hint is not None and all(-(-n // b) == g for n, b, g in zip(shape, hint, grid, strict=True)):
        return hint
    if grid == (1, 1):
        return shape
    low, high = 1, max(*shape, 1)
    for n, g in zip(shape, grid, strict=True):
        if not 1 <= g <= n:
            return None
        low = max(low, -(-n // g))
        high = min(high, (n - 1) // (g - 1)) if g > 1 else high
    if low <= high:
        power = 1 << (low - 1).bit_length()
        for block in (FP8_BLOCK, power):
            if low <= block <= high:
                return block, block
        if all(g == 1 or n == low * g for n, g in zip(shape, grid, strict=True)):
            return low, low
    if grid == (shape[0], 1):
        return 1, shape[1]
    return None


@dataclass(frozen=True)
class Source:
    """A weight in a checkpoint and what it takes to read it.

    Attributes:
        weight: the stored numbers, ``[out, in]`` or ``[E, out, in]`` (packed: half of ``in``), or any shape if plain.
        shape: logical shape.
        form: "plain", "integer", "fp8" (block), "fp8_tensor", "fp4" (E8M0 scales) or "nvfp4".
        scale: the scales of blocks.
        block: rows and columns under one scale.
        factor: second scale, of the whole matrix; ``divides`` if it is the reciprocal.
    """

    weight: Stored
    shape: tuple[int, ...]
    form: str = "plain"
    scale: Stored | None = None
    block: tuple[int, int] = (1, 1)
    factor: Stored | None = None
    divides: bool = False

    @property
    def parts(self) -> tuple[Stored, ...]:
        return tuple(part for part in (self.weight, self.scale, self.factor) if part is not None)


def read_scales(checkpoint: Checkpoint, source: Source, expert: int | None) -> np.ndarray:
    """The float32 scales ``[rows, columns]`` of one matrix of a quantised source."""
    if source.scale is None:
        raise ValueError(f"Expected {source.weight.name} to have a scale")
    return decode_scale(_matrix(checkpoint.view(source.scale), expert), e4m3=source.form == "nvfp4")


def _matrix(scale: np.ndarray, expert: int | None) -> np.ndarray:
    """One expert's part of a stored scale; what has a single value serves all, vectors hold one an expert."""
    if scale.size == 1:
        return scale.reshape(1, 1)
    if expert is None:
        return scale
    part = scale[expert : expert + 1]
    return part.reshape(1, 1) if part.size == 1 else part[0]


def read_rows(checkpoint: Checkpoint, source: Source, expert: int | None, start: int, stop: int) -> np.ndarray:
    """Rows ``start..stop`` of a matrix: float32, or for plain and integer sources the stored dtype.

    Args:
        expert: which matrix of a fused ``[E, out, in]`` source; None for others.
    """
    stored = checkpoint.view(source.weight)
    part = (stored if expert is None else stored[expert])[start:stop]
    if source.form in ("plain", "integer"):
        return part
    values = unpack_fp4(part) if source.form in ("fp4", "nvfp4") else _E4M3[part.view(np.uint8)]
    scales = read_scales(checkpoint, source, expert)
    high, wide = source.block
    scales = scales[np.arange(start, stop) // high] if len(scales) > 1 else scales
    if scales.shape[-1] == 1:
        values *= scales
    elif values.shape[-1] == scales.shape[-1] * wide:
        tiles = values.reshape(len(values), -1, wide)
        tiles *= scales[:, :, None]
    else:
        values *= np.repeat(scales, wide, axis=-1)[:, : values.shape[-1]]
    if source.factor is not None:
        factor = _matrix(checkpoint.view(source.factor), expert).astype(np.float32)
        values = np.divide(values, factor, out=values) if source.divides else np.multiply(values, factor, out=values)
    return values
