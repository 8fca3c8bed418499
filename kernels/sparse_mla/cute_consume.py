"""The consumers of the sparse attention kernel: logits, softmax and sums of values, see ``cute_kernel.py``."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr, range_constexpr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ..cute_ptx import (
    any_lane,
    barrier_arrive,
    barrier_sync,
    bf16_of_e4m3,
    bits_of,
    copy_bulk,
    exp2,
    fence_async_shared,
    float_of,
    load_global_2,
    load_global_2_if,
    load_global_4,
    load_global_4_if,
    load_shared,
    load_shared_2,
    load_shared_4,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_wait,
    opaque,
    pack_bf16x2,
    permute,
    store_shared,
    store_shared_4,
    thread_index,
)
from .cute_codes import write_units
from .cute_merge import announce, merge
from .cute_output import Cell, line_of, load_head, load_sink, share_of_head, write_all, write_lse
from .cute_place import (
    NONE,
    TILE,
    Place,
    advance,
    largest_of_quad,
    origin,
    row_of,
    share_of,
    sum_of_quad,
)
from .cute_plan import Profile
from .forms import LOG2E

ONE = 0x3F800000  # the word of 1.0
WEIGHTS_READY, WEIGHTS_FREE, QUERIES_READ, QUERIES_READY = 1, 2, 3, 4  # named barriers between the consumers


def product(n: int, source: Any, major: Any) -> Any:
    """A bf16 product of 64 rows and n columns."""
    kind = warpgroup.MmaF16BF16Op(BFloat16, Float32, (64, n, 16), source, OperandMajorMode.K, major)
    return cute.make_tiled_mma(cute.make_mma_atom(kind), (1, 1, 1))


def swizzled(at: Place, name: str, layout: Any) -> Any:
    """bf16 tiles in shared memory."""
    buffer = at.buffer + getattr(at.memory, name)
    return cute.make_tensor(cute.recast_ptr(buffer, cute.make_swizzle(3, 4, 3), BFloat16), layout)


def logits_product() -> Any:
    """Of queries and 64 keys; one for each use, since whether it accumulates is a value of where that is set."""
    return product(64, warpgroup.OperandSource.SMEM, OperandMajorMode.K)


def values_product(p: Profile) -> Any:
    """Of weights and values, likewise."""
    return product(min(p.values, 128), warpgroup.OperandSource.RMEM, OperandMajorMode.MN)


class Logits:
    """The product of queries and keys.

    Attributes:
        queries, keys, rope: operands, by step of 16 values; of keys by half of a block in the ring.
        logits: of a block, two of head h and two of head h + 8 for each 8 keys.
        factor_0, factor_1: of the two heads.
    """

    def __init__(self, p: Profile, at: Place, c: Cell, factor_0: Any, factor_1: Any):
        mma = logits_product()
        part = mma.get_slice(c.thread)
        across, stages = p.data.width // 64, p.tuning.stages
        queries = swizzled(at, "queries", cute.make_layout(((8, 8), (64, across)), stride=((64, 512), (1, 4096))))
        keys = swizzled(at, "keys", cute.make_layout(((8, 8), (64, 4), stages), stride=((64, 512), (1, 4096), 16384)))
        self.queries = mma.make_fragment_A(part.partition_A(queries))
        self.keys = mma.make_fragment_B(part.partition_B(keys))
        if p.data.width > 512:
            rope = swizzled(at, "rope", cute.make_layout(((8, 8), (64, 1), 2), stride=((64, 512), (1, 4096), 4096)))
            self.rope = mma.make_fragment_B(part.partition_B(rope))
        self.logits = mma.make_fragment_C(mma.partition_shape_C((64, 64)))
        self.factor_0, self.factor_1 = factor_0, factor_1


class Sums:
    """The product of weights and values.

    Attributes:
        values: of the ring of keys, by tile of 64 of them: ``(values, slots, tile)``.
        acc: the sums, four for each 8 values: two of head h, then two of head h + 8.
        weights: of a block.
    """

    def __init__(self, p: Profile, at: Place, c: Cell):
        mma = values_product(p)
        wide = p.values // 64
        layout = cute.make_layout(((64, wide), (8, 8), 4 * p.tuning.stages), stride=((1, 4096), (64, 512), 4096))
        values = mma.get_slice(c.thread).partition_B(swizzled(at, "keys", layout))
        self.values = mma.make_fragment_B(values)
        self.acc = mma.make_fragment_C(mma.partition_shape_C((64, p.values)))
        self.weights = mma.make_fragment_A(mma.partition_shape_A((64, 64)))
        for i in range(p.values // 2):
            self.acc[i] = Float32(0.0)


def query_bytes(p: Profile) -> int:
    return p.data.width * (1 if p.q_codes else 2)


def queries_at(p: Profile, q: Any, row: Any, head: Any) -> Any:
    """The address of the queries of the tile's heads."""
    return q + (Int64(row) * p.heads + Int64(head)) * query_bytes(p)


