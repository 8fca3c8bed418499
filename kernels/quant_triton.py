"""Scales of quantised tiles inside Triton kernels."""

import triton
import triton.language as tl

from .quant import E4M3_MAX, TINY

_E4M3_MAX = tl.constexpr(E4M3_MAX)
_TINY = tl.constexpr(TINY)


@triton.jit
def tile_scale(amax, POWER_OF_TWO: tl.constexpr):
    """Scales of tiles and their reciprocals, from the bits of the largest magnitudes; see ``quant.tile_scale``."""
    if POWER_OF_TWO:
        exponent = (amax >> 23) - 8 + ((amax & 0x7FFFFF) > 0x600000).to(tl.int32)
        exponent = tl.where(amax > 0, tl.maximum(exponent, 1), 0)
        nan = amax > 0x7F800000
        scale = tl.where(nan, amax, exponent << 23)
        inverse = tl.where(nan, amax, tl.where(exponent > 0, (254 - exponent) << 23, 0))
        return scale.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)
    else:
        scale = tl.div_rn(amax.to(tl.float32, bitcast=True), tl.full(amax.shape, _E4M3_MAX, tl.float32))
        scale = tl.where(scale < _TINY, 0.0, scale)
        return scale, tl.where(scale == 0.0, 0.0, tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), scale))
