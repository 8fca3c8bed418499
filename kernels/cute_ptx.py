"""PTX instructions for CuTe DSL kernels that address memory by number, and arithmetic on packed values.

Addresses of shared memory are Int32, those of global memory Int64. Words are Uint32, four bytes of anything.
"""

from typing import Any

from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def _asm(result: Any, operands: Any, text: str, constraints: str, effects: bool, loc: Any, ip: Any) -> Any:
    values = [kind(x).ir_value(loc=loc, ip=ip) for kind, x in operands]
    if effects:
        constraints = f"{constraints},~{{memory}}" if constraints else "~{memory}"
    return llvm.inline_asm(
        result,
        values,
        text,
        constraints,
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def _words(n: int, operands: Any, text: str, constraints: str, effects: bool, loc: Any, ip: Any) -> tuple[Uint32, ...]:
    """Runs an instruction that gives n words."""
    struct = llvm.StructType.get_literal([T.i32()] * n)
    result = _asm(struct, operands, text, constraints, effects, loc, ip)
    return tuple(Uint32(llvm.extractvalue(T.i32(), result, [i], loc=loc, ip=ip)) for i in range(n))


@dsl_user_op
def thread_index(*, loc: Any = None, ip: Any = None) -> Int32:
    """The thread's number, read anew: kept over a long stretch of code it would be spilled."""
    return Int32(_asm(T.i32(), [], "mov.u32 $0, %tid.x;", "=r", True, loc, ip))


# Copies from global to shared memory


@dsl_user_op
def copy_16(to: Any, source: Any, size: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Starts a copy of 16 bytes; those from ``size`` on are zero."""
    operands = [(Int32, to), (Int64, source), (Int32, size)]
    _asm(None, operands, "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", "r,l,r", True, loc, ip)


@dsl_user_op
def copy_8(to: Any, source: Any, size: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Starts a copy of 8 bytes; those from ``size`` on are zero."""
    operands = [(Int32, to), (Int64, source), (Int32, size)]
    _asm(None, operands, "cp.async.ca.shared.global [$0], [$1], 8, $2;", "r,l,r", True, loc, ip)


@dsl_user_op
def copy_bulk(to: Any, source: Any, size: Any, barrier: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Starts a copy of many bytes, a multiple of 16, which an mbarrier counts when they are there."""
    operands = [(Int32, to), (Int64, source), (Int32, size), (Int32, barrier)]
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    _asm(None, operands, text, "r,l,r,r", True, loc, ip)


@dsl_user_op
def copy_4(to: Any, source: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Starts a copy of 4 bytes."""
    _asm(None, [(Int32, to), (Int64, source)], "cp.async.ca.shared.global [$0], [$1], 4;", "r,l", True, loc, ip)


@dsl_user_op
def commit_copies(*, loc: Any = None, ip: Any = None) -> None:
    """Makes a group of the thread's copies since the last one."""
    _asm(None, [], "cp.async.commit_group;", "", True, loc, ip)


@dsl_user_op
def _wait_copies(pending: int, *, loc: Any = None, ip: Any = None) -> None:
    _asm(None, [], f"cp.async.wait_group {pending};", "", True, loc, ip)


def wait_copies(pending: int) -> None:
    """Waits until at most ``pending`` groups of the thread's copies are under way."""
    _wait_copies(pending)


# Shared memory


@dsl_user_op
def load_shared(at: Any, *, loc: Any = None, ip: Any = None) -> Uint32:
    return Uint32(_asm(T.i32(), [(Int32, at)], "ld.shared.b32 $0, [$1];", "=r,r", True, loc, ip))


@dsl_user_op
def load_shared_2(at: Any, *, loc: Any = None, ip: Any = None) -> tuple[Uint32, ...]:
    return _words(2, [(Int32, at)], "ld.shared.v2.b32 {$0,$1}, [$2];", "=r,=r,r", True, loc, ip)


@dsl_user_op
def load_shared_4(at: Any, *, loc: Any = None, ip: Any = None) -> tuple[Uint32, ...]:
    return _words(4, [(Int32, at)], "ld.shared.v4.b32 {$0,$1,$2,$3}, [$4];", "=r,=r,=r,=r,r", True, loc, ip)


@dsl_user_op
def store_shared(at: Any, x: Any, *, loc: Any = None, ip: Any = None) -> None:
    _asm(None, [(Int32, at), (Uint32, x)], "st.shared.b32 [$0], $1;", "r,r", True, loc, ip)


@dsl_user_op
def store_shared_byte(at: Any, x: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Stores the lowest byte."""
    _asm(None, [(Int32, at), (Uint32, x)], "st.shared.b8 [$0], $1;", "r,r", True, loc, ip)


@dsl_user_op
def store_shared_2(at: Any, x: Any, y: Any, *, loc: Any = None, ip: Any = None) -> None:
    operands = [(Int32, at), (Uint32, x), (Uint32, y)]
    _asm(None, operands, "st.shared.v2.b32 [$0], {$1,$2};", "r,r,r", True, loc, ip)


@dsl_user_op
def store_shared_4(at: Any, x: Any, y: Any, z: Any, w: Any, *, loc: Any = None, ip: Any = None) -> None:
    operands = [(Int32, at), *((Uint32, v) for v in (x, y, z, w))]
    _asm(None, operands, "st.shared.v4.b32 [$0], {$1,$2,$3,$4};", "r,r,r,r,r", True, loc, ip)


@dsl_user_op
def fence_async_shared(*, loc: Any = None, ip: Any = None) -> None:
    """Stores to shared memory that happened before are seen by the matrix units after it."""
    _asm(None, [], "fence.proxy.async.shared::cta;", "", True, loc, ip)


# Global memory


@dsl_user_op
def load_global(at: Any, *, loc: Any = None, ip: Any = None) -> Uint32:
    return Uint32(_asm(T.i32(), [(Int64, at)], "ld.global.nc.b32 $0, [$1];", "=r,l", True, loc, ip))


@dsl_user_op
def load_global_2(at: Any, *, loc: Any = None, ip: Any = None) -> tuple[Uint32, ...]:
    return _words(2, [(Int64, at)], "ld.global.nc.v2.b32 {$0,$1}, [$2];", "=r,=r,l", True, loc, ip)


@dsl_user_op
def load_global_4(at: Any, *, loc: Any = None, ip: Any = None) -> tuple[Uint32, ...]:
    return _words(4, [(Int64, at)], "ld.global.nc.v4.b32 {$0,$1,$2,$3}, [$4];", "=r,=r,=r,=r,l", True, loc, ip)


@dsl_user_op
def load_global_4_if(here: Any, at: Any, *, loc: Any = None, ip: Any = None) -> tuple[Uint32, ...]:
    """16 bytes, or zeros where ``here`` is 0."""
    text = (
        "{ .reg .pred p; setp.ne.u32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
        " @p ld.global.nc.v4.b32 {$0,$1,$2,$3}, [$4]; }"
    )
    return _words(4, [(Int64, at), (Int32, here)], text, "=&r,=&r,=&r,=&r,l,r", True, loc, ip)


@dsl_user_op
def load_global_2_if(here: Any, at: Any, *, loc: Any = None, ip: Any = None) -> tuple[Uint32, ...]:
    """8 bytes, or zeros where ``here`` is 0."""
    text = "{ .reg .pred p; setp.ne.u32 p, $3, 0; mov.b32 $0, 0; mov.b32 $1, 0; @p ld.global.nc.v2.b32 {$0,$1}, [$2]; }"
    return _words(2, [(Int64, at), (Int32, here)], text, "=&r,=&r,l,r", True, loc, ip)


# Loads that the assembler leaves on their side of a wait, over which it moves those above, of what is never written: of
# what need not wait for another kernel, and of what one wrote that was still running when this one began.


@dsl_user_op
def load_ordered(at: Any, *, loc: Any = None, ip: Any = None) -> Uint32:
    return Uint32(_asm(T.i32(), [(Int64, at)], "ld.global.b32 $0, [$1];", "=r,l", True, loc, ip))


@dsl_user_op
def load_ordered_2(at: Any, *, loc: Any = None, ip: Any = None) -> tuple[Uint32, ...]:
    return _words(2, [(Int64, at)], "ld.global.v2.b32 {$0,$1}, [$2];", "=r,=r,l", True, loc, ip)


@dsl_user_op
def load_ordered_4(at: Any, *, loc: Any = None, ip: Any = None) -> tuple[Uint32, ...]:
    return _words(4, [(Int64, at)], "ld.global.v4.b32 {$0,$1,$2,$3}, [$4];", "=r,=r,=r,=r,l", True, loc, ip)


@dsl_user_op
def load_ordered_if(here: Any, at: Any, *, loc: Any = None, ip: Any = None) -> Uint32:
    """4 bytes, or zeros where ``here`` is 0."""
    text = "{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.b32 $0, 0; @p ld.global.b32 $0, [$1]; }"
    return Uint32(_asm(T.i32(), [(Int64, at), (Int32, here)], text, "=&r,l,r", True, loc, ip))


@dsl_user_op
def store_global(at: Any, x: Any, *, loc: Any = None, ip: Any = None) -> None:
    _asm(None, [(Int64, at), (Uint32, x)], "st.global.b32 [$0], $1;", "l,r", True, loc, ip)


@dsl_user_op
def store_global_byte(at: Any, x: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Stores the lowest byte."""
    _asm(None, [(Int64, at), (Uint32, x)], "st.global.b8 [$0], $1;", "l,r", True, loc, ip)


@dsl_user_op
def store_global_2(at: Any, x: Any, y: Any, *, loc: Any = None, ip: Any = None) -> None:
    _asm(None, [(Int64, at), (Uint32, x), (Uint32, y)], "st.global.v2.b32 [$0], {$1,$2};", "l,r,r", True, loc, ip)


@dsl_user_op
def store_global_4(at: Any, x: Any, y: Any, z: Any, w: Any, *, loc: Any = None, ip: Any = None) -> None:
    operands = [(Int64, at), *((Uint32, v) for v in (x, y, z, w))]
    _asm(None, operands, "st.global.v4.b32 [$0], {$1,$2,$3,$4};", "l,r,r,r,r", True, loc, ip)


# Words and floats


@dsl_user_op
def opaque(x: Any, *, loc: Any = None, ip: Any = None) -> Int32:
    """The same integer, of which the compiler knows nothing."""
    return Int32(_asm(T.i32(), [(Int32, x)], "mov.b32 $0, $1;", "=r,r", True, loc, ip))


@dsl_user_op
def bits_of(x: Any, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The word of a float32."""
    return Uint32(llvm.bitcast(T.i32(), Float32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def float_of(x: Any, *, loc: Any = None, ip: Any = None) -> Float32:
    """The float32 of a word."""
    return Float32(llvm.bitcast(T.f32(), Uint32(x).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def permute(a: Any, b: Any, selector: Any, *, loc: Any = None, ip: Any = None) -> Uint32:
    """Bytes of ``a`` (0 to 3) and ``b`` (4 to 7) by the four digits of ``selector``, lowest byte by the last digit."""
    operands = [(Uint32, a), (Uint32, b), (Uint32, selector)]
    return Uint32(_asm(T.i32(), operands, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", False, loc, ip))


@dsl_user_op
def multiply_bf16x2(a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> Uint32:
    return Uint32(_asm(T.i32(), [(Uint32, a), (Uint32, b)], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", False, loc, ip))


@dsl_user_op
def pack_bf16x2(low: Any, high: Any, *, loc: Any = None, ip: Any = None) -> Uint32:
    operands = [(Float32, high), (Float32, low)]
    return Uint32(_asm(T.i32(), operands, "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", False, loc, ip))


@dsl_user_op
def fma_bf16x2(a: Any, b: Any, c: Any, *, loc: Any = None, ip: Any = None) -> Uint32:
    operands = [(Uint32, a), (Uint32, b), (Uint32, c)]
    return Uint32(_asm(T.i32(), operands, "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", False, loc, ip))


@dsl_user_op
def pack_f16x2(low: Any, high: Any, *, loc: Any = None, ip: Any = None) -> Uint32:
    operands = [(Float32, high), (Float32, low)]
    return Uint32(_asm(T.i32(), operands, "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", False, loc, ip))


@dsl_user_op
def bf16_of_e4m3(x: Any, half: int, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The bf16 values of two of the four codes of a word: those of its low half (0) or of the high one (1)."""
    text = (
        "{ .reg .b16 low, high, a, b; .reg .b32 t; .reg .f32 x, y; mov.b32 {low, high}, $1;"
        f" cvt.rn.f16x2.e4m3x2 t, {'high' if half else 'low'}; mov.b32 {{a, b}}, t;"
        " cvt.f32.f16 x, a; cvt.f32.f16 y, b; cvt.rn.bf16x2.f32 $0, y, x; }"
    )
    return Uint32(_asm(T.i32(), [(Uint32, x)], text, "=r,r", False, loc, ip))


@dsl_user_op
def unpack_f16x2(x: Any, *, loc: Any = None, ip: Any = None) -> tuple[Float32, Float32]:
    text = "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }"
    struct = llvm.StructType.get_literal([T.f32()] * 2)
    result = _asm(struct, [(Uint32, x)], text, "=f,=f,r", False, loc, ip)
    low, high = (Float32(llvm.extractvalue(T.f32(), result, [i], loc=loc, ip=ip)) for i in range(2))
    return low, high


@dsl_user_op
def larger_magnitude(a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> Float32:
    """The larger of ``a`` and the magnitude of ``b``."""
    text = "{ .reg .f32 t; abs.f32 t, $2; max.f32 $0, $1, t; }"
    return Float32(_asm(T.f32(), [(Float32, a), (Float32, b)], text, "=f,f,f", False, loc, ip))


@dsl_user_op
def e4m3x4(a: Any, b: Any, c: Any, d: Any, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The e4m3 codes of four values, the first in the lowest byte; what is too large saturates."""
    text = (
        "{ .reg .b16 x, y; cvt.rn.satfinite.e4m3x2.f32 x, $2, $1; cvt.rn.satfinite.e4m3x2.f32 y, $4, $3;"
        " mov.b32 $0, {x, y}; }"
    )
    operands = [(Float32, x) for x in (a, b, c, d)]
    return Uint32(_asm(T.i32(), operands, text, "=r,f,f,f,f", False, loc, ip))


@dsl_user_op
def divide(a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> Float32:
    """The correctly rounded quotient."""
    return Float32(_asm(T.f32(), [(Float32, a), (Float32, b)], "div.rn.f32 $0, $1, $2;", "=f,f,f", False, loc, ip))


@dsl_user_op
def exp2(x: Any, *, loc: Any = None, ip: Any = None) -> Float32:
    return Float32(_asm(T.f32(), [(Float32, x)], "ex2.approx.ftz.f32 $0, $1;", "=f,f", False, loc, ip))


@dsl_user_op
def log2(x: Any, *, loc: Any = None, ip: Any = None) -> Float32:
    return Float32(_asm(T.f32(), [(Float32, x)], "lg2.approx.f32 $0, $1;", "=f,f", False, loc, ip))


# Warps, named barriers and mbarriers


@dsl_user_op
def shuffle_xor(x: Any, mask: Any, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The word of the lane whose number differs by the bits of ``mask``."""
    operands = [(Uint32, x), (Int32, mask)]
    return Uint32(_asm(T.i32(), operands, "shfl.sync.bfly.b32 $0, $1, $2, 31, -1;", "=r,r,r", True, loc, ip))


@dsl_user_op
def shuffle_from(x: Any, lane: int, *, loc: Any = None, ip: Any = None) -> Uint32:
    """The word that a lane has."""
    text = "shfl.sync.idx.b32 $0, $1, $2, 31, -1;"
    return Uint32(_asm(T.i32(), [(Uint32, x), (Int32, lane)], text, "=r,r,r", True, loc, ip))


@dsl_user_op
def any_lane(x: Any, *, loc: Any = None, ip: Any = None) -> Int32:
    """1 in all lanes if x is not 0 in some lane, else 0."""
    text = "{ .reg .pred p, q; setp.ne.u32 p, $1, 0; vote.sync.any.pred q, p, -1; selp.b32 $0, 1, 0, q; }"
    return Int32(_asm(T.i32(), [(Uint32, x)], text, "=r,r", True, loc, ip))


@dsl_user_op
def sync_warp(*, loc: Any = None, ip: Any = None) -> None:
    _asm(None, [], "bar.warp.sync -1;", "", True, loc, ip)


@dsl_user_op
def barrier_sync(number: int, threads: int, *, loc: Any = None, ip: Any = None) -> None:
    """Waits at a named barrier until ``threads`` threads have come, or have arrived there."""
    _asm(None, [(Int32, number), (Int32, threads)], "bar.sync $0, $1;", "r,r", True, loc, ip)


@dsl_user_op
def barrier_arrive(number: int, threads: int, *, loc: Any = None, ip: Any = None) -> None:
    """Arrives at a named barrier and goes on."""
    _asm(None, [(Int32, number), (Int32, threads)], "bar.arrive $0, $1;", "r,r", True, loc, ip)


@dsl_user_op
def mbarrier_init(at: Any, count: Any, *, loc: Any = None, ip: Any = None) -> None:
    _asm(None, [(Int32, at), (Int32, count)], "mbarrier.init.shared::cta.b64 [$0], $1;", "r,r", True, loc, ip)


@dsl_user_op
def mbarrier_arrive(at: Any, *, loc: Any = None, ip: Any = None) -> None:
    _asm(None, [(Int32, at)], "mbarrier.arrive.shared::cta.b64 _, [$0];", "r", True, loc, ip)


@dsl_user_op
def mbarrier_expect(at: Any, size: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Arrives, and makes the phase last until ``size`` bytes have come."""
    text = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
    _asm(None, [(Int32, at), (Int32, size)], text, "r,r", True, loc, ip)


@dsl_user_op
def _mbarrier_wait(at: Any, parity: Any, scope: str, *, loc: Any = None, ip: Any = None) -> None:
    text = (
        "{\n.reg .pred p;\nAGAIN_${:uid}:\n"
        f"mbarrier.try_wait.parity{scope}.shared::cta.b64 p, [$0], $1;\n"
        "@p bra DONE_${:uid};\nbra AGAIN_${:uid};\nDONE_${:uid}:\n}"
    )
    _asm(None, [(Int32, at), (Int32, parity)], text, "r,r", True, loc, ip)


def mbarrier_wait(at: Any, parity: Any) -> None:
    """Waits for the end of the phase of that parity."""
    _mbarrier_wait(at, parity, "")


def mbarrier_wait_cluster(at: Any, parity: Any) -> None:
    """The same, and sees what other CTAs of the cluster wrote before."""
    _mbarrier_wait(at, parity, ".acquire.cluster")


# Other CTAs of a cluster


@dsl_user_op
def map_shared(at: Any, rank: Any, *, loc: Any = None, ip: Any = None) -> Int32:
    """The address, for the cluster, of what lies at ``at`` in the CTA of that rank."""
    operands = [(Int32, at), (Int32, rank)]
    return Int32(_asm(T.i32(), operands, "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", False, loc, ip))


@dsl_user_op
def send_4(to: Any, x: Any, y: Any, z: Any, w: Any, barrier: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Stores 16 bytes in a CTA of the cluster, whose mbarrier counts them when they are there."""
    operands = [(Int32, to), *((Uint32, v) for v in (x, y, z, w)), (Int32, barrier)]
    text = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [$0], {$1,$2,$3,$4}, [$5];"
    _asm(None, operands, text, "r,r,r,r,r,r", True, loc, ip)


@dsl_user_op
def send_2(to: Any, x: Any, y: Any, barrier: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Stores 8 bytes in a CTA of the cluster, whose mbarrier counts them when they are there."""
    operands = [(Int32, to), (Uint32, x), (Uint32, y), (Int32, barrier)]
    text = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [$0], {$1,$2}, [$3];"
    _asm(None, operands, text, "r,r,r,r", True, loc, ip)


@dsl_user_op
def send_1(to: Any, x: Any, barrier: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Stores 4 bytes in a CTA of the cluster, whose mbarrier counts them when they are there."""
    operands = [(Int32, to), (Uint32, x), (Int32, barrier)]
    text = "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [$0], $1, [$2];"
    _asm(None, operands, text, "r,r,r", True, loc, ip)


@dsl_user_op
def mbarrier_arrive_cluster(at: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Arrives at an mbarrier in any CTA of the cluster, given its address for the cluster."""
    _asm(None, [(Int32, at)], "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [$0];", "r", True, loc, ip)
