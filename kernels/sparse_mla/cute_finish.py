"""The second kernel of the sparse attention: merges the results of groups, and rotates and quantises the output."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from ..cute_ptx import (
    bits_of,
    divide,
    e4m3x4,
    exp2,
    float_of,
    load_global,
    load_global_4,
    pack_bf16x2,
    shuffle_xor,
    store_global,
    store_global_2,
    store_global_byte,
    thread_index,
)
from .cute_output import is_rope, share_of_head, write_lse
from .cute_place import NONE, magnitude, origin
from .cute_plan import Profile
from .epilogue import MIN_AMAX


def padded(p: Profile) -> int:
    """Rows of the scales of an output."""
    return p.rows if p.ending is None else -(-p.rows // 4) * 4


@cute.jit
def complete(p: cutlass.Constexpr, arrays: cutlass.Constexpr, row: Any, head: Any) -> None:
    """Adds up the results of groups for one row and head, in their order, and writes them: four values a thread."""
    thread = thread_index()
    if const_expr(p.ending is None):
        low, high = natural(p, merged_groups(p, arrays, row, head, thread), thread)
        to = arrays.out + (Int64(row) * p.heads + Int64(head)) * 1024 + Int64(thread * 8)
        store_global_2(to, pack_bf16x2(low[0], low[1]), pack_bf16x2(high[0], high[1]))
    else:
        if row < p.rows:
            pairs = natural(p, merged_groups(p, arrays, row, head, thread), thread)
            write_codes(p, arrays, pairs, row, head, thread)
        elif thread % (p.ending.block // 4) == 0:
            write_scale(p, arrays, row, head, thread, Uint32(0))


@cute.jit
def merged_groups(p: cutlass.Constexpr, arrays: cutlass.Constexpr, row: Any, head: Any, thread: Any) -> Any:
    """Four values of a row and head, in the order of dequantised values; writes its lse."""
    masses = arrays.masses + (Int64(row) * (p.groups * p.heads) + Int64(head)) * 4
    parts = arrays.parts + (Int64(row) * (p.groups * p.heads) + Int64(head)) * 2048 + Int64(thread * 16)
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
    factor = share_of_head(p, arrays, top, mass, head, Int32(0), False)
    if thread == 0:
        write_lse(p, arrays.lse, row, head, Int32(0), top, mass, False)
    return [x * factor for x in sums]


def natural(p: Profile, values: Any, thread: Any) -> tuple[Any, Any]:
    """Four values in their order, as two pairs."""
    a, b, c, d = values
    as_is = is_rope(p, thread * 4)
    pairs = [cutlass.select_(as_is, x, y) for x, y in ((a, c), (b, a), (c, d), (d, b))]
    return pairs[:2], pairs[2:]


@cute.jit
def write_codes(
    p: cutlass.Constexpr, arrays: cutlass.Constexpr, pairs: Any, row: Any, head: Any, thread: Any
) -> None:
    """Rotates the trailing values back, and writes codes and scales."""
    ending = p.ending
    values = []
    largest = Uint32(0)
    for i in range_constexpr(2):
        even, odd = pairs[i]
        place = (thread * 4 + 2 * i - (512 - ending.rope)) >> 1
        if place >= 0:
            table = arrays.cos_sin + (Int64(row) * ending.rope + Int64(place)) * 4
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
    store_global(arrays.out + place * 512 + Int64(thread * 4), e4m3x4(a, b, c, d))
    if thread % (ending.block // 4) == 0:
        write_scale(p, arrays, row, head, thread, word)


@cute.jit
def write_scale(
    p: cutlass.Constexpr, arrays: cutlass.Constexpr, row: Any, head: Any, thread: Any, word: Any
) -> None:
    """Writes the float32 scale, or the exponent, of the block of values that starts with those of a thread."""
    ending = p.ending
    blocks = 512 // ending.block
    block = thread // (ending.block // 4)
    # Blocks of heads in order are those of groups in order.
    if const_expr(ending.powers):
        place = (Int64(head) * (blocks // 4) + Int64(block >> 2)) * padded(p) + Int64(row)
        store_global_byte(arrays.scales + place * 4 + Int64(block & 3), word)
    else:
        store_global(arrays.scales + ((Int64(head) * blocks + Int64(block)) * padded(p) + Int64(row)) * 4, word)


def larger_word(x: Any, y: Any) -> Any:
    return cutlass.select_(x > y, x, y)
