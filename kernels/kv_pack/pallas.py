"""The packer as one Pallas kernel: each program reads a row and writes its bytes straight to its slot.

Rows are cut in two as in ``triton.py``, see ``plan.py``.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from ..fallback import with_xla_rules
from ..launch_pallas import divide, launch, store
from ..layouts import KVLayout, is_raw
from ..quant import E4M3_MAX, TINY
from . import xla
from .plan import Plan

THREAD_VALUES = 16  # of a thread

_LARGEST = float(jnp.finfo(jnp.float32).max)


class _Part(NamedTuple):
    """One of the two blocks of a row.

    Attributes:
        x: ``[N]`` float32.
        column: ``[N]`` place of each value in the row.
        inside: ``[N]``, whether the value exists.
        pair: ``[N / 2]`` number of each pair of neighbours in the row.
    """

    x: jax.Array
    column: jax.Array
    inside: jax.Array
    pair: jax.Array


def _places(count: int) -> jax.Array:
    return jnp.arange(count, dtype=jnp.int32)


def _spread(place: jax.Array, block: int, size: int) -> jax.Array:
    """Numbers in groups of ``block`` as numbers in groups of ``size``."""
    return place if block == size else jax.lax.div(place, block) * size + jax.lax.rem(place, block)


def _clip(x: jax.Array, bound: float) -> jax.Array:
    """To +-bound; NaN stays NaN, which maxima and minima on the GPU would drop."""
    return jnp.where(x > bound, bound, jnp.where(x < -bound, -bound, x))


def _square_sum(x: jax.Array) -> jax.Array:
    """The sum of squares ``[1]``, neighbours first: the order does not depend on which thread holds what."""
    x = x * x
    while x.size > 1:
        x = jnp.sum(x.reshape(-1, 2), axis=1)
    return x


def _rotate(part: _Part, table: Any, row: jax.Array, plan: Plan) -> jax.Array:
    pair, half = part.pair - (plan.layout.width - plan.turned) // 2, plan.turned // 2
    turned = (pair >= 0) & (pair < half)
    cos = plgpu.load(table.at[row, pair], mask=turned, other=1.0)
    sin = plgpu.load(table.at[row, pair + half], mask=turned, other=0.0)
    a, b = jnp.unstack(part.x.reshape(-1, 2), axis=1)
    even, odd = jnp.where(turned, a * cos - b * sin, a), jnp.where(turned, a * sin + b * cos, b)
    return jnp.stack([even, odd], axis=1).reshape(part.x.shape)


def _hadamard(x: jax.Array) -> jax.Array:
    """See ``quant.hadamard``."""
    size = x.size
    for i in range(size.bit_length() - 1):
        pairs = 0.5 * x.reshape(size >> (i + 1), 2, 1 << i)
        sign = (1 - 2 * _places(2)).astype(jnp.float32)[None, :, None]
        total, difference = jnp.sum(pairs, axis=1)[:, None], jnp.sum(sign * pairs, axis=1)[:, None]
        x = jnp.where(sign > 0, total, difference).reshape(size)
    return _clip(x * size**0.5, _LARGEST)


def _tile_scale(amax: jax.Array, power_of_two: bool) -> tuple[jax.Array, jax.Array]:
    """Scales of tiles and their reciprocals, from the bits of the largest magnitudes; see ``quant.tile_scale``."""
    if power_of_two:
        exponent = (amax >> 23) - 8 + ((amax & 0x7FFFFF) > 0x600000).astype(jnp.int32)
        exponent = jnp.where(amax > 0, jnp.maximum(exponent, 1), 0)
        nan = amax > 0x7F800000
        scale = jnp.where(nan, amax, exponent << 23)
        inverse = jnp.where(nan, amax, jnp.where(exponent > 0, (254 - exponent) << 23, 0))
        return _float(scale), _float(inverse)
    scale = divide(_float(amax), jnp.float32(E4M3_MAX))
    scale = jnp.where(scale < TINY, 0.0, scale)
    return scale, jnp.where(scale == 0, 0.0, divide(jnp.float32(1), scale))


def _float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _bits(x: jax.Array) -> jax.Array:
    """The bits of float32 values, or of narrower ones zero-extended, as int32."""
    size = x.dtype.itemsize
    raw = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.int32}[size])
    return raw.astype(jnp.int32)


def _as(x: jax.Array, dtype: str) -> jax.Array:
    return (_clip(x, E4M3_MAX) if dtype == "float8_e4m3fn" else x).astype(dtype)


def _pack(
    old: Any, rows: Any, slots: Any, weight: Any, table: Any, kv_scale: Any, pool: Any, *, plan: Plan, raw: bool
) -> None:
    """Grid (rows,); ``pool`` is ``old``, updated in place."""
    layout = plan.layout
    row = pl.program_id(0)
    slot = slots[row]
    page, offset = jax.lax.div(slot, layout.page_size), jax.lax.rem(slot, layout.page_size)

    def load(column: jax.Array, inside: jax.Array, pair: jax.Array) -> _Part:
        x = plgpu.load(rows.at[row, column], mask=inside, other=0.0).astype(jnp.float32)
        return _Part(x, column, inside, pair)

    def put(start: jax.Array, place: jax.Array, x: jax.Array, inside: jax.Array) -> None:
        """Stores the bytes of ``x [N]`` one behind the other, those of value i from byte ``start + place[i]`` on."""
        size = x.dtype.itemsize
        byte = _places(size)
        at, inside = start + place[:, None] + byte[None, :], jnp.broadcast_to(inside[:, None], (x.size, size))
        values = ((_bits(x)[:, None] >> (8 * byte)[None, :]) & 0xFF).astype(jnp.uint8)
        store(pool, (page, at), values, inside)

    @pl.when((slot >= 0) & (slot < plan.capacity))
    def _() -> None:
        place = _places(plan.head_block)
        column = _spread(place, plan.tile_block, plan.tile)
        inside = (column < plan.head) & (jax.lax.rem(place, plan.tile_block) < plan.tile)
        pair = _spread(_places(plan.head_block // 2), plan.tile_block // 2, plan.tile // 2)
        parts = [load(column, inside, pair)]
        if plan.rest:
            behind = _places(plan.rest_block)
            pair = plan.head // 2 + _places(plan.rest_block // 2)
            parts.append(load(plan.head + behind, behind < plan.rest, pair))

        if plan.normed:
            under = [part.inside & (part.column < plan.normed) for part in parts]
            total = sum(_square_sum(jnp.where(u, part.x, 0.0)) for part, u in zip(parts, under, strict=True))
            factor = jax.lax.rsqrt(total * jnp.float32(1.0 / plan.normed) + plan.eps)
            for i, (part, u) in enumerate(zip(parts, under, strict=True)):
                scale = plgpu.load(weight.at[part.column], mask=u, other=1.0).astype(jnp.float32)
                parts[i] = part._replace(x=jnp.where(u, part.x * factor * scale, part.x))
        if plan.turned:
            parts[-1] = parts[-1]._replace(x=_rotate(parts[-1], table, row, plan))
            if plan.turned > plan.rest > 0:
                parts[0] = parts[0]._replace(x=_rotate(parts[0], table, row, plan))

        start = offset * layout.row_bytes
        if plan.plain:
            inverse = None if kv_scale is None else divide(jnp.ones(1, jnp.float32), kv_scale[...])
            for part in parts:
                x = _as(part.x if inverse is None else part.x * inverse, layout.value_dtype)
                if raw:
                    put(start, part.column * x.dtype.itemsize, x, part.inside)
                else:
                    store(pool, (page, offset * layout.width + part.column), x, part.inside)
            return
        head = parts[0]
        x = _hadamard(head.x) if layout.hadamard else head.x
        tiles = x.reshape(plan.tiles_block, plan.tile_block)
        # The bits of magnitudes are in their order, and a NaN is above them all.
        amax = jnp.maximum(jnp.max(_bits(tiles) & 0x7FFFFFFF, axis=1), plan.least)
        scale, inverse = _tile_scale(amax, layout.scale_form == "power_of_two")
        codes = _as(tiles * inverse[:, None], "float8_e4m3fn").reshape(plan.head_block)
        put(start, head.column, codes, head.inside)
        tile, at = _places(plan.tiles_block), plan.scale_start + offset * plan.scale_step
        if layout.kind == "footer":
            exponent = jnp.where(tile < layout.num_tiles, _bits(scale) >> 23, 0).astype(jnp.uint8)
            put(at, tile, exponent, tile < layout.scale_bytes)
            if plan.tiles_block < layout.scale_bytes:
                pad = _places(plan.pad_block)
                unused = (pad >= plan.tiles_block) & (pad < layout.scale_bytes)
                put(at, pad, jnp.zeros(plan.pad_block, jnp.uint8), unused)
        else:
            put(at, 4 * tile, scale, tile < layout.num_tiles)
        for part in parts[1:]:
            values = part.x.astype(jnp.bfloat16)
            put(start + layout.rope_offset, 2 * (part.column - plan.head), values, part.inside)


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
    if rows.shape[0] == 0 or pool.shape[0] == 0:
        return pool
    plan = Plan.of(layout, pool, norm_weight, cos_sin, eps)
    return launch(
        _pack,
        pool,
        rows,
        slots,
        norm_weight if plan.normed else None,
        cos_sin if plan.turned else None,
        None if kv_scale is None else jnp.asarray(kv_scale, jnp.float32).reshape(1),
        out=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid=(rows.shape[0],),
        aliases={0: 0},
        num_warps=min(max(plan.head_block // (32 * THREAD_VALUES), 1), 16),
        plan=plan,
        raw=is_raw(pool),
    )


kv_pack = with_xla_rules(_kv_pack, xla.kv_pack)
