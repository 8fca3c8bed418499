"""What the roles of the sparse attention kernel share: addresses, a CTA's part of the work, and some arithmetic."""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from ..cute_ptx import bits_of, float_of, load_global, shuffle_xor
from .cute_plan import Memory, Profile

NONE = -float("inf")
TILE = 8192  # bytes of a tile of 64 slots or heads by 64 values, in 128-byte rows whose 16-byte parts are swizzled


class Place:
    """Addresses in shared memory, and which part of the work of its cluster a CTA has.

    Attributes:
        memory: offsets of the addresses.
        buffer: a pointer to where they start.
        share: of the blocks of a row.
    """

    keys: Any
    rope: Any
    weights: Any
    queries: Any
    raw: Any
    scales: Any
    slots: Any
    bias: Any
    holes: Any
    decays: Any
    full: Any
    empty: Any
    asked: Any
    ready: Any
    merged: Any

    def __init__(self, memory: Memory, buffer: Any, base: Any, share: Any):
        for name, offset in vars(memory).items():
            if name != "size":
                setattr(self, name, base + offset)
        self.memory, self.buffer, self.share = memory, buffer, share


@dataclasses.dataclass(frozen=True)
class Arrays:
    """Addresses in global memory of what a kernel has; see ``build``.

    Attributes:
        pools, indices, lengths: of each source.
        out, lse: what is written; for a second kernel lifted values of each group, and what ``Profile.marks`` says.
        parts, masses: the same, as the second kernel reads them.
        scales: of the codes in ``out``.
    """

    q: Any = None
    pools: tuple[Any, ...] = ()
    indices: tuple[Any, ...] = ()
    lengths: tuple[Any, ...] = ()
    sinks: Any = None
    q_scale: Any = None
    out_scale: Any = None
    out: Any = None
    lse: Any = None
    parts: Any = None
    masses: Any = None
    cos_sin: Any = None
    scales: Any = None


@cute.jit
def each_tile(p: cutlass.Constexpr, work: cutlass.Constexpr, first: Any, phase: Any) -> None:
    """Does the work of a role on every tile of the CTA.

    ``work`` takes the tile, the place in the ring of keys and the parity of its phase, and how many blocks earlier
    tiles had, and returns the last three anew.
    """
    slot, done = Int32(0), Int32(0)
    if const_expr(p.teams == p.tiles):
        work(first, slot, phase, done)
    else:
        for tile in cutlass.range(first, p.tiles, p.teams, unroll=1):
            slot, phase, done = work(tile, slot, phase, done)


def row_of(p: Profile, tile: Any) -> tuple[Any, Any, Any, Any]:
    """Row, first head, part of the values, and group of a tile."""

    def split(x: Any, n: int) -> tuple[Any, Any]:
        return (x, Int32(0)) if n == 1 else (x // n, x % n)

    tile, part = split(tile, p.value_parts)
    tile, group = split(tile, p.groups)
    row, head = split(tile, p.head_blocks)
    return row, head * 64, part, group


@cute.jit
def share_of(p: cutlass.Constexpr, at: cutlass.Constexpr, lengths: Any, row: Any, group: Any) -> Any:
    """Columns that count in each source, blocks of the first, and the first and last block of this CTA."""
    counts = [Int32(0), Int32(0)]
    for i in range_constexpr(len(p.sources)):
        columns = p.sources[i].columns
        counts[i] = Int32(columns)
        if const_expr(p.sources[i].lengths):
            length = Int32(load_global(lengths[i] + Int64(row) * 4))
            counts[i] = cutlass.min(cutlass.max(length, Int32(0)), Int32(columns))
    blocks_0 = (counts[0] + 63) >> 6
    blocks = blocks_0 + ((counts[1] + 63) >> 6)
    if const_expr(p.shares == 1):
        begin, end = Int32(0), blocks
    elif const_expr(p.split_blocks > 0):
        begin = cutlass.min((group * p.splits + at.share) * p.split_blocks, blocks)
        end = cutlass.min(begin + p.split_blocks, blocks)
    else:
        number = group * p.splits + at.share
        begin, end = number * blocks // p.shares, (number + 1) * blocks // p.shares
    return counts[0], counts[1], blocks_0, begin, end


@cute.jit
def advance(p: cutlass.Constexpr, slot: Any, phase: Any) -> Any:
    """The next half of the ring, and the parity of its phase."""
    slot = slot + 1
    if slot == p.tuning.stages:
        slot = Int32(0)
        phase = phase ^ 1
    return slot, phase


def origin(top: Any) -> Any:
    """What logits are taken from before the exponential: 0 while there is no key."""
    return cutlass.select_(top == Float32(NONE), Float32(0.0), top)


def magnitude(word: Any) -> Any:
    return word & Uint32(0x7FFFFFFF)


def shuffled(x: Any, mask: int) -> Any:
    return float_of(shuffle_xor(bits_of(x), mask))


def largest_of_quad(x: Any) -> Any:
    x = cute.arch.fmax(x, shuffled(x, 1))
    return cute.arch.fmax(x, shuffled(x, 2))


def sum_of_quad(x: Any) -> Any:
    x = x + shuffled(x, 1)
    return x + shuffled(x, 2)
