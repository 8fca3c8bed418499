"""CTAs of a cluster that share a row send each other their parts of the sparse attention, and merge them."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr, range_constexpr

from ..cute_ptx import (
    bits_of,
    exp2,
    float_of,
    larger_magnitude,
    load_shared_2,
    load_shared_4,
    map_shared,
    mbarrier_arrive_cluster,
    mbarrier_wait_cluster,
    pack_bf16x2,
    pack_f16x2,
    send_1,
    send_2,
    send_4,
    store_shared_2,
    store_shared_4,
    sync_warp,
    unpack_f16x2,
)
from .cute_codes import UNIT, write_unit
from .cute_output import (
    Cell,
    column_of,
    line_of,
    share_of_head,
    values_at,
    write_lse,
    write_pairs,
    write_pieces,
    write_sums,
)
from .cute_place import NONE, Place, largest_of_quad, origin
from .cute_plan import Profile


def bytes_of_parts(p: Profile, share: int) -> int:
    """What is sent to the CTA that merges the pieces of a share."""
    return p.splits * 1024 + (p.splits - 1) * p.owned(share)[1] * 2 * 1024


def statistics_at(p: Profile, at: Place) -> Any:
    """For each share and head the largest logit, the mass, and what the parts of each consumer are multiplied by."""
    return at.queries + 2 * p.splits * p.part_bytes


@cute.jit
def announce(p: cutlass.Constexpr, at: cutlass.Constexpr, lane: Any) -> None:
    """Tells all CTAs of the row that this warp needs queries no more, and no producer its memory."""
    sync_warp()
    if lane < p.splits:
        mbarrier_arrive_cluster(map_shared(at.ready, lane))


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


def store(to: Any, words: Any) -> None:
    {2: store_shared_2, 4: store_shared_4}[len(words)](to, *words)


def send(to: Any, words: Any, barrier: Any) -> None:
    {1: send_1, 2: send_2, 4: send_4}[len(words)](to, *words, barrier)


@cute.jit
def send_to_all(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    c: cutlass.Constexpr,
    offset: cutlass.Constexpr,
    first: Any,
    second: Any,
) -> None:
    """What is known of heads h and h + 8 to all CTAs of the row, into their statistics of this share."""
    to = statistics_at(p, at) + at.share * 1024 + c.h * 16 + offset
    for s in range_constexpr(p.splits):
        if c.quad == s % 4:
            place, barrier = map_shared(to, s), map_shared(at.merged, s)
            send(place, [bits_of(x) for x in first], barrier)
            send(place + 128, [bits_of(x) for x in second], barrier)


@cute.jit
def send_parts(
    p: cutlass.Constexpr, at: cutlass.Constexpr, c: cutlass.Constexpr, acc: Any, up_0: Any, up_1: Any
) -> None:
    """A consumer's values to the CTAs that merge them, as the threads hold them."""
    to = at.queries + (c.consumer * p.splits + at.share) * p.part_bytes + c.thread * (8 * step(p))
    for s in range_constexpr(p.splits):
        start, count = p.owned(s)
        if at.share == s:
            for i in range_constexpr(0, count, step(p)):
                store(to + 1024 * i, packed(acc, up_0, up_1, start + i, step(p)))
        else:
            place, barrier = map_shared(to, s), map_shared(at.merged, s)
            for i in range_constexpr(0, count, step(p)):
                send(place + 1024 * i, packed(acc, up_0, up_1, start + i, step(p)), barrier)


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
    arrays: cutlass.Constexpr,
    c: cutlass.Constexpr,
    acc: Any,
    first: Any,
    second: Any,
) -> None:
    """Sends a consumer's values, and adds up and writes those of the columns that this CTA merges.

    ``first`` and ``second`` are the largest logit and the mass of heads h and h + 8, which one consumer knows.
    """
    up_0, down_0, up_1, down_1 = lifts(p, acc)
    mbarrier_wait_cluster(at.ready, 0)
    if const_expr(len(first) > 0):
        send_to_all(p, at, c, 0, first, second)
    send_to_all(p, at, c, 8 + 4 * c.consumer, (down_0,), (down_1,))
    send_parts(p, at, c, acc, up_0, up_1)
    mbarrier_wait_cluster(at.merged, 0)
    line = line_of(p, c)
    weights_0 = merged_weights(p, at, arrays, c, line, c.h)
    weights_1 = merged_weights(p, at, arrays, c, line, c.h + 8)
    if const_expr(p.fused):
        add_up_unit(p, at, arrays, c, weights_0, weights_1)
    else:
        add_up(p, at, arrays, c, line, weights_0, weights_1)


