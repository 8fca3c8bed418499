"""What ends a row in the sparse attention kernel: denominators, and values and masses that are written."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from ..cute_ptx import (
    any_lane,
    bits_of,
    exp2,
    float_of,
    larger_magnitude,
    load_global,
    log2,
    pack_bf16x2,
    pack_f16x2,
    permute,
    shuffle_xor,
    store_global,
    store_global_4,
    thread_index,
)
from .cute_place import NONE, Arrays, largest_of_quad, magnitude, origin
from .cute_plan import Profile
from .forms import LN2, LOG2E

FIRST, SECOND = 0x3210, 0x7654  # selectors of ``permute``


class Cell:
    """Which values of a tile a thread of a consumer sums up: of heads h and h + 8, two of each 8.

    Attributes:
        consumer: 0 or 1.
        thread: of the consumer; ``lane`` of its warp.
        quad: number among the four threads that have the same heads.
        h: the first of its heads, counted from ``head``.
        row: of the queries.
        head: first of the tile.
        part: of the values.
        group: of the CTAs that share the row.
    """

    def __init__(self, consumer: int, row: Any, head: Any, part: Any, group: Any):
        self.consumer, self.row, self.head, self.part, self.group = consumer, row, head, part, group
        self.thread = thread_index() - 128 * consumer
        self.lane = self.thread & 31
        self.quad = self.lane & 3
        self.h = ((self.thread >> 5) << 4) + (self.lane >> 2)


def line_of(p: Profile, c: Cell) -> Any:
    """The row of the output, of which groups have one each.

    It is worked out once, where writing begins: no register holds it before.
    """
    return c.row if p.groups == 1 else c.row * p.groups + c.group


def column_of(p: Profile, c: Cell) -> Any:
    """The first value of a consumer."""
    return c.part * (2 * p.values) + c.consumer * p.values


@cute.jit
def load_head(p: cutlass.Constexpr, array: Any, head: Any, h: Any) -> Any:
    """An array's value of head ``head + h``, where ``array`` is the address of that of ``head``."""
    x = Float32(0.0)
    if head + h < p.heads:
        x = float_of(load_global(array + Int64(h * 4)))
    return x


def load_sink(p: Profile, arrays: Arrays, head: Any, h: Any, partial: bool) -> Any:
    """The sink of a head, unless a second kernel will add it to the denominator."""
    if p.sinks and not partial:
        return load_head(p, arrays.sinks + Int64(head) * 4, head, h)
    return Float32(0.0)


@cute.jit
def share_of_head(
    p: cutlass.Constexpr, arrays: cutlass.Constexpr, top: Any, mass: Any, sink: Any, partial: cutlass.Constexpr
) -> Any:
    """The factor of a head's accumulated values; 0 where nothing took part.

    With ``partial`` under what took part here alone, which a second kernel completes.
    """
    total = mass
    if const_expr(p.sinks and not partial):
        total = mass + exp2(sink * Float32(LOG2E) - origin(top))
    x = Float32(1.0) / total
    if mass == Float32(0.0):
        x = Float32(0.0)
    if const_expr(p.out_scale and not partial):
        x = x * float_of(load_global(arrays.out_scale))
    return x


@cute.jit
def write_lse(
    p: cutlass.Constexpr, lse: Any, line: Any, head: Any, h: Any, top: Any, mass: Any, partial: cutlass.Constexpr
) -> None:
    """Writes a head's lse, for a second kernel to the base 2."""
    x = top + log2(mass)
    if const_expr(not partial):
        x = x * Float32(LN2)
    if mass == Float32(0.0):
        x = Float32(NONE)
    if head + h < p.heads:
        marks = p.marks if const_expr(partial) else 1
        store_global(lse + (Int64(line) * p.heads + Int64(head + h)) * (4 * marks), bits_of(x))


def values_at(p: Profile, arrays: Arrays, line: Any, head: Any) -> Any:
    """The address of the values of a head, of two bytes each."""
    return arrays.out + (Int64(line) * p.heads + Int64(head)) * 1024


