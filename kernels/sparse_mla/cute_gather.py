"""The producers of the sparse attention kernel: they gather rows and dequantise them, see ``cute_kernel.py``."""

import dataclasses
import functools
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from ..cute_ptx import (
    any_lane,
    bits_of,
    commit_copies,
    copy_4,
    copy_8,
    copy_16,
    float_of,
    fma_bf16x2,
    load_shared,
    load_shared_2,
    load_shared_4,
    mbarrier_arrive,
    mbarrier_wait,
    multiply_bf16x2,
    pack_bf16x2,
    store_shared,
    store_shared_4,
    store_shared_byte,
    sync_warp,
    thread_index,
    wait_copies,
)
from .cute_place import NONE, TILE, Place, advance, magnitude, row_of, share_of
from .cute_plan import DEPTH, Profile

LARGE = 0x43000000  # 2^7: such a scale times 2^120, rounded up, may have no bf16
PIECE = 4096  # bytes of one piece of 16 bytes of each producer thread


class Thread:
    """Which bytes of which rows a producer thread has.

    Attributes:
        number: of the thread.
        lane: slot of a block whose row it gathers.
        part: 16 bytes of each 64.
        codes: where values of its codes go in a tile: 32 bytes, the second half at ^ 16.
        swap: between two pieces that are not codes, for threads of odd rows, which take the second one first: else rows
            that store together would want the same banks.
        rope: where the first of those goes in a tile, 16 bytes; the other one at ^ 64.
    """

    def __init__(self) -> None:
        self.number = thread_index() - 256
        self.part = self.number & 3
        self.lane = self.number >> 2
        self.codes = self.lane * 128 + (((2 * self.part) ^ (self.lane & 7)) << 4)
        odd = self.lane & 1
        self.swap = odd * PIECE
        self.rope = self.lane * 128 + (((self.part ^ (self.lane & 7)) << 4) ^ (odd << 6))


@dataclasses.dataclass(frozen=True)
class Row:
    """Which blocks of a row's slots the CTA has.

    Attributes:
        indices: addresses of its index rows.
        counts: columns that count in each source.
        blocks_0: blocks of the first source.
        begin, end: first block, and the one after the last.
        done: blocks that the CTA had before those.
    """

    indices: tuple[Any, ...]
    counts: tuple[Any, Any]
    blocks_0: Any
    begin: Any
    end: Any
    done: Any


