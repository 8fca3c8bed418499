"""The second kernel of the sparse attention: merges the results of groups, and rotates and quantises the output."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from ..cute_ptx import (
    exp2,
    float_of,
    load_result,
    load_result_2,
    pack_bf16x2,
    store_global_2,
    thread_index,
    unpack_f16x2,
)
from .cute_codes import angle, write_codes
from .cute_output import is_rope, load_sink, share_of_head, write_lse
from .cute_place import NONE, origin
from .cute_plan import Profile


@cute.jit
def complete(p: cutlass.Constexpr, arrays: cutlass.Constexpr, row: Any, head: Any) -> None:
    """Adds up the results of groups for one row and head, in their order, and writes them: four values a thread."""
    thread = thread_index()
    if const_expr(p.ending is None):
        low, high = natural(p, merged_groups(p, arrays, row, head, thread), thread)
        to = arrays.out + (Int64(row) * p.heads + Int64(head)) * 1024 + Int64(thread * 8)
        store_global_2(to, pack_bf16x2(low[0], low[1]), pack_bf16x2(high[0], high[1]))
    else:
        turns = [angle(p, arrays, row, thread * 4 + 2 * i) for i in range(2)]  # there by the time they are needed
        pairs = natural(p, merged_groups(p, arrays, row, head, thread), thread)
        write_codes(p, arrays, pairs, turns, row, head, thread)


@cute.jit
def merged_groups(p: cutlass.Constexpr, arrays: cutlass.Constexpr, row: Any, head: Any, thread: Any) -> Any:
    """Four values of a row and head, in the order of dequantised values; writes its lse."""
    place = Int64(row) * (p.groups * p.heads) + Int64(head)
    parts = arrays.parts + place * 1024 + Int64(thread * 8)
    marks = arrays.masses + place * (4 * p.marks)
    words = [load_result_2(parts + g * (1024 * p.heads)) for g in range(p.groups)]  # all of them are under way
    downs = 4 * (1 + thread * 4 // p.values)
    known = [marks + g * (4 * p.marks * p.heads) for g in range(p.groups)]
    known = [(float_of(load_result(x)), float_of(load_result(x + Int64(downs)))) for x in known]
    sink = load_sink(p, arrays, head, Int32(0), False)
    top = Float32(NONE)
    for g in range_constexpr(p.groups):
        top = cute.arch.fmax(top, known[g][0])
    mass = Float32(0.0)
    sums = [Float32(0.0)] * 4
    for g in range_constexpr(p.groups):
        weight = exp2(known[g][0] - origin(top))
        mass = mass + weight
        weight = weight * known[g][1]
        values = [*unpack_f16x2(words[g][0]), *unpack_f16x2(words[g][1])]
        for i in range_constexpr(4):
            sums[i] = sums[i] + values[i] * weight
    factor = share_of_head(p, arrays, top, mass, sink, False)
    if thread == 0:
        write_lse(p, arrays.lse, row, head, Int32(0), top, mass, False)
    return [x * factor for x in sums]


def natural(p: Profile, values: Any, thread: Any) -> tuple[Any, Any]:
    """Four values in their order, as two pairs."""
    a, b, c, d = values
    as_is = is_rope(p, thread * 4)
    pairs = [cutlass.select_(as_is, x, y) for x, y in ((a, c), (b, a), (c, d), (d, b))]
    return pairs[:2], pairs[2:]
