"""Compression as one Triton kernel: a program pools whole windows, some channels of each, on their own.

Tokens of the call come from its values and gates, older ones from the ring. Those are in the first windows of a row
only, which one program has; it also writes the columns of the ring that it read, so that no program overwrites what
another may still have to read.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from ..fallback import with_xla_rules
from ..launch import launch
from . import xla
from .plan import Plan


@triton.jit
def _sum(x, SLOTS: tl.constexpr):
    """Sums ``x [SLOTS, channels]`` over slots by halves: the order does not depend on which thread holds what."""
    for i in tl.static_range(SLOTS.bit_length() - 1):
        x = tl.sum(tl.reshape(x, [2, SLOTS >> (i + 1), x.shape[1]]), axis=0)
    return tl.reshape(x, [x.shape[1]])


@triton.jit
def _pool(values, gates, state, ape, start, first, channel, inside, P: tl.constexpr):
    """The entry of a window that starts at token ``start``, in a call whose first token is ``first``."""
    slot = tl.arange(0, P.slots)
    token = start + (P.ratio - P.slots) + slot
    # The window's own tokens give their second halves where there are two.
    column = tl.where(slot >= P.slots - P.ratio, P.width - P.d, 0)[:, None] + channel[None, :]
    at = (token - first).to(tl.int64)[:, None] * P.width + column
    here = (token >= first)[:, None] & inside[None, :]
    value = tl.load(values + at, mask=here, other=0.0).to(tl.float32)
    gate = tl.load(gates + at, mask=here, other=0.0).to(tl.float32)
    if start + (P.ratio - P.slots) < first:
        old = ((token >= 0) & (token < first))[:, None] & inside[None, :]
        at = (token % P.ring).to(tl.int64)[:, None] * (2 * P.width) + column
        value = tl.where(old, tl.load(state + at, mask=old, other=0.0), value)
        gate = tl.where(old, tl.load(state + at + P.width, mask=old, other=0.0), gate)
    at = (slot % P.ratio)[:, None] * P.width + column
    score = gate + tl.load(ape + at, mask=inside[None, :], other=0.0).to(tl.float32)
    score = tl.where((token >= 0)[:, None], score, float("-inf"))  # before the first window there are no tokens
    weight = tl.exp(score - tl.max(score, axis=0)[None, :])
    return tl.div_rn(_sum(weight * value, P.slots), _sum(weight, P.slots))


@triton.jit
def _compress(values, gates, state, positions, ape, layer, entries, P: tl.constexpr):
    """Grid (rows * P.groups, P.d / P.channels)."""
    row, group = (tl.program_id(0) // P.groups).to(tl.int64), tl.program_id(0) % P.groups
    values += row * P.steps * P.width
    gates += row * P.steps * P.width
    if layer is not None:
        state += tl.load(layer).to(tl.int64) * (tl.num_programs(0) // P.groups) * P.ring * (2 * P.width)
    state += row * P.ring * (2 * P.width)
    positions += row * P.steps
    entries += row * P.windows * P.d
    CHANNELS: tl.constexpr = P.channels
    GROUP: tl.constexpr = P.group
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < P.d

    first = tl.load(positions)
    for i in tl.static_range(GROUP):
        window = group * GROUP + i
        if window < P.windows:
            start = (first // P.ratio + window) * P.ratio
            last = start + P.ratio - 1 - first  # of the call's tokens the one that closes the window
            entry = tl.zeros([CHANNELS], tl.float32)
            if tl.load(positions + last, mask=last < P.steps, other=-1) >= 0:
                entry = _pool(values, gates, state, ape, start, first, channel, inside, P)
            tl.store(entries + window.to(tl.int64) * P.d + channel, entry, mask=inside)

    if group == 0:
        BLOCK: tl.constexpr = P.block
        TOKENS: tl.constexpr = P.tokens
        HALVES: tl.constexpr = P.halves
        count = 0
        for begin in tl.range(0, P.steps, BLOCK):
            step = begin + tl.arange(0, BLOCK)
            count += tl.sum((tl.load(positions + step, mask=step < P.steps, other=-1) >= 0).to(tl.int32))
        # Of a chunk longer than the ring only the last tokens stay, so that no slot is written twice.
        kept = tl.minimum(count, P.ring)
        tl.debug_barrier()  # all threads have read the ring
        for begin in tl.range(0, kept, TOKENS):
            step = count - kept + begin + tl.arange(0, TOKENS)
            keep = (step < count)[:, None] & inside[None, :]
            source = step.to(tl.int64)[:, None] * P.width + channel[None, :]
            target = ((first + step) % P.ring).to(tl.int64)[:, None] * (2 * P.width) + channel[None, :]
            for half in tl.static_range(HALVES):
                value = tl.load(values + source + half * P.d, mask=keep).to(tl.float32)
                gate = tl.load(gates + source + half * P.d, mask=keep).to(tl.float32)
                tl.store(state + target + half * P.d, value, mask=keep)
                tl.store(state + target + (P.width + half * P.d), gate, mask=keep)


def _compress_call(
    values: jax.Array,
    gates: jax.Array,
    state: jax.Array,
    positions: jax.Array,
    ape: jax.Array,
    layer: jax.Array | None,
    *,
    ratio: int,
    overlap: bool,
) -> tuple[jax.Array, jax.Array]:
    """See ``jmla.kernels.compress``."""
    if values.size == 0:
        return xla.compress(values, gates, state, positions, ape, layer, ratio=ratio, overlap=overlap)
    batch, steps, width = values.shape
    plan = Plan(steps, width, state.shape[-2], ratio, overlap)
    state, entries = launch(
        _compress,
        values,
        gates,
        state,
        positions,
        ape,
        layer,
        out=(
            jax.ShapeDtypeStruct(state.shape, jnp.float32),
            jax.ShapeDtypeStruct((batch, plan.windows, plan.d), jnp.float32),
        ),
        grid=(batch * plan.groups, -(-plan.d // plan.channels)),
        aliases={2: 0},
        num_warps=plan.warps,
        options={"enable_fp_fusion": False},  # no product and sum may become one: bits would depend on the program
        P=plan,
    )
    return entries, state


compress = with_xla_rules(_compress_call, xla.compress)
