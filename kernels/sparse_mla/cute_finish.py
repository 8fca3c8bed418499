"""The second kernel of the sparse attention: merges the results of groups, and rotates and quantises the output."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from ..cute_ptx import (
    commit_copies,
    copy_4,
    copy_16,
    exp2,
    float_of,
    load_shared,
    load_shared_4,
    pack_bf16x2,
    store_global_4,
    unpack_f16x2,
    wait_copies,
)
from .cute_codes import angle, write_codes
from .cute_output import is_rope, load_sink, share_of_head, values_at, write_lse
from .cute_place import NONE, Arrays, origin
from .cute_plan import Profile


def known_before(p: Profile, arrays: Arrays, row: Any, head: Any, thread: Any) -> tuple[Any, list[Any]]:
    """What need not wait for the first kernel: a head's sink, and the angles of a thread's pairs.

    The assembler moves these loads behind the wait all the same.
    """
    sink = load_sink(p, arrays, head, Int32(0), False)
    return sink, [] if p.ending is None else [angle(p, arrays, row, thread * 8 + 2 * i) for i in range(4)]


@cute.jit
def complete(
    p: cutlass.Constexpr,
    arrays: cutlass.Constexpr,
    row: Any,
    head: Any,
    thread: Any,
    base: Any,
    sink: Any,
    turns: Any,
) -> None:
    """Adds up the results of groups for one row and head, in their order, and writes them: eight values a thread.

    ``base`` is the address of ``Profile.finish_bytes`` of shared memory.
    """
    ask_groups(p, arrays, row, head, thread, base)
    wait_copies(0)
    cute.arch.sync_threads()
    values = natural(p, merged_groups(p, arrays, row, head, thread, base, sink), thread)
    if const_expr(p.ending is not None):
        write_codes(p, arrays, values, turns, row, head, thread)
    else:
        to = values_at(p, arrays, row, head) + Int64(thread * 16)
        store_global_4(to, *[pack_bf16x2(values[i], values[i + 1]) for i in range(0, 8, 2)])


@cute.jit
def ask_groups(p: cutlass.Constexpr, arrays: cutlass.Constexpr, row: Any, head: Any, thread: Any, base: Any) -> None:
    """Starts copies of a head's parts and marks to shared memory.

    All are under way at a time: of loads to registers the assembler lets few be.
    """
    place = Int64(row) * (p.groups * p.heads) + Int64(head)
    parts = arrays.parts + place * 1024 + Int64(thread * 16)
    for g in range_constexpr(p.groups):
        copy_16(base + (g * 1024 + thread * 16), parts + g * (1024 * p.heads), Int32(16))
    count = p.groups * p.marks
    for i in range_constexpr(-(-count // 64)):
        number = thread + 64 * i
        if number < count:
            group = number // p.marks
            mark = (place + Int64(group * p.heads)) * p.marks + Int64(number - group * p.marks)
            copy_4(base + (p.groups * 1024 + number * 4), arrays.masses + mark * 4)
    commit_copies()


@cute.jit
def merged_groups(
    p: cutlass.Constexpr, arrays: cutlass.Constexpr, row: Any, head: Any, thread: Any, base: Any, sink: Any
) -> Any:
    """Eight values of a row and head, in the order of dequantised values; writes its lse."""
    marks = base + p.groups * 1024
    down = 4 + thread * 8 // p.values * 4
    top = Float32(NONE)
    for g in range_constexpr(p.groups):
        top = cute.arch.fmax(top, float_of(load_shared(marks + g * (4 * p.marks))))
    mass = Float32(0.0)
    sums = [Float32(0.0)] * 8
    for g in range_constexpr(p.groups):
        mark = marks + g * (4 * p.marks)
        weight = exp2(float_of(load_shared(mark)) - origin(top))
        mass = mass + weight
        weight = weight * float_of(load_shared(mark + down))
        for i, word in enumerate(load_shared_4(base + (g * 1024 + thread * 16))):
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
