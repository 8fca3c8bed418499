"""The packer as one Triton kernel: each program reads a few rows and writes their bytes straight to their slots."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from ..fallback import with_xla_rules
from ..launch import launch
from ..layouts import KVLayout
from ..quant_triton import tile_scale
from . import xla
from .plan import Plan

WARP_VALUES = 512  # of a block of rows, in registers of a warp
MANY_ROWS = 4096  # from which on a program takes two blocks, and the norm's weights once for both

_DTYPES = {"bfloat16": tl.bfloat16, "float32": tl.float32, "float8_e4m3fn": tl.float8e4nv}
_LARGEST = tl.constexpr(float(np.finfo(np.float32).max))


@triton.jit
def _spread(place, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """Numbers in groups of ``BLOCK`` as numbers in groups of ``SIZE``."""
    if BLOCK == SIZE:
        return place
    else:
        return place // BLOCK * SIZE + place % BLOCK


@triton.jit
def _square_sum(x, WIDTH: tl.constexpr):
    """Sums of squares of rows, neighbours first: the order does not depend on which thread holds what."""
    a, b = tl.split(tl.reshape(x, [x.shape[0], WIDTH // 2, 2]))
    total = tl.fma(a, a, b * b)
    for i in tl.static_range(1, WIDTH.bit_length() - 1):
        total = tl.sum(tl.reshape(total, [x.shape[0], WIDTH >> (i + 1), 2]), axis=2)
    return tl.reshape(total, [x.shape[0]])


@triton.jit
def _weights(weight, x, column, inside, P: tl.constexpr):
    """The norm's weights of ``x``; 1 where it has none."""
    # One weight for each value, not one row of them for all: threads that share values would have to exchange them.
    under = tl.broadcast((inside & (column < P.normed))[None, :], x)[0]
    if weight.to(tl.int64) % 16 == 0:  # nearly always, and four are loaded at a time; but vectors may start anywhere
        at = tl.multiple_of(tl.broadcast(weight + column[None, :], x)[0], [16, 16])
        weights = tl.load(at, mask=under, other=1.0)
    else:
        weights = tl.load(tl.broadcast(weight + column[None, :], x)[0], mask=under, other=1.0)
    return weights.to(tl.float32)


@triton.jit
def _under(x, column, others, P: tl.constexpr):
    """The values that are under the norm, ``others`` in the place of those that are not."""
    if P.normed == P.layout.width:
        return x
    else:
        return tl.where((column < P.normed)[None, :], x, others)


@triton.jit
def _angles(table, pair, P: tl.constexpr):
    """Cosines and sines; ``pair``: of each pair its number among the rotated ones, or one that is none."""
    HALF: tl.constexpr = P.turned // 2
    turned = ((pair >= 0) & (pair < HALF))[None, :]
    cos = tl.load(table + pair[None, :], mask=turned, other=1.0)
    sin = tl.load(table + (pair + HALF)[None, :], mask=turned, other=0.0)
    return turned, cos, sin


@triton.jit
def _rotate(x, turned, cos, sin):
    """Rotates pairs of neighbours, those that are ``turned``."""
    a, b = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    even, odd = tl.where(turned, a * cos - b * sin, a), tl.where(turned, a * sin + b * cos, b)
    return tl.reshape(tl.join(even, odd), x.shape)


@triton.jit
def _hadamard(x, WIDTH: tl.constexpr):
    """See ``quant.hadamard``."""
    shape: tl.constexpr = x.shape
    x = x * (1.0 / WIDTH)
    for i in tl.static_range(WIDTH.bit_length() - 1):
        pairs = tl.reshape(x, [shape[0], WIDTH >> (i + 1), 2, 1 << i])
        # A partner's bits are those of both without one's own: one exchange, and every value stays with its thread.
        bits = pairs.to(tl.int32, bitcast=True)
        partner = (tl.xor_sum(bits, axis=2, keep_dims=True) ^ bits).to(tl.float32, bitcast=True)
        sign = tl.broadcast((1.0 - 2.0 * tl.arange(0, 2))[None, None, :, None], pairs)[0]
        x = tl.reshape(tl.fma(pairs, sign, partner), shape)  # an exact product: a sum, and no more rounding
    return x * WIDTH**0.5


