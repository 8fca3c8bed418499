"""Sparse attention for Hopper in Gluon, Triton's explicit dialect: 64 heads a program, warps with roles.

Two groups of four warps gather quantised rows, one the left halves of 256 dims, the other the right ones, and
dequantise them to tiles of 64 slots that the matrix units read. One group multiplies queries by keys, takes the
softmax, and accumulates the first quarter of the values; another, which has nothing else to do, accumulates the rest.
There is room for two blocks of slots, so that filling one overlaps the use of the other, because codes need none of
their own: they are copied to where their values will be, asynchronously, and replaced there by way of registers. What
the ends of a program cost is shared too: the producers write half of the output.

Codes are not converted but placed: the bits of an e4m3 code, moved into those of a bf16, are 2^-120 times its value.
One bf16 product with ``scale * 2^60`` leaves 2^-60 times the value, for any scale up to 2^67; the queries carry 2^60,
and the output is multiplied by it at the end. A scale that is no power of two is the sum of two bf16 values: a product
and an fma, of which the second rounds.

Partial outputs of splits are float16 under powers of two, since the bytes of float32 are what a small batch waits for.
"""

from typing import Any

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import forms

# Names that Triton has changed since 3.6: one of them in 3.7, the others by 3.9.
REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
_barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier
_copy: Any = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

# Registers of a thread of the second consumer and of the producers, two groups; the first consumer has what these leave
# of 512. Found by spills: with 8 fewer the second consumer spills a kilobyte.
REGISTERS = (224, 72)
LOG2E, LN2 = gl.constexpr(forms.LOG2E), gl.constexpr(forms.LN2)
NARROW = gl.constexpr(forms.NARROW)  # values that the first consumer accumulates
UP = gl.constexpr(2.0**60)  # the factor that queries carry and outputs get back
# Half of a block's rows in a producer: rows, pieces of 64 codes, words of 4 codes or of 2 values. 4 threads own two
# rows for good, 16 bytes of each of their pieces. The half is one tensor: between stores to slices of one allocation
# the compiler would put barriers.
CODES = gl.constexpr(gl.BlockedLayout([1, 4, 4], [8, 1, 4], [4, 1, 1], [2, 1, 0]))
VALUES = gl.constexpr(gl.BlockedLayout([1, 4, 8], [8, 1, 4], [4, 1, 1], [2, 1, 0]))
SLOTS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(2, CODES.value)))
ROPE = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))
RAW = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 0, 1]))  # codes in shared memory: piece after piece
WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))  # a tile for the matrix units, as words
TIMES_SCALE = gl.constexpr(f"{{ {forms.PLACE} mul.rn.bf16x2 $0, c, $3; mul.rn.bf16x2 $1, d, $3; }}")
TIMES_BOTH = gl.constexpr(  # the same with a scale that is the sum of two bf16 values: one rounding that matters
    f"""{{ {forms.PLACE}
    .reg .b32 e, f;
    mul.rn.bf16x2 e, c, $4;
    mul.rn.bf16x2 f, d, $4;
    fma.rn.bf16x2 $0, c, $3, e;
    fma.rn.bf16x2 $1, d, $3, f;
    }}"""
)


