"""CTAs of a cluster that share a row send each other their parts of the sparse attention, and merge them.

Each merges all values of some heads, four by four, so that what becomes of a head needs no further exchange.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, range_constexpr

from ..cute_ptx import (
    bits_of,
    exp2,
    float_of,
    load_shared_4,
    map_shared,
    mbarrier_arrive,
    mbarrier_arrive_cluster,
    mbarrier_wait_cluster,
    pack_f16x2,
    send_1,
    send_2,
    send_4,
    store_shared,
    store_shared_2,
    store_shared_4,
    sync_warp,
    unpack_f16x2,
)
from .cute_codes import angles, turned, write_chunks
from .cute_output import (
    biggest_of,
    lift,
    line_of,
    load_sink,
    packed,
    share_of_head,
    write_chunk,
    write_lse,
    write_part,
)
from .cute_place import NONE, Place, origin
from .cute_plan import FOUR, KNOWN, Profile


def bytes_of_parts(p: Profile, share: int) -> int:
    """What other CTAs send to the one that merges the heads of a share."""
    return p.owned(share)[1] * (p.splits - 1) * p.four_bytes


def part_at(p: Profile, at: Place, number: Any, share: Any, consumer: Any) -> Any:
    """The address of what a consumer of a share sends of four heads, those of a number among those of a CTA."""
    return at.queries + ((number * p.splits + share) * 2 + consumer) * p.part_bytes


def known_at(p: Profile, at: Place, number: Any, share: Any, head: Any) -> Any:
    """The address of what a share sends of one of four heads besides."""
    start = at.queries + p.most * p.splits * (2 * p.part_bytes)
    return start + ((number * p.splits + share) * FOUR + head) * KNOWN


@cute.jit
def announce(p: cutlass.Constexpr, at: cutlass.Constexpr, lane: Any) -> None:
    """Tells all CTAs of the row that this warp needs queries no more, and no producer its memory."""
    sync_warp()
    if lane < p.splits:
        mbarrier_arrive_cluster(map_shared(at.ready, lane))


@cute.jit
def merge(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    arrays: cutlass.Constexpr,
    c: cutlass.Constexpr,
    acc: Any,
    first: Any,
    second: Any,
) -> None:
    """Sends a consumer's values, and adds up and writes those of the heads that this CTA merges.

    ``first`` and ``second`` are what logits of heads h and h + 8 were taken from and their masses, which one consumer
    knows.
    """
    biggest_0, biggest_1 = biggest_of(p, acc)
    up_0, down_0 = lift(biggest_0)
    up_1, down_1 = lift(biggest_1)
    mbarrier_wait_cluster(at.ready, 0)
    send_head(p, at, c, acc, 0, up_0, down_0, first)
    send_head(p, at, c, acc, 1, up_1, down_1, second)
    sync_warp()
    if c.lane == 0:
        mbarrier_arrive(at.merged)  # what the warp kept is there
    merge_owned(p, at, arrays, c)


@cute.jit
def send_head(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    c: cutlass.Constexpr,
    acc: Any,
    second: cutlass.Constexpr,
    up: Any,
    down: Any,
    known: Any,
) -> None:
    """A thread's values of head h, or of the second one, to the CTA that merges it: in float16, lifted."""
    four = (c.thread >> 5) * 4 + 2 * second + (c.lane >> 4)
    if four < p.fours:
        owner = four * p.splits // p.fours
        number = four - p.first_of(owner)
        place = part_at(p, at, number, at.share, c.consumer) + (c.lane & 15) * 16
        about = known_at(p, at, number, at.share, (c.lane >> 2) & 3)
        if owner == at.share:
            if c.quad == 0:
                if const_expr(len(known) > 0):
                    store_shared_2(about, *[bits_of(x) for x in known])
                store_shared(about + (8 + 4 * c.consumer), bits_of(down))
            for i in range_constexpr(0, p.pieces, 4):
                store_shared_4(place + 64 * i, *packed(acc, 4 * i + 2 * second, 4, up))
        else:
            barrier = map_shared(at.merged, owner)
            if c.quad == 0:
                about = map_shared(about, owner)
                if const_expr(len(known) > 0):
                    send_2(about, *[bits_of(x) for x in known], barrier)
                send_1(about + (8 + 4 * c.consumer), bits_of(down), barrier)
            place = map_shared(place, owner)
            for i in range_constexpr(0, p.pieces, 4):
                send_4(place + 64 * i, *packed(acc, 4 * i + 2 * second, 4, up), barrier)


