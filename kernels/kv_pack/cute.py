"""The packer as one CuTe DSL kernel: groups of threads take rows and write their bytes straight to their slots.

A row is cut in two as in ``triton.py`` (see ``plan.py``), and the arithmetic is that kernel's, operation by operation,
so that the bytes are the same. A group of threads is a warp, or less for short rows; its threads take chunks of
neighbouring values of each part, whose loads and stores are as wide as the layout's alignment allows.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import cuda.bindings.driver as cuda
import jax
import jax.numpy as jnp
import numpy as np
from cutlass import Boolean, Float32, Int32, Int64, const_expr, cute
from cutlass._mlir.dialects import arith, llvm
from cutlass.cutlass_dsl import T

from ..fallback import with_xla_rules
from ..launch_cute import call
from ..layouts import KVLayout
from ..quant import E4M3_MAX, TINY
from . import xla
from .plan import CHUNK, Plan, chunk

WARP = 32
MANY_ROWS = 4096  # from which on a group takes two rows, so that more is on its way at a time

Values = list[Float32]

_LLVM: Any = llvm  # which has more than its stubs know

_LARGEST = float(np.finfo(np.float32).max)
_NAN = 0x7F800000  # the bits of larger magnitudes are those of a NaN


@dataclasses.dataclass(frozen=True)
class Profile:
    """What the kernel is compiled for.

    Attributes:
        plan: how a row is cut; its ``capacity`` is not used, the pool has as many pages as it comes with.
        dtype: of the rows, "bfloat16" or "float32".
        chunk: values of a quantised row's head that a thread takes at a time, at most.
        rows: that a group of threads takes at a time.
        warps: of a block.
    """

    plan: Plan
    dtype: str
    chunk: int
    rows: int
    warps: int

    @property
    def parts(self) -> "tuple[Part, ...]":
        """The head, and the rest where there is one."""
        plan = self.plan
        several = plan.tiles_block > 1
        size = chunk(math.gcd(plan.head, plan.tile) if several else plan.head, self.chunk)
        if plan.layout.hadamard:  # whose values a thread has at once
            size = max(size, plan.head // WARP)
        chunks = -(-plan.head // size)
        lanes = min(1 << (chunks - 1).bit_length(), WARP)
        head = Part(0, plan.head, size, lanes)
        if not plan.rest:
            return (head,)
        widest = chunk(plan.rest, self.chunk)
        size = next((s for s in (16, 8, 4) if s <= widest and plan.rest // s >= lanes), chunk(plan.rest, 2))
        return head, Part(plan.head, plan.rest, size, lanes)

    @property
    def lanes(self) -> int:
        """Threads of a group."""
        return self.parts[0].lanes

    @property
    def block_rows(self) -> int:
        return self.warps * (WARP // self.lanes) * self.rows


@dataclasses.dataclass(frozen=True)
class Part:
    """Values ``start .. start + size`` of a row, in chunks that are dealt to the threads of a group in turn."""

    start: int
    size: int
    chunk: int
    lanes: int

    @property
    def turns(self) -> int:
        """Chunks of a thread; of the last turn some threads may have none."""
        return -(-self.size // (self.chunk * self.lanes))


# Instructions. Products and sums are told to round on their own: fused ones would give other bits.


def _asm(result: Any, operands: list[Any], text: str, constraints: str, effects: bool = False) -> Any:
    values = [x.ir_value() for x in operands]
    dialect = llvm.AsmDialect.AD_ATT
    return llvm.inline_asm(
        result, values, text, constraints, has_side_effects=effects, is_align_stack=False, asm_dialect=dialect
    )


def _binary(operation: str, a: Float32, b: Float32) -> Float32:
    return Float32(_asm(T.f32(), [a, b], f"{operation} $0, $1, $2;", "=f,f,f"))


def _mul(a: Float32, b: Float32) -> Float32:
    return _binary("mul.rn.f32", a, b)


def _add(a: Float32, b: Float32) -> Float32:
    return _binary("add.rn.f32", a, b)


def _sub(a: Float32, b: Float32) -> Float32:
    return _binary("sub.rn.f32", a, b)


def _div(a: Float32, b: Float32) -> Float32:
    return _binary("div.rn.f32", a, b)


def _fma(a: Float32, b: Float32, c: Float32) -> Float32:
    return Float32(_asm(T.f32(), [a, b, c], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f"))


def _rsqrt(x: Float32) -> Float32:
    return Float32(_asm(T.f32(), [x], "rsqrt.approx.f32 $0, $1;", "=f,f"))


def _clip(x: Float32, bound: float) -> Float32:
    """To +-bound; NaN stays NaN."""
    return _binary("max.NaN.f32", _binary("min.NaN.f32", x, Float32(bound)), Float32(-bound))


def _max(a: Int32, b: Int32) -> Int32:
    return Int32(_asm(T.i32(), [a, b], "max.s32 $0, $1, $2;", "=r,r,r"))


def _min(a: Int32, b: Any) -> Int32:
    return Int32(_asm(T.i32(), [a, Int32(b)], "min.s32 $0, $1, $2;", "=r,r,r"))


def _pick(condition: Any, a: Any, b: Any) -> Any:
    return type(a)(arith.select(condition.ir_value(), a.ir_value(), b.ir_value()))


def _float(bits: Int32) -> Float32:
    return Float32(llvm.bitcast(T.f32(), bits.ir_value()))


def _bits(x: Float32) -> Int32:
    return Int32(llvm.bitcast(T.i32(), x.ir_value()))


def _exchange(x: Any, distance: int) -> Any:
    """What the thread has whose number differs by ``distance``, a power of two."""
    kind, letter = (T.f32(), "f") if isinstance(x, Float32) else (T.i32(), "r")
    text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;"
    return type(x)(_asm(kind, [x], text, f"={letter},{letter}", effects=True))


def _load(address: Int64, size: int) -> list[Int32]:
    """The words of 4, 8 or 16 bytes, or the one of fewer bytes, zero-extended."""
    if size < 4:
        return [Int32(_asm(T.i32(), [address], f"ld.global.nc.u{8 * size} $0, [$1];", "=r,l", effects=True))]
    words = size // 4
    if words == 1:
        return [Int32(_asm(T.i32(), [address], "ld.global.nc.b32 $0, [$1];", "=r,l", effects=True))]
    names = ", ".join(f"${i}" for i in range(words))
    text = f"ld.global.nc.v{words}.b32 {{{names}}}, [${words}];"
    packed = _LLVM.StructType.get_literal([T.i32()] * words)
    result = _asm(packed, [address], text, ",".join(["=r"] * words) + ",l", effects=True)
    return [Int32(llvm.extractvalue(T.i32(), result, [i])) for i in range(words)]


def _store(address: Int64, words: list[Int32], size: int, where: Boolean) -> None:
    """Stores words, or the lowest ``size`` bytes of one, where the condition holds."""
    kind = f"b{8 * size}" if size < 4 else "b32" if size == 4 else f"v{size // 4}.b32"
    names = ", ".join(f"${i + 2}" for i in range(len(words)))
    value, half = (f"{{{names}}}" if size > 4 else "$2"), ""
    if size < 4:  # a register of 16 bits takes both
        value, half = "h", ".reg .b16 h; cvt.u16.u32 h, $2;"
    text = f"{{ .reg .pred p; {half} setp.ne.s32 p, $1, 0; @p st.global.{kind} [$0], {value}; }}"
    constraints = ",".join(["l", "r", *(["r"] * len(words)), "~{memory}"])
    _asm(None, [address, Int32(where), *words], text, constraints, effects=True)


def _e4m3(values: Values) -> Int32:
    """Up to four codes in a word, saturated at +-448."""
    a, b, c, d = [*values, *[Float32(0.0)] * (4 - len(values))]
    lines = "cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;"
    text = f"{{ .reg .b16 low, high; {lines} mov.b32 $0, {{low, high}}; }}"
    return Int32(_asm(T.i32(), [a, b, c, d], text, "=r,f,f,f,f"))


def _bfloat16(values: Values) -> Int32:
    """One or two values in a word."""
    low, high = [*values, *[Float32(0.0)] * (2 - len(values))]
    return Int32(_asm(T.i32(), [high, low], "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f"))


# A part of a row: a list of chunks, one a turn.


def _read(address: Int64, count: int, size: int, align: int) -> Values:
    """Neighbouring bfloat16 or float32 values (``size`` bytes each) as float32."""
    step = math.gcd(count * size, align, 16)
    words = [word for at in range(0, count * size, step) for word in _load(address + at, step)]
    if size == 4:
        return [_float(word) for word in words]
    halves = [[word << 16] if step == 2 else [word << 16, word & Int32(-65536)] for word in words]
    return [_float(half) for pair in halves for half in pair]


def _write(address: Int64, values: Values, dtype: str, align: int, where: Boolean) -> None:
    """Stores neighbouring values as ``dtype``."""
    size = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4}[dtype]
    step = math.gcd(len(values) * size, align, 16)
    if step % size:
        raise ValueError(f"Expected values of {size=} to lie at multiples of it, got {align=}")
    for at in range(0, len(values) * size, step):
        some = values[at // size : (at + step) // size]
        few = 4 // size
        fours = [some[i : i + few] for i in range(0, len(some), few)]
        pack: Callable[[Values], Int32] = {1: _e4m3, 2: _bfloat16, 4: lambda x: _bits(x[0])}[size]
        _store(address + at, [pack(x) for x in fours], step, where)


def _tree(values: list[Any], join: Callable[[Any, Any], Any]) -> Any:
    """Joins neighbours, then neighbours of those, as if there were zeros up to a power of two."""
    while len(values) > 1:
        values = [join(*values[i : i + 2]) if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]
    return values[0]


def _squares(chunks: list[Values], lanes: int) -> Float32:
    """The sum of the squares of a part, in the same order whichever threads hold what."""
    sums = []
    for x in chunks:
        pairs = [_fma(x[i], x[i], _mul(x[i + 1], x[i + 1])) for i in range(0, len(x) - 1, 2)] or [_mul(x[0], x[0])]
        sums.append(_tree(pairs, _add))
    for distance in (1 << i for i in range(lanes.bit_length() - 1)):
        sums = [_add(x, _exchange(x, distance)) for x in sums]
    return _tree(sums, _add)


def _hadamard(x: Values, lane: Int32, part: Part) -> Values:
    """See ``quant.hadamard``; all values are of one turn."""
    x = [_mul(v, Float32(1.0 / part.size)) for v in x]
    half = 1
    while half < len(x):
        low = [i for i in range(len(x)) if not i & half]
        joined = {i: _add(x[i], x[i + half]) for i in low} | {i + half: _sub(x[i], x[i + half]) for i in low}
        x = [joined[i] for i in range(len(x))]
        half *= 2
    for distance in (1 << i for i in range((part.size // part.chunk).bit_length() - 1)):
        sign = _pick((lane & distance) == 0, Float32(1.0), Float32(-1.0))
        x = [_fma(v, sign, _exchange(v, distance)) for v in x]
    return [_clip(_mul(v, Float32(part.size**0.5)), _LARGEST) for v in x]


def _tile_scale(amax: Int32, power_of_two: bool) -> tuple[Float32, Float32]:
    """The scale of a tile and its reciprocal, from the bits of the largest magnitude; see ``quant.tile_scale``."""
    if power_of_two:
        up = _pick((amax & 0x7FFFFF) > 0x600000, Int32(1), Int32(0))
        exponent = _max((amax >> 23) - 8 + up, Int32(1))
        exponent = _pick(amax > 0, exponent, Int32(0))
        inverse = _pick(exponent > 0, (Int32(254) - exponent) << 23, Int32(0))
        nan = amax > _NAN
        return _float(_pick(nan, amax, exponent << 23)), _float(_pick(nan, amax, inverse))
    scale = _div(_float(amax), Float32(E4M3_MAX))
    scale = _pick(scale < Float32(TINY), Float32(0.0), scale)
    return scale, _pick(scale == Float32(0.0), Float32(0.0), _div(Float32(1.0), scale))


class _Packer:
    """One thread of the kernel: addresses of its operands, and what it does with the rows of its group."""

    def __init__(self, profile: Profile, thread: Int32, operands: tuple[Any, ...], weight_align: int):
        self.profile, self.plan, self.layout = profile, profile.plan, profile.plan.layout
        addresses: tuple[Any, ...] = tuple(None if x is None else x.iterator.toint() for x in operands)
        self.rows, self.slots, self.pool, self.weight, self.table, self.kv_scale = addresses
        self.count, self.pages = operands[0].shape[0], operands[2].shape[0]
        self.lane = thread & (profile.lanes - 1)
        self.size = {"bfloat16": 2, "float32": 4}[profile.dtype]
        pitch = self.layout.width * self.size
        self.weight_align = weight_align
        self.row_align = 16 if pitch % 16 == 0 else self.size  # see launch_cute.call

    def place(self, part: Part, turn: int) -> tuple[Int32, Boolean | None]:
        """The first value of a thread's chunk, counted in its part, and whether there is one; None where all have."""
        at = (self.lane + turn * part.lanes) * part.chunk
        if (turn + 1) * part.lanes * part.chunk <= part.size:
            return at, None
        return at, at < part.size

    def inside(self, part: Part, turn: int) -> Int32:
        """The same; the last chunk for a thread that has none."""
        at, exists = self.place(part, turn)
        return at if exists is None else _pick(exists, at, Int32(part.size - part.chunk))

    def loaded(self, row: Int32) -> list[list[Values]]:
        """The values of a row by part and turn; zeros where there are none."""
        start, parts = self.rows + Int64(row) * (self.layout.width * self.size), []
        for part in self.profile.parts:
            chunks, align = [], math.gcd(self.row_align, part.start * self.size) if part.start else self.row_align
            for turn in range(part.turns):
                at = start + Int64((self.inside(part, turn) + part.start) * self.size)
                x, (_, exists) = _read(at, part.chunk, self.size, align), self.place(part, turn)
                chunks.append(x if exists is None else [_pick(exists, v, Float32(0.0)) for v in x])
            parts.append(chunks)
        return parts

    def angles(self, row: Int32) -> list[list[list[Any]]]:
        """For each pair of each chunk None, or (cosine, sine, whether it is turned or None for surely)."""
        width, turned = self.layout.width, self.plan.turned
        half, first, parts = turned // 2, width - turned, []
        start = self.table + Int64(row) * (4 * turned) if turned else None
        for part in self.profile.parts:
            chunks = []
            for turn in range(part.turns):
                pairs: list[Any] = []
                for i in range(0, part.chunk - 1, 2):
                    if not turned or part.start + part.size <= first:
                        pairs.append(None)
                        continue
                    at = self.inside(part, turn) + (part.start + i - first)  # twice the number of the pair
                    sure = part.start >= first
                    clear = at if sure else _max(at, Int32(0))
                    address = start + Int64(clear) * 2
                    cos, sin = (_float(_load(address + 4 * half * j, 4)[0]) for j in (0, 1))
                    pairs.append((cos, sin, None if sure else at >= 0))
                chunks.append(pairs)
            parts.append(chunks)
        return parts

    def weights(self) -> list[list[Values]]:
        """The norm's weights by part and turn; what they are where there is no norm is of no use."""
        plan, parts = self.plan, []
        for part in self.profile.parts:
            chunks, whole = [], part.start + part.size <= plan.normed
            for turn in range(part.turns if part.start < plan.normed else 0):
                at = self.inside(part, turn) + part.start
                if whole:
                    align = math.gcd(self.weight_align, 4 * part.start, 4 * part.chunk)
                    chunks.append(_read(self.weight + Int64(at) * 4, part.chunk, 4, align))
                    continue
                ats = [_min(at + i, plan.normed - 1) for i in range(part.chunk)]
                chunks.append([_float(_load(self.weight + Int64(a) * 4, 4)[0]) for a in ats])
            parts.append(chunks)
        return parts

    def under(self, part: Part, turn: int, i: int) -> Boolean | bool:
        """Whether a value of a chunk is under the norm."""
        if part.start + part.size <= self.plan.normed:
            return True
        return self.place(part, turn)[0] + (part.start + i) < self.plan.normed

    def normed(self, values: list[list[Values]], weights: list[list[Values]]) -> list[list[Values]]:
        """RMSNorm of the leading values."""
        parts = [p for p in self.profile.parts if p.start < self.plan.normed]

        def where(part: Part, turn: int, i: int, a: Float32, b: Float32) -> Float32:
            under = self.under(part, turn, i)
            return a if under is True else _pick(under, a, b)

        total = Float32(0.0)
        for part, chunks in zip(parts, values, strict=False):
            kept = [[where(part, t, i, v, Float32(0.0)) for i, v in enumerate(x)] for t, x in enumerate(chunks)]
            squares = _squares(kept, part.lanes)
            total = squares if part.start == 0 else _add(total, squares)
        mean = _mul(total, Float32(1.0 / self.plan.normed))
        factor = _rsqrt(_add(mean, Float32(self.plan.eps)))
        scaled = []
        for part, chunks, scales in zip(parts, values, weights, strict=False):

            def one(turn: int, i: int, v: Float32, part: Part = part, scales: list[Values] = scales) -> Float32:
                return where(part, turn, i, _mul(_mul(v, factor), scales[turn][i]), v)

            scaled.append([[one(t, i, v) for i, v in enumerate(x)] for t, x in enumerate(chunks)])
        return scaled + values[len(parts) :]

    def turned(self, x: Values, pairs: list[Any]) -> Values:
        """Rotates pairs of neighbours."""
        x = list(x)
        for i, pair in enumerate(pairs):
            if pair is None:
                continue
            (cos, sin, where), (a, b) = pair, x[2 * i : 2 * i + 2]
            even, odd = _sub(_mul(a, cos), _mul(b, sin)), _add(_mul(a, sin), _mul(b, cos))
            x[2 * i : 2 * i + 2] = [even, odd] if where is None else [_pick(where, even, a), _pick(where, odd, b)]
        return x

    def stored(self, slot: Int32, parts: list[list[Values]]) -> None:
        """Writes a row's bytes to its slot, if there is one."""
        layout, plan = self.layout, self.plan
        valid = (slot >= 0) & (Int64(slot) < Int64(self.pages) * layout.page_size)
        slot = _pick(valid, slot, Int32(0))
        page, offset = slot // layout.page_size, slot % layout.page_size
        base = self.pool + Int64(page) * layout.page_stride
        data = base + Int64(offset * layout.row_bytes)
        segments = list(zip(self.profile.parts, parts, strict=True))

        def write(address: Int64, align: int, dtype: str, part: Part, turn: int, x: Values) -> None:
            at, exists = self.place(part, turn)
            size = jnp.dtype(dtype).itemsize
            where = valid if exists is None else valid & exists
            align = math.gcd(align, part.chunk * size)
            _write(address + Int64(at) * size, x, dtype, align, where)

        if plan.plain:
            inverse = None if self.kv_scale is None else _div(Float32(1.0), _float(_load(self.kv_scale, 4)[0]))
            for part, chunks in segments:
                start = part.start * jnp.dtype(layout.value_dtype).itemsize
                for turn, x in enumerate(chunks):
                    x = x if inverse is None else [_mul(v, inverse) for v in x]
                    write(data + start, math.gcd(plan.align, start), layout.value_dtype, part, turn, x)
            return
        head, chunks = segments[0]
        if layout.hadamard:
            chunks = [_hadamard(chunks[0], self.lane, head)]
        scales = base + Int64(plan.scale_start + offset * plan.scale_step)
        for turn, (x, amax) in enumerate(zip(chunks, self.amax(head, chunks), strict=True)):
            scale, inverse = _tile_scale(amax, layout.scale_form == "power_of_two")
            write(data, plan.align, "float8_e4m3fn", head, turn, [_mul(v, inverse) for v in x])
            self.store_scale(scales, scale, head, turn, valid)
        if layout.kind == "footer":
            covered = max(head.lanes * head.turns // self.tile_lanes(head), 1)
            for tile in range(covered, layout.scale_bytes):
                _store(scales + tile, [Int32(0)], 1, valid & (self.lane == tile % head.lanes))
        for part, chunks in segments[1:]:
            for turn, x in enumerate(chunks):
                align = math.gcd(plan.align, layout.rope_offset)
                write(data + layout.rope_offset, align, "bfloat16", part, turn, x)

    def tile_lanes(self, head: Part) -> int:
        """Chunks of a tile; where there is one tile, as many as there are."""
        return self.plan.tile // head.chunk if self.plan.tiles_block > 1 else head.lanes * head.turns

    def amax(self, head: Part, chunks: list[Values]) -> list[Int32]:
        """For each chunk the bits of the largest magnitude of its tile; those of a NaN are above all others."""
        most = [_tree([_bits(v) & 0x7FFFFFFF for v in x], _max) for x in chunks]
        size = self.tile_lanes(head)
        for distance in (1 << i for i in range(min(size, head.lanes).bit_length() - 1)):
            most = [_max(x, _exchange(x, distance)) for x in most]
        turns = max(size // head.lanes, 1)  # of a tile
        most = [_tree(most[t - t % turns : t - t % turns + turns], _max) for t in range(len(most))]
        return [_max(x, Int32(self.plan.least)) for x in most]

    def store_scale(self, scales: Int64, scale: Float32, head: Part, turn: int, valid: Boolean) -> None:
        """The first thread of each tile stores its scale."""
        size, footer = self.tile_lanes(head), self.layout.kind == "footer"
        chunk = self.lane + turn * head.lanes
        tile = chunk // size
        first = valid & (chunk % size == 0)
        if footer:
            byte = _pick(tile < self.layout.num_tiles, (_bits(scale) >> 23) & 0xFF, Int32(0))
            _store(scales + Int64(tile), [byte], 1, first & (tile < self.layout.scale_bytes))
        else:
            _store(scales + Int64(tile) * 4, [_bits(scale)], 4, first & (tile < self.layout.num_tiles))

    def run(self, first: Int32) -> None:
        """Packs the rows of a group: ``first`` and those that follow at the distance of the warp's groups."""
        step = WARP // self.profile.lanes
        rows = [first + i * step for i in range(self.profile.rows)]
        exist = [row < self.count for row in rows]
        rows = [_min(row, self.count - 1) for row in rows]
        slots = [
            _pick(exists, _load(self.slots + Int64(row) * 4, 4)[0], Int32(-1))
            for row, exists in zip(rows, exist, strict=True)
        ]
        values, angles = [self.loaded(row) for row in rows], [self.angles(row) for row in rows]
        weights = self.weights() if self.plan.normed else [[] for _ in self.profile.parts]
        waited = [*slots, *(_bits(x) for x in self.read_late(angles, weights))]
        for slot, parts, pairs in zip(slots, values, angles, strict=True):
            parts[0][0][0] = self.after(parts[0][0][0], waited)
            if self.plan.normed:
                parts = self.normed(parts, weights)
            parts = [
                [self.turned(x, p) for x, p in zip(part, pair, strict=True)]
                for part, pair in zip(parts, pairs, strict=True)
            ]
            self.stored(slot, parts)

    def read_late(self, angles: list[Any], weights: list[list[Values]]) -> Iterator[Float32]:
        """Of what a row's values meet, one value of each load that the compiler would put off until it is met."""
        for chunks in weights:
            yield from (x[i] for x in chunks for i in range(0, len(x), 4))
        for row in angles:
            yield from (x for chunks in row for pairs in chunks for pair in pairs if pair is not None for x in pair[:2])

    def after(self, x: Float32, waited: list[Int32]) -> Float32:
        """The same value, which is not there before others are: so all loads are on their way before any is used."""
        nothing = self.count >> 31  # which the compiler does not know
        return _float(_bits(x) ^ (_tree(waited, lambda a, b: a | b) & nothing))


def first_row(profile: Profile, thread: Int32, block: Int32) -> Int32:
    """The first row of a thread's group."""
    in_block = (thread // WARP) * (WARP // profile.lanes * profile.rows) + (thread % WARP) // profile.lanes
    return block * profile.block_rows + in_block


def build(profile: Profile) -> Callable[..., None]:
    """The launcher of a profile; see ``launch_cute.call``."""
    block = profile.block_rows

    @cute.kernel
    def pack(rows: Any, slots: Any, pool: Any, weight: Any, table: Any, kv_scale: Any) -> None:
        thread, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        first = first_row(profile, thread, number)
        if const_expr(weight is None):
            _Packer(profile, thread, (rows, slots, pool, weight, table, kv_scale), 4).run(first)
        elif weight.iterator.toint() % 16 == 0:  # nearly always; but vectors may start anywhere
            _Packer(profile, thread, (rows, slots, pool, weight, table, kv_scale), 16).run(first)
        else:
            _Packer(profile, thread, (rows, slots, pool, weight, table, kv_scale), 4).run(first)

    @cute.jit
    def launch(stream: cuda.CUstream, rows: Any, slots: Any, pool: Any, weight: Any, table: Any, kv_scale: Any) -> None:
        blocks = (rows.shape[0] + (block - 1)) // block
        pack(rows, slots, pool, weight, table, kv_scale).launch(
            grid=[blocks, 1, 1], block=[profile.warps * WARP, 1, 1], stream=stream
        )

    return launch


def profile_of(plan: Plan, dtype: str, count: int) -> Profile:
    """The profile that serves a number of rows best."""
    many = count >= MANY_ROWS
    return Profile(plan, dtype, CHUNK, rows=2 if many else 1, warps=4 if many else 1)


def _kv_pack(
    rows: jax.Array,
    slots: jax.Array,
    pool: jax.Array,
    norm_weight: jax.Array | None,
    cos_sin: jax.Array | None,
    kv_scale: jax.Array | float | None,
    *,
    layout: KVLayout,
    eps: float,
) -> jax.Array:
    """See ``jmla.kernels.kv_pack``."""
    if rows.shape[0] == 0 or pool.shape[0] == 0:
        return pool
    plan = dataclasses.replace(Plan.of(layout, pool, norm_weight, cos_sin, eps), capacity=0)
    if rows.dtype not in (jnp.bfloat16, jnp.float32):
        rows = rows.astype(jnp.float32)
    inputs = [
        rows,
        slots,
        pool,
        norm_weight.astype(jnp.float32) if norm_weight is not None and plan.normed else None,
        cos_sin if plan.turned else None,
        None if kv_scale is None else jnp.asarray(kv_scale, jnp.float32).reshape(1),
    ]
    (packed,) = call(
        build,
        profile_of(plan, rows.dtype.name, rows.shape[0]),
        inputs,
        [jax.ShapeDtypeStruct(pool.shape, pool.dtype)],
        {2: 0},
        dynamic=True,
    )
    return packed


kv_pack = with_xla_rules(_kv_pack, xla.kv_pack)