@gluon.jit
def _rows(pool_0, pool_1, slot, valid, first, P: gl.constexpr):
    """Where the rows of a block and their scales are: a pool, and bytes from its start."""
    slot = gl.where(valid, slot, 0).to(gl.uint32)
    if P.sources == 2:
        pool = gl.where(first, pool_0, pool_1)
        page = gl.where(first, slot // P.page_size[0], slot // P.page_size[1])
        page_size = gl.where(first, P.page_size[0], P.page_size[1])
        stride = gl.where(first, P.stride[0], P.stride[1])
        footer = gl.where(first, P.footer[0], P.footer[1])
    else:
        pool = pool_0
        page = slot // P.page_size[0]
        page_size = P.page_size[0]
        stride = P.stride[0]
        footer = P.footer[0]
    offset = slot - page * page_size
    start = page.to(gl.int64) * stride
    row = start + offset * P.row
    return pool, row, row + 512 if P.kind == "inline" else start + (footer + offset * 8)


@gluon.jit
def _words(pool, scales, valid, HALF: gl.constexpr, P: gl.constexpr):
    """Eight bytes of every row that hold the scales of a half."""
    at = pool.to(tl.pointer_type(gl.int64)) + (scales >> 3)
    if P.kind == "inline" and HALF:
        at += 1
    return gl.load(at, mask=valid, other=0)


@gluon.jit
def _seen(tile, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    """The same bytes of shared memory as a tensor of another type."""
    if REINTERPRETS:
        return tile.reinterpret(dtype, shape, layout)
    else:
        return tile._reinterpret(dtype, shape, layout)


@gluon.jit
def _codes_of(tile):
    """Where the codes of a half tile are until their values replace them: ``[64, 4, 16]`` words."""
    return _seen(tile, gl.int32, [2, 64, 4, 16], RAW).index(0)


@gluon.jit
def _gather(pool, row, valid, tile, rope, turn, HALF: gl.constexpr, P: gl.constexpr):
    """Starts the copies of half of every row; a row that is not valid is filled with zeros."""
    piece = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, CODES)))
    piece = gl.expand_dims(gl.expand_dims(piece, 0), 2)
    word = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, CODES)))
    word = gl.expand_dims(gl.expand_dims(word, 0), 1)
    at = pool.to(tl.pointer_type(gl.int32)) + (row >> 2)
    at = gl.expand_dims(gl.expand_dims(at, 1), 2) + (piece * 16 + word + 64 * HALF)
    at = gl.max_contiguous(gl.multiple_of(at, [1, 1, 16]), [1, 1, 4])
    shown = gl.expand_dims(gl.expand_dims(valid, 1), 2) & (piece + 4 * HALF < P.typed_dim // 64) & (word >= 0)
    _copy(_codes_of(tile), at, mask=shown)
    if HALF:
        column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, ROPE)), 0)
        at = pool.to(tl.pointer_type(gl.bfloat16)) + ((row + P.typed_start) >> 1)
        at = gl.expand_dims(gl.convert_layout(at, gl.SliceLayout(1, ROPE)), 1) + column
        at = gl.max_contiguous(gl.multiple_of(at, [1, 16]), [1, 8])
        shown = gl.expand_dims(gl.convert_layout(valid, gl.SliceLayout(1, ROPE)), 1) & (column >= 0)
        # Beside codes they have a tile of their own; among them they are the last piece.
        _copy(rope.index(turn) if P.kind == "inline" else tile.slice(192, 64, dim=1), at, mask=shown)
    async_copy.commit_group()


@gluon.jit
def _counted(slot, j, blocks_0, n_0, n_1, lane, inside, P: gl.constexpr):
    """Which slots of block j take part."""
    first = j < blocks_0
    if P.sources == 2:
        column = gl.where(first, j, j - blocks_0) * 64 + lane
        count = gl.where(inside, gl.where(first, n_0, n_1), 0)
        capacity = gl.where(first, P.capacity[0], P.capacity[1])
        return (slot >= 0) & (slot < capacity) & (column < count)
    else:
        return (slot >= 0) & (slot < P.capacity[0]) & (j * 64 + lane < gl.where(inside, n_0, 0))


@gluon.jit
def _columns(indices_0, indices_1, j, blocks_0, P: gl.constexpr):
    """Where the slots of block j are."""
    if P.sources == 2:
        return gl.where(j < blocks_0, indices_0 + j * 64, indices_1 + (j - blocks_0) * 64)
    else:
        return indices_0 + j * 64


@gluon.jit
def _room(j, lane, blocks_0, P: gl.constexpr):
    """Which columns of block j exist in the index rows."""
    if P.sources == 2:
        first = j < blocks_0
        width = gl.where(first, P.columns[0], P.columns[1])
        return gl.where(first, j, j - blocks_0) * 64 + lane < width
    else:
        return j * 64 + lane < P.columns[0]


