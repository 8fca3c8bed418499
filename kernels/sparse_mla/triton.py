"""Sparse attention in Triton, for any GPU from sm_90 on: gather, dequantise and attend blocks of slots.

A program takes one query row, a block of its heads, and a share of its columns (a split). It keeps the output of the
block in registers, in chunks of the value axis, and meets 64 slots a step: their rows are gathered, dequantised to
bf16, and used twice, as keys and as values. With more than one split, or with an epilogue, the partial outputs go to
scratch memory and a second kernel finishes them.
"""

# mypy: disable-error-code="assignment"
# (the tuples of tensors in kernels grow chunk by chunk)
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from .. import launch as launcher
from ..fallback import with_xla_rules
from ..launch import launch
from ..layouts import MAX_SLOTS, KVLayout
from ..quant_triton import tile_scale
from . import xla
from .epilogue import MIN_AMAX, Epilogue, Quantised
from .forms import LN2, LOG2E, NARROW, PLACE, alignment, chunks
from .source import Source


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How much a program takes on.

    Attributes:
        heads: most heads of a program.
        block: slots of a step.
        warps: of a program.
        stages: of the software pipeline.
    """

    heads: int
    block: int
    warps: int
    stages: int


HOPPER = Tuning(64, 64, 4, 0)  # of the kernel in gluon.py
TUNING = {90: Tuning(64, 64, 8, 3), 100: Tuning(32, 64, 4, 3), 120: Tuning(32, 32, 4, 2)}
BF16_ROWS = {90: Tuning(64, 32, 8, 3)}  # where 64 slots of two bytes a value do not fit
PROGRAMS = 132  # that the grid should fill
MANY = 512  # programs of the second kernel
FIXED_SPLIT = 512  # columns of a split whose size depends on no shape


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the kernel is compiled for.

    Rows are cut into chunks, powers of two wide: quantised ones first, then typed ones.

    Attributes:
        widths: of the chunks.
        starts: first value of each chunk.
        codes: number of quantised chunks.
        values: number of leading chunks that are values too.
        tile: quantised values under one scale.
        kind: of the layouts.
        typed: dtype of the typed chunks.
        typed_start: byte of a row at which they start.
        row: bytes from row to row.
        align: bytes that the address of every row is a multiple of.
        sources: 1 or 2; the second of each of the following pairs is that of the last source.
        columns: attended columns of each source.
        capacity: slots of each pool.
        page_size: of each pool.
        stride: bytes from page to page, of each pool.
        footer: byte of a page at which the scales start, of each pool.
        scale_row: bytes of the scales of a row in the footer.
        powers: whether all scales are powers of two, for the kernel in gluon.py.
        heads: H.
        block_heads: heads of a program.
        block: slots of a step.
        splits: S.
        split_blocks: blocks of a split; 0 for an even share of the row's blocks.
        direct: whether this kernel writes the output itself.
        assembly: whether inline assembly is available.
    """

    widths: tuple[int, ...]
    starts: tuple[int, ...]
    codes: int
    values: int
    tile: int
    kind: str
    typed: Any
    typed_start: int
    row: int
    align: int
    sources: int
    columns: tuple[int, int]
    capacity: tuple[int, int]
    page_size: tuple[int, int]
    stride: tuple[int, int]
    footer: tuple[int, int]
    scale_row: int
    powers: bool
    heads: int
    block_heads: int
    block: int
    splits: int
    split_blocks: int
    direct: bool
    assembly: bool

    @property
    def width(self) -> int:
        return sum(self.widths)

    @property
    def typed_dim(self) -> int:
        """The first value of a row that is not quantised."""
        return sum(self.widths[: self.codes])

    @property
    def scaled(self) -> int:
        return self.codes if self.kind == "inline" else 0

    @property
    def v_dim(self) -> int:
        return sum(self.widths[: self.values])


