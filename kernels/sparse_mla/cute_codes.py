"""Rotated and quantised output of the sparse attention kernel, from its consumers or from its second kernel."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from ..cute_ptx import (
    bits_of,
    divide,
    e4m3x4,
    float_of,
    load_ordered_if,
    permute,
    shuffle_xor,
    store_global,
    store_global_2,
    store_global_4,
    store_global_byte,
)
from .cute_output import transposed
from .cute_place import Arrays, magnitude
from .cute_plan import Ending, Profile
from .epilogue import MIN_AMAX


def padded(p: Profile) -> int:
    """Rows of the scales of an output."""
    return -(-p.rows // 4) * 4


@cute.jit
def write_units(
    p: cutlass.Constexpr, arrays: cutlass.Constexpr, c: cutlass.Constexpr, acc: Any, share_0: Any, share_1: Any
) -> None:
    """Writes a consumer's values, multiplied by the factors of heads h and h + 8."""
    turns = angles(p, arrays, c.row, c.quad, Int32(448)) if const_expr(c.consumer == 1) else []
    for unit in range_constexpr(4):  # 128 values of one of the heads
        half, second = unit // 2, unit % 2
        factor = (share_0, share_1)[second]
        chunks = []
        for start in (64 * half, 64 * half + 32):
            values = [acc[i + 2 * second + n] * factor for i in range(start, start + 32, 4) for n in (0, 1)]
            last = c.consumer == 1 and start == 96
            chunks.append(turned(values, turns, True) if last else values)
        column = Int32(256 * c.consumer + 128 * half)
        write_chunks(p, arrays, c.row, [c.head + c.h + 8 * second], c.quad, [chunks], column, (1, 2))