@cute.jit
def merge_owned(p: cutlass.Constexpr, at: cutlass.Constexpr, arrays: cutlass.Constexpr, c: cutlass.Constexpr) -> None:
    """Waits for, adds up and writes the values of the CTA's heads: of four heads 128 columns a warp at a time.

    Eight threads have a head: each of them a pair of each 8 columns of half of the 128.
    """
    wide = p.values // 64  # of 128 columns, in those of the CTA
    begin, end = p.first_of(at.share), p.first_of(at.share + 1)
    warp = c.consumer * 4 + (c.thread >> 5)
    half = c.lane >> 4
    line = line_of(p, c)
    # Each round has the same columns.
    piece = warp % wide * 16 + half * 8
    column = c.part * (2 * p.values) + piece * 8
    turns = angles(p, arrays, c.row, c.quad, column) if p.fused else []
    h = (c.lane >> 2) & 3
    step = 8 // wide  # fours between two rounds, of which two are at work together, so that they wait together
    count = 2 if p.most > step else 1
    four = warp // wide
    sinks = [load_sink(p, arrays, c.head, (begin + four + i * step) * FOUR + h, p.partial) for i in range(count)]
    sink_0, sink_1 = sinks[0], sinks[-1]
    mbarrier_wait_cluster(at.merged, 0)
    consumer = piece // p.pieces
    source = part_at(p, at, 0, 0, consumer) + (piece - consumer * p.pieces) * 64 + (c.lane & 15) * 16
    for first in cutlass.range(four, end - begin, count * step, unroll=1):
        heads, values, downs = [], [], []
        for i in range_constexpr(count):
            number = first + i * step
            head = c.head + (begin + number) * FOUR + h
            if const_expr(i > 0):  # behind the CTA's last one, whose values are read, there is none to write
                head = cutlass.select_(begin + number < end, head, Int32(p.heads))
                number = cutlass.min(number, end - begin - 1)
            weights = merged_weights(p, at, arrays, c, number, h, head, piece, line, (sink_0, sink_1)[i])
            if const_expr(p.partial):  # what is sent is under 2^16
                up, down = lift(sum(weights, Float32(0.0)) * Float32(65536.0))
                weights = [x * up for x in weights]
                downs.append(down)
            heads.append(head)
            values.append(added(p, source + number * (2 * p.splits * p.part_bytes), weights))
        behind = (begin + first + count * step) * FOUR + h
        sink_0 = load_sink(p, arrays, c.head, behind, p.partial)
        sink_1 = load_sink(p, arrays, c.head, behind + step * FOUR, p.partial) if const_expr(count > 1) else sink_0
        if const_expr(p.fused):
            chunks = [[turned(x, turns, column == 448)] for x in values]
            write_chunks(p, arrays, c.row, heads, c.quad, chunks, column, (1, 2, 16))
        else:
            for i in range_constexpr(count):
                if const_expr(p.partial):
                    words = [pack_f16x2(values[i][2 * n], values[i][2 * n + 1]) for n in range(8)]
                    write_part(p, arrays, line, heads[i], c.quad, words, column, downs[i])
                else:
                    write_chunk(p, arrays, line, heads[i], c.quad, values[i], column)


def added(p: Profile, source: Any, weights: Any) -> list[Any]:
    """The sums of a thread's sixteen values over all shares, in their order."""
    sums = [Float32(0.0)] * 16
    for s in range(p.splits):
        place = source + s * (2 * p.part_bytes)
        for k, word in enumerate([*load_shared_4(place), *load_shared_4(place + 256)]):
            for n, x in enumerate(unpack_f16x2(word)):
                sums[2 * k + n] = sums[2 * k + n] + x * weights[s]
    return sums


@cute.jit
def merged_weights(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    arrays: cutlass.Constexpr,
    c: cutlass.Constexpr,
    number: Any,
    h: Any,
    head: Any,
    piece: Any,
    line: Any,
    sink: Any,
) -> Any:
    """Factors of the parts of a head from a piece of it on: of head h of four, those of a number among the CTA's.

    The thread of the first piece writes the lse, as one of ``head``.
    """
    tops, masses, downs = [], [], []
    top = Float32(NONE)
    for s in range_constexpr(p.splits):
        x, y, left, right = load_shared_4(known_at(p, at, number, s, h))
        tops.append(float_of(x))
        masses.append(float_of(y))
        downs.append(float_of(cutlass.select_(piece < p.pieces, left, right)))
        top = cute.arch.fmax(top, tops[s])
    weights = []
    mass = Float32(0.0)
    for s in range_constexpr(p.splits):
        weights.append(exp2(tops[s] - origin(top)))
        mass = mass + masses[s] * weights[s]
    factor = share_of_head(p, arrays, top, mass, sink, p.partial)
    if c.part == 0 and piece == 0 and c.quad == 0:
        write_lse(p, arrays.lse, line, head, Int32(0), top, mass, p.partial)
    return [weights[s] * factor * downs[s] for s in range(p.splits)]
