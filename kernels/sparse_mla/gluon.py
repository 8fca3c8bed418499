"""Sparse attention for Hopper in Gluon, Triton's explicit dialect: 64 heads a program, warps with roles.

Eight producer warps gather quantised rows with asynchronous copies, dequantise them to bf16, and store them as tiles
that the matrix units read; one warp group multiplies queries by keys, takes the softmax, and accumulates the left half
of the values; another accumulates the right half. Tiles of 64 slots are handed over in halves of 256 dims through a
ring of three, so that filling one overlaps the use of the others.

Codes are not converted but placed: the bits of an e4m3 code, moved into those of a bf16, are 2^-120 times its value.
One bf16 product with ``scale * 2^60`` leaves 2^-60 times the value, for any scale up to 2^67; the queries carry 2^60,
and the output is multiplied by it at the end.
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

# Triton 3.9 renames two of the functions that 3.6 has.
_barrier: Any = getattr(gl, "barrier", None) or gl.thread_barrier
_copy: Any = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

PRODUCERS = 8  # warps
# Registers of a thread of the second consumer and of the producers, by kind of rows; the first consumer has what these
# leave of 512 (the producers count twice). Found by spills: 8 registers fewer for a consumer cost a third of the time.
REGISTERS = {"footer": (160, 80), "inline": (160, 72)}
LOG2E, LN2 = gl.constexpr(forms.LOG2E), gl.constexpr(forms.LN2)
UP = gl.constexpr(2.0**60)  # the factor that queries carry and outputs get back
TIMES_SCALE = gl.constexpr(f"{{ {forms.PLACE} mul.rn.bf16x2 $0, c, $3; mul.rn.bf16x2 $1, d, $4; }}")


@gluon.jit
def _piece(pool, row, valid, raw, START: gl.constexpr, L: gl.constexpr):
    """Starts the copy of 64 bytes of every row; a row that is not valid is filled with zeros."""
    column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, L)), 0)
    at = gl.max_contiguous(gl.multiple_of(pool + gl.expand_dims(row, 1) + (column + START), [1, 16]), [1, 16])
    _copy(raw, at, mask=gl.expand_dims(valid, 1) & (column >= 0))


@gluon.jit
def _gather(
    pool_0, pool_1, slot, valid, first, r0, r1, r2, r3, r4, r5, r6, r7, rope, low, high,
    P: gl.constexpr, L: gl.constexpr, LB: gl.constexpr,
):  # fmt: skip
    """Starts the copies of the rows of a block: codes in pieces of 64, scales, RoPE values."""
    slot = gl.where(valid, slot, 0)
    pool = pool_0
    page_size = P.page_size[0]
    stride = P.stride[0]
    footer = P.footer[0]
    if P.sources == 2:
        pool = gl.where(first, pool_0, pool_1)
        page = gl.where(first, slot // P.page_size[0], slot // P.page_size[1])
        page_size = gl.where(first, P.page_size[0], P.page_size[1])
        stride = gl.where(first, P.stride[0], P.stride[1])
        footer = gl.where(first, P.footer[0], P.footer[1])
    else:
        page = slot // page_size
    offset = slot - page * page_size
    start = page.to(gl.int64) * stride
    row = start + offset * P.row
    _piece(pool, row, valid, r0, 0, L)
    _piece(pool, row, valid, r1, 64, L)
    _piece(pool, row, valid, r2, 128, L)
    _piece(pool, row, valid, r3, 192, L)
    _piece(pool, row, valid, r4, 256, L)
    _piece(pool, row, valid, r5, 320, L)
    _piece(pool, row, valid, r6, 384, L)
    if P.kind == "inline":
        _piece(pool, row, valid, r7, 448, L)
        words = pool.to(tl.pointer_type(gl.int64)) + ((row + 512) >> 3)
        _copy(low, words, mask=valid)
        _copy(high, words + 1, mask=valid)
    else:
        _copy(low, pool.to(tl.pointer_type(gl.int64)) + ((start + (footer + offset * 8)) >> 3), mask=valid)
    column = gl.expand_dims(gl.arange(0, 64, layout=gl.SliceLayout(0, LB)), 0)
    halves = gl.convert_layout((row + P.typed_start) >> 1, gl.SliceLayout(1, LB))
    at = pool.to(tl.pointer_type(gl.bfloat16)) + gl.expand_dims(halves, 1) + column
    at = gl.max_contiguous(gl.multiple_of(at, [1, 8]), [1, 8])
    shown = gl.convert_layout(valid, gl.SliceLayout(1, LB))
    _copy(rope, at, mask=gl.expand_dims(shown, 1) & (column >= 0))


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
def _store(keys, codes, low, high, valid, T: gl.constexpr, P: gl.constexpr):
    """Dequantises the 64 codes of every row that are piece T, and stores them in their half tile."""
    if P.kind == "inline":
        word = low if T < 4 else high
        bits = (word >> (32 * ((T // 2) % 2))).to(gl.int32)
        factor = bits.to(gl.float32, bitcast=True) * UP
        factor = gl.where(valid, factor, 0.0).to(gl.bfloat16)
    else:
        byte = ((low >> (8 * T)) & 255).to(gl.int32)
        bits = gl.minimum(byte + 60, 254) << 7
        bits = gl.where(valid & (byte > 0), gl.where(byte == 255, 0x7FFF, bits), 0)
        factor = bits.to(gl.int16).to(gl.bfloat16, bitcast=True)
    wide, _ = gl.broadcast(gl.expand_dims(factor, 1), codes.to(gl.bfloat16))
    values = gl.inline_asm_elementwise(
        TIMES_SCALE, "=r,=r,r,r,r", [codes, wide], dtype=gl.bfloat16, is_pure=True, pack=4
    )
    keys.slice(64 * (T % 4), 64, dim=1).store(values)


@gluon.jit
def _produce(
    pool_0, pool_1, indices_0, indices_1, begin, end, blocks_0, n_0, n_1,
    r0, r1, r2, r3, r4, r5, r6, r7, rope, low, high, ahead, keys, rope_keys, counted, full, empty,
    P: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Gathers and dequantises blocks ``begin .. end - 1`` into the ring of half tiles."""
    L: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [WARPS, 1], [1, 0])
    LB: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0])
    LR: gl.constexpr = gl.SliceLayout(1, L)
    lane = gl.arange(0, 64, layout=LR)
    at = _columns(indices_0, indices_1, begin, blocks_0, P) + lane
    slot = gl.load(at, mask=(begin < end) & _room(begin, lane, blocks_0, P), other=-1)
    valid = _counted(slot, begin, blocks_0, n_0, n_1, lane, begin < end, P)
    _gather(
        pool_0, pool_1, slot, valid, begin < blocks_0,
        r0, r1, r2, r3, r4, r5, r6, r7, rope, low, high, P, L, LB,
    )  # fmt: skip
    at = _columns(indices_0, indices_1, begin + 1, blocks_0, P) + lane
    _copy(ahead, at, mask=(begin + 1 < end) & _room(begin + 1, lane, blocks_0, P))
    async_copy.commit_group()
    for j in range(begin, end):
        n = j - begin
        async_copy.wait_group(0)
        c0 = r0.load(L)
        c1 = r1.load(L)
        c2 = r2.load(L)
        c3 = r3.load(L)
        c4 = r4.load(L)
        c5 = r5.load(L)
        c6 = r6.load(L)
        tail = rope.load(LB)
        scale_low = low.load(LR)
        scale_high = scale_low
        c7 = c6
        if P.kind == "inline":
            c7 = r7.load(L)
            scale_high = high.load(LR)
        slot = ahead.load(LR)
        next_valid = _counted(slot, j + 1, blocks_0, n_0, n_1, lane, j + 1 < end, P)
        _gather(
            pool_0, pool_1, slot, next_valid, j + 1 < blocks_0,
            r0, r1, r2, r3, r4, r5, r6, r7, rope, low, high, P, L, LB,
        )  # fmt: skip
        at = _columns(indices_0, indices_1, j + 2, blocks_0, P) + lane
        _copy(ahead, at, mask=(j + 2 < end) & _room(j + 2, lane, blocks_0, P))
        async_copy.commit_group()

        half = 2 * n
        stage = half % 3
        mbarrier.wait(empty.index(stage), ((half // 3) & 1) ^ 1)
        left = keys.index(stage)
        _store(left, c0, scale_low, scale_high, valid, 0, P)
        _store(left, c1, scale_low, scale_high, valid, 1, P)
        _store(left, c2, scale_low, scale_high, valid, 2, P)
        _store(left, c3, scale_low, scale_high, valid, 3, P)
        counted.index(n % 2).store(valid.to(gl.int32))
        fence_async_shared()
        _barrier()
        mbarrier.arrive(full.index(stage), count=1)

        half = 2 * n + 1
        stage = half % 3
        mbarrier.wait(empty.index(stage), ((half // 3) & 1) ^ 1)
        right = keys.index(stage)
        _store(right, c4, scale_low, scale_high, valid, 4, P)
        _store(right, c5, scale_low, scale_high, valid, 5, P)
        _store(right, c6, scale_low, scale_high, valid, 6, P)
        shown = gl.expand_dims(gl.convert_layout(valid, gl.SliceLayout(1, LB)), 1)
        tail = gl.where(shown, tail, 0.0)
        if P.kind == "inline":
            _store(right, c7, scale_low, scale_high, valid, 7, P)
            rope_keys.store(tail)
        else:
            right.slice(192, 64, dim=1).store(tail)
        fence_async_shared()
        _barrier()
        mbarrier.arrive(full.index(stage), count=1)
        valid = next_valid


@gluon.jit
def _write(staged, result, out, place, head, OFFSET: gl.constexpr, AL: gl.constexpr, P: gl.constexpr):
    """Stores half of the output ``[64, 256]``, through shared memory where it is the final one."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    LAYOUT: gl.constexpr = WIDE if P.direct else AL
    if P.direct:
        half = staged.slice(OFFSET, 256, dim=1)
        half.store(result.to(gl.bfloat16))
        _barrier()
        result = half.load(WIDE)
    h = head + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, 256, layout=gl.SliceLayout(0, LAYOUT)) + OFFSET
    at = out + place * 512 + gl.expand_dims(h, 1) * 512 + gl.expand_dims(d, 0)
    gl.store(at, result, mask=gl.expand_dims(h < P.heads, 1) & (gl.expand_dims(d, 0) >= 0))


@gluon.jit
def _right(queries, keys, weights, decays, empty, filled, drained, begin, end, out, place, head, P: gl.constexpr):
    """Accumulates the right half of the values."""
    AL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, AL)
    acc = gl.zeros([64, 256], gl.float32, layout=AL)
    for j in range(begin, end):
        n = j - begin
        stage = (2 * n + 1) % 3
        mbarrier.wait(filled.index(0), n & 1)
        acc = acc * gl.expand_dims(decays.load(ROWS), 1)
        acc = warpgroup_mma(weights, keys.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        _barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        mbarrier.arrive(drained.index(0), count=1)
    mbarrier.wait(filled.index(0), (end - begin) & 1)
    share = gl.expand_dims(decays.load(ROWS), 1)
    if P.kind == "footer":  # the last 64 dims are RoPE values, which carry no factor
        d = gl.expand_dims(gl.arange(0, 256, layout=gl.SliceLayout(0, AL)), 0)
        acc = acc * gl.where(d < 192, UP, 1.0)
    else:
        acc = acc * UP
    _write(queries, acc * share, out, place, head, 256, AL, P)


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
def _left(
    q, queries, rope_queries, keys, rope_keys, counted, weights, decays, full, empty, filled, drained,
    begin, end, sinks, q_scale, out_scale, out, lse, r, place, head,
    P: gl.constexpr, SCALE: gl.constexpr, SINKS: gl.constexpr, Q_SCALE: gl.constexpr, OUT_SCALE: gl.constexpr,
):  # fmt: skip
    """Logits, softmax, and the left half of the values."""
    SL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SL)
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
    acc = gl.zeros([64, 256], gl.float32, layout=AL)
    top = gl.full([64], float("-inf"), gl.float32, layout=ROWS)
    mass = gl.zeros([64], gl.float32, layout=ROWS)
    for j in range(begin, end):
        n = j - begin
        stage = (2 * n) % 3
        left = keys.index(stage)
        mbarrier.wait(full.index(stage), ((2 * n) // 3) & 1)
        logits = gl.zeros([64, 64], gl.float32, layout=SL)
        logits = warpgroup_mma(queries.slice(0, 256, dim=1), left.permute((1, 0)), logits, use_acc=False, is_async=True)
        other = (2 * n + 1) % 3
        mbarrier.wait(full.index(other), ((2 * n + 1) // 3) & 1)
        logits = warpgroup_mma(queries.slice(256, 256, dim=1), keys.index(other).permute((1, 0)), logits, is_async=True)
        if P.kind == "inline":
            logits = warpgroup_mma(rope_queries, rope_keys.permute((1, 0)), logits, is_async=True)
        ok = counted.index(n % 2).load(gl.SliceLayout(0, SL))
        logits = warpgroup_mma_wait(0, [logits])
        logits = gl.where(gl.expand_dims(ok != 0, 0), logits * gl.expand_dims(factor, 1), float("-inf"))
        new_top = gl.maximum(top, gl.max(logits, 1))
        origin = gl.where(new_top == float("-inf"), 0.0, new_top)
        decay = gl.exp2(top - origin)
        p = gl.exp2(logits - gl.expand_dims(origin, 1))
        mass = mass * decay + gl.sum(p, 1)
        top = new_top
        half = p.to(gl.bfloat16)
        mbarrier.wait(drained.index(0), (n & 1) ^ 1)
        weights.store(half)
        decays.store(decay)
        fence_async_shared()
        _barrier()
        mbarrier.arrive(empty.index(other), count=1)
        mbarrier.arrive(filled.index(0), count=1)
        acc = acc * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, AL)), 1)
        acc = warpgroup_mma(gl.convert_layout(half, PL), left, acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        _barrier()
        mbarrier.arrive(empty.index(stage), count=2)
    n = end - begin
    none = mass == 0
    safe = gl.where(none, 1.0, mass)
    origin = gl.where(none, 0.0, top)
    log_mass = gl.where(none, float("-inf"), origin + gl.log2(safe))
    if SINKS:
        safe = safe + gl.exp2(gl.load(sinks + h, mask=real, other=0.0) * LOG2E - origin)
    share = gl.where(none, 0.0, 1.0 / safe)
    if OUT_SCALE:
        share = share * gl.load(out_scale)
    mbarrier.wait(drained.index(0), (n & 1) ^ 1)
    decays.store(share)
    _barrier()
    mbarrier.arrive(filled.index(0), count=1)
    if P.direct:
        log_mass = log_mass * LN2
    gl.store(lse + place + h, log_mass, mask=real)
    share = gl.convert_layout(share, gl.SliceLayout(1, AL))
    _write(queries, acc * (gl.expand_dims(share, 1) * UP), out, place, head, 0, AL, P)


@gluon.jit
def attend(
    q, pool_0, indices_0, lengths_0, pool_1, indices_1, lengths_1, sinks, q_scale, out_scale, out, lse,
    P: gl.constexpr, SCALE: gl.constexpr, SINKS: gl.constexpr, Q_SCALE: gl.constexpr, OUT_SCALE: gl.constexpr,
    LENGTHS: gl.constexpr, WARPS: gl.constexpr, RIGHT_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
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
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queries = gl.allocate_shared_memory(gl.bfloat16, [64, 512], TILE)
    keys = gl.allocate_shared_memory(gl.bfloat16, [3, 64, 256], TILE)
    rope_queries = queries
    rope_keys = queries
    if P.kind == "inline":
        rope_queries = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
        rope_keys = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    weights = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    decays = gl.allocate_shared_memory(gl.float32, [64], LINE)
    r0 = gl.allocate_shared_memory(gl.uint8, [64, 64], FLAT)
    r1 = gl.allocate_shared_memory(gl.uint8, [64, 64], FLAT)
    r2 = gl.allocate_shared_memory(gl.uint8, [64, 64], FLAT)
    r3 = gl.allocate_shared_memory(gl.uint8, [64, 64], FLAT)
    r4 = gl.allocate_shared_memory(gl.uint8, [64, 64], FLAT)
    r5 = gl.allocate_shared_memory(gl.uint8, [64, 64], FLAT)
    r6 = gl.allocate_shared_memory(gl.uint8, [64, 64], FLAT)
    r7 = r6
    rope = gl.allocate_shared_memory(gl.bfloat16, [64, 64], gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
    low = gl.allocate_shared_memory(gl.int64, [64], LINE)
    high = low
    if P.kind == "inline":
        r7 = gl.allocate_shared_memory(gl.uint8, [64, 64], FLAT)
        high = gl.allocate_shared_memory(gl.int64, [64], LINE)
    ahead = gl.allocate_shared_memory(gl.int32, [64], LINE)
    counted = gl.allocate_shared_memory(gl.int32, [2, 64], LINE)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [3, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [3, 1], BARRIER)
    filled = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    drained = gl.allocate_shared_memory(gl.int64, [1, 1], BARRIER)
    for i in gl.static_range(3):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)  # of a right half both consumers; of a left one the first, twice
    mbarrier.init(filled.index(0), count=1)
    mbarrier.init(drained.index(0), count=1)
    _barrier()
    gl.warp_specialize(
        [
            (
                _left,
                (
                    q, queries, rope_queries, keys, rope_keys, counted, weights, decays, full, empty, filled, drained,
                    begin, end, sinks, q_scale, out_scale, out, lse, r, place, head,
                    P, SCALE, SINKS, Q_SCALE, OUT_SCALE,
                ),
            ),
            (
                _right,
                (queries, keys, weights, decays, empty, filled, drained, begin, end, out, place, head, P),
            ),
            (
                _produce,
                (
                    pool_0, pool_1, indices_0, indices_1, begin, end, blocks_0, n_0, n_1,
                    r0, r1, r2, r3, r4, r5, r6, r7, rope, low, high, ahead, keys, rope_keys, counted, full, empty,
                    P, WARPS,
                ),
            ),
        ],
        [4, WARPS],
        [RIGHT_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
