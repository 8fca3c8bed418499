"""Sparse attention for Hopper in CuTe DSL: 64 heads a CTA, warpgroups with roles.

Two producer warpgroups gather rows, each thread through a ring of its own of 16-byte copies, and dequantise them to
halves of blocks of 64 slots that the matrix units read. The first consumer multiplies queries by keys, takes the
softmax, and accumulates the first half of the values; the second accumulates the rest, with weights that it gets
through shared memory.

Codes are not converted but placed: the bits of an e4m3 code, moved into those of a bf16, are 2^-120 times its value,
and one bf16 product with the scale completes it; a scale that is no power of two is the sum of two bf16 values, which
takes a product and an fma: both round, the first where it hardly ever shows. That leaves the values of every four codes
in the order 1, 3, 0, 2: queries are permuted alike, and the output is put back.

What logits are taken from before the exponential follows the largest one only where that has risen by 8, so that few
blocks make sums decay; weights are 2^8 at most.

CTAs that share a row form a cluster. Each sends its parts, in float16 under powers of two, to the CTAs that merge them,
some heads each, and every sum runs in the order of the shares. Where more share it than fit into a cluster, or a
cluster costs more, a second kernel adds up parts of the same form.

Here are the kernels and their launcher. The producers are in ``cute_gather.py``, the consumers in ``cute_consume.py``,
sums over a cluster in ``cute_merge.py``, what is written in ``cute_output.py`` and, rotated and quantised, in
``cute_codes.py``, the second kernel, of some forms, in ``cute_finish.py``, what all of them use in ``cute_place.py``.
"""

import functools
from collections.abc import Sequence
from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from ..cute_ptx import mbarrier_expect, mbarrier_init, thread_index
from .cute_consume import attend_left, attend_right
from .cute_finish import complete, known_before
from .cute_gather import gather
from .cute_merge import bytes_of_parts
from .cute_place import Arrays, Place, each_tile
from .cute_plan import Memory, Profile


def further(profile: Profile, more: Sequence[Any]) -> tuple[Any, Any, Any]:
    """What follows the output and its lse, of which each is there only where it is needed: see ``cute.py``."""
    given = iter(more)
    parts, masses = (next(given), next(given)) if profile.partial else (None, None)
    return parts, masses, next(given) if profile.ending is not None else None


def build(profile: Profile) -> Any:
    """The launcher of the kernel for a profile."""
    memory = Memory.of(profile)
    clustered = profile.splits > 1
    each, threads = profile.finish_heads, profile.finish_threads

    @cute.kernel
    def attend(
        q: Int64,
        pool_0: Int64,
        indices_0: Int64,
        lengths_0: Int64,
        pool_1: Int64,
        indices_1: Int64,
        lengths_1: Int64,
        sinks: Int64,
        q_scale: Int64,
        out_scale: Int64,
        cos_sin: Int64,
        out: Int64,
        lse: Int64,
        scales: Int64,
    ) -> None:
        if const_expr(profile.partial):  # the second kernel may be made ready beside this one; it waits for its end
            cute.arch.griddepcontrol_launch_dependents()
        share, first, _ = cute.arch.block_idx()
        if const_expr(not clustered):
            share, first = Int32(0), share
        thread = thread_index()
        group = cute.arch.make_warp_uniform(thread >> 7)
        buffer = SmemAllocator().allocate(memory.size, 1024)
        base = buffer.toint()
        at = Place(memory, buffer, base, share)
        if thread == 0:
            # A half is given back by those consumer warps that read it last.
            readers = 4 if profile.value_parts == 1 else 8
            for stage in range_constexpr(profile.tuning.stages):
                mbarrier_init(at.full + 8 * stage, 8)  # producer warps
                mbarrier_init(at.empty + 8 * stage, readers)
            mbarrier_init(at.asked, 1)
            if const_expr(clustered):
                mbarrier_init(at.ready, 4 * profile.splits)
                mbarrier_init(at.merged, 1 + 8)  # what others send, and the warps of the consumers
                for s in range_constexpr(profile.splits):
                    if share == s:
                        mbarrier_expect(at.merged, bytes_of_parts(profile, s))
        cute.arch.mbarrier_init_fence()
        if const_expr(clustered):
            cute.arch.cluster_arrive()
        cute.arch.sync_threads()
        pools, indices, lengths = (pool_0, pool_1), (indices_0, indices_1), (lengths_0, lengths_1)
        arrays = Arrays(q, pools, indices, lengths, sinks, q_scale, out_scale, out, lse, cos_sin=cos_sin, scales=scales)
        if group >= 2:
            cute.arch.setmaxregister_decrease(profile.registers[2])
            each_tile(profile, functools.partial(gather, profile, at, arrays), first, Int32(1))
        elif group == 0:
            cute.arch.setmaxregister_increase(profile.registers[0])
            each_tile(profile, functools.partial(attend_left, profile, at, arrays), first, Int32(0))
        else:
            cute.arch.setmaxregister_increase(profile.registers[1])
            each_tile(profile, functools.partial(attend_right, profile, at, arrays), first, Int32(0))

    @cute.kernel
    def combine(
        parts: Int64,
        masses: Int64,
        sinks: Int64,
        out_scale: Int64,
        cos_sin: Int64,
        out: Int64,
        lse: Int64,
        scales: Int64,
    ) -> None:
        head, row, _ = cute.arch.block_idx()
        thread = thread_index()
        if const_expr(each > 1):
            head, thread = head * each + thread // threads, thread % threads
        given = {"parts": parts, "masses": masses, "sinks": sinks, "out_scale": out_scale, "cos_sin": cos_sin}
        arrays = Arrays(**given, out=out, lse=lse, scales=scales)
        sink, turns = known_before(profile, arrays, row, head, thread)
        cute.arch.griddepcontrol_wait()
        complete(profile, arrays, row, head, thread, sink, turns)

    def address(x: Any) -> Any:
        return Int64(0) if x is None else x.iterator.toint()

    options = {"block": [512, 1, 1], "min_blocks_per_mp": 1, "hint_smem_base_uniform": False}
    grid = [profile.teams, 1, 1]
    if clustered:
        options["cluster"], grid = [profile.splits, 1, 1], [profile.splits, profile.teams, 1]

    @cute.jit
    def launch(
        stream: cuda.CUstream,
        q: cute.Tensor,
        pool_0: cute.Tensor,
        indices_0: cute.Tensor,
        lengths_0: Any,
        pool_1: Any,
        indices_1: Any,
        lengths_1: Any,
        sinks: Any,
        q_scale: Any,
        out_scale: Any,
        cos_sin: Any,
        out: cute.Tensor,
        lse: cute.Tensor,
        *more: Any,
    ) -> None:
        parts, masses, scales = further(profile, more)
        inputs = [q, pool_0, indices_0, lengths_0, pool_1, indices_1, lengths_1, sinks, q_scale, out_scale, cos_sin]
        results = [parts, masses, None] if const_expr(profile.partial) else [out, lse, scales]
        attend(*[address(x) for x in [*inputs, *results]]).launch(grid=grid, stream=stream, **options)
        if const_expr(profile.partial):
            combine(*[address(x) for x in (parts, masses, sinks, out_scale, cos_sin, out, lse, scales)]).launch(
                grid=[profile.heads // each, profile.rows, 1],
                block=[threads * each, 1, 1],
                smem=profile.finish_bytes,
                stream=stream,
                use_pdl=True,
            )

    return launch