@cute.jit
def write_chunks(
    p: cutlass.Constexpr,
    arrays: cutlass.Constexpr,
    row: Any,
    heads: cutlass.Constexpr,
    quad: Any,
    chunks: cutlass.Constexpr,
    column: Any,
    masks: cutlass.Constexpr,
) -> None:
    """Writes chunks of 64 values of each of some heads from a column on: of each a thread of a quad has two of each 8.

    Threads whose numbers differ by ``masks`` have 128 values together. What is done to the heads takes turns, since
    each step waits for the one before.
    """
    ending, count = p.ending, len(chunks[0])
    x = [value for some in chunks for values in some for value in values]
    whole = ending.block == 128
    each = 16 * count if whole else 8  # of a thread under a scale
    blocks = 16 * count // each
    largest = []
    for b in range_constexpr(len(heads) * blocks):
        largest.append(Uint32(0))
        for n in range_constexpr(each):
            largest[b] = larger_word(largest[b], magnitude(bits_of(x[b * each + n])))
    for mask in masks if whole else (1, 2):
        largest = [larger_word(word, shuffle_xor(word, mask)) for word in largest]
    for b in range_constexpr(len(heads) * blocks):
        word, inverse = scale_of(ending, largest[b])
        for n in range_constexpr(each):
            x[b * each + n] = x[b * each + n] * inverse
        if quad == 0 and heads[b // blocks] < p.heads and column % ending.block == 0:
            write_scales(p, arrays, row, heads[b // blocks], column // ending.block + b % blocks, word)
    for k in range_constexpr(len(heads) * count):
        head = heads[k // count]
        start = column + 64 * (k % count)
        pairs = [e4m3x4(*x[16 * k + 4 * n : 16 * k + 4 * n + 4]) for n in range(4)]
        a, b, d, e = transposed(pairs, quad)
        # Values 1, 3, 0, 2 of a piece are in a and b, but for those that were not codes.
        as_is = start >= 448
        low = cutlass.select_(as_is, Uint32(0x5410), Uint32(0x1504))
        high = cutlass.select_(as_is, Uint32(0x7632), Uint32(0x3726))
        words = [permute(a, b, low), permute(d, e, low), permute(a, b, high), permute(d, e, high)]
        if head < p.heads:
            store_global_4(codes_at(p, arrays, row, head) + Int64(start + quad * 16), *words)


def angles(p: Profile, arrays: Arrays, row: Any, quad: Any, column: Any) -> list[tuple[Any, Any]]:
    """Cosines and sines of a thread's pairs that are rotated if 64 values from a column on are the last of a row."""
    ending: Any = p.ending
    return [angle(p, arrays, row, column + 8 * i + 2 * quad) for i in range(8 - ending.rope // 8, 8)]


def turned(values: Any, turns: Any, last: Any) -> list[Any]:
    """The values of a chunk, rotated back where it is the last one of a row."""
    found = list(values)
    for i, (cos, sin) in enumerate(turns, 8 - len(turns)):
        pair = turned_pair(found[2 * i], found[2 * i + 1], cos, sin)
        for n in range(2):
            found[2 * i + n] = pair[n] if last is True else cutlass.select_(last, pair[n], found[2 * i + n])
    return found


def codes_at(p: Profile, arrays: Arrays, row: Any, head: Any) -> Any:
    """The address of the codes of a row and head."""
    ending: Any = p.ending
    each = p.heads // ending.groups
    group = head // each
    return arrays.out + ((Int64(group) * p.rows + Int64(row)) * each + Int64(head - group * each)) * 512


def angle(p: Profile, arrays: Arrays, row: Any, column: Any) -> tuple[Any, Any]:
    """Cosine and sine of the pair of values from a column on, zeros where they are not rotated."""
    ending: Any = p.ending
    place = column - (512 - ending.rope)
    here = cutlass.select_(place >= 0, Int32(1), Int32(0))
    table = arrays.cos_sin + (Int64(row) * ending.rope + Int64(place >> 1)) * 4
    return float_of(load_ordered_if(here, table)), float_of(load_ordered_if(here, table + 2 * ending.rope))


def turned_pair(even: Any, odd: Any, cos: Any, sin: Any) -> tuple[Any, Any]:
    """A pair, rotated back."""
    return even * cos + odd * sin, odd * cos - even * sin


def scale_of(ending: Ending, largest: Any) -> tuple[Any, Any]:
    """The scale of a block whose largest magnitude is given as a word, as it is stored, and its inverse."""
    none = largest > Uint32(0x7F800000)  # NaN
    amax = cute.arch.fmax(float_of(largest), Float32(MIN_AMAX))
    if ending.powers:
        bits = bits_of(amax)
        above = cutlass.select_((bits & Uint32(0x7FFFFF)) > Uint32(0x600000), Uint32(1), Uint32(0))
        word = (bits >> 23) - Uint32(8) + above  # the exponent
        inverse = float_of((Uint32(254) - word) << 23)
        word = cutlass.select_(none, Uint32(255), word)
    else:
        scale = divide(amax, Float32(448.0))
        word = cutlass.select_(none, Uint32(0x7FC00000), bits_of(scale))
        inverse = divide(Float32(1.0), scale)
    return word, cutlass.select_(none, float_of(Uint32(0x7FC00000)), inverse)


@cute.jit
def write_scales(p: cutlass.Constexpr, arrays: cutlass.Constexpr, row: Any, head: Any, block: Any, word: Any) -> None:
    """Writes the float32 scale, or the exponent, of a block of a head; behind the last row also the padding."""
    write_scale(p, arrays, row, head, block, word)
    if const_expr(padded(p) > p.rows):
        if row == p.rows - 1:
            for pad in range_constexpr(p.rows, padded(p)):
                write_scale(p, arrays, Int32(pad), head, block, Uint32(0))


def write_scale(p: Profile, arrays: Arrays, row: Any, head: Any, block: Any, word: Any) -> None:
    """Writes a scale. Blocks of heads in order are those of groups in order."""
    ending: Any = p.ending
    blocks = 512 // ending.block
    if ending.powers:
        place = (Int64(head) * (blocks // 4) + Int64(block >> 2)) * padded(p) + Int64(row)
        store_global_byte(arrays.scales + place * 4 + Int64(block & 3), word)
    else:
        store_global(arrays.scales + ((Int64(head) * blocks + Int64(block)) * padded(p) + Int64(row)) * 4, word)


@cute.jit
def write_codes(
    p: cutlass.Constexpr, arrays: cutlass.Constexpr, values: Any, turns: Any, row: Any, head: Any, column: Any
) -> None:
    """Writes a thread's values, in order, as the second kernel has them, rotated by an angle each two."""
    ending = p.ending
    found = []
    largest = Uint32(0)
    for i in range_constexpr(p.finish_values // 2):
        even, odd = values[2 * i], values[2 * i + 1]
        if column + 2 * i >= 512 - ending.rope:
            even, odd = turned_pair(even, odd, *turns[i])
        found += [even, odd]
        for x in (even, odd):
            largest = larger_word(largest, magnitude(bits_of(x)))
    for bit in range_constexpr((ending.block // p.finish_values - 1).bit_length()):
        largest = larger_word(largest, shuffle_xor(largest, 1 << bit))
    word, inverse = scale_of(ending, largest)
    found = [x * inverse for x in found]
    to = codes_at(p, arrays, row, head) + Int64(column)
    if const_expr(p.finish_values == 4):
        store_global(to, e4m3x4(*found))
    else:
        store_global_2(to, e4m3x4(*found[:4]), e4m3x4(*found[4:]))
    if column % ending.block == 0:
        write_scales(p, arrays, row, head, column // ending.block, word)


def larger_word(x: Any, y: Any) -> Any:
    return cutlass.select_(x > y, x, y)