@cute.jit
def gather(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    arrays: cutlass.Constexpr,
    tile: Any,
    slot: Any,
    phase: Any,
    done: Any,
) -> Any:
    """Gathers and dequantises the blocks of a tile, see ``each_tile``.

    A thread's copies go in units of some pieces. Several units are under way; where one has come it is read into
    registers, and its room is filled anew at once.
    """
    units = p.tuning.units
    t = Thread()
    row, _, _, group = row_of(p, tile)
    counts_0, counts_1, blocks_0, begin, end = share_of(p, at, arrays.lengths, row, group)
    indices = tuple(arrays.indices[i] + Int64(row) * (4 * p.sources[i].columns) for i in range(len(p.sources)))
    r = Row(indices, (counts_0, counts_1), blocks_0, begin, end, done)
    raw = at.raw + t.number * 16
    copy_slot(p, at, t, r, begin)
    commit_copies()
    wait_copies(0)
    sync_warp()
    source = Int64(0)
    size = Int32(0)
    room = raw
    for unit in range_constexpr(units):
        source, size = issue(p, at, arrays, t, r, begin + unit // p.units, room, unit % p.units, source, size)
        room = room + PIECE * p.unit
    if const_expr(p.splits > 1):
        sync_warp()
        cute.arch.cluster_wait()
    room = raw
    for j in cutlass.range(begin, end, unroll=1):
        scale_0 = Uint32(0)
        scale_1 = Uint32(0)
        large = Int32(0)
        half = at.keys + slot * (4 * TILE)
        scales = at.scales + (((j - begin) & (DEPTH - 1)) * 64 + t.lane) * p.data.scale_bytes
        rope = at.rope + ((done + (j - begin)) & 1) * TILE + t.rope
        for k in range_constexpr(p.units):
            wait_copies(units - 1)
            sync_warp()
            if const_expr(k == 0):
                if const_expr(p.data.kind == "inline"):
                    large = any_lane(exceeds_inline(load_shared_4(scales)))
                elif const_expr(p.data.kind == "footer"):
                    scale_0, scale_1 = load_shared_2(scales)
                    scale_1 = scale_1 & Uint32(0x00FFFFFF)
                    large = any_lane(exceeds(scale_0) | exceeds(scale_1))
            words = [load_shared_4(room + PIECE * i + t.swap * swaps(p, k, i)) for i in range(p.unit)]
            ahead = k + units
            source, size = issue(p, at, arrays, t, r, j + ahead // p.units, room, ahead % p.units, source, size)
            room = room + PIECE * p.unit
            if room == raw + units * (PIECE * p.unit):
                room = raw
            if const_expr(k == 0):
                mbarrier_wait(at.empty + 8 * slot, phase)
            for i in range_constexpr(p.unit):
                piece = p.order[k * p.unit + i]
                if const_expr(k * p.unit + i == p.left):
                    slot, phase = hand_over(p, at, t, slot, phase)
                    half = at.keys + slot * (4 * TILE)
                if const_expr(piece == p.left):
                    mbarrier_wait(at.empty + 8 * slot, phase)
                scale = scales
                if const_expr(p.data.kind == "footer"):
                    scale = scale_0 if const_expr(piece < p.left) else scale_1
                place_piece(p, t, piece, words[i], scale, large, half, rope)
        slot, phase = hand_over(p, at, t, slot, phase)
    wait_copies(0)
    return slot, phase, done + (end - begin)


def swaps(p: Profile, unit: int, i: int) -> int:
    """Which way a thread of an odd row goes from a piece of a unit to the one that it takes instead."""
    piece = p.order[unit * p.unit + i] - p.data.codes
    return 0 if piece < 0 else (1, -1)[piece % 2]


@cute.jit
def place_piece(
    p: cutlass.Constexpr,
    t: cutlass.Constexpr,
    piece: cutlass.Constexpr,
    words: Any,
    scale: Any,
    large: Any,
    half: Any,
    rope: Any,
) -> None:
    """Stores the values of a piece; ``scale`` holds those of a half, or is the address of those of a row."""
    if const_expr(p.data.kind == "plain"):
        place = t.rope ^ (64 * (piece % 2))
        if const_expr(piece < 16):
            store_shared_4(half + place + piece // 2 % 4 * TILE, *words)
        else:
            store_shared_4(rope ^ (64 * (piece % 2)), *words)
    elif const_expr(piece < p.data.codes):
        to = half + t.codes + piece % 4 * TILE
        values = dequantised(p, piece, words, scale, large)
        store_shared_4(to, *values[:4])
        store_shared_4(to ^ 16, *values[4:])
    elif const_expr(p.data.kind == "inline"):
        store_shared_4(rope ^ (64 * (piece - 8)), *words)
    else:
        store_shared_4(half + (t.rope ^ (64 * (piece - 7))) + 3 * TILE, *words)


@cute.jit
def hand_over(p: cutlass.Constexpr, at: cutlass.Constexpr, t: cutlass.Constexpr, slot: Any, phase: Any) -> Any:
    """Half a block is there."""
    sync_warp()
    if t.number & 31 == 0:
        mbarrier_arrive(at.full + 8 * slot)
    return advance(p, slot, phase)


def slot_at(p: Profile, at: Place, t: Thread, r: Row, block: Any) -> Any:
    """The address of the thread's slot of a block."""
    return at.slots + ((block - r.begin) & (DEPTH - 1)) * 256 + t.lane * 4


@cute.jit
def copy_slot(
    p: cutlass.Constexpr, at: cutlass.Constexpr, t: cutlass.Constexpr, r: cutlass.Constexpr, block: Any
) -> None:
    """Starts the copy of the slots of a block that the warp needs; columns that do not exist are not read."""
    if t.part < 1 and block < r.end:  # "== 0" compiles to other code in one form
        to = slot_at(p, at, t, r, block)
        column = block * 64 + t.lane
        in_source(p, r, block, functools.partial(copy_index, p, r, to, column), None)


@cute.jit
def copy_index(p: cutlass.Constexpr, r: cutlass.Constexpr, to: Any, column: Any, i: cutlass.Constexpr) -> None:
    """``copy_slot`` for a column of source i."""
    column = column_in(r, i, column)
    if column < p.sources[i].columns:
        copy_4(to, r.indices[i] + Int64(column) * 4)


@cute.jit
def issue(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    arrays: cutlass.Constexpr,
    t: cutlass.Constexpr,
    r: cutlass.Constexpr,
    block: Any,
    room: Any,
    unit: cutlass.Constexpr,
    source: Any,
    size: Any,
) -> Any:
    """Starts a unit of copies of a block: with the first one also those of its scales and of a later block's slots.

    Returns where the thread copies from, and 16, or 0 for a row that takes no part.
    """
    if block < r.end:
        if const_expr(unit == 0):
            scales = Int64(0)
            source, scales, size = locate(p, at, arrays, t, r, block)
            turn = (r.done + (block - r.begin)) & 3
            hole = any_lane(cutlass.select_(size == 0, Uint32(1), Uint32(0)))
            if t.number & 31 == 0:
                store_shared_byte(at.holes + turn * 8 + (t.number >> 5), hole)
            if t.part == 0:
                bias = Float32(-NONE)
                if size == 0:
                    bias = Float32(NONE)
                store_shared(at.bias + turn * 256 + t.lane * 4, bits_of(bias))
                place = ((block - r.begin) & (DEPTH - 1)) * 64 + t.lane
                if const_expr(p.data.kind == "inline"):
                    copy_16(at.scales + place * 16, scales, size)
                elif const_expr(p.data.kind == "footer"):
                    copy_8(at.scales + place * 8, scales, size >> 1)
            copy_slot(p, at, t, r, block + 1)
        for i in range_constexpr(p.unit):
            piece = p.order[p.unit * unit + i]
            offset = piece * 64
            if const_expr(p.data.kind == "inline" and offset >= 512):
                offset = offset + 16
            copy_16(room + PIECE * i, source + offset, size)
    commit_copies()
    return source, size


@cute.jit
def in_source(p: cutlass.Constexpr, r: cutlass.Constexpr, block: Any, work: cutlass.Constexpr, found: Any) -> Any:
    """What ``work`` gives for the source that a block is of: like ``found``, whose value does not matter."""
    if const_expr(len(p.sources) == 1):
        found = work(0)
    else:
        if block < r.blocks_0:
            found = work(0)
        else:
            found = work(1)
    return found


def column_in(r: Row, source: int, column: Any) -> Any:
    """The column of a source, of one that is counted over both."""
    return column - r.blocks_0 * 64 if source else column


@cute.jit
def locate(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    arrays: cutlass.Constexpr,
    t: cutlass.Constexpr,
    r: cutlass.Constexpr,
    block: Any,
) -> Any:
    """Of a row of a block: addresses of the thread's bytes and of the scales, and 16, or 0 if it takes no part."""
    slot = load_shared(slot_at(p, at, t, r, block))
    column = block * 64 + t.lane
    nowhere = (arrays.pools[0], arrays.pools[0], Int32(0))
    return in_source(p, r, block, functools.partial(locate_in, p, arrays, t, r, slot, column), nowhere)


@cute.jit
def locate_in(
    p: cutlass.Constexpr,
    arrays: cutlass.Constexpr,
    t: cutlass.Constexpr,
    r: cutlass.Constexpr,
    slot: Any,
    column: Any,
    i: cutlass.Constexpr,
) -> Any:
    """``locate`` for a slot of source i."""
    source, scales, size = arrays.pools[0], arrays.pools[0], Int32(0)
    if slot < Uint32(p.sources[i].capacity) and column_in(r, i, column) < r.counts[i]:
        source, scales = addresses(p, i, arrays.pools[i], slot, t)
        size = Int32(16)
    return source, scales, size


def addresses(p: Profile, source: int, pool: Any, slot: Any, t: Thread) -> tuple[Any, Any]:
    """Addresses of a thread's bytes of a row, and of its scales."""
    form = p.sources[source]
    page = slot // Uint32(form.page_size)
    offset = Int32(slot - page * Uint32(form.page_size))
    start = pool + Int64(page) * Int64(form.page_stride)
    place = offset * p.data.row_bytes
    scales = offset * 8 + form.footer if p.data.kind == "footer" else place + 512
    return start + Int64(place + t.part * 16), start + Int64(scales)


def exceeds(scales: Any) -> Any:
    """Not 0 if a byte of the word is above 134, a scale above 2^7."""
    return ((scales & Uint32(0x7F7F7F7F)) + Uint32(0x79797979)) & scales & Uint32(0x80808080)


def exceeds_inline(scales: Any) -> Any:
    """Not 0 if one of the float32 scales is 2^7 or more."""
    found = Uint32(0)
    for x in scales:
        found = found | cutlass.select_(magnitude(x) >= Uint32(LARGE), Uint32(1), Uint32(0))
    return found


@cute.jit
def dequantised(p: cutlass.Constexpr, piece: cutlass.Constexpr, words: Any, scale: Any, large: Any) -> Any:
    """The bf16 values of 16 codes, two a word."""
    placed = []
    for word in words:
        odd = ((word >> 4) & Uint32(0x07F007F0)) | (word & Uint32(0x80008000))
        even = ((word << 4) & Uint32(0x07F007F0)) | ((word << 8) & Uint32(0x80008000))
        placed += [odd, even]
    # The placed bits carry 2^-120.
    low = Uint32(0)
    if const_expr(p.data.kind == "inline"):
        bits = load_shared(scale + 4 * (piece // 2))
        up = cutlass.select_(magnitude(bits) < Uint32(LARGE), Uint32(0x7B800000), Uint32(0x3F800000))
        whole = float_of(bits) * float_of(up)
        factor = pack_bf16x2(whole, whole)
        if const_expr(not p.data.powers):
            below = whole - float_of(factor << 16)
            low = pack_bf16x2(below, below)
    else:
        exponent = (scale >> (8 * (piece % 4))) & Uint32(0xFF)
        # 2^(exponent - 127 + 120) remains, whose exponent field is exponent + 120.
        factor = (cutlass.min(exponent, Uint32(134)) + Uint32(120)) * Uint32(0x00800080)
    if const_expr(p.data.kind == "inline" and not p.data.powers):
        a, b, c, d, e, f, g, h = [fma_bf16x2(x, factor, multiply_bf16x2(x, low)) for x in placed]
    else:
        a, b, c, d, e, f, g, h = [multiply_bf16x2(x, factor) for x in placed]
    if large != 0:  # the rest of a scale that no exponent field holds, or NaN
        rest = Uint32(0)
        if const_expr(p.data.kind == "inline"):
            rest = cutlass.select_(magnitude(bits) < Uint32(LARGE), Uint32(0x3F803F80), Uint32(0x7B807B80))
        else:
            rest = (cutlass.max(exponent, Uint32(134)) - Uint32(7)) * Uint32(0x00800080)
            if exponent == Uint32(255):
                rest = Uint32(0x7FFF7FFF)
        a, b, c, d = [multiply_bf16x2(x, rest) for x in (a, b, c, d)]
        e, f, g, h = [multiply_bf16x2(x, rest) for x in (e, f, g, h)]
    return a, b, c, d, e, f, g, h