@triton.jit
def _columns(P: tl.constexpr):
    """Of the head and of the rest of a row: columns, and which of them exist."""
    place = tl.arange(0, P.head_block)
    column = _spread(place, P.tile_block, P.tile)
    behind = tl.arange(0, P.rest_block)
    return column, (column < P.head) & (place % P.tile_block < P.tile), P.head + behind, behind < P.rest


@triton.jit
def _read(first, rows, slots, table, P: tl.constexpr):
    """All that is read of a block of rows, so that it is asked for before anything waits for it."""
    START: tl.constexpr = (P.layout.width - P.turned) // 2  # pair of a row where the rotated ones start
    column, inside, behind, exists = _columns(P)
    first = first.to(tl.int64)
    row = tl.arange(0, P.rows)
    slot = tl.load(slots + first + row)
    values = rows + first * P.layout.width + (row * P.layout.width)[:, None]
    x = tl.load(values + column[None, :], mask=inside[None, :], other=0.0)
    y, turn_x, turn_y = x, (x, x, x), (x, x, x)  # which stand for what there is not
    if P.rest > 0:
        y = tl.load(values + behind[None, :], mask=exists[None, :], other=0.0)
    if P.turned > 0:
        angles = table + first * P.turned + (row * P.turned)[:, None]
        if P.turned > P.rest:
            pair = _spread(tl.arange(0, P.head_block // 2), P.tile_block // 2, P.tile // 2)
            turn_x = _angles(angles, pair - START, P)
        if P.rest > 0:
            turn_y = _angles(angles, tl.arange(0, P.rest_block // 2) + (P.head // 2 - START), P)
    return slot, x, y, turn_x, turn_y


@triton.jit
def _write(read, weights, pool, kv_scale, P: tl.constexpr, DTYPE: tl.constexpr):
    """Packs a block of rows. Their head is ``x [rows, tiles * tile]``, the rest ``y``."""
    ROWS: tl.constexpr = P.rows
    HEAD: tl.constexpr = P.head_block
    ALIGN: tl.constexpr = P.align
    SCALE_ALIGN: tl.constexpr = P.scale_align
    column, inside, behind, exists = _columns(P)
    slot, x, y, turn_x, turn_y = read
    x, y = x.to(tl.float32), y.to(tl.float32)
    if P.normed > 0:
        total = _square_sum(_under(x, column, 0.0, P), HEAD)
        if P.normed > P.head:
            total += _square_sum(_under(y, behind, 0.0, P), P.rest_block)
        factor = tl.rsqrt(total * (1.0 / P.normed) + P.eps)[:, None]
        x = _under(x * factor * weights[0], column, x, P)
        if P.normed > P.head:
            y = _under(y * factor * weights[1], behind, y, P)
    if P.turned > P.rest:
        x = _rotate(x, turn_x[0], turn_x[1], turn_x[2])
    if P.rest > 0 and P.turned > 0:
        y = _rotate(y, turn_y[0], turn_y[1], turn_y[2])

    valid = ((slot >= 0) & (slot < P.capacity))[:, None]
    page, offset = (slot // P.layout.page_size).to(tl.int64) * P.layout.page_stride, slot % P.layout.page_size
    data = tl.multiple_of(page + offset * P.layout.row_bytes, ALIGN)
    data = pool + data
    if P.plain:
        if kv_scale is not None:
            inverse = tl.div_rn(1.0, tl.load(kv_scale))
            x = x * inverse
            if P.rest > 0:
                y = y * inverse
        at = data.to(tl.pointer_type(DTYPE))[:, None]
        tl.store(at + column[None, :], x.to(DTYPE), mask=valid & inside[None, :])
        if P.rest > 0:
            tl.store(at + behind[None, :], y.to(DTYPE), mask=valid & exists[None, :])
    else:
        if P.layout.hadamard:
            x = tl.clamp(_hadamard(x, HEAD), -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
        x = tl.reshape(x, [ROWS, P.tiles_block, P.tile_block])
        # The bits of magnitudes are in their order, and a NaN is above them all.
        amax = tl.maximum(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2), P.least)
        scale, inverse = tile_scale(amax, P.layout.scale_form == "power_of_two")
        codes = tl.reshape((x * inverse[:, :, None]).to(tl.float8e4nv), [ROWS, HEAD])  # saturates at +-448
        tl.store(data[:, None] + column[None, :], codes.to(tl.uint8, bitcast=True), mask=valid & inside[None, :])
        tile = tl.arange(0, P.tiles_block)
        real = (tile < P.layout.num_tiles)[None, :]
        scales = pool + tl.multiple_of(page + (P.scale_start + offset * P.scale_step), SCALE_ALIGN)
        if P.layout.kind == "footer":
            exponent = tl.where(real, scale.to(tl.int32, bitcast=True) >> 23, 0).to(tl.uint8)
            tl.store(scales[:, None] + tile[None, :], exponent, mask=valid & (tile < P.layout.scale_bytes)[None, :])
            if P.tiles_block < P.layout.scale_bytes:
                PAD: tl.constexpr = P.pad_block
                pad = tl.arange(0, PAD)[None, :]
                unused = (pad >= P.tiles_block) & (pad < P.layout.scale_bytes)
                zeros = tl.zeros([ROWS, PAD], tl.uint8)
                tl.store(scales[:, None] + pad, zeros, mask=valid & unused)
        else:
            tl.store(scales.to(tl.pointer_type(tl.float32))[:, None] + tile[None, :], scale, mask=valid & real)
        if P.rest > 0:
            at = (data + P.layout.rope_offset).to(tl.pointer_type(tl.bfloat16))
            tl.store(at[:, None] + (behind - P.head)[None, :], y.to(tl.bfloat16), mask=valid & exists[None, :])


@triton.jit
def _pack(
    rows,
    slots,
    pool,
    weight,
    table,
    kv_scale,
    P: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Grid (rows / (P.rows * P.blocks),)."""
    first = tl.program_id(0) * (P.rows * P.blocks)
    read = _read(first, rows, slots, table, P)
    if P.blocks == 2:
        other = _read(first + P.rows, rows, slots, table, P)
    weights = (0.0, 0.0)
    if P.normed > 0:
        column, inside, behind, exists = _columns(P)
        weights = (_weights(weight, read[1], column, inside, P), 0.0)
        if P.normed > P.head:
            weights = (weights[0], _weights(weight, read[2], behind, exists, P))
    pool = pool.to(tl.pointer_type(tl.uint8))
    _write(read, weights, pool, kv_scale, P, DTYPE)
    if P.blocks == 2:
        _write(other, weights, pool, kv_scale, P, DTYPE)


def _kv_pack(
    rows: jax.Array,
    slots: jax.Array,
    pool: jax.Array,
    norm_weight: jax.Array | None,
    cos_sin: jax.Array | None,
    kv_scale: jax.Array | float | None,
    *,
    layout: KVLayout,
    eps: float,
) -> jax.Array:
    """See ``jmla.kernels.kv_pack``."""
    count = rows.shape[0]
    if count == 0 or pool.shape[0] == 0:
        return pool
    plan = Plan.of(layout, pool, norm_weight, cos_sin, eps)
    # Programs take a number of rows that divides their count, so that the count is not compiled in.
    plan = dataclasses.replace(plan, rows=math.gcd(count, max(WARP_VALUES // plan.head_block, 1)))
    if count >= MANY_ROWS and count // plan.rows % 2 == 0:
        plan = dataclasses.replace(plan, blocks=2)
    return launch(
        _pack,
        rows,
        slots,
        pool,
        norm_weight if plan.normed else None,
        cos_sin if plan.turned else None,
        None if kv_scale is None else jnp.asarray(kv_scale, jnp.float32).reshape(1),
        out=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid=(count // (plan.rows * plan.blocks),),
        aliases={2: 0},
        num_warps=min(max(plan.rows * plan.head_block // WARP_VALUES, 1), 16),
        options={"enable_fp_fusion": False},  # no product and sum may become one: bits would depend on sizes
        P=plan,
        DTYPE=_DTYPES[layout.value_dtype],
    )


kv_pack = with_xla_rules(_kv_pack, xla.kv_pack)