@cute.jit
def add_up(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    arrays: cutlass.Constexpr,
    c: cutlass.Constexpr,
    line: Any,
    weights_0: Any,
    weights_1: Any,
) -> None:
    """Adds up the parts in the order of the shares, and writes the sums."""
    start, count = Int32(0), Int32(0)
    for s in range_constexpr(p.splits):
        if at.share == s:
            start, count = Int32(p.owned(s)[0]), Int32(p.owned(s)[1] // p.grain)
    source = parts_at(p, at, c)
    column = column_of(p, c) + start * 8
    to = values_at(p, arrays, c, line)
    for n in cutlass.range(count, unroll=1):
        first, second = [], []
        for i in range_constexpr(0, p.grain, step(p)):
            sums = added(p, source + (n * p.grain + i) * 1024, weights_0, weights_1)
            for k in range_constexpr(step(p)):
                if const_expr(p.partial):
                    write_sums(p, arrays, c, line, sums[4 * k : 4 * k + 4], column + 8 * (i + k))
                else:
                    first.append(pack_bf16x2(sums[4 * k], sums[4 * k + 1]))
                    second.append(pack_bf16x2(sums[4 * k + 2], sums[4 * k + 3]))
        if const_expr(p.partial):
            pass
        elif const_expr(p.grain == 4):
            write_pieces(p, c, first, second, to, column)
        else:
            for i in range_constexpr(p.grain):
                write_pairs(p, c, first[i], second[i], to, column + 8 * i)
        column = column + 8 * p.grain


@cute.jit
def add_up_unit(
    p: cutlass.Constexpr,
    at: cutlass.Constexpr,
    arrays: cutlass.Constexpr,
    c: cutlass.Constexpr,
    weights_0: Any,
    weights_1: Any,
) -> None:
    """Adds up the parts of two shares, each of which merges a whole unit, and writes codes."""
    for s in range_constexpr(p.splits):
        if at.share == s:
            values = []
            for i in range_constexpr(0, UNIT // 8, step(p)):
                values += added(p, parts_at(p, at, c) + 1024 * i, weights_0, weights_1)
            write_unit(p, arrays, c, values, 256 * c.consumer + 8 * p.owned(s)[0])


def parts_at(p: Profile, at: Place, c: Cell) -> Any:
    """The address of what the first share sent for a thread's values."""
    return at.queries + c.consumer * (p.splits * p.part_bytes) + c.thread * (8 * step(p))


def added(p: Profile, source: Any, weights_0: Any, weights_1: Any) -> list[Any]:
    """The sums of one piece, or two adjacent ones, over all shares: four values of each."""
    sums = [Float32(0.0)] * (4 * step(p))
    for s in range(p.splits):
        place = source + s * p.part_bytes
        words = load_shared_2(place) if p.grain == 1 else load_shared_4(place)
        for k, word in enumerate(words):
            weight = (weights_0, weights_1)[k % 2][s]
            for n, x in enumerate(unpack_f16x2(word)):
                sums[2 * k + n] = sums[2 * k + n] + x * weight
    return sums


@cute.jit
def merged_weights(
    p: cutlass.Constexpr, at: cutlass.Constexpr, arrays: cutlass.Constexpr, c: cutlass.Constexpr, line: Any, h: Any
) -> Any:
    """Factors of the parts of a head; writes its lse."""
    tops, masses, downs = [], [], []
    top = Float32(NONE)
    for s in range_constexpr(p.splits):
        x, y, *z = load_shared_4(statistics_at(p, at) + s * 1024 + h * 16)
        tops.append(float_of(x))
        masses.append(float_of(y))
        downs.append(float_of(z[c.consumer]))
        top = cute.arch.fmax(top, tops[s])
    weights = []
    mass = Float32(0.0)
    for s in range_constexpr(p.splits):
        weights.append(exp2(tops[s] - origin(top)))
        mass = mass + masses[s] * weights[s]
    factor = share_of_head(p, arrays, top, mass, c.head, h, p.partial)
    if const_expr(c.consumer == 0):
        if at.share == 0 and c.part == 0 and c.quad == 0:
            write_lse(p, arrays.lse, line, c.head, h, top, mass, p.partial)
    return [weights[s] * factor * downs[s] for s in range(p.splits)]