@cute.jit
def ask_queries(p: cutlass.Constexpr, at: cutlass.Constexpr, q: Any, row: Any, head: Any) -> None:
    """Starts the copy of queries, as they are, to where they will be."""
    if thread_index() == 0:
        fence_async_shared()
        size = cutlass.min(Int32(p.heads) - head, Int32(64)) * query_bytes(p)
        mbarrier_expect(at.asked, size)
        copy_bulk(at.queries, queries_at(p, q, row, head), size, at.asked)


def load_query(p: Profile, at: Place, source: Any, part: Any, here: Any) -> Any:
    """Eight values of a query, of those that were copied or from global memory; what is not there does not matter."""
    bytes_ = 8 if p.q_codes else 16
    if p.asks:
        place = at.queries + part * bytes_
        return load_shared_2(place) if p.q_codes else load_shared_4(place)
    place = source + Int64(part * bytes_)
    if p.heads % 64 == 0:
        return load_global_2(place) if p.q_codes else load_global_4(place)
    return load_global_2_if(here, place) if p.q_codes else load_global_4_if(here, place)


@cute.jit
def place_queries(p: cutlass.Constexpr, at: cutlass.Constexpr, q: Any, row: Any, head: Any, parity: Any) -> None:
    """Puts queries in place, by both consumers: dims in the order of dequantised values, and zeros for absent heads."""
    thread = thread_index()
    across = p.data.width // 8  # parts of eight values of a query
    source = queries_at(p, q, row, head)
    if const_expr(p.asks):
        mbarrier_wait(at.asked, parity)
    heres, words = [], []
    for i in range_constexpr(across // 4):
        part = thread + 256 * i
        here = Int32(1)
        if const_expr(p.heads % 64 != 0):
            here = cutlass.select_(head + part // across < p.heads, Int32(1), Int32(0))
        heres.append(here)
        words.append(load_query(p, at, source, part, here))
    if const_expr(p.asks):
        barrier_sync(QUERIES_READ, 256)
    for i in range_constexpr(across // 4):
        part = thread + 256 * i
        h = part // across
        c = part - h * across
        if const_expr(p.q_codes):
            x, y = [bf16_of_e4m3(words[i][0], n) for n in (0, 1)]
            z, w = [bf16_of_e4m3(words[i][1], n) for n in (0, 1)]
        else:
            x, y, z, w = words[i]
        if const_expr(p.heads % 64 != 0):
            x, y, z, w = [Uint32(cutlass.select_(heres[i] != 0, word, Uint32(0))) for word in (x, y, z, w)]
        odd_0, even_0 = permute(x, y, 0x7632), permute(x, y, 0x5410)
        odd_1, even_1 = permute(z, w, 0x7632), permute(z, w, 0x5410)
        if c >= 8 * p.data.codes:  # RoPE values are not permuted
            odd_0, even_0, odd_1, even_1 = x, y, z, w
        to = at.queries + (c >> 3) * TILE + h * 128 + (((c & 7) ^ (h & 7)) << 4)
        store_shared_4(to, odd_0, even_0, odd_1, even_1)
    fence_async_shared()


@cute.jit
def attend_left(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    arrays: cutlass.Constexpr,
    tile: Any,
    slot: Any,
    phase: Any,
    done: Any,
) -> Any:
    """The first consumer: logits, softmax, and the first half of the values, see ``each_tile``."""
    row, head, part, group = row_of(p, tile)
    if const_expr(p.asks):
        ask_queries(p, at, arrays.q, row, head)
    else:
        place_queries(p, at, arrays.q, row, head, Int32(0))
    _, _, _, begin, end = share_of(p, at, arrays.lengths, row, group)
    cell = Cell(0, row, head, part, group)
    sink_0, sink_1 = Float32(0.0), Float32(0.0)
    if const_expr(p.splits == 1):  # they are there by the time they are needed
        sink_0 = load_sink(p, arrays, head, cell.h, p.partial)
        sink_1 = load_sink(p, arrays, head, cell.h + 8, p.partial)
    factor_0 = Float32(p.scale * LOG2E)
    factor_1 = factor_0
    if const_expr(p.q_scale):
        place = arrays.q_scale + (Int64(row) * p.heads + Int64(head)) * 4
        factor_0 = factor_0 * load_head(p, place, head, cell.h)
        factor_1 = factor_1 * load_head(p, place, head, cell.h + 8)
    if const_expr(p.asks):
        place_queries(p, at, arrays.q, row, head, tile // p.teams & 1)

    x = Logits(p, at, cell, factor_0, factor_1)
    sums = Sums(p, at, cell)
    top_0, top_1 = Float32(NONE), Float32(NONE)
    mass_0, mass_1 = Float32(0.0), Float32(0.0)
    barrier_sync(QUERIES_READY, 256)
    if const_expr(p.splits > 1):
        cute.arch.cluster_wait()
    # The assembler makes products wait for each other in a loop whose number of rounds it knows.
    begin, end = opaque(begin), opaque(end)
    if begin < end:
        multiply_left(p, at, x, slot, phase)
        for j in cutlass.range(begin, end - 1, unroll=1):
            left_slot = slot
            right_slot, right_phase = advance(p, slot, phase)
            slot, phase = advance(p, right_slot, right_phase)
            turn = done + (j - begin)
            multiply_right(p, at, x, right_slot, right_phase, turn)
            top_0, top_1, mass_0, mass_1, decay_0, decay_1, changed = weigh(
                p, at, cell, x, sums, turn, top_0, top_1, mass_0, mass_1
            )
            accumulate(p, cell, sums, decay_0, decay_1, changed, left_slot, right_slot)
            if const_expr(p.behind):
                multiply_left(p, at, x, slot, phase)
                warpgroup.wait_group(1)
                give_back(p, at, cell, left_slot, right_slot)
            else:
                warpgroup.wait_group(0)
                give_back(p, at, cell, left_slot, right_slot)
                multiply_left(p, at, x, slot, phase)
        left_slot = slot
        right_slot, right_phase = advance(p, slot, phase)
        slot, phase = advance(p, right_slot, right_phase)
        turn = done + (end - 1 - begin)
        multiply_right(p, at, x, right_slot, right_phase, turn)
        if const_expr(p.splits > 1):
            announce(p, at, cell.lane)
        top_0, top_1, mass_0, mass_1, decay_0, decay_1, changed = weigh(
            p, at, cell, x, sums, turn, top_0, top_1, mass_0, mass_1
        )
        accumulate(p, cell, sums, decay_0, decay_1, changed, left_slot, right_slot)
        warpgroup.wait_group(0)
        give_back(p, at, cell, left_slot, right_slot)

    if const_expr(p.splits > 1):
        if begin == end:
            announce(p, at, cell.lane)
    mass_0, mass_1 = sum_of_quad(mass_0), sum_of_quad(mass_1)
    barrier_sync(WEIGHTS_FREE, 256)
    if const_expr(p.splits == 1):
        share_0 = share_of_head(p, arrays, top_0, mass_0, sink_0, p.partial)
        share_1 = share_of_head(p, arrays, top_1, mass_1, sink_1, p.partial)
        store_for_quad(at, cell, share_0, share_1)
        barrier_arrive(WEIGHTS_READY, 256)
        line = line_of(p, cell)
        if part == 0 and cell.quad == 0:
            write_lse(p, arrays.lse, line, head, cell.h, top_0, mass_0, p.partial)
            write_lse(p, arrays.lse, line, head, cell.h + 8, top_1, mass_1, p.partial)
        if const_expr(p.fused):
            write_units(p, arrays, cell, sums.acc, share_0, share_1)
        else:
            write_all(p, arrays, cell, line, sums.acc, share_0, share_1)
    else:
        merge(p, at, arrays, cell, sums.acc, (top_0, mass_0), (top_1, mass_1))
    return slot, phase, done + (end - begin)


@cute.jit
def attend_right(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    arrays: cutlass.Constexpr,
    tile: Any,
    slot: Any,
    phase: Any,
    done: Any,
) -> Any:
    """The second consumer: the second half of the values, see ``each_tile``."""
    row, head, part, group = row_of(p, tile)
    place_queries(p, at, arrays.q, row, head, tile // p.teams & 1)
    barrier_arrive(QUERIES_READY, 256)
    barrier_arrive(WEIGHTS_FREE, 256)
    if const_expr(p.splits > 1):
        cute.arch.cluster_wait()
    _, _, _, begin, end = share_of(p, at, arrays.lengths, row, group)
    cell = Cell(1, row, head, part, group)
    sums = Sums(p, at, cell)
    words = cute.recast_tensor(sums.weights, Uint32)
    for j in cutlass.range(begin, end, unroll=1):
        left_slot, left_phase = slot, phase
        right_slot, right_phase = advance(p, slot, phase)
        slot, phase = advance(p, right_slot, right_phase)
        barrier_sync(WEIGHTS_READY, 256)  # the first consumer has seen both halves
        for i in range_constexpr(4):
            loaded = load_shared_4(at.weights + 2048 * i + cell.thread * 16)
            for n in range_constexpr(4):
                words[4 * i + n] = loaded[n]
        decay_0, decay_1 = load_for_quad(at, cell)
        barrier_arrive(WEIGHTS_FREE, 256)
        take_half(at, right_slot, right_phase)
        if const_expr(p.value_parts > 1):
            take_half(at, left_slot, left_phase)
        changed = any_lane((bits_of(decay_0) ^ ONE) | (bits_of(decay_1) ^ ONE))
        accumulate(p, cell, sums, decay_0, decay_1, changed, left_slot, right_slot)
        warpgroup.wait_group(0)
        give_back(p, at, cell, left_slot, right_slot)
    if const_expr(p.splits == 1):
        barrier_sync(WEIGHTS_READY, 256)
        share_0, share_1 = load_for_quad(at, cell)
        if const_expr(p.fused):
            write_units(p, arrays, cell, sums.acc, share_0, share_1)
        else:
            write_all(p, arrays, cell, line_of(p, cell), sums.acc, share_0, share_1)
    else:
        merge(p, at, arrays, cell, sums.acc, (), ())
    return slot, phase, done


@cute.jit
def multiply_left(p: cutlass.Constexpr, at: cutlass.Constexpr, x: cutlass.Constexpr, slot: Any, phase: Any) -> None:
    """Starts the product of queries and the left half of a block, once it is there."""
    take_half(at, slot, phase)
    mma = logits_product()
    warpgroup.fence()
    for k in range_constexpr(16):
        mma.set(warpgroup.Field.ACCUMULATE, k != 0)
        cute.gemm(mma, x.logits, x.queries[None, None, k], x.keys[None, None, k, slot], x.logits)
    warpgroup.commit_group()


@cute.jit
def multiply_right(
    p: cutlass.Constexpr, at: cutlass.Constexpr, x: cutlass.Constexpr, slot: Any, phase: Any, turn: Any
) -> None:
    """Adds the product of queries and the right half of a block, the one of a number; completes the logits."""
    take_half(at, slot, phase)
    mma = logits_product()
    mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.fence()
    for k in range_constexpr(16):
        cute.gemm(mma, x.logits, x.queries[None, None, k + 16], x.keys[None, None, k, slot], x.logits)
    if const_expr(p.data.width > 512):
        for k in range_constexpr(4):
            cute.gemm(mma, x.logits, x.queries[None, None, k + 32], x.rope[None, None, k, turn & 1], x.logits)
    warpgroup.commit_group()
    warpgroup.wait_group(0)


@cute.jit
def weigh(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    c: cutlass.Constexpr,
    x: cutlass.Constexpr,
    sums: cutlass.Constexpr,
    turn: Any,
    top_0: Any,
    top_1: Any,
    mass_0: Any,
    mass_1: Any,
) -> Any:
    """The weights of a block, for both consumers.

    Returns what logits of heads h and h + 8 are taken from, the masses, by what earlier sums decay, and whether some of
    the warp's do.
    """
    logits = x.logits
    words = cute.recast_tensor(sums.weights, Uint32)
    if const_expr(not p.plainly_scaled):
        for i in range_constexpr(8):
            for n in range_constexpr(2):
                logits[4 * i + n] = logits[4 * i + n] * x.factor_0
                logits[4 * i + n + 2] = logits[4 * i + n + 2] * x.factor_1
    some = load_shared_2(at.holes + (turn & 3) * 8)
    if (some[0] | some[1]) != 0:
        # The smaller one of a logit and of minus infinity is that even where the logit is NaN; beside infinity NaN
        # becomes infinity, of which the exponential makes NaN again.
        bounds = at.bias + (turn & 3) * 256 + c.quad * 8
        for i in range_constexpr(8):
            least = [float_of(word) for word in load_shared_2(bounds + 32 * i)]
            for n in range_constexpr(4):
                logits[4 * i + n] = cute.arch.fmin(logits[4 * i + n], least[n % 2])
    new_0, new_1 = Float32(NONE), Float32(NONE)
    for i in range_constexpr(8):
        new_0 = cute.arch.fmax(new_0, cute.arch.fmax(logits[4 * i], logits[4 * i + 1]))
        new_1 = cute.arch.fmax(new_1, cute.arch.fmax(logits[4 * i + 2], logits[4 * i + 3]))
    by_0, by_1 = Float32(1.0), Float32(1.0)
    if const_expr(p.plainly_scaled):  # a positive factor leaves the order, and goes into the exponent
        by_0, by_1 = x.factor_0, x.factor_1
        new_0, new_1 = new_0 * x.factor_0, new_1 * x.factor_1
    # What logits are taken from follows the largest one only where that is far above: few blocks make sums decay.
    decay_0, decay_1 = Float32(1.0), Float32(1.0)
    changed = any_lane(above(new_0, top_0) | above(new_1, top_1))
    if changed != 0:
        new_0, new_1 = largest_of_quad(new_0), largest_of_quad(new_1)
        new_0 = cutlass.select_(above(new_0, top_0) != 0, new_0, top_0)
        new_1 = cutlass.select_(above(new_1, top_1) != 0, new_1, top_1)
        decay_0, decay_1 = exp2(top_0 - origin(new_0)), exp2(top_1 - origin(new_1))
        top_0, top_1 = new_0, new_1
    origin_0, origin_1 = origin(top_0), origin(top_1)
    sum_0, sum_1 = Float32(0.0), Float32(0.0)
    for i in range_constexpr(8):
        e, f = [exp2(logits[4 * i + n] * by_0 - origin_0) for n in (0, 1)]
        g, h = [exp2(logits[4 * i + n] * by_1 - origin_1) for n in (2, 3)]
        sum_0 = sum_0 + (e + f)
        sum_1 = sum_1 + (g + h)
        words[2 * i], words[2 * i + 1] = pack_bf16x2(e, f), pack_bf16x2(g, h)
    mass_0 = mass_0 * decay_0 + sum_0
    mass_1 = mass_1 * decay_1 + sum_1
    barrier_sync(WEIGHTS_FREE, 256)
    for i in range_constexpr(4):
        to = at.weights + 2048 * i + c.thread * 16
        store_shared_4(to, *[words[4 * i + n] for n in range(4)])
    store_for_quad(at, c, decay_0, decay_1)
    barrier_arrive(WEIGHTS_READY, 256)
    return top_0, top_1, mass_0, mass_1, decay_0, decay_1, changed


def above(x: Any, top: Any) -> Any:
    """Not 0 if x is so far above what logits are taken from that this must follow: weights are 2^8 at most."""
    return cutlass.select_(x > top + Float32(8.0), Uint32(1), Uint32(0))


@cute.jit
def take_half(at: cutlass.Constexpr, slot: Any, phase: Any) -> None:
    """Waits for half a block."""
    mbarrier_wait(at.full + 8 * slot, phase)
    fence_async_shared()


@cute.jit
def give_back(
    p: cutlass.Constexpr, at: cutlass.Constexpr, c: cutlass.Constexpr, left_slot: Any, right_slot: Any
) -> None:
    """A warp needs no more of the halves that it was the last one to read."""
    if c.lane == 0:
        if const_expr(p.value_parts > 1 or c.consumer == 0):
            mbarrier_arrive(at.empty + 8 * left_slot)
        if const_expr(p.value_parts > 1 or c.consumer == 1):
            mbarrier_arrive(at.empty + 8 * right_slot)


def value_tile(p: Profile, c: Cell, left_slot: Any, right_slot: Any) -> Any:
    """The first tile of 64 values of a consumer, counted over the ring."""
    if p.value_parts == 1:
        return (left_slot, right_slot)[c.consumer] * 4
    wide = p.values // 64
    start = c.part * (2 * wide) + c.consumer * wide  # in tiles of the row
    right = start >> 2
    return (left_slot + (right_slot - left_slot) * right) * 4 + (start & 3)


@cute.jit
def accumulate(
    p: cutlass.Constexpr,
    c: cutlass.Constexpr,
    sums: cutlass.Constexpr,
    decay_0: Any,
    decay_1: Any,
    changed: Any,
    left_slot: Any,
    right_slot: Any,
) -> None:
    """Starts adding weights times values to what is left of earlier sums."""
    acc = sums.acc
    if changed != 0:
        for i in range_constexpr(p.values // 8):
            acc[4 * i] = acc[4 * i] * decay_0
            acc[4 * i + 1] = acc[4 * i + 1] * decay_0
            acc[4 * i + 2] = acc[4 * i + 2] * decay_1
            acc[4 * i + 3] = acc[4 * i + 3] * decay_1
    tile = value_tile(p, c, left_slot, right_slot)
    mma = values_product(p)
    mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.fence()
    for k in range_constexpr(4):
        cute.gemm(mma, acc, sums.weights[None, None, k], sums.values[None, None, k, tile], acc)
    warpgroup.commit_group()


@cute.jit
def store_for_quad(at: cutlass.Constexpr, c: cutlass.Constexpr, x: Any, y: Any) -> None:
    """Factors of heads h and h + 8 for the other consumer."""
    if c.quad == 0:
        store_shared(at.decays + c.h * 4, bits_of(x))
        store_shared(at.decays + c.h * 4 + 32, bits_of(y))


def load_for_quad(at: Place, c: Cell) -> tuple[Any, Any]:
    return float_of(load_shared(at.decays + c.h * 4)), float_of(load_shared(at.decays + c.h * 4 + 32))
