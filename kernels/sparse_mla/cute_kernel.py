"""Sparse attention for Hopper in CuTe DSL: 64 heads a CTA, warpgroups with roles.

Two producer warpgroups gather rows, each thread through a ring of its own of 16-byte copies, and dequantise them to
halves of blocks of 64 slots that the matrix units read. The first consumer multiplies queries by keys, takes the
softmax, and accumulates the first half of the values; the second accumulates the rest, with weights that it gets
through shared memory.

Codes are not converted but placed: the bits of an e4m3 code, moved into those of a bf16, are 2^-120 times its value,
and one bf16 product with the scale completes it; a scale that is no power of two is the sum of two bf16 values, which
takes a product and an fma, of which the second rounds. That leaves the values of every four codes in the order
1, 3, 0, 2: queries are permuted alike, and the output is put back.

CTAs that share a row form a cluster. Each sends its parts, in float16 under powers of two, to the CTAs that merge them,
some columns each, and every sum runs in the order of the shares. CTAs of two blocks of heads of a row may form a pair,
in which each gathers half of each block, and writes its values into the shared memory of both.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.memory import SmemAllocator

from ..cute_ptx import (
    any_lane,
    barrier_arrive,
    barrier_sync,
    bf16_of_e4m3,
    bits_of,
    commit_copies,
    copy_4,
    copy_8,
    copy_16,
    divide,
    e4m3x4,
    exp2,
    fence_async_shared,
    float_of,
    fma_bf16x2,
    larger_magnitude,
    load_global,
    load_global_2_if,
    load_global_4,
    load_global_4_if,
    load_shared,
    load_shared_2,
    load_shared_4,
    log2,
    map_shared,
    mbarrier_arrive,
    mbarrier_arrive_cluster,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    mbarrier_wait_cluster,
    multiply_bf16x2,
    pack_bf16x2,
    pack_f16x2,
    permute,
    send_1,
    send_2,
    send_4,
    shuffle_xor,
    store_global,
    store_global_2,
    store_global_4,
    store_global_byte,
    store_shared,
    store_shared_2,
    store_shared_4,
    sync_warp,
    thread_index,
    unpack_f16x2,
    wait_copies,
)
from .cute_plan import Memory, Profile
from .epilogue import MIN_AMAX
from .forms import LN2, LOG2E

NONE = -float("inf")
TILE = 8192  # bytes of a tile of 64 slots or heads by 64 values, in 128-byte rows whose 16-byte parts are swizzled
PIECE = 4096  # bytes of one piece of 16 bytes of each producer thread
WEIGHTS_READY, WEIGHTS_FREE, QUERIES_READY = 1, 2, 3  # named barriers between the consumers
FIRST, SECOND = 0x3210, 0x7654  # selectors of ``permute``


class Place:
    """Addresses, and which part of the work of its cluster a CTA has.

    Attributes:
        share: of the blocks of a row.
        member: of its pair.
        other: what leads from an address to that, for the cluster, of the same place in the other CTA of the pair.
    """

    keys: Any
    rope: Any
    weights: Any
    queries: Any
    raw: Any
    scales: Any
    slots: Any
    bias: Any
    decays: Any
    full: Any
    empty: Any
    ready: Any
    merged: Any

    def __init__(self, memory: Memory, base: Any, share: Any, member: Any, other: Any):
        for name, offset in vars(memory).items():
            if name != "size":
                setattr(self, name, base + offset)
        self.share, self.member, self.other = share, member, other


def build(profile: Profile) -> Any:
    """The launcher of the kernel for a profile."""
    memory = Memory.of(profile)
    clustered = profile.cluster > 1
    if profile.paired and not profile.tuning.reader_fences:
        raise ValueError("Expected readers to fence in a pair")

    @cute.kernel
    def attend(
        q: Int64,
        pool_0: Int64,
        indices_0: Int64,
        lengths_0: Int64,
        pool_1: Int64,
        indices_1: Int64,
        lengths_1: Int64,
        sinks: Int64,
        q_scale: Int64,
        out_scale: Int64,
        out: Int64,
        lse: Int64,
    ) -> None:
        rank, first, _ = cute.arch.block_idx()
        if const_expr(not clustered):
            first = rank
            rank = Int32(0)
        share, member = rank, Int32(0)
        if const_expr(profile.paired):
            share, member = rank >> 1, rank & 1
        thread = thread_index()
        group = cute.arch.make_warp_uniform(thread >> 7)
        buffer = SmemAllocator().allocate(memory.size, 1024)
        base = buffer.toint()
        other = Int32(0)
        if const_expr(profile.paired):
            other = map_shared(base, rank ^ 1) - base
        at = Place(memory, base, share, member, other)
        if thread == 0:
            # A half is given back by those consumer warps, of both CTAs of a pair, that read it last.
            readers = profile.pair * (4 if profile.value_parts == 1 else 8)
            for stage in range_constexpr(profile.tuning.stages):
                mbarrier_init(at.full + 8 * stage, 8)  # producer warps
                mbarrier_init(at.empty + 8 * stage, readers)
            if const_expr(profile.splits > 1):
                mbarrier_init(at.ready, 4 * profile.splits)
                mbarrier_init(at.merged, 1)
                for s in range_constexpr(profile.splits):
                    if share == s:
                        mbarrier_expect(at.merged, bytes_of_parts(profile, s))
        cute.arch.mbarrier_init_fence()
        if const_expr(clustered):
            cute.arch.cluster_arrive()
        cute.arch.sync_threads()
        pools, indices, lengths = (pool_0, pool_1), (indices_0, indices_1), (lengths_0, lengths_1)
        if group >= 2:
            cute.arch.setmaxregister_decrease(profile.registers[2])
            produce(profile, at, pools, indices, lengths, first)
        elif group == 0:
            cute.arch.setmaxregister_increase(profile.registers[0])
            accumulate_left(profile, at, buffer, memory, q, lengths, sinks, q_scale, out_scale, out, lse, first)
        else:
            cute.arch.setmaxregister_increase(profile.registers[1])
            accumulate_right(profile, at, buffer, memory, q, lengths, sinks, out_scale, out, first)
        if const_expr(profile.paired):  # neither ends while the other may write to it
            sync_warp()
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.kernel
    def combine(
        parts: Int64,
        masses: Int64,
        sinks: Int64,
        out_scale: Int64,
        cos_sin: Int64,
        out: Int64,
        lse: Int64,
        scales: Int64,
    ) -> None:
        head, row, _ = cute.arch.block_idx()
        complete(profile, parts, masses, sinks, out_scale, cos_sin, out, lse, scales, row, head)

    def address(x: Any) -> Any:
        return Int64(0) if x is None else x.iterator.toint()

    options = {"block": [512, 1, 1], "min_blocks_per_mp": 1, "hint_smem_base_uniform": False}
    grid = [profile.teams, 1, 1]
    if clustered:
        options["cluster"], grid = [profile.cluster, 1, 1], [profile.cluster, profile.teams, 1]

    @cute.jit
    def launch(
        stream: cuda.CUstream,
        q: cute.Tensor,
        pool_0: cute.Tensor,
        indices_0: cute.Tensor,
        lengths_0: Any,
        pool_1: Any,
        indices_1: Any,
        lengths_1: Any,
        sinks: Any,
        q_scale: Any,
        out_scale: Any,
        cos_sin: Any,
        out: cute.Tensor,
        lse: cute.Tensor,
        parts: Any = None,
        masses: Any = None,
        scales: Any = None,
    ) -> None:
        inputs = [q, pool_0, indices_0, lengths_0, pool_1, indices_1, lengths_1, sinks, q_scale, out_scale]
        results = [parts, masses] if const_expr(profile.partial) else [out, lse]
        attend(*[address(x) for x in [*inputs, *results]]).launch(grid=grid, stream=stream, **options)
        if const_expr(profile.partial):
            combine(*[address(x) for x in (parts, masses, sinks, out_scale, cos_sin, out, lse, scales)]).launch(
                grid=[profile.heads, padded(profile), 1], block=[128, 1, 1], stream=stream
            )

    return launch


def padded(p: Profile) -> int:
    """Rows of the scales of an output."""
    return p.rows if p.ending is None else -(-p.rows // 4) * 4


# The work of a CTA


def row_of(p: Profile, at: Place, tile: Any) -> tuple[Any, Any, Any, Any]:
    """Row, first head, part of the values, and group of a tile."""

    def split(x: Any, n: int) -> tuple[Any, Any]:
        return (x, Int32(0)) if n == 1 else (x // n, x % n)

    tile, part = split(tile, p.value_parts)
    tile, group = split(tile, p.groups)
    row, head = split(tile, p.head_blocks // p.pair)
    if p.paired:
        head = head * 2 + at.member
    return row, head * 64, part, group


@cute.jit
def share_of(p: cutlass.Constexpr, at: cutlass.Constexpr, lengths: Any, row: Any, group: Any) -> Any:
    """Columns that count in each source, blocks of the first, and the first and last block of this CTA."""
    counts = [Int32(0), Int32(0)]
    for i in range_constexpr(len(p.sources)):
        columns = p.sources[i].columns
        counts[i] = Int32(columns)
        if const_expr(p.sources[i].lengths):
            length = Int32(load_global(lengths[i] + Int64(row) * 4))
            counts[i] = cutlass.min(cutlass.max(length, Int32(0)), Int32(columns))
    blocks_0 = (counts[0] + 63) >> 6
    blocks = blocks_0 + ((counts[1] + 63) >> 6)
    if const_expr(p.splits == 1):
        begin, end = Int32(0), blocks
    elif const_expr(p.split_blocks > 0):
        begin = cutlass.min((group * p.splits + at.share) * p.split_blocks, blocks)
        end = cutlass.min(begin + p.split_blocks, blocks)
    else:
        number = group * p.splits + at.share
        begin, end = number * blocks // p.shares, (number + 1) * blocks // p.shares
    return counts[0], counts[1], blocks_0, begin, end


@cute.jit
def advance(p: cutlass.Constexpr, slot: Any, phase: Any) -> Any:
    """The next half of the ring, and the parity of its phase."""
    slot = slot + 1
    if slot == p.tuning.stages:
        slot = Int32(0)
        phase = phase ^ 1
    return slot, phase


# Producers


class Thread:
    """Which bytes of which rows a producer thread has.

    Attributes:
        number: of the thread.
        row: that it gathers, of those that the CTA gathers.
        lane: slot of a block that the row is.
        far: slot of a block whose row the other CTA of a pair gathers.
        part: 16 bytes of each 64.
        side: 64 bytes of each 128, in a pair.
        codes: where values of its codes go in a tile: 32 bytes, the second half at ^ 16.
        rope: where its RoPE values go, 16 bytes.
    """

    def __init__(self, p: Profile, at: Place):
        self.number = thread_index() - 256
        self.part = self.number & 3
        if p.paired:
            # Eight lanes that store at a time have two rows each, whose places lie in different banks.
            lane = self.number & 31
            self.side = (lane >> 3) & 1
            self.row = ((self.number >> 5) << 2) + ((lane >> 4) << 1) + ((lane >> 2) & 1)
            self.lane = at.member * 32 + self.row
            self.far = self.lane ^ 32
        else:
            self.side, self.row = Int32(0), self.number >> 2
            self.lane = self.far = self.row
        self.codes = self.lane * 128 + (((2 * self.part) ^ (self.lane & 7)) << 4)
        self.rope = self.lane * 128 + ((self.part ^ (self.lane & 7)) << 4)
        if p.paired:
            self.codes = self.codes + self.side * TILE


@cute.jit
def produce(p: cutlass.Constexpr, at: cutlass.Constexpr, pools: Any, indices: Any, lengths: Any, first: Any) -> None:
    """Gathers and dequantises the blocks of every tile."""
    slot, phase, done = Int32(0), Int32(1), Int32(0)
    if const_expr(p.teams == p.tiles):
        slot, phase, done = produce_tile(p, at, pools, indices, lengths, first, slot, phase, done, p.cluster > 1)
    else:
        if const_expr(p.cluster > 1):
            cute.arch.cluster_wait()
        for tile in cutlass.range(first, p.tiles, p.teams, unroll=1):
            slot, phase, done = produce_tile(p, at, pools, indices, lengths, tile, slot, phase, done, False)


@cute.jit
def produce_tile(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    pools: Any,
    indices: Any,
    lengths: Any,
    tile: Any,
    slot: Any,
    phase: Any,
    done: Any,
    join: cutlass.Constexpr,
) -> Any:
    """The blocks of a tile; ``done`` counts those of earlier ones; ``join``: wait for the cluster.

    A thread's copies go in units of some pieces. Several units are under way; where one has come it is read into
    registers, and its room is filled anew at once.
    """
    units = p.tuning.units
    t = Thread(p, at)
    row, _, _, group = row_of(p, at, tile)
    counts_0, counts_1, blocks_0, begin, end = share_of(p, at, lengths, row, group)
    row_indices = tuple(indices[i] + Int64(row) * (4 * p.sources[i].columns) for i in range(len(p.sources)))
    raw = at.raw + t.number * 16
    for i in range_constexpr(p.ahead):
        copy_slot(p, at, t, row_indices, begin, end, begin + i, blocks_0)
    commit_copies()
    wait_copies(0)
    sync_warp()
    source = Int64(0)
    size = Int32(0)
    room = raw
    for unit in range_constexpr(units):
        source, size = issue(
            p, at, t, pools, row_indices, begin, end, begin + unit // p.units, blocks_0, counts_0, counts_1, done, room,
            unit % p.units, source, size,
        )  # fmt: skip
        room = room + PIECE * p.unit
    if const_expr(join):
        sync_warp()
        cute.arch.cluster_wait()
    room = raw
    for j in cutlass.range(begin, end, unroll=1):
        scale_0 = Uint32(0)
        scale_1 = Uint32(0)
        large = Int32(0)
        half = at.keys + slot * (4 * TILE)
        full = at.full + 8 * slot
        scales = at.scales + (((j - begin) & (p.depth - 1)) * p.gathered + t.row) * p.data.scale_bytes
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
            words = [load_shared_4(room + PIECE * i) for i in range(p.unit)]
            source, size = issue(
                p, at, t, pools, row_indices, begin, end, j + (k + units) // p.units, blocks_0, counts_0, counts_1,
                done, room, (k + units) % p.units, source, size,
            )  # fmt: skip
            room = room + PIECE * p.unit
            if room == raw + units * (PIECE * p.unit):
                room = raw
            if const_expr(k == 0):
                wait_for_room(p, at, slot, phase)
            for i in range_constexpr(p.unit):
                piece = k * p.unit + i
                if const_expr(piece == p.left):
                    slot, phase = hand_over(p, at, t, slot, phase, 4 * TILE)
                    half = at.keys + slot * (4 * TILE)
                    full = at.full + 8 * slot
                    wait_for_room(p, at, slot, phase)
                scale = scales
                if const_expr(p.data.kind == "footer"):
                    scale = scale_0 if const_expr(piece < p.left) else scale_1
                place_piece(p, at, t, piece, words[i], scale, large, half, rope, full)
        slot, phase = hand_over(p, at, t, slot, phase, (p.data.width // 64 - 4) * TILE)
    wait_copies(0)
    return slot, phase, done + (end - begin)


@cute.jit
def place_piece(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    t: cutlass.Constexpr,
    piece: cutlass.Constexpr,
    words: Any,
    scale: Any,
    large: Any,
    half: Any,
    rope: Any,
    full: Any,
) -> None:
    """Stores the values of a piece; ``scale`` holds those of a half, or is the address of those of a row."""
    tile = piece * p.pair
    to = half + t.codes + tile % 4 * TILE
    if const_expr(p.data.kind == "plain"):
        place = t.rope ^ (64 * (piece % 2))
        if const_expr(piece < 16):
            store_shared_4(half + place + piece // 2 % 4 * TILE, *words)
        else:
            store_shared_4(rope ^ (64 * (piece % 2)), *words)
    elif const_expr(tile + p.pair <= p.data.codes):
        values = dequantised(p, t, tile, words, scale, large)
        put(p, at, to, values[:4], full)
        put(p, at, to ^ 16, values[4:], full)
    elif const_expr(p.data.kind == "inline"):
        if const_expr(p.paired):
            put(p, at, rope ^ (t.side << 6), words, full)
        else:
            put(p, at, rope ^ (64 * (tile - 8)), words, full)
    elif const_expr(not p.paired):
        put(p, at, half + (t.rope ^ (64 * (tile - 7))) + 3 * TILE, words, full)
    elif const_expr(tile == 6):  # on one side still codes
        if t.side == 0:
            values = dequantised(p, t, tile, words, scale, large)
            put(p, at, to, values[:4], full)
            put(p, at, to ^ 16, values[4:], full)
        else:
            put(p, at, half + t.rope + 3 * TILE, words, full)
    else:
        if t.side == 0:
            put(p, at, half + (t.rope ^ 64) + 3 * TILE, words, full)


@cute.jit
def put(p: cutlass.Constexpr, at: cutlass.Constexpr, to: Any, words: Any, full: Any) -> None:
    """Stores 16 bytes, in a pair for both CTAs."""
    store_shared_4(to, *words)
    if const_expr(p.paired):
        send_4(to + at.other, *words, full + at.other)


@cute.jit
def wait_for_room(p: cutlass.Constexpr, at: cutlass.Constexpr, slot: Any, phase: Any) -> None:
    """Waits until nothing reads a half any more."""
    if const_expr(p.paired):
        mbarrier_wait_cluster(at.empty + 8 * slot, phase)
    else:
        mbarrier_wait(at.empty + 8 * slot, phase)


@cute.jit
def hand_over(
    p: cutlass.Constexpr, at: cutlass.Constexpr, t: cutlass.Constexpr, slot: Any, phase: Any, size: cutlass.Constexpr
) -> Any:
    """Half a block, of so many bytes, is there, but for what the other CTA of a pair sends."""
    if const_expr(not p.tuning.reader_fences):
        fence_async_shared()
    sync_warp()
    if const_expr(p.paired):
        if t.number == 0:
            mbarrier_expect(at.full + 8 * slot, size // 2)
        elif t.number & 31 == 0:
            mbarrier_arrive(at.full + 8 * slot)
    else:
        if t.number & 31 == 0:
            mbarrier_arrive(at.full + 8 * slot)
    return advance(p, slot, phase)


@cute.jit
def copy_slot(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    t: cutlass.Constexpr,
    row_indices: Any,
    begin: Any,
    end: Any,
    block: Any,
    blocks_0: Any,
) -> None:
    """Starts the copy of the slots of a block that the warp needs; columns that do not exist are not read."""
    lane = t.lane
    if const_expr(p.paired):
        if t.part == 1:
            lane = t.far
    if t.part < p.pair and t.side == 0 and block < end:
        to = at.slots + ((block - begin) & (p.depth - 1)) * 256 + lane * 4
        column = block * 64 + lane
        if const_expr(len(p.sources) == 1):
            if column < p.sources[0].columns:
                copy_4(to, row_indices[0] + Int64(column) * 4)
        else:
            if block < blocks_0:
                if column < p.sources[0].columns:
                    copy_4(to, row_indices[0] + Int64(column) * 4)
            else:
                column = column - blocks_0 * 64
                if column < p.sources[1].columns:
                    copy_4(to, row_indices[1] + Int64(column) * 4)


@cute.jit
def issue(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    t: cutlass.Constexpr,
    pools: Any,
    row_indices: Any,
    begin: Any,
    end: Any,
    block: Any,
    blocks_0: Any,
    counts_0: Any,
    counts_1: Any,
    done: Any,
    room: Any,
    unit: cutlass.Constexpr,
    source: Any,
    size: Any,
) -> Any:
    """Starts a unit of copies of a block: with the first one also those of its scales and of a later block's slots.

    Returns where the thread copies from, and 16, or 0 for a row that takes no part.
    """
    if block < end:
        if const_expr(unit == 0):
            scales = Int64(0)
            source, scales, size = locate(p, at, t, pools, begin, block, blocks_0, counts_0, counts_1)
            shown = size
            if const_expr(p.paired):
                if t.part == 1:
                    shown = takes_part(p, at, t.far, begin, block, blocks_0, counts_0, counts_1)
            if t.part < p.pair and t.side == 0:
                bias = Float32(0.0)
                if shown == 0:
                    bias = Float32(NONE)
                lane = t.lane
                if const_expr(p.paired):
                    if t.part == 1:
                        lane = t.far
                store_shared(at.bias + ((done + (block - begin)) & 3) * 256 + lane * 4, bits_of(bias))
            if t.part == 0 and t.side == 0:
                place = ((block - begin) & (p.depth - 1)) * p.gathered + t.row
                if const_expr(p.data.kind == "inline"):
                    copy_16(at.scales + place * 16, scales, size)
                elif const_expr(p.data.kind == "footer"):
                    copy_8(at.scales + place * 8, scales, size >> 1)
            copy_slot(p, at, t, row_indices, begin, end, block + p.ahead, blocks_0)
        for i in range_constexpr(p.unit):
            piece = p.unit * unit + i
            offset = piece * (64 * p.pair)
            if const_expr(p.data.kind == "inline" and offset >= 512):
                offset = offset + 16
            if const_expr(p.paired and p.data.kind == "footer" and piece == 4):  # there are 36 parts of 16 bytes
                copy_16(room + PIECE * i, source + offset, cutlass.select_(t.side == 0, size, Int32(0)))
            else:
                copy_16(room + PIECE * i, source + offset, size)
    commit_copies()
    return source, size


@cute.jit
def locate(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    t: cutlass.Constexpr,
    pools: Any,
    begin: Any,
    block: Any,
    blocks_0: Any,
    counts_0: Any,
    counts_1: Any,
) -> Any:
    """Of a row of a block: addresses of the thread's bytes and of the scales, and 16, or 0 if it takes no part."""
    slot = load_shared(at.slots + ((block - begin) & (p.depth - 1)) * 256 + t.lane * 4)
    column = block * 64 + t.lane
    source = pools[0]
    scales = pools[0]
    size = Int32(0)
    if const_expr(len(p.sources) == 1):
        if slot < Uint32(p.sources[0].capacity) and column < counts_0:
            source, scales = addresses(p, 0, pools[0], slot, t)
            size = Int32(16)
    else:
        if block < blocks_0:
            if slot < Uint32(p.sources[0].capacity) and column < counts_0:
                source, scales = addresses(p, 0, pools[0], slot, t)
                size = Int32(16)
        else:
            if slot < Uint32(p.sources[1].capacity) and column - blocks_0 * 64 < counts_1:
                source, scales = addresses(p, 1, pools[1], slot, t)
                size = Int32(16)
    return source, scales, size


