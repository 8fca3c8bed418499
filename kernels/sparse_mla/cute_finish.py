"""The second kernel of the sparse attention: merges the results of groups, and rotates and quantises the output.

A head has ``Profile.finish_threads``, of which each adds up four or eight of its values.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from ..cute_ptx import (
    bits_of,
    exp2,
    float_of,
    load_ordered,
    load_ordered_2,
    load_ordered_4,
    load_ordered_if,
    pack_bf16x2,
    shuffle_from,
    store_global_2,
    store_global_4,
    unpack_f16x2,
)
from .cute_codes import angle, write_codes
from .cute_output import is_rope, share_of_head, values_at, write_lse
from .cute_place import NONE, Arrays, origin, shuffled
from .cute_plan import Profile


def known_before(p: Profile, arrays: Arrays, row: Any, head: Any, thread: Any) -> tuple[Any, list[Any]]:
    """What does not wait for the first kernel: a head's sink, and the angles of a thread's pairs."""
    sink = float_of(load_ordered(arrays.sinks + Int64(head) * 4)) if p.sinks else Float32(0.0)
    columns = [thread * p.finish_values + i for i in range(0, p.finish_values, 2)]
    return sink, [] if p.ending is None else [angle(p, arrays, row, column) for column in columns]


@cute.jit
def complete(
    p: cutlass.Constexpr, arrays: cutlass.Constexpr, row: Any, head: Any, thread: Any, sink: Any, turns: Any
) -> None:
    """Adds up the results of groups for one row and head, values in the order of groups, and writes them."""
    column = thread * p.finish_values
    values = natural(p, merged_groups(p, arrays, row, head, thread, sink), column)
    if const_expr(p.ending is not None):
        write_codes(p, arrays, values, turns, row, head, column)
    else:
        to = values_at(p, arrays, row, head) + Int64(column * 2)
        words = [pack_bf16x2(values[i], values[i + 1]) for i in range(0, p.finish_values, 2)]
        if const_expr(p.finish_values == 4):
            store_global_2(to, *words)
        else:
            store_global_4(to, *words)


@cute.jit
def merged_groups(p: cutlass.Constexpr, arrays: cutlass.Constexpr, row: Any, head: Any, thread: Any, sink: Any) -> Any:
    """A thread's values of a row and head, in the order of dequantised values; writes the head's lse.

    Each lane works out what one of the groups weighs.
    """
    place = Int64(row) * (p.groups * p.heads) + Int64(head)
    column = thread * p.finish_values
    parts = arrays.parts + place * 1024 + Int64(column * 2)
    load = load_ordered_2 if const_expr(p.finish_values == 4) else load_ordered_4
    words = [load(parts + g * (1024 * p.heads)) for g in range(p.groups)]
    bits = (p.groups - 1).bit_length()
    group = thread & ((1 << bits) - 1)  # the other lanes do the same; groups that do not exist weigh nothing
    here = cutlass.select_(group < p.groups, Int32(1), Int32(0))
    mark = arrays.masses + (place + Int64(group * p.heads)) * (4 * p.marks)
    known = float_of(load_ordered_if(here, mark))
    # Where there are groups, a warp's values come from one consumer, and from one part of the values.
    down = float_of(load_ordered_if(here, mark + Int64(4 * (1 + column // p.values))))
    log = cutlass.select_(here != 0, known, Float32(NONE))
    top = log
    for bit in range_constexpr(bits):
        top = cute.arch.fmax(top, shuffled(top, 1 << bit))
    weight = exp2(log - origin(top))
    mass = weight
    for bit in range_constexpr(bits):
        mass = mass + shuffled(mass, 1 << bit)
    # The assembler would save registers by loading parts late, and so wait for memory several times. Weights are made
    # to depend on all parts, which changes no bit of them: the third index of a block is 0, but it does not know that.
    loaded = Uint32(0)
    for part in words:
        for word in part:
            loaded = loaded | word
    weight = float_of(bits_of(weight * down) | (loaded & Uint32(cute.arch.block_idx()[2])))
    sums = [Float32(0.0)] * p.finish_values
    for g in range_constexpr(p.groups):
        own = weight
        if const_expr(p.groups > 1):
            own = float_of(shuffle_from(bits_of(weight), g))
        for i, word in enumerate(words[g]):
            for n, x in enumerate(unpack_f16x2(word)):
                sums[2 * i + n] = sums[2 * i + n] + x * own
    factor = share_of_head(p, arrays, top, mass, sink, False)
    if thread == 0:
        write_lse(p, arrays.lse, row, head, Int32(0), top, mass, False)
    return [x * factor for x in sums]


def natural(p: Profile, values: Any, column: Any) -> list[Any]:
    """A thread's values in their order, from the column of the first one."""
    as_is = is_rope(p, column)
    fours = range(0, p.finish_values, 4)
    return [cutlass.select_(as_is, values[i + n], values[i + m]) for i in fours for n, m in enumerate((2, 0, 3, 1))]
