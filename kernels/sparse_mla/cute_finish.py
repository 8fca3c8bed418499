"""The second kernel of the sparse attention: merges the results of groups, and rotates and quantises the output."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from ..cute_ptx import (
    exp2,
    float_of,
    load_result,
    load_result_4,
    pack_bf16x2,
    store_global_4,
    unpack_f16x2,
)
from .cute_codes import angle, write_codes
from .cute_output import is_rope, load_sink, share_of_head, write_lse
from .cute_place import NONE, Arrays, origin
from .cute_plan import Profile


def known_before(p: Profile, arrays: Arrays, row: Any, head: Any, thread: Any) -> tuple[Any, list[Any]]:
    """What does not wait for the first kernel: a head's sink, and the angles of a thread's pairs."""
    sink = load_sink(p, arrays, head, Int32(0), False)
    return sink, [] if p.ending is None else [angle(p, arrays, row, thread * 8 + 2 * i) for i in range(4)]


@cute.jit
def complete(
    p: cutlass.Constexpr, arrays: cutlass.Constexpr, row: Any, head: Any, thread: Any, sink: Any, turns: Any
) -> None:
    """Adds up the results of groups for one row and head, in their order, and writes them: eight values a thread."""
    values = natural(p, merged_groups(p, arrays, row, head, thread, sink), thread)
    if const_expr(p.ending is not None):
        write_codes(p, arrays, values, turns, row, head, thread)
    else:
        if head < p.heads:
            to = arrays.out + (Int64(row) * p.heads + Int64(head)) * 1024 + Int64(thread * 16)
            store_global_4(to, *[pack_bf16x2(values[i], values[i + 1]) for i in range(0, 8, 2)])


@cute.jit
def merged_groups(
    p: cutlass.Constexpr, arrays: cutlass.Constexpr, row: Any, head: Any, thread: Any, sink: Any
) -> Any:
    """Eight values of a row and head, in the order of dequantised values; writes its lse."""
    place = Int64(row) * (p.groups * p.heads) + Int64(cutlass.min(head, Int32(p.heads - 1)))
    parts = arrays.parts + place * 1024 + Int64(thread * 16)
    marks = arrays.masses + place * (4 * p.marks)
    words = [load_result_4(parts + g * (1024 * p.heads)) for g in range(p.groups)]  # all of them are under way
    downs = 4 * (1 + thread * 8 // p.values)
    known = [marks + g * (4 * p.marks * p.heads) for g in range(p.groups)]
    known = [(float_of(load_result(x)), float_of(load_result(x + Int64(downs)))) for x in known]
    top = Float32(NONE)
    for g in range_constexpr(p.groups):
        top = cute.arch.fmax(top, known[g][0])
    mass = Float32(0.0)
    sums = [Float32(0.0)] * 8
    for g in range_constexpr(p.groups):
        weight = exp2(known[g][0] - origin(top))
        mass = mass + weight
        weight = weight * known[g][1]
        for i, word in enumerate(words[g]):
            for n, x in enumerate(unpack_f16x2(word)):
                sums[2 * i + n] = sums[2 * i + n] + x * weight
    factor = share_of_head(p, arrays, top, mass, sink, False)
    if thread == 0:
        write_lse(p, arrays.lse, row, head, Int32(0), top, mass, False)
    return [x * factor for x in sums]


def natural(p: Profile, values: Any, thread: Any) -> list[Any]:
    """Eight values in their order."""
    as_is = is_rope(p, thread * 8)
    return [cutlass.select_(as_is, values[i + n], values[i + m]) for i in (0, 4) for n, m in enumerate((2, 0, 3, 1))]