@cute.jit
def takes_part(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    lane: Any,
    begin: Any,
    block: Any,
    blocks_0: Any,
    counts_0: Any,
    counts_1: Any,
) -> Any:
    """Whether a slot of a block takes part."""
    slot = load_shared(at.slots + ((block - begin) & (p.depth - 1)) * 256 + lane * 4)
    column = block * 64 + lane
    taken = Int32(0)
    if const_expr(len(p.sources) == 1):
        if slot < Uint32(p.sources[0].capacity) and column < counts_0:
            taken = Int32(16)
    else:
        if block < blocks_0:
            if slot < Uint32(p.sources[0].capacity) and column < counts_0:
                taken = Int32(16)
        else:
            if slot < Uint32(p.sources[1].capacity) and column - blocks_0 * 64 < counts_1:
                taken = Int32(16)
    return taken


def addresses(p: Profile, source: int, pool: Any, slot: Any, t: Thread) -> tuple[Any, Any]:
    """Addresses of a thread's bytes of a row, and of its scales."""
    form = p.sources[source]
    page = slot // Uint32(form.page_size)
    offset = Int32(slot - page * Uint32(form.page_size))
    start = pool + Int64(page) * Int64(form.page_stride)
    place = offset * p.data.row_bytes
    scales = offset * 8 + form.footer if p.data.kind == "footer" else place + 512
    return start + Int64(place + t.part * 16 + t.side * 64), start + Int64(scales)