@gluon.jit
def _twice(bits, codes):
    """The bits of bf16 values, in both halves of a word, for each word of codes."""
    return gl.broadcast(gl.expand_dims(bits | (bits << 16), 2), codes)[0]


@gluon.jit
def _bf16(x):
    return x.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF


@gluon.jit
def _dequantised(codes, word, valid, HALF: gl.constexpr, P: gl.constexpr):
    """The bf16 values, but for the factor 2^-60, of half of the codes, two to a word: ``[64, 4, 32]``."""
    piece = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, CODES))), 0)
    shown = gl.expand_dims(valid, 1)
    if P.kind == "inline":
        bits = (gl.expand_dims(word, 1) >> (32 * (piece // 2))).to(gl.int32)
        factor = gl.where(shown, bits.to(gl.float32, bitcast=True) * UP, 0.0)
        bits = _bf16(factor)
        if not P.powers:
            rest = _bf16(factor - (bits << 16).to(gl.float32, bitcast=True))
    else:
        byte = ((gl.expand_dims(word, 1) >> (8 * piece + 32 * HALF)) & 255).to(gl.int32)
        bits = gl.minimum(byte + 60, 254) << 7
        bits = gl.where(shown & (byte > 0), gl.where(byte == 255, 0x7FFF, bits), 0)
    if P.powers:
        pair = gl.inline_asm_elementwise(
            TIMES_SCALE, "=r,=r,r,r", [codes, _twice(bits, codes)], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
        )
    else:
        pair = gl.inline_asm_elementwise(
            TIMES_BOTH,
            "=r,=r,r,r,r",
            [codes, _twice(bits, codes), _twice(rest, codes)],
            dtype=(gl.int32, gl.int32),
            is_pure=True,
            pack=1,
        )
    values = gl.reshape(gl.join(pair[0], pair[1]), [64, 4, 32])
    return gl.convert_layout(values, VALUES, assert_trivial=True)


@gluon.jit
def _produce(
    pool_0, pool_1, indices_0, indices_1, begin, end, blocks_0, n_0, n_1, rope, queries, keys, bias,
    full, empty, written, out, place, head, HALF: gl.constexpr, TILE: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Gathers and dequantises one half of blocks ``begin .. end - 1`` into the ring of half tiles."""
    lane = gl.arange(0, 64, layout=SLOTS)
    at = _columns(indices_0, indices_1, begin, blocks_0, P) + lane
    slot = gl.load(at, mask=(begin < end) & _room(begin, lane, blocks_0, P), other=-1)
    valid = _counted(slot, begin, blocks_0, n_0, n_1, lane, begin < end, P)
    pool, row, scales = _rows(pool_0, pool_1, slot, valid, begin < blocks_0, P)
    _gather(pool, row, valid, keys.index(HALF), rope, 0, HALF, P)
    word = _words(pool, scales, valid, HALF, P)
    at = _columns(indices_0, indices_1, begin + 1, blocks_0, P) + lane
    slot = gl.load(at, mask=(begin + 1 < end) & _room(begin + 1, lane, blocks_0, P), other=-1)
    for j in range(begin, end):
        n = j - begin
        stage = 2 * (n % 2) + HALF
        tile = keys.index(stage)
        halves = _seen(tile, gl.int32, [64, 128], WORDS)
        async_copy.wait_group(0)
        codes = _codes_of(tile).load(CODES)
        if HALF == 1 and P.kind == "footer":
            tail = halves.slice(96, 32, dim=1).load(gl.SliceLayout(1, VALUES))
        values = _dequantised(codes, word, valid, HALF, P)
        if HALF == 1 and P.kind == "footer":
            piece = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, VALUES)))
            values = gl.where(gl.expand_dims(gl.expand_dims(piece, 0), 2) == 3, gl.expand_dims(tail, 1), values)
        halves.store(gl.reshape(values, [64, 128]))
        if HALF == 0:
            bias.index(n % 2).store(gl.where(valid, 0.0, float("-inf")))
        fence_async_shared()  # which also waits for loads, so those of the next block come after it
        _barrier()
        mbarrier.arrive(full.index(stage), count=1)
        valid = _counted(slot, j + 1, blocks_0, n_0, n_1, lane, j + 1 < end, P)
        pool, row, scales = _rows(pool_0, pool_1, slot, valid, j + 1 < blocks_0, P)
        word = _words(pool, scales, valid, HALF, P)
        at = _columns(indices_0, indices_1, j + 2, blocks_0, P) + lane
        slot = gl.load(at, mask=(j + 2 < end) & _room(j + 2, lane, blocks_0, P), other=-1)
        stage = 2 * ((n + 1) % 2) + HALF
        mbarrier.wait(empty.index(stage), (((n + 1) // 2) & 1) ^ 1)
        _gather(pool, row, valid, keys.index(stage), rope, (n + 1) % 2, HALF, P)
    mbarrier.wait(written.index(0), 0)
    _write(_staged(queries, TILE, P), out, place, head, 256 + 128 * HALF, 128, P)


@gluon.jit
def _write(staged, out, place, head, OFFSET: gl.constexpr, W: gl.constexpr, P: gl.constexpr):
    """Stores values ``OFFSET .. OFFSET + W - 1`` of the output from shared memory: 16 bytes a thread, row by row."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // W, W // 8], [4, 1], [1, 0])
    part = staged.slice(OFFSET, W, dim=1)
    h = head + gl.arange(0, 64, layout=gl.SliceLayout(1, WIDE))
    d = gl.arange(0, W, layout=gl.SliceLayout(0, WIDE)) + OFFSET
    at = out + place * 512 + gl.expand_dims(h, 1) * 512 + gl.expand_dims(d, 0)
    gl.store(at, part.load(WIDE), mask=gl.expand_dims(h < P.heads, 1) & (gl.expand_dims(d, 0) >= 0))


@gluon.jit
def _staged(queries, TILE: gl.constexpr, P: gl.constexpr):
    """Where the output waits to be written, once nothing reads the queries: bf16, or partial outputs in float16."""
    if P.direct:
        return queries
    else:
        return _seen(queries, gl.float16, [64, 512], TILE)


@gluon.jit
def _up(biggest):
    """The power of two that lifts values of at most ``biggest`` to the top of float16's range, and its inverse."""
    exponent = (biggest.to(gl.int32, bitcast=True) >> 23) & 255
    field = gl.minimum(gl.maximum(268 - exponent, 1), 253)
    field = gl.where(exponent == 255, 127, field)  # beside infinity and NaN the others stay what they are
    return (field << 23).to(gl.float32, bitcast=True), ((254 - field) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _right(
    queries, keys, weights, decays, empty, filled, drained, written, begin, end, out, factors, place, head,
    TILE: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Accumulates the last three quarters of the values."""
    AL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, AL)
    acc = gl.zeros([64, 256 - NARROW], gl.float32, layout=AL)
    wide = gl.zeros([64, 256], gl.float32, layout=AL)
    for j in range(begin, end):
        n = j - begin
        left = 2 * (n % 2)
        right = left + 1
        mbarrier.wait(filled.index(0), n & 1)
        decay = gl.expand_dims(decays.load(ROWS), 1)
        acc = acc * decay
        wide = wide * decay
        acc = warpgroup_mma(weights, keys.index(left).slice(NARROW, 256 - NARROW, dim=1), acc, is_async=True)
        wide = warpgroup_mma(weights, keys.index(right), wide, is_async=True)
        acc = warpgroup_mma_wait(1, [acc])
        _barrier()
        mbarrier.arrive(empty.index(left), count=1)
        wide = warpgroup_mma_wait(0, [wide])
        _barrier()
        mbarrier.arrive(empty.index(right), count=2)
        mbarrier.arrive(drained.index(0), count=1)
    mbarrier.wait(filled.index(0), (end - begin) & 1)
    share = gl.expand_dims(decays.load(ROWS), 1)
    acc = acc * (share * UP)
    if P.kind == "footer":  # the last 64 dims are RoPE values, which carry no factor
        d = gl.expand_dims(gl.arange(0, 256, layout=gl.SliceLayout(0, AL)), 0)
        wide = wide * gl.where(d < 192, UP, 1.0)
    else:
        wide = wide * UP
    wide = wide * share
    if not P.direct:
        biggest = gl.maximum(gl.max(gl.abs(acc), 1), gl.max(gl.abs(wide), 1))
        up, down = _up(biggest)
        acc = acc * gl.expand_dims(up, 1)
        wide = wide * gl.expand_dims(up, 1)
        h = head + gl.arange(0, 64, layout=ROWS)
        gl.store(factors + 2 * place + P.heads + h, down, mask=h < P.heads)
    staged = _staged(queries, TILE, P)
    staged.slice(256, 256, dim=1).store(wide.to(staged.dtype))
    _barrier()
    mbarrier.arrive(written.index(0), count=1)  # the producers store these
    staged.slice(NARROW, 256 - NARROW, dim=1).store(acc.to(staged.dtype))
    _barrier()
    _write(staged, out, place, head, NARROW, 256 - NARROW, P)


@gluon.jit
def _query(q, place, head, START: gl.constexpr, W: gl.constexpr, P: gl.constexpr):
    """Queries of 64 heads, dims ``START .. START + W - 1``, with the factor that meets codes."""
    ALONG: gl.constexpr = min(32, W // 8)  # threads of a warp along a row
    QL: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ALONG, ALONG], [4, 1], [1, 0])
    h = head + gl.arange(0, 64, layout=gl.SliceLayout(1, QL))
    d = gl.arange(0, W, layout=gl.SliceLayout(0, QL)) + START
    at = q + (place + gl.expand_dims(h, 1)) * P.width + gl.expand_dims(d, 0)
    x = gl.load(at, mask=gl.expand_dims(h < P.heads, 1) & (gl.expand_dims(d, 0) >= 0), other=0.0).to(gl.float32)
    return (x * gl.where(gl.expand_dims(d, 0) < P.typed_dim, UP, 1.0)).to(gl.bfloat16)


@gluon.jit
def _quads(x, LARGEST: gl.constexpr):
    """What each of the four threads of a row holds of it, summed or its largest: ``[64, 64]`` -> ``[64, 4]``."""
    # Pair by pair: reduced at once, 16 values would be a chain of 15 dependent operations.
    if LARGEST:
        x = gl.max(gl.reshape(x, [64, 8, 4, 2]), 3)
        x = gl.max(gl.reshape(x, [64, 2, 4, 4]), 1)
        x = gl.max(gl.reshape(x, [64, 2, 2, 4]), 1)
        return gl.max(x, 1)
    else:
        x = gl.sum(gl.reshape(x, [64, 8, 4, 2]), 3)
        x = gl.sum(gl.reshape(x, [64, 2, 4, 4]), 1)
        x = gl.sum(gl.reshape(x, [64, 2, 2, 4]), 1)
        return gl.sum(x, 1)


@gluon.jit
def _left(
    q, queries, rope_queries, keys, rope, bias, weights, decays, full, empty, filled, drained,
    begin, end, sinks, q_scale, out_scale, out, lse, factors, r, place, head,
    TILE: gl.constexpr, P: gl.constexpr, SCALE: gl.constexpr,
    SINKS: gl.constexpr, Q_SCALE: gl.constexpr, OUT_SCALE: gl.constexpr,
):  # fmt: skip
    """Logits, softmax, and the first quarter of the values."""
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SL)
    QUADS: gl.constexpr = gl.BlockedLayout([2, 1], [8, 4], [4, 1], [1, 0])
    q_place = r * P.heads
    queries.slice(0, 256, dim=1).store(_query(q, q_place, head, 0, 256, P))
    queries.slice(256, 256, dim=1).store(_query(q, q_place, head, 256, 256, P))
    if P.kind == "inline":
        rope_queries.store(_query(q, q_place, head, 512, 64, P))
    fence_async_shared()
    _barrier()
    h = head + gl.arange(0, 64, layout=ROWS)
    real = h < P.heads
    factor = gl.full([64], SCALE * LOG2E, gl.float32, layout=ROWS)
    if Q_SCALE:
        factor = factor * gl.load(q_scale + q_place + h, mask=real, other=0.0)
    acc = gl.zeros([64, NARROW], gl.float32, layout=AL)
    top = gl.full([64], float("-inf"), gl.float32, layout=ROWS)
    # Each thread adds up what it holds of a row; the four threads of a row meet at the end.
    mass = gl.zeros([64, 4], gl.float32, layout=QUADS)
    for j in range(begin, end):
        n = j - begin
        stage = 2 * (n % 2)
        parity = (n // 2) & 1
        left = keys.index(stage)
        right = keys.index(stage + 1)
        mbarrier.wait(full.index(stage), parity)
        logits = gl.zeros([64, 64], gl.float32, layout=SL)
        logits = warpgroup_mma(queries.slice(0, 256, dim=1), left.permute((1, 0)), logits, use_acc=False, is_async=True)
        mbarrier.wait(full.index(stage + 1), parity)
        logits = warpgroup_mma(queries.slice(256, 256, dim=1), right.permute((1, 0)), logits, is_async=True)
        if P.kind == "inline":
            logits = warpgroup_mma(rope_queries, rope.index(n % 2).permute((1, 0)), logits, is_async=True)
        hole = gl.expand_dims(bias.index(n % 2).load(gl.SliceLayout(0, SL)), 0)
        logits = warpgroup_mma_wait(0, [logits])
        logits = gl.where(hole == 0, logits * gl.expand_dims(factor, 1), float("-inf"))
        new_top = gl.maximum(top, gl.convert_layout(gl.max(_quads(logits, True), 1), ROWS))
        origin = gl.where(new_top == float("-inf"), 0.0, new_top)
        decay = gl.exp2(top - origin)
        p = gl.exp2(logits - gl.expand_dims(origin, 1))
        mass = mass * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, QUADS)), 1)
        mass = mass + gl.convert_layout(_quads(p, False), QUADS)
        top = new_top
        half = p.to(gl.bfloat16)
        mbarrier.wait(drained.index(0), (n & 1) ^ 1)
        weights.store(half)
        decays.store(decay)
        fence_async_shared()
        _barrier()
        mbarrier.arrive(filled.index(0), count=1)
        acc = acc * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, AL)), 1)
        acc = warpgroup_mma(gl.convert_layout(half, PL), left.slice(0, NARROW, dim=1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        _barrier()
        mbarrier.arrive(empty.index(stage), count=1)
    n = end - begin
    mass = gl.convert_layout(gl.sum(mass, 1), ROWS)
    none = mass == 0
    safe = gl.where(none, 1.0, mass)
    origin = gl.where(none, 0.0, top)
    total = safe
    if SINKS:
        total = safe + gl.exp2(gl.load(sinks + h, mask=real, other=0.0) * LOG2E - origin)
    share = gl.where(none, 0.0, 1.0 / total)
    if OUT_SCALE:
        share = share * gl.load(out_scale)
    mbarrier.wait(drained.index(0), (n & 1) ^ 1)
    decays.store(share)
    _barrier()
    mbarrier.arrive(filled.index(0), count=1)
    log_mass = gl.where(none, float("-inf"), origin + gl.log2(safe))
    if P.direct:
        log_mass = log_mass * LN2
    gl.store(lse + place + h, log_mass, mask=real)
    share = gl.convert_layout(share, gl.SliceLayout(1, AL))
    acc = acc * (gl.expand_dims(share, 1) * UP)
    if not P.direct:
        up, down = _up(gl.max(gl.abs(acc), 1))
        acc = acc * gl.expand_dims(up, 1)
        h = head + gl.arange(0, 64, layout=gl.SliceLayout(1, AL))
        gl.store(factors + 2 * place + h, down, mask=h < P.heads)
    staged = _staged(queries, TILE, P)
    staged.slice(0, NARROW, dim=1).store(acc.to(staged.dtype))
    _barrier()
    _write(staged, out, place, head, 0, NARROW, P)


@gluon.jit
def attend(
    q, pool_0, indices_0, lengths_0, pool_1, indices_1, lengths_1, sinks, q_scale, out_scale, out, lse, factors,
    P: gl.constexpr, SCALE: gl.constexpr, SINKS: gl.constexpr, Q_SCALE: gl.constexpr, OUT_SCALE: gl.constexpr,
    LENGTHS: gl.constexpr, RIGHT_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One row, 64 heads and split: grid (rows * blocks of heads * splits,), splits innermost."""
    BLOCKS: gl.constexpr = (P.heads + 63) // 64
    pid = gl.program_id(0)
    split = pid % P.splits
    head = (pid // P.splits) % BLOCKS * 64
    r = (pid // (P.splits * BLOCKS)).to(gl.int64)
    n_0 = gl.to_tensor(P.columns[0])
    n_1 = gl.to_tensor(0)
    if LENGTHS[0]:
        n_0 = gl.minimum(gl.maximum(gl.load(lengths_0 + r), 0), P.columns[0])
    blocks_0 = (n_0 + 63) // 64
    blocks = blocks_0
    if P.sources == 2:
        n_1 = gl.to_tensor(P.columns[1])
        if LENGTHS[1]:
            n_1 = gl.minimum(gl.maximum(gl.load(lengths_1 + r), 0), P.columns[1])
        blocks = blocks_0 + (n_1 + 63) // 64
    if P.split_blocks > 0:
        begin = gl.minimum(split * P.split_blocks, blocks)
        end = gl.minimum(begin + P.split_blocks, blocks)
    else:
        begin = split * blocks // P.splits
        end = (split + 1) * blocks // P.splits
    indices_0 += r * P.columns[0]
    indices_1 += r * P.columns[1]
    place = (r * P.splits + split) * P.heads

    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(gl.bfloat16, [64, 512], TILE)
    keys = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 256], TILE)
    rope_queries = queries
    rope = keys  # footer rows have their RoPE values among the others
    if P.kind == "inline":
        rope_queries = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
        rope = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], TILE)
    weights = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    decays = gl.allocate_shared_memory(gl.float32, [64], LINE)
    bias = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    filled = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    drained = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    written = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    for i in gl.static_range(4):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)  # of a left half both consumers; of a right one the second, twice
    mbarrier.init(filled.index(0), count=1)
    mbarrier.init(drained.index(0), count=1)
    mbarrier.init(written.index(0), count=1)
    _barrier()
    gl.warp_specialize(
        [
            (
                _left,
                (
                    q, queries, rope_queries, keys, rope, bias, weights, decays, full, empty, filled, drained,
                    begin, end, sinks, q_scale, out_scale, out, lse, factors, r, place, head,
                    TILE, P, SCALE, SINKS, Q_SCALE, OUT_SCALE,
                ),
            ),
            (
                _right,
                (
                    queries, keys, weights, decays, empty, filled, drained, written, begin, end, out, factors, place,
                    head, TILE, P,
                ),
            ),
            (
                _produce,
                (
                    pool_0, pool_1, indices_0, indices_1, begin, end, blocks_0, n_0, n_1, rope, queries, keys, bias,
                    full, empty, written, out, place, head, 0, TILE, P,
                ),
            ),
            (
                _produce,
                (
                    pool_0, pool_1, indices_0, indices_1, begin, end, blocks_0, n_0, n_1, rope, queries, keys, bias,
                    full, empty, written, out, place, head, 1, TILE, P,
                ),
            ),
        ],
        [4, 4, 4],
        [RIGHT_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