_LOG2E, _LN2 = tl.constexpr(LOG2E), tl.constexpr(LN2)
_TIMES_SCALE = tl.constexpr(
    f"""{{ {PLACE}
    .reg .b32 k;
    mov.b32 k, 0x71807180;
    mul.rn.bf16x2 c, c, k;
    mul.rn.bf16x2 d, d, k;
    mul.rn.bf16x2 $0, c, $3;
    mul.rn.bf16x2 $1, d, $4;
    }}"""  # k is 2^100
)
_WITHOUT_SCALE = tl.constexpr(
    f"""{{ {PLACE}
    .reg .b32 k;
    mov.b32 k, 0x7b807b80;
    mul.rn.bf16x2 $0, c, k;
    mul.rn.bf16x2 $1, d, k;
    }}"""  # k is 2^120
)


@triton.jit
def _values(codes, P: tl.constexpr):
    """The bf16 values of e4m3 codes, without a scale."""
    if P.assembly:
        return tl.inline_asm_elementwise(_WITHOUT_SCALE, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)


@triton.jit
def _dequantise(codes, scale, P: tl.constexpr):
    """bf16 values of e4m3 codes under scales that are powers of two, which is exact."""
    scale, _ = tl.broadcast(scale, codes)
    if P.assembly:
        # The placed bits are 2^-120 times the code: 2^100 of that is a constant, so that scales up to 2^107 fit.
        factor = (scale * 1048576.0).to(tl.bfloat16)
        return tl.inline_asm_elementwise(
            _TIMES_SCALE, "=r,=r,r,r,r", [codes, factor], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        return (codes.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale).to(tl.bfloat16)


@triton.jit
def _powers(base, row, footer, valid, c: tl.constexpr, P: tl.constexpr):
    """Chunk c of rows whose scales, powers of two, stand in a footer: ``[BLOCK, width]`` bf16."""
    W: tl.constexpr = P.widths[c]
    T: tl.constexpr = min(W, P.tile)
    tiles = tl.arange(0, W // T)
    at = row[:, None, None] + (P.starts[c] + tiles[None, :, None] * T + tl.arange(0, T)[None, None, :])
    codes = tl.load(base + at, mask=valid[:, None, None], other=0)
    at = footer[:, None] + (P.starts[c] // P.tile + tiles)[None, :]
    byte = tl.load(base + at, mask=valid[:, None], other=0).to(tl.int32)
    scale = ((byte << 23) | (byte == 255).to(tl.int32)).to(tl.float32, bitcast=True)  # 255 is NaN
    return tl.reshape(_dequantise(codes, scale[:, :, None], P), (codes.shape[0], W))


@triton.jit
def _codes(base, row, valid, c: tl.constexpr, P: tl.constexpr):
    """Chunk c of rows with float32 scales beside the codes: codes ``[BLOCK, width]`` as bf16, scales ``[BLOCK]``.

    The scales meet the logits and the weights, not the codes, so that nothing is rounded.
    """
    ALIGN: tl.constexpr = P.align // 4
    at = row[:, None] + (P.starts[c] + tl.arange(0, P.widths[c]))[None, :]
    codes = tl.load(base + at, mask=valid[:, None], other=0)
    at = tl.multiple_of(row // 4, ALIGN) + (P.starts[P.codes] // 4 + P.starts[c] // P.tile)
    scale = tl.load(base.to(tl.pointer_type(tl.float32)) + at, mask=valid, other=0)
    return _values(codes, P), scale


@triton.jit
def _typed(base, row, valid, c: tl.constexpr, P: tl.constexpr):
    """Chunk c of the rows as it is stored: ``[BLOCK, width]`` bf16."""
    W: tl.constexpr = P.widths[c]
    size: tl.constexpr = P.typed.primitive_bitwidth // 8
    start: tl.constexpr = P.typed_start // size + P.starts[c] - P.starts[P.codes]
    ALIGN: tl.constexpr = P.align // size
    row = tl.multiple_of(row // size, ALIGN)
    at = row[:, None] + (start + tl.arange(0, W))[None, :]
    if size == 1:
        return tl.load(base + at, mask=valid[:, None], other=0).to(P.typed, bitcast=True).to(tl.bfloat16)
    else:
        return tl.load(base.to(tl.pointer_type(P.typed)) + at, mask=valid[:, None], other=0)


@triton.jit
def _blank(c: tl.constexpr, P: tl.constexpr):
    """Zeros for the output of chunk c."""
    BH: tl.constexpr = P.block_heads
    W: tl.constexpr = P.widths[c]
    return tl.zeros([BH, W], tl.float32)


@triton.jit
def _attend(
    q,
    pool_0,
    indices_0,
    lengths_0,
    kv_scale_0,
    pool_1,
    indices_1,
    lengths_1,
    kv_scale_1,
    sinks,
    q_scale,
    out_scale,
    out,
    lse,
    P: tl.constexpr,
    SCALE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row, block of heads and split: grid (rows * blocks of heads * splits,), splits innermost."""
    H: tl.constexpr = P.heads
    BH: tl.constexpr = P.block_heads
    BLOCK: tl.constexpr = P.block
    HB: tl.constexpr = (H + BH - 1) // BH
    N: tl.constexpr = len(P.widths)
    ALIGN: tl.constexpr = P.align
    VALUES: tl.constexpr = P.values
    SCALED: tl.constexpr = P.scaled  # leading chunks whose scales are not in the keys
    pid = tl.program_id(0)
    split = pid % P.splits
    head = (pid // P.splits) % HB * BH + tl.arange(0, BH)
    r = (pid // (P.splits * HB)).to(tl.int64)
    real = head < H

    n_0 = P.columns[0]
    if lengths_0 is not None:
        n_0 = tl.minimum(tl.maximum(tl.load(lengths_0 + r), 0), P.columns[0])
    blocks_0 = (n_0 + BLOCK - 1) // BLOCK
    blocks = blocks_0
    n_1 = 0
    if P.sources == 2:
        n_1 = P.columns[1]
        if lengths_1 is not None:
            n_1 = tl.minimum(tl.maximum(tl.load(lengths_1 + r), 0), P.columns[1])
        blocks = blocks_0 + (n_1 + BLOCK - 1) // BLOCK
    if P.split_blocks > 0:
        begin = tl.minimum(split * P.split_blocks, blocks)
        end = tl.minimum(begin + P.split_blocks, blocks)
    else:
        begin = split * blocks // P.splits
        end = (split + 1) * blocks // P.splits

    queries = ()
    for c in tl.static_range(N):
        at = (r * H + head)[:, None] * P.width + (P.starts[c] + tl.arange(0, P.widths[c]))[None, :]
        queries = queries + (tl.load(q + at, mask=real[:, None], other=0).to(tl.bfloat16),)
    factor = tl.full([BH], SCALE * _LOG2E, tl.float32)
    if q_scale is not None:
        factor = factor * tl.load(q_scale + r * H + head, mask=real, other=0)
    outs = ()
    for c in tl.static_range(VALUES):
        outs = outs + (_blank(c, P),)
    top = tl.full([BH], float("-inf"), tl.float32)
    mass = tl.zeros([BH], tl.float32)

    lane = tl.arange(0, BLOCK)
    # The next block's indices are loaded a step ahead, so that the gather need not wait for them.
    ahead = _indices(indices_0, indices_1, r, begin, end, blocks_0, n_0, n_1, lane, P)
    for j in tl.range(begin, end, num_stages=STAGES):
        slot = ahead
        ahead = _indices(indices_0, indices_1, r, j + 1, end, blocks_0, n_0, n_1, lane, P)
        first = j < blocks_0
        valid = (slot >= 0) & (slot < tl.where(first, P.capacity[0], P.capacity[1]))
        slot = tl.where(valid, slot, 0)
        base = pool_0.to(tl.pointer_type(tl.uint8))
        page_size = tl.where(first, P.page_size[0], P.page_size[1])
        if P.sources == 2:
            base = tl.where(first, base, pool_1.to(tl.pointer_type(tl.uint8)))
        base = tl.multiple_of(base, ALIGN)
        page = slot // page_size
        offset = slot - page * page_size
        start = page.to(tl.int64) * tl.where(first, P.stride[0], P.stride[1])
        row = tl.multiple_of(start + offset * P.row, ALIGN)
        footer = start + (tl.where(first, P.footer[0], P.footer[1]) + offset * P.scale_row)
        keys = ()
        scales = ()
        for c in tl.static_range(N):
            if c >= P.codes:
                keys = keys + (_typed(base, row, valid, c, P),)
            elif P.kind == "footer":
                keys = keys + (_powers(base, row, footer, valid, c, P),)
            else:
                codes, scale = _codes(base, row, valid, c, P)
                keys = keys + (codes,)
                scales = scales + (scale,)
        logits = tl.zeros([BH, BLOCK], tl.float32)
        for c in tl.static_range(N):
            if c < SCALED:
                logits = logits + tl.dot(queries[c], tl.trans(keys[c])) * scales[c][None, :]
            else:
                logits = tl.dot(queries[c], tl.trans(keys[c]), logits)
        logits = logits * factor[:, None]
        value_scale = 1.0
        if kv_scale_0 is not None:
            value_scale = tl.load(kv_scale_0)
            if P.sources == 2:
                value_scale = tl.where(first, value_scale, tl.load(kv_scale_1))
            logits = logits * value_scale
        logits = tl.where(valid[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        origin = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key yet: not -inf + inf
        decay = tl.exp2(top - origin)
        weights = tl.exp2(logits - origin[:, None])
        mass = mass * decay + tl.sum(weights, 1)
        top = new_top
        if kv_scale_0 is not None:
            weights = weights * value_scale
        new = ()
        for c in tl.static_range(VALUES):
            if c < SCALED:
                scaled = (weights * scales[c][None, :]).to(tl.bfloat16)
            else:
                scaled = weights.to(tl.bfloat16)
            new = new + (tl.dot(scaled, keys[c], outs[c] * decay[:, None]),)
        outs = new

    empty = mass == 0
    log2_mass = tl.where(empty, float("-inf"), tl.where(empty, 0.0, top) + tl.log2(tl.where(empty, 1.0, mass)))
    share = mass
    if P.direct and sinks is not None:
        sink = tl.load(sinks + head, mask=real, other=0) * _LOG2E
        share = share + tl.exp2(sink - tl.where(empty, 0.0, top))
    share = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, share))
    if P.direct and out_scale is not None:
        share = share * tl.load(out_scale)
    place = (r * P.splits + split) * H + head
    if P.direct:
        tl.store(lse + place, log2_mass * _LN2, mask=real)
    else:
        tl.store(lse + place, log2_mass, mask=real)
    for c in tl.static_range(VALUES):
        at = place[:, None] * P.v_dim + (P.starts[c] + tl.arange(0, P.widths[c]))[None, :]
        result = (outs[c] * share[:, None]).to(out.dtype.element_ty)
        # What an empty split has in scratch memory is never read.
        tl.store(out + at, result, mask=real[:, None])


@triton.jit
def _indices(indices_0, indices_1, r, j, end, blocks_0, n_0, n_1, lane, P: tl.constexpr):
    """Slots of block j of the row; -1 past its columns, and from block ``end`` on."""
    BLOCK: tl.constexpr = P.block
    if P.sources == 1:
        count = tl.where(j < end, n_0, 0)
        column = j * BLOCK + lane
        return tl.load(indices_0 + r * P.columns[0] + column, mask=column < count, other=-1)
    else:
        first = j < blocks_0
        count = tl.where(j < end, tl.where(first, n_0, n_1), 0)
        column = tl.where(first, j, j - blocks_0) * BLOCK + lane
        base = tl.where(first, indices_0 + r * P.columns[0], indices_1 + r * P.columns[1])
        return tl.load(base + column, mask=column < count, other=-1)


@triton.jit
def _finish(
    parts,
    part_lses,
    factors,
    sinks,
    out_scale,
    cos_sin,
    out,
    lse,
    scales,
    H: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROPE: tl.constexpr,
    GROUPS: tl.constexpr,
    QUANT: tl.constexpr,
    PACKED: tl.constexpr,
    MIN_AMAX: tl.constexpr,
    PADDED: tl.constexpr,
    NARROW: tl.constexpr,
):
    """Joins the splits of a row and head, and applies what follows the attention: grid (R * H,)."""
    pid = tl.program_id(0).to(tl.int64)
    r = pid // H
    h = (pid % H).to(tl.int32)
    column = tl.arange(0, DP)
    C: tl.constexpr = min(S, 16)  # partial outputs that are on their way at a time
    value = tl.zeros([DP], tl.float32)
    top = tl.full([], float("-inf"), tl.float32)
    mass = tl.zeros([], tl.float32)
    # One after the other, so that empty splits at the end, which change nothing, do not change the rounding either.
    for start in tl.range(0, S, C):
        logs = ()
        rows = ()
        for i in tl.static_range(C):
            part = tl.minimum(start + i, S - 1)
            place = (r * S + part) * H + h
            logs = logs + (tl.where(part == start + i, tl.load(part_lses + place), float("-inf")),)
            row = tl.load(parts + place * D + column, mask=column < D, other=0.0)
            if factors is not None:
                at = factors + (r * S + part) * (2 * H) + h
                row = row.to(tl.float32) * tl.where(column < NARROW, tl.load(at), tl.load(at + H))
            rows = rows + (row,)
        new_top = top
        for i in tl.static_range(C):
            new_top = tl.maximum(new_top, logs[i])
        origin = tl.where(new_top == float("-inf"), 0.0, new_top)
        decay = tl.exp2(top - origin)
        value = value * decay
        mass = mass * decay
        for i in tl.static_range(C):
            weight = tl.exp2(logs[i] - origin)
            mass += weight
            value += tl.where(weight == 0, 0.0, weight * rows[i])  # what an empty split has left is dropped
        top = new_top
    empty = mass == 0
    top = tl.where(empty, 0.0, top)
    total = mass
    if sinks is not None:
        total = total + tl.exp2(tl.load(sinks + h) * _LOG2E - top)
    share = tl.where(empty, 0.0, 1.0 / tl.where(empty, 1.0, total))
    if out_scale is not None:
        share = share * tl.load(out_scale)
    tl.store(lse + pid, tl.where(empty, float("-inf"), (top + tl.log2(tl.where(empty, 1.0, mass))) * _LN2))
    value = value * share
    if QUANT == 0:
        tl.store(out + pid * D + column, value.to(out.dtype.element_ty), mask=column < D)
    else:
        # Pairs (e, o) turn back: e cos + o sin, o cos - e sin.
        evens, odds = tl.split(tl.reshape(value, (DP // 2, 2)))
        partner = tl.reshape(tl.join(odds, evens), (DP,))
        pair = (column - (D - ROPE)) // 2
        turned = (column >= D - ROPE) & (column < D)
        cos = tl.load(cos_sin + r * ROPE + pair, mask=turned, other=1.0)
        sin = tl.load(cos_sin + r * ROPE + ROPE // 2 + pair, mask=turned, other=0.0)
        value = value * cos + tl.where(column % 2 == 0, partner, -partner) * sin
        blocks = tl.reshape(value, (DP // QUANT, QUANT))
        amax = tl.maximum(tl.max(tl.abs(blocks), 1), MIN_AMAX)
        amax = tl.where(tl.max((blocks != blocks).to(tl.int32), 1) > 0, float("nan"), amax)
        scale, inverse = tile_scale(amax.to(tl.int32, bitcast=True), PACKED)
        rounded = tl.clamp(blocks * inverse[:, None], -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        per_group: tl.constexpr = H // GROUPS * D
        group = h // (H // GROUPS)
        inner = (h % (H // GROUPS)) * D
        rows = tl.num_programs(0) // H
        flat = tl.reshape(rounded, (DP,)).to(tl.float8e4nv)
        tl.store(out + (group.to(tl.int64) * rows + r) * per_group + inner + column, flat, mask=column < D)
        block = inner // QUANT + tl.arange(0, DP // QUANT)
        here = tl.arange(0, DP // QUANT) < D // QUANT
        # The last row also writes the zeros of the rows that pad, and the last head those of the blocks that pad.
        end = tl.where(r == rows - 1, PADDED, r + 1)
        for t in range(r, end):
            if PACKED:
                quads: tl.constexpr = (per_group // QUANT + 3) // 4
                pad = per_group // QUANT + tl.arange(0, 4)
                exponents = scales.to(tl.pointer_type(tl.uint8))
                place = ((group * quads + block // 4).to(tl.int64) * PADDED + t) * 4 + block % 4
                tl.store(
                    exponents + place,
                    tl.where(t == r, scale.to(tl.int32, bitcast=True) >> 23, 0).to(tl.uint8),
                    mask=here,
                )
                place = ((group * quads + pad // 4).to(tl.int64) * PADDED + t) * 4 + pad % 4
                pads = tl.where(h % (H // GROUPS) == H // GROUPS - 1, quads * 4, 0)
                tl.store(exponents + place, tl.zeros([4], tl.uint8), mask=pad < pads)
            else:
                place = (group * (per_group // QUANT) + block).to(tl.int64) * PADDED + t
                tl.store(scales + place, tl.where(t == r, scale, 0.0), mask=here)


def _tuning(layout: KVLayout) -> Tuning:
    known = max(known for known in TUNING if known <= launcher.capability())
    return BF16_ROWS.get(known, TUNING[known]) if layout.value_dtype == "bfloat16" else TUNING[known]


def _splits(programs: int, blocks: int) -> int:
    """How many programs share a row: the number that takes the fewest steps, ends and the second kernel counted."""

    def cost(splits: int) -> float:
        waves = -(-programs * splits // PROGRAMS)
        return waves * (-(-blocks // splits) + 2) + (4 + splits / 40 if splits > 1 else 0)

    return min(range(1, max(blocks, 1) + 1), key=cost)


def plan(
    sources: tuple[Source, ...],
    rows: int,
    heads: int,
    v_dim: int,
    deterministic: bool | None,
    epilogue: bool,
    tuning: Tuning,
) -> Plan:
    """The constants of a call."""
    layouts = [source.layout for source in sources]
    first = layouts[0]
    widths, codes, values = chunks(first, v_dim)
    block = tuning.block
    blocks = sum(-(-source.indices.shape[1] // block) for source in sources)
    block_heads = min(tuning.heads, max(16, 1 << (heads - 1).bit_length()))
    if deterministic:
        split_blocks = FIXED_SPLIT // block
        splits = max(1, -(-blocks // split_blocks))
    else:
        split_blocks, splits = 0, _splits(rows * -(-heads // block_heads), blocks)

    def pair(values: Iterable[int]) -> tuple[int, int]:
        first, *rest = values
        return first, rest[0] if rest else first

    typed = {"float8_e4m3fn": tl.float8e4nv, "bfloat16": tl.bfloat16}[
        first.value_dtype if first.kind == "plain" else "bfloat16"
    ]
    return Plan(
        widths=widths,
        starts=tuple(sum(widths[:i]) for i in range(len(widths) + 1)),
        codes=codes,
        values=values,
        tile=first.tile,
        kind=first.kind,
        typed=typed,
        typed_start=0 if first.kind == "plain" else first.rope_offset,
        row=first.row_bytes,
        align=min(alignment(layout) for layout in layouts),
        sources=len(sources),
        columns=pair(source.indices.shape[1] for source in sources),
        capacity=pair(min(source.pool.shape[0] * source.layout.page_size, MAX_SLOTS) for source in sources),
        page_size=pair(layout.page_size for layout in layouts),
        stride=pair(layout.page_stride for layout in layouts),
        footer=pair(layout.footer_offset if layout.has_footer else 0 for layout in layouts),
        scale_row=first.scale_bytes if first.has_footer else 0,
        powers=all(layout.scale_form == "power_of_two" for layout in layouts),
        heads=heads,
        block_heads=block_heads,
        block=block,
        splits=splits,
        split_blocks=split_blocks,
        direct=splits == 1 and not epilogue,
        assembly=launcher.interpreter is None,
    )


def _sparse_mla(
    q: jax.Array,
    sources: tuple[Source, ...],
    sinks: jax.Array | None,
    q_scale: jax.Array | None,
    out_scale: Any,
    epilogue: Epilogue | None,
    *,
    scale: float,
    v_dim: int,
    out_dtype: Any,
    deterministic: bool | None = None,
    portable: bool = False,
) -> tuple[Any, jax.Array]:
    rows, heads, _ = q.shape
    if rows == 0 or heads == 0:
        options: dict[str, Any] = {"scale": scale, "v_dim": v_dim, "out_dtype": out_dtype}
        return xla.sparse_mla(q, sources, sinks, q_scale, out_scale, epilogue, **options)
    if isinstance(scale, jax.Array):  # an array cannot be compiled in
        q_scale = jnp.broadcast_to(scale * (1.0 if q_scale is None else q_scale), (rows, heads)).astype(jnp.float32)
        scale = 1.0
    hopper = not portable and _fits_hopper([source.layout for source in sources], heads, v_dim)
    tuning = HOPPER if hopper else _tuning(sources[0].layout)
    constants = plan(sources, rows, heads, v_dim, deterministic, epilogue is not None, tuning)
    scalar = None if out_scale is None else jnp.asarray(out_scale, jnp.float32).reshape(1)
    operands: list[Any] = []
    for source in (*sources, None)[:2]:
        if source is None:
            operands += [None] * 4
            continue
        factor = source.kv_scale
        if source.layout.value_dtype == "float8_e4m3fn" and source.layout.kind == "plain":
            factor = jnp.asarray(1.0 if factor is None else factor, jnp.float32).reshape(1)
        operands += [source.pool, source.indices, source.lengths, factor]
    splits, direct = constants.splits, constants.direct
    head_blocks = -(-heads // constants.block_heads)
    # Hopper's partial outputs are float16, half the bytes of float32, under powers of two: one for each of two parts.
    partial = jnp.float16 if hopper else jnp.float32
    results = (
        jax.ShapeDtypeStruct((rows, splits, heads, v_dim), out_dtype if direct else partial),
        jax.ShapeDtypeStruct((rows, splits, heads), jnp.float32),
    )
    grid = (rows * head_blocks * splits,)
    factors = None
    if hopper:
        powers = jax.ShapeDtypeStruct((1,) if direct else (rows, splits, 2, heads), jnp.float32)
        out, lse, factors = _launch_hopper(
            q, sources, sinks, q_scale, scalar, (*results, powers), grid, constants, float(scale)
        )
    else:
        out, lse = launch(
            _attend,
            q,
            *operands,
            sinks,
            q_scale,
            scalar,
            out=results,
            grid=grid,
            num_warps=tuning.warps if constants.block_heads > 16 else 4,
            pools=(1, 5),
            P=constants,
            SCALE=float(scale),
            STAGES=tuning.stages,
        )
    if direct:
        return out.reshape(rows, heads, v_dim), lse.reshape(rows, heads)
    return _joined(out, lse, factors, sinks, scalar, epilogue, out_dtype)


def _fits_hopper(layouts: list[KVLayout], heads: int, v_dim: int) -> bool:
    """Whether the kernel in gluon.py serves: the rows of the released models on sm_90, and enough heads to fill it."""
    forms = {"footer": (448, 64, 64, 8), "inline": (512, 64, 128, 16)}
    return (
        90 <= launcher.capability() < 100
        and heads > 16
        and v_dim == 512
        and launcher.interpreter is None
        and all(
            forms.get(layout.kind) == (layout.nope, layout.rope, layout.tile, layout.scale_bytes)
            and layout.page_stride % 16 == 0
            for layout in layouts
        )
    )


def _launch_hopper(
    q: jax.Array,
    sources: tuple[Source, ...],
    sinks: jax.Array | None,
    q_scale: jax.Array | None,
    out_scale: jax.Array | None,
    results: tuple[jax.ShapeDtypeStruct, ...],
    grid: tuple[int, ...],
    constants: Plan,
    scale: float,
) -> tuple[jax.Array, ...]:
    from . import gluon

    first, last = sources[0], sources[-1]
    right, producers = gluon.REGISTERS

    def given(x: jax.Array | None) -> jax.Array:  # its programs take no None: any array stands in for what is not read
        return first.indices if x is None else x

    return launch(
        gluon.attend,
        q,
        first.pool,
        first.indices,
        given(first.lengths),
        last.pool,
        last.indices,
        given(last.lengths),
        given(sinks),
        given(q_scale),
        given(out_scale),
        out=results,
        grid=grid,
        num_warps=HOPPER.warps,
        pools=(1, 4),
        P=constants,
        SCALE=scale,
        SINKS=sinks is not None and constants.direct,
        Q_SCALE=q_scale is not None,
        OUT_SCALE=out_scale is not None and constants.direct,
        LENGTHS=(first.lengths is not None, last.lengths is not None),
        RIGHT_REGISTERS=right,
        PRODUCER_REGISTERS=producers,
    )


def _joined(
    parts: jax.Array,
    part_lses: jax.Array,
    factors: jax.Array | None,
    sinks: jax.Array | None,
    out_scale: jax.Array | None,
    epilogue: Epilogue | None,
    out_dtype: Any,
) -> tuple[Any, jax.Array]:
    """The second kernel over partial outputs ``[R, S, H, D]`` and their base-2 logarithms ``[R, S, H]``.

    With ``factors [R, S, 2, H]`` the values are to be multiplied by them, the first ``NARROW`` by the first.
    """
    rows, splits, heads, v_dim = parts.shape
    constants: dict[str, Any] = {
        "H": heads,
        "S": splits,
        "D": v_dim,
        "DP": 1 << (v_dim - 1).bit_length(),
        "ROPE": 0,
        "GROUPS": 1,
        "QUANT": 0,
        "PACKED": False,
        "MIN_AMAX": MIN_AMAX,
        "PADDED": 0,
        "NARROW": NARROW,
    }
    lse = jax.ShapeDtypeStruct((rows, heads), jnp.float32)
    # Without a limit the compiler keeps to 32 registers and so delays loads, whose latencies then add up. Many programs
    # are done sooner with two warps, whose threads load 16 bytes at a time, and few with four.
    warps = 2 if rows * heads >= MANY else 4
    call: dict[str, Any] = {"grid": (rows * heads,), "num_warps": warps, "options": {"maxnreg": 128}}
    if epilogue is None:
        out = jax.ShapeDtypeStruct((rows, heads, v_dim), out_dtype)
        return launch(
            _finish, parts, part_lses, factors, sinks, out_scale, None, out=(out, lse), scales=None, **call, **constants
        )
    groups, padded, packed = epilogue.groups, -(-rows // 4) * 4, epilogue.scale_form == "ue8m0"
    blocks = heads // groups * v_dim // epilogue.block
    constants |= {"ROPE": epilogue.cos_sin.shape[1], "GROUPS": groups, "QUANT": epilogue.block}
    constants |= {"PACKED": packed, "PADDED": padded}
    codes = jax.ShapeDtypeStruct((groups, rows, heads // groups * v_dim), jnp.float8_e4m3fn)
    scales = jax.ShapeDtypeStruct(
        (groups, -(-blocks // 4) if packed else blocks, padded), jnp.int32 if packed else jnp.float32
    )
    operands = (parts, part_lses, factors, sinks, out_scale, epilogue.cos_sin)
    codes, lse, scales = launch(_finish, *operands, out=(codes, lse, scales), **call, **constants)
    return Quantised(codes, scales), lse


sparse_mla = with_xla_rules(_sparse_mla, xla.sparse_mla)
portable_sparse_mla = with_xla_rules(functools.partial(_sparse_mla, portable=True), xla.sparse_mla)