def exceeds(scales: Any) -> Any:
    """Not 0 if a byte of the word is above 134, a scale above 2^7."""
    return ((scales & Uint32(0x7F7F7F7F)) + Uint32(0x79797979)) & scales & Uint32(0x80808080)


def exceeds_inline(scales: Any) -> Any:
    """Not 0 if one of the float32 scales is 2^8 or more."""
    found = Uint32(0)
    for x in scales:
        found = found | cutlass.select_(magnitude(x) >= Uint32(0x43800000), Uint32(1), Uint32(0))
    return found


def magnitude(word: Any) -> Any:
    return word & Uint32(0x7FFFFFFF)


@cute.jit
def dequantised(
    p: cutlass.Constexpr, t: cutlass.Constexpr, tile: cutlass.Constexpr, words: Any, scale: Any, large: Any
) -> Any:
    """The bf16 values of 16 codes, two a word; in a pair half of the threads have the tile after ``tile``."""
    placed = []
    for word in words:
        odd = ((word >> 4) & Uint32(0x07F007F0)) | (word & Uint32(0x80008000))
        even = ((word << 4) & Uint32(0x07F007F0)) | ((word << 8) & Uint32(0x80008000))
        placed += [odd, even]
    # The placed bits carry 2^-120.
    low = Uint32(0)
    if const_expr(p.data.kind == "inline"):
        bits = load_shared(scale + 4 * (tile // 2))
        up = cutlass.select_(magnitude(bits) < Uint32(0x43800000), Uint32(0x7B800000), Uint32(0x3F800000))
        whole = float_of(bits) * float_of(up)
        factor = pack_bf16x2(whole, whole)
        if const_expr(not p.data.powers):
            below = whole - float_of(factor << 16)
            low = pack_bf16x2(below, below)
    else:
        if const_expr(p.paired):
            exponent = (scale >> (8 * (tile % 4) + 8 * t.side)) & Uint32(0xFF)
        else:
            exponent = (scale >> (8 * (tile % 4))) & Uint32(0xFF)
        # 2^(exponent - 127 + 120) remains, whose exponent field is exponent + 120.
        factor = (cutlass.min(exponent, Uint32(134)) + Uint32(120)) * Uint32(0x00800080)
    if const_expr(p.data.kind == "inline" and not p.data.powers):
        a, b, c, d, e, f, g, h = [fma_bf16x2(x, factor, multiply_bf16x2(x, low)) for x in placed]
    else:
        a, b, c, d, e, f, g, h = [multiply_bf16x2(x, factor) for x in placed]
    if large != 0:  # the rest of a scale that no exponent field holds, or NaN
        rest = Uint32(0)
        if const_expr(p.data.kind == "inline"):
            rest = cutlass.select_(magnitude(bits) < Uint32(0x43800000), Uint32(0x3F803F80), Uint32(0x7B807B80))
        else:
            rest = (cutlass.max(exponent, Uint32(134)) - Uint32(7)) * Uint32(0x00800080)
            if exponent == Uint32(255):
                rest = Uint32(0x7FFF7FFF)
        a, b, c, d = [multiply_bf16x2(x, rest) for x in (a, b, c, d)]
        e, f, g, h = [multiply_bf16x2(x, rest) for x in (e, f, g, h)]
    return a, b, c, d, e, f, g, h


# Consumers


def product(n: int, source: Any, major: Any) -> Any:
    """A bf16 product of 64 rows and n columns."""
    kind = warpgroup.MmaF16BF16Op(BFloat16, Float32, (64, n, 16), source, OperandMajorMode.K, major)
    return cute.make_tiled_mma(cute.make_mma_atom(kind), (1, 1, 1))


def swizzled(buffer: Any, offset: int, layout: Any) -> Any:
    """bf16 tiles in shared memory."""
    return cute.make_tensor(cute.recast_ptr(buffer + offset, cute.make_swizzle(3, 4, 3), BFloat16), layout)


def values_of(p: Profile, buffer: Any, memory: Memory) -> Any:
    """The ring of keys as values, by tile of 64 of them: ``(values, slots, tile)``."""
    wide = p.values // 64
    layout = cute.make_layout(((64, wide), (8, 8), 4 * p.tuning.stages), stride=((1, 4096), (64, 512), 4096))
    return swizzled(buffer, memory.keys, layout)


def load_query(p: Profile, source: Any, part: Any, here: Any) -> Any:
    """Eight values of a query, or zeros; codes in the first two of four words."""
    if p.q_codes:
        return (*load_global_2_if(here, source + Int64(part * 8)), Uint32(0), Uint32(0))
    if p.heads % 64 == 0:
        return load_global_4(source + Int64(part * 16))
    return load_global_4_if(here, source + Int64(part * 16))


@cute.jit
def load_queries(p: cutlass.Constexpr, at: cutlass.Constexpr, q: Any, row: Any, head: Any) -> None:
    """Queries of 64 heads to shared memory, by both consumers, dims in the order of dequantised values."""
    thread = thread_index()
    across = p.data.width // 8  # parts of 16 bytes of a query
    source = q + (Int64(row) * p.heads + Int64(head)) * ((8 if p.q_codes else 16) * across)
    words = []
    for i in range_constexpr(across // 4):
        part = thread + 256 * i
        if const_expr(p.heads % 64 == 0):
            words.append(load_query(p, source, part, Int32(1)))
        else:
            here = Int32(0)
            if head + part // across < p.heads:
                here = Int32(1)
            words.append(load_query(p, source, part, here))
    for i in range_constexpr(across // 4):
        part = thread + 256 * i
        h = part // across
        c = part - h * across
        x, y, z, w = words[i]
        if const_expr(p.q_codes):
            x, y, z, w = bf16_of_e4m3(x, 0), bf16_of_e4m3(x, 1), bf16_of_e4m3(y, 0), bf16_of_e4m3(y, 1)
        odd_0, even_0 = permute(x, y, 0x7632), permute(x, y, 0x5410)
        odd_1, even_1 = permute(z, w, 0x7632), permute(z, w, 0x5410)
        if c >= 8 * p.data.codes:  # RoPE values are not permuted
            odd_0, even_0, odd_1, even_1 = x, y, z, w
        to = at.queries + (c >> 3) * TILE + h * 128 + (((c & 7) ^ (h & 7)) << 4)
        store_shared_4(to, odd_0, even_0, odd_1, even_1)
    fence_async_shared()


@cute.jit
def accumulate_left(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    buffer: Any,
    memory: cutlass.Constexpr,
    q: Any,
    lengths: Any,
    sinks: Any,
    q_scale: Any,
    out_scale: Any,
    out: Any,
    lse: Any,
    first: Any,
) -> None:
    """The first consumer over all tiles."""
    slot, phase, done = Int32(0), Int32(0), Int32(0)
    if const_expr(p.teams == p.tiles):
        join = p.cluster > 1
        left_tile(
            p, at, buffer, memory, q, lengths, sinks, q_scale, out_scale, out, lse, first, slot, phase, done, join
        )
    else:
        if const_expr(p.cluster > 1):
            cute.arch.cluster_wait()
        for tile in cutlass.range(first, p.tiles, p.teams, unroll=1):
            slot, phase, done = left_tile(
                p, at, buffer, memory, q, lengths, sinks, q_scale, out_scale, out, lse, tile, slot, phase, done, False
            )


@cute.jit
def left_tile(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    buffer: Any,
    memory: cutlass.Constexpr,
    q: Any,
    lengths: Any,
    sinks: Any,
    q_scale: Any,
    out_scale: Any,
    out: Any,
    lse: Any,
    tile: Any,
    slot: Any,
    phase: Any,
    done: Any,
    join: cutlass.Constexpr,
) -> Any:
    """Logits, softmax, and the first half of the values."""
    row, head, part, group = row_of(p, at, tile)
    load_queries(p, at, q, row, head)
    _, _, _, begin, end = share_of(p, at, lengths, row, group)
    thread = thread_index()
    lane = thread & 31
    quad = lane & 3
    h = ((thread >> 5) << 4) + (lane >> 2)  # of the first of the thread's two heads; the other is 8 further
    factor_0 = Float32(p.scale * LOG2E)
    factor_1 = factor_0
    if const_expr(p.q_scale):
        place = q_scale + (Int64(row) * p.heads + Int64(head)) * 4
        factor_0 = factor_0 * load_head(p, place, head, h)
        factor_1 = factor_1 * load_head(p, place, head, h + 8)

    logits_mma = product(64, warpgroup.OperandSource.SMEM, OperandMajorMode.K)
    values_mma = product(min(p.values, 128), warpgroup.OperandSource.RMEM, OperandMajorMode.MN)
    across = p.data.width // 64
    queries = swizzled(buffer, memory.queries, cute.make_layout(((8, 8), (64, across)), stride=((64, 512), (1, 4096))))
    stages = p.tuning.stages
    keys = swizzled(
        buffer, memory.keys, cute.make_layout(((8, 8), (64, 4), stages), stride=((64, 512), (1, 4096), 16384))
    )
    part_of_logits = logits_mma.get_slice(thread)
    query_parts = logits_mma.make_fragment_A(part_of_logits.partition_A(queries))
    key_parts = logits_mma.make_fragment_B(part_of_logits.partition_B(keys))
    if const_expr(p.data.width > 512):
        rope = swizzled(
            buffer, memory.rope, cute.make_layout(((8, 8), (64, 1), 2), stride=((64, 512), (1, 4096), 4096))
        )
        rope_parts = logits_mma.make_fragment_B(part_of_logits.partition_B(rope))
    part_of_values = values_mma.get_slice(thread)
    value_parts = values_mma.make_fragment_B(part_of_values.partition_B(values_of(p, buffer, memory)))
    logits = logits_mma.make_fragment_C(logits_mma.partition_shape_C((64, 64)))
    acc = values_mma.make_fragment_C(values_mma.partition_shape_C((64, p.values)))
    weights = values_mma.make_fragment_A(values_mma.partition_shape_A((64, 64)))
    words = cute.recast_tensor(weights, Uint32)

    for i in range_constexpr(p.values // 2):
        acc[i] = Float32(0.0)
    top_0, top_1 = Float32(NONE), Float32(NONE)
    mass_0, mass_1 = Float32(0.0), Float32(0.0)
    barrier_sync(QUERIES_READY, 256)
    if const_expr(join):
        cute.arch.cluster_wait()
    for j in cutlass.range(begin, end, unroll=1):
        left_slot, left_phase = slot, phase
        right_slot, right_phase = advance(p, slot, phase)
        slot, phase = advance(p, right_slot, right_phase)
        bias = at.bias + ((done + (j - begin)) & 3) * 256 + quad * 8
        take_half(p, at, left_slot, left_phase)
        warpgroup.fence()
        for k in range_constexpr(16):
            logits_mma.set(warpgroup.Field.ACCUMULATE, k != 0)
            cute.gemm(logits_mma, logits, query_parts[None, None, k], key_parts[None, None, k, left_slot], logits)
        take_half(p, at, right_slot, right_phase)
        for k in range_constexpr(16):
            at_k = key_parts[None, None, k, right_slot]
            cute.gemm(logits_mma, logits, query_parts[None, None, k + 16], at_k, logits)
        if const_expr(p.data.width > 512):
            for k in range_constexpr(4):
                at_k = rope_parts[None, None, k, (done + (j - begin)) & 1]
                cute.gemm(logits_mma, logits, query_parts[None, None, k + 32], at_k, logits)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        if const_expr(p.splits > 1):
            if j == end - 1:
                announce(p, at, lane)

        new_0, new_1 = top_0, top_1
        for i in range_constexpr(8):
            hole_0, hole_1 = [float_of(x) for x in load_shared_2(bias + 32 * i)]
            logits[4 * i] = logits[4 * i] * factor_0 + hole_0
            logits[4 * i + 1] = logits[4 * i + 1] * factor_0 + hole_1
            logits[4 * i + 2] = logits[4 * i + 2] * factor_1 + hole_0
            logits[4 * i + 3] = logits[4 * i + 3] * factor_1 + hole_1
            new_0 = cute.arch.fmax(new_0, cute.arch.fmax(logits[4 * i], logits[4 * i + 1]))
            new_1 = cute.arch.fmax(new_1, cute.arch.fmax(logits[4 * i + 2], logits[4 * i + 3]))
        new_0, new_1 = largest_of_quad(new_0), largest_of_quad(new_1)
        origin_0, origin_1 = origin(new_0), origin(new_1)
        decay_0, decay_1 = exp2(top_0 - origin_0), exp2(top_1 - origin_1)
        top_0, top_1 = new_0, new_1
        sum_0, sum_1 = Float32(0.0), Float32(0.0)
        for i in range_constexpr(8):
            a, b = exp2(logits[4 * i] - origin_0), exp2(logits[4 * i + 1] - origin_0)
            c, d = exp2(logits[4 * i + 2] - origin_1), exp2(logits[4 * i + 3] - origin_1)
            sum_0 = sum_0 + (a + b)
            sum_1 = sum_1 + (c + d)
            words[2 * i], words[2 * i + 1] = pack_bf16x2(a, b), pack_bf16x2(c, d)
        mass_0 = mass_0 * decay_0 + sum_0
        mass_1 = mass_1 * decay_1 + sum_1
        barrier_sync(WEIGHTS_FREE, 256)
        for i in range_constexpr(4):
            to = at.weights + 2048 * i + thread * 16
            store_shared_4(to, words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3])
        store_for_quad(at, h, quad, decay_0, decay_1)
        barrier_arrive(WEIGHTS_READY, 256)
        rescale(p, acc, decay_0, decay_1)
        accumulate(p, values_mma, acc, weights, value_parts, value_tile(p, part, left_slot, right_slot, 0))
        give_back(p, at, lane, left_slot, right_slot, 0)

    if const_expr(p.splits > 1):
        if begin == end:
            announce(p, at, lane)
    mass_0, mass_1 = sum_of_quad(mass_0), sum_of_quad(mass_1)
    barrier_sync(WEIGHTS_FREE, 256)
    if const_expr(p.splits == 1):
        share_0 = own_share(p, top_0, mass_0, sinks, out_scale, head, h)
        share_1 = own_share(p, top_1, mass_1, sinks, out_scale, head, h + 8)
        store_for_quad(at, h, quad, share_0, share_1)
        barrier_arrive(WEIGHTS_READY, 256)
        place = row * p.groups + group
        if part == 0 and quad == 0:
            write_mass(p, lse, place, head, h, top_0, mass_0)
            write_mass(p, lse, place, head, h + 8, top_1, mass_1)
        write_all(p, acc, share_0, share_1, out, place, head, h, quad, part, 0)
    else:
        up_0, down_0, up_1, down_1 = lifts(p, acc)
        mbarrier_wait_cluster(at.ready, 0)
        send_statistics(p, at, h, quad, top_0, mass_0, down_0, top_1, mass_1, down_1)
        send_parts(p, at, acc, up_0, up_1, thread, 0)
        merge(p, at, sinks, out_scale, out, lse, row, head, h, quad, part, group, thread, 0)
    return slot, phase, done + (end - begin)


@cute.jit
def accumulate_right(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    buffer: Any,
    memory: cutlass.Constexpr,
    q: Any,
    lengths: Any,
    sinks: Any,
    out_scale: Any,
    out: Any,
    first: Any,
) -> None:
    """The second consumer over all tiles."""
    slot, phase = Int32(0), Int32(0)
    if const_expr(p.teams == p.tiles):
        join = p.cluster > 1
        right_tile(p, at, buffer, memory, q, lengths, sinks, out_scale, out, first, slot, phase, join)
    else:
        if const_expr(p.cluster > 1):
            cute.arch.cluster_wait()
        for tile in cutlass.range(first, p.tiles, p.teams, unroll=1):
            slot, phase = right_tile(p, at, buffer, memory, q, lengths, sinks, out_scale, out, tile, slot, phase, False)


@cute.jit
def right_tile(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    buffer: Any,
    memory: cutlass.Constexpr,
    q: Any,
    lengths: Any,
    sinks: Any,
    out_scale: Any,
    out: Any,
    tile: Any,
    slot: Any,
    phase: Any,
    join: cutlass.Constexpr,
) -> Any:
    """The second half of the values."""
    row, head, part, group = row_of(p, at, tile)
    load_queries(p, at, q, row, head)
    barrier_arrive(QUERIES_READY, 256)
    barrier_arrive(WEIGHTS_FREE, 256)
    if const_expr(join):
        cute.arch.cluster_wait()
    _, _, _, begin, end = share_of(p, at, lengths, row, group)
    thread = thread_index() - 128
    lane = thread & 31
    quad = lane & 3
    h = ((thread >> 5) << 4) + (lane >> 2)
    values_mma = product(min(p.values, 128), warpgroup.OperandSource.RMEM, OperandMajorMode.MN)
    part_of_values = values_mma.get_slice(thread)
    value_parts = values_mma.make_fragment_B(part_of_values.partition_B(values_of(p, buffer, memory)))
    acc = values_mma.make_fragment_C(values_mma.partition_shape_C((64, p.values)))
    weights = values_mma.make_fragment_A(values_mma.partition_shape_A((64, 64)))
    words = cute.recast_tensor(weights, Uint32)
    for i in range_constexpr(p.values // 2):
        acc[i] = Float32(0.0)
    for j in cutlass.range(begin, end, unroll=1):
        left_slot, left_phase = slot, phase
        right_slot, right_phase = advance(p, slot, phase)
        slot, phase = advance(p, right_slot, right_phase)
        barrier_sync(WEIGHTS_READY, 256)  # the first consumer has seen both halves
        for i in range_constexpr(4):
            loaded = load_shared_4(at.weights + 2048 * i + thread * 16)
            for n in range_constexpr(4):
                words[4 * i + n] = loaded[n]
        decay_0, decay_1 = load_for_quad(at, h)
        barrier_arrive(WEIGHTS_FREE, 256)
        take_half(p, at, right_slot, right_phase)
        if const_expr(p.value_parts > 1):
            take_half(p, at, left_slot, left_phase)
        rescale(p, acc, decay_0, decay_1)
        accumulate(p, values_mma, acc, weights, value_parts, value_tile(p, part, left_slot, right_slot, 1))
        give_back(p, at, lane, left_slot, right_slot, 1)
    if const_expr(p.splits == 1):
        barrier_sync(WEIGHTS_READY, 256)
        share_0, share_1 = load_for_quad(at, h)
        write_all(p, acc, share_0, share_1, out, row * p.groups + group, head, h, quad, part, 1)
    else:
        up_0, down_0, up_1, down_1 = lifts(p, acc)
        mbarrier_wait_cluster(at.ready, 0)
        send_lifts(p, at, h, quad, down_0, down_1, 1)
        send_parts(p, at, acc, up_0, up_1, thread, 1)
        merge(p, at, sinks, out_scale, out, Int64(0), row, head, h, quad, part, group, thread, 1)
    return slot, phase


@cute.jit
def take_half(p: cutlass.Constexpr, at: cutlass.Constexpr, slot: Any, phase: Any) -> None:
    """Waits for half a block."""
    if const_expr(p.paired):
        mbarrier_wait_cluster(at.full + 8 * slot, phase)
    else:
        mbarrier_wait(at.full + 8 * slot, phase)
    if const_expr(p.tuning.reader_fences):
        fence_async_shared()


@cute.jit
def give_back(
    p: cutlass.Constexpr, at: cutlass.Constexpr, lane: Any, left_slot: Any, right_slot: Any, consumer: cutlass.Constexpr
) -> None:
    """A warp needs no more of the halves that it was the last one to read."""
    if const_expr(p.paired):  # for the producers of both CTAs, which write to both
        if lane < 2:
            empty = map_shared(at.empty, at.share * 2 + lane)
            if const_expr(p.value_parts > 1 or consumer == 0):
                mbarrier_arrive_cluster(empty + 8 * left_slot)
            if const_expr(p.value_parts > 1 or consumer == 1):
                mbarrier_arrive_cluster(empty + 8 * right_slot)
    else:
        if lane == 0:
            if const_expr(p.value_parts > 1 or consumer == 0):
                mbarrier_arrive(at.empty + 8 * left_slot)
            if const_expr(p.value_parts > 1 or consumer == 1):
                mbarrier_arrive(at.empty + 8 * right_slot)


def value_tile(p: Profile, part: Any, left_slot: Any, right_slot: Any, consumer: int) -> Any:
    """The first tile of 64 values of a consumer, counted over the ring."""
    if p.value_parts == 1:
        return (left_slot, right_slot)[consumer] * 4
    wide = p.values // 64
    start = part * (2 * wide) + consumer * wide  # in tiles of the row
    right = start >> 2
    return (left_slot + (right_slot - left_slot) * right) * 4 + (start & 3)


@cute.jit
def rescale(p: cutlass.Constexpr, acc: Any, decay_0: Any, decay_1: Any) -> None:
    for i in range_constexpr(p.values // 8):
        acc[4 * i] = acc[4 * i] * decay_0
        acc[4 * i + 1] = acc[4 * i + 1] * decay_0
        acc[4 * i + 2] = acc[4 * i + 2] * decay_1
        acc[4 * i + 3] = acc[4 * i + 3] * decay_1


@cute.jit
def accumulate(p: cutlass.Constexpr, mma: Any, acc: Any, weights: Any, value_parts: Any, tile: Any) -> None:
    """Adds weights times values."""
    warpgroup.fence()
    mma.set(warpgroup.Field.ACCUMULATE, True)
    for k in range_constexpr(4):
        cute.gemm(mma, acc, weights[None, None, k], value_parts[None, None, k, tile], acc)
    warpgroup.commit_group()
    warpgroup.wait_group(0)


def origin(top: Any) -> Any:
    """What logits are taken from before the exponential: 0 while there is no key."""
    return cutlass.select_(top == Float32(NONE), Float32(0.0), top)


def shuffled(x: Any, mask: int) -> Any:
    return float_of(shuffle_xor(bits_of(x), mask))


def largest_of_quad(x: Any) -> Any:
    x = cute.arch.fmax(x, shuffled(x, 1))
    return cute.arch.fmax(x, shuffled(x, 2))


def sum_of_quad(x: Any) -> Any:
    x = x + shuffled(x, 1)
    return x + shuffled(x, 2)


@cute.jit
def store_for_quad(at: cutlass.Constexpr, h: Any, quad: Any, x: Any, y: Any) -> None:
    """Factors of heads h and h + 8 for the other consumer."""
    if quad == 0:
        store_shared(at.decays + h * 4, bits_of(x))
        store_shared(at.decays + h * 4 + 32, bits_of(y))


def load_for_quad(at: Place, h: Any) -> tuple[Any, Any]:
    return float_of(load_shared(at.decays + h * 4)), float_of(load_shared(at.decays + h * 4 + 32))


# Ends


@cute.jit
def load_head(p: cutlass.Constexpr, array: Any, head: Any, h: Any) -> Any:
    """An array's value of head ``head + h``, where ``array`` is the address of that of ``head``."""
    x = Float32(0.0)
    if head + h < p.heads:
        x = float_of(load_global(array + Int64(h * 4)))
    return x


@cute.jit
def with_sink(p: cutlass.Constexpr, top: Any, mass: Any, sinks: Any, head: Any, h: Any) -> Any:
    """The denominator under ``top``."""
    if const_expr(p.sinks):
        sink = load_head(p, sinks + Int64(head) * 4, head, h)
        mass = mass + exp2(sink * Float32(LOG2E) - origin(top))
    return mass


@cute.jit
def share_of_head(p: cutlass.Constexpr, top: Any, mass: Any, sinks: Any, out_scale: Any, head: Any, h: Any) -> Any:
    """The factor of a head's accumulated values; 0 where nothing took part."""
    total = with_sink(p, top, mass, sinks, head, h)
    x = Float32(1.0) / total
    if mass == Float32(0.0):
        x = Float32(0.0)
    if const_expr(p.out_scale):
        x = x * float_of(load_global(out_scale))
    return x


@cute.jit
def own_share(p: cutlass.Constexpr, top: Any, mass: Any, sinks: Any, out_scale: Any, head: Any, h: Any) -> Any:
    """The factor of a head's values: the final one, or for a second kernel only under what took part here."""
    x = Float32(0.0)
    if const_expr(p.partial):
        x = Float32(1.0) / mass
        if mass == Float32(0.0):
            x = Float32(0.0)
    else:
        x = share_of_head(p, top, mass, sinks, out_scale, head, h)
    return x


@cute.jit
def write_mass(p: cutlass.Constexpr, lse: Any, row: Any, head: Any, h: Any, top: Any, mass: Any) -> None:
    """Writes a head's lse, for a second kernel in base 2."""
    if const_expr(p.partial):
        x = top + log2(mass)
        if mass == Float32(0.0):
            x = Float32(NONE)
        if head + h < p.heads:
            store_global(lse + (Int64(row) * p.heads + Int64(head + h)) * 4, bits_of(x))
    else:
        write_lse(p, lse, row, head, h, top, mass)


@cute.jit
def write_lse(p: cutlass.Constexpr, lse: Any, row: Any, head: Any, h: Any, top: Any, mass: Any) -> None:
    x = (top + log2(mass)) * Float32(LN2)
    if mass == Float32(0.0):
        x = Float32(NONE)
    if head + h < p.heads:
        store_global(lse + (Int64(row) * p.heads + Int64(head + h)) * 4, bits_of(x))


def column_of(p: Profile, part: Any, consumer: int) -> Any:
    """The first value of a consumer."""
    return part * (2 * p.values) + consumer * p.values


@cute.jit
def write_all(
    p: cutlass.Constexpr,
    acc: Any,
    share_0: Any,
    share_1: Any,
    out: Any,
    row: Any,
    head: Any,
    h: Any,
    quad: Any,
    part: Any,
    consumer: cutlass.Constexpr,
) -> None:
    """Writes a consumer's values."""
    column = column_of(p, part, consumer)
    to = out + (Int64(row) * p.heads + Int64(head + h)) * 1024
    for i in range_constexpr(p.pieces if p.partial else 0):
        shares = (share_0, share_0, share_1, share_1)
        sums = [acc[4 * i + n] * shares[n] for n in range(4)]
        write_sums(p, sums, out, row, column + 8 * i + 2 * quad, head, h)
    for g in range_constexpr(0 if p.partial else p.pieces // 4):
        first, second = [], []
        for i in range_constexpr(4):
            n = 16 * g + 4 * i
            first.append(pack_bf16x2(acc[n] * share_0, acc[n + 1] * share_0))
            second.append(pack_bf16x2(acc[n + 2] * share_1, acc[n + 3] * share_1))
        write_pieces(p, first, second, to, column + 32 * g, head, h, quad)


@cute.jit
def write_pieces(
    p: cutlass.Constexpr, first: Any, second: Any, to: Any, column: Any, head: Any, h: Any, quad: Any
) -> None:
    """Writes four pieces of 8 values of heads h and h + 8, of which each thread of a quad has two of each piece.

    The threads exchange until each has a whole piece.
    """
    rope = is_rope(p, column)
    for second_head in range_constexpr(2):
        words = whole_piece(second if const_expr(second_head) else first, quad, rope)
        if const_expr(p.heads % 64 == 0):
            store_global_4(to + Int64(column * 2 + quad * 16 + second_head * 8192), *words)
        else:
            if head + h + 8 * second_head < p.heads:
                store_global_4(to + Int64(column * 2 + quad * 16 + second_head * 8192), *words)


def is_rope(p: Profile, column: Any) -> Any:
    """Whether values from a column on are in order as they are."""
    return column >= 448 if p.data.kind == "footer" else Boolean(p.data.kind == "plain")


def either(second: Any, x: Any, y: Any) -> Any:
    """``y`` where ``second`` is ``SECOND``, ``x`` where it is ``FIRST``."""
    return permute(x, y, second)


def selector(condition: Any) -> Any:
    return cutlass.select_(condition, Uint32(SECOND), Uint32(FIRST))


def whole_piece(words: Any, quad: Any, rope: Any) -> Any:
    """Of four pieces, of which the threads of a quad have a word each, the one of the thread's number, in order."""
    odd, high = selector((quad & 1) != 0), selector((quad & 2) != 0)
    got = shuffle_xor(either(odd, words[1], words[0]), 1)
    a_0, a_1 = either(odd, words[0], got), either(odd, got, words[1])
    got = shuffle_xor(either(odd, words[3], words[2]), 1)
    b_0, b_1 = either(odd, words[2], got), either(odd, got, words[3])
    got_0 = shuffle_xor(either(high, b_0, a_0), 2)
    got_1 = shuffle_xor(either(high, b_1, a_1), 2)
    x, y = either(high, a_0, got_0), either(high, a_1, got_1)
    z, w = either(high, got_0, b_0), either(high, got_1, b_1)
    # Values 1, 3, 0, 2 are in x and y.
    low = cutlass.select_(rope, Uint32(SECOND), Uint32(0x5410))
    top = cutlass.select_(rope, Uint32(FIRST), Uint32(0x7632))
    return permute(y, x, low), permute(y, x, top), permute(w, z, low), permute(w, z, top)


# Merging in a cluster


def bytes_of_parts(p: Profile, share: int) -> int:
    """What is sent to the CTA that merges the pieces of a share."""
    return p.splits * 1024 + (p.splits - 1) * p.owned(share)[1] * 2 * 1024


def statistics_at(p: Profile, at: Place) -> Any:
    """For each share and head the largest logit, the mass, and what the consumers' parts are multiplied by."""
    return at.queries + 2 * p.splits * p.part_bytes


def there(p: Profile, at: Place, x: Any, share: Any) -> Any:
    """The address of x in the CTA of a share, with the same heads."""
    return map_shared(x, share * 2 + at.member if p.paired else share)


@cute.jit
def announce(p: cutlass.Constexpr, at: cutlass.Constexpr, lane: Any) -> None:
    """Tells all CTAs of the row that this warp needs queries no more, and no producer its memory."""
    sync_warp()
    if lane < p.splits:
        mbarrier_arrive_cluster(there(p, at, at.ready, lane))


@cute.jit
def lifts(p: cutlass.Constexpr, acc: Any) -> Any:
    """Powers of two that lift values of heads h and h + 8 to the top of float16's range, and their inverses."""
    biggest_0, biggest_1 = Float32(0.0), Float32(0.0)
    for i in range_constexpr(p.pieces):
        biggest_0 = larger_magnitude(larger_magnitude(biggest_0, acc[4 * i]), acc[4 * i + 1])
        biggest_1 = larger_magnitude(larger_magnitude(biggest_1, acc[4 * i + 2]), acc[4 * i + 3])
    found = []
    for biggest in (largest_of_quad(biggest_0), largest_of_quad(biggest_1)):
        exponent = Int32(bits_of(biggest) >> 23)
        field = cutlass.min(cutlass.max(Int32(268) - exponent, Int32(1)), Int32(253))
        field = cutlass.select_(exponent == 255, Int32(127), field)  # beside infinity others stay what they are
        found += [float_of(Uint32(field) << 23), float_of(Uint32(254 - field) << 23)]
    return tuple(found)


@cute.jit
def send_statistics(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    h: Any,
    quad: Any,
    top_0: Any,
    mass_0: Any,
    down_0: Any,
    top_1: Any,
    mass_1: Any,
    down_1: Any,
) -> None:
    """Largest logits and masses to all CTAs of the row."""
    to = statistics_at(p, at) + at.share * 1024 + h * 16
    for s in range_constexpr(p.splits):
        if quad == s % 4:
            place, barrier = there(p, at, to, s), there(p, at, at.merged, s)
            send_2(place, bits_of(top_0), bits_of(mass_0), barrier)
            send_2(place + 128, bits_of(top_1), bits_of(mass_1), barrier)
    send_lifts(p, at, h, quad, down_0, down_1, 0)


@cute.jit
def send_lifts(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    h: Any,
    quad: Any,
    down_0: Any,
    down_1: Any,
    consumer: cutlass.Constexpr,
) -> None:
    """What a consumer's parts are multiplied by, to all CTAs of the row."""
    to = statistics_at(p, at) + at.share * 1024 + h * 16 + 8 + 4 * consumer
    for s in range_constexpr(p.splits):
        if quad == s % 4:
            place, barrier = there(p, at, to, s), there(p, at, at.merged, s)
            send_1(place, bits_of(down_0), barrier)
            send_1(place + 128, bits_of(down_1), barrier)


@cute.jit
def send_parts(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    acc: Any,
    up_0: Any,
    up_1: Any,
    thread: Any,
    consumer: cutlass.Constexpr,
) -> None:
    """A consumer's values to the CTAs that merge them, as the threads hold them."""
    to = at.queries + (consumer * p.splits + at.share) * p.part_bytes + thread * (8 * step(p))
    for s in range_constexpr(p.splits):
        start, count = p.owned(s)
        if at.share == s:
            for i in range_constexpr(0, count, step(p)):
                words = packed(acc, up_0, up_1, start + i, step(p))
                if const_expr(step(p) == 2):
                    store_shared_4(to + 1024 * i, *words)
                else:
                    store_shared_2(to + 1024 * i, *words)
        else:
            place, barrier = there(p, at, to, s), there(p, at, at.merged, s)
            for i in range_constexpr(0, count, step(p)):
                words = packed(acc, up_0, up_1, start + i, step(p))
                if const_expr(step(p) == 2):
                    send_4(place + 1024 * i, *words, barrier)
                else:
                    send_2(place + 1024 * i, *words, barrier)


def step(p: Profile) -> int:
    """Pieces that are sent at a time."""
    return min(2, p.grain)


def packed(acc: Any, up_0: Any, up_1: Any, piece: int, count: int) -> list[Any]:
    """Pieces in float16: of each two values of head h, and two of head h + 8."""
    words = []
    for n in range(4 * piece, 4 * (piece + count), 4):
        words.append(pack_f16x2(acc[n] * up_0, acc[n + 1] * up_0))
        words.append(pack_f16x2(acc[n + 2] * up_1, acc[n + 3] * up_1))
    return words


@cute.jit
def merge(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    sinks: Any,
    out_scale: Any,
    out: Any,
    lse: Any,
    row: Any,
    head: Any,
    h: Any,
    quad: Any,
    part: Any,
    group: Any,
    thread: Any,
    consumer: cutlass.Constexpr,
) -> None:
    """Adds up the parts of the columns that this CTA merges, in the order of the shares, and writes them."""
    mbarrier_wait_cluster(at.merged, 0)
    if const_expr(p.groups > 1):
        row = row * p.groups + group
    weights_0 = merged_weights(p, at, sinks, out_scale, lse, row, head, h, quad, part, consumer)
    weights_1 = merged_weights(p, at, sinks, out_scale, lse, row, head, h + 8, quad, part, consumer)
    start, count = Int32(0), Int32(0)
    for s in range_constexpr(p.splits):
        if at.share == s:
            start, count = Int32(p.owned(s)[0]), Int32(p.owned(s)[1] // p.grain)
    source = at.queries + consumer * (p.splits * p.part_bytes) + thread * (8 * step(p))
    column = column_of(p, part, consumer) + start * 8
    to = out + (Int64(row) * p.heads + Int64(head + h)) * 1024
    for n in cutlass.range(count, unroll=1):
        first, second = [], []
        for i in range_constexpr(0, p.grain, step(p)):
            sums = [Float32(0.0)] * 8
            for s in range_constexpr(p.splits):
                place = source + s * p.part_bytes + (n * p.grain + i) * 1024
                words = load_shared_2(place) if const_expr(p.grain == 1) else load_shared_4(place)
                for k in range_constexpr(len(words)):
                    x, y = unpack_f16x2(words[k])
                    weight = weights_1[s] if const_expr(k % 2) else weights_0[s]
                    sums[2 * k] = sums[2 * k] + x * weight
                    sums[2 * k + 1] = sums[2 * k + 1] + y * weight
            if const_expr(p.partial):
                for k in range_constexpr(step(p)):
                    write_sums(p, sums[4 * k : 4 * k + 4], out, row, column + 8 * (i + k) + 2 * quad, head, h)
            first.append(pack_bf16x2(sums[0], sums[1]))
            second.append(pack_bf16x2(sums[2], sums[3]))
            if const_expr(p.grain > 1):
                first.append(pack_bf16x2(sums[4], sums[5]))
                second.append(pack_bf16x2(sums[6], sums[7]))
        if const_expr(p.partial):
            pass
        elif const_expr(p.grain == 4):
            write_pieces(p, first, second, to, column, head, h, quad)
        else:
            for i in range_constexpr(p.grain):
                write_pairs(p, first[i], second[i], to, column + 8 * i, head, h, quad)
        column = column + 8 * p.grain


@cute.jit
def merged_weights(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    sinks: Any,
    out_scale: Any,
    lse: Any,
    row: Any,
    head: Any,
    h: Any,
    quad: Any,
    part: Any,
    consumer: cutlass.Constexpr,
) -> Any:
    """Factors of the parts of a head; writes its lse."""
    tops, masses, downs = [], [], []
    top = Float32(NONE)
    for s in range_constexpr(p.splits):
        x, y, a, b = load_shared_4(statistics_at(p, at) + s * 1024 + h * 16)
        tops.append(float_of(x))
        masses.append(float_of(y))
        downs.append(float_of(b if const_expr(consumer) else a))
        top = cute.arch.fmax(top, tops[s])
    weights = []
    mass = Float32(0.0)
    for s in range_constexpr(p.splits):
        weights.append(exp2(tops[s] - origin(top)))
        mass = mass + masses[s] * weights[s]
    factor = own_share(p, top, mass, sinks, out_scale, head, h)
    if const_expr(consumer == 0):
        if at.share == 0 and part == 0 and quad == 0:
            write_mass(p, lse, row, head, h, top, mass)
    return [weights[s] * factor * downs[s] for s in range(p.splits)]


@cute.jit
def write_pairs(
    p: cutlass.Constexpr, first: Any, second: Any, to: Any, column: Any, head: Any, h: Any, quad: Any
) -> None:
    """Writes a piece of 8 values of heads h and h + 8, two of them a thread."""
    odd = (quad & 1) != 0
    take = cutlass.select_(odd, Uint32(0x3276), Uint32(0x5410))
    take = cutlass.select_(is_rope(p, column), Uint32(SECOND), take)
    for second_head in range_constexpr(2):
        word = second if const_expr(second_head) else first
        word = permute(shuffle_xor(word, 1), word, take)
        if head + h + 8 * second_head < p.heads:
            store_global(to + Int64(column * 2 + quad * 4 + second_head * 8192), word)


@cute.jit
def write_sums(p: cutlass.Constexpr, sums: Any, parts: Any, row: Any, column: Any, head: Any, h: Any) -> None:
    """Writes float32 values of heads h and h + 8, two of each, in the order of dequantised values."""
    to = parts + (Int64(row) * p.heads + Int64(head + h)) * 2048 + Int64(column * 4)
    if head + h < p.heads:
        store_global_2(to, bits_of(sums[0]), bits_of(sums[1]))
    if head + h + 8 < p.heads:
        store_global_2(to + 16384, bits_of(sums[2]), bits_of(sums[3]))


@cute.jit
def complete(
    p: cutlass.Constexpr,
    parts: Any,
    masses: Any,
    sinks: Any,
    out_scale: Any,
    cos_sin: Any,
    out: Any,
    lse: Any,
    scales: Any,
    row: Any,
    head: Any,
) -> None:
    """Adds up the results of groups for one row and head, in their order, and writes them: four values a thread."""
    thread = thread_index()
    if const_expr(p.ending is None):
        low, high = natural(p, merged_groups(p, parts, masses, sinks, out_scale, lse, row, head, thread), thread)
        to = out + (Int64(row) * p.heads + Int64(head)) * 1024 + Int64(thread * 8)
        store_global_2(to, pack_bf16x2(low[0], low[1]), pack_bf16x2(high[0], high[1]))
    else:
        if row < p.rows:
            sums = merged_groups(p, parts, masses, sinks, out_scale, lse, row, head, thread)
            write_codes(p, natural(p, sums, thread), cos_sin, out, scales, row, head, thread)
        elif thread % (p.ending.block // 4) == 0:
            write_scale(p, scales, row, head, thread, Uint32(0))


@cute.jit
def merged_groups(
    p: cutlass.Constexpr,
    parts: Any,
    masses: Any,
    sinks: Any,
    out_scale: Any,
    lse: Any,
    row: Any,
    head: Any,
    thread: Any,
) -> Any:
    """Four values of a row and head, in the order of dequantised values; writes its lse."""
    masses = masses + (Int64(row) * (p.groups * p.heads) + Int64(head)) * 4
    parts = parts + (Int64(row) * (p.groups * p.heads) + Int64(head)) * 2048 + Int64(thread * 16)
    top = Float32(NONE)
    logs = []
    for g in range_constexpr(p.groups):
        logs.append(float_of(load_global(masses + g * (4 * p.heads))))
        top = cute.arch.fmax(top, logs[g])
    mass = Float32(0.0)
    sums = [Float32(0.0)] * 4
    for g in range_constexpr(p.groups):
        weight = exp2(logs[g] - origin(top))
        mass = mass + weight
        words = load_global_4(parts + g * (2048 * p.heads))
        for i in range_constexpr(4):
            sums[i] = sums[i] + float_of(words[i]) * weight
    factor = share_of_head(p, top, mass, sinks, out_scale, head, Int32(0))
    if thread == 0:
        write_lse(p, lse, row, head, Int32(0), top, mass)
    return [x * factor for x in sums]


def natural(p: Profile, values: Any, thread: Any) -> tuple[Any, Any]:
    """Four values in their order, as two pairs."""
    a, b, c, d = values
    as_is = is_rope(p, thread * 4)
    pairs = [cutlass.select_(as_is, x, y) for x, y in ((a, c), (b, a), (c, d), (d, b))]
    return pairs[:2], pairs[2:]


@cute.jit
def write_codes(
    p: cutlass.Constexpr, pairs: Any, cos_sin: Any, out: Any, scales: Any, row: Any, head: Any, thread: Any
) -> None:
    """Rotates the trailing values back, and writes codes and scales."""
    ending = p.ending
    values = []
    largest = Uint32(0)
    for i in range_constexpr(2):
        even, odd = pairs[i]
        place = (thread * 4 + 2 * i - (512 - ending.rope)) >> 1
        if place >= 0:
            table = cos_sin + (Int64(row) * ending.rope + Int64(place)) * 4
            cos, sin = float_of(load_global(table)), float_of(load_global(table + 2 * ending.rope))
            even, odd = even * cos + odd * sin, odd * cos - even * sin
        values += [even, odd]
        for x in (even, odd):
            largest = larger_word(largest, magnitude(bits_of(x)))
    for bit in range_constexpr(5 if ending.block == 128 else 3):
        largest = larger_word(largest, shuffle_xor(largest, 1 << bit))
    none = largest > Uint32(0x7F800000)  # NaN
    amax = cute.arch.fmax(float_of(largest), Float32(MIN_AMAX))
    if const_expr(ending.powers):
        bits = bits_of(amax)
        above = cutlass.select_((bits & Uint32(0x7FFFFF)) > Uint32(0x600000), Uint32(1), Uint32(0))
        word = (bits >> 23) - Uint32(8) + above  # the exponent
        inverse = float_of((Uint32(254) - word) << 23)
        word = cutlass.select_(none, Uint32(255), word)
    else:
        scale = divide(amax, Float32(448.0))
        word = cutlass.select_(none, Uint32(0x7FC00000), bits_of(scale))
        inverse = divide(Float32(1.0), scale)
    inverse = cutlass.select_(none, float_of(Uint32(0x7FC00000)), inverse)
    a, b, c, d = [x * inverse for x in values]
    each = p.heads // ending.groups
    group = head // each
    place = (Int64(group) * p.rows + Int64(row)) * each + Int64(head - group * each)
    store_global(out + place * 512 + Int64(thread * 4), e4m3x4(a, b, c, d))
    if thread % (ending.block // 4) == 0:
        write_scale(p, scales, row, head, thread, word)


@cute.jit
def write_scale(p: cutlass.Constexpr, scales: Any, row: Any, head: Any, thread: Any, word: Any) -> None:
    """Writes the float32 scale, or the exponent, of the block of values that starts with those of a thread."""
    ending = p.ending
    blocks = 512 // ending.block
    block = thread // (ending.block // 4)
    # Blocks of heads in order are those of groups in order.
    if const_expr(ending.powers):
        place = (Int64(head) * (blocks // 4) + Int64(block >> 2)) * padded(p) + Int64(row)
        store_global_byte(scales + place * 4 + Int64(block & 3), word)
    else:
        store_global(scales + ((Int64(head) * blocks + Int64(block)) * padded(p) + Int64(row)) * 4, word)


def larger_word(x: Any, y: Any) -> Any:
    return cutlass.select_(x > y, x, y)