@cute.jit
def write_all(
    p: cutlass.Constexpr,
    arrays: cutlass.Constexpr,
    c: cutlass.Constexpr,
    line: Any,
    acc: Any,
    share_0: Any,
    share_1: Any,
) -> None:
    """Writes a consumer's values."""
    column = column_of(p, c)
    to = values_at(p, arrays, line, c.head + c.h)
    if const_expr(p.partial):
        biggest = biggest_of(p, acc)
        for second in range_constexpr(2):
            share = (share_0, share_1)[second]
            up, down = lift(biggest[second] * share)
            for i in range_constexpr(0, p.pieces, 8):
                words = packed(acc, 4 * i + 2 * second, 8, share * up)
                write_part(p, arrays, line, c.head + c.h + 8 * second, c.quad, words, column + 8 * i, down)
    for g in range_constexpr(0 if p.partial else p.pieces // 4):
        first, second = [], []
        for i in range_constexpr(4):
            n = 16 * g + 4 * i
            first.append(pack_bf16x2(acc[n] * share_0, acc[n + 1] * share_0))
            second.append(pack_bf16x2(acc[n + 2] * share_1, acc[n + 3] * share_1))
        at = column + 32 * g
        for n in range_constexpr(2):
            place = to + Int64(at * 2 + c.quad * 16 + n * 8192)
            write_four(p, c.head + c.h + 8 * n, c.quad, (first, second)[n], place, is_rope(p, at))


@cute.jit
def write_four(p: cutlass.Constexpr, head: Any, quad: Any, words: cutlass.Constexpr, to: Any, rope: Any) -> None:
    """Writes four pieces of 8 bf16 values of a head, of which each thread of a quad has two of each piece.

    The threads exchange until each has a whole piece, which goes ``to`` where it is the thread's to write.
    """
    piece = whole_piece(words, quad, rope)
    if const_expr(p.heads % 64 == 0 and p.splits == 1):  # all heads exist; of a cluster's rounds some have none
        store_global_4(to, *piece)
    else:
        if head < p.heads:
            store_global_4(to, *piece)


@cute.jit
def write_chunk(
    p: cutlass.Constexpr,
    arrays: cutlass.Constexpr,
    line: Any,
    head: Any,
    quad: Any,
    values: cutlass.Constexpr,
    column: Any,
) -> None:
    """Writes 64 bf16 values of a head from a column on, of which each thread of a quad has two of each 8."""
    words = [pack_bf16x2(values[2 * i], values[2 * i + 1]) for i in range(8)]
    to = values_at(p, arrays, line, head) + Int64(column * 2 + quad * 16)
    for g in range_constexpr(2):
        write_four(p, head, quad, words[4 * g : 4 * g + 4], to + 64 * g, is_rope(p, column))


@cute.jit
def write_part(
    p: cutlass.Constexpr,
    arrays: cutlass.Constexpr,
    line: Any,
    head: Any,
    quad: Any,
    words: cutlass.Constexpr,
    column: Any,
    down: Any,
) -> None:
    """Writes 64 lifted float16 values of a head for a second kernel, in the order of dequantised values.

    The first thread of those that have a consumer's values writes what undoes the lift.
    """
    whole = [transposed(words[n : n + 4], quad) for n in (0, 4)]
    if head < p.heads:
        to = values_at(p, arrays, line, head) + Int64(column * 2 + quad * 16)
        for g in range_constexpr(2):
            store_global_4(to + 64 * g, *whole[g])
        if quad == 0 and column % p.values == 0:
            mark = (Int64(line) * p.heads + Int64(head)) * p.marks + Int64(1 + column // p.values)
            store_global(arrays.lse + mark * 4, bits_of(down))


@cute.jit
def lift(biggest: Any) -> Any:
    """The power of two that lifts values of that magnitude to the top of float16's range, and its inverse."""
    exponent = Int32(bits_of(biggest) >> 23)
    field = cutlass.min(cutlass.max(Int32(268) - exponent, Int32(1)), Int32(253))
    field = cutlass.select_(exponent == 255, Int32(127), field)
    return float_of(Uint32(field) << 23), float_of(Uint32(254 - field) << 23)


@cute.jit
def biggest_of(p: cutlass.Constexpr, acc: Any) -> Any:
    """The largest finite magnitudes of a consumer's values of heads h and h + 8."""
    first, second = Float32(0.0), Float32(0.0)
    for i in range_constexpr(p.pieces):
        for n in range_constexpr(2):
            first = larger_magnitude(first, acc[4 * i + n])
            second = larger_magnitude(second, acc[4 * i + 2 + n])
    infinite = (first == Float32(-NONE)) | (second == Float32(-NONE))
    if any_lane(cutlass.select_(infinite, Uint32(1), Uint32(0))) != 0:
        first, second = Float32(0.0), Float32(0.0)
        for i in range_constexpr(p.pieces):
            for n in range_constexpr(2):
                first = larger_magnitude(first, finite(acc[4 * i + n]))
                second = larger_magnitude(second, finite(acc[4 * i + 2 + n]))
    return largest_of_quad(first), largest_of_quad(second)


def finite(x: Any) -> Any:
    """x, or 0 in place of what is not finite."""
    return cutlass.select_(magnitude(bits_of(x)) < Uint32(0x7F800000), x, Float32(0.0))


def packed(acc: Any, start: int, count: int, factor: Any) -> list[Any]:
    """A thread's values of one head in adjacent pieces, multiplied, as float16, two a word."""
    return [pack_f16x2(acc[n] * factor, acc[n + 1] * factor) for n in range(start, start + 4 * count, 4)]


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
    x, y, z, w = transposed(words, quad)
    # Values 1, 3, 0, 2 are in x and y.
    low = cutlass.select_(rope, Uint32(SECOND), Uint32(0x5410))
    top = cutlass.select_(rope, Uint32(FIRST), Uint32(0x7632))
    return permute(y, x, low), permute(y, x, top), permute(w, z, low), permute(w, z, top)


def transposed(words: Any, quad: Any) -> tuple[Any, Any, Any, Any]:
    """Of the four words that each thread of a quad has, those of the thread's number, by thread."""
    odd, high = selector((quad & 1) != 0), selector((quad & 2) != 0)
    got = shuffle_xor(either(odd, words[1], words[0]), 1)
    a_0, a_1 = either(odd, words[0], got), either(odd, got, words[1])
    got = shuffle_xor(either(odd, words[3], words[2]), 1)
    b_0, b_1 = either(odd, words[2], got), either(odd, got, words[3])
    got_0 = shuffle_xor(either(high, b_0, a_0), 2)
    got_1 = shuffle_xor(either(high, b_1, a_1), 2)
    x, y = either(high, a_0, got_0), either(high, a_1, got_1)
    z, w = either(high, got_0, b_0), either(high, got_1, b_1)
    return x, y, z, w
